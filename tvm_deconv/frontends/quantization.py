"""Constants that a model stores as integers, the arithmetic that makes numbers of them, and layers on integers."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np

from tvm_deconv.errors import DeconvError
from tvm_deconv.frontends.layers import FoundLayer
from tvm_deconv.problem import Array, Quantization, Scaling
from tvm_deconv.problem.quantization import STORED, constants


class Stored(NamedTuple):
    """How integers of the type `dtype` stand for numbers: one scale and zero point, or one of each output channel."""

    dtype: str
    scale: Array
    zero_point: Array


def quantized(
    layer: FoundLayer, data: Stored, integers: Array, filter: Stored, output: Stored | None
) -> FoundLayer | str:
    """Return a float32 `layer` on integers, or the reason why it stays one of float32.

    `integers` are the filter, in the problem's format. Without a stored `output` the result is float32.
    """
    problem = layer.problem
    assert problem is not None
    types = (data.dtype, filter.dtype, *([output.dtype] if output else []))
    if problem.dtype != "float32" or not set(types) <= set(STORED):
        return f"integers of {', '.join(types)} are not all {' or '.join(STORED)}"
    if integers.dtype.name != filter.dtype:
        return f"filter={integers.dtype}: must be of the type of its zero point, {filter.dtype}"
    for name, stored in (("data", data), ("output", output)):
        if stored is not None and stored.scale.size != 1:
            return f"{name}_scale={stored.scale.shape}: must be one number in quantized problems"
    if problem.epilogue.bias and layer.bias is None:
        return "its bias is no constant"
    integers, filter = _without_zero_points(integers, filter)
    count = problem.groups if filter.scale.size == problem.out_channels else 1
    scaling = Scaling(
        data.scale.item(),
        data.zero_point.item(),
        filter.scale.item() if filter.scale.size == 1 else np.tile(filter.scale.reshape(-1), count),
        filter.zero_point.item() if filter.zero_point.size == 1 else np.tile(filter.zero_point.reshape(-1), count),
        output.scale.item() if output else 1.0,
        output.zero_point.item() if output else 0,
    )
    quantization = Quantization(filter.dtype, output.dtype if output else "float32")
    try:
        made = problem.replace(dtype=data.dtype, quantization=quantization)
        constants(made, scaling, None)
    except DeconvError as error:
        return str(error)
    unit = np.broadcast_to(scaling.data_scale * np.asarray(scaling.filter_scale, np.float64), problem.bias_shape)
    bias = None
    if layer.bias is not None:
        bias = _in_units(layer.bias, unit, output.scale.item() / 64 if output else unit / 1000)
        if bias is None:
            far = layer.bias[np.argmax(np.abs(np.nan_to_num(layer.bias, nan=np.inf)))]
            return f"bias={far}: must be int32 in units of data and filter"
    try:
        constants(made, scaling, bias)
    except DeconvError as error:
        return str(error)
    return dataclasses.replace(layer, problem=made, filter=integers, bias=bias, scaling=scaling, note="")


@np.errstate(all="ignore")  # what does not fit is looked for
def levels_of(low: Array, high: Array, levels: int) -> Stored | None:
    """Return `levels` numbers from `low` to `high` as uint8; None if there are none, or 0 is none of them."""
    scale = (high.astype(np.float64) - low) / (levels - 1)
    place = -low.astype(np.float64) / scale
    zero = np.rint(place)
    if not scale.size or not np.all((scale > 0) & (np.abs(place - zero) < 1e-3)):
        return None
    return Stored("uint8", scale, zero.astype(np.int64))


@np.errstate(all="ignore")  # what does not fit is looked for
def _in_units(bias: Array, unit: Array, most: Array | float) -> Array | None:
    """Return `bias` in int32, in these units; None if rounding changes it by more than `most`, or 32 bits are few."""
    whole = np.rint(bias.astype(np.float64) / unit)
    if not np.all(np.abs(whole) < 2.0**31) or not np.all(np.abs(whole * unit - bias) <= most):
        return None
    made: Array = whole.astype(np.int32)
    return made


def _without_zero_points(integers: Array, filter: Stored) -> tuple[Array, Stored]:
    """Return the filter as int8 if that needs no zero points, else as uint8: 128 more, or less, stands for the same."""
    zeros = set(np.unique(filter.zero_point).tolist())
    if (filter.dtype, zeros) == ("uint8", {128}) or (filter.dtype == "int8" and zeros != {0}):
        other = "int8" if filter.dtype == "uint8" else "uint8"
        shift = -128 if other == "int8" else 128
        moved = (integers.astype(np.int16) + shift).astype(other)
        return moved, Stored(other, filter.scale, filter.zero_point.astype(np.int64) + shift)
    return integers, filter


@np.errstate(all="ignore")  # values that do not fit become what NumPy makes of them
def dequantized(value: Array, scale: Array, zero_point: Array | None, axis: int) -> Array | None:
    """Return ``(value - zero_point) * scale``, in the type of `scale`, as DequantizeLinear of ONNX computes it.

    Scale and zero point are single numbers or one for each position along `axis`. Returns None if they are neither.
    """
    operands = []
    for operand in (scale, np.zeros((), np.int32) if zero_point is None else zero_point):
        shape = [1] * value.ndim
        if operand.size != 1:
            if operand.ndim != 1 or not -value.ndim <= axis < value.ndim or operand.size != value.shape[axis]:
                return None
            shape[axis] = operand.size
        operands.append(operand.reshape(shape))
    wide, zero = (array.astype(np.int32) if array.dtype.kind in "iu" else array for array in (value, operands[1]))
    made: Array = (wide - zero).astype(scale.dtype) * operands[0]
    return made


@np.errstate(all="ignore")
def fake_quantized(value: Array, low: Array, high: Array, least: Array, most: Array, levels: int) -> Array:
    """Return what FakeQuantize of OpenVINO makes of `value`: one of `levels` numbers from `least` to `most`.

    They stand for the range from `low` to `high`; all four broadcast against `value`.
    """
    place = np.rint((value - low) / (high - low) * (levels - 1))
    made = place / (levels - 1) * (most - least) + least
    made = np.where(value <= np.minimum(low, high), least, made)
    clipped: Array = np.where(value > np.maximum(low, high), most, made).astype(value.dtype)
    return clipped
