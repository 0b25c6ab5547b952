import dataclasses
import itertools
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.strategies import epilogues, problems

from tvm_deconv import Epilogue, Problem, ProblemError
from tvm_deconv.problem import ACTIVATIONS


def plain(**changes):
    """Two groups of 3 -> 5 channels, 4x6, kernel 3x2, stride 2x1."""
    fields = {
        "batch": 2,
        "groups": 2,
        "in_channels": 3,
        "out_channels": 5,
        "data_spatial": (4, 6),
        "kernel": (3, 2),
        "strides": (2, 1),
        "dilations": (1, 1),
        "pads_begin": (1, 0),
        "output_spatial": (8, 7),
    }
    return Problem(**fields | changes)


@given(problems())
def test_key_reads_back(p):
    assert Problem.from_key(p.key) == p
    assert not set(p.key) & set(" \t\n/\\'\"")
    assert len(p.key) < 200


@given(problems())
def test_pickle_and_hash(p):
    again = pickle.loads(pickle.dumps(p))
    assert again == p
    assert hash(again) == hash(p)


@given(problems(), problems())
def test_equal_keys_mean_equal_problems(p, q):
    assert (p == q) == (p.key == q.key)


def test_key_is_stable():
    p = plain(dtype="float16", data_format="NXC", filter_format="XIO", epilogue=Epilogue(True, "leaky_relu", alpha=0.2))
    assert p.key == "n2-g2-i3-o5-x4x6-k3x2-s2x1-d1x1-p1x0-y8x7-float16-NXC-XIO-bias+leaky_relu(0.2)"


@pytest.mark.parametrize(
    "edit",
    [
        lambda key: key[:-1],
        lambda key: key[:0],
        lambda key: key + " ",
        lambda key: key + "\n",
        lambda key: " " + key,
        lambda key: key.replace("n2", "n02"),
        lambda key: key.replace("n2", "n٢"),
        lambda key: key.replace("n2", "n" + "2" * 5000),
        lambda key: key.replace("x4x6", "x4x" + "6" * 5000),
        lambda key: key.replace("x4x6", "x4xx6"),
        lambda key: key.replace("x4x6", "x4x6x"),
        lambda key: key.replace("x4x6", "x4"),
        lambda key: key.replace("x4x6", "x4x6any"),
        lambda key: key.replace("x4x6", "xany(2)4x6"),
        lambda key: key.replace("x4x6", "xany(2x6)x6"),
        lambda key: key.replace("p1x0", "p-1x0"),
        lambda key: key.replace("s2x1", "s0x1"),
        lambda key: key.replace("float32", "float31"),
        lambda key: key.replace("IOX", "OIX"),
        lambda key: key.replace("none", ""),
        lambda key: key.replace("none", "bias+none"),
        lambda key: key.replace("none", "relu(1.0)"),
        lambda key: key.replace("none", "leaky_relu(.1)"),
        lambda key: key.replace("none", "leaky_relu(a)"),
        lambda key: key.replace("none", "clip(0.0)"),
        lambda key: key.replace("none", "clip(2.0,1.0)"),
        lambda key: key.replace("none", "none-extra"),
        lambda key: key.encode(),
        lambda key: [key],
    ],
)
def test_nothing_else_is_a_key(edit):
    key = plain().key
    assert edit(key) != key
    with pytest.raises(ProblemError):
        Problem.from_key(edit(key))


@given(epilogues())
def test_epilogue_reads_back(epilogue):
    assert Epilogue.parse(str(epilogue)) == epilogue


@pytest.mark.parametrize(
    ("epilogue", "text"),
    [
        (Epilogue(), "none"),
        (Epilogue(True), "bias"),
        (Epilogue(activation="relu"), "relu"),
        (Epilogue(True, "gelu"), "bias+gelu"),
        (Epilogue(activation="leaky_relu"), "leaky_relu(0.01)"),
        (Epilogue(True, "leaky_relu", alpha=1e-5), "bias+leaky_relu(1e-05)"),
        (Epilogue(activation="clip"), "clip(0.0,6.0)"),
        (Epilogue(activation="clip", minimum=-0.0, maximum=float("inf")), "clip(0.0,inf)"),
    ],
)
def test_epilogue_text(epilogue, text):
    assert str(epilogue) == text
    assert Epilogue.parse(text) == epilogue


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", [name for name, one in ACTIVATIONS.items() if one.parameters])
def test_a_text_may_leave_defaults_out(activation, bias):
    epilogue = Epilogue(bias, activation)
    assert Epilogue.parse(str(epilogue).partition("(")[0]) == epilogue


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_numbers_without_meaning_do_not_count(activation):
    other = Epilogue(activation=activation, alpha=3, minimum=-2, maximum=2)
    assert (other == Epilogue(activation=activation)) == (not ACTIVATIONS[activation].parameters)


