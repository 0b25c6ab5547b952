"""Problems with dynamic extents: keys, dialects, kernels at extents they were not made for, layers and selection."""

import random

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from support.artifacts import TARGET, export, manifest
from support.kernels import X86, bound, call_kernel, compile_kernel, compiled_kernel, targets
from support.strategies import not_empty, operands, problems
from support.tolerances import WINOGRAD, assert_close, assert_norm_close

import tvm_deconv as td
from tvm_deconv.artifact.select import select
from tvm_deconv.compiler.selection import named
from tvm_deconv.compute.direct_layout import Tile
from tvm_deconv.problem.reference import reference
from tvm_deconv.problem.testing import deviation
from tvm_deconv.problem.testing import operands as whole_operands
from tvm_deconv.runtime import verify
from tvm_deconv.schedules.x86.algorithms import ALGORITHMS, direct_definition
from tvm_deconv.schedules.x86.tiles import Plan
from tvm_deconv.schedules.x86.variants import filter_offsets, join
from tvm_deconv.schedules.x86.vectors import accumulator_lanes
from tvm_deconv.targets import CPU_TARGETS, Host, Place, detect_host
from tvm_deconv.tuning import tune

VOCODER = td.Problem("any", 2, 20, 24, ("any",), (16,), (8,), (1,), (4,), ("any+8",), epilogue=td.Epilogue(True))
BUCKETS = VOCODER.replace(data_spatial=([40, 5, 200],), output_spatial=("any+8",))
PLANE = td.Problem.from_torch(("any", 24, [4, 20], [9, 40]), (24, 20, 4, 3), stride=(2, 3), padding=1)
#: Positions beyond the data: as many as a block may have.
BEYOND = td.Problem.from_key("nany-g1-i1-o7-x1xany-k1x1-s1x1-d1x1-p0x2-y2xany+4-float32-NXC-IOX-bias")


def channels(problem):
    return problem.groups * problem.in_channels


def at(problem, batch, spatial):
    """The problem of a call of `problem`, with the dynamic ones among these extents."""
    spatial = tuple(
        x if i + 1 in problem.dynamic else own
        for i, (x, own) in enumerate(zip(spatial, problem.data_spatial, strict=True))
    )
    batch = batch if 0 in problem.dynamic else problem.batch
    last = problem.data_format == "NXC"
    return problem.at((batch, *spatial, channels(problem)) if last else (batch, channels(problem), *spatial))


@st.composite
def variable(draw):
    """A problem with one or more dynamic extents, and calls of it."""
    problem = draw(problems(ranks=(1, 2), max_macs=20_000).filter(not_empty))
    dynamic = draw(st.lists(st.integers(0, problem.rank), min_size=1, unique=True))
    try:
        found = problem.replace(dynamic=tuple(dynamic))
    except td.ProblemError:
        return None
    extents = st.integers(1, 150 if problem.rank == 1 else 23)
    calls = draw(st.lists(st.tuples(st.integers(1, 3), st.tuples(*[extents] * problem.rank)), min_size=3, max_size=3))
    return found, calls


@pytest.mark.parametrize("name", ["winograd", "matrix", "direct_rows"])
def test_rows_are_copied_by_their_lengths(name):
    problem = td.Problem(1, 1, 20, 24, ("any",), (4,), (2,), (1,), (1,), ("any+2",))
    algorithm = named(name)
    kernel, compiled = compile_kernel(problem.variants[1], CPU_TARGETS["x86-64-v3"], algorithm)
    assert "tvm_deconv_copy" in kernel.deconv.script()
    assert "tvm_deconv_row" in kernel.deconv.script()
    for length in (1, 2, 7, 16, 17, 63, 127, 128, 129, 300):
        call = at(problem, 1, (length,))
        data, weights, bias = operands(call, length)
        found = call_kernel(call, kernel, compiled, data, weights, bias)
        wanted = reference(call, data, weights, bias)
        assert_close(found, wanted, growth=WINOGRAD)


def test_volumes_of_any_number_of_images_are_transformed_along_all_axes():
    problem = td.Problem("any", 1, 6, 20, (3, 5, 4), (3, 3, 3), (2, 2, 2), (1, 1, 1), (1, 1, 1), (6, 10, 8))
    algorithm, target = named("winograd"), CPU_TARGETS["x86-64-v3"]
    plans = [plan for _, plan in algorithm.candidates(problem.variants[-1], target) if min(plan.tile.outputs) > 1]
    kernel, compiled = compile_kernel(problem.variants[-1], target, algorithm, plans[0])
    for batch in (1, 2, 5):
        call = at(problem, batch, (3, 5, 4))
        data, weights, bias = operands(call, batch)
        found = call_kernel(call, kernel, compiled, data, weights, bias)
        wanted = reference(call, data, weights, bias)
        assert_close(found, wanted, growth=WINOGRAD)


