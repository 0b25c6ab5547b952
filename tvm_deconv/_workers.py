"""The processes of a search: builders, which compile candidates, and a meter, which runs them.

A candidate may crash, hang or write where it should not. The meter is therefore a process of its own that a search can
lose: it loads what the builders linked, with the launcher as in an artifact, and needs neither TVM nor much time to
start. Builders are processes too, so that they work at the same time, and since a compiler may crash as well.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from tvm_deconv._arrays import storage
from tvm_deconv._loading import import_tvm_ffi
from tvm_deconv.bench.floors import copy_bytes_per_second, fma_per_second
from tvm_deconv.problem import Array, Problem
from tvm_deconv.records import Schedule
from tvm_deconv.scan.layer import numpy_dtype
from tvm_deconv.verify import deviation, operands

_PR_SET_PDEATHSIG = 1
_LEAST_RUNS = 3
_MOST_RUNS = 50
_GUARD = 64  # elements before and behind an output
_SAMPLE_SECONDS = 2e-4  # shorter calls are timed several at a time
_MEASURE_SECONDS = 0.03  # enough for one candidate, where it is fast
_HOPELESS = 1.3  # a candidate so much slower than the best has had its chance after the least number of runs


class WorkerError(RuntimeError):
    """What a worker could not do. `died` tells that its process is gone."""

    def __init__(self, reason: str, *, died: bool = False) -> None:
        super().__init__(reason)
        self.died = died


class Worker:
    """A process with an object of the class `name` of this module; started when first asked, again where it died."""

    def __init__(self, name: str, *arguments: object) -> None:
        self._name = name
        self._arguments = arguments
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 (close() closes it)

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()
        self._said.close()

    @property
    def running(self) -> bool:
        """Whether there is a process now."""
        return self._process is not None

    def stop(self) -> None:
        """End the process, whatever it does."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def ask(self, method: str, *arguments: object, timeout: float) -> Any:
        """Call a method of the object there. WorkerError: it raised, died, or had not answered after `timeout` s."""
        if self._process is None or self._connection is None:
            self._start()
        assert self._process is not None
        assert self._connection is not None
        try:
            self._connection.send((method, arguments))
            answered = self._connection.poll(timeout)
            succeeded, answer = self._connection.recv() if answered else (False, None)
        # A process that has overwritten its own memory may answer anything.
        except Exception:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(1)
            code = self._process.poll()
            self.stop()
            how = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
            raise WorkerError(f"its process ended with {how}{self._last_words()}", died=True) from None
        if not answered:
            self.stop()
            raise WorkerError(f"did not end within {timeout:g} s", died=True)
        if not succeeded:
            raise WorkerError(str(answer))
        return answer

    def _last_words(self) -> str:
        self._said.seek(0)
        last = self._said.read().decode(errors="replace").strip().rpartition("\n")[2]
        return f": {last}" if last else ""

    def _start(self) -> None:
        self._connection, theirs = Pipe()
        self._said.seek(0)
        self._said.truncate()
        code = f"from tvm_deconv._workers import serve; serve({theirs.fileno()}, {self._name!r})"
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.DEVNULL,
            stdout=self._said,
            stderr=self._said,
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # an interrupt from the keyboard is for the search, which ends its workers
        )
        theirs.close()
        self._connection.send(self._arguments)


