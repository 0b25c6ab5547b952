"""The kernel for every problem: one thread for each output element, which gathers its taps.

It is the default if no other kernel supports the problem: many combinations of phases (strides and dilations that do
not divide each other). Its bound is the arithmetic of indices.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import tirx as build

from tvm_deconv.compute.indexing import Index, unravel
from tvm_deconv.problem import Problem
from tvm_deconv.problem.arithmetic import ceil_div
from tvm_deconv.schedules.contract import Algorithm, Kernel
from tvm_deconv.schedules.cuda.emit import (
    ARRIVAL,
    MULTIPROCESSORS,
    THREADS,
    Arguments,
    as_it_is,
    deconv,
    each,
    local,
    one_task,
    pack_filter,
    when,
)
from tvm_deconv.schedules.cuda.predicates import always, is_for_no_other
from tvm_deconv.targets import CudaTarget

_PRODUCT = 20.0  # cost of a product, in multiply-adds


@dataclass(frozen=True, slots=True)
class Plan:
    """The only plan: there is nothing to decide."""

    @property
    def knobs(self) -> dict[str, int]:
        """The plan as integers: it has no knobs."""
        return {}


def candidates(problem: Problem, target: CudaTarget) -> list[tuple[float, Plan]]:  # noqa: ARG001
    """Return the only plan with its cost."""
    blocks = max(1, -(-math.prod(problem.output_shape) // THREADS))
    imbalance = -(-blocks // MULTIPROCESSORS) * MULTIPROCESSORS / blocks
    taps = math.prod(ceil_div(k, stride) for k, stride in zip(problem.kernel, problem.strides, strict=True))
    return [(max(_PRODUCT * problem.macs * imbalance, ARRIVAL * problem.in_channels * taps), Plan())]


def build_kernel(problem: Problem, target: CudaTarget, plan: Plan) -> Kernel:  # noqa: ARG001
    """Build the kernel; the packed filter is ``[G, Ci, *K, Co]`` in the accumulator's type."""
    elements = problem.groups * problem.in_channels * problem.out_channels * math.prod(problem.kernel)
    kernel = (1,) * (3 - problem.rank) + problem.kernel
    extents = (problem.groups, problem.in_channels, *kernel, problem.out_channels)

    def place(number: Expr) -> tuple[Index, Index, Index, list[Index], list[Expr]]:
        g, ci, *taps, co = unravel(number, extents)
        return g, ci, co, taps, []

    pack = pack_filter(problem, elements, problem.accumulate_dtype, [(0, elements, place, as_it_is)])
    with deconv(problem, elements, problem.accumulate_dtype) as (function, args), each(args.outputs) as flat:
        _gather(args, kernel, extents, flat)
    return Kernel(problem, function.done, pack, "cuda_generic", plan.knobs, elements, problem.accumulate_dtype)


def _gather(args: Arguments, kernel: tuple[int, ...], extents: tuple[int, ...], flat: Expr) -> None:
    """Sum the products that reach output element number `flat`: 'k' reaches it if the stride divides i + pb - d*k."""
    problem, geometry, const = args.problem, args.geometry, args.const
    n, channel, i = args.output_at(flat)
    group = channel // problem.out_channels if problem.groups > 1 else const(0)
    co = channel % problem.out_channels if problem.groups > 1 else channel
    total = local(1, problem.accumulate_dtype)
    build.buffer_store(total, tirx.const(0, problem.accumulate_dtype), [0])
    fill = 3 - problem.rank
    strides, dilations = (1,) * fill + problem.strides, (1,) * fill + problem.dilations
    pads = (0,) * fill + problem.pads_begin
    with build.grid(*(const(extent) for extent in kernel)) as taps:
        shifted = [build.bind(o + (pad - tap * d)) for o, pad, tap, d in zip(i, pads, taps, dilations, strict=True)]
        reaches = [value >= 0 for value in shifted]
        reaches += [tirx.truncmod(value, const(s)) == 0 for value, s in zip(shifted, strides, strict=True) if s > 1]
        x = [tirx.truncdiv(value, const(s)) for value, s in zip(shifted, strides, strict=True)]
        reaches += [index < extent for index, extent in zip(x, geometry.data, strict=True)]
        with when(reaches), build.serial(const(0), const(problem.in_channels)) as ci:
            element = args.accumulated(n, group * problem.in_channels + ci, x)
            at: Index = group
            for part, extent in zip((ci, *taps, co), extents[1:], strict=True):
                at = at * extent + part
            build.buffer_store(total, total[0] + element * args.packed[at], [0])
    args.finish(n, channel, i, total[0])


ALGORITHM = Algorithm(
    name="cuda_generic",
    supports=always,
    is_default_for=is_for_no_other,
    candidates=candidates,
    read=lambda knobs: Plan(**knobs),
    tasks=one_task,
    build=build_kernel,
)
