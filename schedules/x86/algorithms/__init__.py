"""The algorithms for x86, one module each, and what they share."""

from tvm_deconv.schedules.contract import AnyAlgorithm
from tvm_deconv.schedules.x86.algorithms import (
    amx,
    amx_rows,
    amx_winograd,
    col2im,
    direct_channels,
    direct_folded,
    direct_groups,
    direct_inputs,
    direct_rows,
    dot,
    dot_channels,
    dot_folded,
    dot_inputs,
    dot_rows,
    dot_strassen,
    dot_winograd,
    matrix,
    strassen,
    winograd,
    winograd_rows,
)

#: In order of preference.
ALGORITHMS: tuple[AnyAlgorithm, ...] = (
    winograd.ALGORITHM,
    amx.ALGORITHM,
    amx_rows.ALGORITHM,
    amx_winograd.ALGORITHM,
    dot.ALGORITHM,
    dot_channels.ALGORITHM,
    dot_folded.ALGORITHM,
    dot_inputs.ALGORITHM,
    dot_rows.ALGORITHM,
    dot_strassen.ALGORITHM,
    dot_winograd.ALGORITHM,
    matrix.ALGORITHM,
    strassen.ALGORITHM,
    winograd_rows.ALGORITHM,
    direct_channels.ALGORITHM,
    direct_folded.ALGORITHM,
    direct_groups.ALGORITHM,
    direct_inputs.ALGORITHM,
    direct_rows.ALGORITHM,
    col2im.ALGORITHM,
)
