"""Conflicts of shared memory's banks, by the places that lanes take: of main loops, and on the way to the output."""

import itertools
from dataclasses import replace

import pytest

import tvm_deconv as td
from tvm_deconv.schedules.cuda import held, product, tensor, tiles, turning, wgmma
from tvm_deconv.schedules.cuda.banks import best_pitch, ideal, wavefronts
from tvm_deconv.schedules.cuda.tiles import accesses
from tvm_deconv.schedules.cuda.wgmma import ClusterPlan

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
        loop, output = accesses(tensor.Warps(problem, plan))
        assert conflicts(loop) <= 1.05, plan
        assert conflicts(output) <= 1.05, plan


@pytest.mark.parametrize("wide", [1, 2, 4, 8])
def test_turning_has_none(wide):
    """Neither as words of channels come, of one to eight positions at once, nor as vectors of a line leave."""
    for first in range(0, 64 // wide * 32, 32):
        loaded = [turning.loaded_at(first + lane, wide) for lane in range(32)]
        for i in range(wide):
            assert wavefronts([turning.place_of(position + i, word) for position, word in loaded], 1) == 1
    for first in range(0, 512, 32):
        stored = [turning.stored_at(first + lane) for lane in range(32)]
        assert wavefronts([turning.place_of(line, 4 * vector) for line, vector in stored], 4) == 4
    places = {turning.place_of(line, word) for line in range(64) for word in range(32)}
    assert places == set(range(64 * 32))


@pytest.mark.parametrize("family", [tensor.Warps, held.Held, wgmma.Warpgroups])
@pytest.mark.parametrize("channels", [1, 3, 4])
def test_few_columns_of_a_row_are_read_by_one_thread(family, channels):
    """By vectors, without bank conflicts: 4, 12 and 16 columns of tiles of 16, 32 and more."""
    problem = LAYERS["phases apart"].replace(data_format="NXC", dtype="float16", out_channels=channels)
    for rows, columns in ((64, 16), (128, 32), (192, 64)):
        plan = ClusterPlan(rows, columns, 64, 64, columns, 3, joined=2)
        form = family(problem, replace(plan, tile_m=128, tile_k=32) if family is tensor.Warps else plan)
        (section,) = form.sections
        rounds = tiles.Rounds.of(form, section)
        assert rounds.by_rows == (channels < 4)
        assert conflicts(rounds.taken) <= 1.05, plan
        places = {rounds.place(*at) for at in itertools.product(range(form.plan.tile_m), range(rounds.columns))}
        assert len(places) == form.plan.tile_m * rounds.columns
        assert max(places) < rounds.size


def test_pitches_of_plans_that_are_alike_are_those_of_each(monkeypatch):
    """They are found once for all that have the same tiles: never for others."""
    problems = [layer.replace(data_format=which) for layer in LAYERS.values() for which in td.problem.DATA_FORMATS]
    problems += [problem.replace(dtype="float16", out_channels=42) for problem in problems]
    forms = [tensor.Warps(problem.replace(**TYPES["tf32"]), tensor.PLANS[0]) for problem in problems[:6]]
    forms += [product.Threads(problem, plan) for problem in problems for plan in product.PLANS[:2]]
    forms += [wgmma.Warpgroups(problem, ClusterPlan(64, 64, 64, 64, 64, 3)) for problem in problems]
    together = [accesses(form)[1] for form in forms]
    for form, found in zip(forms, together, strict=True):
        monkeypatch.setattr(tiles, "_WAYS", {})
        assert accesses(form)[1] == found


@pytest.mark.parametrize("rows", held._ROWS)
@pytest.mark.parametrize("extents", [(1, 16, 16), (32, 4, 4), (1, 17, 17)])
def test_rows_of_held_data_are_in_different_banks(extents, rows):
    """Of every warp and every tap, wherever a box begins: neighbours, images, and rows that go on in the next line."""
    images, *spatial = extents
    layer = LAYERS["phases apart"].replace(batch=images, data_spatial=(spatial[0], spatial[1]), pads_begin=(0, 0))
    layer = layer.replace(output_spatial=tuple(2 * x + 2 for x in spatial), dtype="float16", data_format="NXC")
    form = held.Held(layer, ClusterPlan(rows, 64, 64, 64, 64, 3))
    (section,) = form.sections
    for warp, tap, first in itertools.product(range(rows // 16), range(4), (0, 5)):
        lanes = range(32 * warp, 32 * warp + 32)
        places = [int(form.place_of(section, lane, tap, first)) // 2 for lane in lanes]
        assert wavefronts(places, 4) == ideal(places, 4), (warp, tap)
        assert len({*places}) == 32
    assert conflicts(tiles.Rounds.of(form, section).taken) <= 1.05


@pytest.mark.parametrize("plan", product.PLANS[:4])
def test_warps_of_products_read_few_vectors(plan):
    """4 by 8 threads: two wavefronts for each vector of either operand, of which 2 by 16 threads took three."""
    loop, _ = accesses(product.Threads(LAYERS["two phases"], plan))
    assert conflicts(loop) == 1
    assert sum(wavefronts(*one) for one in loop) == 2 * (plan.part_m + plan.part_n) // 4
