"""Rules that every dialect keeps: a new row of `DIALECTS` needs one of `SPOKEN`, and no test of its own for these."""

import inspect
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import tvm_deconv as td
from tvm_deconv import Epilogue, Problem, ProblemError, Quantization
from tvm_deconv.problem.dialects import DIALECTS


@dataclass(frozen=True)
class Layer:
    """A layer that all dialects can say: symmetric pads, output_padding below the stride or the dilation."""

    spatial: tuple = (5, 4)
    kernel: tuple = (4, 3)
    strides: Any = (3, 2)
    dilations: Any = (1, 1)
    pads: Any = (1, 0)
    output_padding: Any = (2, 0)
    batch: Any = 2
    groups: int = 2
    in_channels: int = 3
    out_channels: int = 4
    dtype: str = "float32"
    epilogue: Epilogue = Epilogue(True, "silu")  # noqa: RUF009 (frozen)
    quantization: Quantization | None = None

    @property
    def shapes(self):
        channels = self.groups * self.in_channels
        return (self.batch, channels, *self.spatial), (channels, self.out_channels, *self.kernel)

    @property
    def common(self):
        return {"dtype": self.dtype, "epilogue": self.epilogue, "quantization": self.quantization}

    @property
    def named(self):
        return {"strides": self.strides, "dilations": self.dilations, "output_padding": self.output_padding}

    @property
    def problem(self):
        """The layer by the formula."""
        axes = zip(self.spatial, self.kernel, self.strides, self.dilations, self.pads, self.output_padding, strict=True)
        output = []
        for x, k, s, d, pad, extra in axes:
            constant = (k - 1) * d + 1 - 2 * pad + extra
            output.append(f"any{constant:+d}" if isinstance(x, (str, list)) else s * (x - 1) + constant)
        fields = (self.spatial, self.kernel, self.strides, self.dilations, self.pads, tuple(output))
        return Problem(self.batch, self.groups, self.in_channels, self.out_channels, *fields, **self.common)


def openvino(layer):
    data, (_, *rest) = layer.shapes
    pads = {"pads_begin": layer.pads, "pads_end": layer.pads}
    filter = (layer.groups, layer.in_channels, *rest)
    return td.from_openvino(data, filter, **pads, **layer.named, **layer.common)


def onednn(layer):
    formats = {"data_format": "NCX", "filter_format": "OIX"}
    pads = {"pads_begin": layer.pads, "pads_end": layer.pads}
    return td.from_onednn(*layer.shapes, **formats, groups=layer.groups, **pads, **layer.named, **layer.common)


def onnx(layer):
    pads = (*layer.pads, *layer.pads)
    return td.from_onnx(*layer.shapes, pads=pads, group=layer.groups, **layer.named, **layer.common)


def torch(layer, **more):
    axes = {"stride": layer.strides, "dilation": layer.dilations, "padding": layer.pads}
    extra = more or {"output_padding": layer.output_padding}
    return td.from_torch(*layer.shapes, groups=layer.groups, **axes, **extra, **layer.common)


#: name of a dialect -> the layer in its words
SPOKEN = {"openvino": openvino, "onednn": onednn, "onnx": onnx, "torch": torch}
dialects = pytest.mark.parametrize("name", DIALECTS)


def said(name, layer):
    """The problem that a dialect makes of the layer, with the filter format that all of them share."""
    return SPOKEN[name](layer).replace(filter_format="IOX")


@dialects
def test_is_offered_by_the_class_and_by_the_package(name):
    function = getattr(td, f"from_{name}")
    assert function is getattr(Problem, f"from_{name}")
    assert inspect.signature(function).parameters == inspect.signature(DIALECTS[name]).parameters
    assert function.__name__ == f"from_{name}"
    assert function.__doc__
    assert inspect.signature(function).return_annotation == inspect.get_annotations(function)["return"] == "Problem"


