"""Layers on CUDA devices, for arrays of torch and CuPy, without a copy.

The caller's framework allocates all memory, and a kernel runs on the current stream of that framework.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

from tvm_deconv.artifact.ffi import import_tvm_ffi
from tvm_deconv.errors import DeviceError, ProblemError, TensorError, TensorTypeError
from tvm_deconv.problem import Array, Problem
from tvm_deconv.runtime import arrays
from tvm_deconv.runtime.process import Served, guarded

_DEVICE = 2  # DLPack's type for memory of a CUDA device; 13 is managed memory, which the CPU reads too


class Framework(Protocol):
    """The operations of an array package; dtypes are named as in `Problem`, addresses and streams are numbers."""

    def dtype(self, array: Any) -> str:
        """Return the name of the dtype."""

    def contiguous(self, array: Any) -> bool:
        """Tell whether elements lie in the order of the indices, without gaps."""

    def address(self, array: Any) -> int:
        """Return the address of the first element."""

    def empty(self, shape: Sequence[int], dtype: str, device: int) -> Any:
        """Return an array on a device."""

    def plain(self, array: Any) -> Any:
        """Return a view that tvm_ffi takes: bfloat16 as uint16, and no wait for streams."""

    def canonical(self, problem: Problem, filter: Any) -> Any:
        """Return the filter as ``[G, Ci, Co, *K]``, contiguous: a copy if it is not."""

    def converted(self, array: Any, dtype: str) -> Any:
        """Return a contiguous copy of another dtype."""

    def stream(self, device: int) -> int:
        """Return the current stream of a device."""

    def to_host(self, array: Any) -> Array:
        """Return a copy in the memory of the CPU, bfloat16 as uint16, after all work before it on the stream."""

    def fill(self, array: Any, values: Array) -> None:
        """Copy `values` from the memory of the CPU into `array`, bfloat16 from uint16."""


class _Torch:
    def __init__(self) -> None:
        self.torch: Any = sys.modules["torch"]

    def dtype(self, array: Any) -> str:
        return str(array.dtype).removeprefix("torch.")

    def contiguous(self, array: Any) -> bool:
        return bool(array.is_contiguous())

    def address(self, array: Any) -> int:
        return int(array.data_ptr())

    def empty(self, shape: Sequence[int], dtype: str, device: int) -> Any:
        return self.torch.empty(tuple(shape), dtype=getattr(self.torch, dtype), device=f"cuda:{device}")

    def plain(self, array: Any) -> Any:
        # tvm_ffi reads torch's tensors by itself.
        return array.view(self.torch.uint16) if array.dtype == self.torch.bfloat16 else array

    def canonical(self, problem: Problem, filter: Any) -> Any:
        if problem.filter_format == "XIO":
            filter = filter.permute(problem.rank + 1, problem.rank, *range(problem.rank))
        return filter.reshape(problem.groups, problem.in_channels, problem.out_channels, *problem.kernel).contiguous()

    def converted(self, array: Any, dtype: str) -> Any:
        return array.to(getattr(self.torch, dtype), copy=True).contiguous()

    def stream(self, device: int) -> int:
        return int(self.torch.cuda.current_stream(device).cuda_stream)

    def to_host(self, array: Any) -> Array:
        values: Array = self.plain(array).cpu().numpy()
        return values

    def fill(self, array: Any, values: Array) -> None:
        self.plain(array).copy_(self.torch.from_numpy(values))


class _Unsynchronised:
    """An array whose consumer runs on the producer's stream, so that neither waits for the other."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __dlpack_device__(self) -> tuple[int, int]:
        kind, number = self.array.__dlpack_device__()
        return int(kind), int(number)

    def __dlpack__(self, **_: Any) -> Any:
        return self.array.__dlpack__(stream=-1)


