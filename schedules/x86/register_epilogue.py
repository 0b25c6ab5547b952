"""The epilogue in registers: bias, activation, shuffles and stores of the output right behind a reduction.

If kernel and stride are equal, a register tile that holds all phases of the last axis has whole vectors of the output,
provided that rows are whole vectors and lie in a block without gaps. Nothing of a block is then written to be read
again, and the stores of a tile overlap with the products of the next. Stores after a whole block take their full time,
ordinary ones and those past the caches alike.

Measured on one core of a Zen 4 server next to the same layers with their results interleaved in a buffer: 16 to 20
channels, 256x512 (42 MB of output), 1.43 times as fast; 24 to 24, 240x240, 1.17; 64 to 64, 80x80, 1.09; 256 to 64,
64x64, 1.06; 128 to 64, 256x256, 1.05; 768 to 384, 64x64, 1.01; with a sigmoid 1.0 to 1.1. Prefetching the data of the
next block was slower for nearly all: blocks are packed as fast as the second-level cache takes them.

Past the caches only whole, aligned vectors can be stored. An output that begins at a vector's alignment, as the
library's own arrays do, has only those. For other outputs the function holds the usual stages besides.

TBAA metadata of the stores (``vector_store.ll``) tells LLVM that they leave the accumulators alone; without it LLVM
writes and reads the accumulators around each store.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from string import Template

from tvm import ir, tirx
from tvm.ir import Expr
from tvm.s_tir import SBlock, SBlockRealize
from tvm.tirx import Buffer, BufferLoad, BufferStore, Evaluate, For, ForKind, IfThenElse, PrimFunc, SeqStmt, Stmt

from tvm_deconv.compute.direct import DirectDefinition
from tvm_deconv.compute.direct_layout import Tile, block_extents
from tvm_deconv.compute.epilogue import activate
from tvm_deconv.compute.indexing import LEAD
from tvm_deconv.compute.phases import Geometry
from tvm_deconv.problem import Problem
from tvm_deconv.schedules.x86.interleave import MAX_STREAMS, shuffle_network
from tvm_deconv.schedules.x86.loop_marks import first_block, with_body
from tvm_deconv.schedules.x86.stores import llvm_source
from tvm_deconv.schedules.x86.variants import inlined

#: The functions of `vector_store.ll`.
_STORE = "tvm_deconv_store"
_MISALIGNMENT = "tvm_deconv_misalignment"
#: The buffers of a schedule that are still used.
_KEPT = ("data_pack", "bias_pack", "run_0_global")
#: LLVM's name of an accumulator's type, and its bytes.
_TYPES = {"float32": ("float", 4), "float64": ("double", 8), "int32": ("i32", 4)}


def supports(problem: Problem, geometry: Geometry, lanes: int) -> bool:
    """Tell whether some tile in rows holds whole vectors of `lanes` outputs.

    That takes one run of phases with one tap each, at the phase's own position, outputs of all phases, and rows of
    positions that are whole vectors.
    """
    last = geometry.axes[2]
    return (
        not problem.dynamic
        and problem.data_format == "NCX"
        and problem.output_dtype == problem.accumulate_dtype
        and len(geometry.runs) == 1
        and all(axis.low == axis.halo == axis.shift == 0 for axis in geometry.axes)
        and all(axis.runs[0].count == axis.stride for axis in geometry.axes)
        and last.positions % lanes == 0
        and all(y == axis.positions * axis.stride for y, axis in zip(geometry.output, geometry.axes, strict=True))
        and last.stride <= MAX_STREAMS
    )


def supports_tile(problem: Problem, geometry: Geometry, tile: Tile, lanes: int) -> bool:
    """Tell whether the register tiles of `tile`, in rows, hold whole vectors of the output."""
    return (
        supports(problem, geometry, lanes)
        and tile.phases % geometry.axes[2].stride == 0
        and max(tile.outputs) == 1
        and tile.width % lanes == 0
        and block_extents(geometry, tile)[2] == tile.width
    )


def store_functions(dtype: str, lanes: int) -> str:
    """Return the LLVM IR of stores past the caches of vectors of `lanes` accumulators of `dtype`."""
    name, size = _TYPES[dtype]
    return Template(llvm_source("vector_store.ll")).substitute(vector=f"<{lanes} x {name}>", bytes=lanes * size)


def select_by_alignment(streaming: PrimFunc, ordinary: PrimFunc) -> PrimFunc:
    """Return `streaming` for outputs that begin at a vector's alignment, joined with `ordinary` for all others."""
    out = streaming.params[-1]
    begin = _address(out, [tirx.const(0, "int64") for _ in out.shape])
    misalignment = tirx.call_extern("int32", _MISALIGNMENT, begin)
    other = ir.load_json(ir.save_json(ordinary))  # with variables and buffers of its own
    return streaming.with_body(IfThenElse(misalignment == 0, streaming.body, inlined(other, streaming.params, {}, 0)))


