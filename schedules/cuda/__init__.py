"""Schedules for CUDA: which kernel serves a problem, its default plan, and the plans worth measuring.

The rules are tried in order; the first whose predicate admits the problem builds the kernel. The last admits every
problem.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from types import ModuleType
from typing import Any

from tvm_deconv.compute.phases import Geometry
from tvm_deconv.problem import Problem
from tvm_deconv.schedules.cuda import generic, narrow, product, tensor
from tvm_deconv.schedules.cuda.emit import Kernel
from tvm_deconv.schedules.cuda.lower import source

__all__ = ["ALGORITHMS", "Algorithm", "Kernel", "algorithm_for", "build_kernel", "source"]


@dataclass(frozen=True, slots=True)
class Algorithm:
    """A kernel family: the problems it serves, what builds its kernel, and its plans.

    `make` takes the default plan for None. `default` is that plan, `find` gives those worth measuring with their costs
    by arithmetic, the cheapest first.
    """

    name: str
    serves: Callable[[Problem], bool]
    make: Callable[[Problem, Any], Kernel]
    plan: type
    default: Callable[[Problem], Any]
    find: Callable[[Problem], list[tuple[float, Any]]]

    def build(self, problem: Problem, decisions: Mapping[str, int] | None = None) -> Kernel:
        """Build the kernel of `problem`, by the default plan where no decisions are given."""
        return self.make(problem, None if decisions is None else self.plan(**decisions))

    def plans(self, problem: Problem) -> list[tuple[float, dict[str, int]]]:
        """Return the decisions of the plans worth measuring, with their costs."""
        return [(cost, asdict(plan)) for cost, plan in self.find(problem)]


def always(problem: Problem) -> bool:  # noqa: ARG001
    """Every problem."""
    return True


def few_sections(problem: Problem) -> bool:
    """Phases form few combinations with the same taps, each a matrix product."""
    return 1 <= len(Geometry.of(problem).runs) <= 27


def _algorithm(
    name: str, serves: Callable[[Problem], bool], make: Callable[..., Kernel], family: ModuleType
) -> Algorithm:
    return Algorithm(name, serves, make, family.Plan, family.default_plan, family.plans)


ALGORITHMS = (
    _algorithm("cuda_narrow", narrow.bound_by_memory, narrow.narrow, narrow),
    _algorithm("cuda_tensor", tensor.fills_tensor_cores, tensor.tensor, tensor),
    _algorithm("cuda_product", few_sections, product.product, product),
    _algorithm("cuda_generic", always, generic.generic, generic),
)


def algorithm_for(problem: Problem) -> Algorithm:
    """Return the first algorithm whose predicate admits `problem`."""
    return next(algorithm for algorithm in ALGORITHMS if algorithm.serves(problem))


def build_kernel(
    problem: Problem, algorithm: Algorithm | None = None, decisions: Mapping[str, int] | None = None
) -> Kernel:
    """Build the functions of `problem`, by the default algorithm and plan where none are given."""
    return (algorithm or algorithm_for(problem)).build(problem, decisions)
