"""A search for schedules: propose, compile, measure, keep every result.

A round compiles some candidates of one problem in all builders at once, and then, with the machine to itself, measures
them one by one. Every problem gets a share of rounds; the rest go where another build promises most. The search of a
problem ends when nothing does.

At the end the few fastest of a problem and its default take turns, since a disturbance of the machine may have decided
between them, until it is clear which is the fastest. The median of its turns is then the time of each, and its record
has the ratio to the default's.

Every trial is in the log as soon as it is over, failures too. A schedule that the log has under the same conditions
(CPU, threads, text of the kernels) is not tried again: a search that was stopped continues.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tvm_deconv.compiler.records import Log, Record, Schedule, read, shipped
from tvm_deconv.compiler.requests import checked_problems, checked_seconds
from tvm_deconv.compiler.selection import algorithms_for, checked_algorithms
from tvm_deconv.errors import ProblemError
from tvm_deconv.problem import Problem, integer
from tvm_deconv.problem.checks import check_callback, checked_path
from tvm_deconv.targets import Host, Target, get, names_of, of_names
from tvm_deconv.targets.ancestry import meant
from tvm_deconv.tuning.evaluator import Evaluator, Proposals
from tvm_deconv.tuning.runners.base import Runner
from tvm_deconv.tuning.runners.cuda import CudaRunner, check_device
from tvm_deconv.tuning.runners.harness import now
from tvm_deconv.tuning.runners.local import LocalRunner
from tvm_deconv.tuning.runners.rpc import RpcRunner
from tvm_deconv.tuning.runners.rpc_cuda import RpcCudaRunner
from tvm_deconv.tuning.runners.tracker import Tracker
from tvm_deconv.tuning.search import Search

#: Turns of each finalist; and of those that these leave in doubt.
_TURNS, _MOST_TURNS = 3, 5
#: A difference of times that is not worth another turn.
_ALIKE = 0.01


@dataclass(frozen=True)
class Trial:
    """One trial that is over: its record, the fastest of its problem so far, and how far the search is.

    `gain` is the geometric mean over problems of the default's time by that of the fastest so far. `left` are the most
    seconds that the search is expected to take yet.
    """

    problem: Problem
    record: Record
    best: Record | None
    floor: float
    done: int
    total: int
    gain: float
    left: float


@dataclass(frozen=True)
class Tuned:
    """The results for one problem: the record that builds follow, that of the default schedule, the floor in seconds.

    Both are one where nothing was faster than the default. `trials` counts all under these conditions, including those
    of earlier searches. `ended` says why there are no more.
    """

    problem: Problem
    target: str
    best: Record | None
    default: Record | None
    floor: float
    trials: int
    ended: str = ""
    warnings: tuple[str, ...] = ()


def tune(
    problems: Iterable[Problem],
    target: str | Sequence[str] = "native",
    trials: int = 64,
    logs: Path | str = "tuning_logs",
    *,
    budget: float | None = None,
    threads: int = 1,
    seed: int = 0,
    jobs: int | None = None,
    timeout: float = 30.0,
    algorithms: Iterable[str] | None = None,
    on_trial: Callable[[Trial], None] | None = None,
    rpc_tracker: str | None = None,
    rpc_key: str | None = None,
) -> list[Tuned]:
    """Search for schedules of `problems` on every named target, and keep the measurements in the directory `logs`.

    `trials` is per problem on average, at most: they are spent where most is to be gained. Each variant of a
    variable problem counts as one, measured at its representative call. Trials that the log has already count.
    `algorithms` names those to try, by default all. Of several targets, those that have none of them try all of theirs.

    With a `budget` of seconds the search ends in about that time, the turns of the finalists included; several targets
    share it. Problems that were not reached keep what they had.

    Calls use `threads` threads; `jobs` processes compile, by default as many as there are CPUs. A candidate is given up
    after `timeout` seconds. A search may be stopped at any time by KeyboardInterrupt, and called again.

    CUDA targets are measured on device 0 of this machine, which must have a capability that the target runs on. With
    `rpc_tracker` (HOST:PORT) and `rpc_key`, candidates run on the servers that this TVM tracker has for the key, CUDA's
    on device 0 there. These must be machines of one kind, which "native" then means.

    Raises ProblemError if the machine that measures cannot run a target or no target has one of `algorithms`,
    DeviceError if there is no such device, BuildError, CompilerNotFound, and RemoteError if no server is left.
    """
    integer("trials", trials, 1)
    integer("threads", threads, 1)
    integer("seed", seed, 0)
    timeout = checked_seconds("timeout", timeout)
    end = math.inf if budget is None else time.monotonic() + checked_seconds("budget", budget)
    names = names_of(target)
    using = checked_algorithms(algorithms, names)
    check_callback("on_trial", on_trial)
    if (rpc_tracker is None) != (rpc_key is None):
        raise ProblemError("rpc_key", rpc_key, "must be given where rpc_tracker is, and nowhere else")
    # Without batch or output there is nothing to measure.
    wanted = [
        variant
        for problem in checked_problems(problems)
        for variant in problem.variants
        if math.prod(variant.output_shape)
    ]
    session = _Session(wanted, trials, Log(checked_path("logs", logs)), seed, jobs, timeout, using, on_trial)
    tuned: list[Tuned] = []
    with contextlib.closing(measured_on(names, threads, rpc_tracker, rpc_key)) as places:
        for number, (runner, chosen) in enumerate((runner, chosen) for runner, several in places for chosen in several):
            begun = time.monotonic()
            tuned += session.tune_on(runner, chosen, begun + (end - begun) / (len(names) - number))
    return tuned


def measured_on(
    names: Sequence[str], threads: int, rpc_tracker: str | None, rpc_key: str | None, *, strict: bool = True
) -> Generator[tuple[Runner, list[Target]], None, None]:
    """Yield a runner for each kind of memory, with the targets called `names` that are measured on it.

    All targets are checked before the first is yielded. Unless it is `strict`, the CPU may be one that cannot run them.
    """
    tracker = None if rpc_tracker is None or rpc_key is None else Tracker.parse(rpc_tracker, rpc_key)
    kinds = {name: "cpu" if name == "native" else get(name).memory for name in names}
    on_device = [get(name) for name, memory in kinds.items() if memory == "cuda"]
    on_cpu = [name for name, memory in kinds.items() if memory == "cpu"]
    if on_device and (on_cpu or not tracker):  # devices of servers are also checked by their runner
        _check_devices(on_device, tracker)
    if on_cpu:
        with RpcRunner(threads, tracker) if tracker else LocalRunner(threads) as runner:
            targets = of_names(on_cpu, runner.host)
            for target in targets if strict else ():
                _check_host(target, runner.host)
            yield runner, [*targets]
    if on_device:
        with RpcCudaRunner(tracker, on_device) if tracker else CudaRunner() as runner:
            yield runner, on_device


def _check_devices(targets: Sequence[Target], tracker: Tracker | None) -> None:
    """Raise DeviceError if a device here, or that of a server, cannot run one of `targets`; RemoteError."""
    if tracker:
        with RpcCudaRunner(tracker, targets):
            return
    for target in targets:
        check_device(target)


def _check_host(target: Target, host: Host) -> None:
    """Raise ProblemError if the machine that measures cannot run `target`."""
    missing = ", ".join(sorted(target.features - host.features))
    if missing:
        raise ProblemError("target", target.name, f"{host.name} cannot run it: it lacks {missing}")


@dataclass(frozen=True)
class _Session:
    """The problems to tune, and how."""

    problems: Sequence[Problem]
    trials: int
    log: Log
    seed: int
    jobs: int | None
    timeout: float
    algorithms: tuple[str, ...] | None
    on_trial: Callable[[Trial], None] | None

    def tune_on(self, runner: Runner, target: Target, end: float) -> list[Tuned]:
        """Search for schedules of all problems on one target, until the clock is at `end`; leave their logs tidy."""
        names, machine = (target.name, *target.ancestors), meant(target, runner.host)
        records, *ancestors = (read(name, shipped(), self.log.root, microarchitecture=machine) for name in names)
        allowed = algorithms_for(target, self.algorithms)
        computed = (target.computes(problem) for problem in self.problems)
        problems = {problem.artifact_key: problem for problem in computed}
        with Evaluator(target, runner, self.log, seed=self.seed, jobs=self.jobs, timeout=self.timeout) as evaluator:
            searches = [
                Search(problem, target, records, evaluator.conditions, allowed, ancestors)
                for problem in problems.values()
            ]
            try:
                why = spend(searches, evaluator, self.trials, self.on_trial, end)
                for search in searches:
                    decide(search, evaluator, search.finalists())
            finally:
                for search in searches:
                    self.log.tidy(search.key, target.name)
            disturbed = _disturbed(evaluator)
        return [_result(search, why, disturbed) for search in searches]


def spend(
    searches: Sequence[Search],
    evaluator: Evaluator,
    trials: int,
    on_trial: Callable[[Trial], None] | None,
    end: float = math.inf,
) -> str:
    """Hold rounds until there are `trials` for each search on average, nothing is left to try, or it is too late.

    The finalists of a search take turns as soon as it has ended. Return why those ended that had more to try. `end` is
    a time of the clock by which all finalists should have had their turns.
    """
    total = trials * len(searches)
    done = before = sum(len(search.tried) for search in searches)
    start = time.monotonic()
    following = None
    while done < total:
        if all(search.ended for search in searches):
            break
        pace = (time.monotonic() - start) / max(done - before, 1)
        if time.monotonic() + evaluator.round_size * pace + _time_to_decide(searches) > end:
            return "out of time"
        evaluator.measure_floors(search.problem for search in searches)
        chosen = following or _choose(searches, evaluator, min(trials, total - done))
        if not chosen:
            continue
        search = chosen.search
        # Shares are due whatever this round finds. Beyond them the next round may go on with this search.
        others = [other for other in searches if other is not search and not other.has_share()]
        following = _choose(others, evaluator, min(trials, total - done - len(chosen.schedules)))
        for record in evaluator.round(search, chosen.schedules, following):
            search.note(record)
            done += 1
            if on_trial:
                left = (time.monotonic() - start) / (done - before) * _most_left(searches, trials)
                left = min(left, end - time.monotonic())
                so_far = search.best, search.floor, done, total, _gain(searches), max(left, 0.0)
                on_trial(Trial(search.problem, record, *so_far))
        if search.ended:
            if following:
                evaluator.prepare(following)  # so that nothing runs beside the turns
            decide(search, evaluator, search.finalists())
    return "all trials spent"


def _choose(searches: Sequence[Search], evaluator: Evaluator, most: int) -> Proposals | None:
    """Return at most so many proposals of the search that promises most, None if it has none."""
    open_searches = [search for search in searches if not search.ended]
    if not open_searches or most <= 0:
        return None
    search = max(open_searches, key=lambda search: search.priority)
    search.floor = evaluator.floor(search.problem)
    proposals = search.propose(min(evaluator.round_size, most))
    return Proposals(search, proposals) if proposals else None


def _time_to_decide(searches: Sequence[Search]) -> float:
    """Return the seconds in which the finalists of all searches take their turns.

    What has not been measured yet is taken to be as slow as the others.
    """
    usual = statistics.fmean([search.measurement_seconds for search in searches if search.measurement_seconds] or [0.0])
    return _MOST_TURNS * sum(len(search.finalists()) * (search.measurement_seconds or usual) for search in searches)


def _most_left(searches: Sequence[Search], trials: int) -> int:
    """Return how many trials there may be yet."""
    return sum(max(trials - len(search.tried), 0) for search in searches if not search.ended)


def _gain(searches: Sequence[Search]) -> float:
    """Return the geometric mean of the defaults' times by those of the fastest, of the problems that have both."""
    ratios = []
    for search in searches:
        default, fastest = search.tried.get(search.default), search.best
        if default and default.seconds and fastest and fastest.seconds:
            ratios.append(default.seconds / fastest.seconds)
    return statistics.geometric_mean(ratios) if ratios else 1.0


