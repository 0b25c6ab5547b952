"""Kernels of `compute.col2im` for `N C *X`, in vectors of positions, written loop by loop as those of `col2im`.

A task packs the data of its block, makes the columns of it, and then its outputs, row by row. Vectors of the phases of
a row are interleaved in registers, and those outputs that exist are copied, or rounded to 16 bits, past the caches if
these do not keep them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import tirx as build
from tvm.tirx import PrimFunc

from tvm_deconv.compute.col2im import RowColumns, widens
from tvm_deconv.compute.extents import int64
from tvm_deconv.compute.indexing import ravel
from tvm_deconv.compute.requantization import finished, known_bias_at
from tvm_deconv.problem import Problem, element_bytes
from tvm_deconv.problem.arithmetic import round_up
from tvm_deconv.schedules.x86.column_loops import (
    Arrays,
    Block,
    Row,
    array,
    asks_ahead,
    column_kernel,
    conversions,
    free_registers,
    narrow,
    register_tile,
    row_in_block,
    rows_of_outputs,
    widen,
    zero,
)
from tvm_deconv.schedules.x86.interleave import shuffle_network
from tvm_deconv.schedules.x86.row_prefetching import FETCH
from tvm_deconv.schedules.x86.stores import (
    COPY,
    FENCE,
    SHORTEST_CONVERTED,
    SHORTEST_STREAM,
    STREAM,
    goes_to_memory,
    llvm_source,
)
from tvm_deconv.targets import CpuTarget

#: Channels from the one that is packed to the one that is asked for.
_CHANNELS_AHEAD = 2


def emit_rows(layout: RowColumns, target: CpuTarget) -> PrimFunc:
    """Return ``deconv(data, packed, [bias], out)`` for a problem with positions last."""
    emitter = _Emitter(layout, target)
    streaming = llvm_source("streaming_copy.ll") if emitter.streams else ""
    copying = [llvm_source("row_copy.ll"), streaming]
    if widens(layout.problem):
        copying = conversions(layout.problem, target, streaming)
    fetching = llvm_source("fetch_row.ll") if emitter.asks else ""
    return column_kernel(layout, target, emitter.task, *filter(None, (*copying, fetching)))


@dataclass(frozen=True)
class _Task:
    """A block with arrays: those of the kernel, its packed data, its columns, and a row of outputs of one channel.

    The `mask` of the places of a row, where columns are masked, has all bits where these are in the data.
    """

    block: Block
    arrays: Arrays
    data: Any
    columns: Any
    line: Any
    mask: Any


@dataclass(frozen=True)
class _Emitter:
    """Emits the statements of a kernel."""

    layout: RowColumns
    target: CpuTarget

    @property
    def problem(self) -> Problem:
        """The problem."""
        return self.layout.problem

    @property
    def asks(self) -> bool:
        """True if data are asked for ahead."""
        return asks_ahead(self.problem, self.target)

    @property
    def streams(self) -> bool:
        """True if the outputs of a block's rows are stored past the caches."""
        last = self.layout.axes[2]
        row = min(last.block * last.stride, last.output) * element_bytes(self.problem.output_dtype)
        shortest = SHORTEST_CONVERTED if widens(self.problem) else SHORTEST_STREAM
        return goes_to_memory(self.problem) and row >= shortest

    def task(self, arrays: Arrays, block: Block) -> None:
        """Emit the task that makes a `block`."""
        layout, problem = self.layout, self.problem
        data = array(problem, problem.in_channels * layout.pitch)
        last = layout.axes[2]
        # The last vectors of a row may read behind its columns, and masked ones before the first or behind the last.
        columns = array(problem, layout.array_elements)
        width = round_up(last.block, layout.lanes)
        mask = self._mask() if layout.masked else None
        task = _Task(block, arrays, data, columns, array(problem, width * last.stride), mask)
        self._pack(task)
        free_registers()
        self._products(task)
        free_registers()
        with rows_of_outputs(layout, block) as row, build.serial(int64(0), int64(problem.out_channels)) as channel:
            self._row(task, row, channel)
        if self.streams:
            build.evaluate(tirx.call_extern("int32", FENCE))

    def _pack(self, task: _Task) -> None:
        """Emit the copies of the data of a block, channel by channel."""
        layout, problem, block, (first, second, third) = self.layout, self.problem, task.block, self.layout.axes
        counts, length = layout.runs
        extents = layout.tile.images, first.rows, second.rows, layout.width
        begin = build.bind(self._begin(block))
        with build.grid(*map(int64, (problem.in_channels, *counts))) as (ci, n, d, h):
            to = build.bind(ci * layout.pitch + ravel((n, d, h, 0), extents))
            channel = ((block.image + n) * problem.groups + block.group) * problem.in_channels + ci
            row = (channel * first.data + (block.data[0] + d)) * second.data + (block.data[1] + h)
            source = build.bind(row * third.data + tirx.max(begin, int64(0)))
            if self.asks:
                later = task.arrays.data[source + _CHANNELS_AHEAD * math.prod(problem.data_spatial)]
                self._call(FETCH, (later,), (int64(length),))
            if layout.whole or layout.masked:
                self._pack_row(task, to, source, int64(0), int64(length))
            else:
                zeros = build.bind(tirx.min(tirx.max(-begin, int64(0)), int64(length)))
                end = build.bind(tirx.max(tirx.min(third.data - begin, int64(length)), zeros))
                self._pack_row(task, to, source, zeros, end)

    def _pack_row(self, task: _Task, to: Expr, source: Expr, zeros: Expr, end: Expr) -> None:
        """Emit the copy of a row of data from `source` to between `zeros` and `end`, with zeros around it."""
        length, data = int64(self.layout.runs[1]), task.arrays.data
        if widens(self.problem):
            widen(task.data, to, data, source, zeros, end - zeros, length)
            return
        for start, count in ((int64(0), zeros), (end, length - end)):
            with build.serial(int64(0), count) as place:
                build.buffer_store(task.data, zero(self.problem), [to + start + place])
        self._call(COPY, (task.data[to + zeros], data[source]), (end - zeros,))

    def _begin(self, block: Block) -> Expr:
        """Return the first position of a `block` along the last axis, which may be before the data."""
        return block.data[2] if self.layout.masked else block.begins[2] - self.layout.axes[2].reach

    def _call(self, name: str, elements: Sequence[Expr], counts: Sequence[Expr]) -> None:
        """Emit the call of a function with the addresses of `elements`, and `counts` as bytes."""
        sizes = [(count * element_bytes(self.problem.dtype)).astype("int32") for count in counts]
        build.evaluate(tirx.call_extern("int32", name, *map(tirx.address_of, elements), *sizes))

    def _products(self, task: _Task) -> None:
        """Emit the columns of all positions of a block, a register tile at a time."""
        layout, tile, channels = self.layout, self.layout.tile, self.problem.in_channels
        # One loop over tiles and panels: LLVM would unroll one over few panels, and accumulators would leave registers.
        with build.serial(int64(0), int64(layout.tiles * layout.panels)) as number:
            begin = build.bind(number // layout.panels * tile.positions)
            panel = build.bind(number % layout.panels)
            filters = build.bind((task.block.group * layout.panels + panel) * (channels * tile.columns))

            def product(ci: Expr, column: int, position: Expr) -> Expr:
                factor = task.arrays.packed[filters + ci * tile.columns + column]
                return task.data[ci * layout.pitch + begin + position] * factor

            def keep(column: int, position: Expr, value: Expr) -> None:
                at = (panel * tile.columns + column) * layout.pitch + begin + position + layout.around
                build.buffer_store(task.columns, value, [at])

            register_tile(layout, self.target, product, keep)

    def _row(self, task: _Task, row: Row, channel: Expr) -> None:
        """Emit a row of outputs of a `channel`: a vector of places at a time, and then a copy of those that exist."""
        problem, lanes, third, block = self.problem, self.layout.lanes, self.layout.axes[2], task.block
        with build.serial(int64(0), (block.ends[2] - block.begins[2] + (lanes - 1)) // lanes) as vector:
            places = build.bind(vector * lanes)
            for number, value in enumerate(self._vectors(task, row, channel, places)):
                at = places * third.stride + number * lanes
                build.buffer_store(task.line, value, [tirx.Ramp(at, int64(1), lanes)])
        image = (block.image + row.image) * problem.groups + block.group
        start = build.bind(row.number(image * problem.out_channels + channel) * third.output)
        first, begin, end = row_in_block(self.layout, block)
        if widens(problem):
            narrow(task.arrays.out, start + begin, task.line, begin - first, end - begin)
        else:
            name = STREAM if self.streams else COPY
            self._call(name, (task.arrays.out[start + begin], task.line[begin - first]), (end - begin,))

    def _mask(self) -> Any:
        """Emit the mask of the places of a row, from `around` places before its data on, and return it."""
        layout, last = self.layout, self.layout.axes[2]
        length = int64(layout.mask_elements)
        bits = 8 * element_bytes(self.problem.accumulate_dtype)
        mask = build.alloc_buffer([length], f"int{bits}", scope="global", layout=None)
        with build.serial(int64(0), length) as place:
            within = tirx.all(place >= layout.around, place < layout.around + last.rows)
            build.buffer_store(
                mask, tirx.Select(within, tirx.const(-1, mask.dtype), tirx.const(0, mask.dtype)), [place]
            )
        return mask

    def _vectors(self, task: _Task, row: Row, channel: Expr, within: Expr) -> list[Expr]:
        """Return the finished outputs of a vector of places of a row, from the place `within` the block on."""
        problem, lanes, third, mask = self.problem, self.layout.lanes, self.layout.axes[2], task.mask
        sums = array(problem, third.stride * lanes, "local")
        bias = task.arrays.bias
        number = task.block.group * problem.out_channels + channel
        start = zero(problem) if bias is None else known_bias_at(problem, bias, number)

        def each(phases: Iterable[int], value: Callable[[int, Expr], Expr]) -> None:
            for phase in phases:
                with build.vectorized(int64(0), int64(lanes)) as lane:
                    build.buffer_store(sums, value(phase, lane), [lane + phase * lanes])

        def added(element: int, column: Expr, phase: int, lane: Expr) -> Expr:
            shift = element * third.dilation // third.stride
            value = task.columns[column + (element * problem.out_channels * self.layout.pitch - shift) + lane]
            if mask is not None:
                bits = tirx.reinterpret(mask.dtype, value) & mask[place + (self.layout.around - shift) + lane]
                value = tirx.reinterpret(problem.accumulate_dtype, bits)
            return sums[lane + phase * lanes] + value

        each(range(third.stride), lambda _phase, _lane: start)
        place = build.bind(task.block.begins[2] - self._begin(task.block) + within)
        with build.grid(*(taps.count for taps in row.taps)) as taps:
            column = build.bind(self._column(task.block, row, taps, channel) + place)
            for element in range(third.kernel):
                each([element * third.dilation % third.stride], partial(added, element, column))
        each(range(third.stride), lambda phase, lane: finished(problem, sums[lane + phase * lanes], None, None))
        dtype = f"{problem.accumulate_dtype}x{lanes}"
        return shuffle_network([sums.vload([int64(phase * lanes)], dtype) for phase in range(third.stride)], lanes)

    def _column(self, block: Block, row: Row, taps: Sequence[Expr], channel: Expr) -> Expr:
        """Return the index of element 0 along the last axis, of these `taps`, at the first position of the row."""
        layout, axes = self.layout, self.layout.axes
        (d, of_d), (h, of_h) = (of.at(tap) for of, tap in zip(row.taps, taps, strict=True))
        plane = row.image * axes[0].rows + (d - block.data[0])
        position = (plane * axes[1].rows + (h - block.data[1])) * layout.width
        element = (of_d * axes[1].kernel + of_h) * axes[2].kernel
        return (element * self.problem.out_channels + channel) * layout.pitch + position + layout.around
