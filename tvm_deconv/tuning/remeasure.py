"""Measuring the records of a log again, in turns with the default, by today's kernels on this machine."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tvm_deconv.compiler.records import Conditions, Log, Record, Records, Schedule, read
from tvm_deconv.compiler.selection import replay_error
from tvm_deconv.problem import Problem
from tvm_deconv.targets import Target
from tvm_deconv.targets.ancestry import meant
from tvm_deconv.tuning.evaluator import Evaluator
from tvm_deconv.tuning.runners.base import Runner
from tvm_deconv.tuning.search import Search
from tvm_deconv.tuning.session import decide, measured_on


@dataclass(frozen=True)
class Remeasured:
    """What became of the records of one problem: the best of them, and the default, under today's conditions.

    `done` of `total` problems are over.
    """

    problem: str
    target: str
    best: Record | None
    default: Record | None
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
    """Measure the best records of every problem in the directory `logs` again, and write the new records there.

    The default is measured with them, in turns. `jobs` processes compile. Problems that are done under these conditions
    are not measured again, so an interrupted run continues. Raises ProblemError if this machine cannot run a target.
    """
    names = (target,) if isinstance(target, str) else tuple(target)
    found: list[Remeasured] = []
    with contextlib.closing(measured_on(names, threads, None, None)) as places:
        for runner, targets in places:
            for chosen in targets:
                found += _on_target(runner, chosen, Log(logs), seed, jobs, timeout, on_problem)
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
    found: list[Remeasured] = []
    with Evaluator(target, runner, log, seed=seed, jobs=jobs, timeout=timeout) as evaluator:
        for key in sorted(records.by_problem):
            search = Search(Problem.from_key(key), target, records, evaluator.conditions, None)
            schedules = list(dict.fromkeys([search.default, *_schedules(records, key, evaluator.conditions)]))
            if any(not _is_done(search.tried.get(schedule)) for schedule in schedules):
                decide(search, evaluator, schedules)
                log.tidy(key, target.name)
            found.append(_result(search, schedules, len(found) + 1, len(records.by_problem)))
            if on_problem:
                on_problem(found[-1])
    return found


def _schedules(records: Records, key: str, today: Conditions) -> list[Schedule]:
    """Return the schedules of the problem's records that replay, of the newest conditions of each machine.

    Today's conditions count if there are no others: they may be those of a run that was interrupted.
    """
    every = records.by_problem[key]
    earlier = [record for record in every if record.conditions != today]
    groups = Records(records.target, {key: earlier or every}).groups(key)
    return [record.schedule for group in groups for record in group if not replay_error(record)]


def _is_done(record: Record | None) -> bool:
    return record is not None and (record.default_ratio is not None or bool(record.error))


def _result(search: Search, schedules: Sequence[Schedule], done: int, total: int) -> Remeasured:
    """Return what came of `schedules`, of which the first is the default."""
    default, *others = (search.tried.get(schedule) for schedule in schedules)
    timed = [record for record in others if record and record.seconds is not None]
    best = min(timed, key=lambda record: record.merit, default=default)
    return Remeasured(search.key, search.target.name, best, default, done, total)
