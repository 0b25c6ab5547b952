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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from tvm_deconv.compute.indexing import spans
from tvm_deconv.compute.matrix_layout import (
    MatrixTile,
    block_positions,
    contiguous_phases,
    flat_positions,
    flat_rows,
    packs_rows,
    part_channels,
    row_channels,
    row_unit,
)
from tvm_deconv.compute.phases import Geometry, Run, axis_rows
from tvm_deconv.compute.strassen import STRASSEN
from tvm_deconv.compute.winograd import MAX_INTEGER_PRODUCTS
from tvm_deconv.compute.words import Words, tiled
from tvm_deconv.problem import Array, Problem, element_bytes
from tvm_deconv.problem.arithmetic import ceil_div, round_up
from tvm_deconv.schedules.x86.amx import (
    GATHER_CYCLES,
    LOAD_CYCLES,
    MATRIX_BYTES,
    MATRIX_ROWS,
    MATRIX_TILE_BYTES,
    REGISTER_TILES,
    SUM_CYCLES,
    step_cycles,
)
from tvm_deconv.schedules.x86.costs import LAST_CACHE, Costs, costs_of
from tvm_deconv.schedules.x86.dot import adds_apart
from tvm_deconv.schedules.x86.plans import TilePlan
from tvm_deconv.schedules.x86.ranking import Ranking
from tvm_deconv.schedules.x86.register_tiles import LATENCY_ACCUMULATORS
from tvm_deconv.schedules.x86.stores import LINE, ends_within_line, goes_to_memory, outgrows_caches
from tvm_deconv.schedules.x86.tiles import (
    ALONE,
    ENUMERATIONS,
    FEW_TASKS,
    SEVERAL,
    USUAL,
    block_count,
    missed_pages,
    outputs_along,
    steps,
    with_filter,
)
from tvm_deconv.targets import CpuTarget

#: Winograd's largest m and most products of integers, along any number of axes.
_INTEGERS = MAX_INTEGER_PRODUCTS - 1, MAX_INTEGER_PRODUCTS
#: Numbers of rows to try for each number of vectors.
_ROW_CHOICES = 4


@dataclass(frozen=True, slots=True)
class MatrixPlan(TilePlan[MatrixTile]):
    """The knobs of a matrix schedule."""

    tile_type = MatrixTile

    def tasks(self, problem: Problem) -> int:
        """Return the number of independent tasks of a call."""
        geometry = Geometry.of(problem)
        count = geometry.groups * block_count(geometry, self.tile.block)
        return count * ceil_div(geometry.out_channels, self.tile.channels) if self.share_data else count


def output_choices(geometry: Geometry, winograd: bool, *, integers: bool = False) -> list[tuple[int, int, int]]:
    """Return Winograd's m to try along the three axes; only (1, 1, 1) without `winograd`.

    Along the last two axes m is the same if both can be transformed. The first is transformed with or without them.
    Dynamic axes must have taps that read neighbouring data. Of `integers` m is smaller, and taps are not cut.
    """
    if not winograd:
        return [(1, 1, 1)]

    def along(most: tuple[int, int]) -> list[list[int]]:
        return [
            outputs_along(axis, most, dilated=not dynamic, pieces=not integers)
            for axis, dynamic in zip(geometry.axes, geometry.dynamic, strict=True)
        ]

    alone = along(_INTEGERS if integers else ALONE)
    if alone.count([]) == 2:
        first, second, third = (choices or [1] for choices in alone)
        return [*itertools.product(first, second, third)]
    first, second, third = along(_INTEGERS if integers else SEVERAL)
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
    m_d, m_h, m_w = (m * axis.step if m > 1 else 1 for m, axis in zip(outputs, geometry.axes, strict=True))
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


def _channel_choices(out_channels: int, panel: int, phases: int) -> list[int]:
    """Return the output channels of a block to try: all, or so many that their columns fill a `panel`, doubled at will.

    A channel has as many columns as `phases` where these make the vectors of the output, else one.
    """
    choices = {out_channels}
    size = ceil_div(panel, phases)
    while size < out_channels:
        choices.add(size)
        size *= 2
    return sorted(choices)


