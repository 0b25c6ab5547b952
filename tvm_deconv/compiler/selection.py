"""The selection of the schedule that a problem is built with: a record of it, the nearest record adapted, or a default.

A record that these kernels made, in turns with the default, on a machine like the one that is built for, is a verdict.
All others are proposals, which arithmetic must agree with.

`space` lists the schedules that a search may try. Adapting is choosing from the same list, so a schedule measured on
one problem becomes a valid schedule of another, whatever their extents.
"""

from __future__ import annotations

import heapq
import itertools
import math
import operator
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from tvm_deconv.compiler.backends import BACKENDS, backend_of, every_algorithm
from tvm_deconv.compiler.fingerprint import kernel_digest
from tvm_deconv.compiler.records import Record, Records, Schedule
from tvm_deconv.errors import DeconvError, ProblemError
from tvm_deconv.problem import Problem
from tvm_deconv.schedules.contract import AnyAlgorithm, Plan, imbalance
from tvm_deconv.targets import Target, get

#: Records farther than this from a problem say less about it than the arithmetic of the default does.
FAR = 8.0
#: The most that a proposal may cost by arithmetic, relative to the default, to be built.
AGREES = 1.1
#: A search does not try plans that cost more than this, relative to the cheapest.
HOPELESS_COST = 2.5
#: The weight of a factor of two in a field. Kernel and strides decide taps and phases, which tiles are made for.
_WEIGHTS = {
    "batch": 0.5,
    "groups": 1.0,
    "in_channels": 1.0,
    "out_channels": 1.5,
    "data_spatial": 1.0,
    "kernel": 3.0,
    "strides": 4.0,
    "dilations": 3.0,
}
_EPILOGUE = 0.25  # for another bias or activation


@dataclass(frozen=True)
class Candidate:
    """A plan of an algorithm with its relative cost by arithmetic."""

    algorithm: str
    plan: Plan
    cost: float

    @cached_property
    def schedule(self) -> Schedule:
        """The plan as logs have it. Of the tens of thousands of a space few are ever written."""
        return Schedule.of(self.algorithm, self.plan.knobs)


@dataclass(frozen=True)
class Choice:
    """A schedule to build with; `origin` is the manifest's word for it, `reason` the explanation for people.

    Without a `schedule` it is the default, which arithmetic chooses, among `algorithms` if they are given. For a
    problem with several variants `parts` holds a choice for each, unless one schedule serves all.
    """

    schedule: Schedule | None
    origin: str
    reason: str
    algorithms: tuple[str, ...] | None = None
    parts: tuple[Choice, ...] = ()


def named(algorithm: str) -> AnyAlgorithm:
    """Return the algorithm with this name, of any backend; ProblemError lists the known names."""
    every = every_algorithm()
    for known in every:
        if known.name == algorithm:
            return known
    raise ProblemError("algorithm", algorithm, f"must be one of {', '.join(known.name for known in every)}")


def plan_of(schedule: Schedule) -> Plan:
    """Return the plan of a schedule; ProblemError if this version has no such plan."""
    knobs = dict(schedule.knobs)
    try:
        plan: Plan = named(schedule.algorithm).read(knobs)
    except (KeyError, TypeError, ValueError) as error:
        raise ProblemError("knobs", knobs, f"are not those of a plan: {error}") from None
    if plan.knobs != knobs or min(knobs.values(), default=0) < 0:
        raise ProblemError("knobs", knobs, "are not those of a plan")
    return plan


def candidates_of(problem: Problem, algorithm: AnyAlgorithm, target: Target) -> list[Candidate]:
    """Return every schedule of one algorithm that is worth considering, the cheapest first."""
    return [Candidate(algorithm.name, plan, cost) for cost, plan in algorithm.candidates(problem, target)]


def cost_of(problem: Problem, schedule: Schedule, target: Target) -> float:
    """Return the relative cost of a schedule by arithmetic; infinite if it is not worth considering."""
    algorithm = named(schedule.algorithm)
    try:
        plan = plan_of(schedule)
    except ProblemError:
        return math.inf
    return _cost_of_plan(problem, algorithm, plan, target)


def in_space(problem: Problem, schedule: Schedule, target: Target) -> bool:
    """Return whether a search for `target` could find `schedule`."""
    algorithm = named(schedule.algorithm)
    return algorithm.supports(problem, target) and math.isfinite(cost_of(problem, schedule, target))


