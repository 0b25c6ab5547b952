"""Compiled models that are timed, as a whole and by nodes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

#: Calls in which nodes are timed.
_CALLS = 4


class Timed:
    """A compiled model on data to feed, which nobody else calls."""

    def __init__(self, compiled: Any, feed: Sequence[Any]) -> None:
        self.request, self._feed, self._calls = compiled.create_infer_request(), feed, 0

    def seconds(self) -> float:
        """Return the seconds of a call behind one that is not counted: data of another model fill the caches before."""
        self._call()
        start = time.perf_counter()
        self._call()
        return time.perf_counter() - start

    def nodes(self) -> dict[str, float]:
        """Return the mean seconds of each node in some calls behind one that is not counted, by its name.

        The model is compiled with PERF_COUNT.
        """
        self._call()
        before = self._spent()
        for _ in range(_CALLS):
            self._call()
        return {node: (spent - before.get(node, 0.0)) / _CALLS for node, spent in self._spent().items()}

    def _call(self) -> None:
        self.request.infer(self._feed)
        self._calls += 1

    def _spent(self) -> dict[str, float]:
        """Return the seconds of each node in all calls so far, of which OpenVINO tells the mean."""
        found = self.request.profiling_info
        return {node.node_name: node.real_time.total_seconds() * self._calls for node in found}
