"""How long a layer takes alone in ONNX Runtime, with what it has absorbed, by its own nodes and by an artifact."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import onnx

from tvm_deconv.bench import turns
from tvm_deconv.frontends.onnx import Place, used
from tvm_deconv.problem import Problem
from tvm_deconv.problem.arrays import numpy_dtype
from tvm_deconv.problem.testing import operands

#: Rounds of a run of each: at least so many, then until so many seconds are over.
_LEAST, _SECONDS = 5, 0.1


def alone(model: onnx.ModelProto, place: Place, problem: Problem) -> tuple[onnx.ModelProto, Place]:
    """Return a model of one layer, for data as in `problem`, and the place of the layer in it.

    Raises ValueError if the layer needs tensors that are not constant, and the errors of ONNX.
    """
    needed, nodes, constants = [place.made], set[int](), set[str]()
    stored = {tensor.name: tensor for graph in (model.graph, place.graph) for tensor in graph.initializer}
    makers = {tensor: index for index, node in enumerate(place.graph.node) for tensor in node.output}
    while needed:
        tensor = needed.pop()
        if tensor in stored:
            constants.add(tensor)
        elif tensor not in makers:
            raise ValueError(f"{tensor} is no constant")
        elif makers[tensor] not in nodes:
            nodes.add(makers[tensor])
            needed += [name for name in used(place.graph.node[makers[tensor]]) if name not in {place.data, ""}]
    types = (numpy_dtype(dtype) for dtype in (problem.dtype, problem.output_dtype))
    given, made = map(onnx.helper.np_dtype_to_tensor_dtype, types)
    graph = onnx.helper.make_graph(
        [place.graph.node[index] for index in sorted(nodes)],
        "layer",
        [onnx.helper.make_tensor_value_info(place.data, given, problem.data_shape)],
        [onnx.helper.make_tensor_value_info(place.made, made, None)],
        [stored[name] for name in sorted(constants)],
    )
    single = onnx.helper.make_model(graph, opset_imports=model.opset_import, ir_version=model.ir_version)
    node = next(node for node in single.graph.node if node.output[0] == place.node.output[0])
    return single, place._replace(graph=single.graph, node=node)


def gain(original: Any, ours: Any, problem: Problem) -> float:
    """Return how many times as fast as one session of a layer another is: the median of rounds in turns."""
    (value,) = original.get_inputs()
    feeds = {value.name: operands(problem).data}
    return turns.gain(lambda: _seconds(original, feeds), lambda: _seconds(ours, feeds), _LEAST, _SECONDS)


def _seconds(session: Any, feeds: Mapping[str, Any]) -> float:
    """Return the seconds of a run that follows one which is not counted."""
    session.run(None, feeds)
    begin = time.perf_counter()
    session.run(None, feeds)
    return time.perf_counter() - begin
