"""CPUs: the psABI levels of x86-64, and the microarchitectures that archspec knows.

The flags of CPUs are a partial order: an artifact runs if its flags are a subset of the host's, and of two that run the
one that needs more is the wider. archspec is needed to compile for a microarchitecture; to load an artifact, its flags
are enough.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from tvm_deconv.problem import Problem
from tvm_deconv.targets.base import FUNCTIONS, Place, Target
from tvm_deconv.targets.host import AMX_FLAGS, Host

# The psABI levels; flags that /proc/cpuinfo does not list (osxsave) are implied by those that it does (avx).
_X86_64_V2 = frozenset({"cx16", "lahf_lm", "popcnt", "pni", "sse4_1", "sse4_2", "ssse3"})
_X86_64_V3 = _X86_64_V2 | {"abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"}
_X86_64_V4 = _X86_64_V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}

#: Flags that archspec counts, which no instruction of a kernel needs and virtual machines tend to hide.
_NOT_NEEDED = frozenset({"flush_l1d", "movdir64b", "movdiri", "pku", "rdseed", "tsc_adjust", "waitpkg"})
#: archspec's names of flags that /proc/cpuinfo calls otherwise.
_FLAGS = {"sse3": "pni"}
#: Flags that LLVM uses for a microarchitecture and archspec does not list.
_ALSO_NEEDED = {"sapphirerapids": frozenset({"avx512_fp16", "avx_vnni"})}

#: The functions of the launcher, which every library for CPUs is linked with.
LAUNCHER_SYMBOLS = frozenset(
    {
        "__tvm_ffi_deconv_with",
        "tvm_deconv_get_num_threads",
        "tvm_deconv_make_arena",
        "tvm_deconv_make_openmp_host",
        "tvm_deconv_set_num_threads",
    }
)


@dataclass(frozen=True, kw_only=True)
class CpuTarget(Target):
    """CPUs that have all of `features`: LLVM's name of them, and the sizes that schedules derive their tiles from.

    Vector width is in bits, cache sizes are in bytes; `multiply_adds` are vectors that a core multiplies and adds in a
    cycle. The last cache may be that of a `mesh` of cores, which each reads slowly. `level` is the psABI level whose
    sizes and tuning logs apply; a level is its own. `extensions` are LLVM's names of features that CPUs called `mcpu`
    need not have.
    """

    mcpu: str
    extensions: tuple[str, ...]
    vector_bits: int
    vector_registers: int
    l1_bytes: int
    l2_bytes: int
    multiply_adds: int
    level: str
    mesh: bool = False

    backend: ClassVar[str] = "x86"
    memory: ClassVar[str] = "cpu"
    symbols: ClassVar[frozenset[str]] = FUNCTIONS | LAUNCHER_SYMBOLS

    @property
    def llvm(self) -> dict[str, Any]:
        """The target in TVM's terms."""
        attributes = [f"+{name}" for name in (*self.extensions, *_PREFERENCES)]
        return {"kind": "llvm", "mcpu": self.mcpu, "mattr": attributes, "cl-opt": [*_LIMITS]}

    @property
    def logs(self) -> tuple[str, ...]:
        """See Target; a microarchitecture follows its level."""
        return tuple(dict.fromkeys((self.name, self.level)))

    @property
    def ancestors(self) -> tuple[str, ...]:
        """See Target; those whose flags it has and whose vectors are as wide."""
        others = (target for target in supported(self.features) if target.name != self.name)
        return tuple(target.name for target in others if target.vector_bits == self.vector_bits)

    def on(self, microarchitecture: str | None) -> CpuTarget:
        """See Target; a level takes its multiply-adds and mesh. It keeps its caches, which all its CPUs have."""
        if self.mcpu not in ("x86-64-v3", "x86-64-v4"):
            return self
        has_amx = self.features.issuperset(AMX_FLAGS)
        wide, mesh = (has_amx or microarchitecture in servers for servers in (_TWO_WIDE, _MESHES))
        adds = 1 + wide if self.mcpu == "x86-64-v4" else self.multiply_adds
        return replace(self, multiply_adds=adds, mesh=mesh)

    @property
    def machines(self) -> str:
        """See Target."""
        return f"CPUs with {', '.join(sorted(self.features))}"

    def lanes(self, element_bytes: int) -> int:
        """Return the number of elements of `element_bytes` bytes in one vector register."""
        return self.vector_bits // (8 * element_bytes)

    def computes(self, problem: Problem) -> Problem:
        """See Target; CPUs have no TF32 and compute exactly."""
        return problem.replace(precision="ieee")

    def refusal(self, place: Place) -> str | None:
        """See Target."""
        if place.capability is not None:
            return "runs on the CPU; these arrays are in the memory of a CUDA device"
        return self._lack(place)

    def closeness(self, place: Place) -> tuple[int, ...]:  # noqa: ARG002
        """See Target; among CPUs flags alone decide."""
        return ()


