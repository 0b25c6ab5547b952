"""The vocabulary of CUDA kernels: the function and its arguments, launches, loads, stores and the epilogue.

Kernels are TensorIR written by a builder: each launch is a loop nest over blocks and threads, and nothing is left to
region inference. Indices have 32 bits if they can count the elements of every argument, else 64.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as build
from tvm.tirx import IntImm, PrimFunc

from tvm_deconv.compute.gather import ravel, reached
from tvm_deconv.compute.indexing import Index, unravel
from tvm_deconv.compute.phases import Geometry
from tvm_deconv.compute.requantization import (
    bias_at,
    data_zero_point,
    epilogue_parameter,
    finished,
    has_scales,
    scale_at,
    stored,
)
from tvm_deconv.compute.storage import filter_storage, from_accumulator, storage_dtype, to_accumulator
from tvm_deconv.problem import Problem

#: Threads of a block in kernels where each thread works for itself.
THREADS = 256
#: Multiprocessors that a launch should fill; those of an H100 or H200.
MULTIPROCESSORS = 132
#: The time until data are there that a thread waits for, in multiply-adds of the device, by an H100.
ARRIVAL = 820 * 128 * MULTIPROCESSORS
#: A tile may reach this many elements beyond the end of an argument while its index is computed.
_BEYOND = 1 << 24


def one_task(problem: Problem, plan: Any) -> int:  # noqa: ARG001
    """Return 1, the number of tasks of every plan: costs account for idle multiprocessors."""
    return 1


def as_it_is(element: Expr) -> Expr:
    """Return an element of the filter without a change, as most are packed."""
    return element


def index_dtype(*elements: int) -> str:
    """Return the type of indices for arrays of these numbers of elements."""
    return "int32" if max(elements) < 2**31 - _BEYOND else "int64"


@dataclass(frozen=True, slots=True)
class Arguments:
    """The buffers of the function that is being built; `bias` holds the constants of a quantized problem."""

    problem: Problem
    geometry: Geometry
    index: str
    data: Expr
    packed: Expr
    bias: Expr | None
    workspace: Expr | None
    out: Expr

    def const(self, value: int) -> IntImm:
        """Return an index."""
        return IntImm(self.index, value)

    def _at(self, n: Index, channel: Index, x: Sequence[Index]) -> tuple[Index, ...]:
        place = x[3 - self.problem.rank :]
        return (n, *place, channel) if self.problem.data_format == "NXC" else (n, channel, *place)

    def element(self, n: Index, channel: Index, x: Sequence[Index]) -> Expr:
        """Return an element of the data, as it is stored."""
        return self.data[self._at(n, channel, x)]

    def place(self, n: Index, channel: Index, x: Sequence[Index]) -> Index:
        """Return the number of an element of the data in memory."""
        geometry = self.geometry
        channels, data = geometry.groups * geometry.in_channels, geometry.data
        if self.problem.data_format == "NXC":
            return ravel((n, *x, channel), (*data, channels))
        return ravel((n, channel, *x), (channels, *data))

    def flat_data(self) -> Expr:
        """Return the data as an array of one axis, by `place`."""
        return self._flat(self.data)

    def flat_out(self) -> Expr:
        """Return the output as an array of one axis, by `flat`."""
        return self._flat(self.out)

    def _flat(self, buffer: Expr) -> Expr:
        extents = [IntImm(self.index, math.prod(int(extent) for extent in buffer.shape))]
        return build.decl_buffer(extents, buffer.dtype, data=buffer.data, scope="global", layout=None)

    def accumulated(self, n: Index, channel: Index, x: Sequence[Index]) -> Expr:
        """Return an element of the data as an accumulator."""
        return self.shifted(
            to_accumulator(self.element(n, channel, x), self.problem.dtype, self.problem.accumulate_dtype)
        )

    @property
    def zero_point(self) -> Expr | None:
        """The zero point of the data; None if the problem is not quantized."""
        return data_zero_point(self.problem, self.bias)

    def shifted(self, element: Expr) -> Expr:
        """Return an element of the data, which is an accumulator, less its zero point."""
        return element if self.zero_point is None else element - self.zero_point

    def finish(self, n: Index, channel: Index, i: Sequence[Index], total: Expr) -> None:
        """Store the epilogue of the sum `total` as the output element of `channel` at `i`."""
        # Kept in a variable: the code generator cannot reinterpret a constant, and rounding uses its operand twice.
        value = local(1, self.problem.accumulate_dtype)
        self._activate(value, 0, channel, total)
        build.buffer_store(self.out, self._rounded(value[0]), list(self._at(n, channel, i)))

    def finish_vector(self, n: Index, channel: Index, i: Sequence[Index], totals: Sequence[Expr]) -> None:
        """Store neighbours in memory, from `channel` and `i` on, in one access: channels if they come last.

        Behind the last channel is the first one of the next position.
        """
        values, last = self.finished(channel, totals), self.problem.data_format == "NXC"
        with build.vectorized(len(totals)) as lane:
            at = self._at(n, channel + lane, i) if last else self._at(n, channel, [*i[:2], i[2] + lane])
            build.buffer_store(self.out, values[lane], list(at))

    def finished(self, channel: Index, totals: Sequence[Expr]) -> Expr:
        """Return what sums of neighbours in memory become, from `channel` on if it comes last, as an array."""
        problem, last = self.problem, self.problem.data_format == "NXC"
        channels = self.geometry.out_channels
        across = last and problem.groups == 1 and channels % len(totals) > 0
        sums = local(len(totals), problem.accumulate_dtype)
        values = local(len(totals), storage_dtype(problem.output_dtype))
        for number, total in enumerate(totals):
            at = (channel + number) % channels if across else channel + number * last
            self._activate(sums, number, at, total)
            build.buffer_store(values, self._rounded(sums[number]), [number])
        return values

    def _activate(self, values: Expr, at: int, channel: Index, total: Expr) -> None:
        """Leave the activation of a sum of `channel` in the accumulator `at`, as `finished` returns it."""
        problem = self.problem
        biased = total if self.bias is None else total + bias_at(problem, self.bias, channel)
        build.buffer_store(values, biased, [at])
        scale = scale_at(problem, self.bias, channel) if has_scales(problem) else None
        build.buffer_store(values, finished(problem, values[at], self.bias, scale), [at])

    def _rounded(self, value: Expr) -> Expr:
        """Return an accumulator as an element of the output."""
        if self.problem.quantization:
            return stored(self.problem, value)
        dtype = self.problem.output_dtype
        return from_accumulator(value, dtype) if dtype == "bfloat16" else value.astype(dtype)

    def output_at(self, flat: Index) -> tuple[Index, Index, list[Index]]:
        """Return image, channel and index along each axis of output element number `flat` in memory."""
        geometry, channels = self.geometry, self.geometry.groups * self.geometry.out_channels
        if self.problem.data_format == "NXC":
            n, *i, channel = unravel(flat, (geometry.batch, *geometry.output, channels))
        else:
            n, channel, *i = unravel(flat, (geometry.batch, channels, *geometry.output))
        return n, channel, i

    def flat(self, n: Index, channel: Index, i: Sequence[Index]) -> Index:
        """Return the number of an output element in memory."""
        geometry, channels = self.geometry, self.geometry.groups * self.geometry.out_channels
        if self.problem.data_format == "NXC":
            return ravel((n, *i, channel), (*geometry.output, channels))
        return ravel((n, channel, *i), (channels, *geometry.output))

    @property
    def packed_elements(self) -> int:
        """Number of elements of the packed filter."""
        return int(self.packed.shape[0])

    @property
    def outputs(self) -> int:
        """Number of output elements."""
        return self.geometry.batch * self.geometry.groups * self.geometry.out_channels * math.prod(self.geometry.output)

    @property
    def holes(self) -> bool:
        """True if there are outputs that no tap reaches."""
        return bool(reached(self.geometry, [tirx.Var(name, self.index) for name in "dhw"]))


class Function:
    """The function under construction; `done` is set when the block of `deconv` or `pack` ends."""

    done: PrimFunc


#: What an element of the filter becomes as it is packed.
Rounding: TypeAlias = Callable[[Expr], Expr]
#: From the number of a packed element to group, input channel, output channel, kernel index, and conditions on them.
Place: TypeAlias = Callable[[Expr], tuple[Index, Index, Index, Sequence[Index], Sequence[Expr]]]


@contextlib.contextmanager
def deconv(
    problem: Problem, packed_elements: int, packed_dtype: str, workspace_elements: int = 0
) -> Iterator[tuple[Function, Arguments]]:
    """Build ``deconv(data, packed, [bias], [workspace], out)``; the launches of the with block are its body."""
    geometry = Geometry.of(problem)
    data_shape = (geometry.batch, *problem.data_shape[1:])
    spatial = geometry.output[3 - problem.rank :]
    channels = geometry.groups * geometry.out_channels
    out_shape = (geometry.batch, *((*spatial, channels) if problem.data_format == "NXC" else (channels, *spatial)))
    # The workspace may hold elements of two bytes.
    index = index_dtype(math.prod(data_shape), math.prod(out_shape), packed_elements, 2 * workspace_elements)
    accumulator, function = problem.accumulate_dtype, Function()
    parameter = epilogue_parameter(problem)

    def argument(name: str, shape: Sequence[int], dtype: str) -> Expr:
        extents = [IntImm(index, int(extent)) for extent in shape]
        return build.arg(name, build.buffer(extents, dtype, layout=None))

    with IRBuilder() as builder:
        with build.prim_func():
            build.func_name("deconv")
            build.func_attr({"global_symbol": "deconv", "tirx.noalias": True})
            yield (
                function,
                Arguments(
                    problem,
                    geometry,
                    index,
                    argument("data", data_shape, storage_dtype(problem.dtype)),
                    argument("packed", (packed_elements,), packed_dtype),
                    None if parameter is None else argument(parameter.op.name, parameter.shape, str(parameter.dtype)),
                    argument("workspace", (workspace_elements,), accumulator) if workspace_elements else None,
                    argument("out", out_shape, storage_dtype(problem.output_dtype)),
                ),
            )
        function.done = builder.get()


@contextlib.contextmanager
def launch(blocks: int, threads: int = THREADS) -> Iterator[tuple[Expr, Expr]]:
    """Launch a kernel, whose body is the with block, and yield the numbers of block and thread."""
    block, thread = build.env_thread("blockIdx.x"), build.env_thread("threadIdx.x")
    with build.launch_thread(block, blocks), build.launch_thread(thread, threads):
        yield block, thread


def aligned_or_not(buffers: Sequence[Expr], size: int, code: Callable[[bool], None]) -> None:
    """Emit `code` for `buffers` that begin at multiples of `size` bytes, and other code for those that do not.

    The host decides at every call, or a thread, in a kernel; without `buffers` there is nothing to decide.
    """
    if not buffers:
        code(True)
        return
    rests = [tirx.reinterpret("uint64", buffer.data) % tirx.const(size, "uint64") for buffer in buffers]
    with build.If(tirx.all(*(rest == tirx.const(0, "uint64") for rest in rests))):
        with build.Then():
            code(True)
        with build.Else():
            code(False)


@contextlib.contextmanager
def each(elements: int) -> Iterator[Expr]:
    """Launch one thread for each of `elements`, with its number."""
    index = index_dtype(elements)
    with launch(-(-elements // THREADS)) as (block, thread):
        number = build.bind(block.astype(index) * THREADS + thread.astype(index))
        with when([number < elements] if elements % THREADS else []):
            yield number


@contextlib.contextmanager
def when(conditions: Sequence[Expr]) -> Iterator[None]:
    """Do the with block if all of `conditions` hold."""
    if not conditions:
        yield
        return
    with build.If(tirx.all(*conditions)), build.Then():
        yield


def local(extent: int, dtype: str) -> Expr:
    """Return an array of the thread, in registers if all its indices are constants after unrolling."""
    return build.alloc_buffer([extent], dtype, scope="local", layout=None)


def shared(extent: int, dtype: str, scope: str = "shared") -> Expr:
    """Return an array of the block, which "shared.dyn" has its launch allocate."""
    return build.alloc_buffer([extent], dtype, scope=scope, layout=None)


def barrier() -> None:
    """Wait for all threads of the block."""
    build.evaluate(build.tvm_storage_sync("shared"))


def pack_filter(
    problem: Problem,
    elements: int,
    dtype: str,
    parts: Sequence[tuple[int, int, Place, Rounding]],
    write: Callable[[Expr], None] | None = None,
) -> PrimFunc:
    """Build ``pack(filter [G, Ci, Co, *K], packed [elements])``.

    `parts` holds the offset, the number of elements, their `Place` and their rounding for each part of the packed
    filter. An element whose conditions do not hold is zero. If elements are left, `write` writes them.
    """
    given = (problem.groups, problem.in_channels, problem.out_channels, *problem.kernel)
    given_dtype = filter_storage(problem)
    index = index_dtype(math.prod(given), elements)
    with IRBuilder() as builder:
        with build.prim_func():
            build.func_name("pack")
            build.func_attr({"global_symbol": "pack", "tirx.noalias": True})
            extents = [IntImm(index, extent) for extent in given]
            source = build.arg("filter", build.buffer(extents, given_dtype, layout=None))
            packed = build.arg("packed", build.buffer([IntImm(index, elements)], dtype, layout=None))
            for offset, count, place, rounded in parts:
                with each(count) as number:
                    g, ci, co, places, conditions = place(number)
                    element = source[(g, ci, co, *places[3 - problem.rank :])]
                    element = rounded(element)
                    if dtype != given_dtype:
                        element = to_accumulator(element, problem.filter_dtype, dtype)
                    if conditions:
                        element = tirx.if_then_else(tirx.all(*conditions), element, tirx.const(0, dtype))
                    build.buffer_store(packed, element, [number + offset])
            if not parts:
                with each(1) as number:
                    build.buffer_store(packed, tirx.const(0, dtype), [number])
            if write is not None:
                write(packed)
        return builder.get()
