"""`Session`: a model in ONNX Runtime, with the layers that a library has artifacts for."""

from __future__ import annotations

import math
import os
from collections.abc import Hashable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import onnx
import onnxruntime

from tvm_deconv.artifact.files import temporary_folder
from tvm_deconv.errors import BuildError, CompilerNotFound, ProblemError
from tvm_deconv.frontends import FoundLayer, with_unique_names
from tvm_deconv.frontends.onnx import Place, graphs, placed_layers, read_model
from tvm_deconv.onnxruntime import measure as timing
from tvm_deconv.onnxruntime import operator
from tvm_deconv.onnxruntime.pieces import Pieces
from tvm_deconv.onnxruntime.rewriting import replace
from tvm_deconv.problem import Problem
from tvm_deconv.problem.checks import checked_path
from tvm_deconv.runtime.facts import numbered
from tvm_deconv.runtime.layer import Layer
from tvm_deconv.runtime.library import Library, check_library
from tvm_deconv.runtime.process import LOG

#: The entry of SessionOptions with the folder of a model's external data.
_EXTERNAL = "session.model_external_initializers_file_folder_path"
_SPINNING = "session.intra_op.allow_spinning"
_PROVIDERS = ["CPUExecutionProvider"]


class Session:
    """An InferenceSession of ONNX Runtime, in which a library computes the layers that it has artifacts for.

    `layers` are those of the library by the names of their nodes, `left` the others, with the reason. Nodes that a
    layer has absorbed run with it. Initializers that a layer has read are constants, even those that are inputs too.

    What layers make of the same data by the same weights is computed once.

    The model stays whole: a custom operator calls the layers. Its library lies beside the artifacts, or is compiled. A
    process without it and without a C++ compiler cuts the model into pieces at its layers, and has the methods `run`,
    `get_inputs` and `get_outputs` only; otherwise all of an InferenceSession.
    If ONNX Runtime does not take the model so, it runs as it is, and no layer is replaced.
    """

    def __init__(
        self, path: str | os.PathLike[str], library: Library, options: Any = None, *, measure: bool = True
    ) -> None:
        """Read the model at `path`; `options` are the SessionOptions, which get the operator.

        The number of threads of the options holds for layers too. If `measure` is true, each layer is first timed
        alone, on random data; one that its artifact does not make faster stays with ONNX Runtime. Raises ProblemError,
        SourceError, and the errors of ONNX Runtime.
        """
        check_library(library)
        if not isinstance(options, onnxruntime.SessionOptions | None):
            raise ProblemError("options", options, "must be SessionOptions, or None")
        self._options = onnxruntime.SessionOptions() if options is None else options
        path = checked_path("path", path)
        model = read_model(path)
        found = placed_layers(model, path, {})
        self.layers: dict[str, Layer] = {}
        self.left: dict[str, str] = {}
        self._whole = self._operator_loads(None if library.pinned else library.root)
        self._folder = path.parent.resolve()
        places: list[Place] = []
        gains: dict[Problem, float] = {}
        bind = _Binder(library, None if self._whole else model.graph)
        for layer, (_, place) in zip(with_unique_names(layer for layer, _ in found), found, strict=True):
            bound = bind(layer, place)
            if measure and isinstance(bound, Layer) and place is not None:
                if bound.problem not in gains:
                    gains[bound.problem] = self._gain(model, place, bound)
                if gains[bound.problem] <= 1:
                    bound = f"its artifact is no faster: {gains[bound.problem]:.2f} times as fast, measured alone"
            if isinstance(bound, str):
                self.left[layer.name] = bound
            elif place is not None:
                self.layers[layer.name] = bound
                places.append(place)
        self._session = self._opened(path, model, places)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the InferenceSession."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._session, name)

    def run(self, output_names: Sequence[str] | None, input_feed: Mapping[str, Any], run_options: Any = None) -> Any:
        """Return the outputs with these names, all for None, for arrays by the names of the model's inputs."""
        return self._session.run(output_names, input_feed, run_options)

    def get_inputs(self) -> Any:
        """Return name, type and shape of each input."""
        return self._session.get_inputs()

    def get_outputs(self) -> Any:
        """Return name, type and shape of each output."""
        return self._session.get_outputs()

    def _operator_loads(self, beside: Path | None) -> bool:
        """Tell whether the custom operator can be used here; its library may lie in a folder of artifacts."""
        try:
            operator.register(self._options, beside)
        except (CompilerNotFound, BuildError, OSError) as error:  # OSError: nowhere to write, or to load from
            LOG.warning("models are cut at their layers, since there is no custom operator: %s", error)
            return False
        return True

    def _gain(self, model: onnx.ModelProto, place: Place, layer: Layer) -> float:
        """Return how many times as fast an artifact makes a layer; infinity if the layer cannot be timed alone."""
        options = onnxruntime.SessionOptions()  # none of the caller's, which may write files
        options.intra_op_num_threads = self._options.intra_op_num_threads
        options.add_session_config_entry(_SPINNING, "0")  # threads of one session would slow down the other
        if self._whole:
            operator.register(options)
        try:
            single, there = timing.alone(model, place, layer.problem)
            original = self._open(single, options)
            return timing.gain(original, self._replaced(single, [there], [layer], options), layer.problem)
        except Exception as error:  # those of ONNX Runtime have no class in common
            LOG.info("%s is not timed: %s", place.node.name, error)
            return math.inf

    def _opened(self, path: Path, model: onnx.ModelProto, places: Sequence[Place]) -> Any:
        """Return the session of the model with its layers replaced, or as it is if ONNX Runtime refuses that."""
        try:
            if places:
                return self._replaced(model, places, [*self.layers.values()], self._options)
        except Exception as error:  # those of ONNX Runtime have no class in common
            self.left |= dict.fromkeys(self.layers, f"ONNX Runtime does not take the model with it: {error}")
            self.layers.clear()
        return onnxruntime.InferenceSession(str(path), self._options, _PROVIDERS)

    def _replaced(self, model: onnx.ModelProto, places: Sequence[Place], layers: list[Layer], options: Any) -> Any:
        """Return the session of the model with layers in these places, which changes it."""
        if not self._whole:
            _put(model, places, layers, range(len(layers)))
            return Pieces(model, layers, lambda piece: self._open(piece, options))
        with numbered(operator.load(), layers, options.intra_op_num_threads) as numbers:
            _put(model, places, layers, numbers)
            return self._open(model, options)

    def _open(self, model: onnx.ModelProto, options: Any) -> onnxruntime.InferenceSession:
        """Return the session of a changed model, whose external data stay in the folder of the first."""
        places = _external_data(model)
        if places:
            options.add_session_config_entry(_EXTERNAL, str(self._folder))
        try:
            return onnxruntime.InferenceSession(model.SerializeToString(), options, _PROVIDERS)
        except Exception:  # ONNX Runtime 1.20 does not optimize a model in memory that has external data
            if not places or any(Path(place).is_absolute() or ".." in Path(place).parts for place in places):
                raise
        with temporary_folder() as folder:
            path = folder / "model.onnx"
            path.write_bytes(model.SerializeToString())
            for place in places:
                (path.parent / place).parent.mkdir(parents=True, exist_ok=True)
                (path.parent / place).symlink_to(self._folder / place)
            return onnxruntime.InferenceSession(str(path), options, _PROVIDERS)


