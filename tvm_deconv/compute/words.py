"""Words: neighbouring input channels in 32 bits, which processors multiply in one instruction.

Both factors of a product are words of as many channels. An instruction multiplies those of a vector of words pairwise,
and adds the products of each word to one accumulator of 32 bits. The last word of a position is filled up with zeros.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from tvm import tirx
from tvm.ir import Expr

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
    """

    name: str
    factors: int
    shift: int = 0
    depth: int = 1

    @property
    def tiled(self) -> bool:
        """True if an instruction multiplies matrices."""
        return self.depth > 1

    @property
    def bits(self) -> int:
        """The bits of a factor."""
        return 32 // self.factors

    def count(self, channels: int) -> int:
        """Return the number of words of `channels` channels."""
        return round_up(ceil_div(channels, self.factors), self.depth)

    def needs_correction(self, problem: Problem) -> bool:
        """Tell whether sums of a problem's words exceed those of its products."""
        return self.shift > 0 or problem.quantization is not None

    def corrected(self, sums: Expr, correction: Expr, zero_point: Expr | None) -> Expr:
        """Return `sums` less their `correction`, one of the packed filter's; the `zero_point` is that of the data."""
        return sums - (correction if zero_point is None else correction * (zero_point + self.shift))

    def filled(self, factor: Expr) -> Expr:
        """Return the word of which each factor is `factor`."""
        pattern = sum(1 << self.bits * number for number in range(self.factors))
        return (factor & tirx.const((1 << self.bits) - 1, WORD)) * tirx.const(pattern, WORD)

    def problem(self, problem: Problem) -> Problem:
        """Return `problem` with words in the place of input channels: its matrix products have that many terms."""
        return problem.replace(in_channels=self.count(problem.in_channels))

    def join(self, factor: Callable[[Expr], Expr], channels: int, word: Expr) -> Expr:
        """Return word number `word` of `channels` channels: `factor` of a channel is its stored element."""
        joined: Expr = tirx.const(0, WORD)
        last = channels % self.factors or self.factors  # factors of the last word
        for number in range(self.factors):
            channel = word * self.factors + number
            value = factor(channel).astype(WORD)
            if number < self.factors - 1:
                value = value & tirx.const((1 << self.bits) - 1, WORD)
            if number >= last:
                value = tirx.if_then_else(channel < channels, value, tirx.const(0, WORD))
            joined = joined | (value << tirx.const(self.bits * number, WORD))
        used = ceil_div(channels, self.factors)
        return tirx.if_then_else(word < used, joined, tirx.const(0, WORD)) if used < self.count(channels) else joined

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
