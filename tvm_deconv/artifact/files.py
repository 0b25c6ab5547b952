"""Files: reading those of an artifact, which anybody may have written, and replacing a file at once.

What is read may lie in an archive of `artifact.pack`: a member's path is that of the archive, a slash and its name.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, TypeVar

from tvm_deconv.artifact import pack
from tvm_deconv.artifact.regular import CAREFUL
from tvm_deconv.errors import ArtifactError

T = TypeVar("T")
#: How the names of our folders among the temporary files of the system begin.
TEMPORARY = "tvm_deconv-"
_UNFINISHED = ".unfinished-"
_ABANDONED_SECONDS = 3600.0  # after which a file that is not finished never will be


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """Make a folder among the temporary files of the system, and remove it at the end."""
    import tempfile  # which imports every way to compress

    with tempfile.TemporaryDirectory(prefix=TEMPORARY) as folder:
        yield Path(folder)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Give an OSError the name `path` if it has none, as on a full disk, or that of an unfinished file."""
    try:
        yield
    except OSError as error:
        if error.filename is None or _UNFINISHED in str(error.filename):
            error.filename = str(path)
        raise


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield the path of an unfinished file, which replaces the file at `path` at the end, at once.

    It has the same name and lies in a new directory beside `path`; it gets the permissions of the old file, if there is
    one. After an error, which names `path`, the old file is as it was. What killed processes left beside it is removed.
    """
    import shutil
    import tempfile  # which import every way to compress

    for left in abandoned(path.parent):
        shutil.rmtree(left, ignore_errors=True)
    with naming(path):
        unfinished = Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=path.parent)) / path.name
        try:
            yield unfinished
            with contextlib.suppress(FileNotFoundError):
                unfinished.chmod(stat.S_IMODE(path.stat().st_mode))
            unfinished.replace(path)
        finally:  # not by shutil.rmtree: interrupted, it may close a descriptor twice, which may be another's by then
            for left in unfinished.parent.iterdir():
                left.unlink()
            unfinished.parent.rmdir()


def abandoned(directory: Path) -> list[Path]:
    """Return the paths of unfinished files in `directory` that nobody will finish: those of killed processes."""
    old = time.time() - _ABANDONED_SECONDS
    found = []
    for path in sorted(directory.glob(f"{_UNFINISHED}*")):
        with contextlib.suppress(FileNotFoundError):  # another writer has ended meanwhile
            if path.lstat().st_mtime < old:
                found.append(path)
    return found


def write(path: Path, content: bytes) -> None:
    """Replace the file at `path` by one with this `content`, at once."""
    with replacing(path) as unfinished:
        unfinished.write_bytes(content)


def read(
    path: Path,
    limit: int,
    kind: type[ArtifactError],
    kind_of_intruder: type[ArtifactError],
    *,
    private: bool = False,
) -> tuple[bytes, int]:
    """Return the first `limit` bytes of the file at `path`, and its size.

    Raises `kind` if it cannot be read, and `kind_of_intruder` if it is not a regular file or is a link that leaves the
    directory of `path`. Links within are followed. A `private` file must be this user's, and nobody else's to write.
    """

    def content(file: BinaryIO, size: int) -> tuple[bytes, int]:
        if private and (fault := fault_of_owner(os.fstat(file.fileno()))):
            raise kind_of_intruder(path, fault)
        # At most the size: a buffer of the limit would cost more than all the rest.
        count = min(limit, size)
        try:
            return file.read(count), size
        except MemoryError:
            raise kind(path, f"must fit in memory: {count} bytes") from None

    return _read(path, kind, kind_of_intruder, content)


def fault_of_owner(status: os.stat_result) -> str | None:
    """Return the rule that a file or directory breaks if another user owns it or may write to it, else None."""
    if status.st_uid != os.geteuid():
        return f"must belong to the user {os.geteuid()}, who runs this, not to {status.st_uid}"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"must be writable by its owner alone, not of mode {stat.S_IMODE(status.st_mode):o}"
    return None


def names(root: Path) -> list[str]:
    """Return the names in the directory, or the archive, at `root`, sorted. Raises ArtifactError."""
    try:
        return sorted([path.name for path in root.iterdir()] if root.is_dir() else pack.names(root))
    except OSError as error:
        rule = f"must be a directory of artifacts, or a file that packs one: {error.strerror}"
    except ValueError as error:  # also of a null character in the path
        rule = f"must be a directory of artifacts, or a whole file that tvm-deconv pack wrote, but {error}"
    raise ArtifactError(root, rule)


def weights(root: Path) -> list[Path]:
    """Return the paths of the files of weights in the directory, or the archive, at `root`. Raises ArtifactError."""
    return [root / name for name in names(root) if name.endswith(".safetensors")]


def sha256(path: Path, kind: type[ArtifactError]) -> str:
    """Return the SHA-256 of a file of any size, as hexadecimal digits. Raises `kind` if it cannot be read."""

    def digest(file: BinaryIO, _: int) -> str:
        hashed = hashlib.sha256()
        while part := file.read(1 << 20):
            hashed.update(part)
        return hashed.hexdigest()

    return _read(path, kind, kind, digest)


def _read(
    path: Path,
    kind: type[ArtifactError],
    kind_of_intruder: type[ArtifactError],
    use: Callable[[BinaryIO, int], T],
) -> T:
    """Return the result of `use` on the open file at `path` and its size. Raises as `read` does."""
    flags = os.O_RDONLY | CAREFUL
    leaves = False
    try:
        try:
            descriptor = os.open(path, flags | os.O_NOFOLLOW)
        except OSError as error:
            if error.errno == errno.ENOTDIR:
                return pack.read(path.parent, path.name, use)
            if error.errno != errno.ELOOP:
                raise
            leaves = not path.resolve().is_relative_to(path.parent.resolve())
            descriptor = os.open(path, flags)
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(file.fileno())
            result = use(file, status.st_size) if stat.S_ISREG(status.st_mode) else None
    except pack.PackError as error:
        rule = f"must be a member of a whole file that tvm-deconv pack wrote, but {error}"
        raise kind_of_intruder(path, rule) from None
    except (OSError, RuntimeError, ValueError) as error:
        # RuntimeError: links in a circle, before Python 3.13; ValueError: a null character in a name.
        raise kind(path, f"must be readable: {error}") from None
    if leaves:
        raise kind_of_intruder(path, f"must not be a link that leaves {path.parent}")
    if result is None:
        raise kind_of_intruder(path, "must be a regular file")
    return result
