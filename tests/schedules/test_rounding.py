"""Rounding of outputs to bfloat16: to nearest even, once, for all numbers and all NaN."""

import re

import ml_dtypes
import numpy as np
import pytest
from support.kernels import X86, all_targets, call_kernel, code_of, compile_kernel, targets

import tvm_deconv as td
from tvm_deconv.targets import get

#: Bits of float32: any; denormals; ties between even and odd neighbours; the largest numbers; infinities; NaN whose
#: rounding would carry into the sign.
NUMBERS = np.random.default_rng(3).integers(0, 2**32, 1024, np.uint32)
NUMBERS[:256] &= 0x807FFFFF
NUMBERS[256:512] = NUMBERS[256:512] & 0xFFFF0000 | 0x8000
NUMBERS[512:520] = [0x7F7FFFFF, 0xFF7F8000, 0x7F800000, 0xFF800000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0]
NAN = np.array([0x7FFF, 0xFFFF, 0x7F81, 0xFF81, 0x7FC0], np.uint16)

#: The direct forms, the layouts in which their register tiles hold vectors of the output, and outputs in a row; of
#: rows that are no whole vectors the results pass through memory.
forms = pytest.mark.parametrize(
    ("name", "data_format", "groups", "width"),
    [
        ("direct_groups", "NXC", 64, 32),
        ("direct_channels", "NXC", 1, 32),
        ("direct_rows", "NCX", 1, 32),
        ("direct_rows", "NCX", 1, 31),
        ("direct_rows", "NXC", 1, 32),
    ],
    ids=["groups", "channels", "rows", "rows in memory", "rows of channels last"],
)


