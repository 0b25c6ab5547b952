"""From a directory of artifacts to layers: `load`, `Library.select`, `Library.bind`.

A `Library` reads manifests only. The first `Library.bind` that needs an artifact verifies and loads its shared library.
`bind` packs the filter, once; a call of the `Layer` then costs the checks of its arrays and the kernel.

Arrays may be NumPy's or of any package with DLPack (torch, jax, ...) in CPU memory; results are of the data's kind.
Arrays of torch and CuPy in the memory of a CUDA device are served by artifacts for CUDA, on that device and the
package's current stream; the memory of the filter decides. Data and output must be C-contiguous and aligned to the size
of an element, nothing more. An `out` that begins at a multiple of 64 bytes, as the library's own arrays do, may be
stored past the caches, and is filled up to 1.5 times as fast where memory is what limits. Filters and biases are copied
at bind: they may have any strides, and later changes of them have no effect.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

from tvm_deconv.artifact import files, needs
from tvm_deconv.artifact.ffi import import_tvm_ffi
from tvm_deconv.artifact.manifest import Manifest, read_bytes, stem_of
from tvm_deconv.artifact.select import Accepted, Decision, Rejected, decision_table, select
from tvm_deconv.errors import (
    ArtifactError,
    DeconvError,
    IntegrityError,
    ManifestError,
    NoArtifactError,
    ProblemError,
    TensorError,
)
from tvm_deconv.problem import ANY, Array, Epilogue, Problem, Scaling
from tvm_deconv.problem.checks import checked_path
from tvm_deconv.problem.problem import check_problem
from tvm_deconv.runtime import arrays, cuda, loader
from tvm_deconv.runtime.fallback import Fallback
from tvm_deconv.runtime.host import HOST
from tvm_deconv.runtime.layer import Layer, Memory
from tvm_deconv.runtime.process import LOG, Served
from tvm_deconv.runtime.weights import Weights
from tvm_deconv.targets import CpuTarget, Host, Place, cuda_capability, detect_host, max_target

Ints = Sequence[int]
_REPLACEMENTS = 10  # times that an artifact may be built again while it is loaded
_MOST_PROBLEMS = 4096  # whose artifacts a library remembers


def load(
    root: str | Path,
    *,
    digest: str | None = None,
    public_key: str | Path | None = None,
    fallbacks: Sequence[Fallback] = (),
) -> Library:
    """Read the manifests in the directory or archive `root`; see `tvm_deconv.load`.

    The `fallbacks` are asked in their order for a problem that no artifact serves.
    """
    root = checked_path("root", root).absolute()  # the program may change its directory before the first bind
    if digest is not None and not isinstance(digest, str):
        raise ProblemError("digest", digest, "must be the text of a Library.digest")
    contents = _read(root)
    if contents.broken and not contents.manifests:
        raise next(iter(contents.broken.values()))
    if digest is not None and digest != contents.digest:
        raise IntegrityError(root, f"must be {digest}, which was asked for", "digest", contents.digest)
    signed = None
    if public_key is not None:
        from tvm_deconv.artifact.signing import check

        signed = check(root, contents.digest, checked_path("public_key", public_key))
    counts = len(contents.manifests), len(contents.broken)
    LOG.info("%s holds %d artifacts, %d broken; %s", root, *counts, contents.digest)
    if contents.manifests:
        import_tvm_ffi()  # so that the first call of a service need not wait for it
    pinned = digest is not None or public_key is not None
    return Library(
        root, *contents, host=detect_host(), cap=max_target(), pinned=pinned, signed=signed, fallbacks=fallbacks
    )


class _Contents(NamedTuple):
    """The manifests of a directory, the errors of broken artifacts by name, and the digest of the manifests."""

    manifests: list[Manifest]
    broken: dict[str, ArtifactError]
    digest: str


def _read(root: Path) -> _Contents:
    """Read all manifests in `root`. Raises ArtifactError if there is no such directory or archive."""
    names = files.names(root)
    manifests: list[Manifest] = []
    broken: dict[str, ArtifactError] = {}
    content = hashlib.sha256()
    present = frozenset(names)
    for name in names:
        path = root / name
        stem = stem_of(name)
        if stem is None:
            continue
        if path.suffix == ".so":
            if f"{stem}.json" not in present:
                broken[stem] = ArtifactError(path, "has no manifest: its build was interrupted; compile it again")
            continue
        try:
            text = read_bytes(path)
            manifest = Manifest.from_json(text, path)
            if manifest.name != stem:
                raise ManifestError(path, "must have the name of the manifest's file", "library", manifest.library)
        except ManifestError as error:
            LOG.warning("ignored: %s", error)
            broken[stem] = error
        else:
            manifests.append(manifest)
            content.update(name.encode() + b"\0" + hashlib.sha256(text).digest())
    return _Contents(manifests, broken, f"sha256:{content.hexdigest()}")


class _Attributes(NamedTuple):
    """The attributes of OpenVINO's operators, in the order of its opset."""

    strides: Ints
    output_shape: Ints | None
    pads_begin: Ints | None
    pads_end: Ints | None
    dilations: Ints | None
    auto_pad: str | None
    output_padding: Ints | None


