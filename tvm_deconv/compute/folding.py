"""Folding: the phases of the last axis as output channels, where its kernel and stride are equal and channels are last.

All phases of a position along that axis then have one tap, which reads the same data, and their channels lie next to
each other in the output. So the problem is another one, with kernel and stride 1 along the axis and as many times the
channels: phase after phase, the channels of each. Few channels, which do not fill vectors, then fill them together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm.ir import Expr

from tvm_deconv.problem import Problem


def folded(problem: Problem) -> Problem | None:
    """Return `problem` with the phases of its last axis folded into the channels; None if it has none to fold."""
    stride, extent = problem.strides[-1], problem.data_spatial[-1]
    equal = problem.kernel[-1] == stride > 1 and problem.dilations[-1] == 1
    whole = problem.pads_begin[-1] == 0 and problem.output_spatial[-1] == stride * extent
    if not (equal and whole) or problem.groups > 1 or problem.data_format != "NXC":
        return None
    return problem.replace(
        out_channels=stride * problem.out_channels,
        kernel=(*problem.kernel[:-1], 1),
        strides=(*problem.strides[:-1], 1),
        output_spatial=(*problem.output_spatial[:-1], extent),
    )


class FoldedFilter:
    """A filter ``[G, Ci, Co, *K]`` of `channels` output channels as that of the folded problem."""

    def __init__(self, source: Any, channels: int) -> None:
        self._source = source
        self._channels = channels

    def __getitem__(self, index: Sequence[Expr]) -> Expr:
        """Return the element at group, input channel, folded channel, and a place of the kernel."""
        group, ci, channel, *place, _ = index
        element: Expr = self._source[(group, ci, channel % self._channels, *place, channel // self._channels)]
        return element
