"""Transposed convolution compiled ahead of time."""

import importlib
from typing import TYPE_CHECKING, Any

from tvm_deconv.artifact.manifest import Accepted, Decision, Manifest, Rejected
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
from tvm_deconv.problem import Epilogue, Problem
from tvm_deconv.problem.reference import reference
from tvm_deconv.runtime.library import Layer, Library, load
from tvm_deconv.runtime.loader import Loaded, get_num_threads, loaded, set_num_threads

from_openvino = Problem.from_openvino
from_onednn = Problem.from_onednn
from_onnx = Problem.from_onnx
from_torch = Problem.from_torch

if TYPE_CHECKING:
    from tvm_deconv import torch as torch
    from tvm_deconv.compiler.build import compile

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
        from tvm_deconv.compiler.build import compile as build

        return build
    if name == "torch":
        return importlib.import_module("tvm_deconv.torch")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
