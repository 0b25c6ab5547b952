"""The loader in C++: CMake builds the example; it computes what the reference does, and refuses what Python refuses."""

import dataclasses
import json
import os
import shutil
import subprocess
import zipfile
from pathlib import Path

import numpy as np
import pytest
import tvm_ffi
from support import artifacts as made
from support.strategies import operands
from support.tolerances import assert_close

import tvm_deconv as td
from tvm_deconv.problem import testing
from tvm_deconv.problem.arrays import numpy_dtype
from tvm_deconv.problem.quantization import without_zero_points
from tvm_deconv.runtime.packing import pack_library
from tvm_deconv.targets import get

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "cpp"
P = made.PLAIN


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    """The folder with the programs, warnings being errors."""
    if not shutil.which("cmake"):
        pytest.skip("needs cmake")
    folder = tmp_path_factory.mktemp("build")
    ffi = f"-DTVM_FFI_LIBRARY={tvm_ffi.libinfo.find_libtvm_ffi()}"
    flags = "-Wall -Wextra -Wshadow -Wconversion -pedantic -Werror"
    options = [ffi, f"-DCMAKE_CXX_FLAGS={flags}", "-DCMAKE_C_FLAGS=-Wall -Wextra -pedantic -Werror"]
    for command in (["cmake", "-S", EXAMPLES, "-B", folder, *options], ["cmake", "--build", folder]):
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture
def run(built):
    def run(*arguments, **environment):
        command = [str(built / "deconv"), *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | environment)

    return run


@pytest.fixture
def copy(artifacts, tmp_path):
    return shutil.copytree(artifacts, tmp_path / "copy")


@pytest.fixture
def packed(copy, tmp_path):
    pack_library(td.load(copy), tmp_path / "m.tdl")
    return tmp_path / "m.tdl"


def write(folder, problem, seed):
    """Write the arrays of a call as raw numbers; return them, and the arguments that name the files."""
    data, filter, bias = operands(problem, seed)
    canonical = np.ascontiguousarray(problem.canonical_filter(filter))
    (folder / "data").write_bytes(data.tobytes())
    (folder / "filter").write_bytes(canonical.tobytes())
    if bias is not None:
        (folder / "bias").write_bytes(bias.astype(problem.accumulate_dtype).tobytes())
    names = [folder / "data", folder / "filter", "-" if bias is None else folder / "bias", folder / "out"]
    return (data, filter, bias), names


def assert_computes(run, path, problem, folder, wanted=None, shape=()):
    (data, filter, bias), files = write(folder, problem, np.random.default_rng().integers(2**31))
    done = run(path, wanted or problem.artifact_key, *files, *shape)
    assert done.returncode == 0, done.stderr
    out = np.frombuffer((folder / "out").read_bytes(), numpy_dtype(problem.output_dtype)).reshape(problem.output_shape)
    assert_close(out, td.reference(problem, data, filter, bias), problem.dtype)


@pytest.mark.parametrize("name", made.PROBLEMS)
def test_every_kind_of_problem(run, artifacts, tmp_path, name):
    assert_computes(run, artifacts, made.PROBLEMS[name], tmp_path)


def test_a_packed_file(run, packed, copy, tmp_path):
    digest = td.load(copy).digest
    shutil.rmtree(copy)
    assert_computes(run, packed, P, tmp_path)
    done = run(packed, DIGEST=digest)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == digest
    assert done.stdout.count("serves") == len(made.PROBLEMS)
    assert "must be sha256:0, which was asked for" in run(packed, DIGEST="sha256:0").stderr


def test_the_name_of_a_layer(run, copy, tmp_path):
    made.rewrite(copy, P, layers=["decoder/up 0", "слой"])
    assert f"decoder/up 0, слой: {P.artifact_key} for x86-64-v3: serves" in run(copy).stdout
    assert_computes(run, copy, P, tmp_path, "decoder/up 0")
    assert_computes(run, copy, P, tmp_path, "слой")


