"""Columns of all elements of the kernel, added up where they overlap: of few output channels, or of few taps."""

from __future__ import annotations

from collections.abc import Mapping

from tvm_deconv.compute.col2im import ColumnLayout, RowColumns
from tvm_deconv.compute.packing import pack_columns
from tvm_deconv.problem import Problem
from tvm_deconv.schedules.contract import Algorithm, Kernel
from tvm_deconv.schedules.x86 import col2im, col2im_rows, column_tiles
from tvm_deconv.schedules.x86.algorithms.predicates import adds_columns, fills_vectors_with_columns
from tvm_deconv.schedules.x86.column_tiles import Plan
from tvm_deconv.schedules.x86.vectors import accumulator_lanes
from tvm_deconv.targets import CpuTarget


def _read(knobs: Mapping[str, int]) -> Plan:
    plan = Plan.from_knobs(knobs)
    if plan.share_data or plan.halves:
        raise ValueError("share_data and halves: must be 0")
    return plan


def _tasks(problem: Problem, plan: Plan) -> int:
    return ColumnLayout(problem, plan.tile, 1).tasks


def _build(problem: Problem, target: CpuTarget, plan: Plan) -> Kernel:
    layout = column_tiles.layout_of(problem, plan.tile, accumulator_lanes(problem, target))
    if isinstance(layout, RowColumns):
        deconv = col2im_rows.emit_rows(layout, target)
    else:
        deconv = col2im.emit_columns(layout, target)
    return Kernel(
        problem=problem,
        deconv=deconv,
        pack=pack_columns(layout),
        algorithm="col2im",
        knobs=plan.knobs,
        packed_elements=layout.packed_elements,
        packed_dtype=problem.accumulate_dtype,
    )


ALGORITHM = Algorithm(
    name="col2im",
    supports=adds_columns,
    is_default_for=fills_vectors_with_columns,
    candidates=column_tiles.candidates,
    read=_read,
    tasks=_tasks,
    build=_build,
)
