"""Prefetches of the filter: the reduction of a register tile asks for what it multiplies by some steps later.

TVM has no such instruction. A schedule marks the innermost loop of a reduction that streams the packed filter, and
`lower_prefetches` puts a call of a function in LLVM IR at the end of its body. The instruction is inline assembly that
touches no memory as far as LLVM knows: beside LLVM's own prefetch it stores accumulators at every step.

A filter that comes from memory has them, and on targets with a mesh one that comes from the last cache: the processor's
own prefetching does not hide that latency. What a register tile reads of it must exceed half of the first-level cache.
docs/design.md has the measurements.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from tvm import tirx
from tvm.ir import Expr
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV
from tvm.sym import Analyzer
from tvm.tirx import BufferLoad, Evaluate, For, PrimFunc, SeqStmt, Stmt

from tvm_deconv.problem.arithmetic import ceil_div
from tvm_deconv.schedules.x86.costs import PREFETCHED
from tvm_deconv.schedules.x86.statements import loops_and_block, outside_of, rewritten
from tvm_deconv.schedules.x86.stores import LINE, import_functions
from tvm_deconv.targets import CpuTarget

#: Bytes from what a step reads to what it asks for: from memory, and through a mesh.
_AHEAD, _AHEAD_ON_A_MESH = 8192, 2048
_MARK = "tvm_deconv.filter"
_FUNCTION = "tvm_deconv_prefetch"
#: With these LLVM keeps accumulators in registers across the instruction.
_UNSEEN = "nounwind willreturn nosync memory(inaccessiblemem: readwrite)"


def mark_filter(sch: Schedule, reduction: Sequence[LoopRV]) -> None:
    """Mark the loops of a `reduction`, each step of which reads the next elements of the packed filter."""
    sch.annotate(reduction[-1], _MARK, math.prod(int(sch.get(loop).extent) for loop in reduction))


def lower_prefetches(func: PrimFunc, target: CpuTarget) -> PrimFunc:
    """Return the lowered `func` without marks, and with prefetches in the marked loops where `target` gains by them."""
    filter_bytes = int(func.params[1].shape[0]) * np.dtype(func.params[1].dtype).itemsize
    ahead = _AHEAD_ON_A_MESH if target.mesh else _AHEAD
    far = filter_bytes > (target.l2_bytes // 2 if target.mesh else PREFETCHED)
    counts: set[int] = set()

    def lowered(stmt: Stmt) -> Stmt | None:
        if not isinstance(stmt, For) or _MARK not in stmt.annotations:
            return None
        kept = {key: value for key, value in stmt.annotations.items() if key != _MARK}
        body = stmt.body
        first, lines = _read(func, body) if far else (tirx.const(0, "int64"), 0)
        if int(stmt.annotations[_MARK]) * lines * LINE > target.l1_bytes // 2:
            counts.add(lines)
            address = tirx.address_of(BufferLoad(func.params[1], [first]))
            # At the end of a step: before it, LLVM moves loads behind the call, and spills accumulators.
            body = SeqStmt([body, Evaluate(tirx.call_extern("int32", f"{_FUNCTION}_{lines}", address))])
        return For(stmt.loop_var, stmt.min, stmt.extent, stmt.kind, body, stmt.thread_binding, kept)

    func = func.with_body(rewritten(func.body, lowered))
    return import_functions(func, "".join(_function(lines, ahead) for lines in sorted(counts))) if counts else func


def _function(lines: int, ahead: int) -> str:
    """Return the function, in LLVM IR, that asks for as many cache `lines`, so many bytes `ahead`."""
    body = ""
    for line in range(lines):
        body += f"""  %line{line} = getelementptr i8, ptr %at, i64 {ahead + LINE * line}
  call void asm sideeffect "prefetcht0 $0", "*m"(ptr elementtype(i8) %line{line}) {_UNSEEN}
"""
    return f"define hidden i32 @{_FUNCTION}_{lines}(ptr %at) alwaysinline {{\n{body}  ret i32 0\n}}\n"


def _read(func: PrimFunc, body: Stmt) -> tuple[Expr, int]:
    """Return the index of the first element of the packed filter that the loops of `body` read, and the cache lines."""
    loops, realize = loops_and_block(body)
    packed_filter, first, last = func.params[1], Analyzer(), Analyzer()
    (region,) = next(read.region for read in realize.block.reads if read.source.same_as(packed_filter))
    (place,) = outside_of(realize, [region.min])
    for loop in loops:
        first.bind(loop.loop_var, loop.min)
        last.bind(loop.loop_var, loop.min + loop.extent - 1)
    begin = first.simplify(place)
    elements = int(Analyzer().simplify(last.simplify(place) - begin + region.extent))
    return begin, ceil_div(elements * np.dtype(packed_filter.dtype).itemsize, LINE)
