"""Tuning: logs and what becomes of bad lines, choosing and adapting schedules, a search and what cannot stop it."""

import dataclasses
import importlib.metadata
import json
import math
import subprocess
import textwrap
from types import SimpleNamespace

import msgspec
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from support.strategies import operands, problems
from support.tolerances import assert_close

import tvm_deconv as td
from tvm_deconv import tuning
from tvm_deconv.cli import main as cli
from tvm_deconv.compiler import build, records, selection
from tvm_deconv.compiler.launcher import find_compiler
from tvm_deconv.compiler.process import Worker
from tvm_deconv.compiler.records import Log, Record, Schedule, best, read
from tvm_deconv.compiler.selection import Choice, adapt, apart, load_imbalance, named, nearest, plan_of, space
from tvm_deconv.targets import CPU_TARGETS, detect_host
from tvm_deconv.tuning import search, session
from tvm_deconv.tuning.runners import local

V3 = CPU_TARGETS["x86-64-v3"]
SMALL = td.Problem(1, 1, 4, 6, (5, 6), (3, 3), (2, 2), (1, 1), (1, 1), (9, 11))
OTHER = SMALL.replace(out_channels=8)

runs_v3 = pytest.mark.skipif(not V3.features <= detect_host().features, reason="this CPU does not run x86-64-v3")


def schedules_of(problem, count):
    return [candidate.schedule for candidate in space(problem, V3)[:count]]


def record(problem=SMALL, schedule=None, seconds=1e-3, **changes):
    schedule = schedule or schedules_of(problem, 1)[0]
    made = Record(
        problem=problem.artifact_key,
        target=V3.name,
        algorithm=schedule.algorithm,
        knobs=dict(schedule.knobs),
        seconds=seconds,
        spread=0.01,
        runs=9,
        error="",
        threads=1,
        host="a CPU",
        sources="0123456789ab",
        commit="fedcba987654",
        seed=3,
        versions={"tvm_deconv": "0.1.0"},
        when="2026-01-02T03:04:05.678+00:00",
    )
    return msgspec.structs.replace(made, **changes)


# --- logs ------------------------------------------------------------------------------------------------------------


@given(
    seconds=st.none() | st.floats(1e-9, 1e9),
    knobs=st.dictionaries(st.text(min_size=1), st.integers(-(2**63), 2**63 - 1)),
    error=st.text(),
)
def test_a_record_is_one_line_and_reads_back(seconds, knobs, error):
    made = record(schedule=Schedule.of("direct_rows", knobs), seconds=seconds, error=error)
    assert "\n" not in made.line
    assert Record.parse(made.line) == made
    fields = list(msgspec.json.decode(made.line))
    assert fields == sorted(fields)


@pytest.mark.parametrize(
    "change",
    [
        lambda fields: fields | {"more": 1},
        lambda fields: {name: value for name, value in fields.items() if name != "seed"},
        lambda fields: fields | {"seconds": "1"},
        lambda fields: fields | {"seconds": -1.0},
        lambda fields: fields | {"knobs": {"width": 1.5}},
        lambda fields: fields | {"problem": "no problem"},
        lambda fields: fields | {"problem": SMALL.key},
    ],
    ids=["unknown field", "missing field", "text", "negative", "no integer", "no key", "no artifact key"],
)
def test_reading_is_strict(change):
    with pytest.raises(ValueError):  # noqa: PT011 (of msgspec or ours)
        Record.parse(msgspec.json.encode(change(msgspec.to_builtins(record()))))


