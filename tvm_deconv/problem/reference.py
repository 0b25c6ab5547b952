"""The meaning of a problem as a program: the scatter form in float64, in NumPy alone, product by product."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt

from tvm_deconv.errors import TensorError, TensorTypeError
from tvm_deconv.problem.activations import ACTIVATIONS
from tvm_deconv.problem.problem import Array, Problem, check_problem
from tvm_deconv.problem.quantization import (
    MOST_FACTOR,
    STORED,
    Constants,
    Scaling,
    check_unscaled,
    constants,
    scales_once,
    without_zero_points,
)

Float64 = npt.NDArray[np.float64]


def _float64(argument: str, value: object, shape: tuple[int, ...], dtype: str) -> Float64:
    """Return `value` in float64; for a bfloat16 problem, uint16 holds the bits of bfloat16."""
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        rule = f"must be readable as a NumPy array: {error}"
        raise TensorTypeError(argument, type(value).__qualname__, rule) from error
    bits = dtype == "bfloat16" and array.dtype == np.uint16
    exact = dtype in ("int8", "uint8", "int32")
    # bfloat16 and its like come from outside NumPy (2); they convert to float64 without loss.
    kind = "f" if array.dtype.isbuiltin == 2 else array.dtype.kind
    if kind not in ("iu" if exact else "iuf"):
        rule = f"must hold {'integers' if exact else 'real numbers'}, since the type here is {dtype}"
        raise TensorTypeError(argument, str(array.dtype), rule)
    if array.shape != shape:
        raise TensorError(argument, array.shape, f"must have shape {shape}")
    if bits:
        array = (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float64)


def reference(p: Problem, data: object, filter: object, bias: object = None, scaling: Scaling | None = None) -> Float64:
    """Return the result of `p`, epilogue included, as a float64 array of shape `p.output_shape`.

    `data` is in `p.data_format` and `filter` in `p.filter_format`. Arrays may have any real dtype, but integer problems
    take integers only, and bfloat16 problems read uint16 as the bits of bfloat16. NaN and infinity take part in every
    product as IEEE 754 says. A quantized problem takes its `scaling`. Raises TensorError, ProblemError.
    """
    check_problem(p)
    x = _float64("data", data, p.data_shape, p.dtype)
    w = p.canonical_filter(_float64("filter", filter, p.filter_shape, p.filter_dtype))
    if p.epilogue.bias != (bias is not None):
        rule = "must be given: the epilogue has one" if p.epilogue.bias else "must be left out: the epilogue has none"
        raise TensorError("bias", None if bias is None else "an array", rule)
    values = None if bias is None else _float64("bias", bias, p.bias_shape, p.accumulate_dtype)
    if p.quantization is not None:
        numbers = constants(p, scaling, values)
        return quantized(p, x, without_zero_points(p, scaling, w), numbers)
    check_unscaled(scaling)
    out = _sums(p, x, w)
    with np.errstate(all="ignore"):
        if values is not None:
            out += _along_channels(p, values)
        out = ACTIVATIONS[p.epilogue.activation].function(out, *p.epilogue.parameters.values())
    return _in_format(p, out)


def quantized(p: Problem, data: Array, filter: Array, numbers: Constants) -> Float64:
    """Return the result of a quantized problem from stored `data` and a canonical filter without zero points.

    Sums are exact. All that follows is rounded to float32 after each operation.
    """
    out = _sums(p, data.astype(np.float64) - numbers.data_zero_point, filter.astype(np.float64))
    out += _along_channels(p, numbers.bias)
    parameters = p.epilogue.parameters.values()
    function = ACTIVATIONS[p.epilogue.activation].function
    if p.output_dtype == "int32":
        return _in_format(p, function(out, *parameters))
    with np.errstate(all="ignore"):
        factors, inverse = numbers.scales, numbers.inverse
        if scales_once(p):
            factors, inverse = np.minimum(factors * inverse, np.float32(MOST_FACTOR)), np.float32(1)
        real = out.astype(np.float32) * _along_channels(p, factors)
        # In float64, rounded once: a product of float32 numbers then is that of float32.
        active = function(real.astype(np.float64), *map(float, map(np.float32, parameters))).astype(np.float32)
        if p.output_dtype in STORED:
            limits, zero = np.iinfo(p.output_dtype), numbers.output_zero_point
            stored = np.rint(active * inverse).astype(np.float64) + zero
            return _in_format(p, np.clip(stored, limits.min, limits.max))
    return _in_format(p, active.astype(np.float64))


def _along_channels(p: Problem, values: Array) -> Array:
    return values.reshape(-1, *(1,) * p.rank)


def _in_format(p: Problem, out: Float64) -> Float64:
    """Return an output whose channels come first in the format of the problem."""
    return np.ascontiguousarray(np.moveaxis(out, 1, -1)) if p.data_format == "NXC" else out


def _sums(p: Problem, x: Float64, w: Float64) -> Float64:
    """Return the sums of products, ``[N, G*Co, *Y]``; `x` is in the problem's format and `w` canonical."""
    if p.data_format == "NXC":
        x = np.moveaxis(x, -1, 1)
    x = x.reshape(p.batch, p.groups, p.in_channels, *p.data_spatial)
    # The batch goes inside, so that a tap is one matrix product per group.
    x = np.moveaxis(x, 0, 2).reshape(p.groups, p.in_channels, -1)
    w = np.ascontiguousarray(w.transpose(*range(3, 3 + p.rank), 0, 2, 1))  # [*K, G, Co, Ci]
    out = np.zeros((p.batch, p.groups, p.out_channels, *p.output_spatial))
    with np.errstate(all="ignore"):
        for tap in itertools.product(*map(range, p.kernel)):
            _scatter(p, tap, x, w[tap], np.moveaxis(out, 0, 2))
    return out.reshape(p.batch, p.groups * p.out_channels, *p.output_spatial)


def _scatter(p: Problem, tap: tuple[int, ...], x: Float64, w: Float64, out: Float64) -> None:
    """Add the products with one kernel element, `w`, to the output positions they reach; axis 2 is the batch."""
    reaches = [p.reach(axis, k) for axis, k in enumerate(tap)]
    if not all(reaches):
        return
    source: list[Any] = [...]
    target: list[Any] = [...]
    for axis, (k, reach) in enumerate(zip(tap, reaches, strict=True)):
        s, shift = p.strides[axis], p.dilations[axis] * k - p.pads_begin[axis]
        source.append(slice(reach.start, reach.stop))
        target.append(slice(s * reach.start + shift, s * reach[-1] + shift + 1, s))
    products = (w @ x).reshape(p.groups, p.out_channels, p.batch, *p.data_spatial)
    out[tuple(target)] += products[tuple(source)]
