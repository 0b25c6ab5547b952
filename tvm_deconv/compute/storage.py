"""Conversions between the stored elements of a definition and its accumulators.

float16 and bfloat16 are stored, and float32 is computed. bfloat16 crosses the ABI as uint16 with the same bits. A
bfloat16 is the upper half of a float32, so both conversions are integer arithmetic that any vector unit has.
"""

from __future__ import annotations

from tvm import tirx
from tvm.ir import Expr

from tvm_deconv.problem import Problem

#: float32 holds every integer up to this magnitude.
_EXACT_IN_FLOAT32 = 1 << 24


def storage_dtype(dtype: str) -> str:
    """Return the dtype that carries elements of `dtype` across the ABI."""
    return "uint16" if dtype == "bfloat16" else dtype


def filter_storage(problem: Problem) -> str:
    """Return the dtype that carries the filter: int16 for one whose zero points were taken off."""
    if problem.quantization and problem.filter_dtype == "uint8":
        return "int16"
    return storage_dtype(problem.filter_dtype)


def sum_dtype(problem: Problem) -> str:
    """Return the dtype of factors and sums that are not in words: float32 for bytes whose sums it holds exactly.

    One instruction multiplies and adds them then, where integers of 32 bits take two.
    """
    if problem.dtype not in ("int8", "uint8"):
        return problem.accumulate_dtype
    return "float32" if largest_sum(problem) <= _EXACT_IN_FLOAT32 else "int32"


def largest_sum(problem: Problem) -> int:
    """Return the largest magnitude of a sum of products of bytes, whose zero points may be taken off."""
    return problem.terms * 255 * (255 if problem.filter_dtype == "uint8" else 128)


def stores_bytes(problem: Problem) -> bool:
    """Tell whether outputs are stored in 8 bits, four to each accumulator."""
    return problem.output_dtype in ("int8", "uint8")


def to_accumulator(value: Expr, dtype: str, accumulator: str) -> Expr:
    """Convert a stored element of `dtype` to the `accumulator` dtype, exactly."""
    if dtype == "bfloat16":
        return tirx.reinterpret("float32", value.astype("uint32") << tirx.const(16, "uint32"))
    return value if dtype == accumulator else value.astype(accumulator)


def from_accumulator(value: Expr, dtype: str, lanes: int = 1, *, any_nan: bool = True) -> Expr:
    """Round an accumulator element once, to nearest even, to the storage of `dtype`; NaN stays NaN.

    What is of that storage already stays. `value` may be a vector of several `lanes`. It must be known of its NaN,
    unless they may be `any_nan`, that they are of bfloat16: rounding carries nothing into the sign of these.
    """
    several = f"x{lanes}" if lanes > 1 else ""
    stored = storage_dtype(dtype) + several
    if str(tirx.convert(value).ty.dtype) == stored:
        return value
    if dtype != "bfloat16":
        return value.astype(stored)

    def const(number: int) -> Expr:
        return tirx.const(number, f"uint32{several}")

    bits = tirx.reinterpret(f"uint32{several}", value)
    rounded = (bits + const(0x7FFF) + ((bits >> const(16)) & const(1))) >> const(16)
    if any_nan:
        rounded = tirx.Select(tirx.isnan(value), const(0x7FC0), rounded)
    return rounded.astype(stored)
