"""The threads of calls and their workspace: the functions of the launcher that all artifacts of a process share.

The launcher of the first artifact that is loaded serves all others, see docs/launcher.md.
"""

from __future__ import annotations

import ctypes
import os
import threading

import numpy as np
import numpy.typing as npt

from tvm_deconv.errors import ProblemError
from tvm_deconv.problem import integer

#: Limits of the launcher: threads of a process, and threads with workspace in one arena.
MAX_THREADS, MAX_LANES = 1024, 64


class _Launcher:
    """The launcher's functions, once there are any, and the number of threads that was set before."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.library: ctypes.CDLL | None = None
        self.wanted_threads: int | None = None


_launcher = _Launcher()


def _after_fork() -> None:
    _launcher.lock = threading.Lock()  # another thread of the parent may have held it


os.register_at_fork(after_in_child=_after_fork)


def attach(path: str) -> None:
    """Declare the functions in the library at `path`, which is loaded, and use them unless others are used already."""
    library = ctypes.CDLL(path)
    library.tvm_deconv_set_num_threads.argtypes = [ctypes.c_int]
    library.tvm_deconv_get_num_threads.argtypes = []
    library.tvm_deconv_make_openmp_host.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    library.tvm_deconv_make_openmp_host.restype = None
    library.tvm_deconv_make_arena.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint64]
    with _launcher.lock:
        if _launcher.library is None:
            _launcher.library = library
            if _launcher.wanted_threads is not None:
                library.tvm_deconv_set_num_threads(_launcher.wanted_threads)
            # Now, since frameworks may confine this thread to few processors while they compute.
            library.tvm_deconv_get_num_threads()


def launcher() -> ctypes.CDLL | None:
    """Return the library whose launcher serves this process; None before the first artifact for a CPU is loaded."""
    return _launcher.library


def set_num_threads(count: int | None) -> None:
    """Let all calls of artifacts use up to `count` threads, 1 to 1024; None resets the process's own default.

    There is one number for the process. Before the first artifact is loaded it is remembered. Raises ProblemError.
    """
    if count is not None:
        count = _checked("num_threads", count)
    with _launcher.lock:
        _launcher.wanted_threads = count
        if _launcher.library is not None:
            _launcher.library.tvm_deconv_set_num_threads(count or 0)


def get_num_threads() -> int | None:
    """Return how many threads a call may use; None if nothing was set and no artifact is loaded yet."""
    with _launcher.lock:
        if _launcher.library is not None:
            return int(_launcher.library.tvm_deconv_get_num_threads())
        return _launcher.wanted_threads


def checked_limit(threads: object) -> int:
    """Return `threads`, 1 to 1024, that a call may use, the calling one included. Raises ProblemError."""
    return _checked("threads", threads)


def _checked(attribute: str, count: object) -> int:
    number = integer(attribute, count, 1)
    if number > MAX_THREADS:
        raise ProblemError(attribute, number, f"must be at most {MAX_THREADS}")
    return number


def make_arena(memory: npt.NDArray[np.uint8], lane_bytes: int, shared_bytes: int) -> int:
    """Return the address of an arena in `memory` for the workspace of calls, to pass to them.

    It has `lane_bytes` for each thread, and `shared_bytes` once. A thread that finds no lane left uses memory of its
    own. The caller keeps `memory` alive.
    """
    library = _launcher.library
    assert library is not None  # an artifact is loaded
    address = memory.ctypes.data
    library.tvm_deconv_make_arena(address, memory.nbytes, lane_bytes, shared_bytes)
    return address


class Host(ctypes.Structure):
    """`struct host` of the launcher: threads of the program around, to pass to calls by its address while it lives."""

    _fields_ = (("parallel_for", ctypes.c_void_p), ("context", ctypes.c_void_p))


def openmp_host(gomp_parallel: int) -> Host:
    """Return a host of the threads of an OpenMP, given the address of its function `GOMP_parallel`."""
    library = _launcher.library
    assert library is not None  # an artifact is loaded
    host = Host()
    library.tvm_deconv_make_openmp_host(ctypes.byref(host), gomp_parallel)
    return host
