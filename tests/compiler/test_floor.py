"""Libraries are linked against old versions of the C library's functions, so that they run on older systems."""

import dataclasses
import math
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from support import artifacts as made

import tvm_deconv as td
from tvm_deconv.artifact import elf, needs
from tvm_deconv.artifact.manifest import Manifest
from tvm_deconv.compiler import build, floor
from tvm_deconv.compiler.backends import x86
from tvm_deconv.compiler.launcher import find_compiler
from tvm_deconv.compiler.toolchain import direct_linker, run_compiler
from tvm_deconv.errors import BuildError
from tvm_deconv.frontends import scan
from tvm_deconv.targets import get

ROOT = Path(__file__).parents[2]
#: Functions whose newest version, on this machine, is newer than the floor: a thread's, and one of mathematics.
SOURCE = """
#include <math.h>
#include <pthread.h>
int begin(pthread_t *thread, void *(*run)(void *)) { return pthread_create(thread, 0, run, 0); }
double power(double x, double y) { return pow(x, y) + erf(x); }
"""


@pytest.fixture(scope="module")
def stubs(tmp_path_factory):
    return floor.stubs(find_compiler(), tmp_path_factory.mktemp("stubs"))


def linked(folder, *libraries):
    """The versions that a library of SOURCE needs."""
    path = folder / "x.so"
    source = folder / "x.c"
    source.write_text(SOURCE)
    command = [find_compiler(), "-x", "c", "-shared", "-fPIC", str(source), "-x", "none", "-o", str(path)]
    subprocess.run([*command, *floor.FLAGS, *map(str, libraries), "-lm"], check=True)
    return elf.dynamic(path.read_bytes())


def test_old_versions_are_taken(stubs, tmp_path):
    with_stubs, without = linked(tmp_path, *stubs), linked(tmp_path)
    assert needs.beyond(needs.needed(without.versions), needs.FLOOR)  # or this machine is as old as the floor
    assert not needs.beyond(needs.needed(with_stubs.versions), needs.FLOOR)
    assert with_stubs.needed.count("libm.so.6") == 1
    assert "libpthread.so.0" in with_stubs.needed  # where older systems have pthread_create
    assert not {"libdl.so.2", "librt.so.1"} & set(with_stubs.needed)


def test_every_function_of_a_stub_is_one_of_this_machine(stubs, tmp_path):
    """A library that needs all of them loads."""
    names = [name for versions in floor._read().values() for version in versions.values() for name in version]
    source, path = tmp_path / "all.c", tmp_path / "all.so"
    source.write_text("".join(f"void {name}(void);\nvoid *p_{name} = {name};\n" for name in names))
    command = [find_compiler(), "-x", "c", "-w", "-fno-builtin", "-shared", "-fPIC", str(source), "-x", "none"]
    subprocess.run([*command, "-o", str(path), *floor.FLAGS, *map(str, stubs)], check=True)
    assert not needs.beyond(needs.needed(elf.dynamic(path.read_bytes()).versions), needs.FLOOR)
    python = shutil.which("python3")
    load = f"import ctypes, os; ctypes.CDLL({str(path)!r}, mode=os.RTLD_NOW)"
    subprocess.run([python, "-c", load], check=True, env=os.environ | {"LD_BIND_NOW": "1"})


def test_artifacts_run_on_old_systems(artifacts):
    """Those of all types, with every function that they call."""
    manifests = [Manifest.read(path) for path in artifacts.glob("*.json")]
    assert len(manifests) == len(made.PROBLEMS)
    for manifest in manifests:
        library = needs.needed(elf.dynamic((artifacts / manifest.library).read_bytes()).versions)
        assert set(library) == {"GLIBC"}
        assert not needs.beyond(library, needs.FLOOR)
        assert manifest.needs == library | {"tvm_ffi": needs.here()["tvm_ffi"]}


def test_mathematics_of_doubles_too(tmp_path):
    """They are the C library's: exp and its kind have new versions."""
    problem = made.PLAIN.replace(dtype="float64", epilogue=td.Epilogue(activation="gelu"))
    made.export(tmp_path, [problem])
    (manifest,) = td.load(tmp_path).manifests
    assert not needs.beyond(manifest.needs, needs.FLOOR)
    assert "libm.so.6" in elf.dynamic((tmp_path / manifest.library).read_bytes()).needed


def test_what_needs_a_newer_system_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(needs, "FLOOR", {"GLIBC": "2.4"})
    warnings = []
    made_here = build.export(made.PLAIN, get(made.TARGET), tmp_path, warnings=warnings)
    version = made_here.needs["GLIBC"]
    assert warnings == [f"{made_here.name}: needs GLIBC {version}, which systems of manylinux_2_28 lack"]


def test_a_linker_that_fails(tmp_path):
    toolchain = build.backend_of(get(made.TARGET)).toolchain(tmp_path)
    broken = dataclasses.replace(toolchain, launcher=tmp_path / "gone.o")
    with pytest.raises(BuildError, match=r"^cc='.*': the library does not link:"):
        build.export(made.PLAIN, get(made.TARGET), tmp_path / "out", toolchain=broken)
    assert not [path for path in (tmp_path / "out").iterdir() if path.suffix in (".so", ".json")]


# ---- libraries of trials ----


