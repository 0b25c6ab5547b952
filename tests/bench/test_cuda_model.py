"""``scripts/cuda-model``: predicted times keep what any device keeps."""

from dataclasses import replace
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

import pytest

import tvm_deconv as td

ROOT = Path(__file__).parents[2]
#: Of one wave at most, and of many.
SMALL = td.Problem(1, 1, 256, 128, (32, 32), (2, 2), (2, 2), (1, 1), (0, 0), (64, 64), "float16")
LARGE = SMALL.replace(batch=32)


@pytest.fixture(scope="module")
def model():
    loader = SourceFileLoader("cuda_model", str(ROOT / "scripts" / "cuda-model"))
    module = module_from_spec(spec_from_loader(loader.name, loader))
    loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "problem", [SMALL, LARGE, LARGE.replace(dtype="float32", precision="tf32x3"), LARGE.replace(dtype="int8")]
)
def test_a_time_is_above_all_floors(model, problem):
    ((algorithm, plan),) = model.plans_of(problem, 1)
    found = model.predicted(problem, plan, algorithm)
    assert found.seconds >= model.LAUNCH + problem.min_bytes / model.BANDWIDTH
    form = model.form_of(problem, plan, algorithm)
    most = model.MULTIPROCESSORS * model.CLOCK * model.TENSOR[form.kind] / (3 if form.triple else 1)
    assert found.seconds >= problem.macs / most
    assert found.conflicts == 1


def test_what_costs_more_takes_longer(model):
    ((algorithm, plan),) = model.plans_of(LARGE, 1)

    def seconds(problem, plan=plan):
        return model.predicted(problem, plan, algorithm).seconds

    assert seconds(LARGE) > 5 * seconds(SMALL)
    assert seconds(LARGE.replace(in_channels=512)) > 1.5 * seconds(LARGE)
    assert seconds(LARGE, replace(plan, tile_m=64, tile_n=64, part_m=32)) > seconds(LARGE)


def test_wgmma_is_predicted(model):
    """Faster than mma.sync where products limit, and never below what wgmma multiplies in a clock."""
    problem = LARGE.replace(data_format="NXC")
    ((algorithm, plan),) = model.plans_of(problem, 1)
    found = model.fastest(problem)
    assert found.seconds <= model.predicted(problem, plan, algorithm).seconds
    assert found.seconds > problem.macs / (model.MULTIPROCESSORS * model.CLOCK * model.WGMMA)
    chosen = model.wgmma.ALGORITHM.candidates(problem, model.HOPPER)[0][1]
    assert model.predicted(problem, chosen, "cuda_wgmma").seconds > model.LAUNCH
    # Of three products of TF32 each takes twice the time of one of float16.
    triple = problem.replace(dtype="float32", precision="tf32x3")
    plan = model.wgmma.ALGORITHM.candidates(triple, model.HOPPER)[0][1]
    least = 6 * problem.macs / (model.MULTIPROCESSORS * model.CLOCK * model.WGMMA)
    assert least < model.predicted(triple, plan, "cuda_wgmma").seconds < 2 * least


def test_blocks_hide_the_latency_of_others_that_exist(model):
    """Twice as many blocks as multiprocessors, two on each, take less than twice the time of as many."""
    one = td.Problem(8, 1, 512, 128, (33, 32), (1, 1), (1, 1), (1, 1), (0, 0), (33, 32), "float16", "NXC")
    plan = model.wgmma.ClusterPlan(64, 128, 64, 64, 128, 3)
    alone, two = (model.predicted(one.replace(batch=batch), plan, "cuda_wgmma") for batch in (8, 16))
    assert alone.waves == two.waves == 1
    assert two.seconds - model.LAUNCH < 1.95 * (alone.seconds - model.LAUNCH)


def test_warpgroups_wait_for_tiles_behind_products(model):
    """A block alone meets at a barrier for each tile of k, but warpgroups do not, unless products are short."""
    problem = LARGE.replace(data_format="NXC", kernel=(4, 4), pads_begin=(1, 1))
    plan = model.wgmma.ClusterPlan(64, 128, 64, 64, 128, 3)
    narrow = replace(plan, tile_n=16, part_n=16, joined=2)
    forms = [model.form_of(problem, plan, name) for name in ("cuda_wgmma", "cuda_held")]
    assert [model.clocks_between_tiles(form, 1) for form in forms] == [0, 0]
    short = model.clocks_between_tiles(model.form_of(problem, narrow, "cuda_held"), 1)
    assert short == pytest.approx(model.BARRIER - 2 * 64 * 16 * 16 / model.WGMMA)
    ((name, chosen),) = model.plans_of(problem, 1)
    warps = model.form_of(problem, chosen, name)
    assert [model.clocks_between_tiles(warps, count) for count in (1, 2)] == [model.BARRIER, 0]


