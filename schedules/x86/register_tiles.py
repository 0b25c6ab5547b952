"""The register tiles of the direct definitions, with the cycles that each takes for a useful product.

A register tile of ``c`` channels by ``v`` vectors of positions (or ``p`` positions by ``v`` vectors of channels) takes
``c*v`` accumulators, ``v`` vectors of the operand that is loaded, and one broadcast. These ``c*v + v + 1`` registers
must fit into the 16 of AVX2 or the 32 of AVX-512. A step of the reduction issues ``c*v`` multiply-adds and ``c + v``
loads. Four limits follow, in cycles per step:

- two multiply-adds per cycle;
- two loads per cycle;
- the latency of a multiply-add: four cycles, which eight accumulators hide;
- if a block exceeds the first-level cache, the ``v`` vectors from the second, at half a vector per cycle.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

from tvm_deconv.compute.direct_layout import phases_follow, phases_together
from tvm_deconv.compute.indexing import CHANNELS, GROUPS, INPUTS, ROWS
from tvm_deconv.compute.phases import Geometry
from tvm_deconv.compute.storage import sum_dtype
from tvm_deconv.compute.words import Words, tiled
from tvm_deconv.problem import Problem
from tvm_deconv.problem.arithmetic import ceil_div, round_up
from tvm_deconv.schedules.x86 import register_channels, register_parts, register_rows
from tvm_deconv.schedules.x86.amx import (
    CROSSING_CYCLES,
    LOAD_CYCLES,
    MATRIX_BYTES,
    MATRIX_ROWS,
    MATRIX_TILE_BYTES,
    PRODUCT_CYCLES,
    REGISTER_TILES,
    STREAM_BYTES,
    SUM_CYCLES,
    step_cycles,
)
from tvm_deconv.schedules.x86.costs import Costs, costs_of
from tvm_deconv.schedules.x86.dot import adds_apart
from tvm_deconv.schedules.x86.interleave import MAX_STREAMS
from tvm_deconv.schedules.x86.stores import LINE
from tvm_deconv.targets import CpuTarget

#: Independent accumulators that hide the latency of a multiply-add: four cycles, two per cycle.
LATENCY_ACCUMULATORS = 8
#: LLVM unrolls a loop wholly that becomes fewer instructions. Data that another tap reads again then stay in registers,
#: and push accumulators out.
_UNROLLED = 300
#: If a block has more register tiles than this and filters stay in registers, the next tiles hide the latency of one.
#: Not fitted: the blocks that were measured have many more, and one or two tiles cannot.
FOLLOWING = 8
#: Groups of a tile whose register tiles have part of them, at most: of more, the positions in use leave the caches.
_MOST_GROUPS = 256
#: Vectors of a register tile of groups, at most.
_MOST_VECTORS = 4
#: The taps of a phase from which on LLVM loads vectors of several at once.
_MANY_TAPS = 9
#: The cost of a load, relative to that of a multiply-add, where it is not what takes longest.
_LOAD = 0.1
#: The cost of making a vector of floats from a word's halves, relative to that of a multiply-add.
_MADE = 0.5


@dataclass(frozen=True, slots=True)
class RegisterTile:
    """A register tile and its cost for each useful product, relative to two vector multiply-adds per cycle.

    `near` is the cost while the block stays in the first-level cache, and `far` the cost otherwise, both in a block of
    many tiles; `few` is the factor in one of `FOLLOWING` at most. The tile has `part` of the channels, or all if that
    is 0.
    """

    channels: int
    positions: int
    phases: int
    near: float
    far: float
    part: int = 0
    few: float = 1.0


class _Step(NamedTuple):
    """A step of the reduction: multiply-adds, `loads`, and the `vectors` among them that a far block has.

    `missed` is what ties are broken by: loads, each by what it takes where it is not what takes longest.
    """

    products: int
    loads: float
    missed: float
    vectors: int


@dataclass(frozen=True)
class RegisterTiles:
    """The register tiles of a problem in one form and vectors of `lanes`.

    If `streams_filter`, the filter exceeds the caches. `words` are those of `tiles.candidates`.
    """

    problem: Problem
    geometry: Geometry
    form: str
    target: CpuTarget
    lanes: int
    streams_filter: bool
    words: Words | None = None

    def all(self) -> list[RegisterTile]:
        """Return every register tile that fits, with its cost."""
        if self.form == INPUTS:
            return [*self._of_inputs()]
        if self.form == GROUPS:
            return [*self._of_groups()]
        if tiled(self.words):
            return [*self._of_matrices(self.words)]
        return [self._rated(*shape) for shape in self._shapes()]

    @cached_property
    def costs(self) -> Costs:
        """The constants for the target."""
        return costs_of(self.target)

    @cached_property
    def _latency(self) -> float:
        """The accumulators that hide the latency of a multiply-add whose operands come late at times."""
        return LATENCY_ACCUMULATORS + self.costs.direct_slack

    @cached_property
    def _registers(self) -> int:
        """The registers of a tile: of integers in AVX2 one has products before they are added."""
        return self.target.vector_registers - int(self._sums_integers and adds_apart(self.target))

    @property
    def _sums_integers(self) -> bool:
        """True if sums are integers, and not numbers of float32."""
        return self.problem.accumulate_dtype == "int32" and (
            self.words is not None or sum_dtype(self.problem) == "int32"
        )

    @cached_property
    def stores_vectors(self) -> bool:
        """True if tiles of rows hold whole vectors of the output, where they hold all phases of a row."""
        return self._in_registers and register_rows.supports(self.problem, self.geometry, self.lanes)

    @cached_property
    def stores_parts(self) -> bool:
        """True if some tiles of rows hold parts of vectors of the output."""
        parts = register_parts.supports(self.problem, self.geometry, self.target, self.lanes)
        return self._in_registers and parts

    @cached_property
    def _in_registers(self) -> bool:
        """True if tiles of rows are in vector registers, not in those of matrices."""
        return self.form == ROWS and not tiled(self.words)

    @property
    def halved(self) -> bool:
        """True if vectors are halves of AVX-512's."""
        return self.target.vector_registers > 16 and self.target.vector_bits < 8 * LINE

    @cached_property
    def most_phases(self) -> int:
        """The most phases of the last two axes that runs share."""
        return max((runs[1].count * runs[2].count for runs in self.geometry.runs), default=1)

    @cached_property
    def pairs(self) -> bool:
        """True if two vectors of groups have their data in words, and are rounded together."""
        return register_channels.rounds_pairs(self.problem, self.geometry, self.form, self.target, self.lanes)

    @cached_property
    def _taps(self) -> int:
        """The fewest taps of a phase."""
        return min((math.prod(run.taps for run in runs) for runs in self.geometry.runs), default=1)

    @cached_property
    def _row_taps(self) -> int:
        """The fewest taps of a row that read the same lines in succession: none do if positions are broadcast."""
        runs = () if self.form == CHANNELS else self.geometry.axes[2].runs
        return min((run.taps for run in runs), default=1)

    @cached_property
    def _unaligned(self) -> float:
        """The share of a row's taps at which vectors of positions lie across two lines."""
        axis = self.geometry.axes[2]
        offsets = [
            (run.x0 - tap * run.x_step - axis.low) % self.lanes
            for run in axis.runs
            for tap in range(run.taps)
            for _ in range(run.count)
        ]
        return sum(offset > 0 for offset in offsets) / max(len(offsets), 1)

    @cached_property
    def _vector_loads(self) -> float:
        """Loads of a vector: of rows, all taps but one read vectors that lie across two lines, which is one more."""
        taps = self._row_taps
        return 1 + (taps - 1) / taps * self.target.vector_bits / (8 * LINE) if self.form == ROWS else 1.0

    def _shapes(self) -> Iterator[tuple[int, int, int]]:
        """Yield the scalars of a phase, the vectors and the phases of register tiles that fit."""
        registers = self._registers
        for vectors, phases in itertools.product(range(1, registers // 2), _divisors(self.most_phases)):
            for scalars in range(1, (registers - 1 - vectors) // vectors // phases + 1):
                if self.form == CHANNELS or self._has_rows(scalars, phases):
                    yield scalars, vectors, phases

    def _has_rows(self, channels: int, phases: int) -> bool:
        """Tell whether to try tiles of `channels` in rows."""
        most, stride = self.geometry.out_channels, self.geometry.axes[2].stride
        interleaves = self.problem.data_format == "NXC" and channels > 1
        if channels > most or (interleaves and channels * stride > MAX_STREAMS):
            return False
        # Several phases serve where the channels of one phase do not fill the registers, or where their results do not
        # stay in the cache.
        several = phases > 1 and 1 < channels < most
        # Short vectors are for short rows, of which most are parts.
        stored = self.stores_vectors or (self.stores_parts and not self.halved)
        return not several or (stored and phases % stride == 0)

    def _rated(self, scalars: int, vectors: int, phases: int) -> RegisterTile:
        """Return the register tile with its cost.

        To break ties: each vector misses a line of the nearest cache, and each broadcast is a load, and misses as well
        if the filter is streamed.
        """
        rows, registers = self.form == ROWS, self.target.vector_registers
        channels, positions = (scalars, vectors * self.lanes) if rows else (vectors * self.lanes, scalars)
        products = scalars * phases * vectors
        # LLVM keeps the filters of all taps from one register tile to the next, if there is room: the next tiles hide
        # the latency of one then, and where results are not stored for a later stage, broadcasts are no loads. If there
        # is none, one operand is in memory.
        alone = rows and self.geometry.in_channels == 1
        filters = scalars * phases * self._taps + (self.costs.storing if self.stores_parts else 0)
        crowded = alone and products + vectors + filters > registers + 1
        kept = alone and not crowded
        broadcast, vector = (0.15, 0.5) if rows else (self.costs.broadcast, self.costs.filter)
        missed, loads_filters = 0.4 if self.streams_filter else broadcast, not (kept and self.stores_parts)

        def step(count: int) -> _Step:
            # In CHANNELS phases share the data that are broadcast, and each has vectors of the filter.
            loaded, spread = (vectors, scalars * count) if rows else (vectors * count, scalars)
            loads = loaded * self._vector_loads + (spread if loads_filters else 0)
            return _Step(scalars * count * vectors, loads, missed * spread + vector * loaded, vectors)

        near, far = self._cycles(phases, step, 0 if kept else self._latency)
        waits = kept and near > 0  # no phase of a filter may have taps
        few = self._cycles(phases, step, self._latency)[0] / near if waits else 1.0
        factor = round_up(self.geometry.out_channels, channels) / self.geometry.out_channels
        # The data of all positions are kept from the first phase to the last. Integers are no operand in memory.
        held = products + positions + vectors + int(self._sums_integers)
        if not rows and phases > 1 and held > registers:
            factor *= self.costs.spilled
        if crowded or (rows and not alone and self._loads_early(products, vectors)):
            factor *= self.costs.crowded
        return RegisterTile(channels, positions, phases, factor * near, factor * far, few=few)

    def _loads_early(self, products: int, vectors: int) -> bool:
        """Tell whether vectors of the next taps, which LLVM loads early, push accumulators out of their registers.

        It does where it unrolls many taps, and a vector serves two or three products. In AVX2 that was not measured.
        """
        few = 2 * vectors <= products <= 3 * vectors and self._taps >= _MANY_TAPS
        return few and self.target.vector_registers > 16 and products + 2 * vectors > self.target.vector_registers + 2

    def _cycles(
        self, phases: int, step_of: Callable[[int], _Step], latency: float = LATENCY_ACCUMULATORS
    ) -> tuple[float, float]:
        """Return the cost of each product of a tile of `phases`, whose steps are those of `step_of` so many phases.

        The first is that of a block which stays in the first-level cache, the second that of others. `latency`
        accumulators hide that of a multiply-add.
        """
        near = far = 0.0
        for count, share in self._phase_shares(phases):
            products, loads, missed, vectors = step_of(count)
            factor = share * (1 + missed / products)
            step = max(1.0, loads / products, latency / products)
            near += factor * step
            # The taps of a row read the same lines of the second-level cache in succession.
            far += factor * max(step, 4 * vectors / products / self._row_taps)
        return near, far

    def _phase_shares(self, phases: int) -> Iterator[tuple[int, float]]:
        """Yield for each combination of runs how many of the `phases` a tile has, and its share of the products.

        Of integers it has all: a second instruction adds their products, which hides that fewer sums wait.
        """
        if self._sums_integers:
            yield phases, 1.0
            return
        products = max(self.geometry.taps, 1)
        for runs in self.geometry.runs:
            count = math.prod(phases_together(runs, phases))
            yield count, math.prod(run.count * run.taps for run in runs) / products

    def _of_groups(self) -> Iterator[RegisterTile]:
        """Yield the register tiles of groups, as tiles of channels and as parts of a wider one.

        A tap loads a vector of the filter for each phase, and of data for each position that no other tap of the row
        reads. Pairs of vectors of data are one of words, and made from it.
        """
        geometry, target, costs, row_taps = self.geometry, self.target, self.costs, self._row_taps
        groups = geometry.groups
        taps = max(geometry.taps, 1) / math.prod(axis.stride for axis in geometry.axes)
        for vectors, phases in itertools.product(range(1, _MOST_VECTORS + 1), _divisors(self.most_phases)):
            part = vectors * self.lanes
            data = vectors // 2 if self.pairs and vectors % 2 == 0 else vectors
            for positions in range(1, (target.vector_registers - 1 - vectors) // (vectors * phases) + 1):
                products, reach = vectors * phases * positions, positions + row_taps - 1
                loads = (vectors * phases + data * reach / row_taps) / products
                cost = max(1.0, loads) + _LOAD * loads
                cost += _MADE * vectors * reach / row_taps / products if data < vectors else 0.0
                # Each tile of phases reads all data of a block. A short reduction leaves its tile's own work uncovered.
                cost += costs.fetched / (phases * row_taps) + costs.tile / (products * taps)
                # Data are kept from tap to tap, and from one phase to the next.
                again = data * (reach - 1) - 2
                kept = max(costs.phased, again) if phases > 1 else costs.kept
                if products + vectors + kept > target.vector_registers:
                    cost *= costs.spilled
                wide = round_up(ceil_div(groups, ceil_div(groups, _MOST_GROUPS)), part)
                has_parts = phases >= costs.part_phases and not self.halved
                for channels in dict.fromkeys((part, wide) if has_parts else (part,)):
                    padded = cost * round_up(groups, channels) / groups
                    yield RegisterTile(channels, positions, phases, padded, padded, part if channels > part else 0)

    def _of_matrices(self, words: Words) -> Iterator[RegisterTile]:
        """Yield the register tiles of matrices, with costs relative to products in succession.

        A step loads 16 rows of the filter for each tile of channels, and 16 vectors of data for each of positions.
        """
        geometry, out_channels, l1_bytes = self.geometry, self.geometry.out_channels, self.target.l1_bytes
        load = LOAD_CYCLES + (CROSSING_CYCLES - LOAD_CYCLES) * self._unaligned
        steps = max(self._taps, 1) * geometry.in_channels / words.depth

        def step(rows: int, vectors: int, fetch: float) -> float:
            sums = rows * vectors
            cycles = step_cycles(words, sums, LOAD_CYCLES * rows + load * vectors, fetch)
            return float(cycles + SUM_CYCLES * sums / steps) / (words.uses * PRODUCT_CYCLES * sums)

        for (heights, vectors), phases in itertools.product(REGISTER_TILES, _divisors(self.most_phases)):
            if heights % phases or not all(phases_follow(runs, phases) for runs in geometry.runs):
                continue
            channels, near, far = heights // phases * MATRIX_ROWS, 0.0, 0.0
            for count, share in self._phase_shares(phases):
                rows = heights // phases * count
                streams = steps * rows * MATRIX_TILE_BYTES > l1_bytes // 2
                filters = rows * MATRIX_TILE_BYTES / STREAM_BYTES if streams else 0.0
                near += share * step(rows, vectors, filters)
                far += share * step(rows, vectors, filters + vectors * MATRIX_TILE_BYTES / MATRIX_BYTES)
            padded = round_up(out_channels, channels) / out_channels
            yield RegisterTile(channels, vectors * MATRIX_ROWS, phases, padded * near, padded * far)

    def _of_inputs(self) -> Iterator[RegisterTile]:
        """Yield the register tiles of partial sums: of each position, channel and phase.

        A step takes a vector of data of each position and one of the filter for each channel and phase. The fewer of
        them stay in registers.
        """
        geometry, registers = self.geometry, self._registers
        terms = ceil_div(geometry.in_channels, self.lanes)
        padded = terms * self.lanes / geometry.in_channels
        for phases, channels in itertools.product(_divisors(self.most_phases), _divisors(geometry.out_channels)):
            filters = phases * channels
            for positions in range(1, registers // filters):
                products = filters * positions
                if products + min(filters, positions) + 1 > registers:
                    break
                factor = padded
                if self._taps > 1 and terms * (products + filters + positions + 3) < _UNROLLED:
                    factor *= self.costs.unrolled
                near, far = self._cycles(phases, partial(_input_step, channels, positions))
                yield RegisterTile(channels, positions, phases, factor * near, factor * far)


def _input_step(channels: int, positions: int, phases: int) -> _Step:
    """Return the step of a tile of inputs."""
    loads = phases * channels + positions
    return _Step(phases * channels * positions, loads, 0.15 * loads, positions)


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
