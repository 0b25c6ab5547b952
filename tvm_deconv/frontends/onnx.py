"""ONNX models: ConvTranspose, read with the onnx package.

Shapes come from ONNX's own shape inference, constants from initializers and Constant nodes, also through Identity,
Cast and Expand. Functions of the opset of the model are inlined, and the bodies of If, Loop and Scan are scanned too.
External data may lie in the folder of the model and below it, nowhere else.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections import ChainMap
from collections.abc import Callable, Hashable, Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from tvm_deconv.errors import ProblemError, SourceError
from tvm_deconv.frontends.extents import Ranges, agrees, check_names, free_extents, samples
from tvm_deconv.frontends.files import MOST_BYTES, Constants, from_bytes, read_bytes
from tvm_deconv.frontends.folding import absorb
from tvm_deconv.frontends.graph import ADD, BATCH_NORM, MULTIPLY, SUBTRACT, Graph, Node, arguments_of
from tvm_deconv.frontends.layers import FoundLayer, uncovered
from tvm_deconv.frontends.onnx_functions import check_expansion
from tvm_deconv.frontends.packages import missing_package
from tvm_deconv.frontends.quantization import Stored, dequantized, quantized
from tvm_deconv.problem import ACTIVATIONS, Array, Epilogue, Problem
from tvm_deconv.problem.arrays import numpy_dtype

try:
    import onnx
    import onnx.checker
    import onnx.inliner
    import onnx.numpy_helper
    import onnx.shape_inference
    from google.protobuf.message import DecodeError, EncodeError  # type: ignore[import-untyped]
except ImportError:
    raise missing_package("an ONNX model", "onnx", "onnx") from None

_NATIVE_ERRORS = (
    DecodeError, EncodeError, onnx.checker.ValidationError, onnx.shape_inference.InferenceError, RuntimeError,
    ValueError,
)  # fmt: skip
OPERATOR = "ConvTranspose"
_DOMAINS = ("", "ai.onnx")
_ATTRIBUTES = {
    "auto_pad", "dilations", "group", "kernel_shape", "output_padding", "output_shape", "pads", "strides",
}  # fmt: skip
_DTYPES = {
    onnx.TensorProto.FLOAT: "float32",
    onnx.TensorProto.DOUBLE: "float64",
    onnx.TensorProto.FLOAT16: "float16",
    onnx.TensorProto.BFLOAT16: "bfloat16",
}
#: operator -> that of a `Node`
_ARITHMETIC = {"Add": ADD, "Sub": SUBTRACT, "Mul": MULTIPLY}
#: operator -> the activation that it computes, and how
_ACTIVATIONS = {
    operator.name: (name, operator) for name, activation in ACTIVATIONS.items() for operator in activation.onnx
}
_BATCH_NORM_ATTRIBUTES = {"epsilon", "momentum", "training_mode"}
_CONSTANTS = _DTYPES | {
    getattr(onnx.TensorProto, name.upper()): name for name in ("int8", "uint8", "int16", "uint16", "int32", "int64")
}
#: Before this opset, Add and Mul broadcast in another way and BatchNormalization is in training unless it says so.
_FIRST_OPSET = 7
#: Operators of ONNX Runtime that are transposed convolutions too, among them one that its optimized models hold.
_RELATIVES = ("QLinearConvTranspose", "ConvTransposeWithDynamicPads")
#: The most nodes that a constant is followed through; it bounds cycles too.
_LONGEST_PATH = 8
#: The operators on constants that are followed: those that make filters, and those that make shapes of a few numbers.
_FOLLOWED = ("Cast", "Identity", "DequantizeLinear", "Expand")
_OF_SHAPES: dict[str, Callable[..., Array]] = {"Equal": np.equal, "Mul": np.multiply, "Where": np.where}
_MOST_AXES = 8

#: an unknown extent is a string, extents of unknown rank are None
_Extents: TypeAlias = tuple[int | str, ...] | None
#: element type and extents of a tensor
_Type: TypeAlias = tuple[int, _Extents]
_UNKNOWN: _Type = (0, None)
#: the constant or the node that makes a tensor, None for an input
_Maker: TypeAlias = "onnx.TensorProto | onnx.NodeProto | None"


def read_model(path: Path) -> onnx.ModelProto:
    """Read the model at `path`, inline its functions and infer its shapes; external data stay where they are.

    Raises SourceError if it cannot be read.
    """
    content = read_bytes(path, MOST_BYTES)
    with _native_errors(path):
        model = onnx.load_model_from_string(content)
        if model.functions:
            check_expansion(model, path)
            model = onnx.inliner.inline_local_functions(model)
        model = onnx.shape_inference.infer_shapes(model, data_prop=True)
    if not model.ir_version or not model.graph.node:
        raise SourceError("source", path, "must be an ONNX model with nodes")
    return model


@contextlib.contextmanager
def _native_errors(path: Path) -> Iterator[None]:
    """Raise SourceError for what the native code of the onnx package raises."""
    try:
        yield
    except SourceError:
        raise
    except _NATIVE_ERRORS as error:
        raise SourceError("source", path, f"must be a valid ONNX model: {error}") from None


class Place(NamedTuple):
    """Where a layer is: its graph, its node, its data, and the tensor that it makes with what it has absorbed.

    The data are the node's, or the integers that stand for them.
    """

    graph: onnx.GraphProto
    node: onnx.NodeProto
    data: str
    made: str


def scan_onnx(path: Path, ranges: Ranges) -> list[FoundLayer]:
    """Return the transposed convolutions of the model at `path`, with buckets from the `ranges` of free extents.

    Raises SourceError if it cannot be read.
    """
    return [layer for layer, _ in placed_layers(read_model(path), path, ranges)]


def placed_layers(model: onnx.ModelProto, path: Path, ranges: Ranges) -> list[tuple[FoundLayer, Place | None]]:
    """Return the transposed convolutions of `model`, which was read from `path`, with their places.

    A layer in a function that is not inlined has none. Layers between DequantizeLinear and QuantizeLinear are quantized
    problems. Raises SourceError.
    """
    sampled = _sampled_shapes(model, path, ranges)
    opset = max((entry.version for entry in model.opset_import if entry.domain in _DOMAINS), default=0)
    left = [
        uncovered(node_name(node), OPERATOR, f"stands in the function {function.name}, which has another opset")
        for function in model.functions
        for node in function.node
        if is_operator(node)
    ]
    return [
        *_Graph(model.graph, path, opset, {}, {}, sampled, _Values(path)).scan(),
        *((layer, None) for layer in left),
    ]


def _sampled_shapes(model: onnx.ModelProto, path: Path, ranges: Ranges) -> list[dict[str, _Extents]]:
    """Return the shapes of the model's tensors for samples of the `ranges`, as ONNX infers them from the inputs."""
    if not ranges:
        return []
    free = [dim for value in model.graph.input for dim in _free_extents(value)]
    check_names(ranges, [name for names, _ in free for name in names], path)
    bare = onnx.ModelProto()
    shapes = []
    for values in samples(ranges):
        bare.CopyFrom(model)
        for graph in graphs(bare.graph):
            del graph.value_info[:]
        for value in bare.graph.output:
            value.type.tensor_type.ClearField("shape")
        for names, dim in (dim for value in bare.graph.input for dim in _free_extents(value)):
            given = [values[name] for name in names if name in values]
            if given:
                dim.dim_value = given[0]
        with _native_errors(path):
            inferred = onnx.shape_inference.infer_shapes(bare, data_prop=True)
        tensors = [value for graph in graphs(inferred.graph) for value in (*graph.input, *graph.value_info)]
        shapes.append({value.name: _type(value)[1] for value in tensors})
    return shapes


