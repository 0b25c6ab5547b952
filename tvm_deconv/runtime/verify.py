"""Artifacts against the reference, on random data.

Outputs are poisoned before the call and lie between guards. So a comparison shows an element that was not written, and
the guards show one that was written beyond the end.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

import numpy as np

from tvm_deconv.artifact.manifest import Manifest
from tvm_deconv.artifact.select import Accepted, Decision
from tvm_deconv.errors import ArtifactError, DeconvError
from tvm_deconv.problem import Array
from tvm_deconv.problem.arrays import numpy_dtype
from tvm_deconv.problem.reference import reference
from tvm_deconv.problem.testing import deviation, operands, parts
from tvm_deconv.runtime.layer import Layer
from tvm_deconv.runtime.library import Library
from tvm_deconv.runtime.loader import read_verified
from tvm_deconv.targets import max_target

_GUARD = 61  # elements before and behind an output; odd, so that no vector of it is aligned


@dataclass(frozen=True)
class Verdict:
    """The outcome for one artifact: `status` is ok, failed or skipped (this machine cannot run it)."""

    manifest: Manifest
    status: str
    reason: str
    deviation: float = math.nan


def checked(library: Library) -> Library:
    """Return `library` with the artifacts whose libraries are those of their manifests; the others are broken in it."""
    whole: list[Manifest] = []
    broken = dict(library.broken)
    for manifest in library.manifests:
        try:
            read_verified(library.root / manifest.library, manifest)
        except ArtifactError as error:
            broken[manifest.name] = error
        else:
            whole.append(manifest)
    return Library(library.root, whole, broken, library.digest, host=library.host, cap=max_target())


def only(library: Library, manifest: Manifest) -> Library:
    """Return `library` with one artifact, so that no other is chosen in its place."""
    return Library(library.root, [manifest], {}, library.digest, host=library.host, cap=max_target())


def decide(library: Library, manifest: Manifest) -> Decision:
    """Return the decision on one artifact of `library` for its own problem on this machine."""
    (decision,) = only(library, manifest).select(manifest.parsed)
    return decision


def verify(library: Library, manifest: Manifest, seed: int | None = None) -> Verdict:
    """Run one artifact of `library` on random data, fresh unless a `seed` is given, and compare with the reference.

    A variable artifact is called with the extents of each of its buckets.
    """
    seed = int.from_bytes(os.urandom(4), "little") if seed is None else seed
    largest = 0.0
    try:
        decision = decide(library, manifest)
        if not isinstance(decision, Accepted):
            read_verified(library.root / manifest.library, manifest)
            return Verdict(manifest, "skipped", decision.reason)
        for variant in manifest.parsed.variants:
            problem = variant.at(variant.data_shape)
            arrays = operands(problem, seed)
            layer = only(library, manifest).bind(problem, arrays.filter, arrays.bias, scaling=arrays.scaling)
            output = checked_call(layer, arrays.data)
            if output is None:
                return Verdict(manifest, "failed", f"wrote outside of its output, with seed {seed}")
            for part in parts(problem, arrays):
                error = deviation(part.problem, output[part.slices], reference(part.problem, *part.operands))
                largest = max(largest, error.largest)
                if not error.allowed:
                    share = f"{error.largest:.1e} of its largest element"
                    reason = f"differs from the reference by {share}, with seed {seed}"
                    return Verdict(manifest, "failed", reason, error.largest)
    except DeconvError as refusal:
        return Verdict(manifest, "failed", str(refusal))
    except MemoryError:
        return Verdict(manifest, "failed", "needs more memory than this machine gives")
    return Verdict(manifest, "ok", "", largest)


def checked_call(layer: Layer, data: Array) -> Array | None:
    """Return the output of `layer`, which is poisoned before the call; None if it wrote outside of it."""
    problem = layer.problem
    dtype = numpy_dtype(problem.output_dtype)
    poison = np.iinfo(dtype).min or np.iinfo(dtype).max if dtype.kind in "iu" else math.nan
    size = math.prod(problem.output_shape)
    memory = np.full(size + 2 * _GUARD, poison, dtype)
    untouched = memory[:_GUARD].tobytes()
    out = memory[_GUARD : _GUARD + size].reshape(problem.output_shape)
    layer(data, out=out)
    intact = memory[:_GUARD].tobytes() == memory[_GUARD + size :].tobytes() == untouched
    return out if intact else None
