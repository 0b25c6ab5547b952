"""ONNX models: what a scan finds computes what ONNX Runtime computes."""

import dataclasses
import importlib.util
import re
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from support.tolerances import assert_close

from tvm_deconv import Epilogue, SourceError
from tvm_deconv.frontends import scan
from tvm_deconv.problem.reference import reference

ROOT = Path(__file__).parents[2]
DECODER = ROOT / "examples" / "decoder.onnx"
RNG = np.random.default_rng(0)


def uniform(*shape, dtype=np.float32):
    return RNG.uniform(-1, 1, shape).astype(dtype)


def script(name):
    """A script of the repository as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def save(folder, nodes, constants, outputs=("y",), shape=(2, 4, 5, 6), opset=17, type=TensorProto.FLOAT, **parts):
    """A model from "x" to `outputs`; `nodes` are (operator, inputs, output, attributes)."""
    made = [
        helper.make_node(operator, inputs.split(), output.split(), name=f"{operator}_{index}", **attributes)
        for index, (operator, inputs, output, attributes) in enumerate(nodes)
    ]
    graph = helper.make_graph(
        made,
        "model",
        [helper.make_tensor_value_info("x", type, shape)],
        [helper.make_tensor_value_info(name, type, None) for name in outputs],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("mine", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10, **parts)
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    return folder / "model.onnx"


def runtime_outputs(model, feeds):
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    return session.run(None, feeds)


def check(path, expected_epilogue, fused, dtype=np.float32, rtol=1e-4):
    (layer,) = scan(path)
    p = layer.problem
    assert p.epilogue == expected_epilogue
    assert len(layer.fused) == fused
    data = uniform(*p.data_shape, dtype=dtype)
    (expected,) = runtime_outputs(path, {"x": data})
    assert expected.shape == p.output_shape
    np.testing.assert_allclose(reference(p, data, layer.filter, layer.bias), expected, rtol=rtol, atol=rtol / 10)
    return layer


def test_decoder():
    layers = scan(DECODER)
    assert [(layer.name, str(layer.problem.epilogue), layer.problem.groups) for layer in layers] == [
        ("up0", "bias+relu", 1),
        ("up1", "bias+leaky_relu(0.2)", 4),
        ("up2", "bias+silu", 1),
        ("up3", "bias+sigmoid", 1),
    ]
    assert [layer.fused for layer in layers] == [
        ("up0.bn", "up0.relu"), ("up1.bn", "up1.leaky_relu"), ("up2.gate", "up2.silu"), ("image",),
    ]  # fmt: skip


def test_decoder_layer_by_layer():
    layers = scan(DECODER)
    model = onnx.load(DECODER)
    inputs = {node.name: node.input[0] for node in model.graph.node}
    taps = [name for layer in layers for name in (inputs[layer.name], layer.fused[-1]) if name != "code"]
    del model.graph.output[:]
    model.graph.output.extend(helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in taps)
    feeds = {"code": uniform(1, 32, 8, 8), "skip": uniform(1, 16, 32, 32)}
    values = feeds | dict(zip(taps, runtime_outputs(model.SerializeToString(), feeds), strict=True))
    for layer in layers:
        got = reference(layer.problem, values[inputs[layer.name]], layer.filter, layer.bias)
        assert_close(got, values[layer.fused[-1]])


def test_decoder_is_what_the_script_exports(tmp_path):
    assert DECODER.stat().st_size < 300_000
    (tmp_path / "model.onnx").write_bytes(script("export_decoder").decoder(seed=0).SerializeToString())
    other = script("export_decoder").decoder(seed=1).SerializeToString()
    for ours, theirs in zip(scan(DECODER), scan(tmp_path / "model.onnx"), strict=True):
        assert ours.problem == theirs.problem
        np.testing.assert_array_equal(ours.filter, theirs.filter)
        np.testing.assert_array_equal(ours.bias, theirs.bias)
    assert other != (tmp_path / "model.onnx").read_bytes()


def test_example_ir_is_what_the_script_writes(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["write_example_ir.py", "--output", str(tmp_path)])
    script("write_example_ir").main()
    assert len(list(tmp_path.iterdir())) == 4
    for path in tmp_path.iterdir():
        assert path.read_bytes() == (ROOT / "examples" / path.name).read_bytes()


UP = {"strides": [2, 2]}
ATTRIBUTES = {
    "plain": {},
    "pads": {"pads": [1, 0, 0, 1], "output_padding": [1, 0], "kernel_shape": [3, 2], "dilations": [1, 3]},
    "same_upper": {"auto_pad": "SAME_UPPER"},
    "valid": {"auto_pad": "VALID"},
    "output_shape": {"output_shape": [10, 13]},
}


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("case", ATTRIBUTES)
def test_attributes(tmp_path, case, group):
    constants = {"w": uniform(4, 3, 3, 2), "b": uniform(3 * group)}
    nodes = [("ConvTranspose", "x w b", "y", UP | {"group": group} | ATTRIBUTES[case])]
    layer = check(save(tmp_path, nodes, constants), Epilogue(bias=True), 0)
    assert layer.problem.groups == group


@pytest.mark.parametrize(("shape", "kernel"), [((1, 4, 7), (4,)), ((1, 4, 3, 4, 2), (3, 2, 1))])
def test_ranks(tmp_path, shape, kernel):
    check(
        save(tmp_path, [("ConvTranspose", "x w", "y", {})], {"w": uniform(4, 3, *kernel)}, shape=shape), Epilogue(), 0
    )


BN = {"g": uniform(6), "beta": uniform(6), "mean": uniform(6), "var": 0.5 + uniform(6) ** 2}
SCALARS = {"low": np.float32(-0.5), "high": np.float32([0.75]), "zero": np.float32(0), "slope": np.float32([[[0.1]]])}
FOLLOWERS = {
    "relu": ([("Relu", "u", "y", {})], "relu"),
    "leaky": ([("LeakyRelu", "u", "y", {"alpha": 0.2})], "leaky_relu(0.2)"),
    "leaky by default": ([("LeakyRelu", "u", "y", {})], "leaky_relu(0.01)"),
    "prelu": ([("PRelu", "u slope", "y", {})], "leaky_relu(0.1)"),
    "sigmoid": ([("Sigmoid", "u", "y", {})], "sigmoid"),
    "tanh": ([("Tanh", "u", "y", {})], "tanh"),
    "gelu": ([("Gelu", "u", "y", {})], "gelu"),
    "silu": ([("Sigmoid", "u", "s", {}), ("Mul", "u s", "y", {})], "silu"),
    "clip": ([("Clip", "u low high", "y", {})], "clip(-0.5,0.75)"),
    "elu": ([("Elu", "u", "y", {"alpha": 0.7})], "elu(0.7)"),
    "elu by default": ([("Elu", "u", "y", {})], "elu(1.0)"),
    "hardswish": ([("HardSwish", "u", "y", {})], "hardswish"),
    "mish": ([("Mish", "u", "y", {})], "mish"),
    "mish as a product": (
        [("Softplus", "u", "s", {}), ("Tanh", "s", "t", {}), ("Mul", "u t", "y", {})],
        "mish",
    ),
    "softplus": ([("Softplus", "u", "y", {})], "softplus"),
    "clip at zero": ([("Clip", "u zero", "y", {})], "relu"),
    "add": ([("Add", "c u", "y", {})], "bias"),
    "sub": ([("Sub", "u c", "y", {})], "bias"),
    "mul": ([("Mul", "u c", "y", {})], "none"),
    "batch norm": ([("BatchNormalization", "u g beta mean var", "y", {"epsilon": 1e-3})], "bias"),
    "all": (
        [
            ("Add", "u c", "a", {}),
            ("BatchNormalization", "a g beta mean var", "n", {"momentum": 0.9}),
            ("Mul", "n c", "m", {}),
            ("Relu", "m", "y", {}),
        ],
        "bias+relu",
    ),
}


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("case", FOLLOWERS)
def test_followers(tmp_path, case, group, biased):
    nodes, expected = FOLLOWERS[case]
    constants = {"w": uniform(4, 6 // group, 3, 2), "b": uniform(6), "c": uniform(1, 6, 1, 1)} | BN | SCALARS
    up = ("ConvTranspose", "x w b" if biased else "x w", "u", UP | {"group": group})
    path = save(tmp_path, [up, *nodes], constants, opset=20)
    epilogue = Epilogue.parse(expected)
    expected = dataclasses.replace(epilogue, bias=biased or epilogue.bias)
    check(path, expected, len(nodes))


NOT_FUSED = {
    "hard sigmoid": [("HardSigmoid", "u", "y", {})],
    "chain without its product": [("Softplus", "u", "s", {}), ("Tanh", "s", "t", {}), ("Add", "u t", "y", {})],
    "chain with another user": [
        ("Softplus", "u", "s", {}),
        ("Tanh", "s", "t", {}),
        ("Add", "s t", "z", {}),
        ("Mul", "u t", "y", {}),
    ],
    "gates in another order": [("Tanh", "u", "t", {}), ("Softplus", "t", "s", {}), ("Mul", "u s", "y", {})],
    "tanh gelu": [("Gelu", "u", "y", {"approximate": "tanh"})],
    "training": [("BatchNormalization", "u g beta mean var", "y m v", {"training_mode": 1})],
    "slopes": [("PRelu", "u c", "y", {})],
    "per position": [("Add", "u position", "y", {})],
    "computed": [("Relu", "c", "k", {}), ("Add", "u k", "y", {})],
    "bound of run time": [("ReduceMax", "x", "k", {"keepdims": 0}), ("Clip", "u k", "y", {})],
    "bound and data": [("ReduceMin", "u", "k", {"keepdims": 0}), ("Clip", "u k", "y", {})],
    "bound of another": [("Relu", "u", "y", {}), ("ReduceMin", "u", "k", {"keepdims": 0}), ("Clip", "x k", "z", {})],
    "bounds that cross": [("Clip", "u high low", "y", {})],
    "twice": [("Mul", "u u", "y", {})],
    "gate of another": [("Sigmoid", "u", "s", {}), ("Add", "u s", "y", {})],
    "gate of three factors": [("Sigmoid", "u", "s", {}), ("Mul", "u s c", "y", {})],
    "other domain": [("Relu", "u", "y", {"domain": "mine"})],
}


@pytest.mark.parametrize("case", NOT_FUSED)
def test_not_fused(tmp_path, case):
    constants = {"w": uniform(4, 6, 3, 2), "c": uniform(1, 6, 1, 1), "position": uniform(12)} | BN | SCALARS
    path = save(tmp_path, [("ConvTranspose", "x w", "u", UP), *NOT_FUSED[case]], constants, opset=20)
    (layer,) = scan(path)
    assert (layer.problem.epilogue, layer.fused, layer.reason) == (Epilogue(), (), "")


def test_old_opsets_are_not_fused(tmp_path):
    nodes = [("ConvTranspose", "x w", "u", UP), ("BatchNormalization", "u g beta mean var", "y", {})]
    (layer,) = scan(save(tmp_path, nodes, {"w": uniform(4, 6, 3, 2)} | BN, opset=6))
    assert layer.problem.epilogue == Epilogue()


def test_bounds_of_clip_6_are_attributes(tmp_path):
    nodes = [("ConvTranspose", "x w", "u", UP), ("Clip", "u", "y", {"min": 0.0, "max": 6.0})]
    check(save(tmp_path, nodes, {"w": uniform(4, 6, 3, 2)}, opset=10), Epilogue(activation="clip"), 1)


def test_a_model_output_is_a_user(tmp_path):
    nodes = [("ConvTranspose", "x w", "u", UP), ("Relu", "u", "y", {})]
    (layer,) = scan(save(tmp_path, nodes, {"w": uniform(4, 6, 3, 2)}, outputs=("u", "y")))
    assert layer.problem.epilogue == Epilogue()


def test_scales_of_batch_norm_that_overflow_stay(tmp_path):
    nodes = [("ConvTranspose", "x w", "u", UP), ("BatchNormalization", "u g beta mean var", "y", {})]
    constants = {"w": np.full((4, 6, 3, 2), 1e38, np.float32)} | BN | {"g": np.full(6, 100, np.float32)}
    (layer,) = scan(save(tmp_path, nodes, constants))
    assert (layer.problem.epilogue, layer.fused) == (Epilogue(), ())


def test_bias_of_run_time(tmp_path):
    nodes = [("Relu", "b", "r", {}), ("ConvTranspose", "x w r", "u", UP), ("Relu", "u", "y", {})]
    (layer,) = scan(save(tmp_path, nodes, {"w": uniform(4, 6, 3, 2), "b": uniform(6)}))
    assert layer.problem.epilogue == Epilogue(True, "relu")
    assert layer.bias is None
    assert layer.notes == "its bias is made by Relu Relu_0 at run time"
    nodes[2] = ("Add", "u c", "y", {})
    (layer,) = scan(save(tmp_path, nodes, {"w": uniform(4, 6, 3, 2), "b": uniform(6), "c": uniform(6, 1, 1)}))
    assert (layer.problem.epilogue, layer.fused) == (Epilogue(bias=True), ())


def test_bias_that_is_an_input(tmp_path):
    (layer,) = scan(save(tmp_path, [("ConvTranspose", "x w x", "y", UP)], {"w": uniform(4, 6, 3, 2)}))
    assert layer.notes == "its bias is made by an input at run time"


def test_a_bias_of_another_length_leaves_its_layer_uncovered(tmp_path):
    nodes = [("ConvTranspose", "x w b", "u", UP), ("ConvTranspose", "x w", "y", UP)]
    bad, good = scan(save(tmp_path, nodes, {"w": uniform(4, 3, 3, 2), "b": uniform(7)}))
    assert (bad.problem, bad.reason) == (None, "bias=(7,): must have shape (3,)")
    assert good.problem is not None


def test_constant_nodes_identity_and_cast(tmp_path):
    nodes = [
        ("Constant", "", "half", {"value": numpy_helper.from_array(uniform(4, 3, 3, 2, dtype=np.float16))}),
        ("Cast", "half", "single", {"to": TensorProto.FLOAT}),
        ("Identity", "single", "w", {}),
        ("ConvTranspose", "x w", "y", UP),
    ]
    layer = check(save(tmp_path, nodes, {}), Epilogue(), 0)
    assert layer.filter.dtype == np.float32


#: Shapes that the nodes below give to one filter of [1, 1, 3, 2].
EXPANDED = {
    "all channels": ([4, 1, 1, 1], (4, 1, 3, 2)),
    "kept extents": ([4, 1, -1, -1], (4, 1, 3, 2)),
    "more taps": ([4, 1, 3, 4], None),
    "no extent": ([4, 0, 3, 2], None),
    "many": ([1 << 40, 1, 3, 2], "too many"),
    "many axes": ([1] * 9, None),
}


@pytest.mark.parametrize("case", EXPANDED)
def test_filters_that_are_expanded(case, tmp_path):
    """PyTorch's exporter writes `filter.expand(4, -1, -1, -1)` so: extents of -1 are replaced by 1."""
    shape, expected = EXPANDED[case]
    ones = numpy_helper.from_array(np.ones(1, np.int64))
    nodes = [
        ("ConstantOfShape", "rank", "ones", {"value": ones}), ("Mul", "ones minus", "unknown", {}),
        ("Equal", "shape unknown", "kept", {}), ("Where", "kept ones shape", "extents", {}),
        ("Expand", "taps extents", "w", {}), ("ConvTranspose", "x w", "u", UP | {"group": 4}), ("Relu", "u", "y", {}),
    ]  # fmt: skip
    constants = {
        "rank": np.int64([len(shape)]), "minus": np.int64(-1), "shape": np.int64(shape), "taps": uniform(1, 1, 3, 2),
    }  # fmt: skip
    path = save(tmp_path, nodes, constants)
    if expected == "too many":
        with pytest.raises(SourceError, match="all constants of the layers"):
            scan(path)
    elif expected is None:
        (layer,) = scan(path)
        assert layer.filter is None
        assert "filter" in layer.reason
    else:
        layer = check(path, Epilogue(activation="relu"), 1)
        assert layer.filter.shape == expected


