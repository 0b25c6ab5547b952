"""The products of `held.py` with phases of different taps as columns of one, as in `merged.py`.

A box is loaded and read once for all phases. Of few channels the taps of all phases together fill tiles of 64 terms,
where those of one phase do not: with kernel 3, stride 2 and 16 channels one tile has the four taps.
"""

from __future__ import annotations

from tvm_deconv.schedules.cuda.held import Held, algorithm_of
from tvm_deconv.schedules.cuda.products import CAVEAT, merged, merging


class HeldMerged(Held):
    """A part is a warpgroup's, of merged phases."""

    algorithm = "cuda_held_merged"
    choices = staticmethod(merging)
    phases = staticmethod(merged)


ALGORITHM = algorithm_of(HeldMerged, CAVEAT)
