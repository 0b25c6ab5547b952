"""Products of matrices by AMX: against the reference, by the instructions where there are some, else emulated."""

import ctypes
import dataclasses
import itertools
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.kernels import X86, bound, call_kernel, code_of, compiled_kernel, each_shape, turn_of
from support.strategies import not_empty, operands, problems
from support.tolerances import assert_norm_close, norm_bound

import tvm_deconv as td
from tvm_deconv.problem.reference import reference
from tvm_deconv.problem.testing import operands as quantized_operands
from tvm_deconv.schedules.x86 import amx
from tvm_deconv.targets import CPU_TARGETS, detect_host

AMX, AMX_ROWS, AMX_WINOGRAD = (algorithm for algorithm in X86.algorithms if algorithm.name.startswith("amx"))
TARGET, BF16 = CPU_TARGETS["x86-64-v4-amx"], CPU_TARGETS["x86-64-v4-bf16"]
runs_bf16 = pytest.mark.skipif(not BF16.features <= detect_host().features, reason="this CPU has no AVX-512 BF16")
LAYOUTS = ("NCX", "NXC")
layouts = pytest.mark.parametrize("data_format", LAYOUTS)
#: Odd channels, groups, one tap, several products, three axes, few positions, several images, cropped edges, many taps.
SHAPES = {
    "odd channels": ((2, 1, 7, 20, (5, 6), (4, 4), (2, 2), (1, 1), (1, 1), (10, 12)), {}),
    "groups": ((1, 3, 5, 9, (11,), (5,), (3,), (1,), (1,), (33,)), {}),
    "kernel is stride": ((1, 1, 70, 24, (6, 16), (2, 2), (2, 2), (1, 1), (0, 0), (12, 32)), {}),
    "kernel 3": ((1, 1, 96, 40, (9, 11), (3, 3), (2, 2), (1, 1), (1, 1), (18, 21)), {}),
    "three axes": ((2, 1, 6, 19, (3, 4, 5), (2, 3, 3), (2, 1, 2), (1, 2, 1), (0, 1, 1), (6, 6, 10)), {}),
    "small planes": ((5, 1, 66, 33, (3, 3), (4, 4), (2, 2), (1, 1), (1, 1), (6, 6)), {}),
    "rows in blocks": ((1, 1, 33, 40, (3, 300), (4, 4), (2, 2), (1, 1), (1, 1), (6, 600)), {}),
    "pads beyond the kernel": ((1, 1, 34, 17, (9, 9), (3, 2), (2, 3), (2, 1), (6, 3), (9, 20)), {}),
    "activation": (
        (1, 1, 64, 20, (5, 6), (4, 4), (2, 2), (1, 1), (1, 1), (10, 12)),
        {"epilogue": td.Epilogue(True, "relu")},
    ),
    "many taps": ((1, 1, 40, 32, (17,), (25,), (4,), (1,), (11,), (68,)), {}),
}
TYPES = ("bfloat16", "int8", "uint8", "float16")
#: The types of data, filter and output of quantized problems.
QUANTIZED = (
    ("uint8", "int8", "uint8"),
    ("int8", "int8", "int8"),
    ("uint8", "uint8", "int32"),
    ("int8", "int8", "float32"),
)


@pytest.fixture(scope="module", autouse=True)
def instructions(tmp_path_factory):
    """Functions in C in the place of instructions that this CPU lacks."""
    if TARGET.features <= detect_host().features:
        yield TARGET
        return
    library = tmp_path_factory.mktemp("amx") / "amx.so"
    source = Path(__file__).parents[1] / "support" / "amx.c"
    subprocess.run(["g++", "-x", "c", "-O3", "-shared", "-fPIC", "-o", library, source], check=True)
    ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
    import_functions = amx.import_functions

    def emulated(func, text):
        return import_functions(func, text.replace("@llvm.x86.", "@emulated_").replace("immarg", ""))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(amx, "import_functions", emulated)
        yield BF16


