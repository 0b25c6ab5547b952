"""Running candidates at servers that a TVM tracker hands out (`tvm.exec.rpc_tracker` and `tvm.exec.rpc_server`).

A server needs TVM and nothing of ours. A small library, the *probe* (`probe.c`), is sent first and does the rest: which
CPU it is, threads of our launcher, guards around an output, rates of the machine. A server forks a process for each
session. The probe ends that process, quietly, when a candidate crashes or takes too long, since TVM's server gives up
altogether when one of its processes fails. So when a session breaks off and the server still answers, it was the
candidate; when nothing answers, it was the server.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from tvm_deconv.artifact.files import temporary_folder
from tvm_deconv.compiler.launcher import find_compiler, launcher_object
from tvm_deconv.compiler.process import WorkerError
from tvm_deconv.compiler.records import Cpu
from tvm_deconv.compiler.toolchain import run_compiler
from tvm_deconv.errors import RemoteError
from tvm_deconv.problem import Array
from tvm_deconv.targets import Host, parse_cpuinfo
from tvm_deconv.tuning.runners.base import START_SECONDS, HarnessProcess, Runner
from tvm_deconv.tuning.runners.machine import Bound, Machine
from tvm_deconv.tuning.runners.tracker import ANSWER_SECONDS, Tracker

_T = TypeVar("_T")
_U = TypeVar("_U")
_PROBE = Path(__file__).with_name("probe.c")
_NOTICE_SECONDS = 30.0  # within which a server whose session has ended turns to who calls next
_TRANSFER_SECONDS = 60.0  # for the network, besides what a candidate may take
_ATTEMPTS = 3  # a candidate that this many servers were lost with is to blame
_LEAVE_SECONDS = 5.0  # to close a session
_MOST_SERVERS = 16  # in use at a time


class Servers(NamedTuple):
    """Which servers to use, and the probe to send them."""

    tracker: Tracker
    probe: Path


class RpcRunner(Runner):
    """Runs candidates at the servers of a tracker, as many at a time as it has servers free.

    A candidate whose server was lost is measured again at another. Raises RemoteError if no server is left.
    """

    _overhead = _TRANSFER_SECONDS
    _attempts = _ATTEMPTS

    def __init__(self, threads: int, tracker: Tracker) -> None:
        super().__init__(threads)
        self._tracker = tracker
        self._idle: list[HarnessProcess] = []
        self._used = 0
        self._connecting = False
        self._stopping = False
        self._changed = threading.Condition()
        self._host: Host | None = None
        with contextlib.ExitStack() as stack:
            scratch = stack.enter_context(temporary_folder())
            self._servers = Servers(tracker, self._build_probe(find_compiler(), scratch))
            # The processes end with the threads of this pool, which started them.
            self._pool = stack.enter_context(ThreadPoolExecutor(_MOST_SERVERS))
            stack.callback(self._stop)
            self._give(self._take(), kept=True)
            self._stack = stack.pop_all()

    @property
    def host(self) -> Host:
        """The kind of machine that all servers are."""
        assert self._host is not None
        return self._host

    @property
    def places(self) -> int:
        """As many as the tracker knows servers now."""
        return min(len(self._tracker.servers()), _MOST_SERVERS)

    def map(self, function: Callable[[_T], _U], items: Iterable[_T]) -> Iterator[_U]:
        """Call `function` on each item, in threads that wait for servers; yield the results as they are there."""
        failure = None
        for done in as_completed([self._pool.submit(function, item) for item in items]):
            # What was measured before all servers were gone is a result nevertheless.
            if error := done.exception():
                failure = error
            else:
                yield done.result()
        if failure:
            raise failure

    def _stop(self) -> None:
        """Let running calls end, begin no more, and close the sessions: a server may give up when one breaks off."""
        with self._changed:
            self._stopping = True
            self._changed.wait_for(lambda: not (self._used or self._connecting))
            for process in self._idle:
                process.worker.close(_LEAVE_SECONDS)

    def _take(self) -> HarnessProcess:
        deadline = time.monotonic() + START_SECONDS
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
                        deadline = time.monotonic() + START_SECONDS
                    else:
                        self._check_servers(deadline, why)
                        self._changed.wait(0.2)
                    continue
                self._connecting = True
            try:
                process = self._connect()
                with self._changed:
                    self._used += 1
                return process
            except WorkerError as error:
                why = str(error)
                if not self._used:
                    self._check_servers(deadline, why)
            finally:
                with self._changed:
                    self._connecting = False
                    self._changed.notify_all()

    def _check_servers(self, deadline: float, why: str) -> None:
        """Raise RemoteError if no server is left, or none has answered until the deadline."""
        known = len(self._tracker.servers())
        if not known:
            raise RemoteError("rpc_key", self._tracker.key, f"the tracker {self._tracker.address} has no server for it")
        if time.monotonic() > deadline:
            rule = f"no session with any of the {known} servers that the tracker {self._tracker.address} has for it"
            raise RemoteError("rpc_key", self._tracker.key, f"{rule}: {why}")

    def _give(self, process: HarnessProcess, *, kept: bool) -> None:
        if not kept:
            process.worker.close(_LEAVE_SECONDS)
        with self._changed:
            self._used -= 1
            if kept:
                self._idle.append(process)
            self._changed.notify_all()

    def _connect(self) -> HarnessProcess:
        """Return a process with a session at a free server. Raises WorkerError if it does not answer."""
        with contextlib.ExitStack() as stack:
            process = HarnessProcess(self._machine(), self.threads, self._servers)
            stack.callback(process.worker.close)
            host = process.host()
            self._admit(host)
            self._host = host
            stack.pop_all()
            return process

    def _machine(self) -> Callable[..., Machine]:
        """Return what makes a session at a server."""
        return RpcMachine

    def _build_probe(self, cc: str, scratch: Path) -> Path:
        return build_probe(cc, _PROBE, scratch, launcher_object(cc, scratch))

    def _admit(self, host: Host) -> None:
        """Raise RemoteError if a server is another kind of machine than those before."""
        if self._host and self._kind(host) != self._kind(self._host):
            kinds = f"{self._kind(self._host)} and {self._kind(host)}"
            rule = f"its servers are machines of two kinds, {kinds}: give each kind a key"
            raise RemoteError("rpc_key", self._tracker.key, rule)

    def _kind(self, host: Host) -> object:
        """Return what servers of one kind have in common."""
        return Cpu.of(host)


def build_probe(cc: str, source: Path, directory: Path, *objects: Path) -> Path:
    """Compile a probe, with object files that it calls, into `directory`. Raises BuildError."""
    import tvm_ffi

    library = directory / "probe.so"
    includes = {tvm_ffi.libinfo.find_include_path(), tvm_ffi.libinfo.find_dlpack_include_path()}
    flags = ["-std=gnu11", "-O2", "-shared", "-fPIC", "-pthread", *(f"-I{path}" for path in sorted(includes))]
    command = [cc, *flags, "-x", "c", str(source), "-x", "none", *map(str, objects), "-ldl", "-o", str(library)]
    run_compiler("cc", command, "does not compile the probe for servers: ")
    return library


class RpcSession:
    """A session at one server, with the probe. If the server is lost, the process ends and says so."""

    def __init__(self, servers: Servers) -> None:
        from tvm import rpc

        self._tracker = servers.tracker
        host, port, match = self._tracker.request()
        self._address = (host, port)
        self._session = rpc.connect(host, port, match)
        self._memory = self._session.cpu()
        self._probe = self._load(servers.probe)

    @contextlib.contextmanager
    def attempt(self, seconds: float) -> Iterator[None]:
        """Have the server end the session after `seconds`, and find out whose fault it is when one breaks off.

        Raises TimeoutError or RuntimeError if it is the candidate's. If the server was lost, this process ends
        (SystemExit).
        """
        import tvm

        start = time.monotonic()
        try:
            self._probe["limit"](float(seconds))
            yield
            self._probe["limit"](0.0)
        except (tvm.error.InternalError, OSError) as error:
            taken = time.monotonic() - start
            if not self._survived():
                at = ":".join(map(str, self._address))
                raise SystemExit(f"the server {at} was lost: {error}") from None
            if taken >= seconds:
                raise TimeoutError(f"did not end within {seconds:g} s") from None
            raise RuntimeError("its process at the server ended") from None
        except tvm.error.RPCError as error:
            raise RuntimeError(self._said(error)) from None

    def _said(self, error: Exception) -> str:
        """Return the error of a function at the server, without TVM's heading."""
        return str(error).rpartition("from RPC call:\n")[2].strip()

    def _survived(self) -> bool:
        """Return whether the server has outlived the session: it then turns callers without its key away."""
        from tvm.rpc import base

        key = b"client:"
        end = time.monotonic() + _NOTICE_SECONDS
        try:
            with socket.create_connection(self._address, timeout=_NOTICE_SECONDS) as connection:
                connection.sendall(struct.pack("<ii", base.RPC_MAGIC, len(key)) + key)
                connection.settimeout(ANSWER_SECONDS)
                while self._address in self._tracker.servers():
                    with contextlib.suppress(TimeoutError):
                        return bool(struct.unpack("<i", base.recvall(connection, 4))[0] == base.RPC_CODE_MISMATCH)
                    if time.monotonic() > end:  # it serves another client by now
                        return True
        except OSError:
            pass
        return False

    def _load(self, library: Path) -> Any:
        with self._uploaded(library):
            return self._session.load_module(library.name)

    @contextlib.contextmanager
    def _uploaded(self, library: Path) -> Iterator[str]:
        """Send a library; yield its path at the server, where it is gone afterwards: what has loaded it keeps it."""
        self._session.upload(str(library))
        yield str(self._session.get_function("tvm.rpc.server.workpath")(library.name))
        self._session.remove(library.name)

    def _dlpack(self, dtype: np.dtype[Any]) -> tuple[int, int]:
        """Return code and bits of a dtype, as DLPack has them."""
        return "iuf".index(dtype.kind), 8 * dtype.itemsize


