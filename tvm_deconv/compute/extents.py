"""The extents of a definition: numbers, or variables of the call for dynamic extents.

A dynamic extent enters a definition in three places only: the bounds of the data, the number of blocks, and the extent
of the output. Everything inside of a block is a number, so no symbolic axis is ever cut, and vectors stay whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from tvm import te, tirx
from tvm.ir import Expr
from tvm.tirx import IntImm

from tvm_deconv.compute.phases import Geometry
from tvm_deconv.problem import Problem
from tvm_deconv.problem.arithmetic import ceil_div

Extent: TypeAlias = Expr | int


@dataclass(frozen=True, slots=True)
class End:
    """The end of a dynamic axis: the outermost spatial `axis` along which blocks hold several positions.

    The axis ends `offset` positions after the value of the call's variable `name`. Blocks hold `block` positions along
    it, and a position has `stride` outputs.
    """

    axis: int
    name: str
    offset: int
    block: int
    stride: int


@dataclass(frozen=True, slots=True)
class Extents:
    """The number of images and, along three spatial axes, the extents of the data, the output and a phase.

    For each axis `names` has the variable of its dynamic extent, and is empty if the extent is fixed. `offsets` are
    differences between positions of a phase and the data's extent. A position has `strides` outputs.
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
            names[place], offsets[place] = f"extent_{axis}", ceil_div(constant, stride) - 1
            extent = tirx.Var(names[place], "int64")
            data[place] = extent
            output[place] = extent * stride + (constant - stride)
            positions[place] = extent + offsets[place]
        batch: Extent = tirx.Var("batch", "int64") if 0 in problem.dynamic else geometry.batch
        strides = tuple(axis.stride for axis in geometry.axes)
        return Extents(batch, tuple(data), tuple(output), tuple(positions), tuple(names), tuple(offsets), strides)

    def blocks(self, block: Sequence[int]) -> tuple[Extent, ...]:
        """Return the number of blocks, of `block` images and positions, along each of the four axes.

        For a dynamic extent it has the form to which the simplifier brings the block number of an output: with any
        other, the regions of the stages do not match.
        """
        dynamic, offsets = (self.batch, *self.data), (0, *self.offsets)
        return tuple(
            ceil_div(extent, size)
            if isinstance(extent, int)
            else (variable + (offset % size - 1)) // size + (offset // size + 1)
            for extent, variable, offset, size in zip(
                (self.batch, *self.positions), dynamic, offsets, block, strict=True
            )
        )

    def end(self, block: Sequence[int], spans: Sequence[int]) -> End | None:
        """Return the end of the dynamic axis that a block may run over, or None.

        The axis must be the outermost along which blocks hold several positions. The outputs of a `block` of images and
        positions take `spans` positions along three axes.
        """
        images, *lengths = block
        axis = next((axis for axis, span in enumerate(spans) if span > 1), None)
        if images > 1 or axis is None:
            return None
        name, offset = self.names[axis], self.offsets[axis] + spans[axis] - lengths[axis]
        return End(axis, name, offset, lengths[axis], self.strides[axis]) if name else None

    @property
    def serial(self) -> int:
        """The number of axes of blocks up to the last dynamic one, images first; 0 if none is dynamic.

        Data that several tasks share are packed anew for each block of these axes, so that the workspace does not grow
        with the call.
        """
        dynamic = [not isinstance(extent, int) for extent in (self.batch, *self.positions)]
        return max((axis + 1 for axis, is_dynamic in enumerate(dynamic) if is_dynamic), default=0)

    def spatial(self, rank: int) -> tuple[Extent, ...]:
        """Return the spatial extents of the caller's data, which have `rank` spatial axes."""
        return self.data[3 - rank :]


def at_most(size: int, extent: Extent) -> int:
    """Return `size`, or `extent` if it is a number and smaller."""
    return min(size, extent) if isinstance(extent, int) else size


def reduce_axis(extent: int, name: str) -> te.IterVar:
    """Return an axis of a sum over `extent` terms, with 64-bit numbers."""
    return te.reduce_axis(tuple(shape_of((0, extent))), name)


def int64(value: int) -> IntImm:
    """Return `value` as a 64-bit number of TVM."""
    return IntImm("int64", value)


def shape_of(values: Sequence[Extent]) -> list[Expr]:
    """Return `values` as a shape for TVM, with 64-bit numbers."""
    return [int64(value) if isinstance(value, int) else value for value in values]
