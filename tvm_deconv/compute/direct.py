"""Direct transposed convolution by phases, in tensor expressions.

The stages, in the order of the data flow. All are blocked over images and positions (``nb, db, hb, wb``) and groups
``g``, and from the second on over tiles of output channels ``co``:

1. ``data_pack``: the data of a block with its halo, zero outside of the data; positions flattened to one axis. In rows,
   data of ``N *X C`` are copied to ``data_rows`` and transposed from there.
   ``data_words``: its rows as words, where these have several parts.
   ``points_i``: sums of packed rows, where Winograd's transforms apply along the outer axes.
2. ``run_i``, one stage per combination of runs of phases: the sum over taps and input channels. A position and a tap
   add up to one flat index, so no register tile tests a border.
3. ``epilogue``: selects the phase, adds the bias, applies the activation.
4. ``interleave``: puts the phases of the last axis, and for ``N *X C`` the channels, next to each other.
5. ``out``: copies rows into the output.

In *rows* a vector holds positions and the filter is broadcast: the output's rows are the vectors. In *channels* a
vector holds output channels and the data are broadcast; nothing needs interleaving, so stages 3 and 4 are one. *Groups*
is channels with vectors across groups. In *inputs* a vector holds input channels of one position: its lanes are partial
sums, which stage 4 adds up.

In *rows* Winograd's F(m, taps) applies along the first two axes. Each of the ``m + taps - 1`` points has one product,
whose rows are sums of the data's rows. Stage 3 adds up the results of the points. Flat positions then count tiles of m
rows. The packed rows of a tile lie in m planes, so that a point is one sum over flat positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm import te, tirx
from tvm.ir import Expr
from tvm.tirx import PrimFunc

from tvm_deconv.compute.direct_layout import (
    DirectLayout,
    FilterSection,
    Tile,
    group_and_channel,
    half_of_pair,
    product_count,
    unpaired,
    word_of_pair,
)
from tvm_deconv.compute.extents import End, Extent, reduce_axis, shape_of
from tvm_deconv.compute.indexing import (
    CHANNELS,
    GROUPS,
    INPUTS,
    LEAD,
    ROWS,
    BlockedData,
    byte_aligned,
    caller_index,
    ravel,
    split_index,
    within_runs,
)
from tvm_deconv.compute.phases import AxisRows
from tvm_deconv.compute.requantization import (
    data_zero_point,
    epilogue_parameter,
    finished,
    has_scales,
    known_bias_at,
    scale_at,
    stored,
)
from tvm_deconv.compute.storage import storage_dtype, sum_dtype
from tvm_deconv.compute.transforms import transform
from tvm_deconv.compute.words import WORD, Words, corrections_of, cut_channels, tiled
from tvm_deconv.problem import Problem
from tvm_deconv.problem.arithmetic import ceil_div, round_up


@dataclass(frozen=True, slots=True)
class DirectDefinition:
    """A definition as TensorIR before scheduling, with `points` stages of sums of rows (``points_i``).

    If it `narrows`, the stage ``interleave`` has the type of the output, else that of accumulators. The packed filter
    has `packed_elements`: those of all sections, and behind them corrections of `corrections_of`.
    """

    func: PrimFunc
    layout: DirectLayout
    rank: int
    points: int
    packed_elements: int
    narrows: bool

    @property
    def sections(self) -> tuple[FilterSection, ...]:
        """The sections of the packed filter, one per combination of runs."""
        return self.layout.sections

    @property
    def end(self) -> End | None:
        """The end of a dynamic axis that a block may run over."""
        return self.layout.end

    def caller_index(self, *index: Expr) -> tuple[Expr, ...]:
        """Map an index of the stage ``out``, with a group axis and three spatial axes, to the caller's output."""
        last = self.layout.channels_last
        return caller_index(self.layout.geometry, self.rank, index, channels_inner=last, channels_last=last)


