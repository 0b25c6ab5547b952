"""The products of `wgmma.py` with A of all taps in shared memory at once: the box of the data that a tile's rows read.

Neighbouring taps read nearly the same data. Here a box with its halo is loaded once for all taps, 64 channels at a
time, and each tap reads it at other lines. float16 and bfloat16 with channels last, on ``sm_90a``.

1. A line of the box has the 64 channels of a position, or all of a group, padded to 16 or 32. TMA writes lines with the
   swizzle of their length, zeros outside of the data. Two boxes are there by turns, if there are several.
2. ``ldmatrix`` reads the rows of a warp at any lines, and wgmma takes them from registers: four terms of 16 by turns,
   so that some are read while others are multiplied. Eight rows are neighbours on the last axis or images of one
   position, so that they are in different banks.
3. Stages hold B alone, a tile of 64 terms in each: of one tap, or of two or four with few channels. Where there are as
   many as tiles, B stays for all tiles of rows of a block.

If lines are no multiples of 16 bytes, or the caller's data do not begin at one, the warps that multiply fill the box by
elements.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Any

from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import tirx as build

from tvm_deconv.compute.gather import Section, ravel, sections
from tvm_deconv.compute.indexing import Index, unravel
from tvm_deconv.compute.phases import Geometry
from tvm_deconv.problem import Problem
from tvm_deconv.problem.arithmetic import ceil_div
from tvm_deconv.schedules.contract import Algorithm
from tvm_deconv.schedules.cuda.banks import WAVEFRONT
from tvm_deconv.schedules.cuda.blocks import Block, Box, Cells, Extents
from tvm_deconv.schedules.cuda.emit import Arguments, local, when
from tvm_deconv.schedules.cuda.predicates import multiplied_type, on_hopper
from tvm_deconv.schedules.cuda.products import choices, joined
from tvm_deconv.schedules.cuda.tiles import TMA_COST, WAVEFRONT_COST, cost, gaps_cost
from tvm_deconv.schedules.cuda.warp import (
    arrive,
    expect,
    init,
    ldmatrix,
    load_box,
    wait_phase,
    wgmma_commit,
    wgmma_fence,
    wgmma_registers,
    wgmma_wait,
)
from tvm_deconv.schedules.cuda.wgmma import (
    BARRIERS,
    LATENCY,
    MOST_SHARED,
    ROWS,
    ClusterPlan,
    Loads,
    Warpgroups,
    by_turns,
    cluster_algorithm,
    sharing_terms,
    turns_of_rows,
)
from tvm_deconv.targets import CudaTarget

_SIZE, _LINE, _TERMS, _LANES = 2, 64, 16, 8  # bytes of an element; elements of a line at most, of a wgmma, of a vector
_EIGHT = 8  # rows that ldmatrix reads at a time
_ALIGNED = 1024 // _SIZE  # elements of whose multiples boxes begin
_FURTHEST = 256  # extent of a box that TMA loads
#: Registers of each of the parts that a multiprocessor's warps are spread over, and how many these are; of what number
#: those of a thread are a multiple; and those for addresses besides those that any form has.
_REGISTERS, _PARTS, _STEP, _MORE = 16 << 10, 4, 8, 8
_FOUR, FILLED = 4, 40  # elements that a thread copies to a box: of a line, at least; and at a time
#: In multiply-adds of CUDA cores: the time until a box is there, for each element; copying one by a thread.
_ARRIVING, _FILL = 4, 12
_ROWS, _COLUMNS, _STAGES = (64, 128, 192, 256), (16, 32, 64, 96, 128, 192, 256), (3, 4, 6)
_CLUSTERS, _TURNS, _FEW_STAGES = (1, 2), (2, 4, 8), 4
_MOST_PARTS = 4  # warpgroups of a block whose warpgroups have strips
_MOST_KEPT = 12  # stages of tiles of B that stay for all tiles of rows


def line_of(channels: int) -> int:
    """Return the elements of a line: all channels of a group, if they are few."""
    return min(_LINE, max(_TERMS, 1 << (channels - 1).bit_length()))


@dataclass(frozen=True, slots=True)
class _Lines(Section):
    """A product whose taps have whole lines of terms."""

    @property
    def channels(self) -> int:
        line = line_of(self.geometry.in_channels)
        return ceil_div(self.geometry.in_channels, line) * line


@lru_cache(256)
def _products(problem: Problem, tile_n: int, geometry: Geometry) -> tuple[Section, ...]:
    """Return the products of a geometry's phases, with whole lines of terms."""
    products: list[Section] = []
    offset = 0
    for of in sections(problem, _LINE, tile_n, geometry):
        products.append(_Lines(of.geometry, of.runs, of.channels_last, _LINE, tile_n, offset))
        offset += math.prod(products[-1].shape)
    return tuple(products)


