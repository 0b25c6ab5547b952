"""The implicit matrix product on CUDA cores: the scheme of `tiles.py` with register tiles.

A lies in shared memory with m running fastest whatever the data's layout, so that both operands are read as vectors. A
thread multiplies ``part_m x part_n`` sums, which are halves or single vectors apart, so that the threads of a warp read
neighbouring vectors.

Registers for 8x8 sums: 64, 16 for the operands, the rest for addresses: at most 128, which leaves two blocks of 256
threads a multiprocessor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from tvm.ir import Expr
from tvm.script.ir_builder import tirx as build

from tvm_deconv.compute.indexing import Index
from tvm_deconv.problem import Problem
from tvm_deconv.schedules.cuda.blocks import Cells
from tvm_deconv.schedules.cuda.emit import local
from tvm_deconv.schedules.cuda.predicates import few_sections, is_for_cuda_cores
from tvm_deconv.schedules.cuda.products import choices
from tvm_deconv.schedules.cuda.tiles import DIVISIONS, Copied, Plan, matrix_algorithm

#: Plans by falling width: a product takes the widest that its columns fill well.
PLANS = (
    Plan(128, 128, 8, 8, 8),
    Plan(128, 64, 16, 8, 4),
    Plan(64, 64, 16, 4, 4),
    Plan(128, 32, 16, 4, 4),
    Plan(128, 16, 16, 4, 4),
    Plan(256, 8, 16, 4, 4),
    Plan(256, 4, 16, 2, 4),
)
#: The cost of gathering one element of A, for its address and borders, in multiply-adds.
_GATHER = 10
#: Threads of a warp, and how many of them lie in one column of its parts: both operands are few vectors for a warp.
_LANES, _DOWN = 32, 4
_DOUBLE_SUMS = 16  # of float64, each two registers


class Threads(Copied):
    """A part is a thread's."""

    algorithm = "cuda_product"
    most_columns, most_stages = 128, 3

    def __init__(self, problem: Problem, plan: Plan) -> None:
        super().__init__(problem, plan, problem.accumulate_dtype, plan.parts)
        self.pitch = plan.tile_m + self.lanes  # between two k of A: padded, since they may be written across
        self.parts_m, self.parts_n = max(1, plan.part_m // self.lanes), max(1, plan.part_n // self.lanes)

    @property
    def k_fastest(self) -> bool:
        """See Form."""
        return False

    @property
    def b_first(self) -> int:
        """See Copied."""
        return self.plan.tile_k * self.pitch

    @property
    def stage(self) -> int:
        """See Form."""
        return self.b_first + self.plan.tile_k * self.plan.tile_n

    @property
    def sums(self) -> int:
        """See Form."""
        return self.plan.part_m * self.plan.part_n

    @property
    def operands(self) -> int:
        """See Form."""
        return (self.plan.part_m + self.plan.part_n) * 4 // self.lanes

    @property
    def term(self) -> float:
        """Multiply-adds, padding included; as many again as operands are read; the gathering, shared by columns."""
        plan = self.plan
        reads = 1 / plan.part_m + 1 / plan.part_n
        gather = DIVISIONS if self.divides else _GATHER
        return plan.tile_m * (plan.tile_n * (1 + reads) + gather) + plan.tile_n

    def a(self, m: Index, k: Index) -> Index:
        """See Copied."""
        return k * self.pitch + m

    def b(self, k: Index, n: Index, part: int = 0) -> Index:  # noqa: ARG002
        """See Copied."""
        return self.b_first + k * self.plan.tile_n + n

    def allocate(self) -> tuple[Expr, ...]:
        """See Form."""
        return local(self.plan.part_m, self.dtype), local(self.plan.part_n, self.dtype)

    def _at(self, thread: Index) -> tuple[Index, Index]:
        """Return the thread's row and column of parts: a warp has 4 by 8 of them, or as many as there are."""
        down, across = self.plan.tile_m // self.plan.part_m, self.plan.tile_n // self.plan.part_n
        columns = min(_LANES // _DOWN, across)
        rows = _LANES // columns
        warp, lane = thread // _LANES, thread % _LANES
        warps = across // columns
        assert down % rows == 0
        return warp // warps * rows + lane % rows, warp % warps * columns + lane // rows

    def _row(self, thread: Index, part: Index) -> Index:
        """Return the first row of one of a thread's vectors."""
        plan = self.plan
        return part * (plan.tile_m // self.parts_m) + self._at(thread)[0] * (plan.part_m // self.parts_m)

    def _column(self, thread: Index, part: int) -> Index:
        """Return the first column of one of a thread's vectors."""
        plan = self.plan
        return part * (plan.tile_n // self.parts_n) + self._at(thread)[1] * (plan.part_n // self.parts_n)

    def multiply(
        self,
        thread: Expr,
        step: Expr,  # noqa: ARG002
        memory: Expr,
        base: Expr,
        sums: Expr,
        registers: Sequence[Expr],
    ) -> None:
        """See Copied."""
        plan, (a_read, b_read) = self.plan, registers
        with build.unroll(plan.tile_k) as k:
            width = plan.part_m // self.parts_m
            for part in range(self.parts_m):
                with build.vectorized(width) as lane:
                    at = base + self.a(self._row(thread, part) + lane, k)
                    build.buffer_store(a_read, memory[at], [part * width + lane])
            width = plan.part_n // self.parts_n
            for part in range(self.parts_n):
                with build.vectorized(width) as lane:
                    at = base + self.b(k, self._column(thread, part) + lane)
                    build.buffer_store(b_read, memory[at], [part * width + lane])
            with build.unroll(plan.part_m) as i, build.unroll(plan.part_n) as j:
                at = i * plan.part_n + j
                build.buffer_store(sums, sums[at] + a_read[i] * b_read[j], [at])

    def reads(self, thread: int) -> Iterator[tuple[Index, int]]:
        """See Form."""
        size = 8 if self.problem.accumulate_dtype == "float64" else 4
        for part in range(self.parts_m):
            yield self.a(self._row(thread, part), 0), size * self.plan.part_m // self.parts_m
        for part in range(self.parts_n):
            yield self.b(0, self._column(thread, part)), size * self.plan.part_n // self.parts_n

    def cells(self, thread: Index) -> Iterator[Cells]:
        """See Form."""
        plan = self.plan
        high, width = plan.part_m // self.parts_m, plan.part_n // self.parts_n
        for part in range(self.parts_n):

            def cell(i: Index, j: Index, first: int = part * width) -> tuple[Index, Index, Index]:
                return self._row(thread, i // high) + i % high, j, i * plan.part_n + first + j

            yield self._column(thread, part), (plan.part_m, width), cell


def _shapes(problem: Problem) -> list[Plan]:
    if problem.accumulate_dtype == "float64":
        usual = [replace(plan, tile_k=8) for plan in PLANS if plan.part_m * plan.part_n <= _DOUBLE_SUMS]
    else:
        halves = [replace(plan, tile_k=8) for plan in PLANS[1:]]
        usual = [*PLANS, *(halves if problem.in_channels % 16 else [])]
    return [replace(plan, joined=axes) for axes in choices(problem) for plan in usual]


ALGORITHM = matrix_algorithm(Threads.algorithm, Threads, _shapes, few_sections, is_for_cuda_cores)
