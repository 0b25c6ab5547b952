"""The activation of an epilogue as an expression that TE takes."""

from __future__ import annotations

import math

import numpy as np
from tvm import tirx
from tvm.ir import Expr

from tvm_deconv.problem import Epilogue


def activate(epilogue: Epilogue, x: Expr) -> Expr:
    """The activation of `epilogue` at `x`, which is float32, float64 or int32 (none, relu and clip only).

    NaN stays NaN.
    """
    x = tirx.convert(x)  # a TensorSlice is no Expr
    dtype = str(x.ty.dtype)

    def number(value: float) -> Expr:
        return tirx.const(int(value) if dtype == "int32" else float(np.dtype(dtype).type(value)), dtype)

    match epilogue.activation:
        case "relu":
            return tirx.Select(x < number(0), number(0), x)
        case "leaky_relu":
            return tirx.Select(x < number(0), number(epilogue.alpha) * x, x)
        case "clip":
            low, high = number(epilogue.minimum), number(epilogue.maximum)
            return tirx.Select(x < low, low, tirx.Select(x > high, high, x))
        case "sigmoid":
            return number(1) / (number(1) + tirx.exp(-x))
        case "silu":
            return x / (number(1) + tirx.exp(-x))
        case "tanh":
            return tirx.tanh(x)
        case "gelu":
            return number(0.5) * x * (number(1) + tirx.erf(x * number(math.sqrt(0.5))))
    return x
