"""The arithmetic of phases: the taps that reach an output index, and the data index that each of them reads.

Along a spatial axis the operator adds ``data[x] * filter[k]`` into the output index ``i = s*x + d*k - pb``. Write an
output index as ``i = s*y + r`` with the phase ``r`` in ``[0, s)``. A tap ``k`` reaches phase ``r`` if ``d*k - pb - r``
is a multiple of ``s``. These taps are ``k = k0 + t*(s/g)`` with ``g = gcd(s, d)``, and tap ``t`` reads the data index
``x = y + x0 - t*(d/g)``. So every phase is a small dense correlation of stride one, and no product with an inserted
zero is ever formed.

Neighbouring phases with the same number of taps, the same ``x0`` and consecutive ``k0`` form a `Run`. With dilation 1
an axis has at most three runs whatever its stride, so that a stride of 32 costs three stages and not thirty-two.

Taps that read zeros alone, since pads or dilation take them past both ends of a short axis, are left out.

Phases may also be counted from some elements before the output. With a pad of one, kernel 4 and stride 2 each phase is
a run of its own; counted from the beginning of the pad both phases read the same two data elements.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeVar

from tvm.ir import Expr

from tvm_deconv.compute.winograd import MAX_PRODUCTS, Bilinear, winograd
from tvm_deconv.problem import Problem
from tvm_deconv.problem.arithmetic import ceil_div

IndexT = TypeVar("IndexT", int, Expr)


@dataclass(frozen=True, slots=True)
class Run:
    """The phases ``start .. start + count - 1`` of one axis, which all have `taps` taps.

    Phase ``start + j``, tap ``t`` multiplies the filter element ``k0 + j + t*k_step`` with the data element
    ``y + x0 - t*x_step``.
    """

    start: int
    count: int
    taps: int
    k0: int
    k_step: int
    x0: int
    x_step: int


@dataclass(frozen=True, slots=True)
class AxisPhases:
    """One spatial axis split into phases; `runs` cover every phase that has a tap, in rising order.

    Output index ``i`` is phase ``(i + shift) % s`` at ``y = (i + shift) // s``. An output of extent ``Y`` has
    ``ceil(Y / s)`` `positions`, and its last index lies at ``y = end``. The data indices read at ``y`` lie in
    ``[y + low, y + low + halo]``.
    """

    stride: int
    positions: int
    runs: tuple[Run, ...]
    low: int
    halo: int
    shift: int
    end: int

    @property
    def step(self) -> int:
        """Distance between the data elements that the taps of a phase read."""
        return self.runs[0].x_step if self.runs else 1

    def place(self, index: Expr) -> tuple[Expr, Expr]:
        """Return the phase and the ``y`` of output `index`, both counted from the beginning of a block."""
        index = index + self.shift if self.shift else index
        return index % self.stride, index // self.stride

    def span(self, block: int, dynamic: bool) -> int:
        """Return the number of ``y`` that the outputs of a block take; the most of any block if `dynamic`.

        A block has the outputs of `block` positions.
        """
        if not self.shift:
            return block
        return block + 1 if dynamic else min(block, self.end) + 1


def axis_phases(
    kernel: int, stride: int, dilation: int, pad_begin: int, output: int, data: int | None, shift: int = 0
) -> AxisPhases:
    """Split an axis of extent `output` into phases, counted from `shift` elements before it.

    All arguments are numbers of elements; `shift` is less than the stride. The extent of the `data` is None if it is
    not known.
    """
    offset, end = pad_begin - shift, (output - 1 + shift) // stride
    common = math.gcd(stride, dilation)
    k_step, x_step = stride // common, dilation // common
    inverse = pow(x_step, -1, k_step)
    runs: list[Run] = []
    for phase in range(min(stride, output + shift)):
        if (phase + offset) % common:
            continue
        # The smallest k with dilation * k = phase + offset, modulo the stride.
        k0 = (phase + offset) // common * inverse % k_step
        if k0 >= kernel:
            continue
        taps = (kernel - 1 - k0) // k_step + 1
        x0 = (phase + offset - dilation * k0) // stride
        if data is not None:
            # Of y from 0 to `end`, tap t reads some data if x0 - t*x_step is less than `data`, and no less than -end.
            first = max(ceil_div(x0 + 1 - data, x_step), 0)
            taps = min((x0 + end) // x_step + 1, taps) - first
            k0, x0 = k0 + first * k_step, x0 - first * x_step
            if taps <= 0:
                continue
        last = runs[-1] if runs else None
        if last and (last.start + last.count, last.k0 + last.count, last.taps, last.x0) == (phase, k0, taps, x0):
            runs[-1] = replace(last, count=last.count + 1)
        else:
            runs.append(Run(phase, 1, taps, k0, k_step, x0, x_step))
    low = min((run.x0 - (run.taps - 1) * x_step for run in runs), default=0)
    high = max((run.x0 for run in runs), default=0)
    return AxisPhases(stride, ceil_div(output, stride), tuple(runs), low, high - low, shift, end)


@dataclass(frozen=True, slots=True)
class AxisRows:
    """The rows of a run along one axis of a block.

    There are `tiles` rows of `outputs` positions each. A row reads `window` data elements, `step` apart, the first
    `start` elements after its own first position. Without Winograd these are the taps in reverse order, and are part of
    the reduction. With it the positions of a row are `step` apart, too: `step` rows lie between each other. The taps
    are `pieces` filters then, as short as Winograd's transforms need them, whose results are one sum.
    """

    outputs: int
    tiles: int
    start: int
    step: int
    run: Run
    pieces: int

    @property
    def transformed(self) -> bool:
        """True if Winograd's transforms apply."""
        return self.outputs > 1

    @property
    def algorithm(self) -> Bilinear | None:
        """Winograd's algorithm if it applies: that of a piece."""
        return winograd(self.outputs, self.piece) if self.transformed else None

    @property
    def piece(self) -> int:
        """Taps of a piece; the last one may lack some."""
        return ceil_div(self.run.taps, self.pieces)

    @property
    def window(self) -> int:
        """Data elements of a row."""
        return self.outputs + self.pieces * self.piece - 1

    @property
    def apart(self) -> int:
        """Distance between the positions of a row."""
        return self.step if self.transformed else 1

    def first(self, row: IndexT) -> IndexT:
        """Return the first position of a `row`."""
        if self.apart == 1:
            return row * self.outputs
        return row // self.apart * (self.outputs * self.apart) + row % self.apart

    def row_of(self, position: Expr) -> tuple[Expr, Expr]:
        """Return the row of a `position`, and the number of the position in it."""
        if self.apart == 1:
            return position // self.outputs, position % self.outputs
        together = self.outputs * self.apart
        return position // together * self.apart + position % self.apart, position % together // self.apart

    @property
    def points(self) -> int:
        """Number of products of a row, for each of its `taps`."""
        return self.outputs + self.piece - 1 if self.transformed else 1

    @property
    def taps(self) -> int:
        """Extent of the reduction over taps, or over pieces of them."""
        return self.pieces if self.transformed else self.window

    def first_read(self, tap: IndexT) -> IndexT:
        """Return the number in the window of the first element that a row reads at a `tap` of the reduction."""
        return tap * self.piece if self.transformed else self.window - 1 - tap


