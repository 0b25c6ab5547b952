"""A search: what it tries, what it keeps, and what cannot stop it."""

import dataclasses
import importlib.metadata
import itertools
import math
import random
import statistics
import subprocess
import textwrap
import time
from types import SimpleNamespace
from unittest.mock import patch

import pytest
from support.records import OTHER, SMALL, V3, record, run, runs_v3, schedules_of

import tvm_deconv as td
from tvm_deconv import tuning
from tvm_deconv.compiler import build, records, selection
from tvm_deconv.compiler.launcher import find_compiler
from tvm_deconv.compiler.process import Worker
from tvm_deconv.compiler.records import Schedule, read
from tvm_deconv.compiler.selection import adapt, space
from tvm_deconv.problem import Epilogue
from tvm_deconv.targets import Host, detect_host, get
from tvm_deconv.tuning import disturbance, search, session
from tvm_deconv.tuning.runners import harness, local
from tvm_deconv.tuning.runners.harness import Measured


@pytest.fixture
def patient(monkeypatch):
    """Searches do not end before their trials, however little they promise: not even of a problem of a microsecond."""
    monkeypatch.setattr("tvm_deconv.tuning.search._NOTHING", 0.0)


@runs_v3
@pytest.mark.usefixtures("patient", "searches_here")
def test_a_search_keeps_everything_and_resumes(tmp_path):
    heard = []

    def search(trials):
        heard.clear()
        return tuning.tune([SMALL, OTHER, SMALL], V3.name, trials, tmp_path, jobs=1, on_trial=heard.append)

    tuned = search(3)
    assert [trial.done for trial in heard] == list(range(1, 7))
    for found in tuned:
        assert found.best.seconds <= found.default.seconds
        assert found.floor > 0
    kept = read(V3.name, tmp_path)
    assert kept.warnings == []
    assert sum(map(len, kept.by_problem.values())) == 6
    first = {(r.problem, r.schedule) for found in kept.by_problem.values() for r in found}
    assert len(first) == 6
    tuned = search(3)
    assert heard == []
    assert sum(found.trials for found in tuned) == 6
    search(4)
    assert len(heard) == 2
    assert not {(trial.record.problem, trial.record.schedule) for trial in heard} & first
    for trial in heard:
        assert trial.record.error == ""
        assert trial.record.host == records.Cpu.of(detect_host())
        assert trial.record.versions["tvm_deconv"] == importlib.metadata.version("tvm_deconv")


class Arithmetic:
    """A machine without processes: a schedule takes `seconds(problem, schedule)`, and no problem less than `floor`."""

    round_size = 4

    def __init__(self, seconds, floor):
        self.seconds = seconds
        self.floor = floor
        self.kept = []
        self.log = SimpleNamespace(append=self.kept.append)

    def measure_floors(self, problems):
        assert list(problems)

    def prepare(self, proposals):
        assert proposals.schedules

    def round(self, search, schedules, following=None):
        assert not following or following.search is not search
        for schedule in schedules:
            yield record(search.problem, schedule, self.seconds(search.problem, schedule), **CONDITIONS)


CONDITIONS = {"host": "a CPU", "threads": 1, "sources": "now"}
HERE = records.Conditions("a CPU", 1, "now")
LARGER = SMALL.replace(in_channels=32, out_channels=32, data_spatial=(12, 12), output_spatial=(23, 23))
FAR = LARGER.replace(data_spatial=(14, 14), output_spatial=(27, 27))


def spent(machine, problems, trials, *known):
    """The records of a search on `machine`, in their order, where those of `known` were there before; why it ended."""
    kept, heard = records.Records(V3.name), []
    for one in known:
        kept.add(one)
    searches = [search.Search(problem, V3, kept, HERE, None) for problem in problems]
    session.spend(searches, machine, trials, heard.append)
    return [trial.record for trial in heard], [search.ended for search in searches]


def costs(problem):
    return {candidate.schedule: candidate.cost for candidate in space(problem, V3)}


def mistaken(cost, seed=0):
    """Times that costs are wrong about, by factors that plans with an algorithm and a knob of the tile share."""

    def factor(*of):
        return math.exp(random.Random(repr((seed, *of))).gauss(0.0, 0.15))

    def seconds(_, schedule):
        tile = [knob for knob in schedule.knobs if knob[0] not in ("images", "depth", "height", "width", "share_data")]
        factors = [factor(schedule.algorithm, *knob) for knob in [("", 0), *tile]]
        return 1e-3 * cost[schedule] * math.prod(factors)

    return seconds


