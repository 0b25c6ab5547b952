"""Transposed convolution as a registered operator, with gradients, for eager, compiled and exported programs.

The operator packs a filter at its first call. It packs again when the filter, or a tensor that is folded into it, has
another identity, address or version. PyTorch does not count writes through `Tensor.data`, or through a NumPy array of
the same memory: those go unnoticed. If `conv_transpose` records gradients for the filter, it packs on every call.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.weak import WeakTensorKeyDictionary

from tvm_deconv.api import load
from tvm_deconv.errors import NoArtifactError, TensorError
from tvm_deconv.frontends.folding import absorb
from tvm_deconv.frontends.graph import batch_norm_step
from tvm_deconv.frontends.layers import FoundLayer
from tvm_deconv.frontends.packages import cast
from tvm_deconv.frontends.torch import array, channels_last, memory_format
from tvm_deconv.problem import ACTIVATIONS, Epilogue, Problem, broadcast, one_of
from tvm_deconv.runtime.layer import Layer
from tvm_deconv.runtime.library import Library, epilogue_of

_LOG = logging.getLogger("tvm_deconv")
#: The most layers, of different shapes, that a filter is kept packed for.
MOST_LAYERS = 8


def conv_transpose(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    output_padding: int | Sequence[int] = 0,
    groups: int = 1,
    dilation: int | Sequence[int] = 1,
    *,
    activation: str | Epilogue | None = None,
    library: Library,
    fallback: Literal["torch"] | None = None,
) -> Tensor:
    """Compute PyTorch's conv_transpose1d, 2d or 3d with an artifact of `library`; the rank of `weight` decides which.

    `input` is ``[N, Cin, *X]`` or ``[Cin, *X]``, `weight` ``[Cin, Cout/G, *K]``, `bias` ``[Cout]``. The result is
    contiguous, or `channels_last` if `input` is. An `input` that is neither, or that has no artifact of its format, is
    copied. `activation` is a name, or an `Epilogue` for one with parameters. Gradients are those of PyTorch's own
    operators.

    Tensors of a CUDA device need an artifact for it. If no artifact serves, the call raises NoArtifactError; with
    ``fallback="torch"`` PyTorch computes it, and every call on other devices. Raises ProblemError, TensorError.
    """
    rank = weight.dim() - 2
    return called(
        input,
        weight,
        bias,
        *(None, None, None, None, 0.0),
        broadcast("stride", stride, rank, 1),
        broadcast("padding", padding, rank, 0),
        broadcast("output_padding", output_padding, rank, 0),
        broadcast("dilation", dilation, rank, 1),
        groups,
        _text(activation, bias is not None),
        handle_of(library),
        fallback is not None and bool(one_of("fallback", fallback, ("torch",))),
        torch.compiler.is_exporting() or not (torch.is_grad_enabled() and weight.requires_grad),
    )


def called(input: Tensor, weight: Tensor, *arguments: object) -> Tensor:
    """Call the operator; `input` may lack the batch axis."""
    if input.dim() == weight.dim() - 1:
        return called(input.unsqueeze(0), weight, *arguments).squeeze(0)
    output: Tensor = _operator(input, weight, *arguments)
    return output


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _text(activation: str | Epilogue | None, bias: bool) -> str:
    return str(epilogue_of(activation, bias))


#: The libraries that graphs know by their handles.
libraries: dict[str, Library] = {}


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def handle_of(library: Library) -> str:
    """Return the name of `library` in graphs.

    In another process it means the same artifacts in the same directory, and NumPy if the library falls back to it.
    Nothing is compiled there.
    """
    words = [
        library.digest,
        *(["pinned"] if library.pinned else []),
        *(fallback.name for fallback in library.fallbacks),
    ]
    handle = f"{'+'.join(words)}@{library.root}"
    libraries[handle] = library
    return handle


def _library(handle: str) -> Library:
    if handle not in libraries:
        words, _, root = handle.partition("@")
        digest, *others = words.split("+")
        libraries[handle] = load(root, digest=digest, fallback=[word for word in others if word == "reference"])
    return libraries[handle]


class _Parameters(NamedTuple):
    """The tensors of a layer; without a mean there is no batch normalisation, and otherwise one of evaluation mode."""

    weight: Tensor
    bias: Tensor | None
    gamma: Tensor | None
    beta: Tensor | None
    mean: Tensor | None
    variance: Tensor | None


class _Attributes(NamedTuple):
    """The other arguments, all hashable.

    `library` is a handle. `fallback` allows PyTorch's operators, and `keep` allows keeping the packed filter.
    """

    epsilon: float
    stride: Sequence[int]
    padding: Sequence[int]
    output_padding: Sequence[int]
    dilation: Sequence[int]
    groups: int
    epilogue: str
    library: str
    fallback: bool
    keep: bool


def _convolved(input: Tensor, parameters: _Parameters, a: _Attributes) -> Tensor:
    """Compute the convolution alone by PyTorch's operator."""
    numbers = (a.stride, a.padding, a.dilation, True, a.output_padding, a.groups)
    return torch.convolution(input, parameters.weight, parameters.bias, *numbers)


