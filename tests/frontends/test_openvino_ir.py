"""OpenVINO IR: OpenVINO writes it, we read it, and both compute the same."""

import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import openvino
import pytest
from openvino import opset1, opset5, opset13
from openvino.utils.node_factory import NodeFactory
from support.tolerances import assert_close

import tvm_deconv as td
from tvm_deconv import Epilogue, SourceError
from tvm_deconv.frontends import scan
from tvm_deconv.openvino import problems, replace
from tvm_deconv.problem.reference import reference

EXAMPLES = Path(__file__).parents[2] / "examples"
RNG = np.random.default_rng(0)


def uniform(*shape, dtype=np.float32):
    return RNG.uniform(-1, 1, shape).astype(dtype)


def deconvolution(
    data_shape=(2, 4, 5, 6), filter_shape=(4, 3, 3, 2), dtype=np.float32, output_shape=None, **attributes
):
    """A parameter and the operator over it, grouped where the filter's rank says so.

    Not through opset1's functions: the one for groups drops the pads where there is an output_shape.
    """
    data = opset1.parameter(data_shape, dtype, name="data")
    inputs = [data, opset1.constant(uniform(*filter_shape, dtype=dtype))]
    if output_shape is not None:
        inputs.append(opset1.constant(np.array(output_shape, np.int64)))
    axes = len(data_shape) - 2
    defaults = {"strides": [2] * axes, "pads_begin": [0] * axes, "pads_end": [0] * axes, "dilations": [1] * axes}
    name = "GroupConvolutionBackpropData" if len(filter_shape) > len(data_shape) else "ConvolutionBackpropData"
    node = NodeFactory("opset1").create(name, [node.output(0) for node in inputs], defaults | attributes)
    node.set_friendly_name("up")
    return data, node


def save(folder, data, *outputs):
    openvino.serialize(openvino.Model(list(outputs), [data], "model"), folder / "model.xml")
    return folder / "model.xml"


