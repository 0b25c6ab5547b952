"""``scripts/cuda-model``: predicted times keep what any device keeps, and stand beside those that were measured."""

from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

import pytest

import tvm_deconv as td
from tvm_deconv.compiler.backends import backend_of
from tvm_deconv.compiler.records import Record, Records
from tvm_deconv.targets import CUDA_TARGETS

ROOT = Path(__file__).parents[2]
HOPPER = CUDA_TARGETS["cuda-sm_90a"]
SMALL = td.Problem(1, 1, 256, 128, (32, 32), (2, 2), (2, 2), (1, 1), (0, 0), (64, 64), "float16", "NXC")
LARGE = SMALL.replace(batch=32)


@pytest.fixture(scope="module")
def model():
    loader = SourceFileLoader("cuda_model", str(ROOT / "scripts" / "cuda-model"))
    module = module_from_spec(spec_from_loader(loader.name, loader))
    loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "problem",
    [SMALL, LARGE, LARGE.replace(dtype="float32", precision="tf32x3"), LARGE.replace(dtype="float32", out_channels=1)],
)
def test_a_time_is_above_the_floors(model, problem):
    (found,) = model.rows(problem, HOPPER, 1, Records(HOPPER.name))
    predicted = 1e-6 * float(found[2])
    rate = {"ieee": 1e15 if problem.dtype == "float16" else 67e12, "tf32x3": 495e12}[problem.precision] / 2
    assert predicted >= max(problem.macs / rate, problem.min_bytes / model.BANDWIDTH)
    assert found[3] == ""  # nothing has measured it


def test_the_cheapest_plans_come_first_and_measured_ones_say_so(model):
    plans = model.plans_of(SMALL, HOPPER, 6)
    assert [work for work, *_ in plans] == sorted(work for work, *_ in plans)
    records, (_, name, plan) = Records(HOPPER.name), plans[2]
    conditions = {"threads": 1, "host": "device", "sources": "", "commit": "", "seed": 0, "versions": {}, "when": ""}
    times = {"seconds": 12.34e-6, "spread": 0.0, "runs": 1, "error": ""}
    records.add(
        Record(problem=SMALL.artifact_key, target=HOPPER.name, algorithm=name, knobs=plan.knobs, **times, **conditions)
    )
    found = list(model.rows(SMALL, HOPPER, 6, records))
    assert [row[3] for row in found] == ["", "", "12.3", "", "", ""]
    assert {row[4] for row in found} <= {"memory", "products", "shared memory", "level-2 cache", "latency", "threads"}


def test_plans_cost_what_their_algorithms_say(model):
    """Of every kernel with tiles, and of turned data whose rows are the next positions."""
    second = td.Problem(32, 1, 64, 256, (32, 24), (4, 4), (2, 2), (1, 1), (1, 1), (64, 48), "float16")
    compared = set()
    for problem in (SMALL, second, second.replace(kernel=(3, 3), output_spatial=(63, 47))):
        for algorithm in backend_of(HOPPER).algorithms:
            if algorithm.name in model.FORMS and algorithm.supports(problem, HOPPER):
                work, plan = algorithm.default(problem, HOPPER)
                assert model.cost_of(problem, HOPPER, algorithm, plan) == work, algorithm.name
                compared.add(algorithm.name)
    assert {"cuda_wgmma", "cuda_wgmma_turned", "cuda_held_turned", "cuda_tensor"} <= compared


def test_what_limits_a_plan(model):
    many = LARGE.replace(in_channels=4096, out_channels=1024)
    (found,) = model.rows(many, HOPPER, 1, Records(HOPPER.name))
    assert found[4] == "products"
    few = td.Problem(1, 1, 128, 64, (256, 256), (2, 2), (2, 2), (1, 1), (0, 0), (512, 512), "float16", "NXC")
    assert next(model.rows(few, HOPPER, 1, Records(HOPPER.name)))[4] == "memory"


def test_a_table_of_layers(model, tmp_path, monkeypatch, capsys):
    path = tmp_path / "layers.json"
    path.write_text(
        '[{"name": "one", "data": [1, 24, 10, 10], "filter": [1, 24, 24, 2, 2], "strides": [2, 2],'
        ' "pads_begin": [0, 0], "pads_end": [0, 0], "dilations": [1, 1], "output_padding": [0, 0], "bias": false}]'
    )
    monkeypatch.setattr("sys.argv", ["cuda-model", str(path), "--types", "float16-NXC", "--plans", "3"])
    model.main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + 3
    assert all(line.startswith("| one | float16 NXC | cuda_") for line in lines[2:])
