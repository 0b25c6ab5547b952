"""Comparisons: every contender computes the same, processes take turns, reports say what was measured.

Nothing here depends on how fast anything is.
"""

import contextlib
import ctypes
import dataclasses
import functools
import html.parser
import json
import math
import os
import re
import time
import xml.etree.ElementTree
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from support import artifacts as made

import tvm_deconv as td
from tvm_deconv.bench import floors, peers, report, run
from tvm_deconv.cli import main as cli
from tvm_deconv.compiler.process import WorkerError
from tvm_deconv.problem import ACTIVATIONS
from tvm_deconv.problem.testing import Deviation, deviation, operands
from tvm_deconv.targets import CPU_TARGETS, Host, native

PLAIN = td.Problem(2, 1, 3, 5, (4, 5), (3, 3), (2, 2), (1, 1), (1, 1), (7, 9))
#: What packages express differently: groups, layouts, ranks, and outputs that are cut or extended at either end.
PROBLEMS = {
    "plain": PLAIN,
    "grouped": PLAIN.replace(groups=3, in_channels=2, out_channels=4, epilogue=td.Epilogue(bias=True)),
    "depthwise": PLAIN.replace(groups=8, in_channels=1, out_channels=1),
    "channels last": PLAIN.replace(data_format="NXC", filter_format="XIO", epilogue=td.Epilogue(bias=True)),
    "one axis": td.Problem(1, 1, 4, 3, (9,), (6,), (3,), (1,), (2,), (27,)),
    "three axes": td.Problem(1, 1, 2, 3, (2, 3, 4), (3, 3, 3), (2, 2, 2), (1, 1, 1), (1, 1, 1), (4, 6, 8)),
    "dilated": PLAIN.replace(dilations=(2, 3), output_spatial=(9, 13)),
    "cut at the end": PLAIN.replace(pads_begin=(0, 0), output_spatial=(6, 7)),
    "cut at the begin": PLAIN.replace(pads_begin=(2, 1), output_spatial=(7, 10)),
    "longer": PLAIN.replace(output_spatial=(8, 10)),
    "longer than all": PLAIN.replace(pads_begin=(0, 0), output_spatial=(10, 12)),
    "same": PLAIN.replace(kernel=(4, 5), pads_begin=(1, 1), output_spatial=(8, 10)),
    "packs": PLAIN.replace(in_channels=16, out_channels=24, epilogue=td.Epilogue(True, "relu")),
    "float64": PLAIN.replace(dtype="float64"),
    "bfloat16": PLAIN.replace(dtype="bfloat16", epilogue=td.Epilogue(bias=True)),
}
#: What the packages leave out: peer, the problems, what is said.
REFUSED = [
    ("onnxruntime", lambda p: p.dtype in ("float64", "bfloat16"), "NOT_IMPLEMENTED|INVALID_GRAPH"),
    ("openvino", lambda p: p.dtype == "float64", "it computes float64 in float32"),
    ("openvino", lambda p: p.dtype == "bfloat16", "Unsupported"),
    ("torch-channels-last", lambda p: p.rank == 1, "no channels-last memory for one axis"),
    ("mnn|ncnn|litert", lambda p: p.dtype != "float32", "no transposed convolution of (float64|bfloat16), or one in"),
    ("litert", lambda p: p.data_format == "NCX", r"it computes N \*X C alone"),
    ("mnn|litert", lambda p: p.rank == 3, "no transposed convolution of three axes"),
    ("litert", lambda p: p.groups > 1, "no groups"),
    ("litert", lambda p: p.dilations == (2, 3), "no dilations"),
]
NO_ACTIVATION = {"mnn": ("gelu", "mish"), "litert": ("elu", "mish", "softplus")}


def refusal_of(name, problem):
    """What a peer says about a problem that it does not compute; None if it does."""
    return next((said for peer, holds, said in REFUSED if re.fullmatch(peer, name) and holds(problem)), None)


def unavailable(name):
    """Why a peer cannot be tested here: the packages that it lacks."""
    missing = peers.PEERS[name].missing
    return f"not installed: {', '.join(missing)}" if missing else ""


@pytest.fixture(scope="module")
def contender():
    """A function from a name to the process of that contender, each of which is started once."""
    with contextlib.ExitStack() as stack:

        @functools.cache
        def of(name):
            return stack.enter_context(run.worker(name, run.cpus_for(1)))

        yield of


