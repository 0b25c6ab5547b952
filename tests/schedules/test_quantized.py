"""Kernels of quantized problems: every algorithm exact against the reference, at the ends of the range too."""

import dataclasses
import re

import numpy as np
import pytest
from support.kernels import X86, bound, code_of, run_kernel

import tvm_deconv as td
from tvm_deconv.compute.direct_layout import Tile
from tvm_deconv.compute.phases import Geometry
from tvm_deconv.problem.quantization import STORED
from tvm_deconv.problem.reference import reference
from tvm_deconv.problem.testing import Operands, deviation, operands
from tvm_deconv.schedules.x86.tiles import Plan
from tvm_deconv.schedules.x86.vectors import accumulator_lanes
from tvm_deconv.targets import CPU_TARGETS, detect_host

AVX2, VNNI = CPU_TARGETS["x86-64-v3"], CPU_TARGETS["x86-64-v4-vnni"]
ALGORITHMS = {algorithm.name: algorithm for algorithm in X86.algorithms}
#: Odd channels and an output that goes beyond the taps; groups; one tap; a kernel shorter than its stride; two axes.
SHAPES = (
    (2, 1, 7, 20, (6,), (4,), (2,), (1,), (1,), (13,)),
    (1, 3, 5, 9, (11,), (5,), (3,), (1,), (1,), (33,)),
    (1, 1, 18, 24, (16,), (2,), (2,), (1,), (0,), (32,)),
    (1, 20, 1, 1, (9,), (2,), (3,), (1,), (0,), (27,)),
    (1, 1, 6, 17, (3, 5), (3, 3), (2, 2), (1, 1), (1, 1), (6, 10)),
)
#: The types of data, filter and output.
TYPES = (
    ("uint8", "int8", "uint8"),
    ("int8", "int8", "int8"),
    ("uint8", "uint8", "uint8"),
    ("uint8", "int8", "float32"),
    ("int8", "uint8", "int32"),
)


#: Channels last, and signed data, whose sums in bytes have a correction.
SIGNED = td.Problem(
    *(1, 1, 9, 16, (3, 5), (3, 3), (2, 2), (1, 1), (1, 1), (6, 10)),
    dtype="int8",
    data_format="NXC",
    epilogue=td.Epilogue(True, "relu"),
    quantization=td.Quantization("int8", "int8"),
)


def problem_of(shape, types, **options):
    data, filter, output = types
    return td.Problem(*shape, dtype=data, quantization=td.Quantization(filter, output), **options)


def run(problem, target, arrays, algorithm, plan):
    return run_kernel(problem, target, *bound(problem, arrays), algorithm, plan)


#: The algorithms by the number of a shape, with the target and the types; the layouts take turns.
CASES = (
    (0, "dot", VNNI, 0),
    (1, "dot", VNNI, 1),
    (2, "dot", AVX2, 3),
    (4, "dot", AVX2, 4),
    (2, "dot", VNNI, 2),
    (1, "matrix", AVX2, 0),
    (0, "direct_channels", VNNI, 4),
    (3, "direct_groups", AVX2, 1),
    (0, "direct_rows", AVX2, 2),
    (4, "direct_rows", VNNI, 3),
)


@pytest.mark.parametrize(("number", "name", "target", "types"), CASES)
def test_kernels_are_exact(number, name, target, types):
    if not target.features <= detect_host().features:
        pytest.skip(f"this CPU does not run {target.name}")
    activation = "relu" if TYPES[types][2] == "int32" else ("relu", "none", "leaky_relu")[number % 3]
    options = {"data_format": ("NCX", "NXC")[types % 2], "epilogue": td.Epilogue(number % 2 == 0, activation)}
    problem = problem_of(SHAPES[number], TYPES[types], **options)
    arrays, algorithm = operands(problem, 10 * number + types), ALGORITHMS[name]
    limits = np.iinfo(problem.dtype)
    arrays.data.flat[::5], arrays.data.flat[1::5] = limits.min, limits.max
    arrays.filter.flat[::3] = np.iinfo(problem.filter_dtype).min
    found = run(problem, target, arrays, algorithm, algorithm.candidates(problem, target)[0][1])
    np.testing.assert_array_equal(found, reference(problem, *arrays))