def test_a_torn_line_loses_only_itself(tmp_path):
    log = Log(tmp_path)
    first, second, third = (record(schedule=schedule) for schedule in schedules_of(SMALL, 3))
    log.append(first)
    log.append(second)
    path = log.file(SMALL.artifact_key, V3.name)
    path.write_bytes(path.read_bytes()[:-20])
    found = read(V3.name, tmp_path)
    assert found.by_problem[SMALL.artifact_key] == [first]
    assert len(found.warnings) == 1
    assert f"{path}:2: skipped" in found.warnings[0]
    log.append(third)
    assert read(V3.name, tmp_path).by_problem[SMALL.artifact_key] == [first, third]
    log.tidy(SMALL.artifact_key, V3.name)
    after = read(V3.name, tmp_path)
    assert after.warnings == []
    assert sorted(after.by_problem[SMALL.artifact_key], key=str) == sorted([first, third], key=str)


def test_what_a_newer_version_wrote_stays(tmp_path):
    log = Log(tmp_path)
    log.append(record())
    path = log.file(SMALL.artifact_key, V3.name)
    newer = '{"from":"the future"}'
    path.write_text(f"{newer}\n{{torn\n{path.read_text()}")
    log.tidy(SMALL.artifact_key, V3.name)
    assert path.read_text() == f"{record().line}\n{newer}\n"
    found = read(V3.name, tmp_path)
    assert found.warnings_for(SMALL.artifact_key) == found.warnings != []
    assert found.warnings_for(OTHER.artifact_key) == []
    log.merge([record(seconds=1e-4, when="2027")])
    assert newer in path.read_text()


def test_logs_merge_to_the_same_text_in_any_order(tmp_path):
    one, two = schedules_of(SMALL, 2)
    older, newer = record(schedule=one, seconds=1e-3), record(schedule=one, seconds=2e-3, when="2027")
    parts = [[older, record(schedule=two)], [newer], [record(OTHER)]]
    texts = []
    for name, order in (("a", parts), ("b", parts[::-1])):
        for part in order:
            Log(tmp_path / name).merge(part)
        texts.append({path.name: path.read_text() for path in (tmp_path / name / V3.name).glob("*.jsonl")})
    assert texts[0] == texts[1]
    lines = texts[0][Log(tmp_path).file(SMALL.artifact_key, V3.name).name].splitlines()
    assert newer.line in lines
    assert older.line not in lines
    assert len(lines) == 2
    assert lines == [found.line for found in records.newest(map(Record.parse, lines))]


def test_the_newest_conditions_decide_what_is_best(tmp_path):
    one, two = schedules_of(SMALL, 2)
    Log(tmp_path).merge(
        [
            record(schedule=one, seconds=1e-6, sources="old"),
            record(schedule=one, seconds=2e-3, when="2027"),
            record(schedule=two, seconds=1e-3, when="2027"),
            record(schedule=two, seconds=None, error="crashed", when="2028", host="another CPU"),
        ]
    )
    assert best(SMALL, read(V3.name, tmp_path)).schedule == two
    assert best(OTHER, read(V3.name, tmp_path)) is None


def test_prune_keeps_the_fastest_of_each_algorithm(tmp_path):
    everything = space(SMALL, V3)
    rows = [c.schedule for c in everything if c.schedule.algorithm == "direct_rows"][:4]
    channels = [c.schedule for c in everything if c.schedule.algorithm == "direct_channels"][:4]
    log = Log(tmp_path)
    log.merge(record(schedule=schedule, seconds=1e-3 * i) for i, schedule in enumerate([*rows, *channels], 1))
    log.append(record(OTHER, seconds=None, error="crashed"))
    assert log.prune(V3.name, 2) == (9, 4)
    found = read(V3.name, tmp_path)
    assert {r.schedule for r in found.by_problem[SMALL.artifact_key]} == {*rows[:2], *channels[:2]}
    assert list(found.by_problem) == [SMALL.artifact_key]


def test_the_installed_log_reads():
    for target in CPU_TARGETS:
        found = read(target, records.shipped())
        assert found.warnings == []
        for key in found.by_problem:
            for kept in found.by_problem[key]:
                assert selection.replay_error(kept) is None


# --- choices ---------------------------------------------------------------------------------------------------------


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


