"""Data that register tiles read where the caller has them: which tiles do, and that they read nothing beyond."""

import random

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from support.fences import copied, fenced
from support.kernels import bits, compile_kernel, targets
from support.strategies import epilogues, operands
from support.tolerances import assert_close

import tvm_deconv as td
from tvm_deconv.compiler.selection import named
from tvm_deconv.compute.indexing import ROWS
from tvm_deconv.compute.phases import Geometry
from tvm_deconv.problem.reference import reference
from tvm_deconv.schedules.x86 import data_in_place
from tvm_deconv.schedules.x86.algorithms import direct_definition
from tvm_deconv.targets import CPU_TARGETS

DIRECT = named("direct_rows")
AVX2, AVX512 = CPU_TARGETS["x86-64-v3"], CPU_TARGETS["x86-64-v4"]
#: The head of a segmentation net: one output channel, kernel = stride.
HEAD = td.Problem.from_torch((1, 24, 12, 48), (24, 1, 2, 2), stride=2)


@pytest.fixture(autouse=True)
def of_any_size(monkeypatch):
    monkeypatch.setattr(data_in_place, "_CACHED", 0)


@st.composite
def read_once(draw):
    """Draw a Problem with one tap a phase, few channels, and rows of whole vectors."""
    rank = draw(st.integers(1, 3))
    kernel = [1] * (rank == 3) + [draw(st.integers(1, 4)) for _ in range(min(rank, 2))]
    strides = [size + draw(st.integers(0, 1)) for size in kernel]
    data = (*(draw(st.integers(1, 6)) for _ in range(rank - 1)), draw(st.sampled_from([8, 16, 48, 96])))
    filled = draw(st.booleans())
    padding = [stride - size if filled else 0 for size, stride in zip(kernel, strides, strict=True)]
    batch, groups, channels, outputs = (draw(st.integers(1, most)) for most in (3, 3, 9, 3))
    problem = td.Problem.from_torch(
        *((batch, groups * channels, *data), (groups * channels, outputs, *kernel)),
        stride=tuple(strides), output_padding=tuple(padding), groups=groups,
    )  # fmt: skip
    dtype = draw(st.sampled_from(["float32", "float32", "float64"]))
    return problem.replace(dtype=dtype, epilogue=draw(epilogues(dtype)))


def plans_in_place(problem, target):
    """The enumerated plans that read the caller's data."""
    geometry = Geometry.of(problem)
    plans = (plan for _, plan in DIRECT.candidates(problem, target))
    return [plan for plan in plans if data_in_place.supports_tile(problem, geometry, ROWS, plan.tile, target)]


@pytest.mark.parametrize("streams", [False, True])
@targets
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(problem=read_once(), seed=st.integers(0, 2**20), at_end=st.booleans())
@example(problem=HEAD, seed=1, at_end=True)
@example(problem=HEAD.replace(output_spatial=(23, 95)), seed=2, at_end=True)
@example(problem=HEAD.replace(dynamic=(0,)), seed=3, at_end=True)
def test_outputs_agree_with_the_reference(problem, target, seed, at_end, streams):
    """No block is packed, and no element beyond the data is read."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(direct_definition, "outgrows_caches", lambda _: streams)
        if not (found := plans_in_place(problem, target)):
            return
        plan = random.Random(seed).choice(found)
        kernel, compiled = compile_kernel(problem, target, DIRECT, plan)
    assert "data_pack" not in kernel.deconv.script()
    for batch in (1, 2, 3) if problem.dynamic else (problem.batch,):
        call = problem.at((batch, *problem.data_shape[1:])) if problem.dynamic else problem
        data, weights, bias = operands(call, seed)
        packed = fenced((kernel.packed_elements,), kernel.packed_dtype, at_end)
        compiled["pack"](np.ascontiguousarray(call.canonical_filter(weights)), packed)
        out = fenced(call.output_shape, call.output_dtype, at_end)
        compiled["deconv"](copied(bits(data), at_end), packed, *([] if bias is None else [bias]), out)
        assert_close(out, reference(call, data, weights, bias), call.dtype, message=f"{call.key} {plan.knobs}")


@pytest.mark.parametrize(
    "changed",
    [
        {"data_format": "NXC"},
        {"kernel": (3, 2)},
        {"kernel": (2, 3)},
        {"pads_begin": (0, 1)},
        {"output_spatial": (24, 98)},
        {"data_spatial": (7, 45), "output_spatial": (14, 90)},
        {"out_channels": 30},
        {"dynamic": (1,)},
        {"dtype": "bfloat16"},
    ],
    ids=str,
)
def test_other_layers_are_packed(changed):
    assert plans_in_place(HEAD, AVX512)
    assert not plans_in_place(HEAD.replace(**changed), AVX512)


@targets
def test_data_are_fetched_ahead(target):
    """Into the second-level cache: many channels compete for sets of the first."""
    plan = plans_in_place(HEAD, target)[0]
    assert "prefetcht1" in compile_kernel(HEAD, target, DIRECT, plan)[1].mod.inspect_source("asm")


@pytest.mark.parametrize(
    ("target", "shape", "in_place"),
    [(AVX512, (160, 160), True), (AVX2, (480, 480), True), (AVX2, (160, 160), False)],
    ids=["AVX-512", "AVX2 from memory", "AVX2 from caches"],
)
def test_defaults(target, shape, in_place, monkeypatch):
    monkeypatch.undo()
    problem = td.Problem.from_torch((1, 24, *shape), (24, 1, 2, 2), stride=2)
    plan = DIRECT.candidates(problem, target)[0][1]
    assert data_in_place.supports_tile(problem, Geometry.of(problem), ROWS, plan.tile, target) == in_place
