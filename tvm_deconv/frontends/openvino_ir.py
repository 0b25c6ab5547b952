"""OpenVINO IR, versions 10 and 11: the .xml and its .bin, read without OpenVINO.

Shapes are those of the ports, so they are real wherever the model was reshaped to static ones. Filters, biases and the
output_shape input may come through Convert, Reshape, Squeeze and Unsqueeze. Bodies of If, Loop and TensorIterator are
scanned too.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import xml.etree.ElementTree as ET
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tvm_deconv.errors import ProblemError, SourceError
from tvm_deconv.frontends.extents import Ranges, agrees, check_names, free_extents, samples
from tvm_deconv.frontends.files import MOST_TEXT, Constants, check_regular, read_bytes
from tvm_deconv.frontends.folding import absorb
from tvm_deconv.frontends.graph import ADD, BATCH_NORM, MULTIPLY, SUBTRACT, Graph, Node, arguments_of
from tvm_deconv.frontends.layers import FoundLayer, uncovered
from tvm_deconv.frontends.packages import missing_package
from tvm_deconv.frontends.quantization import Stored, fake_quantized, levels_of, quantized
from tvm_deconv.problem import ACTIVATIONS, Array, Problem
from tvm_deconv.problem.activations import Argument
from tvm_deconv.problem.arrays import numpy_dtype
from tvm_deconv.problem.quantization import STORED

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
_CONSTANT_ARITHMETIC = {"Add": np.add, "Subtract": np.subtract, "Multiply": np.multiply}
#: The operators on constants that are followed: those of compressed and of quantized weights.
_FOLLOWED = ("Convert", *_RESHAPES, *_CONSTANT_ARITHMETIC, "FakeQuantize")
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


def scan_ir(path: Path, ranges: Ranges) -> list[FoundLayer]:
    """Return the transposed convolutions of the IR at `path`, with the constants of the .bin beside it.

    With `ranges` of free extents, layers get buckets from the shapes that OpenVINO finds. Raises SourceError if one of
    the files cannot be read, or if there are ranges and no OpenVINO.
    """
    root = _read_xml(path)
    if root.tag != "net" or root.get("version") not in ("10", "11"):
        shown = f"{root.tag} {root.get('version')}"
        raise SourceError("net", shown, f"must be a net of version 10 or 11, as OpenVINO IR is ({path})")
    nets = [element for element in root.iter() if element.find("layers") is not None]
    sampled = _sampled_shapes(root, path, ranges) if ranges else []
    constants = Constants(path)
    return [layer for net in nets for layer in _Net(net, path, sampled, constants).scan()]


def _read_xml(path: Path) -> ET.Element:
    """Return the root of the XML at `path`, which has no document type and no entities."""
    try:
        text = read_bytes(path, MOST_TEXT).decode("utf-8-sig")
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


def check_weights(path: Path) -> None:
    """Check that the weights of the IR at `path` are a regular file, before OpenVINO opens it. Raises SourceError."""
    weights = path.with_suffix(".bin")
    if os.path.lexists(weights):  # without it OpenVINO says what is missing
        check_regular(weights)


def _sampled_shapes(root: ET.Element, path: Path, ranges: Ranges) -> list[dict[str, list[int | str]]]:
    """Return the shapes of the layers' data, by the names of the layers, for samples of the `ranges`."""
    shapes = {
        str(layer.get("name")): [_extent(dim.text, path) for dim in layer.iterfind("output/port/dim")]
        for layer in root.iterfind("layers/layer[@type='Parameter']")
    }
    free = [f"{name}.{axis}" for name, dims in shapes.items() for axis, dim in enumerate(dims) if dim == -1]
    check_names(ranges, free, path)
    check_weights(path)
    try:
        import openvino
    except ImportError:
        raise missing_package("a range of extents of an IR", "openvino") from None
    found = []
    for values in samples(ranges):
        inputs = {
            name: [values.get(f"{name}.{axis}", dim) for axis, dim in enumerate(dims)] for name, dims in shapes.items()
        }
        try:
            model = openvino.Core().read_model(path)
            model.reshape({value: inputs[value.get_node().get_friendly_name()] for value in model.inputs})
        except (RuntimeError, KeyError) as error:
            raise SourceError("extent", values, f"must be extents that OpenVINO takes: {error} ({path})") from None
        nodes = [node for node in model.get_ops() if node.get_type_name() in OPERATORS]
        found.append({node.get_friendly_name(): _known(node.get_input_partial_shape(0)) for node in nodes})
    return found


def _extent(text: str | None, path: Path) -> int:
    """Return the extent that a file at `path` gives, -1 for one that is free. Raises SourceError."""
    if text is None or re.fullmatch(r"-1|[0-9]{1,18}", text) is None:
        raise SourceError("dim", text, f"must be an extent or -1 ({path})")
    return int(text)


