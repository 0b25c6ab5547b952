#!/usr/bin/env python3
"""Time whole models with random weights, as they are and with artifacts, in each framework.

    scripts/bench_models.py --threads 1 2 --json models.json
    scripts/bench_models.py --rows models.json more.json --plot models.svg    # of earlier calls; measures nothing

Needs PyTorch, ONNX Runtime, OpenVINO, and matplotlib for the chart (the extra `models`); models of packages that are
not installed are left out. Layers are compiled for this machine, by the installed tuning logs. Both forms of a model
take turns in a process of their own, and their outputs are compared. Prints a table, and exits with 1 if an output is
wrong.

A row is written to --json as soon as it is measured, and rows that the file has are not measured again: a call that was
stopped goes on where it was. With --keep, a first call with --seconds 0 and without --json does all that takes long.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path

from models.catalogue import MODELS, Model
from models.frameworks import FRAMEWORKS
from models.run import Timed, document, table, timed

_SECONDS = 5.0
#: glibc gives freed memory back to the system, and fetches it again page by page: one form pays for it and the other
#: does not, as chance has it. So the processes keep what they have.
_KEEP_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(1 << 40), "MALLOC_MMAP_MAX_": "0"}


def _rows(arguments: argparse.Namespace) -> Iterator[tuple[Model, str, int]]:
    """Return the model, framework and number of threads of each row that is asked for."""
    for model in MODELS:
        if arguments.models and model.name not in arguments.models:
            continue
        if model.missing:
            print(f"{model.name}: needs {model.package}", file=sys.stderr)
            continue
        for framework in arguments.frameworks:
            for threads in arguments.threads:
                yield model, framework, threads


def measure(arguments: argparse.Namespace) -> list[Timed]:
    """Run each model in a process of its own, so that no framework's threads spin beside another's."""
    rows = _read(arguments.json) if arguments.json and arguments.json.exists() else []
    if arguments.keep:
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(arguments.keep.resolve() / "inductor"))
    for name, value in _KEEP_MEMORY.items():
        os.environ.setdefault(name, value)
    known = {(row.model, row.framework, row.threads) for row in rows}
    for model, framework, threads in _rows(arguments):
        if (model.name, framework, threads) in known:
            continue
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            try:
                row = process.submit(timed, model, framework, threads, arguments.seconds, arguments.keep).result()
            except Exception as error:  # of any package: the others still run
                print(f"{model.name}, {framework}: {type(error).__name__}: {error}", file=sys.stderr)
                continue
        rows.append(row)
        print(table([row]).splitlines()[2], file=sys.stderr, flush=True)
        if arguments.json:
            _write(rows, arguments.json)
    return rows


def _read(path: Path) -> list[Timed]:
    return [Timed(**row) for row in json.loads(path.read_text(encoding="utf-8"))]


def _write(rows: list[Timed], path: Path) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")
    part.replace(path)


def main() -> None:
    """Measure, print the table, write the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [model.name for model in MODELS]
    parser.add_argument("--models", nargs="+", choices=names, metavar="MODEL", help=f"of {', '.join(names)}")
    parser.add_argument("--frameworks", nargs="+", choices=FRAMEWORKS, default=FRAMEWORKS)
    parser.add_argument("--threads", nargs="+", type=int, default=[1], help="default: 1")
    parser.add_argument("--seconds", type=float, default=_SECONDS, help="for the turns of a model; default: 5")
    parser.add_argument("--json", type=Path, help="the file of rows")
    parser.add_argument("--keep", type=Path, help="a folder that keeps exported models and artifacts for later calls")
    parser.add_argument("--rows", type=Path, nargs="+", help="files of --json to show, instead of measuring")
    parser.add_argument("--plot", type=Path, help="write a chart of the ratios there, as SVG")
    parser.add_argument("--document", type=Path, help="put the rows between the marks of this document")
    arguments = parser.parse_args()
    rows = [row for path in arguments.rows for row in _read(path)] if arguments.rows else measure(arguments)
    rows.sort(key=lambda row: (names.index(row.model), FRAMEWORKS.index(row.framework), row.threads))
    print(table(rows))
    if arguments.plot:
        from models.plot import plot

        plot(rows, arguments.plot)
    if arguments.document:
        text = arguments.document.read_text(encoding="utf-8")
        arguments.document.write_text(document(text, rows), encoding="utf-8")
    sys.exit(0 if rows and all(row.right for row in rows) else 1)


if __name__ == "__main__":
    main()