def _cost_of_plan(problem: Problem, algorithm: AnyAlgorithm, plan: Plan, target: Target) -> float:
    return next((cost for cost, option in algorithm.candidates(problem, target) if option == plan), math.inf)


def load_imbalance(problem: Problem, algorithm: AnyAlgorithm, plan: Plan, threads: int) -> float:
    """Return the makespan of the tasks of a call on `threads` threads relative to the ideal one, at least 1."""
    return 1.0 if threads == 1 else imbalance(algorithm.tasks(problem, plan), threads)


def space(
    problem: Problem, target: Target, threads: int = 1, algorithms: Collection[str] | None = None
) -> Iterator[Candidate]:
    """Yield every schedule worth considering of all `algorithms` that support the problem, the cheapest first.

    Those that cost more than `HOPELESS_COST` times the cheapest are left out. They are tens of thousands: for one
    thread each is made when it is asked for.
    """
    supporting = [
        (algorithm, algorithm.candidates(problem, target))
        for algorithm in backend_of(target).algorithms
        if (algorithms is None or algorithm.name in algorithms) and algorithm.supports(problem, target)
    ]

    def on_threads(algorithm: AnyAlgorithm, cost: float, plan: Plan) -> Candidate:
        return Candidate(algorithm.name, plan, cost * load_imbalance(problem, algorithm, plan, threads))

    most = HOPELESS_COST * min((on_threads(algorithm, *plans[0]).cost for algorithm, plans in supporting), default=0.0)

    def worthwhile(algorithm: AnyAlgorithm, plans: Iterable[tuple[float, Plan]]) -> Iterator[Candidate]:
        return (on_threads(algorithm, *plan) for plan in itertools.takewhile(lambda plan: plan[0] <= most, plans))

    found = [worthwhile(algorithm, plans) for algorithm, plans in supporting]
    by_cost = operator.attrgetter("cost")
    if threads == 1:
        return heapq.merge(*found, key=by_cost)
    ordered = sorted(itertools.chain(*found), key=by_cost)
    return (candidate for candidate in ordered if candidate.cost <= HOPELESS_COST * ordered[0].cost)


def default_schedule(problem: Problem, target: Target, algorithms: Collection[str] | None = None) -> Schedule:
    """Return the schedule that arithmetic alone chooses. Raises BuildError if no algorithm supports the problem."""
    return _default(problem, target, None if algorithms is None else tuple(algorithms)).schedule


@lru_cache(1024)
def _default(problem: Problem, target: Target, algorithms: tuple[str, ...] | None) -> Candidate:
    """Return the schedule that arithmetic alone chooses, and its cost."""
    algorithm, plan = backend_of(target).default(problem, target, algorithms)
    return Candidate(algorithm.name, plan, _cost_of_plan(problem, algorithm, plan, target))


def distance(schedule: Schedule, other: Schedule) -> float:
    """Return how far apart the knobs of two schedules of one algorithm are: factors of two, summed."""
    ours, theirs = dict(schedule.knobs), dict(other.knobs)
    return sum(abs(math.log2((ours.get(name, 0) + 1) / (theirs.get(name, 0) + 1))) for name in ours | theirs)


def adapt(schedule: Schedule, source: Problem, problem: Problem, target: Target) -> Schedule:
    """Return the schedule of `problem` that is most like `schedule` of the problem `source`.

    A knob that is the largest of its problem, such as a block that holds a whole axis, becomes the largest.
    """
    algorithm = named(schedule.algorithm)
    options = candidates_of(problem, algorithm, target)
    theirs, ours = _largest_knobs(candidates_of(source, algorithm, target)), _largest_knobs(options)
    wanted = Schedule(
        schedule.algorithm,
        tuple((name, ours.get(name, value) if value == theirs.get(name) else value) for name, value in schedule.knobs),
    )
    return min(options, key=lambda option: (distance(option.schedule, wanted), option.cost)).schedule


def _largest_knobs(options: Sequence[Candidate]) -> dict[str, int]:
    largest: dict[str, int] = {}
    for option in options:
        for name, value in option.schedule.knobs:
            largest[name] = max(value, largest.get(name, value))
    return largest


def apart(problem: Problem, other: Problem) -> float:
    """Return how unlike two problems are; infinite if layout, type or the number of axes differ."""
    if any(getattr(problem, name) != getattr(other, name) for name in ("rank", "dtype", "precision", "data_format")):
        return math.inf
    total = 0.0 if problem.epilogue == other.epilogue else _EPILOGUE
    for name, weight in _WEIGHTS.items():
        for mine, theirs in zip(_extents(problem, name), _extents(other, name), strict=True):
            total += weight * abs(math.log2(max(mine, 1) / max(theirs, 1)))
    return total


