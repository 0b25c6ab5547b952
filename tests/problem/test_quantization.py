"""Quantized problems: their field, their key, the rules of their numbers, and the reference against its definition."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.strategies import problems

from tvm_deconv import Epilogue, Problem, ProblemError, Quantization, Scaling, TensorError
from tvm_deconv.problem import testing
from tvm_deconv.problem.quantization import OUTPUTS, STORED, Constants
from tvm_deconv.problem.reference import reference

BASE = Problem(1, 1, 3, 2, (4,), (4,), (2,), (1,), (1,), (8,), dtype="uint8")


@st.composite
def quantized(draw, max_macs=3000):
    """A quantized problem with an activation whose every bit is defined."""
    plain = draw(problems(dtypes=STORED, max_macs=max_macs))
    quantization = Quantization(draw(st.sampled_from(STORED)), draw(st.sampled_from(OUTPUTS)))
    return plain.replace(quantization=quantization)


def by_the_definition(p, data, filter, bias, scaling):
    """Python integers, then NumPy's float32 one number at a time."""
    if p.data_format == "NXC":
        data = np.moveaxis(data, -1, 1)
    filter = p.canonical_filter(filter)
    zeros = np.broadcast_to(scaling.filter_zero_point, p.bias_shape).tolist()
    scales = np.broadcast_to(np.asarray(scaling.filter_scale, np.float64), p.bias_shape)
    sums = np.zeros((p.batch, p.groups * p.out_channels, *p.output_spatial), object)
    for n, g, i, o in np.ndindex(p.batch, p.groups, p.in_channels, p.out_channels):
        channel, row = g * p.out_channels + o, g * p.in_channels + i
        for x, k in itertools.product(np.ndindex(p.data_spatial), np.ndindex(p.kernel)):
            at = [s * a + d * b - pb for s, a, d, b, pb in zip(p.strides, x, p.dilations, k, p.pads_begin, strict=True)]
            if all(0 <= index < extent for index, extent in zip(at, p.output_spatial, strict=True)):
                factor = int(data[(n, row, *x)]) - scaling.data_zero_point
                sums[(n, channel, *at)] += factor * (int(filter[(g, i, o, *k)]) - zeros[channel])
    out = np.zeros(sums.shape)
    for index in np.ndindex(sums.shape):
        channel = index[1]
        total = sums[index] + (0 if bias is None else int(bias[channel]))
        scale = 1 if p.output_dtype == "int32" else np.float32(scaling.data_scale * scales[channel])
        inverse = np.float32(1 / scaling.output_scale)
        if p.output_dtype in STORED and p.epilogue.activation in ("none", "relu", "leaky_relu"):
            scale, inverse = min(scale * inverse, np.float32(2.0**64)), 1
        real = total if p.output_dtype == "int32" else np.float32(total) * scale
        if p.epilogue.activation == "relu":
            real = max(real, 0)
        elif p.epilogue.activation == "clip":
            real = min(max(real, np.float32(p.epilogue.minimum)), np.float32(p.epilogue.maximum))
        if p.output_dtype in STORED:
            nearest = np.rint(np.float32(real) * inverse)
            limits = np.iinfo(p.output_dtype)
            real = min(max(int(nearest) + scaling.output_zero_point, limits.min), limits.max)
        out[index] = real
    return np.moveaxis(out, 1, -1) if p.data_format == "NXC" else out


@settings(max_examples=60, deadline=None)
@given(quantized(), st.integers(0, 99))
def test_the_reference_is_the_definition(p, seed):
    arrays = testing.operands(p, seed)
    np.testing.assert_array_equal(reference(p, *arrays), by_the_definition(p, *arrays))


@pytest.mark.parametrize(("data_scale", "output_scale", "stored"), [(2.0**40, 2.0**-60, 255), (2.0**-60, 2.0**40, 9)])
def test_extreme_scales(data_scale, output_scale, stored):
    """Their product would leave float32: any sum but zero saturates, or is as little as zero."""
    p = Problem(
        1, 1, 1, 1, (2,), (1,), (1,), (1,), (0,), (2,), dtype="uint8", quantization=Quantization("int8", "uint8")
    )
    scaling = Scaling(
        data_scale=data_scale,
        filter_scale=data_scale,
        output_scale=output_scale,
        data_zero_point=7,
        output_zero_point=9,
    )
    found = reference(p, np.array([[[7, 8]]], np.uint8), np.ones((1, 1, 1), np.int8), scaling=scaling)
    assert found.tolist() == [[[9, stored]]]


@settings(max_examples=60)
@given(quantized())
def test_keys_read_back(p):
    assert Problem.from_key(p.key) == p
    assert p.replace(quantization=None).key == p.key.replace(f".{p.quantization}", "")
    assert p.artifact_key != p.replace(quantization=None).artifact_key
    assert not p.serves(p.replace(quantization=None))


