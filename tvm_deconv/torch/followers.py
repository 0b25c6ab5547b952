"""Activations that layers have computed already although their modules, or functions, also serve others.

A layer marks its output. Who is to compute the activation of a marked tensor gives it back as it is: a shared
activation module, a module whose forward is that one activation, or a function that the forward of a module calls. What
has no mark is computed by PyTorch.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tvm_deconv.errors import SourceError

_MARK = "_tvm_deconv_follower"


class Unscriptable:
    """A module that TorchScript does not take."""

    def __prepare_scriptable__(self) -> Any:
        rule = "must not be swapped: script the model before replace, or use torch.jit.trace"
        raise SourceError("torch.jit.script", type(self).__name__, rule)


class Derived(Unscriptable):
    """A mixin for modules of any class: copies and pickles name that class, and derive from it again."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = super().__reduce_ex__(protocol)
        _, (kind, *arguments), *rest = reduced
        mixins = []
        while issubclass(kind.__bases__[0], Derived):
            mixin, kind = kind.__bases__
            mixins.append(mixin)
        return _made_again, (mixins, kind, *arguments), *rest


def _made_again(mixins: list[Any], kind: Any, *arguments: Any) -> nn.Module:
    for mixin in reversed(mixins):
        kind = derived(mixin, kind)
    module: nn.Module = kind.__new__(kind, *arguments)
    return module


@functools.cache
def derived(mixin: Any, base: Any) -> type[nn.Module]:
    """Return the class for modules of the class `base` that `mixin` changes; its forward has the same signature."""

    @functools.wraps(base.forward)
    def forward(self: Any, *arguments: Any, **keywords: Any) -> Any:
        return mixin.forward(self, *arguments, **keywords)

    namespace = {"__module__": __name__, "__doc__": mixin.__doc__, "forward": forward}
    return type(f"{mixin.__name__}{base.__name__}", (mixin, base), namespace)


def derive(module: nn.Module, mixin: Any) -> None:
    """Let `mixin` change `module`."""
    kind: Any = type(module)
    module.__class__ = derived(mixin, kind)


def underive(module: nn.Module, mixin: Any) -> None:
    """Take back that `mixin` changes `module`, whatever else does."""
    kind: Any = type(module)
    others = []
    while kind.__bases__[0] is not mixin:
        others.append(kind.__bases__[0])
        kind = kind.__bases__[1]
    kind = kind.__bases__[1]
    for other in reversed(others):
        kind = derived(other, kind)
    module.__class__ = kind


class Follower:
    """Who computes an activation behind a layer: `module`, or the functions of some names in its forward."""

    def __init__(self, module: nn.Module, functions: Iterable[str] = ()) -> None:
        self.module: Any = module
        self._functions = frozenset(functions) or frozenset({""})

    def install(self) -> None:
        """Let the module look for marks."""
        mixin: Any = Absorbing if "" in self._functions else Following
        if not isinstance(self.module, mixin):
            derive(self.module, mixin)
            self.module._followers = 0
        self.module._followers += 1

    def remove(self) -> None:
        """Make the module what it was, unless it follows other layers."""
        self.module._followers -= 1
        if not self.module._followers:
            underive(self.module, Absorbing if "" in self._functions else Following)
            del self.module._followers

    def expects(self, input: object) -> bool:
        """Tell whether `input` is marked for this follower."""
        mark = getattr(input, _MARK, None) if isinstance(input, Tensor) else None
        return mark is not None and mark[0] is self.module

    def mark(self, output: Tensor) -> None:
        """Mark `output`, to which the activation has been applied."""
        setattr(output, _MARK, (self.module, self._functions))


def _taken(input: object, module: object, function: str = "") -> bool:
    """Tell whether `input` is marked for the function of `module`, or for the module itself; take the mark off."""
    mark = getattr(input, _MARK, None) if isinstance(input, Tensor) else None
    if mark is None or mark[0] is not module or function not in mark[1]:
        return False
    delattr(input, _MARK)
    return True


class Absorbing(Derived):
    """An activation that layers may have computed."""

    def forward(self, input: Tensor, *others: Any, **keywords: Any) -> Tensor:
        """Return `input` if a layer has computed the activation."""
        if not torch.compiler.is_compiling() and _taken(input, self):
            return input
        output: Tensor = super().forward(input, *others, **keywords)  # type: ignore[misc]
        return output


class Following(Derived):
    """A module in whose forward layers may have computed the activations that it calls as functions."""

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """Compute the forward of the module."""
        forward = super().forward  # type: ignore[misc]
        if torch.compiler.is_compiling():
            return forward(*arguments, **keywords)
        with _Mode(self):
            return forward(*arguments, **keywords)


class _Mode(TorchFunctionMode):  # type: ignore[misc]
    def __init__(self, module: object) -> None:
        super().__init__()
        self._module = module

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if args and hasattr(args[0], _MARK) and _taken(args[0], self._module, func.__name__.rstrip("_")):
            return args[0]
        return func(*args, **(kwargs or {}))
