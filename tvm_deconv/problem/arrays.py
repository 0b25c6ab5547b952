"""NumPy arrays of a problem's types.

NumPy itself knows no bfloat16. Its bits are uint16, the form in which they cross to the kernels; for arithmetic the
package ml_dtypes has the dtype.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tvm_deconv.errors import SourceError
from tvm_deconv.extras import install
from tvm_deconv.problem.problem import Array

BFLOAT16 = "bfloat16"
_CACHE_LINE = 64  # bytes
_SMALL = 1 << 16  # bytes


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the NumPy dtype called `name`; bfloat16 comes from ml_dtypes.

    Raises SourceError for bfloat16 if ml_dtypes is not installed.
    """
    if name != BFLOAT16:
        return np.dtype(name)
    try:
        import ml_dtypes
    except ImportError:
        rule = f"needs the package ml_dtypes: {install('compile')}"
        raise SourceError("source", "a bfloat16 constant", rule) from None
    dtype: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return dtype


def storage(dtype: str) -> np.dtype[Any]:
    """Return the NumPy dtype that stores elements of `dtype`: uint16 for bfloat16."""
    return np.dtype("uint16" if dtype == BFLOAT16 else dtype)


def empty(shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
    """Return an array without values; from 64 KiB on, it begins at a cache line, which suits vectors."""
    small = math.prod(shape) * dtype.itemsize < _SMALL
    return np.empty(shape, dtype) if small else empty_lines(shape, dtype)


def empty_lines(shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
    """Return an array without values that begins at a cache line, so that no vector of it lies in two."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + _CACHE_LINE, np.uint8)
    start = -memory.ctypes.data % _CACHE_LINE
    return memory[start : start + size].view(dtype).reshape(shape)
