"""Searches that are killed: what `kills.py tune` does."""

import random
from pathlib import Path
from unittest.mock import patch

from support.kills import LONGEST, TARGET, killed
from support.records import SMALL

from tvm_deconv.compiler.records import Log, read
from tvm_deconv.targets import detect_host
from tvm_deconv.tuning import evaluator, search, session
from tvm_deconv.tuning.builders import Built
from tvm_deconv.tuning.runners.base import Runner
from tvm_deconv.tuning.runners.harness import Measured


class Instant(Runner):
    """A machine on which candidates take times of chance, and which compiles them (`build`), at once."""

    host = detect_host()

    def __init__(self, *_) -> None:
        super().__init__(threads=1)

    def _take(self) -> None:
        raise AssertionError("there is no process to take")

    _give = _take

    def build(self, _: str, schedules: list, __: object) -> dict:
        return dict.fromkeys(schedules, Built(Path("/none"), Path("/none"), 0, "float32"))

    def pause(self) -> None:
        """Nothing runs beside a measurement."""

    def multiply_add_rate(self, *_) -> float:
        return 1e12

    copy = multiply_add_rate

    def measure(self, *_) -> Measured:
        return Measured(reference=1e-3, ratio=random.uniform(0.5, 2.0), spread=0.0, runs=9)


@patch.object(session, "LocalRunner", Instant)
@patch.object(evaluator, "BuilderPool", Instant)
@patch.object(search, "_NOTHING", 0.0)  # so that no search ends before its trials
def tune(root: Path, rng: random.Random, wanted: set[int]) -> None:
    """No trial is lost, and a search that goes on begins after the last, in a log without half-written lines."""
    if len(wanted) > 50:  # of the 82 that there are on AVX2
        Log(root).file(SMALL.artifact_key, TARGET).unlink()
        wanted.clear()

    def search_for(trials: int) -> None:
        assert session.tune([SMALL], TARGET, trials, root, jobs=1)[0].trials == trials

    def trials() -> int:
        found = read(TARGET, root)
        assert len(found.warnings) <= 1
        return len({each.schedule for each in found.by_problem.get(SMALL.artifact_key, ())})

    first = len(wanted)
    told = len(killed(lambda number: search_for(first + number + 1), rng, 5 * LONGEST))
    found = trials()
    assert first + told <= found <= first + told + 1
    search_for(found + 1)
    assert trials() == found + 1
    assert not read(TARGET, root).warnings
    wanted |= set(range(found + 1))