@dataclass(frozen=True, slots=True)
class _Work:
    """The work of one combination of runs in each block.

    Each of `rows`, a column of as many as a block has, has `points` products with a reduction over `taps`. Its columns
    are `phases` of each output channel, and it makes `outputs` positions. `transformed` counts the axes with
    transforms, relative to one with the usual points. Under Strassen's algorithm a row is a pair of rows with seven
    points, and half of the columns make four results.
    """

    rows: Array
    points: int
    taps: int
    phases: int
    outputs: int
    transformed: float


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Blocks with what their extents decide, each as a column, for tables of blocks by tiles.

    `count` are the blocks of a call, and `packed` the positions of the packed data of each. `outputs` are those that it
    makes of each channel, in as many `pieces` of the caller's memory if channels are outside of positions. `gathered`
    blocks copy their rows from the packed data. `works` is the work of each combination of runs.
    """

    sizes: Array
    count: Array
    packed: Array
    outputs: Array
    pieces: Array
    gathered: Array
    works: Sequence[_Work]

    @staticmethod
    def of(
        problem: Problem, geometry: Geometry, outputs: tuple[int, int, int], strassen: int, lanes: int, flat: int
    ) -> _Blocks:
        """List the blocks to try with these `outputs` of Winograd's, with Strassen's algorithm, or `flat`."""
        sizes = [*dict.fromkeys(_block_choices(geometry, outputs, row_unit(problem, lanes)))]
        tiles = [MatrixTile(*block, 1, 1, 1, *outputs, geometry.uncropped, strassen, flat) for block in sizes]
        unit = lanes if flat and problem.data_format == "NCX" else 1
        packed = [flat_positions(block_positions(geometry, tile), unit) for tile in tiles]
        return _Blocks(
            np.array(sizes, np.int64),
            _column(geometry.groups * block_count(geometry, block) for block in sizes),
            _column(tile.images * math.prod(extents) for tile, extents in zip(tiles, packed, strict=True)),
            _column(block[0] * _outputs(geometry, block[1:]) for block in sizes),
            _column(_pieces(geometry, block) for block in sizes),
            _column(strassen or not (flat or packs_rows(problem, tile, lanes)) for tile in tiles) > 0,
            [_work(geometry, tiles, packed, runs) for runs in geometry.runs],
        )


def _column(values: Iterable[int]) -> Array:
    """Return integers as a column of numbers."""
    return np.fromiter(values, np.float64)[:, None]


def _outputs(geometry: Geometry, positions: Sequence[int]) -> int:
    """Return the outputs of one channel and image in a block of `positions`."""
    axes = zip(positions, geometry.axes, geometry.output, strict=True)
    return math.prod(min(count * axis.stride, extent) for count, axis, extent in axes)


def _pieces(geometry: Geometry, block: Sequence[int]) -> int:
    """Return the pieces of a channel's memory that the outputs of a `block` are; 0 if they are all of it."""
    images, *lengths = block
    *outer, row = (length >= axis.positions for axis, length in zip(geometry.axes, lengths, strict=True))
    if row:
        return 0 if all(outer) else images
    return images * math.prod(length * axis.stride for axis, length in zip(geometry.axes[:2], lengths, strict=False))


def _work(
    geometry: Geometry, tiles: Sequence[MatrixTile], packed: Sequence[Sequence[int]], runs: Sequence[Run]
) -> _Work:
    """Return the work of one combination of `runs` in blocks that differ in their extents alone.

    An image of a block has the extents `packed` in memory.
    """
    blocks = [[*map(axis_rows, geometry.axes, runs, spans(geometry, tile.block[1:]), tile.outputs)] for tile in tiles]
    rows = (
        flat_rows(axes, tile.images, extents) if tile.flat else tile.images * math.prod(axis.tiles for axis in axes)
        for tile, axes, extents in zip(tiles, blocks, packed, strict=True)
    )
    tile, axes = tiles[0], blocks[0]
    return _Work(
        ceil_div(_column(rows), tile.parts),
        len(STRASSEN.data) if tile.strassen else math.prod(axis.points for axis in axes),
        math.prod(axis.taps for axis in axes),
        math.prod(run.count for run in runs),
        math.prod(axis.outputs for axis in axes) * tile.parts**2,
        sum(axis.points for axis in axes if axis.transformed) / len(USUAL.data) + tile.strassen,
    )


