"""Further plans for calls on several threads.

The plan that is fastest on one thread may have too few tasks for several, or a number that leaves threads idle at the
end. A kernel then holds further plans, for few threads or for many, and the number of threads of a call chooses. All
plans add up each output in the same order: their results are the same to the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tvm import tirx
from tvm.tirx import IfThenElse, PrimFunc

from tvm_deconv.compute.col2im import ColumnTile
from tvm_deconv.compute.matrix_layout import MatrixTile
from tvm_deconv.compute.phases import Geometry
from tvm_deconv.problem import Problem
from tvm_deconv.schedules.contract import AnyAlgorithm, Kernel, imbalance
from tvm_deconv.schedules.x86.variants import call_extents, filter_offsets, inlined, pack_all, packed_filter
from tvm_deconv.schedules.x86.vectors import accumulator_lanes
from tvm_deconv.targets import CpuTarget

#: The numbers of threads for which tasks should suffice, in groups that may each have a plan.
THREADS = ((2,), (4,), (8, 16), (32, 64))
#: The least factor by which a further plan must shorten calls on some number of threads.
_LEAST_GAIN = 1.1
#: The most that a further plan may cost on one thread, relative to the first.
_MOST_COST = 1.5
#: Relative cost of another packed filter besides the first.
_OTHER_FILTER = 1.05
#: Calls of fewer cycles on one thread gain little from a second one.
_SHORTEST = 100_000.0
#: The launcher's function that returns the number of threads of the call.
_CALL_THREADS = "tvm_deconv_call_threads"


@dataclass(frozen=True, slots=True)
class _Costed:
    """A plan with its cost and its number of tasks."""

    plan: Any
    cost: float
    tasks: int

    def on(self, threads: int) -> float:
        """Return the cost on `threads` threads, relative to an even share."""
        return self.cost * imbalance(self.tasks, threads)


def parallel_plans(problem: Problem, target: CpuTarget, algorithm: AnyAlgorithm, plan: Any) -> list[tuple[int, Any]]:
    """Return further plans for calls on several threads, each with the least number of threads that it is for.

    They are of the same `algorithm` and add up in the same order as `plan`, which serves calls on fewer threads.
    """
    options = algorithm.candidates(problem, target)
    cost = next((cost for cost, option in options if option == plan), options[0][0])
    current = serial = _Costed(plan, cost, algorithm.tasks(problem, plan))
    enough = all(imbalance(serial.tasks, threads) < _LEAST_GAIN for counts in THREADS for threads in counts)
    if enough or cost * problem.macs / (2 * accumulator_lanes(problem, target)) < _SHORTEST:
        return []
    sums, filter_layout = _sums(problem, plan), _filter(plan)
    same = [
        _Costed(
            option,
            doubted * (1.0 if _filter(option) == filter_layout else _OTHER_FILTER),
            algorithm.tasks(problem, option),
        )
        for cost, option in options
        if (doubted := _doubted(cost, serial.cost)) <= _MOST_COST * serial.cost and _sums(problem, option) == sums
    ]
    plans: list[tuple[int, Any]] = []
    for counts in THREADS:
        best = min(same, key=lambda option: math.prod(map(option.on, counts)), default=current)
        least = _least_threads(current, best, counts)
        if least is not None:
            plans.append((least, best.plan))
            current = best
    return plans


def _doubted(cost: float, serial: float) -> float:
    """Return the cost to expect of a plan beside the one of cost `serial`, which is the fastest on one thread.

    It may have been measured as that. What costs have as faster is then slower, by no less than they are wrong about.
    """
    return max(cost, serial**2 / cost)


def _least_threads(current: _Costed, other: _Costed, counts: Sequence[int]) -> int | None:
    """Return the fewest threads of `counts` from which on `other` is never slower; None if it gains too little."""
    least, gain = None, 1.0
    for threads in reversed(counts):
        ratio = current.on(threads) / other.on(threads)
        if ratio < 1.0:
            break
        least, gain = threads, max(gain, ratio)
    return least if gain >= _LEAST_GAIN else None


def _sums(problem: Problem, plan: Any) -> tuple[int, ...]:
    """Return what decides the order in which a plan adds up: the transforms, and where their tiles begin."""
    tile = plan.tile
    if isinstance(tile, ColumnTile):  # input channels, then taps
        return ()
    axes = Geometry.of(problem, bool(tile.uncropped)).axes
    begins = (
        0 if m == 1 or size % m == 0 or size >= axis.positions else size
        for m, size, axis in zip(tile.outputs, tile.block[1:], axes, strict=True)
    )
    pairs: tuple[int, ...] = ()
    if isinstance(tile, MatrixTile) and tile.strassen:
        # It pairs the positions of a block, neighbours where rows are even, and halves its columns.
        pairs = (tile.channels, *(tile.block if tile.width % 2 else ()))
    return *tile.outputs, *begins, tile.uncropped, plan.halves, *pairs


def _filter(plan: Any) -> tuple[int, ...]:
    """Return what decides the layout of the packed filter."""
    tile = plan.tile
    if isinstance(tile, ColumnTile):
        return (tile.columns,)
    return tile.channels, tile.vectors if isinstance(tile, MatrixTile) else tile.phases


def select_by_threads(serial: Kernel, others: Sequence[tuple[int, Kernel]]) -> Kernel:
    """Return a kernel that is the last of `others` that the threads of a call suffice for, else `serial`.

    The numbers of threads of `others` ascend. Their knobs that differ have that number in front of them.
    """
    kernels = [serial, *(kernel for _, kernel in others)]
    packs = [kernel.pack for kernel in kernels]
    offsets, elements = filter_offsets(packs, [kernel.packed_elements for kernel in kernels])
    data, packed, *further = serial.deconv.params
    parameters = [data, packed_filter(elements, packed.dtype), *further]
    extents = call_extents(serial.deconv)
    body, *bodies = (
        inlined(kernel.deconv, parameters, extents, offset) for kernel, offset in zip(kernels, offsets, strict=True)
    )
    knobs = dict(serial.knobs)
    threads = tirx.call_extern("int32", _CALL_THREADS)
    for (least, kernel), other in zip(others, bodies, strict=True):
        body = IfThenElse(threads >= tirx.const(least, "int32"), other, body)
        differing = {name: value for name, value in kernel.knobs.items() if serial.knobs.get(name) != value}
        knobs |= {f"threads{least}.{name}": value for name, value in differing.items()}
    return replace(
        serial,
        deconv=PrimFunc(parameters, body).with_attrs(serial.deconv.attrs),
        pack=pack_all(packs, offsets, elements),
        knobs=knobs,
        packed_elements=elements,
    )