class Library:
    """The artifacts of a directory; see `load`. Its methods may be called from several threads.

    `pinned` means that nothing but these artifacts may be loaded, and `signed` has the SHA-256 of each file of weights.
    As a collection, a library has the names of `layers`.
    """

    def __init__(
        self,
        root: Path,
        manifests: Sequence[Manifest],
        broken: Mapping[str, ArtifactError],
        digest: str,
        *,
        host: Host,
        cap: CpuTarget | None,
        pinned: bool = True,
        signed: Mapping[str, str] | None = None,
        fallbacks: Sequence[Fallback] = (),
    ) -> None:
        self.root = root
        self.manifests = tuple(manifests)
        self.broken = MappingProxyType(dict(broken))
        self.digest = digest
        self.host = host
        self.pinned = pinned
        self.fallbacks = tuple(fallbacks)
        self._cap = cap
        self._signed = signed
        self._weights: Weights | None = None
        self._served: dict[tuple[Problem, int | None], Served] = {}
        self._by_key: dict[str, list[Manifest]] = {}
        for manifest in self.manifests:
            self._by_key.setdefault(manifest.problem, []).append(manifest)
        self._variable = [manifest for manifest in self.manifests if ANY in manifest.problem]

    def __repr__(self) -> str:
        return f"<Library {str(self.root)!r}: {len(self.manifests)} artifacts, {len(self.broken)} broken>"

    def __reduce__(self) -> NoReturn:
        """Refuse: a library holds code of its process."""
        raise ProblemError("library", self, "must not be copied or pickled: load it again, in the process that uses it")

    def __len__(self) -> int:
        return len(self.layers)

    def __iter__(self) -> Iterator[str]:
        return iter(self.layers)

    def __contains__(self, name: object) -> bool:
        return name in self.layers

    def __bool__(self) -> bool:
        return True  # also without named layers

    @property
    def layers(self) -> Mapping[str, Problem]:
        """The layers of the models that were compiled with their weights: each name with its problem.

        The names are those of the models' nodes; a name that several models have is ``MODEL:NAME``. Files of weights
        are read when this is first asked for. Raises ArtifactError for a file that does not read.
        """
        return self._named

    @property
    def _named(self) -> Weights:
        if self._weights is None:
            self._weights = Weights(self.root, self._signed)
        return self._weights

    def layer(self, name: str, *, workspace: int | Array | None = None) -> Layer:
        """Return the layer of a model, bound with the filter and the bias that its compile wrote.

        `name` is one of `layers`; another raises ProblemError. Raises ArtifactError if its weights do not read, and
        IntegrityError if they are not what was signed. Raises TensorError if the layer has a bias, and the model no
        constant one. Raises the errors of `bind` too.
        """
        filter, bias = self.weights(name)
        problem = self.layers[name]
        if problem.epilogue.bias and bias is None:
            rule = f"must be an array of shape {problem.bias_shape}, passed to bind with weights({name!r})[0]"
            raise TensorError("bias", None, f"{rule}: the model has no constant one")
        return self.bind(problem, filter, bias, scaling=self.scaling(name), workspace=workspace)

    def weights(self, name: str) -> tuple[Array, Array | None]:
        """Return the filter and the bias, None if there is none, of a layer; raises as `layer` does.

        They are as `bind` takes them, for instance after a copy to a device.
        """
        return self._named.arrays(name)

    def scaling(self, name: str) -> Scaling | None:
        """Return the scaling of a quantized layer, None of another; raises as `layer` does."""
        return self._named.scaling(name)

    def select(self, problem: Problem, device: int | None = None) -> list[Decision]:
        """Return the decision on every candidate for `problem` on this machine, with its reason, the best first.

        With a `device`, for arrays on the CUDA device of this number; DeviceError if there is none.
        """
        check_problem(problem)
        return self._decisions(problem, self._place(device))

    def explain(self, problem: Problem, device: int | None = None) -> str:
        """Return the decisions of `select` as a table, and the consequence if none is accepted."""
        names = ", then ".join(fallback.name for fallback in self.fallbacks)
        then = f"falls back to {names}" if names else "raises NoArtifactError"
        return f"{decision_table(self.select(problem, device))}\nwhere none is usable, bind {then}"

    def with_dynamic_extents(self, problem: Problem) -> Problem:
        """Return `problem` with the dynamic extents of the artifact that serves it for arrays in CPU memory.

        So a layer that is bound for one shape can be called with others. The problem itself is returned if no artifact
        serves it, or if one for exactly these extents does.
        """
        check_problem(problem)
        best = self._best(problem, self._candidates(problem), self._place(None))
        return problem if best is None else problem.replace(dynamic=best.parsed.dynamic)

    def bind(
        self,
        problem: Problem,
        filter: Any,
        bias: Any = None,
        *,
        scaling: Scaling | None = None,
        workspace: int | Array | None = None,
    ) -> Layer:
        """Pack `filter` (shape ``problem.filter_shape``) for the best artifact and return the function of the data.

        `bias` (shape ``problem.bias_shape``, in the problem's dtype or its accumulate dtype) goes with an epilogue that
        has one. Both are copied. A quantized problem takes its `scaling`; its bias is int32.

        By default every thread keeps the workspace of its last calls, for all layers. With a number as `workspace`, 1
        to 64, the layer keeps a workspace of its own for that many threads, allocated now. An array (of
        ``manifest.workspace_bytes``, in the caller's memory, for this layer alone) is used as the workspace. Threads
        beyond these use their own. Of concurrent calls, one keeps the data that its threads share in this workspace. On
        a CUDA device the package of the data allocates the workspace for each call.

        Raises NoArtifactError with every candidate's reason. Raises IntegrityError if the library is not the one
        that was built, and ArtifactError if it does not load. Raises TensorError for arrays, ProblemError for an
        impossible `workspace` or `scaling`, and DeviceError for a CUDA device that cannot be used.
        """
        memory = _memory_of(filter)
        check_problem(problem)
        weights = _borrow_filter(memory, problem, filter)
        served = self._serve(problem, memory.device)
        offset = _borrow_bias(memory, problem, bias)
        return Layer(problem, served, memory.bind(problem, served, weights, offset, scaling, workspace))

    def _place(self, device: int | None) -> Place:
        return Place(self.host, self._cap, None if device is None else cuda_capability(device), needs.here())

    def _serve(self, problem: Problem, device: int | None) -> Served:
        """Return the loaded artifact for `problem` on the CPU or a CUDA `device`."""
        served = self._served.get((problem, device))
        if served is None:
            place = self._place(device)
            best = self._best(problem, self._candidates(problem, device), place)
            served = self._open(problem, best, place) if best else self._fall_back(problem, place)
            if len(self._served) >= _MOST_PROBLEMS:
                self._served.clear()
            self._served[problem, device] = served
        return served

    def _candidates(self, problem: Problem, device: int | None = None) -> list[Manifest]:
        """Return the manifests that may serve `problem`; devices have no artifacts with dynamic extents."""
        exact = [manifest for key in problem.artifact_keys for manifest in self._by_key.get(key, ())]
        variable = self._variable if device is None else []
        return [*exact, *(manifest for manifest in variable if manifest not in exact)]

    def _decisions(self, problem: Problem, place: Place) -> list[Decision]:
        broken = {name: str(error) for name, error in self.broken.items()}
        return select(problem, self.manifests, place, broken=broken)

    def _best(self, problem: Problem, candidates: Sequence[Manifest], place: Place) -> Manifest | None:
        decisions = select(problem, candidates, place)
        return decisions[0].manifest if decisions and isinstance(decisions[0], Accepted) else None

    def _open(self, problem: Problem, manifest: Manifest, place: Place) -> Served:
        """Load an artifact; if a build has replaced its library since the manifest was read, load the new one."""
        for _ in range(_REPLACEMENTS):
            try:
                return Served(manifest, loader.load(self.root, manifest))
            except IntegrityError:
                raise
            except ArtifactError:
                newer = self._reread(problem, manifest, place)
                if newer is None:
                    raise
                manifest = newer
        return Served(manifest, loader.load(self.root, manifest))

    def _reread(self, problem: Problem, manifest: Manifest, place: Place) -> Manifest | None:
        """Return the manifest that is now in the place of `manifest`; None if it must not serve `problem`."""
        try:
            newer = Manifest.read(self.root / f"{manifest.name}.json")
        except ManifestError:
            return None
        return None if self.pinned and newer != manifest else self._best(problem, [newer], place)

    def _fall_back(self, problem: Problem, place: Place) -> Served:
        decisions = self._decisions(problem, place)
        for fallback in self.fallbacks:
            try:
                return fallback.serve(problem, place)
            except DeconvError as error:
                LOG.warning("%s", error)
                decisions.insert(0, Rejected(None, str(error), f"fallback {fallback.name}"))
        raise NoArtifactError(problem.artifact_key, decisions)

    def convolution_backprop_data(
        self,
        data: Any,
        filter: Any,
        strides: Ints,
        output_shape: Ints | None = None,
        pads_begin: Ints | None = None,
        pads_end: Ints | None = None,
        dilations: Ints | None = None,
        auto_pad: str | None = None,
        output_padding: Ints | None = None,
        bias: Any = None,
        activation: str | Epilogue | None = None,
        out: Any = None,
    ) -> Any:
        """Compute OpenVINO's ConvolutionBackpropData-1: `data` ``[N, Cin, *X]``, `filter` ``[Cin, Cout, *K]``.

        `activation` is a name, or an `Epilogue` if it has parameters. The filter is packed on every call, since it may
        have changed: use `bind` for filters that stay. Raises ProblemError, and the errors of `bind` and of a layer.
        """
        attributes = _Attributes(strides, output_shape, pads_begin, pads_end, dilations, auto_pad, output_padding)
        return self._call(0, attributes, data, filter, bias, activation, out)

    def group_convolution_backprop_data(
        self,
        data: Any,
        filter: Any,
        strides: Ints,
        output_shape: Ints | None = None,
        pads_begin: Ints | None = None,
        pads_end: Ints | None = None,
        dilations: Ints | None = None,
        auto_pad: str | None = None,
        output_padding: Ints | None = None,
        bias: Any = None,
        activation: str | Epilogue | None = None,
        out: Any = None,
    ) -> Any:
        """Compute GroupConvolutionBackpropData-1: as above, with `filter` ``[G, Cin/G, Cout/G, *K]``."""
        attributes = _Attributes(strides, output_shape, pads_begin, pads_end, dilations, auto_pad, output_padding)
        return self._call(1, attributes, data, filter, bias, activation, out)

    def _call(
        self,
        group_axes: int,
        attributes: _Attributes,
        data: Any,
        filter: Any,
        bias: Any,
        activation: str | Epilogue | None,
        out: Any,
    ) -> Any:
        """Compute an operator of OpenVINO whose filter has `group_axes` axes more than the data."""
        memory = _memory_of(filter)
        given, weights = memory.borrow("data", data), memory.borrow("filter", filter)
        rank = len(given.shape) + group_axes
        if len(weights.shape) != rank:
            rule = f"rank must be {rank}, for this operator and data of rank {len(given.shape)}"
            raise TensorError("filter", weights.shape, rule)
        epilogue = epilogue_of(activation, bias is not None)
        problem = Problem.from_openvino(
            given.shape, weights.shape, **attributes._asdict(), dtype=given.dtype, epilogue=epilogue
        )
        arrays.check_type("filter", weights.dtype, [problem.dtype])
        served = self._serve(problem, memory.device)
        return memory.run_once(problem, served, given, weights, _borrow_bias(memory, problem, bias), out)


