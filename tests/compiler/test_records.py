"""Tuning logs: records read back, bad lines, merging, and the best of what is comparable."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.records import OTHER, SMALL, V3, record, schedules_of

from tvm_deconv.compiler import records, selection
from tvm_deconv.compiler.records import Log, Record, Schedule, best, read
from tvm_deconv.compiler.selection import space
from tvm_deconv.errors import BuildError
from tvm_deconv.targets import CPU_TARGETS


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


def test_a_log_that_cannot_be_written_is_one_sentence(tmp_path):
    log, added = Log(tmp_path / "log"), record()
    file = log.file(added.problem, added.target)
    file.parent.mkdir(parents=True)
    file.symlink_to("/dev/full")
    with pytest.raises(BuildError, match=r"^logs=.*log: must be a directory with room that can be written: .*No space"):
        log.append(added)
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
