"""The layout of a matrix definition: its tile, its products, its packed filter, and its blocks of data and output."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tvm.ir import Expr

from tvm_deconv.compute.extents import End, Extent, Extents, at_most
from tvm_deconv.compute.indexing import spans
from tvm_deconv.compute.phases import AxisRows, Geometry, axis_rows
from tvm_deconv.compute.strassen import STRASSEN
from tvm_deconv.compute.winograd import MAX_INTEGER_PRODUCTS
from tvm_deconv.problem import Problem
from tvm_deconv.problem.arithmetic import ceil_div, round_up

#: Most outputs in a channel's plane that are transposed as a whole; the transposition is unrolled.
_LARGEST_PLANE = 256
#: Fewest phases that make a vector of the output, unless the target's vectors are shorter.
_FEWEST_PHASES = 8


@dataclass(frozen=True, slots=True)
class MatrixTile:
    """The block and the register tile of a matrix definition.

    A block holds ``images x depth x height x width`` positions of each phase and `channels` output channels. A register
    tile holds `rows` rows by `vectors` vectors of columns. `outputs_*` is Winograd's m along an axis, and 1 without
    Winograd. If `uncropped` is 1, phases are those of the uncropped output; see `Geometry.of`. If `strassen` is 1,
    products are computed in halves by Strassen's algorithm. If `flat` is 1, rows are positions of the packed data, with
    those of its halo, and a tap reads them at an offset: nothing is gathered.
    """

    images: int
    depth: int
    height: int
    width: int
    channels: int
    rows: int
    vectors: int
    outputs_d: int
    outputs_h: int
    outputs_w: int
    uncropped: int = 0
    strassen: int = 0
    flat: int = 0

    @property
    def parts(self) -> int:
        """Number of parts into which rows, columns and input channels of a product are cut."""
        return 1 + self.strassen

    @property
    def outputs(self) -> tuple[int, int, int]:
        """Winograd's m along the three axes."""
        return self.outputs_d, self.outputs_h, self.outputs_w

    @property
    def positions(self) -> int:
        """Positions along the last axis in a register tile."""
        return self.rows * self.outputs_w

    @property
    def block(self) -> tuple[int, int, int, int]:
        """Images and positions of a block."""
        return self.images, self.depth, self.height, self.width


