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
import pickle
import queue
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import tvm
from filelock import FileLock, Timeout
from tvm.target.codegen import llvm_version_major

from tvm_deconv.choices import Choice, checked, named, plan_of
from tvm_deconv.choices import choices as choose
from tvm_deconv.errors import BuildError, DeconvError, ManifestError, ProblemError
from tvm_deconv.launcher import find_compiler, launcher_object
from tvm_deconv.manifest import Manifest, library_name, stem, stem_of
from tvm_deconv.nvcc import FLAGS, compile_library, find_nvcc
from tvm_deconv.nvcc import version as nvcc_version
from tvm_deconv.problem import Problem
from tvm_deconv.records import read, shipped
from tvm_deconv.schedules import cuda
from tvm_deconv.schedules.x86 import Kernel, build_kernel, default_plan
from tvm_deconv.targets import CUDA_TARGETS, TARGETS, CudaTarget, Target, detect_host, get, get_any, native

if TYPE_CHECKING:
    from tvm_deconv.tuning import Trial

#: What a CUDA kernel is built with: its own arithmetic.
_DEFAULT = Choice(None, "default", "the default")
#: The packages of this project whose text decides what a kernel is.
_SOURCES = ("compute", "launcher", "schedules")
#: What a directory of artifacts holds besides them: a lock, and while they run, a directory for each build.
_LOCK, _SCRATCH = ".lock", ".building-"


@dataclass(frozen=True)
class Outcome:
    """What became of one problem on one target: `status` is built, current (already up to date) or failed.

    `complaints` are on records of tuning logs that were of no use.
    """

    problem: Problem
    layers: tuple[str, ...]
    target: str
    status: str
    manifest: Manifest | None
    error: str | None
    seconds: float
    complaints: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Job:
    problem: Problem
    layers: tuple[str, ...]
    target: str
    output: Path
    launcher: Path
    cc: str
    choices: tuple[Choice, ...]
    complaints: tuple[str, ...]


def resolve_targets(target: str | Sequence[str]) -> tuple[Target, ...]:
    """Return the CPU targets that `target` names; "native" is the widest that this machine can run."""
    return tuple(dict.fromkeys(native(detect_host()) if name == "native" else get(name) for name in _names(target)))


def computed_by(problem: Problem, target: Target | CudaTarget) -> Problem:
    """Return what an artifact of `target` for `problem` computes: CPUs have no TF32, they compute exactly."""
    return problem if isinstance(target, CudaTarget) else problem.replace(precision="ieee")


def _names(target: str | Sequence[str]) -> tuple[str, ...]:
    names = (target,) if isinstance(target, str) else tuple(target)
    if not names:
        known = ", ".join(("native", *TARGETS, *CUDA_TARGETS))
        raise ProblemError("target", target, f"must name at least one of {known}")
    return names


def _resolve(target: str | Sequence[str]) -> tuple[Target | CudaTarget, ...]:
    """Return the targets that `target` names, of CPUs and of CUDA devices."""
    found = (native(detect_host()) if name == "native" else get_any(name) for name in _names(target))
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
    complaints: list[str] | None = None,
) -> Manifest:
    """Build the artifact for `problem` on `target` into the directory `output` and return its manifest.

    An older one stays what is loaded until the new one is complete, and is removed then.

    `layers` are names for people; `cc` is the compiler driver that links, `launcher` its compiled object file; both are
    found or made where they are not given.  The first of `choices` that builds is taken, by default what the installed
    tuning logs say; what does not build is told in `complaints`.  Raises BuildError, CompilerNotFound.
    """
    output, problem = Path(output), computed_by(problem, target)
    cc = cc or _compiler(target)
    choices = choices or _choices(problem, target, complaints)
    name = stem(problem.artifact_key, target.name)
    try:
        with _scratch(output) as scratch:
            made = scratch / f"{name}.so"
            for choice in choices:
                try:
                    if isinstance(target, CudaTarget):
                        kernel: Kernel | cuda.Kernel = _link_cuda(problem, target, made, cc)
                    else:
                        kernel = _link(problem, target, choice, made, cc, launcher or launcher_object(cc, scratch))
                    break
                # Whatever an old record makes TVM do, there is the next choice.
                except Exception as error:
                    if choice == choices[-1]:
                        raise
                    if complaints is not None:
                        complaints.append(f"{problem.key} for {target.name}: not built by {choice.reason}: {error}")
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
                decisions=kernel.decisions,
                packed_shape=(kernel.packed_elements,),
                packed_dtype=kernel.packed_dtype if isinstance(kernel, cuda.Kernel) else problem.accumulate_dtype,
                scratch_bytes=kernel.scratch_bytes,
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


