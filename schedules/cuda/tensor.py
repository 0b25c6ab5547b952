"""The implicit matrix product on tensor cores: float16 and bfloat16 with float32 sums, by mma.sync and ldmatrix.

The blocks are those of `product.py`: sections, two stages in shared memory, staged registers, the way to the output
and split sums. What differs:

1. A lies in shared memory as it comes: with k fastest where channels are contiguous (16 bytes at a time where a group's
   channels are a multiple of 8), with m fastest where positions are; ``ldmatrix`` transposes the latter on the way.
   Rows are padded by 16 bytes, so that the eight rows of a tile are in different banks.
2. B has n fastest and is transposed by ``ldmatrix`` too.
3. A warp multiplies ``warp_m x warp_n`` by m16n8k16.

Registers for 64x32: 64 sums, 24 operands, 8 to 24 staged, the rest for addresses.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace

from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import tirx as build

from tvm_deconv.compute.gather import Index, sections
from tvm_deconv.compute.storage import storage_dtype
from tvm_deconv.problem import Problem
from tvm_deconv.schedules.cuda.blocks import (
    Block,
    Rows,
    each_block,
    finish_sums,
    pack_sections,
    packed_elements,
    parts_of,
    store_tile,
)
from tvm_deconv.schedules.cuda.emit import Arguments, Kernel, barrier, deconv, local, shared, when
from tvm_deconv.schedules.cuda.product import blocks_of, idle, split_of
from tvm_deconv.schedules.cuda.warp import ldmatrix, mma, move16

DTYPES = ("float16", "bfloat16")
_LANES = 8  # elements in 16 bytes
_PAD = 8
_STEP = 16  # k of one mma
_COLUMNS = 16  # that go to the output in one round


@dataclass(frozen=True, slots=True)
class Plan:
    """Extents of the tiles of a block and of a warp, and into how many parts each sum is split."""

    tile_m: int
    tile_n: int
    warp_m: int
    warp_n: int
    tile_k: int = 32
    split: int = 1

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * (self.tile_m // self.warp_m) * (self.tile_n // self.warp_n)


PLANS = (
    Plan(128, 128, 64, 32),
    Plan(128, 64, 32, 32),
    Plan(64, 64, 32, 32),
    Plan(128, 32, 32, 32),
    Plan(128, 16, 32, 16),
    Plan(128, 8, 32, 8),
)


def fills_tensor_cores(problem: Problem) -> bool:
    """A 16-bit type, and products with enough columns and terms for one m16n8k16."""
    found = sections(problem, 1, 1)
    return (
        problem.dtype in DTYPES
        and 1 <= len(found) <= 27
        and max(section.n for section in found) >= 8
        and max(section.k for section in found) >= _STEP
    )


#: In multiply-adds of CUDA cores: one of tensor cores, and gathering one element of A, alone or with its vector.
_MMA, _GATHER, _GATHER_WIDE = 1 / 8, 8, 1


def default_plan(problem: Problem) -> Plan:
    """Choose the tiles of the least cost, as `product.default_plan` does."""
    gather = _GATHER_WIDE if _wide(problem) else _GATHER
    best, lowest = PLANS[0], math.inf
    for plan in PLANS:
        if not _wide(problem) and plan.warp_m * plan.warp_n > 1024:
            # Staged one by one, 32 terms take more registers than the sums leave.
            plan = replace(plan, tile_k=16)
        found = sections(problem, plan.tile_k, plan.tile_n)
        reads = 8 / plan.warp_m + 8 / plan.warp_n
        term = plan.tile_m * (plan.tile_n * _MMA * (1 + reads) + gather) + plan.tile_n
        work = sum(blocks_of(section, plan.tile_m) * section.tiles_k for section in found) * plan.tile_k * term
        cost = work * idle(sum(blocks_of(section, plan.tile_m) for section in found), plan.threads)
        if cost < lowest:
            best, lowest = plan, cost
    found = sections(problem, best.tile_k, best.tile_n)
    return replace(best, split=split_of(found, best.tile_m, best.tile_k))


def _wide(problem: Problem) -> bool:
    """Whether 16 bytes of the data at a time are channels of one position."""
    return problem.data_format == "NXC" and problem.in_channels % _LANES == 0


def tensor(problem: Problem, plan: Plan | None = None) -> Kernel:
    """Build the kernel of `problem`, by the default plan where none is given."""
    plan = plan or default_plan(problem)
    found = sections(problem, plan.tile_k, plan.tile_n)
    dtype = storage_dtype(problem.dtype)
    elements = packed_elements(found)
    outputs = math.prod(problem.replace(batch=max(problem.batch, 1)).output_shape) if plan.split > 1 else 0
    tile = _Tile(problem, plan)
    with deconv(problem, elements, dtype, plan.split * outputs) as (function, args):

        def allocate() -> tuple[Expr, ...]:
            sums = local(plan.warp_m * plan.warp_n // 32, "float32")
            return shared(2 * tile.stage, dtype), shared(tile.columns * (plan.tile_m + 1), "float32"), sums

        def body(block: Block, memory: Expr, rounds: Expr, sums: Expr) -> None:
            _multiply(args, block, plan, tile, memory, sums)
            _write(args, block, plan, tile, rounds, sums)

        each_block(found, plan.tile_m, plan.threads, plan.split, allocate, body)
        finish_sums(args, plan.split)
    decisions = asdict(plan) | ({"alignment": 16} if _wide(problem) else {})
    pack = pack_sections(problem, found, dtype)
    return Kernel(problem, function.done, pack, "cuda_tensor", decisions, elements, dtype, plan.split * outputs)


class _Tile:
    """Where things are in shared memory, and which part of a tile a warp has."""

    def __init__(self, problem: Problem, plan: Plan) -> None:
        self.plan = plan
        self.m_fastest = problem.data_format == "NCX"
        self.pitch_a = (plan.tile_m if self.m_fastest else plan.tile_k) + _PAD
        self.pitch_b = plan.tile_n + _PAD
        self.b_first = self.pitch_a * (plan.tile_k if self.m_fastest else plan.tile_m)
        self.stage = self.b_first + plan.tile_k * self.pitch_b
        self.columns = min(_COLUMNS, plan.tile_n)

    def first(self, thread: Expr) -> tuple[Expr, Expr]:
        """Return the first row and column of the thread's warp."""
        warp, across = thread // 32, self.plan.tile_n // self.plan.warp_n
        return warp // across * self.plan.warp_m, warp % across * self.plan.warp_n

    def a(self, m: Index, k: Index) -> Index:
        """Return where an element of A is in its stage."""
        return k * self.pitch_a + m if self.m_fastest else m * self.pitch_a + k

    def b(self, k: Index, n: Index) -> Index:
        """Return where an element of B is in its stage."""
        return self.b_first + k * self.pitch_b + n


