"""Vector registers without anything in them around loops of products.

LLVM hoists constants, such as those of an epilogue, out of the loops around a whole block, and holds them in registers.
Register tiles of AVX2 need all of these: accumulators then go through memory in each step. An empty statement in
assembly that changes all vector registers keeps everything out of them from there on until it is used.
"""

from __future__ import annotations

from tvm import tirx
from tvm.ir import Expr
from tvm.tirx import Evaluate, For, ForKind, PrimFunc, SeqStmt, Stmt

from tvm_deconv.schedules.x86.statements import first_block, rewritten
from tvm_deconv.targets import CpuTarget

_FREE = "tvm_deconv_free_registers"


def free_function(target: CpuTarget) -> str:
    """Return the function, in LLVM IR, that leaves nothing in vector registers."""
    kind = "ymm" if target.vector_registers <= 16 else "zmm"
    clobbers = ",".join(f"~{{{kind}{number}}}" for number in range(target.vector_registers))
    return f"""define hidden i32 @{_FREE}() alwaysinline {{
  call void asm sideeffect "", "{clobbers}"()
  ret i32 0
}}
"""


def free_call() -> Expr:
    """Return the call that leaves nothing in vector registers."""
    return tirx.call_extern("int32", _FREE)


def _stages(stmts: SeqStmt) -> list[str]:
    return [first_block(part).block.name_hint for part in stmts.seq if not isinstance(part, Evaluate)]


def free_around_products(func: PrimFunc, target: CpuTarget) -> tuple[PrimFunc, str]:
    """Return the scheduled `func` with nothing in registers around its loops of register tiles, and what that calls.

    The latter is in LLVM IR.
    """

    def other(stmt: Stmt) -> Stmt | None:
        if not isinstance(stmt, For) or stmt.kind == ForKind.PARALLEL:
            return None
        body = stmt.body
        while isinstance(body, For):
            body = body.body
        if not isinstance(body, SeqStmt) or not all(name.startswith("run_") for name in _stages(body)):
            return None
        return SeqStmt([Evaluate(free_call()), stmt, Evaluate(free_call())])

    return func.with_body(rewritten(func.body, other)), free_function(target)
