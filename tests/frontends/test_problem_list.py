"""Lists of problems: what they mean, and every text about a bad one."""

import json
from pathlib import Path

import pytest

from tvm_deconv import Epilogue, Problem, Quantization, SourceError, from_openvino
from tvm_deconv.frontends import coverage_table, scan

EXAMPLES = Path(__file__).parents[2] / "examples"
ENTRY = {"data": [1, 8, 5, 6], "filter": [2, 4, 3, 2, 3], "strides": [2, 1]}


def scan_entries(folder, *entries):
    path = folder / "list.json"
    path.write_text(json.dumps(entries))
    return scan(path)


def test_all_layers():
    fields = json.loads((EXAMPLES / "layers.json").read_text())
    layers = scan(EXAMPLES / "layers.json")
    assert len(layers) == len(fields) == 46
    for layer, entry in zip(layers, fields, strict=True):
        p = layer.problem
        assert layer.name == entry["name"]
        assert list(p.data_shape) == entry["data"]
        assert list(p.filter_shape) == entry["filter"]
        assert list(p.output_spatial) == entry["out_spatial"]
        assert p.epilogue == Epilogue(bias=entry["bias"])
        assert layer.extra == {name: entry[name] for name in ("followed_by", "macs", "source", "note")}
        assert 0 < p.macs <= entry["macs"]  # theirs count what the pads cut off
    assert all(row.problem and not row.reason and row.macs for row in coverage_table(layers))


def test_variable_problems(tmp_path):
    entry = {"data": ["any", 8, 5, [16, 64]], "filter": [1, 8, 4, 3, 3], "strides": [2, 2]}
    (found,) = scan_entries(tmp_path, entry)
    wanted = from_openvino(("any", 8, 5, (16, 64)), (8, 4, 3, 3), strides=(2, 2))
    assert found.problem == wanted.replace(filter_format="GIOX")
    assert found.problem.key == "nany-g1-i8-o4-x5xany(16,64)-k3x3-s2x2-d1x1-p0x0-y11xany+3-float32-NCX-GIOX-none"


@pytest.mark.parametrize(
    ("data", "output_shape"),
    [(["any", 8, "any"], ["any"]), ([1, 8, "any", 6], ["any", 9]), ([1, 8, 5, [16]], [9, "any"])],
)
def test_output_shapes_of_variable_problems(tmp_path, data, output_shape):
    fields = {"data": data, "filter": [1, 8, 4, *[3] * (len(data) - 2)], "strides": [2] * (len(data) - 2)}
    (found,) = scan_entries(tmp_path, fields | {"output_shape": output_shape})
    wanted = from_openvino(data, fields["filter"], strides=fields["strides"], output_shape=output_shape)
    assert found.problem == wanted


def test_strides_of_one(tmp_path):
    found = scan_entries(tmp_path, *(ENTRY | {"strides": strides} for strides in (None, [], [1, 1])))
    assert len({layer.problem for layer in found}) == 1


def test_example_list():
    image, segmentation, speech, volume = (layer.problem for layer in scan(EXAMPLES / "problems.json"))
    assert image.epilogue == Epilogue(True, "tanh")
    assert segmentation.data_shape == (1, 24, 24, 32)
    assert segmentation.output_shape == (1, 48, 48, 32)
    assert segmentation.epilogue == Epilogue(True, "clip", minimum=0, maximum=6)
    assert (speech.pads_begin, speech.output_spatial, speech.dtype) == ((4,), (800,), "float64")
    assert speech.epilogue == Epilogue(bias=True)
    assert volume.dtype == "bfloat16"
    assert volume.epilogue == Epilogue(True, "leaky_relu", alpha=0.1)
    assert scan(EXAMPLES / "problems.json")[3].extra == {"note": "fields of your own are carried through"}


def test_fields_mean_what_openvino_means(tmp_path):
    given = {
        "pads_begin": [1, 0], "pads_end": [0, 1], "dilations": [2, 1], "output_padding": [1, 0],
        "auto_pad": "SAME_LOWER", "output_shape": [9, 6], "dtype": "float16",
    }  # fmt: skip
    (layer,) = scan_entries(tmp_path, ENTRY | given)
    assert layer.problem == from_openvino(ENTRY["data"], ENTRY["filter"], strides=[2, 1], **given)
    assert layer.operator == "GroupConvolutionBackpropData"
    assert (layer.filter, layer.bias, layer.reason, layer.fused) == (None, None, "", ())


