"""Kernels of `compute.col2im` for `N *X C`, written loop by loop: no stage of them is one of a schedule.

A task makes the columns of a block, and then its outputs. Register tiles read the data where the caller has them, or
what 16 bits of them became, and ask for those of the next tile meanwhile. A tile that would end past a piece of the
data begins so much earlier, and computes some columns twice. What lies outside of the data has no columns, so blocks at
the ends have fewer.

The outputs of a place are one chunk, stored by whole vectors. What lies past the chunk is stored too, and then again by
the next places, which follow. At the ends, and where columns of a tap are no neighbours in a chunk, each output is made
in vectors of its channels. docs/design.md has the measurements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import tirx as build
from tvm.tirx import PrimFunc

from tvm_deconv.compute.col2im import ChannelColumns, Places, widens
from tvm_deconv.compute.extents import int64
from tvm_deconv.compute.requantization import finished, known_bias_at
from tvm_deconv.problem import Problem, element_bytes
from tvm_deconv.problem.arithmetic import ceil_div
from tvm_deconv.schedules.x86.column_loops import (
    Arrays,
    Block,
    Row,
    Taps,
    array,
    asks_ahead,
    column_kernel,
    conversions,
    free_registers,
    narrow,
    reduction_steps,
    register_tile,
    row_in_block,
    rows_of_outputs,
    taps_of,
    widen,
    zero,
)
from tvm_deconv.schedules.x86.prefetching import ask_for, asking_function
from tvm_deconv.schedules.x86.stores import LINE
from tvm_deconv.targets import CpuTarget

#: Vectors of an output's channels whose sums are in registers at once, at most.
_AT_ONCE = 8


def emit_columns(layout: ChannelColumns, target: CpuTarget) -> PrimFunc:
    """Return ``deconv(data, packed, [bias], out)`` for a problem with channels last, of one group."""
    emitter = _Emitter(layout, target)
    asking = [asking_function(emitter.lines_of_a_step)] if emitter.asks else []
    converting = conversions(layout.problem, target) if widens(layout.problem) else []
    return column_kernel(layout, target, emitter.task, *asking, *converting)


@dataclass(frozen=True)
class _Task:
    """A block with arrays: those of the kernel, its columns, and the bias of a chunk.

    Where the problem `widens`, also the `data` of a register tile; and the outputs of a row, else all of the kernel's.
    """

    block: Block
    arrays: Arrays
    columns: Any
    bias: Any
    data: Any
    line: Any


@dataclass(frozen=True)
class _Emitter:
    """Emits the statements of a kernel."""

    layout: ChannelColumns
    target: CpuTarget

    @property
    def axes(self) -> tuple[Places, Places, Places]:
        """The places of three axes."""
        return self.layout.axes

    @property
    def problem(self) -> Problem:
        """The problem."""
        return self.layout.problem

    @property
    def steps(self) -> int:
        """Input channels of one body of the reduction."""
        return reduction_steps(self.layout, self.target)

    @property
    def asks(self) -> bool:
        """True if data are asked for ahead."""
        return asks_ahead(self.problem, self.target)

    @property
    def lines_of_a_step(self) -> int:
        """Cache lines of the next register tile's data that one body of the reduction asks for."""
        read = self.layout.tile.positions * self.steps * element_bytes(self.problem.dtype)
        return ceil_div(read, LINE * self.layout.panels)

    def task(self, arrays: Arrays, block: Block) -> None:
        """Emit the task that makes a `block`."""
        layout, problem = self.layout, self.problem
        # A vector of the last chunk may end behind the last column.
        columns = array(problem, layout.held + layout.lanes)
        bias = None
        if arrays.bias is not None:
            length = int64(layout.chunk_vectors * layout.lanes)
            bias = array(problem, layout.chunk_vectors * layout.lanes)
            with build.serial(int64(0), length) as place:
                build.buffer_store(bias, known_bias_at(problem, arrays.bias, place % problem.out_channels), [place])
        data, line = None, arrays.out
        if widens(problem):
            data = array(problem, layout.tile.positions * problem.in_channels)
            line = array(problem, self.axes[2].block * layout.chunk + layout.lanes)
        task = _Task(block, arrays, columns, bias, data, line)
        free_registers()
        self.products(task)
        free_registers()
        self.sums(task)

    def products(self, task: _Task) -> None:
        """Emit the products of all positions of a block, a register tile at a time."""
        layout, tile, (first, second, third) = self.layout, self.layout.tile, self.axes
        counts, length = layout.runs
        tiles, at = ceil_div(length, tile.positions), task.block
        # One loop over tiles and panels: LLVM would unroll one over few panels, and accumulators would leave registers.
        with build.grid(*map(int64, (*counts, tiles * layout.panels))) as (n, d, h, number):
            begin, panel = number // layout.panels * tile.positions, build.bind(number % layout.panels)
            if length % tile.positions:
                begin = tirx.min(begin, int64(length - tile.positions))
            begin = build.bind(begin)
            plane = (at.image + n) * first.data + (at.data[0] + d)
            position = (plane * second.data + (at.data[1] + h)) * third.data + (at.data[2] + begin)
            source = build.bind(position * self.problem.in_channels)
            held = ((n * first.rows + d) * second.rows + h) * third.rows + begin
            if widens(self.problem):
                read = int64(tile.positions * self.problem.in_channels)
                with build.If(panel == 0), build.Then():
                    widen(task.data, int64(0), task.arrays.data, source, int64(0), read, read)
            self._register_tile(task, source, build.bind(held * layout.row), panel)

    def _register_tile(self, task: _Task, source: Expr, columns: Expr, panel: Expr) -> None:
        """Emit the columns of a `panel`, stored from `columns` on, of the positions whose data begin at `source`."""
        layout, tile, channels, given = self.layout, self.layout.tile, self.problem.in_channels, task.arrays.data
        data, begin = (task.data, int64(0)) if widens(self.problem) else (given, source)

        def product(ci: Expr, position: int, column: Expr) -> Expr:
            factor = task.arrays.packed[(panel * channels + ci) * tile.columns + column]
            return data[begin + (position * channels + ci)] * factor

        def keep(position: int, column: Expr, value: Expr) -> None:
            at = columns + (panel * tile.columns + position * layout.row) + column
            build.buffer_store(task.columns, value, [at])

        def ask(step: Expr) -> None:
            turn, asked = panel * (channels // self.steps) + step, self.lines_of_a_step * LINE
            ahead = tile.positions * channels + turn * (asked // element_bytes(self.problem.dtype))
            build.evaluate(ask_for(given[source + ahead], self.lines_of_a_step))

        register_tile(layout, self.target, product, keep, ask if self.asks else None)

    def sums(self, task: _Task) -> None:
        """Emit the outputs of a block, row by row."""
        with rows_of_outputs(self.layout, task.block) as row:
            start = row.number(task.block.image + row.image) * self.axes[2].output
            if widens(self.problem):
                self._rounded_row(task, row, start)
            else:
                self._row(task, row, start)

    def _rounded_row(self, task: _Task, row: Row, start: Expr) -> None:
        """Emit a row of outputs in the array of a line, and round them; `start` is as in `_row`, of the kernel's."""
        channels = self.problem.out_channels
        first, begin, end = row_in_block(self.layout, task.block)
        self._row(task, row, -first)
        places = (start + begin) * channels, task.line, (begin - first) * channels, (end - begin) * channels
        narrow(task.arrays.out, *places)

    def _row(self, task: _Task, row: Row, start: Expr) -> None:
        """Emit a row of outputs: chunks of places with all taps, and single outputs of the others.

        `start` is the place of output 0 in the array that takes them.
        """
        layout, third, block = self.layout, self.axes[2], task.block
        least, most = third.whole if layout.follows else (0, 0)
        begin = build.bind(tirx.min(tirx.max(block.begins[2], int64(least)), block.ends[2]))
        end = build.bind(tirx.max(begin, tirx.min(block.ends[2] - layout.spilled, int64(most - layout.spilled))))
        # With all taps along the other axes, whose number may be a constant.
        with build.If(tirx.all(*(taps.count == taps.all for taps in row.taps))):
            with build.Then():
                with build.serial(begin, end) as place:
                    self._chunk(task, row, start, place)
                for some in ((block.begins[2], begin), (end, block.ends[2])):
                    with build.serial(*some) as place:
                        self._outputs(task, row, start, place)
            with build.Else(), build.serial(block.begins[2], block.ends[2]) as place:
                self._outputs(task, row, start, place)

    def _column(self, block: Block, row: Row, taps: Sequence[Expr], data: Expr, element: Expr | int) -> Expr:
        """Return the index of a column of channel 0, of these `taps` of the first axes, and of the last one's data."""
        first, second, third = self.axes
        (d, of_d), (h, of_h) = (of.at(tap) for of, tap in zip(row.taps, taps, strict=True))
        plane = row.image * first.rows + (d - block.data[0])
        position = (plane * second.rows + (h - block.data[1])) * third.rows + (data - block.data[2])
        of_plane = of_d * second.kernel + of_h
        return position * self.layout.row + (of_plane * third.kernel + element) * self.problem.out_channels

    def _chunk(self, task: _Task, row: Row, start: Expr, place: Expr) -> None:
        """Emit the outputs of a `place` with all taps, by vectors; `start` is as in `_row`."""
        layout, lanes, third, channels = self.layout, self.layout.lanes, self.axes[2], self.problem.out_channels
        sums, bias = array(self.problem, layout.chunk_vectors * lanes, "local"), task.bias
        vectors = range(0, layout.chunk_vectors * lanes, lanes)
        _store(sums, vectors, lambda at: zero(self.problem) if bias is None else bias[at])
        with build.grid(*(taps.all for taps in row.taps)) as taps:
            for tap in range(third.taps):
                column = build.bind(self._column(task.block, row, taps, place - tap * third.jump, tap * third.period))
                added = min(third.kernel - tap * third.period, third.stride) * channels
                for vector in vectors[: ceil_div(added, lanes)]:
                    with build.vectorized(int64(0), int64(lanes)) as lane:
                        value = task.columns[column + (lane + vector)]
                        if added < min(layout.chunk, vector + lanes):  # the rest are other columns
                            value = tirx.Select(lane + vector < added, value, zero(self.problem))
                        build.buffer_store(sums, sums[lane + vector] + value, [lane + vector])
        out = (start + (place * third.stride - third.pad)) * channels
        _store(task.line, vectors, lambda at: finished(self.problem, sums[at], None, None), out)

    def _outputs(self, task: _Task, row: Row, start: Expr, place: Expr) -> None:
        """Emit the outputs of a `place` that exist, one by one, of the taps that read data; `start` is as in `_row`."""
        third, channels, lanes = self.axes[2], self.problem.out_channels, self.layout.lanes
        with build.serial(int64(0), int64(third.stride)) as phase:
            output = build.bind(place * third.stride + phase - third.pad)
            with build.If(tirx.all(output >= 0, output < third.output)), build.Then():
                taps = taps_of(third, place, phase)
                out = build.bind((start + output) * channels)
                for first in range(0, channels, _AT_ONCE * lanes):
                    self._channels(task, row, taps, out, range(first, min(first + _AT_ONCE * lanes, channels)))

    def _channels(self, task: _Task, row: Row, last: Taps, out: Expr, channels: range) -> None:
        """Emit some `channels` of an output with these taps along the `last` axis; channel 0 is element `out`."""
        lanes = self.layout.lanes
        vectors = range(0, len(channels), lanes)
        sums, results = (array(self.problem, len(vectors) * lanes, scope) for scope in ("local", "global"))
        bias = task.bias
        _store(sums, vectors, lambda at: zero(self.problem) if bias is None else bias[at + channels.start])
        with build.grid(*(taps.count for taps in (*row.taps, last))) as (*taps, tap):
            column = build.bind(self._column(task.block, row, taps, *last.at(tap)) + channels.start)
            _store(sums, vectors, lambda at: sums[at] + task.columns[column + at])
        # The last vector may have further elements, of other columns.
        _store(results, vectors, lambda at: finished(self.problem, sums[at], None, None))
        with build.serial(int64(0), int64(len(channels))) as channel:
            build.buffer_store(task.line, results[channel], [out + channels.start + channel])


def _store(array: Any, vectors: range, value: Callable[[Expr], Expr], begin: Expr | int = 0) -> None:
    """Emit the store of each of the `vectors` of `value`, counted from the element `begin` of `array` on."""
    for vector in vectors:
        with build.vectorized(int64(0), int64(vectors.step)) as lane:
            at = lane + vector
            build.buffer_store(array, value(at), [begin + at])
