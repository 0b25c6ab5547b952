"""Packages that a reader needs and that may be missing."""

from __future__ import annotations

import numpy as np

from tvm_deconv.errors import SourceError
from tvm_deconv.extras import install
from tvm_deconv.problem import Array
from tvm_deconv.problem.arrays import numpy_dtype


def missing_package(source: str, package: str, extra: str | None = None) -> SourceError:
    """Return the error of a reader whose package is not installed; `extra` is that of ours which has it."""
    command = f"pip install {package}" if extra is None else install(extra)
    return SourceError("source", source, f"needs the package {package}: {command}")


@np.errstate(all="ignore")
def cast(value: Array, dtype: str) -> Array:
    """Return `value` in that dtype; values that do not fit become what NumPy makes of them, without a warning."""
    return value.astype(numpy_dtype(dtype))
