"""From a directory of artifacts to calls: `load`, `Library.select`, `Library.bind`, `Layer`.

A `Library` reads manifests only. The first `Library.bind` that needs an artifact verifies and loads its shared library;
`bind` packs the filter, once; calling the `Layer` then costs the checks of its arrays and the kernel.

Arrays may be NumPy's or of any package with DLPack (torch, jax, ...) in CPU memory; results are of the data's kind.
Arrays of torch and CuPy in the memory of a CUDA device are served by artifacts for CUDA, on that device and the
package's current stream; where the filter is decides.
Data and output must be C-contiguous and aligned to the size of an element, nothing more; filters and biases are copied
at bind, so that they may have any strides, and changing them later changes nothing.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from tvm_deconv.artifact import manifest as manifests
from tvm_deconv.artifact.manifest import Accepted, Decision, Manifest, Rejected
from tvm_deconv.errors import (
    ArtifactError,
    DeconvError,
    IntegrityError,
    ManifestError,
    NoArtifactError,
    ProblemError,
    TensorError,
)
from tvm_deconv.problem import ANY, Epilogue, Problem, integer, one_of
from tvm_deconv.runtime import arrays as _arrays
from tvm_deconv.runtime import cuda as _cuda
from tvm_deconv.runtime import loader as _loading
from tvm_deconv.runtime.loader import LOG
from tvm_deconv.targets import Capability, Host, Target, cuda_capability, cuda_target, detect_host, max_target

Ints = Sequence[int]
_FALLBACKS = ("compile", "reference")
_REPLACEMENTS = 10  # times that an artifact may be built again while it is loaded
_MOST_SHAPES = 4096  # that a layer of a variable problem, or a library, remembers


def load(
    root: str | Path,
    *,
    digest: str | None = None,
    public_key: str | Path | None = None,
    fallback: str | Sequence[str] | None = None,
) -> Library:
    """Read the manifests in the directory `root`; no library of an artifact is opened and none of its code runs.

    A manifest that does not read is a rejected candidate of every selection, and in `Library.broken`; where nothing
    else is there, its ManifestError is raised. A library without a manifest, left by an interrupted build, is such a
    candidate too. ``TVM_DECONV_MAX_TARGET`` names the widest target to use. Raises ArtifactError where there is no such
    directory.

    With `digest`, that of an earlier `Library.digest`, nothing but those artifacts is loaded. With `public_key`, the
    PEM file of an Ed25519 key, nothing but what its owner signed is ("tvm-deconv sign"; needs the package
    cryptography), and the files of weights beside it must be those that were signed. Raises IntegrityError.

    `fallback` says what to do with a problem that no artifact serves: "compile" builds one into the user's cache, once,
    where the compiler is installed and nothing is pinned, for the device of the filter where that is on one;
    "reference" computes with NumPy, slowly, and copies from and to a device; both may be given, in the order to try. By
    default it is NoArtifactError.
    """
    wanted = (fallback,) if isinstance(fallback, str) else tuple(fallback or ())
    for name in wanted:
        one_of("fallback", name, _FALLBACKS)
    pinned = digest is not None or public_key is not None
    if pinned and "compile" in wanted:
        raise ProblemError(
            "fallback", fallback, "must not be compile where digest or public_key say what may be loaded"
        )
    root = Path(root).absolute()  # the program may change its directory before the first bind
    try:
        names = sorted(path.name for path in root.iterdir())
    except OSError as error:
        raise ArtifactError(root, f"must be a directory of artifacts: {error.strerror}") from None
    read: list[Manifest] = []
    broken: dict[str, ArtifactError] = {}
    content = hashlib.sha256()
    present = frozenset(names)
    for name in names:
        path = root / name
        stem = manifests.stem_of(name)
        if stem is None:
            continue
        if path.suffix == ".so":
            if f"{stem}.json" not in present:
                broken[stem] = ArtifactError(path, "has no manifest: its build was interrupted; compile it again")
            continue
        try:
            text = manifests.read(path)
            manifest = Manifest.from_json(text, path)
            if manifest.name != stem:
                raise ManifestError(path, "must have the name of the manifest's file", "library", manifest.library)
        except ManifestError as error:
            LOG.warning("ignored: %s", error)
            broken[stem] = error
        else:
            read.append(manifest)
            content.update(name.encode() + b"\0" + hashlib.sha256(text).digest())
    if broken and not read:
        raise next(iter(broken.values()))
    found = f"sha256:{content.hexdigest()}"
    if digest is not None and digest != found:
        raise IntegrityError(root, f"must be {digest}, which was asked for", "digest", found)
    if public_key is not None:
        from tvm_deconv.artifact.signing import check

        check(root, found, Path(public_key))
    LOG.info("%s holds %d artifacts, %d broken; %s", root, len(read), len(broken), found)
    if read:
        _loading.import_tvm_ffi()  # so that the first call of a service need not wait for it
    return Library(
        root, read, broken, host=detect_host(), cap=max_target(), digest=found, pinned=pinned, fallback=wanted
    )


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
    """The artifacts of a directory; see `load`. Its methods may be called from several threads."""

    def __init__(
        self,
        root: Path,
        manifests: Sequence[Manifest],
        broken: Mapping[str, ArtifactError],
        *,
        host: Host,
        cap: Target | None,
        digest: str,
        pinned: bool = True,
        fallback: Sequence[str] = (),
    ) -> None:
        self.root = root
        self.manifests = tuple(manifests)
        self.broken = MappingProxyType(dict(broken))
        self.host = host
        self.digest = digest
        self._cap = cap
        self._pinned = pinned
        self._fallback = tuple(fallback)
        self._best: dict[Problem, tuple[Manifest | None, _loading.Artifact]] = {}
        self._best_on: dict[tuple[Problem, int], tuple[Manifest | None, _loading.Artifact]] = {}
        self._serving: dict[str, list[Manifest]] = {}
        for manifest in self.manifests:
            self._serving.setdefault(manifest.problem, []).append(manifest)
        self._variable = [manifest for manifest in self.manifests if ANY in manifest.problem]

    def __repr__(self) -> str:
        return f"<Library {str(self.root)!r}: {len(self.manifests)} artifacts, {len(self.broken)} broken>"

    def select(self, problem: Problem, device: int | None = None) -> list[Decision]:
        """Return the decision on every candidate for `problem` on this machine, with its reason, the best first.

        With a `device`, for arrays on the CUDA device of this number; DeviceError where there is none.
        """
        _check_problem(problem)
        reasons = {name: str(error) for name, error in self.broken.items()}
        capability = None if device is None else cuda_capability(device)
        return manifests.select(
            problem, self.manifests, self.host.features, cap=self._cap, broken=reasons, capability=capability
        )

    def explain(self, problem: Problem, device: int | None = None) -> str:
        """Return the decisions of `select` as a table, and what follows where none is accepted."""
        then = f"falls back to {', then '.join(self._fallback)}" if self._fallback else "raises NoArtifactError"
        return f"{manifests.table(self.select(problem, device))}\nwhere none is usable, bind {then}"

    def with_dynamic_extents(self, problem: Problem) -> Problem:
        """Return `problem` with the dynamic extents of the artifact that serves it for arrays in CPU memory.

        So a layer that is bound for one shape can be called with others. It is the problem itself where no artifact
        serves it, or one for exactly these extents does.
        """
        _check_problem(problem)
        best = self._choose(problem, self._all_candidates(problem))
        return problem if best is None else problem.replace(dynamic=best.parsed.dynamic)

    def bind(
        self, problem: Problem, filter: Any, bias: Any = None, *, workspace: int | _arrays.Array | None = None
    ) -> Layer:
        """Pack `filter` (shape ``problem.filter_shape``) for the best artifact and return the function of the data.

        `bias` (shape ``problem.bias_shape``, in the problem's dtype or its accumulate dtype) goes with an epilogue that
        has one. Both are copied.

        By default every thread keeps the workspace of its last calls, for all layers. A number as `workspace` has the
        layer keep its own, allocated now, for so many threads (1 to 64); an array (of ``manifest.workspace_bytes``, in
        the caller's memory, for this layer alone) is used as it is. Threads beyond that use their own, and of calls at
        one time one has what a schedule packs for all of its threads there.

        Raises NoArtifactError with every candidate's reason, IntegrityError where the library is not the one that was
        built, ArtifactError where it does not load, TensorError, ProblemError for a `workspace` that cannot be;
        DeviceError where the filter is on a CUDA device that cannot be used. On a device the workspace is allocated for
        each call, by the package of the data.
        """
        if _cuda.holds(filter):
            if workspace is not None:
                raise ProblemError("workspace", workspace, "must be None for a filter on a CUDA device")
            return self._bind_cuda(problem, _cuda.borrow("filter", filter), bias)
        manifest, artifact = self._load(problem)
        weights, offset = _arrays.borrow("filter", filter), _borrow_bias(problem, bias)
        return Layer(problem, manifest, artifact, weights, offset, workspace)

    def _bind_cuda(self, problem: Problem, filter: _cuda.Borrowed, bias: Any) -> Layer:
        _check_problem(problem)
        found = self._best_on.get((problem, filter.device))
        if found is None:
            capability = cuda_capability(filter.device)
            best = self._choose(problem, self._candidates(problem), capability)
            found = self._open(problem, best, capability) if best else self._fall_back(problem, filter.device)
            self._best_on[problem, filter.device] = found
        _check_bias(problem, bias)
        offset = None if bias is None else _cuda.borrow("bias", bias)
        return CudaLayer(problem, *found, filter, offset)

    def _load(self, problem: Problem) -> tuple[Manifest | None, _loading.Artifact]:
        """Return what serves `problem`; without a manifest where that is NumPy."""
        _check_problem(problem)
        found = self._best.get(problem)
        if found is None:
            best = self._choose(problem, self._all_candidates(problem))
            found = self._open(problem, best) if best else self._fall_back(problem)
            if len(self._best) >= _MOST_SHAPES:
                self._best.clear()
            self._best[problem] = found
        return found

    def _all_candidates(self, problem: Problem) -> list[Manifest]:
        exact = self._candidates(problem)
        return [*exact, *(manifest for manifest in self._variable if manifest not in exact)]

    def _candidates(self, problem: Problem) -> list[Manifest]:
        return [manifest for key in problem.artifact_keys for manifest in self._serving.get(key, ())]

    def _choose(
        self, problem: Problem, among: Sequence[Manifest], capability: Capability | None = None
    ) -> Manifest | None:
        decisions = manifests.select(problem, among, self.host.features, cap=self._cap, capability=capability)
        return decisions[0].manifest if decisions and isinstance(decisions[0], Accepted) else None

    def _open(
        self, problem: Problem, manifest: Manifest, capability: Capability | None = None
    ) -> tuple[Manifest, _loading.Artifact]:
        """Load an artifact; where a build has replaced its library since the manifest was read, the new one."""
        for _ in range(_REPLACEMENTS):
            try:
                return manifest, _loading.load(self.root, manifest)
            except IntegrityError:
                raise
            except ArtifactError:
                newer = self._reread(problem, manifest, capability)
                if newer is None:
                    raise
                manifest = newer
        return manifest, _loading.load(self.root, manifest)

    def _reread(self, problem: Problem, manifest: Manifest, capability: Capability | None) -> Manifest | None:
        """Return what is now in the place of `manifest`; None where that is not allowed to serve `problem`."""
        try:
            newer = Manifest.read(self.root / f"{manifest.name}.json")
        except ManifestError:
            return None
        return None if self._pinned and newer != manifest else self._choose(problem, [newer], capability)

    def _fall_back(self, problem: Problem, device: int | None = None) -> tuple[Manifest | None, _loading.Artifact]:
        from tvm_deconv.runtime.fallback import (  # rarely needed, and not quick to import
            compiled,
            computed,
            widest_target,
        )

        decisions = self.select(problem, device)
        for name in self._fallback:
            if name == "reference":
                return None, computed(problem)
            try:
                if device is None:
                    return compiled(problem, widest_target(self.host, self._cap))
                return compiled(problem, cuda_target(cuda_capability(device)))
            except DeconvError as error:
                LOG.warning("%s", error)
                decisions.insert(0, Rejected(None, str(error), f"fallback {name}"))
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

        `activation` is a name, or an `Epilogue` where it has parameters. The filter is packed on every call, since
        nothing tells whether it has changed: `bind` is for filters that stay. Raises what `bind` and the layer do, and
        ProblemError.
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
        def problem_of(dtype: str, data_shape: tuple[int, ...], filter_shape: tuple[int, ...]) -> Problem:
            rank = len(data_shape) + group_axes
            if len(filter_shape) != rank:
                rule = f"rank must be {rank}, for this operator and data of rank {len(data_shape)}"
                raise TensorError("filter", filter_shape, rule)
            epilogue = _epilogue(activation, bias is not None)
            return Problem.from_openvino(
                data_shape, filter_shape, **attributes._asdict(), dtype=dtype, epilogue=epilogue
            )

        if _cuda.holds(filter):
            on_device = _cuda.borrow("filter", filter)
            given = _cuda.borrow("data", data, on_device.device)
            return self._bind_cuda(problem_of(given.dtype, given.shape, on_device.shape), on_device, bias)(data, out)
        borrowed = _arrays.borrow("data", data)
        weights = _arrays.borrow("filter", filter)
        problem = problem_of(borrowed.dtype, borrowed.view.shape, weights.view.shape)
        manifest, artifact = self._load(problem)
        offset = _borrow_bias(problem, bias)
        layer = Layer(problem, manifest, artifact, weights, offset)
        others = {"filter": weights.view} if offset is None else {"filter": weights.view, "bias": offset.view}
        return layer._run(borrowed, out, others)


def _check_problem(problem: object) -> None:
    if not isinstance(problem, Problem):
        raise ProblemError("problem", problem, "must be a Problem")


def _epilogue(activation: str | Epilogue | None, bias: bool) -> Epilogue:
    if not isinstance(activation, Epilogue):
        return Epilogue(bias=bias, activation="none" if activation is None else activation)
    if activation.bias and not bias:
        raise TensorError("bias", None, "must be an array: activation is an Epilogue with a bias")
    return dataclasses.replace(activation, bias=bias)


def _check_bias(problem: Problem, bias: Any) -> None:
    if problem.epilogue.bias and bias is None:
        raise TensorError(
            "bias", None, f"must be an array of shape {problem.bias_shape}: the problem's epilogue has one"
        )
    if bias is not None and not problem.epilogue.bias:
        shape = tuple(getattr(bias, "shape", ()))
        raise TensorError("bias", shape, "must be None: the problem's epilogue has none")


def _borrow_bias(problem: Problem, bias: object) -> _arrays.Borrowed | None:
    borrowed = None if bias is None else _arrays.borrow("bias", bias)
    _check_bias(problem, bias)
    return borrowed


class Layer:
    """A filter bound to its artifact: `layer(data, out=None)`. It may be called from several threads."""

    def __init__(
        self,
        problem: Problem,
        manifest: Manifest | None,
        artifact: _loading.Artifact,
        filter: _arrays.Borrowed,
        bias: _arrays.Borrowed | None,
        workspace: int | _arrays.Array | None = None,
    ) -> None:
        """Pack `filter` and convert `bias`; see `Library.bind`, which is how layers are made."""
        self.problem = problem
        self.manifest = manifest
        # The output's shape by the data's. A variable problem learns those of its calls.
        self._outputs = {} if problem.dynamic else {problem.data_shape: problem.output_shape}
        self._output_storage = _arrays.storage(problem.output_dtype)
        # What the short way of a call compares by identity. It is not for bfloat16, which NumPy does not know.
        short = problem.dtype != "bfloat16"
        self._data_dtype = np.dtype(problem.dtype) if short else None
        self._output_dtype = self._output_storage if short else None
        with _loading.inside():
            arguments = [_packed(problem, artifact, filter)]
            if bias is not None:
                arguments.append(_accumulated(problem, bias))
            self._constants = tuple(map(artifact.constant, arguments))
        # An empty output is complete: kernels need not know of extents of zero. Free extents are those of each call.
        self._deconv: Callable[..., None] = artifact if problem.dynamic or 0 not in problem.output_shape else _nothing
        if workspace is not None and manifest is not None:
            self._workspace = _memory(workspace, manifest)
            self._deconv = _loading.within(self._workspace, manifest.lane_bytes, manifest.shared_bytes, self._deconv)
        self._artifact = artifact

    def __repr__(self) -> str:
        return f"<Layer {self.problem.key} by {self._artifact.name}>"

    def __call__(self, data: Any, out: Any = None, *, threads: int | None = None) -> Any:
        """Return the output for `data`, in `out` where that is given, by up to `threads` threads.

        `data` has shape ``problem.data_shape`` and dtype ``problem.dtype``; the output has ``problem.output_shape`` and
        ``problem.output_dtype`` and is of the kind of `data`, or is `out` itself. Where the problem is variable, its
        dynamic extents are those of `data`, and ``problem.at(data.shape)`` has the output's. Raises TensorError,
        TensorTypeError.
        """
        if threads is not None:
            with _loading.thread_limit(threads):
                return self(data, out)
        shape = self._outputs.get(data.shape) if type(data) is np.ndarray else None
        if shape is not None and data.dtype is self._data_dtype and data.flags.carray:
            if out is None:
                result = _arrays.empty(shape, self._output_storage)
                self._deconv(data, *self._constants, result)
                return result
            if _is_plain(out, self._output_dtype, shape) and not np.may_share_memory(data, out):
                self._deconv(data, *self._constants, out)
                return out
        return self._run(_arrays.borrow("data", data), out, {})

    def _run(self, data: _arrays.Borrowed, out: Any, others: dict[str, _arrays.Array]) -> Any:
        """Check `data` and `out`, which must not overlap each other or `others`, and compute."""
        _arrays.check_type("data", data.dtype, [self.problem.dtype])
        shape = self._output_shape(data.view)
        _arrays.check_layout("data", data.view)
        if out is None:
            result = _arrays.empty(shape, self._output_storage)
        else:
            borrowed = _arrays.borrow("out", out)
            result = borrowed.view
            _arrays.check_type("out", borrowed.dtype, [self.problem.output_dtype])
            _arrays.check_shape("out", result, shape)
            _arrays.check_layout("out", result)
            _arrays.check_output(result, {"data": data.view, **others})
        if result.size:
            self._deconv(_arrays.readable(data.view), *self._constants, result)
        if out is None:
            return data.give(result)
        _arrays.count_write(out)
        return out

    def _output_shape(self, data: _arrays.Array) -> tuple[int, ...]:
        """Return the output's shape for `data`, whose shape is checked, and remember it."""
        if not self.problem.dynamic:
            _arrays.check_shape("data", data, self.problem.data_shape)
            return self.problem.output_shape
        try:
            shape = self.problem.at(data.shape).output_shape
        except ProblemError as error:
            raise TensorError("data", data.shape, f"{error.attribute} {error.rule}") from None
        # Empty outputs stay unknown: the short way of a call has no answer to them.
        if 0 not in shape:
            if len(self._outputs) >= _MOST_SHAPES:
                self._outputs.clear()
            self._outputs[data.shape] = shape
        return shape


class CudaLayer(Layer):
    """A filter bound to its artifact on a CUDA device: the same, for arrays in the memory of that device."""

    def __init__(
        self,
        problem: Problem,
        manifest: Manifest | None,
        artifact: _loading.Artifact,
        filter: _cuda.Borrowed,
        bias: _cuda.Borrowed | None,
    ) -> None:
        """Pack `filter` and convert `bias` on their device; see `Library.bind`, which is how layers are made."""
        self.problem = problem
        self.manifest = manifest
        self._artifact = artifact
        self._call = _cuda.CudaCall(problem, manifest, artifact, filter, bias)

    def __call__(self, data: Any, out: Any = None, *, threads: int | None = None) -> Any:
        """Return the output for `data`, computed on its package's current stream; see `Layer`. Raises DeviceError."""
        if threads is not None:
            raise ProblemError("threads", threads, "must be None: a device computes")
        return self._call(data, out)


def _nothing(*_: object) -> None:
    pass


def _is_plain(array: Any, dtype: np.dtype[Any] | None, shape: tuple[int, ...]) -> bool:
    """Tell whether the kernel can take `array` as it is; where not, the checks find out why."""
    return type(array) is np.ndarray and array.dtype is dtype and array.shape == shape and array.flags.carray


def _memory(workspace: int | _arrays.Array, manifest: Manifest) -> _arrays.Array:
    """Return the bytes of a workspace that was given, or that is wanted for a number of threads."""
    if not isinstance(workspace, np.ndarray):
        threads = integer("workspace", workspace, 1)
        if threads > _loading.MAX_LANES:
            raise ProblemError("workspace", threads, f"must be at most {_loading.MAX_LANES}, or an array")
        return np.ones(manifest.workspace_bytes(threads), np.uint8)  # written, so that the pages are there
    least = manifest.workspace_bytes(1)
    if workspace.nbytes < least:
        raise TensorError("workspace", workspace.nbytes, f"must have at least {least} bytes, for one thread")
    if not (workspace.flags.c_contiguous and workspace.flags.writeable):
        raise TensorError("workspace", workspace.strides, "must be contiguous memory that can be written")
    return workspace.view(np.ndarray).reshape(-1).view(np.uint8)


def _packed(problem: Problem, artifact: _loading.Artifact, filter: _arrays.Borrowed) -> _arrays.Array:
    _arrays.check_type("filter", filter.dtype, [problem.dtype])
    _arrays.check_shape("filter", filter.view, problem.filter_shape)
    # A copy where the memory is not already [G, Ci, Co, *K], else the caller's own, which "pack" only reads.
    canonical = np.require(problem.canonical_filter(filter.view), requirements=["C", "A"])
    shape, dtype = artifact.packed
    try:
        packed = _arrays.empty(shape, np.dtype(dtype))
        artifact.pack(_arrays.readable(canonical), packed)
    except (RuntimeError, ValueError, TypeError, MemoryError) as error:
        raise ArtifactError(artifact.path, f"must take the filter as its manifest says: {error}") from error
    return packed


def _accumulated(problem: Problem, bias: _arrays.Borrowed) -> _arrays.Array:
    _arrays.check_type("bias", bias.dtype, list(dict.fromkeys([problem.accumulate_dtype, problem.dtype])))
    _arrays.check_shape("bias", bias.view, problem.bias_shape)
    if bias.dtype == "bfloat16":
        return (bias.view.astype(np.uint32) << 16).view(np.float32)
    return np.array(bias.view, dtype=problem.accumulate_dtype, order="C")
