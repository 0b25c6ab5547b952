"""The default tiles of the direct definitions, by arithmetic on the target's registers and caches.

A register tile of ``c`` channels by ``v`` vectors of positions (or ``p`` positions by ``v`` vectors of channels)
keeps ``c * v`` accumulators, ``v`` vectors of the operand that is loaded, and one broadcast: ``c*v + v + 1``
registers, 16 with AVX2 and 32 with AVX-512.  One step of the reduction issues ``c * v`` multiply-adds and ``c + v``
loads.  Four limits follow, in cycles a step: two multiply-adds a cycle; two loads a cycle; the latency of four
cycles, which eight accumulators hide; and, where a block exceeds the first-level cache, the ``v`` vectors that come
from the second at half a vector a cycle.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from typing import TypeVar

from tvm_deconv.schedules.x86 import register_epilogue
from tvm_deconv.schedules.x86.interleave import MAX_STREAMS

from tvm_deconv.compute.direct_layout import Tile, block_extents, product_count
from tvm_deconv.compute.indexing import GROUPS, ROWS, spans, tiles_of_channels
from tvm_deconv.compute.matrix_layout import MatrixTile
from tvm_deconv.compute.phases import AxisPhases, Geometry, axis_rows
from tvm_deconv.problem import Problem
from tvm_deconv.targets import CpuTarget

_AnyTile = TypeVar("_AnyTile")

#: Winograd's m and products at most, along each of several axes, and along one alone: with more, rounding errors grow
#: past what is allowed.
SEVERAL, ALONE = (4, 6), (6, 7)
#: Independent accumulators that hide the latency of a multiply-add: four cycles, two a cycle.
LATENCY_ACCUMULATORS = 8
#: Lists of plans that are kept: a build asks repeatedly for those of a problem and of the one with the nearest record.
ENUMERATIONS = 8
#: A kernel with fewer independent tasks than this also splits its channel tiles over threads.
FEW_TASKS = 16
#: What a register tile takes, by measurement, of its cost by arithmetic and what breaks ties.
_TIES = 0.87
#: Cycles of work outside of the reduction: to pack a vector, to finish a vector of the output and copy it, or to store
#: it from its accumulators, to start on another piece of the caller's memory, and to start a task; and, where vectors
#: are taken from the caller's memory, or left there, an element at a time, the lanes for which that is counted again.
_PACK = 4.0
_FINISH = 3.0
_REGISTER_FINISH = 1.0
_PIECE = 100.0
_TASK = 100.0
_GATHERED = 4
_SCATTERED = 2
#: And to make a vector of sums of rows, or to take one of results into the sums that are the output; the share of what
#: it takes to pack a vector where sums are made of it while it is near.
_SUM = 1.5
_NEAR = 0.75
#: What a block holds should stay within this share of the second-level cache; the cost of as much again beyond it.
_L2_SHARE = 0.5
_OVERFULL = 0.2
_LINE_BITS = 512


def knobs_of(tile: Tile | MatrixTile, share_data: bool, halves: bool) -> dict[str, int]:
    """Return the knobs of a plan, of any definition; without those that are as usual, where they may be."""
    usual = {"halves": 0, **{part.name: part.default for part in fields(tile)}}
    found = {**asdict(tile), "share_data": int(share_data), "halves": int(halves)}
    return {name: value for name, value in found.items() if value != usual.get(name)}


def parts_of(knobs: Mapping[str, int], tile: Callable[..., _AnyTile]) -> tuple[_AnyTile, bool, bool]:
    """Return the tile of `knobs`, whether data are shared, and whether vectors are halves: see `knobs_of`.

    Raises KeyError or TypeError where they are not those of a plan with such a `tile`.
    """
    numbers = dict(knobs)
    share_data, halves = bool(numbers.pop("share_data")), bool(numbers.pop("halves", 0))
    return tile(**numbers), share_data, halves


@dataclass(frozen=True, slots=True)
class Plan:
    """The knobs of a schedule: the tile, and whether the channel tiles of a block are tasks of their own.

    If `halves`, vectors are half as wide as the target's.
    """

    tile: Tile
    share_data: bool
    halves: bool = False

    @property
    def knobs(self) -> dict[str, int]:
        """The plan as plain integers: what manifests and logs hold; see `knobs_of`."""
        return knobs_of(self.tile, self.share_data, self.halves)

    @staticmethod
    def from_knobs(knobs: Mapping[str, int]) -> Plan:
        """Return the plan whose knobs these are."""
        return Plan(*parts_of(knobs, Tile))

    def tasks(self, problem: Problem, form: str) -> int:
        """Independent tasks of a call."""
        geometry = Geometry.of(problem)
        block = (self.tile.images, self.tile.depth, self.tile.height, self.tile.width)
        extents = (geometry.batch, *(axis.positions for axis in geometry.axes))
        groups, channels = tiles_of_channels(geometry, form, self.tile)
        count = groups * math.prod(-(-extent // part) for extent, part in zip(extents, block, strict=True))
        return count * channels if self.share_data else count


@dataclass(frozen=True, slots=True)
class Shape:
    """A register tile, and its cost: cycles an instruction-perfect kernel takes for one useful product, relative.

    `near` is the cost while the block stays in the first-level cache, `far` where it does not.
    """

    channels: int
    positions: int
    phases: int
    near: float
    far: float


def register_tiles(
    geometry: Geometry,
    form: str,
    target: CpuTarget,
    lanes: int,
    minor_stride: int | None,
    streams_filter: bool,
    row_phases: int = 0,
) -> list[Shape]:
    """Every register tile that fits, with its cost.

    `minor_stride` bounds the channels of an interleaved chunk; `streams_filter`: the filter exceeds the caches. Tiles
    of `row_phases` phases, if that is not 0, hold vectors of the output.
    """
    shapes = []
    most_phases = max((runs[1].count * runs[2].count for runs in geometry.runs), default=1)
    row_taps = min((run.taps for run in geometry.axes[2].runs), default=1)
    # Of the taps of a row all but one read vectors that lie across two lines, which costs a load more.
    crossing = 1 + (row_taps - 1) / row_taps * target.vector_bits / _LINE_BITS if form == ROWS else 1.0
    for vectors, phases in itertools.product(range(1, target.vector_registers // 2), _divisors(most_phases)):
        scalars = (target.vector_registers - 1 - vectors) // vectors
        for broadcast in range(phases, scalars + 1, phases):
            one_phase = broadcast // phases
            if form == ROWS:
                channels, positions = one_phase, vectors * lanes
            else:
                channels, positions = vectors * lanes, one_phase
            if minor_stride is not None and channels > 1 and channels * minor_stride > MAX_STREAMS:
                continue
            some = form == ROWS and 1 < channels < geometry.out_channels
            if phases > 1 and some and (not row_phases or phases % row_phases):
                continue  # phases serve where the channels of one do not fill the registers, or their results the cache
            products = broadcast * vectors
            loads = broadcast + vectors * crossing
            if form == GROUPS:  # nothing is broadcast: every product loads a vector of data
                loads = products + vectors
            extent = geometry.groups if form == GROUPS else geometry.out_channels
            padded = -(-extent // channels) * channels / extent
            # Among equals: each vector is a line of the first cache that is missed, each broadcast a load, and, where
            # the filter is streamed from far away, a miss as well.
            padded *= 1 + ((0.4 if streams_filter else 0.15) * broadcast + 0.5 * vectors) / products
            near = max(1.0, loads / products, LATENCY_ACCUMULATORS / products)
            # The taps of a row read the same lines of the second level, one after the other.
            far = max(near, 4 * vectors / products / (row_taps if form == ROWS else 1))
            shapes.append(Shape(channels, positions, phases, padded * near, padded * far))
    return shapes


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def steps(extent: int) -> list[int]:
    """Block extents worth trying: powers of two, three times them, and the whole."""
    sizes = {extent}
    for base in (1, 3):
        size = base
        while size < extent:
            sizes.add(size)
            size *= 2
    # The same number of blocks with less left over in the last one.
    return sorted({-(-extent // -(-extent // size)) for size in sizes})


def outputs_along(axis: AxisPhases, most: tuple[int, int]) -> list[int]:
    """Winograd's m worth trying along `axis`, with `most` outputs and products; none where no taps are neighbours."""
    taps = max((run.taps for run in axis.runs if run.taps > 1 and run.x_step == 1), default=0)
    most_outputs = min(most[0], most[1] + 1 - taps, axis.positions) if taps else 0
    return [*range(2, most_outputs + 1)]


