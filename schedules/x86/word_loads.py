"""Loads of neighbours in the caller's data as a whole: one for the factors of a word, or for the groups of a pair.

LLVM joins the loads of factors only after it has unrolled short loops over them, and then copies word by word, a
twelfth of the time of a layer of 64 channels.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from tvm import tirx
from tvm.ir import Call, Expr, TensorLoad
from tvm.s_tir import SBlock, SBlockRealize
from tvm.sym import Analyzer
from tvm.tirx import BufferLoad, BufferStore, For, ForKind, PrimFunc, Stmt

from tvm_deconv.compute.words import WORD, Words
from tvm_deconv.schedules.x86.statements import outside_of, rewritten, rewritten_loops, with_body
from tvm_deconv.schedules.x86.stores import Row, Span


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


def load_pairs(func: PrimFunc, words: Words) -> PrimFunc:
    """Return the scheduled `func` with vectors of `words`, if these are pairs of the caller's bytes, widened at once.

    A vector is what the innermost loop packs, of neighbours. It must exist as a whole or not at all.
    """
    if words.factors != 2 or words.cut:
        return func
    return rewritten_loops(func, "data_pack", ForKind.SERIAL, partial(_widened, words))


def _widened(words: Words, loop: For) -> Stmt | None:
    realize, row, one = loop.body, Row.of([loop]), tirx.const(1, "int64")
    store = realize.block.body
    value, *place = outside_of(realize, [store.value, *store.indices])
    exists, word, nothing = value.args if isinstance(value, Call) else (tirx.const(True), value, value)
    loads = [load for _, load in _factors(word, 0) if isinstance(load, TensorLoad)]
    if len(loads) != words.factors or not row.is_fixed(exists) or np.dtype(str(loads[0].ty.dtype)).itemsize > 1:
        return None
    first, second = (Span.of(load.source, load.indices, row) for load in loads)
    neighbours = Analyzer().can_prove_equal(second.first[-1] - first.first[-1], 1)
    if not neighbours or first.reach[-1] != 2 * (row.length - 1):
        return None
    lanes = tirx.Ramp(first.first[-1], one, 2 * row.length)
    pairs = BufferLoad(first.buffer, [*first.first[:-1], lanes]).astype(f"int16x{2 * row.length}")
    vector = tirx.reinterpret(f"{WORD}x{row.length}", pairs)
    if isinstance(word, tirx.Add):
        vector = words.borrowing(vector)
    vector = tirx.if_then_else(exists, vector, tirx.Broadcast(nothing, row.length))
    target = Span.of(store.buffer, place, row)
    packed = BufferStore(store.buffer, vector, [*target.first[:-1], tirx.Ramp(target.first[-1], one, row.length)])
    regions = [first.region], [target.region]
    return SBlockRealize([], tirx.const(True), SBlock([], *regions, realize.block.name_hint, packed))


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
    if isinstance(value, tirx.BitwiseOr | tirx.Add):
        return [*_factors(value.a, shift), *_factors(value.b, shift)]
    if isinstance(value, tirx.LShift):
        return _factors(value.a, shift + int(value.b))
    if isinstance(value, tirx.BitwiseAnd):
        return _factors(value.a, shift)
    if isinstance(value, tirx.Cast):
        return [(shift, value.value)]
    zero = isinstance(value, tirx.IntImm) and int(value) == 0
    return [] if zero else [(shift, value)]