def test_defaults(tmp_path):
    (layer,) = scan_entries(tmp_path, ENTRY)
    assert layer.problem == from_openvino(ENTRY["data"], ENTRY["filter"], strides=[2, 1])
    assert layer.name == "problem_0"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"bias": True}, "bias"),
        ({"bias": False, "epilogue": "bias"}, "bias"),
        ({"bias": True, "epilogue": "relu"}, "bias+relu"),
        ({"epilogue": "leaky_relu(0.1)"}, "leaky_relu(0.1)"),
        ({"epilogue": "bias+leaky_relu"}, "bias+leaky_relu(0.01)"),
        ({"epilogue": {"activation": "clip", "maximum": 1}}, "clip(0.0,1.0)"),
        ({"epilogue": {}}, "none"),
    ],
)
def test_epilogue(tmp_path, fields, expected):
    (layer,) = scan_entries(tmp_path, ENTRY | fields)
    assert str(layer.problem.epilogue) == expected


def test_names_become_unique(tmp_path):
    names = ["a", "a", "a_2", "a", None]
    entries = [ENTRY | ({"name": name} if name else {}) for name in names]
    assert [layer.name for layer in scan_entries(tmp_path, *entries)] == ["a", "a_3", "a_2", "a_4", "problem_4"]


def test_empty_list(tmp_path):
    assert scan_entries(tmp_path) == []


RANKS = r"filter=\[8, 3, 2, 3\]: must be \[G, Cin/G, Cout/G, \*K\]: 5 extents for data of rank 4"
BAD = {
    "missing": ({"strides": ...}, r"strides=None: .*missing required field `strides`"),
    "type": ({"strides": [2, "1"]}, r"strides=\[2, '1'\]: Expected `int`, got `str` - at `\$.strides\[1\]`"),
    "float": ({"strides": [2, 1.5]}, r"strides=\[2, 1.5\]: Expected `int`, got `float`"),
    "bool": ({"data": [True, 8, 5, 6]}, r"data=\[True, 8, 5, 6\]: Expected `int .*`, got `bool`"),
    "word": ({"data": ["some", 8, 5, 6]}, r"data=\['some', 8, 5, 6\]: every element must be an integer; .* \"any\""),
    "null": ({"data": [None, 8, 5, 6]}, r"data=\[None, 8, 5, 6\]: every element must be an integer; .* \"any\""),
    "free": ({"data": [1, 8, 5, -1]}, r"data=\[1, 8, 5, -1\]: every element must be at least 0; .* \"any\""),
    "free channels": ({"data": [1, "any", 5, 6]}, r"data=\[1, 'any', 5, 6\]: axis 1 \(NCX\) must be a number"),
    "bucket": ({"data": [1, 8, 5, [0]]}, r"data_spatial=\[0\]: every element must be at least 1"),
    "prescribed": (
        {"data": [1, 8, 5, "any"], "output_shape": [9, 9]},
        r"output_shape=\[9, 9\]: must be any",
    ),
    "name": ({"name": 3}, r"name=3: Expected `str \| null`, got `int`"),
    "zero": ({"strides": [0, 1]}, r"strides=\[0, 1\]: every element must be at least 1"),
    "length": ({"pads_end": [1]}, r"pads_end=\(1,\): must have one element per spatial axis, 2 here"),
    "rank": ({"filter": [8, 3, 2, 3]}, RANKS),
    "channels": ({"data": [1, 9, 5, 6]}, r"filter=.*: groups times input channels must be the 9 channels of the data"),
    "huge": ({"data": [10**30, 8, 5, 6]}, r"data=\[1000000000000000000000000000000, 8, 5, 6\]: every element must"),
    "auto_pad": ({"auto_pad": "same"}, r"auto_pad='same': must be one of none"),
    "data_format": ({"data_format": "NHWC"}, r"data_format='NHWC': must be one of NCX, NXC"),
    "dtype": ({"dtype": "float8"}, r"dtype='float8': must be one of float32"),
    "epilogue": ({"epilogue": "selu"}, r"activation='selu': must be one of none, relu"),
    "epilogue field": ({"epilogue": {"slope": 1}}, r"epilogue={'slope': 1}: may hold the fields bias, activation"),
    "epilogue value": ({"epilogue": {"activation": "leaky_relu", "alpha": "x"}}, r"alpha='x': must be a real number"),
    "epilogue bias": ({"epilogue": {"bias": 1}}, r"bias=1: must be True or False"),
    "out_spatial": ({"out_spatial": [9, 9]}, r"out_spatial=\[9, 9\]: must be the extents .* give, \[10, 8\]"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_entry(tmp_path, case):
    fields, text = BAD[case]
    bad = {name: value for name, value in (ENTRY | {"name": "second"} | fields).items() if value is not ...}
    where = rf" in problem 1 \({bad['name']}\) of {tmp_path}/list.json"
    with pytest.raises(SourceError, match=f"^{text}.*{where}$"):
        scan_entries(tmp_path, ENTRY, bad)


@pytest.mark.parametrize(
    "text", ["", "{}", "[1]", "[{]", "[NaN]", "[" * 100_000, '["' + "9" * 5000, "[1" * 5, "[1e999]"]
)
def test_bad_file(tmp_path, text):
    path = tmp_path / "list.json"
    path.write_text(text)
    with pytest.raises(SourceError, match=f"^source={path}: must be a JSON list of problems: "):
        scan(path)


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        ('{"strides": [1], "data": [1, 4, 5], "strides": [2]}', r"strides=\[\[1\], \[2\]\]"),
        ('{"note": 1, "note": 1}', r"note=\[1, 1\]"),
        ('{"epilogue": {"alpha": 1, "alpha": 2}}', r"alpha=\[1, 2\]"),
    ],
)
def test_fields_that_are_given_twice(tmp_path, entry, text):
    path = tmp_path / "list.json"
    path.write_text(f"[{json.dumps(ENTRY)}, {entry}]")
    with pytest.raises(SourceError, match=rf"^{text}: must be given once, in problem 1 of {path}$"):
        scan(path)


