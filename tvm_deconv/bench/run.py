"""Interleaved runs of the contenders: one process each, one at a time, on the same CPUs and the same data.

In every round each contender has one turn of some tens of milliseconds. The median of its turns is its time and their
quartiles are its spread. So a disturbance of the machine disturbs all of them. A process that waits is stopped: threads
that spin while they wait for work would take the CPU from the contender that has the turn.
"""

from __future__ import annotations

import contextlib
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tvm_deconv.artifact.files import temporary_folder
from tvm_deconv.bench.floors import FMA_DTYPES, Floors, beyond_caches, build_fma, cpu_times, stolen_share
from tvm_deconv.bench.layers import Layer
from tvm_deconv.bench.peers import DEFAULT, OURS, OWN, SINGLE, Contender, Task, Turn
from tvm_deconv.bench.results import Report, Result, Row
from tvm_deconv.compiler.process import Worker, WorkerError
from tvm_deconv.errors import BuildError, ProblemError
from tvm_deconv.problem import Problem
from tvm_deconv.problem.reference import reference
from tvm_deconv.problem.testing import parts
from tvm_deconv.targets import CpuTarget, detect_host, native
from tvm_deconv.targets.ancestry import name_of

ROUNDS = 11
TURN_SECONDS = 0.03
#: The rounds of a layer end after this long, but not before the third.
LAYER_SECONDS = 8.0
_LEAST_TURNS = 3
_PATIENCE_SECONDS = 120.0  # with one answer of a contender
# A peer has no further turns if its best one is so much slower than another peer's, in the first rounds and later.
_HOPELESS, _BEATEN = 10.0, 2.0


def cpus_for(threads: int | None) -> tuple[int, ...]:
    """Return `threads` CPUs to run on, one of each core first; None stands for as many as this process has cores.

    Raises ProblemError if this process may not use that many CPUs.
    """
    by_core: dict[str, list[int]] = {}
    for cpu in sorted(os.sched_getaffinity(0)):
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        core = str(cpu)
        with contextlib.suppress(OSError):
            core = siblings.read_text().strip()
        by_core.setdefault(core, []).append(cpu)
    ordered = sorted((place, cpu) for siblings in by_core.values() for place, cpu in enumerate(siblings))
    count = len(by_core) if threads is None else threads
    if not 1 <= count <= len(ordered):
        raise ProblemError("threads", count, f"must be from 1 to {len(ordered)}, the CPUs that this process may use")
    return tuple(cpu for _, cpu in ordered[:count])


def worker(name: str, cpus: Sequence[int]) -> Worker:
    """Return the process of a contender on `cpus`; it is stopped except while it answers."""
    threads = str(len(cpus))
    environment = {f"{library}_NUM_THREADS": threads for library in ("OMP", "MKL", "OPENBLAS")}
    return Worker(Contender, name, len(cpus), cpus=cpus, environment=environment, paused=True)


class _FloorMeasurement:
    """The floors, each the best of several measurements, since other work on the machine can only lower them."""

    def __init__(self, process: Worker, target: CpuTarget, directory: Path) -> None:
        self._process = process
        self._kernels: dict[str, Path] = {}
        self._fma: dict[str, float] = {}
        self._copy = 0.0
        self._why = ""
        try:
            self._kernels = {dtype: build_fma(target, dtype, directory) for dtype in FMA_DTYPES}
        except BuildError as error:
            self._why = f"no rate of multiply-adds: {error}"

    def measure(self) -> Floors:
        """Measure once more and return the best so far."""
        for dtype, kernel in self._kernels.items():
            self._fma[dtype] = max(self._fma.get(dtype, 0.0), self._process.ask("fma", kernel))
        self._copy = max(self._copy, self._process.ask("copy", beyond_caches()))
        return Floors(dict(self._fma), self._copy, self._why)


def run(
    layers: Sequence[Layer],
    peers: Sequence[str] = (),
    *,
    threads: int | None = None,
    rounds: int = ROUNDS,
    layer_seconds: float = LAYER_SECONDS,
    on_row: Callable[[Row], None] | None = None,
) -> Report:
    """Time `layers` by our artifacts and by `peers`, on `threads` CPUs, by default one per core.

    Calls `on_row` with each layer that is done. Raises ProblemError, and WorkerError if not even our process starts.
    """
    cpus = cpus_for(threads)
    ours = [DEFAULT] if any(layer.default not in (None, layer.task) for layer in layers) else []
    ours += [OURS, SINGLE] if any(layer.single for layer in layers) else [OURS]
    with contextlib.ExitStack() as stack:
        workers = {name: stack.enter_context(worker(name, cpus)) for name in (*ours, *peers)}
        versions = {name: workers[name].ask("version") for name in workers}
        scratch = stack.enter_context(temporary_folder())
        machine = _FloorMeasurement(stack.enter_context(worker(OURS, cpus)), native(), scratch)
        machine.measure()
        before = cpu_times(cpus)
        rows = []
        for layer in layers:
            race = _Race(layer, workers, len(cpus))
            race.prepare()
            race.run(rounds, layer_seconds)
            rows.append(Row(layer, race.results()))
            if on_row:
                on_row(rows[-1])
        stolen = stolen_share(before, cpu_times(cpus))
        floors = machine.measure()
    host = detect_host()
    name = name_of(host) or "unknown"
    return Report(host, name, len(cpus), cpus, rounds, floors, versions, rows, stolen)


