"""The algorithms for CUDA devices."""

from tvm_deconv.schedules.contract import AnyAlgorithm
from tvm_deconv.schedules.cuda import (
    gathered,
    generic,
    held,
    held_merged,
    held_merged_turned,
    held_turned,
    merged,
    narrow,
    product,
    tensor,
    turned,
    wgmma,
)

#: In order of preference.
ALGORITHMS: tuple[AnyAlgorithm, ...] = (
    narrow.ALGORITHM,
    tensor.ALGORITHM,
    merged.ALGORITHM,
    wgmma.ALGORITHM,
    gathered.ALGORITHM,
    held.ALGORITHM,
    held_merged.ALGORITHM,
    turned.ALGORITHM,
    held_turned.ALGORITHM,
    held_merged_turned.ALGORITHM,
    product.ALGORITHM,
    generic.ALGORITHM,
)
