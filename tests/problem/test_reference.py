import itertools
import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.strategies import operands, problems

from tvm_deconv import Epilogue, Problem, ProblemError, Scaling, TensorError, TensorTypeError
from tvm_deconv.problem.reference import reference


def by_the_definition(p, data, filter, bias):
    """The formula of docs/semantics.md, one product at a time, in Python numbers."""
    data, filter = np.asarray(data).astype(float), np.asarray(filter).astype(float)
    if p.data_format == "NXC":
        data = data.transpose(0, p.rank + 1, *range(1, p.rank + 1))
    out = np.zeros((p.batch, p.groups * p.out_channels, *p.output_spatial)).tolist()
    channels = itertools.product(range(p.batch), range(p.groups), range(p.in_channels), range(p.out_channels))
    positions = list(itertools.product(*map(range, p.data_spatial)))
    taps = list(itertools.product(*map(range, p.kernel)))
    for (n, g, i, o), x, k in itertools.product(list(channels), positions, taps):
        y = [s * a + d * b - pb for s, a, d, b, pb in zip(p.strides, x, p.dilations, k, p.pads_begin, strict=True)]
        if any(not 0 <= index < extent for index, extent in zip(y, p.output_spatial, strict=True)):
            continue
        row = g * p.in_channels + i
        where = {"IOX": (row, o, *k), "GIOX": (g, i, o, *k), "XIO": (*k, o, row)}[p.filter_format]
        line = out[n][g * p.out_channels + o]
        for index in y[:-1]:
            line = line[index]
        line[y[-1]] += float(data[(n, row, *x)]) * float(filter[where])
    out = np.array(out).reshape(p.batch, p.groups * p.out_channels, *p.output_spatial)
    if bias is not None:
        out = out + np.asarray(bias).astype(float).reshape(-1, *(1,) * p.rank)
    return out.transpose(0, *range(2, p.rank + 2), 1) if p.data_format == "NXC" else out


@settings(max_examples=150)
@given(problems(max_macs=3000), st.integers(0, 9), st.booleans())
def test_is_the_definition(p, seed, special):
    rng = np.random.default_rng(seed)
    bias = rng.integers(-9, 9, p.bias_shape).astype(float) if p.epilogue.bias else None
    p = p.replace(dtype="float64", epilogue=Epilogue(p.epilogue.bias))
    data, filter = (rng.integers(-9, 9, shape).astype(float) for shape in (p.data_shape, p.filter_shape))
    if special:  # zeros among them, so that a product left out because of a zero shows as a missing NaN
        for array in (data, filter):
            array[rng.random(array.shape) < 0.2] = rng.choice([np.nan, np.inf, -np.inf])
    with np.errstate(invalid="ignore"):
        expected = by_the_definition(p, data, filter, bias)
    result = reference(p, data, filter, bias)
    assert result.dtype == np.float64
    assert result.shape == p.output_shape
    np.testing.assert_array_equal(result, expected)


@given(problems(max_macs=3000, epilogue=False))
def test_takes_every_type_exactly(p):
    data, filter, _ = operands(p)
    expected = reference(p.replace(dtype="float64"), data.astype(np.float64), filter.astype(np.float64))
    np.testing.assert_array_equal(reference(p, data, filter), expected)
    if p.dtype == "bfloat16":
        np.testing.assert_array_equal(reference(p, data.view(np.uint16), filter.view(np.uint16)), expected)


def test_uint16_is_a_number_unless_the_problem_is_bfloat16():
    data, filter = np.full((1, 1, 9), 3, np.uint16), np.full((1, 1, 1), 5, np.uint16)
    assert (reference(one(), data, filter) == 15).all()


def one(activation="none", dtype="float64", **numbers):
    """One channel and one kernel element, so that the sum before the activation is the data times one number."""
    return Problem(
        batch=1,
        groups=1,
        in_channels=1,
        out_channels=1,
        data_spatial=(9,),
        kernel=(1,),
        strides=(1,),
        dilations=(1,),
        pads_begin=(0,),
        output_spatial=(9,),
        dtype=dtype,
        epilogue=Epilogue(activation=activation, **numbers),
    )


VALUES = np.array([-math.inf, -700.0, -30.0, -1.5, -0.0, 0.0, 0.5, 3.0, math.inf])


@pytest.mark.parametrize(
    ("activation", "numbers", "function"),
    [
        ("none", {}, lambda x: x),
        ("relu", {}, lambda x: max(x, 0.0)),
        ("leaky_relu", {"alpha": 0.25}, lambda x: x if x >= 0 else 0.25 * x),
        ("leaky_relu", {"alpha": -1.0}, lambda x: abs(x)),
        ("leaky_relu", {"alpha": 0.0}, lambda x: max(x, 0.0)),
        ("sigmoid", {}, lambda x: 1 / (1 + math.exp(-x)) if x > -701 else 0.0),
        ("tanh", {}, math.tanh),
        ("silu", {}, lambda x: x / (1 + math.exp(-x)) if x > -701 else 0.0),
        ("gelu", {}, lambda x: 0.5 * x * math.erfc(-x / math.sqrt(2)) if x > -701 else 0.0),
        ("elu", {}, lambda x: x if x >= 0 else math.expm1(x)),
        ("elu", {"alpha": 0.25}, lambda x: x if x >= 0 else 0.25 * math.expm1(x)),
        ("hardswish", {}, lambda x: 0.0 if x <= -3 else x if x >= 3 else x * (x + 3) / 6),
        ("softplus", {}, lambda x: max(x, 0.0) + math.log1p(math.exp(-abs(x)))),
        ("mish", {}, lambda x: x * math.tanh(math.log1p(math.exp(x))) if -701 < x < 701 else max(x, 0.0)),
        ("clip", {"minimum": -1, "maximum": 0.75}, lambda x: min(max(x, -1.0), 0.75)),
    ],
)
def test_activations(activation, numbers, function):
    result = reference(one(activation, **numbers), VALUES.reshape(1, 1, 9), np.ones((1, 1, 1)))
    np.testing.assert_allclose(result.ravel(), [function(x) for x in VALUES.tolist()], rtol=1e-15)
    nan = reference(one(activation, **numbers), np.full((1, 1, 9), np.nan), np.ones((1, 1, 1)))
    assert np.isnan(nan).all()


