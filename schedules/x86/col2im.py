"""Kernels of `compute.col2im` for AVX2 and AVX-512, written loop by loop: no stage of them is one of a schedule.

A task makes the columns of a block, and then its outputs. Register tiles read the data where the caller has them, and
ask for those of the next tile meanwhile. A tile that would end past a piece of the data begins so much earlier, and
computes some columns twice. What lies outside of the data has no columns, so blocks at the ends have fewer.

The outputs of a place are one chunk, stored by whole vectors. What lies past the chunk is stored too, and then again by
the next places, which follow. Places at the ends, or with taps outside of the data, are finished one by one.
docs/design.md has the measurements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as build
from tvm.tirx import PrimFunc

from tvm_deconv.compute.col2im import ColumnLayout, Places
from tvm_deconv.compute.extents import Extent, Extents, int64, shape_of
from tvm_deconv.compute.indexing import unravel
from tvm_deconv.compute.requantization import finished
from tvm_deconv.problem import Problem
from tvm_deconv.problem.arithmetic import ceil_div
from tvm_deconv.schedules.x86.prefetching import ask_for, asking_function
from tvm_deconv.schedules.x86.stores import LINE, import_functions
from tvm_deconv.schedules.x86.unrolling import steps_at_once
from tvm_deconv.targets import CpuTarget

_FREE = "tvm_deconv_free_registers"


def emit_columns(layout: ColumnLayout, target: CpuTarget) -> PrimFunc:
    """Return ``deconv(data, packed, [bias], out)`` for a problem with channels last, of one group."""
    problem, batch = layout.problem, Extents.of(layout.problem).batch
    with IRBuilder() as builder:
        with build.prim_func():
            build.func_name("deconv")
            build.func_attr({"global_symbol": "deconv", "tirx.noalias": True})
            data = _argument("data", problem, (batch, *problem.data_shape[1:]))
            packed = _argument("packed", problem, (layout.packed_elements,))
            bias = _argument("bias", problem, problem.bias_shape) if problem.epilogue.bias else None
            outputs = [axis.output for axis in layout.axes[3 - problem.rank :]]
            out = _argument("out", problem, (batch, *outputs, problem.out_channels))
            emitter = _Emitter(layout, target, _flat(data), packed, bias, _flat(out))
            tasks = _const(layout.tasks) if isinstance(batch, int) else batch * layout.tasks
            with build.parallel(_const(0), tasks) as task:
                emitter.task(task)
        func = builder.get()
    functions = _free_function(target.vector_registers)
    return import_functions(func, functions + (asking_function(emitter.lines_of_a_step) if emitter.asks else ""))


def _free_function(registers: int) -> str:
    """Return the function, in LLVM IR, that leaves nothing in vector registers.

    Around the products it keeps LLVM from holding constants of the epilogue in registers, and accumulators in memory.
    """
    kind = "ymm" if registers <= 16 else "zmm"
    clobbers = ",".join(f"~{{{kind}{number}}}" for number in range(registers))
    return f"""define hidden i32 @{_FREE}() alwaysinline {{
  call void asm sideeffect "", "{clobbers}"()
  ret i32 0
}}
"""


def _const(value: int) -> Expr:
    return tirx.const(value, "int64")


def _argument(name: str, problem: Problem, shape: Sequence[Extent]) -> Any:
    return build.arg(name, build.buffer(shape_of(shape), problem.accumulate_dtype, align=1, layout=None))


def _flat(array: Any) -> Any:
    """Return `array` with one axis."""
    elements = math.prod(array.shape)
    return build.decl_buffer([elements], array.dtype, data=array.data, align=1, layout=None)


@dataclass(frozen=True)
class _Task:
    """A block: its first image, and along each axis its first place, that behind its last, and its first data."""

    image: Expr
    begins: tuple[Expr, ...]
    ends: tuple[Expr, ...]
    data: tuple[Expr, ...]
    columns: Any
    bias: Any


@dataclass(frozen=True)
class _Row:
    """Outputs of one phase of the first two axes: their places, `taps`, and the index of the first in the output."""

    task: _Task
    image: Expr
    places: tuple[Expr, Expr]
    phases: tuple[Expr, Expr]
    taps: tuple[Expr, Expr]
    first: Expr


@dataclass(frozen=True)
class _Emitter:
    """Emits the statements of a kernel; the arrays have one axis."""

    layout: ColumnLayout
    target: CpuTarget
    data: Any
    packed: Any
    bias: Any
    out: Any

    @cached_property
    def axes(self) -> tuple[Places, Places, Places]:
        """The places of three axes."""
        return self.layout.axes

    @property
    def problem(self) -> Problem:
        """The problem."""
        return self.layout.problem

    @property
    def zero(self) -> Expr:
        """Zero in the type of all elements."""
        return tirx.const(0, self.problem.accumulate_dtype)

    @property
    def steps(self) -> int:
        """Input channels of one body of the reduction."""
        tile = self.layout.tile
        products = tile.positions * tile.vectors
        return steps_at_once(self.problem.in_channels, self.target, products=products, broadcasts=tile.positions)

    @property
    def asks(self) -> bool:
        """True if the data may not stay in the second-level cache, so that they are asked for ahead."""
        size = math.prod(self.problem.data_shape) * self.element_bytes
        return 0 in self.problem.dynamic or size > self.target.l2_bytes

    @property
    def lines_of_a_step(self) -> int:
        """Cache lines of the next register tile's data that one body of the reduction asks for."""
        read = self.layout.tile.positions * self.steps * self.element_bytes
        return ceil_div(read, LINE * self.layout.panels)

    @property
    def element_bytes(self) -> int:
        """The bytes of an element."""
        return np.dtype(self.problem.accumulate_dtype).itemsize

    def task(self, number: Expr) -> None:
        """Emit the task of a `number`."""
        layout = self.layout
        extents = [axis.blocks for axis in self.axes]
        of_image = math.prod(extents)
        blocks = unravel(number % of_image, extents)
        begins = [build.bind(block * axis.block + axis.first) for block, axis in zip(blocks, self.axes, strict=True)]
        rows = [*zip(begins, self.axes, strict=True)]
        ends = [build.bind(tirx.min(begin + axis.block, _const(axis.last + 1))) for begin, axis in rows]
        data = [
            build.bind(tirx.max(tirx.min(begin + (1 - axis.taps), _const(axis.data - axis.rows)), _const(0)))
            for begin, axis in rows
        ]
        # A vector of the last chunk may end behind the last column.
        columns = self._array(layout.held + layout.lanes)
        bias = None
        if self.bias is not None:
            bias = self._array(layout.chunk_vectors * layout.lanes)
            with build.serial(_const(0), _const(layout.chunk_vectors * layout.lanes)) as place:
                build.buffer_store(bias, self.bias[place % self.problem.out_channels], [place])
        image = build.bind(number // of_image * layout.tile.images)
        block = _Task(image, tuple(begins), tuple(ends), tuple(data), columns, bias)
        build.evaluate(tirx.call_extern("int32", _FREE))
        self.products(block)
        build.evaluate(tirx.call_extern("int32", _FREE))
        self.sums(block)

    def _array(self, elements: int, scope: str = "global") -> Any:
        return build.alloc_buffer([elements], self.problem.accumulate_dtype, scope=scope, layout=None)

    def products(self, block: _Task) -> None:
        """Emit the products of all positions of a block, a register tile at a time."""
        layout, tile, (first, second, third) = self.layout, self.layout.tile, self.axes
        counts, length = layout.runs
        tiles = ceil_div(length, tile.positions)
        # One loop over tiles and panels: LLVM would unroll one over few panels, and accumulators would leave registers.
        with build.grid(*map(int64, (*counts, tiles * layout.panels))) as (n, d, h, number):
            begin, panel = number // layout.panels * tile.positions, build.bind(number % layout.panels)
            if length % tile.positions:
                begin = tirx.min(begin, _const(length - tile.positions))
            begin = build.bind(begin)
            plane = (block.image + n) * first.data + (block.data[0] + d)
            position = (plane * second.data + (block.data[1] + h)) * third.data + (block.data[2] + begin)
            source = build.bind(position * self.problem.in_channels)
            held = ((n * first.rows + d) * second.rows + h) * third.rows + begin
            self._register_tile(block, source, build.bind(held * layout.row), panel)

    def _register_tile(self, block: _Task, source: Expr, columns: Expr, panel: Expr) -> None:
        """Emit the columns of a `panel`, stored from `columns` on, of the positions whose data begin at `source`."""
        layout, tile, lanes, channels = self.layout, self.layout.tile, self.layout.lanes, self.problem.in_channels
        sums = self._array(tile.positions * layout.panel, "local")

        def each(store: Callable[[int, Expr, Expr], None]) -> None:
            for position in range(tile.positions):
                for vector in range(tile.vectors):
                    with build.vectorized(_const(0), _const(lanes)) as lane:
                        column = lane + vector * lanes
                        store(position, column, column + position * layout.panel)

        each(lambda _position, _column, place: build.buffer_store(sums, self.zero, [place]))
        with build.serial(_const(0), _const(channels // self.steps)) as step:
            for within in range(self.steps):
                ci = step * self.steps + within
                row = (panel * channels + ci) * layout.panel

                def add(position: int, column: Expr, place: Expr, ci: Expr = ci, row: Expr = row) -> None:
                    product = self.data[source + (position * channels + ci)] * self.packed[row + column]
                    build.buffer_store(sums, sums[place] + product, [place])

                each(add)
            if self.asks:
                turn = panel * (channels // self.steps) + step
                ahead = tile.positions * channels + turn * (self.lines_of_a_step * LINE // self.element_bytes)
                build.evaluate(ask_for(self.data[source + ahead], self.lines_of_a_step))

        def keep(position: int, column: Expr, place: Expr) -> None:
            at = columns + (panel * layout.panel + position * layout.row) + column
            build.buffer_store(block.columns, sums[place], [at])

        each(keep)

    def sums(self, block: _Task) -> None:
        """Emit the outputs of a block, row by row."""
        first, second, third = self.axes
        with (
            build.serial(_const(0), _const(self.layout.tile.images)) as image,
            build.serial(block.begins[0], block.ends[0]) as d,
            build.serial(_const(0), _const(first.stride)) as of_d,
            build.serial(block.begins[1], block.ends[1]) as h,
            build.serial(_const(0), _const(second.stride)) as of_h,
        ):
            y, x = build.bind(d * first.stride + of_d - first.pad), build.bind(h * second.stride + of_h - second.pad)
            with build.If(tirx.all(y >= 0, y < first.output, x >= 0, x < second.output)), build.Then():
                outer = ((block.image + image) * first.output + y) * second.output + x
                taps = build.bind(_taps(first, of_d)), build.bind(_taps(second, of_h))
                place = build.bind(outer * (third.output * self.problem.out_channels))
                self._row(_Row(block, image, (d, h), (of_d, of_h), taps, place))

    def _row(self, row: _Row) -> None:
        """Emit a row of outputs: chunks of places with all taps, and single outputs of the others."""
        layout, third, block = self.layout, self.axes[2], row.task
        # A chunk's last vector reaches so many places further, which must be stored later.
        reach = ceil_div(layout.chunk_vectors * layout.lanes - layout.chunk, layout.chunk)
        least, most = third.whole
        begin = build.bind(tirx.min(tirx.max(block.begins[2], _const(least)), block.ends[2]))
        end = build.bind(tirx.max(begin, tirx.min(block.ends[2] - reach, _const(most - reach))))
        conditions: list[Expr] = []
        for place, taps, axis in zip(row.places, row.taps, self.axes[:2], strict=True):
            conditions += [place >= taps - 1, place < axis.data]
        with build.If(tirx.all(*conditions)):
            with build.Then():
                with build.serial(begin, end) as place:
                    self._chunk(row, place)
                for some in ((block.begins[2], begin), (end, block.ends[2])):
                    with build.serial(*some) as place:
                        self._outputs(row, place)
            with build.Else(), build.serial(block.begins[2], block.ends[2]) as place:
                self._outputs(row, place)

    def _column(self, row: _Row, d: Expr, h: Expr, w: Expr, element: Expr | int) -> Expr:
        """Return the index of a column of channel 0, of taps `d` and `h`, data `w`, and an `element` of the kernel."""
        first, second, third = self.axes
        plane = row.image * first.rows + (row.places[0] - d - row.task.data[0])
        position = (plane * second.rows + (row.places[1] - h - row.task.data[1])) * third.rows + (w - row.task.data[2])
        of_plane = (d * first.stride + row.phases[0]) * second.kernel + (h * second.stride + row.phases[1])
        return position * self.layout.row + (of_plane * third.kernel + element) * self.problem.out_channels

    def _chunk(self, row: _Row, place: Expr) -> None:
        """Emit the outputs of a `place` with all taps, by vectors."""
        layout, lanes, third, channels = self.layout, self.layout.lanes, self.axes[2], self.problem.out_channels
        sums, bias = self._array(layout.chunk_vectors * lanes, "local"), row.task.bias
        vectors = [vector * lanes for vector in range(layout.chunk_vectors)]
        for vector in vectors:
            with build.vectorized(_const(0), _const(lanes)) as lane:
                build.buffer_store(sums, self.zero if bias is None else bias[lane + vector], [lane + vector])
        with build.grid(*row.taps) as (d, h):
            for tap in range(third.taps):
                column = build.bind(self._column(row, d, h, place - tap, tap * third.stride))
                added = min(third.kernel - tap * third.stride, third.stride) * channels
                for vector in vectors[: ceil_div(added, lanes)]:
                    with build.vectorized(_const(0), _const(lanes)) as lane:
                        value = row.task.columns[column + (lane + vector)]
                        if added < min(layout.chunk, vector + lanes):  # the rest are other columns
                            value = tirx.Select(lane + vector < added, value, self.zero)
                        build.buffer_store(sums, sums[lane + vector] + value, [lane + vector])
        out = row.first + (place * third.stride - third.pad) * channels
        for vector in vectors:
            with build.vectorized(_const(0), _const(lanes)) as lane:
                value = finished(self.problem, sums[lane + vector], None, None)
                build.buffer_store(self.out, value, [out + (lane + vector)])

    def _outputs(self, row: _Row, place: Expr) -> None:
        """Emit the outputs of a `place` that exist, one by one, each of the taps that read data."""
        third, channels = self.axes[2], self.problem.out_channels
        zero = _const(0)
        with build.serial(zero, _const(third.stride)) as phase:
            output = build.bind(place * third.stride + phase - third.pad)
            exists = tirx.all(output >= 0, output < third.output)
            with build.If(exists), build.Then(), build.serial(zero, _const(channels)) as channel:
                total = self._array(1, "local")
                build.buffer_store(total, self.zero if self.bias is None else self.bias[channel], [zero])
                with build.grid(*row.taps, _taps(third, phase)) as taps:
                    read = [here - tap for here, tap in zip((*row.places, place), taps, strict=True)]
                    within = [x >= 0 for x in read] + [x < axis.data for x, axis in zip(read, self.axes, strict=True)]
                    with build.If(tirx.all(*within)), build.Then():
                        element = taps[2] * third.stride + phase
                        column = self._column(row, taps[0], taps[1], read[2], element) + channel
                        build.buffer_store(total, total[zero] + row.task.columns[column], [zero])
                value = finished(self.problem, total[zero], None, None)
                build.buffer_store(self.out, value, [row.first + (output * channels + channel)])


def _taps(axis: Places, phase: Expr) -> Expr:
    """Return the number of taps of a `phase`."""
    return (_const(axis.kernel + axis.stride - 1) - phase) // axis.stride
