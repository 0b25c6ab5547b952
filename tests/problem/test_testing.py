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


@pytest.mark.parametrize("where", [(0, 0, 0), (1, 2, 5)])
@pytest.mark.parametrize("wrong", [1.0, np.nan])
def test_a_deviation_shows_in_every_piece(where, wrong, monkeypatch):
    problem = Problem(2, 1, 1, 3, (6,), (1,), (1,), (1,), (0,), (6,))
    expected = np.linspace(1, 2, 36).reshape(problem.output_shape)
    monkeypatch.setattr(testing, "PART_ELEMENTS", 1)
    output = expected.astype(np.float32)
    assert testing.deviation(problem, output, expected).allowed
    output[where] += wrong
    found = testing.deviation(problem, output, expected)
    assert not found.allowed
    if wrong == 1.0:
        assert found.largest == pytest.approx(0.5)
