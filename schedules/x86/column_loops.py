"""What the kernels of `compute.col2im` have in common: arguments, tasks, and how accumulators stay in registers."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as build
from tvm.tirx import PrimFunc

from tvm_deconv.compute.col2im import ChannelColumns, ColumnLayout, Places, RowColumns
from tvm_deconv.compute.extents import Extent, Extents, int64, shape_of
from tvm_deconv.compute.indexing import unravel
from tvm_deconv.compute.storage import storage_dtype
from tvm_deconv.problem import Problem
from tvm_deconv.schedules.x86.conversions import row_conversion
from tvm_deconv.schedules.x86.free_registers import free_call, free_function
from tvm_deconv.schedules.x86.row_prefetching import data_bytes
from tvm_deconv.schedules.x86.row_widening import WIDEN, row_widening
from tvm_deconv.schedules.x86.stores import CONVERT, import_functions
from tvm_deconv.schedules.x86.unrolling import steps_at_once
from tvm_deconv.targets import CpuTarget


@dataclass(frozen=True)
class Arrays:
    """The arguments of a kernel, of one axis each; the bias may be None."""

    data: Any
    packed: Any
    bias: Any
    out: Any


@dataclass(frozen=True)
class Block:
    """A block: its first image, its group, and of each axis its first place, one behind its last, its first data."""

    image: Expr
    group: Expr
    begins: tuple[Expr, ...]
    ends: tuple[Expr, ...]
    data: tuple[Expr, ...]


@dataclass(frozen=True)
class Taps:
    """The taps of an output along an `axis`: of the first that reads data, these and the kernel's element.

    `count` of these read data, of `all` that the phase has.
    """

    axis: Places
    data: Expr
    element: Expr
    count: Expr
    all: Expr

    def at(self, tap: Expr) -> tuple[Expr, Expr]:
        """Return the data and the kernel's element of a `tap`, counted from the first that reads data."""
        return self.data - tap * self.axis.jump, self.element + tap * self.axis.period


@dataclass(frozen=True)
class Row:
    """Outputs along the last axis: an image of a block, and along the other axes their taps and themselves."""

    layout: ColumnLayout
    image: Expr
    taps: tuple[Taps, Taps]
    outputs: tuple[Expr, Expr]

    def number(self, of_image: Expr) -> Expr:
        """Return the number of the row in an array of outputs, one of `of_image` for each image, or channel of it."""
        first, second, _ = self.layout.axes
        return (of_image * first.output + self.outputs[0]) * second.output + self.outputs[1]


@contextlib.contextmanager
def rows_of_outputs(layout: ColumnLayout, block: Block) -> Iterator[Row]:
    """Emit loops over the rows of outputs of a `block`; yield what they have inside."""
    first, second, _ = layout.axes
    # All from zero on: of nested loops that begin elsewhere, TVM loses where they do.
    depth, height = (end - begin for begin, end in zip(block.begins[:2], block.ends[:2], strict=True))
    extents = int64(layout.tile.images), depth, int64(first.stride), height, int64(second.stride)
    with build.grid(*extents) as (image, plane, of_d, line, of_h):
        d, h = build.bind(block.begins[0] + plane), build.bind(block.begins[1] + line)
        y, x = build.bind(d * first.stride + of_d - first.pad), build.bind(h * second.stride + of_h - second.pad)
        with build.If(tirx.all(y >= 0, y < first.output, x >= 0, x < second.output)), build.Then():
            yield Row(layout, image, (taps_of(first, d, of_d), taps_of(second, h, of_h)), (y, x))


def row_in_block(layout: ColumnLayout, block: Block) -> tuple[Expr, Expr, Expr]:
    """Emit where outputs of a row of a `block` lie: the first of its places, and begin and end of those there are."""
    third = layout.axes[2]
    first = build.bind(block.begins[2] * third.stride - third.pad)
    end = tirx.min(int64(third.output), block.ends[2] * third.stride - third.pad)
    return first, build.bind(tirx.max(first, int64(0))), end


