"""The candidates of `compute.col2im`, and their costs by arithmetic."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from tvm_deconv.compute.col2im import ColumnLayout, ColumnTile, Places, places
from tvm_deconv.compute.phases import Geometry
from tvm_deconv.problem import Problem, element_bytes
from tvm_deconv.problem.arithmetic import ceil_div
from tvm_deconv.schedules.x86.costs import LAST_CACHE, costs_of
from tvm_deconv.schedules.x86.plans import TilePlan
from tvm_deconv.schedules.x86.register_tiles import LATENCY_ACCUMULATORS
from tvm_deconv.schedules.x86.tiles import ENUMERATIONS, steps
from tvm_deconv.schedules.x86.vectors import accumulator_lanes
from tvm_deconv.targets import CpuTarget

#: Vectors of columns of a register tile, at most.
_MOST_VECTORS = 4
#: Cycles to add a vector of columns to its chunk, to finish a chunk's vector, and to add a column to a single output.
_ADDED, _FINISHED, _SINGLE = 1.0, 2.0, 1.5
#: Cycles to keep a vector of columns, and further ones beyond the second-level cache and beyond a share of the last.
_KEPT, _FAR, _FARTHER = 2.0, 1.5, 10.0


@dataclass(frozen=True, slots=True)
class Plan(TilePlan[ColumnTile]):
    """The knobs of a kernel; data are never shared, and vectors never halved."""

    tile_type = ColumnTile


@lru_cache(maxsize=ENUMERATIONS)
def candidates(problem: Problem, target: CpuTarget) -> list[tuple[float, Plan]]:
    """Return all plans to try, cheapest first, each with its cost: cycles per useful product, relative."""
    geometry, lanes = Geometry.of(problem), accumulator_lanes(problem, target)
    positions = geometry.batch * math.prod(axis.positions for axis in geometry.axes)
    useful = positions * geometry.taps * problem.in_channels * problem.out_channels / (2 * lanes)
    found = [
        (_cycles(ColumnLayout(problem, tile, lanes), target) / max(useful, 1), Plan(tile, share_data=False))
        for tile in _tiles(problem, target)
    ]
    return sorted(found, key=lambda candidate: candidate[0])


def _tiles(problem: Problem, target: CpuTarget) -> Iterator[ColumnTile]:
    """Yield the tiles to try: each block with all register tiles whose positions lie in a piece of its data."""
    lanes = accumulator_lanes(problem, target)
    for block in _blocks(problem):
        _, length = ColumnLayout(problem, ColumnTile(*block, 1, 1), lanes).runs
        for vectors in range(1, _MOST_VECTORS + 1):
            most = (target.vector_registers - 2 - vectors) // vectors  # with all of them LLVM spills some
            for positions in range(1, min(most, length) + 1):
                yield ColumnTile(*block, positions, vectors)


def _blocks(problem: Problem) -> Iterator[tuple[int, int, int, int]]:
    """Yield the blocks to try; an axis is cut only if every axis outside of it is cut to one."""
    batch = max(problem.batch, 1)
    depth, height, width = (axis.count for axis in places(problem, ColumnTile(1, 1, 1, 1, 1, 1)))
    blocks = [(1, 1, 1, w) for w in steps(width)]
    blocks += [(1, 1, h, width) for h in steps(height)]
    blocks += [(1, d, height, width) for d in steps(depth)]
    blocks += [(n, depth, height, width) for n in steps(batch) if batch % n == 0]
    yield from dict.fromkeys(blocks)


def _cycles(layout: ColumnLayout, target: CpuTarget) -> float:
    """Return the cycles of a call."""
    problem, tile = layout.problem, layout.tile
    costs = costs_of(target)
    counts, length = layout.runs
    products, loads = tile.positions * tile.vectors, tile.positions + tile.vectors
    step = max(costs.load * loads, products, (products + loads + 1) / costs.issue, LATENCY_ACCUMULATORS + costs.slack)
    if tile.vectors * layout.lanes * problem.in_channels * element_bytes(problem.dtype) > target.l1_bytes // 2:
        step = max(step, costs.panel * tile.vectors)
    reductions = math.prod(counts) * ceil_div(length, tile.positions) * layout.panels
    made = reductions * products / 2 * (step * problem.in_channels / products + costs.reduction)
    size = layout.held * element_bytes(problem.dtype)
    kept = _KEPT + _FAR * (size > target.l2_bytes) + _FARTHER * (size > LAST_CACHE // 4)
    return layout.tasks * (made + kept * layout.held / layout.lanes + costs.task) + layout.batch * _sums(layout)


def _sums(layout: ColumnLayout) -> float:
    """Return the cycles to make the outputs of an image of its columns."""
    *outer, last = layout.axes
    added, finished = math.prod(axis.kernel for axis in outer) * last.taps, math.prod(axis.stride for axis in outer)
    chunks = math.prod(map(_whole, layout.axes))
    single = math.prod(axis.count for axis in layout.axes) - chunks
    of_chunk = layout.chunk_vectors * (added * _ADDED + finished * _FINISHED)
    return chunks * of_chunk + single * layout.columns * _SINGLE


def _whole(axis: Places) -> int:
    """Return the places of an `axis` that have all taps and outputs."""
    first, end = axis.whole
    return max(min(end, axis.last + 1) - max(first, axis.first), 0)
