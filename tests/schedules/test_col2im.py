"""Columns of the kernel's elements, added up where they overlap: outputs agree with the reference for any tile."""

import dataclasses
import math
import random

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from support.kernels import X86, call_kernel, code_of, compile_kernel, innermost_loops, run_kernel, targets, turn_of
from support.strategies import not_empty, operands, problems
from support.tolerances import assert_norm_close

import tvm_deconv as td
from tvm_deconv.compiler.selection import named
from tvm_deconv.compute.col2im import ColumnTile, Places, RowColumns, places
from tvm_deconv.problem.arithmetic import round_up
from tvm_deconv.problem.problem import DATA_FORMATS
from tvm_deconv.problem.reference import reference
from tvm_deconv.schedules.x86 import col2im_rows
from tvm_deconv.schedules.x86.column_tiles import Plan
from tvm_deconv.targets import CPU_TARGETS

COL2IM = named("col2im")
TYPES = ("float16", "bfloat16")
AVX2 = CPU_TARGETS["x86-64-v3"]
#: Targets of which its costs have been measured, and one of which they have not.
MEASURED = AVX2, CPU_TARGETS["x86-64-v4"]
NOT_MEASURED = dataclasses.replace(CPU_TARGETS["x86-64-v4"], multiply_adds=2)
PLAIN = td.Problem(2, 1, 21, 3, (5, 7), (4, 4), (2, 2), (1, 1), (1, 1), (10, 14), data_format="NXC")
CASES = {
    "pads": PLAIN.replace(epilogue=td.Epilogue(True, "tanh")),
    "phases with fewer taps": PLAIN.replace(kernel=(5, 3), output_spatial=(11, 13)),
    "kernel less than the stride": PLAIN.replace(
        kernel=(1, 2), strides=(2, 3), pads_begin=(0, 0), output_spatial=(9, 20)
    ),
    "outputs past all taps": PLAIN.replace(output_spatial=(17, 23), epilogue=td.Epilogue(True)),
    "pads beyond the kernel": PLAIN.replace(pads_begin=(7, 6), output_spatial=(3, 5), epilogue=td.Epilogue(True)),
    "one output, whole strides": PLAIN.replace(
        out_channels=1, kernel=(4, 4), strides=(4, 4), pads_begin=(0, 0), output_spatial=(20, 28)
    ),
    "one axis": td.Problem(3, 1, 40, 1, (29,), (16,), (8,), (1,), (5,), (225,), data_format="NXC"),
    "three axes": td.Problem(
        2, 1, 17, 2, (3, 2, 5), (3, 2, 4), (2, 1, 2), (1, 1, 1), (1, 1, 1), (5, 2, 9), data_format="NXC"
    ),
    "chunks of several vectors": PLAIN.replace(out_channels=11, kernel=(2, 5), epilogue=td.Epilogue(True, "relu")),
    "doubles": PLAIN.replace(dtype="float64", epilogue=td.Epilogue(True, "sigmoid")),
    "dilated": PLAIN.replace(strides=(1, 1), dilations=(2, 3), pads_begin=(1, 2), output_spatial=(10, 13)),
    "dilated, in chunks": PLAIN.replace(
        strides=(1, 1), kernel=(2, 3), dilations=(2, 2), data_spatial=(5, 17), pads_begin=(1, 2), output_spatial=(5, 17)
    ),
    "dilated, with strides": PLAIN.replace(
        dilations=(3, 3), output_spatial=(17, 21), epilogue=td.Epilogue(True, "tanh")
    ),
    "dilated, and phases without taps": PLAIN.replace(
        out_channels=11, strides=(4, 6), dilations=(6, 4), output_spatial=(33, 48), epilogue=td.Epilogue(True)
    ),
    "dilated, and phases with fewer taps": PLAIN.replace(
        out_channels=70,
        kernel=(2, 5),
        strides=(3, 4),
        dilations=(2, 3),
        output_spatial=(14, 36),
        epilogue=td.Epilogue(True),
    ),
}
ROWS = {
    **{name: problem.replace(data_format="NCX") for name, problem in CASES.items()},
    "groups": PLAIN.replace(groups=3, data_format="NCX", epilogue=td.Epilogue(True, "relu")),
    "whole rows of several vectors": PLAIN.replace(
        data_format="NCX", data_spatial=(5, 40), kernel=(2, 2), pads_begin=(0, 0), output_spatial=(10, 80)
    ),
    "rows with a part of a vector": PLAIN.replace(
        data_format="NCX", data_spatial=(3, 37), kernel=(3, 6), strides=(1, 3), output_spatial=(3, 112)
    ),
    "an odd stride": td.Problem(1, 1, 19, 2, (70,), (7,), (7,), (1,), (3,), (485,), data_format="NCX"),
    "masked, several blocks": td.Problem(
        2, 2, 64, 3, (5, 9), (3, 5), (2, 1), (3, 2), (2, 4), (11, 9), data_format="NCX", epilogue=td.Epilogue(True)
    ),
    "masked, interleaved doubles": td.Problem(
        1, 1, 48, 3, (3, 4), (5, 7), (1, 2), (1, 3), (0, 2), (7, 21), data_format="NCX", dtype="float64"
    ),
    "the largest stride": td.Problem(1, 2, 9, 2, (21,), (33,), (16,), (1,), (4,), (345,), data_format="NCX"),
}

