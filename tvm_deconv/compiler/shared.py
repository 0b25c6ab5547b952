"""Small shared libraries in C through which frameworks call artifacts."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from tvm_deconv.artifact.ffi import import_tvm_ffi
from tvm_deconv.compiler.launcher import FLAGS, find_compiler
from tvm_deconv.compiler.toolchain import run_compiler


def shared_library(source: Path, includes: Sequence[str], what: str) -> bytes:
    """Return the shared library of a C `source` that uses tvm_ffi, compiled now.

    `includes` are further directories of headers, `what` names the library in errors. Raises CompilerNotFound,
    BuildError.
    """
    ffi, compiler = import_tvm_ffi().libinfo, find_compiler()
    places = dict.fromkeys((ffi.find_include_path(), ffi.find_dlpack_include_path(), *includes))
    command = [compiler, "-x", "c", *FLAGS, "-shared", *(f"-I{place}" for place in places), str(source)]
    with tempfile.TemporaryDirectory(prefix="tvm_deconv-") as folder:
        made = Path(folder) / "library.so"
        command += ["-x", "none", ffi.find_libtvm_ffi(), "-o", str(made)]
        run_compiler("cc", command, f"{what} does not compile:\n")
        return made.read_bytes()