class RpcMachine(RpcSession):
    """A session at a server whose CPUs measure, as a `Machine`."""

    def __init__(self, threads: int, servers: Servers) -> None:
        super().__init__(servers)
        self._threads = threads
        self._probe["threads"](threads)

    def host(self) -> Host:
        """Describe the server's machine."""
        return parse_cpuinfo(str(self._probe["cpuinfo"]()))

    def multiply_adds(self, dtype: str, kernel: Path | None = None) -> float:  # noqa: ARG002
        """Measure the multiply-adds per second of `kernel` at the server."""
        assert kernel is not None
        with self._uploaded(kernel) as path:
            return float(self._probe["fma"](path, self._threads))

    def copy(self) -> float:
        """Measure the bytes per second of copies at the server."""
        return float(self._probe["copy"](self._threads))

    def put(self, array: Array) -> Any:
        """Send an array."""
        import tvm

        return tvm.runtime.tensor(array, self._memory)

    def output(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> _RpcOutput:
        """Allocate an array for results at the server."""
        return _RpcOutput(self._probe, self._probe["output"](*self._dlpack(dtype), *shape))

    def bind(self, library: Path, name: str, arguments: Sequence[Any]) -> Bound:
        """Send a library; return its function with its arguments."""
        module = self._load(library)
        function = module[name]

        def sample(number: int, repeat: int) -> Sequence[float]:
            means: Sequence[float] = module.time_evaluator(name, self._memory, number, repeat)(*arguments).results
            return means

        return Bound(lambda: function(*arguments), sample)


class _RpcOutput:
    """An array between guards at a server."""

    def __init__(self, probe: Any, argument: Any) -> None:
        self.argument = argument
        self._probe = probe

    def poison(self, byte: int) -> None:
        self._probe["poison"](self.argument, byte)

    def intact(self, byte: int) -> bool:
        return bool(self._probe["intact"](self.argument, byte))

    def read(self) -> Array:
        array: Array = self.argument.numpy()
        return array