def axis_rows(axis: AxisPhases, run: Run, positions: int, outputs: int) -> AxisRows:
    """Return the rows of `run` along `axis`, for a block of `positions` and Winograd's m of `outputs`.

    Runs without several taps are not transformed. Taps are cut into the fewest pieces for which
    there are points enough.
    """
    m = outputs if run.taps > 1 else 1
    start = run.x0 - (run.taps - 1) * run.x_step - axis.low
    apart = run.x_step if m > 1 else 1
    pieces = ceil_div(run.taps, max(MAX_PRODUCTS + 1 - m, 1)) if m > 1 else 1
    return AxisRows(m, ceil_div(positions, m * apart) * apart, start, run.x_step, run, pieces)


def _fewest_runs(
    kernel: int, stride: int, dilation: int, pad: int, output: int, data: int | None, uncropped: bool
) -> AxisPhases:
    """Split an axis into phases of the output, or if `uncropped` into those of the uncropped output if that is better.

    It is better if it makes fewer runs.
    """
    phases = axis_phases(kernel, stride, dilation, pad, output, data)
    if uncropped:
        shifted = axis_phases(kernel, stride, dilation, pad, output, data, pad % stride)
        return shifted if len(shifted.runs) < len(phases.runs) else phases
    return phases


def three_axes(values: tuple[int, ...], fill: int) -> tuple[int, int, int]:
    """Return `values` behind as many of `fill` as make them three."""
    padded = (fill,) * (3 - len(values)) + values
    return padded[0], padded[1], padded[2]


