"""Rows of packed data that end where the block says, as loops without conditions: what is copied, and what is around.

Vectors of conditions take arithmetic of their own, and loads under masks. In `N C *X` rows in parts made FSRCNN 1.43
times as fast, a vocoder's layer 1.14, FlowNetC 1.05, and 28 other layers 1.01 in the mean, 0.95 at least (AVX-512, one
core of a Zen 5 server). One call for each row, as where calls decide the length, took 1.03 of the time.

Without masked loads, which AVX2 has of 32 bits and more, LLVM makes no vectors of such a loop at all. 16 bits and bytes
were copied one by one: depthwise layers whose groups do not fill all blocks of channels spent half of their time so,
and rows of waveforms that are cut into blocks up to 40 %.
"""

from __future__ import annotations

from tvm import tirx
from tvm.ir import Call, Expr
from tvm.s_tir import SBlock, SBlockRealize
from tvm.sym import Analyzer
from tvm.tirx import BufferStore, For, ForKind, IfThenElse, PrimFunc, SeqStmt, Stmt
from tvm_ffi import structural_equal

from tvm_deconv.problem import Problem, element_bytes
from tvm_deconv.schedules.x86.statements import first_block, outside_of, rewritten, rewritten_loops
from tvm_deconv.schedules.x86.stores import Row, Span, all_of
from tvm_deconv.targets import CpuTarget

#: The shortest rows, in elements, that are split: of shorter ones three loops take longer than their conditions.
_SHORTEST = 32


def splits_rows(problem: Problem, target: CpuTarget) -> bool:
    """Tell whether rows of `problem` are split.

    They are in `N C *X`, unless calls decide their length, and everywhere if the target has no masked loads of them.
    """
    unmasked = target.vector_bits < 512 and element_bytes(problem.dtype) < 4
    return unmasked or (problem.data_format == "NCX" and not problem.dynamic_axes)


def split_row_ends(func: PrimFunc) -> PrimFunc:
    """Return the scheduled `func` with rows of the caller's data in parts, if they end where the block says."""
    for stage in ("data_rows", "data_pack"):
        func = rewritten_loops(func, stage, ForKind.SERIAL, _split)
    return func


def cut_last_rows(func: PrimFunc) -> PrimFunc:
    """Return the scheduled `func` with a last row of ``data_pack`` that is not whole in loops of its own.

    Register tiles may read behind the rows of a block. Whole rows are then copied without a condition on that end.
    """
    return func.with_body(rewritten(func.body, _cut))


def _cut(rows: Stmt) -> Stmt | None:
    """Return loops over the whole `rows` of packed data and over the last one, or None if that is whole, too."""
    if not isinstance(rows, For):
        return None
    realize = first_block(rows)
    if realize.block.name_hint != "data_pack" or Row.of([rows]).is_fixed(realize.predicate):
        return None
    last, behind = rows.extent - 1, Analyzer()
    behind.bind(rows.loop_var, last)
    whole = _part(rows.body, tirx.const(1, "bool"), Analyzer())
    kept = For(rows.loop_var, rows.min, last, rows.kind, whole, rows.thread_binding, rows.annotations)
    return SeqStmt([kept, _part(rows.body, behind.simplify(realize.predicate), behind)])


def _part(stmt: Stmt, predicate: Expr, values: Analyzer) -> Stmt:
    """Return nested loops `stmt` with variables of their own, as far as `predicate` holds.

    `values` has those of variables around them.
    """
    if isinstance(stmt, SBlockRealize):
        return SBlockRealize([*map(values.simplify, stmt.iter_values)], tirx.const(1, "bool"), stmt.block)
    row, variable = Row.of([stmt]), tirx.Var(stmt.loop_var.name, "int64")
    limits = row.limits(predicate)
    assert limits is not None
    values.bind(stmt.loop_var, variable)
    body, end = _part(stmt.body, predicate, values), row.ranges.simplify(limits[2])
    return For(variable, stmt.min, end, stmt.kind, body, stmt.thread_binding, stmt.annotations)


def _split(loop: For) -> Stmt | None:
    """Return the parts of `loop`, or None: it is short, or its conditions set no bounds, or constant ones."""
    realize, row = loop.body, Row.of([loop])
    block = realize.block
    if row.length < _SHORTEST:
        return None
    store = block.body
    written = outside_of(realize, [*cases(store.value), *store.indices])
    value, condition, other, *indices = map(row.ranges.simplify, written)
    start = tirx.const(0, "int64")
    data, whole = row.limits(condition), row.limits(realize.predicate)
    if data is None or whole is None or not structural_equal(whole[1], start):
        return None
    conditions, (begin, end) = data[0], map(row.ranges.simplify, data[1:])
    if isinstance(begin, tirx.IntImm) and isinstance(end, tirx.IntImm):
        return None
    exists, length = all_of(whole[0]), row.ranges.simplify(whole[2])
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
        realized = SBlockRealize(values, exists, inner)
        return For(element, start, analyzer.simplify(last - first), ForKind.SERIAL, realized)

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
