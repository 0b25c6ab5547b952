"""From names to targets."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from tvm_deconv.errors import ProblemError
from tvm_deconv.extras import install
from tvm_deconv.problem.checks import several
from tvm_deconv.targets.ancestry import meant
from tvm_deconv.targets.base import MAX_TARGET_VARIABLE, Target
from tvm_deconv.targets.cpu import CPU_TARGETS, CpuTarget, microarchitectures, of_flags, supported
from tvm_deconv.targets.cuda import CUDA_TARGETS
from tvm_deconv.targets.host import Host, detect_host

_MOST_KEPT = 4096


def known_targets() -> Mapping[str, Target]:
    """Return the targets that have names of their own, levels of CPUs first; microarchitectures come from archspec."""
    return {**CPU_TARGETS, **CUDA_TARGETS}


def get(name: str) -> Target:
    """Return the target called `name`: a level, a microarchitecture or CUDA devices; ProblemError lists the names."""
    known = known_targets()
    names = ", ".join(known)
    if not isinstance(name, str):
        raise ProblemError("target", name, f"must be one of {names}")
    if name in known:
        return known[name]
    try:
        others = microarchitectures()
    except ModuleNotFoundError:
        rule = f"must be one of {names}; microarchitectures need archspec: {install('compile')}"
        raise ProblemError("target", name, rule) from None
    other = others.get(name)
    if isinstance(other, Target):
        return other
    listing = ", ".join(sorted(name for name, target in others.items() if isinstance(target, Target)))
    raise ProblemError("target", name, other or f"must be one of {names}; or a microarchitecture: {listing}")


def native(host: Host | None = None) -> CpuTarget:
    """Return the widest level that `host` (by default this machine) can run; ProblemError names the missing flags."""
    host = detect_host() if host is None else host
    fitting = supported(host.features)
    if not fitting:
        narrowest = min(CPU_TARGETS.values(), key=lambda target: len(target.features))
        missing = ", ".join(sorted(narrowest.features - host.features))
        raise ProblemError("target", "native", f"this CPU ({host.name}) lacks {missing}, which {narrowest.name} needs")
    return fitting[0]


def of_names(names: str | Sequence[str], host: Host | None = None) -> tuple[Target, ...]:
    """Return the targets called `names`, each once; "native" is the widest level of `host`, by default this machine.

    Levels have the multiply-adds of `host`, which default plans are for. Raises ProblemError for an unknown name or if
    there is none.
    """
    host = detect_host() if host is None else host
    found = (native(host) if name == "native" else get(name) for name in names_of(names))
    return tuple(dict.fromkeys(target.on(meant(target, host)) for target in found))


def names_of(names: str | Sequence[str]) -> tuple[str, ...]:
    """Return one or several `names` as a tuple; ProblemError if there is none."""
    rule = "must be a name or a sequence of names"
    wanted = (names,) if isinstance(names, str) else several("target", names, rule)
    if not wanted:
        known = ", ".join(("native", *known_targets(), "a microarchitecture"))
        raise ProblemError("target", names, f"must name at least one of {known}")
    return wanted


@lru_cache(_MOST_KEPT)
def of_artifact(name: str, features: tuple[str, ...]) -> Target | None:
    """Return the target that a manifest names, with its own `features` besides those of a known target.

    Any other name is a microarchitecture, known by its flags: those must hold all of a level. Return None if they do
    not.
    """
    known = known_targets().get(name)
    own = frozenset(features)
    return of_flags(name, own) if known is None else replace(known, features=known.features | own)


def max_target(environ: Mapping[str, str] | None = None) -> CpuTarget | None:
    """Return the level that ``TVM_DECONV_MAX_TARGET`` names, the widest that may be loaded; None if it is unset.

    Raises ProblemError if it names no level.
    """
    name = (os.environ if environ is None else environ).get(MAX_TARGET_VARIABLE, "")
    if not name:
        return None
    if name not in CPU_TARGETS:
        raise ProblemError(MAX_TARGET_VARIABLE, name, f"must be one of {', '.join(CPU_TARGETS)}")
    return CPU_TARGETS[name]
