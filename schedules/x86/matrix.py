"""Schedule of the matrix definition for AVX2 and AVX-512."""

from __future__ import annotations

import math

from tvm.s_tir import Schedule
from tvm_deconv.schedules.x86.interleave import transpose_intrinsic
from tvm_deconv.schedules.x86.loop_marks import SkipMarks, mark_tasks
from tvm_deconv.schedules.x86.matrix_tiles import MatrixPlan

from tvm_deconv.compute.indexing import LEAD
from tvm_deconv.compute.matrix import MatrixDefinition


def schedule_matrix(
    definition: MatrixDefinition, plan: MatrixPlan, lanes: int, dtype: str, whole_vectors: bool
) -> Schedule:
    """Schedule `definition`, which was made for the tile of `plan`, with accumulators of `dtype`.

    If `whole_vectors`, results are stored as they are made: each position is whole vectors of channels.
    """
    tile, share_data = plan.tile, plan.share_data
    sch = Schedule(definition.func)
    skips, serial = SkipMarks(sch, definition.end), definition.serial
    end_axis = definition.end.axis if definition.end else 2
    # Rows from one place along the axis of the end to the next, and the positions of a place.
    inner = [math.prod(axis.tiles for axis in section.axes[end_axis + 1 :]) for section in definition.sections]
    outputs = [section.axes[end_axis].outputs for section in definition.sections]
    count = len(definition.sections)
    data_pack = sch.get_sblock("data_pack") if count else None
    rows = [sch.get_sblock(f"rows_{i}") for i in range(count)] if definition.gathers else []
    runs = [sch.get_sblock(f"run_{i}") for i in range(count)]
    transforms = {
        i: sch.get_sblock(f"outputs_{i}") for i, section in enumerate(definition.sections) if section.transformed
    }
    epilogue = sch.get_sblock("epilogue")
    direct = definition.channels_last or definition.contiguous_phases  # vectors as in the output: nothing to transpose
    tail = [epilogue] if direct else [epilogue, sch.get_sblock("interleave"), sch.get_sblock("rows_out")]
    out = sch.get_sblock("out")
    nested = []
    for i in range(count):
        nested += [runs[i], *([transforms[i]] if i in transforms else [])]
    nested += tail
    # 1. One nest over blocks, groups and tiles of channels.
    if len(nested) > 1:
        sch.merge(*(sch.get_loops(block)[LEAD - 1] for block in nested))
    # 2. Data and rows within it, once for all tiles of channels; or before it, where those run in parallel.
    if count:
        first = [data_pack, *rows] if definition.channels_last else [sch.get_sblock("data_rows"), data_pack, *rows]
        if share_data:
            if len(first) > 1:
                sch.merge(*(sch.get_loops(block)[LEAD - 2] for block in first))
            if serial:
                sch.merge(*(sch.get_loops(block)[serial - 1] for block in (first[-1], runs[0])))
            sch.parallel(sch.fuse(*sch.get_loops(first[-1])[serial : LEAD - 1]))
        else:
            sch.merge(*(sch.get_loops(block)[LEAD - 2] for block in (*first, runs[0])))
    # 3. The copy into the output.
    sch.reverse_compute_at(out, sch.get_loops(tail[-1])[LEAD - 1], preserve_unit_loops=True)
    if not direct:
        sch.compute_inline(tail.pop())
    # 4. Rows: vectors of input channels; the points of a transform are one body, where inner sums are shared.
    if count:
        *_, w, ci = sch.get_loops(data_pack)
        ci, lane = sch.split(ci, [None, lanes])
        if definition.channels_last:
            sch.vectorize(lane)
        else:
            w, w_lane = sch.split(w, [None, lanes])
            sch.reorder(ci, w, w_lane, lane)
            *_, row_ci, _ = sch.get_loops(first[0])
            row_ci, _ = sch.split(row_ci, [None, lanes])
            sch.merge(row_ci, ci)
            *_, row = sch.get_loops(first[0])
            if definition.end and end_axis == 2:
                skips.mark_parts(row, lanes, halo=definition.halo)
                skips.mark(w, lanes, halo=definition.halo)
            elif definition.row_run and int(sch.get(row).extent) > definition.row_run:
                sch.split(row, [None, definition.row_run])
            sch.tensorize(w_lane, transpose_intrinsic(lanes, dtype))
        if not definition.row_run and end_axis == 1:
            skips.mark(sch.get_loops(first[0])[-4], 1, halo=definition.halo)
        for i, block in enumerate(rows):
            *_, pd, ph, pw, row, td, th, tw, ci = sch.get_loops(block)
            ci, lane = sch.split(ci, [None, lanes])
            sch.reorder(row, td, th, tw, ci, pd, ph, pw, lane)
            skips.mark(row, tile.parts, whole=tile.rows, inner=inner[i], outputs=outputs[i])
            sch.vectorize(lane)
            for loop in (pd, ph, pw):
                sch.unroll(loop)
    # 5. Register tiles of the products.
    for i, block in enumerate(runs):
        row, column, *reduction = sch.get_loops(block)[-6:]
        row, row_in = sch.split(row, [None, tile.rows])
        column, vector, lane = sch.split(column, [None, tile.vectors, lanes])
        sch.reorder(column, row, *reduction, row_in, vector, lane)
        skips.mark(row, tile.parts * tile.rows, inner=inner[i], outputs=outputs[i])
        store = sch.cache_write(block, 0, "global")
        sch.reverse_compute_at(store, row, preserve_unit_loops=True)
        sch.vectorize(lane)
        sch.unroll(vector)
        sch.unroll(row_in)
        *_, row_in, column = sch.get_loops(store)
        column, lane = sch.split(column, [None, lanes])
        sch.vectorize(lane)
        sch.unroll(column)
        sch.unroll(row_in)
        sch.decompose_reduction(block, reduction[0])
    # 6. The transform of the results.
    for i, block in transforms.items():
        *_, row, d, h, w, column = sch.get_loops(block)
        row, row_part = sch.split(row, [None, tile.parts])
        column_part, column, lane = sch.split(column, [tile.parts, None, lanes])
        sch.reorder(row, column, row_part, column_part, d, h, w, lane)
        skips.mark(row, tile.parts, inner=inner[i], outputs=outputs[i])
        sch.vectorize(lane)
        for loop in (row_part, column_part, d, h, w):
            sch.unroll(loop)
    # 7. Epilogue, and transposition.
    if direct:
        if not whole_vectors:
            skips.mark_outputs(epilogue, -3 if definition.contiguous_phases else -4, definition.stride)
        *_, last = sch.get_loops(epilogue)
        if definition.contiguous_phases or tile.channels >= lanes:
            last, lane = sch.split(last, [None, definition.contiguous_phases or lanes])
            sch.vectorize(lane)
        if whole_vectors:
            # The copy vanishes: of a scope of its own, what is copied need not be written anywhere.
            _, lane = sch.split(sch.fuse(*sch.get_loops(out)[LEAD + 4 :]), [None, lanes])
            sch.vectorize(lane)
            for axis in range(LEAD, LEAD + 5):  # n, d, h, w, vectors
                sch.merge(sch.get_loops(epilogue)[axis], sch.get_loops(out)[axis])
            skips.mark_outputs(epilogue, LEAD + 1, definition.stride)
            sch.set_scope(epilogue, 0, "local")
    else:
        *_, i, lane = sch.get_loops(epilogue)
        sch.vectorize(lane)
        sch.unroll(i)
        *_, n, cc, place = sch.get_loops(tail[1])
        extents = [int(sch.get(loop).extent) for loop in sch.get_loops(epilogue)[-5:-1]]
        *outer, part, w = sch.split(place, [*extents[:-1], extents[-1] // lanes, lanes])
        sch.reorder(n, *outer, part, cc, w)
        # A chunk is finished in registers, and transposed at once.
        chunk = sch.merge(sch.get_loops(epilogue)[-3], outer[-1])
        if end_axis == 2:
            skips.mark(chunk, definition.chunk // definition.stride)
        else:
            skips.mark_outputs(epilogue, LEAD + 2, definition.chunk)
        sch.tensorize(sch.get_loops(tail[1])[-2], transpose_intrinsic(lanes, dtype))
    # 8. Threads.
    if not definition.channels_last or definition.contiguous_phases:
        skips.mark_outputs(out, -3, definition.chunk)
    lead = sch.get_loops(out)[:LEAD]
    mark_tasks(sch, lead[serial:] if share_data else lead[:-1])
    sch.transform_layout(out, ("write", 0), definition.caller_index)
    return sch
