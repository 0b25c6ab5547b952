#!/usr/bin/env python3
"""Compare with TVM's own kernels: TOPI's definition in MetaSchedule's generic space.

    scripts/topi_baseline.py --trials 64 --json topi.json

Five layers of examples/layers.json (1-D, kernel = stride, large, few channels, 3-D) run on one thread, without bias, in
the batch and layout of that file. MetaSchedule searches with its defaults and its own builder and runner, which
measures 64 candidates before its cost model learns anything. The fastest schedule and our artifact, built by the
installed tuning logs, then take turns in this process on the same data. Both are compared with the reference.
"""

# ruff: noqa: E402 (the environment comes before TVM)
from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Read when TVM starts, here and in the processes that it builds and measures in.
os.environ |= {"TVM_NUM_THREADS": "1", "TVM_BIND_THREADS": "0"}
# TVM imports torch if it is installed. Each such process parses all tensor intrinsics, and looks through all imported
# modules for each. With torch's thousands of modules that takes minutes on a busy machine, and builds time out.
_WITHOUT_TORCH = tempfile.TemporaryDirectory()
Path(_WITHOUT_TORCH.name, "torch.py").write_text("raise ImportError('hidden')", encoding="utf-8")
os.environ["PYTHONPATH"] = f"{_WITHOUT_TORCH.name}:{os.environ.get('PYTHONPATH', '')}"
sys.path.insert(0, _WITHOUT_TORCH.name)

import numpy as np
import tvm
from tvm import te, topi
from tvm.s_tir import meta_schedule

import tvm_deconv as td
from tvm_deconv.bench.peers import turn
from tvm_deconv.frontends import scan
from tvm_deconv.problem.testing import deviation, operands
from tvm_deconv.targets import CpuTarget, detect_host, native

LAYERS = Path(__file__).parent.parent / "examples" / "layers.json"
NAMES = (
    "hifi-gan_v1/ups.2",
    "sam_mask_decoder/output_upscaling.0",
    "pix2pix_u-net_256/ngf*4",
    "enet/transposed_conv",
    "psmnet/dres2.conv5",
)
ROUNDS = 11
TURN_SECONDS = 0.1
PATIENCE_SECONDS = 300.0  # zeros are multiplied too, and a bad schedule of a large layer takes seconds a call
DEFINITIONS: dict[int, Callable[..., te.Tensor]] = {
    1: topi.nn.group_conv1d_transpose_ncw,
    2: topi.nn.group_conv2d_transpose_nchw,
    3: topi.nn.group_conv3d_transpose_ncdhw,
}


def definition(problem: td.Problem) -> tvm.tirx.PrimFunc:
    """Return TOPI's function of data, filter [G * Ci, Co, *K] and output, all float32."""
    ends = [
        (size - 1) * stride + kernel - begin - out
        for size, stride, kernel, begin, out in zip(
            problem.data_spatial,
            problem.strides,
            problem.kernel,
            problem.pads_begin,
            problem.output_spatial,
            strict=True,
        )
    ]
    data = te.placeholder(problem.data_shape, "float32", "data")
    shape = (problem.groups * problem.in_channels, problem.out_channels, *problem.kernel)
    filter = te.placeholder(shape, "float32", "filter")
    pads = (*problem.pads_begin, *ends)
    axes = len(problem.kernel)
    make = DEFINITIONS[axes]
    out = make(data, filter, problem.strides, pads, "float32", (0,) * axes, problem.groups)
    return te.create_prim_func([data, filter, out])


def search(function: tvm.tirx.PrimFunc, target: CpuTarget, trials: int) -> tuple[tvm.runtime.Module, int]:
    """Return the fastest of `trials` schedules, compiled, and the number of those that ran."""
    llvm = tvm.target.Target({"kind": "llvm", "mcpu": target.mcpu, "num-cores": 1})
    module = tvm.IRModule({"main": function})
    with tempfile.TemporaryDirectory() as directory:
        database = meta_schedule.tir_integration.tune_tir(
            module,
            llvm,
            directory,
            trials,
            builder=meta_schedule.builder.LocalBuilder(timeout_sec=PATIENCE_SECONDS),
            runner=meta_schedule.runner.LocalRunner(timeout_sec=PATIENCE_SECONDS),
            cost_model="random",  # like a model that has seen nothing; XGBoost need not be installed
            seed=20,
        )
        ran = sum(1 for record in database.get_all_tuning_records() if record.run_secs)
        schedule = meta_schedule.tir_integration.compile_tir(database, module, llvm)
    if schedule is None:
        raise SystemExit("none of the schedules ran: more --trials")
    return tvm.compile(schedule.mod, target=llvm), ran


