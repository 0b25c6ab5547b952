"""PyTorch: conv_transpose1d, 2d and 3d."""

from __future__ import annotations

from tvm_deconv.errors import ProblemError
from tvm_deconv.problem.arithmetic import uncropped
from tvm_deconv.problem.checks import broadcast, integers
from tvm_deconv.problem.dialects.attributes import (
    Axes,
    Fields,
    Ints,
    Shape,
    check_channels,
    check_static,
    cropped,
    fields,
    read_data,
    read_groups,
)
from tvm_deconv.problem.epilogue import Epilogue
from tvm_deconv.problem.quantization import Quantization


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
    quantization: Quantization | None = None,
) -> Fields:
    """Read conv_transpose1d, 2d or 3d of PyTorch; the filter ``[Cin, Cout/G, *K]`` decides the rank.

    Data without a batch axis become a batch of one. An `output_size`, with or without its channel axes, replaces
    output_padding, as in the modules.
    """
    shape = integers("filter_shape", filter_shape, 1)
    rank = len(shape) - 2
    if not 1 <= rank <= 3:
        raise ProblemError("filter_shape", shape, "must have rank 3, 4 or 5")
    given = data_shape if isinstance(data_shape, (list, tuple)) else integers("data_shape", data_shape, 0)
    if len(given) not in (rank + 1, rank + 2):
        raise ProblemError("data_shape", given, f"must have rank {rank + 2}, or {rank + 1} without a batch")
    data = read_data(given if len(given) == rank + 2 else (1, *given))
    check_static("output_size", output_size, data)
    check_channels(shape, shape[0], data.channels, "axis 0")
    groups = read_groups("groups", groups, data.channels)
    kernel = shape[2:]
    steps = broadcast("stride", stride, rank, 1)
    spread = broadcast("dilation", dilation, rank, 1)
    pads = broadcast("padding", padding, rank, 0)
    whole = uncropped(data.spatial, kernel, steps, spread)
    extra = broadcast("output_padding", output_padding, rank, 0)
    if output_size is not None:
        smallest = cropped(whole, pads, pads, (0,) * rank, "padding", pads)
        extra = _output_padding(output_size, len(given), smallest, steps)
    elif any(more >= max(s, d) for more, s, d in zip(extra, steps, spread, strict=True)):
        raise ProblemError("output_padding", extra, "must be smaller than the stride or the dilation of its axis")
    axes = Axes(steps, spread, pads, cropped(whole, pads, pads, extra, "padding", pads))
    return fields(
        data, groups, shape[1], kernel, axes, dtype=dtype, precision=precision, epilogue=epilogue,
        quantization=quantization,
    )  # fmt: skip


def _output_padding(
    output_size: Ints, data_rank: int, smallest: tuple[int, ...], strides: tuple[int, ...]
) -> tuple[int, ...]:
    """Return the output_padding that makes an output of that size; without any, it is `smallest`."""
    rank = len(smallest)
    size = integers("output_size", output_size, 0)
    if len(size) not in (rank, data_rank):
        raise ProblemError("output_size", size, f"must have {rank} or {data_rank} elements")
    extra = tuple(extent - small for extent, small in zip(size[-rank:], smallest, strict=True))
    if not all(0 <= more < stride for more, stride in zip(extra, strides, strict=True)):
        largest = tuple(small + stride - 1 for small, stride in zip(smallest, strides, strict=True))
        raise ProblemError("output_size", size, f"must lie between {smallest} and {largest}")
    return extra
