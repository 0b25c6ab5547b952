"""An artifact that was built here runs on Debian 11, with glibc 2.31: a program in C is compiled there and loads it."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import tvm_ffi

import tvm_deconv as td
from tvm_deconv.frontends import scan

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "cpp"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("debootstrap"), reason="needs root and debootstrap"),
]


def test_debian_11(tmp_path):
    system, here = tmp_path / "system", tmp_path / "artifacts"
    bootstrap = ["debootstrap", "--variant=minbase", "--include=gcc,libc6-dev", "bullseye", str(system)]
    subprocess.run(bootstrap, check=True)
    (layer,) = scan(EXAMPLES / "problem.json")
    (outcome,) = td.compile([layer.problem], "x86-64-v3", here, jobs=1)
    shutil.copy(here / outcome.manifest.library, system / "artifact.so")
    shutil.copy(tvm_ffi.libinfo.find_libtvm_ffi(), system / "usr/lib/libtvm_ffi.so")
    shutil.copy(EXAMPLES / "plain.c", system)
    shutil.copytree(ROOT / "include" / "tvm_deconv", system / "usr/include/tvm_deconv")

    def within(*command):
        return subprocess.run(["chroot", str(system), *command], check=True, capture_output=True, text=True).stdout

    assert "2.31" in within("ldd", "--version")
    within("gcc", "-std=c99", "-Wall", "-Wextra", "-Werror", "plain.c", "-ldl", "-o", "plain")
    (elements,) = outcome.manifest.packed_shape
    said = within("./plain", "./artifact.so", str(elements))
    program = tmp_path / "plain"
    command = ["gcc", "-std=c99", f"-I{ROOT / 'include'}", str(EXAMPLES / "plain.c"), "-ldl", "-o", str(program)]
    subprocess.run(command, check=True)
    environment = os.environ | {"LD_LIBRARY_PATH": str(Path(tvm_ffi.libinfo.find_libtvm_ffi()).parent)}
    arguments = [str(program), str(here / outcome.manifest.library), str(elements)]
    assert said == subprocess.run(arguments, env=environment, check=True, capture_output=True, text=True).stdout