def _level(name: str, features: frozenset[str], bits: int, registers: int, multiply_adds: int, l2: int) -> CpuTarget:
    return CpuTarget(
        name=name,
        mcpu=name,
        extensions=(),
        features=features,
        vector_bits=bits,
        vector_registers=registers,
        multiply_adds=multiply_adds,
        l1_bytes=32 << 10,
        l2_bytes=l2,
        level=name,
    )


#: LLVM does not scatter: where it made vectors of addresses in a copy, the first layer of DCGAN took 1.4 times as long.
_PREFERENCES = ("prefer-no-scatter",)
#: In a loop of more than 250 accesses to memory LLVM keeps accumulators there; register tiles have some 600.
_LIMITS = ("-licm-mssa-max-acc-promotion:uint=4000",)
#: Extensions that multiply words of low-precision factors, by the names of /proc/cpuinfo and of LLVM.
_EXTENSIONS = {
    "avx_vnni": "avxvnni",
    "avx512_vnni": "avx512vnni",
    "avx512_bf16": "avx512bf16",
    "amx_tile": "amx-tile",
    "amx_bf16": "amx-bf16",
    "amx_int8": "amx-int8",
}


def _extended(level: CpuTarget, suffix: str, *flags: str) -> CpuTarget:
    extensions = tuple(_EXTENSIONS[flag] for flag in flags)
    return replace(level, name=f"{level.name}-{suffix}", features=level.features | set(flags), extensions=extensions)


# Cache sizes are those that most CPUs of each level have at least: Zen 1 to 3, and Skylake-SP and Zen 4. Multiply-adds
# are those of Zen 2 and of Zen 4.
CPU_LEVELS: Mapping[str, CpuTarget] = {
    target.name: target
    for target in (
        _level("x86-64-v3", _X86_64_V3, bits=256, registers=16, multiply_adds=2, l2=512 << 10),
        _level("x86-64-v4", _X86_64_V4, bits=512, registers=32, multiply_adds=1, l2=1 << 20),
    )
}

_AVX2, _AVX512 = CPU_LEVELS.values()
#: The levels, and those with instructions for low precision: Alder Lake; Cascade Lake and Ice Lake; Zen 4; Sapphire
#: Rapids.
CPU_TARGETS: Mapping[str, CpuTarget] = {
    **CPU_LEVELS,
    "x86-64-v3-vnni": _extended(_AVX2, "vnni", "avx_vnni"),
    "x86-64-v4-vnni": _extended(_AVX512, "vnni", "avx512_vnni"),
    "x86-64-v4-bf16": _extended(_AVX512, "bf16", "avx512_vnni", "avx512_bf16"),
    "x86-64-v4-amx": _extended(_AVX512, "amx", "avx512_vnni", "avx512_bf16", *AMX_FLAGS),
}

#: KiB of the first and second-level data cache of a core, of microarchitectures that differ from their level.
_CACHES: Mapping[str, tuple[int, int]] = {
    "haswell": (32, 256),
    "broadwell": (32, 256),
    "skylake": (32, 256),
    "alderlake": (48, 1280),
    "arrowlake": (48, 3072),
    "arrowlake-s": (48, 3072),
    "bdver4": (16, 1024),
    "cannonlake": (32, 256),
    "icelake-client": (48, 512),
    "sapphirerapids": (48, 2048),
    "znver5": (48, 1024),
    "znver6": (48, 1024),
}

