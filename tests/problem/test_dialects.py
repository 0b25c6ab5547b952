"""The tables of docs/semantics.md, row by row.

test_dialect_conformance.py has what all dialects share, and test_other_systems.py compares with other systems.
"""

import numpy as np
import pytest

from tvm_deconv import Problem, ProblemError, from_onednn, from_onnx, from_openvino, from_torch

# One axis: X = 5, K = 4, s = 3, so nat = 3*4 + 3 + 1 = 16.


def openvino(**attributes):
    return from_openvino((1, 2, 5), (2, 3, 4), **{"strides": (3,)} | attributes)


def onednn(**attributes):
    return from_onednn((1, 5, 2), (4, 3, 2), **{"strides": (3,)} | attributes)


def onnx(**attributes):
    return from_onnx((1, 2, 5), (2, 3, 4), **{"strides": (3,)} | attributes)


def torch(**attributes):
    return from_torch((1, 2, 5), (2, 3, 4), **{"stride": 3} | attributes)


def placed(p):
    """(begin pad, output extent) of the last axis."""
    return p.pads_begin[-1], p.output_spatial[-1]


@pytest.mark.parametrize("dialect", [openvino, onednn])
@pytest.mark.parametrize(
    ("attributes", "expected"),
    [
        ({}, (0, 16)),
        ({"pads_begin": (2,), "pads_end": (1,)}, (2, 13)),
        ({"pads_begin": (2,), "pads_end": (1,), "output_padding": (2,)}, (2, 15)),
        ({"output_padding": (7,)}, (0, 23)),
        ({"pads_begin": (9,), "pads_end": (7,)}, (9, 0)),
        ({"dilations": (2,)}, (0, 19)),
        ({"strides": None}, (0, 8)),
        # Without an output_shape every automatic pad is none at all.
        ({"auto_pad": "same_upper", "pads_begin": (2,), "pads_end": (1,), "output_padding": (1,)}, (0, 17)),
        ({"auto_pad": "same_lower", "pads_begin": (2,)}, (0, 16)),
        ({"auto_pad": "valid", "pads_end": (2,)}, (0, 16)),
        # With one, explicit and valid keep their begin, and output_padding has no effect.
        ({"output_shape": (11,), "pads_begin": (2,), "pads_end": (9,)}, (2, 11)),
        ({"output_shape": (11,), "pads_begin": (2,), "output_padding": (2,)}, (2, 11)),
        ({"output_shape": (11,)}, (0, 11)),
        ({"output_shape": (11,), "auto_pad": "valid", "pads_begin": (2,)}, (0, 11)),
        ({"output_shape": (0,)}, (0, 0)),
        # What is longer than natural is zeros at the end.
        ({"output_shape": (20,), "auto_pad": "same_upper"}, (0, 20)),
        ({"output_shape": (20,), "auto_pad": "same_lower"}, (0, 20)),
        ({"output_shape": (20,), "auto_pad": "valid"}, (0, 20)),
        ({"output_shape": (20,)}, (0, 20)),
        ({"output_shape": (20,), "output_shape_rule": "formula"}, (0, 20)),
        # An even total has one way to be shared out ...
        ({"output_shape": (10,), "auto_pad": "same_upper"}, (3, 10)),
        ({"output_shape": (10,), "auto_pad": "same_lower"}, (3, 10)),
        ({"output_shape": (10,), "auto_pad": "same_lower", "output_padding": (2,)}, (4, 10)),
        # ... and the documents' formula shares it out without SAME too, the odd element at the end.
        ({"output_shape": (10,), "output_shape_rule": "formula", "pads_begin": (1,)}, (3, 10)),
        ({"output_shape": (11,), "output_shape_rule": "formula"}, (2, 11)),
        ({"output_shape": (11,), "output_shape_rule": "formula", "auto_pad": "valid"}, (2, 11)),
    ],
)
def test_backprop_data(dialect, attributes, expected):
    assert placed(dialect(**attributes)) == expected


