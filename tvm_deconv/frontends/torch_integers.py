"""Quantized graphs of PyTorch (pt2e): what their operators say of integers, and layers between such operators."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from tvm_deconv.frontends.graph import Node
from tvm_deconv.frontends.layers import FoundLayer
from tvm_deconv.frontends.quantization import Stored, quantized
from tvm_deconv.problem import Array
from tvm_deconv.problem.quantization import STORED

#: The operators that ``convert_pt2e`` writes into a graph.
NAMESPACE = "quantized_decomposed::"


class Integers(NamedTuple):
    """What such an operator says: how `stored` integers stand for numbers, of several scales along an `axis`.

    `whole` tells whether they take all numbers of their type. `values` are those of a constant.
    """

    operator: str
    stored: Stored
    axis: int
    whole: bool
    values: Array | None


def integers_of(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], constant: Callable[[torch.Tensor], Array | None]
) -> Integers | None:
    """Return what a call of an operator says; None unless it has constant numbers, for integers of 8 bits.

    `constant` returns the value of a tensor, None of one that is no constant.
    """
    names = [argument.name for argument in func._schema.arguments]
    given = dict(zip(names, args, strict=False)) | dict(kwargs)

    def number(*names: str) -> Array | None:
        """Return the argument that has one of these names; 0 if it is None."""
        value = next((given[name] for name in names if given.get(name) is not None), 0)
        return constant(value) if isinstance(value, torch.Tensor) else np.array(value)

    dtype = str(given.get("dtype")).removeprefix("torch.")
    scale, zero = number("scale", "scales"), number("zero_point", "zero_points")
    if dtype not in STORED or scale is None or zero is None:
        return None
    whole = number("quant_min") == np.iinfo(dtype).min and number("quant_max") == np.iinfo(dtype).max
    stored = Stored(dtype, scale.reshape(-1), np.broadcast_to(zero, scale.shape).reshape(-1))
    operator = func._schema.name.removeprefix(NAMESPACE)
    return Integers(operator, stored, given.get("axis", 1), whole, constant(args[0]))


def on_integers(
    layer: FoundLayer, data: Integers, filter: Integers | None, output: Integers | None, after: Node | None
) -> FoundLayer | str:
    """Return a float32 `layer` whose data are dequantized as a quantized one, or the reason why it is none.

    `after` is the node that alone takes its result, and `output` what that says of integers.
    """
    if filter is None or filter.values is None:
        return "its filter must be constant integers with a scale, one or one for each output channel"
    if filter.stored.scale.size > 1 and filter.axis not in (1, 1 - filter.values.ndim):
        return "its filter has scales along another axis"
    if after is None or output is None or not output.operator.startswith("quantize"):
        return quantized(layer, data.stored, filter.values, filter.stored, None)
    if not output.whole:
        return f"its result takes a part of the numbers of {output.stored.dtype}"
    made = quantized(layer, data.stored, filter.values, filter.stored, output.stored)
    return made if isinstance(made, str) else dataclasses.replace(made, fused=(*made.fused, after.name))
