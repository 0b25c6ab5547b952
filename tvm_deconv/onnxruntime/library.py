"""The shared library of the operator. `tvm-deconv compile` puts it beside the artifacts of ONNX models.

As with artifacts, the digest of its content is part of its name, and the bytes that were checked are those that are
loaded. Nothing here needs ONNX Runtime: its interface is that of the header beside this file.
"""

from __future__ import annotations

import contextlib
import hashlib
import tempfile
from pathlib import Path

from tvm_deconv.artifact import files
from tvm_deconv.artifact.ffi import import_tvm_ffi
from tvm_deconv.errors import ArtifactError

_SOURCES = [Path(__file__).with_name(name) for name in ("operator.c", "onnxruntime_c_api.h")]
_MOST_BYTES = 1 << 20
_FLAGS = ("-std=gnu11", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread", "-Wall", "-Wextra")


def _stem() -> str:
    """Return the beginning of the library's file name: a digest of its sources is part of it.

    As in artifacts, the interface of tvm_ffi is the same in all versions of that package.
    """
    parts = [*(path.read_bytes() for path in _SOURCES), repr(_FLAGS).encode()]
    return f"tvm_deconv_operators.{hashlib.sha256(b''.join(parts)).hexdigest()[:16]}"


def _name(content: bytes) -> str:
    return f"{_stem()}.{hashlib.sha256(content).hexdigest()[:16]}.so"


def read(folder: Path) -> bytes | None:
    """Return the library of this version in `folder`, if there is one whose name has the digest of its content."""
    for path in sorted(folder.glob(f"{_stem()}.*.so")):
        with contextlib.suppress(ArtifactError):
            content, _ = files.read(path, _MOST_BYTES, ArtifactError, ArtifactError)
            if path.name == _name(content):
                return content
    return None


def write(folder: Path) -> Path:
    """Compile the library into `folder`, unless it is there, and return its path.

    Raises CompilerNotFound, BuildError.
    """
    content = read(folder)
    if content is None:
        content = compiled()
        files.write(folder / _name(content), content)
    return folder / _name(content)


def compiled() -> bytes:
    """Return the library, compiled now. Raises CompilerNotFound, BuildError."""
    from tvm_deconv.compiler.launcher import find_compiler
    from tvm_deconv.compiler.toolchain import run_compiler

    ffi, compiler = import_tvm_ffi().libinfo, find_compiler()
    includes = [f"-I{place}" for place in dict.fromkeys((ffi.find_include_path(), ffi.find_dlpack_include_path()))]
    command = [compiler, "-x", "c", *_FLAGS, *includes, str(_SOURCES[0]), "-x", "none", ffi.find_libtvm_ffi()]
    with tempfile.TemporaryDirectory(prefix="tvm_deconv-") as folder:
        made = Path(folder) / "operators.so"
        run_compiler("cc", [*command, "-o", str(made)], "the operator of ONNX Runtime does not compile:\n")
        return made.read_bytes()
