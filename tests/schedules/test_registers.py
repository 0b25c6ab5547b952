"""Accumulators of register tiles lie in registers, also where LLVM keeps them in memory by its own limits."""

import math
import re

import pytest
from support.kernels import code_of, innermost_loops

import tvm_deconv as td
from tvm_deconv.compiler.selection import named
from tvm_deconv.targets import CPU_TARGETS

QUANTIZED = td.Quantization("int8", "uint8")
#: Register tiles of more than a kilobyte: TVM has smaller ones on the stack, from where LLVM always takes them.
DEPTHWISE = (1, 32, 1, 1, (160,), (7,), (2,), (1,), (2,), (321,))
CHANNELS = (1, 1, 16, 60, (400,), (20,), (8,), (1,), (6,), (3200,))
ROWS = (2, 1, 12, 60, (2, 4, 4), (3, 3, 3), (2, 2, 2), (1, 1, 1), (0, 0, 0), (6, 10, 10))


@pytest.mark.parametrize(
    ("shape", "target", "options"),
    [
        (DEPTHWISE, "x86-64-v4-vnni", {"dtype": "uint8", "quantization": QUANTIZED}),
        (CHANNELS, "x86-64-v4-bf16", {"dtype": "bfloat16"}),
    ],
    ids=["integers", "bfloat16"],
)
def test_no_array_of_accumulators_is_cleared_in_memory(shape, target, options):
    problem = td.Problem(*shape, data_format="NXC", **options)
    assert "memset" not in code_of(problem, CPU_TARGETS[target])


def test_no_product_is_added_to_memory():
    """Loops of products store at most what registers spill."""
    code = code_of(td.Problem(*ROWS), CPU_TARGETS["x86-64-v4"])
    bodies = [body for body in innermost_loops(code) if "vfmadd" in body]
    assert len(bodies) >= 4
    for body in bodies:
        assert 8 * len(re.findall(r"\tvmovup\w\t%zmm\d+, ", body)) <= body.count("vfmadd")


@pytest.mark.parametrize("taps", [(1, 2, 2), (2, 2, 2)])
def test_no_constant_takes_the_register_of_an_accumulator(taps):
    """Pairs of integers on AVX2 need all sixteen: LLVM would hold what the epilogue reads in some of them."""
    outputs = tuple(map(math.prod, zip((10, 8, 10), taps, strict=True)))
    shape = (1, 1, 256, 128, (10, 8, 10), taps, taps, (1, 1, 1), (0, 0, 0), outputs)
    problem = td.Problem(*shape, dtype="uint8", quantization=QUANTIZED, epilogue=td.Epilogue(True))
    bodies = [
        body
        for name in ("dot", "dot_strassen")
        for body in innermost_loops(code_of(problem, CPU_TARGETS["x86-64-v3"], named(name)))
        if body.count("vpmaddwd") >= 10
    ]
    assert len(bodies) >= 2
    assert not any("rsp" in line for body in bodies for line in body.splitlines() if "ymm" in line)