@pytest.mark.usefixtures("patient")
def test_a_problem_at_its_floor_needs_no_more_trials_and_the_others_have_them():
    cost = mistaken(costs(FAR))
    machine = Arithmetic(lambda p, s: 1e-3 if p == LARGER else cost(p, s), lambda p: 1e-3 if p == LARGER else 1e-9)
    got, ended = spent(machine, [LARGER, FAR], 16)
    assert sum(1 for one in got if one.problem == LARGER.artifact_key) == 12  # its share
    assert sum(1 for one in got if one.problem == FAR.artifact_key) > 12
    assert ended[0] == "at the floor"


def test_what_is_faster_than_the_floor_shows_that_it_is_none():
    cost = mistaken(costs(FAR))
    best = min(cost(FAR, schedule) for schedule in costs(FAR))
    assert spent(Arithmetic(cost, lambda _: 4 * best), [FAR], 64)[1] == ["no gain expected"]


def test_transforms_do_not_stop_at_the_floor():
    """They save products: their floor is lower than the one that is measured."""
    state = search.Search(FAR, V3, records.Records(V3.name), HERE, None)
    state.floor = 0.9e-3
    for name, seconds, gap in (("direct_rows", 1e-3, math.log(1 / 0.9)), ("winograd", 0.91e-3, math.inf)):
        schedule = next(one for one in costs(FAR) if one.algorithm == name)
        state.note(record(FAR, schedule, seconds, **CONDITIONS))
        assert state._gap() == pytest.approx(gap)


@pytest.mark.usefixtures("patient")
def test_all_problems_have_a_share_then_trials_go_where_they_gain_most():
    fast, slow = mistaken(costs(LARGER)), mistaken(costs(FAR))
    machine = Arithmetic(lambda p, s: fast(p, s) if p == LARGER else 1e4 * slow(p, s), lambda _: 1e-9)
    got, _ = spent(machine, [LARGER, FAR], 14)
    assert len(got) == 28
    assert sum(1 for one in got if one.problem == FAR.artifact_key) == 16


def test_the_cheapest_candidates_are_searched(monkeypatch):
    monkeypatch.setattr(search, "_CANDIDATES", 20)
    monkeypatch.setattr(search, "_NOTHING", 0.0)
    cost = costs(FAR)
    got, ended = spent(Arithmetic(mistaken(cost), lambda _: 1e-9), [FAR], 64)
    assert {one.schedule for one in got} <= {selection.default_schedule(FAR, V3), *[*cost][:20]}
    assert ended[0] in ("all tried", "no gain expected")
    assert len(got) >= 12


class Taking(Arithmetic):
    """A machine on which each trial takes this long, and all schedules run about as long as costs have it."""

    def __init__(self, build_seconds, measurement_seconds):
        cost = costs(FAR)
        super().__init__(lambda _, schedule: 1e-3 * cost[schedule], lambda _: 1e-9)
        self.taken = build_seconds, measurement_seconds

    def round(self, search, schedules, following=None):
        for one in super().round(search, schedules, following):
            search.note_build(one.algorithm, self.taken[0])
            search.note_measurement(self.taken[1])
            yield one


@pytest.mark.parametrize(
    ("build_seconds", "measurement_seconds", "trials"),
    [(0.1, 0.01, 12), (0.9, 0.01, 8), (5.0, 0.01, 6), (0.1, 0.8, 8), (0.1, 3.0, 6)],
)
def test_a_problem_whose_trials_are_slow_has_a_smaller_share(build_seconds, measurement_seconds, trials, monkeypatch):
    monkeypatch.setattr(search, "_NOTHING", 1.0)
    got, ended = spent(Taking(build_seconds, measurement_seconds), [FAR], 64)
    assert ended == ["no gain expected"]
    assert len(got) == trials


