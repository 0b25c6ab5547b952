"""PyTorch: conv_transposeNd and its activation in place; contiguous and channels-last are two contenders."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from tvm_deconv.bench.peers.common import (
    Prepared,
    Task,
    Unsupported,
    as_asked,
    beyond,
    channels_first,
    floating,
    weights,
)
from tvm_deconv.problem import ACTIVATIONS, Array, Problem
from tvm_deconv.problem.testing import Operands


def _in_place(name: str) -> Callable[..., Any]:
    """Return PyTorch's function of an activation, in place if there is such a form."""
    import torch

    function = ACTIVATIONS[name].torch_function.load()
    if "inplace" in getattr(function, "__annotations__", ()):
        return functools.partial(function, inplace=True)
    in_place: Callable[..., Any] = getattr(torch, f"{name}_", function)
    return in_place


def prepare(task: Task, arrays: Operands, threads: int) -> Prepared:
    """Bring data and filter into contiguous memory."""
    import torch

    return _prepared(task.problem, arrays, threads, torch.contiguous_format)


def prepare_channels_last(task: Task, arrays: Operands, threads: int) -> Prepared:
    """Bring data and filter into channels-last memory."""
    import torch

    formats = {2: torch.channels_last, 3: torch.channels_last_3d}
    if task.problem.rank not in formats:
        raise Unsupported("no channels-last memory for one axis")
    return _prepared(task.problem, arrays, threads, formats[task.problem.rank])


def _prepared(problem: Problem, arrays: Operands, threads: int, memory_format: Any) -> Prepared:
    import torch
    from torch.nn import functional

    epilogue, rank = problem.epilogue, problem.rank
    floating(problem)
    torch.set_num_threads(threads)
    paddings, extras, crop = _pads(problem)
    convolution = getattr(functional, f"conv_transpose{rank}d")
    activation, parameters = _in_place(epilogue.activation), epilogue.parameters.values()
    data = _tensor(channels_first(problem, arrays.data)).contiguous(memory_format=memory_format)
    weight = _tensor(weights(problem, arrays)).contiguous(memory_format=memory_format)
    bias = None if arrays.bias is None else _tensor(arrays.bias).to(data.dtype)

    def run() -> Any:
        with torch.inference_mode():
            y = convolution(data, weight, bias, problem.strides, paddings, extras, problem.groups, problem.dilations)
            return activation(y[crop], *parameters)

    return Prepared(run, lambda: as_asked(problem, run().to(torch.float64).numpy()))


def _tensor(array: Array) -> Any:
    import torch

    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _pads(problem: Problem) -> tuple[list[int], list[int], tuple[Any, ...]]:
    """Return padding, output_padding, and the index that cuts off the rest.

    PyTorch cuts the same pad off both ends, then adds less than a stride or dilation; a view cuts off the rest.
    """
    paddings, extras, begins = [], [], []
    for axis, rest in enumerate(beyond(problem)):
        most = max(problem.strides[axis], problem.dilations[axis]) - 1
        padding = min(problem.pads_begin[axis], rest + most)
        if padding < 0:
            raise Unsupported(f"output_padding would have to be {-rest} on axis {axis} and may be at most {most}")
        paddings.append(padding)
        extras.append(max(padding - rest, 0))
        begins.append(problem.pads_begin[axis] - padding)
    spatial = zip(begins, problem.output_spatial, strict=True)
    return paddings, extras, (..., *(slice(begin, begin + extent) for begin, extent in spatial))
