"""Vectors of accumulators, whole registers or halves of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from tvm_deconv.compute.words import Words, tiled
from tvm_deconv.problem import Problem
from tvm_deconv.problem.arithmetic import round_up
from tvm_deconv.schedules.x86 import matrix_tiles, tiles
from tvm_deconv.schedules.x86.ranking import Ranking
from tvm_deconv.targets import CpuTarget

_AnyPlan = TypeVar("_AnyPlan", tiles.Plan, matrix_tiles.MatrixPlan)

#: Half vectors are tried if padding to whole ones wastes more than 10 %, and halves would not waste about as much.
_LEAST_PADDING, _MOST_PADDING = 1.1, 4.0
#: The cost of a product in half a vector: between 1, if vectors of 512 bits are computed in halves, and 2.
_HALF_COST = 1.4
#: The same where lanes are added up, and the processor multiplies either width at the same rate.
_ADDED_COST = 1.15
_ELEMENT_BYTES = {"float32": 4, "float64": 8, "int32": 4}


def accumulator_lanes(problem: Problem, target: CpuTarget) -> int:
    """Return the number of accumulators of `problem` in one vector register of `target`."""
    return target.lanes(_ELEMENT_BYTES[problem.accumulate_dtype])


def with_half_vectors(
    problem: Problem,
    target: CpuTarget,
    extent: int,
    words: Words | None,
    candidates: Callable[[CpuTarget, int, Words | None], Ranking[_AnyPlan]],
    *,
    added_up: bool = False,
) -> Ranking[_AnyPlan]:
    """Return the `candidates` for a target, its lanes and `words`, sorted by cost.

    Vectors run along an axis of `extent` elements. On a target of 512 bits those for half vectors are among the
    candidates if they pad it less, or if lanes are `added_up`, which takes fewer steps of them; and if no instruction
    multiplies matrices, which are of whole vectors.
    """
    lanes = accumulator_lanes(problem, target)
    whole = candidates(target, lanes, words)
    padded = round_up(extent, lanes)
    wastes = added_up or _LEAST_PADDING * extent <= padded <= _MOST_PADDING * extent
    if target.vector_bits < 512 or not wastes or tiled(words):
        return whole
    narrow = candidates(replace(target, vector_bits=target.vector_bits // 2), lanes // 2, words)
    halves = narrow.numbers.copy()
    halves[:, 1] = 1
    cost = _ADDED_COST if added_up and target.multiply_adds == 1 else _HALF_COST
    return Ranking.of([(whole.costs, whole.numbers), (cost * narrow.costs, halves)], whole.make)
