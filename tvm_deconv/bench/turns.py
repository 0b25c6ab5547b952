"""Two things timed in turns, as integrations compare a framework's layer with ours."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator


def rounds(least: int, seconds: float, most: float = math.inf) -> Iterator[int]:
    """Yield 0, 1, ...: at least `least` numbers, then until `seconds` are over, and at most `most`."""
    begin = time.perf_counter()
    for number in itertools.count():
        if number >= least and (number >= most or time.perf_counter() - begin >= seconds):
            return
        yield number


def gain(original: Callable[[], float], ours: Callable[[], float], least: int, seconds: float) -> float:
    """Return the median over `rounds` of what `original` returns by what `ours` does: the seconds of a run."""
    return statistics.median(original() / ours() for _ in rounds(least, seconds))
