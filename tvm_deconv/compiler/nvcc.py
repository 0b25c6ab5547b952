"""nvcc: its place, its call, and the resources of kernels that ptxas reports."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tvm_ffi

from tvm_deconv.compiler.launcher import find_compiler
from tvm_deconv.compiler.toolchain import run_compiler, version_text
from tvm_deconv.errors import CompilerNotFound
from tvm_deconv.extras import install
from tvm_deconv.targets import Capability, CudaTarget

#: The place of nvcc in NVIDIA's packages for Python, below site-packages: CUDA 13, CUDA 12.
_IN_PACKAGES = ("nvidia/cu*/bin/nvcc", "nvidia/cuda_nvcc/bin/nvcc")

#: Bytes that a kernel may spill and read again: a few registers, which cost nothing that an H100 showed.
MOST_SPILLED = 256

#: IEEE arithmetic, the CUDA runtime inside without its table of symbols, and a report of resources.
FLAGS = (
    *("-shared", "-O3", "-std=c++17", "-w", "-Xcompiler", "-fPIC,-fvisibility=hidden"),
    *("-Xlinker", "--no-as-needed", "-cudart", "static", "-Xlinker", "-s", "-Xptxas", "-v"),
)

#: In front of each source: it makes string streams itself, since older C++ libraries lack a constructor of newer ones.
_PRELUDE = """#include <istream>
#undef _GLIBCXX_EXTERN_TEMPLATE
#define _GLIBCXX_EXTERN_TEMPLATE 0
#include <sstream>
#undef _GLIBCXX_EXTERN_TEMPLATE
#define _GLIBCXX_EXTERN_TEMPLATE 1
"""

#: Where the host's part of a source begins.
HOST = "#include <tvm/ffi"

_KERNEL = re.compile(r"Compiling entry function '(\w+)' for '(\w+)'")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers(?:.*?(\d+) bytes smem)?")


@dataclass(frozen=True)
class Resources:
    """The resources of one kernel on one architecture: registers of a thread; bytes of shared memory, stack, spills."""

    kernel: str
    architecture: str
    registers: int
    shared_bytes: int
    stack_bytes: int
    spill_bytes: int

    def blocks(self, threads: int) -> int:
        """Return the number of blocks of `threads` threads that a multiprocessor of data centres' devices holds.

        It has 65536 registers, given to a warp in units of 256, 2048 threads, and 164 KiB of shared memory for
        blocks, 228 KiB on 9.0, 1 KiB of which each block loses.
        """
        warps = -(-threads // 32)
        by_registers = 65536 // (-(-self.registers * 32 // 256) * 256) // warps
        shared = (228 if self.architecture.startswith("sm_90") else 164) << 10
        return min(by_registers, 2048 // threads, shared // (self.shared_bytes + 1024), 32)


@functools.cache
def find_nvcc() -> str:
    """Return the path of nvcc: that of ``NVCC``, on PATH, or of the Python packages. Raises CompilerNotFound."""
    wanted = os.environ.get("NVCC", "nvcc")
    path = shutil.which(wanted)
    if path:
        return path
    for folder in dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib")):
        for pattern in _IN_PACKAGES:
            for packaged in sorted(Path(folder).glob(pattern), reverse=True):
                return str(packaged)
    raise CompilerNotFound("nvcc", wanted, f"was not found on PATH; install it: {install('cuda')}")


@functools.cache
def version(nvcc: str) -> str:
    """Return the release of `nvcc`."""
    printed = version_text(nvcc)
    release = re.search(r"release [\d.]+, V([\d.]+)", printed)
    return release[1] if release else printed.strip()


@functools.cache
def known_code(nvcc: str) -> frozenset[Capability]:
    """Return the compute capabilities that `nvcc` makes machine code for."""
    listed = subprocess.run([nvcc, "--list-gpu-code"], capture_output=True, text=True, check=False).stdout
    return frozenset((int(major), int(minor)) for major, minor in re.findall(r"\bsm_(\d+)(\d)\b", listed))


def options(target: CudaTarget, nvcc: str) -> list[str]:
    """Return the options of `nvcc` for the devices of `target`.

    An older nvcc does not know the newest devices. If the target has PTX, they run that.
    """
    known = known_code(nvcc) if target.ptx else target.code
    made = [("sm", *code) for code in target.code if code in known] + [("compute", *code) for code in target.ptx]
    own = "a" if target.own else ""
    return [f"-gencode=arch=compute_{major}{minor}{own},code={kind}_{major}{minor}{own}" for kind, major, minor in made]


def compile_library(
    source: str, path: Path, target: CudaTarget, nvcc: str | None = None, stubs: Sequence[Path] = ()
) -> list[Resources]:
    """Compile the CUDA C++ translation unit `source` to the shared library `path`, for all devices of `target`.

    It needs no library but libtvm_ffi and those of C and C++, since the CUDA runtime is linked into it; `stubs` come
    before the system's libraries. Arithmetic is that of IEEE 754: no fast-math. Return the resources of each kernel.
    Raises BuildError, CompilerNotFound.
    """
    nvcc = nvcc or find_nvcc()
    text = path.with_suffix(".cu")
    kernels, include, host = source.partition(HOST)
    text.write_text(_for_host(_PRELUDE) + kernels + _for_host(include + host), encoding="utf-8")
    ffi = Path(tvm_ffi.__file__).parent
    root = Path(nvcc).resolve().parent.parent
    command = [nvcc, *FLAGS, "-ccbin", find_compiler(), f"-L{root / 'lib'}"]
    command += options(target, nvcc)
    command += [f"-I{ffi / 'include'}", str(text), *map(str, stubs), "-o", str(path), f"-L{ffi / 'lib'}", "-ltvm_ffi"]
    try:
        return parse_resources(run_compiler("nvcc", command, f"failed for {target.name}: "))
    finally:
        text.unlink()


def _for_host(text: str) -> str:
    """Return `text` as only the host's compiler sees it: its headers take longer than most kernels, for each device."""
    return f"#ifndef __CUDA_ARCH__\n{text}#endif\n"


def parse_resources(said: str) -> list[Resources]:
    """Parse the messages of ``ptxas -v``."""
    resources = []
    kernel, stack = ("", ""), (0, 0, 0)
    for line in said.splitlines():
        if match := _KERNEL.search(line):
            kernel = match[1], match[2]
        elif match := _STACK.search(line):
            stack = int(match[1]), int(match[2]), int(match[3])
        elif match := _USED.search(line):
            registers, shared = int(match[1]), int(match[2] or 0)
            resources.append(Resources(*kernel, registers, shared, stack[0], stack[1] + stack[2]))
    return resources
