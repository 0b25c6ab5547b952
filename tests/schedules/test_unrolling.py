"""Several steps of a reduction in one body of its loop."""

import numpy as np
import pytest
from support.kernels import X86, run_kernel
from support.strategies import operands
from support.tolerances import WINOGRAD, assert_norm_close
from tvm import te
from tvm.s_tir import Schedule
from tvm.tirx import ForKind

import tvm_deconv as td
from tvm_deconv.compiler.selection import named
from tvm_deconv.problem.reference import reference
from tvm_deconv.schedules.x86.unrolling import unroll_steps
from tvm_deconv.targets import CPU_TARGETS

AVX2, AVX512 = CPU_TARGETS["x86-64-v3"], CPU_TARGETS["x86-64-v4"]


def _reduction(*extents):
    """Return a schedule of one sum over axes of these `extents`, and its loops."""
    axes = [te.reduce_axis((0, extent), f"r{number}") for number, extent in enumerate(extents)]
    data = te.placeholder(extents, "float32", "data")
    total = te.compute((1,), lambda _: te.sum(data[tuple(axis.var for axis in axes)], axis=axes), "total")
    sch = Schedule(te.create_prim_func([data, total]))
    return sch, sch.get_loops(sch.get_sblock("total"))[1:]


@pytest.mark.parametrize(
    ("extents", "products", "left", "unrolled"),
    [
        ([64], 12, [16], [4]),
        ([90], 12, [30], [3]),
        ([97], 12, [97], []),  # a prime
        ([48], 12, [12], [4]),
        ([32], 12, [16], [2]),
        ([16], 12, [16], []),  # fewer iterations LLVM unrolls wholly
        ([64, 1, 2], 12, [32], [2, 1, 2]),
        ([2, 64], 8, [2, 16], [4]),
        ([64, 3], 12, [64], [3]),
        ([64], 28, [64], []),
    ],
)
def test_steps_are_unrolled_from_the_innermost_on(extents, products, left, unrolled):
    sch, loops = _reduction(*extents)
    found = unroll_steps(sch, loops, AVX2, products=products, broadcasts=4)
    assert [int(sch.get(loop).extent) for loop in found] == left
    inner = [sch.get(loop) for loop in sch.get_loops(sch.get_sblock("total"))[1 + len(left) :]]
    assert [int(loop.extent) for loop in inner] == unrolled
    assert all(loop.kind == ForKind.UNROLLED for loop in inner)


@pytest.mark.parametrize(("target", "broadcasts"), [(AVX512, 4), (AVX2, 12)])
def test_steps_stay_in_a_loop(target, broadcasts):
    """Wide tiles are long enough, and broadcasts of one product each would become vectors that are taken apart."""
    sch, loops = _reduction(64)
    assert [*unroll_steps(sch, loops, target, products=12, broadcasts=broadcasts)] == [*loops]


@pytest.mark.parametrize("name", ["direct_rows", "direct_channels", "winograd", "strassen"])
def test_kernels_agree_with_the_reference(name):
    """Of 66 channels a body takes two or three, of 44 in halves two."""
    algorithm = named(name)
    problem = td.Problem(1, 1, 66, 17, (5, 9), (3, 4), (2, 2), (1, 1), (0, 1), (11, 18))
    if name != "direct_rows":
        problem = problem.replace(data_format="NXC")
    if name == "strassen":
        problem = problem.replace(in_channels=88, kernel=(2, 2), pads_begin=(0, 0), output_spatial=(10, 18))
    data, weights, bias = operands(problem, 5)
    plan = X86.build(problem, AVX2, algorithm).knobs
    found = run_kernel(problem, AVX2, data, weights, bias, algorithm, algorithm.read(plan)).astype(np.float64)
    wanted = reference(problem, data, weights, bias)
    assert_norm_close(found, wanted, problem.dtype, WINOGRAD, message=(problem.key, plan))
