"""The harness checks and times the candidates of one problem on a machine, in a process that may be lost.

A candidate may crash, hang or write where it should not. Its process loads what the builders linked, with the launcher
as in an artifact, and needs neither TVM nor much time to start.
"""

from __future__ import annotations

import dataclasses
import datetime
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tvm_deconv.problem import Array, Problem
from tvm_deconv.problem.arrays import empty_lines, numpy_dtype, storage
from tvm_deconv.problem.quantization import bound_arrays
from tvm_deconv.problem.testing import deviation, operands
from tvm_deconv.targets import Host
from tvm_deconv.tuning.builders import Built
from tvm_deconv.tuning.runners.machine import Bound, Machine

_TURNS = 3
_MOST_RUNS = 50  # of a turn
_SAMPLE_SECONDS = 2e-4  # shorter calls are timed several at a time
_TURN_SECONDS = 0.005
_LAST_TURN_SECONDS = 0.03  # of a turn that decides, as long as one of the benchmark
_HOPELESS = 1.3  # a candidate this many times slower than the best has had its chance after one short turn
_VERY_SLOW = 0.1  # by the reference: one such call may be enough
_SLOW_HOPELESS = 1.15  # for it
_Sample = Callable[[int, int], Sequence[float]]
#: The times of a candidate, and of the reference behind it.
_Turn = tuple[Sequence[float], Sequence[float]]


@dataclass(frozen=True)
class Measured:
    """The time of a call by that of the reference, in turns with it, and the seconds of the reference meanwhile.

    There were `runs` calls. Half the distance between the quartiles is `spread`, as a part of the median. `waited` is
    the share of the time in which the calls had no CPU, None if that is not known.
    """

    ratio: float
    reference: float
    spread: float
    runs: int
    waited: float | None = None

    @property
    def seconds(self) -> float:
        """The time of a call: the ratio, of the time that the reference takes."""
        return self.ratio * self.reference


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
        self._checked: set[Path] = set()

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
        canonical = problem.canonical_filter(arrays.filter)
        filter, last = bound_arrays(problem, canonical, arrays.bias, arrays.scaling)
        self._poison = 0x80 if numpy_dtype(problem.output_dtype).kind in "iu" else 0xFF  # which is NaN
        self._packed = {}
        self._checked = set()
        with self._machine.attempt(timeout):
            self._filter = self._machine.put(_bits(np.ascontiguousarray(filter)))
            others = [_bits(np.ascontiguousarray(arrays.data)), *([] if last is None else [last])]
            self._data, *self._bias = (self._machine.put(array) for array in others)
            self._out = self._machine.output(problem.output_shape, storage(problem.output_dtype))
            self._reference = self._bind(baseline.reference)
            self._default = baseline.reference.deconv
            self._call(self._reference)
            # Differences of float32 are as good in float32, and take a quarter of the time.
            exact = np.float32 if problem.output_dtype == "float32" else np.float64
            self._expected = self._read().astype(exact)

    def measure(self, built: Built, best: float, timeout: float) -> Measured:
        """Run a candidate and time it in turns with the reference; `best` is the least ratio so far.

        The output of its first run is checked. One that comes again has a single turn, as finalists come several times.
        The reference itself has one, too, and the ratio 1. Raises ArithmeticError if the output is wrong.
        """
        with self._machine.attempt(timeout):
            if built.deconv == self._default:
                return dataclasses.replace(alone(self._reference.sample), waited=self._reference.waited())
            bound = self._bind(built)
            again = built.deconv in self._checked
            first = None if again else self._check(bound)
            self._checked.add(built.deconv)
            measured = raced(bound.sample, self._reference.sample, best, first=first, again=again)
            return dataclasses.replace(measured, waited=bound.waited())

    def _check(self, bound: Bound) -> float | None:
        """Call a candidate, and look at its output; return the time of the call if that is known."""
        assert self._problem is not None
        seconds = self._call(bound)
        difference = deviation(self._problem, self._read(), self._expected)
        if not difference.allowed:
            raise ArithmeticError(f"differs from the default by {difference.largest:.1e} of its largest element")
        return seconds

    def _call(self, bound: Bound) -> float | None:
        """Call a function for the first time; return the time of the call if that is known."""
        self._out.poison(self._poison)
        seconds = bound.run()
        if not self._out.intact(self._poison):
            raise ArithmeticError("wrote outside of its output")
        return seconds

    def _read(self) -> Array:
        assert self._problem is not None
        return self._out.read().view(numpy_dtype(self._problem.output_dtype))

    def _bind(self, built: Built) -> Bound:
        problem = self._problem
        assert problem is not None
        if built.pack not in self._packed:
            packed = self._machine.put(empty_lines((built.packed_elements,), np.dtype(built.packed_dtype)))
            self._machine.bind(built.pack, "pack", (self._filter, packed)).run()
            self._packed[built.pack] = packed
        arguments = (self._data, self._packed[built.pack], *self._bias, *self._workspace(built), self._out.argument)
        return self._machine.bind(built.deconv, "deconv", arguments)

    def _workspace(self, built: Built) -> list[Any]:
        """Return the workspace that "deconv" takes, if it takes one: poisoned, so that no call waits for its pages."""
        if not built.workspace_elements:
            return []
        assert self._problem is not None
        workspace = np.empty(built.workspace_elements, self._problem.accumulate_dtype)
        workspace.view(np.uint8).fill(0xFF)
        return [self._machine.put(workspace)]


