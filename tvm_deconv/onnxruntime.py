"""ONNX Runtime: a model of which a library computes the transposed convolutions; docs/frameworks.md."""

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
    """A layer: the piece of the model that makes its data, where that is not known yet, and both tensors' names."""

    piece: onnxruntime.InferenceSession | None
    data: str
    layer: Layer
    made: str


class Session:
    """A model that is cut at each layer that a library has an artifact for; ONNX Runtime runs the pieces between.

    `layers` are those of the library by the names of their nodes, `left` the others, with the reason. What a layer has
    absorbed of the nodes behind it runs with it. Initializers are constants, also where they are inputs.
    """

    def __init__(self, path: str | os.PathLike[str], library: Library, options: Any = None) -> None:
        """Read the model at `path`, whose layers have fixed shapes; `options` are SessionOptions of the pieces.

        Raises SourceError, and what ONNX and its runtime raise of a model.
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
        for found in scan(path):
            layer = _why_not(found, nodes, names) or found.bind(library)
            if isinstance(layer, str):
                self.left[found.name] = layer
                continue
            data, made = nodes[found.name].input[0], nodes[(found.name, *found.fused)[-1]].output[0]
            self.layers[found.name] = layer
            self._steps.append(_Step(None if data in known else piece([data]), data, layer, made))
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


def _why_not(found: FoundLayer, nodes: Mapping[str, onnx.NodeProto], names: Counter[str]) -> str:
    """Why a layer stays where it is, empty where it need not: names are all that a scan tells of its nodes."""
    shared = next((name for name in (found.name, *found.fused) if names[name] > 1), None)
    if found.reason or shared:
        return found.reason or f"several nodes have the name {shared}"
    own = found.name in nodes and is_operator(nodes[found.name])
    return "" if own else "it stands in a graph within the model's own"


def _run(session: onnxruntime.InferenceSession, values: Mapping[str, Array]) -> list[Array]:
    found: list[Array] = session.run(None, {value.name: values[value.name] for value in session.get_inputs()})
    return found


def _part(model: onnx.ModelProto, known: Collection[str], wanted: Sequence[str]) -> onnx.ModelProto:
    """Return what of `model` makes the tensors `wanted` of those `known`; of either none are initializers."""
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
