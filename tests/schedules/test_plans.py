"""Every algorithm that supports a problem, with any plan that a search may try, against the reference."""

import itertools
import math
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.kernels import X86, in_turn, run_kernel, targets
from support.strategies import not_empty, operands, problems
from support.tolerances import WINOGRAD, assert_norm_close

import tvm_deconv as td
from tvm_deconv.compiler.selection import named
from tvm_deconv.compute.direct import define_direct
from tvm_deconv.compute.indexing import CHANNELS, GROUPS, ROWS, has_whole_vectors
from tvm_deconv.compute.matrix import define_matrix
from tvm_deconv.compute.matrix_layout import MatrixTile, contiguous_phases, finishes_planes, packs_rows, row_unit
from tvm_deconv.compute.phases import Geometry, axis_rows
from tvm_deconv.compute.strassen import STRASSEN
from tvm_deconv.problem.reference import reference
from tvm_deconv.schedules.x86 import matrix_tiles
from tvm_deconv.schedules.x86.algorithms import ALGORITHMS
from tvm_deconv.schedules.x86.dot import BFLOAT16_PAIRS
from tvm_deconv.schedules.x86.register_tiles import LATENCY_ACCUMULATORS
from tvm_deconv.schedules.x86.vectors import accumulator_lanes
from tvm_deconv.targets import CPU_LEVELS, CPU_TARGETS, detect_host

#: One or more for each algorithm.
EXAMPLES = (
    td.Problem(2, 1, 17, 33, (7, 9), (4, 4), (2, 2), (1, 1), (1, 1), (14, 18)),
    td.Problem(1, 3, 16, 5, (6, 5), (3, 5), (2, 2), (1, 1), (0, 3), (13, 8), data_format="NXC"),
    td.Problem(1, 2, 9, 40, (3, 4, 5), (3, 3, 3), (2, 1, 2), (1, 1, 2), (1, 0, 1), (5, 6, 12)),
    td.Problem(3, 1, 20, 21, (11,), (16,), (5,), (1,), (3,), (50,)),
    td.Problem(2, 1, 20, 40, (7, 9), (2, 2), (2, 2), (1, 1), (0, 0), (14, 18)),
    td.Problem(3, 2, 16, 32, (8, 1), (2, 1), (4, 1), (1, 1), (1, 2), (31, 1), data_format="NXC"),
    td.Problem(2, 1, 20, 3, (5, 7), (4, 5), (2, 3), (1, 1), (1, 2), (10, 20), data_format="NXC"),
    td.Problem(2, 1, 20, 40, (7, 9), (2, 2), (2, 2), (1, 1), (0, 0), (14, 18), "int8"),
    td.Problem(2, 1, 9, 3, (7, 9), (3, 2), (2, 2), (1, 1), (1, 0), (13, 18), "int8", data_format="NXC"),
)
#: The levels have no AMX: `test_amx` has its algorithms.
OF_LEVELS = [algorithm for algorithm in ALGORITHMS if not algorithm.name.startswith("amx")]
algorithms = pytest.mark.parametrize("algorithm", OF_LEVELS, ids=lambda algorithm: algorithm.name)


def check(problem, target, algorithm, seed):
    """Compare a plan that `seed` draws with the reference."""
    data, weights, bias = operands(problem, seed)
    wanted = reference(problem, data, weights, bias)
    plan = random.Random(seed).choice(algorithm.candidates(problem, target))[1]
    assert algorithm.read(plan.knobs) == plan
    result = run_kernel(problem, target, data, weights, bias, algorithm, plan).astype(np.float64)
    assert_norm_close(result, wanted, problem.dtype, algorithm.error_growth, message=(problem.key, plan))


@targets
@algorithms
def test_plans_of_every_algorithm(algorithm, target):
    """The levels take turns with the examples."""
    supported = [problem for problem in EXAMPLES if algorithm.supports(problem, target)]
    mine = supported[[*CPU_LEVELS].index(target.name) :: len(CPU_LEVELS)] or supported
    assert mine
    for seed, problem in enumerate(mine, 3):
        check(problem, target, algorithm, seed)


@targets
@algorithms
@settings(max_examples=2, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data(), seed=st.integers(0, 2**20))
def test_any_plan_agrees_with_the_reference(algorithm, target, data, seed):
    every = problems(max_macs=60_000)
    if algorithm.name.endswith("_folded"):  # few have what these ask for
        dtypes = ["float32", "int8"] if algorithm.name == "direct_folded" else ["int8"]
        every = problems(dtypes=dtypes, data_formats=["NXC"], max_macs=5_000).map(kernel_is_stride)
    supported = every.filter(lambda p: not_empty(p) and algorithm.supports(p, target))
    check(data.draw(supported), target, algorithm, seed)


def kernel_is_stride(problem):
    """The problem with kernel = stride along its last axis, whole, and without groups."""
    stride = max(2, problem.strides[-1])
    return problem.replace(
        groups=1,
        kernel=(*problem.kernel[:-1], stride),
        strides=(*problem.strides[:-1], stride),
        dilations=(*problem.dilations[:-1], 1),
        pads_begin=(*problem.pads_begin[:-1], 0),
        output_spatial=(*problem.output_spatial[:-1], stride * problem.data_spatial[-1]),
    )


