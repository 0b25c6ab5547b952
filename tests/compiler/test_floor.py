"""Libraries are linked against old versions of the C library's functions, so that they run on older systems."""

import dataclasses
import os
import shutil
import subprocess

import pytest
from support import artifacts as made

import tvm_deconv as td
from tvm_deconv.artifact import elf, needs
from tvm_deconv.artifact.manifest import Manifest
from tvm_deconv.compiler import build, floor
from tvm_deconv.compiler.launcher import find_compiler
from tvm_deconv.errors import BuildError
from tvm_deconv.targets import get

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
