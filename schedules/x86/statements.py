"""Statements of TensorIR: search within them, and rewriting of parts, which TVM has no functions for in Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tvm.ir import Expr
from tvm.s_tir import SBlock, SBlockRealize
from tvm.sym import Analyzer
from tvm.tirx import AttrStmt, Evaluate, For, ForKind, IfThenElse, PrimFunc, SeqStmt, Stmt


def with_body(stmt: For | SBlockRealize, body: Stmt) -> Stmt:
    """Return the loop or the realized block `stmt` with another body."""
    if isinstance(stmt, For):
        return For(stmt.loop_var, stmt.min, stmt.extent, stmt.kind, body, stmt.thread_binding, stmt.annotations)
    block = stmt.block
    inner = SBlock(
        block.iter_vars, block.reads, block.writes, block.name_hint, body, block.init,
        block.alloc_buffers, block.match_buffers, block.annotations,
    )  # fmt: skip
    return SBlockRealize(stmt.iter_values, stmt.predicate, inner)


def unmarked(loop: For, mark: str, body: Stmt) -> For:
    """Return the `loop` with another body and without the annotation `mark`."""
    kept = {key: value for key, value in loop.annotations.items() if key != mark}
    return For(loop.loop_var, loop.min, loop.extent, loop.kind, body, loop.thread_binding, kept)


def rewritten(stmt: Stmt, replaced: Callable[[Stmt], Stmt | None]) -> Stmt:
    """Return `stmt` with every statement, from the outside in, for which `replaced` returns another as that."""
    other = replaced(stmt)
    if other is not None:
        return other
    if isinstance(stmt, SeqStmt):
        return SeqStmt([rewritten(part, replaced) for part in stmt.seq])
    if isinstance(stmt, IfThenElse):
        otherwise = stmt.else_case and rewritten(stmt.else_case, replaced)
        return IfThenElse(stmt.condition, rewritten(stmt.then_case, replaced), otherwise)
    if isinstance(stmt, AttrStmt):
        return AttrStmt(stmt.node, stmt.attr_key, stmt.value, rewritten(stmt.body, replaced))
    if isinstance(stmt, SBlockRealize):
        return with_body(stmt, rewritten(stmt.block.body, replaced))
    return with_body(stmt, rewritten(stmt.body, replaced)) if isinstance(stmt, For) else stmt


def rewritten_loops(func: PrimFunc, stage: str, kind: ForKind, replaced: Callable[[For], Stmt | None]) -> PrimFunc:
    """Return the scheduled `func` with the innermost loops of a `stage` as what `replaced` returns; None keeps a loop.

    These are the loops of a `kind` that have nothing but the block of the stage in them.
    """

    def other(stmt: Stmt) -> Stmt | None:
        innermost = isinstance(stmt, For) and stmt.kind == kind and isinstance(stmt.body, SBlockRealize)
        return replaced(stmt) if innermost and stmt.body.block.name_hint == stage else None

    return func.with_body(rewritten(func.body, other))


def loops_and_block(stmt: Stmt) -> tuple[list[For], SBlockRealize]:
    """Return the nested loops that `stmt` is, the outermost first, and the one block in them."""
    loops: list[For] = []
    while isinstance(stmt, For):
        loops.append(stmt)
        stmt = stmt.body
    assert isinstance(stmt, SBlockRealize)
    return loops, stmt


def outside_of(realize: SBlockRealize, values: Sequence[Expr]) -> list[Expr]:
    """Return `values` of the variables of a block as values of the loops around it."""
    analyzer = Analyzer()
    for variable, value in zip(realize.block.iter_vars, realize.iter_values, strict=True):
        analyzer.bind(variable.var, value)
    return [analyzer.simplify(value) for value in values]


def first_block(stmt: Stmt) -> SBlockRealize:
    """Return the block that `stmt` executes first."""
    while not isinstance(stmt, SBlockRealize):
        if isinstance(stmt, SeqStmt):
            stmt = next(part for part in stmt.seq if not isinstance(part, Evaluate))  # those are prefetches
        else:
            stmt = stmt.then_case if isinstance(stmt, IfThenElse) else stmt.body
    return stmt
