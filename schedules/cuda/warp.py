"""The instructions that TVM has no function for here, as CUDA functions with PTX: of warps, and copies that run along.

Layouts are those of the PTX manual. Of a tile of 8x8 elements of 16 bits, lane l holds row ``l/4``, columns
``2*(l%4)`` and the next, in one register; with ``.trans`` it holds the transposed tile so. Operand A of m16n8k16 is
four such tiles (rows 0-7 and 8-15 of k 0-7, then of k 8-15), B is two of its transposed (k 0-7, k 8-15), and C is two
of pairs of floats. m16n8k8 of TF32 has single elements of 32 bits in the place of pairs.

``cp.async`` copies to shared memory while the thread goes on. Copies begun before a commit are a group; waiting for all
groups but the latest few, and then a barrier, make what was copied visible to the block.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm import tirx
from tvm.backend.cuda.op import cuda_func_call
from tvm.ir import Expr
from tvm.script.ir_builder import tirx as build

LDMATRIX = """
__device__ __forceinline__ void tvm_deconv_ldmatrix_x{count}{suffix}(void* registers, const void* row) {{
  unsigned* r = (unsigned*)registers;
  unsigned address = (unsigned)__cvta_generic_to_shared(row);
  asm volatile("ldmatrix.sync.aligned.m8n8.x{count}{modifier}.shared.b16 {{{places}}}, [%{count}];"
               : {outputs} : "r"(address) : "memory");
}}
"""

MMA = """
__device__ __forceinline__ void tvm_deconv_mma_{name}(float* c, const void* registers_a, const void* registers_b) {{
  const unsigned* a = (const unsigned*)registers_a;
  const unsigned* b = (const unsigned*)registers_b;
  asm volatile("mma.sync.aligned.m16n8k{terms}.row.col.f32.{type}.{type}.f32 "
               "{{%0, %1, %2, %3}}, {{%4, %5, %6, %7}}, {{%8, %9}}, {{%0, %1, %2, %3}};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}}
"""

#: To the nearest, ties away from zero.
TF32 = """
__device__ __forceinline__ float tvm_deconv_tf32(float value) {
  unsigned rounded;
  asm volatile("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(value));
  return __uint_as_float(rounded);
}
"""

COPY = """
__device__ __forceinline__ void tvm_deconv_copy{size}(void* to, const void* from, bool exists) {{
  unsigned address = (unsigned)__cvta_generic_to_shared(to);
  asm volatile("cp.async.{cache}.shared.global [%0], [%1], {size}, %2;"
               :: "r"(address), "l"(from), "r"(exists ? {size} : 0) : "memory");
}}
"""

COPY_BY_ELEMENTS = """
__device__ __forceinline__ void tvm_deconv_copy{size}_by{each}(void* to, const void* from, bool exists) {{
  union {{ {whole} whole; {element} each[{count}]; }} v;
  for (int i = 0; i < {count}; ++i) v.each[i] = exists ? ((const {element}*)from)[i] : ({element})0;
  *({whole}*)to = v.whole;
}}
"""

COMMIT = """
__device__ __forceinline__ void tvm_deconv_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
"""

WAIT = """
__device__ __forceinline__ void tvm_deconv_wait{left}() {{
  asm volatile("cp.async.wait_group {left};" ::: "memory");
}}
"""

#: Terms of one mma by the type that it multiplies.
MMA_TERMS = {"float16": 16, "bfloat16": 16, "tf32": 8}
_MMA_TYPES = {"float16": "f16", "bfloat16": "bf16", "tf32": "tf32"}
_ELEMENTS = {2: "unsigned short", 4: "unsigned", 8: "uint2", 16: "uint4"}


def _address(buffer: Expr, at: Expr | int) -> Expr:
    return tirx.address_of(buffer[at])


def ldmatrix(registers: Expr, at: Expr, count: int, memory: Expr, row: Expr, *, transposed: bool) -> None:
    """Load `count` tiles, rows of 16 bytes, to `registers` from `at` on; lane l gives where row l%8 of tile l/8 is."""
    source = LDMATRIX.format(
        count=count,
        suffix="_trans" if transposed else "",
        modifier=".trans" if transposed else "",
        places=", ".join(f"%{i}" for i in range(count)),
        outputs=", ".join(f'"=r"(r[{i}])' for i in range(count)),
    )
    name = f"tvm_deconv_ldmatrix_x{count}" + ("_trans" if transposed else "")
    build.evaluate(cuda_func_call(name, _address(registers, at), _address(memory, row), source_code=source))


def mma(kind: str, sums: Expr, c: Expr, a_registers: Expr, a: Expr, b_registers: Expr, b: Expr) -> None:
    """Add the product of two operands of type `kind` to four of the `sums`, from `c` on."""
    name = _MMA_TYPES[kind]
    source = MMA.format(name=name, type=name, terms=MMA_TERMS[kind])
    operands = _address(sums, c), _address(a_registers, a), _address(b_registers, b)
    build.evaluate(cuda_func_call(f"tvm_deconv_mma_{name}", *operands, source_code=source))


def tf32(value: Expr) -> Expr:
    """Return a float32 `value` rounded to TF32."""
    return cuda_func_call("tvm_deconv_tf32", value, source_code=TF32, return_type="float32")


def copy(size: int, memory: Expr, to: Expr | int, element: Expr, conditions: Sequence[Expr]) -> None:
    """Begin to copy `size` bytes from `element` on to shared memory; zeros where not all `conditions` hold.

    Addresses are multiples of `size`: 4, 8 or 16.
    """
    source = COPY.format(size=size, cache="cg" if size == 16 else "ca")
    exists = tirx.all(*conditions) if conditions else tirx.const(True, "bool")
    operands = _address(memory, to), tirx.address_of(element), exists
    build.evaluate(cuda_func_call(f"tvm_deconv_copy{size}", *operands, source_code=source))


def copy_by_elements(
    size: int, each: int, memory: Expr, to: Expr | int, element: Expr, conditions: Sequence[Expr]
) -> None:
    """Copy `size` bytes of elements of `each`, wherever they begin, before the thread goes on; see `copy`."""
    names = {"element": _ELEMENTS[each], "whole": _ELEMENTS[size]}
    source = COPY_BY_ELEMENTS.format(size=size, each=each, count=size // each, **names)
    exists = tirx.all(*conditions) if conditions else tirx.const(True, "bool")
    operands = _address(memory, to), tirx.address_of(element), exists
    build.evaluate(cuda_func_call(f"tvm_deconv_copy{size}_by{each}", *operands, source_code=source))


def commit() -> None:
    """Make a group of the copies that were begun since the last one."""
    build.evaluate(cuda_func_call("tvm_deconv_commit", source_code=COMMIT))


def wait(left: int) -> None:
    """Wait for the thread's groups of copies, all but the latest `left`."""
    build.evaluate(cuda_func_call(f"tvm_deconv_wait{left}", source_code=WAIT.format(left=left)))