@pytest.mark.parametrize("dtype", [np.int8, np.uint8])
@pytest.mark.parametrize("axis", [None, 1, -3, 0])
@pytest.mark.parametrize("zero", [False, True])
def test_filters_of_quantized_models(tmp_path, dtype, axis, zero):
    """A layer between DequantizeLinear and QuantizeLinear is one of float32, with the filter that the integers mean."""
    count = () if axis is None else (4 if axis == 0 else 3,)
    constants = {
        "xs": np.float32(0.05), "xz": np.uint8(120), "q": RNG.integers(0, 99, (4, 3, 3, 2)).astype(dtype),
        "s": 0.01 + 0.01 * np.abs(uniform(*count)), "z": RNG.integers(1, 9, count).astype(dtype),
        "bq": np.int32([100, -50, 7]), "bs": np.float32([0.01, 0.02, 0.03]),
    }  # fmt: skip
    axes = {} if axis is None else {"axis": axis}
    nodes = [
        ("QuantizeLinear", "x xs xz", "xq", {}), ("DequantizeLinear", "xq xs xz", "d", {}),
        ("DequantizeLinear", "q s z" if zero else "q s", "w", axes), ("DequantizeLinear", "bq bs", "b", {"axis": 0}),
        ("ConvTranspose", "d w b", "y", UP),
    ]  # fmt: skip
    path = save(tmp_path, nodes, constants)
    (layer,) = scan(path)
    stored = f"as float32: its data are dequantized, filter stored as {np.dtype(dtype).name}"
    other = "scales along another axis" if axis == 0 else "must be int32 in units of data and filter"
    assert layer.note.startswith(f"{stored}: ")
    assert layer.note.endswith(other)
    model = onnx.load(path)
    model.graph.output.append(helper.make_tensor_value_info("d", TensorProto.FLOAT, None))
    y, data = runtime_outputs(model.SerializeToString(), {"x": uniform(2, 4, 5, 6)})
    assert_close(reference(layer.problem, data, layer.filter, layer.bias), y)