class _CuPy:
    def __init__(self) -> None:
        self.cupy: Any = sys.modules["cupy"]

    def dtype(self, array: Any) -> str:
        return str(array.dtype)

    def contiguous(self, array: Any) -> bool:
        return bool(array.flags.c_contiguous)

    def address(self, array: Any) -> int:
        return int(array.data.ptr)

    def empty(self, shape: Sequence[int], dtype: str, device: int) -> Any:
        with self.cupy.cuda.Device(device):
            return self.cupy.empty(tuple(shape), dtype)

    def plain(self, array: Any) -> Any:
        return _Unsynchronised(self._bits(array))

    def canonical(self, problem: Problem, filter: Any) -> Any:
        return self.cupy.ascontiguousarray(problem.canonical_filter(filter))

    def converted(self, array: Any, dtype: str) -> Any:
        return array.astype(dtype, order="C", copy=True)

    def stream(self, device: int) -> int:
        with self.cupy.cuda.Device(device):
            return int(self.cupy.cuda.get_current_stream().ptr)

    def _bits(self, array: Any) -> Any:
        return array.view("uint16") if self.dtype(array) == "bfloat16" else array

    def to_host(self, array: Any) -> Array:
        values: Array = self.cupy.asnumpy(self._bits(array))
        return values

    def fill(self, array: Any, values: Array) -> None:
        self._bits(array).set(values)


#: The packages whose arrays are served, by name.
FRAMEWORKS: dict[str, Callable[[], Framework]] = {"torch": _Torch, "cupy": _CuPy}


class Borrowed(NamedTuple):
    """An array on a CUDA device, and its package."""

    array: Any
    framework: Framework
    device: int
    dtype: str
    shape: tuple[int, ...]


def holds(array: object) -> bool:
    """Tell whether `array` is in the memory of a CUDA device; never raises."""
    ask = getattr(array, "__dlpack_device__", None)
    try:
        return ask is not None and int(ask()[0]) == _DEVICE
    # Packages raise whatever class of error they like; the checks of arrays say what is wrong.
    except Exception:
        return False


def borrow(argument: str, array: Any, device: int | None = None) -> Borrowed:
    """Return `array`, which must be on a CUDA device, or on this `device`. Raises TensorTypeError, TensorError."""
    if not holds(array):
        ask = getattr(array, "__dlpack_device__", None)
        if ask is None:
            rule = "must be an array with DLPack in the memory of a CUDA device"
            raise TensorTypeError(argument, type(array).__qualname__, rule)
        rule = "must be in the memory of a CUDA device, where the filter is; this is its DLPack device"
        raise TensorError(argument, tuple(map(int, ask())), rule)
    if getattr(array, "requires_grad", False):
        raise TensorError(argument, "requires_grad", "must not require gradients, which stop here; pass detach() of it")
    package = next(
        (name for kind in type(array).__mro__ if (name := kind.__module__.partition(".")[0]) in FRAMEWORKS), ""
    )
    if not package:
        rule = f"must be of {' or '.join(FRAMEWORKS)}: no other can hold the result on a device"
        raise TensorTypeError(argument, type(array).__qualname__, rule)
    framework = FRAMEWORKS[package]()
    number = int(array.__dlpack_device__()[1])
    if device is not None and number != device:
        raise TensorError(argument, f"cuda:{number}", f"must be on cuda:{device}, where the filter is")
    return Borrowed(array, framework, number, framework.dtype(array), tuple(array.shape))


def memory_of(array: object) -> CudaMemory | None:
    """Return the memory of the CUDA device that `array` is on; None if it is not on one."""
    return CudaMemory(int(array.__dlpack_device__()[1])) if holds(array) else None  # type: ignore[attr-defined]


class CudaMemory:
    """The memory of the CUDA device number `device`."""

    def __init__(self, device: int) -> None:
        self.device: int | None = device

    def borrow(self, argument: str, array: Any) -> Borrowed:
        """Return `array`, which must be on this device. Raises TensorTypeError, TensorError."""
        return borrow(argument, array, self.device)

    def bind(
        self,
        problem: Problem,
        served: Served,
        filter: Borrowed,
        bias: Borrowed | None,
        workspace: int | Array | None = None,
    ) -> CudaCall:
        """Pack `filter` and convert `bias`, on the device; see `Library.bind`."""
        if workspace is not None:
            raise ProblemError("workspace", workspace, "must be None for a filter on a CUDA device")
        return CudaCall(problem, served, filter, bias)

    def run_once(
        self, problem: Problem, served: Served, data: Borrowed, filter: Borrowed, bias: Borrowed | None, out: Any
    ) -> Any:
        """Return the output for borrowed arrays, in `out` if that is given."""
        return CudaCall(problem, served, filter, bias).run(data.array, out)


