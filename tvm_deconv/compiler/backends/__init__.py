"""The backends: schedules with the compilers that make libraries of them.

Another backend is a class beside these and an entry of `BACKENDS`.
"""

from __future__ import annotations

from typing import Any

from tvm_deconv.compiler.backends.cuda import CudaBackend
from tvm_deconv.compiler.backends.x86 import X86Backend
from tvm_deconv.schedules.contract import AnyAlgorithm, Backend
from tvm_deconv.targets import Target

BACKENDS: dict[str, Backend[Any]] = {backend.name: backend for backend in (X86Backend(), CudaBackend())}


def backend_of(target: Target) -> Backend[Any]:
    """Return the backend that compiles for a target."""
    return BACKENDS[target.backend]


def every_algorithm() -> list[AnyAlgorithm]:
    """Return the algorithms of all backends, in order of preference; their names are different."""
    return [algorithm for backend in BACKENDS.values() for algorithm in backend.algorithms]
