"""Rows of packed data of float16 and bfloat16 that become float32, with zeros around them, by a call each.

AVX2 has no masked loads of 16 bits, so that LLVM makes no vectors of a loop that tests each element, as it does of
float32. Element by element, packing took a fourth of the time of a layer of kernel = stride with 256 channels.

Those of the direct definition stay loops: rows that end where the block says have parts without conditions
(`row_ends`), others no conditions, and calls took 3 to 10 % longer in depthwise layers.
"""

from __future__ import annotations

from functools import partial
from string import Template

from tvm import tirx
from tvm.ir import Expr
from tvm.s_tir import SBlock, SBlockRealize
from tvm.sym import Analyzer
from tvm.tirx import BufferLoad, Evaluate, For, ForKind, PrimFunc, Stmt
from tvm_ffi import structural_equal

from tvm_deconv.compute.storage import storage_dtype, to_accumulator
from tvm_deconv.problem import Problem
from tvm_deconv.schedules.x86.row_ends import cases
from tvm_deconv.schedules.x86.statements import outside_of, rewritten_loops
from tvm_deconv.schedules.x86.stores import Row, Span, all_of, llvm_source
from tvm_deconv.targets import CpuTarget

#: The function of `widen_row.ll`.
WIDEN = "tvm_deconv_widen"
#: The stage that packs rows.
_STAGE = "data_rows"
#: By the type of data: LLVM's name of it, and the file of what makes float32 of it.
_STORED = {"float16": ("half", "widen_f16.ll"), "bfloat16": ("i16", "widen_bf16.ll")}
#: What is around the data, and where a row begins.
_ZERO, _START = tirx.const(0, "float32"), tirx.const(0, "int64")
#: The shortest rows, in elements, that a call fills: LLVM unrolls shorter ones, which takes less than a call.
_SHORTEST = 16


def widen_rows(func: PrimFunc, problem: Problem, target: CpuTarget) -> tuple[PrimFunc, str]:
    """Return the scheduled `func` with rows of packed data of 16 bits as calls, and the LLVM IR that it calls.

    The latter is empty if there are none, or if the target has masked loads of 16 bits.
    """
    if problem.dtype not in _STORED or target.vector_bits >= 512:
        return func, ""
    calls: list[Stmt] = []
    func = rewritten_loops(func, _STAGE, ForKind.SERIAL, partial(_widened, problem.dtype, calls))
    return func, row_widening(problem.dtype) if calls else ""


def row_widening(dtype: str) -> str:
    """Return the LLVM IR of the function `WIDEN`, which makes rows of float32 of those of `dtype`."""
    stored, name = _STORED[dtype]
    return llvm_source(name) + Template(llvm_source("widen_row.ll")).substitute(stored=stored)


def _widened(dtype: str, calls: list[Stmt], loop: For) -> Stmt | None:
    """Return the row that `loop` packs as a call, which joins `calls`, or None: it is short, or something else."""
    realize, row = loop.body, Row.of([loop])
    block = realize.block
    store, reads = block.body, block.reads
    if row.length < _SHORTEST or loop.annotations or len(reads) != 1 or reads[0].source.dtype != storage_dtype(dtype):
        return None
    read = BufferLoad(reads[0].source, [part.min for part in reads[0].region])
    value, condition, other = cases(store.value)
    if not (structural_equal(value, to_accumulator(read, dtype, "float32")) and structural_equal(other, _ZERO)):
        return None

    def outside(values: list[Expr]) -> list[Expr]:
        return [*map(row.ranges.simplify, outside_of(realize, values))]

    written, element = outside([*store.indices]), outside([*read.indices])
    if not (row.is_contiguous(store.buffer, written) and row.is_contiguous(read.source, element)):
        return None
    target, source = Span.of(store.buffer, written, row), Span.of(read.source, element, row)
    domains = Analyzer()
    for variable in block.iter_vars:
        domains.bind(variable.var, variable.dom)
    data, whole = (row.limits(*outside([limit])) for limit in (domains.simplify(condition), realize.predicate))
    if data is None or whole is None or any(target.reach[:-1]):
        return None
    conditions, begin, end = data
    exists, _, length = whole
    if not structural_equal(begin, _START):
        begin = tirx.min(begin, length)
    count = tirx.min(end, length) - begin
    count = count if row.ranges.can_prove(count >= 0) else tirx.max(count, 0)
    if conditions:
        count = tirx.Select(tirx.all(*conditions), count, _START)
    sizes = [tirx.Cast("int32", row.ranges.simplify(size)) for size in (begin, count, length)]
    # The call names the last element too: TVM shrinks a stage to the elements that it sees used.
    addresses = [target.address(), target.address(length - 1), source.address(begin)]
    call = Evaluate(tirx.call_extern("int32", WIDEN, *addresses, *sizes))
    calls.append(call)
    values = [row.first.simplify(value) for value in realize.iter_values]
    regions = [source.region], [target.region]
    inner = SBlock(block.iter_vars, *regions, block.name_hint, call, annotations=block.annotations)
    return SBlockRealize(values, all_of(exists), inner)
