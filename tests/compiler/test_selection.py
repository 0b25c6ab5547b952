"""The schedule of a build: the record, the nearest record adapted, or the default."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.records import OTHER, SMALL, V3, record, run, runs_v3, schedules_of
from support.strategies import problems

import tvm_deconv as td
from tvm_deconv.compiler import records, selection
from tvm_deconv.compiler.records import Log, Schedule
from tvm_deconv.compiler.selection import Choice, adapt, apart, load_imbalance, named, nearest, plan_of, space
from tvm_deconv.targets import CPU_TARGETS


@settings(max_examples=60)
@given(
    source=problems(dtypes=["float32"], max_macs=50_000),
    problem=problems(dtypes=["float32"], max_macs=50_000),
    target=st.sampled_from(list(CPU_TARGETS.values())),
    draw=st.data(),
)
def test_an_adapted_schedule_is_one_of_the_problem(source, problem, target, draw):
    options = space(source, target)
    schedule = draw.draw(
        st.sampled_from([c.schedule for c in options if named(c.schedule.algorithm).supports(problem, target)])
    )
    adapted = adapt(schedule, source, problem, target)
    assert adapted.algorithm == schedule.algorithm
    assert adapted in {candidate.schedule for candidate in space(problem, target)}
    assert plan_of(adapted).knobs == dict(adapted.knobs)
    assert adapt(schedule, source, source, target) == schedule


def test_threads_without_a_task_cost_time():
    schedule = schedules_of(SMALL, 1)[0]
    assert load_imbalance(SMALL, schedule, 1) == 1
    assert load_imbalance(SMALL, schedule, 1000) > 10
    alone = space(SMALL, V3)
    assert {candidate.schedule for candidate in space(SMALL, V3, 8)} == {candidate.schedule for candidate in alone}
    assert min(candidate.cost for candidate in space(SMALL, V3, 8)) >= alone[0].cost


def test_distance_counts_kernel_and_strides_most():
    assert apart(SMALL, SMALL) == 0
    assert apart(SMALL, SMALL.replace(data_format="NXC")) == math.inf
    assert apart(SMALL, SMALL.replace(dtype="float64")) == math.inf
    wider = apart(SMALL, SMALL.replace(data_spatial=(5, 12)))
    assert 0 < wider < apart(SMALL, SMALL.replace(strides=(2, 4)))


def choice_of(problem, *found):
    kept = records.Records(V3.name)
    for one in found:
        kept.add(one)
    warnings = []
    return list(selection.choices_for(problem, V3, kept, warnings)), warnings


def test_exact_before_nearest_before_default():
    exact, near = schedules_of(SMALL, 6)[5], schedules_of(OTHER, 1)[0]
    found, warnings = choice_of(SMALL, record(SMALL, exact), record(OTHER, near))
    assert found[0] == Choice(exact, "tuned", "the record of this problem")
    assert found[1].schedule == adapt(near, OTHER, SMALL, V3)
    assert found[1].origin == "default"
    assert OTHER.artifact_key in found[1].reason
    assert found[2] == Choice(None, "default", "the default")
    assert warnings == []
    far = SMALL.replace(strides=(64, 64), kernel=(64, 64))
    assert [choice.schedule for choice in choice_of(far, record(SMALL))[0]] == [None]


def test_the_nearest_is_not_used_against_arithmetic():
    dear = schedules_of(OTHER, 1000)[-1]
    kept = records.Records(V3.name)
    kept.add(record(OTHER, dear))
    (_, adapted) = nearest(SMALL, V3, kept)
    default = selection.default_schedule(SMALL, V3)
    assert selection.cost_of(SMALL, adapted, V3) > selection.AGREES * selection.cost_of(SMALL, default, V3)
    assert [choice.reason for choice in choice_of(SMALL, record(OTHER, dear))[0]] == ["the default"]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"algorithm": "from_the_future"}, "algorithm='from_the_future': must be one of winograd"),
        ({"knobs": {"width": 3}}, "knobs="),
        ({"knobs": {**record().knobs, "fancy": 2}}, "fancy"),
        ({"knobs": {**record().knobs, "width": -2}}, "knobs="),
    ],
)
def test_a_record_that_does_not_replay_is_named_and_skipped(change, named):
    bad = record(**change)
    found, (warning,) = choice_of(SMALL, bad)
    assert [choice.reason for choice in found] == ["the default"]
    assert SMALL.artifact_key in warning
    assert named in warning
    assert selection.replay_error(bad) == warning
    kept = records.Records(V3.name)
    kept.add(bad)
    assert nearest(OTHER, V3, kept) is None


@runs_v3
def test_a_build_follows_the_log_and_says_so(tmp_path):
    log, made = tmp_path / "log", tmp_path / "made"
    assert [o.manifest.origin for o in td.compile([SMALL], V3.name, made)] == ["default"]
    schedule = schedules_of(SMALL, 9)[8]
    Log(log).append(record(schedule=schedule))
    path = Log(log).file(SMALL.artifact_key, V3.name)
    path.write_text(path.read_text() + "{torn")
    (outcome,) = td.compile([SMALL], V3.name, made, logs=log)
    assert outcome.status == "built"
    assert outcome.manifest.origin == "tuned"
    assert len(outcome.warnings) == 1
    assert ":2: skipped" in outcome.warnings[0]
    assert Schedule.of(outcome.manifest.algorithm, outcome.manifest.knobs) == schedule
    run(SMALL, made)
    assert [o.status for o in td.compile([SMALL], V3.name, made, logs=log)] == ["current"]
    assert [o.status for o in td.compile([SMALL], V3.name, made)] == ["built"]


@runs_v3
def test_a_record_that_does_not_build_is_said_and_the_default_is_built(tmp_path):
    knobs = {**record().knobs, "channels": 0}
    Log(tmp_path / "log").append(record(schedule=Schedule.of("direct_rows", knobs)))
    (outcome,) = td.compile([SMALL], V3.name, tmp_path / "made", logs=tmp_path / "log")
    assert outcome.status == "built"
    assert outcome.manifest.origin == "default"
    assert "not built by the record of this problem" in outcome.warnings[0]
    run(SMALL, tmp_path / "made")