@pytest.mark.parametrize("told", [True, False], ids=["linker", "driver"])
@pytest.mark.parametrize(("dtype", "activation"), [("float64", "gelu"), ("float16", "tanh")])
def test_a_library_of_a_trial_is_linked_as_an_artifact_is(dtype, activation, told, tmp_path, monkeypatch):
    """By the linker itself if the driver tells which: with the same libraries, and the same versions of functions."""
    backend, target = build.backend_of(get(made.TARGET)), get(made.TARGET)
    toolchain = backend.toolchain(tmp_path)
    kernel = backend.build(made.PLAIN.replace(dtype=dtype, epilogue=td.Epilogue(activation=activation)), target)
    toolchain.compile(kernel, target, tmp_path / "artifact.so")
    tried = []

    def run(tool, command, failure):
        tried.append(command)
        return run_compiler(tool, command, failure)

    monkeypatch.setattr(x86, "run_compiler", run)
    if not told:
        monkeypatch.setattr(x86, "direct_linker", lambda _: ())
    toolchain.link(kernel.functions, target, tmp_path / "trial.so")
    assert (tried[0][0] == toolchain.cc) is not told
    artifact, trial = (elf.dynamic((tmp_path / name).read_bytes()) for name in ("artifact.so", "trial.so"))
    always = {"ld-linux-x86-64.so.2"}  # a driver names it too
    assert set(trial.needed) - always == set(artifact.needed) - always
    assert needs.needed(trial.versions) == needs.needed(artifact.versions)


def test_a_driver_that_does_not_tell_its_linker(tmp_path):
    silent = tmp_path / "cc"
    silent.write_text("#!/bin/sh\nexit 1\n")
    silent.chmod(0o755)
    assert direct_linker(str(silent)) == ()
    assert len(direct_linker(find_compiler())) == 4


def test_only_what_packs_for_a_trial_is_compiled_in_a_hurry(tmp_path):
    backend, target = build.backend_of(get(made.TARGET)), get(made.TARGET)
    toolchain = backend.toolchain(tmp_path)
    kernel = backend.build(made.PLAIN, target)

    def codes(name, function):
        hurried = toolchain.link({name: function}, target, tmp_path / "x.so").code
        return hurried, toolchain._link({name: function}, target.llvm, tmp_path / "y.so", [toolchain.cc]).code

    hurried, optimized = codes("pack", kernel.pack)
    assert hurried != optimized
    hurried, optimized = codes("deconv", kernel.deconv)
    assert hurried == optimized


# ---- an older system ----

#: What apt-get is told, so that it touches nothing of this system.
APT = """
Dir::Etc::sourcelist "{folder}/sources.list";
Dir::Etc::sourceparts "/dev/null";
Dir::State "{folder}";
Dir::State::status "{folder}/status";
Dir::Cache "{folder}";
APT::Sandbox::User "root";
"""


@pytest.fixture(scope="module")
def old_libraries(tmp_path_factory):
    """The folder with the C library of Debian 11, glibc 2.31, as its archive has it."""
    folder = tmp_path_factory.mktemp("debian")
    if not (shutil.which("apt-get") and shutil.which("dpkg")):
        pytest.skip("needs apt-get")
    (folder / "lists" / "partial").mkdir(parents=True)
    (folder / "archives" / "partial").mkdir(parents=True)
    (folder / "status").touch()
    key = "/usr/share/keyrings/debian-archive-keyring.gpg"
    (folder / "sources.list").write_text(f"deb [signed-by={key}] http://deb.debian.org/debian bullseye main\n")
    (folder / "apt.conf").write_text(APT.format(folder=folder))
    environment = os.environ | {"APT_CONFIG": str(folder / "apt.conf")}
    for command in (["apt-get", "update"], ["apt-get", "download", "libc6:amd64"]):
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
        if done.returncode:
            pytest.skip(f"the archive of Debian is not reached: {done.stderr}")
    (package,) = folder.glob("libc6_*.deb")
    subprocess.run(["dpkg", "-x", package, folder / "root"], check=True)
    return folder / "root" / "lib" / "x86_64-linux-gnu"


@pytest.mark.slow
@pytest.mark.parametrize("old", [True, False], ids=["with stubs", "without"])
def test_an_artifact_computes_on_an_older_system(old_libraries, stubs, tmp_path, old):
    """Without the stubs, one that is built on a newer system does not."""
    (layer,) = scan(ROOT / "examples" / "cpp" / "problem.json")
    toolchain = build.backend_of(get(made.TARGET)).toolchain(tmp_path)
    toolchain = toolchain if old else dataclasses.replace(toolchain, stubs=())
    manifest = build.export(layer.problem, get(made.TARGET), tmp_path, toolchain=toolchain)
    newer = bool(needs.beyond(manifest.needs, {"GLIBC": "2.31"}))
    assert not (old and newer)
    source, program = ROOT / "tests" / "support" / "old_system.c", tmp_path / "program"
    # The C library that a program starts with would be this machine's.
    flags = ["-x", "c", "-std=gnu11", "-nostdlib", "-rdynamic", f"-I{ROOT / 'include'}", str(source), "-x", "none"]
    subprocess.run(
        [find_compiler(), *flags, "-Wl,--no-as-needed", *map(str, stubs), "-lc", "-o", str(program)], check=True
    )
    environment = {"RUN_LIBRARY": str(tmp_path / manifest.library), "RUN_PACKED": str(math.prod(manifest.packed_shape))}
    command = [old_libraries / "ld-2.31.so", "--library-path", old_libraries, program]
    done = subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True, timeout=60)
    if newer:
        assert "not found (required by" in done.stdout
    else:
        data = (np.arange(4 * 5 * 6) % 7 - 3.0).reshape(layer.problem.data_shape).astype(np.float32)
        filter = (np.arange(4 * 3 * 2 * 2) % 5 - 2.0).reshape(layer.problem.filter_shape).astype(np.float32)
        expected = td.reference(layer.problem, data, filter).ravel()
        version, _, total = done.stdout.partition(": ")
        assert version == "glibc 2.31"
        assert float(total) == pytest.approx(float(expected @ (np.arange(expected.size) % 3 + 1)), rel=1e-5)