def openvino_outputs(path, data):
    compiled = openvino.Core().compile_model(path, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return list(compiled({0: data}).values())


def check(path, expected_epilogue, fused):
    """One layer is found, all of the model is in it, and its reference is what OpenVINO computes."""
    (layer,) = scan(path)
    p = layer.problem
    assert p.epilogue == expected_epilogue
    assert len(layer.fused) == fused
    data = uniform(*p.data_shape)
    (expected,) = openvino_outputs(path, data)
    assert expected.shape == p.output_shape
    assert_close(reference(p, data, layer.filter, layer.bias), expected)
    return layer


@pytest.mark.parametrize("name", ["upsampling_node", "upsampling_node_grouped"])
def test_examples(name):
    layer = check(EXAMPLES / f"{name}.xml", Epilogue(), 0)
    assert layer.name == name
    assert layer.problem.data_shape == (1, 20, 224, 224)
    assert layer.problem.output_spatial == (447, 447)
    assert layer.problem.groups == (4 if name.endswith("grouped") else 1)


ATTRIBUTES = {
    "plain": {},
    "pads": {"pads_begin": [1, 0], "pads_end": [0, 1], "output_padding": [1, 0], "dilations": [2, 3]},
    "valid": {"auto_pad": "valid", "pads_begin": [1, 1]},
    "same_upper": {"auto_pad": "same_upper", "output_shape": [8, 13]},
    "same_lower": {"auto_pad": "same_lower", "output_shape": [8, 13]},
    "output_shape": {"output_shape": [9, 14], "pads_begin": [1, 0]},
}


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("case", ATTRIBUTES)
def test_attributes(tmp_path, case, grouped):
    filter_shape = (2, 2, 3, 3, 2) if grouped else (4, 3, 3, 2)
    data, node = deconvolution(filter_shape=filter_shape, **ATTRIBUTES[case])
    check(save(tmp_path, data, node), Epilogue(), 0)


@pytest.mark.parametrize(
    ("data_shape", "filter_shape"), [((1, 4, 7), (4, 3, 4)), ((1, 4, 3, 4, 2), (2, 2, 2, 3, 2, 1))]
)
def test_ranks(tmp_path, data_shape, filter_shape):
    check(save(tmp_path, *deconvolution(data_shape, filter_shape)), Epilogue(), 0)


def test_output_shape_of_run_time_comes_from_the_port(tmp_path):
    data = opset1.parameter((2, 4, 5, 6), np.float32)
    twice = opset1.multiply(opset1.constant(np.array([5, 6])), opset1.constant(np.array([2, 2])))
    filter = opset1.constant(uniform(4, 3, 3, 2))
    node = opset1.convolution_backprop_data(data, filter, [2, 2], twice, auto_pad="same_upper")
    layer = check(save(tmp_path, data, node), Epilogue(), 0)
    assert layer.problem.output_spatial == (10, 12)


def constants(*shape):
    return opset1.constant(uniform(*shape))


ACTIVATIONS = {
    "relu": (opset1.relu, Epilogue(True, "relu")),
    "sigmoid": (opset1.sigmoid, Epilogue(True, "sigmoid")),
    "tanh": (opset1.tanh, Epilogue(True, "tanh")),
    "gelu": (lambda x: opset13.gelu(x, "erf"), Epilogue(True, "gelu")),
    "swish": (lambda x: opset13.swish(x), Epilogue(True, "silu")),
    "gate": (lambda x: opset1.multiply(opset1.sigmoid(x), x), Epilogue(True, "silu")),
    "clamp": (lambda x: opset1.clamp(x, -0.5, 0.75), Epilogue(True, "clip", minimum=-0.5, maximum=0.75)),
    "clamp at 0": (lambda x: opset1.clamp(x, 0, float("inf")), Epilogue(True, "relu")),
    "leaky": (
        lambda x: opset1.prelu(x, opset1.constant(np.float32([0.1]))),
        Epilogue(True, "leaky_relu", alpha=0.1),
    ),
    "elu": (lambda x: opset1.elu(x, 0.7), Epilogue(True, "elu", alpha=0.7)),
    "hswish": (opset13.hswish, Epilogue(True, "hardswish")),
    "mish": (opset13.mish, Epilogue(True, "mish")),
    "softplus": (opset13.softplus, Epilogue(True, "softplus")),
    "even slopes": (
        lambda x: opset1.prelu(x, opset1.constant(np.full(6, 0.2, np.float32))),
        Epilogue(True, "leaky_relu", alpha=0.2),
    ),
}


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_bias_and_activation(tmp_path, activation, grouped):
    make, expected = ACTIVATIONS[activation]
    data, node = deconvolution(filter_shape=(2, 2, 3, 3, 2) if grouped else (4, 6, 3, 2))
    path = save(tmp_path, data, make(opset1.add(node, constants(1, 6, 1, 1))))
    check(path, expected, 3 if activation == "gate" else 2)


FOLDED = {
    "batch_norm": lambda x, c: opset5.batch_norm_inference(x, *parameters(c), 1e-3),
    "batch_norm-1": lambda x, c: opset1.batch_norm_inference(x, *parameters(c), 1e-3),
    "affine": lambda x, c: opset1.add(opset1.multiply(x, constants(c, 1, 1)), constants(1, c, 1, 1)),
    "subtract": lambda x, c: opset1.subtract(x, constants(1, c, 1, 1)),
    "scalar": lambda x, _: opset1.add(opset1.constant(np.float32(0.5)), x),
}


def parameters(channels):
    return (
        constants(channels),
        constants(channels),
        constants(channels),
        opset1.constant(0.5 + uniform(channels) ** 2),
    )


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("case", FOLDED)
def test_folded(tmp_path, case, grouped):
    data, node = deconvolution(filter_shape=(2, 2, 3, 3, 2) if grouped else (4, 6, 3, 2))
    biased = opset1.add(node, constants(1, 6, 1, 1))
    path = save(tmp_path, data, opset1.relu(FOLDED[case](biased, 6)))
    check(path, Epilogue(True, "relu"), 4 if case == "affine" else 3)


def test_scale_alone_needs_no_bias(tmp_path):
    data, node = deconvolution()
    check(save(tmp_path, data, opset1.multiply(node, constants(1, 3, 1, 1))), Epilogue(), 1)


NOT_FUSED = {
    "per element": lambda x: opset1.add(x, constants(1, 3, 1, 12)),
    "per batch": lambda x: opset1.add(x, constants(2, 1, 1, 1)),
    "longer": lambda x: opset1.add(x, constants(1, 2, 3, 1, 1)),
    "constant first": lambda x: opset1.subtract(constants(1, 3, 1, 1), x),
    "slopes": lambda x: opset1.prelu(x, opset1.constant(np.float32([0.1, 0.2, 0.3]))),
    "tanh gelu": lambda x: opset13.gelu(x, "tanh"),
    "beta": lambda x: opset13.swish(x, opset1.constant(np.float32(2))),
    "both sides": lambda x: opset1.add(x, x),
    "selu": lambda x: opset1.selu(x, opset1.constant(np.float32(1.67)), opset1.constant(np.float32(1.05))),
    "hard sigmoid": lambda x: opset1.hard_sigmoid(
        x, opset1.constant(np.float32(0.2)), opset1.constant(np.float32(0.5))
    ),
    "training left it empty": lambda x: opset5.batch_norm_inference(
        x, constants(3), constants(3), constants(3), opset1.constant(-np.ones(3, np.float32)), 1e-3
    ),
}


@pytest.mark.parametrize("case", NOT_FUSED)
def test_not_fused(tmp_path, case):
    data, node = deconvolution()
    (layer,) = scan(save(tmp_path, data, NOT_FUSED[case](node)))
    assert (layer.problem.epilogue, layer.fused, layer.reason) == (Epilogue(), (), "")


def test_a_second_user_keeps_the_nodes_apart(tmp_path):
    data, node = deconvolution()
    biased = opset1.add(node, constants(1, 3, 1, 1))
    (layer,) = scan(save(tmp_path, data, opset1.relu(biased), opset1.tanh(biased)))
    assert layer.problem.epilogue == Epilogue(bias=True)
    (layer,) = scan(save(tmp_path, data, opset1.relu(node), node))
    assert layer.problem.epilogue == Epilogue()


def test_what_follows_an_activation_stays(tmp_path):
    data, node = deconvolution()
    (layer,) = scan(save(tmp_path, data, opset1.add(opset1.relu(node), constants(1, 3, 1, 1))))
    assert layer.problem.epilogue == Epilogue(activation="relu")
    assert layer.bias is None


@pytest.mark.parametrize("stored", [np.float16, np.int8, np.uint8, np.float64])
def test_converted_constants(tmp_path, stored):
    data = opset1.parameter((1, 4, 5, 6), np.float32)
    filter = opset1.constant(RNG.integers(0, 5, (4, 3, 2, 2)).astype(stored))
    node = opset1.convolution_backprop_data(data, opset1.convert(filter, np.float32), [2, 2])
    biased = opset1.add(node, opset1.convert(opset1.constant(uniform(1, 3, 1, 1, dtype=np.float16)), np.float32))
    layer = check(save(tmp_path, data, biased), Epilogue(bias=True), 1)
    assert layer.filter.dtype == np.float32


@pytest.mark.parametrize("form", ["scale", "zero point", "fake"])
def test_filters_of_quantized_models(tmp_path, form):
    """Integers with a scale, as compression writes them, and FakeQuantize on floating point numbers."""
    data = opset1.parameter((1, 4, 5, 6), np.float32, name="data")
    if form == "fake":
        bounds = [opset1.constant(np.float32(v).reshape(1, -1, 1, 1)) for v in ([-0.5, -1, -2], [0.5, 1, 1.5])]
        filter = opset1.fake_quantize(constants(4, 3, 2, 2), *bounds, *bounds, 255)
    else:
        filter = opset1.convert(opset1.constant(RNG.integers(-9, 99, (4, 3, 2, 2)).astype(np.int8)), np.float32)
        if form == "zero point":
            filter = opset1.subtract(filter, opset1.convert(opset1.constant(np.int8([[[[7]]]])), np.float32))
        filter = opset1.multiply(filter, constants(1, 3, 1, 1))
    bounds = [opset1.constant(np.float32(v)) for v in (-1, 1)]
    for quantized in (False, True):
        source = opset1.fake_quantize(data, *bounds, *bounds, 256) if quantized else data
        path = save(tmp_path, data, opset1.convolution_backprop_data(source, filter, [2, 2]))
        (layer,) = scan(path)
        notes = ["as float32: its data are quantized"] * quantized + ["filter stored as int8"] * (form != "fake")
        assert layer.note.split(": FakeQuantize")[0] == ", ".join(notes)
        assert layer.note.endswith("with 0 among at most 256 levels, the same for its result") == quantized
    x = uniform(*layer.problem.data_shape)
    model = openvino.Model([opset1.convolution_backprop_data(data, filter, [2, 2])], [data], "model")
    openvino.serialize(model, tmp_path / "model.xml")
    assert_close(reference(layer.problem, x, layer.filter), openvino_outputs(tmp_path / "model.xml", x)[0])


def fake_quantize(node, low, high, levels=256):
    bounds = [opset1.constant(np.float32(value)) for value in (low, high)]
    return opset1.fake_quantize(node, *bounds, *bounds, levels)


def low_precision(folder, form="fake", zero=100, groups=1, output=(-0.5, 12.25), levels=256, **numbers):
    """FakeQuantize on the data, on a filter of 6 output channels in all, and behind bias and ReLU.

    Of `numbers`, `ends` are the range of the data, `scales` those of the filter, and `point` is its zero point.
    """
    data = opset1.parameter((2, 4, 5, 6), np.float32, name="data")
    source = fake_quantize(data, *numbers.get("ends", (-0.03 * zero, 0.03 * (levels - 1 - zero))), levels)
    shape = (4, 6, 4, 4) if groups == 1 else (groups, 4 // groups, 6 // groups, 4, 4)
    scales = RNG.uniform(0.01, 0.02, (6 // groups, 1, 1)).astype(np.float32)
    scales = np.broadcast_to(np.float32(numbers.get("scales", scales)), numbers.get("shape", scales.shape))
    if form == "fake":
        filter = fake_quantize(constants(*shape), -127 * scales, 127 * scales, 255)
    else:
        filter = opset1.convert(opset1.constant(RNG.integers(-99, 99, shape).astype(np.int8)), np.float32)
        if form != "integers":
            filter = opset1.subtract(filter, opset1.constant(np.float32(numbers.get("point", 7))))
        filter = opset1.multiply(filter, opset1.constant(scales))
    operator = opset1.convolution_backprop_data if groups == 1 else opset1.group_convolution_backprop_data
    made = opset1.relu(opset1.add(operator(source, filter, [2, 2]), constants(1, 6, 1, 1)))
    return save(folder, data, fake_quantize(made, *output) if output else made)


@pytest.mark.parametrize(
    "options",
    [{}, {"form": "integers"}, {"form": "zero point"}, {"groups": 2}, {"zero": 128}, {"zero": 0, "levels": 128}],
)
def test_layers_of_low_precision_are_quantized(tmp_path, options):
    path = low_precision(tmp_path, **options)
    (layer,) = scan(path)
    p, scaling = layer.problem, layer.scaling
    assert (p.dtype, str(p.quantization)) == (
        "uint8", "uint8.uint8" if options.get("form") == "zero point" else "int8.uint8",
    )  # fmt: skip
    assert (scaling.data_zero_point, scaling.output_zero_point, layer.note) == (options.get("zero", 100), 10, "")
    assert len(layer.fused) == 3
    stored = RNG.integers(0, options.get("levels", 256), p.data_shape).astype(np.uint8)
    data = (scaling.data_scale * (stored - float(scaling.data_zero_point))).astype(np.float32)
    (wanted,) = openvino_outputs(path, data)
    found = reference(p, stored, layer.filter, layer.bias, scaling)
    step = scaling.output_scale
    difference = np.abs(step * (found - float(scaling.output_zero_point)) - wanted)
    assert len(np.unique(wanted)) > 30
    assert difference.max() <= 1.01 * step
    assert np.mean(difference > 0.5 * step) < 0.02


def test_layers_of_low_precision_stay_with_openvino(tmp_path):
    path = low_precision(tmp_path)
    (layer,) = scan(path)
    model = openvino.Core().read_model(path)
    operations = replace(model, path, td.load(tmp_path, fallback="reference"), measure=False)
    assert not operations
    assert "it is quantized" in operations.left[layer.name]
    assert problems(path) == []


RANGES = "must have constant ranges with 0 among at most 256 levels, the same for its result"
FILTER = "its filter must be integers with a scale, one or one for each output channel"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"zero": np.nan}, f"=nan..nan in 256 levels: {RANGES}"),
        ({"zero": 99.5}, RANGES),
        ({"ends": (1, 1)}, f"=1.0..1.0 in 256 levels: {RANGES}"),
        ({"ends": (1, -1)}, f"=1.0..-1.0 in 256 levels: {RANGES}"),
        ({"levels": 257, "ends": (-1, 1)}, f"=-1.0..1.0 in 257 levels: {RANGES}"),
        (
            {"ends": (np.zeros((4, 1, 1)), np.ones((4, 1, 1)))},
            "data_scale=(4, 1, 1): must be one number in quantized problems",
        ),
        ({"ends": (0, np.inf)}, "data_scale=inf: must be from 2**-60 to 2**40"),
        ({"ends": (0, 1e-30)}, "data_scale=3.921568639886576e-33: must be from 2**-60 to 2**40"),
        ({"zero": -1}, "data_zero_point=-1: must be from 0 to 255, the range of uint8"),
        ({"scales": 0}, f"=(6, 1, 1)..(6, 1, 1) in 255 levels: {FILTER}"),
        ({"scales": -1}, f"=(6, 1, 1)..(6, 1, 1) in 255 levels: {FILTER}"),
        ({"scales": np.nan}, f"=(6, 1, 1)..(6, 1, 1) in 255 levels: {FILTER}"),
        ({"scales": 1, "shape": (4, 1, 1, 1)}, f"=(4, 1, 1, 1)..(4, 1, 1, 1) in 255 levels: {FILTER}"),
        ({"form": "integers", "scales": 0}, "filter_scale=0.0: must be from 2**-60 to 2**40"),
        ({"form": "integers", "scales": -1}, "filter_scale=-1.0: must be from 2**-60 to 2**40"),
        ({"form": "integers", "scales": np.inf}, "filter_scale=inf: must be from 2**-60 to 2**40"),
        ({"form": "integers", "scales": 1, "shape": (4, 1, 1, 1)}, FILTER),
        ({"form": "zero point", "point": 7.5}, FILTER),
        ({"form": "zero point", "point": np.nan}, FILTER),
        ({"form": "zero point", "point": np.inf}, FILTER),
        ({"form": "zero point", "point": 1e30}, FILTER),
        ({"form": "zero point", "point": 2**16}, "filter_zero_point=65664: must be from 0 to 255, the range of uint8"),
        ({"output": None}, "must be int32 in units of data and filter"),
        ({"output": (0, np.inf)}, "output_scale=inf: must be from 2**-60 to 2**40"),
        (
            {"output": (np.zeros((6, 1, 1)), np.ones((6, 1, 1)))},
            "output_scale=(6, 1, 1): must be one number in quantized problems",
        ),
    ],
)
def test_low_precision_that_stays_in_float32(tmp_path, options, reason):
    (layer,) = scan(low_precision(tmp_path, **options))
    assert (layer.problem.dtype, layer.scaling) == ("float32", None)
    assert reason in layer.note


