"""The comparison with the reference, and the reference of a large problem, computed in parts."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.strategies import problems

from tvm_deconv.problem import Problem, testing
from tvm_deconv.problem.reference import reference


@given(problems(dtypes=["float32", "int8"], max_macs=20_000), st.integers(1, 300))
@settings(deadline=None)
def test_parts_make_the_whole(problem, elements):
    arrays = testing.operands(problem, 3)
    found = np.full(problem.output_shape, np.nan)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(testing, "PART_ELEMENTS", elements)
        for part in testing.parts(problem, arrays):
            assert np.isnan(found[part.slices]).all(), "parts overlap"
            found[part.slices] = reference(part.problem, *part.operands)
    np.testing.assert_allclose(found, reference(problem, *arrays), rtol=1e-12, atol=1e-12)


def test_parts_are_as_large_as_they_may_be(monkeypatch):
    """Whole images where they fit, else whole groups, else channels; at least a plane of 5."""
    problem = Problem(7, 6, 1, 4, (5,), (1,), (1,), (1,), (0,), (5,))
    arrays = testing.operands(problem)
    for elements in range(1, 7 * 6 * 4 * 5 + 1):
        monkeypatch.setattr(testing, "PART_ELEMENTS", elements)
        part = next(testing.parts(problem, arrays)).problem
        images = max(1, elements // (6 * 4 * 5))
        groups = 6 if images > 1 else max(1, min(6, elements // (4 * 5)))
        channels = 4 if groups > 1 else max(1, min(4, elements // 5))
        assert (part.batch, part.groups, part.out_channels) == (images, groups, channels), elements


@pytest.mark.parametrize("where", [(0, 0, 0), (1, 2, 5)])
@pytest.mark.parametrize("wrong", [1.0, np.nan])
@pytest.mark.parametrize("exact", [np.float32, np.float64])
@pytest.mark.parametrize("order", ["C", "F"])
def test_a_deviation_shows_in_every_piece(where, wrong, exact, order, monkeypatch):
    problem = Problem(2, 1, 1, 3, (6,), (1,), (1,), (1,), (0,), (6,))
    expected = np.linspace(1, 2, 36, dtype=exact).reshape(problem.output_shape)
    monkeypatch.setattr(testing, "PART_ELEMENTS", 1)
    monkeypatch.setattr(testing, "PIECE_ELEMENTS", 7)
    output = np.array(expected, np.float32, order=order)
    assert testing.deviation(problem, output, expected).allowed
    output[where] += wrong
    found = testing.deviation(problem, output, expected)
    assert not found.allowed
    if wrong == 1.0:
        assert found.largest == pytest.approx(0.5)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_allowed_error_grows_with_the_element(dtype):
    """By how its type rounds, and besides by a part of the largest one, which sums may cost any element."""
    problem = Problem(1, 1, 1, 1, (4,), (1,), (1,), (1,), (0,), (4,), dtype=dtype)
    common, own = testing.TOLERANCES[dtype]
    expected = np.array([[[2.0, 0.5, -1.0, 0.0]]])
    bound = common * 2.0 + own * np.abs(expected)
    for sign in (1, -1):
        assert testing.deviation(problem, expected + 0.99 * sign * bound, expected).allowed
        for index in range(4):
            error = np.zeros_like(expected)
            error[..., index] = 1.01 * sign * bound[..., index]
            assert not testing.deviation(problem, expected + error, expected).allowed


def test_the_least_numbers_may_be_off_by_what_lies_between_them():
    """Numbers below the normal ones lie as far apart as their neighbours above, however small they are."""
    problem = Problem(1, 1, 1, 1, (2,), (1,), (1,), (1,), (0,), (2,), dtype="float16")
    expected = np.array([[[-2.3993e-05, 1e-07]]])
    output = expected.astype(np.float16)
    assert np.abs(output - expected).max() > 2.0**-26
    assert testing.deviation(problem, output, expected).allowed
    assert not testing.deviation(problem, output + np.float16(2.0**-23), expected).allowed


@pytest.mark.parametrize(("dtype", "lowest", "largest"), [("uint8", 0, 255), ("int8", -127, 127)])
def test_integers_are_drawn_from_the_whole_range(dtype, lowest, largest):
    problem = Problem(1, 1, 4, 1, (4000,), (1,), (1,), (1,), (0,), (4000,), dtype=dtype)
    data = testing.operands(problem).data
    assert (data.min(), data.max()) == (lowest, largest)
