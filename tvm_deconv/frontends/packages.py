"""Packages that a reader needs and that may be missing, and the dtypes that one of them adds to NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np

from tvm_deconv.errors import SourceError
from tvm_deconv.problem import Array


def missing_package(source: str, package: str, install: str) -> SourceError:
    """Return the error of a reader whose package is not installed."""
    return SourceError("source", source, f"needs the package {package}: pip install {install}")


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the NumPy dtype of that name; bfloat16 comes from ml_dtypes, without which it raises SourceError."""
    if name != "bfloat16":
        return np.dtype(name)
    try:
        import ml_dtypes
    except ImportError:
        raise missing_package("a bfloat16 constant", "ml_dtypes", "'tvm_deconv[compile]'") from None
    dtype: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return dtype


@np.errstate(all="ignore")
def cast(value: Array, dtype: str) -> Array:
    """Return `value` in that dtype; values that do not fit become what NumPy makes of them, without a warning."""
    return value.astype(numpy_dtype(dtype))
