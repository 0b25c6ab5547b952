"""The instructions that TVM has no function for here, as CUDA functions with PTX: of warps, and asynchronous copies.

Their text is `warp.cu`. Layouts are those of the PTX manual. Of a tile of 8x8 elements of 16 bits, lane l holds row
``l/4``, columns ``2*(l%4)`` and the next, in one register; with ``.trans`` it holds the transposed tile so. Operand A
of m16n8k16 is four such tiles (rows 0-7 and 8-15 of k 0-7, then of k 8-15). B is two of its transposed tiles (k 0-7, k
8-15), and C is two of pairs of floats. m16n8k8 of TF32 has single elements of 32 bits in the place of pairs.

``cp.async`` copies to shared memory while the thread goes on. The copies begun before a commit are a group. Waiting for
all groups but the latest few, and then a barrier, make the copies visible to the block.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from string import Template

from tvm import tirx
from tvm.backend.cuda.op import cuda_func_call
from tvm.ir import Expr
from tvm.script.ir_builder import tirx as build

_TEMPLATES = Path(__file__).with_suffix(".cu")
#: Terms of one mma by the type that it multiplies.
MMA_TERMS = {"float16": 16, "bfloat16": 16, "tf32": 8}
_MMA_TYPES = {"float16": "f16", "bfloat16": "bf16", "tf32": "tf32"}
_ELEMENTS = {2: "unsigned short", 4: "unsigned", 8: "uint2", 16: "uint4"}


@cache
def _templates() -> dict[str, Template]:
    """Return the templates of `warp.cu` by name."""
    _, *parts = re.split(r"^// ---- (\w+)\n", _TEMPLATES.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {name: Template(f"\n{text.strip()}\n") for name, text in zip(parts[::2], parts[1::2], strict=True)}


def _source(template: str, **values: object) -> str:
    """Return the text of a device function."""
    return _templates()[template].substitute(values)


def _address(buffer: Expr, at: Expr | int) -> Expr:
    return tirx.address_of(buffer[at])


def ldmatrix(registers: Expr, at: Expr, count: int, memory: Expr, row: Expr, *, transposed: bool) -> None:
    """Load `count` tiles, rows of 16 bytes, to `registers` from `at` on; lane l points to row l%8 of tile l/8."""
    suffix = "_trans" if transposed else ""
    source = _source(
        "ldmatrix",
        count=count,
        suffix=suffix,
        modifier=".trans" if transposed else "",
        places=", ".join(f"%{i}" for i in range(count)),
        outputs=", ".join(f'"=r"(r[{i}])' for i in range(count)),
    )
    operands = _address(registers, at), _address(memory, row)
    build.evaluate(cuda_func_call(f"tvm_deconv_ldmatrix_x{count}{suffix}", *operands, source_code=source))


def mma(kind: str, sums: Expr, c: Expr, a_registers: Expr, a: Expr, b_registers: Expr, b: Expr) -> None:
    """Add the product of two operands of type `kind` to four of the `sums`, from `c` on."""
    name = _MMA_TYPES[kind]
    operands = _address(sums, c), _address(a_registers, a), _address(b_registers, b)
    source = _source("mma", name=name, terms=MMA_TERMS[kind])
    build.evaluate(cuda_func_call(f"tvm_deconv_mma_{name}", *operands, source_code=source))


def tf32(value: Expr) -> Expr:
    """Return a float32 `value` rounded to TF32: to the nearest, ties away from zero."""
    return cuda_func_call("tvm_deconv_tf32", value, source_code=_source("tf32"), return_type="float32")


def high(value: Expr) -> Expr:
    """Return a float32 `value` rounded to TF32, or 0.5 or 1 with its sign if it is infinite, NaN or all but infinite.

    The product of two numbers is that of their high parts, and of each one's high with the other's `low`. Infinity is
    in the low part alone, so that it meets no zero but where the other number is zero.
    """
    return cuda_func_call("tvm_deconv_high", value, source_code=_source("high"), return_type="float32")


def low(value: Expr, high_part: Expr) -> Expr:
    """Return what `high_part` leaves of a float32 `value`, cut off to TF32: a bit of the last place at most."""
    return cuda_func_call("tvm_deconv_low", value, high_part, source_code=_source("low"), return_type="float32")


def copy(size: int, memory: Expr, to: Expr | int, element: Expr, conditions: Sequence[Expr]) -> None:
    """Begin to copy `size` bytes from `element` on to shared memory; copy zeros unless all `conditions` hold.

    Addresses are multiples of `size`: 4, 8 or 16.
    """
    source = _source("copy", size=size, cache="cg" if size == 16 else "ca")
    exists = tirx.all(*conditions) if conditions else tirx.const(True, "bool")
    operands = _address(memory, to), tirx.address_of(element), exists
    build.evaluate(cuda_func_call(f"tvm_deconv_copy{size}", *operands, source_code=source))


def copy_by_elements(
    size: int, each: int, memory: Expr, to: Expr | int, element: Expr, conditions: Sequence[Expr]
) -> None:
    """Copy `size` bytes of elements of `each`, at any address, before the thread goes on; see `copy`."""
    names = {"element": _ELEMENTS[each], "whole": _ELEMENTS[size]}
    source = _source("copy_by_elements", size=size, each=each, count=size // each, **names)
    exists = tirx.all(*conditions) if conditions else tirx.const(True, "bool")
    operands = _address(memory, to), tirx.address_of(element), exists
    build.evaluate(cuda_func_call(f"tvm_deconv_copy{size}_by{each}", *operands, source_code=source))


def commit() -> None:
    """Make a group of the copies that were begun since the last one."""
    build.evaluate(cuda_func_call("tvm_deconv_commit", source_code=_source("commit")))


def wait(left: int) -> None:
    """Wait for the thread's groups of copies, all but the latest `left`."""
    build.evaluate(cuda_func_call(f"tvm_deconv_wait{left}", source_code=_source("wait", left=left)))
