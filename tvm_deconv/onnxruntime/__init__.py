"""ONNX Runtime: sessions whose transposed convolutions a library computes; docs/frameworks.md."""

from tvm_deconv.onnxruntime.session import Session

__all__ = ["Session"]
