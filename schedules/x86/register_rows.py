"""The epilogue in registers of vectors of positions: the phases of the last axis, interleaved, are rows of the output.

A register tile that holds all phases of the last axis has whole vectors of the output under three conditions: kernel
and stride are equal, rows of the output are whole vectors, and they lie in a block without gaps. A vector of positions
may lie in two rows. Its phases, interleaved, are then vectors of the one or the other.

Measured on one core of a Zen 4 server next to the same layers with their results interleaved in a buffer: 16 to 20
channels, 256x512 (42 MB of output), 1.43 times as fast; 24 to 24, 240x240, 1.17; 64 to 64, 80x80, 1.09; 256 to 64,
64x64, 1.06; 128 to 64, 256x256, 1.05; 768 to 384, 64x64, 1.01; with a sigmoid 1.0 to 1.1. Prefetching the data of the
next block was slower for nearly all: blocks are packed as fast as the second-level cache takes them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from tvm import tirx
from tvm.ir import Expr
from tvm.tirx import BufferStore, Evaluate, IfThenElse, PrimFunc, Stmt

from tvm_deconv.compute.direct import DirectDefinition
from tvm_deconv.compute.direct_layout import Tile, block_extents
from tvm_deconv.compute.phases import Geometry
from tvm_deconv.compute.storage import storage_dtype, stores_bytes
from tvm_deconv.problem import Problem
from tvm_deconv.schedules.x86.interleave import MAX_STREAMS, narrow_streams, shuffle_network
from tvm_deconv.schedules.x86.register_epilogue import RegisterEpilogue, RegisterTile, Terms, address, ramp, sequence

_STORE = "tvm_deconv_store"  # of `vector_store.ll`


def supports(problem: Problem, geometry: Geometry, lanes: int) -> bool:
    """Tell whether some tile in rows holds whole vectors of `lanes` outputs.

    That takes one run of phases with one tap each, outputs of all phases, and rows of the output that are whole
    vectors.
    """
    last = geometry.axes[2]
    return (
        not problem.dynamic_axes
        and problem.data_format == "NCX"
        and geometry.pointwise
        and all(axis.runs[0].count == axis.stride for axis in geometry.axes)
        and _is_whole(problem, geometry, last.positions, lanes)
        and all(y == axis.positions * axis.stride for y, axis in zip(geometry.output, geometry.axes, strict=True))
        and last.stride <= MAX_STREAMS
    )


def supports_tile(problem: Problem, geometry: Geometry, tile: Tile, lanes: int) -> bool:
    """Tell whether the register tiles of `tile`, in rows, hold whole vectors of the output."""
    return (
        supports(problem, geometry, lanes)
        and tile.phases % geometry.axes[2].stride == 0
        and max(tile.outputs) == 1
        and _is_whole(problem, geometry, tile.width, lanes)
        and block_extents(geometry, tile)[2] == tile.width
    )


def _is_whole(problem: Problem, geometry: Geometry, positions: int, lanes: int) -> bool:
    """Tell whether the outputs of `positions` of a row are whole vectors: those that are narrowed, of all phases."""
    narrowed = np.dtype(storage_dtype(problem.output_dtype)) != np.dtype(problem.accumulate_dtype)
    return positions * (1 if narrowed else geometry.axes[2].stride) % lanes == 0


def finish_rows(
    func: PrimFunc,
    problem: Problem,
    definition: DirectDefinition,
    rounding: str = "",
    joining: str = "",
    *,
    streams: bool,
) -> PrimFunc:
    """Return `func`, the scheduled `definition`, with the epilogue in registers; for tiles of `supports_tile`.

    If `streams`, vectors are stored past the caches, by `register_epilogue.store_functions`. `rounding` is that of
    `RegisterEpilogue`. `joining`, if not empty, is the function of `rounding.row_joining`: each vector of the output is
    then made of two vectors of sums.
    """
    terms, out = Terms.of(func, problem), func.params[-1]
    epilogue = RowEpilogue(problem, definition, terms, out, rounding, streams, joining)
    return func.with_body(epilogue.root(func.body))


@dataclass(frozen=True, slots=True)
class _Place:
    """The index of an output of channel and phase zero in a call, and the conditions that it exists."""

    index: Sequence[Expr]
    exists: Sequence[Expr]


@dataclass(frozen=True)
class RowEpilogue(RegisterEpilogue):
    """Stores vectors of positions, past the caches if it `streams`; `joining` is that of `finish_rows`."""

    streams: bool
    joining: str

    def stores(self, tile: RegisterTile) -> list[Stmt]:
        """Return the statements that finish and store a register tile."""
        lanes, positions = self.definition.layout.lanes, self.definition.layout.tile.positions
        stmts: list[Stmt] = []
        everywhere: list[list[list[Stmt]]] = []
        for vector in range(positions // lanes):
            position = tile.number * positions + vector * lanes
            places = self._locate(tile, position)
            rows = self._row_stores(tile, position, places)
            if len(places) == 1 and places[0].exists:
                stmts.append(IfThenElse(tirx.all(*places[0].exists), sequence([*itertools.chain(*rows)]), None))
            else:
                everywhere.append(rows)
        # All vectors of a row of the output together: fewer rows at a time are open for stores past the caches.
        stmts += itertools.chain(*itertools.chain(*zip(*everywhere, strict=True)))
        return stmts

    def _locate(self, tile: RegisterTile, position: Expr) -> list[_Place]:
        """Return where the outputs of a vector of positions are, from flat `position` of a block on.

        They are in one row, or parts of as many outputs as a vector has lanes are, one after the other.
        """
        layout, columns = self.definition.layout, tile.section.phases[1]
        lanes, widths = layout.lanes, (layout.tile.width, layout.geometry.axes[2].positions)
        parts = columns if any(width % lanes for width in widths) else 1
        outputs = (position * columns + part * (lanes * columns // parts) for part in range(parts))
        return [self._place(tile, output) for output in outputs]

    def _place(self, tile: RegisterTile, output: Expr) -> _Place:
        """Return the place of the flat `output` of a block, counted along rows of the output of one row of phases."""
        geometry, layout = self.definition.layout.geometry, self.definition.layout
        columns = tile.section.phases[1]
        sizes = [*layout.tile.block[:3], layout.tile.width * columns]
        counts = (*(axis.positions for axis in geometry.axes[:2]), geometry.output[2])
        capacity = math.prod(sizes)
        exists = [output < capacity] if layout.positions * columns > capacity else []
        index: list[Expr] = []
        left = output
        for number, size, count in reversed([*zip(tile.lead[1:4], sizes[1:], counts, strict=True)]):
            index.insert(0, number * size + left % size)
            left = left // size
            if count % size:
                exists.append(index[0] < count)
        image = tile.lead[0] * sizes[0] + left % sizes[0]
        return _Place([image, *index], [*exists, *self.image_exists(image)])

    def _row_stores(self, tile: RegisterTile, position: Expr, places: Sequence[_Place]) -> list[list[Stmt]]:
        """Return the stores of the vectors from flat `position` on, by the rows of the output in a register tile.

        The vectors of the phases of the last axis, interleaved, are contiguous in the output; `places` are those of
        parts of them, which may not exist, or that of all.
        """
        layout, width = self.definition.layout, self.definition.layout.tile.channels
        rows_of_output: list[list[Stmt]] = []
        for row, cc in itertools.product(range(tile.section.phases[0]), range(width)):
            fd, fh, _ = tile.phase(row, 0)
            stores, vectors = self.vectors(tile, position, row, cc)
            length = layout.lanes * tile.section.phases[1] // len(vectors)
            stored: list[Stmt] = []
            for i, vector in enumerate(vectors):
                n, d, h, w = places[min(i, len(places) - 1)].index
                row_index = self.row_index(tile, cc, n, (d * layout.strides[0] + fd, h * layout.strides[1] + fh))
                offset = i * length if len(places) == 1 else 0
                store = self._store(vector, length, row_index, w + offset)
                exists = places[i].exists if len(places) > 1 else []
                stored.append(IfThenElse(tirx.all(*exists), store, None) if exists else store)
            rows_of_output.append([*stores, *self.of_channel(tile, cc, stored)])
        return rows_of_output

    def vectors(self, tile: RegisterTile, position: Expr, row: int, cc: int) -> tuple[list[Stmt], list[Expr]]:
        """Return the vectors of the output of channel `cc` from flat `position` on, of a `row` of phases.

        In front of them are the statements that finish the vectors of the phases that they are made of.
        """
        lanes = self.definition.layout.lanes
        fd, fh, _ = tile.phase(row, 0)
        numbers = (tirx.const(column, "int64") for column in range(tile.section.phases[1]))
        streams = [[*tile.lead, fd, fh, column, tirx.const(cc, "int64")] for column in numbers]
        finished = [self._finish(tile, stream, position) for stream in streams] if self.finishes else []
        lane = ramp(position, lanes)
        return finished, self._interleaved([self.finished_sums(tile, [*stream, lane]) for stream in streams])

    def row_index(self, tile: RegisterTile, cc: int, image: Expr, outer: Sequence[Expr]) -> list[Expr]:
        """Return the index in the output of the row of channel `cc` of a tile, at `image` and `outer` of a call.

        `outer` are the outputs along the first two of three axes.
        """
        layout = self.definition.layout
        channel = tile.lead[4] * layout.geometry.out_channels + tile.lead[5] * layout.tile.channels + cc
        return [image, channel, *outer[3 - self.problem.rank :]]

    def of_channel(self, tile: RegisterTile, cc: int, stores: list[Stmt]) -> list[Stmt]:
        """Return `stores` of channel `cc` of a tile of channels, or none if there is no such channel."""
        geometry, width = self.definition.layout.geometry, self.definition.layout.tile.channels
        if geometry.out_channels % width == 0:
            return stores
        return [IfThenElse(tile.lead[5] * width + cc < geometry.out_channels, sequence(stores), None)]

    def _finish(self, tile: RegisterTile, stream: Sequence[Expr], position: Expr) -> Stmt:
        """Return the loop that finishes the vector of `stream` from `position` on; its last index is the channel."""
        return self.finish(tile, lambda lane: [*stream, position + lane], lambda _: stream[-1])

    def _interleaved(self, streams: list[Expr]) -> list[Expr]:
        """Return the vectors of the output that the finished `streams` of its phases are."""
        lanes = self.definition.layout.lanes
        if self.joining or stores_bytes(self.problem):
            return narrow_streams(streams, lanes, storage_dtype(self.problem.output_dtype), self.joining)
        return [self.in_output(vector) for vector in shuffle_network(streams, lanes)]

    def _store(self, vector: Expr, length: int, index: Sequence[Expr], w: Expr) -> Stmt:
        """Return the store of a `vector` of `length` outputs from `w` on in the row of the output at `index`."""
        if self.streams:
            return Evaluate(tirx.call_extern("int32", _STORE, address(self.out, [*index, w]), vector))
        return BufferStore(self.out, vector, [*index, ramp(w, length)])
