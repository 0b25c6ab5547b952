"""Depthwise and narrow groups, and few output channels: a thread computes all phases of a position of a group.

What a matrix product would share is not there: between groups nothing, and with few outputs of a position hardly more.
Threads run along the data's fastest axis: neighbours read and write neighbouring elements. A thread reads each element
of the data once for all phases; where a row is a whole number of positions, its phases of the last axis are written
as one vector, unless the caller's array begins at an address that is none of a vector.

The filter of a group is read by all threads of its positions at the same time, from cache; where channels are last,
neighbouring threads have neighbouring groups, and the packed filter has groups last too. With one group a thread has
several positions, so that it uses each filter element as often as it reads it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import tirx as build

from tvm_deconv.compute.gather import Index, sections, unravel
from tvm_deconv.compute.phases import Geometry
from tvm_deconv.problem import Problem
from tvm_deconv.schedules.cuda.blocks import finish_sums
from tvm_deconv.schedules.cuda.emit import (
    MULTIPROCESSORS,
    THREADS,
    Arguments,
    Kernel,
    aligned_or_not,
    deconv,
    launch,
    local,
    pack_filter,
    when,
)

_MOST_SUMS = 64
_MOST_PRODUCTS = 512
_LEAST_GROUPS = 16
_MOST_CHANNELS = 8  # of a group, on the way in
_LEAST_COLUMNS = 8  # of a product worth its tiles
_LEAST_POSITIONS = 1 << 14
_POSITIONS = (4, 2)
_MOST_SUMS_TOGETHER = 32
_LEAST_THREADS = 64
_VECTORS = (2, 4)
_BYTE = 8  # what moving one costs, in multiply-adds


def narrow_groups(problem: Problem) -> bool:
    """Many groups, whose outputs of one position fit into registers and whose products can be written out."""
    fits = 0 < _sums(problem) <= _MOST_SUMS and _products(problem) <= _MOST_PRODUCTS
    return problem.groups >= _LEAST_GROUPS and problem.in_channels <= _MOST_CHANNELS and fits


def few_outputs(problem: Problem) -> bool:
    """One group, many positions, and so few output channels that each phase's product would be mostly padding."""
    found = sections(problem, 1, 1)
    return (
        problem.groups == 1
        and 0 < _sums(problem) <= _MOST_SUMS_TOGETHER // 2
        and _products(problem) <= _MOST_PRODUCTS // 4
        and max(section.n for section in found) < _LEAST_COLUMNS
        and found[0].m >= _LEAST_POSITIONS
    )


def bound_by_memory(problem: Problem) -> bool:
    """Narrow groups or few outputs."""
    return narrow_groups(problem) or few_outputs(problem)


def _sums(problem: Problem) -> int:
    """Return the number of outputs of one position of a group that any tap reaches."""
    axes = Geometry.of(problem).axes
    return math.prod(sum(run.count for run in axis.runs) for axis in axes) * problem.out_channels


def _products(problem: Problem) -> int:
    """Return the number of products for them and one input channel."""
    runs = Geometry.of(problem).runs
    return sum(math.prod(run.taps * run.count for run in three) for three in runs) * problem.out_channels


@dataclass(frozen=True, slots=True)
class Plan:
    """How many positions a thread has."""

    positions: int

    @property
    def decisions(self) -> dict[str, int]:
        """The fields by name."""
        return asdict(self)


def default_plan(problem: Problem) -> Plan:
    """Choose as many positions as leave room for their sums: they share what is read of the filter."""
    if problem.groups > 1:
        return Plan(1)
    return Plan(next(count for count in _POSITIONS if count * _sums(problem) <= _MOST_SUMS_TOGETHER))


def plans(problem: Problem) -> list[tuple[float, Plan]]:
    """Return the plans worth measuring, with their costs, the cheapest first."""
    most = default_plan(problem).positions
    moved = _BYTE * problem.min_bytes
    return [(max(problem.macs * (1 + 1 / count), moved), Plan(count)) for count in (*_POSITIONS, 1) if count <= most]


def narrow(problem: Problem, plan: Plan | None = None) -> Kernel:
    """Build the kernel of `problem`; the packed filter is ``[G, Ci, *K, Co]``, or ``[Ci, *K, Co, G]``."""
    together = (plan or default_plan(problem)).positions
    dtype, last = problem.accumulate_dtype, problem.data_format == "NXC"
    kernel = (1,) * (3 - problem.rank) + problem.kernel
    within = (problem.in_channels, *kernel, problem.out_channels)
    shape = (*within, problem.groups) if last else (problem.groups, *within)
    elements = math.prod(shape)

    def place(number: Expr) -> tuple[Index, Index, Index, list[Index], list[Expr]]:
        index = unravel(number, shape)
        g = index.pop() if last else index.pop(0)
        return g, index[0], index[-1], index[1:-1], []

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
                _compute(args, vector if aligned else 1, shape, positions)

        aligned_or_not([args.out] if vector > 1 else [], 4 * vector, launches)
        finish_sums(args, 1)
    pack = pack_filter(problem, elements, dtype, [(0, elements, place)])
    return Kernel(problem, function.done, pack, "cuda_narrow", {"positions": together}, elements, dtype)


def _threads(total: int, together: int) -> int:
    """Return the threads of a block: fewer where multiprocessors would have less than two blocks each."""
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


def _compute(args: Arguments, vector: int, shape: tuple[int, ...], positions: list[_Position]) -> None:
    """Compute all phases of `positions`, which share a group where there are several."""
    problem = args.problem
    dtype, zero = problem.accumulate_dtype, tirx.const(0, problem.accumulate_dtype)
    found = sections(problem, 1, 1)
    places: dict[tuple[int, ...], int] = {}  # of the sum of a channel and the phases of the axes
    for section in found:
        for co in range(problem.out_channels):
            for phases in itertools.product(*(range(run.start, run.start + run.count) for run in section.runs)):
                places[(co, *phases)] = len(places)
    sums, read, weight = local(len(places) * len(positions), dtype), local(len(positions), dtype), local(1, dtype)
    with build.unroll(len(places) * len(positions)) as i:
        build.buffer_store(sums, zero, [i])
    with build.serial(args.const(0), args.const(problem.in_channels)) as ci:
        for section in found:
            for taps in itertools.product(*map(range, section.taps)):
                for number, position in enumerate(positions):
                    x, inside = section.source(position.at, taps)
                    element = args.accumulated(position.n, position.group * problem.in_channels + ci, x)
                    element = tirx.if_then_else(tirx.all(*inside), element, zero) if inside else element
                    build.buffer_store(read, element, [number])
                for phases in itertools.product(*map(range, section.counts)):
                    starts = [phase + run.start for phase, run in zip(phases, section.runs, strict=True)]
                    for co in range(problem.out_channels):
                        parts = [ci, *section.element(taps, phases), co]
                        group = positions[0].group
                        where: Index = args.const(0)
                        order = [*parts, group] if problem.data_format == "NXC" else [group, *parts]
                        for part, extent in zip(order, shape, strict=True):
                            where = where * extent + part
                        build.buffer_store(weight, args.packed[where], [0])
                        for number in range(len(positions)):
                            at = places[(co, *starts)] * len(positions) + number
                            build.buffer_store(sums, sums[at] + read[number] * weight[0], [at])
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