@pytest.mark.parametrize("types", TYPES)
@pytest.mark.parametrize("target", [AVX2, VNNI])
def test_lanes_of_inputs_are_added_up(target, types):
    """Few outputs of many inputs."""
    if not target.features <= detect_host().features:
        pytest.skip(f"this CPU does not run {target.name}")
    activation = "relu" if types[2] in STORED else "none"
    shape, algorithm = (2, 1, 21, 3, (5, 7), (4, 4), (2, 2), (1, 1), (1, 1), (10, 14)), ALGORITHMS["direct_inputs"]
    problem = problem_of(shape, types, data_format="NXC", epilogue=td.Epilogue(True, activation))
    arrays = operands(problem, TYPES.index(types))
    for _, plan in algorithm.candidates(problem, target)[:40:13]:
        np.testing.assert_array_equal(run(problem, target, arrays, algorithm, plan), reference(problem, *arrays))


@pytest.mark.parametrize("vectors", [1, 2, 3, 4, 5])
@pytest.mark.parametrize(
    ("target", "name", "outputs"),
    [(AVX2, "direct_channels", ("uint8", "int8")), (VNNI, "dot_channels", ("int8", "float32", "uint8"))],
)
def test_vectors_of_channels_are_narrowed_in_registers(target, name, outputs, vectors):
    """Two or four vectors become one of bytes, and what is left over one by one."""
    output = outputs[vectors % len(outputs)]
    if not target.features <= detect_host().features:
        pytest.skip(f"this CPU does not run {target.name}")
    lanes = accumulator_lanes(SIGNED, target)
    problem = SIGNED.replace(out_channels=vectors * lanes - 3, quantization=td.Quantization("int8", output))
    plan = Plan(Tile(1, 1, 2, 5, vectors * lanes, 2, 1), share_data=False)
    arrays = operands(problem, vectors)
    kernel = ALGORITHMS[name].build(problem, target, plan)
    assert ("join_" in kernel.deconv.script()) == (vectors > 1 and output != "float32")
    assert "interleave" not in kernel.deconv.script()  # nothing passes through memory
    np.testing.assert_array_equal(run(problem, target, arrays, ALGORITHMS[name], plan), reference(problem, *arrays))
    # Also numbers that 32 bits do not hold, of either sign.
    problem = problem.replace(epilogue=td.Epilogue(True))
    for zero in {"int8": (-128, -3, 127), "uint8": (0, 2, 255)}.get(output, (0,)):
        large = arrays._replace(scaling=dataclasses.replace(arrays.scaling, data_scale=2.0**30, output_zero_point=zero))
        found = run(problem, target, large, ALGORITHMS[name], plan)
        np.testing.assert_array_equal(found, reference(problem, *large))
        if output in STORED:
            assert {found.min(), found.max()} == {np.iinfo(output).min, np.iinfo(output).max}


#: Rows of whole vectors and of parts of them, by the stride along a row.
IN_ROWS = {
    "kernel = stride": lambda stride: ((2, 32), (2, stride), (2, stride), (0, 0), (4, 32 * stride)),
    "cropped rows": lambda stride: ((3, 37), (4, 2 * stride), (2, stride), (1, 1), (6, 37 * stride - 1)),
}


@pytest.mark.parametrize("stride", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("target", "rows", "outputs"),
    [
        (AVX2, "kernel = stride", ("uint8", "int8", "float32")),
        (VNNI, "kernel = stride", ("int8", "uint8")),
        (VNNI, "cropped rows", ("uint8", "float32", "int8")),
    ],
)
def test_phases_of_a_row_are_narrowed_in_registers(target, rows, outputs, stride):
    output = outputs[stride % len(outputs)]
    if not target.features <= detect_host().features:
        pytest.skip(f"this CPU does not run {target.name}")
    data, kernel, strides, pads, outputs = IN_ROWS[rows](stride)
    problem = SIGNED.replace(
        data_format="NCX",
        groups=3,
        in_channels=1,
        out_channels=1,
        data_spatial=data,
        kernel=kernel,
        strides=strides,
        pads_begin=pads,
        output_spatial=outputs,
        quantization=td.Quantization("int8", output),
    )
    algorithm, arrays = ALGORITHMS["direct_rows"], operands(problem, stride)

    def has_whole_rows(plan):
        positions = Geometry.of(problem, bool(plan.tile.uncropped)).axes[2].positions
        return plan.tile.phases % stride == 0 and plan.tile.width >= positions

    plan = next(plan for _, plan in algorithm.candidates(problem, target) if has_whole_rows(plan))
    assert "interleave" not in algorithm.build(problem, target, plan).deconv.script()
    np.testing.assert_array_equal(run(problem, target, arrays, algorithm, plan), reference(problem, *arrays))


