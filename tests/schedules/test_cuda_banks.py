"""Conflicts of shared memory's banks, by the places that lanes take: of main loops, and on the way to the output."""

import pytest

import tvm_deconv as td
from tvm_deconv.schedules.cuda import product, tensor
from tvm_deconv.schedules.cuda.banks import best_pitch, ideal, wavefronts
from tvm_deconv.schedules.cuda.tiles import accesses

#: By stride and pad: products with one and with two phases of the last axis side by side.
LAYERS = {
    "phases apart": td.Problem(1, 1, 64, 64, (16, 16), (4, 4), (2, 2), (1, 1), (1, 1), (32, 32)),
    "two phases": td.Problem(1, 1, 64, 64, (16, 16), (2, 2), (2, 2), (1, 1), (0, 0), (32, 32)),
    "four phases": td.Problem(1, 1, 64, 64, (16, 16), (4, 4), (4, 4), (1, 1), (0, 0), (64, 64)),
}
TYPES = {
    "float16": {"dtype": "float16"},
    "tf32": {"precision": "tf32"},
    "tf32x3": {"precision": "tf32x3"},
}


def test_what_conflicts():
    assert wavefronts(range(32), 1) == ideal(range(32), 1) == 1
    assert wavefronts([0] * 32, 1) == 1  # one word for all
    assert wavefronts(range(0, 64, 2), 1) == 2
    assert wavefronts([lane * 33 for lane in range(32)], 1) == 1
    assert wavefronts([lane * 32 for lane in range(32)], 1) == 32
    assert wavefronts(range(0, 128, 4), 4) == ideal(range(0, 128, 4), 4) == 4
    assert best_pitch(32, 1, lambda pitch: [([lane * pitch for lane in range(32)], 1)]) == 33


def conflicts(those):
    return sum(wavefronts(*one) for one in those) / sum(ideal(*one) for one in those)


@pytest.mark.parametrize("data_format", td.problem.DATA_FORMATS)
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("layer", LAYERS)
def test_tensor_kernels_have_none(layer, kind, data_format):
    problem = LAYERS[layer].replace(data_format=data_format, **TYPES[kind])
    for plan in tensor._shapes(problem):
        loop, output = accesses(tensor._Warps(problem, plan))
        assert conflicts(loop) <= 1.05, plan
        assert conflicts(output) <= 1.05, plan


@pytest.mark.parametrize("plan", product.PLANS[:4])
def test_warps_of_products_read_few_vectors(plan):
    """4 by 8 threads: two wavefronts for each vector of either operand, of which 2 by 16 threads took three."""
    loop, _ = accesses(product._Threads(LAYERS["two phases"], plan))
    assert conflicts(loop) == 1
    assert sum(wavefronts(*one) for one in loop) == 2 * (plan.part_m + plan.part_n) // 4