LONG = td.Problem(1, 1, 8, 1, (1 << 26,), (16,), (16,), (1,), (0,), (1 << 30,), data_format="NCX")


def check(problem, target, plan, seed):
    data, weights, bias = operands(problem, seed)
    wanted = reference(problem, data, weights, bias)
    found = run_kernel(problem, target, data, weights, bias, COL2IM, plan)
    assert_norm_close(found.astype(np.float64), wanted, problem.dtype, message=(problem.key, plan))
    return found


@targets
@pytest.mark.parametrize(
    "problem", [*CASES.values(), *ROWS.values()], ids=[*CASES, *(f"rows, {name}" for name in ROWS)]
)
def test_outputs_of_any_layer(problem, target):
    """All plans add up in the same order, so that calls on several threads may take others."""
    plans = [plan for _, plan in COL2IM.candidates(problem, target)]
    first, *others = [check(problem, target, plan, 5) for plan in (plans[0], *random.Random(3).sample(plans, 2))]
    for other in others:
        np.testing.assert_array_equal(first, other)


@pytest.mark.parametrize("number", range(len(CASES) + len(ROWS)))
def test_outputs_of_16_bits(number):
    """Data become float32, and rows of outputs are rounded; the types take turns."""
    problem = [*CASES.values(), *ROWS.values()][number].replace(dtype=turn_of(TYPES, number))
    check(problem, AVX2, random.Random(4).choice(COL2IM.candidates(problem, AVX2))[1], 6)


@targets
@pytest.mark.parametrize("data_format", DATA_FORMATS)
def test_bias_of_any_nan_stays_nan_in_bfloat16(data_format, target):
    """Rounding must not carry into the sign, nor make an infinity of what is left of its bits."""
    problem = PLAIN.replace(dtype="bfloat16", data_format=data_format, epilogue=td.Epilogue(True))
    data, weights, bias = operands(problem, 3)
    bias[:] = np.array([0x7FFFFFFF, 0x7F800001, 0xFFFFFFFF], "uint32").view("float32")
    plan = COL2IM.candidates(problem, target)[0][1]
    assert np.isnan(run_kernel(problem, target, data, weights, bias, COL2IM, plan).astype("float32")).all()


@targets
@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    problem=problems(dtypes=["float32", "float64", *TYPES], max_macs=60_000).filter(not_empty),
    seed=st.integers(0, 2**20),
)
@example(problem=PLAIN.replace(batch=4, kernel=(9, 1), pads_begin=(3, 0)), seed=8)
@example(problem=PLAIN.replace(batch=4, kernel=(9, 1), pads_begin=(3, 0), data_format="NCX"), seed=8)
@example(problem=PLAIN.replace(dilations=(5, 4), pads_begin=(9, 7), output_spatial=(7, 9)), seed=1)
def test_outputs_agree_with_the_reference(problem, target, seed):
    groups = 1 if problem.data_format == "NXC" else problem.groups
    problem = problem.replace(groups=groups)
    assume(not_empty(problem) and COL2IM.supports(problem, target))
    check(problem, target, random.Random(seed).choice(COL2IM.candidates(problem, target))[1], seed)


