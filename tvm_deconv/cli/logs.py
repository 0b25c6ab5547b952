"""The commands on tuning logs: logs merge, logs best, logs prune, logs remeasure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tvm_deconv.cli.common import Stopped, echo_warnings, progress_bar, target_of
from tvm_deconv.cli.output import JSON, KEYS, Column, Table, echo, echo_json, warn
from tvm_deconv.cli.tune import LOGS, milliseconds
from tvm_deconv.problem import Problem
from tvm_deconv.problem.words import words
from tvm_deconv.targets import detect_host, supported

if TYPE_CHECKING:
    from tvm_deconv.compiler.records import Log, Record, Records
    from tvm_deconv.tuning.remeasure import Remeasured

_EXISTING = click.Path(exists=True, file_okay=False, path_type=Path)


_TARGET = click.option("--target", metavar="TARGET", callback=target_of, help="Only records for this target.")


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
@JSON
def merge(directory: Path, others: Sequence[Path], as_json: bool) -> None:
    """Add the records of every OTHER directory to DIRECTORY, sorted.

    Of records of the same trial under the same conditions the newest stays, whatever the order of directories.
    """
    log = _log(directory)
    before = [record for of_target in _read(directory) for record in of_target]
    log.merge([*before, *(record for other in others for of_target in _read(other) for record in of_target)])
    after = sum(1 for of_target in _read(directory) for _ in of_target)
    if as_json:
        echo_json({"directory": str(directory), "before": len(before), "after": after})
    else:
        echo(f"{directory}: {len(before)} records, {after} with those of {', '.join(map(str, others))}")


_BEST = (
    Column("target", spare=True), Column("algorithm"), Column("knobs", spare=True), Column("CPU", spare=True),
    Column("threads", True, True), Column("ms", True), Column("spread", True, True), Column("default / record", True),
    Column("records", True, True),
)  # fmt: skip


@logs.command()
@click.argument("directory", type=_EXISTING)
@_TARGET
@KEYS
@JSON
def best(directory: Path, target: str | None, keys: bool, as_json: bool) -> None:
    """Print the fastest records in DIRECTORY.

    One for every problem and microarchitecture; records that do not replay are named.
    """
    from tvm_deconv.compiler.selection import replay_error

    table = Table(str(directory), [Column("shape"), *([Column("problem")] if keys else []), *_BEST])
    warnings: list[str] = []
    found: list[dict[str, object]] = []
    for of_target in _read(directory, target):
        for key, of_problem in sorted(of_target.by_problem.items()):
            warnings += [warning for record in of_problem if (warning := replay_error(record))]
            groups = of_target.groups(key)
            shape = [words(Problem.from_key(key)), *([key] if keys else [])]
            if not groups:
                table.add(*shape, of_target.target, "nothing ran", *[""] * 6, str(len(of_problem)))
            for record, *others in groups:
                found.append(_record_as_json(key, record, 1 + len(others)))
                table.add(*shape, *_record_cells(record, 1 + len(others)))
    if as_json:
        echo_json(found)
    else:
        table.show()
    echo_warnings(warnings)


def _record_cells(record: Record, count: int) -> list[str]:
    """Return the cells of a record, the best of `count`, under the columns of `best`."""
    knobs = " ".join(f"{name}={value}" for name, value in record.schedule.knobs)
    ratio = f"{record.default_ratio:.2f}" if record.default_ratio else ""
    times = (milliseconds(record.seconds), f"{100 * record.spread:.0f} %", ratio, str(count))
    return [record.target, record.algorithm, knobs, str(record.host), str(record.threads), *times]


def _record_as_json(key: str, record: Record, count: int) -> dict[str, object]:
    return {
        "problem": key,
        "target": record.target,
        "algorithm": record.algorithm,
        "knobs": dict(record.schedule.knobs),
        "cpu": str(record.host),
        "threads": record.threads,
        "seconds": record.seconds,
        "spread": record.spread,
        "default_ratio": record.default_ratio or None,
        "records": count,
    }


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
@JSON
def prune(directory: Path, target: str | None, keep: int, as_json: bool) -> None:
    """Keep only the fastest records in DIRECTORY.

    Those of each problem, microarchitecture and algorithm, under the newest conditions. Records of unknown
    microarchitectures go where there are others of the problem.
    """
    log = _log(directory)
    pruned = {name: log.prune(name, keep) for name in ([target] if target else log.targets())}
    if as_json:
        echo_json({name: {"before": before, "after": after} for name, (before, after) in pruned.items()})
        return
    for name, (before, after) in pruned.items():
        echo(f"{directory}, {name}: {after} of {before} records kept")


@logs.command()
@click.argument("directory", type=_EXISTING)
@_TARGET
@click.option("--jobs", type=click.IntRange(1), help="Processes that compile; by default as many as CPUs.")
@click.option("--threads", type=click.IntRange(1), default=1, show_default=True, help="Threads of the calls timed.")
@KEYS
@JSON
def remeasure(directory: Path, target: str | None, jobs: int | None, threads: int, keys: bool, as_json: bool) -> None:
    """Measure the records in DIRECTORY again, for today's kernels.

    Records of which all code is what was measured on such a CPU stay as they are. Others take turns with the default.
    It is done on this machine; without --target, for every level of CPUs that it runs. For a TARGET that it does not
    run nothing is measured: records of other code are left for a machine that does. An interrupted run continues with
    the same command.
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
                progress.update(
                    progress.task_ids[0],
                    completed=one.done,
                    total=one.total,
                    state=words(Problem.from_key(one.problem)),
                )

            run(directory, names, threads=threads, jobs=jobs, on_problem=note)
    except KeyboardInterrupt:
        raise Stopped(f"{len(found)} problems are done, and the same command continues") from None
    finally:
        if as_json:
            echo_json([_remeasured_as_json(one) for one in found])
        else:
            _remeasured(directory, found, keys).show()
        echo_warnings(warning for one in found for warning in one.warnings)
        left = sum(1 for one in found if one.status == "left")
        if left:
            warn(f"{left} of {len(found)} problems are left for a machine that runs {target}")


def _remeasured_as_json(one: Remeasured) -> dict[str, object]:
    return {
        "problem": one.problem,
        "target": one.target,
        "algorithm": one.best.algorithm if one.best else None,
        "default_seconds": one.default.seconds if one.default else None,
        "record_seconds": one.best.seconds if one.best else None,
        "default_ratio": (one.best.default_ratio or None) if one.best else None,
        "kept": one.kept,
        "status": one.status,
    }


def _remeasured(directory: Path, found: Sequence[Remeasured], keys: bool) -> Table:
    columns = [
        Column("shape"),
        *([Column("problem")] if keys else []),
        Column("target", spare=True),
        Column("algorithm"),
    ]
    columns += [Column("default ms", True, True), Column("record ms", True), Column("default / record", True)]
    table = Table(f"{directory}: {len(found)} problems", [*columns, Column("status", True), Column("kept", True)])
    for one in found:
        best, default = one.best, one.default
        table.add(
            *[words(Problem.from_key(one.problem)), *([one.problem] if keys else [])],
            one.target,
            best.algorithm if best else "nothing ran",
            milliseconds(default.seconds if default else None),
            milliseconds(best.seconds if best else None),
            f"{best.default_ratio:.2f}" if best and best.default_ratio else "",
            one.status,
            one.kept,
        )
    return table
