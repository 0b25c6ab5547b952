"""Results that go from registers to the output: bias, activation, shuffles and stores right behind a reduction.

A register tile that holds all phases of the last axis for its positions, of rows that are whole vectors and lie in a
block without gaps, has all that some vectors of the output are made of.  That is the case where kernel and stride are
equal.  Nothing of a block is then written to be read again, and the stores of a tile overlap with the products of the
next; behind a block they take their time alone, whether by calls or not.

Measured on one core of a Zen 4 server next to the same layers with their results interleaved in a buffer: 16 to 20
channels, 256x512 (42 MB of output), 1.43 times as fast; 24 to 24, 240x240, 1.17; 64 to 64, 80x80, 1.09; 256 to 64,
64x64, 1.06; 128 to 64, 256x256, 1.05; 768 to 384, 64x64, 1.01; with a sigmoid 1.0 to 1.1.  To fetch the data of the
next block ahead was slower for nearly all: blocks are packed as fast as the second-level cache takes them.

Past the caches only whole vectors can be stored.  Where an output begins with one, as the library's own arrays do, all
of it is; for others the function has the stages of any layer besides.

What a vector is stored by must not seem to change the accumulators, or they are written and read again around each: see
`store_functions`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from tvm import ir, tirx
from tvm.ir import Expr
from tvm.s_tir import SBlock, SBlockRealize
from tvm.tirx import Buffer, BufferLoad, BufferStore, Evaluate, For, ForKind, IfThenElse, PrimFunc, SeqStmt, Stmt
from tvm_deconv.schedules.x86.interleave import MAX_STREAMS, shuffle_network
from tvm_deconv.schedules.x86.loop_marks import first_block, with_body
from tvm_deconv.schedules.x86.variants import within

from tvm_deconv.compute.direct import DirectDefinition
from tvm_deconv.compute.direct_layout import Tile, block_extents
from tvm_deconv.compute.epilogue import activate
from tvm_deconv.compute.phases import Geometry
from tvm_deconv.problem import Problem

_STORE = "tvm_deconv_store"
_MISALIGNMENT = "tvm_deconv_misalignment"
#: What remains of the buffers of a schedule.
_KEPT = ("data_pack", "bias_pack", "run_0_global")
_TYPES = {"float32": ("float", 4), "float64": ("double", 8), "int32": ("i32", 4)}


def supports(problem: Problem, geometry: Geometry, lanes: int) -> bool:
    """Whether tiles in rows with all phases of the last axis hold vectors of `lanes` of the output.

    Phases have one tap, at their own position, there are outputs of all, and rows of positions are whole vectors.
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
    """Whether register tiles of `tile`, in rows, hold vectors of the output."""
    return (
        supports(problem, geometry, lanes)
        and tile.phases % geometry.axes[2].stride == 0
        and max(tile.outputs) == 1
        and tile.width % lanes == 0
        and block_extents(geometry, tile)[2] == tile.width
    )


def store_functions(dtype: str, lanes: int) -> str:
    """Return, in LLVM's language, what stores a vector past the caches, and what is 0 where one may lie at an address.

    The stores say, in the terms of TVM's own, that they change the output alone.
    """
    name, size = _TYPES[dtype]
    vector, length = f"<{lanes} x {name}>", lanes * size
    return f"""
define hidden i32 @{_STORE}(ptr %to, {vector} %value) alwaysinline {{
  store {vector} %value, ptr %to, align {length}, !nontemporal !0, !tbaa !1
  ret i32 0
}}
define hidden i32 @{_MISALIGNMENT}(ptr %to) alwaysinline {{
  %address = ptrtoint ptr %to to i64
  %low = trunc i64 %address to i32
  %over = and i32 %low, {length - 1}
  ret i32 %over
}}
!1 = !{{!2, !2, i64 0}}
!2 = !{{!"tvm_deconv_output", !3, i64 0}}
!3 = !{{!"tvm-tbaa"}}
"""


def select_by_alignment(func: PrimFunc, usual: PrimFunc) -> PrimFunc:
    """Return `func`, which stores whole vectors past the caches, for outputs that begin with one; else as `usual`."""
    out = func.params[-1]
    over = tirx.call_extern("int32", _MISALIGNMENT, _address(out, [tirx.const(0, "int64") for _ in out.shape]))
    other = ir.load_json(ir.save_json(usual))  # with variables and buffers of its own
    return func.with_body(IfThenElse(over == 0, func.body, within(other, func.params, {}, 0)))


def finish_in_registers(
    func: PrimFunc, problem: Problem, definition: DirectDefinition, tile: Tile, lanes: int, *, streams: bool
) -> PrimFunc:
    """Return `func`, the scheduled `definition`, without stages behind the reduction; `supports_tile` says where.

    If `streams`, vectors are stored by the `store_functions`.
    """
    buffers = {buffer.name: buffer for buffer in func.body.block.alloc_buffers}
    finish = _RegisterEpilogue(problem, definition, tile, lanes, streams, buffers.get("bias_pack"), func.params[-1])
    return func.with_body(finish.root(func.body))


