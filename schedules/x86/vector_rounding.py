"""Rounding of the vectors of the stage ``out`` by a function in LLVM IR, where they come from registers."""

from __future__ import annotations

from functools import partial

from tvm import tirx
from tvm.ir import Expr
from tvm.s_tir import SBlock, SBlockRealize
from tvm.tirx import BufferLoad, BufferStore, For, ForKind, PrimFunc, Stmt

from tvm_deconv.schedules.x86.statements import outside_of, rewritten_loops
from tvm_deconv.schedules.x86.stores import Row, Span


def round_vectors(func: PrimFunc, function: str) -> PrimFunc:
    """Return the scheduled `func` with each vectorized loop of its stage ``out`` as one call of `function`."""
    return rewritten_loops(func, "out", ForKind.VECTORIZED, partial(_rounded, function))


def _rounded(function: str, loop: For) -> Stmt:
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