def run(problem, plan, instructions, arrays, algorithm=AMX):
    """The output of a kernel for AMX, compiled for the `instructions` that there are."""
    kernel = X86.build(problem, TARGET, algorithm, plan)
    return call_kernel(problem, kernel, compiled_kernel(kernel, instructions), *arrays)


def check(problem, plan, instructions, seed=5, algorithm=AMX):
    """A kernel for AMX agrees with the reference."""
    arrays = operands(problem, seed)
    found = run(problem, plan, instructions, arrays, algorithm)
    wanted = reference(problem, *arrays)
    if problem.accumulate_dtype == "float32":
        assert_norm_close(found, wanted, problem.dtype, algorithm.error_growth, message=plan)
    else:
        np.testing.assert_array_equal(found, wanted, err_msg=str(plan))


@runs_bf16
@each_shape(SHAPES)
def test_matrices_agree_with_the_reference(number, shape, options, instructions):
    """With rows gathered and flat; types take turns."""
    for turn, data_format in enumerate(LAYOUTS):
        problem = td.Problem(*shape, turn_of(TYPES, number, turn), data_format, **options)
        for plan in of_each_kind(problem):
            check(problem, plan, instructions)


@runs_bf16
@each_shape(SHAPES)
def test_rows_agree_with_the_reference(number, shape, options, instructions):
    """Every other register tile; types take turns."""
    tiles = of_each_tile(td.Problem(*shape, "int8", "NCX", **options))
    for turn, plan in enumerate(tiles[number % 2 :: 2]):
        problem = td.Problem(*shape, turn_of(TYPES, number, turn), "NCX", **options)
        check(problem, plan, instructions, algorithm=AMX_ROWS)