@dataclass(frozen=True, slots=True)
class MatrixSection:
    """The products of one combination of runs, and their part of the packed filter.

    That part begins at element `offset` and has the `shape` ``[g, co, points(3), panel, taps(3), ci, column]``. A panel
    has as many columns as a register tile. A column counts the phase of each axis, then the channel of the tile. If
    `phases_last`, the phase of the last axis comes after the channel.
    """

    offset: int
    axes: tuple[AxisRows, AxisRows, AxisRows]
    shape: tuple[int, ...]
    channels: int
    phases_last: bool
    parts: int

    @property
    def steps(self) -> list[int]:
        """From a tap of each axis to the next, in positions."""
        return [axis.step for axis in self.axes]

    @property
    def columns(self) -> int:
        """Number of columns that are used; the columns after them are zero."""
        return math.prod(axis.run.count for axis in self.axes) * self.channels

    @property
    def part_columns(self) -> int:
        """Columns of each part, in whole panels."""
        return self.shape[5] * self.shape[-1]

    @property
    def all_columns(self) -> tuple[int, int, int]:
        """Groups, tiles of output channels, and the columns of a tile in whole panels of each part."""
        return self.shape[0], self.shape[1], self.part_columns * self.parts

    @property
    def points(self) -> tuple[int, ...]:
        """Products of a row along each axis; Strassen's seven count along the first."""
        return self.shape[2:5]

    @property
    def taps(self) -> tuple[int, ...]:
        """Extents of the reduction over taps."""
        return self.shape[6:9]

    @property
    def part_channels(self) -> int:
        """Input channels of each part: an extent of the reduction."""
        return self.shape[9]

    @property
    def rows(self) -> int:
        """Rows of one image in a block."""
        return math.prod(axis.tiles for axis in self.axes)

    @property
    def transformed(self) -> bool:
        """True if Winograd's or Strassen's algorithm transforms the results."""
        return self.parts > 1 or any(axis.transformed for axis in self.axes)

    @property
    def divisor(self) -> int:
        """What sums of integers are multiplied by, since their filters are transformed by whole numbers."""
        return math.prod(axis.algorithm.divisor for axis in self.axes if axis.algorithm)

    @property
    def apart(self) -> int | None:
        """The first of several axes with Winograd's transforms; those along it have stages of their own.

        In one stage 25 or more points would each be a sum of as many elements, for which a CPU has too few registers.
        """
        transformed = [number for number, axis in enumerate(self.axes) if axis.transformed]
        return transformed[0] if len(transformed) > 1 else None

    def column(self, phases: Sequence[Expr], channel: Expr) -> Expr:
        """Return the column of the phase of each axis, within its run, and of a `channel` of the tile."""
        d, h, w = phases
        _, rows, columns = (axis.run.count for axis in self.axes)
        if self.phases_last:
            return ((d * rows + h) * self.channels + channel) * columns + w
        return ((d * rows + h) * columns + w) * self.channels + channel

    def phases_and_channel(self, column: Expr) -> tuple[tuple[Expr, Expr, Expr], Expr]:
        """Return the phase of each axis, within its run, and the channel of the tile: the inverse of `column`."""
        _, rows, columns = (axis.run.count for axis in self.axes)
        if self.phases_last:
            channel, outer = column // columns % self.channels, column // (columns * self.channels)
            return (outer // rows, outer % rows, column % columns), channel
        phases = column // self.channels
        return (phases // (columns * rows), phases // columns % rows, phases % columns), column % self.channels


def contiguous_phases(problem: Problem, lanes: int) -> int:
    """Return how many phases of the last axis make a vector of the output; 0 if its vectors are not phases.

    Each run must have whole vectors of phases, or halves of at least eight. The format must be `N C *X`, or there must
    be one channel in all. Such a layer needs no transposition, and not many channels.
    """
    axis = Geometry.of(problem).axes[2]
    extents = (axis.stride, *(extent for run in axis.runs for extent in (run.start, run.count)))
    common = math.gcd(lanes, *extents)
    rows = problem.data_format == "NCX" or problem.groups * problem.out_channels == 1
    return common if rows and (common == lanes or common >= _FEWEST_PHASES) else 0


def row_unit(problem: Problem, lanes: int) -> int:
    """Return the fewest positions whose outputs fill whole vectors of a row; 1 if vectors do not lie along rows."""
    stride = Geometry.of(problem).axes[2].stride
    rows = problem.data_format == "NCX" and not contiguous_phases(problem, lanes)
    return math.lcm(lanes, stride) // stride if rows else 1


def matrix_sections(geometry: Geometry, tile: MatrixTile, lanes: int, phases_last: bool) -> tuple[MatrixSection, ...]:
    """Return the products of a block, one for each combination of runs, and lay out the packed filter."""
    sections: list[MatrixSection] = []
    offset = 0
    panel = tile.vectors * lanes
    positions = spans(geometry, tile.block[1:])
    for runs in geometry.runs:
        first, second, third = (
            axis_rows(axis, run, length, m)
            for axis, run, length, m in zip(geometry.axes, runs, positions, tile.outputs, strict=True)
        )
        axes = (first, second, third)
        columns = math.prod(run.count for run in runs) * tile.channels
        shape = (
            geometry.groups,
            ceil_div(geometry.out_channels, tile.channels),
            *((len(STRASSEN.data), 1, 1) if tile.strassen else (axis.points for axis in axes)),
            ceil_div(columns, panel * tile.parts),
            *(axis.taps for axis in axes),
            part_channels(geometry.in_channels, tile.strassen, lanes),
            panel,
        )
        sections.append(MatrixSection(offset, axes, shape, tile.channels, phases_last, tile.parts))
        offset += math.prod(shape)
    return tuple(sections)


def _check_integers(sections: Sequence[MatrixSection]) -> None:
    """Raise ValueError for transforms that integers do not have: of too many points, or of pieces of taps."""
    for axis in (axis for section in sections for axis in section.axes if axis.transformed):
        if axis.points > MAX_INTEGER_PRODUCTS or axis.pieces > 1:
            rule = f"must make at most {MAX_INTEGER_PRODUCTS} products with {axis.run.taps} taps of integers"
            raise ValueError(f"outputs={axis.outputs}: {rule}")


def block_positions(geometry: Geometry, tile: MatrixTile) -> tuple[int, int, int]:
    """Return the extents of one image of a packed block.

    They hold the positions of the block, in whole rows of every run, and the halo of the taps.
    """
    extents = []
    for axis, positions, m in zip(geometry.axes, spans(geometry, tile.block[1:]), tile.outputs, strict=True):
        rows = [axis_rows(axis, run, positions, m) for run in axis.runs]
        last = [row.start + row.first(row.tiles - 1) + (row.window - 1) * row.step for row in rows]
        extents.append(max(last, default=0) + 1)
    return extents[0], extents[1], extents[2]


def flat_positions(packed: Sequence[int], unit: int) -> tuple[int, int, int]:
    """Return the extents of an image of `packed` positions whose rows are whole squares of `unit` positions."""
    depth, height, width = packed
    return depth, height, round_up(width, unit)


def flat_rows(axes: Sequence[AxisRows], images: int, packed: Sequence[int]) -> int:
    """Return the rows of a product without a gather: all positions up to the last that a result is needed of."""
    last = (images - 1) * packed[0]
    for axis, extent in zip(axes, (*packed[1:], 1), strict=True):
        last = (last + axis.tiles - 1) * extent
    return last + 1


def finishes_planes(geometry: Geometry, tile: MatrixTile, lanes: int, chunk: int) -> bool:
    """Return True if each channel of `N C *X` is transposed as one plane, not in chunks of a row.

    The plane must be small and fill whole vectors, and its rows must not fill whole chunks.
    """
    height, width = geometry.output[1:]
    whole = all(axis.positions <= size for axis, size in zip(geometry.axes[1:], tile.block[2:], strict=True))
    small = height * width <= _LARGEST_PLANE and height * width % lanes == 0
    return whole and small and width % chunk > 0 and not any(geometry.dynamic)


def packs_rows(problem: Problem, tile: MatrixTile, lanes: int) -> bool:
    """Return True if the packed data are already the rows of the only product.

    All phases must read the same single element. Data of `N C *X` are transposed in squares of vectors, and such a
    square must not reach from one image into the next.
    """
    geometry = Geometry.of(problem, bool(tile.uncropped))
    single = len(geometry.runs) == 1 and all(run.taps == 1 for run in geometry.runs[0])
    plane = math.prod(spans(geometry, tile.block[1:]))
    return single and (problem.data_format == "NXC" or tile.images == 1 or plane % lanes == 0)


def row_channels(in_channels: int, lanes: int) -> int:
    """Return the input channels that a row holds in memory, in whole vectors.

    At a pitch that is a multiple of 1024 bytes many rows would compete for the same lines of the first-level cache, so
    such rows are one vector longer.
    """
    padded = round_up(in_channels, lanes)
    return padded + lanes if padded * 4 % 1024 == 0 else padded


def part_channels(in_channels: int, strassen: int, lanes: int) -> int:
    """Return the input channels of each part of a product: all, or under Strassen's half of them in whole vectors."""
    return ceil_div(in_channels, 2 * lanes) * lanes if strassen else in_channels


@dataclass(frozen=True, slots=True)
class Chunks:
    """The pieces of the output that are transposed as a unit, channel by channel.

    There are `heights` x `chunks` pieces of `chunk` outputs in each plane, and a row has `width` outputs. If `planes`,
    the only piece is the whole plane.
    """

    heights: int
    chunks: int
    chunk: int
    width: int
    planes: bool


@dataclass(frozen=True, slots=True)
class MatrixLayout:
    """The extents of all stages of a matrix definition.

    `sections` are the products and `blocks` counts blocks of images and positions. Along the three spatial axes,
    `spans` are the positions of a block and `packed` the extents of an image of its packed data (`block_positions`).
    `contiguous_phases` and `packs_rows` are those of the functions of these names.
    """

    tile: MatrixTile
    lanes: int
    geometry: Geometry
    extents: Extents
    channels_last: bool
    contiguous_phases: int
    packs_rows: bool
    unit: int
    sections: tuple[MatrixSection, ...]
    blocks: tuple[Extent, ...]
    spans: tuple[int, int, int]
    packed: tuple[int, int, int]

    @staticmethod
    def of(problem: Problem, tile: MatrixTile, lanes: int) -> MatrixLayout:
        """Lay out `problem` for `tile` and vectors of `lanes`; raise ValueError for a tile that cannot be scheduled."""
        if tile.strassen and (tile.strassen != 1 or max(tile.outputs) > 1):
            raise ValueError(f"strassen={tile.strassen}: must be 0, or 1 where outputs of all axes are 1")
        packs, transformed = packs_rows(problem, tile, lanes), max(tile.outputs) > 1 or tile.strassen
        if tile.flat and (tile.flat != 1 or packs or transformed or problem.dynamic_axes):
            raise ValueError(f"flat={tile.flat}: must be 0, or 1 where rows would be gathered as they are")
        geometry, extents = Geometry.of(problem, bool(tile.uncropped)), Extents.of(problem)
        unit, phases = row_unit(problem, lanes), contiguous_phases(problem, lanes)
        sections = matrix_sections(geometry, tile, lanes, phases > 0)
        if problem.accumulate_dtype == "int32":
            _check_integers(sections)
        for axis, outputs, dynamic in zip(geometry.axes, tile.outputs, geometry.dynamic, strict=True):
            if outputs > 1 and axis.step > 1 and dynamic:
                raise ValueError(f"outputs={outputs}: must be 1 along a dynamic axis with dilated taps")
        if (tile.width < geometry.axes[2].positions or geometry.dynamic[2]) and tile.width % unit:
            # In whole vectors its rows would be longer than their share of the output, and spill into the next block's.
            raise ValueError(f"width={tile.width}: must be a multiple of {unit} where a row has several blocks")
        packed = block_positions(geometry, tile)
        return MatrixLayout(
            tile=tile,
            lanes=lanes,
            geometry=geometry,
            extents=extents,
            channels_last=problem.data_format == "NXC",
            contiguous_phases=phases,
            packs_rows=packs,
            unit=unit,
            sections=sections,
            blocks=extents.blocks(tile.block),
            spans=spans(geometry, tile.block[1:]),
            packed=flat_positions(packed, 1 if problem.data_format == "NXC" else lanes) if tile.flat else packed,
        )

    @property
    def strides(self) -> tuple[int, int, int]:
        """Outputs per position along each axis."""
        first, second, third = self.geometry.axes
        return first.stride, second.stride, third.stride

    @property
    def transforms(self) -> bool:
        """True if Winograd's transforms apply along an axis."""
        return max(self.tile.outputs) > 1

    @property
    def channel_tiles(self) -> int:
        """Tiles of the output channels of a group."""
        return ceil_div(self.geometry.out_channels, self.tile.channels)

    @property
    def channel_vectors(self) -> int:
        """Vectors of the output channels of a tile."""
        return ceil_div(self.tile.channels, self.lanes)

    @property
    def lead(self) -> tuple[Extent, ...]:
        """Extents of the axes with which the stages from the products on begin: nb, db, hb, wb, g, co."""
        return *self.blocks, self.geometry.groups, self.channel_tiles

    @property
    def packed_elements(self) -> int:
        """Number of elements of the packed filter; if no tap reaches the output, one that is never read."""
        return max(1, sum(math.prod(section.shape) for section in self.sections))

    @property
    def part_channels(self) -> int:
        """Input channels of each part of a product."""
        return part_channels(self.geometry.in_channels, self.tile.strassen, self.lanes)

    @property
    def packed_channels(self) -> int:
        """Input channels of the packed data in memory."""
        return row_channels(self.tile.parts * self.part_channels, self.lanes)

    @property
    def plane(self) -> int:
        """Positions of an image in the packed data."""
        return math.prod(self.packed)

    @property
    def packed_rows(self) -> int:
        """Positions of all images in the packed data: rows of the product if `packs_rows`."""
        return self.tile.images * self.plane

    def gathers(self, section: MatrixSection) -> bool:
        """Return True if the rows of `section` are gathered from the packed data, in a stage of their own."""
        return not (self.packs_rows or self.tile.flat) or section.parts > 1

    def product_rows(self, section: MatrixSection) -> int:
        """Return the rows of a product of `section`, in whole register tiles."""
        if self.tile.flat:
            return round_up(flat_rows(section.axes, self.tile.images, self.packed), self.tile.rows)
        if not self.gathers(section):
            return round_up(self.packed_rows, self.tile.rows)
        return ceil_div(self.tile.images * section.rows, self.tile.rows * section.parts) * self.tile.rows

    def flat_offset(self, section: MatrixSection, taps: Sequence[Expr | int]) -> Expr | int:
        """Return the distance from a row of a product, if nothing is gathered, to what it reads at `taps`."""
        offset: Expr | int = 0
        for axis, tap, extent in zip(section.axes, taps, self.packed, strict=True):
            offset = offset * extent + axis.start + axis.first_read(tap) * axis.step
        return offset

    @property
    def packed_lines(self) -> tuple[int, ...]:
        """Extents of the packed data between groups and channels: rows, or images and positions.

        Without a gather these are as many rows as products read, in whole rows of positions.
        """
        unit = 1 if self.channels_last else self.lanes
        if self.tile.flat:
            furthest = (self.product_rows(section) + self.flat_offset(section, (0, 0, 0)) for section in self.sections)
            return (round_up(max(furthest, default=1), self.packed[2]),)
        if self.packs_rows:
            return (round_up(round_up(self.packed_rows, self.tile.rows), unit),)
        # Data of `N C *X` are transposed in squares of vectors, for which the last axis must be whole vectors.
        return (self.tile.images, *self.packed[:2], round_up(self.packed[2], unit))

    @property
    def block_outputs(self) -> tuple[int, int, int, int]:
        """Images, and outputs along the three axes, of a block.

        A block that holds a whole axis outside of a row has no more of them than the output.
        """
        extents, tile, strides = self.extents, self.tile, self.strides
        return (
            at_most(tile.images, extents.batch),
            at_most(tile.depth * strides[0], extents.output[0]),
            at_most(tile.height * strides[1], extents.output[1]),
            tile.width * strides[2],
        )

    @property
    def vectors_are_channels(self) -> bool:
        """True if the vectors of the output are channels."""
        return self.channels_last and not self.contiguous_phases

    @property
    def interleaves(self) -> bool:
        """True if finished vectors are channels, and those of the output are not: they are transposed."""
        return not self.channels_last and not self.contiguous_phases

    @property
    def chunks(self) -> Chunks:
        """The pieces that are transposed if the layout `interleaves`: chunks of a row, or whole small planes."""
        chunk = self.unit * self.strides[2]
        if self.interleaves and finishes_planes(self.geometry, self.tile, self.lanes, chunk):
            height, width = self.geometry.output[1:]
            return Chunks(1, 1, height * width, width, planes=True)
        heights, width = self.block_outputs[2:]
        chunks = ceil_div(width, chunk)
        return Chunks(heights, chunks, chunk, chunks * chunk, planes=False)

    @property
    def end(self) -> End | None:
        """The end of a dynamic axis that a block may run over."""
        return self.extents.end(self.tile.block, self.spans)

    @property
    def end_halo(self) -> int:
        """Positions after the `end` whose data are needed."""
        end = self.end
        axes = [section.axes[end.axis] for section in self.sections] if end else []
        furthest = max((axis.start + (axis.window - 1) * axis.step for axis in axes), default=0)
        # Strassen's sums contain a row past the end if the row before it is not past it.
        return furthest + self.tile.strassen
