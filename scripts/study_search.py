#!/usr/bin/env python3
"""Measure many plans of eight layers of all kinds, then see which of them the search finds.

    scripts/study_search.py build study      # may run beside other programs
    until scripts/study_search.py measure study; do :; done    # fails as long as there is more to measure
    scripts/study_search.py replay study

The first command compiles plans, of each layer the default first, half of the others the cheapest and half drawn from
the rest. The second measures on one thread, for nine minutes, what is compiled. When all plans of a layer are measured,
its fastest take turns. The directory is a tuning log, so both continue where they were stopped, unless a kernel was
edited. The third lets the search choose among the plans that were measured, and prints times relative to the fastest.
"""

from __future__ import annotations

import argparse
import pickle
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import tvm_deconv as td
from tvm_deconv.compiler.fingerprint import kernel_digest
from tvm_deconv.compiler.records import Conditions, Log, Record, Records, Schedule, read
from tvm_deconv.compiler.selection import default_schedule, space
from tvm_deconv.frontends import scan
from tvm_deconv.targets import Target, native, of_names
from tvm_deconv.tuning.builders import BuilderPool, Built
from tvm_deconv.tuning.calibration import Calibration
from tvm_deconv.tuning.evaluator import Evaluator, Proposals
from tvm_deconv.tuning.runners.local import LocalRunner
from tvm_deconv.tuning.search import Search
from tvm_deconv.tuning.session import decide

LAYERS = Path(__file__).parent.parent / "examples" / "layers.json"
#: What is studied: depthwise, many taps in a row, few outputs, Winograd, kernel = stride in planes and in volumes.
STUDIED = (
    ("centernet_dla-34/dla_up.ida_2.up", "NCX"),
    ("encodec_24k/dec.up1", "NCX"),
    ("fsrcnn_x3/last_part", "NCX"),
    ("hifi-gan_v1/ups.2", "NXC"),
    ("pix2pix_u-net_256/outermost", "NXC"),
    ("pp-ocrv3_db_head/conv2", "NCX"),
    ("sam_mask_decoder/output_upscaling.0", "NXC"),
    ("v-net/up_tr256.up_conv", "NCX"),
)
CHUNK = 8  # plans of a round
FINALISTS = 16
ROUND = 6  # plans that a search compiles at once on two CPUs
TRIALS = 64


def studied(target: Target) -> dict[str, td.Problem]:
    """Return the problems that `target` computes, by name."""
    problems = {layer.name: layer.problem for layer in scan(LAYERS)}
    found = {}
    for name, layout in STUDIED:
        problem = problems[name]
        assert problem is not None
        found[f"{name} {layout}"] = target.computes(problem.replace(data_format=layout))
    return found