def compare(problem: td.Problem, target: CpuTarget, trials: int) -> dict[str, Any]:
    """Search, let both take turns, and return the row of one layer: seconds, deviations, time of the search."""
    start = time.monotonic()
    compiled, ran = search(definition(problem), target, trials)
    taken = time.monotonic() - start
    given = operands(problem, 20)
    canonical = np.ascontiguousarray(problem.canonical_filter(given.filter))
    flat = canonical.reshape(-1, *canonical.shape[2:])
    arguments = [tvm.runtime.tensor(array) for array in (given.data, flat)]
    theirs = tvm.runtime.tensor(np.full(problem.output_shape, np.nan, np.float32))
    ours = np.full(problem.output_shape, np.nan, np.float32)
    bias = None if given.bias is None else np.zeros_like(given.bias)
    with tempfile.TemporaryDirectory() as directory:
        (outcome,) = td.compile([problem], target.name, directory)
        layer = td.load(directory).bind(problem, given.filter, bias)
        function = compiled["main"]
        runs: dict[str, Callable[[], object]] = {
            "tvm": lambda: function(*arguments, theirs),
            "tvm_deconv": lambda: layer(given.data, out=ours),
        }
        turns: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(ROUNDS):
            for name, run in runs.items():
                turns[name].append(turn(run, TURN_SECONDS).median)
    expected = td.reference(problem, given.data, given.filter, bias)
    outputs = {"tvm": theirs.numpy(), "tvm_deconv": ours}
    deviations = {name: deviation(problem, output, expected) for name, output in outputs.items()}
    wrong = [name for name, of_output in deviations.items() if not of_output.allowed]
    if wrong:
        raise SystemExit(f"{problem.key}: the output of {', '.join(wrong)} is wrong")
    seconds = {name: statistics.median(times) for name, times in turns.items()}
    assert outcome.manifest is not None
    return {
        "problem": problem.key,
        "seconds": seconds,
        "quartiles": {name: list(np.quantile(times, (0.25, 0.75))) for name, times in turns.items()},
        "deviation": {name: of_output.largest for name, of_output in deviations.items()},
        "ratio": seconds["tvm"] / seconds["tvm_deconv"],
        "gmac_per_second": {name: 1e-9 * problem.macs / median for name, median in seconds.items()},
        "trials": trials,
        "trials_that_ran": ran,
        "search_seconds": taken,
        "ours": {"algorithm": outcome.manifest.algorithm, "origin": outcome.manifest.origin},
    }


def main() -> None:
    """Parse the arguments, run, and print a table; the JSON file grows with each layer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=64)
    parser.add_argument("--layer", action="append", choices=NAMES, help="only this one; may be given several times")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    td.set_num_threads(1)
    target = native()
    packages = ("tvm_deconv", "apache-tvm", "apache-tvm-ffi")
    report: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "host": detect_host().name,
        "target": target.name,
        "threads": 1,
        "versions": {name: importlib.metadata.version(name) for name in packages},
        "layers": {},
    }
    problems = {layer.name: layer.problem for layer in scan(LAYERS)}
    row = "{:36} {:>10} {:>10} {:>7} {:>8} {:>9}"
    print(row.format("layer", "TVM ms", "ours ms", "ratio", "ran", "search s"), flush=True)
    for name in arguments.layer or NAMES:
        problem = problems[name]
        assert problem is not None
        layer = report["layers"][name] = compare(problem, target, arguments.trials)
        times = [f"{1e3 * layer['seconds'][who]:.3f}" for who in ("tvm", "tvm_deconv")]
        ran = f"{layer['trials_that_ran']}/{layer['trials']}"
        print(row.format(name, *times, f"{layer['ratio']:.2f}", ran, f"{layer['search_seconds']:.0f}"), flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    mean = statistics.geometric_mean(layer["ratio"] for layer in report["layers"].values())
    print(f"geometric mean of TVM / ours: {mean:.2f}")


if __name__ == "__main__":
    main()