def check_library(library: object) -> None:
    """Raise ProblemError unless `library` is a Library."""
    if not isinstance(library, Library):
        raise ProblemError("library", library, "must be a Library, as load returns it")


def epilogue_of(activation: str | Epilogue | None, bias: bool) -> Epilogue:
    """Return the epilogue of an `activation`, a name or an Epilogue, with or without a bias. Raises TensorError."""
    if not isinstance(activation, Epilogue):
        return Epilogue(bias=bias, activation="none" if activation is None else activation)
    if activation.bias and not bias:
        raise TensorError("bias", None, "must be an array: activation is an Epilogue with a bias")
    return dataclasses.replace(activation, bias=bias)


def _memory_of(array: object) -> Memory:
    return cuda.memory_of(array) or HOST


def _borrow_filter(memory: Memory, problem: Problem, filter: Any) -> Any:
    """Return a view of `filter`. Raises TensorTypeError, TensorError unless it is one of the problem's."""
    borrowed = memory.borrow("filter", filter)
    arrays.check_type("filter", borrowed.dtype, [problem.filter_dtype])
    arrays.check_shape("filter", tuple(borrowed.shape), problem.filter_shape)
    return borrowed


def _borrow_bias(memory: Memory, problem: Problem, bias: Any) -> Any:
    """Return a view of `bias`, None without one. Raises TensorError unless the problem's epilogue agrees."""
    borrowed = None if bias is None else memory.borrow("bias", bias)
    if problem.epilogue.bias and bias is None:
        raise TensorError(
            "bias", None, f"must be an array of shape {problem.bias_shape}: the problem's epilogue has one"
        )
    if bias is not None and not problem.epilogue.bias:
        raise TensorError("bias", tuple(getattr(bias, "shape", ())), "must be None: the problem's epilogue has none")
    return borrowed