@pytest.mark.parametrize("stands", ["255", "256"])
@pytest.mark.parametrize("levels", ["0", "1", "-5", "2.5", "nan", "inf", "1e400", "9" * 30])
def test_levels_that_are_none(tmp_path, levels, stands):
    """Of the filter, where 255 stands, or of the data."""
    path = low_precision(tmp_path)
    path.write_text(path.read_text().replace(f'levels="{stands}"', f'levels="{levels}"'))
    (layer,) = scan(path)
    assert (layer.problem.dtype, layer.scaling) == ("float32", None)
    assert f"{float(levels):g} levels: " in layer.note or "at run time" in layer.note


@pytest.mark.parametrize("levels", ["", "x", "0x10", "1,0"])
def test_levels_that_are_no_number(tmp_path, levels):
    path = low_precision(tmp_path)
    path.write_text(path.read_text().replace('levels="256"', f'levels="{levels}"'))
    with pytest.raises(SourceError, match=f"levels='{levels}': must be a number in FakeQuantize"):
        scan(path)


def test_notes_tell_what_makes_the_filter(tmp_path):
    data = opset1.parameter((1, 4, 5, 6), np.float32, name="data")
    filter = opset1.relu(constants(4, 3, 2, 2))
    filter.set_friendly_name("made")
    (layer,) = scan(save(tmp_path, data, opset1.convolution_backprop_data(data, filter, [2, 2])))
    assert (layer.filter, layer.note) == (None, "its filter is made by ReLU made at run time")


