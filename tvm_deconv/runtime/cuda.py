"""Layers on CUDA devices, for arrays of torch and CuPy, without a copy.

The caller's framework allocates all memory, and a kernel runs on the current stream of that framework.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

from tvm_deconv.artifact.ffi import import_tvm_ffi
from tvm_deconv.errors import DeviceError, ProblemError, TensorError, TensorTypeError
from tvm_deconv.problem import Array, Problem, Scaling
from tvm_deconv.problem.quantization import bound_arrays
from tvm_deconv.runtime import arrays
from tvm_deconv.runtime.process import Served, guarded

_DEVICE = 2  # DLPack's type for memory of a CUDA device; 13 is managed memory, which the CPU reads too
_NEWER_PTX = "cudaErrorUnsupportedPtxVersion"


class Shared(Protocol):
    """An array of a framework that its current stream has written, for kernels on every stream to read."""

    def read_on(self, stream: int) -> Any:
        """Return the array for a kernel on `stream`.

        That kernel waits for what has written the array, and the memory is not reused before it has ended. A stream
        that captures does not wait: nothing from outside of a capture may be waited for.
        """


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

    def bits(self, array: Any) -> Any:
        """Return a view of bfloat16 as uint16, all else as it is."""

    def plain(self, array: Any) -> Any:
        """Return a view that tvm_ffi takes without any wait for streams, for a call on the current one."""

    def shared(self, array: Any, device: int) -> Shared:
        """Return `array`, which the current stream of a device has written, for kernels on every stream."""

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

    def bits(self, array: Any) -> Any:
        return array.view(self.torch.uint16) if array.dtype == self.torch.bfloat16 else array

    def plain(self, array: Any) -> Any:
        view = self.bits(array)
        # With this tvm_ffi reads torch's tensors by itself; else it would have the legacy stream wait.
        return view if hasattr(view, "__dlpack_c_exchange_api__") else _Unsynchronised(view)

    def shared(self, array: Any, device: int) -> Shared:
        return _TorchShared(self.torch.cuda, array, device)

    def canonical(self, problem: Problem, filter: Any) -> Any:
        if problem.filter_format == "XIO":
            filter = filter.permute(problem.rank + 1, problem.rank, *range(problem.rank))
        return filter.reshape(problem.groups, problem.in_channels, problem.out_channels, *problem.kernel).contiguous()

    def converted(self, array: Any, dtype: str) -> Any:
        return array.to(getattr(self.torch, dtype), copy=True).contiguous()

    def stream(self, device: int) -> int:
        return int(self.torch.cuda.current_stream(device).cuda_stream)

    def to_host(self, array: Any) -> Array:
        values: Array = self.bits(array).cpu().numpy()
        return values

    def fill(self, array: Any, values: Array) -> None:
        self.bits(array).copy_(self.torch.from_numpy(values))


class _TorchShared:
    def __init__(self, cuda: Any, array: Any, device: int) -> None:
        self._cuda, self._array, self._device = cuda, array, device
        self._home = cuda.current_stream(device)
        self._written = self._home.record_event()

    def read_on(self, stream: int) -> Any:
        if stream != self._home.cuda_stream:
            current = self._cuda.current_stream(self._device)
            reader = current if current.cuda_stream == stream else self._cuda.ExternalStream(stream, self._device)
            with self._cuda.stream(reader):
                captures = self._cuda.is_current_stream_capturing()
            if not captures:
                reader.wait_event(self._written)
                self._array.record_stream(reader)
        return self._array


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

    def bits(self, array: Any) -> Any:
        return array.view("uint16") if self.dtype(array) == "bfloat16" else array

    def plain(self, array: Any) -> Any:
        return _Unsynchronised(self.bits(array))

    def shared(self, array: Any, device: int) -> Shared:
        return _CuPyShared(self.cupy.cuda, array, device)

    def canonical(self, problem: Problem, filter: Any) -> Any:
        return self.cupy.ascontiguousarray(problem.canonical_filter(filter))

    def converted(self, array: Any, dtype: str) -> Any:
        return array.astype(dtype, order="C", copy=True)

    def stream(self, device: int) -> int:
        with self.cupy.cuda.Device(device):
            return int(self.cupy.cuda.get_current_stream().ptr)

    def to_host(self, array: Any) -> Array:
        values: Array = self.cupy.asnumpy(self.bits(array))
        return values

    def fill(self, array: Any, values: Array) -> None:
        self.bits(array).set(values)


class _CuPyShared:
    """CuPy gives memory back to the stream that it was made on, which has to wait for all readers then."""

    def __init__(self, cuda: Any, array: Any, device: int) -> None:
        self._cuda, self._array, self._device = cuda, array, device
        self._home = self._current()
        self._written = self._home.record()
        self._readers: dict[int, Any] = {}

    def _current(self) -> Any:
        with self._cuda.Device(self._device):
            return self._cuda.get_current_stream()

    def read_on(self, stream: int) -> Any:
        if stream != self._home.ptr:
            current = self._current()
            reader = current if current.ptr == stream else self._cuda.ExternalStream(stream, self._device)
            if not reader.is_capturing():
                reader.wait_event(self._written)
                self._readers[stream] = reader
        return self._array

    def __del__(self) -> None:
        for reader in self._readers.values():
            # Errors are those of earlier calls, or of an interpreter that ends.
            with contextlib.suppress(Exception):
                if not (reader.is_capturing() or self._home.is_capturing()):
                    self._home.wait_event(reader.record())


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
        scaling: Scaling | None = None,
        workspace: int | Array | None = None,
    ) -> CudaCall:
        """Pack `filter` and convert `bias`, on the device; see `Library.bind`."""
        if workspace is not None:
            raise ProblemError("workspace", workspace, "must be None for a filter on a CUDA device")
        return CudaCall(problem, served, filter, bias, scaling)

    def run_once(
        self, problem: Problem, served: Served, data: Borrowed, filter: Borrowed, bias: Borrowed | None, out: Any
    ) -> Any:
        """Return the output for borrowed arrays, in `out` if that is given."""
        return CudaCall(problem, served, filter, bias).run(data.array, out)


class _Operand(NamedTuple):
    """An array, and its package."""

    array: Any
    framework: Framework


class CudaCall:
    """A filter bound to an artifact, for arrays on the device of the filter.

    Without a manifest the artifact is the reference, which takes arrays in the memory of the CPU.
    """

    def __init__(
        self,
        problem: Problem,
        served: Served,
        filter: Borrowed,
        bias: Borrowed | None,
        scaling: Scaling | None = None,
    ) -> None:
        """Pack `filter` and convert `bias`, on their device; the numbers of a quantized problem come from the CPU's."""
        self._problem = problem
        self._artifact = served.artifact
        self._on_host = served.manifest is None
        scratch = 0 if served.manifest is None else served.manifest.scratch_bytes
        self._workspace_elements = scratch // (8 if problem.accumulate_dtype == "float64" else 4)
        self._device, framework = filter.device, filter.framework
        # Now, so that the first call may be captured for a graph.
        guarded(self._load, served)
        packed = framework.empty(*served.artifact.packed, self._device)
        canonical, last = self._bound(filter, bias, scaling)
        operands = _Operand(canonical, framework), _Operand(packed, framework)
        guarded(self._launch, framework, served.artifact.pack, *operands)
        self._constants = [(framework.shared(packed, self._device), framework)]
        if last is not None:
            self._constants.append((last.framework.shared(last.array, self._device), last.framework))

    def _bound(self, filter: Borrowed, bias: Borrowed | None, scaling: Scaling | None) -> tuple[Any, _Operand | None]:
        """Return the filter as `pack` takes it, and what a kernel reads in the place of the bias."""
        problem, framework, offset = self._problem, filter.framework, None
        canonical = framework.canonical(problem, filter.array)
        if bias is not None:
            arrays.check_bias(problem, bias.dtype, bias.shape)
            offset = _Operand(bias.framework.converted(bias.array, problem.accumulate_dtype), bias.framework)
        if problem.quantization is None and scaling is None:
            return canonical, offset
        host = None if offset is None else offset.framework.to_host(offset.array)
        values, table = bound_arrays(problem, framework.to_host(canonical), host, scaling)
        assert table is not None
        return self._on_device(framework, values), _Operand(self._on_device(framework, table), framework)

    def _on_device(self, framework: Framework, values: Array) -> Any:
        """Return a copy of an array of the CPU's memory."""
        array = framework.empty(values.shape, values.dtype.name, self._device)
        framework.fill(array, values)
        return array

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
            result = _Operand(framework.empty(problem.output_shape, problem.output_dtype, self._device), framework)
        else:
            given = borrow("out", out, self._device)
            _check("out", given, [problem.output_dtype], problem.output_shape)
            _check_memory("out", given)
            _check_apart(borrowed, given)
            result = _Operand(out, given.framework)
        if 0 in problem.output_shape:
            return result.array
        stream = framework.stream(self._device)
        operands = [_Operand(data, framework)]
        operands += [_Operand(shared.read_on(stream), owner) for shared, owner in self._constants]
        if self._workspace_elements:
            # Anew for every call, from the framework's cache: calls may run at the same time on several streams.
            workspace = framework.empty((self._workspace_elements,), problem.accumulate_dtype, self._device)
            operands.append(_Operand(workspace, framework))
        self._launch(framework, self._artifact, *operands, result)
        return result.array

    def _launch(self, framework: Framework, function: Any, *operands: _Operand) -> None:
        """Call `function` on the framework's current stream. Raises DeviceError if it fails."""
        if self._on_host:
            *inputs, out = operands
            result = out.framework.to_host(out.array)
            function(*(operand.framework.to_host(operand.array) for operand in inputs), result)
            out.framework.fill(out.array, result)
            return
        tvm_ffi = import_tvm_ffi()
        device = tvm_ffi.device("cuda", self._device)
        stream: AbstractContextManager[Any] = tvm_ffi.use_raw_stream(device, framework.stream(self._device))
        with stream:
            self._attempt(function, *(_taken(operand, framework) for operand in operands))

    def _load(self, served: Served) -> None:
        """Load the kernels. Raises DeviceError, if PTX is too new for the driver with what to do about it."""
        try:
            self._attempt(served.artifact.load, self._device)
        except DeviceError as error:
            if served.manifest is None or _NEWER_PTX not in error.rule:
                raise
            nvcc = served.manifest.versions.get("nvcc", "its nvcc")
            rule = (
                f"has no machine code in {served.manifest.name}, and the driver is too old for the PTX of nvcc {nvcc}: "
                f"compile for the device's own target, or with an nvcc of the driver's CUDA version: {error.rule}"
            )
            raise DeviceError(error.attribute, error.value, rule) from error

    def _attempt(self, function: Any, *arguments: Any) -> None:
        """Call `function`, of an artifact. Raises DeviceError if it fails."""
        try:
            function(*arguments)
        # tvm_ffi raises whatever class of error the C++ side names.
        except Exception as error:
            raise DeviceError("device", f"cuda:{self._device}", f"failed: {error}") from error


def _taken(operand: _Operand, framework: Framework) -> Any:
    """Return what tvm_ffi takes for an operand of a call on the current stream of `framework`, and on no other."""
    own = operand.framework
    return own.plain(operand.array) if type(own) is type(framework) else _Unsynchronised(own.bits(operand.array))


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