def test_channels_that_the_data_lack_are_not_read(model):
    problem = LARGE.replace(data_format="NXC", in_channels=64)
    plan = model.wgmma.ClusterPlan(128, 64, 64, 64, 64, 3)
    clocks = []
    for channels in (64, 24):
        form = model.form_of(problem.replace(in_channels=channels), plan, "cuda_wgmma")
        clocks.append(model.clocks_of_tile(form, form.sections[0], *model.accesses(form)[:1], 1))
    bytes_of_a, bytes_of_b = 128 * 128, 64 * 128
    assert clocks[0]["level-2 cache"] == pytest.approx((bytes_of_a + bytes_of_b) / model.L2)
    assert clocks[1]["level-2 cache"] == pytest.approx((bytes_of_a * 24 / 64 + bytes_of_b) / model.L2)
    assert clocks[0]["shared memory"] == clocks[1]["shared memory"]


def test_data_that_are_held_come_once_for_all_taps(model):
    """Fewer bytes from the level-2 cache than wgmma takes by the same plan, and more time than products."""
    problem = LARGE.replace(data_format="NXC", kernel=(4, 4), pads_begin=(1, 1))
    plan = model.wgmma.ClusterPlan(128, 128, 64, 64, 128, 3, cluster_m=2)
    clocks = []
    for name in ("cuda_wgmma", "cuda_held"):
        form = model.form_of(problem, plan, name)
        reads, _ = model.accesses(form)
        clocks.append(model.clocks_of_tile(form, form.sections[0], reads, 1))
        least = problem.macs / (model.MULTIPROCESSORS * model.CLOCK * model.WGMMA)
        assert model.predicted(problem, plan, name).seconds > model.LAUNCH + least
    loaded, held = (one["level-2 cache"] for one in clocks)
    lines = form.lines(form.sections[0])
    assert held == pytest.approx((lines / 4 + 64) * 128 / model.L2)
    assert held < 0.6 * loaded


def test_tiles_of_the_filter_that_stay_come_once(model):
    """Where stages have all of them, for several tiles of rows: fewer bytes and wavefronts for each."""
    problem = LARGE.replace(data_format="NXC", in_channels=64, kernel=(4, 4), pads_begin=(1, 1))
    plan = model.wgmma.ClusterPlan(64, 128, 64, 64, 128, 3, turns_m=4)
    clocks = []
    for stages in (3, 4):
        form = model.form_of(problem, replace(plan, stages=stages), "cuda_held")
        clocks.append(model.clocks_of_tile(form, form.sections[0], model.accesses(form)[0], 1))
    again, once = clocks
    saved = 3 / 4 * 128 * 64 * 2
    assert once["shared memory"] == pytest.approx(again["shared memory"] - saved / model.WAVEFRONT)
    assert once["level-2 cache"] == pytest.approx(again["level-2 cache"] - saved / model.L2)


def test_what_threads_copy_is_found_in_the_nearest_cache(model):
    """Of several taps: less of the level-2 cache than by TMA, and more of shared memory and instructions."""
    problem = LARGE.replace(dtype="float32", precision="tf32x3", kernel=(4, 4), pads_begin=(1, 1))
    plan = model.wgmma.ClusterPlan(128, 64, 32, 64, 64, 4)
    clocks = []
    for name in ("cuda_wgmma", "cuda_gathered"):
        form = model.form_of(problem, plan, name)
        clocks.append(model.clocks_of_tile(form, form.sections[0], model.accesses(form)[0], 1))
    loaded, copied = clocks
    assert copied["level-2 cache"] < 0.8 * loaded["level-2 cache"]
    assert copied["shared memory"] == loaded["shared memory"] + 128 * 32 * 4 / model.WAVEFRONT
    assert copied["instructions"] > loaded["instructions"] + 128 * 32 / 32 * model.COPIED / model.ISSUED
    assert form.ahead == plan.stages - 2
    # Plans leave room for that cache.
    plans = [found for _, found in model.gathered.ALGORITHM.candidates(problem, model.HOPPER)]
    assert plans
    assert max(model.form_of(problem, one, "cuda_gathered").memory_bytes for one in plans) < 196 << 10


