"""Direct transposed convolution by phases, in tensor expressions.

Five stages, all of them blocked over images and positions (``nb, db, hb, wb``), groups ``g`` and tiles of output
channels ``co``:

1. ``data_pack`` the data of a block with its halo, zero where the data ends; positions flattened to one axis.
   ``points_0 ...`` where Winograd's transforms apply along the outer axes: sums of rows of it.
2. ``run_0 ...`` one stage for each combination of runs of phases: the sum over the taps and input channels. A
   position and a tap add up to one flat index, so no tile ever tests a border.
3. ``epilogue`` the phase is selected, the bias added, the activation applied.
4. ``interleave`` phases of the last axis (and, for ``N *X C``, channels) take their places next to each other.
5. ``out`` rows are copied into the output.

In *rows* the vector runs over positions and the filter is broadcast: the output's rows are the vectors.  In
*channels* the vector runs over output channels and the data are broadcast; there is nothing to interleave then, and
stages 3 and 4 are one.

In *rows* Winograd's F(m, taps) serves along the first two axes: there is one product for each of the ``m + taps - 1``
points, whose rows are sums of the data's, and sums of the results are the output, taken in stage 3. Flat positions then
count tiles of m rows, and the packed rows of a tile lie in m planes, so that a point is one sum over flat positions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tvm import te, tirx
from tvm.ir import Expr
from tvm.tirx import PrimFunc

from tvm_deconv.compute.epilogue import activate
from tvm_deconv.compute.extents import End, Extents, at_most, shape_of
from tvm_deconv.compute.indexing import (
    CHANNELS,
    GROUPS,
    LEAD,
    ROWS,
    byte_aligned,
    data_element,
    ravel,
    spans,
    split_index,
    tiles_of_channels,
    within_runs,
)
from tvm_deconv.compute.phases import AxisPhases, AxisRows, Geometry, Run, axis_rows
from tvm_deconv.compute.storage import from_accumulator, storage_dtype
from tvm_deconv.compute.transforms import transform
from tvm_deconv.compute.winograd import winograd
from tvm_deconv.problem import Problem


@dataclass(frozen=True, slots=True)
class Tile:
    """How a direct definition is cut up.

    A block is ``images x depth x height x width`` positions per phase; a register tile is `channels` output channels by
    `positions` flattened positions, the vectorised one of the two a multiple of the lanes, by up to `phases` phases of
    the last two axes, which read the same data, and serve where there are few channels, or where all of the last axis
    make vectors of the output. Phases are those of the output, or, if `uncropped` is 1, of the uncropped output
    (`Geometry.of`). `outputs_*` is Winograd's m along an axis, 1 without.
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

    @property
    def outputs(self) -> tuple[int, int, int]:
        """Winograd's m along the three axes."""
        return self.outputs_d, self.outputs_h, 1


@dataclass(frozen=True, slots=True)
class FilterSection:
    """The packed filter of one combination of runs, from `offset` on.

    Its axes are ``[g, co, points(2), d, h, w, reduction(4), phases(2), channels]``: points are Winograd's along the
    first two axes, ``d, h, w`` count tiles of phases, of which those of the last two axes hold `phases`; the reduction
    is ``[ci, taps(3)]`` where positions are vectors, so that the taps of a data element follow each other while it is
    near, and ``[taps(3), ci]`` where channels are, and lie together.
    """

    offset: int
    axes: tuple[AxisRows, AxisRows, AxisRows]
    phases: tuple[int, int]
    form: str
    shape: tuple[int, ...]

    @property
    def runs(self) -> tuple[Run, Run, Run]:
        """The run of each axis."""
        first, second, third = self.axes
        return first.run, second.run, third.run

    @property
    def points(self) -> tuple[int, int]:
        """Filters for one, along the first two axes."""
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
    ) -> tuple[Expr | int, ...]:
        """Return the index of the element for points, a phase of each axis, within its run, and a tap of each."""
        d, h, w = phases
        rows, columns = self.phases
        reduction = (ci, *taps) if self.form == ROWS else (*taps, ci)
        return g, co, *points, d, h // rows, w // columns, *reduction, h % rows, w % columns, cc


