"""Packed rows that end within a block: in parts without conditions."""

import re

import numpy as np
import pytest
from support.kernels import X86, bound, call_kernel, compiled_kernel, targets, turn_of

import tvm_deconv as td
from tvm_deconv.bench.layers import in_type
from tvm_deconv.compiler.selection import named
from tvm_deconv.compute.direct_layout import DirectLayout, Tile
from tvm_deconv.compute.indexing import CHANNELS, GROUPS, INPUTS, ROWS
from tvm_deconv.problem.reference import reference
from tvm_deconv.problem.testing import deviation, operands
from tvm_deconv.schedules.x86.tiles import Plan
from tvm_deconv.targets import CPU_TARGETS

PLAIN = td.Problem(
    *(2, 37, 1, 1, (5, 7), (3, 3), (2, 2), (1, 1), (1, 1), (10, 13)), data_format="NXC", epilogue=td.Epilogue(True)
)
FREE = td.Problem(
    *(1, 21, 1, 1, (40,), (5,), (3,), (1,), (2,), (118,)), data_format="NXC", epilogue=td.Epilogue(True), dynamic=(1,)
)
TYPES = ("float16", "bfloat16", "uint8.int8.uint8")
CASES = {
    "pads": (PLAIN, Tile(1, 1, 5, 7, 32, 3, 1)),
    "rows apart": (PLAIN.replace(kernel=(4, 1)), Tile(1, 1, 2, 7, 32, 2, 1)),
    "two images in a block": (PLAIN, Tile(2, 1, 5, 7, 32, 3, 1)),
    "rows of any length": (FREE, Tile(1, 1, 1, 20, 32, 2, 1)),
}
#: Blocks of few groups, which keep their conditions.
NARROW = {
    "pads": (PLAIN, Tile(1, 1, 5, 7, 16, 3, 1)),
    "rows apart": (PLAIN.replace(kernel=(4, 1)), Tile(1, 1, 2, 7, 8, 2, 1)),
    "two images in a block": (PLAIN, Tile(2, 1, 5, 7, 24, 3, 1)),
    "rows of any length": (FREE, Tile(1, 1, 1, 20, 8, 4, 1)),
}
#: A row of 101 positions in three blocks, the last of 5, with pads at both ends.
ROW = td.Problem(2, 1, 6, 3, (101,), (9,), (4,), (1,), (3,), (403,), epilogue=td.Epilogue(True))
#: Rows of 61 positions with pads at both ends of both axes, for Winograd's transforms.
PLANE = td.Problem(2, 2, 21, 19, (9, 61), (3, 4), (2, 2), (1, 1), (1, 1), (17, 122), epilogue=td.Epilogue(True))
#: Rows of 37 positions that are packed with those which fill the last vector: as a second, most of which is not there.
FILLED = td.Problem(1, 1, 32, 16, (7, 37), (2, 2), (2, 2), (1, 1), (0, 0), (14, 74), epilogue=td.Epilogue(True))
#: Layers whose register tiles reach behind the rows of a block.
BEHIND = {
    "row": ("direct_rows", ROWS, ROW.replace(in_channels=5)),
    "rows": ("direct_rows", ROWS, td.Problem(2, 1, 5, 3, (5, 37), (3, 3), (2, 2), (1, 1), (1, 1), (10, 73))),
    "transformed": ("winograd_rows", ROWS, PLANE),
    "channels": ("direct_channels", CHANNELS, ROW.replace(data_format="NXC", out_channels=40)),
    "inputs": ("direct_inputs", INPUTS, ROW.replace(data_format="NXC", in_channels=40, out_channels=1)),
    "groups": ("direct_groups", GROUPS, ROW.replace(data_format="NXC", groups=40, in_channels=1, out_channels=1)),
}


@pytest.mark.parametrize("types", TYPES)
@pytest.mark.parametrize("name", CASES)
def test_groups_that_do_not_fill_the_last_block(name, types):
    problem, tile = CASES[name]
    check(in_type(problem, types), "direct_groups", Plan(tile, False), parts=True)


