"""The layers that readers find."""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tvm_deconv.errors import NoArtifactError, printable_lines
from tvm_deconv.problem import Array, Problem, Scaling
from tvm_deconv.problem.quantization import SCALING

if TYPE_CHECKING:
    from tvm_deconv.runtime.layer import Layer
    from tvm_deconv.runtime.library import Library


@dataclass(frozen=True, slots=True, eq=False)
class FoundLayer:
    """One transposed convolution of a model or a list.

    `problem` is None if the layer is not covered, and `reason` says why. `filter` is in the problem's filter format
    and dtype, `bias` has one element per output channel in its accumulate dtype; both are None if the file holds no
    constant. `scaling` has the numbers of a quantized layer. `fused` names the nodes that became the epilogue, in their
    order; their work is already folded into filter, bias and epilogue. `note` tells types that the model stores, where
    they differ from the problem's, and what makes a filter or a bias that is no constant. `extra` carries the other
    fields of a problem in a list.
    """

    name: str
    operator: str
    problem: Problem | None = None
    filter: Array | None = field(default=None, repr=False)
    bias: Array | None = field(default=None, repr=False)
    extra: Mapping[str, Any] = field(default_factory=dict)
    reason: str = ""
    fused: tuple[str, ...] = ()
    note: str = ""
    scaling: Scaling | None = None

    @property
    def notes(self) -> str:
        """What a covered layer leaves to each call, and its `note`; empty for other layers."""
        if self.problem is None:
            return ""
        names = ["batch" if axis == 0 else f"spatial axis {axis - 1}" for axis in self.problem.dynamic]
        free = f"any {' and '.join(names)}" if names else ""
        return ", ".join(filter(None, (free, self.note)))

    def bind(self, library: Library) -> Layer | str:
        """Return the layer of `library` that computes this one, or the reason why there is none."""
        if self.problem is None or self.filter is None:
            return self.reason or self.note or "its filter is no constant of the model's own graph"
        if self.problem.epilogue.bias and self.bias is None:
            return "its bias is no constant of the model's own graph"
        try:
            return library.bind(self.problem, self.filter, self.bias, scaling=self.scaling)
        except NoArtifactError as error:
            return str(error)


def uncovered(name: str, operator: str, reason: str) -> FoundLayer:
    """Return a layer without a problem; the reason is made printable, whatever the file held."""
    return FoundLayer(name, operator, reason=printable_lines(reason))


def with_unique_names(layers: Iterable[FoundLayer]) -> list[FoundLayer]:
    """Return the layers with `_2`, `_3`, ... behind names already given, in weights also to the scaling of a layer."""
    layers = list(layers)
    reserved, seen = {layer.name for layer in layers}, set[str]()
    numbers = defaultdict[str, Iterator[int]](lambda: itertools.count(2))
    named = []
    for layer in layers:
        name = layer.name
        if not seen.isdisjoint(_keys(layer, name)):
            candidates = (f"{name}_{number}" for number in numbers[name])
            name = next(candidate for candidate in candidates if reserved.isdisjoint(_keys(layer, candidate)))
            reserved.update(_keys(layer, name))
        seen.update(_keys(layer, name))
        named.append(dataclasses.replace(layer, name=name))
    return named


def _keys(layer: FoundLayer, name: str) -> set[str]:
    """Return the keys that a file of weights has facts of `layer` under, if that is called `name`."""
    return {name} if layer.scaling is None else {name, f"{name}{SCALING}"}