def _free_extents(value: onnx.ValueInfoProto) -> list[tuple[list[str], onnx.TensorShapeProto.Dimension]]:
    """Return the free extents of an input, each with its names: its own, and that of the input with the axis."""
    dims = enumerate(value.type.tensor_type.shape.dim)
    free = [(axis, dim) for axis, dim in dims if not dim.HasField("dim_value") or dim.dim_value < 0]
    return [([*filter(None, [dim.dim_param]), f"{value.name}.{axis}"], dim) for axis, dim in free]


class _Values:
    """The values of the tensors that a model stores."""

    def __init__(self, path: Path) -> None:
        self.constants = Constants(path)
        self._path = path
        # By the id of the tensor, or of the node, which stays alive.
        self._values: dict[int, tuple[onnx.TensorProto, Array]] = {}
        self._computed: dict[int, tuple[onnx.NodeProto, Array | None]] = {}

    def of(self, tensor: onnx.TensorProto) -> Array | None:
        """Return the value of a tensor, the same array each time; None if its type is none of ours."""
        if tensor.data_type not in _CONSTANTS:
            return None
        if id(tensor) not in self._values:
            self._values[id(tensor)] = tensor, self._read(tensor)
        return self._values[id(tensor)][1]

    def once(self, node: onnx.NodeProto, compute: Callable[[], Array | None]) -> Array | None:
        """Return what a node makes of constants, which is computed once."""
        if id(node) not in self._computed:
            self._computed[id(node)] = node, None  # what a node in a circle finds
            self._computed[id(node)] = node, compute()
        return self._computed[id(node)][1]

    def _read(self, tensor: onnx.TensorProto) -> Array:
        dtype, shape = numpy_dtype(_CONSTANTS[tensor.data_type]), tuple(tensor.dims)
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            return self._external(tensor, dtype, shape)
        self.constants.take(tensor.ByteSize())
        if tensor.HasField("raw_data"):
            return from_bytes(tensor.raw_data, dtype, shape, self._path)
        try:
            return np.asarray(onnx.numpy_helper.to_array(tensor), dtype)
        except (ValueError, TypeError, OverflowError) as error:
            raise SourceError("shape", shape, f"must fit the values of {tensor.name}: {error} ({self._path})") from None

    def _external(self, tensor: onnx.TensorProto, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
        facts = {str(entry.key): str(entry.value) for entry in tensor.external_data}
        folder = self._path.parent.resolve()
        try:
            path = (folder / facts["location"]).resolve()
            offset, size = int(facts.get("offset", "0")), int(facts["length"]) if "length" in facts else None
        except (KeyError, ValueError, OSError, RuntimeError):
            rule = f"must hold location, offset and length of {tensor.name} ({self._path})"
            raise SourceError("external_data", facts, rule) from None
        if not path.is_relative_to(folder):
            rule = f"must lie in the folder of the model, {folder}"
            raise SourceError("external_data", facts["location"], rule)
        return self.constants.read(path, dtype, shape, offset, size)


class _Graph:
    """A graph, with the tensors of the graphs around it, by name."""

    def __init__(
        self,
        graph: onnx.GraphProto,
        path: Path,
        opset: int,
        types: MutableMapping[str, _Type],
        makers: MutableMapping[str, _Maker],
        sampled: Sequence[Mapping[str, _Extents]],
        tensors: _Values,
    ) -> None:
        self._sampled, self._tensors = sampled, tensors
        self._proto, self._path, self._opset, self._nodes = graph, path, opset, list(graph.node)
        values = {value.name: _type(value) for value in (*graph.input, *graph.value_info, *graph.output)}
        stored: dict[str, _Type] = {tensor.name: (tensor.data_type, tuple(tensor.dims)) for tensor in graph.initializer}
        self._types = ChainMap[str, _Type](stored, values, types)
        inputs: dict[str, _Maker] = {value.name: None for value in graph.input}
        made: dict[str, _Maker] = {name: node for node in self._nodes for name in node.output}
        constants: dict[str, _Maker] = {tensor.name: tensor for tensor in graph.initializer}
        self._makers = ChainMap[str, _Maker](constants, made, inputs, makers)
        outputs = Node("", "", tuple(value.name for value in graph.output), None)
        self._graph = Graph([*map(self._node, self._nodes), outputs], self._constant)

    def scan(self) -> Iterator[tuple[FoundLayer, Place | None]]:
        """Yield the layers of the graph and of the graphs inside it.

        Behind one of another shape than the model's tensor, which is inferred, the extents of others may be wrong.
        """
        differs = ""
        for layer, place in self._found():
            if differs:
                rule = f"may have other extents than the model says, as {differs} has"
                layer = uncovered(layer.name, layer.operator, rule)
            elif layer.problem is not None and place is not None and not self._agrees(layer.problem, place.node):
                differs, made = layer.name, list(layer.problem.output_shape)
                rule = f"gives {made} by its attributes, and {_shown(self._extents(place.node))} by the model's shapes"
                layer = uncovered(layer.name, layer.operator, rule)
            yield layer, place

    def _agrees(self, problem: Problem, node: onnx.NodeProto) -> bool:
        return bool(problem.dynamic) or agrees(problem, self._extents(node) or ())

    def _extents(self, node: onnx.NodeProto) -> _Extents:
        return self._types.get(node.output[0], _UNKNOWN)[1]

    def _found(self) -> Iterator[tuple[FoundLayer, Place | None]]:
        for node in self._nodes:
            if is_operator(node):
                yield self._layer(node)
            elif node.op_type in _RELATIVES:
                reason = (
                    f"domain={node.domain}: must be ONNX's, whose operator is {OPERATOR}, of integers between Q and DQ"
                )
                yield uncovered(node_name(node), node.op_type, reason), None
            for graph in bodies(node):
                yield from _Graph(
                    graph, self._path, self._opset, self._types, self._makers, self._sampled, self._tensors
                ).scan()

    def _layer(self, node: onnx.NodeProto) -> tuple[FoundLayer, Place]:
        """Return a transposed convolution with its epilogue, or with the reason why it is not covered."""
        name = node_name(node)
        if len(node.input) not in (2, 3) or len(node.output) != 1:
            raise SourceError("inputs", name, f"must be 2 or 3 and the output 1 of {OPERATOR} ({self._path})")
        problem = self._problem(node)
        if isinstance(problem, str):
            return uncovered(name, OPERATOR, problem), Place(self._proto, node, node.input[0], node.output[0])
        filter = self._constant(node.input[1])
        bias = self._constant(node.input[2]) if problem.epilogue.bias else None
        if bias is not None:
            bias = self._tensors.constants.cast(bias, problem.accumulate_dtype)
        if filter is not None and (filter.shape, filter.dtype.name) != (problem.filter_shape, problem.dtype):
            raise SourceError("filter", filter.shape, f"must be what the graph says of it in {name} ({self._path})")
        steps = [*self._graph.steps(node.output[0], problem.rank + 2, problem.bias_shape[0])]
        found = FoundLayer(name, OPERATOR, problem, filter, bias, note=self._note(node, problem, filter, bias))
        layer = absorb(found, steps, self._tensors.constants.take)
        ends = {sum(len(step.nodes) for step in steps[: i + 1]): str(step.output) for i, step in enumerate(steps)}
        place = Place(self._proto, node, node.input[0], ends.get(len(layer.fused), node.output[0]))
        return self._on_integers(layer, place) if filter is None or layer.filter is filter else (layer, place)

    def _on_integers(self, layer: FoundLayer, place: Place) -> tuple[FoundLayer, Place]:
        """Return a covered layer as a quantized one, with its place, if the nodes around it quantize.

        It has a note where they break a rule.
        """
        data, filter = (self._makers.get(tensor) for tensor in place.node.input[:2])
        stored = [self._stored(maker, "DequantizeLinear") for maker in (data, filter)]
        for broken in stored:
            if isinstance(broken, str):
                return dataclasses.replace(layer, note=f"{layer.note}: {broken}"), place
        of_data, of_filter = stored
        if not isinstance(of_data, Stored) or not isinstance(of_filter, Stored):
            return layer, place
        assert isinstance(data, onnx.NodeProto)
        assert isinstance(filter, onnx.NodeProto)
        integers = self._constant(filter.input[0])
        if integers is None:
            return layer, place
        if of_filter.scale.size > 1 and self._attributes(filter).get("axis", 1) not in (1, 1 - integers.ndim):
            return dataclasses.replace(layer, note=f"{layer.note}: its filter has scales along another axis"), place
        user = self._graph.only_user(place.made)
        after = self._makers.get(str(user.output)) if user is not None else None
        output = self._stored(after, "QuantizeLinear")
        result = output if isinstance(output, str) else quantized(layer, of_data, integers, of_filter, output)
        if isinstance(output, str) or isinstance(result, str):
            return dataclasses.replace(layer, note=f"{layer.note}: {result}"), place
        place = place._replace(data=data.input[0])
        if output is None or user is None:
            return result, place
        return dataclasses.replace(result, fused=(*result.fused, user.name)), place._replace(made=str(user.output))

    def _stored(self, node: _Maker, operator: str) -> Stored | str | None:
        """Return how integers of a node that is this `operator` stand for numbers; None if it is none, or not constant.

        A text is the rule that it breaks.
        """
        if not isinstance(node, onnx.NodeProto) or node.op_type != operator or node.domain not in _DOMAINS:
            return None
        if len(node.input) not in (2, 3):
            return None
        scale, unknown = self._constant(node.input[1]), set(self._attributes(node)) - {"axis"}
        if scale is None:
            return None
        integers = (node.input if operator == "DequantizeLinear" else node.output)[0]
        type = _CONSTANTS.get(self._types.get(integers, _UNKNOWN)[0])
        if len(node.input) == 3 and node.input[2] != "":
            zero = self._constant(node.input[2])
        else:
            zero = np.zeros(scale.shape, numpy_dtype(type or "uint8"))
        if zero is None:
            return None
        rules = {
            f"{', '.join(sorted(unknown))}: must be left out": bool(unknown),
            f"scale={scale.dtype}: must be float32": scale.dtype != np.float32,
            f"scale={scale.shape}: must be one number, or one for each of an axis": scale.ndim > 1,
            f"zero_point={zero.shape}: must have as many numbers as the scale, {scale.size}": zero.size != scale.size,
            f"zero_point={zero.dtype}: must be {type}, as the integers are": type is not None and zero.dtype != type,
        }
        broken = next((rule for rule, breaks in rules.items() if breaks), None)
        return f"{node_name(node)}: {broken}" if broken else Stored(zero.dtype.name, scale, zero)

    def _problem(self, node: onnx.NodeProto) -> Problem | str:
        """Return the problem of a transposed convolution, or the reason why it is not covered."""
        constant = self._constant(node.input[1])
        known = self._types.get(node.input[1], _UNKNOWN)[1] if constant is None else constant.shape
        filter = tuple(extent for extent in known or () if isinstance(extent, int))
        if known is None or len(filter) != len(known):
            return f"filter has a dynamic shape: {_shown(known)} is known of it"
        # The operator has data of the filter's rank, with as many channels as the filter says.
        data = self._types.get(node.input[0], _UNKNOWN)[1] or ("?",) * len(filter)
        if len(data) > 1 and not isinstance(data[1], int):
            data = (data[0], filter[0], *data[2:])
        form = free_extents(data, [shapes.get(node.input[0]) for shapes in self._sampled])
        types = [self._types.get(tensor, _UNKNOWN)[0] for tensor in node.input[:2]]
        dtype = _DTYPES.get(types[0])
        if dtype is None or types[0] != types[1]:
            shown = " and ".join(str(_DTYPES.get(type, f"type {type}")) for type in types)
            return f"data and filter must both be one of {', '.join(_DTYPES.values())}: {shown}"
        attributes = self._attributes(node)
        if not set(attributes) <= _ATTRIBUTES:
            return f"has unknown attributes: {', '.join(sorted(set(attributes) - _ATTRIBUTES))}"
        if isinstance(attributes.get("auto_pad"), bytes):
            attributes["auto_pad"] = attributes["auto_pad"].decode(errors="replace")
        biased = len(node.input) == 3 and node.input[2] != ""
        bias = self._constant(node.input[2]) if biased else None
        try:
            problem = Problem.from_onnx(form, filter, **attributes, dtype=dtype, epilogue=Epilogue(bias=biased))
        except ProblemError as error:
            free = not all(isinstance(extent, int) for extent in data)
            return f"{error}; the data are {_shown(data)}" if free else str(error)
        if bias is not None and bias.shape != problem.bias_shape:
            return f"bias={bias.shape}: must have shape {problem.bias_shape}"
        return problem

    def _node(self, node: onnx.NodeProto) -> Node:
        """Return `node` in the terms of an epilogue; it uses the tensors that its bodies use."""
        outputs = [tensor for tensor in node.output if tensor]
        other = Node(node_name(node), "", tuple(used(node)), (outputs or [None])[0])
        if node.domain not in _DOMAINS or self._opset < _FIRST_OPSET or len(outputs) != 1:
            return other
        if node.op_type in _ACTIVATIONS:
            return self._activation(node, other)
        attributes = {attribute.name for attribute in node.attribute}
        if node.op_type in _ARITHMETIC and not attributes:
            return dataclasses.replace(other, op=_ARITHMETIC[node.op_type])
        if node.op_type == "BatchNormalization" and attributes <= _BATCH_NORM_ATTRIBUTES:
            given = self._attributes(node)
            epsilon = given.get("epsilon", 1e-5)
            if isinstance(epsilon, (int, float)) and given.get("training_mode", 0) == 0:
                return dataclasses.replace(other, op=BATCH_NORM, numbers={"epsilon": epsilon})
        return other

    def _activation(self, node: onnx.NodeProto, other: Node) -> Node:
        """Return an activation in the terms of an epilogue; `other` if its attributes make something else of it."""
        name, operator = _ACTIVATIONS[node.op_type]
        if not {attribute.name for attribute in node.attribute} <= operator.arguments.keys():
            return other
        given = self._attributes(node).items()
        texts = {key: value.decode(errors="replace") if isinstance(value, bytes) else value for key, value in given}
        numbers = arguments_of(operator, texts)
        if numbers is None:
            return other
        operands = zip(node.input[1:], operator.inputs, strict=False)
        constants = tuple((tensor, argument) for tensor, argument in operands if tensor)
        return dataclasses.replace(other, op=name, numbers=numbers, operands=constants)

    def _constant(self, tensor: Hashable, depth: int = 0) -> Array | None:
        """Return the value of a tensor that the model holds; None for all others."""
        maker = self._makers.get(str(tensor))
        if maker is None or depth > _LONGEST_PATH:
            return None
        if isinstance(maker, onnx.TensorProto):
            return self._tensors.of(maker)
        return self._tensors.once(maker, lambda: self._computed(maker, depth))

    def _computed(self, node: onnx.NodeProto, depth: int) -> Array | None:
        """Return what a node makes of constants; None if it is none of those that are followed."""
        if node.op_type == "Constant":
            value = self._attributes(node).get("value")
            return self._tensors.of(value) if isinstance(value, onnx.TensorProto) else None
        if node.domain not in _DOMAINS or node.op_type not in {*_FOLLOWED, *_OF_SHAPES, "ConstantOfShape"}:
            return None
        values = [self._constant(tensor, depth + 1) if tensor else None for tensor in node.input]
        if not values or values[0] is None:
            return None
        attributes = self._attributes(node)
        if node.op_type == "Identity":
            return values[0]
        if node.op_type == "Expand":
            return self._expanded(values[0], values[1] if len(values) == 2 else None)
        if node.op_type not in _FOLLOWED:
            return self._of_shapes(node, values)
        if node.op_type == "Cast":
            to = attributes.get("to")
            type = _CONSTANTS.get(to) if isinstance(to, int) else None
            return None if type is None else self._tensors.constants.cast(values[0], type)
        value, scale, zero = (*values, None)[:3] if len(values) in (2, 3) else (None, None, None)
        unknown = zero is None and len(node.input) == 3 and node.input[2] != ""
        if value is None or scale is None or unknown or not set(attributes) <= {"axis"}:  # blocks have many scales
            return None
        axis = attributes.get("axis", 1)
        if not isinstance(axis, int):
            return None
        self._tensors.constants.take(8 * value.size)
        return dequantized(value, scale, zero, axis)

    def _of_shapes(self, node: onnx.NodeProto, values: Sequence[Array | None]) -> Array | None:
        """Return what a node makes of constants that are shapes; None if they are not, or do not fit."""
        known = [
            value for value in values if value is not None and value.dtype.kind in "bi" and value.size <= _MOST_AXES
        ]
        try:
            if len(known) != len(values):
                return None
            if node.op_type != "ConstantOfShape":
                return _OF_SHAPES[node.op_type](*known)
            (extents,), value = known, self._attributes(node).get("value")
            fill = self._tensors.of(value) if isinstance(value, onnx.TensorProto) else None
            if fill is None or extents.shape != (1,) or not 0 <= extents[0] <= _MOST_AXES:
                return None
            return np.full(int(extents[0]), fill.reshape(()))
        except (ValueError, TypeError):
            return None

    def _expanded(self, value: Array, shape: Array | None) -> Array | None:
        """Return a constant in a shape that it broadcasts to; None if it does not."""
        if shape is None or shape.ndim != 1 or shape.size > _MOST_AXES or (shape < 1).any():
            return None
        try:
            whole = np.broadcast_shapes(value.shape, tuple(map(int, shape)))
        except ValueError:
            return None
        self._tensors.constants.take(math.prod(whole) * value.itemsize)
        return np.ascontiguousarray(np.broadcast_to(value, whole))

    def _note(self, node: onnx.NodeProto, problem: Problem, filter: Array | None, bias: Array | None) -> str:
        """Return what is to be said of a layer that is covered: types that the model stores, arrays of run time."""
        maker, stored = self._root(node.input[1])
        data = self._makers.get(node.input[0])
        notes = []
        if problem.epilogue.bias and bias is None:
            notes.append(f"its bias is made by {self._root(node.input[2])[0] or 'an input'} at run time")
        if isinstance(data, onnx.NodeProto) and data.op_type == "DequantizeLinear":
            notes.append(f"as {problem.dtype}: its data are dequantized")
        if filter is None:
            notes.append(f"its filter is made by {maker or 'an input'} at run time")
        elif stored != problem.dtype:
            notes.append(f"filter stored as {stored}")
        return ", ".join(notes)

    def _root(self, tensor: str) -> tuple[str, str]:
        """Return the operator that makes a tensor, and the type of the constant that it begins with."""
        name, type, first = "", "", ""
        for _ in range(_LONGEST_PATH):
            maker = self._makers.get(tensor)
            if not isinstance(maker, onnx.NodeProto):
                type = "" if maker is None else _type_name(maker.data_type)
                break
            name, first = maker.op_type, first or f"{maker.op_type} {node_name(maker)}"
            value = self._attributes(maker).get("value") if name == "Constant" else None
            if isinstance(value, onnx.TensorProto):
                type = _type_name(value.data_type)
            if name not in _FOLLOWED or not maker.input:
                break
            tensor = maker.input[0]
        return first, type

    def _attributes(self, node: onnx.NodeProto) -> dict[str, Any]:
        try:
            return {str(attribute.name): onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}
        except (ValueError, TypeError) as error:
            raise SourceError("attribute", node_name(node), f"must have a type: {error} ({self._path})") from None


def is_operator(node: onnx.NodeProto) -> bool:
    """Tell whether `node` is a transposed convolution."""
    return bool(node.op_type == OPERATOR and node.domain in _DOMAINS)


def node_name(node: onnx.NodeProto) -> str:
    """Return the name of `node`: its own, else that of its output, else its operator."""
    return str(node.name or next(iter(node.output), "") or node.op_type)


def _type(value: onnx.ValueInfoProto) -> _Type:
    tensor = value.type.tensor_type
    if not value.type.HasField("tensor_type") or not tensor.HasField("shape"):
        return tensor.elem_type, None
    known = (dim.HasField("dim_value") and dim.dim_value >= 0 for dim in tensor.shape.dim)
    dims = zip(tensor.shape.dim, known, strict=True)
    return tensor.elem_type, tuple(dim.dim_value if is_known else dim.dim_param or "?" for dim, is_known in dims)


def _type_name(type: int) -> str:
    if type not in onnx.TensorProto.DataType.values():
        return f"type {type}"
    return _CONSTANTS.get(type) or str(onnx.TensorProto.DataType.Name(type)).lower()


def _shown(extents: _Extents) -> str:
    return "nothing" if extents is None else f"[{', '.join(map(str, extents))}]"


def graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """Yield `graph` and those of the bodies inside it."""
    yield graph
    for node in graph.node:
        for body in bodies(node):
            yield from graphs(body)


def bodies(node: onnx.NodeProto) -> list[onnx.GraphProto]:
    """Return the graphs that are attributes of `node`: branches, bodies of loops."""
    return [graph for attribute in node.attribute for graph in (*attribute.graphs, attribute.g) if graph.node]


def used(node: onnx.NodeProto) -> Iterator[str]:
    """Yield the tensors that a node and its bodies use, also those that the bodies make themselves."""
    yield from filter(None, node.input)
    for graph in bodies(node):
        yield from (value.name for value in graph.output)
        for inner in graph.node:
            yield from used(inner)
