"""The epilogue in registers of partial sums: the lanes of each accumulator are added up, then finished and stored.

As many accumulators as a vector has lanes become one vector of sums, by one addition for each: two vectors at a time
are halved into one, which has a half of either. The sums are in the order of their outputs in memory. Where a register
tile lies within a row and holds all phases of the last axis, they are contiguous there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tvm import tirx
from tvm.ir import Expr
from tvm.tirx import Bind, BufferLoad, BufferStore, PrimFunc, Stmt

from tvm_deconv.compute.direct import DirectDefinition
from tvm_deconv.compute.direct_layout import Tile
from tvm_deconv.problem import Problem
from tvm_deconv.schedules.x86.register_channels import ChannelEpilogue, parts
from tvm_deconv.schedules.x86.register_epilogue import RegisterTile, Terms, ramp
from tvm_deconv.targets import CpuTarget

#: With more sums LLVM spills some: 12 take 1.6 times as long as with data that are float32 in memory.
MOST_SUMS_OF_PAIRS = 10


def reads_pairs(problem: Problem, target: CpuTarget, tile: Tile, lanes: int) -> bool:
    """Tell whether two vectors of `lanes` input channels are the halves of one of words of bfloat16.

    Each takes one instruction then, and two alone. Channels must be neighbours, and fill all pairs, and the register
    `tile` leave registers to both halves of its data. AVX-512 has instructions for words, or fewer vectors.
    """
    return (
        problem.dtype == "bfloat16"
        and target.vector_registers <= 16
        and tile.channels * tile.positions * tile.phases <= MOST_SUMS_OF_PAIRS
        and problem.data_format == "NXC"
        and problem.in_channels % (2 * lanes) == 0
    )


def finish_inputs(func: PrimFunc, problem: Problem, definition: DirectDefinition, rounding: str) -> PrimFunc:
    """Return `func`, the scheduled `definition` in inputs, with the epilogue in registers.

    `rounding` is that of `RegisterEpilogue`.
    """
    terms, out = Terms.of(func, problem), func.params[-1]
    epilogue = InputEpilogue(problem, definition, terms, out, rounding=rounding, joinings={})
    return func.with_body(epilogue.root(func.body))


def halvings(count: int, lanes: int) -> Iterator[tuple[int, int, int]]:
    """Yield the steps that make `count` vectors of `lanes` elements one vector of their sums, in their order.

    A step replaces the first vector by halves of the first and of the other, which may be the same. It adds up
    neighbouring parts, of as many elements as the third number says.
    """
    size = lanes
    while size > 1:
        size //= 2
        for first in range(min(size, count)):
            yield first, first + size if first + size < count else first, size


def _halved(pair: Sequence[Expr], size: int, lanes: int) -> Expr:
    """Return the sums of neighbouring parts of `size` elements, in turn of one vector of the `pair` and the other."""
    numbers = [lane // size % 2 * lanes for lane in range(lanes)]
    # One part of each sum stays where it is: a blend, which more ports execute than a shuffle.
    kept, moved = (
        tirx.Shuffle([*pair], [tirx.const((lane ^ other) + first, "int32") for lane, first in enumerate(numbers)])
        for other in (0, size)
    )
    return kept + moved


class InputEpilogue(ChannelEpilogue):
    """Adds up the lanes of accumulators, each of which is one output."""

    def stores(self, tile: RegisterTile) -> list[Stmt]:
        """Return the statements that add up, finish and store a register tile."""
        return [*self._sum_all(tile), *super().stores(tile)]

    def _cells(self, tile: RegisterTile) -> list[tuple[int, int, int, int]]:
        """Return row, position, column and channel of each accumulator, in the order of outputs in memory."""
        channels = range(self.definition.layout.tile.channels)
        return [(*place, cc) for place in self._places(tile) for cc in channels]

    def _index(self, tile: RegisterTile, cell: Sequence[int]) -> list[Expr]:
        """Return the indices of the accumulator of `cell`, without that of a lane."""
        row, m, column, cc = cell
        position = tile.number * self.definition.layout.tile.positions + m
        return [*tile.lead, *tile.phase(row, column), position, tirx.const(cc, "int64")]

    def _sum_all(self, tile: RegisterTile) -> Iterator[Stmt]:
        """Yield the stores of vectors of sums into the first of the accumulators that they are the sums of."""
        cells, lanes = self._cells(tile), self.definition.layout.lanes
        lane = ramp(tirx.const(0, "int64"), lanes)
        places = [[*self._index(tile, cell), lane] for cell in cells]
        for begin in range(0, len(cells), lanes):
            for first, other, size in halvings(len(cells[begin : begin + lanes]), lanes):
                pair = [BufferLoad(tile.accumulators, places[begin + number]) for number in (first, other)]
                yield BufferStore(tile.accumulators, _halved(pair, size, lanes), places[begin + first])

    def _finish_all(self, tile: RegisterTile) -> list[Stmt]:
        """Return the loops that add the bias to each vector of sums and activate it."""
        cells, lanes = self._cells(tile), self.definition.layout.lanes
        return [self._finish_sums(tile, self._index(tile, cells[i]), i) for i in range(0, len(cells), lanes)]

    def _finish_sums(self, tile: RegisterTile, index: Sequence[Expr], first: int) -> Stmt:
        """Return the loop that finishes the vector of sums at `index`, of the cells from `first` on.

        Lanes behind the last cell have the terms of others.
        """
        layout, (rows, columns) = self.definition.layout, tile.section.phases
        channels, positions = layout.tile.channels, layout.tile.positions

        def phase(lane: Expr) -> list[Expr]:
            number = (lane + first) // channels
            return tile.phase(number // (columns * positions) % rows, number % columns)

        return self.finish(tile, lambda lane: [*index, lane], lambda lane: (lane + first) % channels, phase)

    def _store_together(self, tile: RegisterTile, begin: Sequence[Expr], count: int) -> list[Stmt]:  # noqa: ARG002
        """Return the stores of a register tile whose positions follow `begin` in a row; `count` channels are all."""
        layout = self.definition.layout
        every, stride = layout.geometry.groups * layout.geometry.out_channels, layout.strides[2]
        cells = self._cells(tile)
        vectors = [self._rounded(tile, cells[first]) for first in range(0, len(cells), layout.lanes)]

        def place(number: int) -> tuple[int, int]:
            row, m, column, cc = cells[number]
            return row, (m * stride + column) * every + cc

        stmts: list[Stmt] = [*vectors]
        first = 0
        for end in range(1, len(cells) + 1):
            row, offset = place(end - 1)
            if end == len(cells) or end % layout.lanes == 0 or place(end) != (row, offset + 1):
                _, m, column, channel = cells[first]
                outputs = self.outputs(tile, [*begin[:3], begin[3] + m], row, column)
                *position, channels = self.place(tile, begin[0], outputs)
                number, lane = divmod(first, layout.lanes)
                stmts += self._store_lanes(vectors[number].var, lane, end - first, [*position, channels + channel])
                first = end
        return stmts

    def _store(
        self, tile: RegisterTile, place: tuple[int, int, int], n: Expr, outputs: Sequence[Expr], count: int
    ) -> list[Stmt]:
        """Return the stores of `count` channels at `place` of a register tile to `outputs` of image `n` of a block."""
        lanes, cells, stmts = self.definition.layout.lanes, self._cells(tile), []
        *position, channel = self.place(tile, n, outputs)
        first, left = cells.index((*place, 0)), count
        while left:
            vector, within = self._rounded(tile, cells[first - first % lanes]), min(left, lanes - first % lanes)
            target = [*position, channel + cells[first][3]]
            stmts += [vector, *self._store_lanes(vector.var, first % lanes, within, target)]
            first, left = first + within, left - within
        return stmts

    def _rounded(self, tile: RegisterTile, cell: Sequence[int]) -> Bind:
        """Return the vector of outputs that begins with that of a `cell`, with a name: stores take parts of it."""
        lanes = self.definition.layout.lanes
        vector = self.rounded(tile, [*self._index(tile, cell), ramp(tirx.const(0, "int64"), lanes)])
        return Bind(tirx.Var("sums", f"{self.out.dtype}x{lanes}"), vector)

    def _store_lanes(self, vector: Expr, first: int, count: int, place: Sequence[Expr]) -> Iterator[Stmt]:
        """Yield the stores of `count` lanes of a `vector` from `first` on, to the outputs from `place` on."""
        *position, channel = place
        for begin, length in parts(count):
            numbers = [tirx.const(first + begin + i, "int32") for i in range(length)]
            part = vector if length == self.definition.layout.lanes else tirx.Shuffle([vector], numbers)
            yield BufferStore(self.out, part, [*position, ramp(channel + begin, length)])
