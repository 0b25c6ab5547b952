"""Filters that PyTorch computes on every call: those with weight or spectral normalisation.

In evaluation mode they depend on parameters and buffers of the layer alone, so they are computed again only when one of
these changes.
"""

from __future__ import annotations

import warnings
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils.spectral_norm import SpectralNorm

with warnings.catch_warnings():
    warnings.simplefilter("ignore", FutureWarning)
    from torch.nn.utils.weight_norm import WeightNorm

_PARAMETRIZATIONS = (parametrizations._WeightNorm, parametrizations._SpectralNorm)


class IdleWeightNorm(WeightNorm):  # type: ignore[misc]
    """The hook of `torch.nn.utils.weight_norm` on a layer that computes its filter itself when it needs it."""

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        """Do nothing."""

    def compute(self, module: nn.Module) -> None:
        """Make the filter an attribute of `module`, as the hook did."""
        super().__call__(module, ())


class IdleSpectralNorm(SpectralNorm):  # type: ignore[misc]
    """The hook of `torch.nn.utils.spectral_norm` on a layer that computes its filter itself when it needs it."""

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        """Do nothing."""

    def compute(self, module: nn.Module) -> None:
        """Make the filter an attribute of `module`, as the hook did."""
        super().__call__(module, ())


_HOOKS: dict[type, tuple[type, tuple[str, ...]]] = {
    WeightNorm: (IdleWeightNorm, ("_g", "_v")),
    SpectralNorm: (IdleSpectralNorm, ("_orig", "_u", "_v")),
}


def is_normalised(layer: nn.Module) -> bool:
    """Tell whether the filter of `layer` has weight or spectral normalisation, and is computed by nothing else."""
    if parametrize.is_parametrized(layer):
        steps: Any = layer.parametrizations
        return set(steps) == {"weight"} and all(type(step) in _PARAMETRIZATIONS for step in steps["weight"])
    return "weight" not in layer._parameters and len(norm_hooks(layer)) == 1


def norm_hooks(layer: nn.Module) -> list[Any]:
    """Return the hooks of `layer` that compute its filter."""
    hooks: list[Any] = [hook for hook in layer._forward_pre_hooks.values() if isinstance(hook, tuple(_HOOKS))]
    return [hook for hook in hooks if hook.name == "weight"]


class NormalisedFilter:
    """The filter of a layer with weight or spectral normalisation."""

    def __init__(self, layer: nn.Module) -> None:
        self._layer: Any = layer
        self._hook: Any = None
        if parametrize.is_parametrized(layer):
            self.modules = tuple(self._layer.parametrizations.weight.modules())
            self._sources = [(part, name) for part in self.modules for name in (*part._parameters, *part._buffers)]
        else:
            (self._hook,) = norm_hooks(layer)
            self.modules = ()
            self._sources = [(layer, f"weight{suffix}") for suffix in _HOOKS[type(self._hook)][1]]

    def take(self) -> None:
        """Let the hook, if there is one, compute nothing by itself."""
        if self._hook is not None:
            self._hook.__class__ = _HOOKS[type(self._hook)][0]

    def give_back(self) -> None:
        """Let the hook compute the filter again."""
        if self._hook is not None:
            self._hook.__class__ = type(self._hook).__bases__[0]

    def sources(self) -> list[Tensor]:
        """Return the tensors that the filter is computed from."""
        return [getattr(part, name) for part, name in self._sources]

    def refresh(self) -> None:
        """Let the hook, if there is one, compute the filter for a forward that PyTorch computes."""
        if isinstance(self._hook, (IdleWeightNorm, IdleSpectralNorm)):
            self._hook.compute(self._layer)

    def computed(self) -> Tensor:
        """Return the filter, computed now; gradients reach the tensors that it is computed from."""
        self.refresh()
        weight: Tensor = self._layer.weight
        if self._hook is not None and weight.grad_fn is not None:
            self._layer.weight = weight.detach()  # no later call may compute it: else it would keep this call's graph
        return weight
