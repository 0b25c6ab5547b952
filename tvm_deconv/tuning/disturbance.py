"""How much other programs disturbed the measurements of a search."""

from __future__ import annotations

import os
import statistics

from tvm_deconv.bench.floors import cpu_times, stolen_share
from tvm_deconv.tuning.runners.harness import Measured

#: Above these shares of time measurements are disturbed.
_WAITED, _SPREAD, _STOLEN = 0.03, 0.05, 0.01


class Disturbance:
    """What happened since this object was made; `on_this_machine` says whether its CPUs measure."""

    def __init__(self, *, on_this_machine: bool) -> None:
        self._cpus = sorted(os.sched_getaffinity(0)) if on_this_machine else []
        self._before = cpu_times(self._cpus)
        self._waited: list[float] = []
        self._spreads: list[float] = []

    def note(self, measured: Measured) -> None:
        """Add a measurement."""
        self._spreads.append(measured.spread)
        if measured.waited is not None:
            self._waited.append(measured.waited)

    @property
    def complaints(self) -> list[str]:
        """What disturbed the measurements, in words; empty if nothing did."""
        waited = statistics.median(self._waited) if self._waited else 0.0
        spread = statistics.median(self._spreads) if self._spreads else 0.0
        stolen = stolen_share(self._before, cpu_times(self._cpus))
        said = [
            (waited > _WAITED, f"half of the measurements waited for a CPU {100 * waited:.0f} % of their time or more"),
            (spread > _SPREAD, f"half of the measurements have a spread of {100 * spread:.0f} % or more"),
            (stolen > _STOLEN, f"the hypervisor took {100 * stolen:.1f} % of the CPUs"),
        ]
        return [text for holds, text in said if holds]