def test_a_directory_without_artifacts(run, tmp_path):
    done = run(tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", f"error: {tmp_path}: must hold an artifact\n")


def test_extents_of_each_call(run, tmp_path):
    problem = td.Problem.from_openvino(("any", 4, "any"), (4, 3, 5), strides=(2,), pads_begin=(1,), pads_end=(1,))
    made.export(tmp_path / "made", [problem])
    for shape in ((1, 4, 9), (3, 4, 40)):
        fixed = problem.at(shape)
        assert_computes(run, tmp_path / "made", fixed, tmp_path, problem.artifact_key, ["x".join(map(str, shape))])
    _, files = write(tmp_path, fixed, 0)
    done = run(tmp_path / "made", problem.artifact_key, *files, "3x5x40")
    assert (done.returncode, done.stderr) == (1, "error: data: must have a shape that the problem permits\n")


@pytest.mark.parametrize("precision", ["tf32", "tf32x3"])
def test_a_problem_that_permits_tf32(run, artifacts, tmp_path, precision):
    """CPUs compute it exactly, by the artifact of the problem that does not."""
    assert_computes(run, artifacts, P, tmp_path, P.replace(precision=precision).artifact_key)


def test_the_widest_that_runs_here_is_chosen(run, copy):
    """As Python chooses; what does not run here comes last, with its reason."""
    if get("x86-64-v4").features <= td.load(copy).host.features:
        made.export(copy, [P], "x86-64-v4")
    made.rewrite(copy, made.PROBLEMS["bias"], features=["avx2", "warp_drive"])
    made.rewrite(copy, made.PROBLEMS["grouped"], needs={"GLIBC": "9.9"})
    listed = run(copy).stdout
    best = td.load(copy).select(P)[0].manifest
    assert f"{P.artifact_key} for {best.target}: serves" in listed
    assert "needs CPU flags that this host lacks: warp_drive" in listed
    assert "needs GLIBC 9.9; this machine has " in listed


def test_the_example_in_c(built, tmp_path):
    """Linked by CMake too; what it computes is tested elsewhere."""
    done = subprocess.run([built / "plain", tmp_path / "none.so", "1"], capture_output=True, text=True, check=False)
    assert (done.returncode, "No such file" in done.stderr) == (1, True)


# ---- quantized layers ----

QUANTIZED = td.Problem(
    2, 2, 5, 3, (6,), (4,), (2,), (1,), (1,), (12,),
    dtype="uint8", quantization=td.Quantization("uint8", "int8"), epilogue=td.Epilogue(True, "relu"),
)  # fmt: skip


@pytest.fixture(scope="module")
def quantized(tmp_path_factory):
    folder = tmp_path_factory.mktemp("quantized")
    made.export(folder, [QUANTIZED])
    return folder


def numbers_of(scaling):
    """The numbers as the example takes them."""
    head = (scaling.data_scale, scaling.data_zero_point, scaling.output_scale, scaling.output_zero_point)
    return " ".join(map(str, (*head, *np.asarray(scaling.filter_scale, np.float64).tolist())))


def write_quantized(folder, arrays):
    filter = without_zero_points(QUANTIZED, arrays.scaling, QUANTIZED.canonical_filter(arrays.filter))
    assert filter.dtype == np.int16
    for name, array in {"data": arrays.data, "filter": filter, "bias": arrays.bias}.items():
        (folder / name).write_bytes(np.ascontiguousarray(array).tobytes())
    return [folder / name for name in ("data", "filter", "bias", "out")]


def spread_operands():
    """Fresh random arrays and their outputs, which differ: some zero points leave nearly all below relu's bound."""
    while True:
        arrays = testing.operands(QUANTIZED, np.random.default_rng().integers(2**31))
        wanted = td.reference(QUANTIZED, *arrays)
        if wanted.std() > 5:
            return arrays, wanted


def test_a_quantized_layer(run, quantized, tmp_path):
    arrays, wanted = spread_operands()
    files = write_quantized(tmp_path, arrays)
    done = run(quantized, QUANTIZED.artifact_key, *files, SCALING=numbers_of(arrays.scaling))
    assert done.returncode == 0, done.stderr
    out = np.frombuffer((tmp_path / "out").read_bytes(), np.int8).reshape(QUANTIZED.output_shape)
    np.testing.assert_array_equal(out, wanted)
    assert out.std() > 5


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"data_scale": 0.0}, "data_scale=0.000000: must be from 2**-60 to 2**40"),
        ({"output_scale": -1.0}, "output_scale=-1.000000: must be from 2**-60 to 2**40"),
        ({"filter_scale": [0.5, 0.5, 0.0, 1.0, 1.0, 1.0]}, "filter_scale=0.000000: must be from 2**-60 to 2**40"),
        ({"filter_scale": [0.5, 0.5]}, "filter_scale: must be one number or have one for each output channel, 6 here"),
        ({"data_zero_point": 256}, "data_zero_point=256: must be from 0 to 255"),
        ({"output_zero_point": -129}, "output_zero_point=-129: must be from -128 to 127"),
        ({"bias": 2**31 - 1}, "bias=2147483647: must keep sums within 32 bits"),
    ],
)
def test_numbers_that_break_a_rule(run, quantized, tmp_path, changes, said):
    arrays = testing.operands(QUANTIZED, 1)
    if "bias" in changes:
        arrays.bias[4] = changes.pop("bias")
    files = write_quantized(tmp_path, arrays)
    scaling = dataclasses.replace(arrays.scaling, **changes)
    done = run(quantized, QUANTIZED.artifact_key, *files, SCALING=numbers_of(scaling))
    assert (done.returncode, done.stderr) == (1, f"error: {said}\n")


# ---- what is refused ----


def refused(run, path, folder, problem=P):
    _, files = write(folder, problem, 0)
    done = run(path, problem.artifact_key, *files)
    assert done.returncode == 1, done.stdout + done.stderr
    assert not (folder / "out").exists()
    return done.stderr