def test_reshaped_constants(tmp_path):
    data = opset1.parameter((1, 4, 5, 6), np.float32)
    shape = opset1.constant(np.array([2, 2, 3, 2, 2]))
    filter = opset1.reshape(constants(4, 3, 2, 2), shape, special_zero=False)
    node = opset1.group_convolution_backprop_data(data, filter, [2, 2])
    bias = opset1.unsqueeze(constants(6), opset1.constant(np.array([1, 2])))
    check(save(tmp_path, data, opset1.add(node, bias)), Epilogue(bias=True), 1)


@pytest.mark.parametrize("dtype", ["f16", "bf16", "f64"])
def test_storage_types(tmp_path, dtype):
    element = getattr(openvino.Type, dtype)
    data = opset1.parameter((1, 4, 5, 6), element)
    filter = openvino.op.Constant(element, openvino.Shape([4, 3, 2, 2]), uniform(48).tolist())
    node = opset1.convolution_backprop_data(data, filter, [2, 2])
    bias = openvino.op.Constant(element, openvino.Shape([1, 3, 1, 1]), [0.5, 0.25, 4.0])
    (layer,) = scan(save(tmp_path, data, opset1.relu(opset1.add(node, bias))))
    name = {"f16": "float16", "bf16": "bfloat16", "f64": "float64"}[dtype]
    assert layer.problem.dtype == layer.filter.dtype.name == name
    assert layer.problem.epilogue == Epilogue(True, "relu")
    assert layer.bias.dtype.name == layer.problem.accumulate_dtype
    assert layer.bias.tolist() == [0.5, 0.25, 4.0]


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32"])
def test_integers_keep_their_nodes(tmp_path, dtype):
    data = opset1.parameter((1, 4, 5, 6), np.dtype(dtype).type)
    filter = opset1.constant(RNG.integers(0, 9, (4, 3, 2, 2)).astype(dtype))
    node = opset1.relu(opset1.convolution_backprop_data(data, filter, [2, 2]))
    (layer,) = scan(save(tmp_path, data, node))
    assert (layer.problem.dtype, layer.problem.epilogue) == (dtype, Epilogue())
    assert layer.filter.dtype == dtype


