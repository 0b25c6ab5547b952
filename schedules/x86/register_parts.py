"""The epilogue in registers of vectors of positions where rows are no whole vectors: of several taps, or cropped.

Flat positions then run across the ends of rows. A vector within a row is stored as it is, at any address. Another one
belongs to two rows: of each, masks select what lies within the output. Stores are ordinary ones at any size of the
output, since those past the caches take whole lines. While it stays in the last cache (5 to 16 MB), that is faster all
the same than rows copied past it: 1.0 to 1.4 times for 20 layers on a Zen 5 (family 26, model 2).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from string import Template

from tvm import tirx
from tvm.ir import Expr
from tvm.tirx import BufferStore, Evaluate, IfThenElse, PrimFunc, Stmt

from tvm_deconv.compute.direct import DirectDefinition
from tvm_deconv.compute.direct_layout import Tile, block_extents
from tvm_deconv.compute.phases import Geometry
from tvm_deconv.problem import Problem
from tvm_deconv.schedules.x86.interleave import MAX_STREAMS
from tvm_deconv.schedules.x86.register_epilogue import LLVM_TYPES, RegisterTile, Terms, address, ramp, sequence
from tvm_deconv.schedules.x86.register_rows import RowEpilogue
from tvm_deconv.schedules.x86.stores import goes_to_memory, llvm_source
from tvm_deconv.targets import CpuTarget

_STORE = "tvm_deconv_store_part"  # of `part_store.ll`


def supports(problem: Problem, geometry: Geometry, target: CpuTarget, lanes: int) -> bool:
    """Tell whether some tile in rows holds all phases of the last axis at its positions.

    There must be masks of any elements, one run of phases, and whole vectors of `lanes` positions within a row. Blocks
    of a dynamic row begin anywhere in a line where they have a halo: parts of lines from memory would take longer than
    rows that are copied (depthwise 96 channels, k4 s2, 128x128: 2.8 ms, 1.9 copied).
    """
    last = geometry.axes[2]
    parts_of_lines = geometry.dynamic[2] and last.halo > 0 and goes_to_memory(problem)
    return (
        problem.data_format == "NCX"
        and not parts_of_lines
        and target.vector_registers > 16
        and len(geometry.runs) == 1
        and all(axis.runs[0].count == axis.stride for axis in geometry.axes)
        and last.stride <= MAX_STREAMS
        and (last.positions >= lanes or geometry.dynamic[2])
    )


def supports_tile(problem: Problem, geometry: Geometry, tile: Tile, target: CpuTarget, lanes: int) -> bool:
    """Tell whether the register tiles of `tile`, in rows, hold all phases of the last axis at their positions."""
    last = geometry.axes[2]
    return (
        supports(problem, geometry, target, lanes)
        and tile.phases % last.stride == 0
        and max(tile.outputs) == 1
        and (tile.width >= last.positions or geometry.dynamic[2])
        and block_extents(geometry, tile)[2] >= lanes  # a vector belongs to two rows at most
    )


def store_functions(dtype: str, lanes: int) -> str:
    """Return the LLVM IR of stores of parts of vectors of `lanes` outputs, stored as `dtype`."""
    name, size = LLVM_TYPES[dtype]
    short = name if name[0] == "i" else f"f{8 * size}"  # as in the names of intrinsics
    numbers = ", ".join(f"i32 {lane}" for lane in range(lanes))
    values = {"lanes": lanes, "numbers": numbers, "type": name, "short": short, "bytes": size}
    return Template(llvm_source("part_store.ll")).substitute(values)


def finish_rows(
    func: PrimFunc, problem: Problem, definition: DirectDefinition, rounding: str = "", joining: str = ""
) -> PrimFunc:
    """Return `func`, the scheduled `definition`, with the epilogue in registers; for tiles of `supports_tile`.

    `rounding` and `joining` are those of `register_rows.finish_rows`; `func` calls `store_functions`.
    """
    terms, out = Terms.of(func, problem), func.params[-1]
    epilogue = PartEpilogue(problem, definition, terms, out, rounding, streams=False, joining=joining)
    return func.with_body(epilogue.root(func.body))


@dataclass(frozen=True)
class PartEpilogue(RowEpilogue):
    """Stores vectors of positions, or the parts of them in each of two rows."""

    def stores(self, tile: RegisterTile) -> list[Stmt]:
        """Return the statements that finish and store a register tile."""
        lanes, positions = self.definition.layout.lanes, self.definition.layout.tile.positions
        stmts: list[Stmt] = []
        for vector in range(positions // lanes):
            stmts += self._vector_stores(tile, tile.number * positions + vector * lanes)
        return stmts

    def _vector_stores(self, tile: RegisterTile, position: Expr) -> list[Stmt]:
        """Return the statements that finish and store the vectors of a register tile from flat `position` on."""
        layout, (rows, columns) = self.definition.layout, tile.section.phases
        pitch, reach = layout.packed[2], layout.lanes * columns
        place, following = self.within_block(position), self.within_block((position // pitch + 1) * pitch)
        first = [self.outputs(tile, place, row, 0) for row in range(rows)]
        within = [first[0][2] >= 0, first[0][2] <= tile.ends[2] - reach]
        within += self.exist(tile, place[0], first[0][:2], first[-1][:2])
        ends_anywhere = layout.geometry.dynamic[2]
        stmts: list[Stmt] = []
        whole: list[Stmt] = []
        parts: list[Stmt] = []
        for row, cc in itertools.product(range(rows), range(layout.tile.channels)):
            finished, vectors = self.vectors(tile, position, row, cc)
            stmts += finished
            whole += self._store_whole(tile, cc, place[0], first[row], vectors)
            own = self._store_parts(tile, cc, place[0], first[row], vectors)
            # A call may end far in front of it, and empty masks are slow where no memory is.
            parts += [IfThenElse(first[row][2] < tile.ends[2], sequence(own), None)] if ends_anywhere else own
            # Of the next row, a vector has positions from the row's beginning on.
            *outer, begin = self.outputs(tile, following, row, 0)
            begin = begin + (place[3] - pitch) * columns
            stored = self._store_parts(tile, cc, following[0], [*outer, begin], vectors)
            parts.append(IfThenElse(begin > -reach, sequence(stored), None))
        return [*stmts, IfThenElse(tirx.all(*within), sequence(whole), sequence(parts))]

    def _store_whole(
        self, tile: RegisterTile, cc: int, n: Expr, outputs: Sequence[Expr], vectors: Sequence[Expr]
    ) -> list[Stmt]:
        """Return the stores of `vectors` of channel `cc`, the first of them at `outputs` of image `n` of a block."""
        row, length, begin = self._row(tile, cc, n, outputs), self._length(tile, vectors), self._row_begin(tile)
        places = (ramp(begin + (outputs[2] + i * length), length) for i in range(len(vectors)))
        stores = [BufferStore(self.out, vector, [*row, w]) for vector, w in zip(vectors, places, strict=True)]
        return self.of_channel(tile, cc, [*stores])

    def _store_parts(
        self, tile: RegisterTile, cc: int, n: Expr, outputs: Sequence[Expr], vectors: Sequence[Expr]
    ) -> list[Stmt]:
        """Return the stores of the parts of `vectors` within a row that may not exist; see `_store_whole`."""
        row, length = self._row(tile, cc, n, outputs), self._length(tile, vectors)
        begin = address(self.out, [*row, self._row_begin(tile)])
        extent = tile.ends[2].astype("int32")
        calls: list[Stmt] = []
        for i, vector in enumerate(vectors):
            first = tirx.Cast("int32", outputs[2] + i * length)
            calls.append(Evaluate(tirx.call_extern("int32", _STORE, begin, first, extent, vector)))
        conditions = self.exist(tile, n, outputs[:2], outputs[:2])
        stores = self.of_channel(tile, cc, calls)
        return [IfThenElse(tirx.all(*conditions), sequence(stores), None)] if conditions else stores

    def _row_begin(self, tile: RegisterTile) -> Expr:
        """Return the first output of a block's rows: zero, unless a dynamic row has several blocks."""
        layout = self.definition.layout
        if not layout.geometry.dynamic[2]:
            return tirx.const(0, "int64")
        return tile.lead[3] * (layout.tile.width * layout.strides[2])

    def _row(self, tile: RegisterTile, cc: int, n: Expr, outputs: Sequence[Expr]) -> list[Expr]:
        """Return the index of the row of the output at `outputs` of channel `cc` and image `n` of a block."""
        image, *outer = self.in_call(tile, n, outputs[:2])
        return self.row_index(tile, cc, image, outer)

    def _length(self, tile: RegisterTile, vectors: Sequence[Expr]) -> int:
        """Return the outputs in each of the `vectors` that a channel of a row of phases is stored as."""
        return self.definition.layout.lanes * tile.section.phases[1] // len(vectors)
