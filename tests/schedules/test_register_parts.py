"""The epilogue in registers of parts of vectors of positions: outputs agree for any tile, crop and epilogue."""

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.kernels import X86, call_kernel, compiled_kernel, targets
from support.strategies import epilogues, operands
from support.tolerances import assert_norm_close

import tvm_deconv as td
from tvm_deconv.compiler.selection import named
from tvm_deconv.compute.direct_layout import Tile
from tvm_deconv.compute.phases import Geometry
from tvm_deconv.problem.reference import reference
from tvm_deconv.schedules.x86 import register_parts, register_rows
from tvm_deconv.schedules.x86.algorithms import direct_definition
from tvm_deconv.schedules.x86.tiles import Plan
from tvm_deconv.schedules.x86.vectors import accumulator_lanes
from tvm_deconv.targets import CPU_TARGETS

ROWS = named("direct_rows")
V4 = CPU_TARGETS["x86-64-v4"]
#: Two images of depthwise rows of 21 positions, of which the vectors of 16 and of 32 are no parts.
DEPTHWISE = td.Problem(2, 3, 1, 1, (5, 20), (4, 4), (2, 2), (1, 1), (1, 1), (10, 40))
CASES = {
    "bias": DEPTHWISE.replace(epilogue=td.Epilogue(True, "relu")),
    "bfloat16": DEPTHWISE.replace(dtype="bfloat16", epilogue=td.Epilogue(True)),
    "float16": DEPTHWISE.replace(dtype="float16"),
    "cropped": DEPTHWISE.replace(pads_begin=(3, 2), output_spatial=(7, 35)),
    "odd crop, bfloat16": DEPTHWISE.replace(dtype="bfloat16", pads_begin=(2, 3), output_spatial=(9, 37)),
    "extended": DEPTHWISE.replace(pads_begin=(0, 0), output_spatial=(12, 43)),
    "three phases": DEPTHWISE.replace(kernel=(3, 6), strides=(3, 3), pads_begin=(1, 2), output_spatial=(12, 58)),
    "three phases, bfloat16": DEPTHWISE.replace(
        dtype="bfloat16", kernel=(3, 6), strides=(3, 3), pads_begin=(1, 2), output_spatial=(12, 58)
    ),
    "one phase": DEPTHWISE.replace(strides=(1, 1), output_spatial=(6, 21)),
    "channels": DEPTHWISE.replace(in_channels=3, out_channels=5, epilogue=td.Epilogue(True)),
    "one axis": td.Problem(3, 2, 2, 3, (37,), (8,), (4,), (1,), (2,), (148,), epilogue=td.Epilogue(True)),
    "three axes": td.Problem(2, 2, 1, 1, (2, 3, 18), (2, 4, 4), (2, 2, 2), (1, 1, 1), (1, 1, 1), (3, 5, 36)),
    "float64": DEPTHWISE.replace(dtype="float64"),
}


@st.composite
def cropped_rows(draw):
    """Draw a Problem whose kernel is a multiple of its stride, with any crop that leaves outputs of every phase."""
    rank = draw(st.integers(1, 3))
    dtype = draw(st.sampled_from(["float32", "float32", "float64", "float16", "bfloat16", "bfloat16"]))
    data = (*(draw(st.integers(1, 6)) for _ in range(rank - 1)), draw(st.integers(16, 50)))
    strides = tuple(draw(st.integers(1, 4)) for _ in range(rank))
    kernel = tuple(s * draw(st.integers(1, 3)) for s in strides)
    pads = tuple(draw(st.integers(0, k - 1)) for k in kernel)
    most = [(x - 1) * s + k - p for x, k, s, p in zip(data, kernel, strides, pads, strict=True)]
    output = tuple(draw(st.integers(min(max(s, y - 5), y), y)) for s, y in zip(strides, most, strict=True))
    counts = [draw(st.integers(1, most)) for most in (3, 3, 4, 4)]
    return td.Problem(*counts, data, kernel, strides, (1,) * rank, pads, output, dtype, epilogue=draw(epilogues(dtype)))


def supports(problem, target, plan):
    lanes = accumulator_lanes(problem, target) // (1 + plan.halves)
    geometry = Geometry.of(problem, bool(plan.tile.uncropped))
    if register_rows.supports_tile(problem, geometry, plan.tile, lanes):
        return False
    return register_parts.supports_tile(problem, geometry, plan.tile, target, lanes)


def part_plans(problem, target):
    """The enumerated plans that store parts of vectors."""
    return [plan for _, plan in ROWS.candidates(problem, target) if supports(problem, target, plan)]