@dataclass(frozen=True, slots=True)
class DirectDefinition:
    """A definition as TensorIR before scheduling, and what its packed filter looks like.

    `end` is where a dynamic axis ends, along which positions need data up to `halo` after them, and `serial` that of
    `Extents`. A position has `stride` outputs along the last axis; a chunk interleaves those of `minor` channels. A row
    of a packed block is `row` flat positions, a step along the axis of the end `inner`.
    """

    func: PrimFunc
    sections: tuple[FilterSection, ...]
    end: End | None
    halo: int
    serial: int
    stride: int
    minor: int
    row: int
    inner: int
    rank: int
    channels_last: bool
    out_channels: int
    points: int

    @property
    def packed_elements(self) -> int:
        """Number of elements of the packed filter; one, never read, where no tap reaches the output."""
        return _elements(self.sections)

    def caller_index(self, *index: Expr) -> tuple[Expr, ...]:
        """Map an index of the stage ``out``, with its own group axis and three spatial axes, to the caller's output."""
        if self.channels_last:
            n, *spatial, g, c = index
        else:
            n, g, c, *spatial = index
        channel, place = g * self.out_channels + c, spatial[3 - self.rank :]
        return (n, *place, channel) if self.channels_last else (n, channel, *place)


def _elements(sections: tuple[FilterSection, ...]) -> int:
    return max(1, sum(math.prod(section.shape) for section in sections))


def group_and_channel(form: str, width: Expr | int, g: Expr, co: Expr, cc: Expr) -> tuple[Expr, Expr]:
    """Return the group and the output channel within it of lane or register `cc` of tile `co` of `g`, `width` wide."""
    return (g * width + cc, co) if form == GROUPS else (g, co * width + cc)


def filter_sections(geometry: Geometry, form: str, tile: Tile) -> tuple[FilterSection, ...]:
    """Lay out the packed filter for the register tiles of `tile`."""
    sections: list[FilterSection] = []
    offset = 0
    taken = spans(geometry, (tile.depth, tile.height, tile.width))
    for runs in geometry.runs:
        first, second, third = map(axis_rows, geometry.axes, runs, taken, tile.outputs)
        columns = math.gcd(runs[2].count, tile.phases)
        rows = math.gcd(runs[1].count, tile.phases // columns)
        taps = (first.taps, second.taps, third.taps)
        reduction = (geometry.in_channels, *taps) if form == ROWS else (*taps, geometry.in_channels)
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
        )
        sections.append(FilterSection(offset, (first, second, third), (rows, columns), form, shape))
        offset += math.prod(shape)
    return tuple(sections)


