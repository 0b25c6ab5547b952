"""The activations: one record for each, with its meaning and its names in the frameworks.

A new activation needs a record here and an expression in `tvm_deconv.compute.epilogue`, which tests hold against each
other. Readers of models, writers of models and the peers of a benchmark look everything up in the record.

docs/semantics.md has the formulas. Functions keep NaN, and give the limit at an infinity where it is a number.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tvm_deconv.errors import ProblemError

Float64 = npt.NDArray[np.float64]


class Argument(NamedTuple):
    """An attribute, argument or constant input of a framework's operator.

    It gives the `parameter` of the activation. Without one, the operator computes the activation only if the argument
    equals `default`. A default of None means that the argument must be there.
    """

    parameter: str | None
    default: float | str | None = None


def _gives(parameter: str, default: float | None = None) -> Argument:
    return Argument(parameter, default)


def _only(value: float | str) -> Argument:
    return Argument(None, value)


@dataclass(frozen=True, slots=True)
class Operator:
    """An operator of a framework that computes an activation.

    `arguments` has its attributes by name; for PyTorch, the arguments behind the data, in their order. `inputs` are the
    inputs behind the data: constants that are equal in all elements. `since` is the first opset of ONNX that has it.
    """

    name: str
    arguments: Mapping[str, Argument] = field(default_factory=dict)
    inputs: tuple[Argument, ...] = ()
    since: int = 1


@dataclass(frozen=True, slots=True)
class Function:
    """A function of a framework; it takes the data, then the activation's parameters in their order."""

    path: str
    keywords: Mapping[str, object] = field(default_factory=dict)

    def load(self) -> Callable[..., Any]:
        """Import the framework and return the function."""
        function = _import(self.path)
        return functools.partial(function, **self.keywords) if self.keywords else function


@functools.cache
def _import(path: str) -> Callable[..., Any]:
    module, _, name = path.rpartition(".")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function


def _accept(**_parameters: float) -> None:
    """Accept every value."""


@dataclass(frozen=True, slots=True)
class Activation:
    """One activation.

    `function` computes it in float64, given data and parameters. `parameters` are their defaults, by names that are
    fields of `Epilogue`, and `check` raises ProblemError for values that make no activation. `integers` tells whether
    int32 sums support it, and `homogeneous` whether a positive factor of its data may be one of its result.
    `torch_modules` are names in torch.nn. If `gate` is not empty, the activation is also x times
    the activations named there, one applied to the result of the other: x * sigmoid(x).
    """

    name: str
    function: Callable[..., Float64]
    torch_function: Function
    jax_function: Function
    onnx: tuple[Operator, ...] = ()
    openvino: tuple[Operator, ...] = ()
    torch: tuple[Operator, ...] = ()
    torch_modules: tuple[str, ...] = ()
    parameters: Mapping[str, float] = field(default_factory=dict)
    check: Callable[..., None] = _accept
    integers: bool = False
    homogeneous: bool = False
    gate: tuple[str, ...] = ()


def _table(activations: Iterable[Activation]) -> dict[str, Activation]:
    return {activation.name: activation for activation in activations}


def identity(x: Any) -> Any:
    """Return `x`."""
    return x


def _relu(x: Float64) -> Float64:
    return np.maximum(x, 0.0)


def _leaky_relu(x: Float64, alpha: float) -> Float64:
    # At minus infinity a slope of 0 has the limit 0.
    return np.where(x < 0.0, alpha * x if alpha else 0.0, x)


def _sigmoid(x: Float64) -> Float64:
    small = np.exp(-np.abs(x))
    return np.where(x >= 0.0, 1.0, small) / (1.0 + small)


def _limit_at_minus_infinity(x: Float64, value: Float64) -> Float64:
    # There the formula is infinity times zero, and the function has a limit.
    return np.where(np.isneginf(x), 0.0, value)


def _gelu(x: Float64) -> Float64:
    arguments = (-x / math.sqrt(2.0)).ravel().tolist()
    tail = np.fromiter(map(math.erfc, arguments), np.float64, x.size).reshape(x.shape)
    return _limit_at_minus_infinity(x, 0.5 * x * tail)


def _silu(x: Float64) -> Float64:
    return _limit_at_minus_infinity(x, x * _sigmoid(x))


def _clip(x: Float64, minimum: float, maximum: float) -> Float64:
    return np.clip(x, minimum, maximum)


def _elu(x: Float64, alpha: float) -> Float64:
    return np.where(x < 0.0, alpha * np.expm1(np.minimum(x, 0.0)), x)


def _hardswish(x: Float64) -> Float64:
    # Divided first: x * 6 would overflow.
    return _limit_at_minus_infinity(x, x * (np.clip(x + 3.0, 0.0, 6.0) / 6.0))


def _softplus(x: Float64) -> Float64:
    return np.logaddexp(x, 0.0)


def _mish(x: Float64) -> Float64:
    return _limit_at_minus_infinity(x, x * np.tanh(_softplus(x)))


def _check_alpha(alpha: float) -> None:
    if not math.isfinite(alpha):
        raise ProblemError("alpha", alpha, "must be finite")


def _check_bounds(minimum: float, maximum: float) -> None:
    if not minimum <= maximum:
        raise ProblemError("minimum", minimum, f"must be at most maximum={maximum}, neither NaN")


