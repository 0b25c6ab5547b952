"""The default tiles of the matrix definition, by arithmetic on the target's registers and caches.

Costs are cycles per useful product of the direct algorithm, relative to two vector multiply-adds a cycle, so that they
compare with those of `tiles` and fall below 1 where Winograd's transforms save more products than they cost.

A register tile of ``r`` rows by ``v`` vectors keeps ``r*v`` accumulators, ``v`` vectors of the filter and one
broadcast.  A step of the reduction issues ``r*v`` multiply-adds and ``r + v`` loads.  The rows of one product stay
in the second-level cache next to a panel of the filter, ``v`` vectors of which a step reads.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from tvm_deconv.schedules.x86.tiles import (
    ALONE,
    ENUMERATIONS,
    FEW_TASKS,
    LATENCY_ACCUMULATORS,
    SEVERAL,
    knobs_of,
    outputs_along,
    parts_of,
    steps,
)

from tvm_deconv.compute.indexing import spans
from tvm_deconv.compute.matrix_layout import (
    MatrixTile,
    block_positions,
    contiguous_phases,
    packs_rows,
    part_channels,
    row_channels,
    row_unit,
)
from tvm_deconv.compute.phases import Geometry, axis_rows
from tvm_deconv.compute.strassen import STRASSEN
from tvm_deconv.problem import Problem
from tvm_deconv.targets import CpuTarget

#: Cycles per vector of work outside of the products: moving one through the caches, and what a stage does with it.
_MOVE = 2.0
_TRANSPOSE = 5.0
_TRANSFORM = 1.5
_FAR = 10.0
_TASK = 2000.0
_PANEL = 3.0
#: Register tiles tried for each number of vectors.
_ROW_CHOICES = 4
#: Bytes a cycle from beyond the second-level cache.
_FAR_BYTES = 8.0


@dataclass(frozen=True, slots=True)
class MatrixPlan:
    """The knobs of a schedule: the tile, and whether the channel tiles of a block are tasks of their own.

    If `halves`, vectors are half as wide as the target's.
    """

    tile: MatrixTile
    share_data: bool
    halves: bool = False

    @property
    def knobs(self) -> dict[str, int]:
        """The plan as plain integers: what manifests and logs hold; see `knobs_of`."""
        return knobs_of(self.tile, self.share_data, self.halves)

    @staticmethod
    def from_knobs(knobs: Mapping[str, int]) -> MatrixPlan:
        """Return the plan whose knobs these are."""
        return MatrixPlan(*parts_of(knobs, MatrixTile))

    def tasks(self, problem: Problem) -> int:
        """Independent tasks of a call."""
        geometry = Geometry.of(problem)
        count = geometry.groups * _blocks(geometry, self.tile)
        return count * -(-geometry.out_channels // self.tile.channels) if self.share_data else count


def _blocks(geometry: Geometry, tile: MatrixTile) -> int:
    extents = (geometry.batch, *(axis.positions for axis in geometry.axes))
    return math.prod(-(-extent // block) for extent, block in zip(extents, tile.block, strict=True))


def register_tiles(target: CpuTarget, counts: Collection[int]) -> Iterator[tuple[int, int]]:
    """Register tiles as rows and vectors for products of `counts` rows: those with the least left over."""
    for vectors in (1, 2, 3, 4):
        most = (target.vector_registers - 1 - vectors) // vectors

        def padded(rows: int) -> tuple[int, int]:
            return sum(-(-count // rows) * rows for count in counts), -rows

        yield from ((rows, vectors) for rows in sorted(range(max(1, most // 3), most + 1), key=padded)[:_ROW_CHOICES])


def output_choices(geometry: Geometry, winograd: bool) -> list[tuple[int, int, int]]:
    """Winograd's m along the three axes: the same along the last two where that applies, the first also without."""
    if not winograd:
        return [(1, 1, 1)]

    first, second, third = (outputs_along(axis, SEVERAL) for axis in geometry.axes)
    if [first, second, third].count([]) == 2:
        alone = [outputs_along(axis, ALONE) or [1] for axis in geometry.axes]
        return [*itertools.product(alone[0], alone[1], alone[2])]
    planes = [(m, m) for m in second if m in third] or [*((m, 1) for m in second), *((1, m) for m in third)]
    found = [(1, *plane) for plane in planes]
    found += [(m, *plane) for m in first for plane in [*planes, (1, 1)]]
    return found


