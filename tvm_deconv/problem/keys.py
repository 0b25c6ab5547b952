"""The printed key of a problem: one word that a file name can hold, and that reads back."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from tvm_deconv.errors import ProblemError
from tvm_deconv.problem.checks import INT64_MAX
from tvm_deconv.problem.dynamic import ANY
from tvm_deconv.problem.epilogue import Epilogue
from tvm_deconv.problem.quantization import Quantization

if TYPE_CHECKING:
    from tvm_deconv.problem.problem import Problem

_INT64_DIGITS = len(str(INT64_MAX))
_PER_PROBLEM = ("batch", "groups", "in_channels", "out_channels")
_PER_AXIS = ("data_spatial", "kernel", "strides", "dilations", "pads_begin", "output_spatial")
_KEY = re.compile(
    r"n(?P<batch>\d+|any)-g(?P<groups>\d+)-i(?P<in_channels>\d+)-o(?P<out_channels>\d+)"
    r"-x(?P<data_spatial>(?:any(?:\(\d+(?:,\d+)*\))?|[\dx])+)-k(?P<kernel>[\dx]+)-s(?P<strides>[\dx]+)-d(?P<dilations>[\dx]+)"
    r"-p(?P<pads_begin>[\dx]+)-y(?P<output_spatial>(?:any[+-]|[\dx])+)"
    r"-(?P<dtype>[a-z0-9]+)(?:\+(?P<precision>[a-z0-9]+))?(?:\.(?P<quantization>[a-z0-9.]+))?"
    r"-(?P<data_format>[A-Z]+)-(?P<filter_format>[A-Z]+)-(?P<epilogue>[^\s/]+)",
    re.ASCII,
)
_EXTENT = re.compile(r"\d+|any(?:\(\d+(?:,\d+)*\)|[+-]\d+)?", re.ASCII)


def write_key(problem: Problem) -> str:
    """Return the key of `problem`."""
    data: list[int | str] = [*problem.data_spatial]
    output: list[int | str] = [*problem.output_spatial]
    for axis in problem.dynamic_axes:
        buckets = problem.buckets[axis] if problem.buckets else ()
        data[axis] = f"{ANY}({','.join(map(str, buckets))})" if buckets else ANY
        output[axis] = f"{ANY}{problem.output_constant(axis):+d}"
    dtype = problem.dtype if problem.precision == "ieee" else f"{problem.dtype}+{problem.precision}"
    dtype += f".{problem.quantization}" if problem.quantization else ""
    return (
        f"n{ANY if 0 in problem.dynamic else problem.batch}"
        f"-g{problem.groups}-i{problem.in_channels}-o{problem.out_channels}"
        f"-x{_joined(data)}-k{_joined(problem.kernel)}-s{_joined(problem.strides)}-d{_joined(problem.dilations)}"
        f"-p{_joined(problem.pads_begin)}-y{_joined(output)}"
        f"-{dtype}-{problem.data_format}-{problem.filter_format}-{problem.epilogue}"
    )


def read_key(key: str) -> dict[str, Any]:
    """Return the fields of the problem that prints as `key`, unchecked; raise ProblemError for what is no key."""
    match = _KEY.fullmatch(key) if isinstance(key, str) else None
    if match is None:
        raise ProblemError("key", key, "must be the printed key of a problem")
    fields: dict[str, Any] = match.groupdict()
    for name in (*_PER_PROBLEM, *_PER_AXIS):
        extents = fields[name].split("x")
        if not all(map(_EXTENT.fullmatch, extents)):
            raise ProblemError("key", key, f"{name} must be integers joined by x")
        # Python refuses to read numbers of some thousand digits.
        if max(map(len, re.findall(r"\d+", fields[name])), default=0) > _INT64_DIGITS:
            raise ProblemError("key", key, f"{name} must fit in 64 bits")
        fields[name] = _extent(extents[0]) if name in _PER_PROBLEM else tuple(map(_extent, extents))
    fields["epilogue"] = Epilogue.parse(fields["epilogue"])
    fields["precision"] = fields["precision"] or "ieee"
    if fields["quantization"] is not None:
        fields["quantization"] = Quantization.parse(fields["quantization"])
    return fields


def _joined(extents: Iterable[int | str]) -> str:
    return "x".join(map(str, extents))


def _extent(text: str) -> int | str | tuple[int, ...]:
    if text.startswith(f"{ANY}("):
        return tuple(map(int, re.findall(r"\d+", text)))
    return text if text.startswith(ANY) else int(text)
