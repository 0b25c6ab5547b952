"""A filter bound to its artifact: `Layer`, the same for every kind of memory.

A `Memory` borrows callers' arrays and binds filters: `host.HostMemory` for the CPU's, `cuda.CudaMemory` for that of a
CUDA device. It makes the `Call` by which a layer computes.
"""

from __future__ import annotations

from typing import Any, NoReturn, Protocol

from tvm_deconv.artifact.manifest import Manifest
from tvm_deconv.errors import ProblemError
from tvm_deconv.problem import Array, Problem, Scaling
from tvm_deconv.runtime.process import Served


class Call(Protocol):
    """A filter bound to its artifact in one kind of memory."""

    def run(self, data: Any, out: Any = None, threads: int | None = None, host: int = 0) -> Any:
        """Return the output for `data`; see `Layer`."""


class Memory(Protocol):
    """A kind of memory; `device` is the number of a CUDA device, None for the CPU."""

    @property
    def device(self) -> int | None:
        """The number of the CUDA device."""

    def borrow(self, argument: str, array: Any) -> Any:
        """Return a view of `array`, with its `dtype` and `shape`. Raises TensorError if it lies elsewhere."""

    def bind(
        self,
        problem: Problem,
        served: Served,
        filter: Any,
        bias: Any,
        scaling: Scaling | None,
        workspace: int | Array | None,
    ) -> Call:
        """Pack the borrowed `filter` and convert the borrowed `bias`; see `Library.bind`."""

    def run_once(self, problem: Problem, served: Served, data: Any, filter: Any, bias: Any, out: Any) -> Any:
        """Return the output for borrowed `data`, `filter` and `bias`, in `out` if that is given."""


class Layer:
    """A filter bound to its artifact: `layer(data, out=None)`. It may be called from several threads.

    `manifest` is that of the artifact; None if NumPy computes in its place.
    """

    def __init__(self, problem: Problem, served: Served, call: Call) -> None:
        """`Library.bind` makes layers."""
        self._call: Any = call
        self.problem = problem
        self.manifest: Manifest | None = served.manifest
        self._name = served.artifact.name
        self._run = call.run

    def __repr__(self) -> str:
        return f"<Layer {self.problem.key} by {self._name}>"

    def __reduce__(self) -> NoReturn:
        """Refuse: a layer holds memory and code of its process."""
        raise ProblemError("layer", self, "must not be copied or pickled: bind it again, in the process that calls it")

    def __call__(self, data: Any, out: Any = None, *, threads: int | None = None, host: int = 0) -> Any:
        """Return the output for `data`, in `out` if that is given, computed by up to `threads` threads.

        `data` has shape ``problem.data_shape`` and dtype ``problem.dtype``. The output has ``problem.output_shape`` and
        ``problem.output_dtype`` and is of the kind of `data`, or is `out` itself. If the problem is variable, its
        dynamic extents are those of `data`, and ``problem.at(data.shape)`` has the output's. On a CUDA device the
        kernel runs on the current stream of the package of `data`, and `threads` must be None.

        `host` is the address of a `struct host`, whose threads compute in place of the launcher's (docs/launcher.md).

        Raises TensorError, TensorTypeError, ProblemError for `threads` and `host`, and DeviceError if a device fails.
        """
        return self._run(data, out, threads, host)


def native(layer: Layer) -> tuple[Any, tuple[Any, ...]]:
    """Return the function of `layer`'s artifact and its arguments between data and output, as objects of tvm_ffi.

    They are for callers in C, which check data and output themselves. Layers on the CPU have them, if an artifact
    computes them.
    """
    call = layer._call
    return call.artifact.deconv, call.constants
