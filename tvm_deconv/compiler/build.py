"""Problems to artifacts: schedule, compile, and write library and manifest.

Everything that decides the bytes of a library is hashed into its recipe. An artifact whose recipe and digest still hold
is not built again.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from tvm_deconv.artifact import elf, needs
from tvm_deconv.artifact.files import temporary_folder
from tvm_deconv.artifact.manifest import Manifest, library_name, stem
from tvm_deconv.compiler.backends import backend_of
from tvm_deconv.compiler.fingerprint import recipe
from tvm_deconv.compiler.output import give_up, publish, scratch_folder
from tvm_deconv.compiler.process import BUILD, BUILD_PATIENCE_SECONDS, Worker, WorkerError
from tvm_deconv.compiler.records import Records, Schedule, read, shipped
from tvm_deconv.compiler.requests import Outcome, checked_jobs, checked_problems, grouped, requested, whole
from tvm_deconv.compiler.selection import (
    Choice,
    algorithms_for,
    checked_algorithms,
    choices_for,
    in_space,
    named,
    plan_of,
)
from tvm_deconv.errors import BuildError, DeconvError, ProblemError
from tvm_deconv.problem import Problem
from tvm_deconv.schedules.contract import AnyAlgorithm, Kernel, Plan, Toolchain, Workspace
from tvm_deconv.targets import Target, detect_host, get, of_names
from tvm_deconv.targets.ancestry import meant

_PACKAGES = ("tvm_deconv", "apache-tvm", "apache-tvm-ffi")


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
    done: Sequence[Outcome] = (),
) -> list[Outcome]:
    """Build the artifacts for `problems` without a search; see `tvm_deconv.compile`.

    Without the `installed` tuning logs only those in `logs` count. `done` are outcomes of some of the problems that are
    known already. Raises ProblemError, CompilerNotFound, BuildError.
    """
    targets, processes = of_names(target), checked_jobs(jobs)
    allowed = checked_algorithms(algorithms, [chosen.name for chosen in targets])
    asked = requested(checked_problems(problems), layers or {})
    followed = [*([shipped()] if installed else []), *([] if logs is None else [logs])]
    folder = Path(output)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:  # ValueError: a null character in the path
        raise BuildError("output", folder, f"must be a directory that can be written: {error}") from error
    report = _Report(on_outcome)
    for outcome in done:
        report.add(outcome)
    settled = {(outcome.problem.artifact_key, outcome.target) for outcome in done}
    pending: list[_Job] = []
    for chosen in targets:
        wanted = {p: n for p, n in grouped(chosen, asked).items() if (p.artifact_key, chosen.name) not in settled}
        for job in _jobs(chosen, wanted, followed, algorithms_for(chosen, allowed)):
            current = _up_to_date(job, folder)
            if current:
                report.add(job.outcome("current", current))
            else:
                pending.append(job)
    if pending:
        _run(pending, folder, min(processes, len(pending)), report.add)
    report.raise_failures()
    return report.outcomes


@dataclass(frozen=True)
class _Job:
    """An artifact to build, with the choices to try in order."""

    problem: Problem
    layers: tuple[str, ...]
    target: Target
    choices: tuple[Choice, ...]
    warnings: tuple[str, ...]

    def outcome(
        self,
        status: str,
        manifest: Manifest | None = None,
        error: str | None = None,
        seconds: float = 0.0,
        warnings: Sequence[str] | None = None,
    ) -> Outcome:
        """Return the outcome of the job, by default with the warnings from before it began."""
        told = self.warnings if warnings is None else tuple(warnings)
        why = self.choices[0].reason
        return Outcome(self.problem, self.layers, self.target.name, status, manifest, error, seconds, told, why)


def _jobs(
    target: Target,
    wanted: Mapping[Problem, tuple[str, ...]],
    logs: Sequence[Path | str],
    algorithms: tuple[str, ...] | None,
) -> list[_Job]:
    """Return a job for each problem, which have the names of their layers."""
    records = _records(target, *logs)
    jobs = []
    for problem, names in wanted.items():
        warnings = records.warnings_for(problem.artifact_key)
        choices = tuple(choices_for(problem, target, records, warnings, algorithms))
        jobs.append(_Job(problem, names, target, choices, tuple(warnings)))
    return jobs


def _records(target: Target, *logs: Path | str) -> Records:
    """Read the records for `target`; a problem without any has those of the target that stands in for it."""
    machine = meant(target, detect_host())
    records, *others = (read(name, *logs, microarchitecture=machine) for name in target.logs)
    for other in others:
        records.by_problem = {**other.by_problem, **records.by_problem}
        records.warnings += other.warnings
    return records


def _up_to_date(job: _Job, folder: Path) -> Manifest | None:
    """Return the manifest of the artifact in `folder` if it need not be built again."""
    manifest = whole(folder, job.problem, job.target, job.layers)
    current = manifest is not None and manifest.recipe == _recipe(job.problem, job.target, job.choices[0])
    return manifest if current else None


def _recipe(problem: Problem, target: Target, choice: Choice) -> str:
    return recipe(problem, target, choice, backend_of(target).flags())


@dataclass
class _Report:
    """The outcomes so far; each is passed on to `on_outcome`."""

    on_outcome: Callable[[Outcome], None] | None
    outcomes: list[Outcome] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        """Note an outcome."""
        self.outcomes.append(outcome)
        if self.on_outcome:
            self.on_outcome(outcome)

    def raise_failures(self) -> None:
        """Raise BuildError, with all outcomes as an attribute, if a problem failed."""
        failed = [outcome for outcome in self.outcomes if outcome.status == "failed"]
        if failed:
            listing = "".join(f"\n  {o.problem.key} ({o.target}): {o.error}" for o in failed)
            error = BuildError("problems", f"{len(failed)} of {len(self.outcomes)}", f"did not build:{listing}")
            error.outcomes = self.outcomes
            raise error


def _run(pending: Sequence[_Job], folder: Path, count: int, note: Callable[[Outcome], None]) -> None:
    """Run jobs in `count` processes, and pass each outcome to `note`; a job that kills its process fails alone.

    An interrupt, or an exception of `note`, ends the processes.
    """
    with contextlib.ExitStack() as stack:
        stack.callback(give_up, folder)  # once the processes are gone
        scratch = stack.enter_context(temporary_folder())
        backends = {job.target.backend: backend_of(job.target) for job in pending}
        toolchains = {name: backend.toolchain(scratch) for name, backend in backends.items()}
        threads = stack.enter_context(ThreadPoolExecutor(count))
        idle = [stack.enter_context(Worker(_Exporter, folder, toolchains, limits=BUILD)) for _ in range(count)]
        stack.callback(threads.shutdown, wait=False, cancel_futures=True)
        for done in as_completed([threads.submit(_run_job, job, idle) for job in pending]):
            note(done.result())


def _run_job(job: _Job, idle: list[Worker]) -> Outcome:
    """Run a job in one of the `idle` workers."""
    worker = idle.pop()
    start = time.perf_counter()
    try:
        outcome: Outcome = worker.ask("export", job, timeout=BUILD_PATIENCE_SECONDS)
    except WorkerError as error:
        return job.outcome("failed", None, f"the compiler: {error}", time.perf_counter() - start)
    finally:
        idle.append(worker)
    return outcome


class _Exporter:
    """Builds jobs into a directory, with a toolchain for each backend."""

    def __init__(self, folder: Path, toolchains: Mapping[str, Toolchain[Any]]) -> None:
        self._folder = folder
        self._toolchains = toolchains

    def export(self, job: _Job) -> Outcome:
        """Build one job and return its outcome."""
        start = time.perf_counter()
        manifest, error = None, None
        warnings = list(job.warnings)
        try:
            manifest = export(
                job.problem,
                job.target,
                self._folder,
                layers=job.layers,
                toolchain=self._toolchains[job.target.backend],
                choices=job.choices,
                warnings=warnings,
            )
        except DeconvError as raised:
            error = str(raised)
        except Exception as raised:  # a defect of ours or of TVM in one problem must not hide the outcomes of others
            error = f"{type(raised).__name__}: {raised}"
        return job.outcome("built" if manifest else "failed", manifest, error, time.perf_counter() - start, warnings)


def export(
    problem: Problem,
    target: Target,
    output: Path | str,
    *,
    layers: Sequence[str] = (),
    toolchain: Toolchain[Any] | None = None,
    choices: Sequence[Choice] = (),
    warnings: list[str] | None = None,
) -> Manifest:
    """Build the artifact for `problem` on `target` into the directory `output` and return its manifest.

    An older artifact stays the one that is loaded until the new one is complete, and is removed then.

    `layers` are names for people. `toolchain` is found if it is not given. The first of `choices` that builds is taken,
    by default those of the installed tuning logs; `warnings` gets the reasons of those that do not build. Raises
    BuildError, CompilerNotFound.
    """
    output, problem = Path(output), target.computes(problem)
    choices = choices or tuple(choices_for(problem, target, _records(target, shipped()), warnings))
    try:
        with scratch_folder(output) as scratch:
            tools = toolchain or backend_of(target).toolchain(scratch)
            library = scratch / f"{stem(problem.artifact_key, target.name)}.so"
            built = _Build(problem, target, tools, library).first_of(choices, warnings)
            manifest = built.manifest(layers, _recipe(problem, target, choices[0]))
            _warn_of_needs(manifest, warnings)
            publish(output, manifest, library, scratch)
    except OSError as error:
        raise BuildError("output", output, f"must be a directory with room that can be written: {error}") from error
    return manifest


def _warn_of_needs(manifest: Manifest, warnings: list[str] | None) -> None:
    """Add a warning to `warnings` if the artifact does not run on systems as old as most are."""
    newer = needs.beyond(manifest.needs, needs.FLOOR)
    if newer and warnings is not None:
        warnings.append(f"{manifest.name}: needs {needs.text(newer)}, which systems of manylinux_2_28 lack")


@dataclass(frozen=True)
class _Build:
    """The build of one artifact: the file `library` is written, by the first choice that compiles."""

    problem: Problem
    target: Target
    toolchain: Toolchain[Any]
    library: Path

    def first_of(self, choices: Sequence[Choice], warnings: list[str] | None) -> _Built:
        """Compile the first of `choices` that compiles; the last one's error is raised."""
        for choice in choices[:-1]:
            try:
                return self._compiled(choice)
            except Exception as error:  # whatever an old record makes TVM do, there is the next choice
                if warnings is not None:
                    reason = f"not built by {choice.reason}: {error}"
                    warnings.append(f"{self.problem.key} for {self.target.name}: {reason}")
        return self._compiled(choices[-1])

    def _compiled(self, choice: Choice) -> _Built:
        """Compile as chosen. Raises BuildError."""
        backend_of(self.target).check(self.problem, self.target)
        try:
            kernel = self._kernel(choice)
            workspace = self.toolchain.compile(kernel, self.target, self.library)
        except DeconvError:
            raise
        except (RuntimeError, ValueError) as error:
            rule = f"does not compile for {self.target.name}: {error}"
            raise BuildError("problem", self.problem.key, rule) from error
        return _Built(self, choice, kernel, workspace)

    def _kernel(self, choice: Choice) -> Kernel:
        """Schedule as chosen: one plan for all calls, or one for each variant."""
        backend = backend_of(self.target)
        if choice.schedule:
            return backend.build_for_threads(self.problem, self.target, *self._plan(self.problem, choice))
        parts = choice.parts or [choice] * len(self.problem.variants)
        kernels = []
        for variant, part in zip(self.problem.variants, parts, strict=True):
            kernels.append(backend.build_for_threads(variant, self.target, *self._plan(variant, part)))
        return backend.join(self.problem, kernels)

    def _plan(self, problem: Problem, choice: Choice) -> tuple[AnyAlgorithm, Plan]:
        """Return the algorithm and the plan of a choice for `problem`."""
        if choice.schedule:
            if choice.origin == "tuned":
                _check_space(problem, self.target, choice.schedule)
            return named(choice.schedule.algorithm), plan_of(choice.schedule)
        return backend_of(self.target).default(problem, self.target, choice.algorithms)