def test_filter_that_is_an_input(tmp_path):
    data, filter = opset1.parameter((1, 4, 5, 6), np.float32), opset1.parameter((4, 3, 2, 2), np.float32)
    node = opset1.convolution_backprop_data(data, filter, [2, 2])
    scaled = opset1.multiply(opset1.add(node, constants(1, 3, 1, 1)), constants(1, 3, 1, 1))
    openvino.serialize(openvino.Model([scaled], [data, filter], "model"), tmp_path / "model.xml")
    (layer,) = scan(tmp_path / "model.xml")
    assert layer.filter is None
    assert layer.problem.epilogue == Epilogue(bias=True)  # a bias can be taken in, a scale cannot
    assert len(layer.fused) == 1


@pytest.mark.parametrize("half", [False, True])
def test_a_converted_model_gives_the_problems_of_its_source(tmp_path, half):
    model = openvino.convert_model(EXAMPLES / "decoder.onnx")
    openvino.save_model(model, tmp_path / "model.xml", compress_to_fp16=half)
    layers = scan(tmp_path / "model.xml")
    sources = scan(EXAMPLES / "decoder.onnx")
    for layer, source in zip(layers, sources, strict=True):
        assert layer.problem.artifact_key == source.problem.artifact_key
        ours, theirs = layer.problem.canonical_filter(layer.filter), source.problem.canonical_filter(source.filter)
        np.testing.assert_allclose(ours, theirs, rtol=2e-3 if half else 1e-6, atol=1e-4 if half else 1e-6)
        np.testing.assert_allclose(layer.bias, source.bias, rtol=2e-3 if half else 1e-5, atol=1e-3 if half else 1e-6)


