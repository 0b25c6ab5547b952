"""OpenVINO: models whose transposed convolutions a library computes; docs/frameworks.md."""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import openvino
from openvino import opset13

from tvm_deconv.bench import turns
from tvm_deconv.errors import ProblemError
from tvm_deconv.frontends import FoundLayer, scan
from tvm_deconv.frontends.openvino_ir import OPERATORS
from tvm_deconv.openvino.operation import operation
from tvm_deconv.openvino.operator import OPERATOR
from tvm_deconv.openvino.timing import Timed
from tvm_deconv.problem import Problem
from tvm_deconv.runtime.layer import Layer
from tvm_deconv.runtime.library import Library, check_library

_NOT_ALONE = (
    "it stands in a graph within the model's own, or shares its name, or that of a node that it absorbs, with others"
)
_CONVERTED = ("float16", "bfloat16", "float64")  # types that OpenVINO may have converted when it calls an operation
_ON_INTEGERS = "it is quantized: its operation would have to take the integers behind FakeQuantize"
#: Rounds of a run of each: at least so many, then until so many seconds are over.
_LEAST, _SECONDS = 6, 0.5
#: Names of operations, and of the transpositions around them, begin with this and a number.
_TAG = "tvm_deconv."


class Operations(dict[str, Any]):
    """The operations by the names of their layers; `left` are the layers that stay with OpenVINO, with the reasons."""

    def __init__(self) -> None:
        super().__init__()
        self.left: dict[str, str] = {}


def problems(path: str | os.PathLike[str], *, extents: Mapping[str, tuple[int, int]] | None = None) -> list[Problem]:
    """Return the problems to compile for a model, so that `replace` can choose the layout of each layer.

    They are those that `scan` finds, with the same `extents`, but those that `replace` leaves by their types. Each of
    fixed extents is there in `N C *X`, as models have it, and in `N *X C`, as OpenVINO keeps data between convolutions.
    Raises SourceError.
    """
    found = dict.fromkeys(layer.problem for layer in scan(path, extents=extents))
    taken = [problem for problem in found if problem is not None and problem.dtype not in _CONVERTED]
    return [form for problem in taken if not problem.quantization for form in _forms(problem)]


def replace(
    model: Any,
    path: str | os.PathLike[str],
    library: Library,
    inputs: Sequence[Any] | None = None,
    *,
    settings: Mapping[str, Any] | None = None,
    measure: bool = True,
) -> Operations:
    """Replace each layer of `model`, read from `path`, that `library` covers by an operation of ours.

    Nodes that a layer has absorbed go with it. A layer stays if it, or a node that it absorbed, shares its name with
    another node. Returns the operations, which must live as long as the model. Raises ProblemError, SourceError.

    If `measure` is true, the model is first compiled with the `settings` of `compile_model` and timed with and without
    the operations, on `inputs`, or on random data where all shapes are fixed. Layers get the layouts in which the
    model is fastest. As long as the model gains nothing, the half of the layers stays that
    gains least. A model with free extents is not timed unless it has `inputs`. Layers that are not timed run in
    `N *X C` where the library has that.
    """
    check_library(library)
    if not isinstance(model, openvino.Model):
        raise ProblemError("model", model, "must be an openvino.Model")
    layers = [*scan(path)]
    bound, left = _bound(model, layers, library)
    feed = _random_inputs(model) if inputs is None else inputs
    chosen = {name: forms[-1] for name, forms in bound.items()}
    if measure and bound and feed is not None:
        timing = _Timing(path, layers, feed, settings or {})
        chosen = timing.faster(bound)
        left |= dict.fromkeys(timing.slower(chosen), "it makes the model no faster")
    made = _put(model, layers, {name: layer for name, layer in chosen.items() if name not in left})
    made.left = left
    return made


def _forms(problem: Problem) -> list[Problem]:
    """Return a problem in the layouts in which an operation may compute it.

    OpenVINO folds the transpositions around an operation in `N *X C` into its own layouts, if extents are fixed.
    """
    return [problem] if problem.dynamic else [problem, problem.replace(data_format="NXC")]


def _bound(model: Any, layers: Iterable[FoundLayer], library: Library) -> tuple[dict[str, list[Layer]], dict[str, str]]:
    """Return the layers that can be replaced, in each layout that there is, and the reasons of the others."""
    names = Counter(node.get_friendly_name() for node in model.get_ops())
    kinds = {node.get_friendly_name(): node.get_type_name() for node in model.get_ops()}
    bound: dict[str, list[Layer]] = {}
    left: dict[str, str] = {}
    for layer in layers:
        alone = all(names[name] == 1 for name in (layer.name, *layer.fused)) and kinds[layer.name] in OPERATORS
        reason = _reason(layer) if alone else _NOT_ALONE
        if reason is not None:
            left[layer.name] = reason
            continue
        problems = [None] if layer.problem is None else _forms(layer.problem)
        found = [dataclasses.replace(layer, problem=problem).bind(library) for problem in problems]
        forms = [form for form in found if isinstance(form, Layer)]
        if forms:  # NumPy computes none for which there is an artifact in another layout
            bound[layer.name] = [form for form in forms if form.manifest is not None] or forms[:1]
        else:
            left[layer.name] = str(found[0])
    return bound, left


