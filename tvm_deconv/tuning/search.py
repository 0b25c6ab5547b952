"""The search for schedules: propose, compile, measure, keep every result.

Proposals come from `choices.space`. First what is known: the default, the best under other conditions, the nearest
record, the cheapest of each algorithm. Then in turn a candidate drawn by its arithmetic cost, and a mutation: a
candidate like one of the fastest so far. What arithmetic says to be far slower than its cheapest is not tried at all.

A round compiles some candidates of one problem in all builders at once, and then, with the machine to itself, measures
them one by one. Rounds go to the problem with most to gain: its gap to the floor, less the longer nothing was found.

At the end the few fastest of a problem take turns, since what disturbed the machine may have decided between them; the
median of its turns is then the time of each.

Every trial is in the log as soon as it is over, failures too, and what the log has under the same conditions (CPU,
threads, text of the kernels) is not tried again: a search that was stopped continues.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import math
import os
import random
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import msgspec

from tvm_deconv.artifact.manifest import computed_by
from tvm_deconv.bench.floors import FMA_DTYPES, Floors, build_fma
from tvm_deconv.compiler.choices import (
    Candidate,
    Choice,
    checked,
    choices,
    default,
    distance,
    for_target,
    nearest,
    space,
)
from tvm_deconv.compiler.fingerprint import kernel_digest
from tvm_deconv.compiler.launcher import find_compiler, launcher_object
from tvm_deconv.compiler.nvcc import find_nvcc
from tvm_deconv.compiler.process import Worker, WorkerError
from tvm_deconv.compiler.records import Conditions, Log, Record, Records, Schedule, best, read, shipped
from tvm_deconv.errors import DeviceError, ProblemError
from tvm_deconv.problem import Problem, integer
from tvm_deconv.targets import CUDA_TARGETS, CpuTarget, CudaTarget, Target, cuda_capability, of_names
from tvm_deconv.tuning.meters import BrokenDefaultError, DeviceMeters, Meters, RemoteMeters
from tvm_deconv.tuning.remote import Tracker
from tvm_deconv.tuning.workers import Builder, Built, CudaBuilder, Measured

__all__ = ["Choice", "Log", "Record", "Records", "Trial", "Tuned", "best", "choices", "nearest", "read", "tune"]

#: A schedule that arithmetic says to be so many times the cheapest is not tried.
HOPELESS_COST = 4.0
#: How strongly drawing prefers the cheap: a candidate of twice the cost is drawn 2**-_BIAS times as often.
_BIAS = 4.0
_PARENTS = 3  # mutations start from one of so many fastest
_ROUND = 8  # trials of one problem before another may have its turn
_PATIENCE = 16.0  # so many trials without a better schedule halve what is expected of more
_LEAST_GAP = 0.02  # floors are measured too, and a schedule may seem to be below
_BUILD_TIMEOUT = 120.0
#: Finalists: at most so many, not slower than the fastest by more than a part of its time; and their turns.
_FINALISTS = 4
_NEAR = 0.1
_TURNS = 3


@dataclass(frozen=True)
class Trial:
    """One trial that is over: its record, the fastest of its problem so far, and how far the search is."""

    problem: Problem
    record: Record
    best: Record | None
    floor: float
    done: int
    total: int


@dataclass(frozen=True)
class Tuned:
    """What the search knows of one problem: its fastest record, that of the default schedule, the floor in seconds.

    `trials` counts all under these conditions, those of earlier searches too.
    """

    problem: Problem
    target: str
    best: Record | None
    default: Record | None
    floor: float
    trials: int
    warnings: tuple[str, ...] = ()


def tune(
    problems: Iterable[Problem],
    target: str | Sequence[str] = "native",
    trials: int = 64,
    logs: Path | str = "tuning_logs",
    *,
    threads: int = 1,
    seed: int = 0,
    jobs: int | None = None,
    timeout: float = 30.0,
    algorithms: Iterable[str] | None = None,
    on_trial: Callable[[Trial], None] | None = None,
    rpc_tracker: str | None = None,
    rpc_key: str | None = None,
) -> list[Tuned]:
    """Search for schedules of `problems` on every named target, and keep what is measured in the directory `logs`.

    Those for CUDA are measured on device 0 of this machine, whose capability must be one that the target runs on.

    `trials` is per problem on average: all of them together are spent where most is to be gained. Of a variable
    problem each variant is one, measured at its representative call. Trials that the log has already count. Only
    `algorithms` are tried, where they are given. Calls use `threads` threads, `jobs` processes compile (as many as
    CPUs); a candidate that has not ended after `timeout` seconds is given up. It may be stopped at any time, by
    KeyboardInterrupt, and called again. With `rpc_tracker` (HOST:PORT) and `rpc_key`, candidates run on the servers
    that this TVM tracker has for the key: machines of one kind, which "native" then means.
    Raises ProblemError where the machine that measures cannot run a target, DeviceError where there is no such device,
    BuildError, CompilerNotFound, and RemoteError where no server is left.
    """
    integer("trials", trials, 0)
    integer("threads", threads, 1)
    using = checked(algorithms)
    if (rpc_tracker is None) != (rpc_key is None):
        raise ProblemError("rpc_key", rpc_key, "must be given where rpc_tracker is, and nowhere else")
    names = (target,) if isinstance(target, str) else tuple(target)
    devices = [CUDA_TARGETS[name] for name in names if name in CUDA_TARGETS]
    for device in devices:
        _check_device(device, rpc_tracker)
    # Without batch or output there is nothing to measure.
    wanted = [variant for problem in problems for variant in problem.variants if math.prod(variant.output_shape)]
    tuned: list[Tuned] = []

    def tune_on(meters: Meters, targets: Sequence[Target]) -> None:
        for chosen in targets:
            records = read(chosen.name, shipped(), log.root)
            allowed = for_target(using, chosen)
            served = {problem.artifact_key: problem for problem in (computed_by(p, chosen) for p in wanted)}
            with _Machine(chosen, meters, log, seed, jobs or os.cpu_count() or 1, timeout) as machine:
                searches = [
                    _Search(problem, chosen, records, machine.conditions, seed, allowed) for problem in served.values()
                ]
                try:
                    _spend(searches, machine, trials, on_trial)
                    for search in searches:
                        _decide(search, machine)
                finally:
                    for search in searches:
                        log.tidy(search.key, chosen.name)
            tuned.extend(search.result() for search in searches)

    log = Log(logs)
    cpus = [name for name in names if name not in CUDA_TARGETS]
    if cpus or not devices:
        if rpc_tracker is None or rpc_key is None:
            measuring = Meters(threads)
        else:
            measuring = RemoteMeters(threads, Tracker.parse(rpc_tracker, rpc_key))
        with measuring as meters:
            targets = of_names(cpus, meters.host)
            for chosen in targets:
                missing = ", ".join(sorted(chosen.features - meters.host.features))
                if missing:
                    raise ProblemError("target", chosen.name, f"{meters.host.name} cannot run it: it lacks {missing}")
            tune_on(meters, targets)
    if devices:
        with DeviceMeters() as meters:
            tune_on(meters, devices)
    return tuned


def _check_device(target: CudaTarget, rpc_tracker: str | None) -> None:
    """Raise where this machine has no device that runs `target`, or another machine is asked for."""
    if rpc_tracker is not None:
        raise ProblemError("rpc_tracker", rpc_tracker, f"must be left out for {target.name}: a device here measures")
    try:
        capability = cuda_capability()
    except DeviceError as error:
        rule = f"is tuned on a device of compute capability {target.architectures}: {error}"
        raise DeviceError("target", target.name, rule) from None
    if not target.runs_on(capability):
        own = ".".join(map(str, capability))
        rule = f"is tuned on a device of compute capability {target.architectures}: this one has {own}"
        raise DeviceError("target", target.name, rule)


def _spend(
    searches: Sequence[_Search],
    machine: _Machine,
    trials: int,
    on_trial: Callable[[Trial], None] | None,
) -> None:
    """Hold rounds until there are `trials` for each on average, or nothing is left to try."""
    total = trials * len(searches)
    done = sum(len(search.tried) for search in searches)
    while done < total:
        open_searches = [search for search in searches if not search.exhausted]
        if not open_searches:
            return
        machine.measure_floors(search.problem for search in searches)
        search = max(open_searches, key=lambda search: search.expected_gain(machine.floor(search.problem)))
        search.floor = machine.floor(search.problem)
        proposals = search.propose(min(_ROUND, trials, total - done))
        if not proposals:
            continue
        for record in machine.round(search, proposals):
            search.note(record)
            done += 1
            if on_trial:
                on_trial(Trial(search.problem, record, search.best, search.floor, done, total))


def _decide(search: _Search, machine: _Machine) -> None:
    """Let the finalists of `search` take turns; the log has the median of each."""
    turns: dict[Schedule, list[Record]] = {}
    for record in machine.round(search, search.finalists() * _TURNS):
        turns.setdefault(record.schedule, []).append(record)
    for records in turns.values():
        # One that fails has failed; else the one in the middle.
        records.sort(key=lambda record: record.seconds or 0.0)
        decisive = records[0 if records[0].error else len(records) // 2]
        decided = msgspec.structs.replace(decisive, when=_now())
        machine.log.append(decided)
        search.note(decided)


class _Search:
    """What is known of one problem on one target, and what to try next."""

    def __init__(
        self,
        problem: Problem,
        target: Target,
        records: Records,
        conditions: Conditions,
        seed: int,
        algorithms: tuple[str, ...] | None,
    ) -> None:
        self.problem = problem
        self.target = target
        self.algorithms = algorithms
        self.key = problem.artifact_key
        self.floor = math.nan
        self.warnings = records.warnings_for(self.key)
        self.tried: dict[Schedule, Record] = {}
        self.default = default(problem, target, algorithms)
        self.broken = False
        self._since_better = 0
        self._noted = 0
        self._threads = conditions.threads
        self._records = records
        for record in sorted(records.by_problem.get(self.key, ()), key=lambda record: record.when):
            if record.conditions == conditions:
                self.note(record)
        self._noted = len(self.tried)
        self._random = random.Random(f"{seed} {target.name} {self.key} {self._noted}")
        self._known = self._known_schedules()
        self._space: list[Candidate] | None = None

    def _known_schedules(self) -> list[Schedule]:
        known = [self.default]
        for choice in choices(self.problem, self.target, self._records, self.warnings, self.algorithms):
            known += [choice.schedule] if choice.schedule else []
        near = nearest(self.problem, self.target, self._records, self.algorithms)
        known += [near[1]] if near else []  # arithmetic may be wrong about it: that is what measuring is for
        return list(dict.fromkeys(known))

    @property
    def best(self) -> Record | None:
        """The fastest so far."""
        return next(iter(self._fastest(1)), None)

    @property
    def exhausted(self) -> bool:
        """Whether there is nothing left to try."""
        return self.broken or (self._space is not None and not self._open() and not self._known)

    def note(self, record: Record) -> None:
        """Take up a result."""
        before = self.best
        self.tried[record.schedule] = record
        better = record.seconds is not None and (before is None or record.seconds < (before.seconds or 0.0))
        self._since_better = 0 if better else self._since_better + 1

    def expected_gain(self, floor: float) -> float:
        """How much more trials promise, relative to other problems; the first round of every problem comes first.

        Between the sum of all times, which one slow layer rules, and the mean of the gaps, to which layers of
        microseconds count as much as any: the gap, times the root of the time.
        """
        fastest = self.best
        if fastest is None or fastest.seconds is None:
            return math.inf if not self.tried else 0.0
        gap = max(1 - floor / fastest.seconds, _LEAST_GAP)
        return gap * math.sqrt(fastest.seconds) * 2 ** (-self._since_better / _PATIENCE)

    def propose(self, count: int) -> list[Schedule]:
        """Return up to `count` schedules that were not tried yet."""
        found: list[Schedule] = []
        if self._space is None:
            everything = space(self.problem, self.target, self._threads, self.algorithms)
            cheapest = everything[0].cost
            self._space = [candidate for candidate in everything if candidate.cost <= HOPELESS_COST * cheapest]
            first = {candidate.schedule.algorithm: candidate.schedule for candidate in reversed(self._space)}
            self._known = list(dict.fromkeys([*self._known, *first.values()]))
        while self._known and len(found) < count:
            schedule = self._known.pop(0)
            if schedule not in self.tried:
                found.append(schedule)
        while len(found) < count:
            left = [candidate for candidate in self._open() if candidate.schedule not in found]
            if not left:
                break
            found.append(self._mutation(left) if len(found) % 2 else self._draw(left))
        return found

    def _open(self) -> list[Candidate]:
        return [candidate for candidate in self._space or () if candidate.schedule not in self.tried]

    def _fastest(self, count: int) -> list[Record]:
        timed = [record for record in self.tried.values() if record.seconds is not None]
        return sorted(timed, key=lambda record: (record.seconds or 0.0, record.schedule))[:count]

    def finalists(self) -> list[Schedule]:
        """Return what was about as fast as the fastest, if this search has tried anything and there are several."""
        fastest = self._fastest(_FINALISTS) if len(self.tried) > self._noted else []
        near = [r.schedule for r in fastest if (r.seconds or 0.0) <= (1 + _NEAR) * (fastest[0].seconds or 0.0)]
        return near if len(near) > 1 else []

    def _draw(self, left: Sequence[Candidate]) -> Schedule:
        weights = [candidate.cost**-_BIAS for candidate in left]
        return self._random.choices(left, weights)[0].schedule

    def _mutation(self, left: Sequence[Candidate]) -> Schedule:
        parents = self._fastest(_PARENTS)
        if not parents:
            return self._draw(left)
        parent = self._random.choice(parents).schedule
        near = [candidate for candidate in left if candidate.schedule.algorithm == parent.algorithm]
        if not near:
            return self._draw(left)
        weights = [2 ** -distance(candidate.schedule, parent) / candidate.cost for candidate in near]
        return self._random.choices(near, weights)[0].schedule

    def result(self) -> Tuned:
        """Return what is known."""
        return Tuned(
            self.problem,
            self.target.name,
            self.best,
            self.tried.get(self.default),
            self.floor,
            len(self.tried),
            tuple(self.warnings),
        )


@dataclass
class _Machine:
    """The processes that compile for one target, where what they made is measured, and the log of what came of it."""

    target: Target
    meters: Meters
    log: Log
    seed: int
    jobs: int
    timeout: float
    _stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def __enter__(self) -> _Machine:
        with contextlib.ExitStack() as stack:
            self._scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            self._pool = stack.enter_context(ThreadPoolExecutor(self.jobs))
            kind: type = Builder
            arguments: tuple[object, ...]
            if isinstance(self.target, CudaTarget):
                kind, arguments = CudaBuilder, (find_nvcc(), cuda_capability())
            else:
                cc = find_compiler()
                arguments = cc, launcher_object(cc, self._scratch)
            workers = (Worker(kind, self.target.name, self._scratch, *arguments) for _ in range(self.jobs))
            self._builders = [stack.enter_context(worker) for worker in workers]
            self._stack = stack.pop_all()
        self.conditions = Conditions(self.meters.host.name, self.meters.threads, kernel_digest())
        self._floors: Floors | None = None
        self._kinds: dict[str, float] = {}
        self._references: dict[str, Built] = {}
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def measure_floors(self, problems: Iterable[Problem]) -> None:
        """Measure what the machine can do, once; a device says itself how fast it multiplies."""
        if self._floors is not None:
            return
        rates = {}
        if isinstance(self.target, CudaTarget):
            for kind in sorted({_kind(problem) for problem in problems}):
                self._kinds[kind] = self.meters.rate("multiply_adds", kind, timeout=_BUILD_TIMEOUT)
        else:
            for dtype in sorted({problem.accumulate_dtype for problem in problems} & set(FMA_DTYPES)):
                assert isinstance(self.target, CpuTarget)
                kernel = build_fma(self.target, dtype, self._scratch)
                rates[dtype] = self.meters.rate("fma", kernel, timeout=_BUILD_TIMEOUT)
        self._floors = Floors(rates, self.meters.rate("copy", timeout=_BUILD_TIMEOUT))

    def floor(self, problem: Problem) -> float:
        """Return the seconds that no schedule of `problem` beats."""
        assert self._floors is not None
        floors = list(self._floors.seconds(problem).values())
        return max([*floors, *(problem.macs / rate for kind, rate in self._kinds.items() if kind == _kind(problem))])

    def round(self, search: _Search, schedules: Sequence[Schedule]) -> Iterator[Record]:
        """Compile all, then measure each; yield what became of each, which the log has by then.

        What is being measured when nobody listens any more comes into the log all the same.
        """
        wanted = list(schedules)
        if search.key not in self._references:
            wanted = list(dict.fromkeys([search.default, *wanted]))
        built = dict(zip(wanted, self._compile(search.key, wanted), strict=True))
        if search.key not in self._references:
            reference = built[search.default]
            if isinstance(reference, str):
                search.broken = True
                if search.default not in search.tried:
                    yield self._kept(search, search.default, f"does not compile: {reference}")
                return
            self._references[search.key] = reference

        def measured(schedule: Schedule) -> Record:
            return self._kept(search, schedule, self._outcome(search, built[schedule]))

        for _, record in self.meters.each(measured, schedules):
            yield record
            if search.broken:
                return
        for made in built.values():
            if isinstance(made, Built) and made != self._references[search.key]:
                made.deconv.unlink(missing_ok=True)

    def _compile(self, key: str, schedules: Sequence[Schedule]) -> list[Built | str]:
        free = list(self._builders)

        def compile_one(schedule: Schedule) -> Built | str:
            builder = free.pop()
            try:
                built: Built = builder.ask("build", key, schedule, timeout=_BUILD_TIMEOUT)
            except WorkerError as error:
                return str(error)
            finally:
                free.append(builder)
            return built

        return list(self._pool.map(compile_one, schedules))

    def _outcome(self, search: _Search, built: Built | str) -> Measured | str:
        if isinstance(built, str):
            return f"does not compile: {built}"
        fastest = search.best.seconds if search.best else None
        longest = max(self.timeout, 50 * (fastest or 0.0))
        reference = self._references[search.key]
        try:
            return self.meters.measure(search.key, self.seed, reference, built, fastest or math.inf, longest)
        except BrokenDefaultError as error:
            search.broken = True
            return str(error)
        except WorkerError as error:
            return str(error)

    def _kept(self, search: _Search, schedule: Schedule, outcome: Measured | str) -> Record:
        """Write to the log what became of a trial."""
        failed = isinstance(outcome, str)
        record = Record(
            problem=search.key,
            target=self.target.name,
            algorithm=schedule.algorithm,
            knobs=dict(schedule.knobs),
            seconds=None if isinstance(outcome, str) else outcome.seconds,
            spread=0.0 if isinstance(outcome, str) else round(outcome.spread, 4),
            runs=0 if isinstance(outcome, str) else outcome.runs,
            error=str(outcome) if failed else "",
            threads=self.meters.threads,
            host=self.conditions.host,
            sources=self.conditions.sources,
            commit=_commit(),
            seed=self.seed,
            versions={name: importlib.metadata.version(name) for name in ("tvm_deconv", "apache-tvm")},
            when=_now(),
        )
        self.log.append(record)
        return record


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="milliseconds")


def _kind(problem: Problem) -> str:
    """Return the type that a device multiplies."""
    return problem.dtype if problem.precision == "ieee" else problem.precision


@cache
def _commit() -> str:
    """The commit of the checkout that this runs from; the version where it is installed."""
    root = Path(__file__).parents[2]
    if (root / ".git").exists():
        command = ["git", "-C", str(root), "rev-parse", "--short=12", "HEAD"]
        with contextlib.suppress(OSError):
            said = subprocess.run(command, capture_output=True, text=True, check=False)
            if said.returncode == 0:
                return said.stdout.strip()
    return f"v{importlib.metadata.version('tvm_deconv')}"
