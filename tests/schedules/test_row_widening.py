"""Packed rows of 16 bits that become float32 by calls, on AVX2, and squares of results that become 16 bits again."""

import re
from string import Template

import ml_dtypes
import numpy as np
import pytest
import tvm
from support.kernels import X86, bound, call_kernel, compiled_kernel, turn_of
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as build

import tvm_deconv as td
from tvm_deconv.compiler.selection import named
from tvm_deconv.compute.phases import Geometry
from tvm_deconv.problem.reference import reference
from tvm_deconv.problem.testing import deviation, operands
from tvm_deconv.schedules.x86.stores import llvm_source
from tvm_deconv.targets import CPU_TARGETS

TARGET = CPU_TARGETS["x86-64-v3"]
TYPES = ("float16", "bfloat16")
BIAS = td.Epilogue(True)
PLAIN = td.Problem(2, 1, 24, 16, (12, 40), (4, 4), (2, 2), (1, 1), (1, 1), (24, 80), epilogue=BIAS)
#: Problems, the algorithm, and whether its blocks have parts of rows.
CASES = {
    "whole rows": (PLAIN, "winograd", False),
    "cut rows with pads": (PLAIN, "winograd", True),
    "planes": (PLAIN.replace(kernel=(2, 2), pads_begin=(0, 0)), "matrix", False),
    "waveform": (td.Problem(1, 2, 19, 8, (150,), (7,), (3,), (1,), (2,), (450,), epilogue=BIAS), "matrix", True),
    "volume": (
        td.Problem(1, 1, 16, 16, (3, 5, 24), (3,) * 3, (2,) * 3, (1,) * 3, (1,) * 3, (6, 10, 48)),
        "winograd",
        False,
    ),
    "any batch": (PLAIN.replace(dynamic=(0,)), "winograd", True),
    "rows of any length": (PLAIN.replace(dynamic=(2,)), "matrix", False),
    "halves": (
        td.Problem(1, 1, 128, 16, (8, 32), (2, 2), (2, 2), (1, 1), (0, 0), (16, 64), epilogue=BIAS),
        "strassen",
        False,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_rows_are_widened_by_calls(name):
    """The types take turns."""
    problem, algorithm, cut = CASES[name]
    problem = problem.replace(dtype=turn_of(TYPES, list(CASES).index(name)))
    width = Geometry.of(problem).axes[2].positions
    # A single row of a dynamic length is packed in parts, up to its end.
    fewest = 2 if problem.dynamic_axes else 1
    plans = (plan for _, plan in named(algorithm).candidates(problem, TARGET) if plan.tile.height >= fewest)
    kernel = X86.build(problem, TARGET, named(algorithm), next(p for p in plans if (p.tile.width < width) == cut))
    text = kernel.deconv.script()
    assert "tvm_deconv_widen" in text
    assert not re.search(r"data_rows\[.*\] = ", text)
    assert re.search(r"tvm_deconv_join_(f16|integers)_x8", text)  # of squares
    assert "tvm_deconv_convert" not in text
    arrays = operands(problem, 3)
    found = call_kernel(problem, kernel, compiled_kernel(kernel, TARGET), *bound(problem, arrays))
    assert deviation(problem, np.asarray(found), reference(problem, *arrays)).allowed


@pytest.mark.parametrize("number", range(2), ids=("float32", "AVX-512"))
def test_others_stay_loops(number):
    """The types take turns with AVX-512, which has masked loads of them."""
    problem, algorithm, _ = CASES["whole rows"]
    dtype, target = turn_of((("float32", TARGET), ("float16", CPU_TARGETS["x86-64-v4"])), number)
    kernel = X86.build(problem.replace(dtype=dtype), target, named(algorithm))
    assert "tvm_deconv_widen" not in kernel.deconv.script()


MOST, MARGIN = 60, 40


@pytest.fixture(scope="module", params=TYPES)
def widening(request):
    """The function ``widen(rows, stored, numbers)`` of a type, whose numbers are zeros, count and length."""
    stored, name = {"float16": ("half", "widen_f16.ll"), "bfloat16": ("i16", "widen_bf16.ll")}[request.param]
    source = llvm_source(name) + Template(llvm_source("widen_row.ll")).substitute(stored=stored)
    with IRBuilder() as builder, build.prim_func():
        build.func_name("widen")
        build.func_attr({"global_symbol": "widen"})
        size, zero = tirx.const(MOST + MARGIN, "int64"), tirx.const(0, "int64")
        rows = build.arg("rows", build.buffer([size], "float32", align=1, layout=None))
        data = build.arg("stored", build.buffer([size], "uint16", align=1, layout=None))
        numbers = build.arg("numbers", build.buffer([tirx.const(3, "int64")], "int32", align=1, layout=None))
        places = [tirx.address_of(tirx.BufferLoad(buffer, [zero])) for buffer in (rows, rows, data)]
        sizes = [numbers[tirx.const(i, "int64")] for i in range(3)]
        build.evaluate(tirx.call_extern("int32", "tvm_deconv_widen", *places, *sizes))
    func = builder.get()
    body = tirx.AttrStmt(tirx.const(0), "pragma_import_llvm", tvm.ir.StringImm(source), func.body)
    module = tvm.IRModule({"widen": func.with_body(body)})
    return request.param, tvm.compile(module, target=tvm.target.Target(TARGET.llvm))["widen"]


def test_a_row_of_any_length_with_any_zeros(widening):
    """Nothing behind the row is written, and all bits of 16 become those of float32."""
    dtype, widen = widening
    random = np.random.default_rng(7)
    numbers = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float16
    for length in range(1, MOST):
        for zeros in {0, 1, 3, 9, length // 2, length}:
            for count in {0, 1, 5, 8, length // 3, length - zeros}:
                if not 0 <= count <= length - zeros:
                    continue
                stored = random.integers(0, 2**16, MOST + MARGIN).astype(np.uint16)
                rows = np.full(MOST + MARGIN, 7, np.float32)
                widen(rows, stored, np.array([zeros, count, length], np.int32))
                expected = np.full(MOST + MARGIN, 7, np.float32)
                expected[:length] = 0
                expected[zeros : zeros + count] = stored[:count].view(numbers).astype(np.float32)
                np.testing.assert_array_equal(rows, expected)
