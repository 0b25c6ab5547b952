"""Artifacts from C and Rust: the header compiles on its own, and programs compute what the reference does."""

import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import tvm_ffi
from support import artifacts as made

import tvm_deconv as td
from tvm_deconv.compiler.launcher import find_compiler
from tvm_deconv.frontends import scan

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "cpp"
FFI = Path(tvm_ffi.libinfo.find_libtvm_ffi()).parent
STRICT = ("-pedantic", "-Wall", "-Wextra", "-Werror", f"-I{ROOT / 'include'}")


def compiled(output, *arguments):
    subprocess.run([find_compiler(), *STRICT, *map(str, arguments), "-ldl", "-o", str(output)], check=True)
    return output


def run(*command, ffi=FFI):
    environment = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
    environment |= {"LD_LIBRARY_PATH": str(ffi)} if ffi else {}
    return subprocess.run([*map(str, command)], capture_output=True, text=True, check=False, env=environment)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory):
    """The problem of the example, its manifest and the path of its library."""
    output = tmp_path_factory.mktemp("c")
    (layer,) = scan(EXAMPLES / "problem.json")
    made.export(output, [layer.problem])
    (manifest,) = td.load(output).manifests
    return layer.problem, manifest, output / manifest.library


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return compiled(tmp_path_factory.mktemp("plain") / "plain", "-std=c99", "-x", "c", EXAMPLES / "plain.c")


@pytest.fixture(scope="module")
def rust(tmp_path_factory):
    compiler = shutil.which("rustc")
    if compiler is None:
        pytest.skip("needs rustc")
    program = tmp_path_factory.mktemp("rust") / "deconv"
    source = ROOT / "examples" / "rust" / "main.rs"
    subprocess.run([compiler, "--edition", "2021", "-D", "warnings", "-o", str(program), str(source)], check=True)
    return program


@pytest.fixture(params=["plain", "rust"])
def program(request):
    """The example in C, and the same in Rust."""
    return request.getfixturevalue(request.param)


def elements(manifest):
    return int(np.prod(manifest.packed_shape))


@pytest.mark.parametrize("language", [("-x", "c", "-std=c99"), ("-x", "c", "-std=c11"), ("-x", "c++", "-std=c++11")])
def test_the_header_needs_nothing(tmp_path, language):
    source = tmp_path / "only.c"
    source.write_text("#include <tvm_deconv/artifact.h>\n")
    compiled(tmp_path / "only.o", *language, "-c", source)


def test_the_example(program, artifact):
    problem, manifest, library = artifact
    done = run(program, library, elements(manifest))
    assert done.returncode == 0, done.stderr
    data = (np.arange(4 * 5 * 6) % 7 - 3.0).reshape(problem.data_shape).astype(np.float32)
    filter = (np.arange(4 * 3 * 2 * 2) % 5 - 2.0).reshape(problem.filter_shape).astype(np.float32)
    expected = td.reference(problem, data, filter).ravel()
    assert float(done.stdout) == pytest.approx(float(expected @ (np.arange(expected.size) % 3 + 1)), rel=1e-5)


def no_library(path):
    path.write_bytes(b"no library")


def another(path):
    compiled(path, "-shared", "-fPIC", "-x", "c", EXAMPLES / "plain.c")


def missing(path):
    path.unlink()


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (no_library, "invalid ELF header|file too short"),
        (another, "no artifact for a CPU of this version"),
        (missing, "No such file"),
    ],
)
def test_what_is_no_artifact(program, artifact, tmp_path, spoil, said):
    path = tmp_path / "x.so"
    shutil.copy(artifact[2], path)
    spoil(path)
    done = run(program, path, 1)
    assert done.returncode == 1
    assert any(words in done.stderr for words in said.split("|")), done.stderr


def test_errors_of_calls_are_text(program, artifact):
    """The kernel checks the shapes that it gets."""
    done = run(program, artifact[2], elements(artifact[1]) + 1)
    assert done.returncode == 1
    assert "Error: " in done.stderr
    assert "packed" in done.stderr


def test_without_tvm_ffi(program, artifact):
    done = run(program, artifact[2], 1, ffi=None)
    assert done.returncode == 1
    assert "libtvm_ffi.so" in done.stderr
