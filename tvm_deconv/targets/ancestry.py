"""Microarchitectures by archspec's names, such as zen3: which one a machine is of, and how far two are apart."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping

from tvm_deconv.targets.base import Target
from tvm_deconv.targets.cpu import _llvm_name, microarchitecture
from tvm_deconv.targets.host import Host


@functools.cache
def _names() -> Mapping[str, str]:
    """Return archspec's names by LLVM's."""
    import archspec.cpu

    return {_llvm_name(entry): entry.name for entry in archspec.cpu.TARGETS.values() if entry.vendor != "generic"}


def name_of(host: Host) -> str:
    """Return the name of the microarchitecture of `host`.

    A CPU that archspec does not know has a name made of its vendor, family and model; one without a vendor has "".
    """
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
