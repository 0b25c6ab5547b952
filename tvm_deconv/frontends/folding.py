"""Steps of an epilogue, folded into the filter, the bias and the epilogue of a layer, in float64."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np

from tvm_deconv.errors import ProblemError
from tvm_deconv.frontends.graph import Step
from tvm_deconv.frontends.layers import FoundLayer
from tvm_deconv.problem import Array, Epilogue, Problem


@np.errstate(all="ignore")  # overflow and NaN are looked for
def absorb(layer: FoundLayer, steps: Iterable[Step]) -> FoundLayer:
    """Return `layer` with as many of `steps` folded in as its epilogue can hold.

    A scale needs a constant filter; a step before the activation needs a constant bias if there is a bias. Results
    must stay finite in the problem's dtypes. Integer layers keep their nodes: those run on rounded results.
    """
    problem = layer.problem
    if problem is None or problem.accumulate_dtype == "int32":
        return layer
    epilogue, fused = problem.epilogue, layer.fused
    known = layer.bias is not None or not epilogue.bias
    scale = np.ones(problem.bias_shape)
    shift = np.zeros(problem.bias_shape) if layer.bias is None else layer.bias.astype(np.float64)
    for step in steps:
        if step.scale is not None or step.shift is not None:
            affine = _then(scale, shift, step)
            if not known or not _fits(layer.filter, problem, step, *affine):
                break
            scale, shift = affine
            epilogue = dataclasses.replace(epilogue, bias=epilogue.bias or step.shift is not None)
        activation = _in_dtype(step.activation, problem.dtype)
        epilogue = dataclasses.replace(activation, bias=epilogue.bias)
        fused += step.nodes
        if activation.activation != "none":
            break
    return dataclasses.replace(
        layer,
        problem=problem.replace(epilogue=epilogue),
        filter=layer.filter if np.all(scale == 1) else _scaled(problem, layer.filter, scale),
        bias=shift.astype(problem.accumulate_dtype) if epilogue.bias and known else None,
        fused=fused,
    )


def _then(scale: Array, shift: Array, step: Step) -> tuple[Array, Array]:
    """Return the scale and shift that equal ``scale * x + shift`` followed by `step`."""
    if step.scale is not None:
        scale, shift = scale * step.scale, shift * step.scale
    return scale, shift if step.shift is None else shift + step.shift


def _fits(filter: Array | None, problem: Problem, step: Step, scale: Array, shift: Array) -> bool:
    """Tell whether filter and bias stay finite in their dtypes with that scale and shift, the last being of `step`."""
    if not np.all(np.isfinite(shift.astype(problem.accumulate_dtype))):
        return False
    return step.scale is None or _scaled(problem, filter, scale) is not None


def _scaled(problem: Problem, filter: Array | None, scale: Array) -> Array | None:
    """Return `filter` times `scale` per output channel, in its own dtype and format; None if an element overflows."""
    if filter is None:
        return None
    per_output = scale.reshape(problem.groups, 1, problem.out_channels, *(1,) * problem.rank)
    wide = problem.canonical_filter(filter.astype(np.float64))
    scaled = (wide * per_output).astype(filter.dtype).reshape(filter.shape)
    lost = np.isfinite(filter.astype(np.float64)) & ~np.isfinite(scaled.astype(np.float64))
    return None if lost.any() else scaled


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
