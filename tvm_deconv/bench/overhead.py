"""The cost of the package besides its kernels: import, load, the first call, a call, a parallel launch, idling.

Figures are medians, or the smallest mean of some batches. Imports, loads and first calls run in fresh interpreters.
The machine should be idle. `docs/reliability.md` has figures.
"""

from __future__ import annotations

import ctypes
import dataclasses
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tvm_deconv.artifact.files import temporary_folder
from tvm_deconv.artifact.manifest import Manifest, library_name, stem
from tvm_deconv.compiler.build import export
from tvm_deconv.problem import Problem
from tvm_deconv.problem.arrays import empty_lines
from tvm_deconv.runtime import loader, threads
from tvm_deconv.runtime.layer import Layer
from tvm_deconv.runtime.library import load
from tvm_deconv.runtime.process import Artifact
from tvm_deconv.targets import native

_SMALL = Problem(1, 1, 2, 2, (4,), (2,), (2,), (1,), (0,), (8,))
_OTHER = _SMALL.replace(out_channels=3)
_ARTIFACTS = 100
_IMPORT = "import time; start = time.process_time(); import tvm_deconv; print(time.process_time() - start)"
_LOAD = """
import sys, time
import tvm_deconv as td
start = time.perf_counter()
td.load(sys.argv[1])
print(time.perf_counter() - start)
"""
_FIRST = """
import sys, time
import numpy as np
import tvm_deconv as td
library, problems = td.load(sys.argv[1]), [td.Problem.from_key(key) for key in sys.argv[3:]]
for problem in problems:
    filter, data = np.ones(problem.filter_shape, problem.dtype), np.ones(problem.data_shape, problem.dtype)
    start = time.perf_counter()
    library.bind(problem, filter)(data)
    taken = time.perf_counter() - start
    if problem.key == sys.argv[2]:
        print(taken)
"""


class Figure(NamedTuple):
    """One measurement: `value` in `unit`."""

    name: str
    value: float
    unit: str


def measure(rounds: int = 9) -> list[Figure]:
    """Measure everything on this machine, with an artifact that is built for it; medians are of `rounds`."""
    with temporary_folder() as folder:
        one, many = folder / "one", folder / "many"
        manifest = export(_SMALL, native(), one)
        export(_OTHER, native(), one)
        _multiply(manifest, many)
        layer = load(one).bind(_SMALL, np.ones(_SMALL.filter_shape, np.float32))

        def first(problem: Problem) -> float:
            return _printed(_FIRST, str(one), problem.key, _SMALL.key, _OTHER.key)

        milliseconds = {
            "import tvm_deconv, NumPy included: processor time": _median(rounds, lambda: _printed(_IMPORT)),
            f"load of {_ARTIFACTS} artifacts, a process's first": _median(rounds, lambda: _printed(_LOAD, str(many))),
            "first bind and call, of a process's first artifact": _median(rounds, lambda: first(_SMALL)),
            "first bind and call, of a second artifact": _median(rounds, lambda: first(_OTHER)),
        }
        figures = [Figure(name, 1e3 * seconds, "ms") for name, seconds in milliseconds.items()]
        return [*figures, *_calls(layer, loader.load(one, manifest)), *_launches(rounds)]


def _multiply(manifest: Manifest, directory: Path) -> None:
    """Write the manifests of `_ARTIFACTS` artifacts to load; their libraries are empty, since none is opened."""
    directory.mkdir()
    for batch in range(1, _ARTIFACTS + 1):
        key = _SMALL.replace(batch=batch).artifact_key
        name = stem(key, manifest.target)
        made = dataclasses.replace(manifest, problem=key, library=library_name(name, manifest.sha256))
        (directory / f"{name}.json").write_text(made.to_json(), encoding="utf-8")
        (directory / made.library).touch()


def _median(rounds: int, measured: Callable[[], float]) -> float:
    return statistics.median(measured() for _ in range(rounds))


def _timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _printed(program: str, *arguments: str) -> float:
    command = [sys.executable, "-c", program, *arguments]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def _smallest(call: Callable[[], object], calls: int = 2000, batches: int = 20) -> float:
    """Return the seconds of one call: the smallest mean of some batches."""

    def batch() -> None:
        for _ in range(calls):
            call()

    return min(_timed(batch) for _ in range(batches)) / calls


def _calls(layer: Layer, artifact: Artifact) -> list[Figure]:
    packed = empty_lines(artifact.packed[0], np.dtype(artifact.packed[1]))
    artifact.pack(np.ones(_SMALL.replace(filter_format="GIOX").filter_shape, np.float32), packed)
    data, out = np.ones(_SMALL.data_shape, np.float32), np.empty(_SMALL.output_shape, np.float32)
    constant, deconv = artifact.constant(packed), artifact.deconv
    before = threads.get_num_threads()
    try:
        threads.set_num_threads(1)
        kernel = _smallest(lambda: deconv(0, 0, 0, data, constant, out))
        figures = {
            "smallest kernel, called directly": kernel,
            "call of a Layer with out, above that": _smallest(lambda: layer(data, out)) - kernel,
            "call of a Layer, above that": _smallest(lambda: layer(data)) - kernel,
            "call of a Layer with out and threads, above that": _smallest(lambda: layer(data, out, threads=1)) - kernel,
        }
    finally:
        threads.set_num_threads(before)
    return [Figure(name, 1e6 * seconds, "us") for name, seconds in figures.items()]


def _launches(rounds: int) -> list[Figure]:
    """Time parallel launches of tasks that do nothing; the cost of ctypes is subtracted."""
    library = threads.launcher()
    assert library is not None  # an artifact is loaded
    table = ctypes.cast(
        ctypes.c_void_p.in_dll(library, "tvm_deconv_runtime_v5").value or 0, ctypes.POINTER(ctypes.c_void_p)
    )
    launch = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)(table[0] or 0)
    c = ctypes.CDLL(None)
    task = ctypes.cast(c.isalpha, ctypes.c_void_p)  # does nothing and returns 0 for the numbers of the first tasks
    nothing = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)(("isalpha", c))

    def start() -> None:
        launch(task, None, 0)

    def asleep() -> float:
        time.sleep(0.001)
        return _timed(start)

    def idle() -> float:
        start()
        before = time.process_time()
        time.sleep(0.3)
        return time.process_time() - before

    own = _smallest(lambda: nothing(None, None, 0))
    before = threads.get_num_threads()
    try:
        threads.set_num_threads(1)
        alone = _smallest(start) - own
        threads.set_num_threads(2)
        awake = _smallest(start) - own
        sleeping = statistics.median(asleep() for _ in range(20 * rounds)) - own
        idling = _median(min(rounds, 5), idle)
    finally:
        threads.set_num_threads(before)
    figures = {
        "launch on one thread": alone,
        "launch on two threads, worker awake": awake,
        "launch on two threads, worker asleep": sleeping,
        "processor time of 300 ms without a launch": idling,
    }
    return [Figure(name, 1e6 * seconds, "us") for name, seconds in figures.items()]
