"""Instructions that multiply words of several factors: AVX-512 BF16, VNNI, and the pairs of 16 bits of AVX2.

TVM has no function for them. A tensor intrinsic takes the place of the loop over the lanes of a product, and calls a
function in LLVM IR (``dot_*.ll``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from string import Template
from typing import TypeAlias

from tvm import tirx
from tvm.ir import Expr
from tvm.s_tir import TensorIntrin
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as B
from tvm.tirx import Buffer, PrimFunc

from tvm_deconv.compute.extents import int64
from tvm_deconv.compute.words import WORD, Words
from tvm_deconv.problem import Problem
from tvm_deconv.schedules.x86.stores import llvm_source
from tvm_deconv.targets import CpuTarget

#: The words in which a target multiplies for a problem; None if there are none.
WordsOf: TypeAlias = Callable[[Problem, CpuTarget], Words | None]
#: Pairs of bfloat16; pairs of 16-bit integers, which hold those of 8 bits; and four bytes, of data made unsigned or
#: that are unsigned.
BFLOAT16_PAIRS, INTEGER_PAIRS = Words("tvm_deconv_dot_bf16", 2), Words("tvm_deconv_dot_i16", 2)
BYTES = Words("tvm_deconv_dot_i8", 4, shift=128)
UNSIGNED_BYTES = Words("tvm_deconv_dot_i8", 4)
#: What the name of a function ends with that multiplies a word by unsigned ones, and not an unsigned word by others.
_SWAPPED = "_swapped"
#: What differs of the results.
CAVEAT = "denormal bfloat16 factors and sums count as zero"


def words_of(problem: Problem, target: CpuTarget) -> Words | None:
    """Return the words that `target` multiplies for `problem`; None if its elements go one by one."""
    if problem.dtype == "bfloat16" and "avx512_bf16" in target.features:
        return BFLOAT16_PAIRS
    if problem.filter_dtype == "int8" and _multiplies_bytes(target):
        return BYTES if problem.dtype == "int8" else UNSIGNED_BYTES
    return INTEGER_PAIRS if problem.dtype in ("int8", "uint8") else None


def words_of_rows(problem: Problem, target: CpuTarget) -> Words | None:
    """Return those of `words_of` for products of a word of the filter by words of data."""
    words = words_of(problem, target)
    return replace(words, name=words.name + _SWAPPED) if words in (BYTES, UNSIGNED_BYTES) else words


def word_cost(words: Words | None, target: CpuTarget) -> float:
    """Return the time of an instruction that multiplies `words`, relative to a multiply-add.

    Intel's CPUs with AMX multiply a vector of pairs of bfloat16 in two cycles, and two vectors of float32 in one.
    """
    return 4.0 if words == BFLOAT16_PAIRS and "amx_tile" in target.features else 1.0


def _multiplies_bytes(target: CpuTarget) -> bool:
    flag = "avx512_vnni" if target.vector_bits == 512 else "avx_vnni"
    return flag in target.features


def adds_apart(target: CpuTarget) -> bool:
    """Tell whether a second instruction adds products of integers, which have a register before: AVX2 without VNNI."""
    return target.vector_registers <= 16 and "avx_vnni" not in target.features


def dot_functions(words: Words, lanes: int) -> str:
    """Return the LLVM IR of the function that multiplies vectors of `lanes` words."""
    template = Template(llvm_source(f"{words.name.removeprefix('tvm_deconv_').removesuffix(_SWAPPED)}.ll"))
    pairs = {8: "llvm.x86.avx2.pmadd.wd", 16: "llvm.x86.avx512.pmaddw.d.512"}.get(lanes, "")
    unsigned, signed = ("%b", "%a") if words.name.endswith(_SWAPPED) else ("%a", "%b")
    numbers = {"lanes": lanes, "factors": words.factors * lanes, "bits": 32 * lanes}
    return template.substitute(numbers, pairs=pairs, name=_function(words, lanes), unsigned=unsigned, signed=signed)


def _function(words: Words, lanes: int) -> str:
    """Return the name of the function, with `lanes`: kernels of an artifact may have vectors of either width."""
    return f"{words.name}_x{lanes}"


def rounding_function(lanes: int) -> str:
    """Return the name of the function beside that of `BFLOAT16_PAIRS` that rounds a vector of sums to bfloat16."""
    return f"tvm_deconv_round_bf16_x{lanes}"


@cache
def dot_intrinsic(words: Words, lanes: int, *, broadcast: bool = True) -> str:
    """Register the intrinsic that adds the products of two vectors of `lanes` words to as many sums; return its name.

    All words of the first are the same if they are `broadcast`.
    """
    function, dtype = _function(words, lanes), "float32" if words == BFLOAT16_PAIRS else "int32"
    name, count = function if broadcast else f"{function}_by_lane", 1 if broadcast else lanes

    def pattern(vectors: bool) -> PrimFunc:
        """Return the loop that TVM matches, or the `vectors` that replace it."""
        with IRBuilder() as builder, B.prim_func(s_tir=True):
            B.func_name("dot")
            first = B.arg("first", B.buffer((count,), WORD, offset_factor=1, align=1))
            second = B.arg("second", B.buffer((lanes,), WORD, offset_factor=1, align=1))
            sums = B.arg("sums", B.buffer((lanes,), dtype, offset_factor=1, align=1))
            with B.sblock("root"):
                B.reads(sums[0:lanes], first[0:count], second[0:lanes])
                B.writes(sums[0:lanes])
                if vectors:
                    one = tirx.Broadcast(first[int64(0)], lanes) if broadcast else _all(first)
                    total = tirx.call_extern(f"{dtype}x{lanes}", function, _all(sums), one, _all(second))
                    B.buffer_store(sums, total, [tirx.Ramp(int64(0), int64(1), lanes)])
                else:
                    with B.grid(int64(lanes)) as i, B.sblock("product"):
                        lane = B.axis.spatial(int64(lanes), i)
                        place = int64(0) if broadcast else lane
                        B.reads(sums[lane], first[place], second[lane])
                        B.writes(sums[lane])
                        product = words.multiply(first[place], second[lane], dtype)
                        B.buffer_store(sums, sums[lane] + product, [lane])
        return builder.get()

    TensorIntrin.register(name, pattern(vectors=False), pattern(vectors=True), override=True)
    return name


def _all(buffer: Buffer) -> Expr:
    """Return all elements of a `buffer` of one axis, as a vector."""
    lanes = int(buffer.shape[0])
    return buffer.vload([int64(0)], f"{buffer.dtype}x{lanes}")