def compare(worker, problem, folder, root=Path(), artifact=""):
    """The deviation of a contender's output from the reference."""
    worker.ask("prepare", peers.Task(problem, 3, root, artifact))
    np.save(folder / "expected.npy", td.reference(problem, *operands(problem, 3)))
    return worker.ask("check", folder / "expected.npy")


@pytest.mark.parametrize("layout", ["NCX", "NXC"])
@pytest.mark.parametrize("case", PROBLEMS)
@pytest.mark.parametrize("name", peers.PEERS)
def test_peers_compute_the_same(name, case, layout, contender, tmp_path):
    if unavailable(name):
        pytest.skip(unavailable(name))
    problem = PROBLEMS[case].replace(data_format=layout)
    refusal = refusal_of(name, problem)
    if refusal is not None:
        with pytest.raises(WorkerError, match=refusal):
            compare(contender(name), problem, tmp_path)
    else:
        assert compare(contender(name), problem, tmp_path).allowed


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("name", peers.PEERS)
def test_peers_have_the_epilogue(name, activation, contender, tmp_path):
    if unavailable(name):
        pytest.skip(unavailable(name))
    epilogue = td.Epilogue(True, activation, alpha=0.3, minimum=-0.4, maximum=0.7)
    problem = PLAIN.replace(epilogue=epilogue, data_format="NXC")
    if activation in NO_ACTIVATION.get(name, ()):
        with pytest.raises(WorkerError, match=f"no .*{activation}"):
            compare(contender(name), problem, tmp_path)
    else:
        assert compare(contender(name), problem, tmp_path).allowed


@pytest.mark.parametrize("name", ["openvino", "mnn", "ncnn", "litert", "torch"])
def test_what_peers_do_not_have(name, contender, tmp_path):
    if unavailable(name):
        pytest.skip(unavailable(name))
    with pytest.raises(WorkerError, match=r"^no transposed convolution of int8"):
        compare(contender(name), PLAIN.replace(dtype="int8"), tmp_path)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("torch", "output_padding would have to be 3 on axis 0 and may be at most 1"),
        ("litert", "no output that is 3 longer for the stride 2"),
    ],
)
def test_outputs_extend_by_less_than_a_stride(name, said, contender, tmp_path):
    if unavailable(name):
        pytest.skip(unavailable(name))
    problem = PLAIN.replace(pads_begin=(0, 0), output_spatial=(12, 11), data_format="NXC")
    with pytest.raises(WorkerError, match=f"^{said}"):
        compare(contender(name), problem, tmp_path)


def test_ours(artifacts, contender, tmp_path):
    name = made.file(artifacts, made.PLAIN, "").name
    assert compare(contender(peers.OURS), made.PLAIN, tmp_path, artifacts, name).allowed


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


# --- reports ---------------------------------------------------------------------------------------------------------


def result(median, largest=1e-7, allowed=True):
    return run.Result(median, (0.9 * median, 1.1 * median), 5, Deviation(largest, allowed), "as it is")


def row(name, **results):
    task = peers.Task(PLAIN, 0, Path("/somewhere"), "0123456789abcdef-x86-64-v3")
    return run.Row(run.Layer(name, task, "x86-64-v3"), results)


@pytest.fixture
def comparison():
    """Three layers: twice as fast as the best peer, half as fast, and one where the only peer is wrong."""
    rows = [
        row("fast", tvm_deconv=result(1e-3), onnxruntime=result(2e-3), openvino=result(5e-3)),
        row("a <slow> & wide one", tvm_deconv=result(4e-3), onnxruntime=result(2e-3), openvino=result(5e-3)),
        row(
            "alone",
            tvm_deconv=result(1e-3),
            onnxruntime=run.Result(failure="its process ended with -11: it said nothing"),
            openvino=result(1e-6, math.nan, allowed=False),
        ),
    ]
    machine = floors.Floors({"float32": 5e9}, 1e10, "")
    versions = {"tvm_deconv": "0.1.0", "onnxruntime": "1.2", "openvino": "3"}
    return run.Report(Host(frozenset(), "a CPU", 2, 4), 1, (0,), 5, machine, versions, rows)


def test_ratios(comparison):
    assert [row.best_peer for row in comparison.rows] == ["onnxruntime", "onnxruntime", None]
    assert [row.ratio for row in comparison.rows] == [2.0, 0.5, None]
    assert comparison.geometric_mean == pytest.approx(1.0)
    assert comparison.worst.layer.name == "a <slow> & wide one"
    assert comparison.rows[0].ours.spread == pytest.approx(0.1)


