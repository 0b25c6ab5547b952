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

from tvm_deconv.artifact import files
from tvm_deconv.artifact.locks import locked
from tvm_deconv.artifact.manifest import Manifest, stem_of
from tvm_deconv.errors import ManifestError

#: The contents of a directory of artifacts besides them: a lock and, while builds run, a directory for each.
_LOCK, _SCRATCH = ".lock", ".building-"


@contextlib.contextmanager
def scratch_folder(output: Path) -> Iterator[Path]:
    """Make a directory for one build in `output`; remove those of builds that were killed, which nobody locks."""
    output.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as held:
        with locked(output / _LOCK):
            _remove_scratch(output)
            scratch = Path(tempfile.mkdtemp(prefix=_SCRATCH, dir=output))
            held.enter_context(locked(scratch / _LOCK))
        try:
            yield scratch
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def _remove_scratch(output: Path) -> list[Path]:
    """Remove the directories of builds that were killed, and return their paths; the caller holds the lock.

    A directory may be locked, or vanish on the way: its build runs, or ends.
    """
    removed = []
    for left in sorted(output.glob(f"{_SCRATCH}*")):
        with contextlib.suppress(BlockingIOError, FileNotFoundError), locked(left / _LOCK, wait=False):
            shutil.rmtree(left, ignore_errors=True)
            removed.append(left)
    return removed


def give_up(output: Path) -> None:
    """Remove what builds that were just killed left in `output`."""
    with locked(output / _LOCK):
        _remove_scratch(output)


def clean(output: Path) -> list[Path]:
    """Remove from a directory of artifacts what nothing can use, and return the paths.

    That is: what killed builds left, manifests that do not read or that name a library that is not there, and
    libraries that no manifest names. Artifacts that another version of the format describes stay.
    """
    with locked(output / _LOCK):
        removed = _remove_scratch(output) + files.abandoned(output)
        kept, stems = set[str](), set[str]()
        ours = [path for path in sorted(output.iterdir()) if stem_of(path.name)]
        for path in ours:
            if path.suffix == ".json":
                try:
                    library = Manifest.read(path).library
                    if (output / library).exists():
                        kept |= {path.name, library}
                except ManifestError as error:
                    if error.attribute == "format" and isinstance(error.value, int):
                        stems.add(path.stem)
        removed += [path for path in ours if path.name not in kept and stem_of(path.name) not in stems]
        for path in removed:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
    return removed


def publish(output: Path, manifest: Manifest, library: Path, scratch: Path) -> None:
    """Move `library` and its manifest into place: the rename of the manifest replaces the artifact before it."""
    described = scratch / f"{manifest.name}.json"
    described.write_text(manifest.to_json(), encoding="utf-8")
    _flush(library)
    _flush(described)
    # Of two builders of one artifact, the late one must not remove the library that the other's manifest names.
    with locked(output / _LOCK):
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
