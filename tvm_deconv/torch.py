"""PyTorch: transposed convolution as a registered operator, with gradients, for eager, compiled and exported programs.

The operator packs a filter at its first call, and again when the filter or what is folded into it has changed: it looks
at the identity, the address and the version of those tensors. A write that PyTorch does not count goes unnoticed:
through `Tensor.data`, or through a NumPy array of the same memory. Where `conv_transpose` records gradients for the
filter it packs on every call.
"""

from __future__ import annotations

import dataclasses
import logging
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrize
from torch.utils.weak import WeakTensorKeyDictionary

from tvm_deconv.dialects import broadcast, from_torch
from tvm_deconv.errors import NoArtifactError, TensorError
from tvm_deconv.library import Layer, Library, _epilogue, load
from tvm_deconv.problem import Epilogue, Problem, one_of
from tvm_deconv.scan.layer import FoundLayer, absorb, batch_norm_step, cast
from tvm_deconv.scan.torch import ACTIVATIONS, BATCH_NORMS, OPERATORS, array, trace

__all__ = [
    "Report",
    "Swap",
    "conv_transpose",
    "problems",
    "replace",
]

_LOG = logging.getLogger("tvm_deconv")
#: How many layers, of different shapes, a filter is kept packed for.
_MOST_LAYERS = 8

_ACTIVATIONS: dict[str, Callable[[Tensor, Epilogue], Tensor]] = {
    "none": lambda x, _: x,
    "relu": lambda x, _: torch.relu(x),
    "leaky_relu": lambda x, epilogue: functional.leaky_relu(x, epilogue.alpha),
    "sigmoid": lambda x, _: torch.sigmoid(x),
    "tanh": lambda x, _: torch.tanh(x),
    "gelu": lambda x, _: functional.gelu(x),
    "silu": lambda x, _: functional.silu(x),
    "clip": lambda x, epilogue: functional.hardtanh(x, epilogue.minimum, epilogue.maximum),
}


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
    """Compute PyTorch's conv_transpose1d, 2d or 3d, as the rank of `weight` says, with an artifact of `library`.

    `input` is ``[N, Cin, *X]`` or ``[Cin, *X]``, copied unless it is contiguous, `weight` ``[Cin, Cout/G, *K]``, `bias`
    ``[Cout]``; the result is contiguous. `activation` is a name, or an `Epilogue` where it has parameters. Gradients
    are those of PyTorch's own operators. Where no artifact serves, the call raises NoArtifactError; with
    ``fallback="torch"`` PyTorch computes then, and also what is not in the memory of the CPU. Raises ProblemError,
    TensorError.
    """
    rank = weight.dim() - 2
    return _called(
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
        _handle(library),
        fallback is not None and bool(one_of("fallback", fallback, ("torch",))),
        torch.compiler.is_exporting() or not (torch.is_grad_enabled() and weight.requires_grad),
    )


def _called(input: Tensor, weight: Tensor, *arguments: object) -> Tensor:
    """Call the operator, on an `input` without a batch axis too."""
    if input.dim() == weight.dim() - 1:
        return _called(input.unsqueeze(0), weight, *arguments).squeeze(0)
    output: Tensor = _operator(input, weight, *arguments)
    return output


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _text(activation: str | Epilogue | None, bias: bool) -> str:
    return str(_epilogue(activation, bias))


#: The libraries that graphs know by their handles.
_libraries: dict[str, Library] = {}


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _handle(library: Library) -> str:
    """Return the name of `library` in graphs. In another process it means the same artifacts in the same directory."""
    handle = f"{library.digest}@{library.root}"
    _libraries[handle] = library
    return handle


def _library(handle: str) -> Library:
    if handle not in _libraries:
        digest, _, root = handle.partition("@")
        _libraries[handle] = load(root, digest=digest)
    return _libraries[handle]


