"""Measuring the records of a log again: what is measured, what is kept, and what is not done twice."""

import msgspec
import pytest
from support.records import OTHER, SMALL, V3, VERDICT, ZEN3, record, runs_v3, schedules_of

from tvm_deconv.compiler.fingerprint import kernel_digest
from tvm_deconv.compiler.records import Conditions, Cpu, Log, Records, Schedule, read
from tvm_deconv.compiler.selection import default_schedule
from tvm_deconv.problem import Problem
from tvm_deconv.targets import Host, detect_host, get
from tvm_deconv.tuning.evaluator import Evaluator
from tvm_deconv.tuning.remeasure import Here, Remeasured, Renewal, remeasure
from tvm_deconv.tuning.runners import local
from tvm_deconv.tuning.runners.local import LocalRunner
from tvm_deconv.tuning.search import Search

ZEN_0 = msgspec.structs.replace(ZEN3, microarchitecture="zen0")


@pytest.mark.usefixtures("searches_here")
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


class Compiling:
    """An evaluator whose compiler says `code(target, schedule)`."""

    def __init__(self, conditions, folder, code):
        self.conditions = conditions
        self.log = Log(folder)
        self._code = code

    def codes(self, search, schedules, target):
        assert target.name == search.target.name
        return {schedule: self._code(target, schedule) for schedule in schedules}


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
    evaluator = Compiling(today, tmp_path, lambda _, one: of_schedule[one])
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
    problem = Problem(1, 1, 512, 256, (128,), (16,), (8,), (1,), (4,), (1024,))
    targets = {name: get("x86-64-v4").on(name) for name in ("zen4", "zen5")}
    defaults = {name: default_schedule(problem, target) for name, target in targets.items()}
    assert defaults["zen4"] != defaults["zen5"]
    here = Here(msgspec.structs.replace(ZEN3, microarchitecture="zen5"), 1)
    known = {"code": CODES["default"], "default_code": CODES["default"], "default_ratio": 1.0}
    zen4 = msgspec.structs.replace(ZEN3, microarchitecture="zen4")
    old = record(problem, target="x86-64-v4", schedule=defaults["zen4"], host=zen4, **known)
    today = Conditions(str(here.host), here.threads, "today")
    of_schedule = {defaults["zen4"]: CODES["default"], defaults["zen5"]: CODES["record"]}
    evaluator = Compiling(today, tmp_path, lambda _, one: of_schedule[one])
    records = Records("x86-64-v4", {problem.artifact_key: [old]})
    search = Search(problem, targets["zen5"], records, today, None)
    renewed = Renewal(search, evaluator, here, records)._renew([old])
    assert renewed
    assert [one.sources for one in read("x86-64-v4", tmp_path)] == ["today"]


def test_records_are_compiled_for_the_machine_that_they_are_of(tmp_path):
    """Servers of Intel have a mesh, for which kernels prefetch: their code is not that of a Zen 5."""
    kinds = ("zen5", "sapphirerapids", "zen4")
    codes = {kind: kind.ljust(16, ".") for kind in kinds}
    of_target = {get("x86-64-v4").on(kind): code for kind, code in codes.items()}
    old = [_of_kind(kind, codes[kind]) for kind in kinds]
    today = Conditions(str(old[0].host), 1, "today")
    evaluator = Compiling(today, tmp_path, lambda target, _: of_target[target])
    records = Records("x86-64-v4", {SMALL.artifact_key: old})
    search = Search(SMALL, get("x86-64-v4").on("zen5"), records, today, None)
    assert Renewal(search, evaluator, Here(old[0].host, 1), records).run() == "renewed"
    renewed = list(read("x86-64-v4", tmp_path))
    assert {one.microarchitecture: one.code for one in renewed} == codes
    assert {one.sources for one in renewed} == {"today"}


