"""A report as a table for people, as JSON, and as one HTML page that needs nothing else."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from tvm_deconv.bench.floors import Floors
from tvm_deconv.bench.layers import Layer
from tvm_deconv.bench.peers import DEFAULT, OURS, Task
from tvm_deconv.bench.results import Report, Result, Row, Summary
from tvm_deconv.problem import Problem
from tvm_deconv.problem.testing import Deviation
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


def table(report: Report) -> Table:
    """Return the table that the command prints above the summary: peers and ratios first, then our own figures."""
    made = Table()
    for name in _columns(report):
        left = name in ("layer", "best peer", "algorithm", "problem", "target")
        made.add_column(name, justify="left" if left else "right", overflow="fold")
    for row in report.rows:
        made.add_row(*cells(report, row))
    return made


def _columns(report: Report) -> list[str]:
    default = ["default ms"] if report.has_defaults else []
    of_default = ["default ratio"] if report.has_defaults else []
    peers = ["best peer", "its ms", *of_default, "ratio"] if report.peers else []
    own = ["±%", "% FMA", "% copy", "GFLOP/s", "GB/s", "algorithm"]
    return ["layer", *default, "ms", *peers, *own, *(f"{peer} ms" for peer in report.peers), "target", "problem"]


def cells(report: Report, row: Row) -> list[str]:
    """Return the texts of a row under the columns of the table."""
    ours, problem = row.ours, row.layer.task.problem
    made = [row.layer.name]
    if report.has_defaults:
        made.append("-" if row.default is None else _milliseconds(row.default))
    made.append(_milliseconds(ours))
    if report.peers:
        best = row.best_peer
        made += [best or "-", _milliseconds(row.results[best]) if best else "-"]
        made += [_ratio(row.default_ratio)] * report.has_defaults + [_ratio(row.ratio)]
    if ours.failure:
        made += [""] * 6
    else:
        parts, speeds = shares(report, row, ours), rates(row, ours)
        made.append(f"{100 * ours.spread:.0f}")
        made += [f"{100 * parts[name]:.0f}" if name in parts else "-" for name in ("fma", "copy")]
        made += [*(f"{speed:.1f}" for speed in speeds), ours.note]
    made += [_milliseconds(row.results[peer]) for peer in report.peers]
    return [*made, row.layer.target, problem.key]


def _milliseconds(result: Result) -> str:
    if result.failure:
        return "-"
    return f"{1e3 * result.median:.3g}" + ("" if result.correct else " (differs)")


def _ratio(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}"


def summary(report: Report) -> str:
    """Return the conditions, the floors, the means, how quiet the machine was, and what failed, in some lines."""
    floors = [f"{2e-9 * rate:.0f} GFLOP/s {dtype}" for dtype, rate in report.floors.fma.items()]
    floors.append(f"{1e-9 * report.floors.copy:.1f} GB/s copied")
    versions = [f"{name} {version}" for name, version in report.versions.items() if name != DEFAULT]
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
    }


def _result_as_json(report: Report, row: Row, result: Result) -> dict[str, Any]:
    if result.failure or result.deviation is None:
        return {"failure": result.failure}
    gflops, gbytes = rates(row, result)
    return {
        "seconds": result.median,
        "quartiles": list(result.quartiles),
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

    return Result(
        result["seconds"],
        tuple(result["quartiles"]),
        result["turns"],
        Deviation(number("deviation"), result["correct"]),
        result["note"],
        waited=number("waited"),
        preempted=number("preempted_per_second"),
    )


_STYLE = """
:root { --back: #fff; --ink: #1c2330; --faint: #667085; --line: #d9dee7;
  --c0: #1f5fd0; --c1: #d9730d; --c2: #2e8b57; --c3: #9b3fb5; --c4: #b08900;
  --c5: #c0392b; --c6: #0f8b8d; --c7: #6d4c41; --c8: #8795a8; --c9: #e05a9c; }
@media (prefers-color-scheme: dark) { :root { --back: #14181f; --ink: #e6e9ef; --faint: #98a2b3; --line: #343c4a;
  --c0: #6ea3ff; --c1: #ff9f4a; --c2: #5fc98c; --c3: #d58bea; --c4: #e0bd4a;
  --c5: #ff7b6b; --c6: #4fd1d3; --c7: #c49a8a; --c8: #aab6c5; --c9: #ff9cc8; } }
body { background: var(--back); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto;
  max-width: 1100px; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
p.summary { white-space: pre-line; color: var(--faint); }
svg { width: 100%; height: auto; } svg text { fill: var(--ink); font-size: 12px; }
svg .axis { stroke: var(--line); stroke-width: 1; } svg .faint { fill: var(--faint); font-size: 11px; }
svg .roof { stroke: var(--faint); stroke-width: 1.5; fill: none; }
div.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: 13px; }
th, td { border-bottom: 1px solid var(--line); padding: .25rem .6rem; text-align: right; white-space: nowrap; }
th:first-child, td:first-child, td.text { text-align: left; }
""" + "".join(f".c{number} {{ fill: var(--c{number}); }}\n" for number in range(10))


def as_html(report: Report) -> str:
    """Return the report as a page: roofline, bars, table; no scripts, nothing from elsewhere."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Transposed convolutions</title><style>{_STYLE}</style></head><body>"
        f'<h1>Transposed convolutions, {report.date}</h1><p class="summary">{html.escape(summary(report))}</p>'
        f"<h2>Roofline</h2>{_roofline(report)}"
        "<h2>Part of what the machine can do</h2>"
        "<p>The time of the higher floor by the time taken. What stays in a cache can beat the copy floor.</p>"
        f"{_bars(report)}<h2>Times</h2>{_html_table(report)}</body></html>\n"
    )


def _colours(report: Report) -> Mapping[str, str]:
    return {name: f"c{number}" for number, name in enumerate(report.versions)}


def _measured(report: Report) -> Iterator[tuple[Row, str, Result]]:
    for row in report.rows:
        for name, result in row.results.items():
            if not result.failure:
                yield row, name, result


def _legend(report: Report, x: int) -> Iterator[str]:
    for name, colour in _colours(report).items():
        yield f'<rect class="{colour}" x="{x}" y="9" width="10" height="10" rx="2"/>'
        yield f'<text x="{x + 15}" y="18">{html.escape(name)}</text>'
        x += 30 + 8 * len(name)


class _LogAxis:
    """A logarithmic axis over `values`, from the pixel `start` to the pixel `end`."""

    def __init__(self, values: list[float], start: float, end: float) -> None:
        self.low = math.floor(math.log10(min(values)))
        self.high = max(math.ceil(math.log10(max(values))), self.low + 1)
        self._start, self._scale = start, (end - start) / (self.high - self.low)

    def __call__(self, value: float) -> float:
        return self._start + (math.log10(value) - self.low) * self._scale

    def ticks(self) -> list[float]:
        """Return the powers of ten."""
        return [10.0**power for power in range(self.low, self.high + 1)]


def _tooltip(row: Row, name: str, result: Result) -> str:
    gflops, gbytes = rates(row, result)
    text = f"{row.layer.name}, {name}: {1e3 * result.median:.3g} ms, {gflops:.1f} GFLOP/s, {gbytes:.1f} GB/s"
    return f"<title>{html.escape(text)}</title>"


def _roofline(report: Report) -> str:
    width, height, left, bottom = 1000, 440, 60, 390
    points = [
        (2 * row.layer.task.problem.macs / row.layer.task.problem.min_bytes, rates(row, result)[0], row, name, result)
        for row, name, result in _measured(report)
        if row.layer.task.problem.macs
    ]
    if not points:
        return "<p>Nothing was measured.</p>"
    peaks = {dtype: 2e-9 * rate for dtype, rate in report.floors.fma.items()}
    copied = 1e-9 * report.floors.copy
    ridges = [peak / copied for peak in peaks.values()]
    x = _LogAxis([*(point[0] for point in points), *ridges], left, width - 30)
    y = _LogAxis([*(point[1] for point in points), *peaks.values()], bottom, 40)
    drawn = [f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="Roofline">', *_legend(report, left)]
    for value in x.ticks():
        drawn.append(f'<path class="axis" d="M{x(value):.1f} 40V{bottom}"/>')
        drawn.append(f'<text class="faint" x="{x(value):.1f}" y="{bottom + 18}" text-anchor="middle">{value:g}</text>')
    for value in y.ticks():
        drawn.append(f'<path class="axis" d="M{left} {y(value):.1f}H{width - 30}"/>')
        drawn.append(f'<text class="faint" x="{left - 8}" y="{y(value) + 4:.1f}" text-anchor="end">{value:g}</text>')
    drawn.append(f'<text class="faint" x="{left}" y="{height - 12}">FLOP per byte that must cross memory</text>')
    drawn.append(f'<text class="faint" x="{left + 8}" y="52">GFLOP/s</text>')
    drawn.append(_roof(x, y, copied, list(peaks.values())))
    for dtype, peak in peaks.items():
        end = f'x="{width - 34}" y="{y(peak) - 6:.1f}" text-anchor="end"'
        drawn.append(f'<text class="faint" {end}>{dtype} multiply-adds, {peak:.0f}</text>')
    for intensity, gflops, row, name, result in points:
        colour = _colours(report)[name]
        drawn.append(
            f'<circle class="{colour}" cx="{x(intensity):.1f}" cy="{y(gflops):.1f}" r="{5 if name == OURS else 4}" '
            f'fill-opacity=".8">{_tooltip(row, name, result)}</circle>'
        )
    return "".join([*drawn, "</svg>"])


def _roof(x: _LogAxis, y: _LogAxis, copied: float, peaks: list[float]) -> str:
    """Draw the slope of the copies, from the edge of the plot on, and the ceilings that begin on it."""
    first, last = 10.0**x.low, 10.0**x.high
    floor = 10.0**y.low
    start = max(first, floor / copied)
    top = min(last, max(peaks, default=last * copied) / copied)
    path = [f"M{x(start):.1f} {y(start * copied):.1f}L{x(top):.1f} {y(top * copied):.1f}"]
    path += [f"M{x(peak / copied):.1f} {y(peak):.1f}H{x(last):.1f}" for peak in peaks]
    return f'<path class="roof" d="{"".join(path)}"/>'


def _bars(report: Report) -> str:
    label, width, bar, gap = 260, 1000, 12, 14
    parts = {
        (index, name): max(shares(report, row, result).values())
        for index, row in enumerate(report.rows)
        for name, result in row.results.items()
        if not result.failure
    }
    longest = max(1.0, *parts.values()) if parts else 1.0
    scale = (width - label - 120) / longest
    body: list[str] = []
    y = 36
    for index, row in enumerate(report.rows):
        name = row.layer.name if len(row.layer.name) <= 36 else f"{row.layer.name[:35]}…"
        title = f"<title>{html.escape(f'{row.layer.name}: {row.layer.task.problem.key}')}</title>"
        body.append(f'<text x="{label - 10}" y="{y + 10}" text-anchor="end">{html.escape(name)}{title}</text>')
        for contender, result in row.results.items():
            if result.failure:
                said = html.escape(f"{contender}: {result.failure}"[:80])
                body.append(f'<text class="faint" x="{label + 4}" y="{y + 10}">{said}</text>')
            else:
                part = parts[index, contender]
                body.append(
                    f'<rect class="{_colours(report)[contender]}" x="{label}" y="{y}" width="{part * scale:.1f}" '
                    f'height="{bar - 2}" rx="2">{_tooltip(row, contender, result)}</rect>'
                    f'<text class="faint" x="{label + part * scale + 5:.1f}" y="{y + 9}">'
                    f"{100 * part:.0f} %, ms: {_milliseconds(result)}</text>"
                )
            y += bar
        y += gap
    whole = f'<path class="axis" d="M{label + scale:.1f} 28V{y}"/>'
    head = f'<svg viewBox="0 0 {width} {y + 10}" role="img" aria-label="Part of what the machine can do">'
    return "".join([head, *_legend(report, label), whole, *body, "</svg>"])


def _html_table(report: Report) -> str:
    made = table(report)
    titles = "".join(f"<th>{html.escape(str(column.header))}</th>" for column in made.columns)
    rows = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells(report, row)) + "</tr>"
        for row in report.rows
    )
    return f'<div class="wide"><table><tr>{titles}</tr>{rows}</table></div>'
