"""The entrants of a tournament: some plans of each problem, compiled for machines that have no compiler."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from tvm_deconv.artifact.files import temporary_folder
from tvm_deconv.compiler.fingerprint import kernel_digest
from tvm_deconv.compiler.records import Log, Schedule
from tvm_deconv.compiler.requests import checked_jobs
from tvm_deconv.compiler.selection import default_schedule, distance, space
from tvm_deconv.errors import ProblemError
from tvm_deconv.problem import Problem
from tvm_deconv.targets import Target, get
from tvm_deconv.tuning.builders import BuilderPool, Built
from tvm_deconv.tuning.evaluator import commit, versions
from tvm_deconv.tuning.tournament import LIST, Entrant, Match, read, write

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
    not compile. What the directory has is not compiled again, so an interrupted preparation continues. Raises
    ProblemError for another target, CompilerNotFound.
    """
    chosen = get(target)
    if chosen.memory != "cuda":
        raise ProblemError("target", target, "must be a CUDA target")
    directory.mkdir(parents=True, exist_ok=True)
    matches = _prepared(directory)
    with temporary_folder() as scratch, BuilderPool(chosen, scratch, checked_jobs(jobs)) as builders:
        for problem in problems:
            if any((problem.artifact_key, target) == (match.key, match.target) for match in matches):
                continue
            schedules = choose(problem, chosen, plans)
            built = builders.build(problem.artifact_key, schedules)
            if on_problem:
                on_problem(problem, {schedule: one for schedule, one in built.items() if isinstance(one, str)})
            if isinstance(built[schedules[0]], Built):
                matches.append(_match(problem, chosen, built, directory, seed))
                write(directory, matches)


def _prepared(directory: Path) -> list[Match]:
    """Return what a directory has of these kernels already."""
    if not (directory / LIST).exists():
        return []
    return [match for match in read(directory) if match.entrants[0].record["sources"] == _sources(match.target)]


def _sources(target: str) -> str:
    return kernel_digest(get(target).backend)


def choose(problem: Problem, target: Target, plans: int) -> list[Schedule]:
    """Return the default and other schedules, the cheapest first, that are unlike each other; at most `plans`."""
    chosen = [default_schedule(problem, target)]
    for candidate in space(problem, target):
        if len(chosen) >= plans:
            break
        like = [other for other in chosen if other.algorithm == candidate.schedule.algorithm]
        if all(distance(candidate.schedule, other) >= _APART for other in like):
            chosen.append(candidate.schedule)
    return chosen


def _match(
    problem: Problem, target: Target, built: Mapping[Schedule, Built | str], directory: Path, seed: int
) -> Match:
    """Move what compiled into `directory`; return it with the fields of records that are known so far."""
    key, log = problem.artifact_key, Log(directory)
    file = log.file(key, target.name).relative_to(log.root)
    known = {
        "problem": key,
        "target": target.name,
        "threads": 1,
        "sources": _sources(target.name),
        "commit": commit(),
        "seed": seed,
        "versions": versions(),
    }
    entrants: list[Entrant] = []
    for schedule, one in built.items():
        if isinstance(one, Built):
            deconv = directory / f"{file.stem}-{target.name}-{len(entrants)}.so"
            moved = replace(one, deconv=deconv, pack=directory / one.pack.name)
            shutil.move(one.deconv, moved.deconv)
            shutil.copy(one.pack, moved.pack)  # which others share
            record = {**known, "algorithm": schedule.algorithm, "knobs": dict(schedule.knobs), "code": one.code}
            entrants.append(Entrant(moved, record))
    return Match(key, target.name, str(file), tuple(entrants))
