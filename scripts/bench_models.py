#!/usr/bin/env python3
"""Time whole models with random weights, as they are and with artifacts, in each framework.

    scripts/bench_models.py --threads 1 2 --json models.json
    scripts/bench_models.py --rows models.json more.json --plot models.svg    # of earlier calls; measures nothing

Needs PyTorch, ONNX Runtime, OpenVINO, and matplotlib for the chart (the extra `models`); models of packages that are
not installed are left out. Layers are compiled for this machine, by the installed tuning logs. Both forms of a model
take turns in a process of their own, and their outputs are compared. Prints a table, and exits with 1 if an output is
wrong.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path

from models.catalogue import MODELS
from models.frameworks import FRAMEWORKS
from models.run import Timed, table, timed

_SECONDS = 5.0


def measure(arguments: argparse.Namespace) -> list[Timed]:
    """Run each model in a process of its own, so that no framework's threads spin beside another's."""
    rows = []
    chosen = [model for model in MODELS if not arguments.models or model.name in arguments.models]
    for model in chosen:
        if model.missing:
            print(f"{model.name}: needs {model.package}", file=sys.stderr)
            continue
        for framework in arguments.frameworks:
            for threads in arguments.threads:
                with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
                    try:
                        row = process.submit(timed, model, framework, threads, arguments.seconds).result()
                    except Exception as error:  # of any package: the others still run
                        print(f"{model.name}, {framework}: {type(error).__name__}: {error}", file=sys.stderr)
                        continue
                rows.append(row)
                print(table([row]).splitlines()[2], file=sys.stderr, flush=True)
    return rows


def _read(path: Path) -> list[Timed]:
    return [Timed(**row) for row in json.loads(path.read_text(encoding="utf-8"))]


def main() -> None:
    """Measure, print the table, write the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [model.name for model in MODELS]
    parser.add_argument("--models", nargs="+", choices=names, metavar="MODEL", help=f"of {', '.join(names)}")
    parser.add_argument("--frameworks", nargs="+", choices=FRAMEWORKS, default=FRAMEWORKS)
    parser.add_argument("--threads", nargs="+", type=int, default=[1], help="default: 1")
    parser.add_argument("--seconds", type=float, default=_SECONDS, help="for the turns of a model; default: 5")
    parser.add_argument("--json", type=Path, help="write the rows there")
    parser.add_argument("--rows", type=Path, nargs="+", help="files of --json to show, instead of measuring")
    parser.add_argument("--plot", type=Path, help="write a chart of the ratios there, as SVG")
    arguments = parser.parse_args()
    rows = [row for path in arguments.rows for row in _read(path)] if arguments.rows else measure(arguments)
    print(table(rows))
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")
    if arguments.plot:
        from models.plot import plot

        plot(rows, arguments.plot)
    sys.exit(0 if rows and all(row.right for row in rows) else 1)


if __name__ == "__main__":
    main()
