"""What a schedule cannot say itself: which loops are tasks, and which iterations a call does not need.

A schedule must know before a reduction's initialisation is split off that a loop may run in parallel, and it does not
understand a fused loop of which two extents are free.  So `tasks` are marked, and fused afterwards.

Where the extent of a call is free, its last block may be nearly empty.  `needed` marks loops over a block's positions
with the condition that some of what they compute is part of the output.  The condition compares floating point numbers,
which hides it from the inference of regions: what a block holds must stay a number.

`finished` makes parallel loops and conditions of the marks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

from tvm import tirx
from tvm.ir import Expr
from tvm.s_tir import SBlock, SBlockRealize, Schedule
from tvm.s_tir.schedule import LoopRV
from tvm.tirx import For, ForKind, IfThenElse, PrimFunc, SeqStmt, Stmt

from tvm_deconv.compute.extents import End

_TASKS = "tvm_deconv.tasks"
_NEEDED = "tvm_deconv.needed"


def tasks(sch: Schedule, loops: Sequence[LoopRV]) -> None:
    """Mark `loops`, each alone in the one before it, as independent of each other."""
    sch.annotate(loops[0], _TASKS, len(loops))


@dataclass(frozen=True, slots=True)
class Skips:
    """Marks of loops of which iterations past the `end` of the output are left out; none where there is no end."""

    sch: Schedule
    end: End | None

    def needed(self, loop: LoopRV, unit: int, *, whole: int = 1, inner: int = 1, outputs: int = 1) -> None:
        """Mark `loop`, whose iteration i does `unit` rows, in groups of `whole` iterations that need each other.

        Rows count along the axis of the end, `outputs` positions each, and the axes inside of it, `inner` rows.
        """
        if self.end is not None:
            self.sch.annotate(loop, _NEEDED, [unit, whole, inner, outputs])


def finished(func: PrimFunc, end: End | None) -> PrimFunc:
    """Return `func` with the marked loops made parallel, and conditional."""
    if end is None:
        return func.with_body(_finished(func.body, None))
    shape = func.params[0].shape  # of the data
    positions = next(x for x in shape if getattr(x, "name", "") == end.name) + end.offset
    return func.with_body(_finished(func.body, (end, positions)))


def _finished(stmt: Stmt, end: tuple[End, Expr] | None) -> Stmt:
    if isinstance(stmt, SeqStmt):
        return SeqStmt([_finished(part, end) for part in stmt.seq])
    if isinstance(stmt, SBlockRealize):
        block = stmt.block
        inner = SBlock(
            block.iter_vars, block.reads, block.writes, block.name_hint, _finished(block.body, end), block.init,
            block.alloc_buffers, block.match_buffers, block.annotations,
        )  # fmt: skip
        return SBlockRealize(stmt.iter_values, stmt.predicate, inner)
    if not isinstance(stmt, For):
        return stmt
    if _TASKS in stmt.annotations:
        return _fused(stmt, int(stmt.annotations[_TASKS]), end)
    body, kind = _finished(stmt.body, end), stmt.kind
    kept = {key: value for key, value in stmt.annotations.items() if key != _NEEDED}
    if _NEEDED in stmt.annotations:
        assert end is not None
        axis, positions = end
        unit, whole, rows_inside, outputs = (int(value) for value in stmt.annotations[_NEEDED])
        first = stmt.loop_var // whole * (whole * unit) // rows_inside * outputs
        block_number = _first_block(stmt.body).iter_values[axis.axis + 1]
        left = positions - (block_number * axis.block + first)
        body = IfThenElse(left.astype("float64") > tirx.const(0, "float64"), body, None)
    return For(stmt.loop_var, stmt.min, stmt.extent, kind, body, stmt.thread_binding, kept)


def _fused(stmt: For, count: int, end: tuple[End, Expr] | None) -> For:
    """Return a parallel loop over all iterations of `count` nested loops, the outermost of which is `stmt`."""
    loops = [stmt]
    while len(loops) < count:
        loops.append(loops[-1].body)
    body = _finished(loops[-1].body, end)
    task = tirx.Var("task", "int64")
    left: Expr = task
    for number, loop in reversed(list(enumerate(loops))):
        place = left % loop.extent if number else left
        body = For(loop.loop_var, place, tirx.const(1, "int64"), ForKind.SERIAL, body)
        left = left // loop.extent
    total = reduce(lambda product, loop: product * loop.extent, loops, tirx.const(1, "int64"))
    return For(task, tirx.const(0, "int64"), total, ForKind.PARALLEL, body)


def _first_block(stmt: Stmt) -> SBlockRealize:
    while not isinstance(stmt, SBlockRealize):
        stmt = stmt.seq[0] if isinstance(stmt, SeqStmt) else stmt.body
    return stmt