@pytest.mark.parametrize(
    ("dialect", "auto_pad", "begin"),
    [
        (openvino, "same_upper", 3),
        (openvino, "same_lower", 2),
        (onednn, "same_upper", 2),
        (onednn, "same_lower", 3),
        (onnx, "SAME_UPPER", 2),
        (onnx, "SAME_LOWER", 3),
        (onnx, "NOTSET", 3),
        (onnx, "VALID", 3),
    ],
)
def test_the_odd_element_of_a_pad(dialect, auto_pad, begin):
    assert placed(dialect(auto_pad=auto_pad, output_shape=(11,))) == (begin, 11)


@pytest.mark.parametrize(
    ("attributes", "expected"),
    [
        ({}, (0, 16)),
        ({"strides": None}, (0, 8)),
        ({"pads": (2, 1), "output_padding": (1,)}, (2, 14)),
        ({"auto_pad": "VALID", "pads": (2, 1), "output_padding": (1,)}, (0, 17)),
        # SAME without an output_shape makes X*s = 15 of 16: a total of 1, or of 3 with an output_padding of 2.
        ({"auto_pad": "SAME_UPPER"}, (0, 15)),
        ({"auto_pad": "SAME_LOWER"}, (1, 15)),
        ({"auto_pad": "SAME_LOWER", "output_padding": (2,), "pads": (5, 5)}, (2, 15)),
        ({"auto_pad": "SAME_UPPER", "dilations": (3,)}, (3, 15)),
        ({"output_shape": (10,), "pads": (1, 1)}, (3, 10)),
        ({"output_shape": (20,)}, (0, 20)),
        ({"output_shape": (20,), "auto_pad": "SAME_LOWER"}, (0, 20)),
        ({"output_padding": (5,)}, (0, 21)),
        ({"kernel_shape": [4]}, (0, 16)),
        ({"output_shape": (0,)}, (8, 0)),
    ],
)
def test_onnx(attributes, expected):
    assert placed(onnx(**attributes)) == expected


def test_onnx_kernel_shape_of_one():
    assert from_onnx((1, 2, 5), (2, 3, 1), kernel_shape=(1,)).kernel == (1,)


def test_onnx_same_where_the_kernel_is_smaller_than_the_stride():
    assert placed(from_onnx((1, 1, 3), (1, 1, 2), strides=(4,), auto_pad="SAME_LOWER")) == (0, 12)


@pytest.mark.parametrize(
    ("attributes", "expected"),
    [
        ({}, (0, 16)),
        ({"stride": 1}, (0, 8)),
        ({"stride": (3,), "padding": [1], "output_padding": 2, "dilation": 2}, (1, 19)),
        ({"padding": 1, "output_size": (16,)}, (1, 16)),
        ({"output_size": (1, 3, 18)}, (0, 18)),
        ({"output_size": (17,), "output_padding": 9}, (0, 17)),
        ({"stride": 2, "dilation": 3, "output_padding": 2}, (0, 20)),
    ],
)
def test_torch(attributes, expected):
    assert placed(torch(**attributes)) == expected


def test_torch_broadcasts_and_takes_data_without_a_batch():
    assert from_torch((1, 2, 5), (2, 3, 4)) == torch(stride=1)
    assert from_torch((1, 2, 5, 5), (2, 3, 4, 4), stride=(3,), padding=np.array([1, 2])).strides == (3, 3)
    p = from_torch((4, 5, 6), (4, 2, 3, 3), stride=2, padding=(1, 0), groups=2, output_size=(4, 9, 13))
    assert p == from_torch((1, 4, 5, 6), (4, 2, 3, 3), stride=(2, 2), padding=(1, 0), groups=2)
    assert p.data_shape == (1, 4, 5, 6)
    assert p.output_shape == (1, 4, 9, 13)


@pytest.mark.parametrize("word", [None, "none", "None", "NOTSET", "notset", "explicit", "EXPLICIT", "Explicit"])
def test_words_for_explicit(word):
    for dialect in (openvino, onednn):
        assert placed(dialect(auto_pad=word, output_shape=(11,), pads_begin=(2,))) == (2, 11)
    assert onnx(auto_pad=word, pads=(2, 0)) == onnx(pads=(2, 0))


