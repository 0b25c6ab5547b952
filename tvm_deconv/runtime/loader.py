"""From a manifest to callable functions: read, verify, load those very bytes.

The library is read once. Its size, digest, dependencies and symbols are checked on the bytes in memory, and these
bytes, not the file, are what the dynamic linker maps: through an anonymous file in memory, named by a symbolic link in
a fresh private directory (the linker takes libraries of one name for one library), or a file in that directory where
the system has no such files. What is loaded stays loaded: unmapping code that a thread may be in is not safe.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import hashlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tvm_deconv.artifact import elf as _elf
from tvm_deconv.artifact import files as _files
from tvm_deconv.artifact.manifest import Manifest
from tvm_deconv.errors import ArtifactError, IntegrityError, ProblemError
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

_LAUNCHER = ("get_num_threads", "set_num_threads", "set_thread_limit", "make_arena", "set_arena")
_FUNCTIONS = frozenset({"__tvm_ffi_pack", "__tvm_ffi_deconv"})
DEFINED = frozenset({*_FUNCTIONS, *(f"tvm_deconv_{name}" for name in _LAUNCHER)})

MAX_THREADS, MAX_LANES = 1024, 64  # the launcher's


LOG = logging.getLogger("tvm_deconv")
LOG.addHandler(logging.NullHandler())  # without one, warnings of a program that configured no logging are printed


class Loaded(NamedTuple):
    """An artifact in use by this process: what it is, and what its calls have cost since it was loaded.

    `problem` is the key of the problem it serves and `target` what it was compiled for, "reference" where NumPy
    computes in place of an artifact; then `path` and `sha256` are empty. `seconds` is the time that `calls`
    completed calls took, in all threads, without the checks of their arrays.
    """

    name: str
    problem: str
    target: str
    path: str
    sha256: str
    calls: int = 0
    seconds: float = 0.0


class Artifact:
    """The functions of a loaded artifact, and the count of its calls.

    `packed` is shape and dtype of the filter as `pack` leaves it. `constant` makes of an array that calls have in
    common what `deconv` takes best.
    """

    def __init__(
        self,
        facts: Loaded,
        packed: tuple[tuple[int, ...], str],
        pack: Callable[..., None],
        deconv: Callable[..., None],
        constant: Callable[[Any], Any],
    ) -> None:
        self.name, self.path = facts.name, facts.path
        self._facts = facts
        self.packed = packed
        self.pack = pack
        self.deconv = deconv
        self.constant = constant
        self._lock = threading.Lock()
        self._calls = 0
        self._nanoseconds = 0

    def __call__(self, *arguments: Any) -> None:
        """Call `deconv`, and count it."""
        try:
            _inside.append(None)
            if _process.ending is not None:
                _stop_daemon()
            start = time.perf_counter_ns()
            self.deconv(*arguments)
            took = time.perf_counter_ns() - start
        finally:
            _inside.pop()
        with self._lock:
            self._calls += 1
            self._nanoseconds += took

    @property
    def loaded(self) -> Loaded:
        """What is known of it now."""
        with self._lock:
            return self._facts._replace(calls=self._calls, seconds=1e-9 * self._nanoseconds)

    def after_fork(self) -> None:
        """Go on in a forked child, where another thread of the parent may have held the lock."""
        self._lock = threading.Lock()


class _Process:
    """What this process has loaded: the linker keeps it per process, and so the count of threads."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.artifacts: dict[Hashable, Artifact] = {}
        self.threads: ctypes.CDLL | None = None
        self.wanted_threads: int | None = None
        self.ending: int | None = None  # the thread that ends the interpreter


_process = _Process()
_inside: list[None] = []  # one entry for each call that is inside of tvm_ffi


def _after_fork() -> None:
    _process.lock = threading.Lock()  # another thread of the parent may have held it
    _inside.clear()
    for artifact in _process.artifacts.values():
        artifact.after_fork()


os.register_at_fork(after_in_child=_after_fork)


