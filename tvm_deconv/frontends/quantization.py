"""Constants that a model stores as integers, and the arithmetic that makes numbers of them."""

from __future__ import annotations

import numpy as np

from tvm_deconv.problem import Array


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
