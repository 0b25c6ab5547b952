"""The command tvm-deconv: compile, inspect, sign, verify, bench, overhead, doctor; `cli_tune` has tune and logs.

A DeconvError becomes one line and exit code 1; wrong usage exits with 2, as click has it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import importlib.metadata
import importlib.util
import io
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tvm_deconv.artifact import signing
from tvm_deconv.artifact.select import Accepted, Decision, decision_table
from tvm_deconv.compiler.launcher import find_compiler
from tvm_deconv.errors import BuildError, CompilerNotFound, DeconvError, DeviceError, ProblemError, SourceError
from tvm_deconv.frontends import FoundLayer, coverage_table, scan, with_unique_names, write_weights
from tvm_deconv.problem import Problem
from tvm_deconv.runtime.library import Library, load
from tvm_deconv.runtime.loader import read_verified
from tvm_deconv.runtime.verify import Verdict, decide
from tvm_deconv.runtime.verify import verify as verify_artifact
from tvm_deconv.targets import (
    CPU_TARGETS,
    MAX_TARGET_VARIABLE,
    CpuTarget,
    Host,
    cuda_capability,
    detect_host,
    known_targets,
    max_target,
    microarchitecture,
    native,
)

try:
    import click
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.table import Table

    from tvm_deconv.cli import tune as cli_tune
except ImportError as error:
    package = str(error.name).partition(".")[0]
    raise SystemExit(f"tvm-deconv needs the package {package}: pip install 'tvm_deconv[compile]'") from None

_PACKAGES = ("tvm_deconv", "numpy", "apache-tvm-ffi", "apache-tvm", "archspec", "onnx", "safetensors", "ml_dtypes")
_UNSEEN_WIDTH = 1000  # where no terminal says how wide it is: as wide as a table needs


class _Commands(click.Group):
    """Commands whose expected errors are one line."""

    def invoke(self, ctx: click.Context) -> object:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except DeconvError as error:
            raise click.ClickException(str(error)) from None
        except ModuleNotFoundError as error:
            if error.name is None or error.name.startswith("tvm_deconv"):
                raise
            raise click.ClickException(
                f"this needs the package {error.name}: pip install 'tvm_deconv[compile]'"
            ) from None
        except OSError as error:
            if error.errno == errno.EPIPE or error.strerror is None:
                raise  # a pipe that nobody reads any more is no error, which click knows
            where = "" if error.filename is None else f"{error.filename}: "
            raise click.ClickException(f"{where}{error.strerror}") from None


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(importlib.metadata.version("tvm_deconv"))
def main() -> None:
    """Transposed convolutions, compiled ahead of time."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr has it: names may hold any character


main.add_command(cli_tune.tune)
main.add_command(cli_tune.logs)


def _console(*, stderr: bool = False) -> Console:
    stream = sys.stderr if stderr else sys.stdout  # None where it is closed
    seen = (stream is not None and stream.isatty()) or "COLUMNS" in os.environ
    # Names of layers may hold what rich takes for markup.
    return Console(stderr=stderr, markup=False, highlight=False, emoji=False, width=None if seen else _UNSEEN_WIDTH)


