"""The artifacts that this process has loaded, the counts of their calls, and its end.

The dynamic linker keeps libraries per process, and so does this module. A loaded library stays loaded: unmapping code
while a thread may run it is not safe.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections.abc import Callable, Hashable
from time import perf_counter_ns, sleep
from typing import Any, NamedTuple, TypeVar

from tvm_deconv.artifact.manifest import Manifest

T = TypeVar("T")
LOG = logging.getLogger("tvm_deconv")
LOG.addHandler(logging.NullHandler())  # without one, warnings of a program that configured no logging are printed


class Loaded(NamedTuple):
    """An artifact in use by this process, and the cost of its calls since it was loaded.

    `problem` is the key of the problem it serves and `target` the name of its target. If NumPy computes in place of an
    artifact, the target is "reference", and `path` and `sha256` are empty. `seconds` is the time that `calls` completed
    calls took, in all threads, without the checks of their arrays.
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

    `packed` is the shape and dtype of the filter after `pack`. `constant` converts an array that all calls have in
    common to the form that costs `deconv` least. ``load(device)`` readies a CUDA device for all calls.
    """

    def __init__(
        self,
        facts: Loaded,
        packed: tuple[tuple[int, ...], str],
        pack: Callable[..., None],
        deconv: Callable[..., None],
        constant: Callable[[Any], Any],
        load: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.name, self.path = facts.name, facts.path
        self.packed = packed
        self.pack = pack
        self.deconv = deconv
        self.constant = constant
        self.load = load
        self.lock = threading.Lock()
        self._facts = facts
        self._calls = 0
        self._nanoseconds = 0

    def __call__(self, *arguments: Any) -> None:
        """Call `deconv`, and count the call."""
        try:
            _inside.append(None)
            if PROCESS.ending is not None:
                _hold_daemon()
            start = perf_counter_ns()
            self.deconv(*arguments)
            nanoseconds = perf_counter_ns() - start
        finally:
            _inside.pop()
        with self.lock:
            self._calls += 1
            self._nanoseconds += nanoseconds

    @property
    def loaded(self) -> Loaded:
        """The facts and the counts of this moment."""
        with self.lock:
            return self._facts._replace(calls=self._calls, seconds=1e-9 * self._nanoseconds)

    def after_fork(self) -> None:
        """Renew the lock in a forked child, since another thread of the parent may have held it."""
        self.lock = threading.Lock()


class Served(NamedTuple):
    """The artifact that serves a problem; `manifest` is None if NumPy computes in its place."""

    manifest: Manifest | None
    artifact: Artifact


class Process:
    """The artifacts of this process by identity; `ending` is the thread that ends the interpreter."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.artifacts: dict[Hashable, Artifact] = {}
        self.ending: int | None = None


PROCESS = Process()
_inside: list[None] = []  # one entry for each call that is inside of tvm_ffi


def _after_fork() -> None:
    PROCESS.lock = threading.Lock()  # another thread of the parent may have held it
    _inside.clear()
    for artifact in PROCESS.artifacts.values():
        artifact.after_fork()


os.register_at_fork(after_in_child=_after_fork)


def guarded(function: Callable[..., T], *arguments: Any) -> T:
    """Call a `function` that uses tvm_ffi; the interpreter does not end before it returns.

    CPython before 3.14 ends a daemon thread by unwinding its stack when it comes back for the interpreter's lock. The
    frames of tvm_ffi do not allow that, and the process aborts. This is no context manager: an interrupt could leave
    one without its exit, and the interpreter would wait for ever.
    """
    try:
        _inside.append(None)
        if PROCESS.ending is not None:
            _hold_daemon()
        return function(*arguments)
    finally:
        _inside.pop()


def _hold_daemon() -> None:
    """Hold the calling thread forever, unless it is the one that ends the interpreter."""
    if threading.get_ident() != PROCESS.ending:
        _inside.pop()
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()


@atexit.register
def _drain() -> None:
    """Let daemon threads finish the calls they are inside of, and begin no other."""
    PROCESS.ending = threading.get_ident()
    while _inside:
        sleep(0.0005)


def loaded() -> list[Loaded]:
    """Return every artifact that this process has loaded, in the order of loading."""
    with PROCESS.lock:
        artifacts = list(PROCESS.artifacts.values())
    return [artifact.loaded for artifact in artifacts]


def once(identity: Hashable, make: Callable[[], Artifact]) -> Artifact:
    """Return the artifact of this `identity`; the first call in this process makes it."""
    return guarded(_once, identity, make)  # first: a thread that is held at the end must not hold the lock


def _once(identity: Hashable, make: Callable[[], Artifact]) -> Artifact:
    with PROCESS.lock:
        artifact = PROCESS.artifacts.get(identity)
        if artifact is None:
            artifact = PROCESS.artifacts[identity] = make()
        return artifact
