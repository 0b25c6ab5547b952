"""The user's cache of artifacts: problems that no artifact of a library serves, compiled on demand.

It needs the compiler's packages. The compiler runs in a process of its own, whose crash or memory does this process no
harm. What is loaded from the cache runs as this user, so directory and files must be this user's, and nobody else's to
write.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

from tvm_deconv.artifact.files import fault_of_owner
from tvm_deconv.artifact.locks import locked
from tvm_deconv.artifact.manifest import Manifest, stem
from tvm_deconv.artifact.sources import cache_stamp
from tvm_deconv.errors import ArtifactError, BuildError, ProblemError
from tvm_deconv.extras import install
from tvm_deconv.problem import Problem
from tvm_deconv.runtime import loader
from tvm_deconv.runtime.process import LOG, Served
from tvm_deconv.targets import MAX_TARGET_VARIABLE, Place, Target, cuda_target, supported

_PATIENCE_SECONDS = 3900.0  # more than the build itself has
#: `-c` puts "" in front of the path; without it, no module is imported from the current directory.
_PROGRAM = """
import os, sys
sys.path[:] = filter(None, sys.path)
os.umask(0o077)
import tvm_deconv
tvm_deconv.compile([tvm_deconv.Problem.from_key(sys.argv[1])], sys.argv[2], sys.argv[3], jobs=1)
"""


def compiled(problem: Problem, place: Place) -> Served:
    """Load the artifact for `problem` and `place` from the user's cache; the first call builds it, under a lock.

    Raises BuildError, ArtifactError, ProblemError.
    """
    target = widest_target(place)
    folder, problem = directory(), target.computes(problem)
    name = stem(problem.artifact_key, target.name)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_owner(folder)
        with contextlib.suppress(ArtifactError):  # not there yet, or spoilt: the build replaces it
            return _cached(folder, name)
        with locked(folder / f".{name}.lock"):
            try:
                return _cached(folder, name)
            except ArtifactError:
                # Its content may be right, and then would not be built again, though others can write it.
                (folder / f"{name}.json").unlink(missing_ok=True)
                build(problem, target, folder)
    except OSError as error:
        raise BuildError("fallback", "compile", f"the cache must be writable: {error}") from None
    return _cached(folder, name)


def widest_target(place: Place) -> Target:
    """Return the widest target that `place` runs. Raises ProblemError if there is none."""
    if place.capability is not None:
        return cuda_target(place.capability)
    for target in supported(place.host.features):
        if place.cap is None or target.features <= place.cap.features:
            return target
    allowed = f" that {MAX_TARGET_VARIABLE}={place.cap.name} allows" if place.cap else ""
    raise ProblemError("fallback", "compile", f"there is no target for this CPU ({place.host.name}){allowed}")


def directory() -> Path:
    """Return the folder of the cache for what this installation builds.

    It is ``$XDG_CACHE_HOME/tvm_deconv/<stamp>``, or below ``~/.cache``. The stamp changes with everything that decides
    an artifact, so one that other sources have built is not found. Raises BuildError if a package is missing, or if
    there is no such directory: a relative one would be of whoever fills the current directory.
    """
    try:
        import platformdirs

        stamp = cache_stamp()
    except (ModuleNotFoundError, PackageNotFoundError) as error:
        rule = f"needs the package {error.name}: {install('compile')}"
        raise BuildError("fallback", "compile", rule) from None
    try:
        root = Path(platformdirs.user_cache_path("tvm_deconv", appauthor=False))
    except RuntimeError:  # the user has no home; earlier versions of platformdirs give the relative path of either
        root = Path()
    if not root.is_absolute():
        rule = "needs a directory for its cache: HOME or XDG_CACHE_HOME must be the path of one, from the root"
        raise BuildError("fallback", "compile", rule)
    return root / stamp


def build(problem: Problem, target: Target, folder: Path) -> None:
    """Compile `problem` for `target` into `folder`, in another process. Raises BuildError."""
    LOG.warning("compiling %s for %s into %s", problem.key, target.name, folder)
    command = [sys.executable, "-c", _PROGRAM, problem.artifact_key, target.name, str(folder)]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=_PATIENCE_SECONDS
        )
    except subprocess.TimeoutExpired:
        rule = f"does not build {problem.key} for {target.name} within {_PATIENCE_SECONDS:g} s"
        raise BuildError("fallback", "compile", rule) from None
    if done.returncode:
        said = done.stderr.strip().rpartition("\n")[2] or f"exit code {done.returncode}"
        raise BuildError("fallback", "compile", f"does not build {problem.key} for {target.name}: {said}")


def _check_owner(folder: Path) -> None:
    """Raise BuildError if another user could put artifacts into the directory `folder`."""
    if fault := fault_of_owner(folder.lstat()):
        raise BuildError("fallback", "compile", f"the cache {folder} {fault}")


def _cached(folder: Path, name: str) -> Served:
    manifest = Manifest.read(folder / f"{name}.json", private=True)
    return Served(manifest, loader.load(folder, manifest, private=True))
