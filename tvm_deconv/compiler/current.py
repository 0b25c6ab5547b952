"""Builds with nothing to do: artifacts that are up to date, known without TVM and without a choice of schedules.

What decides a choice is known before it is made: the problem, the target, the sources, the logs, the algorithms. A
build leaves the digest of these in the file `NOTES` beside the artifacts, with the recipe that the choice led to. As
long as the digest is the same, so is the recipe, and the artifact of that recipe is up to date. A file that is missing
or wrong only costs time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

from tvm_deconv.artifact import files
from tvm_deconv.artifact.manifest import stem
from tvm_deconv.artifact.regular import MOST_TEXT, content_of
from tvm_deconv.artifact.sources import digest_of
from tvm_deconv.compiler.fingerprint import surroundings
from tvm_deconv.compiler.records import SUFFIX, shipped
from tvm_deconv.compiler.requests import Outcome, checked_jobs, checked_problems, grouped, requested, whole
from tvm_deconv.errors import BuildError, DeconvError
from tvm_deconv.problem import Problem
from tvm_deconv.problem.checks import checked_path
from tvm_deconv.targets import Target, detect_host, of_names
from tvm_deconv.targets.ancestry import meant

NOTES = ".builds"


def compile(
    problems: Iterable[Problem],
    target: str | Sequence[str] = "native",
    output: Path | str = "artifacts",
    *,
    layers: Mapping[Problem, Sequence[str]] | None = None,
    jobs: int | None = None,
    on_outcome: Callable[[Outcome], None] | None = None,
    algorithms: Iterable[str] | None = None,
    logs: Path | str | None = None,
    installed: bool = True,
) -> list[Outcome]:
    """Build what is not up to date; see `build.compile`. TVM is imported if there is anything to build."""
    problems = checked_problems(problems)
    checked_jobs(jobs)
    allowed = None if algorithms is None else [*algorithms]
    followed = [*([shipped()] if installed else []), *([] if logs is None else [checked_path("logs", logs)])]
    targets = of_names(target)
    known = _Known(checked_path("output", output), allowed, followed, targets)
    wanted = [
        (chosen, problem, names)
        for chosen in targets
        for problem, names in grouped(chosen, requested(problems, layers or {})).items()
    ]
    found = [known.outcome(*job) for job in wanted]
    current = [outcome for outcome in found if outcome is not None]
    if len(current) == len(wanted):
        for outcome in current:
            if on_outcome:
                on_outcome(outcome)
        return current
    from tvm_deconv.compiler import build

    options: dict[str, Any] = {"layers": layers, "jobs": jobs, "on_outcome": on_outcome, "logs": logs}
    options |= {"algorithms": allowed, "installed": installed, "done": current}
    try:
        outcomes = build.compile(problems, target, output, **options)
    except BuildError as error:
        known.note(getattr(error, "outcomes", ()))
        raise
    known.note(outcomes)
    return outcomes


class _Known:
    """The notes of earlier builds into a folder, for these algorithms, logs and targets."""

    def __init__(
        self, folder: Path, algorithms: Sequence[str] | None, logs: Sequence[Path], targets: Sequence[Target]
    ) -> None:
        self._folder = folder
        self._algorithms = None
        if algorithms is not None:  # which are refused unless one is for one of the backends
            self._algorithms = sorted(map(repr, set(algorithms))), sorted({target.backend for target in targets})
        self._logs = logs
        self._targets = {target.name: target for target in targets}
        self._common: dict[str, str | None] = {}
        self._notes = self._read()

    def outcome(self, target: Target, problem: Problem, layers: tuple[str, ...]) -> Outcome | None:
        """Return the outcome for an artifact that is known to be up to date; None for others."""
        inputs = self._inputs(problem, target)
        note = self._notes.get(stem(problem.artifact_key, target.name))
        if inputs is None or not isinstance(note, dict) or note.get("inputs") != inputs:
            return None
        manifest, warnings = whole(self._folder, problem, target, layers), note.get("warnings")
        if manifest is None or manifest.recipe != note.get("recipe") or not isinstance(warnings, list):
            return None
        told = tuple(map(str, warnings)), str(note.get("reason"))
        return Outcome(problem, layers, target.name, "current", manifest, None, 0.0, *told)

    def note(self, outcomes: Iterable[Outcome]) -> None:
        """Add notes on artifacts that are up to date now; it does not matter if they cannot be written."""
        notes = self._read()
        for outcome in outcomes:
            inputs = self._inputs(outcome.problem, self._targets[outcome.target])
            if outcome.manifest is not None and inputs is not None:
                told = {"warnings": outcome.warnings, "reason": outcome.reason}
                notes[outcome.manifest.name] = {"inputs": inputs, "recipe": outcome.manifest.recipe, **told}
        notes = {name: note for name, note in notes.items() if (self._folder / f"{name}.json").exists()}
        with contextlib.suppress(OSError, ValueError):  # ValueError: a null character in the path
            files.write(self._folder / NOTES, json.dumps(notes, indent=1).encode())

    def _read(self) -> dict[str, Any]:
        try:
            notes = json.loads(content_of(self._folder / NOTES, MOST_TEXT))
        except (OSError, ValueError, RecursionError):
            return {}
        return notes if isinstance(notes, dict) else {}

    def _inputs(self, problem: Problem, target: Target) -> str | None:
        """Return the digest of everything that decides the recipe of an artifact; None if it is not known."""
        if target.name not in self._common:
            self._common[target.name] = self._common_inputs(target)
        common = self._common[target.name]
        return common and hashlib.sha256(repr((problem.artifact_key, common)).encode()).hexdigest()

    def _common_inputs(self, target: Target) -> str | None:
        try:
            logs = [
                file for log in self._logs for name in target.logs for file in sorted((log / name).glob(f"*{SUFFIX}"))
            ]
            machine = meant(target, detect_host())  # for which measured schedules are weighed
            measured = machine, [*map(str, logs)], digest_of(logs)
            deciding = surroundings(target), _compiler(target), measured, self._algorithms
        except (OSError, PackageNotFoundError, DeconvError):  # a build says what is missing
            return None
        return repr(deciding)


def _compiler(target: Target) -> str:
    """Return what is to be known of the compiler of a target's kernels, besides the version of TVM."""
    if target.memory == "cpu":
        return ""
    from tvm_deconv.compiler import nvcc

    return nvcc.version(nvcc.find_nvcc())