@pytest.mark.parametrize("taps", [258, 259])
@pytest.mark.parametrize("name", ["direct_rows", "direct_inputs"])
def test_sums_in_float32_are_exact_up_to_their_limit(name, taps):
    """The greatest sum of 258 products is the last that float32 surely holds; that of 259 is odd, and beyond it."""
    data_format = "NXC" if name == "direct_inputs" else "NCX"
    shape = (1, 1, 1, 1, (taps + 9,), (taps,), (1,), (1,), (0,), (2 * taps + 8,))
    problem = problem_of(shape, ("uint8", "uint8", "int32"), data_format=data_format)
    algorithm = ALGORITHMS[name]
    plan = algorithm.candidates(problem, AVX2)[0][1]
    assert algorithm.build(problem, AVX2, plan).packed_dtype == ("float32" if taps == 258 else "int32")
    data, filter, bias, _ = operands(problem)
    arrays = Operands(np.full_like(data, 255), np.full_like(filter, 255), bias, td.Scaling())
    wanted = reference(problem, *arrays)
    assert wanted.max() == taps * 255 * 255
    np.testing.assert_array_equal(run(problem, AVX2, arrays, algorithm, plan), wanted)


def test_integers_of_32_bits_are_summed_as_such():
    problem = td.Problem(*SHAPES[3], dtype="int32", data_format="NXC")
    arrays = operands(problem)
    arrays.data.flat[::2], arrays.filter[:] = 2**24 + 1, 3
    found = run_kernel(problem, AVX2, arrays.data, arrays.filter, None)
    np.testing.assert_array_equal(found, reference(problem, *arrays))


@pytest.mark.parametrize("bias", [2**30 + 1, -(2**30) - 1])
def test_a_bias_is_added_as_an_integer(bias):
    """Sums in float32 meet a bias that float32 does not hold."""
    problem = problem_of(SHAPES[3], ("uint8", "int8", "int32"), data_format="NXC", epilogue=td.Epilogue(True))
    arrays = operands(problem)._replace(bias=np.full(problem.bias_shape, bias, np.int32))
    algorithm = ALGORITHMS["direct_groups"]
    plan = algorithm.candidates(problem, AVX2)[0][1]
    assert algorithm.build(problem, AVX2, plan).packed_dtype == "float32"
    np.testing.assert_array_equal(run(problem, AVX2, arrays, algorithm, plan), reference(problem, *arrays))


def test_zero_points_reach_the_padding():
    """All data are the zero point, so nothing is added anywhere, whatever the taps of a position are."""
    problem = problem_of(SHAPES[1], ("uint8", "int8", "int32"))
    arrays = operands(problem)
    arrays.data[:] = arrays.scaling.data_zero_point
    dot = ALGORITHMS["dot"]
    assert not run(problem, AVX2, arrays, dot, dot.candidates(problem, AVX2)[0][1]).any()


def test_other_activations_come_before_the_output_is_quantized():
    problem = problem_of(SHAPES[0], ("uint8", "int8", "int8"), epilogue=td.Epilogue(True, "silu"))
    arrays = operands(problem, 3)
    found = run(problem, AVX2, arrays, *X86.default(problem, AVX2))
    wanted = reference(problem, *arrays)
    assert len(np.unique(wanted)) > 20
    assert deviation(problem, found, wanted).allowed


