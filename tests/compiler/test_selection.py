"""The schedule of a build: the record, the nearest record adapted, or the default."""

import functools
import math

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.records import OTHER, SMALL, V3, VERDICT, ZEN3, record, run, runs_v3, schedules_of
from support.strategies import problems

import tvm_deconv as td
from tvm_deconv.compiler import records, selection
from tvm_deconv.compiler.backends import backend_of
from tvm_deconv.compiler.fingerprint import kernel_digest
from tvm_deconv.compiler.records import Cpu, Log, Schedule
from tvm_deconv.compiler.selection import (
    HOPELESS_COST,
    Choice,
    adapt,
    apart,
    candidates_of,
    load_imbalance,
    named,
    nearest,
    plan_of,
    space,
)
from tvm_deconv.targets import CPU_TARGETS, detect_host


@settings(max_examples=30)
@given(
    source=problems(dtypes=["float32"], max_macs=50_000),
    problem=problems(dtypes=["float32"], max_macs=50_000),
    target=st.sampled_from(list(CPU_TARGETS.values())),
    draw=st.data(),
)
def test_an_adapted_schedule_is_one_of_the_problem(source, problem, target, draw):
    algorithms = [one for one in backend_of(target).algorithms if one.supports(source, target)]
    algorithm = draw.draw(st.sampled_from([one for one in algorithms if one.supports(problem, target)]))
    schedule = draw.draw(st.sampled_from(candidates_of(source, algorithm, target))).schedule
    adapted = adapt(schedule, source, problem, target)
    assert adapted.algorithm == schedule.algorithm
    assert adapted in {candidate.schedule for candidate in candidates_of(problem, algorithm, target)}
    assert plan_of(adapted).knobs == dict(adapted.knobs)
    assert adapt(schedule, source, source, target) == schedule


def test_threads_without_a_task_cost_time():
    alone = [*space(SMALL, V3)]
    algorithm, plan = named(alone[0].algorithm), alone[0].plan
    assert load_imbalance(SMALL, algorithm, plan, 1) == 1
    assert load_imbalance(SMALL, algorithm, plan, 1000) > 10
    costs = {candidate.schedule: candidate.cost for candidate in alone}
    shared = [*space(SMALL, V3, 8)]
    assert all(candidate.cost >= costs.get(candidate.schedule, 0.0) for candidate in shared)
    assert alone[0].cost < shared[0].cost
    assert shared[-1].cost <= HOPELESS_COST * shared[0].cost


def test_a_space_is_the_candidates_that_are_not_hopeless():
    """In order of cost, and every one that costs at most so many times the cheapest."""
    found = [*space(SMALL, V3)]
    names = {candidate.algorithm for candidate in found}
    every = [one for name in names for one in candidates_of(SMALL, named(name), V3)]
    most = HOPELESS_COST * found[0].cost
    assert [one.cost for one in found] == sorted(one.cost for one in every if one.cost <= most)
    assert len(found) < len(every)


def test_what_does_not_replay_costs_too_much():
    schedule = next(space(SMALL, V3)).schedule
    assert math.isfinite(selection.cost_of(SMALL, schedule, V3))
    assert selection.cost_of(SMALL, schedule._replace(knobs=(("width", 3),)), V3) == math.inf


def test_distance_counts_kernel_and_strides_most():
    assert apart(SMALL, SMALL) == 0
    assert apart(SMALL, SMALL.replace(data_format="NXC")) == math.inf
    assert apart(SMALL, SMALL.replace(dtype="float64")) == math.inf
    wider = apart(SMALL, SMALL.replace(data_spatial=(5, 12)))
    assert 0 < wider < apart(SMALL, SMALL.replace(strides=(2, 4)))


def choice_of(problem, *found, machine=None, algorithms=None):
    kept = records.Records(V3.name, microarchitecture=machine)
    for one in found:
        kept.add(one)
    warnings = []
    return list(selection.choices_for(problem, V3, kept, warnings, algorithms)), warnings


