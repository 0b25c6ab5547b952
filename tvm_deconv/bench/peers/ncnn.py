"""ncnn: one layer and its activation, one extractor for each image.

Its kernels take data in packs of up to a vector of channels. For ``N C *X`` a call packs the data and unpacks the
output, so that this counts. For ``N *X C``, which is as far from its packs, data and output are packed: what the layer
costs inside a network.
"""

from __future__ import annotations

import functools
import math
import tempfile
from typing import Any

import numpy as np

from tvm_deconv.bench.peers.common import (
    Prepared,
    Task,
    Unsupported,
    as_asked,
    as_plane,
    beyond,
    channels_first,
    single,
)
from tvm_deconv.problem import Array, Problem
from tvm_deconv.problem.testing import Operands
from tvm_deconv.targets import native

#: activation -> ncnn's number of it in a convolution
_FUSED = {"none": 0, "relu": 1, "leaky_relu": 2, "clip": 3, "sigmoid": 4, "mish": 5, "hardswish": 6}
#: activation -> ncnn's layer of it, which takes the activation's parameters
_LAYERS = {"tanh": "TanH", "gelu": "GELU", "silu": "Swish", "elu": "ELU", "softplus": "Softplus"}
_HARDSWISH = (1 / 6, 0.5)
#: The numbers of a layer's attributes, for width, height and depth; pads are those at the begin, then at the end.
_KERNEL, _DILATION, _STRIDE, _EXTRA = (1, 11, 21), (2, 12, 22), (3, 13, 23), (18, 19, 20)
_PADS = ((4, 14, 24), (15, 16, 17))


def prepare(task: Task, arrays: Operands, threads: int) -> Prepared:
    """Load the layer and make a matrix of each image."""
    problem = task.problem
    single(problem)
    import ncnn

    plane, of_plane = as_plane(problem, arrays)
    net = ncnn.Net()
    allocators = _set_options(net.opt, threads)
    _load(net, plane, of_plane)
    packed = problem.data_format == "NXC"
    data = channels_first(plane, of_plane.data)
    images = [ncnn.Mat(image) for image in data]
    if packed:
        pack = _pack(plane.groups * plane.in_channels)
        images = [ncnn.convert_packing(image, pack, net.opt) for image in images]
    outputs: list[Any] = [None] * len(images)

    def run(owners: object) -> None:  # noqa: ARG001 (of memory that ncnn uses)
        for index, image in enumerate(images):
            extractor = net.create_extractor()
            extractor.input("data", image)
            code, outputs[index] = extractor.extract("out", int(packed))
            if code:
                raise Unsupported(f"it ends with the code {code}")

    def output() -> Array:
        unpacked = [ncnn.convert_packing(out, 1, net.opt) for out in outputs]
        result = np.stack([np.array(out.numpy()) for out in unpacked])
        channels = plane.groups * plane.out_channels
        result = result.reshape(plane.batch, channels, *plane.output_spatial)
        return as_asked(plane, result).reshape(problem.output_shape)

    note = "data in packs" if packed else "conversions counted"
    return Prepared(functools.partial(run, (data, allocators)), output, note)


def _pack(channels: int) -> int:
    """Return how many channels ncnn would pack on this machine."""
    return next(pack for pack in (native().lanes(4), 8, 4, 1) if channels % pack == 0)


def _set_options(options: Any, threads: int) -> tuple[Any, Any]:
    """Ask for float32 throughout, and for memory that is kept between calls; return its owners."""
    import ncnn

    options.num_threads = threads
    for name in dir(options):
        if name.startswith(("use_fp16", "use_bf16", "use_int8")):
            setattr(options, name, False)
    allocators = ncnn.UnlockedPoolAllocator(), ncnn.PoolAllocator()
    options.blob_allocator, options.workspace_allocator = allocators
    return allocators


def _load(net: Any, problem: Problem, arrays: Operands) -> None:
    """Give the net its layers and their weights."""
    layers = [_convolution(problem)]
    epilogue = problem.epilogue
    if epilogue.activation in _LAYERS:
        numbers = " ".join(f"{index}={value!r}" for index, value in enumerate(epilogue.parameters.values()))
        layers.append(f"{_LAYERS[epilogue.activation]} activation 1 1 sum out {numbers}")
    elif epilogue.activation not in _FUSED:
        raise Unsupported(f"no {epilogue.activation}")
    if net.load_param_mem(
        "\n".join(["7767517", f"{len(layers) + 1} {len(layers) + 1}", "Input data 0 1 data", *layers])
    ):
        raise Unsupported("it does not read the layer")
    with tempfile.NamedTemporaryFile() as file:
        file.write(bytes(4))  # the kind of the weights: float32
        filter = problem.canonical_filter(arrays.filter).swapaxes(1, 2)
        file.write(np.ascontiguousarray(filter, np.float32).tobytes())
        file.write(b"" if arrays.bias is None else arrays.bias.astype(np.float32).tobytes())
        file.flush()
        if net.load_model(file.name):
            raise Unsupported("it does not read the weights")


def _convolution(problem: Problem) -> str:
    """Return the line of the convolution."""
    epilogue, rests = problem.epilogue, beyond(problem)
    attributes: dict[int, object] = {0: problem.groups * problem.out_channels, 5: int(epilogue.bias)}
    attributes[6] = math.prod(problem.kernel) * problem.groups * problem.in_channels * problem.out_channels
    for numbers, values in (
        (_KERNEL, problem.kernel),
        (_DILATION, problem.dilations),
        (_STRIDE, problem.strides),
        (_PADS[0], problem.pads_begin),
        (_PADS[1], [max(rest, 0) for rest in rests]),
        (_EXTRA, [max(-rest, 0) for rest in rests]),
    ):
        attributes |= zip(numbers, reversed(values), strict=False)
    if problem.groups > 1:
        attributes[7] = problem.groups
    activation = _FUSED.get(epilogue.activation, 0)
    if activation:
        attributes[9] = activation
        parameters = _HARDSWISH if epilogue.activation == "hardswish" else (*epilogue.parameters.values(),)
        if parameters:
            attributes[-23310] = ",".join(map(repr, (len(parameters), *map(float, parameters))))
    kind = f"Deconvolution{'DepthWise' if problem.groups > 1 else ''}{'3D' if problem.rank == 3 else ''}"
    out = "sum" if epilogue.activation in _LAYERS else "out"
    text = " ".join(f"{number}={value}" for number, value in attributes.items())
    return f"{kind} convolution 1 1 data {out} {text}"
