"""The choice of the artifact that serves a problem: manifests and CPU flags in, decisions with reasons out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import TypeAlias

from tvm_deconv.artifact.manifest import ORIGINS, Manifest
from tvm_deconv.artifact.needs import beyond, text
from tvm_deconv.problem import Problem
from tvm_deconv.targets import Place, known_targets

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
    problem: Problem, manifests: Iterable[Manifest], place: Place, *, broken: Mapping[str, str] | None = None
) -> list[Decision]:
    """Decide over every candidate for `problem` at `place`, without a look at the machine; the best comes first.

    1. A manifest that could not be read (`broken`: name to reason) is rejected.
    2. The key must be one of the problem's artifact keys, or that of a variable problem that serves it. The reason
       names the fields that differ.
    3. The target must be one that this version knows, or a microarchitecture: any other name whose flags, which the
       manifest has all of, include those of a level.
    4. The target must run at `place`: in the memory of the arrays, on the CPU or the device, within the cap.
    5. The libraries at `place` must be as new as the artifact needs.

    Accepted: the wider feature set first (a superset has more flags, so counting respects the partial order), then
    the precision that the problem asks for, then the code closest to the device; exact before variable (the fewer
    dynamic extents, the better), tuned before default, then by name. Rejected: those for this problem, the unreadable,
    the others by likeness.
    """
    keys = problem.artifact_keys
    ranked = [_ranked(problem, manifest, manifest.problem in keys, place) for manifest in manifests]
    ranked += [((2, name), Rejected(None, reason, name)) for name, reason in (broken or {}).items()]
    return [decision for _, decision in sorted(ranked, key=lambda pair: pair[0])]


def _ranked(problem: Problem, manifest: Manifest, exact: bool, place: Place) -> tuple[_Rank, Decision]:
    """Return the decision over one candidate, which is of just this problem if `exact`, and its rank."""
    if not exact and not (manifest.parsed.dynamic and manifest.parsed.serves(problem)):
        differing = _differences(problem, manifest.parsed)
        beyond_these = len(differing) - _MOST_DIFFERENCES
        more = f"; and {beyond_these} more" if beyond_these > 0 else ""
        reason = f"serves another problem: {'; '.join(differing[:_MOST_DIFFERENCES])}{more}"
        return (3, len(differing), manifest.name), Rejected(manifest, reason, manifest.name)
    target = manifest.known_target
    refusal = _unknown(manifest) if target is None else target.refusal(place) or _lack(manifest, place)
    if target is None or refusal:
        return (1, manifest.name), Rejected(manifest, refusal or "", manifest.name)
    served = "this problem" if exact else f"any extents that are dynamic in {manifest.problem},"
    facts = f"{manifest.target}, {manifest.algorithm}, {manifest.origin} schedule"
    facts += f", precision {manifest.precision}" if problem.precision != "ieee" else ""
    rank: _Rank = (
        0,
        -len(target.features),
        manifest.parsed.precision != problem.precision,
        *(-part for part in target.closeness(place)),
        len(manifest.parsed.dynamic) * (not exact),
        -ORIGINS.index(manifest.origin),
        manifest.name,
    )
    return rank, Accepted(manifest, f"serves {served} and this {place.name}: {facts}")


def _unknown(manifest: Manifest) -> str:
    known = ", ".join(known_targets())
    return (
        f"target {manifest.target} is not known to this version, which knows {known}, and what needs all CPU flags "
        "of one"
    )


def _lack(manifest: Manifest, place: Place) -> str | None:
    """Return which libraries are too old at `place`; None if all are new enough, or not known."""
    newer = beyond(manifest.needs, place.libraries)
    if not newer:
        return None
    return f"needs {text(newer)}; this machine has {text({family: place.libraries[family] for family in newer})}"


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
