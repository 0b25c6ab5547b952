"""A model in each framework, as it is and with artifacts."""

from __future__ import annotations

import copy
import json
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tvm_deconv as td
from tvm_deconv.frontends import scan

#: Seconds before a turn of a form, in which the other's threads fall asleep: those of ONNX Runtime spin for 40 ms.
PAUSE = 0.05
_PROFILED = 5  # turns of both forms
#: The times of a node in each call, by its name and whether it is a transposed convolution.
_Nodes = dict[tuple[str, bool], list[float]]
#: The part of the original's time that transposed convolutions take, and how many times as fast artifacts are in them.
_Profile = tuple[float | None, float | None]


@dataclass(frozen=True)
class Pair:
    """Calls of a model as it is and with artifacts, which return the output.

    `swapped` layers ran on artifacts; `left` are the others, with the reasons. `profile` returns the part of the
    original's time that transposed convolutions take, and how many times as fast artifacts are in them, or None.
    """

    original: Callable[[], Any]
    ours: Callable[[], Any]
    swapped: int
    left: Mapping[str, str] = field(default_factory=dict)
    profile: Callable[[], _Profile] = lambda: (None, None)


def _library(problems: Iterable[Any], folder: Path) -> td.Library:
    output = folder / "artifacts"
    td.compile(list(dict.fromkeys(problems)), "native", output)
    return td.load(output)


def _torch(model: Any, x: Any, folder: Path, _threads: int) -> Pair:
    swapped = copy.deepcopy(model)
    report = td.torch.replace(swapped, _library(td.torch.problems(swapped, [x]), folder), [x])
    left = {swap.name: swap.reason for swap in report if swap.reason}
    share = sum(swap.share or 0.0 for swap in report)
    spent = sum(swap.share / (1 if swap.reason else swap.gain) for swap in report if swap.share and swap.gain)
    gain = share / spent if spent else None
    return Pair(lambda: model(x), lambda: swapped(x), len(report) - len(left), left, lambda: (share, gain))


def _compiled(model: Any, x: Any, folder: Path, _threads: int) -> Pair:
    import torch
    import torch._dynamo.config as dynamo

    from tvm_deconv.torch.modules import MOST_PROGRAMS

    dynamo.cache_size_limit = MOST_PROGRAMS  # for two models here, whose modules repeat
    dynamo.fail_on_recompile_limit_hit = True  # else it would run functions as they are
    swapped = copy.deepcopy(model)
    forms = [form for p in td.torch.problems(swapped, [x]) for form in (p, p.replace(data_format="NXC"))]
    report = td.torch.replace(swapped, _library(forms, folder), [x], compiled=True)
    left = {swap.name: swap.reason for swap in report if swap.reason}
    original, ours = (torch.compile(form, dynamic=False) for form in (model, swapped))
    return Pair(lambda: original(x), lambda: ours(x), len(report) - len(left), left)


def _exported(model: Any, x: Any, folder: Path) -> Path:
    """Return the file of the model in ONNX, which `folder` may have from an earlier call."""
    import torch

    path = folder / "model.onnx"
    if not path.exists():
        torch.onnx.export(model, (x,), path.with_suffix(".part"), dynamo=False, opset_version=17, input_names=["x"])
        path.with_suffix(".part").rename(path)
    return path


def _problems(path: Path) -> list[Any]:
    return [layer.problem for layer in scan(path) if layer.problem is not None]


def _onnxruntime(model: Any, x: Any, folder: Path, threads: int) -> Pair:
    import onnxruntime

    from tvm_deconv.onnxruntime import Session

    path, feeds = _exported(model, x, folder), {"x": x.numpy()}
    library = _library(_problems(path), folder)

    def sessions(profiled: bool) -> tuple[Any, Any]:
        made = []
        for name in ("plain", "ours"):
            options = onnxruntime.SessionOptions()
            options.intra_op_num_threads = threads
            options.enable_profiling = profiled
            options.profile_file_prefix = str(folder / name)
            if name == "plain":
                made.append(onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"]))
            else:
                made.append(Session(path, library, options))
        return made[0], made[1]

    def nodes(session: Any) -> _Nodes:
        events = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
        times: _Nodes = {}
        for node in events:
            if node.get("cat") == "Node" and node["name"].endswith("_kernel_time"):
                taken = node["args"]["op_name"].startswith("ConvTranspose")
                times.setdefault((node["name"], taken), []).append(node["dur"])
        return {node: spent[1::2] for node, spent in times.items()}

    def profile() -> _Profile:
        forms, calls = sessions(True), []
        for form in _in_turns(forms):
            form.run(None, feeds)
            begin = time.perf_counter()
            form.run(None, feeds)  # this one counts
            calls.append(time.perf_counter() - begin)
        return _share(*map(nodes, forms), [1e6 * call for call in calls[::2]])

    plain, session = sessions(False)
    return Pair(
        lambda: plain.run(None, feeds)[0],
        lambda: session.run(None, feeds)[0],
        len(session.layers),
        session.left,
        profile,
    )


def _openvino(model: Any, x: Any, folder: Path, threads: int) -> Pair:
    import openvino

    from tvm_deconv.openvino import problems, replace
    from tvm_deconv.openvino.timing import Timed

    path = folder / "model.xml"
    if not path.exists():
        read = openvino.convert_model(_exported(model, x, folder))
        openvino.save_model(read, folder / "part.xml", compress_to_fp16=False)
        (folder / "part.bin").rename(path.with_suffix(".bin"))
        (folder / "part.xml").rename(path)
    settings = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"}
    core, feed = openvino.Core(), [x.numpy()]
    replaced = core.read_model(path)
    operations = replace(replaced, path, _library(problems(path), folder), settings=settings)  # live as the calls do

    names = {layer.name for layer in scan(path)}

    def profile() -> _Profile:
        compiled = (core.compile_model(form, "CPU", settings | {"PERF_COUNT": True}) for form in (path, replaced))
        times: dict[Timed, _Nodes] = {Timed(form, feed): {} for form in compiled}
        calls = []
        for timed in _in_turns(times):
            for name, spent in timed.nodes().items():
                taken = name in names or "tvm_deconv." in name  # the copies around it too
                times[timed].setdefault((name, taken), []).append(spent)
            calls.append(timed.seconds())
        return _share(*times.values(), calls[::2])

    plain, ours = (core.compile_model(form, "CPU", settings) for form in (path, replaced))
    left = operations.left
    return Pair(lambda: plain(feed)[0], lambda _=operations: ours(feed)[0], len(operations), left, profile)


def _in_turns(forms: Iterable[Any]) -> Iterator[Any]:
    """Yield the two forms in turns, each behind a pause."""
    both = list(forms)
    for _ in range(_PROFILED):
        for form in both:
            time.sleep(PAUSE)
            yield form


def _share(original: _Nodes, ours: _Nodes, calls: Sequence[float]) -> _Profile:
    """Return the part of the original's calls that layers take, and their gain; all times are of one unit."""
    before, after = _spent(original), _spent(ours)
    return before / statistics.median(calls), before / after if after else None


def _spent(nodes: _Nodes) -> float:
    """Return the time of the layers in a call."""
    return sum(statistics.median(times) for (_, taken), times in nodes.items() if taken)


PAIRS: Mapping[str, Callable[[Any, Any, Path, int], Pair]] = {
    "pytorch": _torch,
    "torch.compile": _compiled,
    "onnxruntime": _onnxruntime,
    "openvino": _openvino,
}
FRAMEWORKS = tuple(PAIRS)