def test_constants_read_back():
    bias, scales = np.array([-5, 6, 7], np.int32), np.array([0.5, 3e-9, 1e30], np.float32)
    made = Constants(3, -4, np.float32(0.1), bias, scales)
    found = Constants.of_table(made.table)
    assert (found.data_zero_point, found.output_zero_point, found.inverse) == (3, -4, np.float32(0.1))
    np.testing.assert_array_equal(found.bias, bias)
    np.testing.assert_array_equal(found.scales, scales)


@pytest.mark.parametrize(
    "text", ["uint8.int8", "uint8.int8.", "uint8.int8.int16", "uint8..int8", "uint8.int8.int8.int8"]
)
def test_other_keys_are_refused(text):
    key = BASE.replace(quantization=Quantization("int8", "int8")).key
    assert Problem.from_key(key).quantization == Quantization("int8", "int8")
    with pytest.raises(ProblemError):
        Problem.from_key(key.replace("uint8.int8.int8", text))


def test_halves_round_to_even_and_results_saturate():
    p = Problem(1, 1, 1, 1, (7,), (1,), (1,), (1,), (0,), (7,), dtype="int8", quantization=Quantization("int8", "int8"))
    data = np.array([[[-128, -3, -1, 1, 3, 5, 127]]], np.int8)
    scaling = Scaling(output_scale=2.0, output_zero_point=1)
    found = reference(p, data, np.ones((1, 1, 1), np.int8), None, scaling)
    assert found.tolist() == [[[-63, -1, 1, 1, 3, 3, 65]]]
    found = reference(p, data, np.full((1, 1, 1), 4, np.int8), None, scaling)
    assert found.tolist() == [[[-128, -5, -1, 3, 7, 11, 127]]]


def test_the_field_refuses_other_types():
    for fields in (("int32", "int8"), ("int8", "int16"), ("float32", "int8"), ("int8", None)):
        with pytest.raises(ProblemError, match=r"quantization\.(filter|output)="):
            Quantization(*fields)
    with pytest.raises(ProblemError, match="must be int8 or uint8 where quantization is given"):
        BASE.replace(dtype="float32", quantization=Quantization("int8", "int8"))
    with pytest.raises(ProblemError, match=r"must be a Quantization, .* or None"):
        BASE.replace(quantization="int8.int8")


def test_the_field_is_a_value():
    # Libraries and caches look problems up by what they are.
    p = BASE.replace(quantization=Quantization("int8", "uint8"))
    assert {p: "found"}[p.replace(quantization=Quantization("int8", "uint8"))] == "found"
    with pytest.raises(dataclasses.FrozenInstanceError):
        p.quantization.output = "int8"
    assert not hasattr(p.quantization, "__dict__")  # nor are others kept