def define_direct(
    problem: Problem,
    form: str,
    tile: Tile,
    lanes: int,
    words: Words | None = None,
    *,
    narrows: bool = False,
    pairs: int = 0,
    unfolded: Problem | None = None,
) -> DirectDefinition:
    """Define `problem` in a `form` of `indexing`, blocked by `tile`, for vectors of `lanes` accumulators.

    With `words`, in all forms but groups, packed data and the filter hold these in the place of input channels, and
    nothing may be transformed. If it `narrows`, the stage ``interleave`` has the type of the output, else that of
    accumulators. `pairs`, in groups and inputs alone, is that of `FilterSection`. The parameters are the data, the
    packed filter, `epilogue_parameter` if there is one, and the output. Data and bias have the caller's shapes; if
    `problem` is a folded one, the bias is that of the `unfolded` problem. The output is ``[N, G, Co, D, H, W]`` or
    ``[N, D, H, W, G, Co]``; `DirectDefinition.caller_index` maps it to the caller's. Raises ValueError for a tile
    that cannot be scheduled.
    """
    layout = DirectLayout.of(problem, form, tile, lanes, words, pairs)
    return _Builder(problem, unfolded or problem, layout, words, narrows).definition()


def _stage(shape: Sequence[Extent], element: Callable[..., Expr], name: str) -> te.Tensor:
    """Return the stage `name`, whose element at each index is `element` of it."""
    return te.compute(shape_of(shape), lambda *index: element(*index), name)


def _zero(dtype: str = "int64") -> Expr:
    return tirx.const(0, dtype)


@dataclass(frozen=True, slots=True)
class _Builder:
    """The stages of a definition, in the order of the data flow."""

    problem: Problem
    unfolded: Problem
    layout: DirectLayout
    words: Words | None
    narrows: bool

    def definition(self) -> DirectDefinition:
        """Connect the stages."""
        problem, layout = self.problem, self.layout
        data = te.placeholder(shape_of(self._data_shape()), storage_dtype(problem.dtype), "data")
        factor = WORD if self.words else sum_dtype(problem)
        words = self.words if self.words and self.words.needs_correction(problem) else None
        counts = [math.prod(section.filters) for section in layout.sections] if words else []
        corrections = corrections_of(counts, layout.packed_elements)
        packed_filter = te.placeholder(shape_of(corrections[-1:]), factor, "packed_filter")
        constants = epilogue_parameter(self.unfolded)
        parameters = [data, packed_filter, *([] if constants is None else [constants])]
        zero_point = data_zero_point(problem, constants)
        packed = self.pack_data(data, zero_point)
        points = self.transform_rows(packed)
        products = [
            self.multiply(i, section, packed_filter, packed, points.get(section.axes[:2]))
            for i, section in enumerate(layout.sections)
        ]
        bias = self.pack_bias(constants) if constants is not None and problem.epilogue.bias else None
        scales = self.pack_scales(constants) if has_scales(problem) else None
        offsets = [
            self.pack_offsets(i, section, (packed_filter, begin), zero_point, bias)
            for i, (section, begin) in enumerate(zip(layout.sections, corrections[:-1], strict=False))
        ]
        results = _Results(problem, layout, products, bias, offsets, constants, scales)
        rows = layout.form == ROWS
        interleaved = self.interleave(self.finish_chunks(results)) if rows else self.finish_channels(results)
        func = te.create_prim_func([*parameters, self.copy_out(interleaved)])
        sizes = problem.rank, len(points), corrections[-1]
        return DirectDefinition(byte_aligned(func), layout, *sizes, self.narrows)

    def _data_shape(self) -> tuple[Extent, ...]:
        extents, geometry = self.layout.extents, self.layout.geometry
        channels, spatial = geometry.groups * self.problem.in_channels, extents.spatial(self.problem.rank)
        if self.layout.channels_last:
            return extents.batch, *spatial, channels
        return extents.batch, channels, *spatial

    def pack_data(self, data: te.Tensor, zero_point: Expr | None) -> te.Tensor:
        """Return ``data_pack``: each block with its halo, converted to the accumulator's type, less the `zero_point`.

        Of words, it has those in the place of channels.
        Behind ``nb, db, hb, wb, g`` its axes are those of `DirectLayout.packed_place` in rows, ``[position, ci]`` in
        channels and inputs, and ``[position, ci, lane]`` in groups. In pairs the last one counts words.
        """
        layout, tile, form, geometry = self.layout, self.layout.tile, self.layout.form, self.layout.geometry
        channels, positions = layout.packed_data
        cut = self.words if self.words and self.words.cut else None
        words, stored = (None, self.problem.in_channels) if cut else (self.words, geometry.in_channels)
        channels = cut.factors_of(channels) if cut else channels
        dtype, where = sum_dtype(self.problem), (self.problem, geometry, layout.extents, data)
        blocks = BlockedData(*where, dtype, tile.block, words, zero_point)
        together = 2 if layout.pairs else 1  # channels, or groups of one, of an element
        inner_shape = {
            ROWS: layout.packed_place(channels, tile.outputs[:2], positions),
            CHANNELS: (positions, channels),
            INPUTS: (positions, channels // together),
            GROUPS: (layout.packed_positions, geometry.in_channels, tile.channels // together),
        }[form]

        def element(*index: Expr) -> Expr:
            *at, group = index[:5]
            row: Sequence[Expr] = (_zero(), _zero())  # of a tile
            conditions: list[Expr] = []
            if form == ROWS:
                ci, *row, position = index[5:]
            elif form in (CHANNELS, INPUTS):
                position, ci = index[5:]
            else:
                position, ci, lane = index[5:]
                group = group * tile.channels + lane * together
                conditions.append(group < geometry.groups)
            within = layout.unflatten(position, row)
            if layout.pairs:
                return blocks.pair(within, at, group, ci * together, conditions)
            if channels > stored:
                conditions.append(ci < stored)
            if layout.transforms:
                # Rows that only fill the last tiles are not worth fetching.
                halos = [axis.halo for axis in geometry.axes]
                needed = (tile.images, layout.spans[0] + halos[0], layout.spans[1] + halos[1])
                conditions += [place < end for place, end in zip(within, needed, strict=False)]
            return blocks.element(within, at, group, ci, conditions)

        lead = (*layout.blocks, layout.tiles[0])
        if not layout.transposes_data:
            packed = _stage((*lead, *inner_shape), element, "data_pack")
            return cut_channels(packed, cut, LEAD - 1, "data_words", layout.needed) if cut else packed

        rows = _stage(
            (*lead, *tile.outputs[:2], positions, channels),
            lambda *index: element(*index[:5], index[8], *index[5:8]),
            "data_rows",
        )
        return _stage((*lead, *inner_shape), lambda *index: rows[(*index[:7], index[8], index[7])], "data_pack")

    def transform_rows(self, packed: te.Tensor) -> dict[tuple[AxisRows, ...], te.Tensor]:
        """Return the stages ``points_i``, by the rows of the first two axes that they are the sums for."""
        rows = dict.fromkeys(section.axes[:2] for section in self.layout.sections)
        transformed = [pair for pair in rows if any(axis.transformed for axis in pair)]
        return {pair: self._sums(pair, packed, f"points_{i}") for i, pair in enumerate(transformed)}

    def _sums(self, rows: Sequence[AxisRows], packed: te.Tensor, name: str) -> te.Tensor:
        """Return the sums of rows that the products of `rows` take; along an axis without a transform, the rows."""
        layout, outputs = self.layout, self.layout.tile.outputs
        matrices = [axis.algorithm.data if axis.algorithm else None for axis in rows]
        further = [0 if axis.transformed else halo for axis, halo in zip(rows, layout.halos, strict=False)]
        reach = layout.positions + layout.flat(0, further[0], further[1], layout.halos[2])
        length = round_up(reach, layout.lanes)

        def element(*index: Expr) -> Expr:
            *at, g, d, h, ci, position = index
            first = [axis.start if axis.transformed else place for axis, place in zip(rows, (d, h), strict=True)]

            def packed_row(*places: Expr | int) -> Expr:
                (d, tiles), (h, lines) = (
                    (x % m, x // m) if axis.transformed else (x, 0)
                    for axis, m, x in zip(rows, outputs, places, strict=False)
                )
                return packed[(*at, g, *layout.packed_place(ci, (d, h), position + layout.flat(0, tiles, lines, 0)))]

            return transform(matrices, (d, h), first, packed_row, self.problem.accumulate_dtype)

        counts = map(product_count, rows, outputs)
        shape = (*layout.blocks, layout.tiles[0], *counts, layout.geometry.in_channels, length)
        return _stage(shape, element, name)

    def multiply(
        self, number: int, section: FilterSection, packed_filter: te.Tensor, packed: te.Tensor, points: te.Tensor | None
    ) -> te.Tensor:
        """Return ``run_i``: the sums over taps and input channels of the combination `number` of runs.

        Behind `DirectLayout.lead` its axes are ``[points(2), phases(3), channel, position]`` in rows and
        ``[phases(3), position, channel]`` otherwise, with a last one of lanes in inputs; the points only with
        transforms.
        """
        layout, form, outputs = self.layout, self.layout.form, self.layout.tile.outputs
        taps = [reduce_axis(rows.taps, f"t{i}") for i, rows in enumerate(section.axes)]
        if tiled(self.words):
            (ci, *words), (data_step, filter_step) = self.words.reduction(layout.geometry.in_channels)
        else:
            ci, words = reduce_axis(ceil_div(layout.geometry.in_channels, section.lanes), "ci"), []
            data_step = filter_step = ci.var

        def element(*index: Expr) -> Expr:
            index, lane = (index[:-1], index[-1:]) if form == INPUTS else (index, [word.var for word in words[-1:]])
            (*at, g, co), (*point, fd, fh, fw, first, second) = index[:LEAD], index[LEAD:]
            cc, m = (first, second) if form == ROWS else (second, first)
            steps = [
                run.x0 - t.var * run.x_step - axis.low
                for run, t, axis in zip(section.runs, taps, layout.geometry.axes, strict=True)
            ]
            # Without a transform a tap takes the row `step` away; with one, each point takes its own sums and filter.
            (d, tiles, filter_d), (h, lines, filter_h) = (
                (p, 0, p) if rows.transformed else ((step + p) % count, (step + p) // count, 0)
                for rows, count, p, step in zip(section.axes, outputs, point or (0, 0), steps, strict=False)
            )
            position, channel = m + layout.flat(0, tiles, lines, steps[2]), sum(lane, data_step * section.lanes)
            if points is not None:
                value = points[(*at, g, d, h, channel, position)]
            else:
                inner = {
                    ROWS: layout.packed_place(channel, (d, h), position),
                    CHANNELS: (position, channel),
                    GROUPS: (position, channel, word_of_pair(cc, layout.pairs)),
                    INPUTS: (position, word_of_pair(channel, layout.pairs)),
                }
                value = packed[(*at, g, *inner[form])]
                if layout.pairs:
                    value = half_of_pair(value, channel if form == INPUTS else cc, layout.pairs)
            within = [t.var for t in taps]
            place = section.index(g, co, (filter_d, filter_h), (fd, fh, fw), filter_step, within, cc, lane)
            weight = packed_filter[ravel(place, section.shape) + section.offset]
            product = value * weight if self.words is None else self._product(value, weight)
            return te.sum(product, axis=[ci, *taps, *words] if form == ROWS else [*taps, ci])

        channels = layout.tile.channels
        tile_shape = (channels, layout.positions) if form == ROWS else (layout.positions, channels)
        lanes = (section.lanes,) if form == INPUTS else ()
        counts = map(product_count, section.axes[:2], outputs) if layout.transforms else ()
        shape = (*layout.lead, *counts, *(run.count for run in section.runs), *tile_shape, *lanes)
        return _stage(shape, element, f"run_{number}")

    def _product(self, value: Expr, weight: Expr) -> Expr:
        """Return the sum of the products of two words; the first operand is the one that is broadcast."""
        assert self.words is not None
        operands = (weight, value) if self.layout.form == ROWS else (value, weight)
        return self.words.multiply(*operands, self.problem.accumulate_dtype)

    def pack_bias(self, bias: te.Tensor) -> te.Tensor:
        """Return ``bias_pack``, ``[g, co, channel]``: the bias by tiles of channels, zero for padding channels."""
        return self._pack_channels(lambda channel: known_bias_at(self.unfolded, bias, channel), "bias_pack")

    def pack_scales(self, constants: te.Tensor | None) -> te.Tensor:
        """Return ``scale_pack``, ``[g, co, channel]``: the bits of the factors by tiles of channels, like the bias."""
        return self._pack_channels(lambda channel: scale_at(self.unfolded, constants, channel), "scale_pack")

    def _pack_channels(self, of_channel: Callable[[Expr], Expr], name: str) -> te.Tensor:
        """Return the stage `name`: `of_channel` of each unfolded channel over all groups, by tiles of channels."""
        layout, geometry, width = self.layout, self.layout.geometry, self.layout.tile.channels

        def element(g: Expr, co: Expr, cc: Expr) -> Expr:
            group, channel = group_and_channel(layout.form, width, g, co, cc, layout.pairs)
            exists = tirx.all(group < geometry.groups, channel < geometry.out_channels)
            if self.unfolded is not self.problem:
                channel = channel % self.unfolded.out_channels
            value = of_channel(group * geometry.out_channels + channel)
            return tirx.if_then_else(exists, value, _zero(self.problem.accumulate_dtype))

        return _stage((*layout.tiles, width), element, name)

    def pack_offsets(
        self,
        number: int,
        section: FilterSection,
        corrections: tuple[te.Tensor, int],
        zero_point: Expr | None,
        bias: te.Tensor | None,
    ) -> te.Tensor:
        """Return ``offset_pack_i``, an array of `FilterSection.filters`: what is added to each sum of words.

        That is the bias, less what the sum exceeds that of its products by. The `corrections` of a section are in the
        packed filter, from a place on. `zero_point` is that of the data.
        """
        assert self.words is not None
        words, (packed_filter, begin) = self.words, corrections

        def element(*place: Expr) -> Expr:
            g, co, *_, cc = place
            added = _zero(self.problem.accumulate_dtype) if bias is None else bias[g, co, cc]
            return words.corrected(added, packed_filter[ravel(place, section.filters) + begin], zero_point)

        return _stage(section.filters, element, f"offset_pack_{number}")

    def finish_chunks(self, results: _Results) -> te.Tensor:
        """Return ``epilogue`` in rows: finished outputs by chunks, ``lanes`` positions of each stream.

        The streams are the phases of the last axis, by `DirectLayout.minor` channels. Behind `DirectLayout.lead` the
        axes are ``[n, d, h]``, for ``N C *X`` a channel in front of them, and ``[vector, stream, lane]``.
        """
        layout, lanes, minor = self.layout, self.layout.lanes, self.layout.minor

        def element(*index: Expr) -> Expr:
            at, (*outer, vector, stream, lane) = index[:LEAD], index[LEAD:]
            cc, (n, d, h) = (stream % minor, outer) if layout.channels_last else (outer[0], outer[1:])
            # Positions count from the chunk's on: with a shift, a phase may belong to the next position.
            phases, (d, h, further) = zip(
                *(axis.place(i) for axis, i in zip(layout.geometry.axes, (d, h, stream // minor), strict=True)),
                strict=True,
            )
            return results.output(at, cc, phases, n, (d, h, vector * lanes + lane + further))

        shape = (*layout.lead, *self._rows(), layout.row_vectors, layout.strides[2] * minor, lanes)
        return _stage(shape, element, "epilogue")

    def interleave(self, finished: te.Tensor) -> te.Tensor:
        """Return ``interleave`` in rows: the chunks of `finished` as rows of the output, ``[w, minor]``."""
        layout, lanes, minor, stride = self.layout, self.layout.lanes, self.layout.minor, self.layout.strides[2]

        def element(*index: Expr) -> Expr:
            *at, w, channel = index
            value = finished[(*at, w // (stride * lanes), w % stride * minor + channel, w // stride % lanes)]
            return stored(self.problem, value) if self.narrows else value

        return _stage((*layout.lead, *self._rows(), layout.row_vectors * lanes * stride, minor), element, "interleave")

    def _rows(self) -> tuple[int, ...]:
        """Return the extents of the axes that count rows of a block's output."""
        outer = self.layout.block_outputs
        return outer if self.layout.channels_last else (self.layout.row_channels, *outer)

    def finish_channels(self, results: _Results) -> te.Tensor:
        """Return ``interleave`` in channels and groups: finished outputs, ``[n, d, h, w, channel]`` of a block."""
        layout, tile = self.layout, self.layout.tile

        def element(*index: Expr) -> Expr:
            *at, n, d, h, w, cc = index
            phases, positions = zip(
                *(axis.place(i) for axis, i in zip(layout.geometry.axes, (d, h, w), strict=True)), strict=True
            )
            return results.output(at, unpaired(cc, layout.pairs if layout.form == GROUPS else 0), phases, n, positions)

        shape = (*layout.lead, *layout.block_outputs, tile.width * layout.strides[2], tile.channels)
        return _stage(shape, element, "interleave")

    def copy_out(self, interleaved: te.Tensor) -> te.Tensor:
        """Return ``out``: the output, rounded to its type."""
        layout, geometry, output = self.layout, self.layout.geometry, self.layout.extents.output
        channels = layout.tile.channels
        group_tiles, channel_tiles = layout.tiles
        sizes = (*layout.block_outputs, layout.tile.width * layout.strides[2])

        def element(*index: Expr) -> Expr:
            if layout.channels_last:
                *positions, g, c = index
            else:
                n, g, c, *spatial = index
                positions = [n, *spatial]
            if layout.form == GROUPS:
                (group, cc), channel_tile = split_index(g, channels, group_tiles), c
            else:
                group, (channel_tile, cc) = g, split_index(c, channels, channel_tiles)
            blocks, (*outer, w) = zip(
                *(split_index(i, size, count) for i, size, count in zip(positions, sizes, layout.blocks, strict=True)),
                strict=True,
            )
            inner = (*outer, w, cc) if layout.form != ROWS or layout.channels_last else (cc, *outer, w, 0)
            return stored(self.problem, interleaved[(*blocks, group, channel_tile, *inner)])

        batch, channel_axes = layout.extents.batch, (geometry.groups, geometry.out_channels)
        shape = (batch, *output, *channel_axes) if layout.channels_last else (batch, *channel_axes, *output)
        return _stage(shape, element, "out")


@dataclass(frozen=True, slots=True)
class _Results:
    """The outputs as expressions of `products`, one stage per combination of runs, and of what is packed besides.

    What is packed is the `bias`, the `offsets` of products in words, which have the bias in them, and `scales`.
    `constants` are the parameter behind the filter.
    """

    problem: Problem
    layout: DirectLayout
    products: Sequence[te.Tensor]
    bias: te.Tensor | None
    offsets: Sequence[te.Tensor]
    constants: te.Tensor | None
    scales: te.Tensor | None

    def output(self, at: Sequence[Expr], cc: Expr, phases: Sequence[Expr], n: Expr, places: Sequence[Expr]) -> Expr:
        """Return the output of a phase of each axis, at `places` along the axes in image `n` of the block `at`.

        `at` is an index of `DirectLayout.lead` and `cc` the channel within its tile.
        """
        bias = None if self.bias is None else self.bias[at[4], at[5], cc]
        # Of a phase without taps: the bias is in the offsets of the others, or comes on top of all.
        value = _zero(self.layout.sum_dtype) if bias is None or not self.offsets else bias
        for number, section in reversed(list(enumerate(self.layout.sections))):
            local, conditions = within_runs(phases, section.runs, self.layout.strides)
            result = self._result(number, at, cc, local, n, places)
            if self.offsets:
                result = result + self.offsets[number][(at[4], at[5], *local, cc)]
            value = tirx.if_then_else(tirx.all(*conditions), result, value) if conditions else result
        if bias is not None and not self.offsets:
            value = value.astype(self.problem.accumulate_dtype) + bias
        scale = None if self.scales is None else self.scales[at[4], at[5], cc]
        return finished(self.problem, value, self.constants, scale)

    def _result(
        self, number: int, at: Sequence[Expr], cc: Expr, phases: Sequence[Expr], n: Expr, places: Sequence[Expr]
    ) -> Expr:
        """Return the result of combination `number` of runs: its product, or the sum of its points' products.

        `phases` are counted within the runs.
        """
        layout, outputs = self.layout, self.layout.tile.outputs[:2]
        (d, inner_d), (h, inner_h) = (
            (x // m, x % m) if m > 1 else (x, _zero()) for x, m in zip(places, outputs, strict=False)
        )
        position = layout.flat(n, d, h, places[2])

        def product(*points: Expr) -> Expr:
            inner = (cc, position) if layout.form == ROWS else (position, cc)
            place = (*at, *(points if layout.transforms else ()), *phases, *inner)
            if layout.form != INPUTS:
                return self.products[number][place]
            return sum(
                (self.products[number][(*place, lane)] for lane in range(1, layout.lanes)),
                self.products[number][(*place, 0)],
            )

        rows, inner = layout.sections[number].axes[:2], (inner_d, inner_h)
        matrices = [axis.algorithm.outputs if axis.algorithm else None for axis in rows]
        first = [_zero() if axis.transformed else x for axis, x in zip(rows, inner, strict=True)]
        return transform(matrices, inner, first, product, self.problem.accumulate_dtype)
