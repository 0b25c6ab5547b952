"""A second plan for calls on several threads.

The plan that is fastest on one thread may have too few tasks for several, or a number that leaves threads idle at the
end. A kernel then holds another plan besides, and the number of threads of a call chooses. Both plans add up each
output in the same order: their results are the same to the last bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from tvm import tirx
from tvm.tirx import IfThenElse, PrimFunc

from tvm_deconv.compute.matrix_layout import MatrixTile
from tvm_deconv.compute.phases import Geometry
from tvm_deconv.problem import Problem
from tvm_deconv.schedules.contract import AnyAlgorithm, Kernel
from tvm_deconv.schedules.x86.variants import filter_offsets, inlined, pack_all, packed_filter
from tvm_deconv.schedules.x86.vectors import accumulator_lanes
from tvm_deconv.targets import CpuTarget

#: The numbers of threads for which tasks should suffice.
THREADS = (2, 4, 8, 16, 32, 64)
#: The least time by which a second plan must shorten the calls for some number of threads.
_LEAST_GAIN = 1.05
#: The most that a second plan may cost on one thread, relative to the first.
_MOST_COST = 1.5
#: Relative cost of another packed filter besides the first.
_OTHER_FILTER = 1.05
#: Calls of fewer cycles on one thread gain little from a second one.
_SHORTEST = 100_000.0
#: The launcher's function that returns the number of threads of the call.
_CALL_THREADS = "tvm_deconv_call_threads"


def imbalance(tasks: int, threads: int) -> float:
    """Return the time until the last of equal `tasks` ends on `threads` threads, relative to an even share."""
    return -(-tasks // threads) * threads / tasks


@dataclass(frozen=True, slots=True)
class _Costed:
    """A plan with its cost and its number of tasks."""

    plan: Any
    cost: float
    tasks: int

    def on(self, threads: int) -> float:
        """Return the cost on `threads` threads, relative to an even share."""
        return self.cost * imbalance(self.tasks, threads)


def parallel_plan(problem: Problem, target: CpuTarget, algorithm: AnyAlgorithm, plan: Any) -> tuple[int, Any] | None:
    """Return a plan for calls on several threads, and the least number of threads that it is for.

    It is of the same `algorithm` and adds up in the same order as `plan`, which serves all other calls. Return None if
    `plan` serves all.
    """
    options = algorithm.candidates(problem, target)
    cost = next((cost for cost, option in options if option == plan), options[0][0])
    serial = _Costed(plan, cost, algorithm.tasks(problem, plan))
    if serial.cost * problem.macs / (2 * accumulator_lanes(problem, target)) < _SHORTEST:
        return None
    if all(imbalance(serial.tasks, threads) < _LEAST_GAIN for threads in THREADS):
        return None
    sums = _sums(problem, plan)
    same = [
        _Costed(option, cost * (1.0 if _filter(option) == _filter(plan) else _OTHER_FILTER), 0)
        for cost, option in options
        if cost <= _MOST_COST * serial.cost and _sums(problem, option) == sums
    ]
    parallel = [replace(option, tasks=algorithm.tasks(problem, option.plan)) for option in same]
    best = min(parallel, key=lambda option: math.prod(option.on(threads) for threads in THREADS), default=serial)
    least = _least_threads(serial, best)
    return None if least is None else (least, best.plan)


def _least_threads(serial: _Costed, parallel: _Costed) -> int | None:
    """Return the fewest threads from which on `parallel` is never slower; None if it gains too little."""
    least, gain = None, 1.0
    for threads in reversed(THREADS):
        ratio = serial.on(threads) / parallel.on(threads)
        if ratio < 1.0:
            break
        least, gain = threads, max(gain, ratio)
    return least if gain >= _LEAST_GAIN else None


def _sums(problem: Problem, plan: Any) -> tuple[int, ...]:
    """Return what decides the order in which a plan adds up: the transforms, and where their tiles begin."""
    tile = plan.tile
    axes = Geometry.of(problem, bool(tile.uncropped)).axes
    begins = (
        0 if m == 1 or size % m == 0 or size >= axis.positions else size
        for m, size, axis in zip(tile.outputs, tile.block[1:], axes, strict=True)
    )
    # Strassen's algorithm pairs the rows of a block, and halves its columns.
    pairs = (*tile.block, tile.channels) if isinstance(tile, MatrixTile) and tile.strassen else ()
    return *tile.outputs, *begins, tile.uncropped, plan.halves, *pairs


def _filter(plan: Any) -> tuple[int, ...]:
    """Return what decides the layout of the packed filter."""
    tile = plan.tile
    return tile.channels, tile.vectors if isinstance(tile, MatrixTile) else tile.phases


def select_by_threads(serial: Kernel, parallel: Kernel, least: int) -> Kernel:
    """Return a kernel that is `parallel` for calls on at least `least` threads, and `serial` for others.

    The knobs of `parallel` that differ have its name in front of them.
    """
    kernels = parallel, serial
    packs = [kernel.pack for kernel in kernels]
    offsets, elements = filter_offsets(packs, [kernel.packed_elements for kernel in kernels])
    data, packed, *others = serial.deconv.params
    parameters = [data, packed_filter(elements, packed.dtype), *others]
    extents = {extent.name: extent for extent in data.shape if isinstance(extent, tirx.Var)}
    parts = [
        inlined(kernel.deconv, parameters, extents, offset) for kernel, offset in zip(kernels, offsets, strict=True)
    ]
    several = tirx.call_extern("int32", _CALL_THREADS) >= tirx.const(least, "int32")
    other = {f"parallel.{name}": value for name, value in parallel.knobs.items() if serial.knobs.get(name) != value}
    return replace(
        serial,
        deconv=PrimFunc(parameters, IfThenElse(several, *parts)).with_attrs(serial.deconv.attrs),
        pack=pack_all(packs, offsets, elements),
        knobs={**serial.knobs, "parallel": least, **other},
        packed_elements=elements,
    )
