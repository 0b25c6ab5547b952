"""What a schedule cannot say itself: which loops are tasks, and which iterations a call does not need.

A schedule must know before a reduction's initialisation is split off that a loop may run in parallel, and it does not
understand a fused loop of which two extents are dynamic.  So tasks are marked, and fused afterwards.

With a dynamic extent, the last block of a call may be nearly empty.  `SkipMarks` marks loops over a block's positions
with the condition that some of what they compute is part of the output.  That saves more than the work: copies between
the caller's arrays and a block are masked, and a vector whose mask is empty is slow where it lies on a page that is not
there, a hundred times as slow as a copy.  The condition compares floating point numbers,
which hides it from the inference of regions: what a block holds must stay a number.

`lower_loop_marks` makes parallel loops and conditions of the marks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

from tvm import tirx
from tvm.ir import Expr
from tvm.s_tir import SBlock, SBlockRealize, Schedule
from tvm.s_tir.schedule import LoopRV, SBlockRV
from tvm.tirx import AttrStmt, For, ForKind, IfThenElse, PrimFunc, SeqStmt, Stmt

from tvm_deconv.compute.extents import End

_TASKS = "tvm_deconv.tasks"
_SKIP = "tvm_deconv.skip"
#: Parts of a copied row that are left out one by one, at most: each costs the comparison for every row.
_PARTS = 16


def mark_tasks(sch: Schedule, loops: Sequence[LoopRV]) -> None:
    """Mark `loops`, each alone in the one before it, as independent of each other."""
    sch.annotate(loops[0], _TASKS, len(loops))


@dataclass(frozen=True, slots=True)
class SkipMarks:
    """Marks of loops of which iterations past the `end` of the output are left out; none where there is no end."""

    sch: Schedule
    end: End | None

    def mark(self, loop: LoopRV, unit: int, *, whole: int = 1, inner: int = 1, outputs: int = 1, halo: int = 0) -> None:
        """Mark `loop`, whose iteration i does `unit` rows, in groups of `whole` iterations that need each other.

        Rows count along the axis of the end, `outputs` positions each, and the axes inside of it, `inner` rows.
        Those of the data are needed by positions up to `halo` before them.
        """
        if self.end is not None:
            self.sch.annotate(loop, _SKIP, [unit, whole, inner, outputs, halo])

    def mark_outputs(self, block: SBlockRV, first: int, chunk: int) -> None:
        """Mark a loop of `block`, of whose loops number `first` and the two after it are of output extents: d, h, w.

        Along w it does multiples of `chunk` outputs, which is one of the stride.
        """
        if self.end is not None:
            loop = self.sch.get_loops(block)[first + self.end.axis]
            if self.end.axis == 2:
                self.mark_parts(loop, chunk, self.end.stride)
            else:
                self.mark(loop, 1, inner=self.end.stride)

    def mark_parts(self, loop: LoopRV, unit: int, row: int = 1, halo: int = 0) -> None:
        """Cut `loop`, of which `row` iterations make a row, into some parts of whole units, and mark those."""
        if self.end is not None:
            units = int(self.sch.get(loop).extent) // unit
            part = unit * next(size for size in range(1, units + 1) if units % size == 0 and units // size <= _PARTS)
            outer, _ = self.sch.split(loop, [None, part])
            self.mark(outer, part // row, halo=halo)


def with_body(stmt: For | SBlockRealize, body: Stmt) -> Stmt:
    """Return the loop or the realized block `stmt` with another body; TVM has nothing for that in Python."""
    if isinstance(stmt, For):
        return For(stmt.loop_var, stmt.min, stmt.extent, stmt.kind, body, stmt.thread_binding, stmt.annotations)
    block = stmt.block
    inner = SBlock(
        block.iter_vars, block.reads, block.writes, block.name_hint, body, block.init,
        block.alloc_buffers, block.match_buffers, block.annotations,
    )  # fmt: skip
    return SBlockRealize(stmt.iter_values, stmt.predicate, inner)


def lower_loop_marks(func: PrimFunc, end: End | None) -> PrimFunc:
    """Return `func` with the marked loops made parallel, and conditional."""
    if end is None:
        return func.with_body(_lower(func.body, None))
    shape = func.params[0].shape  # of the data
    positions = next(x for x in shape if getattr(x, "name", "") == end.name) + end.offset
    return func.with_body(_lower(func.body, (end, positions)))


def _lower(stmt: Stmt, end: tuple[End, Expr] | None, nest: tuple[Expr, ...] = ()) -> Stmt:
    """Replace the marks in `stmt`, which lies within loops over `nest`, from the outermost on."""
    if isinstance(stmt, SeqStmt):
        return SeqStmt([_lower(part, end, nest) for part in stmt.seq])
    if isinstance(stmt, SBlockRealize):
        return with_body(stmt, _lower(stmt.block.body, end, nest))
    if isinstance(stmt, AttrStmt):
        return AttrStmt(stmt.node, stmt.attr_key, stmt.value, _lower(stmt.body, end, nest))
    if not isinstance(stmt, For):
        return stmt
    if _TASKS in stmt.annotations:
        return _fused_tasks(stmt, int(stmt.annotations[_TASKS]), end, nest)
    body = _lower(stmt.body, end, (*nest, stmt.loop_var))
    kept = {key: value for key, value in stmt.annotations.items() if key != _SKIP}
    if _SKIP in stmt.annotations:
        assert end is not None
        axis, positions = end
        unit, whole, rows_inside, outputs, halo = (int(value) for value in stmt.annotations[_SKIP])
        first = stmt.loop_var // whole * (whole * unit) // rows_inside * outputs
        inside = first_block(stmt.body)
        # The first axes of a stage count blocks; those of the output itself do not, but the first loops around it do.
        numbers = nest if inside.block.name_hint == "out" else inside.iter_values
        left = positions + halo - (numbers[axis.axis + 1] * axis.block + first)
        body = IfThenElse(left.astype("float64") > tirx.const(0, "float64"), body, None)
    return For(stmt.loop_var, stmt.min, stmt.extent, stmt.kind, body, stmt.thread_binding, kept)


def _fused_tasks(stmt: For, count: int, end: tuple[End, Expr] | None, nest: tuple[Expr, ...]) -> For:
    """Return a parallel loop over all iterations of `count` nested loops, the outermost of which is `stmt`."""
    loops = [stmt]
    while len(loops) < count:
        loops.append(loops[-1].body)
    body = _lower(loops[-1].body, end, (*nest, *(loop.loop_var for loop in loops)))
    task = tirx.Var("task", "int64")
    left: Expr = task
    for number, loop in reversed(list(enumerate(loops))):
        place = left % loop.extent if number else left
        body = For(loop.loop_var, place, tirx.const(1, "int64"), ForKind.SERIAL, body)
        left = left // loop.extent
    total = reduce(lambda product, loop: product * loop.extent, loops, tirx.const(1, "int64"))
    return For(task, tirx.const(0, "int64"), total, ForKind.PARALLEL, body)


def first_block(stmt: Stmt) -> SBlockRealize:
    """Return the block that `stmt` comes to first."""
    while not isinstance(stmt, SBlockRealize):
        stmt = stmt.seq[0] if isinstance(stmt, SeqStmt) else stmt.body
    return stmt