def test_a_few_builds_find_what_costs_are_wrong_about():
    """Of as many that are cheapest by cost none would do, in the mean of several machines."""
    cost = costs(FAR)
    found, cheapest = [], []
    for seed in range(12):
        seconds = mistaken(cost, seed)
        best = min(seconds(FAR, schedule) for schedule in cost)
        got, ended = spent(Arithmetic(seconds, lambda _: 1e-9), [FAR], 64)
        assert got[0].schedule == selection.default_schedule(FAR, V3)
        assert ended == ["no gain expected"]
        found.append(min(one.seconds for one in got[:24]) / best)
        cheapest.append(min(seconds(FAR, schedule) for schedule in [*cost][:24]) / best)
    assert math.prod(found) ** (1 / 12) < 1.06
    assert math.prod(cheapest) ** (1 / 12) > 1.15


def test_trials_go_to_plans_that_build_quickly_where_gains_are_alike():
    cost = costs(LARGER)
    quick, dear = list(dict.fromkeys(schedule.algorithm for schedule in cost))[:2]

    def count(seconds):
        state = search.Search(LARGER, V3, records.Records(V3.name), HERE, None)
        state.note_build(quick, 1.0)
        state.note_build(dear, seconds)
        return [one.algorithm for one in state.propose(12)].count(dear)

    assert count(100.0) < count(1.0)


def test_a_search_that_was_stopped_anywhere_tries_nothing_twice():
    machine = Arithmetic(mistaken(costs(LARGER)), lambda _: 1e-9)
    got = []
    for trials in (1, 3, 7, 100_000):
        more, ended = spent(machine, [LARGER], trials, *got)
        assert not {one.schedule for one in more} & {one.schedule for one in got}
        got += more
        assert len(got) == trials or ended == ["no gain expected"]
    assert len(got) > 7
    assert spent(machine, [LARGER], 100_000, *got) == ([], ["no gain expected"])


class Slow(Arithmetic):
    """A machine with a clock of its own: a trial takes a second, and a tenth if it has been built before."""

    def __init__(self, seconds):
        super().__init__(seconds, lambda _: 1e-9)
        self.now = 0.0
        self.built = set()

    def monotonic(self):
        return self.now

    def round(self, search, schedules, following=None):
        for one in super().round(search, schedules, following):
            self.now += 0.1 if (one.problem, one.schedule) in self.built else 1.0
            self.built.add((one.problem, one.schedule))
            search.note_measurement(0.1)
            yield one


class Deciding:
    """A search with two finalists, whose measurements took so many seconds on average."""

    def __init__(self, measurement_seconds):
        self.measurement_seconds = measurement_seconds

    def finalists(self):
        return ["the default", "another"]


def test_the_time_to_decide_is_that_of_each_search():
    turns = 2 * session._MOST_TURNS
    assert session._time_to_decide([Deciding(0.1), Deciding(3.0)]) == pytest.approx(turns * 3.1)
    assert session._time_to_decide([Deciding(0.1), Deciding(3.0), Deciding(0.0)]) == pytest.approx(turns * (3.1 + 1.55))
    assert session._time_to_decide([Deciding(0.0)]) == 0.0


@pytest.mark.parametrize("budget", [12.0, 20.0])
def test_a_search_ends_within_its_budget_and_says_what_is_left(budget, monkeypatch):
    fast, slow = mistaken(costs(LARGER)), mistaken(costs(FAR), 7)
    machine = Slow(lambda p, s: fast(p, s) if p == LARGER else slow(p, s))
    monkeypatch.setattr(session, "time", machine)
    searches = [search.Search(problem, V3, records.Records(V3.name), HERE, None) for problem in (LARGER, FAR)]
    heard = []
    why = session.spend(searches, machine, 64, heard.append, budget)
    for one in searches:
        session.decide(one, machine, one.finalists())
    assert machine.now <= budget + machine.round_size
    assert why == ("out of time" if any(not one.ended for one in searches) else "all trials spent")
    assert [trial.done for trial in heard] == list(range(1, len(heard) + 1))
    for trial in heard:
        assert 0 <= trial.left <= budget
    assert len(heard) > budget / 2
    assert min(len(one.tried) for one in searches) >= 4
    both = [one.tried[one.default].seconds / one.best.seconds for one in searches]
    assert heard[-1].gain == pytest.approx(math.prod(both) ** 0.5)
    assert heard[-1].gain > 1.05


