"""Rows that are converted while they are copied: any length, address and number, as usual and past the caches."""

import re

import ml_dtypes
import numpy as np
import pytest
import tvm
from support.kernels import X86, all_targets
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as build

import tvm_deconv as td
from tvm_deconv.schedules.x86 import stores
from tvm_deconv.schedules.x86.algorithms import direct_definition, matrix_definition
from tvm_deconv.schedules.x86.conversions import row_conversion
from tvm_deconv.targets import CPU_TARGETS

MOST, MARGIN = 300, 70
SHAPE = (1, 1, 9, 20, (40, 64), (4, 4), (2, 2), (1, 1), (1, 1), (80, 128))
#: The type of the output, and options of a problem that has it.
TYPES = {
    "bfloat16": {"dtype": "bfloat16"},
    "float16": {"dtype": "float16"},
    "uint8": {"dtype": "uint8", "quantization": td.Quantization("int8", "uint8")},
    "int8": {"dtype": "int8", "quantization": td.Quantization("int8", "int8")},
}
streams = pytest.mark.parametrize("streams", [False, True], ids=["as usual", "past the caches"])
types = pytest.mark.parametrize("dtype", TYPES)


def converter(problem, target, streams):
    """The function ``convert(sums, stored, count)``."""
    source = stores.llvm_source("streaming_copy.ll") if streams else ""
    source += row_conversion(problem, target, streams)
    storage = "uint16" if problem.output_dtype == "bfloat16" else problem.output_dtype
    with IRBuilder() as builder, build.prim_func():
        build.func_name("convert")
        build.func_attr({"global_symbol": "convert"})
        size = tirx.const(MOST, "int64")
        sums = build.arg("sums", build.buffer([size], problem.accumulate_dtype, align=1, layout=None))
        out = build.arg("out", build.buffer([size], storage, align=1, layout=None))
        count = build.arg("count", build.buffer([tirx.const(1, "int64")], "int32", align=1, layout=None))
        zero = tirx.const(0, "int64")
        places = [tirx.address_of(tirx.BufferLoad(buffer, [zero])) for buffer in (out, sums)]
        build.evaluate(tirx.call_extern("int32", "tvm_deconv_convert", *places, count[zero]))
    func = builder.get()
    body = tirx.AttrStmt(tirx.const(0), "pragma_import_llvm", tvm.ir.StringImm(source), func.body)
    module = tvm.IRModule({"convert": func.with_body(body)})
    return tvm.compile(module, target=tvm.target.Target(target.llvm))["convert"]


def sums_of(dtype, random):
    """Sums as kernels finish them: within the output's range, for integers; any bits for floating point."""
    if dtype in ("uint8", "int8"):
        limits = np.iinfo(dtype)
        return random.integers(limits.min, limits.max + 1, MOST, np.int32)
    bits = random.integers(0, 2**32, MOST, np.uint32)
    kind = random.integers(0, 4, MOST)
    bits[kind == 0] &= 0x807FFFFF  # denormal
    bits[kind == 1] = bits[kind == 1] & 0xFFFF0000 | 0x8000  # halfway
    bits[random.integers(0, MOST, 3)] = 0x7FFFFFFF, 0xFF800001, 0x7F800000  # NaN and infinity
    if dtype == "bfloat16":  # whose sums have quiet NaN of that type alone
        is_nan = np.isnan(bits.view(np.float32))
        bits[is_nan] = bits[is_nan] & 0xFFFF0000 | 0x400000
    return bits.view(np.float32)


@all_targets
@types
@streams
def test_rows_of_any_length_and_address(dtype, streams, target):
    problem = td.Problem(*SHAPE, **TYPES[dtype], epilogue=td.Epilogue(True))
    convert, random = converter(problem, target, streams), np.random.default_rng(7)
    stored = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    for count in [*range(70), *random.integers(70, MOST, 30), MOST]:
        offset, sums = int(random.integers(0, MARGIN)), sums_of(dtype, random)
        whole = np.full(MOST + 2 * MARGIN, 77, stored)
        convert(sums, bits(whole[offset : offset + MOST]), np.array([count], np.int32))
        with np.errstate(over="ignore", invalid="ignore"):
            wanted = sums.astype(stored)[:count]
        found = whole[offset : offset + count]
        is_nan = np.isnan(wanted.astype(np.float64))
        np.testing.assert_array_equal(np.isnan(found.astype(np.float64)), is_nan)
        np.testing.assert_array_equal(found[~is_nan].view(np.uint8), wanted[~is_nan].view(np.uint8))
        assert (whole[:offset] == 77).all()
        assert (whole[offset + count :] == 77).all()


def bits(array):
    return array.view(np.uint16) if array.dtype.name == "bfloat16" else array


@types
@pytest.mark.parametrize("data_format", ["NCX", "NXC"])
def test_kernels_convert_their_rows(dtype, data_format, monkeypatch):
    """Whatever they multiply by, unless they are narrow before; past the caches where the output is large."""
    target = CPU_TARGETS["x86-64-v4-bf16"]
    problem = td.Problem(*SHAPE, **TYPES[dtype], data_format=data_format)
    names = ("dot", "direct_rows", "matrix")
    algorithms = [a for a in X86.algorithms if a.name in names and a.supports(problem, target)]
    defaults = [X86.default(problem, target, [algorithm.name]) for algorithm in algorithms]
    assert len(defaults) >= 2
    monkeypatch.setattr(stores, "SHORTEST_CONVERTED", 0)
    for large in (False, True):
        for definition in (direct_definition, matrix_definition):
            monkeypatch.setattr(definition, "outgrows_caches", lambda _, large=large: large)
        for algorithm, plan in defaults:
            text = X86.build(problem, target, algorithm, plan).deconv.script(show_meta=False)
            past = re.search(r"tvm_deconv_(convert|stream)\b", text)
            assert past or "T.vectorized" in text, algorithm.name
            assert ("tvm_deconv_fence" in text) == (large and past is not None), algorithm.name


def test_outputs_as_wide_as_their_sums_need_none():
    target = CPU_TARGETS["x86-64-v3"]
    assert not row_conversion(td.Problem(*SHAPE), target, True)
    assert not row_conversion(td.Problem(*SHAPE, dtype="int8"), target, True)
