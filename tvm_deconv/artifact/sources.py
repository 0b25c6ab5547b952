"""A digest of the source text that decides an artifact, computed without TVM.

The compiler puts it into recipes. The runtime names the user's cache by it, so that an artifact built from other
sources is not found there.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

from tvm_deconv.artifact import regular

#: The packages that a build reads, below `tvm_deconv`.
PACKAGES = ("problem", "targets", "compute", "schedules", "compiler")
#: The modules that decide the content of a manifest.
_MANIFEST = tuple(Path(__file__).with_name(name) for name in ("manifest.py", "needs.py", "elf.py"))
_VERSIONS = ("tvm_deconv", "apache-tvm", "apache-tvm-ffi")


def files_of(packages: Sequence[str], suffixes: Sequence[str] = ()) -> list[Path]:
    """Return the files of `packages`, sorted within each, by default of every suffix; nothing is imported for it.

    Raises ModuleNotFoundError for a name that is no package of this one.
    """
    found: list[Path] = []
    for package in packages:
        spec = importlib.util.find_spec(name := f"tvm_deconv.{package}")
        if spec is None or not spec.submodule_search_locations:
            raise ModuleNotFoundError(f"{name} is not a package", name=name)
        for folder in spec.submodule_search_locations:
            every = (path for path in sorted(Path(folder).rglob("*")) if path.is_file() and path.suffix != ".pyc")
            found += [path for path in every if not suffixes or path.suffix in suffixes]
    return found


def digest_of(paths: Iterable[Path]) -> str:
    """Return the sha256 of the names and contents of `paths`, in their order. Raises OSError."""
    digest = hashlib.sha256()
    for path in paths:
        content = regular.content_of(path, regular.MOST_TEXT)
        digest.update(f"{path.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()


@cache
def source_digest() -> str:
    """Return the digest of the text that decides the bytes of an artifact and its manifest."""
    return digest_of([*files_of(PACKAGES), *_MANIFEST])


@cache
def cache_stamp() -> str:
    """Return the name of a directory of artifacts that are all built by this installation, for people and programs.

    It changes with the versions of this package and of TVM, the source text and the installed tuning logs. Nothing
    but files is read, about a megabyte, once per process. The version of nvcc is left out: an artifact of another nvcc
    is still right. Raises PackageNotFoundError if TVM is not installed.
    """
    from importlib.metadata import version

    versions = [version(package) for package in _VERSIONS]
    deciding = repr((versions, source_digest(), digest_of(files_of(["tuning_logs"], [".jsonl"]))))
    return f"{versions[0]}-tvm-{versions[1]}-{hashlib.sha256(deciding.encode()).hexdigest()[:16]}"
