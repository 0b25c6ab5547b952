"""Prefetches of data that a block packs, if the caches do not keep them. docs/design.md has the measurements.

Rows of `N C *X` ask for those of a later channel: the processor's own prefetching goes on behind the end of a row,
where nothing may be wanted, and begins anew with each channel. Positions of `N *X C` ask for later ones: the processor
looks ahead by a few vectors, and by fewer past the arithmetic of indices where vectors of channels become rows.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from tvm import tirx
from tvm.ir import Expr
from tvm.tirx import Buffer, BufferLoad, Evaluate, For, ForKind, PrimFunc, SeqStmt, Stmt

from tvm_deconv.problem import Problem, element_bytes
from tvm_deconv.schedules.x86.costs import LAST_CACHE
from tvm_deconv.schedules.x86.statements import outside_of, rewritten_loops
from tvm_deconv.schedules.x86.stores import Row, llvm_source

#: The function of `fetch_row.ll`.
FETCH = "tvm_deconv_fetch_row"
#: Bytes of data that the caches keep, next to all else, and bytes from what is packed to what is asked for.
_CACHED, _AHEAD = {"NCX": 8 << 20, "NXC": 4 << 20}, 8192


def comes_from_memory(problem: Problem) -> bool:
    """Tell whether no cache keeps the data from call to call, at the extents that plans are made for."""
    return data_bytes(problem) > LAST_CACHE


def data_bytes(problem: Problem) -> int:
    """Return the bytes of the data, at the extents that plans are made for."""
    return math.prod(problem.data_shape) * element_bytes(problem.dtype)


def fetch_ahead(func: PrimFunc, problem: Problem, rows: int = 1, length: int = 1) -> tuple[PrimFunc, str]:
    """Return the scheduled `func` with prefetches before the data are packed, and the LLVM IR that it calls.

    In `N C *X` these are before rows of `length` elements at least. So many `rows` are packed between two channels.
    The LLVM IR is empty if the caches keep the data, or rows of `N C *X` differ between calls.
    """
    last = problem.data_format == "NXC"
    if data_bytes(problem) <= _CACHED[problem.data_format] or (problem.dynamic_axes and not last):
        return func, ""
    if last:
        func = _before_loops(func, (ForKind.VECTORIZED, ForKind.SERIAL), _later_position)
    else:
        func = _before_loops(func, (ForKind.SERIAL,), partial(_later_channel, rows, length))
    return func, llvm_source("fetch_row.ll")


def _before_loops(
    func: PrimFunc, kinds: Sequence[ForKind], later: Callable[[Buffer, Row, Sequence[Expr]], Sequence[Expr] | None]
) -> PrimFunc:
    """Return `func` with prefetches before the innermost loops that read the data.

    `later` returns the first element that is asked for, of the data, a loop and where it reads them, or None.
    """
    data = func.params[0]

    def fetched(loop: For) -> Stmt | None:
        row, reads = Row.of([loop]), loop.body.block.reads
        if not any(read.source.same_as(data) for read in reads):
            return None
        element = later(data, row, outside_of(loop.body, [part.min for part in reads[0].region]))
        if element is None:
            return None
        size = tirx.const(row.length * np.dtype(data.dtype).itemsize, "int32")
        fetch = tirx.call_extern("int32", FETCH, tirx.address_of(BufferLoad(data, [*element])), size)
        return SeqStmt([Evaluate(fetch), loop])

    for stage, kind in itertools.product(("data_rows", "data_pack"), kinds):
        func = rewritten_loops(func, stage, kind, fetched)
    return func


def _later_position(data: Buffer, row: Row, element: Sequence[Expr]) -> Sequence[Expr] | None:
    """Return the same channel of a later position, or None if the `row` is not one of channels."""
    if not row.is_contiguous(data, element):
        return None
    *outer, position, channel = map(row.first.simplify, element)
    return *outer, position + _ahead(data, int(data.shape[-1])), channel


def _later_channel(rows: int, length: int, data: Buffer, row: Row, element: Sequence[Expr]) -> Sequence[Expr] | None:
    """Return the same position of a later channel, or None of a `row` behind a block's rows, which are longer."""
    if row.length < length:
        return None
    image, channel, *position = map(row.first.simplify, element)
    return image, channel + _ahead(data, rows * row.length), *position


def _ahead(data: Buffer, elements: int) -> int:
    """Return the steps of so many `elements` from what is packed to what is asked for."""
    return max(1, _AHEAD // (elements * int(np.dtype(data.dtype).itemsize)))