def test_layers_in_bodies(tmp_path):
    inner, node = deconvolution((2, 4, 5, 6))
    body = openvino.Model([opset1.relu(node)], [inner], "body")
    data = opset1.parameter((2, 4, 5, 6), np.float32)
    branch = opset13.if_op(opset1.constant(np.array(True)))
    branch.set_then_body(body)
    inner, node = deconvolution((2, 4, 5, 6))
    branch.set_else_body(openvino.Model([opset1.tanh(node)], [inner], "body"))
    branch.set_input(data.output(0), body.get_parameters()[0], inner)
    result = branch.set_output(body.results[0], branch.get_function(1).results[0])
    layers = scan(save(tmp_path, data, result))
    assert {layer.problem.epilogue.activation for layer in layers} == {"relu", "tanh"}
    assert {layer.name for layer in layers} == {"up", "up_2"}


DYNAMIC = {
    "batch": ([-1, 4, 5, 6], "nany-g1-i4-o3-x5x6-"),
    "channels": ([2, -1, 5, 6], "n2-g1-i4-o3-x5x6-"),
    "one extent": ([2, 4, -1, 6], "n2-g1-i4-o3-xanyx6-"),
    "all": ([-1, -1, -1, -1], "nany-g1-i4-o3-xanyxany-"),
    "rank": (None, "nany-g1-i4-o3-xanyxany-"),
}


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("case", DYNAMIC)
def test_free_extents(tmp_path, case, grouped):
    """They are what OpenVINO computes, at several extents."""
    shape, key = DYNAMIC[case]
    data, node = deconvolution((2, 4, 5, 6), (2, 2, 3, 3, 2) if grouped else (4, 3, 3, 2), pads_begin=[1, 0])
    model = openvino.Model([opset1.relu(node)], [data], "model")
    model.reshape(openvino.PartialShape.dynamic() if shape is None else openvino.PartialShape(shape))
    openvino.serialize(model, tmp_path / "model.xml")
    (layer,) = scan(tmp_path / "model.xml")
    assert layer.problem.key.startswith(key.replace("g1-i4", "g2-i2") if grouped else key)
    for extents in ((2, 4, 5, 6), (1, 4, 1, 6), (3, 4, 9, 20)):
        x = uniform(*(g if e == -1 else e for e, g in zip(shape or [-1] * 4, extents, strict=True)))
        x = x[:, :1].repeat(4, 1) if x.shape[1] != 4 else x
        model.reshape(x.shape)  # OpenVINO computes no model of unknown rank
        openvino.serialize(model, tmp_path / "static.xml")
        (expected,) = openvino_outputs(tmp_path / "static.xml", x)
        problem = layer.problem.at(x.shape) if layer.problem.dynamic else layer.problem
        assert_close(reference(problem, x, layer.filter, layer.bias), expected)