def test_rates_and_floors(comparison):
    first = comparison.rows[0]
    assert report.rates(first, first.ours) == pytest.approx((2e-6 * PLAIN.macs, 1e-6 * PLAIN.min_bytes))
    assert comparison.floors.seconds(PLAIN) == {"fma": PLAIN.macs / 5e9, "copy": PLAIN.min_bytes / 1e10}
    assert comparison.floors.seconds(PLAIN.replace(dtype="int8")).keys() == {"copy"}
    assert report.shares(comparison, first, first.ours)["fma"] == pytest.approx(PLAIN.macs / 5e6)


def test_summary(comparison):
    said = report.summary(comparison)
    for line in (
        "a CPU, threads: 1, tvm_deconv 0.1.0, onnxruntime 1.2, openvino 3",
        "Measured here: 10 GFLOP/s float32, 10.0 GB/s copied.",
        "Ratio: time of the best peer by ours. Geometric mean 1.00.",
        "Worst layer: a <slow> & wide one at 0.50, against onnxruntime.",
        "alone: onnxruntime: its process ended with -11: it said nothing",
        "alone: openvino: its output differs from the reference by nan of the largest element",
    ):
        assert line in said.splitlines()


def test_json(comparison):
    found = json.loads(json.dumps(report.as_json(comparison), allow_nan=False))
    assert found["geometric_mean"] == pytest.approx(1.0)
    assert found["worst"] == "a <slow> & wide one"
    first, _, last = found["layers"]
    assert first["problem"] == PLAIN.key
    assert first["results"]["tvm_deconv"]["seconds"] == 1e-3
    assert first["results"]["tvm_deconv"]["of_floors"]["copy"] == pytest.approx(PLAIN.min_bytes / 1e7)
    assert last["results"]["onnxruntime"] == {"failure": "its process ended with -11: it said nothing"}
    assert last["results"]["openvino"]["deviation"] is None
    assert last["ratio"] is None


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


def test_html(comparison):
    text = report.as_html(comparison)
    page = Page()
    page.feed(text)
    assert not page.open
    tags = [tag for tag, _ in page.seen]
    assert not {"script", "link", "img", "iframe"} & set(tags)
    assert not [value for _, attributes in page.seen for value in attributes.values() if "//" in (value or "")]
    assert "url(" not in text
    roofline, bars = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    # One mark for everything that was measured, with its figures as a tooltip.
    assert len(xml.etree.ElementTree.fromstring(roofline).findall(".//circle/title")) == 8
    assert len(xml.etree.ElementTree.fromstring(bars).findall(".//rect/title")) == 8
    said = "".join(page.text)
    for word in ("a <slow> & wide one", "its process ended with -11", "openvino: its output differs", PLAIN.key):
        assert word in said
    numbers = [float(number) for number in re.findall(r'(?:cx|cy|x|y|width)="(-?[\d.]+)"', roofline + bars)]
    assert all(-1 <= number <= 2000 for number in numbers)


def test_html_without_measurements(comparison):
    rows = [row("none", **dict.fromkeys(comparison.versions, run.Result(failure="no")))]
    text = report.as_html(dataclasses.replace(comparison, rows=rows))
    assert "Nothing was measured." in text


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
    for said in ("GFLOP/s", "% FMA", "% copy", "Measured here:"):
        assert said in done.stdout


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
    assert re.search(r"Geometric mean \d+\.\d\d\.", done.stdout)
    assert len(td.load(tmp_path / "made").manifests) == 1


def test_bench_without_a_compiler(quick, artifacts, monkeypatch):
    monkeypatch.setenv("CXX", "/nowhere/g++")
    done = quick(artifacts, "--threads", 1, "--rounds", 1)
    assert done.exit_code == 0, done.output
    assert "no rate of multiply-adds: CXX='/nowhere/g++': no such program" in done.stdout


def test_bench_of_what_is_broken(quick, artifacts, tmp_path):
    for path in artifacts.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    made.file(tmp_path, made.PLAIN, ".so").write_bytes(b"")
    done = quick(tmp_path, "--threads", 1, "--rounds", 1)
    assert done.exit_code == 1
    name = made.file(tmp_path, made.PLAIN, "").name
    assert done.stderr == f"Error: these layers failed or are wrong: {name}\n"
    assert "IntegrityError: size=0" in done.stdout
