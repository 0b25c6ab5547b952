"""The versions of the system's libraries that an artifact needs, and those of this machine.

A version is that of a family: the C library's, the C++ library's, tvm_ffi's. A library names the versions of symbols
that it needs; the highest of a family counts. tvm_ffi has no versions of symbols: the release that a build used counts.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from tvm_deconv.artifact import elf

#: The families, as symbols and manifests name them.
FAMILIES = ("GLIBC", "GLIBCXX", "CXXABI", "GCC", "tvm_ffi")
#: What artifacts should need at most: the platform manylinux_2_28.
FLOOR: Mapping[str, str] = {"GLIBC": "2.28", "GLIBCXX": "3.4.24", "CXXABI": "1.3.11", "GCC": "7.0.0"}

NUMBERS = r"\d{1,9}(?:\.\d{1,9}){0,5}"
_VERSION = re.compile(rf"([A-Za-z_]+)_({NUMBERS})")
_RELATIVE = "GLIBC_ABI_DT_RELR"  # the mark of a format that came with glibc 2.36


def needed(versions: Iterable[str]) -> dict[str, str]:
    """Return the highest version of each family among the names of `versions`."""
    highest: dict[str, str] = {}
    for name in versions:
        match = _VERSION.fullmatch("GLIBC_2.36" if name == _RELATIVE else name)
        if match and match[1] in FAMILIES:
            highest[match[1]] = max(match[2], highest.get(match[1], "0"), key=_order)
    return highest


def release(version: str) -> str:
    """Return the numbers at the beginning of the version of a package; "0" if it begins otherwise."""
    match = re.match(NUMBERS, version)
    return match[0] if match else "0"


def beyond(needs: Mapping[str, str], limits: Mapping[str, str]) -> dict[str, str]:
    """Return those of `needs` that are higher than the limit of their family; where there is none, none is too high."""
    return {
        family: version
        for family, version in needs.items()
        if family in limits and _order(version) > _order(limits[family])
    }


def text(needs: Mapping[str, str]) -> str:
    """Return `needs` in words."""
    return ", ".join(f"{family} {needs[family]}" for family in FAMILIES if family in needs)


def _order(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


@functools.cache
def here() -> Mapping[str, str]:
    """Return the versions of this process's libraries; those that cannot be known are missing."""
    import importlib.metadata  # which imports every way to compress

    found: dict[str, str] = {}
    with contextlib.suppress(OSError, ValueError):  # another C library has no such name
        name, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
        found |= {"GLIBC": release(version)} if name == "glibc" else {}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        found["tvm_ffi"] = release(importlib.metadata.version("apache-tvm-ffi"))
    for library in ("libstdc++.so.6", "libgcc_s.so.1"):
        with contextlib.suppress(OSError, ValueError):  # it is not loaded: nothing needs it yet
            found |= needed(elf.versions_defined(_path(library).read_bytes()))
    return found


class _LinkMap(ctypes.Structure):
    """The beginning of the dynamic linker's ``struct link_map``."""

    _fields_ = (("address", ctypes.c_void_p), ("name", ctypes.c_char_p))


def _path(library: str) -> Path:
    """Return the path of a library that this process has loaded. Raises OSError if it has not."""
    handle = ctypes.CDLL(library, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)._handle
    return Path(os.fsdecode(ctypes.cast(handle, ctypes.POINTER(_LinkMap)).contents.name))
