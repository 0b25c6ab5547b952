"""The epilogue in registers of vectors of channels: outputs agree with the reference for any tile and any layer."""

import itertools
import random
import re

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from support.kernels import X86, call_kernel, compile_kernel, compiled_kernel, targets, turn_of
from support.strategies import not_empty, operands, problems
from support.tolerances import assert_norm_close

import tvm_deconv as td
from tvm_deconv.compiler.selection import named
from tvm_deconv.compute.direct_layout import Tile
from tvm_deconv.compute.indexing import CHANNELS, GROUPS
from tvm_deconv.compute.phases import Geometry
from tvm_deconv.problem.reference import reference
from tvm_deconv.schedules.x86 import register_channels
from tvm_deconv.schedules.x86.tiles import Plan
from tvm_deconv.schedules.x86.vectors import accumulator_lanes
from tvm_deconv.targets import CPU_LEVELS, CPU_TARGETS

PLAIN = td.Problem(2, 1, 5, 21, (5, 7), (3, 3), (2, 2), (1, 1), (1, 1), (10, 13), data_format="NXC")
CASES = {
    "halo, cut rows, part of a vector": PLAIN,
    "last tile of channels": PLAIN.replace(out_channels=75, epilogue=td.Epilogue(True, "relu")),
    "groups of several channels": PLAIN.replace(groups=3, out_channels=9, epilogue=td.Epilogue(True, "sigmoid")),
    "depthwise": PLAIN.replace(groups=37, in_channels=1, out_channels=1, epilogue=td.Epilogue(True)),
    "kernel = stride": PLAIN.replace(kernel=(2, 2), pads_begin=(0, 0), output_spatial=(10, 14)),
    "pads": PLAIN.replace(kernel=(4, 4), output_spatial=(11, 14), pads_begin=(1, 1)),
    "one axis": td.Problem(3, 1, 4, 33, (29,), (16,), (8,), (1,), (5,), (225,), data_format="NXC"),
    "three axes": td.Problem(
        2, 1, 3, 18, (3, 2, 5), (3, 2, 4), (2, 1, 2), (1, 1, 1), (1, 1, 1), (5, 2, 9), data_format="NXC"
    ),
    "one position": td.Problem(3, 1, 6, 20, (1, 1), (4, 4), (1, 1), (1, 1), (0, 0), (4, 4), data_format="NXC"),
    "dilation": PLAIN.replace(
        kernel=(3, 3), strides=(1, 1), dilations=(2, 3), pads_begin=(2, 2), output_spatial=(6, 9)
    ),
}


#: In groups of one channel, of which 37 are no whole number of vectors.
DEPTHWISE = PLAIN.replace(groups=37, in_channels=1, out_channels=1, epilogue=td.Epilogue(True))
WIDE_CASES = {
    "halo, cut rows": DEPTHWISE,
    "relu, no bias": DEPTHWISE.replace(epilogue=td.Epilogue(False, "relu")),
    "fewer groups than a part": DEPTHWISE.replace(groups=3),
    "less than a whole tile": DEPTHWISE.replace(groups=9),
    "kernel below stride": DEPTHWISE.replace(kernel=(2, 1), epilogue=td.Epilogue(True, "sigmoid")),
    "kernel = stride": DEPTHWISE.replace(kernel=(2, 2), pads_begin=(0, 0), output_spatial=(10, 14)),
    "kernel above twice the stride": DEPTHWISE.replace(kernel=(7, 5), pads_begin=(3, 2), output_spatial=(9, 13)),
    "pads": DEPTHWISE.replace(kernel=(4, 4), output_spatial=(11, 14)),
    "dilation": DEPTHWISE.replace(strides=(1, 1), dilations=(2, 3), pads_begin=(2, 2), output_spatial=(6, 9)),
    "groups of several channels": DEPTHWISE.replace(out_channels=3),
    "groups of several inputs": DEPTHWISE.replace(in_channels=2),
    "one axis": td.Problem(3, 37, 1, 1, (29,), (16,), (8,), (1,), (5,), (225,), data_format="NXC"),
    "three axes": td.Problem(
        2, 37, 1, 1, (3, 2, 5), (3, 2, 4), (2, 1, 2), (1, 1, 1), (1, 1, 1), (5, 2, 9), data_format="NXC"
    ),
    "batch of any size": DEPTHWISE.replace(dynamic=(0,)),
    "rows of any length": DEPTHWISE.replace(dynamic=(2,)),
    "float64": DEPTHWISE.replace(dtype="float64"),
    "bfloat16": DEPTHWISE.replace(dtype="bfloat16"),
}


