"""What was measured: results of contenders, rows of layers, the report, and how quiet the machine was."""

from __future__ import annotations

import datetime
import math
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tvm_deconv.bench.floors import Floors
from tvm_deconv.bench.layers import Layer
from tvm_deconv.bench.peers import DEFAULT, OURS, OWN, SINGLE
from tvm_deconv.problem.testing import Deviation
from tvm_deconv.targets import Host

#: Above these a machine is noisy: shares of time, and times a process was put off its CPU in a second.
_STOLEN, _WAITED, _SPREAD, _PREEMPTED = 0.01, 0.03, 0.05, 20.0


@dataclass(frozen=True)
class Result:
    """One contender on one layer: seconds per call, or the `failure` why there are none.

    Median and quartiles are those of turns, `percentiles` are the 5th and the 95th of single calls. Of the time of its
    turns it had no CPU for the share `waited`, which is known for one thread alone, and it was put off its CPU
    `preempted` times a second.
    """

    median: float = math.nan
    quartiles: tuple[float, float] = (math.nan, math.nan)
    turns: int = 0
    deviation: Deviation | None = None
    note: str = ""
    failure: str = ""
    waited: float = math.nan
    preempted: float = math.nan
    percentiles: tuple[float, float] = (math.nan, math.nan)

    @property
    def correct(self) -> bool:
        """Whether the contender ran and its output is right."""
        return self.deviation is not None and self.deviation.allowed

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles, as a part of the median."""
        return (self.quartiles[1] - self.quartiles[0]) / (2 * self.median)


@dataclass(frozen=True)
class Row:
    """All contenders on one layer; the keys of `results` are their names."""

    layer: Layer
    results: Mapping[str, Result]

    @property
    def ours(self) -> Result:
        """The result of the artifact that was chosen."""
        return self.results[OURS]

    @property
    def default(self) -> Result | None:
        """The result of the default, which may be what was chosen; None if it was not built."""
        return self.ours if self.layer.default == self.layer.task else self.results.get(DEFAULT)

    @property
    def best_peer(self) -> str | None:
        """The fastest of the peers whose output is right, None if there is none."""
        times = {name: result.median for name, result in self.results.items() if name not in OWN and result.correct}
        return min(times, key=times.__getitem__, default=None)

    @property
    def ratio(self) -> float | None:
        """The best peer's time divided by that of the artifact that was chosen: above 1 we are faster."""
        return self._ratio(self.ours)

    @property
    def default_ratio(self) -> float | None:
        """The best peer's time divided by that of the default."""
        return self._ratio(self.default)

    @property
    def single_ratio(self) -> float | None:
        """The time of the same layer in float32 by our direct kernels, divided by that of what was chosen."""
        single = self.results.get(SINGLE)
        return (
            None if single is None or not (single.correct and self.ours.correct) else single.median / self.ours.median
        )

    def _ratio(self, ours: Result | None) -> float | None:
        best = self.best_peer
        return None if best is None or ours is None or not ours.correct else self.results[best].median / ours.median


@dataclass(frozen=True)
class Summary:
    """The geometric mean of the ratios of a report, and the layer with the least."""

    mean: float
    worst: Row
    least: float


@dataclass(frozen=True)
class Report:
    """The rows and the conditions they were measured under.

    `versions` maps each contender to its version, `microarchitecture` is archspec's name of the CPU, and `stolen` the
    share of time that the hypervisor took from the CPUs used.
    """

    host: Host
    microarchitecture: str
    threads: int
    cpus: tuple[int, ...]
    rounds: int
    floors: Floors
    versions: Mapping[str, str]
    rows: Sequence[Row]
    stolen: float = 0.0
    python: str = field(default_factory=platform.python_version)
    date: str = field(default_factory=lambda: datetime.date.today().isoformat())

    @property
    def chosen(self) -> Summary | None:
        """The summary of what was chosen, None if nothing was compared."""
        return self._summary(lambda row: row.ratio)

    @property
    def default(self) -> Summary | None:
        """The summary of the defaults."""
        return self._summary(lambda row: row.default_ratio)

    def _summary(self, ratio: Callable[[Row], float | None]) -> Summary | None:
        ratios = [(found, row) for row in self.rows if (found := ratio(row)) is not None]
        if not ratios:
            return None
        least, worst = min(ratios, key=lambda pair: pair[0])
        return Summary(statistics.geometric_mean(found for found, _ in ratios), worst, least)

    @property
    def peers(self) -> list[str]:
        """The names of the peers."""
        return [name for name in self.versions if name not in OWN]

    @property
    def has_defaults(self) -> bool:
        """Whether any layer has a default."""
        return any(row.default is not None for row in self.rows)

    @property
    def has_singles(self) -> bool:
        """Whether any layer was timed in float32 too."""
        return any(row.single_ratio is not None for row in self.rows)

    @property
    def has_percentiles(self) -> bool:
        """Whether the percentiles of calls are known, which older reports do not have."""
        return any(math.isfinite(row.ours.percentiles[0]) for row in self.rows)

    @property
    def machine(self) -> str:
        """The CPU in words."""
        host = self.host
        numbers = f"family {host.family}, model {host.model}, stepping {host.stepping}"
        return f"{host.name} ({self.microarchitecture}; {host.vendor}, {numbers})"

    @property
    def noise(self) -> dict[str, float]:
        """How disturbed the machine was: the share `stolen`, and medians over all results of the others."""
        results = [result for row in self.rows for result in row.results.values() if not result.failure]
        found = {"stolen": self.stolen}
        for name in ("waited", "preempted", "spread"):
            values = [value for result in results if math.isfinite(value := getattr(result, name))]
            if values:
                found[name] = statistics.median(values)
        return found

    @property
    def complaints(self) -> list[str]:
        """What makes this machine a noisy one, in words; empty if it was quiet."""
        noise = self.noise
        said = {
            "stolen": (_STOLEN, f"the hypervisor took {100 * noise['stolen']:.1f} % of the CPUs"),
            "waited": (_WAITED, f"contenders waited for a CPU {100 * noise.get('waited', 0):.0f} % of their turns"),
            "preempted": (_PREEMPTED, f"contenders lost their CPU {noise.get('preempted', 0):.0f} times a second"),
            "spread": (_SPREAD, f"half of the results have a spread above {100 * noise.get('spread', 0):.0f} %"),
        }
        return [text for name, (most, text) in said.items() if noise.get(name, 0.0) > most]
