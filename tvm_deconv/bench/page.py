"""One page for one or several reports: ratios, roofline and table of each. It holds Plotly and needs nothing else."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from tvm_deconv.bench.report import cells, columns, milliseconds, rates, summary
from tvm_deconv.bench.results import Report, Result, Row, Summary

_INK, _FAINT, _GRID = "#7a8494", "#98a2b3", "rgba(128,128,128,.25)"
_CHOSEN, _DEFAULT, _PEER = "#2a6fdb", "#d9730d", "#98a2b3"
_FARTHEST = 5.0  # ratios beyond it, or below its inverse, are arrows at the edge, for the sake of all others
_TICKS = (0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 4.0, 5.0)
_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 1400px; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin-top: 3rem; } h3 { font-size: 1rem; margin-top: 2rem; }
p.summary { white-space: pre-line; opacity: .75; overflow-wrap: anywhere; }
div.wide { overflow-x: scroll; border: 1px solid rgba(128,128,128,.25); }
div.chart { min-width: 44rem; }
table { border-collapse: collapse; font-size: 13px; }
th, td { border-bottom: 1px solid rgba(128,128,128,.25); padding: .25rem .45rem; text-align: right;
  white-space: nowrap; }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0; background: Canvas; max-width: 45vw;
  overflow: hidden; text-overflow: ellipsis; }
"""


def as_html(*reports: Report) -> str:
    """Return the page. Raises ModuleNotFoundError if Plotly is not installed."""
    from plotly.offline import get_plotlyjs

    sections = "".join(_section(number, report) for number, report in enumerate(reports))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Transposed convolutions</title><style>{_STYLE}</style><script>{get_plotlyjs()}</script></head><body>"
        f"<h1>Transposed convolutions</h1>{_contents(reports) if len(reports) > 1 else ''}{sections}</body></html>\n"
    )


def _contents(reports: Sequence[Report]) -> str:
    """Return the list of reports with their means."""
    lines = []
    for number, report in enumerate(reports):
        said = [f"{found.mean:.2f} ({name})" for name, found in _summaries(report)]
        means = f": geometric mean of ratios {', '.join(said)}" if said else ""
        lines.append(f'<li><a href="#{number}">{html.escape(_title(report))}</a>{means}</li>')
    return f"<ul>{''.join(lines)}</ul>"


def _summaries(report: Report) -> list[tuple[str, Summary]]:
    return [(name, found) for name, found in (("default", report.default), ("chosen", report.chosen)) if found]


def _title(report: Report) -> str:
    kinds = {f"{row.layer.target}, {row.layer.task.problem.data_format}" for row in report.rows}
    return f"{report.microarchitecture}, {'; '.join(sorted(kinds))}, threads: {report.threads}, {report.date}"


def _section(number: int, report: Report) -> str:
    parts = [f'<h2 id="{number}">{html.escape(_title(report))}</h2>']
    if any(row.ratio is not None for row in report.rows):
        parts += ["<h3>Time of the best peer by ours</h3>", _drawn(_ratios(report))]
    parts += ["<h3>Times</h3>", _table(report), "<h3>Roofline</h3>"]
    measured = [row for row in report.rows if not row.ours.failure and row.layer.task.problem.macs]
    parts.append(_drawn(_roofline(report, measured)) if measured else "<p>Nothing was measured.</p>")
    return "".join([*parts, f'<h3>Conditions</h3><p class="summary">{html.escape(summary(report))}</p>'])


def _drawn(figure: Any) -> str:
    axis = {"gridcolor": _GRID, "linecolor": _GRID, "zeroline": False, "automargin": True}
    figure.update_layout(
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"color": _INK, "size": 12},
        margin={"l": 10, "r": 10, "t": 40, "b": 40},
        legend={"orientation": "h", "y": 1.0, "yanchor": "bottom"},
    )
    figure.update_xaxes(**axis).update_yaxes(**axis)
    drawn = figure.to_html(
        full_html=False, include_plotlyjs=False, config={"responsive": True, "displayModeBar": False}
    )
    return f'<div class="wide"><div class="chart">{drawn}</div></div>'


