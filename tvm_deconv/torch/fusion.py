"""A layer and the modules that it absorbs share a `Fusion`, which tells each of them what it has to compute.

The layer computes everything while all of them are in evaluation mode. Modules change their class, and with it their
forward.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.fx
from torch import Tensor, nn
from torch.nn.utils import parametrize

from tvm_deconv.errors import NoArtifactError
from tvm_deconv.frontends.torch import ACTIVATION_MODULES, BATCH_NORMS, OPERATORS
from tvm_deconv.problem import Epilogue, Problem
from tvm_deconv.torch.filters import NormalisedFilter, is_normalised, norm_hooks
from tvm_deconv.torch.followers import Follower, Unscriptable
from tvm_deconv.torch.operator import by_layer, by_torch, called, is_eager, is_recorded, is_transformed
from tvm_deconv.torch.packed import Attributes, Packed, Parameters, data_of, output_padding_of, packed_of

# torch.fx records calls of these as they are, and does not trace them.
torch.fx.wrap("called")
torch.fx.wrap("by_torch")

#: The parameters of the operator behind the filter.
_OTHERS = len(Parameters._fields) - 1
#: What each class has of its own.
_OF_A_CLASS = ("__dict__", "__weakref__")


class Fusion:
    """The modules that a swapped layer computes at once in evaluation mode: `parts`, the layer first.

    If there is a `follower`, the layer computes its activation too, except in compiled programs.
    """

    def __init__(
        self,
        parts: tuple[nn.Module, ...],
        epilogue: Epilogue,
        library: str,
        fallback: bool,
        follower: Follower | None = None,
    ) -> None:
        self.parts = parts
        self.follower = follower
        self.norm: Any = next((part for part in parts if isinstance(part, BATCH_NORMS)), None)
        self.normalised = NormalisedFilter(parts[0]) if is_normalised(parts[0]) else None
        self.epilogue = str(epilogue)
        self.library = library
        self.fallback = fallback
        self.switched_off = False
        self._modes = (*parts, *(self.normalised.modules if self.normalised else ()))
        if follower is not None:
            self._modes = (*self._modes, follower.module)
        self._classes: list[type[nn.Module]] = []
        self._packed: Packed | None = None
        self._weight: weakref.ref[Tensor] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_packed": None, "_weight": None}

    def computes(self, input: Tensor) -> bool:
        """Tell whether the layer computes everything; else each part computes its own, by PyTorch."""
        for part in self._modes:
            if part.training:
                return False
        return not self.switched_off and (self.follower is None or self._reaches_the_follower(input))

    def _reaches_the_follower(self, input: Tensor) -> bool:
        """Tell whether the output itself comes to the follower: no hook and nothing of autograd makes another of it."""
        if torch.compiler.is_compiling() or not isinstance(input, Tensor) or any(map(hooked, self.parts)):
            return False
        return not is_recorded(input, self.watched())

    def has_computed(self, output: Tensor) -> bool:
        """Tell whether the layer, of which `output` came, has computed the parts behind it."""
        if self.follower is None:
            return self.computes(output)
        return self.follower.expects(output) or isinstance(output, torch.fx.Proxy)

    def traced(self, input: Tensor, output_padding: Sequence[int]) -> Tensor:
        """Return the parts, without the activation of a follower, as torch.fx records them."""
        epilogue = Epilogue.parse(self.epilogue)
        a = self.attributes(output_padding)._replace(epilogue=str(Epilogue(epilogue.bias)))
        return by_torch(input, self.parameters(), a)

    def parameters(self) -> Parameters:
        """Return the tensors of the operator."""
        tensors = self.watched()
        if self.normalised is not None and self._is_computed():
            return Parameters(self.normalised.computed(), *tensors[-_OTHERS:])
        return Parameters(*tensors)

    def _is_computed(self) -> bool:
        """Tell whether the filter is normalised still."""
        return self.normalised is not None and "weight" not in self.parts[0]._parameters

    def attributes(self, output_padding: Sequence[int]) -> Attributes:
        """Return the attributes of the operator."""
        layer: Any = self.parts[0]
        return Attributes(
            0.0 if self.norm is None else self.norm.eps,
            tuple(layer.stride),
            tuple(layer.padding),
            tuple(output_padding),
            tuple(layer.dilation),
            layer.groups,
            self.epilogue,
            self.library,
        )

    def watched(self) -> Sequence[Any]:
        """Return the tensors that a packed filter is made of: the filter, or the tensors it is computed from, first."""
        layer, norm = self.parts[0], self.norm
        others: tuple[Any, ...] = (_tensor(layer, "bias"), None, None, None, None)
        if norm is not None:
            kept = norm._buffers
            moments = (kept["running_mean"], kept["running_var"])
            others = (others[0], _tensor(norm, "weight"), _tensor(norm, "bias"), *moments)
        if self.normalised is not None and self._is_computed():
            return (*self.normalised.sources(), *others)
        return (_tensor(layer, "weight"), *others)

    def packed(self) -> Packed:
        """Return the layers of the filter, which are kept beside it unless it is computed."""
        layer: Any = self.parts[0]
        weight = layer._parameters.get("weight")
        if self._packed is None or (self._weight is not None and self._weight() is not weight):
            self._packed = Packed() if weight is None else packed_of(weight)
            self._weight = None if weight is None else weakref.ref(weight)
        return self._packed

    def serves(self, problem: Problem) -> bool:
        """Tell whether an artifact serves `problem`; it is loaded, and the filter packed."""
        attributes = self.attributes(output_padding_of(problem))
        try:
            self.packed().layer(data_of(problem), attributes, self.watched(), self.parameters, fallback=False)
        except NoArtifactError:
            return False
        return True

    @property
    def stays_in_programs(self) -> bool:
        """True if compiled programs call artifacts too: not without a follower, nor on a filter that is computed."""
        return self.follower is None and self.normalised is None

    @property
    def installed(self) -> bool:
        """True if the parts belong to this fusion."""
        return bool(self._classes)

    def install(self) -> None:
        """Let the parts belong to this fusion."""
        layer, *others = self.parts
        kind = COMPILED[layer_class(layer)]
        if parametrize.is_parametrized(layer):
            # As PyTorch makes such a class, so that a parametrization can be removed.
            namespace = {name: value for name, value in vars(type(layer)).items() if name not in _OF_A_CLASS}
            kind = type(f"Parametrized{kind.__name__}", (kind,), namespace)
        if self.normalised is not None:
            self.normalised.take()
        for part, swapped in zip(self.parts, (kind, *(ABSORBED[type(part)] for part in others)), strict=True):
            self._classes.append(type(part))
            part.__class__ = swapped
            part._fusion = self
        if self.follower is not None:
            self.follower.install()

    def remove(self) -> None:
        """Make the parts what they were."""
        if self.follower is not None:
            self.follower.remove()
        while self._classes:
            part = self.parts[len(self._classes) - 1]
            part.__class__ = self._classes.pop()
            del part._fusion
        if self.normalised is not None:
            self.normalised.give_back()

    def compute(self, input: Tensor, output_padding: Sequence[int]) -> Tensor:
        """Compute all parts, by the shortest way that is right."""
        layer: Any = self.parts[0]
        a = self.attributes(output_padding)
        if is_eager(input):
            if input.dim() == len(layer.kernel_size) + 1:
                return self.compute(input.unsqueeze(0), output_padding).squeeze(0)
            watched = self.watched()
            autocast = self.fallback and torch.is_autocast_enabled("cpu")
            plain = input.is_cpu and input.shape[0] and not autocast and not is_transformed()
            if plain and not is_recorded(input, watched):
                kept = self.packed().layer(input, a, watched, self.parameters, fallback=self.fallback)
                return by_torch(input, self.parameters(), a) if kept is None else by_layer(input, kept)
        parameters = self.parameters()
        if self._is_computed():
            return by_torch(input, parameters, a)
        return called(input, *parameters, *a, self.fallback, True)


class _Part(Unscriptable):
    """A module of a fusion."""

    _fusion: Fusion

    def train(self, mode: bool = True) -> Any:
        """Change the mode and forget the packed filter: writes of a training may not be counted."""
        part: Any = self
        if mode != part.training:
            self._fusion.packed().clear()
        return super().train(mode)  # type: ignore[misc]


class Compiled(_Part):
    """A layer that an artifact computes; in training mode PyTorch does."""

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        """Compute the layer and what it has absorbed."""
        layer: Any = self
        fusion = self._fusion
        if fusion.follower is not None and isinstance(input, torch.fx.Proxy):
            return fusion.traced(input, layer.output_padding)
        if not fusion.computes(input):
            if fusion.normalised is not None:
                fusion.normalised.refresh()
            output: Tensor = super().forward(input, output_size)  # type: ignore[misc]
            return output
        padding = layer.output_padding
        if output_size is not None:
            axes = (layer.stride, layer.padding, layer.kernel_size, len(layer.kernel_size), layer.dilation)
            padding = layer._output_padding(input, output_size, *axes)
        output = fusion.compute(input, padding)
        if fusion.follower is not None:
            fusion.follower.mark(output)
        return output


class Absorbed(_Part):
    """A module that the layer before it computes; in training mode PyTorch does."""

    def forward(self, input: Tensor) -> Tensor:
        """Return `input`, to which the layer has done everything."""
        if self._fusion.has_computed(input):
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
COMPILED = _kinds("Compiled", Compiled, OPERATORS)
ABSORBED = _kinds("Absorbed", Absorbed, (set(BATCH_NORMS) | set(ACTIVATION_MODULES)) - {nn.PReLU})


def _tensor(part: nn.Module, name: str) -> Any:
    """Return an attribute of `part`, mostly a parameter; PyTorch's own search for it takes several times as long."""
    own = part._parameters
    return own[name] if name in own else getattr(part, name)


def hooked(part: nn.Module) -> bool:
    """Tell whether `part` has hooks, besides those that compute its filter."""
    before = len(part._forward_pre_hooks) - len(norm_hooks(part))
    return bool(part._forward_hooks or before or part._backward_hooks or part._backward_pre_hooks)


def layer_class(part: nn.Module) -> type[nn.Module]:
    """Return the class of a layer as its author wrote it, without that of a parametrization."""
    return type(part).__bases__[0] if parametrize.is_parametrized(part) else type(part)


def own(model: nn.Module, parts: Iterable[nn.Module]) -> None:
    """Give `model` ordinary copies of the tensors of `parts` that were made in inference mode."""
    tensors = {id(tensor): tensor for part in parts for tensor in (*part.parameters(), *part.buffers())}
    copies: dict[int, Tensor] = {
        key: nn.Parameter(tensor.clone(), tensor.requires_grad) if isinstance(tensor, nn.Parameter) else tensor.clone()
        for key, tensor in tensors.items()
        if tensor.is_inference()
    }
    for part in model.modules() if copies else ():
        for kept in (part._parameters, part._buffers):
            kept.update({name: copies[id(tensor)] for name, tensor in kept.items() if id(tensor) in copies})
