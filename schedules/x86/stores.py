"""Copies of rows by one call each: past the caches, or up to where a call's arrays end.

A store to a line outside of the caches reads the line first, and evicts data that a task still needs. Where an output
is larger than a core's share of the caches, the copy of finished rows into it therefore goes by non-temporal stores of
whole lines, which read nothing. Measured on one core of a Zen 4 server, rows of 2 KiB copied into 64 MiB: 6 GB/s with
ordinary stores, 28 GB/s with these. A layer that does little else (16 to 20 channels, kernel = stride = 2, 42 MB of
output) is 1.45 times as fast. Where products take most of the time, ordinary stores hide behind them, and the gain is a
few per cent.

TVM has no such store. `lower_streaming_stores` replaces the loops of the stage ``out`` by calls of a function in LLVM
IR (``streaming_copy.ll``), which the code generator links into the module. It takes any address and length.

Where a row ends within a line, the rest of the line is the next row's, and both are stored as usual: they wait for the
line, which comes from memory since all others go past the caches. Each plain copy therefore asks for the line in which
the next row ends. Measured on one core of a Zen 3 server, rows of 600 to 2,400 bytes: 0.75 to 0.96 of a layer's time.

With a dynamic extent, the length of a row is known at the call only. A loop that tests each element becomes scattered
stores under masks, two thirds of the time of a call with few positions. `lower_row_copies` copies rows by their length
instead (``row_copy.ll``): those of the output, and those of the data, which get zeros around them.

A block that has a part of a row tests its elements too. Stores under AVX2's masks are slow: in waveforms they took up
to a fourth of a call. `lower_cut_rows` copies such rows by their length as well.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeAlias

import numpy as np
from tvm import tirx
from tvm.ir import Call, Expr, Range, StringImm, TensorLoad
from tvm.s_tir import SBlock, SBlockRealize
from tvm.sym import Analyzer
from tvm.tirx import Buffer, BufferLoad, BufferRegion, BufferStore, Evaluate, For, ForKind, PrimFunc, SeqStmt, Stmt
from tvm_ffi import structural_equal

from tvm_deconv.compute.indexing import ravel
from tvm_deconv.problem import Problem, element_bytes
from tvm_deconv.schedules.x86.costs import LAST_CACHE
from tvm_deconv.schedules.x86.statements import with_body

_Place: TypeAlias = tuple[Buffer, list[Expr]]

#: A core's share of all caches, in bytes, of current servers: 1.5 to 4 MiB.
_SHARE = 4 << 20
#: Bytes of a cache line.
LINE = 64
#: Stages that copy rows of the data with zeros around them.
_PACKING = ("data_rows", "data_pack")
#: The shortest rows, in bytes, that are stored past the caches: shorter ones are mostly parts of lines.
SHORTEST_STREAM = 8 * LINE
#: The same of rows that are converted: their parts of lines take longer.
SHORTEST_CONVERTED = 64 * LINE
#: The shortest, in bytes, that are converted by a call: for less than some lines it costs more than it saves.
SHORTEST_CALL = 4 * LINE
#: The functions of `streaming_copy.ll` and `row_copy.ll`.
STREAM = "tvm_deconv_stream"
FENCE = "tvm_deconv_fence"
COPY = "tvm_deconv_copy"
_ROW = "tvm_deconv_row"
#: The function of `convert_row.ll`.
CONVERT = "tvm_deconv_convert"


def outgrows_caches(problem: Problem) -> bool:
    """Tell whether the output is larger than a core's share of the caches; False for dynamic extents."""
    return not problem.dynamic_axes and _output_size(problem) > _SHARE


def goes_to_memory(problem: Problem) -> bool:
    """Tell whether no cache keeps the output from call to call, at the extents that plans are made for.

    Dynamic ones may be longer: it is told for twice as long ones.
    """
    return _output_size(problem) << len(problem.dynamic_axes) > LAST_CACHE


def ends_within_line(problem: Problem) -> bool:
    """Tell whether the channels of a position, of one group, end within a line of the output."""
    return problem.out_channels * element_bytes(problem.output_dtype) % LINE > 0


def _output_size(problem: Problem) -> int:
    """Return the bytes of the output."""
    return math.prod(problem.output_shape) * element_bytes(problem.output_dtype)


@cache
def llvm_source(name: str) -> str:
    """Return the LLVM IR of the file `name` beside this module."""
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def import_functions(func: PrimFunc, source: str) -> PrimFunc:
    """Return `func` with the functions of `source`, in LLVM IR, beside it: within its root block, if it has one."""
    body = func.body
    if not isinstance(body, SBlockRealize):
        return func.with_body(_importing(source, body))
    return func.with_body(with_body(body, _importing(source, body.block.body)))


