"""Buffers of the matrix definition: what is read at once does not compete for one set of a cache."""

import json
import re

import pytest
from support.kernels import X86

import tvm_deconv as td
from tvm_deconv.compiler.selection import named
from tvm_deconv.targets import CPU_TARGETS

LINE = 64
PAGE = 4096


def strides_of(kernel, buffer, axes):
    """Return the strides in bytes of the `axes` of a `buffer` of 32 bits, padded as its stage says."""
    text = kernel.deconv.script()
    shape = re.search(rf"{buffer} = T\.sblock_alloc_buffer\(\((.*?)\), align", text)[1]
    shape = [int(extent) for extent in re.findall(r"T\.int64\((\d+)\)", shape)]
    stage = re.search(rf'T\.writes\({buffer}\[.*?\n *T\.sblock_attr\({{"buffer_dim_align": (\[\[.*?\]\])', text)
    padding = {axis: (factor, offset) for _, axis, factor, offset in json.loads(stage[1])} if stage else {}
    strides, stride = {}, 1
    for axis in reversed(range(len(shape))):
        if axis in padding:
            factor, offset = padding[axis]
            stride += (offset - stride) % factor
        strides[axis - len(shape)] = 4 * stride
        stride *= shape[axis]
    return [strides[axis] for axis in axes]


@pytest.mark.parametrize("name", ["x86-64-v3", "x86-64-v4"])
def test_points_of_a_row_are_in_different_sets(name):
    # 32 rows of 64 input and of 32 output channels: whole pages from point to point without padding.
    shape = ((64, 64), (3, 3), (2, 2), (2, 2), (2, 2), (128, 128))
    problem, target = td.Problem(1, 1, 64, 32, *shape), CPU_TARGETS[name]
    knobs = {"images": 1, "depth": 1, "height": 8, "width": 64, "channels": 32, "rows": 4, "vectors": 2}
    knobs |= {"outputs_d": 1, "outputs_h": 4, "outputs_w": 4, "share_data": 0}
    algorithm = named("winograd")
    kernel = X86.build(problem, target, algorithm, algorithm.read(knobs))
    for buffer, axis in (("rows_0", -6), ("run_0", -3)):
        (stride,) = strides_of(kernel, buffer, [axis])
        sets = {point * stride % PAGE // LINE for point in range(36)}
        assert stride % LINE == 0
        assert len(sets) == 36, (buffer, stride)


def test_long_rows_are_in_different_sets():
    # 16 rows of 512 output channels, of which a register tile stores a line of each.
    problem = td.Problem(1, 1, 1024, 512, (4, 4), (4, 4), (2, 2), (1, 1), (1, 1), (8, 8))
    algorithm, target = named("matrix"), CPU_TARGETS["x86-64-v4"]
    plan = next(plan for _, plan in algorithm.candidates(problem, target) if plan.tile.channels == 512)
    (stride,) = strides_of(X86.build(problem, target, algorithm, plan), "run_0", [-2])
    assert len({row * stride % PAGE // LINE for row in range(16)}) == 16, stride
