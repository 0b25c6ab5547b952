"""Dialects and reference against systems that no one here wrote: ONNX's own cases, OpenVINO, ONNX Runtime, PyTorch.

Random cases hold small integers, so that every sum is exact in float32 and results must be equal.
"""

import collections
import importlib
import re
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import openvino
import pytest
from onnx import numpy_helper
from openvino import opset1
from openvino.utils.node_factory import NodeFactory
from support.kernels import run_kernel
from support.tolerances import assert_close

from tvm_deconv import Epilogue, ProblemError, from_onnx, from_openvino, from_torch
from tvm_deconv.problem.reference import reference
from tvm_deconv.targets import CPU_TARGETS

AUTO_PADS = ("explicit", "valid", "same_upper", "same_lower")


def onnx_problem(node, shapes):
    """The problem of a ConvTranspose node and its parameters' shapes."""
    attributes = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}
    if "auto_pad" in attributes:
        attributes["auto_pad"] = attributes["auto_pad"].decode()
    return from_onnx(*shapes[:2], **attributes, epilogue=Epilogue(bias=len(shapes) == 3))


def onnx_node_cases():
    """The node tests; collect_testcases("ConvTranspose") finds the same and makes those of all operators first."""
    importlib.import_module("onnx.backend.test.case.node.convtranspose")
    return importlib.import_module("onnx.backend.test.case.node")._NodeTestCases


NODE_CASES = [case for case in onnx_node_cases() if case.name.startswith("test_convtranspose")]
MODELS = sorted((Path(onnx.__file__).parent / "backend/test/data").glob("pytorch-*/test_*onv*ranspose*"))


def compiled(p, *arrays):
    """What the compiled kernel gives for data, filter and perhaps bias; copied, since ONNX's are read-only."""
    data, weights, bias = (*(np.array(array) for array in arrays), None)[:3]
    return run_kernel(p, CPU_TARGETS["x86-64-v3"], data, weights, bias)


def test_all_cases_are_there():
    assert len(NODE_CASES) == 11
    assert [model.name for model in MODELS] == [
        "test_ConvTranspose2d",
        "test_ConvTranspose2d_no_bias",
        "test_operator_convtranspose",
    ]


@pytest.mark.parametrize("case", NODE_CASES, ids=lambda case: case.name)
def test_onnx_nodes(case):
    for inputs, (expected,) in case.data_sets:
        p = onnx_problem(case.model.graph.node[0], [array.shape for array in inputs])
        assert p.output_shape == expected.shape
        np.testing.assert_allclose(reference(p, *inputs), expected, rtol=1e-6)
        np.testing.assert_allclose(compiled(p, *inputs), expected, rtol=1e-6)


@pytest.mark.parametrize("folder", MODELS, ids=lambda folder: folder.name)
def test_onnx_converted_models(folder):
    graph = onnx.load(folder / "model.onnx").graph
    data, expected = (
        numpy_helper.to_array(onnx.load_tensor(folder / "test_data_set_0" / name))
        for name in ("input_0.pb", "output_0.pb")
    )
    parameters = [numpy_helper.to_array(tensor) for tensor in graph.initializer]
    (node,) = graph.node
    assert list(node.input) == ["0", *(tensor.name for tensor in graph.initializer)]
    p = onnx_problem(node, [array.shape for array in (data, *parameters)])
    assert p.output_shape == expected.shape
    assert_close(reference(p, data, *parameters), expected)
    assert_close(compiled(p, data, *parameters), expected)


class Case:
    """One random attribute set: shapes, the attributes that the dialects share, and arrays.

    `strict` keeps output_padding below max(stride, dilation), as ONNX Runtime and PyTorch want it.
    """

    def __init__(self, rng, strict=False):
        rank = int(rng.integers(1, 4))

        def per_axis(low, high):
            return [int(value) for value in rng.integers(low, high, rank)]

        self.rng = rng
        self.groups, self.inputs, self.outputs = (int(value) for value in rng.choice([1, 1, 2, 3], 3))
        self.spatial, self.kernel = per_axis(1, 6), per_axis(1, 5)
        self.data_shape = (int(rng.integers(1, 3)), self.groups * self.inputs, *self.spatial)
        self.strides, self.dilations = per_axis(1, 5), per_axis(1, 4)
        self.begin, self.end, self.extra = per_axis(0, 4), per_axis(0, 4), per_axis(0, 4)
        if strict:
            axes = zip(self.extra, self.strides, self.dilations, strict=True)
            self.extra = [min(more, max(s, d) - 1) for more, s, d in axes]
        axes = zip(self.spatial, self.kernel, self.strides, self.dilations, self.extra, strict=True)
        self.longest = [s * (x - 1) + (k - 1) * d + 1 + more for x, k, s, d, more in axes]
        self.output_shape = [max(1, extent - more) for extent, more in zip(self.longest, per_axis(-3, 7), strict=True)]

    @property
    def has_odd_total(self):
        return any(
            extent > out and (extent - out) % 2 for extent, out in zip(self.longest, self.output_shape, strict=True)
        )

    def array(self, shape):
        return self.rng.integers(-8, 9, shape).astype(np.float32)


def openvino_node(case, attributes, output_shape, filter):
    """(parameter, node) of one operator; the Python wrapper would drop pads, the factory does not."""
    data = opset1.parameter(list(case.data_shape), np.float32)
    inputs = [data, opset1.constant(filter)]
    if output_shape is not None:
        inputs.append(opset1.constant(np.array(output_shape, np.int64)))
    name = "GroupConvolutionBackpropData" if filter.ndim > len(case.data_shape) else "ConvolutionBackpropData"
    return data, NodeFactory("opset1").create(name, [node.output(0) for node in inputs], attributes)


