"""What the definitions have in common: forms, blocks of positions, and indices of packed and caller's arrays."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Protocol

from tvm import ir, te, tirx
from tvm.ir import Expr
from tvm.tirx import PrimFunc

from tvm_deconv.compute.extents import Extent, Extents
from tvm_deconv.compute.phases import Geometry, Run
from tvm_deconv.compute.storage import to_accumulator
from tvm_deconv.problem import Problem

ROWS = "rows"
CHANNELS = "channels"
GROUPS = "groups"
LEAD = 6  # the axes nb, db, hb, wb, g, co with which every stage but the last begins


class BlockTile(Protocol):
    """What the tiles of all definitions say: positions along the last axis, and output channels, of a block."""

    @property
    def width(self) -> int:
        """Positions along the last axis."""

    @property
    def channels(self) -> int:
        """Output channels."""


def byte_aligned(func: PrimFunc) -> PrimFunc:
    """Return `func` with buffers aligned to one byte, so that generated code never uses an aligned move.

    Callers' arrays are aligned to their elements only, and an aligned move of such an address ends the process.
    Buffer types cannot be changed in place; their serialised form can.
    """
    graph = json.loads(ir.save_json(func))
    for node in graph["nodes"]:
        if node["type"] == "tirx.BufferType":
            node["data"]["data_alignment"] = 1
    return ir.load_json(json.dumps(graph))


def tiles_of_channels(geometry: Geometry, form: str, tile: BlockTile) -> tuple[int, int]:
    """Number of tiles of groups, and of tiles of the output channels of a group."""
    if form == GROUPS:
        return -(-geometry.groups // tile.channels), geometry.out_channels
    return geometry.groups, -(-geometry.out_channels // tile.channels)


def spans(geometry: Geometry, block: Sequence[int]) -> tuple[int, int, int]:
    """Return the positions that the outputs of a `block` of that many along three axes take."""
    axes = zip(geometry.axes, block, geometry.dynamic, strict=True)
    first, second, third = (axis.span(positions, dynamic) for axis, positions, dynamic in axes)
    return first, second, third


def ravel(index: Sequence[Expr | int], shape: Sequence[Expr | int]) -> Expr:
    """Return the number of the element at `index` of an array of that `shape`, the last axis running fastest."""
    number: Expr = tirx.const(0, "int64")
    for i, extent in zip(index, shape, strict=True):
        number = number * extent + i
    return number


def split_index(index: Expr, size: int, count: Extent) -> tuple[Expr, Expr]:
    """Return the number of the block of `size` that `index` lies in, of `count`, and where in it.

    Where there is one block nothing is divided: it may hold fewer than `size`, and more than one remainder in a row
    is not understood where regions are computed.
    """
    several = not isinstance(count, int) or count > 1
    return (index // size, index % size) if several else (tirx.const(0, "int64"), index)


def within_runs(phases: Sequence[Expr], runs: Sequence[Run], strides: Sequence[int]) -> tuple[list[Expr], list[Expr]]:
    """Return where in its run the phase of each axis is, and the conditions under which all are in their runs.

    The places are clamped: an index outside of a buffer, even one that is discarded, lets simplification go wrong.
    """
    local: list[Expr] = []
    conditions: list[Expr] = []
    for phase, run, stride in zip(phases, runs, strides, strict=True):
        within = phase - run.start
        if run.start > 0:
            conditions.append(phase >= run.start)
            within = tirx.max(within, 0)
        if run.start + run.count < stride:
            conditions.append(phase < run.start + run.count)
            within = tirx.min(within, run.count - 1)
        local.append(within)
    return local, conditions


def data_element(
    problem: Problem,
    geo: Geometry,
    extents: Extents,
    data: te.Tensor,
    block: tuple[int, int, int, int],
    within: Sequence[Expr],
    at: Sequence[Expr],
    group: Expr,
    ci: Expr,
    inside: Sequence[Expr] = (),
) -> Expr:
    """Return what the packed block `at` (nb, db, hb, wb) has at `within` (n, d, h, w), converted to the accumulator.

    That is zero where the data end, and where not all of `inside` hold. `block` counts images and positions of a block.
    """
    accumulator = problem.accumulate_dtype
    n = at[0] * block[0] + within[0]
    x = [b * length + i + axis.low for b, length, i, axis in zip(at[1:], block[1:], within[1:], geo.axes, strict=True)]
    conditions = [*inside, n < extents.batch]
    for index, extent in zip(x, extents.data, strict=True):
        conditions += [index >= 0, index < extent]
    channel, place = group * geo.in_channels + ci, x[3 - problem.rank :]
    element = data[(n, *place, channel) if problem.data_format == "NXC" else (n, channel, *place)]
    return tirx.if_then_else(
        tirx.all(*conditions), to_accumulator(element, problem.dtype, accumulator), tirx.const(0, accumulator)
    )


def has_whole_vectors(problem: Problem, form: str, tile: BlockTile, lanes: int) -> bool:
    """Whether what a block makes is stored by vectors of `lanes`, none of them in part.

    In `form` ROWS of `N C *X` these are positions of each phase; else, of `N *X C`, channels.
    """
    row, output = tile.width * Geometry.of(problem).axes[2].stride, problem.output_spatial[-1]
    if problem.rank in problem.dynamic or (problem.data_format == "NCX") != (form == ROWS):
        return False
    if form == ROWS:
        return output % row == 0 and tile.width % lanes == 0
    contiguous = problem.groups if form == GROUPS else problem.out_channels
    whole = contiguous % tile.channels == 0 and (form == CHANNELS or problem.out_channels == 1)
    return whole and tile.channels % lanes == 0 and row <= output