def test_buckets_follow_from_ranges(tmp_path):
    data, node = deconvolution([-1, 4, -1], (4, 3, 16), strides=[8], pads_begin=[4], pads_end=[4])
    after, second = deconvolution([-1, 3, -1], (3, 2, 4))
    del after
    second.input(0).replace_source_output(opset1.relu(node).output(0))
    second.set_friendly_name("second")
    path = save(tmp_path, data, second)
    first, last = scan(path, extents={"data.2": (1, 2000)})
    assert (first.problem.buckets, last.problem.buckets) == (((31, 250, 2000),), ((248, 2000, 16000),))
    assert scan(path)[0].problem.buckets == ()
    with pytest.raises(SourceError, match=r"extent='data.1': must be a free extent of .*: data.0, data.2$"):
        scan(path, extents={"data.1": (1, 2)})


def test_an_extent_that_is_none_beside_a_range(tmp_path):
    text = (EXAMPLES / "upsampling_node.xml").read_text().replace("<dim>1</dim>", "<dim>-1</dim>")
    (tmp_path / "model.xml").write_text(text.replace("<dim>224</dim>", "<dim>many</dim>"))
    with pytest.raises(SourceError, match="dim='many': must be an extent or -1"):
        scan(tmp_path / "model.xml", extents={"data.0": (1, 4)})


def test_an_output_shape_of_run_time_for_free_extents_is_not_covered(tmp_path):
    data, node = deconvolution([1, 4, -1, -1])
    wanted = opset1.convert(opset13.parameter([2], np.int64), "i64")
    inputs = [node.input_value(0), node.input_value(1), wanted.output(0)]
    up = NodeFactory("opset1").create("ConvolutionBackpropData", inputs, node.get_attributes())
    model = openvino.Model([up], [data, wanted.input_value(0).get_node()], "model")
    openvino.serialize(model, tmp_path / "model.xml")
    (layer,) = scan(tmp_path / "model.xml")
    assert layer.reason.startswith("output_shape is computed at run time, for an output of [1, 3, -1, -1]")


# Changes to the text of an example, and what the scan says of them.

