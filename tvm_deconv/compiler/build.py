"""Problems to artifacts: schedule, compile, link with the launcher, and write library and manifest.

An artifact is made in a directory of its own and moved into place: the library first, under a name that no other
content has, then the manifest, which replaces the one before it.  A build that stops anywhere leaves what was there.
What decides the bytes of a library is hashed into its recipe; an artifact whose recipe and digest still hold is not
built again.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.metadata
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import tvm
from filelock import FileLock, Timeout
from tvm.target.codegen import llvm_is_valid_cpu, llvm_version_major

from tvm_deconv.artifact.manifest import Manifest, computed_by, library_name, stem, stem_of
from tvm_deconv.compiler.choices import Choice, checked, for_target, named, plan_of
from tvm_deconv.compiler.choices import choices as choose
from tvm_deconv.compiler.launcher import find_compiler, launcher_object
from tvm_deconv.compiler.nvcc import FLAGS, compile_library, find_nvcc
from tvm_deconv.compiler.nvcc import version as nvcc_version
from tvm_deconv.compiler.process import Worker, WorkerError
from tvm_deconv.compiler.records import Records, read, shipped
from tvm_deconv.compiler.workspace import Counted
from tvm_deconv.errors import BuildError, DeconvError, ManifestError, ProblemError
from tvm_deconv.problem import Problem
from tvm_deconv.schedules import cuda
from tvm_deconv.schedules.x86 import Algorithm, Kernel, Plan, build_kernel, build_variants, default_plan
from tvm_deconv.targets import CUDA_TARGETS, TARGETS, CudaTarget, Host, Target, detect_host, get, get_any, native

if TYPE_CHECKING:
    from tvm_deconv.tuning import Trial

#: The packages of this project whose text decides what a kernel is.
_SOURCES = ("compute", "compiler.launcher", "schedules")
#: What a directory of artifacts holds besides them: a lock, and while they run, a directory for each build.
_LOCK, _SCRATCH = ".lock", ".building-"
_TRIPLE = "x86_64-unknown-linux-gnu"


@dataclass(frozen=True)
class Outcome:
    """What became of one problem on one target: `status` is built, current (already up to date) or failed.

    `warnings` are on records of tuning logs that were of no use.
    """

    problem: Problem
    layers: tuple[str, ...]
    target: str
    status: str
    manifest: Manifest | None
    error: str | None
    seconds: float
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Job:
    """What to build."""

    problem: Problem
    layers: tuple[str, ...]
    target: str
    choices: tuple[Choice, ...]
    warnings: tuple[str, ...]

    def outcome(self, manifest: Manifest | None, error: str | None, seconds: float, warnings: Sequence[str]) -> Outcome:
        """Return what became of it."""
        status = "built" if manifest else "failed"
        return Outcome(self.problem, self.layers, self.target, status, manifest, error, seconds, tuple(warnings))


def resolve_targets(target: str | Sequence[str], host: Host | None = None) -> tuple[Target, ...]:
    """Return the CPU targets that `target` names; "native" is the widest of `host`, by default this machine."""
    host = host or detect_host()
    return tuple(dict.fromkeys(native(host) if name == "native" else get(name) for name in names_of(target)))


def names_of(target: str | Sequence[str]) -> tuple[str, ...]:
    """Return the names in `target`; ProblemError where there is none."""
    names = (target,) if isinstance(target, str) else tuple(target)
    if not names:
        known = ", ".join(("native", *TARGETS, *CUDA_TARGETS, "a microarchitecture"))
        raise ProblemError("target", target, f"must name at least one of {known}")
    return names


def _resolve(target: str | Sequence[str]) -> tuple[Target | CudaTarget, ...]:
    """Return the targets that `target` names, of CPUs and of CUDA devices."""
    found = (native(detect_host()) if name == "native" else get_any(name) for name in names_of(target))
    return tuple(dict.fromkeys(found))


def export(
    problem: Problem,
    target: Target | CudaTarget,
    output: Path | str,
    *,
    layers: Sequence[str] = (),
    cc: str | None = None,
    launcher: Path | None = None,
    choices: Sequence[Choice] = (),
    warnings: list[str] | None = None,
) -> Manifest:
    """Build the artifact for `problem` on `target` into the directory `output` and return its manifest.

    An older one stays what is loaded until the new one is complete, and is removed then.

    `layers` are names for people; `cc` is the compiler driver that links, `launcher` its compiled object file; both are
    found or made where they are not given.  The first of `choices` that builds is taken, by default what the installed
    tuning logs say; what does not build is told in `warnings`.  Raises BuildError, CompilerNotFound.
    """
    output, problem = Path(output), computed_by(problem, target)
    cc = cc or _compiler(target)
    choices = choices or _choices(problem, target, warnings)
    name = stem(problem.artifact_key, target.name)
    try:
        with _scratch(output) as scratch:
            made = scratch / f"{name}.so"
            for choice in choices:
                try:
                    if isinstance(target, CudaTarget):
                        kernel: Kernel | cuda.Kernel = _link_cuda(problem, target, choice, made, cc)
                    else:
                        kernel = _link(problem, target, choice, made, cc, launcher or launcher_object(cc, scratch))
                    break
                # Whatever an old record makes TVM do, there is the next choice.
                except Exception as error:
                    if choice == choices[-1]:
                        raise
                    if warnings is not None:
                        warnings.append(f"{problem.key} for {target.name}: not built by {choice.reason}: {error}")
            content = made.read_bytes()
            digest = hashlib.sha256(content).hexdigest()
            manifest = Manifest(
                problem=problem.artifact_key,
                layers=tuple(layers),
                target=target.name,
                features=tuple(sorted(target.features)),
                library=library_name(name, digest),
                sha256=digest,
                size=len(content),
                algorithm=kernel.algorithm,
                knobs=kernel.knobs,
                packed_shape=(kernel.packed_elements,),
                packed_dtype=kernel.packed_dtype if isinstance(kernel, cuda.Kernel) else problem.accumulate_dtype,
                scratch_bytes=kernel.scratch_bytes,
                shared_bytes=kernel.shared_bytes if isinstance(kernel, Kernel) else 0,
                macs=problem.macs,
                origin=choice.origin,
                versions=_versions(cc, isinstance(target, CudaTarget)),
                recipe=_recipe(problem, target, choices[0]),
            )
            described = scratch / f"{name}.json"
            described.write_text(manifest.to_json(), encoding="utf-8")
            _publish(output, manifest, made, described)
    except OSError as error:
        raise BuildError("output", output, f"must be a directory with room that can be written: {error}") from error
    return manifest


@contextlib.contextmanager
def _scratch(output: Path) -> Iterator[Path]:
    """Make a directory for one build in `output`, and remove those of builds that were killed: nobody locks these."""
    output.mkdir(parents=True, exist_ok=True)
    with FileLock(output / _LOCK):
        for left in output.glob(f"{_SCRATCH}*"):
            with contextlib.suppress(Timeout), FileLock(left / _LOCK, blocking=False):
                shutil.rmtree(left, ignore_errors=True)
        scratch = Path(tempfile.mkdtemp(prefix=_SCRATCH, dir=output))
        held = FileLock(scratch / _LOCK)
        held.acquire()
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        held.release()


def _publish(output: Path, manifest: Manifest, library: Path, described: Path) -> None:
    """Move the files of an artifact into place; the manifest's rename is the moment at which it replaces another."""
    _flush(library)
    _flush(described)
    # Of two builders of one artifact, the one that is late must not remove the library that the other's manifest means.
    with FileLock(output / _LOCK):
        library.replace(output / manifest.library)
        described.replace(output / f"{manifest.name}.json")
        _flush(output)
        for path in output.iterdir():
            if path.suffix == ".so" and stem_of(path.name) == manifest.name and path.name != manifest.library:
                path.unlink()


