"""The command line: what it prints, what it exits with, and the scripts of a checkout."""

import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from safetensors.numpy import load_file, save_file
from support import artifacts as made
from support.processes import without_torch

import tvm_deconv as td
from tvm_deconv.artifact.manifest import Manifest
from tvm_deconv.cli import main as cli
from tvm_deconv.compiler import current
from tvm_deconv.compiler.requests import Outcome
from tvm_deconv.extras import install
from tvm_deconv.frontends import FoundLayer, write_weights
from tvm_deconv.problem.testing import operands
from tvm_deconv.targets import detect_host
from tvm_deconv.targets.ancestry import name_of

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SMALL = [
    {"name": "one", "data": [1, 4, 5, 6], "filter": [1, 4, 3, 3, 3], "strides": [2, 2], "pads_begin": [1, 1]},
    {"name": "two[red]", "data": [1, 4, 7], "filter": [2, 2, 3, 4], "strides": [2], "epilogue": "bias+relu"},
]


def run(*arguments, **environment):
    # Without COLUMNS, as pytest-xdist sets it, tables are as wide as they need.
    environment = {"COLUMNS": None, **environment}
    return CliRunner(env=environment).invoke(cli.main, [str(argument) for argument in arguments])


@pytest.fixture
def copy(artifacts, tmp_path):
    """A copy of the artifacts that may be spoilt."""
    for path in artifacts.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A list of two problems, compiled: (list, directory, result of the command)."""
    folder = tmp_path_factory.mktemp("small")
    source = folder / "small.json"
    source.write_text(json.dumps(SMALL))
    return source, folder / "made", run("compile", source, "--output", folder / "made")


# --- compile ---------------------------------------------------------------------------------------------------------


def test_compile(small):
    _, directory, result = small
    assert result.exit_code == 0, result.output
    assert "small.json: 2 of 2 layers covered" in result.stderr
    assert "two[red]\tGroupConvolutionBackpropData\tyes\t4->6 g2 k4 s2 7 bias+relu\t" in result.stdout
    assert re.search(r"made: 2 built, 0 up to date, 0 failed in \d", result.stderr)
    assert {manifest.layers for manifest in td.load(directory).manifests} == {("one",), ("two[red]",)}


def test_what_is_compiled_verifies(small):
    result = run("verify", small[1])
    assert result.exit_code == 0, result.output
    assert "2 ok, 0 failed, 0 not for this machine" in result.stderr


def test_compile_again_builds_nothing(small):
    source, directory, _ = small
    before = {path: path.stat().st_mtime_ns for path in directory.iterdir()}
    result = run("compile", source, "--output", directory)
    assert result.exit_code == 0, result.output
    assert "0 built, 2 up to date, 0 failed" in result.stderr
    assert before == {path: path.stat().st_mtime_ns for path in directory.iterdir()}


@pytest.fixture
def built(monkeypatch):
    """What the command asks to have built; nothing is."""
    calls = []

    def compile(problems, target, output, *, layers, jobs, algorithms, on_outcome, logs):
        calls.append(
            {"problems": dict(problems), "target": tuple(target), "output": output, "jobs": jobs, "logs": logs}
        )
        assert algorithms is None
        assert layers == problems
        for problem, names in problems.items():
            on_outcome(Outcome(problem, tuple(names), "x86-64-v3", "current", None, None, 0.0))

    monkeypatch.setattr(current, "compile", compile)
    return calls


def test_compile_of_models(built, tmp_path):
    sources = [EXAMPLES / name for name in ("upsampling_node.xml", "upsampling_node_grouped.xml", "decoder.onnx")]
    targets = ["--target", "x86-64-v3", "--target", "x86-64-v4"]
    result = run("compile", *sources, *targets, "--output", tmp_path, "--jobs", 1)
    assert result.exit_code == 0, result.output
    (call,) = built
    assert call["target"] == ("x86-64-v3", "x86-64-v4")
    assert call["jobs"] == 1
    names = [name for names in call["problems"].values() for name in names]
    assert names == ["upsampling_node", "upsampling_node_grouped", "up0", "up1", "up2", "up3"]
    assert "decoder.onnx: 4 of 4 layers covered" in result.stderr
    weights = load_file(tmp_path / "decoder.safetensors")
    assert weights["up3.bias"].shape == (3,)
    assert load_file(tmp_path / "upsampling_node.safetensors")["upsampling_node.filter"].shape == (20, 10, 3, 3)
    assert len(list(tmp_path.glob("tvm_deconv_operators.*.so"))) == 1  # by which ONNX Runtime calls layers


def save_model(path, shape, scale=1, **attributes):
    """Write a model of one node "up", with a filter of elements `scale`, and return its path."""
    nodes = [onnx.helper.make_node("ConvTranspose", ["x", "f"], ["y"], name="up", strides=[2], **attributes)]
    value = onnx.helper.make_tensor_value_info("x", 1, shape)
    filter = onnx.numpy_helper.from_array(np.full((3, 2, 4), scale, np.float32), "f")
    graph = onnx.helper.make_graph(nodes, "g", [value], [onnx.ValueInfoProto(name="y")], [filter])
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)]), path)
    return path


def test_models_with_free_extents(built, tmp_path):
    save_model(tmp_path / "m.onnx", ["n", 3, "frames"])
    result = run("compile", tmp_path / "m.onnx", "--extent", "frames=1..2000", "--output", tmp_path / "made")
    assert result.exit_code == 0, result.output
    assert "yes, any batch and spatial axis 0" in result.stdout
    assert "3->2 k4 s2 any nany" in result.stdout
    (problem,) = built[0]["problems"]
    assert problem.buckets == ((31, 250, 2000),)
    for wrong, text in (
        ("frames", "must be NAME=LOW..HIGH"),
        ("time=1..2", "must be a free extent"),
        ("n=9..1", "range"),
    ):
        result = run("compile", tmp_path / "m.onnx", "--extent", wrong, "--output", tmp_path / "made")
        assert result.exit_code != 0
        assert text in result.stderr


@pytest.mark.parametrize(("layouts", "wanted"), [((), ["NCX"]), (("NXC",), ["NXC"]), (("NXC", "NCX"), ["NXC", "NCX"])])
def test_models_in_other_layouts(built, tmp_path, layouts, wanted):
    given = [word for layout in layouts for word in ("--layout", layout)]
    result = run("compile", EXAMPLES / "upsampling_node.xml", *given, "--output", tmp_path)
    assert result.exit_code == 0, result.output
    assert [problem.data_format for problem in built[0]["problems"]] == wanted
    assert list(built[0]["problems"].values()) == [["upsampling_node"]] * len(wanted)


@pytest.mark.parametrize(
    ("precision", "wanted"), [("tf32", ["tf32", "ieee"]), ("float32_fast", ["tf32x3", "ieee"])], ids=str
)
def test_float32_layers_in_another_precision(built, tmp_path, precision, wanted):
    entry = {"data": [1, 256, 5], "filter": [1, 256, 3, 4], "strides": [4]}
    (tmp_path / "list.json").write_text(json.dumps([entry, entry | {"dtype": "float16"}]))
    command = "compile", tmp_path / "list.json", "--output", tmp_path, "--precision", precision
    assert run(*command).exit_code == 0
    assert [problem.precision for problem in built[0]["problems"]] == wanted


def test_names_of_several_sources_stay_apart(built, tmp_path):
    folders = []
    for name in ("a", "b"):
        folder = tmp_path / name
        folder.mkdir()
        for suffix in (".xml", ".bin"):
            (folder / f"upsampling_node{suffix}").write_bytes((EXAMPLES / f"upsampling_node{suffix}").read_bytes())
        folders.append(folder / "upsampling_node.xml")
    assert run("compile", *folders, "--output", tmp_path / "made").exit_code == 0
    (names,) = built[0]["problems"].values()
    assert names == ["upsampling_node:upsampling_node", "upsampling_node_2:upsampling_node"]
    assert list(td.load(tmp_path / "made")) == names


@pytest.mark.parametrize("commands", [[["first", "second"]], [["first"], ["second"]]], ids=["one", "two"])
def test_models_have_the_same_names_by_one_command_and_by_several(built, tmp_path, commands):
    scales = {"first": 1, "second": 2}
    for stems in commands:
        models = [save_model(tmp_path / f"{stem}.onnx", [scales[stem], 3, 8], scales[stem]) for stem in stems]
        result = run("compile", *models, "--output", tmp_path / "made")
        assert result.exit_code == 0, result.output
        names = [f"{stem}:up" if len(stems) > 1 else "up" for stem in stems]
        assert [*built[-1]["problems"].values()] == [[name] for name in names]
        assert [line.split("\t")[0] for line in result.stdout.splitlines()[-len(stems) :]] == names
    library = td.load(tmp_path / "made")
    assert {name: problem.batch for name, problem in library.layers.items()} == {"first:up": 1, "second:up": 2}
    assert library.weights("second:up")[0].min() == 2


def test_layers_that_a_library_does_not_have_take_no_name_of_a_model(built, tmp_path):
    """Not those that are not covered, and not those of a list, which has no filters."""
    sources = [tmp_path / "list.json", save_model(tmp_path / "odd.onnx", [1, 3, 8], auto_pad="SIDEWAYS")]
    sources[0].write_text(json.dumps([SMALL[0] | {"name": "up"}]))
    result = run("compile", *sources, save_model(tmp_path / "model.onnx", [1, 3, 8]), "--output", tmp_path / "made")
    assert result.exit_code == 0, result.output
    assert "odd.onnx: 0 of 1 layers covered" in result.stderr
    assert [*built[0]["problems"].values()] == [["list:up"], ["up"]]
    assert list(td.load(tmp_path / "made")) == ["up"]


def test_warnings_about_a_list(built, tmp_path):
    source = tmp_path / "list.json"
    source.write_text(json.dumps([SMALL[0] | {"stride": [2, 2]}]))
    result = run("compile", source, "-o", tmp_path / "made")
    assert result.exit_code == 0, result.output
    said = f"warning: stride=[2, 2]: means nothing; did you mean strides? in problem 0 (one) of {source}"
    assert said in result.stderr.splitlines()
    assert built


def test_layers_that_are_not_covered(built, tmp_path):
    model = (EXAMPLES / "upsampling_node.xml").read_text()
    source = tmp_path / "model.xml"
    source.write_text(model.replace('auto_pad="explicit"', 'auto_pad="upside_down"'))
    (tmp_path / "upsampling_node.bin").write_bytes((EXAMPLES / "upsampling_node.bin").read_bytes())
    (tmp_path / "model.bin").write_bytes((EXAMPLES / "upsampling_node.bin").read_bytes())
    result = run("compile", source, "--output", tmp_path / "made")
    assert result.exit_code == 1
    assert "0 of 1 layers covered" in result.stderr
    assert "upside_down" in result.stdout
    assert "\nError: source=" in result.stderr
    assert result.stderr.endswith("must hold a transposed convolution that is covered\n")
    assert not built


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_strict_compile_refuses_a_layer_that_is_not_covered(options, built, tmp_path):
    good = save_model(tmp_path / "good.onnx", [1, 3, 8])
    odd = save_model(tmp_path / "odd.onnx", [1, 3, 8], auto_pad="SIDEWAYS")
    result = run("compile", good, "--strict", "--output", tmp_path / "made", *options)
    assert result.exit_code == 0, result.output
    assert built.pop()
    result = run("compile", good, odd, "--strict", "--output", tmp_path / "other", *options)
    assert result.exit_code == 1
    said = result.stderr.splitlines()[-2:]
    assert re.fullmatch(rf"not covered: up in {odd}: auto_pad='SIDEWAYS': must be .*", said[0])
    assert said[1] == "Error: 1 of 2 layers are not covered"
    assert not built
    assert not (tmp_path / "other").exists()


def test_failing_problems_are_reported_at_the_end(monkeypatch, small, tmp_path):
    def compile(problems, *_, on_outcome, **__):
        for index, (problem, names) in enumerate(problems.items()):
            status, error = ("failed", "too odd") if index == 0 else ("built", None)
            on_outcome(Outcome(problem, tuple(names), "x86-64-v3", status, None, error, 0.1))
        raise td.BuildError("problems", "1 of 2", "did not build")

    monkeypatch.setattr(current, "compile", compile)
    result = run("compile", small[0], "--output", tmp_path)
    assert result.exit_code == 1
    said = result.stderr.splitlines()[2:]
    assert said[0] == "failed: one for x86-64-v3: too odd"
    assert re.fullmatch(rf"Error: {tmp_path}: 1 built, 0 up to date, 1 failed in \d+\.\d s", said[1])
    assert len(said) == 2


def test_no_compiler(small, tmp_path):
    result = run("compile", small[0], "--output", tmp_path, CXX="/nowhere/g++")
    assert result.exit_code == 1
    assert result.stderr.endswith(
        "\nError: CXX='/nowhere/g++': no such program; set CXX to the path of a C++ compiler, with no other words, or "
        "unset it\n"
    )


# --- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["compile", "model.txt"], "source=model.txt: must end in .xml (OpenVINO IR), .onnx or .json"),
        (["compile", "missing.xml"], "source=missing.xml: must be a file that can be read"),
        (["verify", "{empty}"], "{empty}: 0 ok, 0 failed, 0 not for this machine"),
        (["bench", "{empty}"], "paths='{empty}': must hold a layer that this machine can run"),
        (["bench", "{artifacts}", "--threads", "4000"], "threads=4000: must be from 1 to"),
        (["compile", "{list}", "--output", "/proc/nowhere"], "output=/proc/nowhere: must be a directory"),
        (
            ["compile", "{list}", "--output", "{empty}", "--algorithm", "cuda_narrow"],
            "algorithms=('cuda_narrow',): must name at least one of winograd, ",
        ),
    ],
)
def test_errors_are_one_line(arguments, said, artifacts, small, tmp_path):
    places = {"empty": tmp_path, "artifacts": artifacts, "list": small[0]}
    result = run(*(argument.format(**places) for argument in arguments))
    assert result.exit_code == 1
    error = result.stderr.splitlines()[-1]
    assert error.startswith(f"Error: {said.format(**places)}"), result.stderr
    assert result.stderr.count("Error") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["compile"],
        ["compile", "x.json", "--jobs", "0"],
        ["inspect", "/nowhere"],
        ["bench", "x.json", "--peers", "abacus"],
        ["bench", "x.json", "--json", "/nowhere/report.json"],
        ["bench", "x.json", "--threads", "0"],
        ["compile", "x.json", "--target", "sparc"],
        ["bench", "x.json", "--target", "sparc"],
        ["logs", "prune", "/tmp", "--target", ".."],
        ["compile", "x.json", "--algorithm", "magic"],
        ["tune", "x.json", "--logs", "logs", "--algorithm", "magic"],
        ["tune", "x.json", "--logs", "logs", "--trials", "0"],
        ["compile", "x.json", "--logs", "missing"],
        ["compile", "x.json", "--extent", "frames=3..1"],
        ["bench", "x.json", "--logs", "missing"],
        ["fly"],
    ],
)
def test_wrong_usage(arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("x.json").write_text(json.dumps(SMALL))
    result = run(*arguments)
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]
    assert result.exit_code == 2
    assert result.stderr.startswith("Usage: ")


def test_a_report_that_cannot_be_written_is_refused_before_the_run(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "access", lambda path, _: Path(path) != tmp_path)
    result = run("bench", "x.json", "--json", tmp_path / "report.json")
    assert result.exit_code == 2
    assert f"{tmp_path / 'report.json'} cannot be written" in " ".join(result.stderr.split())


def test_a_peer_that_is_not_installed(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    result = run("bench", "x.json", "--peers", "onnxruntime")
    assert result.exit_code == 2
    assert "onnxruntime is not installed: pip install onnxruntime" in result.stderr


@pytest.mark.parametrize("package", ["click", "rich"])
def test_without_the_extra(package, tmp_path):
    program = f"import sys; sys.modules[{package!r}] = None\nfrom tvm_deconv.cli.main import main"
    (tmp_path / "hide.py").write_text(program)
    done = subprocess.run([sys.executable, "hide.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == f"tvm-deconv needs the package {package}: {install('cli')}\n"


@pytest.mark.parametrize("package", ["tvm", "safetensors"])
def test_without_a_package_of_the_extra(package, tmp_path):
    script = f"import sys; sys.modules[{package!r}] = None\nfrom tvm_deconv.cli.main import main; main()"
    source = EXAMPLES / ("problems.json" if package != "safetensors" else "upsampling_node.xml")
    command = [sys.executable, "-c", script, "compile", str(source), "--output", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert package == "tvm" or not any(tmp_path.iterdir()), "nothing is built before"
    error = done.stderr.splitlines()[-1]
    assert re.fullmatch(rf"Error: .*needs the package {package}: {re.escape(install('compile'))}", error)
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("output", "code", "said"),
    [
        ("> /dev/full", 1, "Error: standard output: No space left on device\n"),
        (">&-", 0, "digest"),
        ("> $OUT", 0, "digest"),
        ("| true", 0, ""),
    ],
)
def test_a_standard_output_that_cannot_take_everything(output, code, said, copy):
    made.rewrite(copy, made.PLAIN, layers=["vär"])
    command = f'"{sys.executable}" -c "from tvm_deconv.cli.main import main; main()" inspect {copy} {output}'
    environment = os.environ | {"PYTHONIOENCODING": "ascii", "OUT": str(copy / "out")}
    done = subprocess.run(command, shell=True, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert output != "> $OUT" or "vär\t" in (copy / "out").read_text("utf-8")


# --- inspect, verify, doctor -----------------------------------------------------------------------------------------


def test_inspect(artifacts):
    result = run("inspect", artifacts)
    assert result.exit_code == 0, result.output
    assert f"{len(made.PROBLEMS)} artifacts, 0 broken" in result.stderr
    for path in artifacts.glob("*.json"):
        assert path.stem in result.stdout


def test_a_library_that_is_not_whole_is_not_said_to_run(copy):
    """One bit of it is another."""
    path = made.file(copy, made.PLAIN, ".so")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    name = made.file(copy, made.PLAIN, ".json").stem
    result = run("inspect", copy)
    (line,) = (line for line in result.stdout.splitlines() if name in line)
    assert "no: sha256=" in line
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1] == f"Error: {copy.name}: 1 broken: {name}"
    found = json.loads(run("inspect", copy, "--json").stdout)
    assert list(found["broken"]) == [name]
    assert name not in {artifact["name"] for artifact in found["artifacts"]}
    result = run("doctor", copy)
    assert f"no   {name}  sha256=" in result.stdout
    assert f"yes  {name}" not in result.stdout
    assert (run("doctor", copy, "--json").exit_code, result.exit_code) == (1, 1)


def test_inspect_shows_what_artifacts_need(copy):
    made.rewrite(copy, made.PLAIN, needs={"GLIBC": "9.9", "tvm_ffi": "0.1.2"})
    name = made.file(copy, made.PLAIN, ".json").stem
    (line,) = (line for line in run("inspect", copy).stdout.splitlines() if name in line)
    assert "GLIBC 9.9, tvm_ffi 0.1.2" in line
    assert f"no: needs GLIBC 9.9; this machine has GLIBC {platform.libc_ver()[1]}" in line


def test_inspect_json(copy):
    made.rewrite(copy, made.PLAIN, layers=["first"], features=[*_flags(copy), "warp_drive"])
    made.file(copy, made.PROBLEMS["bias"], ".json").write_text("{}")
    found = json.loads(run("inspect", copy, "--json").stdout)
    (artifact,) = (entry for entry in found["artifacts"] if entry["layers"] == ["first"])
    assert artifact["problem"] == made.PLAIN.artifact_key
    assert not artifact["usable"]
    assert "warp_drive" in artifact["reason"]
    assert found["digest"] == td.load(copy).digest
    assert [name + ".json" for name in found["broken"]] == [made.file(copy, made.PROBLEMS["bias"], ".json").name]
    fields = {field.name for field in dataclasses.fields(Manifest)}
    assert fields | {"name", "usable", "reason", "precision"} == set(artifact)


def _flags(directory):
    return Manifest.read(made.file(directory, made.PLAIN, ".json")).features


def test_verify(artifacts):
    result = run("verify", artifacts)
    assert result.exit_code == 0, result.output
    assert result.stderr.splitlines()[-1] == f"{artifacts}: {len(made.PROBLEMS)} ok, 0 failed, 0 not for this machine"


def test_verify_says_what_is_wrong(copy):
    made.file(copy, made.PLAIN, ".so").write_bytes(b"not what it was")
    other = made.PROBLEMS["grouped"]
    made.file(copy, other, ".json").write_text("{}")
    result = run("verify", copy)
    assert result.exit_code == 1
    assert "failed: size=15: must be" in result.stdout
    assert (
        result.stderr.splitlines()[-1]
        == f"Error: {copy}: {len(made.PROBLEMS) - 2} ok, 2 failed, 0 not for this machine"
    )


def test_verify_finds_wrong_results(copy):
    """The library of a problem with relu serves one without: half of its outputs are wrong."""
    relu = made.PLAIN.replace(epilogue=td.Epilogue(activation="relu"))
    made.export(copy, [relu])
    made.rewrite(copy, made.PLAIN, content=made.file(copy, relu, ".so").read_bytes())
    result = run("verify", copy, "--seed", 7)
    assert result.exit_code == 1
    assert re.search(
        r"differs from the reference by \d\.\de[+-]\d\d of its largest element, with seed 7", result.stdout
    )


def test_verify_of_what_does_not_fit_in_memory(copy):
    made.export(copy, [made.PLAIN.replace(batch=2**40)])
    result = run("verify", copy)
    assert "failed: needs more memory than this machine gives" in result.stdout
    last = result.stderr.splitlines()[-1]
    assert last == f"Error: {copy}: {len(made.PROBLEMS)} ok, 1 failed, 0 not for this machine"


def test_verify_of_what_this_machine_cannot_run(copy):
    for problem in made.PROBLEMS.values():
        path = made.file(copy, problem, ".json")
        features = [*Manifest.read(path).features, "warp_drive"]
        path.write_text(dataclasses.replace(Manifest.read(path), features=features).to_json())
    made.file(copy, made.PLAIN, ".so").write_bytes(b"")
    result = run("verify", copy)
    assert result.exit_code == 1
    assert "skipped: needs CPU flags that this host lacks: warp_drive" in result.stdout
    last = result.stderr.splitlines()[-1]
    assert last == f"Error: {copy}: 0 ok, 1 failed, {len(made.PROBLEMS) - 1} not for this machine"


def test_doctor(artifacts):
    result = run("doctor", artifacts, TVM_DECONV_MAX_TARGET="x86-64-v3")
    assert result.exit_code == 0, result.output
    for said in ("native", "compiler", "TVM_DECONV_MAX_TARGET", "numpy"):
        assert said in result.stdout
    assert "no: " in next(line for line in result.stdout.splitlines() if line.startswith("x86-64-v4\t"))
    assert result.stdout.count("serves this problem and this CPU") == len(made.PROBLEMS)
    assert importlib.metadata.version("apache-tvm-ffi") in result.stdout
    assert f"\nmicroarchitecture\t{name_of(detect_host())}; as a target: " in result.stdout


def test_doctor_without_a_compiler():
    result = run("doctor", PATH="/nowhere", CXX="")
    assert result.exit_code == 0, result.output
    assert "no C++ compiler here" in result.stdout


def test_inspect_shows_workspaces_and_reasons(copy):
    made.rewrite(copy, made.PLAIN, features=[*_flags(copy), "warp_drive"])
    lines = run("inspect", copy).stdout.splitlines()
    assert lines[0].split("\t")[-4:] == ["workspace kB", "scratch kB / thread", "needs", "runs here"]
    assert any("no: needs CPU flags that this host lacks: warp_drive" in line for line in lines)


def test_the_package_runs_as_a_module():
    done = subprocess.run([sys.executable, "-m", "tvm_deconv", "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Usage: ")
    commands = ("compile", "tune", "logs", "inspect", "sign", "pack", "verify", "bench", "overhead", "doctor", "clean")
    for command in commands:
        assert re.search(rf"\n  {command} +[A-Z].*\.\n", done.stdout), "its summary is cut off"


def test_version():
    assert run("--version").stdout.endswith(f"version {importlib.metadata.version('tvm_deconv')}\n")
    assert td.__version__ == importlib.metadata.version("tvm_deconv")


# --- scripts ---------------------------------------------------------------------------------------------------------


def test_script_of_a_checkout():
    """The same command, from any directory."""
    command = [sys.executable, ROOT / "scripts" / "compile.py", "--help"]
    done = subprocess.run(command, cwd="/", capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Usage: tvm-deconv compile [OPTIONS] SOURCE...")


def test_script_of_a_checkout_that_is_not_installed(tmp_path):
    (tmp_path / "scripts").mkdir()
    for name in ("compile.py", "_checkout.py"):
        (tmp_path / "scripts" / name).write_bytes((ROOT / "scripts" / name).read_bytes())
    command = [sys.executable, "-S", "-E", tmp_path / "scripts" / "compile.py", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "error: this checkout is not installed; run ./scripts/quickstart, which does that, once.\n"


@pytest.mark.parametrize("script", ["quickstart", "test"])
@pytest.mark.parametrize(("wanted", "tried"), [("", "g++, c++, clang++, gcc, cc"), ("dirname g++", "dirname g++")])
def test_scripts_without_a_compiler(script, wanted, tried, tmp_path):
    """Said before anything is installed."""
    for name in ("bash", "dirname"):
        (tmp_path / name).symlink_to(Path("/usr/bin") / name)
    environment = {"PATH": str(tmp_path), "CXX": wanted}
    command = ["/usr/bin/env", "bash", ROOT / "scripts" / script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: no C++ compiler was found ({tried}); install one")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("script", ["quickstart", "test"])
def test_scripts_without_python(script, tmp_path):
    for name in ("bash", "dirname", "cksum"):
        (tmp_path / name).symlink_to(Path("/usr/bin") / name)
    (tmp_path / "g++").symlink_to("/usr/bin/true")
    (tmp_path / "scripts").mkdir()
    for name in (script, "venv.sh"):
        (tmp_path / "scripts" / name).write_bytes((ROOT / "scripts" / name).read_bytes())
    environment = {"PATH": str(tmp_path), "CXX": "", "PYTHON": ""}
    command = ["/usr/bin/env", "bash", tmp_path / "scripts" / script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "error: Python 3.10 or later is needed; install one, or set PYTHON to its path.\n"


def test_running_the_layers_of_a_model(artifacts, tmp_path):
    """The second half of the quick start, on an artifact of ours with weights as a compile writes them."""
    problem = made.PROBLEMS["bias"]
    for path in artifacts.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    weights = {
        "up.filter": np.ones(problem.filter_shape, np.float32),
        "up.bias": np.ones(problem.bias_shape, np.float32),
    }
    save_file(weights, tmp_path / "model.safetensors", {"up": problem.key, "without weights": problem.key})
    command = [sys.executable, "-W", "error", EXAMPLES / "run_layers.py", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^up +2x5x7x9 +\d+\.\d+ +\d+\.\d+ +\d\.\de-\d\d$", done.stdout, re.MULTILINE)
    done = subprocess.run([*command[:-1], artifacts], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: no layer came with weights")


def test_running_layers_of_other_types(artifacts, tmp_path):
    """Each as exact as its type, and one with scales."""
    for path in artifacts.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    quantized = made.PLAIN.replace(dtype="uint8", quantization=td.Quantization("int8", "uint8"))
    made.export(tmp_path, [quantized])
    problems = {name: made.PROBLEMS[name] for name in ("float64", "float16", "bfloat16", "int8")}
    layers = []
    for name, problem in {**problems, "quantized": quantized}.items():
        _, filter, bias, scaling = operands(problem)
        layers.append(FoundLayer(name, "ConvTranspose", problem, filter, bias, scaling=scaling))
    write_weights(layers, tmp_path / "model.safetensors")
    command = [sys.executable, "-W", "error", EXAMPLES / "run_layers.py", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()[2:7]] == sorted([*problems, "quantized"])
    library = td.load(tmp_path)
    assert (library.scaling("quantized").text, library.scaling("int8")) == (scaling.text, None)


def test_the_readme_runs(tmp_path):
    """The example as printed, as a file."""
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (tmp_path / "example.py").write_text(code)
    command = [sys.executable, "-W", "error", "example.py"]
    done = subprocess.run(command, cwd=tmp_path, env=without_torch(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(code.splitlines()) <= 15
