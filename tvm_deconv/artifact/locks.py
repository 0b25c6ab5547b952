"""Locks between processes. They are of an open file, so that an interrupt at any moment releases them with it."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path

from tvm_deconv.artifact.regular import opener


@contextlib.contextmanager
def locked(path: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold the lock of the file at `path`, which is made if it is missing.

    Raises OSError; without `wait` BlockingIOError, which is one, where somebody else holds it.
    """
    with open(path, "ab", opener=opener) as file:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield
