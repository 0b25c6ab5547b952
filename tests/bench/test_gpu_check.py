"""scripts/gpu-check as far as it goes without a device: its problems, its arithmetic, its run with what CPUs have."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support import artifacts as made
from support import gpu_dry
from support.cuda_kernels import CUDA, TARGET

import tvm_deconv as td
from tvm_deconv.bench import gpu
from tvm_deconv.compiler import nvcc
from tvm_deconv.errors import CompilerNotFound, ProblemError
from tvm_deconv.frontends import scan
from tvm_deconv.problem.reference import reference

torch = pytest.importorskip("torch")
ROOT = Path(__file__).parents[2]
LAYERS = ROOT / "examples" / "layers.json"


@pytest.fixture
def on_cpu(monkeypatch):
    monkeypatch.setattr(gpu, "torch", torch)
    monkeypatch.setattr(gpu, "DEVICE", "cpu")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Artifacts for the CPU."""
    directory = tmp_path_factory.mktemp("built")
    made.export(directory, gpu_dry.BUILT)
    return directory


@pytest.fixture
def children(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "tests"), str(ROOT)]))


def test_the_layers_are_those_of_the_list():
    found = gpu.layers(LAYERS)
    wanted = [(layer.name, layer.problem) for layer in scan(LAYERS)]
    settings = (*gpu.SETTINGS, *gpu.INTEGERS)
    for number, (kind, data_format) in enumerate(settings):
        part = found[number :: len(settings)]
        assert part == [(name, gpu.of_type(problem, kind, data_format)) for name, problem in wanted]
        assert {gpu.kind_of(problem) for _, problem in part} == {kind}


def test_every_family_is_checked_in_every_way():
    found = {(CUDA.default(p, TARGET)[0].name, gpu.kind_of(p), p.data_format) for p in gpu.small_problems()}
    for data_format in ("NCX", "NXC"):
        for kind in gpu.TOLERANCES:
            assert ("cuda_generic", kind, data_format) in found
            assert ("cuda_narrow", kind, data_format) in found
            tensor = kind in ("float16", "bfloat16", "tf32x3", "tf32", "int8", "uint8")
            assert ("cuda_tensor" if tensor else "cuda_product", kind, data_format) in found


@pytest.mark.usefixtures("on_cpu")
def test_float64_is_right():
    for problem in gpu.small_problems()[::5]:
        data, filter, bias = gpu.operands(problem)
        arrays = [None if a is None else a.double().numpy() for a in (data, filter, bias)]
        if problem.accumulate_dtype == "int32":
            arrays = [None if a is None else a.numpy() for a in (data, filter, bias)]
        expected = torch.from_numpy(reference(problem, *arrays))
        assert gpu.deviation(problem, data, filter, bias, expected) <= 1e-12
        wrong = expected.clone()
        wrong.view(-1)[-1] += 0.1 * expected.abs().max()
        assert gpu.deviation(problem, data, filter, bias, wrong) == pytest.approx(0.1, rel=1e-6)


@pytest.mark.usefixtures("children")
def test_a_whole_slot(built, tmp_path, monkeypatch):
    """The script, killed once; processes that crash, hang, lose the device, lie about its memory: others are done."""
    output, directory, kill = tmp_path / "result.json", tmp_path / "slot", tmp_path / "kill"
    shutil.copytree(built, directory)
    (directory / gpu.PLANS).mkdir()
    (directory / gpu.PLANS / "tournament.json").touch()
    kill.touch()
    monkeypatch.setenv("GPU_DRY_KILL", str(kill))
    command = [sys.executable, gpu_dry.__file__, "run", str(directory), "--output", str(output), "--minutes=16"]
    killed = subprocess.run(command, capture_output=True, text=True, check=False)
    assert killed.returncode == -signal.SIGKILL
    before = json.loads(output.read_text())
    assert [row.get("done") for row in before["rows"]] == [["check"], *[None] * (len(gpu_dry.ROWS) - 1)]
    assert before["under_way"] == [["check", 1]]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 1, ended.stderr
    result = json.loads(output.read_text())
    assert result["rows"][0] == before["rows"][0]  # it was not done again
    assert result["under_way"] == []
    assert result["device"] == "none"
    rows = dict(zip([name for name, _ in gpu_dry.ROWS], result["rows"], strict=True))
    assert rows[""]["right"]
    assert "ours" not in rows[""]
    assert rows["bytes"]["peers"] == "float16"
    assert any("PyTorch in float16 takes 1.00 times ours" in line for line in ended.stdout.splitlines())
    for name in ("right", "bytes", "lies", "last"):
        row = rows[name]
        assert ("peers" in row) == (name == "bytes")
        assert gpu.good(row)
        assert row["same_every_run"]
        assert row["same_to_an_odd_address"]
        assert row["seconds"]["ours"] == pytest.approx(2e-3 / gpu.CALLS)
        assert set(row["seconds"]) == {"ours", "torch_contiguous", "torch_channels_last", "product"}
        assert row["not_timed"] == {}
        assert row["clock_MHz"] == 1500
        assert row["speedup"] == 1
        assert row["floors"]["products"] > 0
    assert not rows["wrong"]["right"]
    assert rows["wrong"]["deviation"] > 0
    assert "seconds" not in rows["wrong"]
    assert "its process ended with exit code 9" in rows["crashes"]["error"]
    assert "did not end within 1 s" in rows["hangs"]["error"]
    assert "illegal memory access" in rows["loses"]["error"] or "NoArtifactError" in rows["loses"]["error"]
    assert "NoArtifactError" in rows["not built"]["error"]
    assert len({row["process"] for row in rows.values() if "process" in row}) == 5
    assert rows["loses"]["process"] != rows["not built"]["process"] == rows["last"]["process"]
    said = ended.stdout.splitlines()
    # What was under way when the first run was killed comes last, and after all checks the largest race is the first.
    steps = re.findall(r"^ *\d+ s  (\w+) +(\S+)", ended.stdout, re.MULTILINE)
    assert [name for word, name in steps if word != "time"][-1] == "right"
    assert [name for word, name in steps if word == "time"] == ["lies", "last", "bytes", "right"]
    assert "tournament: 1 layers were not reached" in said
    assert sum("WRONG" in line for line in said) == 10  # each as it is run, and at the end
    assert any("float32 NCX: 3 layers, median" in line for line in said)
    assert any("10 run, 5 wrong, 0 left out, 0 failed to build" in line for line in said)
    assert said[-1].endswith(str(output))


