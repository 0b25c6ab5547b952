"""What is computed: the canonical problem, its dialects, and the reference."""

from tvm_deconv.problem.problem import (
    ACTIVATIONS,
    ANY,
    DATA_FORMATS,
    DTYPES,
    FILTER_FORMATS,
    Array,
    Epilogue,
    Problem,
    integer,
    integers,
    one_of,
)

__all__ = [
    "ACTIVATIONS",
    "ANY",
    "DATA_FORMATS",
    "DTYPES",
    "FILTER_FORMATS",
    "Array",
    "Epilogue",
    "Problem",
    "integer",
    "integers",
    "one_of",
]
