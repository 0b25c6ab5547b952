"""Depthwise and narrow groups, and few output channels: a thread computes all phases of a position of a group.

A matrix product would have nothing to share between groups, and hardly more with few outputs of a position. Threads run
along the data's fastest axis: neighbours read and write neighbouring elements. A thread reads each element of the data
once for all phases. If a row is a whole number of positions, its phases of the last axis are written as one vector,
unless the caller's array begins at an address that does not suit vectors.

All threads of a group's positions read its filter at the same time, from cache, by vectors in the order of use. If
channels are last, neighbouring threads have neighbouring groups, and the packed filter has groups last too. With one
group a thread has several positions, so that it uses each filter element as often as it reads it.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import tirx as build

from tvm_deconv.compute.gather import Section, sections
from tvm_deconv.compute.indexing import Index, unravel
from tvm_deconv.compute.phases import Geometry
from tvm_deconv.problem import Problem
from tvm_deconv.schedules.contract import Algorithm, Kernel
from tvm_deconv.schedules.cuda.blocks import finish_sums
from tvm_deconv.schedules.cuda.emit import (
    ARRIVAL,
    MULTIPROCESSORS,
    THREADS,
    Arguments,
    aligned_or_not,
    as_it_is,
    deconv,
    launch,
    local,
    one_task,
    pack_filter,
    when,
)
from tvm_deconv.schedules.cuda.predicates import MOST_SUMS_TOGETHER, bound_by_memory, is_for_memory, sums_of_position
from tvm_deconv.targets import CudaTarget

_POSITIONS = (4, 2)  # of a thread, with one group
_LEAST_THREADS = 64
_VECTORS = (2, 4)
_AHEAD = (4, 3, 2, 1)  # input channels whose data a thread loads before it needs them
_PRODUCT, _BYTE = 3, 10  # costs of a product, with its share of a load of the filter, and of moving a byte


@dataclass(frozen=True, slots=True)
class Plan:
    """The number of positions of a thread."""

    positions: int

    @property
    def knobs(self) -> dict[str, int]:
        """The fields by name."""
        return asdict(self)


def candidates(problem: Problem, target: CudaTarget) -> list[tuple[float, Plan]]:  # noqa: ARG001
    """Return the plans worth measuring with their costs, the cheapest first.

    The cheapest has as many positions as leave room for their sums: they share the reads of the filter.
    """
    moved = _BYTE * problem.min_bytes
    fitting = [count for count in _POSITIONS if count * sums_of_position(problem) <= MOST_SUMS_TOGETHER]
    counts = [*fitting, 1] if problem.groups == 1 else [1]
    waited = ARRIVAL * problem.in_channels
    return [(max(_PRODUCT * problem.macs * (1 + 1 / count), moved, waited), Plan(count)) for count in counts]


def _ahead(problem: Problem) -> int:
    """Return the input channels whose data a thread loads before it needs them."""
    return next(count for count in _AHEAD if problem.in_channels % count == 0)


@dataclass(frozen=True, slots=True)
class _Weights:
    """The places of a section's elements in the packed filter, for a group and an input channel: in order of use.

    That is by tap, phase and output channel. `count` of them, and zeros up to a whole vector, lie together if a
    thread reads them by vectors of `lanes`; else groups are neighbours.
    """

    section: Section
    lanes: int
    offset: int

    @property
    def within(self) -> tuple[int, ...]:
        return (*self.section.taps, *self.section.counts, self.section.geometry.out_channels)

    @property
    def count(self) -> int:
        return math.prod(self.within)

    @property
    def padded(self) -> int:
        return -(-self.count // self.lanes) * self.lanes

    @property
    def elements(self) -> int:
        return self.padded * self.section.geometry.groups * self.section.geometry.in_channels

    def place(self, number: Expr) -> tuple[Index, Index, Index, list[Index], list[Expr]]:
        """Return the filter element that is packed as element `number` of the section: see `emit.Place`."""
        geometry = self.section.geometry
        if self.lanes > 1:
            g, ci, use = unravel(number, (geometry.groups, geometry.in_channels, self.padded))
        else:
            ci, use, g = unravel(number, (geometry.in_channels, self.padded, geometry.groups))
        *taps, d, h, w, co = unravel(use, self.within)
        # Padding belongs to no tap, and is not read.
        exists = [use < self.count] if self.padded > self.count else []
        return g, ci, co, self.section.element(taps, (d, h, w)), exists

    def at(self, group: Index, ci: Index, use: int) -> Index:
        """Return the place of element number `use` of a group and a channel."""
        geometry = self.section.geometry
        if self.lanes > 1:
            return (group * geometry.in_channels + ci) * self.padded + (self.offset + use)
        return (ci * self.padded + use) * geometry.groups + group + self.offset


def _packing(problem: Problem) -> list[_Weights]:
    """Return how the packed filter holds each section."""
    beside = problem.data_format == "NXC" and problem.groups > 1
    lanes = 1 if beside else 2 if problem.accumulate_dtype == "float64" else 4
    packing: list[_Weights] = []
    for section in sections(problem, 1, 1, Geometry.of(problem)):
        offset = packing[-1].offset + packing[-1].elements if packing else 0
        packing.append(_Weights(section, lanes, offset))
    return packing


def build_kernel(problem: Problem, target: CudaTarget, plan: Plan) -> Kernel:  # noqa: ARG001
    """Build the kernel of `problem`."""
    together = plan.positions
    dtype, last = problem.accumulate_dtype, problem.data_format == "NXC"
    packing = _packing(problem)
    elements = packing[-1].offset + packing[-1].elements

    vector = _vector(problem)
    with deconv(problem, elements, dtype) as (function, args):
        extents = tuple(axis.positions for axis in args.geometry.axes)
        images = args.geometry.batch
        order = (images, *extents, problem.groups) if last else (images, problem.groups, *extents)
        total = math.prod(order)
        threads = _threads(total, together)

        def launches(aligned: bool) -> None:
            with launch(-(-total // (threads * together)), threads) as (block, thread):
                positions = []
                for part in range(together):
                    number = (block.astype(args.index) * together + part) * threads + thread.astype(args.index)
                    n, *rest = unravel(tirx.min(number, args.const(total - 1)), order)
                    group = rest.pop() if last else rest.pop(0)
                    exists = [number < total] if total % (threads * together) else []
                    positions.append(_Position(n, group, rest, exists))
                _compute(args, vector if aligned else 1, packing, positions)

        aligned_or_not([args.out] if vector > 1 else [], 4 * vector, launches)
        finish_sums(args, 1)
    pack = pack_filter(problem, elements, dtype, [(one.offset, one.elements, one.place, as_it_is) for one in packing])
    return Kernel(problem, function.done, pack, "cuda_narrow", plan.knobs, elements, dtype)


def _threads(total: int, together: int) -> int:
    """Return the threads of a block: fewer if multiprocessors would have less than two blocks each."""
    threads = THREADS
    while threads > _LEAST_THREADS and -(-total // (threads * together)) < 2 * MULTIPROCESSORS:
        threads //= 2
    return threads


def _vector(problem: Problem) -> int:
    """Return how many phases of the last axis are written at once."""
    axis = Geometry.of(problem).axes[2]
    whole = problem.output_spatial[-1] % axis.stride == 0 and sum(run.count for run in axis.runs) == axis.stride
    plain = problem.data_format == "NCX" and problem.output_dtype in ("float32", "int32")
    return axis.stride if plain and whole and axis.stride in _VECTORS else 1


@dataclass(frozen=True, slots=True)
class _Position:
    """A position of a group in an image, and the conditions under which it is one."""

    n: Index
    group: Index
    at: list[Index]
    exists: list[Expr]


def _compute(args: Arguments, vector: int, packing: list[_Weights], positions: list[_Position]) -> None:
    """Compute all phases of `positions`, which share a group if there are several."""
    problem = args.problem
    dtype, zero = problem.accumulate_dtype, tirx.const(0, problem.accumulate_dtype)
    places: dict[tuple[int, ...], int] = {}  # of the sum of a channel and the phases of the axes
    for weights in packing:
        for co in range(problem.out_channels):
            runs = weights.section.runs
            for those in itertools.product(*(range(run.start, run.start + run.count) for run in runs)):
                places[(co, *those)] = len(places)
    lanes, group = packing[0].lanes, positions[0].group
    sums, read, weight = local(len(places) * len(positions), dtype), local(len(positions), dtype), local(lanes, dtype)
    with build.unroll(len(places) * len(positions)) as i:
        build.buffer_store(sums, zero, [i])
    ahead = _ahead(problem)
    with build.serial(args.const(0), args.const(problem.in_channels // ahead)) as several, build.unroll(ahead) as one:
        ci = several * ahead + one
        for weights in packing:
            section = weights.section
            for use, (*taps, d, h, w, co) in enumerate(itertools.product(*map(range, weights.within))):
                if not (d or h or w or co):
                    for number, position in enumerate(positions):
                        x, inside = section.source(position.at, taps)
                        element = args.accumulated(position.n, position.group * problem.in_channels + ci, x)
                        element = tirx.if_then_else(tirx.all(*inside), element, zero) if inside else element
                        build.buffer_store(read, element, [number])
                if use % lanes == 0:
                    first = weights.at(group, ci, use)
                    with build.vectorized(lanes) if lanes > 1 else contextlib.nullcontext(0) as lane:
                        build.buffer_store(weight, args.packed[first + lane], [lane])
                phases = [phase + run.start for phase, run in zip((d, h, w), section.runs, strict=True)]
                for number in range(len(positions)):
                    at = places[(co, *phases)] * len(positions) + number
                    build.buffer_store(sums, sums[at] + read[number] * weight[use % lanes], [at])
    for number, position in enumerate(positions):
        totals = [sums[at * len(positions) + number] for at in range(len(places))]
        with when(position.exists):
            _store(args, vector, places, position, totals)


def _store(
    args: Arguments,
    vector: int,
    places: dict[tuple[int, ...], int],
    position: _Position,
    totals: Sequence[Expr],
) -> None:
    """Store the outputs of one position; `totals` are the sums by place."""
    geometry = args.geometry
    for (co, *phases), at in places.items():
        if phases[2] % vector:
            continue  # written with the one before
        index, inside = [], []
        for y, phase, axis, extent in zip(position.at, phases, geometry.axes, geometry.output, strict=True):
            index.append(y * axis.stride + phase)
            if (axis.positions - 1) * axis.stride + phase >= extent:
                inside.append(index[-1] < extent)
        channel = position.group * geometry.out_channels + co
        with when(inside):
            if vector == 1:
                args.finish(position.n, channel, index, totals[at])
            else:
                row = [places[(co, *phases[:2], phase)] for phase in range(vector)]
                args.finish_vector(position.n, channel, index, [totals[place] for place in row])


ALGORITHM = Algorithm(
    name="cuda_narrow",
    supports=bound_by_memory,
    is_default_for=is_for_memory,
    candidates=candidates,
    read=lambda knobs: Plan(**knobs),
    tasks=one_task,
    build=build_kernel,
)
