"""Copies into the output by one call a row: past the caches, or to where the call's output ends.

A store to a line that is not in a cache reads the line first, and drives out what a task still needs.  Where an output
is larger than a core's share of the caches, the copy of finished rows into it goes by non-temporal stores of whole
lines, which nothing reads before.  Measured on one core of a Zen 4 server, rows of 2 KiB copied into 64 MiB: 6 GB/s
with ordinary stores, 28 GB/s with these; a layer that does little else (16 to 20 channels, kernel = stride = 2, 42 MB
of output) is 1.45 times as fast.  Where products take most of the time, ordinary stores hide behind them, and the gain
is a few per cent.

TVM has no such store.  `lower_streaming_stores` replaces the loops of the stage ``out`` by calls of a function in LLVM
IR that the code generator takes into the module.  It takes any address and length: what lies before the first and after
the last whole line of a row is stored as usual.

Where an extent is dynamic, a row ends where the call says.  A loop that asks so of each element becomes scattered
stores under masks, two thirds of the time of a call with few positions; `lower_row_copies` has the rows
copied by their length instead.  So it takes rows of the data, with zeros around them: by whole vectors, and masked ones
at both ends of the data.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from tvm import tirx
from tvm.ir import Call, Expr, Range, StringImm, TensorLoad
from tvm.s_tir import SBlock, SBlockRealize
from tvm.sym import Analyzer
from tvm.tirx import Buffer, BufferLoad, BufferRegion, BufferStore, Evaluate, For, ForKind, PrimFunc, SeqStmt, Stmt
from tvm_deconv.schedules.x86.loop_marks import with_body
from tvm_ffi import structural_equal

from tvm_deconv.compute.indexing import ravel
from tvm_deconv.compute.storage import storage_dtype
from tvm_deconv.problem import Problem

_Place: TypeAlias = tuple[Buffer, list[Expr]]

#: A core's share of all caches, in bytes, of current servers: 1.5 to 4 MiB.
_SHARE = 4 << 20
_LINE = 64
#: The stages that take rows of the data, with zeros around them.
_PACKED = ("data_rows", "data_pack")
#: Shorter rows, in bytes, are not worth it: they begin and end within lines.
_SHORTEST = 8 * _LINE
_STREAM = "tvm_deconv_stream"
_FENCE = "tvm_deconv_fence"
_COPY = "tvm_deconv_copy"
_ROW = "tvm_deconv_row"
_STREAM_FUNCTIONS = f"""
define hidden i32 @{_STREAM}(ptr noalias %to, ptr noalias %from, i32 %length) {{
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
_LANES = f"<{', '.join(f'i32 {4 * lane}' for lane in range(16))}>"
_COPY_FUNCTIONS = f"""
define hidden i32 @{_COPY}(ptr noalias %to, ptr noalias %from, i32 %length) {{
  %bytes = zext i32 %length to i64
  call void @llvm.memcpy.p0.p0.i64(ptr %to, ptr %from, i64 %bytes, i1 false)
  ret i32 0
}}
define hidden i32 @{_ROW}(ptr noalias %to, ptr %last, ptr noalias %from, i32 %zeros, i32 %length, i32 %size) {{
entry:
  %first = ptrtoint ptr %to to i64
  %final = ptrtoint ptr %last to i64
  %distance = sub i64 %final, %first
  %short = trunc i64 %distance to i32
  %whole = add i32 %short, %size
  %end = add i32 %zeros, %length
  %before = zext i32 %zeros to i64
  %back = sub i64 0, %before
  %origin = getelementptr i8, ptr %from, i64 %back
  %wholes.0 = insertelement <16 x i32> poison, i32 %whole, i32 0
  %wholes = shufflevector <16 x i32> %wholes.0, <16 x i32> poison, <16 x i32> zeroinitializer
  %begins.0 = insertelement <16 x i32> poison, i32 %zeros, i32 0
  %begins = shufflevector <16 x i32> %begins.0, <16 x i32> poison, <16 x i32> zeroinitializer
  %ends.0 = insertelement <16 x i32> poison, i32 %end, i32 0
  %ends = shufflevector <16 x i32> %ends.0, <16 x i32> poison, <16 x i32> zeroinitializer
  br label %line
line:
  %at = phi i32 [ 0, %entry ], [ %next, %stored ]
  %next = add i32 %at, {_LINE}
  %offset = zext i32 %at to i64
  %place = getelementptr i8, ptr %to, i64 %offset
  %source = getelementptr i8, ptr %origin, i64 %offset
  %begun = icmp uge i32 %at, %zeros
  %fits = icmp ule i32 %next, %end
  %inside = and i1 %begun, %fits
  br i1 %inside, label %copy, label %edge
copy:
  %value = load <16 x i32>, ptr %source, align 1
  store <16 x i32> %value, ptr %place, align 1
  br label %stored
edge:
  %number.0 = insertelement <16 x i32> poison, i32 %at, i32 0
  %number = shufflevector <16 x i32> %number.0, <16 x i32> poison, <16 x i32> zeroinitializer
  %lanes = add <16 x i32> %number, {_LANES}
  %exists = icmp ult <16 x i32> %lanes, %wholes
  %after = icmp uge <16 x i32> %lanes, %begins
  %ahead = icmp ult <16 x i32> %lanes, %ends
  %taken = and <16 x i1> %after, %ahead
  %open = icmp ult i32 %at, %end
  %reached = icmp ugt i32 %next, %zeros
  %some = and i1 %open, %reached
  br i1 %some, label %part, label %store
part:
  %loaded = call <16 x i32> @llvm.masked.load.v16i32.p0(
    ptr %source, i32 1, <16 x i1> %taken, <16 x i32> zeroinitializer)
  br label %store
store:
  %left = phi <16 x i32> [ %loaded, %part ], [ zeroinitializer, %edge ]
  call void @llvm.masked.store.v16i32.p0(<16 x i32> %left, ptr %place, i32 1, <16 x i1> %exists)
  br label %stored
stored:
  %more = icmp ult i32 %next, %whole
  br i1 %more, label %line, label %done
done:
  ret i32 0
}}
declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)
declare <16 x i32> @llvm.masked.load.v16i32.p0(ptr, i32, <16 x i1>, <16 x i32>)
declare void @llvm.masked.store.v16i32.p0(<16 x i32>, ptr, i32, <16 x i1>)
"""


def outgrows_caches(problem: Problem) -> bool:
    """Whether the output is more than stays in the caches of a core; not where its size is only known at the call."""
    size = np.dtype(storage_dtype(problem.output_dtype)).itemsize
    return not problem.dynamic and math.prod(problem.output_shape) * size > _SHARE


@dataclass(frozen=True, slots=True)
class _Calls:
    """Calls of functions in place of copies.

    `copy` is for rows of the stage ``out``, `row` for those of the data, packed with zeros, if it is not empty;
    `shortest` are the bytes that are worth a call; `fence`, if it is not empty, ends each task.
    """

    functions: str
    shortest: int
    copy: str
    row: str = ""
    fence: str = ""
    made: list[Stmt] = field(default_factory=list)


def lower_streaming_stores(func: PrimFunc, functions: str = "") -> PrimFunc:
    """Return `func` with the rows of its stage ``out`` stored past the caches; where those are no copies, as it is.

    If it has such stores already, they are calls of these `functions`.
    """
    return _lower_copies(func, _Calls(_STREAM_FUNCTIONS + functions, _SHORTEST, _STREAM, fence=_FENCE), bool(functions))


def lower_row_copies(func: PrimFunc) -> PrimFunc:
    """Return `func` with rows of data and of the output copied up to their ends; as it is where there are none."""
    return _lower_copies(func, _Calls(_COPY_FUNCTIONS, _LINE, _COPY, row=_ROW))


def _lower_copies(func: PrimFunc, calls: _Calls, always: bool = False) -> PrimFunc:
    body = _copies(func.body, [], calls)
    return func.with_body(body) if calls.made or always else func


def _copies(stmt: Stmt, nest: Sequence[For], calls: _Calls) -> Stmt:
    """Replace the copies in `stmt`, directly inside of the loops `nest`, by calls."""
    if isinstance(stmt, SBlockRealize):
        row = _row(stmt, nest, calls)
        if row is not None:
            calls.made.append(row)
            return row
        body = _copies(stmt.block.body, [], calls)
        if stmt.block.name_hint == "root":
            body = tirx.AttrStmt(tirx.const(0), "pragma_import_llvm", StringImm(calls.functions), body)
        return _around(with_body(stmt, body), nest)
    if isinstance(stmt, SeqStmt):
        return _around(SeqStmt([_copies(part, [], calls) for part in stmt.seq]), nest)
    if not isinstance(stmt, For):
        return _around(stmt, nest)
    if calls.fence and stmt.kind == ForKind.PARALLEL:
        # What a task has stored is in memory before another thread hears that the task is done.
        fence = Evaluate(tirx.call_extern("int32", calls.fence))
        return _around(with_body(stmt, SeqStmt([_copies(stmt.body, [], calls), fence])), nest)
    return _copies(stmt.body, [*nest, stmt], calls)


def _around(stmt: Stmt, nest: Sequence[For]) -> Stmt:
    for loop in reversed(nest):
        stmt = with_body(loop, stmt)
    return stmt


def _taken(realize: SBlockRealize, calls: _Calls) -> tuple[TensorLoad, Expr] | None:
    """Return what the block `realize` copies, and where it does; None where it is no copy that `calls` are for."""
    store, inside = realize.block.body, realize.predicate
    value = store.value if isinstance(store, BufferStore) else None
    if realize.block.name_hint in _PACKED and calls.row:
        if not (isinstance(value, Call) and value.op.name == "prim.if_then_else"):
            return None
        if not structural_equal(inside, tirx.const(1, "bool")):
            return None
        inside, value, _ = value.args
    elif realize.block.name_hint != "out":
        return None
    return (value, inside) if isinstance(value, TensorLoad) else None


def _row(realize: SBlockRealize, nest: Sequence[For], calls: _Calls) -> Stmt | None:
    """Return the copy of the block `realize` in `nest` with as many inner loops as possible done by one call."""
    store, analyzer = realize.block.body, Analyzer()
    found = _taken(realize, calls)
    if found is None:
        return None
    load, inside = found
    for loop in nest:
        analyzer.bind(loop.loop_var, Range.from_min_extent(loop.min, loop.extent))
    for variable, value in zip(realize.block.iter_vars, realize.iter_values, strict=True):
        analyzer.bind(variable.var, value)
    places = [
        (buffer, [analyzer.simplify(index) for index in indices])
        for buffer, indices in ((store.buffer, store.indices), (load.source, load.indices))
    ]
    inside = analyzer.simplify(inside)
    for depth in range(len(nest)):
        copy = _contiguous(realize, places, inside, nest[depth:], calls)
        if copy is not None:
            return _around(copy, nest[:depth])
    return None


def _contiguous(
    realize: SBlockRealize, places: Sequence[_Place], inside: Expr, loops: Sequence[For], calls: _Calls
) -> Stmt | None:
    """Return the call that copies what `loops` copy between `places`, where `inside`; None where they leave gaps."""
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
    total = math.prod(int(loop.extent) for loop in loops)
    if total * size < calls.shortest:
        return None
    begin, end = tirx.const(0, "int64"), tirx.const(total, "int64")
    conditions = []
    for part in _parts(inside):
        if _fixed(part, first):
            conditions.append(part)
            continue
        # What goes past an end of an array: elements, or iterations of the outermost loop.
        if not isinstance(part, (tirx.LT, tirx.LE)):
            return None
        upper, exclusive = not _fixed(part.a, first), int(isinstance(part, tirx.LT))
        moving, bound = (part.a, part.b) if upper else (part.b, part.a)
        if not _fixed(bound, first):
            return None
        start = first.simplify(moving)
        if ranges.can_prove_equal(moving - start, loops[0].loop_var - loops[0].min):
            unit = total // int(loops[0].extent)
        elif ranges.can_prove_equal(moving - start, step):
            unit = 1
        else:
            return None
        if upper:
            end = tirx.min(end, (bound - start + (1 - exclusive)) * unit)
        else:
            begin = tirx.max(begin, (bound - start + exclusive) * unit)
    count = tirx.max(end - begin, 0)
    everywhere = tirx.all(*conditions) if conditions else tirx.const(1, "bool")
    zeros = realize.block.name_hint in _PACKED
    if zeros:
        count = tirx.Select(everywhere, count, tirx.const(0, "int64")) if conditions else count
        begin = tirx.min(begin, total - count)
    elif not structural_equal(begin, tirx.const(0, "int64")):
        return None
    regions = []
    starts = []
    for (buffer, indices), skipped in zip(places, (0, begin if zeros else 0), strict=True):
        start = [first.simplify(index) for index in indices]
        reach = [ranges.simplify(index - at) for index, at in zip(indices, start, strict=True)]
        bounds = [ranges.const_int_bound(distance).max_value for distance in reach]
        extents = [tirx.const(bound + 1, "int64") for bound in bounds]
        spans = [Range.from_min_extent(at, extent) for at, extent in zip(start, extents, strict=True)]
        regions.append(BufferRegion(buffer, spans))
        starts.append(tirx.address_of(BufferLoad(buffer, [*start[:-1], start[-1] + skipped])))
        if zeros and buffer.same_as(places[0][0]):
            # Said by its address as well: TVM shrinks a stage to what it sees taken from it and left there.
            last = [at + bound for at, bound in zip(start, bounds, strict=True)]
            starts.append(tirx.address_of(BufferLoad(buffer, last)))
    # A block is far smaller than 2 GiB; with 64 bits, narrowing of indices would make it a call of another function.
    numbers = [tirx.Cast("int32", length * size) for length in ([begin, count] if zeros else [count])]
    numbers += [tirx.const(size, "int32")] if zeros else []
    call = tirx.call_extern("int32", calls.row if zeros else calls.copy, *starts, *numbers)
    block = realize.block
    inner = SBlock(block.iter_vars, [regions[1]], [regions[0]], block.name_hint, Evaluate(call))
    values = [first.simplify(value) for value in realize.iter_values]
    return SBlockRealize(values, tirx.const(1, "bool") if zeros else everywhere, inner)


def _parts(predicate: Expr) -> list[Expr]:
    if isinstance(predicate, tirx.And):
        return [*_parts(predicate.a), *_parts(predicate.b)]
    return [predicate]


def _fixed(part: Expr, first: Analyzer) -> bool:
    """Whether `part` is the same in all iterations."""
    return bool(structural_equal(first.simplify(part), part))