def _importing(source: str, body: Stmt) -> Stmt:
    return tirx.AttrStmt(tirx.const(0), "pragma_import_llvm", StringImm(source), body)


def lower_streaming_stores(func: PrimFunc, functions: str = "", conversion: str = "") -> PrimFunc:
    """Return `func` with the rows of its stage ``out`` stored past the caches, if they are plain copies.

    So are rows that are converted, if there is a `conversion` of `conversions.row_conversion`. `functions` is further
    LLVM IR that `func` calls already.
    """
    source = llvm_source("streaming_copy.ll") + functions + conversion
    shortest = SHORTEST_CONVERTED if conversion else SHORTEST_STREAM
    lowering = _Lowering(source, shortest=shortest, copy=STREAM, converts=bool(conversion), fence=FENCE)
    return lowering.lower(func, always=bool(functions))


def lower_row_copies(func: PrimFunc, conversion: str = "") -> PrimFunc:
    """Return `func` with rows of data and of the output copied by their lengths, or converted by `conversion`."""
    source = llvm_source("row_copy.ll") + conversion
    return _Lowering(source, shortest=LINE, copy=COPY, converts=bool(conversion), row=_ROW).lower(func)


def lower_cut_rows(func: PrimFunc) -> PrimFunc:
    """Return `func` with those rows of its stage ``out`` copied by calls that a block has a part of."""
    return _Lowering(llvm_source("row_copy.ll"), shortest=LINE, copy=COPY, cut=True).lower(func)


def lower_conversions(func: PrimFunc, conversion: str) -> PrimFunc:
    """Return `func` with the rows of its stage ``out`` converted by the function in `conversion`."""
    return _Lowering(conversion, shortest=SHORTEST_CALL, copy="", converts=True).lower(func)


@dataclass(slots=True)
class _Lowering:
    """Replaces copies by calls of functions in the LLVM IR `source`.

    `copy` is the function for rows of the output; if it `converts`, another takes those of another type than their
    source. `row`, if not empty, is that for rows of the data with zeros around them. Rows of less than `shortest` bytes
    stay loops; if only `cut` ones are copied, so do those of constant lengths. `fence`, if not empty, is called at the
    end of each task. `replaced` counts the copies that became calls.
    """

    source: str
    shortest: int
    copy: str
    converts: bool = False
    row: str = ""
    cut: bool = False
    fence: str = ""
    replaced: int = 0

    def lower(self, func: PrimFunc, always: bool = False) -> PrimFunc:
        """Return `func` with calls; unchanged if there is nothing to replace, unless `always`."""
        body = self._lower(func.body, [])
        return func.with_body(body) if self.replaced or always else func

    def _lower(self, stmt: Stmt, nest: Sequence[For]) -> Stmt:
        """Replace the copies in `stmt`, directly inside of the loops `nest`; return them with the loops."""
        if isinstance(stmt, SBlockRealize):
            call = self._replace_copy(stmt, nest)
            return self._lower_block(stmt, nest) if call is None else call
        if isinstance(stmt, SeqStmt):
            return _in_loops(SeqStmt([self._lower(part, []) for part in stmt.seq]), nest)
        if not isinstance(stmt, For):
            return _in_loops(stmt, nest)
        if self.fence and stmt.kind == ForKind.PARALLEL:
            # Another thread must not hear that a task is done before its stores are in memory.
            fence = Evaluate(tirx.call_extern("int32", self.fence))
            return _in_loops(with_body(stmt, SeqStmt([self._lower(stmt.body, []), fence])), nest)
        return self._lower(stmt.body, [*nest, stmt])

    def _lower_block(self, realize: SBlockRealize, nest: Sequence[For]) -> Stmt:
        body = self._lower(realize.block.body, [])
        if realize.block.name_hint == "root":
            body = _importing(self.source, body)
        return _in_loops(with_body(realize, body), nest)

    def _replace_copy(self, realize: SBlockRealize, nest: Sequence[For]) -> Stmt | None:
        """Return the copy `realize` with as many inner loops of `nest` as possible done by a call, or None."""
        store, analyzer = realize.block.body, Analyzer()
        copied = self._copied(realize)
        if copied is None:
            return None
        load, predicate = copied
        for loop in nest:
            analyzer.bind(loop.loop_var, Range.from_min_extent(loop.min, loop.extent))
        for variable, value in zip(realize.block.iter_vars, realize.iter_values, strict=True):
            analyzer.bind(variable.var, value)
        places = [
            (buffer, [analyzer.simplify(index) for index in indices])
            for buffer, indices in ((store.buffer, store.indices), (load.source, load.indices))
        ]
        predicate = analyzer.simplify(predicate)
        for depth in range(len(nest)):
            call = self._call(realize, places, predicate, Row.of(nest[depth:]))
            if call is not None:
                self.replaced += 1
                return _in_loops(call, nest[:depth])
        return None

    def _copied(self, realize: SBlockRealize) -> tuple[TensorLoad, Expr] | None:
        """Return the element that `realize` copies and the predicate of the copy, or None for other stages."""
        store, predicate = realize.block.body, realize.predicate
        value = store.value if isinstance(store, BufferStore) else None
        if realize.block.name_hint in _PACKING and self.row:
            if not (isinstance(value, Call) and value.op.name == "prim.if_then_else"):
                return None
            if not structural_equal(predicate, tirx.const(1, "bool")):
                return None
            predicate, value, _ = value.args
        elif realize.block.name_hint != "out":
            return None
        elif self.converts and value is not None:
            value = _only_element(realize.block.reads)
        return (value, predicate) if isinstance(value, TensorLoad) else None

    def _call(self, realize: SBlockRealize, places: Sequence[_Place], predicate: Expr, row: Row) -> Stmt | None:
        """Return `realize` as one call that copies the elements of `row` that satisfy `predicate`.

        `places` are the element written and the element read. Return None where these leave gaps, the row is too
        short, or the predicate does not admit one range of the row.
        """
        if not all(row.is_contiguous(*place) for place in places):
            return None
        size = np.dtype(str(places[0][0].dtype)).itemsize
        limits = row.limits(predicate)
        if row.length * size < self.shortest or limits is None:
            return None
        conditions, begin, end = limits
        if self.cut and isinstance(end, tirx.IntImm):
            return None
        everywhere = all_of(conditions)
        count = tirx.max(end - begin, 0)
        target, source = (Span.of(*place, row) for place in places)
        if realize.block.name_hint in _PACKING:
            count = tirx.Select(everywhere, count, tirx.const(0, "int64")) if conditions else count
            everywhere = tirx.const(1, "bool")
            begin = tirx.min(begin, row.length - count)
            # The call names the last element too: TVM shrinks a stage to the elements that it sees used.
            addresses = [target.address(), target.last_address(), source.address(begin)]
            call = tirx.call_extern(
                "int32", self.row, *addresses, _bytes(begin, size), _bytes(count, size), tirx.const(size, "int32")
            )
        elif structural_equal(begin, tirx.const(0, "int64")):
            addresses = [target.address(), source.address()]
            if target.buffer.dtype == source.buffer.dtype:
                call = tirx.call_extern("int32", self.copy, *addresses, _bytes(count, size))
            else:
                call = tirx.call_extern("int32", CONVERT, *addresses, _bytes(count, 1))
        else:
            return None
        block, values = realize.block, [row.first.simplify(value) for value in realize.iter_values]
        regions = [source.region], [target.region]
        return SBlockRealize(values, everywhere, SBlock(block.iter_vars, *regions, block.name_hint, Evaluate(call)))