def block_extents(geometry: Geometry, tile: Tile) -> tuple[int, int, int]:
    """Extents of one image of a packed block: the positions of a block, the halo of its taps, and the padding.

    Along an axis with Winograd's transforms they count tiles of its m positions.

    Where one block holds a whole axis, the zeros after a row are the zeros before the next: what reads past the end of
    a row then reads those, and rows are packed closer.
    """
    extents = []
    blocks = (tile.depth, tile.height, tile.width)
    taken = spans(geometry, blocks)
    for axis, extent, block, span, dynamic, m in zip(
        geometry.axes, geometry.data, blocks, taken, geometry.dynamic, tile.outputs, strict=True
    ):
        apart = -(-span // m) + halo_tiles(axis, m)
        before = max(-axis.low, 0)
        whole = axis.positions <= block and not dynamic and m == 1
        extents.append(max(apart - before, extent + before) if whole and extent + before < apart else apart)
    return extents[0], extents[1], extents[2]


def product_count(rows: AxisRows, outputs: int) -> int:
    """Return of how many products a tile of so many `outputs` is: as many, where `rows` are not transformed."""
    return rows.points if rows.transformed else outputs


def halo_tiles(axis: AxisPhases, outputs: int) -> int:
    """Return how many tiles of so many `outputs` the halo of the taps takes after those of a block."""
    return -(-axis.halo // outputs)


def define_direct(problem: Problem, form: str, tile: Tile, lanes: int) -> DirectDefinition:
    """Define `problem` in `form` (ROWS, CHANNELS or GROUPS) blocked by `tile`, for vectors of `lanes` accumulators.

    The parameters are the data and the bias, if the epilogue has one, as the caller has them, the packed filter, and
    the output as ``[N, G, Co, D, H, W]`` or ``[N, D, H, W, G, Co]``:
    `DirectDefinition.caller_index` makes it the caller's.  Raises ValueError for a tile that cannot be scheduled.
    """
    geo, whole = Geometry.of(problem, bool(tile.uncropped)), Extents.of(problem)
    last = problem.data_format == "NXC"
    accumulator = problem.accumulate_dtype
    axes = geo.axes
    strides = tuple(axis.stride for axis in axes)
    sections = filter_sections(geo, form, tile)

    if form == ROWS and (tile.width < axes[2].positions or geo.dynamic[2]) and tile.width % lanes:
        # Its interleaved row would be longer than its share of the output, and spill into the next block's.
        raise ValueError(f"width={tile.width}: must be a multiple of {lanes} where a row has several blocks")
    block = (tile.images, tile.depth, tile.height, tile.width)
    blocks = whole.blocks(block)
    extents = block_extents(geo, tile)

    def flat(n: Expr | int, d: Expr | int, h: Expr | int, w: Expr | int) -> Expr:
        return ((n * extents[0] + d) * extents[1] + h) * extents[2] + w

    depth, height, width = spans(geo, block[1:])
    row_vectors = -(-tile.width // lanes)
    row_read = row_vectors * lanes + width - tile.width if form == ROWS else width
    outputs = tile.outputs[:2]
    transforms = max(outputs) > 1
    used = flat(tile.images - 1, -(-depth // outputs[0]) - 1, -(-height // outputs[1]) - 1, 0) + row_read
    positions = -(-used // tile.positions) * tile.positions
    halos = tuple(halo_tiles(axis, m) for axis, m in zip(axes, tile.outputs, strict=True))
    reach = positions + flat(0, halos[0], halos[1], halos[2]) + (lanes if transforms else 0)
    packed_positions = -(-reach // extents[2]) * extents[2]
    group_tiles, channel_tiles = tiles_of_channels(geo, form, tile)
    lead = (*blocks, group_tiles, channel_tiles)

    channels = geo.groups * geo.in_channels
    spatial = whole.spatial(problem.rank)
    data_shape = (whole.batch, *spatial, channels) if last else (whole.batch, channels, *spatial)
    data = te.placeholder(shape_of(data_shape), storage_dtype(problem.dtype), "data")
    packed = te.placeholder(shape_of((_elements(sections),)), accumulator, "packed_filter")
    parameters = [data, packed]

    def zero() -> Expr:
        return tirx.const(0, accumulator)

    def data_pack(nb: Expr, db: Expr, hb: Expr, wb: Expr, g: Expr, *inner: Expr) -> Expr:
        group, inside = g, []
        row = [tirx.const(0, "int64")] * 2  # of a tile
        if form == ROWS:
            ci, *row, position = inner
        else:
            position, ci = inner[:2]
        if form == GROUPS:
            group = g * tile.channels + inner[2]
            inside.append(group < geo.groups)
        within = (
            position // (extents[2] * extents[1] * extents[0]),
            position // (extents[2] * extents[1]) % extents[0] * outputs[0] + row[0],
            position // extents[2] % extents[1] * outputs[1] + row[1],
            position % extents[2],
        )
        if transforms:
            # Rows that only fill the last tiles are not worth fetching.
            needed = (tile.images, depth + axes[0].halo, height + axes[1].halo)
            inside += [place < end for place, end in zip(within, needed, strict=False)]
        return data_element(problem, geo, whole, data, block, within, (nb, db, hb, wb), group, ci, inside)

    inner_shape = {
        ROWS: (geo.in_channels, *outputs, packed_positions),
        CHANNELS: (packed_positions, geo.in_channels),
        GROUPS: (packed_positions, geo.in_channels, tile.channels),
    }[form]
    data_packed = te.compute(shape_of((*blocks, group_tiles, *inner_shape)), data_pack, "data_pack")

    def define_points(rows: tuple[AxisRows, AxisRows], name: str) -> te.Tensor:
        """Return the sums of rows that products take; along an axis without a transform, the rows."""
        matrices = [winograd(row.outputs, row.run.taps).data if row.transformed else None for row in rows]
        further = [0 if row.transformed else halo for row, halo in zip(rows, halos, strict=False)]
        length = -(-(positions + flat(0, further[0], further[1], halos[2])) // lanes) * lanes

        def body(*index: Expr) -> Expr:
            *at, g, d, h, ci, position = index
            first = [row.start if row.transformed else place for row, place in zip(rows, (d, h), strict=True)]

            def element(*places: Expr | int) -> Expr:
                (d, tiles), (h, lines) = (
                    (x % m, x // m) if row.transformed else (x, 0)
                    for row, m, x in zip(rows, outputs, places, strict=True)
                )
                return data_packed[(*at, g, ci, d, h, position + flat(0, tiles, lines, 0))]

            return transform(matrices, (d, h), first, element, accumulator)

        shape = (*blocks, group_tiles, *map(product_count, rows, outputs), geo.in_channels, length)
        return te.compute(shape_of(shape), body, name)

    def define_run(section: FilterSection, name: str) -> te.Tensor:
        sums = points.get(section.axes[:2])
        taps = [te.reduce_axis(tuple(shape_of((0, rows.taps))), f"t{i}") for i, rows in enumerate(section.axes)]
        ci = te.reduce_axis(tuple(shape_of((0, geo.in_channels))), "ci")

        def body(*index: Expr) -> Expr:
            (*at, g, co), (*which, fd, fh, fw, last_but_one, last_one) = index[:LEAD], index[LEAD:]
            cc, m = (last_but_one, last_one) if form == ROWS else (last_one, last_but_one)
            steps = [
                run.x0 - t.var * run.x_step - axis.low for run, t, axis in zip(section.runs, taps, axes, strict=True)
            ]
            # A product of the rows that are some taps away; or of a point's sums of them, by its own filter.
            (d, tiles, di), (h, lines, hi) = (
                (point, 0, point) if rows.transformed else ((step + point) % count, (step + point) // count, 0)
                for rows, count, point, step in zip(section.axes, outputs, which or (0, 0), steps, strict=False)
            )
            position = m + flat(0, tiles, lines, steps[2])
            inner = {ROWS: (ci.var, d, h, position), CHANNELS: (position, ci.var), GROUPS: (position, ci.var, cc)}
            element = (
                sums[(*at, g, d, h, ci.var, position)] if sums is not None else data_packed[(*at, g, *inner[form])]
            )
            within = [t.var for t in taps]
            where = ravel(section.index(g, co, (di, hi), (fd, fh, fw), ci.var, within, cc), section.shape)
            return te.sum(element * packed[where + section.offset], axis=[ci, *taps] if form == ROWS else [*taps, ci])

        tile_shape = (tile.channels, positions) if form == ROWS else (positions, tile.channels)
        numbers = map(product_count, section.axes[:2], outputs) if transforms else ()
        return te.compute(shape_of((*lead, *numbers, *(run.count for run in section.runs), *tile_shape)), body, name)

    outer_rows = dict.fromkeys(section.axes[:2] for section in sections)
    transformed = [rows for rows in outer_rows if any(row.transformed for row in rows)]
    points = {rows: define_points(rows, f"points_{i}") for i, rows in enumerate(transformed)}
    computed = [define_run(section, f"run_{i}") for i, section in enumerate(sections)]

    def result(
        number: int, at: Sequence[Expr], cc: Expr, local: Sequence[Expr], n: Expr, places: Sequence[Expr]
    ) -> Expr:
        """Return what combination `number` of runs makes of its phases `local` at `places` of image `n` of a block."""
        (d, inner_d), (h, inner_h) = (
            (x // m, x % m) if m > 1 else (x, tirx.const(0, "int64")) for x, m in zip(places, outputs, strict=False)
        )
        m = flat(n, d, h, places[2])

        def product(*points: Expr) -> Expr:
            inner = (cc, m) if form == ROWS else (m, cc)
            return computed[number][(*at, *(points if transforms else ()), *local, *inner)]

        rows, inner = sections[number].axes[:2], (inner_d, inner_h)
        matrices = [winograd(row.outputs, row.run.taps).outputs if row.transformed else None for row in rows]
        first = [tirx.const(0, "int64") if row.transformed else x for row, x in zip(rows, inner, strict=True)]
        return transform(matrices, inner, first, product, accumulator)

    def finish(at: Sequence[Expr], cc: Expr, phases: Sequence[Expr], n: Expr, places: Sequence[Expr]) -> Expr:
        """Return the output of a phase of each axis at `places` along them in image `n` of a block."""
        value = zero()
        for number, section in reversed(list(enumerate(sections))):
            local, member = within_runs(phases, section.runs, strides)
            here = result(number, at, cc, local, n, places)
            value = tirx.if_then_else(tirx.all(*member), here, value) if member else here
        if bias is not None:
            value = value + bias[at[4], at[5], cc]
        return activate(problem.epilogue, value)

    bias = None
    if problem.epilogue.bias:
        given = te.placeholder(shape_of(problem.bias_shape), accumulator, "bias")
        parameters.append(given)

        def bias_pack(g: Expr, co: Expr, cc: Expr) -> Expr:
            group, channel = group_and_channel(form, tile.channels, g, co, cc)
            exists = tirx.all(group < geo.groups, channel < geo.out_channels)
            return tirx.if_then_else(exists, given[group * geo.out_channels + channel], zero())

        bias = te.compute(shape_of((group_tiles, channel_tiles, tile.channels)), bias_pack, "bias_pack")

    row = tile.width * strides[2]
    # A block that holds a whole axis holds no more of the output than there is: its rows are the rows of the output.
    outer = (
        at_most(tile.images, whole.batch),
        at_most(tile.depth * strides[0], whole.output[0]),
        at_most(tile.height * strides[1], whole.output[1]),
    )
    row_channels = min(tile.channels, geo.out_channels)
    if form != ROWS:

        def tile_out(*index: Expr) -> Expr:
            *at, n, d, h, w, cc = index
            phases, positions = zip(*(axis.place(i) for axis, i in zip(axes, (d, h, w), strict=True)), strict=True)
            return finish(tuple(at), cc, phases, n, positions)

        minor = 1
        interleaved = te.compute(shape_of((*lead, *outer, row, tile.channels)), tile_out, "interleave")
    else:
        # A chunk is `lanes` positions of `streams` rows; interleaving a chunk makes it contiguous in the output.
        minor = row_channels if last else 1
        streams = strides[2] * minor
        rows = outer if last else (row_channels, *outer)

        def epilogue(*index: Expr) -> Expr:
            at, (*where, vector, stream, lane) = index[:LEAD], index[LEAD:]
            cc, (n, d, h) = (stream % minor, where) if last else (where[0], where[1:])
            # Positions count on from the chunk's: a phase before the shift is found one further on.
            phases, (d, h, further) = zip(
                *(axis.place(i) for axis, i in zip(axes, (d, h, stream // minor), strict=True)), strict=True
            )
            return finish(at, cc, phases, n, (d, h, vector * lanes + lane + further))

        finished = te.compute(shape_of((*lead, *rows, row_vectors, streams, lanes)), epilogue, "epilogue")

        def interleave(*index: Expr) -> Expr:
            *at, w, channel = index
            stream = w % strides[2] * minor + channel
            return finished[(*at, w // (strides[2] * lanes), stream, w // strides[2] % lanes)]

        interleaved = te.compute(
            shape_of((*lead, *rows, row_vectors * lanes * strides[2], minor)), interleave, "interleave"
        )

    def out(*index: Expr) -> Expr:
        if last:
            n, d, h, w, g, c = index
        else:
            n, g, c, d, h, w = index
        if form == GROUPS:
            (group, cc), tile_of = split_index(g, tile.channels, group_tiles), c
        else:
            group, (tile_of, cc) = g, split_index(c, tile.channels, channel_tiles)
        cuts = [
            split_index(i, extent, count) for i, extent, count in zip((n, d, h, w), (*outer, row), blocks, strict=True)
        ]
        at, (*where, w) = (*(number for number, _ in cuts), group, tile_of), (within for _, within in cuts)
        inner = (*where, w, cc) if form != ROWS or last else (cc, *where, w, 0)
        return from_accumulator(interleaved[(*at, *inner)], problem.output_dtype)

    channel_axes, position_axes = (geo.groups, geo.out_channels), (whole.batch, *whole.output)
    shape = (*position_axes, *channel_axes) if last else (whole.batch, *channel_axes, *whole.output)
    end = whole.end(block, (depth, height, width))
    halo = halos[end.axis] * tile.outputs[end.axis] if end else 0
    if end and end.axis == 1 and extents[2] < width + axes[2].halo:
        halo += tile.outputs_h  # behind a row zeros are read that are those before the next
    inner = math.prod(extents[end.axis + 1 :]) if end else 1  # flat positions from one place along its axis to the next
    func = te.create_prim_func([*parameters, te.compute(shape_of(shape), out, "out")])
    return DirectDefinition(
        byte_aligned(func),
        sections,
        end,
        halo,
        whole.serial,
        strides[2],
        minor,
        extents[2],
        inner,
        problem.rank,
        last,
        geo.out_channels,
        len(points),
    )
