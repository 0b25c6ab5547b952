#!/usr/bin/env python3
"""Load a directory of artifacts and run every layer that came with weights: `run_layers.py artifacts`.

The weights are those that `tvm-deconv compile` wrote beside the artifacts; data is random. Each output is compared with
the reference, in float64, and each layer is timed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

import tvm_deconv as td


def layers(directory: Path) -> Iterator[tuple[str, td.Problem, Any, Any]]:
    """Every layer in the safetensors files of a directory: name, problem, filter, bias or None."""
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="numpy") as weights:
            for name, key in sorted(weights.metadata().items()):
                problem = td.Problem.from_key(key)
                if f"{name}.filter" not in weights.keys():  # noqa: SIM118 (this is no dict)
                    continue
                bias = weights.get_tensor(f"{name}.bias") if problem.epilogue.bias else None
                yield name, problem, weights.get_tensor(f"{name}.filter"), bias


def milliseconds(layer: td.Layer, data: Any) -> float:
    """The median time of a call with an output of its own, in a fifth of a second but at least three calls."""
    out = layer(data)
    times: list[float] = []
    while len(times) < 3 or sum(times) < 0.2:
        start = time.perf_counter()
        layer(data, out=out)
        times.append(time.perf_counter() - start)
    return 1e3 * float(np.median(times))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    library = td.load(parser.parse_args().directory)
    rng = np.random.default_rng()
    wrong = 0
    print(f"\n{'layer':24} {'output':>18} {'ms':>9} {'GFLOP/s':>9} {'error':>9}")
    for name, problem, filter, bias in layers(library.root):
        layer = library.bind(problem, filter, bias)
        data = rng.standard_normal(problem.data_shape).astype(problem.dtype)
        expected = td.reference(problem, data, filter, bias)
        error = float(np.abs(layer(data) - expected).max() / np.abs(expected).max())
        wrong += not error < 1e-4
        taken = milliseconds(layer, data)
        shape = "x".join(map(str, problem.output_shape))
        print(f"{name:24} {shape:>18} {taken:9.3f} {2e-6 * problem.macs / taken:9.1f} {error:9.1e}")
    threads = td.get_num_threads()
    print(f"\nThreads: {threads}. The error is the largest difference from the reference, by its largest element.")
    if wrong:
        raise SystemExit(f"error: {wrong} layers differ from the reference")


if __name__ == "__main__":
    main()
