"""PyTorch: one call (`conv_transpose`) and whole models (`problems`, `replace`); docs/frameworks.md."""

from tvm_deconv.torch.modules import Report, Swap, problems, replace
from tvm_deconv.torch.operator import conv_transpose

__all__ = ["Report", "Swap", "conv_transpose", "problems", "replace"]