@pytest.mark.parametrize("name", ["direct_channels", "matrix", "winograd", "direct_rows", "winograd_rows"])
@pytest.mark.skipif(not CPU_TARGETS["x86-64-v4"].features <= detect_host().features, reason="needs AVX-512")
def test_halves_of_vectors(name):
    """Twelve channels or positions leave a quarter of sixteen lanes empty, and no lane of vectors of eight and four."""
    form = "NCX" if name.endswith("rows") else "NXC"
    problem = td.Problem(2, 1, 9, 12, (5, 12), (3, 3), (2, 2), (1, 1), (1, 1), (10, 24), data_format=form)
    algorithm = named(name)
    filled = problem.replace(out_channels=64, data_spatial=(5, 64), output_spatial=(10, 128))
    whole = [(filled, CPU_TARGETS["x86-64-v4"]), (problem, CPU_TARGETS["x86-64-v3"])]
    assert not any(plan.halves for case in whole for _, plan in algorithm.candidates(*case))
    halves = [plan for _, plan in algorithm.candidates(problem, CPU_TARGETS["x86-64-v4"]) if plan.halves]
    data, weights, bias = operands(problem, 5)
    wanted = reference(problem, data, weights, bias)
    for plan in halves[:2]:
        assert plan.knobs["halves"] == 1
        assert algorithm.read(plan.knobs) == plan
        text = X86.build(problem, CPU_TARGETS["x86-64-v4"], algorithm, plan).deconv.script()
        assert "T.vectorized(T.int64(8))" in text
        assert "T.vectorized(T.int64(16))" not in text
        result = run_kernel(problem, CPU_TARGETS["x86-64-v4"], data, weights, bias, algorithm, plan)
        assert_norm_close(result, wanted, "float32", algorithm.error_growth)
    assert halves


@targets
def test_phases_of_two_axes_that_read_the_same_share_a_register_tile(target):
    problem = td.Problem(1, 1, 5, 1, (7, 19), (9, 9), (3, 3), (1, 1), (4, 4), (21, 57))
    rows = next(algorithm for algorithm in ALGORITHMS if algorithm.name == "direct_rows")
    plan = next(plan for _, plan in rows.candidates(problem, target) if plan.tile.phases == 4)
    definition = define_direct(problem, ROWS, plan.tile, 8)
    assert {section.phases for section in definition.sections} == {(2, 2), (2, 1), (1, 2), (1, 1)}
    assert definition.packed_elements == math.prod(problem.filter_shape)  # each weight once
    data, weights, bias = operands(problem, 8)
    result = run_kernel(problem, target, data, weights, bias, rows, plan)
    wanted = reference(problem, data, weights, bias)
    assert_norm_close(result, wanted, "float32")


