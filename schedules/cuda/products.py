"""The products of a problem: along which axes phases are joined, which makes fewer products of more columns.

Phases along an axis are joined if they are counted from the beginning of the uncropped output and more of them then
read the same data (`compute/phases.py`). Along the last axis that also brings neighbours of the output together.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from tvm_deconv.compute.phases import Geometry
from tvm_deconv.problem import Problem

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