#: Microarchitectures that multiply and add two vectors of 512 bits in a cycle, by archspec's names; servers of those of
#: which there are several kinds.
_TWO_WIDE = frozenset({"skylake_avx512", "cascadelake", "icelake", "sapphirerapids", "zen5", "zen6"})
#: Those whose last cache is that of a mesh.
_MESHES = frozenset({"skylake_avx512", "cascadelake", "icelake", "sapphirerapids"})


def of_flags(name: str, features: frozenset[str]) -> CpuTarget | None:
    """Return the microarchitecture `name` that needs `features`; None if it does not need all of a level.

    It has the sizes of the widest level whose flags are among its own.
    """
    levels = [level for level in CPU_TARGETS.values() if level.features <= features]
    if not levels:
        return None
    widest = max(levels, key=lambda level: len(level.features))
    return replace(widest, name=name, mcpu=name, features=features, extensions=())


@functools.cache
def microarchitectures() -> Mapping[str, CpuTarget | str]:
    """Return the microarchitectures that archspec knows, by LLVM's names: a target, or why it cannot be one.

    Flags are archspec's, caches those of `_CACHES`; all else is that of the widest level among the ancestors, but for
    multiply-adds. Raises ModuleNotFoundError if archspec is not installed.
    """
    import archspec.cpu

    known: dict[str, CpuTarget | str] = {}
    for architecture in archspec.cpu.TARGETS.values():
        name = _llvm_name(architecture)
        if architecture.family.name != "x86_64":
            known[name] = f"must be a microarchitecture of x86-64, not of {architecture.family.name}"
        elif name not in CPU_TARGETS:
            known[name] = _microarchitecture(architecture, name)
    return known


def _microarchitecture(architecture: Any, name: str) -> CpuTarget | str:
    """Return the target of one of archspec's microarchitectures; a text if it has no level among its ancestors."""
    flags = frozenset(_FLAGS.get(flag, flag) for flag in architecture.features) - _NOT_NEEDED
    flags |= _ALSO_NEEDED.get(name, frozenset())
    ancestors = {_llvm_name(ancestor) for ancestor in architecture.ancestors}
    levels = [level for level in CPU_LEVELS.values() if level.name in ancestors]
    if levels:
        level = max(levels, key=lambda level: len(level.features)).on(architecture.name)
        first, second = _CACHES.get(name, (level.l1_bytes >> 10, level.l2_bytes >> 10))
        return replace(
            level,
            name=name,
            mcpu=name,
            features=level.features | flags,
            l1_bytes=first << 10,
            l2_bytes=second << 10,
        )
    least = min(CPU_TARGETS.values(), key=lambda level: len(level.features))
    return f"must not be below {least.name}: it lacks {', '.join(sorted(least.features - flags))}"


def _llvm_name(architecture: Any) -> str:
    """Return LLVM's newest name of one of archspec's microarchitectures: older versions gave some another's name."""
    entries = architecture.compilers.get("clang", ())
    newest: Mapping[str, str] = next((entry for entry in entries if entry["versions"].endswith(":")), {})
    return newest.get("name", architecture.name)


def microarchitecture(host: Host) -> CpuTarget | None:
    """Return the microarchitecture of `host`: of its vendor's with no flag that it lacks, the one with the most flags.

    Return None if there is none. Raises ModuleNotFoundError if archspec is not installed.
    """
    known = microarchitectures()
    import archspec.cpu

    names = (_llvm_name(entry) for entry in archspec.cpu.TARGETS.values() if entry.vendor == host.vendor)
    candidates = (target for target in map(known.get, names) if isinstance(target, CpuTarget))
    return max((t for t in candidates if t.features <= host.features), key=lambda t: len(t.features), default=None)


def supported(features: frozenset[str]) -> list[CpuTarget]:
    """Return the levels that a CPU with `features` can run, the widest first."""
    fitting = (target for target in CPU_TARGETS.values() if target.features <= features)
    return sorted(fitting, key=lambda target: len(target.features), reverse=True)
