"""A model in each framework, as it is and with artifacts."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tvm_deconv as td
from tvm_deconv.frontends import scan

_PROFILED = 5  # calls of each form
#: Seconds of transposed convolutions, and of a whole call.
_Seconds = tuple[float, float]


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
    profile: Callable[[], tuple[float | None, float | None]] = lambda: (None, None)


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

    def seconds(session: Any) -> _Seconds:
        for _ in range(_PROFILED):
            session.run(None, feeds)
        events = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
        nodes = [event for event in events if event.get("cat") == "Node" and event["name"].endswith("_kernel_time")]
        layers = [node for node in nodes if node["args"]["op_name"].startswith("ConvTranspose")]
        return sum(node["dur"] for node in layers), sum(node["dur"] for node in nodes)

    plain, session = sessions(False)
    return Pair(
        lambda: plain.run(None, feeds)[0],
        lambda: session.run(None, feeds)[0],
        len(session.layers),
        session.left,
        lambda: _share(*map(seconds, sessions(True))),
    )


def _openvino(model: Any, x: Any, folder: Path, threads: int) -> Pair:
    import openvino

    from tvm_deconv.openvino import problems, replace

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

    def seconds(form: Any) -> _Seconds:
        request = core.compile_model(form, "CPU", settings | {"PERF_COUNT": True}).create_infer_request()
        layers, whole = 0.0, 0.0
        for _ in range(_PROFILED):
            request.infer(feed)
            for node in request.profiling_info:
                spent = node.real_time.total_seconds()
                taken = "BackpropData" in node.node_type or "tvm_deconv." in node.node_name  # the copies around it too
                layers += spent if taken else 0.0
                whole += spent
        return layers, whole

    plain, ours = (core.compile_model(form, "CPU", settings) for form in (path, replaced))
    left = operations.left
    profile = lambda: _share(seconds(path), seconds(replaced))  # noqa: E731
    return Pair(lambda: plain(feed)[0], lambda _=operations: ours(feed)[0], len(operations), left, profile)


def _share(original: _Seconds, ours: _Seconds) -> tuple[float | None, float | None]:
    """Return the part of the original's time that layers take, and their gain."""
    return original[0] / original[1], original[0] / ours[0] if ours[0] else None


PAIRS: Mapping[str, Callable[[Any, Any, Path, int], Pair]] = {
    "pytorch": _torch,
    "torch.compile": _compiled,
    "onnxruntime": _onnxruntime,
    "openvino": _openvino,
}
FRAMEWORKS = tuple(PAIRS)
