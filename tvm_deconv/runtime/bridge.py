"""Small libraries in C through which frameworks call artifacts, as a process holds them."""

from __future__ import annotations

import atexit
import ctypes
import os
import shutil
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

from tvm_deconv.artifact.files import TEMPORARY


class Bridge:
    """A library that is loaded once in a process, when it is first asked for, and then by `prepare` made ready.

    Its file is there as long as the process, for frameworks load it by its name.
    """

    def __init__(self, prepare: Callable[[ctypes.CDLL], None]) -> None:
        self._prepare = prepare
        self._lock = threading.Lock()
        self._library: ctypes.CDLL | None = None
        os.register_at_fork(after_in_child=self._after_fork)

    def _after_fork(self) -> None:
        self._lock = threading.Lock()  # another thread of the parent may have held it

    def get(self, content: Callable[[], bytes]) -> ctypes.CDLL:
        """Return the library; the first call asks for its `content`. Raises what that raises, and OSError."""
        with self._lock:
            if self._library is None:
                library = _load(content())
                self._prepare(library)
                self._library = library
            return self._library


def _load(content: bytes) -> ctypes.CDLL:
    folder = Path(tempfile.mkdtemp(prefix=TEMPORARY))
    atexit.register(_remove, folder, os.getpid())
    path = folder / "bridge.so"
    path.write_bytes(content)
    return ctypes.CDLL(str(path))


def _remove(folder: Path, owner: int) -> None:
    """Remove the folder at the end of the process that made it, not at that of its children."""
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)
