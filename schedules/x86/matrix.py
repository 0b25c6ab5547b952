"""Schedule of the matrix definition for AVX2 and AVX-512.

Registers: a register tile of ``r`` rows by ``v`` vectors of columns takes ``r*v`` accumulators, ``v`` vectors of the
filter and one broadcast. 14 rows by 2 vectors take 31 of the 32 registers of AVX-512; 6 by 2 take 15 of the 16 of AVX2.
The reduction streams two contiguous panels; it was measured at 95 % of the peak of multiply-adds.

Caches: the rows of one product and one panel of the filter stay in the second-level cache. The results of a tile of
channels are transformed and finished there. Small squares of data are transposed in registers by explicit shuffles.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV, SBlockRV

from tvm_deconv.compute.indexing import LEAD
from tvm_deconv.compute.matrix import MatrixDefinition
from tvm_deconv.compute.matrix_layout import MatrixLayout, MatrixSection
from tvm_deconv.compute.words import WORD, Words, tiled
from tvm_deconv.schedules.x86.amx import mark_matrices
from tvm_deconv.schedules.x86.cache_sets import keep_apart
from tvm_deconv.schedules.x86.dot import dot_intrinsic
from tvm_deconv.schedules.x86.interleave import transpose_intrinsic
from tvm_deconv.schedules.x86.loop_marks import SkipMarks, mark_tasks
from tvm_deconv.schedules.x86.matrix_tiles import MatrixPlan
from tvm_deconv.schedules.x86.prefetching import mark_filter
from tvm_deconv.schedules.x86.unrolling import unroll_steps
from tvm_deconv.targets import CpuTarget

#: Lines of a row from which on rows are kept apart: of shorter ones, several lines are in a page, and more of them.
_LONG_ROW = 32


def schedule_matrix(
    definition: MatrixDefinition,
    plan: MatrixPlan,
    target: CpuTarget,
    dtype: str,
    whole_vectors: bool,
    words: Words | None = None,
    transposition: str = "",
) -> Schedule:
    """Schedule `definition`, made for `target`, the tile of `plan` and these `words`, with accumulators of `dtype`.

    If `whole_vectors`, each position is whole vectors of channels, and results are stored straight into the output.
    `transposition`, if not empty, is the intrinsic that makes rows of finished squares in another type.
    """
    sch, sections = Schedule(definition.func), definition.sections
    cuts = words is not None and words.cut and definition.layout.transforms
    return _Steps(
        sch=sch,
        definition=definition,
        plan=plan,
        target=target,
        dtype=dtype,
        whole_vectors=whole_vectors,
        words=words,
        transposition=transposition or transpose_intrinsic(definition.layout.lanes, dtype),
        rows=[sch.get_sblock(f"rows_{i}") if definition.layout.gathers(s) else None for i, s in enumerate(sections)],
        cut_rows=[sch.get_sblock(f"rows_words_{i}") if cuts else None for i in range(len(sections))],
        runs=[sch.get_sblock(f"run_{i}") for i in range(len(sections))],
        transforms=[sch.get_sblock(f"outputs_{i}") if s.transformed else None for i, s in enumerate(sections)],
        epilogue=sch.get_sblock("epilogue"),
        out=sch.get_sblock("out"),
        skips=SkipMarks(sch, definition.end),
    ).schedule()


@dataclass(frozen=True, slots=True)
class _Steps:
    """The steps of a schedule, in order.

    `transposition` is the intrinsic for finished chunks. `rows`, `cut_rows`, `runs` and `transforms` are the stages
    ``rows_i``, ``rows_words_i``, ``run_i`` and ``outputs_i`` of each section; None stands for one it does not have.
    """

    sch: Schedule
    definition: MatrixDefinition
    plan: MatrixPlan
    target: CpuTarget
    dtype: str
    whole_vectors: bool
    words: Words | None
    transposition: str
    rows: Sequence[SBlockRV | None]
    cut_rows: Sequence[SBlockRV | None]
    runs: Sequence[SBlockRV]
    transforms: Sequence[SBlockRV | None]
    epilogue: SBlockRV
    out: SBlockRV
    skips: SkipMarks

    def schedule(self) -> Schedule:
        """Take all steps."""
        for number, (block, section) in enumerate(zip(self.rows, self.definition.sections, strict=True)):
            if block is not None:
                self.vectorize_rows(block, section, number)
        for number, (block, section) in enumerate(zip(self.transforms, self.definition.sections, strict=True)):
            if block is not None:
                self.vectorize_transform(block, section, number)
        self.merge_nest()
        if self.runs:
            self.place_data()
        self.place_output()
        if self.runs:
            self.vectorize_data()
        for block, section in zip(self.runs, self.definition.sections, strict=True):
            if tiled(self.words):
                self.tile_matrices(block, section, len(self.words.products))
            else:
                self.tile_registers(block, section)
        if self.layout.interleaves:
            self.transpose_chunks()
        else:
            self.vectorize_finish()
        self.form_tasks()
        self.sch.transform_layout(self.out, ("write", 0), self.definition.caller_index)
        return self.sch

    @property
    def layout(self) -> MatrixLayout:
        """The layout of the definition."""
        return self.definition.layout

    def merge_nest(self) -> None:
        """Merge the loops over blocks, groups and tiles of channels of the products and of the stages that finish them.

        The results of a tile of channels are then finished while they are in the second-level cache.
        """
        nested = []
        for run, transform in zip(self.runs, self.transforms, strict=True):
            nested += [run] if transform is None else [run, transform]
        nested.append(self.epilogue)
        if self.layout.interleaves:
            nested += [self.sch.get_sblock("interleave"), self.sch.get_sblock("rows_out")]
        if len(nested) > 1:
            self._merge(nested, LEAD - 1)

    def place_data(self) -> None:
        """Pack data and gather rows within the nest, once for all tiles of channels; or before it, if these share data.

        If the calls' extents are dynamic, shared data are packed anew for each block of the dynamic axes.
        """
        sch, serial = self.sch, self.layout.extents.serial
        stages = [sch.get_sblock("data_pack")]
        if self._cuts_data:
            stages.append(sch.get_sblock("data_words"))
        for block, cut in zip(self.rows, self.cut_rows, strict=True):
            stages += [stage for stage in (block, cut) if stage is not None]
        if not self.layout.channels_last:
            stages.insert(0, sch.get_sblock("data_rows"))
        if self.plan.share_data:
            if len(stages) > 1:
                self._merge(stages, LEAD - 2)
            if serial:
                self._merge((stages[-1], self.runs[0]), serial - 1)
            self._merge_rows()
            sch.parallel(sch.fuse(*sch.get_loops(stages[-1])[serial : LEAD - 1]))
        else:
            self._merge((*stages, self.runs[0]), LEAD - 2)
            self._merge_rows()

    def _merge_rows(self) -> None:
        """Cut each row into parts while it is near."""
        for block, cut, section in zip(self.rows, self.cut_rows, self.definition.sections, strict=True):
            if block is not None and cut is not None:
                self._merge((block, cut), LEAD - 1)
                row = self.sch.get_loops(block)[LEAD - 1]
                self._skip_rows(row, section, section.parts, whole=self.plan.tile.rows)

    def place_output(self) -> None:
        """Copy each tile of channels of a block to the output right after it is finished."""
        sch = self.sch
        if not self.layout.interleaves:
            sch.reverse_compute_at(self.out, sch.get_loops(self.epilogue)[LEAD - 1], preserve_unit_loops=True)
            return
        rows_out = sch.get_sblock("rows_out")
        sch.reverse_compute_at(self.out, sch.get_loops(rows_out)[LEAD - 1], preserve_unit_loops=True)
        sch.compute_inline(rows_out)

    def vectorize_data(self) -> None:
        """Pack data by vectors of input channels; transpose data of `N C *X` on their way in."""
        sch, layout = self.sch, self.layout
        data_pack = sch.get_sblock("data_pack")
        *_, position, channel = sch.get_loops(data_pack)
        if layout.channels_last:
            first = data_pack
            _, lane = sch.split(channel, [None, layout.lanes])
            if self.words is None or self.words.cut:  # else LLVM makes vectors of loads that it has joined
                sch.vectorize(lane)
            if self._cuts_data:
                place, *_ = self._cut_words(sch.get_sblock("data_words"))
                position = sch.merge(position, place)
            if self.plan.tile.flat:
                sch.split(position, [None, layout.packed[2]])
        else:
            first = sch.get_sblock("data_rows")
            self._transpose_data(first, data_pack)
        if not layout.packs_rows and self._end_axis == 1:
            inner = 5 if self._cuts_data and not layout.channels_last else 4
            self.skips.mark(sch.get_loops(first)[-inner], 1, halo=layout.end_halo)

    def _cut_words(self, block: SBlockRV) -> Sequence[LoopRV]:
        """Make all parts of a vector of words at once; return the loop before that over words, and that over steps."""
        sch, words = self.sch, self.words
        assert words is not None
        *_, outer, word = sch.get_loops(block)
        step, part, lane = sch.split(word, [None, words.parts, words.depth])
        sch.vectorize(lane)
        sch.unroll(part)
        return outer, step

    def _transpose_data(self, data_rows: SBlockRV, data_pack: SBlockRV) -> None:
        """Copy rows of `lanes` channels, and transpose them in squares while they are near.

        Where words have parts, these are made of the channels of a step.
        """
        sch, layout = self.sch, self.layout
        *_, position, channel = sch.get_loops(data_pack)
        *_, row_channel, _ = sch.get_loops(data_rows)
        channels: list[int | None] = [None, layout.lanes]
        steps: list[LoopRV] = []
        if self._cuts_data and self.words:
            channels = [None, self.words.factors, layout.lanes]
            place, step = self._cut_words(sch.get_sblock("data_words"))
            sch.reorder(step, place)
            steps.append(step)
        *outer, lane = sch.split(channel, channels)
        *row_outer, _ = sch.split(row_channel, channels)
        position, square = sch.split(position, [None, layout.lanes])
        sch.reorder(*outer, position, square, lane)
        if steps:
            sch.merge(row_outer[0], outer[0], *steps)
        sch.merge(row_outer[-1], outer[-1])
        *_, row = sch.get_loops(data_rows)
        if self.definition.end and self._end_axis == 2:
            self.skips.mark_parts(row, layout.lanes, halo=layout.end_halo)
            self.skips.mark(position, layout.lanes, halo=layout.end_halo)
        elif self.plan.tile.flat:
            sch.split(row, [None, layout.packed[2]])
        elif layout.packs_rows and int(sch.get(row).extent) > layout.plane:
            sch.split(row, [None, layout.plane])  # pieces that are contiguous in the caller's data
        stored = WORD if self.words and not self.words.cut else self.dtype
        sch.tensorize(square, transpose_intrinsic(layout.lanes, stored))

    def vectorize_rows(self, block: SBlockRV, section: MatrixSection, number: int) -> None:
        """Make all points of a vector of channels in one unrolled body, where the compiler shares inner sums."""
        sch = self.sch
        *_, d, h, w, row, tap_d, tap_h, tap_w, channel = sch.get_loops(block)
        channel, lane = sch.split(channel, [None, self.layout.lanes])
        sch.reorder(row, tap_d, tap_h, tap_w, channel, d, h, w, lane)
        cut = self.cut_rows[number]
        if cut is not None:
            *points, word_row, _, _, _, _ = sch.get_loops(cut)[LEAD - 1 :]
            self._cut_words(cut)
            sch.reorder(word_row, *points)
        else:
            self._skip_rows(row, section, section.parts, whole=self.plan.tile.rows)
        self._unroll_points(lane, [d, h, w], channel, section, f"rows_apart_{number}")
        if not tiled(self.words):
            self._spread(block, -5, section.points)

    def _spread(self, block: SBlockRV, rows_axis: int, points: Sequence[int]) -> None:
        """Keep apart what `block` writes: all `points` of a row for a transform, long rows for a register tile.

        `rows_axis` is the axis of rows, negative.
        """
        axis = len(self.sch.get(block).writes[0].region) + rows_axis
        keep_apart(self.sch, block, axis, _LONG_ROW)
        if math.prod(points) > 1:
            keep_apart(self.sch, block, axis - 1)

    def _unroll_points(
        self, lane: LoopRV, points: Sequence[LoopRV], vector: LoopRV, section: MatrixSection, stage: str
    ) -> None:
        """Unroll the transform of a `vector` along the axes of `points`, except for that which has a `stage` apart."""
        sch = self.sch
        sch.vectorize(lane)
        for axis, point in enumerate(points):
            if axis != section.apart:
                sch.unroll(point)
        if section.apart is not None:
            block = sch.get_sblock(stage)
            sch.compute_at(block, vector)
            loops = 1 + sum(axis.transformed for axis in section.axes)
            point, *others, lane = sch.get_loops(block)[-loops:]
            sch.reorder(*others, point, lane)
            sch.vectorize(lane)
            sch.unroll(point)

    def tile_registers(self, block: SBlockRV, section: MatrixSection) -> None:
        """Unroll a register tile of products, and store its accumulators when they are complete.

        The reduction runs outside of the tile, so that the accumulators stay in registers. Rows run inside of columns:
        all tiles of rows read a panel of the filter while it is near.
        """
        sch, tile = self.sch, self.plan.tile
        row, column, *reduction = sch.get_loops(block)[-6:]
        row, tile_row = sch.split(row, [None, tile.rows])
        column, vector, product = sch.split(column, [None, tile.vectors, self.layout.lanes])
        sch.reorder(column, row, *reduction, tile_row, vector, product)
        if self.words is None:
            products = tile.rows * tile.vectors
            reduction = unroll_steps(sch, reduction, self.target, products=products, broadcasts=tile.rows)
        mark_filter(sch, reduction, passes=row)
        self._skip_rows(row, section, section.parts * tile.rows)
        store = sch.cache_write(block, 0, "global")
        sch.reverse_compute_at(store, row, preserve_unit_loops=True)
        if self.words is None:
            sch.vectorize(product)
        sch.unroll(vector)
        sch.unroll(tile_row)
        *_, tile_row, column = sch.get_loops(store)
        column, lane = sch.split(column, [None, self.layout.lanes])
        sch.vectorize(lane)
        sch.unroll(column)
        sch.unroll(tile_row)
        self._spread(store, -2, section.points)
        first = sch.decompose_reduction(block, reduction[0])
        if self.words is not None:
            sch.vectorize(sch.get_loops(first)[-1])
            sch.tensorize(product, dot_intrinsic(self.words, self.layout.lanes))

    def tile_matrices(self, block: SBlockRV, section: MatrixSection, products: int) -> None:
        """Mark the products of a register tile, a step of words at a time, and its first and last steps.

        There may be several `products` of the parts of a step.
        """
        sch, tile = self.sch, self.plan.tile
        row, column, *reduction, word = sch.get_loops(block)[-6 - (products > 1) - 1 :]
        row, tile_row = sch.split(row, [None, tile.rows])
        column, vector, product = sch.split(column, [None, tile.vectors, self.layout.lanes])
        sch.reorder(column, row, *reduction, tile_row, vector, product, word)
        if products == 1:
            mark_filter(sch, reduction)
        self._skip_rows(row, section, tile.rows)
        store = sch.cache_write(block, 0, "global")
        sch.reverse_compute_at(store, row, preserve_unit_loops=True)
        first = sch.decompose_reduction(block, reduction[0])
        multiply = reduction[-1] if products > 1 else tile_row
        mark_matrices(sch, clear=sch.get_loops(first)[-3], multiply=multiply, store=sch.get_loops(store)[-2])

    def vectorize_transform(self, block: SBlockRV, section: MatrixSection, number: int) -> None:
        """Make all results of a vector of columns in one unrolled body, where the compiler shares inner sums."""
        sch = self.sch
        *_, row, d, h, w, column = sch.get_loops(block)
        row, row_part = sch.split(row, [None, section.parts])
        column_part, column, lane = sch.split(column, [section.parts, None, self.layout.lanes])
        sch.reorder(row, column, row_part, column_part, d, h, w, lane)
        self._skip_rows(row, section, section.parts)
        for part in (row_part, column_part):
            sch.unroll(part)
        self._unroll_points(lane, [d, h, w], column, section, f"outputs_apart_{number}")

    def vectorize_finish(self) -> None:
        """Vectorise the epilogue along channels, or along phases if these are the vectors of the output."""
        sch, layout = self.sch, self.layout
        stride, phases = layout.strides[2], layout.contiguous_phases
        if not self.whole_vectors:
            self.skips.mark_outputs(self.epilogue, -3 if phases else -4, stride)
        *_, last = sch.get_loops(self.epilogue)
        if phases or self.plan.tile.channels >= layout.lanes:
            last, lane = sch.split(last, [None, phases or layout.lanes])
            sch.vectorize(lane)
            if not phases and self.plan.tile.channels % layout.lanes:
                # The last vector reads results again that the one before has finished, so their memory is not reused.
                sch.set_scope(self.epilogue, 0, "local")
        if self.whole_vectors:
            _, lane = sch.split(sch.fuse(*sch.get_loops(self.out)[LEAD + 4 :]), [None, layout.lanes])
            sch.vectorize(lane)
            for axis in range(LEAD, LEAD + 5):  # n, d, h, w, vectors
                self._merge((self.epilogue, self.out), axis)
            self.skips.mark_outputs(self.epilogue, LEAD + 1, stride)
            if stride > 2 and len(layout.geometry.axes[2].runs) > 1 and not self.definition.end:
                # A phase then has its product known; LLVM tells those of two phases apart by itself.
                sch.unroll(sch.split(sch.get_loops(self.out)[LEAD + 3], [None, stride])[1])
            # A vector in a scope of its own is never written to memory: the copy vanishes.
            sch.set_scope(self.epilogue, 0, "local")

    def transpose_chunks(self) -> None:
        """Finish a chunk in registers, and transpose it in squares of a vector of channels."""
        sch, layout = self.sch, self.layout
        interleave = sch.get_sblock("interleave")
        *_, place, lane = sch.get_loops(self.epilogue)
        sch.vectorize(lane)
        sch.unroll(place)
        *_, n, channel, place = sch.get_loops(interleave)
        depth, heights, chunks, chunk_outputs = (
            int(sch.get(loop).extent) for loop in sch.get_loops(self.epilogue)[-5:-1]
        )
        *outer, part, lane = sch.split(place, [depth, heights, chunks, chunk_outputs // layout.lanes, layout.lanes])
        sch.reorder(n, *outer, part, channel, lane)
        chunk = sch.merge(sch.get_loops(self.epilogue)[-3], outer[-1])
        if self._end_axis == 2:
            self.skips.mark(chunk, layout.chunks.chunk // layout.strides[2])
        else:
            self.skips.mark_outputs(self.epilogue, LEAD + 2, layout.chunks.chunk)
        sch.tensorize(sch.get_loops(interleave)[-2], self.transposition)

    def form_tasks(self) -> None:
        """Make tasks of blocks and groups, and of tiles of channels where these share the packed data."""
        layout = self.layout
        if not layout.vectors_are_channels:
            self.skips.mark_outputs(self.out, -3, layout.chunks.chunk)
        lead = self.sch.get_loops(self.out)[:LEAD]
        mark_tasks(self.sch, lead[layout.extents.serial :] if self.plan.share_data else lead[:-1])

    @property
    def _cuts_data(self) -> bool:
        """True if the factors of words have several parts, which are made of packed data."""
        return self.words is not None and self.words.cut and not self.layout.transforms

    @property
    def _end_axis(self) -> int:
        return self.definition.end.axis if self.definition.end else 2

    def _merge(self, blocks: Sequence[SBlockRV], depth: int) -> None:
        """Merge the nests of `blocks` down to the loop at `depth`."""
        self.sch.merge(*(self.sch.get_loops(block)[depth] for block in blocks))

    def _skip_rows(self, loop: LoopRV, section: MatrixSection, unit: int, whole: int = 1) -> None:
        """Skip iterations of `loop`, each of `unit` rows of `section`, past a dynamic end."""
        axis = self._end_axis
        rows_inside = math.prod(inner.tiles for inner in section.axes[axis + 1 :])
        self.skips.mark(loop, unit, whole=whole, inner=rows_inside, outputs=section.axes[axis].outputs)
