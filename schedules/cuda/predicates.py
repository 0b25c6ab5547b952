"""The conditions under which kernels support a problem, or are its default.

Each problem has one default: bound by memory, on tensor cores, on CUDA cores, or the kernel for all problems.
"""

from __future__ import annotations

import math

from tvm_deconv.compute.gather import sections
from tvm_deconv.compute.phases import Geometry
from tvm_deconv.problem import Problem
from tvm_deconv.schedules.cuda.products import MOST_PRODUCTS
from tvm_deconv.schedules.cuda.warp import MMA_TERMS
from tvm_deconv.targets import CudaTarget

#: Sums of one position of a group that fit into registers, and products that can be written out, at most.
_MOST_SUMS, _MOST_PRODUCTS = 64, 512
#: Sums of all positions of a thread, at most, if a group has few outputs.
MOST_SUMS_TOGETHER = 32
_LEAST_GROUPS = 16
_MOST_CHANNELS = 8  # of a group, on the way in
_LEAST_COLUMNS = 8  # of a product that is worth its tiles
_LEAST_POSITIONS = 1 << 14
_LEAST_TERMS = 16  # of a product on tensor cores, unless one instruction has fewer


def always(problem: Problem, target: CudaTarget) -> bool:  # noqa: ARG001
    """Hold for every problem."""
    return True


def bound_by_memory(problem: Problem, target: CudaTarget) -> bool:  # noqa: ARG001
    """Groups are narrow, or outputs few."""
    return narrow_groups(problem) or few_outputs(problem)


def narrow_groups(problem: Problem) -> bool:
    """Groups are many; their outputs of one position fit into registers, and their products can be written out."""
    sums, products = sums_of_position(problem), products_of_position(problem)
    fits = 0 < sums <= _MOST_SUMS and products <= _MOST_PRODUCTS
    return problem.groups >= _LEAST_GROUPS and problem.in_channels <= _MOST_CHANNELS and fits


def few_outputs(problem: Problem) -> bool:
    """One group, many positions, and so few output channels that each phase's product would be mostly padding."""
    products = sections(problem, 1, 1, Geometry.of(problem))
    return (
        problem.groups == 1
        and 0 < sums_of_position(problem) <= MOST_SUMS_TOGETHER // 2
        and products_of_position(problem) <= _MOST_PRODUCTS // 4
        and max(section.n for section in products) < _LEAST_COLUMNS
        and products[0].m >= _LEAST_POSITIONS
    )


def sums_of_position(problem: Problem) -> int:
    """Return the number of outputs of one position of a group that any tap reaches."""
    axes = Geometry.of(problem).axes
    return math.prod(sum(run.count for run in axis.runs) for axis in axes) * problem.out_channels


def products_of_position(problem: Problem) -> int:
    """Return the number of products for the outputs of one position of a group and one input channel."""
    runs = Geometry.of(problem).runs
    return sum(math.prod(run.taps * run.count for run in three) for three in runs) * problem.out_channels


def multiplied_type(problem: Problem) -> str | None:
    """Return the type in which tensor cores multiply; None if they do not."""
    kind = problem.dtype if problem.precision == "ieee" else "tf32"
    return kind if kind in MMA_TERMS else None


def fills_tensor_cores(problem: Problem, target: CudaTarget) -> bool:  # noqa: ARG001
    """Tensor cores multiply the type, and products have enough columns and terms for one of their instructions."""
    kind, products = multiplied_type(problem), sections(problem, 1, 1)
    return (
        kind is not None
        and 1 <= len(products) <= MOST_PRODUCTS
        and max(section.n for section in products) >= 8
        and max(section.k for section in products) >= min(_LEAST_TERMS, MMA_TERMS[kind])
    )


def on_hopper(target: CudaTarget) -> bool:
    """Return True if the target is devices of capability 9.0 alone, with the instructions that only these have."""
    return target.own and target.code == ((9, 0),)


def few_sections(problem: Problem, target: CudaTarget) -> bool:  # noqa: ARG001
    """Phases form few combinations with the same taps, each a matrix product."""
    return 1 <= len(sections(problem, 1, 1)) <= MOST_PRODUCTS


def is_for_memory(problem: Problem, target: CudaTarget) -> bool:
    """Memory bounds the problem: groups are narrow, or outputs few even of all phases together, or for CUDA cores."""
    return bound_by_memory(problem, target) and not is_for_tensor_cores(problem, target)


def is_for_tensor_cores(problem: Problem, target: CudaTarget) -> bool:
    """Arithmetic bounds the problem, and tensor cores do it."""
    return fills_tensor_cores(problem, target) and not narrow_groups(problem)


def is_for_cuda_cores(problem: Problem, target: CudaTarget) -> bool:
    """Arithmetic may bound the problem, and tensor cores do not do it."""
    special = narrow_groups(problem) or fills_tensor_cores(problem, target)
    return few_sections(problem, target) and not special


def is_for_no_other(problem: Problem, target: CudaTarget) -> bool:
    """No other kernel supports the problem."""
    others = (bound_by_memory, fills_tensor_cores, few_sections)
    return not any(supports(problem, target) for supports in others)
