"""Transposed convolution compiled ahead of time."""

from tvm_deconv.dialects import from_onednn, from_onnx, from_openvino, from_torch
from tvm_deconv.errors import (
    ArtifactError,
    BuildError,
    CompilerNotFound,
    DeconvError,
    IntegrityError,
    ManifestError,
    NoArtifactError,
    ProblemError,
    SourceError,
    TensorError,
    TensorTypeError,
)
from tvm_deconv.problem import Epilogue, Problem
from tvm_deconv.reference import reference

__all__ = [
    "ArtifactError",
    "BuildError",
    "CompilerNotFound",
    "DeconvError",
    "Epilogue",
    "IntegrityError",
    "ManifestError",
    "NoArtifactError",
    "Problem",
    "ProblemError",
    "SourceError",
    "TensorError",
    "TensorTypeError",
    "from_onednn",
    "from_onnx",
    "from_openvino",
    "from_torch",
    "reference",
]
