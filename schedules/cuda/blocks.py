"""The parts that kernels for products share: the work of each block, the gathered rows, and the way to the output."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import tirx as build
from tvm.tirx import PrimFunc

from tvm_deconv.compute.gather import Section, ravel, reached
from tvm_deconv.compute.indexing import Index, unravel
from tvm_deconv.problem import Problem, element_bytes
from tvm_deconv.problem.arithmetic import ceil_div
from tvm_deconv.schedules.cuda.emit import (
    Arguments,
    Place,
    Rounding,
    aligned_or_not,
    each,
    launch,
    local,
    pack_filter,
    when,
)

#: Sections in one launch: each is a copy of the kernel's body, and nvcc's time grows with it.
_TOGETHER = 8
_BITS = 32
#: Bytes of memory that are read or written at a time.
_SECTOR = 32


@dataclass(frozen=True, slots=True)
class Term:
    """A term of the sums: its tap, flat and along each axis, how far from that of the first tap and channel it reads.

    It is zero unless the conditions hold under which it `exists`.
    """

    tap: Index
    taps: tuple[Index, ...]
    shift: Index
    exists: list[Expr]


#: The rows and columns that a thread's sums are, from a first column on: extents, and of two indices within them row,
#: column from the first on, and the number of the sum; columns that are stored together are neighbouring ones.
Cells: TypeAlias = tuple[Index, tuple[int, int], Callable[[Index, Index], tuple[Index, Index, Index]]]

#: Images and positions along each axis.
Extents: TypeAlias = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class Box:
    """The box that a tile's rows are, and that of all rows, whose last axis may be all positions, of all images too.

    Rows that follow each other are neighbours on the last axis, or images if these are `fastest`. The last axis may
    also be all positions of turned data, which are `padded`: some are beyond an axis, and no rows.
    """

    lengths: Extents
    extents: Extents
    fastest: bool = False
    padded: Extents | None = None

    @property
    def counts(self) -> list[int]:
        """How many boxes there are along images and each axis."""
        return [-(-extent // length) for extent, length in zip(self.extents, self.lengths, strict=True)]

    def neighbours(self, section: Section) -> int:
        """Return how many rows that follow each other are neighbours on the last axis, at most."""
        return 1 if self.fastest else min(self.lengths[-1], section.extents[-1])

    def ordered(self, place: Sequence[Any]) -> list[Any]:
        """Return what there is of images and axes in the order of rows, the fastest last."""
        image, *axes = place
        return [*axes, image] if self.fastest else [image, *axes]

    def within(self, number: Index, lengths: Sequence[int]) -> list[Index]:
        """Return image and place along each axis of a row of a box of these lengths, or of one that is larger."""
        at = unravel(number, self.ordered(lengths))
        return [at[-1], *at[:-1]] if self.fastest else at


@dataclass(frozen=True, slots=True)
class Block:
    """The work of one block: a tile of the product of a group, over one part of its terms; its rows may be a box.

    Of several tiles of rows or columns it is the first.
    It is at `place` in its cluster, of rows and columns of tiles. There it may be beyond the last: its tile `exists` by
    these conditions. Its columns that go to the output begin at number `column`.
    """

    section: Section
    part: Index
    group: Index
    tile_m: Index
    tile_n: Index
    thread: Expr
    box: Box | None = None
    place: tuple[Index, Index] = (0, 0)
    exists: tuple[Expr, ...] = ()
    column: Index = 0

    @property
    def corner(self) -> list[Index]:
        """The image and the position of the first row of a box."""
        assert self.box is not None
        numbers = unravel(self.tile_m, self.box.counts)
        return [number * length for number, length in zip(numbers, self.box.lengths, strict=True)]

    def position(self, row: Index, first: Index, rows: int) -> tuple[Index, Sequence[Index], list[Expr]]:
        """Return image and position of a row of the tile of `rows`, the `first` in order, and when it exists."""
        if self.box is None:
            m = first + row
            ragged = [m < self.section.m] if self.section.m % rows else []
            return *self.section.position(m), [*ragged, *self.exists]
        extents, lengths = self.box.extents, self.box.lengths
        at = [corner + within for corner, within in zip(self.corner, self.box.within(row, lengths), strict=True)]
        inside = [x < extent for x, extent, length in zip(at, extents, lengths, strict=True) if extent % length]
        if extents != self.section.extents:
            counted = self.box.padded or self.section.extents
            at = unravel(ravel(at, extents[1:]), counted)
            inside += [
                x < extent for x, extent, of in zip(at, self.section.extents, counted, strict=True) if extent < of
            ]
        return at[0], at[1:], [*inside, *self.exists]


def tiles_of(section: Section, tile_m: int, box: Box | None) -> int:
    """Return the number of tiles of rows."""
    return -(-section.m // tile_m) if box is None else math.prod(box.counts)


def packed_elements(all_sections: Sequence[Section]) -> int:
    """Return the number of elements of the packed filter of all sections; at least one."""
    return max(1, sum(math.prod(section.shape) for section in all_sections))


def pack_sections(
    problem: Problem,
    all_sections: Sequence[Section],
    dtype: str,
    roundings: Sequence[Rounding],
    order: Callable[[Section, Expr], Sequence[Index]],
    extra: int = 0,
    write: Callable[[Expr], None] | None = None,
) -> PrimFunc:
    """Build ``pack``, which brings the filter into the tiles of its sections, once for each of `roundings`.

    `order` tells which group, tile of n, term and column within the tile an element is. Behind these are `extra`
    elements, which `write` writes.
    """

    def place(section: Section) -> Place:
        def of(number: Expr) -> tuple[Index, Index, Index, list[Index], list[Expr]]:
            g, tile, k, within = order(section, number)
            n = tile * section.tile_n + within
            ci, taps = section.term(k)
            co, phases = section.column(n)
            conditions = [n < section.n] if section.n % section.tile_n else []
            conditions += [k < section.k] if section.k % section.tile_k else []
            conditions += [ci < section.geometry.in_channels] if section.channels > section.geometry.in_channels else []
            element = section.element(taps, phases)
            for at, run, extent in zip(element, section.runs, section.geometry.kernel, strict=True):
                # Of merged phases some lack taps that others have.
                conditions += [at >= 0] if run.k0 < 0 else []
                last = run.k0 + run.count - 1 + (run.taps - 1) * run.k_step
                conditions += [at < extent] if last >= extent else []
            return g, ci, co, element, conditions

        return of

    elements = packed_elements(all_sections)
    parts = [
        (number * elements + section.offset, math.prod(section.shape), place(section), rounding)
        for number, rounding in enumerate(roundings)
        for section in all_sections
    ]
    return pack_filter(problem, len(roundings) * elements + extra, dtype, parts, write)


def each_block(
    all_sections: Sequence[Section],
    extents_of: tuple[int, tuple[int, int], tuple[int, int, int]],
    box: Callable[[Section], Box | None],
    threads: int,
    split: int,
    allocate: Callable[[], tuple[Expr, ...]],
    body: Callable[..., None],
) -> None:
    """Launch the blocks of all sections: `body` gets a `Block` and the memory of the kernel from `allocate`.

    The extents are the rows of a tile, the tiles of rows and of columns of a block, and those whose blocks are a
    cluster, behind the blocks that have parts of the terms of each: these follow each other.

    With channels second sections store to the same sectors. There blocks of the same rows follow each other, if all
    sections have the same tiles of rows, so that sectors are whole before they leave the cache.
    """
    tile_m, turns, (parts, *cluster) = extents_of
    down, across = cluster
    assert 1 in (split, parts)

    def tiles_in(section: Section) -> list[int]:
        return list(map(ceil_div, (tiles_of(section, tile_m, box(section)), section.tiles_n), turns))

    def extents(section: Section) -> tuple[int, ...]:
        clusters = (ceil_div(count, of) for count, of in zip(tiles_in(section), cluster, strict=True))
        return split, section.geometry.groups, *clusters, *[parts] * (parts > 1), down, across

    def choose(
        rest: Sequence[Section], of_all: Sequence[Index], first: int, number: Expr, thread: Expr, memory: Sequence[Expr]
    ) -> None:
        section, common = rest[0], len(of_all)
        end = first + math.prod(extents(section)[common:])

        def here() -> None:
            own = unravel(number - first, extents(section)[common:])
            part, group, m, n, *of_cluster, row, column = (*of_all, *own)
            part, place = (of_cluster or [part])[0], (row, column)
            at = m * down + place[0], n * across + place[1]
            exists = [x < count for x, count, of in zip(at, tiles_in(section), cluster, strict=True) if count % of]
            at = at[0] * turns[0], at[1] * turns[1]
            body(Block(section, part, group, *at, thread, box(section), place, tuple(exists)), *memory)

        if len(rest) == 1:
            here()
            return
        with build.If(number < end):
            with build.Then():
                here()
            with build.Else():
                choose(rest[1:], of_all, end, number, thread, memory)

    for start in range(0, len(all_sections), _TOGETHER):
        together = all_sections[start : start + _TOGETHER]
        rows = {extents(section)[:3] for section in together}
        outer = () if together[0].channels_last or len(rows) > 1 else rows.pop()
        inner = sum(math.prod(extents(section)[len(outer) :]) for section in together)
        with launch(math.prod(outer) * inner, threads) as (block, thread):
            *of_all, number = unravel(block, (*outer, inner))
            choose(together, of_all, 0, number, thread, allocate())


def parts_of(section: Section, split: int, part: Index) -> tuple[Index, Index]:
    """Return the first tile of k of a part of a sum, and the number of its tiles: 0 in the last parts of short sums."""
    if split == 1:
        return 0, section.tiles_k
    length = -(-section.tiles_k // split)
    return part * length, tirx.max(tirx.min(section.tiles_k - part * length, length), 0)


class Rows:
    """Rows of A that a thread gathers: where the first tap reads, and which taps lie inside of the data.

    Both are worked out once, the latter as bits if there are few taps, so that a term is an addition and a test.
    """

    def __init__(self, args: Arguments, block: Block, tile_m: int, rows: Sequence[Index]) -> None:
        """Work out row ``tile_m * block.tile_m + row`` for each of `rows`, which are less than `tile_m`."""
        self._args, self._section, taps = args, block.section, math.prod(block.section.taps)
        self._bits = "uint32" if taps <= _BITS else "uint64" if taps <= 2 * _BITS else None
        self._ragged = block.section.m % tile_m != 0
        self._places, self._at = local(len(rows), args.index), local(3 * len(rows), args.index)
        self._inside = local(len(rows), self._bits or "uint32")
        self._checked = self._ragged or any(self._along(axis, args.const(0)) for axis in range(3))
        for number, row in enumerate(rows):
            m = block.tile_m * args.const(tile_m) + row
            image, position = block.section.position(m)
            for axis, y in enumerate(position):
                build.buffer_store(self._at, y + args.const(0), [3 * number + axis])
            x, _ = block.section.source(self._position(number), (0, 0, 0))
            channel = block.group * block.section.geometry.in_channels
            build.buffer_store(self._places, args.place(image, channel, x) + args.const(0), [number])
            if self._checked:
                build.buffer_store(self._inside, self._taps_inside(number, m), [number])

    def _position(self, number: int) -> list[Index]:
        return [self._at[3 * number + axis] for axis in range(3)]

    def _along(self, axis: int, y: Expr) -> list[int]:
        """Return the taps along an axis that may read beyond the data."""
        return [tap for tap in range(self._section.taps[axis]) if self._section.along(axis, y, tap)[1]]

    def _taps_inside(self, number: int, m: Expr) -> Expr:
        """Return the taps of a row that are inside, a bit each; all of them or none, if they are too many."""
        section, dtype = self._section, self._bits or "uint32"
        every = (1 << math.prod(section.taps)) - 1 if self._bits else 1
        bits: Expr = tirx.const(every, dtype)
        if self._bits:
            for axis, y in enumerate(self._position(number)):
                for tap in self._along(axis, y):
                    those = [bit for bit in range(every.bit_length()) if unravel(bit, section.taps)[axis] == tap]
                    others = tirx.const(every - sum(1 << bit for bit in those), dtype)
                    inside = tirx.all(*section.along(axis, y, tap)[1])
                    bits = bits & tirx.Select(inside, tirx.const(every, dtype), others)
        if self._ragged:
            bits = tirx.Select(m < section.m, bits, tirx.const(0, dtype))
        return bits

    def term(self, tile: Index, within: Index) -> Term:
        """Return term number `within` of a tile of k; the tile's terms are of one tap if the section's are `alike`."""
        section, args, channels = self._section, self._args, self._section.geometry.in_channels
        first = tile * section.tile_k
        exists: list[Expr] = []
        if section.alike:
            first_channel, tap = section.tap(tile)
            channel = first_channel + within
            if section.channels > channels:
                exists = [channel < channels]
        else:
            tap, channel = (first + within) // section.channels, (first + within) % section.channels
            if section.k % section.tile_k:
                exists = [first + within < section.k]
        taps = unravel(tap, section.taps)
        shifts = [-t * run.x_step if run.taps > 1 else 0 for t, run in zip(taps, section.runs, strict=True)]
        return Term(tap, tuple(taps), args.place(0, channel, shifts), exists)

    def source(self, number: int, term: Term) -> tuple[Expr, list[Expr]]:
        """Return the number of the data element that a term reads in a row, and the conditions that it exists."""
        inside = list(term.exists)
        if self._checked and self._bits:
            bit = tirx.const(1, self._bits) << (term.tap + self._args.const(0)).astype(self._bits)
            inside.append((self._inside[number] & bit) != tirx.const(0, self._bits))
        elif self._checked:
            inside += self._section.source(self._position(number), term.taps)[1]
            inside += [self._inside[number] != tirx.const(0, "uint32")] if self._ragged else []
        return self._places[number] + term.shift, inside


def neighbours(section: Section, columns: int) -> int:
    """Return how many phases of the last axis are neighbouring columns, if `columns` at a time go to the output."""
    return 1 if section.channels_last else math.gcd(section.counts[2], columns)


def stored_together(problem: Problem, section: Section, columns: int, most: int) -> int:
    """Return how many sums, as `store_tile` takes them, are neighbours in the output and exist together, at `most`.

    With channels last and one group those of neighbouring phases follow each other, too: where lines of the output, the
    first phase and the steps from one position to the next are multiples, all of them are in it or none.
    """
    axis, extent = section.geometry.axes[2], section.geometry.output[2]
    most = min(most, 16 // element_bytes(problem.output_dtype))
    if section.channels_last:
        run = section.runs[2]
        pixels = math.gcd(run.count, axis.stride, run.start - axis.shift, extent) if problem.groups == 1 else 1
        whole = section.geometry.out_channels * pixels
    else:
        gapless = neighbours(section, columns) == axis.stride and (axis.end + 1) * axis.stride == extent
        whole = extent if gapless else 1
    return math.gcd(whole, columns if section.channels_last else most, most)


def sectors(section: Section, columns: int, rows: int, size: int) -> float:
    """Return how many bytes the sectors of memory have that a tile is stored to, for each byte of it.

    `columns` of elements of `size` bytes go to the output at a time, of so many `rows` that are neighbours on the last
    axis. Phases that lie apart leave gaps in sectors, and so do few neighbours.
    """
    stride, channels = section.geometry.axes[2].stride, section.geometry.out_channels
    if section.channels_last:
        side_by_side = min(columns, channels * section.counts[2] if columns >= channels else channels)
        apart = section.geometry.groups * channels * stride
    else:
        side_by_side, apart = neighbours(section, columns), stride
    elements = _SECTOR // size
    if apart > elements:
        taken: float = ceil_div(side_by_side, elements)
    else:
        taken = apart / elements if section.channels_last else max(apart / elements, 1 / rows)
    return max(1.0, taken * elements / side_by_side)


def store_tile(
    args: Arguments,
    block: Block,
    extents: tuple[int, int],
    first_column: Index,
    threads: int,
    split: int,
    together: int,
    rounded: bool,
    value: Callable[[Index, Index], Expr],
    few: int = 0,
) -> None:
    """Write a tile of C, ``extents`` rows by columns from `first_column` of the block's tile on, to the output.

    Threads take elements in the order in which they lie in the output, as far as the tile goes, `together` at a time.
    They do so in a loop of a `few` steps each if that is not 0. With channels second a thread has few rows, of many
    channels, so that their places are found once.
    `value` of a row and a column is the sum, or what it became if it is `rounded`. A part of a split sum goes to the
    workspace, at the place of its output element.
    """
    section, (rows, columns), thread = block.section, extents, block.thread

    def store(cells: Sequence[Sequence[Index]]) -> None:
        """Store neighbours, whose rows and columns are these."""
        row, column = cells[0]
        n = block.tile_n * section.tile_n + first_column + column
        image, position, exists = block.position(row, block.tile_m * args.const(rows), rows)
        co, phases = section.column(n)
        i, inside = section.target(position, phases)
        inside += exists
        if section.n % section.tile_n:
            inside.append(n < section.n)
        channel = block.group * section.geometry.out_channels + co
        with when(inside):
            if split > 1:
                where = block.part * args.const(args.outputs) + args.flat(image, channel, i)
                build.buffer_store(args.workspace, value(row, column), [where])
            elif rounded:
                with build.vectorized(together) if together > 1 else nullcontext(0) as lane:
                    where = args.flat(image, channel, i) + lane
                    build.buffer_store(args.flat_out(), value(row, column + lane), [where])
            elif together > 1:
                args.finish_vector(image, channel, i, [value(*at) for at in cells])
            else:
                args.finish(image, channel, i, value(row, column))

    if section.channels_last:
        total = rows * columns // together
        with _steps(total, threads, few, thread) as number:
            store([unravel(number * together + lane, (rows, columns)) for lane in range(together)])
        return
    # Of a line, which is all rows and phases of one channel, threads have parts by turns; or they have several lines.
    inner = neighbours(section, columns)
    line, lines = rows * inner // together, columns // inner
    at_once = max(1, threads // line)
    with _steps(line, threads, 1 if few else 0, thread) if at_once == 1 else nullcontext(thread % line) as cell:
        first, end = (thread // line, at_once * line) if at_once > 1 else (0, threads)
        with when([thread < end] if end < threads else []), _steps(lines, at_once, few, first) as number:
            places = [unravel(cell * together + lane, (rows, inner)) for lane in range(together)]
            store([(row, number * inner + phase) for row, phase in places])


@contextlib.contextmanager
def _steps(count: int, at_once: int, few: int, first: Index) -> Iterator[Index]:
    """Take numbers from `first` on, `at_once` further in each step, if they are less than `count`.

    Steps are in a loop of a `few` each if that is not 0.
    """
    steps = few or ceil_div(count, at_once)
    with (
        build.serial(0, ceil_div(count, at_once * steps)) if few else nullcontext(0) as turn,
        build.unroll(steps) as step,
    ):
        number = (turn * steps + step) * at_once + first
        with when([number < count] if count % (at_once * steps) else []):
            yield number


def store_rows(args: Arguments, block: Block, rows: int, threads: int, sums: Callable[[Index], Expr]) -> None:
    """Write a tile of C, which has all columns of its section, to the output: each thread all columns of a row.

    So a row's place in the output is found once, and those of its columns are numbers. `sums` of a row is an array.
    """
    section, channels = block.section, block.section.geometry.out_channels
    first, every = block.group * channels, list(itertools.product(*map(range, section.counts)))
    place = local(1, args.index)
    with build.serial(0, ceil_div(rows, threads)) as turn:
        row = turn * threads + block.thread
        with when([row < rows] if rows % threads else []):
            image, position, exists = block.position(row, block.tile_m * args.const(rows), rows)
            with when(exists):
                of_row = sums(row)
                values = [
                    args.finished(first, [of_row[number * channels + channel] for channel in range(channels)])
                    for number in range(len(every))
                ]
                build.buffer_store(place, args.flat(image, first, section.target(position, (0, 0, 0))[0]), [0])
                for phases, of_phase in zip(every, values, strict=True):
                    inside = section.target(position, phases)[1]  # of an axis with one position these are numbers
                    if any(condition is False for condition in inside):
                        continue
                    with when([condition for condition in inside if condition is not True]):
                        for channel in range(channels):
                            where = place[0] + args.flat(0, channel, phases)
                            build.buffer_store(args.flat_out(), of_phase[channel], [where])


def store_sums(args: Arguments, block: Block, rows: int, sums: Expr, cells: Sequence[Cells]) -> None:
    """Write a thread's sums of a tile of C to the output from where they are, each of its `cells` at once.

    All have the same rows, whose places in the output are found once. If the output does not begin at a multiple of
    what is stored at once, its elements are stored one by one.
    """
    section, (_, (count, together), row_of) = block.section, cells[0]
    places, there, positions = local(count, args.index), local(count, "bool"), []
    first = block.group * section.geometry.out_channels
    for i in range(count):
        image, position, exists = block.position(row_of(i, 0)[0], block.tile_m * args.const(rows), rows)
        build.buffer_store(places, args.flat(image, first, section.target(position, (0, 0, 0))[0]) + args.const(0), [i])
        build.buffer_store(there, tirx.all(*exists) if exists else tirx.const(True, "bool"), [i])
        positions.append(position)

    def store(each: int) -> None:
        out = args.flat_out()
        for start, _, cell in cells:
            n = block.tile_n * section.tile_n + block.column + start + cell(0, 0)[1]
            channel, phases = section.column(n)
            with when([n < section.n] if section.n % section.tile_n else []):
                # Of all rows, before any is stored: so what they share is loaded once.
                rows_of_it = [[sums[cell(i, part)[2]] for part in range(together)] for i in range(count)]
                values = [args.finished(first + channel, of_row) for of_row in rows_of_it]
                for i, lane in itertools.product(range(count), range(0, together, each)):
                    with (
                        when([there[i], *section.target(positions[i], phases)[1]]),
                        build.vectorized(each) if each > 1 else nullcontext(0) as within,
                    ):
                        to = places[i] + args.flat(0, channel, phases) + lane + within
                        build.buffer_store(out, values[i][lane + within], [to])

    size = together * element_bytes(args.problem.output_dtype)
    aligned_or_not([args.out], size, lambda aligned: store(together if aligned else 1))


def finish_sums(args: Arguments, split: int) -> None:
    """Add up the parts of split sums in order, and write the outputs that no tap reaches."""
    workspace = args.workspace
    if split == 1 and not args.holes:
        return
    accumulator = args.problem.accumulate_dtype
    with each(args.outputs) as flat:
        n, channel, i = args.output_at(flat)
        conditions = reached(args.geometry, i)
        if split == 1:
            with when([tirx.Not(tirx.all(*conditions))]):
                args.finish(n, channel, i, tirx.const(0, accumulator))
            return
        assert workspace is not None
        total = local(1, accumulator)
        build.buffer_store(total, tirx.const(0, accumulator), [0])
        with when(conditions), build.serial(args.const(0), args.const(split)) as part:
            build.buffer_store(total, total[0] + workspace[part * args.outputs + flat], [0])
        args.finish(n, channel, i, total[0])
