"""The products of `wgmma.py` with A gathered by threads, where TMA can not load from the data.

That is where neighbours in the data do not fill lines of 16 bytes: channels that are last and no multiple of 8 in
float16, or rows of 37 positions in float32. It supports TF32 and three products of it in any layout, and float16 and
bfloat16 with an even number of channels last; on ``sm_90a``.

1. Beside the warpgroups that multiply is one that loads. Its threads copy tiles of A by ``cp.async``, 4 to 16 bytes at
   a time, to where TMA would have them; one of them has TMA load tiles of B.
2. What taps read again is in the nearest cache, which loads by TMA pass by. Rows are positions in order, of any number.
3. A thread arrives at the barrier of a stage when its copies are there, all but those of the latest tiles.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import tirx as build

from tvm_deconv.compute.gather import Section
from tvm_deconv.compute.indexing import Index
from tvm_deconv.problem import Problem
from tvm_deconv.schedules.cuda.blocks import Block, Box, tiles_of
from tvm_deconv.schedules.cuda.emit import Arguments, when
from tvm_deconv.schedules.cuda.predicates import multiplied_type, on_hopper
from tvm_deconv.schedules.cuda.tiles import Gather, Gathered
from tvm_deconv.schedules.cuda.warp import arrive, commit, expect, publish, wait, wait_phase
from tvm_deconv.schedules.cuda.wgmma import (
    GROUP,
    LINE,
    MOST_POSITIONS,
    ClusterPlan,
    Loads,
    Warpgroups,
    cluster_algorithm,
    few_products,
    plans_of,
)
from tvm_deconv.targets import CudaTarget

_CLUSTERS = ((1, 1), (2, 1))
_COPIED = 11  # the cost of a byte that threads copy, in multiply-adds of CUDA cores
_EIGHT = 8  # threads that copy of one row; lines whose swizzles differ; and columns of an instruction, at least


class GatheredGroups(Warpgroups, Gathered):
    """A part is a warpgroup's; another warpgroup gathers A."""

    algorithm = "cuda_gathered"
    loading = GROUP
    widths = (256, 128, 64, 32, 16)
    takes_turns = False
    #: Beside it a nearest cache of 60 KiB is left for what taps read again.
    most_shared = 196 << 10

    @property
    def wide(self) -> int:
        """See Form; TMA, for which Warpgroups has 16 bytes, loads B alone."""
        return super(Warpgroups, self).wide

    @property
    def byte_cost(self) -> float:
        """See Form; threads copy A, as fast as they get to it."""
        return _COPIED

    @property
    def moved(self) -> float:
        """See Form; the nearest cache has what taps read again."""
        rest = len(self.roundings) * self.plan.tile_n / self.rows
        return self.plan.tile_m * self.fresh(self.sections[0]) + rest

    @property
    def ahead(self) -> int:
        """See Form; copies of a tile are waited for when those of later ones have begun."""
        return self.plan.stages - 2

    def box(self, section: Section) -> Box:
        """See Form; rows are in order."""
        return Box((1, 1, 1, self.plan.tile_m), (1, 1, 1, section.m))

    def positions(self, section: Section) -> int:  # noqa: ARG002
        """See Warpgroups."""
        return 0 if self.k_fastest else self.line

    def a(self, m: Index, k: Index) -> Index:
        """See Gathered."""
        return self.place(m, k, self.positions(self.sections[0]))

    def begin(self, args: Arguments, aligned: bool) -> Any:
        """See Form; a map of the packed filter alone."""
        return super().begin(args, False), aligned

    def loads(self, args: Arguments, block: Block, begun: Any, memory: Expr) -> Loads:
        """See Warpgroups."""
        maps, aligned = begun
        return _Copies(self, args, block, maps, memory, aligned)


class _Copies(Loads):
    """The work of the warpgroup that loads."""

    form: GatheredGroups

    def __init__(
        self,
        form: GatheredGroups,
        args: Arguments,
        block: Block,
        maps: dict[str, Expr],
        memory: Expr,
        aligned: bool,
    ) -> None:
        super().__init__(form, args, block, maps, memory)
        self.aligned = aligned

    @property
    def arrivals(self) -> int:
        """See Loads; one arrives for B, too."""
        return GROUP + 1

    def emit(self, turn: Index = 0) -> None:  # noqa: ARG002
        """See Loads; a stage is full when all copies but those of the latest tiles are waited for."""
        form, memory, stages = self.form, self.memory, self.form.plan.stages
        thread, tiles, ahead = self.block.thread - form.holders, form.tiles(self.section), form.ahead
        gather = Gather(self.args, self._rows(thread), form, memory, self.aligned, GROUP)
        with build.serial(0, tiles) as number:
            stage = number % stages
            wait_phase(memory, form.empty(stage), (number // stages + 1) % 2)
            with when([thread == 0]):
                expect(memory, form.full(stage), len(form.roundings) * form.plan.tile_n * LINE)
                self.load_b(self.first + number, stage * form.stage, form.full(stage))
            gather.start(self.first + number, stage * form.stage)
            commit()
            wait(ahead)
            with when([number >= ahead]):
                self._tell((number - ahead) % stages)
        wait(0)
        for number in range(max(0, tiles - ahead), tiles):
            self._tell(number % stages)

    def _tell(self, stage: Index) -> None:
        """Arrive at the barrier of a stage, whose copies are there for wgmma too, where that reads A itself."""
        if not self.form.single:
            publish()
        arrive(self.memory, self.form.full(stage))

    def _rows(self, thread: Expr) -> Block:
        """Return the block as its threads that load see it.

        Eight threads copy of one row. The rows of a warp are 4 and 2 apart, so that banks differ. Blocks beyond the
        last tile copy that.
        """
        block, form = self.block, self.form
        if form.k_fastest:
            row, warp = thread // _EIGHT % 4, thread // 32
            row = warp // 2 * 8 + warp % 2 + row % 2 * 4 + row // 2 * 2
            thread = row * _EIGHT + thread % _EIGHT
        tile = block.tile_m
        if block.exists:
            tile = tirx.min(tile, tiles_of(block.section, form.plan.tile_m, None) - 1)
        return replace(block, thread=thread, tile_m=tile)


def supports(problem: Problem, target: CudaTarget) -> bool:
    """The target is a Hopper's own, elements are copied by 4 bytes at least, and taps have whole lines."""
    kind, even = multiplied_type(problem), problem.data_format == "NXC" and problem.in_channels % 2 == 0
    copied = kind == "tf32" or (kind in ("float16", "bfloat16") and even)
    return copied and on_hopper(target) and problem.batch > 0 and bool(_choices(problem))


def _choices(problem: Problem) -> list[int]:
    """Return what `few_products` does of products with columns enough for an instruction."""
    return few_products(problem, _EIGHT, lambda section: section.m < MOST_POSITIONS)


def candidates(problem: Problem, alone: bool) -> list[tuple[float, ClusterPlan]]:
    """Return plans to measure with their costs, the cheapest first; if `alone`, of blocks that share no loads."""
    return plans_of(GatheredGroups, problem, _choices(problem), _CLUSTERS[: 1 if alone else None])


ALGORITHM = cluster_algorithm(GatheredGroups, supports, candidates)
