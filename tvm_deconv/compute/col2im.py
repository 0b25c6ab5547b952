"""A matrix product whose columns are all elements of the kernel, and whose results are added up where they overlap.

Each position of the data has ``K * Co`` sums over the input channels, its *columns*: one for each element of the kernel
and output channel. The output is made of them as "col2im" does it.

Along an axis output ``i`` is phase ``r`` of place ``w``, with ``i = s*w + r - pad``. It takes the column of element
``k`` of the kernel, of the data at ``w - d*k // s``, if ``d*k % s`` is ``r``. These are its taps: each has an element
`period` further than the one before, and data `jump` places before.

In `N *X C` vectors hold columns, so that few output channels fill some with the elements of the kernel. Data are read
where the caller has them, or from what a register tile of 16 bits became. All phases of a place and their channels are
neighbours in the output, and so are the columns that one tap adds to them. In `N C *X` vectors hold positions, and a
register tile has several columns, whatever phases they are of. The data of a block are packed. Along the last axis
zeros are around them, or columns that are outside of the data are masked as they are added.

Columns and sums are accumulators. Data of 16 bits are widened as they are packed or read, outputs rounded by rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from tvm_deconv.compute.phases import three_axes
from tvm_deconv.problem import Problem, element_bytes
from tvm_deconv.problem.arithmetic import ceil_div, round_up

#: Elements of a line of a cache, of four bytes.
_LINE = 16
#: The time to mask a vector of columns as it is added, by that of one of its products; what decides about arrays in
#: memory is the same for every target.
_MASK = 2
#: Bytes that a copy counts.
_LARGEST_COPY = 1 << 31


@dataclass(frozen=True, slots=True)
class ColumnTile:
    """The block and the register tile: `positions` of the data by `columns`.

    A block has the outputs of ``images x depth x height x width`` places. The images divide those of any call. Vectors
    hold the columns in `N *X C`, and the positions in `N C *X`.
    """

    images: int
    depth: int
    height: int
    width: int
    positions: int
    columns: int

    @property
    def block(self) -> tuple[int, int, int, int]:
        """Images and places of a block: n, d, h, w."""
        return self.images, self.depth, self.height, self.width


@dataclass(frozen=True, slots=True)
class Places:
    """The places of an axis in blocks of `block`; the other fields are the problem's."""

    stride: int
    kernel: int
    dilation: int
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
    def period(self) -> int:
        """Elements of the kernel from a tap to the next one."""
        return self.stride // math.gcd(self.stride, self.dilation)

    @property
    def jump(self) -> int:
        """Places from the data of a tap to those of the one before."""
        return self.dilation // math.gcd(self.stride, self.dilation)

    @property
    def taps(self) -> int:
        """Taps of the first phase, which no other has more of."""
        return ceil_div(self.kernel, self.period)

    @property
    def reach(self) -> int:
        """Places from the first data that an output takes to the output's own."""
        return self.dilation * (self.kernel - 1) // self.stride

    @property
    def read(self) -> int:
        """Taps of all outputs that read data."""
        return sum(map(self._outputs, range(self.kernel)))

    def _outputs(self, element: int) -> int:
        """Return how many outputs take an `element` of the kernel from data that exist."""
        ahead = self.pad - self.dilation * element
        first, last = ceil_div(ahead, self.stride), (self.output - 1 + ahead) // self.stride
        return max(min(last, self.data - 1) - max(first, 0) + 1, 0)

    @property
    def rows(self) -> int:
        """Neighbours of the data whose columns are made for a block."""
        return min(self.block + self.reach, self.data)

    @property
    def whole(self) -> tuple[int, int]:
        """The places from the first to before the second, all of whose outputs exist and whose taps all read data."""
        first = max(self.reach, ceil_div(self.pad, self.stride))
        return first, min(self.data, (self.output + self.pad) // self.stride)


def places(problem: Problem, tile: ColumnTile) -> tuple[Places, Places, Places]:
    """Return those of three axes; missing ones come first and have extents of one, and so do empty outputs."""
    outputs = tuple(max(extent, 1) for extent in problem.output_spatial)
    strides, kernel, dilations = (
        three_axes(values, 1) for values in (problem.strides, problem.kernel, problem.dilations)
    )
    pads, data, output = three_axes(problem.pads_begin, 0), three_axes(problem.data_spatial, 1), three_axes(outputs, 1)
    first, second, third = map(Places, strides, kernel, dilations, pads, data, output, tile.block[1:])
    return first, second, third


def widens(problem: Problem) -> bool:
    """Tell whether data and outputs are stored in fewer bits than their columns, and converted by rows."""
    return element_bytes(problem.dtype) < element_bytes(problem.accumulate_dtype)


def has_short_rows(problem: Problem, tile: ColumnTile) -> bool:
    """Tell whether 32 bits count the bytes of what is copied at once: of a piece of the data, and a row of outputs."""
    first, second, third = places(problem, tile)
    data, outputs = first.rows * second.rows * (third.block + third.reach), third.block * third.stride
    if problem.data_format == "NXC":
        data, outputs = tile.positions * problem.in_channels, outputs * problem.out_channels
    return max(data, outputs) * element_bytes(problem.accumulate_dtype) < _LARGEST_COPY


@dataclass(frozen=True)
class ColumnLayout:
    """The extents of a product for vectors of `lanes` elements.

    The packed filter is ``[G, panels, Ci, columns]`` for the columns of a register tile, with zeros past the last one.
    Raises ValueError for a tile that does not fit the problem.
    """

    problem: Problem
    tile: ColumnTile
    lanes: int

    def __post_init__(self) -> None:
        images, batch = self.tile.images, 1 if 0 in self.problem.dynamic else self.batch
        if min(*self.tile.block, self.tile.positions, self.tile.columns) < 1:
            raise ValueError(f"tile={self.tile}: must be of numbers from 1 on")
        if batch % images:
            raise ValueError(f"images={images}: must divide the batch of any call, {batch}")
        if not has_short_rows(self.problem, self.tile):
            raise ValueError(f"tile={self.tile}: rows of a block must have less than {_LARGEST_COPY} bytes")

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
        """Blocks of a call, in each group."""
        blocks = math.prod(axis.blocks for axis in self.axes)
        return self.batch // self.tile.images * self.problem.groups * blocks

    @property
    def columns(self) -> int:
        """Columns of a position."""
        return math.prod(self.problem.kernel) * self.problem.out_channels

    @property
    def panels(self) -> int:
        """Register tiles that all columns of a position take."""
        return ceil_div(self.columns, self.tile.columns)

    @property
    def row(self) -> int:
        """Columns of a position in memory, those that only fill a panel included."""
        return self.panels * self.tile.columns

    @property
    def packed_elements(self) -> int:
        """Elements of the packed filter."""
        return self.problem.groups * self.row * self.problem.in_channels


@dataclass(frozen=True)
class ChannelColumns(ColumnLayout):
    """Columns of a position that are neighbours, in vectors; the columns of a block are ``[n, d, h, w, row]``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        length = self.runs[1]
        if self.tile.columns % self.lanes:
            raise ValueError(f"columns={self.tile.columns}: must be a multiple of {self.lanes}")
        if self.tile.positions > length:
            raise ValueError(f"positions={self.tile.positions}: must be {length} at most, those of a piece of the data")

    @property
    def vectors(self) -> int:
        """Vectors of a register tile that are loaded for an input channel."""
        return self.tile.columns // self.lanes

    @property
    def broadcasts(self) -> int:
        """Elements of a register tile that multiply each of its vectors."""
        return self.tile.positions

    @property
    def tiles(self) -> int:
        """Register tiles that all positions take."""
        counts, length = self.runs
        return math.prod(counts) * ceil_div(length, self.tile.positions)

    @property
    def held(self) -> int:
        """Elements of the columns of a block."""
        return self.tile.images * math.prod(axis.rows for axis in self.axes) * self.row

    @property
    def chunk(self) -> int:
        """Neighbours in the output that belong to one place of the last axis."""
        return self.problem.strides[-1] * self.problem.out_channels

    @property
    def follows(self) -> bool:
        """True if columns of one tap are neighbours in a chunk, as they are in memory."""
        return 1 in (self.axes[2].stride, self.axes[2].dilation)

    @property
    def chunk_vectors(self) -> int:
        """Vectors that hold a chunk."""
        return ceil_div(self.chunk, self.lanes)

    @property
    def spilled(self) -> int:
        """Places behind a chunk that its last vector reaches: they must be stored later."""
        return ceil_div(self.chunk_vectors * self.lanes - self.chunk, self.chunk)

    @property
    def runs(self) -> tuple[tuple[int, int, int], int]:
        """The pieces of a block's data without gaps, along n, d and h, and the positions of each."""
        first, second, third = self.axes
        extents = self.tile.images, first.rows, second.rows, third.rows
        return _runs(extents, third.rows == third.data, self.axes)


@dataclass(frozen=True)
class RowColumns(ColumnLayout):
    """Positions of a column that are neighbours, in vectors; the columns of a block are ``[row, pitch]``.

    The positions of a block are ``[n, d, h, w]``, and the packed data ``[Ci, pitch]`` of them. Along the last axis all
    positions that taps read are there, zeros outside of the data as well, unless columns are masked.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tile.positions % self.lanes:
            raise ValueError(f"positions={self.tile.positions}: must be a multiple of {self.lanes}")

    @cached_property
    def masked(self) -> bool:
        """True if columns outside of the data are masked, since those of zeros around it would take longer."""
        last = self.axes[2]
        zeros = last.block + last.reach - last.rows
        taken = last.last < last.data + last.reach  # every place has data that its outputs might take
        return taken and zeros * self.problem.in_channels > _MASK * last.block

    @property
    def vectors(self) -> int:
        """Vectors of a register tile that are loaded for an input channel."""
        return self.tile.positions // self.lanes

    @property
    def broadcasts(self) -> int:
        """Elements of a register tile that multiply each of its vectors."""
        return self.tile.columns

    @property
    def held(self) -> int:
        """Elements of the columns of a block."""
        return self.row * self.pitch

    @property
    def width(self) -> int:
        """Positions along the last axis."""
        return self.axes[2].rows if self.masked else self.axes[2].block + self.axes[2].reach

    @property
    def around(self) -> int:
        """Elements of memory before the columns, and behind them, that masked ones may read, in whole lines."""
        return round_up(self.axes[2].reach, _LINE) if self.masked else 0

    @property
    def positions(self) -> int:
        """Positions of a block."""
        return self.tile.images * self.axes[0].rows * self.axes[1].rows * self.width

    @property
    def tiles(self) -> int:
        """Register tiles that all positions take."""
        return ceil_div(self.positions, self.tile.positions)

    @property
    def pitch(self) -> int:
        """Elements from a column, or channel of the data, to the next: lines of neighbours are in different sets."""
        lines = ceil_div(self.tiles * self.tile.positions + self.lanes, _LINE)
        return (lines + 1 - lines % 2) * _LINE

    @property
    def array_elements(self) -> int:
        """Elements of the array of the columns, with those around them."""
        return self.held + 2 * self.around

    @property
    def mask_elements(self) -> int:
        """Elements of the mask: of places up to `reach` before the data and behind it, and the rest of a vector."""
        return self.around + self.axes[2].rows + self.axes[2].reach + self.lanes

    @property
    def whole(self) -> bool:
        """True if rows of packed data are whole ones of the data, with nothing around them."""
        last = self.axes[2]
        if self.masked:
            return last.rows == last.data
        return last.blocks == 1 and last.reach == 0 and (last.first, self.width) == (0, last.data)

    @property
    def runs(self) -> tuple[tuple[int, int, int], int]:
        """The pieces of a channel of a block's data without gaps, along n, d and h, and the positions of each."""
        (_, d, h), length = _runs((1, self.axes[0].rows, self.axes[1].rows, self.width), self.whole, self.axes)
        return (self.tile.images, d, h), length


def _runs(
    extents: tuple[int, int, int, int], whole: bool, axes: tuple[Places, Places, Places]
) -> tuple[tuple[int, int, int], int]:
    """Return the pieces without gaps of data of these `extents`, if rows of the last axis are `whole` ones or not."""
    *counts, length = extents
    for outer in (2, 1, 0):
        if not whole:
            break
        length, counts[outer] = length * counts[outer], 1
        whole = outer > 0 and axes[outer - 1].rows == axes[outer - 1].data
    return (counts[0], counts[1], counts[2]), length