def test_gelu_is_the_error_function_form():
    result = reference(one("gelu"), np.full((1, 1, 9), 1.0), np.ones((1, 1, 1)))
    assert result[0, 0, 0] == pytest.approx(0.8413447460685429, abs=1e-15)


def test_bias_comes_before_the_activation():
    p = one("relu").replace(epilogue=Epilogue(True, "relu"))
    result = reference(p, np.full((1, 1, 9), -1.0), np.ones((1, 1, 1)), np.array([1.5]))
    assert (result == 0.5).all()


def test_what_nothing_reaches_is_zero_and_gets_the_epilogue():
    p = one().replace(output_spatial=(12,), epilogue=Epilogue(True, "sigmoid"))
    result = reference(p, np.full((1, 1, 9), np.nan), np.ones((1, 1, 1)), np.array([0.0]))
    assert np.isnan(result[0, 0, :9]).all()
    assert (result[0, 0, 9:] == 0.5).all()


@pytest.mark.parametrize("channels", [1, 2, 17])
def test_a_zero_does_not_hide_nan_or_infinity(channels):
    p = Problem.from_openvino((1, channels, 5, 7), (channels, channels, 3, 3), strides=(2, 2), dtype="float64")
    for special in (np.nan, np.inf, -np.inf):
        data = np.full(p.data_shape, special)
        assert np.isnan(reference(p, data, np.zeros(p.filter_shape))).all()
        assert np.isnan(reference(p, np.zeros(p.data_shape), np.full(p.filter_shape, special))).all()


def test_one_nan_stays_where_it_reaches():
    p = Problem.from_openvino((1, 1, 5), (1, 1, 3), strides=(3,), dtype="float64")
    data = np.ones(p.data_shape)
    data[0, 0, 2] = np.nan
    assert np.isnan(reference(p, data, np.ones(p.filter_shape)))[0, 0].nonzero()[0].tolist() == [6, 7, 8]


def test_integers_are_exact():
    p = one(dtype="int8")
    assert (reference(p, np.full((1, 1, 9), -128, np.int8), np.full((1, 1, 1), -128, np.int8)) == 16384).all()


def test_the_arguments_are_left_alone():
    p = one("relu")
    data, filter = -np.ones((1, 1, 9)), np.ones((1, 1, 1))
    reference(p, data, filter)[...] = 5
    assert (data == -1).all()
    assert (filter == 1).all()


def test_lists_are_arrays():
    assert reference(one(), [[list(range(9))]], [[[2]]]).ravel().tolist() == list(range(0, 18, 2))


DATA, FILTER = np.ones((1, 1, 9)), np.ones((1, 1, 1))


@pytest.mark.parametrize(
    ("p", "arrays", "argument", "kind"),
    [
        (one(), (np.ones((1, 1, 8)), FILTER), "data", TensorError),
        (one(), (np.ones(9), FILTER), "data", TensorError),
        (one(), (DATA, np.ones((1, 1, 2))), "filter", TensorError),
        (one(), (DATA, FILTER, np.ones(1)), "bias", TensorError),
        (one().replace(epilogue=Epilogue(True)), (DATA, FILTER), "bias", TensorError),
        (one().replace(epilogue=Epilogue(True)), (DATA, FILTER, np.ones(2)), "bias", TensorError),
        (one(), (DATA.astype(object), FILTER), "data", TensorTypeError),
        (one(), (DATA.astype(complex), FILTER), "data", TensorTypeError),
        (one(), (DATA.astype(bool), FILTER), "data", TensorTypeError),
        (one(), (DATA.astype("S1"), FILTER), "data", TensorTypeError),
        (one(), (np.zeros((1, 1, 9), "V4"), FILTER), "data", TensorTypeError),
        (one(), (np.zeros((1, 1, 9), [("a", "f4")]), FILTER), "data", TensorTypeError),
        (one(dtype="int8"), (DATA, FILTER.astype(np.int8)), "data", TensorTypeError),
        (one(dtype="int8"), (DATA.astype(ml_dtypes.bfloat16), FILTER.astype(np.int8)), "data", TensorTypeError),
    ],
)
def test_bad_arrays(p, arrays, argument, kind):
    with pytest.raises(kind) as caught:
        reference(p, *arrays)
    assert caught.value.argument == argument
    assert str(caught.value).startswith(f"{argument}=")


def test_scaling_of_a_problem_that_is_not_quantized():
    with pytest.raises(ProblemError, match=r"^scaling=Scaling\(.*: must be None: the problem is not quantized$"):
        reference(one(), DATA, FILTER, scaling=Scaling())