def _ratios(report: Report) -> Any:
    """Return the chart of ratios, the least at the bottom."""
    from plotly import graph_objects as plot

    compared = [row for row in report.rows if row.ratio is not None]
    compared.sort(key=lambda row: row.ratio or 0.0)
    figure = plot.Figure()
    for name, colour, shift, results in (
        ("default", _DEFAULT, 0.15, [row.default for row in compared]),
        ("chosen", _CHOSEN, -0.15, [row.ours for row in compared]),
    ):
        points = [
            _Point.of(place, row, ours)
            for place, (row, ours) in enumerate(zip(compared, results, strict=True))
            if ours and ours.correct
        ]
        figure.add_scatter(
            name=name,
            mode="markers+text",
            x=[min(max(point.ratio, 1 / _FARTHEST), _FARTHEST) for point in points],
            y=[point.place + shift for point in points],
            error_x={
                "array": [point.high - point.ratio if point.near else 0 for point in points],
                "arrayminus": [point.ratio - point.low if point.near else 0 for point in points],
                "symmetric": False,
            },
            marker={"color": colour, "size": 9, "symbol": ["circle" if p.near else "triangle-right" for p in points]},
            text=["" if point.near else f"{point.ratio:.1f} " for point in points],
            textposition="middle left",
            hovertext=[_told(point.row, name, point.ours) for point in points],
            hoverinfo="text",
        )
    names = [_short(row.layer.name) for row in compared]
    title = "above 1 we are faster; bars from quartile to quartile"
    figure.add_vline(x=1.0, line={"color": _FAINT, "dash": "dash"})
    figure.update_xaxes(type="log", title=title, tickvals=_TICKS, ticktext=[f"{tick:g}" for tick in _TICKS])
    figure.update_yaxes(tickvals=[*range(len(names))], ticktext=names, range=[-0.7, len(names) - 0.3])
    return figure.update_layout(height=120 + 22 * len(compared))


class _Point(NamedTuple):
    """A ratio to the best peer in the chart: its line from below, and the ratios of the quartiles around it."""

    place: int
    row: Row
    ours: Result
    low: float
    ratio: float
    high: float

    @classmethod
    def of(cls, place: int, row: Row, ours: Result) -> _Point:
        assert row.best_peer is not None
        peer = row.results[row.best_peer]
        low, high = peer.quartiles[0] / ours.quartiles[1], peer.quartiles[1] / ours.quartiles[0]
        return cls(place, row, ours, low, peer.median / ours.median, high)

    @property
    def near(self) -> bool:
        """Whether it is drawn where it is."""
        return 1 / _FARTHEST <= self.ratio <= _FARTHEST


def _roofline(report: Report, rows: Sequence[Row]) -> Any:
    """Return the roofline of what was chosen and of the best peers, under the roofs of the types that there are."""
    from plotly import graph_objects as plot

    figure: Any = plot.Figure()
    points, numbers = [*_points(rows)], {id(row): place for place, row in enumerate(report.rows, 1)}
    intensities = [point[0] for point in points]
    first, last = min(intensities) / 2, max(intensities) * 2
    copied = 1e-9 * report.floors.copy
    used = {row.layer.task.problem.accumulate_dtype for row in rows}
    peaks = {dtype: 2e-9 * rate for dtype, rate in report.floors.fma.items() if dtype in used}
    for dtype, peak in peaks.items():
        ridge = min(max(peak / copied, first), last)
        xs = [first, ridge, last]
        line = {"color": _FAINT, "width": 1.5}
        ys = [min(x * copied, peak) for x in xs]
        figure.add_scatter(name=f"{dtype}: {peak:.0f} GFLOP/s", mode="lines", x=xs, y=ys, line=line, hoverinfo="skip")
    for name, colour in (("best peer", _PEER), ("chosen", _CHOSEN)):
        mine = [point for point in points if point[2] == name]
        figure.add_scatter(
            name=name,
            mode="markers+text" if name == "chosen" else "markers",
            x=[point[0] for point in mine],
            y=[point[1] for point in mine],
            text=[str(numbers[id(point[3])]) for point in mine],
            textposition="top center",
            textfont={"size": 9},
            marker={"color": colour, "size": 8 if name == "chosen" else 6},
            hovertext=[_told(point[3], name, point[4]) for point in mine],
            hoverinfo="text",
        )
    figure.update_xaxes(
        type="log", title=f"FLOP per byte that must cross memory, at {copied:.1f} GB/s; numbers are those of the table"
    )
    figure.update_yaxes(type="log", title="GFLOP/s")
    return figure.update_layout(height=640)


def _points(rows: Sequence[Row]) -> Iterator[tuple[float, float, str, Row, Result]]:
    """Yield intensity, GFLOP/s, and whose they are."""
    for row in rows:
        problem = row.layer.task.problem
        intensity = 2 * problem.macs / problem.min_bytes
        yield intensity, rates(row, row.ours)[0], "chosen", row, row.ours
        if row.best_peer:
            best = row.results[row.best_peer]
            yield intensity, rates(row, best)[0], "best peer", row, best


def _told(row: Row, name: str, result: Result) -> str:
    gflops, gbytes = rates(row, result)
    who = row.best_peer if name == "best peer" else name
    text = f"{row.layer.name}, {who}: {milliseconds(result.median)} ms, {gflops:.1f} GFLOP/s, {gbytes:.1f} GB/s"
    return html.escape(text)


def _short(name: str) -> str:
    return html.escape(name if len(name) <= 40 else f"{name[:39]}…")


def _table(report: Report) -> str:
    titles = "".join(f"<th>{html.escape(name)}</th>" for name, *_ in columns(report))
    rows = "".join(
        f"<tr><td><small>{number}</small> " + "</td><td>".join(map(html.escape, cells(report, row))) + "</td></tr>"
        for number, row in enumerate(report.rows, 1)
    )
    return f'<div class="wide"><table><tr>{titles}</tr>{rows}</table></div>'
