"""The scheme of kernels for products: plans, the way of the operands to shared memory, and of sums out of it.

Every section of the problem (`compute/gather.py`) takes a range of the blocks of one launch. A block computes
``tile_m x tile_n`` elements of C, in terms of `tile_k`:

1. Tiles of A, gathered from the data, and of B, from the packed filter, are on their way to shared memory while the
   block multiplies those before: copied by ``cp.async`` if elements go as they are, 4 bytes or more at a time, else
   through registers. One barrier a tile; `stages` tiles are in memory or on their way.
2. A thread or a warp multiplies its part: that is the `Form`, of CUDA cores or of tensor cores.
3. C is scattered to the output through the epilogue, in the order of the output; or, if the sum is split, to the
   workspace, which a second launch adds up in order: no atomics, so results are the same in every run.

If several elements of the data go at a time and the caller's array is not aligned to them, the host launches a twin
that loads them one by one.
"""

from __future__ import annotations

import abc
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from typing import Any

from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import tirx as build

from tvm_deconv.compute.gather import Section, sections
from tvm_deconv.compute.indexing import Index, unravel
from tvm_deconv.compute.phases import Geometry
from tvm_deconv.compute.storage import storage_dtype, to_accumulator
from tvm_deconv.problem import Problem, element_bytes
from tvm_deconv.problem.arithmetic import ceil_div
from tvm_deconv.schedules.contract import Algorithm, Kernel, PlanT
from tvm_deconv.schedules.cuda.banks import BANKS, Access, best_pitch
from tvm_deconv.schedules.cuda.blocks import (
    Block,
    Box,
    Cells,
    Rows,
    each_block,
    finish_sums,
    neighbours,
    pack_sections,
    packed_elements,
    parts_of,
    sectors,
    store_rows,
    store_sums,
    store_tile,
    stored_together,
    tiles_of,
)
from tvm_deconv.schedules.cuda.emit import (
    MULTIPROCESSORS,
    Arguments,
    Rounding,
    aligned_or_not,
    as_it_is,
    barrier,
    deconv,
    local,
    one_task,
    shared,
    when,
)
from tvm_deconv.schedules.cuda.lower import RESIDENT, RESIDENT_THREADS
from tvm_deconv.schedules.cuda.products import joined
from tvm_deconv.schedules.cuda.warp import commit, copy, copy_by_elements, forget, four_times, wait
from tvm_deconv.targets import CudaTarget

#: Registers of a multiprocessor, those that a thread may have, and those for addresses.
_REGISTERS, _MOST_REGISTERS, _ADDRESSES = 64 << 10, 255, 30
#: Bytes of shared memory: that a block may declare; that its launch may give it, on all devices from 8.0 on; that a
#: multiprocessor of data centres' devices has for blocks; and that each block loses.
_DECLARED, _GIVEN, _SHARED, _LOST = 48 << 10, 99 << 10, 164 << 10, 1 << 10
_BYTES = {"float32": 4, "float64": 8, "int32": 4, "float16": 2, "uint16": 2, "int8": 1, "uint8": 1}
_LEAST_TERMS = 128  # of a part of a split sum
_MOST_PARTS = 32


@dataclass(frozen=True, slots=True)
class Plan:
    """Extents of the tiles of a block and of the part of a thread or warp; stages; and the parts of a split sum.

    Phases are joined along the last `joined` axes (`products.py`).
    """

    tile_m: int
    tile_n: int
    tile_k: int
    part_m: int
    part_n: int
    stages: int = 2
    split: int = 1
    joined: int = 0

    @property
    def parts(self) -> int:
        """Threads or warps of a block."""
        return self.tile_m // self.part_m * (self.tile_n // self.part_n)

    @property
    def knobs(self) -> dict[str, int]:
        """The fields by name."""
        return asdict(self)


