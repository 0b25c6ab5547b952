"""Transposed convolution by phases as matrix products, in tensor expressions.

Each combination of runs of phases is one matrix product. Its rows are positions. Its columns are the output channels of
all phases of the runs, since these phases read the same data. The reduction goes over taps and input channels.

Two algorithms save products:

- Winograd's F(m, taps) applies along an axis on which a run has several taps. A row is then a tile of ``m`` positions,
  and there is one product for each of ``m + taps - 1`` points. Rows are sums of data, filters are sums of taps, and
  outputs are sums of results. Taps that are dilated read data some elements apart; so far apart are the positions then.
  On every other axis ``m`` is 1.
- Strassen's algorithm applies if no axis uses Winograd's. It halves rows, input channels and columns of a product. A
  row is then a pair of positions, and there are seven points.

Every stage is blocked over images and positions (``nb, db, hb, wb``) and groups ``g``. From the third on, stages are
blocked over tiles of output channels ``co`` too. In the order in which data flow:

1. ``data_pack`` holds the data of a block and its halo, input channels innermost, with zeros past the end of the data.
   For ``N C *X`` it transposes ``data_rows``. ``data_words`` cuts it into parts where words have several, unless rows
   are transformed.
2. ``rows_i`` gathers the rows of product i and transforms them. If all phases read the same single element (kernel =
   stride) and nothing is transformed, the packed data are the rows, and there is no such stage. Where Winograd's
   transforms apply along several axes, ``rows_apart_i`` gathers what is transformed along the first of them.
3. ``run_i`` multiplies.
4. ``outputs_i`` transforms the results of Winograd's or Strassen's algorithm, those of several axes after
   ``outputs_apart_i`` has transformed them along the first.
5. ``epilogue`` selects the phase, adds the bias and applies the activation. If its vectors do not lie in the output as
   they are, ``interleave`` transposes them into rows, and ``rows_out`` gives the rows the axes of the output.
6. ``out`` copies rows into the output.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tvm import te, tirx
from tvm.ir import Expr
from tvm.tirx import PrimFunc

from tvm_deconv.compute.extents import End, reduce_axis, shape_of
from tvm_deconv.compute.indexing import (
    LEAD,
    BlockedData,
    byte_aligned,
    caller_index,
    ravel,
    split_index,
    unravel,
    within_runs,
)
from tvm_deconv.compute.matrix_layout import MatrixLayout, MatrixSection, MatrixTile, row_channels
from tvm_deconv.compute.requantization import (
    data_zero_point,
    epilogue_parameter,
    finished,
    has_scales,
    known_bias_at,
    scale_at,
    stored,
)
from tvm_deconv.compute.storage import storage_dtype
from tvm_deconv.compute.strassen import STRASSEN
from tvm_deconv.compute.transforms import transform
from tvm_deconv.compute.winograd import Matrix
from tvm_deconv.compute.words import WORD, Words, corrections_of, cut_channels, tiled
from tvm_deconv.problem import Problem
from tvm_deconv.problem.arithmetic import round_up

Index = Sequence[Expr]
Matrices = Sequence[Matrix | None]  # of each axis


@dataclass(frozen=True, slots=True)
class MatrixDefinition:
    """A definition as TensorIR before scheduling; `rank` is the caller's number of spatial axes.

    The packed filter has `packed_elements`: those of all sections, and behind them the corrections of `corrections_of`.
    """

    func: PrimFunc
    layout: MatrixLayout
    rank: int
    packed_elements: int

    @property
    def sections(self) -> tuple[MatrixSection, ...]:
        """The products, with their parts of the packed filter."""
        return self.layout.sections

    @property
    def end(self) -> End | None:
        """The end of a dynamic axis that a block may run over."""
        return self.layout.end

    def caller_index(self, *index: Expr) -> tuple[Expr, ...]:
        """Map an index of the stage ``out``, with its own group axis and three spatial axes, to the caller's output."""
        last = self.layout.channels_last
        return caller_index(
            self.layout.geometry, self.rank, index, channels_inner=self.layout.vectors_are_channels, channels_last=last
        )


