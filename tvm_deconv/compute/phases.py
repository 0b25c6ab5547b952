"""The arithmetic of a phase: which taps reach an output index, and from which data index.

Per spatial axis the operator adds ``data[x] * filter[k]`` into the output index ``i = s*x + d*k - pb``.  Write an
output index as ``i = s*y + r`` with the phase ``r`` in ``[0, s)``.  A tap ``k`` reaches phase ``r`` when ``d*k - pb -
r`` is a multiple of ``s``; the taps that do are ``k = k0 + t*(s/g)`` with ``g = gcd(s, d)``, and tap ``t`` reads the
data index ``x = y + x0 - t*(d/g)``.  So every phase is a small dense correlation of stride one, and no product with
an inserted zero is ever formed.

Neighbouring phases with the same number of taps, the same ``x0`` and consecutive ``k0`` form a `Run`; with dilation 1
an axis has at most three runs whatever its stride, so that a stride of 32 costs three stages and not thirty-two.

Phases may also be counted from some elements before the output on: with a pad of one, kernel 4 and stride 2 each phase
is a run of its own, but counted from where the pad begins both phases read the same two data elements.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tvm.ir import Expr

from tvm_deconv.problem import Problem


@dataclass(frozen=True, slots=True)
class Run:
    """Phases ``start .. start + count - 1`` of one axis, all with `taps` taps.

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
    """One spatial axis split into phases: `runs` cover every phase that has a tap, in rising order.

    Output index ``i`` is phase ``(i + shift) % s`` at ``y = (i + shift) // s``. `positions` counts the ``s`` successive
    outputs that there are, ``ceil(Y / s)``; `end` is the ``y`` of the last output. The data indices read at ``y`` lie
    in ``[y + low, y + low + halo]``.
    """

    stride: int
    positions: int
    runs: tuple[Run, ...]
    low: int
    halo: int
    shift: int
    end: int

    def place(self, index: Expr) -> tuple[Expr, Expr]:
        """Return the phase and the ``y`` of output `index`, counted from where a block begins."""
        index = index + self.shift if self.shift else index
        return index % self.stride, index // self.stride

    def span(self, block: int, dynamic: bool) -> int:
        """Return how many ``y`` the outputs of a block of that many `positions` take, any block if `dynamic`."""
        if not self.shift:
            return block
        return block + 1 if dynamic else min(block, self.end) + 1


def axis_phases(kernel: int, stride: int, dilation: int, pad_begin: int, output: int, shift: int = 0) -> AxisPhases:
    """Split one axis of extent `output` into phases, counted from `shift` before it on.

    All arguments are element counts; `shift` is less than the stride.
    """
    offset = pad_begin - shift
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
        last = runs[-1] if runs else None
        if last is not None and (last.start + last.count, last.k0 + last.count, last.taps, last.x0) == (
            phase,
            k0,
            taps,
            x0,
        ):
            runs[-1] = Run(last.start, last.count + 1, taps, last.k0, k_step, x0, x_step)
        else:
            runs.append(Run(phase, 1, taps, k0, k_step, x0, x_step))
    low = min((run.x0 - (run.taps - 1) * x_step for run in runs), default=0)
    high = max((run.x0 for run in runs), default=0)
    end = (output - 1 + shift) // stride
    return AxisPhases(stride, -(-output // stride), tuple(runs), low, high - low, shift, end)


@dataclass(frozen=True, slots=True)
class AxisRows:
    """How a run's rows lie along one axis.

    A row is `outputs` positions, and there are `tiles` of them in a block; it reads `window` data elements, `step`
    apart, from `start` on relative to the first element that a block holds.  Without Winograd those are the taps, last
    first, and part of the reduction.
    """

    outputs: int
    tiles: int
    window: int
    start: int
    step: int
    run: Run

    @property
    def transformed(self) -> bool:
        """Whether Winograd's transforms apply."""
        return self.outputs > 1

    @property
    def points(self) -> int:
        """Products per row."""
        return self.window if self.transformed else 1

    @property
    def taps(self) -> int:
        """Extent of the reduction."""
        return 1 if self.transformed else self.window


def axis_rows(axis: AxisPhases, run: Run, positions: int, outputs: int) -> AxisRows:
    """Lay the rows of `run` along `axis` for a block of that many `positions`."""
    m = outputs if run.taps > 1 and run.x_step == 1 else 1
    start = run.x0 - (run.taps - 1) * run.x_step - axis.low
    return AxisRows(m, -(-positions // m), m + run.taps - 1, start, run.x_step, run)


@dataclass(frozen=True, slots=True)
class Geometry:
    """The extents of a problem with exactly three spatial axes; missing ones are leading axes of extent one.

    An axis with one data element has no stride to speak of: each output element has one tap or none.  Such an axis
    is given a stride past every index, which turns all of its outputs into phases of one position, so that the
    layer is the plain matrix product it is.  Empty batches and outputs are given extent one: their kernel is built, and
    never called.  Where an axis is `dynamic` its extents are those of a representative call.
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
    def of(problem: Problem, uncropped: bool = False) -> Geometry:
        """Return the geometry of `problem`.

        If `uncropped`, phases are those of the uncropped output, before the pads are cut off, along the axes where that
        makes fewer runs: then more phases read the same data.
        """

        def phases(kernel: int, stride: int, dilation: int, pad: int, output: int) -> AxisPhases:
            found = axis_phases(kernel, stride, dilation, pad, output)
            if uncropped:
                shifted = axis_phases(kernel, stride, dilation, pad, output, pad % stride)
                found = shifted if len(shifted.runs) < len(found.runs) else found
            return found

        def three(values: tuple[int, ...], fill: int) -> tuple[int, int, int]:
            padded = (fill,) * (3 - problem.rank) + values
            return padded[0], padded[1], padded[2]

        data, kernel = three(problem.data_spatial, 1), three(problem.kernel, 1)
        # Every phase of a dynamic axis is computed: some call has it.
        outputs = tuple(
            max(y, s if axis + 1 in problem.dynamic else 1)
            for axis, (y, s) in enumerate(zip(problem.output_spatial, problem.strides, strict=True))
        )
        output = three(outputs, 1)
        strides, dilations = three(problem.strides, 1), three(problem.dilations, 1)
        pads = three(problem.pads_begin, 0)
        dynamic = (False, problem.rank == 2 and 1 in problem.dynamic, problem.rank in problem.dynamic)
        first, second, third = (
            phases(k, s if x > 1 or is_dynamic else max(pad + y, (k - 1) * d + 1), d, pad, y)
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
        """Return the geometries of `problem`: by the output's phases, and, if they differ, the uncropped output's."""
        geometry, uncropped = Geometry.of(problem), Geometry.of(problem, uncropped=True)
        return [geometry, uncropped] if uncropped.uncropped else [geometry]

    @property
    def uncropped(self) -> int:
        """1 where phases are those of the uncropped output along some axis, else 0."""
        return int(any(axis.shift for axis in self.axes))

    @property
    def taps(self) -> int:
        """Taps of all phases together."""
        return math.prod(sum(run.count * run.taps for run in axis.runs) for axis in self.axes)

    @property
    def runs(self) -> tuple[tuple[Run, Run, Run], ...]:
        """Every combination of runs of the three axes: together, each phase that has a tap once."""
        first, second, third = self.axes
        return tuple((d, h, w) for d in first.runs for h in second.runs for w in third.runs)
