"""The implicit matrix product of a Hopper's tensor cores: wgmma, TMA, mbarriers and a warp that only loads.

float16 and bfloat16 with channels last, on ``sm_90a``. A warpgroup multiplies 64 rows by all columns of a tile.

1. Phases are convolutions of stride one, so the rows of a tile are a box of positions, and the terms of a tile of k,
   64 channels of one tap, are a box of the data: one TMA load gathers A, with zeros outside of the data. B is packed
   with k fastest, and a tile of it is one load too.
2. Lines of 128 bytes lie in shared memory with the swizzle of 128 bytes: TMA writes and wgmma reads it.
3. The last warp loads: it waits until a stage is `empty`, and its loads complete the stage's barrier `full`. Warps of
   products wait for that, and arrive at `empty` when the product that read the stage is done: one is under way.

If the caller's data do not begin at a multiple of 16 bytes, the lanes of that warp copy A by elements.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from tvm.ir import Expr
from tvm.script.ir_builder import tirx as build

from tvm_deconv.compute.gather import Index, Section, sections, unravel
from tvm_deconv.compute.storage import storage_dtype
from tvm_deconv.problem import Problem
from tvm_deconv.schedules.contract import Algorithm, Kernel
from tvm_deconv.schedules.cuda.blocks import Block, Box, boxes_of
from tvm_deconv.schedules.cuda.emit import Arguments, barrier, one_task, when
from tvm_deconv.schedules.cuda.predicates import multiplied_type, on_hopper
from tvm_deconv.schedules.cuda.products import choices, joined
from tvm_deconv.schedules.cuda.tiles import Cells, Form, Plan, cost, matrix_kernel
from tvm_deconv.schedules.cuda.warp import (
    arrive,
    copy_by_elements,
    encode_map,
    expect,
    init,
    load_box,
    publish,
    wait_phase,
    wgmma,
    wgmma_commit,
    wgmma_fence,
    wgmma_wait,
)
from tvm_deconv.targets import CudaTarget

_LINE = 64  # elements of a line of 128 bytes, which are the terms of a tile
_TERMS, _ROWS = 16, 64  # of one wgmma
_GROUP = 128  # threads of a warpgroup
_BARRIER = 8  # bytes
_MOST_SHARED, _BARRIERS = 227 << 10, 1 << 10
_COLUMNS = (256, 128, 64, 32)
_STAGES = (3, 4, 6)
#: In multiply-adds of CUDA cores: one of wgmma.
_MMA = 1 / 12


class _Warpgroups(Form):
    """A part is a warpgroup's."""

    algorithm = "cuda_wgmma"
    most_columns, most_stages = 64, 6

    def __init__(self, problem: Problem, plan: Plan) -> None:
        super().__init__(problem, plan, storage_dtype(problem.dtype), _GROUP * plan.parts + 32)
        self.holders = _GROUP * plan.parts

    @property
    def k_fastest(self) -> bool:
        return True

    @property
    def b_first(self) -> int:
        return self.plan.tile_m * _LINE

    @property
    def stage(self) -> int:
        return self.b_first + self.plan.tile_n * _LINE

    @property
    def sums(self) -> int:
        return _ROWS * self.plan.tile_n // _GROUP

    @property
    def operands(self) -> int:
        return 0

    @property
    def term(self) -> float:
        return self.plan.tile_m * self.plan.tile_n * _MMA

    @property
    def memory_elements(self) -> int:
        """Behind the stages are two barriers for each."""
        return self.plan.stages * self.stage + _BARRIERS // 2

    @property
    def scope(self) -> str:
        return "shared.dyn"

    @property
    def fits(self) -> bool:
        return self.plan.stages * self.stage * 2 + _BARRIERS <= _MOST_SHARED

    def box(self, section: Section) -> Box:
        """Return the box of positions of a tile's rows that leaves the fewest tiles, the last axis the longest."""
        powers = [2**power for power in range(self.plan.tile_m.bit_length())]
        boxes = (box for box in itertools.product(powers, repeat=4) if math.prod(box) == self.plan.tile_m)
        first, *_ = sorted((math.prod(boxes_of(section, box)), box) for box in boxes)
        return first[1]

    def packed_order(self, section: Section, number: Expr) -> Sequence[Index]:
        """See Form; terms are fastest."""
        shape = (section.geometry.groups, section.tiles_n, section.tiles_k, section.tile_n, _LINE)
        group, tile, tile_k, within, k = unravel(number, shape)
        return group, tile, tile_k * _LINE + k, within

    def begin(self, args: Arguments, aligned: bool) -> dict[Any, Expr]:
        """See Form; encode the map of the packed filter, and of the data for each box, if TMA can load these."""
        lines = args.packed_elements // _LINE
        packed = encode_map("packed", args.packed, self.dtype, (_LINE, lines), (_LINE, self.plan.tile_n))
        maps: dict[Any, Expr] = {"packed": packed}
        if aligned:
            geometry = args.geometry
            channels = geometry.groups * geometry.in_channels
            extents = (channels, *reversed(geometry.data), geometry.batch)
            for section in self.sections:
                box = self.box(section)
                if box not in maps:
                    name = "data_" + "_".join(map(str, box))
                    maps[box] = encode_map(name, args.data, self.dtype, extents, (_LINE, *reversed(box)))
        return maps

    def accumulate(
        self,
        args: Arguments,
        block: Block,
        begun: Any,
        memory: Expr,
        sums: Expr,
        registers: Sequence[Expr],  # noqa: ARG002
    ) -> None:
        """See Form; the last warp loads."""
        loads = _Loads(self, args, block, begun, memory)
        with when([block.thread == 0]), build.unroll(self.plan.stages) as stage:
            init(memory, self._full(stage), loads.arrivals)
            init(memory, self._empty(stage), self.holders // 32)
        barrier()
        with build.If(block.thread < self.holders):
            with build.Then():
                self._multiply(block, memory, sums)
            with build.Else():
                loads.emit()
        barrier()

    def _full(self, stage: Index) -> Index:
        """Return the place of the barrier of a stage that its loads complete."""
        return self.plan.stages * self.stage + stage * (_BARRIER // 2)

    def _empty(self, stage: Index) -> Index:
        """Return the place of the barrier of a stage that its readers complete."""
        return self._full(stage) + self.plan.stages * (_BARRIER // 2)

    def _multiply(self, block: Block, memory: Expr, sums: Expr) -> None:
        """Multiply tile by tile; a stage is given back when the product behind its own has begun."""
        stages, tiles = self.plan.stages, block.section.tiles_k
        first = block.thread // _GROUP * (_ROWS * _LINE)
        with build.serial(0, tiles) as step:
            base = step % stages * self.stage
            wait_phase(memory, self._full(step % stages), step // stages % 2)
            wgmma_fence()
            for k in range(0, _LINE, _TERMS):
                wgmma(self.problem.dtype, self.plan.tile_n, sums, memory, base + first + k, base + self.b_first + k)
            wgmma_commit()
            wgmma_wait(1)
            with when([step > 0, block.thread % 32 == 0]):
                arrive(memory, self._empty((step - 1) % stages))
        wgmma_wait(0)

    def cells(self, thread: Index) -> Iterator[Cells]:
        row = thread // 32 * 16 + thread % 32 // 4
        for j in range(self.plan.tile_n // 8):

            def cell(i: Index, part: Index, j: int = j) -> tuple[Index, Index, Index]:
                return row + 8 * i, thread % 4 * 2 + part, 4 * j + 2 * i + part

            yield 8 * j, (2, 2), cell

    def reads(self, thread: int) -> Iterator[tuple[Index, int]]:  # noqa: ARG002
        """Yield nothing: tensor cores read shared memory themselves, lines of the swizzle without conflicts."""
        return iter(())


class _Loads:
    """The work of the last warp: tiles of k to the stages, as these become empty."""

    def __init__(self, form: _Warpgroups, args: Arguments, block: Block, maps: dict[Any, Expr], memory: Expr) -> None:
        self.form, self.args, self.block, self.maps, self.memory = form, args, block, maps, memory
        self.section, self.box = block.section, form.box(block.section)
        self.by_elements = self.box not in maps

    @property
    def arrivals(self) -> int:
        """Threads that arrive at a barrier of a full stage."""
        return 32 if self.by_elements else 1

    def emit(self) -> None:
        """Load all tiles of k."""
        form, stages, lane = self.form, self.form.plan.stages, self.block.thread % 32
        lines = form.plan.tile_n + (0 if self.by_elements else form.plan.tile_m)
        with when([] if self.by_elements else [lane == 0]), build.serial(0, self.section.tiles_k) as tile:
            base, full = tile % stages * form.stage, form._full(tile % stages)
            wait_phase(self.memory, form._empty(tile % stages), (tile // stages + 1) % 2)
            if self.by_elements:
                self._copy_a(tile, base, lane)
                publish()
                with when([lane > 0]):
                    arrive(self.memory, full)
            with when([lane == 0] if self.by_elements else []):
                expect(self.memory, full, lines * _LINE * 2)
                if not self.by_elements:
                    load_box(self.memory, base, self.maps[self.box], full, self._corner(tile))
                load_box(self.memory, base + form.b_first, self.maps["packed"], full, (0, self._line(tile)))

    def _tap(self, tile: Index) -> tuple[Index, list[Index]]:
        """Return the first channel of a tile of k, and how far from the positions its tap reads."""
        section = self.section
        first, tap = section.tap(tile)
        taps = unravel(tap, section.taps)
        channel = self.block.group * section.geometry.in_channels + first
        return channel, [run.x0 - t * run.x_step for t, run in zip(taps, section.runs, strict=True)]

    def _corner(self, tile: Index) -> Sequence[Index]:
        """Return where the box of a tile of A begins in the data, the fastest axis first."""
        channel, shifts = self._tap(tile)
        image, *at = self.block.corner
        return channel, *reversed([y + shift for y, shift in zip(at, shifts, strict=True)]), image

    def _line(self, tile: Index) -> Index:
        """Return the first line of a tile of B in the packed filter."""
        section = self.section
        number = (self.block.group * section.tiles_n + self.block.tile_n) * section.tiles_k + tile
        return section.offset // _LINE + number * section.tile_n

    def _copy_a(self, tile: Index, base: Index, lane: Expr) -> None:
        """Copy a tile of A by elements, each lane some of its rows."""
        channel, shifts = self._tap(tile)
        data, geometry = self.args.flat_data(), self.section.geometry
        with build.serial(0, self.form.plan.tile_m // 32) as turn, build.serial(0, 8) as chunk:
            row = turn * 32 + lane
            image, position, inside = self.block.position(row, 0, self.form.plan.tile_m)
            x = [y + shift for y, shift in zip(position, shifts, strict=True)]
            for at, extent in zip(x, geometry.data, strict=True):
                inside = [*inside, at >= 0, at < extent]
            within = channel - self.block.group * geometry.in_channels + chunk * 8
            element = data[self.args.place(image, channel + chunk * 8, x)]
            to = base + row * _LINE + (chunk ^ (row % 8)) * 8  # the swizzle
            copy_by_elements(16, 2, self.memory, to, element, [*inside, within < geometry.in_channels])


def supports(problem: Problem, target: CudaTarget) -> bool:
    """The target is a Hopper's own, channels are last and fill lines, and TMA can tell a group's from others."""
    if not on_hopper(target) or problem.data_format != "NXC" or multiplied_type(problem) not in ("float16", "bfloat16"):
        return False
    lines = problem.batch > 0 and problem.in_channels % (8 if problem.groups == 1 else _LINE) == 0
    return lines and bool(_choices(problem))


def _choices(problem: Problem) -> list[int]:
    """Return the numbers of last axes along which phases are joined to few products of many columns and whole lines."""

    def suits(products: Sequence[Section]) -> bool:
        return (
            1 <= len(products) <= 8
            and all(section.alike for section in products)
            and max(section.n for section in products) >= _COLUMNS[-1]
        )

    return [axes for axes in choices(problem) if suits(sections(problem, _LINE, _COLUMNS[-1], joined(problem, axes)))]


def candidates(problem: Problem, target: CudaTarget) -> list[tuple[float, Plan]]:  # noqa: ARG001
    """Return the plans worth measuring with their costs, the cheapest first."""
    plans = (
        Plan(rows, columns, _LINE, _ROWS, columns, stages, joined=axes)
        for axes, rows, columns, stages in itertools.product(_choices(problem), (128, 64), _COLUMNS, _STAGES)
    )
    forms = [form for plan in plans if (form := _Warpgroups(problem, plan)).fits]
    return sorted(((cost(form), form.plan) for form in forms), key=lambda pair: pair[0])


def build_kernel(problem: Problem, target: CudaTarget, plan: Plan) -> Kernel:  # noqa: ARG001
    """Build the kernel of `problem`."""
    return matrix_kernel(_Warpgroups(problem, plan))


ALGORITHM = Algorithm(
    name=_Warpgroups.algorithm,
    supports=supports,
    is_default_for=lambda problem, target: False,  # noqa: ARG005  # until a device has measured it
    candidates=candidates,
    read=lambda knobs: Plan(**knobs),
    tasks=one_task,
    build=build_kernel,
)
