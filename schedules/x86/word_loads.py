"""Loads of neighbours in the caller's data as a whole: one for the factors of a word, or for the groups of a pair.

LLVM joins the loads of factors only after it has unrolled short loops over them, and then copies word by word, a
twelfth of the time of a layer of 64 channels.
"""

from __future__ import annotations

import numpy as np
from tvm import tirx
from tvm.ir import Call, Expr, TensorLoad
from tvm.s_tir import SBlockRealize
from tvm.sym import Analyzer
from tvm.tirx import BufferLoad, BufferStore, PrimFunc, Stmt

from tvm_deconv.compute.words import WORD
from tvm_deconv.schedules.x86.loop_marks import rewritten, with_body


def load_words(func: PrimFunc) -> PrimFunc:
    """Return the scheduled `func` with words of neighbours in the caller's data loaded whole as these are packed."""

    def loaded(stmt: Stmt) -> Stmt | None:
        if not isinstance(stmt, SBlockRealize) or stmt.block.name_hint != "data_pack":
            return None
        store = stmt.block.body
        if not isinstance(store, BufferStore):
            return None
        return with_body(stmt, BufferStore(store.buffer, _whole(store.value), store.indices))

    return func.with_body(rewritten(func.body, loaded))


def _whole(value: Expr) -> Expr:
    """Return `value` with its word, if it is one, loaded whole; it may be conditional, and some bits of it flipped."""
    if isinstance(value, tirx.BitwiseXor):
        return _whole(value.a) ^ value.b
    if isinstance(value, Call) and value.op.name == "prim.if_then_else":
        condition, word, nothing = value.args
        return tirx.if_then_else(condition, _whole(word), nothing)
    factors, analyzer = _factors(value, 0), Analyzer()
    loads = [load for _, load in factors]
    if len(factors) < 2 or not all(isinstance(load, TensorLoad) for load in loads):
        return value
    first, bits = loads[0], 32 // len(factors)
    for number, (shift, load) in enumerate(factors):
        neighbours = analyzer.can_prove_equal(load.indices[-1] - first.indices[-1], number)
        if not neighbours or shift != bits * number or np.dtype(str(load.ty.dtype)).itemsize * 8 != bits:
            return value
    lanes = tirx.Ramp(first.indices[-1], tirx.const(1, "int64"), len(factors))
    return tirx.reinterpret(WORD, BufferLoad(first.source, [*first.indices[:-1], lanes]))


def _factors(value: Expr, shift: int) -> list[tuple[int, Expr]]:
    """Return what the bits of a word are joined from, each with the place of its lowest bit."""
    if isinstance(value, tirx.BitwiseOr):
        return [*_factors(value.a, shift), *_factors(value.b, shift)]
    if isinstance(value, tirx.LShift):
        return _factors(value.a, shift + int(value.b))
    if isinstance(value, tirx.BitwiseAnd):
        return _factors(value.a, shift)
    if isinstance(value, tirx.Cast):
        return [(shift, value.value)]
    zero = isinstance(value, tirx.IntImm) and int(value) == 0
    return [] if zero else [(shift, value)]
