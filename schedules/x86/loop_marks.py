"""Marks of loops that a schedule cannot express: parallel tasks, and iterations that a call does not need.

A schedule must know that a loop may run in parallel before a reduction's initialisation is split off. It also cannot
fuse loops of which two extents are dynamic. So tasks are marked first, and fused afterwards.

With a dynamic extent, the last block of a call may be nearly empty. `SkipMarks` marks loops over a block's positions,
so that iterations past the end of the output are skipped. That saves more than the work: copies between the caller's
arrays and a block are masked, and a vector with an empty mask takes a hundred times as long as a copy if it lies on an
unmapped page. The condition compares floating point numbers: region inference does not see through these, and the
extents of a block must stay numbers.

`lower_loop_marks` turns the marks into parallel loops and conditions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

from tvm import tirx
from tvm.ir import Expr
from tvm.s_tir import SBlockRealize, Schedule
from tvm.s_tir.schedule import LoopRV, SBlockRV
from tvm.tirx import AttrStmt, For, ForKind, IfThenElse, PrimFunc, SeqStmt, Stmt

from tvm_deconv.compute.extents import End
from tvm_deconv.schedules.x86.statements import first_block, unmarked, with_body

_TASKS = "tvm_deconv.tasks"
_SKIP = "tvm_deconv.skip"
#: Most parts of a copied row that are skipped one by one: each costs a comparison for every row.
_PARTS = 16


def mark_tasks(sch: Schedule, loops: Sequence[LoopRV]) -> None:
    """Mark perfectly nested `loops` as independent tasks."""
    sch.annotate(loops[0], _TASKS, len(loops))


@dataclass(frozen=True, slots=True)
class SkipMarks:
    """Marks of loops whose iterations past the `end` of the output are skipped; without an end, no marks."""

    sch: Schedule
    end: End | None

    def mark(self, loop: LoopRV, unit: int, *, whole: int = 1, inner: int = 1, outputs: int = 1, halo: int = 0) -> None:
        """Mark `loop`, each iteration of which computes `unit` flat positions.

        Groups of `whole` iterations depend on each other, and are skipped together. `inner` flat positions make one
        step along the axis of the end, of `outputs` positions. Data are needed up to `halo` positions past the end.
        """
        if self.end is not None:
            self.sch.annotate(loop, _SKIP, [unit, whole, inner, outputs, halo])

    def mark_outputs(self, block: SBlockRV, first: int, chunk: int) -> None:
        """Mark the loop of `block` along the axis of the end; loops `first` and the next two are d, h, w of outputs.

        Along w the marked loop takes multiples of `chunk` outputs, a multiple of the stride.
        """
        if self.end is not None:
            loop = self.sch.get_loops(block)[first + self.end.axis]
            if self.end.axis == 2:
                self.mark_parts(loop, chunk, self.end.stride)
            else:
                self.mark(loop, 1, inner=self.end.stride)

    def mark_parts(self, loop: LoopRV, unit: int, stride: int = 1, halo: int = 0) -> None:
        """Split `loop` into at most `_PARTS` parts of multiples of `unit` iterations, and mark the parts.

        A position takes `stride` iterations.
        """
        if self.end is not None:
            units = int(self.sch.get(loop).extent) // unit
            part = unit * next(size for size in range(1, units + 1) if units % size == 0 and units // size <= _PARTS)
            outer, _ = self.sch.split(loop, [None, part])
            self.mark(outer, part // stride, halo=halo)


def lower_loop_marks(func: PrimFunc, end: End | None) -> PrimFunc:
    """Return `func` with marked tasks as one parallel loop, and conditions on the iterations of other marked loops."""
    if end is None:
        return func.with_body(_Lowering(None, None).lower(func.body, ()))
    data_shape = func.params[0].shape
    extent = next(extent for extent in data_shape if getattr(extent, "name", "") == end.name)
    return func.with_body(_Lowering(end, extent + end.offset).lower(func.body, ()))


@dataclass(frozen=True, slots=True)
class _Lowering:
    """Replaces marks; a call has `positions` along the axis of the `end`."""

    end: End | None
    positions: Expr | None

    def lower(self, stmt: Stmt, nest: tuple[Expr, ...]) -> Stmt:
        """Replace the marks in `stmt`, which lies within loops over the variables `nest`, the outermost first."""
        if isinstance(stmt, SeqStmt):
            return SeqStmt([self.lower(part, nest) for part in stmt.seq])
        if isinstance(stmt, SBlockRealize):
            return with_body(stmt, self.lower(stmt.block.body, nest))
        if isinstance(stmt, AttrStmt):
            return AttrStmt(stmt.node, stmt.attr_key, stmt.value, self.lower(stmt.body, nest))
        if not isinstance(stmt, For):
            return stmt
        if _TASKS in stmt.annotations:
            return self._fuse_tasks(stmt, int(stmt.annotations[_TASKS]), nest)
        body = self.lower(stmt.body, (*nest, stmt.loop_var))
        if _SKIP in stmt.annotations:
            body = IfThenElse(self._is_needed(stmt, nest), body, None)
        return unmarked(stmt, _SKIP, body)

    def _is_needed(self, loop: For, nest: tuple[Expr, ...]) -> Expr:
        """Return the condition that an iteration of the marked `loop` begins before the end of the output."""
        assert self.end is not None
        assert self.positions is not None
        unit, whole, inner, outputs, halo = (int(value) for value in loop.annotations[_SKIP])
        first = loop.loop_var // whole * (whole * unit) // inner * outputs
        block = first_block(loop.body)
        # The first axes of a stage count blocks. Those of ``out`` do not, but the outermost loops around it do.
        blocks = nest if block.block.name_hint == "out" else block.iter_values
        left = self.positions + halo - (blocks[self.end.axis + 1] * self.end.block + first)
        return left.astype("float64") > tirx.const(0, "float64")

    def _fuse_tasks(self, outermost: For, count: int, nest: tuple[Expr, ...]) -> For:
        """Return a parallel loop over all iterations of `count` nested loops."""
        loops = [outermost]
        while len(loops) < count:
            loops.append(loops[-1].body)
        body = self.lower(loops[-1].body, (*nest, *(loop.loop_var for loop in loops)))
        task = tirx.Var("task", "int64")
        left: Expr = task
        for number, loop in reversed(list(enumerate(loops))):
            index = left % loop.extent if number else left
            body = For(loop.loop_var, index, tirx.const(1, "int64"), ForKind.SERIAL, body)
            left = left // loop.extent
        total = reduce(lambda product, loop: product * loop.extent, loops, tirx.const(1, "int64"))
        return For(task, tirx.const(0, "int64"), total, ForKind.PARALLEL, body)