@pytest.mark.parametrize(
    ("nodes", "note"),
    [
        ([("Relu", "w", "v", {})], "its filter is made by Relu Relu_0 at run time"),
        ([("DequantizeLinear", "q s x", "v", {})], "made by DequantizeLinear DequantizeLinear_0 at run time"),
        ([("DequantizeLinear", "q many", "v", {"axis": 1})], "made by DequantizeLinear DequantizeLinear_0"),
        ([("Cast", "q", "v", {"to": 1})], "filter stored as int8"),
        ([("Identity", "w", "v", {})], ""),
    ],
)
def test_notes_tell_what_makes_the_filter(tmp_path, nodes, note):
    constants = {"w": uniform(4, 3, 3, 2), "q": np.ones((4, 3, 3, 2), np.int8), "s": np.float32(1), "many": uniform(7)}
    shapes = {"shape": (4, 4, 3, 2)} if "x" in nodes[0][1] else {}
    (layer,) = scan(save(tmp_path, [*nodes, ("ConvTranspose", "x v", "y", UP)], constants, **shapes))
    assert (layer.filter is None) == ("run time" in layer.note)
    assert note in layer.note
    assert bool(note) == bool(layer.note)


@pytest.mark.parametrize("dtype", ["float16", "float64", "bfloat16"])
def test_storage_types(tmp_path, dtype):
    numpy_type = np.dtype(getattr(ml_dtypes, dtype, dtype))
    type = helper.np_dtype_to_tensor_dtype(numpy_type)
    nodes = [("ConvTranspose", "x w b", "u", UP), ("LeakyRelu", "u", "y", {"alpha": 0.1})]
    constants = {"w": uniform(4, 3, 3, 2, dtype=numpy_type), "b": uniform(3, dtype=numpy_type)}
    (layer,) = scan(save(tmp_path, nodes, constants, opset=22, type=type))
    assert layer.problem.dtype == layer.filter.dtype.name == dtype
    assert layer.bias.dtype.name == layer.problem.accumulate_dtype
    np.testing.assert_array_equal(layer.bias, constants["b"].astype(layer.bias.dtype))
    assert layer.problem.epilogue.alpha == (float(np.float32(0.1)) if dtype == "float64" else 0.1)


