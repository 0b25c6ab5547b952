"""Loads of neighbours in the caller's data as a whole: one for the factors of a word, or for the groups of a pair.

LLVM joins the loads of factors only after it has unrolled short loops over them, and then copies word by word, a
twelfth of the time of a layer of 64 channels. Rows of words are loaded in vectors: where words of one output channel
are transposed, LLVM's own loads took half of the time, and a quarter where pairs of groups are packed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from tvm import tirx
from tvm.ir import Call, Expr, TensorLoad
from tvm.s_tir import SBlock, SBlockRealize
from tvm.sym import Analyzer
from tvm.tirx import BufferLoad, BufferStore, For, ForKind, PrimFunc, Stmt

from tvm_deconv.compute.words import WORD, Words
from tvm_deconv.schedules.x86.register_channels import parts
from tvm_deconv.schedules.x86.register_epilogue import ramp, sequence
from tvm_deconv.schedules.x86.statements import outside_of, rewritten, rewritten_loops, with_body
from tvm_deconv.schedules.x86.stores import Row, Span, all_of


def load_words(func: PrimFunc, words: Words | None, lanes: int) -> PrimFunc:
    """Return the scheduled `func` with words of neighbours in the caller's data loaded whole as these are packed.

    A row of them, which the innermost loop packs, is loaded in vectors of `lanes` and in shorter ones. Words are pairs
    of 16 bits if `words` is None.
    """

    def row(loop: For) -> Stmt | None:
        packed = _Packed.of(loop, words)
        return sequence([*packed.stores(lanes)]) if packed else None

    def word(stmt: Stmt) -> Stmt | None:
        if not isinstance(stmt, SBlockRealize) or stmt.block.name_hint != "data_pack":
            return None
        store = stmt.block.body
        if not isinstance(store, BufferStore):
            return None
        return with_body(stmt, BufferStore(store.buffer, _whole(store.value), store.indices))

    for stage in ("data_rows", "data_pack"):
        func = rewritten_loops(func, stage, ForKind.SERIAL, row)
    return func.with_body(rewritten(func.body, word))


@dataclass(frozen=True)
class _Packed:
    """What the innermost loop packs: a row of so many `words` of neighbours in `data`, and others behind them.

    A word is of so many `factors`, in the order of the data; the result of `borrowing` is packed, if there is one. The
    words exist as a whole or not at all; `nothing` stands where there are none. If `flipped` is not None, these bits of
    all are. Nothing is packed unless `predicate` holds. The variables of the `block` have `values` at the first word.
    """

    block: SBlock
    values: Sequence[Expr]
    predicate: Expr
    data: Span
    target: Span
    length: int
    words: int
    factors: int
    borrowing: Callable[[Expr], Expr] | None
    exists: Expr
    nothing: Expr
    flipped: Expr | None

    @staticmethod
    def of(loop: For, kind: Words | None) -> _Packed | None:
        """Return what `loop` packs, words of `kind` or pairs of 16 bits, or None if that is something else."""
        if not isinstance(loop.extent, tirx.IntImm):
            return None
        realize, row, factors = loop.body, Row.of([loop]), kind.factors if kind else 2
        store = realize.block.body
        predicate, value, *place = outside_of(realize, [realize.predicate, store.value, *store.indices])
        value, flipped = (value.a, value.b) if isinstance(value, tirx.BitwiseXor) else (value, None)
        exists, word, nothing = value.args if isinstance(value, Call) else (tirx.const(True), value, value)
        loads, limits = [load for _, load in _factors(word, 0)], row.limits(exists)
        if limits is None or len(loads) != factors or not all(isinstance(load, TensorLoad) for load in loads):
            return None
        first, *others = (Span.of(load.source, load.indices, row) for load in loads)
        steps = (other.first[-1] - first.first[-1] for other in others)
        follow = all(Analyzer().can_prove_equal(step, number) for number, step in enumerate(steps, 1))
        conditions, (begin, end) = limits[0], map(row.ranges.simplify, limits[1:])
        fixed = isinstance(end, tirx.IntImm) and isinstance(begin, tirx.IntImm) and int(begin) == 0
        if not (follow and fixed and row.is_fixed(predicate)) or first.reach[-1] != factors * (row.length - 1):
            return None
        return _Packed(
            block=realize.block,
            values=[*map(row.first.simplify, realize.iter_values)],
            predicate=predicate,
            data=first,
            target=Span.of(store.buffer, place, row),
            length=row.length,
            words=int(end),
            factors=factors,
            borrowing=kind.borrowing if kind and isinstance(word, tirx.Add) else None,
            exists=all_of(conditions),
            nothing=nothing,
            flipped=flipped,
        )

    @property
    def element_bytes(self) -> int:
        """The bytes of an element of the data."""
        return int(np.dtype(self.data.buffer.dtype).itemsize)

    def stores(self, lanes: int) -> Iterator[Stmt]:
        """Yield the stores of the row in vectors of `lanes`, and of what is left in shorter ones."""
        whole, left = divmod(self.words, lanes)
        if whole > 1:
            number = tirx.Var("number", "int64")
            store = self._store(number * lanes, [lanes])
            yield For(number, tirx.const(0, "int64"), tirx.const(whole, "int64"), ForKind.SERIAL, store)
        elif whole:
            yield self._store(0, [lanes])
        begin, lengths = whole * lanes, [length for _, length in parts(left)]
        if left and begin + lanes <= self.length:
            # Filled up before it is stored: the processor waits for several stores that one load reads.
            yield self._store(begin, lengths, lanes - left)
            begin += lanes
        for length in lengths if begin < self.words else []:
            yield self._store(begin, [length])
            begin += length
        for first, length in parts(self.length - begin):
            yield self._store(begin + first, [], length)

    def _store(self, begin: Expr | int, lengths: Sequence[int], behind: int = 0) -> Stmt:
        """Return the store of a vector from number `begin` on: of words, in parts of `lengths`, and some `behind`."""
        length = sum(lengths) + behind
        pieces = [self._vector(begin + sum(lengths[:number]), count) for number, count in enumerate(lengths)]
        pieces += [_spread(self.nothing, count) for _, count in parts(behind)]
        lanes = [tirx.const(lane, "int32") for lane in range(length)]
        vector = tirx.Shuffle(pieces, lanes) if len(pieces) > 1 else pieces[0]
        if lengths:
            vector = tirx.if_then_else(self.exists, vector, _spread(self.nothing, length))
        if self.flipped is not None:
            vector = vector ^ _spread(self.flipped, length)
        *outer, first = self.target.first
        packed = BufferStore(self.target.buffer, vector, [*outer, ramp(first + begin, length)])
        regions = [self.data.region], [self.target.region]
        block = SBlock(self.block.iter_vars, *regions, self.block.name_hint, packed, annotations=self.block.annotations)
        return SBlockRealize(self.values, self.predicate, block)

    def _vector(self, begin: Expr | int, length: int) -> Expr:
        """Return the vector of `length` words from number `begin` on, of elements as they are stored."""
        (*outer, first), count = self.data.first, length * self.factors
        elements: Expr = BufferLoad(self.data.buffer, [*outer, ramp(first + begin * self.factors, count)])
        if self.element_bytes * self.factors < np.dtype(WORD).itemsize:
            elements = elements.astype(f"int16x{count}")
        vector = tirx.reinterpret(f"{WORD}x{length}" if length > 1 else WORD, elements)
        return self.borrowing(vector) if self.borrowing else vector


def _spread(value: Expr, lanes: int) -> Expr:
    """Return the vector of `lanes` in which each is `value`, or that itself."""
    return tirx.Broadcast(value, lanes) if lanes > 1 else value


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
