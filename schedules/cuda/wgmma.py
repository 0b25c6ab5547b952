"""The implicit matrix product of a Hopper's tensor cores: wgmma, TMA, mbarriers and a warp that only loads.

float16, bfloat16, TF32 and three products of it, on ``sm_90a``. A warpgroup multiplies 64 rows by all columns of a
tile.

1. Phases are convolutions of stride one, so the rows of a tile are a box of positions. The terms of a tile of k are 64
   channels of one tap, 32 of float32. So one TMA load of a box of the data gathers A, with zeros outside of the data.
   B is packed with k fastest, and a tile of it is one load too.
2. Lines of 128 bytes lie in shared memory with the swizzle of 128 bytes: TMA writes and wgmma reads it. With channels
   second lines of A are positions, 8 to 64 neighbours on the last axis, of 64 channels, with the swizzle of as many
   bytes; wgmma transposes them. A of TF32 is read from there and rounded, or split into two parts, and wgmma takes it
   from registers. Tensor cores round sums towards zero, so that those of a tile of three products are added to others.
3. The last warp loads: it waits until a stage is `empty`, and its loads complete the stage's barrier `full`. Warps of
   products wait for that, and arrive at `empty` when the product that read the stage is done: one is under way.

4. A block may have several tiles of rows by turns: it loads the next while sums of the last go to the output. Three
   more warps may store these, which have shared memory of their own, so that the others multiply meanwhile.
5. Blocks that follow each other may be a cluster of rows and columns of tiles. Each then loads a slice of A for all
   blocks of its row, and a slice of B for those of its column. A stage is `empty` when all of these have read it.
6. Or several of a cluster have parts of the terms of a tile: each then adds up some columns of all of them, in order.
7. With channels last threads store sums from registers: B has the columns of a tile in an order in which four lanes
   have neighbours of a row, 8 or 16 bytes each. Sums of other layouts go through shared memory.

If the caller's data do not begin at a multiple of 16 bytes, the lanes of that warp copy A by elements.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import Any

from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import tirx as build

from tvm_deconv.compute.gather import Section, sections
from tvm_deconv.compute.indexing import Index, unravel
from tvm_deconv.compute.storage import storage_dtype
from tvm_deconv.problem import Problem, element_bytes
from tvm_deconv.problem.arithmetic import ceil_div
from tvm_deconv.schedules.cuda.blocks import Block, Box, Cells, Extents, packed_elements, stored_together, tiles_of
from tvm_deconv.schedules.cuda.emit import MULTIPROCESSORS, Arguments, Rounding, barrier, local, one_task, when
from tvm_deconv.schedules.cuda.predicates import multiplied_type, on_hopper
from tvm_deconv.schedules.cuda.products import choices, joined
from tvm_deconv.schedules.cuda.tiles import (
    TMA_COST,
    Form,
    Output,
    Plan,
    Rounds,
    TiledAlgorithm,
    blocks_of,
    cost,
    gaps_cost,
    matrix_kernel,
)
from tvm_deconv.schedules.cuda.warp import (
    arrive,
    arrive_at,
    copy_by_elements,
    encode_map,
    expect,
    high,
    init,
    load_box,
    low,
    meet,
    publish,
    roundings_of,
    take,
    tf32,
    wait_phase,
    wgmma,
    wgmma_commit,
    wgmma_fence,
    wgmma_registers,
    wgmma_wait,
)
from tvm_deconv.targets import CudaTarget

LINE = 128  # bytes of a line of terms, which are those of a tile
_LEAST, _SECTOR = 16, 32  # bytes of which strides of the data are multiples; those that memory has together
_TERMS, ROWS = 32, 64  # of one wgmma, the former in bytes
GROUP = 128  # threads of a warpgroup
STORING = 96  # threads that store what others multiply: those of a warpgroup beside the warp that loads
_STEPS = 4  # of theirs at a time: more would take registers from all
_BARRIER = 8  # bytes
_EIGHT = 8  # columns of a warpgroup's sums that lie side by side
_FOUR = 4  # sums that a thread takes at a time from other blocks
MOST_POSITIONS = 1 << 31
MOST_SHARED, BARRIERS = 227 << 10, 1 << 10
COLUMNS = (256, 128, 64, 32)
_STAGES = (3, 4, 6)
_SHARING, _MOST_BLOCKS = (2, 4), 8  # of a cluster: blocks that share terms, and all
_CLUSTERS = ((1, 1), (2, 1), (1, 2))
#: In multiply-adds of CUDA cores, as those of tiles.py: one of wgmma; to split an element of A; a sum from another
#: block of a cluster; until a block multiplies; until all blocks are there, twice; until a tile of k is.
_MMA, _SPLIT, _TAKEN, _OPENING, _MEETING, LATENCY = 1 / 13, 22, 37, 2300 * 128, 600 * 128, 1530 * 128
#: Of a sum on its way to the output, through shared memory: of few columns that a thread stores by rows, stored alone,
#: or four together; and stored from where it is.
_BY_ROWS, _SINGLE, _TOGETHER, _AT_ONCE = 110, 73, 31, 16


@dataclass(frozen=True, slots=True)
class ClusterPlan(Plan):
    """A plan whose blocks are clusters of rows and columns of tiles; each has several of one of these by turns.

    Or `cluster_k` blocks have parts of the terms of each. Those of several turns may have warps for `storing`.
    """

    cluster_m: int = 1
    cluster_n: int = 1
    turns_m: int = 1
    turns_n: int = 1
    cluster_k: int = 1
    storing: int = 0


class Warpgroups(Form):
    """A part is a warpgroup's."""

    algorithm = "cuda_wgmma"
    most_columns, most_stages = 64, 6
    #: Threads that only load, and shared memory of a multiprocessor that blocks may have.
    loading, most_shared = 32, MOST_SHARED
    #: True if a launch before turns the data, whose channels are second, to channels last.
    turned = False
    #: Columns of tiles to try, and whether a block may have several tiles by turns.
    widths: Sequence[int] = COLUMNS
    takes_turns = True

    plan: ClusterPlan

    def __init__(self, problem: Problem, plan: ClusterPlan) -> None:
        beside = self.loading + STORING * plan.storing
        super().__init__(problem, plan, storage_dtype(problem.dtype), GROUP * plan.parts + beside)
        self.holders = GROUP * plan.parts
        self.rows, self.columns = self.cluster = plan.cluster_m, plan.cluster_n
        assert sorted((plan.turns_m, plan.turns_n, plan.cluster_k))[1] == 1
        assert not plan.storing or max(plan.turns_m, plan.turns_n) > 1
        self.turns = plan.turns_m, plan.turns_n
        self.sharing_k = plan.cluster_k
        self.blocks = self.rows * self.columns * self.sharing_k
        self.line, self.each, self.barrier = (size // (16 // self.lanes) for size in (LINE, _TERMS, _BARRIER))
        self.single, self.triple = multiplied_type(problem) == "tf32", problem.precision == "tf32x3"

    @property
    def k_fastest(self) -> bool:
        """See Form."""
        return self.problem.data_format == "NXC"

    @property
    def wide(self) -> int:
        """See Form; loads of boxes begin at multiples of 16 bytes."""
        return self.lanes

    @property
    def b_first(self) -> int:
        """See Copied."""
        return self.plan.tile_m * self.line

    @property
    def stage(self) -> int:
        """See Form."""
        return self.b_first + len(self.roundings) * self.plan.tile_n * self.line

    @property
    def sums(self) -> int:
        """See Form."""
        return ROWS * self.plan.tile_n // GROUP

    @property
    def operands(self) -> int:
        """See Form."""
        return self._rounded * (1 + self.triple) + self.sums * self.triple

    @property
    def _rounded(self) -> int:
        """Elements of a tile of A that a thread holds in registers."""
        return 4 * (self.line // self.each) * self.single

    @property
    def term(self) -> float:
        """See Form."""
        products = _MMA * (1 + self.single) * (3 if self.triple else 1)
        return self.plan.tile_m * (self.plan.tile_n * products + _SPLIT * self.triple)

    @property
    def roundings(self) -> Sequence[Rounding]:
        """See Form."""
        return roundings_of(single=self.single, triple=self.triple)

    def allocate(self) -> tuple[Expr, ...]:
        """See Form."""
        if self.triple:
            return local(2 * self._rounded, "float32"), local(self.sums, "float32")
        return (local(self._rounded, "float32"),) if self.single else ()

    @property
    def byte_cost(self) -> float:
        """See Form."""
        return TMA_COST

    @property
    def latency(self) -> float:
        """See Form."""
        return LATENCY

    def output_cost(self, section: Section) -> float:
        """See Form."""
        if self.side_by_side:
            return _AT_ONCE
        rounds = Rounds.of(self, section)
        if rounds.by_rows or rounds.read >= _FOUR:
            return _BY_ROWS if rounds.by_rows else _TOGETHER
        return _SINGLE

    @property
    def moved(self) -> float:
        """See Form; loads pass by the nearest cache, and blocks of a cluster share them."""
        return self.plan.tile_m / self.columns + len(self.roundings) * self.plan.tile_n / self.rows

    @cached_property
    def side_by_side(self) -> int:
        """See Form; of a row four lanes have so many columns each, which are whole sectors together.

        Divisions to find channels of columns would take more than the way through shared memory.
        """
        channels = self.problem.out_channels
        divided = channels & (channels - 1) > 0 and channels % self.written > 0
        if self.problem.data_format == "NCX" or self.plan.storing or divided:
            return 0
        size, of_lane = element_bytes(self.problem.output_dtype), self.written // 4
        found = [stored_together(self.problem, section, of_lane, _LEAST // size) for section in self.sections]
        least = math.gcd(*found)
        return least if 4 * least * size >= _SECTOR and self.written % (4 * least) == 0 else 0

    @property
    def sums_bytes(self) -> int:
        """See Form; they have memory of their own, if stages are loaded meanwhile."""
        if max(self.turns) == 1:
            return super().sums_bytes
        if self.side_by_side:
            return 0
        return ceil_div(self.plan.tile_m * (self.most_columns + _EIGHT) * 4, 1024) * 1024

    @property
    def begin_stages(self) -> int:
        """Elements of shared memory before the stages."""
        size = self.stored_bytes if self.plan.storing else self.sums_bytes if max(self.turns) > 1 else 0
        return size // (16 // self.lanes)

    @cached_property
    def stored_bytes(self) -> int:
        """Bytes of all sums of a tile on their way to the output, one round behind the other."""
        all_rounds = [Rounds.of(self, section) for section in self.sections]
        most = max((rounds.size * rounds.bytes * len(rounds.firsts) for rounds in all_rounds), default=0)
        return ceil_div(most, 1024) * 1024

    @property
    def memory_bytes(self) -> int:
        """See Form."""
        return (self.begin_stages + self.plan.stages * self.stage) * (16 // self.lanes)

    @property
    def memory_elements(self) -> int:
        """Behind the stages are two barriers for each."""
        return (self.memory_bytes + BARRIERS) // (16 // self.lanes)

    @property
    def resident(self) -> int:
        """See Form."""
        blocks = min(super().resident // self.threads, self.most_shared // (self.memory_bytes + BARRIERS))
        return max(1, blocks) * self.threads

    @property
    def scope(self) -> str:
        """See Form."""
        return "shared.dyn"

    @property
    def fits(self) -> bool:
        """See Form."""
        kept = self.plan.tile_m * self.plan.tile_n * 4 if self.sharing_k > 1 else 0
        return self.memory_elements * (16 // self.lanes) <= self.most_shared and kept <= self.memory_bytes

    @property
    def shares(self) -> bool:
        """True if all sums can be cut into as many parts as blocks share, of some tiles of k, and columns."""
        tiles = [section.tiles_k for section in self.sections]
        whole = all(count % self.sharing_k == 0 and count > self.sharing_k for count in tiles)
        return whole and self.written % _EIGHT == 0

    @property
    def launched(self) -> int:
        """Blocks of a launch."""
        return sum(blocks_of(self, section) for section in self.sections)

    @property
    def few(self) -> bool:
        """True if there are no more blocks than multiprocessors."""
        return self.launched <= MULTIPROCESSORS

    def tiles(self, section: Section) -> int:
        """Return the tiles of k that a block multiplies."""
        return section.tiles_k // self.sharing_k

    def opening(self, section: Section) -> float:  # noqa: ARG002
        """See Form; with the parts of sums that a block takes from others."""
        taken = _TAKEN * self.plan.tile_m * (self.plan.tile_n - self.written)
        return _OPENING + taken + _MEETING * (self.sharing_k > 1)

    def box(self, section: Section) -> Box:
        """Return the box of positions of a tile's rows for which all tiles cost the least.

        With channels second it is the same for all sections, whose blocks of the same rows follow each other.
        """
        return self._every_box[section]

    @cached_property
    def _every_box(self) -> dict[Section, Box]:
        together: dict[Any, list[Section]] = {}
        for section in self.sections:
            together.setdefault(section if section.channels_last else self.extents(section), []).append(section)
        return {section: box for those in together.values() for box in [self.cheapest(those)] for section in those}

    def cheapest(self, those: Sequence[Section]) -> Box:
        """Return the box for which all tiles of sections cost the least, of several the longest along the last axes."""
        extents = self.extents(those[0])
        boxes = (
            Box(each, extents) for each in _lengths(self.plan.tile_m, extents, 1 if self.k_fastest else self.lanes)
        )
        return min(boxes, key=lambda box: (sum(self.work(section, box) for section in those), box.lengths))

    def work(self, section: Section, box: Box) -> float:
        """Return the cost of all tiles of a section whose rows are such boxes, and of gaps in what they store."""
        each = self.busy * section.k / self.sharing_k + gaps_cost(self, section, box)
        return math.prod(box.counts) * each

    def extents(self, section: Section) -> Extents:
        """Return the extents of rows, as of `box`."""
        return _extents(self.problem, section)

    def slice(self, section: Section) -> Extents:
        """Return the lengths of the box of A that a block loads, in the order of rows a part of the tile's."""
        rest, lengths = self.columns, []
        for length in self.box(section).lengths:
            share = math.gcd(length, rest)
            lengths.append(length // share)
            rest //= share
        image, d, h, w = lengths
        return image, d, h, w

    def positions(self, section: Section) -> int:
        """Return the positions of a line of A, if its lines are not of terms: neighbours on the last axis; else 0."""
        return 0 if self.k_fastest else min(self.slice(section)[-1], self.line)

    def packed_order(self, section: Section, number: Expr) -> Sequence[Index]:
        """See Form; terms are fastest."""
        shape = (section.geometry.groups, section.tiles_n, section.tiles_k, section.tile_n, self.line)
        group, tile, tile_k, within, k = unravel(number, shape)
        if self.single:
            k = k // 8 * 8 + self._term(k % 8)
        return group, tile, tile_k * self.line + k, self._column(within)

    def _column(self, packed: Index) -> Index:
        """Return the column that number `packed` of a tile of B is: of four lanes each has all that it stores at once.

        Of eight columns of a product a lane has two.
        """
        each = self.side_by_side or 2
        first, pair = packed // (4 * each) * (4 * each), packed // _EIGHT % (each // 2)
        return first + packed % _EIGHT // 2 * each + 2 * pair + packed % 2

    def begin(self, args: Arguments, aligned: bool) -> dict[str, Expr]:
        """See Form; encode the map of the packed filter, and of the data for each box, if TMA can load these."""
        line, lines = self.line, args.packed_elements // self.line
        box_of_b = line, self.plan.tile_n // self.rows
        packed = encode_map("packed", args.packed, self.dtype, ((line, 1), (lines, line)), box_of_b)
        maps: dict[str, Expr] = {"packed": packed}
        for section in self.sections if aligned else ():
            if (name := self.map_name(section)) not in maps:
                maps[name] = encode_map(name, args.data, self.dtype, self.axes(section), self.map_box(section))
        return maps

    def map_box(self, section: Section) -> Sequence[int]:
        """Return the extents of the box of a map, in the order of its axes."""
        *outer, last = self.slice(section)
        return self.ordered(self.line, (*outer, self.positions(section) or last))

    def map_name(self, section: Section) -> str:
        """Return the name of the map that loads of the data are by."""
        return "_".join(map(str, ("data", *self.slice(section), *["flat"] * self.flat(section))))

    def ordered(self, channel: Any, place: Sequence[Any]) -> Sequence[Any]:
        """Return what there is of channels and of images and positions in the order of a map's axes."""
        *outer, w = place
        return (channel, w, *reversed(outer)) if self.k_fastest else (w, channel, *reversed(outer))

    def of_group(
        self, section: Section, group: Index, channel: Index, at: Sequence[Index]
    ) -> tuple[Index, list[Index]]:
        """Return where a group's channel and an image and position are in the data's map."""
        return group * section.geometry.in_channels + channel, list(at)

    def flat(self, section: Section) -> bool:
        """Return True if the positions of rows are one axis."""
        return _one_tap(section)

    def shifted(self, section: Section, shifts: Sequence[Index]) -> Sequence[Index]:  # noqa: ARG002
        """Return how far from the positions of rows a tap reads, whose `shifts` along the axes are these."""
        return [0, *shifts]

    @property
    def channels(self) -> tuple[int, int]:
        """The channels of a map, and how many there are from one position to the next."""
        channels = self.problem.groups * self.problem.in_channels
        return channels, channels

    @property
    def extents_of_data(self) -> tuple[int, int, int]:
        """The extents of an image of the data along each axis."""
        return self.geometry.data

    def axes(self, section: Section) -> Sequence[tuple[int, int]]:
        """Return the axes of the data's map, channels behind the last one if that is fastest: extents and strides."""
        (channels, pitch), batch, (d, h, w) = self.channels, section.geometry.batch, self.extents_of_data
        inner = pitch if self.k_fastest else 1
        image, extents = d * h * w * pitch, (batch, d, h, w)
        strides = image, h * w * inner, w * inner, inner
        if self.flat(section):
            # Axes with one element have any stride.
            extents = self.extents(section)
            strides = image * batch // extents[0], image, image, inner
        places = list(zip(extents, strides, strict=True))
        return self.ordered((channels, 1 if self.k_fastest else d * h * w), places)

    def compute(
        self,
        args: Arguments,
        block: Block,
        begun: Any,
        memory: Expr,
        sums: Expr,
        registers: Sequence[Expr],
        output: Output,
    ) -> None:
        """See Form; of the next tile loads begin before sums are written."""
        if max(self.turns) == 1:
            block = replace(block, column=block.part * self.written) if self.sharing_k > 1 else block
            super().compute(args, block, begun, memory, sums, registers, output)
            return
        loads = self.begun_loads(args, block, begun, memory)
        if self.plan.storing:
            self._multiply_load_and_store(loads, memory, sums, registers, output)
        elif self.side_by_side:
            self._multiply_and_store(loads, memory, sums, registers, output)
        else:
            with build.serial(0, self.turns_of(block)) as turn:
                self.clear(args, block, sums)
                self.multiply_and_load(loads, memory, sums, registers, turn)
                barrier()
                output.write(self.tile_of(block, turn))
        self.meet()

    def _multiply_and_store(
        self, loads: Any, memory: Expr, sums: Expr, registers: Sequence[Expr], output: Output
    ) -> None:
        """Have the last warp load all tiles, whose sums the others store from registers, each warp when it has them."""
        block = loads.block
        with build.If(block.thread < self.holders):
            with build.Then(), build.serial(0, self.turns_of(block)) as turn:
                self.clear(loads.args, block, sums)
                self.multiply(loads, memory, sums, registers, turn)
                output.write(self.tile_of(block, turn))
            with build.Else():
                loads.emit()

    def _multiply_load_and_store(
        self, loads: Any, memory: Expr, sums: Expr, registers: Sequence[Expr], output: Output
    ) -> None:
        """Have the last warp load all tiles, and those before it store the sums of one while others multiply the next.

        Sums are brought to shared memory when those of the tile before are stored.
        """
        args, block, turns = loads.args, loads.block, self.turns_of(loads.block)
        with build.If(block.thread < self.holders):
            with build.Then(), build.serial(0, turns) as turn:
                self.clear(args, block, sums)
                self.multiply(loads, memory, sums, registers, turn)
                wait_phase(memory, self.sums_empty, (turn + 1) % 2)
                for rounds, first, begin in self._rounds(block.section):
                    output.bring(self.tile_of(block, turn), rounds, first, [], begin)
                arrive(memory, self.sums_full)
            with build.Else(), build.If(block.thread < self.holders + STORING):
                with build.Then(), build.serial(0, turns) as turn:
                    wait_phase(memory, self.sums_full, turn % 2)
                    tile = replace(self.tile_of(block, turn), thread=block.thread - self.holders)
                    for rounds, first, begin in self._rounds(block.section):
                        output.store(tile, rounds, first, STORING, begin, _STEPS)
                    arrive(memory, self.sums_empty)
                with build.Else():
                    loads.emit()

    def _rounds(self, section: Section) -> Iterator[tuple[Rounds, int, int]]:
        """Yield the rounds of sums to the output, the first column of each, and where it begins in shared memory."""
        rounds = Rounds.of(self, section)
        for number, first in enumerate(rounds.firsts):
            yield rounds, first, number * rounds.size

    def _add_parts(self, block: Block, memory: Expr, sums: Expr) -> None:
        """Leave in `sums` those of the columns that the block brings to the output, of the parts of all blocks."""
        elements, thread = self.memory_bytes // 4, block.thread
        parts = build.decl_buffer([elements], "float32", data=memory.data, scope=self.scope, layout=None)
        count, (row, column) = self.sums // _FOUR, block.place
        with when([thread < self.holders]), build.unroll(count) as i, build.vectorized(_FOUR) as lane:
            build.buffer_store(parts, sums[_FOUR * i + lane], [(i * self.holders + thread) * _FOUR + lane])
        meet(self.blocks)
        taken, own = local(_FOUR * self.sharing_k, "float32"), count // self.sharing_k
        with when([thread < self.holders]), build.unroll(own) as i:
            place = ((block.part * own + i) * self.holders + thread) * _FOUR
            for part in range(self.sharing_k):
                number = (part * self.rows + row) * self.columns + column
                take(taken, _FOUR * part, parts, place, number)
            for lane in range(_FOUR):
                total = sum((taken[_FOUR * part + lane] for part in range(1, self.sharing_k)), start=taken[lane])
                build.buffer_store(sums, total, [_FOUR * i + lane])
        meet(self.blocks)

    def turns_of(self, block: Block) -> Index:
        """Return how many tiles a block has: of rows all as many, of columns the last may have fewer."""
        down, across = self.turns
        if across == 1:
            return down
        left = block.section.tiles_n - block.tile_n
        return min(across, left) if isinstance(left, int) else tirx.min(across, left)

    def tile_of(self, block: Block, turn: Index) -> Block:
        """Return the work of one of a block's turns."""
        if self.turns[0] == 1:
            return replace(block, tile_n=block.tile_n + turn) if self.turns[1] > 1 else block
        tile, count = block.tile_m + turn, tiles_of(block.section, self.plan.tile_m, self.box(block.section))
        within = [tile < count] if count % self.turns[0] else []
        return replace(block, tile_m=tile, exists=(*block.exists, *within))

    def accumulate(
        self,
        args: Arguments,
        block: Block,
        begun: Any,
        memory: Expr,
        sums: Expr,
        registers: Sequence[Expr],
    ) -> None:
        """See Form; the last warp loads. Blocks that share terms add up their parts."""
        loads = self.begun_loads(args, block, begun, memory)
        self.multiply_and_load(loads, memory, sums, registers)
        if self.sharing_k == 1:
            self.meet()
        else:
            barrier()
            self._add_parts(block, memory, sums)

    def begun_loads(self, args: Arguments, block: Block, begun: Any, memory: Expr) -> Loads:
        """Return the work of the last warp, whose barriers all threads of the cluster may use from here on."""
        loads = self.loads(args, block, begun, memory)
        with when([block.thread == 0]):
            loads.begin()
        self.meet()
        return loads

    def multiply_and_load(self, loads: Any, memory: Expr, sums: Expr, registers: Sequence[Expr], *turn: Index) -> None:
        """Have the last warp load what the others multiply, of a tile or of one `turn` of several."""
        with build.If(loads.block.thread < self.holders):
            with build.Then():
                self.multiply(loads, memory, sums, registers, *turn)
            with build.Else():
                loads.emit(*turn)

    def loads(self, args: Arguments, block: Block, begun: Any, memory: Expr) -> Loads:
        """Return the work of the last warp."""
        return Loads(self, args, block, begun, memory)

    @property
    def sharing(self) -> int:
        """Blocks whose tiles lie in a row or a column of a cluster with a block's, itself among them."""
        return self.rows + self.columns - 1

    def meet(self) -> None:
        """Wait for all threads of the cluster: until barriers are made, and before a block ends that others reach."""
        barrier()
        if self.blocks > 1:
            meet(self.blocks)

    def give_back(self, block: Block, memory: Expr, stage: Index) -> None:
        """Arrive at the barriers of all blocks that load for this one, a lane of each warp at each of them."""
        empty, lane = self.empty(stage), block.thread % 32
        if self.sharing == 1:
            arrive(memory, empty)
            return
        row, column = block.place
        of_column = (row + lane - self.columns + 1) % self.rows * self.columns + column
        number = tirx.Select(lane < self.columns, row * self.columns + lane, of_column)
        arrive_at(memory, empty, self.first_of(block) + number)

    def first_of(self, block: Block) -> Index:
        """Return the number in the cluster of the first block that has the same part of the terms."""
        return block.part * (self.rows * self.columns) if self.sharing_k > 1 else 0

    def full(self, stage: Index) -> Index:
        """Return the place of the barrier of a stage that its loads complete."""
        return self.memory_elements - BARRIERS // (16 // self.lanes) + stage * self.barrier

    def empty(self, stage: Index) -> Index:
        """Return the place of the barrier of a stage that its readers complete."""
        return self.full(stage) + self.plan.stages * self.barrier

    @property
    def sums_full(self) -> Index:
        """The place of the barrier that those complete whose sums are in shared memory, for others to store."""
        return self.memory_elements - self.barrier

    @property
    def sums_empty(self) -> Index:
        """The place of the barrier that those complete which have stored them."""
        return self.sums_full - self.barrier

    def multiply(self, loads: Any, memory: Expr, sums: Expr, registers: Sequence[Expr], turn: Index = 0) -> None:
        """Multiply tile by tile; a stage is given back when the product behind its own has begun."""
        block = loads.block
        if self.single:
            self._multiply_rounded(block, memory, sums, turn, *registers)
            return
        stages, tiles, positions = self.plan.stages, self.tiles(block.section), self.positions(block.section)
        first, before = block.thread // GROUP * (ROWS * self.line), turn * tiles
        with build.serial(0, tiles) as step:
            base = self.filled(memory, before + step)
            wgmma_fence()
            for k in range(0, self.line, self.each):
                a = base + first + k * max(1, positions)
                wgmma(self.problem.dtype, self.plan.tile_n, sums, memory, a, base + self.b_first + k, positions)
            wgmma_commit()
            wgmma_wait(1)
            with when([before + step >= 1, block.thread % 32 < self.sharing]):
                self.give_back(block, memory, (before + step - 1) % stages)
        wgmma_wait(0)

    def _multiply_rounded(
        self, block: Block, memory: Expr, sums: Expr, turn: Index, rounded: Expr, *of_tile: Expr
    ) -> None:
        """Multiply tile by tile with A `rounded` to registers, those of a few terms while others are multiplied.

        The first terms of a tile are rounded while the last ones of the tile before are multiplied. Sums of three
        products are of one tile, in registers of their own, and then added to the others.
        """
        stages, tiles, added = self.plan.stages, self.tiles(block.section), of_tile[0] if self.triple else sums
        round_terms, before = partial(self._round, block, memory, rounded), turn * tiles
        round_terms(self.filled(memory, before), 0)
        with build.serial(0, tiles) as step:
            base = self.begin_stages + (before + step) % stages * self.stage
            for k in range(0, self.line, self.each):
                if k > 0:
                    round_terms(base, k)
                wgmma_fence()
                self._multiply_terms(rounded, k, memory, base + self.b_first, added)
                wgmma_commit()
            with when([step + 1 < tiles]):
                wgmma_wait(1)
                round_terms(self.filled(memory, before + step + 1), 0)
            wgmma_wait(0)
            with when([block.thread % 32 < self.sharing]):
                self.give_back(block, memory, (before + step) % stages)
            if self.triple:
                with build.unroll(self.sums) as i:
                    build.buffer_store(sums, sums[i] + added[i], [i])

    def filled(self, memory: Expr, step: Index) -> Index:
        """Wait for a tile of k, and return where its stage begins."""
        stages = self.plan.stages
        wait_phase(memory, self.full(step % stages), step // stages % 2)
        return self.begin_stages + step % stages * self.stage

    def _multiply_terms(self, rounded: Expr, k: int, memory: Expr, b: Index, sums: Expr) -> None:
        """Begin to add the product of the terms of A from `k` on and B; or those of their parts, the small ones first.

        The first of three products begins the sums of a tile.
        """
        at, low_a, low_b = 4 * (k // self.each), self._rounded, self.plan.tile_n * self.line
        for of_a, of_b in ((low_a, 0), (0, low_b), (0, 0)) if self.triple else ((0, 0),):
            begins = self.triple and k == 0 and of_a > 0
            wgmma_registers("tf32", self.plan.tile_n, sums, rounded, of_a + at, memory, b + k + of_b, begins=begins)

    def _round(self, block: Block, memory: Expr, registers: Expr, base: Index, k: int) -> None:
        """Read the thread's elements of A of one wgmma, two rows and two terms, and round or split them."""
        for part in range(4):
            element = memory[base + self._element(block.section, block.thread, k, part)]
            to = 4 * (k // self.each) + part
            if not self.triple:
                build.buffer_store(registers, tf32(element), [to])
                continue
            behind = self._rounded + to
            build.buffer_store(registers, element, [behind])
            build.buffer_store(registers, high(registers[behind]), [to])
            build.buffer_store(registers, low(registers[behind], registers[to]), [behind])

    def _element(self, section: Section, thread: Index, k: int, part: int) -> Index:
        """Return the place of one of four elements of A that a thread holds of a wgmma whose terms begin at `k`."""
        lane = thread % 32
        row = thread // 32 * 16 + lane // 4 + part % 2 * 8
        return self.place(row, k + self._term(lane % 4 + part // 2 * 4), self.positions(section))

    def _term(self, number: Index) -> Index:
        """Return which of eight terms of TF32 one of wgmma's is: with lines of positions, four in different banks."""
        return number if self.k_fastest or not self.single else number % 4 * 2 + number // 4

    def place(self, row: Index, term: Index, positions: int) -> Index:
        """Return the place of an element of a tile of A, with the swizzle of lines of terms or of `positions`."""
        line = positions or self.line
        at = (row // line * self.line + term) * line + row % line if positions else row * line + term
        return at ^ (at // self.line % (line // self.lanes)) * self.lanes if line > self.lanes else at

    def cells(self, thread: Index) -> Iterator[Cells]:
        """See Form."""
        row, columns = thread // 32 * 16 + thread % 32 // 4, self.side_by_side or 2
        for start in range(0, self.written, 4 * columns):

            def cell(i: Index, part: Index, first: int = start // 2) -> tuple[Index, Index, Index]:
                return row + 8 * i, thread % 4 * columns + part, first + part // 2 * 4 + 2 * i + part % 2

            yield start, (2, columns), cell

    def reads(self, thread: int) -> Iterator[tuple[Index, int]]:
        """See Form; tensor cores read the rest themselves, lines of the swizzle without conflicts."""
        for part in range(4 * self.single):
            yield self._element(self.sections[0], thread, 0, part), 4


class Loads:
    """The work of the last warp: tiles of k to the stages, as these become empty."""

    def __init__(self, form: Warpgroups, args: Arguments, block: Block, maps: dict[str, Expr], memory: Expr) -> None:
        self.form, self.args, self.block, self.maps, self.memory = form, args, block, maps, memory
        self.section, self.slice = block.section, form.slice(block.section)
        self.map = maps.get(form.map_name(block.section))
        self.by_elements = self.map is None

    def begin(self) -> None:
        """Make the barriers of stages; one thread does."""
        form = self.form
        with build.unroll(form.plan.stages) as stage:
            init(self.memory, form.full(stage), self.arrivals)
            init(self.memory, form.empty(stage), form.holders // 32 * form.sharing)
        if form.plan.storing:
            init(self.memory, form.sums_full, form.holders)
            init(self.memory, form.sums_empty, STORING)

    @property
    def first(self) -> Index:
        """The first tile of k that the block multiplies."""
        return self.block.part * self.form.tiles(self.section) if self.form.sharing_k > 1 else 0

    @property
    def arrivals(self) -> int:
        """Threads that arrive at a barrier of a full stage."""
        return 32 if self.by_elements else 1

    def emit(self, turn: Index = 0) -> None:
        """Load all tiles of k; of several turns those whose stages are given back before the next begins."""
        form, stages, lane = self.form, self.form.plan.stages, self.block.thread % 32
        lines = len(form.roundings) * form.plan.tile_n + (0 if self.by_elements else form.plan.tile_m)
        with when([] if self.by_elements else [lane == 0]), build.serial(*self.numbers(turn)) as number:
            base, full = form.begin_stages + number % stages * form.stage, form.full(number % stages)
            wait_phase(self.memory, form.empty(number % stages), (number // stages + 1) % 2)
            block, tile = self.block, self.first + number
            if max(form.turns) > 1:
                block, tile = form.tile_of(block, number // self.section.tiles_k), number % self.section.tiles_k
            if self.by_elements:
                self._copy_a(block, tile, base, lane)
                publish()
                with when([lane > 0]):
                    arrive(self.memory, full)
            with when([lane == 0] if self.by_elements else []):
                expect(self.memory, full, lines * LINE)
                self._load_slices(block, tile, base, full)

    @property
    def ahead(self) -> int:
        """Tiles of k of the next turn that may be loaded before it begins."""
        return self.form.ahead

    def numbers(self, turn: Index) -> tuple[Index, Index]:
        """Return the first tile of k of all turns that is loaded in one, and the first that is not.

        The last stage of a turn is given back in the next. If all warps but those that load go on alone, all are loaded
        in one.
        """
        form, tiles, ahead = self.form, self.form.tiles(self.section), self.ahead
        turns = form.turns_of(self.block)
        if max(form.turns) == 1 or form.plan.storing or form.side_by_side:
            return 0, turns * tiles
        begin = tirx.Select(turn == 0, 0, tirx.min(turn * tiles + ahead, turns * tiles))
        return begin, tirx.min((turn + 1) * tiles + ahead, turns * tiles)

    def _load_slices(self, block: Block, tile: Index, base: Index, full: Index) -> None:
        """Begin to load the block's slices of tiles of A and B, for all blocks of the cluster that read these."""
        form, (row, column) = self.form, block.place
        of_row = ((1 << form.columns) - 1) << (form.first_of(block) + row * form.columns)
        rows, positions = form.plan.tile_m // form.columns, self.slice[-1]
        if self.map is not None:
            # Of more positions than a line has, a box for each line.
            each = rows // (positions // (form.positions(self.section) or positions))
            for first in range(0, rows, each):
                at, blocks = column * rows + first, of_row if form.columns > 1 else None
                load_box(self.memory, base + at * form.line, self.map, full, self._corner(block, tile, at), blocks)
        self.load_b(tile, base, full)

    def load_b(self, tile: Index, base: Index, full: Index) -> None:
        """Begin to load the block's slice of a tile of B, for all blocks of its column of the cluster."""
        form, (row, column) = self.form, self.block.place
        of_column = sum(1 << (form.columns * other) for other in range(form.rows)) << form.first_of(self.block) + column
        first = row * (form.plan.tile_n // form.rows)
        for part in range(len(form.roundings)):
            to = base + form.b_first + (part * form.plan.tile_n + first) * form.line
            behind = part * packed_elements(form.sections) // form.line
            corner = 0, behind + self._line(tile) + first
            load_box(self.memory, to, self.maps["packed"], full, corner, of_column if form.rows > 1 else None)

    def _tap(self, tile: Index) -> tuple[Index, list[Index]]:
        """Return the first channel of a tile of k in its group, and how far from the positions its tap reads."""
        section = self.section
        first, tap = section.tap(tile)
        taps = unravel(tap, section.taps)
        return first, [run.x0 - t * run.x_step for t, run in zip(taps, section.runs, strict=True)]

    def _corner(self, block: Block, tile: Index, row: Index) -> Sequence[Index]:
        """Return where a slice of a tile of A, from a row on, begins in the data, the fastest axis first."""
        channel, shifts = self._tap(tile)
        within = unravel(row, self.form.box(self.section).lengths)
        further = self.form.shifted(self.section, shifts)
        at = [first + y + shift for first, y, shift in zip(block.corner, within, further, strict=True)]
        return self.form.ordered(*self.form.of_group(self.section, self.block.group, channel, at))

    def _line(self, tile: Index) -> Index:
        """Return the first line of a tile of B in the packed filter."""
        section = self.section
        number = (self.block.group * section.tiles_n + self.block.tile_n) * section.tiles_k + tile
        return section.offset // self.form.line + number * section.tile_n

    def _copy_a(self, block: Block, tile: Index, base: Index, lane: Expr) -> None:
        """Copy a tile of A by elements, each lane some of its rows."""
        channel, shifts = self._tap(tile)
        data, geometry, form = self.args.flat_data(), self.section.geometry, self.form
        positions = form.positions(self.section)
        vector = 1 if positions else form.lanes
        turns, parts = form.plan.tile_m // 32, form.line // vector

        # Single elements in one loop: of an inner one nvcc would begin all loads at once, and spill.
        with build.grid(*([turns * parts] if positions else [turns, parts])) as number:
            turn, part = unravel(number, (turns, parts)) if positions else number
            row, of = turn * 32 + lane, part * vector
            image, position, inside = block.position(row, 0, form.plan.tile_m)
            x = [y + shift for y, shift in zip(position, shifts, strict=True)]
            for at, extent in zip(x, geometry.data, strict=True):
                inside = [*inside, at >= 0, at < extent]
            if self.section.channels > geometry.in_channels:
                inside = [*inside, channel + of < geometry.in_channels]
            element = data[self.args.place(image, block.group * geometry.in_channels + channel + of, x)]
            to = base + form.place(row, of, positions)
            if positions:
                element = tirx.if_then_else(tirx.all(*inside), element, tirx.const(0, form.dtype))
                build.buffer_store(self.memory, element, [to])
            else:
                copy_by_elements(16, 16 // form.lanes, self.memory, to, element, inside)


@lru_cache(256)
def _lengths(rows: int, extents: Extents, least: int) -> Sequence[Extents]:
    """Return the lengths of the boxes of so many positions that leave the fewest tiles, for each of the last axis.

    That is the `least` or more.
    """
    powers = [2**power for power in range(rows.bit_length())]
    found: dict[int, tuple[int, Extents]] = {}
    for image, d, h, w in itertools.product(powers, repeat=4):
        if image * d * h * w == rows and w >= least:
            box = image, d, h, w
            count = math.prod(map(ceil_div, extents, box))
            found[w] = min(found.get(w, (count, box)), (count, box))
    return [box for _, box in found.values()]


def _extents(problem: Problem, section: Section) -> Extents:
    """Return the extents of rows; if each reads one tap, its own position, the last axis has all that are neighbours.

    Those are the positions of an image, or of all images if channels are last.
    """
    image, d, h, w = section.extents
    if not _one_tap(section):
        return image, d, h, w
    return (1, 1, 1, section.m) if problem.data_format == "NXC" else (image, 1, 1, d * h * w)


def _one_tap(section: Section) -> bool:
    """Return True if there are as many positions as data, each of which reads one tap, at the same place."""
    same = section.extents[1:] == section.geometry.data and section.m < MOST_POSITIONS
    return same and all(run.taps == 1 and run.x0 == 0 for run in section.runs)


def supports(problem: Problem, target: CudaTarget) -> bool:
    """The target is a Hopper's own, TMA can load from the data, and it can tell a group's channels from others."""
    supported = multiplied_type(problem) in ("float16", "bfloat16", "tf32")
    if not on_hopper(target) or problem.batch == 0 or not supported:
        return False
    return (problem.groups == 1 or problem.in_channels % line_of(problem) == 0) and bool(_choices(problem))


def line_of(problem: Problem) -> int:
    """Return the elements of a line, which are the terms of a tile."""
    return LINE // element_bytes(problem.dtype)


def _choices(problem: Problem) -> list[int]:
    """Return what `few_products` does of products whose data TMA can load: 16 bytes, from multiples of 16."""
    least = _LEAST // element_bytes(problem.dtype)

    def loads(section: Section) -> bool:
        if problem.data_format == "NXC":
            return problem.in_channels % least == 0
        if _one_tap(section):
            return _extents(problem, section)[-1] % least == 0
        run = section.runs[-1]
        begin_whole = all((run.x0 - tap * run.x_step) % least == 0 for tap in range(run.taps))
        return begin_whole and problem.data_spatial[-1] % least == 0

    return few_products(problem, COLUMNS[-1], loads)


def few_products(problem: Problem, columns: int, suits: Callable[[Section], bool]) -> list[int]:
    """Return the numbers of last axes along which phases are joined to few products of whole lines, all of which suit.

    One has so many `columns` at least.
    """
    found = []
    for axes in choices(problem):
        products = sections(problem, line_of(problem), columns, joined(problem, axes))
        whole = all(section.alike and suits(section) for section in products)
        if whole and 1 <= len(products) <= 8 and max(section.n for section in products) >= columns:
            found.append(axes)
    return found


def _with_registers(problem: Problem, columns: Sequence[int]) -> Sequence[int]:
    """Return those columns of tiles, the most first, whose sums leave a thread registers.

    With 128 sums it has none for what is rounded, and with 64 none for what is split and its own sums.
    """
    return columns[("ieee", "tf32", "tf32x3").index(problem.precision) :]


def candidates(problem: Problem, alone: bool) -> list[tuple[float, ClusterPlan]]:
    """Return plans to measure with their costs, the cheapest first; if `alone`, of blocks that share no loads."""
    return plans_of(Warpgroups, problem, _choices(problem), _CLUSTERS[: 1 if alone else None])


def plans_of(
    made: type[Warpgroups], problem: Problem, axes: Sequence[int], clusters: Sequence[tuple[int, int]]
) -> list[tuple[float, ClusterPlan]]:
    """Return plans of these `clusters`, whose phases are joined along so many `axes`, with their costs in order."""
    found = []
    for along, rows, columns, stages, cluster in itertools.product(
        axes, (128, 64), _with_registers(problem, made.widths), _STAGES, clusters
    ):
        if columns % (_EIGHT * cluster[0]):  # of those that blocks of a cluster load
            continue
        plan = ClusterPlan(rows, columns, line_of(problem), ROWS, columns, stages, 1, along, *cluster)
        single = made(problem, plan)
        several = [(turns, 1) for turns in turns_of_rows(single)] if made.takes_turns else []
        others = (made(problem, one) for one in (*by_turns(plan, several), *sharing_terms(single)))
        found += [(cost(form), form.plan) for form in (single, *others) if form.fits]
    return sorted(found, key=lambda pair: pair[0])


def sharing_terms(form: Warpgroups) -> list[ClusterPlan]:
    """Return plans like that of `form` whose blocks share the terms of tiles, if few blocks have one each."""
    counts = _SHARING[:1] if form.turned else _SHARING
    clusters = [count for count in counts if form.few and count * form.blocks <= _MOST_BLOCKS]
    plans = [replace(form.plan, cluster_k=count) for count in clusters]
    return [plan for plan in plans if type(form)(form.problem, plan).shares]


def by_turns(plan: ClusterPlan, turns: Sequence[tuple[int, int]]) -> Iterator[ClusterPlan]:
    """Yield plans whose blocks have so many tiles of rows and columns, with and without warps for storing."""
    for (down, across), storing in itertools.product(turns, (0, 1)):
        if max(down, across) > 1:
            yield replace(plan, turns_m=down, turns_n=across, storing=storing)


def turns_of_rows(form: Warpgroups) -> list[int]:
    """Return numbers of tiles of rows of a block, beside that of the `form`, whose blocks have one.

    One or all blocks of a multiprocessor then have the tiles that there are for it.
    """
    places = {MULTIPROCESSORS, MULTIPROCESSORS * (form.resident // form.threads)}
    return [turns for count in places if (turns := ceil_div(form.launched, count)) > 1]


def cluster_algorithm(
    form: type[Warpgroups],
    supports: Callable[[Problem, CudaTarget], bool],
    candidates: Callable[[Problem, bool], list[tuple[float, ClusterPlan]]],
    caveat: str = "",
) -> TiledAlgorithm[ClusterPlan]:
    """Return the record of the algorithm whose kernels have a `form`, a default unless it has a `caveat`.

    Only a search tries blocks that share loads: on an H100 they were not faster.
    """
    return TiledAlgorithm(
        name=form.algorithm,
        form=form,
        supports=supports,
        is_default_for=lambda problem, target: not caveat and supports(problem, target),
        candidates=lambda problem, target: candidates(problem, False),  # noqa: ARG005
        default=lambda problem, target: candidates(problem, True)[0],  # noqa: ARG005
        read=lambda knobs: ClusterPlan(**knobs),
        tasks=one_task,
        build=lambda problem, target, plan: matrix_kernel(form(problem, plan)),  # noqa: ARG005
        caveat=caveat,
    )


ALGORITHM = cluster_algorithm(Warpgroups, supports, candidates)
