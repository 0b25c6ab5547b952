"""Prefetches of the filter, and of data in place: the reduction of a register tile asks for what is multiplied later.

TVM has no such instruction. A schedule marks the innermost loop of a reduction that streams the packed filter, and
`lower_prefetches` puts a call of a function in LLVM IR at the end of its body. The instruction is inline assembly that
touches no memory as far as LLVM knows: beside LLVM's own prefetch it stores accumulators at every step.

All register tiles of rows read a panel of the filter before the next panel. So each of these passes asks for a share of
the next panel, and the filter comes evenly, not in the first pass alone. The next one comes too late where panels are
short: passes ask for a later one then. Where there is one pass, a step asks for what is read some steps later.

A filter has prefetches if it comes from beyond the second-level cache: other layers have often taken the last one. On
targets with a mesh passes have not been measured, and a step asks for what comes soon. docs/design.md has the
measurements.

Register tiles that read the caller's data (`data_in_place`) ask for those of a later tile, channel by channel.
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
from tvm.tirx import Buffer, BufferLoad, Evaluate, For, IntImm, PrimFunc, SeqStmt, Stmt, floordiv

from tvm_deconv.problem.arithmetic import ceil_div
from tvm_deconv.schedules.x86.statements import loops_and_block, outside_of, rewritten, unmarked
from tvm_deconv.schedules.x86.stores import LINE, import_functions
from tvm_deconv.targets import CpuTarget

#: Bytes from what a step reads to what it asks for: in one pass, and through a mesh.
_AHEAD, _AHEAD_ON_A_MESH = 8192, 2048
#: Bytes of a panel from which on passes ask for the next one, and for a later one.
_PANEL, _SHORT_PANEL = 4096, 1024
_MARK, _PASSES = "tvm_deconv.filter", "tvm_deconv.filter_passes"
_DATA = "tvm_deconv.data"
#: Register tiles from one that reads the caller's data to that whose data it asks for.
_TILES_AHEAD = 4
#: Instructions that ask for a line in the first-level cache, and in the second.
_FIRST, _SECOND = "prefetcht0", "prefetcht1"
#: With these LLVM keeps accumulators in registers across the instruction.
_UNSEEN = "nounwind willreturn nosync memory(inaccessiblemem: readwrite)"


def mark_filter(sch: Schedule, reduction: Sequence[LoopRV], passes: LoopRV | None = None) -> None:
    """Mark the loops of a `reduction`, each step of which reads the next elements of the packed filter.

    Each of the `passes` around it reads the same.
    """
    sch.annotate(reduction[-1], _MARK, math.prod(int(sch.get(loop).extent) for loop in reduction))
    if passes is not None:
        sch.annotate(passes, _PASSES, True)


def mark_data(sch: Schedule, step: LoopRV, positions: int) -> None:
    """Mark the outermost loop of a `step` of a reduction, which reads `positions` of an input channel of the data."""
    sch.annotate(step, _DATA, positions)


def lower_prefetches(func: PrimFunc, target: CpuTarget) -> PrimFunc:
    """Return the lowered `func` without marks, and with prefetches in the marked loops where `target` gains by them."""
    lowering = _Lowering(func, target)
    func = func.with_body(rewritten(func.body, lowering.lowered))
    functions = "".join(asking_function(*function) for function in sorted(lowering.functions))
    return import_functions(func, functions) if functions else func


class _Lowering:
    """Replaces marked loops, and notes the `functions` that they call by the arguments of `asking_function`."""

    def __init__(self, func: PrimFunc, target: CpuTarget) -> None:
        self.functions: set[tuple[int, int, str]] = set()
        self._target = target
        self._data, self._filter = func.params[:2]
        self._element_bytes = np.dtype(self._filter.dtype).itemsize
        self._filter_bytes = int(self._filter.shape[0]) * self._element_bytes
        self._inside: list[For] = []  # the loop of the passes, and loops in it

    def lowered(self, stmt: Stmt) -> Stmt | None:
        """Return a loop without its mark, with all loops in it as well; None of what has no mark."""
        if not isinstance(stmt, For):
            return None
        if _PASSES in stmt.annotations:
            self._inside = [stmt]
            body = rewritten(stmt.body, self.lowered)
            self._inside = []
            return unmarked(stmt, _PASSES, body)
        if _MARK in stmt.annotations:
            return unmarked(stmt, _MARK, self._fetching(stmt))
        if _DATA in stmt.annotations:
            return self._fetching_data(unmarked(stmt, _DATA, stmt.body), int(stmt.annotations[_DATA]))
        if self._inside:
            self._inside.append(stmt)
        return None

    def _fetching(self, loop: For) -> Stmt:
        """Return the body of a marked loop, with a prefetch where that pays."""
        target, passes = self._target, self._passes
        if self._filter_bytes <= target.l2_bytes // 2:
            return loop.body
        (first,), (last,) = _read(self._filter, loop.body)
        elements = int(Analyzer().simplify(last - first)) + 1
        lines = ceil_div(elements * self._element_bytes, LINE)
        panel = int(loop.annotations[_MARK]) * elements * self._element_bytes
        if passes > 1 and _SHORT_PANEL <= panel <= target.l2_bytes // 2:
            later = 1 if panel >= _PANEL else ceil_div(_AHEAD, panel)
            share = self._share(loop, first, elements, later)
            return self._asking(loop.body, BufferLoad(self._filter, [share]), ceil_div(lines, passes), 0)
        if passes != 1 and panel <= target.l1_bytes // 2:  # the next pass finds it in the first-level cache
            return loop.body
        ahead = _AHEAD_ON_A_MESH if target.mesh else _AHEAD
        return self._asking(loop.body, BufferLoad(self._filter, [first]), lines, ahead)

    def _fetching_data(self, step: For, positions: int) -> Stmt:
        """Return the marked loop of a `step`, and behind it a prefetch of the data of a later register tile."""
        first, _ = _read(self._data, step)
        if not first:  # it clears accumulators
            return step
        lines = ceil_div(positions * np.dtype(self._data.dtype).itemsize, LINE)
        later = BufferLoad(self._data, [*first[:-1], first[-1] + _TILES_AHEAD * positions])
        # Lines of many channels are in few sets of the first-level cache.
        return self._asking(step, later, lines, 0, _SECOND)

    @property
    def _passes(self) -> int:
        """The passes over a panel, 0 if that is not known or on a mesh."""
        extent = self._inside[0].extent if self._inside and not self._target.mesh else 0
        return int(extent) if isinstance(extent, (int, IntImm)) else 0

    def _share(self, loop: For, first: Expr, elements: int, later: int) -> Expr:
        """Return the first element that a step asks for of a panel, so many panels `later`.

        A step reads `elements` from the `first`. Of more passes than these, several ask for the same share: what comes
        behind that panel would come too early.
        """
        begin = Analyzer()
        for inside in (*self._inside[1:], loop):
            begin.bind(inside.loop_var, inside.min)
        panel, steps = begin.simplify(first), int(loop.annotations[_MARK])
        alike = max(1, self._passes // elements)
        number = floordiv(self._inside[0].loop_var, alike) * steps + floordiv(first - panel, elements)
        share = ceil_div(elements, ceil_div(self._passes, alike))
        return Analyzer().simplify(panel + later * steps * elements + number * share)

    def _asking(self, body: Stmt, first: BufferLoad, lines: int, ahead: int, instruction: str = _FIRST) -> Stmt:
        """Return a step that asks for cache `lines` at its end, so many bytes `ahead` of the element `first`."""
        self.functions.add((lines, ahead, instruction))
        # At the end of a step: before it, LLVM moves loads behind the call, and spills accumulators.
        return SeqStmt([body, Evaluate(ask_for(first, lines, ahead, instruction))])


def ask_for(first: BufferLoad, lines: int, ahead: int = 0, instruction: str = _FIRST) -> Expr:
    """Return the call that asks for cache `lines`, so many bytes `ahead` of the element `first`."""
    return tirx.call_extern("int32", _name(lines, ahead, instruction), tirx.address_of(first))


def _name(lines: int, ahead: int, instruction: str) -> str:
    return f"tvm_deconv_{instruction}_{lines}_{ahead}"


def asking_function(lines: int, ahead: int = 0, instruction: str = _FIRST) -> str:
    """Return the function, in LLVM IR, that asks for as many cache `lines`, so many bytes `ahead`."""
    body = ""
    for line in range(lines):
        body += f"""  %line{line} = getelementptr i8, ptr %at, i64 {ahead + LINE * line}
  call void asm sideeffect "{instruction} $0", "*m"(ptr elementtype(i8) %line{line}) {_UNSEEN}
"""
    return f"define hidden i32 @{_name(lines, ahead, instruction)}(ptr %at) alwaysinline {{\n{body}  ret i32 0\n}}\n"


def _read(array: Buffer, body: Stmt) -> tuple[list[Expr], list[Expr]]:
    """Return where the loops of `body` read the first and the last element of `array`; nothing if they read none."""
    loops, realize = loops_and_block(body)
    region = [part for read in realize.block.reads if read.source.same_as(array) for part in read.region]
    first, last = Analyzer(), Analyzer()
    for loop in loops:
        first.bind(loop.loop_var, loop.min)
        last.bind(loop.loop_var, loop.min + loop.extent - 1)
    begin, end = [part.min for part in region], [part.min + part.extent - 1 for part in region]
    return [*map(first.simplify, outside_of(realize, begin))], [*map(last.simplify, outside_of(realize, end))]
