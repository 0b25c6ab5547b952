"""Figures that are kept: a file for each machine, target, layout, type and number of threads, and tables of them all.

A file has what `report.as_json` has, without what follows from it, one layer a line, so that histories compare.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tvm_deconv.artifact import files
from tvm_deconv.artifact.regular import MOST_TEXT, content_of
from tvm_deconv.bench.layers import Layer, in_float32
from tvm_deconv.bench.report import as_json, from_json, shares, summary, time_of, two_digits
from tvm_deconv.bench.results import Report, Result, Row, Summary
from tvm_deconv.errors import SourceError
from tvm_deconv.problem import Problem

_DIGITS = 4
#: Multiply-adds of an instruction for words, `vdpbf16ps` or `vpdpbusd`, by those of one for float32.
_OF_FLOAT32 = {"bfloat16": 2, "uint8": 4, "int8": 4}
#: Keys of a report, and of a layer or a result, that follow from others.
_OF_REPORT = ("default", "chosen", "noisy")
_OF_LAYER = {
    *("macs", "min_bytes", "best_peer", "default_ratio", "ratio", "single_ratio"),
    *("gflop_per_second", "gb_per_second", "of_floors"),
}


def file_name(layers: Iterable[Layer], microarchitecture: str, threads: int) -> str:
    """Return the name of the file for the figures of `layers`. Raises SourceError if they have no common one."""
    problems = {(layer.target, layer.task.problem) for layer in layers}
    kinds = sorted({f"{target}-{problem.data_format.lower()}{_type(problem)}" for target, problem in problems})
    if len(kinds) != 1:
        raise SourceError("figures", ", ".join(kinds), "must be of one target, one layout and one type")
    return f"{microarchitecture}-{kinds[0]}-{threads}.json"


def _type(problem: Problem) -> str:
    """Return what names say of the type: nothing if it is float32."""
    quantization = f".{problem.quantization}" if problem.quantization else ""
    return "" if problem.dtype == "float32" else f"-{problem.dtype}{quantization}"


def write(report: Report, directory: Path) -> Path:
    """Write the figures of a report into `directory` under the name that they have; return the file."""
    content = as_json(report)
    layers = content.pop("layers")
    kept = {key: value for key, value in content.items() if key not in _OF_REPORT}
    head = json.dumps(rounded(kept), indent=1).removesuffix("\n}")
    lines = ",\n".join(f"  {json.dumps(rounded(_measured(layer)))}" for layer in layers)
    path = directory / file_name([row.layer for row in report.rows], report.microarchitecture, report.threads)
    directory.mkdir(parents=True, exist_ok=True)
    files.write(path, f'{head},\n "layers": [\n{lines}\n ]\n}}\n'.encode())
    return path


def _measured(layer: Mapping[str, Any]) -> dict[str, Any]:
    results = {
        name: {key: value for key, value in result.items() if key not in _OF_LAYER}
        for name, result in layer["results"].items()
    }
    return {key: value for key, value in layer.items() if key not in _OF_LAYER} | {"results": results}


def rounded(value: Any) -> Any:
    """Return a JSON value with the digits of its fractions that measurements have."""
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}")
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    return [rounded(each) for each in value] if isinstance(value, (list, tuple)) else value


def read(directory: Path) -> dict[str, Report]:
    """Return the reports in `directory` by the names of their files, without suffix. Raises SourceError.

    A folder in it holds figures of other layers, and is part of the names.
    """
    found = {}
    for path in sorted(directory.rglob("*.json"), key=lambda path: (len(path.parts), path)):
        try:
            found[path.relative_to(directory).with_suffix("").as_posix()] = from_json(
                json.loads(content_of(path, MOST_TEXT))
            )
        except (AttributeError, KeyError, TypeError, ValueError, OSError, RecursionError) as error:
            raise SourceError("figures", path, f"must be what `bench --figures` writes: {error}") from None
    return found


def machines(reports: Mapping[str, Report]) -> str:
    """Return the Markdown table of reports with peers, by name: where each was measured, and how ours compare."""
    columns = ("microarchitecture", "CPU", "target", "layout", "threads", "date", "layers")
    means = ("default: mean", "worst", "chosen: mean", "worst")
    lines = [line(*columns, *means), f"|{'---|' * 4}{'---:|' * 7}"]
    for name, report in reports.items():
        if not report.peers:
            continue
        layer, host = report.rows[0].layer, report.host
        cpu = f"{host.name}, {host.vendor} family {host.family} model {host.model}"
        facts = (report.microarchitecture, cpu, layer.target, _layout(report), report.threads, report.date)
        layers = f"{_folder(name)} {len(report.rows)}".lstrip()
        lines.append(line(*facts, layers, *_means(report.default), *_means(report.chosen)))
    return "\n".join(lines)


def of_main_list(reports: Mapping[str, Report]) -> dict[str, Report]:
    """Return the reports, by name, of the main list of layers in float32: those in no folder."""
    return {name: report for name, report in reports.items() if not _folder(name)}


def some_layers(report: Report, names: Sequence[str]) -> str:
    """Return the Markdown table of the layers called `names`: our time, that of the best peer, and their ratio."""
    rows = {row.layer.name: row for row in report.rows}
    lines = [line("layer", "ours, ms", "best peer, ms", "ratio"), "|---|---:|---:|---:|"]
    for row in map(rows.__getitem__, names):
        best = row.results[row.best_peer] if row.best_peer else None
        lines.append(line(row.layer.name, time_of(row.ours), time_of(best), two_digits(row.ratio)))
    return "\n".join(lines)


def ratios(reports: Sequence[Report]) -> str:
    """Return the Markdown table of the ratios of all layers, default and chosen, with a column for each report."""
    names = [f"{report.microarchitecture} {_layout(report)}, threads: {report.threads}" for report in reports]
    lines = [line("layer", *names), f"|---|{'---:|' * len(names)}"]
    rows = [{row.layer.name: row for row in report.rows} for report in reports]
    for name in dict.fromkeys(name for of_report in rows for name in of_report):
        lines.append(line(name, *(_both(of_report.get(name)) for of_report in rows)))
    return "\n".join(lines)


def low_precision(reports: Iterable[Report]) -> str:
    """Return a Markdown table for each machine and target: the times in float32 and of the best peer by ours, by type.

    Reports without times in float32 have no column. Errors are the largest of all layers, as parts of the largest
    element.
    """
    places: dict[str, list[Report]] = {}
    for report in reports:
        if report.has_singles:
            places.setdefault(f"{report.microarchitecture}, {report.rows[0].layer.target}", []).append(report)
    return "\n\n".join(f"{place}:\n\n{_in_types(compared)}" for place, compared in places.items())


def _by_layer(compared: Sequence[Report], cell: Callable[[Report, Row | None], str]) -> list[str]:
    """Return the lines of a table of every layer in all of `compared`; a report may have no row of one."""
    lines = [line("layer", *map(_layout, compared)), f"|---|{'---:|' * len(compared)}"]
    rows = [{row.layer.name: row for row in report.rows} for report in compared]
    for name in dict.fromkeys(name for of_report in rows for name in of_report):
        lines.append(line(name, *map(cell, compared, (of_report.get(name) for of_report in rows))))
    return lines


def _in_types(compared: Sequence[Report]) -> str:
    lines = _by_layer(compared, _ratios)
    lines.append(line("geometric mean", *map(_mean_ratios, compared)))
    lines.append(line("error", *(_largest([row.ours for row in report.rows]) for report in compared)))
    lines.append(line("error of the best peers", *(_largest(map(_best, report.rows)) for report in compared)))
    return "\n".join(lines)


def _ratios(_: Report, row: Row | None) -> str:
    pair = (row.single_ratio, row.ratio) if row else (None, None)
    return " / ".join(map(two_digits, pair))


def word_floors(reports: Iterable[Report]) -> str:
    """Return a Markdown table of parts of the times of layers in words, in per cent.

    They are what the instruction needs for the multiply-adds at its peak, of our time and of the best peer's, and what
    copying every array once takes of ours. `reports` are of one machine and target.
    """
    return "\n".join(_by_layer([*reports], _floors))


def _floors(report: Report, row: Row | None) -> str:
    if row is None or row.ours.failure:
        return "-"
    problem = row.layer.task.problem
    products = report.floors.seconds(in_float32(problem))["fma"] / _OF_FLOAT32[problem.dtype]
    copy = shares(report, row, row.ours)["copy"]
    best = _best(row)
    of_best = "-" if best is None else f"{products / best.median:.0%}"
    return f"{products / row.ours.median:.0%} / {of_best} ({copy:.0%})".replace("%", "")


def _mean_ratios(report: Report) -> str:
    singles = [ratio for row in report.rows if (ratio := row.single_ratio) is not None]
    return f"{statistics.geometric_mean(singles):.2f} / {_means(report.chosen)[0]}"


def _best(row: Row) -> Result | None:
    return row.results[row.best_peer] if row.best_peer else None


def _largest(results: Iterable[Result | None]) -> str:
    errors = [result.deviation.largest for result in results if result is not None and result.deviation is not None]
    return f"{max(errors):.1e}" if errors else "-"


def _folder(name: str) -> str:
    """Return the folder of a file of figures, empty if it is in none."""
    return name.rpartition("/")[0]


def _both(row: Row | None) -> str:
    return "-" if row is None else f"{two_digits(row.default_ratio)} / {two_digits(row.ratio)}"


def _layout(report: Report) -> str:
    problem = report.rows[0].layer.task.problem
    layout = "`N C *X`" if problem.data_format == "NCX" else "`N *X C`"
    return layout + _type(problem).replace("-", ", ")


def _means(found: Summary | None) -> tuple[str, str]:
    return ("-", "-") if found is None else (f"{found.mean:.2f}", f"{found.least:.2f}")


def layers_table(report: Report) -> str:
    """Return the Markdown table of the layers of a report, with every contender."""
    head = ("layer", "algorithm", "default, ms", "chosen, ms", "best peer", "its, ms", "default ratio", "chosen ratio")
    floors = ("of FMA peak", "of copy")
    lines = [line(*head, *floors, *(f"{peer}, ms" for peer in report.peers))]
    lines.append("|---|---|---:|---:|---|" + "---:|" * (len(head) - 5 + len(floors) + len(report.peers)))
    lines += [line(*_layer_cells(report, row)) for row in report.rows]
    return "\n".join(lines)


def _layer_cells(report: Report, row: Row) -> Sequence[str]:
    best, ours = row.best_peer, row.ours
    parts = {} if ours.failure else shares(report, row, ours)
    return [
        row.layer.name,
        ours.note,
        *map(time_of, (row.default, ours)),
        best or "-",
        time_of(row.results[best] if best else None),
        *map(two_digits, (row.default_ratio, row.ratio)),
        *(f"{100 * parts[name]:.0f} %" if name in parts else "-" for name in ("fma", "copy")),
        *(time_of(row.results[peer]) for peer in report.peers),
    ]


def line(*cells: object) -> str:
    """Return a line of a table."""
    return f"| {' | '.join(str(cell).replace('|', '/') for cell in cells)} |"


def page(reports: Mapping[str, Report]) -> str:
    """Return the Markdown of a page of all reports, by the names of their files without suffix."""
    if not reports:
        return "No figures are kept."
    parts = [machines(reports), "## All machines", _RATIOS]
    for folder in dict.fromkeys(map(_folder, reports)):
        parts.append(ratios([report for name, report in reports.items() if _folder(name) == folder]))
    for name, report in reports.items():
        parts += [f"## {name}", "\n".join(f"- {line}" for line in summary(report).splitlines()), layers_table(report)]
    return "\n\n".join(parts)


_RATIOS = "The time of the best peer by ours, of the default and of what tuning logs chose."


def replaced(document: str, block: str, content: str) -> str:
    """Return a document with `content` between the marks of a block. Raises SourceError if it has no such block."""
    begin, end = f"<!-- {block}: begin -->\n", f"\n<!-- {block}: end -->"
    head, found, rest = document.partition(begin)
    _, closed, tail = rest.partition(end)
    if not found or not closed:
        raise SourceError("document", block, "must have the marks of this block")
    return f"{head}{begin}{content}{end}{tail}"