def _extents(problem: Problem, name: str) -> tuple[int, ...]:
    value: Any = getattr(problem, name)
    return value if isinstance(value, tuple) else (value,)


def nearest(
    problem: Problem, target: Target, records: Records, algorithms: Collection[str] | None = None
) -> tuple[Record, Schedule] | None:
    """Return the best record of the convolution most like `problem`, and its schedule adapted; None if none is near.

    Passed over are convolutions whose default was as fast, and records of algorithms that do not support the problem,
    that this version does not know, or that are not among `algorithms` if those are given.
    """
    own = records.of_convolution(problem)
    near = sorted(
        (far, key)
        for key in records.by_problem
        if key not in own and (far := apart(problem, Problem.from_key(key))) <= FAR
    )
    for _, key in near:
        record = _leader(records.comparable(key), algorithms)
        if record is not None and not record.beaten and named(record.algorithm).supports(problem, target):
            return record, adapt(record.schedule, Problem.from_key(key), problem, target)
    return None


def _leader(
    group: Iterable[Record], algorithms: Collection[str] | None, warnings: list[str] | None = None
) -> Record | None:
    """Return the first record of a group that is allowed and replays; `warnings` gets the reasons of the others."""
    for record in group:
        if not allowed(record, algorithms):
            continue
        unusable = replay_error(record)
        if unusable is None:
            return record
        if warnings is not None:
            warnings.append(unusable)
    return None


def agrees(problem: Problem, schedule: Schedule, target: Target, algorithms: Collection[str] | None = None) -> bool:
    """Return whether arithmetic sees little difference between a schedule and the default, or prefers it."""
    default = _default(problem, target, None if algorithms is None else tuple(algorithms))
    return cost_of(problem, schedule, target) <= AGREES * default.cost


def trusted(
    problem: Problem, target: Target, records: Records, algorithms: Collection[str] | None = None
) -> tuple[Record, Schedule] | None:
    """Return the `nearest` if its algorithm is that of the default and arithmetic agrees with it, else None.

    Which algorithm is best is a matter of the extents, in which the other problem differs.
    """
    near = nearest(problem, target, records, algorithms)
    if near is None or near[1].algorithm != default_schedule(problem, target, algorithms).algorithm:
        return None
    return near if agrees(problem, near[1], target, algorithms) else None


def allowed(record: Record, algorithms: Collection[str] | None) -> bool:
    """Return True if the algorithm of a record is among `algorithms`; None means all."""
    return algorithms is None or record.algorithm in algorithms


def checked_algorithms(algorithms: Iterable[str] | None, targets: Sequence[str]) -> tuple[str, ...] | None:
    """Return names of algorithms in order of preference, for targets with these names: "native" is any CPU.

    Raises ProblemError if one is unknown, or if none is for any of the targets.
    """
    if algorithms is None:
        return None
    asked = {named(name).name for name in algorithms}
    backends = {"x86" if name == "native" else get(name).backend for name in targets}
    theirs = [algorithm.name for name in BACKENDS if name in backends for algorithm in BACKENDS[name].algorithms]
    chosen = tuple(algorithm.name for algorithm in every_algorithm() if algorithm.name in asked)
    if asked.isdisjoint(theirs):
        rule = f"must name at least one of {', '.join(theirs)}, those for {' and '.join(targets)}"
        raise ProblemError("algorithms", chosen, rule)
    return chosen


def algorithms_for(target: Target, algorithms: Collection[str] | None) -> tuple[str, ...] | None:
    """Return those of `algorithms` that are for a target; None, which means all, if none is."""
    return tuple(a.name for a in backend_of(target).algorithms if algorithms and a.name in algorithms) or None


def choices_for(
    problem: Problem,
    target: Target,
    records: Records,
    warnings: list[str] | None = None,
    algorithms: tuple[str, ...] | None = None,
) -> Iterator[Choice]:
    """Yield the schedules to build `problem` with, the best first, of `algorithms` if given; the default comes last.

    The default after another is for a kernel that does not build; its reason names the records that it overrules. A
    record that no longer replays is skipped, with an entry in `warnings`. Each variant of a problem has the choices
    that it would have alone.
    """
    if len(problem.variants) > 1:
        yield from _choices_of_variants(problem, target, records, warnings, algorithms)
        return
    (problem,) = problem.variants
    overruled: list[str] = []
    choice = _recorded(problem, target, records, warnings, algorithms, overruled)
    if choice is None and (near := trusted(problem, target, records, algorithms)):
        choice = Choice(near[1], "default", "; ".join([f"adapted from the record of {near[0].problem}", *overruled]))
    if choice is not None:
        yield choice
    if choice is None or choice.schedule:
        yield Choice(None, "default", "; ".join(["the default", *overruled]), algorithms)