def outer_outputs(geometry: Geometry) -> list[tuple[int, int]]:
    """Winograd's m worth trying along the first two axes: along either, or the same along both."""
    first, second = (outputs_along(axis, ALONE) for axis in geometry.axes[:2])
    both = set(outputs_along(geometry.axes[0], SEVERAL)).intersection(outputs_along(geometry.axes[1], SEVERAL))
    return [*((1, m) for m in second), *((m, 1) for m in first), *((m, m) for m in sorted(both))]


def blocks(geometry: Geometry, row_unit: int, outputs: tuple[int, int] = (1, 1)) -> Iterator[tuple[int, int, int, int]]:
    """Blocks worth trying: a longer axis is cut only where everything outside of it is cut to one.

    A row that is cut is cut into multiples of `row_unit` positions, and so is one that a call may make longer. Where
    Winograd's transforms make tiles of `outputs` along the first two axes, blocks take whole ones.
    """
    depth, height, width = (axis.positions for axis in geometry.axes)
    if geometry.dynamic[2]:
        width = -(-width // row_unit) * row_unit

    def whole(axis: int, positions: int) -> int:
        shared = int(geometry.axes[axis].shift > 0)  # of the positions that the outputs take
        tiles = -(-(positions + shared) // outputs[axis])
        return min(tiles * outputs[axis] - shared, geometry.axes[axis].positions)

    for w in steps(width):
        yield 1, whole(0, 1), whole(1, 1), min(-(-w // row_unit) * row_unit, width)
    for h in steps(height):
        yield 1, whole(0, 1), whole(1, h), width
    for d in steps(depth):
        yield 1, whole(0, d), height, width
    for n in steps(geometry.batch):
        yield n, depth, height, width


def _positions(geometry: Geometry, form: str, tile: Tile, lanes: int) -> int:
    """Flattened positions that a block computes for each point, to whole register tiles."""
    extents = block_extents(geometry, tile)
    taken = spans(geometry, (tile.depth, tile.height, tile.width))
    depth, height, width = (-(-span // m) for span, m in zip(taken, tile.outputs, strict=True))
    row = -(-tile.width // lanes) * lanes + width - tile.width if form == ROWS else width
    rows = ((tile.images - 1) * extents[0] + depth - 1) * extents[1] + height - 1
    return -(-(rows * extents[2] + row) // tile.positions) * tile.positions


def _footprint(geometry: Geometry, form: str, tile: Tile, lanes: int, element: int) -> tuple[int, int]:
    """Bytes of a block's packed data, and of the results of one channel tile before they are interleaved."""
    phases = math.prod(axis.stride for axis in geometry.axes)
    packed = geometry.in_channels * tile.images * math.prod(block_extents(geometry, tile)) * element
    if form == GROUPS:
        packed *= tile.channels
    return packed, phases * tile.channels * _positions(geometry, form, tile, lanes) * element


@dataclass(frozen=True, slots=True)
class _Work:
    """What a position of a block asks for, that is a tile of Winograd's m along axes with transforms.

    `products` of a pair of channels, `data` that are packed, `sums` of those of an input channel, and at most `results`
    of a phase of an output channel.
    """

    products: int
    data: int
    sums: int
    results: int

    @staticmethod
    def of(geometry: Geometry, outputs: tuple[int, int]) -> _Work:
        """Count what `outputs` along the first two axes ask for."""
        rows = [
            [axis_rows(axis, run, 1, m) for run in axis.runs]
            for axis, m in zip(geometry.axes, (*outputs, 1), strict=True)
        ]
        counts = [[product_count(row, m) for row in of_axis] for of_axis, m in zip(rows, outputs, strict=False)]
        as_they_are = [
            sum(count for row, count in zip(of_axis, number, strict=True) if not row.transformed)
            for of_axis, number in zip(rows, counts, strict=False)
        ]
        taps = [
            sum(row.run.count * row.taps * product_count(row, m) for row in of_axis)
            for of_axis, m in zip(rows, (*outputs, 1), strict=True)
        ]
        return _Work(
            math.prod(taps),
            math.prod(outputs),
            math.prod(map(sum, counts)) - math.prod(as_they_are),
            math.prod(max(number, default=1) for number in counts),
        )


@lru_cache(maxsize=ENUMERATIONS)
def candidates(problem: Problem, form: str, winograd: bool, target: CpuTarget, lanes: int) -> list[tuple[float, Plan]]:
    """Every plan worth considering with its cost by arithmetic (cycles a useful product, relative), cheapest first.

    If `winograd`, those with its transforms along the first two axes.
    """
    choices = Geometry.choices(problem)
    found = [
        (cost * geometry.taps / max(choices[0].taps, 1), plan)
        for geometry in choices
        for outputs in (outer_outputs(geometry) if winograd else [(1, 1)])
        for cost, plan in _candidates(problem, geometry, form, outputs, target, lanes)
    ]
    return sorted(found, key=lambda candidate: candidate[0])


def _candidates(
    problem: Problem, geometry: Geometry, form: str, outputs: tuple[int, int], target: CpuTarget, lanes: int
) -> list[tuple[float, Plan]]:
    element = target.vector_bits // 8 // lanes
    interleaves_channels = form == ROWS and problem.data_format == "NXC"
    minor_stride = geometry.axes[2].stride if interleaves_channels else None
    phases = math.prod(axis.stride for axis in geometry.axes)
    filter_bytes = geometry.groups * geometry.in_channels * geometry.out_channels * geometry.taps * element
    useful = geometry.batch * math.prod(axis.positions for axis in geometry.axes)
    streams_filter = filter_bytes > target.l2_bytes // 2
    # Vectors that are not contiguous in the caller's arrays are taken, and left, an element at a time.
    foreign = (problem.data_format == "NCX") != (form == ROWS)
    pack = _PACK * (lanes / _GATHERED if foreign and problem.groups * problem.in_channels > 1 else 1.0)
    finish = _FINISH * (lanes / _SCATTERED if foreign and problem.groups * problem.out_channels > 1 else 1.0)
    row_phases = geometry.axes[2].stride if form == ROWS and register_epilogue.supports(problem, geometry, lanes) else 0
    shapes = register_tiles(geometry, form, target, lanes, minor_stride, streams_filter, row_phases)
    work = _Work.of(geometry, outputs)
    finish += _SUM * (work.results - 1)

    found: list[tuple[float, Plan]] = []
    for block in dict.fromkeys(blocks(geometry, lanes if form == ROWS else 1, outputs)):
        for shape in shapes:
            tile = Tile(*block, shape.channels, shape.positions, shape.phases, geometry.uncropped, *outputs)
            stored = row_phases > 0 and register_epilogue.supports_tile(problem, geometry, tile, lanes)
            positions = _positions(geometry, form, tile, lanes)
            count = -(-geometry.batch // tile.images) * math.prod(
                -(-axis.positions // b) for axis, b in zip(geometry.axes, block[1:], strict=True)
            )
            packed, results = _footprint(geometry, form, tile, lanes, element)
            outside = (pack * work.data * (_NEAR if work.sums else 1.0) + _SUM * work.sums) * packed / element
            # Of the sums, the products of a point need its own.
            packed = packed * max(work.data, work.sums) // work.results
            results = 0 if stored else results * work.results
            cost = (shape.near if packed <= target.l1_bytes // 2 else shape.far) * count * positions / useful
            cost *= work.products / max(geometry.taps, 1)
            cost *= 1 + _OVERFULL * max(0.0, (packed + results) / (target.l2_bytes * _L2_SHARE) - 1)
            # A filter that does not stay there is read again for every block: the longer the block the better.
            if streams_filter:
                cost *= 1 + lanes / positions
            # Work outside of the reduction: packing with its halo, interleaving, copying, the setup of a task.
            channels = geometry.out_channels * (tile.channels if form == GROUPS else 1)
            made = phases * channels * tile.images * math.prod(block[1:])
            outside = (outside + (_REGISTER_FINISH if stored else finish) * made) / lanes + _TASK
            # What is contiguous in the caller's arrays is fetched ahead; each piece starts with a miss.
            if problem.data_format == "NCX" and not all(
                axis.positions <= size for axis, size in zip(geometry.axes, block[1:], strict=True)
            ):
                whole = tile.width >= geometry.axes[2].positions
                pieces = tile.images if whole else tile.images * tile.depth * tile.height
                outside += _PIECE * pieces * (geometry.in_channels + channels)
            inside = positions * channels * geometry.in_channels * work.products / (2 * lanes)
            cost *= _TIES + outside / max(inside, 1)
            tasks = count * tiles_of_channels(geometry, form, tile)[0]
            # Sums of rows are many: they are kept for all blocks only where that makes more tasks.
            alone = work.sums > 0 and tile.channels >= geometry.out_channels
            found.append((cost, Plan(tile, tasks < FEW_TASKS and not alone)))
    return found