def _known(shape: Any) -> list[int | str]:
    """Return the extents of one of OpenVINO's shapes, which may be dynamic."""
    return [dim.get_length() if dim.is_static else "?" for dim in shape] if shape.rank.is_static else []


def _fit(values: Sequence[Array]) -> bool:
    """Tell whether the arrays have one type and broadcast to the shape of the first."""
    first = values[0]
    pairs = (zip(other.shape[::-1], first.shape[::-1], strict=False) for other in values)
    return all(other.dtype == first.dtype and other.ndim <= first.ndim for other in values) and all(
        extent in (1, whole) for pair in pairs for extent, whole in pair
    )


def _of_outputs(value: Array, rank: int, grouped: bool) -> Array | None:
    """Return numbers that broadcast against a filter of that `rank`, one or ``[C]``; None along other axes."""
    shape = (1,) * (rank - value.ndim) + value.shape
    if value.size == 1:
        return value.reshape(())
    several = [axis for axis, extent in enumerate(shape) if extent != 1]
    return value.reshape(-1) if len(shape) == rank and several == [1 + grouped] else None


def _rank(layer: _Layer, filter: _Port) -> int:
    """Return the rank of a layer's data, which its filter tells."""
    return len(filter.shape) - layer.type.startswith("Group")


class _Net:
    """The layers and edges of a net or of a body inside one."""

    def __init__(
        self,
        element: ET.Element,
        path: Path,
        sampled: Sequence[Mapping[str, Sequence[int | str]]],
        constants: Constants,
    ) -> None:
        self._path, self._sampled, self._constants = path, sampled, constants
        self._layers = {layer.id: layer for layer in map(self._layer, element.iterfind("layers/layer"))}
        self._sources: dict[_Tensor, _Tensor] = {}  # an input port, by layer and number -> the tensor there
        for edge in element.iterfind("edges/edge"):
            ends = [self._integer(edge, name) for name in ("from-layer", "from-port", "to-layer", "to-port")]
            self._sources[ends[2], ends[3]] = ends[0], ends[1]
        self._values: dict[int, Array | None] = {}
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
        steps = [*self._graph.steps((layer.id, number), problem.rank + 2, *problem.bias_shape)]
        found = FoundLayer(layer.name, layer.type, problem, filter, note=self._note(layer, problem, filter))
        found = absorb(found, steps, self._constants.take)
        ends = {sum(len(step.nodes) for step in steps[: i + 1]): step.output for i, step in enumerate(steps)}
        return self._on_integers(layer, found, filter, ends.get(len(found.fused), (layer.id, number)))

    def _on_integers(self, node: _Layer, layer: FoundLayer, filter: Array | None, made: Hashable) -> FoundLayer:
        """Return a layer whose data FakeQuantize makes as a quantized one, or with the reason why it is none."""
        maker = self._maker(node, 0)
        if maker is None or maker.type != "FakeQuantize" or filter is None:
            return layer
        user = self._graph.only_user(made)
        after = self._layers.get(user.output[0]) if user is not None and isinstance(user.output, tuple) else None
        found, result = self._levels(maker), self._levels(after)
        output = result[0] if result is not None and result[1] == 256 else None
        stored = self._stored_filter(node, filter)
        made_of: FoundLayer | str
        if found is None:
            rule = "must have constant ranges with 0 among at most 256 levels, the same for its result"
            made_of = f"{self._ranges(maker)}: {rule}"
        elif layer.filter is not filter:
            made_of = "a scale behind it must be folded into its filter before that is quantized"
        elif stored is None:
            of_filter = self._maker(node, 1)
            ranges = f"{self._ranges(of_filter)}: " if of_filter and of_filter.type == "FakeQuantize" else ""
            made_of = f"{ranges}its filter must be integers with a scale, one or one for each output channel"
        else:
            made_of = quantized(layer, found[0], *stored, output)
        if isinstance(made_of, str):
            return dataclasses.replace(layer, note=f"{layer.note}: {made_of}")
        if user is not None and output is not None:
            made_of = dataclasses.replace(made_of, fused=(*made_of.fused, user.name))
        return made_of

    def _ranges(self, layer: _Layer) -> str:
        """Return the range and the levels of a FakeQuantize, after its name."""
        ends = (self._input(layer, index) for index in (1, 2))
        low, high = ("?" if end is None else f"{end.item() if end.size == 1 else end.shape}" for end in ends)
        return f"{layer.name}={low}..{high} in {self._number(layer, 'levels'):g} levels"

    def _levels(self, layer: _Layer | None) -> tuple[Stored, int] | None:
        """Return the integers of a FakeQuantize with constant ranges, and how many there are; None of another."""
        if layer is None or layer.type != "FakeQuantize" or len(layer.inputs) != 5:
            return None
        low, high, least, most = (self._input(layer, index) for index in range(1, 5))
        levels = self._number(layer, "levels")
        if low is None or high is None or least is None or most is None or not 2 <= levels <= 256:
            return None
        if low.shape != high.shape or not (np.array_equal(low, least) and np.array_equal(high, most)):
            return None
        stored = levels_of(low, high, int(levels))
        return None if stored is None else (stored, int(levels))

    def _stored_filter(self, node: _Layer, filter: Array) -> tuple[Array, Stored] | None:
        """Return the integers of a filter, and how they stand for it; None if it is not made of integers like that."""
        maker = self._maker(node, 1)
        stored = self._multiplied(maker) if maker is not None and maker.type == "Multiply" else None
        levels = self._levels(maker)
        if levels is not None:
            stored, zero = levels[0], levels[0].zero_point
            if zero.max() <= 128 and (levels[1] - 1 - zero).max() <= 127:
                stored = stored._replace(dtype="int8", zero_point=np.zeros_like(zero))
        if stored is None:
            return None
        with np.errstate(all="ignore"):
            integers = np.rint(filter / stored.scale + stored.zero_point).astype(stored.dtype)
        grouped = node.type.startswith("Group")
        scale, zero_point = (_of_outputs(value, filter.ndim, grouped) for value in stored[1:])
        if scale is None or zero_point is None:
            return None
        return integers, Stored(stored.dtype, scale, zero_point)

    def _multiplied(self, layer: _Layer) -> Stored | None:
        """Return how integers, less a zero point or none, times a scale stand for a constant; None of another."""
        scale, source = self._input(layer, 1), self._maker(layer, 0)
        zero: Array | None = np.zeros((), np.int64)
        if source is not None and source.type == "Subtract":
            zero, source = self._input(source, 1), self._maker(source, 0)
        source = self._maker(source, 0) if source is not None and source.type == "Convert" else None
        dtype = "" if source is None else _ELEMENT_TYPES.get(source.data.get("element_type", ""), "")
        # As far as int64 holds them; `Scaling` says which are allowed.
        if (
            dtype not in STORED
            or scale is None
            or zero is None
            or not np.all((np.rint(zero) == zero) & (abs(zero) < 2**62))
        ):
            return None
        return Stored(dtype, scale, zero.astype(np.int64))

    def _problem(self, layer: _Layer) -> Problem | str:
        """Return the problem of a transposed convolution, or the reason why it is not covered."""
        (data, filter, *_), (output,) = layer.inputs.values(), layer.outputs.values()
        if -1 in filter.shape:
            return f"filter has a dynamic shape: {list(filter.shape)}"
        dtype = _PRECISIONS.get(data.precision)
        if layer.version != "opset1" or dtype is None or filter.precision != data.precision:
            facts = f"{layer.version} with data {data.precision} and filter {filter.precision}"
            return f"is not opset1 on one of {', '.join(_PRECISIONS)}: {facts}"
        if data.shape and len(data.shape) != _rank(layer, filter):
            return f"has a filter of rank {len(filter.shape)}"
        # An output_shape that is computed at run time gave the output port its extents all the same.
        wanted = self._input(layer, 2)
        shape = output.shape[2:] if wanted is None else wanted.reshape(-1).tolist()
        if len(layer.inputs) == 3 and -1 in shape:
            return f"output_shape is computed at run time, for an output of {list(output.shape)}"
        attributes: dict[str, Any] = {
            name: self._list(layer, name)
            for name in ("strides", "pads_begin", "pads_end", "dilations", "output_padding")
            if name in layer.data
        }
        try:
            problem = Problem.from_openvino(
                self._data_form(layer, data, filter),
                filter.shape,
                strides=attributes.pop("strides", None),
                **attributes,
                auto_pad=layer.data.get("auto_pad"),
                output_shape=shape if len(layer.inputs) == 3 else None,
                dtype=dtype,
            )
        except ProblemError as error:
            return str(error)
        if not agrees(problem, output.shape):
            return f"output={output.shape}: must be the shape that the attributes give, {problem.output_shape}"
        return problem

    def _data_form(self, layer: _Layer, data: _Port, filter: _Port) -> list[int | str | list[int]]:
        """Return the shape of the data, with "any" or buckets for free extents; channels are those of the filter."""
        grouped = layer.type.startswith("Group")
        shape: list[int | str] = [
            "?" if extent == -1 else extent for extent in data.shape or (-1,) * _rank(layer, filter)
        ]
        if len(shape) > 1 and shape[1] == "?":
            shape[1] = math.prod(filter.shape[: 1 + grouped])
        return free_extents(shape, [shapes.get(layer.name) for shapes in self._sampled])

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

    def _constant(self, tensor: Hashable, depth: int = 0) -> Array | None:
        """Return the value of a tensor that the net holds, also behind operators on constants; None for all others."""
        layer = self._layers.get(tensor[0]) if isinstance(tensor, tuple) else None
        if layer is None or depth > _LONGEST_PATH or len(layer.outputs) != 1:
            return None
        if layer.id not in self._values:
            self._values[layer.id] = None  # what a layer in a circle finds
            self._values[layer.id] = self._stored(layer) if layer.type == "Const" else self._computed(layer, depth)
        return self._values[layer.id]

    def _computed(self, layer: _Layer, depth: int) -> Array | None:
        """Return what a layer makes of constants; None if it is none of those that are followed."""
        if layer.type not in _FOLLOWED or not layer.inputs:
            return None
        count = 1 if layer.type in ("Convert", *_RESHAPES) else len(layer.inputs)  # a new shape is that of the port
        sources = [self._sources.get((layer.id, port)) for port in [*layer.inputs][:count]]
        values = [value for value in (self._constant(source, depth + 1) for source in sources) if value is not None]
        if len(values) != count:
            return None
        if layer.type == "Convert":
            return self._converted(layer, values[0])
        if layer.type in _RESHAPES:
            return self._reshaped(layer, values[0])
        self._constants.take(values[0].nbytes)
        if layer.type == "FakeQuantize":
            return self._quantized(layer, values)
        return self._combined(layer, values)

    def _combined(self, layer: _Layer, values: Sequence[Array]) -> Array | None:
        """Return sum, difference or product of two constants, of which the first has the shape of the result."""
        if len(values) != 2 or layer.data.get("auto_broadcast", "numpy") != "numpy" or not _fit(values):
            return None
        with np.errstate(all="ignore"):
            made: Array = _CONSTANT_ARITHMETIC[layer.type](*values)
        return made

    def _quantized(self, layer: _Layer, values: Sequence[Array]) -> Array | None:
        levels = self._number(layer, "levels")
        broadcasts = layer.data.get("auto_broadcast", "numpy") == "numpy"
        if len(values) != 5 or not 2 <= levels < np.inf or not broadcasts or not _fit(values):
            return None
        value, low, high, least, most = values
        return fake_quantized(value, low, high, least, most, int(levels))

    def _note(self, layer: _Layer, problem: Problem, filter: Array | None) -> str:
        """Return what is to be said of a layer that is covered: types that the net stores, a filter of run time."""
        data = self._maker(layer, 0)
        notes = [f"as {problem.dtype}: its data are quantized"] if data and data.type == "FakeQuantize" else []
        first = maker = self._maker(layer, 1)
        for _ in range(_LONGEST_PATH):
            if maker is None or maker.type not in _FOLLOWED:
                break
            maker = self._maker(maker, 0)
        stored = _ELEMENT_TYPES.get(maker.data.get("element_type", "")) if maker and maker.type == "Const" else None
        if filter is None:
            notes.append(f"its filter is made by {f'{first.type} {first.name}' if first else 'an input'} at run time")
        elif stored != problem.dtype:
            notes.append(f"filter stored as {stored}")
        return ", ".join(notes)

    def _maker(self, layer: _Layer, index: int) -> _Layer | None:
        """Return the layer that makes an input, by its place among the ports."""
        ports = [*layer.inputs]
        source = self._sources.get((layer.id, ports[index])) if index < len(ports) else None
        return None if source is None else self._layers.get(source[0])

    def _stored(self, layer: _Layer) -> Array | None:
        dtype = _ELEMENT_TYPES.get(layer.data.get("element_type", ""))
        if dtype is None:
            return None
        shape = tuple(self._list(layer, "shape"))
        offset, size = (self._list(layer, name) for name in ("offset", "size"))
        if len(offset) != 1 or len(size) != 1:
            raise SourceError("offset", layer.name, f"must have one offset and one size ({self._path})")
        return self._constants.read(self._path.with_suffix(".bin"), numpy_dtype(dtype), shape, offset[0], size[0])

    def _converted(self, layer: _Layer, value: Array) -> Array | None:
        dtype = _ELEMENT_TYPES.get(layer.data.get("destination_type", ""))
        return None if dtype is None else self._constants.cast(value, dtype)

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
                port.get("precision", ""), tuple(_extent(dim.text, self._path) for dim in port.iterfind("dim"))
            )
            for port in element.iterfind(path)
        }

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
