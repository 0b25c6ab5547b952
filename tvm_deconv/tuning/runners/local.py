"""Running candidates on the CPUs of this machine."""

from __future__ import annotations

import contextlib
import ctypes
import math
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np

from tvm_deconv.artifact.ffi import import_tvm_ffi
from tvm_deconv.bench.floors import beyond_caches, copy_bytes_per_second, fma_per_second
from tvm_deconv.problem import Array
from tvm_deconv.problem.arrays import empty
from tvm_deconv.targets import Host, detect_host
from tvm_deconv.tuning.runners.base import SingleProcessRunner
from tvm_deconv.tuning.runners.machine import Bound, Output

_GUARD = 64  # elements before and behind an output


class LocalRunner(SingleProcessRunner):
    """Runs candidates on `threads` threads of this machine."""

    local = True

    def __init__(self, threads: int) -> None:
        super().__init__(threads, LocalMachine, threads)

    @property
    def host(self) -> Host:
        """This machine."""
        return detect_host()


class LocalMachine:
    """This process, as a `Machine`; the runner ends it when a candidate takes too long."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._ffi = import_tvm_ffi()

    def host(self) -> Host:
        """Describe this machine."""
        return detect_host()

    def multiply_adds(self, dtype: str, kernel: Path | None = None) -> float:  # noqa: ARG002
        """Measure the multiply-adds per second of `kernel`."""
        assert kernel is not None
        return fma_per_second(kernel, self._threads)

    def copy(self) -> float:
        """Measure the bytes per second of copies."""
        return copy_bytes_per_second(beyond_caches(), self._threads)

    def attempt(self, seconds: float) -> AbstractContextManager[object]:  # noqa: ARG002
        """Return a context that does nothing."""
        return contextlib.nullcontext()

    def put(self, array: Array) -> Any:
        """Return a tensor that shares the memory of `array`."""
        return self._ffi.from_dlpack(array)

    def output(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Output:
        """Allocate an array for results."""
        return _LocalOutput(shape, dtype, self._ffi)

    def bind(self, library: Path, name: str, arguments: Sequence[Any]) -> Bound:
        """Return a function of a library with its arguments."""
        ctypes.CDLL(str(library)).tvm_deconv_set_num_threads(self._threads)
        function = self._ffi.load_module(str(library)).get_function(name)
        # On one thread other programs cost nothing: its own clock stops while they run.
        clock = time.thread_time if self._threads == 1 else time.perf_counter
        wall = cpu = 0.0

        def run() -> float:
            (seconds,) = sample(1, 1)
            return seconds

        def sample(number: int, repeat: int) -> list[float]:
            nonlocal wall, cpu
            means = []
            for _ in range(repeat):
                begun, start = time.perf_counter(), clock()
                for _ in range(number):
                    function(*arguments)
                taken = clock() - start
                means.append(taken / number)
                wall, cpu = wall + time.perf_counter() - begun, cpu + taken
            return means

        def waited() -> float | None:
            return max(1 - cpu / wall, 0.0) if self._threads == 1 and wall else None

        return Bound(run, sample, waited)


class _LocalOutput:
    """An array between guards in this process."""

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[Any], ffi: Any) -> None:
        size = math.prod(shape)
        self._memory = empty((size + 2 * _GUARD,), dtype)
        self._array = self._memory[_GUARD : _GUARD + size].reshape(shape)
        self.argument = ffi.from_dlpack(self._array)

    def poison(self, byte: int) -> None:
        self._memory.view(np.uint8).fill(byte)

    def intact(self, byte: int) -> bool:
        guards = self._memory[:_GUARD], self._memory[-_GUARD:]
        return all(bool((guard.view(np.uint8) == byte).all()) for guard in guards)

    def read(self) -> Array:
        return self._array