@pytest.mark.parametrize(
    "shape",
    [
        *((7, 4, 2, 1, 1, 14, 3), (4, 7, 3, 1, 9, 4, 2), (3, 1, 2, 1, 0, 5, 2), (9, 3, 1, 1, 1, 9, 4)),
        *((7, 4, 1, 3, 4, 8, 3), (6, 5, 2, 3, 3, 17, 4), (5, 3, 4, 6, 2, 25, 2), (5, 2, 3, 2, 0, 30, 9)),
    ],
)
def test_places_of_an_axis(shape):
    """Blocks have all places with outputs; the whole ones have all outputs, and their taps read data."""
    data, kernel, stride, dilation, pad, output, block = shape
    axis = Places(stride, kernel, dilation, pad, data, output, block)
    of_outputs = [(i + pad) // stride for i in range(output)]
    assert (axis.first, axis.last) == (of_outputs[0], of_outputs[-1])
    assert (axis.blocks - 1) * block < axis.count <= axis.blocks * block
    first, end = axis.whole
    for place in range(axis.first, axis.last + 1):
        outputs = [place * stride + phase - pad for phase in range(stride)]
        shifts = [dilation * element // stride for element in range(kernel)]
        whole = all(0 <= i < output for i in outputs) and all(0 <= place - shift < data for shift in shifts)
        assert whole == (first <= place < end)
    reads = [(i + pad - dilation * element, stride) for i in range(output) for element in range(kernel)]
    assert axis.read == sum(at % step == 0 and 0 <= at // step < data for at, step in reads)


def test_few_outputs_take_it_by_default():
    problem = PLAIN.replace(in_channels=64, data_spatial=(32, 32), output_spatial=(64, 64))
    for target in MEASURED:
        assert X86.default(problem, target)[0] is COL2IM
    assert X86.default(problem, NOT_MEASURED)[0] is not COL2IM
    for other in (problem.replace(out_channels=64), problem.replace(in_channels=7), problem.replace(dtype="int8")):
        assert X86.default(other, AVX2)[0] is not COL2IM
    for other in (problem.replace(groups=2), problem.replace(dtype="int8")):
        assert not COL2IM.supports(other, AVX2)


@pytest.mark.parametrize("dtype", TYPES)
def test_16_bits_take_it_by_default_unless_there_are_words(dtype):
    problem = PLAIN.replace(dtype=dtype, in_channels=128, data_spatial=(32, 32), output_spatial=(64, 64))
    assert X86.default(problem, AVX2)[0] is COL2IM
    words = CPU_TARGETS["x86-64-v4-bf16"]
    assert COL2IM.is_default_for(problem, words) == (dtype == "float16")


@pytest.mark.parametrize(("channels", "most"), [(64, 13), (512, 13), (1024, 8)])
def test_lines_of_positions_stay_in_the_first_cache(channels, most):
    """Of neighbours that are pages apart, a set of eight lines holds eight."""
    problem = PLAIN.replace(in_channels=channels, data_spatial=(8, 8), output_spatial=(16, 16), data_format="NXC")
    plans = [plan for _, plan in COL2IM.candidates(problem, AVX2)]
    assert max(plan.tile.positions for plan in plans) == most


def test_rows_of_few_taps_take_it_by_default():
    """Also of channels that fill vectors: a packed block serves any number of them."""
    problem = td.Problem(1, 1, 320, 20, (400,), (2,), (2,), (1,), (0,), (800,), data_format="NCX")
    assert X86.default(problem, AVX2)[0] is COL2IM
    assert X86.default(problem, NOT_MEASURED)[0] is not COL2IM
    taps = problem.replace(kernel=(8,), out_channels=1, in_channels=64)
    assert X86.default(taps, AVX2)[0] is not COL2IM
    assert not COL2IM.supports(problem.replace(strides=(17,)), AVX2)


@pytest.mark.parametrize("data_format", DATA_FORMATS)
def test_dilated_taps_take_it_by_default(data_format):
    """Most of them are outside of few data: products of data alone are fewer than those of outputs."""
    problem = td.Problem(1, 1, 160, 32, (4, 7), (5, 5), (2, 2), (3, 3), (0, 0), (19, 25), data_format=data_format)
    for target in MEASURED:
        assert X86.default(problem, target)[0] is COL2IM
    assert X86.default(problem, NOT_MEASURED)[0] is not COL2IM
    assert X86.default(problem.replace(dilations=(1, 1), output_spatial=(11, 17)), AVX2)[0] is not COL2IM


@pytest.mark.parametrize(
    ("changes", "masked"),
    [
        ({}, True),
        ({"in_channels": 8}, False),
        ({"data_spatial": (5, 400), "output_spatial": (10, 800)}, False),
        ({"output_spatial": (10, 40)}, False),
        ({"kernel": (4, 2)}, False),
    ],
)
def test_columns_are_masked_where_zeros_take_longer(changes, masked):
    """That is where rows are short, and input channels many; masks reach no place without taps."""
    problem = PLAIN.replace(in_channels=32, data_format="NCX").replace(**changes)
    width = places(problem, ColumnTile(1, 1, 1, 1, 8, 1))[2].count
    layout = RowColumns(problem, ColumnTile(1, 1, 2, width, 8, 1), 8)
    assert layout.masked == masked
    assert layout.width == (layout.axes[2].data if masked else width + layout.axes[2].reach)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(problem=problems(dtypes=["float32"], ranks=(2,)).filter(not_empty), seed=st.integers(0, 2**20))
def test_masked_vectors_are_within_their_arrays(problem, seed):
    """Those that begin before the data, or end behind them: what they read there is masked, but must exist."""
    choose = random.Random(seed)
    problem = problem.replace(data_format="NCX", in_channels=problem.in_channels + 500)
    assume(problem.strides[-1] <= 16)
    block = choose.randint(1, places(problem, ColumnTile(1, 1, 1, 1, 8, 1))[2].count)
    layout = RowColumns(problem, ColumnTile(1, 1, choose.randint(1, 3), block, 8, 2), 8)
    assume(layout.masked)
    depth, height, last = layout.axes
    behind = (layout.row - 1) * layout.pitch + (depth.rows * height.rows - 1) * layout.width
    for begin in range(last.first, last.last + 1, last.block):
        data = max(min(begin - last.reach, last.data - last.rows), 0)
        end = begin - data + round_up(min(last.block, last.last + 1 - begin), layout.lanes)
        assert layout.around + begin - data - last.reach >= 0
        assert layout.around + end <= layout.mask_elements
        assert layout.around + behind + end <= layout.array_elements


@pytest.mark.parametrize("data_format", DATA_FORMATS)
@pytest.mark.parametrize("empty", [{"output_spatial": (10, 0)}, {"batch": 0}])
def test_empty_arrays(empty, data_format):
    """A kernel is built, and never called."""
    problem = PLAIN.replace(**empty, data_format=data_format)
    kernel, _ = compile_kernel(problem, AVX2, COL2IM)
    assert [int(extent) for extent in kernel.deconv.params[-1].shape] == [max(y, 1) for y in problem.output_shape]


@targets
@pytest.mark.parametrize("data_format", DATA_FORMATS)
def test_calls_of_any_batch(target, data_format):
    problem = PLAIN.replace(batch="any", data_format=data_format, epilogue=td.Epilogue(True))
    plan = random.Random(1).choice(COL2IM.candidates(problem, target))[1]
    assert plan.tile.images == 1
    kernel = compile_kernel(problem, target, COL2IM, plan)
    for batch in (1, 2, 5):
        call = problem.replace(batch=batch)
        data, weights, bias = operands(call, batch)
        found = call_kernel(call, *kernel, data, weights, bias)
        assert_norm_close(found.astype(np.float64), reference(call, data, weights, bias), "float32")


@pytest.mark.parametrize(
    ("problem", "tile", "message"),
    [
        (PLAIN, (3, 1, 2, 4, 4, 16), "images=3: must divide the batch of any call, 2"),
        (PLAIN.replace(batch="any"), (2, 1, 2, 4, 4, 16), "images=2: must divide the batch of any call, 1"),
        (PLAIN, (1, 1, 1, 3, 5, 16), "positions=5: must be 4 at most, those of a piece of the data"),
        (PLAIN, (1, 1, 1, 3, 4, 12), "columns=12: must be a multiple of 8"),
        (PLAIN.replace(data_format="NCX"), (1, 1, 1, 3, 12, 4), "positions=12: must be a multiple of 8"),
        (PLAIN, (1, 1, 0, 3, 2, 16), "must be of numbers from 1 on"),
        (LONG, (1, 1, 1, 1 << 26, 16, 4), "rows of a block must have less than 2147483648 bytes"),
    ],
)
def test_tiles_that_do_not_fit(problem, tile, message):
    """Such a kernel would leave outputs out, or read what is not there."""
    with pytest.raises(ValueError, match=message):
        X86.build(problem, AVX2, COL2IM, Plan(ColumnTile(*tile), share_data=False))


@pytest.mark.parametrize("knobs", [{"share_data": 1}, {"halves": 1}])
def test_knobs_that_no_plan_has(knobs):
    plan = Plan(ColumnTile(1, 1, 2, 4, 4, 16), share_data=False)
    assert COL2IM.read(plan.knobs) == plan
    with pytest.raises(ValueError, match="must be 0"):
        COL2IM.read({**plan.knobs, **knobs})


def test_data_of_the_next_tile_are_asked_for():
    """If data leave the second-level cache. Prefetches past the end of the data are of no consequence."""
    problem = PLAIN.replace(in_channels=48)
    plan = Plan(ColumnTile(1, 1, 3, 8, 6, 16), share_data=False)
    assert "prefetcht0" not in code_of(problem, AVX2, COL2IM, plan)
    small = dataclasses.replace(AVX2, l2_bytes=1 << 10)
    assert "prefetcht0" in code_of(problem, small, COL2IM, plan)
    data, weights, bias = operands(problem, 2)
    found = call_kernel(problem, *compile_kernel(problem, small, COL2IM, plan), data, weights, bias)
    assert_norm_close(found.astype(np.float64), reference(problem, data, weights, bias), "float32")


def test_candidates_have_rows_that_32_bits_count():
    """Longer ones would be copied in part."""
    tiles = [plan.tile for _, plan in COL2IM.candidates(LONG, AVX2)]
    assert 1 << 24 <= max(tile.width for tile in tiles) * 16 < 1 << 29


@pytest.mark.parametrize("dtype", ["float32", *TYPES])
def test_rows_are_fetched_ahead_and_stored_past_the_caches(monkeypatch, dtype):
    """If caches keep neither; each block asks for what it packs, and each task waits for its stores."""
    monkeypatch.setattr(col2im_rows, "goes_to_memory", lambda _: True)
    for shortest in ("SHORTEST_STREAM", "SHORTEST_CONVERTED"):
        monkeypatch.setattr(col2im_rows, shortest, 0)
    problem = PLAIN.replace(data_format="NCX", groups=2, data_spatial=(6, 50), output_spatial=(12, 100), dtype=dtype)
    plan = Plan(ColumnTile(1, 1, 4, 17, 16, 5), share_data=False)
    small = dataclasses.replace(AVX2, l2_bytes=1 << 10)
    kernel, libraries = compile_kernel(problem, small, COL2IM, plan)
    text = kernel.deconv.script()
    stores = "tvm_deconv_stream" if dtype == "float32" else "tvm_deconv_convert"
    assert all(name in text for name in ("tvm_deconv_fetch_row", stores, "tvm_deconv_fence"))
    data, weights, bias = operands(problem, 4)
    found = call_kernel(problem, kernel, libraries, data, weights, bias)
    assert_norm_close(found.astype(np.float64), reference(problem, data, weights, bias), dtype)


@pytest.mark.parametrize(("positions", "columns"), [(6, 16), (4, 24)])
@pytest.mark.parametrize("channels", [3, 6])
def test_accumulators_stay_in_registers(positions, columns, channels):
    """No loop of products touches the stack, whatever the epilogue holds in registers around it."""
    problem = PLAIN.replace(in_channels=60, out_channels=channels, data_spatial=(32, 32), output_spatial=(64, 64))
    check_products(problem, (positions, columns))
    check_products(problem.replace(data_format="NCX"), (columns, positions))


def check_products(problem, register_tile):
    plan = Plan(ColumnTile(1, 1, 8, 33, *register_tile), share_data=False)
    code = code_of(problem.replace(epilogue=td.Epilogue(True)), AVX2, COL2IM, plan)
    products = math.prod(register_tile) // 8
    bodies = [body for body in innermost_loops(code) if body.count("vfmadd") >= 3 * products]
    assert bodies
    assert not any("rsp" in body for body in bodies)
