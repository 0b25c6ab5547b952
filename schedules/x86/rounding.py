"""Rounding of vectors of finished sums to 16 bits, and narrowing to 8, by functions in LLVM IR."""

from __future__ import annotations

from string import Template

from tvm_deconv.compute.storage import stores_bytes
from tvm_deconv.problem import Problem
from tvm_deconv.schedules.x86.stores import llvm_source
from tvm_deconv.targets import CpuTarget

#: The instructions that make two vectors of integers one of half the bits, saturated: by the lanes of a vector of 32
#: bits, and by the bytes that are made.
_TO_WORDS = {8: "avx2.packssdw", 16: "avx512.packssdw.512"}
_TO_BYTES = {16: "sse2.{}.128", 32: "avx2.{}", 64: "avx512.{}.512"}


def exact_rounding(problem: Problem, target: CpuTarget, lanes: int) -> tuple[str, str]:
    """Return the LLVM IR of the function that rounds a vector of `lanes` sums to the output's type, and its name.

    Both are empty where LLVM does as well: for other types than bfloat16, and in less than 256 bits.
    """
    if problem.output_dtype != "bfloat16":
        return "", ""
    if target.vector_bits >= 512:
        return _rounding(target, lanes)
    return (llvm_source("round_bf16_vector.ll"), "tvm_deconv_round_vector_x8") if lanes == 8 else ("", "")


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
    words = _words(lanes)
    if problem.output_dtype == "float16":
        names, function = ["join_f16.ll"], "join_f16"
    elif flushed:
        names, function = ["join_bf16_flushed.ll"], "join_flushed"
    elif "avx512_bf16" in target.features:
        names, function = ["round_bf16.ll", "join_bf16_exactly.ll"], "join_exactly"
    else:
        names, function = ["join_bf16.ll"], "join_integers"
    return Template("".join(map(llvm_source, names))).substitute(words), f"tvm_deconv_{function}_x{lanes}"


def _words(lanes: int) -> dict[str, object]:
    """Return what the templates of functions that join two vectors of `lanes` sums hold."""
    alternating = ", ".join(f"i32 {lane + half}" for lane in range(lanes) for half in (0, lanes))
    blended = ", ".join(f"i32 {lane + lane % 2 * 2 * lanes}" for lane in range(2 * lanes))
    return {
        "lanes": lanes,
        "double": 2 * lanes,
        "bits": 32 * lanes,
        "alternating": alternating,
        "blended": blended,
    }


def byte_joining(problem: Problem, lanes: int) -> tuple[str, dict[int, str]]:
    """Return the LLVM IR of functions that make several vectors of `lanes` integers one of bytes, and their names.

    They take the zero point behind the vectors, and saturate. The names are by the number of vectors. Outputs of
    more bits have none.
    """
    if not stores_bytes(problem):
        return "", {}
    names = {count: f"tvm_deconv_join_{problem.output_dtype}_{count}x{lanes}" for count in (4, 2)}
    vector, words = f"<{lanes} x i32>", f"<{2 * lanes} x i16>"
    source = f"declare {words} @llvm.x86.{_TO_WORDS[lanes]}({vector}, {vector})\n"
    source += f"declare {words} @llvm.sadd.sat.v{2 * lanes}i16({words}, {words})\n"
    return source + "".join(_byte_joining(problem, lanes, count, name) for count, name in names.items()), names


def _byte_joining(problem: Problem, lanes: int, count: int, name: str) -> str:
    """Return the LLVM IR of the function `name`, which makes `count` vectors, 4 or 2, one of bytes."""
    size = count * lanes
    halves = [_words_of(lanes, "low", "ab"), _words_of(lanes, "high", "cd")]
    if count == 2:
        halves = [_words_of(lanes, "both", "ab")]
        for half, begin in (("low", 0), ("high", lanes)):
            numbers = ", ".join(f"i32 {begin + lane}" for lane in range(lanes))
            both = f"<{2 * lanes} x i16>"
            halves.append(f"  %{half} = shufflevector {both} %both, {both} poison, <{lanes} x i32> <{numbers}>")
    made = _parts_of_bytes(lanes // 4, count)
    text = {
        "name": name,
        "words": 2 * lanes,
        "arguments": ", ".join(f"<{lanes} x i32> %{letter}" for letter in "abcd"[:count]),
        "halves": "\n".join(halves),
        "half": size // 2,
        "size": size,
        "quads": size // 4,
        "order": ", ".join(f"i32 {made.index(part)}" for part in range(size // 4)),
        "to_bytes": _TO_BYTES[size].format("packuswb" if problem.output_dtype == "uint8" else "packsswb"),
    }
    return Template(llvm_source("narrow_bytes.ll")).substitute(text)


def _words_of(lanes: int, name: str, pair: str) -> str:
    """Return the LLVM IR that makes two vectors of integers one of 16 bits, zero point included, by lanes of 128."""
    operands, words = ", ".join(f"<{lanes} x i32> %{letter}" for letter in pair), f"<{2 * lanes} x i16>"
    return f"""  %{name}.sums = call {words} @llvm.x86.{_TO_WORDS[lanes]}({operands})
  %{name} = call {words} @llvm.sadd.sat.v{2 * lanes}i16({words} %{name}.sums, {words} %zeros)"""


def _parts_of_bytes(parts: int, count: int) -> list[int]:
    """Return the parts of four elements in the order in which `byte_joining` makes bytes of them.

    A vector has so many `parts`, each a lane of 128 bits; those of all `count` vectors are numbered in succession.
    """
    low, high = ([(part + first, part + first + parts) for part in range(parts)] for first in (0, 2 * parts))
    if count == 2:
        low, high = low[: parts // 2], low[parts // 2 :]
    return [part for lanes in zip(low, high, strict=True) for lane in lanes for part in lane]


def rounding_of_16(target: CpuTarget) -> tuple[str, str]:
    """Return the LLVM IR of the function that rounds 16 finished sums to bfloat16, and its name.

    In 256 bits these are two vectors.
    """
    if target.vector_bits >= 512:
        return _rounding(target, 16)
    source = Template(llvm_source("join_bf16.ll")).substitute(_words(8)) + llvm_source("round_bf16_pairs.ll")
    return source, "tvm_deconv_round_pairs"
