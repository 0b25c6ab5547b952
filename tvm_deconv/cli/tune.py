"""The command tune, and the options and the search that it shares with compile."""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from rich.table import Table

from tvm_deconv.cli.common import console, echo_warnings, problems_of, progress_bar, scan_sources
from tvm_deconv.problem import Problem
from tvm_deconv.targets import known_targets

if TYPE_CHECKING:
    from tvm_deconv.tuning import Trial, Tuned

_Command = TypeVar("_Command", bound=Callable[..., None])
_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}
LOGS = click.Path(file_okay=False, path_type=Path)
TRIALS = 64


def _seconds(_: click.Context, option: click.Parameter, value: str | None) -> float | None:
    """Return the seconds of a time such as 90, 90s, 1.5m or 2h."""
    if value is None:
        return None
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)([smh]?)", value, re.ASCII)
    if match is None or not float(match[1]):
        raise click.BadParameter(f"{value!r}: must be a time such as 90s, 1.5m or 2h", param=option)
    return float(match[1]) * _UNITS[match[2]]


BUDGET = click.option(
    "--budget", metavar="TIME", callback=_seconds, help="Time that the search may take, such as 60s, 5m or 2h."
)


def search_options(*known: str, target: str) -> Callable[[_Command], _Command]:
    """Return the decorator that adds the parameters of compile and tune: SOURCE..., targets, and how to search.

    `known` are names of targets and `target` says what a target is, for the help.
    """
    options = (
        click.argument("sources", metavar="SOURCE...", nargs=-1, required=True, type=click.Path(path_type=Path)),
        click.option(
            "--target",
            "targets",
            metavar="TARGET",
            multiple=True,
            default=["native"],
            show_default=True,
            help=f"{target}; may be given several times. {', '.join(known)}, or a microarchitecture by LLVM's name, "
            "such as znver4.",
        ),
        click.option(
            "--extent",
            "extents",
            metavar="NAME=LOW..HIGH",
            multiple=True,
            callback=_ranges,
            help="Range of an extent that a model leaves free, by its name or as INPUT.AXIS; schedules are chosen for "
            "lengths in it. May be given several times.",
        ),
        click.option("--jobs", type=click.IntRange(1), help="Processes that compile; by default as many as CPUs."),
        click.option(
            "--algorithm",
            "algorithms",
            metavar="NAME",
            multiple=True,
            help="Use this algorithm only; may be given several times. By default all.",
        ),
        click.option(
            "--rpc-tracker", metavar="[HOST:]PORT", help="TVM tracker whose servers measure, in place of this machine."
        ),
        click.option("--rpc-key", metavar="KEY", help="Key of the tracker's servers to use: machines of one kind."),
    )

    def decorate(command: _Command) -> _Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def _ranges(_: click.Context, option: click.Parameter, values: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Return the ranges that NAME=LOW..HIGH texts give, by their names."""
    ranges = {}
    for value in values:
        match = re.fullmatch(r"(.+)=(\d{1,10})\.\.(\d{1,10})", value, re.ASCII)
        if match is None:
            raise click.BadParameter(f"{value!r}: must be NAME=LOW..HIGH, such as frames=1..2000", param=option)
        ranges[match[1]] = int(match[2]), int(match[3])
    return ranges


def milliseconds(seconds: float | None) -> str:
    """Return a time in ms for a table, or nothing if it is not known."""
    return "" if seconds is None or math.isnan(seconds) else f"{1e3 * seconds:.4g}"


def search(problems: dict[Problem, list[str]], targets: Sequence[str], trials: int, logs: Path, **options: Any) -> None:
    """Tune `problems`, given with the names of their layers, and print the results; `options` are `tuning.tune`'s.

    An interrupt ends the command; the measurements are kept.
    """
    from tvm_deconv.tuning import tune as run

    try:
        with progress_bar("tuning", "state") as progress:

            def note(trial: Trial) -> None:
                progress.update(progress.task_ids[0], completed=trial.done, total=trial.total, state=_state(trial))

            tuned = run(problems, targets, trials, logs, on_trial=note, **options)
    except KeyboardInterrupt:
        text = f"stopped; what was measured is in {logs}, and the same command continues from there"
        raise click.ClickException(text) from None
    console().print(_results(problems, logs, tuned))
    echo_warnings(warning for result in tuned for warning in result.warnings)


def _state(trial: Trial) -> str:
    """Return the gain so far, the time left, and the fastest of the last problem against its floor."""
    fastest = trial.best.seconds if trial.best else None
    times = f"best {milliseconds(fastest)} ms, floor {milliseconds(trial.floor)} ms" if fastest else "no time yet"
    ahead = f"gain {trial.gain:.2f}, at most {datetime.timedelta(seconds=round(trial.left))} left"
    return f"{ahead}; {times}: {trial.problem.key}"


def _results(problems: dict[Problem, list[str]], logs: Path, tuned: Sequence[Tuned]) -> Table:
    names: dict[str, list[str]] = {}
    for problem, layers in problems.items():
        for key in problem.artifact_keys:
            names.setdefault(key, []).extend(layers)
    table = Table(title=f"{logs}: {sum(result.trials for result in tuned)} trials", title_justify="left")
    for name in ("layer", "target", "algorithm", "decides"):
        table.add_column(name, overflow="fold")
    for name in ("trials", "default ms", "best ms", "gain", "floor ms", "floor / best"):
        table.add_column(name, justify="right")
    table.add_column("ended")
    for result in tuned:
        before = result.default.seconds if result.default else None
        after = result.best.seconds if result.best else None
        table.add_row(
            ", ".join(names[result.problem.artifact_key]) or result.problem.key,
            result.target,
            result.best.algorithm if result.best else "nothing ran",
            "default" if result.best is result.default else "record",
            str(result.trials),
            milliseconds(before),
            milliseconds(after),
            f"{before / after:.2f}" if before and after else "",
            milliseconds(result.floor),
            f"{100 * result.floor / after:.0f} %" if after and not math.isnan(result.floor) else "",
            result.ended,
        )
    return table


@click.command()
@search_options(*known_targets(), target="CPU that the machine that measures must be, or CUDA device that it must have")
@BUDGET
@click.option(
    "--trials",
    type=click.IntRange(0),
    default=TRIALS,
    show_default=True,
    help="Trials per problem on average, at most.",
)
@click.option("--logs", type=LOGS, required=True, help="Directory of the results; trials found there are not repeated.")
@click.option(
    "--threads", type=click.IntRange(1), default=1, show_default=True, help="Threads of the calls that are timed."
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of the arrays.")
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
    extents: Mapping[str, tuple[int, int]],
    trials: int,
    logs: Path,
    algorithms: Sequence[str],
    **options: Any,
) -> None:
    """Search for fast schedules of every transposed convolution of each SOURCE, and keep the measurements.

    Trials go where most is to be gained, and end where nothing is. A search may be stopped at any time and started
    again: nothing is measured twice.
    """
    search(problems_of(scan_sources(sources, extents)), targets, trials, logs, algorithms=algorithms or None, **options)
