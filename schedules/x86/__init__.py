"""Schedules for x86 with AVX2 or AVX-512: which algorithm serves a problem, and the default tiles.

An algorithm's predicates say which problems it computes at all, and for which it is a default. Of several, the one
whose best plan is the cheapest by arithmetic builds the kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Protocol, TypeAlias, TypeVar

from tvm.tirx import PrimFunc
from tvm_deconv.schedules.x86 import matrix_tiles, register_epilogue, tiles
from tvm_deconv.schedules.x86.direct import schedule_direct
from tvm_deconv.schedules.x86.loop_marks import lower_loop_marks
from tvm_deconv.schedules.x86.matrix import schedule_matrix
from tvm_deconv.schedules.x86.stores import lower_row_copies, lower_streaming_stores, outgrows_caches
from tvm_deconv.schedules.x86.variants import dispatch, filter_offsets, pack_all

from tvm_deconv.compute.direct import define_direct
from tvm_deconv.compute.direct_layout import Tile
from tvm_deconv.compute.extents import End
from tvm_deconv.compute.indexing import CHANNELS, GROUPS, ROWS, has_whole_vectors, tiles_of_channels
from tvm_deconv.compute.matrix import define_matrix
from tvm_deconv.compute.matrix_layout import MatrixTile, contiguous_phases, row_unit
from tvm_deconv.compute.packing import pack_filter, pack_matrix_filter
from tvm_deconv.compute.phases import Geometry
from tvm_deconv.problem import Problem
from tvm_deconv.targets import CpuTarget

Predicate: TypeAlias = Callable[[Problem, CpuTarget], bool]
_AnyPlan = TypeVar("_AnyPlan", tiles.Plan, matrix_tiles.MatrixPlan)

#: Outputs of a row that the matrix definition finishes at once, at most: its code grows with them.
MAX_CHUNK = 160
#: With a dynamic spatial extent, a block with so many tiles of channels shares its data among them, and blocks follow
#: one another; with fewer, blocks are the tasks.
SHARERS = 4
#: Halves of vectors are tried where whole ones have so many times the lanes that there is something for.
_EMPTY, _TOO_EMPTY = 1.1, 4.0
#: What a product costs in half a vector: from one, where vectors of 512 bits are computed in halves, to two.
_HALF_COST = 1.4
_ELEMENT_BYTES = {"float32": 4, "float64": 8, "int32": 4}


class Plan(Protocol):
    """The knobs of a schedule, of any algorithm."""

    @property
    def knobs(self) -> dict[str, int]:
        """The plan as plain integers: what manifests and logs hold."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """A scheduled kernel: the functions of the artifact and what its manifest says of them.

    The bytes of workspace are known once it is compiled.
    """

    deconv: PrimFunc
    pack: PrimFunc
    algorithm: str
    knobs: dict[str, int]
    packed_elements: int
    scratch_bytes: int = 0
    shared_bytes: int = 0


class Family(Protocol):
    """A definition with its schedules and plans."""

    def plans(self, problem: Problem, target: CpuTarget) -> list[tuple[float, Plan]]:
        """Return every plan worth considering with its cost by arithmetic (cycles a useful product), cheapest first.

        Of a variable problem: for its representative call.
        """

    def read(self, knobs: Mapping[str, int]) -> Plan:
        """Return the plan whose knobs these are. Raises KeyError, TypeError or ValueError where there is none."""

    def tasks(self, problem: Problem, plan: Plan) -> int:
        """Return the number of independent tasks of a call."""

    def kernel(self, problem: Problem, target: CpuTarget, plan: Plan, algorithm: str) -> Kernel:
        """Define and schedule `problem`."""


@dataclass(frozen=True, slots=True)
class Direct:
    """The direct definition in one of its forms, with Winograd's transforms along the outer axes or without."""

    form: str
    winograd: bool = False

    def plans(self, problem: Problem, target: CpuTarget) -> list[tuple[float, Plan]]:
        """See Family."""
        lanes = accumulator_lanes(problem, target)
        geometry = Geometry.of(problem)
        extents = {ROWS: geometry.axes[2].positions, CHANNELS: problem.out_channels, GROUPS: problem.groups}
        found = _of_widths(
            problem, target, extents[self.form], partial(tiles.candidates, problem, self.form, self.winograd)
        )
        return _of_calls(problem, found, self.form, lanes if self.form == ROWS else 1)

    def read(self, knobs: Mapping[str, int]) -> Plan:
        """See Family."""
        plan = tiles.Plan.from_knobs(knobs)
        if (max(plan.tile.outputs) > 1) != self.winograd:
            rule = "one must be more than 1" if self.winograd else "must all be 1"
            raise ValueError(f"outputs={plan.tile.outputs}: {rule}")
        return plan

    def tasks(self, problem: Problem, plan: Plan) -> int:
        """See Family."""
        assert isinstance(plan, tiles.Plan)
        return plan.tasks(problem, self.form)

    def kernel(self, problem: Problem, target: CpuTarget, plan: Plan, algorithm: str) -> Kernel:
        """See Family."""
        assert isinstance(plan, tiles.Plan)
        lanes = accumulator_lanes(problem, target) // (1 + plan.halves)
        definition = define_direct(problem, self.form, plan.tile, lanes)
        # Past the caches rows are copied at once; a position's channels are stored as they are made at any size.
        streams = outgrows_caches(problem)
        whole = has_whole_vectors(problem, self.form, plan.tile, lanes) and not (streams and self.form == ROWS)
        scheduled = schedule_direct(definition, plan, problem.accumulate_dtype, whole).mod["main"]
        usual = partial(_deconv, scheduled, definition.end, streams and not whole)
        geometry = Geometry.of(problem, bool(plan.tile.uncropped))
        if self.form == ROWS and register_epilogue.supports_tile(problem, geometry, plan.tile, lanes):
            made = register_epilogue.finish_in_registers(scheduled, problem, definition, streams=streams)
            functions = register_epilogue.store_functions(problem.accumulate_dtype, lanes) if streams else ""
            made = _deconv(made, definition.end, streams, functions)
            deconv = register_epilogue.select_by_alignment(made, usual()) if streams else made
        else:
            deconv = usual()
        return Kernel(
            deconv,
            pack_filter(problem, definition.sections, definition.packed_elements),
            algorithm,
            plan.knobs,
            definition.packed_elements,
        )


