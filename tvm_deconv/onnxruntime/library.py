"""The shared library of the operator. `tvm-deconv compile` puts it beside the artifacts of ONNX models.

As with artifacts, the digest of its content is part of its name, and the bytes that were checked are those that are
loaded. Nothing here needs ONNX Runtime: its interface is that of the header beside this file.
"""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path

from tvm_deconv.artifact import files
from tvm_deconv.errors import ArtifactError
from tvm_deconv.runtime import facts

_SOURCES = [Path(__file__).with_name("operator.c"), facts.SOURCE]
_HEADERS = [Path(__file__).with_name("onnxruntime_c_api.h"), facts.HEADER]
_MOST_BYTES = 1 << 20


def _stem() -> str:
    """Return the beginning of the library's file name: a digest of its sources is part of it.

    As in artifacts, the interface of tvm_ffi is the same in all versions of that package.
    """
    sources = b"".join(path.read_bytes() for path in (*_SOURCES, *_HEADERS))
    return f"tvm_deconv_operators.{hashlib.sha256(sources).hexdigest()[:16]}"


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
    from tvm_deconv.compiler.shared import shared_library

    return shared_library(_SOURCES, [], "the operator of ONNX Runtime")
