"""The epilogue in registers of partial sums: outputs agree with the reference for any tile and any layer."""

import random

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from support.kernels import X86, all_targets, bound, code_of, each_shape, innermost_loops, run_kernel, targets, turn_of
from support.strategies import not_empty, operands, problems
from support.tolerances import assert_norm_close

import tvm_deconv as td
from tvm_deconv.compiler.selection import named
from tvm_deconv.compute.direct_layout import Tile
from tvm_deconv.problem import testing
from tvm_deconv.problem.reference import reference
from tvm_deconv.schedules.x86.algorithms.predicates import stores_sums
from tvm_deconv.schedules.x86.register_inputs import halvings
from tvm_deconv.schedules.x86.tiles import Plan
from tvm_deconv.targets import CPU_TARGETS

INPUTS, WORDS = named("direct_inputs"), named("dot_inputs")
PLAIN = td.Problem(2, 1, 21, 3, (5, 7), (3, 3), (2, 2), (1, 1), (1, 1), (10, 13), data_format="NXC")
CASES = {
    "halo, cut rows, part of a vector of inputs": PLAIN,
    "one channel, kernel = stride": PLAIN.replace(
        out_channels=1, kernel=(2, 2), pads_begin=(0, 0), output_spatial=(10, 14), epilogue=td.Epilogue(True, "sigmoid")
    ),
    "phases of the uncropped output": PLAIN.replace(kernel=(4, 4), epilogue=td.Epilogue(True)),
    "groups, several tiles of channels": PLAIN.replace(groups=3, out_channels=4, epilogue=td.Epilogue(True, "relu")),
    "one axis": td.Problem(3, 1, 40, 1, (29,), (16,), (8,), (1,), (5,), (225,), data_format="NXC"),
    "three axes": td.Problem(
        1, 1, 17, 2, (3, 2, 5), (3, 2, 4), (2, 1, 2), (1, 1, 1), (1, 1, 1), (5, 2, 9), data_format="NXC"
    ),
    "pairs of bfloat16": td.Problem(
        1, 2, 16, 2, (2, 67), (2, 3), (2, 2), (1, 1), (0, 1), (4, 133), "bfloat16", data_format="NXC"
    ),
    "integers": PLAIN.replace(dtype="int8", epilogue=td.Epilogue(True)),
}


def check(problem, target, plan, seed, algorithm=INPUTS):
    data, weights, bias = operands(problem, seed)
    wanted = reference(problem, data, weights, bias)
    found = run_kernel(problem, target, data, weights, bias, algorithm, plan).astype(np.float64)
    assert_norm_close(found, wanted, problem.dtype, message=(problem.key, plan))


@targets
@pytest.mark.parametrize("problem", CASES.values(), ids=CASES)
def test_outputs_of_any_layer(problem, target):
    """The default, some plan, and one whose blocks have whole rows."""
    plans = [plan for _, plan in INPUTS.candidates(problem, target)]
    widest = max(plans, key=lambda plan: plan.tile.width)
    for plan in (plans[0], random.Random(len(plans)).choice(plans), widest):
        check(problem, target, plan, 5)


#: In words: less than a vector, one and more, a word that is not full, a halo and none, groups, rows in blocks.
LAYERS_OF_WORDS = {
    "one channel": (1, 1, 64, 1, (7, 9), (2, 2), (2, 2), (1, 1), (0, 0), (14, 18)),
    "part of a vector": (2, 1, 24, 3, (5, 7), (3, 3), (2, 2), (1, 1), (1, 1), (10, 13)),
    "part of a word": (1, 1, 21, 5, (5, 7), (4, 4), (2, 2), (1, 1), (1, 1), (10, 14)),
    "groups": (1, 3, 10, 2, (29,), (16,), (8,), (1,), (5,), (225,)),
    "three axes": (1, 1, 35, 2, (3, 2, 5), (3, 2, 4), (2, 1, 2), (1, 1, 1), (1, 1, 1), (5, 2, 9)),
    "long rows": (1, 1, 16, 2, (2, 67), (2, 3), (2, 2), (1, 1), (0, 1), (4, 133)),
}