@pytest.mark.parametrize("budget", [0, -1.0, math.nan, math.inf, "60s"])
def test_a_budget_is_a_time(budget, tmp_path):
    with pytest.raises(td.ProblemError, match="budget="):
        tuning.tune([SMALL], V3.name, 2, tmp_path, budget=budget)


class Turns(Arithmetic):
    """A machine on which the trials of a schedule take the times that `turns` has for it; None is a failure."""

    def __init__(self, turns):
        super().__init__(None, None)
        self.turns = turns

    def round(self, search, schedules):
        for schedule in schedules:
            time = next(self.turns[schedule])
            yield record(search.problem, schedule, time, **CONDITIONS, error="" if time else "it ended")


def turned(turns, slow, algorithms=None):
    """The state of a search after the finalists of `turns` had theirs, and the machine."""
    state = search.Search(SMALL, V3, records.Records(V3.name), HERE, algorithms)
    machine = Turns({schedule: iter(times) for schedule, times in turns.items()})
    for one in machine.round(state, list(turns)):
        state.note(one)
    state.note(record(SMALL, slow, 1.2, **CONDITIONS))
    session.decide(state, machine, state.finalists())
    return state, machine


def test_finalists_and_the_default_take_turns_and_their_medians_decide(monkeypatch):
    default = selection.default_schedule(SMALL, V3)
    lucky, steady, failing, slow = [schedule for schedule in costs(SMALL) if schedule != default][:4]
    turns = {
        default: [3.0, 2.0],
        lucky: [1.0, 1.3, 0.9, 1.2, 1.25, 1.1],
        steady: [1.05] * 6,
        failing: [1.02, 1.0, None, 1.0],
    }
    monkeypatch.setattr(search, "_FINALISTS", 3)
    state, machine = turned(turns, slow)
    assert {one.schedule: (one.seconds, one.default_ratio) for one in machine.kept} == {
        default: (2.0, 1.0),
        lucky: (1.2, round(2.0 / 1.2, 4)),
        steady: (1.05, round(2.0 / 1.05, 4)),
        failing: (None, None),
    }
    assert state.decided.schedule == steady
    known = records.Records(V3.name, {SMALL.artifact_key: list(machine.kept)})
    assert search.Search(SMALL, V3, known, HERE, None).finalists() == []  # nothing was tried since
    known.by_problem[SMALL.artifact_key] = [
        record(SMALL, one.schedule, one.seconds, **CONDITIONS) for one in machine.kept if one.seconds
    ]
    stopped = search.Search(SMALL, V3, known, HERE, None)
    assert stopped.finalists()[0] == default  # it was stopped before they had their turns


@pytest.mark.parametrize(
    ("other", "taken"),
    [
        ([1.0, 1.5, 1.5, 1.5], 3),  # slower each time
        ([1.0, 1.002, 0.998, 1.009], 3),  # as fast
        ([1.0, 0.98, 1.1, 1.1, 1.1, 1.1], 5),  # slower most times
        ([1.0, 0.98, 1.1, 1.005, 1.0, 1.0], 3),  # as fast after all
        ([1.0, 0.98, 1.1, 1.1, 1.0, 1.0], 5),  # as fast, but it took turns to see
    ],
    ids=["slower", "as fast", "in doubt", "as fast in the middle", "in doubt at first"],
)
def test_finalists_take_turns_until_it_is_clear_which_is_fastest(other, taken, monkeypatch):
    monkeypatch.setattr(search, "_FINALISTS", 3)
    default = selection.default_schedule(SMALL, V3)
    first, second, clear, slow = [schedule for schedule in costs(SMALL) if schedule != default][:4]
    turns = {default: [1.2] * 6, first: [1.0] * 6, second: other, clear: [1.04] + [1.2] * 5}
    _, machine = turned(turns, slow)
    left = {schedule: len(times) - sum(1 for _ in machine.turns[schedule]) - 1 for schedule, times in turns.items()}
    assert left == {default: 1, first: taken, second: taken, clear: 3}


def test_the_libraries_of_finalists_are_kept_while_they_take_turns():
    """Also of those that are slow: `logs remeasure` lets any take turns."""
    default = selection.default_schedule(SMALL, V3)
    fast, slow = [schedule for schedule in costs(SMALL) if schedule != default][:2]
    state = search.Search(SMALL, V3, records.Records(V3.name), HERE, None)
    state.note(record(SMALL, fast, 1.0, **CONDITIONS))
    state.note(record(SMALL, slow, 2.0, **CONDITIONS))
    assert state.wanted == {default, fast}
    state.end([slow])
    assert state.wanted == {default, fast, slow}


