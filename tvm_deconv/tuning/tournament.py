"""A tournament of plans on a machine with a CUDA device and no compiler.

`entrants.prepare` compiles some plans of each problem on another machine. What is here needs their directory, NumPy
and apache-tvm-ffi, and writes ordinary tuning logs. All plans of a problem run once. Those about as fast as the fastest
then take turns with the default, as at the end of a search.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

from tvm_deconv.compiler.process import WorkerError
from tvm_deconv.errors import ProblemError
from tvm_deconv.targets import get
from tvm_deconv.tuning.builders import Built
from tvm_deconv.tuning.runners.base import BrokenDefaultError, Runner
from tvm_deconv.tuning.runners.cuda import CudaRunner, check_device
from tvm_deconv.tuning.runners.harness import Baseline, Measured, now

#: What a prepared directory lists.
LIST = "tournament.json"
_TURNS = 5  # of each finalist
_NEAR = 0.1  # finalists are not slower than the fastest by more than this part


#: The fields of a record.
Row: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class Entrant:
    """A compiled plan, with the fields of its record that are known before it is measured."""

    built: Built
    record: Row


@dataclass(frozen=True)
class Match:
    """The entrants of one problem, the default first, and the file of its records below a directory of logs."""

    key: str
    target: str
    log: str
    entrants: tuple[Entrant, ...]


def write(directory: Path, matches: Sequence[Match]) -> None:
    """Write the list of what was compiled into `directory`."""
    (directory / LIST).write_text(json.dumps([asdict(match) for match in matches], default=lambda path: path.name))


def read(directory: Path) -> list[Match]:
    """Read the list of a directory. Raises ProblemError."""

    def built(fields: dict[str, Any]) -> Built:
        return Built(**{**fields, **{name: directory / fields[name] for name in ("deconv", "pack")}})

    try:
        matches = json.loads((directory / LIST).read_text())
        return [
            Match(**{**match, "entrants": tuple(Entrant(built(e["built"]), e["record"]) for e in match["entrants"])})
            for match in matches
        ]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ProblemError("directory", directory, f"must hold a prepared tournament: {error}") from error


def hold(
    directory: Path,
    logs: Path,
    *,
    seconds: float = math.inf,
    timeout: float = 30.0,
    on_match: Callable[[Match, list[Row]], None] | None = None,
) -> int:
    """Measure what is prepared in `directory` on device 0, and add the records to `logs` as each problem is over.

    Problems that the logs have for this device and these kernels are left out, so an interrupted tournament continues.
    A candidate has `timeout` seconds. Return how many problems were not reached within `seconds`. Raises ProblemError,
    and DeviceError if there is no device that runs the targets.
    """
    end = time.monotonic() + seconds
    matches = read(directory)
    for target in dict.fromkeys(match.target for match in matches):
        check_device(get(target))
    with CudaRunner() as runner:
        left = [match for match in matches if not _is_done(match, logs / match.log, runner.host.name)]
        for number, match in enumerate(left):
            records = _records(match, runner, timeout, end)
            if not records:
                return len(left) - number
            _append(logs / match.log, records)
            if on_match:
                on_match(match, records)
    return 0


def _is_done(match: Match, log: Path, host: str) -> bool:
    """Return whether a log has records of `host` for these kernels."""
    if not log.is_file():
        return False
    known = match.entrants[0].record["sources"]
    for line in log.read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(ValueError):  # a line that was left half-written
            record = json.loads(line)
            if (record.get("problem"), record.get("host"), record.get("sources")) == (match.key, host, known):
                return True
    return False


def _records(match: Match, runner: Runner, timeout: float, end: float) -> list[Row]:
    """Measure the entrants of a problem; return their records, none if there is no time left."""
    seed = match.entrants[0].record["seed"]
    contest = _Contest(runner, Baseline(match.key, seed, match.entrants[0].built), timeout, end)
    try:
        first = [contest.measure(entrant) for entrant in match.entrants]
        timed = [result.seconds for result in first if isinstance(result, Measured)]
        near = (1 + _NEAR) * min(timed, default=0.0)
        finalists = {
            number
            for number, result in enumerate(first)
            if isinstance(result, Measured) and (not number or result.seconds <= near)
        }
        turns = [{number: contest.measure(match.entrants[number]) for number in finalists} for _ in range(_TURNS)]
    except TimeoutError:
        return []
    medians = {number: _median([turn[number] for turn in turns]) for number in finalists}
    default = medians.get(0)
    results = [medians.get(number, result) for number, result in enumerate(first)]
    return [
        _record(match, number, result, runner.host.name, default if number in medians else None)
        for number, result in enumerate(results)
    ]


class _Contest:
    """Measures the entrants of one problem; raises TimeoutError where it would begin after `end`."""

    def __init__(self, runner: Runner, baseline: Baseline, timeout: float, end: float) -> None:
        self._runner, self._baseline, self._timeout, self._end = runner, baseline, timeout, end
        self._best = math.inf
        self._broken = ""

    def measure(self, entrant: Entrant) -> Measured | str:
        """Return the times of an entrant, or why it has none."""
        if time.monotonic() >= self._end:
            raise TimeoutError
        if self._broken:
            return self._broken
        try:
            measured = self._runner.measure(self._baseline, entrant.built, self._best, self._timeout)
        except BrokenDefaultError as error:
            self._broken = str(error)
            return self._broken
        except WorkerError as error:
            return str(error)
        self._best = min(self._best, measured.ratio)
        return measured


def _median(turns: Sequence[Measured | str]) -> Measured | str:
    """Return the turn in the middle, or one that failed if there is any."""
    failures = [turn for turn in turns if isinstance(turn, str)]
    timed = sorted((turn for turn in turns if isinstance(turn, Measured)), key=lambda turn: turn.seconds)
    return failures[0] if failures else timed[len(turns) // 2]


def _record(match: Match, number: int, result: Measured | str, host: str, default: Measured | str | None) -> Row:
    """Return the record of an entrant as a log has it; with the ratio to the `default` if it took turns with that."""
    record = match.entrants[number].record | {"host": host, "when": now()}
    record |= {"seconds": None, "spread": 0.0, "runs": 0, "error": ""}
    if isinstance(result, str):
        return record | {"error": result}
    record |= {"seconds": result.seconds, "spread": round(result.spread, 4), "runs": result.runs}
    if isinstance(default, Measured):
        ratio = round(default.seconds / result.seconds, 4)
        record |= {"default_ratio": ratio, "default_code": match.entrants[0].built.code}
    return record


def _append(log: Path, records: Sequence[Row]) -> None:
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(record, sort_keys=True, separators=(",", ":")) + "\n" for record in records)
