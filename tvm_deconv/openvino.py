"""OpenVINO: models whose transposed convolutions a library computes; docs/frameworks.md."""

from __future__ import annotations

import os
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from functools import lru_cache
from typing import Any

import numpy as np
import openvino

from tvm_deconv.frontends import FoundLayer, scan
from tvm_deconv.frontends.openvino_ir import OPERATORS
from tvm_deconv.problem import Problem
from tvm_deconv.runtime.layer import Layer
from tvm_deconv.runtime.library import Library

_MOST_SHAPES = 256  # that an operation remembers
_NOT_ALONE = (
    "it stands in a graph within the model's own, or shares its name, or that of a node that it absorbs, with others"
)
#: Rounds of one run each way: at least so many, then until so many seconds are over.
_LEAST_ROUNDS, _ROUNDS_SECONDS = 6, 0.5


class Operations(dict[str, Any]):
    """The operations by the names of their layers; `left` are the layers that stay with OpenVINO, with the reasons."""

    def __init__(self) -> None:
        super().__init__()
        self.left: dict[str, str] = {}


def replace(
    model: Any,
    path: str | os.PathLike[str],
    library: Library,
    inputs: Sequence[Any] | None = None,
    *,
    settings: Mapping[str, Any] | None = None,
    measure: bool = True,
) -> Operations:
    """Replace each layer of `model`, read from `path`, that `library` covers by an operation in Python.

    Nodes that a layer has absorbed go with it. A layer stays if it, or a node that it absorbed, shares its name with
    another node. Returns the operations, which must live as long as the model. Raises SourceError.

    If `measure` is true, the model is first compiled with the `settings` of `compile_model` and timed with and without
    the operations, on `inputs`, or on random data where all shapes are fixed. As long as it gains nothing, the half of
    the layers stays that gains least. A model with free extents is not timed unless it has `inputs`.
    """
    layers = [*scan(path)]
    bound, left = _bound(model, layers, library)
    feed = _random_inputs(model) if inputs is None else inputs
    if measure and bound and feed is not None:
        left |= dict.fromkeys(_slower(path, layers, bound, feed, settings or {}), "it makes the model no faster")
    made = _put(model, [layer for layer in layers if layer.name in bound and layer.name not in left], bound)
    made.left = left
    return made


def _bound(model: Any, layers: Iterable[FoundLayer], library: Library) -> tuple[dict[str, Layer], dict[str, str]]:
    """Return the layers that can be replaced, and the reasons of the others."""
    names = Counter(node.get_friendly_name() for node in model.get_ops())
    kinds = {node.get_friendly_name(): node.get_type_name() for node in model.get_ops()}
    bound: dict[str, Layer] = {}
    left: dict[str, str] = {}
    for layer in layers:
        alone = all(names[name] == 1 for name in (layer.name, *layer.fused)) and kinds[layer.name] in OPERATORS
        found = layer.bind(library) if alone else _NOT_ALONE
        if isinstance(found, str):
            left[layer.name] = found
        else:
            bound[layer.name] = found
    return bound, left


def _put(model: Any, layers: Iterable[FoundLayer], bound: Mapping[str, Layer]) -> Operations:
    """Replace `layers` in `model`."""
    nodes = {node.get_friendly_name(): node for node in model.get_ops()}
    made, replaced = Operations(), []
    for layer in layers:
        made[layer.name] = _operation(nodes[layer.name].input_value(0), bound[layer.name])
        replaced.append((nodes[(layer.name, *layer.fused)[-1]].output(0), made[layer.name].output(0)))
    for old, new in replaced:  # when all are there: an error leaves the model as it was
        old.replace(new)
    return made


def _random_inputs(model: Any) -> list[Any] | None:
    """Return random data for a model whose inputs are floats of fixed shapes, else None."""
    rng, made = np.random.default_rng(0), []
    for value in model.inputs:
        dtype = value.get_element_type()
        if value.partial_shape.is_dynamic or dtype not in (openvino.Type.f32, openvino.Type.f16):
            return None
        made.append(rng.standard_normal(tuple(value.shape)).astype(dtype.to_dtype()))
    return made


def _slower(
    path: str | os.PathLike[str],
    layers: Sequence[FoundLayer],
    bound: Mapping[str, Layer],
    feed: Sequence[Any],
    settings: Mapping[str, Any],
) -> list[str]:
    """Return the names of the layers that must stay for the model to gain, those first that gain least."""
    core = openvino.Core()

    def compiled(model: Any) -> Any:
        return core.compile_model(model, "CPU", {**settings, "PERF_COUNT": True}).create_infer_request()

    plain = compiled(core.read_model(path))
    chosen, stay = [layer for layer in layers if layer.name in bound], list[str]()
    while chosen:
        model = core.read_model(path)
        operations = _put(model, chosen, bound)
        ours = compiled(model)
        if _gain(plain, ours, feed) > 1:
            break
        spent = [{node.node_name: node.real_time for node in request.profiling_info} for request in (plain, ours)]
        zero = timedelta()
        saved = {
            name: spent[0].get(name, zero) - spent[1].get(made.get_friendly_name(), zero)
            for name, made in operations.items()
        }
        chosen.sort(key=lambda layer: saved[layer.name])
        half = (len(chosen) + 1) // 2
        stay += [layer.name for layer in chosen[:half]]
        chosen = chosen[half:]
    return stay


def _gain(plain: Any, ours: Any, feed: Sequence[Any]) -> float:
    """Return how many times as fast as one request another is: the median of rounds in turns."""
    ratios: list[float] = []
    begin = time.perf_counter()
    while len(ratios) < _LEAST_ROUNDS or time.perf_counter() - begin < _ROUNDS_SECONDS:
        seconds = []
        for request in (plain, ours):
            start = time.perf_counter()
            request.infer(feed)
            seconds.append(time.perf_counter() - start)
        ratios.append(seconds[0] / seconds[1])
    return statistics.median(ratios)


def _operation(data: Any, layer: Layer) -> Any:
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
            layer(inputs[0].data, out=outputs[0].data)
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
