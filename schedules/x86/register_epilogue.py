"""The epilogue in registers: bias, activation, shuffles and stores of the output right behind a reduction.

Nothing of a block is then written to be read again, and the stores of a register tile overlap with the products of the
next. Stores after a whole block take their full time, ordinary ones and those past the caches alike. `register_rows`,
`register_parts` and `register_channels` say when a register tile holds vectors of the output, and store these; this
module has what they share.

TBAA metadata of the stores past the caches (``vector_store.ll``) tells LLVM that they leave the accumulators alone;
without it LLVM writes and reads the accumulators around each store.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from string import Template

from tvm import ir, tirx
from tvm.ir import Expr
from tvm.s_tir import SBlock, SBlockRealize
from tvm.tirx import Bind, Buffer, BufferLoad, BufferStore, For, ForKind, IfThenElse, IntImm, PrimFunc, SeqStmt, Stmt

from tvm_deconv.compute.direct import DirectDefinition
from tvm_deconv.compute.direct_layout import FilterSection
from tvm_deconv.compute.indexing import LEAD
from tvm_deconv.compute.requantization import finished, stored
from tvm_deconv.compute.storage import storage_dtype
from tvm_deconv.problem import Problem
from tvm_deconv.schedules.x86.statements import first_block, with_body
from tvm_deconv.schedules.x86.stores import llvm_source
from tvm_deconv.schedules.x86.variants import call_extents, inlined

_MISALIGNMENT = "tvm_deconv_misalignment"  # of `vector_store.ll`
#: The buffer of a schedule that is still used, besides the accumulators and those of `Terms`.
_DATA = "data_pack"
#: LLVM's name of the type of an output in memory, and its bytes.
LLVM_TYPES = {
    "float32": ("float", 4),
    "float64": ("double", 8),
    "int32": ("i32", 4),
    "float16": ("half", 2),
    "uint16": ("i16", 2),
    "int8": ("i8", 1),
    "uint8": ("i8", 1),
}


def store_functions(dtype: str, lanes: int) -> str:
    """Return the LLVM IR of stores past the caches of vectors of `lanes` outputs, stored as `dtype`."""
    name, size = LLVM_TYPES[dtype]
    return Template(llvm_source("vector_store.ll")).substitute(vector=f"<{lanes} x {name}>", bytes=lanes * size)


def select_by_alignment(streaming: PrimFunc, ordinary: PrimFunc) -> PrimFunc:
    """Return `streaming` for outputs that begin at a vector's alignment, joined with `ordinary` for all others.

    Past the caches only whole, aligned vectors can be stored. An output that begins at a vector's alignment, as the
    library's own arrays do, has only those.
    """
    out = streaming.params[-1]
    begin = address(out, [tirx.const(0, "int64") for _ in out.shape])
    misalignment = tirx.call_extern("int32", _MISALIGNMENT, begin)
    other = ir.load_json(ir.save_json(ordinary))  # with variables and buffers of its own
    body = inlined(other, streaming.params, call_extents(streaming), 0)
    return streaming.with_body(IfThenElse(misalignment == 0, streaming.body, body))


@dataclass(frozen=True, slots=True)
class RegisterTile:
    """A register tile at the end of its reduction, of one `section` of the filter.

    The `accumulators` have the indices `lead`, a phase of each axis, and those of a channel and a position; `finished`
    sums have the same ones, and are those of `accumulators` where types allow it. `phases` are the loop variables over
    tiles of phases, and `number` is that over tiles of positions. `part` is the number of the register tile among those
    of a tile of channels. `ends` are the extents of the output along three axes; of a dynamic one, the outputs that the
    block has.
    """

    section: FilterSection
    accumulators: Buffer
    finished: Buffer
    lead: Sequence[Expr]
    phases: Sequence[Expr]
    number: Expr
    part: Expr
    ends: Sequence[Expr]

    def phase(self, row: Expr | int, column: Expr | int) -> list[Expr]:
        """Return the phase of each axis, counted within its run, of a `row` and `column` of the tile's phases."""
        (fd, fh, fw), (rows, columns) = self.phases, self.section.phases
        return [fd, fh * rows + row, fw * columns + column]