@pytest.mark.parametrize("target", [AVX2, VNNI], ids=lambda target: target.name)
@pytest.mark.parametrize("activation", ["hardswish", "sigmoid", "elu", "mish"])
def test_phases_that_no_product_reaches_have_the_activation_of_nothing(activation, target):
    """Two of three phases are constants, which TVM writes in place of names."""
    if not target.features <= detect_host().features:
        pytest.skip(f"this CPU does not run {target.name}")
    shape = (1, 1, 4, 8, (6,), (1,), (3,), (1,), (0,), (18,))
    epilogue = td.Epilogue(False, activation, *([0.5] if activation == "elu" else []))
    problem = problem_of(shape, ("int8", "int8", "uint8"), epilogue=epilogue)
    arrays = operands(problem, 5)
    found, wanted = run(problem, target, arrays, *X86.default(problem, target)), reference(problem, *arrays)
    assert len(np.unique(wanted[..., 1::3])) == 1
    assert deviation(problem, found, wanted).allowed


def test_unsigned_data_are_multiplied_as_they_are():
    problem = problem_of((1, 1, 32, 64, (16,), (2,), (2,), (1,), (0,), (32,)), TYPES[0], data_format="NXC")
    code = code_of(problem, VNNI, ALGORITHMS["dot"])
    assert len(re.findall(r"\tvpdpbusd\t.*zmm", code)) >= 8
    assert re.search(r"vpmovdb|vpmovsdb|vpmovusdb", code)  # outputs are narrowed in registers


#: Shapes of which each channel is transposed in rows that end within a chunk, and as one plane.
BYTE_ROWS = (
    (1, 2, 6, 20, (2, 21), (3, 4), (2, 2), (1, 1), (0, 1), (5, 43)),
    (2, 1, 8, 24, (4, 4), (4, 4), (2, 2), (1, 1), (1, 1), (8, 8)),
)


@pytest.mark.parametrize("output", ["int8", "uint8"])
@pytest.mark.parametrize("target", [AVX2, VNNI], ids=lambda target: target.name)
@pytest.mark.parametrize("shape", BYTE_ROWS, ids=["rows", "planes"])
def test_bytes_are_transposed_into_rows(shape, target, output):
    """Negative ones too, from whole vectors of sums and from halves."""
    if not target.features <= detect_host().features:
        pytest.skip(f"this CPU does not run {target.name}")
    problem = problem_of(shape, ("uint8", "int8", output), epilogue=td.Epilogue(True))
    arrays, dot = operands(problem, 5), ALGORITHMS["dot"]
    plans = [plan for _, plan in dot.candidates(problem, target)]
    wanted = reference(problem, *arrays)
    assert len(np.unique(wanted)) > 50
    for plan in {plan.halves: plan for plan in reversed(plans)}.values():
        np.testing.assert_array_equal(run(problem, target, arrays, dot, plan), wanted)


def test_bytes_are_joined_before_they_are_transposed():
    """A square of 16 x 16 takes 64 shuffles of 32 bits each, and 8 of words; nothing is narrowed afterwards."""
    problem = problem_of((1, 1, 32, 16, (32,), (2,), (2,), (1,), (0,), (64,)), TYPES[0])
    code = code_of(problem, VNNI, ALGORITHMS["dot"])
    assert "vpmovdb" not in code
    assert len(re.findall(r"\tvpslld\t\$24", code)) >= 4


def test_halves_round_to_even_in_kernels():
    """Half of the sums lie between two stored numbers."""
    problem = problem_of(SHAPES[2], ("uint8", "int8", "int8"))
    arrays = operands(problem)._replace(scaling=td.Scaling(output_scale=2.0, output_zero_point=-3))
    arrays.data[:] %= 4
    arrays.filter[:] %= 5
    found = run(problem, AVX2, arrays, *X86.default(problem, AVX2))
    wanted = reference(problem, *arrays)
    assert np.abs(wanted).max() < 127
    np.testing.assert_array_equal(found, wanted)


def test_few_channels_are_multiplied_in_words():
    """21 channels are six words of four, but one word is no reduction of a matrix."""
    problem = problem_of((1, 1, 21, 21, (70, 70), (16, 16), (8, 8), (1, 1), (0, 0), (568, 568)), TYPES[0])
    for data_format in ("NCX", "NXC"):
        assert X86.default(problem.replace(data_format=data_format), VNNI)[0].name.startswith("dot")
    assert X86.default(problem.replace(in_channels=4), VNNI)[0].name != "dot"
