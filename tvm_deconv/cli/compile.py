"""The command compile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import click
from rich.table import Table

from tvm_deconv.cli.common import build_artifacts, console, problems_of, scan_sources
from tvm_deconv.cli.tune import BUDGET, LOGS, TRIALS, search, search_options
from tvm_deconv.frontends import FoundLayer, coverage_table, write_weights
from tvm_deconv.onnxruntime.library import write as write_operator
from tvm_deconv.targets import detect_host, known_targets, native

SECONDS = 10.0  # of a search by --tune, for each problem
OWN_LOGS = "tuning"


@click.command()
@search_options(*known_targets(), target="CPU or CUDA devices to compile for")
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("artifacts"),
    show_default=True,
    help="Directory of the artifacts.",
)
@click.option(
    "--tune",
    "tunes",
    is_flag=True,
    help=f"Search for fast schedules first, as tune does: {SECONDS:g} s for each problem.",
)
@BUDGET
@click.option(
    "--trials", type=click.IntRange(1), help=f"Trials per problem of the search, at most; by default {TRIALS}."
)
@click.option(
    "--logs",
    type=LOGS,
    help=f"Tuning logs to follow besides the installed ones, and of the search; by default OUTPUT/{OWN_LOGS}.",
)
def compile(
    sources: Sequence[Path],
    targets: Sequence[str],
    extents: Mapping[str, tuple[int, int]],
    output: Path,
    jobs: int | None,
    algorithms: Sequence[str],
    tunes: bool,
    budget: float | None,
    trials: int | None,
    logs: Path | None,
    rpc_tracker: str | None,
    rpc_key: str | None,
) -> None:
    """Compile every transposed convolution of each SOURCE.

    A SOURCE is an OpenVINO IR (.xml), an ONNX model (.onnx) or a list of problems (.json). Artifacts that are up to
    date stay. Constant filters and biases are written beside the artifacts, as SOURCE.safetensors, and for ONNX models
    the operator by which ONNX Runtime calls layers.
    """
    tunes = tunes or budget is not None or trials is not None
    if rpc_tracker and not tunes:
        raise click.UsageError("--rpc-tracker needs --tune, which is what its servers measure for")
    logs = logs or output / OWN_LOGS
    taken: set[str] = set()
    scanned = scan_sources(sources, extents)
    for source, layers in scanned:
        console().print(_coverage(source, layers))
        weights = _free_name(source.stem, taken)
        if write_weights(layers, output / weights):
            click.echo(f"weights: {output / weights}")
    problems = problems_of(scanned)
    if tunes:
        if budget is None and trials is None:
            budget = SECONDS * len(problems) * len(targets)
        search(
            problems,
            [native(detect_host()).name if name == "native" else name for name in targets],
            trials or TRIALS,
            logs,
            budget=budget,
            jobs=jobs,
            algorithms=algorithms or None,
            rpc_tracker=rpc_tracker,
            rpc_key=rpc_key,
        )
    if any(source.suffix.lower() == ".onnx" for source in sources):
        output.mkdir(parents=True, exist_ok=True)
        write_operator(output)
    build_artifacts(problems, targets, output, jobs=jobs, logs=logs, algorithms=algorithms or None)


def _free_name(stem: str, taken: set[str]) -> str:
    """Return a name for a file of weights that is not among `taken`, and add it."""
    names = (f"{stem}{suffix}.safetensors" for suffix in ("", *(f"_{number}" for number in range(2, len(taken) + 3))))
    name = next(name for name in names if name not in taken)
    taken.add(name)
    return name


def _coverage(source: Path, layers: Sequence[FoundLayer]) -> Table:
    """Return the table of the layers of a source, and why those that are not covered are not."""
    rows = coverage_table(layers)
    covered = sum(1 for row in rows if row.problem)
    table = Table(title=f"{source}: {covered} of {len(rows)} layers covered", title_justify="left")
    for name in ("layer", "operator", "covered", "problem or reason"):
        table.add_column(name, overflow="fold")
    table.add_column("GMAC", justify="right")
    for row in rows:
        if row.problem:
            said = f"yes, {row.notes}" if row.notes else "yes"
            table.add_row(row.name, row.operator, said, row.problem, f"{1e-9 * row.macs:.3g}")
        else:
            table.add_row(row.name, row.operator, "no", row.reason, "")
    return table