def test_elements_come_later_than_boxes(model):
    """A block whose threads copy the data begins later than one whose data TMA loads."""
    problem = SMALL.replace(data_format="NXC", in_channels=24, kernel=(4, 4), pads_begin=(1, 1))
    plan = model.wgmma.ClusterPlan(64, 64, 64, 64, 64, 3)
    boxes, elements = (model.form_of(problem.replace(in_channels=channels), plan, "cuda_held") for channels in (24, 21))
    assert boxes.lines(boxes.sections[0]) == elements.lines(elements.sections[0])
    assert model.clocks_until_held(boxes, boxes.sections[0]) < model.clocks_until_held(elements, elements.sections[0])


def test_boxes_that_stay_cost_less(model):
    """Where threads copy the data, a block of several tiles of columns waits for them once."""
    problem = td.Problem(1, 1, 21, 21, (70, 70), (16, 16), (8, 8), (1, 1), (0, 0), (568, 568), "float16", "NXC")
    alone = model.wgmma.ClusterPlan(64, 128, 64, 64, 128, 3, cluster_m=4)
    seconds = [model.predicted(problem, replace(alone, turns_n=turns), "cuda_held").seconds for turns in (1, 4)]
    assert seconds[1] < 0.9 * seconds[0]
    assert max(plan.turns_n for _, plan in model.held.ALGORITHM.candidates(problem, model.HOPPER)[:3]) > 1


def test_blocks_of_several_tiles_begin_once(model):
    """Of many waves; as many blocks as a multiprocessor has places for hide each other's latency."""
    problem = td.Problem(1, 1, 56, 1, (360, 640), (9, 9), (3, 3), (1, 1), (4, 4), (1080, 1920), "float16", "NXC")
    plan = model.wgmma.ClusterPlan(192, 16, 64, 64, 16, 3, 1, 2)
    alone, all_places, one_place = (
        model.predicted(problem, replace(plan, turns_m=turns), "cuda_held").seconds for turns in (1, 5, 10)
    )
    assert all_places < 0.9 * alone
    assert all_places < one_place


def test_sums_that_other_warps_store_are_behind_the_next_tile(model):
    """But for those of the last, and the way to shared memory; short sums wait for the warps that store."""
    problem = LARGE.replace(data_format="NXC", out_channels=120, epilogue=td.Epilogue(True))
    plan = model.wgmma.ClusterPlan(128, 128, 64, 64, 128, 3, cluster_m=2, turns_m=8)
    seconds, outputs = [], []
    for storing in (0, 1):
        form = model.form_of(problem, replace(plan, storing=storing), "cuda_wgmma")
        outputs.append(model.clocks_of_output(form, model.accesses(form)[1]))
        seconds.append(model.predicted(problem, form.plan, "cuda_wgmma").seconds)
    together, beside = outputs
    assert together.brought == max(together.issued, together.written) > beside.brought
    assert together.stored == 0 < beside.stored
    saved = (together.brought - beside.brought) / model.CLOCK
    assert 4 * saved < seconds[0] - seconds[1] < 8 * saved
    short = problem.replace(in_channels=8)
    least = problem.batch * 32 * 32 * 4 * 128 / (128 * 128 * model.MULTIPROCESSORS) * beside.stored / model.CLOCK
    assert model.predicted(short, replace(plan, storing=1), "cuda_wgmma").seconds > least


def test_sums_that_are_stored_from_registers_take_no_shared_memory(model):
    """They take fewer instructions than others, and no less time than their bytes."""
    problem = LARGE.replace(data_format="NXC", epilogue=td.Epilogue(True))
    plan = model.wgmma.ClusterPlan(128, 128, 64, 64, 128, 3)
    forms = [model.form_of(problem.replace(out_channels=channels), plan, "cuda_wgmma") for channels in (128, 120)]
    at_once, through = (model.clocks_of_output(form, model.accesses(form)[1]) for form in forms)
    assert at_once.written == 0 < through.written
    assert at_once.issued < through.issued
    assert at_once.brought >= 128 * 128 * 2 / model.STORED_BYTES


