"""The launcher: a C source that every artifact is linked with, so that it needs no TVM runtime library.

`docs/launcher.md` describes it and its cost.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from tvm_deconv.artifact import files
from tvm_deconv.compiler.toolchain import run_compiler
from tvm_deconv.errors import CompilerNotFound

SOURCE = Path(__file__).with_name("launcher.c")
FLAGS = ("-std=gnu11", "-O2", "-fPIC", "-fvisibility=hidden", "-pthread", "-Wall", "-Wextra")
COMPILERS = ("g++", "c++", "clang++", "gcc", "cc")


def find_compiler() -> str:
    """Return the compiler driver: `CXX` if that is set, else the first of `COMPILERS` on `PATH`.

    `CXX` is the name or path of one program: options in it would change the code of artifacts. Raises CompilerNotFound.
    """
    wanted = os.environ.get("CXX")
    for name in (wanted,) if wanted else COMPILERS:
        compiler = shutil.which(name)
        if compiler:
            return compiler
    if wanted:
        rule = "no such program; set CXX to the path of a C++ compiler, with no other words, or unset it"
        raise CompilerNotFound("CXX", wanted, rule)
    tried = ", ".join(COMPILERS)
    path = os.environ.get("PATH", "")
    raise CompilerNotFound("PATH", path, f"no C++ compiler here ({tried}); install g++ or set CXX to one")


def launcher_object(cc: str, out_dir: Path) -> Path:
    """Compile the launcher with `cc` to `out_dir/launcher.o`, an addon for `export_library`; return its path.

    Raises BuildError, CompilerNotFound.
    """
    target = out_dir / "launcher.o"
    with files.replacing(target) as made:
        command = [cc, "-x", "c", *FLAGS, "-c", str(SOURCE), "-o", str(made)]
        run_compiler("cc", command, "the launcher does not compile:\n")
    return target
