"""ONNX: ConvTranspose, by the text of opset 11 and later."""

from __future__ import annotations

from tvm_deconv.errors import ProblemError
from tvm_deconv.problem.arithmetic import uncropped
from tvm_deconv.problem.checks import integers
from tvm_deconv.problem.dialects.attributes import (
    EXPLICIT,
    Axes,
    Fields,
    Ints,
    OutputShape,
    Shape,
    auto_pad_mode,
    check_channels,
    cropped,
    fields,
    optional,
    read_axes,
    read_data,
    read_filter,
    read_groups,
    shared_out,
)
from tvm_deconv.problem.epilogue import Epilogue
from tvm_deconv.problem.quantization import Quantization


def from_onnx(
    data_shape: Shape,
    filter_shape: Ints,
    *,
    strides: Ints | None = None,
    pads: Ints | None = None,
    dilations: Ints | None = None,
    auto_pad: str | None = "NOTSET",
    output_padding: Ints | None = None,
    output_shape: OutputShape | None = None,
    group: int = 1,
    kernel_shape: Ints | None = None,
    dtype: str = "float32",
    precision: str = "ieee",
    epilogue: Epilogue = Epilogue(),  # noqa: B008 (frozen)
    quantization: Quantization | None = None,
) -> Fields:
    """Read ConvTranspose of ONNX.

    The filter is ``[Cin, Cout/G, *K]``, `pads` are all begins and then all ends, `output_shape` is spatial. `pads` are
    ignored where auto_pad or output_shape decide.
    """
    data = read_data(data_shape)
    rank = len(data.spatial)
    shape = read_filter(filter_shape, rank + 2, f"must have rank {rank + 2}, that of the data")
    check_channels(shape, shape[0], data.channels, "axis 0")
    groups = read_groups("group", group, data.channels)
    kernel = shape[2:]
    if kernel_shape is not None and integers("kernel_shape", kernel_shape, 1, rank) != kernel:
        raise ProblemError("kernel_shape", kernel_shape, f"must be that of the filter, {kernel}")
    axes = read_axes(output_shape, data, lambda extents: _axes(
        data.spatial, kernel, strides, pads, dilations, auto_pad, output_padding, extents,
    ))  # fmt: skip
    return fields(
        data, groups, shape[1], kernel, axes, dtype=dtype, precision=precision, epilogue=epilogue,
        quantization=quantization,
    )  # fmt: skip


def _axes(
    spatial: tuple[int, ...],
    kernel: tuple[int, ...],
    strides: Ints | None,
    pads: Ints | None,
    dilations: Ints | None,
    auto_pad: str | None,
    output_padding: Ints | None,
    output_shape: Ints | None,
) -> Axes:
    """Read the attributes per axis."""
    rank = len(spatial)
    steps = optional("strides", strides, 1, rank, 1)
    spread = optional("dilations", dilations, 1, rank, 1)
    extra = optional("output_padding", output_padding, 0, rank, 0)
    ends = (() if pads is None else integers("pads", pads, 0)) or (0,) * (2 * rank)
    if len(ends) != 2 * rank:
        raise ProblemError("pads", ends, f"must have {2 * rank} elements: the begins and then the ends of {rank} axes")
    mode = auto_pad_mode(auto_pad)
    whole = uncropped(spatial, kernel, steps, spread)
    if output_shape is None and not mode.startswith("same"):
        begin, end = (ends[:rank], ends[rank:]) if mode == EXPLICIT else ((0,) * rank, (0,) * rank)
        return Axes(steps, spread, begin, cropped(whole, begin, end, extra, "pads", ends))
    if output_shape is None:
        extents = tuple(x * s for x, s in zip(spatial, steps, strict=True))
    else:
        extents = integers("output_shape", output_shape, 0, rank)
    return Axes(steps, spread, shared_out(whole, extra, extents, mode != "same_upper"), extents)
