"""Rows of packed data that end where the block says, as loops without conditions: what is copied, and what is around.

Without masked loads, which AVX2 has of 32 bits and more, LLVM makes no vectors of a loop that loads under a condition.
16 bits and bytes were copied one by one: depthwise layers whose groups do not fill all blocks of channels spent half of
their time so, and rows of waveforms that are cut into blocks up to 40 %.
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
from tvm_deconv.schedules.x86.statements import outside_of, rewritten_loops
from tvm_deconv.schedules.x86.stores import Row, Span
from tvm_deconv.targets import CpuTarget

#: The shortest rows, in elements, that are split: of shorter ones three loops take longer than their conditions.
_SHORTEST = 32


def loads_unmasked(problem: Problem, target: CpuTarget) -> bool:
    """Tell whether the target has no masked loads of the data of `problem`."""
    return target.vector_bits < 512 and np.dtype(storage_dtype(problem.dtype)).itemsize < 4


def split_row_ends(func: PrimFunc) -> PrimFunc:
    """Return the scheduled `func` with rows of its stage ``data_pack`` in parts, if they end where the block says."""
    return rewritten_loops(func, "data_pack", ForKind.SERIAL, _split)


def _split(loop: For) -> Stmt | None:
    """Return the parts of `loop`, or None: it is short, or its condition sets no bounds, or constant ones."""
    realize, row = loop.body, Row.of([loop])
    block = realize.block
    if row.length < _SHORTEST:
        return None
    store = block.body
    written = outside_of(realize, [*cases(store.value), *store.indices])
    value, condition, other, *indices = map(row.ranges.simplify, written)
    limits = row.limits(condition)
    if limits is None:
        return None
    conditions, (begin, end) = limits[0], map(row.ranges.simplify, limits[1:])
    if isinstance(begin, tirx.IntImm) and isinstance(end, tirx.IntImm):
        return None
    start, length = (tirx.const(number, "int64") for number in (0, row.length))
    begin = tirx.min(begin, length)
    end = tirx.max(tirx.min(end, length), begin)
    region, values = Span.of(store.buffer, indices, row).region, [*map(row.first.simplify, realize.iter_values)]

    def part(first: Expr, last: Expr, written: Expr) -> Stmt:
        element, analyzer = tirx.Var("element", "int64"), Analyzer()
        # From zero on: of nested loops that begin elsewhere, TVM loses where the outer ones do.
        analyzer.bind(loop.loop_var, first + element)
        copy = BufferStore(store.buffer, analyzer.simplify(written), [*map(analyzer.simplify, indices)])
        # With its annotations: they keep rows of a packed array apart in memory.
        inner = SBlock(block.iter_vars, [], [region], block.name_hint, copy, annotations=block.annotations)
        placed = SBlockRealize(values, realize.predicate, inner)
        return For(element, start, analyzer.simplify(last - first), ForKind.SERIAL, placed)

    within = SeqStmt([part(start, begin, other), part(begin, end, value), part(end, length, other)])
    return IfThenElse(tirx.all(*conditions), within, part(start, length, other)) if conditions else within


def cases(value: Expr) -> tuple[Expr, Expr, Expr]:
    """Return `value` where its condition holds, the condition, and `value` elsewhere."""
    if isinstance(value, Call) and value.op.name == "prim.if_then_else":
        condition, inner, other = value.args
        return inner, condition, other
    if isinstance(value, tirx.Cast):
        inner, condition, other = cases(value.value)
        return tirx.Cast(value.ty.dtype, inner), condition, tirx.Cast(value.ty.dtype, other)
    if isinstance(value, tirx.Sub):  # of a zero point
        inner, condition, other = cases(value.a)
        return inner - value.b, condition, other - value.b
    return value, tirx.const(1, "bool"), value
