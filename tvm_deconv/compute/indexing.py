"""Forms, blocks of positions, and indices of packed arrays and of the caller's, for all definitions."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from tvm import te, tirx
from tvm.ir import Expr
from tvm.tirx import PrimFunc
from tvm_ffi import serialization

from tvm_deconv.compute.extents import Extent, Extents
from tvm_deconv.compute.phases import Geometry, Run
from tvm_deconv.compute.storage import to_accumulator
from tvm_deconv.compute.words import WORD, Words
from tvm_deconv.problem import Problem
from tvm_deconv.problem.arithmetic import ceil_div

Index: TypeAlias = Expr | int

ROWS = "rows"
CHANNELS = "channels"
GROUPS = "groups"
INPUTS = "inputs"
#: The leading axes of every stage behind the packed data but ``out``: nb, db, hb, wb, g, co.
LEAD = 6


class BlockTile(Protocol):
    """The part of a tile that all definitions share."""

    @property
    def width(self) -> int:
        """Positions of a block along the last axis."""

    @property
    def channels(self) -> int:
        """Output channels of a block."""


def byte_aligned(func: PrimFunc) -> PrimFunc:
    """Return `func` with buffers aligned to one byte, so that generated code never uses an aligned move.

    Callers align their arrays to an element only, and an aligned move of such an address ends the process. TVM cannot
    change a buffer's type in place, so this goes through the serialised form.
    """
    graph = re.sub(r'("data_alignment": ?)\d+', r"\g<1>1", serialization.to_json_graph_str(func))
    aligned: PrimFunc = serialization.from_json_graph_str(graph)
    return aligned


def tiles_of_channels(geometry: Geometry, form: str, tile: BlockTile) -> tuple[int, int]:
    """Return the number of tiles of groups, and of tiles of the output channels of a group."""
    if form == GROUPS:
        return ceil_div(geometry.groups, tile.channels), geometry.out_channels
    return geometry.groups, ceil_div(geometry.out_channels, tile.channels)


def spans(geometry: Geometry, block: Sequence[int]) -> tuple[int, int, int]:
    """Return the positions that are computed along each axis for the outputs of a `block` of positions (d, h, w).

    With a shift of the phases that is up to one more than the block has.
    """
    axes = zip(geometry.axes, block, geometry.dynamic, strict=True)
    first, second, third = (axis.span(positions, dynamic) for axis, positions, dynamic in axes)
    return first, second, third


def ravel(index: Sequence[Expr | int], shape: Sequence[Expr | int]) -> Expr:
    """Return the flat index of the element at `index` in an array of `shape`; the last axis is contiguous."""
    number: Expr = tirx.const(0, "int64")
    for i, extent in zip(index, shape, strict=True):
        number = number * extent + i
    return number


def unravel(number: Index, shape: Sequence[int]) -> list[Index]:
    """Return the index of element `number` of an array of `shape`; the first axis is never wrapped."""
    index: list[Index] = []
    for extent in reversed(shape[1:]):
        index.append(number % extent if extent > 1 else 0)
        number = number // extent if extent > 1 else number
    return [number if shape[0] > 1 else 0, *reversed(index)]


def split_index(index: Expr, size: int, count: Extent) -> tuple[Expr, Expr]:
    """Return the number of the block that `index` lies in, of `count` blocks of `size`, and the index within it.

    A single block divides nothing: it may hold fewer than `size` elements, and TVM's region inference does not
    understand nested remainders.
    """
    several = not isinstance(count, int) or count > 1
    return (index // size, index % size) if several else (tirx.const(0, "int64"), index)


def caller_index(
    geometry: Geometry, rank: int, index: Sequence[Expr], *, channels_inner: bool, channels_last: bool
) -> tuple[Expr, ...]:
    """Map an `index` of an output with a group axis and three spatial axes to one of the caller's with `rank` axes.

    It is ``(n, d, h, w, g, c)`` if `channels_inner`, else ``(n, g, c, d, h, w)``. The caller's may have
    `channels_last`.
    """
    n, *others = index
    *spatial, g, c = others if channels_inner else (*others[2:], *others[:2])
    channel, place = g * geometry.out_channels + c, spatial[3 - rank :]
    return (n, *place, channel) if channels_last else (n, channel, *place)


def within_runs(phases: Sequence[Expr], runs: Sequence[Run], strides: Sequence[int]) -> tuple[list[Expr], list[Expr]]:
    """Return the number of each axis' phase within its run, and the conditions that all phases are in their runs.

    The numbers are clamped: TVM simplifies wrongly with an index outside of a buffer, even one that is discarded.
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