@dataclass(frozen=True, slots=True)
class Matrix:
    """The matrix definition, with Winograd's transforms, Strassen's algorithm, or neither."""

    winograd: bool = False
    strassen: bool = False

    def plans(self, problem: Problem, target: CpuTarget) -> list[tuple[float, Plan]]:
        """See Family."""
        lanes = accumulator_lanes(problem, target)
        most = max((math.prod(run.count for run in runs) for runs in Geometry.of(problem).runs), default=1)
        columns = most * problem.out_channels
        plans = partial(matrix_tiles.candidates, problem, self.winograd, strassen=self.strassen)
        found = _of_widths(problem, target, columns, plans)
        return _of_calls(problem, found, CHANNELS, row_unit(problem, lanes))

    def read(self, knobs: Mapping[str, int]) -> Plan:
        """See Family."""
        return matrix_tiles.MatrixPlan.from_knobs(knobs)

    def tasks(self, problem: Problem, plan: Plan) -> int:
        """See Family."""
        assert isinstance(plan, matrix_tiles.MatrixPlan)
        return plan.tasks(problem)

    def kernel(self, problem: Problem, target: CpuTarget, plan: Plan, algorithm: str) -> Kernel:
        """See Family."""
        assert isinstance(plan, matrix_tiles.MatrixPlan)
        lanes = accumulator_lanes(problem, target) // (1 + plan.halves)
        definition = define_matrix(problem, plan.tile, lanes)
        whole = has_whole_vectors(problem, CHANNELS, plan.tile, lanes) and not definition.layout.contiguous_phases
        scheduled = schedule_matrix(definition, plan, problem.accumulate_dtype, whole)
        return Kernel(
            _deconv(scheduled.mod["main"], definition.end, outgrows_caches(problem) and not whole),
            pack_matrix_filter(problem, definition.sections, definition.packed_elements),
            algorithm,
            plan.knobs,
            definition.packed_elements,
        )


