"""What a build is asked for, what is there already, and what comes of it; nothing here needs TVM."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tvm_deconv.artifact import files
from tvm_deconv.artifact.manifest import Manifest, stem
from tvm_deconv.errors import ArtifactError, ProblemError
from tvm_deconv.problem import Problem, integer
from tvm_deconv.problem.checks import real, several
from tvm_deconv.targets import Target


@dataclass(frozen=True)
class Outcome:
    """The result for one problem on one target: `status` is built, current (already up to date) or failed.

    `warnings` are about records of tuning logs that could not be used, `reason` is why this schedule was chosen.
    """

    problem: Problem
    layers: tuple[str, ...]
    target: str
    status: str
    manifest: Manifest | None
    error: str | None
    seconds: float
    warnings: tuple[str, ...] = ()
    reason: str = ""


def checked_problems(problems: Iterable[Problem]) -> list[Problem]:
    """Return `problems` as a list. Raises ProblemError unless each is a Problem."""
    rule = "must be a sequence of Problem"
    wanted = list(several("problems", problems, rule))
    for problem in wanted:
        if not isinstance(problem, Problem):
            raise ProblemError("problems", problem, rule)
    return wanted


def checked_jobs(jobs: int | None) -> int:
    """Return how many processes compile: `jobs`, by default as many as there are CPUs. Raises ProblemError."""
    return (os.cpu_count() or 1) if jobs is None else integer("jobs", jobs, 1)


def checked_seconds(attribute: str, seconds: float) -> float:
    """Return a time, which is more than 0 and not infinite. Raises ProblemError."""
    number = real(attribute, seconds)
    if not 0 < number < math.inf:
        raise ProblemError(attribute, seconds, "must be a number of seconds, more than 0")
    return number


def requested(problems: Sequence[Problem], layers: Mapping[Problem, Sequence[str]]) -> dict[Problem, list[str]]:
    """Return the problems that differ in their artifacts, with the names of the layers that each serves.

    Raises ProblemError unless `layers` have several names each.
    """
    if not isinstance(layers, Mapping):
        raise ProblemError("layers", layers, "must be a mapping from problem to names")
    unique: dict[str, Problem] = {}
    names: dict[Problem, list[str]] = {}
    for problem in problems:
        first = unique.setdefault(problem.artifact_key, problem)
        names.setdefault(first, []).extend(_names(layers.get(problem, ())))
    return names


def _names(given: object) -> tuple[str, ...]:
    rule = "must be a sequence of names for each problem"
    names = several("layers", given, rule)
    if not all(isinstance(name, str) for name in names):
        raise ProblemError("layers", given, rule)
    return names


def grouped(target: Target, problems: Mapping[Problem, Sequence[str]]) -> dict[Problem, tuple[str, ...]]:
    """Return the problems that `target` tells apart, with the names of the layers that each serves."""
    layers: dict[Problem, list[str]] = {}
    for problem, names in problems.items():
        layers.setdefault(target.computes(problem), []).extend(names)
    return {problem: tuple(dict.fromkeys(names)) for problem, names in layers.items()}


def whole(folder: Path, problem: Problem, target: Target, layers: Iterable[str]) -> Manifest | None:
    """Return the manifest of the artifact in `folder` if its library is as it says, for these layers."""
    try:
        manifest = Manifest.read(folder / f"{stem(problem.artifact_key, target.name)}.json")
        content, _ = files.read(folder / manifest.library, manifest.size + 1, ArtifactError, ArtifactError)
    except ArtifactError:
        return None
    same = manifest.sha256 == hashlib.sha256(content).hexdigest()
    return manifest if same and set(layers) <= set(manifest.layers) else None
