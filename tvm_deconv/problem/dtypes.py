"""The data types of problems."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Dtype(NamedTuple):
    """The bytes of an element, the type of sums and of the bias, and the type of the output."""

    bytes: int
    accumulator: str
    output: str


#: The dtypes of data and filter.
DTYPES = {
    "float32": Dtype(4, "float32", "float32"),
    "float64": Dtype(8, "float64", "float64"),
    "float16": Dtype(2, "float32", "float16"),
    "bfloat16": Dtype(2, "float32", "bfloat16"),
    "int8": Dtype(1, "int32", "int32"),
    "uint8": Dtype(1, "int32", "int32"),
    "int32": Dtype(4, "int32", "int32"),
}
#: How float32 products are computed, the most exact first: as IEEE 754 has it; each as three products of factors of 11
#: bits; or with factors rounded to 11 bits. Where the target cannot, it computes more exactly.
PRECISIONS = ("ieee", "tf32x3", "tf32")
#: In place of a precision: the fastest one whose errors are at most twice those of float32 sums, taken in order. These
#: are three products of TF32 for sums of this many terms; docs/cuda.md has the errors, which were measured up to there.
FAST, FAST_TERMS = "float32_fast", range(256, 8192 + 1)


def element_bytes(dtype: str) -> int:
    """Return the bytes of an element: of a problem's dtype, or of another that NumPy has, such as int32 for sums."""
    return DTYPES[dtype].bytes if dtype in DTYPES else np.dtype(dtype).itemsize
