"""Substitutes for the artifact of a problem that no artifact of a library serves.

The runtime has one: NumPy computes the reference, which is right and slow. Others are injected, see `tvm_deconv.api`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from tvm_deconv.artifact.manifest import stem
from tvm_deconv.problem import Array, Problem
from tvm_deconv.problem.arrays import storage
from tvm_deconv.problem.quantization import Constants
from tvm_deconv.problem.reference import quantized, reference
from tvm_deconv.runtime.process import LOG, Artifact, Loaded, Served, once
from tvm_deconv.targets import Place


class Fallback(NamedTuple):
    """A named function that returns an artifact for a problem. It raises DeconvError if it has none."""

    name: str
    serve: Callable[[Problem, Place], Served]


def computed(problem: Problem, _: Place) -> Served:
    """Return the reference for `problem` in the form of an artifact; NumPy computes in every place."""
    canonical = problem.replace(filter_format="GIOX")
    key = problem.artifact_key

    def pack(filter: Array, packed: Array) -> None:
        packed[...] = filter

    def deconv(data: Array, filter: Array, *others: Array) -> None:  # behind the filter the bias or a table, and out
        last, out = others[0] if others[1:] else None, others[-1]
        call = canonical.at(data.shape)
        if problem.quantization:
            result = quantized(call, data, filter, Constants.of_table(np.asarray(last)))
        else:
            result = reference(call, data, filter, last)
        out[...] = _rounded(result, problem.output_dtype)

    def make() -> Artifact:
        LOG.warning("no artifact serves %s: NumPy computes it, slowly", key)
        facts = Loaded(stem(key, "reference"), key, "reference", "", "")
        stored = "int16" if problem.quantization else storage(problem.dtype).name
        packed = (canonical.filter_shape, stored)
        return Artifact(facts, packed, pack, deconv, lambda constant: constant)

    return Served(None, once(key, make))


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


REFERENCE = Fallback("reference", computed)
