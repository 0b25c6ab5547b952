"""Layers for calls with tensors: each filter is packed once, and kept as long as nothing changes that it was made of.

A layer is kept beside the tensor of its filter. It is made anew when the filter, or a tensor that is folded into it,
has another identity, address or version. Tensors of inference mode have no version: a copy of them is compared instead.
PyTorch does not count writes through `Tensor.data`, or through a NumPy array of the same memory: those go unnoticed.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from tvm_deconv.api import load
from tvm_deconv.errors import ArtifactError, DeconvError, NoArtifactError, TensorError
from tvm_deconv.frontends.folding import absorb
from tvm_deconv.frontends.graph import batch_norm_step
from tvm_deconv.frontends.layers import FoundLayer
from tvm_deconv.frontends.packages import cast
from tvm_deconv.frontends.torch import array, channels_last, dtype_name
from tvm_deconv.problem import Epilogue, Problem
from tvm_deconv.runtime.layer import Layer
from tvm_deconv.runtime.library import Library, check_library

_LOG = logging.getLogger("tvm_deconv")
#: The most layers, of different shapes, that a filter is kept packed for.
MOST_LAYERS = 8
#: What a tensor is viewed as where its bits are compared, by the size of its elements.
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

#: The libraries that graphs know by their handles.
libraries: dict[str, Library] = {}


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def handle_of(library: Library) -> str:
    """Return the name of `library` in graphs.

    In another process it means the same artifacts in the same directory, and NumPy if the library falls back to it.
    Nothing is compiled there. Raises ProblemError for what is no library.
    """
    check_library(library)
    words = [
        library.digest,
        *(["pinned"] if library.pinned else []),
        *(fallback.name for fallback in library.fallbacks),
    ]
    handle = f"{'+'.join(words)}@{library.root}"
    libraries[handle] = library
    return handle


def library_of(handle: str) -> Library:
    """Return the library of a name that `handle_of` gave, also in another process."""
    if handle not in libraries:
        words, _, root = handle.partition("@")
        digest, *others = words.split("+")
        libraries[handle] = load(root, digest=digest, fallback=[word for word in others if word == "reference"])
    return libraries[handle]


class Parameters(NamedTuple):
    """The tensors of a layer; without a mean there is no batch normalisation, and otherwise one of evaluation mode."""

    weight: Tensor
    bias: Tensor | None
    gamma: Tensor | None = None
    beta: Tensor | None = None
    mean: Tensor | None = None
    variance: Tensor | None = None


class Attributes(NamedTuple):
    """The attributes of a layer, all hashable; `library` is a handle."""

    epsilon: float
    stride: Sequence[int]
    padding: Sequence[int]
    output_padding: Sequence[int]
    dilation: Sequence[int]
    groups: int
    epilogue: str
    library: str


class Stamp:
    """The identity, address and version of tensors, which change when the tensors do."""

    def __init__(self, tensors: Iterable[Tensor | None]) -> None:
        self._seen = [
            None if tensor is None else (weakref.ref(tensor), tensor.data_ptr(), _state(tensor)) for tensor in tensors
        ]

    def holds(self, tensors: Iterable[Tensor | None]) -> bool:
        """Tell whether `tensors` are those of the stamp, unchanged."""
        for seen, tensor in zip(self._seen, tensors, strict=True):
            if seen is None or tensor is None:
                if seen is not tensor:
                    return False
                continue
            itself, address, state = seen
            known: Any = itself()
            if known is not tensor or tensor.data_ptr() != address:
                return False
            if not (equal(tensor, state) if isinstance(state, Tensor) else tensor._version == state):
                return False
        return True


def _state(tensor: Tensor) -> int | Tensor:
    return tensor.detach().clone() if tensor.is_inference() else tensor._version


def equal(tensor: Tensor | None, other: Tensor | None) -> bool:
    """Tell whether two tensors have the same shape, type and bits."""
    if tensor is None or other is None:
        return tensor is other
    if tensor.shape != other.shape or tensor.dtype != other.dtype:
        return False
    bits = _BITS.get(tensor.element_size())  # so that a NaN equals itself, and a zero of another sign does not
    return bool(torch.equal(tensor.view(bits), other.view(bits)) if bits else torch.equal(tensor, other))


class Packed:
    """The layers of one filter, by shape, format, dtype and attributes of the calls; copies of it begin empty."""

    def __init__(self) -> None:
        # A layer is None if PyTorch computes such calls.
        self._layers: dict[tuple[Hashable, ...], tuple[Layer | None, Stamp]] = {}

    def __reduce__(self) -> tuple[type[Packed], tuple[()]]:
        return Packed, ()

    def __len__(self) -> int:
        return len(self._layers)

    def clear(self) -> None:
        """Forget all layers."""
        self._layers.clear()

    def layer(
        self,
        input: Tensor,
        a: Attributes,
        watched: Sequence[Tensor | None],
        parameters: Callable[[], Parameters],
        *,
        fallback: bool,
    ) -> Layer | None:
        """Return the layer of a call, made of the `parameters` where it is missing or one of `watched` has changed.

        It is None if there is none and PyTorch may compute, as `fallback` says. Raises DeconvError.
        """
        key = (input.shape, not input.is_contiguous() and channels_last(input), input.dtype, a)
        layer, stamp = self._layers.get(key, _MISSING)
        if stamp is None or not stamp.holds(watched) or (layer is None and not fallback):
            self._layers.pop(key, None)
            # One artifact may serve many shapes, and so may its layer.
            layers = list(self._layers.items())  # at once: other threads may change them
            alike = [kept for other, kept in layers if other[1:] == key[1:]]
            others = [kept for kept, its_stamp in alike if kept is not None and its_stamp.holds(watched)]
            others = [kept for kept in others if kept.problem.dynamic]
            layer = bound(input, parameters(), a, others, fallback=fallback)
            for oldest in list(self._layers)[: max(0, len(self._layers) + 1 - MOST_LAYERS)]:
                self._layers.pop(oldest, None)
            self._layers[key] = layer, Stamp(watched)
        return layer


_MISSING: tuple[None, None] = (None, None)
_packed = WeakTensorKeyDictionary()


def packed_of(weight: Tensor) -> Packed:
    """Return the layers of the filter `weight`, which live as long as it."""
    if weight not in _packed:
        _packed[weight] = Packed()
    packed: Packed = _packed[weight]
    return packed


def bound(
    input: Tensor, parameters: Parameters, a: Attributes, others: Sequence[Layer] = (), *, fallback: bool
) -> Layer | None:
    """Return a layer for `input`: one of the `others`, which have the same parameters, if it serves, else a new one.

    It is None if there is none and PyTorch may compute, as `fallback` says. Raises DeconvError.
    """
    try:
        return _bound(input, parameters, a, others)
    except DeconvError as error:
        if not fallback:
            raise
        level = logging.WARNING if isinstance(error, ArtifactError) else logging.INFO
        _LOG.log(level, "PyTorch computes a transposed convolution, for %s has no artifact: %s", a.library, error)
        return None


def problem_of(input: Tensor, parameters: Parameters, a: Attributes, shape: Sequence[int] | None = None) -> Problem:
    """Return the problem of a call, with the extents of `shape` if that is given. Raises ProblemError."""
    return Problem.from_torch(
        tuple(input.shape if shape is None else shape),
        tuple(map(int, parameters.weight.shape)),
        stride=a.stride,
        padding=a.padding,
        output_padding=a.output_padding,
        groups=a.groups,
        dilation=a.dilation,
        dtype=dtype_name(input),
        epilogue=Epilogue.parse(a.epilogue),
    )


def output_padding_of(problem: Problem) -> tuple[int, ...]:
    """Return the output_padding of PyTorch's call that `problem` came from."""
    axes = zip(problem.output_spatial, problem.uncropped_spatial, problem.pads_begin, strict=True)
    return tuple(extent - whole + 2 * pad for extent, whole, pad in axes)


