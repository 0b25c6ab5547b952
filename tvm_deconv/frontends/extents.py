"""Ranges of the extents that a model leaves free, and the buckets that its layers get from them.

A range is given by the name of an extent, or by an input and an axis: ``frames``, ``mel.2``. Shapes are inferred for
some samples of the ranges; a layer's buckets are the extents that its data have in them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral

from tvm_deconv.errors import SourceError
from tvm_deconv.problem import Problem

#: name of a free extent -> its least and greatest value
Ranges = Mapping[str, tuple[int, int]]
#: Samples are the greatest value of a range and those that follow by this factor, as far as they are in the range.
_FACTOR = 8
#: samples by the number of spatial axes: each combination of buckets is a schedule of its own
_SAMPLES = {1: 3, 2: 2}
_MOST_SAMPLES = max(_SAMPLES.values())


def checked_ranges(ranges: Ranges) -> Ranges:
    """Return `ranges`; raise SourceError unless every range holds extents."""
    if not isinstance(ranges, Mapping):
        raise SourceError("extents", ranges, "must be a mapping from names to ranges")
    for name, limits in ranges.items():
        pair = isinstance(limits, (tuple, list)) and len(limits) == 2
        shown = f"{limits[0]}..{limits[1]}" if pair else limits
        extents = pair and all(isinstance(limit, Integral) for limit in limits)
        if not extents or not 1 <= limits[0] <= limits[1] < 1 << 31:
            raise SourceError("extent", f"{name}={shown}", "must be a range of extents from 1 up, lowest first")
    return ranges


def samples(ranges: Ranges) -> list[dict[str, int]]:
    """Return values for the free extents, all at their greatest first."""
    if not ranges:
        return []
    return [
        {name: max(high // _FACTOR**step, low) for name, (low, high) in ranges.items()} for step in range(_MOST_SAMPLES)
    ]


def free_extents(
    shape: Sequence[int | str], found: Sequence[Sequence[int | str] | None]
) -> list[int | str | list[int]]:
    """Return a shape ``[N, C, *X]`` with "any", or buckets, for its extents that are no numbers.

    `found` are the shapes that the tensor has in the samples, the first at the greatest values.
    """
    made: list[int | str | list[int]] = []
    for axis, extent in enumerate(shape):
        values = [
            other[axis] for other in found[: _SAMPLES.get(len(shape) - 2, 1)] if other and len(other) == len(shape)
        ]
        buckets = sorted({value for value in values if isinstance(value, int) and value > 0})
        if isinstance(extent, int):
            made.append(extent)
        else:
            made.append(buckets if axis > 1 and buckets else "any")
    return made


def check_names(ranges: Ranges, free: Sequence[str], source: object) -> None:
    """Raise SourceError if a range is of none of the `free` extents of a source."""
    for name in ranges:
        if name not in free:
            known = ", ".join(dict.fromkeys(free)) or "it has none"
            raise SourceError("extent", name, f"must be a free extent of {source}: {known}")


def agrees(problem: Problem, shape: Sequence[int | str]) -> bool:
    """Tell whether the output of `problem` can have the `shape` that a model gives it.

    Extents that are no numbers, or less than 0, are not known; nor is anything of an empty shape.
    """
    free = {axis + 1 if axis else 0 for axis in problem.dynamic}
    known = [extent if isinstance(extent, int) and extent >= 0 else None for extent in shape]
    made = [None if axis in free else extent for axis, extent in enumerate(problem.output_shape)]
    return not known or (len(known) == len(made) and all(k in (None, m) for k, m in zip(known, made, strict=True)))
