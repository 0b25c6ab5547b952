"""Dialects: the attribute sets of one family of operators each, read into the fields of a problem.

They share their arithmetic and differ in layouts, in defaults, and in the end that gets the odd element of a pad.
docs/semantics.md has the tables.

The batch and, with one or two spatial axes, spatial extents of `data_shape` may be "any", and spatial ones a list of
buckets. That makes a variable problem, whose output extents follow from the attributes in every call. `precision` is
that of `Problem`. Each function raises ProblemError with the attribute, its value and the rule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tvm_deconv.problem.dialects.attributes import Fields
from tvm_deconv.problem.dialects.onednn import from_onednn
from tvm_deconv.problem.dialects.onnx import from_onnx
from tvm_deconv.problem.dialects.openvino import from_openvino
from tvm_deconv.problem.dialects.torch import from_torch

__all__ = ["DIALECTS", "Fields", "from_onednn", "from_onnx", "from_openvino", "from_torch"]

#: name -> the function that reads its attributes
DIALECTS: Mapping[str, Callable[..., Fields]] = {
    "openvino": from_openvino,
    "onednn": from_onednn,
    "onnx": from_onnx,
    "torch": from_torch,
}