def define_matrix(
    problem: Problem, tile: MatrixTile, lanes: int, words: Words | None = None, *, narrows: bool = False
) -> MatrixDefinition:
    """Define `problem` blocked by `tile`, for vectors of `lanes` accumulators, with factors in `words` if given.

    In words, rows and the filter hold these in the place of input channels. What is transformed has words with parts,
    or pairs of integers. If it `narrows`, squares of results become the type of the output as they are transposed, not
    while copied. The parameters are the caller's data, the packed filter, `epilogue_parameter` if there is one, and the
    output. That is ``[N, G, Co, D, H, W]`` or ``[N, D, H, W, G, Co]``; `MatrixDefinition.caller_index` maps it to the
    caller's. Raises ValueError for a tile that cannot be scheduled.
    """
    layout = MatrixLayout.of(words.problem(problem) if words else problem, tile, lanes)
    return _Builder(problem, layout, words, narrows).definition()


def _zero() -> Expr:
    return tirx.const(0, "int64")


def _data_matrices(section: MatrixSection) -> list[Matrix | None]:
    """Return the matrices of Winograd's data transforms, None for an axis without one."""
    return [axis.algorithm.data if axis.algorithm else None for axis in section.axes]


def _parted(matrices: Matrices, apart: int) -> tuple[list[Matrix | None], list[Matrix | None]]:
    """Return `matrices` with that of the axis `apart` alone, and with those of the other axes alone."""
    alone = [matrix if axis == apart else None for axis, matrix in enumerate(matrices)]
    return alone, [None if axis == apart else matrix for axis, matrix in enumerate(matrices)]


