"""Transposed convolution compiled ahead of time."""

import importlib
from typing import TYPE_CHECKING, Any

from tvm_deconv.api import compile, load
from tvm_deconv.artifact.manifest import Manifest
from tvm_deconv.artifact.select import Accepted, Decision, Rejected
from tvm_deconv.errors import (
    ArtifactError,
    BuildError,
    CompilerNotFound,
    DeconvError,
    DeviceError,
    IntegrityError,
    ManifestError,
    NoArtifactError,
    ProblemError,
    RemoteError,
    SourceError,
    TensorError,
    TensorTypeError,
)
from tvm_deconv.problem import Epilogue, Problem, Quantization, Scaling
from tvm_deconv.problem.reference import reference
from tvm_deconv.runtime.layer import Layer
from tvm_deconv.runtime.library import Library
from tvm_deconv.runtime.process import Loaded, loaded
from tvm_deconv.runtime.threads import get_num_threads, set_num_threads

from_openvino = Problem.from_openvino
from_onednn = Problem.from_onednn
from_onnx = Problem.from_onnx
from_torch = Problem.from_torch

if TYPE_CHECKING:
    from tvm_deconv import torch as torch

__all__ = [
    "Accepted",
    "ArtifactError",
    "BuildError",
    "CompilerNotFound",
    "Decision",
    "DeconvError",
    "DeviceError",
    "Epilogue",
    "IntegrityError",
    "Layer",
    "Library",
    "Loaded",
    "Manifest",
    "ManifestError",
    "NoArtifactError",
    "Problem",
    "ProblemError",
    "Quantization",
    "Rejected",
    "RemoteError",
    "Scaling",
    "SourceError",
    "TensorError",
    "TensorTypeError",
    "compile",
    "from_onednn",
    "from_onnx",
    "from_openvino",
    "from_torch",
    "get_num_threads",
    "load",
    "loaded",
    "reference",
    "set_num_threads",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.import_module("importlib.metadata").version("tvm_deconv")
    # PyTorch takes seconds to import and need not be installed.
    if name == "torch":
        return importlib.import_module("tvm_deconv.torch")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
