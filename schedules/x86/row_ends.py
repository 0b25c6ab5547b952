"""Rows of packed data that end where the block says, as loops without conditions: what is copied, and zeros around it.

Without masked loads, which AVX2 has of 32 bits and more, LLVM makes no vectors of a loop that loads under a condition.
Depthwise layers whose groups do not fill all blocks of channels copied 16 bits and bytes one by one, in half of their
time.
"""

from __future__ import annotations

import numpy as np
from tvm import tirx
from tvm.ir import Call, Expr
from tvm.s_tir import SBlock, SBlockRealize
from tvm.sym import Analyzer
from tvm.tirx import BufferStore, For, ForKind, IfThenElse, PrimFunc, SeqStmt, Stmt

from tvm_deconv.compute.storage import storage_dtype
from tvm_deconv.problem import Problem
from tvm_deconv.schedules.x86.loop_marks import outside_of, rewritten
from tvm_deconv.schedules.x86.stores import Row, Span
from tvm_deconv.targets import CpuTarget


def loads_unmasked(problem: Problem, target: CpuTarget) -> bool:
    """Tell whether the target has no masked loads of the data of `problem`."""
    return target.vector_bits < 512 and np.dtype(storage_dtype(problem.dtype)).itemsize < 4


def split_row_ends(func: PrimFunc) -> PrimFunc:
    """Return the scheduled `func` with rows of its stage ``data_pack`` in parts, if they end where the block says."""

    def split(stmt: Stmt) -> Stmt | None:
        innermost = isinstance(stmt, For) and stmt.kind == ForKind.SERIAL and isinstance(stmt.body, SBlockRealize)
        return _split(stmt) if innermost and stmt.body.block.name_hint == "data_pack" else None

    return func.with_body(rewritten(func.body, split))


def _split(loop: For) -> Stmt | None:
    """Return the parts of `loop`, or None if LLVM knows them: its condition sets no bounds, or constant ones."""
    realize, row = loop.body, Row.of([loop])
    store = realize.block.body
    value, condition, *indices = outside_of(realize, [*_within(store.value), *store.indices])
    limits = row.limits(condition)
    if limits is None or all(isinstance(bound, tirx.IntImm) for bound in limits[1:]):
        return None
    conditions, begin, end = limits
    nothing, length = (tirx.const(number, dtype) for number, dtype in ((0, store.buffer.dtype), (row.length, "int64")))
    start, begin = tirx.const(0, "int64"), tirx.min(begin, length)
    end = tirx.max(tirx.min(end, length), begin)
    region, values = Span.of(store.buffer, indices, row).region, [*map(row.first.simplify, realize.iter_values)]

    def part(first: Expr, last: Expr, written: Expr) -> Stmt:
        element, analyzer = tirx.Var("element", "int64"), Analyzer()
        analyzer.bind(loop.loop_var, element)
        copy = BufferStore(store.buffer, analyzer.simplify(written), [*map(analyzer.simplify, indices)])
        block = SBlock(realize.block.iter_vars, [], [region], realize.block.name_hint, copy)
        block = SBlockRealize(values, realize.predicate, block)
        return For(element, first, analyzer.simplify(last - first), ForKind.SERIAL, block)

    within = SeqStmt([part(start, begin, nothing), part(begin, end, value), part(end, length, nothing)])
    return IfThenElse(tirx.all(*conditions), within, part(start, length, nothing)) if conditions else within


def _within(value: Expr) -> tuple[Expr, Expr]:
    """Return `value` where its condition holds, and the condition."""
    if isinstance(value, Call) and value.op.name == "prim.if_then_else":
        condition, inner, _ = value.args
        return inner, condition
    if isinstance(value, tirx.Cast):
        inner, condition = _within(value.value)
        return tirx.Cast(value.ty.dtype, inner), condition
    if isinstance(value, tirx.Sub):  # of a zero point
        inner, condition = _within(value.a)
        return inner - value.b, condition
    return value, tirx.const(1, "bool")
