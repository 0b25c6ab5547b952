"""OpenVINO: ConvolutionBackpropData-1 and GroupConvolutionBackpropData-1."""

from __future__ import annotations

from typing import Literal

from tvm_deconv.problem.checks import integers
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
)
from tvm_deconv.problem.epilogue import Epilogue
from tvm_deconv.problem.quantization import Quantization


def from_openvino(
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
    dtype: str = "float32",
    precision: str = "ieee",
    epilogue: Epilogue = Epilogue(),  # noqa: B008 (frozen)
    quantization: Quantization | None = None,
    output_shape_rule: Literal["runtime", "formula"] = "runtime",
    data_format: Literal["NCX", "NXC"] = "NCX",
) -> Fields:
    """Read ConvolutionBackpropData-1; with a filter of one axis more than the data, GroupConvolutionBackpropData-1.

    Filters are ``[Cin, Cout, *K]`` or ``[G, Cin/G, Cout/G, *K]``; `output_shape` is spatial. With an output_shape and
    without SAME padding, rule "runtime" honours pads_begin (what OpenVINO runs) and "formula" shares the pad out evenly
    (what its documents compute). `data_format` NXC, which OpenVINO lacks, only says where the channels stand.
    """
    data = read_data(data_shape, data_format)
    rank = len(data.spatial)
    grouped = len(integers("filter_shape", filter_shape, 1)) == rank + 3
    rule = f"must have rank {rank + 2}, or {rank + 3} with groups, for data of rank {rank + 2}"
    shape = read_filter(filter_shape, rank + 2 + grouped, rule)
    groups, in_channels, out_channels = shape[:3] if grouped else (1, *shape[:2])
    axis = "groups times input channels" if grouped else "axis 0"
    check_channels(shape, groups * in_channels, data.channels, axis)
    kernel = shape[2 + grouped :]
    axes = read_axes(output_shape, data, lambda extents: read_backprop_data(
        data.spatial, kernel, strides, pads_begin, pads_end, dilations, auto_pad, output_padding, extents,
        output_shape_rule, odd_at_begin="same_upper",
    ))  # fmt: skip
    return fields(
        data, groups, out_channels, kernel, axes, dtype=dtype, precision=precision, epilogue=epilogue,
        quantization=quantization, data_format=data_format, filter_format="GIOX" if grouped else "IOX",
    )  # fmt: skip