@dataclass(frozen=True, slots=True)
class BlockedData:
    """The caller's `data`, read in blocks of so many images and positions.

    Elements have `dtype`. If there are `words`, these stand in the place of channels, as they are stored. The
    `zero_point`, if there is one, is subtracted; in words it stands where there are no data.
    """

    problem: Problem
    geometry: Geometry
    extents: Extents
    data: te.Tensor
    dtype: str
    block: tuple[int, int, int, int]
    words: Words | None
    zero_point: Expr | None

    def element(
        self, within: Sequence[Expr], at: Sequence[Expr], group: Expr, ci: Expr, inside: Sequence[Expr] = ()
    ) -> Expr:
        """Return element `ci` of `group` of block `at` (nb, db, hb, wb) at `within` (n, d, h, w).

        It is zero outside of the data, and unless all of the conditions `inside` hold.
        """
        place, conditions = self._place(within, at)
        exists = tirx.all(*inside, *conditions)
        if self.words is not None:
            return self._word(place, group, ci, exists)
        element = self._stored(place, group * self.problem.in_channels + ci)
        value = to_accumulator(element, self.problem.dtype, self.problem.accumulate_dtype)
        if self.zero_point is None:
            return tirx.if_then_else(exists, value.astype(self.dtype), tirx.const(0, self.dtype))
        # Subtracted outside of the condition: a vector would gather what only some of its lanes read.
        return (tirx.if_then_else(exists, value, self.zero_point) - self.zero_point).astype(self.dtype)

    def pair(
        self, within: Sequence[Expr], at: Sequence[Expr], group: Expr, ci: Expr, inside: Sequence[Expr] = ()
    ) -> Expr:
        """Return the stored elements of 16 bits of `ci` of `group` and the next channel as a word; see `element`.

        The next one is of the next group if a group has one.
        """
        place, conditions = self._place(within, at)
        first = group * self.problem.in_channels + ci
        even, odd = (self._stored(place, first + number).astype(WORD) for number in range(2))
        word = even | (odd << tirx.const(16, WORD))
        return tirx.if_then_else(tirx.all(*inside, *conditions), word, tirx.const(0, WORD))

    def _word(self, place: Sequence[Expr], group: Expr, number: Expr, exists: Expr) -> Expr:
        """Return word `number` of a group's channels at `place`, where it `exists`."""
        assert self.words is not None
        words, channels = self.words, self.problem.in_channels
        word = words.join(lambda channel: self._stored(place, group * channels + channel), channels, number)
        nothing = tirx.const(0, WORD) if self.zero_point is None else words.filled(self.zero_point)
        return words.shifted(tirx.if_then_else(exists, word, nothing))

    def _stored(self, place: Sequence[Expr], channel: Expr) -> Expr:
        """Return the stored element of `channel` at `place`, the image and the position along each axis."""
        image, *position = place
        if self.problem.data_format == "NXC":
            return self.data[(image, *position, channel)]
        return self.data[(image, channel, *position)]

    def _place(self, within: Sequence[Expr], at: Sequence[Expr]) -> tuple[tuple[Expr, ...], list[Expr]]:
        """Return the image and the position that block `at` holds at `within`, and the conditions that they exist."""
        n = at[0] * self.block[0] + within[0]
        axes = zip(at[1:], self.block[1:], within[1:], self.geometry.axes, strict=True)
        x = [number * length + i + axis.low for number, length, i, axis in axes]
        conditions = [n < self.extents.batch]
        for index, extent in zip(x, self.extents.data, strict=True):
            conditions += [index >= 0, index < extent]
        return (n, *x[3 - self.problem.rank :]), conditions


def has_whole_vectors(problem: Problem, form: str, tile: BlockTile, lanes: int) -> bool:
    """Tell whether the output of a block is whole vectors of `lanes` elements.

    In `form` ROWS of `N C *X` these hold positions of each phase; otherwise, of `N *X C`, channels.
    """
    row, output = tile.width * Geometry.of(problem).axes[2].stride, problem.output_spatial[-1]
    if problem.rank in problem.dynamic or (problem.data_format == "NCX") != (form == ROWS):
        return False
    if form == ROWS:
        return output % row == 0 and tile.width % lanes == 0
    contiguous = problem.groups if form == GROUPS else problem.out_channels
    whole = contiguous % tile.channels == 0 and (form == CHANNELS or problem.out_channels == 1)
    return whole and tile.channels % lanes == 0 and row <= output
