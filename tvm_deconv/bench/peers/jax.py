"""JAX: a convolution of dilated data with the filter turned round, compiled by jit."""

from __future__ import annotations

from typing import Any

import numpy as np

from tvm_deconv.bench.peers.common import Prepared, Task, floating
from tvm_deconv.problem import ACTIVATIONS
from tvm_deconv.problem.testing import Operands


def prepare(task: Task, arrays: Operands, threads: int) -> Prepared:
    """Compile the layer."""
    del threads  # as many as the process may use CPUs
    import jax

    problem, epilogue, rank = task.problem, task.problem.epilogue, task.problem.rank
    floating(problem)
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
