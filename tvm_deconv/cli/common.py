"""What the commands share: progress, interrupts, the layers of sources, and builds."""

from __future__ import annotations

import contextlib
import itertools
import shutil
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import click
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from tvm_deconv.cli.output import Column, Names, Table, console, say, warn
from tvm_deconv.errors import BuildError, ProblemError, SourceError
from tvm_deconv.frontends import FoundLayer, scan
from tvm_deconv.problem import Problem
from tvm_deconv.targets import of_names

if TYPE_CHECKING:
    from tvm_deconv.compiler.requests import Outcome
    from tvm_deconv.runtime.library import Library

DIRECTORY = click.argument("directory", type=click.Path(exists=True, file_okay=False, path_type=Path))
#: A directory of artifacts, or a file that packs one.
ARTIFACTS = click.argument("artifacts", metavar="ARTIFACTS", type=click.Path(exists=True, path_type=Path))


class Stopped(click.ClickException):
    """An interrupt: "stopped" with what is left of the work, and the exit code that shells know."""

    exit_code = 130

    def __init__(self, left: str = "") -> None:
        super().__init__(f"stopped{left and '; '}{left}")

    def show(self, file: IO[Any] | None = None) -> None:  # noqa: ARG002 - click's signature
        """Print the line."""
        warn(self.message)


def target_of(context: click.Context, parameter: click.Parameter, name: str | None) -> str | None:
    """Return the name of the target that is meant; wrong usage if there is none of that name."""
    try:
        return name and of_names(name)[0].name
    except ProblemError as error:
        raise click.BadParameter(f"{error.value!r}: {error.rule}", context, parameter) from None


def end_if_broken(library: Library) -> None:
    """Name the artifacts of a library that are broken and exit with code 1, if there are any."""
    if library.broken:
        names = ", ".join(library.broken)
        raise click.ClickException(f"{library.root.name}: {len(library.broken)} broken: {names}")


@contextlib.contextmanager
def removed_if_stopped(folder: Path, holds: Callable[[], bool]) -> Iterator[None]:
    """Remove on an interrupt what was made of the path of a `folder` meanwhile, unless it `holds` something to keep."""
    created = next((path for path in [*reversed(folder.parents), folder] if not path.exists()), None)
    try:
        yield
    except KeyboardInterrupt:
        if created and not holds():
            shutil.rmtree(created, ignore_errors=True)
        raise


@contextlib.contextmanager
def progress_bar(title: str, *fields: str, total: int | None = None) -> Iterator[Progress]:
    """Show a bar with one task and the time left on a terminal; elsewhere show nothing.

    `fields` of the task are shown behind it.
    """
    times = TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), *times)
    texts = [TextColumn(f"{{task.fields[{field}]}}") for field in fields]
    empty: dict[str, Any] = dict.fromkeys(fields, "")
    screen = console(stderr=True)
    with Progress(*columns, *texts, console=screen, transient=True, disable=not screen.is_terminal) as progress:
        progress.add_task(title, total=total, **empty)
        yield progress


def advance(progress: Progress) -> None:
    """Move the bar by one step."""
    progress.advance(progress.task_ids[0])


def echo_warnings(texts: Iterable[str]) -> None:
    """Print each warning to standard error, once."""
    for text in dict.fromkeys(texts):
        warn(text)


class Scanned(NamedTuple):
    """A source, the name of its model, which is that of its file of weights, and its layers."""

    source: Path
    model: str
    layers: list[FoundLayer]