@pytest.mark.parametrize(
    ("seconds", "number"), [((0.97, 0.99, 0.995), 2), ((1.04, 1.08, 1.2), 2), ((1.05, 1.2), 1), ((1.2,), 0)]
)
def test_the_fastest_besides_the_default_are_finalists_however_lucky_its_trial_was(seconds, number):
    default = selection.default_schedule(SMALL, V3)
    others = [schedule for schedule in costs(SMALL) if schedule != default][: len(seconds)]
    state = search.Search(SMALL, V3, records.Records(V3.name), HERE, None)
    for schedule, taken in zip([default, *others], (1.0, *seconds), strict=True):
        state.note(record(SMALL, schedule, taken, **CONDITIONS))
    assert state.finalists() == [default, *others[:number]]


def test_a_search_that_has_ended_stays_so_whatever_its_finalists_take():
    """Medians of turns are other times than those that said that nothing is left."""
    default = selection.default_schedule(SMALL, V3)
    seconds = mistaken(costs(SMALL))
    one = search.Search(SMALL, V3, records.Records(V3.name), HERE, None)
    got = []
    session.spend(
        [one], Arithmetic(lambda p, s: 1e-1 if s in got else got.append(s) or seconds(p, s), lambda _: 1e-9), 99, None
    )
    assert one.tried[default].seconds == 1e-1
    assert one.ended == "no gain expected"
    fresh = search.Search(SMALL, V3, records.Records(V3.name), HERE, None)
    fresh.propose(0)
    for known in one.tried.values():
        fresh.note(known)
    assert fresh.propose(1)  # without the end there would be more


def test_the_log_says_that_the_default_was_fastest():
    default = selection.default_schedule(SMALL, V3)
    other, slow = [schedule for schedule in costs(SMALL) if schedule != default][:2]
    state, machine = turned({default: [1.0] * 6, other: [0.8] + [0.995] * 5}, slow)
    assert {one.schedule: one.default_ratio for one in machine.kept} == {default: 1.0, other: round(1 / 0.995, 4)}
    assert state.best.schedule == other
    assert state.decided.schedule == default
    state, machine = turned({default: [1.0] * 6, other: [2.0] * 6}, slow)
    assert [(one.schedule, one.default_ratio) for one in machine.kept] == [(default, 1.0)]
    # The default of some algorithms is not the one that builds compare with.
    _, machine = turned({default: [1.0] * 6}, slow, algorithms=(default.algorithm,))
    assert [one.default_ratio for one in machine.kept] == [None]


def test_the_nearest_record_is_among_the_first_that_are_tried():
    near = schedules_of(OTHER, 30)[29]
    machine = Arithmetic(lambda *_: 1e-3, lambda _: 1e-9)
    adapted = adapt(near, OTHER, SMALL, V3)
    assert adapted != selection.default_schedule(SMALL, V3)
    got, _ = spent(machine, [SMALL], 2, record(OTHER, near, **CONDITIONS))
    assert [one.schedule for one in got] == [selection.default_schedule(SMALL, V3), adapted]
    assert adapted not in {one.schedule for one in spent(machine, [SMALL], 2)[0]}


def test_a_search_begins_with_the_best_of_each_target_whose_code_it_runs():
    amx = get("x86-64-v4-amx")
    default = selection.default_schedule(LARGER, amx)
    one, other, slow = [two.schedule for two in [*space(LARGER, amx)][-9:] if two.schedule != default][-3:]
    known = {"target": "x86-64-v4", **CONDITIONS}
    of_v4 = [record(LARGER, slow, 2e-3, **known), record(LARGER, one, default_ratio=1.0, **known)]
    epilogue = LARGER.replace(epilogue=Epilogue(bias=True))
    ancestors = [
        records.Records("x86-64-v4-bf16", {epilogue.artifact_key: [record(epilogue, other, **known)]}),
        records.Records("x86-64-v4-vnni"),
        records.Records("x86-64-v4", {LARGER.artifact_key: of_v4, FAR.artifact_key: [record(FAR, slow, **known)]}),
    ]
    state = search.Search(LARGER, amx, records.Records(amx.name), HERE, None, ancestors)
    assert state.propose(3) == [default, other, one]
    only = search.Search(LARGER, amx, records.Records(amx.name), HERE, (default.algorithm,), ancestors)
    assert {schedule.algorithm for schedule in only.propose(9)} == {default.algorithm}


