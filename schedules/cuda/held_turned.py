"""The products of `held.py` with channels second, of data that a launch before turns, as in `turned.py`."""

from __future__ import annotations

from tvm_deconv.schedules.cuda.held import Held, algorithm_of
from tvm_deconv.schedules.cuda.turned import Turned


class TurnedHeld(Held, Turned):
    """A part is a warpgroup's, whose rows of A lie in a box of turned data."""

    algorithm = "cuda_held_turned"


ALGORITHM = algorithm_of(TurnedHeld)