@all_targets
@each_shape({name: (shape, {}) for name, shape in LAYERS_OF_WORDS.items()})
def test_words_of_any_layer(number, shape, options, target):
    """The default, another plan, and one whose blocks have whole rows; every other layer has a zero point."""
    problem = td.Problem(*shape, epilogue=td.Epilogue(True), data_format="NXC", **options)
    if "avx512_bf16" in target.features and number % 2:
        problem = problem.replace(dtype="bfloat16")
    else:
        problem = problem.replace(dtype=turn_of(("int8", "uint8"), number, len(target.name)))
        if number % 2:
            problem = problem.replace(quantization=td.Quantization("int8", turn_of(("uint8", "int32"), number // 2)))
    assert WORDS.supports(problem, target)
    arrays = testing.operands(problem, number)
    if problem.dtype != "bfloat16":
        limits = np.iinfo(problem.dtype)
        arrays.data.flat[::3], arrays.data.flat[1::3] = limits.min, limits.max
    wanted, plans = reference(problem, *arrays), [plan for _, plan in WORDS.candidates(problem, target)]
    other = next(plan for plan in reversed(plans) if plan != plans[0] and plan.halves >= plans[0].halves)
    for plan in (plans[0], other, max(plans, key=lambda plan: plan.tile.width)):
        found = run_kernel(problem, target, *bound(problem, arrays), WORDS, plan)
        if problem.dtype == "bfloat16":
            assert_norm_close(found.astype(np.float64), wanted, "bfloat16", message=(problem.key, plan))
        else:
            np.testing.assert_array_equal(found, wanted, err_msg=str((problem.key, plan)))


def test_words_come_from_the_data_by_vectors():
    """No word is made of its factors: of all but the last channels vectors are loaded, and bytes widened, at once."""
    for dtype, level, channels in (
        ("uint8", "x86-64-v3", 24),
        ("uint8", "x86-64-v4-vnni", 48),
        ("int8", "x86-64-v4-vnni", 64),
    ):
        layer = td.Problem(
            1, 1, channels, 1, (32, 32), (2, 2), (2, 2), (1, 1), (0, 0), (64, 64), dtype, data_format="NXC"
        )
        code = code_of(layer, CPU_TARGETS[level], WORDS)
        assert "vpinsr" not in code.split("\npack_compute_:")[0]


def test_many_sums_leave_no_registers_to_both_halves_of_words():
    """The default has twelve sums, and data that are float32 in memory: none is kept on the stack meanwhile."""
    layer = td.Problem(1, 1, 128, 3, (8, 48), (5, 5), (2, 2), (1, 1), (2, 2), (16, 96), "bfloat16", data_format="NXC")
    target = CPU_TARGETS["x86-64-v3"]
    tile = INPUTS.candidates(layer, target)[0][1].tile
    assert tile.channels * tile.positions * tile.phases == 12
    loops = [body for body in innermost_loops(code_of(layer, target, INPUTS)) if "vfmadd" in body]
    assert loops
    assert not any("(%rsp)" in body for body in loops)


@targets
@settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))
@given(problem=problems(data_formats=["NXC"], max_macs=60_000).filter(not_empty), seed=st.integers(0, 2**20))
@example(problem=td.Problem(1, 1, 5, 2, (6, 9), (2, 2), (1, 2), (1, 1), (0, 0), (7, 18), data_format="NXC"), seed=3)
def test_outputs_agree_with_the_reference(problem, target, seed):
    problem = problem.replace(in_channels=max(problem.in_channels, 2), out_channels=min(problem.out_channels, 8))
    if stores_sums(problem, target):
        check(problem, target, random.Random(seed).choice(INPUTS.candidates(problem, target))[1], seed)


@targets
@pytest.mark.parametrize(("channels", "positions", "phases"), [(3, 2, 1), (1, 5, 1), (3, 1, 4), (1, 3, 2)])
def test_tiles_that_keep_either_operand(channels, positions, phases, target):
    """Fewer positions than channels and phases, or more; a tile across rows; sums of one channel or of all."""
    problem = PLAIN.replace(kernel=(2, 2), pads_begin=(0, 0), output_spatial=(10, 14), epilogue=td.Epilogue(True))
    check(problem, target, Plan(Tile(1, 1, 2, 7, channels, positions, phases), channels == 1), 7)


@pytest.mark.parametrize("lanes", [2, 4, 8, 16])
def test_halvings_add_up_all_lanes(lanes):
    for count in range(1, lanes + 1):
        vectors = np.arange(count * lanes).reshape(count, lanes) ** 2
        held = [*vectors]
        for first, other, size in halvings(count, lanes):
            pair = (held[first], held[other])
            begins = range(0, lanes, 2 * size)
            held[first] = np.concatenate(
                [vector[b : b + size] + vector[b + size : b + 2 * size] for b in begins for vector in pair]
            )
        np.testing.assert_array_equal(held[0][:count], vectors.sum(axis=1))


def test_short_sums_of_one_tap_keep_their_data_in_registers():
    """Their default has blocks of one register tile, so that data are not packed. Longer sums have longer blocks."""
    layer = td.Problem(1, 1, 24, 1, (96, 96), (2, 2), (2, 2), (1, 1), (0, 0), (192, 192), data_format="NXC")
    for target in (CPU_TARGETS["x86-64-v3"], CPU_TARGETS["x86-64-v4"]):
        tile = INPUTS.candidates(layer, target)[0][1].tile
        assert tile.block == (1, 1, 1, tile.positions)
        assert tile.positions * layer.in_channels * 4 < 1024  # else TVM takes them from the workspace
        for longer in (layer.replace(in_channels=512), layer.replace(kernel=(4, 4), output_spatial=(194, 194))):
            tile = INPUTS.candidates(longer, target)[0][1].tile
            assert tile.width > tile.positions


def test_few_outputs_of_many_inputs_are_the_default():
    """Of few taps: `col2im` takes more."""
    target = CPU_TARGETS["x86-64-v3"]
    layer = td.Problem(1, 1, 128, 1, (64, 64), (2, 2), (2, 2), (1, 1), (0, 0), (128, 128), "float16", data_format="NXC")
    assert X86.default(layer, target)[0].name == "direct_inputs"
    for other in (
        {"data_format": "NCX"},
        {"out_channels": 8},
        {"in_channels": 3},
        {"kernel": (1, 4)},
    ):
        assert X86.default(layer.replace(**other), target)[0].name != "direct_inputs"
    for dtype, level in (("uint8", "x86-64-v3"), ("uint8", "x86-64-v4-vnni"), ("bfloat16", "x86-64-v4-bf16")):
        words = layer.replace(dtype=dtype)
        assert X86.default(words, CPU_TARGETS[level])[0] is WORDS
        assert X86.default(words.replace(out_channels=64), CPU_TARGETS[level])[0] is not WORDS
    assert not WORDS.supports(layer, target)
    for changed in ({"out_channels": 9}, {"kernel": (1, 4)}, {"data_format": "NCX"}):
        assert not INPUTS.supports(layer.replace(**changed), target)