def check(problem, target, plan, seed):
    data, weights, bias = operands(problem, seed)
    kernel = X86.build(problem, target, ROWS, plan)
    found = call_kernel(problem, kernel, compiled_kernel(kernel, target), data, weights, bias).astype(float)
    wanted = reference(problem, data, weights, bias)
    assert_norm_close(found, wanted, problem.dtype, message=(problem.key, plan))
    return kernel.deconv.script()


on_avx512 = pytest.mark.skipif(not V4.features <= td.targets.detect_host().features, reason="this CPU has no AVX-512")


@on_avx512
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("problem", CASES.values(), ids=CASES)
def test_outputs_agree_with_the_reference(problem, seed):
    found = part_plans(problem, V4)
    assert found, problem.key
    text = check(problem, V4, random.Random(seed).choice(found), seed)
    assert "tvm_deconv_store_part" in text
    assert 'T.sblock("epilogue")' not in text


@on_avx512
@pytest.mark.parametrize("case", ["bias", "bfloat16", "three axes"])
def test_outputs_past_the_caches_agree_with_the_reference(case, monkeypatch):
    monkeypatch.setattr(direct_definition, "outgrows_caches", lambda _: True)
    text = check(CASES[case], V4, random.Random(3).choice(part_plans(CASES[case], V4)), 3)
    assert "tvm_deconv_store_part" in text
    assert 'T.sblock("epilogue")' not in text


@targets
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(problem=cropped_rows(), seed=st.integers(0, 2**20))
def test_any_crop_agrees_with_the_reference(problem, target, seed):
    found = part_plans(problem, target)
    if found:
        check(problem, target, random.Random(seed).choice(found), seed)


@on_avx512
def test_blocks_of_rows_store_no_outputs_that_do_not_exist():
    # 7 rows of outputs in blocks of 2 positions, of an image and of both, in tiles past a block's end.
    problem = CASES["cropped"]
    for images, height, phases in ((1, 2, 2), (2, 3, 4), (1, 4, 4)):
        plan = Plan(Tile(images, 1, height, 20, 1, 48, phases, uncropped=1), share_data=False)
        assert supports(problem, V4, plan)
        check(problem, V4, plan, 7)


@pytest.mark.parametrize(
    ("changed", "target"),
    [
        ({"data_format": "NXC"}, "x86-64-v4"),
        ({"kernel": (4, 3)}, "x86-64-v4"),
        ({"data_spatial": (5, 6), "output_spatial": (10, 12)}, "x86-64-v4"),
        ({}, "x86-64-v3"),
    ],
    ids=str,
)
def test_other_layers_keep_their_stages(changed, target):
    assert part_plans(DEPTHWISE, V4)
    assert not part_plans(DEPTHWISE.replace(**changed), CPU_TARGETS[target])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "problem",
    [
        # centernet's depthwise layers; of the second, phases of the output alone make four runs. bigvgan's.
        td.Problem(1, 64, 1, 1, (64, 64), (4, 4), (2, 2), (1, 1), (1, 1), (128, 128)),
        td.Problem(1, 64, 1, 1, (32, 32), (8, 8), (4, 4), (1, 1), (2, 2), (128, 128)),
        td.Problem(1, 768, 1, 1, (410,), (12,), (2,), (1,), (0,), (830,)),
    ],
    ids=lambda problem: problem.key,
)
def test_defaults_have_all_phases_of_a_row_and_few_vectors(problem, dtype):
    """Of more than eight accumulators bigvgan's layer took 1.1 to 1.5 times as long."""
    problem = problem.replace(dtype=dtype)
    algorithm, plan = X86.default(problem, V4)
    assert algorithm == ROWS
    assert supports(problem, V4, plan)
    assert plan.tile.positions * plan.tile.phases <= 8 * accumulator_lanes(problem, V4)


def test_several_channels_share_the_data_that_a_tile_reads():
    """Rows of 226 outputs, of many channels, took 1.2 times as long in tiles of one phase, by memory."""
    problem = td.Problem(1, 1, 64, 160, (64, 113), (2, 2), (2, 2), (1, 1), (0, 0), (128, 226))
    algorithm, plan = X86.default(problem, V4)
    assert algorithm == ROWS
    assert supports(problem, V4, plan)
    assert plan.tile.channels > 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_that_are_short_for_a_vector_pass_through_memory(dtype):
    """Halves of vectors, most of them in two rows of ten positions, took twice the time."""
    problem = td.Problem(4, 192, 1, 2, (10, 10), (4, 4), (2, 2), (1, 1), (1, 1), (20, 20), dtype=dtype)
    algorithm, plan = X86.default(problem, V4)
    assert algorithm == ROWS
    assert not plan.halves
    assert not supports(problem, V4, plan)