def run(problem, directory):
    data, weights, bias = operands(problem, 0)
    found = td.load(directory).bind(problem, weights, bias)(data)
    assert_close(found, td.reference(problem, data, weights, bias))


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


# --- search ----------------------------------------------------------------------------------------------------------


@runs_v3
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
        assert trial.record.host == detect_host().name
        assert trial.record.versions["tvm_deconv"] == importlib.metadata.version("tvm_deconv")


class Arithmetic:
    """A machine without processes: a schedule takes `seconds(problem, schedule)`, and no problem less than `floor`."""

    def __init__(self, seconds, floor):
        self.seconds = seconds
        self.floor = floor

    def measure_floors(self, problems):
        assert list(problems)

    def round(self, search, schedules):
        for schedule in schedules:
            yield record(search.problem, schedule, self.seconds(search.problem, schedule), **CONDITIONS)


CONDITIONS = {"host": "a CPU", "threads": 1, "sources": "now"}


def spent(machine, problems, trials, *known):
    """The records of a search on `machine`, in their order, where those of `known` were there before."""
    kept, heard = records.Records(V3.name), []
    for one in known:
        kept.add(one)
    searches = [
        search.Search(problem, V3, kept, records.Conditions("a CPU", 1, "now"), 0, None) for problem in problems
    ]
    session.spend(searches, machine, trials, heard.append)
    return [trial.record for trial in heard]


def costs(problem):
    return {candidate.schedule: candidate.cost for candidate in space(problem, V3)}


def test_trials_go_to_the_problem_with_most_to_gain():
    """Of two that take as long, one is at its floor."""
    far = SMALL.replace(data_spatial=(9, 9), output_spatial=(17, 17))
    machine = Arithmetic(lambda *_: 1e-3, lambda problem: 9.9e-4 if problem == SMALL else 5e-4)
    got = spent(machine, [SMALL, far], 20)
    of_far = sum(1 for one in got if one.problem == far.artifact_key)
    assert len(got) == 40
    assert of_far == 32  # each has its first round of eight
    slow = Arithmetic(lambda problem, _: 1e-3 if problem == SMALL else 1e-1, lambda _: 1e-4)
    assert sum(1 for one in spent(slow, [SMALL, far], 20) if one.problem == far.artifact_key) == 32


def test_trials_go_to_the_algorithm_that_is_fast_and_all_are_tried():
    problem = SMALL.replace(in_channels=32, out_channels=32, data_spatial=(12, 12), output_spatial=(23, 23))
    cost = costs(problem)
    worth_it = search.HOPELESS_COST * min(cost.values())
    algorithms = list(dict.fromkeys(schedule.algorithm for schedule in cost if cost[schedule] <= worth_it))
    assert len(algorithms) > 2

    def seconds(_, schedule):
        return cost[schedule] * (1e-6 if schedule.algorithm == algorithms[-1] else 1e-3)

    tried = [one.algorithm for one in spent(Arithmetic(seconds, lambda _: 1e-9), [problem], 64)]
    assert set(tried[:8]) == set(algorithms)
    assert tried[16:].count(algorithms[-1]) >= len(tried[16:]) / 2  # every mutation


def test_a_search_that_was_stopped_anywhere_tries_nothing_twice():
    cost = costs(SMALL)
    machine = Arithmetic(lambda _, schedule: cost[schedule] * 1e-6, lambda _: 1e-9)
    hopeless = search.HOPELESS_COST * min(cost.values())
    worth_it = {schedule for schedule in cost if cost[schedule] <= hopeless}
    got = []
    for trials in (1, 3, 11, 12, 40, 100_000):
        more = spent(machine, [SMALL], trials, *got)
        assert not {one.schedule for one in more} & {one.schedule for one in got}
        got += more
        assert len(got) == min(trials, len(worth_it))
    assert {one.schedule for one in got} == worth_it


