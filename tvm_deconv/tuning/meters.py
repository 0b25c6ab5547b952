"""Where a search measures: on this machine, or on servers of a tracker, which may be lost."""

from __future__ import annotations

import contextlib
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tvm_deconv.compiler.launcher import find_compiler, launcher_object
from tvm_deconv.compiler.process import Worker, WorkerError
from tvm_deconv.errors import RemoteError
from tvm_deconv.targets import Host, detect_host
from tvm_deconv.tuning.workers import Built, Measured, Meter

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tvm_deconv.tuning.remote import Tracker

_T = TypeVar("_T")
_U = TypeVar("_U")
_START_SECONDS = 60.0  # for a server to answer at first
_TRANSFER_SECONDS = 60.0  # for what goes over the network besides what a candidate may take
_ATTEMPTS = 3  # so many servers may be lost with a candidate before it is to blame
_LEAVE_SECONDS = 5.0  # to close a session
_MOST = 16  # servers in use at a time


class BrokenDefaultError(WorkerError):
    """The default schedule, which others are held against, does not run."""


class _Meter:
    """A process that measures, and which problem it is prepared for."""

    def __init__(self, *arguments: object, kind: type[Meter] = Meter) -> None:
        self.worker = Worker(kind, *arguments)
        self.prepared = ""


class Meters:
    """Measuring on this machine, one candidate at a time, in a process that is replaced when something went wrong."""

    _overhead = 0.0
    _attempts = 1

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._stack = contextlib.ExitStack()
        self._only = _Meter(threads)
        self._stack.callback(self._only.worker.close)

    def __enter__(self) -> Meters:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def host(self) -> Host:
        """The machine that candidates run on."""
        return detect_host()

    def each(self, function: Callable[[_T], _U], items: Iterable[_T]) -> Iterator[tuple[_T, _U]]:
        """Call `function`, which measures, on each item, as many at a time as can be measured.

        Yields each item with its result as soon as there is one.
        """
        return ((item, function(item)) for item in items)

    def rate(self, method: str, *arguments: object, timeout: float) -> float:
        """Measure a rate of the machine: "fma", or "multiply_adds" of a device, or "copy", per second.

        Raises WorkerError, RemoteError.
        """
        rate: float = self._use(lambda meter: self._ask(meter, method, *arguments, timeout=timeout))
        return rate

    def measure(self, key: str, seed: int, reference: Built, built: Built, best: float, timeout: float) -> Measured:
        """Measure a candidate of the problem with this key, whose default is `reference` and whose best time `best`.

        Raises WorkerError where the candidate fails, BrokenDefaultError where the default does, RemoteError.
        """

        def once(meter: _Meter) -> Measured:
            if not meter.worker.running or meter.prepared != key:
                meter.prepared = ""
                try:
                    self._ask(meter, "prepare", key, seed, reference, timeout=4 * timeout)
                except WorkerError as error:
                    if self._lost(error):
                        raise
                    raise BrokenDefaultError(f"the default does not run: {error}") from error
                meter.prepared = key
            measured: Measured = self._ask(meter, "measure", built, best, timeout=timeout)
            return measured

        return self._use(once)

    def _ask(self, meter: _Meter, method: str, *arguments: object, timeout: float) -> Any:
        return meter.worker.ask(method, *arguments, timeout, timeout=timeout + self._overhead)

    def _lost(self, error: WorkerError) -> bool:
        """Whether what went wrong was the machine's fault and not the candidate's."""
        return error.died and self._attempts > 1

    def _use(self, work: Callable[[_Meter], _T]) -> _T:
        for attempt in range(1, self._attempts + 1):
            meter = self._take()
            kept = False
            try:
                result = work(meter)
                kept = True
            except WorkerError as error:
                if not self._lost(error) or attempt == self._attempts:
                    raise
            else:
                return result
            finally:
                # Whatever a failed candidate did, it may have done to the memory of that process too.
                self._give(meter, kept=kept)
        raise AssertionError("not reached")

    def _take(self) -> _Meter:
        return self._only

    def _give(self, meter: _Meter, *, kept: bool) -> None:
        if not kept:
            meter.worker.stop()


class DeviceMeters(Meters):
    """Measuring on CUDA device 0 of this machine, one candidate at a time."""

    def __init__(self) -> None:
        from tvm_deconv.tuning.device import DeviceMeter

        self.threads = 1
        self._stack = contextlib.ExitStack()
        self._only = _Meter(0, kind=DeviceMeter)
        self._stack.callback(self._only.worker.close)
        self._host: Host = self._only.worker.ask("host", timeout=_START_SECONDS)

    @property
    def host(self) -> Host:
        """The device."""
        return self._host


