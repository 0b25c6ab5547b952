"""The implicit matrix product on CUDA cores: tiles through shared memory, register tiles, two stages.

Every section of the problem (`compute/gather.py`) takes a range of the blocks of one launch. A block computes
``tile_m x tile_n`` elements of C:

1. Each thread gathers its elements of A from the data, and vectors of B from the packed filter, into registers, while
   the block multiplies the tile before.
2. They go to the other one of two buffers in shared memory, A with m running fastest whatever the data's layout, so
   that both operands are read as vectors. One barrier a tile.
3. Each thread multiplies ``thread_m x thread_n`` accumulators, which are halves or single vectors apart, so that the
   threads of a warp read neighbouring vectors.
4. C is scattered to the output through the epilogue; or, where the sum is split, to the workspace, which a second
   launch adds up in order: no atomics, so results are the same in every run.

Registers for 8x8 accumulators: 64, 16 for the operands, about 16 for the staged tile, the rest for addresses: at most
128, which leaves two blocks of 256 threads a multiprocessor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import tirx as build

from tvm_deconv.compute.gather import Index, Section, sections
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

#: Multiprocessors that a launch should fill; those of an H100 or H200.
MULTIPROCESSORS = 132
_ELEMENT_BYTES = {"float32": 4, "float64": 8, "int32": 4}


@dataclass(frozen=True, slots=True)
class Plan:
    """Extents of the tiles of a block and of a thread, and into how many parts each sum is split."""

    tile_m: int
    tile_n: int
    tile_k: int
    thread_m: int
    thread_n: int
    split: int = 1

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.tile_m // self.thread_m * (self.tile_n // self.thread_n)

    def pitch(self, dtype: str) -> int:
        """Elements between two k of A in shared memory: padded, since they may be written across."""
        return self.tile_m + vector_lanes(dtype)

    def stage(self, dtype: str) -> int:
        """Elements of one stage in shared memory: A, then B."""
        return self.tile_k * (self.pitch(dtype) + self.tile_n)

    def shared(self, dtype: str) -> tuple[int, int]:
        """Elements of shared memory that the two stages take, and that the columns of one round of output take."""
        return 2 * self.stage(dtype), self.columns(dtype) * (self.tile_m + 1)

    def columns(self, dtype: str) -> int:
        """Columns that go to the output in one round: as many as the stages leave room for."""
        columns = self.tile_n
        while columns * (self.tile_m + 1) > 2 * self.stage(dtype):
            columns //= 2
        return columns

    def parts_m(self, dtype: str) -> int:
        """Vectors in which a thread reads its rows."""
        return max(1, self.thread_m // vector_lanes(dtype))

    def parts_n(self, dtype: str) -> int:
        """Vectors in which a thread reads its columns."""
        return max(1, self.thread_n // vector_lanes(dtype))

    def row(self, thread: Expr, part: Expr | int, dtype: str) -> Expr:
        """Return the first row of one of a thread's vectors."""
        parts = self.parts_m(dtype)
        return part * (self.tile_m // parts) + thread // (self.tile_n // self.thread_n) * (self.thread_m // parts)

    def column(self, thread: Expr, part: int, dtype: str) -> Expr:
        """Return the first column of one of a thread's vectors."""
        parts = self.parts_n(dtype)
        return part * (self.tile_n // parts) + thread % (self.tile_n // self.thread_n) * (self.thread_n // parts)


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


def vector_lanes(accumulator: str) -> int:
    """Elements of an accumulator type that one access of 16 bytes moves."""
    return 16 // _ELEMENT_BYTES[accumulator]


#: What it costs to gather one element of A, for its address and borders, in multiply-adds.
_GATHER = 10


def default_plan(problem: Problem) -> Plan:
    """Choose the tiles of the least cost, in multiply-adds, and split sums where too few blocks would run.

    A tile costs its multiply-adds, padding included, as many again as its operands are read from shared memory, and
    the gathering of A, which many columns share; all that times the idle part of the last wave of blocks.
    """
    best, lowest = PLANS[0], math.inf
    for plan in PLANS:
        if problem.accumulate_dtype == "float64":
            if plan.thread_m * plan.thread_n > 16:
                continue
            plan = replace(plan, tile_k=8)
        found = sections(problem, plan.tile_k, plan.tile_n)
        reads = 1 / plan.thread_m + 1 / plan.thread_n
        term = plan.tile_m * (plan.tile_n * (1 + reads) + _GATHER) + plan.tile_n
        work = sum(blocks_of(section, plan.tile_m) * section.tiles_k for section in found) * plan.tile_k * term
        cost = work * idle(sum(blocks_of(section, plan.tile_m) for section in found), plan.threads)
        if cost < lowest:
            best, lowest = plan, cost
    found = sections(problem, best.tile_k, best.tile_n)
    return replace(best, split=split_of(found, best.tile_m, best.tile_k))


def idle(blocks: int, threads: int) -> float:
    """Return the time of a launch over that of one in which no multiprocessor idles."""
    resident = MULTIPROCESSORS * (512 // threads)
    return 1.1 if blocks < resident else -(-blocks // resident) * resident / blocks


def split_of(found: Sequence[Section], tile_m: int, tile_k: int) -> int:
    """Return into how many parts sums are split: as many as fill the device, each of 128 terms at least."""
    blocks = sum(blocks_of(section, tile_m) for section in found)
    longest = max((section.tiles_k for section in found), default=1)
    return max(1, min(2 * MULTIPROCESSORS // max(blocks, 1), longest * tile_k // 128, 32))


def blocks_of(section: Section, tile_m: int) -> int:
    """Return the number of blocks for a section, of sums that are not split."""
    return section.geometry.groups * section.tiles_n * -(-section.m // tile_m)


def vectors(problem: Problem) -> int:
    """Return how many neighbouring channels of the data one access moves; more than one needs aligned data."""
    lanes = vector_lanes(problem.accumulate_dtype)
    stored = problem.dtype == problem.accumulate_dtype
    return lanes if stored and problem.data_format == "NXC" and problem.in_channels % lanes == 0 else 1


def product(problem: Problem, plan: Plan | None = None) -> Kernel:
    """Build the kernel of `problem`, by the default plan where none is given."""
    plan = plan or default_plan(problem)
    found = sections(problem, plan.tile_k, plan.tile_n)
    dtype = problem.accumulate_dtype
    elements = packed_elements(found)
    outputs = math.prod(problem.replace(batch=max(problem.batch, 1)).output_shape) if plan.split > 1 else 0
    with deconv(problem, elements, dtype, plan.split * outputs) as (function, args):

        def allocate() -> tuple[Expr, ...]:
            return shared(max(plan.shared(dtype)), dtype), local(plan.thread_m * plan.thread_n, dtype)

        def body(block: Block, memory: Expr, sums: Expr) -> None:
            _multiply(args, block, plan, memory, sums)
            _write(args, block, plan, memory, sums)

        each_block(found, plan.tile_m, plan.threads, plan.split, allocate, body)
        finish_sums(args, plan.split)
    decisions = asdict(plan) | ({"alignment": 16} if vectors(problem) > 1 else {})
    pack = pack_sections(problem, found, dtype)
    return Kernel(problem, function.done, pack, "cuda_product", decisions, elements, dtype, plan.split * outputs)


def _multiply(args: Arguments, block: Block, plan: Plan, memory: Expr, sums: Expr) -> None:
    """Leave the thread's sums of the block's tile in `sums`."""
    problem, section, thread = args.problem, block.section, block.thread
    dtype = problem.accumulate_dtype
    lanes, wide = vector_lanes(dtype), vectors(problem)
    pitch, stage, b_first = plan.pitch(dtype), plan.stage(dtype), plan.tile_k * plan.pitch(dtype)

    # Who gathers what of A: where channels are contiguous, neighbouring threads take neighbouring k, else m.
    if problem.data_format == "NXC":
        across = plan.tile_k // wide
        rows = [thread // across + j * (plan.threads // across) for j in range(plan.tile_m * across // plan.threads)]
        terms: list[Index] = [thread % across * wide]
    else:
        along = min(plan.tile_m, plan.threads)
        rows = [thread % along + j * along for j in range(plan.tile_m // along)]
        terms = [thread // along + j * (plan.threads // along) for j in range(plan.tile_k * along // plan.threads)]
    gathered = Rows(args, block, plan.tile_m, rows)
    a_staged = local(len(rows) * len(terms) * wide, dtype)
    b_vectors = plan.tile_k * plan.tile_n // lanes
    b_each = -(-b_vectors // plan.threads)
    b_staged = local(b_each * lanes, dtype)
    zero = tirx.const(0, dtype)

    def fetch(tile: Index) -> None:
        for r in range(len(rows)):
            for t, term in enumerate(terms):
                image, channel, x, inside = gathered.source(r, tile * plan.tile_k + term)
                at = (r * len(terms) + t) * wide
                if wide == 1:
                    element = args.accumulated(image, channel, x)
                    element = tirx.if_then_else(tirx.all(*inside), element, zero) if inside else element
                    build.buffer_store(a_staged, element, [at])
                    continue

                def load(at: int = at, image: Index = image, channel: Index = channel, x: list[Index] = x) -> None:
                    with build.vectorized(wide) as lane:
                        build.buffer_store(a_staged, args.element(image, channel + lane, x), [at + lane])

                if inside:
                    with build.If(tirx.all(*inside)):
                        with build.Then():
                            load()
                        with build.Else(), build.vectorized(wide) as lane:
                            build.buffer_store(a_staged, zero, [at + lane])
                else:
                    load()
        first = args.const(section.offset) + (
            (block.group * section.tiles_n + block.tile_n) * args.const(section.tiles_k) + tile
        ) * (plan.tile_k * plan.tile_n)
        for j in range(b_each):
            number = thread + j * plan.threads
            with when([number < b_vectors] if b_vectors % plan.threads else []), build.vectorized(lanes) as lane:
                build.buffer_store(b_staged, args.packed[first + number * lanes + lane], [j * lanes + lane])

    def put(buffer: Index) -> None:
        for r, row in enumerate(rows):
            for t, term in enumerate(terms):
                for v in range(wide):
                    at = (r * len(terms) + t) * wide + v
                    build.buffer_store(memory, a_staged[at], [buffer * stage + (term + v) * pitch + row])
        for j in range(b_each):
            number = thread + j * plan.threads
            with when([number < b_vectors] if b_vectors % plan.threads else []), build.vectorized(lanes) as lane:
                build.buffer_store(
                    memory, b_staged[j * lanes + lane], [buffer * stage + b_first + number * lanes + lane]
                )

    first, tiles = parts_of(section, plan.split, block.part)
    a_read, b_read = local(plan.thread_m, dtype), local(plan.thread_n, dtype)
    with build.unroll(plan.thread_m * plan.thread_n) as i:
        build.buffer_store(sums, zero, [i])
    with when([tiles > 0] if plan.split > 1 else []):
        fetch(first)
        put(0)
    barrier()
    with build.serial(0, tiles) as step:
        # Of the last tile there is no next one; every thread of the block agrees on that.
        with when([step + 1 < tiles]):
            fetch(first + step + 1)
        with build.unroll(plan.tile_k) as k:
            base = step % 2 * stage + k * pitch
            for part in range(plan.parts_m(dtype)):
                width = plan.thread_m // plan.parts_m(dtype)
                with build.vectorized(width) as lane:
                    at = base + plan.row(block.thread, part, dtype) + lane
                    build.buffer_store(a_read, memory[at], [part * width + lane])
            base = step % 2 * stage + b_first + k * plan.tile_n
            for part in range(plan.parts_n(dtype)):
                width = plan.thread_n // plan.parts_n(dtype)
                with build.vectorized(width) as lane:
                    at = base + plan.column(block.thread, part, dtype) + lane
                    build.buffer_store(b_read, memory[at], [part * width + lane])
            with build.unroll(plan.thread_m) as i, build.unroll(plan.thread_n) as j:
                at = i * plan.thread_n + j
                build.buffer_store(sums, sums[at] + a_read[i] * b_read[j], [at])
        with when([step + 1 < tiles]):
            put((step + 1) % 2)
        barrier()


def _write(args: Arguments, block: Block, plan: Plan, memory: Expr, sums: Expr) -> None:
    """Bring the sums to the output, some columns at a time, through shared memory: in the order of the output."""
    dtype = args.problem.accumulate_dtype
    columns = plan.columns(dtype)
    pitch = plan.tile_m + 1
    rows_wide, columns_wide = plan.thread_m // plan.parts_m(dtype), plan.thread_n // plan.parts_n(dtype)
    for first in range(0, plan.tile_n, columns):
        if first:
            barrier()
        for part in range(plan.parts_n(dtype)):
            start = plan.column(block.thread, part, dtype)
            # All columns of one vector are in the same round.
            with (
                when([start >= first, start < first + columns] if columns < plan.tile_n else []),
                build.unroll(plan.thread_m) as i,
                build.unroll(columns_wide) as j,
            ):
                row = plan.row(block.thread, i // rows_wide, dtype) + i % rows_wide
                at = i * plan.thread_n + part * columns_wide + j
                build.buffer_store(memory, sums[at], [(start - first + j) * pitch + row])
        barrier()
        store_tile(
            args,
            block,
            (plan.tile_m, columns),
            first,
            plan.threads,
            plan.split,
            lambda row, column: memory[column * pitch + row],
        )
