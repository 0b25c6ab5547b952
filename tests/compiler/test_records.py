"""Tuning logs: records read back, bad lines, merging, and the best of what is comparable."""

import dataclasses
import resource

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.records import OTHER, SMALL, V3, VERDICT, ZEN3, record, schedules_of

from tvm_deconv.compiler import records, selection
from tvm_deconv.compiler.records import Cpu, Log, Record, Records, Schedule, best, read
from tvm_deconv.compiler.selection import candidates_of, named, space
from tvm_deconv.errors import BuildError
from tvm_deconv.problem import Problem
from tvm_deconv.targets import CPU_TARGETS, Host, get


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
        lambda fields: fields | {"default_ratio": "1"},
        lambda fields: fields | {"default_ratio": 0.0},
        lambda fields: fields | {"host": 3},
        lambda fields: fields | {"host": {**fields["host"], "family": "25"}},
        lambda fields: fields | {"host": {**fields["host"], "model": -1}},
        lambda fields: fields | {"host": {**fields["host"], "socket": "SP3"}},
        lambda fields: fields | {"host": {"name": "AMD EPYC"}},
    ],
    ids=[
        *("unknown field", "missing field", "text", "negative", "no integer", "no key", "no artifact key"),
        *("ratio of text", "ratio of nothing", "host is a number", "family of text", "negative model"),
        *("unknown field of host", "missing fields of host"),
    ],
)
def test_reading_is_strict(change, tmp_path):
    line = msgspec.json.encode(change(msgspec.to_builtins(record(host=ZEN3))))
    with pytest.raises(ValueError):  # noqa: PT011 (of msgspec or ours)
        Record.parse(line)
    path = Log(tmp_path).file(SMALL.artifact_key, V3.name)
    path.parent.mkdir()
    path.write_bytes(record(host=ZEN3).line.encode() + b"\n" + line)
    found = read(V3.name, tmp_path)
    assert list(found) == [record(host=ZEN3)]
    assert len(found.warnings) == 1
    assert f"{path}:2: skipped, does not read: " in found.warnings[0]


def test_old_records_read_and_stay_as_they_are():
    """They have no CPU but its name, and no ratio."""
    line = record(host="AMD EPYC").line
    assert "default_ratio" not in line
    assert '"host":"AMD EPYC"' in line
    old = Record.parse(line)
    assert (old.microarchitecture, old.default_ratio, old.beaten) == ("", None, False)
    assert old.line == line


def test_the_cpu_of_a_record():
    features = CPU_TARGETS["x86-64-v3"].features | get("znver3").features
    milan = Host(features, "AMD EPYC", 2, 2, "AuthenticAMD", 25, 1, 1)
    assert Cpu.of(milan) == ZEN3
    assert str(ZEN3) == "AMD EPYC (zen3, AuthenticAMD family 25 model 1 stepping 1)"
    assert Cpu.of(Host(frozenset(), "NVIDIA H100")) == "NVIDIA H100"
    other = Cpu.of(dataclasses.replace(milan, model=97))
    assert record(host=other).conditions != record(host=ZEN3).conditions
    found = Records(V3.name)
    for one in (record(host=ZEN3, seconds=1e-3, when="2027"), record(host=other, seconds=1e-6)):
        found.add(one)
    assert [one.seconds for one in found.comparable(SMALL.artifact_key)] == [1e-3]


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
    rows, channels = (
        [candidate.schedule for candidate in candidates_of(SMALL, named(name), V3)[:4]]
        for name in ("direct_rows", "direct_channels")
    )
    log = Log(tmp_path)
    log.merge(record(schedule=schedule, seconds=1e-3 * i) for i, schedule in enumerate([*rows, *channels], 1))
    log.append(record(OTHER, seconds=None, error="crashed"))
    assert log.prune(V3.name, 2) == (9, 4)
    found = read(V3.name, tmp_path)
    assert {r.schedule for r in found.by_problem[SMALL.artifact_key]} == {*rows[:2], *channels[:2]}
    assert list(found.by_problem) == [SMALL.artifact_key]


def test_prune_keeps_the_best_of_each_microarchitecture(tmp_path):
    one, two, three = [c.schedule for c in space(SMALL, V3) if c.schedule.algorithm == "direct_rows"][:3]
    zen4 = msgspec.structs.replace(ZEN3, microarchitecture="zen4")
    log = Log(tmp_path)
    kept = [
        record(schedule=one, seconds=2e-3, host=ZEN3, default_ratio=1.2),
        record(schedule=two, seconds=3e-3, host=zen4, sources="older"),
    ]
    log.merge(kept)
    log.merge(
        [
            record(schedule=two, seconds=1e-3, host=ZEN3),  # it had no turns
            record(schedule=three, seconds=1e-6, host=ZEN3, sources="older", when="2025"),
            record(schedule=three, seconds=1e-6),  # on an unknown CPU
        ]
    )
    assert log.prune(V3.name, 1) == (5, 2)
    assert sorted(read(V3.name, tmp_path), key=str) == sorted(kept, key=str)


