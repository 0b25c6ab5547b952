"""From a scheduled function to the function of an artifact."""

from __future__ import annotations

from collections.abc import Callable

from tvm.tirx import PrimFunc

from tvm_deconv.compute.extents import End
from tvm_deconv.schedules.x86.loop_marks import lower_loop_marks
from tvm_deconv.schedules.x86.stores import (
    import_functions,
    lower_conversions,
    lower_row_copies,
    lower_streaming_stores,
)


def lower(
    func: PrimFunc,
    end: End | None,
    *,
    streams: bool,
    functions: str = "",
    products: str = "",
    conversion: Callable[[bool], str] = lambda _: "",
) -> PrimFunc:
    """Return `func` as "deconv", with the marks of its schedule replaced.

    With an `end`, that of a dynamic axis, rows are copied by calls. If it `streams`, the output goes past the caches;
    `functions` are further ones in LLVM's language that it calls then. `products` are those that it calls always. Rows
    of the output are converted by what `conversion` returns, if anything: it is told whether they go past the caches.
    """
    usual = conversion(False)
    func = lower_loop_marks(lower_row_copies(func, usual) if end else func, end)
    stored = lower_streaming_stores(func, functions, conversion(True)) if streams else func
    if usual and not end and stored is func:
        stored = lower_conversions(func, usual)
    func = stored
    if products:  # last: what it wraps is not looked into
        func = import_functions(func, products)
    return func.with_attr("global_symbol", "deconv")