def _multiply(args: Arguments, block: Block, plan: Plan, tile: _Tile, memory: Expr, sums: Expr) -> None:
    """Leave the thread's sums of the block's tile in `sums`, four for each m16n8."""
    problem, section, thread = args.problem, block.section, block.thread
    dtype = storage_dtype(problem.dtype)
    wide = _LANES if _wide(problem) else 1
    if tile.m_fastest:
        along = min(plan.tile_m, plan.threads)
        rows = [thread % along + j * along for j in range(plan.tile_m // along)]
        terms: list[Index] = [
            thread // along + j * (plan.threads // along) for j in range(plan.tile_k * along // plan.threads)
        ]
    else:
        across = plan.tile_k // wide
        rows = [thread // across + j * (plan.threads // across) for j in range(plan.tile_m * across // plan.threads)]
        terms = [thread % across * wide]
    gathered = Rows(args, block, plan.tile_m, rows)
    a_staged = local(len(rows) * len(terms) * wide, dtype)
    b_vectors = plan.tile_k * plan.tile_n // _LANES
    b_each = -(-b_vectors // plan.threads)
    b_staged = local(b_each * _LANES, dtype)
    zero = tirx.const(0, dtype)

    def vectors_of_b(j: int) -> tuple[Expr, list[Expr]]:
        number = thread + j * plan.threads
        return number, [number < b_vectors] if b_vectors % plan.threads else []

    def fetch(number: Index) -> None:
        for r in range(len(rows)):
            for t, term in enumerate(terms):
                image, channel, x, inside = gathered.source(r, number * plan.tile_k + term)
                at = (r * len(terms) + t) * wide
                element = args.element(image, channel, x)
                if wide == 1:
                    element = tirx.if_then_else(tirx.all(*inside), element, zero) if inside else element
                    build.buffer_store(a_staged, element, [at])
                elif inside:
                    with build.If(tirx.all(*inside)):
                        with build.Then():
                            move16(a_staged, at, element)
                        with build.Else(), build.unroll(wide) as lane:
                            build.buffer_store(a_staged, zero, [at + lane])
                else:
                    move16(a_staged, at, element)
        place = (block.group * section.tiles_n + block.tile_n) * args.const(section.tiles_k) + number
        first = args.const(section.offset) + place * (plan.tile_k * plan.tile_n)
        for j in range(b_each):
            vector, exists = vectors_of_b(j)
            with when(exists):
                move16(b_staged, j * _LANES, args.packed[first + vector * _LANES])

    def put(buffer: Index) -> None:
        for r, row in enumerate(rows):
            for t, term in enumerate(terms):
                at, to = (r * len(terms) + t) * wide, buffer * tile.stage + tile.a(row, term)
                if wide == 1:
                    build.buffer_store(memory, a_staged[at], [to])
                else:
                    move16(memory, to, a_staged[at])
        across = plan.tile_n // _LANES
        for j in range(b_each):
            vector, exists = vectors_of_b(j)
            with when(exists):
                to = buffer * tile.stage + tile.b(vector // across, vector % across * _LANES)
                move16(memory, to, b_staged[j * _LANES])

    tiles_m, tiles_n = plan.warp_m // 16, plan.warp_n // 8
    a_read, b_read = local(4 * tiles_m, "uint32"), local(2 * tiles_n, "uint32")
    first_row, first_column = tile.first(thread)
    lane = thread % 32
    first, count = parts_of(section, plan.split, block.part)
    with build.unroll(4 * tiles_m * tiles_n) as i:
        build.buffer_store(sums, tirx.const(0, "float32"), [i])
    with when([count > 0] if plan.split > 1 else []):
        fetch(first)
        put(0)
    barrier()
    with build.serial(0, count) as step:
        # Of the last tile there is no next one; every thread of the block agrees on that.
        with when([step + 1 < count]):
            fetch(first + step + 1)
        base = step % 2 * tile.stage
        for k in range(0, plan.tile_k, _STEP):
            for i in range(tiles_m):
                m = first_row + 16 * i
                if tile.m_fastest:
                    row = tile.a(m + lane // 8 % 2 * 8, k + lane // 16 * 8 + lane % 8)
                else:
                    row = tile.a(m + lane % 16, k + lane // 16 * 8)
                ldmatrix(a_read, 4 * i, 4, memory, base + row, transposed=tile.m_fastest)
            for j in range(0, tiles_n, 2):
                pair = min(2, tiles_n - j)
                # Of a single tile of n, only the rows that lanes 0 to 15 give are read.
                n = first_column + 8 * j + (lane // 16 * 8 if pair == 2 else 0)
                ldmatrix(b_read, 2 * j, 2 * pair, memory, base + tile.b(k + lane % 16, n), transposed=True)
            for i in range(tiles_m):
                for j in range(tiles_n):
                    mma(problem.dtype, sums, 4 * (i * tiles_n + j), a_read, 4 * i, b_read, 2 * j)
        with when([step + 1 < count]):
            put((step + 1) % 2)
        barrier()


def _write(args: Arguments, block: Block, plan: Plan, tile: _Tile, rounds: Expr, sums: Expr) -> None:
    """Bring the sums to the output, some columns at a time, through shared memory: in the order of the output."""
    tiles_m, tiles_n = plan.warp_m // 16, plan.warp_n // 8
    first_row, first_column = tile.first(block.thread)
    lane, pitch = block.thread % 32, plan.tile_m + 1
    for first in range(0, plan.tile_n, tile.columns):
        if first:
            barrier()
        for j in range(tiles_n):
            start = first_column + 8 * j
            with (
                when([start >= first, start < first + tile.columns]),
                build.unroll(tiles_m) as i,
                build.unroll(4) as part,
            ):
                row = first_row + 16 * i + lane // 4 + part // 2 * 8
                column = start - first + lane % 4 * 2 + part % 2
                build.buffer_store(rounds, sums[4 * (i * tiles_n + j) + part], [column * pitch + row])
        barrier()
        store_tile(
            args,
            block,
            (plan.tile_m, tile.columns),
            first,
            plan.threads,
            plan.split,
            lambda row, column: rounds[column * pitch + row],
        )