@pytest.mark.parametrize("sized", [False, True])
@pytest.mark.parametrize("auto_pad", AUTO_PADS)
def test_openvino(auto_pad, sized):
    rng = np.random.default_rng([AUTO_PADS.index(auto_pad), sized])
    problems, arrays, nodes = [], [], []
    odd = 0
    while len(problems) < 60:
        case = Case(rng)
        attributes = {
            "strides": case.strides,
            "pads_begin": case.begin,
            "pads_end": case.end,
            "dilations": case.dilations,
            "auto_pad": auto_pad,
            "output_padding": case.extra,
        }
        # OpenVINO does not compile the grouped operator with one group.
        groups = (case.groups, case.inputs) if case.groups > 1 else (case.inputs,)
        filter = case.array((*groups, case.outputs, *case.kernel))
        output_shape = case.output_shape if sized else None
        try:
            p = from_openvino(case.data_shape, filter.shape, **attributes, output_shape=output_shape)
        except ProblemError as error:
            assert error.attribute == "pads_begin+pads_end"  # noqa: PT017
            continue
        # It also ignores the pads of a pointwise convolution whose output is as large as its data.
        if 0 in p.output_shape or set(case.kernel + case.strides) == {1}:
            continue
        odd += case.has_odd_total
        problems.append(p)
        arrays.append((case.array(case.data_shape), filter))
        nodes.append(openvino_node(case, attributes, output_shape, filter))
    assert odd >= 20
    model = openvino.Model([node for _, node in nodes], [data for data, _ in nodes])
    options = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1}
    results = openvino.Core().compile_model(model, "CPU", options)([data for data, _ in arrays])
    for index, (p, (data, filter)) in enumerate(zip(problems, arrays, strict=True)):
        np.testing.assert_array_equal(results[index], reference(p, data, filter), err_msg=p.key)


def test_onnxruntime():
    onnxruntime.set_default_logger_severity(4)
    rng = np.random.default_rng(0)
    agreed = collections.Counter()
    for turn in range(800):
        case = Case(rng, strict=True)
        auto_pad = ("NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER")[turn % 4]
        sized = bool(rng.integers(2))
        attributes = {
            "strides": case.strides,
            "dilations": case.dilations,
            "group": case.groups,
            "auto_pad": auto_pad,
            "output_padding": case.extra,
        }
        if sized:
            attributes["output_shape"] = case.output_shape
        elif auto_pad == "NOTSET":
            attributes["pads"] = case.begin + case.end
        elif auto_pad != "VALID" and any(
            extent < x * s for extent, x, s in zip(case.longest, case.spatial, case.strides, strict=True)
        ):
            continue  # ONNX says X*s, ONNX Runtime makes a shorter output
        shapes = case.data_shape, (case.data_shape[1], case.outputs, *case.kernel)
        data, filter = map(case.array, shapes)
        result = run_onnxruntime(shapes, attributes, data, filter)
        if result is None:
            continue
        p = from_onnx(*shapes, **attributes)
        np.testing.assert_array_equal(result, reference(p, data, filter), err_msg=p.key)
        agreed[auto_pad, sized] += 1
    assert len(agreed) == 8
    assert min(agreed.values()) >= 20, agreed


def run_onnxruntime(shapes, attributes, data, filter):
    """The output of ConvTranspose-11, or None where ONNX Runtime refuses the output extents."""
    helper = onnx.helper
    inputs = [helper.make_tensor_value_info(*pair) for pair in zip("xw", (1, 1), shapes, strict=True)]
    node = helper.make_node("ConvTranspose", ["x", "w"], ["y"], **attributes)
    graph = helper.make_graph([node], "g", inputs, [helper.make_tensor_value_info("y", 1, None)])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 11)], ir_version=8)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    try:
        session = onnxruntime.InferenceSession(model.SerializeToString(), options)
        return session.run(None, {"x": data, "w": filter})[0]
    except Exception as error:  # its exceptions have no common public class
        assert re.search("inconsistent with input spatial dimensions|output dimension is <= 0", str(error))  # noqa: PT017
        return None


def test_torch():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    rng = np.random.default_rng(0)
    agreed = 0
    for _ in range(300):
        case = Case(rng, strict=True)
        filter = case.array((case.data_shape[1], case.outputs, *case.kernel))
        bias = case.array(case.groups * case.outputs)
        data = case.array(case.data_shape)
        if case.data_shape[0] == 1:
            data = data[0]
        attributes = {
            "stride": case.strides,
            "padding": case.begin,
            "output_padding": case.extra,
            "groups": case.groups,
            "dilation": case.dilations,
        }
        try:
            p = from_torch(data.shape, filter.shape, **attributes, epilogue=Epilogue(True))
        except ProblemError:
            continue
        if 0 in p.output_shape:
            continue
        function = getattr(torch.nn.functional, f"conv_transpose{len(case.kernel)}d")
        result = function(
            torch.from_numpy(data), torch.from_numpy(filter), torch.from_numpy(bias), **attributes
        ).numpy()
        expected = reference(p, data.reshape(p.data_shape), filter, bias)
        np.testing.assert_array_equal(result, expected.reshape(result.shape), err_msg=p.key)
        agreed += 1
    assert agreed > 150