def test_sums_that_may_leave_32_bits_are_refused():
    """Two taps reach an output; 255 * 128 and 255 * 255 are the largest products."""
    for stored, most in (("int8", (2**31 - 1) // (255 * 128)), ("uint8", (2**31 - 1) // (255 * 255))):
        quantization = Quantization(stored, "int32")
        BASE.replace(in_channels=most // 2, quantization=quantization)
        with pytest.raises(ProblemError, match=f"at most {most} products"):
            BASE.replace(in_channels=most // 2 + 1, quantization=quantization)


@pytest.mark.parametrize(
    ("scaling", "rule"),
    [
        ({"data_scale": 0.0}, "data_scale=0.0: must be from 2"),
        ({"data_scale": -1.0}, "data_scale=-1.0: must be from 2"),
        ({"data_scale": math.nan}, "data_scale=nan: must be from 2"),
        ({"output_scale": math.inf}, "output_scale=inf: must be from 2"),
        ({"filter_scale": [1.0, 0.0]}, "filter_scale=0.0: must be from 2"),
        (
            {"filter_scale": [1.0, 1.0, 1.0]},
            "filter_scale=(3,): must be one number or have one for each",
        ),
        ({"filter_scale": [[1.0, 1.0]]}, "filter_scale=(1, 2): must be one number"),
        ({"filter_scale": "wide"}, "filter_scale='wide': must be a number"),
        ({"data_scale": [1.0, 1.0]}, "data_scale=(2,): must be one"),
        ({"data_zero_point": 256}, "data_zero_point=256: must be from 0 to 255, the range of uint8"),
        ({"data_scale": 2.0**41}, "data_scale=2199023255552.0: must be from 2"),
        ({"output_scale": -math.inf}, "output_scale=-inf: must be from 2"),
        ({"filter_scale": []}, "filter_scale=(0,): must be one number or have one for each"),
        ({"filter_scale": [[1.0], [1.0, 2.0]]}, "filter_scale=[[1.0], [1.0, 2.0]]: must be a number"),
        ({"data_scale": None}, "data_scale=None: must be a number"),
        ({"data_scale": True}, "data_scale=True: must be a number"),
        ({"data_scale": 1j}, "data_scale=1j: must be a number"),
        ({"data_zero_point": 0.5}, "data_zero_point=0.5: must be integers"),
        ({"data_zero_point": math.nan}, "data_zero_point=nan: must be integers"),
        ({"data_zero_point": math.inf}, "data_zero_point=inf: must be integers"),
        ({"data_zero_point": 2**32}, "data_zero_point=4294967296: must be from 0 to 255"),
        ({"data_zero_point": 2**63}, "data_zero_point=9223372036854775808: must be integers"),
        ({"data_zero_point": 2**64}, "data_zero_point=18446744073709551616: must be a number"),
        ({"data_zero_point": [0, 0]}, "data_zero_point=(2,): must be one"),
        ({"output_zero_point": "0"}, "output_zero_point='0': must be a number"),
        ({"filter_zero_point": [0, 0, 0]}, "filter_zero_point=(3,): must be one number or have one for each"),
        ({"filter_zero_point": [0, math.nan]}, "filter_zero_point=[0, nan]: must be integers"),
        ({"output_zero_point": -129}, "output_zero_point=-129: must be from -128 to 127, the range of int8"),
        ({"filter_zero_point": 1}, "filter_zero_point=1: must be 0 for an int8 filter"),
    ],
)
def test_numbers_outside_of_their_ranges_are_refused(scaling, rule):
    p = BASE.replace(quantization=Quantization("int8", "int8"))
    data, filter = np.zeros(p.data_shape, np.uint8), np.zeros(p.filter_shape, np.int8)
    assert not reference(p, data, filter, None, Scaling()).any()
    with pytest.raises(ProblemError) as raised:
        reference(p, data, filter, None, Scaling(**scaling))
    assert rule in str(raised.value)


def test_outputs_that_are_not_quantized_have_no_scale():
    p = BASE.replace(quantization=Quantization("uint8", "float32"))
    data, filter = np.zeros(p.data_shape, np.uint8), np.zeros(p.filter_shape, np.uint8)
    with pytest.raises(ProblemError, match=r"output_scale=0\.5: must be 1: the output is float32"):
        reference(p, data, filter, None, Scaling(output_scale=0.5))
    with pytest.raises(ProblemError, match=r"output_zero_point=3: must be 0 where it is float32"):
        reference(p, data, filter, None, Scaling(output_zero_point=3))
    assert not reference(p, data, filter, None, Scaling(filter_zero_point=[255, 3])).any()


def test_a_bias_leaves_room_for_the_sums():
    p = BASE.replace(quantization=Quantization("int8", "int32"), epilogue=Epilogue(True))
    data, filter = np.zeros(p.data_shape, np.uint8), np.zeros(p.filter_shape, np.int8)
    room = 2**31 - 1 - 6 * 255 * 128
    assert reference(p, data, filter, np.array([room, -room]), Scaling()).max() == room
    with pytest.raises(TensorError, match=f"must be at most {room} in magnitude"):
        reference(p, data, filter, np.array([0, room + 1]), Scaling())


def test_every_problem_says_whether_it_is_quantized():
    with pytest.raises(ProblemError, match="must be a Scaling: the problem is quantized"):
        reference(BASE.replace(quantization=Quantization("int8", "int8")), *testing.operands(BASE))


def test_a_deviation_of_one_step_is_allowed_to_what_is_rounded_twice():
    """An activation in float32 may end on the other side of a tie; those that are exact may not."""
    for activation, allowed in (("relu", False), ("silu", True)):
        p = BASE.replace(quantization=Quantization("int8", "uint8"), epilogue=Epilogue(activation=activation))
        expected = reference(p, *testing.operands(p))
        assert testing.deviation(p, expected, expected).allowed
        other = expected.copy()
        other.flat[0] += 1
        assert testing.deviation(p, other, expected).allowed is allowed
        other.flat[0] += 1
        assert not testing.deviation(p, other, expected).allowed


def test_parts_take_the_numbers_of_their_channels(monkeypatch):
    p = BASE.replace(groups=2, quantization=Quantization("uint8", "int8"))
    arrays = testing.operands(p)
    monkeypatch.setattr(testing, "PART_ELEMENTS", 8)
    found = np.full(p.output_shape, np.nan)
    for part in testing.parts(p, arrays):
        found[part.slices] = reference(part.problem, *part.operands)
    np.testing.assert_array_equal(found, reference(p, *arrays))
