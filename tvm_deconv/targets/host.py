"""The machine that this process runs on, read from ``/proc/cpuinfo``."""

from __future__ import annotations

import ctypes
import functools
import os
from dataclasses import dataclass, replace
from pathlib import Path

#: The flags of AMX, which a process may use if the kernel permits it.
AMX_FLAGS = ("amx_bf16", "amx_int8", "amx_tile")
#: Linux: the number of the system call arch_prctl, its code for the request of a state, and the state of AMX.
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18


@dataclass(frozen=True)
class Host:
    """A machine: its CPU flags (common to all of its CPUs), model name, physical cores, logical CPUs, and vendor.

    Virtual machines often give many CPUs one name; `family`, `model` and `stepping` tell them apart.
    """

    features: frozenset[str]
    name: str = "unknown"
    cores: int = 1
    threads: int = 1
    vendor: str = ""
    family: int = 0
    model: int = 0
    stepping: int = 0


@functools.cache
def detect_host(cpuinfo: str | os.PathLike[str] = "/proc/cpuinfo") -> Host:
    """Read the host from the file `cpuinfo`, once; return a host without features if that cannot be read.

    Where CPUs have AMX, the kernel is asked to let this process use it; the host has no flags of AMX if it does not.
    """
    try:
        text = Path(cpuinfo).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return Host(frozenset())
    host = parse_cpuinfo(text)
    if host.features.isdisjoint(AMX_FLAGS) or _permits_amx():
        return host
    return replace(host, features=host.features.difference(AMX_FLAGS))


def _permits_amx() -> bool:
    """Ask the kernel to let this process use AMX; its threads and children may, too."""
    return bool(ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0)


def parse_cpuinfo(text: str) -> Host:
    """Parse the text of ``/proc/cpuinfo``; the flags are those that every CPU has."""
    features: frozenset[str] | None = None
    name, vendor = "unknown", ""
    numbers = {"cpu family": 0, "model": 0, "stepping": 0}
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
        numbers.update({key: int(fields[key]) for key in numbers if fields.get(key, "").isdecimal()})
        cores.add((fields.get("physical id", "0"), fields.get("core id", str(threads))))
        threads += 1
    return Host(features or frozenset(), name, max(len(cores), 1), max(threads, 1), vendor, *numbers.values())
