#!/usr/bin/env python3
"""Compare the nearest record's knobs with the plain default, on layers whose own records are left out.

    scripts/bench_nearest.py --json nearest.json

Each layer of examples/layers.json, in both layouts, is built three times: by the default, by its own record, and by the
nearest of the other problems' records in the installed tuning logs, if a build would use it. These take turns on one
thread and the same data. The ratio is the median time of the default divided by that of the nearest.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import tvm_deconv as td
from tvm_deconv.bench.peers import turn
from tvm_deconv.compiler import build, selection
from tvm_deconv.compiler.records import Records, Schedule, best, read, shipped
from tvm_deconv.compiler.selection import Choice
from tvm_deconv.frontends import scan
from tvm_deconv.problem.testing import TOLERANCES, operands
from tvm_deconv.targets import CpuTarget, detect_host, native, of_names

LAYERS = Path(__file__).parent.parent / "examples" / "layers.json"
ROUNDS = 11
TURN_SECONDS = 0.03


def without(problem: td.Problem, records: Records) -> Records:
    """Return the records of all other problems."""
    others = {key: of_problem for key, of_problem in records.by_problem.items() if key != problem.artifact_key}
    return Records(records.target, others)


def compare(problem: td.Problem, target: CpuTarget, records: Records) -> dict[str, Any]:
    """Return the row of one problem: median seconds by name, and the problem whose record was the nearest."""
    near = selection.trusted(problem, target, without(problem, records))
    own = best(problem, records)
    schedules = {"default": selection.default_schedule(problem, target)}
    if near is not None:
        schedules["nearest"] = near[1]
    if own is not None and selection.replay_error(own) is None:
        schedules["own"] = own.schedule
    seconds = measure(problem, target, schedules)
    return {
        "problem": problem.key,
        "nearest_problem": near and near[0].problem,
        "knobs": {name: [schedule.algorithm, dict(schedule.knobs)] for name, schedule in schedules.items()},
        "seconds": {name: seconds[schedule] for name, schedule in schedules.items()},
    }


def measure(problem: td.Problem, target: CpuTarget, schedules: dict[str, Schedule]) -> dict[Schedule, float]:
    """Build each schedule, compare the outputs with the default's, and return the median seconds of turns."""
    given = operands(problem, 20)
    out = np.full(problem.output_shape, np.nan, np.float32)
    with tempfile.TemporaryDirectory() as directory:
        runs: dict[Schedule, Callable[[], object]] = {}
        for name, schedule in schedules.items():
            if schedule not in runs:
                folder = Path(directory) / name
                build.export(problem, target, folder, choices=[Choice(schedule, "tuned", name)])
                runs[schedule] = partial(td.load(folder).bind(problem, given.filter, given.bias), given.data, out=out)
        runs[schedules["default"]]()
        expected = out.copy()
        for schedule, run in runs.items():
            out.fill(np.nan)
            run()
            off = max(float(np.abs(ours - wanted).max()) for ours, wanted in zip(out, expected, strict=True))
            if not off <= 2 * TOLERANCES[problem.output_dtype][0] * float(np.abs(expected).max()):
                raise SystemExit(f"{problem.key}: {schedule} differs from the default by {off}")
        turns: dict[Schedule, list[float]] = {schedule: [] for schedule in runs}
        for _ in range(ROUNDS):
            for schedule, run in runs.items():
                turns[schedule].append(turn(run, TURN_SECONDS).median)
    return {schedule: statistics.median(times) for schedule, times in turns.items()}


def main() -> None:
    """Parse the arguments, run, and print a table; the JSON file grows with each problem."""
    arguments = parsed()
    td.set_num_threads(1)
    (target,) = of_names(arguments.target)
    records = read(target.name, shipped())
    rows: list[dict[str, Any]] = []
    text = "{:50} {:4} {:>10} {:>10} {:>10} {:>8}"
    print(text.format("layer", "", "default ms", "nearest ms", "own ms", "ratio"), flush=True)
    for layer in scan(LAYERS):
        if layer.problem is None or not any(part in layer.name for part in arguments.layer or [""]):
            continue
        for layout in ("NCX", "NXC"):
            row = {"layer": layer.name, **compare(layer.problem.replace(data_format=layout), target, records)}
            seconds = row["seconds"]
            row["ratio"] = seconds["default"] / seconds["nearest"] if "nearest" in seconds else None
            rows.append(row)
            times = [f"{1e3 * seconds[name]:.3f}" if name in seconds else "" for name in ("default", "nearest", "own")]
            ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f}"
            print(text.format(layer.name[:50], layout, *times, ratio), flush=True)
            if arguments.json:
                report = {"host": detect_host().name, "target": target.name, "threads": 1, "rows": rows}
                arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print_means(rows)


def parsed() -> argparse.Namespace:
    """Return the arguments of the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=native().name, help="default: the widest of this machine")
    parser.add_argument("--layer", action="append", help="only names with this in them; may be given several times")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def print_means(rows: list[dict[str, Any]]) -> None:
    """Print the means of the ratios, and the worst."""
    compared = [row for row in rows if row["ratio"] is not None]
    print(f"{len(compared)} of {len(rows)} have a near record")
    if compared:
        mean = statistics.geometric_mean(row["ratio"] for row in compared)
        worst = min(compared, key=lambda row: row["ratio"])
        print(f"geometric mean of default / nearest: {mean:.2f}; worst {worst['ratio']:.2f}, {worst['layer']}")
        owned = [row for row in compared if "own" in row["seconds"]]
        if owned:
            mean = statistics.geometric_mean(row["seconds"]["nearest"] / row["seconds"]["own"] for row in owned)
            print(f"geometric mean of nearest / own record: {mean:.2f}")


if __name__ == "__main__":
    main()
