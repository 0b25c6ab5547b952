"""Rounds of trials on one target: compile candidates, measure them, and write every result to the log."""

from __future__ import annotations

import contextlib
import importlib.metadata
import math
import os
import subprocess
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tvm_deconv.artifact.files import temporary_folder
from tvm_deconv.compiler.fingerprint import kernel_digest
from tvm_deconv.compiler.process import WorkerError
from tvm_deconv.compiler.records import Conditions, Cpu, Log, Record, Schedule
from tvm_deconv.compiler.requests import checked_jobs
from tvm_deconv.problem import Problem
from tvm_deconv.targets import Target
from tvm_deconv.tuning.builders import BuilderPool, Built
from tvm_deconv.tuning.disturbance import Disturbance
from tvm_deconv.tuning.runners.base import BrokenDefaultError, Runner
from tvm_deconv.tuning.runners.harness import Baseline, Measured, now
from tvm_deconv.tuning.search import Search

_RATE_SECONDS = 120.0  # for measuring one rate of the machine
_ROUND = 6  # a last build that others wait for is a smaller part of a larger round
_LONGEST = 50  # a candidate may take this many times as long as the fastest, if that is more than the timeout


class Proposals(NamedTuple):
    """Schedules that a search proposes for a round."""

    search: Search
    schedules: Sequence[Schedule]


