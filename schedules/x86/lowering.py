"""From a scheduled function to the function of an artifact."""

from __future__ import annotations

from tvm.tirx import PrimFunc

from tvm_deconv.compute.extents import End
from tvm_deconv.schedules.x86.conversions import AS_THEY_ARE, RowConversions
from tvm_deconv.schedules.x86.loop_marks import lower_loop_marks
from tvm_deconv.schedules.x86.prefetching import lower_prefetches
from tvm_deconv.schedules.x86.stores import (
    import_functions,
    lower_conversions,
    lower_cut_rows,
    lower_row_copies,
    lower_streaming_stores,
)
from tvm_deconv.targets import CpuTarget


def lower(
    func: PrimFunc,
    end: End | None,
    target: CpuTarget,
    *,
    streams: bool,
    functions: str = "",
    products: str = "",
    conversions: RowConversions = AS_THEY_ARE,
) -> PrimFunc:
    """Return `func` for `target` as "deconv", with the marks of its schedule replaced.

    With an `end`, that of a dynamic axis, rows are copied by calls. If it `streams`, the output goes past the caches;
    `functions` are further ones in LLVM IR that it calls then. `products` are those that it calls always. Rows
    of the output are converted by `conversions`.
    """
    func = lower_loop_marks(lower_row_copies(func, conversions.usual) if end else func, end)
    stored = lower_streaming_stores(func, functions, conversions.past) if streams else func
    if stored is func and not end:
        if conversions.usual:
            stored = lower_conversions(func, conversions.usual)
        elif target.vector_bits < 512:
            stored = lower_cut_rows(func)
    func = stored
    if products:  # last: what it wraps is not looked into
        func = import_functions(func, products)
    return lower_prefetches(func, target).with_attr("global_symbol", "deconv")
