"""The candidates of the direct definitions, and their costs by arithmetic on the target's registers and caches.

The costs of register tiles (`register_tiles`) are those of a step of the reduction; here are those of blocks: packing,
caches, filters from beyond these, and the way to the output.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache

import numpy as np

from tvm_deconv.compute.direct_layout import (
    Tile,
    block_extents,
    product_count,
    transposes_channels,
)
from tvm_deconv.compute.indexing import CHANNELS, GROUPS, INPUTS, ROWS, spans, tiles_of_channels
from tvm_deconv.compute.phases import AxisPhases, Geometry, axis_rows
from tvm_deconv.compute.storage import stores_bytes
from tvm_deconv.compute.winograd import MAX_PRODUCTS, winograd
from tvm_deconv.compute.words import Words, tiled
from tvm_deconv.problem import Array, Problem, element_bytes
from tvm_deconv.problem.arithmetic import ceil_div, round_up
from tvm_deconv.schedules.x86 import data_in_place, register_channels
from tvm_deconv.schedules.x86.amx import MATRIX_RATE
from tvm_deconv.schedules.x86.costs import LAST_CACHE, Costs, costs_of
from tvm_deconv.schedules.x86.interleave import MAX_STREAMS
from tvm_deconv.schedules.x86.plans import TilePlan
from tvm_deconv.schedules.x86.ranking import Ranking
from tvm_deconv.schedules.x86.register_tiles import FOLLOWING, LATENCY_ACCUMULATORS, RegisterTile, RegisterTiles
from tvm_deconv.schedules.x86.row_prefetching import comes_from_memory
from tvm_deconv.schedules.x86.stores import LINE, ends_within_line, goes_to_memory, outgrows_caches
from tvm_deconv.targets import CpuTarget

#: Winograd's algorithm for which the cost of a transform is given: four outputs of two taps.
USUAL = winograd(4, 2)
#: Winograd's largest m and most products, along each of several axes and along one axis alone. Beyond these, rounding
#: errors exceed the tolerance.
SEVERAL, ALONE = (4, 6), (6, MAX_PRODUCTS)
#: Taps of an axis from which on pieces of them save more products than all of them in one.
_MANY_TAPS = 6
#: Taps of a piece at least: with fewer there is less to save.
_SHORT_PIECE = 3
#: Lists of candidates that are kept. A build asks repeatedly for those of a problem and of its nearest tuning record.
ENUMERATIONS = 8
#: With fewer blocks than this, plans that split tiles of channels over threads are tried too.
FEW_TASKS = 64
#: Bytes from which on TVM takes an array from the workspace, where LLVM does not keep it in registers.
_WORKSPACE = 1024
#: Stores of a register tile that the next tile's multiply-adds hide, whatever their lines wait for.
_HIDDEN_STORES = 18
#: The cycles to make a vector of accumulators of data that have fewer bits and stay in registers.
_CONVERTED = 0.5
#: Bytes from one address to the next that competes with it for stores past the caches.
_PAGE = 2048


def block_count(geometry: Geometry, block: Sequence[int]) -> int:
    """Return the number of blocks in a call, of `block` images and positions each."""
    extents = (geometry.batch, *(axis.positions for axis in geometry.axes))
    return math.prod(map(ceil_div, extents, block))


def with_filter(products: Array, fetched: Array, size: Array | int, target: CpuTarget) -> Array:
    """Return the cycles of `products` with a filter of `size` bytes, of which `fetched` are read for them.

    From beyond the second-level cache it is fetched ahead, while products of what was fetched are made.
    """
    costs = costs_of(target)
    far, beyond = size > target.l2_bytes * costs.far_share, size > LAST_CACHE
    fetch = fetched / np.where(beyond, costs.filter_memory_bytes, np.where(far, costs.filter_bytes, np.inf))
    waiting = np.where(beyond, costs.memory_waiting, costs.waiting)
    cycles: Array = np.maximum(products, fetch) + waiting * np.minimum(products, fetch)
    return cycles


def missed_pages(problem: Problem, costs: Costs) -> float:
    """Return the further cycles to start on another piece of the data, if they come from memory."""
    return costs.piece_memory if comes_from_memory(problem) else 0.0


@dataclass(frozen=True, slots=True)
class Plan(TilePlan[Tile]):
    """The knobs of a direct schedule."""

    tile_type = Tile

    def tasks(self, problem: Problem, form: str) -> int:
        """Return the number of independent tasks of a call."""
        geometry = Geometry.of(problem)
        groups, channels = tiles_of_channels(geometry, form, self.tile)
        count = groups * block_count(geometry, self.tile.block)
        return count * channels if self.share_data else count


def _halvings(sums: Array, lanes: int) -> Array:
    """Return the steps that add up the lanes of `sums` accumulators, of as many accumulators as lanes at once."""
    rest = sums % lanes
    last = sum(np.minimum(rest, lanes >> step) for step in range(1, lanes.bit_length()))
    steps: Array = sums // lanes * (lanes - 1) + last
    return steps


def steps(extent: int) -> list[int]:
    """Return the block extents to try: powers of two, three times these, and the whole `extent`."""
    sizes = {extent}
    for base in (1, 3):
        size = base
        while size < extent:
            sizes.add(size)
            size *= 2
    # As many blocks of the same size: less is left over in the last one.
    return sorted({ceil_div(extent, ceil_div(extent, size)) for size in sizes})


def outputs_along(axis: AxisPhases, most: tuple[int, int], *, dilated: bool, pieces: bool) -> list[int]:
    """Return Winograd's m to try along `axis`.

    `most` are the largest m and the most products. The list is empty if no run has several taps, or if they are dilated
    and may not be so. If there are many, they may be cut into `pieces`.
    """
    taps = max((run.taps for run in axis.runs), default=1)
    if taps == 1 or (axis.step > 1 and not dilated):
        return []
    pieces = pieces and taps >= _MANY_TAPS
    most_outputs = min(most[0], most[1] + 1 - (_SHORT_PIECE if pieces else taps), ceil_div(axis.positions, axis.step))
    points = {m: max(axis_rows(axis, run, 1, m).points for run in axis.runs) for m in range(2, most_outputs + 1)}
    return [m for m, products in points.items() if products <= most[1]]


def outer_outputs(geometry: Geometry) -> list[tuple[int, int]]:
    """Return Winograd's m to try along the first two axes: along either one, or the same along both.

    Taps must read neighbouring data.
    """

    def along(most: tuple[int, int]) -> list[list[int]]:
        return [outputs_along(axis, most, dilated=False, pieces=False) for axis in geometry.axes[:2]]

    (first, second), (of_first, of_second) = along(ALONE), along(SEVERAL)
    both = set(of_first).intersection(of_second)
    return [*((1, m) for m in second), *((m, 1) for m in first), *((m, m) for m in sorted(both))]


def blocks(geometry: Geometry, row_unit: int, outputs: tuple[int, int] = (1, 1)) -> Iterator[tuple[int, int, int, int]]:
    """Yield the blocks to try: images and positions along three axes.

    An axis is cut only if every axis outside of it is cut to one. A row that is cut, or that a call may make longer, is
    cut into multiples of `row_unit` positions. Along the first two axes blocks hold whole tiles of Winograd's
    `outputs`.
    """
    depth, height, width = (axis.positions for axis in geometry.axes)
    if geometry.dynamic[2]:
        width = round_up(width, row_unit)

    def whole(axis: int, positions: int) -> int:
        # With a shift, the outputs of a block take one position more than the block has.
        shared = int(geometry.axes[axis].shift > 0)
        return min(round_up(positions + shared, outputs[axis]) - shared, geometry.axes[axis].positions)

    for w in steps(width):
        yield 1, whole(0, 1), whole(1, 1), min(round_up(w, row_unit), width)
    for h in steps(height):
        yield 1, whole(0, 1), whole(1, h), width
    for d in steps(depth):
        yield 1, whole(0, d), height, width
    for n in steps(geometry.batch):
        yield n, depth, height, width


@dataclass(frozen=True, slots=True)
class _Work:
    """The work of a position, or of a tile of Winograd's m positions along axes with transforms.

    `products` counts those of a pair of channels. `data` are packed elements of an input channel, and `sums` those made
    of them, which take as long as usual ones times `summed`. A phase of an output channel has at most `results`.
    """

    products: int
    data: int
    sums: int
    summed: float
    results: int

    @staticmethod
    def of(geometry: Geometry, outputs: tuple[int, int]) -> _Work:
        """Count the work for `outputs` along the first two axes."""
        rows = [
            [axis_rows(axis, run, 1, m) for run in axis.runs]
            for axis, m in zip(geometry.axes, (*outputs, 1), strict=True)
        ]
        counts = [[product_count(row, m) for row in of_axis] for of_axis, m in zip(rows, outputs, strict=False)]
        untransformed = [
            sum(count for row, count in zip(of_axis, counts_of_axis, strict=True) if not row.transformed)
            for of_axis, counts_of_axis in zip(rows, counts, strict=False)
        ]
        taps = [
            sum(row.run.count * row.taps * product_count(row, m) for row in of_axis)
            for of_axis, m in zip(rows, (*outputs, 1), strict=True)
        ]
        return _Work(
            math.prod(taps),
            math.prod(outputs),
            math.prod(map(sum, counts)) - math.prod(untransformed),
            sum(max((row.algorithm.terms for row in of_axis if row.algorithm), default=0.0) for of_axis in rows)
            / USUAL.terms,
            math.prod(max(counts_of_axis, default=1) for counts_of_axis in counts),
        )


@lru_cache(maxsize=ENUMERATIONS)
def candidates(
    problem: Problem, form: str, winograd: bool, target: CpuTarget, lanes: int, words: Words | None = None
) -> Ranking[Plan]:
    """Return all plans to try, cheapest first, each with its cost: cycles per useful product, relative.

    If `winograd`, plans use Winograd's transforms along the first two axes. If there are `words`, these are the
    input channels.
    """
    geometries = Geometry.choices(problem)
    parts = []
    for geometry in geometries:
        for outputs in outer_outputs(geometry) if winograd else [(1, 1)]:
            costs, numbers = _Arithmetic.of(problem, geometry, form, outputs, target, lanes, words).plans()
            parts.append((costs * geometry.taps / max(geometries[0].taps, 1), numbers))
    return Ranking.of(parts, Plan.of_numbers)


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Blocks with what their extents decide, each as a column, for tables of blocks by register tiles.

    `count` are the blocks of a call, `extents` one image of the packed data of each, `positions` the flat positions
    that its outputs take. `whole` blocks hold all spatial axes, `rows` whole rows, and `aligned` ones rows of whole
    vectors without a halo.
    """

    sizes: Array
    count: Array
    extents: Array
    positions: Array
    whole: Array
    rows: Array
    aligned: Array

    @staticmethod
    def of(geometry: Geometry, form: str, lanes: int, outputs: tuple[int, int]) -> _Blocks:
        """List the blocks to try."""
        sizes = [*dict.fromkeys(blocks(geometry, lanes if form == ROWS else 1, outputs))]
        count, extents, positions, whole, rows, aligned = [], [], [], [], [], []
        for block in sizes:
            images, *lengths = block
            tile = Tile(*block, 1, 1, 1, geometry.uncropped, *outputs)
            packed = block_extents(geometry, tile)
            depth, height, width = map(ceil_div, spans(geometry, block[1:]), tile.outputs)
            row = round_up(tile.width, lanes) + width - tile.width if form == ROWS else width
            count.append(block_count(geometry, block))
            extents.append(images * math.prod(packed))
            positions.append((((images - 1) * packed[0] + depth - 1) * packed[1] + height - 1) * packed[2] + row)
            held = [axis.positions <= length for axis, length in zip(geometry.axes, lengths, strict=True)]
            whole.append(all(held))
            rows.append(held[2])
            aligned.append(packed[2] == tile.width)
        columns = (np.array(values, np.float64)[:, None] for values in (count, extents, positions))
        truths = (np.array(values, np.bool_)[:, None] for values in (whole, rows, aligned))
        return _Blocks(np.array(sizes, np.int64), *columns, *truths)

    def size(self, axis: int) -> Array:
        """Return the images, or the positions along an axis."""
        return self.sizes[:, axis, None].astype(np.float64)

    @property
    def block(self) -> Array:
        """The images and positions of a block, multiplied."""
        block: Array = np.prod(self.sizes.astype(np.float64), axis=1)[:, None]
        return block


