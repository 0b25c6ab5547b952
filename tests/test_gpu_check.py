"""scripts/gpu-check as far as it goes without a device: its problems, its arithmetic, its run with what CPUs have."""

import contextlib
import importlib.util
import json
import sys
import types
from importlib.machinery import SourceFileLoader
from pathlib import Path

import pytest

import tvm_deconv as td
from tvm_deconv.manifest import Accepted
from tvm_deconv.reference import reference
from tvm_deconv.scan import scan
from tvm_deconv.schedules.cuda import algorithm_for

torch = pytest.importorskip("torch")
ROOT = Path(__file__).parents[1]


class Event:
    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        pass

    def synchronize(self):
        pass

    def elapsed_time(self, end):
        assert isinstance(end, Event)
        return 2.0


class Stream:
    def synchronize(self):
        pass

    def wait_stream(self, other):
        assert isinstance(other, Stream)


class Graph:
    def replay(self):
        pass


@pytest.fixture
def script(monkeypatch):
    """The script as a module, whose device is the CPU."""
    path = ROOT / "scripts" / "gpu-check"
    spec = importlib.util.spec_from_loader("gpu_check", SourceFileLoader("gpu_check", str(path)))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(sys, "path", [*sys.path])
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.torch, module.DEVICE = torch, "cpu"
    cuda = types.SimpleNamespace(
        Event=Event,
        Stream=Stream,
        CUDAGraph=Graph,
        current_stream=Stream,
        stream=lambda _: contextlib.nullcontext(),
        graph=lambda graph, stream: contextlib.nullcontext((graph, stream)),
        is_available=lambda: True,
        get_device_name=lambda: "none",
    )
    monkeypatch.setattr(torch, "cuda", cuda)
    monkeypatch.setattr(module, "cuda_capability", lambda: (9, 0))
    return module


def test_the_layers_are_those_of_the_list(script):
    found = script.layers()
    wanted = [(layer.name, layer.problem) for layer in scan(ROOT / "examples" / "layers.json")]
    for number, (kind, data_format) in enumerate(script.SETTINGS):
        part = found[number * len(wanted) : (number + 1) * len(wanted)]
        assert part == [(name, script.of_type(problem, kind, data_format)) for name, problem in wanted]
        assert {script.kind_of(problem) for _, problem in part} == {kind}


def test_every_family_is_checked_in_every_way(script):
    found = {(algorithm_for(p).name, script.kind_of(p), p.data_format) for p in script.small_problems()}
    for data_format in ("NCX", "NXC"):
        for kind in script.TOLERANCES:
            assert ("cuda_generic", kind, data_format) in found
            assert ("cuda_narrow", kind, data_format) in found
            tensor = kind in ("float16", "bfloat16", "tf32")
            assert ("cuda_tensor" if tensor else "cuda_product", kind, data_format) in found


def test_float64_is_right(script):
    for problem in script.small_problems()[::5]:
        data, filter, bias = script.operands(problem)
        arrays = [None if a is None else a.double().numpy() for a in (data, filter, bias)]
        if problem.accumulate_dtype == "int32":
            arrays = [None if a is None else a.numpy() for a in (data, filter, bias)]
        expected = torch.from_numpy(reference(problem, *arrays))
        assert script.deviation(problem, data, filter, bias, expected) <= 1e-12
        wrong = expected.clone()
        wrong.view(-1)[-1] += 0.1 * expected.abs().max()
        assert script.deviation(problem, data, filter, bias, wrong) == pytest.approx(0.1, rel=1e-6)


def test_a_whole_run(script, monkeypatch, tmp_path, capsys):
    """With artifacts for the CPU; one of three layers is missing, and one is wrong."""
    small = script.small_problems()[0]
    layer = td.Problem(1, 1, 8, 6, (7, 9), (4, 4), (2, 2), (1, 1), (1, 1), (14, 18), epilogue=td.Epilogue(True))
    listed = [("a", layer), ("b", script.of_type(layer, "float16", "NXC")), ("c", layer.replace(batch=3))]
    directory = tmp_path / "built"
    td.compile([small, *(problem for _, problem in listed[:2])], "x86-64-v3", directory, jobs=1)
    monkeypatch.setattr(script, "small_problems", lambda: [small])
    monkeypatch.setattr(script, "layers", lambda: listed)
    honest = td.Library.select
    monkeypatch.setattr(td.Library, "select", lambda library, problem, _=None: honest(library, problem))
    monkeypatch.setitem(script.TOLERANCES, "float16", 0.0)
    output = tmp_path / "result.json"
    monkeypatch.setattr(sys, "argv", ["gpu-check", "--artifacts", str(directory), "--output", str(output)])
    with pytest.raises(SystemExit) as ended:
        script.main()
    assert ended.value.code == 1
    result = json.loads(output.read_text())
    first, a, b, c = result["rows"]
    assert first["right"]
    assert "ours" not in first
    assert a["right"]
    assert a["same_every_run"]
    assert a["same_at_an_odd_address"]
    assert a["ours"]["device"] == pytest.approx(2e-3 / script.CALLS)
    assert a["speedup"] == 1
    assert set(a["torch_channels_last"]) == {"device", "call"}
    assert a["floors"]["products"] > 0
    assert not b["right"]
    assert b["deviation"] > 0
    assert "NoArtifactError" in c["error"]
    said = capsys.readouterr().out
    assert said.count("WRONG") == 2
    assert "4 run, 2 wrong, 0 left out, 0 failed" in said
    assert isinstance(honest(td.load(directory), layer)[0], Accepted)
    # Nothing is begun once the time is over.
    monkeypatch.setattr(sys, "argv", ["gpu-check", "--artifacts", str(directory), "--output", str(output), "--limit=0"])
    with pytest.raises(SystemExit) as ended:
        script.main()
    assert ended.value.code == 0
    assert len(json.loads(output.read_text())["left_out"]) == 4


def test_what_is_prepared_is_opened(script, monkeypatch, tmp_path):
    problem = td.Problem(1, 1, 3, 2, (5,), (3,), (2,), (1,), (1,), (9,))
    monkeypatch.setattr(script, "small_problems", lambda: [problem])
    monkeypatch.setattr(script, "layers", list)
    archive = tmp_path / "check.tar.xz"
    with pytest.raises(SystemExit) as ended:
        script.prepare(archive, "x86-64-v3", 1)
    assert ended.value.code == 0
    folder = tmp_path / "opened"
    folder.mkdir()
    assert td.load(script.opened(archive, folder)).manifests[0].parsed == problem.replace(filter_format="GIOX")
