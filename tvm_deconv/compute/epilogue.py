"""Activations as expressions of TE that vectorise.

TVM lowers exp, tanh and erf to one call of the C library per lane. For float32 they are therefore written out here as
arithmetic on vectors. All use one exponential: ``exp(v) = 2**n * (1 + (exp(r) - 1))``, where ``n`` is the integer
nearest to ``v / ln 2`` and ``r`` is the rest. A polynomial of degree 6 computes ``exp(r) - 1``. The bits of ``2**n``
come from the sum that rounds ``v / ln 2``, so ``n = -127`` gives 0 and ``n = 128`` gives infinity: results that
underflow or overflow arrive at their limits.

A new activation needs a row in `_EXPRESSIONS`, besides its record in `tvm_deconv.problem.activations`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.ir import Expr

from tvm_deconv.problem import Epilogue

# Adding 1.5 * 2**23, with the bits beside it, to a number rounds it to an integer, in the low bits and halves to even.
# 127 is an exponent's bias.
_INTEGER, _INTEGER_BITS = 12582912.0, 0x4B400000
_ROUND = _INTEGER + 127.0
_LOG2_E = 1.4426950408889634
# ln 2 in two parts; the first has 16 bits, so that its product with n is exact.
_LN_2 = (0.693145751953125, 1.4286068202862268e-06)
# Least greatest error of 1 + r*w(r) against expm1(r)/r on -0.44 <= r <= 0.3475: 2.9e-8; coefficients rising from 1.
_EXPM1 = (1.0, 0.4999998, 0.16666517, 0.041674867, 0.008369078, 0.0013344256)
# Least greatest error of P(a)/Q(a) against exp(a*a/2) * Phi(-a) on 0 <= a <= 13.26: 1.1e-8; coefficients rising.
_TAIL_P = (0.5, 0.43559295, 0.18123798, 0.039961085, 0.004016787)
_TAIL_Q = (1.0, 1.6690708, 1.1941977, 0.46419883, 0.100175, 0.010068447)
# Least greatest error of the sum of c*w**i against 2*atanh(z)/z, w = z*z <= 1/9: 5.4e-9; coefficients rising from 2.
_ATANH = (2.0, 0.6666642, 0.40021527, 0.28001806, 0.28011987)


class Let:
    """Names for subexpressions: one that is used twice is written once.

    A named value has no names of its own within: TVM writes constant values in place of their names, and would have
    names within them twice.
    """

    def __init__(self) -> None:
        self._bound: list[tuple[Any, Expr]] = []

    def __call__(self, value: Expr) -> Expr:
        """Return a name for `value`."""
        variable = tirx.Var(f"t{len(self._bound)}", str(value.ty.dtype))
        self._bound.append((variable, value))
        return variable

    def around(self, result: Expr) -> Expr:
        """Return `result` with the values of all names."""
        for variable, value in reversed(self._bound):
            result = tirx.Let(variable, value, result)
        return result


def activate(epilogue: Epilogue, x: Expr) -> Expr:
    """Return the activation of `epilogue` at `x`, which is float32, float64 or int32.

    NaN stays NaN and an infinity gives the limit, which is 0 for silu, gelu, hardswish and mish at minus infinity.

    The greatest error in float32, relative to the result, over every float between 2**-28 and 128 in magnitude:

    - elu: 1.3e-7 (1.5 ulp) with alpha 1, 1.6e-7 (2.1 ulp) with alpha 0.3
    - sigmoid and silu: 1.8e-7 (2.5 ulp)
    - hardswish: 1.8e-7 (2.5 ulp)
    - tanh: 2.4e-7 (3.6 ulp)
    - softplus: 2.8e-7 (3.8 ulp)
    - mish: 3.1e-7 (4.7 ulp)
    - gelu: 4.4e-7 (6.3 ulp)

    Besides, results below 4e-37 may become 0, those of mish below 8e-37. relu, leaky_relu and clip are exact. In
    float64 most activations call exp, expm1, log1p, tanh and erfc of the C library, lane by lane.
    """
    let = Let()
    return let.around(activated(let, epilogue, x))


def activated(let: Let, epilogue: Epilogue, x: Expr) -> Expr:
    """Return the same as `activate`, with names of `let`, which goes around all that is made of the result."""
    x = tirx.convert(x)  # a TensorSlice is no Expr
    if epilogue.activation == "none":
        return x
    expression, double = _EXPRESSIONS[epilogue.activation]
    dtype = str(x.ty.dtype)
    parameters = epilogue.parameters.values()
    if dtype == "float64" and double is not None:
        return double(x, *(_f64(value) for value in parameters))
    x = let(x)
    return expression(let, x, *(_constant(value, dtype) for value in parameters))


def nearest(x: Expr, least: Expr | None, most: Expr) -> Expr:
    """Return the int32 nearest to `x`, halves to even, at least `least` and at most `most`; all three are float32.

    Both bounds are integers below 2**22 in magnitude, and None one that `x` cannot be less than. `x` is no NaN, and may
    be infinite.
    """
    # Each names `x` once. With two selects, which name it twice each, a layer with mish took a minute to compile.
    bounded = tirx.min(x if least is None else tirx.max(x, least), most)
    # The sum has the integer in its low bits. TVM makes no vectors of its own rounding.
    return _bits(bounded + _f32(_INTEGER)) - tirx.const(_INTEGER_BITS, "int32")


def _constant(value: float, dtype: str) -> Expr:
    """Return `value` as a constant of `dtype`; in float32, infinity if it is too large."""
    if dtype == "int32":
        return tirx.const(int(value), dtype)
    return tirx.const(ctypes.c_float(value).value if dtype == "float32" else value, dtype)


def _like(x: Expr, value: float) -> Expr:
    """Return `value` in the type of `x`."""
    return _constant(value, str(x.ty.dtype))


# In both of these a NaN in x fails the comparison and stays; LLVM makes them one vmaxps or vminps.
def _at_least(x: Expr, bound: Expr) -> Expr:
    return tirx.Select(x < bound, bound, x)


def _at_most(x: Expr, bound: Expr) -> Expr:
    return tirx.Select(x > bound, bound, x)


def _f32(value: float) -> Expr:
    return _constant(value, "float32")


def _bits(x: Expr) -> Expr:
    return tirx.reinterpret("int32", x)


def _horner(coefficients: tuple[float, ...], x: Expr) -> Expr:
    result = _f32(coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        result = result * x + _f32(coefficient)
    return result


def _exponential(let: Let, v: Expr, rest: Expr | None = None) -> tuple[Expr, Expr]:
    """Return ``(m, s)`` with ``exp(v + rest) = s*m + s``, for ``-88.3 < v < 89`` and ``-0.09 < rest <= 0``.

    `s` is a power of two, 0 below -87.7 and infinity above 88.4; `m` is accurate in relative terms and has the sign of
    zero of `v`.
    """
    # Through the integer, since TVM's simplifier would cancel a constant that is added and subtracted again.
    bits = let(_bits(v * _f32(_LOG2_E) + _f32(_ROUND)))
    n = let(tirx.reinterpret("float32", bits) - _f32(_ROUND))
    r = v - n * _f32(_LN_2[0]) - n * _f32(_LN_2[1])
    r = let(r if rest is None else r + rest)
    s = let(tirx.reinterpret("float32", bits << tirx.const(23, "int32")))
    return let(_horner(_EXPM1, r) * r), s


def _relu(_: Let, x: Expr) -> Expr:
    return _at_least(x, _like(x, 0))


def _leaky_relu(_: Let, x: Expr, alpha: Expr) -> Expr:
    return tirx.Select(x < _like(x, 0), alpha * x, x)


def _clip(let: Let, x: Expr, minimum: Expr, maximum: Expr) -> Expr:
    return _at_most(let(_at_least(x, minimum)), maximum)


def _hardswish(let: Let, x: Expr) -> Expr:
    x = let(_at_least(x, _like(x, -3)))
    # Scaled before the product, which would overflow; 6 times the constant rounds to 1, so x above 3 is exact.
    return x * (_at_most(x + _like(x, 3), _like(x, 6)) * _like(x, 1 / 6))


def _one_plus_exp_minus(let: Let, x: Expr) -> Expr:
    """Return ``1 + exp(-x)`` for ``x >= -88.9``."""
    m, s = _exponential(let, let(_at_most(x, _f32(88)) * _f32(-1)))
    return (m + _f32(1)) * s + _f32(1)


def _sigmoid(let: Let, x: Expr) -> Expr:
    return _f32(1) / _one_plus_exp_minus(let, let(_at_least(x, _f32(-88.9))))


def _silu(let: Let, x: Expr) -> Expr:
    x = let(_at_least(x, _f32(-88.9)))
    return x / _one_plus_exp_minus(let, x)


def _tanh(let: Let, x: Expr) -> Expr:
    x = let(_at_most(_at_least(x, _f32(-10)), _f32(10)))
    m, s = _exponential(let, let(x + x))
    e = let(m * s - (_f32(1) - s))  # exp(2x) - 1; this order keeps the sign of zero
    return e / (e + _f32(2))


def _gelu(let: Let, x: Expr) -> Expr:
    """Return ``x*Phi(x) = max(x, 0) - a*Phi(-a)`` with ``a = |x|``, and ``Phi(-a) = exp(-a*a/2) * P(a)/Q(a)``."""
    a = let(_at_most(tirx.abs(x), _f32(13.25)))
    # The upper 12 bits of a have an exact square; without that the error would grow with the square.
    upper = let(tirx.reinterpret("float32", _bits(a) & tirx.const(~0xFFF, "int32")))
    m, s = _exponential(let, let(upper * upper * _f32(-0.5)), (a - upper) * (a + upper) * _f32(-0.5))
    return _at_least(x, _f32(0)) - (m * s + s) * (a * _horner(_TAIL_P, a)) / _horner(_TAIL_Q, a)


def _elu(let: Let, x: Expr, alpha: Expr) -> Expr:
    """Return ``alpha * (exp(x) - 1)`` below 0, and x above; from -20 down the factor is -1."""
    m, s = _exponential(let, let(_at_most(let(_at_least(x, _f32(-20))), _f32(0))))
    return tirx.Select(x < _f32(0), alpha * (m * s - (_f32(1) - s)), x)


def _exp_minus_magnitude(let: Let, x: Expr) -> Expr:
    """Return ``exp(-|x|)``, from 0 to 1."""
    m, s = _exponential(let, let(_at_most(tirx.abs(x), _f32(88)) * _f32(-1)))
    return let(m * s + s)


def _softplus(let: Let, x: Expr) -> Expr:
    """Return ``max(x, 0) + log(1 + e)`` with ``e = exp(-|x|)``, and ``log(1 + e) = 2 atanh(e / (2 + e))``."""
    e = _exp_minus_magnitude(let, x)
    z = let(e / (e + _f32(2)))
    return _at_least(x, _f32(0)) + z * _horner(_ATANH, let(z * z))


def _mish(let: Let, x: Expr) -> Expr:
    """Return ``x * p / (p + q)`` with ``p = (1 + exp(x))**2 - 1`` and ``q = 2``, both times ``e**2`` if x is positive.

    Here ``e = exp(-|x|)``. All terms are positive, so nothing cancels.
    """
    x = let(_at_least(x, _f32(-88.9)))
    e = _exp_minus_magnitude(let, x)
    negative = x < _f32(0)
    p = let(tirx.Select(negative, e * (e + _f32(2)), e + e + _f32(1)))
    return x * p / (p + tirx.Select(negative, _f32(2), (e + e) * e))


def _libm(name: str, x: Expr) -> Expr:
    return tirx.call_pure_extern("float64", name, x)


def _f64(value: float) -> Expr:
    return tirx.const(value, "float64")


# The vectoriser unrolls these into lanes, and then rejects a let around them in some places. So they repeat x.
def _sigmoid_double(x: Expr) -> Expr:
    return _f64(1) / (_f64(1) + _libm("exp", _f64(0) - x))


def _silu_double(x: Expr) -> Expr:
    x = _at_least(x, _f64(-800))
    return x / (_f64(1) + _libm("exp", _f64(0) - x))


def _tanh_double(x: Expr) -> Expr:
    return _libm("tanh", x)


def _gelu_double(x: Expr) -> Expr:
    x = _at_least(x, _f64(-40))
    return x * _f64(0.5) * _libm("erfc", x * _f64(-(0.5**0.5)))


def _elu_double(x: Expr, alpha: Expr) -> Expr:
    return tirx.Select(x < _f64(0), alpha * _libm("expm1", x), x)


def _softplus_double(x: Expr) -> Expr:
    return _at_least(x, _f64(0)) + _libm("log1p", _libm("exp", _f64(0) - tirx.abs(x)))


def _mish_double(x: Expr) -> Expr:
    x = _at_least(x, _f64(-800))
    return x * _libm("tanh", _libm("log1p", _libm("exp", x)))


#: name of an activation -> its expression, and another one for float64 where that calls the C library
_EXPRESSIONS: dict[str, tuple[Callable[..., Expr], Callable[..., Expr] | None]] = {
    "relu": (_relu, None),
    "leaky_relu": (_leaky_relu, None),
    "sigmoid": (_sigmoid, _sigmoid_double),
    "tanh": (_tanh, _tanh_double),
    "gelu": (_gelu, _gelu_double),
    "silu": (_silu, _silu_double),
    "clip": (_clip, None),
    "elu": (_elu, _elu_double),
    "hardswish": (_hardswish, None),
    "mish": (_mish, _mish_double),
    "softplus": (_softplus, _softplus_double),
}
