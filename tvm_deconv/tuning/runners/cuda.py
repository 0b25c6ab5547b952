"""Running candidates on a CUDA device, by NVIDIA's driver alone: memory, copies, and events between graphs of calls."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tvm_deconv.artifact.ffi import import_tvm_ffi
from tvm_deconv.errors import DeviceError
from tvm_deconv.problem import Array, Problem
from tvm_deconv.targets import Capability, Host, Place, Target, cuda_capability, cuda_driver, detect_host, dotted
from tvm_deconv.tuning.runners.base import SingleProcessRunner
from tvm_deconv.tuning.runners.machine import Bound, Output

_DLPACK_CUDA = 2
_CODES = {"i": 0, "u": 1, "f": 2}
_CLOCK, _MULTIPROCESSORS, _L2 = 13, 16, 38  # CU_DEVICE_ATTRIBUTE_*: kHz, number, bytes
_GUARD = 256  # bytes before and behind an output
_MOST_COPIES = 32
_LEVEL2 = 1 << 14, 1 << 28  # bytes of level-2 caches that are believed, from and to
TURNS = 2  # the size of arrays that take turns, in level-2 caches
COPIED = 8  # that of a copy whose rate is measured
ROUNDS = 5
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED: nothing else happens in the process meanwhile
#: Multiply-adds of a multiprocessor in one clock, by the type that is multiplied, from each capability on.
_PER_CLOCK: dict[Capability, dict[str, int]] = {
    (8, 0): {"float32": 64, "float64": 32, "tf32": 512, "float16": 1024, "bfloat16": 1024},
    (8, 6): {"float32": 128, "float64": 2, "tf32": 256, "float16": 512, "bfloat16": 512},
    (9, 0): {"float32": 128, "float64": 64, "tf32": 1024, "float16": 2048, "bfloat16": 2048},
    (12, 0): {"float32": 128, "float64": 2, "tf32": 256, "float16": 512, "bfloat16": 512},
}


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _DLManagedTensor(ctypes.Structure):
    _fields_ = (("tensor", _DLTensor), ("manager", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


class Rates(NamedTuple):
    """What decides the rates of a device: capability, multiprocessors, and the highest clock in kHz."""

    capability: Capability
    multiprocessors: int
    clock: int

    def multiply_adds(self, dtype: str) -> float:
        """Return the multiply-adds per second of `dtype` (or precision), from a table."""
        per_clock = _PER_CLOCK[max(known for known in _PER_CLOCK if known <= self.capability)]
        per_clock = per_clock | {"tf32x3": per_clock["tf32"] // 3}
        return 1e3 * self.clock * self.multiprocessors * per_clock.get(dtype, 64)


def level2(said: int) -> int:
    """Return the bytes of a level-2 cache by the device's word, within what is believed."""
    least, most = _LEVEL2
    return min(max(said, least), most)


def multiplied(problem: Problem) -> str:
    """Return the type whose rate of multiply-adds bounds `problem`; TF32 is one of its own."""
    return problem.dtype if problem.precision == "ieee" else problem.precision


def check_device(target: Target) -> None:
    """Raise DeviceError if this machine has no device that runs `target`."""
    try:
        capability = cuda_capability()
    except DeviceError as error:
        raise DeviceError("target", target.name, f"is tuned on a device of {target.machines}: {error}") from None
    check_capability(target, capability, "this one")


def check_capability(target: Target, capability: Capability, device: str) -> None:
    """Raise DeviceError unless the `device` of a capability runs `target`."""
    if target.refusal(Place(detect_host(), capability=capability)):
        rule = f"is tuned on a device of {target.machines}: {device} has {dotted(capability)}"
        raise DeviceError("target", target.name, rule)


class CudaRunner(SingleProcessRunner):
    """Runs candidates on CUDA device `number` of this machine."""

    def __init__(self, number: int = 0) -> None:
        super().__init__(1, CudaMachine, number)
        self._host = self._process.host()

    @property
    def host(self) -> Host:
        """The device."""
        return self._host

    def multiplied(self, problem: Problem) -> str:
        """See Runner; TF32 is a type of its own."""
        return multiplied(problem)

    def multiply_add_rate(self, dtype: str, target: Any, folder: Path, timeout: float) -> float:  # noqa: ARG002
        """See Runner; the device has a table."""
        return self._multiply_adds(dtype, None, timeout)


