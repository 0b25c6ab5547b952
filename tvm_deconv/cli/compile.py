"""The command compile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import click

from tvm_deconv.cli.common import Builds, Scanned, problems_of, scan_sources
from tvm_deconv.cli.output import JSON, KEYS, Column, Table, divide, echo_json, say, warn
from tvm_deconv.cli.tune import BUDGET, LOGS, TRIALS, search, search_options, show_tuned
from tvm_deconv.frontends import FoundLayer, coverage_table, weights_of, write_weights
from tvm_deconv.onnxruntime.library import write as write_operator
from tvm_deconv.problem.words import words
from tvm_deconv.targets import known_targets

SECONDS = 10.0  # of a search by --tune, for each problem
OWN_LOGS = "tuning"


@click.command()
@search_options(*known_targets(), target="CPU or CUDA devices to compile for")
@click.option(
    "--output",
    "-o",
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
@click.option("--strict", is_flag=True, help="Build nothing, and exit with 1, if a layer is not covered.")
@KEYS
@JSON
def compile(
    sources: Sequence[Path],
    targets: Sequence[str],
    extents: Mapping[str, tuple[int, int]],
    layouts: Sequence[str],
    precision: str | None,
    output: Path,
    jobs: int | None,
    algorithms: Sequence[str],
    tunes: bool,
    budget: float | None,
    trials: int | None,
    logs: Path | None,
    rpc_tracker: str | None,
    rpc_key: str | None,
    strict: bool,
    keys: bool,
    as_json: bool,
) -> None:
    """Compile every transposed convolution of each SOURCE.

    A SOURCE is an OpenVINO IR (.xml), an ONNX model (.onnx) or a list of problems (.json). Artifacts that are up to
    date stay. Constant filters and biases are written beside the artifacts, as SOURCE.safetensors, and for ONNX models
    the operator by which ONNX Runtime calls layers.
    """
    tunes = tunes or budget is not None or trials is not None
    for option, value in (("--rpc-tracker", rpc_tracker), ("--rpc-key", rpc_key)):
        if value and not tunes:
            raise click.UsageError(f"{option} needs --tune, which is what its servers measure for")
    if logs is not None and not tunes and not logs.is_dir():
        raise click.BadParameter(f"Directory {str(logs)!r} does not exist.", param_hint="--logs")
    logs = logs or output / OWN_LOGS
    scanned = scan_sources(sources, extents)
    if not as_json:
        for source, _, layers in scanned:
            _coverage(source, layers, keys).show()
            divide()
    if strict:
        _end_if_uncovered(scanned)
    problems = problems_of(scanned, layouts, precision)
    for one in scanned:
        weights_of(one.layers)  # raises before the work begins
    if tunes:
        if budget is None and trials is None:
            budget = SECONDS * len(problems) * len(targets)
        options = {"jobs": jobs, "algorithms": algorithms or None, "rpc_tracker": rpc_tracker, "rpc_key": rpc_key}
        tuned = search(problems, targets, trials or TRIALS, logs, budget=budget, **options)
        if not as_json:
            show_tuned(problems, logs, tuned, keys)
            divide()
    builds = Builds(output)
    builds.run(problems, targets, jobs=jobs, logs=logs, algorithms=algorithms or None)
    weights = _write_beside(output, scanned)
    if as_json:
        found = {str(source): [row._asdict() for row in coverage_table(layers)] for source, _, layers in scanned}
        files = [str(path) for path in weights]
        echo_json({"directory": str(output), "sources": found, "weights": files, "artifacts": builds.as_json()})
    else:
        builds.show(keys)
        for path in weights:
            say(f"weights: {path}")
    builds.close()


def _end_if_uncovered(scanned: Sequence[Scanned]) -> None:
    """Name the layers that are not covered, with the reasons, and exit with code 1, if there are any."""
    layers = [(one.source, layer) for one in scanned for layer in one.layers]
    uncovered = [(source, layer) for source, layer in layers if layer.problem is None]
    for source, layer in uncovered:
        warn(f"not covered: {layer.name} in {source}: {layer.reason}")
    if uncovered:
        raise click.ClickException(f"{len(uncovered)} of {len(layers)} layers are not covered")


def _write_beside(output: Path, scanned: Sequence[Scanned]) -> list[Path]:
    """Write the weights of sources beside the artifacts, and the operator of ONNX Runtime if a model needs it.

    Returns the files of weights.
    """
    paths = [(output / f"{model}.safetensors", layers) for _, model, layers in scanned]
    written = [path for path, layers in paths if write_weights(layers, path)]
    if any(one.source.suffix.lower() == ".onnx" for one in scanned):
        output.mkdir(parents=True, exist_ok=True)
        write_operator(output)
    return written


def _coverage(source: Path, layers: Sequence[FoundLayer], keys: bool) -> Table:
    """Return the table of the layers of a source, and why those that are not covered are not."""
    rows = coverage_table(layers)
    covered = sum(1 for row in rows if row.problem)
    key = [Column("problem")] if keys else []
    columns = [Column("layer"), Column("operator", spare=True), Column("covered"), Column("shape or reason"), *key]
    table = Table(f"{source}: {covered} of {len(rows)} layers covered", [*columns, Column("GMAC", right=True)])
    for row, layer in zip(rows, layers, strict=True):
        said = f"yes, {row.notes}" if row.notes else "yes" if layer.problem else "no"
        what = words(layer.problem) if layer.problem else row.reason
        cells = [row.name, row.operator, said, what, *([row.problem] if keys else [])]
        table.add(*cells, f"{1e-9 * row.macs:.3g}" if layer.problem else "")
    return table
