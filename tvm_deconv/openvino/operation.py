"""Operations of OpenVINO in Python: where there is no operator in C++ (operator.py), and where NumPy computes."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import openvino

from tvm_deconv.openvino.threads import ARENA
from tvm_deconv.problem import Problem
from tvm_deconv.runtime.layer import Layer

_MOST_SHAPES = 256  # that an operation remembers


def operation(data: Any, layer: Layer) -> Any:
    """Return the operation that computes a layer on `data`, in its layout."""
    host = ARENA.address if layer.manifest is not None else 0  # NumPy computes without an artifact

    @lru_cache(_MOST_SHAPES)
    def output_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
        return layer.problem.at(shape).output_shape

    class Deconv(openvino.Op):  # type: ignore[misc]
        """A layer; OpenVINO makes further operations from this class."""

        def __init__(self, inputs: Any) -> None:
            super().__init__(self, inputs)

        def validate_and_infer_types(self) -> None:
            shape = _output_shape(layer.problem, self.get_input_partial_shape(0))
            self.set_output_type(0, self.get_input_element_type(0), shape)

        def clone_with_new_inputs(self, inputs: Any) -> Any:
            return Deconv(inputs)

        def has_evaluate(self) -> bool:
            return True

        def evaluate(self, outputs: Any, inputs: Any) -> bool:
            outputs[0].shape = output_shape(tuple(inputs[0].shape))
            layer(inputs[0].data, out=outputs[0].data, host=host)
            return True

    return Deconv([data])


def _output_shape(problem: Problem, data: Any) -> Any:
    """Return the output's shape for one of the data, in which free extents may be ranges."""
    shape = [openvino.Dimension(extent) for extent in problem.output_shape]
    for axis in problem.dynamic:
        place = axis + 1 if axis else 0
        if data.rank.is_dynamic:
            shape[place] = openvino.Dimension()
        elif axis == 0:
            shape[place] = data[0]
        else:
            shape[place] = _output_extent(problem, axis - 1, data[place])
    return openvino.PartialShape(shape)


def _output_extent(problem: Problem, axis: int, data: Any) -> Any:
    """Return the output's extent along a free spatial axis for the data's, each of them a range."""
    bounds = [
        problem.strides[axis] * (length - 1) + problem.output_constant(axis)
        for length in (max(data.get_min_length(), 1), data.get_max_length())
    ]
    least = max(bounds[0], 0)
    return openvino.Dimension(least, -1 if data.get_max_length() == -1 else bounds[1])
