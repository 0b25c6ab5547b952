"""The products of `wgmma.py` with channels second, of data that a launch before turns to channels last.

TMA loads boxes that begin at multiples of 16 bytes. Where positions are fastest, those of several taps along the last
axis do not. Turned data have lines of channels, padded to whole 16 bytes, for any extents. Each group has an array of
its own in the workspace, so that TMA knows where its channels end. Sums go to the output through shared memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property

from tvm.ir import Expr

from tvm_deconv.compute.gather import Index, Section
from tvm_deconv.problem import Problem
from tvm_deconv.schedules.cuda.blocks import Extents
from tvm_deconv.schedules.cuda.emit import Arguments
from tvm_deconv.schedules.cuda.predicates import multiplied_type, on_hopper
from tvm_deconv.schedules.cuda.turning import Turning
from tvm_deconv.schedules.cuda.wgmma import COLUMNS, ClusterPlan, Warpgroups, cluster_algorithm, few_products, plans_of
from tvm_deconv.targets import CudaTarget

#: In multiply-adds of the device: a word of data that is turned, and its launch.
_WORD, _LAUNCH = 88, 1.1e8


class Turned(Warpgroups):
    """A part is a warpgroup's, whose rows of A are turned data."""

    algorithm = "cuda_wgmma_turned"
    turned = True

    @cached_property
    def turning(self) -> Turning:
        """What a launch before does."""
        return Turning(self.problem)

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


def supports(problem: Problem, target: CudaTarget) -> bool:
    """The target is a Hopper's own, channels are second, and taps have whole lines."""
    supported = multiplied_type(problem) in ("float16", "bfloat16", "tf32") and problem.data_format == "NCX"
    return supported and on_hopper(target) and problem.batch > 0 and bool(_choices(problem))


def _choices(problem: Problem) -> list[int]:
    """Return what `few_products` does of products, all of which suit."""
    return few_products(problem, COLUMNS[-1], lambda section: True)  # noqa: ARG005


def candidates(problem: Problem, alone: bool) -> list[tuple[float, ClusterPlan]]:  # noqa: ARG001
    """Return the plans worth measuring with their costs, the cheapest first: of blocks that share no loads."""
    return plans_of(Turned, problem, _choices(problem), [(1, 1)])


ALGORITHM = cluster_algorithm(Turned, supports, candidates)