@dataclass(frozen=True, slots=True)
class Row:
    """The iterations of nested `loops`, in order, as the elements of a row.

    `ranges` knows the ranges of the loop variables, `first` their first values. `number` counts the iterations.
    """

    loops: Sequence[For]
    ranges: Analyzer
    first: Analyzer
    number: Expr

    @staticmethod
    def of(loops: Sequence[For]) -> Row:
        """Return the row that `loops` iterate over."""
        ranges, first = Analyzer(), Analyzer()
        number: Expr = tirx.const(0, "int64")
        for loop in loops:
            ranges.bind(loop.loop_var, Range.from_min_extent(loop.min, loop.extent))
            first.bind(loop.loop_var, loop.min)
            number = number * loop.extent + (loop.loop_var - loop.min)
        return Row(loops, ranges, first, number)

    @property
    def length(self) -> int:
        """Number of elements."""
        return math.prod(int(loop.extent) for loop in self.loops)

    def is_contiguous(self, buffer: Buffer, indices: Sequence[Expr]) -> bool:
        """Tell whether the elements of `buffer` at `indices` follow each other without gaps."""
        offset = ravel(indices, buffer.shape)
        return bool(self.ranges.can_prove_equal(offset - self.first.simplify(offset), self.number))

    def limits(self, predicate: Expr) -> tuple[list[Expr], Expr, Expr] | None:
        """Return the conditions of `predicate` that hold for all of the row or none, and the first element and end.

        Return None if another condition is not a bound of the row.
        """
        conditions: list[Expr] = []
        begin, end = tirx.const(0, "int64"), tirx.const(self.length, "int64")
        for condition in _conjuncts(predicate):
            if self.is_fixed(condition):
                conditions.append(condition)
                continue
            bound = self._bound(condition)
            if bound is None:
                return None
            is_end, element = bound
            if is_end:
                end = tirx.min(end, element)
            else:
                begin = tirx.max(begin, element)
        return conditions, begin, end

    def _bound(self, condition: Expr) -> tuple[bool, Expr] | None:
        """Return the bound that `condition` sets and whether it is the end, or None if it is no bound.

        A bound counts elements of the row, or iterations of its outermost loop.
        """
        if not isinstance(condition, (tirx.LT, tirx.LE)):
            return None
        is_end, exclusive = not self.is_fixed(condition.a), int(isinstance(condition, tirx.LT))
        moving, bound = (condition.a, condition.b) if is_end else (condition.b, condition.a)
        if not self.is_fixed(bound):
            return None
        limit = bound + (1 - exclusive if is_end else exclusive)  # of what is less, or what is not
        moving, limit = self._multiplied(moving, limit)
        start, outermost = self.first.simplify(moving), self.loops[0]
        if self.ranges.can_prove_equal(moving - start, outermost.loop_var - outermost.min):
            unit = self.length // int(outermost.extent)
        elif self.ranges.can_prove_equal(moving - start, self.number):
            unit = 1
        else:
            return None
        return is_end, (limit - start) * unit

    def _multiplied(self, moving: Expr, limit: Expr) -> tuple[Expr, Expr]:
        """Return both sides of a comparison without a division that TVM has made of what they have in common.

        As integers, ``a + x // d < b`` is ``x < (b - a) * d``.
        """
        fixed, others = tirx.const(0, "int64"), []
        for term in _terms(moving):
            if self.is_fixed(term):
                fixed = fixed + term
            else:
                others.append(term)
        if len(others) != 1 or not isinstance(others[0], tirx.FloorDiv) or not self.is_fixed(others[0].b):
            return moving, limit
        return others[0].a, (limit - fixed) * others[0].b

    def is_fixed(self, value: Expr) -> bool:
        """Tell whether `value` is the same in all iterations."""
        return bool(structural_equal(self.first.simplify(value), value))


