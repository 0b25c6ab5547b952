"""Readers of the attributes that dialects share.

Per axis, ``nat = s*(X-1) + (K-1)*d + 1`` is the uncropped output extent. With an output extent Y and an output_padding
op, ``total = max(nat + op - Y, 0)`` is the pad to share out. An output longer than ``nat + op`` is zero at its end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from numbers import Integral
from typing import NamedTuple, TypedDict, cast

from tvm_deconv.errors import ProblemError
from tvm_deconv.problem.arithmetic import uncropped
from tvm_deconv.problem.checks import integer, integers, one_of
from tvm_deconv.problem.dynamic import ANY, read_extents
from tvm_deconv.problem.epilogue import Epilogue
from tvm_deconv.problem.quantization import Quantization

Ints = Sequence[int]
#: A shape of data: an extent may be the word "any", or a list of buckets.
Shape = Sequence[int | str | Sequence[int]]
#: A spatial output shape: "any" where the extent of the data is dynamic.
OutputShape = Sequence[int | str]

EXPLICIT = "explicit"
_FREE_RULE = 'where calls decide it, it is "any", and a spatial one may be a list of buckets'
_AUTO_PADS = {"none": EXPLICIT, "notset": EXPLICIT} | {
    word: word for word in (EXPLICIT, "valid", "same_upper", "same_lower")
}


class Fields(TypedDict):
    """The fields of a problem."""

    batch: int
    groups: int
    in_channels: int
    out_channels: int
    data_spatial: tuple[int, ...]
    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    pads_begin: tuple[int, ...]
    output_spatial: tuple[int, ...]
    dtype: str
    data_format: str
    filter_format: str
    epilogue: Epilogue
    dynamic: tuple[int, ...]
    precision: str
    buckets: tuple[tuple[int, ...], ...]
    quantization: Quantization | None


class Data(NamedTuple):
    """A shape of data: `spatial` holds representative extents in the place of `dynamic` ones."""

    batch: int
    channels: int
    spatial: tuple[int, ...]
    dynamic: tuple[int, ...]
    buckets: tuple[tuple[int, ...], ...]


class Axes(NamedTuple):
    """The attributes of a problem that have one element per spatial axis."""

    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    pads_begin: tuple[int, ...]
    output_spatial: tuple[int, ...]


def auto_pad_mode(value: object) -> str:
    """Return the auto_pad, given in any case, as explicit, valid, same_upper or same_lower."""
    word = EXPLICIT if value is None else value
    if not isinstance(word, str) or word.lower() not in _AUTO_PADS:
        raise ProblemError("auto_pad", value, f"must be one of {', '.join(_AUTO_PADS)}, in any case")
    return _AUTO_PADS[word.lower()]


def _is_free(extent: object) -> bool:
    """Tell whether `extent` is what somebody may write for one that calls decide: a word, None, -1, buckets."""
    return extent is None or isinstance(extent, (str, list, tuple)) or (isinstance(extent, Integral) and extent < 0)


def read_data(value: Shape, data_format: str = "NCX") -> Data:
    """Read a shape of data with 1 to 3 spatial axes."""
    one_of("data_format", data_format, ("NCX", "NXC"))
    dynamic: tuple[int, ...] = ()
    buckets: tuple[tuple[int, ...], ...] = ()
    static: Shape = value
    free = isinstance(value, (list, tuple)) and any(map(_is_free, value))
    if isinstance(value, (list, tuple)) and 3 <= len(value) <= 5:
        first = 2 if data_format == "NCX" else 1
        axis = 1 if data_format == "NCX" else len(value) - 1
        if _is_free(value[axis]):
            rule = f"axis {axis} ({data_format}) must be a number: the channels are never free"
            raise ProblemError("data_shape", value, rule)
        last = first + len(value) - 2
        batch, extents, dynamic, buckets = read_extents(value[0], value[first:last])
        if dynamic:
            static = (batch, *value[1:first], *extents, *value[last:])
    try:
        shape = integers("data_shape", static, 0)
    except ProblemError as error:
        raise ProblemError("data_shape", value, f"{error.rule}; {_FREE_RULE}" if free else error.rule) from None
    if not 3 <= len(shape) <= 5:
        raise ProblemError("data_shape", shape, "must have rank 3, 4 or 5")
    channels, spatial = (shape[1], shape[2:]) if data_format == "NCX" else (shape[-1], shape[1:-1])
    if channels < 1 or min(spatial) < 1:
        raise ProblemError("data_shape", value, f"must have channels and spatial extents of at least 1 ({data_format})")
    return Data(shape[0], channels, spatial, dynamic, buckets)


def check_static(attribute: str, value: Ints | None, data: Data) -> None:
    """Refuse an output shape if a spatial extent is dynamic: it would prescribe what each call decides."""
    if value is not None and data.dynamic not in ((), (0,)):
        raise ProblemError(attribute, value, "must be left out where a spatial extent of the data is any")


def read_axes(output_shape: OutputShape | None, data: Data, read: Callable[[Ints | None], Axes]) -> Axes:
    """Return what `read` makes of an output_shape; where it holds "any", of the other attributes alone.

    "any" stands for the axes along which the extent of the data is dynamic, and for no others.
    """
    if data.dynamic in ((), (0,)) or output_shape is None:
        return read(cast("Ints | None", output_shape))
    free = read(None)
    given = tuple(output_shape) if isinstance(output_shape, (list, tuple)) else ()
    wanted = tuple(axis + 1 in data.dynamic for axis in range(len(data.spatial)))
    if tuple(isinstance(extent, str) and extent == ANY for extent in given) != wanted:
        raise ProblemError("output_shape", output_shape, "must be any just where a spatial extent of the data is any")
    both = zip(free.output_spatial, given, wanted, strict=True)
    fixed = read(cast("Ints", [y if dynamic else extent for y, extent, dynamic in both]))
    axes = [free if dynamic else fixed for dynamic in wanted]
    return Axes(
        free.strides,
        free.dilations,
        tuple(chosen.pads_begin[axis] for axis, chosen in enumerate(axes)),
        tuple(chosen.output_spatial[axis] for axis, chosen in enumerate(axes)),
    )


def read_filter(value: Ints, rank: int, rule: str) -> tuple[int, ...]:
    """Return the shape of a filter, of `rank` axes in all; `rule` says so in the error."""
    shape = integers("filter_shape", value, 1)
    if len(shape) != rank:
        raise ProblemError("filter_shape", shape, rule)
    return shape


def check_channels(shape: tuple[int, ...], given: int, channels: int, axis: str) -> None:
    """Refuse a filter whose `axis`, of extent `given`, is not the channels of the data."""
    if given != channels:
        raise ProblemError("filter_shape", shape, f"{axis} must be the {channels} channels of the data")


def read_groups(attribute: str, value: object, channels: int) -> int:
    """Return the number of groups, which divides the channels of the data."""
    groups = integer(attribute, value, 1)
    if channels % groups:
        raise ProblemError(attribute, groups, f"must divide the {channels} channels of the data")
    return groups


def optional(attribute: str, value: Ints | None, default: int, rank: int, minimum: int) -> tuple[int, ...]:
    """Return one int per axis, `default` for all if the attribute is None or has no elements."""
    given = () if value is None else integers(attribute, value, minimum)
    return integers(attribute, given, minimum, rank) if given else (default,) * rank


def shared_out(whole: Ints, output_padding: Ints, extents: Ints, odd_at_begin: bool) -> tuple[int, ...]:
    """Share the pads of an output of given `extents` out evenly; return the begins.

    `odd_at_begin` tells which end gets the odd element. `whole` are the uncropped extents.
    """
    axes = zip(whole, output_padding, extents, strict=True)
    totals = [nat + extra - extent for nat, extra, extent in axes]
    return tuple((max(total, 0) + odd_at_begin) // 2 for total in totals)


def cropped(
    whole: Ints, pads_begin: Ints, pads_end: Ints, output_padding: Ints, attribute: str, value: object
) -> tuple[int, ...]:
    """Return the output extents that pads leave; a negative one is the fault of `attribute`."""
    axes = zip(whole, pads_begin, pads_end, output_padding, strict=True)
    extents = tuple(nat - begin - end + extra for nat, begin, end, extra in axes)
    if min(extents) < 0:
        raise ProblemError(attribute, value, f"must leave an output of extents at least 0, not {extents}")
    return extents


def read_backprop_data(
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
    same_without_shape: bool = False,
) -> Axes:
    """Read the attributes per axis of ConvolutionBackpropData, as OpenVINO and oneDNN mean them.

    `odd_at_begin` is the auto_pad that puts the odd element of a pad at the begin; the other one puts it at the end.
    With `same_without_shape`, SAME padding without an output_shape makes each stride one position of the data, where
    the kernel reaches that far, as in oneDNN's ConvTranspose; else it pads nothing.
    """
    rank = len(spatial)
    steps = optional("strides", strides, 1, rank, 1)
    spread = optional("dilations", dilations, 1, rank, 1)
    begin = optional("pads_begin", pads_begin, 0, rank, 0)
    end = optional("pads_end", pads_end, 0, rank, 0)
    extra = optional("output_padding", output_padding, 0, rank, 0)
    mode = auto_pad_mode(auto_pad)
    one_of("output_shape_rule", output_shape_rule, ("runtime", "formula"))
    whole = uncropped(spatial, kernel, steps, spread)
    if mode != EXPLICIT:
        begin = end = (0,) * rank
    if output_shape is None and same_without_shape and mode.startswith("same"):
        reach = tuple(nat - s * x for nat, s, x in zip(whole, steps, spatial, strict=True))
        extents = cropped(whole, begin, tuple(max(total, 0) for total in reach), extra, "auto_pad", auto_pad)
        return Axes(steps, spread, shared_out(whole, extra, extents, mode == odd_at_begin), extents)
    if output_shape is None:
        both = tuple(first + last for first, last in zip(begin, end, strict=True))
        return Axes(steps, spread, begin, cropped(whole, begin, end, extra, "pads_begin+pads_end", both))
    extents = integers("output_shape", output_shape, 0, rank)
    if mode.startswith("same") or output_shape_rule == "formula":
        begin = shared_out(whole, extra, extents, mode == odd_at_begin)
    return Axes(steps, spread, begin, extents)


def fields(
    data: Data,
    groups: int,
    out_channels: int,
    kernel: tuple[int, ...],
    axes: Axes,
    *,
    dtype: str,
    precision: str,
    epilogue: Epilogue,
    quantization: Quantization | None,
    data_format: str = "NCX",
    filter_format: str = "IOX",
) -> Fields:
    """Return the fields of a problem; `out_channels` are per group."""
    return {
        "batch": data.batch,
        "groups": groups,
        "in_channels": data.channels // groups,
        "out_channels": out_channels,
        "data_spatial": data.spatial,
        "kernel": kernel,
        "strides": axes.strides,
        "dilations": axes.dilations,
        "pads_begin": axes.pads_begin,
        "output_spatial": axes.output_spatial,
        "dtype": dtype,
        "data_format": data_format,
        "filter_format": filter_format,
        "epilogue": epilogue,
        "dynamic": data.dynamic,
        "precision": precision,
        "buckets": data.buckets,
        "quantization": quantization,
    }