@given(st.integers(1, 3), st.integers(1, 3), st.data())
def test_means_the_formula(rank, groups, data):
    def per_axis(low, high):
        return tuple(data.draw(st.lists(st.integers(low, high), min_size=rank, max_size=rank)))

    strides, dilations = per_axis(1, 4), per_axis(1, 3)
    extra = tuple(data.draw(st.integers(0, max(s, d) - 1)) for s, d in zip(strides, dilations, strict=True))
    dtype = data.draw(st.sampled_from(["float32", "bfloat16"]))
    layer = Layer(per_axis(1, 9), per_axis(1, 5), strides, dilations, per_axis(0, 2), extra, groups=groups, dtype=dtype)
    axes = zip(layer.spatial, layer.kernel, strides, dilations, layer.pads, extra, strict=True)
    assume(all(s * (x - 1) + (k - 1) * d + 1 + more >= 2 * pad for x, k, s, d, pad, more in axes))
    for name in DIALECTS:
        assert said(name, layer) == layer.problem, name
    p = layer.problem
    axes = zip(p.uncropped_spatial, strides, layer.pads, extra, strict=True)
    if all(more < s and nat >= 2 * pad for nat, s, pad, more in axes):
        assert torch(layer, output_size=p.output_spatial) == p


@dialects
def test_takes_lists_and_numpy_arrays(name):
    layer = Layer()
    for form in (list, np.array):
        axes = {field: form(getattr(layer, field)) for field in ("strides", "dilations", "pads", "output_padding")}
        assert said(name, replace(layer, **axes)) == layer.problem


@dialects
def test_no_batch_at_all(name):
    assert said(name, Layer(batch=0)) == Layer().problem.replace(batch=0)


@dialects
def test_quantized(name):
    layer = Layer(dtype="uint8", quantization=Quantization("int8", "uint8"))
    assert said(name, layer) == layer.problem
    assert layer.problem.key == replace(layer, quantization=None, dtype="float32").problem.key.replace(
        "float32", "uint8.int8.uint8"
    )


@dialects
@pytest.mark.parametrize("batch", [2, "any"])
@pytest.mark.parametrize("spatial", [("any", 4), (5, "any"), ("any", "any"), ([8, 3], 4), (5, [6])])
def test_dynamic_extents(name, batch, spatial):
    layer = Layer(spatial, batch=batch)
    assert said(name, layer) == layer.problem
    assert said(name, layer).dynamic_axes == tuple(axis for axis, x in enumerate(spatial) if not isinstance(x, int))


@dialects
@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"batch": -1}, r"every element must be at least 0"),
        ({"batch": [1, 2]}, r"every element must be an integer"),
        ({"spatial": (5.0, 4)}, r"every element must be an integer"),
        ({"spatial": ([], 4)}, r"must hold at least one extent"),
        ({"spatial": ([0], 4)}, r"every element must be at least 1"),
        ({"spatial": (0, 4)}, r"must have channels and spatial extents of at least 1"),
        ({"kernel": (0, 3)}, r"every element must be at least 1"),
        ({"kernel": (3, 3, 3, 3)}, r"must have rank"),
        ({"strides": (0, 2)}, r"every element must be at least 1"),
        ({"strides": (1, 2, 3)}, r"must have one element per spatial axis, 2 here"),
        ({"dilations": (1, True)}, r"every element must be an integer, not a bool"),
        ({"pads": (-1, 0)}, r"every element must be at least 0"),
        ({"pads": (40, 0)}, r"must leave an output of extents at least 0"),
        ({"output_padding": (-1, 0)}, r"every element must be at least 0"),
        ({"dtype": "bool"}, r"must be one of float32"),
        ({"epilogue": "relu"}, r"must be an Epilogue"),
        ({"dtype": "int8", "quantization": "int8.int8"}, r"must be a Quantization"),
        ({"quantization": Quantization("int8", "int8")}, r"dtype='float32': must be int8 or uint8"),
        ({"spatial": ("any", 4, 4), "kernel": (1, 1, 1)}, r"."),
    ],
)
def test_refuses(name, changes, text):
    with pytest.raises(ProblemError, match=text):
        SPOKEN[name](replace(Layer(), **changes))
