"""The processes of a search: builders, which compile candidates, and a meter, which runs them.

A candidate may crash, hang or write where it should not. The meter is therefore a process of its own that a search can
lose: it loads what the builders linked, with the launcher as in an artifact, and needs neither TVM nor much time to
start. Where candidates run is its `Place`: that process, or a server elsewhere (`_remote`). Builders are processes too,
so that they work at the same time, and since a compiler may crash as well.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from tvm_deconv.artifact import files
from tvm_deconv.artifact.ffi import import_tvm_ffi
from tvm_deconv.bench.floors import beyond_caches, copy_bytes_per_second, fma_per_second
from tvm_deconv.compiler.process import Refusal
from tvm_deconv.compiler.records import Schedule
from tvm_deconv.problem import Array, Problem
from tvm_deconv.problem.arrays import empty, numpy_dtype, storage
from tvm_deconv.problem.testing import deviation, operands
from tvm_deconv.targets import Capability, Host, detect_host

if TYPE_CHECKING:
    from tvm_deconv.tuning.remote import Servers

_LEAST_RUNS = 3
_MOST_RUNS = 50
_GUARD = 64  # elements before and behind an output
_SAMPLE_SECONDS = 2e-4  # shorter calls are timed several at a time
_MEASURE_SECONDS = 0.03  # enough for one candidate, where it is fast
_HOPELESS = 1.3  # a candidate so much slower than the best has had its chance after the least number of runs


@dataclass(frozen=True)
class Built:
    """A compiled candidate: the library with "deconv", that with "pack", and the elements that "pack" fills.

    Those are accumulators, or of `packed_dtype`. "deconv" takes so many elements of workspace as an argument.
    """

    deconv: Path
    pack: Path
    packed_elements: int
    packed_dtype: str = ""
    workspace_elements: int = 0


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

        kernel = self._kernel(Problem.from_key(key), schedule)
        pack = self._scratch / f"pack-{structural_hash(kernel.pack)}.so"
        if not pack.exists():
            self._link({"pack": kernel.pack}, pack)
        self._made += 1
        deconv = self._scratch / f"deconv-{os.getpid()}-{self._made}.so"
        self._link({"deconv": kernel.deconv}, deconv)
        device = {
            name: getattr(kernel, name) for name in ("packed_dtype", "workspace_elements") if hasattr(kernel, name)
        }
        return Built(deconv, pack, kernel.packed_elements, **device)

    def _kernel(self, problem: Problem, schedule: Schedule) -> Any:
        from tvm_deconv.compiler.choices import named, plan_of
        from tvm_deconv.schedules.x86 import build_kernel

        return build_kernel(problem, self._target, named(schedule.algorithm), plan_of(schedule))

    def _link(self, functions: dict[str, Any], path: Path) -> None:
        import tvm

        target = tvm.target.Target({"kind": "llvm", "mcpu": self._target.mcpu})
        compiled = tvm.compile(tvm.IRModule(functions), target=target)
        with files.replacing(path) as made:
            compiled.export_library(str(made), addons=[str(self._launcher)], cc=self._cc)


class CudaBuilder(Builder):
    """Compiles candidates for devices of one capability into the directory `scratch`, by `nvcc`."""

    def __init__(self, target: str, scratch: Path, nvcc: str, capability: Capability) -> None:
        from tvm_deconv.targets import CUDA_TARGETS

        found = CUDA_TARGETS[target]
        # One architecture is soon compiled, and the device runs no other.
        code = found.fit(capability)
        self._devices = replace(found, code=(code,), ptx=()) if code in found.code else found
        self._scratch, self._nvcc, self._made = scratch, nvcc, 0
        importlib.import_module("tvm_deconv.schedules.cuda")

    def _kernel(self, problem: Problem, schedule: Schedule) -> Any:
        from tvm_deconv.compiler.choices import named, plan_of
        from tvm_deconv.schedules.cuda import build_kernel

        return build_kernel(problem, named(schedule.algorithm), plan_of(schedule))

    def _link(self, functions: dict[str, Any], path: Path) -> None:
        from tvm_deconv.compiler.nvcc import compile_library
        from tvm_deconv.schedules.cuda import source

        with files.replacing(path) as made:
            for kernel in compile_library(source(functions), made, self._devices, self._nvcc):
                if kernel.spill_bytes or kernel.stack_bytes:
                    needs = f"spills {kernel.spill_bytes} bytes, its stack has {kernel.stack_bytes}"
                    raise Refusal(f"{kernel.kernel} {needs}")


@dataclass(frozen=True)
class Measured:
    """Seconds per call: the median of `runs`, and half the distance between the quartiles as a part of it."""

    seconds: float
    spread: float
    runs: int


class Bound(NamedTuple):
    """A function with its arguments: `run` calls it, `sample(number, repeat)` times `repeat` means of `number`"""

    run: Callable[[], object]
    sample: Callable[[int, int], Sequence[float]]


class Output(Protocol):
    """An array to write into, between guards; `argument` is what a function takes for it."""

    argument: Any

    def poison(self, byte: int) -> None:
        """Fill it and its guards with this byte."""

    def intact(self, byte: int) -> bool:
        """Whether the guards hold what they were filled with."""

    def read(self) -> Array:
        """Return the elements."""


class Place(Protocol):
    """Where a meter's candidates run: this process, or a server. Arrays that cross have dtypes of NumPy alone."""

    def host(self) -> Host:
        """Return what the machine there is."""

    def fma(self, library: Path) -> float:
        """Measure the multiply-adds per second of a kernel of `bench.floors`."""

    def copy(self) -> float:
        """Measure the bytes per second of copies that no cache serves."""

    def attempt(self, seconds: float) -> AbstractContextManager[object]:
        """Return the context of what runs candidates and may take so long."""

    def put(self, array: Array) -> Any:
        """Return an array there that equals `array`, for functions to take."""

    def output(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Output:
        """Return an array for results."""

    def bind(self, library: Path, name: str, arguments: Sequence[Any]) -> Bound:
        """Return a function of a library that the launcher is linked into, with its arguments."""


class Here:
    """This process, as a `Place`: whoever asks it ends it where a candidate takes too long."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._ffi = import_tvm_ffi()

    def host(self) -> Host:
        """Return this machine."""
        return detect_host()

    def fma(self, library: Path) -> float:
        """Measure the multiply-adds per second."""
        return fma_per_second(library, self._threads)

    def copy(self) -> float:
        """Measure the bytes per second of copies."""
        return copy_bytes_per_second(beyond_caches(), self._threads)

    def attempt(self, seconds: float) -> AbstractContextManager[object]:  # noqa: ARG002
        """Return a context that does nothing."""
        return contextlib.nullcontext()

    def put(self, array: Array) -> Any:
        """Return a tensor that shares its memory."""
        return self._ffi.from_dlpack(array)

    def output(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Output:
        """Return an array for results."""
        return _OutputHere(shape, dtype, self._ffi)

    def bind(self, library: Path, name: str, arguments: Sequence[Any]) -> Bound:
        """Return a function of a library with its arguments."""
        ctypes.CDLL(str(library)).tvm_deconv_set_num_threads(self._threads)
        function = self._ffi.load_module(str(library)).get_function(name)

        def run() -> None:
            function(*arguments)

        def sample(number: int, repeat: int) -> list[float]:
            found = []
            for _ in range(repeat):
                start = time.perf_counter()
                for _ in range(number):
                    function(*arguments)
                found.append((time.perf_counter() - start) / number)
            return found

        return Bound(run, sample)


class _OutputHere:
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


class Meter:
    """Runs candidates of one problem at a time on `threads` threads, here or at a server of a tracker."""

    def __init__(self, threads: int, servers: Servers | None = None, place: Place | None = None) -> None:
        if servers is None:
            self._place = place or Here(threads)
        else:
            from tvm_deconv.tuning.remote import Server

            self._place = Server(threads, servers)
        self._problem: Problem | None = None
        self._packed: dict[Path, Any] = {}

    def host(self) -> Host:
        """Return the machine that candidates run on."""
        return self._place.host()

    def fma(self, library: Path, timeout: float) -> float:
        """Measure the multiply-adds per second of a kernel of `bench.floors`."""
        with self._place.attempt(timeout):
            return self._place.fma(library)

    def copy(self, timeout: float) -> float:
        """Measure the bytes per second of copies."""
        with self._place.attempt(timeout):
            return self._place.copy()

    def prepare(self, key: str, seed: int, reference: Built, timeout: float) -> None:
        """Turn to the problem with this key; what `reference` computes is what the others are held against."""
        self._problem = problem = Problem.from_key(key)
        arrays = operands(problem, seed)
        filter = np.ascontiguousarray(problem.canonical_filter(arrays.filter))
        self._poison = 0x80 if numpy_dtype(problem.output_dtype).kind in "iu" else 0xFF  # which is NaN
        self._packed = {}
        with self._place.attempt(timeout):
            self._filter = self._place.put(filter.view(storage(problem.dtype)))
            others = [np.ascontiguousarray(arrays.data).view(storage(problem.dtype))]
            others += [] if arrays.bias is None else [arrays.bias]
            self._data, *self._bias = (self._place.put(array) for array in others)
            self._out = self._place.output(problem.output_shape, storage(problem.output_dtype))
            self._bind(reference).run()
            self._expected = self._read().astype(np.float64)

    def measure(self, built: Built, best: float, timeout: float) -> Measured:
        """Run a candidate, check its output, and time it; `best` is the time of the best so far in seconds.

        Raises ArithmeticError where the output is wrong.
        """
        problem = self._problem
        assert problem is not None
        with self._place.attempt(timeout):
            bound = self._bind(built)
            self._out.poison(self._poison)
            bound.run()
            if not self._out.intact(self._poison):
                raise ArithmeticError("wrote outside of its output")
            found = deviation(problem, self._read(), self._expected)
            if not found.allowed:
                raise ArithmeticError(f"differs from the default by {found.largest:.1e} of its largest element")
            return timed(bound.sample, best)

    def _read(self) -> Array:
        assert self._problem is not None
        return self._out.read().view(numpy_dtype(self._problem.output_dtype))

    def _bind(self, built: Built) -> Bound:
        problem = self._problem
        assert problem is not None
        if built.pack not in self._packed:
            packed = self._place.put(
                empty((built.packed_elements,), np.dtype(built.packed_dtype or problem.accumulate_dtype))
            )
            self._place.bind(built.pack, "pack", (self._filter, packed)).run()
            self._packed[built.pack] = packed
        elements = built.workspace_elements
        workspace = [self._place.put(np.empty(elements, problem.accumulate_dtype))] if elements else []
        arguments = (self._data, self._packed[built.pack], *self._bias, *workspace, self._out.argument)
        return self._place.bind(built.deconv, "deconv", arguments)


def timed(sample: Callable[[int, int], Sequence[float]], best: float) -> Measured:
    """Take `Bound.sample`s: at least three, more the shorter they are, and no more where `best` is out of reach."""
    (once,) = sample(1, 1)
    inner = max(1, min(1000, int(_SAMPLE_SECONDS / max(once, 1e-7))))
    samples = list(sample(inner, _LEAST_RUNS))
    shortest = min(samples)
    enough = min(_MOST_RUNS, math.ceil(_MEASURE_SECONDS / (inner * max(shortest, 1e-9))))
    if shortest <= _HOPELESS * best and enough > _LEAST_RUNS:
        samples += sample(inner, enough - _LEAST_RUNS)
    return Measured(statistics.median(samples), _spread(samples), len(samples) * inner)


def _spread(samples: Sequence[float]) -> float:
    low, middle, high = np.quantile(samples, (0.25, 0.5, 0.75))
    return float((high - low) / (2 * middle))
