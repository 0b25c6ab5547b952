"""Models whose transposed convolutions artifacts compute: modules change their class, and with it their forward.

A layer and the modules that it absorbs share a `_Fusion`. It tells each of them whether the layer computes everything,
which it does while all of them are in evaluation mode.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from tvm_deconv.errors import NoArtifactError
from tvm_deconv.frontends.layers import FoundLayer
from tvm_deconv.frontends.torch import ACTIVATION_MODULES, BATCH_NORMS, OPERATORS, trace
from tvm_deconv.problem import Epilogue, Problem, one_of
from tvm_deconv.runtime.library import Library
from tvm_deconv.torch.operator import called, handle_of, held_layers, layer_of, parted


class _Fusion:
    """The modules that a swapped layer computes at once in evaluation mode: `parts`, the layer first."""

    def __init__(self, parts: tuple[nn.Module, ...], epilogue: Epilogue, library: str, fallback: bool) -> None:
        self.parts = parts
        self.norm = next((part for part in parts if isinstance(part, BATCH_NORMS)), None)
        self.epilogue = str(epilogue)
        self.library = library
        self.fallback = fallback

    @property
    def active(self) -> bool:
        """True if the layer computes everything; else each part computes its own, by PyTorch."""
        return not any(part.training for part in self.parts)

    def arguments(self, output_padding: Sequence[int]) -> tuple[Any, ...]:
        """Return the arguments of the operator after the first."""
        layer: Any = self.parts[0]
        norm: Any = self.norm
        moments = (None, None, None, None, 0.0)
        if norm is not None:
            moments = (norm.weight, norm.bias, norm.running_mean, norm.running_var, norm.eps)
        axes = (layer.stride, layer.padding, output_padding, layer.dilation)
        return layer.weight, layer.bias, *moments, *axes, layer.groups, self.epilogue, self.library, self.fallback, True


class _Compiled:
    """A layer that an artifact computes; in training mode PyTorch does."""

    _fusion: _Fusion

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        """Compute the layer and what it has absorbed."""
        layer: Any = self
        if not self._fusion.active:
            output: Tensor = super().forward(input, output_size)  # type: ignore[misc]
            return output
        axes = (layer.stride, layer.padding, layer.kernel_size, len(layer.kernel_size), layer.dilation)
        return called(input, *self._fusion.arguments(layer._output_padding(input, output_size, *axes)))

    def train(self, mode: bool = True) -> Any:
        """Change the mode and forget the packed filter, so that no write of a training goes unnoticed."""
        layer: Any = self
        if mode != layer.training:
            held_layers.pop(layer.weight, None)
        return super().train(mode)  # type: ignore[misc]


class _Absorbed:
    """A module that the layer before it computes; in training mode PyTorch does."""

    _fusion: _Fusion

    def forward(self, input: Tensor) -> Tensor:
        """Return `input`, to which the layer has done everything."""
        if self._fusion.active:
            return input
        output: Tensor = super().forward(input)  # type: ignore[misc]
        return output


def _kinds(prefix: str, mixin: type, bases: Iterable[type[nn.Module]]) -> dict[type[nn.Module], type[nn.Module]]:
    """Return a class with `mixin` for each of `bases`; its name in this module lets it be pickled."""
    made: dict[type[nn.Module], type[nn.Module]] = {}
    for base in bases:
        name = f"{prefix}{base.__name__}"
        made[base] = globals()[name] = type(name, (mixin, base), {"__module__": __name__, "__doc__": mixin.__doc__})
    return made


#: The classes of modules -> the classes they get. A PReLU is none of them: its slope may change.
_COMPILED = _kinds("Compiled", _Compiled, OPERATORS)
_ABSORBED = _kinds("Absorbed", _Absorbed, (set(BATCH_NORMS) | set(ACTIVATION_MODULES)) - {nn.PReLU})


@dataclass(frozen=True, slots=True)
class Swap:
    """The outcome for one layer.

    It is swapped unless `reason` says why not. `problems` are those of its calls, `missing` those that no artifact
    serves. `absorbed` are the modules that it computes too. `left` are the nodes behind them that an epilogue could
    hold, but that stay with PyTorch: functions, and modules that also run elsewhere or have hooks.
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
    """A layer that could be swapped, with the modules `parts`, the layer first."""

    swap: Swap
    parts: tuple[nn.Module, ...] = ()