@dataclass(frozen=True, slots=True)
class _Registers:
    """Register tiles, an array of each of their fields."""

    channels: Array
    positions: Array
    phases: Array
    near: Array
    far: Array
    part: Array
    few: Array

    @staticmethod
    def of(tiles: Sequence[RegisterTile]) -> _Registers:
        """Turn a list into arrays."""
        names = [part.name for part in fields(RegisterTile)]
        return _Registers(*(np.array([getattr(tile, name) for tile in tiles], np.float64) for name in names))


@dataclass(frozen=True, slots=True)
class _Arithmetic:
    """The costs of plans for one problem on one target, with Winograd's `outputs` along the first two axes.

    `pack` and `finish` are the cycles to pack a vector and to finish one of the output, of which a network of shuffles
    saves `shuffled`. If it `stores_channels`, all `registers` are finished there, with vectors of channels. If it
    `transposes`, vectors of channels become vectors of positions. The filter has `filter_size` bytes. `rate` is that at
    which products are made, relative to two vectors in a cycle.
    """

    problem: Problem
    geometry: Geometry
    form: str
    outputs: tuple[int, int]
    target: CpuTarget
    lanes: int
    costs: Costs
    work: _Work
    pack: float
    finish: float
    shuffled: float
    stores_channels: bool
    transposes: bool
    filter_size: int
    registers: RegisterTiles
    rate: float

    @staticmethod
    def of(
        problem: Problem,
        geometry: Geometry,
        form: str,
        outputs: tuple[int, int],
        target: CpuTarget,
        lanes: int,
        words: Words | None,
    ) -> _Arithmetic:
        """Count the work, and the cycles that do not depend on the plan."""
        work, rows, costs = _Work.of(geometry, outputs), form == ROWS, costs_of(target)
        # Vectors that are not contiguous in the caller's arrays are loaded and stored element by element.
        foreign = (problem.data_format == "NCX") != rows
        pack = costs.pack
        transposes = rows and problem.data_format == "NXC" and transposes_channels(problem.in_channels, lanes)
        if transposes and words:
            pack = costs.transposed_words * round_up(problem.in_channels, lanes) / problem.in_channels
        elif transposes:
            pack += costs.transposed
        elif foreign and problem.groups * problem.in_channels > 1:
            pack *= lanes / costs.gathered
        # Rows of more phases than a network of shuffles takes are stored one by one.
        scatters = foreign and problem.groups * problem.out_channels > 1
        scatters = scatters or (rows and geometry.axes[2].stride > MAX_STREAMS)
        finish = costs.finish * (lanes / costs.scattered if scatters else 1.0)
        in_networks = scatters and (max(outputs) == 1 or costs.shuffles_sums)
        shuffled = finish - costs.finish - costs.transpose if in_networks else 0.0
        finish += costs.sum * (work.results - 1)
        if any(len(axis.runs) > 1 for axis in geometry.axes[:2]):
            finish += costs.chosen
        if problem.quantization is not None:
            ends_in_part = form == CHANNELS and problem.out_channels % lanes > 0
            finish += costs.requantized * (1 + ends_in_part)
        stores_channels = register_channels.supports(problem, geometry, form)
        # Taps count in Winograd's rows too: with points counted, two layers in AVX2 became 0.95 times as fast.
        elements = geometry.groups * geometry.in_channels * geometry.out_channels * geometry.taps
        filter_size = elements * _element_bytes(target, lanes)
        streams_filter = filter_size > target.l2_bytes * costs.far_share
        registers = RegisterTiles(problem, geometry, form, target, lanes, streams_filter, words)
        rate = MATRIX_RATE / words.uses if tiled(words) else 1.0
        return _Arithmetic(
            problem,
            geometry,
            form,
            outputs,
            target,
            lanes,
            costs,
            work,
            pack,
            finish,
            shuffled,
            stores_channels,
            transposes,
            filter_size,
            registers,
            rate,
        )

    def plans(self) -> tuple[Array, Array]:
        """Return all plans to try, their costs and their numbers: register tiles of a block before the next block."""
        geometry = self.geometry
        registers = _Registers.of(self.registers.all())
        blocks = _Blocks.of(geometry, self.form, self.lanes, self.outputs)
        cost = self.cost(blocks, registers)
        groups, channels = self._tiles_of_channels(registers)
        several = (channels > 1) & (blocks.count * groups < FEW_TASKS)
        tried = np.stack([np.ones_like(several), several], axis=-1)
        block, register, shared = np.nonzero(tried)
        numbers = np.zeros((len(block), len(fields(Tile)) + 2), np.int64)
        numbers[:, 0] = shared
        numbers[:, 2:6] = blocks.sizes[block]
        for column, values in enumerate((registers.channels, registers.positions, registers.phases), 6):
            numbers[:, column] = values[register]
        numbers[:, 9:12] = geometry.uncropped, *self.outputs[:2]
        numbers[:, 12] = registers.part[register]
        return np.stack([cost, cost + self._sharing(blocks, registers)], axis=-1)[tried], numbers

    def cost(self, blocks: _Blocks, registers: _Registers) -> Array:
        """Return the cycles per useful product, relative to two vector multiply-adds per cycle."""
        geometry, work, lanes, costs = self.geometry, self.work, self.lanes, self.costs
        ended = blocks.rows | geometry.dynamic[2]
        stores_rows = (blocks.aligned & self.registers.stores_vectors) | (ended & self.registers.stores_parts)
        finishes_in_registers = np.bool_(self.stores_channels) | (
            stores_rows & (max(self.outputs) == 1) & (registers.phases % geometry.axes[2].stride == 0)
        )
        useful = geometry.batch * math.prod(axis.positions for axis in geometry.axes)
        positions = round_up(blocks.positions, registers.positions)
        in_place = self._in_place(blocks, registers)
        packed = np.where(in_place, 0, self._packed_bytes(blocks, registers))
        # The products of a point need its own sums only.
        needed = packed * max(work.data, work.sums) // work.results
        results = np.where(finishes_in_registers, 0, self._result_bytes(registers, positions) * work.results)
        cost = np.where(needed <= self.target.l1_bytes // 2, registers.near, registers.far)
        cost = cost * np.where(positions > FOLLOWING * registers.positions, 1.0, registers.few)
        cost = cost * blocks.count * positions / useful
        cost *= work.products / max(geometry.taps, 1)
        share = costs.groups_share if self.form == GROUPS else costs.l2_share
        # Words of all groups are fetched ahead in their order. With those of a tile, lines of other tiles come along.
        words = np.where(geometry.groups > registers.channels, 2, 0)
        held = needed * np.where(self._in_pairs(registers), words, 1)
        cost *= 1 + costs.overfull * np.maximum(0.0, (held + results) / (self.target.l2_bytes * share) - 1)
        inside = positions * self._channels(registers) * geometry.in_channels * work.products / (2 * lanes * self.rate)
        # A vector of the filter serves half a cycle at each position: longer blocks are better.
        vector = lanes * _element_bytes(self.target, lanes)
        cost *= with_filter(np.ones(1), 2 * vector * self.rate / positions, self.filter_size, self.target)
        ties = costs.ties * (1.0 if self.form == ROWS or self.stores_channels else costs.channels)
        outside = self._outside(blocks, registers, packed, in_place, finishes_in_registers)
        total: Array = cost * (ties + outside / np.maximum(inside, 1)) / self.rate
        return total

    def _outside(
        self, blocks: _Blocks, registers: _Registers, packed: Array, in_place: Array, finishes_in_registers: Array
    ) -> Array:
        """Return the cycles of a block outside of the reduction.

        They go to packing with the halo, interleaving, copying and the start of a task.
        """
        geometry, work, costs, element = self.geometry, self.work, self.costs, _element_bytes(self.target, self.lanes)
        phases = math.prod(axis.stride for axis in geometry.axes)
        channels = self._channels(registers)
        made = phases * channels * blocks.block
        # Less than a line of channels of a position: other tiles of channels move the line again.
        several = self.form == GROUPS and (geometry.groups > registers.channels)
        again = np.where(several, np.maximum(1.0, LINE / (registers.channels * element)), 1.0)
        # Sums of data that were transposed are made when those are no longer near.
        near, sums = (1.0, 2 * costs.sum) if self.transposes else (costs.near, costs.sum)
        packing = self.pack * again * work.data * (near if work.sums else 1.0)
        cycles = (packing + sums * work.sums * work.summed) * packed / element
        finish = np.where(finishes_in_registers, self._register_finish(blocks, registers), self._finish(registers))
        cycles = (cycles + finish * again * made) / self.lanes + costs.task
        if self.form == GROUPS:
            cycles += costs.position * (1 + phases) * blocks.block
            # Filters that leave the first-level cache from block to block come from the second, a vector in a cycle.
            leaves = work.products * geometry.groups * element > self.target.l1_bytes
            cycles += leaves * work.products * channels / self.lanes
        # Memory that is contiguous in the caller's arrays is fetched ahead. Each piece of it starts with a miss.
        if self.problem.data_format == "NCX":
            pieces = np.where(blocks.rows, blocks.size(0), blocks.size(0) * blocks.size(1) * blocks.size(2))
            missed = costs.piece + missed_pages(self.problem, costs)
            started = pieces * (missed * geometry.in_channels + costs.piece * channels)
            cycles += np.where(blocks.whole | in_place, 0.0, started)
        kept = finish * made / self.lanes + costs.register_task
        if self._converts:
            kept = kept + _CONVERTED * packed / element / self.lanes
        outside: Array = np.where(self._keeps_data(registers, packed // element), kept, cycles)
        return outside

    @property
    def _converts(self) -> bool:
        """True if data become another type of accumulators, which takes two instructions for each vector."""
        return self.registers.words is None and element_bytes(self.problem.dtype) < _element_bytes(
            self.target, self.lanes
        )

    def _finish(self, registers: _Registers) -> Array:
        """Return the cycles to finish a vector of rows or channels that passes through memory."""
        geometry = self.geometry
        streams, whole = geometry.axes[2].stride * geometry.out_channels, registers.channels >= geometry.out_channels
        shuffles = whole & (self.form == ROWS) & (geometry.groups == 1) & (streams <= MAX_STREAMS)
        finish: Array = self.finish - self.shuffled * shuffles
        return finish

    def _in_place(self, blocks: _Blocks, registers: _Registers) -> Array:
        """Tell whether register tiles read the caller's data."""
        geometry, sizes = self.geometry, [*map(blocks.size, range(4))]
        in_place = data_in_place.supports(self.problem, geometry, self.form, self.target) and data_in_place.reads_once(
            geometry, sizes, registers.channels, registers.positions, registers.phases
        )
        return np.asarray(in_place)

    def _keeps_data(self, registers: _Registers, packed: Array) -> Array:
        """Tell whether the `packed` elements of a block stay in registers from the caller's data to the products.

        That is so if the block is small register tiles without a halo, whose products leave enough registers to the
        data.
        """
        kept: Array = (
            (self.form == INPUTS)
            & (packed == registers.positions * self.geometry.in_channels)
            & (packed * _element_bytes(self.target, self.lanes) < _WORKSPACE)
            & (registers.phases * registers.channels * registers.positions <= LATENCY_ACCUMULATORS)
        )
        return kept

    def _register_finish(self, blocks: _Blocks, registers: _Registers) -> Array | float:
        """Return the cycles to finish a vector of the output in registers.

        Past the caches, rows at the same offset in a page are stored one after the other.
        """
        if self.form == INPUTS:
            sums = registers.channels * registers.positions * registers.phases
            step = self.costs.lane_sum / (2 if self.registers.halved else 1)
            summed: Array = step * self.lanes * _halvings(sums, self.lanes) / sums
            return (
                self.costs.channel_finish + summed + self._storing_sums(registers, sums) + self._quantizing_sums(sums)
            )
        if self.stores_channels:
            return self._channel_finish(blocks, registers)
        axes = self.geometry.axes
        row = axes[2].positions * axes[2].stride * self._output_bytes
        plane = row * math.prod(axis.positions * axis.stride for axis in axes[:2])
        several_rows = (registers.phases > axes[2].stride) & (row % _PAGE == 0)
        several_planes = (registers.channels > 1) & (plane % _PAGE == 0)
        whole = blocks.aligned & self.registers.stores_vectors
        past = outgrows_caches(self.problem)
        stored: Array = self.costs.register_finish + self.costs.aliased * (
            past & whole & (several_rows | several_planes)
        )
        stored = stored + np.where(whole, self._placing(blocks, registers), self._in_two_rows())
        stored = stored + np.where(past & ~whole, self._fetched_parts(), 0.0)
        return stored + (self.costs.register_requantized if self.problem.quantization is not None else 0.0)

    def _channel_finish(self, blocks: _Blocks, registers: _Registers) -> Array:
        """Return the cycles to finish a vector of channels in registers."""
        costs, channels = self.costs, self.geometry.out_channels
        apart = registers.phases % self.geometry.axes[2].stride != 0
        again: Array | float = 0.0
        shares_lines = self.form == CHANNELS and ends_within_line(self.problem)
        if shares_lines:
            # Tiles of channels of a position share lines.
            shared = registers.channels < channels
            apart, again = apart | shared, shared * self._shared_line(blocks, channels, 0.0, costs.line_again)
        finish: Array = costs.channel_finish + costs.apart * apart + again + self._quantizing(registers)
        finish += self._waiting_lines(registers)
        if shares_lines and self.geometry.groups > 1:
            # Groups of a position share lines.
            of_groups = self.geometry.groups * channels
            finish = finish + self._shared_line(blocks, of_groups, costs.line_near, costs.line_far)
        if self.form == GROUPS:
            several_rows = blocks.size(0) * blocks.size(1) * blocks.size(2) > 1
            across = several_rows * np.minimum(1.0, (registers.positions - 1) / blocks.size(3))
            stores = np.where(self._in_pairs(registers), 0.5, 1.0)
            finish = finish + costs.across * across * stores + self._rounding(registers)
        return finish + self._waiting_stores(registers)

    @property
    def _output_bytes(self) -> int:
        """The bytes of an output in memory."""
        return element_bytes(self.problem.output_dtype)

    def _shared_line(self, blocks: _Blocks, channels: int, near: float, far: float) -> Array:
        """Return the cycles to fetch a line again that was stored to in part.

        It stays in a cache while a block's outputs of as many `channels` do: `near` is what it takes if these exceed
        the first-level cache, and `far` if they exceed the second.
        """
        phases = math.prod(axis.stride for axis in self.geometry.axes)
        outputs = blocks.block * phases * channels * self._output_bytes
        far_or_near = np.where(outputs > self.target.l2_bytes, far, near)
        fetched: Array = np.where(outputs > self.target.l1_bytes, far_or_near, 0.0)
        return fetched

    def _waiting_lines(self, registers: _Registers) -> Array | float:
        """Return the cycles that a vector of channels waits for its line from memory, besides those that all wait.

        The first tile to store to a line waits until it comes. If it fills part of it, the products of those which fill
        the rest later hide nothing.
        """
        if self.form != CHANNELS or not self.costs.fetches_pairs or not outgrows_caches(self.problem):
            return 0.0
        fetched = 2 * self.lanes * self._output_bytes / self.costs.memory_bytes
        hidden = self._filled(registers) * self._products
        waiting: Array = np.maximum(0.0, fetched - hidden) - max(0.0, fetched - self._products)
        return waiting

    def _filled(self, registers: _Registers) -> Array:
        """Return the part that a register tile of channels stores of the lines that come for it.

        A line's neighbour comes with it, which another phase of the row may fill, where a tile can hold all of them.
        """
        row, channels = self.geometry.axes[2], self.geometry.out_channels
        whole = registers.channels >= channels
        stored = np.minimum(registers.channels, channels) * self._output_bytes
        lines = np.where(stored < LINE, stored, stored // LINE * LINE)
        filled = np.where(whole, 1.0, lines / np.maximum(stored, LINE))
        together = np.gcd(registers.phases.astype(np.int64), row.stride)
        of_pair = np.minimum(filled, stored * np.where(whole, together, 1) / (2 * LINE))
        part: Array = np.where((together < row.stride) & (len(row.runs) == 1), of_pair, filled)
        return part

    @property
    def _products(self) -> float:
        """The cycles of the multiply-adds of a vector of the output."""
        phases = math.prod(axis.stride for axis in self.geometry.axes)
        return self.geometry.taps / phases * self.geometry.in_channels / 2

    def _placing(self, blocks: _Blocks, registers: _Registers) -> Array:
        """Return the cycles to find the row of a vector, which all rows of phases and channels of a tile share.

        Where vectors of positions are not parts of one row, each vector of outputs has its own. Stores to memory hide
        that.
        """
        last = self.geometry.axes[2]
        several = (last.positions % self.lanes > 0) | (blocks.size(3) % self.lanes > 0)
        shown = several & (not goes_to_memory(self.problem))
        cycles: Array = self.costs.place * shown * last.stride / (registers.channels * registers.phases)
        return cycles

    def _in_two_rows(self) -> float:
        """Return the cycles that a vector takes longer to be stored since some lie in two rows of positions.

        Whole vectors have been found to take half as long as halves, and none without a halo.
        """
        last, costs = self.geometry.axes[2], self.costs
        within = max(0, last.positions - self.lanes + 1) / (last.positions + last.halo)
        longer = costs.part_across if self.registers.halved else costs.part_across / 2 * (last.halo > 0)
        return longer * (1 - within) ** 2

    def _fetched_parts(self) -> float:
        """Return the cycles that a vector of a row that is no whole vectors waits for its lines beyond the caches.

        Those that come from memory are fetched while products are made.
        """
        if not goes_to_memory(self.problem):
            return self.costs.part_far
        return self.costs.part_far + max(0.0, self.costs.part_memory - self._products)

    def _quantizing(self, registers: _Registers) -> Array | float:
        """Return the cycles to scale and round a vector of sums, and to narrow it alone where it joins no other."""
        if self.problem.quantization is None:
            return 0.0
        vectors = np.where(registers.part > 0, registers.part, registers.channels) / self.lanes
        alone = stores_bytes(self.problem) * (vectors % 2) / vectors
        cycles: Array = self.costs.register_requantized + self.costs.narrowed * alone
        channels = self.geometry.groups if self.form == GROUPS else self.geometry.out_channels
        return cycles * round_up(channels, self.lanes) / channels

    def _storing_sums(self, registers: _Registers, sums: Array) -> Array:
        """Return the cycles to store what would be a vector of outputs, in pieces of those that lie together.

        All `sums` of a tile do that has all channels of a position, and all phases of a row.
        """
        geometry = self.geometry
        whole = (registers.channels == geometry.out_channels) & (geometry.groups == 1)
        rows = whole & (registers.phases % geometry.axes[2].stride == 0)
        together = np.minimum(np.where(rows, sums, registers.channels), self.lanes)
        pieces: Array = self.costs.lanes_apart * self.lanes / together
        return pieces

    def _quantizing_sums(self, sums: Array) -> Array | float:
        """Return the cycles to scale and round what would be a vector of outputs, of so many `sums` of a tile."""
        if self.problem.quantization is None:
            return 0.0
        vectors: Array = ceil_div(sums, self.lanes) * self.lanes / sums
        return self.costs.register_requantized * vectors

    def _rounding(self, registers: _Registers) -> Array | float:
        """Return the cycles to round a vector of groups, apart or as one of a pair."""
        if self.problem.output_dtype != "bfloat16":
            return 0.0
        rounding: Array = np.where(self._in_pairs(registers), self.costs.paired, self.costs.rounded)
        return rounding

    def _in_pairs(self, registers: _Registers) -> Array:
        """Tell which register tiles have pairs of vectors of groups."""
        width = np.where(registers.part > 0, registers.part, registers.channels)
        in_pairs: Array = self.registers.pairs & (width % (2 * self.lanes) == 0)
        return in_pairs

    def _waiting_stores(self, registers: _Registers) -> Array | float:
        """Return the cycles that a vector of channels waits to be stored past the caches.

        Stores of a register tile wait for lines while the next one is computed; those that are too many stop it.
        """
        if self.form != CHANNELS or not outgrows_caches(self.problem):
            return 0.0
        stores = registers.phases * registers.positions * registers.channels / self.lanes
        waiting: Array = self.costs.burst * np.maximum(0.0, 1 - _HIDDEN_STORES / stores)
        return waiting

    def _sharing(self, blocks: _Blocks, registers: _Registers) -> Array:
        """Return the further cost where the packed data of all blocks are kept for tasks of tiles of channels.

        They are written to and read from beyond the second-level cache, unless all of them stay there.
        """
        geometry, work = self.geometry, self.work
        kept = self._packed_bytes(blocks, registers) * (work.data + work.sums) * blocks.count
        products = geometry.batch * math.prod(axis.positions for axis in geometry.axes)
        useful = products * geometry.taps * geometry.in_channels * self._channels(registers)
        far = np.where(kept > self.target.l2_bytes * self.costs.l2_share, 2 * kept / self.costs.far_bytes, 0.0)
        sharing: Array = (far + self.costs.task) * 2 * self.lanes / np.maximum(useful, 1)
        return sharing

    def _tiles_of_channels(self, registers: _Registers) -> tuple[Array | int, Array | int]:
        """Return the numbers of tiles of groups, and of tiles of the output channels of a group."""
        geometry = self.geometry
        if self.form == GROUPS:
            return ceil_div(geometry.groups, registers.channels), geometry.out_channels
        return geometry.groups, ceil_div(geometry.out_channels, registers.channels)

    def _channels(self, registers: _Registers) -> Array | int:
        """Return the output channels that a block computes, of all its tiles."""
        return self.geometry.out_channels * (registers.channels if self.form == GROUPS else 1)

    def _packed_bytes(self, blocks: _Blocks, registers: _Registers) -> Array:
        """Return the bytes of the packed data of a block."""
        packed: Array = self.geometry.in_channels * blocks.extents * _element_bytes(self.target, self.lanes)
        if self.form != GROUPS:
            return packed
        return packed * registers.channels / np.where(self._in_pairs(registers), 2, 1)

    def _result_bytes(self, registers: _Registers, positions: Array) -> Array:
        """Return the bytes of the results of one tile of channels at `positions`, before they are interleaved."""
        phases = math.prod(axis.stride for axis in self.geometry.axes)
        results: Array = phases * registers.channels * positions * _element_bytes(self.target, self.lanes)
        return results


def _element_bytes(target: CpuTarget, lanes: int) -> int:
    """Return the bytes of an accumulator."""
    return target.vector_bits // 8 // lanes
