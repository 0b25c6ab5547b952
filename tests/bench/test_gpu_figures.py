"""Figures of CUDA devices: what is kept of a result, and the tables of it."""

import pytest

import tvm_deconv as td
from tvm_deconv.bench import gpu_figures
from tvm_deconv.bench.gpu import of_type


def row(name, kind, layout, ours, *others):
    problem = td.Problem(1, 1, 8, 8, (4, 4), (2, 2), (2, 2), (1, 1), (0, 0), (8, 8))
    seconds = {"ours": ours} | {f"torch_{number}": other for number, other in enumerate(others)}
    made = {"name": name, "key": of_type(problem, kind, layout).key, "type": kind, "seconds": seconds, "of_floor": 0.5}
    return made | ({"speedup": min(others) / ours} if others else {}) | {"clock_MHz": 1980, "deviation": 1e-7}


@pytest.fixture
def result():
    rows = [
        row("a", "float32", "NCX", 1e-5, 4e-5, 3e-5),
        row("b", "float32", "NCX", 2e-5, 1.5e-5),
        row("a", "float16", "NXC", 1.234567e-6, 5e-6),
        row("b", "float16", "NXC", 1e-6),
        {"name": "c", "key": "k", "type": "float32", "error": "lost"},
    ]
    return {"device": "NVIDIA H100 80GB HBM3", "copy": 2.4e12, "when": "2026-11-27", "summary": [], "rows": rows}


def test_times_of_rows_are_kept_by_device(result, tmp_path):
    path = gpu_figures.write(result, tmp_path)
    assert path.name == "cuda-nvidia-h100-80gb-hbm3.json"
    (kept,) = gpu_figures.read(tmp_path)
    assert (kept["device"], kept["when"]) == (result["device"], "2026-11-27")
    assert [one["name"] for one in kept["rows"]] == ["a", "b", "a", "b"]
    assert kept["rows"][2]["seconds"]["ours"] == 1.235e-6
    assert not {"clock_MHz", "deviation"} & set(kept["rows"][0])
    assert "summary" not in kept


def test_means_are_of_the_faster_format_and_of_what_was_raced(result):
    lines = gpu_figures.means([result]).splitlines()[2:]
    assert lines == [
        "| NVIDIA H100 80GB HBM3 | float32 | `N C *X` | 2 | 1.50 | 0.75 | 1 |",
        "| NVIDIA H100 80GB HBM3 | float16 | `N *X C` | 1 | 4.05 | 4.05 | 0 |",
    ]


def test_layers_have_a_column_for_each_setting(result):
    head, _, *lines = gpu_figures.layers(result).splitlines()
    assert head == "| layer | float32 `N C *X` | float16 `N *X C` |"
    assert lines == ["| a | 10 (3.00) | 1.23 (4.05) |", "| b | 20 (0.75) | 1 |"]