DEFAULT = Choice(None, "default", "the default")


def test_exact_before_nearest_before_default():
    exact, near = schedules_of(SMALL, 6)[5], schedules_of(OTHER, 1)[0]
    found, warnings = choice_of(SMALL, record(SMALL, exact, **VERDICT), record(OTHER, near))
    assert found == [Choice(exact, "tuned", "the record of this problem"), DEFAULT]
    assert warnings == []
    found, _ = choice_of(SMALL, record(OTHER, near))
    assert found[0].schedule == adapt(near, OTHER, SMALL, V3)
    assert found[0].origin == "default"
    assert OTHER.artifact_key in found[0].reason
    assert found[1:] == [DEFAULT]
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


def test_the_nearest_is_not_used_of_another_algorithm():
    """Where arithmetic sees little difference, which of two algorithms is faster is a matter of the extents."""
    square = td.Problem(1, 1, 128, 64, (64, 64), (2, 2), (2, 2), (1, 1), (0, 0), (128, 128))
    oblong = square.replace(data_spatial=(64, 60), output_spatial=(128, 120))
    own = selection.default_schedule(square, V3).algorithm
    algorithms = {candidate.algorithm for candidate in space(oblong, V3)}
    used = {}
    for name in algorithms:
        kept = records.Records(V3.name)
        kept.add(record(oblong, candidates_of(oblong, named(name), V3)[0].schedule))
        _, adapted = nearest(square, V3, kept)
        if selection.agrees(square, adapted, V3):
            used[name] = selection.trusted(square, V3, kept) is not None
    assert used == {name: name == own for name in used}
    assert {*used.values()} == {True, False}


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


@functools.cache
def dear():
    """A schedule that costs more than a proposal may."""
    return [*space(SMALL, V3)][-1].schedule


@functools.cache
def cheap():
    """Another schedule than the default that costs little more."""
    _, schedule = schedules_of(SMALL, 2)
    assert schedule != selection.default_schedule(SMALL, V3)
    assert selection.agrees(SMALL, schedule, V3)
    return schedule


def test_a_verdict_needs_these_kernels_the_default_beside_it_and_such_a_machine():
    verdict = record(SMALL, dear(), host=ZEN3, **VERDICT)
    assert choice_of(SMALL, verdict, machine="zen3")[0][0].schedule == dear()
    of_device = msgspec.structs.replace(verdict, host="NVIDIA H100")  # its target says which machines are meant
    assert choice_of(SMALL, of_device, machine=None)[0][0].schedule == dear()
    for change, machine, words in (
        ({"sources": "older"}, "zen3", "the record of this problem, made by other kernels"),
        ({"default_ratio": None}, "zen3", "the record of this problem"),
        ({"host": "AMD EPYC"}, "zen3", "the record of this problem, measured on an unknown CPU"),
        ({}, "zen4", "the record of this problem, measured on zen3"),
        ({}, "", "the record of this problem, measured on zen3"),
    ):
        proposal = msgspec.structs.replace(verdict, **change)
        only = Choice(None, "default", f"the default; overruled by arithmetic: {words}")
        assert choice_of(SMALL, proposal, machine=machine)[0] == [only]
        agreed = msgspec.structs.replace(proposal, algorithm=cheap().algorithm, knobs=dict(cheap().knobs))
        assert choice_of(SMALL, agreed, machine=machine)[0] == [Choice(cheap(), "tuned", words), DEFAULT]


def test_the_default_decides_where_nothing_was_faster():
    level = record(SMALL, cheap(), default_ratio=1.009, sources=kernel_digest("x86"))
    (found,), _ = choice_of(SMALL, level)
    assert (found.schedule, found.origin) == (None, "tuned")
    assert found.reason.startswith("the default: nothing was faster")
    assert choice_of(SMALL, msgspec.structs.replace(level, default_ratio=1.011))[0][0].schedule == cheap()
    assert choice_of(OTHER, level)[0] == [DEFAULT]  # nor is it adapted
    # The default of all algorithms is not that of some.
    other = record(SMALL, dear(), sources=kernel_digest("x86"))
    assert choice_of(SMALL, level, algorithms=(cheap().algorithm,))[0][0].schedule == cheap()
    assert choice_of(SMALL, other, algorithms=(dear().algorithm,))[0][0].schedule == dear()