def _of_kind(kind, digest, **changes):
    """The record of the default for x86-64-v4 on a kind of machine."""
    default = default_schedule(SMALL, get("x86-64-v4").on(kind))
    known = {"code": digest, "default_code": digest, "default_ratio": 1.0}
    return _on_kind(record(target="x86-64-v4", schedule=default, **{**known, **changes}), kind)


def _on_kind(record, kind):
    return msgspec.structs.replace(record, host=msgspec.structs.replace(ZEN3, microarchitecture=kind))


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ([{}, {}], "renewed"),
        ([{"sources": "today"}, {"sources": "today"}], "current"),
        ([{"sources": "today"}, {}], "renewed"),
        ([{"code": "other"}, {}], "left"),
        ([{"default_code": "other"}, {"sources": "today"}], "left"),
        ([{"code": "", "default_code": ""}], "left"),
        ([{"algorithm": "forgotten"}], "left"),
        ([{"threads": 4}], "renewed"),
    ],
)
def test_nothing_is_measured_for_a_target_that_cannot_run_here(changes, status, tmp_path, monkeypatch):
    monkeypatch.setattr("tvm_deconv.tuning.remeasure.decide", lambda *_: pytest.fail("measured"))
    kinds = ["zen5", "sapphirerapids"][: len(changes)]
    old = [_of_kind(kind, "c" * 16, **change) for kind, change in zip(kinds, changes, strict=True)]
    Log(tmp_path).merge(old)
    here = Here(old[0].host, 1, runs=False)  # a hypervisor hides flags of such a machine
    today = Conditions(str(here.host), 1, "today")
    evaluator = Compiling(today, tmp_path, lambda *_: "c" * 16)
    records = Records("x86-64-v4", {SMALL.artifact_key: old})
    renewal = Renewal(Search(SMALL, get("x86-64-v4").on("zen5"), records, today, None), evaluator, here, records)
    assert renewal.run() == status
    found = renewal.result(status, 1, 1)
    assert (found.status, found.default) == (status, None)
    assert found.best == (None if changes[0].get("algorithm") else old[0])
    kept = {one.microarchitecture: one for one in read("x86-64-v4", tmp_path) if one.sources == "today"}
    same = [one for one in old if one.code == one.default_code == "c" * 16 and one.algorithm != "forgotten"]
    assert sorted(kept) == sorted(one.microarchitecture for one in same)
    assert all(kept[one.microarchitecture].threads == one.threads for one in same)


@pytest.mark.usefixtures("searches_here")
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


@pytest.mark.usefixtures("searches_here")
def test_a_target_that_cannot_run_here_is_compiled_for(tmp_path, monkeypatch):
    """The filter does not stay in caches, and servers of Intel prefetch it in another way than other kinds."""
    problem = Problem(1, 1, 256, 256, (4, 4), (4, 4), (2, 2), (1, 1), (1, 1), (8, 8))
    server = get("x86-64-v4").on("sapphirerapids")
    default = default_schedule(problem, server)
    with LocalRunner(1) as runner, Evaluator(server, runner, Log(tmp_path), seed=0, jobs=1, timeout=1.0) as evaluator:
        search = Search(problem, server, Records(server.name), evaluator.conditions, None)
        (code,) = evaluator.codes(search, [default], server).values()
    old = record(problem, default, target=server.name, code=code, default_code=code, default_ratio=1.0)
    monkeypatch.setattr(local, "detect_host", lambda: Host(frozenset(), "an old CPU"))
    of_kinds = [_on_kind(old, "sapphirerapids"), _on_kind(old, "zen5")]
    Log(tmp_path).merge(of_kinds)
    assert [one.status for one in remeasure(tmp_path, server.name, jobs=1)] == ["left"]
    kept = list(read(server.name, tmp_path))
    assert [one for one in kept if one.sources == old.sources] == of_kinds
    assert [(one.host, one.code) for one in kept if one.sources == kernel_digest("x86")] == [(of_kinds[0].host, code)]
