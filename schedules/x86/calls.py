"""Plans of problems with dynamic extents: their calls are of many lengths."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import TypeVar

from tvm_deconv.compute.direct_layout import Tile
from tvm_deconv.compute.indexing import tiles_of_channels
from tvm_deconv.compute.matrix_layout import MatrixTile
from tvm_deconv.compute.phases import Geometry
from tvm_deconv.problem import Problem
from tvm_deconv.problem.arithmetic import round_up
from tvm_deconv.schedules.x86 import matrix_tiles, tiles

_AnyPlan = TypeVar("_AnyPlan", tiles.Plan, matrix_tiles.MatrixPlan)

#: With a dynamic spatial extent, a block with at least this many tiles of channels shares its data among them, and
#: blocks follow one another; with fewer, blocks are the tasks.
SHARERS = 4


def for_all_calls(
    problem: Problem, candidates: Sequence[tuple[float, _AnyPlan]], form: str, unit: int
) -> Sequence[tuple[float, _AnyPlan]]:
    """Return the candidates that serve calls of all extents, adapted to them; all of them if extents are fixed.

    A row that is dynamic may always have a next block, so it is cut into multiples of `unit` positions. Whole register
    tiles compute it, which costs more for calls of other lengths than for the representative one.
    """
    if not problem.dynamic_axes:
        return candidates
    geometry, unit = Geometry.of(problem), unit if problem.rank in problem.dynamic else 1
    adapted = [
        (
            cost * _unevenness(problem, plan.tile),
            replace(plan, share_data=math.prod(tiles_of_channels(geometry, form, plan.tile)) >= SHARERS),
        )
        for cost, plan in candidates
        if plan.tile.width % unit == 0
    ]
    return sorted(adapted, key=lambda candidate: candidate[0])


def _unevenness(problem: Problem, tile: Tile | MatrixTile) -> float:
    """Return the cost of calls of other lengths relative to that of the representative one.

    A block of one row ends with it, one of several rows computes them to their end.
    """
    if problem.rank not in problem.dynamic:
        return 1.0
    representative = problem.data_spatial[-1]
    if tile.images == tile.depth == tile.height == 1:
        return _mean_padding(min(representative, tile.width), tile.positions)
    return _mean_padding(representative, tile.width)


@cache
def _mean_padding(representative: int, unit: int) -> float:
    """Return the mean padding to whole units of lengths from a quarter of `representative` to it, relative to its."""

    def padded(length: int) -> float:
        return round_up(length, unit) / length

    lengths = range(representative // 4 + 1, representative + 1)
    return sum(map(padded, lengths)) / len(lengths) / padded(representative)