def test_a_record_serves_every_epilogue_and_its_own_first():
    biased = SMALL.replace(epilogue=td.Epilogue(bias=True))
    relu = SMALL.replace(epilogue=td.Epilogue(bias=True, activation="relu"))
    one, two = schedules_of(SMALL, 40)[30], dear()
    of_none, of_bias = record(SMALL, one, **VERDICT), record(biased, two, **VERDICT)
    words = "the record of this convolution with the epilogue "
    assert choice_of(relu, of_none)[0][0] == Choice(one, "tuned", f"{words}none")
    assert choice_of(relu, of_none, of_bias)[0][0] == Choice(two, "tuned", f"{words}bias")
    assert choice_of(biased, of_none, of_bias)[0][0] == Choice(two, "tuned", "the record of this problem")
    assert choice_of(SMALL, of_none, of_bias)[0][0] == Choice(one, "tuned", "the record of this problem")


def test_a_record_that_the_epilogue_has_no_plan_for_is_adapted():
    biased = SMALL.replace(epilogue=td.Epilogue(bias=True))
    default = selection.default_schedule(SMALL, V3)
    name, value = max(default.knobs, key=lambda knob: knob[1])
    absent = Schedule.of(default.algorithm, dict(default.knobs) | {name: value + 1})
    assert selection.cost_of(biased, absent, V3) == math.inf
    assert choice_of(SMALL, record(SMALL, absent, **VERDICT))[0][0].schedule == absent
    found = choice_of(biased, record(SMALL, absent, **VERDICT))[0][0]
    assert found.schedule in {candidate.schedule for candidate in space(biased, V3)}
    assert found.origin == "default"
    assert found.reason == "adapted from the record of this convolution with the epilogue none"


def test_the_nearest_machine_comes_first():
    zen2, haswell = (msgspec.structs.replace(ZEN3, microarchitecture=name) for name in ("zen2", "haswell"))
    kinds = dict(zip((ZEN3, zen2, haswell, "AMD EPYC"), schedules_of(SMALL, 4), strict=True))
    every = [record(SMALL, schedule, host=host, **VERDICT) for host, schedule in kinds.items()]
    left = records.Records(V3.name, microarchitecture="zen3")
    for one in reversed(every):
        left.add(one)
    assert selection.leaders(SMALL, left) == every
    left.microarchitecture = "broadwell"
    assert selection.leaders(SMALL, left)[0] == every[2]
    assert left.groups(SMALL.artifact_key)[0] == [every[2]]


@runs_v3
@pytest.mark.usefixtures("compiles_here")
def test_a_build_follows_the_log_and_says_so(tmp_path):
    log, made = tmp_path / "log", tmp_path / "made"
    assert [o.manifest.origin for o in td.compile([SMALL], V3.name, made)] == ["default"]
    schedule = schedules_of(SMALL, 9)[8]
    Log(log).append(record(schedule=schedule, host=Cpu.of(detect_host()), **VERDICT))
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
@pytest.mark.usefixtures("compiles_here")
def test_a_record_that_does_not_build_is_said_and_the_default_is_built(tmp_path):
    knobs = {**record().knobs, "channels": 0}
    bad = record(schedule=Schedule.of("direct_rows", knobs), host=Cpu.of(detect_host()), **VERDICT)
    Log(tmp_path / "log").append(bad)
    (outcome,) = td.compile([SMALL], V3.name, tmp_path / "made", logs=tmp_path / "log")
    assert outcome.status == "built"
    assert outcome.manifest.origin == "default"
    assert "not built by the record of this problem" in outcome.warnings[0]
    run(SMALL, tmp_path / "made")
