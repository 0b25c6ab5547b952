"""The canonical problem, its dialects, its activations, and the reference that computes it."""

from tvm_deconv.problem.activations import ACTIVATIONS
from tvm_deconv.problem.checks import broadcast, integer, integers, one_of
from tvm_deconv.problem.dtypes import DTYPES, FAST, FAST_TERMS, PRECISIONS, element_bytes
from tvm_deconv.problem.dynamic import ANY
from tvm_deconv.problem.epilogue import Epilogue
from tvm_deconv.problem.problem import DATA_FORMATS, FILTER_FORMATS, Array, Problem
from tvm_deconv.problem.quantization import Quantization, Scaling

__all__ = [
    "ACTIVATIONS",
    "ANY",
    "DATA_FORMATS",
    "DTYPES",
    "FAST",
    "FAST_TERMS",
    "FILTER_FORMATS",
    "PRECISIONS",
    "Array",
    "Epilogue",
    "Problem",
    "Quantization",
    "Scaling",
    "broadcast",
    "element_bytes",
    "integer",
    "integers",
    "one_of",
]
