"""Phases of the last axis folded into channels: results agree with the reference, and it is chosen where it pays."""

import numpy as np
import pytest
from support.kernels import X86, bound, in_turn, run_kernel

import tvm_deconv as td
from tvm_deconv.compiler.selection import named
from tvm_deconv.problem.reference import reference
from tvm_deconv.problem.testing import deviation, operands
from tvm_deconv.targets import CPU_TARGETS

WIDE, WORDS = CPU_TARGETS["x86-64-v4"], CPU_TARGETS["x86-64-v4-bf16"]
PLANE = td.Problem(1, 1, 16, 20, (5, 9), (2, 2), (2, 2), (1, 1), (0, 0), (10, 18), data_format="NXC")
SHAPES = {
    "three channels of two": PLANE.replace(out_channels=3, epilogue=td.Epilogue(True, "relu")),
    "channels beyond a vector": PLANE.replace(out_channels=37, epilogue=td.Epilogue(True)),
    "one axis": td.Problem(3, 1, 7, 5, (11,), (4,), (4,), (1,), (0,), (44,), data_format="NXC"),
    "taps along the other axes": td.Problem(
        2, 1, 5, 6, (3, 4, 7), (2, 3, 3), (1, 2, 3), (1, 1, 1), (0, 1, 0), (4, 7, 21), data_format="NXC"
    ),
}
TYPES = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "float16": {"dtype": "float16"},
    "quantized": {"dtype": "uint8", "quantization": td.Quantization("int8", "uint8")},
    "signed": {"dtype": "int8", "quantization": td.Quantization("int8", "float32")},
}


@in_turn("problem, types", [(shape,) for shape in SHAPES.values()], [(types,) for types in TYPES.values()])
def test_it_agrees_with_the_reference(problem, types, target):
    problem, target = problem.replace(**types), WORDS if target is WIDE and _runs(WORDS) else target
    arrays = operands(problem, seed=3)
    for name in ("direct_folded", "dot_folded"):
        algorithm = named(name)
        if algorithm.supports(problem, target):
            plans = algorithm.candidates(problem, target)
            for _, plan in plans[:: max(1, len(plans) // 2)]:
                found = run_kernel(problem, target, *bound(problem, arrays), algorithm, plan)
                assert deviation(problem, found, reference(problem, *arrays)).allowed, (name, plan)
                assert np.isfinite(found.astype(float)).all()


def _runs(target):
    return target.features <= td.targets.detect_host().features


def test_it_is_the_default_for_few_channels():
    assert X86.default(PLANE.replace(data_spatial=(64, 64), output_spatial=(128, 128)), WIDE)[0].name == "direct_folded"
    few = td.Problem(1, 1, 16, 4, (64, 64), (4, 4), (4, 4), (1, 1), (0, 0), (256, 256), data_format="NXC")
    assert X86.default(few, WIDE)[0].name == "direct_folded"
    assert X86.default(few.replace(dtype="bfloat16"), WORDS)[0].name == "dot_folded"


@pytest.mark.parametrize(
    "options",
    [
        {"data_format": "NCX"},
        {"groups": 2},
        {"out_channels": 32},  # whole vectors already
        {"pads_begin": (0, 1)},
        {"output_spatial": (10, 17)},
        {"kernel": (2, 3)},
        {"dilations": (1, 2)},
        {"strides": (3, 2), "output_spatial": (14, 18)},  # rows without a tap
    ],
    ids=str,
)
def test_it_leaves_other_problems(options):
    assert named("direct_folded").supports(PLANE, WIDE)
    assert not named("direct_folded").supports(PLANE.replace(**options), WIDE)