def now() -> str:
    """Return the time in UTC, in ISO form, as records of measurements have it."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="milliseconds")


def _bits(array: Array) -> Array:
    """Return `array` in the form in which it crosses to kernels."""
    return array.view(storage(array.dtype.name))


def raced(
    sample: _Sample, reference: _Sample, best: float, *, first: float | None = None, again: bool = False
) -> Measured:
    """Let a candidate take turns with the reference, both by their `Bound.sample`.

    Other programs slow a machine down for longer than a turn takes, and so both alike. The first turns are short. Those
    behind them last long enough, unless `best` is out of reach. What is measured `again` has one long turn, in which a
    call does not pay for what the other has left in the caches. Slow calls have two turns of one call; very slow ones
    that are out of reach or come again have one. `first` is the time of a call that is over.
    """
    racers = _Racer(sample, first), _Racer(reference)
    turns = (_slow_turns if racers[0].is_slow(again) else _turns)(racers, best, again)
    ratios = [statistics.median(own) / statistics.median(others) for own, others in turns]
    relative = [time / statistics.median(others) for own, others in turns for time in own]
    runs = racers[0].calls * len(relative)
    middle = statistics.median(statistics.median(others) for _, others in turns)
    return Measured(statistics.median(ratios), middle, _spread(relative), runs)


def alone(sample: _Sample) -> Measured:
    """Time the reference, which is as fast as itself."""
    racer = _Racer(sample)
    times = racer.first if racer.is_slow(again=True) else racer.turn(_LAST_TURN_SECONDS)
    return Measured(1.0, statistics.median(times), _spread(times), racer.calls * len(times))


def _turns(racers: tuple[_Racer, _Racer], best: float, again: bool) -> list[_Turn]:
    if again:
        return [_turn(racers, _LAST_TURN_SECONDS)]
    first = _turn(racers, 0.0)
    if _is_behind(first, _HOPELESS * best):
        return [first, *(_turn(racers, 0.0) for _ in range(_TURNS))]
    return [_turn(racers, _TURN_SECONDS) for _ in range(_TURNS)]


def _slow_turns(racers: tuple[_Racer, _Racer], best: float, again: bool) -> list[_Turn]:
    first = racers[0].first, racers[1].first
    very_slow = racers[1].first[0] > _VERY_SLOW
    return [first] if very_slow and (again or _is_behind(first, _SLOW_HOPELESS * best)) else [first, _turn(racers, 0.0)]


def _turn(racers: tuple[_Racer, _Racer], seconds: float) -> _Turn:
    return racers[0].turn(seconds), racers[1].turn(seconds)


def _is_behind(turn: _Turn, ratio: float) -> bool:
    """Return whether a candidate took more than `ratio` times as long as the reference."""
    own, others = turn
    return statistics.median(own) > ratio * statistics.median(others)


class _Racer:
    """A function that takes turns after its `first` call; short calls are timed several at a time."""

    def __init__(self, sample: _Sample, first: float | None = None) -> None:
        self.first = sample(1, 1) if first is None else [first]
        (self._seconds,) = self.first
        self.calls = max(1, min(1000, int(_SAMPLE_SECONDS / max(self._seconds, 1e-7))))
        self._sample = sample

    def is_slow(self, again: bool) -> bool:
        """Return whether a call is a turn, since it is as long as one, or as two short ones."""
        return self.first[0] > (_LAST_TURN_SECONDS if again else 2 * _TURN_SECONDS)

    def turn(self, seconds: float) -> Sequence[float]:
        """Return the times of a turn of so many `seconds`. The first, when caches change hands, counts only alone."""
        number = min(_MOST_RUNS, math.ceil(seconds / (self.calls * max(self._seconds, 1e-9))))
        times = self._sample(self.calls, number + 1 if number > 1 else 1)
        self._seconds = min(times)
        return times[1:] or times


def _spread(samples: Sequence[float]) -> float:
    low, middle, high = np.quantile(samples, (0.25, 0.5, 0.75))
    return float((high - low) / (2 * middle))
