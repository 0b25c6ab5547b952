"""Schedules for CUDA: which kernel serves a problem, and its default plan.

The rules are tried in order; the first whose predicate admits the problem builds the kernel. The last admits every
problem.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm_deconv.compute.phases import Geometry
from tvm_deconv.problem import Problem
from tvm_deconv.schedules.cuda.emit import Kernel
from tvm_deconv.schedules.cuda.generic import generic
from tvm_deconv.schedules.cuda.lower import source
from tvm_deconv.schedules.cuda.narrow import bound_by_memory, narrow
from tvm_deconv.schedules.cuda.product import product
from tvm_deconv.schedules.cuda.tensor import fills_tensor_cores, tensor

__all__ = ["ALGORITHMS", "Algorithm", "Kernel", "algorithm_for", "build_kernel", "source"]


@dataclass(frozen=True, slots=True)
class Algorithm:
    """A kernel family: the problems it serves, and what builds its kernel for one."""

    name: str
    serves: Callable[[Problem], bool]
    build: Callable[[Problem], Kernel]


def always(problem: Problem) -> bool:  # noqa: ARG001
    """Every problem."""
    return True


def few_sections(problem: Problem) -> bool:
    """Phases form few combinations with the same taps, each a matrix product."""
    return 1 <= len(Geometry.of(problem).runs) <= 27


ALGORITHMS = (
    Algorithm("cuda_narrow", bound_by_memory, narrow),
    Algorithm("cuda_tensor", fills_tensor_cores, tensor),
    Algorithm("cuda_product", few_sections, product),
    Algorithm("cuda_generic", always, generic),
)


def algorithm_for(problem: Problem) -> Algorithm:
    """Return the first algorithm whose predicate admits `problem`."""
    return next(algorithm for algorithm in ALGORITHMS if algorithm.serves(problem))


def build_kernel(problem: Problem, algorithm: Algorithm | None = None) -> Kernel:
    """Build the functions of `problem`, by the default algorithm where none is given."""
    return (algorithm or algorithm_for(problem)).build(problem)
