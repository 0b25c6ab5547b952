"""The candidates of the matrix definition, and their costs by arithmetic on the target's registers and caches.

Costs are cycles per useful product of the direct algorithm, relative to two vector multiply-adds per cycle. They
compare with those of `tiles`, and fall below 1 where Winograd's transforms save more products than they cost.

A register tile of ``r`` rows by ``v`` vectors takes ``r*v`` accumulators, ``v`` vectors of the filter and one
broadcast. A step of the reduction issues ``r*v`` multiply-adds and ``r + v`` loads. The rows of one product stay in the
second-level cache next to a panel of the filter, of which a step reads ``v`` vectors.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import lru_cache

import numpy as np

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
from tvm_deconv.problem import Array, Problem
from tvm_deconv.problem.arithmetic import ceil_div, round_up
from tvm_deconv.schedules.x86.costs import Costs, costs_of
from tvm_deconv.schedules.x86.ranking import Ranking
from tvm_deconv.schedules.x86.tiles import (
    ALONE,
    ENUMERATIONS,
    FEW_TASKS,
    LATENCY_ACCUMULATORS,
    SEVERAL,
    block_count,
    knobs_of,
    outputs_along,
    parts_of,
    steps,
)
from tvm_deconv.targets import CpuTarget

#: Points of an axis for which the cost of a transform is given: four outputs of two taps.
_USUAL_POINTS = 5
#: Bytes of a filter that do not stay in the last cache of a server from call to call.
_LAST_CACHE = 16 << 20
#: Numbers of rows to try for each number of vectors.
_ROW_CHOICES = 4


@dataclass(frozen=True, slots=True)
class MatrixPlan:
    """The knobs of a matrix schedule.

    If `share_data`, the channel tiles of a block are tasks of their own and share its packed data. If `halves`, vectors
    are half as wide as the target's.
    """

    tile: MatrixTile
    share_data: bool
    halves: bool = False

    @property
    def knobs(self) -> dict[str, int]:
        """The plan as plain integers, as in manifests and logs; see `knobs_of`."""
        return knobs_of(self.tile, self.share_data, self.halves)

    @staticmethod
    def from_knobs(knobs: Mapping[str, int]) -> MatrixPlan:
        """Return the plan with these knobs."""
        return MatrixPlan(*parts_of(knobs, MatrixTile))

    @staticmethod
    def of_numbers(share_data: int, halves: int, *tile: int) -> MatrixPlan:
        """Return the plan of a row of a ranking."""
        return MatrixPlan(MatrixTile(*tile), bool(share_data), bool(halves))

    def tasks(self, problem: Problem) -> int:
        """Return the number of independent tasks of a call."""
        geometry = Geometry.of(problem)
        count = geometry.groups * block_count(geometry, self.tile.block)
        return count * ceil_div(geometry.out_channels, self.tile.channels) if self.share_data else count


def register_tiles(target: CpuTarget, counts: Collection[int]) -> Iterator[tuple[int, int]]:
    """Yield the register tiles to try, as rows and vectors, for products of `counts` rows.

    For each number of vectors these are the tiles that leave the fewest rows over, the largest first.
    """
    for vectors in (1, 2, 3, 4):
        most = (target.vector_registers - 1 - vectors) // vectors

        def padded(rows: int) -> tuple[int, int]:
            return sum(round_up(count, rows) for count in counts), -rows

        yield from ((rows, vectors) for rows in sorted(range(max(1, most // 3), most + 1), key=padded)[:_ROW_CHOICES])


def output_choices(geometry: Geometry, winograd: bool) -> list[tuple[int, int, int]]:
    """Return Winograd's m to try along the three axes; only (1, 1, 1) without `winograd`.

    Along the last two axes m is the same if both can be transformed. The first is transformed with or without them.
    """
    if not winograd:
        return [(1, 1, 1)]

    first, second, third = (outputs_along(axis, SEVERAL) for axis in geometry.axes)
    if [first, second, third].count([]) == 2:
        alone = [outputs_along(axis, ALONE) or [1] for axis in geometry.axes]
        return [*itertools.product(alone[0], alone[1], alone[2])]
    planes = [(m, m) for m in second if m in third] or [*((m, 1) for m in second), *((1, m) for m in third)]
    choices = [(1, *plane) for plane in planes]
    choices += [(m, *plane) for m in first for plane in [*planes, (1, 1)]]
    return choices


def _block_choices(geometry: Geometry, outputs: tuple[int, int, int], unit: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield the blocks to try: images and positions along three axes.

    An axis is cut only if every axis outside of it is cut to one row. A row that is cut, or that a call may make
    longer, is cut into multiples of `unit` positions.
    """
    depth, height, width = (axis.positions for axis in geometry.axes)
    m_d, m_h, m_w = outputs
    if geometry.dynamic[2]:
        width = round_up(width, unit)

    def cuts(extent: int, unit: int) -> list[int]:
        return sorted({min(round_up(size, unit), extent) for size in steps(extent)})

    least_d, least_h = min(m_d, depth), min(m_h, height)
    for w in cuts(width, math.lcm(m_w, unit)):
        yield 1, least_d, least_h, w
    for h in cuts(height, m_h):
        yield 1, least_d, h, width
    for d in cuts(depth, m_d):
        yield 1, d, height, width
    for n in steps(geometry.batch):
        yield n, depth, height, width


