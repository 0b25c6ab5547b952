"""Interleaved runs of the contenders: one process each, one at a time, on the same CPUs and the same data.

In every round each contender has one turn of some tens of milliseconds. The median of its turns is its time and their
quartiles are its spread. So a disturbance of the machine disturbs all of them. A process that waits is stopped: threads
that spin while they wait for work would take the CPU from the contender that has the turn.
"""

from __future__ import annotations

import contextlib
import datetime
import math
import os
import platform
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tvm_deconv.artifact.manifest import Manifest
from tvm_deconv.artifact.select import Accepted
from tvm_deconv.bench.floors import FMA_DTYPES, Floors, beyond_caches, build_fma
from tvm_deconv.bench.peers import OURS, Contender, Task, Turn
from tvm_deconv.compiler.process import Worker, WorkerError
from tvm_deconv.errors import BuildError, NoArtifactError, ProblemError
from tvm_deconv.problem import Problem
from tvm_deconv.problem.reference import reference
from tvm_deconv.problem.testing import Deviation, operands, parts
from tvm_deconv.runtime.library import Library
from tvm_deconv.runtime.verify import decide
from tvm_deconv.targets import CpuTarget, Host, detect_host, native

ROUNDS = 11
TURN_SECONDS = 0.03
# A contender has no more turns after this long in all for a layer, but at least three.
_ENOUGH_SECONDS = 10.0
_LEAST_TURNS = 3
_SEED = 20


@dataclass(frozen=True)
class Layer:
    """A layer to time: its name, and the artifact that serves it."""

    name: str
    task: Task
    target: str


@dataclass(frozen=True)
class Result:
    """One contender on one layer: seconds per call, or the `failure` why there are none."""

    median: float = math.nan
    quartiles: tuple[float, float] = (math.nan, math.nan)
    turns: int = 0
    deviation: Deviation | None = None
    note: str = ""
    failure: str = ""

    @property
    def correct(self) -> bool:
        """Whether the contender ran and its output is right."""
        return self.deviation is not None and self.deviation.allowed

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles, as a part of the median."""
        return (self.quartiles[1] - self.quartiles[0]) / (2 * self.median)


@dataclass(frozen=True)
class Row:
    """All contenders on one layer; the keys of `results` are their names."""

    layer: Layer
    results: Mapping[str, Result]

    @property
    def ours(self) -> Result:
        """Our own result."""
        return self.results[OURS]

    @property
    def best_peer(self) -> str | None:
        """The fastest of the other contenders whose output is right, None if there is none."""
        times = {name: result.median for name, result in self.results.items() if name != OURS and result.correct}
        return min(times, key=times.__getitem__, default=None)

    @property
    def ratio(self) -> float | None:
        """The best peer's time divided by ours: above 1 we are faster."""
        best = self.best_peer
        return None if best is None or not self.ours.correct else self.results[best].median / self.ours.median


@dataclass(frozen=True)
class Report:
    """The rows and the conditions they were measured under; `versions` maps each contender to its version."""

    host: Host
    threads: int
    cpus: tuple[int, ...]
    rounds: int
    floors: Floors
    versions: Mapping[str, str]
    rows: Sequence[Row]
    python: str = field(default_factory=platform.python_version)
    date: str = field(default_factory=lambda: datetime.date.today().isoformat())

    @property
    def geometric_mean(self) -> float | None:
        """The geometric mean of the ratios, None if there is no ratio."""
        ratios = [row.ratio for row in self.rows if row.ratio is not None]
        return statistics.geometric_mean(ratios) if ratios else None

    @property
    def worst(self) -> Row | None:
        """The row with the least ratio."""
        compared = [row for row in self.rows if row.ratio is not None]
        return min(compared, key=lambda row: row.ratio or math.inf, default=None)


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
    turn_seconds: float = TURN_SECONDS,
    on_row: Callable[[Row], None] | None = None,
) -> Report:
    """Time `layers` by our artifacts and by `peers`, on `threads` CPUs, by default one per core.

    Calls `on_row` with each layer that is done. Raises ProblemError, and WorkerError if not even our process starts.
    """
    cpus = cpus_for(threads)
    names = (OURS, *peers)
    with contextlib.ExitStack() as stack:
        workers = {name: stack.enter_context(worker(name, cpus)) for name in names}
        versions = {name: workers[name].ask("version") for name in names}
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        machine = _FloorMeasurement(stack.enter_context(worker(OURS, cpus)), native(), scratch)
        machine.measure()
        rows = []
        for layer in layers:
            row = Row(layer, dict(_one_layer(layer, workers, rounds, turn_seconds)))
            rows.append(row)
            if on_row:
                on_row(row)
        floors = machine.measure()
    return Report(detect_host(), len(cpus), cpus, rounds, floors, versions, rows)


