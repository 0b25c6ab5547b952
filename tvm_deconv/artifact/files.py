"""Reading the files of an artifact, which anybody may have written."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, TypeVar

from tvm_deconv.errors import ArtifactError

T = TypeVar("T")


def read(path: Path, limit: int, kind: type[ArtifactError], kind_of_intruder: type[ArtifactError]) -> tuple[bytes, int]:
    """Return the first `limit` bytes of the file at `path`, and how many it has.

    Raises `kind` where it cannot be read, and `kind_of_intruder` where it is no regular file or a link that leaves the
    directory of `path`. Links within are followed.
    """
    # No more than there is: a buffer of the limit would cost more than all the rest.
    return _read(path, kind, kind_of_intruder, lambda file, size: (file.read(min(limit, size)), size))


def sha256(path: Path, kind: type[ArtifactError]) -> str:
    """Return the SHA-256 of a file of any size, as hexadecimal digits; raises `kind` where `read` does."""

    def digest(file: BinaryIO, _: int) -> str:
        found = hashlib.sha256()
        while part := file.read(1 << 20):
            found.update(part)
        return found.hexdigest()

    return _read(path, kind, kind, digest)


def _read(
    path: Path,
    kind: type[ArtifactError],
    kind_of_intruder: type[ArtifactError],
    use: Callable[[BinaryIO, int], T],
) -> T:
    """Return what `use` makes of the file at `path` and its size."""
    # Without O_NONBLOCK a named pipe would wait for a writer.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
    leaves = False
    try:
        try:
            descriptor = os.open(path, flags | os.O_NOFOLLOW)
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            leaves = not path.resolve().is_relative_to(path.parent.resolve())
            descriptor = os.open(path, flags)
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(file.fileno())
            found = use(file, status.st_size) if stat.S_ISREG(status.st_mode) else None
    except (OSError, RuntimeError, ValueError) as error:
        # RuntimeError: links in a circle, before Python 3.13; ValueError: a null character in a name.
        raise kind(path, f"must be readable: {error}") from None
    if leaves:
        raise kind_of_intruder(path, f"must not be a link that leaves {path.parent}")
    if found is None:
        raise kind_of_intruder(path, "must be a regular file")
    return found