def _of_widths(
    problem: Problem, target: CpuTarget, extent: int, plans: Callable[[CpuTarget, int], list[tuple[float, _AnyPlan]]]
) -> list[tuple[float, _AnyPlan]]:
    """Return the `plans` for the target's vectors, and for halves of 512 bits where they suit an `extent` better."""
    lanes = accumulator_lanes(problem, target)
    found: list[tuple[float, _AnyPlan]] = plans(target, lanes)
    padded = -(-extent // lanes) * lanes
    if target.vector_bits < 512 or not _EMPTY * extent <= padded <= _TOO_EMPTY * extent:
        return found
    narrow = plans(replace(target, vector_bits=target.vector_bits // 2), lanes // 2)
    halves: list[tuple[float, Any]] = [(_HALF_COST * cost, replace(plan, halves=True)) for cost, plan in narrow]
    return sorted([*found, *halves], key=lambda candidate: candidate[0])


def _of_calls(
    problem: Problem, found: Sequence[tuple[float, _AnyPlan]], form: str, unit: int
) -> list[tuple[float, Plan]]:
    """Return those of the plans `found` that serve calls of all extents, adapted to them; all where extents are fixed.

    A row that is dynamic may always have a next block: it is cut into multiples of `unit` positions. It is computed by
    whole register tiles, which is more for calls of other lengths than for the representative one.
    """
    if problem.dynamic in ((), (0,)):
        return [*found]
    geometry, unit = Geometry.of(problem), unit if problem.rank in problem.dynamic else 1
    adapted = [
        (
            cost * _unevenness(problem, plan.tile),
            replace(plan, share_data=math.prod(tiles_of_channels(geometry, form, plan.tile)) >= SHARERS),
        )
        for cost, plan in found
        if plan.tile.width % unit == 0
    ]
    return sorted(adapted, key=lambda found: found[0])


def _unevenness(problem: Problem, tile: Tile | MatrixTile) -> float:
    """Return by how much calls of other lengths cost more than arithmetic says of the representative one."""
    rows = problem.rank in problem.dynamic and tile.images == tile.depth == tile.height == 1
    return _left_over(min(problem.data_spatial[-1], tile.width), tile.positions) if rows else 1.0


@cache
def _left_over(representative: int, unit: int) -> float:
    """Return the mean padding to whole units of lengths from a quarter of `representative` to it, relative to its."""

    def padded(length: int) -> float:
        return -(-length // unit) * unit / length

    lengths = range(representative // 4 + 1, representative + 1)
    return sum(map(padded, lengths)) / len(lengths) / padded(representative)


def _deconv(func: PrimFunc, end: End | None, streams: bool, functions: str = "") -> PrimFunc:
    func = lower_loop_marks(lower_row_copies(func) if end else func, end)
    if streams:
        func = lower_streaming_stores(func, functions)
    return func.with_attr("global_symbol", "deconv")


@dataclass(frozen=True, slots=True)
class Algorithm:
    """An algorithm by name.

    `serves` names the problems it is a default for, `admits` those it computes at all: what a search may try.
    """

    name: str
    serves: Predicate
    admits: Predicate
    family: Family


def _positions(problem: Problem) -> int:
    geometry = Geometry.of(problem)
    return geometry.batch * math.prod(axis.positions for axis in geometry.axes)


def fills_vectors_with_channels(problem: Problem, target: CpuTarget) -> bool:
    """Channels are contiguous and at least half a vector of them belongs to one group; or positions are too few."""
    lanes = accumulator_lanes(problem, target)
    if problem.data_format == "NXC":
        return 2 * problem.out_channels >= lanes
    positions = _positions(problem)
    return 2 * positions <= lanes <= problem.out_channels


def fills_vectors_with_groups(problem: Problem, target: CpuTarget) -> bool:
    """Channels are contiguous, and a group has fewer than half a vector of them, but there are many groups."""
    return problem.data_format == "NXC" and 2 * problem.groups >= accumulator_lanes(problem, target)


def always(problem: Problem, target: CpuTarget) -> bool:  # noqa: ARG001
    """Every problem."""
    return True


def fills_panels(problem: Problem, target: CpuTarget) -> bool:
    """Every product has vectors of columns and of rows: enough output channels, input channels and positions."""
    lanes = accumulator_lanes(problem, target)
    positions = _positions(problem)
    columns = 2 * problem.out_channels >= lanes or contiguous_phases(problem, lanes) > 0
    enough = columns and 2 * problem.in_channels >= lanes and positions >= 4
    return enough and finishes_in_short_chunks(problem, target)


def finishes_in_short_chunks(problem: Problem, target: CpuTarget) -> bool:
    """Where channels become rows, that happens by whole vectors and strides: a body of code that must stay small."""
    lanes = accumulator_lanes(problem, target)
    if problem.data_format == "NXC" or contiguous_phases(problem, lanes):
        return True
    return math.lcm(lanes, Geometry.of(problem).axes[2].stride) <= MAX_CHUNK


def has_taps_to_transform(problem: Problem, target: CpuTarget) -> bool:
    """Some phase has several taps next to each other, and sums of data do not overflow: floating point."""
    if problem.accumulate_dtype == "int32" or not finishes_in_short_chunks(problem, target):
        return False
    return bool(matrix_tiles.output_choices(Geometry.of(problem), winograd=True))


def has_rows_to_transform(problem: Problem, target: CpuTarget) -> bool:  # noqa: ARG001
    """Some phase has several taps next to each other along an axis outside of rows; in floating point."""
    return problem.accumulate_dtype != "int32" and bool(tiles.outer_outputs(Geometry.of(problem)))


def saves_rows(problem: Problem, target: CpuTarget) -> bool:
    """There are rows to transform, and they are contiguous."""
    return problem.data_format == "NCX" and has_rows_to_transform(problem, target)


def saves_products(problem: Problem, target: CpuTarget) -> bool:
    """There are taps to transform, and columns enough for the transforms to pay."""
    return has_taps_to_transform(problem, target) and fills_panels(problem, target)


def has_nothing_to_transform(problem: Problem, target: CpuTarget) -> bool:
    """Winograd's transforms do not apply, and sums of data do not overflow: floating point."""
    if problem.accumulate_dtype == "int32" or not finishes_in_short_chunks(problem, target):
        return False
    return not matrix_tiles.output_choices(Geometry.of(problem), winograd=True)


def fills_halves(problem: Problem, target: CpuTarget) -> bool:
    """Half of the input channels are terms enough for the sums on the way in and out to pay."""
    enough = problem.in_channels >= 8 * accumulator_lanes(problem, target)
    return enough and has_nothing_to_transform(problem, target) and fills_panels(problem, target)


ALGORITHMS = (
    Algorithm("winograd", saves_products, has_taps_to_transform, Matrix(winograd=True)),
    Algorithm("matrix", fills_panels, finishes_in_short_chunks, Matrix()),
    Algorithm("strassen", fills_halves, has_nothing_to_transform, Matrix(strassen=True)),
    Algorithm("winograd_rows", saves_rows, has_rows_to_transform, Direct(ROWS, winograd=True)),
    Algorithm("direct_channels", fills_vectors_with_channels, always, Direct(CHANNELS)),
    Algorithm("direct_groups", fills_vectors_with_groups, always, Direct(GROUPS)),
    Algorithm("direct_rows", always, always, Direct(ROWS)),
)


def accumulator_lanes(problem: Problem, target: CpuTarget) -> int:
    """Accumulators of `problem` in one vector register of `target`."""
    return target.lanes(_ELEMENT_BYTES[problem.accumulate_dtype])


def default_plan(
    problem: Problem, target: CpuTarget, algorithms: Collection[str] | None = None
) -> tuple[Algorithm, Plan]:
    """Return the cheapest plan, by arithmetic, of the algorithms that serve `problem`; only the named ones are asked.

    Where none of those serves it, the first that admits it is taken. Raises ValueError where there is none.
    """
    allowed = [a for a in ALGORITHMS if algorithms is None or a.name in algorithms]
    serving = [a for a in allowed if a.serves(problem, target)]
    serving = serving or [a for a in allowed if a.admits(problem, target)][:1]
    if not serving:
        raise ValueError(f"no algorithm of {', '.join(algorithms or ())} admits {problem.key}")
    best = [(algorithm.family.plans(problem, target)[0], algorithm) for algorithm in serving]
    (_, plan), algorithm = min(best, key=lambda found: found[0][0])
    return algorithm, plan


def build_kernel(
    problem: Problem, target: CpuTarget, algorithm: Algorithm | None = None, plan: Plan | None = None
) -> Kernel:
    """Schedule `problem` on `target`; by default with the default plan, of `algorithm` where that is given."""
    if plan is None:
        algorithm, plan = default_plan(problem, target, [algorithm.name] if algorithm else None)
    assert algorithm is not None
    return algorithm.family.kernel(problem, target, plan, algorithm.name)


def build_variants(problem: Problem, plans: Sequence[tuple[Algorithm, Plan]], target: CpuTarget) -> Kernel:
    """Schedule each of the problem's variants by one of `plans`, as a kernel in which the extents of a call choose.

    Its knobs are those of all, behind the bucket and a dot.
    """
    variants = problem.variants
    kernels = [build_kernel(one, target, *plan) for one, plan in zip(variants, plans, strict=True)]

    def alike(i: int) -> bool:
        """Whether the calls of variant i would go to the same kernel without it."""
        later = (j for j in range(i + 1, len(kernels)) if _holds(variants[j], variants[i]))
        j = next(later, i)
        return j > i and (kernels[i].algorithm, kernels[i].knobs) == (kernels[j].algorithm, kernels[j].knobs)

    kept = [i for i in range(len(kernels)) if not alike(i)]
    chosen = [kernels[i] for i in kept]
    if len(chosen) == 1:
        return chosen[0]
    offsets, elements = filter_offsets(
        [kernel.pack for kernel in chosen], [kernel.packed_elements for kernel in chosen]
    )
    bounds = [_bounds(problem, variants[i]) for i in kept]
    return Kernel(
        dispatch([kernel.deconv for kernel in chosen], bounds, offsets, elements),
        pack_all([kernel.pack for kernel in chosen], offsets, elements),
        "+".join(dict.fromkeys(kernel.algorithm for kernel in chosen)),
        {
            f"{'x'.join(map(str, _bucket(variants[i])))}.{name}": value
            for i, kernel in zip(kept, chosen, strict=True)
            for name, value in kernel.knobs.items()
        },
        elements,
    )


def _bucket(variant: Problem) -> tuple[int, ...]:
    return tuple(variant.data_spatial[axis - 1] for axis in variant.dynamic if axis)


def _holds(one: Problem, other: Problem) -> bool:
    """Whether the bucket of `one` holds that of `other`."""
    return all(mine >= theirs for mine, theirs in zip(_bucket(one), _bucket(other), strict=True))


def _bounds(problem: Problem, variant: Problem) -> dict[str, int]:
    """Return what the extents of a call may be for a variant, by their variables; the largest bucket has no bound."""
    spatial = zip(problem.data_spatial, variant.data_spatial, strict=True)
    return {f"extent_{axis}": extent for axis, (most, extent) in enumerate(spatial) if extent < most}
