"""Schedule of the direct definitions for AVX2 and AVX-512.

Measured on one core of a Cascade Lake Xeon at 2.5 GHz, shared with other work, each next to ONNX Runtime in one run:
128 to 64 channels, kernel 2, stride 2, 256x256: 1.5 times as fast; 256 to 64, kernel 2, 64x64: 1.4; 512 to 256, kernel
16, stride 8, 128: 1.6; 1024 groups of one channel, kernel 5, stride 2, 7x7: 10.

Registers: `tiles.register_tiles` counts ``broadcast * vectors + vectors + 1``: 13 channels by 2 vectors make
29 of the 32 of AVX-512, 6 by 2 are 15 of the 16 of AVX2.  The accumulators are one buffer with constant indices in a
fully unrolled body, which LLVM keeps in registers.

Caches: while a block's packed data, and the results of one tile of channels, stay within half of the second-level cache
(512 KiB of Skylake-SP's), a step of the reduction reads ``vectors`` lines of it from there and hits the first level
with the other taps of the same element.  Interleaving and the copy work on one row, in the first level;
`register_epilogue` does without them where register tiles hold vectors of the output.
"""

from __future__ import annotations

from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV
from tvm_deconv.schedules.x86.interleave import MAX_STREAMS, interleave_intrinsic
from tvm_deconv.schedules.x86.loop_marks import SkipMarks, mark_tasks
from tvm_deconv.schedules.x86.tiles import Plan

from tvm_deconv.compute.direct import DirectDefinition
from tvm_deconv.compute.indexing import CHANNELS, GROUPS, LEAD, ROWS


