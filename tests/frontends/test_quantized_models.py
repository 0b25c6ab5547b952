"""Quantized models: their layers become quantized problems with their numbers, and compute what the models do."""

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
        ("ConvTranspose", "xf wf bf", "u", UP | {"group": groups}), *changes.pop("between", [("Relu", "u", "v", {})]),
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


@pytest.mark.parametrize(
    ("constants", "note"),
    [
        (
            {"xs": np.float32(2.0**-70), "b": np.zeros(6, np.int32)},
            "data_scale=8.470329472543003e-22: must be from 2**-60 to 2**40",
        ),
        ({"xs": np.float32(0)}, "data_scale=0.0: must be from 2**-60 to 2**40"),
        ({"xs": np.float32(-0.03)}, "data_scale=-0.029999999329447746: must be from 2**-60 to 2**40"),
        ({"ws": np.float32([0.1, 0.1, np.nan, 0.1, 0.1, 0.1])}, "filter_scale=nan: must be from 2**-60 to 2**40"),
        ({"bs": np.float32([1e-4] * 6)}, "its bias is not one of int32 in units of data and filter"),
    ],
)
def test_others_stay_in_float32(tmp_path, constants, note):
    (layer,) = scan(save(tmp_path, output=np.float32, constants=constants))
    assert layer.problem.dtype == "float32"
    assert layer.note == f"as float32: its data are dequantized, filter stored as int8: {note}"


@pytest.mark.parametrize(
    ("constants", "note"),
    [
        ({"ys": np.float32(0)}, "output_scale=0.0: must be from 2**-60 to 2**40"),
        ({"ys": np.float32(np.inf)}, "output_scale=inf: must be from 2**-60 to 2**40"),
        ({"yz": np.int16(300)}, "integers of uint8, int8, int16 are not all int8 or uint8"),
    ],
)
def test_numbers_of_results_that_break_a_rule(tmp_path, constants, note):
    (layer,) = scan(save(tmp_path, constants=constants))
    assert layer.note == f"as float32: its data are dequantized, filter stored as int8: {note}"


def test_scales_of_another_length(tmp_path):
    """The filter is then no constant that is known, or its scale none of the data's."""
    (layer,) = scan(save(tmp_path, constants={"ws": np.ones(5, np.float32), "wz": np.zeros(5, np.int8)}))
    assert (layer.scaling, layer.filter) == (None, None)
    (layer,) = scan(save(tmp_path, constants={"xs": np.ones(4, np.float32), "xz": np.zeros(4, np.uint8)}))
    assert layer.note.endswith("data and results have one scale each in quantized problems")


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