NOT_COVERED = {
    "precision": ('"FP32"', '"I64"', "is not opset1 on one of FP16, .*: opset1 with data I64 and filter I64"),
    "opset": ('BackpropData" version="opset1"', 'BackpropData" version="opset9"', "is not opset1 on .*: opset9"),
    "rank": ('type="Conv', 'type="GroupConv', "has a filter of rank 4"),
    "stride": ('strides="2,2"', 'strides="0,2"', r"strides=\[0, 2\]: every element must be at least 1"),
    "length": (
        'pads_end="1,1"',
        'pads_end="1,1,1"',
        r"pads_end=\(1, 1, 1\): must have one element per spatial axis, 2 here",
    ),
    "output": ("<dim>447</dim>", "<dim>448</dim>", r"output=\(1, 10, 448, 448\): must be .* \(1, 10, 447, 447\)"),
    "huge": ("<dim>224</dim>", "<dim>999999999999999999</dim>", "must have a size in bytes that fits in 64 bits"),
}
REFUSED = {
    "dim": ("<dim>447</dim>", "<dim>many</dim>", "dim='many': must be an extent or -1"),
    "digits": ("<dim>447</dim>", f"<dim>{'9' * 5000}</dim>", "must be an extent or -1"),
    "id": ('layer id="2"', 'layer id="two"', "id='two': must be an integer in <layer>"),
    "list": ('strides="2,2"', 'strides="2;2"', "strides='2;2': must be integers between commas in upsampling_node"),
    "offset": ('offset="0"', 'offset="4"', r"offset=\(4, 7200\): must lie within the 7200 bytes of .*\.bin"),
    "behind": ('offset="0"', 'offset="-4"', r"offset=\(-4, 7200\): must lie within"),
    "far": ('offset="0"', 'offset="999999999999999999"', "must lie within"),
    "many offsets": ('offset="0"', 'offset="0,0"', "offset='filter': must have one offset and one size"),
    "size": ('size="7200"', 'size="7196"', r"shape=\(20, 10, 3, 3\): must fit the 7196 bytes"),
    "constant": ('shape="20,10,3,3"', 'shape="200,9"', r"filter=\(200, 9\): must be what port 1 of upsampling_node"),
    "minus": ('shape="20,10,3,3"', 'shape="-20,-10,3,3"', r"shape=\(-20, -10, 3, 3\): must fit"),
    "ports": ('<port id="1" precision="FP32">', '<port id="0" precision="FP32">', "must be 2 or 3 inputs and 1 output"),
    "version": ('version="11"', 'version="7"', "net='net 7': must be a net of version 10 or 11"),
    "root": ("net", "pet", "net='pet 11': must be a net"),
    "doctype": ("<net", '<!DOCTYPE net [<!ENTITY a "b">]><net', "must be XML without a document type or entities"),
    "cut": ("</net>", "", "must be well-formed XML: no element found"),
    "null": ("</net>", "</net>\0", "must be XML in UTF-8, without null characters"),
}


def altered(folder, old, new):
    text = (EXAMPLES / "upsampling_node.xml").read_text()
    assert old in text
    (folder / "model.xml").write_text(text.replace(old, new))
    (folder / "model.bin").write_bytes((EXAMPLES / "upsampling_node.bin").read_bytes())
    return folder / "model.xml"


@pytest.mark.parametrize("case", NOT_COVERED)
def test_not_covered(tmp_path, case):
    old, new, reason = NOT_COVERED[case]
    (layer,) = scan(altered(tmp_path, old, new))
    assert layer.problem is None
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(layer.reason)


@pytest.mark.parametrize("case", REFUSED)
def test_refused(tmp_path, case):
    old, new, text = REFUSED[case]
    with pytest.raises(SourceError, match=text):
        scan(altered(tmp_path, old, new))


def test_no_bin(tmp_path):
    path = altered(tmp_path, "<net", "<net")
    (tmp_path / "model.bin").unlink()
    with pytest.raises(SourceError, match=r"source=.*model.bin: must be a file that can be read \(No such file"):
        scan(path)


def test_other_encodings(tmp_path):
    text = (EXAMPLES / "upsampling_node.xml").read_text()
    for encoding in ("utf-16", "utf-16-le", "utf-32-be", "cp037"):
        (tmp_path / "model.xml").write_bytes(text.encode(encoding))
        with pytest.raises(SourceError, match="must be XML in UTF-8"):
            scan(tmp_path / "model.xml")


def test_unknown_element_type_is_no_constant(tmp_path):
    (layer,) = scan(altered(tmp_path, 'element_type="f32" shape="20', 'element_type="i4" shape="20'))
    assert layer.problem is not None
    assert layer.filter is None


def test_a_cycle_of_conversions_is_no_constant(tmp_path):
    path = altered(tmp_path, 'name="filter" type="Const"', 'name="filter" type="Convert"')
    tree = ET.parse(path)
    layer = tree.find("layers/layer[@name='filter']")
    ET.SubElement(ET.SubElement(layer, "input"), "port", {"id": "1"})
    edge = {"from-layer": "1", "from-port": "0", "to-layer": "1", "to-port": "1"}
    ET.SubElement(tree.find("edges"), "edge", edge)
    tree.write(path)
    (layer,) = scan(path)
    assert layer.filter is None