def form_of(problem):
    return GROUPS if problem.out_channels == 1 else CHANNELS


def check(problem, target, plan, seed):
    data, weights, bias = operands(problem, seed)
    kernel = X86.build(problem, target, named(f"direct_{form_of(problem)}"), plan)
    found = call_kernel(problem, kernel, compiled_kernel(kernel, target), data, weights, bias).astype(float)
    wanted = reference(problem, data, weights, bias)
    assert_norm_close(found, wanted, problem.dtype, message=(problem.key, plan))
    return kernel.deconv.script()


@targets
@pytest.mark.parametrize("problem", CASES.values(), ids=CASES)
def test_tiles_within_rows_and_across_them(problem, target):
    """The cheapest plan on one level, and any on the other."""
    algorithm = named(f"direct_{form_of(problem)}")
    plans = [plan for _, plan in algorithm.candidates(problem, target)]
    plan = turn_of([plans[0], random.Random(len(plans)).choice(plans)], list(CPU_LEVELS).index(target.name))
    text = check(problem, target, plan, 5)
    assert 'T.sblock("interleave")' not in text
    assert 'T.sblock("out")' not in text


@targets
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(problem=problems(data_formats=["NXC"], max_macs=60_000).filter(not_empty), seed=st.integers(0, 2**20))
@example(problem=td.Problem(1, 1, 2, 3, (5,), (7,), (1,), (3,), (40,), (9,), data_format="NXC"), seed=1)
@example(problem=td.Problem(2, 19, 1, 1, (6, 7), (4, 4), (2, 2), (1, 1), (1, 1), (9, 17), data_format="NXC"), seed=2)
def test_outputs_agree_with_the_reference(problem, target, seed):
    choose = random.Random(seed)
    form = choose.choice([CHANNELS, GROUPS])
    plan = choose.choice(named(f"direct_{form}").candidates(problem, target))[1]
    data, weights, bias = operands(problem, seed)
    kernel = X86.build(problem, target, named(f"direct_{form}"), plan)
    found = call_kernel(problem, kernel, compiled_kernel(kernel, target), data, weights, bias).astype(float)
    wanted = reference(problem, data, weights, bias)
    assert_norm_close(found, wanted, problem.dtype, message=(problem.key, plan))