@pytest.mark.usefixtures("children")
def test_the_time_is_kept(built, tmp_path):
    """What is left when the time is up is named, and what was done is there."""
    rows = [("right", gpu_dry.LAYER), ("", gpu_dry.LAYER.replace(batch=gpu_dry.ENDS_THE_TIME)), ("", gpu_dry.SMALL)]
    output = tmp_path / "result.json"
    result = {"build": {"failed": []}}

    def go_on():
        gpu.run(rows, built, output, result, 1000.0, gpu_dry.Dry, gpu_dry.patience)
        assert json.loads(output.read_text()) == result
        assert result["ended"] == "TimeIsUp"
        assert gpu.good(result["rows"][0])
        return result["left_out"]

    assert go_on() == [problem.key for _, problem in rows[1:]]
    assert "seconds" not in result["rows"][0]
    # The step that ended the time comes last now.
    assert go_on() == [rows[1][1].key]
    with pytest.raises(ProblemError, match="must be a new file, or of a run with these artifacts on this device"):
        gpu.run(rows[:1], built, output, {}, 1000.0, gpu_dry.Dry, gpu_dry.patience)
    del result["rows"][0]["speedup"]
    assert "1 layers are not compared with PyTorch" in gpu.summary(result)


def test_builds_have_their_time(tmp_path):
    """What was built stays, what fails is named, and the rest is left."""
    start = gpu.build([gpu_dry.SMALL, gpu_dry.LAYER], tmp_path, "x86-64-v3", 1, 600.0)
    assert (start["built"], start["failed"]) == (2, [])
    beyond = gpu_dry.SMALL.replace(batch="any")
    found = gpu.build([beyond], tmp_path, "cuda-sm_90", 1, 600.0)
    assert (found["built"], found["of"]) == (0, 1)
    assert "must have no dynamic extents" in found["failed"][0]["error"]
    over = gpu.build([gpu_dry.LAYER.replace(batch=3)], tmp_path, "x86-64-v3", 1, 0.001)
    assert (over["built"], over["failed"]) == (0, [])


def test_what_is_prepared_is_opened(built, tmp_path):
    """With the plans of a tournament, which are no artifacts to select from."""
    archive, folder, both = tmp_path / "check.tar.xz", tmp_path / "opened", tmp_path / "both"
    shutil.copytree(built, both)
    shutil.copytree(built, both / gpu.PLANS)
    gpu.archive(both, archive)
    folder.mkdir()
    assert td.load(gpu.opened(archive, folder)).digest == td.load(built).digest
    assert td.load(folder / gpu.PLANS).digest == td.load(built).digest
    assert gpu.opened(built, folder) == built


def test_an_archive_that_lacks_artifacts_or_is_too_large_is_named(built, tmp_path, monkeypatch):
    archive, row = tmp_path / "check.tar.xz", {"built": 4, "of": 4, "failed": [], "seconds": 2.0}
    assert gpu.prepared(row, built, archive) == []
    part = row | {"of": 7, "failed": [{"key": "n1", "error": "does not compile"}]}
    assert gpu.prepared(part, built, archive) == [
        "n1: does not compile",
        "--minutes=0: the time ended before 2 of 7 were built",
    ]
    monkeypatch.setattr(gpu, "MOST_BYTES", 1000)
    (said,) = gpu.prepared(row, built, archive)
    assert f"must have at most 1000 bytes to be carried, it has {archive.stat().st_size}" in said


@pytest.mark.slow
def test_the_archive_of_all_rows_can_be_carried(tmp_path):
    """By what two more artifacts add to an archive: libraries share most of their bytes, which are stored once."""
    try:
        nvcc.find_nvcc()
    except CompilerNotFound as error:
        pytest.skip(str(error))
    problems = [gpu.of_type(gpu.layers(LAYERS)[6][1], kind, "NXC") for kind in ("float32", "float16", "tf32x3", "int8")]
    sizes = []
    for number, some in enumerate((problems[:2], problems)):
        directory, archive = tmp_path / f"built{number}", tmp_path / f"{number}.tar.xz"
        gpu.build(some, directory, "cuda-sm_90", 2, 600.0)
        gpu.archive(directory, archive)
        sizes.append(archive.stat().st_size)
    rows = len(gpu.small_problems()) + len(gpu.layers(LAYERS))
    assert sizes[0] + (sizes[1] - sizes[0]) / 2 * (rows - 2) < gpu.MOST_BYTES


def test_without_a_device_it_says_so(tmp_path, monkeypatch):
    command = [sys.executable, str(ROOT / "scripts" / "gpu-check"), "run", str(tmp_path)]
    monkeypatch.setenv("LD_LIBRARY_PATH", "")
    ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert ended.returncode == 1
    assert "error: device='cuda:0': needs NVIDIA's driver" in ended.stderr
