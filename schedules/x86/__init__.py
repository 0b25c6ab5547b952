"""Schedules for x86 with AVX2 or AVX-512: which algorithm serves a problem, and the default tiles.

The rules are tried in order; the first whose predicate admits the problem builds the kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from tvm.tirx import PrimFunc

from tvm_deconv.compute.direct import CHANNELS, GROUPS, ROWS, define_direct
from tvm_deconv.compute.packing import pack_filter
from tvm_deconv.compute.phases import Geometry
from tvm_deconv.problem import Problem
from tvm_deconv.schedules.x86.direct import schedule
from tvm_deconv.schedules.x86.tiles import Plan, default_plan, scratch_bytes
from tvm_deconv.targets import Target

Predicate: TypeAlias = Callable[[Problem, Target], bool]

_ELEMENT_BYTES = {"float32": 4, "float64": 8, "int32": 4}


@dataclass(frozen=True, slots=True)
class Kernel:
    """A scheduled kernel: the functions of the artifact and what its manifest says of them."""

    deconv: PrimFunc
    pack: PrimFunc
    algorithm: str
    decisions: dict[str, int]
    packed_elements: int
    scratch_bytes: int


@dataclass(frozen=True, slots=True)
class Algorithm:
    """An algorithm by name, and the form of the direct definition that it is.

    `serves` names the problems it is the default for, `admits` those it computes at all: what a search may try.
    """

    name: str
    serves: Predicate
    admits: Predicate
    form: str


def fills_vectors_with_channels(problem: Problem, target: Target) -> bool:
    """Channels are contiguous and at least half a vector of them belongs to one group; or positions are too few."""
    lanes = accumulator_lanes(problem, target)
    if problem.data_format == "NXC":
        return 2 * problem.out_channels >= lanes
    geometry = Geometry.of(problem)
    positions = geometry.batch
    for axis in geometry.axes:
        positions *= axis.positions
    return 2 * positions <= lanes <= problem.out_channels


def fills_vectors_with_groups(problem: Problem, target: Target) -> bool:
    """Channels are contiguous, and a group has fewer than half a vector of them, but there are many groups."""
    return problem.data_format == "NXC" and 2 * problem.groups >= accumulator_lanes(problem, target)


def always(problem: Problem, target: Target) -> bool:  # noqa: ARG001
    """Every problem."""
    return True


ALGORITHMS = (
    Algorithm("direct_channels", fills_vectors_with_channels, always, CHANNELS),
    Algorithm("direct_groups", fills_vectors_with_groups, always, GROUPS),
    Algorithm("direct_rows", always, always, ROWS),
)


def accumulator_lanes(problem: Problem, target: Target) -> int:
    """Accumulators of `problem` in one vector register of `target`."""
    return target.lanes(_ELEMENT_BYTES[problem.accumulate_dtype])


def algorithm_for(problem: Problem, target: Target) -> Algorithm:
    """Return the first algorithm whose predicate admits `problem` on `target`."""
    return next(algorithm for algorithm in ALGORITHMS if algorithm.serves(problem, target))


def build_kernel(
    problem: Problem, target: Target, algorithm: Algorithm | None = None, plan: Plan | None = None
) -> Kernel:
    """Schedule `problem` on `target`, by the default algorithm and plan where none is given."""
    algorithm = algorithm or algorithm_for(problem, target)
    lanes = accumulator_lanes(problem, target)
    plan = plan or default_plan(problem, algorithm.form, target, lanes)
    definition = define_direct(problem, algorithm.form, plan.tile, lanes)
    scheduled = schedule(definition, algorithm.form, plan, lanes, problem.accumulate_dtype)
    return Kernel(
        scheduled.mod["main"].with_attr("global_symbol", "deconv"),
        pack_filter(problem, definition.sections, definition.packed_elements),
        algorithm.name,
        plan.decisions,
        definition.packed_elements,
        scratch_bytes(problem, algorithm.form, plan, lanes, _ELEMENT_BYTES[problem.accumulate_dtype]),
    )