def test_typed_fields_instead_of_raw_data(tmp_path):
    path = save(tmp_path, [("ConvTranspose", "x w", "y", UP)], {"w": uniform(4, 3, 3, 2)})
    model = onnx.load(path)
    values = numpy_helper.to_array(model.graph.initializer[0])
    model.graph.initializer[0].CopyFrom(helper.make_tensor("w", TensorProto.FLOAT, [4, 3, 3, 2], values.ravel()))
    path.write_bytes(model.SerializeToString())
    np.testing.assert_array_equal(check(path, Epilogue(), 0).filter, values)
    del model.graph.initializer[0].float_data[5:]
    path.write_bytes(model.SerializeToString())
    with pytest.raises(SourceError, match=r"shape=\(4, 3, 3, 2\): must fit the values of w"):
        scan(path)


def external(folder, location, values, **facts):
    """A model whose filter lies in another file."""
    path = save(folder, [("ConvTranspose", "x w", "y", UP)], {"w": values})
    model = onnx.load(path)
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in ({"location": location} | facts).items():
        tensor.external_data.add(key=key, value=str(value))
    path.write_bytes(model.SerializeToString())
    return path


def test_external_data(tmp_path):
    values = uniform(4, 3, 3, 2)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "weights").write_bytes(b"12345678" + values.tobytes() + b"rest")
    path = external(tmp_path, "sub/weights", values, offset=8, length=values.nbytes)
    np.testing.assert_array_equal(check(path, Epilogue(), 0).filter, values)


