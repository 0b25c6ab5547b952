"""Buffers whose rows do not compete for one set of a cache."""

from __future__ import annotations

import math

import numpy as np
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import SBlockRV

from tvm_deconv.schedules.x86.stores import LINE


def keep_apart(sch: Schedule, block: SBlockRV, axis: int, least_lines: int = 0) -> None:
    """Put steps along `axis` of what `block` writes an odd number of cache lines apart, unless they are short.

    So many steps as a cache has sets lie in all of them. At a multiple of a page they would share one. Steps of fewer
    than `least_lines` stay as they are.
    """
    written = sch.get(block).writes[0].source
    line = LINE // np.dtype(str(written.dtype)).itemsize
    if math.prod(map(int, written.shape[axis + 1 :])) >= least_lines * line:
        sch.storage_align(block, 0, axis, 2 * line, line)
