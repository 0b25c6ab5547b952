"""Quantized problems: what is compiled in, and the numbers that come with the filter, at bind.

A stored integer q stands for the real number ``scale * (q - zero_point)``. docs/semantics.md has the order of the
operations, which decides every bit of the results.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tvm_deconv.errors import ProblemError, TensorError
from tvm_deconv.problem.activations import ACTIVATIONS
from tvm_deconv.problem.checks import one_of

if TYPE_CHECKING:
    from tvm_deconv.problem.problem import Problem

Array = npt.NDArray[Any]

#: The types of quantized data and filters, and those of outputs.
STORED = ("int8", "uint8")
OUTPUTS = (*STORED, "int32", "float32")
#: Scales lie between these, so that no real number overflows and none is denormal.
LEAST_SCALE, MOST_SCALE = 2.0**-60, 2.0**40
#: Behind the name of a layer, the name under which files of weights have its `Scaling`.
SCALING = ".scaling"
#: The elements of the constants that stand before the bias and the scales of the channels: `Constants`.
HEAD = 3
#: The largest factor of a sum that becomes a stored number: with it any but zero is beyond all bytes.
MOST_FACTOR = 2.0**64
_TEXT = re.compile(r"([a-z0-9]+)\.([a-z0-9]+)", re.ASCII)
_MOST_SUM = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Quantization:
    """The types of a quantized problem besides that of its data, int8 or uint8: of the filter and of the output.

    The scales and zero points come at bind, see `Scaling`. An int8 filter has the zero point 0; those of a uint8 filter
    are free, at some cost of speed. The bias is int32, in units of the data's scale times the filter's. An output of
    int32 is the sum in these units, after the activation; one of float32 is the real number; one of int8 or uint8 is
    quantized again. Raises ProblemError.
    """

    filter: str
    output: str

    def __post_init__(self) -> None:
        one_of("quantization.filter", self.filter, STORED)
        one_of("quantization.output", self.output, OUTPUTS)

    def __str__(self) -> str:
        return f"{self.filter}.{self.output}"

    @staticmethod
    def parse(text: str) -> Quantization:
        """Return the quantization that prints as `text`, such as ``int8.uint8``; else raise ProblemError."""
        match = _TEXT.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            raise ProblemError("quantization", text, "must be the types of filter and output, such as int8.uint8")
        return Quantization(match[1], match[2])

    @property
    def largest_product(self) -> int:
        """The largest product of data and filter, whatever the zero points are."""
        return 255 * (128 if self.filter == "int8" else 255)


@dataclass(frozen=True, slots=True)
class Scaling:
    """The numbers of a quantized layer: a stored q stands for ``scale * (q - zero_point)``.

    Those of the filter may be arrays with one number for each output channel of all groups. Scales lie from 2**-60 to
    2**40 and zero points within the range of the stored type; an int8 filter has none, and an output that is not
    quantized has neither. `bind` raises ProblemError for others.
    """

    data_scale: float = 1.0
    data_zero_point: int = 0
    filter_scale: float | Sequence[float] | Array = 1.0
    filter_zero_point: int | Sequence[int] | Array = 0
    output_scale: float = 1.0
    output_zero_point: int = 0

    @property
    def text(self) -> str:
        """The numbers as JSON, which `parse` reads back."""
        return json.dumps({field.name: np.asarray(getattr(self, field.name)).tolist() for field in fields(self)})

    @staticmethod
    def parse(text: str) -> Scaling:
        """Return the scaling of `text`. Raises ValueError, TypeError for what is none."""
        return Scaling(**json.loads(text))


class Constants(NamedTuple):
    """What a quantized kernel reads besides the filter; scales are float32, the others int32.

    `scales` are those of the sums, one for each output channel; `inverse` is 1 / the output's scale.
    """

    data_zero_point: int
    output_zero_point: int
    inverse: Any
    bias: Array
    scales: Array

    @property
    def table(self) -> Array:
        """The form in which they cross to a kernel: int32, floats by their bits, `HEAD` elements before the arrays."""
        head = np.array([self.data_zero_point, self.output_zero_point, 0], np.int32)
        head[2:] = np.array([self.inverse], np.float32).view(np.int32)
        return np.concatenate([head, self.bias, self.scales.view(np.int32)])

    @staticmethod
    def of_table(table: Array) -> Constants:
        """Return the constants in a `table`."""
        bias, scales = np.split(table[HEAD:], 2)
        return Constants(int(table[0]), int(table[1]), table[2:3].view(np.float32)[0], bias, scales.view(np.float32))


def scales_once(problem: Problem) -> bool:
    """Tell whether sums are multiplied by one factor, their scale by 1 / the output's: the activation allows it."""
    return problem.output_dtype in STORED and ACTIVATIONS[problem.epilogue.activation].homogeneous


def check_sums(problem: Problem) -> None:
    """Raise ProblemError if a sum of products of a quantized problem may leave 32 bits."""
    assert problem.quantization is not None
    largest, terms = problem.quantization.largest_product, problem.terms
    if terms * largest > _MOST_SUM:
        rule = f"must keep sums within 32 bits: at most {_MOST_SUM // largest} products of up to {largest} in an output"
        raise ProblemError("in_channels", problem.in_channels, f"{rule}, and there are {terms}")


