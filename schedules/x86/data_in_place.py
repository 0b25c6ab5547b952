"""Data that register tiles read where the caller has them, in `N C *X`: no block is packed.

A copy pays where data are read again: by other taps, phases, or tiles of channels. Where one register tile computes all
outputs of its positions, each element is read once. A block without a halo is contiguous in each channel, and its flat
positions follow each other in the caller's memory. Later ones are prefetched (`prefetching.mark_data`).
docs/design.md has the measurements.
"""

from __future__ import annotations

import math

from tvm_deconv.compute.direct_layout import Tile, phases_together
from tvm_deconv.compute.indexing import ROWS
from tvm_deconv.compute.phases import Geometry
from tvm_deconv.compute.storage import storage_dtype, sum_dtype
from tvm_deconv.problem import Problem
from tvm_deconv.schedules.x86.row_prefetching import data_bytes
from tvm_deconv.targets import CpuTarget

#: Bytes of data that the caches keep, next to all else.
_CACHED = 8 << 20


def supports(problem: Problem, geometry: Geometry, form: str, target: CpuTarget) -> bool:
    """Tell whether some tile in `form` reads the caller's data: one tap a phase, at the phase's own position.

    The tiles of AVX2 read a line or two of a channel at a time: what stays in caches comes as fast through a copy.
    """
    return (
        form == ROWS
        and problem.data_format == "NCX"
        and not problem.dynamic_axes
        and (target.vector_registers > 16 or data_bytes(problem) > _CACHED)
        and problem.quantization is None
        and storage_dtype(problem.dtype) == sum_dtype(problem)
        and len(geometry.runs) == 1
        and all(axis.low == axis.halo == axis.shift == 0 for axis in geometry.axes)
        and all(axis.positions == extent for axis, extent in zip(geometry.axes, geometry.data, strict=True))
    )


def supports_tile(problem: Problem, geometry: Geometry, form: str, tile: Tile, target: CpuTarget) -> bool:
    """Tell whether the register tiles of `tile` read the caller's data.

    They read each element once, and are whole in each block.
    """
    if not supports(problem, geometry, form, target):
        return False
    (runs,), extents = geometry.runs, [axis.positions for axis in geometry.axes]
    _, depth, height, width = tile.block
    contiguous = (width == extents[2] or depth == height == 1) and (height == extents[1] or depth == 1)
    return (
        contiguous
        and tile.images == max(tile.outputs) == 1
        and tile.channels >= problem.out_channels
        and math.prod(phases_together(runs, tile.phases)) == math.prod(run.count for run in runs)
        and all(whole % part == 0 for part, whole in zip(tile.block[1:], extents, strict=True))
        and depth * height * width % tile.positions == 0
    )
