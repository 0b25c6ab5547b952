"""Microarchitectures by archspec's names, such as zen3: which one a machine is of, and how far two are apart."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence

from tvm_deconv.targets.base import Target
from tvm_deconv.targets.cpu import _llvm_name, microarchitecture
from tvm_deconv.targets.host import Host

#: By vendor and family, the first and the last model of archspec's microarchitectures that have AVX2. Flags tell less:
#: virtual machines hide some. Models that stand nowhere here are known by their flags.
_MODELS: Mapping[tuple[str, int], Mapping[str, Sequence[tuple[int, int]]]] = {
    ("AuthenticAMD", 0x15): {"excavator": [(0x60, 0x7F)]},
    ("AuthenticAMD", 0x17): {
        "zen": [(0x00, 0x2F), (0x50, 0x5F)],
        "zen2": [(0x30, 0x4F), (0x60, 0x7F), (0x84, 0x87), (0x90, 0xAF)],
    },
    ("AuthenticAMD", 0x19): {"zen3": [(0x00, 0x0F), (0x20, 0x5F)], "zen4": [(0x10, 0x1F), (0x60, 0xAF)]},
    ("AuthenticAMD", 0x1A): {
        "zen5": [(0x00, 0x4F), (0x60, 0x7F)],
        "zen6": [(0x50, 0x5F), (0x80, 0xAF), (0xC0, 0xCF)],
    },
    ("GenuineIntel", 0x06): {
        "haswell": [(0x3C, 0x3C), (0x3F, 0x3F), (0x45, 0x46)],
        "broadwell": [(0x3D, 0x3D), (0x47, 0x47), (0x4F, 0x4F), (0x56, 0x56)],
        "skylake": [(0x4E, 0x4E), (0x5E, 0x5E), (0x8E, 0x8E), (0x9E, 0x9E), (0xA5, 0xA6)],
        "cannonlake": [(0x66, 0x66)],
        "icelake": [(0x6A, 0x6A), (0x6C, 0x6C), (0x7D, 0x7E)],
        "sapphirerapids": [(0x8F, 0x8F), (0xCF, 0xCF)],  # and Emerald Rapids
        "alderlake": [(0x97, 0x97), (0x9A, 0x9A), (0xAA, 0xAA), (0xAC, 0xAC), (0xB7, 0xB7), (0xBA, 0xBA), (0xBF, 0xBF)],
        "arrowlake": [(0xC5, 0xC5)],
        "arrowlake_s": [(0xBD, 0xBD), (0xC6, 0xC6)],
    },
}


@functools.cache
def _names() -> Mapping[str, str]:
    """Return archspec's names by LLVM's."""
    import archspec.cpu

    return {_llvm_name(entry): entry.name for entry in archspec.cpu.TARGETS.values() if entry.vendor != "generic"}


def name_of(host: Host) -> str:
    """Return the name of the microarchitecture of `host`: that of its model, else the nearest with no flag it lacks.

    A CPU that archspec does not know has a name made of its vendor, family and model; one without a vendor has "".
    """
    for name, models in _MODELS.get((host.vendor, host.family), {}).items():
        if any(first <= host.model <= last for first, last in models):
            return name
    try:
        known = microarchitecture(host)
    except ModuleNotFoundError:
        known = None
    if known is not None:
        return _names()[known.name]
    return f"{host.vendor}-{host.family}-{host.model}" if host.vendor else ""


def meant(target: Target, host: Host) -> str | None:
    """Return the microarchitecture that a build on `host` is for: the target's own, or that of `host` for a level.

    None means that the target alone says which machines are meant.
    """
    if target.memory != "cpu":
        return None
    try:
        own = _names().get(target.name)
    except ModuleNotFoundError:
        own = None
    return own or name_of(host)


@functools.cache
def generations(name: str, other: str) -> float:
    """Return how far apart two microarchitectures are: the ancestors, with themselves, that they do not share.

    Names that archspec does not know are infinitely far from all others, and "" from every name.
    """
    if name == other:
        return 0.0 if name else math.inf
    try:
        import archspec.cpu
    except ModuleNotFoundError:
        return math.inf
    lines = [archspec.cpu.TARGETS.get(one) for one in (name, other)]
    if None in lines:
        return math.inf
    mine, theirs = ({line.name, *(ancestor.name for ancestor in line.ancestors)} for line in lines if line)
    return float(len(mine ^ theirs))