@pytest.mark.parametrize(
    ("location", "facts", "text"),
    [
        ("../weights", {}, r"external_data='../weights': must lie in the folder of the model"),
        ("/etc/hostname", {}, r"external_data='/etc/hostname': must lie in the folder of the model"),
        ("link", {}, r"external_data='link': must lie in the folder of the model"),
        ("none", {}, r"source=.*none: must be a file that can be read"),
        ("", {}, r"must be a file that can be read \(Is a directory\)"),
        ("short", {}, r"shape=\(4, 3, 3, 2\): must fit the 3 bytes"),
        ("short", {"offset": 1, "length": 288}, r"offset=\(1, 288\): must lie within the 3 bytes"),
        ("short", {"offset": 9}, r"offset=\(9, -6\): must lie within the 3 bytes"),
        ("short", {"offset": "x"}, r"external_data=.*: must hold location, offset and length of w"),
    ],
)
def test_bad_external_data(tmp_path, location, facts, text):
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "weights").write_bytes(bytes(288))
    (folder / "short").write_bytes(b"123")
    (folder / "link").symlink_to(tmp_path / "weights")
    with pytest.raises(SourceError, match=text):
        scan(external(folder, location, uniform(4, 3, 3, 2), **facts))


def test_functions_are_inlined(tmp_path):
    body = [helper.make_node("ConvTranspose", ["a", "b"], ["c"], name="up", strides=[2, 2])]
    function = helper.make_function("mine", "Up", ["a", "b"], ["c"], body, [helper.make_opsetid("", 17)])
    nodes, constants = [("Up", "x w", "y", {"domain": "mine"})], {"w": uniform(4, 3, 3, 2)}
    check(save(tmp_path, nodes, constants, functions=[function]), Epilogue(), 0)
    (layer,) = scan(save(tmp_path, nodes, constants, functions=[function], opset=18))
    assert (layer.name, layer.reason) == ("up", "stands in the function Up, which has another opset")


