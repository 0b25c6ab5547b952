"""What the commands share: console, progress, the layers of sources, and builds."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tvm_deconv.errors import BuildError, SourceError
from tvm_deconv.frontends import FoundLayer, scan, with_unique_names
from tvm_deconv.problem import Problem

_UNSEEN_WIDTH = 1000  # if no terminal says how wide it is: as wide as a table needs
DIRECTORY = click.argument("directory", type=click.Path(exists=True, file_okay=False, path_type=Path))
#: A directory of artifacts, or a file that packs one.
ARTIFACTS = click.argument("artifacts", metavar="ARTIFACTS", type=click.Path(exists=True, path_type=Path))


def console(*, stderr: bool = False) -> Console:
    """Return a console on which names of layers are never taken for markup."""
    stream = sys.stderr if stderr else sys.stdout  # None if it is closed
    seen = (stream is not None and stream.isatty()) or "COLUMNS" in os.environ
    return Console(stderr=stderr, markup=False, highlight=False, emoji=False, width=None if seen else _UNSEEN_WIDTH)


@contextlib.contextmanager
def progress_bar(title: str, *fields: str, total: int | None = None) -> Iterator[Progress]:
    """Show a bar with one task on a terminal; elsewhere show nothing. `fields` of the task are shown behind it."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    texts = [TextColumn(f"{{task.fields[{field}]}}") for field in fields]
    empty: dict[str, Any] = dict.fromkeys(fields, "")
    screen = console(stderr=True)
    with Progress(*columns, *texts, console=screen, transient=True, disable=not screen.is_terminal) as progress:
        progress.add_task(title, total=total, **empty)
        yield progress


def advance(progress: Progress) -> None:
    """Move the bar by one step."""
    progress.advance(progress.task_ids[0])


def echo_warnings(warnings: Iterable[str]) -> None:
    """Print each warning to standard error, once."""
    for warning in dict.fromkeys(warnings):
        click.echo(warning, err=True)


def scan_sources(
    sources: Sequence[Path], extents: Mapping[str, tuple[int, int]] | None = None
) -> list[tuple[Path, list[FoundLayer]]]:
    """Return the layers of each source, under names that are unique among all; `extents` are ranges of free extents."""
    scanned = [(source, scan(source, extents=extents)) for source in sources]
    named = iter(with_unique_names(layer for _, layers in scanned for layer in layers))
    return [(source, [next(named) for _ in layers]) for source, layers in scanned]


def problems_of(scanned: Sequence[tuple[Path, Sequence[FoundLayer]]]) -> dict[Problem, list[str]]:
    """Return the problems of scanned sources with the names of their layers. Raises SourceError if there is none."""
    problems: dict[Problem, list[str]] = {}
    for _, layers in scanned:
        for layer in layers:
            if layer.problem is not None:
                problems.setdefault(layer.problem, []).append(layer.name)
    if not problems:
        sources = ", ".join(str(source) for source, _ in scanned)
        raise SourceError("source", sources, "must hold a transposed convolution that is covered")
    return problems


def build_artifacts(
    problems: dict[Problem, list[str]],
    targets: Sequence[str],
    output: Path,
    *,
    jobs: int | None = None,
    logs: Path | None = None,
    algorithms: Sequence[str] | None = None,
    installed: bool = True,
) -> None:
    """Build with a bar, print what decided on each schedule and a summary; name what failed and exit with code 1."""
    from tvm_deconv.compiler.current import compile as build
    from tvm_deconv.compiler.requests import Outcome

    outcomes: list[Outcome] = []
    start = time.perf_counter()
    total = len({problem.artifact_key for problem in problems}) * len(set(targets))
    with progress_bar("compiling", total=total) as progress:

        def note(outcome: Outcome) -> None:
            outcomes.append(outcome)
            advance(progress)

        try:
            build(
                problems,
                targets,
                output,
                layers=problems,
                jobs=jobs,
                algorithms=algorithms,
                logs=logs,
                installed=installed,
                on_outcome=note,
            )
        except BuildError:
            if not any(outcome.status == "failed" for outcome in outcomes):
                raise
    table = Table(title=f"schedules of {output}", title_justify="left")
    for name in ("layer", "target", "algorithm", "schedule"):
        table.add_column(name, overflow="fold")
    for outcome in outcomes:
        algorithm = outcome.manifest.algorithm if outcome.manifest else outcome.status
        table.add_row(", ".join(outcome.layers) or outcome.problem.key, outcome.target, algorithm, outcome.reason)
    console().print(table)
    echo_warnings(warning for outcome in outcomes for warning in outcome.warnings)
    count = {status: sum(1 for outcome in outcomes if outcome.status == status) for status in ("built", "current")}
    failed = [outcome for outcome in outcomes if outcome.status == "failed"]
    seconds = time.perf_counter() - start
    summary = (
        f"{output}: {count['built']} built, {count['current']} up to date, {len(failed)} failed in {seconds:.1f} s"
    )
    if not failed:
        click.echo(summary)
        return
    for outcome in failed:
        names = ", ".join(outcome.layers) or outcome.problem.key
        click.echo(f"failed: {names} for {outcome.target}: {outcome.error}", err=True)
    raise click.ClickException(summary)
