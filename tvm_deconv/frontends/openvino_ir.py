"""OpenVINO IR, versions 10 and 11: the .xml and its .bin, read without OpenVINO.

Shapes are those of the ports, so they are real wherever the model was reshaped to static ones. Filters, biases and the
output_shape input may come through Convert, Reshape, Squeeze and Unsqueeze. Bodies of If, Loop and TensorIterator are
scanned too.
"""

from __future__ import annotations

import dataclasses
import math
import re
import xml.etree.ElementTree as ET
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tvm_deconv.errors import ProblemError, SourceError
from tvm_deconv.frontends.files import read_array, read_bytes
from tvm_deconv.frontends.folding import absorb
from tvm_deconv.frontends.graph import ADD, BATCH_NORM, MULTIPLY, SUBTRACT, Graph, Node, arguments_of
from tvm_deconv.frontends.layers import FoundLayer, uncovered
from tvm_deconv.frontends.packages import cast
from tvm_deconv.problem import ACTIVATIONS, Array, Problem
from tvm_deconv.problem.activations import Argument
from tvm_deconv.problem.arrays import numpy_dtype

OPERATORS = ("ConvolutionBackpropData", "GroupConvolutionBackpropData")
#: element type -> NumPy name
_ELEMENT_TYPES = {
    "f16": "float16", "f32": "float32", "f64": "float64", "bf16": "bfloat16", "i8": "int8", "u8": "uint8",
    "i32": "int32", "i64": "int64",
}  # fmt: skip
#: precision of a port -> dtype of a problem
_PRECISIONS = {
    "FP16": "float16", "FP32": "float32", "FP64": "float64", "BF16": "bfloat16", "I8": "int8", "U8": "uint8",
    "I32": "int32",
}  # fmt: skip
#: The most layers that a constant is followed through; it bounds cycles too.
_LONGEST_PATH = 8
_RESHAPES = ("Reshape", "Squeeze", "Unsqueeze")
#: operator -> that of a `Node`
_ARITHMETIC = {"Add": ADD, "Subtract": SUBTRACT, "Multiply": MULTIPLY}
#: operator -> the activation that it computes, and how
_ACTIVATIONS = {
    operator.name: (name, operator) for name, activation in ACTIVATIONS.items() for operator in activation.openvino
}

#: A tensor: the layer that makes it and the port where it leaves.
_Tensor = tuple[int, int]


@dataclass(frozen=True, slots=True)
class _Port:
    precision: str
    shape: tuple[int, ...]  # -1 for an extent that is not known


@dataclass(frozen=True, slots=True)
class _Layer:
    id: int
    name: str
    type: str
    version: str
    data: dict[str, str]
    inputs: dict[int, _Port]
    outputs: dict[int, _Port]


def scan_ir(path: Path) -> list[FoundLayer]:
    """Return the transposed convolutions of the IR at `path`, with the constants of the .bin beside it.

    Raises SourceError if one of the files cannot be read.
    """
    root = _read_xml(path)
    if root.tag != "net" or root.get("version") not in ("10", "11"):
        shown = f"{root.tag} {root.get('version')}"
        raise SourceError("net", shown, f"must be a net of version 10 or 11, as OpenVINO IR is ({path})")
    nets = [element for element in root.iter() if element.find("layers") is not None]
    return [layer for net in nets for layer in _Net(net, path).scan()]