def _tail(convolved: Tensor, affine: dict[str, Tensor], parameters: _Parameters, a: _Attributes) -> Tensor:
    """Compute batch normalisation and activation by PyTorch's operators; `affine` are gamma and beta."""
    if parameters.mean is not None:
        moments = (parameters.mean, parameters.variance, affine.get("gamma"), affine.get("beta"))
        convolved = functional.batch_norm(convolved, *moments, eps=a.epsilon)
    epilogue = Epilogue.parse(a.epilogue)
    activation = ACTIVATIONS[epilogue.activation].torch_function.load()
    output: Tensor = activation(convolved, *epilogue.parameters.values())
    return output


def _affine(parameters: _Parameters) -> dict[str, Tensor]:
    both = {"gamma": parameters.gamma, "beta": parameters.beta}
    return {name: tensor for name, tensor in both.items() if tensor is not None}


_SCHEMA = """(Tensor input, Tensor weight, Tensor? bias, Tensor? gamma, Tensor? beta, Tensor? mean, Tensor? variance,
float epsilon, int[] stride, int[] padding, int[] output_padding, int[] dilation, int groups, str epilogue,
str library, bool fallback, bool keep) -> Tensor"""


@torch.library.custom_op("tvm_deconv::conv_transpose", mutates_args=(), schema=_SCHEMA)  # type: ignore[untyped-decorator]
def _operator(input: Tensor, *arguments: Any) -> Tensor:
    parameters, a = parted(arguments)
    elsewhere = a.fallback and input.device.type not in ("cpu", "cuda")
    layer = None if elsewhere else layer_of(input, parameters, a)
    output: Tensor
    if layer is None:
        output = _tail(_convolved(input, parameters, a), _affine(parameters), parameters, a)
    elif layer.problem.data_format == "NXC":
        output = layer(input.detach().movedim(1, -1)).movedim(-1, 1)
    else:
        output = layer(input.detach().contiguous())
    return output.contiguous(memory_format=memory_format(input))


def parted(arguments: Sequence[Any]) -> tuple[_Parameters, _Attributes]:
    """Return the arguments of the operator after the first as tensors and attributes."""
    hashable: list[Any] = [tuple(value) if isinstance(value, list) else value for value in arguments[6:]]
    return _Parameters(*arguments[:6]), _Attributes(*hashable)


@_operator.register_fake  # type: ignore[untyped-decorator]
def _fake(input: Tensor, *arguments: Any) -> Tensor:
    parameters, a = parted(arguments)
    spatial = [
        (x - 1) * s - 2 * p + d * (k - 1) + more + 1
        for x, k, s, p, d, more in zip(
            input.shape[2:], parameters.weight.shape[2:], a.stride, a.padding, a.dilation, a.output_padding, strict=True
        )
    ]
    dtype = torch.int32 if input.dtype in (torch.int8, torch.uint8) else input.dtype
    output = input.new_empty((input.shape[0], parameters.weight.shape[1] * a.groups, *spatial), dtype=dtype)
    return output.contiguous(memory_format=memory_format(input))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    del output
    input, *arguments = inputs
    parameters, ctx.attributes = parted(arguments)
    ctx.save_for_backward(input, *parameters)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    input, *tensors = ctx.saved_tensors
    parameters, a = _Parameters(*tensors), ctx.attributes
    affine: dict[str, Tensor] = {}
    if parameters.mean is not None or Epilogue.parse(a.epilogue).activation != "none":
        convolved = _convolved(input, parameters, a)
        _, pull = torch.func.vjp(lambda x, affine: _tail(x, affine, parameters, a), convolved, _affine(parameters))
        grad, affine = pull(grad)
    sizes = None if parameters.bias is None else parameters.bias.shape
    numbers = (a.stride, a.padding, a.dilation, True, a.output_padding, a.groups, ctx.needs_input_grad[:3])
    grads = torch.ops.aten.convolution_backward(grad, input, parameters.weight, sizes, *numbers)
    return *grads, affine.get("gamma"), affine.get("beta"), *(None,) * 12