def column_kernel(
    layout: ColumnLayout, target: CpuTarget, emit: Callable[[Arrays, Block], None], *functions: str
) -> PrimFunc:
    """Return ``deconv(data, packed, [bias], out)``, whose tasks are blocks that `emit` emits.

    `functions` are those in LLVM IR that the emitted statements call, besides `free_registers`.
    """
    problem, batch = layout.problem, Extents.of(layout.problem).batch
    last = problem.data_format == "NXC"
    channels = problem.groups * problem.out_channels
    with IRBuilder() as builder:
        with build.prim_func():
            build.func_name("deconv")
            build.func_attr({"global_symbol": "deconv", "tirx.noalias": True})
            accumulator = problem.accumulate_dtype
            data = _argument("data", problem.dtype, (batch, *problem.data_shape[1:]))
            packed = _argument("packed", accumulator, (layout.packed_elements,))
            bias = _argument("bias", accumulator, problem.bias_shape) if problem.epilogue.bias else None
            outputs = [axis.output for axis in layout.axes[3 - problem.rank :]]
            shape = (batch, *outputs, channels) if last else (batch, channels, *outputs)
            out = _argument("out", problem.output_dtype, shape)
            arrays = Arrays(_flat(data), packed, bias, _flat(out))
            tasks = int64(layout.tasks) if isinstance(batch, int) else batch * layout.tasks
            with build.parallel(int64(0), tasks) as task:
                emit(arrays, _block(layout, task))
        func = builder.get()
    for source in (free_function(target), *functions):
        func = import_functions(func, source)
    return func


def _block(layout: ColumnLayout, number: Expr) -> Block:
    """Emit what the block of a `number` is."""
    extents = [axis.blocks for axis in layout.axes]
    of_group = math.prod(extents)
    blocks, outer = unravel(number % of_group, extents), number // of_group
    group, image = outer % layout.problem.groups, outer // layout.problem.groups
    begins = [build.bind(block * axis.block + axis.first) for block, axis in zip(blocks, layout.axes, strict=True)]
    rows = [*zip(begins, layout.axes, strict=True)]
    ends = [build.bind(tirx.min(begin + axis.block, int64(axis.last + 1))) for begin, axis in rows]
    data = [
        build.bind(tirx.max(tirx.min(begin - axis.reach, int64(axis.data - axis.rows)), int64(0)))
        for begin, axis in rows
    ]
    return Block(build.bind(image * layout.tile.images), build.bind(group), tuple(begins), tuple(ends), tuple(data))


def free_registers() -> None:
    """Emit the call that leaves nothing in vector registers.

    Around the products it keeps LLVM from holding constants of the epilogue in registers, and accumulators in memory.
    """
    build.evaluate(free_call())


def zero(problem: Problem) -> Expr:
    """Return zero in the type of accumulators."""
    return tirx.const(0, problem.accumulate_dtype)


def array(problem: Problem, elements: int, scope: str = "global") -> Any:
    """Emit an array of accumulators."""
    return build.alloc_buffer([elements], problem.accumulate_dtype, scope=scope, layout=None)


def reduction_steps(layout: ChannelColumns | RowColumns, target: CpuTarget) -> int:
    """Return the input channels of one body of the reduction of a register tile."""
    products, broadcasts = layout.vectors * layout.broadcasts, layout.broadcasts
    return steps_at_once(layout.problem.in_channels, target, products=products, broadcasts=broadcasts)


