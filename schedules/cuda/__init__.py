"""Schedules for CUDA: which kernel serves a problem, its default plan, and the plans worth measuring.

The rules are tried in order; the first whose predicate admits the problem builds the kernel. The last admits every
problem.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

from tvm_deconv.schedules.cuda import generic, narrow, product, tensor
from tvm_deconv.schedules.cuda.emit import Kernel
from tvm_deconv.schedules.cuda.lower import source

from tvm_deconv.compute.phases import Geometry
from tvm_deconv.problem import Problem
from tvm_deconv.targets import CudaTarget

__all__ = ["ALGORITHMS", "Algorithm", "Kernel", "Plan", "algorithm_for", "build_kernel", "default_schedule", "source"]


class Plan(Protocol):
    """The knobs of a schedule."""

    @property
    def knobs(self) -> dict[str, int]:
        """Return them by name."""


@dataclass(frozen=True, slots=True)
class Family:
    """What builds the kernels of a family, and its plans.

    `make` takes the default plan for None. `default` is that plan, `find` gives those worth measuring with their costs
    by arithmetic, in multiply-adds of CUDA cores, the cheapest first.
    """

    make: Callable[[Problem, Any], Kernel]
    plan: type
    default: Callable[[Problem], Any]
    find: Callable[[Problem], list[tuple[float, Any]]]

    def plans(self, problem: Problem, target: CudaTarget) -> list[tuple[float, Plan]]:  # noqa: ARG002
        """Return the plans worth measuring, with their costs: the same for all targets."""
        return self.find(problem)

    def read(self, knobs: Mapping[str, int]) -> Plan:
        """Return the plan whose knobs these are. Raises TypeError where there is none."""
        plan: Plan = self.plan(**knobs)
        return plan

    def tasks(self, problem: Problem, plan: Plan) -> int:  # noqa: ARG002
        """Return 1: costs say already what idles."""
        return 1


@dataclass(frozen=True, slots=True)
class Algorithm:
    """A kernel family by its name, and the problems that it serves."""

    name: str
    serves: Callable[[Problem], bool]
    family: Family

    def admits(self, problem: Problem, target: CudaTarget) -> bool:  # noqa: ARG002
        """Tell whether it serves `problem`, as for all targets."""
        return self.serves(problem)


def always(problem: Problem) -> bool:  # noqa: ARG001
    """Every problem."""
    return True


def few_sections(problem: Problem) -> bool:
    """Phases form few combinations with the same taps, each a matrix product."""
    return 1 <= len(Geometry.of(problem).runs) <= 27


def _family(make: Callable[..., Kernel], module: ModuleType) -> Family:
    return Family(make, module.Plan, module.default_plan, module.plans)


ALGORITHMS = (
    Algorithm("cuda_narrow", narrow.bound_by_memory, _family(narrow.narrow, narrow)),
    Algorithm("cuda_tensor", tensor.fills_tensor_cores, _family(tensor.tensor, tensor)),
    Algorithm("cuda_product", few_sections, _family(product.product, product)),
    Algorithm("cuda_generic", always, _family(generic.generic, generic)),
)


def algorithm_for(problem: Problem, algorithms: Collection[str] | None = None) -> Algorithm:
    """Return the first of `algorithms`, by default of all, that serves `problem`; ValueError where none does."""
    for algorithm in ALGORITHMS:
        if (algorithms is None or algorithm.name in algorithms) and algorithm.serves(problem):
            return algorithm
    raise ValueError(f"{problem.key} is served by none of {', '.join(algorithms or ())}")


def default_schedule(problem: Problem, algorithms: Collection[str] | None = None) -> tuple[str, dict[str, int]]:
    """Return the name and the knobs that arithmetic alone chooses, among `algorithms`."""
    algorithm = algorithm_for(problem, algorithms)
    return algorithm.name, algorithm.family.default(problem).knobs


def build_kernel(problem: Problem, algorithm: Algorithm | None = None, plan: Plan | None = None) -> Kernel:
    """Build the functions of `problem`, by the default algorithm and plan where none are given."""
    return (algorithm or algorithm_for(problem)).family.make(problem, plan)
