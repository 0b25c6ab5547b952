"""The commands that measure: bench, overhead."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.table import Table

from tvm_deconv.cli.common import advance, build_artifacts, console, problems_of, progress_bar, scan_sources
from tvm_deconv.errors import SourceError
from tvm_deconv.runtime.library import load

if TYPE_CHECKING:
    from tvm_deconv.bench.run import Layer, Report


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


def _writable(context: click.Context, parameter: click.Parameter, value: Path | None) -> Path | None:
    """Refuse a file that cannot be written before the run, which may take long."""
    if value is not None and not value.absolute().parent.is_dir():
        raise click.BadParameter(f"the directory {value.parent} does not exist", context, parameter)
    if value is not None and not os.access(value if value.exists() else value.absolute().parent, os.W_OK):
        raise click.BadParameter(f"{value} cannot be written", context, parameter)
    return value


_FILE = click.Path(dir_okay=False, writable=True, path_type=Path)


@click.command()
@click.argument("paths", metavar="(DIRECTORY|SOURCE)...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--threads", type=click.IntRange(1), help="CPUs to use; by default one per core.")
@click.option(
    "--peers",
    callback=_peer_names,
    help="Compare with these, or with all that are installed: all, or names as in onnxruntime,torch,mnn.",
)
@click.option("--rounds", type=click.IntRange(1), help="Turns of each contender.")
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    help="Keep the artifacts of a SOURCE in this directory.",
)
@click.option("--json", "json_file", type=_FILE, callback=_writable, help="Write the report as JSON.")
@click.option("--html", "html_file", type=_FILE, callback=_writable, help="Write the report as one HTML page.")
def bench(
    paths: Sequence[Path],
    threads: int | None,
    peers: Sequence[str],
    rounds: int | None,
    output: Path | None,
    json_file: Path | None,
    html_file: Path | None,
) -> None:
    """Time artifacts, or the layers of a SOURCE, and compare with the limits of the machine.

    The two limits, multiply-adds and copied bytes per second, are measured on the spot. With --peers the layers run in
    other packages too, in turn with ours and on the same data, and outputs are compared with the reference.
    """
    from tvm_deconv.bench import report as reports

    with contextlib.ExitStack() as stack:
        scratch = output or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        report = _measure(_layers(paths, scratch), peers, threads, rounds)
    console().print(reports.table(report))
    click.echo(reports.summary(report))
    if json_file:
        json_file.write_text(json.dumps(reports.as_json(report), indent=1) + "\n", encoding="utf-8")
    if html_file:
        html_file.write_text(reports.as_html(report), encoding="utf-8")
    wrong = [row.layer.name for row in report.rows if not row.ours.correct]
    if wrong:
        raise click.ClickException(f"these layers failed or are wrong: {', '.join(wrong)}")


def _layers(paths: Sequence[Path], output: Path) -> list[Layer]:
    """Return the artifacts in directories, and those of sources, which are built into `output`."""
    from tvm_deconv.bench.run import layers_in, layers_of

    directories = [path for path in paths if path.is_dir()]
    sources = [path for path in paths if path not in directories]
    layers = [layer for directory in directories for layer in layers_in(load(directory))]
    if sources:
        problems = problems_of(scan_sources(sources))
        build_artifacts(problems, ["native"], output)
        layers += layers_of(problems, load(output))
    if not layers:
        raise SourceError("paths", ", ".join(map(str, paths)), "must hold a layer that this machine can run")
    return layers


def _measure(layers: Sequence[Layer], peers: Sequence[str], threads: int | None, rounds: int | None) -> Report:
    from tvm_deconv.bench import run as runs
    from tvm_deconv.compiler.process import WorkerError

    with progress_bar("measuring", total=len(layers)) as progress:
        try:
            return runs.run(
                layers, peers, threads=threads, rounds=rounds or runs.ROUNDS, on_row=lambda _: advance(progress)
            )
        except WorkerError as error:
            raise click.ClickException(str(error)) from None


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def overhead(as_json: bool) -> None:
    """Measure the cost of this package besides its kernels: import, load, calls, parallel launches, idling."""
    from tvm_deconv.bench.overhead import measure

    figures = measure()
    if as_json:
        click.echo(json.dumps([figure._asdict() for figure in figures], indent=1))
        return
    table = Table(show_header=False)
    for figure in figures:
        table.add_row(figure.name, f"{figure.value:.2f}", figure.unit)
    console().print(table)
