"""Time a model in one framework as it is and with artifacts, in turns, and compare the outputs."""

from __future__ import annotations

import copy
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import tvm_deconv as td
from models.catalogue import Model
from tvm_deconv.problem import Problem

#: Largest allowed deviation of an output, as a part of its largest element.
TOLERANCE = 2e-3
_LEAST_TURNS = 5
_PAUSE = 0.05


@dataclass(frozen=True)
class Timed:
    """A model in a framework, on a number of threads: median seconds of a call as it is, and with artifacts.

    `swapped` of `layers` transposed convolutions ran on artifacts. `deviation` is the largest difference between the
    outputs, as a part of the largest element.
    """

    model: str
    framework: str
    threads: int
    original: float
    ours: float
    swapped: int
    layers: int
    deviation: float

    @property
    def ratio(self) -> float:
        """How many times as fast the model is with artifacts."""
        return self.original / self.ours

    @property
    def right(self) -> bool:
        """True if both outputs agree."""
        return self.deviation <= TOLERANCE  # not for NaN


@dataclass(frozen=True)
class _Pair:
    """Calls of a model as it is and with artifacts, which return the output; and how many layers these take."""

    original: Callable[[], Any]
    ours: Callable[[], Any]
    swapped: int
    layers: int


def timed(model: Model, framework: str, threads: int, seconds: float) -> Timed:
    """Make a model, compile its layers for this machine, and time it for `seconds`; raise what the framework raises."""
    import torch

    torch.manual_seed(0)
    torch.set_num_threads(threads)
    td.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as scratch, torch.inference_mode():
        made, x = model.make(), torch.randn(model.shape)
        pair = _PAIRS[framework](made, x, Path(scratch), threads)
        expected, found = (np.asarray(call(), np.float64) for call in (pair.original, pair.ours))
        deviation = float(np.abs(found - expected).max() / np.abs(expected).max())
        original, ours = _turns(pair, seconds)
    return Timed(model.name, framework, threads, original, ours, pair.swapped, pair.layers, deviation)


def _turns(pair: _Pair, seconds: float) -> tuple[float, float]:
    """Return the medians of both calls, which take turns; each follows a pause and a call that is not counted.

    In the pause the other's threads fall asleep: those of ONNX Runtime spin for 40 ms after a call.
    """
    found: tuple[list[float], list[float]] = ([], [])
    end = time.perf_counter() + seconds
    while len(found[0]) < _LEAST_TURNS or time.perf_counter() < end:
        for times, call in zip(found, (pair.original, pair.ours), strict=True):
            time.sleep(_PAUSE)
            call()
            begin = time.perf_counter()
            call()
            times.append(time.perf_counter() - begin)
    return statistics.median(found[0]), statistics.median(found[1])


def _compile(problems: Mapping[Problem, Any] | Any, scratch: Path) -> td.Library:
    output = scratch / "artifacts"
    td.compile(list(problems), "native", output)
    return td.load(output)


def _pytorch(model: Any, x: Any, scratch: Path, threads: int) -> _Pair:  # noqa: ARG001
    swapped = copy.deepcopy(model)
    report = td.torch.replace(swapped, _compile(td.torch.problems(swapped, [x]), scratch), [x])
    count = sum(not swap.reason for swap in report)
    return _Pair(lambda: model(x), lambda: swapped(x), count, len(report))


def _exported(model: Any, x: Any, scratch: Path) -> Path:
    import torch

    path = scratch / "model.onnx"
    torch.onnx.export(model, (x,), path, dynamo=False, opset_version=17, input_names=["x"])
    return path


def _problems(path: Path) -> dict[Problem, list[str]]:
    from tvm_deconv.frontends import scan

    found: dict[Problem, list[str]] = {}
    for layer in scan(path):
        if layer.problem is not None:
            found.setdefault(layer.problem, []).append(layer.name)
    return found


def _onnxruntime(model: Any, x: Any, scratch: Path, threads: int) -> _Pair:
    import onnxruntime

    from tvm_deconv.onnxruntime import Session

    path, feeds = _exported(model, x, scratch), {"x": x.numpy()}

    def options() -> Any:
        made = onnxruntime.SessionOptions()
        made.intra_op_num_threads = threads
        return made

    plain = onnxruntime.InferenceSession(path, options(), providers=["CPUExecutionProvider"])
    session = Session(str(path), _compile(_problems(path), scratch), options())
    swapped = len(session.layers)
    layers = swapped + len(session.left)
    return _Pair(lambda: plain.run(None, feeds)[0], lambda: session.run(None, feeds)[0], swapped, layers)


def _openvino(model: Any, x: Any, scratch: Path, threads: int) -> _Pair:
    import openvino

    from tvm_deconv.openvino import replace

    path = scratch / "model.xml"
    openvino.save_model(openvino.convert_model(_exported(model, x, scratch)), path, compress_to_fp16=False)
    problems = _problems(path)
    settings = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"}
    core = openvino.Core()
    replaced = core.read_model(path)
    operations = replace(replaced, str(path), _compile(problems, scratch))
    plain, ours = core.compile_model(path, "CPU", settings), core.compile_model(replaced, "CPU", settings)
    feed, layers = [x.numpy()], sum(map(len, problems.values()))
    # The operations live as long as the calls.
    return _Pair(lambda: plain(feed)[0], lambda _=operations: ours(feed)[0], len(operations), layers)


_PAIRS: Mapping[str, Callable[[Any, Any, Path, int], _Pair]] = {
    "pytorch": _pytorch,
    "onnxruntime": _onnxruntime,
    "openvino": _openvino,
}
FRAMEWORKS = tuple(_PAIRS)


def table(rows: list[Timed]) -> str:
    """Return rows as a Markdown table, and the geometric mean of their ratios."""
    lines = [
        "| model | framework | threads | as it is, ms | with artifacts, ms | ratio | layers |",
        "|---|---|" + "---:|" * 5,
    ]
    for row in rows:
        times = f"{1e3 * row.original:.3g} | {1e3 * row.ours:.3g} | {row.ratio:.2f}"
        wrong = "" if row.right else f", WRONG by {row.deviation:.1e}"
        lines.append(
            f"| {row.model} | {row.framework} | {row.threads} | {times} | {row.swapped} of {row.layers}{wrong} |"
        )
    if rows:
        mean = math.exp(statistics.fmean(math.log(row.ratio) for row in rows))
        lines.append(f"\nGeometric mean {mean:.2f}, least {min(row.ratio for row in rows):.2f}, of {len(rows)}.")
    return "\n".join(lines)
