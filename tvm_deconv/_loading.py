"""From a manifest to callable functions: read, verify, load those very bytes.

The library is read once. Its size, digest and dependencies are checked on the bytes in memory, and these bytes, not the
file, are what the dynamic linker maps: through an anonymous file in memory, named by a symbolic link in a fresh private
directory (the linker takes libraries of one name for one library), or a file in that directory where the system has no
such files. What is loaded stays loaded: unmapping code that a thread may be in is not safe.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import stat
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from tvm_deconv import _elf
from tvm_deconv.errors import ArtifactError, IntegrityError, ProblemError
from tvm_deconv.manifest import Manifest
from tvm_deconv.problem import integer
from tvm_deconv.targets import CUDA_TARGETS

NEEDED = frozenset(
    {
        "libtvm_ffi.so",
        "libc.so.6",
        "libm.so.6",
        "libgcc_s.so.1",
        "libstdc++.so.6",
        "libpthread.so.0",
        "libdl.so.2",
        "librt.so.1",
        "ld-linux-x86-64.so.2",
    }
)

MAX_THREADS = 1024  # the launcher's


@dataclass(frozen=True)
class Functions:
    """The functions of a loaded artifact."""

    pack: Callable[..., None]
    deconv: Callable[..., None]


class _Process:
    """What this process has loaded: the linker keeps it per process, and so the count of threads."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.functions: dict[str, Functions] = {}
        self.threads: ctypes.CDLL | None = None
        self.wanted_threads: int | None = None


_process = _Process()


def _after_fork() -> None:
    _process.lock = threading.Lock()  # another thread of the parent may have held it


os.register_at_fork(after_in_child=_after_fork)


def load(directory: Path, manifest: Manifest) -> Functions:
    """Verify the library of `manifest` in `directory` and load it, once per content and process.

    IntegrityError: the file is not what the manifest describes. ArtifactError: it cannot be read or loaded.
    """
    path = directory / manifest.library
    data = read_verified(path, manifest)
    with _process.lock:
        functions = _process.functions.get(manifest.sha256)
        if functions is None:
            functions = _load(path, data, threads=manifest.target not in CUDA_TARGETS)
            _process.functions[manifest.sha256] = functions
        return functions


def read_verified(path: Path, manifest: Manifest) -> bytes:
    """Return the bytes of the library at `path` once size, digest and dependencies are those allowed."""
    try:
        leaves = path.resolve().parent != path.parent.resolve()
        # Without O_NONBLOCK a named pipe would wait for a writer.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            status = os.fstat(file.fileno())
            data = file.read(manifest.size + 1) if stat.S_ISREG(status.st_mode) else b""
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle, before Python 3.13
        raise ArtifactError(path, f"must be readable: {error}") from None
    if leaves:
        raise IntegrityError(path, f"must not be a link that leaves {path.parent}")
    if not stat.S_ISREG(status.st_mode):
        raise IntegrityError(path, "must be a regular file")
    if len(data) != manifest.size:
        rule = f"must be {manifest.size}, which the manifest says: the file was truncated or replaced"
        raise IntegrityError(path, rule, "size", status.st_size)
    digest = hashlib.sha256(data).hexdigest()
    if digest != manifest.sha256:
        rule = f"must be {manifest.sha256}, which the manifest says: the file was altered or replaced"
        raise IntegrityError(path, rule, "sha256", digest)
    try:
        needed = _elf.needed(data)
    except ValueError as error:
        raise IntegrityError(path, f"must be a shared library for this machine, but {error}") from None
    foreign = [name for name in needed if name not in NEEDED]
    if foreign:
        raise IntegrityError(path, f"may only need {', '.join(sorted(NEEDED))}", "needed", foreign)
    return data


def _load(path: Path, data: bytes, *, threads: bool) -> Functions:
    """Load the library in `data`, which has a pool of threads where it computes on the CPU."""
    tvm_ffi = import_tvm_ffi()
    with _private_file(data, path.name) as name:
        try:
            module = tvm_ffi.load_module(name)
            functions = Functions(module.get_function("pack"), module.get_function("deconv"))
            if not threads:
                return functions
            library = ctypes.CDLL(name)
            library.tvm_deconv_set_num_threads.argtypes = [ctypes.c_int]
            library.tvm_deconv_get_num_threads.argtypes = []
        # tvm_ffi raises whatever class of error the C++ side names.
        except Exception as error:
            raise ArtifactError(path, f"must load and define pack, deconv and the thread count: {error}") from error
    if _process.threads is None:
        _process.threads = library
        if _process.wanted_threads is not None:
            library.tvm_deconv_set_num_threads(_process.wanted_threads)
    return functions


@contextlib.contextmanager
def _private_file(data: bytes, name: str) -> Iterator[str]:
    """Yield the path of a library with the content `data` that nobody else can have written to."""
    with tempfile.TemporaryDirectory(prefix="tvm_deconv-") as directory, contextlib.ExitStack() as stack:
        path = Path(directory) / name
        descriptor = _memory_file(name)
        if descriptor is None:
            path.write_bytes(data)
        else:
            file = stack.enter_context(os.fdopen(descriptor, "wb"))
            file.write(data)
            file.flush()
            path.symlink_to(f"/proc/self/fd/{descriptor}")
        yield str(path)


def _memory_file(name: str) -> int | None:
    if not hasattr(os, "memfd_create") or not Path("/proc/self/fd").exists():
        return None
    try:
        return os.memfd_create(name, os.MFD_CLOEXEC)
    except OSError:  # the system forbids them, or executing them
        return None


class _NoTorch:
    """A finder by which one thread does not find torch."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Refuse torch to the thread that made this; leave everything else to the finders that follow."""
        del path, target
        if name == "torch" and threading.get_ident() == self.thread:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None


def import_tvm_ffi() -> Any:
    """Return the module tvm_ffi, imported at the first artifact.

    It imports torch where that is installed (seconds, hundreds of MB), against a symbol conflict on Windows. Where the
    program has not imported torch, this import does not find it; other threads and later imports do.
    """
    if "tvm_ffi" not in sys.modules and "torch" not in sys.modules:
        finder = _NoTorch()
        sys.meta_path.insert(0, finder)
        try:
            import tvm_ffi
        finally:
            sys.meta_path.remove(finder)
        return tvm_ffi
    import tvm_ffi

    return tvm_ffi


def set_num_threads(count: int | None) -> None:
    """Let a call of any artifact use up to `count` threads, 1 to 1024; None: what the process would use by itself.

    One number for the process; before the first artifact is loaded it is remembered. Raises ProblemError.
    """
    if count is not None:
        count = integer("num_threads", count, 1)
        if count > MAX_THREADS:
            raise ProblemError("num_threads", count, f"must be at most {MAX_THREADS}")
    with _process.lock:
        _process.wanted_threads = count
        if _process.threads is not None:
            _process.threads.tvm_deconv_set_num_threads(count or 0)


def get_num_threads() -> int | None:
    """Return how many threads a call may use; None where nothing was set and no artifact is loaded yet."""
    with _process.lock:
        if _process.threads is not None:
            return int(_process.threads.tvm_deconv_get_num_threads())
        return _process.wanted_threads
