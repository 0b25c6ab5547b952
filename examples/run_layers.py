#!/usr/bin/env python3
"""Load a directory of artifacts and run every layer that came with weights: `run_layers.py artifacts`.

The weights are those that `tvm-deconv compile` wrote beside the artifacts; data is random, of the layer's type. Each
output is compared with the reference, in float64, and each layer is timed.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np

import tvm_deconv as td
from tvm_deconv.problem.testing import deviation, operands


def milliseconds(layer: td.Layer, data: Any) -> float:
    """Return the median time of a call with an output of its own, in a fifth of a second but at least three calls."""
    out = layer(data)
    times: list[float] = []
    end = time.perf_counter() + 0.2
    while len(times) < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        layer(data, out=out)
        times.append(time.perf_counter() - start)
    return 1e3 * float(np.median(times))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    library = td.load(parser.parse_args().directory)
    if not library.layers:
        raise SystemExit("error: no layer came with weights: compile a model whose filters are constants")
    wrong = 0
    print(f"\n{'layer':24} {'output':>18} {'ms':>9} {'GFLOP/s':>9} {'error':>9}")
    for name, problem in library.layers.items():
        filter, bias = library.weights(name)
        layer = library.layer(name)
        data = operands(problem).data
        expected = td.reference(problem, data, filter, bias, library.scaling(name))
        error = deviation(problem, layer(data), expected)
        wrong += not error.allowed
        taken = milliseconds(layer, data)
        shape = "x".join(map(str, problem.output_shape))
        print(f"{name:24} {shape:>18} {taken:9.3f} {2e-6 * problem.macs / taken:9.1f} {error.largest:9.1e}")
    threads = td.get_num_threads()
    print(f"\nThreads: {threads}. The error is the largest difference from the reference, by its largest element.")
    if wrong:
        raise SystemExit(f"error: {wrong} layers differ from the reference")


if __name__ == "__main__":
    main()