class CudaCall:
    """A filter bound to an artifact, for arrays on the device of the filter.

    Without a manifest the artifact is the reference, which takes arrays in the memory of the CPU.
    """

    def __init__(self, problem: Problem, served: Served, filter: Borrowed, bias: Borrowed | None) -> None:
        """Pack `filter` and convert `bias`, on their device."""
        self._problem = problem
        self._artifact = served.artifact
        self._on_host = served.manifest is None
        scratch = 0 if served.manifest is None else served.manifest.scratch_bytes
        self._workspace_elements = scratch // (8 if problem.accumulate_dtype == "float64" else 4)
        self._device, framework = filter.device, filter.framework
        # Now, so that the first call may be captured for a graph.
        guarded(self._attempt, served.artifact.load, self._device)
        packed = framework.empty(*served.artifact.packed, self._device)
        canonical = framework.canonical(problem, filter.array)
        guarded(self._launch, framework, served.artifact.pack, canonical, packed)
        self._constants = [packed]
        if bias is not None:
            allowed = list(dict.fromkeys([problem.accumulate_dtype, problem.dtype]))
            _check("bias", bias, allowed, problem.bias_shape)
            self._constants.append(bias.framework.converted(bias.array, problem.accumulate_dtype))

    def run(self, data: Any, out: Any = None, threads: int | None = None, host: int = 0) -> Any:
        """Return the output for `data`; see `Layer`."""
        if threads is not None:
            raise ProblemError("threads", threads, "must be None: a device computes")
        if host:
            raise ProblemError("host", host, "must be 0: a device computes")
        problem = self._problem
        borrowed = borrow("data", data, self._device)
        framework = borrowed.framework
        _check("data", borrowed, [problem.dtype], problem.data_shape)
        _check_memory("data", borrowed)
        if out is None:
            out = framework.empty(problem.output_shape, problem.output_dtype, self._device)
        else:
            result = borrow("out", out, self._device)
            _check("out", result, [problem.output_dtype], problem.output_shape)
            _check_memory("out", result)
            _check_apart(borrowed, result)
        if 0 in problem.output_shape:
            return out
        workspace = []
        if self._workspace_elements:
            # Anew for every call, from the framework's cache: calls may run at the same time on several streams.
            workspace = [framework.empty((self._workspace_elements,), problem.accumulate_dtype, self._device)]
        self._launch(framework, self._artifact, data, *self._constants, *workspace, out)
        return out

    def _launch(self, framework: Framework, function: Any, *operands: Any) -> None:
        """Call `function` on the framework's current stream. Raises DeviceError if it fails."""
        if self._on_host:
            *inputs, out = operands
            result = framework.to_host(out)
            function(*map(framework.to_host, inputs), result)
            framework.fill(out, result)
            return
        tvm_ffi = import_tvm_ffi()
        device = tvm_ffi.device("cuda", self._device)
        stream: AbstractContextManager[Any] = tvm_ffi.use_raw_stream(device, framework.stream(self._device))
        with stream:
            self._attempt(function, *map(framework.plain, operands))

    def _attempt(self, function: Any, *arguments: Any) -> None:
        """Call `function`, of an artifact. Raises DeviceError if it fails."""
        try:
            function(*arguments)
        # tvm_ffi raises whatever class of error the C++ side names.
        except Exception as error:
            raise DeviceError("device", f"cuda:{self._device}", f"failed: {error}") from error


def _check(argument: str, borrowed: Borrowed, dtypes: Sequence[str], shape: tuple[int, ...]) -> None:
    arrays.check_type(argument, borrowed.dtype, dtypes)
    arrays.check_shape(argument, borrowed.shape, shape)


def _check_memory(argument: str, borrowed: Borrowed) -> None:
    """Raise TensorError unless the array is contiguous and each element is aligned to its size."""
    if not borrowed.framework.contiguous(borrowed.array):
        rule = f"must be C-contiguous, of shape {borrowed.shape}; pass a contiguous copy"
        raise TensorError(argument, "strided", rule)
    address, size = borrowed.framework.address(borrowed.array), int(borrowed.array.dtype.itemsize)
    if address % size:
        rule = f"address must be a multiple of {size}, the size of an element; pass a copy"
        raise TensorError(argument, hex(address), rule)


def _check_apart(data: Borrowed, out: Borrowed) -> None:
    """Raise TensorError if the two arrays share memory."""
    bounds = []
    for borrowed in (data, out):
        first = borrowed.framework.address(borrowed.array)
        bounds.append((first, first + int(borrowed.array.nbytes)))
    if bounds[0][0] < bounds[1][1] and bounds[1][0] < bounds[0][1]:
        raise TensorError("out", "overlapping", "must not share memory with data, which is read while out is written")