def _channel_choices(out_channels: int, panel: int) -> list[int]:
    """Return the output channels of a block to try: all, or a power of two of whole panels."""
    choices = {out_channels}
    size = panel
    while size < out_channels:
        choices.add(size)
        size *= 2
    return sorted(choices)


@dataclass(frozen=True, slots=True)
class _Work:
    """The work of one combination of runs in a block.

    Each of `rows` has `points` products with a reduction over `taps`. Its columns are `phases` of each output channel,
    and it makes `outputs` positions. `transformed` counts the axes with transforms, relative to one with the usual
    points. Under Strassen's algorithm a row is a pair of rows with seven points, and half of the columns make four
    results.
    """

    rows: int
    points: int
    taps: int
    phases: int
    outputs: int
    transformed: float


def _works(geometry: Geometry, tile: MatrixTile) -> list[_Work]:
    """Return the work of each combination of runs."""
    works = []
    positions = spans(geometry, tile.block[1:])
    for runs in geometry.runs:
        axes = list(map(axis_rows, geometry.axes, runs, positions, tile.outputs))
        works.append(
            _Work(
                ceil_div(tile.images * math.prod(axis.tiles for axis in axes), tile.parts),
                len(STRASSEN.data) if tile.strassen else math.prod(axis.points for axis in axes),
                math.prod(axis.taps for axis in axes),
                math.prod(run.count for run in runs),
                math.prod(axis.outputs for axis in axes) * tile.parts**2,
                sum(axis.points for axis in axes if axis.transformed) / _USUAL_POINTS + tile.strassen,
            )
        )
    return works


@dataclass(frozen=True, slots=True)
class _Tiles:
    """The tiles of a block: those of output channels, and register tiles of `rows` by `vectors`, an array of each."""

    whole: MatrixTile
    channels: Array
    rows: Array
    vectors: Array

    @staticmethod
    def of(whole: MatrixTile, works: Sequence[_Work], target: CpuTarget, lanes: int) -> _Tiles:
        """List the tiles to try for the block of `whole`, which has all output channels."""
        tiles = [
            (channels, rows, vectors)
            for rows, vectors in register_tiles(target, [work.rows for work in works])
            for channels in _channel_choices(whole.channels, vectors * lanes)
        ]
        return _Tiles(whole, *np.array(tiles, np.float64).T)


