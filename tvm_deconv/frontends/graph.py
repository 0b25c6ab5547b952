"""What a scan finds, and how the nodes that follow a layer become its epilogue.

A front end turns the nodes of its format into `Node`s with the names below and a function that knows constants; the
rest is common to all formats. A node is taken in while the tensor before it has no other user, in this order: any
number of additions, multiplications and batch normalisations by constants per output channel, then one activation.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from tvm_deconv.errors import NoArtifactError, ProblemError, SourceError, printable
from tvm_deconv.problem import Array, Epilogue, Problem
from tvm_deconv.problem.arrays import numpy_dtype

if TYPE_CHECKING:
    from tvm_deconv.runtime.layer import Layer
    from tvm_deconv.runtime.library import Library

#: The operators of a `Node` that can become part of an epilogue; all other nodes have the operator "".
ADD, SUBTRACT, MULTIPLY, BATCH_NORM = "add", "subtract", "multiply", "batch_norm"
PRELU, SWISH = "prelu", "swish"
_PLAIN = ("relu", "leaky_relu", "sigmoid", "tanh", "gelu", "clip")


@dataclass(frozen=True, slots=True, eq=False)
class FoundLayer:
    """One transposed convolution of a model or a list.

    `problem` is None where the layer is not covered, and `reason` says why. `filter` is in the problem's filter format
    and dtype, `bias` has one element per output channel in its accumulate dtype; both are None where the file holds no
    constant. `fused` names the nodes that became the epilogue, in their order; what they do is already folded into
    filter, bias and epilogue. `extra` carries the other fields of a problem in a list.
    """

    name: str
    operator: str
    problem: Problem | None = None
    filter: Array | None = field(default=None, repr=False)
    bias: Array | None = field(default=None, repr=False)
    extra: Mapping[str, Any] = field(default_factory=dict)
    reason: str = ""
    fused: tuple[str, ...] = ()

    def bind(self, library: Library) -> Layer | str:
        """Return what computes this in `library`, or why nothing does."""
        if self.problem is None or self.filter is None:
            return self.reason or "its filter is no constant of the model's own graph"
        try:
            return library.bind(self.problem, self.filter, self.bias)
        except NoArtifactError as error:
            return str(error)


@dataclass(frozen=True, slots=True)
class Node:
    """A node of a model in the terms of this module: `inputs` and `output` are tensors of its format.

    batch_norm has the inputs (data, gamma, beta, mean, variance), prelu (data, slope), swish (data, optional beta).
    `numbers` are alpha of leaky_relu, minimum and maximum of clip, epsilon of batch_norm.
    """

    name: str
    op: str
    inputs: tuple[Hashable, ...]
    output: Hashable
    numbers: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """What one or more nodes do to a channel: ``activation(scale * x + shift)``, with float64 ``[C]``."""

    nodes: tuple[str, ...]
    scale: Array | None = None
    shift: Array | None = None
    activation: Epilogue = Epilogue()  # noqa: RUF009 (frozen)


class Graph:
    """The users of each tensor, and the constants among them.

    `constant` maps a tensor to its value or None. An output of the model counts as a user: give it as a Node with the
    operator "".
    """

    def __init__(self, nodes: Iterable[Node], constant: Callable[[Hashable], Array | None]) -> None:
        self._constant = constant
        self._users: defaultdict[Hashable, list[Node]] = defaultdict(list)
        for node in nodes:
            for tensor in node.inputs:
                self._users[tensor].append(node)

    def steps(self, tensor: Hashable, rank: int, channels: int) -> Iterator[Step]:
        """The steps that follow `tensor`, of shape ``[N, channels, ...]`` and `rank` axes in all."""
        seen: set[Hashable] = set()
        while tensor not in seen:
            seen.add(tensor)
            users = self._users.get(tensor, [])
            if len(users) == 1:
                output, step = users[0].output, self._step(users[0], tensor, rank, channels)
            elif len(users) == 2:
                output, step = self._gated(users)
            else:
                return
            if step is None:
                return
            yield step
            tensor = output

    def _gated(self, users: list[Node]) -> tuple[Hashable, Step | None]:
        """silu written as ``x * sigmoid(x)``."""
        gate, product = sorted(users, key=lambda node: node.op != "sigmoid")
        if gate.op == "sigmoid" and product.op == MULTIPLY and self._users.get(gate.output) == [product]:
            return product.output, Step((gate.name, product.name), activation=Epilogue(activation="silu"))
        return None, None

    def _step(self, node: Node, tensor: Hashable, rank: int, channels: int) -> Step | None:
        if node.op in _PLAIN:
            return activation_step((node.name,), node.op, **node.numbers)
        others = [self._constant(other) for other in node.inputs if other != tensor]
        constants = [value for value in others if value is not None]
        if len(constants) != len(others) or node.inputs.count(tensor) != 1:
            return None
        if node.op == SWISH:
            gentle = all(np.all(beta == 1) for beta in constants)
            return activation_step((node.name,), "silu") if gentle else None
        if node.op == PRELU:
            return leaky_relu_step(node.name, constants[0]) if len(constants) == 1 else None
        if node.op == BATCH_NORM and node.inputs[0] == tensor:
            return batch_norm_step(node.name, constants, node.numbers["epsilon"], channels)
        if node.op not in (ADD, SUBTRACT, MULTIPLY) or (node.op == SUBTRACT and node.inputs[0] != tensor):
            return None
        values = _per_channel(constants[0], rank, channels) if len(constants) == 1 else None
        if values is None:
            return None
        if node.op == MULTIPLY:
            return Step((node.name,), scale=values)
        return Step((node.name,), shift=values if node.op == ADD else -values)


def leaky_relu_step(node: str, slopes: Array) -> Step | None:
    """The step of a PReLU whose slopes are all the same, else None."""
    alphas = np.unique(slopes.astype(np.float64))
    return activation_step((node,), "leaky_relu", alpha=float(alphas[0])) if alphas.size == 1 else None


def activation_step(nodes: tuple[str, ...], activation: str, **numbers: Any) -> Step | None:
    """The step of an activation, or None where the numbers make none (a NaN bound, say)."""
    if activation == "clip" and (numbers["minimum"], numbers["maximum"]) == (0.0, np.inf):
        activation, numbers = "relu", {}
    try:
        return Step(nodes, activation=Epilogue(activation=activation, **numbers))
    except ProblemError:
        return None


def batch_norm_step(node: str, parameters: Sequence[Array], epsilon: float, channels: int) -> Step | None:
    """The step of a batch normalisation with the parameters gamma, beta, mean and variance, each ``[channels]``."""
    if len(parameters) != 4 or any(value.shape != (channels,) for value in parameters):
        return None
    gamma, beta, mean, variance = (value.astype(np.float64) for value in parameters)
    scale = gamma / np.sqrt(variance + epsilon)
    return Step((node,), scale=scale, shift=beta - mean * scale)


def _per_channel(constant: Array, rank: int, channels: int) -> Array | None:
    """`constant`, which broadcasts against ``[N, channels, ...]``, as ``[channels]``; None if it varies elsewhere."""
    if constant.ndim > rank:
        return None
    shape = (1,) * (rank - constant.ndim) + constant.shape
    if any(extent != 1 for axis, extent in enumerate(shape) if axis != 1) or shape[1] not in (1, channels):
        return None
    return np.broadcast_to(constant.reshape(-1).astype(np.float64), channels)


@np.errstate(all="ignore")  # overflow and NaN are looked for
def absorb(layer: FoundLayer, steps: Iterable[Step]) -> FoundLayer:
    """`layer` with as many of `steps` as an epilogue can hold, folded in float64.

    A scale needs a constant filter, and every step before the activation a constant bias where there is a bias. Results
    must stay finite in the problem's dtypes. Integer layers keep their nodes: those run on rounded results.
    """
    problem = layer.problem
    if problem is None or problem.accumulate_dtype == "int32":
        return layer
    epilogue, fused = problem.epilogue, layer.fused
    known = layer.bias is not None or not epilogue.bias
    scale = np.ones(problem.bias_shape)
    shift = np.zeros(problem.bias_shape) if layer.bias is None else layer.bias.astype(np.float64)
    for step in steps:
        if step.scale is not None or step.shift is not None:
            next_scale = scale if step.scale is None else scale * step.scale
            next_shift = shift * (1 if step.scale is None else step.scale)
            next_shift = next_shift + (0 if step.shift is None else step.shift)
            filter = _scaled(problem, layer.filter, next_scale) if step.scale is not None else layer.filter
            finite = np.all(np.isfinite(next_shift.astype(problem.accumulate_dtype)))
            if not known or not finite or (step.scale is not None and filter is None):
                break
            scale, shift = next_scale, next_shift
            epilogue = dataclasses.replace(epilogue, bias=epilogue.bias or step.shift is not None)
        activation = _in_dtype(step.activation, problem.dtype)
        epilogue = dataclasses.replace(activation, bias=epilogue.bias)
        fused += step.nodes
        if activation.activation != "none":
            break
    return dataclasses.replace(
        layer,
        problem=problem.replace(epilogue=epilogue),
        filter=layer.filter if np.all(scale == 1) else _scaled(problem, layer.filter, scale),
        bias=shift.astype(problem.accumulate_dtype) if epilogue.bias and known else None,
        fused=fused,
    )


def _scaled(problem: Problem, filter: Array | None, scale: Array) -> Array | None:
    """`filter` times `scale` per output channel, in its own dtype and format; None where an element overflows."""
    if filter is None:
        return None
    per_output = scale.reshape(problem.groups, 1, problem.out_channels, *(1,) * problem.rank)
    wide = problem.canonical_filter(filter.astype(np.float64))
    scaled = (wide * per_output).astype(filter.dtype).reshape(filter.shape)
    lost = np.isfinite(filter.astype(np.float64)) & ~np.isfinite(scaled.astype(np.float64))
    return None if lost.any() else scaled


def _in_dtype(epilogue: Epilogue, dtype: str) -> Epilogue:
    """The epilogue with its numbers as the shortest text that means the same in float32: 0.1, not 0.10000000149.

    So a slope from a model file, a list and a module give one problem. For float64 they stay as they are.
    """
    if dtype == "float64":
        return epilogue
    numbers: dict[str, Any] = {
        name: float(str(np.float32(getattr(epilogue, name)))) for name in ("alpha", "minimum", "maximum")
    }
    return dataclasses.replace(epilogue, **numbers) if np.isfinite(numbers["alpha"]) else epilogue


def uncovered(name: str, operator: str, reason: str) -> FoundLayer:
    """A layer for which there is no problem; the reason is made printable, whatever the file held."""
    return FoundLayer(name, operator, reason="\n".join(map(printable, reason.split("\n"))))


def with_unique_names(layers: Iterable[FoundLayer]) -> list[FoundLayer]:
    """The layers with `_2`, `_3`, ... behind names that were already given, since names are keys of the weights."""
    layers = list(layers)
    reserved, seen = {layer.name for layer in layers}, set[str]()
    numbers = defaultdict[str, Iterator[int]](lambda: itertools.count(2))
    named = []
    for layer in layers:
        name = layer.name
        if name in seen:
            candidates = (f"{name}_{number}" for number in numbers[name])
            name = next(candidate for candidate in candidates if candidate not in reserved)
            reserved.add(name)
        seen.add(name)
        named.append(dataclasses.replace(layer, name=name))
    return named


@np.errstate(all="ignore")
def cast(value: Array, dtype: str) -> Array:
    """`value` in that dtype; what does not fit is what NumPy makes of it, without a warning."""
    return value.astype(numpy_dtype(dtype))


def missing_package(source: str, package: str, install: str) -> SourceError:
    """The error of a reader whose package is not installed."""
    return SourceError("source", source, f"needs the package {package}: pip install {install}")
