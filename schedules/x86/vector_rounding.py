"""Rounding of the vectors of the stage ``out`` by a function in LLVM IR, where they come from registers."""

from __future__ import annotations

from tvm import tirx
from tvm.ir import Expr
from tvm.s_tir import SBlock, SBlockRealize
from tvm.tirx import BufferLoad, BufferStore, For, ForKind, PrimFunc, Stmt

from tvm_deconv.schedules.x86.loop_marks import outside_of, rewritten
from tvm_deconv.schedules.x86.stores import Row, Span


def round_vectors(func: PrimFunc, function: str) -> PrimFunc:
    """Return the scheduled `func` with each vectorized loop of its stage ``out`` as one call of `function`."""

    def rounded(stmt: Stmt) -> Stmt | None:
        vectors = isinstance(stmt, For) and stmt.kind == ForKind.VECTORIZED and isinstance(stmt.body, SBlockRealize)
        return _rounded(stmt, function) if vectors and stmt.body.block.name_hint == "out" else None

    return func.with_body(rewritten(func.body, rounded))


def _rounded(loop: For, function: str) -> Stmt:
    """Return the stores of `loop` as the store of a vector that `function` returns."""
    realize, row = loop.body, Row.of([loop])
    block = realize.block
    read = block.reads[0]
    source, target = (
        Span.of(buffer, outside_of(realize, indices), row)
        for buffer, indices in (
            (read.source, [part.min for part in read.region]),
            (block.body.buffer, block.body.indices),
        )
    )

    def vector(span: Span) -> list[Expr]:
        return [*span.first[:-1], tirx.Ramp(span.first[-1], tirx.const(1, "int64"), row.length)]

    value = tirx.call_extern(f"{target.buffer.dtype}x{row.length}", function, BufferLoad(source.buffer, vector(source)))
    store = BufferStore(target.buffer, value, vector(target))
    (predicate,) = outside_of(realize, [realize.predicate])
    predicate = row.first.simplify(predicate)
    return SBlockRealize([], predicate, SBlock([], [source.region], [target.region], block.name_hint, store))