def test_records_of_ancestors_that_do_not_serve_are_passed_over():
    amx = get("x86-64-v4-amx")
    default = selection.default_schedule(SMALL, amx)
    forgotten = record(SMALL, algorithm="forgotten", **CONDITIONS)
    adapted = record(SMALL, Schedule.of("direct_rows", {**record().knobs, "channels": 3}), 2e-3, **CONDITIONS)
    ancestors = [records.Records("x86-64-v4", {SMALL.artifact_key: [forgotten, adapted]})]
    state = search.Search(SMALL, amx, records.Records(amx.name), HERE, None, ancestors)
    assert state.propose(2) == [default, selection.fitted(SMALL, amx, adapted)]
    assert state.warnings == []


def test_a_session_reads_the_records_of_ancestors(tmp_path, monkeypatch):
    searched = []

    def spend(searches, *_):
        searched.extend(searches)
        raise KeyboardInterrupt

    v4 = get("x86-64-v4")
    seed = [candidate.schedule for candidate in itertools.islice(space(SMALL, v4), 30)][-1]
    records.Log(tmp_path).append(record(SMALL, seed, target=v4.name))
    amx = get("x86-64-v4-amx")
    host = Host(amx.features, "a server", vendor="GenuineIntel", family=6, model=0x8F)
    monkeypatch.setattr(local, "detect_host", lambda: host)
    monkeypatch.setattr(session, "spend", spend)
    with pytest.raises(KeyboardInterrupt):
        tuning.tune([SMALL], amx.name, 2, tmp_path, jobs=1)
    (state,) = searched
    assert state.propose(2) == [selection.default_schedule(SMALL, amx), seed]


class Drifting:
    """A clock of two functions on a machine that others slow down, by up to a factor of two, for a while."""

    def __init__(self):
        self.now = 0.0
        self.calls = []

    def function(self, name, seconds):
        def sample(number, repeat):
            times = []
            for _ in range(repeat):
                taken = seconds * (1.5 + 0.5 * math.sin(2 * self.now))
                self.now += number * taken
                self.calls.append((name, number))
                times.append(taken)
            return times

        return sample


@pytest.mark.parametrize("seconds", [1e-6, 1e-4, 5e-3])
def test_a_candidate_is_compared_with_the_default_beside_it(seconds):
    machine = Drifting()
    ratios, times = [], []
    for _ in range(20):
        found = harness.raced(machine.function("candidate", 0.9 * seconds), machine.function("default", seconds), 1.0)
        ratios.append(found.ratio)
        times.append(found.ratio * found.reference)
    assert max(ratios) / min(ratios) < 1.15
    assert statistics.median(ratios) == pytest.approx(0.9, rel=0.02)
    assert max(times) / min(times) > 1.2


@pytest.mark.parametrize("seconds", [2e-3, 7e-3, 14e-3])
def test_what_decides_does_not_pay_for_the_caches_that_another_has_filled(seconds):
    """A candidate whose filter is large takes longer behind another, and not in the calls of a user."""
    last = None

    def function(name, warm, cold):
        def sample(number, repeat):
            nonlocal last
            times = []
            for _ in range(repeat):
                times.append((cold + (number - 1) * warm) / number if last != name else warm)
                last = name
            return times

        return sample

    candidate, default = function("candidate", 0.8 * seconds, 1.6 * seconds), function("default", seconds, seconds)
    assert harness.raced(candidate, default, 1.0, again=True).ratio == pytest.approx(0.8)
    assert harness.alone(function("candidate", seconds, 2 * seconds)).reference == pytest.approx(seconds)


def test_a_slow_candidate_has_few_calls():
    machine = Drifting()
    found = harness.raced(machine.function("candidate", 2e-4), machine.function("default", 1e-4), 1.0)
    assert found.ratio == pytest.approx(2.0, rel=0.05)
    assert sum(1 for name, _ in machine.calls if name == "candidate") == 5
    fast = harness.raced(machine.function("candidate", 1e-4), machine.function("default", 1e-4), 1.0)
    assert fast.runs > 20 * found.runs


