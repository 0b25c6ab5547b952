"""The candidates of `compute.col2im`, and their costs by arithmetic."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from tvm_deconv.compute.col2im import ChannelColumns, ColumnTile, Places, RowColumns, has_short_rows, places, widens
from tvm_deconv.compute.phases import Geometry
from tvm_deconv.problem import Problem, element_bytes
from tvm_deconv.problem.arithmetic import ceil_div
from tvm_deconv.schedules.x86.costs import LAST_CACHE, Costs, costs_of
from tvm_deconv.schedules.x86.plans import TilePlan
from tvm_deconv.schedules.x86.register_tiles import LATENCY_ACCUMULATORS
from tvm_deconv.schedules.x86.row_prefetching import comes_from_memory, data_bytes
from tvm_deconv.schedules.x86.tiles import ENUMERATIONS, steps
from tvm_deconv.schedules.x86.vectors import accumulator_lanes
from tvm_deconv.targets import CpuTarget

#: Vectors of columns of a register tile, at most.
_MOST_VECTORS = 4
#: Lines of a set of the first-level cache, and bytes from a line to the next one of its set.
_WAYS, _WAY_BYTES = 8, 4096
#: Cycles to add a vector of columns, further ones to mask it, to finish a vector of outputs, and to start on a single
#: output, whose channels are stored one by one.
_ADDED, _MASKED, _FINISHED, _SINGLE = 1.0, 0.7, 2.0, 10.0
#: Cycles to keep a vector of columns, and further ones beyond the second-level cache and beyond a share of the last.
_KEPT, _FAR, _FARTHER = 2.0, 1.5, 20.0
#: Cycles to start on a row of packed data, and on one of outputs, and to finish a vector of these; the part of the cost
#: of a transposed vector that interleaving one takes, for each time that two phases become one stream.
_ROW, _END, _STORED, _SHUFFLED = 10.0, 20.0, 1.0, 0.7
#: Further cycles to pack a vector that comes from far, and a piece that comes from memory. So many second-level caches
#: of data are not far: parts of them stay in one.
_FETCHED, _PIECE, _NEAR = 3.5, 40.0, 4


@dataclass(frozen=True, slots=True)
class Plan(TilePlan[ColumnTile]):
    """The knobs of a kernel; data are never shared, and vectors never halved."""

    tile_type = ColumnTile


@lru_cache(maxsize=ENUMERATIONS)
def candidates(problem: Problem, target: CpuTarget) -> list[tuple[float, Plan]]:
    """Return all plans to try, cheapest first, each with its cost: cycles per useful product, relative."""
    geometry, lanes = Geometry.of(problem), accumulator_lanes(problem, target)
    positions = geometry.batch * math.prod(axis.positions for axis in geometry.axes)
    useful = positions * geometry.taps * problem.groups * problem.in_channels * problem.out_channels / (2 * lanes)
    found = [
        (_cycles(layout_of(problem, tile, lanes), target) / max(useful, 1), Plan(tile, share_data=False))
        for tile in _tiles(problem, target)
    ]
    return sorted(found, key=lambda candidate: candidate[0])


def layout_of(problem: Problem, tile: ColumnTile, lanes: int) -> ChannelColumns | RowColumns:
    """Return the layout of a product, by which axis of the data is last."""
    return (ChannelColumns if problem.data_format == "NXC" else RowColumns)(problem, tile, lanes)


def _tiles(problem: Problem, target: CpuTarget) -> Iterator[ColumnTile]:
    """Yield the tiles to try: each block with the register tiles that have registers for all accumulators."""
    lanes, last = accumulator_lanes(problem, target), problem.data_format == "NXC"
    for block in _blocks(problem):
        smallest = ColumnTile(*block, 1 if last else lanes, lanes if last else 1)
        if not has_short_rows(problem, smallest):
            continue
        layout = layout_of(problem, smallest, lanes)
        longest = min(layout.runs[1], _positions_in_sets(problem)) if last else layout.columns
        for vectors in range(1, _MOST_VECTORS + 1):
            most = (target.vector_registers - 2 - vectors) // vectors  # with all of them LLVM spills some
            for others in range(1, min(most, longest) + 1):
                register_tile = (others, vectors * lanes) if last else (vectors * lanes, others)
                tile = ColumnTile(*block, *register_tile)
                if has_short_rows(problem, tile):
                    yield tile


def _positions_in_sets(problem: Problem) -> int:
    """Return how many neighbouring positions, channels last, have lines that a set of the first-level cache holds."""
    return _WAYS * _WAY_BYTES // math.gcd(problem.in_channels * element_bytes(problem.accumulate_dtype), _WAY_BYTES)


def _blocks(problem: Problem) -> Iterator[tuple[int, int, int, int]]:
    """Yield the blocks to try; an axis is cut only if every axis outside of it is cut to one."""
    batch = max(problem.batch, 1)
    depth, height, width = (axis.count for axis in places(problem, ColumnTile(1, 1, 1, 1, 1, 1)))
    blocks = [(1, 1, 1, w) for w in steps(width)]
    blocks += [(1, 1, h, width) for h in steps(height)]
    blocks += [(1, d, height, width) for d in steps(depth)]
    blocks += [(n, depth, height, width) for n in steps(batch) if batch % n == 0]
    yield from dict.fromkeys(blocks)


def _cycles(layout: ChannelColumns | RowColumns, target: CpuTarget) -> float:
    """Return the cycles of a call."""
    problem, costs, channels = layout.problem, costs_of(target), layout.problem.in_channels
    size_of = element_bytes(problem.accumulate_dtype)
    if isinstance(layout, RowColumns):
        packed, near, sums = channels * _packed(layout, target), channels * layout.pitch, _row_sums(layout, costs)
    elif widens(problem):
        packed, near = _widened(layout, costs), channels * layout.tile.positions
        sums = _chunk_sums(layout) + _narrowed(layout)
    else:
        packed, near, sums = 0.0, 0, _chunk_sums(layout)
    vectors = layout.vectors
    products, loads = vectors * layout.broadcasts, vectors + layout.broadcasts
    step = max(costs.load * loads, products, (products + loads + 1) / costs.issue, LATENCY_ACCUMULATORS + costs.slack)
    if vectors * layout.lanes * channels * size_of > target.l1_bytes // 2:
        step = max(step, costs.panel * vectors)
    made = layout.tiles * layout.panels * products / 2 * (step * channels / products + costs.reduction)
    size = (layout.held + near) * size_of
    far = _FAR * (size > target.l2_bytes) + _FARTHER * (size > LAST_CACHE // 4)
    kept = (_KEPT * layout.held + far * (layout.held + near)) / layout.lanes
    return layout.tasks * (packed + made + kept + costs.task) + layout.batch * sums


def _widened(layout: ChannelColumns, costs: Costs) -> float:
    """Return the cycles to make float32 of a block's data, a register tile at a time."""
    (counts, length), positions = layout.runs, layout.tile.positions
    vectors = ceil_div(positions * layout.problem.in_channels, layout.lanes)
    return math.prod(counts) * ceil_div(length, positions) * (costs.pack * vectors + _ROW)


