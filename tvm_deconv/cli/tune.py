"""The commands of tuning: tune, and logs merge, best, prune."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tvm_deconv.compiler.records import Log, Records, best, read
from tvm_deconv.problem import Problem
from tvm_deconv.targets import get, known_targets

if TYPE_CHECKING:
    from tvm_deconv.tuning import Trial, Tuned

_Command = TypeVar("_Command", bound=Callable[..., None])
LOGS = click.Path(file_okay=False, path_type=Path)
_KEPT = click.Path(exists=True, file_okay=False, path_type=Path)


def _checked(_context: click.Context, _parameter: click.Parameter, name: str | None) -> str | None:
    return name and get(name).name


_TARGET = click.option("--target", metavar="TARGET", callback=_checked, help="Only records for this target.")


def searching(*known: str, target: str) -> Callable[[_Command], _Command]:
    """Return the decorator with what compile and tune are both given: SOURCE..., `known` targets, and how to search."""
    options = (
        click.argument("sources", metavar="SOURCE...", nargs=-1, required=True, type=click.Path(path_type=Path)),
        click.option(
            "--target",
            "targets",
            metavar="TARGET",
            multiple=True,
            default=["native"],
            show_default=True,
            help=f"{target}; may be given several times. {', '.join(known)}, or a microarchitecture, as LLVM calls it: "
            "znver4.",
        ),
        click.option("--jobs", type=click.IntRange(1), help="Processes that compile; as many as CPUs where not given."),
        click.option(
            "--algorithm",
            "algorithms",
            metavar="NAME",
            multiple=True,
            help="Use this algorithm only; may be given several times. All where not given.",
        ),
        click.option(
            "--rpc-tracker", metavar="HOST:PORT", help="TVM tracker whose servers measure, in place of this machine."
        ),
        click.option(
            "--rpc-key", metavar="KEY", help="Of the tracker's servers to use, which must be machines of one kind."
        ),
    )

    def decorate(command: _Command) -> _Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def _milliseconds(seconds: float | None) -> str:
    return "" if seconds is None or math.isnan(seconds) else f"{1e3 * seconds:.4g}"


@contextlib.contextmanager
def _trials_shown(console: Console) -> Iterator[Callable[[Trial], None]]:
    """Show what a search does, on a terminal only: a bar, and the fastest of the last problem against its floor."""
    bar = (TextColumn("tuning"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    columns = (*bar, TextColumn("{task.fields[at]}"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("tuning", total=None, at="")

        def note(trial: Trial) -> None:
            fastest = trial.best.seconds if trial.best else None
            at = (
                f"best {_milliseconds(fastest)} ms, floor {_milliseconds(trial.floor)} ms" if fastest else "no time yet"
            )
            progress.update(task, completed=trial.done, total=trial.total, at=f"{at}: {trial.problem.key}")

        yield note


def search(
    problems: dict[Problem, list[str]],
    targets: Sequence[str],
    trials: int,
    logs: Path,
    **how: Any,
) -> None:
    """Tune `problems`, by the names of their layers, and print what came of each; `how` is for `tuning.tune`.

    An interrupt ends the command; what was measured is kept.
    """
    from tvm_deconv.cli.main import _console
    from tvm_deconv.tuning import tune as run

    try:
        with _trials_shown(_console(stderr=True)) as note:
            tuned = run(problems, targets, trials, logs, on_trial=note, **how)
    except KeyboardInterrupt:
        said = f"stopped; what was measured is in {logs}, and the same command continues from there"
        raise click.ClickException(said) from None
    _console().print(_found(problems, logs, tuned))
    for warning in dict.fromkeys(warning for found in tuned for warning in found.warnings):
        click.echo(warning, err=True)


def _found(problems: dict[Problem, list[str]], logs: Path, tuned: Sequence[Tuned]) -> Table:
    names: dict[str, list[str]] = {}
    for problem, layers in problems.items():
        for key in problem.artifact_keys:
            names.setdefault(key, []).extend(layers)
    table = Table(title=f"{logs}: {sum(found.trials for found in tuned)} trials", title_justify="left")
    for name in ("layer", "target", "algorithm"):
        table.add_column(name, overflow="fold")
    for name in ("trials", "default ms", "best ms", "gain", "floor ms", "of floor"):
        table.add_column(name, justify="right")
    for found in tuned:
        before = found.default.seconds if found.default else None
        after = found.best.seconds if found.best else None
        table.add_row(
            ", ".join(names[found.problem.artifact_key]) or found.problem.key,
            found.target,
            found.best.algorithm if found.best else "nothing ran",
            str(found.trials),
            _milliseconds(before),
            _milliseconds(after),
            f"{before / after:.2f}" if before and after else "",
            _milliseconds(found.floor),
            f"{100 * found.floor / after:.0f} %" if after and not math.isnan(found.floor) else "",
        )
    return table


@click.command()
@searching(*known_targets(), target="CPU that the machine that measures must be, or CUDA device that it must have")
@click.option("--trials", type=click.IntRange(0), default=64, show_default=True, help="Per problem on average.")
@click.option("--logs", type=LOGS, required=True, help="Directory of the results; what is there is not measured again.")
@click.option("--threads", type=click.IntRange(1), default=1, show_default=True, help="Of the calls that are timed.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Of the search and the arrays.")
@click.option(
    "--timeout",
    type=click.FloatRange(0, min_open=True),
    default=30.0,
    show_default=True,
    help="Seconds after which a candidate is given up.",
)
def tune(
    sources: Sequence[Path],
    targets: Sequence[str],
    trials: int,
    logs: Path,
    algorithms: Sequence[str],
    **how: Any,
) -> None:
    """Search for fast schedules of every transposed convolution of each SOURCE, and keep what is measured.

    Trials go where most is to be gained. It may be stopped at any time and started again: nothing is measured twice.
    """
    from tvm_deconv.cli.main import _collect, _scan

    search(_collect(_scan(sources)), targets, trials, logs, algorithms=algorithms or None, **how)


@click.group()
def logs() -> None:
    """Merge, read and shorten tuning logs."""


def _read(root: Path, target: str | None = None) -> list[Records]:
    """Read a log; what does not read is said."""
    found = [read(name, root) for name in ([target] if target else Log(root).targets())]
    for records in found:
        for warning in records.warnings:
            click.echo(warning, err=True)
    return found


@logs.command()
@click.argument("directory", type=LOGS)
@click.argument("others", metavar="OTHER...", nargs=-1, required=True, type=_KEPT)
def merge(directory: Path, others: Sequence[Path]) -> None:
    """Add the records of every OTHER directory to DIRECTORY, sorted.

    Of records that tried the same under the same conditions the newest stays; the order of directories says nothing.
    """
    log = Log(directory)
    kept = [record for records in _read(directory) for record in records]
    log.merge([*kept, *(record for other in others for records in _read(other) for record in records)])
    after = sum(1 for records in _read(directory) for _ in records)
    click.echo(f"{directory}: {len(kept)} records, {after} with those of {', '.join(map(str, others))}")


@logs.command(name="best")
@click.argument("directory", type=_KEPT)
@_TARGET
def best_(directory: Path, target: str | None) -> None:
    """Print the fastest record of every problem in DIRECTORY, and name the records that no longer replay."""
    from tvm_deconv.cli.main import _console
    from tvm_deconv.compiler.selection import replay_error

    table = Table(title=str(directory), title_justify="left")
    for name in ("problem", "target", "algorithm", "knobs", "CPU"):
        table.add_column(name, overflow="fold")
    for name in ("threads", "ms", "spread", "records"):
        table.add_column(name, justify="right")
    said: list[str] = []
    for records in _read(directory, target):
        for key, found in sorted(records.by_problem.items()):
            said += [warning for record in found if (warning := replay_error(record))]
            record = best(key, records)
            if record is None:
                table.add_row(key, records.target, "nothing ran", "", "", "", "", "", str(len(found)))
                continue
            knobs = " ".join(f"{name}={value}" for name, value in record.schedule.knobs)
            measured = (str(record.threads), _milliseconds(record.seconds), f"{100 * record.spread:.0f} %")
            table.add_row(key, record.target, record.algorithm, knobs, record.host, *measured, str(len(found)))
    _console().print(table)
    for warning in dict.fromkeys(said):
        click.echo(warning, err=True)


@logs.command()
@click.argument("directory", type=_KEPT)
@_TARGET
@click.option("--keep", type=click.IntRange(1), default=2, show_default=True, help="Of each problem and algorithm.")
def prune(directory: Path, target: str | None, keep: int) -> None:
    """Keep the fastest of each problem and algorithm in DIRECTORY, under the newest conditions; drop the others."""
    log = Log(directory)
    for name in [target] if target else log.targets():
        before, after = log.prune(name, keep)
        click.echo(f"{directory}, {name}: {after} of {before} records kept")