class _Builder:
    """The stages of a definition, in the order in which data flow."""

    def __init__(self, problem: Problem, layout: MatrixLayout, words: Words | None, narrows: bool) -> None:
        self.problem, self.layout, self.words, self.narrows = problem, layout, words, narrows
        self.accumulator = problem.accumulate_dtype
        geometry, extents = layout.geometry, layout.extents
        channels, spatial = geometry.groups * problem.in_channels, extents.spatial(problem.rank)
        shape = (extents.batch, *spatial, channels) if layout.channels_last else (extents.batch, channels, *spatial)
        self.data = te.placeholder(shape_of(shape), storage_dtype(problem.dtype), "data")
        corrected = words is not None and words.needs_correction(problem)
        counts = [math.prod(section.all_columns) for section in layout.sections] if corrected else []
        self.corrections = corrections_of(counts, layout.packed_elements)
        self.packed_elements = self.corrections[-1]
        factor = WORD if words else self.accumulator
        self.packed_filter = te.placeholder(shape_of((self.packed_elements,)), factor, "packed_filter")
        self.parameter = epilogue_parameter(problem)
        self.zero_point = data_zero_point(problem, self.parameter)
        block = layout.tile.block
        self.cut = words if words and words.cut else None
        whole = None if self.cut else words
        # Words that are transformed are sums of words, where products are not of the data as they are.
        self.summed = whole if whole and (layout.transforms or layout.tile.strassen) else None
        if self.summed:
            whole = replace(self.summed, borrows=True)
        where = problem, geometry, extents, self.data
        self.blocks = BlockedData(*where, self.accumulator, block, whole, self.zero_point)

    def definition(self) -> MatrixDefinition:
        """Connect the stages."""
        layout, packed = self.layout, self.pack_data()
        if self.cut and not layout.transforms:
            packed = cut_channels(packed, self.cut, -1, "data_words")
        results = []
        for number, section in enumerate(layout.sections):
            rows = self.gather_rows(section, packed, number) if layout.gathers(section) else packed
            if self.cut and layout.transforms:
                rows = cut_channels(rows, self.cut, -1, f"rows_words_{number}")
            result = self.multiply(section, rows, number)
            if section.transformed:
                result = self.transform_results(section, result, number)
            results.append(result)
        blocks = self.interleave(self.finish_chunks(results)) if layout.interleaves else self.finish(results)
        parameters = [self.data, self.packed_filter, *([] if self.parameter is None else [self.parameter])]
        func = te.create_prim_func([*parameters, self.copy_out(blocks)])
        return MatrixDefinition(byte_aligned(func), layout, self.problem.rank, self.packed_elements)

    # Stage 1: data.

    def pack_data(self) -> te.Tensor:
        """Copy the data of each block, input channels innermost.

        The shape is ``[*blocks, g, n, d, h, w, ci]``, or ``[*blocks, g, row, ci]`` if products read it as rows.
        """
        layout, inner = self.layout, self.layout.packed_lines
        lead, channels = (*layout.blocks, layout.geometry.groups), layout.packed_channels
        if self.cut:
            channels = self.cut.factors_of(channels)
        shape = shape_of((*lead, *inner, channels))
        if layout.channels_last:
            return te.compute(shape, lambda *index: self.data_at(inner, index[:-1], index[-1]), "data_pack")

        transposed = shape_of((*lead, *inner[:-1], channels, inner[-1]))
        rows = te.compute(
            transposed, lambda *index: self.data_at(inner, (*index[:-2], index[-1]), index[-2]), "data_rows"
        )
        return te.compute(shape, lambda *index: rows[(*index[:-2], index[-1], index[-2])], "data_pack")

    def data_at(self, extents: Sequence[int], index: Index, channel: Expr) -> Expr:
        """Return an element of the packed data: zero outside of the data and of the `extents` in use.

        `index` is ``(nb, db, hb, wb, g, n, d, h, w)``, or ``(nb, db, hb, wb, g, row)`` if products read it as rows.
        """
        layout, geometry = self.layout, self.layout.geometry
        at, group, within, inside = index[:4], index[4], index[5:], []
        if len(within) == 1:
            row = within[0]
            if extents[0] > layout.packed_rows:
                inside.append(row < layout.packed_rows)
            several = layout.tile.images > 1
            n, position = (row // layout.plane, row % layout.plane) if several else (_zero(), row)
            within = (n, *unravel(position, layout.packed))
        if self.cut:
            inside.append(channel < self.problem.in_channels)
        elif layout.packed_channels > geometry.in_channels:
            inside.append(channel < geometry.in_channels)
        return self.blocks.element(within, at, group, channel, inside)

    # Stage 2: rows.

    def gather_rows(self, section: MatrixSection, data: te.Tensor, number: int) -> te.Tensor:
        """Gather the rows of product `number` from the packed `data`, transformed by the algorithm of its section.

        The shape is ``[*blocks, g, *points, row, *taps, ci]``.
        """
        if section.apart is not None:
            rows = self.gather_apart(section, section.apart, data, number)
            return self.transform_rest(section, section.apart, rows, number)

        def row_point(*index: Expr) -> Expr:
            at, points, row, taps, channel = index[:5], index[5:8], index[8], index[9:12], index[12]
            if section.parts == 1:
                return self.settled(self.row_element(section, data, at, points, row, taps, channel))

            def quarter(number: Expr) -> Expr:
                half_rows, half_channels = row * 2 + number // 2, channel + number % 2 * section.part_channels
                return self.row_element(section, data, at, points, half_rows, taps, half_channels)

            return self.settled(transform([STRASSEN.data], points, [_zero()], quarter, self.accumulator))

        return te.compute(self.rows_shape(section, section.points), row_point, f"rows_{number}")

    def settled(self, element: Expr) -> Expr:
        """Return an element of a row as products take it."""
        return self.summed.settled(element) if self.summed else element

    def rows_shape(self, section: MatrixSection, points: Sequence[int], window: Sequence[int] = ()) -> list[Expr]:
        """Return the shape ``[*blocks, g, *points, row, *taps, *window, ci]``."""
        layout = self.layout
        lead, rows = (*layout.blocks, layout.geometry.groups), layout.product_rows(section)
        channels = row_channels(section.part_channels, layout.lanes)
        if self.cut and layout.transforms:
            channels = self.cut.factors_of(channels)
        return shape_of((*lead, *points, rows, *section.taps, *window, channels))

    def gather_apart(self, section: MatrixSection, apart: int, data: te.Tensor, number: int) -> te.Tensor:
        """Gather the rows of a product, transformed along the axis `apart` only.

        The shape is ``[*blocks, g, point, row, *taps, *window, ci]``: a row has the elements that its transforms along
        the other axes read.
        """
        matrices, _ = _parted(_data_matrices(section), apart)
        read = [axis.points if axis.transformed and i != apart else 1 for i, axis in enumerate(section.axes)]

        def element(*index: Expr) -> Expr:
            at, point, row, taps, within, channel = index[:5], index[5], index[6], index[7:10], index[10:13], index[13]
            image, first = self.row_start(section, self.real_row(section, row), taps)
            begin = [place + offset * step for place, offset, step in zip(first, within, section.steps, strict=True)]
            return transform(
                matrices,
                [point] * 3,
                begin,
                lambda *x: data[(*at, image, *x, channel)],
                self.accumulator,
                section.steps,
            )

        shape = self.rows_shape(section, section.points[apart : apart + 1], read)
        return te.compute(shape, element, f"rows_apart_{number}")

    def transform_rest(self, section: MatrixSection, apart: int, rows: te.Tensor, number: int) -> te.Tensor:
        """Transform `rows`, those of `gather_apart`, along the other axes; return the shape of `gather_rows`."""
        _, matrices = _parted(_data_matrices(section), apart)

        def row_point(*index: Expr) -> Expr:
            at, points, row, taps, channel = index[:5], index[5:8], index[8], index[9:12], index[12]

            def element(*place: Expr) -> Expr:
                within = [_zero() if axis == apart else offset for axis, offset in enumerate(place)]
                return rows[(*at, points[apart], row, *taps, *within, channel)]

            return self.settled(transform(matrices, points, [_zero()] * 3, element, self.accumulator))

        return te.compute(self.rows_shape(section, section.points), row_point, f"rows_{number}")

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
        row = self.real_row(section, row)
        if self.layout.packs_rows:
            return data[(*at, row, channel)]
        image, first = self.row_start(section, row, taps)
        return transform(
            _data_matrices(section),
            points,
            first,
            lambda *x: data[(*at, image, *x, channel)],
            self.accumulator,
            section.steps,
        )

    def real_row(self, section: MatrixSection, row: Expr) -> Expr:
        """Return `row`, or the last if there are not so many: nothing reads the products of those beyond it."""
        rows = self.layout.tile.images * section.rows
        return tirx.min(row, rows - 1) if self.layout.product_rows(section) * section.parts > rows else row

    def row_start(self, section: MatrixSection, row: Expr, taps: Index) -> tuple[Expr, list[Expr]]:
        """Return the image of a row, and the first packed element that it reads along each axis, at these taps."""
        image, *places = unravel(row, (self.layout.tile.images, *(axis.tiles for axis in section.axes)))
        return image, [
            axis.first(place) + axis.start + axis.first_read(tap) * axis.step
            for place, axis, tap in zip(places, section.axes, taps, strict=True)
        ]

    # Stage 3: products.

    def multiply(self, section: MatrixSection, rows: te.Tensor, number: int) -> te.Tensor:
        """Multiply `rows`, gathered or packed, by the filter of `section`, the product of this number.

        The shape is ``[*lead, *points, row, column]``.
        """
        taps = [reduce_axis(count, f"t{i}") for i, count in enumerate(section.taps)]
        channels, (left_channel, right_channel) = self.terms(section)
        panels, panel = section.shape[5], section.shape[-1]
        tap, gathered = [axis.var for axis in taps], self.layout.gathers(section)

        def products(*index: Expr) -> Expr:
            *at, g, co, pd, ph, pw, row, column = index
            place = ravel((g, co, pd, ph, pw, column // panel, *tap, right_channel, column % panel), section.shape)
            start = row + self.layout.flat_offset(section, tap) if self.layout.tile.flat else row
            left = rows[(*at, g, *((pd, ph, pw, row, *tap) if gathered else (start,)), left_channel)]
            right = self.packed_filter[place + section.offset]
            product = self.words.multiply(left, right, self.accumulator) if self.words else left * right
            return te.sum(product, axis=[*taps, *channels])

        shape = (*self.layout.lead, *section.points, self.layout.product_rows(section), panels * panel)
        return te.compute(shape_of(shape), products, f"run_{number}")

    def terms(self, section: MatrixSection) -> tuple[list[te.IterVar], tuple[Expr, Expr]]:
        """Return the axes of a product's sum over input channels, and the channel of either factor at them."""
        if not tiled(self.words):
            channel = reduce_axis(section.part_channels, "ci")
            return [channel], (channel.var, channel.var)
        axes, (left, right) = self.words.reduction(section.part_channels)
        word = axes[-1].var
        return axes, (left * self.words.depth + word, right * self.words.depth + word)

    # Stage 4: results.

    def transform_results(self, section: MatrixSection, product: te.Tensor, number: int) -> te.Tensor:
        """Sum the results of `product`, which has this number, over its points.

        The shape is ``[*lead, row, *outputs, column]``. Rows and columns of Strassen's algorithm are whole again.
        """
        matrices = [axis.algorithm.outputs if axis.algorithm else None for axis in section.axes]
        if section.parts > 1:
            matrices[0] = STRASSEN.outputs
        apart = section.apart
        if apart is not None:
            alone, matrices = _parted(matrices, apart)
            product = self.outputs_apart(section, apart, product, alone, number)

        def results(*index: Expr) -> Expr:
            at, row, places, column = index[:LEAD], index[LEAD], index[LEAD + 1 : LEAD + 4], index[LEAD + 4]
            first = [places[axis] if axis == apart else _zero() for axis in range(3)]
            if section.parts > 1:
                places = (row % 2 * 2 + column // section.part_columns, *places[1:])
                row, column = row // 2, column % section.part_columns
            total = transform(
                matrices, places, first, lambda *point: product[(*at, *point, row, column)], self.accumulator
            )
            if self.summed and section.divisor > 1:
                total = total >> tirx.const(section.divisor.bit_length() - 1, self.accumulator)  # a power of two
            return total

        rows = round_up(self.layout.tile.images * section.rows, section.parts)
        shape = (
            *self.layout.lead,
            rows,
            *(axis.outputs for axis in section.axes),
            section.all_columns[-1],
        )
        return te.compute(shape_of(shape), results, f"outputs_{number}")

    def outputs_apart(
        self, section: MatrixSection, apart: int, product: te.Tensor, matrices: Matrices, number: int
    ) -> te.Tensor:
        """Sum the results of `product` over its points along the axis `apart`, which is that of outputs then.

        It alone has one of the `matrices`. The shape is ``[*lead, *points, row, column]``.
        """

        def result(*index: Expr) -> Expr:
            at, places, others = index[:LEAD], index[LEAD : LEAD + 3], index[LEAD + 3 :]
            first = [_zero() if axis == apart else place for axis, place in enumerate(places)]
            return transform(matrices, places, first, lambda *x: product[(*at, *x, *others)], self.accumulator)

        extents = [axis.outputs if i == apart else axis.points for i, axis in enumerate(section.axes)]
        shape = (*self.layout.lead, *extents, *product.shape[LEAD + 3 :])
        return te.compute(shape_of(shape), result, f"outputs_apart_{number}")

    # Stage 5: epilogue.

    def finish(self, results: Sequence[te.Tensor]) -> te.Tensor:
        """Finish outputs as they lie in the output.

        The shape is ``[*lead, n, d, h, w, cc]``, or ``[*lead, cc, n, d, h, w]`` if phases are the vectors.
        """
        layout, phases_last = self.layout, self.layout.contiguous_phases > 0

        def element(*index: Expr) -> Expr:
            *at, n, d, h, w, channel = (*index[:LEAD], *index[LEAD + 1 :], index[LEAD]) if phases_last else index
            return self.output(results, at, n, (d, h, w), channel)

        channels, outputs = layout.tile.channels, layout.block_outputs
        inner = (channels, *outputs) if phases_last else (*outputs, channels)
        return te.compute(shape_of((*layout.lead, *inner)), element, "epilogue")

    def finish_chunks(self, results: Sequence[te.Tensor]) -> te.Tensor:
        """Finish chunks of rows, with vectors along channels.

        The shape is ``[*lead, vector, n, d, height, chunk, place, lane]``.
        """
        layout, chunks = self.layout, self.layout.chunks
        channels, lanes = layout.tile.channels, layout.lanes

        def element(*index: Expr) -> Expr:
            *at, vector, n, d, h, c, i, lane = index
            channel = vector * lanes + lane
            if channels % lanes:
                channel = tirx.min(channel, channels - 1)
            h, w = (i // chunks.width, i % chunks.width) if chunks.planes else (h, c * chunks.chunk + i)
            return self.output(results, at, n, (d, h, w), channel)

        pieces = (*layout.block_outputs[:2], chunks.heights, chunks.chunks, chunks.chunk)
        return te.compute(shape_of((*layout.lead, layout.channel_vectors, *pieces, lanes)), element, "epilogue")

    def interleave(self, finished: te.Tensor) -> te.Tensor:
        """Transpose chunks into rows of channels, in the type of the output if it narrows them.

        The shape is ``[*lead, vector, n, lane, d, h, w]``. The rows of a channel lie together, so whole ones are a
        single piece of the output.
        """
        layout, chunks = self.layout, self.layout.chunks
        images, depth, height, _ = layout.block_outputs

        def interleaved(*index: Expr) -> Expr:
            *at, n, lane, place = index
            piece = unravel(place // chunks.chunk, (depth, chunks.heights, chunks.chunks))
            value = finished[(*at, n, *piece, place % chunks.chunk, lane)]
            return stored(self.problem, value) if self.narrows else value

        shape, rows = (*layout.lead, layout.channel_vectors, images, layout.lanes), (depth, height, chunks.width)
        flat = te.compute(shape_of((*shape, math.prod(rows))), interleaved, "interleave")
        return te.compute(
            shape_of((*shape, *rows)), lambda *index: flat[(*index[:-3], ravel(index[-3:], rows))], "rows_out"
        )

    def output(self, results: Sequence[te.Tensor], at: Index, image: Expr, coordinates: Index, channel: Expr) -> Expr:
        """Return the output at an `image` and three `coordinates` of a block, and at a `channel` of its tile."""
        layout, geometry = self.layout, self.layout.geometry
        phases, places = [], []
        for coordinate, axis, span in zip(coordinates, geometry.axes, layout.spans, strict=True):
            phase, place = axis.place(coordinate)
            phases.append(phase)
            places.append(tirx.min(place, span - 1))
        value: Expr = tirx.const(0, self.accumulator)
        for number, section in reversed(list(enumerate(layout.sections))):
            local, member = within_runs(phases, [axis.run for axis in section.axes], layout.strides)
            column = section.column(local, channel)
            here = self.result(section, results[number], at, image, places, column)
            if self.words is not None and self.words.needs_correction(self.problem):
                place = ravel((*at[4:6], column), section.all_columns)
                correction = self.packed_filter[place + self.corrections[number]]
                here = self.words.corrected(here, correction, self.zero_point)
            # Not Select, which loads from both: an index that is invalid in one of them makes results wrong.
            value = tirx.if_then_else(tirx.all(*member), here, value) if member else here
        channel = tirx.min(at[5] * layout.tile.channels + channel, geometry.out_channels - 1)
        channel = at[4] * geometry.out_channels + channel
        if self.problem.epilogue.bias and self.parameter is not None:
            value = value + known_bias_at(self.problem, self.parameter, channel)
        scale = scale_at(self.problem, self.parameter, channel) if has_scales(self.problem) else None
        return finished(self.problem, value, self.parameter, scale)

    def result(
        self, section: MatrixSection, result: te.Tensor, at: Index, image: Expr, places: Index, column: Expr
    ) -> Expr:
        """Return the `result` of a section at positions `places` of an `image` of a block."""
        row, inner, flat = image, [], self.layout.tile.flat
        for place, axis, packed in zip(places, section.axes, self.layout.packed, strict=True):
            of_axis, within = axis.row_of(place)
            row = row * (packed if flat else axis.tiles) + of_axis
            inner.append(within)
        if section.transformed:
            return result[(*at, row, *inner, column)]
        return result[(*at, *[_zero()] * 3, row, column)]

    # Stage 6: output.

    def copy_out(self, results: te.Tensor) -> te.Tensor:
        """Copy `results`, finished blocks, into the output, rounded to its type.

        The shape is ``[N, D, H, W, G, Co]`` if vectors are channels, else ``[N, G, Co, D, H, W]``.
        """
        layout, lanes, channels_inner = self.layout, self.layout.lanes, self.layout.vectors_are_channels

        def out(*index: Expr) -> Expr:
            if channels_inner:
                n, d, h, w, g, c = index
            else:
                n, g, c, d, h, w = index
            tile, channel = split_index(c, layout.tile.channels, layout.channel_tiles)
            blocked = zip((n, d, h, w), layout.block_outputs, layout.blocks, strict=True)
            at, within = zip(*(split_index(i, size, count) for i, size, count in blocked), strict=True)
            inner = (*within, channel) if channels_inner else (channel, *within)
            if layout.interleaves:
                inner = (channel // lanes, within[0], channel % lanes, *within[1:])
            return stored(self.problem, results[(*at, g, tile, *inner)])

        channels = (layout.geometry.groups, layout.geometry.out_channels)
        batch, spatial = layout.extents.batch, layout.extents.output
        shape = (batch, *spatial, *channels) if channels_inner else (batch, *channels, *spatial)
        return te.compute(shape_of(shape), out, "out")
