"""Calls of PyTorch's conv_transpose1d, 2d and 3d in the forward of a module.

While such a forward runs, in evaluation mode and not in compiled programs, other functions stand under the names of
these in `torch` and `torch.nn.functional`. They compute the calls that were seen when the module was swapped; PyTorch
computes all others, and those of other threads. A module that keeps the functions under names of its own is run in a
TorchFunctionMode instead, which costs microseconds for every operator of the forward.

Filters may be made anew for each call: they are compared with a copy of the one that was packed.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from tvm_deconv.errors import NoArtifactError
from tvm_deconv.frontends.torch import channels_last
from tvm_deconv.problem import Epilogue, Problem, broadcast
from tvm_deconv.runtime.layer import Layer
from tvm_deconv.torch.followers import Derived, derive, underive
from tvm_deconv.torch.operator import by_layer, is_autocast, is_eager, is_recorded, is_transformed
from tvm_deconv.torch.packed import (
    MOST_LAYERS,
    Attributes,
    Parameters,
    bound,
    data_of,
    equal,
    output_padding_of,
)

_FUNCTIONS = {
    function.__name__: function for function in (torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d)
}


class _Kept(NamedTuple):
    """A layer by its call, with copies of the filter and the bias; None if PyTorch computes such calls."""

    call: tuple[Any, ...]
    layer: Layer | None
    weight: Tensor
    bias: Tensor | None


class Calls:
    """The calls in the forward of one module that artifacts of a library compute.

    `taken` counts them. They are taken by the names of the functions unless `by_name` is false. Compiled programs have
    PyTorch's own (`stays_in_programs`).
    """

    stays_in_programs = False

    def __init__(self, owner: nn.Module, library: str) -> None:
        self.parts: tuple[nn.Module, ...] = (owner,)
        self.switched_off = False
        self.by_name = True
        self.taken = 0
        self._library = library
        self._known: set[tuple[tuple[int, ...], Attributes]] = set()
        self._kept: list[_Kept] = []

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_kept": []}

    def serves(self, problem: Problem) -> bool:
        """Tell whether an artifact serves `problem`, which is loaded; its calls are then taken."""
        shape, a = _signature(problem, self._library)
        data = data_of(problem)
        weight = torch.zeros(shape, dtype=data.dtype)
        bias = torch.zeros(problem.bias_shape, dtype=data.dtype) if problem.epilogue.bias else None
        try:
            bound(data, Parameters(weight, bias), a, fallback=False)
        except NoArtifactError:
            return False
        self._known.add((shape, a))
        return True

    @property
    def installed(self) -> bool:
        """True if the module takes its calls here."""
        return "_calls" in vars(self.parts[0])

    def install(self) -> None:
        """Let the module take its calls here."""
        (owner,) = self.parts
        derive(owner, Calling)
        owner._calls = self

    def remove(self) -> None:
        """Make the module what it was."""
        (owner,) = self.parts
        underive(owner, Calling)
        del owner._calls

    def compute(
        self,
        function: Callable[..., Tensor],
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: int | Sequence[int] = 1,
        padding: int | Sequence[int] = 0,
        output_padding: int | Sequence[int] = 0,
        groups: int = 1,
        dilation: int | Sequence[int] = 1,
    ) -> Tensor:
        """Compute a call, by an artifact if there is one."""
        numbers: tuple[Any, ...] = (stride, padding, output_padding, groups, dilation)
        if list in map(type, numbers):
            numbers = tuple(tuple(n) if isinstance(n, list) else n for n in numbers)
        eager = is_eager(input) and not is_transformed() and not is_autocast(input)
        if eager and input.dim() == weight.dim() and input.shape[0] and not is_recorded(input, (weight, bias)):
            last = not input.is_contiguous() and channels_last(input)
            call = (input.shape, last, input.dtype, numbers)
            for kept in self._kept:
                if kept.call == call and equal(weight, kept.weight) and (bias is kept.bias or equal(bias, kept.bias)):
                    layer = kept.layer
                    break
            else:
                layer = self._new(call, input, Parameters(weight, bias))
            if layer is not None:
                self.taken += 1
                return by_layer(input, layer)
        return function(input, weight, bias, *numbers)

    def _new(self, call: tuple[Any, ...], input: Tensor, parameters: Parameters) -> Layer | None:
        """Return the layer of a call that was not seen before, None if PyTorch computes it; keep it if it is known."""
        stride, padding, output_padding, groups, dilation = call[-1]
        rank, bias = parameters.weight.dim() - 2, parameters.bias is not None
        steps, pads, more, spread = (
            broadcast("axes", axis, rank, 0) for axis in (stride, padding, output_padding, dilation)
        )
        a = Attributes(0.0, steps, pads, more, spread, groups, str(Epilogue(bias)), self._library)
        if (tuple(parameters.weight.shape), a) not in self._known:
            return None
        layer = bound(input, parameters, a, fallback=True)
        copies = (None if tensor is None else tensor.detach().clone() for tensor in parameters[:2])
        self._kept = [*self._kept[-MOST_LAYERS + 1 :], _Kept(call, layer, *copies)]
        return layer


def _signature(problem: Problem, library: str) -> tuple[tuple[int, ...], Attributes]:
    """Return the shape of the filter and the attributes of the calls of `problem`."""
    shape = problem.replace(filter_format="IOX", data_format="NCX").filter_shape
    more = output_padding_of(problem)
    numbers = (problem.strides, problem.pads_begin, more, problem.dilations, problem.groups)
    return shape, Attributes(0.0, *numbers, str(problem.epilogue), library)


class _Running(threading.local):
    """The `calls` of the innermost module whose forward runs in this thread."""

    calls: Calls | None = None


_running = _Running()


class _Names:
    """The names of the functions, which others have while a forward runs in some thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0

    def take(self) -> None:
        """Let modules take the calls whose forwards run."""
        with self._lock:
            self._users += 1
            if self._users == 1:
                _name(_TAKING)

    def after_fork(self) -> None:
        """Renew the lock in a forked child, since another thread of the parent may have held it."""
        self._lock = threading.Lock()

    def give_back(self) -> None:
        """Undo one `take`."""
        with self._lock:
            self._users -= 1
            if not self._users:
                _name(_FUNCTIONS)


