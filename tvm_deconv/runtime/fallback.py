"""What serves a problem that no artifact of a library serves: a build into the user's cache, or NumPy.

`compiled` needs the compiler's packages, and runs the compiler in a process of its own, which may die or take the
memory it takes without harm to this one. `computed` is the reference, right and slow.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import numpy as np

from tvm_deconv.artifact.manifest import Manifest, computed_by, stem
from tvm_deconv.artifact.sources import cache_stamp
from tvm_deconv.errors import ArtifactError, BuildError, ProblemError
from tvm_deconv.problem import Array, Problem
from tvm_deconv.problem.reference import reference
from tvm_deconv.runtime import arrays as _arrays
from tvm_deconv.runtime import loader as _loading
from tvm_deconv.targets import MAX_TARGET_VARIABLE, CpuTarget, Host, Target, supported

#: Without `-c`'s "" in front of the path: what lies in the current directory is not what is imported.
_PROGRAM = """
import sys
sys.path.remove("")
import tvm_deconv
tvm_deconv.compile([tvm_deconv.Problem.from_key(sys.argv[1])], sys.argv[2], sys.argv[3], jobs=1)
"""


def cache_directory() -> Path:
    """Return where this installation keeps what it builds; BuildError names a package that it lacks.

    ``$XDG_CACHE_HOME/tvm_deconv``, or ``~/.cache/tvm_deconv``, and below it `cache_stamp`: what other versions or other
    sources have built is not found there.
    """
    try:
        import filelock  # noqa: F401
        import platformdirs

        stamp = cache_stamp()
    except (ModuleNotFoundError, PackageNotFoundError) as error:
        rule = f"needs the package {error.name}: pip install 'tvm_deconv[compile]'"
        raise BuildError("fallback", "compile", rule) from None
    return Path(platformdirs.user_cache_path("tvm_deconv", appauthor=False)) / stamp


def widest_target(host: Host, cap: CpuTarget | None) -> CpuTarget:
    """Return the widest target that `host` runs and `cap` allows; ProblemError where there is none."""
    for target in supported(host.features):
        if cap is None or target.features <= cap.features:
            return target
    allowed = f" that {MAX_TARGET_VARIABLE}={cap.name} allows" if cap else ""
    raise ProblemError("fallback", "compile", f"there is no target for this CPU ({host.name}){allowed}")


def compiled(problem: Problem, target: Target) -> tuple[Manifest, _loading.Artifact]:
    """Load the artifact for `problem` and `target` from the user's cache, where it is built once, under a lock.

    Raises BuildError, ArtifactError.
    """
    directory, problem = cache_directory(), computed_by(problem, target)
    name = stem(problem.artifact_key, target.name)
    try:
        return _cached(directory, name)
    except ArtifactError:  # not there yet, or spoilt: the build replaces it
        from filelock import FileLock

    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with FileLock(directory / f".{name}.lock"):
            try:
                return _cached(directory, name)
            except ArtifactError:
                _build(problem, target, directory)
    except OSError as error:
        raise BuildError("fallback", "compile", f"the cache must be writable: {error}") from None
    return _cached(directory, name)


def _cached(directory: Path, name: str) -> tuple[Manifest, _loading.Artifact]:
    manifest = Manifest.read(directory / f"{name}.json")
    return manifest, _loading.load(directory, manifest)


def _build(problem: Problem, target: Target, directory: Path) -> None:
    _loading.LOG.warning("compiling %s for %s into %s", problem.key, target.name, directory)
    command = [sys.executable, "-c", _PROGRAM, problem.artifact_key, target.name, str(directory)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stderr.strip().rpartition("\n")[2] or f"exit code {done.returncode}"
        raise BuildError("fallback", "compile", f"does not build {problem.key} for {target.name}: {said}")


def computed(problem: Problem) -> _loading.Artifact:
    """Return the reference for `problem` in the form of an artifact."""
    canonical = problem.replace(filter_format="GIOX")
    key = problem.artifact_key

    def pack(filter: Array, packed: Array) -> None:
        packed[...] = filter

    def deconv(data: Array, filter: Array, *others: Array) -> None:
        *bias, out = others
        out[...] = _rounded(reference(canonical.at(data.shape), data, filter, *bias), problem.output_dtype)

    def make() -> _loading.Artifact:
        _loading.LOG.warning("no artifact serves %s: NumPy computes it, slowly", key)
        facts = _loading.Loaded(stem(key, "reference"), key, "reference", "", "")
        packed = (canonical.filter_shape, _arrays.storage(problem.dtype).name)
        return _loading.Artifact(facts, packed, pack, deconv, lambda constant: constant)

    return _loading.once(key, make)


def _rounded(values: Array, dtype: str) -> Array:
    """Convert `values` from float64 as the kernels do: integers wrap around; bfloat16, from float32, as its bits."""
    with np.errstate(all="ignore"):
        if dtype == "int32":
            return values.astype(np.int64).astype(np.int32)
        if dtype != "bfloat16":
            return values.astype(dtype)
        bits: np.ndarray[Any, np.dtype[np.uint32]] = values.astype(np.float32).view(np.uint32)
        nearest = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
        return np.where(np.isnan(values), 0x7FC0, nearest).astype(np.uint16)
