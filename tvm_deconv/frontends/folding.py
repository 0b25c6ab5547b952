"""Steps of an epilogue, folded into the filter, the bias and the epilogue of a layer, in float64."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable

import numpy as np

from tvm_deconv.errors import ProblemError
from tvm_deconv.frontends.graph import Step
from tvm_deconv.frontends.layers import FoundLayer
from tvm_deconv.problem import Array, Epilogue, Problem
from tvm_deconv.problem.arrays import numpy_dtype


def _no_bound(nbytes: int) -> None:
    pass


@np.errstate(all="ignore")  # overflow and NaN are looked for
def absorb(layer: FoundLayer, steps: Iterable[Step], take: Callable[[int], None] = _no_bound) -> FoundLayer:
    """Return `layer` with as many of `steps` folded in as its epilogue can hold.

    `take` is told the bytes of a copy of the filter before it is made. A scale needs a constant filter; a step before
    the activation needs a constant bias if there is a bias. Results must stay finite in the problem's dtypes. Integer
    layers keep their nodes: those run on rounded results.
    """
    problem = layer.problem
    if problem is None or problem.accumulate_dtype == "int32":
        return layer
    epilogue, fused = problem.epilogue, layer.fused
    known = layer.bias is not None or not epilogue.bias
    scale = np.ones(problem.bias_shape)
    shift = np.zeros(problem.bias_shape) if layer.bias is None else layer.bias.astype(np.float64)
    largest = functools.cache(lambda: _largest(problem, layer.filter, take))
    for step in steps:
        if step.scale is not None or step.shift is not None:
            affine = _then(scale, shift, step)
            if not known or not _fits(largest, problem, step, *affine):
                break
            scale, shift = affine
            epilogue = dataclasses.replace(epilogue, bias=epilogue.bias or step.shift is not None)
        activation = _in_dtype(step.activation, problem.dtype)
        epilogue = dataclasses.replace(activation, bias=epilogue.bias)
        fused += step.nodes
        if activation.activation != "none":
            break
    scaled = layer.filter
    if scaled is not None and not np.all(scale == 1):
        take(scaled.nbytes)
        scaled = _scaled(problem, scaled, scale)
    return dataclasses.replace(
        layer,
        problem=problem.replace(epilogue=epilogue),
        filter=scaled,
        bias=shift.astype(problem.accumulate_dtype) if epilogue.bias and known else None,
        fused=fused,
    )


def _then(scale: Array, shift: Array, step: Step) -> tuple[Array, Array]:
    """Return the scale and shift that equal ``scale * x + shift`` followed by `step`."""
    if step.scale is not None:
        scale, shift = scale * step.scale, shift * step.scale
    return scale, shift if step.shift is None else shift + step.shift


def _fits(largest: Callable[[], Array | None], problem: Problem, step: Step, scale: Array, shift: Array) -> bool:
    """Tell whether filter and bias stay finite in their dtypes with that scale and shift, the last being of `step`."""
    if not np.all(np.isfinite(shift.astype(problem.accumulate_dtype))):
        return False
    if step.scale is None:
        return True
    elements = largest()
    return elements is not None and bool(np.all(np.isfinite((elements * scale).astype(numpy_dtype(problem.dtype)))))


def _largest(problem: Problem, filter: Array | None, take: Callable[[int], None]) -> Array | None:
    """Return the largest finite magnitude of the filter for each output channel, in float64."""
    if filter is None:
        return None
    take(filter.nbytes)
    canonical = problem.canonical_filter(filter)
    magnitudes: Array = np.where(np.isfinite(canonical), np.abs(canonical), 0)
    largest: Array = magnitudes.max(axis=(1, *range(3, canonical.ndim)))
    return largest.reshape(-1).astype(np.float64)


def _scaled(problem: Problem, filter: Array, scale: Array) -> Array:
    """Return `filter` times `scale` per output channel, computed in float64, in its own dtype and format."""
    made = np.empty_like(filter, order="C")
    per_output = scale.reshape(problem.groups, 1, problem.out_channels, *(1,) * problem.rank)
    wide, out = problem.canonical_filter(filter), problem.canonical_filter(made)
    for channel in range(problem.in_channels):  # one at a time: in float64 the filter would be larger
        part = slice(channel, channel + 1)
        out[:, part] = wide[:, part].astype(np.float64) * per_output
    return made


def _in_dtype(epilogue: Epilogue, dtype: str) -> Epilogue:
    """Return the epilogue with its numbers as the shortest text of the same float32: 0.1, not 0.10000000149.

    So a slope from a model file, a list and a module give one problem. For float64 they stay as they are.
    """
    if dtype == "float64":
        return epilogue
    numbers = {name: float(str(np.float32(value))) for name, value in epilogue.parameters.items()}
    try:
        return Epilogue(epilogue.bias, epilogue.activation, **numbers)
    except ProblemError:  # a slope beyond float32
        return epilogue
