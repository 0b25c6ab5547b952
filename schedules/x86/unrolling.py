"""Several steps of a reduction in one body of its loop, for AVX2.

A register tile of 16 registers has 8 to 12 multiply-adds, and a step of its loop a third as many instructions that
count, compare, and branch. Threads that share a core share its instructions too. LLVM unrolls few of these loops, and
none with prefetches. docs/design.md has the measurements. Words, whose products are several instructions, gain nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV

from tvm_deconv.targets import CpuTarget

#: Most multiply-adds of a body.
_PRODUCTS = 48
#: The fewest iterations of such bodies: fewer LLVM unrolls wholly, with the broadcasts of all of them on the stack.
_ITERATIONS = 12


def unroll_steps(
    sch: Schedule, reduction: Sequence[LoopRV], target: CpuTarget, *, products: int, broadcasts: int
) -> list[LoopRV]:
    """Unroll the last steps of a `reduction` if `target` gains by it, and return the loops that are left.

    A step has so many `products` of vectors, and `broadcasts` of one of their factors. If each broadcast serves one
    product, nothing is unrolled: LLVM would load those of several steps as a vector, and take it apart.
    """
    left, extents = [*reduction], [int(sch.get(loop).extent) for loop in reduction]
    most = min(_PRODUCTS // products, math.prod(extents) // _ITERATIONS)
    if target.vector_registers > 16 or products == broadcasts:
        return left
    while most > 1:
        extent = extents.pop()
        part = _divisor(extent, most)
        if part < extent:
            if part > 1:
                left[-1], inner = sch.split(left[-1], [None, part])
                sch.unroll(inner)
            break
        sch.unroll(left.pop())
        most //= extent
    return left


def steps_at_once(extent: int, target: CpuTarget, *, products: int, broadcasts: int) -> int:
    """Return the steps of one body of a loop of `extent` steps, each as in `unroll_steps`."""
    if target.vector_registers > 16 or products == broadcasts:
        return 1
    return _divisor(extent, max(min(_PRODUCTS // products, extent // _ITERATIONS), 1))


def _divisor(extent: int, most: int) -> int:
    """Return the largest divisor of `extent` up to `most`."""
    return max(size for size in range(1, min(most, extent) + 1) if extent % size == 0)
