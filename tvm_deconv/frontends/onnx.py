"""ONNX models: ConvTranspose, read with the onnx package.

Shapes come from ONNX's own shape inference, constants from initializers and Constant nodes, also through Identity and
Cast. Functions of the opset of the model are inlined, and the bodies of If, Loop and Scan are scanned too. External
data may lie in the folder of the model and below it, nowhere else.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Hashable, Iterable, Iterator, MutableMapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from tvm_deconv.errors import ProblemError, SourceError
from tvm_deconv.frontends import graph as found
from tvm_deconv.frontends.files import from_bytes, read_array, read_bytes
from tvm_deconv.frontends.graph import FoundLayer, Graph, Node, absorb, uncovered
from tvm_deconv.problem import Array, Epilogue
from tvm_deconv.problem.arrays import numpy_dtype
from tvm_deconv.problem.dialects import from_onnx

try:
    import onnx
    import onnx.inliner
    import onnx.numpy_helper
    import onnx.shape_inference
    from google.protobuf.message import DecodeError, EncodeError  # type: ignore[import-untyped]
except ImportError:
    raise found.missing_package("an ONNX model", "onnx", "'tvm_deconv[onnx]'") from None

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
#: operator -> its name in an epilogue, and the attributes it may have there
_FOLLOWERS: dict[str, tuple[str, set[str]]] = {
    "Add": (found.ADD, set()),
    "Sub": (found.SUBTRACT, set()),
    "Mul": (found.MULTIPLY, set()),
    "BatchNormalization": (found.BATCH_NORM, {"epsilon", "momentum", "training_mode"}),
    "PRelu": (found.PRELU, set()),
    "Swish": (found.SWISH, {"alpha"}),
    "Relu": ("relu", set()),
    "LeakyRelu": ("leaky_relu", {"alpha"}),
    "Sigmoid": ("sigmoid", set()),
    "Tanh": ("tanh", set()),
    "Gelu": ("gelu", {"approximate"}),
    "Clip": ("clip", {"min", "max"}),
}
_CONSTANTS = _DTYPES | {onnx.TensorProto.INT32: "int32", onnx.TensorProto.INT64: "int64"}
_DEFAULTS = {found.BATCH_NORM: {"epsilon": 1e-5}, "leaky_relu": {"alpha": 0.01}, found.SWISH: {"alpha": 1.0}}
#: Attributes whose other values make another operator of a follower.
_REQUIRED = {"training_mode": 0, "approximate": b"none"}
#: Before this opset, Add and Mul broadcast in another way and BatchNormalization is in training unless it says so.
_FIRST_OPSET = 7
#: A constant passes through at most so many nodes; it bounds cycles too.
_LONGEST_PATH = 8

#: element type and extents of a tensor; a string where an extent is not known, None where the rank is not
_Type: TypeAlias = tuple[int, tuple[int | str, ...] | None]
#: what makes a tensor, None for what only a run can tell
_Maker: TypeAlias = "onnx.TensorProto | onnx.NodeProto | None"


def read_model(path: Path) -> onnx.ModelProto:
    """The model at `path` with its functions inlined and its shapes inferred; external data stay where they are.

    Raises SourceError where it cannot be read.
    """
    content = read_bytes(path)
    try:
        model = onnx.load_model_from_string(content)
        if model.functions:
            model = onnx.inliner.inline_local_functions(model)
        model = onnx.shape_inference.infer_shapes(model, data_prop=True)
    except (DecodeError, EncodeError, onnx.shape_inference.InferenceError, RuntimeError, ValueError) as error:
        raise SourceError("source", path, f"must be a valid ONNX model: {error}") from None
    if not model.ir_version or not model.graph.node:
        raise SourceError("source", path, "must be an ONNX model with nodes")
    return model


def scan_onnx(path: Path) -> list[FoundLayer]:
    """The transposed convolutions of the model at `path`; raises SourceError where it cannot be read."""
    model = read_model(path)
    opset = max((entry.version for entry in model.opset_import if entry.domain in _DOMAINS), default=0)
    left = [
        uncovered(node_name(node), OPERATOR, f"stands in the function {function.name}, which has another opset")
        for function in model.functions
        for node in function.node
        if is_operator(node)
    ]
    return [*_Graph(model.graph, path, opset, {}, {}).scan(), *left]


class _Graph:
    """A graph with what it sees of the graphs around it: tensors by name."""

    def __init__(
        self,
        graph: onnx.GraphProto,
        path: Path,
        opset: int,
        types: MutableMapping[str, _Type],
        makers: MutableMapping[str, _Maker],
    ) -> None:
        self._path, self._opset, self._nodes = path, opset, list(graph.node)
        values = {value.name: _type(value) for value in (*graph.input, *graph.value_info, *graph.output)}
        stored: dict[str, _Type] = {tensor.name: (tensor.data_type, tuple(tensor.dims)) for tensor in graph.initializer}
        self._types = ChainMap[str, _Type](stored, values, types)
        inputs: dict[str, _Maker] = {value.name: None for value in graph.input}
        made: dict[str, _Maker] = {name: node for node in self._nodes for name in node.output}
        constants: dict[str, _Maker] = {tensor.name: tensor for tensor in graph.initializer}
        self._makers = ChainMap[str, _Maker](constants, made, inputs, makers)
        outputs = Node("", "", tuple(value.name for value in graph.output), None)
        self._graph = Graph([*map(self._node, self._nodes), outputs], self._constant)

    def scan(self) -> Iterator[FoundLayer]:
        """What the graph and the graphs inside it hold."""
        for node in self._nodes:
            if is_operator(node):
                yield self._found(node)
            for graph in _bodies(node):
                yield from _Graph(graph, self._path, self._opset, self._types, self._makers).scan()

    def _found(self, node: onnx.NodeProto) -> FoundLayer:
        name = node_name(node)
        if len(node.input) not in (2, 3) or len(node.output) != 1:
            raise SourceError("inputs", name, f"must be 2 or 3 and the output 1 of {OPERATOR} ({self._path})")
        shapes: list[tuple[int, ...]] = []
        for label, tensor in zip(("data", "filter"), node.input, strict=False):
            shape = self._types.get(tensor, (0, None))[1]
            if shape is None or not all(isinstance(extent, int) for extent in shape):
                shown = "nothing" if shape is None else f"[{', '.join(map(str, shape))}]"
                return uncovered(name, OPERATOR, f"{label} has a dynamic shape: {shown} is known of it")
            shapes.append(tuple(int(extent) for extent in shape))
        types = [self._types[tensor][0] for tensor in node.input[:2]]
        dtype = _DTYPES.get(types[0])
        if dtype is None or types[0] != types[1]:
            shown = " and ".join(str(_DTYPES.get(type, f"type {type}")) for type in types)
            return uncovered(
                name, OPERATOR, f"data and filter must both be one of {', '.join(_DTYPES.values())}: {shown}"
            )
        attributes = self._attributes(node)
        if not set(attributes) <= _ATTRIBUTES:
            return uncovered(
                name, OPERATOR, f"has unknown attributes: {', '.join(sorted(set(attributes) - _ATTRIBUTES))}"
            )
        if isinstance(attributes.get("auto_pad"), bytes):
            attributes["auto_pad"] = attributes["auto_pad"].decode(errors="replace")
        biased = len(node.input) == 3 and node.input[2] != ""
        try:
            problem = from_onnx(*shapes, **attributes, dtype=dtype, epilogue=Epilogue(bias=biased))
        except ProblemError as error:
            return uncovered(name, OPERATOR, str(error))
        values = self._constant(node.input[1])
        bias = self._constant(node.input[2]) if biased else None
        if bias is not None:
            if bias.shape != problem.bias_shape:
                raise SourceError("bias", bias.shape, f"must have shape {problem.bias_shape} in {name} ({self._path})")
            bias = found.cast(bias, problem.accumulate_dtype)
        if values is not None and (values.shape, values.dtype.name) != (problem.filter_shape, dtype):
            raise SourceError("filter", values.shape, f"must be what the graph says of it in {name} ({self._path})")
        steps = self._graph.steps(node.output[0], problem.rank + 2, problem.bias_shape[0])
        return absorb(FoundLayer(name, OPERATOR, problem, values, bias), steps)

    def _node(self, node: onnx.NodeProto) -> Node:
        """`node` in the terms of the epilogue; what its bodies use, it uses."""
        inputs = tuple(used(node))
        outputs = [tensor for tensor in node.output if tensor]
        op, allowed = _FOLLOWERS.get(node.op_type, ("", set[str]()))
        known = {attribute.name for attribute in node.attribute} <= allowed
        numbers = None
        if op and known and node.domain in _DOMAINS and self._opset >= _FIRST_OPSET and len(outputs) == 1:
            numbers = self._numbers(op, node)
        if op == "clip" and numbers:
            inputs = inputs[:1]  # the bounds are in the numbers
        return Node(node_name(node), "" if numbers is None else op, inputs, (outputs or [None])[0], numbers or {})

    def _numbers(self, op: str, node: onnx.NodeProto) -> dict[str, float] | None:
        """The numbers of a follower; None where its attributes make something else of it."""
        attributes = self._attributes(node)
        if any(attributes.get(name, value) != value for name, value in _REQUIRED.items()):
            return None
        if op == "clip":
            minimum, maximum = self._bound(node, 1, -np.inf), self._bound(node, 2, np.inf)
            numbers: dict[str, Any] = {
                "minimum": attributes.get("min", minimum),
                "maximum": attributes.get("max", maximum),
            }
        else:
            numbers = {name: attributes.get(name, value) for name, value in _DEFAULTS.get(op, {}).items()}
        usable = all(isinstance(value, (int, float)) for value in numbers.values())
        return numbers if usable and (op != found.SWISH or numbers["alpha"] == 1) else None

    def _bound(self, node: onnx.NodeProto, index: int, default: float) -> float | None:
        """A bound of Clip that is an input: the default where it is left out, None where it is no constant."""
        if index >= len(node.input) or not node.input[index]:
            return default
        value = self._constant(node.input[index])
        return float(value.reshape(())) if value is not None and value.size == 1 else None

    def _constant(self, tensor: Hashable) -> Array | None:
        """The value of a tensor that the model holds; None for all others."""
        casts: list[int] = []
        for _ in range(_LONGEST_PATH):
            maker = self._makers.get(str(tensor))
            if maker is None:
                return None
            if isinstance(maker, onnx.TensorProto):
                return self._cast(self._stored(maker), casts)
            attributes = self._attributes(maker)
            if maker.op_type == "Constant":
                value = attributes.get("value")
                return self._cast(self._stored(value), casts) if isinstance(value, onnx.TensorProto) else None
            if maker.op_type not in ("Cast", "Identity") or len(maker.input) != 1:
                return None
            casts += [attributes.get("to", 0)] if maker.op_type == "Cast" else []
            tensor = maker.input[0]
        return None

    def _cast(self, value: Array | None, types: list[int]) -> Array | None:
        """`value` through casts, the last of `types` first."""
        for type in reversed(types):
            if value is None or type not in _CONSTANTS:
                return None
            value = found.cast(value, _CONSTANTS[type])
        return value

    def _stored(self, tensor: onnx.TensorProto) -> Array | None:
        """The value of a tensor; None where its type is none of ours."""
        if tensor.data_type not in _CONSTANTS:
            return None
        dtype, shape = numpy_dtype(_CONSTANTS[tensor.data_type]), tuple(tensor.dims)
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            return self._external(tensor, dtype, shape)
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
        return read_array(path, dtype, shape, offset, size)

    def _attributes(self, node: onnx.NodeProto) -> dict[str, Any]:
        try:
            return {str(attribute.name): onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}
        except (ValueError, TypeError) as error:
            raise SourceError("attribute", node_name(node), f"must have a type: {error} ({self._path})") from None


def is_operator(node: onnx.NodeProto) -> bool:
    """Tell whether `node` is a transposed convolution."""
    return bool(node.op_type == OPERATOR and node.domain in _DOMAINS)


def node_name(node: onnx.NodeProto) -> str:
    """Return what a node is called here: its name, else that of its output, else its operator."""
    return str(node.name or next(iter(node.output), "") or node.op_type)


def _type(value: onnx.ValueInfoProto) -> _Type:
    tensor = value.type.tensor_type
    if not value.type.HasField("tensor_type") or not tensor.HasField("shape"):
        return tensor.elem_type, None
    extents = (dim.dim_value if dim.HasField("dim_value") else dim.dim_param or "?" for dim in tensor.shape.dim)
    return tensor.elem_type, tuple(extents)


def all_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """The `nodes` and those of their bodies."""
    for node in nodes:
        yield node
        for graph in _bodies(node):
            yield from all_nodes(graph.node)


def _bodies(node: onnx.NodeProto) -> list[onnx.GraphProto]:
    return [graph for attribute in node.attribute for graph in (*attribute.graphs, attribute.g) if graph.node]


def used(node: onnx.NodeProto) -> Iterator[str]:
    """The tensors that a node and its bodies use, those that are the bodies' own among them."""
    yield from filter(None, node.input)
    for graph in _bodies(node):
        yield from (value.name for value in graph.output)
        for inner in graph.node:
            yield from used(inner)