class RemoteMeters(Meters):
    """Measuring at the servers of a tracker, as many candidates at a time as it has servers free.

    A candidate whose server was lost is measured again at another. RemoteError where none is left.
    """

    _overhead = _TRANSFER_SECONDS
    _attempts = _ATTEMPTS

    def __init__(self, threads: int, tracker: Tracker) -> None:
        from tvm_deconv.tuning.remote import Servers, build_probe

        self.threads = threads
        self._tracker = tracker
        self._idle: list[_Meter] = []
        self._used = 0
        self._connecting = False
        self._stopping = False
        self._changed = threading.Condition()
        self._host: Host | None = None
        with contextlib.ExitStack() as stack:
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            cc = find_compiler()
            self._servers = Servers(tracker, build_probe(cc, launcher_object(cc, scratch), scratch))
            self._pool = stack.enter_context(ThreadPoolExecutor(_MOST))  # whose threads the meters end with
            stack.callback(self._stop)
            self._give(self._take(), kept=True)
            self._stack = stack.pop_all()

    @property
    def host(self) -> Host:
        """The machine that all servers are."""
        assert self._host is not None
        return self._host

    def each(self, function: Callable[[_T], _U], items: Iterable[_T]) -> Iterator[tuple[_T, _U]]:
        """Call `function` on each item, in threads that wait for servers."""
        items_of = {self._pool.submit(function, item): item for item in items}
        failure = None
        for done in as_completed(items_of):
            # What was measured before all servers were gone is a result nevertheless.
            if failed := done.exception():
                failure = failed
            else:
                yield items_of[done], done.result()
        if failure:
            raise failure

    def _stop(self) -> None:
        """Have what runs end, begin no more, and close the sessions: a server may give up when one breaks off."""
        with self._changed:
            self._stopping = True
            self._changed.wait_for(lambda: not (self._used or self._connecting))
            for meter in self._idle:
                meter.worker.close(_LEAVE_SECONDS)

    def _take(self) -> _Meter:
        deadline = time.monotonic() + _START_SECONDS
        why = "none answers"
        while True:
            with self._changed:
                if self._stopping:
                    raise CancelledError  # no fault of a candidate
                if self._idle:
                    self._used += 1
                    return self._idle.pop()
                if self._connecting or not self._tracker.free():
                    if self._used or self._connecting:
                        self._changed.wait(1.0)
                        deadline = time.monotonic() + _START_SECONDS
                    else:
                        self._left(deadline, why)
                        self._changed.wait(0.2)
                    continue
                self._connecting = True
            try:
                meter = self._connected()
                with self._changed:
                    self._used += 1
                return meter
            except WorkerError as error:
                why = str(error)
                if not self._used:
                    self._left(deadline, why)
            finally:
                with self._changed:
                    self._connecting = False
                    self._changed.notify_all()

    def _left(self, deadline: float, why: str) -> None:
        """Raise RemoteError where no server is left, or none has answered until the deadline."""
        known = len(self._tracker.servers())
        if not known:
            raise RemoteError("rpc_key", self._tracker.key, f"the tracker {self._tracker.address} has no server for it")
        if time.monotonic() > deadline:
            rule = f"no session with any of the {known} servers that the tracker {self._tracker.address} has for it"
            raise RemoteError("rpc_key", self._tracker.key, f"{rule}: {why}")

    def _give(self, meter: _Meter, *, kept: bool) -> None:
        if not kept:
            meter.worker.close(_LEAVE_SECONDS)
        with self._changed:
            self._used -= 1
            if kept:
                self._idle.append(meter)
            self._changed.notify_all()

    def _connected(self) -> _Meter:
        """Return a meter at a free server. Raises WorkerError where it does not answer."""
        with contextlib.ExitStack() as stack:
            meter = _Meter(self.threads, self._servers)
            stack.callback(meter.worker.close)
            host: Host = meter.worker.ask("host", timeout=_START_SECONDS)
            if self._host and host.name != self._host.name:
                rule = f"its servers are machines of two kinds, {self._host.name} and {host.name}: give each kind a key"
                raise RemoteError("rpc_key", self._tracker.key, rule)
            self._host = host
            stack.pop_all()
            return meter