def _packed(layout: RowColumns, target: CpuTarget) -> float:
    """Return the cycles to pack a channel of a block's data."""
    problem, costs, (counts, length) = layout.problem, costs_of(target), layout.runs
    kept = _NEAR * target.l2_bytes / max(data_bytes(problem), 1)
    vector = costs.pack + _FETCHED * max(0.0, 1 - kept)
    piece = _ROW + _PIECE * comes_from_memory(problem)
    return math.prod(counts) * (vector * ceil_div(length, layout.lanes) + piece)


def _row_sums(layout: RowColumns, costs: Costs) -> float:
    """Return the cycles to make the outputs of an image of its columns."""
    *outer, last = layout.axes
    channels = layout.problem.groups * layout.problem.out_channels
    rows = channels * math.prod(axis.output for axis in outer)
    taps = channels * math.prod(axis.read for axis in outer)
    added = last.kernel * (_ADDED + _MASKED * layout.masked)
    finished = last.stride * (_STORED + _SHUFFLED * costs.transpose * math.log2(last.stride))
    vectors = last.blocks * ceil_div(last.block, layout.lanes)
    return vectors * (taps * added + rows * finished) + rows * last.blocks * _END


def _chunk_sums(layout: ChannelColumns) -> float:
    """Return the cycles to make the outputs of an image of its columns."""
    *outer, last = layout.axes
    rows, taps = math.prod(axis.output for axis in outer), math.prod(axis.read for axis in outer)
    chunks = max(_whole(last) - last.blocks * layout.spilled, 0) * layout.follows
    vectors = ceil_div(layout.problem.out_channels, layout.lanes)
    single = last.output - chunks * last.stride
    added = chunks * last.taps * layout.chunk_vectors + (last.read - chunks * last.kernel) * vectors
    finished = (chunks * layout.chunk_vectors + single * vectors) * _FINISHED
    stored = single * (_SINGLE + layout.problem.out_channels)
    return taps * added * _ADDED + rows * (finished + stored)


def _narrowed(layout: ChannelColumns) -> float:
    """Return the cycles to round the outputs of an image, row by row."""
    *outer, last = layout.axes
    rows = math.prod(axis.output for axis in outer) * last.blocks
    return rows * (_STORED * ceil_div(last.block * layout.chunk, layout.lanes) + _END)


def _whole(axis: Places) -> int:
    """Return the places of an `axis` that have all taps and outputs."""
    first, end = axis.whole
    return max(min(end, axis.last + 1) - max(first, axis.first), 0)