def scan_sources(sources: Sequence[Path], extents: Mapping[str, tuple[int, int]] | None = None) -> list[Scanned]:
    """Return each source with its layers; `extents` are ranges of free extents.

    What is odd about a source is a line on standard error.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        models = zip(sources, _model_names(sources), strict=True)
        scanned = [Scanned(source, model, scan(source, extents=extents)) for source, model in models]
    echo_warnings(f"warning: {one.message}" for one in caught)
    return scanned


def _model_names(sources: Iterable[Path]) -> list[str]:
    """Return the names of files without their suffixes, with `_2`, `_3`, ... behind those already given."""
    given: list[str] = []
    for source in sources:
        numbered = (f"{source.stem}_{number}" for number in itertools.count(2))
        given.append(next(name for name in itertools.chain([source.stem], numbered) if name not in given))
    return given


def problems_of(
    scanned: Sequence[Scanned], layouts: Sequence[str] = (), precision: str | None = None
) -> dict[Problem, list[str]]:
    """Return the problems of scanned sources with the names of their layers, in each of the `layouts` if there are any.

    A `precision` takes the place of that of float32 layers. Raises SourceError if there is none.
    """
    problems: dict[Problem, list[str]] = {}
    for name, found in _named(scanned):
        exact = found.dtype != "float32" or precision is None
        problem = found if exact else found.replace(precision=precision)
        for layout in layouts or [problem.data_format]:
            problems.setdefault(problem.replace(data_format=layout), []).append(name)
    if not problems:
        sources = ", ".join(str(one.source) for one in scanned)
        raise SourceError("source", sources, "must hold a transposed convolution that is covered")
    return problems


def _named(scanned: Iterable[Scanned]) -> Iterator[tuple[str, Problem]]:
    """Yield the name and the problem of each covered layer: a name that several models have is MODEL:NAME.

    A library has names of layers with constant filters. Against these the names of others do not count.
    """
    covered = [
        (one.model, layer, layer.problem) for one in scanned for layer in one.layers if layer.problem is not None
    ]
    models = Counter(layer.name for _, layer, _ in covered)
    in_library = Counter(layer.name for _, layer, _ in covered if layer.filter is not None)
    for model, layer, problem in covered:
        several = (models if layer.filter is None else in_library)[layer.name] > 1
        yield f"{model}:{layer.name}" if several else layer.name, problem


class Builds:
    """The builds of one directory: `run` them, and `show` what came of them."""

    def __init__(self, output: Path) -> None:
        self.output = output
        self.outcomes: list[Outcome] = []
        self.seconds = 0.0

    def run(self, problems: dict[Problem, list[str]], targets: Sequence[str], **options: Any) -> None:
        """Build with a bar; `options` are those of `current.compile`. A problem that fails does not stop the others.

        An interrupt leaves the artifacts that were built, and no directory without any.
        """
        from tvm_deconv.compiler.current import compile as build

        start = time.perf_counter()
        total = len({problem.artifact_key for problem in problems}) * len(set(targets))
        try:
            kept = removed_if_stopped(self.output, lambda: self.count("built") > 0)
            with kept, progress_bar("compiling", total=total) as progress:

                def note(outcome: Outcome) -> None:
                    self.outcomes.append(outcome)
                    advance(progress)

                build(problems, targets, self.output, layers=problems, on_outcome=note, **options)
        except BuildError:
            if not self.failed:
                raise
        except KeyboardInterrupt:
            raise Stopped(f"{self.count('built')} artifacts are built, and the same command continues") from None
        finally:
            self.seconds = time.perf_counter() - start

    def count(self, status: str) -> int:
        """Return the number of outcomes with a status."""
        return sum(1 for outcome in self.outcomes if outcome.status == status)

    @property
    def failed(self) -> list[Outcome]:
        """The builds that failed."""
        return [outcome for outcome in self.outcomes if outcome.status == "failed"]

    def show(self, keys: bool = False) -> None:
        """Print what decided on each schedule."""
        names = Names(keys)
        columns = [*names.columns, Column("target", spare=True), Column("algorithm"), Column("schedule")]
        table = Table(f"schedules of {self.output}", columns)
        for outcome in self.outcomes:
            artifact = outcome.manifest.name if outcome.manifest else ""
            algorithm = outcome.manifest.algorithm if outcome.manifest else outcome.status
            table.add(
                *names.cells(outcome.layers, outcome.problem, artifact),
                outcome.target,
                algorithm,
                names.told(outcome.reason),
            )
        table.show()

    def as_json(self) -> list[dict[str, Any]]:
        """Return the outcomes in types that JSON has."""
        return [
            {
                "layers": list(outcome.layers),
                "problem": outcome.problem.key,
                "target": outcome.target,
                "status": outcome.status,
                "artifact": outcome.manifest.name if outcome.manifest else None,
                "algorithm": outcome.manifest.algorithm if outcome.manifest else None,
                "schedule": outcome.reason,
                "error": outcome.error,
                "seconds": outcome.seconds,
            }
            for outcome in self.outcomes
        ]

    def close(self) -> None:
        """Print warnings and a summary; name what failed and exit with code 1."""
        echo_warnings(warning for outcome in self.outcomes for warning in outcome.warnings)
        built, current, failed = self.count("built"), self.count("current"), self.failed
        summary = f"{self.output}: {built} built, {current} up to date, {len(failed)} failed in {self.seconds:.1f} s"
        if not failed:
            say(summary)
            return
        for outcome in failed:
            names = ", ".join(outcome.layers) or outcome.problem.key
            warn(f"failed: {names} for {outcome.target}: {outcome.error}")
        raise click.ClickException(summary)