@contextlib.contextmanager
def _progress(title: str, total: int) -> Iterator[Progress]:
    """Show a bar with one task, which `advance(0)` moves, on a terminal only."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = _console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        progress.add_task(title, total=total)
        yield progress


_DIRECTORY = click.argument("directory", type=click.Path(exists=True, file_okay=False, path_type=Path))


@main.command()
@cli_tune.searching(*known_targets(), target="CPU or CUDA devices to compile for")
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("artifacts"),
    show_default=True,
    help="Directory of the artifacts.",
)
@click.option("--trials", type=click.IntRange(1), help="Search for fast schedules first; as in tune. Needs --logs.")
@click.option("--logs", type=cli_tune.LOGS, help="Tuning logs to follow besides the installed ones.")
def compile(
    sources: Sequence[Path],
    targets: Sequence[str],
    output: Path,
    jobs: int | None,
    algorithms: Sequence[str],
    trials: int | None,
    logs: Path | None,
    rpc_tracker: str | None,
    rpc_key: str | None,
) -> None:
    """Compile every transposed convolution of each SOURCE.

    A SOURCE is an OpenVINO IR (.xml), an ONNX model (.onnx) or a list of problems (.json). What is up to date stays as
    it is. Constant filters and biases are written beside the artifacts, as SOURCE.safetensors.
    """
    if trials and logs is None:
        raise click.UsageError("--trials needs --logs, where results are kept")
    if rpc_tracker and not trials:
        raise click.UsageError("--rpc-tracker needs --trials, which is what its servers measure")
    console = _console()
    taken: set[str] = set()
    found = _scan(sources)
    for source, layers in found:
        console.print(_coverage(source, layers))
        weights = _free_name(source.stem, taken)
        if write_weights(layers, output / weights):
            click.echo(f"weights: {output / weights}")
    problems = _collect(found)
    if trials and logs is not None:
        cli_tune.search(
            problems,
            [native(detect_host()).name if name == "native" else name for name in targets],
            trials,
            logs,
            jobs=jobs,
            algorithms=algorithms or None,
            rpc_tracker=rpc_tracker,
            rpc_key=rpc_key,
        )
    _build(problems, targets, output, jobs, logs, algorithms or None)


def _scan(sources: Sequence[Path]) -> list[tuple[Path, list[FoundLayer]]]:
    """The layers of each source, under names that are unique among all."""
    found = [(source, scan(source)) for source in sources]
    named = iter(with_unique_names(layer for _, layers in found for layer in layers))
    return [(source, [next(named) for _ in layers]) for source, layers in found]


def _collect(found: Sequence[tuple[Path, Sequence[FoundLayer]]]) -> dict[Problem, list[str]]:
    """The problems of what `_scan` found, with the names of their layers."""
    problems: dict[Problem, list[str]] = {}
    for _, layers in found:
        for layer in layers:
            if layer.problem is not None:
                problems.setdefault(layer.problem, []).append(layer.name)
    if not problems:
        sources = ", ".join(str(source) for source, _ in found)
        raise SourceError("source", sources, "must hold a transposed convolution that is covered")
    return problems


def _free_name(stem: str, taken: set[str]) -> str:
    names = (f"{stem}{suffix}.safetensors" for suffix in ("", *(f"_{number}" for number in range(2, len(taken) + 3))))
    name = next(name for name in names if name not in taken)
    taken.add(name)
    return name


def _coverage(source: Path, layers: Sequence[FoundLayer]) -> Table:
    rows = coverage_table(layers)
    covered = sum(1 for row in rows if row.problem)
    table = Table(title=f"{source}: {covered} of {len(rows)} layers covered", title_justify="left")
    for name in ("layer", "operator", "covered", "problem, or why not"):
        table.add_column(name, overflow="fold")
    table.add_column("GMAC", justify="right")
    for row in rows:
        if row.problem:
            table.add_row(row.name, row.operator, "yes", row.problem, f"{1e-9 * row.macs:.3g}")
        else:
            table.add_row(row.name, row.operator, "no", row.reason, "")
    return table


def _build(
    problems: dict[Problem, list[str]],
    targets: Sequence[str],
    output: Path,
    jobs: int | None,
    logs: Path | None = None,
    algorithms: Sequence[str] | None = None,
) -> None:
    """Build, with a bar and a summary; what failed is said at the end, with exit code 1."""
    from tvm_deconv.compiler.build import Outcome
    from tvm_deconv.compiler.build import compile as build

    outcomes: list[Outcome] = []
    start = time.perf_counter()
    total = len({problem.artifact_key for problem in problems}) * len(set(targets))
    with _progress("compiling", total) as progress:

        def note(outcome: Outcome) -> None:
            outcomes.append(outcome)
            progress.advance(progress.task_ids[0])

        try:
            build(
                problems,
                targets,
                output,
                layers=problems,
                jobs=jobs,
                algorithms=algorithms,
                logs=logs,
                on_outcome=note,
            )
        except BuildError:
            if not any(outcome.status == "failed" for outcome in outcomes):
                raise
    for warning in dict.fromkeys(warning for outcome in outcomes for warning in outcome.warnings):
        click.echo(warning, err=True)
    count = {status: sum(1 for outcome in outcomes if outcome.status == status) for status in ("built", "current")}
    failed = [outcome for outcome in outcomes if outcome.status == "failed"]
    seconds = time.perf_counter() - start
    said = f"{output}: {count['built']} built, {count['current']} up to date, {len(failed)} failed in {seconds:.1f} s"
    if not failed:
        click.echo(said)
        return
    for outcome in failed:
        names = ", ".join(outcome.layers) or outcome.problem.key
        click.echo(f"failed: {names} for {outcome.target}: {outcome.error}", err=True)
    raise click.ClickException(said)


@main.command()
@_DIRECTORY
@click.option("--json", "as_json", is_flag=True, help="Print manifests and decisions as JSON.")
def inspect(directory: Path, as_json: bool) -> None:
    """List the artifacts in DIRECTORY, and whether this machine can run them."""
    library = load(directory)
    decisions = [(manifest, decide(library, manifest)) for manifest in library.manifests]
    if as_json:
        artifacts = [
            dataclasses.asdict(manifest)
            | {"name": manifest.name, "usable": isinstance(decision, Accepted), "reason": decision.reason}
            for manifest, decision in decisions
        ]
        broken = {name: str(error) for name, error in library.broken.items()}
        found = {"directory": str(directory), "digest": library.digest, "artifacts": artifacts, "broken": broken}
        click.echo(json.dumps(found, indent=2))
        return
    table = Table(title=repr(library), title_justify="left")
    for name in ("artifact", "layers", "problem", "algorithm", "origin"):
        table.add_column(name, overflow="fold")
    table.add_column("kB", justify="right")
    table.add_column("workspace, kB", justify="right")
    table.add_column("and of each thread", justify="right")
    table.add_column("runs here, or why not", overflow="fold")
    for manifest, decision in decisions:
        usable = "yes" if isinstance(decision, Accepted) else decision.reason
        size = f"{manifest.size / 1000:.0f}"
        layers = ", ".join(manifest.layers)
        workspace = [f"{nbytes / 1000:.0f}" for nbytes in (manifest.shared_bytes, manifest.scratch_bytes)]
        row = (manifest.name, layers, manifest.problem, manifest.algorithm, manifest.origin, size, *workspace, usable)
        table.add_row(*row)
    for name, error in library.broken.items():
        table.add_row(name, *[""] * 7, str(error))
    _console().print(table)
    click.echo(f"digest {library.digest}")


_KEY = click.Path(exists=True, dir_okay=False, path_type=Path)


@main.command()
@_DIRECTORY
@click.option("--key", type=_KEY, required=True, help="PEM file of the private key, Ed25519.")
def sign(directory: Path, key: Path) -> None:
    """Sign the artifacts in DIRECTORY, for verify --key and load(..., public_key=).

    Every library is held against its manifest first. Files of weights beside them are signed too.
    """
    library = load(directory)
    for error in library.broken.values():
        raise error
    for manifest in library.manifests:
        read_verified(library.root / manifest.library, manifest)
    path = signing.sign(library.root, library.digest, key)
    click.echo(f"{path}: {len(library.manifests)} artifacts, {library.digest}")


@main.command()
@_DIRECTORY
@click.option("--key", type=_KEY, help="PEM file of a public key: refuse what its owner did not sign.")
@click.option("--seed", type=click.IntRange(0), help="Of the random data; fresh where not given.")
def verify(directory: Path, key: Path | None, seed: int | None) -> None:
    """Run every artifact in DIRECTORY on random data and compare with the reference.

    Artifacts that this machine cannot run are held against their digest only. Exits with 1 where an artifact is wrong
    or broken, or none could be run; with --key before any is run, where they are not those that were signed.
    """
    library = load(directory, public_key=key)
    verdicts: list[Verdict] = []
    with _progress("verifying", len(library.manifests)) as progress:
        for manifest in library.manifests:
            verdicts.append(verify_artifact(library, manifest, seed))
            progress.advance(progress.task_ids[0])
    table = Table(title=repr(library), title_justify="left")
    for name in ("artifact", "layers", "problem", "verdict"):
        table.add_column(name, overflow="fold")
    table.add_column("deviation", justify="right")
    for verdict in verdicts:
        manifest = verdict.manifest
        said = f"{verdict.status}: {verdict.reason}" if verdict.reason else verdict.status
        deviation = f"{verdict.deviation:.1e}" if verdict.status == "ok" else ""
        table.add_row(manifest.name, ", ".join(manifest.layers), manifest.problem, said, deviation)
    for name, error in library.broken.items():
        table.add_row(name, "", "", f"failed: {error}", "")
    _console().print(table)
    failed = len(library.broken) + sum(1 for verdict in verdicts if verdict.status == "failed")
    good = sum(1 for verdict in verdicts if verdict.status == "ok")
    skipped = len(verdicts) + len(library.broken) - good - failed
    said = f"{directory}: {good} ok, {failed} failed, {skipped} not for this machine"
    if failed or not good:
        raise click.ClickException(said)
    click.echo(said)


def _peer_names(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[str, ...]:
    from tvm_deconv.bench.peers import PEERS

    names = tuple(dict.fromkeys(name for name in (value or "").split(",") if name))
    for name in names:
        if name not in PEERS:
            raise click.BadParameter(f"{name} is not one of {', '.join(PEERS)}", context, parameter)
        for package in PEERS[name]:
            if importlib.util.find_spec(package) is None:
                raise click.BadParameter(f"{name} needs the package {package}: pip install {package}")
    return names


def _writable(context: click.Context, parameter: click.Parameter, value: Path | None) -> Path | None:
    # Asked before the run, which may take long.
    if value is not None and not value.absolute().parent.is_dir():
        raise click.BadParameter(f"the directory {value.parent} does not exist", context, parameter)
    if value is not None and not os.access(value if value.exists() else value.absolute().parent, os.W_OK):
        raise click.BadParameter(f"{value} cannot be written", context, parameter)
    return value


_FILE = click.Path(dir_okay=False, writable=True, path_type=Path)


@main.command()
@click.argument("paths", metavar="(DIRECTORY|SOURCE)...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--threads", type=click.IntRange(1), help="CPUs to use; one per core where not given.")
@click.option("--peers", callback=_peer_names, help="Compare with these: onnxruntime,openvino,torch,jax.")
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
    """Time artifacts, or the layers of a SOURCE, and say how far they are from what the machine can do.

    The two floors, multiply-adds and copied bytes per second, are measured on the spot. With --peers the layers run in
    other packages too, in turn with ours and on the same data, and outputs are compared with the reference.
    """
    from tvm_deconv.bench import report as reports
    from tvm_deconv.bench import run as runs
    from tvm_deconv.compiler.process import WorkerError

    directories = [path for path in paths if path.is_dir()]
    sources = [path for path in paths if path not in directories]
    with contextlib.ExitStack() as stack:
        layers = [layer for directory in directories for layer in runs.layers_in(load(directory))]
        if sources:
            kept = output or Path(stack.enter_context(tempfile.TemporaryDirectory()))
            problems = _collect(_scan(sources))
            _build(problems, ["native"], kept, None)
            layers += runs.layers_of(problems, load(kept))
        if not layers:
            raise SourceError("paths", ", ".join(map(str, paths)), "must hold a layer that this machine can run")
        with _progress("measuring", len(layers)) as progress:

            def note(_: runs.Row) -> None:
                progress.advance(progress.task_ids[0])

            try:
                report = runs.run(layers, peers, threads=threads, rounds=rounds or runs.ROUNDS, on_row=note)
            except WorkerError as error:
                raise click.ClickException(str(error)) from None
    _console().print(reports.table(report))
    click.echo(reports.summary(report))
    if json_file:
        json_file.write_text(json.dumps(reports.as_json(report), indent=1) + "\n", encoding="utf-8")
    if html_file:
        html_file.write_text(reports.as_html(report), encoding="utf-8")
    wrong = [row.layer.name for row in report.rows if not row.ours.correct]
    if wrong:
        raise click.ClickException(f"these layers failed or are wrong: {', '.join(wrong)}")


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def overhead(as_json: bool) -> None:
    """Measure what this package costs besides its kernels: import, load, calls, parallel launches, idling."""
    from tvm_deconv.bench.overhead import measure

    figures = measure()
    if as_json:
        click.echo(json.dumps([figure._asdict() for figure in figures], indent=1))
        return
    table = Table(show_header=False)
    for figure in figures:
        table.add_row(figure.name, f"{figure.value:.2f}", figure.unit)
    _console().print(table)


@main.command()
@click.argument("directory", required=False, type=click.Path(exists=True, file_okay=False, path_type=Path))
def doctor(directory: Path | None) -> None:
    """Say what this machine can compile and run, and which artifacts in DIRECTORY would be selected and which not."""
    host = detect_host()
    table = Table(show_header=False)
    table.add_column("fact")
    table.add_column("value", overflow="fold")
    allowed = len(os.sched_getaffinity(0))
    table.add_row("CPU", f"{host.name}, {host.cores} cores, {host.threads} threads, {allowed} for this process")
    cap = max_target()
    for target in CPU_TARGETS.values():
        table.add_row(target.name, _runs_here(target, host.features, cap))
    try:
        table.add_row("native", native(host).name)
    except ProblemError as error:
        table.add_row("native", str(error))
    table.add_row("microarchitecture", _microarchitecture(host))
    table.add_row(MAX_TARGET_VARIABLE, cap.name if cap else "not set")
    table.add_row("compiler", _compiler())
    table.add_row("nvcc", _nvcc())
    table.add_row("CUDA device", _cuda_device())
    table.add_row("Python", platform.python_version())
    from tvm_deconv.bench.peers import PEERS

    for package in dict.fromkeys((*_PACKAGES, *PEERS)):
        table.add_row(package, _version(package))
    _console().print(table)
    if directory is not None:
        library = load(directory)
        for problem in dict.fromkeys(manifest.parsed for manifest in library.manifests):
            click.echo(f"\n{problem.key}\n{decision_table(_own(library, problem))}")


def _own(library: Library, problem: Problem) -> list[Decision]:
    """The decisions on artifacts for the problem and on unreadable ones, without those for other problems."""
    decisions = library.select(problem)
    return [
        decision
        for decision in decisions
        if decision.manifest is None or decision.manifest.problem in problem.artifact_keys
    ]


def _runs_here(target: CpuTarget, features: frozenset[str], cap: CpuTarget | None) -> str:
    missing = target.features - features
    if missing:
        return f"no: this CPU lacks {', '.join(sorted(missing))}"
    if cap is not None and target.features - cap.features:
        return f"no: {MAX_TARGET_VARIABLE}={cap.name} excludes it"
    return "yes"


def _microarchitecture(host: Host) -> str:
    try:
        found = microarchitecture(host)
    except ModuleNotFoundError as error:
        return f"unknown: the package {error.name} is not installed"
    return found.name if found else f"none that archspec knows all flags of for {host.vendor}"


def _compiler() -> str:
    try:
        found = find_compiler()
    except CompilerNotFound as error:
        return str(error)
    said = subprocess.run([found, "--version"], capture_output=True, text=True, check=False).stdout
    return f"{found}: {said.partition(os.linesep)[0]}"


def _nvcc() -> str:
    try:
        from tvm_deconv.compiler.nvcc import find_nvcc, version

        return f"{find_nvcc()}: {version(find_nvcc())}"
    except CompilerNotFound as error:
        return str(error)


def _cuda_device() -> str:
    try:
        return "compute capability {}.{}".format(*cuda_capability())
    except DeviceError as error:
        return str(error)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
