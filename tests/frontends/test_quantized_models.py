"""Quantized models: their layers become quantized problems with their numbers, and compute what the models do."""

import dataclasses
import types

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import tvm_deconv as td
from tvm_deconv.frontends import scan, write_weights
from tvm_deconv.problem.reference import reference

RNG = np.random.default_rng(3)
UP = {"strides": [2, 2], "pads": [1, 1, 1, 1], "kernel_shape": [4, 4]}
TYPES = {np.uint8: TensorProto.UINT8, np.int8: TensorProto.INT8, np.float32: TensorProto.FLOAT}


def save(folder, *, data=np.uint8, filter=np.int8, output=np.uint8, zero=0, per_channel=True, groups=1, **changes):
    """A model with one layer between DequantizeLinear and QuantizeLinear, which ends in float32 if output says so."""
    limits, channels = np.iinfo(filter), 6 // groups
    scale = RNG.uniform(0.01, 0.02, channels if per_channel else ()).astype(np.float32)
    constants = {
        "xs": np.float32(0.03), "xz": data(100), "w": RNG.integers(limits.min, limits.max, (4, channels, 4, 4), filter),
        "ws": scale, "wz": np.full(scale.shape, zero, filter), "b": RNG.integers(-500, 500, 6).astype(np.int32),
        "bs": np.float32(0.03) * np.tile(scale, groups) if per_channel else np.float32(0.03) * scale,
        "ys": np.float32(0.1), "yz": np.zeros((), output),
    } | changes.pop("constants", {})  # fmt: skip
    nodes = [
        ("DequantizeLinear", "x xs xz", "xf", {}),
        ("DequantizeLinear", "w ws wz", "wf", {"axis": 1} if per_channel else {}),
        ("DequantizeLinear", "b bs", "bf", {"axis": 0} if per_channel else {}),
        ("ConvTranspose", "xf wf bf", "u", changes.pop("up", UP) | {"group": groups}),
        *changes.pop("between", [("Relu", "u", "v", {})]),
    ]  # fmt: skip
    last = nodes[-1][2]
    nodes += (
        [("QuantizeLinear", f"{last} ys yz", "y", {})] if output is not np.float32 else [("Identity", last, "y", {})]
    )
    made = [helper.make_node(op, i.split(), [o], name=f"{op}_{n}", **a) for n, (op, i, o, a) in enumerate(nodes)]
    graph = helper.make_graph(
        made,
        "model",
        [helper.make_tensor_value_info("x", TYPES[data], (2, 4, 5, 6))],
        [helper.make_tensor_value_info(name, TYPES[output], None) for name in ("y", *changes.pop("outputs", ()))],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)
    onnx.save(model, folder / "model.onnx")
    return folder / "model.onnx"


@pytest.mark.parametrize(
    ("options", "types"),
    [
        ({}, "int8.uint8"),
        ({"data": np.int8, "output": np.int8, "per_channel": False}, "int8.int8"),
        ({"filter": np.uint8, "zero": 128}, "int8.uint8"),
        ({"filter": np.uint8, "zero": 77, "groups": 2}, "uint8.uint8"),
        ({"filter": np.int8, "zero": -3}, "uint8.uint8"),
        ({"output": np.float32}, "int8.float32"),
        ({"groups": 2, "between": [("LeakyRelu", "u", "v", {"alpha": 0.125})]}, "int8.uint8"),
        ({"between": []}, "int8.uint8"),
    ],
)
def test_layers_run_on_integers(tmp_path, options, types):
    path = save(tmp_path, **options)
    (layer,) = scan(path)
    assert str(layer.problem.quantization) == types
    assert layer.note == ""
    assert layer.fused[-1] == (
        "Relu_4" if "float" in types else f"QuantizeLinear_{4 + len(options.get('between', [1]))}"
    )
    data = RNG.integers(*(np.iinfo(options.get("data", np.uint8)).min, 127), (2, 4, 5, 6)).astype(layer.problem.dtype)
    (wanted,) = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, {"x": data})
    found = reference(layer.problem, data, layer.filter, layer.bias, layer.scaling)
    assert len(np.unique(wanted)) > 30
    if "float" in types:
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-4)
    else:  # the model adds up in float32, which may end on the other side of a tie
        assert np.abs(found - wanted).max() <= 1
        assert np.mean(found != wanted) < 0.01


FLOAT, UINT8, INT8 = np.float32, np.uint8, np.int8


