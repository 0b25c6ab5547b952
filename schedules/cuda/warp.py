"""The instructions of a warp that TVM has no function for here: ldmatrix and mma.sync, as CUDA functions with PTX.

Layouts are those of the PTX manual. Of a tile of 8x8 elements, lane l holds row ``l/4``, columns ``2*(l%4)`` and the
next, in one register; with ``.trans`` it holds the transposed tile so. Operand A of m16n8k16 is four such tiles (rows
0-7 and 8-15 of k 0-7, then of k 8-15), B is two of its transposed (k 0-7, k 8-15), and C is two of pairs of floats.
"""

from __future__ import annotations

from tvm import tirx
from tvm.backend.cuda.op import cuda_func_call
from tvm.ir import Expr
from tvm.script.ir_builder import tirx as build

LDMATRIX = """
__device__ __forceinline__ void tvm_deconv_ldmatrix_x{count}{suffix}(unsigned* r, const void* row) {{
  unsigned address = (unsigned)__cvta_generic_to_shared(row);
  asm volatile("ldmatrix.sync.aligned.m8n8.x{count}{modifier}.shared.b16 {{{places}}}, [%{count}];"
               : {outputs} : "r"(address) : "memory");
}}
"""

MMA = """
__device__ __forceinline__ void tvm_deconv_mma_{name}(float* c, const unsigned* a, const unsigned* b) {{
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.{type}.{type}.f32 "
               "{{%0, %1, %2, %3}}, {{%4, %5, %6, %7}}, {{%8, %9}}, {{%0, %1, %2, %3}};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}}
"""

MOVE = """
__device__ __forceinline__ void tvm_deconv_move16(void* to, const void* from) {
  *(uint4*)to = *(const uint4*)from;
}
"""

_MMA_TYPES = {"float16": "f16", "bfloat16": "bf16"}


def _address(buffer: Expr, at: Expr | int) -> Expr:
    return tirx.address_of(buffer[at])


def ldmatrix(registers: Expr, at: int, count: int, memory: Expr, row: Expr, *, transposed: bool) -> None:
    """Load `count` tiles of 16-bit elements to `registers` from `at` on; lane l gives where row l%8 of tile l/8 is."""
    source = LDMATRIX.format(
        count=count,
        suffix="_trans" if transposed else "",
        modifier=".trans" if transposed else "",
        places=", ".join(f"%{i}" for i in range(count)),
        outputs=", ".join(f'"=r"(r[{i}])' for i in range(count)),
    )
    name = f"tvm_deconv_ldmatrix_x{count}" + ("_trans" if transposed else "")
    build.evaluate(cuda_func_call(name, _address(registers, at), _address(memory, row), source_code=source))


def mma(dtype: str, sums: Expr, c: int, a_registers: Expr, a: int, b_registers: Expr, b: int) -> None:
    """Add the product of two operands of `dtype` to four of the `sums`, from `c` on."""
    kind = _MMA_TYPES[dtype]
    source = MMA.format(name=kind, type=kind)
    operands = _address(sums, c), _address(a_registers, a), _address(b_registers, b)
    build.evaluate(cuda_func_call(f"tvm_deconv_mma_{kind}", *operands, source_code=source))


def move16(target: Expr, to: Expr | int, element: Expr) -> None:
    """Copy 16 bytes from those that begin with `element`; both addresses are multiples of 16."""
    build.evaluate(
        cuda_func_call("tvm_deconv_move16", _address(target, to), tirx.address_of(element), source_code=MOVE)
    )