@targets
@pytest.mark.parametrize(
    ("block", "positions"),
    [((1, 1, 5, 7), 3), ((1, 1, 2, 7), 6), ((2, 1, 5, 7), 8), ((1, 1, 1, 3), 2), ((1, 1, 1, 2), 5)],
)
def test_blocks_and_tiles_of_any_extent(block, positions, target):
    """Rows longer and shorter than a tile, a tile across images, blocks that run over the end of an axis."""
    lanes = accumulator_lanes(PLAIN, target)
    uncropped = turn_of((0, 1), positions // 2, list(CPU_LEVELS).index(target.name))
    problem = PLAIN.replace(kernel=(4, 4), epilogue=td.Epilogue(True)) if uncropped else PLAIN
    check(problem, target, Plan(Tile(*block, lanes, positions, 1, uncropped), share_data=False), 7)
    check(PLAIN.replace(out_channels=2 * lanes + 3), target, Plan(Tile(*block, 2 * lanes, positions, 1), True), 8)


#: Vectors of a part, parts of a tile, positions and `uncropped`: one tile of all groups, two of which the last has
#: parts without any group, and parts of several vectors.
PARTS = [(1, 5, 3, 0), (1, 3, 2, 1), (2, 2, 2, 0)]


@targets
@pytest.mark.parametrize("case", WIDE_CASES)
def test_register_tiles_have_part_of_the_groups_of_a_block(case, target):
    """Parts take turns between the cases and the targets."""
    problem, number = WIDE_CASES[case], list(WIDE_CASES).index(case)
    vectors, parts, positions, uncropped = turn_of(PARTS, number, list(CPU_LEVELS).index(target.name))
    part = vectors * accumulator_lanes(problem, target)
    block = (2, 2, 3, 5 if problem.rank == 2 else 9)
    plan = Plan(Tile(*block, parts * part, positions, 2, uncropped, part=part), share_data=False)
    assert Plan.from_knobs(plan.knobs) == plan
    data, weights, bias = operands(problem, 9)
    kernel = X86.build(problem, target, named("direct_groups"), plan)
    found = call_kernel(problem, kernel, compiled_kernel(kernel, target), data, weights, bias).astype(float)
    wanted = reference(problem, data, weights, bias)
    assert_norm_close(found, wanted, problem.dtype)


#: Groups in pairs of AVX2's vectors of 8.
PAIRS = DEPTHWISE.replace(groups=48, dtype="bfloat16")
PAIRED_CASES = {
    "halo, cut rows": PAIRS,
    "sigmoid": PAIRS.replace(epilogue=td.Epilogue(True, "sigmoid")),
    "no bias": PAIRS.replace(epilogue=td.Epilogue(False, "relu")),
    "kernel = stride": PAIRS.replace(kernel=(2, 2), pads_begin=(0, 0), output_spatial=(10, 14)),
    "pads": PAIRS.replace(kernel=(4, 4), output_spatial=(11, 14)),
    "one vector of the output": PAIRS.replace(groups=16),
    "one axis": td.Problem(
        3, 32, 1, 1, (29,), (16,), (8,), (1,), (5,), (225,), "bfloat16", data_format="NXC", epilogue=td.Epilogue(True)
    ),
}


#: Channels, part and positions of tiles.
PAIRED_TILES = [(16, 0, 2), (48, 16, 1), (64, 32, 1), (32, 16, 3)]


@pytest.mark.parametrize("turn", range(2))
@pytest.mark.parametrize("case", PAIRED_CASES)
def test_two_vectors_of_groups_are_rounded_to_one(case, turn):
    """Two tiles of each case; phases of the output and of the uncropped output, with blocks of their own."""
    number = list(PAIRED_CASES).index(case)
    problem, (channels, part, positions) = PAIRED_CASES[case], turn_of(PAIRED_TILES, number, 2 * turn)
    uncropped, height = turn_of([(0, 2), (1, 3)], number // 2, turn)
    block = (2, 1, height if problem.rank == 2 else 1, 5)
    plan = Plan(Tile(*block, channels, positions, 2, uncropped, part=part), share_data=False)
    assert "tvm_deconv_join_integers_x8" in check(problem, CPU_TARGETS["x86-64-v3"], plan, 11)


def test_groups_of_a_word_are_apart():
    """One group of each pair has small integers, whose sums are exact; the other has bits that would spoil them."""
    problem = PAIRS.replace(epilogue=td.Epilogue())
    plan = Plan(Tile(1, 1, 2, 5, 32, 1, 2, part=16), share_data=False)
    kernel = compile_kernel(problem, CPU_TARGETS["x86-64-v3"], named("direct_groups"), plan)
    bfloat16 = operands(problem, 1)[0].dtype
    for half, other in itertools.product([0, 1], [0x7FFF, 0xFFFF, 0xFF80, 0x8001]):
        random = np.random.default_rng(half)
        data = random.integers(-4, 5, problem.data_shape).astype(bfloat16)
        data.view(np.uint16)[..., 1 - half :: 2] = other
        weights = random.integers(-2, 3, problem.filter_shape).astype(bfloat16)
        found = call_kernel(problem, *kernel, data, weights, None)
        wanted = reference(problem, data, weights, None)
        message = f"groups from {half}, beside {other:#x}"
        np.testing.assert_array_equal(found[..., half::2].astype(float), wanted[..., half::2].astype(float), message)


def test_groups_in_pairs_are_packed_as_they_are():
    """Data of a block are words of two groups, which products take apart."""
    plan = Plan(Tile(1, 1, 2, 5, 48, 1, 2, part=16), share_data=False)
    text = X86.build(PAIRS, CPU_TARGETS["x86-64-v3"], named("direct_groups"), plan).deconv.script()
    (shape,) = re.findall(r"data_pack = T.sblock_alloc_buffer\(\((.*?)\), \"int32\"", text)
    assert shape.endswith("T.int64(24)")


@pytest.mark.parametrize(
    ("changed", "level", "part"),
    [
        ({"groups": 40}, "x86-64-v3", 16),
        ({"in_channels": 2}, "x86-64-v3", 16),
        ({"dtype": "float16"}, "x86-64-v3", 16),
        ({}, "x86-64-v3", 8),
        ({}, "x86-64-v4", 32),
    ],
    ids=str,
)
def test_other_groups_are_not_in_pairs(changed, level, part):
    problem, target = PAIRS.replace(**changed), CPU_TARGETS[level]
    plan = Plan(Tile(1, 1, 2, 5, 2 * part, 1, 2, part=part), share_data=False)
    assert "tvm_deconv_join" not in X86.build(problem, target, named("direct_groups"), plan).deconv.script()


@pytest.mark.parametrize(
    "layer",
    [
        td.Problem(1, 64, 1, 1, (64, 64), (4, 4), (2, 2), (1, 1), (1, 1), (128, 128), "bfloat16", data_format="NXC"),
        td.Problem(1, 1024, 1, 1, (7, 7), (5, 5), (2, 2), (1, 1), (2, 2), (14, 14), "bfloat16", data_format="NXC"),
        td.Problem(1, 768, 1, 1, (410,), (12,), (2,), (1,), (0,), (830,), "bfloat16", data_format="NXC"),
    ],
    ids=["planes", "short rows", "one axis"],
)
def test_bfloat16_on_avx2_is_rounded_in_pairs_by_default(layer):
    assert "tvm_deconv_join_integers_x8" in X86.build(layer, CPU_TARGETS["x86-64-v3"]).deconv.script()


@pytest.mark.parametrize(("form", "channels", "part"), [(GROUPS, 24, 16), (GROUPS, 24, 12), (CHANNELS, 16, 8)], ids=str)
def test_a_part_is_whole_vectors_and_divides_a_tile_of_groups(form, channels, part):
    tile = Tile(1, 1, 5, 7, channels, 2, 1, part=part)
    with pytest.raises(ValueError, match=f"part={part}: must be"):
        X86.build(DEPTHWISE, CPU_TARGETS["x86-64-v3"], named(f"direct_{form}"), Plan(tile, share_data=False))


@pytest.mark.parametrize("groups", [64, 128, 1090])
@pytest.mark.parametrize("level", ["x86-64-v3", "x86-64-v4"])
def test_all_groups_of_a_position_are_stored_together(groups, level):
    """A register tile has too few of them: lines of the output would be fetched in an order of their own."""
    layer = td.Problem(1, groups, 1, 1, (64, 64), (4, 4), (2, 2), (1, 1), (1, 1), (128, 128), data_format="NXC")
    tile = named("direct_groups").candidates(layer, CPU_TARGETS[level])[0][1].tile
    assert 0 < tile.part < tile.channels
    assert tile.channels >= min(groups, 128)


@pytest.mark.parametrize(
    ("changed", "form"),
    [
        ({"data_format": "NCX"}, CHANNELS),
        ({"kernel": (3, 1)}, CHANNELS),
        ({"groups": 2}, GROUPS),
    ],
    ids=str,
)
def test_other_layers_keep_their_stages(changed, form):
    assert register_channels.supports(PLAIN, Geometry.of(PLAIN), CHANNELS)
    problem = PLAIN.replace(**changed)
    assert not register_channels.supports(problem, Geometry.of(problem), form)
    text = X86.build(problem, CPU_TARGETS["x86-64-v3"], named(f"direct_{form}")).deconv.script()
    assert 'T.sblock("out")' in text


def test_parts_of_a_vector_are_powers_of_two():
    assert [*register_channels.parts(16)] == [(0, 16)]
    assert [*register_channels.parts(13)] == [(0, 8), (8, 4), (12, 1)]
    assert [*register_channels.parts(0)] == []


def test_phases_of_a_tile_load_filters_of_their_own():
    """On AVX2 each phase of a tile of one position would load as many vectors as it multiplies."""
    target = CPU_TARGETS["x86-64-v3"]
    layer = td.Problem(1, 1, 24, 24, (96, 96), (2, 2), (2, 2), (1, 1), (0, 0), (192, 192), data_format="NXC")
    tile = named("direct_channels").candidates(layer, target)[0][1].tile
    filters = tile.channels // accumulator_lanes(layer, target) * tile.phases
    assert 2 * filters <= filters * tile.positions