class Form(abc.ABC):
    """How a block of a plan forms the sums of its tile, and which thread holds which.

    `threads` are those of a block, the first `holders` of them have sums.
    """

    algorithm: str
    #: Columns that go to the output in one round, and stages if A is copied, at most.
    most_columns: int
    most_stages: int
    #: Terms of a tile, in a search.
    terms: Sequence[int] = (8, 16, 32)
    #: Rows and columns of tiles whose blocks are a cluster.
    cluster: tuple[int, int] = (1, 1)
    #: Blocks of a cluster that have parts of the terms of a tile; each brings as many of its columns to the output.
    sharing_k: int = 1
    #: Tiles of rows and of columns that a block has one after the other.
    turns: tuple[int, int] = (1, 1)

    def __init__(self, problem: Problem, plan: Plan, dtype: str, threads: int) -> None:
        """Take the type of A and B in shared memory, and the number of threads of a block."""
        self.problem, self.plan, self.dtype, self.threads, self.holders = problem, plan, dtype, threads, threads
        self.lanes = 16 // _BYTES[dtype]

    @cached_property
    def sections(self) -> tuple[Section, ...]:
        """The products, those with the most terms first."""
        return sections(self.problem, self.plan.tile_k, self.plan.tile_n, self.geometry)

    @property
    def geometry(self) -> Geometry:
        """The phases that are columns of a product."""
        return joined(self.problem, self.plan.joined)

    @property
    @abc.abstractmethod
    def k_fastest(self) -> bool:
        """True if neighbours of A in shared memory are terms of one row, as channels that come last are."""

    @property
    @abc.abstractmethod
    def stage(self) -> int:
        """Elements of a stage."""

    @property
    @abc.abstractmethod
    def sums(self) -> int:
        """Sums of a thread."""

    @property
    @abc.abstractmethod
    def operands(self) -> int:
        """Registers of a thread for the operands that it multiplies at a time."""

    @property
    @abc.abstractmethod
    def term(self) -> float:
        """The cost of one term of a block's tile, in multiply-adds of CUDA cores."""

    @property
    def written(self) -> int:
        """Columns of a tile that a block brings to the output."""
        return self.plan.tile_n // self.sharing_k

    @cached_property
    def side_by_side(self) -> int:
        """Neighbours in the output that a thread stores at once from its sums; 0 if these go through shared memory."""
        return 0

    @property
    def moved(self) -> float:
        """Elements from the level-2 cache for one term of a block's tile, without those found in the nearest cache."""
        return self.plan.tile_m * self.fresh(self.sections[0]) + len(self.roundings) * self.plan.tile_n

    @property
    def byte_cost(self) -> float:
        """The cost of a byte from the level-2 cache, in multiply-adds of CUDA cores."""
        return L2_COST

    @property
    def latency(self) -> float:
        """The time of a tile of k from its request to its use, in the same."""
        return _LATENCY

    def output_cost(self, section: Section) -> float:  # noqa: ARG002
        """Return the cost of a sum on its way to the output, in the same."""
        return _OUTPUT

    @property
    def wavefronts(self) -> float:
        """Wavefronts of shared memory for one term of a block's tile, if the `term` does not count them."""
        return 0.0

    @property
    def busy(self) -> float:
        """The cost of one term of a block's tile, or of its operands, in multiply-adds."""
        moved = self.byte_cost * self.moved * _BYTES[self.dtype]
        return max(self.term, WAVEFRONT_COST * self.wavefronts, moved)

    @property
    def ahead(self) -> int:
        """Tiles of k that are on their way while one is multiplied."""
        return self.plan.stages - 1

    def opening(self, section: Section) -> float:  # noqa: ARG002
        """Return the cost of a block beside its products, in multiply-adds."""
        return 0.0

    @property
    def prepared(self) -> tuple[int, Callable[[Arguments], None] | None]:
        """The words of the workspace for data that products read there, and what launches what brings them."""
        return 0, None

    @property
    def preparing(self) -> float:
        """The cost of that launch, in multiply-adds of the device."""
        return 0.0

    def allocate(self) -> tuple[Expr, ...]:
        """Return the registers that products need besides the sums."""
        return ()

    def begin(self, args: Arguments, aligned: bool) -> Any:  # noqa: ARG002
        """Do the host's work before a launch for data that are `aligned` or not; return what `accumulate` is told."""
        return aligned

    @abc.abstractmethod
    def accumulate(
        self, args: Arguments, block: Block, begun: Any, memory: Expr, sums: Expr, registers: Sequence[Expr]
    ) -> None:
        """Leave the thread's sums of the block's tile in `sums`, and the shared memory free."""

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
        """Compute the block's tile and `write` it to the output; each of its tiles, if there are `turns`."""
        self.clear(args, block, sums)
        self.accumulate(args, block, begun, memory, sums, registers)
        output.write(block)

    def box(self, section: Section) -> Box | None:  # noqa: ARG002
        """Return the box that the rows of a tile are, if they are not the next in order."""
        return None

    @property
    def tail(self) -> tuple[int, Callable[[Expr], None] | None]:
        """The number of elements behind the packed filter, and what writes them."""
        return 0, None

    def clear(self, args: Arguments, block: Block, sums: Expr) -> None:  # noqa: ARG002
        """Begin the sums of a thread."""
        with build.unroll(self.sums) as i:
            build.buffer_store(sums, tirx.const(0, self.accumulator), [i])

    def packed_order(self, section: Section, number: Expr) -> Sequence[Index]:
        """Return group, tile of n, term and column within the tile of an element of the packed filter."""
        return unravel(number, section.shape)

    @abc.abstractmethod
    def cells(self, thread: Index) -> Iterator[Cells]:
        """Yield the rows and columns of the sums of a thread, neighbouring columns together."""

    @abc.abstractmethod
    def reads(self, thread: int) -> Iterator[tuple[Index, int]]:
        """Yield what a thread reads of a stage for its first terms: places, and bytes from there on."""

    @property
    def roundings(self) -> Sequence[Rounding]:
        """How elements of the filter are packed, once for each."""
        return [as_it_is]

    @property
    def accumulator(self) -> str:
        """The type of the sums."""
        return self.problem.accumulate_dtype

    @property
    def stored(self) -> bool:
        """True if elements of the data go to shared memory as they are."""
        return storage_dtype(self.problem.dtype) == self.dtype

    @property
    def wide(self) -> int:
        """Elements of the data that one copy moves: neighbouring channels, if those are neighbours in A too."""
        if not (self.stored and self.problem.data_format == "NXC" and self.k_fastest):
            return 1
        return math.gcd(self.problem.in_channels, self.lanes)

    @property
    def copies(self) -> bool:
        """True if A goes to shared memory by ``cp.async``."""
        return self.stored and self.wide * _BYTES[self.dtype] >= 4

    def fresh(self, section: Section) -> float:
        """Return the part of A's elements that a block reads for the first time: others are in the nearest cache.

        Tiles of k that follow each other are of the same channels and the next tap, so that they read the same data but
        for those at the ends of the rows.
        """
        part, rows = 1.0, self.plan.tile_m
        if not section.alike:
            return part
        for extent, run in zip(section.extents[:0:-1], section.runs[::-1], strict=True):
            length = min(rows, extent)
            part *= min(1.0, (length + (run.taps - 1) * run.x_step) / (length * run.taps))
            rows = -(-rows // extent)
        return part

    @property
    def divides(self) -> bool:
        """True if tiles of k have terms of several taps: each term is found by divisions."""
        return not all(section.alike for section in self.sections)

    @property
    def resident(self) -> int:
        """Threads that a multiprocessor is to hold at least."""
        return RESIDENT

    @property
    def has_registers(self) -> bool:
        """True if a thread has enough registers for the plan, as far as that can be told."""
        return self.registers <= min(_MOST_REGISTERS, _REGISTERS // self.resident)

    @property
    def registers(self) -> int:
        """The approximate number of registers of a thread; staged elements need addresses too."""
        sums = self.sums * _BYTES[self.accumulator] // 4
        size = max(2, _BYTES[self.dtype])  # a register holds one element
        staged = 0 if self.copies else 2 * self.plan.tile_m * self.plan.tile_k * size // 4 // self.threads
        return sums + self.operands + staged + _ADDRESSES

    @property
    def memory_bytes(self) -> int:
        """Shared memory of a block."""
        return self.plan.stages * self.stage * _BYTES[self.dtype]

    @property
    def sums_bytes(self) -> int:
        """Shared memory, from its beginning on, through which sums go to the output: of stages, which are free then."""
        return self.memory_bytes

    @property
    def memory_elements(self) -> int:
        """Elements of shared memory: all stages."""
        return self.plan.stages * self.stage

    @property
    def fits(self) -> bool:
        """True if the shared memory of a multiprocessor suffices for the blocks that it should hold."""
        blocks = max(1, self.resident // self.threads)
        return self.memory_bytes <= min(_GIVEN, _SHARED // blocks - _LOST)

    @property
    def scope(self) -> str:
        """The memory of the stages: a block that needs more than it may declare is given it at launch."""
        return "shared" if self.memory_bytes <= _DECLARED else "shared.dyn"


class Gathered(Form):
    """Tiles of A come to shared memory by copies of threads."""

    @property
    def together(self) -> int:
        """Terms of a row that one thread gathers to registers and stores together, if A is not copied."""
        return 1

    @abc.abstractmethod
    def a(self, m: Index, k: Index) -> Index:
        """Return the place of an element of A in its stage."""


class Copied(Gathered):
    """Tiles of B do, too, by all threads, which then multiply."""

    @property
    @abc.abstractmethod
    def b_first(self) -> int:
        """The first element of B in a stage."""

    @abc.abstractmethod
    def b(self, k: Index, n: Index, part: int = 0) -> Index:
        """Return the place of an element of B in its stage, of the filter packed by rounding number `part`."""

    def vector(self, number: Index) -> tuple[Index, Index]:
        """Return term and column of the first element of a vector of a tile of B, in the order of the packed filter."""
        across = self.plan.tile_n // self.lanes
        return number // across, number % across * self.lanes

    @abc.abstractmethod
    def multiply(
        self, thread: Expr, step: Expr, memory: Expr, base: Expr, sums: Expr, registers: Sequence[Expr]
    ) -> None:
        """Add the product of tile number `step`, whose stage begins at `base`."""

    def finish(self, sums: Expr, registers: Sequence[Expr]) -> None:
        """Bring to `sums` what `multiply` may hold elsewhere."""

    def accumulate(
        self, args: Arguments, block: Block, begun: Any, memory: Expr, sums: Expr, registers: Sequence[Expr]
    ) -> None:
        """See Form."""
        _sum(args, block, self, begun, memory, sums, registers)


#: In multiply-adds of CUDA cores, 128 a clock of a multiprocessor, fitted to plans that an H100 ran: a byte from the
#: level-2 cache by copies of threads, and by TMA; one of the gaps in stored sectors; a wavefront; the time of a tile of
#: k from its request to its use; a sum on its way to the output.
L2_COST, TMA_COST, _GAP, WAVEFRONT_COST, _LATENCY, _OUTPUT = 6, 2.8, 7, 200, 1350 * 128, 33
#: In multiply-adds of all multiprocessors, 33 a picosecond: a partial sum, written and read; a second launch.
_PARTIAL, _LAUNCH = 64, 3.4e7
#: Multiprocessors that have some of the blocks of a cluster, by their number.
_CLUSTERED = {1: MULTIPROCESSORS, 2: MULTIPROCESSORS, 4: 120, 8: 112}
#: Threads that gather terms of one row at a time.
_ACROSS = 8
#: The cost of gathering an element of A, in multiply-adds, if its place is found by divisions.
DIVISIONS = 32
#: Words of a vector in shared memory: lines begin at multiples of them.
_VECTOR = 4
_WORD = 4  # bytes
#: Columns that go to the output in one round if they are halves of words: a line is a word of each bank.
_HALVES = 2 * BANKS
#: Columns of a row that a thread stores, at most.
_FEW = 16
#: Sums of a thread whose channels may take divisions, at most.
_MOST_SUMS = 64
#: Pitches of lines of sums, and accesses with them, by all that they depend on.
_WAYS: dict[tuple[Any, ...], tuple[int, list[Access]]] = {}


def cost(form: Form) -> float:
    """Return the time of a plan by arithmetic, in multiply-adds of the device.

    A term of a tile costs the `term` of the form, the time of shared memory, or that of its operands from the level-2
    cache, without those that taps find again in the nearest. A block that waits for its tiles takes until they arrive:
    all stages but one are on their way. Sums go to the output, and gaps in stored sectors take the level-2 cache, too.
    The time is that of the longest block, of the work of a multiprocessor, or of blocks in waves. Split sums move parts
    in a second launch.
    """
    problem, plan, all_sections = form.problem, form.plan, form.sections
    if not all_sections:
        return 0.0
    busy = plan.tile_k * form.busy

    def length(section: Section, tile: float) -> float:
        turns = form.turns[0] * min(form.turns[1], section.tiles_n)
        output = form.output_cost(section) * plan.tile_m * form.written
        output += gaps_cost(form, section, form.box(section))
        return turns * (section.tiles_k / plan.split / form.sharing_k * tile + output)

    counts = [blocks_of(form, section) * plan.split for section in all_sections]
    worked = [length(section, busy) for section in all_sections]
    waited = [form.opening(section) + length(section, max(busy, form.latency / form.ahead)) for section in all_sections]
    blocks, units = sum(counts), _CLUSTERED[math.prod(form.cluster) * form.sharing_k]
    together = min(max(1, form.resident // form.threads), ceil_div(blocks, units))
    work, waves = _mean(counts, worked) * ceil_div(blocks, units), ceil_div(blocks, units * together)
    in_waves = _mean(counts, waited) * waves
    partial = _LAUNCH + _PARTIAL * plan.split * math.prod(problem.output_shape) if plan.split > 1 else 0
    return MULTIPROCESSORS * max([*waited, work, in_waves]) + partial + form.preparing


def _mean(counts: Sequence[int], values: Sequence[float]) -> float:
    return sum(count * value for count, value in zip(counts, values, strict=True)) / sum(counts)


def blocks_of(form: Form, section: Section) -> int:
    """Return the number of blocks for a section, of sums that are not split: whole clusters."""
    tiles = tiles_of(section, form.plan.tile_m, form.box(section)), section.tiles_n
    counts = map(ceil_div, tiles, form.turns)
    whole = [ceil_div(count, of) * of for count, of in zip(counts, form.cluster, strict=True)]
    return section.geometry.groups * math.prod(whole) * form.sharing_k


def filled(plan: Plan, form: Callable[[Problem, Plan], Form], problem: Problem) -> Plan:
    """Return `plan` with as many stages as fit and are of use, and the parts of sums that cost the least.

    If A comes through registers, a third stage would wait for nothing. Parts have 128 terms at least, and no part of
    the longest sums is empty.
    """
    made = form(problem, plan)
    stages = made.most_stages if made.copies else 2
    while stages > 2 and not form(problem, replace(plan, stages=stages)).fits:
        stages -= 1
    tiles = max((section.tiles_k for section in made.sections), default=1)
    most = max(1, min(tiles * plan.tile_k // _LEAST_TERMS, _MOST_PARTS))
    parts = [split for split in range(1, most + 1) if -(-tiles // -(-tiles // split)) == split]
    plans = (replace(plan, stages=stages, split=split) for split in parts)
    return min(plans, key=lambda plan: cost(form(problem, plan)))


def cheapest(shapes: Iterable[Plan], form: Callable[[Problem, Plan], Form], problem: Problem) -> tuple[float, Plan]:
    """Return the plan of the least cost of `shapes`, each `filled`, behind its cost."""
    plans = (filled(shape, form, problem) for shape in shapes)
    return min(((cost(form(problem, plan)), plan) for plan in plans), key=lambda candidate: candidate[0])


def searched(
    shapes: Iterable[Plan], form: Callable[[Problem, Plan], Form], problem: Problem
) -> list[tuple[float, Plan]]:
    """Return plans like `shapes` with other stages, tiles of k and parts of sums, with their costs, the cheapest first.

    They fit into memory and registers.
    """
    plans: set[Plan] = set()
    tiles = (replace(shape, tile_k=tile_k) for shape in shapes for tile_k in form(problem, shape).terms)
    for shape, stages in itertools.product(tiles, range(2, 5)):
        split = filled(shape, form, problem).split
        for parts in sorted({1, max(1, split // 2), split, min(2 * split, _MOST_PARTS)}):
            plan = replace(shape, stages=stages, split=parts)
            made = form(problem, plan)
            if made.fits and made.has_registers:
                plans.add(plan)
    return sorted(((cost(form(problem, plan)), plan) for plan in plans), key=lambda pair: pair[0])


@dataclass(frozen=True, kw_only=True)
class TiledAlgorithm(Algorithm[CudaTarget, PlanT]):
    """An algorithm whose kernels have tiles: plans have a `form`."""

    form: Callable[[Problem, PlanT], Form]


def matrix_algorithm(
    name: str,
    form: Callable[[Problem, Plan], Form],
    shapes: Callable[[Problem], Iterable[Plan]],
    supports: Callable[[Problem, CudaTarget], bool],
    is_default_for: Callable[[Problem, CudaTarget], bool],
    caveat: str = "",
) -> TiledAlgorithm[Plan]:
    """Return the record of the algorithm `name`: its kernels have a `form`, its plans are like a problem's `shapes`."""
    return TiledAlgorithm(
        name=name,
        form=form,
        supports=supports,
        is_default_for=is_default_for,
        candidates=lambda problem, target: searched(shapes(problem), form, problem),  # noqa: ARG005
        read=lambda knobs: Plan(**knobs),
        tasks=one_task,
        build=lambda problem, target, plan: matrix_kernel(form(problem, plan)),  # noqa: ARG005
        default=lambda problem, target: cheapest(shapes(problem), form, problem),  # noqa: ARG005
        caveat=caveat,
    )


def matrix_kernel(form: Form) -> Kernel:
    """Build the kernel of a form."""
    problem, plan, all_sections = form.problem, form.plan, form.sections
    elements = len(form.roundings) * packed_elements(all_sections) + form.tail[0]
    outputs = math.prod(problem.replace(batch=max(problem.batch, 1)).output_shape) if plan.split > 1 else 0
    words, prepare = form.prepared
    workspace = plan.split * outputs + words
    with deconv(problem, elements, form.dtype, workspace) as (function, args):

        def allocate() -> tuple[Expr, ...]:
            memory = shared(form.memory_elements, form.dtype, form.scope)
            rounds = memory
            if form.dtype != form.accumulator:
                size = form.memory_elements * _BYTES[form.dtype] // _BYTES[form.accumulator]
                rounds = build.decl_buffer([size], form.accumulator, data=memory.data, scope=form.scope, layout=None)
            return memory, rounds, local(form.sums, form.accumulator), *form.allocate()

        def launches(aligned: bool) -> None:
            begun = form.begin(args, aligned)

            def body(block: Block, memory: Expr, rounds: Expr, sums: Expr, *registers: Expr) -> None:
                form.compute(args, block, begun, memory, sums, registers, Output(args, form, rounds, sums))

            extents = plan.tile_m, form.turns, (form.sharing_k, *form.cluster)
            each_block(all_sections, extents, form.box, form.threads, plan.split, allocate, body)

        if prepare is not None:
            prepare(args)
        aligned_or_not([args.data] if form.wide > 1 else [], form.wide * _BYTES[form.dtype], launches)
        finish_sums(args, plan.split)
    pack = pack_sections(problem, all_sections, form.dtype, form.roundings, form.packed_order, *form.tail)
    return Kernel(
        problem=problem,
        deconv=function.done.with_attr(RESIDENT_THREADS, form.resident),
        pack=pack,
        algorithm=form.algorithm,
        knobs=plan.knobs,
        packed_elements=elements,
        packed_dtype=form.dtype,
        workspace_elements=workspace,
        dynamic_bytes=form.memory_elements * _BYTES[form.dtype] if form.scope == "shared.dyn" else 0,
    )


class Gather:
    """The way of tiles of A to shared memory: `start` one, and `finish` the elements in registers.

    If channels are contiguous, neighbouring threads take neighbouring terms, a sector of memory or more, and further
    terms of their few rows; else they take neighbouring rows.
    """

    def __init__(
        self, args: Arguments, block: Block, form: Gathered, memory: Expr, aligned: bool, threads: int
    ) -> None:
        """Take the number of threads; `block.thread` is that of each among these."""
        plan, thread = form.plan, block.thread
        self.args, self.form, self.memory = args, form, memory
        size = _BYTES[form.dtype]
        copied, again, zero = form.wide * size, math.prod(block.section.taps) > 1, args.zero_point
        # What lies outside of the data counts as nothing: as its zero point, if elements go as they are.
        self.outside = tirx.const(0, form.dtype) if zero is None or not form.stored else zero.astype(form.dtype)
        fill = None if zero is None else build.bind(four_times(self.outside))
        self.copy = partial(copy, copied, again=again) if aligned else partial(copy_by_elements, copied, size)
        self.copy = partial(self.copy, fill=fill)
        length = form.wide if form.copies else form.together
        if args.problem.data_format == "NXC":
            across = min(plan.tile_k // length, _ACROSS)
            rows = [thread // across + j * (threads // across) for j in range(plan.tile_m * across // threads)]
            terms: list[Index] = [(thread % across + j) * length for j in range(0, plan.tile_k // length, across)]
        else:
            along = min(plan.tile_m, threads)
            rows = [thread % along + j * along for j in range(plan.tile_m // along)]
            count = plan.tile_k * along // threads // length
            terms = [(thread // along + j * (threads // along)) * length for j in range(count)]
        if not form.copies:
            terms = [term + k for term in terms for k in range(length)]
        self.rows, self.terms = Rows(args, block, plan.tile_m, rows), terms
        self.places = [(number, row, term) for number, row in enumerate(rows) for term in range(len(terms))]
        self.data = args.flat_data()
        self.staged: Any = None if form.copies else local(len(self.places), form.dtype)

    def start(self, tile: Index, base: Index) -> None:
        """Begin with tile number `tile` of k, for the stage at `base`."""
        terms = [self.rows.term(tile, term) for term in self.terms]
        for at, (number, row, term) in enumerate(self.places):
            place, inside = self.rows.source(number, terms[term])
            if self.staged is None:
                to = base + self.form.a(row, self.terms[term])
                self.copy(self.memory, to, self.data[place], inside)
            else:
                self._load(at, self.data[place], inside)

    def _load(self, at: int, element: Expr, inside: list[Expr]) -> None:
        """Load an element to a register; load nothing unless it is `inside`."""
        form = self.form
        if not form.stored:
            element = self.args.shifted(to_accumulator(element, form.problem.dtype, form.dtype))
        if inside:
            element = tirx.if_then_else(tirx.all(*inside), element, self.outside)
        build.buffer_store(self.staged, element, [at])

    def finish(self, base: Index) -> None:
        """Store the elements in registers to the stage at `base`, as many together as are neighbours there."""
        together = self.form.together
        for at, (_, row, term) in list(enumerate(self.places))[::together]:
            with build.vectorized(together) if together > 1 else nullcontext(0) as k:
                place = base + self.form.a(row, self.terms[term]) + k
                build.buffer_store(self.memory, self.staged[at + k], [place])


def _sum(
    args: Arguments, block: Block, form: Copied, aligned: bool, memory: Expr, sums: Expr, registers: Sequence[Expr]
) -> None:
    """Leave the thread's sums of the block's tile in `sums`: stages go round, one barrier for each tile of k."""
    plan, section, thread = form.plan, block.section, block.thread
    gather = Gather(args, block, form, memory, aligned, form.threads)
    first, count = parts_of(section, plan.split, block.part)
    ahead = form.ahead
    vectors = plan.tile_k * plan.tile_n // form.lanes

    def start(tile: Index, base: Index) -> None:
        gather.start(first + tile, base)
        place = (block.group * section.tiles_n + block.tile_n) * args.const(section.tiles_k) + first + tile
        begin = args.const(section.offset) + place * (plan.tile_k * plan.tile_n)
        for part, j in itertools.product(range(len(form.roundings)), range(-(-vectors // form.threads))):
            number = thread + j * form.threads
            with when([number < vectors] if vectors % form.threads else []):
                to = base + form.b(*form.vector(number), part)
                source = begin + number * form.lanes + part * packed_elements(form.sections)
                copy(16, memory, to, args.packed[source], [])

    with build.serial(0, ahead) as tile:
        with when([tile < count]):
            start(tile, tile * form.stage)
            if not form.copies:
                gather.finish(tile * form.stage)
        commit()
    with build.serial(0, count) as step:
        wait(ahead - 1)
        barrier()
        # Of the last tiles there are no next ones; every thread of the block agrees on that.
        there, base = [step + ahead < count], (step + ahead) % plan.stages * form.stage
        with when(there):
            start(step + ahead, base)
        commit()
        form.multiply(thread, step, memory, step % plan.stages * form.stage, sums, registers)
        if not form.copies:
            with when(there):
                gather.finish(base)
    form.finish(sums, registers)
    barrier()


@dataclass(frozen=True)
class Rounds:
    """The way of sums to the output through shared memory, `columns` at a time, and where they lie there.

    They lie in the order of the output, so that neighbouring threads read neighbouring words: by rows if channels are
    last, else by output channels, whose phases of the last axis lie side by side. The pitch leaves a warp the fewest
    wavefronts.
    """

    form: Form
    section: Section
    columns: int

    @staticmethod
    def of(form: Form, section: Section) -> Rounds:
        """Return the rounds with the most columns for which the memory of the stages has room."""
        columns = min(form.written, form.most_columns)
        if Rounds(form, section, columns).rounded:
            columns = _HALVES
        while (rounds := Rounds(form, section, columns)).size * rounds.bytes > form.sums_bytes:
            columns //= 2
        return rounds

    @cached_property
    def rounded(self) -> bool:
        """True if sums are rounded before: to halves of a word, two of them side by side and enough for all banks.

        With 128 sums a thread has no registers for the channels of columns that are found by divisions.
        """
        form, channels = self.form, self.section.geometry.out_channels
        divided = channels & (channels - 1) > 0 and form.sums > _MOST_SUMS
        halves = element_bytes(form.problem.output_dtype) == _WORD // 2 and form.written % _HALVES == 0
        pairs = self.section.channels_last and _stored(form, self.section, _HALVES) % 2 == self.together % 2 == 0
        return halves and pairs and not divided

    @cached_property
    def dtype(self) -> str:
        """The type of the elements there."""
        return storage_dtype(self.form.problem.output_dtype) if self.rounded else self.form.accumulator

    @property
    def bytes(self) -> int:
        """The bytes of an element."""
        return _BYTES[self.dtype]

    @cached_property
    def inner(self) -> int:
        """Columns that lie side by side."""
        return self.columns if self.section.channels_last else neighbours(self.section, self.columns)

    @property
    def size(self) -> int:
        """Sums, with padding."""
        lines = self.form.plan.tile_m if self.section.channels_last else self.columns // self.inner
        return lines * self.pitch

    @cached_property
    def together(self) -> int:
        """Columns of a thread that go to shared memory at a time."""
        (_, (_, columns), _), *_ = self.form.cells(0)
        return math.gcd(columns, self.inner)

    @cached_property
    def read(self) -> int:
        """Sums that a thread takes at a time to the output."""
        return _stored(self.form, self.section, self.columns, 8 if self.rounded else 4)

    @cached_property
    def by_rows(self) -> bool:
        """True if a thread stores all columns of a row, which are few, and none of which are stored together."""
        form, section = self.form, self.section
        all_columns = section.channels_last and section.tiles_n == form.sharing_k == form.plan.split == 1
        return all_columns and self.read == 1 and section.n <= min(self.columns, _FEW) and self.bytes == _WORD

    @property
    def firsts(self) -> range:
        """The first column of each round; of few columns there is nothing behind the first round."""
        return range(0, self.columns if self.by_rows else self.form.written, self.columns)

    @property
    def pitch(self) -> int:
        """Elements from one line to the next."""
        return self._way[0]

    @property
    def taken(self) -> list[Access]:
        """The accesses of the first warp."""
        return self._way[1]

    @cached_property
    def _way(self) -> tuple[int, list[Access]]:
        """The pitch and the accesses, which other plans of the same tiles have too."""
        form, last = self.form, self.section.channels_last
        parts = form.plan.part_m, form.plan.part_n, form.plan.tile_m, form.plan.tile_n, form.sums, form.sharing_k
        each_row = self.by_rows and self.section.n
        alike = type(form), parts, self.columns, last, self.inner, self.together, self.read, self.bytes, each_row
        if alike not in _WAYS:
            length = self.columns + _VECTOR * self.by_rows if last else form.plan.tile_m * self.inner
            each = max(1, _WORD // self.bytes)
            pitch = each * best_pitch(-(-length // each), _VECTOR, lambda words: self.accesses(each * words))
            _WAYS[alike] = pitch, list(self.accesses(pitch))
        return _WAYS[alike]

    def place(self, row: Index, column: Index, pitch: int | None = None) -> Index:
        """Return the place of a sum."""
        pitch = self.pitch if pitch is None else pitch
        if self.by_rows:  # four rows lie apart from the next four, as threads of both read vectors together
            return row * pitch + row // _VECTOR % 2 * _VECTOR + column
        if self.section.channels_last:
            return row * pitch + column
        return column // self.inner * pitch + row * self.inner + column % self.inner

    def accesses(self, pitch: int) -> Iterator[Access]:
        """Yield the accesses of the first warp: what it writes, then what it reads."""
        lanes, together, columns = range(32), self.together, self.columns
        of_lanes = [list(self.form.cells(lane)) for lane in lanes]
        for number, (_, extents, _) in enumerate(of_lanes[0]):
            for i, j in itertools.product(range(extents[0]), range(0, extents[1], together)):
                places = []
                for groups in of_lanes:
                    start, _, cell = groups[number]
                    row, column, _ = cell(i, j)
                    places.append(self.place(row, (start + column) % columns, pitch))
                yield self._words(places, together)
        if self.by_rows:
            vectors, shared = ceil_div(self.section.n, _VECTOR), ceil_div(self.form.plan.tile_n, self.form.sums)
            for vector in range(ceil_div(vectors, shared)):
                yield [self.place(lane, _VECTOR * vector, pitch) for lane in lanes], _VECTOR
            return
        line, read = columns if self.section.channels_last else self.form.plan.tile_m * self.inner, self.read
        numbers = [lane * read for lane in lanes]
        taken = self._words([number // line * pitch + number % line for number in numbers], read)
        yield from itertools.repeat(taken, self.form.sums // self.form.sharing_k // read)

    def _words(self, places: list[int], count: int) -> Access:
        """Return the access of so many elements at these places."""
        size = self.bytes
        if size >= _WORD:
            return places, count
        return [place * size // _WORD for place in places], count * size // _WORD


def _stored(form: Form, section: Section, columns: int, most: int = 8) -> int:
    """Return how many sums of a tile are stored together, at `most`; those of a part of a split sum are not.

    Where positions are neighbours in the output, those of a line of a box are, or none if the next row is an image.
    Lines of padded positions are longer.
    """
    if form.plan.split > 1:
        return 1
    together = stored_together(form.problem, section, columns, most)
    box = None if section.channels_last else form.box(section)
    if box is None:
        return together
    line = box.padded[-1] if box.padded else 1 if box.fastest else box.lengths[-1]
    return math.gcd(together, neighbours(section, columns) * line)


def gaps_cost(form: Form, section: Section, box: Box | None) -> float:
    """Return the cost of the gaps in the sectors that a block stores if its rows are a `box`, in multiply-adds.

    Parts of split sums are accumulators.
    """
    plan = form.plan
    rows = min(plan.tile_m, section.extents[-1]) if box is None else box.neighbours(section)
    size = _BYTES[form.accumulator] if plan.split > 1 else element_bytes(form.problem.output_dtype)
    share = sectors(section, min(form.written, 4 * form.side_by_side or form.most_columns), rows, size)
    return _GAP * plan.tile_m * form.written * size * (share - 1)


def accesses(form: Form) -> tuple[list[Access], list[Access]]:
    """Return what the first warp takes of shared memory in one step of the main loop, and on the way to the output."""
    lanes = [list(form.reads(lane)) for lane in range(32)]
    size = _BYTES[form.dtype]
    reads: list[Access] = [
        ([int(place) * size // 4 for place, _ in those], those[0][1] // 4) for those in zip(*lanes, strict=True)
    ]
    return reads, [] if form.side_by_side else Rounds.of(form, form.sections[0]).taken


class Output:
    """The way of a block's sums to the output, some columns at a time, through shared memory: in the output's order.

    Those threads `bring` sums there that have them; others may `store` them.
    """

    def __init__(self, args: Arguments, form: Form, memory: Expr, sums: Expr) -> None:
        """Take the memory, an array of accumulators, and a thread's sums."""
        self.args, self.form, self.memory, self.sums = args, form, memory, sums

    def write(self, block: Block) -> None:
        """Bring all sums of a block to the output, once its shared memory is free."""
        form = self.form
        holds = [block.thread < form.holders] if form.holders < form.threads else []
        if form.side_by_side:
            with when(holds):
                store_sums(self.args, block, form.plan.tile_m, self.sums, list(form.cells(block.thread)))
            return
        rounds = Rounds.of(form, block.section)
        for first in rounds.firsts:
            if first:
                barrier()
            self.bring(block, rounds, first, holds)
            barrier()
            forget(block.thread)
            self.store(block, rounds, first, form.threads)

    def _place(self, rounds: Rounds) -> Expr:
        """Return the memory as an array of what lies there."""
        if not rounds.rounded:
            return self.memory
        elements = int(self.memory.shape[0]) * _BYTES[self.form.accumulator] // rounds.bytes
        data = self.memory.data
        return build.decl_buffer([elements], rounds.dtype, data=data, scope=self.form.scope, layout=None)

    def bring(self, block: Block, rounds: Rounds, first: int, holds: Sequence[Expr], begin: int = 0) -> None:
        """Bring the thread's sums of a round, whose columns are from `first` on, to shared memory from `begin` on."""
        args, form, memory = self.args, self.form, self._place(rounds)

        def bring(column: Index, number: Index, place: Index) -> None:
            """Bring sums of neighbouring columns."""
            values, start = self.sums, number
            if rounds.rounded:
                channel, _ = block.section.column(block.tile_n * block.section.tile_n + block.column + column)
                channel = block.group * block.section.geometry.out_channels + channel
                values, start = args.finished(channel, [self.sums[number + k] for k in range(rounds.together)]), 0
            with build.vectorized(rounds.together) if rounds.together > 1 else nullcontext(0) as lane:
                build.buffer_store(memory, values[start + lane], [place + lane])

        forget(block.thread)
        several = rounds.columns < form.written
        for start, extents, cell in form.cells(block.thread):
            # All columns that one gives are in the same round.
            within = [start >= first, start < first + rounds.columns] if several else []
            with (
                when([*holds, *within]),
                build.unroll(extents[0]) as i,
                build.unroll(extents[1] // rounds.together) as j,
            ):
                row, column, number = cell(i, j * rounds.together)
                bring(start + column, number, begin + rounds.place(row, start - first + column))

    def store(self, block: Block, rounds: Rounds, first: int, threads: int, begin: int = 0, few: int = 0) -> None:
        """Store a round of sums from there to the output by so many threads, among which `block.thread` is each.

        See `store_tile`.
        """
        args, memory = self.args, self._place(rounds)
        if rounds.by_rows:
            store_rows(args, block, self.form.plan.tile_m, threads, partial(self._sums_of_row, rounds, memory, begin))
            return
        extents = self.form.plan.tile_m, rounds.columns

        def value(row: Index, column: Index) -> Expr:
            return memory[begin + rounds.place(row, column)]

        store = partial(store_tile, args, block, extents, block.column + first, threads, self.form.plan.split)
        if rounds.read == 1:
            store(1, rounds.rounded, value, few)
            return
        size = rounds.read * element_bytes(args.problem.output_dtype)
        aligned_or_not(
            [args.out], size, lambda aligned: store(rounds.read if aligned else 1, rounds.rounded, value, few)
        )

    def _sums_of_row(self, rounds: Rounds, memory: Expr, begin: int, row: Index) -> Expr:
        """Return the sums of a row from shared memory, by vectors, as an array."""
        count = ceil_div(rounds.section.n, _VECTOR)
        sums = local(_VECTOR * count, rounds.dtype)
        for vector in range(0, _VECTOR * count, _VECTOR):
            with build.vectorized(_VECTOR) as lane:
                build.buffer_store(sums, memory[begin + rounds.place(row, vector + lane)], [vector + lane])
        return sums