def _check_space(problem: Problem, target: Target, schedule: Schedule) -> None:
    """Raise ProblemError unless a search for `target`, or for one whose logs it follows, could have found `schedule`.

    A log may hold anything: plans that nobody would try can keep a compiler busy for hours.
    """
    if not any(in_space(problem, schedule, get(name)) for name in target.logs):
        raise ProblemError("knobs", dict(schedule.knobs), f"are of no plan of {schedule.algorithm} worth trying here")


@dataclass(frozen=True)
class _Built:
    """A compiled artifact whose manifest is not written yet."""

    build: _Build
    choice: Choice
    kernel: Kernel
    workspace: Workspace

    def manifest(self, layers: Sequence[str], recipe: str) -> Manifest:
        """Return the manifest of the library as it is now."""
        problem, target, kernel = self.build.problem, self.build.target, self.kernel
        content = self.build.library.read_bytes()
        digest = hashlib.sha256(content).hexdigest()
        return Manifest(
            problem=problem.artifact_key,
            layers=tuple(layers),
            target=target.name,
            features=tuple(sorted(target.features)),
            needs=_needs(content),
            library=library_name(self.build.library.stem, digest),
            sha256=digest,
            size=len(content),
            algorithm=kernel.algorithm,
            knobs=kernel.knobs,
            packed_shape=(kernel.packed_elements,),
            packed_dtype=kernel.packed_dtype,
            scratch_bytes=self.workspace.scratch_bytes,
            shared_bytes=self.workspace.shared_bytes,
            macs=problem.macs,
            origin=self.choice.origin,
            versions=_versions(self.build.toolchain),
            recipe=recipe,
        )


def _needs(library: bytes) -> dict[str, str]:
    """Return the versions of the system's libraries that `library` needs, and of tvm_ffi."""
    versions = needs.needed(elf.dynamic(library).versions)
    return versions | {"tvm_ffi": needs.release(importlib.metadata.version("apache-tvm-ffi"))}


@cache
def _versions(toolchain: Toolchain[Any]) -> dict[str, str]:
    packages = {name: importlib.metadata.version(name) for name in _PACKAGES}
    return {**packages, **toolchain.versions()}
