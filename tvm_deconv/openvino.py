"""OpenVINO: models whose transposed convolutions a library computes; docs/frameworks.md."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import openvino

from tvm_deconv.frontends import scan
from tvm_deconv.frontends.openvino_ir import OPERATORS
from tvm_deconv.runtime.layer import Layer
from tvm_deconv.runtime.library import Library


def replace(model: Any, path: str | os.PathLike[str], library: Library) -> dict[str, Any]:
    """Replace each layer of `model`, read from `path`, that `library` covers by an operation in Python.

    Nodes that a layer has absorbed go with it. A layer stays if it, or a node that it absorbed, shares its name with
    another node. Returns the operations by the layers' names; they must live as long as the model. Raises SourceError.
    """
    nodes = {node.get_friendly_name(): node for node in model.get_ops()}
    names = Counter(node.get_friendly_name() for node in model.get_ops())
    made: dict[str, Any] = {}
    for layer in scan(path):
        unique = all(names[name] == 1 for name in (layer.name, *layer.fused))
        if not unique or nodes[layer.name].get_type_name() not in OPERATORS:
            continue
        bound = layer.bind(library)
        if isinstance(bound, str):
            continue
        made[layer.name] = _operation(nodes[layer.name].input_value(0), bound)
        nodes[(layer.name, *layer.fused)[-1]].output(0).replace(made[layer.name].output(0))
    return made


def _operation(data: Any, layer: Layer) -> Any:
    class Deconv(openvino.Op):  # type: ignore[misc]
        """A layer; OpenVINO makes further operations from this class."""

        def __init__(self, inputs: Any) -> None:
            super().__init__(self, inputs)

        def validate_and_infer_types(self) -> None:
            shape = openvino.PartialShape(layer.problem.output_shape)
            self.set_output_type(0, self.get_input_element_type(0), shape)

        def clone_with_new_inputs(self, inputs: Any) -> Any:
            return Deconv(inputs)

        def has_evaluate(self) -> bool:
            return True

        def evaluate(self, outputs: Any, inputs: Any) -> bool:
            layer(inputs[0].data, out=outputs[0].data)
            return True

    return Deconv([data])
