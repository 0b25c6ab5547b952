"""Small shared libraries in C and C++ through which frameworks call artifacts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tvm_deconv.artifact.ffi import import_tvm_ffi
from tvm_deconv.artifact.files import temporary_folder
from tvm_deconv.compiler.launcher import FLAGS, find_compiler
from tvm_deconv.compiler.toolchain import run_compiler

#: What the compiler calls a language, and the dialect.
_LANGUAGES = {".c": ("c", FLAGS), ".cpp": ("c++", ("-std=gnu++17", *FLAGS[1:]))}


def shared_library(sources: Sequence[Path], includes: Sequence[str], what: str, needed: Sequence[str] = ()) -> bytes:
    """Return the shared library of `sources` that use tvm_ffi, compiled now.

    `includes` are further directories of headers, `needed` further libraries that it is linked with, and `what` names
    it in errors. Raises CompilerNotFound, BuildError.
    """
    ffi, compiler = import_tvm_ffi().libinfo, find_compiler()
    places = dict.fromkeys((ffi.find_include_path(), ffi.find_dlpack_include_path(), *includes))
    with temporary_folder() as folder:
        objects = []
        for source in sources:
            language, flags = _LANGUAGES[source.suffix]
            objects.append(str(folder / f"{source.name}.o"))
            command = [compiler, "-x", language, *flags, *(f"-I{place}" for place in places), "-c", str(source)]
            run_compiler("cc", [*command, "-o", objects[-1]], f"{what} does not compile:\n")
        made = folder / "library.so"
        command = [compiler, "-shared", "-pthread", *objects, ffi.find_libtvm_ffi(), *needed, "-o", str(made)]
        run_compiler("cc", command, f"{what} cannot be linked:\n")
        return made.read_bytes()
