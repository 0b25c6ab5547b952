"""Rounding of vectors of finished sums to bfloat16 by functions in LLVM's language."""

from __future__ import annotations

from string import Template

from tvm_deconv.compute.requantization import has_any_nan
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


def row_joining(problem: Problem, target: CpuTarget, lanes: int, *, flushed: bool = False) -> tuple[str, str]:
    """Return the LLVM IR of the function that rounds two vectors of sums to words of 16-bit outputs, and its name.

    The first vector is the lower half of each word: the neighbours of a row of two phases, or of channels in pairs.
    Denormal sums may be `flushed` to zero where AVX-512 BF16 rounds.
    """
    alternating = ", ".join(f"i32 {lane + half}" for lane in range(lanes) for half in (0, lanes))
    words = {"lanes": lanes, "double": 2 * lanes, "bits": 32 * lanes, "alternating": alternating}
    words["blended"] = ", ".join(f"i32 {lane + lane % 2 * 2 * lanes}" for lane in range(2 * lanes))
    words["exempt"] = _exempt(problem)
    if problem.output_dtype == "float16":
        names, function = ["join_f16.ll"], "join_f16"
    elif flushed:
        names, function = ["join_bf16_flushed.ll"], "join_flushed"
    elif "avx512_bf16" in target.features:
        names, function = ["round_bf16.ll", "join_bf16_exactly.ll"], "join_exactly"
    else:
        names, function = ["round_bf16.ll", "join_bf16.ll"], "join_integers"
    return Template("".join(map(llvm_source, names))).substitute(words), f"tvm_deconv_{function}_x{lanes}"


def rounding_of_16(problem: Problem, target: CpuTarget) -> tuple[str, str]:
    """Return the LLVM IR of the function that rounds 16 finished sums of `problem` to bfloat16, and its name.

    In 256 bits these are two vectors.
    """
    if target.vector_bits >= 512:
        return _rounding(target, 16)
    source = Template(llvm_source("round_bf16.ll") + llvm_source("round_bf16_pairs.ll"))
    return source.substitute(lanes=16, exempt=_exempt(problem)), "tvm_deconv_round_pairs"


def _exempt(problem: Problem) -> str:
    """Return LLVM's name of whether NaN of finished sums may be rounded like numbers."""
    return "false" if has_any_nan(problem) else "true"
