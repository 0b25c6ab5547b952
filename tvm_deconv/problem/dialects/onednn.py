"""oneDNN Graph: ConvolutionBackpropData and ConvTranspose."""

from __future__ import annotations

from typing import Literal

from tvm_deconv.problem.checks import one_of
from tvm_deconv.problem.dialects.attributes import (
    EXPLICIT,
    Fields,
    Ints,
    OutputShape,
    Shape,
    check_channels,
    fields,
    read_axes,
    read_backprop_data,
    read_data,
    read_filter,
    read_groups,
)
from tvm_deconv.problem.epilogue import Epilogue
from tvm_deconv.problem.quantization import Quantization

_CONV_TRANSPOSE = ("XOI", "IOX")  # formats of filters of this operator; the others are ConvolutionBackpropData's


def from_onednn(
    data_shape: Shape,
    filter_shape: Ints,
    *,
    strides: Ints | None,
    pads_begin: Ints | None = None,
    pads_end: Ints | None = None,
    dilations: Ints | None = None,
    auto_pad: str | None = EXPLICIT,
    output_padding: Ints | None = None,
    output_shape: OutputShape | None = None,
    groups: int = 1,
    data_format: Literal["NXC", "NCX"] = "NXC",
    filter_format: Literal["XIO", "OIX", "XOI", "IOX"] = "XIO",
    dtype: str = "float32",
    precision: str = "ieee",
    epilogue: Epilogue = Epilogue(),  # noqa: B008 (frozen)
    quantization: Quantization | None = None,
    output_shape_rule: Literal["runtime", "formula"] = "runtime",
) -> Fields:
    """Read ConvolutionBackpropData or ConvTranspose of oneDNN Graph.

    I and O of a filter format are the forward convolution's: OIX is ``(data channels, Cout/G, *K)`` and XIO is
    ``(*K, Cout/G, data channels)``; ConvTranspose's IOX and XOI are the same memory. `output_shape` is spatial. The
    filter format tells the operators apart: they differ in SAME padding without an output_shape.
    """
    data = read_data(data_shape, data_format)
    rank = len(data.spatial)
    one_of("filter_format", filter_format, ("XIO", "OIX", "XOI", "IOX"))
    shape = read_filter(filter_shape, rank + 2, f"must have rank {rank + 2}, that of the data")
    last = filter_format.startswith("X")
    *kernel, out_channels, in_channels = shape if last else (*shape[2:], shape[1], shape[0])
    check_channels(shape, in_channels, data.channels, f"axis {rank + 1 if last else 0} of {filter_format}")
    groups = read_groups("groups", groups, data.channels)
    axes = read_axes(output_shape, data, lambda extents: read_backprop_data(
        data.spatial, tuple(kernel), strides, pads_begin, pads_end, dilations, auto_pad, output_padding, extents,
        output_shape_rule, odd_at_begin="same_lower", same_without_shape=filter_format in _CONV_TRANSPOSE,
    ))  # fmt: skip
    return fields(
        data, groups, out_channels, tuple(kernel), axes, dtype=dtype, precision=precision, epilogue=epilogue,
        quantization=quantization, data_format=data_format, filter_format=filter_format,
    )  # fmt: skip
