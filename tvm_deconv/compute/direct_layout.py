"""The layout of a direct definition: its tile, its packed filter, and the flat positions of a block.

A position is one output of every phase. The positions of a block are flattened to one axis, together with the halo that
its taps read. The flat index of a tap is then the flat index of its position plus a constant, across the ends of rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tvm import tirx
from tvm.ir import Expr

from tvm_deconv.compute.extents import End, Extent, Extents, at_most
from tvm_deconv.compute.indexing import GROUPS, INPUTS, ROWS, spans, tiles_of_channels
from tvm_deconv.compute.phases import AxisPhases, AxisRows, Geometry, Run, axis_rows
from tvm_deconv.compute.storage import sum_dtype
from tvm_deconv.compute.winograd import MAX_PRODUCTS
from tvm_deconv.compute.words import Words
from tvm_deconv.problem import Problem
from tvm_deconv.problem.arithmetic import ceil_div, round_up

#: Vectors of flat positions in a block from which on its data are transposed; and from which on four at once.
_FEWEST_ROWS, _MANY_ROWS = 2, 16


@dataclass(frozen=True, slots=True)
class Tile:
    """The block and the register tile of a direct definition.

    A block is `images` by `depth` by `height` by `width` positions of each phase. A register tile is `channels` output
    channels by `positions` flat positions by up to `phases` phases of the last two axes. The vectors run over positions
    in rows and over channels otherwise; that extent is a multiple of the lanes. The phases of a register tile read the
    same data. Several of them help where channels are few, or where all phases of the last axis make vectors of the
    output. If `uncropped` is 1, phases are counted from the uncropped output (`Geometry.of`). `outputs_d` and
    `outputs_h` are Winograd's m along an axis, 1 without a transform. In groups, `channels` may be those of a block
    alone: a register tile then has `part` of them, and those of the same positions follow each other.
    """

    images: int
    depth: int
    height: int
    width: int
    channels: int
    positions: int
    phases: int
    uncropped: int = 0
    outputs_d: int = 1
    outputs_h: int = 1
    part: int = 0

    @property
    def block(self) -> tuple[int, int, int, int]:
        """Images and positions of a block: n, d, h, w."""
        return self.images, self.depth, self.height, self.width

    @property
    def outputs(self) -> tuple[int, int, int]:
        """Winograd's m along the three axes."""
        return self.outputs_d, self.outputs_h, 1


@dataclass(frozen=True, slots=True)
class FilterSection:
    """The part of the packed filter for one combination of runs, from element `offset` on.

    Its axes are ``[g, co, points(2), d, h, w, reduction(4), phases(2), channels]``, and a last one of input channels
    where an instruction takes several: a vector in inputs, a row of words in products of matrices. Points are
    Winograd's along the first two axes; ``d, h, w`` count tiles of phases, and a tile holds `phases` of the last two
    axes. The reduction is ``[ci, taps(3)]`` in rows: all taps read a data element while it is in the first-level cache.
    Otherwise it is ``[taps(3), ci]``, since there the input channels of a position are contiguous. With a last axis
    ``ci`` counts the vectors or rows. If `pairs` is not 0, two vectors of as many lanes have the even and the odd
    ones of their groups, which the channels are then, or in inputs of their input channels. The data of both are one
    vector of words.
    """

    offset: int
    axes: tuple[AxisRows, AxisRows, AxisRows]
    phases: tuple[int, int]
    form: str
    shape: tuple[int, ...]
    pairs: int = 0

    @property
    def runs(self) -> tuple[Run, Run, Run]:
        """The run of each axis."""
        first, second, third = self.axes
        return first.run, second.run, third.run

    @property
    def channels(self) -> int:
        """Output channels of a tile, or groups."""
        return self.shape[13]

    @property
    def lanes(self) -> int:
        """Input channels of the last axis, one where there is none."""
        return self.shape[14] if len(self.shape) > 14 else 1

    @property
    def taps(self) -> tuple[int, int, int]:
        """Taps of each axis."""
        first, second, third = self.axes
        return first.taps, second.taps, third.taps

    @property
    def filters(self) -> tuple[int, ...]:
        """Tiles of groups and of channels, phases, and channels of a tile: numbers of filters of sums."""
        return *self.shape[:2], *(run.count for run in self.runs), self.channels

    @property
    def points(self) -> tuple[int, int]:
        """Transformed filters per filter, along the first two axes."""
        return self.axes[0].points, self.axes[1].points

    def index(
        self,
        g: Expr,
        co: Expr,
        points: Sequence[Expr | int],
        phases: Sequence[Expr],
        ci: Expr,
        taps: Sequence[Expr],
        cc: Expr,
        lane: Sequence[Expr] = (),
    ) -> tuple[Expr | int, ...]:
        """Return the index of a filter element within the section.

        `phases` and `taps` are one of each axis, the phases counted within their runs; `cc` is the channel within the
        tile `co`. With a last axis, `ci` is a vector or row of input channels and `lane` has the number within it.
        """
        d, h, w = phases
        rows, columns = self.phases
        reduction = (ci, *taps) if self.form == ROWS else (*taps, ci)
        return g, co, *points, d, h // rows, w // columns, *reduction, h % rows, w % columns, cc, *lane


