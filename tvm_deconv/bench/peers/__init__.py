"""The contenders of a comparison: our artifacts, and the same layers in other packages.

A contender is written as a user of that package would who cares about speed: constant weights, the epilogue as further
operators that the package may fuse, float32 arithmetic on float32 data, low precision written as the package takes it,
and outputs allocated beforehand if the package can. Data in a layout that a package does not have is brought into its
own before the clock starts; mnn.py and ncnn.py say when they count it.

Each contender has a process, since thread settings are read once per process and OpenMP libraries clash.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import resource
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tvm_deconv.bench.floors import copy_bytes_per_second, fma_per_second
from tvm_deconv.bench.peers.common import Prepare, Prepared, Task, Turn, Unsupported, turn
from tvm_deconv.problem import Problem
from tvm_deconv.problem.testing import Deviation, deviation

__all__ = [
    "DEFAULT",
    "OURS",
    "OWN",
    "PEERS",
    "SINGLE",
    "Contender",
    "Peer",
    "Prepared",
    "Task",
    "Turn",
    "Unsupported",
    "turn",
]

#: The artifact that is chosen, by tuning logs too, the one that arithmetic alone chooses, and the layer in float32.
OWN = OURS, DEFAULT, SINGLE = "tvm_deconv", "default", "float32"


@dataclass(frozen=True)
class Peer:
    """Another package: the `distribution` whose version counts, and the modules that it takes, with who has them.

    The function `prepare` of the module `kept_in`, which lies beside this one, makes a layer ready.
    """

    distribution: str
    kept_in: str
    modules: Mapping[str, str] = field(default_factory=dict)
    prepare: str = "prepare"

    @property
    def missing(self) -> list[str]:
        """The distributions that are not installed."""
        return [owner for module, owner in self.modules.items() if importlib.util.find_spec(module) is None]

    def load(self) -> Prepare:
        """Return the function that makes a layer ready."""
        function: Prepare = getattr(importlib.import_module(f"{__name__}.{self.kept_in}"), self.prepare)
        return function


_ONNX = {"onnx": "onnx"}
#: name of a peer -> what it is
PEERS: Mapping[str, Peer] = {
    "onnxruntime": Peer("onnxruntime", "onnxruntime", {"onnxruntime": "onnxruntime", **_ONNX}),
    "openvino": Peer("openvino", "openvino", {"openvino": "openvino", **_ONNX}),
    "torch": Peer("torch", "torch", {"torch": "torch"}),
    "torch-channels-last": Peer("torch", "torch", {"torch": "torch"}, "prepare_channels_last"),
    "mnn": Peer("MNN", "mnn", {"MNN": "MNN", **_ONNX}),
    "ncnn": Peer("ncnn", "ncnn", {"ncnn": "ncnn"}),
    "litert": Peer("ai-edge-litert", "litert", {"ai_edge_litert": "ai-edge-litert"}),
    "jax": Peer("jax", "jax", {"jax": "jax"}),
}
_CONTENDERS = {**dict.fromkeys(OWN, Peer("tvm_deconv", "ours")), **PEERS}


class Contender:
    """One contender, in its process."""

    def __init__(self, name: str, threads: int) -> None:
        self.name = name
        self.threads = threads
        self._prepared: Prepared | None = None
        self._problem: Problem | None = None

    def version(self) -> str:
        """Return the version of the package."""
        return importlib.metadata.version(_CONTENDERS[self.name].distribution)

    def prepare(self, task: Task) -> str:
        """Make a layer ready and run it once; return the note on how it runs."""
        self._prepared = None
        self._problem = task.problem
        prepared = _CONTENDERS[self.name].load()(task, task.operands, self.threads)
        prepared.run()
        self._prepared = prepared
        return prepared.note

    def turn(self, seconds: float) -> Turn:
        """Time the layer, and note what disturbed it."""
        assert self._prepared is not None
        before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        taken = turn(self._prepared.run, seconds)
        after, wall = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter() - start
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return taken._replace(wall=wall, cpu=cpu, preempted=after.ru_nivcsw - before.ru_nivcsw)

    def check(self, expected: Path) -> Deviation:
        """Compare the output with the array in the file `expected`."""
        assert self._prepared is not None
        assert self._problem is not None
        output = self._prepared.output()
        return deviation(self._problem, output, np.load(expected, mmap_mode="r"), fused=self.name in OWN)

    def fma(self, library: Path) -> float:
        """Measure the multiply-adds per second of the kernel in `library`, on all threads."""
        return fma_per_second(library, self.threads)

    def copy(self, size: int) -> float:
        """Measure the bytes per second, read plus written, of copies of `size` bytes in all."""
        return copy_bytes_per_second(size, self.threads)
