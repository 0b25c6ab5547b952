"""The products of `wgmma.py` with channels second, of data that a launch before turns to channels last.

TMA loads boxes that begin at multiples of 16 bytes. Where positions are fastest, those of several taps along the last
axis do not. Turned data have lines of channels, padded to whole 16 bytes, for any extents. Each group has an array of
its own in the workspace, so that TMA knows where its channels end. Sums go to the output through shared memory.

Where boxes would have many rows beyond the last positions, or short lines, the rows of a tile are the next positions of
turned data that are padded: behind each axis are the zeros that taps read beyond either end of it, so a tap reads all
rows as far from their own places.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property

from tvm.ir import Expr

from tvm_deconv.compute.gather import Section, ravel
from tvm_deconv.compute.indexing import Index
from tvm_deconv.problem import Problem
from tvm_deconv.schedules.cuda.blocks import Box, Extents
from tvm_deconv.schedules.cuda.emit import Arguments
from tvm_deconv.schedules.cuda.predicates import multiplied_type, on_hopper
from tvm_deconv.schedules.cuda.turning import Turning
from tvm_deconv.schedules.cuda.wgmma import (
    COLUMNS,
    MOST_POSITIONS,
    ClusterPlan,
    Warpgroups,
    cluster_algorithm,
    few_products,
    plans_of,
)
from tvm_deconv.targets import CudaTarget

#: In multiply-adds of the device: a word of data that is turned, and its launch.
_WORD, _LAUNCH = 88, 1.1e8


class Turned(Warpgroups):
    """A part is a warpgroup's, whose rows of A are a box of turned data."""

    algorithm = "cuda_wgmma_turned"
    turned = True

    @cached_property
    def turning(self) -> Turning:
        """What a launch before does."""
        return Turning(self.problem, self.extents_of_data)

    @property
    def k_fastest(self) -> bool:
        """See Form."""
        return True

    @property
    def wide(self) -> int:
        """See Form; the workspace begins at a multiple of 16 bytes."""
        return 1

    @property
    def prepared(self) -> tuple[int, Callable[[Arguments], None] | None]:
        """See Form."""
        return self.turning.words, self.turning.emit

    @property
    def preparing(self) -> float:
        """See Form; words are read and written."""
        return _LAUNCH + _WORD * self.turning.words

    def begin(self, args: Arguments, aligned: bool) -> dict[str, Expr]:
        """See Form; maps are of the turned data."""
        return super().begin(replace(args, data=args.workspace), aligned)

    @property
    def channels(self) -> tuple[int, int]:
        """See Warpgroups; those of a group."""
        return self.problem.in_channels, self.turning.pitch

    def flat(self, section: Section) -> bool:  # noqa: ARG002
        """See Warpgroups; all sections have the same rows."""
        return all(map(super().flat, self.sections))

    def extents(self, section: Section) -> Extents:
        """See Warpgroups; neighbours are of all images."""
        image, d, h, w = section.extents
        return (1, 1, 1, section.m) if self.flat(section) else (image, d, h, w)

    def axes(self, section: Section) -> Sequence[tuple[int, int]]:
        """See Warpgroups; images of a group are behind those of the one before."""
        *others, (images, stride) = super().axes(section)
        return *others, (self.problem.groups * images, stride)

    def of_group(
        self, section: Section, group: Index, channel: Index, at: Sequence[Index]
    ) -> tuple[Index, list[Index]]:
        """See Warpgroups; each group has its own images."""
        image, *x = at
        return channel, [group * self.extents(section)[0] + image, *x]


class PaddedTurned(Turned):
    """The rows of a part are a box, or the next positions of data that are padded."""

    @cached_property
    def padded(self) -> Extents | None:
        """Images and their extents with zeros, if tiles of the next positions cost no more than boxes; else None."""
        boxes = Turned(self.problem, self.plan)
        found = self.problem.batch, *padded_extents(self.sections)
        if self.problem.groups * math.prod(found) >= MOST_POSITIONS:
            return None
        cost_of_boxes = sum(self.work(section, boxes.box(section)) for section in self.sections)
        cost_of_rows = sum(self.work(section, self._rows(found)) for section in self.sections)
        return found if cost_of_rows <= cost_of_boxes else None

    def _rows(self, padded: Extents) -> Box:
        """Return the box that the next positions are."""
        return Box((1, 1, 1, self.plan.tile_m), (1, 1, 1, math.prod(padded)), padded=padded)

    @property
    def extents_of_data(self) -> tuple[int, int, int]:
        """See Warpgroups; with zeros, if there are some."""
        if self.padded is None:
            return super().extents_of_data
        _, d, h, w = self.padded
        return d, h, w

    def box(self, section: Section) -> Box:
        """See Warpgroups."""
        return self._rows(self.padded) if self.padded else super().box(section)

    def extents(self, section: Section) -> Extents:
        """See Warpgroups."""
        return self._rows(self.padded).extents if self.padded else super().extents(section)

    def flat(self, section: Section) -> bool:
        """See Warpgroups."""
        return self.padded is not None or super().flat(section)

    def shifted(self, section: Section, shifts: Sequence[Index]) -> Sequence[Index]:
        """See Warpgroups; along the one axis."""
        return [0, 0, 0, ravel(shifts, self.padded[2:])] if self.padded else super().shifted(section, shifts)


def padded_extents(all_sections: Sequence[Section]) -> tuple[int, int, int]:
    """Return the extents of an image with zeros behind each axis, as many as taps read beyond either end of it.

    What is read before a line are then the zeros behind the one before.
    """

    def along(axis: int) -> int:
        extent, end = geometry.data[axis], geometry.axes[axis].end
        runs = [section.runs[axis] for section in all_sections]
        before = max((run.taps - 1) * run.x_step - run.x0 for run in runs)
        behind = end + max(run.x0 for run in runs) - (extent - 1)
        return max(extent + max(0, before, behind), end + 1)

    geometry = all_sections[0].geometry
    return along(0), along(1), along(2)


def supports(problem: Problem, target: CudaTarget) -> bool:
    """The target is a Hopper's own, channels are second, and taps have whole lines."""
    supported = multiplied_type(problem) in ("float16", "bfloat16", "tf32") and problem.data_format == "NCX"
    return supported and on_hopper(target) and problem.batch > 0 and bool(_choices(problem))


def _choices(problem: Problem) -> list[int]:
    """Return what `few_products` does of products, all of which suit."""
    return few_products(problem, COLUMNS[-1], lambda section: True)  # noqa: ARG005


def candidates(problem: Problem, alone: bool) -> list[tuple[float, ClusterPlan]]:  # noqa: ARG001
    """Return the plans worth measuring with their costs, the cheapest first: of blocks that share no loads."""
    return plans_of(PaddedTurned, problem, _choices(problem), [(1, 1)])


ALGORITHM = cluster_algorithm(PaddedTurned, supports, candidates)
