"""Which schedule a problem is built with: the best record of exactly it, the nearest record adapted, or the default.

`space` lists the schedules that a search may try. Adapting is choosing from the same list, so what was measured on
one problem is a valid schedule of another whatever their extents.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tvm_deconv.compiler.records import Record, Records, Schedule
from tvm_deconv.errors import DeconvError, ProblemError
from tvm_deconv.problem import Problem
from tvm_deconv.schedules import cuda
from tvm_deconv.schedules.x86 import ALGORITHMS, Plan, default_plan
from tvm_deconv.targets import CpuTarget, CudaTarget, Target, get

#: Records farther than this from a problem say less about it than the arithmetic of the default does.
FAR = 8.0
#: What the nearest record's knobs may cost by arithmetic, relative to the default's, where it is built with them.
AGREES = 1.15
#: How much a factor of two in a field counts. Kernel and strides decide the taps and phases, which tiles are made for.
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
    """A schedule with its cost by arithmetic, relative."""

    schedule: Schedule
    cost: float


@dataclass(frozen=True)
class Choice:
    """A schedule to build with, and why: `origin` is what the manifest says, `reason` what people are told.

    Without a `schedule` it is the default, which the kernel's own arithmetic chooses, among `algorithms` where they are
    given. For a problem with several variants, `parts` are a choice for each, unless one schedule is to serve all.
    """

    schedule: Schedule | None
    origin: str
    reason: str
    algorithms: tuple[str, ...] | None = None
    parts: tuple[Choice, ...] = ()


_EVERY = (*ALGORITHMS, *cuda.ALGORITHMS)


def of_target(target: Target) -> Sequence[Any]:
    """Return the algorithms for a target, those of `schedules.x86` or `schedules.cuda`."""
    return cuda.ALGORITHMS if isinstance(target, CudaTarget) else ALGORITHMS


def named(algorithm: str) -> Any:
    """Return the algorithm called `algorithm`, for whichever targets; ProblemError lists the known names."""
    for known in _EVERY:
        if known.name == algorithm:
            return known
    raise ProblemError("algorithm", algorithm, f"must be one of {', '.join(known.name for known in _EVERY)}")


def plan_of(schedule: Schedule) -> Plan | cuda.Plan:
    """Return the plan of a schedule; ProblemError where it is not one of this version's."""
    knobs = dict(schedule.knobs)
    try:
        plan: Plan | cuda.Plan = named(schedule.algorithm).family.read(knobs)
    except (KeyError, TypeError, ValueError) as error:
        raise ProblemError("knobs", knobs, f"are not those of a plan: {error}") from None
    if plan.knobs != knobs or min(knobs.values(), default=0) < 0:
        raise ProblemError("knobs", knobs, "are not those of a plan")
    return plan


def of_algorithm(problem: Problem, algorithm: Any, target: Target) -> list[Candidate]:
    """Return every plan of one algorithm that is worth considering, the cheapest first."""
    found = algorithm.family.plans(problem, target)
    return [Candidate(Schedule.of(algorithm.name, plan.knobs), cost) for cost, plan in found]


def cost_of(problem: Problem, schedule: Schedule, target: Target) -> float:
    """Return the cost of a schedule by arithmetic, relative; infinite where it is none worth considering."""
    options = of_algorithm(problem, named(schedule.algorithm), target)
    return next((option.cost for option in options if option.schedule == schedule), math.inf)