@contextlib.contextmanager
def inside() -> Iterator[None]:
    """Count a thread in while it is inside of tvm_ffi, so that the interpreter does not end before it is out.

    CPython before 3.14 ends a daemon thread by unwinding its stack when it comes back for the interpreter's lock; the
    frames of tvm_ffi do not allow that, and the process aborts.
    """
    try:
        _inside.append(None)
        if _process.ending is not None:
            _stop_daemon()
        yield
    finally:
        _inside.pop()


def _stop_daemon() -> None:
    """Hold a thread that would go into tvm_ffi while the interpreter ends, for ever; not the one that ends it."""
    if threading.get_ident() != _process.ending:
        _inside.pop()
        held = threading.Lock()
        held.acquire()
        held.acquire()


@atexit.register
def _drain() -> None:
    """Let daemon threads finish the calls they are inside of, and begin no other."""
    _process.ending = threading.get_ident()
    while _inside:
        time.sleep(0.0005)


def loaded() -> list[Loaded]:
    """Return every artifact that this process has loaded, in the order of loading."""
    with _process.lock:
        artifacts = list(_process.artifacts.values())
    return [artifact.loaded for artifact in artifacts]


def once(identity: Hashable, make: Callable[[], Artifact]) -> Artifact:
    """Return what `make` gave for `identity` in this process."""
    with inside(), _process.lock:  # in this order: a thread that is held at the end must not hold the lock
        artifact = _process.artifacts.get(identity)
        if artifact is None:
            artifact = _process.artifacts[identity] = make()
        return artifact


def load(directory: Path, manifest: Manifest) -> Artifact:
    """Verify the library of `manifest` in `directory` and load it, once per content and process.

    IntegrityError: the file is not what the manifest describes. ArtifactError: it cannot be read or loaded.
    """
    path = directory / manifest.library
    data = read_verified(path, manifest)
    # With what of the manifest decides how it is used: a wrong one must not decide for a right one.
    identity = (manifest.sha256, manifest.packed_shape, manifest.packed_dtype)
    return once(identity, lambda: _load(path, manifest, data))


def read_verified(path: Path, manifest: Manifest) -> bytes:
    """Return the bytes of the library at `path` once size, digest, dependencies and symbols are as they must be.

    Raises IntegrityError where one is not, ArtifactError where the file cannot be read.
    """
    data, size = _files.read(path, manifest.size + 1, ArtifactError, IntegrityError)
    if len(data) != manifest.size:
        rule = f"must be {manifest.size}, which the manifest says: the file was truncated or replaced"
        raise IntegrityError(path, rule, "size", size)
    digest = hashlib.sha256(data).hexdigest()
    if digest != manifest.sha256:
        rule = f"must be {manifest.sha256}, which the manifest says: the file was altered or replaced"
        raise IntegrityError(path, rule, "sha256", digest)
    try:
        needed, defined = _elf.dynamic(data)
    except ValueError as error:
        raise IntegrityError(path, f"must be a shared library for this machine, but {error}") from None
    foreign = [name for name in needed if name not in NEEDED]
    if foreign:
        raise IntegrityError(path, f"may only need {', '.join(sorted(NEEDED))}", "needed", foreign)
    missing = sorted((_FUNCTIONS if manifest.target in CUDA_TARGETS else DEFINED) - defined)
    if missing:
        raise IntegrityError(path, f"must define {', '.join(missing)}: it is no artifact", "defined", len(defined))
    return data


def _load(path: Path, manifest: Manifest, data: bytes) -> Artifact:
    start = time.perf_counter()
    tvm_ffi = import_tvm_ffi()
    try:
        with _private_file(data, path.name) as name:
            module = tvm_ffi.load_module(name)
            pack, deconv = module.get_function("pack"), module.get_function("deconv")
            library = None if manifest.target in CUDA_TARGETS else _launcher_of(name)
    # tvm_ffi raises whatever class of error the C++ side names; there may be no memory, or no room, for the copy.
    except Exception as error:
        raise ArtifactError(path, f"must load and define pack, deconv and the thread count: {error}") from error
    if library is not None and _process.threads is None:
        _process.threads = library
        if _process.wanted_threads is not None:
            library.tvm_deconv_set_num_threads(_process.wanted_threads)
    LOG.info("loaded %s in %.1f ms", path, 1e3 * (time.perf_counter() - start))
    facts = Loaded(manifest.name, manifest.problem, manifest.target, str(path), manifest.sha256)
    return Artifact(facts, (manifest.packed_shape, manifest.packed_dtype), pack, deconv, tvm_ffi.from_dlpack)


