"""Buffers whose rows do not compete for one set of a cache."""

from __future__ import annotations

import numpy as np
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import SBlockRV

from tvm_deconv.schedules.x86.stores import LINE


def keep_apart(sch: Schedule, block: SBlockRV, axis: int) -> None:
    """Put steps along `axis` of what `block` writes an odd number of cache lines apart.

    So many steps as a cache has sets lie in all of them. At a multiple of a page they would share one.
    """
    line = line_elements(sch, block)
    sch.storage_align(block, 0, axis, 2 * line, line)


def line_elements(sch: Schedule, block: SBlockRV) -> int:
    """Return the elements in a cache line of what `block` writes."""
    return LINE // np.dtype(str(sch.get(block).writes[0].source.dtype)).itemsize