@dataclass(frozen=True, slots=True)
class Terms:
    """The buffers of what sums meet by their channels, packed: those of the stages of a direct definition.

    The `offsets`, one buffer for each section of the filter, have the `bias` in them. `constants` are the parameter
    that a quantized problem has in the place of the bias.
    """

    bias: Buffer | None
    offsets: Sequence[Buffer]
    scales: Buffer | None
    constants: Buffer | None

    @staticmethod
    def of(func: PrimFunc, problem: Problem) -> Terms:
        """Return those of `func`, a scheduled definition of `problem`."""
        buffers = {buffer.name: buffer for buffer in func.body.block.alloc_buffers}
        numbered = (f"offset_pack_{i}" for i in range(len(buffers)))
        offsets = [buffers[name] for name in numbered if name in buffers]
        constants = func.params[2] if problem.quantization else None
        return Terms(buffers.get("bias_pack"), offsets, buffers.get("scale_pack"), constants)

    @property
    def buffers(self) -> list[Buffer]:
        """Those that are packed."""
        return [buffer for buffer in (self.bias, *self.offsets, self.scales) if buffer is not None]


@dataclass(frozen=True)
class RegisterEpilogue(abc.ABC):
    """Replaces all that follows the reduction in each register tile, where sums meet `terms`; `out` is the caller's.

    `rounding`, if not empty, is the function that rounds a vector to the type of the output.
    """

    problem: Problem
    definition: DirectDefinition
    terms: Terms
    out: Buffer
    rounding: str

    @abc.abstractmethod
    def stores(self, tile: RegisterTile) -> list[Stmt]:
        """Return the statements that finish and store a register tile."""

    def root(self, root: SBlockRealize) -> SBlockRealize:
        """Return the outermost block with the stages behind the reduction replaced, without their buffers."""
        block = root.block
        accumulators = {f"run_{i}_global" for i in range(len(self.definition.sections))}
        kept = [buffer for buffer in block.alloc_buffers if buffer.name in {_DATA, *accumulators}]
        kept += self.terms.buffers
        results = {buffer.name: self._results(buffer) for buffer in kept if buffer.name in accumulators}
        kept += results.values() if self._retypes else []
        body = self._nest(block.body, results)
        inner = SBlock(block.iter_vars, block.reads, block.writes, block.name_hint, body, block.init, kept)
        return SBlockRealize(root.iter_values, root.predicate, inner)

    def _results(self, accumulators: Buffer) -> Buffer:
        """Return the buffer of finished sums: LLVM keeps no array in registers whose elements are read as two types."""
        dtype = self.problem.accumulate_dtype
        return tirx.decl_buffer(accumulators.shape, dtype, "finished") if self._retypes else accumulators

    def _nest(self, stmt: Stmt, results: Mapping[str, Buffer]) -> Stmt:
        """Return the loops over blocks, groups and tiles of channels in `stmt`, with the new body of the innermost.

        `results` are the buffers of finished sums, by the names of their accumulators.
        """
        if isinstance(stmt, SeqStmt):
            return SeqStmt([self._nest(part, results) for part in stmt.seq])
        if not isinstance(stmt, For):
            return stmt
        if isinstance(stmt.body, SeqStmt) and first_block(stmt).block.name_hint == "run_0_init":
            reductions = zip(self.definition.sections, stmt.body.seq, strict=False)
            named, ends = self._block_ends(first_block(stmt).iter_values[:LEAD])
            tiles = [self._tiles(*loop, [], ends, results) for loop in reductions]
            return with_body(stmt, sequence([*named, *tiles]))
        return with_body(stmt, self._nest(stmt.body, results))

    def _block_ends(self, lead: Sequence[Expr]) -> tuple[list[Bind], list[Expr]]:
        """Return the `ends` of a block's register tiles, and statements that give those of dynamic axes their names."""
        layout = self.definition.layout
        geometry, named, ends = layout.geometry, [], []
        for axis, (extent, dynamic) in enumerate(zip(geometry.output, geometry.dynamic, strict=True)):
            end: Expr = tirx.const(extent, "int64")
            if dynamic:
                size, end = layout.tile.block[1 + axis] * layout.strides[axis], tirx.Var("end", "int64")
                left = self._extent(axis) - lead[1 + axis] * size
                named.append(Bind(end, tirx.Min(tirx.const(size, "int64"), left)))
            ends.append(end)
        return named, ends

    def _tiles(
        self,
        section: FilterSection,
        stmt: For,
        outer: Sequence[Expr],
        ends: Sequence[Expr],
        results: Mapping[str, Buffer],
    ) -> For:
        """Return the loops over register tiles, from `stmt` on, with stores at the end of a tile.

        `outer` are the variables of the loops around `stmt`, and `ends` those of the block; see `_nest` for `results`.
        """
        loops = [*outer, stmt.loop_var]
        if isinstance(stmt.body, For):
            return with_body(stmt, self._tiles(section, stmt.body, loops, ends, results))
        init, update, _ = stmt.body.seq
        cleared, (fd, fh, fw, number, *part) = first_block(init), loops
        place = (fd, fh, fw), number, part[0] if part else tirx.const(0, "int64")
        buffer = cleared.block.body.buffer
        tile = RegisterTile(section, buffer, results[buffer.name], cleared.iter_values[:LEAD], *place, ends)
        return with_body(stmt, SeqStmt([init, update, *self.stores(tile)]))

    @property
    def finishes(self) -> bool:
        """True if sums meet terms or an activation, or are integers in float32."""
        several = bool(self.terms.buffers) or self.problem.epilogue.activation != "none"
        return several or self._retypes

    @property
    def saturates(self) -> bool:
        """True if finished sums that become bytes are what these hold, false if stores see to that; see `finished`."""
        return True

    @property
    def _retypes(self) -> bool:
        """True if accumulators hold integers as float32, and finished sums are integers."""
        return self.definition.layout.sum_dtype != self.problem.accumulate_dtype

    def finished_sums(self, tile: RegisterTile, place: Sequence[Expr]) -> Expr:
        """Return the vector of finished accumulators at `place`."""
        return BufferLoad(tile.finished, place)

    def finish(
        self,
        tile: RegisterTile,
        place: Callable[[Expr], list[Expr]],
        channel: Callable[[Expr], Expr],
        phase: Callable[[Expr], Sequence[Expr]] | None = None,
    ) -> Stmt:
        """Return the loop that finishes a vector of accumulators: with the terms of their channels, and activated.

        `place` returns the indices of a lane in the accumulators, `channel` its channel within the tile of channels,
        and `phase` its phase of each axis, by default that of its indices.
        """
        terms, lane = self.terms, tirx.Var("lane", "int64")
        index, of_channel = place(lane), [*tile.lead[4:], channel(lane)]
        value: Expr = BufferLoad(tile.accumulators, index)
        if terms.offsets:
            offsets = terms.offsets[self.definition.sections.index(tile.section)]
            of_phase = phase(lane) if phase else index[LEAD : LEAD + 3]
            value = value + BufferLoad(offsets, [*tile.lead[4:], *of_phase, channel(lane)])
        elif terms.bias is not None:
            value = value.astype(self.problem.accumulate_dtype) + BufferLoad(terms.bias, of_channel)
        scale = None if terms.scales is None else BufferLoad(terms.scales, of_channel)
        result = finished(self.problem, value, terms.constants, scale, saturates=self.saturates)
        store = BufferStore(tile.finished, result, index)
        lanes = tirx.const(self.definition.layout.lanes, "int64")
        return For(lane, tirx.const(0, "int64"), lanes, ForKind.VECTORIZED, store)

    def within_block(self, position: Expr) -> list[Expr]:
        """Return image and position along each axis, counted within a block, of a flat `position`."""
        layout = self.definition.layout
        place: list[Expr] = []
        left, most = position, layout.positions - 1
        for extent in reversed(layout.packed):
            place.insert(0, left % extent if most >= extent else left)
            left = left // extent if most >= extent else tirx.const(0, "int64")
            most //= extent
        return [left, *place]

    def outputs(self, tile: RegisterTile, place: Sequence[Expr], row: int, column: int) -> list[Expr]:
        """Return the output along each axis, counted within a block, of a phase at image and position `place`."""
        axes = self.definition.layout.geometry.axes
        return [
            y * axis.stride + (run.start - axis.shift) + phase
            for y, axis, run, phase in zip(place[1:], axes, tile.section.runs, tile.phase(row, column), strict=True)
        ]

    def exist(self, tile: RegisterTile, n: Expr, first: Sequence[Expr], last: Sequence[Expr]) -> list[Expr]:
        """Return the conditions that outputs `first` to `last` exist, of image `n` of a block.

        The outputs are along each axis, or along the first ones alone.
        """
        layout, images = self.definition.layout, self.definition.layout.tile.images
        geometry = layout.geometry
        conditions: list[Expr] = []
        if layout.positions > images * math.prod(layout.packed):
            conditions.append(n < images)
        conditions += self.image_exists(tile.lead[0] * images + n)
        for i, (axis, run) in enumerate(zip(geometry.axes[: len(first)], tile.section.runs, strict=False)):
            size, extent = layout.tile.block[1 + i] * axis.stride, geometry.output[i]
            reach = (layout.packed[i] - 1) * axis.stride + run.start + run.count - axis.shift
            if run.start < axis.shift:
                conditions.append(first[i] >= 0)
            if geometry.dynamic[i]:
                conditions.append(last[i] < tile.ends[i])
                continue
            if reach > min(size, extent):
                conditions.append(last[i] < min(size, extent))
            if extent > size and extent % size:
                conditions.append(tile.lead[1 + i] * size + last[i] < extent)
        return conditions

    def _extent(self, axis: int) -> Expr:
        """Return the output's extent along one of three axes, one that the caller has."""
        first = 1 if self.definition.layout.channels_last else 2
        return self.out.shape[first + axis - (3 - self.problem.rank)]

    def image_exists(self, image: Expr) -> list[Expr]:
        """Return the condition that an `image` of a call exists; none if every block is full of images."""
        batch, images = self.out.shape[0], self.definition.layout.tile.images
        if images == 1 or (isinstance(batch, IntImm) and batch.value % images == 0):
            return []
        return [image < batch]

    def in_call(self, tile: RegisterTile, n: Expr, outputs: Sequence[Expr]) -> list[Expr]:
        """Return image and output along each axis of a call, of `outputs` of image `n` of a block.

        The outputs are along each axis, or along the first ones alone.
        """
        layout = self.definition.layout
        sizes = zip(tile.lead[:4], layout.tile.block, (1, *layout.strides), (n, *outputs), strict=False)
        return [number * (size * stride) + i for number, size, stride, i in sizes]

    def rounded(self, tile: RegisterTile, place: Sequence[Expr]) -> Expr:
        """Return the vector of accumulators at `place` in the type of the output."""
        return self.in_output(self.finished_sums(tile, place))

    def in_output(self, vector: Expr) -> Expr:
        """Return a `vector` of finished accumulators in the type of the output."""
        lanes = self.definition.layout.lanes
        if self.rounding:
            return tirx.call_extern(f"{storage_dtype(self.problem.output_dtype)}x{lanes}", self.rounding, vector)
        return stored(self.problem, vector, lanes)


def ramp(begin: Expr, lanes: int) -> Expr:
    """Return the indices of `lanes` neighbours from `begin` on: a vector of them, or `begin` itself."""
    return tirx.Ramp(begin, tirx.const(1, "int64"), lanes) if lanes > 1 else begin


def sequence(stmts: Sequence[Stmt]) -> Stmt:
    """Return `stmts` as one statement."""
    return SeqStmt(stmts) if len(stmts) > 1 else stmts[0]


def address(buffer: Buffer, index: Sequence[Expr]) -> Expr:
    """Return the address of an element of `buffer`."""
    return tirx.address_of(BufferLoad(buffer, index))