def decide(search: Search, evaluator: Evaluator, schedules: Sequence[Schedule]) -> None:
    """Let `schedules` take turns; write the median of each to the log, with its ratio to the default if that is there.

    Turns end as soon as it is clear which is the fastest. Where a search is of some algorithms only, its default is not
    the one that builds compare with: no ratio then.
    """
    search.end(schedules)
    medians = {schedule: _median(records) for schedule, records in _turns(search, evaluator, schedules).items()}
    default = medians.get(search.default) if search.algorithms is None else None
    for record in medians.values():
        ratio = round(default.seconds / record.seconds, 4) if default and default.seconds and record.seconds else None
        beside = default.code if default and ratio else ""
        decided = msgspec.structs.replace(record, when=now(), default_ratio=ratio, default_code=beside)
        evaluator.log.append(decided)
        search.note(decided)
    search.settle()


def _turns(search: Search, evaluator: Evaluator, schedules: Sequence[Schedule]) -> dict[Schedule, list[Record]]:
    """Let `schedules` take turns until it is clear which is the fastest; the default, beside all of them, takes one."""
    turns: dict[Schedule, list[Record]] = {}
    left = list(schedules)
    for number in range(1, _MOST_TURNS + 1):
        for record in evaluator.round(search, left):
            turns.setdefault(record.schedule, []).append(record)
        doubtful = _doubtful(turns) if number >= _TURNS else set(schedules)
        left = [schedule for schedule in schedules if schedule in doubtful and schedule != search.default]
        if not left:
            break
    return turns


