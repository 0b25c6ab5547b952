"""The command tune, and what compile shares with it: options, the search, its results."""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from tvm_deconv.cli.common import (
    Stopped,
    echo_warnings,
    problems_of,
    progress_bar,
    removed_if_stopped,
    scan_sources,
    target_of,
)
from tvm_deconv.cli.output import JSON, KEYS, Column, Names, Table, echo_json
from tvm_deconv.errors import SourceError
from tvm_deconv.frontends.extents import checked_ranges
from tvm_deconv.problem import FAST, PRECISIONS, Problem
from tvm_deconv.problem.problem import DATA_FORMATS
from tvm_deconv.problem.words import words
from tvm_deconv.targets import known_targets

if TYPE_CHECKING:
    from tvm_deconv.tuning import Trial, Tuned

#: The algorithms of all backends, whose modules need TVM.
ALGORITHMS = (
    "winograd", "amx", "amx_rows", "amx_winograd", "dot", "dot_channels", "dot_folded", "dot_inputs", "dot_rows",
    "dot_strassen", "dot_winograd", "matrix", "strassen", "winograd_rows", "direct_channels", "direct_folded",
    "direct_groups", "direct_inputs", "direct_rows", "col2im",
    "cuda_narrow", "cuda_tensor", "cuda_merged", "cuda_wgmma", "cuda_gathered", "cuda_held", "cuda_held_merged",
    "cuda_wgmma_turned", "cuda_held_turned", "cuda_held_merged_turned",
    "cuda_product", "cuda_generic",
)  # fmt: skip
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
            callback=_targets,
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
        click.option(
            "--layout",
            "layouts",
            multiple=True,
            type=click.Choice(DATA_FORMATS),
            help="Take layers in this layout, not in that of the source. May be given twice, for both.",
        ),
        click.option(
            "--precision",
            type=click.Choice([*PRECISIONS, FAST]),
            help="Precision of float32 layers, in place of the source's. CPUs compute all of them as ieee.",
        ),
        click.option("--jobs", type=click.IntRange(1), help="Processes that compile; by default as many as CPUs."),
        click.option(
            "--algorithm",
            "algorithms",
            metavar="NAME",
            multiple=True,
            type=click.Choice(ALGORITHMS),
            help="Use this algorithm only; may be given several times. Of several targets, those that have none of the "
            f"named ones use all of theirs; one must have one. By default all: {', '.join(ALGORITHMS)}.",
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


def _targets(context: click.Context, option: click.Parameter, names: Sequence[str]) -> list[str]:
    """Return the names of the targets that are meant, each once."""
    return list(dict.fromkeys(str(target_of(context, option, name)) for name in names))


def _ranges(_: click.Context, option: click.Parameter, values: Sequence[str]) -> Mapping[str, tuple[int, int]]:
    """Return the ranges that NAME=LOW..HIGH texts give, by their names."""
    ranges = {}
    for value in values:
        match = re.fullmatch(r"(.+)=(\d{1,10})\.\.(\d{1,10})", value, re.ASCII)
        if match is None:
            raise click.BadParameter(f"{value!r}: must be NAME=LOW..HIGH, such as frames=1..2000", param=option)
        ranges[match[1]] = int(match[2]), int(match[3])
    try:
        return checked_ranges(ranges)
    except SourceError as error:
        raise click.BadParameter(str(error), param=option) from None


def milliseconds(seconds: float | None) -> str:
    """Return a time in ms for a table, or nothing if it is not known."""
    return "" if seconds is None or math.isnan(seconds) else f"{1e3 * seconds:.4g}"


def search(
    problems: dict[Problem, list[str]], targets: Sequence[str], trials: int, logs: Path, **options: Any
) -> list[Tuned]:
    """Tune `problems` with a bar and return the results; `options` are `tuning.tune`'s.

    An interrupt ends the command; the measurements are kept, and no directory without any.
    """
    from tvm_deconv.tuning import tune as run

    def measured() -> bool:
        return any(logs.glob("*/*.jsonl"))

    try:
        with removed_if_stopped(logs, measured), progress_bar("tuning", "state") as progress:

            def note(trial: Trial) -> None:
                progress.update(progress.task_ids[0], completed=trial.done, total=trial.total, state=_state(trial))

            tuned = run(problems, targets, trials, logs, on_trial=note, **options)
    except KeyboardInterrupt:
        left = f"what was measured is in {logs}, and the same command continues from there"
        raise Stopped(left if measured() else "nothing was measured") from None
    echo_warnings(warning for result in tuned for warning in result.warnings)
    return tuned


def _state(trial: Trial) -> str:
    """Return the gain so far, the time left, and the fastest of the last problem against its floor."""
    fastest = trial.best.seconds if trial.best else None
    times = f"best {milliseconds(fastest)} ms, floor {milliseconds(trial.floor)} ms" if fastest else "no time yet"
    ahead = f"gain {trial.gain:.2f}, at most {datetime.timedelta(seconds=round(trial.left))} left"
    return f"{ahead}; {times}: {words(trial.problem)}"


_NUMBERS = ("trials", "default ms", "best ms", "gain", "floor ms", "floor / best")


def show_tuned(problems: Mapping[Problem, Sequence[str]], logs: Path, tuned: Sequence[Tuned], keys: bool) -> None:
    """Print the results of a search for `problems`, given with the names of their layers."""
    named, names = _names(problems), Names(keys)
    columns = [*names.columns, Column("target", spare=True), Column("algorithm"), Column("decides")]
    numbers = [Column(name, right=True, spare=name not in ("best ms", "gain")) for name in _NUMBERS]
    table = Table(
        f"{logs}: {sum(result.trials for result in tuned)} trials", [*columns, *numbers, Column("ended", spare=True)]
    )
    for result in tuned:
        before, after = _times(result)
        table.add(
            *names.cells(named[result.problem.artifact_key], result.problem),
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
    table.show()


def _names(problems: Mapping[Problem, Sequence[str]]) -> dict[str, list[str]]:
    """Return the names of layers by the keys of what is searched for them: variants, in what targets compute."""
    names: dict[str, list[str]] = {}
    for problem, layers in problems.items():
        for variant in problem.variants:
            for key in variant.artifact_keys:
                names.setdefault(key, []).extend(layers)
    return names


def _times(result: Tuned) -> tuple[float | None, float | None]:
    """Return the seconds of the default and of the best, None for what did not run."""
    return result.default.seconds if result.default else None, result.best.seconds if result.best else None


def _as_json(problems: Mapping[Problem, Sequence[str]], logs: Path, tuned: Sequence[Tuned]) -> dict[str, Any]:
    named, rows = _names(problems), []
    for result in tuned:
        before, after = _times(result)
        rows.append(
            {
                "layers": named[result.problem.artifact_key],
                "problem": result.problem.key,
                "target": result.target,
                "algorithm": result.best.algorithm if result.best else None,
                "record_decides": result.best is not result.default,
                "trials": result.trials,
                "default_seconds": before,
                "best_seconds": after,
                "ended": result.ended,
                "floor_seconds": None if math.isnan(result.floor) else result.floor,
            }
        )
    return {"logs": str(logs), "problems": rows}


@click.command()
@search_options(*known_targets(), target="CPU that the machine that measures must be, or CUDA device that it must have")
@BUDGET
@click.option(
    "--trials",
    type=click.IntRange(1),
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
@KEYS
@JSON
def tune(
    sources: Sequence[Path],
    targets: Sequence[str],
    extents: Mapping[str, tuple[int, int]],
    layouts: Sequence[str],
    precision: str | None,
    trials: int,
    logs: Path,
    algorithms: Sequence[str],
    keys: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Search for fast schedules of every layer of each SOURCE.

    The measurements are kept, for compile --logs. Trials go where most is to be gained, and end where nothing is. A
    search may be stopped at any time and started again: nothing is measured twice.
    """
    problems = problems_of(scan_sources(sources, extents), layouts, precision)
    tuned = search(problems, targets, trials, logs, algorithms=algorithms or None, **options)
    if as_json:
        echo_json(_as_json(problems, logs, tuned))
    else:
        show_tuned(problems, logs, tuned, keys)