def test_a_stage_holds_all_that_a_call_leaves_in_it():
    """Seven rows of 32 channels are packed, and 17 channels of them multiplied."""
    problem = td.Problem("any", 1, 17, 48, ("any",), (1,), (3,), (1,), (2,), ("any-6",), data_format="NXC")
    algorithm = named("matrix")
    tile = {"images": 1, "depth": 1, "height": 1, "width": 6, "channels": 48, "rows": 7, "vectors": 3}
    plan = algorithm.read({**tile, "outputs_d": 1, "outputs_h": 1, "outputs_w": 1, "share_data": 0})
    kernel, compiled = compile_kernel(problem.variants[-1], CPU_TARGETS["x86-64-v3"], algorithm, plan)
    for batch, length in ((1, 4), (2, 7), (3, 50)):
        call = at(problem, batch, (length,))
        data, weights, bias = operands(call, length)
        found = call_kernel(call, kernel, compiled, data, weights, bias)
        wanted = reference(call, data, weights, bias)
        assert_close(found, wanted, growth=WINOGRAD)


@targets
@settings(max_examples=6, suppress_health_check=list(HealthCheck))
@given(drawn=variable(), seed=st.integers(0, 2**20))
@example(drawn=(VOCODER, [(1, (513,)), (2, (1025,)), (3, (7,))]), seed=0)
@example(drawn=(VOCODER.replace(data_format="NXC"), [(1, (513,)), (2, (1025,)), (3, (7,))]), seed=1)
@example(drawn=(td.Problem("any", 1, 3, 5, ("any",), (1,), (1,), (1,), (0,), ("any+1",)), [(2, (1025,))]), seed=2)
@example(drawn=(BEYOND, [(1, (1, 1)), (2, (1, 9)), (1, (1, 64))]), seed=3)
def test_any_plan_serves_extents_it_never_saw(drawn, target, seed):
    if drawn is None:
        return
    problem, calls = drawn
    choose = random.Random(seed)
    admitting = [algorithm for algorithm in ALGORITHMS if algorithm.supports(problem, target)]
    algorithm = choose.choice(admitting)
    plan = choose.choice(algorithm.candidates(problem, target))[1]
    kernel, compiled = compile_kernel(problem, target, algorithm, plan)
    for batch, spatial in calls:
        try:
            static = at(problem, batch, spatial)
        except td.ProblemError:  # its output would be negative
            continue
        if not_empty(static):
            data, weights, bias = operands(static, seed)
            found = call_kernel(static, kernel, compiled, data, weights, bias).astype(np.float64)
            wanted = reference(static, data, weights, bias)
            message = static.key, algorithm.name, plan
            assert_norm_close(found, wanted, problem.dtype, algorithm.error_growth, message=message)


#: Those that take any extents, with the type that each is for; test_dot has those in words.
SERVING = [
    pytest.param(algorithm, "int8" if algorithm.name == "dot" else "float32", id=algorithm.name)
    for algorithm in ALGORITHMS
    if algorithm.name
    not in ("col2im", "direct_inputs", "direct_folded", "dot_channels", "dot_folded", "dot_inputs", "dot_rows")
]


def turn(algorithm, target):
    """0 or 1: layouts take turns between the targets and the algorithms."""
    return (ALGORITHMS.index(algorithm) + list(CPU_TARGETS).index(target.name)) % 2


