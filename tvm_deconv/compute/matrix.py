"""Transposed convolution by phases as matrix products, in tensor expressions.

Each combination of runs of phases is one matrix product. Its rows are positions. Its columns are the output channels of
all phases of the runs, since these phases read the same data. The reduction goes over taps and input channels.

Two algorithms save products:

- Winograd's F(m, taps) applies along an axis on which a run has several taps. A row is then a tile of ``m`` positions,
  and there is one product for each of ``m + taps - 1`` points. Rows are sums of data, filters are sums of taps, and
  outputs are sums of results. On every other axis ``m`` is 1.
- Strassen's algorithm applies if no axis uses Winograd's. It halves rows, input channels and columns of a product. A
  row is then a pair of positions, and there are seven points.

Every stage is blocked over images and positions (``nb, db, hb, wb``) and groups ``g``. From the third on, stages are
blocked over tiles of output channels ``co`` too. In the order in which data flow:

1. ``data_pack`` holds the data of a block and its halo, input channels innermost, with zeros past the end of the data.
   For ``N C *X`` it transposes ``data_rows``.
2. ``rows_i`` gathers the rows of product i and transforms them. If all phases read the same single element (kernel =
   stride) and nothing is transformed, the packed data are the rows, and there is no such stage.
3. ``run_i`` multiplies.
4. ``outputs_i`` transforms the results of Winograd's or Strassen's algorithm.
5. ``epilogue`` selects the phase, adds the bias and applies the activation. If its vectors do not lie in the output as
   they are, ``interleave`` transposes them into rows, and ``rows_out`` gives the rows the axes of the output.
6. ``out`` copies rows into the output.
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
from tvm_deconv.compute.matrix_layout import (
    MatrixSection,
    MatrixTile,
    block_positions,
    contiguous_phases,
    finishes_planes,
    matrix_sections,
    packs_rows,
    part_channels,
    row_channels,
    row_unit,
)
from tvm_deconv.compute.phases import Geometry
from tvm_deconv.compute.storage import from_accumulator, storage_dtype
from tvm_deconv.compute.strassen import STRASSEN
from tvm_deconv.compute.transforms import transform
from tvm_deconv.compute.winograd import winograd
from tvm_deconv.problem import Problem
from tvm_deconv.problem.arithmetic import ceil_div, round_up

Index = Sequence[Expr]


@dataclass(frozen=True, slots=True)
class MatrixDefinition:
    """A definition as TensorIR before scheduling, and the facts that scheduling and packing need.

    `packed_elements` is the size of the packed filter, and `sections` are its parts. `end` is the end of a dynamic
    axis; data are needed up to `halo` positions beyond it. `serial` counts the axes of blocks up to the last dynamic
    one. A row is finished in chunks of `chunk` outputs, and a position of the last axis has `stride` outputs. If the
    packed data are the rows of the product, `row_run` is the number of successive rows of an image, else 0. `rank` is
    the caller's number of spatial axes. `contiguous_phases` is that of the function of this name.
    """

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
    contiguous_phases: int
    out_channels: int

    @property
    def gathers(self) -> bool:
        """True if there are stages ``rows_i``."""
        return self.row_run == 0 or any(section.parts > 1 for section in self.sections)

    @property
    def interleaves(self) -> bool:
        """True if the epilogue is transposed: there are stages ``interleave`` and ``rows_out``."""
        return not self.channels_last and not self.contiguous_phases

    def caller_index(self, *index: Expr) -> tuple[Expr, ...]:
        """Map an index of the stage ``out``, with its own group axis and three spatial axes, to the caller's output."""
        if self.channels_last and not self.contiguous_phases:
            n, *spatial, g, c = index
        else:
            n, g, c, *spatial = index
        channel, place = g * self.out_channels + c, spatial[3 - self.rank :]
        return (n, *place, channel) if self.channels_last else (n, channel, *place)


