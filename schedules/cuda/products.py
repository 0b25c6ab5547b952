"""The products of a problem: along which axes phases are joined or merged: fewer products of more columns.

Phases along an axis are joined if they are counted from the beginning of the uncropped output and more of them then
read the same data (`compute/phases.py`). They are merged if all are one run with the taps of them all, some of which
are beyond the filter. Along the last axis either also brings neighbours of the output together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from tvm_deconv.compute.phases import AxisPhases, Geometry, Run
from tvm_deconv.problem import Problem

#: Of merged phases, some of which multiply data by zeros.
CAVEAT = "an infinity or NaN spreads to the other phases of its positions"
#: Combinations of phases with the same taps, at most: each is a copy of a kernel's body.
MOST_PRODUCTS = 27


@lru_cache(256)
def joined(problem: Problem, axes: int) -> Geometry:
    """Return the geometry whose phases are joined along the last `axes`."""
    geometry, first = Geometry.of(problem), 3 - axes
    uncropped = Geometry.of(problem, uncropped=True)
    d, h, w = geometry.axes[:first] + uncropped.axes[first:]
    return replace(geometry, axes=(d, h, w))


def choices(problem: Problem) -> list[int]:
    """Return numbers of last axes along which phases may be joined: those that make different and few products."""
    geometries = [joined(problem, axes) for axes in range(4)]
    new = [axes for axes, geometry in enumerate(geometries) if geometry not in geometries[:axes]]
    return [axes for axes in new if len(geometries[axes].runs) <= MOST_PRODUCTS]


@lru_cache(256)
def merged(problem: Problem, axes: int) -> Geometry:
    """Return the geometry whose phases are merged along the last `axes`, where these can be one run."""
    geometry, first = Geometry.of(problem), 3 - axes
    uncropped = Geometry.of(problem, uncropped=True)
    last = [_merged(*both) for both in zip(geometry.axes[first:], uncropped.axes[first:], strict=True)]
    d, h, w = *geometry.axes[:first], *last
    return replace(geometry, axes=(d, h, w))


def merging(problem: Problem) -> list[int]:
    """Return numbers of last axes along which phases may be merged: those that make products that no joining makes."""
    geometries = [*(joined(problem, axes) for axes in range(4)), *(merged(problem, axes) for axes in range(1, 4))]
    new = [axes for axes in range(1, 4) if geometries[axes + 3] not in geometries[: axes + 3]]
    return [axes for axes in new if len(geometries[axes + 3].runs) <= MOST_PRODUCTS]


def _merged(*choices: AxisPhases) -> AxisPhases:
    """Return the phases of one of the choices as one run, with the fewest taps and positions; or else the first."""
    found = [replace(axis, runs=(run,)) for axis in choices if (run := _one_run(axis.runs)) is not None]
    return min(found, key=lambda axis: (axis.runs[0].taps, axis.end), default=choices[0])


def _one_run(runs: Sequence[Run]) -> Run | None:
    """Return one run of all phases, with the taps of them all; None if phases are missing or their taps differ."""
    if not runs:
        return None
    first, x_step, k_step = runs[0], runs[0].x_step, runs[0].k_step
    count = sum(run.count for run in runs)
    x0, last = max(run.x0 for run in runs), min(run.x0 - (run.taps - 1) * x_step for run in runs)
    # Where the first tap of them all is, of the filter and beyond a tap, by each of the runs.
    begins = {
        (run.k0 - (x0 - run.x0) // x_step * k_step - (run.start - first.start), (x0 - run.x0) % x_step) for run in runs
    }
    (k0, beyond), *others = begins
    if others or beyond or runs[-1].start + runs[-1].count - first.start != count:
        return None
    return Run(first.start, count, (x0 - last) // x_step + 1, k0, k_step, x0, x_step)