@dataclass(frozen=True, slots=True)
class Span:
    """The elements of a buffer that a row writes or reads: the indices of the first, and the largest distances."""

    buffer: Buffer
    first: Sequence[Expr]
    reach: Sequence[int]

    @staticmethod
    def of(buffer: Buffer, indices: Sequence[Expr], row: Row) -> Span:
        """Return the span of the element at `indices` over all iterations of `row`."""
        first = [row.first.simplify(index) for index in indices]
        distances = [row.ranges.simplify(index - at) for index, at in zip(indices, first, strict=True)]
        return Span(buffer, first, [row.ranges.const_int_bound(distance).max_value for distance in distances])

    @property
    def region(self) -> BufferRegion:
        """The smallest box of the buffer with all elements."""
        extents = [tirx.const(distance + 1, "int64") for distance in self.reach]
        return BufferRegion(
            self.buffer, [Range.from_min_extent(at, extent) for at, extent in zip(self.first, extents, strict=True)]
        )

    def address(self, skipped: Expr | int = 0) -> Expr:
        """Return the address of the element after `skipped` ones."""
        return tirx.address_of(BufferLoad(self.buffer, [*self.first[:-1], self.first[-1] + skipped]))

    def last_address(self) -> Expr:
        """Return the address of the last element."""
        last = [at + distance for at, distance in zip(self.first, self.reach, strict=True)]
        return tirx.address_of(BufferLoad(self.buffer, last))


def all_of(conditions: Sequence[Expr]) -> Expr:
    """Return the condition that all of `conditions` hold, which it does without any."""
    return tirx.all(*conditions) if conditions else tirx.const(1, "bool")


def _only_element(regions: Sequence[BufferRegion]) -> TensorLoad | None:
    """Return the one element that a block reads whose `regions` are these, or None if there are several."""
    if len(regions) != 1 or any(int(part.extent) != 1 for part in regions[0].region):
        return None
    return BufferLoad(regions[0].source, [part.min for part in regions[0].region])


def _bytes(count: Expr, size: int) -> Expr:
    """Return the bytes of `count` elements of `size` bytes, in 32 bits.

    A block is far smaller than 2 GiB. With 64 bits, TVM's narrowing of indices would call another function.
    """
    return tirx.Cast("int32", count * size)


def _in_loops(stmt: Stmt, nest: Sequence[For]) -> Stmt:
    """Return `stmt` within the loops `nest`."""
    for loop in reversed(nest):
        stmt = with_body(loop, stmt)
    return stmt


def _terms(value: Expr) -> list[Expr]:
    """Return the terms that `value` is the sum of."""
    return [*_terms(value.a), *_terms(value.b)] if isinstance(value, tirx.Add) else [value]


def _conjuncts(predicate: Expr) -> list[Expr]:
    """Return the conditions that `predicate` joins by and."""
    if isinstance(predicate, tirx.And):
        return [*_conjuncts(predicate.a), *_conjuncts(predicate.b)]
    return [predicate]