def test_shapes():
    assert plain().data_shape == (2, 6, 4, 6)
    assert plain().output_shape == (2, 10, 8, 7)
    assert plain().filter_shape == (6, 5, 3, 2)
    assert plain().bias_shape == (10,)
    last = plain(data_format="NXC", filter_format="XIO")
    assert last.data_shape == (2, 4, 6, 6)
    assert last.output_shape == (2, 8, 7, 10)
    assert last.filter_shape == (3, 2, 5, 6)
    assert plain(filter_format="GIOX").filter_shape == (2, 3, 5, 3, 2)


@pytest.mark.parametrize(("alias", "kept"), [("OIX", "IOX"), ("XOI", "XIO")])
def test_one_name_for_one_memory(alias, kept):
    assert plain(filter_format=alias) == plain(filter_format=kept)
    assert plain(filter_format=alias).filter_format == kept


def test_filter_formats_share_an_artifact():
    keys = {plain(filter_format=name).artifact_key for name in ("IOX", "GIOX", "XIO")}
    assert keys == {plain(filter_format="GIOX").key}
    assert plain(data_format="NXC").artifact_key not in keys


@given(problems(filter_formats=["IOX", "XIO", "GIOX"], max_macs=5000))
def test_canonical_filter_is_a_view(p):
    filter = np.arange(np.prod(p.filter_shape)).reshape(p.filter_shape)
    view = p.canonical_filter(filter)
    assert view.shape == (p.groups, p.in_channels, p.out_channels, *p.kernel)
    assert np.shares_memory(view, filter)
    for g, i, o in itertools.product(range(p.groups), (0, p.in_channels - 1), (0, p.out_channels - 1)):
        k = tuple(extent - 1 for extent in p.kernel)
        row = g * p.in_channels + i
        where = {"IOX": (row, o, *k), "GIOX": (g, i, o, *k), "XIO": (*k, o, row)}[p.filter_format]
        assert view[(g, i, o, *k)] == filter[where]


def test_canonical_filter_of_a_strided_array_is_a_view():
    p = plain()
    filter = np.zeros((12, 5, 3, 4))[::2, :, :, ::2]
    assert np.shares_memory(p.canonical_filter(filter), filter)


@pytest.mark.parametrize(
    ("dtype", "bytes", "accumulate", "output"),
    [
        ("float64", 8, "float64", "float64"),
        ("float32", 4, "float32", "float32"),
        ("float16", 2, "float32", "float16"),
        ("bfloat16", 2, "float32", "bfloat16"),
        ("int8", 1, "int32", "int32"),
        ("uint8", 1, "int32", "int32"),
        ("int32", 4, "int32", "int32"),
    ],
)
def test_types(dtype, bytes, accumulate, output):
    p = plain(dtype=dtype)
    assert (p.accumulate_dtype, p.output_dtype) == (accumulate, output)
    assert p.replace(output_spatial=(0, 0)).min_bytes == bytes * (2 * 6 * 24 + 6 * 5 * 6)


def test_macs_of_a_kernel_too_large_to_walk():
    # x of 0, 1, 2 lands at 7x + 5k - 3 >= 0: three positions for each k, but for the first k and the last.
    far = Problem(1, 1, 1, 1, (3,), (10**15,), (7,), (5,), (3,), (10**15,))
    assert far.macs == sum(
        # k from ceil((3 - 7x) / 5), 0 at least, to the last with 7x + 5k - 3 < 10**15
        (10**15 + 3 - 7 * x - 1) // 5 - max(0, -(-(3 - 7 * x) // 5)) + 1
        for x in range(3)
    )


