"""Stores past the caches: outputs agree with the reference for any length and address of rows."""

import math
import random
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from support.kernels import X86, code_of, run_kernel, targets
from support.strategies import not_empty, operands, problems
from support.tolerances import WINOGRAD, assert_norm_close

import tvm_deconv as td
from tvm_deconv.artifact import regular
from tvm_deconv.artifact.sources import source_digest
from tvm_deconv.compiler.build import compile
from tvm_deconv.compiler.selection import named
from tvm_deconv.problem.reference import reference
from tvm_deconv.schedules.x86 import stores
from tvm_deconv.schedules.x86.algorithms import ALGORITHMS, direct_definition, matrix_definition
from tvm_deconv.schedules.x86.costs import LAST_CACHE
from tvm_deconv.targets import CPU_TARGETS

WIDE = td.Problem(1, 1, 3, 20, (40, 64), (2, 2), (2, 2), (1, 1), (0, 0), (80, 128))


@pytest.fixture
def always(monkeypatch):
    for definition in (direct_definition, matrix_definition):
        monkeypatch.setattr(definition, "outgrows_caches", lambda _: True)
    monkeypatch.setattr(stores, "SHORTEST_STREAM", 0)
    monkeypatch.setattr(stores, "SHORTEST_CONVERTED", 0)


@pytest.mark.usefixtures("always")
@targets
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(problem=problems(max_macs=60_000).filter(not_empty), seed=st.integers(0, 2**20))
@example(problem=WIDE, seed=1)
@example(problem=td.Problem(2, 1, 17, 33, (7, 9), (4, 4), (2, 2), (1, 1), (1, 1), (14, 18)), seed=3)
@example(problem=td.Problem(1, 3, 16, 5, (6, 5), (3, 5), (2, 2), (1, 1), (0, 3), (13, 8), data_format="NXC"), seed=4)
@example(problem=td.Problem(3, 1, 20, 1, (61,), (64,), (32,), (1,), (3,), (1981,)), seed=6)
def test_streamed_outputs_agree_with_the_reference(problem, target, seed):
    choose = random.Random(seed)
    data, weights, bias = operands(problem, seed)
    wanted = reference(problem, data, weights, bias)
    algorithm = choose.choice([algorithm for algorithm in ALGORITHMS if algorithm.supports(problem, target)])
    plan = choose.choice(algorithm.candidates(problem, target))[1]
    found = run_kernel(problem, target, data, weights, bias, algorithm, plan).astype(np.float64)
    assert_norm_close(found, wanted, problem.dtype, WINOGRAD, message=(problem.key, algorithm.name, plan))


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("data_format", ["NCX", "NXC"])
@pytest.mark.parametrize(
    "algorithm",
    [algorithm for algorithm in ALGORITHMS if algorithm.name != "col2im"],  # whose rows have a test of their own
    ids=lambda algorithm: algorithm.name,
)
def test_every_algorithm_streams_its_copies(algorithm, data_format):
    if data_format == "NCX" and algorithm.name in ("direct_channels", "direct_groups"):
        pytest.skip("its last stage is a transposition")
    problem = WIDE.replace(data_format=data_format, kernel=(4, 4), output_spatial=(82, 130))
    if algorithm.name == "direct_channels":  # which stores from registers if every phase has a tap
        problem = problem.replace(kernel=(4, 1), output_spatial=(82, 127))
    if not algorithm.supports(problem, CPU_TARGETS["x86-64-v3"]):
        pytest.skip("for layers of one tap")
    text = X86.build(problem, CPU_TARGETS["x86-64-v3"], algorithm).deconv.script()
    assert "tvm_deconv_stream" in text
    assert "tvm_deconv_fence" in text
    assert 'T.sblock("out")' in text


