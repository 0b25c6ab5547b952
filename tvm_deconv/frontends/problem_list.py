"""Lists of problems: JSON files, one object per problem.

`data` is the shape of the data in `data_format` (NCX: ``[N, C, *X]``, the default; NXC: ``[N, *X, C]``) and `filter` is
``[G, Cin/G, Cout/G, *K]``, with G = 1 for the operator without groups. The batch may be "any", and with one or two
spatial axes their extents, or lists of buckets. The attributes mean what they mean to OpenVINO.

`epilogue` is the text of an Epilogue, or an object with its fields; ``"bias": true`` adds the bias to it, whatever else
it holds. ``"precision": "tf32"`` permits TF32, and "tf32x3" three products of it for one. `quantization` has the types
of a quantized problem's filter and output, as "int8.uint8". `out_spatial`, if given, must be the extents that follow.
Other fields are carried through. One whose name is nearly that of a field here, or that another system has for it, is a
UserWarning.
"""

from __future__ import annotations

import collections
import dataclasses
import difflib
import functools
import json
import re
import warnings
from pathlib import Path
from typing import Any

from tvm_deconv.errors import ProblemError, SourceError
from tvm_deconv.frontends.files import MOST_TEXT, read_bytes
from tvm_deconv.frontends.layers import FoundLayer
from tvm_deconv.frontends.packages import missing_package
from tvm_deconv.problem import Epilogue, Problem, Quantization

try:
    import msgspec
except ImportError:
    raise missing_package("a list of problems", "msgspec", "compile") from None


class _Entry(msgspec.Struct, kw_only=True):
    data: list[int | str | list[int] | None]  # of which the dialect refuses None, with its rule
    filter: list[int]
    strides: list[int] | None
    pads_begin: list[int] | None = None
    pads_end: list[int] | None = None
    dilations: list[int] | None = None
    output_padding: list[int] | None = None
    name: str | None = None
    auto_pad: str | None = None
    output_shape: list[int | str] | None = None
    data_format: str = "NCX"
    dtype: str = "float32"
    precision: str = "ieee"
    quantization: str | None = None
    epilogue: str | dict[str, Any] = "none"
    bias: bool = False
    out_spatial: list[int] | None = None


#: Words of other systems, and the fields that they mean here.
_ELSEWHERE = {
    "pad": "pads_begin and pads_end",
    "pads": "pads_begin and pads_end",
    "padding": "pads_begin and pads_end",
    "stride": "strides",
    "dilation": "dilations",
    "output_pads": "output_padding",
    "kernel": "filter",
    "kernel_shape": "filter",
    "kernel_size": "filter",
    "weight": "filter",
    "weights": "filter",
    "shape": "data",
    "input": "data",
    "group": "filter, whose first extent it is",
    "groups": "filter, whose first extent it is",
    "activation": "epilogue",
    "layout": "data_format",
    "format": "data_format",
    "type": "dtype",
}


def scan_list(path: Path) -> list[FoundLayer]:
    """Return the problems of the list at `path`; raise SourceError at the first entry that is no problem."""
    content = read_bytes(path, MOST_TEXT)
    try:
        entries = msgspec.json.decode(content, type=list[dict[str, Any]])
        for index, entry in enumerate(msgspec.json.decode(content, type=list[msgspec.Raw])):
            check = functools.partial(_check_names, f"in problem {index} of {path}")
            json.loads(bytes(entry), object_pairs_hook=check)
    except SourceError:
        raise
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise SourceError("source", path, f"must be a JSON list of problems: {error}") from None
    return [_layer(index, entry, path) for index, entry in enumerate(entries)]


def _check_names(where: str, pairs: list[tuple[str, object]]) -> None:
    """Raise SourceError if a name stands twice among the fields of an object, of which msgspec takes the last."""
    for repeated, count in collections.Counter(name for name, _ in pairs).items():
        if count > 1:
            values = [value for name, value in pairs if name == repeated]
            raise SourceError(repeated, values, f"must be given once, {where}")


def _warn_of_near_names(fields: dict[str, Any], where: str) -> None:
    """Warn of fields that mean nothing here and are called nearly as one that does."""
    for field in fields:
        if field in _Entry.__struct_fields__:
            continue
        word = field.lower().replace("-", "_")
        near = difflib.get_close_matches(word, _Entry.__struct_fields__, n=1, cutoff=0.8)
        meant = _ELSEWHERE.get(word) or next(iter(near), None)
        if meant:
            warnings.warn(f"{field}={fields[field]!r}: means nothing; did you mean {meant}? {where}", stacklevel=2)


def _layer(index: int, fields: dict[str, Any], path: Path) -> FoundLayer:
    name = fields.get("name")
    where = f"in problem {index}{f' ({name})' if name else ''} of {path}"
    _warn_of_near_names(fields, where)
    try:
        entry = msgspec.convert(fields, _Entry)
        problem = _problem(entry)
    except msgspec.ValidationError as error:
        place = re.search(r"missing required field `(\w+)`|at `\$\.(\w+)", str(error))
        attribute = place[place.lastindex or 0] if place else "problem"
        raise SourceError(attribute, fields.get(attribute), f"{error} {where}") from None
    except ProblemError as error:
        attribute = {"data_shape": "data", "filter_shape": "filter"}.get(error.attribute, error.attribute)
        raise SourceError(attribute, error.value, f"{error.rule} {where}") from None
    grouped = "Group" if problem.groups > 1 else ""
    return FoundLayer(
        name=entry.name or f"problem_{index}",
        operator=f"{grouped}ConvolutionBackpropData",
        problem=problem,
        extra={key: value for key, value in fields.items() if key not in _Entry.__struct_fields__},
    )


def _problem(entry: _Entry) -> Problem:
    if len(entry.filter) != len(entry.data) + 1:
        rule = f"must be [G, Cin/G, Cout/G, *K]: {len(entry.data) + 1} extents for data of rank {len(entry.data)}"
        raise ProblemError("filter", entry.filter, rule)
    problem = Problem.from_openvino(
        entry.data,  # type: ignore[arg-type]
        entry.filter,
        strides=entry.strides,
        pads_begin=entry.pads_begin,
        pads_end=entry.pads_end,
        dilations=entry.dilations,
        auto_pad=entry.auto_pad,
        output_padding=entry.output_padding,
        output_shape=entry.output_shape,
        dtype=entry.dtype,
        precision=entry.precision,
        epilogue=_epilogue(entry),
        quantization=None if entry.quantization is None else Quantization.parse(entry.quantization),
        data_format=entry.data_format,  # type: ignore[arg-type]
    )
    if entry.out_spatial is not None and tuple(entry.out_spatial) != problem.output_spatial:
        rule = f"must be the extents that the attributes give, {list(problem.output_spatial)}"
        raise ProblemError("out_spatial", entry.out_spatial, rule)
    return problem


def _epilogue(entry: _Entry) -> Epilogue:
    if isinstance(entry.epilogue, str):
        epilogue = Epilogue.parse(entry.epilogue)
    else:
        known = [field.name for field in dataclasses.fields(Epilogue)]
        if not set(entry.epilogue) <= set(known):
            raise ProblemError("epilogue", entry.epilogue, f"may hold the fields {', '.join(known)} only")
        epilogue = Epilogue(**entry.epilogue)
    return dataclasses.replace(epilogue, bias=epilogue.bias or entry.bias)