@pytest.mark.parametrize("word", ["same_upper", "SAME_UPPER", "Same_Upper"])
def test_case_of_auto_pad_does_not_count(word):
    assert openvino(auto_pad=word, output_shape=(11,)) == openvino(auto_pad="same_upper", output_shape=(11,))


def test_grouped_filters_of_openvino():
    p = from_openvino((1, 6, 4, 4), (3, 2, 5, 3, 3), strides=(2, 2))
    assert (p.groups, p.in_channels, p.out_channels, p.filter_format) == (3, 2, 5, "GIOX")
    assert p.output_shape == (1, 15, 9, 9)
    single = from_openvino((1, 6, 4, 4), (1, 6, 5, 3, 3), strides=(2, 2))
    assert (single.groups, single.filter_shape) == (1, (1, 6, 5, 3, 3))
    assert single.artifact_key == from_openvino((1, 6, 4, 4), (6, 5, 3, 3), strides=(2, 2)).artifact_key


def test_the_example_layers():
    attributes = {"strides": (2, 2), "pads_begin": (1, 1), "pads_end": (1, 1)}
    p = Problem.from_openvino((1, 20, 224, 224), (20, 10, 3, 3), **attributes)
    assert p.output_shape == (1, 10, 447, 447)
    grouped = Problem.from_openvino((1, 20, 224, 224), (4, 5, 2, 3, 3), **attributes)
    assert grouped.output_shape == (1, 8, 447, 447)
    # Tap 0 of an axis loses its first product to the pad, tap 2 its last one.
    assert grouped.macs == 4 * 5 * 2 * (224 + 223 + 223) ** 2


@pytest.mark.parametrize(
    ("filter_format", "kept", "shape"),
    [
        ("OIX", "IOX", (6, 5, 3, 2)),
        ("IOX", "IOX", (6, 5, 3, 2)),
        ("XIO", "XIO", (3, 2, 5, 6)),
        ("XOI", "XIO", (3, 2, 5, 6)),
    ],
)
@pytest.mark.parametrize(("data_format", "data"), [("NCX", (1, 6, 4, 7)), ("NXC", (1, 4, 7, 6))])
def test_layouts_of_onednn(filter_format, kept, shape, data_format, data):
    p = from_onednn(data, shape, strides=(1, 2), groups=2, data_format=data_format, filter_format=filter_format)
    assert (p.groups, p.in_channels, p.out_channels, p.kernel) == (2, 3, 5, (3, 2))
    assert (p.data_shape, p.filter_shape, p.filter_format) == (data, shape, kept)


def test_onednn_is_channels_last_by_default():
    p = from_onednn((1, 4, 7, 6), (3, 2, 5, 6), strides=(1, 2))
    assert (p.data_format, p.filter_format) == ("NXC", "XIO")


def test_data_format_of_openvino():
    p = from_openvino((1, 4, 7, 6), (6, 5, 3, 2), strides=(1, 2), data_format="NXC")
    assert p == from_openvino((1, 6, 4, 7), (6, 5, 3, 2), strides=(1, 2)).replace(data_format="NXC")


@pytest.mark.parametrize("extra", [0, 1, 2])
def test_output_size_says_what_output_padding_says(extra):
    assert torch(output_size=(14 + extra,), padding=1) == torch(output_padding=extra, padding=1)


def test_numpy_arrays_are_sequences():
    p = openvino(strides=np.array([3]), pads_begin=np.array([1]), output_shape=np.array([9], np.int32))
    assert p == openvino(pads_begin=(1,), output_shape=(9,))


@pytest.mark.parametrize("name", ["from_openvino", "from_onednn"])
def test_strides_must_be_said(name):
    with pytest.raises(TypeError):
        getattr(Problem, name)((1, 3, 3, 3), (3, 3, 3, 3))


