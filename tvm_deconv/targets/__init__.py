"""Facts about the CPUs and GPUs we compile for, and about those that we run on.

A target is a set of CPU flags (spelled as in ``/proc/cpuinfo``) and the sizes that schedules derive their tiles from.
Feature sets are a partial order: an artifact runs where its flags are a subset of the host's, and of two that run the
one that needs more is the wider. Microarchitectures, such as "znver4", are those that archspec knows; it is needed to
compile for them, and what loads their artifacts goes by their flags. `detect_host` and `cuda_capability` are the only
functions here that read the machine.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from tvm_deconv.errors import DeviceError, ProblemError

MAX_TARGET_VARIABLE = "TVM_DECONV_MAX_TARGET"

# The psABI levels; flags that /proc/cpuinfo does not list (osxsave) are implied by those that it does (avx).
_X86_64_V2 = frozenset({"cx16", "lahf_lm", "popcnt", "pni", "sse4_1", "sse4_2", "ssse3"})
_X86_64_V3 = _X86_64_V2 | {"abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"}
_X86_64_V4 = _X86_64_V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}


#: Flags that archspec counts, which no instruction of a kernel needs and virtual machines tend to hide.
_NOT_NEEDED = frozenset({"flush_l1d", "pku", "tsc_adjust"})
#: archspec's names of flags that /proc/cpuinfo calls otherwise.
_FLAGS = {"sse3": "pni"}
#: What LLVM uses for a microarchitecture and archspec does not list.
_ALSO_NEEDED = {"sapphirerapids": frozenset({"avx512_fp16", "avx_vnni"})}


@dataclass(frozen=True)
class Target:
    """What a schedule may assume of a CPU: vector width in bits, number of vector registers, cache sizes in bytes.

    `level` is the psABI level whose facts and tuning logs it has, itself where it is one.
    """

    name: str
    mcpu: str
    vector_bits: int
    vector_registers: int
    l1_bytes: int
    l2_bytes: int
    features: frozenset[str]
    level: str

    def lanes(self, element_bytes: int) -> int:
        """Return the number of elements of `element_bytes` bytes in one vector register."""
        return self.vector_bits // (8 * element_bytes)


@dataclass(frozen=True)
class Host:
    """A machine: its CPU flags (common to all of its CPUs), model name, physical cores, logical CPUs, and vendor."""

    features: frozenset[str]
    name: str = "unknown"
    cores: int = 1
    threads: int = 1
    vendor: str = ""


# Cache sizes are those of the first CPUs of each level, Haswell and Skylake-SP: tiles that fit there fit later ones.
TARGETS: Mapping[str, Target] = {
    target.name: target
    for target in (
        Target("x86-64-v3", "x86-64-v3", 256, 16, 32 << 10, 256 << 10, _X86_64_V3, "x86-64-v3"),
        Target("x86-64-v4", "x86-64-v4", 512, 32, 32 << 10, 1 << 20, _X86_64_V4, "x86-64-v4"),
    )
}


#: Compute capability of a CUDA device: major, minor.
Capability: TypeAlias = tuple[int, int]


@dataclass(frozen=True)
class CudaTarget:
    """CUDA devices: `code` holds the capabilities that a library has machine code for, `ptx` those it has PTX for.

    The host part of such a library runs on any x86-64 CPU.
    """

    name: str
    code: tuple[Capability, ...]
    ptx: tuple[Capability, ...] = ()
    features: frozenset[str] = frozenset()

    def runs_on(self, capability: Capability) -> bool:
        """Tell whether a device of `capability` runs it: machine code serves its major version from its minor on."""
        return self.fit(capability) > (0, 0) or any(capability >= known for known in self.ptx)

    def fit(self, capability: Capability) -> Capability:
        """Return what of it would run on a device of `capability`: the higher, the closer; PTX is compiled first."""
        major, minor = capability
        return max((known for known in self.code if known[0] == major and known[1] <= minor), default=(0, 0))

    @property
    def architectures(self) -> str:
        """The devices it runs on, for people."""
        exact = [f"{major}.{minor} and later {major}.x" for major, minor in self.code]
        return ", ".join(exact + [f"{major}.{minor} and later" for major, minor in self.ptx])


_CUDA_CODE: tuple[Capability, ...] = ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0))
#: "cuda" holds machine code for data centres' devices, and PTX from which a driver makes code for all later ones.
CUDA_TARGETS: Mapping[str, CudaTarget] = {
    target.name: target
    for target in (
        *(CudaTarget(f"cuda-sm_{major}{minor}", ((major, minor),)) for major, minor in _CUDA_CODE),
        CudaTarget("cuda", ((8, 0), (9, 0)), ((9, 0),)),
    )
}


def cuda_target(capability: Capability) -> CudaTarget:
    """Return the target whose code is the closest to a device of `capability`; ProblemError where none runs there."""
    fitting = [target for target in CUDA_TARGETS.values() if target.runs_on(capability)]
    if not fitting:
        least = min(known for target in CUDA_TARGETS.values() for known in target.code)
        rule = f"must be a device of compute capability {'.'.join(map(str, least))} or later"
        raise ProblemError("target", ".".join(map(str, capability)), rule)
    return max(fitting, key=lambda target: (target.fit(capability), -len(target.code)))


def get(name: str) -> Target:
    """Return the CPU target called `name`, a level or a microarchitecture; ProblemError lists the known names."""
    found = _known(name, TARGETS)
    assert isinstance(found, Target)
    return found


def get_any(name: str) -> Target | CudaTarget:
    """Return the target called `name`, of CPUs or of CUDA devices; ProblemError lists the known names."""
    return _known(name, {**TARGETS, **CUDA_TARGETS})


def _known(name: object, known: Mapping[str, Target | CudaTarget]) -> Target | CudaTarget:
    if not isinstance(name, str):
        raise ProblemError("target", name, f"must be one of {', '.join(known)}")
    if name in known:
        return known[name]
    try:
        others = _microarchitectures()
    except ModuleNotFoundError:
        rule = f"must be one of {', '.join(known)}; microarchitectures need archspec: pip install 'tvm_deconv[compile]'"
        raise ProblemError("target", name, rule) from None
    found = others.get(name)
    if isinstance(found, Target):
        return found
    names = ", ".join(other for other, target in sorted(others.items()) if isinstance(target, Target))
    raise ProblemError("target", name, found or f"must be one of {', '.join(known)}; or a microarchitecture: {names}")


@functools.cache
def _microarchitectures() -> Mapping[str, Target | str]:
    """Return the microarchitectures that archspec knows, by LLVM's names, each a target or why it is none.

    Their flags are archspec's; all else is that of the widest level among their ancestors.
    """
    import archspec.cpu

    found: dict[str, Target | str] = {}
    for each in archspec.cpu.TARGETS.values():
        name = _llvm_name(each)
        if each.family.name != "x86_64":
            found[name] = f"must be a microarchitecture of x86-64, not of {each.family.name}"
        elif name not in TARGETS:
            flags = frozenset(_FLAGS.get(flag, flag) for flag in each.features) - _NOT_NEEDED
            flags |= _ALSO_NEEDED.get(name, frozenset())
            ancestors = {_llvm_name(ancestor) for ancestor in each.ancestors}
            levels = [level for level in TARGETS.values() if level.name in ancestors]
            if levels:
                level = max(levels, key=lambda level: len(level.features))
                found[name] = replace(level, name=name, mcpu=name, features=level.features | flags)
            else:
                least = min(TARGETS.values(), key=lambda level: len(level.features))
                found[name] = f"must not be below {least.name}: it lacks {', '.join(sorted(least.features - flags))}"
    return found


def _llvm_name(microarchitecture: Any) -> str:
    """Return LLVM's name of one of archspec's: the newest, since older versions gave some the name of another."""
    entries = microarchitecture.compilers.get("clang", ())
    newest: Mapping[str, str] = next((entry for entry in entries if entry["versions"].endswith(":")), {})
    return newest.get("name", microarchitecture.name)


def microarchitecture(host: Host) -> Target | None:
    """Return the microarchitecture of `host`, of its vendor's the one with the most flags that it has all of.

    None where there is none. Raises ModuleNotFoundError where archspec is not installed.
    """
    known = _microarchitectures()
    import archspec.cpu

    names = (_llvm_name(each) for each in archspec.cpu.TARGETS.values() if each.vendor == host.vendor)
    found = (target for target in map(known.get, names) if isinstance(target, Target))
    return max((t for t in found if t.features <= host.features), key=lambda t: len(t.features), default=None)


@functools.cache
def detect_host(cpuinfo: str | os.PathLike[str] = "/proc/cpuinfo") -> Host:
    """Read the host from `cpuinfo`, once; where that cannot be read, a host without any feature."""
    try:
        text = Path(cpuinfo).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return Host(frozenset())
    return parse_cpuinfo(text)


def parse_cpuinfo(text: str) -> Host:
    """Parse the text of ``/proc/cpuinfo``: flags are those that every CPU has."""
    features: frozenset[str] | None = None
    name, vendor = "unknown", ""
    cores: set[tuple[str, str]] = set()
    threads = 0
    for block in text.split("\n\n"):
        fields = {
            key.strip(): value.strip()
            for key, colon, value in (line.partition(":") for line in block.splitlines())
            if colon
        }
        if "processor" not in fields:
            continue
        flags = frozenset(fields.get("flags", fields.get("Features", "")).split())
        features = flags if features is None else features & flags
        name, vendor = fields.get("model name", name), fields.get("vendor_id", vendor)
        cores.add((fields.get("physical id", "0"), fields.get("core id", str(threads))))
        threads += 1
    return Host(features or frozenset(), name, max(len(cores), 1), max(threads, 1), vendor)


def supported(features: frozenset[str]) -> list[Target]:
    """Return the targets that a CPU with `features` can run, the widest first."""
    fitting = (target for target in TARGETS.values() if target.features <= features)
    return sorted(fitting, key=lambda target: len(target.features), reverse=True)


def native(host: Host | None = None) -> Target:
    """Return the widest target that `host` (by default this machine) can run; ProblemError names what it lacks."""
    host = detect_host() if host is None else host
    fitting = supported(host.features)
    if not fitting:
        narrowest = min(TARGETS.values(), key=lambda target: len(target.features))
        missing = ", ".join(sorted(narrowest.features - host.features))
        raise ProblemError("target", "native", f"this CPU ({host.name}) lacks {missing}, which {narrowest.name} needs")
    return fitting[0]


def max_target(environ: Mapping[str, str] | None = None) -> Target | None:
    """Return the target that ``TVM_DECONV_MAX_TARGET`` names, the widest that may be loaded; None where unset.

    Raises ProblemError where it names no level.
    """
    name = (os.environ if environ is None else environ).get(MAX_TARGET_VARIABLE, "")
    if not name:
        return None
    if name not in TARGETS:
        raise ProblemError(MAX_TARGET_VARIABLE, name, f"must be one of {', '.join(TARGETS)}")
    return TARGETS[name]


_CUDA_NAME = "libcuda.so.1"
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*


def cuda_driver(device: int = 0) -> ctypes.CDLL:
    """Return the library of NVIDIA's driver; DeviceError, about CUDA device number `device`, where there is none."""
    try:
        return ctypes.CDLL(_CUDA_NAME)
    except OSError:
        raise DeviceError("device", f"cuda:{device}", f"needs NVIDIA's driver: {_CUDA_NAME} is not found") from None


@functools.cache
def cuda_capability(device: int = 0) -> Capability:
    """Return the compute capability of CUDA device number `device`; DeviceError says what is missing."""
    driver = cuda_driver(device)

    def ask(function: str, *arguments: object) -> None:
        code = getattr(driver, function)(*arguments)
        if code:
            raise DeviceError("device", f"cuda:{device}", f"NVIDIA's driver has no such device: {function} says {code}")

    handle, found = ctypes.c_int(), [ctypes.c_int(), ctypes.c_int()]
    ask("cuInit", 0)
    ask("cuDeviceGet", ctypes.byref(handle), device)
    for value, attribute in zip(found, (_MAJOR, _MINOR), strict=True):
        ask("cuDeviceGetAttribute", ctypes.byref(value), attribute, handle)
    return found[0].value, found[1].value