def define_matrix(problem: Problem, tile: MatrixTile, lanes: int) -> MatrixDefinition:
    """Define `problem` blocked by `tile`, for vectors of `lanes` accumulators.

    The parameters are the caller's data, the packed filter, the caller's bias if the epilogue has one, and the output.
    The output is ``[N, G, Co, D, H, W]`` or ``[N, D, H, W, G, Co]``; `caller_index` makes it the caller's. Raises
    ValueError for a tile that cannot be scheduled.
    """
    if tile.strassen and (tile.strassen != 1 or max(tile.outputs) > 1):
        raise ValueError(f"strassen={tile.strassen}: must be 0, or 1 where outputs of all axes are 1")
    geometry, unit = Geometry.of(problem, bool(tile.uncropped)), row_unit(problem, lanes)
    if (tile.width < geometry.axes[2].positions or geometry.dynamic[2]) and tile.width % unit:
        # In whole vectors its rows would be longer than their share of the output, and spill into the next block's.
        raise ValueError(f"width={tile.width}: must be a multiple of {unit} where a row has several blocks")
    return _Builder(problem, geometry, tile, lanes).build()


def _zero() -> Expr:
    return tirx.const(0, "int64")


def _unravel(number: Expr, extents: Sequence[int]) -> list[Expr]:
    """Return the index of element `number` of an array of these `extents`: the inverse of `ravel`.

    The first axis is never wrapped.
    """
    index = []
    for axis, extent in enumerate(extents):
        inner = math.prod(extents[axis + 1 :])
        place = number // inner if axis + 1 < len(extents) else number
        index.append(place % extent if axis else place)
    return index


@dataclass(frozen=True, slots=True)
class _Chunks:
    """The pieces of a block's rows that are transposed as a unit.

    There are `heights` x `chunks` pieces of `chunk` outputs in each plane, and a row has `width` outputs. If `planes`,
    the only piece is the whole plane.
    """

    heights: int
    chunks: int
    chunk: int
    width: int
    planes: bool


