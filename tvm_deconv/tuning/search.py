"""The state of the search for one problem on one target, and what to try next.

Proposals come from `selection.space`. First what is known: the default, the best under other conditions and of other
epilogues, the nearest record, the cheapest of each algorithm. Then two kinds take turns: a candidate drawn by its
arithmetic cost, and a mutation, which is like one of the fastest so far. Candidates that cost `HOPELESS_COST` times the
cheapest by arithmetic are not tried at all.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from tvm_deconv.compiler.records import Conditions, Record, Records, Schedule
from tvm_deconv.compiler.selection import (
    Candidate,
    default_schedule,
    distance,
    fitted,
    leaders,
    named,
    nearest,
    space,
)
from tvm_deconv.problem import Problem
from tvm_deconv.targets import Target

#: A schedule that costs more than this many times the cheapest, by arithmetic, is not tried.
HOPELESS_COST = 4.0
#: How strongly drawing prefers the cheap: a candidate of twice the cost is drawn 2**-_BIAS times as often.
_BIAS = 4.0
_PARENTS = 3  # mutations start from one of this many fastest
_PATIENCE = 16.0  # this many trials without a better schedule halve the expected gain
_LEAST_GAP = 0.02  # floors are measured too, and a schedule may seem to be below
#: Finalists: at most this many, not slower than the fastest by more than `_NEAR` of its time.
_FINALISTS = 4
_NEAR = 0.1


class Search:
    """The trials of one problem on one target so far, and proposals for more."""

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
        self.default = default_schedule(problem, target, algorithms)
        self.broken = False
        self._since_better = 0
        self._threads = conditions.threads
        self._records = records
        for record in sorted(records.by_problem.get(self.key, ()), key=lambda record: record.when):
            if record.conditions == conditions:
                self.note(record)
        self._tried_before = len(self.tried)
        self._random = random.Random(f"{seed} {target.name} {self.key} {self._tried_before}")
        self._known: list[Schedule] = []
        self._space: list[Candidate] | None = None

    def _known_schedules(self) -> list[Schedule]:
        known = [self.default]
        for record in leaders(self.problem, self._records, self.algorithms, self.warnings):
            if named(record.algorithm).supports(self.problem, self.target):
                known.append(fitted(self.problem, self.target, record))
        near = nearest(self.problem, self.target, self._records, self.algorithms)
        known += [near[1]] if near else []  # arithmetic may be wrong about it: that is what measuring is for
        return list(dict.fromkeys(known))

    @property
    def best(self) -> Record | None:
        """The fastest record so far."""
        return next(iter(self._fastest(1)), None)

    @property
    def decided(self) -> Record | None:
        """The record that builds follow: the best of those that took turns, unless the default is as good."""
        timed = [record for record in self.tried.values() if record.seconds is not None]
        best = min(timed, key=lambda record: record.merit, default=None)
        return self.tried.get(self.default, best) if best and best.beaten else best

    @property
    def exhausted(self) -> bool:
        """Whether nothing is left to try."""
        return self.broken or (self._space is not None and not self._untried() and not self._known)

    def note(self, record: Record) -> None:
        """Add the record of a trial."""
        before = self.best
        self.tried[record.schedule] = record
        better = record.seconds is not None and (before is None or record.seconds < (before.seconds or 0.0))
        self._since_better = 0 if better else self._since_better + 1

    def expected_gain(self, floor: float) -> float:
        """Return how much more trials promise, relative to other problems; infinity before the first round.

        The gain is the gap to the floor times the root of the time. That lies between the sum of all times, which one
        slow layer rules, and the mean of the gaps, to which layers of microseconds count as much as any.
        """
        fastest = self.best
        if fastest is None or fastest.seconds is None:
            return math.inf if not self.tried else 0.0
        gap = max(1 - floor / fastest.seconds, _LEAST_GAP)
        return gap * math.sqrt(fastest.seconds) * 2 ** (-self._since_better / _PATIENCE)

    def propose(self, count: int) -> list[Schedule]:
        """Return up to `count` schedules that have not been tried yet."""
        if self._space is None:
            self._open_space()
        proposals: list[Schedule] = []
        while self._known and len(proposals) < count:
            schedule = self._known.pop(0)
            if schedule not in self.tried:
                proposals.append(schedule)
        while len(proposals) < count:
            left = [candidate for candidate in self._untried() if candidate.schedule not in proposals]
            if not left:
                break
            proposals.append(self._mutation(left) if len(proposals) % 2 else self._draw(left))
        return proposals

    def finalists(self) -> list[Schedule]:
        """Return the default and the schedules about as fast as the fastest; none if they have had their turns."""
        fastest = self._fastest(_FINALISTS)
        turned = self.algorithms is not None or any(record.default_ratio is not None for record in self.tried.values())
        if not fastest or (turned and len(self.tried) == self._tried_before):
            return []
        near = [r.schedule for r in fastest if (r.seconds or 0.0) <= (1 + _NEAR) * (fastest[0].seconds or 0.0)]
        return list(dict.fromkeys([self.default, *near]))

    def _open_space(self) -> None:
        """List the candidates that are not hopeless; the cheapest of each algorithm is tried with what is known."""
        everything = space(self.problem, self.target, self._threads, self.algorithms)
        cheapest = everything[0].cost
        self._space = [candidate for candidate in everything if candidate.cost <= HOPELESS_COST * cheapest]
        first = {candidate.schedule.algorithm: candidate.schedule for candidate in reversed(self._space)}
        self._known = list(dict.fromkeys([*self._known_schedules(), *first.values()]))

    def _untried(self) -> list[Candidate]:
        return [candidate for candidate in self._space or () if candidate.schedule not in self.tried]

    def _fastest(self, count: int) -> list[Record]:
        timed = [record for record in self.tried.values() if record.seconds is not None]
        return sorted(timed, key=lambda record: (record.seconds or 0.0, record.schedule))[:count]

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
