"""Files that nobody vouches for: every fault is a SourceError, no offset leaves its file, and memory is bounded."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from tvm_deconv.artifact.regular import opener
from tvm_deconv.errors import SourceError
from tvm_deconv.frontends.packages import cast
from tvm_deconv.problem import Array

#: Most bytes of a file that is read as a whole: what a message of protobuf may have.
MOST_BYTES = 1 << 31
#: Most bytes of a text, whose tree in memory is ten times as large.
MOST_TEXT = 1 << 28
#: Most bytes of all constants of a source's layers together, with their casts and scaled copies.
_MOST_CONSTANTS = 1 << 32


@contextlib.contextmanager
def _regular(path: Path) -> Iterator[tuple[BinaryIO, int]]:
    """Yield the open file at `path` and its size. Raises SourceError, also for all that are no regular files."""
    try:
        with open(path, "rb", opener=opener) as file:
            yield file, os.fstat(file.fileno()).st_size
    except (OSError, ValueError, MemoryError) as error:  # ValueError: a null character in the path
        if isinstance(error, SourceError):
            raise
        why = getattr(error, "strerror", None) or str(error) or "there is no memory for it"
        raise SourceError("source", path, f"must be a file that can be read ({why})") from None


def read_bytes(path: Path, most: int) -> bytes:
    """Return the whole file, of at most `most` bytes."""
    with _regular(path) as (file, size):
        if size > most:
            raise SourceError("source", path, f"must have at most {most} bytes, not {size}")
        return file.read(size)


def check_regular(path: Path) -> None:
    """Check that there is a regular file at `path`, before another library opens it: a pipe would make that wait."""
    with _regular(path):
        pass


def from_bytes(content: bytes, dtype: np.dtype[Any], shape: tuple[int, ...], path: Path) -> Array:
    """Return little-endian bytes as an array; their number must be that of the shape."""
    if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != len(content):
        raise SourceError("shape", shape, f"must fit the {len(content)} bytes of the {dtype} constant in {path}")
    try:
        return np.frombuffer(content, dtype).reshape(shape)
    except ValueError as error:  # more axes than NumPy has, or too many elements of no bytes
        raise SourceError("shape", shape, f"must be one of an array, in {path}: {error}") from None


class Constants:
    """The constants of a source's layers. Layers that share one, or its cast, share one array."""

    def __init__(self, source: Path) -> None:
        self._source = source
        self._left = _MOST_CONSTANTS
        self._read: dict[tuple[object, ...], Array] = {}
        self._casts: dict[tuple[int, str], tuple[Array, Array]] = {}  # with the first array, whose id is the key

    def take(self, nbytes: int) -> None:
        """Count bytes that are about to be allocated. Raises SourceError if all together are too many."""
        self._left -= nbytes
        if self._left < 0:
            rule = f"must be at most {_MOST_CONSTANTS}, all constants of the layers and their scaled copies together"
            raise SourceError("bytes", _MOST_CONSTANTS - self._left, f"{rule} ({self._source})")

    def read(self, path: Path, dtype: np.dtype[Any], shape: tuple[int, ...], offset: int, size: int | None) -> Array:
        """Return `size` bytes at `offset` of a file as an array; None means up to the end.

        The size must be that of the shape.
        """
        key = path, dtype, shape, offset, size
        if key not in self._read:
            with _regular(path) as (file, end):
                size = end - offset if size is None else size
                if offset < 0 or size < 0 or offset + size > end:
                    raise SourceError("offset", (offset, size), f"must lie within the {end} bytes of {path}")
                self.take(size)
                file.seek(offset)
                content = file.read(size)
            self._read[key] = from_bytes(content, dtype, shape, path)
        return self._read[key]

    def cast(self, value: Array, dtype: str) -> Array:
        """Return `value` in that dtype; see `packages.cast`."""
        if value.dtype.name == dtype:
            return value
        key = id(value), dtype
        if key not in self._casts:
            self.take(value.size * 8)
            self._casts[key] = value, cast(value, dtype)
        return self._casts[key][1]
