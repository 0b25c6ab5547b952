"""Measuring the records of a log again: what is measured, what is kept, and what is not done twice."""

import msgspec
import pytest
from support.records import OTHER, SMALL, V3, VERDICT, ZEN3, record, runs_v3, schedules_of

import tvm_deconv as td
from tvm_deconv.compiler.fingerprint import kernel_digest
from tvm_deconv.compiler.records import Cpu, Log, Schedule, read
from tvm_deconv.compiler.selection import default_schedule
from tvm_deconv.targets import detect_host
from tvm_deconv.tuning.remeasure import Remeasured, remeasure
from tvm_deconv.tuning.runners import local


@runs_v3
def test_records_take_turns_with_the_default_once(tmp_path):
    first, broken = schedules_of(SMALL, 2)[1], Schedule.of("direct_rows", {**record().knobs, "channels": 0})
    old = [record(schedule=schedule, seconds=seconds) for schedule, seconds in ((first, 1.0), (broken, 2.0))]
    unknown = record(schedule=first, algorithm="forgotten", seconds=3.0)
    Log(tmp_path).merge([*old, unknown, record(OTHER)])
    heard = []
    found = remeasure(tmp_path, V3.name, jobs=1, on_problem=heard.append)
    assert found == heard
    assert [(one.done, one.total) for one in found] == [(1, 2), (2, 2)]
    (of_small,) = [one for one in found if one.problem == SMALL.artifact_key]
    (of_other,) = [one for one in found if one.problem == OTHER.artifact_key]
    assert of_small.best.schedule == first
    assert of_small.best.default_ratio == pytest.approx(of_small.default.seconds / of_small.best.seconds, abs=1e-4)
    assert (of_other.best, of_other.kept) == (of_other.default, "default")  # the record was of the default
    kept = read(V3.name, tmp_path)
    assert {one.schedule for one in kept.by_problem[SMALL.artifact_key] if one.sources == kernel_digest()} == {
        default_schedule(SMALL, V3),
        first,
        broken,
    }
    for one in kept:
        if one.sources == kernel_digest():
            assert one.host == Cpu.of(detect_host())
            assert (one.default_ratio is None) == (one.schedule == broken) == ("does not compile" in one.error)
    earlier = [one for one in kept.by_problem[SMALL.artifact_key] if one.sources != kernel_digest()]
    assert sorted(earlier, key=str) == sorted([*old, unknown], key=str)
    again = remeasure(tmp_path, V3.name, jobs=1)
    assert [(one.best, one.default) for one in again] == [(one.best, one.default) for one in found]
    assert list(read(V3.name, tmp_path)) == list(kept)


@runs_v3
def test_what_an_interrupt_left_is_measured_again(tmp_path):
    here = {"host": Cpu.of(detect_host()), "sources": kernel_digest()}
    tried = schedules_of(SMALL, 2)
    Log(tmp_path).merge(record(schedule=schedule, **here) for schedule in tried)

    def interrupt(_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        remeasure(tmp_path, V3.name, jobs=1, on_problem=interrupt)
    kept = read(V3.name, tmp_path)
    assert {one.schedule for one in kept if one.default_ratio is not None} == {*tried, default_schedule(SMALL, V3)}


@pytest.mark.parametrize(("ratio", "kept"), [(1.2, "record"), (1.005, "default"), (0.9, "default")])
def test_what_is_kept(ratio, kept):
    best = record(host=ZEN3, **{**VERDICT, "default_ratio": ratio})
    default = msgspec.structs.replace(best, default_ratio=1.0)
    assert Remeasured(SMALL.artifact_key, V3.name, best, default, 1, 1).kept == kept
    assert Remeasured(SMALL.artifact_key, V3.name, None, default, 1, 1).kept == "default"


def test_a_target_that_cannot_run_here_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(local, "detect_host", lambda: td.targets.Host(frozenset(), "an old CPU"))
    with pytest.raises(td.ProblemError, match="an old CPU cannot run it: it lacks"):
        remeasure(tmp_path, V3.name)