def _reason(layer: FoundLayer) -> str | None:
    """Return why no operation can compute a layer, by its types."""
    if layer.scaling is not None:
        return _ON_INTEGERS
    if layer.problem is not None and layer.problem.dtype in _CONVERTED:
        return f"OpenVINO computes {layer.problem.dtype} in float32: save the model in float32"
    return None


def _put(model: Any, layers: Iterable[FoundLayer], chosen: Mapping[str, Layer]) -> Operations:
    """Replace the layers of a model that are `chosen`."""
    nodes = {node.get_friendly_name(): node for node in model.get_ops()}
    made, replaced = Operations(), []
    with OPERATOR.makers(chosen) as makers:
        for number, layer in enumerate(layers):
            if layer.name in chosen:
                make = makers.get(layer.name) or partial(operation, layer=chosen[layer.name])
                data, form = nodes[layer.name].input_value(0), chosen[layer.name].problem
                made[layer.name], output = _placed(make, data, form, f"{_TAG}{number}.", layer.name)
                replaced.append((nodes[(layer.name, *layer.fused)[-1]].output(0), output))
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


class _Timing:
    """A model with and without operations, on data to `feed`."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        layers: Sequence[FoundLayer],
        feed: Sequence[Any],
        settings: Mapping[str, Any],
    ) -> None:
        self._core = openvino.Core()
        self._path, self._layers, self._feed, self._settings = path, layers, feed, settings

    def faster(self, bound: Mapping[str, Sequence[Layer]]) -> dict[str, Layer]:
        """Return the layers that are `bound` in the layouts in which the model is fastest.

        All are tried in one layout and in the other, and each in that in which it takes less time with the copies
        around it; layers behind each other may then need more copies.
        """
        planar, last = ({name: forms[place] for name, forms in bound.items()} for place in (0, -1))
        if planar == last:
            return planar
        spent = [self._spent(*self._compiled(chosen)) for chosen in (planar, last)]
        mixed = {name: (planar if spent[0][name] < spent[1][name] else last)[name] for name in bound}
        plain, _ = self._compiled({})
        gains = []
        for chosen in (choices := [planar, last, *([] if mixed in (planar, last) else [mixed])]):
            ours, operations = self._compiled(chosen)
            gains.append(self._gain(plain, ours))
            del ours, operations  # in this order
        return choices[gains.index(max(gains))]

    def slower(self, chosen: Mapping[str, Layer]) -> list[str]:
        """Return the names of the layers that must stay for the model to gain, those first that gain least."""
        plain, _ = self._compiled({})
        trying, stay = dict(chosen), list[str]()
        while trying:
            ours, operations = self._compiled(trying)
            if self._gain(plain, ours) > 1:
                break
            spent, before = self._spent(ours, operations), plain.nodes()
            least_first = sorted(trying, key=lambda name: before.get(name, 0.0) - spent[name])
            for name in least_first[: (len(trying) + 1) // 2]:
                stay.append(name)
                del trying[name]
        return stay

    def _compiled(self, chosen: Mapping[str, Layer]) -> tuple[Timed, Operations]:
        """Return the model with operations for the layers that are `chosen`, ready to run, and these operations."""
        model = self._core.read_model(self._path)
        operations = _put(model, self._layers, chosen)
        compiled = self._core.compile_model(model, "CPU", {**self._settings, "PERF_COUNT": True})
        return Timed(compiled, self._feed), operations

    def _gain(self, plain: Timed, ours: Timed) -> float:
        """Return how many times as fast as one model another is."""
        return turns.gain(plain.seconds, ours.seconds, _LEAST, _SECONDS)

    def _spent(self, timed: Timed, operations: Operations) -> dict[str, float]:
        """Return the seconds of each operation with the copies before and behind it, whose names have that of it."""
        nodes = timed.nodes()
        tags = {name: made.get_friendly_name().removesuffix(name) for name, made in operations.items()}
        return {name: sum(spent for node, spent in nodes.items() if tag in node) for name, tag in tags.items()}


def _placed(make: Callable[[Any], Any], data: Any, form: Problem, tag: str, name: str) -> tuple[Any, Any]:
    """Return the operation in a `form` on `data`, and its output in `N C *X`; names of nodes have the `tag`."""
    if form.data_format == "NCX":
        made = make(data)
        made.set_friendly_name(tag + name)
        return made, made.output(0)
    axes = range(1, form.rank + 1)
    made = make(_transposed(data, [0, *(axis + 1 for axis in axes), 1], f"{tag}last"))
    made.set_friendly_name(tag + name)
    return made, _transposed(made.output(0), [0, len(axes) + 1, *axes], f"{tag}first")


def _transposed(data: Any, order: Sequence[int], name: str) -> Any:
    node = opset13.transpose(data, opset13.constant(np.array(order, np.int64)))
    node.set_friendly_name(name)
    return node.output(0)
