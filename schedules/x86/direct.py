"""Schedule of the direct definitions for AVX2 and AVX-512.

Measured on one core of a Cascade Lake Xeon at 2.5 GHz, shared with other work, each next to ONNX Runtime in one run:
128 to 64 channels, kernel 2, stride 2, 256x256: 1.5 times as fast; 256 to 64, kernel 2, 64x64: 1.4; 512 to 256, kernel
16, stride 8, 128: 1.6; 1024 groups of one channel, kernel 5, stride 2, 7x7: 10.

Registers: `register_tiles` counts ``broadcast * vectors + vectors + 1``. 13 channels by 2 vectors take 29 of the
32 registers of AVX-512; 6 by 2 take 15 of the 16 of AVX2. The accumulators are one buffer with constant indices in a
fully unrolled body, which LLVM keeps in registers.

Caches: the packed data of a block and the results of one tile of channels stay within half of the second-level cache
(512 KiB of Skylake-SP's). A step of the reduction then reads ``vectors`` lines from there, and the other taps of the
same element hit the first level. Interleaving and the copy work on one row, in the first level; `register_epilogue`
does without them where register tiles hold vectors of the output.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV, SBlockRV

from tvm_deconv.compute.direct import DirectDefinition
from tvm_deconv.compute.direct_layout import DirectLayout, FilterSection
from tvm_deconv.compute.indexing import CHANNELS, GROUPS, INPUTS, LEAD, ROWS
from tvm_deconv.compute.words import WORD, Words, tiled
from tvm_deconv.problem import Problem
from tvm_deconv.schedules.x86 import data_in_place
from tvm_deconv.schedules.x86.amx import MATRIX_ROWS, REGISTER_TILES, mark_matrices
from tvm_deconv.schedules.x86.cache_sets import keep_apart
from tvm_deconv.schedules.x86.dot import dot_intrinsic
from tvm_deconv.schedules.x86.interleave import MAX_STREAMS, interleave_intrinsic, join_intrinsic, transpose_intrinsic
from tvm_deconv.schedules.x86.loop_marks import SkipMarks, mark_tasks
from tvm_deconv.schedules.x86.prefetching import mark_data, mark_filter
from tvm_deconv.schedules.x86.tiles import Plan
from tvm_deconv.schedules.x86.unrolling import unroll_steps
from tvm_deconv.targets import CpuTarget


def schedule_direct(
    definition: DirectDefinition,
    plan: Plan,
    target: CpuTarget,
    problem: Problem,
    whole_vectors: bool,
    words: Words | None = None,
    joining: str = "",
) -> Schedule:
    """Schedule a direct `definition` of `problem`, whose factors are in `words` if given, by `plan` for `target`.

    If `whole_vectors`, finished vectors are stored straight into the output: each row is whole chunks, or each position
    whole vectors of channels. `joining`, if not empty, is the function of `rounding.row_joining` for a definition that
    narrows.
    """
    sch = Schedule(definition.func)
    finishing = ("epilogue", "interleave") if definition.layout.form == ROWS else ("interleave",)
    return _Steps(
        sch=sch,
        definition=definition,
        plan=plan,
        target=target,
        problem=problem,
        whole_vectors=whole_vectors,
        words=words,
        joining=joining,
        runs=[sch.get_sblock(f"run_{i}") for i in range(len(definition.sections))],
        finishing=[sch.get_sblock(name) for name in finishing],
        out=sch.get_sblock("out"),
        skips=SkipMarks(sch, definition.end),
    ).schedule()


@dataclass(frozen=True, slots=True)
class _Steps:
    """The steps of a schedule, in order; `finishing` are the stages between the products and ``out``."""

    sch: Schedule
    definition: DirectDefinition
    plan: Plan
    target: CpuTarget
    problem: Problem
    whole_vectors: bool
    words: Words | None
    joining: str
    runs: Sequence[SBlockRV]
    finishing: Sequence[SBlockRV]
    out: SBlockRV
    skips: SkipMarks

    def schedule(self) -> Schedule:
        """Take all steps."""
        self.merge_nest()
        if self.runs:
            self.pack()
        if self.layout.form == ROWS:
            self.merge_chunks()
        self.place_output()
        self.skip_outputs()
        for block, section in zip(self.runs, self.definition.sections, strict=True):
            if self.layout.form == INPUTS:
                self.tile_inputs(block, section)
            elif tiled(self.words):
                self.tile_matrices(block, section, len(self.words.products))
            else:
                self.tile_registers(block, section)
        if self.layout.form != INPUTS:
            self.vectorize_finish()
        self.form_tasks()
        self.sch.transform_layout(self.out, ("write", 0), self.definition.caller_index)
        return self.sch

    @property
    def layout(self) -> DirectLayout:
        """The layout of the definition."""
        return self.definition.layout

    def merge_nest(self) -> None:
        """Make one nest over blocks, groups and tiles of channels of the products and of their epilogue.

        The results of a tile of channels are then finished while they are in the second-level cache.
        """
        nested = [*self.runs, *self.finishing]
        if len(nested) > 1:
            self._merge(nested, LEAD - 1)

    def pack(self) -> None:
        """Schedule the packed data and the sums of their rows.

        They are made within the nest, once for all tiles of channels; or before it, where those run in parallel.
        """
        sch, layout = self.sch, self.layout
        data_pack = sch.get_sblock("data_pack")
        if self.in_place:
            sch.compute_inline(data_pack)
            return
        points = [sch.get_sblock(f"points_{i}") for i in range(self.definition.points)]
        made = list(points)  # of packed rows
        if self.words is not None and self.words.cut:
            made.append(self._cut_words(data_pack, self.words))
        # Sums are made of each channel while it is near, unless several channels are transposed at a time.
        innermost = LEAD - 2 if layout.transposes_data else LEAD - 1
        if not layout.transposes_data:
            self._split_rows(data_pack)
        if layout.form == ROWS:
            self._align_channels(data_pack, points)
        for block in points:
            self._vectorize_sums(block)
        if self.plan.share_data:
            if made:
                self._merge((data_pack, *made), innermost)
            serial = layout.extents.serial
            if serial:
                self._merge((data_pack, self.runs[0]), serial - 1)
            sch.parallel(sch.fuse(*sch.get_loops(data_pack)[serial : innermost + 1]))
        else:
            self._merge((data_pack, *made, self.runs[0]), LEAD - 2)
            if made and innermost == LEAD - 1:
                self._merge((data_pack, *made), innermost)
        if layout.transposes_data:
            self._transpose_data(data_pack)

    def _align_channels(self, data_pack: SBlockRV, points: Sequence[SBlockRV]) -> None:
        """Begin the channels that matrices read with a line, and keep those that vectors read at once apart."""
        layout = self.layout
        # Positions are the last axis. In front of them are channels, or rows of a tile and then channels.
        behind = 1 if points or layout.transposes_data else 3
        axis = len(self.sch.get(data_pack).writes[0].region) - 1 - behind
        if tiled(self.words):
            if not self.words.cut:  # else tiles are of parts
                self.sch.storage_align(data_pack, 0, axis, layout.lanes, 0)
        elif not layout.transposes_data:
            for block in points or [data_pack]:
                keep_apart(self.sch, block, axis)

    def _split_rows(self, data_pack: SBlockRV) -> None:
        """Pack row by row, and skip rows, or parts of a row, past a dynamic end."""
        sch, layout, end = self.sch, self.layout, self.definition.end
        position = sch.get_loops(data_pack)[{ROWS: -1, CHANNELS: -2, INPUTS: -2, GROUPS: -3}[layout.form]]
        row, place = sch.split(position, [None, layout.packed[2]])
        if self.definition.points:
            *_, d, h, _, _ = sch.get_loops(data_pack)
            sch.reorder(row, d, h, place)  # in the order of the caller's rows
        if layout.form == INPUTS:
            *_, channel = sch.get_loops(data_pack)
            if self.words is None and not layout.pairs:  # else rows of words are loaded as a whole
                sch.vectorize(sch.split(channel, [None, layout.lanes])[1])
        if end and end.axis == 2:
            self.skips.mark_parts(place, 1, halo=layout.end_halo)
        elif layout.form == ROWS:
            self._skip_positions(row, layout.packed[2], layout.end_halo)

    def _cut_words(self, data_pack: SBlockRV, words: Words) -> SBlockRV:
        """Make all parts of a vector of words at once, while the channels of a step are near; return the stage."""
        sch, layout, end = self.sch, self.layout, self.definition.end
        sch.split(sch.get_loops(data_pack)[LEAD - 1], [None, words.factors * words.depth])
        data_words = sch.get_sblock("data_words")
        word, d, h, position = sch.get_loops(data_words)[LEAD - 1 :]
        step, part, word = sch.split(word, [None, words.parts, words.depth])
        position, lane = sch.split(position, [None, layout.lanes])
        sch.reorder(step, word, d, h, position, part, lane)
        if end and end.axis < 2:
            self._skip_positions(position, layout.lanes, layout.end_halo)
        sch.vectorize(lane)
        sch.unroll(part)
        return data_words

    def _transpose_data(self, data_pack: SBlockRV) -> None:
        """Fetch vectors of channels of some positions, and transpose them in squares while they are near."""
        sch, layout = self.sch, self.layout
        *_, channel, position = sch.get_loops(data_pack)
        near, square, lane = sch.split(position, [None, layout.transposed_positions // layout.lanes, layout.lanes])
        channel, row = sch.split(channel, [None, layout.lanes])
        sch.reorder(near, channel, square, row, lane)
        data_rows = sch.get_sblock("data_rows")
        sch.compute_at(data_rows, near, preserve_unit_loops=True)
        *_, channels = sch.get_loops(data_rows)
        if self.words is None:  # else LLVM makes vectors of loads that it has joined
            sch.vectorize(sch.split(channels, [None, layout.lanes])[1])
        sch.tensorize(row, transpose_intrinsic(layout.lanes, WORD if self.words else layout.sum_dtype))

    def _vectorize_sums(self, points: SBlockRV) -> None:
        """Make all sums of the same rows at once, while the rows of an input channel are in the first-level cache."""
        sch, layout, end = self.sch, self.layout, self.definition.end
        *_, d, h, ci, position = sch.get_loops(points)
        position, lane = sch.split(position, [None, layout.lanes])
        sch.reorder(ci, position, d, h, lane)
        if end and end.axis < 2:
            self._skip_positions(position, layout.lanes, layout.end_halo)
        sch.vectorize(lane)
        sch.unroll(d)
        sch.unroll(h)

    def merge_chunks(self) -> None:
        """Finish and interleave a row chunk by chunk: a chunk lives in registers."""
        sch, layout, end = self.sch, self.layout, self.definition.end
        epilogue, interleave = self.finishing
        *_, vector, _, _ = sch.get_loops(epilogue)
        *_, w, _ = sch.get_loops(interleave)
        chunk_number, _ = sch.split(w, [None, layout.strides[2] * layout.lanes])
        vector = sch.merge(vector, chunk_number)
        if end and end.axis == 2:
            self.skips.mark(vector, layout.lanes)

    def place_output(self) -> None:
        """Copy each row to the output right after it is finished, or each vector if vectors are whole."""
        sch, layout, finished, out = self.sch, self.layout, self.finishing[-1], self.out
        sch.reverse_compute_at(out, sch.get_loops(finished)[LEAD - 1], preserve_unit_loops=True)
        height = self._height
        if layout.channels_last:
            self._merge((finished, out), height)
            if self.whole_vectors:
                self._merge((finished, out), height + 1)
                channels = sch.fuse(*sch.get_loops(out)[height + 2 :])
                sch.vectorize(sch.split(channels, [None, layout.lanes])[1])
        elif layout.form == ROWS:
            n, g, c, d, h, w = sch.get_loops(out)[LEAD:]
            sch.reorder(g, c, n, d, h, w)
            sch.fuse(g, c)
            self._merge((finished, out), height)
            if self.whole_vectors:
                words = 2 if self.joining else 1  # of several outputs
                shape = [None, layout.strides[2] // words, words * layout.lanes]
                chunk_number, vector, lane = sch.split(w, shape)
                sch.vectorize(lane)
                sch.unroll(vector)
                sch.merge(sch.get_loops(finished)[height + 1], chunk_number)
        # Vectors get a scope of their own: memory shared with values that are read again would have to be written.
        sch.set_scope(finished, 0, self._finished_scope)

    def skip_outputs(self) -> None:
        """Skip outputs past a dynamic end."""
        layout, end = self.layout, self.definition.end
        if end and end.axis == 2:
            if layout.form != ROWS:
                self.skips.mark_outputs(self.finishing[0], LEAD + 1, layout.strides[2])
            if not layout.channels_last:
                self.skips.mark_outputs(self.out, -3, layout.strides[2])
        elif end and (layout.channels_last or layout.form == ROWS):
            self.skips.mark(self.sch.get_loops(self.out)[self._height], 1, inner=end.stride)

    def tile_registers(self, block: SBlockRV, section: FilterSection) -> None:
        """Unroll a register tile of products, and store its accumulators when they are complete.

        The reduction runs outside of the tile, so that the accumulators stay in registers (`register_tiles`).
        """
        sch, layout = self.sch, self.layout
        fd, fh, fw, first, second, *reduction = sch.get_loops(block)[-9:]
        channel, position = (first, second) if layout.form == ROWS else (second, first)
        fh, row = sch.split(fh, [None, section.phases[0]])
        fw, phase = sch.split(fw, [None, section.phases[1]])
        tile, position = sch.split(position, [None, layout.tile.positions])
        vectors, broadcast = (position, channel) if layout.form == ROWS else (channel, position)
        vectors, product = sch.split(vectors, [None, layout.lanes])
        outer = [tile]
        if layout.tile.part:  # the parts of a position in succession: their outputs are contiguous
            part, vectors = sch.split(vectors, [None, layout.tile.part // layout.lanes])
            outer.append(part)
        sch.reorder(fd, fh, fw, *outer, *reduction, row, phase, broadcast, vectors, product)
        if self.words is None:
            products = self._count(row, phase, broadcast, vectors)
            broadcasts = self._count(row, phase, broadcast) if layout.form == ROWS else self._count(broadcast)
            reduction = unroll_steps(sch, reduction, self.target, products=products, broadcasts=broadcasts)
        if layout.form == CHANNELS:
            mark_filter(sch, reduction, passes=None if layout.tile.part else tile)
        if self.in_place:
            mark_data(sch, row, layout.tile.positions)
        self._skip_positions(tile, layout.tile.positions)
        store = sch.cache_write(block, 0, "global")
        sch.reverse_compute_at(store, outer[-1], preserve_unit_loops=True)
        self._unroll(row, phase, broadcast, vectors)
        if self.words is None:
            sch.vectorize(product)
        *_, row, phase, outer, inner = sch.get_loops(store)
        inner, lane = sch.split(inner, [None, layout.lanes])
        sch.vectorize(lane)
        self._unroll(row, phase, outer, inner)
        first = sch.decompose_reduction(block, reduction[0])
        if self.words is not None:
            sch.vectorize(sch.get_loops(first)[-1])
            sch.tensorize(product, dot_intrinsic(self.words, layout.lanes))

    def tile_matrices(self, block: SBlockRV, section: FilterSection, products: int) -> None:
        """Mark the products of a register tile, a step of words at a time, and its first and last steps.

        There may be several `products` of the parts of a step. The output channels of all phases of a tile are the rows
        of the left factor. Raises ValueError if the register tile is none of `REGISTER_TILES`.
        """
        sch, positions = self.sch, self.layout.tile.positions
        fd, fh, fw, channel, position, *reduction, word = sch.get_loops(block)[-10 - (products > 1) :]
        fh, row = sch.split(fh, [None, section.phases[0]])
        fw, phase = sch.split(fw, [None, section.phases[1]])
        tile, position = sch.split(position, [None, positions])
        sch.reorder(fd, fh, fw, tile, *reduction, row, phase, channel, position, word)
        self._skip_positions(tile, positions)
        rows = sch.fuse(row, phase, channel)
        shape = int(sch.get(rows).extent), positions
        if shape not in [(MATRIX_ROWS * heights, MATRIX_ROWS * vectors) for heights, vectors in REGISTER_TILES]:
            raise ValueError(f"rows and positions={shape}: must be those of whole tiles, eight at most with operands")
        store = sch.cache_write(block, 0, "global")
        sch.reverse_compute_at(store, tile, preserve_unit_loops=True)
        stored = sch.fuse(*sch.get_loops(store)[-4:-1])
        first = sch.decompose_reduction(block, reduction[0])
        multiply = reduction[-1] if products > 1 else rows
        mark_matrices(sch, clear=sch.get_loops(first)[-2], multiply=multiply, store=stored)

    def tile_inputs(self, block: SBlockRV, section: FilterSection) -> None:
        """Unroll a register tile of partial sums; their lanes are added up when it is complete.

        The operand with fewer vectors is kept in registers, and the other passes by.
        """
        sch, tile = self.sch, self.layout.tile
        fd, fh, fw, position, channel, lane, *reduction = sch.get_loops(block)[-10:]
        fh, row = sch.split(fh, [None, section.phases[0]])
        fw, phase = sch.split(fw, [None, section.phases[1]])
        number, position = sch.split(position, [None, tile.positions])
        filters = math.prod(section.phases) * tile.channels
        if self.layout.pairs:
            *reduction, last = reduction
            last, half = sch.split(last, [None, 2])
            sch.unroll(half)
            reduction = [*reduction, last, half]
        inner = (row, phase, channel, position) if tile.positions < filters else (position, row, phase, channel)
        sch.reorder(fd, fh, fw, number, *reduction, *inner, lane)
        store = sch.cache_write(block, 0, "global")
        sch.reverse_compute_at(store, number, preserve_unit_loops=True)
        if self.words is None:
            sch.vectorize(lane)
        self._unroll(*inner)
        first = sch.decompose_reduction(block, reduction[0])
        if self.words is not None:
            sch.vectorize(sch.get_loops(first)[-1])
            sch.tensorize(lane, dot_intrinsic(self.words, self.layout.lanes, broadcast=False))

    def _count(self, *loops: LoopRV) -> int:
        """Return the iterations of nested `loops`."""
        return math.prod(int(self.sch.get(loop).extent) for loop in loops)

    def _unroll(self, *loops: LoopRV) -> None:
        for loop in reversed(loops):
            self.sch.unroll(loop)

    def vectorize_finish(self) -> None:
        """Vectorise the epilogue, and interleave by shuffles as far as a network of them pays."""
        sch, layout = self.sch, self.layout
        if layout.form == ROWS:
            epilogue, interleave = self.finishing
            *_, stream, lane = sch.get_loops(epilogue)
            *_, chunk, _ = sch.get_loops(interleave)
            sch.vectorize(lane)
            stride, minor = layout.strides[2], layout.minor
            if stride * minor <= MAX_STREAMS:
                sch.unroll(stream)
                sch.tensorize(chunk, self._interleaving(stride, minor))
        else:
            *_, channel = sch.get_loops(self.finishing[0])
            vector, lane = sch.split(channel, [None, layout.lanes])
            sch.vectorize(lane)
            sch.unroll(vector)

    def _interleaving(self, stride: int, minor: int) -> str:
        """Return the intrinsic that interleaves a chunk."""
        lanes, dtype, scope = self.layout.lanes, self.problem.accumulate_dtype, self._finished_scope
        if self.definition.narrows:
            return join_intrinsic(self.problem, stride, lanes, self.joining, scope)
        return interleave_intrinsic(stride, minor, lanes, dtype, scope)

    def form_tasks(self) -> None:
        """Make tasks of blocks and groups, and of tiles of channels where these share the packed data."""
        lead = self.sch.get_loops(self.out)[:LEAD]
        mark_tasks(self.sch, lead[self.layout.extents.serial :] if self.plan.share_data else lead[:-1])

    @property
    def in_place(self) -> bool:
        """True if register tiles read the caller's data."""
        layout = self.layout
        return data_in_place.supports_tile(self.problem, layout.geometry, layout.form, layout.tile, self.target)

    @property
    def _height(self) -> int:
        """The loop over the rows of a plane in ``out`` and the stage before it: of n, d, h, or of channel, n, d, h."""
        return LEAD + 2 if self.layout.channels_last else LEAD + 3

    @property
    def _finished_scope(self) -> str:
        return "local" if self.whole_vectors else "global"

    def _merge(self, blocks: Sequence[SBlockRV], depth: int) -> None:
        """Merge the nests of `blocks` down to the loop at `depth`."""
        self.sch.merge(*(self.sch.get_loops(block)[depth] for block in blocks))

    def _skip_positions(self, loop: LoopRV, unit: int, halo: int = 0) -> None:
        """Skip iterations of `loop`, each of `unit` flat positions, past a dynamic end and its `halo`."""
        end = self.definition.end
        outputs = self.layout.tile.outputs[end.axis] if end else 1
        self.skips.mark(loop, unit, inner=self.layout.end_step, outputs=outputs, halo=halo)
