"""Plans in the order of their costs. They are tens of thousands, so they are arrays until one is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar, overload

import numpy as np

from tvm_deconv.problem import Array

PlanT = TypeVar("PlanT")


@dataclass(frozen=True, slots=True, eq=False)
class Ranking(Sequence[tuple[float, PlanT]], Generic[PlanT]):
    """Plans with their costs, the cheapest first; `make` makes a plan of its row of `numbers`.

    The first two numbers are `share_data` and `halves`.
    """

    costs: Array
    numbers: Array
    make: Callable[..., PlanT]

    @staticmethod
    def of(parts: Sequence[tuple[Array, Array]], make: Callable[..., PlanT]) -> Ranking[PlanT]:
        """Rank the plans of `parts`, costs and numbers of each; of equal costs the first comes first."""
        parts = [part for part in parts if len(part[0])]
        if not parts:
            return Ranking(np.empty(0), np.empty((0, 2), np.int64), make)
        costs = np.concatenate([costs for costs, _ in parts])
        order = np.argsort(costs, kind="stable")
        return Ranking(costs[order], np.concatenate([numbers for _, numbers in parts])[order], make)

    def __len__(self) -> int:
        return len(self.costs)

    @overload
    def __getitem__(self, index: int) -> tuple[float, PlanT]: ...
    @overload
    def __getitem__(self, index: slice) -> list[tuple[float, PlanT]]: ...
    def __getitem__(self, index: int | slice) -> tuple[float, PlanT] | list[tuple[float, PlanT]]:
        if isinstance(index, slice):
            return [*Ranking(self.costs[index], self.numbers[index], self.make)]
        return float(self.costs[index]), self.make(*self.numbers[index].tolist())

    def __iter__(self) -> Iterator[tuple[float, PlanT]]:
        for cost, row in zip(self.costs.tolist(), map(np.ndarray.tolist, self.numbers), strict=True):
            yield cost, self.make(*row)