class Evaluator:
    """Compiles candidates for `target`, has `runner` measure them, and keeps the results in `log`.

    `jobs` processes compile, by default as many as there are CPUs. A candidate has `timeout` seconds.
    """

    def __init__(
        self, target: Target, runner: Runner, log: Log, *, seed: int, jobs: int | None, timeout: float
    ) -> None:
        self.target = target
        self.log = log
        self._cpu = Cpu.of(runner.host)
        self.conditions = Conditions(str(self._cpu), runner.threads, kernel_digest(target.backend))
        self._runner = runner
        self._seed = seed
        self._timeout = timeout
        self._rates: dict[str, float] = {}
        self._copy_rate = 0.0
        self._baselines: dict[str, Baseline] = {}
        self._default_seconds: dict[str, float] = {}
        self._kept: dict[tuple[str, Schedule], Built | str] = {}
        cpus = len(os.sched_getaffinity(0))
        self._jobs = jobs = checked_jobs(jobs)
        self._elsewhere: dict[Target, BuilderPool] = {}
        self._has_another_cpu = jobs > 1 and (not runner.local or runner.threads < cpus)
        self.disturbance = Disturbance(on_this_machine=runner.local)
        with contextlib.ExitStack() as stack:
            self._scratch = stack.enter_context(temporary_folder())
            self._builders = stack.enter_context(BuilderPool(runner.trial_target(target), self._scratch, jobs))
            self._stack = stack.pop_all()

    def __enter__(self) -> Evaluator:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def measure_floors(self, problems: Iterable[Problem]) -> None:
        """Measure the rates of the machine, once: copied bytes, and multiply-adds of the types of `problems`."""
        if self._copy_rate:
            return
        dtypes = {self._runner.multiplied(problem) for problem in problems}
        for dtype in sorted(dtype for dtype in dtypes if dtype):
            self._rates[dtype] = self._runner.multiply_add_rate(dtype, self.target, self._scratch, _RATE_SECONDS)
        self._copy_rate = self._runner.copy(_RATE_SECONDS)

    def floor(self, problem: Problem) -> float:
        """Return the seconds that no schedule of `problem` beats."""
        assert self._copy_rate
        rate = self._rates.get(self._runner.multiplied(problem) or "")
        return max(problem.min_bytes / self._copy_rate, problem.macs / rate if rate else 0.0)

    def round(
        self, search: Search, schedules: Sequence[Schedule], following: Proposals | None = None
    ) -> Iterator[Record]:
        """Compile all of `schedules`, then measure each; yield their records, which the log has by then.

        A CPU that these leave compiles what is `following`, for the next round; without that nothing runs beside the
        measurements. A candidate that is being measured when the caller stops listening is written to the log all the
        same.
        """
        if not schedules:
            return
        built = self.build(search, self._needed(search, schedules), following if self._has_another_cpu else None)
        if not following:
            self._builders.pause()
        if search.key not in self._baselines:
            reference = built[search.default]
            if isinstance(reference, str):
                search.broken = True
                if search.default not in search.tried:
                    yield self._record(search, search.default, f"does not compile: {reference}")
                return
            self._baselines[search.key] = Baseline(search.key, self._seed, reference)

        def measure(schedule: Schedule) -> Record:
            start = time.monotonic()
            outcome = self._outcome(search, built[schedule])
            search.note_measurement(time.monotonic() - start)
            return self._record(search, schedule, outcome, code_of(built[schedule]))

        for record in self._runner.map(measure, schedules):
            yield record
            if search.broken:
                return
        self._keep_fastest(search)

    @property
    def round_size(self) -> int:
        """Trials of one problem before another may have its turn: enough for all builders and all servers."""
        return max(_ROUND, self._jobs, self._runner.places)

    def prepare(self, proposals: Proposals) -> None:
        """Compile what a round of these needs."""
        self.build(proposals.search, self._needed(*proposals))

    def build(
        self, search: Search, schedules: Sequence[Schedule], following: Proposals | None = None
    ) -> dict[Schedule, Built | str]:
        """Compile those of `schedules` that are not kept from an earlier round, and begin with those `following`."""
        unbuilt = self._unbuilt(search, schedules)
        next = (following.search.key, self._unbuilt(following.search, self._needed(*following))) if following else None
        for schedule, candidate in self._builders.build(search.key, unbuilt, next).items():
            self._kept[search.key, schedule] = candidate
            if isinstance(candidate, Built):
                search.note_build(schedule.algorithm, candidate.seconds)
        return {schedule: self._kept[search.key, schedule] for schedule in schedules}

    def codes(self, search: Search, schedules: Sequence[Schedule], target: Target) -> dict[Schedule, str]:
        """Return the digests of the code of `schedules` for a variant of the target; "" of what does not compile.

        What is compiled for the target itself may be measured later. Every other variant has builders of its own.
        """
        if target == self.target:
            built = self.build(search, schedules)
        else:
            if target not in self._elsewhere:
                pool = BuilderPool(self._runner.trial_target(target), self._scratch, self._jobs)
                self._elsewhere[target] = self._stack.enter_context(pool)
            built = self._elsewhere[target].build(search.key, schedules)
            for candidate in built.values():
                _remove(candidate)
        return {schedule: code_of(candidate) for schedule, candidate in built.items()}

    def _needed(self, search: Search, schedules: Sequence[Schedule]) -> list[Schedule]:
        """Return what a round compiles: the default, too, where nothing is held against it yet."""
        default = [] if search.key in self._baselines else [search.default]
        return list(dict.fromkeys([*default, *schedules]))

    def _unbuilt(self, search: Search, schedules: Sequence[Schedule]) -> list[Schedule]:
        return [schedule for schedule in schedules if (search.key, schedule) not in self._kept]

    def _keep_fastest(self, search: Search) -> None:
        """Remove the libraries of a problem but those that take turns, or may at the end."""
        wanted = search.wanted
        for key, schedule in [*self._kept]:
            if key == search.key and schedule not in wanted:
                _remove(self._kept.pop((key, schedule)))

    def _outcome(self, search: Search, built: Built | str) -> Measured | str:
        """Measure a candidate; return why it has no time if it fails."""
        if isinstance(built, str):
            return f"does not compile: {built}"
        fastest = search.best.seconds if search.best else None
        longest = max(self._timeout, _LONGEST * (fastest or 0.0))
        default = self._default_of(search)
        best = fastest / default if fastest and default else math.inf
        try:
            measured = self._runner.measure(self._baselines[search.key], built, best, longest)
        except BrokenDefaultError as error:
            search.broken = True
            return str(error)
        except WorkerError as error:
            return str(error)
        self.disturbance.note(measured)
        return measured

    def _default_of(self, search: Search) -> float | None:
        """Return the seconds of the default that times of this problem are relative to; None before the first."""
        known = search.tried.get(search.default)
        if search.key not in self._default_seconds and known and known.seconds:
            self._default_seconds[search.key] = known.seconds
        return self._default_seconds.get(search.key)

    def _record(self, search: Search, schedule: Schedule, outcome: Measured | str, code: str = "") -> Record:
        """Write the outcome of a trial of `code`, its times or its error, to the log."""
        measured = outcome if isinstance(outcome, Measured) else None
        seconds = None
        if measured:
            seconds = measured.ratio * self._default_seconds.setdefault(search.key, measured.reference)
        record = Record(
            problem=search.key,
            target=self.target.name,
            algorithm=schedule.algorithm,
            knobs=dict(schedule.knobs),
            seconds=seconds,
            spread=round(measured.spread, 4) if measured else 0.0,
            runs=measured.runs if measured else 0,
            error="" if measured else str(outcome),
            threads=self.conditions.threads,
            host=self._cpu,
            sources=self.conditions.sources,
            commit=commit(),
            seed=self._seed,
            versions=versions(),
            when=now(),
            code=code,
        )
        self.log.append(record)
        return record


def _remove(built: Built | str) -> None:
    """Remove the library of a candidate that is not measured any more."""
    if isinstance(built, Built):
        built.deconv.unlink(missing_ok=True)


def code_of(built: Built | str) -> str:
    """Return the digest of a candidate's code; "" if it did not compile."""
    return built.code if isinstance(built, Built) else ""


def versions() -> dict[str, str]:
    """Return the versions that records name."""
    return {name: importlib.metadata.version(name) for name in ("tvm_deconv", "apache-tvm")}


@cache
def commit() -> str:
    """Return the commit of the checkout that this runs from, or the version if it is installed."""
    root = Path(__file__).parents[2]
    if (root / ".git").exists():
        command = ["git", "-C", str(root), "rev-parse", "--short=12", "HEAD"]
        with contextlib.suppress(OSError):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode == 0:
                return done.stdout.strip()
    return f"v{importlib.metadata.version('tvm_deconv')}"