def altered(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (altered, "must have the SHA-256 that the manifest says"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "bytes, which the manifest says"),
        (lambda path: path.write_bytes(path.read_bytes() + b"0" * 2), "must be at most"),
        (lambda path: path.unlink(), "must be a regular file"),
    ],
)
def test_spoilt_libraries(run, copy, tmp_path, spoil, said):
    spoil(made.file(copy, P, ".so"))
    assert said in refused(run, copy, tmp_path)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"format": 3}, "format: must be at most 2: a newer version wrote it"),
        ({"problem": "n1"}, "problem=n1: must be a key"),
        ({"problem": P.artifact_key.replace("n2", "n" + "9" * 17)}, "must have a size that fits"),
        ({"problem": P.artifact_key.replace("n2", "n" + "9" * 30)}, "must be an integer of 64 bits"),
        ({"library": "../x.so"}, "library: must be what problem, target and sha256 decide"),
        ({"size": -1}, "size: must be at least 0"),
        ({"size": "1"}, "size: is missing, or of another kind"),
        ({"packed_dtype": "float8"}, "dtype=float8: is not known"),
        ({"packed_shape": [-1]}, "packed_shape: must be a list of extents"),
        ({"layers": [1]}, "layers: must be a list of strings"),
        ({"macs": 1.5}, "must be JSON: a comma is missing"),
        ({"macs": 10**30}, "must be JSON: an integer is too large"),
        ({"knobs": [[[[[[[[[[[[[[[[[[]]]]]]]]]]]]]]]]]]}, "must be JSON: it is too deep"),
    ],
)
def test_spoilt_manifests(run, copy, tmp_path, changes, said):
    path = made.file(copy, P, ".json")
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    assert said in refused(run, copy, tmp_path)
    assert "is broken" in run(copy).stdout  # and its neighbours work
    assert run(copy).stdout.count("serves") == len(made.PROBLEMS) - 1


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"format": 2, "format": 2}', '"\\u12', '{"a":1}x', "nul"])
def test_manifests_that_are_none(run, copy, text):
    made.file(copy, P, ".json").write_text(text)
    assert "is broken: " in run(copy).stdout


def test_a_link_to_itself(run, copy):
    path = made.file(copy, P, ".json")
    path.unlink()
    path.symlink_to(path)
    assert "must be a regular file" in run(copy).stdout
    assert "there is none" in run(path).stderr


def test_a_member_with_a_long_name(run, tmp_path):
    """No name is so long that a stack overflows."""
    with zipfile.ZipFile(tmp_path / "long.tdl", "w") as archive:
        archive.writestr(f"{'0' * 16}-{'a' * 60_000}.json", "{}")
        archive.comment = b"tvm_deconv artifacts, format 1"
    done = run(tmp_path / "long.tdl")
    assert done.returncode == 1
    assert "a member has no plain file name" in done.stderr


@pytest.mark.parametrize("part", [0, 3, 30, 0.3, 0.9, -1])
def test_truncated_files(run, packed, part):
    content = packed.read_bytes()
    packed.write_bytes(content[: part if isinstance(part, int) else int(part * len(content))])
    done = run(packed)
    assert done.returncode == 1
    assert "must be a directory of artifacts, or a whole file that tvm-deconv pack wrote, but " in done.stderr


def test_files_of_other_formats(run, packed, tmp_path):
    content = packed.read_bytes()
    packed.write_bytes(b"#!/bin/sh\n" + content)
    assert "it does not begin as one" in run(packed).stderr
    with zipfile.ZipFile(tmp_path / "deflated.tdl", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.json", "{}" * 100)
        archive.comment = b"tvm_deconv artifacts, format 1"
    assert "a member is compressed or encrypted" in run(tmp_path / "deflated.tdl").stderr
    packed.write_bytes(content.replace(b"format 1", b"format 2"))
    assert "another version wrote it" in run(packed).stderr
    assert "there is none" in run(tmp_path / "missing").stderr


def test_an_altered_member(run, packed, copy, tmp_path):
    name = made.file(copy, P, ".so").name.encode()
    content = bytearray(packed.read_bytes())
    in_manifest = content.index(name)
    content[content.index(name, in_manifest + 1) + len(name) + 5000] ^= 1
    packed.write_bytes(content)
    assert "its bytes are not those that were written" in refused(run, packed, tmp_path)


def test_wrong_arguments_of_calls(run, artifacts, tmp_path):
    assert "no artifact serves it" in run(artifacts, "up9", *"dfbo").stderr
    _, files = write(tmp_path, P, 0)
    (tmp_path / "data").write_bytes(b"")
    assert "bytes, not 0" in run(artifacts, P.artifact_key, *files).stderr
    (tmp_path / "data").unlink()
    assert "data: must be a file that can be read" in run(artifacts, P.artifact_key, *files).stderr
    _, files = write(tmp_path, P, 0)
    for place in ("/proc/out", "/dev/full"):
        done = run(artifacts, P.artifact_key, *files[:-1], place)
        assert (done.returncode, done.stderr) == (1, f"error: {place}: must be a file that can be written\n")
    biased = made.PROBLEMS["bias"]
    _, files = write(tmp_path, biased, 0)
    files[2] = "-"
    assert "bias: must be given: the problem has one" in run(artifacts, biased.artifact_key, *files).stderr
    assert run().returncode == 2