def _one_layer(
    layer: Layer, workers: Mapping[str, Worker], rounds: int, turn_seconds: float
) -> Iterator[tuple[str, Result]]:
    """Yield each contender's name and result, in the order of `workers`."""
    failures: dict[str, str] = {}

    def ask(name: str, method: str, *arguments: object) -> Any:
        try:
            return workers[name].ask(method, *arguments)
        except WorkerError as error:
            failures[name] = str(error)
            return None

    notes = {name: ask(name, "prepare", layer.task) for name in workers}
    deviations = {}
    with tempfile.TemporaryDirectory() as directory:
        expected = Path(directory) / "expected.npy"
        _write_expected(expected, layer.task.problem, layer.task.seed)
        for name in workers:
            if name not in failures:
                deviations[name] = ask(name, "check", expected)
    turns: dict[str, list[Turn]] = {name: [] for name in workers}
    for _ in range(rounds):
        for name, had in turns.items():
            spent = sum(turn.median * (turn.calls + 1) for turn in had)
            if name not in failures and (len(had) < _LEAST_TURNS or spent < _ENOUGH_SECONDS):
                taken = ask(name, "turn", turn_seconds)
                if taken is not None:
                    had.append(taken)
    for name, had in turns.items():
        if name in failures:
            yield name, Result(failure=failures[name])
        else:
            medians = [turn.median for turn in had]
            low, high = np.quantile(medians, (0.25, 0.75))
            middle = statistics.median(medians)
            yield name, Result(middle, (float(low), float(high)), len(had), deviations[name], notes[name])


def _write_expected(path: Path, problem: Problem, seed: int) -> None:
    """Write the reference's output to an array file, a part at a time."""
    expected = np.lib.format.open_memmap(path, "w+", np.float64, problem.output_shape)
    for part in parts(problem, operands(problem, seed)):
        expected[part.slices] = reference(part.problem, *part.operands)
    expected.flush()


def layers_in(library: Library) -> list[Layer]:
    """Return the artifacts of `library` that this machine runs, each as a layer."""
    layers = []
    for manifest in library.manifests:
        if isinstance(decide(library, manifest), Accepted):
            name = ", ".join(manifest.layers) or manifest.name
            layers.append(Layer(name, _task(library, manifest.parsed, manifest), manifest.target))
    return layers


def layers_of(problems: Mapping[Problem, Sequence[str]], library: Library) -> list[Layer]:
    """Return `problems`, with the names of their layers, each on the artifact that `library` selects.

    Raises NoArtifactError.
    """
    layers = []
    for problem, names in problems.items():
        best = library.select(problem)[0]
        if not isinstance(best, Accepted):
            raise NoArtifactError(problem.artifact_key, [best])
        layers.append(Layer(", ".join(names), _task(library, problem, best.manifest), best.manifest.target))
    return layers


def _task(library: Library, problem: Problem, manifest: Manifest) -> Task:
    return Task(problem, _SEED, library.root.absolute(), manifest.name)
