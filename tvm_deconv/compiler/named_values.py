"""TVM's passes for CPUs, with one more: values that have names within expressions become arrays in registers.

TVM's code generator looks for what it can prove of every named value, with the values of other names in their places.
In a chain of names, such as an activation is, that takes exponentially long: compiling a layer with mish took up to a
minute. It does not look into arrays, and LLVM keeps small ones in registers, so the code is the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tvm
from tvm import tirx
from tvm.ir import Call, Expr
from tvm.target import Target
from tvm.tirx import AllocBuffer, Bind, Broadcast, BufferLoad, BufferStore, Let, PrimFunc, Stmt
from tvm.tirx.compilation_pipeline import get_default_tir_pipeline, register_tir_pipeline

from tvm_deconv.schedules.x86.register_epilogue import ramp
from tvm_deconv.schedules.x86.statements import rewritten

#: The name of these passes, for `tvm.compile`.
PIPELINE = "tvm_deconv_x86"


def _pipeline() -> tuple[tvm.transform.Pass, Callable[[], tvm.transform.Pass], Callable[[], tvm.transform.Pass]]:
    usual, finalize_host, finalize_device = get_default_tir_pipeline(Target("llvm"))
    arrays = tirx.transform.prim_func_pass(_values_in_arrays, opt_level=0, name="tvm_deconv.ValuesInArrays")

    def finalize() -> tvm.transform.Pass:
        # Last: TVM would take the arrays from the workspace.
        return tvm.transform.Sequential([finalize_host(), tirx.transform.ConvertSSA(), arrays])

    return usual, finalize, finalize_device


register_tir_pipeline(PIPELINE, _pipeline)


def _values_in_arrays(func: PrimFunc, _module: Any, _context: Any) -> PrimFunc:
    """Store the named values of each stored element in arrays first."""
    return func.with_body(rewritten(func.body, _stored_apart))


def _stored_apart(stmt: Stmt) -> Stmt | None:
    """Return the store `stmt` behind those of its named values; None if it is no store or has none."""
    if not isinstance(stmt, BufferStore):
        return None
    named: list[Stmt] = []
    value = _unnamed(stmt.value, named)
    return tirx.SeqStmt([*named, BufferStore(stmt.buffer, value, stmt.indices)]) if named else None


def _unnamed(value: Expr, named: list[Stmt]) -> Expr:
    """Return `value` without the names around it; `named` gets what stores their values and binds them to these."""
    if isinstance(value, Let):
        dtype = value.var.ty.dtype
        array = tirx.decl_buffer((dtype.lanes,), dtype.with_lanes(1), value.var.name, scope="local")
        place = [ramp(tirx.const(0, "int64"), dtype.lanes)]
        stored = BufferStore(array, value.value, place)
        named += [AllocBuffer(array), stored, Bind(value.var, BufferLoad(array, place))]
        return _unnamed(value.body, named)
    if isinstance(value, Broadcast):
        return Broadcast(_unnamed(value.value, named), value.lanes)
    if isinstance(value, Call) and value.op.name == "tirx.reinterpret":
        return tirx.reinterpret(str(value.ty.dtype), _unnamed(value.args[0], named))
    return value
