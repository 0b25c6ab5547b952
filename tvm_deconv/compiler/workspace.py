"""The bytes that a kernel takes from the launcher's workspace, counted in the code that is compiled.

TVM turns buffers that do not fit a stack into calls of the runtime. `Counted` adds them up: those within parallel
loops, of which each thread has its own, and those outside, which the calling thread has.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm.tirx import DeclBuffer, For, ForKind, IfThenElse, Stmt

_ALLOCATION = "tirx.TVMBackendAllocWorkspace"
_PASS = "tirx.LowerTVMBuiltin"
_LINE = 64  # of the launcher: blocks have a header of a line, and whole lines


@tvm.ir.instrument.pass_instrument
class Counted:
    """An instrument of TVM's passes that counts, over the functions of the modules that it sees.

    `scratch_bytes` are those of one thread within a parallel loop, `shared_bytes` those of the calling thread
    besides. A kernel without a parallel loop is one task.
    """

    def __init__(self) -> None:
        self.scratch_bytes = self.shared_bytes = 0

    def run_after_pass(self, module: Any, info: Any) -> None:
        """Count after the pass that makes the calls."""
        if info.name != _PASS:
            return
        for function in module.functions.values():
            inside: list[int] = []
            outside = _allocated(function.body, inside)
            self.scratch_bytes = max(self.scratch_bytes, *inside, 0) if inside else max(self.scratch_bytes, outside)
            self.shared_bytes = max(self.shared_bytes, outside if inside else 0)


def _allocated(stmt: Stmt, parallel: list[int]) -> int:
    """Return the bytes that `stmt` allocates outside of parallel loops; add those of each such loop to `parallel`."""
    if isinstance(stmt, DeclBuffer) and getattr(getattr(stmt.data, "op", None), "name", "") == _ALLOCATION:
        return _LINE + -(-int(stmt.data.args[2]) // _LINE) * _LINE
    parts = [*getattr(stmt, "seq", ()), *(getattr(stmt, name, None) for name in ("body", "then_case", "else_case"))]
    if isinstance(stmt, For) and stmt.kind == ForKind.PARALLEL:
        parallel.append(sum(_allocated(part, []) for part in parts if part is not None))
        return 0
    combine = max if isinstance(stmt, IfThenElse) else sum  # of branches one is taken
    return combine(_allocated(part, parallel) for part in parts if part is not None)
