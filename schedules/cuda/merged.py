"""The implicit matrix product on tensor cores of phases with different taps: all along an axis are in one product.

With kernel 3 and stride 2 one phase of an axis has two taps and the other has one. As products of their own, each
gathers its rows, and few output channels fill no tile. Here a run has the taps of all its phases, and the packed filter
has zeros where a phase lacks a tap: rows are gathered once, and their products fill wider tiles.

Infinity or NaN in the data times such a zero is NaN, in another phase of a position that reads it.
"""

from __future__ import annotations

from tvm_deconv.compute.phases import Geometry
from tvm_deconv.problem import Problem
from tvm_deconv.schedules.cuda import tensor
from tvm_deconv.schedules.cuda.predicates import fills_tensor_cores, is_for_tensor_cores
from tvm_deconv.schedules.cuda.products import CAVEAT, merged, merging
from tvm_deconv.schedules.cuda.tensor import Bytes, Warps, shapes
from tvm_deconv.schedules.cuda.tiles import Plan, matrix_algorithm
from tvm_deconv.targets import CudaTarget

#: The cost of merged phases by that of others, at most, for which infinities may spread by default.
_PAYS = 0.75


class Merged(Warps):
    """A part is a warp's, of merged phases."""

    algorithm = "cuda_merged"

    @property
    def geometry(self) -> Geometry:
        """See Form."""
        return merged(self.problem, self.plan.joined)


class _MergedBytes(Merged, Bytes):
    """Of bytes, whose zeros no infinity meets."""


def form_of(problem: Problem, plan: Plan) -> Merged:
    """Return the form of a plan: of bytes, or of floats."""
    return _MergedBytes(problem, plan) if problem.accumulate_dtype == "int32" else Merged(problem, plan)


def supports(problem: Problem, target: CudaTarget) -> bool:
    """Tensor cores compute the problem, and phases along some axis have different taps."""
    return fills_tensor_cores(problem, target) and bool(merging(problem))


def is_default_for(problem: Problem, target: CudaTarget) -> bool:
    """Arithmetic bounds the problem, and takes much less than with each phase's own taps, by the cheapest plans."""
    if not (supports(problem, target) and is_for_tensor_cores(problem, target)):
        return False
    merged_cost, cost = (algorithm.default_plan(problem, target)[0] for algorithm in (ALGORITHM, tensor.ALGORITHM))
    return merged_cost <= (_PAYS if problem.accumulate_dtype == "float32" else 1) * cost


def _shapes(problem: Problem) -> list[Plan]:
    return [shape for axes in merging(problem) for shape in shapes(problem, form_of, axes)]


ALGORITHM = matrix_algorithm(
    Merged.algorithm,
    form_of,
    _shapes,
    supports,
    is_default_for,
    CAVEAT,
)
