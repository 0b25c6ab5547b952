"""One file to deploy: what a directory of artifacts holds, in an archive that is read where it lies.

The format is zip, without compression: manifests first, then the signature, the libraries, the files of weights.
The comment of the archive says that it is one of these, and of which format. Nothing is ever unpacked to a disk.
"""

from __future__ import annotations

import errno
import io
import os
import re
import shutil
import stat
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

from tvm_deconv.artifact.regular import CAREFUL, opener

T = TypeVar("T")
SUFFIX = ".tdl"
FORMAT = 1

_COMMENT = re.compile(rb"tvm_deconv artifacts, format (\d{1,9})")
_LOCAL_HEADER = struct.Struct("<4s22xHH")
_MAGIC = b"PK\3\4"
_ENCRYPTED = 1  # a flag of a member
_PLAIN = re.compile(r"[^/\\\0]+")
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the first that the format knows: equal directories make equal files
_MOST_KEPT = 16  # tables of archives
_MOST_TABLE = 1 << 24  # bytes: of 50 000 artifacts


class PackError(ValueError):
    """An archive that is not one of these, or is not whole."""


class _Member(NamedTuple):
    header: int
    size: int
    crc: int


_tables: dict[tuple[int, ...], Mapping[str, _Member]] = {}


def names(path: Path) -> list[str]:
    """Return the names of the members of the archive at `path`, in their order. Raises PackError, OSError."""
    return _open(path, lambda _, members: list(members))


def read(path: Path, name: str, use: Callable[[BinaryIO, int], T]) -> T:
    """Return the result of `use` on the member called `name`, as a file, and its size. Raises PackError, OSError."""

    def part(file: io.BufferedReader, members: Mapping[str, _Member]) -> T:
        if name not in members:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
        member = members[name]
        return use(io.BufferedReader(_Part(file, member)), member.size)

    return _open(path, part)


def write(path: Path, root: Path, members: Sequence[str]) -> None:
    """Write the archive `path` of those files of the directory `root`, in this order. Raises OSError."""
    import zipfile  # which is not quick to import

    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.comment = f"tvm_deconv artifacts, format {FORMAT}".encode()
        for name in members:
            member = zipfile.ZipInfo(name, _EPOCH)
            member.create_system, member.external_attr = 3, (stat.S_IFREG | 0o644) << 16  # Unix
            with open(root / name, "rb", opener=opener) as source:
                member.file_size = os.fstat(source.fileno()).st_size
                with archive.open(member, "w") as target:
                    shutil.copyfileobj(source, target, 1 << 20)


def _open(path: Path, use: Callable[[io.BufferedReader, Mapping[str, _Member]], T]) -> T:
    """Return the result of `use` on the open file at `path` and its members."""
    with _Archive(io.FileIO(os.open(path, os.O_RDONLY | CAREFUL))) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise PackError("it is not a regular file")
        identity = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
        members = _tables.get(identity)
        if members is None:
            members = _members(file)
            if len(_tables) >= _MOST_KEPT:
                _tables.clear()
            _tables[identity] = members
        return use(file, members)


def _members(file: io.BufferedReader) -> Mapping[str, _Member]:
    """Return the members of the archive `file`, in their order."""
    import zipfile

    if file.read(len(_MAGIC)) != _MAGIC:
        raise PackError("it does not begin as one")
    try:
        with zipfile.ZipFile(file) as archive:
            _check_format(archive.comment)
            infos, end = archive.filelist, os.fstat(file.fileno()).st_size
            members = {info.filename: _Member(info.header_offset, info.file_size, info.CRC) for info in infos}
            for info in infos:
                if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & _ENCRYPTED:
                    raise PackError(f"its member {info.filename!r} is compressed or encrypted")
                if not _PLAIN.fullmatch(info.filename):
                    raise PackError(f"its member {info.filename!r} is not a plain file name")
                if info.header_offset + info.file_size > end:
                    raise PackError(f"its member {info.filename!r} goes beyond its end")
    except PackError:
        raise
    except (zipfile.BadZipFile, NotImplementedError, struct.error, ValueError, OverflowError, OSError) as error:
        raise PackError(f"it was truncated or is none: {error}") from None
    if len(members) != len(infos):
        raise PackError("two of its members have one name")
    return members


def _check_format(comment: bytes) -> None:
    match = _COMMENT.fullmatch(comment)
    if match is None:
        raise PackError("its comment does not say that it is one")
    if int(match[1]) != FORMAT:
        raise PackError(f"its format is {int(match[1])}, not {FORMAT}: another version wrote it")


class _Archive(io.BufferedReader):
    """An archive, whose table zipfile reads at once, of whatever size its end says that it is."""

    def read(self, size: int | None = -1, /) -> bytes:
        """Return `size` bytes. Raises PackError if they are more than a table may have."""
        if size is not None and size > _MOST_TABLE:
            raise PackError(f"its table has more than {_MOST_TABLE} bytes")
        return super().read(size)


class _Part(io.RawIOBase):
    """The bytes of one member, compared with their checksum once all are read."""

    def __init__(self, file: io.BufferedReader, member: _Member) -> None:
        file.seek(member.header)
        header = file.read(_LOCAL_HEADER.size)
        if len(header) != _LOCAL_HEADER.size or header[: len(_MAGIC)] != _MAGIC:
            raise PackError("it has no member where its table says")
        _, name_length, extra_length = _LOCAL_HEADER.unpack(header)
        file.seek(name_length + extra_length, os.SEEK_CUR)
        self._file = file
        self._left = member.size
        self._wanted, self._crc = member.crc, 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def fileno(self) -> int:
        """Return the descriptor of the archive."""
        return self._file.fileno()

    def readinto(self, buffer: Any) -> int:
        """Read into `buffer`; return the number of bytes, 0 at the end."""
        view = memoryview(buffer)[: self._left]
        count = self._file.readinto(view) if self._left else 0
        if self._left and not count:
            raise PackError("it ends within a member")
        self._left -= count
        self._crc = zlib.crc32(view[:count], self._crc)
        if not self._left and self._crc != self._wanted:
            raise PackError("the bytes of a member are not those that were written")
        return count