def constants(problem: Problem, scaling: Any, bias: Array | None) -> Constants:
    """Return the constants of a layer; `bias` is int32.

    Raises ProblemError for numbers that break a rule of `Scaling`, TensorError for a bias with which a sum may leave 32
    bits.
    """
    quantization, channels = problem.quantization, problem.bias_shape[0]
    assert quantization is not None
    if not isinstance(scaling, Scaling):
        raise ProblemError("scaling", scaling, "must be a Scaling: the problem is quantized")
    zero = _zero_points("data_zero_point", scaling.data_zero_point, problem.dtype, 1)[0]
    _zero_points("filter_zero_point", scaling.filter_zero_point, quantization.filter, channels)
    scales = _scales("filter_scale", scaling.filter_scale, channels) * _scales("data_scale", scaling.data_scale, 1)
    output_scale = _scales("output_scale", scaling.output_scale, 1)[0]
    output_zero = _zero_points("output_zero_point", scaling.output_zero_point, quantization.output, 1)[0]
    if quantization.output not in STORED and output_scale != 1:
        rule = f"must be 1: the output is {quantization.output}, which is not quantized"
        raise ProblemError("output_scale", scaling.output_scale, rule)
    bias = np.zeros(channels, np.int32) if bias is None else bias
    room = _MOST_SUM - problem.terms * quantization.largest_product
    largest = max(map(abs, map(int, bias)), default=0)
    if largest > room:
        raise TensorError("bias", largest, f"must be at most {room} in magnitude, which keeps sums within 32 bits")
    inverse = np.float32(1 / output_scale)
    return Constants(int(zero), int(output_zero), inverse, bias.astype(np.int32), scales.astype(np.float32))


def check_unscaled(scaling: object) -> None:
    """Raise ProblemError if there is a `scaling` for a problem that is not quantized."""
    if scaling is not None:
        raise ProblemError("scaling", scaling, "must be None: the problem is not quantized")


def without_zero_points(problem: Problem, scaling: Any, filter: Array) -> Array:
    """Return the canonical `filter` as kernels take it: an int8 one as it is, a uint8 one less its zero points, int16.

    Raises ProblemError for zero points that break a rule of `Scaling`.
    """
    assert problem.quantization is not None
    stored = problem.quantization.filter
    zero = _zero_points("filter_zero_point", scaling.filter_zero_point, stored, problem.bias_shape[0])
    if stored == "int8":
        return filter
    shape = (problem.groups, 1, problem.out_channels, *(1,) * problem.rank)
    return filter.astype(np.int16) - zero.astype(np.int16).reshape(shape)


def bound_arrays(problem: Problem, filter: Array, bias: Array | None, scaling: Any) -> tuple[Array, Array | None]:
    """Return what `pack` of a kernel takes, from a canonical `filter`, and what it reads in the place of the bias.

    For a problem that is not quantized they are `filter` and `bias`. Raises ProblemError, TensorError.
    """
    if problem.quantization is None:
        check_unscaled(scaling)
        return filter, bias
    numbers = constants(problem, scaling, bias)
    return without_zero_points(problem, scaling, filter), numbers.table


def _numbers(name: str, value: object, count: int) -> Array:
    """Return `value`, one number or `count` of them, as an array of `count`; raise ProblemError if it is neither."""
    try:
        array = np.asarray(value)
    except ValueError:  # ragged
        raise ProblemError(name, value, "must be a number or a sequence of numbers") from None
    if array.dtype.kind not in "iuf":
        raise ProblemError(name, value, "must be a number or a sequence of numbers")
    if array.size != 1 and array.shape != (count,):
        rule = f"must be one number or have one for each output channel, {count} here" if count > 1 else "must be one"
        raise ProblemError(name, array.shape, rule)
    return np.broadcast_to(array.reshape(-1), (count,))


def _scales(name: str, value: object, count: int) -> Array:
    """Return scales in float64; raise ProblemError for others than `Scaling` allows."""
    scales = _numbers(name, value, count).astype(np.float64)
    wrong = scales[~((scales >= LEAST_SCALE) & (scales <= MOST_SCALE))]  # NaN, too
    if wrong.size:
        raise ProblemError(name, float(wrong[0]), "must be from 2**-60 to 2**40")
    return scales


def _zero_points(name: str, value: object, dtype: str, count: int) -> Array:
    """Return zero points in int64; raise ProblemError for others than `Scaling` allows for a stored `dtype`."""
    numbers = _numbers(name, value, count)
    with np.errstate(invalid="ignore"):  # NaN and what is too large are no integers
        zero = numbers.astype(np.int64)
    if not np.array_equal(zero, numbers):
        raise ProblemError(name, value, "must be integers")
    least, most = 0, 0
    if name == "filter_zero_point" and dtype == "int8":
        rule = "must be 0 for an int8 filter; one with others is a uint8 filter, all of it and them 128 more"
    elif dtype in STORED:
        least, most = int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
        rule = f"must be from {least} to {most}, the range of {dtype}"
    else:
        rule = f"must be 0 where it is {dtype}"
    wrong = zero[(zero < least) | (zero > most)]
    if wrong.size:
        raise ProblemError(name, int(wrong[0]), rule)
    return zero
