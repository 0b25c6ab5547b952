"""Transposed convolution by phases as matrix products, with or without Winograd's transforms, in tensor expressions.

For each combination of runs of phases the layer is a matrix product: rows are positions, columns are the output
channels of all phases of the run, since these read the same data, and the reduction goes over taps and input channels.
Along an axis where a run has several taps, rows may instead be tiles of ``m`` positions under Winograd's F(m, taps):
then there is one product for each of the ``m + taps - 1`` points, with sums of data for data and sums of taps for
filters, and sums of its results are the output.  Along an axis with one tap, or without Winograd, ``m`` is 1.
Without Winograd a product may instead be cut into halves for Strassen's algorithm: every other row, of input channels,
and of columns.  Then rows are pairs of positions, and there are seven points.

Stages, all of them blocked over images and positions (``nb, db, hb, wb``) and groups ``g``, from the third on over
tiles of output channels ``co`` too:

1. ``data_pack`` the data of a block with its halo, zero where the data end, input channels innermost.
2. ``rows_i`` for each combination of runs, the rows of its products: gathered data, transformed where Winograd or
   Strassen is at work. Not where they are not and all phases read one element, the same (kernel = stride): then the
   packed data are the rows.
3. ``run_i`` the products.
4. ``outputs_i`` the transform of the results, where Winograd's or Strassen's.
5. ``epilogue``, for ``N C *X`` only ``interleave`` too: the phase is selected, the bias added, the activation applied;
   channels become rows, which those of ``rows_out`` are by their indices.
6. ``out`` rows are copied into the output, those of a channel together.
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
from tvm_deconv.compute.indexing import LEAD, byte_aligned, data_element, ravel, spans, split_index, within_runs
from tvm_deconv.compute.phases import AxisRows, Geometry, axis_rows
from tvm_deconv.compute.storage import from_accumulator, storage_dtype
from tvm_deconv.compute.strassen import STRASSEN
from tvm_deconv.compute.transforms import transform
from tvm_deconv.compute.winograd import winograd
from tvm_deconv.problem import Problem

#: Outputs of a channel's plane that are finished at once, at most, where its rows are no whole vectors.
_LARGEST_PLANE = 256
#: Phases of a vector, at least, where they are fewer than its lanes.
_HALF = 8


@dataclass(frozen=True, slots=True)
class MatrixTile:
    """How a matrix definition is cut up.

    A block is ``images x depth x height x width`` positions per phase and `channels` output channels; a register tile
    is `rows` rows by `vectors` vectors of columns. `outputs_*` is Winograd's m along an axis, 1 without it. Phases are
    those of the output, or, if `uncropped` is 1, of the uncropped output (`Geometry.of`). If `strassen` is 1,
    products are of halves, by Strassen's algorithm.
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

    @property
    def parts(self) -> int:
        """Into how many parts rows, columns and input channels of a product are cut."""
        return 1 + self.strassen

    @property
    def outputs(self) -> tuple[int, int, int]:
        """Winograd's m along the three axes."""
        return self.outputs_d, self.outputs_h, self.outputs_w

    @property
    def positions(self) -> int:
        """Positions of a row that a register tile computes."""
        return self.rows * self.outputs_w

    @property
    def block(self) -> tuple[int, int, int, int]:
        """Images and positions of a block."""
        return self.images, self.depth, self.height, self.width


