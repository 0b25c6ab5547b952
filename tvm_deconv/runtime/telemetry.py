"""The counters of `tvm_deconv.loaded` as metrics of OpenTelemetry. Needs the package opentelemetry-api.

Metrics are read when they are collected; calls cost no more than without them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from tvm_deconv.runtime.process import Loaded, loaded

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, Meter, Observation


def observe(meter: Meter | None = None) -> None:
    """Create the metrics ``tvm_deconv.calls`` and ``tvm_deconv.time`` (seconds) of `meter`, by default a global one.

    Their attributes are ``artifact``, ``problem`` and ``target``, as in `Loaded`. Call it once. Raises
    ModuleNotFoundError if OpenTelemetry is not installed.
    """
    from opentelemetry import metrics

    meter = meter or metrics.get_meter("tvm_deconv")
    calls, seconds = _observations(lambda artifact: artifact.calls), _observations(lambda artifact: artifact.seconds)
    meter.create_observable_counter("tvm_deconv.calls", [calls], "{call}", "completed calls of an artifact")
    meter.create_observable_counter("tvm_deconv.time", [seconds], "s", "the time they took")


def _observations(value: Callable[[Loaded], float]) -> Callable[[CallbackOptions], Iterable[Observation]]:
    """Return a callback that observes a `value` of every loaded artifact."""
    from opentelemetry.metrics import Observation

    def observe(_: CallbackOptions) -> Iterable[Observation]:
        for artifact in loaded():
            facts = {"artifact": artifact.name, "problem": artifact.problem, "target": artifact.target}
            yield Observation(value(artifact), facts)

    return observe