class _Parameters(NamedTuple):
    """The tensors of a layer; without a mean there is no batch normalisation, which is that of evaluation mode."""

    weight: Tensor
    bias: Tensor | None
    gamma: Tensor | None
    beta: Tensor | None
    mean: Tensor | None
    variance: Tensor | None


class _Attributes(NamedTuple):
    """The other arguments: `library` is a handle, `fallback` allows PyTorch's operators, `keep` keeping what is packed.

    All are hashable.
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
    """Compute what follows the convolution by PyTorch's operators; `affine` are gamma and beta."""
    if parameters.mean is not None:
        moments = (parameters.mean, parameters.variance, affine.get("gamma"), affine.get("beta"))
        convolved = functional.batch_norm(convolved, *moments, eps=a.epsilon)
    epilogue = Epilogue.parse(a.epilogue)
    return _ACTIVATIONS[epilogue.activation](convolved, epilogue)


def _affine(parameters: _Parameters) -> dict[str, Tensor]:
    both = {"gamma": parameters.gamma, "beta": parameters.beta}
    return {name: tensor for name, tensor in both.items() if tensor is not None}


_SCHEMA = """(Tensor input, Tensor weight, Tensor? bias, Tensor? gamma, Tensor? beta, Tensor? mean, Tensor? variance,
float epsilon, int[] stride, int[] padding, int[] output_padding, int[] dilation, int groups, str epilogue,
str library, bool fallback, bool keep) -> Tensor"""


@torch.library.custom_op("tvm_deconv::conv_transpose", mutates_args=(), schema=_SCHEMA)  # type: ignore[untyped-decorator]
def _operator(input: Tensor, *arguments: Any) -> Tensor:
    parameters, a = _parted(arguments)
    elsewhere = a.fallback and input.device.type != "cpu"
    layer = None if elsewhere else _layer(input, parameters, a)
    if layer is None:
        return _tail(_convolved(input, parameters, a), _affine(parameters), parameters, a)
    output: Tensor = layer(input.detach().contiguous())
    return output


def _parted(arguments: Sequence[Any]) -> tuple[_Parameters, _Attributes]:
    """The arguments of the operator after the first."""
    hashable: list[Any] = [tuple(value) if isinstance(value, list) else value for value in arguments[6:]]
    return _Parameters(*arguments[:6]), _Attributes(*hashable)


@_operator.register_fake  # type: ignore[untyped-decorator]
def _fake(input: Tensor, *arguments: Any) -> Tensor:
    parameters, a = _parted(arguments)
    spatial = [
        (x - 1) * s - 2 * p + d * (k - 1) + more + 1
        for x, k, s, p, d, more in zip(
            input.shape[2:], parameters.weight.shape[2:], a.stride, a.padding, a.dilation, a.output_padding, strict=True
        )
    ]
    dtype = torch.int32 if input.dtype in (torch.int8, torch.uint8) else input.dtype
    return input.new_empty((input.shape[0], parameters.weight.shape[1] * a.groups, *spatial), dtype=dtype)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    del output
    input, *arguments = inputs
    parameters, ctx.attributes = _parted(arguments)
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
    """What tells that tensors have not changed: who they are, where they lie and how often they were written."""

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


#: weight -> what decides its layer -> the layer, None where no artifact serves, and the stamp
_layers = WeakTensorKeyDictionary()


def _layer(input: Tensor, parameters: _Parameters, a: _Attributes) -> Layer | None:
    """Return the layer of a call, made when it is needed; None where no artifact serves and PyTorch may."""
    # Tensors of inference mode have no version.
    if not a.keep or any(tensor is not None and tensor.is_inference() for tensor in parameters):
        return _bound(input, parameters, a)
    held = _layers.setdefault(parameters.weight, {})
    key = (input.shape, input.dtype, a)
    layer: Layer | None
    layer, stamp = held.get(key, (None, None))
    if stamp is None or not stamp.holds(parameters):
        held.pop(key, None)
        stamp = _Stamp(parameters)
        layer = _bound(input, parameters, a)
        for oldest in list(held)[: max(0, len(held) + 1 - _MOST_LAYERS)]:
            held.pop(oldest, None)
        held[key] = layer, stamp
    return layer