@dataclass(frozen=True, slots=True)
class MatrixSection:
    """The products of one combination of runs, and its part of the packed filter, from `offset` on.

    `shape` is that of the packed part: ``[g, co, points(3), panel, taps(3), ci, column]``, where panels are as many
    columns as a register tile has.  Columns count phases (of each axis), then the channels of a tile; or, where `wide`,
    the phases of the last axis last.
    """

    offset: int
    axes: tuple[AxisRows, AxisRows, AxisRows]
    shape: tuple[int, ...]
    channels: int
    wide: bool
    parts: int

    @property
    def columns(self) -> int:
        """Columns that mean something; those of the last panel after them are zero."""
        return math.prod(axis.run.count for axis in self.axes) * self.channels

    @property
    def part_columns(self) -> int:
        """Columns of each part, to whole panels."""
        return self.shape[5] * self.shape[-1]

    @property
    def points(self) -> tuple[int, ...]:
        """Products per row, along each axis; Strassen's along the first."""
        return self.shape[2:5]

    @property
    def taps(self) -> tuple[int, ...]:
        """Extents of the reduction over taps."""
        return self.shape[6:9]

    @property
    def part_channels(self) -> int:
        """Extent of the reduction over input channels: those of a part."""
        return self.shape[9]

    @property
    def transformed(self) -> bool:
        """Whether results are transformed: by Winograd's along any axis, or by Strassen's."""
        return self.parts > 1 or any(axis.transformed for axis in self.axes)

    def column(self, phases: Sequence[Expr], cc: Expr) -> Expr:
        """Return the column of a phase of each axis, within its run, and channel `cc` of the tile."""
        d, h, w = phases
        _, rows, columns = (axis.run.count for axis in self.axes)
        if self.wide:
            return ((d * rows + h) * self.channels + cc) * columns + w
        return ((d * rows + h) * columns + w) * self.channels + cc

    def place(self, column: Expr) -> tuple[tuple[Expr, Expr, Expr], Expr]:
        """Return what `column` counts: a phase of each axis, within its run, and the channel of the tile."""
        _, rows, columns = (axis.run.count for axis in self.axes)
        if self.wide:
            cc, outer = column // columns % self.channels, column // (columns * self.channels)
            return (outer // rows, outer % rows, column % columns), cc
        phases = column // self.channels
        return (phases // (columns * rows), phases // columns % rows, phases % columns), column % self.channels


@dataclass(frozen=True, slots=True)
class MatrixDefinition:
    """A definition as TensorIR before scheduling, and what its packed filter looks like."""

    func: PrimFunc
    sections: tuple[MatrixSection, ...]
    packed_elements: int
    end: End | None
    halo: int
    serial: int
    chunk: int
    stride: int
    row_run: int
    rank: int
    channels_last: bool
    wide: int
    out_channels: int

    @property
    def gathers(self) -> bool:
        """Whether there are stages ``rows_i``."""
        return self.row_run == 0 or any(section.parts > 1 for section in self.sections)

    def caller_index(self, *index: Expr) -> tuple[Expr, ...]:
        """Map an index of the stage ``out``, with its own group axis and three spatial axes, to the caller's output."""
        if self.channels_last and not self.wide:
            n, *spatial, g, c = index
        else:
            n, g, c, *spatial = index
        channel, place = g * self.out_channels + c, spatial[3 - self.rank :]
        return (n, *place, channel) if self.channels_last else (n, channel, *place)


def contiguous_phases(problem: Problem, lanes: int) -> int:
    """Return of how many phases of the last axis the vectors of the output are, 0 where they are not of phases.

    They are where each run has whole vectors, or halves of at least eight, of `N C *X`, and of one channel in all. Then
    channels need not be many, and nothing is transposed.
    """
    axis = Geometry.of(problem).axes[2]
    extents = (axis.stride, *(extent for run in axis.runs for extent in (run.start, run.count)))
    common = math.gcd(lanes, *extents)
    rows = problem.data_format == "NCX" or problem.groups * problem.out_channels == 1
    return common if rows and (common == lanes or common >= _HALF) else 0


def row_unit(problem: Problem, lanes: int) -> int:
    """Positions whose outputs are whole vectors of a row; 1 where rows are not made of vectors of positions."""
    stride = Geometry.of(problem).axes[2].stride
    rows = problem.data_format == "NCX" and not contiguous_phases(problem, lanes)
    return math.lcm(lanes, stride) // stride if rows else 1


def matrix_sections(geometry: Geometry, tile: MatrixTile, lanes: int, wide: bool) -> tuple[MatrixSection, ...]:
    """Lay out products and packed filter for `tile`."""
    found: list[MatrixSection] = []
    offset = 0
    panel = tile.vectors * lanes
    taken = spans(geometry, tile.block[1:])
    for runs in geometry.runs:
        axes = tuple(
            axis_rows(axis, run, positions, m)
            for axis, run, positions, m in zip(geometry.axes, runs, taken, tile.outputs, strict=True)
        )
        columns = math.prod(run.count for run in runs) * tile.channels
        shape = (
            geometry.groups,
            -(-geometry.out_channels // tile.channels),
            *((len(STRASSEN.data), 1, 1) if tile.strassen else (axis.points for axis in axes)),
            -(-columns // (panel * tile.parts)),
            *(axis.taps for axis in axes),
            part_channels(geometry.in_channels, tile, lanes),
            panel,
        )
        found.append(MatrixSection(offset, (axes[0], axes[1], axes[2]), shape, tile.channels, wide, tile.parts))
        offset += math.prod(shape)
    return tuple(found)


def block_positions(geometry: Geometry, tile: MatrixTile) -> tuple[int, int, int]:
    """Extents of one image of a packed block: its positions, to whole rows of every run, and the halo of the taps."""
    extents = []
    for axis, positions, m in zip(geometry.axes, spans(geometry, tile.block[1:]), tile.outputs, strict=True):
        rows = [axis_rows(axis, run, positions, m) for run in axis.runs]
        last = [row.start + (row.tiles - 1) * row.outputs + (row.window - 1) * row.step for row in rows]
        extents.append(max(last, default=0) + 1)
    return extents[0], extents[1], extents[2]


def finishes_planes(geometry: Geometry, tile: MatrixTile, lanes: int, chunk: int) -> bool:
    """Whether channels of `N C *X` are finished by planes: rows are no whole chunks, but small planes are vectors."""
    height, width = geometry.output[1:]
    whole = all(axis.positions <= size for axis, size in zip(geometry.axes[1:], tile.block[2:], strict=True))
    small = height * width <= _LARGEST_PLANE and height * width % lanes == 0
    return whole and small and width % chunk > 0 and not any(geometry.dynamic)


def packs_rows(problem: Problem, tile: MatrixTile, lanes: int) -> bool:
    """Whether the packed data are the rows of the only products: all phases read one element, the same.

    Where rows are transposed from `N C *X`, squares of vectors must not reach from one image into the next.
    """
    geometry = Geometry.of(problem, bool(tile.uncropped))
    single = len(geometry.runs) == 1 and all(run.taps == 1 for run in geometry.runs[0])
    plane = math.prod(spans(geometry, tile.block[1:]))
    return single and (problem.data_format == "NXC" or tile.images == 1 or plane % lanes == 0)


def row_channels(in_channels: int, lanes: int) -> int:
    """Input channels of a row in memory: whole vectors, and no pitch at which many rows share a line of the cache."""
    padded = -(-in_channels // lanes) * lanes
    return padded + lanes if padded * 4 % 1024 == 0 else padded


def part_channels(in_channels: int, tile: MatrixTile, lanes: int) -> int:
    """Input channels of each part of a product: all, or half of them to whole vectors."""
    return -(-in_channels // (lanes * tile.parts)) * lanes if tile.strassen else in_channels


def define_matrix(problem: Problem, tile: MatrixTile, lanes: int) -> MatrixDefinition:
    """Define `problem` blocked by `tile`, for vectors of `lanes` accumulators.

    The parameters are the data and the bias, if the epilogue has one, as the caller has them, the packed filter, and
    the output as ``[N, G, Co, D, H, W]`` or ``[N, D, H, W, G, Co]``: `caller_index` makes it the caller's.  Raises
    ValueError for a tile that cannot be scheduled.
    """
    if tile.strassen and (tile.strassen != 1 or max(tile.outputs) > 1):
        raise ValueError(f"strassen={tile.strassen}: must be 0, or 1 where outputs of all axes are 1")
    geo, whole = Geometry.of(problem, bool(tile.uncropped)), Extents.of(problem)
    last = problem.data_format == "NXC"
    accumulator = problem.accumulate_dtype
    axes = geo.axes
    strides = tuple(axis.stride for axis in axes)
    wide = contiguous_phases(problem, lanes)
    sections = matrix_sections(geo, tile, lanes, wide > 0)
    packed_elements = max(1, sum(math.prod(section.shape) for section in sections))

    block = tile.block
    blocks = whole.blocks(block)
    extents = block_positions(geo, tile)
    groups, channel_tiles = geo.groups, -(-geo.out_channels // tile.channels)
    lead = (*blocks, groups, channel_tiles)
    terms = part_channels(geo.in_channels, tile, lanes)
    channels = row_channels(tile.parts * terms, lanes)

    spatial = whole.spatial(problem.rank)
    data_shape = (whole.batch, *spatial, geo.groups * geo.in_channels)
    if not last:
        data_shape = (whole.batch, geo.groups * geo.in_channels, *spatial)
    data = te.placeholder(shape_of(data_shape), storage_dtype(problem.dtype), "data")
    packed = te.placeholder(shape_of((packed_elements,)), accumulator, "packed_filter")
    parameters = [data, packed]

    # Channels last: [n, d, h, w, ci]. Where the data are not, rows of them come first, and are transposed in squares of
    # vectors, for which a row is whole vectors.
    width = extents[2] if last else -(-extents[2] // lanes) * lanes
    packs = packs_rows(problem, tile, lanes)
    plane = math.prod(extents)
    count = tile.images * plane
    flat = -(-count // tile.rows) * tile.rows
    if not last:
        flat = -(-flat // lanes) * lanes

    def element(at: Sequence[Expr], g: Expr, n: Expr, d: Expr, h: Expr, w: Expr, ci: Expr) -> Expr:
        inside = [ci < geo.in_channels] if channels > geo.in_channels else []
        return data_element(problem, geo, whole, data, block, (n, d, h, w), at, g, ci, inside)

    def row_element(at: Sequence[Expr], g: Expr, row: Expr, ci: Expr) -> Expr:
        inside = [row < count] if flat > count else []
        inside += [ci < geo.in_channels] if channels > geo.in_channels else []
        n, position = (row // plane, row % plane) if tile.images > 1 else (tirx.const(0, "int64"), row)
        where = (n, position // (extents[2] * extents[1]), position // extents[2] % extents[1], position % extents[2])
        return data_element(problem, geo, whole, data, block, where, at, g, ci, inside)

    within = (flat,) if packs else (tile.images, *extents[:2], width)
    if packs and last:

        def data_pack(*index: Expr) -> Expr:
            *at, g, row, ci = index
            return row_element(at, g, row, ci)

    elif last:

        def data_pack(*index: Expr) -> Expr:
            *at, g, n, d, h, w, ci = index
            return element(at, g, n, d, h, w, ci)

    else:

        def data_rows(*index: Expr) -> Expr:
            if packs:
                *at, g, ci, row = index
                return row_element(at, g, row, ci)
            *at, g, n, d, h, ci, w = index
            return element(at, g, n, d, h, w, ci)

        data_rows_shape = (*blocks, groups, *within[:-1], channels, within[-1])
        rows_of_data = te.compute(shape_of(data_rows_shape), data_rows, "data_rows")

        def data_pack(*index: Expr) -> Expr:
            *at, w, ci = index
            return rows_of_data[(*at, ci, w)]

    data_packed = te.compute(shape_of((*blocks, groups, *within, channels)), data_pack, "data_pack")

    def gather(section: MatrixSection, name: str) -> te.Tensor:
        counts = [axis.tiles for axis in section.axes]
        rows = tile.images * math.prod(counts)
        padded_rows = -(-rows // (tile.rows * tile.parts)) * tile.rows

        def gathered(at: Sequence[Expr], points: Sequence[Expr], row: Expr, taps: Sequence[Expr], ci: Expr) -> Expr:
            # Rows beyond the last repeat the last: what is computed from them is never read.
            row = tirx.min(row, rows - 1) if padded_rows * tile.parts > rows else row
            if packs:
                return data_packed[(*at, row, ci)]
            where = (
                row // (counts[2] * counts[1] * counts[0]),
                row // (counts[2] * counts[1]) % counts[0],
                row // counts[2] % counts[1],
                row % counts[2],
            )
            first = [
                i * axis.outputs + axis.start + (0 if axis.transformed else (axis.window - 1 - tap) * axis.step)
                for i, axis, tap in zip(where[1:], section.axes, taps, strict=True)
            ]

            matrices = [winograd(a.outputs, a.run.taps).data if a.transformed else None for a in section.axes]

            def packed_element(*x: Expr) -> Expr:
                return data_packed[(*at, where[0], *x, ci)]

            return transform(matrices, points, first, packed_element, accumulator)

        def body(*index: Expr) -> Expr:
            at, points, row, taps, ci = index[:5], index[5:8], index[8], index[9:12], index[12]
            if section.parts == 1:
                return gathered(at, points, row, taps, ci)

            def quarter(number: Expr) -> Expr:
                return gathered(at, points, row * 2 + number // 2, taps, ci + number % 2 * terms)

            return transform([STRASSEN.data], points, [tirx.const(0, "int64")], quarter, accumulator)

        shape = (*blocks, groups, *section.points, padded_rows, *section.taps, row_channels(terms, lanes))
        return te.compute(shape_of(shape), body, name)

    def multiply(section: MatrixSection, name: str, rows: te.Tensor | None) -> te.Tensor:
        taps = [te.reduce_axis(tuple(shape_of((0, count))), f"t{i}") for i, count in enumerate(section.taps)]
        ci = te.reduce_axis(tuple(shape_of((0, terms))), "ci")
        panel = section.shape[-1]

        def body(*index: Expr) -> Expr:
            *at, g, co, pd, ph, pw, row, column = index
            within = [t.var for t in taps]
            where = ravel((g, co, pd, ph, pw, column // panel, *within, ci.var, column % panel), section.shape)
            left = (
                rows[(*at, g, pd, ph, pw, row, *within, ci.var)]
                if rows is not None
                else data_packed[(*at, g, row, ci.var)]
            )
            return te.sum(left * packed[where + section.offset], axis=[*taps, ci])

        row_count = int(rows.shape[8]) if rows is not None else -(-count // tile.rows) * tile.rows
        return te.compute(shape_of((*lead, *section.points, row_count, section.shape[5] * panel)), body, name)

    def transform_outputs(section: MatrixSection, product: te.Tensor, name: str) -> te.Tensor:
        def body(*index: Expr) -> Expr:
            at, row, places, column = index[:LEAD], index[LEAD], index[LEAD + 1 : LEAD + 4], index[LEAD + 4]
            matrices = [winograd(a.outputs, a.run.taps).outputs if a.transformed else None for a in section.axes]
            if section.parts > 1:
                matrices[0] = STRASSEN.outputs
                places = (row % 2 * 2 + column // section.part_columns, *places[1:])
                row, column = row // 2, column % section.part_columns
            zero = [tirx.const(0, "int64")] * 3

            def result(*points: Expr) -> Expr:
                return product[(*at, *points, row, column)]

            return transform(matrices, places, zero, result, accumulator)

        rows = tile.images * math.prod(axis.tiles for axis in section.axes)
        rows, columns = rows + rows % section.parts, section.part_columns * section.parts
        shape = (*lead, rows, *(axis.outputs for axis in section.axes), columns)
        return te.compute(shape_of(shape), body, name)

    computed = []
    for i, section in enumerate(sections):
        product = multiply(section, f"run_{i}", None if packs and not tile.strassen else gather(section, f"rows_{i}"))
        computed.append(transform_outputs(section, product, f"outputs_{i}") if section.transformed else product)

    bias = None
    if problem.epilogue.bias:
        bias = te.placeholder(shape_of(problem.bias_shape), accumulator, "bias")
        parameters.append(bias)

    def finish(at: Sequence[Expr], n: Expr, out_index: Sequence[Expr], cc: Expr) -> Expr:
        """The output at an index of the block (image, three output coordinates) and a channel of the tile."""
        phases, places = [], []
        for i, axis, span in zip(out_index, axes, spans(geo, block[1:]), strict=True):
            phase, place = axis.place(i)
            phases.append(phase)
            places.append(tirx.min(place, span - 1))
        value: Expr = tirx.const(0, accumulator)
        for tensor, section in zip(reversed(computed), reversed(sections), strict=True):
            local, member = within_runs(phases, [axis.run for axis in section.axes], strides)
            row, inner = n, []
            for place, rows in zip(places, section.axes, strict=True):
                row = row * rows.tiles + place // rows.outputs
                inner.append(place % rows.outputs)
            column = section.column(local, cc)
            points = inner if section.transformed else [tirx.const(0, "int64")] * 3
            index = (*at, row, *points, column) if section.transformed else (*at, *points, row, column)
            here = tensor[index]
            value = tirx.if_then_else(tirx.all(*member), here, value) if member else here
        if bias is not None:
            channel = tirx.min(at[5] * tile.channels + cc, geo.out_channels - 1)
            value = value + bias[at[4] * geo.out_channels + channel]
        return activate(problem.epilogue, value)

    outer = (
        at_most(tile.images, whole.batch),
        at_most(tile.depth * strides[0], whole.output[0]),
        at_most(tile.height * strides[1], whole.output[1]),
    )
    row_outputs = tile.width * strides[2]
    unit = row_unit(problem, lanes)
    if (tile.width < axes[2].positions or geo.dynamic[2]) and tile.width % unit:
        # Its rows in whole vectors would be longer than their share of the output, and spill into the next block's.
        raise ValueError(f"width={tile.width}: must be a multiple of {unit} where a row has several blocks")
    chunk = unit * strides[2]
    if last or wide:

        def finished(*index: Expr) -> Expr:
            *at, n, d, h, w, cc = (*index[:LEAD], *index[LEAD + 1 :], index[LEAD]) if wide else index
            return finish(at, n, (d, h, w), cc)

        inner_shape = (tile.channels, *outer, row_outputs) if wide else (*outer, row_outputs, tile.channels)
        interleaved = te.compute(shape_of((*lead, *inner_shape)), finished, "epilogue")
    else:
        planes = finishes_planes(geo, tile, lanes, chunk)
        if planes:
            heights, chunks, chunk, width = 1, 1, geo.output[1] * geo.output[2], geo.output[2]
        else:
            heights, chunks = outer[2], -(-row_outputs // chunk)
            width = chunks * chunk
        channel_vectors = -(-tile.channels // lanes)

        def epilogue(*index: Expr) -> Expr:
            *at, vector, n, d, h, c, i, lane = index
            cc = vector * lanes + lane
            if tile.channels % lanes:
                cc = tirx.min(cc, tile.channels - 1)
            where = (i // width, i % width) if planes else (h, c * chunk + i)
            return finish(at, n, (d, *where), cc)

        shape = (*lead, channel_vectors, *outer[:2], heights, chunks, chunk, lanes)
        finished_vectors = te.compute(shape_of(shape), epilogue, "epilogue")

        def interleave(*index: Expr) -> Expr:
            *at, n, lane, place = index
            where = (place // (chunk * chunks * heights), place // (chunk * chunks) % heights, place // chunk % chunks)
            return finished_vectors[(*at, n, *where, place % chunk, lane)]

        # The rows of a channel lie together: they are one piece of the output where they are whole.
        rows_shape = (*outer[1:], width)
        shape = (*lead, channel_vectors, outer[0], lanes, math.prod(rows_shape))
        flat_rows = te.compute(shape_of(shape), interleave, "interleave")

        def rows_out(*index: Expr) -> Expr:
            *at, d, h, w = index
            return flat_rows[(*at, ravel((d, h, w), rows_shape))]

        interleaved = te.compute(shape_of((*shape[:-1], *rows_shape)), rows_out, "rows_out")

    def out(*index: Expr) -> Expr:
        if last and not wide:
            n, d, h, w, g, c = index
        else:
            n, g, c, d, h, w = index
        tile_of, cc = split_index(c, tile.channels, channel_tiles)
        sizes = (*outer, row_outputs)
        cuts = [split_index(i, size, count) for i, size, count in zip((n, d, h, w), sizes, blocks, strict=True)]
        at, (*where, w) = (*(number for number, _ in cuts), g, tile_of), (within for _, within in cuts)
        if wide:
            inner = (cc, *where, w)
        elif last:
            inner = (*where, w, cc)
        else:
            inner = (cc // lanes, where[0], cc % lanes, *where[1:], w)
        return from_accumulator(interleaved[(*at, *inner)], problem.output_dtype)

    channel_axes, position_axes = (geo.groups, geo.out_channels), (whole.batch, *whole.output)
    shape = (*position_axes, *channel_axes) if last and not wide else (whole.batch, *channel_axes, *whole.output)
    func = te.create_prim_func([*parameters, te.compute(shape_of(shape), out, "out")])
    end = whole.end(block, spans(geo, block[1:]))
    # A row past the end is a part of sums where the row before it is not.
    rows_of_end = [section.axes[end.axis] for section in sections] if end else []
    halo = max((rows.start + (rows.window - 1) * rows.step for rows in rows_of_end), default=0) + tile.strassen
    return MatrixDefinition(
        byte_aligned(func),
        sections,
        packed_elements,
        end,
        halo,
        whole.serial,
        chunk,
        strides[2],
        plane if packs else 0,
        problem.rank,
        last,
        wide,
        geo.out_channels,
    )
