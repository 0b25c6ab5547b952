"""Rows of `N *X C`: vectors of input channels become vectors of positions."""

import pytest
from support.kernels import in_turn, run_kernel
from support.strategies import operands
from support.tolerances import assert_norm_close

import tvm_deconv as td
from tvm_deconv.compiler.selection import named
from tvm_deconv.compute.direct_layout import DirectLayout
from tvm_deconv.compute.indexing import ROWS
from tvm_deconv.problem.reference import reference
from tvm_deconv.schedules.x86.vectors import accumulator_lanes

#: Input channels of a group that do not fill vectors, positions that are odd, images together, three axes, two groups.
PROBLEMS = {
    "channels beyond a vector": td.Problem(1, 1, 21, 3, (9, 17), (4, 4), (2, 2), (1, 1), (1, 1), (18, 34)),
    "fewer than a vector": td.Problem(1, 1, 9, 1, (7, 40), (5, 3), (3, 1), (1, 2), (2, 0), (21, 44)),
    "groups": td.Problem(2, 2, 16, 2, (13, 6), (3, 3), (2, 2), (1, 1), (1, 1), (26, 12)),
    "three axes": td.Problem(1, 1, 16, 2, (3, 4, 11), (3, 2, 4), (2, 2, 2), (1, 1, 1), (1, 0, 1), (5, 8, 22)),
    "one axis": td.Problem(3, 1, 40, 1, (50,), (16,), (8,), (1,), (4,), (400,)),
}


@in_turn("problem, name", [(problem,) for problem in PROBLEMS.values()], [("direct_rows",), ("winograd_rows",)])
def test_transposed_rows(problem, name, target):
    """The plans take turns in sharing their data."""
    problem, algorithm = problem.replace(data_format="NXC"), named(name)
    if not algorithm.supports(problem, target):
        pytest.skip("no axis outside of a row has several taps")
    lanes = accumulator_lanes(problem, target)
    plans = [plan for _, plan in algorithm.candidates(problem, target) if not plan.halves]
    plans = [plan for plan in plans if DirectLayout.of(problem, ROWS, plan.tile, lanes).transposes_data]
    assert plans, "no plan transposes: take more positions"
    data, weights, bias = operands(problem, 3)
    wanted = reference(problem, data, weights, bias)
    blocks = {plan.tile.block: plan for plan in plans}
    assert len(blocks) > 1
    for number, plan in enumerate([*blocks.values()][:: len(blocks) // 2]):
        knobs = {**plan.knobs, "share_data": number % 2}
        result = run_kernel(problem, target, data, weights, bias, algorithm, algorithm.read(knobs))
        assert_norm_close(result, wanted, problem.dtype, algorithm.error_growth, message=knobs)


def test_which_plans_transpose():
    """One channel of a group is contiguous along the row already; a few positions are not worth squares."""

    def transposes(problem):
        plan = named("direct_rows").candidates(problem, td.targets.get("x86-64-v3"))[0][1]
        return DirectLayout.of(problem, ROWS, plan.tile, 8).transposes_data

    several = PROBLEMS["channels beyond a vector"]
    assert transposes(several.replace(data_format="NXC"))
    assert not transposes(several)
    few = td.Problem(1, 1, 21, 3, (1, 2), (2, 2), (2, 2), (1, 1), (0, 0), (2, 4), data_format="NXC")
    assert not transposes(few)
    depthwise = td.Problem(1, 8, 1, 1, (9, 17), (4, 4), (2, 2), (1, 1), (1, 1), (18, 34), data_format="NXC")
    assert not transposes(depthwise)
    assert not transposes(several.replace(data_format="NXC", dynamic=(1,)))
