"""The contenders of a comparison: our artifacts, and the same layers in other packages.

A contender is written as a user of that package would who cares about speed: constant weights, the epilogue as further
operators that the package may fuse, float32 arithmetic on float32 data, and outputs allocated beforehand if the package
can. Data in a layout that a package does not have is brought into its own before the clock starts.

Each contender has a process, since thread settings are read once per process and OpenMP libraries clash.
"""

from __future__ import annotations

import functools
import importlib.metadata
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tvm_deconv.bench.floors import copy_bytes_per_second, fma_per_second
from tvm_deconv.compiler.process import Refusal
from tvm_deconv.problem import ACTIVATIONS, Array, Epilogue, Problem
from tvm_deconv.problem.testing import Deviation, Operands, deviation, operands
from tvm_deconv.runtime.library import load
from tvm_deconv.runtime.threads import set_num_threads
from tvm_deconv.runtime.verify import only

OURS = "tvm_deconv"
#: The opset of ONNX of the models that peers run.
_OPSET = 20


class Unsupported(Refusal):
    """A layer that a package cannot express."""


@dataclass(frozen=True)
class Task:
    """One layer to run: `artifact` is the name of ours in the directory `root`, `seed` is that of the arrays."""

    problem: Problem
    seed: int
    root: Path
    artifact: str


class Prepared(NamedTuple):
    """A layer that is ready to `run`; `output` returns the last result in the problem's format, `note` says how."""

    run: Callable[[], object]
    output: Callable[[], Array]
    note: str = ""


class Turn(NamedTuple):
    """Calls one after the other, after one that is not counted: their median in seconds, and their number."""

    median: float
    calls: int


def _channels_first(problem: Problem, array: Array) -> Array:
    return np.ascontiguousarray(np.moveaxis(array, -1, 1)) if problem.data_format == "NXC" else array


def _as_asked(problem: Problem, output: Array) -> Array:
    return np.moveaxis(output, 1, -1) if problem.data_format == "NXC" else output


def _weights(problem: Problem, arrays: Operands) -> Array:
    """Return the filter as ``[Cin, Cout/G, *K]``, which ONNX and PyTorch take."""
    shape = (problem.groups * problem.in_channels, problem.out_channels, *problem.kernel)
    return np.ascontiguousarray(problem.canonical_filter(arrays.filter).reshape(shape))


def _beyond(problem: Problem) -> list[int]:
    """Return how many positions the uncropped output has behind ours, per axis; negative if ours is longer."""
    axes = zip(problem.uncropped_spatial, problem.pads_begin, problem.output_spatial, strict=True)
    return [uncropped - begin - extent for uncropped, begin, extent in axes]