@pytest.mark.parametrize(
    ("constants", "note"),
    [
        ({"xs": FLOAT(2.0**-70), "b": np.zeros(6, np.int32)}, "data_scale=8.470329472543003e-22: must be from 2**-60"),
        ({"xs": FLOAT(0)}, "data_scale=0.0: must be from 2**-60 to 2**40"),
        ({"xs": FLOAT(-0.03)}, "data_scale=-0.029999999329447746: must be from 2**-60 to 2**40"),
        ({"xs": FLOAT(np.inf)}, "data_scale=inf: must be from 2**-60 to 2**40"),
        ({"xs": np.float16(0.1)}, "DequantizeLinear_0: scale=float16: must be float32"),
        (
            {"xs": np.ones(4, FLOAT), "xz": np.zeros(4, UINT8)},
            "data_scale=(4,): must be one number",
        ),
        (
            {"xs": np.ones(0, FLOAT), "xz": np.zeros(0, UINT8)},
            "data_scale=(0,): must be one number",
        ),
        ({"xz": np.zeros(2, UINT8)}, "DequantizeLinear_0: zero_point=(2,): must have as many numbers as the scale, 1"),
        ({"xz": INT8(3)}, "DequantizeLinear_0: zero_point=int8: must be uint8, as the integers are"),
        ({"xz": FLOAT(3)}, "DequantizeLinear_0: zero_point=float32: must be uint8, as the integers are"),
        ({"ws": FLOAT([0.1, 0.1, np.nan, 0.1, 0.1, 0.1])}, "filter_scale=nan: must be from 2**-60 to 2**40"),
        ({"ws": -np.ones(6, FLOAT)}, "filter_scale=-1.0: must be from 2**-60 to 2**40"),
        ({"wz": np.full(6, 128, UINT8)}, "DequantizeLinear_1: zero_point=uint8: must be int8, as the integers are"),
        ({"bs": FLOAT([1e-4] * 6), "b": np.arange(6, dtype=np.int32)}, "must be int32 in units of data and filter"),
        ({"bs": np.full(6, np.nan, FLOAT)}, "bias=nan: must be int32 in units of data and filter"),
        (
            {"bs": np.full(6, 1e30, FLOAT), "b": np.ones(6, np.int32)},
            "bias=1.0000000150474662e+30: must be int32",
        ),
    ],
)
def test_others_stay_in_float32(tmp_path, constants, note):
    (layer,) = scan(save(tmp_path, output=np.float32, constants=constants))
    assert (layer.problem.dtype, layer.scaling, layer.filter.dtype) == ("float32", None, np.float32)
    assert layer.note.startswith("as float32: its data are dequantized, filter stored as int8: ")
    assert note in layer.note


@pytest.mark.parametrize(
    ("constants", "note"),
    [
        ({"ys": FLOAT(0)}, "output_scale=0.0: must be from 2**-60 to 2**40"),
        ({"ys": FLOAT(np.inf)}, "output_scale=inf: must be from 2**-60 to 2**40"),
        (
            {"ys": np.ones(6, FLOAT), "yz": np.zeros(6, UINT8)},
            "output_scale=(6,): must be one number",
        ),
        ({"yz": np.zeros(3, UINT8)}, "QuantizeLinear_5: zero_point=(3,): must have as many numbers as the scale, 1"),
        ({"yz": np.int16(300)}, "QuantizeLinear_5: zero_point=int16: must be uint8, as the integers are"),
    ],
)
def test_numbers_of_results_that_break_a_rule(tmp_path, constants, note):
    (layer,) = scan(save(tmp_path, constants=constants))
    assert layer.note.startswith(f"as float32: its data are dequantized, filter stored as int8: {note}")


@pytest.mark.parametrize(
    ("constants", "note"),
    [
        (
            {"ws": np.ones(5, FLOAT), "wz": np.zeros(5, INT8)},
            "filter_zero_point=(5,): must be one number or",
        ),
        (
            {"ws": np.ones(0, FLOAT), "wz": np.zeros(0, INT8)},
            "filter_zero_point=(0,): must be one number or",
        ),
        (
            {"ws": np.ones((1, 6), FLOAT), "wz": np.zeros((1, 6), INT8)},
            "scale=(1, 6): must be one number, or one",
        ),
        ({"wz": np.zeros(5, INT8)}, "DequantizeLinear_1: zero_point=(5,): must have as many numbers as the scale, 6"),
    ],
)
def test_filters_without_a_value(tmp_path, constants, note):
    """Their numbers do not fit, so the filter is no constant that is known."""
    (layer,) = scan(save(tmp_path, constants=constants))
    assert (layer.problem.dtype, layer.scaling, layer.filter) == ("float32", None, None)
    assert f"its filter is made by DequantizeLinear DequantizeLinear_1 at run time: {note}" in layer.note.replace(
        "DequantizeLinear_1: scale", "scale"
    )