def serve(descriptor: int, name: str) -> None:
    """Answer calls on a connection until it is closed; what a worker's process does."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    connection = Connection(descriptor)
    made = {"Builder": Builder, "Meter": Meter}[name](*connection.recv())
    while True:
        try:
            method, arguments = connection.recv()
        except EOFError:
            return
        try:
            answer = True, getattr(made, method)(*arguments)
        except Exception as error:
            answer = False, f"{type(error).__name__}: {error}"
        connection.send(answer)


@dataclass(frozen=True)
class Built:
    """A compiled candidate: the library with "deconv", that with "pack", and the elements that "pack" fills."""

    deconv: Path
    pack: Path
    packed_elements: int


class Builder:
    """Compiles candidates for one target into the directory `scratch`."""

    def __init__(self, target: str, scratch: Path, cc: str, launcher: Path) -> None:
        from tvm_deconv.targets import get

        self._target = get(target)
        self._scratch = scratch
        self._cc = cc
        self._launcher = launcher
        self._made = 0
        importlib.import_module("tvm_deconv.schedules.x86")

    def build(self, key: str, schedule: Schedule) -> Built:
        """Compile a schedule of the problem with this key. Many schedules share a "pack", which is compiled once."""
        from tvm_ffi import structural_hash

        from tvm_deconv.choices import named, plan_of
        from tvm_deconv.schedules.x86 import build_kernel

        kernel = build_kernel(Problem.from_key(key), self._target, named(schedule.algorithm), plan_of(schedule))
        pack = self._scratch / f"pack-{structural_hash(kernel.pack)}.so"
        if not pack.exists():
            self._link({"pack": kernel.pack}, pack)
        self._made += 1
        deconv = self._scratch / f"deconv-{os.getpid()}-{self._made}.so"
        self._link({"deconv": kernel.deconv}, deconv)
        return Built(deconv, pack, kernel.packed_elements)

    def _link(self, functions: dict[str, Any], path: Path) -> None:
        import tvm

        target = tvm.target.Target({"kind": "llvm", "mcpu": self._target.mcpu})
        compiled = tvm.compile(tvm.IRModule(functions), target=target)
        made = path.with_suffix(f".{os.getpid()}.so")
        compiled.export_library(str(made), addons=[str(self._launcher)], cc=self._cc)
        made.replace(path)


@dataclass(frozen=True)
class Measured:
    """Seconds per call: the median of `runs`, and half the distance between the quartiles as a part of it."""

    seconds: float
    spread: float
    runs: int


class Meter:
    """Runs candidates of one problem at a time on `threads` threads."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._ffi = import_tvm_ffi()
        self._problem: Problem | None = None
        self._expected: Array | None = None
        self._packed: dict[Path, Any] = {}

    def fma(self, library: Path) -> float:
        """Measure the multiply-adds per second of a kernel of `bench.floors`."""
        return fma_per_second(library, self._threads)

    def copy(self, size: int) -> float:
        """Measure the bytes per second of copies."""
        return copy_bytes_per_second(size, self._threads)

    def prepare(self, key: str, seed: int, reference: Built) -> None:
        """Turn to the problem with this key; what `reference` computes is what the others are held against."""
        self._problem = problem = Problem.from_key(key)
        arrays = operands(problem, seed)
        self._filter = np.ascontiguousarray(problem.canonical_filter(arrays.filter)).view(storage(problem.dtype))
        self._data = np.ascontiguousarray(arrays.data).view(storage(problem.dtype))
        self._bias = arrays.bias
        dtype, size = numpy_dtype(problem.output_dtype), math.prod(problem.output_shape)
        self._memory = np.empty(size + 2 * _GUARD, dtype)
        self._out = self._memory[_GUARD : _GUARD + size].reshape(problem.output_shape)
        self._packed = {}
        self._call(reference)()
        self._expected = self._out.astype(np.float64)

    def measure(self, built: Built, best: float) -> Measured:
        """Run a candidate, check its output, and time it; `best` is the time of the best so far in seconds."""
        problem, expected = self._problem, self._expected
        assert problem is not None
        assert expected is not None
        call = self._call(built)
        integer = self._out.dtype.kind in "iu"
        self._memory.fill(np.iinfo(self._out.dtype).min if integer else np.nan)
        around = self._memory[:_GUARD].tobytes()
        call()
        if not self._memory[:_GUARD].tobytes() == around == self._memory[-_GUARD:].tobytes():
            raise ArithmeticError("wrote outside of its output")
        found = deviation(problem, self._out, expected)
        if not found.allowed:
            raise ArithmeticError(f"differs from the default by {found.largest:.1e} of its largest element")
        return timed(call, best)

    def _call(self, built: Built) -> Callable[[], object]:
        problem = self._problem
        assert problem is not None
        if built.pack not in self._packed:
            packed = np.empty(built.packed_elements, problem.accumulate_dtype)
            self._ffi.load_module(str(built.pack)).get_function("pack")(self._filter, packed)
            self._packed[built.pack] = self._ffi.from_dlpack(packed)
        threads = ctypes.CDLL(str(built.deconv)).tvm_deconv_set_num_threads
        threads(self._threads)
        deconv = self._ffi.load_module(str(built.deconv)).get_function("deconv")
        out = self._out.view(storage(problem.output_dtype))
        arrays = [self._data, *([] if self._bias is None else [self._bias]), out]
        data, *others = (self._ffi.from_dlpack(array) for array in arrays)
        packed = self._packed[built.pack]
        return lambda: deconv(data, packed, *others)


def timed(call: Callable[[], object], best: float) -> Measured:
    """Time `call`: at least three runs, more the shorter they are, and no more where `best` is out of reach."""
    start = time.perf_counter()
    call()
    once = time.perf_counter() - start
    inner = max(1, min(1000, int(_SAMPLE_SECONDS / max(once, 1e-7))))
    samples: list[float] = []
    began = time.perf_counter()
    while len(samples) < _MOST_RUNS:
        start = time.perf_counter()
        for _ in range(inner):
            call()
        end = time.perf_counter()
        samples.append((end - start) / inner)
        if len(samples) >= _LEAST_RUNS and (end - began > _MEASURE_SECONDS or min(samples) > _HOPELESS * best):
            break
    return Measured(statistics.median(samples), _spread(samples), len(samples) * inner)


def _spread(samples: Sequence[float]) -> float:
    low, middle, high = np.quantile(samples, (0.25, 0.5, 0.75))
    return float((high - low) / (2 * middle))