def register_tile(
    layout: ChannelColumns | RowColumns,
    target: CpuTarget,
    product: Callable[[Expr, int, Expr], Expr],
    keep: Callable[[int, Expr, Expr], None],
    ask: Callable[[Expr], None] | None = None,
) -> None:
    """Emit a register tile: the sums of its columns over the input channels.

    Each of the broadcasts is multiplied by the elements of the tile's vectors. `product` is that of an input channel,
    a broadcast and an element, and `keep` stores the sum of the latter two. `ask` ends each body of the reduction.
    """
    problem, steps = layout.problem, reduction_steps(layout, target)
    elements = layout.vectors * layout.lanes
    sums = array(problem, layout.broadcasts * elements, "local")

    def each(emit: Callable[[int, Expr, Expr], None]) -> None:
        for number in range(layout.broadcasts):
            for vector in range(0, elements, layout.lanes):
                with build.vectorized(int64(0), int64(layout.lanes)) as lane:
                    element = lane + vector
                    emit(number, element, element + number * elements)

    each(lambda _number, _element, place: build.buffer_store(sums, zero(problem), [place]))
    with build.serial(int64(0), int64(problem.in_channels // steps)) as step:
        for within in range(steps):

            def add(number: int, element: Expr, place: Expr, ci: Expr = step * steps + within) -> None:
                build.buffer_store(sums, sums[place] + product(ci, number, element), [place])

            each(add)
        if ask is not None:
            ask(step)
    each(lambda number, element, place: keep(number, element, sums[place]))


def widen(to: Any, place: Expr, source: Any, begin: Expr, zeros: Expr, count: Expr, length: Expr) -> None:
    """Emit the call that makes a row of float32: `zeros`, then `count` elements of `source`, and zeros again.

    The row has `length` elements, from `place` of `to` on, and those of the source are from `begin` on.
    """
    ends = to[place], to[place + (length - 1)], source[begin]
    sizes = [size.astype("int32") for size in (zeros, count, length)]
    build.evaluate(tirx.call_extern("int32", WIDEN, *map(tirx.address_of, ends), *sizes))


def narrow(to: Any, place: Expr, source: Any, begin: Expr, count: Expr) -> None:
    """Emit the call that rounds `count` outputs of `source`, from `begin` on, to those of `to`, from `place` on."""
    ends = map(tirx.address_of, (to[place], source[begin]))
    build.evaluate(tirx.call_extern("int32", CONVERT, *ends, count.astype("int32")))


def conversions(problem: Problem, target: CpuTarget, before: str = "") -> list[str]:
    """Return the functions, in LLVM IR, of `widen` and `narrow`: past the caches with those of streams `before`."""
    return [row_widening(problem.dtype), before + row_conversion(problem, target, streams=bool(before))]


def asks_ahead(problem: Problem, target: CpuTarget) -> bool:
    """Tell whether data are asked for ahead, since they may not stay in the second-level cache."""
    return 0 in problem.dynamic or data_bytes(problem) > target.l2_bytes


def taps_of(axis: Places, place: Expr, phase: Expr) -> Taps:
    """Emit the taps of a `phase` of a `place` that read data."""
    element, data, common = phase, place, math.gcd(axis.stride, axis.dilation)
    if axis.dilation > 1:
        element = build.bind(phase // common * pow(axis.jump, -1, axis.period) % axis.period)
        data = build.bind(place - (element * axis.dilation - phase) // axis.stride)
    taps = int64(axis.taps)
    if axis.kernel % axis.period:
        taps = (int64(axis.kernel + axis.period - 1) - element) // axis.period
    if common > 1:
        taps = tirx.Select(phase % common == 0, taps, int64(0))
    skipped = build.bind(tirx.max((data + (axis.jump - axis.data)) // axis.jump, int64(0)))
    count = build.bind(tirx.max(tirx.min(taps, data // axis.jump + 1) - skipped, int64(0)))
    data, element = build.bind(data - skipped * axis.jump), build.bind(element + skipped * axis.period)
    return Taps(axis, data, element, count, taps)


def _argument(name: str, dtype: str, shape: Sequence[Extent]) -> Any:
    return build.arg(name, build.buffer(shape_of(shape), storage_dtype(dtype), align=1, layout=None))


def _flat(array: Any) -> Any:
    """Return `array` with one axis."""
    elements = math.prod(array.shape)
    return build.decl_buffer([elements], array.dtype, data=array.data, align=1, layout=None)
