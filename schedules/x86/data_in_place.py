"""Data that register tiles read where the caller has them, in `N C *X`: no block is packed.

A copy pays where data are read again: by other taps, phases, or tiles of channels. Where one register tile computes all
outputs of its positions, each element is read once. A block without a halo is contiguous in each channel, and its flat
positions follow each other in the caller's memory. Later ones are prefetched (`prefetching.mark_data`).
docs/design.md has the measurements.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tvm_deconv.compute.direct_layout import Tile, phases_together
from tvm_deconv.compute.indexing import ROWS
from tvm_deconv.compute.phases import Geometry
from tvm_deconv.compute.storage import storage_dtype, sum_dtype
from tvm_deconv.problem import Array, Problem
from tvm_deconv.schedules.x86.row_prefetching import data_bytes
from tvm_deconv.targets import CpuTarget

#: Bytes of data that the caches keep, next to all else.
_CACHED = 8 << 20


def supports(problem: Problem, geometry: Geometry, form: str, target: CpuTarget) -> bool:
    """Tell whether some tile in `form` reads the caller's data: phases have one tap each.

    The tiles of AVX2 read a line or two of a channel at a time: what stays in caches comes as fast through a copy.
    """
    return (
        form == ROWS
        and problem.data_format == "NCX"
        and not problem.dynamic_axes
        and (target.vector_registers > 16 or data_bytes(problem) > _CACHED)
        and problem.quantization is None
        and storage_dtype(problem.dtype) == sum_dtype(problem)
        and geometry.pointwise
        and all(axis.positions == extent for axis, extent in zip(geometry.axes, geometry.data, strict=True))
    )


def supports_tile(problem: Problem, geometry: Geometry, form: str, tile: Tile, target: CpuTarget) -> bool:
    """Tell whether the register tiles of `tile` read the caller's data."""
    if max(tile.outputs) > 1 or not supports(problem, geometry, form, target):
        return False
    phases = math.prod(phases_together(geometry.runs[0], tile.phases))
    return bool(reads_once(geometry, tile.block, tile.channels, tile.positions, phases))


def reads_once(
    geometry: Geometry, block: Sequence[Array | int], channels: Array | int, positions: Array | int, phases: Array | int
) -> Array | bool:
    """Tell whether register tiles read each element once, and are whole in each block, if `supports` is true.

    They have so many `channels`, `positions` and `phases`, and a `block` images and positions along three axes: of one
    tile, or arrays for several. A block must be contiguous in each channel.
    """
    (runs,), extents = geometry.runs, [axis.positions for axis in geometry.axes]
    images, depth, height, width = block
    contiguous = ((width == extents[2]) | (depth * height == 1)) & ((height == extents[1]) | (depth == 1))
    whole = (extents[0] % depth == 0) & (extents[1] % height == 0) & (extents[2] % width == 0)
    once = (channels >= geometry.out_channels) & (phases == math.prod(run.count for run in runs))
    return (images == 1) & contiguous & whole & once & (depth * height * width % positions == 0)