@pytest.mark.parametrize("number", range(len(NARROW)), ids=NARROW)
def test_few_groups_that_do_not_fill_the_last_block(number):
    """The types take turns."""
    problem, tile = [*NARROW.values()][number]
    check(in_type(problem, turn_of(TYPES, number)), "direct_groups", Plan(tile, False), parts=False)


@pytest.mark.parametrize(
    ("types", "algorithm"), [("float16", "direct_rows"), ("bfloat16", "direct_rows"), ("uint8.int8.uint8", "dot_rows")]
)
def test_rows_that_are_cut(types, algorithm):
    check(in_type(ROW, types), algorithm, Plan(Tile(1, 1, 1, 48, 1, 16, 4), False), parts=True)


@targets
@pytest.mark.parametrize(
    ("algorithm", "problem"),
    [("direct_rows", ROW), ("winograd", ROW), ("winograd_rows", PLANE), ("winograd", PLANE)],
    ids=["row direct", "row transformed", "plane in rows", "plane transformed"],
)
def test_rows_that_are_cut_in_float32(algorithm, problem, target):
    row = problem.data_spatial[-1]
    plans = (plan for _, plan in named(algorithm).candidates(problem, target) if 32 <= plan.tile.width < row)
    check(problem, algorithm, next(plans), True, target)


@targets
@pytest.mark.parametrize("algorithm", ["matrix", "strassen"])
def test_rows_whose_last_vector_is_filled(algorithm, target):
    plans = (plan for _, plan in named(algorithm).candidates(FILLED, target))
    plan = next(plan for plan in plans if plan.tile.block == (1, 1, 1, 37))
    check(FILLED, algorithm, plan, True, target)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_channels_of_rows_in_parts_stay_apart(dtype):
    """Each begins an odd number of lines behind the one before, in every type."""
    problem = td.Problem(1, 1, 12, 6, (64, 128), (2, 2), (2, 2), (1, 1), (0, 0), (128, 256), dtype=dtype)
    plan = Plan(Tile(1, 1, 2, 128, 1, 24, 4), False)
    kernel = X86.build(problem, CPU_TARGETS["x86-64-v3"], named("direct_rows"), plan)
    text = kernel.deconv.script()
    assert text.count('T.sblock("data_pack")') == text.count("buffer_dim_align") > 0


def check(problem, algorithm, plan, parts, target=CPU_TARGETS["x86-64-v3"]):
    """Packing has no conditions where rows are in `parts`, and the results are those of the reference."""
    kernel = X86.build(problem, target, named(algorithm), plan)
    packing = re.search(r"data_(?:pack|rows)\[.*\] = .*data\[.*", kernel.deconv.script())[0]
    assert ("if_then_else" in packing) != parts
    arrays = operands(problem, 3)
    found = call_kernel(problem, kernel, compiled_kernel(kernel, target), *bound(problem, arrays))
    assert deviation(problem, np.asarray(found), reference(problem, *arrays)).allowed


@pytest.mark.parametrize(("algorithm", "form", "problem"), BEHIND.values(), ids=BEHIND)
@targets
def test_no_more_is_packed_than_is_read(algorithm, form, problem, target):
    """The last of the packed rows ends where the last register tile does."""
    algorithm, lanes = named(algorithm), target.lanes(4)
    plans = (plan for _, plan in algorithm.candidates(problem, target) if not plan.halves)
    layouts = ((plan, DirectLayout.of(problem, form, plan.tile, lanes)) for plan in plans)
    plan, layout = next((plan, layout) for plan, layout in layouts if layout.needed % layout.packed[2])
    kernel = X86.build(problem, target, algorithm, plan)
    (packed,) = re.findall(r"data_pack = T.sblock_alloc_buffer\(.*", kernel.deconv.script())
    assert f"T.int64({layout.needed})" in packed
    arrays = operands(problem, 3)
    found = call_kernel(problem, kernel, compiled_kernel(kernel, target), *bound(problem, arrays))
    assert deviation(problem, np.asarray(found), reference(problem, *arrays)).allowed
