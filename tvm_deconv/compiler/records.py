"""Tuning logs: measurements, one line of text per trial.

A log is a directory: ``<target>/<problem>.jsonl``, where <problem> is the beginning of the digest of an `artifact_key`,
as in the names of artifacts. Each line is one `Record`, JSON with sorted keys. While a search runs, lines are appended;
`Log.tidy` sorts them and drops those that a newer measurement replaces. Two logs merge as the union of their lines.

A line that does not read loses only itself, and is reported in `Records.warnings` by file and line.
"""

from __future__ import annotations

import contextlib
import importlib.resources
import io
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec

from tvm_deconv.artifact import files
from tvm_deconv.artifact.locks import locked
from tvm_deconv.artifact.manifest import stem
from tvm_deconv.artifact.regular import MOST_TEXT, content_of, opener
from tvm_deconv.errors import BuildError, ProblemError
from tvm_deconv.problem import Epilogue, Problem
from tvm_deconv.targets import Host
from tvm_deconv.targets.ancestry import generations, name_of

SUFFIX = ".jsonl"
#: A schedule that was not this many times as fast as the default is no better: measured times differ by that much.
BETTER = 1.01
_MOST_WARNINGS = 20  # of a file
_Count = Annotated[int, msgspec.Meta(ge=0)]


class Conditions(NamedTuple):
    """The conditions under which times compare: the CPU, the number of threads, and the code of the kernels."""

    host: str
    threads: int
    sources: str


class Schedule(NamedTuple):
    """An algorithm and its knobs, sorted by name: with them a problem becomes a kernel."""

    algorithm: str
    knobs: tuple[tuple[str, int], ...]

    @staticmethod
    def of(algorithm: str, knobs: Mapping[str, int]) -> Schedule:
        """Return the schedule with these knobs in any order."""
        return Schedule(algorithm, tuple(sorted(knobs.items())))