def _name(functions: dict[str, Callable[..., Tensor]]) -> None:
    vars(torch).update(functions)
    vars(functional).update(functions)


def _taking(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function that lets the calls of this thread be taken."""

    def taking(*arguments: Any, **keywords: Any) -> Tensor:
        calls = _running.calls
        if calls is None:
            return function(*arguments, **keywords)
        return calls.compute(function, *arguments, **keywords)

    return taking


_TAKING = {name: _taking(function) for name, function in _FUNCTIONS.items()}
_names = _Names()
os.register_at_fork(after_in_child=_names.after_fork)


class _Mode(TorchFunctionMode):  # type: ignore[misc]
    def __init__(self, calls: Calls) -> None:
        super().__init__()
        self._calls = calls

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _FUNCTIONS.values():
            return self._calls.compute(func, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


class Calling(Derived):
    """A module in whose forward artifacts compute calls of transposed convolutions; in training mode PyTorch does."""

    _calls: Calls

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """Compute the forward of the module."""
        module: Any = self
        calls = self._calls
        forward = super().forward  # type: ignore[misc]
        if module.training or calls.switched_off or torch.compiler.is_compiling():
            return forward(*arguments, **keywords)
        if not calls.by_name:
            with _Mode(calls):
                return forward(*arguments, **keywords)
        outer, _running.calls = _running.calls, calls
        _names.take()
        try:
            return forward(*arguments, **keywords)
        finally:
            _names.give_back()
            _running.calls = outer
