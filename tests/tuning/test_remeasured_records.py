"""Measuring the records of a log again: what is measured, what is kept, and what is not done twice."""

from types import SimpleNamespace

import msgspec
import pytest
from support.records import OTHER, SMALL, V3, VERDICT, ZEN3, record, runs_v3, schedules_of

import tvm_deconv as td
from tvm_deconv.compiler.fingerprint import kernel_digest
from tvm_deconv.compiler.records import Conditions, Cpu, Log, Records, Schedule, read
from tvm_deconv.compiler.selection import default_schedule
from tvm_deconv.problem import Problem
from tvm_deconv.targets import detect_host, get
from tvm_deconv.tuning.builders import Built
from tvm_deconv.tuning.remeasure import Here, Remeasured, Renewal, remeasure
from tvm_deconv.tuning.runners import local
from tvm_deconv.tuning.search import Search

ZEN_0 = msgspec.structs.replace(ZEN3, microarchitecture="zen0")


@runs_v3
def test_records_take_turns_with_the_default_once(tmp_path):
    first, broken = schedules_of(SMALL, 2)[1], Schedule.of("direct_rows", {**record().knobs, "channels": 0})
    old = [record(schedule=schedule, seconds=seconds) for schedule, seconds in ((first, 1.0), (broken, 2.0))]
    unknown = record(schedule=first, algorithm="forgotten", seconds=3.0)
    Log(tmp_path).merge([*old, unknown, record(OTHER)])
    heard = []
    found = remeasure(tmp_path, V3.name, jobs=1, on_problem=heard.append)
    assert found == heard
    assert [(one.status, one.done, one.total) for one in found] == [("measured", 1, 2), ("measured", 2, 2)]
    (of_small,) = [one for one in found if one.problem == SMALL.artifact_key]
    assert ["does not replay" in text or "no search tries its plan" in text for text in of_small.warnings] == [True] * 2
    (of_other,) = [one for one in found if one.problem == OTHER.artifact_key]
    assert of_small.best.schedule == first
    assert of_small.best.default_ratio == pytest.approx(of_small.default.seconds / of_small.best.seconds, abs=1e-4)
    assert (of_other.best, of_other.kept) == (of_other.default, "default")  # the record was of the default
    kept = read(V3.name, tmp_path)
    assert {one.schedule for one in kept.by_problem[SMALL.artifact_key] if one.sources == kernel_digest("x86")} == {
        default_schedule(SMALL, V3),
        first,
    }
    for one in kept:
        if one.sources == kernel_digest("x86"):
            assert one.host == Cpu.of(detect_host())
            assert one.default_ratio is not None
            assert one.code != ""
            assert one.default_code != ""
    earlier = [one for one in kept.by_problem[SMALL.artifact_key] if one.sources != kernel_digest("x86")]
    assert sorted(earlier, key=str) == sorted([*old, unknown], key=str)
    again = remeasure(tmp_path, V3.name, jobs=1)
    assert [(one.status, one.best, one.default) for one in again] == [("current", x.best, x.default) for x in found]
    assert list(read(V3.name, tmp_path)) == list(kept)
    # The digest of the text is another, the code of the kernels is not.
    made_earlier = [msgspec.structs.replace(one, sources="older") for one in kept if one.code]
    Log(tmp_path / "earlier").merge(made_earlier)
    renewed = remeasure(tmp_path / "earlier", V3.name, jobs=1)
    assert [one.status for one in renewed] == ["renewed", "renewed"]
    lines = [_timeless(one) for one in read(V3.name, tmp_path / "earlier") if one.sources == kernel_digest("x86")]
    assert lines == [_timeless(one) for one in kept if one.code]
    assert [one.status for one in remeasure(tmp_path / "earlier", V3.name, jobs=1)] == ["current", "current"]


def _timeless(record):
    return msgspec.structs.replace(record, when="").line


CODES = {"default": "d" * 16, "record": "c" * 16}