@dataclass(frozen=True, slots=True)
class _Tiles:
    """Tiles of output `channels`, with register tiles of `rows` by `vectors`.

    `rows` is a table of blocks by tiles, since each block has its own.
    """

    channels: Array
    rows: Array
    vectors: Array

    @staticmethod
    def of(blocks: _Blocks, out_channels: int, registers: int, lanes: int, phases: int) -> _Tiles:
        """List the tiles to try for each block: register tiles by channels of so many `phases` (`_channel_choices`).

        For each number of vectors the register tiles are those that leave the fewest rows over, the largest first.
        """
        counts = np.array([work.rows for work in blocks.works]).reshape(-1, len(blocks.sizes), 1)
        channels, rows, vectors = [], [], []
        for count in (1, 2, 3, 4):
            most = (registers - 1 - count) // count
            tried = np.arange(max(1, most // 3), most + 1)
            padded = round_up(counts, tried).sum(axis=0)
            best = tried[np.argsort(padded * (most + 1) - tried, axis=1)[:, :_ROW_CHOICES]]
            choices = _channel_choices(out_channels, count * lanes, phases)
            channels += choices * best.shape[1]
            rows.append(np.repeat(best, len(choices), axis=1))
            vectors += [count] * (len(choices) * best.shape[1])
        return _Tiles(np.array(channels, np.float64), np.concatenate(rows, axis=1), np.array(vectors, np.float64))

    @staticmethod
    def of_matrices(blocks: _Blocks, out_channels: int, lanes: int, phases: int) -> _Tiles:
        """List the tiles to try for products of matrices: all their register tiles by channels."""
        tiles = [
            (channels, height * MATRIX_ROWS, vectors)
            for height, vectors in REGISTER_TILES
            for channels in _channel_choices(out_channels, vectors * lanes, phases)
        ]
        channels, rows, vectors = np.array(tiles, np.float64).T
        return _Tiles(channels, np.tile(rows, (len(blocks.sizes), 1)), vectors)


@dataclass(frozen=True, slots=True)
class _Arithmetic:
    """The costs of plans for one problem on one target, by Strassen's algorithm if `strassen` is 1.

    If there are `words`, these are the input channels. If `flat` is 1, rows are not gathered. Tables have a row for
    each block and a column for each of its tiles.
    """

    problem: Problem
    geometry: Geometry
    target: CpuTarget
    lanes: int
    strassen: int
    words: Words | None
    flat: int

    @property
    def costs(self) -> Costs:
        """The constants for the target."""
        return costs_of(self.target)

    @property
    def parts(self) -> int:
        """Number of parts into which rows, columns and input channels of a product are cut."""
        return 1 + self.strassen

    @property
    def terms(self) -> int:
        """Input channels of each part of a product."""
        return part_channels(self.geometry.in_channels, self.strassen, self.lanes)

    @property
    def channels(self) -> int:
        """Input channels of a row in memory."""
        return row_channels(self.terms, self.lanes)

    @property
    def _adds(self) -> bool:
        """True if a register has products of integers before a second instruction adds them."""
        return self.problem.accumulate_dtype == "int32" and adds_apart(self.target)

    def useful(self) -> float:
        """Return the cycles of the products of the direct algorithm without any loss."""
        geometry = self.geometry
        products = geometry.batch * math.prod(axis.positions for axis in geometry.axes)
        products *= geometry.taps * geometry.groups * geometry.in_channels * geometry.out_channels
        return max(products / (2 * self.lanes), 1.0)

    def plans(self, outputs: tuple[int, int, int]) -> tuple[Array, Array]:
        """Return all plans to try with these `outputs` of Winograd's: their cycles and their numbers."""
        geometry, lanes = self.geometry, self.lanes
        blocks = _Blocks.of(self.problem, geometry, outputs, self.strassen, lanes, self.flat)
        phases = math.prod(axis.stride for axis in geometry.axes) if contiguous_phases(self.problem, lanes) else 1
        if tiled(self.words):
            tiles = _Tiles.of_matrices(blocks, geometry.out_channels, lanes, phases)
        else:
            registers = self.target.vector_registers - int(self._adds)
            tiles = _Tiles.of(blocks, geometry.out_channels, registers, lanes, phases)
        of_channels = ceil_div(geometry.out_channels, tiles.channels)
        cycles = blocks.count * (self._block(blocks) + of_channels * self._channels(blocks, tiles))
        tried = np.stack(np.broadcast_arrays(True, (of_channels > 1) & (blocks.count < FEW_TASKS)), axis=-1)
        block, tile, shares = np.nonzero(tried)
        numbers = np.empty((len(block), 15), np.int64)
        numbers[:, 0] = shares
        numbers[:, 1] = 0  # halves
        numbers[:, 2:6] = blocks.sizes[block]
        numbers[:, 6], numbers[:, 7], numbers[:, 8] = tiles.channels[tile], tiles.rows[block, tile], tiles.vectors[tile]
        numbers[:, 9:] = *outputs, geometry.uncropped, self.strassen, self.flat
        return np.stack([cycles, cycles + self._sharing(blocks)], axis=-1)[tried], numbers

    def _block(self, blocks: _Blocks) -> Array:
        """Return the cycles to pack the data of a block and to gather its rows, once for all tiles of channels."""
        channels = self.channels / self.lanes
        costs = self.costs
        pack, pieces = costs.move, 0.0
        if self.problem.data_format == "NCX":
            pack += costs.transpose + (costs.joined if self.words else 0.0)
            pieces = missed_pages(self.problem, costs) * self.geometry.in_channels
        cycles: Array = blocks.packed * channels * self.parts * pack + blocks.pieces * pieces
        for work in blocks.works:
            vectors = work.rows * work.points * work.taps * channels
            gather = vectors * (costs.move + self._far(vectors) + costs.transform * work.transformed)
            if tiled(self.words):
                gather = gather + vectors * GATHER_CYCLES
            cycles = cycles + blocks.gathered * gather
        return cycles

    def _sharing(self, blocks: _Blocks) -> Array:
        """Return the further cycles where the rows of all blocks of a call are kept for tasks of tiles of channels.

        They are written to and read from beyond the second-level cache, unless all of them stay there.
        """
        rows = sum(work.rows * work.points * work.taps for work in blocks.works)
        kept = rows * self.channels * self._element_bytes
        near = (blocks.count == 1) | (blocks.count * kept <= self.target.l2_bytes * self.costs.rows_share)
        far = 2 * (blocks.count - 1) * kept / self.costs.far_bytes
        cycles: Array = self.costs.channel_task + np.where(near, 0.0, far)
        return cycles

    def _channels(self, blocks: _Blocks, tiles: _Tiles) -> Array:
        """Return the cycles of one tile of channels of a block, from its products to its output."""
        cycles: Array | float = self.costs.channel_task
        results: Array | float = 0
        for work in blocks.works:
            columns = self._panels(tiles, work) * tiles.vectors
            results = results + work.rows * work.outputs * columns
            products = self._products(tiles, work)
            multiplied = self._with_filter(products, tiles, work, len(blocks.works))
            for part in (multiplied, *self._results(tiles, work), *self._rows(tiles, work)):
                cycles = cycles + part
        return self._finish(blocks, tiles, results) + cycles

    def _panels(self, tiles: _Tiles, work: _Work) -> Array:
        """Return the panels of a product: of each part under Strassen's algorithm."""
        return ceil_div(work.phases * tiles.channels, tiles.vectors * self.lanes * self.parts)

    def _products(self, tiles: _Tiles, work: _Work) -> Array:
        """Return the cycles of multiply-adds."""
        if tiled(self.words):
            return self._matrix_products(tiles, work, self.words)
        panels, products = self._panels(tiles, work), tiles.rows * tiles.vectors
        # Strassen's panels serve half as many rows each. One more independent sum hides the wait for them.
        integers = self.problem.accumulate_dtype == "int32"
        slack = self.costs.integer_slack if integers else self.costs.slack
        sums = LATENCY_ACCUMULATORS + max(self.strassen, slack)
        loads = tiles.rows + tiles.vectors
        waiting = self.costs.load * loads
        if self._adds:
            waiting = np.maximum(waiting, (2 * products + loads + 3) / self.costs.integer_issue)
        else:
            waiting = np.maximum(waiting, products)
        if self.words is None:  # a product of words may be several instructions
            waiting = np.maximum(waiting, (products + loads + 1) / self.costs.issue)
        step = np.maximum(waiting, sums) / products
        panel_bytes = work.taps * self.terms * tiles.vectors * self.lanes * self._element_bytes
        # A panel that is too large comes from the second-level cache for each tile of rows.
        far = np.maximum(step, self.costs.panel / tiles.rows)
        step = np.where(panel_bytes > self.target.l1_bytes // 2, far, step)
        reductions = ceil_div(work.rows, tiles.rows) * panels * work.points
        cycles: Array = reductions * products / 2 * (work.taps * self.terms * step + self.costs.reduction)
        return cycles

    def _matrix_products(self, tiles: _Tiles, work: _Work, words: Words) -> Array:
        """Return the cycles of products of matrices."""
        heights, steps = tiles.rows / MATRIX_ROWS, work.taps * self.terms / words.depth
        panel_bytes = steps * tiles.vectors * MATRIX_TILE_BYTES
        rows_bytes = work.rows * work.taps * self.channels * self._element_bytes
        far = np.where(panel_bytes > self.target.l1_bytes // 2, tiles.vectors, 0)
        far = far + np.where(rows_bytes > self.target.l1_bytes // 2, heights, 0)
        loads = LOAD_CYCLES * (heights + tiles.vectors)
        step = step_cycles(words, heights * tiles.vectors, loads, far * MATRIX_TILE_BYTES / MATRIX_BYTES)
        reductions = ceil_div(work.rows, tiles.rows) * self._panels(tiles, work) * work.points
        cycles: Array = reductions * (steps * step + SUM_CYCLES * heights * tiles.vectors)
        return cycles

    def _results(self, tiles: _Tiles, work: _Work) -> Iterator[Array]:
        """Yield the cycles of storing the results of multiply-adds, and of transforming these."""
        # Strassen's results are fetched for the store and again for the transform. Winograd's save far more.
        stored = work.rows * work.points * self._panels(tiles, work) * tiles.vectors
        far = self._far(stored)
        yield stored * far * (1 + 2 * self.strassen)
        if work.transformed:
            yield np.where(far > 0, stored * self.costs.fetch, 0.0)
            transform = self.costs.move + self.costs.transform * work.transformed
            yield work.rows * work.outputs * self._panels(tiles, work) * tiles.vectors * transform

    def _rows(self, tiles: _Tiles, work: _Work) -> Iterator[Array]:
        """Yield the cycles of reading rows again from beyond the second-level cache: of one product, of all points."""
        element, panel = self._element_bytes, tiles.vectors * self.lanes
        # The rows of a product, if they do not fit into the cache together with a panel.
        near = (work.rows * self.channels + panel * self.terms) * work.taps * element
        read = work.rows * (self._panels(tiles, work) * tiles.vectors) * work.taps * self.channels
        again = read / self.lanes * element
        kept = self.target.l2_bytes * self.costs.rows_share
        yield np.where(near > kept, again / self.costs.far_bytes, 0.0)
        # The rows of all points, for every tile of channels. Strassen's are long and fetched ahead.
        if not self.strassen:
            held = work.rows * work.points * self.channels * work.taps * element
            yield np.where(held > kept, held / self.costs.far_bytes * self.costs.again, 0.0)

    def _with_filter(self, products: Array, tiles: _Tiles, work: _Work, runs: int) -> Array:
        """Return the cycles of `products` and of the filter, which each block fetches."""
        panels = self._panels(tiles, work) * tiles.vectors * self.lanes
        fetched = work.points * work.taps * panels * self.terms * self._element_bytes
        whole = fetched * ceil_div(self.geometry.out_channels, tiles.channels) * runs
        return with_filter(products, fetched, whole, self.target)

    def _finish(self, blocks: _Blocks, tiles: _Tiles, results: Array | float) -> Array:
        """Return the cycles to finish the outputs of a tile of channels, made of vectors of `results`."""
        if phases := contiguous_phases(self.problem, self.lanes):
            moved = 3 * self.costs.move
            vectors: Array = blocks.outputs * tiles.channels / phases
        else:
            moved = (
                3 * self.costs.move if self.problem.data_format == "NXC" else 4 * self.costs.move + self.costs.transpose
            )
            vectors = blocks.outputs * self._vectors(tiles.channels)
        if self.problem.quantization is not None and self.problem.data_format == "NXC":
            moved += self.costs.matrix_requantized
        cycles: Array = vectors * (moved + self._waiting_lines(blocks, tiles) + self._far(results))
        if self.problem.data_format == "NCX":
            cycles = cycles + self.costs.row_piece * blocks.pieces * tiles.channels
        return cycles

    def _vectors(self, channels: Array) -> Array:
        """Return the vectors that the outputs of a position take, in time: a part of one less, where channels are last.

        In groups other parts share its line.
        """
        few = self.problem.data_format == "NXC" and self.problem.groups == 1
        part = channels % self.lanes * (self.costs.part_element if few else 1.0)
        vectors: Array = channels // self.lanes + np.minimum(part, 1.0)
        return vectors

    def _waiting_lines(self, blocks: _Blocks, tiles: _Tiles) -> Array | float:
        """Return the cycles that a vector of Winograd's outputs waits for its line from memory, if that lies alone.

        The processor fetches ahead what is stored in order, or lies together: at least two lines. A part of one waits
        for the last cache as well.
        """
        problem = self.problem
        in_order = self.strassen or not any(work.transformed for work in blocks.works)
        if in_order or problem.data_format == "NCX" or problem.dynamic_axes:
            return 0.0
        size = element_bytes(problem.output_dtype)
        part = (tiles.channels * size < LINE) | ends_within_line(problem)
        far = goes_to_memory(problem) | (outgrows_caches(problem) & part)
        alone = (tiles.channels * size <= LINE) & (tiles.channels < self.geometry.out_channels)
        waiting: Array = self.costs.lone_line * (self.lanes * size / LINE) * (far & alone)
        return waiting

    def _far(self, vectors: Array | float) -> Array:
        """Return the further cycles per vector if as many `vectors` do not stay in the second-level cache."""
        size = vectors * (self.target.vector_bits // 8)
        far = np.where(size > self.target.l2_bytes * self.costs.far_share, self.costs.far, 0.0)
        # What the last cache does not hold goes to memory and back. A store fetches its line first.
        beyond = np.maximum(0.0, 1 - LAST_CACHE / np.maximum(size, 1))
        return far + beyond * 3 * (self.target.vector_bits // 8) / self.costs.memory_bytes

    @property
    def _element_bytes(self) -> int:
        return self.target.vector_bits // 8 // self.lanes


def _gathers(problem: Problem, geometry: Geometry) -> bool:
    """Return True if products of words may read rows without a gather, which all plans would need otherwise."""
    return not problem.dynamic_axes and any(axis.taps > 1 for runs in geometry.runs for axis in runs)


@lru_cache(maxsize=ENUMERATIONS)
def candidates(
    problem: Problem, winograd: bool, strassen: bool, target: CpuTarget, lanes: int, words: Words | None = None
) -> Ranking[MatrixPlan]:
    """Return all plans to try, cheapest first, each with its cost: cycles per useful product, relative.

    If there are `words`, these are the input channels of `problem`.
    """
    geometries = Geometry.choices(problem)
    if contiguous_phases(problem, lanes):
        del geometries[1:]  # phases that are vectors of the output begin with it
    arithmetics = [
        _Arithmetic(problem, geometry, target, lanes, int(strassen), words, flat)
        for geometry in geometries
        for flat in range(1 + (tiled(words) and not winograd and _gathers(problem, geometry)))
    ]
    useful = arithmetics[0].useful()
    plans = (
        arithmetic.plans(outputs)
        for arithmetic in arithmetics
        for outputs in output_choices(arithmetic.geometry, winograd, integers=problem.accumulate_dtype == "int32")
    )
    return Ranking.of([(cycles / useful, numbers) for cycles, numbers in plans], MatrixPlan.of_numbers)
