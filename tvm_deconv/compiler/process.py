"""Workers: processes with an object whose methods are called from here, so that only they crash or hang."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, NamedTuple

from tvm_deconv.artifact.ffi import without_torch

_PR_SET_PDEATHSIG = 1
_PATIENCE_SECONDS = 600.0
_END_SECONDS = 5.0  # for a process that has closed its connection to end


class Limits(NamedTuple):
    """What each call of a worker may use: seconds of processor time, and bytes of memory; what it starts, as much."""

    seconds: int
    memory: int


#: Of a build: processor time, so that a busy machine fails none.
BUILD = Limits(600, 8 << 30)
BUILD_PATIENCE_SECONDS = 3600.0  # in which a build ends that waits for something


class WorkerError(RuntimeError):
    """A call that a worker could not answer; `died` says that its process is gone."""

    def __init__(self, reason: str, *, died: bool = False) -> None:
        super().__init__(reason)
        self.died = died


class Refusal(Exception):
    """Raised by a method of a worker's object; its text reaches the caller without the name of a class."""


class Worker:
    """A process with an object `kind(*arguments)`; started when first asked, and again after it died.

    It runs on `cpus`, by default all, with `environment` added to this process's, and within `limits`, by default none:
    it dies of a call that takes more time, and finds no more memory. If `paused`, it is stopped while it waits: threads
    that spin while they wait for work would take the CPU from others. It ends with the thread that started it.
    """

    def __init__(
        self,
        kind: type,
        *arguments: object,
        cpus: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
        limits: Limits | None = None,
        paused: bool = False,
    ) -> None:
        self._kind = kind
        self._arguments = arguments
        self._cpus = list(cpus)
        self._environment = os.environ | dict(environment or {})
        self._limits = limits
        self._paused = paused
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._whole = False  # between questions: whoever is interrupted leaves it False
        self._asking = threading.RLock()
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115 (close() closes it)

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def running(self) -> bool:
        """Whether the process exists now."""
        return self._process is not None

    def close(self, grace: float = 0.0) -> None:
        """End the process for good, after `grace` seconds in which it may end by itself."""
        if grace:
            with self._asking:
                if self._process is not None and self._connection is not None:
                    self._connection.close()
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        self._process.wait(grace)
        self.stop()
        self._printed.close()

    def stop(self) -> None:
        """End the process and its children; a thread that waits for its answer gets a WorkerError."""
        self._kill()
        with self._asking:
            self._whole = False
            self._kill()
            if self._connection is not None:
                self._connection.close()
                self._connection = None
            if self._process is not None:
                _reap(self._process)
                self._process = None

    def _kill(self) -> None:
        process = self._process
        if process is not None and process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def ask(self, method: str, *arguments: object, timeout: float | None = _PATIENCE_SECONDS) -> Any:
        """Call a method of the object, and return its result.

        Raises WorkerError if the method raised, or if the process died or did not answer within `timeout` seconds; None
        waits for ever.
        """
        with self._asking:
            process, connection = self._started()
            self._whole = False
            try:
                connection.send((method, arguments))
                if self._paused:
                    process.send_signal(signal.SIGCONT)
                answered = connection.poll(timeout)
                succeeded, answer = connection.recv() if answered else (False, None)
            # A process that has overwritten its own memory may answer anything.
            except Exception:
                raise WorkerError(self._ended(process), died=True) from None
            except BaseException:  # an interrupt: the answer will come, but nobody wants it
                self.stop()
                raise
            if not answered:
                self.stop()
                raise WorkerError(f"did not end within {timeout:g} s", died=True)
            if self._paused:
                process.send_signal(signal.SIGSTOP)
            self._whole = True
        if not succeeded:
            raise WorkerError(str(answer))
        return answer

    def _ended(self, process: subprocess.Popen[bytes]) -> str:
        """Return how the process ended, with the last line that it printed."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_SECONDS)
        code = process.poll()
        self.stop()
        how = "without a readable answer" if code is None else f"with exit code {code}"
        if code is not None and code < 0:
            how = f"with signal {signal.Signals(-code).name}"
        self._printed.seek(0)
        last = self._printed.read().decode(errors="replace").strip().rpartition("\n")[2]
        return f"its process ended {how}{f': {last}' if last else ''}"

    def _started(self) -> tuple[subprocess.Popen[bytes], Connection]:
        """Return the process and its connection; start it if there is none, or one that was interrupted."""
        if self._process is None or self._connection is None or not self._whole:
            self.stop()
            self._connection, theirs = Pipe()
            self._printed.seek(0)
            self._printed.truncate()
            kind = (self._kind.__module__, self._kind.__name__)
            limits = self._limits and tuple(self._limits)
            served = f"serve({theirs.fileno()}, *{kind}, {self._cpus}, {limits})"
            # `-c` puts "" in front of the path; without it, no module is imported from the current directory.
            path = "import sys; sys.path[:] = filter(None, sys.path)"
            code = f"{path}; from tvm_deconv.compiler.process import serve; {served}"
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", code],
                    stdin=subprocess.DEVNULL,
                    stdout=self._printed,
                    stderr=self._printed,
                    pass_fds=[theirs.fileno()],
                    env=self._environment,
                    start_new_session=True,  # an interrupt from the keyboard is for the parent, which ends its workers
                )
            with contextlib.suppress(OSError):  # it ended at once, which the caller notices when it asks
                self._connection.send(self._arguments)
            self._whole = True
        return self._process, self._connection


def _reap(process: subprocess.Popen[bytes]) -> None:
    """Wait for a process to end, without the lock of `Popen.wait`, which an interrupt may have left locked."""
    if process.returncode is None:
        with contextlib.suppress(ChildProcessError):
            process.returncode = os.waitstatus_to_exitcode(os.waitpid(process.pid, 0)[1])


def serve(descriptor: int, module: str, kind: str, cpus: list[int], limits: tuple[int, int] | None) -> None:
    """Answer calls on a connection until it is closed: the main function of a worker's process."""
    # A worker that waits may be stopped, and would stay so for ever if its parent were killed.
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    os.set_inheritable(descriptor, False)
    if cpus:
        os.sched_setaffinity(0, cpus)
    if limits:
        _limit(resource.RLIMIT_DATA, limits[1])
    connection = Connection(descriptor)
    with without_torch():  # TVM imports it if it is installed, which takes seconds; no worker needs it to start
        made = getattr(importlib.import_module(module), kind)(*connection.recv())
    while True:
        try:
            method, arguments = connection.recv()
        except EOFError:
            return
        if limits:
            _limit(resource.RLIMIT_CPU, int(time.process_time()) + 1 + limits[0])
        try:
            answer = True, getattr(made, method)(*arguments)
        except Exception as error:  # of any class: packages raise what they like, and that is a result here
            text = str(error).strip() or repr(error)
            answer = False, text if isinstance(error, Refusal) else f"{type(error).__name__}: {text}"
        connection.send(answer)


def _limit(kind: int, value: int) -> None:
    """Set a limit of this process, at most to what it may set."""
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))
