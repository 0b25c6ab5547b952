"""The commands on tuning logs: logs merge, logs best, logs prune, logs remeasure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.table import Table

from tvm_deconv.cli.common import console, echo_warnings, progress_bar
from tvm_deconv.cli.tune import LOGS, milliseconds
from tvm_deconv.targets import detect_host, get, supported

if TYPE_CHECKING:
    from tvm_deconv.compiler.records import Log, Records
    from tvm_deconv.tuning.remeasure import Remeasured

_EXISTING = click.Path(exists=True, file_okay=False, path_type=Path)


def _known(_context: click.Context, _parameter: click.Parameter, name: str | None) -> str | None:
    return name and get(name).name


_TARGET = click.option("--target", metavar="TARGET", callback=_known, help="Only records for this target.")


@click.group()
def logs() -> None:
    """Merge, read, shorten and renew tuning logs."""


def _log(directory: Path) -> Log:
    from tvm_deconv.compiler.records import Log  # which needs packages of the extra compile

    return Log(directory)


def _read(root: Path, target: str | None = None) -> list[Records]:
    """Read a log; print a warning for each line that does not read."""
    from tvm_deconv.compiler import records

    read = [records.read(name, root) for name in ([target] if target else _log(root).targets())]
    echo_warnings(warning for of_target in read for warning in of_target.warnings)
    return read


@logs.command()
@click.argument("directory", type=LOGS)
@click.argument("others", metavar="OTHER...", nargs=-1, required=True, type=_EXISTING)
def merge(directory: Path, others: Sequence[Path]) -> None:
    """Add the records of every OTHER directory to DIRECTORY, sorted.

    Of records of the same trial under the same conditions the newest stays, whatever the order of directories.
    """
    log = _log(directory)
    before = [record for of_target in _read(directory) for record in of_target]
    log.merge([*before, *(record for other in others for of_target in _read(other) for record in of_target)])
    after = sum(1 for of_target in _read(directory) for _ in of_target)
    click.echo(f"{directory}: {len(before)} records, {after} with those of {', '.join(map(str, others))}")


@logs.command()
@click.argument("directory", type=_EXISTING)
@_TARGET
def best(directory: Path, target: str | None) -> None:
    """Print the fastest record of every problem and microarchitecture in DIRECTORY; name those that do not replay."""
    from tvm_deconv.compiler.selection import replay_error

    table = Table(title=str(directory), title_justify="left")
    for name in ("problem", "target", "algorithm", "knobs", "CPU"):
        table.add_column(name, overflow="fold")
    for name in ("threads", "ms", "spread", "default / record", "records"):
        table.add_column(name, justify="right")
    warnings: list[str] = []
    for of_target in _read(directory, target):
        for key, of_problem in sorted(of_target.by_problem.items()):
            warnings += [warning for record in of_problem if (warning := replay_error(record))]
            groups = of_target.groups(key)
            if not groups:
                table.add_row(key, of_target.target, "nothing ran", *[""] * 6, str(len(of_problem)))
            for record, *others in groups:
                knobs = " ".join(f"{name}={value}" for name, value in record.schedule.knobs)
                ratio = f"{record.default_ratio:.2f}" if record.default_ratio else ""
                times = (milliseconds(record.seconds), f"{100 * record.spread:.0f} %", ratio, str(1 + len(others)))
                conditions = (str(record.host), str(record.threads))
                table.add_row(key, record.target, record.algorithm, knobs, *conditions, *times)
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
    help="Records to keep of each problem, microarchitecture and algorithm.",
)
def prune(directory: Path, target: str | None, keep: int) -> None:
    """Keep the fastest of each problem, microarchitecture and algorithm in DIRECTORY, under the newest conditions.

    Records of unknown microarchitectures go where there are others of the problem.
    """
    log = _log(directory)
    for name in [target] if target else log.targets():
        before, after = log.prune(name, keep)
        click.echo(f"{directory}, {name}: {after} of {before} records kept")


@logs.command()
@click.argument("directory", type=_EXISTING)
@_TARGET
@click.option("--jobs", type=click.IntRange(1), help="Processes that compile; by default as many as CPUs.")
@click.option("--threads", type=click.IntRange(1), default=1, show_default=True, help="Threads of the calls timed.")
def remeasure(directory: Path, target: str | None, jobs: int | None, threads: int) -> None:
    """Measure the records in DIRECTORY again on this machine, in turns with the default; keep the new records there.

    Without --target, of every level of CPUs that this machine runs. An interrupted run continues with the same command:
    problems that are done by these kernels on this CPU are not measured again.
    """
    from tvm_deconv.tuning.remeasure import remeasure as run

    runnable = [level.name for level in supported(detect_host().features)]
    names = [target] if target else [name for name in _log(directory).targets() if name in runnable]
    if not names:
        raise click.ClickException(f"{directory}: no records for {', '.join(runnable)}, which this machine runs")
    found: list[Remeasured] = []
    try:
        with progress_bar("measuring", "state") as progress:

            def note(one: Remeasured) -> None:
                found.append(one)
                progress.update(progress.task_ids[0], completed=one.done, total=one.total, state=one.problem)

            run(directory, names, threads=threads, jobs=jobs, on_problem=note)
    except KeyboardInterrupt:
        raise click.ClickException(f"stopped after {len(found)} problems; the same command continues") from None
    finally:
        console().print(_remeasured(directory, found))


def _remeasured(directory: Path, found: Sequence[Remeasured]) -> Table:
    table = Table(title=f"{directory}: {len(found)} problems", title_justify="left")
    for name in ("problem", "target", "algorithm"):
        table.add_column(name, overflow="fold")
    for name in ("default ms", "record ms", "default / record", "kept"):
        table.add_column(name, justify="right")
    for one in found:
        best, default = one.best, one.default
        table.add_row(
            one.problem,
            one.target,
            best.algorithm if best else "nothing ran",
            milliseconds(default.seconds if default else None),
            milliseconds(best.seconds if best else None),
            f"{best.default_ratio:.2f}" if best and best.default_ratio else "",
            one.kept,
        )
    return table