def test_finalists_take_turns_and_their_medians_decide():
    lucky, steady, failing, slow = list(costs(SMALL))[:4]
    turns = {lucky: iter([1.0, 1.3, 0.9, 1.2]), steady: iter([1.05] * 4), failing: iter([1.02, 1.0, None, 1.0])}
    measured = []

    class Noisy(Arithmetic):
        log = SimpleNamespace(append=measured.append)

        def round(self, search, schedules):
            for schedule in schedules:
                time = next(turns[schedule])
                yield record(search.problem, schedule, time, **CONDITIONS, error="" if time else "it ended")

    here, known = records.Conditions("a CPU", 1, "now"), records.Records(V3.name)
    state, machine = search.Search(SMALL, V3, known, here, 0, None), Noisy(None, None)
    for one in machine.round(state, [lucky, steady, failing]):
        state.note(one)
    state.note(record(SMALL, slow, 1.2, **CONDITIONS))
    assert state.best.schedule == lucky
    session.decide(state, machine)
    assert {one.schedule: one.seconds for one in measured} == {lucky: 1.2, steady: 1.05, failing: None}
    assert state.best.schedule == steady
    known.by_problem[SMALL.artifact_key] = list(measured)
    session.decide(search.Search(SMALL, V3, known, here, 0, None), machine)
    assert len(measured) == 3  # nothing was tried since


def test_the_nearest_record_is_among_the_first_that_are_tried():
    near = schedules_of(OTHER, 30)[29]
    machine = Arithmetic(lambda *_: 1e-3, lambda _: 1e-9)
    adapted = adapt(near, OTHER, SMALL, V3)
    assert adapted != selection.default_schedule(SMALL, V3)
    assert [one.schedule for one in spent(machine, [SMALL], 2, record(OTHER, near, **CONDITIONS))] == [
        selection.default_schedule(SMALL, V3),
        adapted,
    ]
    assert adapted not in {one.schedule for one in spent(machine, [SMALL], 2)}


_BAD = """
    #include <stdint.h>
    int tvm_deconv_set_num_threads(int count) {{ return count; }}
    int __tvm_ffi_deconv(void *self, const void *arguments, int32_t count, void *result) {{ {body} return 0; }}
"""


@pytest.fixture
def spoilt(tmp_path, monkeypatch):
    """Replaces what is built of some candidates: a function of schedule to None, or to the body of a C function."""

    def install(body_of):
        ask = Worker.ask

        def spoiling(self, method, *arguments, timeout):
            answer = ask(self, method, *arguments, timeout=timeout)
            body = body_of(arguments[1]) if method == "build" else None
            if body is None:
                return answer
            path = tmp_path / f"bad{len(list(tmp_path.glob('*.so')))}.so"
            command = [find_compiler(), "-x", "c", "-shared", "-fPIC", "-o", str(path), "-"]
            subprocess.run(command, input=textwrap.dedent(_BAD.format(body=body)), text=True, check=True)
            return dataclasses.replace(answer, deconv=path)

        monkeypatch.setattr(Worker, "ask", spoiling)

    return install


@runs_v3
def test_bad_candidates_do_not_stop_a_search_and_are_never_best(spoilt, tmp_path):
    bodies = iter(["for (;;) {}", "__builtin_trap();", "(void)0;"])
    default, bad = selection.default_schedule(SMALL, V3), {}
    spoilt(lambda schedule: None if schedule == default else bad.setdefault(schedule, next(bodies, None)))
    (found,) = tuning.tune([SMALL], V3.name, 6, tmp_path / "log", jobs=1, timeout=8)
    errors = {r.schedule: r.error for r in read(V3.name, tmp_path / "log").by_problem[SMALL.artifact_key]}
    said = {body: errors[schedule] for schedule, body in bad.items() if body}
    assert said["for (;;) {}"] == "did not end within 8 s"
    assert said["__builtin_trap();"].startswith("its process ended with signal SIG")
    assert said["(void)0;"].startswith("ArithmeticError: differs from the default")
    assert sum(1 for error in errors.values() if error == "") == 3
    assert errors[found.best.schedule] == ""
    assert best(SMALL, read(V3.name, tmp_path / "log")) == found.best