@dataclass(frozen=True, slots=True)
class _Arithmetic:
    """The costs of plans for one problem on one target."""

    problem: Problem
    geometry: Geometry
    target: CpuTarget
    lanes: int

    @property
    def costs(self) -> Costs:
        """The constants for the target."""
        return costs_of(self.target)

    def useful(self) -> float:
        """Return the cycles of the products of the direct algorithm without any loss."""
        geometry = self.geometry
        products = geometry.batch * math.prod(axis.positions for axis in geometry.axes)
        products *= geometry.taps * geometry.groups * geometry.in_channels * geometry.out_channels
        return max(products / (2 * self.lanes), 1.0)

    def block(self, tile: MatrixTile, works: Sequence[_Work]) -> float:
        """Return the cycles to pack the data of a block and to gather its rows, once for all tiles of channels."""
        channels = row_channels(part_channels(self.geometry.in_channels, tile, self.lanes), self.lanes) / self.lanes
        packed = tile.images * math.prod(block_positions(self.geometry, tile)) * channels * tile.parts
        costs = self.costs
        cycles = packed * (costs.move if self.problem.data_format == "NXC" else costs.move + costs.transpose)
        for work in works if tile.strassen or not packs_rows(self.problem, tile, self.lanes) else ():
            vectors = work.rows * work.points * work.taps * channels
            cycles += vectors * (costs.move + float(self._far(vectors)) + costs.transform * work.transformed)
        return cycles

    def sharing(self, tile: MatrixTile, works: Sequence[_Work], count: int) -> float:
        """Return the further cycles where the rows of all `count` blocks are kept for tasks of tiles of channels.

        They are written to and read from beyond the second-level cache, unless all of them stay there.
        """
        channels = row_channels(part_channels(self.geometry.in_channels, tile, self.lanes), self.lanes)
        kept = sum(work.rows * work.points * work.taps for work in works) * channels * self._element_bytes
        if count == 1 or count * kept <= self.target.l2_bytes * self.costs.rows_share:
            return self.costs.channel_task
        return self.costs.channel_task + 2 * (count - 1) * kept / self.costs.far_bytes

    def channels(self, tiles: _Tiles, works: Sequence[_Work]) -> Array:
        """Return the cycles of one tile of channels of a block, from its products to its output."""
        cycles: Array | float = self.costs.channel_task
        results: Array | float = 0
        for work in works:
            columns = self._panels(tiles, work) * tiles.vectors
            results = results + work.rows * work.outputs * columns
            products, filters = self._products(tiles, work), self._filter(tiles, work, len(works))
            # The filter of Winograd's points is fetched ahead, while products of what was fetched are made.
            waiting = self.costs.waiting if work.transformed and not tiles.whole.strassen else 1.0
            cycles = cycles + np.maximum(products, filters) + waiting * np.minimum(products, filters)
            for part in (*self._results(tiles, work), *self._rows(tiles, work)):
                cycles = cycles + part
        return self._finish(tiles, results) + cycles

    def _panels(self, tiles: _Tiles, work: _Work) -> Array:
        """Return the panels of a product: of each part under Strassen's algorithm."""
        return ceil_div(work.phases * tiles.channels, tiles.vectors * self.lanes * tiles.whole.parts)

    def _products(self, tiles: _Tiles, work: _Work) -> Array:
        """Return the cycles of multiply-adds."""
        panels, products, strassen = self._panels(tiles, work), tiles.rows * tiles.vectors, tiles.whole.strassen
        terms = part_channels(self.geometry.in_channels, tiles.whole, self.lanes)
        # Strassen's panels serve half as many rows each. One more independent sum hides the wait for them.
        sums = LATENCY_ACCUMULATORS + max(strassen, self.costs.slack)
        hidden = np.maximum((tiles.rows + tiles.vectors) / products, sums / products)
        step = np.maximum(1.0, hidden)
        panel_bytes = work.taps * terms * tiles.vectors * self.lanes * self._element_bytes
        # A panel that is too large comes from the second-level cache for each tile of rows.
        far = np.maximum(step, self.costs.panel / tiles.rows)
        step = np.where(panel_bytes > self.target.l1_bytes // 2, far, step)
        reductions = ceil_div(work.rows, tiles.rows) * panels * work.points
        cycles: Array = reductions * products / 2 * (work.taps * terms * step + self.costs.reduction)
        return cycles

    def _results(self, tiles: _Tiles, work: _Work) -> Iterator[Array]:
        """Yield the cycles of storing the results of multiply-adds, and of transforming these."""
        # Strassen's results are fetched for the store and again for the transform. Winograd's save far more.
        stored = work.rows * work.points * self._panels(tiles, work) * tiles.vectors
        far = self._far(stored)
        yield stored * far * (1 + 2 * tiles.whole.strassen)
        if work.transformed:
            yield np.where(far > 0, stored * self.costs.fetch, 0.0)
            transform = self.costs.move + self.costs.transform * work.transformed
            yield work.rows * work.outputs * self._panels(tiles, work) * tiles.vectors * transform

    def _rows(self, tiles: _Tiles, work: _Work) -> Iterator[Array | float]:
        """Yield the cycles of reading rows again from beyond the second-level cache: of one product, of all points."""
        element, panel = self._element_bytes, tiles.vectors * self.lanes
        terms = part_channels(self.geometry.in_channels, tiles.whole, self.lanes)
        channels = row_channels(terms, self.lanes)
        # The rows of a product, if they do not fit into the cache together with a panel.
        near = (work.rows * channels + panel * terms) * work.taps * element
        again = work.rows * (self._panels(tiles, work) * tiles.vectors) * work.taps * channels / self.lanes * element
        kept = self.target.l2_bytes * self.costs.rows_share
        yield np.where(near > kept, again / self.costs.far_bytes, 0.0)
        # The rows of all points, for every tile of channels. Strassen's are long and fetched ahead.
        held = work.rows * work.points * channels * work.taps * element
        if held > kept and not tiles.whole.strassen:
            yield held / self.costs.far_bytes * self.costs.again

    def _filter(self, tiles: _Tiles, work: _Work, runs: int) -> Array:
        """Return the cycles in which the filter comes from beyond the second-level cache, once for each block."""
        terms = part_channels(self.geometry.in_channels, tiles.whole, self.lanes)
        panels = self._panels(tiles, work) * tiles.vectors * self.lanes
        fetched = work.points * work.taps * panels * terms * self._element_bytes
        whole = fetched * ceil_div(self.geometry.out_channels, tiles.channels) * runs
        near = np.where(whole > self.target.l2_bytes * self.costs.far_share, fetched / self.costs.far_bytes / 2, 0)
        cycles: Array = np.where(whole > _LAST_CACHE, fetched / self.costs.memory_bytes, near)
        return cycles

    def _finish(self, tiles: _Tiles, results: Array | float) -> Array:
        """Return the cycles to finish the outputs of a tile of channels, made of vectors of `results`."""
        block = tiles.whole.block
        outputs = block[0] * math.prod(
            min(positions * axis.stride, extent)
            for positions, axis, extent in zip(block[1:], self.geometry.axes, self.geometry.output, strict=True)
        )
        if contiguous_phases(self.problem, self.lanes):
            moved = 3 * self.costs.move
            vectors: Array = outputs * tiles.channels / self.lanes
        else:
            moved = (
                3 * self.costs.move if self.problem.data_format == "NXC" else 4 * self.costs.move + self.costs.transpose
            )
            vectors = outputs * ceil_div(tiles.channels, self.lanes)
        return vectors * (moved + self._far(results))

    def _far(self, vectors: Array | float) -> Array:
        """Return the further cycles per vector if as many `vectors` do not stay in the second-level cache."""
        size = vectors * (self.target.vector_bits // 8)
        far = np.where(size > self.target.l2_bytes * self.costs.far_share, self.costs.far, 0.0)
        # What the last cache does not hold goes to memory and back. A store fetches its line first.
        beyond = np.maximum(0.0, 1 - _LAST_CACHE / np.maximum(size, 1))
        return far + beyond * 3 * (self.target.vector_bits // 8) / self.costs.memory_bytes

    @property
    def _element_bytes(self) -> int:
        return self.target.vector_bits // 8 // self.lanes


@lru_cache(maxsize=ENUMERATIONS)
def candidates(
    problem: Problem, winograd: bool, target: CpuTarget, lanes: int, strassen: bool = False
) -> Ranking[MatrixPlan]:
    """Return all plans to try, cheapest first, each with its cost: cycles per useful product, relative."""
    geometries = Geometry.choices(problem)
    if contiguous_phases(problem, lanes):
        del geometries[1:]  # phases that are vectors of the output begin with it
    useful = _Arithmetic(problem, geometries[0], target, lanes).useful()
    parts = [
        (cycles / useful, numbers)
        for geometry in geometries
        for cycles, numbers in _plans(_Arithmetic(problem, geometry, target, lanes), winograd, int(strassen))
    ]
    return Ranking.of(parts, MatrixPlan.of_numbers)


def _plans(arithmetic: _Arithmetic, winograd: bool, strassen: int) -> Iterator[tuple[Array, Array]]:
    """Yield all plans to try for one geometry, their cycles and their numbers, block by block."""
    problem, geometry, lanes = arithmetic.problem, arithmetic.geometry, arithmetic.lanes
    for outputs in output_choices(geometry, winograd):
        for block in dict.fromkeys(_block_choices(geometry, outputs, row_unit(problem, lanes))):
            whole = MatrixTile(*block, geometry.out_channels, 1, 1, *outputs, geometry.uncropped, strassen)
            works = _works(geometry, whole)
            shared = arithmetic.block(whole, works)
            count = geometry.groups * block_count(geometry, block)
            tiles = _Tiles.of(whole, works, arithmetic.target, lanes)
            of_channels = ceil_div(geometry.out_channels, tiles.channels)
            cycles = count * (shared + of_channels * arithmetic.channels(tiles, works))
            several = (of_channels > 1) & (count < FEW_TASKS)
            tried = np.stack([np.ones_like(several), several], axis=-1)
            tile, shares = np.nonzero(tried)
            numbers = np.empty((len(tile), 2 + len(astuple(whole))), np.int64)
            numbers[:] = 0, 0, *astuple(whole)
            numbers[:, 0] = shares
            numbers[:, 6:9] = np.stack([tiles.channels, tiles.rows, tiles.vectors], axis=-1)[tile]
            yield np.stack([cycles, cycles + arithmetic.sharing(whole, works, count)], axis=-1)[tried], numbers