def kernel_of(name, data_format, groups, width, bias):
    """A problem of 64 output channels whose kernel is its stride, and the form's cheapest plan for it."""
    channels = (groups, 64 // groups, 64 // groups)
    shape = (1, *channels, (2, 16), (1, 2), (1, 2), (1, 1), (0, 0), (2, width))
    options = {"dtype": "bfloat16", "data_format": data_format, "epilogue": td.Epilogue(bias)}
    return td.Problem(*shape, **options), next(algorithm for algorithm in X86.algorithms if algorithm.name == name)


@all_targets
@forms
def test_sums_round_once_to_nearest_even(name, data_format, groups, width, target):
    problem, algorithm = kernel_of(name, data_format, groups, width, bias=True)
    data, weights = (np.zeros(shape, ml_dtypes.bfloat16) for shape in (problem.data_shape, problem.filter_shape))
    kernel = compile_kernel(problem, target, algorithm, algorithm.candidates(problem, target)[0][1])
    for bias in np.split(NUMBERS.view(np.float32), 16):
        with np.errstate(invalid="ignore"):
            want = (bias + 0).astype(ml_dtypes.bfloat16)
        found = call_kernel(problem, *kernel, data, weights, bias)
        same_or_nan(found if data_format == "NXC" else np.moveaxis(found, 1, -1), want)


@all_targets
def test_sums_of_inputs_round_once_to_nearest_even(target):
    """Each number is the sum of three of bfloat16, which have its bits in turn; the other inputs are zero.

    Of the smallest numbers bfloat16 has not the last bits.
    """
    numbers = NUMBERS.view(np.float32)
    numbers = numbers[np.isfinite(numbers) & (np.abs(numbers) > 1e-30)]
    numbers = numbers[: len(numbers) // 32 * 32]
    left, parts = numbers, []
    for _ in range(3):
        parts.append((left.view(np.uint32) & 0xFFFF0000).view(np.float32))
        left = left - parts[-1]
    assert not left.any()
    problem = td.Problem.from_torch((1, 16, len(numbers) // 32, 32), (16, 1, 2, 2), stride=2, dtype="bfloat16")
    problem = problem.replace(data_format="NXC")
    algorithm = next(one for one in X86.algorithms if one.name == "direct_inputs")
    data = np.zeros(problem.data_shape, ml_dtypes.bfloat16)
    data[..., 3:6] = np.stack(parts, axis=-1).astype(ml_dtypes.bfloat16).reshape(*data.shape[:-1], 3)
    kernel = compile_kernel(problem, target, algorithm, algorithm.candidates(problem, target)[0][1])
    found = call_kernel(problem, *kernel, data, np.ones(problem.filter_shape, ml_dtypes.bfloat16), None)
    want = numbers.astype(ml_dtypes.bfloat16).reshape(data.shape[1:3])
    for row, column in np.ndindex(2, 2):
        np.testing.assert_array_equal(found[0, row::2, column::2, 0], want)


@all_targets
@forms
def test_every_nan_of_the_data_stays_one(name, data_format, groups, width, target):
    problem, algorithm = kernel_of(name, data_format, groups, width, bias=False)
    data = np.resize(NAN, problem.data_shape).view(ml_dtypes.bfloat16)
    weights = np.ones(problem.filter_shape, ml_dtypes.bfloat16)
    kernel = compile_kernel(problem, target, algorithm, algorithm.candidates(problem, target)[0][1])
    found = call_kernel(problem, *kernel, data, weights, None)
    assert np.isnan(found.astype(np.float32)).all()


@pytest.mark.parametrize("name", ["matrix", "strassen", "winograd", "winograd_rows", "direct_folded", "direct_inputs"])
@targets
def test_every_nan_of_the_bias_stays_one(name, target):
    kernel, stride = ((2, 2), (2, 2)) if name in ("strassen", "direct_folded") else ((4, 4), (2, 2))
    problem = td.Problem.from_torch((1, 24, 9, 21), (24, 8, *kernel), stride=stride, dtype="bfloat16")
    problem = problem.replace(epilogue=td.Epilogue(True), data_format="NCX" if name == "winograd_rows" else "NXC")
    algorithm = next(one for one in X86.algorithms if one.name == name)
    bias = np.array([0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0xFF80FFFF, 0x7FC00000, 0x3F800000, 0x7F80FFFF, 0], np.uint32)
    data, weights = (np.ones(shape, ml_dtypes.bfloat16) for shape in (problem.data_shape, problem.filter_shape))
    kernel = compile_kernel(problem, target, algorithm, algorithm.candidates(problem, target)[0][1])
    found = call_kernel(problem, *kernel, data, weights, bias.view(np.float32)).astype(np.float32)
    found = np.moveaxis(found, 1, -1) if name == "winograd_rows" else found
    want = np.isnan(bias.view(np.float32))
    np.testing.assert_array_equal(np.isnan(found), np.broadcast_to(want, found.shape))


@forms
def test_float16_is_added_up_in_float32_where_avx512_fp16_could(name, data_format, groups, width):
    """The code for such a CPU is compiled, and not run: none of its instructions adds or multiplies float16."""
    target = get("sapphirerapids")
    assert "avx512_fp16" in target.features
    problem, algorithm = kernel_of(name, data_format, groups, width, bias=True)
    problem = problem.replace(dtype="float16")
    code = code_of(problem, target, algorithm)
    assert len(re.findall(r"\tvfmadd\w+ps\t.*zmm", code)) >= 8
    assert re.search(r"\tvcvtph2ps\w*\t", code)
    assert re.search(r"\tvcvtps2ph\w*\t", code)
    assert not re.search(r"\tv(add|sub|mul|div|fn?m(add|sub)\w*)(ph|sh)\t", code)


def same_or_nan(found, want):
    is_nan = np.isnan(want.astype(np.float32))
    assert np.isnan(found.astype(np.float32)[..., is_nan]).all()
    found, want = found[..., ~is_nan].view(np.uint16), want[~is_nan].view(np.uint16)
    np.testing.assert_array_equal(found, np.broadcast_to(want, found.shape))
