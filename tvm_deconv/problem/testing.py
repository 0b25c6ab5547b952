"""Random operands of a problem, and the comparison of an output with the reference.

Operands are scaled so that sums are of order one for any number of products: there activations are not yet flat.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from tvm_deconv.problem.activations import ACTIVATIONS
from tvm_deconv.problem.arrays import numpy_dtype
from tvm_deconv.problem.problem import Array, Problem
from tvm_deconv.problem.quantization import STORED, Scaling

#: dtype -> the error that an element may have, as a part of the largest element and as a part of itself (its rounding).
TOLERANCES = {
    "float32": (5e-5, 0.0),  # of long sums under Winograd's transforms, too
    "float64": (1e-13, 0.0),
    "float16": (5e-5, 2.0**-10),
    "bfloat16": (5e-5, 2.0**-7),
    "int32": (0.0, 0.0),
    "int8": (0.0, 0.0),
    "uint8": (0.0, 0.0),
}
#: The distance between the least numbers of a type that rounds, whose own part is less.
LEAST_STEPS = {"float16": 2.0**-24, "bfloat16": 2.0**-133}
#: The elements of an output that are compared, or whose reference is computed, at once.
PART_ELEMENTS = 2**26
#: The elements that are compared at once where they lie side by side.
PIECE_ELEMENTS = 2**16


class Operands(NamedTuple):
    """The arrays of one call, in the problem's formats; `bias` is None if the epilogue has none.

    `scaling` is that of a quantized problem.
    """

    data: Array
    filter: Array
    bias: Array | None
    scaling: Scaling | None = None


class Deviation(NamedTuple):
    """The largest error of an output, as a part of the largest element expected, and whether it is allowed."""

    largest: float
    allowed: bool


class Part(NamedTuple):
    """A piece of a problem as a problem of its own, its arrays, and the slices of its output in the whole output."""

    problem: Problem
    operands: Operands
    slices: tuple[Any, ...]


def operands(problem: Problem, seed: int = 0) -> Operands:
    """Return random arrays for `problem`, the same for the same seed."""
    rng = np.random.default_rng(seed)
    if problem.quantization:
        return _quantized(problem, rng)
    products = problem.in_channels * math.prod(
        math.ceil(k / s) for k, s in zip(problem.kernel, problem.strides, strict=True)
    )
    dtype = numpy_dtype(problem.dtype)
    if dtype.kind in "iu":
        # The whole range, unless a sum could then leave 32 bits.
        largest = min(np.iinfo(dtype).max, max(1, math.isqrt(2**30 // (products * math.prod(problem.strides)))))
        lowest = -largest if dtype.kind == "i" else 0
        arrays = [
            rng.integers(lowest, largest, shape, dtype, endpoint=True)
            for shape in (problem.data_shape, problem.filter_shape)
        ]
        bias = rng.integers(-(2**15), 2**15, problem.bias_shape, np.int32)
    else:
        working: Any = np.float64 if problem.dtype == "float64" else np.float32
        scale = working(1 / math.sqrt(products))
        arrays = [
            rng.standard_normal(problem.data_shape, working).astype(dtype),
            (rng.standard_normal(problem.filter_shape, working) * scale).astype(dtype),
        ]
        bias = rng.standard_normal(problem.bias_shape, working)
    return Operands(arrays[0], arrays[1], bias if problem.epilogue.bias else None)


def _quantized(problem: Problem, rng: np.random.Generator) -> Operands:
    """Return stored integers of the whole range, and scales that spread the outputs over theirs."""

    def stored(dtype: str, shape: tuple[int, ...]) -> Array:
        limits = np.iinfo(dtype)
        return rng.integers(limits.min, limits.max, shape, dtype, endpoint=True)

    output, channels = problem.output_dtype, problem.bias_shape
    filter_scale = rng.uniform(0.5, 1.5, channels).astype(np.float32) / 128
    spread = 64 * 64 * math.sqrt(problem.terms) / 128 / 32
    scaling = Scaling(
        data_scale=0.5,
        data_zero_point=int(stored(problem.dtype, ())),
        filter_scale=filter_scale,
        filter_zero_point=stored("uint8", channels) if problem.filter_dtype == "uint8" else 0,
        output_scale=spread if output in STORED else 1.0,
        output_zero_point=int(stored(output, ())) // 4 if output in STORED else 0,
    )
    bias = rng.integers(-(2**12), 2**12, channels, np.int32) if problem.epilogue.bias else None
    data, filter = stored(problem.dtype, problem.data_shape), stored(problem.filter_dtype, problem.filter_shape)
    return Operands(data, filter, bias, scaling)


def deviation(problem: Problem, output: Array, expected: Array, *, fused: bool = True) -> Deviation:
    """Compare `output` with the result of the reference for the same operands, in the type of `expected`.

    If the epilogue is not `fused`, sums are rounded to the output's type before it, and may have been larger; stored
    integers may be off by one.
    """
    if output.size == 0:
        return Deviation(0.0, output.shape == expected.shape)
    common, own = TOLERANCES[problem.output_dtype]
    # An activation in float32 may put a number on the other side of a tie, and so may scales applied in another order.
    exact = fused and ACTIVATIONS[problem.epilogue.activation].integers
    steps = LEAST_STEPS.get(problem.output_dtype, float(problem.output_dtype in STORED and not exact))
    pieces = _pieces(output, expected)
    largest = max(float(np.abs(wanted).max()) for _, wanted in pieces)
    worst, allowed = 0.0, True
    for found, wanted in pieces:
        error = np.abs(found.astype(expected.dtype) - wanted)
        worst = float(np.maximum(worst, error.max()))  # which keeps a NaN
        # Written so that a NaN is not allowed.
        bound = common * largest + steps + (own * (np.abs(wanted) if fused else largest) if own else 0.0)
        allowed &= bool(np.all(error <= bound))
    return Deviation(worst / (largest or 1.0), allowed)


def _pieces(output: Array, expected: Array) -> list[tuple[Array, Array]]:
    """Cut an output and what was expected, so that intermediate results stay in a cache where both are contiguous.

    Others are cut along their first two axes, if results of the whole would take much memory.
    """
    if output.shape == expected.shape and output.flags.c_contiguous and expected.flags.c_contiguous:
        flat, wanted = output.reshape(-1), expected.reshape(-1)
        starts = range(0, flat.size, PIECE_ELEMENTS)
        return [(flat[i : i + PIECE_ELEMENTS], wanted[i : i + PIECE_ELEMENTS]) for i in starts]
    indices = list(np.ndindex(output.shape[:2])) if output.size > PART_ELEMENTS else [()]
    return [(output[index], expected[index]) for index in indices]


def parts(problem: Problem, arrays: Operands) -> Iterator[Part]:
    """Cut a large problem along images, groups and output channels into parts whose reference fits into memory."""
    positions = math.prod(problem.output_spatial)
    images = _step(problem.batch, problem.groups * problem.out_channels * positions)
    groups = _step(problem.groups, images * problem.out_channels * positions)
    channels = _step(problem.out_channels, images * groups * positions)
    filter = problem.canonical_filter(arrays.filter)
    for n, g, c in itertools.product(
        range(0, problem.batch, images), range(0, problem.groups, groups), range(0, problem.out_channels, channels)
    ):
        taken = filter[g : g + groups, :, c : c + channels]
        part = problem.replace(
            batch=min(images, problem.batch - n),
            groups=taken.shape[0],
            out_channels=taken.shape[2],
            filter_format="GIOX",
        )
        first = g * problem.out_channels + c
        outputs = slice(first, first + part.groups * part.out_channels)
        inputs = slice(g * problem.in_channels, (g + part.groups) * problem.in_channels)
        batch = slice(n, n + part.batch)
        data = arrays.data[_index(problem, batch, inputs)]
        bias = None if arrays.bias is None else arrays.bias[outputs]
        scaling = None if arrays.scaling is None else _scaling_of(arrays.scaling, outputs)
        yield Part(part, Operands(data, taken, bias, scaling), _index(problem, batch, outputs))


def _scaling_of(scaling: Scaling, channels: slice) -> Scaling:
    """Return the scaling of some output channels."""
    scale, zero = scaling.filter_scale, scaling.filter_zero_point
    return dataclasses.replace(
        scaling,
        filter_scale=scale if np.ndim(scale) == 0 else np.asarray(scale)[channels],
        filter_zero_point=zero if np.ndim(zero) == 0 else np.asarray(zero)[channels],
    )


def _step(extent: int, elements: int) -> int:
    """Return how many of an axis' `extent` indices, with `elements` each, make up a part."""
    return max(1, min(extent, PART_ELEMENTS // max(1, elements)))


def _index(problem: Problem, batch: slice, channels: slice) -> tuple[Any, ...]:
    """Return the index of images and channels in an array of the problem's data format."""
    return (batch, ..., channels) if problem.data_format == "NXC" else (batch, channels)
