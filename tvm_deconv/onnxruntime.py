"""ONNX Runtime: models whose transposed convolutions a library computes; docs/frameworks.md."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import onnx
import onnxruntime

from tvm_deconv.errors import TensorError
from tvm_deconv.frontends import FoundLayer, scan
from tvm_deconv.frontends.onnx import all_nodes, is_operator, node_name, read_model, used
from tvm_deconv.problem import Array
from tvm_deconv.runtime.layer import Layer
from tvm_deconv.runtime.library import Library

#: The first version of the format in which initializers need not be inputs.
_FIRST_IR = 4


class _Step(NamedTuple):
    """A layer, the names of its data and of its result, and the piece of the model that makes the data.

    There is no piece if the data are known already.
    """

    piece: onnxruntime.InferenceSession | None
    data: str
    layer: Layer
    made: str


class Session:
    """A model that is cut at each layer that a library has an artifact for; ONNX Runtime runs the pieces between.

    `layers` are those of the library by the names of their nodes, `left` the others, with the reason. Nodes that a
    layer has absorbed run with it. Initializers are constants, even those that are inputs too.
    """

    def __init__(self, path: str | os.PathLike[str], library: Library, options: Any = None) -> None:
        """Read the model at `path`, whose layers have fixed shapes; `options` are SessionOptions of the pieces.

        Raises SourceError, and the errors of ONNX and of its runtime.
        """
        model = read_model(Path(path))
        onnx.load_external_data_for_model(model, str(Path(path).parent))
        nodes = {node_name(node): node for node in model.graph.node}
        names = Counter(map(node_name, all_nodes(model.graph.node)))
        constants = {tensor.name for tensor in model.graph.initializer}
        self._inputs = [value.name for value in model.graph.input if value.name not in constants]
        known = [*self._inputs]

        def piece(wanted: Sequence[str]) -> onnxruntime.InferenceSession:
            return onnxruntime.InferenceSession(_part(model, known, wanted).SerializeToString(), options)

        self.layers: dict[str, Layer] = {}
        self.left: dict[str, str] = {}
        self._outputs = [value.name for value in model.graph.output]
        self._steps: list[_Step] = []
        for layer in scan(path):
            bound = _reason(layer, nodes, names) or layer.bind(library)
            if isinstance(bound, str):
                self.left[layer.name] = bound
                continue
            data, made = nodes[layer.name].input[0], nodes[(layer.name, *layer.fused)[-1]].output[0]
            self.layers[layer.name] = bound
            self._steps.append(_Step(None if data in known else piece([data]), data, bound, made))
            known += [name for name in (data, made) if name not in known]
        rest = [name for name in self._outputs if name not in known]
        self._last = piece(rest) if rest else None
        self._rest = rest

    def run(self, feeds: Mapping[str, Array]) -> list[Array]:
        """Return the model's outputs, in its order, for arrays by the names of its inputs. Raises TensorError."""
        if feeds.keys() != set(self._inputs):
            raise TensorError("feeds", [*feeds], f"must be the inputs of the model, {', '.join(self._inputs)}")
        values = dict(feeds)
        for session, data, layer, made in self._steps:
            if session is not None:
                (values[data],) = _run(session, values)
            values[made] = layer(values[data])
        if self._last is not None:
            values.update(zip(self._rest, _run(self._last, values), strict=True))
        return [values[name] for name in self._outputs]


def _reason(layer: FoundLayer, nodes: Mapping[str, onnx.NodeProto], names: Counter[str]) -> str:
    """Return the reason why a layer stays in the model, empty if it need not: a scan knows nodes by name only."""
    shared = next((name for name in (layer.name, *layer.fused) if names[name] > 1), None)
    if layer.reason or shared:
        return layer.reason or f"several nodes have the name {shared}"
    own = layer.name in nodes and is_operator(nodes[layer.name])
    return "" if own else "it stands in a graph within the model's own"


def _run(session: onnxruntime.InferenceSession, values: Mapping[str, Array]) -> list[Array]:
    outputs: list[Array] = session.run(None, {value.name: values[value.name] for value in session.get_inputs()})
    return outputs


def _part(model: onnx.ModelProto, known: Collection[str], wanted: Sequence[str]) -> onnx.ModelProto:
    """Return the part of `model` that makes the tensors `wanted` from those `known`; none of them are initializers."""
    graph = model.graph
    makers = {name: number for number, node in enumerate(graph.node) for name in node.output}
    numbers, needed, queue = set[int](), set[str](), [*wanted]
    while queue:
        name = queue.pop()
        if name not in needed:
            needed.add(name)
            number = None if name in known else makers.get(name)
            if number is not None and number not in numbers:
                numbers.add(number)
                queue += used(graph.node[number])
    stated = {value.name: value for value in (*graph.value_info, *graph.input, *graph.output)}
    part = onnx.helper.make_graph(
        [graph.node[number] for number in sorted(numbers)],
        graph.name,
        [stated[name] for name in known if name in needed],
        [stated.get(name) or onnx.ValueInfoProto(name=name) for name in wanted],
        [tensor for tensor in graph.initializer if tensor.name in needed],
        value_info=[value for value in graph.value_info if value.name in needed and value.name not in known],
        sparse_initializer=[tensor for tensor in graph.sparse_initializer if tensor.values.name in needed],
    )
    return onnx.helper.make_model(
        part,
        ir_version=max(model.ir_version, _FIRST_IR),
        opset_imports=model.opset_import,
        functions=model.functions,
    )