def spoilt(path, index, change):
    """The model at a path after a change of one of its nodes."""
    model = onnx.load(path)
    change(model.graph.node[index])
    path.write_bytes(model.SerializeToString())
    return path


@pytest.mark.parametrize(
    ("index", "change"),
    [
        (0, lambda node: node.ClearField("input")),
        (0, lambda node: node.input.__delitem__(slice(1, None))),
        (1, lambda node: node.input.__delitem__(slice(1, None))),
        (1, lambda node: node.attribute[0].CopyFrom(helper.make_attribute("axis", "channels"))),
        (1, lambda node: node.attribute[0].CopyFrom(helper.make_attribute("axis", [1, 2]))),
        (1, lambda node: node.attribute[0].CopyFrom(helper.make_attribute("axis", 1.5))),
        (5, lambda node: node.input.__delitem__(slice(1, None))),
    ],
)
def test_nodes_that_are_no_operators_of_onnx_do_not_quantize(tmp_path, index, change):
    """They lack a scale, or have an axis that is no integer."""
    (layer,) = scan(spoilt(save(tmp_path), index, change))
    assert layer.problem.dtype == "float32" or layer.problem.output_dtype == "float32"


@pytest.mark.parametrize("operator", ["QLinearConvTranspose", "ConvTransposeWithDynamicPads"])
def test_operators_of_onnx_runtime_have_a_reason(tmp_path, operator):
    path = save(tmp_path)
    model = onnx.load(path)
    (node,) = (node for node in model.graph.node if node.op_type == "ConvTranspose")
    node.op_type, node.domain = operator, "com.ms.internal.nhwc"
    model.opset_import.append(helper.make_opsetid(node.domain, 1))
    onnx.save(model, path)
    (layer,) = scan(path)
    assert (layer.operator, layer.problem) == (operator, None)
    assert layer.reason.startswith("domain=com.ms.internal.nhwc: must be ONNX's")


def test_sums_beyond_32_bits_stay_in_float32(tmp_path):
    weights = np.zeros((4, 1, 150, 150), np.int8)
    path = save(
        tmp_path, constants={"w": weights, "b": np.zeros(1, np.int32)}, per_channel=False, up={"strides": [1, 1]}
    )
    (layer,) = scan(path)
    assert (layer.problem.dtype, layer.scaling) == ("float32", None)
    assert layer.note.endswith("at most 65793 products of up to 32640 in an output, and there are 90000")


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", '{"scale": 1}', "[" * 100_000, '{"data_scale": {}}', '{"data_scale": NaN}',
     '{"data_zero_point": 1e400}', '{"filter_scale": [1, 2, 3, 4, 5]}', '{"filter_zero_point": "0"}'],
)  # fmt: skip
def test_files_of_weights_with_other_numbers(tmp_path, text):
    """Text that is no scaling is refused as the file is read, numbers that break a rule as the layer is bound."""
    (layer,) = scan(save(tmp_path))
    broken = dataclasses.replace(layer, scaling=types.SimpleNamespace(text=text))
    write_weights([broken], tmp_path / "model.safetensors")
    with pytest.raises(
        (td.ArtifactError, td.ProblemError), match=r"ConvTranspose_3\.scaling|(scale|zero_point)=.*: must "
    ):
        td.load(tmp_path, fallback="reference").layer(layer.name)


def test_a_result_with_other_users_is_float32(tmp_path):
    path = save(tmp_path, between=[("Relu", "u", "v", {}), ("Identity", "v", "z", {}), ("Identity", "v", "t", {})])
    (layer,) = scan(path)
    assert str(layer.problem.quantization) == "int8.float32"


def test_layers_are_found_by_name_with_their_numbers(tmp_path):
    (layer,) = scan(save(tmp_path, filter=np.uint8, zero=9))
    write_weights([layer], tmp_path / "model.safetensors")
    library = td.load(tmp_path, fallback="reference")
    data = RNG.integers(0, 256, layer.problem.data_shape).astype(np.uint8)
    wanted = reference(layer.problem, data, layer.filter, layer.bias, layer.scaling)
    np.testing.assert_array_equal(library.layer(layer.name)(data), wanted)
    np.testing.assert_array_equal(layer.bind(library)(data), wanted)
    content = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(content.replace(b"data_scale", b"fata_scale"))
    with pytest.raises(td.ArtifactError, match=r"ConvTranspose_3\.scaling"):
        td.load(tmp_path, fallback="reference").layer(layer.name)
