"""The directory that artifacts are built into: scratch space for each build, and the moment of publication.

An artifact is made in a directory of its own and moved into place: the library first, under a name that no other
content has, then the manifest, which replaces the one before it. A build that stops anywhere leaves the artifacts that
were there.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from tvm_deconv.artifact.manifest import Manifest, stem_of

#: The contents of a directory of artifacts besides them: a lock and, while builds run, a directory for each.
_LOCK, _SCRATCH = ".lock", ".building-"


@contextlib.contextmanager
def scratch_folder(output: Path) -> Iterator[Path]:
    """Make a directory for one build in `output`; remove those of builds that were killed, which nobody locks."""
    output.mkdir(parents=True, exist_ok=True)
    with FileLock(output / _LOCK):
        for left in output.glob(f"{_SCRATCH}*"):
            with contextlib.suppress(Timeout), FileLock(left / _LOCK, blocking=False):
                shutil.rmtree(left, ignore_errors=True)
        scratch = Path(tempfile.mkdtemp(prefix=_SCRATCH, dir=output))
        held = FileLock(scratch / _LOCK)
        held.acquire()
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        held.release()


def publish(output: Path, manifest: Manifest, library: Path, scratch: Path) -> None:
    """Move `library` and its manifest into place: the rename of the manifest replaces the artifact before it."""
    described = scratch / f"{manifest.name}.json"
    described.write_text(manifest.to_json(), encoding="utf-8")
    _flush(library)
    _flush(described)
    # Of two builders of one artifact, the late one must not remove the library that the other's manifest names.
    with FileLock(output / _LOCK):
        library.replace(output / manifest.library)
        described.replace(output / f"{manifest.name}.json")
        _flush(output)
        for path in output.iterdir():
            if path.suffix == ".so" and stem_of(path.name) == manifest.name and path.name != manifest.library:
                path.unlink()


def _flush(path: Path) -> None:
    """Wait until the disk holds the content of `path`."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
