"""The last vector of channels of a position as a whole one, which begins within the one before it.

A condition on its lanes would make all vectors of a loop single elements: of 21 quantized channels the epilogue took
half of the time. Channels that two vectors share are finished twice, and so never in the memory of the results.
"""

from __future__ import annotations

from tvm import tirx
from tvm.s_tir import SBlockRealize
from tvm.tirx import For, ForKind, PrimFunc, Stmt

from tvm_deconv.schedules.x86.statements import rewritten_loops, with_body
from tvm_deconv.schedules.x86.stores import Row


def overlap_last_vectors(func: PrimFunc) -> PrimFunc:
    """Return the scheduled `func` with no condition on the vectors of its stage ``epilogue``: channels are its last."""

    def overlapped(loop: For) -> Stmt | None:
        realize, row = loop.body, Row.of([loop])
        if row.ranges.can_prove(realize.predicate):
            return None
        *others, channel = realize.iter_values
        last = realize.block.iter_vars[-1].dom.extent - row.length
        values = [*others, tirx.min(row.first.simplify(channel), last) + loop.loop_var]
        return with_body(loop, SBlockRealize(values, tirx.const(True), realize.block))

    return rewritten_loops(func, "epilogue", ForKind.VECTORIZED, overlapped)
