"""Scheduled kernels against the reference: the whole attribute space, both targets, in this process.

Outputs, the packed filter and the memory around them are poisoned beforehand.
"""

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from support.kernels import X86, call_kernel, compile_kernel, compiled_kernel, run_kernel, targets
from support.strategies import not_empty, operands, problems
from support.tolerances import assert_norm_close

import tvm_deconv as td
from tvm_deconv.compiler.selection import named
from tvm_deconv.compute.direct import define_direct
from tvm_deconv.compute.direct_layout import Tile
from tvm_deconv.compute.indexing import ROWS
from tvm_deconv.problem.reference import reference
from tvm_deconv.schedules.x86.tiles import candidates
from tvm_deconv.targets import CPU_TARGETS


def check(problem, target, seed=0):
    data, weights, bias = operands(problem, seed)
    found = run_kernel(problem, target, data, weights, bias).astype(np.float64)
    wanted = reference(problem, data, weights, bias)
    assert_norm_close(found, wanted, problem.dtype, message=problem.key)


@targets
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(problem=problems().filter(not_empty))
@example(problem=td.Problem(64, 1, 7, 33, (1, 1), (4, 4), (1, 1), (1, 1), (0, 0), (4, 4)))
@example(problem=td.Problem(1, 1, 2, 3, (5,), (7,), (1,), (3,), (40,), (9,)))
@example(problem=td.Problem(1, 1, 3, 2, (6,), (2,), (5,), (1,), (0,), (31,), epilogue=td.Epilogue(True, "sigmoid")))
@example(problem=td.Problem(2, 1, 4, 9, (5, 5), (5, 5), (1, 1), (3, 3), (6, 6), (5, 5)))  # most taps read zeros alone
@example(problem=td.Problem(1, 1, 3, 1, (9,), (64,), (17,), (1,), (5,), (190,)))
@example(problem=td.Problem(1, 1, 5, 3, (6, 7), (3, 3), (2, 2), (1, 1), (1, 1), (12, 13), data_format="NXC"))
@example(problem=td.Problem(2, 19, 1, 1, (6, 7), (3, 3), (2, 2), (1, 1), (1, 1), (12, 13), data_format="NXC"))
@example(problem=td.Problem(1, 3, 5, 17, (3, 4, 5), (2, 3, 3), (3, 1, 2), (1, 2, 3), (2, 0, 1), (7, 9, 12)))
def test_kernels_agree_with_the_reference(problem, target):
    check(problem, target)


@targets
@pytest.mark.parametrize("data_format", ["NCX", "NXC"])
def test_nan_and_infinity_pass(target, data_format):
    problem = td.Problem(1, 1, 3, 18, (5, 6), (3, 3), (2, 2), (1, 1), (1, 1), (10, 11), data_format=data_format)
    data, weights, _ = operands(problem, 1)
    kernel = compile_kernel(problem, target)
    for value in (np.nan, np.inf, -np.inf):
        data.flat[7] = value
        found = call_kernel(problem, *kernel, data, weights, None)
        np.testing.assert_allclose(found, reference(problem, data, weights), rtol=1e-4, atol=1e-5)
        assert not np.isfinite(found).all()


@targets
def test_products_of_eight_phases_are_known_when_they_are_finished(target):
    """Four phases have two taps and four have one: their outputs lie in loops over five positions and eight phases."""
    problem = td.Problem(1, 1, 16, 16, (3, 5), (12, 12), (8, 8), (1, 1), (2, 2), (24, 40), data_format="NXC")
    algorithm = named("winograd")
    plans = (plan for _, plan in algorithm.candidates(problem, target))
    plan = next(plan for plan in plans if not plan.tile.uncropped and plan.tile.width == 5)
    kernel = X86.build(problem, target, algorithm, plan)
    before, _, _ = kernel.deconv.script().partition('T.sblock("epilogue")')
    assert "T.unroll(T.int64(8))" in before.rpartition("T.grid")[2]
    arrays = operands(problem, 2)
    found = call_kernel(problem, kernel, compiled_kernel(kernel, target), *arrays)
    assert_norm_close(found, reference(problem, *arrays), problem.dtype)


@targets
def test_integers_do_not_pass_through_floats(target):
    # 2**24 + 1 is no float32: sums beyond it must come out exactly.
    problem = td.Problem(1, 1, 2048, 3, (3, 3), (3, 3), (2, 2), (1, 1), (1, 1), (5, 5), "int8")
    data = np.full(problem.data_shape, 127, np.int8)
    weights = np.full(problem.filter_shape, 127, np.int8)
    data.flat[0] = 1
    found = run_kernel(problem, target, data, weights, None)
    np.testing.assert_array_equal(found, reference(problem, data, weights))
    assert found.max() > 2**24


@pytest.mark.slow
def test_more_elements_than_32_bits_count():
    # 2**31 + 2**17 output elements of two bytes: the last ones are where a 32-bit index has wrapped.
    problem = td.Problem(1, 1, 1, 1, (1025, 131072), (2, 1), (2, 8), (1, 1), (0, 0), (2050, 1048569), "float16")
    assert np.prod(problem.output_shape) > 2**31
    target = CPU_TARGETS["x86-64-v3"]
    data, weights, _ = operands(problem, 3)
    found = run_kernel(problem, target, data, weights, None)[0, 0]
    wanted = data[0, 0].astype(np.float32)
    for row in (0, 1, 2047, 2048, 2049):
        line = (wanted[row // 2] * np.float32(weights[0, 0, row % 2, 0])).astype(np.float16)
        np.testing.assert_array_equal(found[row, ::8], line)
        assert not found[row].reshape(-1)[1::8].any()


def test_a_row_is_cut_into_whole_vectors():
    # Else the last vector of a block's row spills into the next block's, which another thread may have finished.
    problem = td.Problem(1, 1, 256, 128, (600,), (10,), (5,), (1,), (0,), (3000,))
    found = candidates(problem, ROWS, winograd=False, target=CPU_TARGETS["x86-64-v4"], lanes=16)
    found = [plan for _, plan in found if plan.tile.width < 600]
    assert found
    assert {plan.tile.width % 16 for plan in found} == {0}
    with pytest.raises(ValueError, match="multiple of 16"):
        define_direct(problem, ROWS, Tile(1, 1, 1, 150, 1, 80, 5), 16)
