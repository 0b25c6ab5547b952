"""The epilogue in registers of vectors of positions: outputs agree for any tile, epilogue and address of the output."""

import math
import random

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from support.kernels import X86, call_kernel, compiled_kernel, targets
from support.strategies import epilogues, operands
from support.tolerances import assert_norm_close

import tvm_deconv as td
from tvm_deconv.compiler.selection import named
from tvm_deconv.compute.direct_layout import Tile
from tvm_deconv.compute.phases import Geometry
from tvm_deconv.problem.reference import reference
from tvm_deconv.schedules.x86 import register_rows
from tvm_deconv.schedules.x86.algorithms import direct_definition
from tvm_deconv.schedules.x86.tiles import Plan
from tvm_deconv.schedules.x86.vectors import accumulator_lanes
from tvm_deconv.targets import CPU_TARGETS

ROWS = named("direct_rows")


@st.composite
def whole_rows(draw):
    """Draw a Problem whose kernel is its stride and whose rows of the output are whole vectors."""
    rank = draw(st.integers(1, 3))
    dtype = draw(st.sampled_from(["float32", "float32", "float64", "int8", "float16", "bfloat16"]))
    outer = [draw(st.integers(1, 7 if rank == 2 else 4)) for _ in range(rank - 1)]
    kernel = (*(draw(st.integers(1, 3)) for _ in outer), draw(st.integers(1, 5)))
    unit = 16 // math.gcd(16, kernel[-1]) if dtype in ("float32", "float64") else 16
    data = (*outer, unit * draw(st.integers(1, 5)))
    output = tuple(x * k for x, k in zip(data, kernel, strict=True))
    counts = [draw(st.integers(1, most)) for most in (3, 3, 6, 7)]
    one, none = (1,) * rank, (0,) * rank
    return td.Problem(*counts, data, kernel, kernel, one, none, output, dtype, epilogue=draw(epilogues(dtype)))


def register_plans(problem, target):
    """Return the enumerated plans with the epilogue in registers, of whole and of half vectors."""
    lanes = accumulator_lanes(problem, target)
    geometry = Geometry.of(problem)
    found = (plan for _, plan in ROWS.candidates(problem, target))
    return [
        plan for plan in found if register_rows.supports_tile(problem, geometry, plan.tile, lanes // (1 + plan.halves))
    ]


def check(problem, target, plan, seed, aligned):
    data, weights, bias = operands(problem, seed)
    kernel = X86.build(problem, target, ROWS, plan)
    found = call_kernel(problem, kernel, compiled_kernel(kernel, target), data, weights, bias, aligned).astype(float)
    wanted = reference(problem, data, weights, bias)
    assert_norm_close(found, wanted, problem.dtype, message=(problem.key, plan))
    return kernel


@pytest.mark.parametrize("streams", [False, True])
@targets
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(problem=whole_rows(), seed=st.integers(0, 2**20))
@example(problem=td.Problem(1, 1, 3, 5, (7, 48), (2, 2), (2, 2), (1, 1), (0, 0), (14, 96)), seed=2)
@example(problem=td.Problem(1, 1, 3, 5, (7, 24), (2, 2), (2, 2), (1, 1), (0, 0), (14, 48)), seed=3)
def test_outputs_agree_with_the_reference(problem, target, seed, streams):
    choose = random.Random(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(direct_definition, "outgrows_caches", lambda _: streams)
        found = register_plans(problem, target)
        assert found, problem.key
        text = check(problem, target, choose.choice(found), seed, choose.random() < 0.7).deconv.script()
    assert ("tvm_deconv_store" in text) == streams
    # Nor have outputs at other addresses a stage in memory: it would be as large as the block.
    assert 'T.sblock("epilogue")' not in text


@pytest.mark.parametrize("width", [48, 40])
@targets
def test_partial_blocks_store_no_outputs_that_do_not_exist(target, width, monkeypatch):
    # 7 rows in blocks of 3, 144 or 120 positions a block in tiles of 64 or 128, 5 channels in tiles of 2.
    shape = ((7, width), (2, 2), (2, 2), (1, 1), (0, 0), (14, 2 * width))
    problem = td.Problem(1, 1, 4, 5, *shape, epilogue=td.Epilogue(True))
    for streams in (False, True):
        monkeypatch.setattr(direct_definition, "outgrows_caches", lambda _, streams=streams: streams)
        lanes = accumulator_lanes(problem, target)
        plan = Plan(Tile(1, 1, 3, width, 2, 4 * lanes, 2), share_data=streams)
        assert register_rows.supports_tile(problem, Geometry.of(problem), plan.tile, lanes)
        for aligned in (True, False):
            check(problem, target, plan, 5, aligned)


@pytest.mark.parametrize(
    "changed",
    [
        {"data_format": "NXC"},
        {"kernel": (3, 3)},
        {"strides": (3, 3), "output_spatial": (21, 144)},
        {"pads_begin": (0, 1)},
        {"output_spatial": (14, 95)},
        {"output_spatial": (13, 96)},
        {"dynamic": (1,)},
        {"data_spatial": (7, 44), "output_spatial": (14, 88)},
    ],
    ids=str,
)
def test_other_layers_keep_their_stages(changed):
    problem = td.Problem(1, 1, 4, 5, (7, 48), (2, 2), (2, 2), (1, 1), (0, 0), (14, 96))
    target = CPU_TARGETS["x86-64-v4"]
    assert register_plans(problem, target)
    assert not register_plans(problem.replace(**changed), target)