@pytest.mark.parametrize(
    ("changes", "codes", "status"),
    [
        ({}, CODES, "renewed"),
        ({}, {**CODES, "record": "other"}, "measured"),
        ({}, {**CODES, "default": "other"}, "measured"),
        ({}, {**CODES, "record": ""}, "measured"),
        ({"code": "", "default_code": ""}, CODES, "measured"),
        ({"code": "", "default_code": ""}, {"default": "", "record": ""}, "measured"),
        ({"host": ZEN_0}, CODES, "measured"),
        ({"threads": 2}, CODES, "measured"),
    ],
)
def test_records_of_the_same_code_are_not_measured(changes, codes, status, tmp_path, monkeypatch):
    here = Here(Cpu.of(detect_host()), 1)
    default, other = default_schedule(SMALL, V3), schedules_of(SMALL, 2)[1]
    known = {"host": here.host, "code": CODES["record"], "default_code": CODES["default"]}
    old = record(schedule=other, default_ratio=1.2, **{**known, **changes})
    of_schedule = {default: codes["default"], other: codes["record"]}
    today = Conditions(str(here.host), here.threads, "today")
    evaluator = SimpleNamespace(
        conditions=today,
        log=Log(tmp_path),
        build=lambda _, asked: {one: Built("", "", 1, "", code=of_schedule[one]) for one in asked},
    )
    measured = []
    monkeypatch.setattr("tvm_deconv.tuning.remeasure.decide", lambda _s, _e, schedules: measured.extend(schedules))
    records = Records(V3.name, {SMALL.artifact_key: [old]})
    renewal = Renewal(Search(SMALL, V3, records, today, None), evaluator, here, records)
    assert renewal.run() == status
    assert measured == ([] if status == "renewed" else [default, other])
    same = (old.code, old.default_code) == (codes["record"], codes["default"]) and old.code != ""
    # What another machine measured is as true as before, and says nothing of this one.
    assert [(one.host, one.threads, one.sources) for one in read(V3.name, tmp_path)] == [
        (old.host, old.threads, "today")
    ] * same


def test_records_of_another_machine_took_turns_with_its_own_default(tmp_path):
    """Arithmetic knows that a Zen 5 makes twice the multiply-adds of a Zen 4, and has other defaults for it."""
    problem = Problem(1, 1, 256, 256, (16, 16), (4, 4), (2, 2), (1, 1), (1, 1), (32, 32))
    targets = {name: get("x86-64-v4").on(name) for name in ("zen4", "zen5")}
    defaults = {name: default_schedule(problem, target) for name, target in targets.items()}
    assert defaults["zen4"] != defaults["zen5"]
    here = Here(msgspec.structs.replace(ZEN3, microarchitecture="zen5"), 1)
    known = {"code": CODES["default"], "default_code": CODES["default"], "default_ratio": 1.0}
    zen4 = msgspec.structs.replace(ZEN3, microarchitecture="zen4")
    old = record(problem, target="x86-64-v4", schedule=defaults["zen4"], host=zen4, **known)
    today = Conditions(str(here.host), here.threads, "today")
    of_schedule = {defaults["zen4"]: CODES["default"], defaults["zen5"]: CODES["record"]}
    evaluator = SimpleNamespace(
        conditions=today,
        log=Log(tmp_path),
        build=lambda _, asked: {one: Built("", "", 1, "", code=of_schedule[one]) for one in asked},
    )
    records = Records("x86-64-v4", {problem.artifact_key: [old]})
    search = Search(problem, targets["zen5"], records, today, None)
    renewed = Renewal(search, evaluator, here, records)._renew([old])
    assert renewed
    assert [one.sources for one in read("x86-64-v4", tmp_path)] == ["today"]


@runs_v3
def test_what_an_interrupt_left_is_measured_again(tmp_path):
    here = {"host": Cpu.of(detect_host()), "sources": kernel_digest("x86")}
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
    rest = "measured", (), 1, 1
    assert Remeasured(SMALL.artifact_key, V3.name, best, default, *rest).kept == kept
    assert Remeasured(SMALL.artifact_key, V3.name, None, default, *rest).kept == "default"


def test_a_target_that_cannot_run_here_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(local, "detect_host", lambda: td.targets.Host(frozenset(), "an old CPU"))
    with pytest.raises(td.ProblemError, match="an old CPU cannot run it: it lacks"):
        remeasure(tmp_path, V3.name)
