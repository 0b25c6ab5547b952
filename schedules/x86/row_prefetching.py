"""Prefetches of data in `N C *X` whose rows are cut into blocks: each row asks for that of the next channel.

The processor's own prefetching goes on behind the end of a block's row, where nothing is wanted, and begins anew with
each channel. Where the data come from memory, that was a fifth of the time (docs/design.md).
"""

from __future__ import annotations

import math

import numpy as np
from tvm import tirx
from tvm.tirx import BufferLoad, Evaluate, For, ForKind, PrimFunc, SeqStmt, Stmt

from tvm_deconv.problem import Problem, element_bytes
from tvm_deconv.schedules.x86.costs import LAST_CACHE
from tvm_deconv.schedules.x86.statements import outside_of, rewritten_loops
from tvm_deconv.schedules.x86.stores import Row


def comes_from_memory(problem: Problem) -> bool:
    """Tell whether no cache keeps the data from call to call, at the extents that plans are made for."""
    return data_bytes(problem) > LAST_CACHE


def data_bytes(problem: Problem) -> int:
    """Return the bytes of the data, at the extents that plans are made for."""
    return math.prod(problem.data_shape) * element_bytes(problem.dtype)


def fetch_rows_ahead(func: PrimFunc, length: int) -> PrimFunc:
    """Return the scheduled `func` with prefetches before rows of `length` of ``data_pack``, by ``fetch_row.ll``."""
    data = func.params[0]

    def fetched(loop: For) -> Stmt | None:
        row, (read,) = Row.of([loop]), loop.body.block.reads
        if row.length < length:  # behind a block's rows
            return None
        image, channel, *position = map(row.first.simplify, outside_of(loop.body, [part.min for part in read.region]))
        following = tirx.address_of(BufferLoad(data, [image, channel + 1, *position]))
        size = row.length * np.dtype(data.dtype).itemsize
        fetch = tirx.call_extern("int32", "tvm_deconv_fetch_row", following, tirx.const(size, "int32"))
        return SeqStmt([Evaluate(fetch), loop])

    return rewritten_loops(func, "data_pack", ForKind.SERIAL, fetched)