def _read_xml(path: Path) -> ET.Element:
    """Return the root of the XML at `path`, which has no document type and no entities."""
    try:
        text = read_bytes(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise SourceError("source", path, f"must be XML in UTF-8: {error}") from None
    if "\0" in text:  # expat would take it for UTF-16
        raise SourceError("source", path, "must be XML in UTF-8, without null characters")
    if "<!DOCTYPE" in text or "<!ENTITY" in text:
        raise SourceError("source", path, "must be XML without a document type or entities")
    try:
        return ET.fromstring(text)
    except (ET.ParseError, ValueError) as error:
        raise SourceError("source", path, f"must be well-formed XML: {error}") from None


class _Net:
    """The layers and edges of a net or of a body inside one."""

    def __init__(self, element: ET.Element, path: Path) -> None:
        self._path = path
        self._layers = {layer.id: layer for layer in map(self._layer, element.iterfind("layers/layer"))}
        self._sources: dict[_Tensor, _Tensor] = {}  # an input port, by layer and number -> the tensor there
        for edge in element.iterfind("edges/edge"):
            ends = [self._integer(edge, name) for name in ("from-layer", "from-port", "to-layer", "to-port")]
            self._sources[ends[2], ends[3]] = ends[0], ends[1]
        self._graph = Graph(map(self._node, self._layers.values()), self._constant)

    def scan(self) -> Iterator[FoundLayer]:
        """Yield the layers of the net itself, without its bodies."""
        for layer in self._layers.values():
            if layer.type in OPERATORS:
                yield self._covered(layer)

    def _covered(self, layer: _Layer) -> FoundLayer:
        """Return a transposed convolution with its epilogue, or with the reason why it is not covered."""
        if len(layer.inputs) not in (2, 3) or len(layer.outputs) != 1:
            raise SourceError("ports", layer.name, f"must be 2 or 3 inputs and 1 output of {layer.type} ({self._path})")
        problem = self._problem(layer)
        if isinstance(problem, str):
            return uncovered(layer.name, layer.type, problem)
        filter = self._input(layer, 1)
        if filter is not None and (filter.shape, filter.dtype.name) != (problem.filter_shape, problem.dtype):
            raise SourceError("filter", filter.shape, f"must be what port 1 of {layer.name} says ({self._path})")
        (number,) = layer.outputs
        steps = self._graph.steps((layer.id, number), problem.rank + 2, *problem.bias_shape)
        return absorb(FoundLayer(layer.name, layer.type, problem, filter), steps)

    def _problem(self, layer: _Layer) -> Problem | str:
        """Return the problem of a transposed convolution, or the reason why it is not covered."""
        (data, filter, *_), (output,) = layer.inputs.values(), layer.outputs.values()
        for name, port in (("data", data), ("filter", filter), ("output", output)):
            if -1 in port.shape:
                return f"{name} has a dynamic shape: {list(port.shape)}"
        dtype = _PRECISIONS.get(data.precision)
        if layer.version != "opset1" or dtype is None or filter.precision != data.precision:
            facts = f"{layer.version} with data {data.precision} and filter {filter.precision}"
            return f"is not opset1 on one of {', '.join(_PRECISIONS)}: {facts}"
        if layer.type.startswith("Group") != (len(filter.shape) == len(data.shape) + 1):
            return f"has a filter of rank {len(filter.shape)}"
        # An output_shape that is computed at run time gave the output port its extents all the same.
        wanted = self._input(layer, 2)
        shape = output.shape[2:] if wanted is None else wanted.reshape(-1).tolist()
        attributes: dict[str, Any] = {
            name: self._list(layer, name)
            for name in ("strides", "pads_begin", "pads_end", "dilations", "output_padding")
            if name in layer.data
        }
        try:
            problem = Problem.from_openvino(
                data.shape,
                filter.shape,
                strides=attributes.pop("strides", None),
                **attributes,
                auto_pad=layer.data.get("auto_pad"),
                output_shape=shape if len(layer.inputs) == 3 else None,
                dtype=dtype,
            )
        except ProblemError as error:
            return str(error)
        if problem.output_shape != output.shape:
            return f"output={output.shape}: must be the shape that the attributes give, {problem.output_shape}"
        return problem

    def _node(self, layer: _Layer) -> Node:
        """Return `layer` in the terms of an epilogue."""
        inputs: list[Hashable] = [self._sources.get((layer.id, port)) for port in layer.inputs]
        other = Node(layer.name, "", tuple(inputs), (layer.id, next(iter(layer.outputs), 0)))
        if layer.type in _ACTIVATIONS:
            name, operator = _ACTIVATIONS[layer.type]
            given = {key: self._argument(layer, key, argument) for key, argument in operator.arguments.items()}
            numbers = arguments_of(operator, given)
            operands = tuple(zip(inputs[1:], operator.inputs, strict=False))
            node = dataclasses.replace(other, op=name, numbers=numbers or {}, operands=operands)
            known = numbers is not None
        elif layer.type == "BatchNormInference":
            epsilon = self._number(layer, "epsilon" if "epsilon" in layer.data else "eps")
            if layer.version == "opset1":  # gamma and beta come before the data
                inputs = [*inputs[2:3], *inputs[:2], *inputs[3:]]
            node = dataclasses.replace(other, op=BATCH_NORM, inputs=tuple(inputs), numbers={"epsilon": epsilon})
            known = True
        else:
            node = dataclasses.replace(other, op=_ARITHMETIC.get(layer.type, ""))
            known = layer.data.get("auto_broadcast", "numpy") == "numpy"
        return node if known and len(layer.outputs) == 1 else other

    def _argument(self, layer: _Layer, name: str, argument: Argument) -> float | str | None:
        """Return an attribute of an activation: a word in capitals, or a number; None if it is left out."""
        if isinstance(argument.default, str):
            return layer.data.get(name, argument.default).upper()
        return None if name not in layer.data and argument.default is not None else self._number(layer, name)

    def _input(self, layer: _Layer, index: int) -> Array | None:
        """Return the constant that flows into an input, by its place among the ports."""
        ports = list(layer.inputs)
        return self._constant(self._sources.get((layer.id, ports[index]))) if index < len(ports) else None

    def _constant(self, tensor: Hashable) -> Array | None:
        """Return the value of a tensor that a Const makes, after conversions and reshapes; None for all others."""
        path: list[_Layer] = []
        while True:
            layer = self._layers.get(tensor[0]) if isinstance(tensor, tuple) else None
            if layer is None or len(path) > _LONGEST_PATH or len(layer.outputs) != 1:
                return None
            if layer.type == "Const":
                break
            if layer.type not in ("Convert", *_RESHAPES) or not layer.inputs:
                return None
            path.append(layer)
            tensor = self._sources.get((layer.id, next(iter(layer.inputs))))
        value = self._stored(layer)
        for layer in reversed(path):
            if value is None:
                return None
            value = self._converted(layer, value) if layer.type == "Convert" else self._reshaped(layer, value)
        return value

    def _stored(self, layer: _Layer) -> Array | None:
        dtype = _ELEMENT_TYPES.get(layer.data.get("element_type", ""))
        if dtype is None:
            return None
        shape = tuple(self._list(layer, "shape"))
        offset, size = (self._list(layer, name) for name in ("offset", "size"))
        if len(offset) != 1 or len(size) != 1:
            raise SourceError("offset", layer.name, f"must have one offset and one size ({self._path})")
        return read_array(self._path.with_suffix(".bin"), numpy_dtype(dtype), shape, offset[0], size[0])

    def _converted(self, layer: _Layer, value: Array) -> Array | None:
        dtype = _ELEMENT_TYPES.get(layer.data.get("destination_type", ""))
        return None if dtype is None else cast(value, dtype)

    def _reshaped(self, layer: _Layer, value: Array) -> Array | None:
        (port,) = layer.outputs.values()
        fits = -1 not in port.shape and math.prod(port.shape) == value.size
        return value.reshape(port.shape) if fits else None

    def _layer(self, element: ET.Element) -> _Layer:
        id = self._integer(element, "id")
        data = element.find("data")
        return _Layer(
            id=id,
            name=element.get("name") or f"layer_{id}",
            type=element.get("type", ""),
            version=element.get("version", "opset1"),
            data={} if data is None else dict(data.attrib),
            inputs=self._ports(element, "input/port"),
            outputs=self._ports(element, "output/port"),
        )

    def _ports(self, element: ET.Element, path: str) -> dict[int, _Port]:
        return {
            self._integer(port, "id"): _Port(
                port.get("precision", ""), tuple(self._extent(dim.text) for dim in port.iterfind("dim"))
            )
            for port in element.iterfind(path)
        }

    def _extent(self, text: str | None) -> int:
        if text is None or re.fullmatch(r"-1|[0-9]{1,18}", text) is None:
            raise SourceError("dim", text, f"must be an extent or -1 ({self._path})")
        return int(text)

    def _integer(self, element: ET.Element, attribute: str) -> int:
        text = element.get(attribute, "")
        if re.fullmatch(r"[0-9]{1,18}", text) is None:
            raise SourceError(attribute, text, f"must be an integer in <{element.tag}> ({self._path})")
        return int(text)

    def _list(self, layer: _Layer, attribute: str) -> list[int]:
        text = layer.data.get(attribute, "")
        items = [item.strip() for item in text.split(",")] if text.strip() else []
        if not all(re.fullmatch(r"-?[0-9]{1,18}", item) for item in items):
            raise SourceError(attribute, text, f"must be integers between commas in {layer.name} ({self._path})")
        return [int(item) for item in items]

    def _number(self, layer: _Layer, attribute: str) -> float:
        text = layer.data.get(attribute, "")
        try:
            return float(text)
        except ValueError:
            raise SourceError(attribute, text, f"must be a number in {layer.name} ({self._path})") from None