@dataclass(frozen=True, slots=True)
class Geometry:
    """The extents of a problem with exactly three spatial axes; missing axes come first and have extent one.

    On an axis with one data element each output element has one tap or none, whatever the stride. Such an axis gets a
    stride past every index. All of its outputs are then phases of one position, and the layer is a plain matrix
    product. Empty batches and outputs get extent one: their kernel is built and never called. The extents of a
    `dynamic` axis are those of the representative call.
    """

    batch: int
    groups: int
    in_channels: int
    out_channels: int
    data: tuple[int, int, int]
    kernel: tuple[int, int, int]
    output: tuple[int, int, int]
    axes: tuple[AxisPhases, AxisPhases, AxisPhases]
    dynamic: tuple[bool, bool, bool]

    @staticmethod
    @lru_cache(64)
    def of(problem: Problem, uncropped: bool = False) -> Geometry:
        """Return the geometry of `problem`.

        If `uncropped`, phases are counted from the beginning of the uncropped output, before the pads are cut off,
        along every axis on which that makes fewer runs: then more phases read the same data.
        """
        # Every phase of a dynamic axis is computed: some call has it.
        outputs = tuple(
            max(y, s if axis + 1 in problem.dynamic else 1)
            for axis, (y, s) in enumerate(zip(problem.output_spatial, problem.strides, strict=True))
        )
        data, kernel, output = (three_axes(values, 1) for values in (problem.data_spatial, problem.kernel, outputs))
        strides, dilations = three_axes(problem.strides, 1), three_axes(problem.dilations, 1)
        pads = three_axes(problem.pads_begin, 0)
        dynamic = (False, problem.rank == 2 and 1 in problem.dynamic, problem.rank in problem.dynamic)
        first, second, third = (
            _fewest_runs(
                k,
                s if x > 1 or is_dynamic else max(pad + y, (k - 1) * d + 1),
                d,
                pad,
                y,
                None if is_dynamic else x,
                uncropped,
            )
            for x, k, s, d, pad, y, is_dynamic in zip(
                data, kernel, strides, dilations, pads, output, dynamic, strict=True
            )
        )
        return Geometry(
            max(problem.batch, 1),
            problem.groups,
            problem.in_channels,
            problem.out_channels,
            data,
            kernel,
            output,
            (first, second, third),
            dynamic,
        )

    @staticmethod
    def choices(problem: Problem) -> list[Geometry]:
        """Return the geometry by phases of the output and, if it differs, that by phases of the uncropped output."""
        geometry, uncropped = Geometry.of(problem), Geometry.of(problem, uncropped=True)
        return [geometry, uncropped] if uncropped.uncropped else [geometry]

    @property
    def uncropped(self) -> int:
        """1 if phases are those of the uncropped output along some axis, else 0."""
        return int(any(axis.shift for axis in self.axes))

    @property
    def pointwise(self) -> bool:
        """True if all phases are one run and have one tap, which reads the data at the phase's own position."""
        return len(self.runs) == 1 and all(axis.low == axis.halo == axis.shift == 0 for axis in self.axes)

    @property
    def taps(self) -> int:
        """Number of taps of all phases together."""
        return math.prod(sum(run.count * run.taps for run in axis.runs) for axis in self.axes)

    @property
    def runs(self) -> tuple[tuple[Run, Run, Run], ...]:
        """All combinations of runs of the three axes; together they hold each phase that has a tap once."""
        first, second, third = self.axes
        return tuple((d, h, w) for d in first.runs for h in second.runs for w in third.runs)