def test_blocks_that_share_terms_pay_where_tiles_are_few(model):
    """Of long sums; what they take from each other, and until all are there, counts, and is all that they cost more."""
    problem = td.Problem(1, 1, 4096, 64, (64, 32), (1, 1), (1, 1), (1, 1), (0, 0), (64, 32), "float16", "NXC")
    plan = model.wgmma.ClusterPlan(64, 64, 64, 64, 64, 6)
    short = problem.replace(in_channels=256)
    long, brief = (
        [model.predicted(one, replace(plan, cluster_k=count), "cuda_wgmma").seconds for count in (1, 2)]
        for one in (problem, short)
    )
    assert long[1] < 0.75 * long[0]
    assert brief[1] > brief[0]
    form = model.form_of(problem, replace(plan, cluster_k=2), "cuda_wgmma")
    assert model.taking_clocks(form) > model.MEETING + 64 * 32 * 4 / model.TAKEN[2]
    assert any(one.cluster_k > 1 for _, one in model.wgmma.ALGORITHM.candidates(problem, model.HOPPER)[:10])


def test_means_name_what_limits_those_behind(model, monkeypatch):
    ours = model.Predicted(1.0, "output", 1.0, 1.0)
    monkeypatch.setattr(model, "fastest", lambda problem: ours._replace(seconds=4.0) if problem is SMALL else ours)
    monkeypatch.setattr(model, "of_cudnn", lambda _: 2.0)
    monkeypatch.setattr(model, "of_known_kernels", lambda _: 3.0)
    assert model.means({"float16-NCX": [SMALL, LARGE]}) == [
        "float16-NCX: cuDNN by ours 1.00 over 2 layers, known kernels by ours 1.50; behind cuDNN: 1 by output"
    ]


def test_cudnn_is_predicted_above_its_floors(model):
    seconds = model.of_cudnn(LARGE.replace(data_format="NXC"))
    assert seconds > model.LAUNCH + LARGE.macs / (model.MULTIPROCESSORS * model.CLOCK * 2048)
    assert model.of_cudnn(SMALL.replace(dtype="float32", precision="tf32x3")) > model.of_cudnn(
        SMALL.replace(dtype="float32", precision="tf32")
    )


def test_known_kernels_add_up_taps_or_have_the_columns_of_a_phase(model):
    """Of taps that do not overlap the product of all is no worse; adding up others, and few columns, take time."""
    apart = LARGE.replace(data_format="NXC")
    assert model.LAUNCH < model.of_known_kernels(apart) < 1.2 * model.of_cudnn(apart)
    few = apart.replace(out_channels=1, kernel=(9, 9), strides=(3, 3), pads_begin=(4, 4), output_spatial=(94, 94))
    assert model.of_known_kernels(few) > 1.4 * model.of_cudnn(few)
    # What a launch more reads and writes is the product of all taps, in the type of the data.
    overlapping = apart.replace(kernel=(3, 3), output_spatial=(65, 65))
    rows, columns = 32 * 32 * 32, 9 * 128
    product = model.seconds_of_library(overlapping, [(rows, columns, 256)])
    most = 2 * model.LAUNCH + product + 2 * 2 * rows * columns / model.BANDWIDTH
    assert model.LAUNCH + product < model.of_known_kernels(overlapping) <= most
    depthwise = td.Problem(1, 64, 1, 1, (64, 64), (4, 4), (2, 2), (1, 1), (1, 1), (128, 128), "float16", "NXC")
    assert model.of_known_kernels(depthwise) == model.of_cudnn(depthwise)


def test_the_table(model, tmp_path, monkeypatch, capsys):
    path = tmp_path / "layers.json"
    path.write_text('[{"name": "one", "data": [1, 64, 8, 8], "filter": [1, 64, 32, 2, 2], "strides": [2, 2]}]')
    monkeypatch.setattr("sys.argv", ["cuda-model", str(path), "--types", "float16-NXC", "--plans", "3"])
    model.main()
    head, _, *rows = capsys.readouterr().out.splitlines()
    assert head.split(" | ")[-1] == "limit |"
    assert len({row.split(" | ")[3] for row in rows}) == 3
    assert all(row.startswith("| one | float16 NXC | cuda_tensor |") for row in rows)
