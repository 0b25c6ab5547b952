"""A layer as an ONNX model, which several peers read."""

from __future__ import annotations

from typing import Any

import numpy as np

from tvm_deconv.bench.peers.common import beyond, weights
from tvm_deconv.problem import ACTIVATIONS, Array, Epilogue, Problem
from tvm_deconv.problem.testing import Operands

#: The opset of ONNX of the models.
_OPSET = 20


def onnx_model(problem: Problem, arrays: Operands) -> bytes:
    """Return a model of one ConvTranspose with its epilogue, channels first, weights inside."""
    import onnx
    from onnx import helper, numpy_helper

    epilogue, rests = problem.epilogue, beyond(problem)
    element = helper.np_dtype_to_tensor_dtype(arrays.data.dtype)
    constants = {"filter": weights(problem, arrays)}
    if arrays.bias is not None:
        constants["bias"] = arrays.bias.astype(arrays.data.dtype)
    nodes = [
        helper.make_node(
            "ConvTranspose",
            ["data", *constants],
            ["sum"],
            group=problem.groups,
            strides=problem.strides,
            dilations=problem.dilations,
            pads=[*problem.pads_begin, *(max(rest, 0) for rest in rests)],
            output_padding=[max(-rest, 0) for rest in rests],
        )
    ]
    nodes += _activation_nodes(epilogue, constants, arrays.data.dtype)
    nodes[-1].output[0] = "out"
    whole = problem.replace(data_format="NCX")
    graph = helper.make_graph(
        nodes,
        "layer",
        [helper.make_tensor_value_info("data", element, whole.data_shape)],
        [helper.make_tensor_value_info("out", element, whole.output_shape)],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", _OPSET)], ir_version=10)
    onnx.checker.check_model(model)
    content: bytes = model.SerializeToString()
    return content


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