def finish_in_registers(func: PrimFunc, problem: Problem, definition: DirectDefinition, *, streams: bool) -> PrimFunc:
    """Return `func`, the scheduled `definition`, with the epilogue in registers; for tiles of `supports_tile`.

    If `streams`, vectors are stored past the caches, by `store_functions`.
    """
    buffers = {buffer.name: buffer for buffer in func.body.block.alloc_buffers}
    epilogue = _RegisterEpilogue(problem, definition, streams, buffers.get("bias_pack"), func.params[-1])
    return func.with_body(epilogue.root(func.body))


@dataclass(frozen=True, slots=True)
class _RegisterEpilogue:
    """Replaces all that follows the reduction in each register tile; `bias` is packed, `out` the caller's output."""

    problem: Problem
    definition: DirectDefinition
    streams: bool
    bias: Buffer | None
    out: Buffer

    def root(self, root: SBlockRealize) -> SBlockRealize:
        """Return the outermost block with the stages behind the reduction replaced, without their buffers."""
        block = root.block
        kept = [buffer for buffer in block.alloc_buffers if buffer.name in _KEPT]
        body = self._nest(block.body)
        inner = SBlock(block.iter_vars, block.reads, block.writes, block.name_hint, body, block.init, kept)
        return SBlockRealize(root.iter_values, root.predicate, inner)

    def _nest(self, stmt: Stmt) -> Stmt:
        """Return the loops over blocks, groups and tiles of channels in `stmt`, with the new body of the innermost."""
        if isinstance(stmt, SeqStmt):
            return SeqStmt([self._nest(part) for part in stmt.seq])
        if not isinstance(stmt, For):
            return stmt
        if isinstance(stmt.body, SeqStmt) and first_block(stmt).block.name_hint == "run_0_init":
            reduction, *_ = stmt.body.seq
            return with_body(stmt, self._tiles(reduction, []))
        return with_body(stmt, self._nest(stmt.body))

    def _tiles(self, stmt: For, outer: Sequence[For]) -> For:
        """Return the loops over register tiles inside of `outer`, from `stmt` on, with stores at the end of a tile."""
        loops = [*outer, stmt]
        if isinstance(stmt.body, For):
            return with_body(stmt, self._tiles(stmt.body, loops))
        init, update, _ = stmt.body.seq
        stores = self._stores(first_block(init), [loop.loop_var for loop in loops])
        return with_body(stmt, SeqStmt([init, update, *stores]))

    def _stores(self, init: SBlockRealize, loops: Sequence[Expr]) -> list[Stmt]:
        """Return the statements that finish and store a register tile, of the loop variables `loops`.

        `init` is the block that clears the accumulators.
        """
        lanes, positions = self.definition.layout.lanes, self.definition.layout.tile.positions
        lead, accumulators = init.iter_values[:LEAD], init.block.body.buffer
        *phases, number = loops
        stmts: list[Stmt] = []
        everywhere: list[list[list[Stmt]]] = []
        for vector in range(positions // lanes):
            position = number * positions + vector * lanes
            place, exists = self._locate(lead, position)
            rows = self._row_stores(accumulators, lead, phases, position, place)
            if exists:
                stmts.append(IfThenElse(tirx.all(*exists), _sequence([*itertools.chain(*rows)]), None))
            else:
                everywhere.append(rows)
        # All vectors of a row of the output together: fewer rows at a time are open for stores past the caches.
        stmts += itertools.chain(*itertools.chain(*zip(*everywhere, strict=True)))
        return stmts

    def _locate(self, lead: Sequence[Expr], position: Expr) -> tuple[list[Expr], list[Expr]]:
        """Return image and data index along each axis of flat `position` of a block, and the conditions to exist."""
        geometry, tile = self.definition.layout.geometry, self.definition.layout.tile
        counts = (geometry.batch, *(axis.positions for axis in geometry.axes))
        capacity = math.prod(tile.block)
        conditions = [position < capacity] if capacity % tile.positions else []
        place: list[Expr] = []
        left = position
        for number, size, count in reversed([*zip(lead[:4], tile.block, counts, strict=True)]):
            index = number * size + left % size
            left = left // size
            place.insert(0, index)
            if count % size:
                conditions.append(index < count)
        return place, conditions

    def _row_stores(
        self, accumulators: Buffer, lead: Sequence[Expr], phases: Sequence[Expr], position: Expr, place: Sequence[Expr]
    ) -> list[list[Stmt]]:
        """Return the stores of the vectors from flat `position` on, by the rows of the output in a register tile.

        `phases` are the loops over tiles of phases. The vectors of the phases of the last axis, interleaved, are
        contiguous in the output.
        """
        layout, (section,), (n, d, h, w) = self.definition.layout, self.definition.sections, place
        geometry, width, lanes = layout.geometry, layout.tile.channels, layout.lanes
        (fd, fh, _), (rows, columns) = phases, section.phases
        rows_of_output: list[list[Stmt]] = []
        for row, cc in itertools.product(range(rows), range(width)):
            fh_row = fh * rows + row
            channel = lead[5] * width + cc
            spatial = (d * layout.strides[0] + fd, h * layout.strides[1] + fh_row)[3 - self.problem.rank :]
            index = [n, lead[4] * geometry.out_channels + channel, *spatial]
            numbers = (tirx.const(column, "int64") for column in range(columns))
            streams = [[*lead, fd, fh_row, column, tirx.const(cc, "int64")] for column in numbers]
            stores: list[Stmt] = []
            if self.bias is not None or self.problem.epilogue.activation != "none":
                stores += [self._finish(accumulators, stream, position) for stream in streams]
            lane = tirx.Ramp(position, tirx.const(1, "int64"), lanes)
            vectors = shuffle_network([BufferLoad(accumulators, [*stream, lane]) for stream in streams], lanes)
            store = [self._store(vector, index, w * columns + i * lanes) for i, vector in enumerate(vectors)]
            padded = geometry.out_channels % width
            stores += [IfThenElse(channel < geometry.out_channels, _sequence(store), None)] if padded else store
            rows_of_output.append(stores)
        return rows_of_output

    def _finish(self, accumulators: Buffer, index: Sequence[Expr], position: Expr) -> Stmt:
        """Return the loop that adds the bias to the vector of accumulators from `position` on and activates it."""
        lane = tirx.Var("lane", "int64")
        place = [*index, position + lane]
        value: Expr = BufferLoad(accumulators, place)
        if self.bias is not None:
            group, co, cc = index[4], index[5], index[-1]
            value = value + BufferLoad(self.bias, [group, co, cc])
        store = BufferStore(accumulators, activate(self.problem.epilogue, value), place)
        lanes = tirx.const(self.definition.layout.lanes, "int64")
        return For(lane, tirx.const(0, "int64"), lanes, ForKind.VECTORIZED, store)

    def _store(self, vector: Expr, index: Sequence[Expr], w: Expr) -> Stmt:
        """Return the store of `vector` from `w` on in the row of the output at `index`."""
        if self.streams:
            return Evaluate(tirx.call_extern("int32", _STORE, _address(self.out, [*index, w]), vector))
        ramp = tirx.Ramp(w, tirx.const(1, "int64"), self.definition.layout.lanes)
        return BufferStore(self.out, vector, [*index, ramp])


def _sequence(stmts: Sequence[Stmt]) -> Stmt:
    return SeqStmt(stmts) if len(stmts) > 1 else stmts[0]


def _address(buffer: Buffer, index: Sequence[Expr]) -> Expr:
    return tirx.address_of(BufferLoad(buffer, index))