class _Race:
    """The contenders on one layer. One that fails has no further part in it."""

    def __init__(self, layer: Layer, workers: Mapping[str, Worker], threads: int) -> None:
        self._threads = threads
        self._tasks: dict[str, Task] = dict.fromkeys(workers, layer.task)
        if DEFAULT in workers:
            del self._tasks[DEFAULT]
            if layer.default not in (None, layer.task):
                self._tasks = {DEFAULT: layer.default, **self._tasks}
        if SINGLE in workers:
            del self._tasks[SINGLE]
            if layer.single:
                self._tasks[SINGLE] = layer.single
        self._workers = workers
        self._failures: dict[str, str] = {}
        self._notes: dict[str, str] = {}
        self._deviations: dict[str, Any] = {}
        self._turns: dict[str, list[Turn]] = {name: [] for name in self._tasks}

    def _ask(self, name: str, method: str, *arguments: object) -> Any:
        try:
            return self._workers[name].ask(method, *arguments, timeout=_PATIENCE_SECONDS)
        except WorkerError as error:
            self._failures[name] = str(error)
            return None

    @property
    def _running(self) -> list[str]:
        return [name for name in self._tasks if name not in self._failures]

    def prepare(self) -> None:
        """Make the layer ready everywhere, and compare the outputs with the reference."""
        self._notes = {name: self._ask(name, "prepare", task) for name, task in self._tasks.items()}
        with temporary_folder() as folder:
            expected: dict[Problem, Path] = {}
            for name in self._running:
                task = self._tasks[name]
                if task.problem not in expected:
                    expected[task.problem] = folder / f"expected{len(expected)}.npy"
                    _write_expected(expected[task.problem], task)
                self._deviations[name] = self._ask(name, "check", expected[task.problem])

    def run(self, rounds: int, layer_seconds: float) -> None:
        """Give each contender a turn in every round, until `layer_seconds` are over."""
        end = time.monotonic() + layer_seconds
        for number in range(rounds):
            if number >= _LEAST_TURNS and time.monotonic() > end:
                break
            for name in self._running:
                if number == 0 or not self._is_beaten(name, _HOPELESS if number < _LEAST_TURNS else _BEATEN):
                    taken = self._ask(name, "turn", TURN_SECONDS)
                    if taken is not None:
                        self._turns[name].append(taken)

    def _is_beaten(self, name: str, factor: float) -> bool:
        """Return whether a peer is slower than another by more than `factor`; ours never are."""
        right = [other for other in self._running if other not in OWN and self._deviations[other].allowed]
        best = {other: min(turn.median for turn in self._turns[other]) for other in {name, *right}}
        return name not in OWN and best[name] > factor * min(best.values())

    def results(self) -> dict[str, Result]:
        """Return each contender's result."""
        return {name: self._result(name) for name in self._tasks}

    def _result(self, name: str) -> Result:
        if name in self._failures:
            return Result(failure=self._failures[name])
        turns = self._turns[name]
        medians = [turn.median for turn in turns]
        low, high = np.quantile(medians, (0.25, 0.75))
        first, last = np.quantile([time for turn in turns for time in turn.times], (0.05, 0.95))
        middle = statistics.median(medians)
        wall, cpu = sum(turn.wall for turn in turns), sum(turn.cpu for turn in turns)
        return Result(
            middle,
            (float(low), float(high)),
            len(turns),
            self._deviations[name],
            self._notes[name],
            # Of several threads some may have nothing to do.
            waited=max(1 - cpu / wall, 0.0) if self._threads == 1 else math.nan,
            preempted=sum(turn.preempted for turn in turns) / wall,
            percentiles=(float(first), float(last)),
        )


def _write_expected(path: Path, task: Task) -> None:
    """Write the reference's output of a task to an array file, a part at a time."""
    problem = task.problem
    expected = np.lib.format.open_memmap(path, "w+", np.float64, problem.output_shape)
    for part in parts(problem, task.operands):
        expected[part.slices] = reference(part.problem, *part.operands)
    expected.flush()