def _doubtful(turns: Mapping[Schedule, Sequence[Record]]) -> set[Schedule]:
    """Return those of which any may be the fastest, none if one is or if it does not matter which.

    What took longer in each of its turns than the fastest in any of its own is slower.
    """
    seconds = {
        schedule: [record.seconds or 0.0 for record in records]
        for schedule, records in turns.items()
        if not any(record.error for record in records)
    }
    if not seconds:
        return set()
    middle = {schedule: statistics.median_high(times) for schedule, times in seconds.items()}
    fastest = min(middle, key=middle.__getitem__)
    slowest, bound = max(seconds[fastest]), (1 + _ALIKE) * middle[fastest]
    rivals = {one for one, times in seconds.items() if min(times) < slowest and middle[one] > bound}
    return rivals | {fastest} if rivals else rivals


def _median(records: Sequence[Record]) -> Record:
    """Return the record in the middle, or one that failed if there is any."""
    ordered = sorted(records, key=lambda record: record.seconds or 0.0)
    return ordered[0 if ordered[0].error else len(ordered) // 2]


def _disturbed(evaluator: Evaluator) -> list[str]:
    """Return a warning if other programs disturbed the measurements."""
    complaints = evaluator.disturbance.complaints
    return [f"{evaluator.target.name}: the machine was busy: {'; '.join(complaints)}"] if complaints else []


def _result(search: Search, why: str, disturbed: Sequence[str]) -> Tuned:
    return Tuned(
        search.problem,
        search.target.name,
        search.decided,
        search.tried.get(search.default),
        search.floor,
        len(search.tried),
        search.ended or why,
        (*search.warnings, *disturbed),
    )
