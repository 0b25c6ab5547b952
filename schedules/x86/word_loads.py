"""Loads of neighbours in the caller's data as a whole: one for the factors of a word, one for groups in pairs.

LLVM joins the loads of factors only after it has unrolled short loops over them, and then copies word by word, a
twelfth of the time of a layer of 64 channels. Groups in pairs it loads one by one, two fifths of the time of a layer.
"""

from __future__ import annotations

import numpy as np
from tvm import tirx
from tvm.ir import Call, Expr, Range, TensorLoad
from tvm.s_tir import SBlock, SBlockRealize
from tvm.sym import Analyzer
from tvm.tirx import AttrStmt, BufferLoad, BufferRegion, BufferStore, For, IfThenElse, PrimFunc, SeqStmt, Stmt, Var

from tvm_deconv.compute.words import WORD
from tvm_deconv.schedules.x86.loop_marks import with_body


def load_words(func: PrimFunc) -> PrimFunc:
    """Return the scheduled `func` with words of neighbours in the caller's data loaded whole as these are packed."""
    return func.with_body(_walk(func.body))


def load_pairs(func: PrimFunc, lanes: int) -> PrimFunc:
    """Return the scheduled `func` with both vectors, of `lanes` groups in pairs, made of one load of bfloat16.

    The two innermost loops that pack data are those over both vectors and over the lanes of each.
    """
    return func.with_body(_walk(func.body, lanes))


def _walk(stmt: Stmt, pairs: int = 0) -> Stmt:
    if isinstance(stmt, SBlockRealize):
        block, store = stmt.block, stmt.block.body
        if pairs or block.name_hint != "data_pack" or not isinstance(store, BufferStore):
            return with_body(stmt, _walk(block.body, pairs))
        body = BufferStore(store.buffer, _whole(store.value), store.indices)
        signature = block.iter_vars, block.reads, block.writes, block.name_hint
        inner = SBlock(*signature, body, block.init, block.alloc_buffers)
        return SBlockRealize(stmt.iter_values, stmt.predicate, inner)
    if isinstance(stmt, SeqStmt):
        return SeqStmt([_walk(part, pairs) for part in stmt.seq])
    if pairs and isinstance(stmt, For) and isinstance(stmt.body, For):
        packing = stmt.body.body
        if isinstance(packing, SBlockRealize) and packing.block.name_hint == "data_pack":
            return _pair(packing, (stmt.loop_var, stmt.body.loop_var), pairs)
    return with_body(stmt, _walk(stmt.body, pairs)) if isinstance(stmt, (For, AttrStmt)) else stmt


def _pair(packing: SBlockRealize, inner: tuple[Var, Var], lanes: int) -> SBlockRealize:
    """Return the block that packs one element, without its `inner` loops: it packs all of their elements at once."""
    block, store = packing.block, packing.block.body
    condition, value, _ = store.value.args
    (shifted,) = value.args  # the bits of float32, from those of bfloat16
    load, (*outer, lane) = shifted.a.value, store.indices
    *place, group = load.indices
    factors = BufferLoad(load.source, [*place, tirx.Ramp(group, tirx.const(1, "int64"), 2 * lanes)])
    words = tirx.reinterpret(f"uint32x{lanes}", factors)
    even = words << tirx.Broadcast(tirx.const(16, "uint32"), lanes)
    odd = words & tirx.Broadcast(tirx.const(0xFFFF0000, "uint32"), lanes)

    def stores(vectors: list[Expr]) -> Stmt:
        begins = (lane, lane + lanes)
        return SeqStmt(
            [
                BufferStore(store.buffer, vector, [*outer, tirx.Ramp(begin, tirx.const(1, "int64"), lanes)])
                for vector, begin in zip(vectors, begins, strict=True)
            ]
        )

    nothing = tirx.Broadcast(tirx.const(0, "float32"), lanes)
    floats = [tirx.reinterpret(f"float32x{lanes}", bits) for bits in (even, odd)]
    body = IfThenElse(condition, stores(floats), stores([nothing, nothing]))
    (read,), (written,) = block.reads, block.writes
    reads, writes = ([_widened(region, 2 * lanes)] for region in (read, written))
    whole = SBlock(block.iter_vars, reads, writes, block.name_hint, body, block.init, block.alloc_buffers)
    first = Analyzer()
    for variable in inner:
        first.bind(variable, tirx.const(0, "int64"))
    values = [first.simplify(value) for value in packing.iter_values]
    return SBlockRealize(values, packing.predicate, whole)


def _widened(region: BufferRegion, length: int) -> BufferRegion:
    """Return the `region` of one element with `length` of them along the last axis."""
    *outer, last = region.region
    return BufferRegion(region.source, [*outer, Range.from_min_extent(last.min, length)])


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