def leaders(
    problem: Problem, records: Records, algorithms: Collection[str] | None = None, warnings: list[str] | None = None
) -> list[Record]:
    """Return the best record of this convolution from each machine and with each epilogue, the most relevant first.

    The nearest machine comes first, then these kernels, then the most similar epilogue.
    """
    groups = (group for key in records.of_convolution(problem) for group in records.groups(key))
    found = [record for group in groups if (record := _leader(group, algorithms, warnings))]
    return sorted(found, key=lambda record: (records.apart(record), not is_of_today(record)))


def fitted(problem: Problem, target: Target, record: Record) -> Schedule:
    """Return the schedule of a record of the same convolution, adapted if `problem` has no such plan."""
    if cost_of(problem, record.schedule, target) < math.inf:
        return record.schedule
    return adapt(record.schedule, Problem.from_key(record.problem), problem, target)


def _recorded(
    problem: Problem,
    target: Target,
    records: Records,
    warnings: list[str] | None,
    algorithms: tuple[str, ...] | None,
    overruled: list[str],
) -> Choice | None:
    """Return what the records of this convolution decide, None if nothing; `overruled` gets reasons.

    The default that a record was measured with is that of all algorithms: where some are asked for, it is not theirs.
    """
    for record in leaders(problem, records, algorithms, warnings):
        source = _description(problem, records, record)
        if record.beaten and algorithms is None:
            return Choice(None, "tuned", f"the default: nothing was faster by more than 1 %: {source}")
        if not named(record.algorithm).supports(problem, target):
            continue
        exact = record.problem == problem.artifact_key
        if exact and _is_verdict(records, record, algorithms):
            return Choice(record.schedule, "tuned", source)
        schedule = fitted(problem, target, record)
        same = schedule == record.schedule
        if (same and _is_verdict(records, record, algorithms)) or agrees(problem, schedule, target, algorithms):
            return Choice(schedule, "tuned" if same else "default", source if same else f"adapted from {source}")
        overruled.append(f"overruled by arithmetic: {source}")
    return None


def is_of_today(record: Record) -> bool:
    """Return whether the kernels that a record was measured with are those of this version."""
    return record.sources == kernel_digest(get(record.target).backend)


def _is_verdict(records: Records, record: Record, algorithms: Collection[str] | None) -> bool:
    """Return whether a record says what is fastest here: by these kernels, on such a machine, beside the default."""
    here = is_of_today(record) and records.apart(record) == 0
    return here and (record.default_ratio is not None or algorithms is not None)


def _description(problem: Problem, records: Records, record: Record) -> str:
    """Return the words for a record: what it is of, on which machine and by which kernels it was measured."""
    epilogue = Problem.from_key(record.problem).epilogue
    text = "the record of this problem"
    if epilogue != problem.epilogue:
        text = f"the record of this convolution with the epilogue {epilogue}"
    if records.apart(record) > 0:
        text += f", measured on {record.microarchitecture or 'an unknown CPU'}"
    return text if is_of_today(record) else f"{text}, made by other kernels"


def _choices_of_variants(
    problem: Problem,
    target: Target,
    records: Records,
    warnings: list[str] | None,
    algorithms: tuple[str, ...] | None,
) -> Iterator[Choice]:
    """Yield choices with a part for each variant; a variant with fewer choices repeats its last."""
    of_variants = [[*choices_for(variant, target, records, warnings, algorithms)] for variant in problem.variants]
    for i in range(max(map(len, of_variants))):
        parts = tuple(choices[min(i, len(choices) - 1)] for choices in of_variants)
        origin = "tuned" if all(part.origin == "tuned" for part in parts) else "default"
        yield Choice(None, origin, "; ".join(dict.fromkeys(part.reason for part in parts)), algorithms, parts)


def replay_error(record: Record) -> str | None:
    """Return why a record does not replay with this version, None if it does; nothing is compiled."""
    try:
        get(record.target)
        plan_of(record.schedule)
    except DeconvError as error:
        return f"record of {record.problem} for {record.target} by {record.algorithm}: does not replay: {error}"
    return None
