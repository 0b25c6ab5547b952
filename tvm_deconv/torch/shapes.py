"""The extents that a model leaves to each call, as torch.export derives them from those of its inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tvm_deconv.errors import SourceError
from tvm_deconv.frontends.torch import Inputs, arguments_in

_TRANSPOSED = {
    torch.ops.aten.conv_transpose1d.default: 1,
    torch.ops.aten.conv_transpose2d.input: 2,
    torch.ops.aten.conv_transpose3d.input: 3,
}
#: The largest extent is divided by these for the buckets, by the number of spatial axes that are dynamic.
_DIVISORS = {1: (1, 8, 64), 2: (1, 4)}


def dynamic_axes(model: nn.Module, inputs: Inputs, shapes: Any) -> list[dict[int, tuple[int, ...]]]:
    """Return the dynamic axes of each transposed convolution, in the order of the calls, with their buckets.

    `shapes` are dynamic_shapes as torch.export.export has them. Axis 0 is the batch, 1 the first spatial axis. An axis
    without a bound has no buckets, as the batch. Raises SourceError.
    """
    arguments, keywords = arguments_in(inputs)
    try:
        with torch.no_grad():
            program = torch.export.export(model, tuple(arguments), dict(keywords), dynamic_shapes=shapes)
    except Exception as error:  # it has no class of its own
        raise SourceError("dynamic", shapes, f"must let torch.export take the model: {error}") from error
    return [
        _axes(node.args[0].meta["val"], _TRANSPOSED[node.target])
        for node in program.graph.nodes
        if node.target in _TRANSPOSED
    ]


def _axes(data: torch.Tensor, rank: int) -> dict[int, tuple[int, ...]]:
    """Return the dynamic axes of `data`, which may lack the batch axis."""
    extents = {axis + 1: data.shape[axis - rank] for axis in range(rank)}
    if data.dim() == rank + 2:
        extents[0] = data.shape[0]
    free = {axis: extent for axis, extent in sorted(extents.items()) if isinstance(extent, torch.SymInt)}
    divisors = _DIVISORS.get(sum(axis > 0 for axis in free), (1,))
    return {axis: _buckets(extent, divisors) if axis else () for axis, extent in free.items()}


def _buckets(extent: Any, divisors: tuple[int, ...]) -> tuple[int, ...]:
    """Return the buckets of a symbolic extent, from its range; none if it has no upper bound."""
    bounds = extent.node.shape_env.bound_sympy(extent.node.expr)
    if not bounds.upper.is_Integer:
        return ()
    least, most = max(1, int(bounds.lower)), int(bounds.upper)
    return tuple(sorted({max(least, most // divisor) for divisor in divisors}))
