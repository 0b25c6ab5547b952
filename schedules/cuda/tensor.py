"""The implicit matrix product on tensor cores: the scheme of `tiles.py` with mma.sync and float32 or int32 sums.

float16, bfloat16, and float32 if the problem permits TF32: then data are rounded as they are read from shared
memory, and the filter when it is packed. A warp multiplies ``part_m x part_n`` by m16n8k16, or m16n8k8 of TF32.
8-bit integers are multiplied by m16n8k32 (`Bytes`).

1. A lies in shared memory as it comes: with k fastest if channels are contiguous (16 bytes at a time if a group's
   channels fill them), with m fastest if positions are. ``ldmatrix`` reads the former, and transposes the latter on
   the way, if elements have 16 bits; else they are read one by one.
2. B has n fastest and is transposed by ``ldmatrix`` or read one by one too.
3. Rows are padded so that the elements that a warp reads at a time are in different banks: by 16 bytes for the eight
   rows of a tile of ``ldmatrix``, by 8 elements for single elements of four rows. Rows of 8 are in different banks.

Registers for 64x32: 64 sums, 24 operands, staged elements, the rest for addresses.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import tirx as build

from tvm_deconv.compute.gather import Section
from tvm_deconv.compute.indexing import Index, unravel
from tvm_deconv.compute.storage import filter_storage, storage_dtype
from tvm_deconv.problem import Problem
from tvm_deconv.schedules.cuda.banks import WAVEFRONT
from tvm_deconv.schedules.cuda.blocks import Block, Cells, packed_elements
from tvm_deconv.schedules.cuda.emit import Arguments, Rounding, as_it_is, each, local, when
from tvm_deconv.schedules.cuda.lower import RESIDENT
from tvm_deconv.schedules.cuda.predicates import fills_tensor_cores, is_for_tensor_cores, multiplied_type
from tvm_deconv.schedules.cuda.products import choices
from tvm_deconv.schedules.cuda.tiles import DIVISIONS, Copied, Plan, matrix_algorithm
from tvm_deconv.schedules.cuda.warp import MMA_TERMS, high, ldmatrix, low, mma, roundings_of, tf32

PLANS = (
    Plan(128, 128, 32, 64, 32),
    Plan(128, 64, 32, 32, 32),
    Plan(64, 64, 32, 32, 32),
    Plan(128, 32, 32, 32, 32),
    Plan(128, 16, 32, 32, 16),
    Plan(128, 8, 32, 32, 8),
)
#: Plans that read operands less often: their threads have 128 sums, and a multiprocessor holds half as many of them.
LARGE_PLANS = (Plan(256, 128, 32, 64, 64), Plan(128, 128, 32, 64, 64))
#: The same if each product is three: 64 sums, and as many of tensor cores.
LARGE_TRIPLE = (Plan(256, 64, 32, 64, 32), Plan(128, 128, 32, 64, 32))
_PAD = 8
#: In multiply-adds of CUDA cores: one of tensor cores by type, gathering elements of A that go together, and splitting
#: one into two parts.
_MMA = {"float16": 1 / 8, "bfloat16": 1 / 8, "tf32": 1 / 4, "int8": 1 / 16, "uint8": 1 / 16}
_GATHER, _SPLIT = 8, 5
#: Sums of a thread, at most, of which a multiprocessor holds `RESIDENT` threads.
_MOST_SUMS = 64
#: Elements of a warp's part, at most, if sums share registers with places of different products or with partial sums.
_MOST_SHARED = 1024
#: Terms that tensor cores add up, at most, if each product is three: they round towards zero.
_TRUNCATED = 32


class Warps(Copied):
    """A part is a warp's."""

    algorithm = "cuda_tensor"
    most_columns, most_stages = 32, 4

    def __init__(self, problem: Problem, plan: Plan) -> None:
        super().__init__(problem, plan, storage_dtype(problem.dtype), 32 * plan.parts)
        kind = multiplied_type(problem)
        assert kind is not None
        self.kind, self.single, self.triple = kind, kind == "tf32", problem.precision == "tf32x3"
        self.pitch_a = plan.tile_k + self.lanes if self.k_fastest else plan.tile_m + _PAD
        self.pitch_b = plan.tile_n + (_PAD if plan.tile_n > _PAD else 0)
        self.tiles_m, self.tiles_n = plan.part_m // 16, plan.part_n // 8

    @property
    def k_fastest(self) -> bool:
        """See Form."""
        return self.problem.data_format == "NXC"

    @property
    def b_first(self) -> int:
        """See Copied."""
        return self.pitch_a * (self.plan.tile_m if self.k_fastest else self.plan.tile_k)

    @property
    def stage(self) -> int:
        """See Form."""
        return self.b_first + len(self.roundings) * self.plan.tile_k * self.pitch_b

    @property
    def sums(self) -> int:
        """See Form."""
        return 4 * self.tiles_m * self.tiles_n

    @property
    def fits(self) -> bool:
        """See Form."""
        return self.plan.tile_k % MMA_TERMS[self.kind] == 0 and super().fits

    @property
    def usual_terms(self) -> int:
        """Terms of a tile."""
        return 16 if self.single else 32

    @property
    def resident(self) -> int:
        """See Form."""
        return RESIDENT if self.sums * (1 + self.triple) <= _MOST_SUMS else RESIDENT // 2

    @property
    def operands(self) -> int:
        """See Form."""
        return 8 + 4 * self.tiles_n + self.sums if self.triple else 4 * self.tiles_m + 2 * self.tiles_n

    @property
    def term(self) -> float:
        """Multiply-adds, padding included; as many again as operands are read; the gathering, shared by columns."""
        plan = self.plan
        gather = (DIVISIONS if self.divides else _GATHER) / self.wide
        reads = 8 / plan.part_m + 8 / plan.part_n
        product = _MMA[self.kind] * (3 if self.triple else len(self.roundings)) * (1 + reads)
        split = _SPLIT / plan.part_n if self.triple else 0
        return plan.tile_m * (plan.tile_n * (product + split) + gather) + plan.tile_n

    @property
    def wavefronts(self) -> float:
        """See Form."""
        size, plan = 16 // self.lanes, self.plan
        read = sum(taken for _, taken in self.reads(0)) / 4 * plan.parts / MMA_TERMS[self.kind]
        # A is read from the nearest cache too, by each lane for itself unless it is copied.
        moved = max(4, self.wide * size) / self.wide
        stored = moved if self.copies else max(4, self.together * size) / self.together
        return read + (plan.tile_m * (moved + stored) + len(self.roundings) * plan.tile_n * size) / WAVEFRONT

    def a(self, m: Index, k: Index) -> Index:
        """See Copied."""
        return m * self.pitch_a + k if self.k_fastest else k * self.pitch_a + m

    def b(self, k: Index, n: Index, part: int = 0) -> Index:
        """See Copied."""
        return self.b_first + (part * self.plan.tile_k + k) * self.pitch_b + n

    @property
    def roundings(self) -> Sequence[Rounding]:
        """See Form."""
        return roundings_of(single=self.single, triple=self.triple)

    def allocate(self) -> tuple[Expr, ...]:
        """See Form."""
        if self.triple:
            registers = local(8, "float32"), local(4 * self.tiles_n, "float32"), local(self.sums, "float32")
            with build.unroll(self.sums) as i:
                build.buffer_store(registers[-1], tirx.const(0, "float32"), [i])
            return registers
        dtype = "float32" if self.single else "uint32"
        return local(4 * self.tiles_m, dtype), local(2 * self.tiles_n, dtype)

    def _first(self, thread: Index) -> tuple[Index, Index]:
        """Return the first row and column of the thread's warp."""
        warp, across = thread // 32, self.plan.tile_n // self.plan.part_n
        return warp // across * self.plan.part_m, warp % across * self.plan.part_n

    def multiply(
        self, thread: Expr, step: Expr, memory: Expr, base: Expr, sums: Expr, registers: Sequence[Expr]
    ) -> None:
        """See Copied."""
        if self.triple:
            self._multiply_parts(thread, memory, base, registers)
            tiles = max(1, _TRUNCATED // self.plan.tile_k)
            with when([step % tiles == tiles - 1] if tiles > 1 else []):
                self._collect(sums, registers[-1])
            return
        a_read, b_read = registers
        row, column = self._first(thread)
        terms, lane = MMA_TERMS[self.kind], thread % 32
        with build.unroll(self.plan.tile_k // terms) as part:
            with build.unroll(self.tiles_m) as i:
                self._read_a(memory, base, lane, row + 16 * i, part * terms, a_read, 4 * i)
            self._read_b(memory, base, lane, column, part * terms, b_read)
            with build.unroll(self.tiles_m) as i, build.unroll(self.tiles_n) as j:
                mma(self.kind, sums, 4 * (i * self.tiles_n + j), a_read, 4 * i, b_read, 2 * j)

    def _multiply_parts(self, thread: Expr, memory: Expr, base: Expr, registers: Sequence[Expr]) -> None:
        """Add the products of high parts, and of high and low parts, the small ones first."""
        a_read, b_read, partial = registers
        row, column = self._first(thread)
        terms, lane, lows = MMA_TERMS[self.kind], thread % 32, 2 * self.tiles_n
        with build.unroll(self.plan.tile_k // terms) as part:
            for half in range(2):
                self._read_b(memory, base, lane, column, part * terms, b_read, half)
            with build.unroll(self.tiles_m) as i:
                self._read_a(memory, base, lane, row + 16 * i, part * terms, a_read, 0)
                for a, b in ((4, 0), (0, lows), (0, 0)):
                    with build.unroll(self.tiles_n) as j:
                        mma(self.kind, partial, 4 * (i * self.tiles_n + j), a_read, a, b_read, b + 2 * j)

    def _collect(self, sums: Expr, partial: Expr) -> None:
        """Add the partial sums of tensor cores to the sums, and begin them anew."""
        with build.unroll(self.sums) as i:
            build.buffer_store(sums, sums[i] + partial[i], [i])
            build.buffer_store(partial, tirx.const(0, "float32"), [i])

    def finish(self, sums: Expr, registers: Sequence[Expr]) -> None:
        """See Copied."""
        if self.triple:
            self._collect(sums, registers[-1])

    def _read_a(self, memory: Expr, base: Expr, lane: Expr, m: Expr, k: Expr, read: Expr, to: Expr) -> None:
        """Read 16 rows from `m` on and the terms of one mma from `k` on to four registers from `to` on."""
        if self.k_fastest or not self.single:
            place = self._place_a(lane, m, k)
            ldmatrix(read, to, 4, memory, base + place, transposed=not self.k_fastest)
        if self.single:
            with build.unroll(4) as part:
                element = read[to + part] if self.k_fastest else memory[base + self._place_a(lane, m, k, part)]
                if self.triple:
                    build.buffer_store(read, element, [to + 4 + part])
                    build.buffer_store(read, high(read[to + 4 + part]), [to + part])
                    build.buffer_store(read, low(read[to + 4 + part], read[to + part]), [to + 4 + part])
                else:
                    build.buffer_store(read, tf32(element), [to + part])

    def _read_b(self, memory: Expr, base: Expr, lane: Expr, n: Expr, k: Expr, read: Expr, half: int = 0) -> None:
        """Read the terms of one mma from `k` on and all columns of a warp, from `n` on, two registers for eight."""
        if self.single:
            with build.unroll(self.tiles_n) as j, build.unroll(2) as part:
                place = self._place_b(lane, n + j * 8, k + part * 4, half)
                build.buffer_store(read, memory[base + place], [2 * (half * self.tiles_n + j) + part])
            return
        together = min(2, self.tiles_n)
        with build.unroll(self.tiles_n // together) as j:
            place = self._place_b(lane, n + 8 * together * j, k)
            ldmatrix(read, 4 * j, 2 * together, memory, base + place, transposed=True)

    def _place_a(self, lane: Index, m: Index, k: Index, part: Index = 0) -> Index:
        """Return the place of the row of A that a lane gives to ldmatrix, or of a single element."""
        if self.k_fastest:
            return self.a(m + lane % 16, k + lane // 16 * self.lanes)
        if not self.single:
            return self.a(m + lane // 8 % 2 * 8, k + lane // 16 * 8 + lane % 8)
        return self.a(m + lane // 4 + part % 2 * 8, k + lane % 4 + part // 2 * 4)

    def _place_b(self, lane: Index, n: Index, k: Index, half: int = 0) -> Index:
        """Return the place of the row of B that a lane gives to ldmatrix, or of a single element."""
        if self.single:
            return self.b(k + lane % 4, n + lane // 4, half)
        # Of a single tile of n, only the rows that lanes 0 to 15 give are read.
        return self.b(k + lane % 16, n + (lane // 16 * 8 if self.tiles_n > 1 else 0))

    def reads(self, thread: int) -> Iterator[tuple[Index, int]]:
        """See Form."""
        row, column = self._first(thread)
        lane, row_bytes = thread % 32, 16
        for i, part in itertools.product(range(self.tiles_m), range(4 if self.single and not self.k_fastest else 1)):
            yield self._place_a(lane, row + 16 * i, 0, part), 4 if self.single and not self.k_fastest else row_bytes
        if not self.single:
            for j, half in itertools.product(range(max(1, self.tiles_n // 2)), range(len(self.roundings))):
                yield self._place_b(lane, column + 16 * j, 0, half), row_bytes
            return
        for j, part, half in itertools.product(range(self.tiles_n), range(2), range(len(self.roundings))):
            yield self._place_b(lane, column + 8 * j, 4 * part, half), 4

    def cells(self, thread: Index) -> Iterator[Cells]:
        """See Form."""
        first, column = self._first(thread)
        lane = thread % 32
        for j in range(self.tiles_n):

            def cell(i: Index, part: Index, j: int = j) -> tuple[Index, Index, Index]:
                row = first + 8 * i + lane // 4
                return row, lane % 4 * 2 + part, 4 * (i // 2 * self.tiles_n + j) + i % 2 * 2 + part

            yield column + 8 * j, (2 * self.tiles_m, 2), cell


class Bytes(Warps):
    """A part is a warp's, of 8-bit integers with int32 sums: exact.

    Both operands have k fastest, four terms a register. A stored element stands for itself less the data's zero point.
    So zero points lie where nothing is, and sums begin with the zero point times the sum of their column, subtracted.
    A filter whose own zero points were taken off has 9 bits: its halves, rounded down, and what they leave are two
    operands, each with sums of its own.
    """

    terms = (32, 64, 128)

    def __init__(self, problem: Problem, plan: Plan) -> None:
        super().__init__(problem, plan)
        self.pitch_b = plan.tile_k + self.lanes
        self.of_b = problem.dtype if problem.quantization is None else "int8"
        self.double = filter_storage(problem) == "int16"

    @property
    def k_fastest(self) -> bool:
        """See Form."""
        return True

    @property
    def stage(self) -> int:
        """See Form."""
        return self.b_first + len(self.roundings) * self.plan.tile_n * self.pitch_b

    @property
    def usual_terms(self) -> int:
        """Terms of a tile: as many bytes as of floats, unless they take registers or are multiplied twice."""
        return 64 if self.copies and not self.double else 32

    @property
    def resident(self) -> int:
        """See Form."""
        return RESIDENT if self.sums * len(self.roundings) <= _MOST_SUMS else RESIDENT // 2

    @property
    def operands(self) -> int:
        """See Form."""
        return 4 * self.tiles_m + 2 * self.tiles_n + self.double * self.sums

    def b(self, k: Index, n: Index, part: int = 0) -> Index:
        """See Copied."""
        return self.b_first + (part * self.plan.tile_n + n) * self.pitch_b + k

    @property
    def together(self) -> int:
        """See Copied: a word, or a vector if neighbouring threads have other rows, whose words would meet in banks."""
        return 4 if self.problem.data_format == "NXC" else self.lanes

    def vector(self, number: Index) -> tuple[Index, Index]:
        """See Copied; terms are fastest."""
        along = self.plan.tile_k // self.lanes
        return number % along * self.lanes, number // along

    def packed_order(self, section: Section, number: Expr) -> Sequence[Index]:
        """See Form; terms are fastest."""
        shape = (section.geometry.groups, section.tiles_n, section.tiles_k, section.tile_n, section.tile_k)
        group, tile, tile_k, within, k = unravel(number, shape)
        return group, tile, tile_k * section.tile_k + k, within

    @property
    def roundings(self) -> Sequence[Rounding]:
        """See Form."""
        if not self.double:
            return [as_it_is]
        one = tirx.const(1, "int16")
        return [lambda element: element >> one, lambda element: element & one]

    def allocate(self) -> tuple[Expr, ...]:
        """See Form."""
        registers = local(4 * self.tiles_m, "uint32"), local(2 * self.tiles_n, "uint32")
        if not self.double:
            return registers
        halves = local(self.sums, "int32")
        with build.unroll(self.sums) as i:
            build.buffer_store(halves, tirx.const(0, "int32"), [i])
        return *registers, halves

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
        a_read, b_read, *halves = registers
        row, column = self._first(thread)
        terms, lane = MMA_TERMS[self.kind], thread % 32
        with build.unroll(self.plan.tile_k // terms) as part:
            with build.unroll(self.tiles_m) as i:
                self._read_a(memory, base, lane, row + 16 * i, part * terms, a_read, 4 * i)
            for number, those in enumerate([*halves, sums]):
                self._read_b(memory, base, lane, column, part * terms, b_read, number)
                with build.unroll(self.tiles_m) as i, build.unroll(self.tiles_n) as j:
                    mma(self.kind, those, 4 * (i * self.tiles_n + j), a_read, 4 * i, b_read, 2 * j, self.of_b)

    def finish(self, sums: Expr, registers: Sequence[Expr]) -> None:
        """See Copied."""
        if self.double:
            with build.unroll(self.sums) as i:
                build.buffer_store(sums, sums[i] + registers[-1][i] * 2, [i])

    def _read_b(self, memory: Expr, base: Expr, lane: Expr, n: Expr, k: Expr, read: Expr, half: int = 0) -> None:
        together = min(2, self.tiles_n)
        with build.unroll(self.tiles_n // together) as j:
            place = self._place_b(lane, n + 8 * together * j, k, half)
            ldmatrix(read, 4 * j, 2 * together, memory, base + place, transposed=False)

    def _place_b(self, lane: Index, n: Index, k: Index, half: int = 0) -> Index:
        # Of a single tile of n, only the rows that lanes 0 to 15 give are read.
        column = lane % 8 + (lane // 16 * 8 if self.tiles_n > 1 else 0)
        return self.b(k + lane // 8 % 2 * self.lanes, n + column, half)

    @property
    def tail(self) -> tuple[int, Callable[[Expr], None] | None]:
        """See Form; bytes of an int32 for each column, its sum, if data have a zero point."""
        if self.problem.quantization is None:
            return super().tail
        return 4 * sum(map(columns_of, self.sections)), self._sum_columns

    def _sum_columns(self, packed: Expr) -> None:
        """Write the sums of the columns behind the packed filter."""
        elements = packed_elements(self.sections)
        sums, place = _as_words(packed), len(self.roundings) * elements // 4
        for section in self.sections:
            terms = section.tiles_k * section.tile_k
            with each(columns_of(section)) as number:
                total = local(1, "int32")
                build.buffer_store(total, tirx.const(0, "int32"), [0])
                with build.serial(0, terms) as k:
                    line = number // section.tile_n * section.tiles_k + k // section.tile_k
                    at = (line * section.tile_n + number % section.tile_n) * section.tile_k + k % section.tile_k
                    for part, times in enumerate([2, 1] if self.double else [1]):
                        element = packed[section.offset + part * elements + at].astype(self.of_b).astype("int32")
                        build.buffer_store(total, total[0] + element * times, [0])
                build.buffer_store(sums, total[0], [place + number])
            place += columns_of(section)

    def clear(self, args: Arguments, block: Block, sums: Expr) -> None:
        """See Form; the first part of a sum begins with what data's zero point adds to it, subtracted."""
        if args.zero_point is None:
            super().clear(args, block, sums)
            return
        section = block.section
        before = self.sections[: self.sections.index(section)]
        place = len(self.roundings) * packed_elements(self.sections) // 4 + sum(map(columns_of, before))
        place = args.const(place) + (block.group * section.tiles_n + block.tile_n) * section.tile_n
        of_columns, begin = _as_words(args.packed), local(1, "int32")
        for start, (rows, columns), cell in self.cells(block.thread):
            with build.unroll(columns) as j:
                value = tirx.const(0, "int32") - args.zero_point * of_columns[place + start + cell(0, j)[1]]
                if self.plan.split > 1:
                    value = tirx.Select(block.part == 0, value, tirx.const(0, "int32"))
                build.buffer_store(begin, value, [0])
                with build.unroll(rows) as i:
                    build.buffer_store(sums, begin[0], [cell(i, j)[2]])


def columns_of(section: Section) -> int:
    """Return the number of columns of a section in all groups, padding included."""
    return section.geometry.groups * section.tiles_n * section.tile_n


def _as_words(packed: Expr) -> Expr:
    """Return the packed filter as words of 32 bits."""
    extents = [packed.shape[0] // 4]
    return build.decl_buffer(extents, "int32", data=packed.data, scope="global", layout=None)


def form_of(problem: Problem, plan: Plan) -> Warps:
    """Return the form of a plan: of bytes, or of floats."""
    return Bytes(problem, plan) if problem.accumulate_dtype == "int32" else Warps(problem, plan)


def _shapes(problem: Problem) -> list[Plan]:
    return [shape for axes in choices(problem) for shape in shapes(problem, form_of, axes)]


def shapes(problem: Problem, form: Callable[[Problem, Plan], Warps], axes: int) -> list[Plan]:
    """Return the usual plans, also with half the terms, which may be less of padding.

    If A comes through registers, there are not enough for 64 sums and the addresses of products with different taps, or
    for 128 sums and those with different columns, too, or beyond the output's beginning; of bytes, which take one
    register each, not for 64 sums and any of these. Phases are joined along the last `axes`.
    """
    made = form(problem, replace(PLANS[0], joined=axes))
    differing = len({section.taps for section in made.sections}) > 1 and not made.copies
    several = len(made.roundings) > 1
    plain = not made.geometry.uncropped and len({section.n for section in made.sections}) == 1
    staged = isinstance(made, Bytes) and not made.copies and not plain
    most = _MOST_SHARED if differing or staged or several else math.inf
    usual = [plan for plan in PLANS if plan.part_m * plan.part_n <= most]
    if plain or not (differing or staged):
        usual += LARGE_TRIPLE if several else LARGE_PLANS
    usual = [replace(plan, joined=axes, tile_k=made.usual_terms) for plan in usual]
    usual = [plan for plan in usual if not several or form(problem, plan).has_registers]
    halves = [
        plan for whole in usual if (plan := replace(whole, tile_k=whole.tile_k // 2)).tile_k >= MMA_TERMS[made.kind]
    ]
    return usual + halves * (problem.in_channels % made.usual_terms > 0)


ALGORITHM = matrix_algorithm(Warps.algorithm, form_of, _shapes, fills_tensor_cores, is_for_tensor_cores)
