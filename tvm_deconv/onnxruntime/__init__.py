"""ONNX Runtime: sessions whose transposed convolutions a library computes; docs/frameworks.md."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tvm_deconv.onnxruntime.session import Session

__all__ = ["Session"]


def __getattr__(name: str) -> Any:
    """Import ONNX Runtime when the first session is asked for: `tvm-deconv compile` has other uses for the package."""
    if name != "Session":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from tvm_deconv.onnxruntime.session import Session

    return Session