def idle(problem: Problem, schedule: Schedule, threads: int) -> float:
    """Return the time that `threads` threads take over what they would take if all had the same to do, at least 1."""
    tasks: int = named(schedule.algorithm).family.tasks(problem, plan_of(schedule))
    return -(-tasks // threads) * threads / tasks


def space(
    problem: Problem, target: Target, threads: int = 1, algorithms: Collection[str] | None = None
) -> list[Candidate]:
    """Return every schedule worth considering, of all `algorithms` that admit the problem, the cheapest first."""
    admitting = (
        algorithm
        for algorithm in of_target(target)
        if (algorithms is None or algorithm.name in algorithms) and algorithm.admits(problem, target)
    )
    found = [
        Candidate(candidate.schedule, candidate.cost * idle(problem, candidate.schedule, threads))
        for algorithm in admitting
        for candidate in of_algorithm(problem, algorithm, target)
    ]
    return sorted(found, key=lambda candidate: candidate.cost)


def default(problem: Problem, target: Target, algorithms: Collection[str] | None = None) -> Schedule:
    """Return the schedule that arithmetic alone chooses."""
    if isinstance(target, CudaTarget):
        return Schedule.of(*cuda.default_schedule(problem, algorithms))
    assert isinstance(target, CpuTarget)
    algorithm, plan = default_plan(problem, target, algorithms)
    return Schedule.of(algorithm.name, plan.knobs)


def distance(one: Schedule, other: Schedule) -> float:
    """How far apart the knobs of two schedules of one algorithm are: factors of two, summed."""
    ours, theirs = dict(one.knobs), dict(other.knobs)
    return sum(abs(math.log2((ours.get(name, 0) + 1) / (theirs.get(name, 0) + 1))) for name in ours | theirs)


def adapt(schedule: Schedule, source: Problem, problem: Problem, target: Target) -> Schedule:
    """Return the schedule of `problem` that is most like `schedule` of the problem `source`.

    A decision that is the largest of its problem, such as a block that holds a whole axis, becomes the largest.
    """
    algorithm = named(schedule.algorithm)

    def largest(options: Sequence[Candidate]) -> dict[str, int]:
        found: dict[str, int] = {}
        for option in options:
            for name, value in option.schedule.knobs:
                found[name] = max(value, found.get(name, value))
        return found

    options = of_algorithm(problem, algorithm, target)
    theirs, ours = largest(of_algorithm(source, algorithm, target)), largest(options)
    wanted = Schedule(
        schedule.algorithm,
        tuple((name, ours.get(name, value) if value == theirs.get(name) else value) for name, value in schedule.knobs),
    )
    return min(options, key=lambda option: (distance(option.schedule, wanted), option.cost)).schedule


def apart(one: Problem, other: Problem) -> float:
    """How unlike two problems are; infinite where layout, type or the number of axes differ."""
    if any(getattr(one, name) != getattr(other, name) for name in ("rank", "dtype", "precision", "data_format")):
        return math.inf

    def extents(problem: Problem, name: str) -> tuple[int, ...]:
        value = getattr(problem, name)
        return value if isinstance(value, tuple) else (value,)

    found = 0.0 if one.epilogue == other.epilogue else _EPILOGUE
    for name, weight in _WEIGHTS.items():
        for mine, theirs in zip(extents(one, name), extents(other, name), strict=True):
            found += weight * abs(math.log2(max(mine, 1) / max(theirs, 1)))
    return found


def nearest(
    problem: Problem, target: Target, records: Records, algorithms: Collection[str] | None = None
) -> tuple[Record, Schedule] | None:
    """Return the best record of the problem most like `problem`, and its schedule adapted; None where none is near.

    Records of algorithms that do not admit the problem, that this version does not know, or that are not among
    `algorithms` where those are given, are passed over.
    """
    near = sorted(
        (far, key)
        for key in records.by_problem
        if key != problem.artifact_key and (far := apart(problem, Problem.from_key(key))) <= FAR
    )
    for _, key in near:
        usable = (r for r in records.comparable(key) if allowed(r, algorithms) and not replays(r))
        record = next(usable, None)
        if record is not None and named(record.algorithm).admits(problem, target):
            return record, adapt(record.schedule, Problem.from_key(key), problem, target)
    return None


def trusted(
    problem: Problem, target: Target, records: Records, algorithms: Collection[str] | None = None
) -> tuple[Record, Schedule] | None:
    """Return the `nearest` where arithmetic sees little between its knobs and the default's, else None."""
    found = nearest(problem, target, records, algorithms)
    if found is None:
        return None
    most = AGREES * cost_of(problem, default(problem, target, algorithms), target)
    return found if cost_of(problem, found[1], target) <= most else None


def allowed(record: Record, algorithms: Collection[str] | None) -> bool:
    """Whether the algorithm of a record is among `algorithms`, of which None means all."""
    return algorithms is None or record.algorithm in algorithms


def checked(algorithms: Iterable[str] | None) -> tuple[str, ...] | None:
    """Return names of algorithms in their own order; ProblemError where one is not known, or there is none."""
    if algorithms is None:
        return None
    asked = {named(name).name for name in algorithms}
    if not asked:
        raise ProblemError("algorithms", (), f"must name at least one of {', '.join(a.name for a in _EVERY)}")
    return tuple(known.name for known in _EVERY if known.name in asked)


def for_target(algorithms: Collection[str] | None, target: Target) -> tuple[str, ...] | None:
    """Return those of `algorithms` that are for a target; None, all, where none is."""
    return tuple(a.name for a in of_target(target) if algorithms and a.name in algorithms) or None


def choices(
    problem: Problem,
    target: Target,
    records: Records,
    warnings: list[str] | None = None,
    algorithms: tuple[str, ...] | None = None,
) -> Iterator[Choice]:
    """Yield what to build `problem` with, the best first, of `algorithms` where they are given; the default comes last.

    What follows the first is for a kernel that does not build. A record that no longer replays is skipped, and said
    in `warnings`. A variable problem is built with what each of its variants would be.
    """
    if len(problem.variants) > 1:
        each = [[*choices(one, target, records, warnings, algorithms)] for one in problem.variants]
        for i in range(max(map(len, each))):
            parts = tuple(options[min(i, len(options) - 1)] for options in each)
            origin = "tuned" if all(part.origin == "tuned" for part in parts) else "default"
            yield Choice(None, origin, "; ".join(dict.fromkeys(part.reason for part in parts)), algorithms, parts)
        return
    (problem,) = problem.variants
    for record in records.comparable(problem.artifact_key):
        if not allowed(record, algorithms):
            continue
        unusable = replays(record)
        if unusable is None:
            yield Choice(record.schedule, "tuned", "the record of this problem")
            break
        if warnings is not None:
            warnings.append(unusable)
    near = trusted(problem, target, records, algorithms)
    if near is not None:
        yield Choice(near[1], "default", f"adapted from the record of {near[0].problem}")
    yield Choice(None, "default", "the default", algorithms)


def replays(record: Record) -> str | None:
    """Return why a record does not replay with this version, None where it does; nothing is compiled."""
    try:
        get(record.target)
        plan_of(record.schedule)
    except DeconvError as error:
        return f"record of {record.problem} for {record.target} by {record.algorithm}: does not replay: {error}"
    return None