def test_the_installed_log_reads():
    for target in CPU_TARGETS:
        found = read(target, records.shipped())
        assert found.warnings == []
        for key in found.by_problem:
            for kept in found.by_problem[key]:
                assert selection.replay_error(kept) is None


@pytest.mark.parametrize("step", [8, pytest.param(1, marks=pytest.mark.slow)], ids=["some", "all"])
def test_installed_records_are_of_the_space(step):
    """A record whose plan no search would try is replaced by one most like it, which nobody measured."""
    for target in CPU_TARGETS.values():
        found = read(target.name, records.shipped())
        for key in sorted(found.by_problem)[::step]:
            problem = Problem.from_key(key)
            trusted = [one for one in found.by_problem[key] if selection.is_of_today(one)]
            assert [one.line for one in trusted if not selection.in_space(problem, one.schedule, target)] == []


def unproven(problem, target, found):
    """Return the schedule that builds of `problem` follow if neither arithmetic nor a measurement is for it."""
    choice = next(iter(selection.choices_for(problem, target, found)))
    if choice.schedule is None or selection.agrees(problem, choice.schedule, target):
        return None
    verdicts = {one.schedule for one in selection.leaders(problem, found) if (one.default_ratio or 0) >= records.BETTER}
    return None if choice.schedule in verdicts and found.microarchitecture else choice.schedule


#: The targets of installed logs.
WITH_RECORDS = [target for target in CPU_TARGETS.values() if read(target.name, records.shipped()).by_problem]


def installed(target, data_format, step):
    """The problems of every `step`-th installed record of a layout, with the records of all."""
    found = read(target.name, records.shipped())
    keys = [key for key in sorted(found.by_problem) if Problem.from_key(key).data_format == data_format]
    assert len(keys) > 10
    return found, [Problem.from_key(key) for key in keys[::step]]


@pytest.mark.parametrize("step", [12, pytest.param(1, marks=pytest.mark.slow)], ids=["some", "all"])
@pytest.mark.parametrize("data_format", ["NCX", "NXC"])
@pytest.mark.parametrize("target", WITH_RECORDS, ids=[target.name for target in WITH_RECORDS])
def test_no_installed_record_is_followed_against_arithmetic(target, data_format, step):
    """On an unknown machine no record is a verdict; on those that measured one may be, with its ratio."""
    found, problems = installed(target, data_format, step)
    for machine in {"", *(one.microarchitecture for one in found)}:
        found.microarchitecture = machine
        assert [problem.key for problem in problems if unproven(problem, target, found)] == []


def test_a_bad_record_is_found_out(monkeypatch):
    """The guard above sees a record that is followed without proof."""
    dear = [*space(SMALL, V3)][-1].schedule
    found = Records(V3.name, microarchitecture="")
    found.add(record(schedule=dear, host=ZEN3, **VERDICT))
    assert unproven(SMALL, V3, found) is None
    agrees = selection.agrees
    monkeypatch.setattr(selection, "agrees", lambda *_: True)
    choice = next(iter(selection.choices_for(SMALL, V3, found)))
    monkeypatch.setattr(selection, "agrees", agrees)
    monkeypatch.setattr(selection, "choices_for", lambda *_: iter([choice]))
    assert unproven(SMALL, V3, found) == dear
    found.microarchitecture = "zen3"
    assert unproven(SMALL, V3, found) is None  # there it is a verdict


def test_a_log_that_cannot_be_written_is_one_sentence(tmp_path):
    log, added = Log(tmp_path / "log"), record()
    most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, most[1]))  # as if the disk were full
    try:
        with pytest.raises(BuildError, match=r"^logs=.*log: must be a directory with room .*large"):
            log.append(added)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, most)
    (tmp_path / "file").write_text("")
    with pytest.raises(BuildError, match=r"^logs=.*file: must be a directory with room that can be written: "):
        Log(tmp_path / "file").append(added)


@pytest.mark.parametrize("mode", [0o600, 0o664])
def test_a_log_keeps_its_permissions(tmp_path, mode):
    log, added = Log(tmp_path / "log"), record()
    log.append(added)
    file = log.file(added.problem, added.target)
    file.chmod(mode)
    log.merge([record(when="2026-02-02T00:00:00")])
    assert len(file.read_text().splitlines()) == 1
    assert file.stat().st_mode & 0o777 == mode


def test_of_trials_within_a_millisecond_the_one_that_took_turns_stays():
    """The line of the other would sort behind it."""
    turn, decided = record(seconds=9.0), record(seconds=1.0, default_ratio=1.0)
    assert turn.line > decided.line
    assert records.newest([turn, decided]) == records.newest([decided, turn]) == [decided]
