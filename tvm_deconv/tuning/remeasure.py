"""Renewing the records of a log for today's kernels: those of other code are measured again, beside the default."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tvm_deconv.compiler.records import Cpu, Log, Record, Records, Schedule, read
from tvm_deconv.compiler.requests import checked_seconds
from tvm_deconv.compiler.selection import default_schedule, in_space, replay_error
from tvm_deconv.problem import Problem, integer
from tvm_deconv.problem.checks import check_callback, checked_path
from tvm_deconv.targets import Target, names_of
from tvm_deconv.targets.ancestry import meant
from tvm_deconv.tuning.evaluator import Evaluator, commit, versions
from tvm_deconv.tuning.runners.base import Runner
from tvm_deconv.tuning.runners.harness import now
from tvm_deconv.tuning.search import Search
from tvm_deconv.tuning.session import decide, measured_on


@dataclass(frozen=True)
class Remeasured:
    """What became of the records of one problem: the best of them, and the default, under today's conditions.

    The `status` is "measured", "renewed" if today's code is that of the records, "current" if there was nothing to do,
    or "left" if a machine that runs the target has to measure. Without such a machine `best` is that of the log.
    `warnings` tell which records were left out. `done` of `total` problems are over.
    """

    problem: str
    target: str
    best: Record | None
    default: Record | None
    status: str
    warnings: tuple[str, ...]
    done: int
    total: int

    @property
    def kept(self) -> str:
        """What builds on this machine follow: the "record" or the "default"."""
        if self.best is None:
            return "default"
        return "record" if self.best is not self.default and not self.best.beaten else "default"


def remeasure(
    logs: Path | str,
    target: str | Sequence[str],
    *,
    threads: int = 1,
    seed: int = 0,
    jobs: int | None = None,
    timeout: float = 30.0,
    on_problem: Callable[[Remeasured], None] | None = None,
) -> list[Remeasured]:
    """Renew the best records of every problem in the directory `logs` for today's kernels, beside those that it has.

    `jobs` processes compile them with the default. The records of a microarchitecture that all have the code that they
    had when they were measured, and so has the default, are renewed as they are. If there are none of this one, all
    records of the problem, also those of other machines, take turns with the default here. Plans that no search would
    try today are left out. An interrupted run continues with what is left. For CPUs whose code this machine cannot run
    nothing is measured, and records of other code stay as they are. Raises ProblemError, and DeviceError if there is
    no such CUDA device.
    """
    integer("threads", threads, 1)
    integer("seed", seed, 0)
    timeout = checked_seconds("timeout", timeout)
    check_callback("on_problem", on_problem)
    names, log = names_of(target), Log(checked_path("logs", logs))
    found: list[Remeasured] = []
    with contextlib.closing(measured_on(names, threads, None, None, strict=False)) as places:
        for runner, targets in places:
            for chosen in targets:
                found += _on_target(runner, chosen, log, seed, jobs, timeout, on_problem)
    return found


def _on_target(
    runner: Runner,
    target: Target,
    log: Log,
    seed: int,
    jobs: int | None,
    timeout: float,
    on_problem: Callable[[Remeasured], None] | None,
) -> list[Remeasured]:
    records = read(target.name, log.root, microarchitecture=meant(target, runner.host))
    here = Here(Cpu.of(runner.host), runner.threads, runs=target.features <= runner.host.features)
    found: list[Remeasured] = []
    with Evaluator(target, runner, log, seed=seed, jobs=jobs, timeout=timeout) as evaluator:
        for key in sorted(records.by_problem):
            search = Search(Problem.from_key(key), target, records, evaluator.conditions, None)
            renewal = Renewal(search, evaluator, here, records)
            status = renewal.run()
            found.append(renewal.result(status, len(found) + 1, len(records.by_problem)))
            if on_problem:
                on_problem(found[-1])
    return found


@dataclass(frozen=True)
class Here:
    """The machine that measures, and the threads of a call; one that does not run the target measures nothing."""

    host: Cpu | str
    threads: int
    runs: bool = True

    def measured(self, record: Record) -> bool:
        """Return whether a machine like this one measured a record, with as many threads."""
        alike = record.host == self.host
        if isinstance(self.host, Cpu):
            alike = record.microarchitecture == self.host.microarchitecture
        return self.runs and alike and record.threads == self.threads


class Renewal:
    """The records of one problem, before and after."""

    def __init__(self, search: Search, evaluator: Evaluator, here: Here, records: Records) -> None:
        self._search = search
        self._evaluator = evaluator
        self._runs = here.runs
        self._warnings: list[str] = []
        every = records.by_problem[search.key]
        today = [record for record in every if here.measured(record) and record.sources == self._sources]
        # If there are no others, today's may be those of a run that was interrupted.
        earlier = Records(records.target, {search.key: [record for record in every if record not in today] or every})
        self._earlier = [record for record in itertools.chain(*earlier.groups(search.key)) if self._replays(record)]
        self._own = [record for record in self._earlier if here.measured(record)]
        others = [record for record in self._earlier if not here.measured(record) and record.sources != self._sources]
        self._others = Records(records.target, {search.key: others}).groups(search.key)
        for record in today:
            search.note(record)

    @property
    def _sources(self) -> str:
        return self._evaluator.conditions.sources

    def _replays(self, record: Record) -> bool:
        """Return whether a search would try the plan of a record today; if not, say so."""
        error = replay_error(record)
        if error is None and not in_space(self._search.problem, record.schedule, self._search.target):
            knobs = " ".join(f"{name}={value}" for name, value in record.schedule.knobs)
            error = f"record of {record.problem}: left out, no search tries its plan today: {record.algorithm} {knobs}"
        if error is not None:
            self._warnings.append(error)
        return error is None

    def run(self) -> str:
        """Do what there is to do; return the status."""
        elsewhere = [self._renew(records) for records in self._others]  # what this compiles is measured below
        if self._runs:
            status = "current" if self._is_current() else "renewed" if self._renew(self._own) else "measured"
        else:
            status = "current" if self._earlier and all(elsewhere) else "left"
        if status == "measured":
            decide(self._search, self._evaluator, self._schedules)
        self._evaluator.log.tidy(self._search.key, self._search.target.name)
        return "renewed" if status == "current" and any(elsewhere) else status

    def _renew(self, records: Sequence[Record]) -> bool:
        """Renew the records of a machine if their code and the default's are what was measured; return whether."""
        if not records or not self._of_the_same_code(records):
            return False
        for record in records:
            surroundings = {"sources": self._sources, "commit": commit(), "versions": versions(), "when": now()}
            renewed = msgspec.structs.replace(record, **surroundings)
            self._evaluator.log.append(renewed)
            if record in self._own:
                self._search.note(renewed)
        return True

    def _is_current(self) -> bool:
        tried = self._search.tried
        if not self._own:
            return any(record.default_ratio is not None for record in tried.values())
        return all(
            record.schedule in tried and (tried[record.schedule].default_ratio or tried[record.schedule].error)
            for record in self._own
        )

    def _of_the_same_code(self, records: Sequence[Record]) -> bool:
        if not all(record.default_code for record in records):
            return False
        target = self._search.target.on(records[0].microarchitecture)
        default = default_schedule(self._search.problem, target)
        schedules = list(dict.fromkeys([default, *(record.schedule for record in records)]))
        codes = self._evaluator.codes(self._search, schedules, target)
        return all((record.code, record.default_code) == (codes[record.schedule], codes[default]) for record in records)

    @property
    def _schedules(self) -> list[Schedule]:
        """The schedules to measure, the default first."""
        return list(dict.fromkeys([self._search.default, *(record.schedule for record in self._earlier)]))

    def result(self, status: str, done: int, total: int) -> Remeasured:
        """Return what came of the records."""
        search = self._search
        default, *others = (search.tried.get(schedule) for schedule in self._schedules)
        timed = [record for record in others if record and record.seconds is not None]
        best = min(timed, key=lambda record: record.merit, default=default)
        if not self._runs:
            best, default = next(iter(self._earlier), None), None
        return Remeasured(search.key, search.target.name, best, default, status, tuple(self._warnings), done, total)
