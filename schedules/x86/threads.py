"""Loops whose iterations are tasks of the thread pool.

A schedule cannot say so by itself: it must know before a reduction's initialisation is split off that a loop may run
in parallel, and it does not understand a fused loop of which two extents are free.  So tasks are fused and marked last,
and `in_parallel` makes parallel loops of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm.s_tir import SBlock, SBlockRealize, Schedule
from tvm.s_tir.schedule import LoopRV
from tvm.tirx import For, ForKind, PrimFunc, SeqStmt

_MARK = "tvm_deconv.tasks"


def tasks(sch: Schedule, loops: Sequence[LoopRV]) -> None:
    """Fuse `loops`, which are independent of each other, and mark the result."""
    sch.annotate(sch.fuse(*loops), _MARK, 1)


def in_parallel(func: PrimFunc) -> PrimFunc:
    """Return `func`, whose last loop nest is the one that is marked, with that made parallel."""
    realize = func.body
    root = realize.block
    statements = [*root.body.seq] if isinstance(root.body, SeqStmt) else [root.body]
    nest = statements.pop()
    assert _MARK in nest.annotations
    statements.append(For(nest.loop_var, nest.min, nest.extent, ForKind.PARALLEL, nest.body))
    body = SeqStmt(statements) if len(statements) > 1 else statements[0]
    block = SBlock(
        root.iter_vars, root.reads, root.writes, root.name_hint, body, root.init, root.alloc_buffers,
        root.match_buffers, root.annotations,
    )  # fmt: skip
    return func.with_body(SBlockRealize(realize.iter_values, realize.predicate, block))
