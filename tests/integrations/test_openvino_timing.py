"""Times of the nodes of OpenVINO's models."""

import datetime
import types

import pytest

pytest.importorskip("openvino")

from tvm_deconv.openvino.timing import Timed


class Request:
    """A request of one node, whose first call takes long; it tells the mean of all calls, as OpenVINO's do."""

    def __init__(self):
        self.calls = []

    def create_infer_request(self):
        return self

    def infer(self, feed):
        assert feed == ["data"]
        self.calls.append(3e-3 if self.calls else 9.0)

    @property
    def profiling_info(self):
        mean = datetime.timedelta(seconds=sum(self.calls) / len(self.calls))
        return [types.SimpleNamespace(node_name="node", real_time=mean)]


def test_nodes_are_timed_without_the_calls_before():
    timed = Timed(Request(), ["data"])
    for _ in range(3):
        assert timed.nodes() == {"node": pytest.approx(3e-3, abs=1e-4)}
