"""8-bit integers in generated CUDA on the CPU: every kernel, with and without scales and zero points, is exact."""

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest
from support.cuda_kernels import TARGET, Batch, drawn
from support.kernels import bound
from support.strategies import not_empty, problems

import tvm_deconv as td
from tvm_deconv.problem.quantization import OUTPUTS, STORED
from tvm_deconv.problem.reference import reference
from tvm_deconv.problem.testing import operands
from tvm_deconv.schedules.cuda.algorithms import ALGORITHMS
from tvm_deconv.schedules.cuda.tensor import LARGE_PLANS, LARGE_TRIPLE, PLANS

FAMILIES = {algorithm.name: algorithm for algorithm in ALGORITHMS}


def check(batch, number, offset=0):
    problem = batch.kernels[number].problem
    arrays = operands(problem, number)
    found = batch.run(number, *bound(problem, arrays), offset, first=number % 2 == 1)
    scaling = [arrays.scaling] if problem.quantization else []
    np.testing.assert_array_equal(found, reference(problem, arrays.data, arrays.filter, arrays.bias, *scaling))


def quantized(problem):
    """The problem with types and an exact activation that depend on it alone; sometimes as it is."""
    chance = random.Random(problem.key)
    filter, output = chance.choice(STORED), chance.choice(OUTPUTS)
    exact = ["none", "relu", "clip", *(["leaky_relu"] if output != "int32" else [])]
    epilogue = td.Epilogue(problem.epilogue.bias, chance.choice(exact), alpha=0.25, minimum=-20, maximum=90)
    if chance.random() < 0.2:
        return problem
    return problem.replace(quantization=td.Quantization(filter, output), epilogue=epilogue)


#: Channels that vectors hold, words, and neither; in both layouts; groups; one to three axes; outputs without a tap.
GIVEN = [
    td.Problem(2, 1, 48, 24, (5, 6), (2, 2), (2, 2), (1, 1), (0, 0), (10, 12), "uint8", "NXC"),
    td.Problem(1, 2, 20, 17, (5, 5), (3, 2), (1, 1), (1, 1), (1, 1), (5, 4), "int8", "NXC"),
    td.Problem(1, 1, 37, 9, (3, 4, 5), (2, 3, 3), (2, 3, 3), (1, 1, 1), (0, 1, 0), (6, 10, 15), "uint8", "NXC"),
    td.Problem(1, 1, 40, 12, (30,), (3,), (5,), (1,), (1,), (149,), "int8"),
]


def test_tensor_cores_are_exact(tmp_path):
    """All types of filter and output, both of data; at addresses that suit vectors and others; random problems."""
    chosen = GIVEN[:1]
    for number, types in enumerate(itertools.product(STORED, OUTPUTS)):
        given = GIVEN[(number + number // 4) % 4]
        chosen.append(given.replace(quantization=td.Quantization(*types), epilogue=td.Epilogue(True, "relu")))
    space = problems(dtypes=STORED, max_macs=60_000).map(quantized)
    serves = FAMILIES["cuda_tensor"].supports
    chosen += drawn(space.filter(lambda p: not_empty(p) and serves(p, TARGET)), 1)
    batch = Batch(
        [problem.replace(filter_format="GIOX") for problem in chosen], tmp_path, "bytes", FAMILIES["cuda_tensor"]
    )
    for number in range(len(chosen)):
        check(batch, number, offset=number % 3)


#: Of two operands a plan has twice the sums.
PLANNED = {
    "int8": [replace(plan, tile_k=64) for plan in (LARGE_PLANS[0], PLANS[0], PLANS[-1])],
    "uint8": [replace(plan, tile_k=32) for plan in (LARGE_TRIPLE[0], PLANS[-1])],
}


@pytest.mark.parametrize("filter", PLANNED)
def test_plans_of_bytes_are_exact(filter, tmp_path):
    """Tiles ragged in every direction, and sums in parts, the first of which has what the zero point adds."""
    problem = td.Problem(1, 1, 48, 70, (130,), (4,), (2,), (1,), (0,), (262,), filter, "NXC", "GIOX")
    problem = problem.replace(quantization=td.Quantization(filter, "int32"))
    plans = [*PLANNED[filter], replace(PLANNED[filter][-1], split=3, stages=3)]
    batch = Batch([problem] * len(plans), tmp_path, "plans", FAMILIES["cuda_tensor"], plans)
    for number in range(len(plans)):
        check(batch, number)


#: Of each other kernel a problem that it is the default for, but for its types.
OTHERS = {
    "cuda_generic": td.Problem(1, 1, 3, 2, (5, 5), (7, 7), (8, 8), (3, 3), (2, 3), (40, 43), "int8"),
    "cuda_narrow": td.Problem(1, 16, 1, 1, (6, 8), (4, 4), (2, 2), (1, 1), (1, 1), (12, 16), "uint8"),
    "cuda_merged": td.Problem(1, 1, 9, 12, (60, 70), (3, 3), (2, 2), (1, 1), (1, 1), (119, 139), "int8", "NXC"),
    "cuda_product": td.Problem(1, 1, 4, 9, (9,), (3,), (1,), (1,), (1,), (9,), "uint8", "NXC"),
}


def test_all_kernels_are_exact(tmp_path):
    """Those without tensor cores take off the zero point as they load."""
    types = itertools.cycle([td.Quantization("uint8", "int8"), td.Quantization("int8", "uint8")])
    chosen = [problem.replace(quantization=next(types), filter_format="GIOX") for problem in OTHERS.values()]
    batch = Batch(chosen, tmp_path, "others")
    assert [kernel.algorithm for kernel in batch.kernels] == list(OTHERS)
    for number in range(len(chosen)):
        check(batch, number)


def test_tiles_of_bytes_are_whole_instructions():
    """Of all plans worth measuring, in both layouts; bytes that come one by one take a register each."""
    for data_format, tiles in (("NXC", {32, 64, 128}), ("NCX", {32, 64})):
        problem = td.Problem(1, 1, 256, 64, (130,), (4,), (2,), (1,), (0,), (262,), "int8", data_format)
        plans = [plan for _, plan in FAMILIES["cuda_tensor"].candidates(problem, TARGET)]
        assert {plan.tile_k for plan in plans} == tiles
