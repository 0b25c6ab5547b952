"""Running CUDA candidates on the devices of a tracker's servers.

A server needs TVM, which need not know CUDA, and NVIDIA's driver. The probe (`probe_cuda.c`) does there what `cuda.py`
does on this machine: memory between guards, and graphs of calls between events.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tvm_deconv.errors import DeviceError
from tvm_deconv.problem import Array, Problem
from tvm_deconv.targets import Capability, Host, Target, dotted
from tvm_deconv.tuning.runners.cuda import COPIED, ROUNDS, TURNS, Rates, check_capability, level2, multiplied
from tvm_deconv.tuning.runners.machine import Bound, Machine
from tvm_deconv.tuning.runners.rpc import RpcRunner, RpcSession, Servers, build_probe
from tvm_deconv.tuning.runners.tracker import Tracker

_PROBE = Path(__file__).with_name("probe_cuda.c")


@dataclass(frozen=True)
class Device(Host):
    """The device of a server at HOST:PORT, with its capability; without one, `missing` says what it lacks."""

    address: str = ""
    capability: Capability = (0, 0)
    missing: str = ""


class RpcCudaRunner(RpcRunner):
    """Runs candidates on device 0 of the servers of a tracker, which must run all of `targets`.

    Raises DeviceError if one cannot, RemoteError if no server is left.
    """

    def __init__(self, tracker: Tracker, targets: Sequence[Target]) -> None:
        self._targets = targets
        super().__init__(1, tracker)

    def trial_target(self, target: Any) -> Any:
        """See Runner; the devices of the servers decide."""
        from tvm_deconv.compiler.backends.cuda import narrowed

        assert isinstance(self.host, Device)
        return narrowed(target, self.host.capability)

    def multiplied(self, problem: Problem) -> str:
        """See Runner; TF32 is a type of its own."""
        return multiplied(problem)

    def multiply_add_rate(self, dtype: str, target: Any, folder: Path, timeout: float) -> float:  # noqa: ARG002
        """See Runner; devices have a table."""
        return self._multiply_adds(dtype, None, timeout)

    def _machine(self) -> Callable[..., Machine]:
        return RpcCudaMachine

    def _build_probe(self, cc: str, scratch: Path) -> Path:
        return build_probe(cc, _PROBE, scratch)

    def _admit(self, host: Host) -> None:
        """Raise DeviceError if a server cannot run a target, RemoteError if its device is of another kind."""
        assert isinstance(host, Device)
        for target in self._targets:
            device = f"that of the server {host.address}"
            if host.missing:
                rule = f"is tuned on a device of {target.machines}: {device} is missing: {host.missing}"
                raise DeviceError("target", target.name, rule)
            check_capability(target, host.capability, device)
        super()._admit(host)

    def _kind(self, host: Host) -> str:
        assert isinstance(host, Device)
        return f"{host.name} ({dotted(host.capability)})"


class RpcCudaMachine(RpcSession):
    """A session at a server with a CUDA device, as a `Machine`."""

    def __init__(self, threads: int, servers: Servers) -> None:  # noqa: ARG002
        super().__init__(servers)
        self._rates: Rates | None = None
        self._level2 = 0
        self._device = self._described()

    def _described(self) -> Device:
        import tvm

        address = ":".join(map(str, self._address))
        try:
            answer = str(self._probe["device"]())
        except tvm.error.RPCError as error:
            return Device(frozenset(), address=address, missing=self._said(error))
        *numbers, name = answer.split(" ", 5)
        major, minor, units, clock, cache = map(int, numbers)
        self._rates, self._level2 = Rates((major, minor), units, clock), level2(cache)
        return Device(frozenset(), name, units, units, address=address, capability=(major, minor))

    def host(self) -> Host:
        """Describe the device, or what is missing."""
        return self._device

    def multiply_adds(self, dtype: str, kernel: Path | None = None) -> float:  # noqa: ARG002
        """Return the multiply-adds per second of `dtype` (or precision), from a table."""
        assert self._rates is not None
        return self._rates.multiply_adds(dtype)

    def copy(self) -> float:
        """Measure the bytes per second of copies, read plus written."""
        times = self._times(ROUNDS)
        size = int(self._probe["copy"](COPIED * self._level2, times))
        return 2 * size / float(times.numpy().min())

    def put(self, array: Array) -> Any:
        """Send an array to the device."""
        import tvm

        memory = self._allocate(array.shape, array.dtype)
        self._probe["write"](memory, tvm.runtime.tensor(array, self._memory))
        return memory

    def output(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> _RpcCudaOutput:
        """Allocate an array for results on the device."""
        return _RpcCudaOutput(self, self._allocate(shape, dtype), shape, dtype)

    def bind(self, library: Path, name: str, arguments: Sequence[Any]) -> Bound:
        """Send a library; return its function with its arguments, which come from `put` or an output."""
        with self._uploaded(library) as path:
            function = self._probe["bind"](path, f"__tvm_ffi_{name}", TURNS * self._level2, *arguments)
        held = list(arguments)  # the function at the server does not keep them

        def run() -> None:
            assert held
            function()

        def sample(number: int, repeat: int) -> Sequence[float]:
            times = self._times(repeat)
            function(number, times)
            means: Sequence[float] = times.numpy().tolist()
            return means

        return Bound(run, sample)

    def _allocate(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        return self._probe["output"](*self._dlpack(dtype), *shape)

    def _times(self, number: int) -> Any:
        return self.empty((number,), np.dtype(np.float64))

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        """Allocate an array in the server's memory."""
        import tvm

        return tvm.runtime.empty(shape, str(dtype), self._memory)

    def ask(self, name: str, *arguments: Any) -> Any:
        """Call a function of the probe."""
        return self._probe[name](*arguments)


class _RpcCudaOutput:
    """An array between guards on the device of a server."""

    def __init__(self, machine: RpcCudaMachine, argument: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self.argument = argument
        self._machine, self._shape, self._dtype = machine, shape, dtype

    def poison(self, byte: int) -> None:
        self._machine.ask("poison", self.argument, byte)

    def intact(self, byte: int) -> bool:
        return bool(self._machine.ask("intact", self.argument, byte))

    def read(self) -> Array:
        copy = self._machine.empty(self._shape, self._dtype)
        self._machine.ask("read", self.argument, copy)
        array: Array = copy.numpy()
        return array
