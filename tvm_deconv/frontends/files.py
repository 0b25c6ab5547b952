"""Files that nobody vouches for: every fault is a SourceError, and no offset leaves its file."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from tvm_deconv.errors import SourceError
from tvm_deconv.problem import Array


def read_bytes(path: Path) -> bytes:
    """Return the whole file."""
    try:
        return path.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a null character in the path
        raise SourceError("source", path, f"must be a file that can be read ({_why(error)})") from None


def read_array(path: Path, dtype: np.dtype[Any], shape: tuple[int, ...], offset: int, size: int | None) -> Array:
    """Return `size` bytes at `offset` as an array; None means up to the end. The size must be that of the shape."""
    try:
        with path.open("rb") as file:
            end = file.seek(0, 2)
            size = end - offset if size is None else size
            if offset < 0 or size < 0 or offset + size > end:
                raise SourceError("offset", (offset, size), f"must lie within the {end} bytes of {path}")
            file.seek(offset)
            content = file.read(size)
    except OSError as error:
        raise SourceError("source", path, f"must be a file that can be read ({_why(error)})") from None
    return from_bytes(content, dtype, shape, path)


def _why(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def from_bytes(content: bytes, dtype: np.dtype[Any], shape: tuple[int, ...], path: Path) -> Array:
    """Return little-endian bytes as an array; their number must be that of the shape."""
    if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != len(content):
        raise SourceError("shape", shape, f"must fit the {len(content)} bytes of the {dtype} constant in {path}")
    try:
        return np.frombuffer(content, dtype).reshape(shape)
    except ValueError as error:  # more axes than NumPy has, or too many elements of no bytes
        raise SourceError("shape", shape, f"must be one of an array, in {path}: {error}") from None
