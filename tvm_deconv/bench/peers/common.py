"""What the peers share: a task, a layer that is ready to run, turns, and arrays as packages take them."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np

from tvm_deconv.compiler.process import Refusal
from tvm_deconv.problem import Array, Problem
from tvm_deconv.problem.testing import Operands, operands

#: A call that takes longer than this leaves nothing to warm up, and counts from the first on.
_LONG_SECONDS = 0.3
_MOST_TIMES = 40


class Unsupported(Refusal):
    """A layer that a package cannot express."""


@dataclass(frozen=True)
class Task:
    """One layer to run: `artifact` is the name of ours in the directory `root`, `seed` is that of the arrays."""

    problem: Problem
    seed: int
    root: Path
    artifact: str

    @property
    def operands(self) -> Operands:
        """The arrays, the same in every process.

        Data of uint8 have the zero point 0, as behind a ReLU: some packages then compute with fewer operators.
        """
        arrays = operands(self.problem, self.seed)
        if arrays.scaling is None or self.problem.dtype != "uint8":
            return arrays
        return arrays._replace(scaling=dataclasses.replace(arrays.scaling, data_zero_point=0))


class Prepared(NamedTuple):
    """A layer that is ready to `run`; `output` returns the last result in the problem's format, `note` says how."""

    run: Callable[[], object]
    output: Callable[[], Array]
    note: str = ""


Prepare: TypeAlias = Callable[[Task, Operands, int], Prepared]


class Turn(NamedTuple):
    """Calls one after the other, after one that is not counted: their median in seconds, and their number.

    `times` are those of all calls, or quantiles that stand for them if there are many. The whole took `wall` seconds,
    of which the process had a CPU for `cpu`, all threads together; it was put off its CPU `preempted` times.
    """

    median: float
    calls: int
    wall: float = 0.0
    cpu: float = 0.0
    preempted: int = 0
    times: tuple[float, ...] = ()


def turn(run: Callable[[], object], seconds: float) -> Turn:
    """Call `run` for `seconds`, at least once, after one call that is not counted unless it is long."""
    clock = time.perf_counter
    start = clock()
    run()
    first = clock() - start
    if first > _LONG_SECONDS:
        return Turn(first, 1, times=(first,))
    times = []
    end = clock() + seconds
    while True:
        start = clock()
        run()
        stop = clock()
        times.append(stop - start)
        if stop >= end:
            return Turn(statistics.median(times), len(times), times=_representatives(times))


def _representatives(times: list[float]) -> tuple[float, ...]:
    """Return at most `_MOST_TIMES` of the times, evenly from the least to the largest."""
    count = min(len(times), _MOST_TIMES)
    return tuple(np.quantile(times, [(place + 0.5) / count for place in range(count)]).tolist())


def channels_first(problem: Problem, array: Array) -> Array:
    """Return data of the problem as ``[N, C, *X]``."""
    return np.ascontiguousarray(np.moveaxis(array, -1, 1)) if problem.data_format == "NXC" else array


def as_asked(problem: Problem, output: Array) -> Array:
    """Return an output ``[N, C, *X]`` in the problem's format."""
    return np.moveaxis(output, 1, -1) if problem.data_format == "NXC" else output


def weights(problem: Problem, arrays: Operands) -> Array:
    """Return the filter as ``[Cin, Cout/G, *K]``, which ONNX and PyTorch take."""
    shape = (problem.groups * problem.in_channels, problem.out_channels, *problem.kernel)
    return np.ascontiguousarray(problem.canonical_filter(arrays.filter).reshape(shape))


def beyond(problem: Problem) -> list[int]:
    """Return how many positions the uncropped output has behind ours, per axis; negative if ours is longer."""
    axes = zip(problem.uncropped_spatial, problem.pads_begin, problem.output_spatial, strict=True)
    return [uncropped - begin - extent for uncropped, begin, extent in axes]


def as_plane(problem: Problem, arrays: Operands) -> tuple[Problem, Operands]:
    """Return a problem of one axis as one of two, of which the first has one position; others as they are."""
    if problem.rank > 1:
        return problem, arrays
    ones = dict.fromkeys(("data_spatial", "kernel", "strides", "dilations", "output_spatial"), 1) | {"pads_begin": 0}
    axes = {name: (first, *getattr(problem, name)) for name, first in ones.items()}
    plane = problem.replace(**axes, buckets=(), filter_format="GIOX")
    filter = problem.canonical_filter(arrays.filter)
    shape = (*filter.shape[:3], *plane.kernel)
    return plane, Operands(arrays.data.reshape(plane.data_shape), filter.reshape(shape), arrays.bias)


def in_onnx(problem: Problem) -> None:
    """Refuse what no ONNX model says: integers that are not quantized, and what is quantized by groups."""
    if not problem.quantization:
        floating(problem)
    elif problem.groups > 1:
        raise Unsupported("no scales of the channels of several groups")
    elif problem.output_dtype == "int32":
        raise Unsupported("no sums of a quantized layer")


def floating(problem: Problem) -> None:
    """Refuse integers."""
    if problem.accumulate_dtype == "int32":
        raise Unsupported(f"no transposed convolution of {problem.dtype}")


def single(problem: Problem) -> None:
    """Refuse all types but float32."""
    if problem.dtype != "float32":
        raise Unsupported(f"no transposed convolution of {problem.dtype}, or one in float32")