def test_bodies_are_scanned_and_use_what_is_outside(tmp_path):
    def branch(name, activation):
        nodes = [
            helper.make_node("ConvTranspose", ["u", "w"], [f"{name}_up"], name="inner"),
            helper.make_node(activation, [f"{name}_up"], [name]),
        ]
        return helper.make_graph(nodes, name, [], [helper.make_tensor_value_info(name, TensorProto.FLOAT, None)])

    nodes = [
        ("ConvTranspose", "x w", "u", UP),
        ("If", "flag", "y", {"then_branch": branch("yes", "Relu"), "else_branch": branch("no", "Tanh")}),
        ("Relu", "u", "z", {}),
    ]
    constants = {"w": uniform(4, 4, 3, 2), "flag": np.array(True)}
    layers = scan(save(tmp_path, nodes, constants, outputs=("y", "z")))
    # The If uses u too, so that the Relu of z stays apart.
    assert [(layer.name, layer.problem.epilogue.activation) for layer in layers] == [
        ("ConvTranspose_0", "none"), ("inner", "tanh"), ("inner_2", "relu"),
    ]  # fmt: skip
    assert all(layer.filter is not None for layer in layers)


def test_names_come_from_outputs_where_nodes_have_none(tmp_path):
    path = save(tmp_path, [("ConvTranspose", "x w", "y", UP)], {"w": uniform(4, 3, 3, 2)})
    model = onnx.load(path)
    model.graph.node[0].name = ""
    path.write_bytes(model.SerializeToString())
    assert scan(path)[0].name == "y"


NOT_COVERED = {
    "output_shape": (
        {"shape": (2, 4, "h", 6), "output_shape": [10, 12]},
        r"output_shape=\[10, 12\]: must be any just where a spatial extent of the data is any; .*",
    ),
    "type": ({"type": TensorProto.INT8}, r"data and filter must both be one of float32, .*: type 3 and float32"),
    "mixed": ({"type": TensorProto.FLOAT16}, r"data and filter must both be one of .*: float16 and float32"),
    "stride": ({"strides": [0, 2]}, r"strides=\[0, 2\]: every element must be at least 1"),
    "pads": ({"pads": [1, 2]}, r"pads=\(1, 2\): must have"),
    "group": ({"group": 3}, r"group=3: must divide the 4 channels"),
    "floats": ({"strides": [0.5, 2.0]}, r"strides=\[0.5, 2.0\]: every element must be an integer"),
    "auto_pad": ({"auto_pad": "SAME"}, r"auto_pad='SAME': must be one of"),
    "unknown": ({"padding": 1}, r"has unknown attributes: padding"),
}


@pytest.mark.parametrize("case", NOT_COVERED)
def test_not_covered(tmp_path, case):
    changes, reason = NOT_COVERED[case]
    graph = {name: value for name, value in changes.items() if name in ("shape", "type")}
    attributes = {name: value for name, value in changes.items() if name not in graph}
    (layer,) = scan(save(tmp_path, [("ConvTranspose", "x w", "y", attributes)], {"w": uniform(4, 3, 3, 2)}, **graph))
    assert layer.problem is None
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(layer.reason)


DYNAMIC = {
    "batch": (("n", 4, 5, 6), "nany-g1-i4-o3-x5x6-"),
    "channels": ((2, "c", 5, 6), "n2-g1-i4-o3-x5x6-"),
    "one extent": ((2, 4, "h", 6), "n2-g1-i4-o3-xanyx6-"),
    "all": (("n", "c", "h", "w"), "nany-g1-i4-o3-xanyxany-"),
    "nameless": ((None, 4, None, None), "nany-g1-i4-o3-xanyxany-"),
    "rank": (None, "nany-g1-i4-o3-xanyxany-"),
}


@pytest.mark.parametrize("case", DYNAMIC)
def test_free_extents(tmp_path, case):
    """They are what ONNX Runtime computes, at several extents."""
    shape, key = DYNAMIC[case]
    nodes = [("ConvTranspose", "x w b", "u", UP | {"pads": [1, 0, 0, 1]}), ("Relu", "u", "y", {})]
    constants = {"w": uniform(4, 3, 3, 2), "b": uniform(3)}
    path = save(tmp_path, nodes, constants, shape=shape)
    (layer,) = scan(path)
    assert layer.problem.key.startswith(key)
    assert layer.problem.epilogue == Epilogue(True, "relu")
    for extents in ((2, 4, 5, 6), (1, 4, 1, 6), (3, 4, 9, 20)):
        data = uniform(*(e if isinstance(e, int) else g for e, g in zip(shape or [None] * 4, extents, strict=True)))
        (expected,) = runtime_outputs(path, {"x": data})
        problem = layer.problem.at(data.shape) if layer.problem.dynamic else layer.problem
        assert_close(reference(problem, data, layer.filter, layer.bias), expected)


