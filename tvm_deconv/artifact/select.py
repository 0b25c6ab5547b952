"""The choice of the artifact that serves a problem: manifests and CPU flags in, decisions with reasons out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import TypeAlias

from tvm_deconv.artifact.manifest import ORIGINS, Manifest
from tvm_deconv.problem import Problem
from tvm_deconv.targets import CUDA_TARGETS, MAX_TARGET_VARIABLE, TARGETS, Capability, Target


@dataclass(frozen=True)
class Accepted:
    """A candidate that can serve the problem here; `reason` says what distinguishes it."""

    manifest: Manifest
    reason: str

    @property
    def name(self) -> str:
        """The stem of the artifact's file names."""
        return self.manifest.name

    def __str__(self) -> str:
        return f"{self.name}: accepted: {self.reason}"


@dataclass(frozen=True)
class Rejected:
    """A candidate that cannot serve the problem here, and why; `manifest` is None where it could not be read."""

    manifest: Manifest | None
    reason: str
    name: str

    def __str__(self) -> str:
        return f"{self.name}: rejected: {self.reason}"


Decision: TypeAlias = Accepted | Rejected


def select(
    problem: Problem,
    manifests: Iterable[Manifest],
    features: frozenset[str],
    *,
    cap: Target | None = None,
    broken: Mapping[str, str] | None = None,
    capability: Capability | None = None,
) -> list[Decision]:
    """Decide over every candidate for `problem` on a CPU with `features`; pure. The best comes first.

    With a `capability`, on a CUDA device which has that, for arrays in its memory.

    1. A manifest that could not be read (`broken`: name to reason) is rejected.
    2. The key must be one of the problem's artifact keys, or that of a variable problem that serves it; the reason
       names the fields that differ.
    3. The target must be one that this version knows, or a microarchitecture: any other name, whose flags, which the
       manifest has all of, hold those of a level.
    4. It must be for the CPU, or for a CUDA device of this `capability`, wherever the arrays are; the flags it needs
       must be among `features`; the reason names the missing ones.
    5. With a `cap`, they must be among those of the cap too.

    Accepted: the wider feature set first (a superset has more flags, so counting respects the partial order), or what
    computes in the precision asked for, then the code closest to the device; exact before variable (the fewer
    dynamic extents, the better), tuned before default, then by name. Rejected: those for this problem, the unreadable,
    the others by likeness.
    """
    ranked: list[tuple[tuple[int | str, ...], Decision]] = []
    keys = problem.artifact_keys
    for manifest in manifests:
        exact = manifest.problem in keys
        if not exact and not (manifest.parsed.dynamic and manifest.parsed.serves(problem)):
            differing = _differing(problem, manifest.parsed)
            more = f"; and {len(differing) - 3} more" if len(differing) > 3 else ""
            reason = f"serves another problem: {'; '.join(differing[:3])}{more}"
            ranked.append(((3, len(differing), manifest.name), Rejected(manifest, reason, manifest.name)))
            continue
        refusal = _refusal(manifest, features, cap, capability)
        if refusal:
            ranked.append(((1, manifest.name), Rejected(manifest, refusal, manifest.name)))
            continue
        place, fit = "CPU", (0, 0)
        if capability is not None:
            place, fit = "device", CUDA_TARGETS[manifest.target].fit(capability)
        what = "this problem" if exact else f"any extents that are dynamic in {manifest.problem},"
        reason = f"serves {what} and this {place}: {manifest.target}, {manifest.algorithm}, {manifest.origin} schedule"
        rank = (
            0,
            -len(manifest.required),
            manifest.parsed.precision != problem.precision,
            -fit[0],
            -fit[1],
            len(manifest.parsed.dynamic) * (not exact),
            -ORIGINS.index(manifest.origin),
            manifest.name,
        )
        ranked.append((rank, Accepted(manifest, reason)))
    for name, reason in (broken or {}).items():
        ranked.append(((2, name), Rejected(None, reason, name)))
    return [decision for _, decision in sorted(ranked, key=lambda pair: pair[0])]


def _refusal(
    manifest: Manifest, features: frozenset[str], cap: Target | None, capability: Capability | None
) -> str | None:
    device = CUDA_TARGETS.get(manifest.target)
    if device is None and not any(level.features <= manifest.required for level in TARGETS.values()):
        known = ", ".join((*TARGETS, *CUDA_TARGETS))
        return (
            f"target {manifest.target} is not known to this version, which knows {known}, and what needs all "
            "CPU flags of one"
        )
    if device is not None and capability is None:
        return f"runs on CUDA devices (compute capability {device.architectures}); these arrays are in CPU memory"
    if device is None and capability is not None:
        return "runs on the CPU; these arrays are in the memory of a CUDA device"
    if device is not None and capability is not None and not device.runs_on(capability):
        own = ".".join(map(str, capability))
        return f"runs on compute capability {device.architectures}; this device has {own}"
    missing = manifest.required - features
    if missing:
        return f"needs CPU flags that this host lacks: {', '.join(sorted(missing))}"
    beyond = manifest.required - cap.features if cap else frozenset()
    if cap and beyond:
        return f"{MAX_TARGET_VARIABLE}={cap.name} excludes CPU flags that it needs: {', '.join(sorted(beyond))}"
    return None


def _differing(problem: Problem, other: Problem) -> tuple[str, ...]:
    # The filter's format is not part of an artifact's identity.
    names = [field.name for field in fields(problem) if field.name != "filter_format"]
    pairs = ((name, getattr(other, name), getattr(problem, name)) for name in names)
    return tuple(f"{name} {theirs}, wanted {ours}" for name, theirs, ours in pairs if theirs != ours)


def decision_table(decisions: Iterable[Decision], limit: int = 20) -> str:
    """Return `decisions` as aligned lines of text, at most `limit` of them and a count of the rest."""
    rows = [
        ("yes" if isinstance(decision, Accepted) else "no", decision.name, decision.reason) for decision in decisions
    ]
    if not rows:
        return "no candidates"
    width = max(len(name) for _, name, _ in rows)
    lines = [f"{usable:3}  {name:{width}}  {reason}" for usable, name, reason in rows[:limit]]
    if len(rows) > limit:
        lines.append(f"and {len(rows) - limit} more")
    return "\n".join(lines)
