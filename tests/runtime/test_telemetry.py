"""Counters as OpenTelemetry's metrics."""

import subprocess
import sys

import pytest
from support import artifacts as made
from support.strategies import operands

import tvm_deconv as td
from tvm_deconv.runtime import telemetry
from tvm_deconv.runtime.process import PROCESS

metrics = pytest.importorskip("opentelemetry.sdk.metrics")
export = pytest.importorskip("opentelemetry.sdk.metrics.export")


def test_observe(artifacts, monkeypatch):
    monkeypatch.setattr(PROCESS, "artifacts", {})
    reader = export.InMemoryMetricReader()
    telemetry.observe(metrics.MeterProvider([reader]).get_meter("test"))
    assert reader.get_metrics_data() is None or not points(reader)
    data, filter, _ = operands(made.PLAIN)
    layer = td.load(artifacts).bind(made.PLAIN, filter)
    for calls in (1, 2):
        layer(data)
        found = points(reader)
        assert set(found) == {"tvm_deconv.calls", "tvm_deconv.time"}
        (loaded,) = td.loaded()
        facts = {"artifact": loaded.name, "problem": made.PLAIN.artifact_key, "target": made.TARGET}
        assert found["tvm_deconv.calls"] == ("{call}", [(calls, facts)])
        assert found["tvm_deconv.time"] == ("s", [(loaded.seconds, facts)])


def points(reader):
    data = reader.get_metrics_data()
    resources = data.resource_metrics if data else []
    return {
        metric.name: (metric.unit, [(point.value, dict(point.attributes)) for point in metric.data.data_points])
        for resource in resources
        for scope in resource.scope_metrics
        for metric in scope.metrics
        if metric.data.data_points
    }


ABSENT = """
import sys
sys.modules["opentelemetry"] = None  # an import fails
from tvm_deconv.runtime import telemetry
try:
    telemetry.observe()
except ModuleNotFoundError:
    print("told")
"""


def test_only_a_call_needs_the_package():
    done = subprocess.run([sys.executable, "-c", ABSENT], capture_output=True, text=True, check=True)
    assert done.stdout == "told\n"
