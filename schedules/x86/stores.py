"""Stores past the caches, for outputs that do not stay in them.

A store to a line that is not in a cache reads the line first, and drives out what a task still needs.  Where an output
is larger than a core's share of the caches, the copy of finished rows into it goes by non-temporal stores of whole
lines, which nothing reads before.  Measured on one core of a Zen 4 server, rows of 2 KiB copied into 64 MiB: 6 GB/s
with ordinary stores, 28 GB/s with these; a layer that does little else (16 to 20 channels, kernel = stride = 2, 42 MB
of output) is 1.45 times as fast.  Where products take most of the time, ordinary stores hide behind them, and the gain
is a few per cent.

TVM has no such store.  `streamed` replaces the loops of the stage ``out`` by calls of a function in LLVM's language
that the code generator takes into the module.  It takes any address and length: what lies before the first and after
the last whole line of a row is stored as usual.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import tvm_ffi
from tvm import tirx
from tvm.ir import Expr, Range, StringImm, TensorLoad
from tvm.s_tir import SBlock, SBlockRealize
from tvm.sym import Analyzer
from tvm.tirx import Buffer, BufferLoad, BufferRegion, BufferStore, Evaluate, For, ForKind, PrimFunc, SeqStmt, Stmt

from tvm_deconv.compute.direct import ravel
from tvm_deconv.compute.storage import storage_dtype
from tvm_deconv.problem import Problem
from tvm_deconv.schedules.x86.threads import with_body

_Place: TypeAlias = tuple[Buffer, list[Expr]]

#: A core's share of all caches, in bytes, of current servers: 1.5 to 4 MiB.
_SHARE = 4 << 20
_LINE = 64
#: Shorter rows, in bytes, are not worth it: they begin and end within lines.
_SHORTEST = 8 * _LINE
_NAME = "tvm_deconv_stream"
_FENCE = "tvm_deconv_fence"
_FUNCTIONS = f"""
define hidden i32 @{_NAME}(ptr noalias %to, ptr noalias %from, i32 %length) {{
entry:
  %bytes = zext i32 %length to i64
  %address = ptrtoint ptr %to to i64
  %negative = sub i64 0, %address
  %gap = and i64 %negative, {_LINE - 1}
  %short = icmp ult i64 %gap, %bytes
  %head = select i1 %short, i64 %gap, i64 %bytes
  call void @llvm.memcpy.p0.p0.i64(ptr %to, ptr %from, i64 %head, i1 false)
  %left = sub i64 %bytes, %head
  %lines = and i64 %left, -{_LINE}
  %end = add i64 %head, %lines
  %any = icmp ne i64 %lines, 0
  br i1 %any, label %line, label %rest
line:
  %at = phi i64 [ %head, %entry ], [ %next, %line ]
  %source = getelementptr i8, ptr %from, i64 %at
  %place = getelementptr i8, ptr %to, i64 %at
  %value = load <{_LINE // 4} x i32>, ptr %source, align 1
  store <{_LINE // 4} x i32> %value, ptr %place, align {_LINE}, !nontemporal !0
  %next = add i64 %at, {_LINE}
  %more = icmp ult i64 %next, %end
  br i1 %more, label %line, label %rest
rest:
  %last = getelementptr i8, ptr %from, i64 %end
  %behind = getelementptr i8, ptr %to, i64 %end
  %tail = sub i64 %bytes, %end
  call void @llvm.memcpy.p0.p0.i64(ptr %behind, ptr %last, i64 %tail, i1 false)
  ret i32 0
}}
define hidden i32 @{_FENCE}() {{
  call void @llvm.x86.sse.sfence()
  ret i32 0
}}
declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)
declare void @llvm.x86.sse.sfence()
!0 = !{{i32 1}}
"""


def outgrows_caches(problem: Problem) -> bool:
    """Whether the output is more than stays in the caches of a core; not where its size is only known at the call."""
    size = np.dtype(storage_dtype(problem.output_dtype)).itemsize
    return not problem.free and math.prod(problem.output_shape) * size > _SHARE


def streamed(func: PrimFunc) -> PrimFunc:
    """Return `func` with the rows of its stage ``out`` stored past the caches; where those are no copies, as it is."""
    calls: list[Stmt] = []
    body = _streamed(func.body, [], calls)
    return func.with_body(body) if calls else func


def _streamed(stmt: Stmt, nest: Sequence[For], calls: list[Stmt]) -> Stmt:
    """Replace the copy in `stmt`, directly inside of the loops `nest`, and append the calls to `calls`."""
    if isinstance(stmt, SBlockRealize):
        if stmt.block.name_hint == "out":
            row = _row(stmt, nest)
            calls += [row] if row else []
            return row or _around(stmt, nest)
        body = _streamed(stmt.block.body, [], calls)
        if stmt.block.name_hint == "root":
            body = tirx.AttrStmt(tirx.const(0), "pragma_import_llvm", StringImm(_FUNCTIONS), body)
        return _around(with_body(stmt, body), nest)
    if isinstance(stmt, SeqStmt):
        return _around(SeqStmt([_streamed(part, [], calls) for part in stmt.seq]), nest)
    if not isinstance(stmt, For):
        return _around(stmt, nest)
    if stmt.kind == ForKind.PARALLEL:
        # What a task has stored is in memory before another thread hears that the task is done.
        fence = Evaluate(tirx.call_extern("int32", _FENCE))
        return _around(with_body(stmt, SeqStmt([_streamed(stmt.body, [], calls), fence])), nest)
    return _streamed(stmt.body, [*nest, stmt], calls)


def _around(stmt: Stmt, nest: Sequence[For]) -> Stmt:
    for loop in reversed(nest):
        stmt = with_body(loop, stmt)
    return stmt


def _row(realize: SBlockRealize, nest: Sequence[For]) -> Stmt | None:
    """Return the copy of the block `realize` in `nest` with as many inner loops as possible done by one call."""
    store, analyzer = realize.block.body, Analyzer()
    if not (isinstance(store, BufferStore) and isinstance(store.value, TensorLoad)):
        return None
    for loop in nest:
        analyzer.bind(loop.loop_var, Range.from_min_extent(loop.min, loop.extent))
    for variable, value in zip(realize.block.iter_vars, realize.iter_values, strict=True):
        analyzer.bind(variable.var, value)
    places = [
        (buffer, [analyzer.simplify(index) for index in indices])
        for buffer, indices in ((store.buffer, store.indices), (store.value.source, store.value.indices))
    ]
    predicate = analyzer.simplify(realize.predicate)
    for depth in range(len(nest)):
        copy = _contiguous(places, predicate, nest[depth:])
        if copy is not None:
            return _around(copy, nest[:depth])
    return None


def _contiguous(places: Sequence[_Place], predicate: Expr, loops: Sequence[For]) -> Stmt | None:
    """Return the call that copies what `loops` copy between `places`; None where they leave gaps."""
    ranges, first = Analyzer(), Analyzer()
    step: Expr = tirx.const(0, "int64")
    for loop in loops:
        ranges.bind(loop.loop_var, Range.from_min_extent(loop.min, loop.extent))
        first.bind(loop.loop_var, loop.min)
        step = step * loop.extent + (loop.loop_var - loop.min)
    for buffer, indices in places:
        offset = ravel(indices, buffer.shape)
        if not ranges.can_prove_equal(offset - first.simplify(offset), step):
            return None
    size = np.dtype(str(places[0][0].dtype)).itemsize
    if math.prod(int(loop.extent) for loop in loops) * size < _SHORTEST:
        return None
    outer, *inner = loops
    count: Expr = outer.extent
    conditions = []
    for part in _parts(predicate):
        if _fixed(part, first):
            conditions.append(part)
            continue
        # The outermost of the loops may go past the end of the output.
        if not (isinstance(part, tirx.LT) and _fixed(part.b, first)):
            return None
        before = first.simplify(part.a)
        if not ranges.can_prove_equal(part.a - before, outer.loop_var - outer.min):
            return None
        count = tirx.max(tirx.min(count, part.b - before), 0)
    for loop in inner:
        count = count * loop.extent
    regions = []
    starts = []
    for buffer, indices in places:
        start = [first.simplify(index) for index in indices]
        reach = [ranges.simplify(index - at) for index, at in zip(indices, start, strict=True)]
        bounds = [ranges.const_int_bound(distance).max_value for distance in reach]
        extents = [tirx.const(bound + 1, "int64") for bound in bounds]
        spans = [Range.from_min_extent(at, extent) for at, extent in zip(start, extents, strict=True)]
        regions.append(BufferRegion(buffer, spans))
        starts.append(tirx.address_of(BufferLoad(buffer, start)))
    # A block is far smaller than 2 GiB; with 64 bits, narrowing of indices would make it a call of another function.
    length = tirx.Cast("int32", count * size)
    call = Evaluate(tirx.call_extern("int32", _NAME, *starts, length))
    block = SBlock([], [regions[1]], [regions[0]], "out", call)
    return SBlockRealize([], tirx.all(*conditions) if conditions else tirx.const(1, "bool"), block)


def _parts(predicate: Expr) -> list[Expr]:
    if isinstance(predicate, tirx.And):
        return [*_parts(predicate.a), *_parts(predicate.b)]
    return [predicate]


def _fixed(part: Expr, first: Analyzer) -> bool:
    """Whether `part` is the same in all iterations."""
    return bool(tvm_ffi.structural_equal(first.simplify(part), part))
