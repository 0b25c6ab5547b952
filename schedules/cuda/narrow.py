"""Depthwise and narrow groups: one thread computes all phases of one position for all channels of one group.

There is nothing to reuse between groups, so the bound is memory. Threads run along the data's fastest axis: neighbours
read and write neighbouring elements. A thread reads each element of the data once for all phases; where a row is a
whole number of positions, its phases of the last axis are written as one vector.

The filter of a group is read by all threads of its positions at the same time, from cache; where channels are last,
neighbouring threads have neighbouring groups, and the packed filter has groups last too.
"""

from __future__ import annotations

import itertools
import math

from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import tirx as build

from tvm_deconv.compute.gather import Index, sections, unravel
from tvm_deconv.compute.phases import Geometry
from tvm_deconv.problem import Problem
from tvm_deconv.schedules.cuda.blocks import finish_sums
from tvm_deconv.schedules.cuda.emit import Arguments, Kernel, deconv, each, local, pack_filter, when

_MOST_SUMS = 64
_MOST_PRODUCTS = 512
_LEAST_GROUPS = 16
_VECTORS = (2, 4)


def narrow_groups(problem: Problem) -> bool:
    """Many groups, whose outputs of one position fit into registers and whose products can be written out."""
    geometry = Geometry.of(problem)
    phases = math.prod(sum(run.count for run in axis.runs) for axis in geometry.axes)
    products = sum(math.prod(run.taps * run.count for run in runs) for runs in geometry.runs) * problem.out_channels
    return (
        problem.groups >= _LEAST_GROUPS
        and 0 < phases * problem.out_channels <= _MOST_SUMS
        and products <= _MOST_PRODUCTS
        and problem.in_channels <= 8
    )


def narrow(problem: Problem) -> Kernel:
    """Build the kernel of `problem`; the packed filter is ``[G, Ci, *K, Co]``, or ``[Ci, *K, Co, G]``."""
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
        order = (
            (args.geometry.batch, *extents, problem.groups)
            if last
            else (
                args.geometry.batch,
                problem.groups,
                *extents,
            )
        )
        with each(math.prod(order)) as number:
            n, *rest = unravel(number.astype(args.index), order)
            group = rest.pop() if last else rest.pop(0)
            _position(args, vector, shape, n, group, rest)
        finish_sums(args, 1)
    pack = pack_filter(problem, elements, dtype, [(0, elements, place)])
    decisions = {"vector": vector} | ({"alignment": 16} if vector > 1 else {})
    return Kernel(problem, function.done, pack, "cuda_narrow", decisions, elements, dtype)


def _vector(problem: Problem) -> int:
    """Return how many phases of the last axis are written at once."""
    axis = Geometry.of(problem).axes[2]
    whole = problem.output_spatial[-1] % axis.stride == 0 and sum(run.count for run in axis.runs) == axis.stride
    plain = problem.data_format == "NCX" and problem.output_dtype in ("float32", "int32")
    return axis.stride if plain and whole and axis.stride in _VECTORS else 1


def _position(
    args: Arguments, vector: int, shape: tuple[int, ...], n: Index, group: Index, position: list[Index]
) -> None:
    """Compute all phases of one position."""
    problem, geometry = args.problem, args.geometry
    dtype, zero = problem.accumulate_dtype, tirx.const(0, problem.accumulate_dtype)
    found = sections(problem, 1, 1)
    places: dict[tuple[int, ...], int] = {}  # of the sum of a channel and the phases of the axes
    for section in found:
        for co in range(problem.out_channels):
            for phases in itertools.product(*(range(run.start, run.start + run.count) for run in section.runs)):
                places[(co, *phases)] = len(places)
    sums, read = local(len(places), dtype), local(1, dtype)
    with build.unroll(len(places)) as i:
        build.buffer_store(sums, zero, [i])
    with build.serial(args.const(0), args.const(problem.in_channels)) as ci:
        channel = group * problem.in_channels + ci
        for section in found:
            for taps in itertools.product(*map(range, section.taps)):
                x, inside = section.source(position, taps)
                element = args.accumulated(n, channel, x)
                build.buffer_store(
                    read, tirx.if_then_else(tirx.all(*inside), element, zero) if inside else element, [0]
                )
                for phases in itertools.product(*map(range, section.counts)):
                    starts = [phase + run.start for phase, run in zip(phases, section.runs, strict=True)]
                    for co in range(problem.out_channels):
                        parts = [ci, *section.element(taps, phases), co]
                        parts = [*parts, group] if problem.data_format == "NXC" else [group, *parts]
                        where: Index = args.const(0)
                        for part, extent in zip(parts, shape, strict=True):
                            where = where * extent + part
                        at = places[(co, *starts)]
                        build.buffer_store(sums, sums[at] + read[0] * args.packed[where], [at])
    for (co, *place), at in places.items():
        if place[2] % vector:
            continue  # written with the one before
        index, inside = [], []
        for y, phase, axis, extent in zip(position, place, geometry.axes, geometry.output, strict=True):
            index.append(y * axis.stride + phase)
            if (axis.positions - 1) * axis.stride + phase >= extent:
                inside.append(index[-1] < extent)
        channel = group * problem.out_channels + co
        with when(inside):
            if vector == 1:
                args.finish(n, channel, index, sums[at])
            else:
                row = [places[(co, *place[:2], phase)] for phase in range(vector)]
                args.finish_vector(n, channel, index, [sums[number] for number in row])
