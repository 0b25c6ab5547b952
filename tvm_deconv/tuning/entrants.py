"""The entrants of a tournament: some plans of each problem, compiled for machines that have no compiler."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from tvm_deconv.compiler.fingerprint import kernel_digest
from tvm_deconv.compiler.records import Log, Schedule
from tvm_deconv.compiler.selection import default_schedule, distance, space
from tvm_deconv.errors import ProblemError
from tvm_deconv.problem import Problem
from tvm_deconv.targets import Target, get
from tvm_deconv.tuning.builders import BuilderPool, Built
from tvm_deconv.tuning.evaluator import commit, versions
from tvm_deconv.tuning.search import HOPELESS_COST
from tvm_deconv.tuning.tournament import Entrant, Match, write

#: Plans of one algorithm differ by this many factors of two in all, so that few plans cover much.
_APART = 2.0


def prepare(
    problems: Iterable[Problem],
    target: str,
    directory: Path,
    plans: int = 6,
    *,
    seed: int = 0,
    jobs: int | None = None,
    on_problem: Callable[[Problem, dict[Schedule, str]], None] | None = None,
) -> None:
    """Compile up to `plans` plans of each problem for `target`, a CUDA target, into `directory` for `tournament.hold`.

    The default is one of them, and the cheapest by arithmetic of each algorithm. `jobs` processes compile, by default
    as many as there are CPUs. A problem whose default does not compile is left out; `on_problem` is told why plans do
    not compile. Raises ProblemError for another target, CompilerNotFound.
    """
    chosen = get(target)
    if chosen.memory != "cuda":
        raise ProblemError("target", target, "must be a CUDA target")
    directory.mkdir(parents=True, exist_ok=True)
    matches = []
    with BuilderPool(chosen, directory, jobs or os.cpu_count() or 1) as builders:
        for problem in problems:
            key = problem.artifact_key
            schedules = choose(problem, chosen, plans)
            built = builders.build(key, schedules)
            if on_problem:
                on_problem(problem, {schedule: one for schedule, one in built.items() if isinstance(one, str)})
            if isinstance(built[schedules[0]], Built):
                matches.append(_match(problem, chosen, built, directory, seed))
    write(directory, matches)


def choose(problem: Problem, target: Target, plans: int) -> list[Schedule]:
    """Return the default and other schedules, the cheapest first, that are unlike each other; at most `plans`."""
    candidates = space(problem, target)
    chosen = [default_schedule(problem, target)]
    for candidate in candidates:
        if len(chosen) >= plans or candidate.cost > HOPELESS_COST * candidates[0].cost:
            break
        like = [other for other in chosen if other.algorithm == candidate.schedule.algorithm]
        if all(distance(candidate.schedule, other) >= _APART for other in like):
            chosen.append(candidate.schedule)
    return chosen


def _match(
    problem: Problem, target: Target, built: Mapping[Schedule, Built | str], directory: Path, seed: int
) -> Match:
    """Return what compiled, with the fields of records that are known so far."""
    key = problem.artifact_key
    known = {
        "problem": key,
        "target": target.name,
        "threads": 1,
        "sources": kernel_digest(),
        "commit": commit(),
        "seed": seed,
        "versions": versions(),
    }
    entrants = [
        Entrant(one, {**known, "algorithm": schedule.algorithm, "knobs": dict(schedule.knobs)})
        for schedule, one in built.items()
        if isinstance(one, Built)
    ]
    log = Log(directory)
    return Match(key, target.name, str(log.file(key, target.name).relative_to(log.root)), tuple(entrants))