@dataclass(frozen=True, slots=True)
class _RegisterEpilogue:
    problem: Problem
    definition: DirectDefinition
    tile: Tile
    lanes: int
    streams: bool
    bias: Buffer | None
    out: Buffer

    def root(self, root: SBlockRealize) -> SBlockRealize:
        """Return the outermost block with what is behind the reduction replaced, and without its buffers."""
        block = root.block
        kept = [buffer for buffer in block.alloc_buffers if buffer.name in _KEPT]
        body = self._nest(block.body)
        inner = SBlock(block.iter_vars, block.reads, block.writes, block.name_hint, body, block.init, kept)
        return SBlockRealize(root.iter_values, root.predicate, inner)

    def _nest(self, stmt: Stmt) -> Stmt:
        if isinstance(stmt, SeqStmt):
            return SeqStmt([self._nest(part) for part in stmt.seq])
        if not isinstance(stmt, For):
            return stmt
        if isinstance(stmt.body, SeqStmt) and first_block(stmt).block.name_hint == "run_0_init":
            reduction, *_ = stmt.body.seq
            return with_body(stmt, self._tiles(reduction, []))
        return with_body(stmt, self._nest(stmt.body))

    def _tiles(self, stmt: For, outer: Sequence[For]) -> For:
        """Return the loops over register tiles, of which `stmt` is one, each with its stores at its end."""
        loops = [*outer, stmt]
        if isinstance(stmt.body, For):
            return with_body(stmt, self._tiles(stmt.body, loops))
        init, update, _ = stmt.body.seq
        stores = self._stores(first_block(init), [loop.loop_var for loop in loops])
        return with_body(stmt, SeqStmt([init, update, *stores]))

    def _stores(self, init: SBlockRealize, loops: Sequence[Expr]) -> list[Stmt]:
        """Return what finishes and stores the accumulators that the block `init` clears, in the tile of the `loops`."""
        problem, tile, lanes, (section,) = self.problem, self.tile, self.lanes, self.definition.sections
        geometry = Geometry.of(problem, bool(tile.uncropped))
        lead = init.iter_values[:6]
        fd, fh, _, m = loops
        rows, columns = section.phases
        strides = [axis.stride for axis in geometry.axes]
        block = (tile.images, tile.depth, tile.height, tile.width)
        counts = (geometry.batch, *(axis.positions for axis in geometry.axes))
        accumulators = init.block.body.buffer
        plain = self.bias is None and problem.epilogue.activation == "none"
        stmts: list[Stmt] = []
        for vector in range(tile.positions // lanes):
            place = m * tile.positions + vector * lanes
            inside = [place < math.prod(block)] if math.prod(block) % tile.positions else []
            where: list[Expr] = []
            left = place
            for number, size, count in reversed([*zip(lead[:4], block, counts, strict=True)]):
                at = number * size + left % size
                left = left // size
                where.insert(0, at)
                if count % size:
                    inside.append(at < count)
            n, d, h, w = where
            stores: list[Stmt] = []
            for row, cc in itertools.product(range(rows), range(tile.channels)):
                channel = lead[5] * tile.channels + cc
                exists = channel < geometry.out_channels if geometry.out_channels % tile.channels else None
                spatial = (d * strides[0] + fd, h * strides[1] + fh * rows + row)[3 - problem.rank :]
                index = [n, lead[4] * geometry.out_channels + channel, *spatial]
                numbers = (tirx.const(column, "int64") for column in range(columns))
                streams = [[*lead, fd, fh * rows + row, column, tirx.const(cc, "int64")] for column in numbers]
                if not plain:
                    stores += [self._epilogue(accumulators, stream, place) for stream in streams]
                held = tirx.Ramp(place, tirx.const(1, "int64"), lanes)
                made = shuffle_network([BufferLoad(accumulators, [*stream, held]) for stream in streams], lanes)
                store = [self._store(value, index, w * columns + i * lanes) for i, value in enumerate(made)]
                stores += store if exists is None else [IfThenElse(exists, _sequence(store), None)]
            stmts += [IfThenElse(tirx.all(*inside), _sequence(stores), None)] if inside else stores
        return stmts

    def _epilogue(self, accumulators: Buffer, index: Sequence[Expr], place: Expr) -> Stmt:
        """Return what adds the bias to the vector of accumulators from `place` on, and applies the activation."""
        lane = tirx.Var("lane", "int64")
        at = [*index, place + lane]
        value: Expr = BufferLoad(accumulators, at)
        if self.bias is not None:
            group, co, cc = index[4], index[5], index[-1]
            value = value + BufferLoad(self.bias, [group, co, cc])
        store = BufferStore(accumulators, activate(self.problem.epilogue, value), at)
        return For(lane, tirx.const(0, "int64"), tirx.const(self.lanes, "int64"), ForKind.VECTORIZED, store)

    def _store(self, value: Expr, index: Sequence[Expr], w: Expr) -> Stmt:
        if self.streams:
            return Evaluate(tirx.call_extern("int32", _STORE, _address(self.out, [*index, w]), value))
        return BufferStore(self.out, value, [*index, tirx.Ramp(w, tirx.const(1, "int64"), self.lanes)])


def _sequence(stmts: Sequence[Stmt]) -> Stmt:
    return SeqStmt(stmts) if len(stmts) > 1 else stmts[0]


def _address(buffer: Buffer, index: Sequence[Expr]) -> Expr:
    return tirx.address_of(BufferLoad(buffer, index))