class Cpu(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The CPU that measured: what it calls itself, its numbers, and archspec's name of its microarchitecture."""

    name: str
    vendor: str
    family: _Count
    model: _Count
    stepping: _Count
    microarchitecture: str

    @staticmethod
    def of(host: Host) -> Cpu | str:
        """Return the CPU of a host; the name alone of what has no vendor, such as a CUDA device."""
        if not host.vendor:
            return host.name
        numbers = {"family": host.family, "model": host.model, "stepping": host.stepping}
        return Cpu(name=host.name, vendor=host.vendor, microarchitecture=name_of(host), **numbers)

    def __str__(self) -> str:
        numbers = f"{self.vendor} family {self.family} model {self.model} stepping {self.stepping}"
        return f"{self.name} ({self.microarchitecture}, {numbers})"


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """One trial.

    `seconds` is the median of `runs` calls and `spread` half the distance of their quartiles, as a part of the median.
    If the trial has no time, `seconds` is None and `error` says why. `seed` is of the arrays and of the search, `when`
    is UTC in ISO form, `sources` the digest of the kernels' code and `commit` its commit or version. `host` is a name
    alone in records of CUDA devices, and in old ones of CPUs.

    `default_ratio` is the time of the default schedule by that of this one, where both took turns: above 1 it is
    faster. None means that they did not. `code` is the digest of the code that was measured, `default_code` that of
    the default it took turns with; both are empty in old records.
    """

    problem: str
    target: str
    algorithm: str
    knobs: dict[str, int]
    seconds: float | None
    spread: float
    runs: int
    error: str
    threads: int
    host: Cpu | str
    sources: str
    commit: str
    seed: int
    versions: dict[str, str]
    when: str
    default_ratio: float | None = None
    code: str = ""
    default_code: str = ""

    @property
    def schedule(self) -> Schedule:
        """The algorithm and knobs that were tried."""
        return Schedule.of(self.algorithm, self.knobs)

    @property
    def conditions(self) -> Conditions:
        """The conditions of the trial."""
        return Conditions(str(self.host), self.threads, self.sources)

    @property
    def microarchitecture(self) -> str:
        """The microarchitecture that it was measured on; "" if that is unknown."""
        return self.host.microarchitecture if isinstance(self.host, Cpu) else ""

    @property
    def beaten(self) -> bool:
        """Whether the default was as fast, measured in turns with it."""
        return self.default_ratio is not None and self.default_ratio < BETTER

    @property
    def merit(self) -> tuple[object, ...]:
        """The order of records under the same conditions: those that took turns first, then by time."""
        return self.default_ratio is None, self.seconds or 0.0, self.schedule

    @property
    def age(self) -> tuple[object, ...]:
        """The order of trials of one schedule, the newest last; within a millisecond the one that took turns is."""
        return self.when, self.default_ratio is not None, self.line

    @property
    def line(self) -> str:
        """The record as a log has it, without the line's end."""
        return _ENCODER.encode(self).decode()

    @staticmethod
    def parse(line: bytes | str) -> Record:
        """Return the record of a line. Raises ValueError."""
        record = _DECODER.decode(line)
        if _artifact_key(record.problem) != record.problem:
            raise ProblemError("problem", record.problem, "must be an artifact key")
        if record.seconds is not None and not record.seconds > 0:
            raise ProblemError("seconds", record.seconds, "must be positive")
        if record.default_ratio is not None and not record.default_ratio > 0:
            raise ProblemError("default_ratio", record.default_ratio, "must be positive")
        return record


_ENCODER = msgspec.json.Encoder(order="sorted")
_DECODER = msgspec.json.Decoder(Record)


def _order(record: Record) -> tuple[object, ...]:
    return record.problem, record.target, record.conditions, record.schedule


def _name(problem: str, target: str) -> str:
    return stem(problem, target).removesuffix(f"-{target}") + SUFFIX


@lru_cache(4096)
def _artifact_key(key: str) -> str:
    return Problem.from_key(key).artifact_key


@lru_cache(4096)
def convolution(key: str) -> str:
    """Return the key of the problem with this `artifact_key` without its epilogue, under which records serve."""
    return Problem.from_key(key).replace(epilogue=Epilogue()).artifact_key


def newest(records: Iterable[Record]) -> list[Record]:
    """Return `records` sorted; of several trials of one schedule under the same conditions, the newest stays."""
    kept: dict[tuple[object, ...], Record] = {}
    for record in records:
        other = kept.setdefault(_order(record), record)
        if record.age > other.age:
            kept[_order(record)] = record
    return sorted(kept.values(), key=_order)


@dataclass
class Records:
    """The records of some logs for one target, by problem, and warnings about lines that do not read.

    `microarchitecture` is that of the machine that schedules are for; None takes all records as its own.
    """

    target: str
    by_problem: dict[str, list[Record]] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    microarchitecture: str | None = None

    def __iter__(self) -> Iterator[Record]:
        return (record for records in self.by_problem.values() for record in records)

    def warnings_for(self, problem: str) -> list[str]:
        """Return the warnings on the files of the problem with this key."""
        return [warning for warning in self.warnings if f"{_name(problem, self.target)}:" in warning]

    def add(self, record: Record) -> None:
        """Add one record."""
        self.by_problem.setdefault(record.problem, []).append(record)

    def of_convolution(self, problem: Problem) -> list[str]:
        """Return the problems with records that differ from `problem` in the epilogue at most, the most alike first."""
        own = convolution(problem.artifact_key)
        return sorted(
            (key for key in self.by_problem if convolution(key) == own),
            key=lambda key: (*_unlike(problem.epilogue, Problem.from_key(key).epilogue), key),
        )

    def apart(self, record: Record) -> float:
        """Return how far the machine that a record was measured on is from the one that schedules are for."""
        if self.microarchitecture is None:
            return 0.0
        return generations(self.microarchitecture, record.microarchitecture)

    def groups(self, problem: str) -> list[list[Record]]:
        """Return the timed records of the problem with this key, a list for each microarchitecture, the nearest first.

        Of each, the newest conditions alone, the best first. Times of another CPU, another number of threads or other
        kernels do not compare with these. A search first tries the schedules that were best under other conditions, so
        nothing is lost.
        """
        timed = [record for record in self.by_problem.get(problem, ()) if record.seconds is not None]
        timed.sort(key=lambda record: (record.when, record.conditions), reverse=True)
        conditions: dict[str, Conditions] = {}
        for record in timed:
            conditions.setdefault(record.microarchitecture, record.conditions)
        groups = [
            sorted((one for one in newest(timed) if one.conditions == chosen), key=lambda one: one.merit)
            for chosen in conditions.values()
        ]
        return sorted(groups, key=lambda group: self.apart(group[0]))

    def comparable(self, problem: str) -> list[Record]:
        """Return the first of the `groups` of the problem with this key."""
        return next(iter(self.groups(problem)), [])


def _unlike(epilogue: Epilogue, other: Epilogue) -> tuple[bool, ...]:
    return epilogue != other, epilogue.activation != other.activation, epilogue.bias != other.bias


def best(problem: Problem | str, records: Records) -> Record | None:
    """Return the fastest record of exactly this problem, None if there is none."""
    comparable = records.comparable(problem if isinstance(problem, str) else problem.artifact_key)
    return comparable[0] if comparable else None


def shipped() -> Path:
    """Return the log that is installed with the package."""
    return Path(str(importlib.resources.files("tvm_deconv.tuning_logs")))


def read(target: str, *logs: Path | str, microarchitecture: str | None = None) -> Records:
    """Read the records for a target in the directories `logs`; a missing directory is empty. See `Records`."""
    records = Records(target, microarchitecture=microarchitecture)
    for log in logs:
        folder = Path(log) / target
        if not folder.is_dir():
            continue
        for file in sorted(folder.glob(f"*{SUFFIX}")):
            try:
                for record in _lines(file, target, records.warnings):
                    records.add(record)
            except OSError as error:
                records.warnings.append(f"{file}: skipped, must be a file that can be read ({error.strerror})")
    return records


def _lines(file: Path, target: str, warnings: list[str]) -> Iterator[Record]:
    """Yield the records of a file; `warnings` gets the lines that do not read. Raises OSError."""
    skipped = 0
    for number, line in enumerate(io.BytesIO(content_of(file, MOST_TEXT)), 1):
        if not line.strip():
            continue
        try:
            record = Record.parse(line)
            if record.target != target:
                raise ProblemError("target", record.target, f"must be {target}, which the folder says")
        except ValueError as error:
            skipped += 1
            if skipped <= _MOST_WARNINGS:
                warnings.append(f"{file}:{number}: skipped, does not read: {error}")
        else:
            yield record
    if skipped > _MOST_WARNINGS:
        warnings.append(f"{file}: {skipped - _MOST_WARNINGS} more lines skipped, do not read")


class Log:
    """A directory of records that can be written."""

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root)

    def file(self, problem: str, target: str) -> Path:
        """Return the file of the problem with this `artifact_key`."""
        return self.root / target / _name(problem, target)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the log's lock. Raises BuildError if the log cannot be written."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            with locked(self.root / ".lock"):
                yield
        except OSError as error:
            rule = f"must be a directory with room that can be written: {error}"
            raise BuildError("logs", self.root, rule) from error

    def append(self, record: Record) -> None:
        """Write one record at once; after a line that was left half-written it begins a new one."""
        path = self.file(record.problem, record.target)
        with self._locked():
            path.parent.mkdir(exist_ok=True)
            with open(path, "a+b", opener=opener) as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(size - 1, 0))
                torn = size > 0 and file.read(1) != b"\n"
                file.write(b"\n" * torn + record.line.encode() + b"\n")

    def merge(self, records: Iterable[Record]) -> None:
        """Add `records` to the log, and `tidy` their files."""
        files: dict[Path, list[Record]] = {}
        for record in records:
            files.setdefault(self.file(record.problem, record.target), []).append(record)
        with self._locked():
            for path, added in files.items():
                old = list(_lines(path, added[0].target, [])) if os.path.lexists(path) else []
                _write(path, [*old, *added])

    def tidy(self, problem: str, target: str) -> None:
        """Sort the records of a problem, without half-written lines and records that newer ones replace."""
        path = self.file(problem, target)
        with self._locked():
            if os.path.lexists(path):
                _write(path, _lines(path, target, []))

    def prune(self, target: str, keep: int) -> tuple[int, int]:
        """Keep, of each problem, microarchitecture and algorithm, the `keep` best records of the newest conditions.

        Those of unknown microarchitectures go where there are others. Return the numbers of records before and after.
        """
        with self._locked():
            records = read(target, self.root)
            before = after = 0
            for problem, present in records.by_problem.items():
                groups = records.groups(problem)
                known = [group for group in groups if group[0].microarchitecture]
                left = [record for group in known or groups for record in _best_of_each(group, keep)]
                before, after = before + len(present), after + len(left)
                _write(self.file(problem, target), left)
        return before, after

    def targets(self) -> list[str]:
        """Return the names of the targets that there are records for."""
        return sorted({path.parent.name for path in self.root.glob("*/*.jsonl")})


def _best_of_each(group: Iterable[Record], keep: int) -> Iterator[Record]:
    """Yield the first `keep` records of each algorithm."""
    seen: dict[str, int] = {}
    for record in group:
        seen[record.algorithm] = seen.get(record.algorithm, 0) + 1
        if seen[record.algorithm] <= keep:
            yield record


def _foreign(line: str) -> bool:
    """Return True if a line is whole but does not read: it may be a record of a newer version."""
    try:
        msgspec.json.decode(line)
    except (ValueError, RecursionError):  # the latter is of brackets within brackets: no version wrote them
        return False
    try:
        Record.parse(line)
    except ValueError:
        return True
    return False


def _write(path: Path, records: Iterable[Record]) -> None:
    """Replace the records in a file; lines of other versions stay. A file without a line is removed."""
    content = content_of(path, MOST_TEXT) if os.path.lexists(path) else b""
    old = content.decode(errors="replace")
    lines = [record.line for record in newest(records)]
    lines += sorted({line for line in old.split("\n") if _foreign(line)})
    text = "".join(line + "\n" for line in lines)
    if not text:
        path.unlink(missing_ok=True)
    if text == old or not text:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write(path, text.encode())
