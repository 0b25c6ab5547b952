"""ONNX Runtime: a model of which a library computes the transposed convolutions; docs/frameworks.md."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import onnx
import onnxruntime
from onnx import shape_inference
from onnx.utils import Extractor

from tvm_deconv.library import Layer, Library
from tvm_deconv.problem import Array
from tvm_deconv.scan import scan
from tvm_deconv.scan.onnx import node_name


class _Step(NamedTuple):
    """A layer: the piece of the model that makes its data, where that is not known yet, and both tensors' names."""

    piece: onnxruntime.InferenceSession | None
    data: str
    layer: Layer
    made: str


class Session:
    """A model that is cut at each layer that a library has an artifact for; ONNX Runtime runs the pieces between.

    `layers` are those of the library by the names of their nodes, `left` the others, with the reason. What a layer has
    absorbed of the nodes behind it runs with it.
    """

    def __init__(self, path: str | os.PathLike[str], library: Library, options: Any = None) -> None:
        """Read the model at `path`, whose layers have fixed shapes; `options` are SessionOptions of the pieces.

        Raises SourceError, and what ONNX and its runtime raise of a model.
        """
        model = shape_inference.infer_shapes(onnx.load(path))
        nodes = {node_name(node): node for node in model.graph.node}
        known = [value.name for value in model.graph.input]

        def piece(names: Sequence[str]) -> onnxruntime.InferenceSession:
            part = Extractor(model).extract_model(known, list(names))
            return onnxruntime.InferenceSession(part.SerializeToString(), options)

        self.layers: dict[str, Layer] = {}
        self.left: dict[str, str] = {}
        self._outputs = [value.name for value in model.graph.output]
        self._steps: list[_Step] = []
        for found in scan(path):
            outside = found.reason or "it stands in a graph within the model's own"
            layer = found.bind(library) if found.name in nodes else outside
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
        """Return the model's outputs, in its order, for arrays by the names of its inputs."""
        values = dict(feeds)
        for session, data, layer, made in self._steps:
            if session is not None:
                (values[data],) = _run(session, values)
            values[made] = layer(values[data])
        if self._last is not None:
            values.update(zip(self._rest, _run(self._last, values), strict=True))
        return [values[name] for name in self._outputs]


def _run(session: onnxruntime.InferenceSession, values: Mapping[str, Array]) -> list[Array]:
    found: list[Array] = session.run(None, {value.name: values[value.name] for value in session.get_inputs()})
    return found
