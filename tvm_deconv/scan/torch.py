"""PyTorch modules: ConvTranspose1d, 2d and 3d, found by running the module once on example inputs.

Shapes are those of the run. What follows a layer in an nn.Sequential becomes its epilogue where the run shows that the
next module got the very tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np

from tvm_deconv.dialects import from_torch
from tvm_deconv.errors import ProblemError, SourceError
from tvm_deconv.problem import Array, Epilogue
from tvm_deconv.scan.layer import (
    FoundLayer,
    Step,
    absorb,
    activation_step,
    batch_norm_step,
    cast,
    leaky_relu_step,
    missing_package,
    numpy_dtype,
    uncovered,
)

try:
    import torch
    from torch import nn
except ImportError:
    raise missing_package("a module", "torch", "torch") from None

_OPERATORS = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_PLAIN = {nn.ReLU: "relu", nn.Sigmoid: "sigmoid", nn.Tanh: "tanh", nn.SiLU: "silu"}
_FOLLOWERS = (*_BATCH_NORMS, *_PLAIN, nn.LeakyReLU, nn.PReLU, nn.GELU, nn.ReLU6, nn.Hardtanh)


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """One run of a module; `weights` are those of an operator, since some parametrizations exist only in the run."""

    part: nn.Module
    data: torch.Tensor
    output: torch.Tensor
    weights: dict[str, torch.Tensor]


def scan_module(module: object, inputs: Sequence[object]) -> list[FoundLayer]:
    """The transposed convolutions that ``module(*inputs)`` runs, in the order of the calls.

    The module must be in evaluation mode; it is run once, without gradients, and left as it was.
    """
    if not isinstance(module, nn.Module):
        raise SourceError("source", type(module).__name__, "must be a path or an nn.Module")
    if any(part.training for part in module.modules()):
        raise SourceError("training", True, "must be False all over the module: call module.eval() first")
    names = {part: name or type(part).__name__ for name, part in module.named_modules()}
    followers: dict[nn.Module, list[nn.Module]] = {part: [] for part in names if isinstance(part, _OPERATORS)}
    for chain in (list(part) for part in names if type(part) is nn.Sequential):
        for place, part in enumerate(chain, 1):
            if part in followers:
                followers[part] = list(takewhile(lambda part: type(part) in _FOLLOWERS, chain[place:]))
    calls: list[_Call] = []

    def record(part: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        weights = {name: getattr(part, name) for name in ("weight", "bias")} if part in followers else {}
        calls.append(_Call(part, inputs[0], output, weights))

    watched = {*followers, *(part for chain in followers.values() for part in chain)}
    hooks = [part.register_forward_hook(record) for part in watched]
    try:
        with torch.no_grad():
            module(*inputs)
    finally:
        for hook in hooks:
            hook.remove()
    layers = []
    for index, call in enumerate(calls):
        if call.part in followers:
            layer = _found(names[call.part], call)
            layers.append(absorb(layer, _steps(call, followers[call.part], calls[index + 1 :], names)))
    return layers


def _found(name: str, call: _Call) -> FoundLayer:
    part, data, weight, bias = call.part, call.data, call.weights["weight"], call.weights["bias"]
    (base,) = (operator for operator in _OPERATORS if isinstance(part, operator))
    if type(part).forward is not base.forward:
        return uncovered(name, base.__name__, f"{type(part).__name__} has a forward of its own")
    if data.dtype != weight.dtype:
        return uncovered(name, base.__name__, f"data is {data.dtype} and filter is {weight.dtype}")
    rank = weight.dim() - 2
    natural = (
        (x - 1) * s - 2 * p + d * (k - 1) + 1
        for x, s, p, d, k in zip(
            data.shape[-rank:], part.stride, part.padding, part.dilation, weight.shape[2:], strict=True
        )
    )
    try:
        problem = from_torch(
            tuple(data.shape),
            tuple(weight.shape),
            stride=part.stride,
            padding=part.padding,
            # What the call asked for, through output_size or not.
            output_padding=[y - nat for y, nat in zip(call.output.shape[-rank:], natural, strict=True)],
            groups=part.groups,
            dilation=part.dilation,
            dtype=str(data.dtype).removeprefix("torch."),
            epilogue=Epilogue(bias=bias is not None),
        )
    except ProblemError as error:
        return uncovered(name, base.__name__, str(error))
    offset = None if bias is None else cast(_array(bias), problem.accumulate_dtype)
    return FoundLayer(name, base.__name__, problem, _array(weight), offset)


def _steps(call: _Call, followers: list[nn.Module], later: list[_Call], names: dict[nn.Module, str]) -> Iterator[Step]:
    """The steps of the followers that a tensor really goes through after `call`."""
    if call.data.dim() != call.weights["weight"].dim():
        return  # without a batch, a batch normalisation takes another axis for the channels
    tensor = call.output
    for part in followers:
        output = next((run.output for run in later if run.part is part and run.data is tensor), None)
        step = None if output is None else _step(part, names[part], tensor.shape[1])
        if output is None or step is None:
            return
        yield step
        tensor = output


def _step(part: nn.Module, name: str, channels: int) -> Step | None:
    nodes = (name,)
    if isinstance(part, _BATCH_NORMS):
        if part.running_mean is None or part.running_var is None:
            return None
        gamma = np.ones(channels) if part.weight is None else _array(part.weight)
        beta = np.zeros(channels) if part.bias is None else _array(part.bias)
        moments = [_array(part.running_mean), _array(part.running_var)]
        return batch_norm_step(name, [gamma, beta, *moments], part.eps, channels)
    if isinstance(part, nn.LeakyReLU):
        return activation_step(nodes, "leaky_relu", alpha=part.negative_slope)
    if isinstance(part, nn.PReLU):
        return leaky_relu_step(name, _array(part.weight))
    if isinstance(part, nn.GELU):
        return activation_step(nodes, "gelu") if part.approximate == "none" else None
    if isinstance(part, nn.Hardtanh):  # ReLU6 is one
        return activation_step(nodes, "clip", minimum=part.min_val, maximum=part.max_val)
    return activation_step(nodes, _PLAIN[type(part)])


def _array(tensor: torch.Tensor) -> Array:
    """A copy of `tensor` in NumPy."""
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype == torch.bfloat16:
        return _array(tensor.view(torch.int16)).view(numpy_dtype("bfloat16"))
    return np.array(tensor.numpy())
