"""The extents of a definition: numbers, and variables of the call where a problem leaves them dynamic.

A dynamic extent enters three places only: where the data end, how many blocks there are, and where the output ends.
Everything inside of a block is a number, so no symbolic axis is ever cut, and vectors stay whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from tvm import tirx
from tvm.ir import Expr
from tvm.tirx import IntImm

from tvm_deconv.compute.phases import Geometry
from tvm_deconv.problem import Problem

Extent: TypeAlias = Expr | int


@dataclass(frozen=True, slots=True)
class End:
    """Where a dynamic axis ends, the outermost along which blocks have several positions, `block` of them.

    That is after so many positions as the variable `name` of a call says, and `offset` more; a position has `stride`
    outputs.
    """

    axis: int
    name: str
    offset: int
    block: int
    stride: int


@dataclass(frozen=True, slots=True)
class Extents:
    """Images, and along three spatial axes the data, the output, and the positions of a phase.

    `names` are those of the dynamic extents of the data, empty for others, and `offsets` what positions are more. A
    position has `strides` outputs.
    """

    batch: Extent
    data: tuple[Extent, ...]
    output: tuple[Extent, ...]
    positions: tuple[Extent, ...]
    names: tuple[str, ...]
    offsets: tuple[int, ...]
    strides: tuple[int, ...]

    @staticmethod
    def of(problem: Problem) -> Extents:
        """Return the extents of `problem`, with new variables for the dynamic ones."""
        geometry = Geometry.of(problem)
        data: list[Extent] = [*geometry.data]
        output: list[Extent] = [*geometry.output]
        positions: list[Extent] = [axis.positions for axis in geometry.axes]
        names, offsets = ["", "", ""], [0, 0, 0]
        for axis in (axis - 1 for axis in problem.dynamic if axis):
            place, stride, constant = axis + 3 - problem.rank, problem.strides[axis], problem.output_constant(axis)
            names[place], offsets[place] = f"extent_{axis}", -(-constant // stride) - 1
            extent = tirx.Var(names[place], "int64")
            data[place] = extent
            output[place] = extent * stride + (constant - stride)
            positions[place] = extent + offsets[place]
        batch: Extent = tirx.Var("batch", "int64") if 0 in problem.dynamic else geometry.batch
        strides = tuple(axis.stride for axis in geometry.axes)
        return Extents(batch, tuple(data), tuple(output), tuple(positions), tuple(names), tuple(offsets), strides)

    def blocks(self, block: Sequence[int]) -> tuple[Extent, ...]:
        """Return how many blocks of images and positions there are along each of the four axes.

        For a dynamic extent in the one form that the simplifier brings the number of an output's block to.
        """
        dynamic, offsets = (self.batch, *self.data), (0, *self.offsets)
        return tuple(
            -(-e // b) if isinstance(e, int) else (x + (offset % b - 1)) // b + (offset // b + 1)
            for e, x, offset, b in zip((self.batch, *self.positions), dynamic, offsets, block, strict=True)
        )

    def end(self, block: Sequence[int], spans: Sequence[int]) -> End | None:
        """Return the end that the positions of a block, in their order, may run over; None where it is not dynamic.

        The outputs of a `block` of images and positions take `spans` positions along three axes.
        """
        images, *lengths = block
        axis = next((axis for axis, span in enumerate(spans) if span > 1), None)
        if images > 1 or axis is None:
            return None
        name, offset = self.names[axis], self.offsets[axis] + spans[axis] - lengths[axis]
        return End(axis, name, offset, lengths[axis], self.strides[axis]) if name else None

    @property
    def serial(self) -> int:
        """How many axes of blocks, from the outermost on, hold all that are dynamic.

        What is made once for several tasks is made anew for each block of those: its memory does not grow with a call.
        """
        dynamic = [not isinstance(extent, int) for extent in (self.batch, *self.positions)]
        return max((axis + 1 for axis, is_dynamic in enumerate(dynamic) if is_dynamic), default=0)

    def spatial(self, rank: int) -> tuple[Extent, ...]:
        """Return the spatial extents of the data as the caller has them."""
        return self.data[3 - rank :]


def at_most(size: int, extent: Extent) -> int:
    """Return `size`, or the `extent` where that is known to be smaller."""
    return min(size, extent) if isinstance(extent, int) else size


def shape_of(values: Sequence[Extent]) -> list[Expr]:
    """Return a shape for TVM, all of it 64-bit."""
    return [IntImm("int64", value) if isinstance(value, int) else value for value in values]