@pytest.mark.parametrize("streams", [True, False])
def test_the_line_in_which_the_next_row_ends_is_asked_for(streams, monkeypatch):
    """Nothing else is: these data and filters stay in the caches."""
    monkeypatch.setattr(direct_definition, "outgrows_caches", lambda _: streams)
    problem = WIDE.replace(kernel=(4, 4), output_spatial=(82, 130))
    code = code_of(problem, CPU_TARGETS["x86-64-v3"], named("direct_rows"))
    assert ("prefetch" in code) is streams


def test_only_large_outputs_of_rows_of_known_size_stream():
    large = WIDE.replace(data_spatial=(400, 640), output_spatial=(800, 1280))
    assert "tvm_deconv_store" in X86.build(large, CPU_TARGETS["x86-64-v3"]).deconv.script()
    assert "tvm_deconv_store" not in X86.build(WIDE, CPU_TARGETS["x86-64-v3"]).deconv.script()
    assert stores.outgrows_caches(large)
    assert stores.outgrows_caches(large.replace(batch="any"))
    assert not stores.outgrows_caches(WIDE.replace(batch="any"))
    assert not stores.outgrows_caches(large.replace(dynamic=(2,)))


def test_a_dynamic_output_goes_to_memory_if_one_of_twice_the_extents_does():
    rows = WIDE.replace(data_spatial=(300, 640), output_spatial=(600, 1280), out_channels=3)
    assert rows.batch * math.prod(rows.output_shape[1:]) * 4 < LAST_CACHE
    assert not stores.goes_to_memory(rows)
    assert stores.goes_to_memory(rows.replace(dynamic=(1, 2), buckets=((300,), (640,))))


@pytest.mark.parametrize(("name", "uncropped"), [("direct_rows", 0), ("winograd", 1)])
def test_parts_of_rows_are_copied_by_their_length(name, uncropped):
    """Under masks, which are slow stores in AVX2, they took a fourth of a waveform's call."""
    problem = td.Problem(2, 1, 5, 9, (100,), (4,), (2,), (1,), (1,), (199,))
    algorithm, target = named(name), CPU_TARGETS["x86-64-v3"]
    plans = [plan for _, plan in algorithm.candidates(problem, target) if plan.tile.uncropped == uncropped]
    plan = next(plan for plan in plans if 30 < plan.tile.width < 90)
    text = X86.build(problem, target, algorithm, plan).deconv.script()
    assert "tvm_deconv_copy" in text
    data, weights, bias = operands(problem, 7)
    found = run_kernel(problem, target, data, weights, bias, algorithm, plan).astype(np.float64)
    wanted = reference(problem, data, weights, bias)
    assert_norm_close(found, wanted, problem.dtype, WINOGRAD, message=(problem.key, name, plan))


@pytest.mark.usefixtures("always")
def test_sums_of_words_stream():
    """The functions that multiply words are imported around what is copied."""
    kernel = X86.build(WIDE.replace(dtype="int8"), CPU_TARGETS["x86-64-v3"], named("dot"))
    assert kernel.problem.output_dtype == "int32"
    assert "tvm_deconv_stream" in kernel.deconv.script()


def test_the_recipe_of_an_artifact_covers_the_llvm_sources(monkeypatch):
    covered = set()
    monkeypatch.setattr(regular, "content_of", lambda path, _: covered.add(path.name) or b"")
    source_digest.__wrapped__()
    assert {path.name for path in Path(stores.__file__).parent.glob("*.ll")} <= covered


@pytest.mark.usefixtures("compiles_here")
@pytest.mark.skipif(not shutil.which("objdump"), reason="needs objdump")
def test_copies_are_not_scattered(tmp_path):
    """LLVM made vectors across the channels whose 16 phases are a vector, and scattered their elements."""
    problem = td.Problem(64, 1, 32, 64, (1, 1), (4, 4), (1, 1), (1, 1), (0, 0), (4, 4))
    compile([problem], "x86-64-v4", tmp_path, algorithms=["matrix"])
    (library,) = tmp_path.glob("*.so")
    code = subprocess.run(["objdump", "-d", library], capture_output=True, text=True, check=True).stdout
    assert "zmm" in code
    assert not re.search("vp?scatter", code)
