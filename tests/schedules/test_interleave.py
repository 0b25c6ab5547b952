"""Shuffle networks: what they compute, and that LLVM leaves their instructions as they are."""

import re

import numpy as np
import pytest
import tvm
from support.kernels import targets
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as B

from tvm_deconv.compute.extents import int64
from tvm_deconv.schedules.x86.interleave import MAX_STREAMS, shuffle_network
from tvm_deconv.targets import CPU_TARGETS

SHUFFLE = re.compile(r"\tv\w*(?:perm|unpck|shuf|insert|extract|blend|movlh|movhl)\w*\s")
#: Shuffles of all vectors together, by the target, its lanes, and the number of streams.
SHUFFLES = {
    ("x86-64-v4", 16): {4: 8, 6: 18, 8: 32, 12: 48, 16: 64},
    ("x86-64-v4", 8): {4: 12, 8: 24, 16: 48},
    ("x86-64-v3", 8): {4: 12, 5: 25, 6: 30, 7: 49, 8: 24, 12: 36, 16: 48},
}


def interleaved(streams, lanes, dtype, target):
    """A function from ``[n, streams, lanes]`` elements to the same, interleaved."""
    with IRBuilder() as builder, B.prim_func(s_tir=True):
        B.func_name("interleave")
        n = tirx.Var("n", "int64")
        source, result = (B.arg(name, B.buffer((n, streams, lanes), dtype, align=1)) for name in ("source", "result"))
        with B.serial(int64(0), n) as i:
            loaded = [source.vload([i, int64(stream), int64(0)], f"{dtype}x{lanes}") for stream in range(streams)]
            for vector, value in enumerate(shuffle_network(loaded, lanes)):
                B.buffer_store(result, value, [i, int64(vector), tirx.Ramp(int64(0), int64(1), lanes)])
    function = builder.get().with_attrs({"global_symbol": "interleave", "tirx.noalias": True})
    return tvm.compile(tvm.IRModule({"interleave": function}), target=tvm.target.Target(target.llvm))


@pytest.mark.parametrize("dtype", ["float32", "int32", "float64"])
@targets
def test_elements_alternate(dtype, target):
    whole = target.lanes(np.dtype(dtype).itemsize)
    for lanes in (whole, whole // 2):
        for streams in (1, 2, 3, 4, 6, 7, 8, 12, MAX_STREAMS):
            given = np.arange(3 * streams * lanes).astype(dtype).reshape(3, streams, lanes)
            found = np.zeros_like(given)
            interleaved(streams, lanes, dtype, target)["interleave"](given, found)
            np.testing.assert_array_equal(found, given.swapaxes(1, 2).reshape(found.shape), str((streams, lanes)))


@pytest.mark.parametrize("dtype", ["float32", "int32"])
@pytest.mark.parametrize(("name", "lanes"), SHUFFLES, ids=lambda value: str(value))
def test_rounds_are_not_merged(name, lanes, dtype):
    for streams, count in SHUFFLES[name, lanes].items():
        code = interleaved(streams, lanes, dtype, CPU_TARGETS[name]).mod.inspect_source("asm")
        loops = re.split(r"\n(?=\.LBB)", code)
        assert max(len(SHUFFLE.findall(loop)) for loop in loops) == count, (streams, code)