def schedule_direct(
    definition: DirectDefinition, form: str, plan: Plan, lanes: int, dtype: str, whole_vectors: bool
) -> Schedule:
    """Schedule a direct `definition`, whose accumulators are of `dtype`, by `plan`.

    If `whole_vectors`, results are stored as they are made: each row is chunks of them, or each position vectors.
    """
    tile, layout = plan.tile, definition.layout
    sch = Schedule(definition.func)
    skips, serial = SkipMarks(sch, definition.end), layout.extents.serial
    end = definition.end
    outputs = tile.outputs[end.axis] if end else 1
    runs = [sch.get_sblock(f"run_{i}") for i in range(len(definition.sections))]
    tail = [sch.get_sblock("interleave")]
    out = sch.get_sblock("out")
    if form == ROWS:
        tail.insert(0, sch.get_sblock("epilogue"))
    nested = [*runs, *tail]
    # 1. One nest over blocks, groups and channel tiles, and the copy into the output at its end.
    if len(nested) > 1:
        sch.merge(*(sch.get_loops(block)[LEAD - 1] for block in nested))
    # 2. The packed data: within the nest, once for all channel tiles; or before it, where those run in parallel.
    if runs:
        data_pack = sch.get_sblock("data_pack")
        points = [sch.get_sblock(f"points_{i}") for i in range(definition.points)]
        position = sch.get_loops(data_pack)[{ROWS: -1, CHANNELS: -2, GROUPS: -3}[form]]
        line, place = sch.split(position, [None, layout.packed[2]])
        if points:
            *_, d, h, _, _ = sch.get_loops(data_pack)
            sch.reorder(line, d, h, place)  # as the caller's rows follow each other
        if end and end.axis == 2:
            skips.mark_parts(place, 1, halo=layout.end_halo)
        elif form == ROWS:
            skips.mark(line, layout.packed[2], inner=layout.end_step, outputs=outputs, halo=layout.end_halo)
        for block in points:
            # Sums of rows are made while those of an input channel are near, all that take the same at once.
            *_, d, h, ci, position = sch.get_loops(block)
            position, lane = sch.split(position, [None, lanes])
            sch.reorder(ci, position, d, h, lane)
            if end and end.axis < 2:
                skips.mark(position, lanes, inner=layout.end_step, outputs=outputs, halo=layout.end_halo)
            sch.vectorize(lane)
            sch.unroll(d)
            sch.unroll(h)
        if plan.share_data:
            if points:
                sch.merge(*(sch.get_loops(block)[LEAD - 1] for block in (data_pack, *points)))
            if serial:
                sch.merge(*(sch.get_loops(block)[serial - 1] for block in (data_pack, runs[0])))
            sch.parallel(sch.fuse(*sch.get_loops(data_pack)[serial:LEAD]))
        else:
            sch.merge(*(sch.get_loops(block)[LEAD - 2] for block in (data_pack, *points, runs[0])))
            if points:
                sch.merge(*(sch.get_loops(block)[LEAD - 1] for block in (data_pack, *points)))
    # 3. A row is finished and interleaved a chunk at a time, which lives in registers, and is copied out at once.
    if form == ROWS:
        *_, vector, stream, chunk_lane = sch.get_loops(tail[0])
        *_, w, _ = sch.get_loops(tail[1])
        chunk_vector, chunk = sch.split(w, [None, layout.strides[2] * lanes])
        vector = sch.merge(vector, chunk_vector)
        if end and end.axis == 2:
            skips.mark(vector, lanes)
    sch.reverse_compute_at(out, sch.get_loops(tail[-1])[LEAD - 1], preserve_unit_loops=True)
    if layout.channels_last:
        height = LEAD + 2  # n, d, h
        sch.merge(sch.get_loops(tail[-1])[height], sch.get_loops(out)[height])
        if whole_vectors:
            sch.merge(sch.get_loops(tail[-1])[height + 1], sch.get_loops(out)[height + 1])
            _vectors(sch, sch.fuse(*sch.get_loops(out)[height + 2 :]), [None, lanes])
    elif form == ROWS:
        height = LEAD + 3  # channel, n, d, h
        n, g, c, d, h, w = sch.get_loops(out)[LEAD:]
        sch.reorder(g, c, n, d, h, w)
        sch.fuse(g, c)
        sch.merge(sch.get_loops(tail[-1])[height], sch.get_loops(out)[height])
        if whole_vectors:
            chunk_number, _, _ = _vectors(sch, w, [None, layout.strides[2], lanes])
            sch.merge(sch.get_loops(tail[-1])[height + 1], chunk_number)
    if end and end.axis == 2:
        if form != ROWS:
            skips.mark_outputs(tail[0], LEAD + 1, layout.strides[2])
        if not layout.channels_last:
            skips.mark_outputs(out, -3, layout.strides[2])
    elif end and (layout.channels_last or form == ROWS):
        skips.mark(sch.get_loops(out)[height], 1, inner=end.stride)
    # Of a scope of its own, since memory that is shared with what is read again would have to be written.
    scope = "local" if whole_vectors else "global"
    sch.set_scope(tail[-1], 0, scope)
    # 4. Register tiles.
    for block, section in zip(runs, definition.sections, strict=True):
        fd, fh, fw, first, second, *reduction = sch.get_loops(block)[-9:]
        cc, m = (first, second) if form == ROWS else (second, first)
        fh, row = sch.split(fh, [None, section.phases[0]])
        fw, phase = sch.split(fw, [None, section.phases[1]])
        m_tile = sch.split(m, [None, tile.positions])
        vector_loop, other = (m_tile[1], cc) if form == ROWS else (cc, m_tile[1])
        vectors, lane = sch.split(vector_loop, [None, lanes])
        sch.reorder(fd, fh, fw, m_tile[0], *reduction, row, phase, other, vectors, lane)
        skips.mark(m_tile[0], tile.positions, inner=layout.end_step, outputs=outputs)
        store = sch.cache_write(block, 0, "global")
        sch.reverse_compute_at(store, m_tile[0], preserve_unit_loops=True)
        sch.vectorize(lane)
        sch.unroll(vectors)
        sch.unroll(other)
        sch.unroll(phase)
        sch.unroll(row)
        *_, row, phase, outer, inner = sch.get_loops(store)
        inner, lane = sch.split(inner, [None, lanes])
        sch.vectorize(lane)
        sch.unroll(inner)
        sch.unroll(outer)
        sch.unroll(phase)
        sch.unroll(row)
        sch.decompose_reduction(block, reduction[0])
    # 5. Vectors of the epilogue, and the shuffles.
    if form == ROWS:
        sch.vectorize(chunk_lane)
        if layout.strides[2] * layout.minor <= MAX_STREAMS:
            sch.unroll(stream)
            sch.tensorize(chunk, interleave_intrinsic(layout.strides[2], layout.minor, lanes, dtype, scope))
    else:
        *_, w, cc = sch.get_loops(tail[0])
        cc, lane = sch.split(cc, [None, lanes])
        sch.vectorize(lane)
        sch.unroll(cc)
    # 6. Threads.
    lead = sch.get_loops(out)[:LEAD]
    mark_tasks(sch, lead[serial:] if plan.share_data else lead[:-1])
    sch.transform_layout(out, ("write", 0), definition.caller_index)
    return sch


def _vectors(sch: Schedule, loop: LoopRV, factors: list[int | None]) -> list[LoopRV]:
    """Split `loop`; the last of the parts is a vector, the one before it, if there are three, unrolled."""
    first, *parts, lane = sch.split(loop, factors)
    sch.vectorize(lane)
    for part in parts:
        sch.unroll(part)
    return [first, *parts, lane]