def sample(problem: td.Problem, target: Target, plans: int) -> list[Schedule]:
    """Return the default and others of the search space, `plans` at most; any number of the first is a sample, too."""
    schedules = [candidate.schedule for candidate in space(problem, target)]
    cheap, others = schedules[: plans // 2], schedules[plans // 2 :]
    random.Random(problem.key).shuffle(others)
    mixed = [schedule for pair in zip(cheap, others, strict=False) for schedule in pair]
    return list(dict.fromkeys([default_schedule(problem, target), *mixed, *cheap]))[:plans]


class Prebuilt:
    """Compiled plans in a directory, for today's kernels: their libraries, and files of what `Built` says of them."""

    def __init__(self, target: Target, folder: Path) -> None:
        self._root = folder / "built" / f"{target.name}-{kernel_digest(target.backend)[:16]}"
        self._root.mkdir(parents=True, exist_ok=True)

    def read(self) -> dict[tuple[str, Schedule], Built | str]:
        """Return what is compiled, by problem and schedule; a text says why a plan does not compile."""
        found: dict[tuple[str, Schedule], Built | str] = {}
        for path in self._root.glob("*.pickle"):
            found.update(pickle.loads(path.read_bytes()))  # this script wrote it
        return found

    def add(self, target: Target, rounds: Iterator[tuple[str, Sequence[Schedule]]], jobs: int) -> Iterator[int]:
        """Compile the schedules of problems, round by round; yield their numbers."""
        scratch = Path(tempfile.mkdtemp(dir=self._root))  # names of libraries are unique in one run
        with BuilderPool(target, scratch, jobs) as builders:
            for number, (key, schedules) in enumerate(rounds):
                built = builders.build(key, schedules)
                temporary = scratch / f"{number}.new"
                temporary.write_bytes(pickle.dumps({(key, schedule): one for schedule, one in built.items()}))
                temporary.rename(self._root / f"{scratch.name}-{number}.pickle")
                yield len(schedules)


def build(target: Target, folder: Path, plans: int, jobs: int, seconds: float) -> bool:
    """Compile plans of all layers in turns until none is left, or `seconds` are over; return whether none is left."""
    prebuilt = Prebuilt(target, folder)
    done = prebuilt.read()
    left = {
        problem.artifact_key: [s for s in sample(problem, target, plans) if (problem.artifact_key, s) not in done]
        for problem in studied(target).values()
    }
    longest = max(map(len, left.values()))
    rounds = ((key, of[i : i + CHUNK]) for i in range(0, longest, CHUNK) for key, of in left.items() if of[i:])
    start, number, total = time.monotonic(), 0, sum(map(len, left.values()))
    for count in prebuilt.add(target, rounds, jobs):
        number += count
        if time.monotonic() - start > seconds:
            break
    print(f"{len(done) + number} plans are compiled, {total - number} left", flush=True)
    return number == total


class Measurer(Evaluator):
    """An evaluator that compiles nothing."""

    prebuilt: Mapping[tuple[str, Schedule], Built | str]

    def build(
        self,
        search: Search,
        schedules: Sequence[Schedule],
        following: Proposals | None = None,  # noqa: ARG002
    ) -> dict[Schedule, Built | str]:
        """Return what was compiled before."""
        return {schedule: self.prebuilt[search.key, schedule] for schedule in schedules}


@dataclass(frozen=True)
class Layer:
    """A layer whose plans `wanted` are measured."""

    search: Search
    wanted: Sequence[Schedule]

    @property
    def left(self) -> list[Schedule]:
        """What is not measured yet."""
        return [schedule for schedule in self.wanted if schedule not in self.search.tried]

    @property
    def ended(self) -> bool:
        """Whether the fastest have taken turns, or the default does not run."""
        default = self.search.tried.get(self.search.default)
        return self.search.broken or (not self.left and default is not None and default.default_ratio is not None)

    def step(self, evaluator: Evaluator) -> None:
        """Measure some plans; when none is left, let the fastest take turns."""
        left = self.left
        for record in evaluator.round(self.search, left[:CHUNK]):
            self.search.note(record)
        if not left:
            timed = [record for record in self.search.tried.values() if record.seconds]
            fastest = sorted(timed, key=lambda record: record.seconds or 0.0)[:FINALISTS]
            decide(self.search, evaluator, list(dict.fromkeys([self.search.default, *(x.schedule for x in fastest)])))


def measure(target: Target, folder: Path, seconds: float) -> bool:
    """Measure all that is compiled, of all layers in turns, for so many `seconds`; return whether nothing is left."""
    start, log = time.monotonic(), Log(folder)
    built = Prebuilt(target, folder).read()
    with LocalRunner(1) as runner, Measurer(target, runner, log, seed=0, jobs=1, timeout=30.0) as evaluator:
        evaluator.prebuilt = built
        records = read(target.name, folder)
        layers = [
            Layer(
                Search(problem, target, records, evaluator.conditions, None),
                [schedule for key, schedule in built if key == problem.artifact_key],
            )
            for problem in studied(target).values()
        ]
        layers = [layer for layer in layers if layer.wanted]
        before = sum(len(layer.left) for layer in layers)
        while (unfinished := [layer for layer in layers if not layer.ended]) and time.monotonic() - start < seconds:
            max(unfinished, key=lambda layer: len(layer.left)).step(evaluator)
        complaints = evaluator.disturbance.complaints
    left = sum(len(layer.left) for layer in layers)
    taken = time.monotonic() - start
    print(f"{before - left} plans in {taken:.0f} s, {left} left, {taken / max(before - left, 1):.2f} s each", end="")
    print(f"; the machine was busy: {'; '.join(complaints)}" if complaints else "", flush=True)
    return not unfinished


class Replayed(Search):
    """A search that has no other candidates than those measured."""

    def __init__(self, problem: td.Problem, target: Target, measured: Mapping[Schedule, Record]) -> None:
        super().__init__(problem, target, Records(target.name), Conditions("", 1, ""), None)
        self.measured = measured

    def _open_space(self) -> None:
        super()._open_space()
        self._space = [candidate for candidate in self._space if candidate.schedule in self.measured]
        self._numbers = {candidate.schedule: number for number, candidate in enumerate(self._space)}
        self._calibration = Calibration(self._space)

    def run(self) -> list[float]:
        """Return the seconds of the trials in their order."""
        while not self.ended and len(self.tried) < TRIALS:
            for schedule in self.propose(ROUND):
                self.note(self.measured[schedule])
        return [record.seconds or float("inf") for record in self.tried.values()]


def replay(target: Target, folder: Path) -> None:
    """Print the table of all layers with measurements."""
    records = read(target.name, folder)
    print("| layer | plans | best ms | default | 16 trials | 64 trials at most | trials |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    rows: list[list[float]] = []
    for name, problem in studied(target).items():
        measured = {one.schedule: one for one in records.comparable(problem.artifact_key)}
        if not measured:
            continue
        search = Replayed(problem, target, measured)
        trials = search.run()
        best = min(record.seconds or float("inf") for record in measured.values())
        default = measured[search.default].seconds or float("inf")
        rows.append([default / best, min(trials[:16]) / best, min(trials) / best])
        print(f"| {name} | {len(measured)} | {1e3 * best:.3f} | {_ratios(rows[-1])} | {len(trials)} |")
    if rows:
        means = [statistics.geometric_mean(column) for column in zip(*rows, strict=True)]
        print(f"| geometric mean | | | {_ratios(means)} | |")
        print(f"| worst | | | {_ratios([max(column) for column in zip(*rows, strict=True)])} | |")


def _ratios(values: Sequence[float]) -> str:
    return " | ".join(f"{value:.3f}" for value in values)


def main() -> None:
    """Parse the arguments and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("build", "measure", "replay"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--target", default=native().name, help="default: the widest of this machine")
    parser.add_argument("--plans", type=int, default=500, help="of each layer, at most")
    parser.add_argument("--jobs", type=int, default=2, help="processes that compile; default: %(default)s")
    parser.add_argument("--seconds", type=float, default=540.0, help="default: %(default)s")
    arguments = parser.parse_args()
    (target,) = of_names(arguments.target)
    folder, seconds = arguments.folder, arguments.seconds
    if arguments.command == "build":
        sys.exit(not build(target, folder, arguments.plans, arguments.jobs, seconds))
    if arguments.command == "measure":
        sys.exit(not measure(target, folder, seconds))
    replay(target, folder)


if __name__ == "__main__":
    main()
