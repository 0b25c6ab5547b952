"""Transposed convolution compiled ahead of time."""

import importlib
from typing import TYPE_CHECKING, Any

from tvm_deconv._loading import Loaded, get_num_threads, loaded, set_num_threads
from tvm_deconv.dialects import from_onednn, from_onnx, from_openvino, from_torch
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
from tvm_deconv.library import Layer, Library, load
from tvm_deconv.manifest import Accepted, Decision, Manifest, Rejected
from tvm_deconv.problem import Epilogue, Problem
from tvm_deconv.reference import reference

if TYPE_CHECKING:
    from tvm_deconv import torch as torch
    from tvm_deconv.build import compile

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
    "Rejected",
    "RemoteError",
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
    # TVM and PyTorch take seconds to import and need not be there: they are imported when they are asked for.
    if name == "compile":
        from tvm_deconv.build import compile as build

        return build
    if name == "torch":
        return importlib.import_module("tvm_deconv.torch")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