@runs_bf16
@each_shape(SHAPES)
def test_float32_in_parts_agrees_with_the_reference(number, shape, options, instructions):
    """Six products of parts of eight bits are as exact as one of 24."""
    turns = (AMX, turn_of(LAYOUTS, number)), (AMX_ROWS, "NCX"), (AMX_WINOGRAD, turn_of(LAYOUTS, number // 2))
    for algorithm, data_format in turns:
        problem = td.Problem(*shape, "float32", data_format, **options)
        if algorithm.supports(problem, TARGET):
            check(problem, algorithm.candidates(problem, TARGET)[number][1], instructions, algorithm=algorithm)


def of_each_tile(problem):
    """The cheapest plan in rows of each register tile."""
    tiles = {}
    for _, plan in AMX_ROWS.candidates(problem, TARGET):
        tiles.setdefault((plan.tile.channels, plan.tile.positions, plan.tile.phases), plan)
    return list(tiles.values())


@runs_bf16
@each_shape(SHAPES)
def test_quantized_rows_are_exact(number, shape, options, instructions):
    """Zero points stand in the halo, and their products are taken off again, of each phase its own."""
    data, filter_dtype, output = turn_of(QUANTIZED, number)
    quantization = td.Quantization(filter_dtype, output)
    problem = td.Problem(*shape, data, "NCX", quantization=quantization, **options)
    if not AMX_ROWS.supports(problem, TARGET):
        problem = problem.replace(quantization=td.Quantization("int8", output))
    arrays = quantized_operands(problem, 7)
    limits = np.iinfo(problem.dtype)
    arrays.data.flat[::5], arrays.data.flat[1::5] = limits.min, limits.max
    wanted = reference(problem, *arrays)
    for plan in of_each_tile(problem)[::3]:
        found = run(problem, plan, instructions, bound(problem, arrays), AMX_ROWS)
        np.testing.assert_array_equal(found, wanted, err_msg=str(plan))


def of_each_kind(problem):
    """The cheapest plan with two by two tiles, and that with rows the other way in another register tile."""
    plans = [plan for _, plan in AMX.candidates(problem, TARGET)]
    first = next(plan for plan in plans if (plan.tile.rows, plan.tile.vectors) == (32, 2))
    others = (plan for plan in plans if plan.tile.flat != first.tile.flat and plan.tile.vectors != first.tile.vectors)
    return [first, *itertools.islice(others, 1)]


@runs_bf16
@pytest.mark.parametrize("kind", [*TYPES, "float32"])
@settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data(), place=st.floats(0, 1, exclude_max=True), seed=st.integers(0, 1000))
def test_matrices_of_any_problem(kind, instructions, data, place, seed):
    drawn = data.draw(problems(max_macs=20_000).filter(not_empty))
    epilogue = td.Epilogue() if kind.endswith("int8") else drawn.epilogue
    problem = drawn.replace(precision="ieee", quantization=None, epilogue=epilogue, dtype=kind)
    for algorithm in (AMX, AMX_ROWS, AMX_WINOGRAD):
        if algorithm.supports(problem, TARGET):
            plans = algorithm.candidates(problem, TARGET)
            check(problem, plans[int(place * len(plans))][1], instructions, seed, algorithm)


@runs_bf16
@pytest.mark.parametrize(("data_format", "dtype"), [("NCX", "bfloat16"), ("NXC", "float32")])
def test_matrices_serve_any_extents(data_format, dtype, instructions):
    attributes = (4, 3), (2, 3), (1, 1), (1, 0), ("any+2", "any+3")
    problem = td.Problem("any", 2, 37, 20, ("any", "any"), *attributes, dtype=dtype, data_format=data_format)
    for algorithm in (AMX, AMX_ROWS, AMX_WINOGRAD):
        if not algorithm.supports(problem, TARGET):
            continue
        kernel = X86.build(problem, TARGET, algorithm, algorithm.candidates(problem, TARGET)[0][1])
        compiled = compiled_kernel(kernel, instructions)
        for batch, spatial in ((1, (9, 41)), (3, (1, 1)), (2, (23, 7))):
            static = problem.at((batch, *spatial, 74) if data_format == "NXC" else (batch, 74, *spatial))
            arrays = operands(static, batch)
            found = call_kernel(static, kernel, compiled, *arrays).astype(np.float64)
            wanted = reference(static, *arrays)
            assert_norm_close(found, wanted, dtype, algorithm.error_growth, message=static.key)


@runs_bf16
def test_infinities_and_nan_stay_where_they_are(instructions):
    """Words that fill up a row, and rows that fill up a tile, are multiplied too."""
    problem = td.Problem(1, 1, 33, 20, (5, 6), (4, 4), (2, 2), (1, 1), (1, 1), (10, 12), "bfloat16", "NXC")
    data, weights, bias = operands(problem, 5)
    data.flat[-1], data.flat[data.size // 2] = np.inf, np.nan
    wanted = reference(problem, data, weights, bias)
    finite = np.isfinite(wanted)
    assert 0 < finite.sum() < finite.size
    for plan in of_each_kind(problem):
        found = run(problem, plan, instructions, (data, weights, bias)).astype(np.float64)
        np.testing.assert_array_equal(found[~finite], wanted[~finite])
        assert np.isfinite(found[finite]).all()
    rows, last = problem.replace(data_format="NCX"), problem.rank + 1
    data = np.ascontiguousarray(np.moveaxis(data, last, 1))
    for plan in of_each_tile(rows)[::4]:
        found = run(rows, plan, instructions, (data, weights, bias), AMX_ROWS).astype(np.float64)
        found = np.moveaxis(found, 1, last)
        np.testing.assert_array_equal(found[~finite], wanted[~finite])
        assert np.isfinite(found[finite]).all()


@runs_bf16
@layouts
def test_infinities_of_float32_become_nan_where_they_are(data_format, instructions):
    """What the first part of an infinity leaves is NaN; so is a NaN with any bits."""
    problem = td.Problem(1, 1, 33, 20, (5, 6), (4, 4), (2, 2), (1, 1), (1, 1), (10, 12), "float32", data_format)
    data, weights, bias = operands(problem, 5)
    data.flat[[0, 99, -1]] = -np.inf, np.nan, np.inf
    data.view(np.uint32).flat[[100, -2]] = 0xFFFFFFFF, 0x7FFFFFFF
    wanted = reference(problem, data, weights, bias)
    finite = np.isfinite(wanted)
    assert 0 < finite.sum() < finite.size
    for algorithm in (AMX, AMX_ROWS) if data_format == "NCX" else (AMX,):
        plan = algorithm.candidates(problem, TARGET)[0][1]
        found = run(problem, plan, instructions, (data, weights, bias), algorithm)
        assert np.isnan(found[~finite]).all()
        np.testing.assert_allclose(found[finite], wanted[finite], rtol=1e-4, atol=1e-5)


@runs_bf16
@pytest.mark.parametrize("scale", [1e-30, 1e-3, 3e34], ids=str)
def test_parts_of_large_and_small_numbers(scale, instructions):
    """Parts are as exact from 2^-109 up to 3.39e38; an element of more becomes infinite, and its products NaN."""
    problem = td.Problem(1, 1, 64, 16, (3, 16), (2, 2), (2, 2), (1, 1), (0, 0), (6, 32))
    data, weights, _ = operands(problem, 5)
    data *= np.float32(scale)
    weights /= np.abs(weights).max()
    for algorithm in (AMX, AMX_ROWS):
        plan = algorithm.candidates(problem, TARGET)[0][1]
        found = run(problem, plan, instructions, (data, weights, None), algorithm)
        wanted = reference(problem, data, weights)
        assert np.linalg.norm(found / scale - wanted / scale) <= norm_bound("float32") * np.linalg.norm(wanted / scale)
    data.flat[0] = 3.4e38
    assert np.isnan(run(problem, plan, instructions, (data, weights, None), AMX_ROWS)).any()


@runs_bf16
def test_parts_hold_all_bits_of_float32(instructions):
    """Three parts have six products; errors grow as those of the direct algorithms."""
    problem = td.Problem(1, 1, 2048, 16, (4, 16), (2, 2), (2, 2), (1, 1), (0, 0), (8, 32), data_format="NXC")
    data, weights, _ = operands(problem, 3)
    direct = X86.build(problem, BF16, next(a for a in X86.algorithms if a.name == "direct_channels"))
    for arrays in ((data, weights, None), (np.abs(data), np.abs(weights), None)):
        wanted = reference(problem, *arrays)
        usual = call_kernel(problem, direct, compiled_kernel(direct, BF16), *arrays)
        found = run(problem, AMX.candidates(problem, TARGET)[0][1], instructions, arrays)
        assert np.linalg.norm(found - wanted) <= 2 * np.linalg.norm(usual - wanted)
    packed = [X86.build(problem.replace(dtype=d), TARGET, AMX).packed_elements for d in ("float32", "float16")]
    assert packed[0] * 2 == packed[1] * 3


@pytest.mark.skipif(not TARGET.features <= detect_host().features, reason="the code is compiled for this CPU's AMX")
@pytest.mark.parametrize(
    ("kind", "instruction"),
    [("bfloat16", "tdpbf16ps"), ("int8", "tdpbssd"), ("uint8", "tdpbuud")],
)
@pytest.mark.parametrize("algorithm", [AMX, AMX_ROWS], ids=lambda algorithm: algorithm.name)
def test_the_code_has_the_instruction(kind, instruction, algorithm):
    problem = td.Problem(1, 1, 128, 64, (8, 16), (4, 4), (2, 2), (1, 1), (1, 1), (16, 32), kind)
    code = code_of(problem, TARGET, algorithm)
    assert len(re.findall(rf"\t{instruction}\t%tmm", code)) >= 4  # a register tile
    assert "ldtilecfg" in code
    assert "tilerelease" in code
    assert not re.search("call.*tvm_deconv_amx", code)  # inlined


def test_it_is_the_default_where_it_multiplies():
    """Words of bfloat16 are slow on these CPUs: where matrices do not pay, elements are multiplied in float32."""
    problem = td.Problem(1, 1, 128, 64, (32, 32), (3, 3), (2, 2), (1, 1), (1, 1), (64, 64), "bfloat16")
    depthwise = problem.replace(groups=64, in_channels=1, out_channels=1)
    for data_format, name in (("NCX", "amx_rows"), ("NXC", "amx")):
        assert X86.default(problem.replace(data_format=data_format), TARGET)[0].name == name
        assert X86.default(problem.replace(data_format=data_format, dtype="uint8"), TARGET)[0].name == name
        assert X86.default(depthwise.replace(data_format=data_format), TARGET)[0].name.startswith("direct_")
    few = problem.replace(in_channels=2, out_channels=2, data_format="NCX")
    assert X86.default(few, BF16)[0].name == "dot_rows"
    assert not X86.default(few, TARGET)[0].name.startswith("dot")
    assert not AMX.supports(problem, BF16)
    assert not AMX.supports(problem.replace(dtype="float64"), TARGET)
    assert not AMX_ROWS.supports(problem.replace(data_format="NXC"), TARGET)
    assert not AMX_WINOGRAD.supports(problem, TARGET)  # sums of data have more bits than one part
    deep = problem.replace(batch=32, in_channels=768, out_channels=384, data_spatial=(6, 6), output_spatial=(12, 12))
    for data_format in ("NCX", "NXC"):
        layer = deep.replace(dtype="float32", data_format=data_format)
        assert X86.default(layer, TARGET)[0].name == "amx_winograd"
        assert X86.default(layer.replace(in_channels=3), TARGET)[0].name != "amx_winograd"
    points = problem.replace(data_spatial=(1, 1), output_spatial=(1, 1), batch=64, data_format="NCX")
    assert X86.default(points, TARGET)[0].name == "amx"  # a row of one position fills no vector
    assert AMX_ROWS.supports(points, TARGET)


def test_register_tiles_in_rows_are_whole_and_even():
    """What the instructions cannot do is refused: parts of tiles, more than eight, phases whose results lie apart."""
    shape = (1, 1, 32, 32, (8, 8), (2, 3), (2, 3), (1, 1), (0, 0), (16, 24))
    problem = td.Problem(*shape, "bfloat16", "NCX")
    plan = AMX_ROWS.candidates(problem, TARGET)[0][1]
    for knobs, rule in (
        ({"channels": 24}, "must be those of whole tiles"),
        ({"channels": 64, "positions": 64}, "eight at most"),
        ({"channels": 16, "positions": 16, "phases": 2}, "must be part of a row's"),
    ):
        with pytest.raises(ValueError, match=rule):
            X86.build(problem, TARGET, AMX_ROWS, AMX_ROWS.read(plan.knobs | {"phases": 1} | knobs))


def test_filters_without_their_zero_points_are_no_bytes():
    problem = td.Problem(1, 1, 32, 32, (8, 8), (2, 2), (2, 2), (1, 1), (0, 0), (16, 16), "uint8")
    for dtype, supported in (("int8", True), ("uint8", False)):
        quantized = problem.replace(quantization=td.Quantization(dtype, "uint8"))
        assert AMX.supports(quantized, TARGET) == supported


def test_flat_rows_are_for_products_that_gather_and_of_known_extents():
    """Rows between two lines of positions cost less than a gather; where there is none, no plan is flat."""
    problem = td.Problem(1, 1, 128, 64, (32, 32), (3, 3), (2, 2), (1, 1), (1, 1), (64, 64), "bfloat16", "NXC")
    assert AMX.candidates(problem, TARGET)[0][1].tile.flat == 1
    free = td.Problem("any", 1, 128, 64, ("any", 32), (3, 3), (2, 2), (1, 1), (1, 1), ("any+2", 64), "bfloat16", "NXC")
    whole = problem.replace(kernel=(2, 2), pads_begin=(0, 0))
    for other in (free, whole):
        plans = [plan for _, plan in AMX.candidates(other, TARGET)]
        assert not any(plan.tile.flat for plan in plans)
        with pytest.raises(ValueError, match="flat=1: must be 0"):
            X86.build(
                other, TARGET, AMX, dataclasses.replace(plans[0], tile=dataclasses.replace(plans[0].tile, flat=1))
            )