def onnx_model(problem: Problem, arrays: Operands) -> bytes:
    """Return a model of one ConvTranspose with its epilogue, channels first, weights inside."""
    import onnx
    from onnx import helper, numpy_helper

    epilogue, beyond = problem.epilogue, _beyond(problem)
    element = helper.np_dtype_to_tensor_dtype(arrays.data.dtype)
    constants = {"filter": _weights(problem, arrays)}
    if arrays.bias is not None:
        constants["bias"] = arrays.bias.astype(arrays.data.dtype)
    nodes = [
        helper.make_node(
            "ConvTranspose",
            ["data", *constants],
            ["sum"],
            group=problem.groups,
            strides=problem.strides,
            dilations=problem.dilations,
            pads=[*problem.pads_begin, *(max(rest, 0) for rest in beyond)],
            output_padding=[max(-rest, 0) for rest in beyond],
        )
    ]
    nodes += _activation_nodes(epilogue, constants, arrays.data.dtype)
    nodes[-1].output[0] = "out"
    whole = problem.replace(data_format="NCX")
    graph = helper.make_graph(
        nodes,
        "layer",
        [helper.make_tensor_value_info("data", element, whole.data_shape)],
        [helper.make_tensor_value_info("out", element, whole.output_shape)],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", _OPSET)], ir_version=10)
    onnx.checker.check_model(model)
    content: bytes = model.SerializeToString()
    return content


def _activation_nodes(epilogue: Epilogue, constants: dict[str, Array], dtype: np.dtype[Any]) -> list[Any]:
    """Return the nodes of an activation of "sum"; add its constants, of that dtype, to `constants`."""
    from onnx import helper

    activation, parameters = ACTIVATIONS[epilogue.activation], epilogue.parameters
    operator = next((operator for operator in activation.onnx if operator.since <= _OPSET), None)
    if operator is not None:
        inputs = [argument.parameter for argument in operator.inputs if argument.parameter is not None]
        constants |= {name: np.array(parameters[name], dtype) for name in inputs}
        attributes = {
            name: argument.default if argument.parameter is None else parameters[argument.parameter]
            for name, argument in operator.arguments.items()
            if argument.parameter not in inputs
        }
        return [helper.make_node(operator.name, ["sum", *inputs], ["activated"], **attributes)]
    nodes, tensor = [], "sum"
    for name in activation.gate:
        nodes.append(helper.make_node(ACTIVATIONS[name].onnx[0].name, [tensor], [name]))
        tensor = name
    return [*nodes, helper.make_node("Mul", ["sum", tensor], ["activated"])] if nodes else []


def _floating(problem: Problem) -> None:
    if problem.accumulate_dtype == "int32":
        raise Unsupported(f"no transposed convolution of {problem.dtype}")


def _ours(task: Task, arrays: Operands, threads: int) -> Prepared:
    set_num_threads(threads)
    library = load(task.root)
    (manifest,) = (manifest for manifest in library.manifests if manifest.name == task.artifact)
    layer = only(library, manifest).bind(task.problem, arrays.filter, arrays.bias)
    out = layer(arrays.data)
    return Prepared(lambda: layer(arrays.data, out=out), lambda: out, manifest.algorithm)


def _onnxruntime(task: Task, arrays: Operands, threads: int) -> Prepared:
    import onnxruntime

    problem = task.problem
    _floating(problem)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(onnx_model(problem, arrays), options, providers=["CPUExecutionProvider"])
    out = np.empty(problem.replace(data_format="NCX").output_shape, arrays.data.dtype)
    binding = session.io_binding()
    values = [onnxruntime.OrtValue.ortvalue_from_numpy(array) for array in (_channels_first(problem, arrays.data), out)]
    binding.bind_ortvalue_input("data", values[0])
    binding.bind_ortvalue_output("out", values[1])
    return Prepared(lambda: session.run_with_iobinding(binding), lambda: _as_asked(problem, values[1].numpy().copy()))


def _openvino(task: Task, arrays: Operands, threads: int) -> Prepared:
    import openvino

    problem = task.problem
    _floating(problem)
    if problem.dtype == "float64":
        raise Unsupported("it computes float64 in float32")
    core = openvino.Core()
    # Without the hint it computes float32 in bfloat16 on CPUs that are fast at that.
    settings = {
        "INFERENCE_NUM_THREADS": threads,
        "NUM_STREAMS": 1,
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": "f32",
    }
    model = onnx_model(problem, arrays)
    request = core.compile_model(core.read_model(model), "CPU", settings).create_infer_request()
    out = np.empty(problem.replace(data_format="NCX").output_shape, arrays.data.dtype)
    # It owns none of the memory, so `run` keeps the owners alive.
    owners = (model, _channels_first(problem, arrays.data), out)
    request.set_input_tensor(openvino.Tensor(owners[1], shared_memory=True))
    request.set_output_tensor(openvino.Tensor(out, shared_memory=True))

    def run(owners: object = owners) -> None:  # noqa: ARG001
        request.infer()

    return Prepared(run, lambda: _as_asked(problem, out))


def _in_place(name: str) -> Callable[..., Any]:
    """Return PyTorch's function of an activation, in place if there is such a form."""
    import torch

    function = ACTIVATIONS[name].torch_function.load()
    if "inplace" in getattr(function, "__annotations__", ()):
        return functools.partial(function, inplace=True)
    in_place: Callable[..., Any] = getattr(torch, f"{name}_", function)
    return in_place


def _torch(task: Task, arrays: Operands, threads: int) -> Prepared:
    import torch
    from torch.nn import functional

    problem, epilogue, rank = task.problem, task.problem.epilogue, task.problem.rank
    _floating(problem)
    torch.set_num_threads(threads)

    def tensor(array: Array) -> Any:
        if array.dtype.name == "bfloat16":
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(array)

    # PyTorch cuts the same pad off both ends, then adds less than a stride or dilation; a view cuts off the rest.
    paddings, extras, begins = [], [], []
    for axis, rest in enumerate(_beyond(problem)):
        most = max(problem.strides[axis], problem.dilations[axis]) - 1
        padding = min(problem.pads_begin[axis], rest + most)
        if padding < 0:
            raise Unsupported(f"output_padding would have to be {-rest} on axis {axis} and may be at most {most}")
        paddings.append(padding)
        extras.append(max(padding - rest, 0))
        begins.append(problem.pads_begin[axis] - padding)
    spatial = zip(begins, problem.output_spatial, strict=True)
    crop = (..., *(slice(begin, begin + extent) for begin, extent in spatial))
    convolution = getattr(functional, f"conv_transpose{rank}d")
    activation, parameters = _in_place(epilogue.activation), epilogue.parameters.values()
    bias = None if arrays.bias is None else tensor(arrays.bias).to(tensor(arrays.data).dtype)

    def variant(memory_format: Any) -> Callable[[], Any]:
        data = tensor(_channels_first(problem, arrays.data)).contiguous(memory_format=memory_format)
        weight = tensor(_weights(problem, arrays)).contiguous(memory_format=memory_format)

        def run() -> Any:
            with torch.inference_mode():
                y = convolution(
                    data, weight, bias, problem.strides, paddings, extras, problem.groups, problem.dilations
                )
                return activation(y[crop], *parameters)

        return run

    formats = {"contiguous": torch.contiguous_format}
    if rank > 1:
        formats["channels_last"] = torch.channels_last if rank == 2 else torch.channels_last_3d
    variants = {name: variant(memory_format) for name, memory_format in formats.items()}
    best = min(variants, key=lambda name: turn(variants[name], 0.02).median)
    run = variants[best]
    return Prepared(run, lambda: _as_asked(problem, run().to(torch.float64).numpy()), best)


def _jax(task: Task, arrays: Operands, threads: int) -> Prepared:
    del threads  # as many as the process may use CPUs
    import jax

    problem, epilogue, rank = task.problem, task.problem.epilogue, task.problem.rank
    _floating(problem)
    if problem.dtype == "float64":
        jax.config.update("jax_enable_x64", True)
    # As a convolution of data with zeros between its elements, with the filter turned round.
    filter = problem.canonical_filter(arrays.filter)
    flipped = np.flip(filter, tuple(range(3, 3 + rank))).swapaxes(1, 2)
    weight = np.ascontiguousarray(flipped.reshape(-1, problem.in_channels, *problem.kernel))
    pads = []
    for axis in range(rank):
        reach = problem.dilations[axis] * (problem.kernel[axis] - 1)
        low = reach - problem.pads_begin[axis]
        spread = problem.strides[axis] * (problem.data_spatial[axis] - 1) + 1
        pads.append((low, problem.output_spatial[axis] - spread - low + reach))
    spatial = "DHW"[-rank:]
    layout = f"NC{spatial}" if problem.data_format == "NCX" else f"N{spatial}C"
    activation, parameters = ACTIVATIONS[epilogue.activation].jax_function.load(), epilogue.parameters.values()
    channel = layout.index("C")
    shape = [-1 if axis == channel else 1 for axis in range(rank + 2)]
    bias = None if arrays.bias is None else arrays.bias.astype(arrays.data.dtype).reshape(shape)

    def layer(data: Any) -> Any:
        y = jax.lax.conv_general_dilated(
            data,
            weight,
            window_strides=(1,) * rank,
            padding=pads,
            lhs_dilation=problem.strides,
            rhs_dilation=problem.dilations,
            dimension_numbers=(layout, f"OI{spatial}", layout),
            feature_group_count=problem.groups,
            precision=jax.lax.Precision.HIGHEST,
        )
        return activation(y if bias is None else y + bias, *parameters)

    data, compiled = jax.device_put(arrays.data), jax.jit(layer)
    return Prepared(lambda: compiled(data).block_until_ready(), lambda: np.asarray(compiled(data)))


_Prepare = Callable[[Task, Operands, int], Prepared]
#: name of a contender -> how it prepares a layer
_CONTENDERS: dict[str, _Prepare] = {
    OURS: _ours,
    "onnxruntime": _onnxruntime,
    "openvino": _openvino,
    "torch": _torch,
    "jax": _jax,
}
#: name of a peer -> the packages that it takes
PEERS = {
    "onnxruntime": ("onnxruntime", "onnx"),
    "openvino": ("openvino", "onnx"),
    "torch": ("torch",),
    "jax": ("jax",),
}


def turn(run: Callable[[], object], seconds: float) -> Turn:
    """Call `run` for `seconds`, at least once, after one call that is not counted."""
    clock = time.perf_counter
    run()
    times = []
    end = clock() + seconds
    while True:
        start = clock()
        run()
        stop = clock()
        times.append(stop - start)
        if stop >= end:
            return Turn(statistics.median(times), len(times))


class Contender:
    """One contender, in its process."""

    def __init__(self, name: str, threads: int) -> None:
        self.name = name
        self.threads = threads
        self._prepared: Prepared | None = None
        self._problem: Problem | None = None

    def version(self) -> str:
        """Return the version of the package."""
        return importlib.metadata.version(self.name)

    def prepare(self, task: Task) -> str:
        """Make a layer ready and run it once; return the note on how it runs."""
        self._prepared = None
        self._problem = task.problem
        prepared = _CONTENDERS[self.name](task, operands(task.problem, task.seed), self.threads)
        prepared.run()
        self._prepared = prepared
        return prepared.note

    def turn(self, seconds: float) -> Turn:
        """Time the layer."""
        assert self._prepared is not None
        return turn(self._prepared.run, seconds)

    def check(self, expected: Path) -> Deviation:
        """Compare the output with the array in the file `expected`."""
        assert self._prepared is not None
        assert self._problem is not None
        output = self._prepared.output()
        return deviation(self._problem, output, np.load(expected, mmap_mode="r"), fused=self.name == OURS)

    def fma(self, library: Path) -> float:
        """Measure the multiply-adds per second of the kernel in `library`, on all threads."""
        return fma_per_second(library, self.threads)

    def copy(self, size: int) -> float:
        """Measure the bytes per second, read plus written, of copies of `size` bytes in all."""
        return copy_bytes_per_second(size, self.threads)
