"""The epilogue in registers of vectors of channels: channels are last, so each is a piece of the output as it is.

That takes no more than taps in every phase. A register tile stores each of its positions where it lies in the output.
Most tiles lie within a row, and one test is enough for all of their positions. The others test each position: those at
the ends of rows, in the halo, or behind the last row. Of a vector that is not full, parts are stored whose lengths are
powers of two.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from tvm import tirx
from tvm.ir import Expr
from tvm.tirx import Bind, BufferStore, IfThenElse, PrimFunc, Stmt

from tvm_deconv.compute.direct import DirectDefinition
from tvm_deconv.compute.indexing import GROUPS, ROWS
from tvm_deconv.compute.phases import Geometry
from tvm_deconv.compute.requantization import output_zero_point
from tvm_deconv.compute.storage import storage_dtype, stores_bytes
from tvm_deconv.compute.words import WORD
from tvm_deconv.problem import Problem
from tvm_deconv.problem.arithmetic import ceil_div
from tvm_deconv.schedules.x86.register_epilogue import RegisterEpilogue, RegisterTile, Terms, ramp, sequence
from tvm_deconv.targets import CpuTarget


def supports(problem: Problem, geometry: Geometry, form: str) -> bool:
    """Tell whether register tiles in `form`, one of vectors of channels, hold vectors of the output.

    Channels must be last, and every phase have a tap. In groups, a group has one channel.
    """
    return (
        form != ROWS
        and problem.data_format == "NXC"
        and (form != GROUPS or problem.out_channels == 1)
        and all(
            sum(run.count for run in axis.runs) == min(axis.stride, output + axis.shift)
            for axis, output in zip(geometry.axes, geometry.output, strict=True)
        )
    )


def rounds_pairs(problem: Problem, geometry: Geometry, form: str, target: CpuTarget, lanes: int) -> bool:
    """Tell whether two vectors of `lanes` groups are rounded to one of bfloat16 where a register tile has both.

    That takes 9 integer instructions; apart they take 14. Their data are made of one vector of words by 2 instructions
    for each tap and position, so that packing copies rows as they are. AVX-512 has fewer vectors, and an instruction to
    round them. Data of neighbouring groups must be neighbours, and these fill all pairs.
    """
    return (
        form == GROUPS
        and problem.dtype == problem.output_dtype == "bfloat16"
        and target.vector_registers <= 16
        and problem.in_channels == 1
        and problem.groups % (2 * lanes) == 0
        and supports(problem, geometry, form)
    )


def finish_channels(
    func: PrimFunc, problem: Problem, definition: DirectDefinition, rounding: str, joinings: Mapping[int, str]
) -> PrimFunc:
    """Return `func`, the scheduled `definition`, with the epilogue in registers; for problems of `supports`.

    `rounding` is that of `RegisterEpilogue`. `joinings` are functions that make one vector of the output of several
    vectors of sums, by their number: that of `rounding.row_joining` for a definition in pairs, or those of
    `rounding.byte_joining`, whose sums are without the zero point.
    """
    epilogue = ChannelEpilogue(problem, definition, Terms.of(func, problem), func.params[-1], rounding, joinings)
    return func.with_body(epilogue.root(func.body))


def parts(count: int) -> Iterator[tuple[int, int]]:
    """Yield the begin and the length of the parts of `count` lanes, powers of two and the longest first."""
    begin = 0
    while begin < count:
        length = 1 << ((count - begin).bit_length() - 1)
        yield begin, length
        begin += length


@dataclass(frozen=True)
class ChannelEpilogue(RegisterEpilogue):
    """Stores vectors of channels; `joinings` are those of `finish_channels`."""

    joinings: Mapping[int, str]

    def stores(self, tile: RegisterTile) -> list[Stmt]:
        """Return the statements that finish and store a register tile."""
        positions, row = self.definition.layout.tile.positions, self.definition.layout.packed[2]
        finished = self._finish_all(tile) if self.finishes else []
        apart = self._for_channels(tile, lambda count: self._store_apart(tile, count))
        if row < positions:
            return [*finished, *apart]
        begin = self.within_block(tile.number * positions)
        end = [*begin[:3], begin[3] + (positions - 1)]
        within_row = [begin[3] <= row - positions] if row % positions else []
        rows, columns = tile.section.phases
        outputs = self.outputs(tile, begin, 0, 0), self.outputs(tile, end, rows - 1, columns - 1)
        conditions = [*within_row, *self.exist(tile, begin[0], *outputs)]
        together = self._for_channels(tile, lambda count: self._store_together(tile, begin, count))
        if conditions:
            return [*finished, IfThenElse(tirx.all(*conditions), sequence(together), sequence(apart))]
        return [*finished, *together]

    def _finish_all(self, tile: RegisterTile) -> list[Stmt]:
        """Return the loops that add the bias to each vector of accumulators and activate it."""
        layout = self.definition.layout
        stmts: list[Stmt] = []
        for row, m, column in self._places(tile):
            index = [*tile.lead, *tile.phase(row, column), tile.number * layout.tile.positions + m]
            for begin in range(0, self._width, layout.lanes):
                stmts.append(self._finish(tile, index, self._first(tile) + begin))
        return stmts

    def _finish(self, tile: RegisterTile, index: Sequence[Expr], begin: Expr) -> Stmt:
        """Return the loop that finishes the vector from channel `begin` on at `index` of the accumulators."""
        return self.finish(tile, lambda lane: [*index, lane + begin], lambda lane: lane + begin)

    def _places(self, tile: RegisterTile) -> Iterator[tuple[int, int, int]]:
        """Yield row of phases, position and column of phases of a register tile, in the order of outputs in memory."""
        rows, columns = tile.section.phases
        return itertools.product(range(rows), range(self.definition.layout.tile.positions), range(columns))

    def _place_apart(self, tile: RegisterTile, m: int) -> list[Expr]:
        """Return image and position along each axis, within a block, of position `m` of a tile in any place."""
        positions, row = self.definition.layout.tile.positions, self.definition.layout.packed[2]
        first = tile.number * positions
        if row < positions:
            return self.within_block(first + m)
        # Positions of a tile are in one row or in two: divisions give the places of both rows, once for all positions.
        begin = self.within_block(first)
        place, following = begin[3] + m, self.within_block((first // row + 1) * row)
        outer = [tirx.Select(place < row, a, b) for a, b in zip(begin[:3], following[:3], strict=True)]
        return [*outer, tirx.Select(place < row, place, place - row)]

    def _for_channels(self, tile: RegisterTile, stores: Callable[[int], list[Stmt]]) -> list[Stmt]:
        """Return `stores` of as many channels as a register tile has, of fewer in the last one, of none behind it."""
        layout, width = self.definition.layout, self._width
        channels, number = layout.geometry.out_channels, tile.lead[5]
        if layout.form == GROUPS:
            channels, number = layout.geometry.groups, tile.lead[4]
        whole, left, several = channels // width, channels % width, layout.tile.channels // width
        tiles = ceil_div(channels, layout.tile.channels) * several
        if whole == tiles:
            return stores(width)
        number = number * several + tile.part
        last: Stmt | None = sequence(stores(left)) if left else None
        if last is not None and tiles > whole + 1:
            last = IfThenElse(number == whole, last, None)
        if last is not None and not whole:
            return [last]
        return [IfThenElse(number < whole, sequence(stores(width)), last)]

    def _store_together(self, tile: RegisterTile, begin: Sequence[Expr], count: int) -> list[Stmt]:
        """Return the stores of `count` channels of a register tile whose positions follow `begin` in a row."""
        stmts: list[Stmt] = []
        for row, m, column in self._places(tile):
            outputs = self.outputs(tile, [*begin[:3], begin[3] + m], row, column)
            stmts += self._store(tile, (row, m, column), begin[0], outputs, count)
        return stmts

    def _store_apart(self, tile: RegisterTile, count: int) -> list[Stmt]:
        """Return the stores of `count` channels of a register tile, each of whose positions may lie anywhere."""
        stmts: list[Stmt] = []
        for row, m, column in self._places(tile):
            n, *_ = place = self._place_apart(tile, m)
            outputs = self.outputs(tile, place, row, column)
            conditions = self.exist(tile, n, outputs, outputs)
            store = self._store(tile, (row, m, column), n, outputs, count)
            stmts += [IfThenElse(tirx.all(*conditions), sequence(store), None)] if conditions else store
        return stmts

    def _store(
        self, tile: RegisterTile, place: tuple[int, int, int], n: Expr, outputs: Sequence[Expr], count: int
    ) -> list[Stmt]:
        """Return the stores of `count` channels at `place` of a register tile to `outputs` of image `n` of a block."""
        layout, (row, m, column) = self.definition.layout, place
        index = [*tile.lead, *tile.phase(row, column), tile.number * layout.tile.positions + m]
        *position, first = self.place(tile, n, outputs)
        stmts: list[Stmt] = []
        for vector, size in self._output_vectors():
            value = tirx.Var("vector", f"{self.out.dtype}x{size}")
            stmts.append(Bind(value, self._vector(tile, index, self._first(tile) + vector, size)))
            for begin, length in parts(min(size, count - vector)):
                numbers = [tirx.const(begin + lane, "int32") for lane in range(length)]
                part = value if length == size else tirx.Shuffle([value], numbers)
                stmts.append(BufferStore(self.out, part, [*position, ramp(first + (vector + begin), length)]))
        return stmts

    def _output_vectors(self) -> Iterator[tuple[int, int]]:
        """Yield the first channel, and the channels, of each vector of the output in a register tile's position."""
        begin, lanes = 0, self.definition.layout.lanes
        while begin < self._width:
            left = (self._width - begin) // lanes
            size = next((number for number in self.joinings if number <= left), 1) * lanes
            yield begin, size
            begin += size

    def _vector(self, tile: RegisterTile, index: Sequence[Expr], channel: Expr, size: int) -> Expr:
        """Return the vector of `size` outputs from `channel` of the tile of channels on, at `index` of accumulators."""
        lanes = self.definition.layout.lanes
        stored = storage_dtype(self.problem.output_dtype)
        zero = None if self.saturates or self.terms.constants is None else output_zero_point(self.terms.constants)
        sums = [self.finished_sums(tile, [*index, ramp(channel + i, lanes)]) for i in range(0, size, lanes)]
        if size > lanes:
            words = size * np.dtype(stored).itemsize // np.dtype(WORD).itemsize
            operands = sums if zero is None else [*sums, zero]
            joined = tirx.call_extern(f"{WORD}x{words}", self.joinings[size // lanes], *operands)
            return tirx.reinterpret(f"{stored}x{size}", joined)
        if zero is not None:
            least = np.iinfo(stored).min - zero
            sums = [tirx.max(sums[0], tirx.Broadcast(least, lanes)) + tirx.Broadcast(zero, lanes)]
        return self.in_output(sums[0])

    @property
    def saturates(self) -> bool:
        """See RegisterEpilogue: false for bytes, which what joins vectors of them saturates."""
        return not (self.joinings and stores_bytes(self.problem))

    def place(self, tile: RegisterTile, n: Expr, outputs: Sequence[Expr]) -> list[Expr]:
        """Return the index in the output of a register tile's first channel, at `outputs` of image `n` of a block."""
        layout, (group, co) = self.definition.layout, tile.lead[4:]
        image, *spatial = self.in_call(tile, n, outputs)
        width = layout.tile.channels
        first = group * width if layout.form == GROUPS else group * layout.geometry.out_channels + co * width
        return [image, *spatial[3 - self.problem.rank :], first + self._first(tile)]

    @property
    def _width(self) -> int:
        """The channels of a register tile."""
        return self.definition.layout.tile.part or self.definition.layout.tile.channels

    def _first(self, tile: RegisterTile) -> Expr:
        """Return the first channel of a register tile within the tile of channels."""
        return tile.part * self._width