def _launcher_of(name: str) -> ctypes.CDLL:
    """Return the functions of the launcher in the library `name`, declared."""
    library = ctypes.CDLL(name)
    for function in (library.tvm_deconv_set_num_threads, library.tvm_deconv_set_thread_limit):
        function.argtypes = [ctypes.c_int]
    library.tvm_deconv_get_num_threads.argtypes = []
    library.tvm_deconv_make_arena.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint64]
    library.tvm_deconv_set_arena.argtypes = [ctypes.c_void_p]
    library.tvm_deconv_set_arena.restype = ctypes.c_void_p
    return library


@contextlib.contextmanager
def _private_file(data: bytes, name: str) -> Iterator[str]:
    """Yield the path of a library with the content `data` that nobody else can have written to."""
    import tempfile  # which imports every way to compress

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


@contextlib.contextmanager
def without_torch() -> Iterator[None]:
    """Have imports of this thread not find torch, where the program has not imported it; later imports do."""
    finder = _NoTorch()
    hidden = [] if "torch" in sys.modules else [finder]
    sys.meta_path[:0] = hidden
    try:
        yield
    finally:
        for finder in hidden:
            sys.meta_path.remove(finder)


def import_tvm_ffi() -> Any:
    """Return the module tvm_ffi, imported with the first directory of artifacts.

    It imports torch where that is installed (seconds, hundreds of MB), against a symbol conflict on Windows. Where the
    program has not imported torch, this import does not find it; other threads and later imports do.
    """
    with without_torch():
        import tvm_ffi
    return tvm_ffi


def within(
    memory: npt.NDArray[np.uint8], lane_bytes: int, shared_bytes: int, call: Callable[..., None]
) -> Callable[..., None]:
    """Return `call` with its workspace in `memory`: `lane_bytes` for each thread that takes part, and `shared_bytes`.

    A thread for which there is no lane left uses memory of its own, as without this. The caller keeps `memory`.
    """
    library = _process.threads
    assert library is not None  # `call` is of an artifact
    address = memory.ctypes.data
    library.tvm_deconv_make_arena(address, memory.nbytes, lane_bytes, shared_bytes)

    def called(*arguments: Any) -> None:
        library.tvm_deconv_set_arena(address)
        try:
            call(*arguments)
        finally:
            library.tvm_deconv_set_arena(None)

    return called


def _threads(attribute: str, count: object) -> int:
    number = integer(attribute, count, 1)
    if number > MAX_THREADS:
        raise ProblemError(attribute, number, f"must be at most {MAX_THREADS}")
    return number


def set_num_threads(count: int | None) -> None:
    """Let all calls of artifacts use up to `count` threads, 1 to 1024; None: what the process would use by itself.

    One number for the process; before the first artifact is loaded it is remembered. Raises ProblemError.
    """
    if count is not None:
        count = _threads("num_threads", count)
    with _process.lock:
        _process.wanted_threads = count
        if _process.threads is not None:
            _process.threads.tvm_deconv_set_num_threads(count or 0)


@contextlib.contextmanager
def thread_limit(count: int) -> Iterator[None]:
    """Let calls from this thread use up to `count` threads, 1 to 1024, itself included. Raises ProblemError."""
    count = _threads("threads", count)
    library = _process.threads
    if library is None:  # nothing is loaded: NumPy computes
        yield
        return
    before = library.tvm_deconv_set_thread_limit(count)
    try:
        yield
    finally:
        library.tvm_deconv_set_thread_limit(before)


def get_num_threads() -> int | None:
    """Return how many threads a call may use; None where nothing was set and no artifact is loaded yet."""
    with _process.lock:
        if _process.threads is not None:
            return int(_process.threads.tvm_deconv_get_num_threads())
        return _process.wanted_threads
