"""Products of words: exact in integers, within bfloat16's bounds, and by the instructions that they are for."""

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.kernels import (
    X86,
    all_targets,
    bound,
    call_kernel,
    code_of,
    compile_kernel,
    compiled_kernel,
    each_shape,
    run_kernel,
    turn_of,
)
from support.strategies import not_empty, operands, problems
from support.tolerances import assert_norm_close, norm_bound

import tvm_deconv as td
from tvm_deconv.problem import testing
from tvm_deconv.problem.reference import reference
from tvm_deconv.targets import CPU_TARGETS, detect_host

DOT, CHANNELS, ROWS, WINOGRAD, STRASSEN = (
    next(algorithm for algorithm in X86.algorithms if algorithm.name == name)
    for name in ("dot", "dot_channels", "dot_rows", "dot_winograd", "dot_strassen")
)
direct_words = pytest.mark.parametrize("algorithm", [CHANNELS, ROWS], ids=lambda algorithm: algorithm.name)
LAYOUTS = ("NCX", "NXC")
layouts = pytest.mark.parametrize("data_format", LAYOUTS)
AVX2, VNNI, BF16 = (CPU_TARGETS[f"x86-64-{name}"] for name in ("v3", "v4-vnni", "v4-bf16"))
runs_bf16 = pytest.mark.skipif(not BF16.features <= detect_host().features, reason="this CPU has no AVX-512 BF16")
#: Odd channels, one channel, groups, one tap, several products, three axes, phases as vectors, blocks of a row.
SHAPES = {
    "odd channels": ((2, 1, 7, 20, (5, 6), (4, 4), (2, 2), (1, 1), (1, 1), (10, 12)), {}),
    "one channel": ((1, 1, 1, 17, (5, 6), (3, 3), (2, 2), (1, 1), (1, 1), (9, 11)), {}),
    "groups": ((1, 3, 5, 9, (11,), (5,), (3,), (1,), (1,), (33,)), {}),
    "kernel is stride": ((1, 1, 18, 24, (6, 16), (2, 2), (2, 2), (1, 1), (0, 0), (12, 32)), {}),
    "three axes": ((1, 1, 6, 19, (3, 4, 5), (2, 3, 3), (2, 1, 2), (1, 2, 1), (0, 1, 1), (6, 6, 10)), {}),
    "phases": ((1, 1, 10, 1, (4, 9), (16, 16), (16, 16), (1, 1), (0, 0), (64, 144)), {}),
    "blocks": ((1, 1, 33, 40, (3, 300), (4, 4), (2, 2), (1, 1), (1, 1), (6, 600)), {}),
    "activation": (
        (1, 1, 9, 20, (5, 6), (4, 4), (2, 2), (1, 1), (1, 1), (10, 12)),
        {"epilogue": td.Epilogue(True, "relu")},
    ),
}


