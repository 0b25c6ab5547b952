"""Rounding of vectors of finished sums to bfloat16 by functions in LLVM's language."""

from __future__ import annotations

from string import Template

from tvm_deconv.problem import Problem
from tvm_deconv.schedules.x86.stores import llvm_source
from tvm_deconv.targets import CpuTarget


def exact_rounding(problem: Problem, target: CpuTarget, lanes: int) -> tuple[str, str]:
    """Return the LLVM IR of the function that rounds a vector of `lanes` sums to the output's type, and its name.

    Both are empty where LLVM does as well: for other types than bfloat16, and in 256 bits.
    """
    if problem.output_dtype != "bfloat16" or target.vector_bits < 512:
        return "", ""
    return _rounding(target, lanes)


def _rounding(target: CpuTarget, lanes: int) -> tuple[str, str]:
    source = Template(llvm_source("round_bf16.ll")).substitute(lanes=lanes)
    if "avx512_bf16" not in target.features:
        return source, f"tvm_deconv_round_integers_x{lanes}"
    source += Template(llvm_source("round_bf16_exactly.ll")).substitute(lanes=lanes, bits=32 * lanes)
    return source, f"tvm_deconv_round_exactly_x{lanes}"


def rounding_of_16(target: CpuTarget) -> tuple[str, str]:
    """Return the LLVM IR of the function that rounds 16 sums to bfloat16, and its name.

    In 256 bits these are two vectors.
    """
    if target.vector_bits >= 512:
        return _rounding(target, 16)
    source = Template(llvm_source("round_bf16.ll")).substitute(lanes=16)
    return source + llvm_source("round_bf16_pairs.ll"), "tvm_deconv_round_pairs"
