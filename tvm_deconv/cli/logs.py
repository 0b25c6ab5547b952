"""The commands on tuning logs: logs merge, logs best, logs prune."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click
from rich.table import Table

from tvm_deconv.cli.common import console, echo_warnings
from tvm_deconv.cli.tune import LOGS, milliseconds
from tvm_deconv.compiler import records
from tvm_deconv.compiler.records import Log, Records
from tvm_deconv.targets import get

_EXISTING = click.Path(exists=True, file_okay=False, path_type=Path)


def _known(_context: click.Context, _parameter: click.Parameter, name: str | None) -> str | None:
    return name and get(name).name


_TARGET = click.option("--target", metavar="TARGET", callback=_known, help="Only records for this target.")


@click.group()
def logs() -> None:
    """Merge, read and shorten tuning logs."""


def _read(root: Path, target: str | None = None) -> list[Records]:
    """Read a log; print a warning for each line that does not read."""
    read = [records.read(name, root) for name in ([target] if target else Log(root).targets())]
    echo_warnings(warning for of_target in read for warning in of_target.warnings)
    return read


@logs.command()
@click.argument("directory", type=LOGS)
@click.argument("others", metavar="OTHER...", nargs=-1, required=True, type=_EXISTING)
def merge(directory: Path, others: Sequence[Path]) -> None:
    """Add the records of every OTHER directory to DIRECTORY, sorted.

    Of records of the same trial under the same conditions the newest stays, whatever the order of directories.
    """
    log = Log(directory)
    before = [record for of_target in _read(directory) for record in of_target]
    log.merge([*before, *(record for other in others for of_target in _read(other) for record in of_target)])
    after = sum(1 for of_target in _read(directory) for _ in of_target)
    click.echo(f"{directory}: {len(before)} records, {after} with those of {', '.join(map(str, others))}")


@logs.command()
@click.argument("directory", type=_EXISTING)
@_TARGET
def best(directory: Path, target: str | None) -> None:
    """Print the fastest record of every problem in DIRECTORY, and name the records that no longer replay."""
    from tvm_deconv.compiler.selection import replay_error

    table = Table(title=str(directory), title_justify="left")
    for name in ("problem", "target", "algorithm", "knobs", "CPU"):
        table.add_column(name, overflow="fold")
    for name in ("threads", "ms", "spread", "records"):
        table.add_column(name, justify="right")
    warnings: list[str] = []
    for of_target in _read(directory, target):
        for key, of_problem in sorted(of_target.by_problem.items()):
            warnings += [warning for record in of_problem if (warning := replay_error(record))]
            count, record = str(len(of_problem)), records.best(key, of_target)
            if record is None:
                table.add_row(key, of_target.target, "nothing ran", "", "", "", "", "", count)
                continue
            knobs = " ".join(f"{name}={value}" for name, value in record.schedule.knobs)
            measured = (str(record.threads), milliseconds(record.seconds), f"{100 * record.spread:.0f} %")
            table.add_row(key, record.target, record.algorithm, knobs, record.host, *measured, count)
    console().print(table)
    echo_warnings(warnings)


@logs.command()
@click.argument("directory", type=_EXISTING)
@_TARGET
@click.option(
    "--keep",
    type=click.IntRange(1),
    default=2,
    show_default=True,
    help="Records to keep of each problem and algorithm.",
)
def prune(directory: Path, target: str | None, keep: int) -> None:
    """Keep the fastest of each problem and algorithm in DIRECTORY, under the newest conditions; drop the others."""
    log = Log(directory)
    for name in [target] if target else log.targets():
        before, after = log.prune(name, keep)
        click.echo(f"{directory}, {name}: {after} of {before} records kept")