@all_targets
@each_shape(SHAPES)
def test_words_agree_with_the_reference(number, shape, options, target):
    """Each shape in one layout, by one plan, and in one of the types that a target has words for and no other alike."""
    special = {"x86-64-v3-vnni": ["int8"], "x86-64-v4-vnni": ["int8"], "x86-64-v4-bf16": ["bfloat16"]}
    own = special.get(target.name, ["int8", "uint8"])
    data_format = turn_of(LAYOUTS, number // 2, list(CPU_TARGETS).index(target.name))
    cheapest = target is not AVX2 or number < len(SHAPES) // 2
    check(td.Problem(*shape, dtype=turn_of(own, number), data_format=data_format, **options), target, cheapest)


def check(problem, target, cheapest):
    data, weights, bias = operands(problem, 5)
    if problem.dtype != "bfloat16":  # the ends of the range too
        limits = np.iinfo(problem.dtype)
        data.flat[::3], data.flat[1::3] = limits.min, limits.max
        weights.flat[::2] = limits.min
    plans = DOT.candidates(problem, target)
    wanted = reference(problem, data, weights, bias)
    plan = plans[0 if cheapest else len(plans) // 2][1]
    found = run_kernel(problem, target, data, weights, bias, DOT, plan)
    if problem.dtype != "bfloat16":
        np.testing.assert_array_equal(found, wanted)
    else:
        assert_norm_close(found, wanted, problem.dtype)


@pytest.mark.skipif(not VNNI.features <= detect_host().features, reason="this CPU has no AVX-512 VNNI")
@each_shape(SHAPES)
def test_kernels_for_avx_vnni_are_right_by_avx512_vnni(number, shape, options):
    """A CPU without the one may have the other: the same instruction on 256 bits, in another encoding."""
    problem = td.Problem(*shape, dtype="int8", data_format=turn_of(LAYOUTS, number), **options)
    target = CPU_TARGETS["x86-64-v3-vnni"]
    kernel = X86.build(problem, target, DOT, DOT.candidates(problem, target)[0][1])
    arrays = operands(problem, 5)
    found = call_kernel(problem, kernel, compiled_kernel(kernel, VNNI), *arrays)
    np.testing.assert_array_equal(found, reference(problem, *arrays))


@runs_bf16
@direct_words
@each_shape(SHAPES)
def test_direct_words_agree_with_the_reference(number, shape, options, algorithm):
    """The cheapest plan and some other, also where an infinity and a NaN stand next to zeros that fill up words.

    The layouts take turns with the shapes and the algorithms.
    """
    data_format = turn_of(LAYOUTS, number, algorithm is ROWS)
    problem = td.Problem(*shape, dtype="bfloat16", data_format=data_format, **options)
    data, weights, bias = operands(problem, 5)
    plans = algorithm.candidates(problem, BF16)
    spoilt = data.copy()
    spoilt.flat[-1], spoilt.flat[spoilt.size // 2] = np.inf, np.nan
    for plan, arrays in ((plans[0][1], (data, spoilt)), (plans[len(plans) // 2][1], (data,))):
        kernel = compile_kernel(problem, BF16, algorithm, plan)
        for array in arrays:
            wanted = reference(problem, array, weights, bias)
            found = call_kernel(problem, *kernel, array, weights, bias).astype(np.float64)
            finite = np.isfinite(wanted)
            np.testing.assert_array_equal(found[~finite], wanted[~finite])
            difference = np.linalg.norm(found[finite] - wanted[finite])
            assert difference <= norm_bound("bfloat16") * np.linalg.norm(wanted[finite]), plan


@direct_words
@each_shape(SHAPES)
def test_direct_words_of_integers_are_exact(number, shape, options, algorithm):
    """On AVX2 and on another target; types, layouts and plans take turns, and every other shape is quantized."""
    types = ("int8", "uint8")
    others = [CPU_TARGETS[f"x86-64-{level}"] for level in ("v4-vnni", "v3-vnni", "v4")]
    targets = (AVX2, turn_of(others, number // 2, algorithm is ROWS))
    for turn, target in enumerate(target for target in targets if target.features <= detect_host().features):
        dtype, data_format = turn_of(types, number, turn), turn_of(LAYOUTS, number // 2, turn)
        problem = td.Problem(*shape, dtype=dtype, data_format=data_format, **options)
        if number % 2:
            output = dtype if turn or problem.epilogue.activation != "none" else "float32"
            problem = problem.replace(quantization=td.Quantization(turn_of(types, number // 4, turn), output))
        check_integers(problem, target, algorithm, turn_of((True, False), number // 2, algorithm is ROWS, turn))


def check_integers(problem, target, algorithm, cheapest):
    """The cheapest plan or some other is exact, at the ends of the range and with a zero point as data."""
    arrays = testing.operands(problem, 7)
    limits = np.iinfo(problem.dtype)
    arrays.data.flat[::3], arrays.data.flat[1::3] = limits.min, limits.max
    plans, wanted = algorithm.candidates(problem, target), reference(problem, *arrays)
    plan = plans[0 if cheapest else len(plans) // 2][1]
    found = run_kernel(problem, target, *bound(problem, arrays), algorithm, plan)
    np.testing.assert_array_equal(found, wanted, err_msg=str((problem.key, plan)))


#: Taps of two and one, of three and two, along three axes and one, dilated; for Strassen's algorithm one tap, or four.
SUMMED = {
    "two taps": ((2, 1, 7, 20, (5, 6), (4, 4), (2, 2), (1, 1), (1, 1), (10, 12)), {}),
    "one tap too": ((1, 1, 6, 17, (5, 6), (3, 3), (2, 2), (1, 1), (1, 1), (9, 11)), {}),
    "three and two": ((1, 2, 5, 9, (6, 7), (5, 5), (2, 2), (1, 1), (1, 1), (13, 15)), {}),
    "three axes": ((1, 1, 6, 9, (3, 4, 5), (4, 3, 3), (2, 1, 2), (1, 2, 1), (0, 1, 1), (8, 6, 10)), {}),
    "a waveform": ((2, 1, 9, 12, (37,), (4,), (2,), (1,), (1,), (74,)), {}),
    "its groups": ((1, 3, 4, 5, (11,), (6,), (3,), (1,), (1,), (34,)), {}),
    "kernel is stride": ((1, 1, 37, 21, (6, 16), (2, 2), (2, 2), (1, 1), (0, 0), (12, 32)), {}),
    "a gap": ((2, 2, 7, 24, (3, 5), (2, 2), (3, 3), (1, 1), (0, 0), (9, 15)), {"epilogue": td.Epilogue(True, "relu")}),
    "four taps": ((1, 1, 19, 11, (9,), (8,), (2,), (1,), (0,), (24,)), {}),
}
#: The types of data and filter, and of the output where it is quantized.
PAIRS = (
    ("uint8", "int8", "uint8"),
    ("int8", "int8", "int8"),
    ("uint8", "uint8", "float32"),
    ("int8", "uint8", "int32"),
)


@each_shape(SUMMED)
def test_sums_of_words_are_exact(number, shape, options):
    """Two types, one of them quantized, each in another layout and by another plan; there are taps to sum, or none."""
    algorithm = WINOGRAD if number < 6 else STRASSEN
    for turn in range(2):
        data, weights, output = turn_of(PAIRS, number, 2 * (number // 4), turn)
        problem = td.Problem(*shape, dtype=data, data_format=turn_of(LAYOUTS, number // 2, turn), **options)
        if turn or weights != data:
            output = "uint8" if problem.epilogue.activation != "none" else output
            problem = problem.replace(quantization=td.Quantization(weights, output))
        assert not (STRASSEN if algorithm is WINOGRAD else WINOGRAD).supports(problem, AVX2)
        check_integers(problem, AVX2, algorithm, cheapest=not turn)


def test_the_least_and_the_greatest_integers_are_summed_exactly():
    """All 16 bits of both halves of a word: the signs of neighbours alternate, and so do the taps'."""
    problem = td.Problem(1, 1, 8, 8, (7, 7), (6, 6), (2, 2), (1, 1), (0, 0), (18, 18), dtype="int8", data_format="NXC")
    ends, rng = np.array([-128, 127], np.int8), np.random.default_rng(4)
    for data, weights in ((ends[::1], ends[::-1]), (ends[:1], ends[:1]), (ends[1:], ends[:1])):
        arrays = rng.choice(data, problem.data_shape), rng.choice(weights, problem.filter_shape), None
        for _, plan in WINOGRAD.candidates(problem, AVX2)[:2]:
            found = run_kernel(problem, AVX2, *arrays, WINOGRAD, plan)
            np.testing.assert_array_equal(found, reference(problem, *arrays))


def test_sums_of_words_serve_any_extents():
    attributes = (4, 3), (2, 2), (1, 1), (1, 0), ("any+2", "any+3")
    problem = td.Problem("any", 2, 7, 20, ("any", "any"), *attributes, dtype="uint8", data_format="NCX")
    kernel, compiled = compile_kernel(problem, AVX2, WINOGRAD, WINOGRAD.candidates(problem, AVX2)[0][1])
    for batch, spatial in ((1, (30, 41)), (3, (1, 1)), (2, (65, 7))):
        static = problem.at((batch, 14, *spatial))
        arrays = operands(static, batch)
        np.testing.assert_array_equal(call_kernel(static, kernel, compiled, *arrays), reference(static, *arrays))


def test_sums_of_words_are_refused_where_they_are_not_exact():
    """Too many terms for results that are multiplied; points that are no integers; words of four."""
    problem = td.Problem(1, 1, 2000, 8, (4, 4), (4, 4), (2, 2), (1, 1), (1, 1), (8, 8), dtype="uint8")
    assert WINOGRAD.supports(problem, AVX2)
    assert not WINOGRAD.supports(problem.replace(in_channels=2100), AVX2)  # 4 * 2100 * 255 * 255 * 4 > 2 ** 31
    few = problem.replace(in_channels=8)
    assert {max(plan.tile.outputs) for _, plan in WINOGRAD.candidates(few, AVX2)} == {2, 3}
    plan = WINOGRAD.candidates(few, AVX2)[0][1]
    wider = replace(plan, tile=replace(plan.tile, outputs_h=4, outputs_w=4))
    with pytest.raises(ValueError, match="outputs=4: must make at most 4 products with 2 taps of integers"):
        X86.build(few, AVX2, WINOGRAD, wider)
    byte_words = few.replace(dtype="int8")
    assert WINOGRAD.supports(byte_words, AVX2)
    assert not WINOGRAD.supports(byte_words, VNNI)
    assert not STRASSEN.supports(byte_words.replace(kernel=(2, 2), pads_begin=(0, 0)), VNNI)


@runs_bf16
@direct_words
@layouts
@settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data(), place=st.floats(0, 1, exclude_max=True), seed=st.integers(0, 1000))
def test_direct_words_of_any_problem(data_format, algorithm, data, place, seed):
    drawn = data.draw(problems(data_formats=[data_format], max_macs=20_000).filter(not_empty))
    problem = drawn.replace(dtype="bfloat16", precision="ieee", quantization=None)
    arrays = operands(problem, seed)
    plans = algorithm.candidates(problem, BF16)
    plan = plans[int(place * len(plans))][1]
    wanted = reference(problem, *arrays)
    found = run_kernel(problem, BF16, *arrays, algorithm, plan).astype(np.float64)
    assert_norm_close(found, wanted, "bfloat16", message=plan)


@runs_bf16
@direct_words
def test_direct_words_serve_any_extents(algorithm):
    attributes = (4, 3), (2, 3), (1, 1), (1, 0), ("any+2", "any+3")
    problem = td.Problem("any", 2, 7, 20, ("any", "any"), *attributes, dtype="bfloat16", data_format="NXC")
    kernel, compiled = compile_kernel(problem, BF16, algorithm, algorithm.candidates(problem, BF16)[0][1])
    for batch, spatial in ((1, (30, 41)), (3, (1, 1)), (2, (65, 7))):
        static = problem.at((batch, *spatial, 14))
        arrays = operands(static, batch)
        found = call_kernel(static, kernel, compiled, *arrays).astype(np.float64)
        wanted = reference(static, *arrays)
        assert_norm_close(found, wanted, "bfloat16", message=static.key)


@pytest.mark.parametrize("name", ["v3", "v3-vnni", "v4", "v4-vnni"])
@direct_words
def test_direct_code_multiplies_integers_by_instructions(algorithm, name):
    """The types take turns with the targets and the algorithms."""
    layout = "NXC" if algorithm is CHANNELS else "NCX"
    dtype = turn_of(("int8", "uint8"), "vnni" in name, "v4" in name, algorithm is ROWS)
    problem = td.Problem(1, 1, 32, 64, (8, 16), (2, 2), (2, 2), (1, 1), (0, 0), (16, 32), dtype, layout)
    code = code_of(
        problem.replace(quantization=td.Quantization("int8", dtype)), CPU_TARGETS[f"x86-64-{name}"], algorithm
    )
    instruction, register = "vpdpbusd" if "vnni" in name else "vpmaddwd", "zmm" if "v4" in name else "ymm"
    assert len(re.findall(rf"\t{instruction}\t.*{register}", code)) >= 8
    assert not re.search("call.*tvm_deconv_dot", code)  # inlined
    if algorithm is ROWS:
        assert not re.search("vpextrb", code)  # bytes of a row are narrowed in vectors


@direct_words
def test_direct_code_multiplies_and_rounds_by_instructions(algorithm):
    """A register tile multiplies words, and its results go to the output in 16 bits."""
    layout = "NXC" if algorithm is CHANNELS else "NCX"
    problem = td.Problem(
        1, 1, 32, 64, (8, 16), (2, 2), (2, 2), (1, 1), (0, 0), (16, 32), dtype="bfloat16", data_format=layout
    )
    code = code_of(problem, BF16, algorithm)
    assert len(re.findall(r"\tvdpbf16ps\t.*zmm", code)) >= 8
    assert len(re.findall(r"\tvcvtne(2ps|ps)2bf16\t.*zmm", code)) >= 4
    assert ("vcvtne2ps2bf16" in code) == (layout == "NCX")  # words of two phases
    assert not re.search("call.*tvm_deconv_(dot|round)", code)  # inlined


@pytest.mark.parametrize(
    ("dtype", "target", "instruction", "register"),
    [
        ("int8", "x86-64-v3", "vpmaddwd", "ymm"),
        ("uint8", "x86-64-v4", "vpmaddwd", "zmm"),
        ("int8", "x86-64-v3-vnni", "vpdpbusd", "ymm"),
        ("int8", "x86-64-v4-vnni", "vpdpbusd", "zmm"),
        ("uint8", "x86-64-v4-vnni", "vpdpwssd", "zmm"),
        ("bfloat16", "x86-64-v4-bf16", "vdpbf16ps", "zmm"),
    ],
)
def test_the_code_has_the_instruction(dtype, target, instruction, register):
    problem = td.Problem(1, 1, 32, 64, (8, 16), (2, 2), (2, 2), (1, 1), (0, 0), (16, 32), dtype=dtype)
    code = code_of(problem, CPU_TARGETS[target], DOT)
    assert len(re.findall(rf"\t{instruction}\t.*{register}", code)) >= 8  # a register tile
    assert not re.search("call.*tvm_deconv_dot", code)  # inlined


@pytest.mark.parametrize(
    ("algorithm", "options", "whole"),
    [
        (CHANNELS, {"dtype": "bfloat16"}, True),
        (DOT, {"dtype": "bfloat16"}, True),
        (DOT, {"dtype": "uint8", "quantization": td.Quantization("int8", "uint8")}, True),
        (DOT, {"dtype": "int8", "quantization": td.Quantization("int8", "int8")}, True),
        (DOT, {"dtype": "uint8", "quantization": td.Quantization("uint8", "uint8")}, False),  # widened to 16 bits
        (DOT, {"dtype": "bfloat16", "data_format": "NCX"}, False),
        (DOT, {"dtype": "bfloat16", "in_channels": 31}, False),
    ],
)
def test_words_of_neighbouring_channels_are_loaded_whole(algorithm, options, whole):
    problem = td.Problem(1, 1, 32, 64, (8, 16), (4, 4), (2, 2), (1, 1), (1, 1), (16, 32))
    problem = problem.replace(**{"data_format": "NXC", **options})
    target = BF16 if problem.dtype == "bfloat16" else VNNI
    code = X86.build(problem, target, algorithm).deconv.script(show_meta=False)
    assert bool(re.search(r'reinterpret\("int32(x\d+)?", data\w*\[', code)) == whole


def test_it_is_the_default_where_it_multiplies():
    """For layers with the channels of real ones; of float32 and on targets without instructions it is none."""
    problem = td.Problem(1, 1, 128, 64, (32, 32), (2, 2), (2, 2), (1, 1), (0, 0), (64, 64))
    assert X86.default(problem.replace(dtype="bfloat16"), BF16)[0].name == "dot_rows"
    assert X86.default(problem.replace(dtype="bfloat16", data_format="NXC"), BF16)[0].name == "dot_channels"
    wide = problem.replace(in_channels=1024, out_channels=512, dtype="int8")
    for data_format in ("NCX", "NXC"):
        quantized = wide.replace(data_format=data_format, quantization=td.Quantization("int8", "int8"))
        assert X86.default(quantized, AVX2)[0].name == "dot_strassen"
        taps = quantized.replace(kernel=(4, 4), pads_begin=(1, 1))
        assert X86.default(taps, AVX2)[0].name == "dot_winograd"
    few = problem.replace(out_channels=3, dtype="uint8", quantization=td.Quantization("int8", "uint8"))
    for target in (AVX2, VNNI):
        assert X86.default(few, target)[0].name == "dot_rows"
    points = problem.replace(batch=64, data_spatial=(1, 1), output_spatial=(2, 2), dtype="uint8")
    assert X86.default(points, VNNI)[0].name == "dot"  # no rows to pack
    assert not DOT.supports(problem, BF16)
    assert not DOT.supports(problem.replace(dtype="bfloat16"), AVX2)
    assert not DOT.supports(problem.replace(dtype="float16"), BF16)
