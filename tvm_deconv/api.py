"""The functions of the package that need both of its wings, the runtime and the compiler.

The compiler's packages take seconds to import and need not be installed: they are imported when they are needed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tvm_deconv.errors import BuildError, ProblemError
from tvm_deconv.extras import install
from tvm_deconv.problem import Problem, one_of
from tvm_deconv.problem.checks import check_callback, checked_path, several
from tvm_deconv.runtime import library
from tvm_deconv.runtime.fallback import REFERENCE, Fallback
from tvm_deconv.runtime.library import Library
from tvm_deconv.runtime.process import Served
from tvm_deconv.targets import Place, of_names

if TYPE_CHECKING:
    from tvm_deconv.compiler.requests import Outcome
    from tvm_deconv.tuning import Trial


def _compiled(problem: Problem, place: Place) -> Served:
    from tvm_deconv.cache import compiled  # rarely needed, and not quick to import

    return compiled(problem, place)


_FALLBACKS = {fallback.name: fallback for fallback in (Fallback("compile", _compiled), REFERENCE)}


def load(
    root: str | Path,
    *,
    digest: str | None = None,
    public_key: str | Path | None = None,
    fallback: str | Sequence[str] | None = None,
) -> Library:
    """Read the manifests in `root`; no library of an artifact is opened and none of its code runs.

    `root` is a directory of artifacts, or a file that "tvm-deconv pack" made of one.

    A manifest that does not read is a rejected candidate of every selection, and in `Library.broken`; if no other
    manifest is there, its ManifestError is raised. A library without a manifest, left by an interrupted build, is such
    a candidate too. ``TVM_DECONV_MAX_TARGET`` names the widest target to use. Raises ArtifactError if there is no such
    directory, or the file is another or is not whole, and ProblemError for arguments of another type.

    With `digest`, that of an earlier `Library.digest`, only those artifacts are loaded. With `public_key`, the PEM file
    of an Ed25519 key, only artifacts that its owner signed are loaded ("tvm-deconv sign"; needs the package
    cryptography), and the files of weights beside them must be those that were signed. Raises IntegrityError.

    `fallback` serves the problems that no artifact serves. "compile" builds an artifact into the user's cache, once, if
    the compiler is installed and nothing is pinned; for a filter on a device it builds for that device. "reference"
    computes with NumPy, slowly, and copies from and to a device. Both may be given, in the order to try. By default
    such a problem is a NoArtifactError.
    """
    given = () if fallback is None else (fallback,) if isinstance(fallback, str) else fallback
    names = several("fallback", given, f"must be one of {', '.join(_FALLBACKS)}, or several")
    for name in names:
        one_of("fallback", name, _FALLBACKS)
    if (digest is not None or public_key is not None) and "compile" in names:
        raise ProblemError(
            "fallback", fallback, "must not be compile where digest or public_key say what may be loaded"
        )
    return library.load(root, digest=digest, public_key=public_key, fallbacks=[_FALLBACKS[name] for name in names])


@contextlib.contextmanager
def _with_compiler() -> Iterator[None]:
    """Raise BuildError in place of the ModuleNotFoundError of a package that only the extra compile has."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        if package == "tvm_deconv":
            raise
        raise BuildError("package", package, f"must be installed to compile: {install('compile')}") from None


@_with_compiler()
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
    budget: float | None = None,
    logs: Path | str | None = None,
    on_trial: Callable[[Trial], None] | None = None,
    rpc_tracker: str | None = None,
    rpc_key: str | None = None,
) -> list[Outcome]:
    """Build the artifacts for `problems` on every named target into the directory `output`.

    Builds run in `jobs` processes (by default as many as CPUs); problems that share an artifact share the build.
    `layers` are names for people. A problem that fails does not stop the others: at the end BuildError names all that
    failed, with the `outcomes` as an attribute. Artifacts that are up to date are left alone. `on_outcome` is called
    with the outcome of each problem as it is done.

    Only `algorithms` are used, by default all: without winograd, winograd_rows and strassen, sums are rounded as those
    of the direct algorithms are. Of several targets, those that have none of them use all of theirs; one must have one.
    Schedules come from the tuning logs, those installed and those in the directory `logs`; see `compiler.selection`.

    With `trials`, or a `budget` of seconds, a search for better schedules precedes the build and keeps its results in
    `logs`; see `tuning.tune`. `on_trial` is called with each trial, and the servers of `rpc_tracker`
    measure if it is given.

    Raises ProblemError, CompilerNotFound, BuildError, also where the extra compile is not installed, and the errors of
    `tune`.
    """
    from tvm_deconv.compiler import current
    from tvm_deconv.compiler.requests import checked_problems

    problems = checked_problems(problems)
    check_callback("on_outcome", on_outcome)
    check_callback("on_trial", on_trial)
    if algorithms is not None:
        algorithms = several("algorithms", algorithms, "must be a sequence of names")
    if trials or budget is not None:
        targets = [chosen.name for chosen in of_names(target)]
        if logs is None:
            raise ProblemError("logs", logs, "must be a directory for the results of the trials")
        from tvm_deconv.tuning import tune

        options: dict[str, Any] = {"budget": budget, "jobs": jobs, "algorithms": algorithms, "on_trial": on_trial}
        tune(problems, targets, trials or 64, logs, rpc_tracker=rpc_tracker, rpc_key=rpc_key, **options)
    else:
        for name, value in (("rpc_tracker", rpc_tracker), ("rpc_key", rpc_key)):
            if value is not None:
                raise ProblemError(name, value, "must be given with trials, which are what its servers measure")
        if logs is not None and not checked_path("logs", logs).is_dir():
            raise ProblemError("logs", logs, "must be a directory of tuning logs; trials would make one")
    return current.compile(
        problems, target, output, layers=layers, jobs=jobs, on_outcome=on_outcome, algorithms=algorithms, logs=logs
    )