def _flush(path: Path) -> None:
    """Have the disk hold what `path` holds."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _compiler(target: Target | CudaTarget) -> str:
    return find_nvcc() if isinstance(target, CudaTarget) else find_compiler()


def _choices(problem: Problem, target: Target | CudaTarget, warnings: list[str] | None) -> tuple[Choice, ...]:
    return tuple(choose(problem, target, _records(target, shipped()), warnings))


def _records(target: Target | CudaTarget, *logs: Path | str) -> Records:
    """Read the records for `target`; where a microarchitecture has none of a problem, those for its level."""
    records = read(target.name, *logs)
    if isinstance(target, Target) and target.level != target.name:
        of_level = read(target.level, *logs)
        records.by_problem = {**of_level.by_problem, **records.by_problem}
        records.warnings += of_level.warnings
    return records


def _link_cuda(problem: Problem, target: CudaTarget, choice: Choice, path: Path, nvcc: str) -> cuda.Kernel:
    """Compile `problem` as chosen to a library at `path` whose functions launch kernels."""
    if problem.dynamic:
        raise BuildError("problem", problem.key, f"must have no dynamic extents for {target.name}")
    try:
        if choice.schedule:
            kernel = cuda.build_kernel(problem, named(choice.schedule.algorithm), plan_of(choice.schedule))
        else:
            kernel = cuda.build_kernel(problem, cuda.algorithm_for(problem, choice.algorithms))
        text = cuda.source({"deconv": kernel.deconv, "pack": kernel.pack})
    except (RuntimeError, ValueError) as error:
        raise BuildError("problem", problem.key, f"does not compile for {target.name}: {error}") from error
    compile_library(text, path.absolute(), target, nvcc)
    return kernel


def _link(problem: Problem, target: Target, choice: Choice, path: Path, cc: str, launcher: Path) -> Kernel:
    """Compile `problem` as chosen to a library at `path`."""
    # LLVM would take another CPU for one that it does not know.
    if not llvm_is_valid_cpu(target.mcpu, _TRIPLE):
        raise BuildError("target", target.name, f"must be a CPU that LLVM {llvm_version_major()} knows")
    if choice.schedule:
        kernel = build_kernel(problem, target, *_plan(problem, target, choice))
    else:
        parts = choice.parts or [choice] * len(problem.variants)
        plans = [_plan(one, target, part) for one, part in zip(problem.variants, parts, strict=True)]
        kernel = build_variants(problem, plans, target)
    module, workspace = tvm.IRModule({"deconv": kernel.deconv, "pack": kernel.pack}), Counted()
    try:
        with tvm.transform.PassContext(instruments=[workspace]):
            compiled = tvm.compile(module, target=tvm.target.Target({"kind": "llvm", "mcpu": target.mcpu}))
        compiled.export_library(str(path.absolute()), addons=[str(launcher)], cc=cc)
    except (RuntimeError, ValueError, OSError) as error:
        raise BuildError("problem", problem.key, f"does not compile for {target.name}: {error}") from error
    return replace(kernel, scratch_bytes=workspace.scratch_bytes, shared_bytes=workspace.shared_bytes)


def _plan(problem: Problem, target: Target, choice: Choice) -> tuple[Algorithm, Plan]:
    """Return what `choice` says of `problem`."""
    if choice.schedule:
        return named(choice.schedule.algorithm), plan_of(choice.schedule)
    try:
        return default_plan(problem, target, choice.algorithms)
    except ValueError as error:
        rule = f"admit no algorithm for {problem.key}"
        raise BuildError("algorithms", ", ".join(choice.algorithms or ()), rule) from error


def compile(
    problems: Iterable[Problem],
    target: str | Sequence[str] = "native",
    output: Path | str = "artifacts",
    *,
    layers: Mapping[Problem, Sequence[str]] | None = None,
    jobs: int | None = None,
    on_outcome: Callable[[Outcome], None] | None = None,
    algorithms: Iterable[str] | None = None,
    trials: int = 0,
    logs: Path | str | None = None,
    on_trial: Callable[[Trial], None] | None = None,
    rpc_tracker: str | None = None,
    rpc_key: str | None = None,
) -> list[Outcome]:
    """Build the artifacts for `problems` on every named target into the directory `output`.

    Builds run in `jobs` processes (as many as CPUs); problems that share an artifact share the build.  A problem that
    fails does not stop the others: at the end BuildError names all that failed, with the `outcomes` as an attribute.
    What is up to date is left alone.  `on_outcome` hears of each problem as it is done.

    `algorithms` names those that may be used, all where it is not given: without winograd, winograd_rows and strassen,
    sums are rounded as those of the direct algorithms are. Schedules come from the tuning logs, those installed and
    those in the directory `logs`: `choices` says how. With `trials`, a search for better ones precedes the build, whose
    results are kept in `logs`; `tuning.tune` is that search, `on_trial` hears of it, and servers of `rpc_tracker`
    measure where it is given. Raises ProblemError, CompilerNotFound, and what `tune` does.
    """
    targets = _resolve(target)
    using = checked(algorithms)
    names: dict[str, list[str]] = {}
    unique: dict[str, Problem] = {}
    for problem in problems:
        if not isinstance(problem, Problem):
            raise ProblemError("problems", problem, "must be a sequence of Problem")
        unique.setdefault(problem.artifact_key, problem)
        names.setdefault(problem.artifact_key, []).extend((layers or {}).get(problem, ()))

    def merged(target: Target | CudaTarget) -> dict[Problem, tuple[str, ...]]:
        """The layers of each problem that `target` tells apart."""
        found: dict[Problem, list[str]] = {}
        for key, problem in unique.items():
            found.setdefault(computed_by(problem, target), []).extend(names[key])
        return {problem: tuple(dict.fromkeys(wanted)) for problem, wanted in found.items()}

    if trials:
        if logs is None:
            raise ProblemError("logs", logs, "must be a directory for the results of the trials")
        from tvm_deconv.tuning import tune

        searched = [chosen.name for chosen in targets]
        tune(
            unique.values(),
            searched,
            trials,
            logs,
            jobs=jobs,
            algorithms=using,
            on_trial=on_trial,
            rpc_tracker=rpc_tracker,
            rpc_key=rpc_key,
        )
    elif rpc_tracker is not None:
        raise ProblemError("rpc_tracker", rpc_tracker, "must be given with trials, which are what its servers measure")
    directory = Path(output)
    directory.mkdir(parents=True, exist_ok=True)
    outcomes: list[Outcome] = []

    def note(outcome: Outcome) -> None:
        outcomes.append(outcome)
        if on_outcome:
            on_outcome(outcome)

    pending = []
    for chosen in targets:
        records = _records(chosen, shipped(), *([] if logs is None else [logs]))
        for problem, wanted in merged(chosen).items():
            warnings = records.warnings_for(problem.artifact_key)
            choices = tuple(choose(problem, chosen, records, warnings, for_target(using, chosen)))
            current = _up_to_date(problem, chosen, directory, wanted, choices[0])
            if current:
                note(Outcome(problem, wanted, chosen.name, "current", current, None, 0.0, tuple(warnings)))
            else:
                pending.append(_Job(problem, wanted, chosen.name, choices, tuple(warnings)))
    if pending:
        compilers = {name: _compiler(get_any(name)) for name in dict.fromkeys(job.target for job in pending)}
        with tempfile.TemporaryDirectory() as scratch:
            launcher = launcher_object(find_compiler(), Path(scratch))
            count = min(jobs or os.cpu_count() or 1, len(pending))
            _run(pending, count, note, directory, launcher, compilers)
    failed = [outcome for outcome in outcomes if outcome.status == "failed"]
    if failed:
        listing = "".join(f"\n  {o.problem.key} ({o.target}): {o.error}" for o in failed)
        error = BuildError("problems", f"{len(failed)} of {len(outcomes)}", f"did not build:{listing}")
        error.outcomes = outcomes
        raise error
    return outcomes


def _run(pending: Sequence[_Job], count: int, note: Callable[[Outcome], None], *arguments: object) -> None:
    """Run jobs in `count` processes, each an `_Exporter` of these arguments; a job that kills its process fails alone.

    An interrupt, or what `note` raises, ends them.
    """
    with ThreadPoolExecutor(count) as threads, contextlib.ExitStack() as stack:
        free = [stack.enter_context(Worker(_Exporter, *arguments)) for _ in range(count)]

        def run(job: _Job) -> Outcome:
            worker = free.pop()
            start = time.perf_counter()
            try:
                outcome: Outcome = worker.ask("export", job, timeout=None)
            except WorkerError as error:
                seconds = time.perf_counter() - start
                return job.outcome(None, f"the compiler: {error}", seconds, job.warnings)
            finally:
                free.append(worker)
            return outcome

        stack.callback(threads.shutdown, wait=False, cancel_futures=True)
        for done in as_completed([threads.submit(run, job) for job in pending]):
            note(done.result())


class _Exporter:
    """With what jobs are built, into the directory `output`: compilers, by target, and the launcher's object file."""

    def __init__(self, output: Path, launcher: Path, compilers: Mapping[str, str]) -> None:
        self._output = output
        self._launcher = launcher
        self._compilers = compilers

    def export(self, job: _Job) -> Outcome:
        """Build one job, and say what became of it."""
        start = time.perf_counter()
        manifest, problem = None, None
        warnings = list(job.warnings)
        try:
            manifest = export(
                job.problem,
                get_any(job.target),
                self._output,
                layers=job.layers,
                cc=self._compilers[job.target],
                launcher=self._launcher,
                choices=job.choices,
                warnings=warnings,
            )
        except DeconvError as error:
            problem = str(error)
        except Exception as error:  # a defect of ours or of TVM in one problem must not hide what became of the others
            problem = f"{type(error).__name__}: {error}"
        return job.outcome(manifest, problem, time.perf_counter() - start, warnings)


