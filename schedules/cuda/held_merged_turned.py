"""The products of `held_merged.py` with channels second, of data that a launch before turns, as in `turned.py`."""

from __future__ import annotations

from tvm_deconv.schedules.cuda.held import algorithm_of
from tvm_deconv.schedules.cuda.held_merged import HeldMerged
from tvm_deconv.schedules.cuda.held_turned import TurnedHeld
from tvm_deconv.schedules.cuda.products import CAVEAT


class TurnedHeldMerged(HeldMerged, TurnedHeld):
    """A part is a warpgroup's, of merged phases, whose rows of A lie in a box of turned data."""

    algorithm = "cuda_held_merged_turned"


ALGORITHM = algorithm_of(TurnedHeldMerged, CAVEAT)