def _choices(problem: Problem, target: Target | CudaTarget, complaints: list[str] | None) -> tuple[Choice, ...]:
    if isinstance(target, CudaTarget):
        return (_DEFAULT,)
    return tuple(choose(problem, target, read(target.name, shipped()), complaints))


def _link_cuda(problem: Problem, target: CudaTarget, path: Path, nvcc: str) -> cuda.Kernel:
    """Compile `problem` to a library at `path` whose functions launch kernels."""
    try:
        kernel = cuda.build_kernel(problem)
        text = cuda.source({"deconv": kernel.deconv, "pack": kernel.pack})
    except (RuntimeError, ValueError) as error:
        raise BuildError("problem", problem.key, f"does not compile for {target.name}: {error}") from error
    compile_library(text, path.absolute(), target, nvcc)
    return kernel


def _link(problem: Problem, target: Target, choice: Choice, path: Path, cc: str, launcher: Path) -> Kernel:
    """Compile `problem` as chosen to a library at `path`."""
    if choice.schedule:
        kernel = build_kernel(problem, target, named(choice.schedule.algorithm), plan_of(choice.schedule))
    else:
        try:
            algorithm, plan = default_plan(problem, target, choice.algorithms)
        except ValueError as error:
            rule = f"admit no algorithm for {problem.key}"
            raise BuildError("algorithms", ", ".join(choice.algorithms or ()), rule) from error
        kernel = build_kernel(problem, target, algorithm, plan)
    module = tvm.IRModule({"deconv": kernel.deconv, "pack": kernel.pack})
    try:
        compiled = tvm.compile(module, target=tvm.target.Target({"kind": "llvm", "mcpu": target.mcpu}))
        compiled.export_library(str(path.absolute()), addons=[str(launcher)], cc=cc)
    except (RuntimeError, ValueError, OSError) as error:
        raise BuildError("problem", problem.key, f"does not compile for {target.name}: {error}") from error
    return kernel


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
) -> list[Outcome]:
    """Build the artifacts for `problems` on every named target into the directory `output`.

    Builds run in `jobs` processes (as many as CPUs); problems that share an artifact share the build.  A problem that
    fails does not stop the others: at the end BuildError names all that failed, with the `outcomes` as an attribute.
    What is up to date is left alone.  `on_outcome` hears of each problem as it is done.

    `algorithms` names those that may be used, all where it is not given: without winograd, sums are rounded as those of
    the direct algorithms are. Schedules come from the tuning logs, those installed and those in the directory `logs`:
    `choices` says how. With `trials`, a search for better ones precedes the build, whose results are kept in `logs`;
    `tuning.tune` is that search, and `on_trial` hears of it.
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

        searched = [chosen.name for chosen in targets if isinstance(chosen, Target)]
        tune(unique.values(), searched, trials, logs, jobs=jobs, algorithms=using, on_trial=on_trial)
    directory = Path(output)
    directory.mkdir(parents=True, exist_ok=True)
    outcomes: list[Outcome] = []

    def note(outcome: Outcome) -> None:
        outcomes.append(outcome)
        if on_outcome:
            on_outcome(outcome)

    with tempfile.TemporaryDirectory() as scratch:
        pending = []
        for chosen in targets:
            records = read(chosen.name, shipped(), *([] if logs is None else [logs]))
            for problem, wanted in merged(chosen).items():
                complaints = records.complaints_of(problem.artifact_key)
                choices: tuple[Choice, ...] = (_DEFAULT,)
                if isinstance(chosen, Target):
                    choices = tuple(choose(problem, chosen, records, complaints, using))
                current = _up_to_date(problem, chosen, directory, wanted, choices[0])
                if current:
                    note(Outcome(problem, wanted, chosen.name, "current", current, None, 0.0, tuple(complaints)))
                else:
                    nowhere = Path(scratch)
                    job = _Job(problem, wanted, chosen.name, directory, nowhere, "", choices, tuple(complaints))
                    pending.append(job)
        if pending:
            compilers = {job.target: _compiler(get_any(job.target)) for job in pending}
            launcher = launcher_object(find_compiler(), Path(scratch))
            ready = [replace(job, launcher=launcher, cc=compilers[job.target]) for job in pending]
            for outcome in _run(ready, jobs or os.cpu_count() or 1):
                note(outcome)
    failed = [outcome for outcome in outcomes if outcome.status == "failed"]
    if failed:
        listing = "".join(f"\n  {o.problem.key} ({o.target}): {o.error}" for o in failed)
        error = BuildError("problems", f"{len(failed)} of {len(outcomes)}", f"did not build:{listing}")
        error.outcomes = outcomes
        raise error
    return outcomes


def _run(pending: list[_Job], workers: int) -> Iterator[Outcome]:
    """Run jobs in worker processes, each its own; a job that kills its worker fails alone.

    Workers are started by name and not by multiprocessing, whose children import the caller's script again: a
    script that compiles without a guard for that is what people write.
    """
    waiting: queue.SimpleQueue[_Job] = queue.SimpleQueue()
    for job in pending:
        waiting.put(job)
    done: queue.SimpleQueue[Outcome] = queue.SimpleQueue()

    def work() -> None:
        worker = None
        try:
            while True:
                try:
                    job = waiting.get_nowait()
                except queue.Empty:
                    return
                worker = worker or _start_worker()
                start = time.perf_counter()
                outcome = _ask(worker, job)
                if outcome is None:
                    seconds = time.perf_counter() - start
                    code = _stop(worker)
                    died = f"the compiler's process died ({f'signal {-code}' if code < 0 else f'exit code {code}'})"
                    outcome = Outcome(job.problem, job.layers, job.target, "failed", None, died, seconds)
                    worker = None
                done.put(outcome)
        finally:
            if worker:
                _stop(worker)

    with ThreadPoolExecutor(min(workers, len(pending))) as threads:
        running = [threads.submit(work) for _ in range(min(workers, len(pending)))]
        for _ in pending:
            yield done.get()
        for thread in running:
            thread.result()


def _start_worker() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "tvm_deconv.build"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ
    )


def _stop(worker: subprocess.Popen[bytes]) -> int:
    """Close the pipes of `worker`, which ends it, and return its exit code; what a dead one did not read is lost."""
    with contextlib.suppress(BrokenPipeError), worker:
        pass
    return worker.wait()


def _ask(worker: subprocess.Popen[bytes], job: _Job) -> Outcome | None:
    """Have `worker` build `job`; None where it died."""
    assert worker.stdin is not None
    assert worker.stdout is not None
    try:
        pickle.dump(job, worker.stdin)
        worker.stdin.flush()
        answer: Outcome = pickle.load(worker.stdout)
    except (EOFError, OSError, pickle.UnpicklingError):
        return None
    return answer


def _serve() -> None:
    """Build the jobs that come in on standard input until it ends; what TVM prints goes to standard error."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    while True:
        try:
            job = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        pickle.dump(_build(job), answers)
        answers.flush()


def _build(job: _Job) -> Outcome:
    start = time.perf_counter()
    manifest, problem = None, None
    complaints = list(job.complaints)
    try:
        manifest = export(
            job.problem,
            get_any(job.target),
            job.output,
            layers=job.layers,
            cc=job.cc,
            launcher=job.launcher,
            choices=job.choices,
            complaints=complaints,
        )
    except DeconvError as error:
        problem = str(error)
    except Exception as error:  # a defect of ours or of TVM in one problem must not hide what became of the others
        problem = f"{type(error).__name__}: {error}"
    status = "built" if manifest else "failed"
    seconds = time.perf_counter() - start
    return Outcome(job.problem, job.layers, job.target, status, manifest, problem, seconds, tuple(complaints))


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
        tuple(choice.schedule or ()),
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
                if path.suffix in (".py", ".c"):
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


if __name__ == "__main__":
    from tvm_deconv.build import (
        _serve as serve,
    )  # the classes that are unpickled are those of the module, not of the script

    serve()