class _Builder:
    """The stages of one definition, as methods in the order in which data flow, and the numbers that they share."""

    def __init__(self, problem: Problem, geometry: Geometry, tile: MatrixTile, lanes: int) -> None:
        self.problem, self.geometry, self.tile, self.lanes = problem, geometry, tile, lanes
        self.extents = Extents.of(problem)
        self.accumulator = problem.accumulate_dtype
        self.channels_last = problem.data_format == "NXC"
        self.contiguous_phases = contiguous_phases(problem, lanes)
        self.sections = matrix_sections(geometry, tile, lanes, self.contiguous_phases > 0)
        self.strides = tuple(axis.stride for axis in geometry.axes)
        # The first axes of the stages.
        self.blocks = self.extents.blocks(tile.block)
        self.channel_tiles = ceil_div(geometry.out_channels, tile.channels)
        self.lead = (*self.blocks, geometry.groups, self.channel_tiles)
        # A block of packed data: positions of an image, positions of all images, input channels in memory.
        self.positions = block_positions(geometry, tile)
        self.plane = math.prod(self.positions)
        self.packed_rows = tile.images * self.plane
        self.part_channels = part_channels(geometry.in_channels, tile, lanes)
        self.packed_channels = row_channels(tile.parts * self.part_channels, lanes)
        self.packs_rows = packs_rows(problem, tile, lanes)
        # A block of the output. One that holds a whole axis holds no more of it than there is.
        self.outputs = (
            at_most(tile.images, self.extents.batch),
            at_most(tile.depth * self.strides[0], self.extents.output[0]),
            at_most(tile.height * self.strides[1], self.extents.output[1]),
            tile.width * self.strides[2],
        )
        self._declare_parameters()

    def _declare_parameters(self) -> None:
        """Declare the caller's data, the packed filter and the caller's bias."""
        problem, geometry, extents = self.problem, self.geometry, self.extents
        channels, spatial = geometry.groups * geometry.in_channels, extents.spatial(problem.rank)
        shape = (extents.batch, *spatial, channels) if self.channels_last else (extents.batch, channels, *spatial)
        self.data = te.placeholder(shape_of(shape), storage_dtype(problem.dtype), "data")
        self.packed_elements = max(1, sum(math.prod(section.shape) for section in self.sections))
        self.packed_filter = te.placeholder(shape_of((self.packed_elements,)), self.accumulator, "packed_filter")
        self.bias = None
        if problem.epilogue.bias:
            self.bias = te.placeholder(shape_of(problem.bias_shape), self.accumulator, "bias")

    def build(self) -> MatrixDefinition:
        """Return the definition: all stages, and the facts about them."""
        data = self.pack_data()
        results = []
        for number, section in enumerate(self.sections):
            gathers = not self.packs_rows or section.parts > 1
            rows = self.gather_rows(section, data, f"rows_{number}") if gathers else data
            product = self.multiply(section, rows, gathers, f"run_{number}")
            if section.transformed:
                product = self.transform_results(section, product, f"outputs_{number}")
            results.append(product)
        if self.channels_last or self.contiguous_phases:
            chunk, finished = row_unit(self.problem, self.lanes) * self.strides[2], self.finish(results)
        else:
            chunks = self.chunks()
            chunk, finished = chunks.chunk, self.interleave(chunks, self.finish_chunks(chunks, results))
        parameters = [self.data, self.packed_filter, *([self.bias] if self.bias is not None else [])]
        func = te.create_prim_func([*parameters, self.copy_to_output(finished)])
        end = self.extents.end(self.tile.block, spans(self.geometry, self.tile.block[1:]))
        return MatrixDefinition(
            byte_aligned(func),
            self.sections,
            self.packed_elements,
            end,
            self.halo(end),
            self.extents.serial,
            chunk,
            self.strides[2],
            self.plane if self.packs_rows else 0,
            self.problem.rank,
            self.channels_last,
            self.contiguous_phases,
            self.geometry.out_channels,
        )

    def halo(self, end: End | None) -> int:
        """Return how many positions beyond the `end` of the output need data."""
        rows = [section.axes[end.axis] for section in self.sections] if end else []
        furthest = max((axis.start + (axis.window - 1) * axis.step for axis in rows), default=0)
        # Strassen's sums contain a row past the end if the row before it is not past it.
        return furthest + self.tile.strassen

    # Stage 1: data.

    def pack_data(self) -> te.Tensor:
        """Copy the data of each block, input channels innermost.

        The shape is ``[*blocks, g, n, d, h, w, ci]``, or ``[*blocks, g, row, ci]`` if the packed data are rows.
        """
        # Data of `N C *X` are transposed in squares of vectors, for which the last axis must be whole vectors.
        unit = 1 if self.channels_last else self.lanes
        if self.packs_rows:
            inner: tuple[int, ...] = (round_up(round_up(self.packed_rows, self.tile.rows), unit),)
        else:
            inner = (self.tile.images, *self.positions[:2], round_up(self.positions[2], unit))
        lead = (*self.blocks, self.geometry.groups)
        shape = shape_of((*lead, *inner, self.packed_channels))
        if self.channels_last:
            return te.compute(shape, lambda *index: self.data_at(inner, index[:-1], index[-1]), "data_pack")

        transposed = shape_of((*lead, *inner[:-1], self.packed_channels, inner[-1]))
        rows = te.compute(
            transposed, lambda *index: self.data_at(inner, (*index[:-2], index[-1]), index[-2]), "data_rows"
        )
        return te.compute(shape, lambda *index: rows[(*index[:-2], index[-1], index[-2])], "data_pack")

    def data_at(self, extents: Sequence[int], index: Index, channel: Expr) -> Expr:
        """Return an element of the packed data: zero outside of the data and of the `extents` in use.

        `index` is ``(nb, db, hb, wb, g, n, d, h, w)``, or ``(nb, db, hb, wb, g, row)`` if the packed data are rows.
        """
        at, group, within, inside = index[:4], index[4], index[5:], []
        if self.packs_rows:
            row = within[0]
            if extents[0] > self.packed_rows:
                inside.append(row < self.packed_rows)
            n, position = (row // self.plane, row % self.plane) if self.tile.images > 1 else (_zero(), row)
            within = (n, *_unravel(position, self.positions))
        if self.packed_channels > self.geometry.in_channels:
            inside.append(channel < self.geometry.in_channels)
        return data_element(
            self.problem, self.geometry, self.extents, self.data, self.tile.block, within, at, group, channel, inside
        )

    # Stage 2: rows.

    def gather_rows(self, section: MatrixSection, data: te.Tensor, name: str) -> te.Tensor:
        """Gather the rows of a product from the packed `data`, transformed by the algorithm of the section.

        The shape is ``[*blocks, g, *points, row, *taps, ci]``.
        """

        def row_point(*index: Expr) -> Expr:
            at, points, row, taps, channel = index[:5], index[5:8], index[8], index[9:12], index[12]
            if section.parts == 1:
                return self.row_element(section, data, at, points, row, taps, channel)

            def quarter(number: Expr) -> Expr:
                half_rows, half_channels = row * 2 + number // 2, channel + number % 2 * self.part_channels
                return self.row_element(section, data, at, points, half_rows, taps, half_channels)

            return transform([STRASSEN.data], points, [_zero()], quarter, self.accumulator)

        channels = row_channels(self.part_channels, self.lanes)
        groups, rows = self.geometry.groups, self.gathered_rows(section)
        shape = (*self.blocks, groups, *section.points, rows, *section.taps, channels)
        return te.compute(shape_of(shape), row_point, name)

    def gathered_rows(self, section: MatrixSection) -> int:
        """Return the rows of a product, in whole register tiles."""
        return ceil_div(self.tile.images * section.rows, self.tile.rows * self.tile.parts) * self.tile.rows

    def row_element(
        self,
        section: MatrixSection,
        data: te.Tensor,
        at: Index,
        points: Index,
        row: Expr,
        taps: Index,
        channel: Expr,
    ) -> Expr:
        """Return an element of a row: a packed element, or the sum of them at Winograd's `points`.

        `at` is ``(nb, db, hb, wb, g)``.
        """
        rows = self.tile.images * section.rows
        if self.gathered_rows(section) * self.tile.parts > rows:
            # Rows beyond the last repeat it: nothing reads their products.
            row = tirx.min(row, rows - 1)
        if self.packs_rows:
            return data[(*at, row, channel)]
        image, *places = _unravel(row, (self.tile.images, *(axis.tiles for axis in section.axes)))
        first = [
            place * axis.outputs + axis.start + (0 if axis.transformed else (axis.window - 1 - tap) * axis.step)
            for place, axis, tap in zip(places, section.axes, taps, strict=True)
        ]
        matrices = [winograd(a.outputs, a.run.taps).data if a.transformed else None for a in section.axes]
        return transform(matrices, points, first, lambda *place: data[(*at, image, *place, channel)], self.accumulator)

    # Stage 3: products.

    def multiply(self, section: MatrixSection, rows: te.Tensor, gathered: bool, name: str) -> te.Tensor:
        """Multiply `rows` by the packed filter of `section`.

        If not `gathered`, `rows` are the packed data. The shape is ``[*lead, *points, row, column]``.
        """
        taps = [te.reduce_axis(tuple(shape_of((0, count))), f"t{i}") for i, count in enumerate(section.taps)]
        channel = te.reduce_axis(tuple(shape_of((0, self.part_channels))), "ci")
        panels, panel = section.shape[5], section.shape[-1]
        tap = [axis.var for axis in taps]

        def products(*index: Expr) -> Expr:
            *at, g, co, pd, ph, pw, row, column = index
            place = ravel((g, co, pd, ph, pw, column // panel, *tap, channel.var, column % panel), section.shape)
            left = rows[(*at, g, *((pd, ph, pw, row, *tap) if gathered else (row,)), channel.var)]
            return te.sum(left * self.packed_filter[place + section.offset], axis=[*taps, channel])

        row_count = self.gathered_rows(section) if gathered else round_up(self.packed_rows, self.tile.rows)
        return te.compute(shape_of((*self.lead, *section.points, row_count, panels * panel)), products, name)

    # Stage 4: results.

    def transform_results(self, section: MatrixSection, product: te.Tensor, name: str) -> te.Tensor:
        """Sum the results of a `product` over its points.

        The shape is ``[*lead, row, *outputs, column]``. Rows and columns of Strassen's algorithm are whole again.
        """
        matrices = [winograd(a.outputs, a.run.taps).outputs if a.transformed else None for a in section.axes]
        if section.parts > 1:
            matrices[0] = STRASSEN.outputs

        def results(*index: Expr) -> Expr:
            at, row, places, column = index[:LEAD], index[LEAD], index[LEAD + 1 : LEAD + 4], index[LEAD + 4]
            if section.parts > 1:
                places = (row % 2 * 2 + column // section.part_columns, *places[1:])
                row, column = row // 2, column % section.part_columns
            return transform(
                matrices,
                places,
                [_zero()] * 3,
                lambda *point: product[(*at, *point, row, column)],
                self.accumulator,
            )

        rows = round_up(self.tile.images * section.rows, section.parts)
        shape = (*self.lead, rows, *(axis.outputs for axis in section.axes), section.part_columns * section.parts)
        return te.compute(shape_of(shape), results, name)

    # Stage 5: epilogue.

    def finish(self, results: Sequence[te.Tensor]) -> te.Tensor:
        """Finish outputs as they lie in the output.

        The shape is ``[*lead, n, d, h, w, cc]``, or ``[*lead, cc, n, d, h, w]`` if phases are the vectors.
        """
        phases_last = self.contiguous_phases > 0

        def finished(*index: Expr) -> Expr:
            *at, n, d, h, w, channel = (*index[:LEAD], *index[LEAD + 1 :], index[LEAD]) if phases_last else index
            return self.output(results, at, n, (d, h, w), channel)

        inner = (self.tile.channels, *self.outputs) if phases_last else (*self.outputs, self.tile.channels)
        return te.compute(shape_of((*self.lead, *inner)), finished, "epilogue")

    def chunks(self) -> _Chunks:
        """Return the pieces in which rows are transposed: chunks of a row, or whole small planes."""
        chunk = row_unit(self.problem, self.lanes) * self.strides[2]
        if finishes_planes(self.geometry, self.tile, self.lanes, chunk):
            height, width = self.geometry.output[1:]
            return _Chunks(1, 1, height * width, width, planes=True)
        chunks = ceil_div(self.outputs[3], chunk)
        return _Chunks(self.outputs[2], chunks, chunk, chunks * chunk, planes=False)

    def finish_chunks(self, chunks: _Chunks, results: Sequence[te.Tensor]) -> te.Tensor:
        """Finish chunks of rows, with vectors along channels.

        The shape is ``[*lead, vector, n, d, height, chunk, place, lane]``.
        """

        def finished(*index: Expr) -> Expr:
            *at, vector, n, d, h, c, i, lane = index
            channel = vector * self.lanes + lane
            if self.tile.channels % self.lanes:
                channel = tirx.min(channel, self.tile.channels - 1)
            h, w = (i // chunks.width, i % chunks.width) if chunks.planes else (h, c * chunks.chunk + i)
            return self.output(results, at, n, (d, h, w), channel)

        vectors = ceil_div(self.tile.channels, self.lanes)
        inner = (vectors, *self.outputs[:2], chunks.heights, chunks.chunks, chunks.chunk, self.lanes)
        return te.compute(shape_of((*self.lead, *inner)), finished, "epilogue")

    def interleave(self, chunks: _Chunks, finished: te.Tensor) -> te.Tensor:
        """Transpose chunks into rows of channels.

        The shape is ``[*lead, vector, n, lane, d, h, w]``. The rows of a channel lie together, so whole ones are a
        single piece of the output.
        """

        def interleaved(*index: Expr) -> Expr:
            *at, n, lane, place = index
            piece = _unravel(place // chunks.chunk, (self.outputs[1], chunks.heights, chunks.chunks))
            return finished[(*at, n, *piece, place % chunks.chunk, lane)]

        rows_shape = (*self.outputs[1:3], chunks.width)
        vectors = ceil_div(self.tile.channels, self.lanes)
        shape = (*self.lead, vectors, self.outputs[0], self.lanes)
        flat = te.compute(shape_of((*shape, math.prod(rows_shape))), interleaved, "interleave")
        return te.compute(
            shape_of((*shape, *rows_shape)),
            lambda *index: flat[(*index[:-3], ravel(index[-3:], rows_shape))],
            "rows_out",
        )

    def output(self, results: Sequence[te.Tensor], at: Index, image: Expr, coordinates: Index, channel: Expr) -> Expr:
        """Return the output at an `image` and three `coordinates` of a block, and at a `channel` of its tile."""
        phases, places = [], []
        axes = zip(coordinates, self.geometry.axes, spans(self.geometry, self.tile.block[1:]), strict=True)
        for coordinate, axis, span in axes:
            phase, place = axis.place(coordinate)
            phases.append(phase)
            places.append(tirx.min(place, span - 1))
        value: Expr = tirx.const(0, self.accumulator)
        for result, section in zip(reversed(results), reversed(self.sections), strict=True):
            local, member = within_runs(phases, [axis.run for axis in section.axes], self.strides)
            here = self.result(section, result, at, image, places, section.column(local, channel))
            # Not Select, which loads from both: an index that is invalid in one of them makes results wrong.
            value = tirx.if_then_else(tirx.all(*member), here, value) if member else here
        if self.bias is not None:
            channel = tirx.min(at[5] * self.tile.channels + channel, self.geometry.out_channels - 1)
            value = value + self.bias[at[4] * self.geometry.out_channels + channel]
        return activate(self.problem.epilogue, value)

    @staticmethod
    def result(section: MatrixSection, result: te.Tensor, at: Index, image: Expr, places: Index, column: Expr) -> Expr:
        """Return the `result` of a section at positions `places` of an `image` of a block."""
        row, inner = image, []
        for place, axis in zip(places, section.axes, strict=True):
            row = row * axis.tiles + place // axis.outputs
            inner.append(place % axis.outputs)
        if section.transformed:
            return result[(*at, row, *inner, column)]
        return result[(*at, *[_zero()] * 3, row, column)]

    # Stage 6: output.

    def copy_to_output(self, finished: te.Tensor) -> te.Tensor:
        """Copy `finished` blocks into the output, rounded to its type.

        The shape is ``[N, D, H, W, G, Co]`` if vectors are channels, else ``[N, G, Co, D, H, W]``.
        """
        channels_inner = self.channels_last and not self.contiguous_phases

        def out(*index: Expr) -> Expr:
            if channels_inner:
                n, d, h, w, g, c = index
            else:
                n, g, c, d, h, w = index
            tile, channel = split_index(c, self.tile.channels, self.channel_tiles)
            blocked = zip((n, d, h, w), self.outputs, self.blocks, strict=True)
            at, within = zip(*(split_index(i, size, count) for i, size, count in blocked), strict=True)
            if self.contiguous_phases:
                inner = (channel, *within)
            elif self.channels_last:
                inner = (*within, channel)
            else:
                inner = (channel // self.lanes, within[0], channel % self.lanes, *within[1:])
            return from_accumulator(finished[(*at, g, tile, *inner)], self.problem.output_dtype)

        channels = (self.geometry.groups, self.geometry.out_channels)
        batch, spatial = self.extents.batch, self.extents.output
        shape = (batch, *spatial, *channels) if channels_inner else (batch, *channels, *spatial)
        return te.compute(shape_of(shape), out, "out")
