#!/usr/bin/env python3
"""Compare variable artifacts with static ones, at batches and lengths that neither plan was made for.

    scripts/bench_variable.py --threads 2
    scripts/bench_variable.py --source random.json --layout NXC

For each HiFi-GAN and EnCodec layer of examples/layers.json, calls of the two layers alternate in one process. The
ratio is the median over rounds of the variable layer's time divided by the static layer's. With --source each layer of
that list is called at its own extents instead, by artifacts of any batch and of any spatial extents, and the last lines
have geometric means. With --artifacts DIRECTORY the artifacts are kept there, and compiled only if they are missing.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

import tvm_deconv as td
from tvm_deconv.frontends import scan

LAYERS = Path(__file__).parent.parent / "examples" / "layers.json"


def seconds(layer: td.Layer, data: np.ndarray, out: np.ndarray) -> float:
    """Return the time of one call."""
    start = time.perf_counter()
    layer(data, out=out)
    return time.perf_counter() - start


def compare(variable: td.Problem, shapes: list[tuple[int, ...]], rounds: int, kept: Path) -> list[float]:
    """Print the times and their ratio for data of each of `shapes`; return the ratios."""
    statics = [variable.at(shape) for shape in shapes]
    rng = np.random.default_rng(0)
    weights = rng.standard_normal(variable.filter_shape).astype(np.float32)
    bias = rng.standard_normal(variable.bias_shape).astype(np.float32) if variable.epilogue.bias else None
    td.compile([variable], output=kept / "variable")
    td.compile(statics, output=kept / "static")
    layer, library = td.load(kept / "variable").bind(variable, weights, bias), td.load(kept / "static")
    ratios = []
    for problem in statics:
        exact = library.bind(problem, weights, bias)
        data = rng.standard_normal(problem.data_shape).astype(np.float32)
        out = np.empty(problem.output_shape, np.float32)
        pairs = [(seconds(exact, data, out), seconds(layer, data, out)) for _ in range(rounds)][2:]
        static, dynamic = (statistics.median(times) for times in zip(*pairs, strict=True))
        ratios.append(statistics.median(b / a for a, b in pairs))
        print(
            f"  {problem.data_shape}: {static * 1e3:.2f} ms static, {dynamic * 1e3:.2f} variable, {ratios[-1]:.2f}",
            flush=True,
        )
    return ratios


def run(rounds: int, kept: Path) -> None:
    """Compare every layer."""
    for layer in scan(LAYERS):
        if not layer.name.startswith(("hifi", "encodec")):
            continue
        problem = layer.problem
        channels, length = problem.data_shape[1:]
        print(f"{layer.name}, any batch")
        compare(problem.replace(dynamic=(0,)), [(n, channels, length) for n in (1, 2, 5)], rounds, kept)
        print(f"{layer.name}, any length")
        lengths = (11, length // 2 + 3, length * 4 // 3 + 1, 3 * length + 7)
        compare(problem.replace(dynamic=(1,)), [(1, channels, x) for x in lengths], rounds, kept)


def run_list(source: Path, layout: str, rounds: int, kept: Path) -> None:
    """Compare every layer of `source` in `layout` at its own extents, and print geometric means."""
    ratios: dict[str, list[float]] = {}
    for layer in scan(source):
        problem = layer.problem.replace(data_format=layout)
        kinds = {"any batch": (0,)}
        if problem.rank < 3:
            kinds[f"any extents, {problem.rank} axes"] = tuple(range(1, problem.rank + 1))
        for kind, dynamic in kinds.items():
            print(f"{layer.name}, {kind}")
            variable = problem.replace(dynamic=dynamic)
            ratios.setdefault(kind, []).extend(compare(variable, [problem.data_shape], rounds, kept))
    for kind, found in ratios.items():
        mean = statistics.geometric_mean(found)
        print(f"{kind}: {mean:.3f} ({min(found):.2f} to {max(found):.2f}, {len(found)} layers)")


def main() -> None:
    """Parse the arguments and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--source", type=Path)
    parser.add_argument("--layout", choices=("NCX", "NXC"), default="NCX")
    parser.add_argument("--artifacts", type=Path)
    arguments = parser.parse_args()
    td.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as directory:
        kept = arguments.artifacts or Path(directory)
        if arguments.source:
            run_list(arguments.source, arguments.layout, arguments.rounds, kept)
        else:
            run(arguments.rounds, kept)


if __name__ == "__main__":
    main()