def group_and_channel(form: str, width: Expr | int, g: Expr, co: Expr, cc: Expr, pairs: int = 0) -> tuple[Expr, Expr]:
    """Return the group, and the output channel in it, of lane or register `cc` of tile `co` of `g`, `width` wide.

    `pairs` is that of `FilterSection`.
    """
    return (g * width + paired(cc, pairs), co) if form == GROUPS else (g, co * width + cc)


def paired(lane: Expr, pairs: int) -> Expr:
    """Return the group of a `lane`, both counted within a tile, or the input channel; see `FilterSection.pairs`."""
    if not pairs:
        return lane
    return lane // (2 * pairs) * (2 * pairs) + lane % pairs * 2 + lane // pairs % 2


def unpaired(group: Expr, pairs: int) -> Expr:
    """Return the lane of a `group`: the inverse of `paired`."""
    if not pairs:
        return group
    return group // (2 * pairs) * (2 * pairs) + group % 2 * pairs + group // 2 % pairs


def word_of_pair(lane: Expr, pairs: int) -> Expr:
    """Return the number of the word in a tile's data that has those of a `lane`; the lane itself without `pairs`."""
    return lane // (2 * pairs) * pairs + lane % pairs if pairs else lane


def half_of_pair(word: Expr, lane: Expr, pairs: int) -> Expr:
    """Return the float of a `lane` that is a half of its `word`, in bfloat16."""
    bits = word.astype("uint32")
    even, odd = bits << tirx.const(16, "uint32"), bits & tirx.const(0xFFFF0000, "uint32")
    return tirx.reinterpret("float32", tirx.Select(lane // pairs % 2 == 0, even, odd))


def phases_together(runs: Sequence[Run], phases: int) -> tuple[int, int]:
    """Return the phases along the last two axes of a register tile of up to `phases`, in a combination of `runs`."""
    columns = math.gcd(runs[2].count, phases)
    return math.gcd(runs[1].count, phases // columns), columns


def phases_follow(runs: Sequence[Run], phases: int) -> bool:
    """Tell whether the phases of a register tile of up to `phases` follow each other in the order of their results."""
    rows, columns = phases_together(runs, phases)
    return rows == 1 or columns == runs[2].count


def filter_sections(
    geometry: Geometry, form: str, tile: Tile, lanes: int, pairs: int = 0, depth: int = 1
) -> tuple[FilterSection, ...]:
    """Lay out the packed filter for the register tiles of `tile`, for vectors of `lanes` elements.

    `pairs` is that of `FilterSection`, `depth` that of `Words`.
    """
    sections: list[FilterSection] = []
    offset = 0
    together = lanes if form == INPUTS else depth
    terms = ceil_div(geometry.in_channels, together)
    block_spans = spans(geometry, tile.block[1:])
    for runs in geometry.runs:
        first, second, third = map(axis_rows, geometry.axes, runs, block_spans, tile.outputs)
        rows, columns = phases_together(runs, tile.phases)
        if depth > 1 and not phases_follow(runs, tile.phases):
            raise ValueError(f"phases={tile.phases}: must be part of a row's, or whole rows of them, for matrices")
        taps = (first.taps, second.taps, third.taps)
        reduction = (terms, *taps) if form == ROWS else (*taps, terms)
        shape = (
            *tiles_of_channels(geometry, form, tile),
            first.points,
            second.points,
            runs[0].count,
            runs[1].count // rows,
            runs[2].count // columns,
            *reduction,
            rows,
            columns,
            tile.channels,
            *((together,) if form == INPUTS or depth > 1 else ()),
        )
        sections.append(FilterSection(offset, (first, second, third), (rows, columns), form, shape, pairs))
        offset += math.prod(shape)
    return tuple(sections)


def block_extents(geometry: Geometry, tile: Tile) -> tuple[int, int, int]:
    """Return the extents of one image of a packed block: positions, the halo of their taps, and padding.

    Along an axis with Winograd's transforms they count tiles of m positions. Where one block holds a whole axis, the
    zeros behind a row are also the zeros in front of the next. A tap that reads past the end of a row then reads those,
    and rows are packed closer.
    """
    extents = []
    block = tile.block[1:]
    for axis, extent, length, span, dynamic, m in zip(
        geometry.axes, geometry.data, block, spans(geometry, block), geometry.dynamic, tile.outputs, strict=True
    ):
        apart = ceil_div(span, m) + halo_tiles(axis, m)
        before = max(-axis.low, 0)
        whole = axis.positions <= length and not dynamic and m == 1
        extents.append(max(apart - before, extent + before) if whole and extent + before < apart else apart)
    return extents[0], extents[1], extents[2]


def product_count(rows: AxisRows, outputs: int) -> int:
    """Return the number of products for a tile of `outputs` positions: its points, or one per position."""
    return rows.points if rows.transformed else outputs


def halo_tiles(axis: AxisPhases, outputs: int) -> int:
    """Return the number of tiles of `outputs` positions that the halo of the taps adds to a block."""
    return ceil_div(axis.halo, outputs)


def transposes_channels(in_channels: int, lanes: int) -> bool:
    """Tell whether data with `in_channels` per group fill vectors of `lanes` channels well enough to be transposed."""
    return 2 * in_channels >= lanes


def flat_position(
    packed: tuple[int, int, int], n: Expr | int, d: Expr | int, h: Expr | int, w: Expr | int
) -> Expr | int:
    """Return the flat position of image `n` and position `d`, `h`, `w` in blocks of extents `packed`."""
    return ((n * packed[0] + d) * packed[1] + h) * packed[2] + w


@dataclass(frozen=True, slots=True)
class DirectLayout:
    """The extents of all stages of a direct definition.

    `blocks` counts blocks of images and positions. Along the three spatial axes, `spans` are the positions of a block,
    `packed` the extents of an image of its packed data (`block_extents`), and `halos` the tiles of its halo. Products
    are computed at `positions` flat positions, whole register tiles. They read the data of `needed` flat positions, for
    matrices whole vectors. `packed_positions` are these, and whole rows where a call may end within a block. `pairs` is
    that of `FilterSection`. Sums of products are of `sum_dtype`.
    """

    form: str
    tile: Tile
    lanes: int
    geometry: Geometry
    extents: Extents
    channels_last: bool
    sections: tuple[FilterSection, ...]
    blocks: tuple[Extent, ...]
    spans: tuple[int, int, int]
    packed: tuple[int, int, int]
    halos: tuple[int, int, int]
    positions: int
    needed: int
    packed_positions: int
    pairs: int
    sum_dtype: str

    @staticmethod
    def of(
        problem: Problem, form: str, tile: Tile, lanes: int, words: Words | None = None, pairs: int = 0
    ) -> DirectLayout:
        """Lay out `problem` in `form`; raise ValueError for a tile that cannot be scheduled.

        With `words`, their number are the input channels of the layout.
        """
        sums, depth = sum_dtype(problem), 1
        if words:
            problem, sums, depth = words.problem(problem), problem.accumulate_dtype, words.depth
        geometry, extents = Geometry.of(problem, bool(tile.uncropped)), Extents.of(problem)
        last = geometry.axes[2]
        if form == ROWS and (tile.width < last.positions or geometry.dynamic[2]) and tile.width % lanes:
            # Its interleaved row would be longer than its share of the output, and spill into the next block's.
            raise ValueError(f"width={tile.width}: must be a multiple of {lanes} where a row has several blocks")
        for axis, outputs in zip(geometry.axes, tile.outputs, strict=True):
            if outputs > 1 and axis.step > 1:
                raise ValueError(f"outputs={outputs}: must be 1 along an axis with dilated taps")
            taps = max((run.taps for run in axis.runs), default=1)
            if outputs > 1 and outputs + taps - 1 > MAX_PRODUCTS:
                # Pieces of taps are not for sums of whole rows.
                most = max(MAX_PRODUCTS + 1 - taps, 1)
                raise ValueError(f"outputs={outputs}: must be at most {most} along an axis with {taps} taps")
        if tile.part and (form != GROUPS or tile.part % lanes or tile.channels % tile.part):
            raise ValueError(f"part={tile.part}: must be whole vectors, and of groups a divisor of channels, or 0")
        packed = block_extents(geometry, tile)
        if depth > 1 and tile.images == packed[0] == packed[1] == 1:
            packed = (1, 1, round_up(packed[2], lanes))  # channels begin with a line
        span = spans(geometry, tile.block[1:])
        first, second, third = map(halo_tiles, geometry.axes, tile.outputs)
        row_end = round_up(tile.width, lanes) + span[2] - tile.width if form == ROWS else span[2]
        last_row = tile.images - 1, ceil_div(span[0], tile.outputs_d) - 1, ceil_div(span[1], tile.outputs_h) - 1
        positions = round_up(int(flat_position(packed, *last_row, 0)) + row_end, tile.positions)
        reach = positions + int(flat_position(packed, 0, first, second, third))
        if max(tile.outputs) > 1:
            reach += lanes  # sums of rows are made by whole vectors
        if depth > 1:
            reach = round_up(reach, lanes)
        end = extents.end(tile.block, span)
        if end and tile.images == packed[0] == packed[1] == 1:
            packed = (1, 1, round_up(reach, lanes))  # no second row for what the last register tile reads
        return DirectLayout(
            form=form,
            tile=tile,
            lanes=lanes,
            geometry=geometry,
            extents=extents,
            channels_last=problem.data_format == "NXC",
            sections=filter_sections(geometry, form, tile, lanes, pairs, depth),
            blocks=extents.blocks(tile.block),
            spans=span,
            packed=packed,
            halos=(first, second, third),
            positions=positions,
            needed=reach,
            packed_positions=round_up(reach, packed[2]) if end else reach,
            pairs=pairs,
            sum_dtype=sums,
        )

    @property
    def transforms(self) -> bool:
        """True if Winograd's transforms apply along an axis."""
        return max(self.tile.outputs) > 1

    @property
    def strides(self) -> tuple[int, int, int]:
        """Outputs per position along each axis."""
        first, second, third = self.geometry.axes
        return first.stride, second.stride, third.stride

    @property
    def tiles(self) -> tuple[int, int]:
        """Tiles of groups, and of the output channels of a group."""
        return tiles_of_channels(self.geometry, self.form, self.tile)

    @property
    def lead(self) -> tuple[Extent, ...]:
        """Extents of the axes with which the stages behind the packed data begin: nb, db, hb, wb, g, co."""
        return *self.blocks, *self.tiles

    @property
    def packed_elements(self) -> int:
        """Number of elements of the packed filter; if no tap reaches the output, one that is never read."""
        return max(1, sum(math.prod(section.shape) for section in self.sections))

    @property
    def block_outputs(self) -> tuple[int, int, int]:
        """Images, and outputs along the first two axes, of a block.

        A block that holds a whole axis has no more of them than the output: its rows are the rows of the output.
        """
        extents, tile, strides = self.extents, self.tile, self.strides
        return (
            at_most(tile.images, extents.batch),
            at_most(tile.depth * strides[0], extents.output[0]),
            at_most(tile.height * strides[1], extents.output[1]),
        )

    @property
    def transposes_data(self) -> bool:
        """True if vectors of input channels become vectors of positions on their way into a block.

        Both kinds of vectors must be filled, and the extents of all calls be the same.
        """
        return (
            self.form == ROWS
            and self.channels_last
            and transposes_channels(self.geometry.in_channels, self.lanes)
            and self.positions >= _FEWEST_ROWS * self.lanes
            and not any(self.geometry.dynamic)
        )

    @property
    def packed_data(self) -> tuple[int, int]:
        """Input channels, and flat positions, of the packed data: in whole squares if these are transposed.

        In inputs they are whole vectors of channels.
        """
        if self.form == INPUTS:
            return round_up(self.geometry.in_channels, self.lanes), self.packed_positions
        if not self.transposes_data:
            return self.geometry.in_channels, self.packed_positions
        channels = round_up(self.geometry.in_channels, self.lanes)
        return channels, round_up(self.packed_positions, self.transposed_positions)

    def packed_place(self, ci: Expr | int, row: Sequence[Expr | int], position: Expr | int) -> tuple[Expr | int, ...]:
        """Return the index of an element of the packed data in rows: of a channel and one `row` of its tile.

        Data that are transposed have their channels next to the positions.
        """
        return (*row, ci, position) if self.transposes_data else (ci, *row, position)

    @property
    def transposed_positions(self) -> int:
        """Flat positions whose data are fetched at once, to be transposed while they are near."""
        return self.lanes * (4 if self.packed_positions >= _MANY_ROWS * self.lanes else 1)

    @property
    def row_channels(self) -> int:
        """Output channels of a block in rows."""
        return min(self.tile.channels, self.geometry.out_channels)

    @property
    def row_vectors(self) -> int:
        """Vectors of positions of a row."""
        return ceil_div(self.tile.width, self.lanes)

    @property
    def minor(self) -> int:
        """Channels that a chunk interleaves: all where rows are stored as ``N *X C``, else one."""
        return self.row_channels if self.form == ROWS and self.channels_last else 1

    @property
    def end(self) -> End | None:
        """The end of a dynamic axis that a block may run over."""
        return self.extents.end(self.tile.block, self.spans)

    @property
    def end_halo(self) -> int:
        """Positions after the `end` whose data are needed."""
        end = self.end
        if end is None:
            return 0
        halo = self.halos[end.axis] * self.tile.outputs[end.axis]
        if end.axis == 1 and self.packed[2] < self.spans[2] + self.geometry.axes[2].halo:
            halo += self.tile.outputs_h  # taps behind the end of a row read the zeros in front of the next
        return halo

    @property
    def end_step(self) -> int:
        """Flat positions from one position along the axis of the `end` to the next."""
        return math.prod(self.packed[self.end.axis + 1 :]) if self.end else 1

    def flat(self, n: Expr | int, d: Expr | int, h: Expr | int, w: Expr | int) -> Expr | int:
        """Return the flat position of image `n` and position `d`, `h`, `w`; with transforms, of tiles of positions."""
        return flat_position(self.packed, n, d, h, w)

    def unflatten(self, position: Expr, row: Sequence[Expr]) -> tuple[Expr, Expr, Expr, Expr]:
        """Return the image, and the data along each axis, of a flat `position` and one `row` of its tile per axis."""
        depth, height, width = self.packed
        return (
            position // (width * height * depth),
            position // (width * height) % depth * self.tile.outputs_d + row[0],
            position // width % height * self.tile.outputs_h + row[1],
            position % width,
        )
