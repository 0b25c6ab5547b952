"""The counters of `tvm_deconv.loaded` as metrics of OpenTelemetry. Needs the package opentelemetry-api.

Metrics are read when they are collected; calls cost what they cost without them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from tvm_deconv.runtime.process import Loaded, loaded

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, Meter, Observation


def observe(meter: Meter | None = None) -> None:
    """Make the metrics ``tvm_deconv.calls`` and ``tvm_deconv.time`` (seconds) of `meter`, by default a global one.

    Their attributes are ``artifact``, ``problem`` and ``target``, as in `Loaded`. To be called once. Raises
    ModuleNotFoundError where OpenTelemetry is not installed.
    """
    from opentelemetry import metrics

    def each(value: Callable[[Loaded], float]) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def observations(_: Any) -> Iterable[Observation]:
            for one in loaded():
                facts = {"artifact": one.name, "problem": one.problem, "target": one.target}
                yield metrics.Observation(value(one), facts)

        return observations

    meter = meter or metrics.get_meter("tvm_deconv")
    meter.create_observable_counter(
        "tvm_deconv.calls", [each(lambda one: one.calls)], "{call}", "completed calls of an artifact"
    )
    meter.create_observable_counter("tvm_deconv.time", [each(lambda one: one.seconds)], "s", "what they took")