class _Binder:
    """Binds the layers of a model; those that compute the same of the same data become one."""

    def __init__(self, library: Library, only: onnx.GraphProto | None) -> None:
        """Bind layers of `library`; `only` is the one graph that can be changed, None if all can."""
        self._library = library
        self._only = only
        self._bound: dict[Hashable, Layer | str] = {}

    def __call__(self, layer: FoundLayer, place: Place | None) -> Layer | str:
        """Return the bound layer, or the reason why it stays in the model."""
        if not layer.reason and place is not None and self._only is not None and place.graph is not self._only:
            return "it stands in a graph within the model's own, and there is no compiler for the custom operator"
        if layer.problem is None or layer.filter is None:
            return layer.bind(self._library)
        weights = (weight for weight in (layer.filter, layer.bias) if weight is not None)
        digests = [sha256(weight.tobytes()).digest() for weight in weights]
        same = (layer.problem, *digests, layer.scaling and layer.scaling.text)
        if same not in self._bound:
            self._bound[same] = self._new(layer)
        return self._bound[same]

    def _new(self, layer: FoundLayer) -> Layer | str:
        bound = layer.bind(self._library)
        if isinstance(bound, Layer) and bound.manifest is None:
            return "no artifact serves it, and NumPy is slower than ONNX Runtime"
        return bound


def _put(model: onnx.ModelProto, places: Sequence[Place], layers: Sequence[Layer], numbers: Sequence[int]) -> None:
    """Replace the layers in `model` by nodes of the operator: one for those that make the same of the same data."""
    made: dict[Hashable, str] = {}
    nodes = []
    for place, layer, number in zip(places, layers, numbers, strict=True):
        first = made.setdefault((id(place.graph), place.data, layer), place.made)
        if first == place.made:
            nodes.append(operator.node(layer, number, place))
        else:
            nodes.append(onnx.helper.make_node("Identity", [first], [place.made], place.node.name))
    replace(model, [*zip(places, nodes, strict=True)])


def _external_data(model: onnx.ModelProto) -> set[str]:
    """Return the places of the files that hold the external data of a model."""
    stored = [tensor for graph in graphs(model.graph) for tensor in graph.initializer]
    return {entry.value for tensor in stored for entry in tensor.external_data if entry.key == "location"}