class _Memory:
    """Memory of a device as a C-contiguous DLPack tensor, freed with this object."""

    def __init__(self, device: CudaMachine, shape: tuple[int, ...], dtype: np.dtype[Any], guard: int = 0) -> None:
        self._device, self.shape, self.dtype = device, shape, dtype
        self.nbytes = math.prod(shape) * dtype.itemsize
        self.first = 0
        self.first = device.allocate(self.nbytes + 2 * guard)
        self.address = self.first + guard
        extents = (ctypes.c_int64 * max(len(shape), 1))(*shape)
        tensor = _DLTensor(
            self.address, _DLPACK_CUDA, device.number, len(shape), _CODES[dtype.kind], 8 * dtype.itemsize, 1, extents
        )
        # The consumer is asked not to outlive this object: there is nothing for it to free.
        self._managed, self._extents = _DLManagedTensor(tensor), extents

    def __del__(self) -> None:
        self._device.free(self.first)

    def __dlpack_device__(self) -> tuple[int, int]:
        return _DLPACK_CUDA, self._device.number

    def __dlpack__(self, **_: Any) -> Any:
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        return new(ctypes.addressof(self._managed), b"dltensor", None)


class CudaMachine:
    """CUDA device `number`, as a `Machine`; the runner ends this process when a candidate takes too long.

    Timed calls take turns on copies of their arrays, which are together twice as large as the level-2 cache.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self._driver = cuda_driver(number)
        self._capability = cuda_capability(number)
        self._ffi = import_tvm_ffi()
        handle, context = ctypes.c_int(), ctypes.c_void_p()
        self._ask("cuInit", 0)
        self._ask("cuDeviceGet", ctypes.byref(handle), number)
        self._handle = handle
        # The CUDA runtime inside the candidates uses this context too.
        self._ask("cuDevicePrimaryCtxRetain", ctypes.byref(context), handle)
        self._ask("cuCtxSetCurrent", context)
        # Work of other calls is on the legacy stream, which this one waits for.
        self._stream = self._made("cuStreamCreate", 0)

    def _ask(self, function: str, *arguments: object) -> None:
        code = getattr(self._driver, function)(*arguments)
        if code:
            raise self._failure(function, code)

    def _failure(self, function: str, code: int) -> DeviceError:
        return DeviceError("device", f"cuda:{self.number}", f"NVIDIA's driver failed: {function} says {code}")

    def _made(self, function: str, *arguments: object) -> ctypes.c_void_p:
        """Return the handle that a function of the driver makes."""
        handle = ctypes.c_void_p()
        self._ask(function, ctypes.byref(handle), *arguments)
        return handle

    def _attribute(self, attribute: int) -> int:
        value = ctypes.c_int()
        self._ask("cuDeviceGetAttribute", ctypes.byref(value), attribute, self._handle)
        return value.value

    @property
    def _level2(self) -> int:
        """The bytes of the level-2 cache, as far as they are believed."""
        return level2(self._attribute(_L2))

    def allocate(self, nbytes: int) -> int:
        """Allocate `nbytes` on the device; return the address, a multiple of 256."""
        address = ctypes.c_uint64()
        self._ask("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(max(nbytes, 1)))
        return address.value

    def free(self, address: int) -> None:
        """Free memory of `allocate`. Errors are ignored: those of earlier calls surface here again."""
        self._driver.cuMemFree_v2(ctypes.c_uint64(address))

    def _copy(self, to: int, address: int, nbytes: int) -> None:
        self._ask("cuMemcpyDtoD_v2", ctypes.c_uint64(to), ctypes.c_uint64(address), ctypes.c_size_t(nbytes))

    def host(self) -> Host:
        """Describe the device: its name and its number of multiprocessors."""
        name = ctypes.create_string_buffer(256)
        self._ask("cuDeviceGetName", name, 256, self._handle)
        units = self._attribute(_MULTIPROCESSORS)
        return Host(frozenset(), name.value.decode(errors="replace"), units, units)

    def multiply_adds(self, dtype: str, kernel: Path | None = None) -> float:  # noqa: ARG002
        """Return the multiply-adds per second of `dtype` (or precision) at the device's highest clock, from a table."""
        return Rates(self._capability, self._attribute(_MULTIPROCESSORS), self._attribute(_CLOCK)).multiply_adds(dtype)

    def copy(self) -> float:
        """Measure the bytes per second of copies, read plus written."""
        source, copy = self._two(COPIED * self._level2)
        size = copy.nbytes
        addresses = ctypes.c_uint64(copy.address), ctypes.c_uint64(source.address), ctypes.c_size_t(size)
        return (
            2
            * size
            / min(self.sample(lambda _: self._ask("cuMemcpyDtoDAsync_v2", *addresses, self._stream), 1, 4, ROUNDS))
        )

    def _two(self, nbytes: int) -> tuple[_Memory, _Memory]:
        """Return memory of `nbytes` twice, or of half as many as often as the device has no room for them."""
        try:
            return _Memory(self, (nbytes,), np.dtype(np.uint8)), _Memory(self, (nbytes,), np.dtype(np.uint8))
        except DeviceError:
            if nbytes < _LEVEL2[0]:
                raise
        return self._two(nbytes // 2)

    def attempt(self, seconds: float) -> AbstractContextManager[object]:  # noqa: ARG002
        """Return a context that does nothing."""
        return contextlib.nullcontext()

    def put(self, array: Array) -> _Memory:
        """Return a copy of `array` on the device."""
        memory = _Memory(self, array.shape, array.dtype)
        held = np.ascontiguousarray(array)
        address, size = ctypes.c_void_p(held.ctypes.data), ctypes.c_size_t(held.nbytes)
        if held.nbytes:
            self._ask("cuMemcpyHtoD_v2", ctypes.c_uint64(memory.address), address, size)
        return memory

    def output(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Output:
        """Allocate an array for results."""
        return _CudaOutput(self, shape, dtype)

    def fill(self, address: int, byte: int, nbytes: int) -> None:
        """Fill memory with a byte."""
        self._ask("cuMemsetD8_v2", ctypes.c_uint64(address), ctypes.c_uint8(byte), ctypes.c_size_t(nbytes))

    def read(self, address: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Wait for all calls, and return the array at `address`."""
        array: Array = np.empty(shape, dtype)
        self._ask("cuCtxSynchronize")
        source, target = ctypes.c_uint64(address), ctypes.c_void_p(array.ctypes.data)
        self._ask("cuMemcpyDtoH_v2", target, source, ctypes.c_size_t(array.nbytes))
        return array

    def bind(self, library: Path, name: str, arguments: Sequence[Any]) -> Bound:
        """Return a function of a library with its arguments, which come from `put` or an output."""
        function = self._ffi.load_module(str(library)).get_function(name)
        tensors = [self._ffi.from_dlpack(memory) for memory in arguments]
        turns: list[tuple[list[Any], list[Any]]] = [(list(arguments), tensors)]

        def run() -> None:
            function(*tensors)
            self._ask("cuCtxSynchronize")

        def sample(number: int, repeat: int) -> list[float]:
            if len(turns) == 1:
                nbytes = max(1, sum(memory.nbytes for memory in arguments))
                # Where the memory does not hold them all, those that it holds take turns.
                with contextlib.suppress(DeviceError):
                    for _ in range(min(_MOST_COPIES, TURNS * self._level2 // nbytes)):
                        turns.append(self._copies(arguments))
            return self.sample(lambda turn: function(*turns[turn][1]), len(turns), number, repeat)

        return Bound(run, sample)

    def _copies(self, arguments: Sequence[_Memory]) -> tuple[list[Any], list[Any]]:
        """Return copies of the arrays, and the tensors that a function takes for them."""
        copies = [_Memory(self, memory.shape, memory.dtype) for memory in arguments]
        for copy, memory in zip(copies, arguments, strict=True):
            self._copy(copy.address, memory.address, memory.nbytes)
        return copies, [self._ffi.from_dlpack(copy) for copy in copies]

    def sample(self, call: Callable[[int], object], turns: int, number: int, repeat: int) -> list[float]:
        """Return `repeat` means of the seconds of `number` calls on the device, which take `turns`: `call(turn)`.

        The calls of a mean are one graph, or are made one by one where they cannot be captured. The first graph is not
        timed: while it runs, the host enqueues the others and the events between them.
        """
        with contextlib.ExitStack() as stack:
            launches: dict[int, Callable[[], object]] = {}
            for first in (run * number % turns for run in range(repeat + 1)):
                if first not in launches:
                    several = functools.partial(_several, call, first, turns, number)
                    launches[first] = self._graph(several, number, stack)
            events = [self._made("cuEventCreate", 0) for _ in range(repeat + 1)]
            for event in events:
                stack.callback(self._driver.cuEventDestroy_v2, event)
            for run, event in enumerate(events):
                launches[run * number % turns]()
                self._ask("cuEventRecord", event, self._stream)
            self._ask("cuEventSynchronize", events[-1])
            return [self._seconds(start, end) / number for start, end in itertools.pairwise(events)]

    def _seconds(self, start: ctypes.c_void_p, end: ctypes.c_void_p) -> float:
        milliseconds = ctypes.c_float()
        self._ask("cuEventElapsedTime", ctypes.byref(milliseconds), start, end)
        return 1e-3 * milliseconds.value

    def _graph(self, several: Callable[[], None], number: int, stack: contextlib.ExitStack) -> Callable[[], object]:
        """Return a function that launches the `number` calls that `several` makes; graphs are gone with `stack`."""

        def directly() -> None:
            with self._ffi.use_raw_stream(self._ffi.device("cuda", self.number), self._stream.value):
                several()

        try:
            graph = self._captured(directly, stack)
        # tvm_ffi raises whatever class of error the C++ side names; a call that fails at all does so again.
        except Exception:
            return directly
        nodes = ctypes.c_size_t()
        self._ask("cuGraphGetNodes", graph, None, ctypes.byref(nodes))
        if nodes.value < number:  # they went to another stream
            return directly
        executable = self._made("cuGraphInstantiateWithFlags", graph, ctypes.c_ulonglong(0))
        stack.callback(self._driver.cuGraphExecDestroy, executable)
        self._ask("cuGraphUpload", executable, self._stream)
        return lambda: self._ask("cuGraphLaunch", executable, self._stream)

    def _captured(self, work: Callable[[], None], stack: contextlib.ExitStack) -> ctypes.c_void_p:
        """Return the graph of what `work` enqueues on the stream. Raises its errors, and those of the driver."""
        graph = ctypes.c_void_p()
        self._ask("cuStreamBeginCapture_v2", self._stream, _RELAXED)
        try:
            work()
        finally:
            # In any case: a stream that captures is of no other use.
            code = self._driver.cuStreamEndCapture(self._stream, ctypes.byref(graph))
            stack.callback(self._driver.cuGraphDestroy, graph)
        if code:
            raise self._failure("cuStreamEndCapture", code)
        return graph


def _several(call: Callable[[int], object], first: int, turns: int, number: int) -> None:
    for turn in range(first, first + number):
        call(turn % turns)


class _CudaOutput:
    """An array between guards on a device."""

    def __init__(self, device: CudaMachine, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self._device = device
        self.argument = _Memory(device, shape, dtype, _GUARD)

    def poison(self, byte: int) -> None:
        self._device.fill(self.argument.first, byte, self.argument.nbytes + 2 * _GUARD)

    def intact(self, byte: int) -> bool:
        guards = self.argument.first, self.argument.address + self.argument.nbytes
        return all(bool((self._device.read(guard, (_GUARD,), np.dtype(np.uint8)) == byte).all()) for guard in guards)

    def read(self) -> Array:
        return self._device.read(self.argument.address, self.argument.shape, self.argument.dtype)
