"""The choice of the artifact that serves a problem: manifests and CPU flags in, decisions with reasons out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import TypeAlias

from tvm_deconv.artifact.manifest import ORIGINS, Manifest
from tvm_deconv.problem import Problem
from tvm_deconv.targets import CUDA_TARGETS, MAX_TARGET_VARIABLE, TARGETS, Capability, Target

_MOST_DIFFERENCES = 3  # that a reason names


@dataclass(frozen=True)
class Accepted:
    """A candidate that can serve the problem here; `reason` tells it from others."""

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
    """A candidate that cannot serve the problem here, and the reason; `manifest` is None if it does not read."""

    manifest: Manifest | None
    reason: str
    name: str

    def __str__(self) -> str:
        return f"{self.name}: rejected: {self.reason}"


Decision: TypeAlias = Accepted | Rejected
_Rank: TypeAlias = tuple[int | str, ...]


def select(
    problem: Problem,
    manifests: Iterable[Manifest],
    features: frozenset[str],
    *,
    cap: Target | None = None,
    broken: Mapping[str, str] | None = None,
    capability: Capability | None = None,
) -> list[Decision]:
    """Decide on every candidate for `problem` on a CPU with `features`; the best comes first.

    With a `capability`, on a CUDA device that has it, for arrays in its memory. The rules:

    1. A manifest that could not be read (`broken`: name to reason) is rejected.
    2. The key must be one of the problem's artifact keys, or that of a variable problem that serves it. The reason
       names the fields that differ.
    3. The target must be one that this version knows, or a microarchitecture. Any other name is one if the flags of its
       manifest hold those of a level.
    4. The target must be for the CPU, or for a CUDA device of this `capability`, as the arrays are. The flags it needs
       must be among `features`; the reason names the missing ones.
    5. With a `cap`, they must be among those of the cap too.

    Accepted candidates are ordered by: the wider feature set (a superset has more flags, so counting respects the
    partial order); the precision asked for; the code closest to the device; exact before variable, with the fewer
    dynamic extents; tuned before default; name. Rejected ones follow: those for this problem, the unreadable, the
    others by likeness.
    """
    keys = problem.artifact_keys
    ranked: list[tuple[_Rank, Decision]] = []
    for manifest in manifests:
        exact = manifest.problem in keys
        if not exact and not (manifest.parsed.dynamic and manifest.parsed.serves(problem)):
            ranked.append(_of_other_problem(problem, manifest))
        elif refusal := _refusal(manifest, features, cap, capability):
            ranked.append(((1, manifest.name), Rejected(manifest, refusal, manifest.name)))
        else:
            ranked.append(_accepted(problem, manifest, exact, capability))
    for name, reason in (broken or {}).items():
        ranked.append(((2, name), Rejected(None, reason, name)))
    return [decision for _, decision in sorted(ranked, key=lambda pair: pair[0])]


def _accepted(
    problem: Problem, manifest: Manifest, exact: bool, capability: Capability | None
) -> tuple[_Rank, Accepted]:
    place, fit = "CPU", (0, 0)
    if capability is not None:
        place, fit = "device", CUDA_TARGETS[manifest.target].fit(capability)
    served = "this problem" if exact else f"any extents that are dynamic in {manifest.problem},"
    reason = f"serves {served} and this {place}: {manifest.target}, {manifest.algorithm}, {manifest.origin} schedule"
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
    return rank, Accepted(manifest, reason)


def _of_other_problem(problem: Problem, manifest: Manifest) -> tuple[_Rank, Rejected]:
    differences = _differences(problem, manifest.parsed)
    beyond = len(differences) - _MOST_DIFFERENCES
    more = f"; and {beyond} more" if beyond > 0 else ""
    reason = f"serves another problem: {'; '.join(differences[:_MOST_DIFFERENCES])}{more}"
    return (3, len(differences), manifest.name), Rejected(manifest, reason, manifest.name)


def _refusal(
    manifest: Manifest, features: frozenset[str], cap: Target | None, capability: Capability | None
) -> str | None:
    """Return the reason why this machine does not run the artifact; None if it does."""
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


def _differences(problem: Problem, other: Problem) -> tuple[str, ...]:
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
