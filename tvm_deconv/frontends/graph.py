"""The nodes that follow a layer, as the steps of an epilogue.

A reader turns the nodes of its format into `Node`s, with the names below, and gives a function that knows constants.
The rest is common to all formats. A node becomes a step while the tensor before it has no other user, in this order:
any number of additions, multiplications and batch normalisations by constants per output channel, then one activation.
`tvm_deconv.frontends.folding` folds the steps into the layer.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from tvm_deconv.errors import ProblemError
from tvm_deconv.problem import ACTIVATIONS, Array, Epilogue
from tvm_deconv.problem.activations import Argument, Operator

#: The operators of a `Node` that can become part of an epilogue, besides the names of activations; others have "".
ADD, SUBTRACT, MULTIPLY, BATCH_NORM = "add", "subtract", "multiply", "batch_norm"
#: activations applied one after the other -> the activation that is x times their result
_GATES = {activation.gate: name for name, activation in ACTIVATIONS.items() if activation.gate}
#: The most elements of a slope or a bound: one for each channel, of more channels than there are.
_MOST_SLOPES = 1 << 20
_LONGEST_GATE = max(map(len, _GATES))


@dataclass(frozen=True, slots=True)
class Node:
    """A node of a model in the terms of this module: `inputs` and `output` are tensors of its format.

    batch_norm has the inputs (data, gamma, beta, mean, variance); an activation has the data first. `numbers` are the
    parameters of an activation, or the epsilon of batch_norm. `operands` are the inputs of an activation that must be
    constants, with what they mean.
    """

    name: str
    op: str
    inputs: tuple[Hashable, ...]
    output: Hashable
    numbers: Mapping[str, float] = field(default_factory=dict)
    operands: tuple[tuple[Hashable, Argument], ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """The work of one or more nodes on a channel: ``activation(scale * x + shift)``, with float64 ``[C]``.

    `output` is the tensor that the last of the nodes makes.
    """

    nodes: tuple[str, ...]
    scale: Array | None = None
    shift: Array | None = None
    activation: Epilogue = Epilogue()  # noqa: RUF009 (frozen)
    output: Hashable = None


def arguments_of(operator: Operator, given: Mapping[str, object]) -> dict[str, float] | None:
    """Return the parameters that the arguments `given` to an operator have, by their names in the activation.

    An argument that is None was left out. Returns None if they make another function of the operator.
    """
    numbers = {}
    for name, argument in operator.arguments.items():
        value = argument.default if given.get(name) is None else given[name]
        if argument.parameter is None and value != argument.default:
            return None
        if argument.parameter is not None:
            if not isinstance(value, (int, float)):
                return None
            numbers[argument.parameter] = value
    return numbers


class Graph:
    """The users of each tensor, and the constants among the tensors.

    `constant` maps a tensor to its value or None. An output of the model counts as a user: give it as a Node with the
    operator "".
    """

    def __init__(self, nodes: Iterable[Node], constant: Callable[[Hashable], Array | None]) -> None:
        self._constant = constant
        self._equal: dict[int, tuple[Array, float | None]] = {}  # by the id of the array, which stays alive
        self._users: defaultdict[Hashable, list[Node]] = defaultdict(list)
        for node in nodes:
            for tensor in node.inputs:
                self._users[tensor].append(node)

    def steps(self, tensor: Hashable, rank: int, channels: int) -> Iterator[Step]:
        """Yield the steps that follow `tensor`, of shape ``[N, channels, ...]`` and `rank` axes in all."""
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
            yield dataclasses.replace(step, output=output)
            tensor = output

    def only_user(self, tensor: Hashable) -> Node | None:
        """Return the node that uses `tensor`; None if several do, or none."""
        users = self._users.get(tensor, [])
        return users[0] if len(users) == 1 else None

    def _gated(self, users: list[Node]) -> tuple[Hashable, Step | None]:
        """Return output and step of an activation that is written as a product, such as ``x * sigmoid(x)``."""
        first, product = sorted(users, key=lambda node: node.op == MULTIPLY)
        if product.op != MULTIPLY or len(product.inputs) != 2:
            return None, None
        chain = [first]
        while len(chain) < _LONGEST_GATE and len(after := self._users.get(chain[-1].output, [])) == 1:
            if after == [product]:
                break
            chain += after
        name = _GATES.get(tuple(node.op for node in chain))
        if name is None or self._users.get(chain[-1].output) != [product]:
            return None, None
        nodes = tuple(node.name for node in (*chain, product))
        return product.output, Step(nodes, activation=Epilogue(activation=name))

    def _step(self, node: Node, tensor: Hashable, rank: int, channels: int) -> Step | None:
        if not node.op or node.inputs.count(tensor) != 1:  # in this order: the outputs of a model may be many
            return None
        if node.op in ACTIVATIONS:
            return self._activation(node, tensor)
        others = [self._constant(other) for other in node.inputs if other != tensor]
        constants = [value for value in others if value is not None]
        if len(constants) != len(others):
            return None
        if node.op == BATCH_NORM and node.inputs[0] == tensor:
            return batch_norm_step(node.name, constants, node.numbers["epsilon"], channels)
        if node.op == BATCH_NORM or (node.op == SUBTRACT and node.inputs[0] != tensor):
            return None
        values = _per_channel(constants[0], rank, channels) if len(constants) == 1 else None
        if values is None:
            return None
        if node.op == MULTIPLY:
            return Step((node.name,), scale=values)
        return Step((node.name,), shift=values if node.op == ADD else -values)

    def _all_equal(self, constant: Array | None) -> float | None:
        """Return the value that all elements of `constant` have, or None if they differ or are very many."""
        if constant is None or not 0 < constant.size <= _MOST_SLOPES:
            return None
        if id(constant) not in self._equal:
            values = np.unique(constant.astype(np.float64)).tolist()
            self._equal[id(constant)] = constant, float(values[0]) if len(values) == 1 else None
        return self._equal[id(constant)][1]

    def _activation(self, node: Node, tensor: Hashable) -> Step | None:
        if node.inputs[0] != tensor:
            return None
        numbers = dict(node.numbers)
        for operand, argument in node.operands:
            value = self._all_equal(self._constant(operand))
            if value is None or (argument.parameter is None and value != argument.default):
                return None
            if argument.parameter is not None:
                numbers[argument.parameter] = value
        return _activation_step(node.name, node.op, numbers)


def _activation_step(node: str, activation: str, numbers: Mapping[str, float]) -> Step | None:
    """Return the step of an activation, or None if the numbers make none (a NaN bound, say)."""
    if activation == "clip" and (numbers["minimum"], numbers["maximum"]) == (0.0, np.inf):
        activation, numbers = "relu", {}
    try:
        return Step((node,), activation=Epilogue(False, activation, **numbers))
    except ProblemError:
        return None


@np.errstate(all="ignore")  # absorb looks for what is not finite
def batch_norm_step(node: str, parameters: Sequence[Array], epsilon: float, channels: int) -> Step | None:
    """Return the step of a batch normalisation with gamma, beta, mean and variance, each ``[channels]``."""
    if len(parameters) != 4 or any(value.shape != (channels,) for value in parameters):
        return None
    gamma, beta, mean, variance = (value.astype(np.float64) for value in parameters)
    scale = gamma / np.sqrt(variance + epsilon)
    return Step((node,), scale=scale, shift=beta - mean * scale)


def _per_channel(constant: Array, rank: int, channels: int) -> Array | None:
    """Return `constant`, which broadcasts against ``[N, channels, ...]``, as ``[channels]``.

    It is None if the constant varies along another axis.
    """
    if constant.ndim > rank:
        return None
    shape = (1,) * (rank - constant.ndim) + constant.shape
    if any(extent != 1 for axis, extent in enumerate(shape) if axis != 1) or shape[1] not in (1, channels):
        return None
    return np.broadcast_to(constant.reshape(-1).astype(np.float64), channels)
