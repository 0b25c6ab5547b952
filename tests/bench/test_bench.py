"""Comparisons: every contender computes the same, processes take turns, reports say what was measured.

Nothing here depends on how fast anything is.
"""

import ctypes
import dataclasses
import functools
import html.parser
import json
import math
import os
import re
import resource
import time
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from support import artifacts as made

import tvm_deconv as td
from tvm_deconv.bench import figures, floors, page, peers, report, run
from tvm_deconv.bench.layers import DIRECT, Layer, in_type
from tvm_deconv.bench.page import as_html
from tvm_deconv.bench.results import Report, Result, Row
from tvm_deconv.cli import bench
from tvm_deconv.cli import main as cli
from tvm_deconv.compiler import build
from tvm_deconv.compiler.process import WorkerError
from tvm_deconv.compiler.selection import Choice, default_schedule, space
from tvm_deconv.frontends import scan
from tvm_deconv.problem.testing import Deviation, deviation, operands
from tvm_deconv.targets import CPU_TARGETS, Host, native

PLAIN = td.Problem(2, 1, 3, 5, (4, 5), (3, 3), (2, 2), (1, 1), (1, 1), (7, 9))
TASK = peers.Task(PLAIN, 0, Path("/somewhere"), "0123456789abcdef-x86-64-v3")


def test_turn_counts_calls():
    calls = []
    taken = peers.turn(lambda: calls.append(1), 0.001)
    assert len(calls) == taken.calls + 1
    assert peers.turn(lambda: time.sleep(0.01), 0.0).calls == 1


# --- data and comparison ---------------------------------------------------------------------------------------------


def test_deviation():
    expected = np.array([1.0, -2.0, 0.0])
    problem = PLAIN.replace(batch=1)
    assert deviation(problem, np.float32([1, -2, 1e-5]), expected).allowed
    assert not deviation(problem, np.float32([1, -2, 1e-3]), expected).allowed
    assert deviation(problem, np.float32([1, -2, 0.5]), expected).largest == 0.25
    assert not deviation(problem, np.float32([1, -2, math.nan]), expected).allowed
    assert deviation(problem.replace(dtype="float16"), np.float16([1, -2.001, 0]), expected).allowed
    assert not deviation(problem.replace(dtype="float16"), np.float16([1, -2.01, 0]), expected).allowed
    assert not deviation(problem.replace(dtype="float16"), np.float16([1, -2, 1e-3]), expected).allowed
    assert deviation(problem.replace(dtype="float16"), np.float16([1, -2, 1e-3]), expected, fused=False).allowed
    assert not deviation(problem.replace(dtype="int8"), np.int32([1, -2, 1]), expected).allowed


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8", "uint8"])
def test_operands(dtype):
    problem = PLAIN.replace(dtype=dtype, in_channels=200, epilogue=td.Epilogue(bias=True))
    arrays, again = operands(problem, 5), operands(problem, 5)
    assert all(np.array_equal(one, other) for one, other in zip(arrays, again, strict=True))
    assert not np.array_equal(arrays.data, operands(problem, 6).data)
    assert arrays.data.dtype.name == arrays.filter.dtype.name == dtype
    assert (arrays.data.shape, arrays.filter.shape) == (problem.data_shape, problem.filter_shape)
    assert arrays.bias.dtype.name == problem.accumulate_dtype
    sums = td.reference(problem, *arrays)
    assert np.abs(sums).max() < (2**31 if problem.accumulate_dtype == "int32" else 10)


# --- processes -------------------------------------------------------------------------------------------------------


@pytest.fixture
def worker():
    with run.worker(peers.OURS, run.cpus_for(1)) as made:
        yield made


