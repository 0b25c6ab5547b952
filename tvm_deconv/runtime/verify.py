"""Artifacts against the reference, on random data.

The data is scaled so that sums are of order one whatever the number of products, where activations are not yet flat.
Outputs are poisoned beforehand and lie between guards, so that an element that is not written and one that is written
beyond the end both show.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

import numpy as np

from tvm_deconv.artifact.manifest import Manifest
from tvm_deconv.artifact.select import Accepted, Decision
from tvm_deconv.errors import DeconvError
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
    """What became of one artifact: `status` is ok, failed or skipped (this machine cannot run it)."""

    manifest: Manifest
    status: str
    reason: str
    deviation: float = math.nan


def only(library: Library, manifest: Manifest) -> Library:
    """Return `library` with one artifact, so that no other is chosen in its place."""
    return Library(library.root, [manifest], {}, host=library.host, cap=max_target(), digest=library.digest)


def decide(library: Library, manifest: Manifest) -> Decision:
    """Return whether this machine can run an artifact of `library`, with the reason."""
    (decision,) = only(library, manifest).select(manifest.parsed)
    return decision


def verify(library: Library, manifest: Manifest, seed: int | None = None) -> Verdict:
    """Run one artifact of `library` on random data, fresh where no `seed` is given, and compare with the reference.

    One that serves any extents is called with those of each of its buckets.
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
            outcome = checked_call(only(library, manifest).bind(problem, arrays.filter, arrays.bias), arrays.data)
            if isinstance(outcome, str):
                return Verdict(manifest, "failed", f"{outcome}, with seed {seed}")
            for part in parts(problem, arrays):
                found = deviation(part.problem, outcome[part.where], reference(part.problem, *part.operands))
                largest = max(largest, found.largest)
                if not found.allowed:
                    reason = (
                        f"differs from the reference by {found.largest:.1e} of its largest element, with seed {seed}"
                    )
                    return Verdict(manifest, "failed", reason, found.largest)
    except DeconvError as error:
        return Verdict(manifest, "failed", str(error))
    return Verdict(manifest, "ok", "", largest)


def checked_call(layer: Layer, data: Array) -> Array | str:
    """Return the output of `layer`, or what it did that no comparison would show."""
    problem = layer.problem
    dtype = numpy_dtype(problem.output_dtype)
    poison = np.iinfo(dtype).min if dtype.kind == "i" else math.nan
    size = math.prod(problem.output_shape)
    memory = np.full(size + 2 * _GUARD, poison, dtype)
    untouched = memory[:_GUARD].tobytes()
    out = memory[_GUARD : _GUARD + size].reshape(problem.output_shape)
    layer(data, out=out)
    if memory[:_GUARD].tobytes() != untouched or memory[_GUARD + size :].tobytes() != untouched:
        return "wrote outside of its output"
    return out