@pytest.mark.parametrize(
    ("attributes", "expected"),
    [
        # K = 4, s = 3: of total = 1 same_upper cuts off the end and same_lower the begin.
        ({"auto_pad": "same_upper"}, (0, 15)),
        ({"auto_pad": "same_lower"}, (1, 15)),
        ({"auto_pad": "same_upper", "output_padding": (2,)}, (0, 17)),
        ({"auto_pad": "same_lower", "output_padding": (2,), "pads_begin": (3,)}, (1, 17)),
        ({"auto_pad": "same_lower", "dilations": (2,)}, (2, 15)),
        # A kernel shorter than the stride leaves nothing to cut off.
        ({"auto_pad": "same_lower", "strides": (5,)}, (0, 24)),
        ({"auto_pad": "valid", "pads_begin": (3,)}, (0, 16)),
        ({"auto_pad": "same_upper", "output_shape": (11,)}, (2, 11)),
    ],
)
@pytest.mark.parametrize("filter_format", ["XOI", "IOX"])
def test_same_of_conv_transpose(filter_format, attributes, expected):
    """test_onednn.py compares with oneDNN itself, where it is installed."""
    shape = (4, 3, 2) if filter_format == "XOI" else (2, 3, 4)
    named = {"strides": (3,)} | attributes
    assert placed(from_onednn((1, 5, 2), shape, filter_format=filter_format, **named)) == expected


def test_same_of_conv_transpose_as_people_meet_it():
    p = from_onednn((1, 28, 28, 1), (3, 3, 1, 1), strides=(2, 2), filter_format="XOI", auto_pad="SAME_UPPER")
    assert p.output_spatial == (56, 56)
    p = from_onednn((1, "any", 1), (3, 1, 1), strides=(2,), filter_format="XOI", auto_pad="SAME_UPPER")
    assert p.at((1, 28, 1)).output_spatial == (56,)


@pytest.mark.parametrize("dialect", [openvino, onednn, onnx])
def test_an_attribute_without_elements_is_left_out(dialect):
    names = ["strides", "dilations", "output_padding"]
    names += ["pads"] if dialect is onnx else ["pads_begin", "pads_end"]
    assert dialect(**{name: [] for name in names}) == dialect(strides=(1,))


@pytest.mark.parametrize("auto_pad", ["notset", "valid", "same_upper", "same_lower"])
@pytest.mark.parametrize("dialect", [from_openvino, from_onnx])
def test_output_shape_of_the_other_axis(dialect, auto_pad):
    """Along an axis with "any", the other attributes decide; along the others, the output_shape does."""
    named = {"strides": (2, 3), "auto_pad": auto_pad}
    p = dialect((1, 2, "any", 5), (2, 3, 3, 4), output_shape=("any", 12), **named)
    for extent in (4, 9):
        natural = dialect((1, 2, extent, 5), (2, 3, 3, 4), **named)
        wanted = dialect((1, 2, extent, 5), (2, 3, 3, 4), output_shape=(natural.output_spatial[0], 12), **named)
        assert p.at((1, 2, extent, 5)).output_spatial == (natural.output_spatial[0], 12)
        assert p.pads_begin == (natural.pads_begin[0], wanted.pads_begin[1])


@pytest.mark.parametrize("output_shape", [(9, 12), ("any", "any"), (9, "any"), ("any",), 9, np.array([9, 12])])
def test_output_shape_of_an_axis_that_a_call_decides(output_shape):
    with pytest.raises(ProblemError, match=r"^output_shape=.*: must be any just where a spatial extent of the data is"):
        from_openvino((1, 2, "any", 5), (2, 3, 3, 4), strides=(2, 3), output_shape=output_shape)


def test_errors_show_the_shape_that_was_given():
    with pytest.raises(ProblemError, match=r"^data_shape=\('any', 'any', 5, 5\): axis 1 \(NCX\) must be a number"):
        from_openvino(("any", "any", 5, 5), (2, 3, 3, 4), strides=(1, 1))
    with pytest.raises(ProblemError, match=r"^data_shape=\('any', 0, 'any', 5\): must have channels"):
        from_openvino(("any", 0, "any", 5), (2, 3, 3, 4), strides=(1, 1))


def test_the_filter_of_onnx_has_the_rank_of_the_data():
    with pytest.raises(ProblemError, match=r"^filter_shape=\(4, 2, 3\): must have rank 4, that of the data$"):
        from_onnx((1, 4, 8, 8), (4, 2, 3))