class Held(Warpgroups):
    """A part is a warpgroup's, whose rows of A lie in a box of the data."""

    algorithm = "cuda_held"
    #: The numbers of last axes along which phases may be joined, and the phases that are columns of products then.
    choices: Callable[[Problem], list[int]] = staticmethod(choices)
    phases: Callable[[Problem, int], Geometry] = staticmethod(joined)

    def __init__(self, problem: Problem, plan: ClusterPlan) -> None:
        super().__init__(problem, plan)
        self.most_columns = math.gcd(self.written, self.most_columns)
        self.width = line_of(problem.in_channels)
        self.boxes = ceil_div(problem.in_channels, self.width) // self.sharing_k

    @property
    def geometry(self) -> Geometry:
        """See Form."""
        return self.phases(self.problem, self.plan.joined)

    @cached_property
    def sections(self) -> tuple[Section, ...]:
        """See Form."""
        return _products(self.problem, self.plan.tile_n, self.geometry)

    @property
    def wide(self) -> int:
        """See Form; 1 if TMA can not load lines."""
        return super().wide if _loads(type(self), self.problem) else 1

    @property
    def copies(self) -> bool:
        """See Form; no thread holds elements on their way."""
        return True

    @property
    def b_first(self) -> int:
        """See Copied."""
        return 0

    @property
    def stage(self) -> int:
        """See Form."""
        return self.plan.tile_n * self.line

    def opening(self, section: Section) -> float:
        """See Form; until the first box is there: what others that are resident do meanwhile is no loss."""
        elements, others = self.lines(section) * self.width, self.resident // self.threads
        if _loads(type(self), self.problem):
            return super().opening(section) + (LATENCY + _ARRIVING * elements) / others
        return super().opening(section) + LATENCY / others + _FILL * elements

    @property
    def operands(self) -> int:
        """See Form; of strips some are read while others are multiplied."""
        return 4 * _LINE // _TERMS * min(2, self.strips)

    @property
    def strips(self) -> int:
        """Strips of 64 rows that a warpgroup has, each a line further than the one before.

        What is read of a line is for all taps of an axis, each of which adds to the sums of another strip.
        """
        return self.plan.part_m // ROWS

    @property
    def sums(self) -> int:
        """See Form."""
        return self.strips * super().sums

    @cached_property
    def side_by_side(self) -> int:
        """See Form; those of strips are of more rows than a thread finds the places of."""
        return super().side_by_side if self.strips == 1 else 0

    def again(self, section: Section) -> float:
        """Return how often warps read a row of A for each of the taps along the axis of strips."""
        return (self.strips + section.taps[1] - 1) / (self.strips * section.taps[1]) if self.strips > 1 else 1

    def allocate(self) -> tuple[Expr, ...]:
        """See Form."""
        return local(self.operands, "uint32"), local(_LINE // self.width, "int32")

    @property
    def registers(self) -> int:
        """See Form."""
        return ceil_div(super().registers + _MORE, _STEP) * _STEP

    def _warps(self, blocks: int) -> int:
        """Return the warps of so many blocks that share the registers of a part of a multiprocessor."""
        return ceil_div(blocks * self.threads // 32, _PARTS)

    @property
    def has_registers(self) -> bool:
        """See Form."""
        return self.registers <= min(_REGISTERS // 32 // self._warps(1), 255)

    @property
    def resident(self) -> int:
        """See Form; as many blocks as have registers and shared memory."""
        blocks = MOST_SHARED // (self.memory_bytes + BARRIERS)
        while blocks > 1 and self._warps(blocks) * 32 * self.registers > _REGISTERS:
            blocks -= 1
        return max(1, blocks) * self.threads

    @property
    def held(self) -> int:
        """Boxes that are in shared memory at a time."""
        return min(2, self.boxes * self.turns[0])

    @property
    def box_elements(self) -> int:
        """Elements of shared memory for a box, whose lines begin at a multiple of 1024 bytes."""
        most = max(self.lines(section) for section in self.sections) * self.width
        return ceil_div(most, _ALIGNED) * _ALIGNED

    @property
    def memory_bytes(self) -> int:
        """See Form; behind the stages are the boxes, and behind the stages' barriers two for each of both."""
        return super().memory_bytes + self.held * self.box_elements * _SIZE

    @property
    def moved(self) -> float:
        """See Form."""
        return self._moved(self._share(self.sections[0]), self.loaded(self.sections[0]))

    def keeps(self, section: Section) -> bool:
        """Return True if stages have all tiles of B of a section, which then stay for all tiles of rows of a block."""
        return self.turns[0] > 1 and self.tiles(section) <= self.plan.stages

    def loaded(self, section: Section) -> float:
        """Return the part of B's tiles that a tile of rows loads."""
        return 1 / self.turns[0] if self.keeps(section) else 1

    def _share(self, section: Section) -> float:
        """Return the lines of a box for each tap and each tile of columns."""
        return self.lines(section) / math.prod(section.taps) / min(self.turns[1], section.tiles_n)

    def _moved(self, share: float, loaded: float) -> float:
        """See `moved`; a box comes once for all taps, so many of its lines for each."""
        return share + loaded * self.plan.tile_n / self.rows

    @property
    def wavefronts(self) -> float:
        """See Form."""
        section = self.sections[0]
        return self._wavefronts(section, self._share(section))

    def _wavefronts(self, section: Section, share: float) -> float:
        """See `wavefronts`; warps read A, and wgmma reads B for each 64 rows."""
        rows, columns = self.plan.tile_m, self.plan.tile_n
        of_b = columns * (self.loaded(section) + rows / ROWS)
        return (share + rows * self.again(section) + of_b) * _SIZE / WAVEFRONT

    @property
    def boxed(self) -> bool:
        """True if there are boxes of so many rows."""
        return all(map(self._boxes, self.sections))

    def _boxes(self, section: Section) -> Sequence[Box]:
        """Return boxes of a tile's rows."""
        return _boxes(self.plan.tile_m, section.extents, section.taps, _steps(section), self.strips)

    def cheapest(self, those: Sequence[Section]) -> Box:
        """See Warpgroups; of several the one of the fewest lines."""

        def work(box: Box) -> tuple[float, int]:
            return sum(self.work(section, box) for section in those), math.prod(self._read_of(those[0], box))

        boxes = (box for box in self._boxes(those[0]) if all(max(self._read_of(of, box)) <= _FURTHEST for of in those))
        return min(boxes, key=work)

    def work(self, section: Section, box: Box) -> float:
        """See Warpgroups; lines of the box come for all taps."""
        share = math.prod(self._read_of(section, box)) / math.prod(section.taps)
        read = WAVEFRONT_COST * self._wavefronts(section, share)
        moved = TMA_COST * _SIZE * self._moved(share, self.loaded(section))
        each = max(self.term, read, moved) * section.k / self.sharing_k
        return math.prod(box.counts) * (each + gaps_cost(self, section, box))

    def lengths(self, section: Section) -> Extents:
        """Return the lengths of the box of the data that a tile reads: with what further taps read."""
        return self._read_of(section, self.box(section))

    @staticmethod
    def _read_of(section: Section, box: Box) -> Extents:
        """See `lengths`."""
        return _lengths(box, section.extents[-1], section.taps, _steps(section))

    def lines(self, section: Section) -> int:
        """Return the lines of that box."""
        return math.prod(self.lengths(section))

    def begin(self, args: Arguments, aligned: bool) -> dict[str, Expr]:
        """See Form; data that TMA does not load have no map."""
        return super().begin(args, aligned and _loads(type(self), self.problem))

    def slice(self, section: Section) -> Extents:
        """See Warpgroups; each block loads its own boxes."""
        return self.lengths(section)

    def flat(self, section: Section) -> bool:  # noqa: ARG002
        """See Warpgroups; boxes are of positions, whatever the taps."""
        return False

    def map_name(self, section: Section) -> str:
        """See Warpgroups."""
        return super().map_name(section) + "_images" * self.box(section).fastest

    def ordered(self, channel: Any, place: Sequence[Any]) -> Sequence[Any]:
        """See Warpgroups."""
        return channel, *reversed(place)

    def axes(self, section: Section) -> Sequence[tuple[int, int]]:
        """See Warpgroups."""
        channels, *axes = super().axes(section)
        return channels, *reversed(self.box(section).ordered(axes[::-1]))

    def map_box(self, section: Section) -> Sequence[int]:
        """See Warpgroups."""
        return self.ordered(self.width, self.box(section).ordered(self.lengths(section)))

    def at_full(self, box: Index) -> Index:
        """Return the place of the barrier of a box that its loads complete."""
        return self.full(2 * self.plan.stages) + box * self.barrier

    def at_empty(self, box: Index) -> Index:
        """Return the place of the barrier of a box that its readers complete."""
        return self.at_full(box) + self.held * self.barrier

    def first(self, box: Index) -> Index:
        """Return the first element of a box in shared memory."""
        return self.begin_stages + self.plan.stages * self.stage + box * self.box_elements

    def readers(self, section: Section) -> int:
        """Return the tiles of k that read one box."""
        return self.tiles(section) // self.boxes

    @property
    def shares(self) -> bool:
        """See Warpgroups; parts have whole boxes."""
        return super().shares and ceil_div(self.problem.in_channels, self.width) % self.sharing_k == 0

    def loads(self, args: Arguments, block: Block, begun: Any, memory: Expr) -> _Boxes:
        """See Warpgroups."""
        return _Boxes(self, args, block, begun, memory)

    def number(self, turn: Index) -> Index:
        """Return the number of the first box of a turn; all tiles of columns read the same."""
        return turn * self.boxes if self.turns[0] > 1 else 0

    def multiply(self, loads: Any, memory: Expr, sums: Expr, registers: Sequence[Expr], turn: Index = 0) -> None:
        """See Warpgroups; rows of the next terms are read while those of the last two are multiplied.

        Boxes of tiles of columns are there after the first `turn`.
        """
        if self.strips > 1:
            self._multiply_strips(loads, memory, sums, registers[0], turn)
            return
        block, (fragments, places), steps = self.tile_of(loads.block, turn), registers, _LINE // _TERMS
        tiles, stages, lane = self.tiles(block.section), self.plan.stages, block.thread % 32
        each, before, box = self.readers(block.section), turn * tiles, self.number(turn)
        first, kept = [turn == 0] if self.turns[1] > 1 else [], self.keeps(block.section)
        with when(first):
            loads.wait(box)
        read = partial(self._read, block, memory, box, fragments, places)
        # Of a single tile in a loop over turns nvcc would serialize products between which A is read.
        for k in range(steps if tiles == 1 else 1):
            read(0, k)
        with build.serial(0, tiles) as step:
            base = self.filled(memory, step if kept else before + step)
            for k in range(steps):
                wgmma_fence()
                b = base + k * _TERMS
                wgmma_registers(self.problem.dtype, self.plan.tile_n, sums, fragments, 4 * k, memory, b)
                wgmma_commit()
                wgmma_wait(2)
                if k == 1 and not kept:
                    with when([before + step >= 1, lane < self.sharing]):
                        self.give_back(block, memory, (before + step - 1) % stages)
                if k + 1 < steps:
                    if tiles > 1:
                        read(step, k + 1)
                    continue
                if self.held > 1:
                    with when([step % each == each - 1, lane == 0]):
                        arrive(memory, self.at_empty((box + step // each) % self.held))
                with when([step + 1 < tiles]):
                    if self.boxes > 1:
                        with when([(step + 1) % each == 0, *first]):
                            loads.wait(box + (step + 1) // each)
                    read(step + 1, 0)
        wgmma_wait(0)

    def _multiply_strips(self, loads: Any, memory: Expr, sums: Expr, fragments: Expr, turn: Index) -> None:
        """Multiply box by box: what is read of a line is multiplied by all taps for which a strip has its sums."""
        block, first, steps = self.tile_of(loads.block, turn), self.number(turn), _LINE // _TERMS
        section, (depth, high, across) = block.section, block.section.taps
        with when([turn == 0]), build.serial(0, self.tiles(section)) as tile:
            self.filled(memory, tile)
        count = self.strips + high - 1
        with build.serial(0, self.boxes) as number:
            loads.wait(first + number)
            box = self.first((first + number) % self.held)
            with build.serial(0, depth * across) as column:
                d, w = unravel(column, (depth, across))
                for line in range(count):
                    begin = line % 2 * 4 * steps
                    last = ravel((d, high - 1, w), section.taps[1:])
                    place = self.place_of(section, block.thread, last, 0, line) + box
                    for k in range(steps):
                        ldmatrix(fragments, begin + 4 * k, 4, memory, place ^ k * _TERMS, transposed=False)
                    wgmma_fence()
                    for strip in range(max(0, line - high + 1), min(self.strips, line + 1)):
                        tap = ravel((d, high - 1 - line + strip, w), section.taps[1:])
                        b = self.begin_stages + (number * math.prod(section.taps) + tap) * self.stage
                        for k in range(steps):
                            at, to = begin + 4 * k, strip * self.sums // self.strips
                            of_b = b + k * _TERMS
                            wgmma_registers(
                                self.problem.dtype, self.plan.tile_n, sums, fragments, at, memory, of_b, first=to
                            )
                    wgmma_commit()
                    wgmma_wait(0 if line == count - 1 and count % 2 else 1)
            wgmma_wait(0)
            if self.held > 1:
                with when([block.thread % 32 == 0]):
                    arrive(memory, self.at_empty((first + number) % self.held))

    def _read(
        self, block: Block, memory: Expr, first: Index, fragments: Expr, places: Expr, tile: Index, k: int
    ) -> None:
        """Read the thread's rows of 16 terms of a tile of k, from the tap's lines; remember where the line is.

        The tiles begin in box number `first`.
        """
        line, term = divmod(k * _TERMS, self.width)
        if term == 0:
            tap = tile % self.readers(block.section) * (_LINE // self.width) + line
            box = (first + tile // self.readers(block.section)) % self.held
            place = self.place_of(block.section, block.thread, tap, block.corner[-1])
            build.buffer_store(places, place + self.first(box), [line])
        ldmatrix(fragments, 4 * k, 4, memory, places[line] ^ term, transposed=False)

    def place_of(self, section: Section, thread: Index, tap: Index, first: Index, strip: int = 0) -> Index:
        """Return the place in a box of the row and the terms that a lane gives to ldmatrix, the first of a line.

        The box begins in the line of position `first` of an image, if rows go on in the next line. The row is of the
        `strip`, or of a line as far behind the last one.
        """
        box, lengths, lane, width = self.box(section), self.lengths(section), thread % 32, section.extents[-1]
        row = thread // 32 * _TERMS + lane % _TERMS
        number = first % width + row
        within = [0, 0, number // width, number % width] if _goes_on(box, section) else self._within(section, row)
        within[2] = within[2] + strip
        taps = unravel(tap, section.taps)
        further = [(count - 1 - t) * step for count, t, step in zip(section.taps, taps, _steps(section), strict=True)]
        at = [x + y for x, y in zip(within, [0, *further], strict=True)]
        line = ravel(box.ordered(at), box.ordered(lengths)[1:])
        return self.swizzled(line * self.width + lane // _TERMS * _LANES)

    def _within(self, section: Section, row: Index) -> list[Index]:
        """Return where in the box of a tile's rows those of the first strip are."""
        box = self.box(section)
        image, d, h, w = box.lengths
        image, d, h, w = box.within(row, (image, d, h // self.strips, w))
        return [image, d, h * self.strips, w]

    def cells(self, thread: Index) -> Iterator[Cells]:
        """See Form; of each strip those of a warpgroup."""
        if self.strips == 1:
            yield from super().cells(thread)
            return
        box = self.box(self.sections[0])
        for strip, (start, extents, of) in itertools.product(range(self.strips), super().cells(thread)):

            def cell(i: Index, part: Index, strip: int = strip, of: Any = of) -> tuple[Index, Index, Index]:
                row, column, number = of(i, part)
                image, d, h, w = self._within(self.sections[0], row)
                full = ravel(box.ordered([image, d, h + strip, w]), box.ordered(box.lengths)[1:])
                return full, column, strip * (self.sums // self.strips) + number

            yield start, extents, cell

    def swizzled(self, at: Index) -> Index:
        """Return the place of an element of a box with the swizzle of its lines."""
        return at ^ (at // _LINE % (self.width // _LANES)) * _LANES

    def reads(self, thread: int) -> Iterator[tuple[Index, int]]:
        """See Form."""
        yield self.place_of(self.sections[0], thread, 0, 0), _LANES * _SIZE


class _Boxes(Loads):
    """Boxes of the data, and tiles of B, as there is room for them."""

    form: Held

    def begin(self) -> None:
        """See Loads; the barriers of boxes."""
        form = self.form
        super().begin()
        with build.unroll(form.held) as box:
            init(self.memory, form.at_full(box), form.holders if self.by_elements else 1)
            init(self.memory, form.at_empty(box), form.holders // 32)

    @property
    def arrivals(self) -> int:
        return 1

    @property
    def ahead(self) -> int:
        """See Loads; a box waits until the one that was there is read, not later than in this turn."""
        return min(super().ahead, self.form.held * self.form.readers(self.section))

    def emit(self, turn: Index = 0) -> None:
        """See Loads; of several turns those tiles whose stages are given back before the next begins."""
        form, each, lane = self.form, self.form.readers(self.section), self.block.thread % 32
        with when([lane == 0]), build.serial(*self.numbers(turn)) as tile:
            if not self.by_elements:
                with when([tile % each == 0, *([tile < self.section.tiles_k] if form.turns[1] > 1 else [])]):
                    self._load(tile // each)
            stage, kept = tile % form.plan.stages, form.keeps(self.section)
            with when([tile < self.section.tiles_k] if kept else []):
                if not kept:
                    wait_phase(self.memory, form.empty(stage), (tile // form.plan.stages + 1) % 2)
                expect(self.memory, form.full(stage), form.stage * _SIZE)
                of_b = tile % self.section.tiles_k if form.turns[0] > 1 else self.first + tile
                self.load_b(of_b, form.begin_stages + stage * form.stage, form.full(stage))

    def _load(self, number: Index) -> None:
        """Begin to load a box, as soon as the one before the last is read."""
        form, box = self.form, number % self.form.held
        wait_phase(self.memory, form.at_empty(box), (number // form.held + 1) % 2)
        expect(self.memory, form.at_full(box), form.lines(self.section) * form.width * _SIZE)
        channel, at = self._begins(number)
        corner = form.ordered(channel, form.box(self.section).ordered(at))
        load_box(self.memory, form.first(box), self.map, form.at_full(box), corner)

    def _channel(self, number: Index) -> Index:
        """Return the first channel of a box within the group; boxes of the next tile of rows begin anew."""
        form = self.form
        first = self.block.part * form.boxes if form.sharing_k > 1 else 0
        return (number % form.boxes if form.turns[0] > 1 else first + number) * form.width

    def _begins(self, number: Index) -> tuple[Index, list[Index]]:
        """Return the first channel of a box, and the image and place in the data where it begins."""
        section = self.section
        lows = [run.x0 - (run.taps - 1) * run.x_step for run in section.runs]
        image, d, h, w = self.form.tile_of(self.block, number // self.form.boxes).corner
        if _goes_on(self.form.box(section), section):
            h, w = w // section.extents[-1], 0
        at = [y + low for y, low in zip((image, d, h, w), [0, *lows], strict=True)]
        return self.form.of_group(section, self.block.group, self._channel(number), at)

    def wait(self, number: Index) -> None:
        """Wait for a box; fill it before, if TMA does not."""
        form, box = self.form, number % self.form.held
        if self.by_elements:
            self._fill(number)
            arrive(self.memory, form.at_full(box))
        wait_phase(self.memory, form.at_full(box), number // form.held % 2)

    def _fill(self, number: Index) -> None:
        """Copy a box by elements: the place of four of a line, or of as many as vectors have, is found once."""
        form, geometry = self.form, self.section.geometry
        (channel, corner), first = self._begins(number), self._channel(number)
        vector = max(_FOUR, math.gcd(geometry.in_channels, _LANES))
        across, lengths, together = form.width // vector, form.lengths(self.section), max(1, FILLED // vector)
        total, data = form.lines(self.section) * across, self.args.flat_data()
        staged, zero = local(together * vector, form.dtype), tirx.const(0, form.dtype)

        def at(turn: Expr, part: int) -> tuple[Expr, Index, Index]:
            element = (turn * together + part) * form.holders + self.block.thread
            return element, element // across, element % across * vector

        with build.serial(0, ceil_div(total, form.holders * together)) as turn:
            # All are begun before the first is stored.
            for part in range(together):
                element, line, term = at(turn, part)
                place = form.box(self.section).within(line, lengths)
                image, *x = (first + along for first, along in zip(corner, place, strict=True))
                inside = [element < total, image < geometry.batch, first + term < geometry.in_channels]
                for y, extent in zip(x, geometry.data, strict=True):
                    inside += [y >= 0, y < extent]
                source, ragged = self.args.place(image, channel + term, x), geometry.in_channels % vector > 0
                for lane in range(vector):
                    build.buffer_store(staged, zero, [part * vector + lane])
                with when(inside):
                    for lane in range(vector):
                        with when([first + term + lane < geometry.in_channels] if ragged else []):
                            build.buffer_store(staged, data[source + lane], [part * vector + lane])
            for part in range(together):
                element, line, term = at(turn, part)
                to = form.first(number % form.held) + form.swizzled(line * form.width + term)
                with when([element < total]), build.vectorized(vector) as lane:
                    build.buffer_store(self.memory, staged[part * vector + lane], [to + lane])


def _loads(form: type[Held], problem: Problem) -> bool:
    """Return True if TMA can load lines of the data."""
    return form.turned or problem.in_channels % _LANES == 0


def _steps(section: Section) -> tuple[int, int, int]:
    d, h, w = (run.x_step for run in section.runs)
    return d, h, w


@lru_cache(1024)
def _boxes(
    rows: int, extents: Extents, taps: tuple[int, int, int], steps: tuple[int, int, int], strips: int
) -> Sequence[Box]:
    """Return boxes of so many rows: of those with as many lines and neighbours the one of the fewest tiles.

    Eight rows are in different banks: neighbours on the last axis, or images. Rows of one of the `strips` may also be
    all positions of an image in order, which go on in the next line.
    """
    image, d, h, w = extents
    divisors = [length for length in range(1, rows + 1) if rows % length == 0]
    boxes = [Box((1, 1, 1, rows), (image, d, 1, h * w))] if h > 1 and strips == 1 else []
    for image, d, h in itertools.product(divisors, repeat=3):
        if rows % (image * d * h) or h % strips:
            continue
        lengths = image, d, h, rows // (image * d * h)
        fastest = lengths[3] % _EIGHT > 0
        if lengths[0 if fastest else 3] % _EIGHT == 0:
            boxes.append(Box(lengths, extents, fastest))
    found: dict[tuple[int, int, bool], Box] = {}
    for box in boxes:
        read = _lengths(box, extents[-1], taps, steps)
        alike = math.prod(read), box.lengths[-1], box.fastest
        fewer = alike not in found or math.prod(box.counts) < math.prod(found[alike].counts)
        if fewer and max(read) <= _FURTHEST:
            found[alike] = box
    return list(found.values())


def _goes_on(box: Box, section: Section) -> bool:
    """Return True if the rows of a box are positions of an image in order."""
    return box.extents != section.extents


def _lengths(box: Box, width: int, taps: tuple[int, int, int], steps: tuple[int, int, int]) -> Extents:
    """Return the lengths of what taps read of the rows of a box, where lines have `width` positions.

    If rows go on in the next line, eight of them stay in different banks: what further taps read is padded to as many.
    """
    further = [(count - 1) * step for count, step in zip(taps, steps, strict=True)]
    image, d, h, w = box.lengths
    if box.extents[-1] != width:
        h, w, further[2] = ceil_div(w - 1, width) + 1, width, ceil_div(further[2], _EIGHT) * _EIGHT
    return image, d + further[0], h + further[1], w + further[2]


def _supports(form: type[Held], problem: Problem, target: CudaTarget) -> bool:
    """Return True if the target is a Hopper's own, lines are told from other groups', and several taps share them."""
    short = multiplied_type(problem) in ("float16", "bfloat16")
    served = problem.data_format == ("NCX" if form.turned else "NXC")
    if not (short and served and on_hopper(target)) or problem.batch == 0:
        return False
    whole = form.turned or problem.groups == 1 or problem.in_channels % line_of(problem.in_channels) == 0
    return whole and (_loads(form, problem) or problem.in_channels <= _LINE) and bool(_choices(form, problem))


def _choices(form: type[Held], problem: Problem) -> list[int]:
    """Return the numbers of last axes along which phases are joined to few products of whole tiles of k."""

    def suits(products: Sequence[Section]) -> bool:
        return (
            1 <= len(products) <= 8
            and all(section.k % _LINE == 0 for section in products)
            and any(math.prod(section.taps) > 1 for section in products)
            and max(section.n for section in products) >= _EIGHT
        )

    return [
        axes for axes in form.choices(problem) if suits(_products(problem, _COLUMNS[0], form.phases(problem, axes)))
    ]


def _turns(form: Held) -> list[tuple[int, int]]:
    """Return numbers of tiles of rows and columns of a block, beside that of the `form`, whose blocks have one.

    Boxes that come slowly, by elements, are for several tiles of columns; else one or all blocks of a multiprocessor
    have the tiles of rows that there are for it.
    """
    if not _loads(type(form), form.problem):
        return [(1, turns) for turns in _TURNS if turns * form.plan.tile_n < form.sections[0].n + form.plan.tile_n]
    return [(turns, 1) for turns in turns_of_rows(form)]


def _candidates(form: type[Held], problem: Problem, alone: bool) -> list[tuple[float, ClusterPlan]]:
    """Return plans to measure with their costs, the cheapest first; if `alone`, of blocks that share no loads."""
    found, clusters = [], _CLUSTERS[: 1 if alone or form.turned else None]
    for axes, rows in itertools.product(_choices(form, problem), _ROWS):
        products = _products(problem, _COLUMNS[0], form.phases(problem, axes))
        widest = max(section.n for section in products)
        narrow = [columns for columns in _COLUMNS if columns < widest]
        kept = max(section.tiles_k for section in products)
        counts = sorted({*_STAGES, kept if _STAGES[0] < kept <= _MOST_KEPT else _STAGES[0]})
        for columns, stages, cluster in itertools.product(_COLUMNS[: len(narrow) + 1], counts, clusters):
            plan = ClusterPlan(rows, columns, _LINE, 64, columns, stages, 1, axes, cluster)
            if columns % (_EIGHT * cluster):
                continue
            single = form(problem, plan)
            others = (form(problem, one) for one in (*by_turns(plan, _turns(single)), *sharing_terms(single)))
            # More stages are for a block that is alone and waits for its tiles, or for tiles that stay.
            many = stages > _FEW_STAGES and not single.few
            made = [one for one in (single, *others) if not many or all(map(one.keeps, one.sections))]
            found += [(cost(one), one.plan) for one in made if one.fits and one.has_registers]
        found += [(cost(one), one.plan) for one in _of_strips(form, problem, axes, rows)]
    return sorted(found, key=lambda pair: pair[0])


def _of_strips(form: type[Held], problem: Problem, axes: int, rows: int) -> list[Held]:
    """Return forms whose warpgroups have strips of `rows` in all, if columns are few and all taps stay there."""
    products = _products(problem, _COLUMNS[0], form.phases(problem, axes))
    section = products[0]
    one_product = len(products) == 1 and section.n <= _COLUMNS[0] and section.tiles_k <= _MOST_KEPT
    read_again = section.taps[1] > 1 and _steps(section)[1] == 1 and line_of(problem.in_channels) >= _LINE
    if rows <= ROWS or not one_product or not read_again:
        return []
    found, stages = [], max(_STAGES[0], section.tiles_k)
    for parts in range(1, _MOST_PARTS + 1):
        plan = ClusterPlan(rows * parts, _COLUMNS[0], _LINE, rows, _COLUMNS[0], stages, 1, axes)
        alone = form(problem, plan)
        if alone.boxed:
            found += [alone, *(form(problem, one) for one in by_turns(plan, _turns(alone)) if not one.storing)]
    return [one for one in found if one.fits and one.has_registers]


def algorithm_of(form: type[Held], caveat: str = "") -> Algorithm[CudaTarget, ClusterPlan]:
    """Return the record of the algorithm whose kernels have a `form`."""
    return cluster_algorithm(form, partial(_supports, form), partial(_candidates, form), caveat)


ALGORITHM = algorithm_of(Held)