def problems(model: nn.Module, inputs: Sequence[object]) -> list[Problem]:
    """Return the problems to compile, so that `replace` can swap the layers of `model`.

    `model` must be in evaluation mode; it is run once on `inputs`, without gradients. Raises SourceError.
    """
    swaps = [candidate.swap for candidate in _candidates(model, inputs)]
    return list(dict.fromkeys(problem for swap in swaps if not swap.reason for problem in swap.problems))


def replace(
    model: nn.Module, library: Library, inputs: Sequence[object], *, fallback: Literal["torch"] | None = None
) -> Report:
    """Let artifacts of `library` compute the transposed convolutions of `model`, in place; report on each layer.

    ``model(*inputs)`` is run once, in evaluation mode and without gradients, to see the layers, their shapes and the
    operators behind them. A layer is swapped if artifacts serve all of its calls; with ``fallback="torch"``, if they
    serve one. With it PyTorch computes shapes that no artifact serves, now and later; else those raise
    NoArtifactError. A batch normalisation and an activation module that always follow are absorbed.

    Modules keep their place, names, parameters and hooks, and change their class. In training mode they do what they
    did before. Raises SourceError, ProblemError, and the errors of loading an artifact; then nothing is swapped.
    """
    allowed = fallback is not None and bool(one_of("fallback", fallback, ("torch",)))
    handle = handle_of(library)
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
    axes = zip(problem.output_spatial, problem.uncropped_spatial, problem.pads_begin, strict=True)
    arguments = fusion.arguments([extent - nat + 2 * pad for extent, nat, pad in axes])
    data = torch.empty(problem.data_shape, dtype=getattr(torch, problem.dtype), device="meta")
    data = data.movedim(-1, 1) if problem.data_format == "NXC" else data
    try:
        return layer_of(data, *parted(arguments)) is not None
    except NoArtifactError:
        return False


def _candidates(model: nn.Module, inputs: Sequence[object]) -> list[_Candidate]:
    traced = trace(model, inputs)
    modules = {name or type(part).__name__: part for name, part in model.named_modules()}
    calls: dict[str, list[FoundLayer]] = {}
    for layer in traced.layers:
        calls.setdefault(layer.name, []).append(layer)
    candidates = [_candidate(layers, modules, traced.runs) for layers in calls.values()]
    idle = [name for name, part in modules.items() if type(part) in OPERATORS and name not in calls]
    return candidates + [_Candidate(Swap(name, type(modules[name]).__name__, reason="did not run")) for name in idle]


def _candidate(layers: list[FoundLayer], modules: Mapping[str, nn.Module], runs: Counter[str]) -> _Candidate:
    """Return the candidate for the layer of which `layers` are the calls."""
    first, part = layers[0], modules.get(layers[0].name)
    reasons = (layer.reason or _reason(part, layer.problem) for layer in layers)
    reason = next(filter(None, reasons), "")
    if reason or part is None:
        return _Candidate(Swap(first.name, first.operator, reason=reason))
    parts = [part]
    for name, *others in zip(*(layer.fused for layer in layers), strict=False):
        follower = modules.get(name)
        known = follower is not None and type(follower) in _ABSORBED and not set(others) - {name}
        # A hook would see results of the whole fusion. A module that ran more often also does something else.
        alone = known and runs[name] == len(layers) and not _hooked(parts[-1]) and not _hooked(follower)
        if not alone or (len(parts) > 1 and isinstance(follower, BATCH_NORMS)):
            break
        parts.append(follower)
    count = len(parts) - 1
    epilogue = Epilogue(bias=part.bias is not None or isinstance(parts[-1], BATCH_NORMS))
    asked = [layer.problem.replace(epilogue=epilogue) for layer in layers if layer.problem is not None]
    if isinstance(parts[-1], ACTIVATION_MODULES):  # which ends what is fused
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
    """Return the reason why a layer that `part` computes cannot be swapped; empty if it can."""
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
