"""Attribute sets -> Problem: one pure function per family of operators.

The families share their arithmetic and differ in layouts, defaults and in who gets the odd element of a pad. Per axis,
with `nat = s*(X-1) + (K-1)*d + 1` and an output extent Y, the pad to share out is `total = max(nat + op - Y, 0)`; what
an output is longer than `nat + op` stays zero at its end. docs/semantics.md has the tables.

The batch and, with one or two spatial axes, spatial extents of `data_shape` may be "any", or the latter a list of
buckets: that makes a variable problem, whose output extents follow from the attributes in every call. `precision` is
that of `Problem`.

Every function raises ProblemError with the attribute, its value and the rule.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, TypedDict

from tvm_deconv.errors import ProblemError
from tvm_deconv.problem.problem import (
    ANY,
    Epilogue,
    Problem,
    buckets_of,
    integer,
    integers,
    is_dynamic,
    one_of,
    representative_extent,
    uncropped,
)

Ints = Sequence[int]
#: Of data: an extent may be the word "any", or a list of buckets.
Shape = Sequence[int | str | Sequence[int]]

_EXPLICIT = "explicit"
_AUTO_PADS = {"none": _EXPLICIT, "notset": _EXPLICIT} | {
    word: word for word in (_EXPLICIT, "valid", "same_upper", "same_lower")
}


def _auto_pad(value: object) -> str:
    word = _EXPLICIT if value is None else value
    if not isinstance(word, str) or word.lower() not in _AUTO_PADS:
        raise ProblemError("auto_pad", value, f"must be one of {', '.join(_AUTO_PADS)}, in any case")
    return _AUTO_PADS[word.lower()]


class _Variable(TypedDict):
    """What a problem is told of the dynamic extents of its data."""

    dynamic: tuple[int, ...]
    buckets: tuple[tuple[int, ...], ...]


def _data_shape(value: Shape, data_format: str = "NCX") -> tuple[int, int, tuple[int, ...], _Variable]:
    """Return batch, channels, representative spatial extents, and which extents of a data shape are dynamic."""
    one_of("data_format", data_format, ("NCX", "NXC"))
    channel = 1 if data_format == "NCX" else -1
    dynamic: list[int] = []
    buckets: list[tuple[int, ...]] = []
    if isinstance(value, (list, tuple)) and 3 <= len(value) <= 5 and any(map(is_dynamic, value)):
        representative = list(value)
        axes = [axis for axis in range(len(representative)) if axis != channel % len(representative)]
        for axis, place in enumerate(axes):
            extent = representative[place]
            called = is_dynamic(extent) and (axis > 0 or extent == ANY)  # a batch has no buckets
            if called:
                representative[place] = representative_extent(axis, len(axes) - 1, extent)
                dynamic.append(axis)
            if axis:
                buckets.append(buckets_of(extent) if called else ())
        value = tuple(representative)
    shape = integers("data_shape", value, 0)
    if not 3 <= len(shape) <= 5:
        raise ProblemError("data_shape", shape, "must have rank 3, 4 or 5")
    channels, spatial = (shape[1], shape[2:]) if data_format == "NCX" else (shape[-1], shape[1:-1])
    if channels < 1 or min(spatial) < 1:
        raise ProblemError("data_shape", shape, f"must have channels and spatial extents of at least 1 ({data_format})")
    return shape[0], channels, spatial, {"dynamic": tuple(dynamic), "buckets": tuple(buckets)}


def _check_fixed(attribute: str, value: Ints | None, variable: _Variable) -> None:
    """Refuse an output shape where the extents that it would prescribe are dynamic."""
    if value is not None and variable["dynamic"] not in ((), (0,)):
        raise ProblemError(attribute, value, "must be left out where a spatial extent of the data is any")


def _filter_shape(value: Ints, rank: int, rule: str) -> tuple[int, ...]:
    shape = integers("filter_shape", value, 1)
    if len(shape) != rank:
        raise ProblemError("filter_shape", shape, rule)
    return shape


def _check_channels(shape: tuple[int, ...], found: int, channels: int, where: str) -> None:
    if found != channels:
        raise ProblemError("filter_shape", shape, f"{where} must be the {channels} channels of the data")


def _check_groups(attribute: str, value: object, channels: int) -> int:
    groups = integer(attribute, value, 1)
    if channels % groups:
        raise ProblemError(attribute, groups, f"must divide the {channels} channels of the data")
    return groups


def _optional(attribute: str, value: Ints | None, default: int, rank: int, minimum: int) -> tuple[int, ...]:
    return (default,) * rank if value is None else integers(attribute, value, minimum, rank)


def _begins(totals: Sequence[int], odd_at_begin: bool) -> tuple[int, ...]:
    """The begin pads when the totals are shared out evenly, the odd element going to one end."""
    return tuple((max(total, 0) + odd_at_begin) // 2 for total in totals)


def _extents(
    whole: Ints, pads_begin: Ints, pads_end: Ints, output_padding: Ints, attribute: str, value: object
) -> tuple[int, ...]:
    """The output extents without an output_shape; a negative one is the fault of `attribute`."""
    axes = zip(whole, pads_begin, pads_end, output_padding, strict=True)
    extents = tuple(nat - begin - end + extra for nat, begin, end, extra in axes)
    if min(extents) < 0:
        raise ProblemError(attribute, value, f"must leave an output of extents at least 0, not {extents}")
    return extents


def _backprop_data(
    spatial: tuple[int, ...],
    kernel: tuple[int, ...],
    strides: Ints | None,
    pads_begin: Ints | None,
    pads_end: Ints | None,
    dilations: Ints | None,
    auto_pad: str | None,
    output_padding: Ints | None,
    output_shape: Ints | None,
    output_shape_rule: str,
    odd_at_begin: str,
) -> dict[str, tuple[int, ...]]:
    """The per-axis fields of a problem as OpenVINO and oneDNN mean the attributes.

    `odd_at_begin` is the auto_pad that puts the odd element of a pad at the begin; the other one puts it at the end.
    """
    rank = len(spatial)
    steps = _optional("strides", strides, 1, rank, 1)
    spread = _optional("dilations", dilations, 1, rank, 1)
    begin = _optional("pads_begin", pads_begin, 0, rank, 0)
    end = _optional("pads_end", pads_end, 0, rank, 0)
    extra = _optional("output_padding", output_padding, 0, rank, 0)
    mode = _auto_pad(auto_pad)
    one_of("output_shape_rule", output_shape_rule, ("runtime", "formula"))
    whole = uncropped(spatial, kernel, steps, spread)
    if mode != _EXPLICIT:
        begin = end = (0,) * rank
    if output_shape is None:
        both = tuple(first + last for first, last in zip(begin, end, strict=True))
        extents = _extents(whole, begin, end, extra, "pads_begin+pads_end", both)
    else:
        extents = integers("output_shape", output_shape, 0, rank)
        if mode.startswith("same") or output_shape_rule == "formula":
            totals = [nat + more - out for nat, more, out in zip(whole, extra, extents, strict=True)]
            begin = _begins(totals, mode == odd_at_begin)
    return {"strides": steps, "dilations": spread, "pads_begin": begin, "output_spatial": extents}


def from_openvino(
    data_shape: Shape,
    filter_shape: Ints,
    *,
    strides: Ints | None,
    pads_begin: Ints | None = None,
    pads_end: Ints | None = None,
    dilations: Ints | None = None,
    auto_pad: str | None = _EXPLICIT,
    output_padding: Ints | None = None,
    output_shape: Ints | None = None,
    dtype: str = "float32",
    precision: str = "ieee",
    epilogue: Epilogue = Epilogue(),  # noqa: B008 (frozen)
    output_shape_rule: Literal["runtime", "formula"] = "runtime",
    data_format: Literal["NCX", "NXC"] = "NCX",
) -> Problem:
    """ConvolutionBackpropData-1, or GroupConvolutionBackpropData-1 where the filter has one axis more than the data.

    Filters are ``[Cin, Cout, *K]`` or ``[G, Cin/G, Cout/G, *K]``; `output_shape` is spatial. With an output_shape and
    without SAME padding, rule "runtime" honours pads_begin (what OpenVINO runs) and "formula" shares the pad out evenly
    (what its documents compute). `data_format` NXC, which OpenVINO lacks, only says where the channels stand.
    """
    batch, channels, spatial, variable = _data_shape(data_shape, data_format)
    _check_fixed("output_shape", output_shape, variable)
    grouped = len(integers("filter_shape", filter_shape, 1)) == len(spatial) + 3
    rule = f"must have rank {len(spatial) + 2}, or {len(spatial) + 3} with groups, for data of rank {len(spatial) + 2}"
    shape = _filter_shape(filter_shape, len(spatial) + 2 + grouped, rule)
    groups, in_channels, out_channels = shape[:3] if grouped else (1, *shape[:2])
    _check_channels(shape, groups * in_channels, channels, "groups times input channels" if grouped else "axis 0")
    kernel = shape[2 + grouped :]
    axes = _backprop_data(
        spatial, kernel, strides, pads_begin, pads_end, dilations, auto_pad, output_padding, output_shape,
        output_shape_rule, odd_at_begin="same_upper",
    )  # fmt: skip
    return Problem(
        batch=batch, groups=groups, in_channels=in_channels, out_channels=out_channels, data_spatial=spatial,
        kernel=kernel, **axes, dtype=dtype, data_format=data_format, filter_format="GIOX" if grouped else "IOX",
        epilogue=epilogue, **variable, precision=precision,
    )  # fmt: skip


def from_onednn(
    data_shape: Shape,
    filter_shape: Ints,
    *,
    strides: Ints | None,
    pads_begin: Ints | None = None,
    pads_end: Ints | None = None,
    dilations: Ints | None = None,
    auto_pad: str | None = _EXPLICIT,
    output_padding: Ints | None = None,
    output_shape: Ints | None = None,
    groups: int = 1,
    data_format: Literal["NXC", "NCX"] = "NXC",
    filter_format: Literal["XIO", "OIX", "XOI", "IOX"] = "XIO",
    dtype: str = "float32",
    precision: str = "ieee",
    epilogue: Epilogue = Epilogue(),  # noqa: B008 (frozen)
    output_shape_rule: Literal["runtime", "formula"] = "runtime",
) -> Problem:
    """oneDNN Graph's ConvolutionBackpropData and ConvTranspose.

    I and O of a filter format are the forward convolution's: OIX is ``(data channels, Cout/G, *K)`` and XIO is
    ``(*K, Cout/G, data channels)``; ConvTranspose's IOX and XOI are the same memory. `output_shape` is spatial.
    """
    batch, channels, spatial, variable = _data_shape(data_shape, data_format)
    rank = len(spatial)
    _check_fixed("output_shape", output_shape, variable)
    one_of("filter_format", filter_format, ("XIO", "OIX", "XOI", "IOX"))
    rule = f"must have rank {rank + 2}, that of the data"
    shape = _filter_shape(filter_shape, rank + 2, rule)
    last = filter_format.startswith("X")
    *kernel, out_channels, found = shape if last else (*shape[2:], shape[1], shape[0])
    _check_channels(shape, found, channels, f"axis {rank + 1 if last else 0} of {filter_format}")
    groups = _check_groups("groups", groups, channels)
    axes = _backprop_data(
        spatial, tuple(kernel), strides, pads_begin, pads_end, dilations, auto_pad, output_padding, output_shape,
        output_shape_rule, odd_at_begin="same_lower",
    )  # fmt: skip
    return Problem(
        batch=batch, groups=groups, in_channels=channels // groups, out_channels=out_channels, data_spatial=spatial,
        kernel=tuple(kernel), **axes, dtype=dtype, data_format=data_format, filter_format=filter_format,
        epilogue=epilogue, **variable, precision=precision,
    )  # fmt: skip


def from_onnx(
    data_shape: Shape,
    filter_shape: Ints,
    *,
    strides: Ints | None = None,
    pads: Ints | None = None,
    dilations: Ints | None = None,
    auto_pad: str | None = "NOTSET",
    output_padding: Ints | None = None,
    output_shape: Ints | None = None,
    group: int = 1,
    kernel_shape: Ints | None = None,
    dtype: str = "float32",
    precision: str = "ieee",
    epilogue: Epilogue = Epilogue(),  # noqa: B008 (frozen)
) -> Problem:
    """ConvTranspose of ONNX, by the text of opset 11 and later.

    The filter is ``[Cin, Cout/G, *K]``, `pads` are all begins and then all ends, `output_shape` is spatial. `pads` are
    ignored where auto_pad or output_shape decide.
    """
    batch, channels, spatial, variable = _data_shape(data_shape)
    rank = len(spatial)
    _check_fixed("output_shape", output_shape, variable)
    shape = _filter_shape(filter_shape, rank + 2, f"must have rank {rank + 2}, that of the data")
    _check_channels(shape, shape[0], channels, "axis 0")
    groups = _check_groups("group", group, channels)
    kernel = shape[2:]
    if kernel_shape is not None and integers("kernel_shape", kernel_shape, 1, rank) != kernel:
        raise ProblemError("kernel_shape", kernel_shape, f"must be that of the filter, {kernel}")
    steps = _optional("strides", strides, 1, rank, 1)
    spread = _optional("dilations", dilations, 1, rank, 1)
    extra = _optional("output_padding", output_padding, 0, rank, 0)
    ends = (0,) * (2 * rank) if pads is None else integers("pads", pads, 0)
    if len(ends) != 2 * rank:
        raise ProblemError("pads", ends, f"must have {2 * rank} elements: the begins and then the ends of {rank} axes")
    mode = _auto_pad(auto_pad)
    whole = uncropped(spatial, kernel, steps, spread)
    if output_shape is None and not mode.startswith("same"):
        begin, end = (ends[:rank], ends[rank:]) if mode == _EXPLICIT else ((0,) * rank, (0,) * rank)
        extents = _extents(whole, begin, end, extra, "pads", ends)
    else:
        if output_shape is None:
            extents = tuple(x * s for x, s in zip(spatial, steps, strict=True))
        else:
            extents = integers("output_shape", output_shape, 0, rank)
        totals = [nat + more - out for nat, more, out in zip(whole, extra, extents, strict=True)]
        begin = _begins(totals, mode != "same_upper")
    return Problem(
        batch=batch, groups=groups, in_channels=channels // groups, out_channels=shape[1], data_spatial=spatial,
        kernel=kernel, strides=steps, dilations=spread, pads_begin=begin, output_spatial=extents, dtype=dtype,
        epilogue=epilogue, **variable, precision=precision,
    )  # fmt: skip


def broadcast(attribute: str, value: int | Ints, rank: int, minimum: int) -> tuple[int, ...]:
    """One int for all axes, bare or alone in a sequence, or one int per axis."""
    if not isinstance(value, Iterable):
        return (integer(attribute, value, minimum),) * rank
    items = integers(attribute, value, minimum)
    return items * rank if len(items) == 1 else integers(attribute, items, minimum, rank)


def from_torch(
    data_shape: Shape,
    filter_shape: Ints,
    *,
    stride: int | Ints = 1,
    padding: int | Ints = 0,
    output_padding: int | Ints = 0,
    groups: int = 1,
    dilation: int | Ints = 1,
    output_size: Ints | None = None,
    dtype: str = "float32",
    precision: str = "ieee",
    epilogue: Epilogue = Epilogue(),  # noqa: B008 (frozen)
) -> Problem:
    """conv_transpose1d, 2d and 3d of PyTorch; the filter ``[Cin, Cout/G, *K]`` decides the rank.

    Data without a batch axis becomes a batch of one. An `output_size`, with or without its channel axes, replaces
    output_padding, as in the modules.
    """
    shape = integers("filter_shape", filter_shape, 1)
    rank = len(shape) - 2
    if not 1 <= rank <= 3:
        raise ProblemError("filter_shape", shape, "must have rank 3, 4 or 5")
    given = data_shape if isinstance(data_shape, (list, tuple)) else integers("data_shape", data_shape, 0)
    if len(given) not in (rank + 1, rank + 2):
        raise ProblemError("data_shape", given, f"must have rank {rank + 2}, or {rank + 1} without a batch")
    batch, channels, spatial, variable = _data_shape(given if len(given) == rank + 2 else (1, *given))
    _check_fixed("output_size", output_size, variable)
    _check_channels(shape, shape[0], channels, "axis 0")
    groups = _check_groups("groups", groups, channels)
    kernel = shape[2:]
    steps = broadcast("stride", stride, rank, 1)
    spread = broadcast("dilation", dilation, rank, 1)
    pads = broadcast("padding", padding, rank, 0)
    whole = uncropped(spatial, kernel, steps, spread)
    extra = broadcast("output_padding", output_padding, rank, 0)
    if output_size is not None:
        size = integers("output_size", output_size, 0)
        if len(size) not in (rank, len(given)):
            raise ProblemError("output_size", size, f"must have {rank} or {len(given)} elements")
        smallest = _extents(whole, pads, pads, (0,) * rank, "padding", pads)
        extra = tuple(out - small for out, small in zip(size[-rank:], smallest, strict=True))
        if not all(0 <= more < step for more, step in zip(extra, steps, strict=True)):
            largest = tuple(small + step - 1 for small, step in zip(smallest, steps, strict=True))
            raise ProblemError("output_size", size, f"must lie between {smallest} and {largest}")
    elif any(more >= max(s, d) for more, s, d in zip(extra, steps, spread, strict=True)):
        raise ProblemError("output_padding", extra, "must be smaller than the stride or the dilation of its axis")
    return Problem(
        batch=batch, groups=groups, in_channels=channels // groups, out_channels=shape[1], data_spatial=spatial,
        kernel=kernel, strides=steps, dilations=spread, pads_begin=pads,
        output_spatial=_extents(whole, pads, pads, extra, "padding", pads), dtype=dtype, epilogue=epilogue,
        **variable, precision=precision,
    )  # fmt: skip


for _dialect in (from_openvino, from_onednn, from_onnx, from_torch):
    setattr(Problem, _dialect.__name__, staticmethod(_dialect))