@targets
@pytest.mark.parametrize(("algorithm", "dtype"), SERVING)
def test_every_algorithm_serves_a_plane_of_any_extents(algorithm, dtype, target):
    data_format = ("NCX", "NXC")[turn(algorithm, target)]
    attributes = (4, 3), (2, 3), (1, 1), (1, 0), ("any+2", "any+3")
    problem = td.Problem("any", 2, 17, 20, ("any", "any"), *attributes, dtype=dtype, data_format=data_format)
    plans = [plan for _, plan in algorithm.candidates(problem, target)]
    plan = plans[0 if data_format == "NCX" else len(plans) // 3]
    kernel, compiled = compile_kernel(problem, target, algorithm, plan)
    for batch, spatial in ((1, (30, 41)), (3, (1, 1)), (2, (65, 7)), (1, (64, 129))):
        static = at(problem, batch, spatial)
        data, weights, bias = operands(static, batch)
        found = call_kernel(static, kernel, compiled, data, weights, bias)
        wanted = reference(static, data, weights, bias)
        assert_norm_close(found, wanted, "float32", WINOGRAD, message=(static.key, plan))


@targets
@pytest.mark.parametrize(("algorithm", "dtype"), SERVING)
def test_every_algorithm_serves_planes_of_any_height(algorithm, dtype, target):
    """Rows in one block, packed close, and whole vectors of channels."""
    data_format = ("NXC", "NCX")[turn(algorithm, target)]
    attributes = (4, 4), (1, 1), (1, 1), (2, 2), ("any-1", 23)
    problem = td.Problem("any", 32, 3, 1, ("any", 24), *attributes, dtype=dtype, data_format=data_format)
    if algorithm.name in ("dot", "matrix", "strassen", "winograd", "direct_channels"):
        problem = problem.replace(groups=1, in_channels=9, out_channels=32)
    plans = [plan for _, plan in algorithm.candidates(problem, target) if plan.tile.height >= 8]
    kernel, compiled = compile_kernel(problem, target, algorithm, plans[0 if data_format == "NXC" else len(plans) // 2])
    for batch, height in ((1, 7), (2, 20), (1, 45)):
        static = at(problem, batch, (height, 24))
        data, weights, bias = operands(static, batch)
        found = call_kernel(static, kernel, compiled, data, weights, bias)
        wanted = reference(static, data, weights, bias)
        assert_norm_close(found, wanted, "float32", WINOGRAD, message=static.key)


@targets
@pytest.mark.parametrize(
    ("problem", "names", "calls"),
    [
        (BUCKETS, ("matrix", "winograd", "direct_rows"), {
            (1, (1,)): 0, (2, (5,)): 0, (1, (6,)): 1, (3, (40,)): 1, (1, (41,)): 2, (2, (200,)): 2, (1, (999,)): 2,
        }),
        (PLANE, ("matrix", "direct_rows", "winograd", "direct_channels"), {
            (1, (1, 1)): 0, (2, (4, 9)): 0, (1, (4, 10)): 1, (1, (2, 70)): 1, (1, (5, 9)): 2, (2, (30, 3)): 2,
            (1, (5, 10)): 3, (1, (21, 41)): 3,
        }),
    ],
    ids=["line", "plane"],
)  # fmt: skip
def test_the_extents_of_a_call_choose_a_variant(problem, names, calls, target):
    algorithms = [next(one for one in ALGORITHMS if one.name == name) for name in names]
    plans = [(one, one.candidates(v, target)[1][1]) for one, v in zip(algorithms, problem.variants, strict=True)]
    alone = [X86.build(v, target, *plan) for v, plan in zip(problem.variants, plans, strict=True)]
    starts, _ = filter_offsets([kernel.pack for kernel in alone], [kernel.packed_elements for kernel in alone])
    kernel = join(problem, alone)
    assert kernel.algorithm == "+".join(names)
    compiled = compiled_kernel(kernel, target)
    for (batch, spatial), chosen in calls.items():
        static = at(problem, batch, spatial)
        data, weights, bias = operands(static, batch)
        found = call_kernel(static, kernel, compiled, data, weights, bias)
        wanted = reference(static, data, weights, bias)
        assert_norm_close(found, wanted, "float32", WINOGRAD, message=static.key)
        for i, (start, one) in enumerate(zip(starts, alone, strict=True)):
            packed = np.zeros(kernel.packed_elements, np.float32)
            packed[start : start + one.packed_elements] = np.nan
            out = np.zeros(static.output_shape, np.float32)
            compiled["deconv"](data, packed, *([] if bias is None else [bias]), out)
            assert np.isnan(out).any() == (i == chosen), (static.key, i)


@pytest.mark.parametrize(
    ("options", "target"),
    [
        ({"dtype": "int8", "quantization": td.Quantization("int8", "int32")}, "x86-64-v4"),
        ({"dtype": "int8", "quantization": td.Quantization("int8", "int32")}, "x86-64-v4-vnni"),
        ({"dtype": "bfloat16"}, "x86-64-v4-bf16"),
    ],
    ids=["pairs", "bytes", "bfloat16"],
)
def test_variants_may_have_words_in_vectors_of_two_widths(options, target):
    target = CPU_TARGETS[target]
    if not target.features <= detect_host().features:
        pytest.skip(f"this CPU does not run {target.name}")
    problem = td.Problem(1, 1, 8, 24, ([7, 64],), (8,), (2,), (1,), (0,), ("any+8",), data_format="NXC", **options)
    words = next(one for one in ALGORITHMS if one.name == "dot_channels")
    plans = [
        next(plan for _, plan in words.candidates(variant, target) if plan.halves == halves)
        for variant, halves in zip(problem.variants, (True, False), strict=True)
    ]
    kernel = join(problem, [X86.build(v, target, words, p) for v, p in zip(problem.variants, plans, strict=True)])
    compiled = compiled_kernel(kernel, target)
    for length in (7, 64):
        static = at(problem, 1, (length,))
        arrays = whole_operands(static, length)
        found = call_kernel(static, kernel, compiled, *bound(static, arrays))
        assert deviation(static, found, reference(static, *arrays)).allowed


def test_variants_with_one_plan_are_one_kernel():
    target = CPU_TARGETS[TARGET]
    line = next(one for one in ALGORITHMS if one.name == "direct_rows")
    short, long = ((line, line.candidates(BUCKETS, target)[i][1]) for i in (0, 1))
    short_kernel, long_kernel = (
        [X86.build(variant, target, *plan) for variant in BUCKETS.variants] for plan in (short, long)
    )
    one, two = join(BUCKETS, long_kernel), join(BUCKETS, [short_kernel[0], *long_kernel[1:]])
    assert one.knobs == long[1].knobs
    assert {name.partition(".")[0] for name in two.knobs} == {"5", "200"}
    # Both plans may want the filter in one order, which is then there once.
    assert one.packed_elements <= two.packed_elements < 3 * one.packed_elements


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    directory = tmp_path_factory.mktemp("variable")
    export(directory, [VOCODER, VOCODER.replace(data_format="NXC"), VOCODER.at((2, 40, 64))])
    return td.load(directory)


@pytest.fixture(scope="module")
def buckets(tmp_path_factory):
    directory = tmp_path_factory.mktemp("buckets")
    export(directory, [BUCKETS, BUCKETS.replace(data_format="NXC"), PLANE])
    return td.load(directory)


@pytest.fixture(autouse=True)
def default_threads():
    yield
    td.set_num_threads(None)


@pytest.mark.skipif(
    not CPU_TARGETS[TARGET].features <= detect_host().features, reason=f"this CPU does not run {TARGET}"
)
class TestLayer:
    @pytest.mark.parametrize("data_format", ["NCX", "NXC"])
    @pytest.mark.parametrize("threads", [1, 2, 3])
    def test_one_layer_takes_any_extents(self, library, data_format, threads):
        problem = VOCODER.replace(data_format=data_format)
        _, weights, bias = operands(problem, 1)
        layer = library.bind(problem, weights, bias)
        td.set_num_threads(threads)
        for batch, length in ((1, 1), (2, 3), (1, 700), (3, 1025), (1, 5000), (2, 3)):
            static = at(problem, batch, (length,))
            data, _, _ = operands(static, length)
            out = np.full(static.output_shape, np.nan, np.float32)
            assert layer(data, out=out) is out
            assert_close(out, reference(static, data, weights, bias), growth=WINOGRAD)
            np.testing.assert_array_equal(layer(data), out)

    @pytest.mark.parametrize("problem", [BUCKETS, BUCKETS.replace(data_format="NXC"), PLANE], ids=lambda p: p.key[:60])
    @pytest.mark.parametrize("threads", [1, 2])
    def test_calls_around_every_bucket(self, buckets, problem, threads):
        _, weights, bias = operands(problem, 1)
        memory = np.empty(buckets.bind(problem, weights, bias).manifest.workspace_bytes(threads) // 8, np.float64)
        layer = buckets.bind(problem, weights, bias, workspace=memory)
        td.set_num_threads(threads)
        edges = problem.buckets[0]
        lengths = sorted({1, *(x for edge in edges for x in (edge - 1, edge, edge + 1)), 3 * edges[-1] + 1})
        for batch, spatial in [(1 + i % 2, (x, 40 - x % 33)[: problem.rank]) for i, x in enumerate(lengths)]:
            static = at(problem, batch, spatial)
            data, _, _ = operands(static, batch)
            memory.fill(np.nan)  # what nothing was written to shows
            out = np.full(static.output_shape, np.nan, np.float32)
            assert layer(data, out=out) is out
            assert_close(out, reference(static, data, weights, bias), growth=WINOGRAD)

    def test_an_artifact_with_buckets_serves_every_extent_and_problem(self, buckets):
        _, weights, bias = operands(BUCKETS, 1)
        others = (VOCODER, BUCKETS.at((3, 40, 7)), VOCODER.replace(data_spatial=([8],), output_spatial=("any+8",)))
        for other in others:
            assert buckets.bind(other, weights, bias).manifest.problem == BUCKETS.artifact_key

    def test_verify_calls_every_bucket(self, buckets, monkeypatch):
        called, call = [], verify.checked_call
        monkeypatch.setattr(verify, "checked_call", lambda layer, data: called.append(data.shape) or call(layer, data))
        one = next(one for one in buckets.manifests if one.problem == BUCKETS.artifact_key)
        assert verify.verify(buckets, one).status == "ok"
        assert called == [(1, 40, 5), (1, 40, 40), (1, 40, 200)]

    @pytest.mark.usefixtures("compiles_here", "searches_here")
    def test_each_bucket_is_tuned_and_built_with_its_own_record(self, tmp_path):
        problem = td.Problem.from_torch((1, 8, [6, 90]), (8, 3, 4), stride=2)
        tuned = tune([problem], TARGET, 1, tmp_path / "logs", jobs=1, timeout=600)
        assert [one.problem for one in tuned] == [*problem.variants]
        (outcome,) = td.compile([problem], TARGET, tmp_path / "made", logs=tmp_path / "logs", jobs=1)
        assert outcome.manifest.origin == "tuned"
        knobs = {}
        for bucket, one in zip((6, 90), tuned, strict=True):
            knobs |= {f"{bucket}.{name}": value for name, value in one.best.knobs.items()}
        assert outcome.manifest.knobs in (knobs, dict(tuned[1].best.knobs))

    def test_no_batch_is_no_output(self, library):
        _, weights, bias = operands(VOCODER, 1)
        layer = library.bind(VOCODER, weights, bias)
        for _ in range(2):
            assert layer(np.empty((0, 40, 9), np.float32)).shape == (0, 48, 72)

    def test_calls_have_an_output_where_the_largest_bucket_has_none(self, tmp_path):
        problem = td.Problem.from_torch((1, 3, [2]), (3, 5, 1), padding=1)
        export(tmp_path, [problem])
        _, weights, _ = operands(problem, 1)
        layer = td.load(tmp_path).bind(problem, weights)
        assert layer(np.ones((1, 3, 2), np.float32)).shape == (1, 5, 0)
        for length in (3, 40):
            static = at(problem, 1, (length,))
            data, _, _ = operands(static, length)
            out = np.full(static.output_shape, np.nan, np.float32)
            assert_close(layer(data, out), reference(static, data, weights), growth=WINOGRAD)

    @pytest.mark.parametrize("shape", [(1, 41, 9), (1, 40), (1, 40, 0), (1, 40, 9, 1)])
    def test_what_is_not_free_is_checked(self, library, shape):
        _, weights, bias = operands(VOCODER, 1)
        with pytest.raises(td.TensorError, match=r"^data=.*must "):
            library.bind(VOCODER, weights, bias)(np.zeros(shape, np.float32))

    def test_an_output_must_have_the_extents_of_the_call(self, library):
        _, weights, bias = operands(VOCODER, 1)
        layer = library.bind(VOCODER, weights, bias)
        with pytest.raises(td.TensorError, match=r"shape must be \(1, 48, 80\)"):
            layer(np.zeros((1, 40, 10), np.float32), out=np.zeros((1, 48, 72), np.float32))

    def test_it_serves_static_problems_that_have_no_artifact(self, library):
        static = VOCODER.at((3, 40, 33)).replace(filter_format="XIO")
        data, weights, bias = operands(static, 2)
        layer = library.bind(static, weights, bias)
        assert layer.manifest.problem == VOCODER.artifact_key
        assert_close(layer(data), reference(static, data, weights, bias), growth=WINOGRAD)
        with pytest.raises(td.TensorError, match=r"shape must be \(3, 40, 33\)"):
            layer(data[:2])

    def test_an_exact_artifact_comes_first(self, library):
        exact = VOCODER.at((2, 40, 64))
        first, second, *_ = library.select(exact)
        assert (first.manifest.problem, second.manifest.problem) == (exact.artifact_key, VOCODER.artifact_key)
        assert isinstance(second, type(first))

    def test_other_problems_are_not_served(self, library):
        for other in (VOCODER.at((2, 40, 64)).replace(output_spatial=(511,)), VOCODER.replace(pads_begin=(3,))):
            _, weights, bias = operands(other, 1)
            with pytest.raises(td.NoArtifactError):
                library.bind(other, weights, bias)


def test_variable_artifacts_come_before_those_of_a_lower_target():
    exact = VOCODER.at((2, 40, 64))
    length = VOCODER.replace(batch=2)
    wide, narrow = "x86-64-v4", "x86-64-v3"
    candidates = [manifest(p, t) for p in (VOCODER, exact, length) for t in (narrow, wide)]
    found = select(exact, candidates, Place(Host(CPU_TARGETS[wide].features)))
    order = [(decision.manifest.parsed.dynamic, decision.manifest.target) for decision in found]
    assert order == [((), wide), ((1,), wide), ((0, 1), wide), ((), narrow), ((1,), narrow), ((0, 1), narrow)]


#: Layers that register tiles store, with their algorithms; plans are made for these extents.
STORED = {
    "rows with a halo": ("direct_rows", td.Problem(1, 2, 3, 5, (20, 24), (4, 4), (2, 2), (1, 1), (1, 1), (40, 48))),
    "rows, uncropped": ("direct_rows", td.Problem(1, 6, 1, 1, (7, 40), (6, 6), (3, 3), (1, 1), (2, 2), (20, 119))),
    "whole rows": ("direct_rows", td.Problem(1, 1, 6, 3, (8, 32), (2, 2), (2, 2), (1, 1), (0, 0), (16, 64))),
    "bfloat16": ("direct_rows", td.Problem(1, 3, 2, 2, (50,), (8,), (4,), (1,), (2,), (200,), dtype="bfloat16")),
    "channels": (
        "direct_channels",
        td.Problem(1, 1, 5, 21, (9, 6), (3, 5), (2, 2), (1, 1), (1, 2), (17, 11), data_format="NXC"),
    ),
    "groups": (
        "direct_groups",
        td.Problem(1, 37, 1, 1, (6, 20), (4, 4), (2, 2), (1, 1), (1, 1), (12, 40), data_format="NXC"),
    ),
    "sums of inputs": (
        "direct_inputs",
        td.Problem(1, 1, 40, 2, (30,), (7,), (3,), (1,), (2,), (90,), data_format="NXC"),
    ),
    "sums of words": (
        "dot_inputs",
        td.Problem(1, 1, 40, 2, (30,), (7,), (3,), (1,), (2,), (90,), dtype="int8", data_format="NXC"),
    ),
    "folded": (
        "direct_folded",
        td.Problem(1, 1, 9, 3, (7, 12), (2, 4), (2, 4), (1, 1), (0, 0), (14, 48), data_format="NXC"),
    ),
}


@pytest.mark.parametrize("dynamic", ["images", "rows", "all"])
@pytest.mark.parametrize(("name", "problem"), STORED.values(), ids=STORED)
def test_register_tiles_store_outputs_of_any_extents(name, problem, dynamic):
    target, algorithm = CPU_TARGETS["x86-64-v4"], named(name)
    if not target.features <= detect_host().features:
        pytest.skip("this CPU has no AVX-512")
    extents = problem.data_spatial
    axes = {"images": (0,), "rows": (problem.rank,), "all": tuple(range(problem.rank + 1))}[dynamic]
    buckets = tuple((extent,) if axis + 1 in axes else () for axis, extent in enumerate(extents))
    problem = problem.replace(dynamic=axes, buckets=buckets, epilogue=td.Epilogue(True, "relu"))
    plans = [plan for _, plan in algorithm.candidates(problem, target)]
    stride = problem.strides[-1]
    plans = [plan for plan in plans if name != "direct_rows" or plan.tile.phases % stride == 0]
    plan = plans[0] if dynamic == "rows" else random.Random(len(plans)).choice(plans)
    kernel, compiled = compile_kernel(problem, target, algorithm, plan)
    assert 'T.sblock("interleave")' not in kernel.deconv.script()
    for spatial in (extents, [1] * problem.rank, [2 * x + 1 for x in extents], [x - 1 for x in extents]):
        for batch in (1, 3):
            call = at(problem, batch, spatial)
            data, weights, bias = operands(call, batch)
            found = call_kernel(call, kernel, compiled, data, weights, bias).astype(np.float64)
            wanted = reference(call, data, weights, bias)
            assert_norm_close(found, wanted, problem.dtype, message=(call.key, plan))


@targets
@pytest.mark.parametrize("streams", [False, True])
def test_rows_of_any_number_of_images_are_stored_whole(streams, target, monkeypatch):
    """Blocks of two images, of which the last may have one; and outputs past the caches, at any address."""
    monkeypatch.setattr(direct_definition, "outgrows_caches", lambda _: streams)
    problem = td.Problem("any", 1, 4, 3, (3, 32), (2, 2), (2, 2), (1, 1), (0, 0), (6, 64), epilogue=td.Epilogue(True))
    lanes = accumulator_lanes(problem, target)
    algorithm = named("direct_rows")
    for images in (1, 2):
        plan = Plan(Tile(images, 1, 3, 32, 2, 2 * lanes, 2), share_data=False)
        kernel = X86.build(problem, target, algorithm, plan)
        assert ("tvm_deconv_store" in kernel.deconv.script()) == streams
        compiled = compiled_kernel(kernel, target)
        for batch in (1, 2, 5):
            call = problem.at((batch, 4, 3, 32))
            data, weights, bias = operands(call, batch)
            wanted = reference(call, data, weights, bias)
            for aligned in (False, True):
                assert_close(call_kernel(call, kernel, compiled, data, weights, bias, aligned=aligned), wanted)


def test_blocks_of_rows_of_any_length_are_one_row_or_short():
    """A block computes all positions of its rows, however few a call has in them."""
    layer = td.Problem.from_torch((8, 192, 64, 64), (192, 100, 2, 2), stride=2).replace(data_format="NXC")
    target = CPU_TARGETS["x86-64-v4"]
    assert X86.default(layer, target)[1].tile.height > 1
    variant = layer.replace(dynamic=(1, 2)).variants[-1]
    assert variant.data_spatial == layer.data_spatial
    tile = X86.default(variant, target)[1].tile
    assert tile.height == 1 or tile.width < 32


def test_keys_and_calls():
    assert VOCODER.key == "nany-g2-i20-o24-xany-k16-s8-d1-p4-yany+8-float32-NCX-IOX-bias"
    assert td.Problem.from_key(VOCODER.key) == VOCODER
    static = VOCODER.at((3, 40, 100))
    assert (static.batch, static.data_spatial, static.output_spatial, static.dynamic) == (3, (100,), (800,), ())
    assert VOCODER.serves(static)
    assert VOCODER.serves(VOCODER.replace(batch=3))
    assert not VOCODER.replace(batch=3).serves(VOCODER)
    assert not static.serves(VOCODER)
    assert static.replace(dynamic=(0, 1)) == VOCODER
    assert VOCODER.replace(batch=1) != VOCODER


def test_buckets():
    assert BUCKETS.key == "nany-g2-i20-o24-xany(5,40,200)-k16-s8-d1-p4-yany+8-float32-NCX-IOX-bias"
    assert td.Problem.from_key(BUCKETS.key) == BUCKETS
    assert BUCKETS.buckets == ((5, 40, 200),)
    assert BUCKETS.data_shape == (1, 40, 200)
    assert [one.buckets for one in BUCKETS.variants] == [((5,),), ((40,),), ((200,),)]
    assert [one.variants for one in BUCKETS.variants] == [(one,) for one in BUCKETS.variants]
    assert [one.data_spatial for one in VOCODER.variants] == [(16,), (128,), (1024,)]
    assert [one.data_spatial for one in PLANE.variants] == [(4, 9), (4, 40), (20, 9), (20, 40)]
    static = BUCKETS.at((3, 40, 1000))
    assert static == VOCODER.at((3, 40, 1000))
    assert (static.variants, static.buckets) == ((static,), ())
    assert BUCKETS != VOCODER
    assert BUCKETS.serves(VOCODER)
    assert VOCODER.serves(BUCKETS)
    assert BUCKETS.serves(static)
    assert BUCKETS.replace(batch=3).buckets == BUCKETS.buckets
    assert BUCKETS.replace(dynamic=(0,)).buckets == ()
    assert PLANE.replace(dynamic=(0, 2)).buckets == ((), (9, 40))
    # A bucket whose calls have no output has no variant, unless it is the only one.
    cropped = td.Problem.from_torch((1, 4, "any"), (4, 4, 3), padding=30)
    assert [one.data_spatial for one in cropped.variants] == [(128,), (1024,)]


def test_a_negative_constant():
    # Kernel 3, stride 1 and a pad of 2 on both sides: two positions are needed for any output.
    problem = td.Problem.from_torch((1, 4, "any"), (4, 4, 3), padding=2)
    assert problem.key.split("-y")[1].startswith("any-1-")
    assert td.Problem.from_key(problem.key) == problem
    assert problem.at((1, 4, 2)).output_spatial == (0,)
    with pytest.raises(td.ProblemError, match="output_spatial"):
        problem.at((1, 4, 1))


@pytest.mark.parametrize(
    ("dialect", "any_shape", "shape", "filter_shape", "attributes"),
    [
        ("from_torch", ("any", 8, "any"), (2, 8, 31), (8, 4, 16), {"stride": 8, "padding": 4, "groups": 2}),
        (
            "from_openvino",
            ("any", 8, "any", "any"),
            (2, 8, 5, 6),
            (8, 4, 3, 3),
            {"strides": [2, 3], "pads_end": [1, 0]},
        ),
        ("from_torch", (2, 8, [16, 64]), (2, 8, 9), (8, 4, 16), {"stride": 8}),
        ("from_onednn", (2, [5, 9], "any", 8), (2, 7, 6, 8), (3, 3, 4, 8), {"strides": [2, 2]}),
        ("from_onednn", (2, 5, "any", 8), (2, 5, 6, 8), (3, 3, 4, 8), {"strides": [2, 2]}),
        ("from_onnx", (2, 8, "any"), (2, 8, 9), (8, 4, 5), {"strides": [2], "auto_pad": "SAME_UPPER"}),
        ("from_onnx", ("any", 8, 3, 4, 5), (2, 8, 3, 4, 5), (8, 4, 2, 2, 2), {"output_shape": [3, 5, 7]}),
    ],
)
def test_dialects(dialect, any_shape, shape, filter_shape, attributes):
    make = getattr(td.Problem, dialect)
    assert make(any_shape, filter_shape, **attributes).at(shape) == make(shape, filter_shape, **attributes)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: td.Problem.from_onnx((2, 8, "any"), (8, 4, 3), output_shape=[5]),
            "output_shape=[5]: must be any just where a spatial extent of the data is any",
        ),
        (lambda: td.Problem.from_torch((2, 8, "any"), (8, 4, 3), output_size=[5]), "output_size=[5]: must be left out"),
        (
            lambda: td.Problem.from_torch((2, "any", 8), (8, 4, 3)),
            "data_shape=(2, 'any', 8): axis 1 (NCX) must be a number: the channels are never free",
        ),
        (lambda: td.Problem.from_torch((2, 8, "any", 3, 3), (8, 4, 3, 3, 3)), "may be any with 1 or 2 axes only"),
        (lambda: VOCODER.replace(data_spatial=("any",)), "must be any+c where the data extent is any"),
        (lambda: VOCODER.replace(dynamic=(0, 2)), "dynamic=(0, 2): must be axes from 0 to 1"),
        (lambda: td.Problem.from_torch((1, 8, []), (8, 4, 3)), "data_spatial=[]: must hold at least one extent"),
        (
            lambda: td.Problem.from_torch((1, 8, [4, 0]), (8, 4, 3)),
            "data_spatial=[4, 0]: every element must be at least",
        ),
        (
            lambda: td.Problem.from_torch(([1, 2], 8, 5), (8, 4, 3)),
            "data_shape=([1, 2], 8, 5): every element must be an",
        ),
        (lambda: PLANE.replace(buckets=(range(1, 9),) * 2), "must have at most 16 combinations"),
        (lambda: PLANE.replace(buckets=((3,),)), "buckets=((3,),): must have one element per spatial axis, 2 here"),
        (lambda: PLANE.replace(dynamic=(0,), buckets=((3,), ())), "buckets=((3,), ()): must be of dynamic extents"),
        (
            lambda: td.Problem.from_key(BUCKETS.key.replace("5,40", "40,5")),
            "must be written nany-g2-i20-o24-xany(5,40,200)",
        ),
        (lambda: VOCODER.at((2, 40)), "data_shape=(2, 40): must be (any, 40, any)"),
    ],
)
def test_messages(make, text):
    with pytest.raises(td.ProblemError) as caught:
        make()
    assert text in str(caught.value)