def state(worker):
    return Path(f"/proc/{worker._process.pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_worker_that_waits_is_stopped(worker):
    assert worker.ask("version")
    for _ in range(1000):
        if state(worker) == "T":
            break
        time.sleep(0.01)
    assert state(worker) == "T"
    assert worker.ask("version")


class Steps:
    """A contender that takes so many seconds a call, or dies in a turn."""

    def __init__(self, seconds, allowed=True):
        self.seconds, self.allowed, self.turns = seconds, allowed, 0

    def ask(self, method, *_, **__):
        if method == "prepare":
            return "a note"
        if method == "check":
            return Deviation(0.0, self.allowed)
        self.turns += 1
        if self.seconds is None:
            raise WorkerError("its process ended with signal SIGSEGV", died=True)
        times = tuple(self.seconds * (1 + step / 100) for step in range(101))
        return peers.Turn(self.seconds, 101, 1.0, 0.75, 2, times)


def test_a_race():
    """A peer that dies loses its part alone; one that is far behind another has few turns; ours have all."""
    same = {"default": Steps(9.0), "tvm_deconv": Steps(9.0)}
    workers = same | {
        "fast": Steps(1.0),
        "near": Steps(1.9),
        "far": Steps(2.1),
        "hopeless": Steps(11.0),
        "dead": Steps(None),
    }
    workers["wrong"] = Steps(0.1, allowed=False)
    layer = Layer("up", TASK, "x86-64-v3", dataclasses.replace(TASK, artifact="another"))
    race = run._Race(layer, workers, 1)
    race.prepare()
    race.run(5, 100.0)
    found = race.results()
    assert {name: worker.turns for name, worker in workers.items()} == {
        "default": 5,
        "tvm_deconv": 5,
        "fast": 5,
        "near": 5,
        "far": 3,
        "hopeless": 1,
        "dead": 1,
        "wrong": 5,
    }
    assert list(found) == list(workers)
    assert found["dead"].failure == "its process ended with signal SIGSEGV"
    assert (found["fast"].median, found["fast"].waited, found["fast"].preempted) == (1.0, 0.25, 2.0)
    assert found["fast"].percentiles == pytest.approx((1.05, 1.95))
    assert not found["wrong"].correct
    assert Row(layer, found).best_peer == "fast"


def test_a_race_without_time_ends_after_three_rounds():
    workers = {"default": Steps(1.0), "tvm_deconv": Steps(1.0)}
    race = run._Race(Layer("up", TASK, "x86-64-v3", TASK), workers, 2)
    race.prepare()
    race.run(11, 0.0)
    assert (workers["default"].turns, workers["tvm_deconv"].turns) == (0, 3)
    assert math.isnan(race.results()["tvm_deconv"].waited)


def test_cpus():
    allowed = os.sched_getaffinity(0)
    cpus = run.cpus_for(len(allowed))
    assert set(cpus) == allowed
    assert run.cpus_for(1) == cpus[:1]
    with pytest.raises(td.ProblemError, match=f"threads={len(allowed) + 1}: must be from 1 to {len(allowed)}"):
        run.cpus_for(len(allowed) + 1)


# --- floors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", floors.FMA_DTYPES)
def test_fma(dtype, tmp_path):
    target = native()
    library = floors.build_fma(target, dtype, tmp_path)
    assert floors.fma_per_second(library, 2, steps=10) > 0
    per_step = ctypes.c_long.in_dll(ctypes.CDLL(str(library)), "fmas_per_step").value
    assert per_step == 12 * target.lanes(np.dtype(dtype).itemsize)


def test_every_target_has_a_kernel(tmp_path):
    made = {floors.build_fma(target, "float32", tmp_path) for target in CPU_TARGETS.values()}
    assert len(made) == len(CPU_TARGETS)


def test_copy():
    assert floors.copy_bytes_per_second(1 << 16, 2) > 0
    assert 64 << 20 <= floors.beyond_caches() <= 1 << 30


def test_one_thread_is_timed_by_its_own_clock():
    """What waits has not worked, and does not lower a rate; several threads end together or not."""
    wait = functools.partial(time.sleep, 0.05)
    assert floors._together([wait]) < 0.04
    assert floors._together([wait, wait]) >= 0.05


# --- reports ---------------------------------------------------------------------------------------------------------


def result(median, largest=1e-7, allowed=True, **more):
    more = {"percentiles": (0.8 * median, 1.4 * median)} | more
    return Result(median, (0.9 * median, 1.1 * median), 5, Deviation(largest, allowed), "as it is", **more)


def row(name, same=None, **results):
    """A row of results; `same` is the task if what was chosen is the default."""
    return Row(Layer(name, TASK, "x86-64-v3", same), results)


@pytest.fixture
def comparison():
    """Three layers: twice as fast as the best peer, half as fast, and one where the only peer is wrong.

    The default is slower on the first, the same on the second, and was not built for the third.
    """
    rows = [
        row("fast", default=result(4e-3), tvm_deconv=result(1e-3), onnxruntime=result(2e-3), openvino=result(5e-3)),
        row("a <slow> & wide one", TASK, tvm_deconv=result(4e-3), onnxruntime=result(2e-3), openvino=result(5e-3)),
        row(
            "alone",
            tvm_deconv=result(1e-3),
            onnxruntime=Result(failure="its process ended with -11: it said nothing"),
            openvino=result(1e-6, math.nan, allowed=False),
        ),
    ]
    machine = floors.Floors({"float32": 5e9}, 1e10, "")
    versions = {"default": "0.1.0", "tvm_deconv": "0.1.0", "onnxruntime": "1.2", "openvino": "3"}
    host = Host(frozenset(), "a CPU", 2, 4, "its vendor", 25, 1, 2)
    return Report(host, "zen3", 1, (0,), 5, machine, versions, rows)


def test_ratios(comparison):
    assert [row.best_peer for row in comparison.rows] == ["onnxruntime", "onnxruntime", None]
    assert [row.ratio for row in comparison.rows] == [2.0, 0.5, None]
    assert [row.default_ratio for row in comparison.rows] == [0.5, 0.5, None]
    assert comparison.chosen.mean == pytest.approx(1.0)
    assert comparison.default.mean == pytest.approx(0.5)
    assert (comparison.chosen.worst.layer.name, comparison.chosen.least) == ("a <slow> & wide one", 0.5)
    assert comparison.rows[0].ours.spread == pytest.approx(0.1)
    assert comparison.rows[2].default is None
    assert dataclasses.replace(comparison, rows=comparison.rows[2:]).chosen is None


def test_rates_and_floors(comparison):
    first = comparison.rows[0]
    assert report.rates(first, first.ours) == pytest.approx((2e-6 * PLAIN.macs, 1e-6 * PLAIN.min_bytes))
    assert comparison.floors.seconds(PLAIN) == {"fma": PLAIN.macs / 5e9, "copy": PLAIN.min_bytes / 1e10}
    assert comparison.floors.seconds(PLAIN.replace(dtype="int8")).keys() == {"copy"}
    assert report.shares(comparison, first, first.ours)["fma"] == pytest.approx(PLAIN.macs / 5e6)


def test_summary(comparison):
    said = report.summary(comparison)
    for line in (
        "a CPU (zen3; its vendor, family 25, model 1, stepping 2), threads: 1, tvm_deconv 0.1.0, onnxruntime 1.2, "
        "openvino 3",
        "Measured here: 10 GFLOP/s float32, 10.0 GB/s copied.",
        "Time of the best peer by ours, default: geometric mean 0.50, worst 0.50 (fast, against onnxruntime).",
        "Time of the best peer by ours, chosen: geometric mean 1.00, worst 0.50 "
        "(a <slow> & wide one, against onnxruntime).",
        "onnxruntime: its process ended with -11: it said nothing: alone",
        "openvino: its output differs from the reference by nan of the largest element: alone",
    ):
        assert line in said.splitlines()


def test_a_quiet_machine(comparison):
    quiet = [row("a", tvm_deconv=dataclasses.replace(result(1e-3), quartiles=(0.99e-3, 1.01e-3), waited=0.01))]
    report_of_it = dataclasses.replace(comparison, rows=quiet, stolen=0.001)
    assert report_of_it.complaints == []
    assert "The machine was quiet: median spread 1.0 %, stolen 0.1 %." in report.summary(report_of_it)


@pytest.mark.parametrize(
    ("stolen", "changes", "said"),
    [
        (0.02, {}, "the hypervisor took 2.0 % of the CPUs"),
        (0.0, {"waited": 0.2}, "contenders waited for a CPU 20 % of their turns"),
        (0.0, {"preempted": 90.0}, "contenders lost their CPU 90 times a second"),
        (0.0, {"quartiles": (0.9e-3, 1.1e-3)}, "half of the results have a spread above 10 %"),
    ],
)
def test_a_noisy_machine(stolen, changes, said, comparison):
    quiet = dataclasses.replace(result(1e-3), quartiles=(0.99e-3, 1.01e-3), waited=0.01, preempted=1.0)
    rows = [row("a", tvm_deconv=dataclasses.replace(quiet, **changes))]
    disturbed = dataclasses.replace(comparison, rows=rows, stolen=stolen)
    assert disturbed.complaints == [said]
    assert f"The machine was noisy: {said}." in report.summary(disturbed)
    assert report.as_json(disturbed)["noisy"] == [said]


def test_stolen_time(tmp_path):
    stat = tmp_path / "stat"
    stat.write_text("cpu  9 9 9 9 9 9 9 9 9 9\ncpu0 10 0 5 80 0 0 0 5 3 0\ncpu1 1 0 0 0 0 0 0 99 0 0\n")
    assert run.cpu_times((0,), stat) == (5, 100)
    assert run.cpu_times((0, 1), stat) == (104, 200)
    assert run.stolen_share((5, 100), (7, 300)) == 0.01
    assert run.cpu_times(run.cpus_for(1))[1] > 0


def test_json(comparison):
    found = json.loads(json.dumps(report.as_json(comparison), allow_nan=False))
    assert found["chosen"] == {"geometric_mean": pytest.approx(1.0), "worst": "a <slow> & wide one", "least": 0.5}
    first, second, last = found["layers"]
    assert first["problem"] == PLAIN.key
    assert first["results"]["tvm_deconv"]["seconds"] == 1e-3
    assert first["results"]["tvm_deconv"]["of_floors"]["copy"] == pytest.approx(PLAIN.min_bytes / 1e7)
    assert [layer["default_is_chosen"] for layer in (first, second, last)] == [False, True, None]
    assert last["results"]["onnxruntime"] == {"failure": "its process ended with -11: it said nothing"}
    assert last["results"]["openvino"]["deviation"] is None
    assert last["ratio"] is None


def test_json_is_read_again(comparison):
    written = json.dumps(report.as_json(comparison))
    again = report.from_json(json.loads(written))
    assert json.dumps(report.as_json(again)) == written
    assert report.summary(again) == report.summary(comparison)
    older = json.loads(written)
    for layer in older["layers"]:
        for result in layer["results"].values():
            result.pop("percentiles", None)
    old = report.from_json(older)
    for read, titles in ((again, 1), (old, 0)):
        columns = report.columns(read, keys=True)
        assert [column.title for column in columns].count("p5 to p95, ms") == titles
        assert {len(report.cells(read, row, keys=True)) for row in read.rows} == {len(columns)}
    assert "0.8 to 1.4" in report.cells(again, again.rows[0])
    with pytest.raises(ValueError, match="format=1: must be 2"):
        report.from_json({"format": 1})


class Page(html.parser.HTMLParser):
    """The tags of a page, each of which must be closed, and its text."""

    def __init__(self):
        super().__init__()
        self.open, self.seen, self.text = [], [], []

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def test_page(comparison):
    """Nothing comes from elsewhere, every tag is closed, and names are text, in tables and in charts."""
    text = as_html(comparison, dataclasses.replace(comparison, microarchitecture="zen4"))
    parsed = Page()
    parsed.feed(text)
    assert not parsed.open
    assert not {"link", "img", "iframe"} & {tag for tag, _ in parsed.seen}
    links = [value for _, attributes in parsed.seen for name, value in attributes.items() if name in ("src", "href")]
    assert links == ["#0", "#1"]
    assert {attributes["id"] for tag, attributes in parsed.seen if tag == "h2"} == {"0", "1"}
    assert "<slow>" not in text
    said = "".join(parsed.text)
    for word in (
        f"zen3, {comparison.rows[0].layer.target}, NCX, threads: 1",
        f"zen4, {comparison.rows[0].layer.target}, NCX, threads: 1",
        "geometric mean of ratios",
        "a <slow> & wide one",
        "openvino: its output differs",
    ):
        assert word in said
    assert text.count("Plotly.newPlot(") >= 4


def test_charts(comparison):
    default, chosen = page._ratios(comparison).data
    assert (default.name, list(default.x)) == ("default", [0.5, 0.5])
    assert list(chosen.x) == [0.5, 2.0]
    assert [round(place) for place in (*default.y, *chosen.y)] == [0, 1, 0, 1]
    axis = page._ratios(comparison).layout.yaxis
    assert list(zip(axis.tickvals, axis.ticktext, strict=True)) == [(0, "a &lt;slow&gt; &amp; wide one"), (1, "fast")]
    # From the peer's quartiles by ours, 0.9 and 1.1 of the medians.
    assert list(chosen.error_x.array) == pytest.approx([0.5 * 1.1 / 0.9 - 0.5, 2 * 1.1 / 0.9 - 2])
    assert list(chosen.error_x.arrayminus) == pytest.approx([0.5 - 0.5 * 0.9 / 1.1, 2 - 2 * 0.9 / 1.1])
    roof, peers_points, ours = page._roofline(comparison, comparison.rows).data
    assert roof.name == "float32: 10 GFLOP/s"
    assert max(roof.y) == 10.0
    assert len(peers_points.x) == 2
    assert list(ours.y) == pytest.approx([2e-9 * PLAIN.macs / seconds for seconds in (1e-3, 4e-3, 1e-3)])
    assert list(ours.text) == ["1", "2", "3"]
    assert [f"<small>{number}</small> fast" in page._table(comparison) for number in (1, 2)] == [True, False]


def test_a_ratio_far_from_all_others_is_an_arrow(comparison, monkeypatch):
    monkeypatch.setattr(page, "_FARTHEST", 1.5)
    _, chosen = page._ratios(comparison).data
    assert list(chosen.x) == pytest.approx([1 / 1.5, 1.5])
    assert list(chosen.text) == ["0.5 ", "2.0 "]
    assert list(chosen.error_x.array) == [0, 0]


def test_times_have_no_exponents():
    texts = {1.64: "1640", 55.6: "55600", 0.1234: "123", 0.01234: "12.3", 4.46e-05: "0.0446"}
    assert {seconds: report.milliseconds(seconds) for seconds in texts} == texts


def test_page_without_measurements(comparison):
    rows = [row("none", **dict.fromkeys(comparison.versions, Result(failure="no")))]
    assert "Nothing was measured." in as_html(dataclasses.replace(comparison, rows=rows))


# --- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def quick():
    """The command with turns of no length on small copies."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "TURN_SECONDS", 0.0)
        patch.setattr(run, "beyond_caches", lambda: 1 << 20)

        def command(*arguments):
            return CliRunner(env={"COLUMNS": None}).invoke(cli.main, ["bench", *map(str, arguments)])

        yield command


def test_bench_of_artifacts(quick, artifacts, tmp_path):
    files = ["--json", tmp_path / "report.json", "--html", tmp_path / "report.html"]
    done = quick(artifacts, "--threads", 1, "--rounds", 2, *files)
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "report.json").read_text())
    assert len(found["layers"]) == len(made.PROBLEMS)
    assert all(layer["results"]["tvm_deconv"]["correct"] for layer in found["layers"])
    assert found["threads"] == 1
    assert len(found["cpus"]) == 1
    assert "Roofline" in (tmp_path / "report.html").read_text()
    for said in ("GFLOP/s", "% FMA", "% copy", "p5 to p95, ms"):
        assert said in done.stdout
    assert "Measured here:" in done.stderr


@pytest.mark.usefixtures("compiles_here")
def test_bench_of_a_source_with_peers(quick, tmp_path):
    source = tmp_path / "problems.json"
    source.write_text(json.dumps([{"name": "up", "data": [1, 4, 5, 6], "filter": [1, 4, 3, 3, 3], "strides": [2, 2]}]))
    options = ["--peers", "onnxruntime,openvino", "--rounds", 2, "--output", tmp_path / "made"]
    done = quick(source, *options, "--json", tmp_path / "report.json")
    assert done.exit_code == 0, done.output
    (layer,) = json.loads((tmp_path / "report.json").read_text())["layers"]
    assert layer["name"] == "up"
    assert [result["correct"] for result in layer["results"].values()] == [True] * 3
    assert layer["best_peer"] in ("onnxruntime", "openvino")
    assert re.search(r"chosen: geometric mean \d+\.\d\d, worst", done.stderr)
    assert len(td.load(tmp_path / "made").manifests) == 1


UP = {"data": [1, 16, 9, 9], "filter": [1, 16, 16, 4, 4], "strides": [2, 2]}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Three layers: two of one model, and one of another."""
    path = tmp_path_factory.mktemp("source") / "problems.json"
    small, other = UP | {"data": [1, 16, 3, 3]}, UP | {"strides": [1, 1]}
    path.write_text(json.dumps([UP | {"name": "up.1"}, small | {"name": "up.2"}, other | {"name": "other"}]))
    return path


@pytest.mark.usefixtures("compiles_here")
def test_default_and_chosen(quick, source, monkeypatch, tmp_path):
    """What a log chooses is timed beside the default; where both are the same there is one result."""
    first, second = (layer.problem.replace(data_format="NXC") for layer in scan(source)[:2])
    default = default_schedule(first, native())
    other = next(candidate.schedule for candidate in space(first, native()) if candidate.schedule != default)

    def choices(problem, _, records, *__):
        if problem == first and records.by_problem:
            yield Choice(other, "tuned", "a record")
        yield Choice(None, "default", "the default")

    monkeypatch.setattr(build, "choices_for", choices)
    options = [
        "--layers",
        r"^up\.",
        "--layout",
        "NXC",
        "--seconds",
        0,
        "--threads",
        1,
        "--figures",
        tmp_path / "figures",
    ]
    done = quick(source, *options, "--output", tmp_path / "made", "--json", tmp_path / "report.json")
    assert done.exit_code == 0, done.output
    found = {layer["name"]: layer for layer in json.loads((tmp_path / "report.json").read_text())["layers"]}
    assert {name: layer["problem"] for name, layer in found.items()} == {"up.1": first.key, "up.2": second.key}
    assert [layer["default_is_chosen"] for layer in found.values()] == [False, True]
    assert [layer["results"].keys() for layer in found.values()] == [{"default", "tvm_deconv"}, {"tvm_deconv"}]
    assert found["up.1"]["results"]["tvm_deconv"]["note"] == other.algorithm
    assert found["up.1"]["results"]["default"]["note"] == default.algorithm
    assert all(result["turns"] == 3 for layer in found.values() for result in layer["results"].values())
    assert "default ms" in done.stdout
    (manifest,) = td.load(tmp_path / "made" / "default").manifests
    assert manifest.knobs == dict(default.knobs)
    (kept,) = (tmp_path / "figures").iterdir()
    assert re.fullmatch(rf"\w+-{native().name}-nxc-1\.json", kept.name)
    assert [row.layer.name for row in figures.read(kept.parent)[kept.stem].rows] == ["up.1", "up.2"]


@pytest.mark.usefixtures("compiles_here")
def test_types(quick, source, tmp_path):
    """Each layer in each type, which its name says; figures of one type only, which the name of their file says."""
    options = ["--layers", "up.1", "--seconds", 0, "--threads", 1, "--output", tmp_path / "made"]
    done = quick(source, *options, "--types", "int8,bfloat16", "--json", tmp_path / "report.json")
    assert done.exit_code == 0, done.output
    found = {layer["name"]: layer["problem"] for layer in json.loads((tmp_path / "report.json").read_text())["layers"]}
    first = scan(source)[0].problem
    assert found == {f"up.1 {dtype}": first.replace(dtype=dtype).key for dtype in ("int8", "bfloat16")}
    done = quick(source, *options, "--types", "bfloat16", "--figures", tmp_path / "figures")
    assert done.exit_code == 0, done.output
    (kept,) = (tmp_path / "figures").iterdir()
    assert re.fullmatch(rf"\w+-{native().name}-ncx-bfloat16-1\.json", kept.name)
    reports = figures.read(kept.parent)
    assert "`N C *X`, bfloat16" in figures.ratios([*reports.values()])
    assert figures.machines(reports).count("\n") == 1, "a report without peers has no line"


@pytest.mark.usefixtures("compiles_here")
def test_quantized_types_beside_peers_and_float32(quick, source, tmp_path):
    """Layers of other types are compared with themselves in float32, by direct kernels; that is no peer."""
    kind = "uint8.int8.uint8"
    options = ["--layers", "up.1", "--seconds", 0, "--threads", 1, "--types", kind, "--peers", "onnxruntime"]
    done = quick(source, *options, "--json", tmp_path / "report.json", "--figures", tmp_path / "figures")
    assert done.exit_code == 0, done.output
    (layer,) = json.loads((tmp_path / "report.json").read_text())["layers"]
    quantization = td.Quantization("int8", "uint8")
    assert layer["problem"] == scan(source)[0].problem.replace(dtype="uint8", quantization=quantization).key
    assert layer["results"].keys() == {"tvm_deconv", "float32", "onnxruntime"}
    assert all(result["correct"] for result in layer["results"].values())
    assert layer["results"]["float32"]["note"] in DIRECT
    assert layer["best_peer"] == "onnxruntime"
    times = [layer["results"][name]["seconds"] for name in ("float32", "tvm_deconv")]
    assert layer["single_ratio"] == pytest.approx(times[0] / times[1])
    assert "of float32" in done.stdout
    (kept,) = (tmp_path / "figures").iterdir()
    assert kept.name.endswith(f"-ncx-{kind}-1.json")
    (row,) = figures.read(kept.parent)[kept.stem].rows
    assert row.single_ratio == pytest.approx(layer["single_ratio"], rel=1e-2)


def test_types_of_integers_leave_out_other_activations():
    problem = td.Problem(1, 1, 3, 2, (6,), (2,), (2,), (1,), (0,), (12,), epilogue=td.Epilogue(True, "sigmoid"))
    assert in_type(problem, "int8").epilogue == td.Epilogue(True)
    assert in_type(problem, "bfloat16").epilogue == problem.epilogue
    assert in_type(problem.replace(precision="tf32"), "float16").precision == "ieee"


def test_figures_of_a_mixture_are_refused_before_the_run(quick, artifacts, tmp_path):
    done = quick(artifacts, "--figures", tmp_path / "figures")
    assert done.exit_code == 1
    assert "must be of one target, one layout and one type" in done.stderr
    assert not (tmp_path / "figures").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--layers", "("], "( is not a regular expression: "),
        (["--layers", "nothing like it"], "must hold a layer that this machine can run and that matches --layers"),
        (["--layout", "XNC"], "'XNC' is not one of 'NCX', 'NXC'"),
        (["--types", "float32,half"], "half is not one of float32, float64, float16, bfloat16, int8"),
        (["--types", "float32.int8.uint8"], "float32.int8.uint8 is not one of"),
        (["--types", "uint8.int8"], "quantization='int8': must be the types of filter and output, such as int8.uint8"),
        (["--target", "x86-64-v9"], "'x86-64-v9': must be one of"),
        (
            ["--peers", "onnx"],
            "onnx is not one of onnxruntime, openvino, torch, torch-channels-last, mnn, ncnn",
        ),
    ],
)
def test_options_that_are_refused(quick, source, options, said):
    done = quick(source, *options)
    assert done.exit_code in (1, 2)
    assert said in " ".join(done.stderr.split())


def test_bench_without_a_compiler(quick, artifacts, monkeypatch):
    monkeypatch.setenv("CXX", "/nowhere/g++")
    done = quick(artifacts, "--threads", 1, "--rounds", 1)
    assert done.exit_code == 0, done.output
    assert "no rate of multiply-adds: CXX='/nowhere/g++': no such program" in done.stderr


@pytest.fixture
def reported(quick, comparison, monkeypatch):
    """The command in which files may not grow beyond 100 bytes, as on a full disk, from when all is measured."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def measure(*_):
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
        return comparison

    monkeypatch.setattr(bench, "_layers", lambda *_, **__: [one.layer for one in comparison.rows])
    monkeypatch.setattr(bench, "_measure", measure)
    yield lambda *options: quick("x.json", *options)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("old", [b"old", None])
@pytest.mark.parametrize("option", ["--json", "--html", "--figures"])
def test_a_report_that_there_is_no_room_for(option, old, reported, tmp_path):
    path = tmp_path / "zen3-x86-64-v3-ncx-1.json"
    if old:
        path.write_bytes(old)
    done = reported(option, tmp_path if option == "--figures" else path)
    assert done.exit_code == 1
    assert done.stderr.splitlines()[-1] == f"Error: {path}: File too large"
    assert [found.read_bytes() for found in tmp_path.iterdir()] == ([old] if old else [])


@pytest.mark.parametrize("option", ["--json", "--html"])
def test_a_report_to_a_device(option, reported):
    assert reported(option, "/dev/null").exit_code == 0
    done = reported(option, "/dev/full")
    assert done.exit_code == 1
    assert done.stderr.splitlines()[-1] == "Error: /dev/full: No space left on device"


def test_bench_of_what_is_broken(quick, artifacts, tmp_path):
    for path in artifacts.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    made.file(tmp_path, made.PLAIN, ".so").write_bytes(b"")
    done = quick(tmp_path, "--threads", 1, "--rounds", 1)
    assert done.exit_code == 1
    name = made.file(tmp_path, made.PLAIN, "").name
    assert done.stderr.endswith(f"Error: these layers failed or are wrong: {name}\n")
    assert "IntegrityError: size=0" in done.stderr
