"""A report as a table for people, and as JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tvm_deconv.bench.floors import Floors
from tvm_deconv.bench.layers import Layer
from tvm_deconv.bench.peers import DEFAULT, SINGLE, Task
from tvm_deconv.bench.results import Report, Result, Row, Summary
from tvm_deconv.problem import Problem
from tvm_deconv.problem.testing import Deviation
from tvm_deconv.problem.words import words
from tvm_deconv.targets import Host

FORMAT = 2


def rates(row: Row, result: Result) -> tuple[float, float]:
    """Return GFLOP/s, a multiply-add counted as two, and GB/s, every array counted once."""
    problem = row.layer.task.problem
    return 2e-9 * problem.macs / result.median, 1e-9 * problem.min_bytes / result.median


def shares(report: Report, row: Row, result: Result) -> dict[str, float]:
    """Return the time of each floor as a part of the measured time."""
    floors = report.floors.seconds(row.layer.task.problem)
    return {name: seconds / result.median for name, seconds in floors.items()}


class Column(NamedTuple):
    """A column of the table: a `text` or a number; one that is not `vital` may be left out where there is no room."""

    title: str
    vital: bool = False
    text: bool = False


_RATES = ("% FMA", "% copy", "GFLOP/s", "GB/s")


def columns(report: Report, keys: bool = False) -> list[Column]:
    """Return the columns of the table: peers and ratios first, then our own figures; keys of problems if asked for."""
    peers = [Column("best peer", True, True), Column("its ms", True)] if report.peers else []
    ratios = [Column("default ratio")] * report.has_defaults + [Column("ratio", True)] if report.peers else []
    single = [Column("of float32", True)] * report.has_singles
    noise = [Column("±%", vital=not report.peers), *([Column("p5 to p95, ms")] if report.has_percentiles else [])]
    own = [*noise, *(Column(title) for title in _RATES), Column("algorithm", text=True)]
    return [
        Column("layer", True, True),
        Column("shape", True, True),
        *([Column("default ms")] if report.has_defaults else []),
        Column("ms", True),
        *peers,
        *ratios,
        *single,
        *own,
        *(Column(f"{peer} ms") for peer in report.peers),
        Column("target", text=True),
        *([Column("problem", True, True)] if keys else []),
    ]


def cells(report: Report, row: Row, keys: bool = False) -> list[str]:
    """Return the texts of a row under the columns of the table."""
    ours, problem = row.ours, row.layer.task.problem
    made = [row.layer.name, words(problem)]
    if report.has_defaults:
        made.append(time_of(row.default))
    made.append(time_of(ours))
    if report.peers:
        best = row.best_peer
        made += [best or "-", time_of(row.results[best] if best else None)]
        made += [two_digits(row.default_ratio)] * report.has_defaults + [two_digits(row.ratio)]
    made += [two_digits(row.single_ratio)] * report.has_singles
    if ours.failure:
        made += [""] * (6 + report.has_percentiles)
    else:
        parts, speeds = shares(report, row, ours), rates(row, ours)
        low, high = ours.percentiles
        made.append(f"{100 * ours.spread:.0f}")
        if report.has_percentiles:
            made.append("-" if math.isnan(low) else f"{milliseconds(low)} to {milliseconds(high)}")
        made += [f"{100 * parts[name]:.0f}" if name in parts else "-" for name in ("fma", "copy")]
        made += [*(f"{speed:.1f}" for speed in speeds), ours.note]
    made += [time_of(row.results[peer]) for peer in report.peers]
    return [*made, row.layer.target, *([problem.key] if keys else [])]


def milliseconds(seconds: float) -> str:
    """Return a time in whole milliseconds or three digits, never with an exponent."""
    return f"{1e3 * seconds:.0f}" if seconds >= 0.1 else f"{1e3 * seconds:.3g}"


def time_of(result: Result | None) -> str:
    """Return the time of a contender in ms, "-" if it has none; that of a wrong output is marked."""
    if result is None or result.failure:
        return "-"
    return milliseconds(result.median) + ("" if result.correct else " (wrong)")


def two_digits(ratio: float | None) -> str:
    """Return a ratio with two digits behind the point, "-" if there is none."""
    return "-" if ratio is None else f"{ratio:.2f}"


def summary(report: Report) -> str:
    """Return the conditions, the floors, the means, how quiet the machine was, and what failed, in some lines."""
    floors = [f"{2e-9 * rate:.0f} GFLOP/s {dtype}" for dtype, rate in report.floors.fma.items()]
    floors.append(f"{1e-9 * report.floors.copy:.1f} GB/s copied")
    versions = [f"{name} {version}" for name, version in report.versions.items() if name not in (DEFAULT, SINGLE)]
    lines = [
        f"{report.machine}, threads: {report.threads}, {', '.join(versions)}",
        f"Measured here: {', '.join(floors)}.",
    ]
    if report.floors.why:
        lines.append(report.floors.why)
    lines += [_ratios(name, found) for name, found in (("default", report.default), ("chosen", report.chosen)) if found]
    lines.append(_quietness(report))
    return "\n".join([*lines, *_failures(report)])


def _ratios(name: str, found: Summary) -> str:
    return (
        f"Time of the best peer by ours, {name}: geometric mean {found.mean:.2f}, worst {found.least:.2f} "
        f"({found.worst.layer.name}, against {found.worst.best_peer})."
    )


def _quietness(report: Report) -> str:
    if report.complaints:
        return f"The machine was noisy: {'; '.join(report.complaints)}. Read ratios rather than times."
    noise = {name: 100 * value for name, value in report.noise.items()}
    return f"The machine was quiet: median spread {noise.get('spread', 0):.1f} %, stolen {noise['stolen']:.1f} %."


def _failures(report: Report) -> list[str]:
    """Return a line for each contender and reason, with the layers."""
    layers: dict[tuple[str, str], list[str]] = {}
    for row in report.rows:
        for name, result in row.results.items():
            if not result.correct:
                layers.setdefault((name, result.failure or _difference(result)), []).append(row.layer.name)
    return [
        f"{name}: {said}: {', '.join(of) if len(of) < max(len(report.rows), 2) else 'all layers'}"
        for (name, said), of in layers.items()
    ]


def _difference(result: Result) -> str:
    largest = math.nan if result.deviation is None else result.deviation.largest
    return f"its output differs from the reference by {largest:.1e} of the largest element"


def as_json(report: Report) -> dict[str, Any]:
    """Return the report in types that JSON has; times are in seconds, sizes in bytes, rates per second."""
    host = report.host
    return {
        "format": FORMAT,
        "date": report.date,
        "microarchitecture": report.microarchitecture,
        "host": {name: getattr(host, name) for name in _HOST},
        "threads": report.threads,
        "cpus": list(report.cpus),
        "rounds": report.rounds,
        "python": report.python,
        "versions": dict(report.versions),
        "floors": {
            "fma_per_second": dict(report.floors.fma),
            "copy_bytes_per_second": report.floors.copy,
            "missing": report.floors.why,
        },
        "noise": report.noise,
        "noisy": report.complaints,
        "default": _summary_as_json(report.default),
        "chosen": _summary_as_json(report.chosen),
        "layers": [_row_as_json(report, row) for row in report.rows],
    }


_HOST = ("name", "vendor", "family", "model", "stepping", "cores", "threads")


def _summary_as_json(found: Summary | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {"geometric_mean": found.mean, "worst": found.worst.layer.name, "least": found.least}


def _row_as_json(report: Report, row: Row) -> dict[str, Any]:
    layer, problem = row.layer, row.layer.task.problem
    return {
        "name": layer.name,
        "problem": problem.key,
        "target": layer.target,
        "artifact": layer.task.artifact,
        "default_is_chosen": None if row.default is None else layer.default == layer.task,
        "macs": problem.macs,
        "min_bytes": problem.min_bytes,
        "results": {name: _result_as_json(report, row, result) for name, result in row.results.items()},
        "best_peer": row.best_peer,
        "default_ratio": row.default_ratio,
        "ratio": row.ratio,
        "single_ratio": row.single_ratio,
    }


def _result_as_json(report: Report, row: Row, result: Result) -> dict[str, Any]:
    if result.failure or result.deviation is None:
        return {"failure": result.failure}
    gflops, gbytes = rates(row, result)
    return {
        "seconds": result.median,
        "quartiles": list(result.quartiles),
        "percentiles": [_finite(value) for value in result.percentiles],
        "turns": result.turns,
        "gflop_per_second": gflops,
        "gb_per_second": gbytes,
        "of_floors": shares(report, row, result),
        "deviation": _finite(result.deviation.largest),
        "correct": result.correct,
        "note": result.note,
        "waited": _finite(result.waited),
        "preempted_per_second": _finite(result.preempted),
    }


def _finite(value: float) -> float | None:
    """Return a number as JSON has it, which has no NaN."""
    return value if math.isfinite(value) else None


def from_json(content: Mapping[str, Any]) -> Report:
    """Return the report that `as_json` returned; artifacts are names alone. Raises ValueError."""
    found = content.get("format") if isinstance(content, Mapping) else None
    if found != FORMAT:
        raise ValueError(f"format={found}: must be {FORMAT}")
    floors = content["floors"]
    return Report(
        host=Host(frozenset(), **content["host"]),
        microarchitecture=content["microarchitecture"],
        threads=content["threads"],
        cpus=tuple(content["cpus"]),
        rounds=content["rounds"],
        floors=Floors(floors["fma_per_second"], floors["copy_bytes_per_second"], floors["missing"]),
        versions=content["versions"],
        rows=[_row_from_json(row) for row in content["layers"]],
        stolen=content["noise"]["stolen"],
        python=content["python"],
        date=content["date"],
    )


def _row_from_json(row: Mapping[str, Any]) -> Row:
    task = Task(Problem.from_key(row["problem"]), 0, Path(), row["artifact"])
    layer = Layer(row["name"], task, row["target"], task if row["default_is_chosen"] else None)
    return Row(layer, {name: _result_from_json(result) for name, result in row["results"].items()})


def _result_from_json(result: Mapping[str, Any]) -> Result:
    if "failure" in result:
        return Result(failure=result["failure"])

    def number(name: str) -> float:
        return math.nan if result[name] is None else float(result[name])

    low, high = (math.nan if value is None else value for value in result.get("percentiles", (None, None)))
    return Result(
        result["seconds"],
        tuple(result["quartiles"]),
        result["turns"],
        Deviation(number("deviation"), result["correct"]),
        result["note"],
        waited=number("waited"),
        preempted=number("preempted_per_second"),
        percentiles=(low, high),
    )
