"""Artifacts against the reference, on random data.

The data is scaled so that sums are of order one whatever the number of products, where activations are not yet flat.
Outputs are poisoned beforehand and lie between guards, so that an element that is not written and one that is written
beyond the end both show.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tvm_deconv.artifact.manifest import Accepted, Decision, Manifest
from tvm_deconv.errors import DeconvError
from tvm_deconv.frontends.packages import numpy_dtype
from tvm_deconv.problem import Array, Problem
from tvm_deconv.problem.reference import reference
from tvm_deconv.runtime.library import Layer, Library
from tvm_deconv.runtime.loader import read_verified
from tvm_deconv.targets import max_target

#: dtype -> what an element may be off by, as a part of the largest element and as a part of itself (its rounding).
TOLERANCES = {
    "float32": (5e-5, 0.0),  # of long sums under Winograd's transforms, too
    "float64": (1e-13, 0.0),
    "float16": (5e-5, 2.0**-10),
    "bfloat16": (5e-5, 2.0**-7),
    "int32": (0.0, 0.0),
}
_PART_ELEMENTS = 2**26  # of an output whose reference is computed at once
_GUARD = 61  # elements before and behind an output; odd, so that no vector of it is aligned


class Operands(NamedTuple):
    """The arrays of one call, in the problem's formats; `bias` is None where the epilogue has none."""

    data: Array
    filter: Array
    bias: Array | None


class Deviation(NamedTuple):
    """How far off an output is, as a part of the largest element expected, and whether that is allowed."""

    largest: float
    allowed: bool


class Part(NamedTuple):
    """A piece of a problem as one of its own, its arrays, and where in the whole output its output lies."""

    problem: Problem
    operands: Operands
    where: tuple[Any, ...]


@dataclass(frozen=True)
class Verdict:
    """What became of one artifact: `status` is ok, failed or skipped (this machine cannot run it)."""

    manifest: Manifest
    status: str
    reason: str
    deviation: float = math.nan


def operands(problem: Problem, seed: int = 0) -> Operands:
    """Return random arrays for `problem`, the same for the same seed."""
    rng = np.random.default_rng(seed)
    products = problem.in_channels * math.prod(
        math.ceil(k / s) for k, s in zip(problem.kernel, problem.strides, strict=True)
    )
    dtype = numpy_dtype(problem.dtype)
    if dtype.kind in "iu":
        # The whole range, unless a sum could then leave 32 bits.
        largest = min(np.iinfo(dtype).max, max(1, math.isqrt(2**30 // (products * math.prod(problem.strides)))))
        lowest = -largest if dtype.kind == "i" else 0
        arrays = [
            rng.integers(lowest, largest, shape, dtype, endpoint=True)
            for shape in (problem.data_shape, problem.filter_shape)
        ]
        bias = rng.integers(-(2**15), 2**15, problem.bias_shape, np.int32)
    else:
        working: Any = np.float64 if problem.dtype == "float64" else np.float32
        scale = working(1 / math.sqrt(products))
        arrays = [
            rng.standard_normal(problem.data_shape, working).astype(dtype),
            (rng.standard_normal(problem.filter_shape, working) * scale).astype(dtype),
        ]
        bias = rng.standard_normal(problem.bias_shape, working)
    return Operands(arrays[0], arrays[1], bias if problem.epilogue.bias else None)


def deviation(problem: Problem, output: Array, expected: npt.NDArray[np.float64], *, fused: bool = True) -> Deviation:
    """Compare `output` with what the reference gave for the same operands.

    Where the epilogue is not `fused`, sums are rounded to the output's type before it, and may have been larger.
    """
    if output.size == 0:
        return Deviation(0.0, output.shape == expected.shape)
    common, own = TOLERANCES[problem.output_dtype]
    # Cut along the first two axes where intermediate results of the whole would take much memory.
    pieces = list(np.ndindex(output.shape[:2])) if output.size > _PART_ELEMENTS else [()]
    largest = max(float(np.abs(expected[at]).max()) for at in pieces)
    off, allowed = 0.0, True
    for at in pieces:
        error = np.abs(output[at].astype(np.float64) - expected[at])
        off = float(np.maximum(off, error.max()))  # which keeps a NaN
        # Written so that a NaN is not allowed.
        allowed &= bool(np.all(error <= common * largest + own * (np.abs(expected[at]) if fused else largest)))
    return Deviation(off / (largest or 1.0), allowed)


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
            outcome = _call(only(library, manifest).bind(problem, arrays.filter, arrays.bias), arrays.data)
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


def parts(problem: Problem, arrays: Operands) -> Iterator[Part]:
    """Cut a large problem along images, groups and output channels into ones whose reference fits into memory."""
    positions = math.prod(problem.output_spatial)

    def at_most(extent: int, each: int) -> int:
        return max(1, min(extent, _PART_ELEMENTS // max(1, each)))

    images = at_most(problem.batch, problem.groups * problem.out_channels * positions)
    groups = at_most(problem.groups, images * problem.out_channels * positions)
    channels = at_most(problem.out_channels, images * groups * positions)
    filter, last = problem.canonical_filter(arrays.filter), problem.data_format == "NXC"

    def along(images: slice, channels: slice) -> tuple[Any, ...]:
        return (images, ..., channels) if last else (images, channels)

    for n, g, c in itertools.product(
        range(0, problem.batch, images), range(0, problem.groups, groups), range(0, problem.out_channels, channels)
    ):
        taken = filter[g : g + groups, :, c : c + channels]
        part = problem.replace(
            batch=min(images, problem.batch - n),
            groups=taken.shape[0],
            out_channels=taken.shape[2],
            filter_format="GIOX",
        )
        first = g * problem.out_channels + c
        outputs = slice(first, first + part.groups * part.out_channels)
        inputs = slice(g * problem.in_channels, (g + part.groups) * problem.in_channels)
        some = slice(n, n + part.batch)
        bias = None if arrays.bias is None else arrays.bias[outputs]
        yield Part(part, Operands(arrays.data[along(some, inputs)], taken, bias), along(some, outputs))


def _call(layer: Layer, data: Array) -> Array | str:
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
