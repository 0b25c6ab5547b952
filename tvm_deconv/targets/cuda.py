"""CUDA devices: targets by compute capability, and the capability of a device of this machine."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from tvm_deconv.errors import DeviceError, ProblemError
from tvm_deconv.problem import Problem
from tvm_deconv.targets.base import FUNCTIONS, Capability, Place, Target

DRIVER = "libcuda.so.1"
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*
#: The function that loads the kernels of a library.
LOAD_SYMBOL = "__tvm_ffi_load"
#: The algorithms whose products tensor cores compute.
TENSOR_ALGORITHMS = frozenset(
    {
        "cuda_tensor",
        "cuda_merged",
        "cuda_wgmma",
        "cuda_gathered",
        "cuda_held",
        "cuda_held_merged",
        "cuda_wgmma_turned",
        "cuda_held_turned",
        "cuda_held_merged_turned",
    }
)
_CODE: tuple[Capability, ...] = ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0))


@dataclass(frozen=True, kw_only=True)
class CudaTarget(Target):
    """CUDA devices: a library has machine code for the capabilities in `code` and PTX for those in `ptx`.

    Code of their `own` has instructions that no later device has, and runs on those capabilities alone. The host part
    of a library runs on any x86-64 CPU.
    """

    code: tuple[Capability, ...]
    ptx: tuple[Capability, ...] = ()
    own: bool = False

    backend: ClassVar[str] = "cuda"
    memory: ClassVar[str] = "cuda"
    symbols: ClassVar[frozenset[str]] = FUNCTIONS | {LOAD_SYMBOL}

    def computes(self, problem: Problem) -> Problem:
        """See Target; devices have TF32, and compute in it if the problem permits it."""
        return problem

    def multiplies_in(self, problem: Problem, algorithm: str) -> str:
        """See Target; tensor cores have no other float32 than TF32, CUDA cores no other than IEEE 754's."""
        return problem.precision if algorithm in TENSOR_ALGORITHMS else "ieee"

    def refusal(self, place: Place) -> str | None:
        """See Target."""
        if place.capability is None:
            return f"runs on CUDA devices ({self.machines}); these arrays are in CPU memory"
        if not self.runs_on(place.capability):
            return f"runs on {self.machines}; this device has {dotted(place.capability)}"
        return self._lack(place)

    def closeness(self, place: Place) -> tuple[int, ...]:
        """See Target; of the same code, that with instructions of its own is closer."""
        return () if place.capability is None else (*self.fit(place.capability), int(self.own))

    def runs_on(self, capability: Capability) -> bool:
        """Return True if a device of `capability` runs it: machine code serves its major version from its minor on."""
        return self.fit(capability) > (0, 0) or any(capability >= known for known in self.ptx)

    def fit(self, capability: Capability) -> Capability:
        """Return the machine code that a device of `capability` runs; (0, 0) if it has to compile PTX."""
        major, minor = capability
        fitting = (known for known in self.code if known[0] == major and known[1] <= minor)
        return max((known for known in fitting if not self.own or known == capability), default=(0, 0))

    @property
    def machines(self) -> str:
        """See Target; devices are known by their compute capability."""
        later = "{0}.{1}" if self.own else "{0}.{1} and later {0}.x"
        exact = [later.format(*code) for code in self.code]
        listing = ", ".join(exact + [f"{major}.{minor} and later" for major, minor in self.ptx])
        return f"compute capability {listing}"


#: "cuda" holds machine code for each generation, and PTX from which a driver makes code for all later ones.
CUDA_TARGETS: Mapping[str, CudaTarget] = {
    target.name: target
    for target in (
        *(CudaTarget(name=f"cuda-sm_{major}{minor}", code=((major, minor),)) for major, minor in _CODE),
        CudaTarget(name="cuda-sm_90a", code=((9, 0),), own=True),
        CudaTarget(name="cuda", code=((8, 0), (9, 0), (10, 0), (12, 0)), ptx=((9, 0),)),
    )
}


def dotted(capability: Capability) -> str:
    """Return a compute capability as text, such as "8.6"."""
    return ".".join(map(str, capability))


def cuda_target(capability: Capability) -> CudaTarget:
    """Return the target whose code is the closest to a device of `capability`; ProblemError if none runs there."""
    fitting = [target for target in CUDA_TARGETS.values() if target.runs_on(capability)]
    if not fitting:
        least = min(known for target in CUDA_TARGETS.values() for known in target.code)
        rule = f"must be a device of compute capability {dotted(least)} or later"
        raise ProblemError("target", dotted(capability), rule)
    return max(fitting, key=lambda target: (target.fit(capability), target.own, -len(target.code)))


def cuda_driver(device: int = 0) -> ctypes.CDLL:
    """Return the library of NVIDIA's driver; without it, raise DeviceError about CUDA device number `device`."""
    try:
        return ctypes.CDLL(DRIVER)
    except OSError:
        raise DeviceError("device", f"cuda:{device}", f"needs NVIDIA's driver: {DRIVER} is not found") from None


@functools.cache
def cuda_capability(device: int = 0) -> Capability:
    """Return the compute capability of CUDA device number `device`; DeviceError names the call that failed."""
    driver = cuda_driver(device)

    def ask(function: str, *arguments: object) -> None:
        code = getattr(driver, function)(*arguments)
        if code:
            raise DeviceError("device", f"cuda:{device}", f"NVIDIA's driver has no such device: {function} says {code}")

    handle, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    ask("cuInit", 0)
    ask("cuDeviceGet", ctypes.byref(handle), device)
    ask("cuDeviceGetAttribute", ctypes.byref(major), _MAJOR, handle)
    ask("cuDeviceGetAttribute", ctypes.byref(minor), _MINOR, handle)
    return major.value, minor.value