@pytest.mark.parametrize(
    ("seconds", "ratio", "again", "calls"),
    [
        (0.014, 0.9, False, 2),
        (0.05, 0.9, False, 2),
        (0.2, 0.9, False, 2),
        (0.05, 2.0, False, 2),
        (0.2, 2.0, False, 1),
        (0.05, 0.9, True, 2),
        (0.2, 0.9, True, 1),
    ],
)
def test_slow_calls_are_turns_of_their_own(seconds, ratio, again, calls):
    machine = Drifting()
    functions = machine.function("candidate", ratio * seconds), machine.function("default", seconds)
    found = harness.raced(*functions, 1.0, again=again)
    assert found.ratio == pytest.approx(ratio, rel=0.4)
    assert found.runs == calls
    assert machine.calls == calls * [("candidate", 1), ("default", 1)]
    machine.calls.clear()
    first = functions[0](1, 1)
    assert harness.raced(*functions, 1.0, first=first[0], again=again).runs == calls
    assert machine.calls == calls * [("candidate", 1), ("default", 1)]


@pytest.mark.parametrize(("seconds", "runs"), [(0.05, 1), (1e-4, 50)])
def test_the_default_is_as_fast_as_itself(seconds, runs):
    found = harness.alone(Drifting().function("default", seconds))
    assert found.ratio == 1.0
    assert found.runs == runs
    assert seconds < found.reference == found.seconds < 2 * seconds


def test_the_turns_of_a_fast_candidate_are_short():
    """What a search measures, it measures for a few hundredths of a second."""
    machine = Drifting()
    found = harness.raced(machine.function("candidate", 1e-4), machine.function("default", 1e-4), 1.0)
    assert found.runs >= 3 * 25
    taken = machine.now
    assert taken < 0.06
    again = harness.raced(machine.function("candidate", 1e-4), machine.function("default", 1e-4), 1.0, again=True)
    assert again.runs >= 25
    assert machine.now - taken < 0.5 * taken


def measured(waited, spread=0.01):
    return Measured(1.0, 1e-3, spread, 9, waited)


@pytest.mark.parametrize(
    ("measurements", "said"),
    [
        ([], []),
        ([measured(0.9), measured(0.02), measured(0.0)], []),
        (
            [measured(0.4), measured(0.2), measured(0.0)],
            ["half of the measurements waited for a CPU 20 % of their time"],
        ),
        ([measured(None, 0.08)], ["half of the measurements have a spread of 8 %"]),
    ],
    ids=["none", "quiet", "waited", "spread"],
)
def test_a_busy_machine_is_noticed(measurements, said):
    seen = disturbance.Disturbance(on_this_machine=False)
    for one in measurements:
        seen.note(one)
    assert [text.removesuffix(" or more") for text in seen.complaints] == said


def test_stolen_time_is_noticed(monkeypatch):
    ticks = iter([(5, 100), (11, 300), (6, 300)])
    monkeypatch.setattr(disturbance, "cpu_times", lambda _: next(ticks))
    seen = disturbance.Disturbance(on_this_machine=True)
    assert seen.complaints == ["the hypervisor took 3.0 % of the CPUs"]
    assert seen.complaints == []


def test_a_process_knows_how_long_it_waited_for_a_cpu():
    """Its clock on one thread stops while others run, here while it sleeps."""
    machine = local.LocalMachine(1)
    library = SimpleNamespace(get_function=lambda _: lambda: time.sleep(2e-3))
    machine._ffi = SimpleNamespace(load_module=lambda _: library)
    with patch.object(local.ctypes, "CDLL"):
        bound = machine.bind("library", "deconv", ())
    assert bound.waited() is None
    assert max(bound.sample(5, 2)) < 1e-3
    assert bound.waited() > 0.5


_BAD = """
    #include <stdint.h>
    int tvm_deconv_set_num_threads(int count) {{ return count; }}
    int __tvm_ffi_deconv(void *self, const void *arguments, int32_t count, void *result) {{ {body} return 0; }}
"""