_operator.register_autograd(_backward, setup_context=_setup)


class _Stamp:
    """The identity, address and version of tensors, which change when the tensors do."""

    def __init__(self, tensors: Iterable[Tensor | None]) -> None:
        self._seen = [
            None if tensor is None else (weakref.ref(tensor), tensor.data_ptr(), tensor._version) for tensor in tensors
        ]

    def holds(self, tensors: Iterable[Tensor | None]) -> bool:
        """Tell whether `tensors` are those of the stamp, unchanged."""
        return all(
            tensor is None
            if seen is None
            else tensor is seen[0]() and tensor is not None and (tensor.data_ptr(), tensor._version) == seen[1:]
            for seen, tensor in zip(self._seen, tensors, strict=True)
        )


#: weight -> shape, format, dtype and attributes of a call -> its layer, None if no artifact serves, and the stamp
held_layers = WeakTensorKeyDictionary()


def layer_of(input: Tensor, parameters: _Parameters, a: _Attributes) -> Layer | None:
    """Return the layer of a call, made when it is needed; None if no artifact serves and PyTorch may compute."""
    # Tensors of inference mode have no version.
    if not a.keep or any(tensor is not None and tensor.is_inference() for tensor in parameters):
        return _bound(input, parameters, a)
    held = held_layers.setdefault(parameters.weight, {})
    key = (input.shape, channels_last(input), input.dtype, a)
    layer: Layer | None
    layer, stamp = held.get(key, (None, None))
    if stamp is None or not stamp.holds(parameters):
        held.pop(key, None)
        stamp = _Stamp(parameters)
        # One artifact may serve many shapes, and so may its layer.
        alike = [kept for other, kept in held.items() if other[1:] == key[1:]]
        others = [kept for kept, its_stamp in alike if kept is not None and its_stamp.holds(parameters)]
        layer = _bound(input, parameters, a, [kept for kept in others if kept.problem.dynamic])
        for oldest in list(held)[: max(0, len(held) + 1 - MOST_LAYERS)]:
            held.pop(oldest, None)
        held[key] = layer, stamp
    return layer


def _bound(input: Tensor, parameters: _Parameters, a: _Attributes, others: Sequence[Layer] = ()) -> Layer | None:
    """Return a layer for `input`: one of the `others`, which have the same parameters, if it serves, else a new one."""
    epilogue = Epilogue.parse(a.epilogue)
    weight, bias, *_ = (None if tensor is None else tensor.detach() for tensor in parameters)
    problem = Problem.from_torch(
        tuple(input.shape),
        tuple(parameters.weight.shape),
        stride=a.stride,
        padding=a.padding,
        output_padding=a.output_padding,
        groups=a.groups,
        dilation=a.dilation,
        dtype=str(input.dtype).removeprefix("torch."),
        epilogue=epilogue,
    )
    operands: tuple[Any, ...] = (weight, bias)
    if parameters.mean is not None:
        operands = _folded(problem, parameters, a.epsilon)
    # For data with the channels last the other format costs copies.
    last = [problem.replace(data_format="NXC")] if channels_last(input) else []
    library, asked = _library(a.library), [*last, problem]
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
        if not a.fallback:
            raise refusals[0]
    finally:
        refusals.clear()  # an error knows this frame, whose tensors would live on with it
    _LOG.info("PyTorch computes %s: no artifact of %s serves it", asked[0].key, a.library)
    return None


def _folded(problem: Problem, parameters: _Parameters, epsilon: float) -> tuple[Any, ...]:
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
