"""A matrix product whose columns are all elements of the kernel, and whose results are added up where they overlap.

Each position of the data has ``K * Co`` sums over the input channels, its *columns*: one for each element of the kernel
and output channel. The rows of the product are the data as the caller has them, if channels are last. The output is
made of the columns as "col2im" does it. Few output channels, which fill no vector, fill some with those of the kernel.

Along an axis output ``i`` is phase ``r`` of place ``w``, with ``i = s*w + r - pad``. Its tap ``t`` is the column of
element ``k = s*t + r`` of the kernel, of the data at ``w - t``. All phases of a place and their channels are neighbours
in the output, and so are the columns that one tap adds to them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from tvm_deconv.compute.phases import three_axes
from tvm_deconv.problem import Problem
from tvm_deconv.problem.arithmetic import ceil_div


@dataclass(frozen=True, slots=True)
class ColumnTile:
    """The block and the register tile: `positions` of the data by `vectors` of columns.

    A block has the outputs of ``images x depth x height x width`` places. The images divide those of any call.
    """

    images: int
    depth: int
    height: int
    width: int
    positions: int
    vectors: int

    @property
    def block(self) -> tuple[int, int, int, int]:
        """Images and places of a block: n, d, h, w."""
        return self.images, self.depth, self.height, self.width


@dataclass(frozen=True, slots=True)
class Places:
    """The places of an axis in blocks of `block`; the other fields are the problem's."""

    stride: int
    kernel: int
    pad: int
    data: int
    output: int
    block: int

    @property
    def first(self) -> int:
        """The place of the first output."""
        return self.pad // self.stride

    @property
    def last(self) -> int:
        """The place of the last output."""
        return (self.output - 1 + self.pad) // self.stride

    @property
    def count(self) -> int:
        """Places that have outputs."""
        return self.last - self.first + 1

    @property
    def blocks(self) -> int:
        """Blocks of the axis."""
        return ceil_div(self.count, self.block)

    @property
    def taps(self) -> int:
        """Taps of the first phase, which no other has more of."""
        return ceil_div(self.kernel, self.stride)

    @property
    def rows(self) -> int:
        """Neighbours of the data whose columns are made for a block."""
        return min(self.block + self.taps - 1, self.data)

    @property
    def whole(self) -> tuple[int, int]:
        """The places from the first to before the second, all of whose outputs exist and whose taps all read data."""
        first = max(self.taps - 1, ceil_div(self.pad, self.stride))
        return first, min(self.data, (self.output + self.pad) // self.stride)


def places(problem: Problem, tile: ColumnTile) -> tuple[Places, Places, Places]:
    """Return those of three axes; missing ones come first and have extents of one, and so do empty outputs."""
    outputs = tuple(max(extent, 1) for extent in problem.output_spatial)
    strides, pads = three_axes(problem.strides, 1), three_axes(problem.pads_begin, 0)
    kernel, data, output = (three_axes(values, 1) for values in (problem.kernel, problem.data_spatial, outputs))
    first, second, third = map(Places, strides, kernel, pads, data, output, tile.block[1:])
    return first, second, third


@dataclass(frozen=True)
class ColumnLayout:
    """The extents of a product for vectors of `lanes` columns.

    The packed filter is ``[panels, Ci, panel]``, with zeros past the last column. Raises ValueError for a tile that
    does not fit the problem.
    """

    problem: Problem
    tile: ColumnTile
    lanes: int

    def __post_init__(self) -> None:
        images, batch = self.tile.images, 1 if 0 in self.problem.dynamic else self.batch
        if min(*self.tile.block, self.tile.positions, self.tile.vectors) < 1:
            raise ValueError(f"tile={self.tile}: must be of numbers from 1 on")
        if batch % images:
            raise ValueError(f"images={images}: must divide the batch of any call, {batch}")
        length = self.runs[1]
        if self.tile.positions > length:
            raise ValueError(f"positions={self.tile.positions}: must be {length} at most, those of a piece of the data")

    @cached_property
    def axes(self) -> tuple[Places, Places, Places]:
        """The places of three axes."""
        return places(self.problem, self.tile)

    @property
    def batch(self) -> int:
        """Images of a call; empty ones count as one."""
        return max(self.problem.batch, 1)

    @property
    def tasks(self) -> int:
        """Blocks of a call."""
        return self.batch // self.tile.images * math.prod(axis.blocks for axis in self.axes)

    @property
    def columns(self) -> int:
        """Columns of a position."""
        return math.prod(self.problem.kernel) * self.problem.out_channels

    @property
    def panel(self) -> int:
        """Columns of a register tile."""
        return self.tile.vectors * self.lanes

    @property
    def panels(self) -> int:
        """Register tiles that all columns of a position take."""
        return ceil_div(self.columns, self.panel)

    @property
    def row(self) -> int:
        """Columns of a position in memory, those that only fill a panel included."""
        return self.panels * self.panel

    @property
    def held(self) -> int:
        """Elements of the columns of a block."""
        return self.tile.images * math.prod(axis.rows for axis in self.axes) * self.row

    @property
    def packed_elements(self) -> int:
        """Elements of the packed filter."""
        return self.row * self.problem.in_channels

    @property
    def chunk(self) -> int:
        """Neighbours in the output that belong to one place of the last axis."""
        return self.problem.strides[-1] * self.problem.out_channels

    @property
    def chunk_vectors(self) -> int:
        """Vectors that hold a chunk."""
        return ceil_div(self.chunk, self.lanes)

    @property
    def runs(self) -> tuple[tuple[int, int, int], int]:
        """The pieces of a block's data without gaps, along n, d and h, and the positions of each."""
        length = self.axes[2].rows
        counts = [self.tile.images, *(axis.rows for axis in self.axes[:2])]
        whole = length == self.axes[2].data
        for outer in (2, 1, 0):
            if not whole:
                break
            length, counts[outer], whole = (
                length * counts[outer],
                1,
                outer > 0 and self.axes[outer - 1].rows == self.axes[outer - 1].data,
            )
        return (counts[0], counts[1], counts[2]), length
