"""A problem in a few words, for tables that people read."""

from __future__ import annotations

from collections.abc import Sequence

from tvm_deconv.problem.dynamic import ANY
from tvm_deconv.problem.problem import Problem


def words(problem: Problem) -> str:
    """Return channels, kernel, stride and spatial extents, and what is unusual: ``64->32 k4 s2 80x80 n8 bias+relu``.

    Channels are those of all groups. An extent that calls decide is any, or any(16) with one bucket alone. Problems
    that differ in pads or in several buckets alone have the same words; keys tell them apart.
    """
    groups = problem.groups
    batch = ANY if 0 in problem.dynamic else problem.batch
    parts = [
        f"{groups * problem.in_channels}->{groups * problem.out_channels}",
        f"g{groups}" if groups > 1 else "",
        f"k{_short(problem.kernel)}",
        f"s{_short(problem.strides)}",
        f"d{_short(problem.dilations)}" if {*problem.dilations} != {1} else "",
        "x".join(_along(problem, axis) for axis in range(problem.rank)),
        f"n{batch}" if batch != 1 or 0 in problem.dynamic else "",
        problem.dtype if problem.dtype != "float32" else "",
        f"* {problem.filter_dtype} -> {problem.output_dtype}" if problem.quantization else "",
        problem.precision if problem.precision != "ieee" else "",
        problem.data_format if problem.data_format != "NCX" else "",
        str(problem.epilogue) if str(problem.epilogue) != "none" else "",
    ]
    return " ".join(part for part in parts if part)


def _along(problem: Problem, axis: int) -> str:
    """Return the extent along a spatial axis; of a dynamic one the bucket, if there is one alone."""
    if axis not in problem.dynamic_axes:
        return str(problem.data_spatial[axis])
    buckets = problem.buckets[axis] if problem.buckets else ()
    return f"{ANY}({buckets[0]})" if len(buckets) == 1 else ANY


def _short(extents: Sequence[int]) -> str:
    """Return equal extents as one."""
    return str(extents[0]) if len({*extents}) == 1 else "x".join(map(str, extents))
