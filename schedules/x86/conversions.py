"""Conversion of rows of finished outputs to a narrower type while they are copied into the output.

Stores past the caches want whole lines, which are several vectors of sums: the function converts these together. It
also rounds to bfloat16 by instructions (`rounding`), which LLVM does not use for the loop.
"""

from __future__ import annotations

from string import Template
from typing import NamedTuple

from tvm_deconv.compute.storage import storage_dtype
from tvm_deconv.problem import Problem
from tvm_deconv.schedules.x86.rounding import rounding_of_16
from tvm_deconv.schedules.x86.stores import LINE, SHORTEST_CALL, llvm_source
from tvm_deconv.targets import CpuTarget

#: By the type of stored outputs: LLVM's names of it, of its bits and of the sums, the bytes, and the conversion.
_NARROW = {
    "float16": ("half", "i16", "float", 2, "fptrunc"),
    "uint16": ("i16", "i16", "float", 2, ""),
    "int8": ("i8", "i8", "i32", 1, "trunc"),
    "uint8": ("i8", "i8", "i32", 1, "trunc"),
}


def rounds_rows(problem: Problem) -> bool:
    """Tell whether whole rows of the output are rounded to bfloat16 sooner than their vectors: long ones."""
    return problem.output_dtype == "bfloat16" and 2 * problem.output_spatial[-1] >= SHORTEST_CALL


class RowConversions(NamedTuple):
    """The functions that convert rows, in LLVM IR: as rows are stored usually, and past the caches; empty for none."""

    usual: str = ""
    past: str = ""


#: For rows that nothing converts.
AS_THEY_ARE = RowConversions()


def row_conversions(problem: Problem, target: CpuTarget, *, stored: bool) -> RowConversions:
    """Return what converts rows of the outputs of `problem`: nothing if they are `stored` without it."""
    if stored:
        return AS_THEY_ARE
    return RowConversions(*(row_conversion(problem, target, streams) for streams in (False, True)))


def row_conversion(problem: Problem, target: CpuTarget, streams: bool) -> str:
    """Return the LLVM IR of the function that converts rows of the outputs of `problem`; empty if nothing narrows them.

    If it `streams`, whole lines go past the caches; `streaming_copy.ll`, which then precedes it, defines !0.
    """
    dtype = storage_dtype(problem.output_dtype)
    if dtype not in _NARROW:
        return ""
    narrow, stored, total, size, cast = _NARROW[dtype]
    words = {"line": LINE // size, "narrow": narrow, "stored": stored, "sum": total, "size": size, "cast": cast}
    words["past"] = LINE - 1 if streams else 0
    words["store"] = "align 64, !nontemporal !0" if streams else f"align {size}"
    source, words["round"] = ("", "") if cast else rounding_of_16(target)
    names = "narrow.ll" if cast else "narrow_bf16.ll", "convert_row.ll"
    return source + Template("".join(map(llvm_source, names))).substitute(words)
