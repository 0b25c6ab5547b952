"""The commands that measure: bench, overhead."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tvm_deconv.artifact import files
from tvm_deconv.cli.common import Builds, advance, problems_of, progress_bar, scan_sources, target_of
from tvm_deconv.cli.output import JSON, KEYS, Column, Table, echo_json, say
from tvm_deconv.errors import ProblemError, SourceError
from tvm_deconv.extras import install
from tvm_deconv.problem import Problem
from tvm_deconv.problem.dtypes import DTYPES
from tvm_deconv.problem.problem import DATA_FORMATS
from tvm_deconv.problem.quantization import STORED, Quantization
from tvm_deconv.runtime.library import load
from tvm_deconv.targets import CPU_TARGETS

if TYPE_CHECKING:
    from tvm_deconv.artifact.manifest import Manifest
    from tvm_deconv.bench.layers import Layer
    from tvm_deconv.bench.results import Report


def _peer_names(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[str, ...]:
    from tvm_deconv.bench.peers import PEERS

    names = tuple(dict.fromkeys(name for name in (value or "").split(",") if name))
    if names == ("all",):
        return tuple(name for name, peer in PEERS.items() if not peer.missing)
    for name in names:
        if name not in PEERS:
            raise click.BadParameter(f"{name} is not one of {', '.join(PEERS)}", context, parameter)
        if PEERS[name].missing:
            raise click.BadParameter(f"{name} is not installed: pip install {' '.join(PEERS[name].missing)}")
    return names


def _dtypes(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name for name in (value or "").split(",") if name))
    for name in names:
        dtype, _, quantization = name.partition(".")
        known = dtype in STORED if quantization else dtype in DTYPES
        if not known:
            rule = f"{name} is not one of {', '.join(DTYPES)}, nor of data, filter and output such as uint8.int8.uint8"
            raise click.BadParameter(rule, context, parameter)
        if quantization:
            try:
                Quantization.parse(quantization)
            except ProblemError as error:
                raise click.BadParameter(f"{name}: {error}", context, parameter) from None
    return names


def _writable(context: click.Context, parameter: click.Parameter, value: Path | None) -> Path | None:
    """Refuse a file that cannot be replaced before the run, which may take long."""
    if value is None or value == Path("-") or _is_device(value):
        return value
    folder = value.resolve().parent
    if not folder.is_dir():
        raise click.BadParameter(f"the directory {value.parent} does not exist", context, parameter)
    if not os.access(folder, os.W_OK):
        raise click.BadParameter(f"{value} cannot be written", context, parameter)
    return value


def _is_device(path: Path) -> bool:
    """Return True of a device or a pipe, which is written to and not replaced."""
    return path.exists() and not path.is_file()


def _save(path: Path, text: str) -> None:
    """Write a report: a file, also behind a link, is replaced at once. An OSError names it."""
    if _is_device(path):
        with files.naming(path):
            path.write_text(text, encoding="utf-8")
    else:
        files.write(path.resolve(), text.encode())


def _pattern(context: click.Context, parameter: click.Parameter, value: str | None) -> re.Pattern[str]:
    try:
        return re.compile(value or "")
    except re.error as error:
        raise click.BadParameter(f"{value} is not a regular expression: {error}", context, parameter) from None


def _page(context: click.Context, parameter: click.Parameter, value: Path | None) -> Path | None:
    if value is not None and importlib.util.find_spec("plotly") is None:
        raise click.BadParameter(f"the page needs Plotly: {install('report')}", context, parameter)
    return _writable(context, parameter, value)


_FILE = click.Path(dir_okay=False, writable=True, path_type=Path)
_FOLDER = click.Path(file_okay=False, path_type=Path)


@click.command()
@click.argument("paths", metavar="(DIRECTORY|SOURCE)...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--threads", type=click.IntRange(1), help="CPUs to use; by default one per core.")
@click.option(
    "--peers",
    callback=_peer_names,
    help="Compare with these: onnxruntime,openvino,torch,torch-channels-last,mnn,ncnn,litert,jax; or all there are.",
)
@click.option("--layers", "pattern", metavar="REGEX", callback=_pattern, help="Only layers whose names match in part.")
@click.option("--layout", type=click.Choice(DATA_FORMATS), help="Take the layers of a SOURCE in this layout.")
@click.option(
    "--types", callback=_dtypes, help="Take the layers of a SOURCE in these, such as bfloat16,uint8.int8.uint8."
)
@click.option(
    "--target",
    default="native",
    show_default=True,
    callback=target_of,
    help=f"Target of the layers of a SOURCE: {', '.join(CPU_TARGETS)}, or a microarchitecture such as znver4.",
)
@click.option(
    "--logs",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Tuning logs to follow besides the installed ones, for a SOURCE.",
)
@click.option("--rounds", type=click.IntRange(1), help="Turns of each contender.")
@click.option("--seconds", type=click.FloatRange(0), help="Stop a layer's rounds after this long; three run at least.")
@click.option(
    "--output", "-o", type=_FOLDER, help="Keep the artifacts of a SOURCE in this directory, defaults in default/."
)
@click.option(
    "--json",
    "json_file",
    is_flag=False,
    flag_value="-",
    type=click.Path(dir_okay=False, writable=True, allow_dash=True, path_type=Path),
    callback=_writable,
    help="Write the report as JSON, to a FILE or in place of the table.",
)
@click.option("--html", "html_file", type=_FILE, callback=_page, help="Write the report as one HTML page.")
@KEYS
@click.option("--figures", type=_FOLDER, help="Write the report's figures there, named by machine, layout and threads.")
def bench(
    paths: Sequence[Path],
    threads: int | None,
    peers: Sequence[str],
    pattern: re.Pattern[str],
    layout: str | None,
    types: Sequence[str],
    target: str,
    logs: Path | None,
    rounds: int | None,
    seconds: float | None,
    output: Path | None,
    json_file: Path | None,
    html_file: Path | None,
    figures: Path | None,
    keys: bool,
) -> None:
    """Time artifacts, or layers of a SOURCE, also against peers.

    Times are compared with the limits of the machine. The layers of a SOURCE are built twice: as tuning logs choose,
    and by the default, which knows no log. The two limits, multiply-adds and copied bytes per second, are measured on
    the spot. With --peers the layers run in other packages too, in turn with ours and on the same data, and outputs are
    compared with the reference.
    """
    from tvm_deconv.bench import report as reports
    from tvm_deconv.bench.figures import file_name, write
    from tvm_deconv.bench.page import as_html

    with contextlib.ExitStack() as stack:
        scratch = output or stack.enter_context(files.temporary_folder())
        layers = _layers(paths, pattern, scratch, target=target, logs=logs, layout=layout, types=types)
        if figures:
            file_name(layers, "", 1)  # which refuses a mixture before the run
        report = _measure(layers, peers, threads, rounds, seconds)
    if json_file == Path("-"):
        echo_json(reports.as_json(report))
    else:
        _show(report, keys)
        if json_file:
            _save(json_file, json.dumps(reports.as_json(report), indent=1) + "\n")
    if html_file:
        _save(html_file, as_html(report))
    if figures:
        say(f"figures: {write(report, figures)}")
    wrong = [row.layer.name for row in report.rows if not row.ours.correct or (row.default and not row.default.correct)]
    if wrong:
        raise click.ClickException(f"these layers failed or are wrong: {', '.join(wrong)}")


def _show(report: Report, keys: bool) -> None:
    """Print the table and the summary of a report."""
    from tvm_deconv.bench import report as reports

    columns = reports.columns(report, keys)
    table = Table("", [Column(column.title, right=not column.text, spare=not column.vital) for column in columns])
    for row in report.rows:
        table.add(*reports.cells(report, row, keys))
    table.show()
    say(reports.summary(report))


def _layers(paths: Sequence[Path], pattern: re.Pattern[str], output: Path, **options: Any) -> list[Layer]:
    """Return the artifacts in directories, and those of sources, which are built into `output`."""
    from tvm_deconv.bench.layers import layers_in

    directories = [path for path in paths if path.is_dir()]
    sources = [path for path in paths if path not in directories]
    layers = [layer for directory in directories for layer in layers_in(load(directory)) if pattern.search(layer.name)]
    if sources:
        layers += _built(sources, pattern, output, **options)
    if not layers:
        rule = f"must hold a layer that this machine can run{' and that matches --layers' if pattern.pattern else ''}"
        raise SourceError("paths", ", ".join(map(str, paths)), rule)
    return layers


def _built(
    sources: Sequence[Path],
    pattern: re.Pattern[str],
    output: Path,
    *,
    target: str,
    logs: Path | None,
    layout: str | None,
    types: Sequence[str],
) -> list[Layer]:
    """Build the layers of sources as tuning logs choose, by the default where that differs, and `types` in float32."""
    from tvm_deconv.bench.layers import DIRECT, artifacts_of, in_float32, in_type, is_default, layers_of

    problems: dict[Problem, list[str]] = {}
    for problem, names in problems_of(scan_sources(sources), [layout] if layout else ()).items():
        matching = [name for name in names if pattern.search(name)]
        for dtype in types or [problem.dtype]:
            named = [f"{name} {dtype}" if len(types) > 1 else name for name in matching]
            if named:
                problems.setdefault(in_type(problem, dtype), []).extend(named)
    if not problems:
        return []
    _build(problems, target, output, logs=logs)
    chosen = artifacts_of(problems, load(output), target)
    differing = {problem: problems[problem] for problem in problems if not is_default(problem, chosen[problem])}
    defaults: dict[Problem, Manifest] = {}
    if differing:
        _build(differing, target, output / "default", installed=False)
        defaults = artifacts_of(differing, load(output / "default"), target)
    singles = {
        in_float32(problem): names for problem, names in problems.items() if types and problem.dtype != "float32"
    }
    of_singles: dict[Problem, Manifest] = {}
    if singles:
        _build(singles, target, output / "float32", installed=False, algorithms=DIRECT)
        of_singles = artifacts_of(singles, load(output / "float32"), target)
    return layers_of(problems, output, chosen, output / "default", defaults, output / "float32", of_singles)


def _build(problems: dict[Problem, list[str]], target: str, output: Path, **options: Any) -> None:
    builds = Builds(output)
    builds.run(problems, [target], **options)
    builds.close()


def _measure(
    layers: Sequence[Layer], peers: Sequence[str], threads: int | None, rounds: int | None, seconds: float | None
) -> Report:
    from tvm_deconv.bench import run as runs
    from tvm_deconv.compiler.process import WorkerError

    with progress_bar("measuring", total=len(layers)) as progress:
        try:
            return runs.run(
                layers,
                peers,
                threads=threads,
                rounds=rounds or runs.ROUNDS,
                layer_seconds=runs.LAYER_SECONDS if seconds is None else seconds,
                on_row=lambda _: advance(progress),
            )
        except WorkerError as error:
            raise click.ClickException(str(error)) from None


@click.command()
@JSON
def overhead(as_json: bool) -> None:
    """Measure what this package costs besides its kernels.

    That is: import, load, calls, parallel launches, idling.
    """
    from tvm_deconv.bench.overhead import measure

    figures = measure()
    if as_json:
        echo_json([figure._asdict() for figure in figures])
        return
    table = Table("", [Column("cost"), Column("value", right=True), Column("unit")])
    for figure in figures:
        table.add(figure.name, f"{figure.value:.2f}", figure.unit)
    table.show()