@targets
@pytest.mark.parametrize(
    ("groups", "extent", "kernel", "stride", "pad", "output"),
    [
        (1, (7, 33), (4, 4), (2, 2), (1, 1), (14, 66)),
        (2, (9, 40), (5, 12), (3, 4), (2, 3), (26, 159)),
        (17, (5, 16), (9, 4), (3, 2), (4, 1), (16, 32)),
        (1, (50,), (16,), (8,), (5,), (393,)),
    ],
)
def test_phases_of_the_uncropped_output(groups, extent, kernel, stride, pad, output, target):
    """The levels take turns with the algorithms."""
    channels = 2 if groups == 17 else 19
    served = 0
    for number, algorithm in enumerate(ALGORITHMS):
        if (number // 2 + groups + extent[0]) % len(CPU_LEVELS) != [*CPU_LEVELS].index(target.name):
            continue
        problem = td.Problem(
            2, groups, 5, channels, extent, kernel, stride, (1,) * len(extent), pad, output,
            data_format=("NCX", "NXC")[(number + groups + len(extent)) % 2],
        )  # fmt: skip
        plans = [plan for _, plan in algorithm.candidates(problem, target) if getattr(plan.tile, "uncropped", 0)]
        if not plans or not algorithm.supports(problem, target):
            continue  # phases are vectors of the output, or there is nothing to transform
        data, weights, bias = operands(problem, 8)
        wanted = reference(problem, data, weights, bias)
        several = [plan for plan in plans if plan.tile.height < extent[0] or plan.tile.width < extent[-1]]
        plan = (plans, several)[number % 2][0]
        result = run_kernel(problem, target, data, weights, bias, algorithm, plan)
        message = problem.key, algorithm.name, plan
        assert_norm_close(result, wanted, "float32", algorithm.error_growth, message=message)
        served += 1
    assert served


@targets
def test_squares_of_data_do_not_reach_from_one_image_into_the_next(target):
    """So several images are packed as rows at once if their data are `N *X C`, or if their planes are whole vectors."""
    problem = td.Problem(3, 1, 20, 24, (3, 5), (2, 2), (2, 2), (1, 1), (0, 0), (6, 10))
    algorithm, lanes = named("matrix"), accumulator_lanes(problem, target)
    plan = next(plan for _, plan in algorithm.candidates(problem, target) if plan.tile.images > 1)
    whole = problem.replace(data_spatial=(4, 8), output_spatial=(8, 16))
    planes = replace(plan.tile, height=4, width=8)
    assert not packs_rows(problem, plan.tile, lanes)
    assert packs_rows(problem.replace(data_format="NXC"), plan.tile, lanes)
    assert packs_rows(whole, planes, lanes)
    data, weights, bias = operands(problem, 5)
    wanted = reference(problem, data, weights, bias)
    result = run_kernel(problem, target, data, weights, bias, algorithm, plan)
    assert_norm_close(result, wanted, "float32")


@targets
@pytest.mark.parametrize("name", ["matrix", "winograd"])
def test_phases_fill_vectors_or_halves_of_them(name, target):
    problem = td.Problem(2, 1, 5, 7, (6, 9), (16, 16), (8, 8), (1, 1), (3, 0), (50, 77), epilogue=td.Epilogue(True))
    assert contiguous_phases(problem, 16) == contiguous_phases(problem, 8) == 8
    assert contiguous_phases(problem.replace(pads_begin=(3, 4)), 16) == 0
    algorithm = next(algorithm for algorithm in ALGORITHMS if algorithm.name == name)
    data, weights, bias = operands(problem, 5)
    wanted = reference(problem, data, weights, bias)
    plans = [plan for _, plan in algorithm.candidates(problem, target)]
    # Blocks of two channels, which are columns enough; the last has one of seven.
    for plan in (plans[0], next(plan for plan in plans if plan.tile.width < 9 and plan.tile.channels == 2)):
        result = run_kernel(problem, target, data, weights, bias, algorithm, plan)
        assert_norm_close(result, wanted, "float32", WINOGRAD, message=plan)


@in_turn(
    "form, data_format, groups, channels, dtype",
    [(ROWS, "NCX", 3, 4), (CHANNELS, "NXC", 3, 32), (GROUPS, "NXC", 64, 1)],
    [("float32",), ("bfloat16",)],
)
def test_whole_vectors_are_stored_as_they_are_made(form, data_format, groups, channels, dtype, target):
    problem = td.Problem(
        2, groups, 5, channels, (6, 64), (4, 4), (2, 2), (1, 1), (1, 1), (12, 128), dtype, data_format=data_format,
        epilogue=td.Epilogue(True, "relu"),
    )  # fmt: skip
    algorithm = next(algorithm for algorithm in ALGORITHMS if algorithm.name == f"direct_{form}")
    lanes = accumulator_lanes(problem, target)

    def whole(problem):
        plans = [plan for _, plan in algorithm.candidates(problem, target)]
        return [plan for plan in plans if has_whole_vectors(problem, form, plan.tile, lanes)]

    data, weights, bias = operands(problem, 5)
    wanted = reference(problem, data, weights, bias)
    plans = whole(problem)
    # A row in one block, a row in several, and the most expensive plan.
    of_row, of_part = (
        next(plan for plan in plans if (plan.tile.width == 64) == whole_row) for whole_row in (True, False)
    )
    for plan in (of_row, of_part, plans[-1]):
        result = run_kernel(problem, target, data, weights, bias, algorithm, plan).astype(np.float64)
        assert_norm_close(result, wanted, dtype, message=plan)
    odd = problem.replace(output_spatial=(12, 127)) if form == ROWS else problem.replace(groups=3, out_channels=9)
    assert not whole(odd)


@in_turn(
    "name, extent, output",
    [
        ("winograd", (4, 4), (8, 8)),
        ("winograd", (8, 2), (15, 4)),
        ("matrix", (6, 6), (12, 12)),
        ("matrix", (2, 3, 5), (4, 8, 10)),
    ],
)
def test_short_rows_are_finished_by_planes(name, extent, output, target):
    rank = len(extent)
    problem = td.Problem(
        5, 2, 16, 19, extent, (4,) * rank, (2,) * rank, (1,) * rank, (1,) * rank, output,
        epilogue=td.Epilogue(True, "relu"),
    )  # fmt: skip
    algorithm = named(name)
    lanes = accumulator_lanes(problem, target)
    data, weights, bias = operands(problem, 5)
    wanted = reference(problem, data, weights, bias)
    plans = [plan for _, plan in algorithm.candidates(problem, target)]
    chunk = 2 * row_unit(problem, lanes)
    geometries = (Geometry.of(problem), Geometry.of(problem, uncropped=True))
    by_planes = [plan for plan in plans if finishes_planes(geometries[plan.tile.uncropped], plan.tile, lanes, chunk)]
    assert bool(by_planes) == (math.prod(output[-2:]) % lanes == 0 and output[-1] % chunk > 0)
    several = [plan for plan in by_planes if plan.tile.images > 1]
    for plan in (*by_planes[:1], *several[:1], plans[0]):
        result = run_kernel(problem, target, data, weights, bias, algorithm, plan)
        assert_norm_close(result, wanted, "float32", WINOGRAD, message=plan)


@pytest.mark.parametrize("kernel", [(3, 3), (4, 4), (5, 5), (4,), (6,), (8,), (5, 1), (15,)])
def test_winograd_keeps_the_precision_of_the_direct_algorithm(kernel):
    target = CPU_TARGETS["x86-64-v3"]
    if not target.features <= detect_host().features:
        pytest.skip("this CPU does not run x86-64-v3")
    rank = len(kernel)
    strides, pads = tuple(min(2, k) for k in kernel), tuple(int(k > 1) for k in kernel)
    extents = (12, 12) if rank == 2 else (96,)
    output = tuple(s * x for s, x in zip(strides, extents, strict=True))
    problem = td.Problem(1, 1, 64, 32, extents, kernel, strides, (1,) * rank, pads, output)
    data, weights, bias = operands(problem, sum(kernel))
    wanted = reference(problem, data, weights, bias)
    bound = WINOGRAD * np.linalg.norm(run_kernel(problem, target, data, weights, bias, named("direct_rows")) - wanted)
    for name in ("winograd", "winograd_rows") if rank == 2 else ("winograd",):
        algorithm = named(name)
        plans = {plan.tile.outputs: plan for _, plan in reversed(algorithm.candidates(problem, target))}
        assert max(max(outputs) for outputs in plans) >= 3
        if min(kernel) > 1 and rank == 2:
            # Along both axes errors multiply. The matrices of fewer outputs are tested along one, with the same taps.
            plans = {outputs: plans[outputs] for outputs in [max(plans, key=math.prod)]}
        for plan in plans.values():
            result = run_kernel(problem, target, data, weights, bias, algorithm, plan)
            assert 0 < np.linalg.norm(result - wanted) <= bound, (name, plan)


@in_turn(
    "problem, data_format, dtype",
    [
        # Phases of seven taps and of six, in two pieces each.
        ((2, 1, 5, 19, (33,), (25,), (4,), (1,), (11,), (132,)), "NXC", "float32"),
        # Many pieces, the last of which lacks a tap.
        ((1, 1, 64, 32, (96,), (41,), (1,), (1,), (20,), (96,)), "NCX", "float32"),
        ((1, 1, 6, 9, (29,), (8,), (1,), (3,), (4,), (42,)), "NCX", "float64"),
        ((1, 2, 9, 7, (11, 13), (7, 7), (1, 1), (1, 1), (3, 3), (11, 13)), "NCX", "float32"),
        ((1, 1, 5, 17, (9, 10), (14, 3), (2, 1), (1, 1), (2, 1), (26, 10)), "NXC", "bfloat16"),
        ((1, 1, 3, 9, (4, 6, 5), (3, 7, 6), (1, 1, 1), (1, 1, 1), (1, 3, 2), (4, 6, 6)), "NXC", "float32"),
    ],
)
def test_winograd_of_many_taps(problem, data_format, dtype, target):
    """Pieces of the taps are filters of their own, whose products are summed before they are transformed."""
    problem = td.Problem(*problem, dtype, data_format=data_format, epilogue=td.Epilogue(True))
    algorithm, geometry = named("winograd"), Geometry.of(problem)
    plans = {plan.tile.outputs: plan for _, plan in reversed(algorithm.candidates(problem, target))}

    def pieces(outputs):
        axes = zip(geometry.axes, outputs, strict=True)
        return max(axis_rows(axis, run, 1, m).pieces for axis, m in axes for run in axis.runs)

    assert max(map(pieces, plans)) > 1
    data, weights, bias = operands(problem, 5)
    wanted = reference(problem, data, weights, bias)
    for outputs in {max(plans), max(plans, key=lambda outputs: (pieces(outputs), outputs))}:
        result = run_kernel(problem, target, data, weights, bias, algorithm, plans[outputs]).astype(np.float64)
        assert_norm_close(result, wanted, dtype, WINOGRAD, message=plans[outputs])


@in_turn(
    "problem, tile, outputs, data_format, dtype",
    [
        # Kernel 3, stride 2: every other phase has one tap, and reads the packed rows without a transform.
        ((2, 3, 5, 3, (13, 19), (3, 3), (2, 2), (1, 1), (1, 1), (26, 38)), (1, 1, 8, 19, 3, 32, 1), (1, 4)),
        # Several images in a block, rows without gaps, pads beyond the kernel, and an output beyond the data.
        ((3, 1, 7, 1, (7, 20), (5, 4), (2, 2), (1, 1), (6, 1), (16, 41)), (3, 1, 8, 21, 1, 32, 4), (1, 3)),
        # Phases of the uncropped output, a nearly empty last block, and a row in two blocks.
        ((1, 1, 6, 4, (17, 40), (9, 9), (3, 3), (1, 1), (4, 4), (51, 120)), (1, 1, 3, 32, 2, 16, 1, 1), (1, 4)),
        # Dilation separates the taps of one axis, which is not transformed. The taps of the other are neighbours.
        (
            (2, 2, 4, 3, (6, 7, 18), (3, 3, 2), (1, 2, 1), (2, 1, 1), (0, 1, 1), (7, 12, 20)),
            (1, 3, 4, 20, 3, 16, 1),
            (1, 2),
        ),
        # The first of three axes alone, and both outer ones.
        (
            (1, 1, 5, 2, (6, 5, 17), (4, 5, 3), (2, 2, 2), (1, 1, 1), (1, 2, 1), (12, 10, 34)),
            (1, 4, 5, 17, 2, 16, 1),
            (3, 1),
        ),
        (
            (2, 1, 5, 2, (6, 5, 17), (4, 5, 3), (2, 2, 2), (1, 1, 1), (1, 2, 1), (12, 10, 34)),
            (1, 4, 5, 17, 1, 32, 2, 1),
            (2, 2),
        ),
    ],
    [("NCX", "float32"), ("NXC", "float64"), ("NCX", "bfloat16")],
)
def test_winograd_of_rows(problem, tile, outputs, data_format, dtype, target):
    problem = td.Problem(*problem, dtype, data_format=data_format, epilogue=td.Epilogue(True))
    algorithm = named("winograd_rows")
    assert algorithm.supports(problem, target)
    uncropped = dict(zip(("uncropped",), tile[7:], strict=False))
    names = ("images", "depth", "height", "width", "channels", "positions", "phases")
    data, weights, bias = operands(problem, 5)
    wanted = reference(problem, data, weights, bias)
    share_data = int(data_format == "NXC")
    knobs = dict(zip(names, tile, strict=False)) | uncropped | {"share_data": share_data}
    knobs |= {name: m for name, m in zip(("outputs_d", "outputs_h"), outputs, strict=True) if m > 1}
    plan = algorithm.read(knobs)
    assert plan.knobs == knobs
    result = run_kernel(problem, target, data, weights, bias, algorithm, plan).astype(np.float64)
    assert_norm_close(result, wanted, dtype, WINOGRAD)


@in_turn(
    "problem, data_format, dtype",
    [
        # All phases with taps along all axes, two groups, two images, an output cut off on both sides.
        ((2, 2, 5, 23, (5, 6, 9), (4, 4, 4), (2, 2, 2), (1, 1, 1), (1, 2, 1), (10, 11, 18)), "NCX", "float32"),
        # One of eight combinations of runs has taps along all axes.
        ((1, 1, 20, 19, (5, 7, 6), (3, 3, 3), (2, 2, 2), (1, 1, 1), (1, 1, 1), (10, 13, 11)), "NXC", "float32"),
        ((3, 1, 3, 17, (3, 4, 5), (3, 2, 3), (1, 1, 1), (1, 1, 1), (1, 0, 1), (3, 5, 5)), "NCX", "bfloat16"),
    ],
)
def test_winograd_of_volumes(problem, data_format, dtype, target):
    """The transforms along the first axis are stages of their own."""
    problem = td.Problem(*problem, dtype, data_format=data_format, epilogue=td.Epilogue(True, "relu"))
    algorithm = named("winograd")
    plans = [plan for _, plan in algorithm.candidates(problem, target) if min(plan.tile.outputs) > 1]
    plans.sort(key=lambda plan: plan.tile.outputs)
    some = [plans[0], next(plan for plan in plans if plan.share_data), *plans[len(plans) - (problem.kernel[0] < 4) :]]
    data, weights, bias = operands(problem, 5)
    wanted = reference(problem, data, weights, bias)
    for plan in some:
        result = run_kernel(problem, target, data, weights, bias, algorithm, plan).astype(np.float64)
        assert_norm_close(result, wanted, dtype, WINOGRAD, message=plan)
    code = algorithm.build(problem, target, plans[-1]).deconv.script()
    assert "rows_apart_" in code
    assert "outputs_apart_" in code


@in_turn(
    "problem, data_format, dtype",
    [
        # The extents are no multiples of the steps between taps, and pads are more than the kernel reaches.
        ((2, 1, 5, 19, (9, 11), (3, 3), (1, 1), (2, 4), (2, 4), (9, 11)), "NXC", "float32"),
        ((1, 2, 20, 5, (13, 6), (3, 4), (1, 1), (3, 1), (7, 1), (8, 8)), "NCX", "float32"),
        ((1, 1, 19, 7, (7, 15), (5, 3), (2, 3), (3, 2), (1, 0), (24, 47)), "NCX", "bfloat16"),
        ((1, 1, 16, 16, (41,), (5,), (1,), (3,), (6,), (41,)), "NCX", "float32"),
        ((1, 1, 3, 17, (4, 7, 6), (3, 3, 3), (1, 1, 2), (2, 3, 1), (2, 3, 1), (4, 7, 11)), "NXC", "float32"),
    ],
)
def test_winograd_of_dilated_taps(problem, data_format, dtype, target):
    """The positions of a row are as far apart as its taps."""
    problem = td.Problem(*problem, dtype, data_format=data_format, epilogue=td.Epilogue(True))
    algorithm = named("winograd")
    plans = [plan for _, plan in algorithm.candidates(problem, target)]
    spaced = {axis for axis, phases in enumerate(Geometry.of(problem).axes) if phases.step > 1}
    assert spaced
    some = {plan.tile.outputs: plan for plan in reversed(plans) if any(plan.tile.outputs[i] > 1 for i in spaced)}
    data, weights, bias = operands(problem, 5)
    wanted = reference(problem, data, weights, bias)
    for plan in [plans[0], *itertools.islice(some.values(), 1)]:
        result = run_kernel(problem, target, data, weights, bias, algorithm, plan)
        assert_norm_close(result, wanted, dtype, WINOGRAD, message=plan)


def test_rows_of_dilated_taps_are_transformed_where_an_end_is_known():
    target = CPU_TARGETS["x86-64-v3"]
    problem = td.Problem(1, 1, 32, 32, (16, 16), (3, 3), (1, 1), (2, 2), (2, 2), (16, 16))
    assert named("winograd").supports(problem, target)
    dynamic = problem.replace(dynamic=(1, 2))
    assert not named("winograd").supports(dynamic, target)
    plan = named("winograd").candidates(problem, target)[0][1]
    with pytest.raises(ValueError, match=r"outputs=\d: must be 1 along a dynamic axis with dilated taps"):
        named("winograd").build(dynamic, target, plan)
    rows = named("direct_rows").candidates(problem, target)[0][1].knobs | {"outputs_h": 2}
    with pytest.raises(ValueError, match="outputs=2: must be 1 along an axis with dilated taps"):
        named("winograd_rows").build(problem, target, named("winograd_rows").read(rows))


def test_rows_are_transformed_for_all_taps_at_once():
    target, algorithm = CPU_TARGETS["x86-64-v3"], named("winograd_rows")
    problem = td.Problem(1, 1, 8, 3, (16, 16), (8, 8), (2, 2), (1, 1), (3, 3), (32, 32))
    knobs = algorithm.candidates(problem, target)[0][1].knobs
    assert algorithm.build(problem, target, algorithm.read(knobs | {"outputs_h": 4}))
    with pytest.raises(ValueError, match="outputs=5: must be at most 4 along an axis with 4 taps"):
        algorithm.build(problem, target, algorithm.read(knobs | {"outputs_h": 5}))


def test_rows_have_products_to_save_only_along_outer_axes():
    algorithm, target = named("winograd_rows"), CPU_TARGETS["x86-64-v3"]
    plane = td.Problem(1, 1, 8, 3, (16, 16), (4, 4), (2, 2), (1, 1), (1, 1), (32, 32))
    assert algorithm.supports(plane, target)
    for other in (
        td.Problem(1, 1, 8, 3, (16,), (4,), (2,), (1,), (1,), (32,)),
        plane.replace(kernel=(2, 4)),
        plane.replace(dtype="int8"),
        plane.replace(kernel=(3, 3), strides=(1, 1), dilations=(2, 1)),
    ):
        assert not algorithm.supports(other, target)
    knobs = algorithm.candidates(plane, target)[0][1].knobs
    with pytest.raises(ValueError, match=r"outputs=\(1, \d, 1\): must all be 1"):
        named("direct_rows").read(knobs)
    with pytest.raises(ValueError, match=r"outputs=\(1, 1, 1\): one must be more than 1"):
        algorithm.read({name: value for name, value in knobs.items() if name != "outputs_h"})


def test_strassen_multiplies_matrices():
    """Two by two matrices of elements that do not commute: check each product of an element of either."""
    for left, right, result in itertools.product(range(4), repeat=3):
        total = sum(
            output * data[left] * filter[right]
            for output, data, filter in zip(STRASSEN.outputs[result], STRASSEN.data, STRASSEN.filter, strict=True)
        )
        assert total == (left % 2 == right // 2 and result == left // 2 * 2 + right % 2)


@in_turn(
    "channels, extents, kernel, data_format",
    [((256, 48), (7, 9), (2, 2)), ((97, 21), (5, 7), (3, 1)), ((130, 3), (41,), (16,))],
    [("NCX",), ("NXC",)],
)
def test_strassen_keeps_the_precision_of_the_direct_algorithm(channels, extents, kernel, data_format, target):
    """Rows, input channels and columns are cut in halves: even and odd numbers of each."""
    rank = len(kernel)
    output = tuple(k * x for k, x in zip(kernel, extents, strict=True))
    problem = td.Problem(
        1, 1, *channels, extents, kernel, kernel, (1,) * rank, (0,) * rank, output, data_format=data_format
    )
    data, weights, bias = operands(problem, sum(channels))
    wanted = reference(problem, data, weights, bias)
    direct, strassen = named("direct_rows"), named("strassen")
    bound = WINOGRAD * np.linalg.norm(run_kernel(problem, target, data, weights, bias, direct) - wanted)
    plans = [plan for _, plan in strassen.candidates(problem, target)]
    assert strassen.supports(problem, target)
    assert all(plan.knobs["strassen"] and strassen.read(plan.knobs) == plan for plan in plans)
    for plan in (plans[0], plans[len(plans) // 2]):
        result = run_kernel(problem, target, data, weights, bias, strassen, plan)
        assert 0 < np.linalg.norm(result - wanted) <= bound, plan


def test_strassen_is_not_for_the_points_of_winograd():
    problem = td.Problem(1, 1, 32, 48, (60,), (4,), (2,), (1,), (1,), (120,))
    for outputs, strassen in ((2, 1), (1, 2)):
        with pytest.raises(ValueError, match=f"strassen={strassen}: must be 0, or 1 where outputs of all axes are 1"):
            define_matrix(problem, MatrixTile(1, 1, 1, 60, 48, 12, 2, 1, 1, outputs, strassen=strassen), 16)


def test_strassen_is_the_default_where_channels_are_many():
    problem = td.Problem(1, 1, 768, 384, (64, 64), (2, 2), (2, 2), (1, 1), (0, 0), (128, 128))
    for target in CPU_LEVELS.values():
        assert X86.default(problem, target)[0].name == "strassen"
        assert X86.default(problem.replace(in_channels=32), target)[0].name != "strassen"
        taps = problem.replace(kernel=(4, 4), pads_begin=(1, 1))
        assert X86.default(taps, target)[0].name == "winograd"
        assert X86.default(problem.replace(dtype="int8"), target)[0].name != "strassen"


@pytest.mark.parametrize(
    ("data", "kernel", "stride", "pad", "name"),
    [
        ((1, 256, 128, 64, 64), 3, 2, 1, "dot_rows"),
        ((1, 1024, 512, 32, 32), 2, 2, 0, "dot_rows"),
        ((1, 1024, 256, 16, 16), 4, 2, 1, "winograd"),
        ((1, 21, 21, 16, 16), 64, 32, 0, "dot"),
    ],
    ids=["cyclegan-up1", "unet-up1", "pix2pix", "fcn-32s"],
)
def test_defaults_in_words_know_that_filters_hide_and_that_words_are_joined(data, kernel, stride, pad, name):
    """Of bfloat16 in `N C *X`, the fastest by measurement. In fcn-32s 32 phases are stored one by one by `dot_rows`."""
    batch, in_channels, out_channels, *extents = data
    output = [(extent - 1) * stride + kernel - 2 * pad + kernel % 2 for extent in extents]
    square = [(kernel,) * 2, (stride,) * 2, (1, 1), (pad,) * 2]
    problem = td.Problem(batch, 1, in_channels, out_channels, tuple(extents), *square, tuple(output), "bfloat16")
    assert X86.default(problem, CPU_TARGETS["x86-64-v4-bf16"])[0].name == name


def test_words_are_joined_where_channels_are_apart():
    problem = td.Problem(1, 1, 128, 256, (16, 16), (4, 4), (2, 2), (1, 1), (1, 1), (32, 32), "bfloat16")
    for data_format, joined in (("NCX", True), ("NXC", False)):
        layer = problem.replace(data_format=data_format)
        of_words, others = (
            matrix_tiles.candidates(layer, False, False, CPU_TARGETS["x86-64-v4-bf16"], 16, words)[0][0]
            for words in (BFLOAT16_PAIRS, None)
        )
        assert (of_words > others) == joined


def test_winograd_is_the_default_where_phases_of_the_uncropped_output_fill_vectors():
    """Four channels are less than half a vector; with four phases that read the same data they fill one."""
    problem = td.Problem(64, 1, 64, 4, (32, 32), (4, 4), (2, 2), (1, 1), (1, 1), (64, 64), data_format="NXC")
    algorithm, plan = X86.default(problem, CPU_TARGETS["x86-64-v4"])
    assert algorithm.name == "winograd"
    assert plan.tile.uncropped


@pytest.mark.parametrize(
    ("data", "filter", "stride", "name"),
    [
        ((1, 20, 35), (1, 6, 256, 7, 7), 1, "winograd"),
        ((8, 32, 32), (1, 6, 6, 5, 5), 3, "direct_channels"),
        ((2, 16, 16), (3, 64, 8, 5, 5), 4, "direct_inputs"),
    ],
    ids=["few inputs", "few outputs", "half a vector of outputs in groups"],
)
def test_vectors_need_not_be_full(data, filter, stride, name):
    """The fastest by measurement, by 1.2 to 2.7 times: few channels of one end leave lanes empty and save products."""
    (batch, *extents), (groups, in_channels, out_channels, *kernel) = data, filter
    output = tuple((extent - 1) * stride + kernel[0] for extent in extents)
    square = [tuple(kernel), (stride, stride), (1, 1), (0, 0)]
    problem = td.Problem(batch, groups, in_channels, out_channels, tuple(extents), *square, output, data_format="NXC")
    assert X86.default(problem, CPU_TARGETS["x86-64-v4"])[0].name == name


def test_blocks_have_fewer_pieces_of_data_that_come_from_memory():
    """Each piece of a channel's data begins with misses: larger ones were 1.19 times as fast with 72 channels."""
    layer = td.Problem(8, 1, 100, 4, (48, 85), (3, 3), (1, 1), (3, 3), (3, 3), (48, 85))
    layers = [layer.replace(batch=batch) for batch in (8, 32)]
    near, far = (named("direct_rows").candidates(one, CPU_TARGETS["x86-64-v3"])[0][1].tile for one in layers)
    assert near.height < far.height


def test_register_tiles_store_little_at_once_past_the_caches():
    """More stores than the next tile's products hide stop it. In the caches larger tiles save loads."""
    target = CPU_TARGETS["x86-64-v4"]
    large = td.Problem(1, 1, 16, 12, (180, 240), (3, 3), (2, 2), (1, 1), (1, 1), (360, 480), data_format="NXC")
    small = large.replace(data_spatial=(60, 80), output_spatial=(120, 160))
    algorithm, plan = X86.default(large, target)
    assert (algorithm.name, plan.tile.channels) == ("direct_channels", 16)
    assert plan.tile.phases * plan.tile.positions <= 18
    _, plan = X86.default(small, target)
    assert plan.tile.phases * plan.tile.positions > 18


def cost_of(algorithm, problem, target, **knobs):
    """Return the least cost of the plans of `algorithm` that have these `knobs`."""
    plans = named(algorithm).candidates(problem, target)
    return min(cost for cost, plan in plans if plan.knobs.items() >= knobs.items())


def test_register_tiles_are_rated_by_the_phases_that_runs_have():
    """Nine phases are runs of two and of one: more than half of the work has two phases for a tile of four, or one."""
    target = CPU_TARGETS["x86-64-v3"]
    problem = td.Problem(1, 1, 56, 1, (360, 640), (9, 9), (3, 3), (1, 1), (4, 4), (1080, 1920), data_format="NXC")
    for algorithm in ("direct_rows", "winograd_rows"):
        wide = cost_of(algorithm, problem, target, phases=2, positions=32, width=64)
        assert wide < cost_of(algorithm, problem, target, phases=4, positions=16, width=64)


def test_short_blocks_fetch_a_far_filter_behind_their_products():
    """A block of a row multiplies by four megabytes of the filter for longer than it takes to fetch them."""
    target = CPU_TARGETS["x86-64-v4"]
    problem = td.Problem(1, 1, 256, 256, (37, 37), (4, 4), (4, 4), (1, 1), (0, 0), (148, 148), data_format="NXC")
    tile = {"channels": 16, "phases": 4, "positions": 5}
    row = cost_of("direct_channels", problem, target, height=1, width=37, **tile)
    assert row < 1.1 * cost_of("direct_channels", problem, target, height=13, width=37, **tile)


def test_the_next_register_tiles_hide_the_latency_of_a_reduction_over_taps_alone():
    """With four phases the filters of four taps leave no registers; the few sums of two wait for nothing."""
    target = CPU_TARGETS["x86-64-v3"]
    problem = td.Problem(1, 64, 1, 1, (64, 64), (4, 4), (2, 2), (1, 1), (1, 1), (128, 128))
    algorithm, plan = X86.default(problem, target)
    assert (algorithm.name, plan.tile.phases) == ("direct_rows", 2)
    rows = td.Problem(1, 64, 1, 1, (32, 32), (8, 8), (4, 4), (1, 1), (2, 2), (128, 128))
    assert X86.default(rows, target)[1].tile.uncropped  # one run of phases: rows are stored without a branch
    small = td.Problem(1, 1024, 1, 1, (7, 7), (5, 5), (2, 2), (1, 1), (2, 2), (14, 14))
    assert X86.default(small, target)[1].tile.positions == 56  # one register tile, with no next ones
    short = td.Problem(1, 21, 1, 1, (40, 40), (32, 32), (16, 16), (1, 1), (0, 0), (656, 656))
    assert X86.default(short, target)[1].tile.height > 1  # a row is two register tiles


@pytest.mark.parametrize("layout", ["NCX", "NXC"])
def test_matrix_tiles_have_more_sums_than_just_hide_the_latency(layout):
    """Four rows by two vectors wait for late operands; five rows, or three vectors, with as few rows over, do not."""
    target = CPU_TARGETS["x86-64-v3"]
    layers = [
        td.Problem(1, 1, 512, 256, (64, 80), (3, 3), (2, 2), (1, 1), (1, 1), (128, 160), data_format=layout),
        td.Problem(1, 1, 768, 384, (400,), (10,), (5,), (1,), (3,), (1999,), data_format=layout),
    ]
    for problem in layers:
        _, plan = X86.default(problem, target)
        assert plan.tile.rows * plan.tile.vectors > LATENCY_ACCUMULATORS


def test_winograds_outputs_do_not_go_to_memory_by_lone_lines():
    """Of 64 channels 16 are a line, whose neighbours come with it if a tile has them; caches keep smaller outputs."""
    large = td.Problem(1, 1, 64, 64, (40, 40), (12, 12), (8, 8), (1, 1), (2, 2), (320, 320), data_format="NXC")
    algorithm, plan = X86.default(large, CPU_TARGETS["x86-64-v3"])
    assert algorithm.name == "winograd"
    assert plan.tile.channels > 16
    small = large.replace(data_spatial=(12, 12), output_spatial=(96, 96))
    assert X86.default(small, CPU_TARGETS["x86-64-v3"])[1].tile.channels == 16


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_winograds_outputs_do_not_go_to_the_last_cache_by_parts_of_lines(dtype):
    """Of 16 bits 16 channels are half of a line; caches of a core keep smaller outputs."""
    extents = (1, 1, 64, 64, (40, 40), (12, 12), (8, 8), (1, 1), (2, 2), (320, 320))
    large = td.Problem(*extents, data_format="NXC", dtype=dtype)
    algorithm, plan = X86.default(large, CPU_TARGETS["x86-64-v3"])
    assert algorithm.name == "winograd"
    assert plan.tile.channels > 16
    small = large.replace(data_spatial=(12, 12), output_spatial=(96, 96))
    assert X86.default(small, CPU_TARGETS["x86-64-v3"])[1].tile.channels == 16


def test_winograds_outputs_of_positions_that_end_within_a_line_are_more_than_one():
    """A line's worth of 100 channels lies in two lines wherever a position begins."""
    problem = td.Problem(2, 1, 16, 100, (28, 28), (9, 9), (5, 5), (1, 1), (2, 2), (140, 140), data_format="NXC")
    algorithm, plan = X86.default(problem, CPU_TARGETS["x86-64-v3"])
    assert algorithm.name == "winograd"
    assert plan.tile.channels > 16


def test_sums_of_many_terms_take_longer():
    """Tiles of six rows save more products than those of three, and lose more by sums of twice as many terms."""
    problem = td.Problem(64, 1, 64, 3, (32, 32), (4, 4), (2, 2), (1, 1), (1, 1), (64, 64))
    algorithm, plan = X86.default(problem, CPU_TARGETS["x86-64-v3"])
    assert algorithm.name == "winograd_rows"
    assert plan.tile.outputs_h <= 4


def test_rows_that_just_fill_their_share_of_the_second_level_cache_are_cut():
    """The gathered rows of one of four runs are 350 KB, on a cache of 512."""
    target = CPU_TARGETS["x86-64-v3"]
    problem = td.Problem(1, 1, 64, 16, (128, 224), (4, 4), (2, 2), (1, 1), (1, 1), (256, 448), data_format="NXC")
    algorithm, plan = X86.default(problem, target)
    assert (algorithm.name, plan.tile.outputs) == ("winograd", (1, 4, 4))
    assert plan.tile.width < 224


def test_tiles_of_channels_that_share_lines_are_few_past_the_second_level_cache():
    """Sixteen of 21 channels and the other five stored to the same lines of memory, one after the other."""
    target = CPU_TARGETS["x86-64-v4"]
    problem = td.Problem(1, 1, 21, 21, (16, 16), (64, 64), (32, 32), (1, 1), (0, 0), (544, 544), data_format="NXC")
    _, plan = X86.default(problem, target, ["direct_channels"])
    assert plan.tile.channels >= 21


def test_register_tiles_of_few_inputs_fill_the_lines_that_come_from_memory():
    """In the caches, or where products hide that lines come, tiles of one vector of channels save loads."""
    target = CPU_TARGETS["x86-64-v3"]
    memory = td.Problem(1, 1, 16, 16, (200, 200), (2, 2), (2, 2), (1, 1), (0, 0), (400, 400), data_format="NXC")
    caches = memory.replace(data_spatial=(40, 40), output_spatial=(80, 80))
    for problem, channels in ((memory, 16), (caches, 8), (memory.replace(in_channels=128), 8)):
        _, plan = X86.default(problem, target, ["direct_channels"])
        assert plan.tile.channels == channels
        assert plan.tile.phases > 1


@pytest.mark.parametrize(("stride", "unit"), [(1, 16), (2, 8), (4, 4), (5, 16), (8, 1), (16, 1)])
def test_a_row_is_cut_into_whole_vectors(stride, unit):
    # Else the last vector of a block's row spills into the next block's, which another thread may have finished.
    problem = td.Problem(1, 1, 32, 48, (600,), (2 * stride,), (stride,), (1,), (0,), (600 * stride,))
    assert row_unit(problem, 16) == unit
    for winograd in (False, True):
        plans = matrix_tiles.candidates(problem, winograd, False, CPU_TARGETS["x86-64-v4"], 16)
        widths = [plan.tile.width for _, plan in plans]
        cut = [width for width in widths if width < 600]
        assert cut
        assert all(width % unit == 0 for width in cut)
    if unit > 1:
        with pytest.raises(ValueError, match=f"multiple of {unit}"):
            define_matrix(problem, MatrixTile(1, 1, 1, 3 * unit // 2, 48, 12, 2, 1, 1, 1), 16)


def test_no_algorithm_is_named_that_does_not_admit_the_problem():
    # Phases have one tap: nothing to transform.
    problem = td.Problem(1, 1, 16, 16, (4, 4), (2, 2), (2, 2), (1, 1), (0, 0), (8, 8))
    target = CPU_TARGETS["x86-64-v3"]
    assert X86.default(problem, target)[0].name != "winograd"
    with pytest.raises(td.BuildError, match="algorithms='winograd': admit no algorithm for n1"):
        X86.default(problem, target, ["winograd"])


@pytest.mark.parametrize(("kernel", "stride"), [(4, 2), (8, 4), (3, 1), (2, 2)])
def test_tiles_of_one_channel_leave_registers_for_the_filters(kernel, stride):
    # LLVM keeps the filters of all taps from one tile to the next; nothing is gained by channels that do not exist.
    pad, output = (kernel - stride) // 2, 32 * stride + (kernel - stride) % 2
    problem = td.Problem(1, 64, 1, 1, (32, 32), (kernel,) * 2, (stride,) * 2, (1, 1), (pad,) * 2, (output,) * 2)
    target = CPU_TARGETS["x86-64-v4"]
    tiles = [plan.tile for _, plan in named("direct_rows").candidates(problem, target)]
    assert {tile.channels for tile in tiles} == {1}
    vectors = tiles[0].positions // 16
    taps = math.ceil(kernel / stride) ** 2
    assert tiles[0].phases * (vectors + taps) + vectors <= target.vector_registers + 1


def test_two_channels_of_many_taps_leave_registers_for_vectors_that_are_loaded_early():
    """Of nine vectors accumulators went to memory at each tap: 1.6 times the time, in integers as much."""
    problem = td.Problem(1, 1, 72, 2, (16,) * 3, (3,) * 3, (1,) * 3, (1,) * 3, (1,) * 3, (16,) * 3, dtype="bfloat16")
    algorithm, plan = X86.default(problem, CPU_TARGETS["x86-64-v4-bf16"])
    assert algorithm.name == "dot_rows"
    assert plan.tile.channels == 2
    assert plan.tile.positions <= 128


def test_tiles_of_groups_have_several_positions_and_phases():
    """Filters then serve several positions, and data several phases."""
    problem = td.Problem(1, 64, 1, 1, (64, 64), (4, 4), (2, 2), (1, 1), (1, 1), (128, 128), data_format="NXC")
    for dtype in ("float32", "bfloat16", "float16"):
        algorithm, plan = X86.default(problem.replace(dtype=dtype), CPU_TARGETS["x86-64-v4-bf16"])
        assert algorithm.name == "direct_groups"
        assert min(plan.tile.positions, plan.tile.phases) > 1, dtype
