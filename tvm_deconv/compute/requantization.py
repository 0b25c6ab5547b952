"""Quantized problems in tensor expressions: what stands for nothing, and the way from sums to stored outputs.

The numbers of `tvm_deconv.problem.quantization.Constants` reach a kernel as one table in the place of the bias. All
stages keep elements of 32 bits: outputs are int32 until the last one stores them, also the bits of float32.
"""

from __future__ import annotations

import numpy as np
from tvm import te, tirx
from tvm.ir import Expr
from tvm.tirx import Buffer

from tvm_deconv.compute.epilogue import Let, activate, activated, nearest
from tvm_deconv.compute.extents import shape_of
from tvm_deconv.compute.storage import from_accumulator
from tvm_deconv.problem import Problem
from tvm_deconv.problem.quantization import HEAD, MOST_FACTOR, STORED, scales_once


def epilogue_parameter(problem: Problem) -> te.Tensor | None:
    """Return the parameter between packed filter and output: the table of a quantized problem, the bias, or None."""
    if problem.quantization:
        return te.placeholder(shape_of((HEAD + 2 * problem.bias_shape[0],)), "int32", "constants")
    if problem.epilogue.bias:
        return te.placeholder(shape_of(problem.bias_shape), problem.accumulate_dtype, "bias")
    return None


def bias_at(problem: Problem, parameter: te.Tensor, channel: Expr) -> Expr:
    """Return the bias of a `channel`, counted over all groups."""
    bias: Expr = parameter[channel + HEAD] if problem.quantization else parameter[channel]
    return bias


def known_bias_at(problem: Problem, parameter: te.Tensor, channel: Expr) -> Expr:
    """Return `bias_at`; if outputs are bfloat16, with NaN of that type, as `stored` expects them."""
    bias = bias_at(problem, parameter, channel)
    if problem.output_dtype != "bfloat16":
        return bias
    # As integers: among floats LLVM may return one NaN in the place of another.
    bits = tirx.reinterpret("int32", bias)
    is_nan = (bits & tirx.const(0x7FFFFFFF, "int32")) > tirx.const(0x7F800000, "int32")
    return tirx.reinterpret("float32", tirx.Select(is_nan, tirx.const(0x7FC00000, "int32"), bits))


def data_zero_point(problem: Problem, parameter: te.Tensor | None) -> Expr | None:
    """Return the zero point of the data; None if the problem is not quantized."""
    if not problem.quantization:
        return None
    assert parameter is not None
    zero: Expr = parameter[tirx.const(0, "int64")]
    return zero


def has_scales(problem: Problem) -> bool:
    """Tell whether sums are multiplied by a scale of their channel."""
    return problem.quantization is not None and problem.output_dtype != "int32"


def scale_at(problem: Problem, parameter: te.Tensor | None, channel: Expr) -> Expr:
    """Return the bits of the factor of a `channel`, counted over all groups; for problems of `has_scales`.

    It is the scale of the sums, by 1 / the output's scale where `scales_once` says so.
    """
    assert parameter is not None
    scale: Expr = parameter[channel + (HEAD + problem.bias_shape[0])]
    if not scales_once(problem):
        return scale
    factor = tirx.reinterpret("float32", scale) * _inverse(parameter)
    return tirx.reinterpret("int32", tirx.min(factor, tirx.const(MOST_FACTOR, "float32")))


def finished(
    problem: Problem, sums: Expr, parameter: te.Tensor | Buffer | None, scale: Expr | None, *, saturates: bool = True
) -> Expr:
    """Return the activation of `sums`, bias included; of a quantized problem in 32 bits for `stored`.

    `scale` is `scale_at` their channel. Sums may be integers in float32. Unless it `saturates`, what becomes bytes
    is without the zero point, not more than these hold, and not bounded below. Only x86 has that.
    """
    sums = tirx.convert(sums)
    if scale is None:
        return activate(problem.epilogue, sums.astype(problem.accumulate_dtype))
    assert parameter is not None
    let = Let()
    real = activated(let, problem.epilogue, sums.astype("float32") * tirx.reinterpret("float32", scale))
    if problem.output_dtype not in STORED:
        return let.around(tirx.reinterpret("int32", real))
    if not scales_once(problem):
        real = real * _inverse(parameter)
    zero, limits = output_zero_point(parameter), np.iinfo(problem.output_dtype)
    least, most = ((tirx.const(limit, "int32") - zero).astype("float32") for limit in (limits.min, limits.max))
    if not saturates:
        # Of less than 32 bits hold, the instruction makes the least integer.
        return let.around(tirx.call_llvm_pure_intrin("int32", "llvm.lrint", tirx.min(real, most)))
    # Zero points are in the range of their type: what is stored for zero is not less than the least number.
    return let.around(nearest(real, None if problem.epilogue.activation == "relu" else least, most) + zero)


def output_zero_point(parameter: te.Tensor | Buffer) -> Expr:
    """Return the zero point of the output of a quantized problem."""
    zero: Expr = parameter[tirx.const(1, "int64")]
    return zero


def _inverse(parameter: te.Tensor | Buffer) -> Expr:
    """Return 1 / the scale of the output."""
    return tirx.reinterpret("float32", parameter[tirx.const(2, "int64")])


def stored(problem: Problem, value: Expr, lanes: int = 1) -> Expr:
    """Return a finished `value`, or a vector of several `lanes`, in the type of the output.

    NaN of bfloat16 must be of that type, which holds on x86: operations pass on those of the data and the bias.
    """
    if problem.quantization and problem.output_dtype == "float32":
        return tirx.reinterpret("float32" + (f"x{lanes}" if lanes > 1 else ""), value)
    return from_accumulator(value, problem.output_dtype, lanes, any_nan=False)
