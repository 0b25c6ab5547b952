#!/usr/bin/env python3
"""Compare several processes of several threads on the processors of this machine, of which there may be fewer.

    scripts/bench_processes.py --processes 4 --threads 2

Each process has a layer of this package and a session of ONNX Runtime with the same numbers, by default of a layer of
examples/layers.json. All call the one for a second, then the other, and so on in turns. Prints for each layer and both:
calls a second of all processes together, and the median and the 99th percentile of the time of a call, over all turns.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

import tvm_deconv as td
from tvm_deconv.bench.peers import onnxruntime
from tvm_deconv.bench.peers.common import Task
from tvm_deconv.frontends import scan
from tvm_deconv.problem.testing import operands

LAYERS = Path(__file__).parent.parent / "examples" / "layers.json"
SECONDS = 1.0  # of a turn


def contenders(problem: td.Problem, artifacts: str, threads: int) -> dict[str, Callable[[], object]]:
    """Return the calls by name: both compute the same, in memory of their own."""
    arrays = operands(problem)
    td.set_num_threads(threads)
    layer = td.load(artifacts).bind(problem, arrays.filter, arrays.bias)
    out = np.empty(problem.output_shape, problem.output_dtype)
    theirs = onnxruntime.prepare(Task(problem, 0, Path(artifacts), ""), arrays, threads)
    theirs.run()
    np.testing.assert_allclose(layer(arrays.data, out), theirs.output(), rtol=1e-3, atol=1e-3)
    return {"tvm_deconv": lambda: layer(arrays.data, out), "onnxruntime": theirs.run}


def serve(pipe: Connection, key: str, artifacts: str, threads: int) -> None:
    """Call what the parent names until it is done; answer with the seconds of each call."""
    calls = contenders(td.Problem.from_key(key), artifacts, threads)
    pipe.send(list(calls))
    while name := pipe.recv():
        taken, end = [], time.perf_counter() + SECONDS
        while (start := time.perf_counter()) < end:
            calls[name]()
            taken.append(time.perf_counter() - start)
        pipe.send(taken)


def compare(problem: td.Problem, processes: int, threads: int, turns: int) -> None:
    """Print the figures of one layer."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as artifacts:
        td.compile([problem], output=artifacts)
        pipes = []
        for _ in range(processes):
            ours, its = context.Pipe()
            context.Process(target=serve, args=(its, problem.key, artifacts, threads), daemon=True).start()
            pipes.append(ours)
        names = max(pipe.recv() for pipe in pipes)  # all have the same
        found: dict[str, list[float]] = {name: [] for name in names}
        for turn in range(turns + 1):
            for name in names:
                for pipe in pipes:
                    pipe.send(name)
                taken = [seconds for pipe in pipes for seconds in pipe.recv()]
                if turn:  # the first warms up
                    found[name] += taken
        for pipe in pipes:
            pipe.send("")
    for name, taken in found.items():
        median, worst = np.percentile(taken, [50, 99]) * 1e3
        rate = len(taken) / turns / SECONDS
        print(f"  {name:12} {rate:8.0f} calls/s, median {median:.2f} ms, 99th percentile {worst:.2f} ms", flush=True)


def main() -> None:
    """Compare layers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2, help="of each process")
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--layers", nargs="+", default=["yolov8n", "encodec_24k", "hifi-gan_v1/ups.2"])
    given = parser.parse_args()
    for layer in scan(LAYERS):
        if layer.problem is not None and layer.name.startswith(tuple(given.layers)):
            print(layer.name, flush=True)
            compare(layer.problem, given.processes, given.threads, given.turns)


if __name__ == "__main__":
    main()