def test_bad_path(tmp_path):
    with pytest.raises(SourceError, match=r"source=.*none.json: must be a file that can be read \(No such file"):
        scan(tmp_path / "none.json")
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(SourceError, match=r"must be a file that can be read \(Is a directory"):
        scan(str(tmp_path / "folder.json"))
    with pytest.raises(SourceError, match=r"must be a file that can be read \(embedded null byte\)"):
        scan("a\0.json")
    with pytest.raises(SourceError, match=r"source=model.pb: must end in \.xml \(OpenVINO IR\), \.onnx or \.json"):
        scan("model.pb")


def test_keys_of_the_table_parse():
    for row in coverage_table(scan(EXAMPLES / "problems.json")):
        assert str(Problem.from_key(row.problem).epilogue) == row.epilogue


@pytest.mark.parametrize(
    ("field", "meant"),
    [
        ("pad", "pads_begin and pads_end"),
        ("pads", "pads_begin and pads_end"),
        ("stride", "strides"),
        ("pad_begin", "pads_begin"),
        ("Dilations", "dilations"),
        ("output-padding", "output_padding"),
        ("groups", "filter, whose first extent it is"),
        ("auto_pads", "auto_pad"),
        ("d_type", "dtype"),
    ],
)
def test_fields_that_are_nearly_known(tmp_path, field, meant):
    with pytest.warns(UserWarning, match=rf"^{field}=\[1, 1\]: means nothing; did you mean {meant}\? in problem 0 of "):
        (found,) = scan_entries(tmp_path, ENTRY | {field: [1, 1]})
    assert found.extra == {field: [1, 1]}


@pytest.mark.parametrize("field", ["note", "source", "macs", "followed_by", "model", "date", "batch", "outputs", "id"])
def test_fields_of_ones_own(tmp_path, field):
    assert scan_entries(tmp_path, ENTRY | {field: 1})[0].extra == {field: 1}  # a warning would be an error


def test_quantized_problems(tmp_path):
    fields = {"dtype": "uint8", "quantization": "int8.uint8", "epilogue": "silu"}
    (found,) = scan_entries(tmp_path, ENTRY | fields)
    assert found.problem.quantization == Quantization("int8", "uint8")
    assert Problem.from_key(found.problem.key) == found.problem
    with pytest.raises(SourceError, match=r"dtype='float32': must be int8 or uint8 where quantization is given"):
        scan_entries(tmp_path, ENTRY | {"quantization": "int8.uint8"})
    for text in ("", "int8", "int8.", ".int8", "int8.uint8.int8", "INT8.uint8", "int8,uint8", " int8.uint8"):
        with pytest.raises(SourceError, match=rf"quantization='{text}': must be the types of filter and output"):
            scan_entries(tmp_path, ENTRY | fields | {"quantization": text})
    for text, part in (("int4.uint8", "filter='int4'"), ("int8.int16", "output='int16'"), ("float32.int8", "filter=")):
        with pytest.raises(SourceError, match=rf"quantization\.{part}.*: must be "):
            scan_entries(tmp_path, ENTRY | fields | {"quantization": text})
    for other in (8, ["int8", "uint8"], {"filter": "int8"}, True):
        with pytest.raises(SourceError, match=r"^quantization=.*: Expected `str \| null`, got "):
            scan_entries(tmp_path, ENTRY | fields | {"quantization": other})
    with pytest.raises(SourceError, match=r"in_channels=70000: must keep sums within 32 bits: at most 65793 products"):
        scan_entries(tmp_path, fields | {"data": [1, 70000, 2], "filter": [1, 70000, 1, 1], "strides": [1]})
