"""A model that is cut at its layers, for processes without a compiler: ONNX Runtime runs the pieces between.

Layers are numbered in the order of the graph. A node belongs to the piece behind the last layer that it depends on, so
that every node runs once. Each piece makes all tensors that later pieces, later layers and the caller need.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import onnx
import onnxruntime

from tvm_deconv.errors import TensorError
from tvm_deconv.frontends.onnx import bodies, used
from tvm_deconv.onnxruntime.operator import DOMAIN
from tvm_deconv.problem import Array
from tvm_deconv.runtime.layer import Layer

#: Operators without inputs, or with constants alone, that do not make the same at every call.
_RANDOM = {"Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"}

#: Makes the session of a model.
Opener = Callable[[onnx.ModelProto], onnxruntime.InferenceSession]


class _Step(NamedTuple):
    """A piece of the model and the layer behind it, either of which may be missing."""

    piece: onnxruntime.InferenceSession | None
    layer: tuple[Layer, str, str] | None  # with its data and what it makes


class NodeArg(NamedTuple):
    """An input or an output of a model, as ONNX Runtime describes it: extents are numbers, names or None."""

    name: str
    type: str
    shape: list[int | str | None]


class Pieces:
    """A model whose layers are nodes of the domain `DOMAIN`, each with its place in `layers`."""

    def __init__(self, model: onnx.ModelProto, layers: Sequence[Layer], open: Opener) -> None:
        """Make the sessions of the pieces by `open`, whose errors are raised."""
        cut = _Cut(model.graph, layers)
        self._arguments = [_argument(value) for value in cut.inputs]
        self._results = [_argument(value) for value in model.graph.output]
        self._inputs = [value.name for value in self._arguments]
        self._outputs = [value.name for value in self._results]
        self._steps: list[_Step] = []
        for number, layer in enumerate([*cut.layers, None]):
            part = cut.part(number)
            piece = None if part is None else open(_model(model, part))
            self._steps.append(_Step(piece, layer))

    def get_inputs(self) -> list[NodeArg]:
        """Return name, type and shape of each input."""
        return self._arguments

    def get_outputs(self) -> list[NodeArg]:
        """Return name, type and shape of each output."""
        return self._results

    def run(self, names: Sequence[str] | None, feeds: Mapping[str, Array], run_options: Any = None) -> list[Array]:
        """Return the outputs with these names, by default all. Raises TensorError, and ONNX Runtime's errors."""
        wanted = self._outputs if names is None else names
        if feeds.keys() != set(self._inputs):
            raise TensorError("feeds", [*feeds], f"must be the inputs of the model, {', '.join(self._inputs)}")
        if not set(wanted) <= set(self._outputs):
            raise TensorError("output_names", [*wanted], f"must be outputs of the model, {', '.join(self._outputs)}")
        values = dict(feeds)
        for piece, layer in self._steps:
            if piece is not None:
                given = {value.name: values[value.name] for value in piece.get_inputs()}
                made = piece.run(None, given, run_options)
                values.update(zip((value.name for value in piece.get_outputs()), made, strict=True))
            if layer is not None:
                bound, data, result = layer
                values[result] = bound(values[data])
        return [values[name] for name in wanted]


class _Cut:
    """A graph by the pieces that its nodes belong to; there is one before, between and behind the `layers`."""

    def __init__(self, graph: onnx.GraphProto, layers: Sequence[Layer]) -> None:
        self._graph = graph
        self.layers: list[tuple[Layer, str, str]] = []
        self._constants = {tensor.name for tensor in graph.initializer}
        self._constants.update(tensor.values.name for tensor in graph.sparse_initializer)
        self.inputs = [value for value in graph.input if value.name not in self._constants]
        self._pieces: list[list[int]] = [[]]
        #: tensor -> the number of the first piece that can read it
        self._stages = {value.name: 0 for value in self.inputs}
        for index, node in enumerate(graph.node):
            if node.domain == DOMAIN:
                self.layers.append((layers[node.attribute[0].i], node.input[0], node.output[0]))
                self._pieces.append([])
                self._stages[node.output[0]] = len(self.layers)
            elif _is_constant(node, self._constants):
                self._constants.update(node.output)
            else:
                stage = max((self._stages.get(name, 0) for name in used(node)), default=0)
                self._stages.update(dict.fromkeys(node.output, stage))
                self._pieces[stage].append(index)

    def part(self, number: int) -> onnx.GraphProto | None:
        """Return the graph of the piece with this number; None if nothing needs one."""
        nodes = self._graph.node
        made = {name for index in self._pieces[number] for name in nodes[index].output if name}
        later = {name for piece in self._pieces[number + 1 :] for index in piece for name in used(nodes[index])}
        asked = {data for _, data, _ in self.layers[number:]} | {value.name for value in self._graph.output}
        outputs = made & (later | asked) | (self._constants & asked if number == 0 else set())
        if not outputs:
            return None
        indices, needed = self._with_constants(self._pieces[number], outputs)
        inputs = needed & self._stages.keys() - made
        stated = {value.name: value for value in (*self._graph.value_info, *self._graph.input, *self._graph.output)}
        return onnx.helper.make_graph(
            [nodes[index] for index in indices],
            self._graph.name,
            [stated[name] for name in sorted(inputs)],
            [stated.get(name) or onnx.ValueInfoProto(name=name) for name in sorted(outputs)],
            [tensor for tensor in self._graph.initializer if tensor.name in needed],
            value_info=[value for value in self._graph.value_info if value.name in needed - inputs - outputs],
            sparse_initializer=[tensor for tensor in self._graph.sparse_initializer if tensor.values.name in needed],
        )

    def _with_constants(self, piece: Sequence[int], outputs: set[str]) -> tuple[list[int], set[str]]:
        """Return the nodes of a piece with those that make its constants, and all tensors that they use or make."""
        makers = {name: index for index, node in enumerate(self._graph.node) for name in node.output}
        indices, needed = set(piece), {*outputs}
        queue = [name for index in piece for name in used(self._graph.node[index])] + [*outputs]
        while queue:
            name = queue.pop()
            needed.add(name)
            maker = makers.get(name)
            if name in self._constants and maker is not None and maker not in indices:
                indices.add(maker)
                queue += used(self._graph.node[maker])
        return sorted(indices), needed


def _argument(value: onnx.ValueInfoProto) -> NodeArg:
    tensor = value.type.tensor_type
    type = f"tensor({onnx.TensorProto.DataType.Name(tensor.elem_type).lower()})"
    extents = (dim.dim_value if dim.HasField("dim_value") else dim.dim_param or None for dim in tensor.shape.dim)
    return NodeArg(value.name, type, [*extents])


def _is_constant(node: onnx.NodeProto, constants: set[str]) -> bool:
    """Tell whether a node makes the same at every call; ONNX Runtime computes it once."""
    if node.domain not in ("", "ai.onnx") or node.op_type in _RANDOM or [*bodies(node)]:
        return False
    return node.op_type == "Constant" or (bool(node.input) and all(name in constants for name in node.input if name))


def _model(whole: onnx.ModelProto, graph: onnx.GraphProto) -> onnx.ModelProto:
    """Return a model of a part of the graph of another."""
    opsets = [entry for entry in whole.opset_import if entry.domain != DOMAIN]
    return onnx.helper.make_model(graph, ir_version=whole.ir_version, opset_imports=opsets, functions=whole.functions)