def data_of(problem: Problem) -> Tensor:
    """Return data of `problem` as PyTorch's calls take them, in its memory format and without values."""
    data = torch.empty(problem.data_shape, dtype=getattr(torch, problem.dtype), device="meta")
    return data.movedim(-1, 1) if problem.data_format == "NXC" else data


def _bound(input: Tensor, parameters: Parameters, a: Attributes, others: Sequence[Layer]) -> Layer:
    problem = problem_of(input, parameters, a)
    operands: tuple[Any, ...] = tuple(None if tensor is None else tensor.detach() for tensor in parameters[:2])
    if parameters.mean is not None:
        operands = _folded(problem, parameters, a.epsilon)
    library = library_of(a.library)
    last = [problem.replace(data_format="NXC")] if problem.rank > 1 else []  # PyTorch has no such memory for one axis
    asked = [*last, problem] if channels_last(input) else [problem, *last]  # data in the other format cost copies
    refusals: list[NoArtifactError] = []
    for form in asked:
        try:
            variable = library.with_dynamic_extents(form) if parameters.weight.device.type == "cpu" else form
            for other in others:
                if variable.dynamic and other.problem.serves(variable):
                    return other
            return library.bind(variable, *operands)
        except NoArtifactError as error:
            refusals.append(error)
    try:
        raise refusals[0]
    finally:
        refusals.clear()  # an error knows this frame, whose tensors would live on with it


def _folded(problem: Problem, parameters: Parameters, epsilon: float) -> tuple[Any, ...]:
    """Return filter and bias of `problem` with the batch normalisation folded in."""
    bias = None if parameters.bias is None else cast(array(parameters.bias), problem.accumulate_dtype)
    layer = FoundLayer("", "", problem.replace(epilogue=Epilogue(bias is not None)), array(parameters.weight), bias)
    assert parameters.mean is not None
    gamma = torch.ones_like(parameters.mean) if parameters.gamma is None else parameters.gamma
    beta = torch.zeros_like(parameters.mean) if parameters.beta is None else parameters.beta
    moments = [array(tensor) for tensor in (gamma, beta, parameters.mean, parameters.variance) if tensor is not None]
    step = batch_norm_step("norm", moments, epsilon, *problem.bias_shape)
    folded = absorb(layer, [] if step is None else [step])
    if not folded.fused:
        rule = "must leave filter and bias finite when the batch normalisation is folded into them"
        raise TensorError("filter", tuple(parameters.weight.shape), rule)
    return tuple(_placed(folded_array, parameters.weight) for folded_array in (folded.filter, folded.bias))


def _placed(values: Any, like: Tensor) -> Any:
    """Return `values` on the device of `like`; for a CPU they stay in NumPy."""
    if values is None or like.device.type == "cpu":
        return values
    bits = torch.from_numpy(values.view("int16")) if values.dtype.name == "bfloat16" else torch.from_numpy(values)
    return bits.view(torch.bfloat16 if values.dtype.name == "bfloat16" else bits.dtype).to(like.device)