@pytest.fixture
def spoilt(tmp_path, monkeypatch):
    """Replaces what is built of some candidates: a function of schedule to None, or to the body of a C function.

    Those that never end have an eighth of their time.
    """
    endless = []

    def install(body_of):
        ask = Worker.ask

        def spoiling(self, method, *arguments, timeout):
            shorter = method == "measure" and arguments[0].deconv in endless
            answer = ask(self, method, *arguments, timeout=timeout / 8 if shorter else timeout)
            body = body_of(arguments[1]) if method == "build" else None
            if body is None:
                return answer
            path = tmp_path / f"bad{len(list(tmp_path.glob('*.so')))}.so"
            command = [find_compiler(), "-x", "c", "-shared", "-fPIC", "-o", str(path), "-"]
            subprocess.run(command, input=textwrap.dedent(_BAD.format(body=body)), text=True, check=True)
            endless.extend([path] * body.startswith("for (;;)"))
            return dataclasses.replace(answer, deconv=path)

        monkeypatch.setattr(Worker, "ask", spoiling)

    return install


@runs_v3
@pytest.mark.usefixtures("patient")
def test_bad_candidates_do_not_stop_a_search_and_are_never_best(spoilt, tmp_path):
    bodies = iter(["for (;;) {}", "__builtin_trap();", "(void)0;"])
    default, bad = selection.default_schedule(SMALL, V3), {}
    spoilt(lambda schedule: None if schedule == default else bad.setdefault(schedule, next(bodies, None)))
    (found,) = tuning.tune([SMALL], V3.name, 6, tmp_path / "log", jobs=1, timeout=8)
    errors = {r.schedule: r.error for r in read(V3.name, tmp_path / "log").by_problem[SMALL.artifact_key]}
    said = {body: errors[schedule] for schedule, body in bad.items() if body}
    assert said["for (;;) {}"] == "did not end within 1 s"  # an eighth
    assert said["__builtin_trap();"].startswith("its process ended with signal SIG")
    assert said["(void)0;"].startswith("ArithmeticError: differs from the default")
    assert sum(1 for error in errors.values() if error == "") == 3
    assert errors[found.best.schedule] == ""
    assert found.best in read(V3.name, tmp_path / "log").by_problem[SMALL.artifact_key]


@runs_v3
@pytest.mark.usefixtures("patient")
def test_an_interrupted_search_has_kept_what_it_measured(tmp_path):
    def interrupt(trial):
        if trial.done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tuning.tune([SMALL], V3.name, 5, tmp_path, jobs=1, on_trial=interrupt)
    assert len(read(V3.name, tmp_path).by_problem[SMALL.artifact_key]) == 2


@pytest.mark.parametrize(
    "change",
    [
        *({"trials": trials} for trials in (-1, 0, 1.5)),
        *({"timeout": timeout} for timeout in ("30", None, 0, math.nan, math.inf)),
        *({"seed": seed} for seed in ("1", None, -1, 1.5)),
        *({"algorithms": algorithms} for algorithms in ((), ["cuda_narrow"])),
        {"problems": None},
        {"problems": [SMALL.key]},
        {"logs": 5},
    ],
)
def test_what_is_asked_for_is_checked_first(change, tmp_path):
    (name,) = change
    with pytest.raises(td.ProblemError, match=f"{name}="):
        tuning.tune(**{"problems": [SMALL], "target": V3.name, "trials": 1, "logs": tmp_path} | change)


def test_trials_need_a_log(tmp_path):
    with pytest.raises(td.ProblemError, match="logs=None"):
        td.compile([SMALL], V3.name, tmp_path, trials=1)


def test_a_target_that_cannot_run_here_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(local, "detect_host", lambda: dataclasses.replace(detect_host(), features=frozenset()))
    with pytest.raises(td.ProblemError, match="it lacks"):
        tuning.tune([SMALL], V3.name, 1, tmp_path)


@runs_v3
def test_compile_with_trials(tmp_path):
    outcomes = td.compile([SMALL], V3.name, tmp_path / "made", trials=2, logs=tmp_path / "log", jobs=1)
    assert [outcome.manifest.origin for outcome in outcomes] == ["tuned"]
    run(SMALL, tmp_path / "made")
    assert build.compile([SMALL], V3.name, tmp_path / "made", logs=tmp_path / "log")[0].status == "current"
