"""Words: neighbouring input channels in 32 bits, which processors multiply in one instruction.

Both factors of a product are words of as many channels. An instruction multiplies those of a vector of words pairwise,
and adds the products of each word to one accumulator of 32 bits. The last word of a position is filled up with zeros.

Words of bfloat16 also multiply types with more bits, in `parts`. The first part of a factor is the factor rounded to
bfloat16, the second what that leaves, rounded again, and so on; three parts are all 24 bits of a float32. A product is
the sum of the products of parts. Those below the last bit are left out: of three parts by three, six are computed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeGuard, TypeVar

from tvm import te, tirx
from tvm.ir import Expr

from tvm_deconv.compute.extents import reduce_axis, shape_of
from tvm_deconv.problem import Problem
from tvm_deconv.problem.arithmetic import ceil_div, round_up

#: The type of a word, whatever is in it.
WORD = "int32"

PlanT = TypeVar("PlanT")
Plans = Sequence[tuple[float, PlanT]]  # with their costs by product


@dataclass(frozen=True, slots=True)
class Words:
    """Words of `factors` channels; `name` is that of the function that multiplies them.

    A `shift` is added to the data as they are packed, also where there are none. It makes signed factors unsigned,
    which some instructions want, and adds to each sum the same constant: the shift times the sum of its filter. The
    zero point of quantized data is such a shift, too: words hold stored integers, and the zero point stands where there
    are no data.

    An instruction multiplies matrices if their `depth`, the words of a row that it takes, is more than 1. A position
    then has a multiple of as many words, the last of them zeros.

    Pairs of integers that are added before they are multiplied are numbers of two digits: a negative first factor
    `borrows` from the second, so that a sum of words is the word of the sums. Instructions take `settled` words.

    Factors may be cut into `parts`, for products of matrices alone. There are `depth` words of each part, one part
    after the other, and the channels of a word are `depth` apart.
    """

    name: str
    factors: int
    shift: int = 0
    depth: int = 1
    parts: int = 1
    borrows: bool = False

    @property
    def cut(self) -> bool:
        """True if factors have several parts."""
        return self.parts > 1

    @property
    def bits(self) -> int:
        """The bits of a factor."""
        return 32 // self.factors

    @property
    def products(self) -> list[tuple[int, int]]:
        """The parts of either factor whose products are computed, in the order in which they are added up."""
        return [(one, other) for other in range(self.parts) for one in range(self.parts - other)]

    @property
    def uses(self) -> float:
        """The products that a word takes part in, with another one of a position or a column."""
        return len(self.products) / self.parts

    def count(self, channels: int) -> int:
        """Return the number of words of `channels` channels."""
        return self.parts * round_up(ceil_div(channels, self.factors), self.depth)

    def factors_of(self, count: int) -> int:
        """Return the channels of `count` words, in whole steps of an instruction."""
        return ceil_div(count, self.parts * self.depth) * self.depth * self.factors

    def reduction(self, count: int) -> tuple[list[te.IterVar], tuple[Expr, Expr]]:
        """Return the axes of a sum over `count` words, and the step of either factor at them.

        An instruction multiplies a step of `depth` words, which the last axis counts. Axes before it count steps and,
        if there are several, products of parts.
        """
        step, word = (
            reduce_axis(extent, name)
            for extent, name in ((count // (self.parts * self.depth), "ci"), (self.depth, "word"))
        )
        if not self.cut:
            return [step, word], (step.var, step.var)
        product = reduce_axis(len(self.products), "product")
        one, other = (step.var * self.parts + _chosen(parts, product.var) for parts in zip(*self.products, strict=True))
        return [step, product, word], (one, other)

    def needs_correction(self, problem: Problem) -> bool:
        """Tell whether sums of a problem's words exceed those of its products."""
        return self.shift > 0 or problem.quantization is not None

    def corrected(self, sums: Expr, correction: Expr, zero_point: Expr | None) -> Expr:
        """Return `sums` less their `correction`, one of the packed filter's; the `zero_point` is that of the data."""
        return sums - (correction if zero_point is None else correction * (zero_point + self.shift))

    def filled(self, factor: Expr) -> Expr:
        """Return the word of which each factor is `factor`."""
        pattern = sum(1 << self.bits * number for number in range(self.factors))
        if self.borrows:
            return factor * tirx.const(pattern, WORD)
        return (factor & tirx.const((1 << self.bits) - 1, WORD)) * tirx.const(pattern, WORD)

    def problem(self, problem: Problem) -> Problem:
        """Return `problem` with words in the place of input channels: its matrix products have that many terms."""
        return problem.replace(in_channels=self.count(problem.in_channels))

    def join(self, factor: Callable[[Expr], Expr], channels: int, word: Expr) -> Expr:
        """Return word number `word` of `channels` channels: `factor` of a channel is its stored element.

        Of words in parts it is a float32 of the same value.
        """
        if self.cut:
            return self._join_parts(factor, channels, word)
        joined: Expr = tirx.const(0, WORD)
        last = channels % self.factors or self.factors  # factors of the last word
        for number in range(self.factors):
            channel = word * self.factors + number
            value = factor(channel).astype(WORD)
            if number < self.factors - 1 and not self.borrows:
                value = value & tirx.const((1 << self.bits) - 1, WORD)
            if number >= last:
                value = tirx.if_then_else(channel < channels, value, tirx.const(0, WORD))
            value = value << tirx.const(self.bits * number, WORD)
            joined = joined + value if self.borrows else joined | value
        used = ceil_div(channels, self.factors)
        return tirx.if_then_else(word < used, joined, tirx.const(0, WORD)) if used < self.count(channels) else joined

    def settled(self, word: Expr) -> Expr:
        """Return a pair whose first factor borrows as the bits of both: the second gets back what it lent."""
        return word + self._lent(word)

    def borrowing(self, word: Expr) -> Expr:
        """Return the pair that a `settled` word, or a vector of them, is of."""
        return word - self._lent(word)

    def _lent(self, word: Expr) -> Expr:
        """Return what the second factor of a pair lends to a negative first one: one of its units, within the word."""
        return (word & tirx.const(1 << self.bits - 1, WORD)) << tirx.const(1, WORD)

    def _join_parts(self, factor: Callable[[Expr], Expr], channels: int, word: Expr) -> Expr:
        step, place = word // (self.depth * self.parts), word % self.depth
        joined: Expr = tirx.const(0, "uint32")
        for number in range(self.factors):
            channel = (step * self.factors + number) * self.depth + place
            bits = self._part(factor(channel), word // self.depth % self.parts)
            if channels % (self.factors * self.depth):
                bits = tirx.if_then_else(channel < channels, bits, tirx.const(0, "uint32"))
            joined = joined | (bits << tirx.const(self.bits * number, "uint32"))
        return tirx.reinterpret(WORD, joined)

    def _part(self, factor: Expr, part: Expr) -> Expr:
        """Return the bits of a `part` of a float32.

        Earlier parts are rounded to the nearest, ties away from zero, and the last is cut off, so NaN stays NaN there:
        so does what an infinity leaves.
        """
        parts: list[Expr] = []
        for number in range(self.parts):
            bits = tirx.reinterpret("uint32", factor)
            if number < self.parts - 1:
                # The bound keeps NaN from becoming a number, and changes nothing else.
                bits = tirx.min(bits, tirx.const(0xFFFF7FFF, "uint32")) + tirx.const(0x8000, "uint32")
                bits = bits & tirx.const(0xFFFF0000, "uint32")
                factor = factor - tirx.reinterpret("float32", bits)
            parts.append(bits >> tirx.const(16, "uint32"))
        return _chosen(parts, part)

    def shifted(self, word: Expr) -> Expr:
        """Return a word of data with the shift added to its factors: half of their range, the sign's bit."""
        if not self.shift:
            return word
        pattern = sum(self.shift << self.bits * number for number in range(self.factors))
        return word ^ tirx.const(pattern - (1 << 32), WORD)

    def multiply(self, one: Expr, of_vector: Expr, accumulator: str) -> Expr:
        """Return the sum of the products of two words, as a call that a schedule replaces by the instruction.

        The instruction multiplies `one` word by each of a vector. Bytes of the first are unsigned.
        """
        return tirx.call_pure_extern(accumulator, self.name, one, of_vector)


def tiled(words: Words | None) -> TypeGuard[Words]:
    """Tell whether factors are in words, of which an instruction multiplies matrices."""
    return words is not None and words.depth > 1


def _chosen(choices: Sequence[Expr | int], number: Expr) -> Expr:
    """Return choice number `number`; integers are indices."""
    *others, chosen = (tirx.const(choice, "int64") if isinstance(choice, int) else choice for choice in choices)
    for place, choice in reversed(list(enumerate(others))):
        chosen = tirx.Select(number == place, choice, chosen)
    return chosen


def cut_channels(elements: te.Tensor, words: Words, axis: int, name: str, positions: int | None = None) -> te.Tensor:
    """Return the stage `name`: `elements`, whose `axis` are input channels, as the words of their parts.

    The last axis has so many `positions` if given.
    """
    shape, channels = [*elements.shape], int(elements.shape[axis])
    shape[axis] = words.count(channels)
    if positions is not None:
        shape[-1] = positions

    def word(*index: Expr) -> Expr:
        def element(channel: Expr) -> Expr:
            place = [*index]
            place[axis] = channel
            value: Expr = elements[tuple(place)]
            return value

        return words.join(element, channels, index[axis])

    return te.compute(shape_of(shape), word, name)


def corrections_of(counts: Iterable[int], begin: int) -> list[int]:
    """Return where the corrections of each section begin in the packed filter, from `begin` on, and where the last end.

    A section has as many as `counts`. Each is what sums exceed those of their products by, divided by the shift of the
    data if that is known to a call alone.
    """
    return list(itertools.accumulate(counts, initial=begin))


def plans_in_words(
    problem: Problem, words: Words | None, plans: Callable[[Problem], Plans[PlanT]], cost: float = 1.0
) -> Plans[PlanT]:
    """Return the `plans` for a problem, or for its `words` if there are some: each of these makes several products.

    `cost` is the time of an instruction that multiplies words, relative to a multiply-add of single elements.
    """
    if words is None:
        return plans(problem)
    share = cost * words.count(problem.in_channels) / problem.in_channels
    return [(whole * share, plan) for whole, plan in plans(words.problem(problem))]
