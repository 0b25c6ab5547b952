"""The harness checks and times the candidates of one problem on a machine, in a process that may be lost.

A candidate may crash, hang or write where it should not. Its process loads what the builders linked, with the launcher
as in an artifact, and needs neither TVM nor much time to start.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tvm_deconv.problem import Array, Problem
from tvm_deconv.problem.arrays import empty, numpy_dtype, storage
from tvm_deconv.problem.testing import deviation, operands
from tvm_deconv.targets import Host
from tvm_deconv.tuning.builders import Built
from tvm_deconv.tuning.runners.machine import Bound, Machine

_LEAST_RUNS = 3
_MOST_RUNS = 50
_SAMPLE_SECONDS = 2e-4  # shorter calls are timed several at a time
_MEASURE_SECONDS = 0.03  # enough for one candidate if it is fast
_HOPELESS = 1.3  # a candidate this many times slower than the best has had its chance after the least number of runs


@dataclass(frozen=True)
class Measured:
    """Seconds per call: the median of `runs`, and half the distance between the quartiles as a part of it.

    `waited` is the share of the time in which the calls had no CPU, None if that is not known.
    """

    seconds: float
    spread: float
    runs: int
    waited: float | None = None


@dataclass(frozen=True)
class Baseline:
    """A problem by its key, the seed of its arrays, and its default kernel, whose output candidates must match."""

    key: str
    seed: int
    reference: Built


class Harness:
    """Checks and times candidates of one problem at a time on the machine `make_machine(*arguments)`."""

    def __init__(self, make_machine: Callable[..., Machine], *arguments: object) -> None:
        self._machine = make_machine(*arguments)
        self._problem: Problem | None = None
        self._packed: dict[Path, Any] = {}

    def host(self) -> Host:
        """Describe the machine that candidates run on."""
        return self._machine.host()

    def multiply_adds(self, dtype: str, kernel: Path | None, timeout: float) -> float:
        """Return the multiply-adds per second of the machine."""
        with self._machine.attempt(timeout):
            return self._machine.multiply_adds(dtype, kernel)

    def copy(self, timeout: float) -> float:
        """Measure the bytes per second that the machine copies."""
        with self._machine.attempt(timeout):
            return self._machine.copy()

    def prepare(self, baseline: Baseline, timeout: float) -> None:
        """Turn to the problem of `baseline`, and keep the output of its reference to check others against."""
        self._problem = problem = Problem.from_key(baseline.key)
        arrays = operands(problem, baseline.seed)
        filter = np.ascontiguousarray(problem.canonical_filter(arrays.filter))
        self._poison = 0x80 if numpy_dtype(problem.output_dtype).kind in "iu" else 0xFF  # which is NaN
        self._packed = {}
        with self._machine.attempt(timeout):
            self._filter = self._machine.put(filter.view(storage(problem.dtype)))
            others = [np.ascontiguousarray(arrays.data).view(storage(problem.dtype))]
            others += [] if arrays.bias is None else [arrays.bias]
            self._data, *self._bias = (self._machine.put(array) for array in others)
            self._out = self._machine.output(problem.output_shape, storage(problem.output_dtype))
            self._bind(baseline.reference).run()
            self._expected = self._read().astype(np.float64)

    def measure(self, built: Built, best: float, timeout: float) -> Measured:
        """Run a candidate, check its output, and time it; `best` is the least time so far in seconds.

        Raises ArithmeticError if the output is wrong.
        """
        problem = self._problem
        assert problem is not None
        with self._machine.attempt(timeout):
            bound = self._bind(built)
            self._out.poison(self._poison)
            bound.run()
            if not self._out.intact(self._poison):
                raise ArithmeticError("wrote outside of its output")
            difference = deviation(problem, self._read(), self._expected)
            if not difference.allowed:
                raise ArithmeticError(f"differs from the default by {difference.largest:.1e} of its largest element")
            return dataclasses.replace(timed(bound.sample, best), waited=bound.waited())

    def _read(self) -> Array:
        assert self._problem is not None
        return self._out.read().view(numpy_dtype(self._problem.output_dtype))

    def _bind(self, built: Built) -> Bound:
        problem = self._problem
        assert problem is not None
        if built.pack not in self._packed:
            packed = self._machine.put(empty((built.packed_elements,), np.dtype(built.packed_dtype)))
            self._machine.bind(built.pack, "pack", (self._filter, packed)).run()
            self._packed[built.pack] = packed
        elements = built.workspace_elements
        workspace = [self._machine.put(np.empty(elements, problem.accumulate_dtype))] if elements else []
        arguments = (self._data, self._packed[built.pack], *self._bias, *workspace, self._out.argument)
        return self._machine.bind(built.deconv, "deconv", arguments)


def timed(sample: Callable[[int, int], Sequence[float]], best: float) -> Measured:
    """Take samples with `Bound.sample`: at least three, and more the shorter they are unless `best` is out of reach."""
    (once,) = sample(1, 1)
    inner = max(1, min(1000, int(_SAMPLE_SECONDS / max(once, 1e-7))))
    samples = list(sample(inner, _LEAST_RUNS))
    shortest = min(samples)
    enough = min(_MOST_RUNS, math.ceil(_MEASURE_SECONDS / (inner * max(shortest, 1e-9))))
    if shortest <= _HOPELESS * best and enough > _LEAST_RUNS:
        samples += sample(inner, enough - _LEAST_RUNS)
    return Measured(statistics.median(samples), _spread(samples), len(samples) * inner)


def _spread(samples: Sequence[float]) -> float:
    low, middle, high = np.quantile(samples, (0.25, 0.5, 0.75))
    return float((high - low) / (2 * middle))