def _block_choices(geometry: Geometry, outputs: tuple[int, int, int], unit: int) -> Iterator[tuple[int, int, int, int]]:
    """Blocks worth trying: a longer axis is cut only where everything outside of it is cut to one row.

    A row that is cut is cut into multiples of `unit` positions, and so is one that a call may make longer.
    """
    depth, height, width = (axis.positions for axis in geometry.axes)
    m_d, m_h, m_w = outputs
    if geometry.dynamic[2]:
        width = -(-width // unit) * unit

    def cut(extent: int, unit: int) -> list[int]:
        return sorted({min(-(-size // unit) * unit, extent) for size in steps(extent)})

    least_d, least_h = min(m_d, depth), min(m_h, height)
    for w in cut(width, math.lcm(m_w, unit)):
        yield 1, least_d, least_h, w
    for h in cut(height, m_h):
        yield 1, least_d, h, width
    for d in cut(depth, m_d):
        yield 1, d, height, width
    for n in steps(geometry.batch):
        yield n, depth, height, width


def _channel_choices(out_channels: int, panel: int) -> list[int]:
    """Output channels of a block: all, or a power of two of whole panels."""
    found = {out_channels}
    size = panel
    while size < out_channels:
        found.add(size)
        size *= 2
    return sorted(found)


@dataclass(frozen=True, slots=True)
class _Work:
    """What one combination of runs asks of a block, by the numbers that costs are made of.

    `rows` of the block's products, `points` products of each, a reduction over `taps`, `phases` of output channels as
    columns, `outputs` positions a row, transforms along `transformed` axes. Under Strassen's algorithm a row is two, of
    seven points, and half of the columns make four results.
    """

    rows: int
    points: int
    taps: int
    phases: int
    outputs: int
    transformed: int


def _works(geometry: Geometry, tile: MatrixTile) -> list[_Work]:
    found = []
    taken = spans(geometry, tile.block[1:])
    for runs in geometry.runs:
        axes = [
            axis_rows(axis, run, positions, m)
            for axis, run, positions, m in zip(geometry.axes, runs, taken, tile.outputs, strict=True)
        ]
        found.append(
            _Work(
                -(-tile.images * math.prod(axis.tiles for axis in axes) // tile.parts),
                len(STRASSEN.data) if tile.strassen else math.prod(axis.points for axis in axes),
                math.prod(axis.taps for axis in axes),
                math.prod(run.count for run in runs),
                math.prod(axis.outputs for axis in axes) * tile.parts**2,
                sum(axis.transformed for axis in axes) + tile.strassen,
            )
        )
    return found


@dataclass(frozen=True, slots=True)
class _Arithmetic:
    """Costs of the plans of one problem on one target."""

    problem: Problem
    geometry: Geometry
    target: CpuTarget
    lanes: int

    def block(self, tile: MatrixTile, works: Sequence[_Work]) -> float:
        """Cycles to pack the data of a block and to gather its rows: the same for every tile of channels."""
        channels = row_channels(part_channels(self.geometry.in_channels, tile, self.lanes), self.lanes) / self.lanes
        packed = tile.images * math.prod(block_positions(self.geometry, tile)) * channels * tile.parts
        cycles = packed * (_MOVE if self.problem.data_format == "NXC" else _MOVE + _TRANSPOSE)
        for work in works if tile.strassen or not packs_rows(self.problem, tile, self.lanes) else ():
            vectors = work.rows * work.points * work.taps * channels
            cycles += vectors * (_MOVE + self._far(vectors) + _TRANSFORM * work.transformed)
        return cycles

    def channels(self, tile: MatrixTile, works: Sequence[_Work]) -> float:
        """Cycles of one tile of channels of a block, from its products to its output."""
        geometry, lanes = self.geometry, self.lanes
        element = self.target.vector_bits // 8 // lanes
        terms = part_channels(geometry.in_channels, tile, lanes)
        channels = row_channels(terms, lanes)
        panel = tile.vectors * lanes
        products = tile.rows * tile.vectors
        # Strassen's panels serve half as many rows each: what waits for them is hidden by a sum more.
        step = max(1.0, (tile.rows + tile.vectors) / products, (LATENCY_ACCUMULATORS + tile.strassen) / products)
        tiles = -(-geometry.out_channels // tile.channels)
        cycles, results = _TASK, 0
        for work in works:
            panels = -(-work.phases * tile.channels // (panel * tile.parts))
            columns = panels * tile.vectors
            # Accumulators are cleared and stored for each reduction.
            reductions = -(-work.rows // tile.rows) * panels * work.points
            # A panel past the first-level cache comes from the second for each tile of rows, half a vector a cycle.
            streams = work.taps * terms * panel * element > self.target.l1_bytes // 2
            each = max(step, _PANEL / tile.rows) if streams else step
            cycles += reductions * products / 2 * (work.taps * terms * each + 3)
            # Strassen's are fetched for the store, and once more for the transform, and save far less than Winograd's.
            stored = work.rows * work.points * columns
            cycles += stored * self._far(stored) * (1 + 2 * tile.strassen)
            finished = work.rows * work.outputs * columns
            results += finished
            if work.transformed:
                cycles += finished * (_MOVE + _TRANSFORM * work.transformed)
            # A product's rows and a panel that do not fit together are read again from further away.
            near = (work.rows * channels + panel * terms) * work.taps * element
            if near > self.target.l2_bytes * 0.75:
                cycles += work.rows * columns * work.taps * channels / lanes * element / _FAR_BYTES
            # The rows of all points are read again for every tile of channels; Strassen's are long, and fetched ahead.
            held = work.rows * work.points * channels * work.taps * element
            if held > self.target.l2_bytes * 0.75 and not tile.strassen:
                cycles += held / _FAR_BYTES
            # The filter is read once for each block.
            filter_bytes = work.points * work.taps * panels * panel * terms * element
            if filter_bytes * tiles > self.target.l2_bytes // 2:
                cycles += filter_bytes / _FAR_BYTES / 2
        outputs = tile.images * math.prod(
            min(b * axis.stride, extent)
            for b, axis, extent in zip(tile.block[1:], geometry.axes, geometry.output, strict=True)
        )
        if contiguous_phases(self.problem, lanes):
            moved, vectors = 3 * _MOVE, outputs * tile.channels / lanes
        else:
            moved = 3 * _MOVE if self.problem.data_format == "NXC" else 4 * _MOVE + _TRANSPOSE
            vectors = outputs * -(-tile.channels // lanes)
        return cycles + vectors * (moved + self._far(results))

    def _far(self, vectors: float) -> float:
        """Cycles for each of so many vectors because they do not stay in the second-level cache."""
        return _FAR if vectors * self.target.vector_bits // 8 > self.target.l2_bytes / 2 else 0.0

    def useful(self) -> float:
        """Cycles of the products of the direct algorithm, without any loss."""
        geometry = self.geometry
        products = geometry.batch * math.prod(axis.positions for axis in geometry.axes)
        products *= geometry.taps * geometry.groups * geometry.in_channels * geometry.out_channels
        return max(products / (2 * self.lanes), 1.0)


@lru_cache(maxsize=ENUMERATIONS)
def candidates(
    problem: Problem, winograd: bool, target: CpuTarget, lanes: int, strassen: bool = False
) -> list[tuple[float, MatrixPlan]]:
    """Every plan worth considering with its cost by arithmetic (cycles a useful product, relative), cheapest first."""
    choices = Geometry.choices(problem)
    if contiguous_phases(problem, lanes):
        del choices[1:]  # phases that are vectors of the output begin with it
    useful = _Arithmetic(problem, choices[0], target, lanes).useful()
    found = [
        (cycles / useful, plan)
        for geometry in choices
        for cycles, plan in _candidates(_Arithmetic(problem, geometry, target, lanes), winograd, int(strassen))
    ]
    return sorted(found, key=lambda candidate: candidate[0])


def _candidates(arithmetic: _Arithmetic, winograd: bool, strassen: int) -> list[tuple[float, MatrixPlan]]:
    problem, geometry, target, lanes = arithmetic.problem, arithmetic.geometry, arithmetic.target, arithmetic.lanes
    found: list[tuple[float, MatrixPlan]] = []
    for outputs in output_choices(geometry, winograd):
        for block in dict.fromkeys(_block_choices(geometry, outputs, row_unit(problem, lanes))):
            whole = MatrixTile(*block, geometry.out_channels, 1, 1, *outputs, geometry.uncropped, strassen)
            works = _works(geometry, whole)
            shared = arithmetic.block(whole, works)
            count = geometry.groups * _blocks(geometry, whole)
            for rows, vectors in register_tiles(target, [work.rows for work in works]):
                for channels in _channel_choices(geometry.out_channels, vectors * lanes):
                    tile = MatrixTile(*block, channels, rows, vectors, *outputs, geometry.uncropped, strassen)
                    tiles = -(-geometry.out_channels // channels)
                    cycles = count * (shared + tiles * arithmetic.channels(tile, works))
                    found.append((cycles, MatrixPlan(tile, count < FEW_TASKS)))
    return found