def _bound(input: Tensor, parameters: _Parameters, a: _Attributes) -> Layer | None:
    epilogue = Epilogue.parse(a.epilogue)
    weight, bias, *_ = (None if tensor is None else tensor.detach() for tensor in parameters)
    problem = from_torch(
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
    try:
        if parameters.mean is None:
            return _library(a.library).bind(problem, weight, bias)
        return _library(a.library).bind(problem, *_folded(problem, parameters, a.epsilon))
    except NoArtifactError:
        if not a.fallback:
            raise
        _LOG.info("PyTorch computes %s: no artifact of %s serves it", problem.key, a.library)
        return None


def _folded(problem: Problem, parameters: _Parameters, epsilon: float) -> tuple[Any, Any]:
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
    return folded.filter, folded.bias


# ---- modules ----


class _Fusion:
    """What a swapped layer computes at once, while all of it is in evaluation mode: `parts`, the layer first."""

    def __init__(self, parts: tuple[nn.Module, ...], epilogue: Epilogue, library: str, fallback: bool) -> None:
        self.parts = parts
        self.norm = next((part for part in parts if isinstance(part, BATCH_NORMS)), None)
        self.epilogue = str(epilogue)
        self.library = library
        self.fallback = fallback

    @property
    def active(self) -> bool:
        """Whether the layer computes everything; else each part computes its own, by PyTorch."""
        return not any(part.training for part in self.parts)

    def arguments(self, output_padding: Sequence[int]) -> tuple[Any, ...]:
        """The arguments of the operator after the first."""
        layer: Any = self.parts[0]
        norm: Any = self.norm
        moments = (None, None, None, None, 0.0)
        if norm is not None:
            moments = (norm.weight, norm.bias, norm.running_mean, norm.running_var, norm.eps)
        axes = (layer.stride, layer.padding, output_padding, layer.dilation)
        return layer.weight, layer.bias, *moments, *axes, layer.groups, self.epilogue, self.library, self.fallback, True


class _Compiled:
    """What a layer does that an artifact computes; in training mode it is what PyTorch does."""

    _fusion: _Fusion

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        """Compute the layer and what it has absorbed."""
        layer: Any = self
        if not self._fusion.active:
            output: Tensor = super().forward(input, output_size)  # type: ignore[misc]
            return output
        axes = (layer.stride, layer.padding, layer.kernel_size, len(layer.kernel_size), layer.dilation)
        return _called(input, *self._fusion.arguments(layer._output_padding(input, output_size, *axes)))

    def train(self, mode: bool = True) -> Any:
        """Change the mode; what training did to the filter, counted or not, is not missed."""
        layer: Any = self
        if mode != layer.training:
            _layers.pop(layer.weight, None)
        return super().train(mode)  # type: ignore[misc]


class _Absorbed:
    """What a module does that the layer before it computes; in training mode it is what PyTorch does."""

    _fusion: _Fusion

    def forward(self, input: Tensor) -> Tensor:
        """Return `input`, to which the layer has done everything."""
        if self._fusion.active:
            return input
        output: Tensor = super().forward(input)  # type: ignore[misc]
        return output


def _kinds(prefix: str, mixin: type, bases: Iterable[type[nn.Module]]) -> dict[type[nn.Module], type[nn.Module]]:
    """A class with `mixin` for each of `bases`; it has a name in this module, to be pickled by."""
    made: dict[type[nn.Module], type[nn.Module]] = {}
    for base in bases:
        name = f"{prefix}{base.__name__}"
        made[base] = globals()[name] = type(name, (mixin, base), {"__module__": __name__, "__doc__": mixin.__doc__})
    return made


#: The classes of modules -> the classes they get. A PReLU is none of them: its slope may change.
_COMPILED = _kinds("Compiled", _Compiled, OPERATORS)
_ABSORBED = _kinds("Absorbed", _Absorbed, (*BATCH_NORMS, *(base for base in ACTIVATIONS if base is not nn.PReLU)))


@dataclass(frozen=True, slots=True)
class Swap:
    """What became of one layer.

    It is swapped unless `reason` says why not. `problems` are those of its calls, `missing` those of them that no
    artifact serves. `absorbed` are the modules that it computes too, `left` the nodes after those which an epilogue
    could hold, but which stay with PyTorch: functions, modules that also run elsewhere or have hooks.
    """

    name: str
    operator: str
    problems: tuple[Problem, ...] = ()
    missing: tuple[Problem, ...] = ()
    absorbed: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    reason: str = ""


class Report(tuple[Swap, ...]):
    """One `Swap` per layer; it prints as a table."""

    __slots__ = ()

    @property
    def swapped(self) -> list[Swap]:
        """The layers that were swapped."""
        return [swap for swap in self if not swap.reason]

    @property
    def missing(self) -> list[Problem]:
        """The problems to compile for all layers to be swapped."""
        return list(dict.fromkeys(problem for swap in self for problem in swap.missing))

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [("layer", "operator", "swapped", "absorbed", "left", "why not")]
        for swap in self:
            nodes = map(" ".join, (swap.absorbed, swap.left))
            rows.append((swap.name, swap.operator, "no" if swap.reason else "yes", *nodes, swap.reason))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(f"{word:{width}}" for word, width in zip(row, widths, strict=True)) for row in rows]
        return "\n".join(map(str.rstrip, lines))


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A layer that could be swapped with the modules `parts`, the layer first."""

    swap: Swap
    parts: tuple[nn.Module, ...] = ()


def problems(model: nn.Module, inputs: Sequence[object]) -> list[Problem]:
    """Return what to compile for `replace` to swap every layer of `model` that it can, when called with `inputs`.

    The model must be in evaluation mode; it is run once, without gradients. Raises SourceError.
    """
    found = [candidate.swap for candidate in _candidates(model, inputs)]
    return list(dict.fromkeys(problem for swap in found if not swap.reason for problem in swap.problems))


def replace(
    model: nn.Module, library: Library, inputs: Sequence[object], *, fallback: Literal["torch"] | None = None
) -> Report:
    """Let artifacts of `library` compute the transposed convolutions of `model`, in place; tell which and which not.

    ``model(*inputs)`` is run once, in evaluation mode and without gradients, to see the layers, their shapes and what
    follows them. A layer is swapped where artifacts serve all of its calls, with ``fallback="torch"`` where they serve
    one: then and later PyTorch computes the shapes that no artifact serves, which without it raise NoArtifactError.
    A batch normalisation and an activation module that always follow are absorbed.

    Modules keep their place, names, parameters and hooks, and change their class. In training mode they are what they
    were. Raises SourceError, ProblemError, and what loading an artifact does; then nothing is swapped.
    """
    allowed = fallback is not None and bool(one_of("fallback", fallback, ("torch",)))
    handle = _handle(library)
    swaps, fusions = [], []
    for candidate in _candidates(model, inputs):
        swap = candidate.swap
        if not swap.reason:
            fusion = _Fusion(candidate.parts, swap.problems[0].epilogue, handle, allowed)
            missing = tuple(problem for problem in swap.problems if not _serves(fusion, problem))
            swap = dataclasses.replace(swap, missing=missing)
            if missing and not (allowed and len(missing) < len(swap.problems)):
                keys = ", ".join(problem.key for problem in missing)
                swap = dataclasses.replace(swap, absorbed=(), left=(), reason=f"no artifact serves {keys}")
            else:
                fusions.append(fusion)
        swaps.append(swap)
    for fusion in fusions:
        for part in fusion.parts:
            part.__class__ = (_COMPILED | _ABSORBED)[type(part)]
            part._fusion = fusion
    return Report(swaps)


def _serves(fusion: _Fusion, problem: Problem) -> bool:
    """Tell whether an artifact serves `problem`; it is loaded, and the filter packed."""
    axes = zip(problem.output_spatial, problem.natural_spatial, problem.pads_begin, strict=True)
    arguments = fusion.arguments([extent - nat + 2 * pad for extent, nat, pad in axes])
    data = torch.empty(problem.data_shape, dtype=getattr(torch, problem.dtype), device="meta")
    try:
        return _layer(data, *_parted(arguments)) is not None
    except NoArtifactError:
        return False


def _candidates(model: nn.Module, inputs: Sequence[object]) -> list[_Candidate]:
    traced = trace(model, inputs)
    modules = {name or type(part).__name__: part for name, part in model.named_modules()}
    calls: dict[str, list[FoundLayer]] = {}
    for layer in traced.layers:
        calls.setdefault(layer.name, []).append(layer)
    found = [_candidate(layers, modules, traced.runs) for layers in calls.values()]
    idle = [name for name, part in modules.items() if type(part) in OPERATORS and name not in calls]
    return found + [_Candidate(Swap(name, type(modules[name]).__name__, reason="did not run")) for name in idle]


def _candidate(layers: list[FoundLayer], modules: Mapping[str, nn.Module], runs: Counter[str]) -> _Candidate:
    """What to do with the layer of which `layers` are the calls."""
    first, part = layers[0], modules.get(layers[0].name)
    reasons = (layer.reason or _reason(part, layer.problem) for layer in layers)
    reason = next(filter(None, reasons), "")
    if reason or part is None:
        return _Candidate(Swap(first.name, first.operator, reason=reason))
    parts = [part]
    for name, *others in zip(*(layer.fused for layer in layers), strict=False):
        follower = modules.get(name)
        known = follower is not None and type(follower) in _ABSORBED and not set(others) - {name}
        # A hook would see what the layer computes too. A module that ran more often also does something else.
        alone = known and runs[name] == len(layers) and not _hooked(parts[-1]) and not _hooked(follower)
        if not alone or (len(parts) > 1 and isinstance(follower, BATCH_NORMS)):
            break
        parts.append(follower)
    count = len(parts) - 1
    epilogue = Epilogue(bias=part.bias is not None or isinstance(parts[-1], BATCH_NORMS))
    asked = [layer.problem.replace(epilogue=epilogue) for layer in layers if layer.problem is not None]
    if isinstance(parts[-1], ACTIVATIONS):  # which ends what is fused
        asked = [layer.problem for layer in layers if layer.problem is not None]
    swap = Swap(
        first.name,
        first.operator,
        tuple(dict.fromkeys(asked)),
        absorbed=first.fused[:count],
        left=first.fused[count:],
    )
    return _Candidate(swap, tuple(parts))


def _reason(part: nn.Module | None, problem: Problem | None) -> str:
    """Why a layer that `part` computes cannot be swapped; empty where it can."""
    if part is None:
        return "is the call of a function: call tvm_deconv.torch.conv_transpose there"
    if parametrize.is_parametrized(part) or "weight" not in part._parameters:
        return "its filter is computed on every call: make it a parameter, with remove_parametrizations say"
    if type(part) not in _COMPILED:
        return f"{type(part).__name__} is a class of its own"
    dtype = str(part.weight.dtype).removeprefix("torch.")
    if problem is not None and dtype != problem.dtype:
        return f"runs in {problem.dtype} with a filter of {dtype}: convert the module instead of autocast"
    return ""


def _hooked(part: nn.Module) -> bool:
    return bool(part._forward_hooks or part._forward_pre_hooks or part._backward_hooks or part._backward_pre_hooks)
