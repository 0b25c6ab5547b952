"""The phases of a transposed convolution as matrix products, by their indices, for targets with many threads.

For each combination of runs (`phases`) the outputs of one group are the product ``C[m, n] = sum_k A[m, k] * B[k, n]``:

- ``m`` counts the positions ``(image, d, h, w)`` of a phase;
- ``n`` counts output channels and phases, since all phases of a run read the same data. It counts ``(phase, channel)``
  if the output has its channels last, else ``(channel, phase)``, so that neighbours in n are neighbours in memory;
- ``k`` counts ``(tap, input channel)``. Channels are padded to whole tiles of k if that adds little: all terms of a
  tile then are of one tap, and only one division a tile finds it. Such tiles are in the order ``(channels, tap)``, so
  that each reads nearly the same data as the one before, which the nearest cache still has.

Phases are those of the uncropped output where that makes fewer, wider products: with kernel 4, stride 2 and pad 1 the
four phases are columns of one product instead of four, and the data are gathered 4 times instead of 16.

A is gathered from the data, with zeros outside of them. B is the packed filter. C is scattered to the output.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from tvm import tirx
from tvm.ir import Expr

from tvm_deconv.compute.indexing import Index, unravel
from tvm_deconv.compute.phases import Geometry, Run
from tvm_deconv.problem import Problem
from tvm_deconv.problem.arithmetic import ceil_div

#: Terms with padded channels for one of those without, at most.
_MOST_PADDED = Fraction(4, 3)
#: Columns of the widest tile, and as how many more of them the gathering of its rows counts.
_WIDE, _GATHERED = 128, 32


@dataclass(frozen=True, slots=True)
class Section:
    """One combination of runs as a matrix product, in tiles of `tile_k` terms and `tile_n` columns.

    Its packed filter is ``[groups, tiles of n, tiles of k * tile_k, tile_n]``. It begins at element `offset`, and is
    zero beyond the last k and n.
    """

    geometry: Geometry
    runs: tuple[Run, Run, Run]
    channels_last: bool
    tile_k: int
    tile_n: int
    offset: int

    @property
    def taps(self) -> tuple[int, int, int]:
        """Number of taps along each axis."""
        first, second, third = self.runs
        return first.taps, second.taps, third.taps

    @property
    def counts(self) -> tuple[int, int, int]:
        """Number of phases along each axis."""
        first, second, third = self.runs
        return first.count, second.count, third.count

    @property
    def m(self) -> int:
        """Number of rows: positions of all images."""
        return math.prod(self.extents)

    @property
    def extents(self) -> tuple[int, ...]:
        """Extents of the rows: images, and positions along each axis."""
        return self.geometry.batch, *(axis.end + 1 for axis in self.geometry.axes)

    @property
    def n(self) -> int:
        """Number of columns: phases of all output channels."""
        return self.geometry.out_channels * math.prod(self.counts)

    @property
    def channels(self) -> int:
        """Number of terms of each tap: the input channels of a group, and those of padding."""
        channels, taps = self.geometry.in_channels, math.prod(self.taps)
        padded = ceil_div(channels, self.tile_k) * self.tile_k
        unpadded = ceil_div(channels * taps, self.tile_k) * self.tile_k
        return padded if padded * taps <= _MOST_PADDED * unpadded else channels

    @property
    def alike(self) -> bool:
        """True if all terms of a tile of k are of one tap, so that a row has all of them or none."""
        return self.channels % self.tile_k == 0

    @property
    def k(self) -> int:
        """Number of terms of each sum: all taps."""
        return self.channels * math.prod(self.taps)

    @property
    def tiles_n(self) -> int:
        """Number of tiles of columns."""
        return ceil_div(self.n, self.tile_n)

    @property
    def tiles_k(self) -> int:
        """Number of tiles of terms."""
        return ceil_div(self.k, self.tile_k)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Extents of the packed filter: groups, tiles of n, k in whole tiles, n within the tile."""
        return self.geometry.groups, self.tiles_n, self.tiles_k * self.tile_k, self.tile_n

    def position(self, m: Index) -> tuple[Index, tuple[Index, Index, Index]]:
        """Return the image of row `m`, and its position along each axis."""
        image, d, h, w = unravel(m, self.extents)
        return image, (d, h, w)

    def column(self, n: Index) -> tuple[Index, tuple[Index, Index, Index]]:
        """Return the output channel of column `n` within the group, and its phase along each axis within the run."""
        channels = self.geometry.out_channels
        if self.channels_last:
            d, h, w, channel = unravel(n, (*self.counts, channels))
        else:
            channel, d, h, w = unravel(n, (channels, *self.counts))
        return channel, (d, h, w)

    def term(self, k: Index) -> tuple[Index, tuple[Index, Index, Index]]:
        """Return the input channel of term `k` within the group, or one of padding, and its tap along each axis."""
        if self.alike:
            tile, d, h, w, within = unravel(k, (self.channels // self.tile_k, *self.taps, self.tile_k))
            return tile * self.tile_k + within, (d, h, w)
        d, h, w, channel = unravel(k, (*self.taps, self.channels))
        return channel, (d, h, w)

    def tap(self, tile: Index) -> tuple[Index, Index]:
        """Return the first input channel and the number of the tap of a tile of k, if all its terms are `alike`."""
        count = math.prod(self.taps)
        tap, chunk = (tile % count, tile // count) if count > 1 else (0, tile)
        return chunk * self.tile_k, tap

    def source(self, position: Sequence[Index], taps: Sequence[Index]) -> tuple[list[Index], list[Expr]]:
        """Return the data index that a tap reads at a position, and the conditions that it lies inside of the data."""
        index: list[Index] = []
        inside: list[Expr] = []
        for axis, (y, t) in enumerate(zip(position, taps, strict=True)):
            x, conditions = self.along(axis, y, t)
            index.append(x)
            inside += conditions
        return index, inside

    def along(self, axis: int, y: Index, t: Index) -> tuple[Index, list[Expr]]:
        """Return the data index along an axis that tap `t` reads at position `y`, and when it lies inside of the data.

        If `t` is a number, conditions are those of this tap alone.
        """
        run, extent = self.runs[axis], self.geometry.data[axis]
        x = y + run.x0 - t * run.x_step if run.taps > 1 else y + run.x0
        first, last = (t, t) if isinstance(t, int) else (0, run.taps - 1)
        inside = [x >= 0] if run.x0 - last * run.x_step < 0 else []
        if self.geometry.axes[axis].end + run.x0 - first * run.x_step >= extent:
            inside.append(x < extent)
        return x, inside

    def target(self, position: Sequence[Index], phases: Sequence[Index]) -> tuple[list[Index], list[Expr]]:
        """Return the output index of a phase at a position, and the conditions that it lies inside of the output."""
        index: list[Index] = []
        inside: list[Expr] = []
        for y, phase, run, axis, extent in zip(
            position, phases, self.runs, self.geometry.axes, self.geometry.output, strict=True
        ):
            start = run.start - axis.shift
            i = y * axis.stride + (phase + start if run.count > 1 else start)
            index.append(i)
            if start < 0:
                inside.append(i >= 0)
            if axis.end * axis.stride + start + run.count - 1 >= extent:
                inside.append(i < extent)
        return index, inside

    def element(self, taps: Sequence[Index], phases: Sequence[Index]) -> list[Index]:
        """Return the filter index of a tap of a phase along each axis."""
        return [run.k0 + phase + tap * run.k_step for run, phase, tap in zip(self.runs, phases, taps, strict=True)]


@lru_cache(64)
def gathered(problem: Problem) -> Geometry:
    """Return the geometry whose products take the least time: rows by columns and terms, and the gathering of rows."""

    def work(geometry: Geometry) -> int:
        rows = math.prod(axis.end + 1 for axis in geometry.axes)
        columns = [(runs, geometry.out_channels * math.prod(run.count for run in runs)) for runs in geometry.runs]
        return sum(
            rows * math.prod(run.taps for run in runs) * (n + _GATHERED * ceil_div(n, _WIDE)) for runs, n in columns
        )

    return min(Geometry.choices(problem), key=work)


def sections(problem: Problem, tile_k: int, tile_n: int, geometry: Geometry | None = None) -> tuple[Section, ...]:
    """Return the products of `problem`, those with the most terms first; none if no tap reaches the output.

    They are those of `geometry`, or else of the one that `gathered` chooses.
    """
    geometry = geometry or gathered(problem)
    last = problem.data_format == "NXC"
    products: list[Section] = []
    offset = 0
    for runs in sorted(geometry.runs, key=lambda runs: -math.prod(run.taps for run in runs)):
        products.append(Section(geometry, runs, last, tile_k, tile_n, offset))
        offset += math.prod(products[-1].shape)
    return tuple(products)


def ravel(index: Sequence[Index], extents: Sequence[int]) -> Index:
    """Return the number of element `index` of an array whose axes but the first have these `extents`."""
    first, *rest = index
    for part, extent in zip(rest, extents, strict=True):
        first = first * extent + part
    return first


def reached(geometry: Geometry, index: Sequence[Index]) -> list[Expr]:
    """Return the conditions that any tap reaches the output `index`; none if taps reach all outputs."""
    conditions: list[Expr] = []
    for i, axis, extent in zip(index, geometry.axes, geometry.output, strict=True):
        if sum(run.count for run in axis.runs) < min(axis.stride, extent):
            phase = i % axis.stride
            members = [tirx.all(phase >= run.start, phase < run.start + run.count) for run in axis.runs]
            conditions.append(tirx.any(*members) if members else tirx.const(False, "bool"))
    return conditions
