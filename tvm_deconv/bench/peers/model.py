"""A layer as an ONNX model, which several peers read."""

from __future__ import annotations

from typing import Any

import numpy as np

from tvm_deconv.bench.peers.common import beyond, weights
from tvm_deconv.problem import ACTIVATIONS, Array, Epilogue, Problem
from tvm_deconv.problem.arrays import numpy_dtype
from tvm_deconv.problem.quantization import STORED
from tvm_deconv.problem.testing import Operands

#: The opset of ONNX of the models.
_OPSET = 20


def onnx_model(problem: Problem, arrays: Operands) -> bytes:
    """Return a model of one ConvTranspose with its epilogue, channels first, weights inside.

    A quantized one has DequantizeLinear before it and QuantizeLinear behind it.
    """
    import onnx
    from onnx import helper, numpy_helper

    epilogue, rests = problem.epilogue, beyond(problem)
    element = helper.np_dtype_to_tensor_dtype(arrays.data.dtype)
    constants = {"filter": weights(problem, arrays)}
    if arrays.bias is not None:
        constants["bias"] = arrays.bias if problem.quantization else arrays.bias.astype(arrays.data.dtype)
    inputs = ["data", *constants]
    nodes = []
    if problem.quantization:
        nodes = [_dequantization(problem, name, constants, arrays) for name in inputs]
        inputs = [f"{name}_real" for name in inputs]
    nodes.append(
        helper.make_node(
            "ConvTranspose",
            inputs,
            ["sum"],
            group=problem.groups,
            strides=problem.strides,
            dilations=problem.dilations,
            pads=[*problem.pads_begin, *(max(rest, 0) for rest in rests)],
            output_padding=[max(-rest, 0) for rest in rests],
        )
    )
    working = np.dtype(np.float32) if problem.quantization else arrays.data.dtype
    nodes += _activation_nodes(epilogue, constants, working)
    if arrays.scaling and problem.output_dtype in STORED:
        scaling = arrays.scaling
        constants |= _numbers("out", scaling.output_scale, scaling.output_zero_point, problem.output_dtype)
        nodes.append(helper.make_node("QuantizeLinear", [nodes[-1].output[0], "out_scale", "out_zero_point"], ["out"]))
    nodes[-1].output[0] = "out"
    whole = problem.replace(data_format="NCX")
    out = helper.np_dtype_to_tensor_dtype(numpy_dtype(problem.output_dtype))
    graph = helper.make_graph(
        nodes,
        "layer",
        [helper.make_tensor_value_info("data", element, whole.data_shape)],
        [helper.make_tensor_value_info("out", out, whole.output_shape)],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", _OPSET)], ir_version=10)
    onnx.checker.check_model(model)
    content: bytes = model.SerializeToString()
    return content


def _dequantization(problem: Problem, name: str, constants: dict[str, Array], arrays: Operands) -> Any:
    """Return the node that makes real numbers of a stored input; add its scale and zero point to `constants`."""
    from onnx import helper

    scaling = arrays.scaling
    assert scaling is not None
    axis = 0
    if name == "data":
        constants |= _numbers(name, scaling.data_scale, scaling.data_zero_point, problem.dtype)
    elif name == "filter":
        axis, shape = 1, np.shape(scaling.filter_scale)
        zero = np.broadcast_to(scaling.filter_zero_point, shape)
        constants |= _numbers(name, scaling.filter_scale, zero, problem.filter_dtype)
    else:
        scale = np.asarray(scaling.filter_scale, np.float64) * scaling.data_scale
        constants |= _numbers(name, scale, np.zeros(scale.shape), "int32")
    return helper.make_node(
        "DequantizeLinear", [name, f"{name}_scale", f"{name}_zero_point"], [f"{name}_real"], axis=axis
    )


def _numbers(name: str, scale: object, zero_point: object, dtype: str) -> dict[str, Array]:
    return {f"{name}_scale": np.asarray(scale, np.float32), f"{name}_zero_point": np.asarray(zero_point, dtype)}


def _activation_nodes(epilogue: Epilogue, constants: dict[str, Array], dtype: np.dtype[Any]) -> list[Any]:
    """Return the nodes of an activation of "sum"; add its constants, of that dtype, to `constants`."""
    from onnx import helper

    activation, parameters = ACTIVATIONS[epilogue.activation], epilogue.parameters
    operator = next((operator for operator in activation.onnx if operator.since <= _OPSET), None)
    if operator is not None:
        inputs = [argument.parameter for argument in operator.inputs if argument.parameter is not None]
        constants |= {name: np.array(parameters[name], dtype) for name in inputs}
        attributes = {
            name: argument.default if argument.parameter is None else parameters[argument.parameter]
            for name, argument in operator.arguments.items()
            if argument.parameter not in inputs
        }
        return [helper.make_node(operator.name, ["sum", *inputs], ["activated"], **attributes)]
    nodes, tensor = [], "sum"
    for name in activation.gate:
        nodes.append(helper.make_node(ACTIVATIONS[name].onnx[0].name, [tensor], [name]))
        tensor = name
    return [*nodes, helper.make_node("Mul", ["sum", tensor], ["activated"])] if nodes else []
