"""The state of the search for one problem on one target, and what to try next.

First comes what is known: the default, the best under other conditions and of other epilogues, the best for each
ancestor of the target, the nearest record. Then `calibration` predicts the time of every candidate from its cost by
arithmetic and from all that was measured, and those follow that promise most for the time of their builds. The search
ends when none promises anything.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from tvm_deconv.compiler.records import Conditions, Record, Records, Schedule
from tvm_deconv.compiler.selection import (
    Candidate,
    default_schedule,
    fitted,
    leaders,
    named,
    nearest,
    space,
)
from tvm_deconv.problem import Array, Problem
from tvm_deconv.targets import Target
from tvm_deconv.tuning.calibration import Calibration, Prediction

#: Another build that promises to lower the time by a smaller part than this is not worth it.
_NOTHING = 0.03
#: Candidates, the cheapest: the fastest of 500 plans of eight layers were among the 170 cheapest of up to 12,900.
_CANDIDATES = 2048
#: Trials of a problem before another that promises more may have its turns, and before its search may end; the least if
#: they take so many seconds: processor time of builds, and measurements.
_SHARE, _LEAST_SHARE, _SHARE_SECONDS = 12, 6, 7.0
#: Finalists besides the default: at most this many, not slower than the fastest of them by more than `_NEAR` of its
#: time. They may be slower than the default by twice as much: its own trial may have been lucky.
_FINALISTS = 2
_NEAR = 0.05


class Search:
    """The trials of one problem on one target so far, and proposals for more."""

    def __init__(
        self,
        problem: Problem,
        target: Target,
        records: Records,
        conditions: Conditions,
        algorithms: tuple[str, ...] | None,
        ancestors: Sequence[Records] = (),
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
        self._ended = ""
        self._finalists: set[Schedule] = set()
        self._threads = conditions.threads
        self._records = records
        self._ancestors = ancestors
        self._promised: float | None = None
        for record in sorted(records.by_problem.get(self.key, ()), key=lambda record: record.when):
            if record.conditions == conditions:
                self.note(record)
        self.settle()
        self._known: list[Schedule] | None = None
        self._space: list[Candidate] = []
        self._numbers: dict[Schedule, int] = {}
        self._build_seconds: dict[str, list[float]] = {}
        self._measurement_seconds: list[float] = []

    def _known_schedules(self) -> list[Schedule]:
        known = [self.default, *self._fitted(self._records, self.warnings)]
        for records in self._ancestors:
            known += itertools.islice(self._fitted(records), 1)
        near = nearest(self.problem, self.target, self._records, self.algorithms)
        known += [near[1]] if near else []  # arithmetic may be wrong about it: that is what measuring is for
        return list(dict.fromkeys(known))

    def _fitted(self, records: Records, warnings: list[str] | None = None) -> Iterator[Schedule]:
        """Yield the best schedules of this convolution in `records` that the target supports, fitted to it."""
        for record in leaders(self.problem, records, self.algorithms, warnings):
            if named(record.algorithm).supports(self.problem, self.target):
                yield fitted(self.problem, self.target, record)

    @property
    def best(self) -> Record | None:
        """The fastest record so far."""
        return next(iter(self._fastest(1)), None)

    @property
    def decided(self) -> Record | None:
        """The record that builds follow: the best of those that took turns, unless the default is as good."""
        best = min(self._timed(), key=lambda record: record.merit, default=None)
        return self.tried.get(self.default, best) if best and best.beaten else best

    @property
    def ended(self) -> str:
        """Why nothing is left to try; "" before the end."""
        if self._ended:
            return self._ended
        if self.broken:
            return "the default does not run"
        if self._known is None or self._known:
            return ""
        if len(self._tried_numbers()) == len(self._space):
            return "all tried"
        if not self.has_share():
            return ""
        if self._gap() <= _NOTHING:
            return "at the floor"
        return "no gain expected" if self._promise() <= _NOTHING else ""

    def end(self, finalists: Sequence[Schedule]) -> None:
        """Keep the reason why nothing is left to try, if there is one: turns of `finalists` do not change it."""
        self._ended = self.ended
        self._finalists = set(finalists)

    @property
    def wanted(self) -> set[Schedule]:
        """What is measured again: finalists, or those that would be if the search ended now."""
        return {self.default, *self._finalists, *self.nearly_fastest()}

    def note(self, record: Record) -> None:
        """Add the record of a trial."""
        self.tried[record.schedule] = record
        self._promised = None

    def note_build(self, algorithm: str, seconds: float) -> None:
        """Add the processor time that the build of a candidate took."""
        self._build_seconds.setdefault(algorithm, []).append(seconds)

    def note_measurement(self, seconds: float) -> None:
        """Add the time that the measurement of a candidate took."""
        self._measurement_seconds.append(seconds)

    @property
    def measurement_seconds(self) -> float:
        """How long the measurement of a candidate takes, the mean so far."""
        return statistics.fmean(self._measurement_seconds or [0.0])

    def has_share(self, more: int = 0) -> bool:
        """Return whether this problem has had its share of trials, if there were so many `more`."""
        builds = [seconds for of_algorithm in self._build_seconds.values() for seconds in of_algorithm]
        number = len(self.tried) + more
        spent = sum(sum(each) * (1 + more / max(len(each), 1)) for each in (builds, self._measurement_seconds))
        return number >= _SHARE or (number >= _LEAST_SHARE and spent >= _SHARE_SECONDS)

    @property
    def priority(self) -> tuple[bool, float]:
        """The order of problems: all get their share first, then those go first where another build gains most.

        A gain counts as a part of the time, times the root of the time. That lies between the sum of all times, which
        one slow layer rules, and the mean of the parts, to which layers of microseconds count as much as any.
        """
        if self._least == math.inf or self._known is None:
            return not self.has_share(), math.inf
        return not self.has_share(), min(self._promise(), self._gap()) * math.sqrt(self._least)

    def propose(self, count: int) -> list[Schedule]:
        """Return up to `count` schedules that have not been tried yet."""
        if self._known is None:
            self._open_space()
        known = [schedule for schedule in self._known or () if schedule not in self.tried]
        proposals, self._known = known[:count], known[count:]
        # Each is chosen as if those before it took the predicted time: so they differ.
        assumed: dict[int, float] = {}
        for schedule in proposals:
            if schedule in self._numbers:
                self._assume(self._numbers[schedule], assumed)
        while len(proposals) < count:
            gains = self._gains(assumed)
            enough = _NOTHING if self.has_share(len(proposals)) else 0.0
            worth = np.where(gains > enough, gains / self._build_costs(), -1.0)
            number = int(np.argmax(worth)) if len(worth) else 0
            if not len(worth) or worth[number] < 0:
                break
            self._assume(number, assumed)
            proposals.append(self._space[number].schedule)
        return proposals

    def _assume(self, number: int, assumed: dict[int, float]) -> None:
        assumed[number] = math.exp(self._predict(assumed).mean[number])

    def _predict(self, assumed: Mapping[int, float]) -> Prediction:
        """Predict all times from those measured and those `assumed`, both by numbers of candidates."""
        measured = {self._numbers[r.schedule]: r.seconds or 0.0 for r in self._timed() if r.schedule in self._numbers}
        return self._calibration.predict(measured, assumed)

    def _gains(self, assumed: Mapping[int, float]) -> Array:
        """Return the expected gain of each candidate over the fastest, less than 0 of what needs no trial."""
        least = self._least if self._least < math.inf else min(assumed.values(), default=math.inf)
        gains = self._predict(assumed).gains(least)
        gains[[*self._tried_numbers(), *assumed]] = -1.0
        return gains

    def _promise(self) -> float:
        """Return the most that a build of one more candidate is expected to gain."""
        if self._promised is None:
            self._promised = float(np.max(self._gains({}), initial=0.0))
        return self._promised

    def _gap(self) -> float:
        """Return the logarithm of the fastest time relative to the floor; infinity if there is no floor.

        What is faster than the floor shows that it is none: data may stay in caches. Transforms save products, so an
        algorithm with transforms does not stop at the floor either.
        """
        if self.best is not None and named(self.best.algorithm).error_growth > 1:
            return math.inf
        gap = math.log(self._least / self.floor) if self._least < math.inf and self.floor > 0 else -1.0
        return gap if gap >= 0 else math.inf

    @property
    def _least(self) -> float:
        """The seconds of the fastest so far; infinity if there is none."""
        fastest = self.best
        return fastest.seconds if fastest is not None and fastest.seconds else math.inf

    def _build_costs(self) -> Array:
        """Return the processor time to build each candidate, as that of its algorithm was, or of all so far."""
        means = {name: statistics.fmean(seconds) for name, seconds in self._build_seconds.items()}
        usual = statistics.fmean(means.values()) if means else 1.0
        return np.array([means.get(candidate.algorithm, usual) for candidate in self._space])

    def _tried_numbers(self) -> list[int]:
        return [self._numbers[schedule] for schedule in self.tried if schedule in self._numbers]

    def finalists(self) -> list[Schedule]:
        """Return the default and the schedules about as fast as the fastest; none if they have had their turns."""
        near = self.nearly_fastest()
        turned = self.algorithms is not None or any(record.default_ratio is not None for record in self.tried.values())
        if not self._timed() or (turned and len(self.tried) == self._settled):
            return []
        return list(dict.fromkeys([self.default, *near]))

    def settle(self) -> None:
        """Note that the trials so far need no further turns, if some have had theirs."""
        self._settled = len(self.tried)

    def nearly_fastest(self) -> list[Schedule]:
        """Return the schedules besides the default that are about as fast as the fastest, and may be better than it."""
        others = [one for one in self._fastest(_FINALISTS + 1) if one.schedule != self.default][:_FINALISTS]
        most = min([(1 + 2 * _NEAR) * self._least, *((1 + _NEAR) * (one.seconds or 0.0) for one in others[:1])])
        return [one.schedule for one in others if (one.seconds or 0.0) <= most]

    def _open_space(self) -> None:
        """List what is known, and the candidates."""
        plans = space(self.problem, self.target, self._threads, self.algorithms)
        self._space = [*itertools.islice(plans, _CANDIDATES)]
        self._numbers = {candidate.schedule: number for number, candidate in enumerate(self._space)}
        self._calibration = Calibration(self._space)
        self._known = self._known_schedules()

    def _timed(self) -> list[Record]:
        return [record for record in self.tried.values() if record.seconds is not None]

    def _fastest(self, count: int) -> list[Record]:
        return sorted(self._timed(), key=lambda record: (record.seconds or 0.0, record.schedule))[:count]