def test_three_free_axes_are_not_covered(tmp_path):
    path = save(tmp_path, [("ConvTranspose", "x w", "y", {})], {"w": uniform(4, 3, 2, 2, 2)}, shape=(1, 4, "d", 5, 6))
    (layer,) = scan(path)
    assert re.search(r"extents may be any with 1 or 2 axes only; the data are \[1, 4, d, 5, 6\]$", layer.reason)


def vocoder(folder, shape):
    """Two layers in a row, with a Conv that pads between; the second works at eight times the frames."""
    nodes = [
        ("ConvTranspose", "x w", "u", {"strides": [8], "pads": [4, 4]}),
        ("LeakyRelu", "u", "a", {"alpha": 0.1}),
        ("Conv", "a c", "v", {"pads": [2, 2]}),
        ("ConvTranspose", "v w2", "y", {"strides": [2], "pads": [1, 1]}),
    ]
    constants = {"w": uniform(4, 6, 16), "c": uniform(6, 6, 5), "w2": uniform(6, 3, 4)}
    return save(folder, nodes, constants, shape=shape)


@pytest.mark.parametrize(
    ("name", "limits", "buckets"),
    [
        ("frames", (1, 2000), [(31, 250, 2000), (31 * 8, 250 * 8, 16000)]),
        ("x.2", (1, 2000), [(31, 250, 2000), (31 * 8, 250 * 8, 16000)]),
        ("frames", (100, 2000), [(100, 250, 2000), (800, 2000, 16000)]),
        ("frames", (64, 64), [(64,), (512,)]),
        (None, None, [(), ()]),
    ],
)
def test_buckets_follow_from_ranges(tmp_path, name, limits, buckets):
    layers = scan(vocoder(tmp_path, ("n", 4, "frames")), extents={name: limits} if name else None)
    assert [layer.problem.buckets for layer in layers] == [(b,) if b else () for b in buckets]
    assert [layer.problem.dynamic for layer in layers] == [(0, 1), (0, 1)]
    assert [layer.notes for layer in layers] == ["any batch and spatial axis 0"] * 2


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("dynamo", [False, True])
def test_exports_of_pytorch_with_free_extents(tmp_path, dynamo):
    torch = pytest.importorskip("torch")
    if dynamo:
        pytest.importorskip("onnxscript")
    model = torch.nn.Sequential(
        torch.nn.ConvTranspose1d(4, 6, 16, 8, 4), torch.nn.LeakyReLU(0.1), torch.nn.Conv1d(6, 6, 5, padding=2),
        torch.nn.ConvTranspose1d(6, 3, 4, 2, 1),
    ).eval()  # fmt: skip
    names = {0: "n", 2: "frames"}
    free = {"dynamic_axes": {"x": names}}
    if dynamo:
        free = {
            "dynamic_shapes": {"input": {0: torch.export.Dim.DYNAMIC, 2: torch.export.Dim("frames", min=4, max=99)}}
        }
    path = tmp_path / "model.onnx"
    torch.onnx.export(model, (torch.randn(1, 4, 20),), str(path), dynamo=dynamo, input_names=["x"], **free)
    layers = scan(path, extents={"frames": (1, 2000)})
    assert [layer.problem.artifact_key for layer in layers] == [
        "nany-g1-i4-o6-xany(31,250,2000)-k16-s8-d1-p4-yany+8-float32-NCX-GIOX-bias+leaky_relu(0.1)",
        "nany-g1-i6-o3-xany(248,2000,16000)-k4-s2-d1-p1-yany+2-float32-NCX-GIOX-bias",
    ]


def test_buckets_of_two_axes(tmp_path):
    path = save(tmp_path, [("ConvTranspose", "x w", "y", UP)], {"w": uniform(4, 3, 2, 2)}, shape=(1, 4, "h", "w_"))
    (layer,) = scan(path, extents={"h": (1, 256), "w_": (40, 100)})
    assert layer.problem.buckets == ((32, 256), (40, 100))


