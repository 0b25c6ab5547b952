"""Generated CUDA on the CPU (`cuda_shim`) against the reference: every family over the attribute space it serves."""

import itertools
import math
import re
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import tvm_ffi
from hypothesis import strategies as st
from support.cuda_kernels import (
    CUDA,
    HOPPER,
    HOPPER_FAMILIES,
    TARGET,
    Batch,
    OnDevice,
    build_kernel,
    compile_for_cpu,
    drawn,
    sparse,
    target_of,
)
from support.strategies import not_empty, operands, problems
from support.tolerances import norm_bound
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as build

import tvm_deconv as td
from tvm_deconv.bench.gpu import of_type as as_type
from tvm_deconv.compute.gather import sections
from tvm_deconv.compute.phases import Geometry
from tvm_deconv.problem import FAST_TERMS
from tvm_deconv.problem.reference import reference
from tvm_deconv.schedules.cuda import emit
from tvm_deconv.schedules.cuda.algorithms import ALGORITHMS
from tvm_deconv.schedules.cuda.blocks import each_block, sectors
from tvm_deconv.schedules.cuda.gathered import GatheredGroups
from tvm_deconv.schedules.cuda.held import Held
from tvm_deconv.schedules.cuda.held_merged_turned import TurnedHeldMerged
from tvm_deconv.schedules.cuda.held_turned import TurnedHeld
from tvm_deconv.schedules.cuda.lower import source
from tvm_deconv.schedules.cuda.merged import Merged
from tvm_deconv.schedules.cuda.product import PLANS, Threads
from tvm_deconv.schedules.cuda.products import choices, merging
from tvm_deconv.schedules.cuda.tensor import LARGE_PLANS, LARGE_TRIPLE, Warps
from tvm_deconv.schedules.cuda.tensor import PLANS as TENSOR_PLANS
from tvm_deconv.schedules.cuda.tiles import Plan, Rounds
from tvm_deconv.schedules.cuda.turned import PaddedTurned
from tvm_deconv.schedules.cuda.warp import MMA_TERMS
from tvm_deconv.schedules.cuda.wgmma import ClusterPlan, Warpgroups
from tvm_deconv.targets.cuda import TENSOR_ALGORITHMS

FAMILIES = {algorithm.name: algorithm for algorithm in ALGORITHMS}


#: What sums of TF32 may add, as a factor, to the errors of float32 sums: tensor cores round towards zero.
TRUNCATION = 4


def with_many_groups(problem):
    return problem.replace(
        groups=16 + problem.groups,
        in_channels=min(problem.in_channels, 3),
        out_channels=min(problem.out_channels, 2),
    )


def with_lines(problem):
    return problem.replace(groups=1, in_channels=56, out_channels=32, data_format="NXC")