@given(problems(max_macs=20_000))
def test_macs_counts_the_products_that_reach_the_output(p):
    pairs = 1
    for axis in range(p.rank):
        positions = [
            p.strides[axis] * x + p.dilations[axis] * k - p.pads_begin[axis]
            for x in range(p.data_spatial[axis])
            for k in range(p.kernel[axis])
        ]
        pairs *= sum(0 <= y < p.output_spatial[axis] for y in positions)
    assert p.macs == p.batch * p.groups * p.in_channels * p.out_channels * pairs


def test_min_bytes():
    sizes = (2 * 6 * 24, 6 * 5 * 6, 2 * 10 * 56)
    assert plain().min_bytes == 4 * sum(sizes)
    assert plain(epilogue=Epilogue(True)).min_bytes == 4 * sum(sizes) + 40
    half = plain(dtype="bfloat16", epilogue=Epilogue(True, "relu"))
    assert half.min_bytes == 2 * sum(sizes) + 40
    assert plain(dtype="int8").min_bytes == sizes[0] + sizes[1] + 4 * sizes[2]


def test_sequences_and_numpy_integers_are_taken():
    p = plain(batch=np.int64(2), kernel=[3, np.uint8(2)], strides=np.array([2, 1]), output_spatial=iter((8, 7)))
    assert p == plain()
    assert type(p.batch) is int
    assert all(type(k) is int for k in (*p.kernel, *p.strides))


def test_dilation_of_a_single_element_is_one():
    assert plain(kernel=(1, 2), dilations=(4, 3)).dilations == (1, 3)
    assert plain(kernel=(2, 1), dilations=(4, 3)).dilations == (4, 1)


def test_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        plain().batch = 1
    with pytest.raises((AttributeError, TypeError)):
        plain().extra = 1


def test_epilogue_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Epilogue().bias = True
    assert hash(Epilogue(True)) == hash(Epilogue(True))


def test_integer_bounds_of_integer_problems():
    lowest, highest = -(2**31), 2**31 - 1
    kept = plain(dtype="int8", epilogue=Epilogue(activation="clip", minimum=lowest, maximum=highest)).epilogue
    assert (kept.minimum, kept.maximum) == (lowest, highest)
    for bounds in ({"minimum": lowest - 1}, {"minimum": lowest, "maximum": highest + 1}):
        with pytest.raises(ProblemError, match="32 bits"):
            plain(dtype="uint8", epilogue=Epilogue(activation="clip", **bounds))


def test_the_last_index_of_64_bits():
    last = 2**63 - 1
    wide = {"data_spatial": (2, 1), "kernel": (1, 1), "pads_begin": (0, 0), "output_spatial": (1, 1)}
    assert plain(**wide, strides=(last - 2, 1)).uncropped_spatial == (last - 1, 1)
    for changes in (
        {"strides": (last - 1, 1)},
        {"strides": (last, 1)},
        {"strides": (last - 2, 1), "pads_begin": (1, 0)},
    ):
        with pytest.raises(ProblemError, match=r"^strides=.*index of axis 0 within 64 bits"):
            plain(**wide | changes)
    with pytest.raises(ProblemError, match=r"^strides=\(9223372036854775808, 1\): every element must fit in 64 bits"):
        plain(**wide, strides=(last + 1, 1))


def test_replace_validates():
    assert plain().replace(batch=7).batch == 7
    with pytest.raises(ProblemError):
        plain().replace(batch=-1)


def test_more_than_32_bits():
    p = plain(batch=1, groups=1, in_channels=1, out_channels=1, data_spatial=(2**20, 2**12), output_spatial=(2**21, 1))
    assert p.min_bytes > 2**32
    assert Problem.from_key(p.key) == p


@given(st.data())
def test_every_field_counts(data):
    p = data.draw(problems(dtypes=["float32"]))
    field = data.draw(
        st.sampled_from(
            [f.name for f in dataclasses.fields(Problem) if f.name not in ("dynamic", "buckets", "quantization")]
        )
    )
    value = getattr(p, field)
    other = {
        "dtype": "float64",
        "data_format": "NXC" if p.data_format == "NCX" else "NCX",
        "filter_format": "XIO" if p.filter_format != "XIO" else "IOX",
        "epilogue": Epilogue(not p.epilogue.bias),
        "precision": "tf32",
    }.get(field) or (value + 1 if isinstance(value, int) else (value[0] + 1, *value[1:]))
    q = p.replace(**{field: other})
    assert (p == q) == (field == "dilations" and p.kernel[0] == 1)
    assert (p.key == q.key) == (p == q)