@pytest.mark.parametrize(
    ("extents", "text"),
    [
        ({"time": (1, 9)}, r"extent='time': must be a free extent of .*model.onnx: n, x.0, frames, x.2$"),
        ({"x.1": (1, 9)}, r"extent='x.1': must be a free extent"),
        ({"frames": (9, 1)}, r"extent='frames=9..1': must be a range of extents from 1 up, lowest first$"),
        ({"frames": (0, 1)}, r"extent='frames=0..1': must be a range"),
        ({"frames": 9}, r"extent='frames=9': must be a range"),
        ({"frames": (1, 8, 9)}, r"extent='frames=\(1, 8, 9\)': must be a range"),
        ({"frames": (1.5, 9)}, r"extent='frames=1.5..9': must be a range"),
        ({"frames": ("1", "9")}, r"extent='frames=1..9': must be a range"),
        (5, r"extents=5: must be a mapping from names to ranges$"),
    ],
)
def test_bad_ranges(tmp_path, extents, text):
    with pytest.raises(SourceError, match=text):
        scan(vocoder(tmp_path, ("n", 4, "frames")), extents=extents)


def test_shapes_follow_from_inference(tmp_path):
    nodes = [
        ("Shape", "x", "shape", {}),
        ("Gather", "shape one", "channels", {}),
        ("Concat", "two channels rest", "target", {"axis": 0}),
        ("Reshape", "x target", "r", {}),
        ("ConvTranspose", "r w", "y", UP),
    ]
    constants = {"one": np.array([1]), "two": np.array([2]), "rest": np.array([10, -1]), "w": uniform(4, 3, 3, 2)}
    (layer,) = scan(save(tmp_path, nodes, constants))
    assert layer.problem.data_shape == (2, 4, 10, 3)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "must be an ONNX model"),
        (b"\x08\x07", "must be an ONNX model"),
        (b"not protobuf", "must be a valid ONNX model: "),
        (b"\x0a" * 1000, "must be a valid ONNX model: "),
    ],
)
def test_bad_file(tmp_path, content, text):
    (tmp_path / "model.onnx").write_bytes(content)
    with pytest.raises(SourceError, match=f"^source={tmp_path}/model.onnx: {text}"):
        scan(tmp_path / "model.onnx")


def test_bad_node(tmp_path):
    with pytest.raises(SourceError, match="inputs='ConvTranspose_0': must be 2 or 3 and the output 1"):
        scan(save(tmp_path, [("ConvTranspose", "x", "y", UP)], {}))


@pytest.mark.parametrize(
    "change",
    [
        lambda graph: setattr(graph.initializer[0], "data_type", 99),
        lambda graph: graph.node[0].attribute[0].CopyFrom(helper.make_attribute("to", [1, 2])),
    ],
)
def test_casts_from_or_to_no_type_of_onnx(tmp_path, change):
    """The graph says what comes of them, so nothing but the note tells of it."""
    nodes = [("Cast", "q", "v", {"to": 1}), ("ConvTranspose", "x v", "y", UP)]
    path = save(tmp_path, nodes, {"q": uniform(4, 3, 3, 2)})
    model = onnx.load(path)
    change(model.graph)
    model.graph.value_info.append(helper.make_tensor_value_info("v", TensorProto.FLOAT, (4, 3, 3, 2)))
    path.write_bytes(model.SerializeToString())
    (layer,) = scan(path)
    assert layer.note == "its filter is made by Cast Cast_0 at run time"


def test_negative_extents_of_a_constant(tmp_path):
    path = save(tmp_path, [("ConvTranspose", "x w b", "y", UP)], {"w": uniform(4, 3, 3, 2), "b": uniform(3)})
    model = onnx.load(path)
    model.graph.initializer[1].dims[:] = [-3, -1]
    path.write_bytes(model.SerializeToString())
    with pytest.raises(SourceError, match=r"shape=\(-3, -1\): must fit the 12 bytes"):
        scan(path)


@pytest.mark.parametrize(
    ("kernel", "attributes", "shapes"),
    [
        (4, {"strides": [2], "output_padding": [1]}, (r"\[1, 4, 14\]", r"\[1, 4, 15\]")),
        (1, {"strides": [3]}, (r"\[1, 4, 21\]", r"\[1, 4, 19\]")),
    ],
    ids=["output_padding", "a short kernel"],
)
def test_shapes_that_onnx_infers_otherwise(tmp_path, kernel, attributes, shapes):
    """The runtime makes the one or the other; extents behind such a layer are those of the model's tensor."""
    nodes = [
        ("ConvTranspose", "x w", "a", attributes | {"auto_pad": "SAME_UPPER"}),
        ("Relu", "a", "b", {}),
        ("ConvTranspose", "b v", "y", {"strides": [2]}),
    ]
    constants = {"w": uniform(4, 4, kernel), "v": uniform(4, 2, 2)}
    first, second = scan(save(tmp_path, nodes, constants, shape=(1, 4, 7)))
    assert first.problem is None
    assert re.fullmatch(f"gives {shapes[0]} by its attributes, and {shapes[1]} by the model's shapes", first.reason)
    assert second.problem is None
    assert second.reason == "may have other extents than the model says, as ConvTranspose_0 has"