def with_rows_of_lines(problem):
    """Channels second: of positions along the last axis that 8 divides, and taps that many apart."""
    width = -(-problem.data_spatial[-1] // 8) * 8
    lines = with_lines(problem).replace(in_channels=61, data_format="NCX")
    last = {"data_spatial": width, "kernel": 2, "strides": 1, "dilations": 8, "pads_begin": 0}
    last["output_spatial"] = width + 8
    return lines.replace(**{name: (*getattr(problem, name)[:-1], value) for name, value in last.items()})


def with_channels_second(problem):
    """Of two axes, and taps of the last one that are multiples of 16 bytes apart."""
    last = {"dilations": (1, 8), "pads_begin": (1, 0), "output_spatial": (18, 24)}
    return problem.replace(data_format="NCX", data_spatial=(9, 16), kernel=(4, 2), strides=(2, 1), **last)


def with_odd_kernels(problem):
    ones, kernel = (1,) * problem.rank, (3, 5, 3)[: problem.rank]
    spatial = tuple(2 * x - 2 + k for x, k in zip(problem.data_spatial, kernel, strict=True))
    return problem.replace(
        kernel=kernel, strides=(2,) * problem.rank, dilations=ones, pads_begin=ones, output_spatial=spatial
    )


def as_tf32(problem):
    return problem.replace(precision="tf32")


def as_tf32x3(problem):
    return problem.replace(precision="tf32x3")


def tf32(array):
    """Float32 rounded to 10 bits after the leading one, ties away from zero."""
    bits = np.ascontiguousarray(array).view(np.uint32)
    return ((bits + 0x1000) & 0xFFFFE000).astype(np.uint32).view(np.float32)


def check(batch, number, seed=0, offset=0):
    kernel = batch.kernels[number]
    problem = kernel.problem
    data, weights, bias = operands(problem, seed)
    found = batch.run(number, data, weights, bias, offset, first=number % 2 == 1).astype(np.float64)
    if problem.precision == "tf32" and kernel.algorithm in TENSOR_ALGORITHMS:
        # Of rounded operands the products are exact, as far as float32 sums are.
        data, weights = tf32(data), tf32(weights)
    wanted = reference(problem, data, weights, bias)
    norm = np.linalg.norm(wanted)
    growth = TRUNCATION if problem.precision == "tf32" else 1
    assert np.linalg.norm(found - wanted) <= norm_bound(problem.dtype, growth) * max(norm, 1e-3), problem.key


EXAMPLES = {
    "cuda_generic": [
        # Strides and dilations that do not divide each other: 64 combinations of phases.
        td.Problem(1, 1, 3, 2, (5, 5), (7, 7), (8, 8), (3, 3), (2, 3), (40, 43)),
        # All that the taps read is outside of the data.
        td.Problem(1, 1, 2, 3, (5,), (7,), (1,), (3,), (40,), (9,), epilogue=td.Epilogue(True, "sigmoid")),
        # No tap reaches any output.
        td.Problem(1, 1, 2, 3, (5,), (1,), (2,), (1,), (1,), (1,), epilogue=td.Epilogue(True, "sigmoid")),
    ],
    "cuda_narrow": [
        td.Problem(2, 64, 1, 1, (6, 8), (4, 4), (2, 2), (1, 1), (1, 1), (12, 16), epilogue=td.Epilogue(True, "silu")),
        td.Problem(1, 19, 2, 3, (6, 7), (8, 8), (4, 4), (1, 1), (2, 2), (24, 28), data_format="NXC"),
        # One output channel: several positions a thread.
        td.Problem(1, 1, 3, 1, (131, 130), (9, 9), (3, 3), (1, 1), (4, 4), (391, 390), epilogue=td.Epilogue(True)),
        td.Problem(1, 1, 2, 1, (150, 129), (2, 2), (2, 2), (1, 1), (0, 0), (300, 258), "float16"),
    ],
    "cuda_tensor": [
        # Every plan's width; both layouts of A, vectors of it and single elements; rows and terms that end in a tile.
        td.Problem(2, 1, 40, 24, (9, 16), (4, 4), (2, 2), (1, 1), (1, 1), (18, 32), "bfloat16", "NXC"),
        td.Problem(1, 1, 21, 9, (5, 6), (3, 3), (2, 2), (1, 1), (1, 1), (10, 11), "float16", "NXC"),
        td.Problem(1, 1, 20, 130, (5, 6), (2, 2), (2, 2), (1, 1), (0, 0), (10, 12), "float16"),
        td.Problem(1, 2, 600, 17, (5, 5), (3, 3), (2, 2), (1, 1), (1, 1), (9, 10), "bfloat16"),
        td.Problem(1, 1, 20, 4, (60,), (8,), (4,), (1,), (2,), (240,), "float16", epilogue=td.Epilogue(True, "tanh")),
        td.Problem(2, 1, 21, 24, (9, 16), (4, 4), (2, 2), (1, 1), (1, 1), (18, 32), precision="tf32"),
        td.Problem(1, 1, 21, 9, (5, 6), (3, 3), (2, 2), (1, 1), (1, 1), (10, 11), "float32", "NXC", precision="tf32"),
        td.Problem(1, 1, 21, 24, (9, 8), (4, 4), (2, 2), (1, 1), (1, 1), (18, 16), precision="tf32x3"),
        td.Problem(1, 1, 40, 9, (5, 6), (3, 3), (2, 2), (1, 1), (1, 1), (10, 11), "float32", "NXC", precision="tf32x3"),
        # More phases than go to the output at a time, of which some are neighbours.
        td.Problem(1, 1, 20, 3, (21,), (36,), (36,), (1,), (0,), (756,), precision="tf32"),
        td.Problem(1, 2, 20, 70, (130,), (5,), (2,), (1,), (1,), (263,), "float32", "NXC", precision="tf32"),
    ],
    "cuda_merged": [
        # Few columns of each phase, and so many rows that gathering them counts.
        td.Problem(1, 1, 9, 12, (60, 70), (3, 5), (2, 2), (1, 1), (1, 1), (119, 141), "float16"),
        td.Problem(1, 1, 9, 12, (60, 70), (3, 5), (2, 2), (1, 1), (1, 1), (119, 141), "bfloat16", "NXC"),
        td.Problem(1, 1, 9, 12, (60, 70), (3, 5), (2, 2), (1, 1), (1, 1), (119, 141), precision="tf32"),
    ],
    "cuda_wgmma": [
        # Channels that fill no line, boxes that end outside of the data, phases with different taps.
        td.Problem(2, 1, 136, 40, (5, 7), (4, 3), (2, 2), (1, 1), (1, 1), (10, 13), "bfloat16", "NXC"),
        # Groups, one axis.
        td.Problem(1, 2, 64, 32, (70,), (4,), (4,), (1,), (0,), (280,), "float16", "NXC", epilogue=td.Epilogue(True)),
        # Channels second: lines of 8 positions, and of 16 that are rounded.
        td.Problem(2, 1, 136, 40, (5, 8), (4, 2), (2, 1), (1, 8), (1, 0), (10, 16), "bfloat16"),
        td.Problem(3, 1, 61, 40, (3, 16), (2, 2), (2, 2), (1, 1), (0, 0), (6, 32), precision="tf32"),
        # One tap, whose positions are one axis, of all images with channels last: rows that TMA could not load.
        td.Problem(3, 1, 72, 40, (5, 7), (2, 3), (2, 3), (1, 1), (0, 0), (10, 21), "float16", "NXC"),
        td.Problem(
            3, 1, 37, 40, (10, 2, 6), (2, 1, 2), (2, 1, 2), *[(1, 1, 1), (0, 0, 0), (20, 2, 12)], precision="tf32x3"
        ),
        # Filters in two parts, phases with different taps, groups.
        td.Problem(1, 1, 44, 40, (5, 9), (4, 3), (2, 2), (1, 1), (1, 2), (9, 14), "float32", "NXC", precision="tf32x3"),
        td.Problem(2, 2, 32, 40, (3, 12), (3, 3), (2, 1), (1, 4), (1, 0), (6, 20), precision="tf32x3"),
    ],
    "cuda_gathered": [
        # Pairs and fours of channels that fill no line, odd extents, phases with different taps, cropped ends.
        td.Problem(2, 1, 58, 40, (5, 7), (4, 3), (2, 2), (1, 1), (1, 1), (10, 13), "float16", "NXC"),
        td.Problem(1, 2, 60, 12, (9, 7), (3, 5), (2, 2), (2, 1), (3, 0), (14, 15), "bfloat16", "NXC"),
        # A prime number of channels, single elements; groups; strides beyond the kernel; three axes.
        td.Problem(3, 1, 37, 17, (5, 7), (2, 3), (2, 3), (1, 1), (0, 0), (10, 21), precision="tf32"),
        td.Problem(1, 2, 59, 40, (3, 5), (2, 2), (3, 2), (1, 1), (1, 0), (7, 10), precision="tf32x3"),
        td.Problem(
            3, 1, 31, 20, (5, 3, 3), (2, 1, 2), (2, 1, 2), *[(1, 1, 1), (0, 0, 1), (10, 3, 5)], precision="tf32x3"
        ),
        # Channels last, by 4, 8 and 16 bytes.
        td.Problem(1, 1, 61, 40, (5, 9), (4, 3), (2, 2), (1, 1), (1, 2), (9, 14), "float32", "NXC", precision="tf32x3"),
        td.Problem(1, 1, 62, 40, (5, 9), (4, 3), (2, 2), (1, 1), (1, 2), (9, 14), "float32", "NXC", precision="tf32"),
        td.Problem(1, 1, 64, 9, (7, 9), (3, 4), (2, 2), (1, 1), (1, 2), (12, 15), "float32", "NXC", precision="tf32x3"),
    ],
    "cuda_held": [
        # Three boxes by turns, channels that fill no line, phases with different taps.
        td.Problem(2, 1, 136, 40, (5, 7), (2, 3), (1, 2), (1, 1), (0, 1), (6, 13), "bfloat16", "NXC"),
        # One output channel; eight rows are images.
        td.Problem(
            9,
            1,
            56,
            1,
            (5, 4),
            (9, 9),
            (3, 3),
            (1, 1),
            (4, 4),
            (15, 11),
            "float16",
            "NXC",
            epilogue=td.Epilogue(True, "silu"),
        ),
        # Groups, dilations, kernels beyond the stride and below it.
        td.Problem(1, 2, 64, 24, (9, 17), (3, 4), (1, 5), (2, 3), (1, 0), (11, 90), "float16", "NXC"),
        # Lines of few channels, and of odd ones, that threads copy; channels of neighbouring positions in one store.
        td.Problem(1, 1, 16, 12, (9, 20), (6, 6), (3, 3), (1, 1), (1, 1), (27, 60), "bfloat16", "NXC"),
        td.Problem(
            2, 1, 21, 21, (9, 7), (8, 8), (4, 4), (1, 1), (0, 0), (40, 32), "float16", "NXC", epilogue=td.Epilogue(True)
        ),
        # Rows that go on in the next line; three axes.
        td.Problem(1, 1, 64, 9, (17, 17), (3, 4), (2, 2), (1, 1), (0, 0), (35, 36), "bfloat16", "NXC"),
        td.Problem(1, 1, 72, 8, (3, 9, 5), (2, 3, 3), (1, 2, 2), (1, 1, 1), (1, 0, 1), (2, 18, 9), "float16", "NXC"),
    ],
    "cuda_held_merged": [
        # Four taps of all phases are a tile of 64 terms.
        td.Problem(1, 1, 16, 12, (9, 10), (3, 3), (2, 2), (1, 1), (1, 1), (17, 19), "float16", "NXC"),
    ],
    "cuda_wgmma_turned": [
        # Channels that fill no line, odd extents, phases with different taps.
        td.Problem(2, 1, 116, 40, (5, 7), (4, 3), (2, 2), (1, 1), (1, 1), (10, 13), "bfloat16"),
        # Groups, each of channels that fill no vector; pairs of positions; one axis.
        td.Problem(2, 2, 61, 32, (70,), (5,), (2,), (1,), (1,), (141,), "float16", epilogue=td.Epilogue(True)),
        # One tap, whose positions are one axis of all images, of groups too; vectors of positions.
        td.Problem(3, 2, 60, 40, (5, 8), (2, 3), (2, 3), (1, 1), (0, 0), (10, 24), "float16"),
        # Three axes, dilations; fours of positions.
        td.Problem(1, 1, 56, 32, (3, 4, 5), (2, 3, 2), (1, 2, 2), (2, 1, 1), (1, 0, 1), (4, 9, 9), "float16"),
        # Words, single ones and vectors.
        td.Problem(2, 1, 29, 40, (5, 9), (4, 3), (2, 2), (1, 1), (1, 2), (9, 14), precision="tf32"),
        td.Problem(1, 2, 61, 40, (3, 12), (3, 3), (2, 1), (1, 2), (1, 0), (6, 16), precision="tf32x3"),
    ],
    "cuda_held_turned": [
        # Three boxes by turns, channels that fill no line, phases with different taps; single positions.
        td.Problem(2, 1, 135, 40, (5, 7), (2, 3), (1, 2), (1, 1), (0, 1), (6, 13), "bfloat16"),
        # Eight rows are images; vectors of positions.
        td.Problem(
            9, 1, 56, 3, (6, 4), (9, 9), (3, 3), *[(1, 1), (4, 4), (18, 11)], "float16", epilogue=td.Epilogue(True)
        ),
        # Groups of channels that are no multiple of a vector, dilations, kernels beyond the stride and below it.
        td.Problem(1, 2, 61, 24, (9, 17), (3, 4), (1, 5), (2, 3), (1, 0), (11, 90), "float16"),
        # Lines of few channels.
        td.Problem(1, 1, 15, 12, (9, 20), (6, 6), (3, 3), (1, 1), (1, 1), (27, 60), "bfloat16"),
        # Rows that go on in the next line; one axis and three.
        td.Problem(1, 1, 64, 9, (17, 17), (3, 4), (2, 2), (1, 1), (0, 0), (35, 36), "bfloat16"),
        td.Problem(2, 1, 70, 17, (50,), (10,), (5,), (1,), (3,), (249,), "float16", epilogue=td.Epilogue(True)),
        td.Problem(1, 1, 72, 8, (3, 9, 5), (2, 3, 3), (1, 2, 2), (1, 1, 1), (1, 0, 1), (2, 18, 9), "float16"),
    ],
    "cuda_held_merged_turned": [
        # Four taps of all phases are a tile of 64 terms.
        td.Problem(1, 1, 16, 12, (9, 10), (3, 3), (2, 2), (1, 1), (1, 1), (17, 19), "float16"),
    ],
    "cuda_product": [
        # Most of what the taps read is outside of the data.
        td.Problem(1, 1, 2, 3, (5,), (7,), (1,), (3,), (14,), (9,), epilogue=td.Epilogue(True, "sigmoid")),
        td.Problem(1, 1, 3, 2, (6,), (2,), (5,), (1,), (0,), (31,), epilogue=td.Epilogue(True, "gelu")),
        td.Problem(1, 1, 1030, 3, (4, 5), (3, 3), (2, 2), (1, 1), (1, 1), (8, 9), epilogue=td.Epilogue(True, "relu")),
        td.Problem(1, 1, 40, 24, (9, 16), (4, 4), (2, 2), (1, 1), (1, 1), (18, 32), data_format="NXC"),
        td.Problem(1, 1, 12, 130, (5, 6), (2, 2), (2, 2), (1, 1), (0, 0), (10, 12)),
        td.Problem(1, 1, 3, 1, (9,), (64,), (17,), (1,), (5,), (190,)),
        td.Problem(64, 1, 7, 33, (1, 1), (4, 4), (1, 1), (1, 1), (0, 0), (4, 4)),
        td.Problem(1, 3, 5, 17, (3, 4, 5), (2, 3, 3), (3, 1, 2), (1, 2, 3), (2, 0, 1), (7, 9, 12)),
        # More taps than one word, and than two words, have bits.
        td.Problem(1, 1, 3, 9, (9, 8), (7, 7), (1, 1), (1, 1), (3, 3), (9, 8)),
        td.Problem(2, 1, 2, 3, (40,), (70,), (1,), (1,), (30,), (49,)),
    ],
}


def lines_of_any(problem):
    return st.sampled_from([with_lines(problem), with_rows_of_lines(problem)])


def gathered_channels(problem):
    """An even number of channels, last, that nearly fill a line."""
    return problem.replace(in_channels=58, out_channels=9, data_format="NXC")


def held_channels(problem):
    """Channels last: in whole lines of 16 and 64, padded ones, and odd ones that no load of a box brings."""
    return st.sampled_from([16, 21, 56, 130 // problem.groups // 2 * 2]).map(
        lambda channels: problem.replace(groups=1, in_channels=channels, out_channels=10, data_format="NXC")
    )


def second_channels(problem):
    """Channels second: in whole lines of 16 and 64, padded ones, and odd ones."""
    return st.sampled_from([16, 21, 57, 61]).map(
        lambda channels: problem.replace(in_channels=channels, out_channels=10, data_format="NCX")
    )


def second_lines(problem):
    return problem.replace(in_channels=59, out_channels=33, data_format="NCX")


#: The space of each family, and how many of it are drawn.
SPACES = {
    "cuda_generic": (problems(), 12),
    "cuda_narrow": (problems().map(with_many_groups), 8),
    "cuda_tensor": (
        st.one_of(
            problems(dtypes=["float16", "bfloat16"]),
            problems(dtypes=["float32"]).map(as_tf32),
            problems(dtypes=["float32"]).map(as_tf32x3),
        ),
        4,
    ),
    "cuda_merged": (problems(dtypes=["float16", "bfloat16"]).map(with_odd_kernels), 1),
    "cuda_wgmma": (
        st.one_of(
            problems(dtypes=["float16", "bfloat16"]).flatmap(lines_of_any),
            problems(dtypes=["float32"]).map(as_tf32).flatmap(lines_of_any),
            problems(dtypes=["float32"]).map(as_tf32x3).flatmap(lines_of_any),
        ),
        2,
    ),
    "cuda_gathered": (
        st.one_of(
            problems(dtypes=["float16", "bfloat16"]).map(gathered_channels),
            problems(dtypes=["float32"]).map(lambda problem: as_tf32(problem).replace(in_channels=29)),
            problems(dtypes=["float32"]).map(lambda problem: as_tf32x3(problem).replace(in_channels=31)),
        ),
        2,
    ),
    "cuda_held": (problems(dtypes=["float16", "bfloat16"]).flatmap(held_channels), 1),
    "cuda_held_merged": (problems(dtypes=["float16", "bfloat16"]).map(with_odd_kernels).flatmap(held_channels), 1),
    "cuda_wgmma_turned": (
        st.one_of(
            problems(dtypes=["float16", "bfloat16"]),
            problems(dtypes=["float32"]).map(as_tf32),
            problems(dtypes=["float32"]).map(as_tf32x3),
        ).map(second_lines),
        2,
    ),
    "cuda_held_turned": (problems(dtypes=["float16", "bfloat16"]).flatmap(second_channels), 2),
    "cuda_held_merged_turned": (
        problems(dtypes=["float16", "bfloat16"]).map(with_odd_kernels).flatmap(second_channels),
        1,
    ),
    "cuda_product": (problems(max_macs=60_000), 6),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_agrees_with_the_reference(family, tmp_path):
    algorithm = FAMILIES[family]
    space, count = SPACES[family]
    chosen = drawn(space.filter(lambda p: not_empty(p) and algorithm.supports(p, target_of(algorithm))), count)
    batch = Batch(EXAMPLES[family] + chosen, tmp_path, "batch", algorithm)
    for number in range(len(batch.kernels)):
        check(batch, number)


def test_the_choice_candidates_of():
    def chosen(problem):
        return CUDA.default(problem, TARGET)[0].name

    for family, given in EXAMPLES.items():
        found = {chosen(problem) for problem in given if family != "cuda_narrow" or problem.groups > 1}
        assert found == {"cuda_tensor" if family in HOPPER_FAMILIES else family}
    depthwise = EXAMPLES["cuda_narrow"][0]
    assert chosen(depthwise.replace(groups=2)) == "cuda_product"
    assert chosen(depthwise.replace(batch=0)) == "cuda_narrow"
    half = EXAMPLES["cuda_tensor"][0]
    assert chosen(half.replace(dtype="float32")) == "cuda_product"
    assert chosen(half.replace(dtype="float32", precision="tf32")) == "cuda_tensor"
    assert chosen(half.replace(in_channels=1, kernel=(2, 2))) == "cuda_product"
    # Few outputs of a phase, but not of all phases of the uncropped output together.
    few = td.Problem(1, 1, 16, 3, (128, 130), (4, 4), (2, 2), (1, 1), (1, 1), (256, 260))
    assert [chosen(few), chosen(few.replace(precision="tf32"))] == ["cuda_product", "cuda_tensor"]
    # Of few input channels a thread waits for its data less often.
    fewer = {"in_channels": 3, "out_channels": 1, "kernel": (9, 9), "strides": (3, 3), "output_spatial": (384, 390)}
    assert chosen(few.replace(pads_begin=(4, 4), **fewer)) == "cuda_narrow"


def test_hopper_has_kernels_of_its_own_where_they_cost_less():
    def chosen(problem):
        return CUDA.default(problem, HOPPER)[0].name

    large = td.Problem(32, 1, 256, 256, (32, 24), (4, 4), (2, 2), (1, 1), (1, 1), (64, 48), "float16", "NXC")
    exact = large.replace(dtype="float32", data_format="NCX")
    assert chosen(large) == "cuda_wgmma"
    assert chosen(large.replace(data_format="NCX")) == chosen(exact.replace(precision="tf32x3")) == "cuda_wgmma_turned"
    assert chosen(exact) == "cuda_product"
    assert chosen(large.replace(dtype="float64")) == "cuda_product"
    small = large.replace(batch=1, in_channels=16, out_channels=8, data_spatial=(5, 7), output_spatial=(10, 14))
    assert chosen(small) == "cuda_tensor"


def test_phases_are_columns_of_one_product_where_that_is_less_work():
    """Few columns: all phases of the uncropped output read the same data. Many, or few positions: they do not pay."""
    few = td.Problem(1, 1, 40, 24, (9, 16), (4, 4), (2, 2), (1, 1), (1, 1), (18, 32), "float16")
    (one,) = sections(few, 32, 32)
    assert (one.extents, one.n, math.prod(one.taps)) == ((1, 1, 10, 17), 96, 4)
    for other in (few.replace(out_channels=128), few.replace(data_spatial=(2, 2), output_spatial=(4, 4))):
        assert [section.n for section in sections(other, 32, 32)] == [other.out_channels] * 4
    assert len(sections(few, 32, 32, Geometry.of(few))) == 4


#: Products of both phases of the last axis, and of all; and phases whose run does not begin with the first.
JOINED = {
    "cuda_tensor": {"dtype": "float16"},
    "cuda_product": {"data_format": "NXC"},
    "cuda_wgmma": {"dtype": "bfloat16", "data_format": "NXC", "in_channels": 64, "out_channels": 16},
    "cuda_held": {"dtype": "float16", "data_format": "NXC", "in_channels": 32, "out_channels": 9},
}


MERGED = {
    "one axis": td.Problem(1, 1, 21, 9, (40,), (7,), (3,), (1,), (2,), (121,), "float16", "NXC"),
    # Phases of one axis are merged, those of the other joined; the first lacks a tap at the other end.
    "two": td.Problem(2, 1, 20, 9, (5, 6), (3, 4), (2, 2), (1, 1), (0, 1), (11, 12), precision="tf32x3"),
    "three": td.Problem(
        1, 2, 20, 8, (3, 4, 5), (3, 5, 3), (2, 2, 2), (1, 1, 1), (1, 2, 1), (5, 7, 10), precision="tf32"
    ),
}


@pytest.mark.parametrize("name", MERGED)
def test_phases_may_be_merged_along_each_number_of_axes(name, tmp_path):
    problem, algorithm = MERGED[name], FAMILIES["cuda_merged"]
    plans = {plan.joined: plan for _, plan in algorithm.candidates(problem, TARGET)[::-1]}
    assert set(plans) == set(merging(problem))
    batch = Batch([problem] * len(plans), tmp_path, "merged", algorithm, list(plans.values()))
    for number in range(len(plans)):
        check(batch, number)


def test_merged_phases_are_one_product_with_the_taps_of_all():
    problem = td.Problem(1, 1, 40, 12, (9, 16), (3, 5), (2, 2), (1, 1), (1, 1), (18, 32), "float16")
    assert (choices(problem), merging(problem)) == ([0], [1, 2])
    (one,) = Merged(problem, Plan(64, 64, 32, 32, 32, joined=2)).sections
    assert (one.n, one.taps) == (48, (1, 2, 3))
    pairs = Merged(problem, Plan(64, 64, 32, 32, 32, joined=1)).sections
    assert [(section.n, section.taps) for section in pairs] == [(24, (1, 2, 3)), (24, (1, 1, 3))]
    # Kernels that are multiples of the stride need no zeros, and strides beyond kernels leave outputs without a tap.
    assert merging(problem.replace(kernel=(4, 4))) == []
    assert merging(problem.replace(kernel=(2, 2), strides=(3, 3), output_spatial=(26, 47))) == []
    assert merging(problem.replace(dilations=(2, 3), output_spatial=(18, 34))) == []


def test_merged_phases_are_the_default_only_where_they_cost_much_less():
    """Of many positions, and of few, where they cost less too."""
    many = EXAMPLES["cuda_merged"][1]
    few = many.replace(data_spatial=(20, 24), output_spatial=(39, 49))
    shares = []
    for problem in (many, few):
        merged, tensor = (FAMILIES[name].default_plan(problem, TARGET)[0] for name in ("cuda_merged", "cuda_tensor"))
        shares.append(merged / tensor)
    assert shares[0] < 0.75 < shares[1] <= 1
    assert [CUDA.default(problem, TARGET)[0].name for problem in (many, few)] == ["cuda_merged", "cuda_tensor"]


def test_what_is_not_finite_spreads_to_the_phases_of_its_positions_alone(tmp_path):
    problem = td.Problem(1, 1, 8, 9, (7, 8), (3, 3), (2, 2), (1, 1), (1, 1), (13, 15), "float16")
    batch = Batch([problem], tmp_path, "spread", FAMILIES["cuda_merged"])
    data, weights, _ = operands(problem, 1)
    for value in (np.nan, np.inf):
        data[0, 3, 4, 5] = value
        found = batch.run(0, data, weights, None)
        wanted = reference(problem, data, weights)
        reached = ~np.isfinite(wanted)
        assert not np.isfinite(found[reached]).any()
        beyond = np.argwhere(~np.isfinite(found) & ~reached)
        assert len(beyond)
        rows, columns = (np.flatnonzero(reached.any(axis=axes)) for axes in ((0, 1, 3), (0, 1, 2)))
        for _, _, y, x in beyond:
            assert np.abs(rows - y).min() <= 1
            assert np.abs(columns - x).min() <= 1


@pytest.mark.parametrize("family", JOINED)
def test_phases_may_be_joined_along_each_number_of_axes(family, tmp_path):
    algorithm, target = FAMILIES[family], target_of(FAMILIES[family])
    problem = td.Problem(2, 1, 20, 12, (7, 9), (4, 6), (2, 3), (1, 1), (1, 2), (13, 26)).replace(**JOINED[family])
    plans = {plan.joined: plan for _, plan in algorithm.candidates(problem, target)[::-1]}
    assert set(plans) == {0, 1, 2}
    batch = Batch([problem] * 3, tmp_path, "joined", algorithm, list(plans.values()))
    for number in range(3):
        check(batch, number)


def test_joined_phases_are_fewer_and_wider_products():
    problem = td.Problem(1, 1, 40, 24, (9, 16), (4, 4), (2, 2), (1, 1), (1, 1), (18, 32), "float16")
    assert choices(problem) == [0, 1, 2]
    columns = [
        [section.n for section in Warps(problem, Plan(64, 64, 32, 32, 32, joined=axes)).sections] for axes in range(3)
    ]
    assert columns == [[24] * 4, [48] * 2, [96]]
    # Of kernels that are no multiple of the stride, and of other problems without pads, there is nothing to join.
    assert choices(problem.replace(kernel=(3, 3), output_spatial=(18, 32))) == [0]
    assert choices(problem.replace(kernel=(2, 2), pads_begin=(0, 0))) == [0]


def test_gaps_in_sectors_are_counted():
    """Of stores of 4 bytes, sectors of 32: phases apart leave every other element, those of whole strides none."""

    def share(problem, columns, axes=0, rows=16):
        plan = Plan(64, 64, 16, 32, 32, joined=axes)
        return sectors(Warps(problem, plan).sections[0], columns, rows, 4)

    problem = td.Problem(1, 1, 40, 24, (9, 16), (4, 4), (2, 2), (1, 1), (1, 1), (18, 32), precision="tf32")
    assert (share(problem, 32), share(problem, 32, 1)) == (2, 1)
    # Few neighbours do not fill a sector: one of eight elements, or two of eight, four of eight.
    assert (share(problem, 32, rows=1), share(problem, 32, 1, rows=1), share(problem, 32, 1, rows=2)) == (8, 4, 2)
    assert share(problem.replace(data_format="NXC"), 32) == 1
    assert share(problem.replace(data_format="NXC", out_channels=9), 32) == pytest.approx(16 / 9)
    # Strides beyond a sector: four of eight elements, or all.
    wide = td.Problem(1, 1, 40, 8, (16,), (16,), (16,), (1,), (0,), (256,), precision="tf32")
    assert [share(wide, columns) for columns in (4, 8, 32)] == [2, 1, 1]


def test_channels_fill_whole_tiles_only_where_that_adds_few_terms():
    few, many = (
        sections(td.Problem(1, 1, channels, 8, (9,), (16,), (1,), (1,), (0,), (24,), "float16"), 32, 32)[0]
        for channels in (3, 60)
    )
    assert (few.channels, few.alike) == (3, False)
    assert (many.channels, many.alike) == (64, True)


def test_tiles_that_follow_each_other_read_nearly_the_same_data():
    """All taps of some channels, then those of the next: by numbers and as the filter is packed."""
    (section,) = sections(td.Problem(1, 1, 64, 8, (9,), (4,), (2,), (1,), (0,), (20,), "float16"), 32, 32)
    assert [section.tap(tile) for tile in range(section.tiles_k)] == [(0, 0), (0, 1), (32, 0), (32, 1)]
    for tile in range(section.tiles_k):
        first, tap = section.tap(tile)
        assert section.term(32 * tile + 5) == (first + 5, (0, 0, tap))


PLANNED = {
    "cuda_product": (PLANS, {}),
    # The first of these has more shared memory than it may declare.
    "cuda_tensor": ([replace(TENSOR_PLANS[0], stages=4), *LARGE_PLANS, *TENSOR_PLANS], {"dtype": "float16"}),
    "tf32": ([replace(plan, tile_k=16) for plan in LARGE_PLANS[:1] + TENSOR_PLANS[::2]], {"precision": "tf32"}),
    "tf32x3": ([replace(plan, tile_k=16) for plan in LARGE_TRIPLE + TENSOR_PLANS[1::2]], {"precision": "tf32x3"}),
}


@pytest.mark.parametrize("family", PLANNED)
def test_every_plan_is_right(family, tmp_path):
    """Tiles of all shapes, ragged in every direction; split sums, some parts of which have no terms; all stages."""
    plans, given = PLANNED[family]
    problem = td.Problem(1, 1, 37, 70, (130,), (5,), (2,), (1,), (1,), (263,)).replace(**given)
    plans = [*plans, *(replace(plans[-1], split=split, stages=stages) for split, stages in ((3, 3), (7, 4)))]
    algorithm = FAMILIES.get(family, FAMILIES["cuda_tensor"])
    batch = Batch([problem] * len(plans), tmp_path, "plans", algorithm, plans)
    for number in range(len(plans)):
        check(batch, number, seed=number)


def test_threads_with_many_sums_have_the_registers_of_half_a_multiprocessor():
    """By the bounds of a kernel's launch: its threads, and how many blocks are to fit. Packing is as ever."""

    def bounds(plan):
        kernel = build_kernel(problem, FAMILIES["cuda_tensor"], plan)
        found = re.findall(r"__launch_bounds__\((\d+), (\d+)\) (\w+)_kernel", source(kernel.functions))
        return {name: (int(threads), int(blocks)) for threads, blocks, name in found}

    problem = td.Problem(1, 1, 64, 128, (16, 16), (1, 1), (1, 1), (1, 1), (0, 0), (16, 16), "float16")
    assert bounds(TENSOR_PLANS[0]) == {"pack": (256, 2), "deconv": (256, 2)}
    assert [bounds(plan) for plan in LARGE_PLANS] == [
        {"pack": (256, 2), "deconv": (256, 1)},
        {"pack": (256, 2), "deconv": (128, 2)},
    ]


def test_only_what_taps_read_again_stays_in_the_nearest_cache():
    """The data of several taps do; those of one tap, and the filter, do not."""
    problem = td.Problem(1, 1, 64, 128, (16, 16), (2, 2), (1, 1), (1, 1), (0, 0), (17, 17), "float16", "NXC")
    again, once = "cp.async.ca.shared.global [%0], [%1], 16", "cp.async.cg.shared.global [%0], [%1], 16"
    for kernel, found in ((problem.kernel, (1, 1)), ((1, 1), (0, 1))):
        one = problem.replace(kernel=kernel, output_spatial=tuple(15 + k for k in kernel))
        text = source({"deconv": build_kernel(one).deconv})
        assert (text.count(again), text.count(once)) == found
    (section,) = sections(problem, 32, 128)
    (taps, rows), read = (4, 128), set()
    for row, h, w in itertools.product(range(rows), range(2), range(2)):
        _, (_, y, x) = section.position(row)
        read.add((y - h, x - w))
    assert Warps(problem, TENSOR_PLANS[0]).fresh(section) == pytest.approx(len(read) / (rows * taps), rel=0.05)


@pytest.mark.parametrize("kind", ["float16", "tf32", "tf32x3"])
def test_tiles_are_whole_instructions(kind):
    """Of all plans worth measuring: a tile with fewer terms would be multiplied by none."""
    problem = as_type(td.Problem(1, 1, 40, 70, (130,), (5,), (2,), (1,), (1,), (263,)), kind, "NCX")
    plans = [plan for _, plan in FAMILIES["cuda_tensor"].candidates(problem, TARGET)]
    assert {plan.tile_k % MMA_TERMS["float16" if kind == "float16" else "tf32"] for plan in plans} == {0}


WIDE = [
    td.Problem(1, 1, 24, 9, (5, 6), (3, 3), (2, 2), (1, 1), (1, 1), (10, 11), "float16", "NXC"),
    td.Problem(1, 1, 24, 9, (5, 6), (3, 3), (2, 2), (1, 1), (1, 1), (10, 11), "float32", "NXC", precision="tf32"),
    td.Problem(1, 1, 20, 9, (5, 6), (3, 3), (2, 2), (1, 1), (1, 1), (10, 11), "bfloat16", "NXC"),
    td.Problem(1, 1, 18, 9, (5, 6), (3, 3), (2, 2), (1, 1), (1, 1), (10, 11), "float16", "NXC"),
    td.Problem(1, 1, 18, 9, (5, 6), (3, 3), (2, 2), (1, 1), (1, 1), (10, 11), "float32", "NXC", precision="tf32"),
    td.Problem(2, 64, 1, 1, (6, 8), (4, 4), (2, 2), (1, 1), (1, 1), (12, 16)),
    td.Problem(1, 64, 1, 1, (6, 8), (4, 4), (4, 4), (1, 1), (0, 0), (24, 32)),
    td.Problem(1, 1, 12, 9, (5, 6), (3, 3), (2, 2), (1, 1), (1, 1), (10, 11), "float32", "NXC"),
]


def test_arrays_may_begin_anywhere(tmp_path):
    """Vectors where arrays begin at one, single elements where they do not: the host chooses, the results are equal."""
    batch = Batch(WIDE, tmp_path, "wide")
    for number, problem in enumerate(WIDE):
        data, weights, _ = operands(problem, number)
        found = {batch.run(number, data, weights, None, offset).tobytes() for offset in range(4)}
        assert len(found) == 1, problem.key
        check(batch, number)


#: Copies are not there before a wait, nor those of others before a barrier; operands of TF32 are rounded.
MISTAKES = {
    "no wait": (r"(?<=  )tvm_deconv_wait\d\(\);", ""),
    "a wait for too few": (r"(?<=  )tvm_deconv_wait0\(\);", "tvm_deconv_wait1();"),
    "no barrier": (r"(?<=  )(tvm_deconv_wait\d\(\);\s*)__syncthreads\(\);", r"\1"),
    "not rounded": (r"tvm_deconv_tf32\((?!float)", "("),
    "no borders": (r"(?<=  )(tvm_deconv_copy16(?:_again)?\(.*data_ptr.*\]\)\), ).*\);", r"\1(bool)1);"),
    "odd addresses": (r"(?<=  )tvm_deconv_copy16\(\(&\(_ptr\[", r"\g<0>1 + "),
}


HOPPER_MISTAKES = {
    "a swizzle that loads lack": (r"(?<=static_cast<CUtensorMapSwizzle>)\(3\)", "(0)"),
    "a swizzle that copies lack": (r" \^ \(\(thread & 7\) \* 8\)", ""),
    "no arrival of readers": (r"(?<=  )tvm_deconv_arrive\(.*\);", ""),
    "an arrival before the product": (r"(?<=  )(tvm_deconv_wgmma_commit\(\);\s*)tvm_deconv_wgmma_wait1\(\);", r"\1"),
    "no wait for stages that are full": (r"(tvm_deconv_wait_phase\(.*\);)(?=\s*tvm_deconv_wgmma_fence)", ""),
    "no wait for stages that are empty": (r"(tvm_deconv_wait_phase\(.*\);)(?=\s*tvm_deconv_expect)", ""),
    "a phase of the wrong parity": (
        r"(tvm_deconv_wait_phase\(.*), (.*)(\);\s*tvm_deconv_wgmma_fence)",
        r"\1, 1 - (\2)\3",
    ),
    "fewer bytes than come": (r"(tvm_deconv_expect\(.*), (\d+)\);", r"\1, \2 - 128);"),
    "no fence": (r"(?<=  )tvm_deconv_wgmma_fence\(\);", ""),
    "no last wait": (r"(?<=  )tvm_deconv_wgmma_wait0\(\);", ""),
    "a box too far": (r"(tvm_deconv_load_box5\([^;]*), ([^,;]*\);)", r"\1, 1 + \2"),
}


#: Of blocks of a cluster.
CLUSTER_MISTAKES = {
    "arrivals at the block itself alone": (
        r"tvm_deconv_arrive_at\((\(&\(_ptr\[.*\]\)\)), .*\);",
        r"tvm_deconv_arrive(\1);",
    ),
    "rows that go to one block alone": (r"(tvm_deconv_load_box5_to\(.*), \(3 <<", r"\1, (1 <<"),
    "columns that go to others alone": (r"(tvm_deconv_load_box2_to\(.*), \(5 <<", r"\1, (10 >>"),
    "a slice of another image": (r"(tvm_deconv_load_box5_to\([^;]*), ([^,;]*, [^,;]*\);)", r"\1, 1 + \2"),
    "barriers that others do not wait for": (r"tvm_deconv_meet4\(\);(?=\s*if)", ""),
    "an end that others do not wait for": (r"tvm_deconv_meet4\(\);(?!\s*if)", ""),
}
#: Of A in registers, which is rounded.
ROUNDING_MISTAKES = {
    "registers that change under way": (r"(?<=  )tvm_deconv_wgmma_wait0\(\);(?=\s*if)", ""),
    "first registers that change under way": (r"(?<=  )tvm_deconv_wgmma_wait1\(\);", ""),
    "not rounded": (r"tvm_deconv_tf32\((?!float)", "("),
}
#: Of three products, whose operands are split.
SPLITTING_MISTAKES = {
    "sums of tiles that begin with those before": (r"(tvm_deconv_wgmma_tf32_n32)_first\((?!float)", r"\1("),
    "sums of tiles that are not added": (r"(?<=\n {8})(\w+\[\w+\]) = \(\1 \+ \w+\[\w+\]\);", ""),
    "low parts of A that are left out": (r"tvm_deconv_low\((?!float)", "0.0f * tvm_deconv_low("),
    "low parts of B that are left out": (r"tvm_deconv_wgmma_tf32_n32\([^;]*\+ 30\d\d\)[^;]*;", ""),
}
#: Of A that is held for all taps, in three boxes by turns.
HELD_MISTAKES = {
    "no wait for boxes that are full": (r"tvm_deconv_wait_phase\(.*\);(?=\s*\}\s*_ptr_3\[0\] =)", ""),
    "no wait for boxes that are empty": (r"tvm_deconv_wait_phase\(.*\);(?=\s*tvm_deconv_expect[^;]*;\s*[^;]*box5)", ""),
    "boxes that nobody gives back": (r"tvm_deconv_arrive\(.*\);(?=\s*\}\s*if \(v_\d+ < \d+\))", ""),
    "registers that change under way": (r"(?<=  )tvm_deconv_wgmma_wait2\(\);", ""),
    "rows of a line beside": (r"(_ptr_3\[0\] = \()", r"\g<1>64 + "),
    "a swizzle that reads lack": (r"(_ptr_3\[0\] = .*& 7\) \*) 8", r"\1 0"),
    "terms of others": (r"(_ptr_3\[0\] \^) 32", r"\1 48"),
    "a box too far": HOPPER_MISTAKES["a box too far"],
    "fewer bytes than come": HOPPER_MISTAKES["fewer bytes than come"],
    "no last wait": HOPPER_MISTAKES["no last wait"],
}
TURN_MISTAKES = {
    "the box of the turn before": (r"(?<=_ptr_3\[0\] = \(\()\(v_\d+ \* \d+\)", "0"),
    "phases that begin anew": (r"\(\(\(v_\d+ \* 6\) \+ (v_\d+)\) & 7\)", r"(\1 & 7)"),
    "sums of the turn before": (r"= 0x0p\+0f[^;]*;", "*= (v_2 > 0);"),
}
#: Of tiles of rows whose A is loaded for each tap.
TURN_MISTAKES_OF_LOADS = {
    "phases that begin anew": TURN_MISTAKES["phases that begin anew"],
    "sums of the turn before": (r"= 0x0p\+0f[^;]*;", "*= (v_1 > 0);"),
    "the rows of the first turn": (r"\(v_\d+ / 6\)", "0"),
    "a last stage that nobody gives back": (r"1 <= \(\(v_1 \* 6\) \+ (v_\d+)\)", r"1 <= \1"),
    "loads that wait for the next turn": (r"(?<=min\(\(\(v_1 \* 6\) \+ )9", "10"),
}
#: Of sums that other warps store.
STORING_MISTAKES = {
    "no wait for sums that are there": (r"tvm_deconv_wait_phase\(.*\);(?=\s*if \(\(reinterpret_cast)", ""),
    "no wait for sums that are stored": (r"tvm_deconv_wait_phase\(.*\);(?=\s*tvm_deconv_forget)", ""),
    "sums that nobody tells of": (r"tvm_deconv_arrive\(.*\);(?=\s*\}\s*\} else \{\s*if \(thread < 224\))", ""),
    "stores that nobody tells of": (r"tvm_deconv_arrive\(.*\);(?=\s*\}\s*\} else \{\s*if \(\(thread %)", ""),
    "sums of a warp alone": (r"(tvm_deconv_init\(.*), 128\);", r"\1, 32);"),
    "stores of a warp alone": (r"(tvm_deconv_init\(.*), 96\);", r"\1, 32);"),
    "stores of two warps alone": (r"(tvm_deconv_init\(.*), 96\);", r"\1, 64);"),
    "a phase of the wrong parity": (r"\(\(v_1 \+ 1\) & 1\)(?=\);\s*tvm_deconv_forget)", "(v_1 & 1)"),
    "the rows of the first turn": (r"\(v_\d+ \* 3584\)", "0"),
    "sums of the turn before": TURN_MISTAKES_OF_LOADS["sums of the turn before"],
}
#: Of tiles of the filter that stay for all tiles of rows.
KEPT_MISTAKES = {
    "no wait for tiles": (r"tvm_deconv_wait_phase\(\(&\(_ptr\[\(\(v_4 \* 4\) \+ 20480\)\]\)\), 0\);", ""),
    "tiles of another parity": (r"(_ptr\[\(\(v_4 \* 4\) \+ 20480\)\]\)\)), 0\);", r"\1, 1);"),
    "a tile that does not come": (r"if \(v_5 < 2\)", "if (v_5 < 1)"),
    "the same tile twice": (r"(?<=\* 64\) \+ )\(v_5 \* 32\)", "0"),
    "the box of the turn before": (r"(?<=wait_phase\(\(&\(_ptr\[\(\()\(v_2 & 1\)", "(0 & 1)"),
}
#: Of a box that threads fill, four neighbouring channels at a time.
FILLING_MISTAKES = {
    "a channel too few": (r"(?<=- )146\)\]", "147)]"),
    "lines before the first": (r" && \(56 <= thread\)", ""),
    "lines beyond the last": (r" && \(\(\(\(thread >> 3\) \+ 64\) % 77\) < 63\)", ""),
    "what is outside": (r"(?<=_ptr_4\[18\] = __float2half_rn\()0x0p\+0f", "0x1p+0f"),
    "another swizzle": (r" \^ \(\(\(thread & 63\) >> 4\) \* 8\)", " ^ 0"),
    "a box that few have filled": (r"(tvm_deconv_init\(.*), 128\);", r"\1, 32);"),
}
#: Of few columns, of which a thread stores all of a row.
FEW_MISTAKES = {
    "rows that are not there": (r"__syncthreads\(\);(?=\s*tvm_deconv_forget\(thread\);\s*alignas)", ""),
    "rows that do not lie apart": (r"(?<=\(thread \* 24\)) \+ \(\(\(thread & 7\) >> 2\) \* 4\)", " + 0"),
    "the next vector": (r"(_ptr_5 \+ 4\) = .*) \+ 4\)\)", r"\1 + 8))"),
    "another phase": (r"(out_ptr\[\(_ptr_4\[0\] \+ 42\)\] =) _ptr_11", r"\1 _ptr_9"),
    "a line too far": (r"(?<=_ptr_4\[0\] \+ )42\b", "84"),
    "phases before the first": (r" && \(1 <= \(thread & 7\)\)", ""),
    "rows beyond the last": (r"(?<=\(thread >> 3\)\)) < 20\)", " < 21)"),
}
#: Of strips of rows, whose lines are read once for all taps of an axis.
STRIP_MISTAKES = {
    "no wait for tiles": (r"tvm_deconv_wait_phase\(\(&\(_ptr\[\(\(v_4 \* 4\) \+ 30720\)\]\)\), 0\);", ""),
    "no wait for boxes that are full": (r"tvm_deconv_wait_phase\(.*\);(?=\s*for \(int v_6)", ""),
    "registers that change under way": ROUNDING_MISTAKES["first registers that change under way"],
    "the last registers that change under way": (r"(?<=  )tvm_deconv_wgmma_wait0\(\);", ""),
    "sums of the strip before": (r"(_n16_registers\(\(&\(_ptr_1)\[8\]", r"\1[0]"),
    "the tap of the line beside": (r"(?<=\(v_6 \* 1024\) \+) 6144", " 8192"),
    "a line too far": (r"(?<=\* 8\)\) \+) 1216", " 1792"),
    "rows of the strip before": (r"(?<=\* 2\)\) \+) 192", " 0"),
}
#: Of sums that threads store from registers.
AT_ONCE_MISTAKES = {
    "columns of other lanes": (r"\(\(\(int\)threadIdx\.x\) & 3\) \* 8", "((int)threadIdx.x ^ 1) % 4 * 8"),
    "sums of the row beside": (r"(_ptr_\d+\[0\] = _ptr_1)\[2\]", r"\1[0]"),
    "columns in the order of products": (r"(_ptr_\d+\[2\] = _ptr_1)\[4\]", r"\1[8]"),
    "the rows of the first turn": (r"\(v_1 \* 3584\)", "0"),
    "rows beyond the last": (r"(_ptr_3\[[01]\] =) [^;]*;", r"\1 true;"),
}
#: Of blocks of a cluster that share the terms of a tile.
SHARING_MISTAKES = {
    "the same terms": (r"\(\(\(\(int\)blockIdx\.x\) & 1\) \* 128\)", "0"),
    "the same columns": (r"\(\(\(\(int\)blockIdx\.x\) & 1\) \* 1024\)", "0"),
    "parts that are taken before they are there": (r"tvm_deconv_meet2\(\);(?=\s*alignas)", ""),
    "an output before others have taken parts": (r"tvm_deconv_meet2\(\);(?=\s*tvm_deconv_forget)", ""),
    "a part that is left out": (r"\((_ptr_2\[\d\]) \+ _ptr_2\[\d\]\)", r"\1"),
    "a part that comes twice": (r"(tvm_deconv_take\([^;]*), 1\);", r"\1, 0);"),
}
#: Of data that a launch before turns, in groups.
TURNING_MISTAKES = {
    "words that are not there": (r"__syncthreads\(\);(?=\s*#pragma unroll\s*for [^{]*\{\s*\*\(uint4)", ""),
    "vectors in another order": (r" \^ \(\(\(\(v_\d+ \* 32\) [^;^]*\^ [^;^]* >> 6\)\)\) & 7\)", " ^ 0"),
    "the channel beside": (r"(_ptr_2\[0\] = _ptr_1)\[1\]", r"\1[9]"),
    "channels of the first group": (r"(?<=>> 2\) \* )7680", "0"),
    "images that lie closer": (r"(?<=>> 1\) \* )15360", "7680"),
    "positions of the tile before": (r"\(\(int\)blockIdx\.x\)(?= \* 4096)", "(((int)blockIdx.x) & 1022)"),
    "boxes of the first group": (r"(load_box5\([^;]*, .*) >> 2\)\);", r"\1 >> 2 & 1));"),
}
#: Of turned data with zeros behind each axis.
PADDING_MISTAKES = {
    "no zeros": (r"(?<=else \{)\s*\*\(float4\*\)\(workspace[^;]*;", ""),
    "positions of the tile before": (r"(?<=& 1\) \* )4544", "0"),
    "taps of another line": (r"(load_box5\([^;]*>> 1\) \* )10", r"\g<1>9"),
    "rows beyond a line": (r"% 10\) < 9\)\) \{(?=\s*alignas)", "% 10) < 10)) {"),
    "rows beyond an image": (r"% 90\) < 80(?=[^;{]*\{\s*alignas)", "% 90) < 90"),
    "images of the first group": (r"(load_box5\([^;]*, \(\(\(int\)blockIdx\.x\)) / 12\)\);", r"\1 / 1024));"),
}
#: Of A that threads copy.
GATHERING_MISTAKES = {
    "no arrival of readers": (r"tvm_deconv_arrive\(.*\);(?=\s*\}\s*\}\s*tvm_deconv_wgmma_wait0)", ""),
    "no wait for stages that are full": HOPPER_MISTAKES["no wait for stages that are full"],
    "no wait for stages that are empty": (r"tvm_deconv_wait_phase\(.*\);(?=\s*if \(thread == 128\))", ""),
    "stages that are told before copies are there": (r"(?<=  )tvm_deconv_wait2\(\);", ""),
    "stages that are told one tile too early": (r"(?<=  )tvm_deconv_wait2\(\);", "tvm_deconv_wait3();"),
    "last stages that are told before copies are there": (r"(?<=  )tvm_deconv_wait0\(\);(?=\s*tvm_deconv_pub)", ""),
    "last stages that nobody tells": (r"(?<=  )tvm_deconv_wait0\(\);\s*tvm_deconv_publish\(\);[^;]*;", ""),
    "another stage": (r"(v_\d+) \+ 2(?=\) & 3\) \* 4\) \+ 24576)", r"\1 + 3"),
    "copies that nobody publishes": (r"(?<=  )tvm_deconv_publish\(\);(?=[^;]*_ptr\[\()", ""),
    "last copies that nobody publishes": (r"(?<=  )tvm_deconv_publish\(\);(?=[^;]*_ptr\[\d)", ""),
    "a barrier for too few": (r"(tvm_deconv_init\(.*), 129\);", r"\1, 128);"),
    "no borders": (r"(tvm_deconv_copy4_again\(.*) && \(\(_ptr_4\[\d+\] .*\);", r"\1));"),
    "channels beyond the last": (r"(tvm_deconv_copy4_again\(.*, \()\(.* < \d+\) && ", r"\1"),
    "a swizzle that copies lack": (r"\^ \(\(\(\(\(thread & 15\).*?\* 8\)\)(?=\))", "^ 0"),
    "the tap of the tile before": (r"- \(\(v_(\d+) % 3\) \* 536\)", r"- (((v_\1 + 2) % 3) * 536)"),
}
HOPPER_PRODUCT = td.Problem(1, 1, 64, 32, (8, 4), (3, 2), (1, 2), (1, 1), (0, 0), (10, 8), "float16", "NXC")
#: Of several tiles of rows, which blocks have by turns.
SEVERAL_TILES = HOPPER_PRODUCT.replace(data_spatial=(20, 7), kernel=(2, 2), output_spatial=(21, 14))
FEW_COLUMNS = SEVERAL_TILES.replace(
    out_channels=3, kernel=(4, 4), strides=(2, 2), pads_begin=(1, 1), output_spatial=(40, 14)
)
#: Mistakes, and the family, problem and plan of the kernel that has them.
MISTAKEN = {
    "tensor": (MISTAKES, "cuda_tensor", EXAMPLES["cuda_tensor"][-1], replace(TENSOR_PLANS[2], tile_k=16)),
    "held": (
        HELD_MISTAKES,
        "cuda_held",
        HOPPER_PRODUCT.replace(in_channels=136, kernel=(2, 2), output_spatial=(9, 8)),
        ClusterPlan(64, 32, 64, 64, 32, 4),
    ),
    "turns": (
        TURN_MISTAKES,
        "cuda_held",
        SEVERAL_TILES.replace(in_channels=136),
        ClusterPlan(64, 32, 64, 64, 32, 4, turns_m=2),
    ),
    "turns of loads": (
        TURN_MISTAKES_OF_LOADS,
        "cuda_wgmma",
        SEVERAL_TILES.replace(in_channels=136, out_channels=24),
        ClusterPlan(64, 32, 64, 64, 32, 4, turns_m=2),
    ),
    "storing": (
        STORING_MISTAKES,
        "cuda_wgmma",
        SEVERAL_TILES,
        ClusterPlan(64, 32, 64, 64, 32, 4, turns_m=3, storing=1),
    ),
    "kept": (
        KEPT_MISTAKES,
        "cuda_held",
        SEVERAL_TILES.replace(out_channels=24),
        ClusterPlan(64, 32, 64, 64, 32, 3, turns_m=3),
    ),
    "filled boxes": (
        FILLING_MISTAKES,
        "cuda_held",
        HOPPER_PRODUCT.replace(
            in_channels=21, out_channels=24, data_spatial=(8, 7), kernel=(2, 2), output_spatial=(9, 14)
        ),
        ClusterPlan(64, 32, 64, 64, 32, 4),
    ),
    "few columns": (
        FEW_MISTAKES,
        "cuda_held",
        FEW_COLUMNS,
        ClusterPlan(64, 16, 64, 64, 16, 3, joined=2, turns_m=2),
    ),
    "strips": (
        STRIP_MISTAKES,
        "cuda_held",
        FEW_COLUMNS,
        ClusterPlan(128, 16, 64, 128, 16, 4, joined=2, turns_m=2),
    ),
    "at once": (
        AT_ONCE_MISTAKES,
        "cuda_wgmma",
        SEVERAL_TILES,
        ClusterPlan(64, 32, 64, 64, 32, 4, turns_m=3),
    ),
    "gathered": (
        GATHERING_MISTAKES,
        "cuda_gathered",
        HOPPER_PRODUCT.replace(in_channels=134, out_channels=24, pads_begin=(1, 0), output_spatial=(8, 8)),
        ClusterPlan(64, 32, 64, 64, 32, 4),
    ),
    "turned data": (
        TURNING_MISTAKES,
        "cuda_wgmma_turned",
        td.Problem(2, 2, 60, 32, (16, 8), (3, 2), (1, 2), (1, 1), (1, 0), (16, 16), "float16"),
        ClusterPlan(64, 32, 64, 64, 32, 2),
    ),
    "padded data": (
        PADDING_MISTAKES,
        "cuda_wgmma_turned",
        td.Problem(2, 2, 60, 32, (8, 9), (4, 3), (2, 2), (1, 1), (1, 1), (16, 17), "float16"),
        ClusterPlan(64, 32, 64, 64, 32, 2, joined=1),
    ),
    "shared terms": (
        SHARING_MISTAKES,
        "cuda_wgmma",
        HOPPER_PRODUCT.replace(in_channels=256, out_channels=24),
        ClusterPlan(64, 32, 64, 64, 32, 2, cluster_k=2),
    ),
    "alone": (
        HOPPER_MISTAKES,
        "cuda_wgmma",
        HOPPER_PRODUCT.replace(out_channels=24),
        ClusterPlan(64, 32, 64, 64, 32, 2),
    ),
    "cluster": (
        CLUSTER_MISTAKES,
        "cuda_wgmma",
        HOPPER_PRODUCT.replace(batch=2, out_channels=40),
        ClusterPlan(64, 32, 64, 64, 32, 2, cluster_m=2, cluster_n=2),
    ),
    "split": (
        SPLITTING_MISTAKES,
        "cuda_wgmma",
        HOPPER_PRODUCT.replace(dtype="float32", precision="tf32x3"),
        ClusterPlan(64, 32, 32, 64, 32, 2),
    ),
    "rounded": (
        ROUNDING_MISTAKES,
        "cuda_wgmma",
        HOPPER_PRODUCT.replace(dtype="float32", precision="tf32"),
        ClusterPlan(64, 32, 32, 64, 32, 2),
    ),
}


#: A declaration or a definition of a kernel, or of a function of the host.
FUNCTION = re.compile(
    r'^((?:#ifdef __cplusplus\nextern "C"\n#endif\n)?'
    r'(?:extern "C" __global__|TVM_DLL int32_t) [^;{]*(?:;|\{\n.*?^\}(?!\n ))\n)',
    re.MULTILINE | re.DOTALL,
)


def mistaken(mistakes, text):
    """The text of a kernel with each of the mistakes, and without one: each has its number in the place of 0."""
    pieces = FUNCTION.split(text)
    functions, made = pieces[1::2], []
    for mistake, (pattern, wrong) in mistakes.items():
        made.append([re.sub(pattern, wrong, one) if "deconv_0" in one else one for one in functions])
        assert made[-1] != functions, mistake
    made.append(functions)
    copies = [[re.sub(r"(deconv|pack)_0", rf"\1_{number}", one) for one in all] for number, all in enumerate(made)]
    pieces[1::2] = map("".join, zip(*copies, strict=True))
    return "".join(pieces)


@pytest.mark.parametrize("blocks", MISTAKEN)
def test_the_emulation_shows_mistakes(blocks, tmp_path):
    """Wrong swizzles, missing arrivals and waits, wrong phases: each is seen, and without one nothing is."""
    mistakes, family, problem, plan = MISTAKEN[blocks]
    count = len(mistakes) + 1
    batch = Batch([problem], tmp_path, "wrong", FAMILIES[family], [plan], partial(mistaken, mistakes))
    batch.kernels *= count

    def right(number):
        try:
            for offset in range(2):
                check(batch, number, offset=offset)
        except (AssertionError, RuntimeError):
            return False
        return True

    assert [right(number) for number in range(count)] == [False] * len(mistakes) + [True]


def order_of_blocks(problem, directory, monkeypatch):
    """The number of the section and the first tile of rows of each block, as they follow each other."""
    blocks_of = []

    @contextmanager
    def noted(blocks, threads):
        with emit.launch(blocks, threads) as (block, thread):
            blocks_of.append((blocks, block))
            yield block, thread

    monkeypatch.setattr("tvm_deconv.schedules.cuda.blocks.launch", noted)
    form = Warps(problem, Plan(64, 64, 32, 32, 32))
    with IRBuilder() as builder:
        with build.prim_func():
            build.func_name("order")
            build.func_attr({"global_symbol": "order", "tirx.noalias": True})
            out = build.arg("out", build.buffer([1000, 2], "int32", layout=None))

            def body(block):
                with emit.when([block.thread == 0]):
                    for column, value in enumerate((form.sections.index(block.section), block.tile_m)):
                        build.buffer_store(out, tirx.IntImm("int32", 0) + value, [blocks_of[-1][1], column])

            each_block(form.sections, (64, (1, 1), (1, 1, 1)), form.box, 32, 1, tuple, body)
        functions = {"order": builder.get()}
    module = compile_for_cpu(source(functions), directory, problem.data_format)
    found = np.full((1000, 2), -1, np.int32)
    module.get_function("order")(tvm_ffi.from_dlpack(OnDevice(found)))
    return found[: blocks_of[0][0]].tolist()


def test_blocks_that_store_to_the_same_sectors_follow_each_other(tmp_path, monkeypatch):
    """Those of all phases of the same rows, with channels second; with channels last those of a filter do."""
    problem = td.Problem(1, 1, 16, 24, (12, 16), (4, 4), (2, 2), (1, 1), (1, 1), (24, 32), "float16")
    of_rows = [[section, tile] for tile in range(3) for section in range(4)]
    assert order_of_blocks(problem, tmp_path, monkeypatch) == of_rows
    of_filters = [[section, tile] for section in range(4) for tile in range(3)]
    assert order_of_blocks(problem.replace(data_format="NXC"), tmp_path, monkeypatch) == of_filters


def test_blocks_of_clusters_share_their_loads(tmp_path):
    """Of clusters that reach beyond the last tiles, of lines that slices halve, of data that begin at any address.

    A block alone has two lines of positions.
    """
    problem = td.Problem(1, 1, 72, 40, (136,), (3,), (2,), (1,), (1,), (271,), "float16", "NXC")
    clusters = [(2, 1), (1, 2), (2, 2), (4, 2), (2, 4)]
    plans = [ClusterPlan(64, 32, 64, 64, 32, 3, cluster_m=m, cluster_n=n) for m, n in clusters]
    chosen = [(problem, plan) for plan in plans]
    apart = {"strides": (1,), "dilations": (8,), "pads_begin": (8,), "output_spatial": (136,)}
    second = problem.replace(in_channels=56, data_format="NCX", **apart)
    chosen += [(second, plan) for plan in [*plans, ClusterPlan(128, 32, 64, 64, 32, 3)]]
    rounded = second.replace(dtype="float32", precision="tf32")
    chosen.append((rounded, ClusterPlan(128, 64, 32, 64, 64, 3, cluster_m=2, cluster_n=2)))
    split = rounded.replace(precision="tf32x3")
    chosen.append((split, ClusterPlan(64, 32, 32, 64, 32, 2, cluster_m=2, cluster_n=2)))
    given, plans = zip(*chosen, strict=True)
    batch = Batch(given, tmp_path, "clusters", FAMILIES["cuda_wgmma"], plans)
    for number in range(len(plans)):
        check(batch, number, offset=number % 2)


def test_a_warpgroup_gathers_what_others_multiply(tmp_path):
    """In clusters beyond the last tiles, some whole; fewer tiles of k than stages; shared terms; at any address."""
    last = td.Problem(2, 1, 58, 40, (11, 7), (4, 3), (2, 2), (1, 1), (1, 1), (22, 13), "float16", "NXC")
    second = last.replace(dtype="float32", data_format="NCX", precision="tf32x3", in_channels=37)
    whole = td.Problem(3, 1, 58, 24, (8, 8), (2, 2), (2, 2), (1, 1), (0, 0), (16, 16), "bfloat16", "NXC")
    plan, single = ClusterPlan(64, 32, 64, 64, 32, 4), ClusterPlan(64, 32, 32, 64, 32, 3)
    chosen = [
        (last, replace(plan, cluster_m=4)),
        (whole, replace(plan, cluster_m=2, stages=6)),
        (last.replace(in_channels=254), replace(plan, cluster_m=2, cluster_k=4)),
        (second, replace(single, cluster_m=2)),
        (second.replace(in_channels=125), replace(single, cluster_k=2)),
        (second.replace(precision="tf32", out_channels=3), ClusterPlan(128, 16, 32, 64, 16, 3, joined=2)),
    ]
    assert GatheredGroups(*chosen[1]).launched > 9  # blocks than tiles
    given, plans = zip(*chosen, strict=True)
    batch = Batch(given, tmp_path, "gathered", FAMILIES["cuda_gathered"], plans)
    for number in range(len(plans)):
        for offset in range(2 if given[number].data_format == "NXC" else 1):
            check(batch, number, offset=offset)


def test_blocks_have_several_tiles_of_rows(tmp_path):
    """Some beyond the last, in clusters, in both layouts, of one tap and several, of data that begin at any address."""
    problem = td.Problem(2, 1, 136, 40, (20, 7), (4, 3), (2, 2), (1, 1), (1, 1), (40, 13), "bfloat16", "NXC")
    second = with_channels_second(problem)
    alone = ClusterPlan(64, 32, 64, 64, 32, 3, turns_m=3)
    cluster, single = replace(alone, cluster_m=2, cluster_n=2), replace(alone, tile_k=32)
    one_tap = td.Problem(3, 1, 24, 24, (11, 13), (2, 2), (2, 2), (1, 1), (0, 0), (22, 26), "float16", "NXC")
    chosen = [
        (problem, cluster),
        (second, alone),
        (second.replace(dtype="float32", precision="tf32"), replace(single, cluster_m=2, turns_m=2)),
        (problem.replace(dtype="float32", precision="tf32x3"), replace(single, stages=2)),
        (one_tap.replace(epilogue=td.Epilogue(True, "silu")), ClusterPlan(128, 64, 64, 64, 64, 3, turns_m=2)),
    ]
    given, plans = zip(*chosen, strict=True)
    batch = Batch(given, tmp_path, "turns", FAMILIES["cuda_wgmma"], plans)
    for number in range(len(plans)):
        check(batch, number, offset=number % 2)


@pytest.mark.parametrize("family", ["cuda_wgmma_turned", "cuda_held_turned"])
def test_data_with_channels_second_are_turned(family, tmp_path):
    """By vectors of each length, at any address; groups of several images; turns, warps that store, shared terms."""
    problem = td.Problem(2, 2, 61, 40, (9, 16), (4, 4), (2, 2), (1, 1), (1, 1), (18, 32), "float16")
    problem = problem.replace(epilogue=td.Epilogue(True, "silu"))
    four, two, one = (
        problem.replace(data_spatial=spatial, output_spatial=tuple(2 * x for x in spatial))
        for spatial in ((5, 4), (5, 6), (15, 9))
    )
    plan = ClusterPlan(64, 64, 64, 64, 64, 3)
    chosen = [
        (problem, replace(plan, turns_m=2, joined=1)),
        (four.replace(dtype="bfloat16"), plan),
        (two.replace(in_channels=125, groups=1), replace(plan, cluster_k=2)),
        (one, replace(plan, turns_m=3, storing=1)),
    ]
    if family == "cuda_held_turned":
        few = td.Problem(2, 1, 121, 3, (20, 11), (4, 4), (2, 2), (1, 1), (1, 1), (40, 22), "float16")
        chosen.append((few, ClusterPlan(128, 16, 64, 128, 16, 8, joined=2, turns_m=2)))
        assert TurnedHeld(*chosen[-1]).strips == 2
    else:
        words = problem.replace(dtype="float32", precision="tf32", data_spatial=(9, 6), output_spatial=(18, 12))
        # Zeros behind three axes and groups; outputs that are cropped at both ends, so that data are there for nothing.
        axes = td.Problem(2, 2, 56, 33, (3, 5, 6), (3, 4, 3), (2, 2, 1), *[(1, 1, 2), (3, 1, 2), (2, 9, 7)], "float16")
        chosen += [(words, replace(plan, tile_k=32)), (axes, replace(plan, joined=2, turns_m=2)), (axes, plan)]
        assert {PaddedTurned(*of).padded is None for of in chosen} == {True, False}
    given, plans = zip(*chosen, strict=True)
    batch = Batch(given, tmp_path, "turned", FAMILIES[family], plans)
    for number in range(len(plans)):
        for offset in range(2):
            check(batch, number, offset=offset)


@pytest.mark.parametrize("family", ["cuda_wgmma_turned", "cuda_held_turned"])
def test_what_is_not_finite_stays_in_its_group(family, tmp_path):
    """Where terms beyond a group's channels would be those of the next."""
    problem = td.Problem(2, 2, 61, 40, (5, 7), (4, 4), (2, 2), (1, 1), (1, 1), (10, 14), "float16")
    batch = Batch([problem], tmp_path, "finite", FAMILIES[family])
    data, weights, _ = operands(problem, 1)
    alone = batch.run(0, data, weights, None)
    data[:, 61:] = np.nan
    found = batch.run(0, data, weights, None)
    np.testing.assert_array_equal(found[:, :40], alone[:, :40])
    assert np.isnan(found[:, 40:]).all()


@pytest.mark.parametrize("family", ["cuda_wgmma", "cuda_held"])
def test_warps_store_what_others_multiply(family, tmp_path):
    """In one round and in two, rounded before or not, in both layouts, in clusters; some tiles are beyond the last."""
    problem = td.Problem(2, 1, 136, 40, (20, 7), (4, 3), (2, 2), (1, 1), (1, 1), (40, 13), "bfloat16", "NXC")
    second = with_channels_second(problem)
    one_tap = td.Problem(3, 1, 24, 32, (11, 13), (2, 2), (2, 2), (1, 1), (0, 0), (22, 26), "float16", "NXC")
    odd = td.Problem(1, 1, 21, 21, (9, 7), (8, 8), (4, 4), (1, 1), (1, 2), (39, 30), "float16", "NXC")
    plan = ClusterPlan(64, 32, 64, 64, 32, 3, turns_m=3, storing=1)
    wide = replace(plan, tile_n=128, part_n=128, turns_m=1, turns_n=2)
    chosen = {
        "cuda_wgmma": [
            (second, replace(plan, cluster_m=2, cluster_n=2)),
            (problem.replace(dtype="float32", precision="tf32x3"), replace(plan, tile_k=32, stages=2)),
            (one_tap.replace(epilogue=td.Epilogue(True, "silu")), replace(wide, tile_m=128, turns_m=2, turns_n=1)),
        ],
        "cuda_held": [
            (odd.replace(epilogue=td.Epilogue(True)), replace(wide, cluster_m=2)),
            (problem.replace(out_channels=3), replace(plan, tile_n=16, part_n=16, joined=2, cluster_m=2)),
        ],
    }[family]
    given, plans = zip(*chosen, strict=True)
    batch = Batch(given, tmp_path, "stored", FAMILIES[family], plans)
    for number in range(len(plans)):
        check(batch, number, offset=number % 2)


@pytest.mark.parametrize("family", ["cuda_wgmma", "cuda_held"])
def test_blocks_of_a_cluster_share_the_terms_of_a_tile(family, tmp_path):
    """Two or four of them, beside those that share loads; all types of operands, boxes that end in a line."""
    problem = td.Problem(3, 1, 256, 40, (3, 5), (4, 3), (2, 2), (1, 1), (1, 1), (6, 9), "bfloat16", "NXC")
    problem = problem.replace(epilogue=td.Epilogue(True, "silu"))
    rows = with_channels_second(problem).replace(dtype="float16")
    plan = ClusterPlan(64, 64, 64, 64, 64, 3, cluster_k=2)
    chosen = {
        "cuda_wgmma": [
            (problem, replace(plan, tile_n=32, part_n=32, cluster_m=2, cluster_n=2)),
            (rows, replace(plan, cluster_n=2)),
            (rows.replace(dtype="float32", precision="tf32"), replace(plan, tile_k=32, cluster_k=4)),
            (problem.replace(dtype="float32", precision="tf32x3"), ClusterPlan(64, 32, 32, 64, 32, 2, cluster_k=2)),
        ],
        "cuda_held": [
            (problem, plan),
            (problem.replace(in_channels=504), ClusterPlan(128, 96, 64, 64, 96, 3, cluster_k=4)),
            (problem.replace(in_channels=120), ClusterPlan(64, 32, 64, 64, 32, 3, cluster_m=4, cluster_k=2)),
        ],
    }
    given, plans = zip(*chosen[family], strict=True)
    batch = Batch(given, tmp_path, "shared", FAMILIES[family], plans)
    for number in range(len(plans)):
        check(batch, number, offset=number % 2)


#: Plans and problems whose boxes of rows are neighbours, images and rows that go on in the next line.
HELD = {
    "neighbours": ((1, 17, 15), (4, 4), ClusterPlan(192, 16, 64, 64, 16, 3)),
    "images": ((16, 3, 3), (4, 4), ClusterPlan(64, 32, 64, 64, 32, 3, cluster_m=4)),
    "lines": ((2, 17, 17), (4, 3), ClusterPlan(128, 32, 64, 64, 32, 4, cluster_m=2)),
    "wide": ((1, 3, 8), (4, 4), ClusterPlan(64, 96, 64, 64, 96, 3)),
}


def test_boxes_are_held_for_all_taps(tmp_path):
    """Of data that begin at any address; what is not finite stays with the outputs that read it."""
    given, plans, kinds = [], [], set()
    for (images, *spatial), kernel, plan in HELD.values():
        wide = tuple(2 * (x - 1) + k for x, k in zip(spatial, kernel, strict=True))
        problem = td.Problem(
            images, 1, 72, 20, (spatial[0], spatial[1]), kernel, (2, 2), (1, 1), (0, 0), wide, "float16", "NXC"
        )
        form = Held(problem, plan)
        kinds |= {(box.fastest, box.extents == one.extents) for one in form.sections for box in [form.box(one)]}
        given.append(problem)
        plans.append(plan)
    assert kinds == {(False, True), (True, True), (False, False)}
    batch = Batch(given, tmp_path, "held", FAMILIES["cuda_held"], plans)
    for number in range(len(given)):
        check(batch, number, offset=number % 2)
    for offset, value in enumerate([np.nan, np.inf]):
        data, weights, _ = operands(given[2], 1)
        data[1, 3, 16, 70] = value
        found = batch.run(2, data, weights, None, offset)
        wanted = reference(given[2], data, weights)
        np.testing.assert_array_equal(np.isfinite(found), np.isfinite(wanted))
        assert 0 < np.count_nonzero(~np.isfinite(wanted)) < wanted.size // 8


def test_blocks_of_held_data_have_several_tiles(tmp_path):
    """Of columns, by boxes that threads copy; of rows, by three boxes each, some beyond the last; at any address."""
    odd = td.Problem(1, 1, 21, 21, (9, 7), (8, 8), (4, 4), (1, 1), (1, 2), (39, 30), "float16", "NXC")
    many = td.Problem(2, 1, 136, 3, (9, 9), (4, 4), (2, 2), (1, 1), (1, 1), (18, 18), "bfloat16", "NXC")
    plans = [
        ClusterPlan(64, 128, 64, 64, 128, 3, cluster_m=2, turns_n=2),
        ClusterPlan(64, 16, 64, 64, 16, 3, joined=2, cluster_m=2, turns_m=3),
    ]
    batch = Batch([odd.replace(epilogue=td.Epilogue(True)), many], tmp_path, "turns", FAMILIES["cuda_held"], plans)
    for number, offset in ((0, 0), (1, 0), (1, 1)):
        check(batch, number, offset=offset)


def test_tiles_of_the_filter_stay_for_all_tiles_of_rows(tmp_path):
    """Of all sections or some, whose stages have them; in clusters, with warps that store, and at any address."""
    problem = td.Problem(2, 1, 64, 24, (9, 9), (3, 3), (2, 2), (1, 1), (1, 1), (18, 18), "float16", "NXC")
    plan = ClusterPlan(64, 32, 64, 64, 32, 4, turns_m=3)
    plans = [plan, replace(plan, stages=3, storing=1), replace(plan, cluster_m=2, turns_m=2)]
    kept = [
        {section.tiles_k: form.keeps(section) for section in form.sections}
        for form in map(partial(Held, problem), plans)
    ]
    assert kept == [{4: True, 2: True, 1: True}, {4: False, 2: True, 1: True}, {4: True, 2: True, 1: True}]
    batch = Batch([problem] * 3, tmp_path, "kept", FAMILIES["cuda_held"], plans)
    for number, offset in itertools.product(range(3), range(2)):
        check(batch, number, offset=offset)
    few = td.Problem(1, 1, 56, 1, (90, 90), (9, 9), (3, 3), (1, 1), (4, 4), (270, 270), "float16", "NXC")
    assert {plan.stages for _, plan in FAMILIES["cuda_held"].candidates(few, HOPPER)} == {3, 4, 6, 9}


def test_rows_that_are_images_are_no_neighbours_in_the_output(tmp_path):
    """With channels second: phases of a position are stored together, and no positions."""
    problem = td.Problem(64, 1, 64, 96, (2, 2), (3, 3), (2, 2), (1, 1), (1, 1), (4, 4), "float16")
    plan = ClusterPlan(192, 96, 64, 64, 96, 3, joined=1)
    form = TurnedHeldMerged(problem, plan)
    assert all(form.box(section).fastest and Rounds.of(form, section).read == 2 for section in form.sections)
    batch = Batch([problem.replace(epilogue=td.Epilogue(True))], tmp_path, "images", FAMILIES[form.algorithm], [plan])
    check(batch, 0)


def test_loads_of_boxes_go_no_further_than_those_that_are_read(tmp_path):
    """Of more stages than tiles of k: a fourth box would wait for the second, which the next turn reads."""
    problem = td.Problem(2, 1, 16, 12, (9, 9), (3, 3), (2, 2), (1, 1), (1, 1), (18, 18), "float16", "NXC")
    plan = ClusterPlan(64, 64, 64, 64, 64, 6, joined=2, turns_m=6)
    batch = Batch([problem], tmp_path, "ahead", FAMILIES["cuda_held_merged"], [plan])
    check(batch, 0)


@pytest.mark.parametrize("family", ["cuda_tensor", "cuda_held", "cuda_product"])
def test_channels_of_neighbouring_positions_are_stored_together(family, tmp_path):
    """Odd channels, phases and lines of the output that allow vectors of 8 or 4, or none; a bias for each channel."""
    algorithm = FAMILIES[family]
    problem = td.Problem(2, 1, 32, 5, (6, 9), (16, 16), (8, 8), (1, 1), (4, 4), (48, 72), "float16", "NXC")
    problem = problem.replace(epilogue=td.Epilogue(True, "sigmoid"))
    given = [problem, problem.replace(dtype="bfloat16", pads_begin=(0, 0), output_spatial=(56, 80))]
    given += [problem.replace(pads_begin=(3, 3), output_spatial=(48, 75))]
    batch = Batch(given, tmp_path, "pixels", algorithm)
    assert ["*(half4*)(out_ptr" in source(one.functions) for one in (batch.kernels[0], batch.kernels[2])] == [
        True,
        False,
    ]
    for number, offset in itertools.product(range(len(given)), range(2)):
        check(batch, number, offset=offset)


FORMS = {"cuda_tensor": Warps, "cuda_product": Threads, "cuda_wgmma": Warpgroups, "cuda_held": Held}
#: Plans with all columns of few channels in a tile.
FEW = {
    "cuda_tensor": replace(TENSOR_PLANS[-2], tile_k=16, stages=4, joined=2),
    "cuda_product": replace(PLANS[4], joined=2),
    "cuda_wgmma": ClusterPlan(128, 32, 64, 64, 32, 3, joined=2, cluster_n=2),
    "cuda_held": ClusterPlan(64, 16, 64, 64, 16, 3, joined=2, turns_m=2, storing=1),
}


@pytest.mark.parametrize("family", FEW)
def test_a_thread_stores_the_few_columns_of_a_row(family, tmp_path):
    """Phases at all sides of the output, an axis with one position, groups, images; a bias for each channel."""
    problem = td.Problem(2, 1, 64, 3, (5, 9), (4, 4), (2, 2), (1, 1), (1, 1), (10, 17), "float16", "NXC")
    problem = problem.replace(epilogue=td.Epilogue(True, "sigmoid"))
    given = [problem, problem.replace(groups=2, out_channels=1, dtype="bfloat16", pads_begin=(0, 1))]
    line = problem.replace(out_channels=1, strides=(3, 3), data_spatial=(1, 9), output_spatial=(1, 26))
    given.append(line.replace(kernel=(3, 6) if family == "cuda_held" else (3, 3)))  # the former for several taps
    plans = [FEW[family], FEW[family], replace(FEW[family], joined=1)]
    forms = [FORMS[family](*one) for one in zip(given, plans, strict=True)]
    assert all(Rounds.of(form, section).by_rows for form in forms for section in form.sections)
    batch = Batch(given, tmp_path, "few", FAMILIES[family], plans)
    for number, offset in ((0, 0), (0, 1), (1, 0), (2, 1)):
        check(batch, number, offset=offset)


@pytest.mark.parametrize("family", ["cuda_tensor", "cuda_wgmma"])
def test_sums_are_rounded_on_their_way_to_the_output(family, tmp_path):
    """With channels last, to two bytes: eight, four or two channels in one store, one at odd addresses, and groups."""
    wgmma = family == "cuda_wgmma"
    plan = ClusterPlan(64, 64, 64, 64, 64, 3) if wgmma else replace(TENSOR_PLANS[0], stages=4)
    problem = td.Problem(1, 1, 64, 40, (5, 9), (4, 3), (2, 2), (1, 1), (1, 1), (10, 17), "float16", "NXC")
    problem = problem.replace(epilogue=td.Epilogue(True, "sigmoid"))
    given = [problem, problem.replace(out_channels=36, dtype="bfloat16"), problem.replace(groups=2, out_channels=38)]
    batch = Batch(given, tmp_path, "rounded", FAMILIES[family], [plan] * len(given))
    assert "half2*" in source(batch.kernels[0].functions)
    for number, offset in ((0, 0), (0, 1), (1, 0), (2, 1)):
        check(batch, number, offset=offset)


def test_threads_store_sums_from_registers(tmp_path):
    """Of several phases in a tile, cut at all sides; of groups, of shared terms, of words; at any address."""
    problem = td.Problem(1, 1, 64, 16, (5, 9), (4, 4), (2, 2), (1, 1), (1, 1), (10, 18), "float16", "NXC")
    problem = problem.replace(epilogue=td.Epilogue(True, "sigmoid"))
    wide = problem.replace(out_channels=96, groups=2, dtype="bfloat16")
    plan = ClusterPlan(64, 64, 64, 64, 64, 3, joined=2)
    chosen = [
        (problem, plan),
        (wide, replace(plan, tile_n=32, part_n=32, joined=0, turns_m=2)),
        (problem.replace(in_channels=128), replace(plan, cluster_k=2)),
        (problem.replace(dtype="float32", precision="tf32"), replace(plan, tile_k=32)),
    ]
    assert [Warpgroups(*one).side_by_side for one in chosen] == [8, 8, 8, 4]
    given, plans = zip(*chosen, strict=True)
    batch = Batch(given, tmp_path, "once", FAMILIES["cuda_wgmma"], plans)
    for number in range(len(plans)):
        for offset in range(2 if number == 0 else 1):
            check(batch, number, offset=offset)


def test_strips_read_a_line_once_for_all_taps_of_an_axis(tmp_path):
    """Of two and four strips, two warpgroups, several boxes of channels, images in the place of neighbours, turns."""
    problem = td.Problem(2, 1, 56, 1, (20, 11), (9, 9), (3, 3), (1, 1), (4, 4), (60, 33), "float16", "NXC")
    images = td.Problem(16, 1, 128, 3, (9, 7), (4, 4), (2, 2), (1, 1), (1, 1), (18, 14), "bfloat16", "NXC")
    plan = ClusterPlan(128, 16, 64, 128, 16, 9, joined=2)
    chosen = [
        (problem.replace(epilogue=td.Epilogue(True)), replace(plan, tile_m=512, part_m=256)),
        (problem, replace(plan, turns_m=2)),
        (images, replace(plan, tile_m=256, part_m=256, turns_m=3, stages=8)),
        (images.replace(out_channels=4), replace(plan, stages=8)),
    ]
    assert [Held(*one).strips for one in chosen] == [4, 2, 4, 2]
    given, plans = zip(*chosen, strict=True)
    batch = Batch(given, tmp_path, "strips", FAMILIES["cuda_held"], plans)
    for number in range(len(plans)):
        check(batch, number, offset=number % 2)


def test_what_permits_tf32_is_within_its_bound(tmp_path):
    """At most 2**-10 of the sum of the magnitudes of all products, and more exact where no tensor core serves."""
    given = [EXAMPLES["cuda_tensor"][-1], as_tf32(EXAMPLES["cuda_narrow"][0]).replace(epilogue=td.Epilogue())]
    batch = Batch(given, tmp_path, "bound")
    for number, problem in enumerate(given):
        data, weights, _ = operands(problem, 3)
        error = np.abs(batch.run(number, data, weights, None) - reference(problem, data, weights))
        relative = error / np.maximum(reference(problem, np.abs(data), np.abs(weights)), 1e-30)
        assert relative.max() <= (2**-10 if number == 0 else 1e-6) * 1.01
        assert number or relative.max() > 1e-6  # it is TF32


def test_three_products_are_as_exact_as_float32(tmp_path):
    """Of the terms for which they stand in for float32: errors at most twice its own, and far from those of TF32."""
    ends = FAST_TERMS[0], 1000, FAST_TERMS[-1]
    exact = [td.Problem(1, 1, terms, 8, (40,), (1,), (1,), (1,), (0,), (40,)) for terms in ends]
    plans = [replace(TENSOR_PLANS[-1], tile_k=16)] * len(exact)
    three = Batch([*map(as_tf32x3, exact)], tmp_path, "three", FAMILIES["cuda_tensor"], plans)
    # wgmma has 32 columns at least.
    exact.append(exact[1].replace(out_channels=32))
    groups = Batch([as_tf32x3(exact[-1])], tmp_path, "groups", FAMILIES["cuda_wgmma"])
    one = Batch(exact, tmp_path, "one", FAMILIES["cuda_product"], [PLANS[-1]] * len(exact))
    for number, problem in enumerate(exact):
        drawn, weights, _ = operands(problem, number)
        split = partial(three.run, number) if number < len(three.kernels) else partial(groups.run, 0)
        # Sums of products of one sign grow with every term, which tensor cores' rounding towards zero always lessens.
        for data, filter in ((drawn, weights), (np.abs(drawn), np.abs(weights))):
            wanted = reference(problem, data, filter)
            # On the device the sums of CUDA cores are of fused products: the shim's round once more, which is little.
            runs = split, partial(one.run, number)
            errors = [np.linalg.norm(run(data, filter, None) - wanted) for run in runs]
            print(problem.in_channels, *(error / np.linalg.norm(wanted) for error in errors))
            assert errors[0] <= 2 * errors[1]
            assert errors[0] <= 1e-6 * np.linalg.norm(wanted)


#: Data and filter of one product each: what float32 makes of them, three products of TF32 make too.
LIMITS = (0.0, -0.0, 1.0, -1.5, 2.0**13, 1 / 3, 3.4e38, -3.3e38, 1e-30, np.inf, -np.inf, np.nan)


@pytest.mark.parametrize("family", ["cuda_tensor", "cuda_wgmma"])
def test_three_products_at_the_limits_of_float32(family, tmp_path):
    problem = td.Problem(
        len(LIMITS), 1, 8, 32, (1,), (1,), (1,), (1,), (0,), (1,), data_format="NXC", precision="tf32x3"
    )
    data, weights = np.zeros(problem.data_shape, np.float32), np.zeros(problem.filter_shape, np.float32)
    data[:, 0, 0] = LIMITS  # of the first channel
    weights[0, : len(LIMITS), 0] = LIMITS
    found = Batch([problem], tmp_path, "limits", FAMILIES[family]).run(0, data, weights, None)[:, 0, : len(LIMITS)]
    with np.errstate(all="ignore"):
        wanted = np.multiply.outer(np.float32(LIMITS), np.float32(LIMITS))
    np.testing.assert_allclose(found, wanted, rtol=2**-20)


def test_results_are_the_same_in_every_run(tmp_path):
    """Whatever the order of the warps, which is another every time: parts of sums are added up in order."""
    problem = EXAMPLES["cuda_product"][2]
    assert FAMILIES["cuda_product"].default_plan(problem, TARGET)[1].split > 1
    batch = Batch([problem], tmp_path, "twice")
    data, weights, bias = operands(problem, 5)
    first, second = (batch.run(0, data, weights, bias).tobytes() for _ in range(2))
    assert first == second


def test_nan_and_infinity_pass(tmp_path):
    given = [
        td.Problem(1, 1, 3, 18, (5, 6), (3, 3), (2, 2), (1, 1), (1, 1), (10, 11)),
        td.Problem(1, 18, 1, 1, (5, 6), (3, 3), (2, 2), (1, 1), (1, 1), (10, 11), data_format="NXC"),
        td.Problem(1, 1, 3, 2, (5, 5), (7, 7), (8, 8), (3, 3), (2, 3), (40, 43)),
    ]
    batch = Batch(given, tmp_path, "nan")
    for value, (number, problem) in itertools.product((np.nan, np.inf), enumerate(given)):
        data, weights, _ = operands(problem, 1)
        data.flat[7] = value
        found = batch.run(number, data, weights, None)
        np.testing.assert_allclose(found, reference(problem, data, weights), rtol=1e-4, atol=1e-5)
        assert not np.isfinite(found).all()


def test_indices_of_64_bits(tmp_path, monkeypatch):
    """All families count with 64 bits where arrays ask for it; here, where they do not."""
    monkeypatch.setattr(emit, "_BEYOND", 2**31)
    given = [EXAMPLES[family][0] for family in EXAMPLES] + EXAMPLES["cuda_product"][2:4]
    batch = Batch(given, tmp_path, "wide")
    for number in range(len(given)):
        check(batch, number)


#: Of more than 2^31 output elements: kernel = stride, so that the last outputs are of the last position alone.
BEYOND = {
    "cuda_narrow": td.Problem(1, 16, 1, 1, (2049, 16384), (2, 2), (2, 2), (1, 1), (0, 0), (4098, 32768), "float16"),
    "cuda_generic": td.Problem(1, 16, 1, 1, (2049, 16384), (2, 2), (2, 2), (1, 1), (0, 0), (4098, 32768), "float16"),
    "cuda_tensor": td.Problem(
        1, 1, 16, 32, (4097, 4096), (2, 2), (2, 2), (1, 1), (0, 0), (8194, 8192), "float16", "NXC"
    ),
    "cuda_product": td.Problem(1, 1, 4, 32, (4097, 4096), (2, 2), (2, 2), (1, 1), (0, 0), (8194, 8192), "int8"),
}


@pytest.mark.parametrize("family", BEYOND)
def test_arrays_beyond_32_bits(family, tmp_path, monkeypatch):
    """The last blocks of arrays of that size, which are there as far as they are touched."""
    problem = BEYOND[family]
    assert np.prod(problem.output_shape) > 2**31
    batch = Batch([problem], tmp_path, "beyond", FAMILIES[family])
    kernel = batch.kernels[0]
    small = problem.replace(data_spatial=(1, 128), output_spatial=(2, 256))  # the end of the last row
    values, weights, _ = operands(small, 1)
    data, out = sparse(problem.data_shape, values.dtype), sparse(problem.output_shape, problem.output_dtype)
    last = problem.data_format == "NXC"
    ends = (0, slice(-1, None), slice(-128, None)) if last else (0, slice(None), slice(-1, None), slice(-128, None))
    data[ends] = values[0]
    packed = sparse((kernel.packed_elements,), kernel.packed_dtype)
    batch.call("pack_0", np.ascontiguousarray(small.canonical_filter(weights)), packed)
    monkeypatch.setenv("SHIM_LAST_BLOCKS", "2")
    batch.call("deconv_0", data, packed, out)
    wanted = reference(small, values, weights)[0]
    # Two blocks of threads that are elements are the end of the last row of the last channel.
    ends = (0, slice(-2, None), slice(-256, None)) if last else (0, slice(None), slice(-2, None), slice(-256, None))
    if family == "cuda_generic":
        ends, wanted = (0, -1, -1, slice(-256, None)), wanted[-1, -1]
    elif family == "cuda_narrow":
        ends, wanted = (0, -1, slice(-2, None), slice(-256, None)), wanted[-1]
    np.testing.assert_allclose(out[ends], wanted, rtol=2e-3, atol=2e-3)