@runs_v3
def test_an_interrupted_search_has_kept_what_it_measured(tmp_path):
    def interrupt(trial):
        if trial.done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tuning.tune([SMALL], V3.name, 5, tmp_path, jobs=1, on_trial=interrupt)
    assert len(read(V3.name, tmp_path).by_problem[SMALL.artifact_key]) == 2


@pytest.mark.parametrize("trials", [-1, 1.5])
def test_trials_are_a_count(trials, tmp_path):
    with pytest.raises(td.ProblemError, match="trials="):
        tuning.tune([SMALL], V3.name, trials, tmp_path)


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


# --- commands --------------------------------------------------------------------------------------------------------


def command(*arguments):
    return CliRunner().invoke(cli.main, [str(argument) for argument in arguments], env={"COLUMNS": None})


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "small.json"
    layer = {"data": SMALL.data_shape, "filter": SMALL.replace(filter_format="GIOX").filter_shape}
    layer |= {"strides": SMALL.strides, "pads_begin": SMALL.pads_begin, "pads_end": SMALL.pads_begin}
    path.write_text(json.dumps([{"name": "one", **layer}]))
    return path


@runs_v3
def test_tune_prints_what_it_found(source, tmp_path):
    log = tmp_path / "log"
    result = command("tune", source, "--target", V3.name, "--trials", 2, "--logs", log, "--jobs", 1)
    assert result.exit_code == 0, result.output
    assert "2 trials" in result.stdout
    assert "one" in result.stdout
    assert len(list(read(V3.name, log))) == 2
    result = command("compile", source, "--target", V3.name, "--output", tmp_path / "made", "--logs", log)
    assert result.exit_code == 0, result.output
    assert [manifest.origin for manifest in td.load(tmp_path / "made").manifests] == ["tuned"]


def test_an_interrupt_says_how_to_continue(source, tmp_path, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(tuning, "tune", interrupted)
    result = command("tune", source, "--logs", tmp_path / "log")
    assert result.exit_code == 1
    assert "the same command continues" in result.stderr


def test_trials_of_compile_need_logs(source):
    result = command("compile", source, "--trials", 3)
    assert result.exit_code == 2
    assert "--trials needs --logs" in result.stderr


def test_logs_merge_best_and_prune(tmp_path):
    one, two, three = schedules_of(SMALL, 3)
    Log(tmp_path / "a").append(record(schedule=one, seconds=3e-3))
    Log(tmp_path / "b").append(record(schedule=two, seconds=2e-3))
    Log(tmp_path / "b").append(record(schedule=three, seconds=4e-3, algorithm="forgotten"))
    torn = Log(tmp_path / "b").file(SMALL.artifact_key, V3.name)
    torn.write_text(torn.read_text() + "{")
    result = command("logs", "merge", tmp_path / "into", tmp_path / "a", tmp_path / "b")
    assert result.exit_code == 0, result.output
    assert "0 records, 3 with those of" in result.stdout
    assert "b/x86-64-v3" in result.stderr
    assert ":3: skipped" in result.stderr
    result = command("logs", "best", tmp_path / "into")
    assert result.exit_code == 0, result.output
    assert SMALL.artifact_key in result.stdout
    assert two.algorithm in result.stdout
    assert "by forgotten: does not replay" in result.stderr
    result = command("logs", "prune", tmp_path / "into", "--keep", 1, "--target", V3.name)
    assert result.exit_code == 0, result.output
    assert f"{V3.name}: 2 of 3 records kept" in result.stdout
    assert best(SMALL, read(V3.name, tmp_path / "into")).schedule == two