def _up_to_date(
    problem: Problem, target: Target | CudaTarget, directory: Path, layers: tuple[str, ...], choice: Choice
) -> Manifest | None:
    name = stem(problem.artifact_key, target.name)
    try:
        manifest = Manifest.read(directory / f"{name}.json")
        content = (directory / manifest.library).read_bytes()
    except (ManifestError, OSError):
        return None
    unchanged = manifest.sha256 == hashlib.sha256(content).hexdigest()
    holds = unchanged and manifest.recipe == _recipe(problem, target, choice)
    return manifest if holds and set(layers) <= set(manifest.layers) else None


def _recipe(problem: Problem, target: Target | CudaTarget, choice: Choice) -> str:
    """Hash everything that decides the bytes of the library, except the linker, and what the manifest says of it."""
    deciding = (
        problem.artifact_key,
        (target.code, target.ptx, FLAGS, nvcc_version(find_nvcc())) if isinstance(target, CudaTarget) else target.mcpu,
        sorted(target.features),
        tvm.__version__,
        _sources(),
        [tuple(part.schedule or ()) for part in choice.parts or [choice]],
        choice.origin,
        choice.algorithms,
    )
    return hashlib.sha256(repr(deciding).encode()).hexdigest()


@cache
def _sources() -> str:
    digest = hashlib.sha256()
    for package in _SOURCES:
        found = importlib.import_module(f"tvm_deconv.{package}")
        for folder in found.__path__:
            for path in sorted(Path(folder).rglob("*")):
                if path.suffix in (".py", ".c", ".ll"):
                    digest.update(path.read_bytes())
    return digest.hexdigest()


@cache
def _versions(cc: str, with_cuda: bool) -> dict[str, str]:
    packages = {name: importlib.metadata.version(name) for name in ("tvm_deconv", "apache-tvm", "apache-tvm-ffi")}
    if with_cuda:
        return {**packages, "nvcc": nvcc_version(cc)}
    printed = subprocess.run([cc, "--version"], capture_output=True, text=True, check=False).stdout.splitlines()
    return {
        **packages,
        "llvm": str(llvm_version_major()),
        "cc": printed[0] if printed else cc,
    }
