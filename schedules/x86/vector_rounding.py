"""Rounding of the vectors of the stage ``out`` by a function in LLVM's language, where they come from registers."""

from __future__ import annotations

from tvm import tirx
from tvm.ir import Expr
from tvm.s_tir import SBlock, SBlockRealize
from tvm.sym import Analyzer
from tvm.tirx import AttrStmt, BufferLoad, BufferStore, For, ForKind, PrimFunc, SeqStmt, Stmt

from tvm_deconv.schedules.x86.loop_marks import with_body
from tvm_deconv.schedules.x86.stores import Row, Span


def round_vectors(func: PrimFunc, function: str) -> PrimFunc:
    """Return the scheduled `func` with each vectorized loop of its stage ``out`` as one call of `function`."""
    return func.with_body(_walk(func.body, function))


def _walk(stmt: Stmt, function: str) -> Stmt:
    if isinstance(stmt, SBlockRealize):
        return with_body(stmt, _walk(stmt.block.body, function))
    if isinstance(stmt, SeqStmt):
        return SeqStmt([_walk(part, function) for part in stmt.seq])
    if isinstance(stmt, AttrStmt):
        return AttrStmt(stmt.node, stmt.attr_key, stmt.value, _walk(stmt.body, function))
    if not isinstance(stmt, For):
        return stmt
    inner = stmt.body
    if stmt.kind == ForKind.VECTORIZED and isinstance(inner, SBlockRealize) and inner.block.name_hint == "out":
        return _rounded(stmt, inner, function)
    return with_body(stmt, _walk(inner, function))


def _rounded(loop: For, realize: SBlockRealize, function: str) -> Stmt:
    """Return the stores of `loop`, whose block is `realize`, as the store of a vector that `function` returns."""
    block, analyzer, row = realize.block, Analyzer(), Row.of([loop])
    for variable, value in zip(block.iter_vars, realize.iter_values, strict=True):
        analyzer.bind(variable.var, value)
    read = block.reads[0]
    source, target = (
        Span.of(buffer, [analyzer.simplify(index) for index in indices], row)
        for buffer, indices in (
            (read.source, [part.min for part in read.region]),
            (block.body.buffer, block.body.indices),
        )
    )

    def vector(span: Span) -> list[Expr]:
        return [*span.first[:-1], tirx.Ramp(span.first[-1], tirx.const(1, "int64"), row.length)]

    value = tirx.call_extern(f"{target.buffer.dtype}x{row.length}", function, BufferLoad(source.buffer, vector(source)))
    store = BufferStore(target.buffer, value, vector(target))
    predicate = row.first.simplify(analyzer.simplify(realize.predicate))
    return SBlockRealize([], predicate, SBlock([], [source.region], [target.region], block.name_hint, store))