#: name -> record, in the order in which messages list them
ACTIVATIONS = _table(
    (
        Activation(
            "none",
            function=identity,
            integers=True,
            homogeneous=True,
            torch_function=Function(f"{__name__}.identity"),
            jax_function=Function(f"{__name__}.identity"),
        ),
        Activation(
            "relu",
            function=_relu,
            integers=True,
            homogeneous=True,
            onnx=(Operator("Relu"),),
            openvino=(Operator("ReLU"),),
            torch=(Operator("relu"),),
            torch_modules=("ReLU",),
            torch_function=Function("torch.nn.functional.relu"),
            jax_function=Function("jax.nn.relu"),
        ),
        Activation(
            "leaky_relu",
            function=_leaky_relu,
            homogeneous=True,
            parameters={"alpha": 0.01},
            check=_check_alpha,
            onnx=(
                Operator("LeakyRelu", {"alpha": _gives("alpha", 0.01)}),
                Operator("PRelu", inputs=(_gives("alpha"),)),
            ),
            openvino=(Operator("PReLU", inputs=(_gives("alpha"),)),),
            torch=(
                Operator("leaky_relu", {"negative_slope": _gives("alpha", 0.01)}),
                Operator("_prelu_kernel", inputs=(_gives("alpha"),)),
            ),
            torch_modules=("LeakyReLU", "PReLU"),
            torch_function=Function("torch.nn.functional.leaky_relu"),
            jax_function=Function("jax.nn.leaky_relu"),
        ),
        Activation(
            "sigmoid",
            function=_sigmoid,
            onnx=(Operator("Sigmoid"),),
            openvino=(Operator("Sigmoid"),),
            torch=(Operator("sigmoid"),),
            torch_modules=("Sigmoid",),
            torch_function=Function("torch.nn.functional.sigmoid"),
            jax_function=Function("jax.nn.sigmoid"),
        ),
        Activation(
            "tanh",
            function=np.tanh,
            onnx=(Operator("Tanh"),),
            openvino=(Operator("Tanh"),),
            torch=(Operator("tanh"),),
            torch_modules=("Tanh",),
            torch_function=Function("torch.nn.functional.tanh"),
            jax_function=Function("jax.numpy.tanh"),
        ),
        Activation(
            "gelu",
            function=_gelu,
            onnx=(Operator("Gelu", {"approximate": _only("none")}, since=20),),
            openvino=(Operator("Gelu", {"approximation_mode": _only("ERF")}),),
            torch=(Operator("gelu", {"approximate": _only("none")}),),
            torch_modules=("GELU",),
            torch_function=Function("torch.nn.functional.gelu"),
            jax_function=Function("jax.nn.gelu", {"approximate": False}),
        ),
        Activation(
            "silu",
            function=_silu,
            gate=("sigmoid",),
            onnx=(Operator("Swish", {"alpha": _only(1.0)}, since=24),),
            openvino=(Operator("Swish", inputs=(_only(1.0),)),),
            torch=(Operator("silu"),),
            torch_modules=("SiLU",),
            torch_function=Function("torch.nn.functional.silu"),
            jax_function=Function("jax.nn.silu"),
        ),
        Activation(
            "clip",
            function=_clip,
            integers=True,
            parameters={"minimum": 0.0, "maximum": 6.0},
            check=_check_bounds,
            # The bounds are attributes before opset 11.
            onnx=(
                Operator(
                    "Clip",
                    {"min": _gives("minimum", -math.inf), "max": _gives("maximum", math.inf)},
                    inputs=(_gives("minimum", -math.inf), _gives("maximum", math.inf)),
                    since=11,
                ),
            ),
            openvino=(Operator("Clamp", {"min": _gives("minimum"), "max": _gives("maximum")}),),
            torch=(
                Operator("hardtanh", {"min_val": _gives("minimum", -1.0), "max_val": _gives("maximum", 1.0)}),
                Operator("clamp", {"min": _gives("minimum", -math.inf), "max": _gives("maximum", math.inf)}),
            ),
            torch_modules=("ReLU6", "Hardtanh"),
            torch_function=Function("torch.nn.functional.hardtanh"),
            jax_function=Function("jax.numpy.clip"),
        ),
        Activation(
            "elu",
            function=_elu,
            parameters={"alpha": 1.0},
            check=_check_alpha,
            onnx=(Operator("Elu", {"alpha": _gives("alpha", 1.0)}),),
            openvino=(Operator("Elu", {"alpha": _gives("alpha")}),),
            # selu and celu reach it with other scales.
            torch=(Operator("elu", {"alpha": _gives("alpha", 1.0), "scale": _only(1), "input_scale": _only(1)}),),
            torch_modules=("ELU",),
            torch_function=Function("torch.nn.functional.elu"),
            jax_function=Function("jax.nn.elu"),
        ),
        Activation(
            "hardswish",
            function=_hardswish,
            onnx=(Operator("HardSwish", since=14),),
            openvino=(Operator("HSwish"),),
            torch=(Operator("hardswish"),),
            torch_modules=("Hardswish",),
            torch_function=Function("torch.nn.functional.hardswish"),
            jax_function=Function("jax.nn.hard_swish"),
        ),
        Activation(
            "mish",
            function=_mish,
            gate=("softplus", "tanh"),
            onnx=(Operator("Mish", since=18),),
            openvino=(Operator("Mish"),),
            torch=(Operator("mish"),),
            torch_modules=("Mish",),
            torch_function=Function("torch.nn.functional.mish"),
            jax_function=Function("jax.nn.mish"),
        ),
        Activation(
            "softplus",
            function=_softplus,
            onnx=(Operator("Softplus"),),
            openvino=(Operator("SoftPlus"),),
            # Above its threshold PyTorch returns x, which is off by 2.1e-9 at most: no float32 near 20 shows it.
            torch=(Operator("softplus", {"beta": _only(1), "threshold": _only(20)}),),
            torch_modules=("Softplus",),
            torch_function=Function("torch.nn.functional.softplus"),
            jax_function=Function("jax.nn.softplus"),
        ),
    )
)
