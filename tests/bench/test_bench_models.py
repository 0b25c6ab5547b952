"""scripts/bench_models.py: its table, and a model in each framework that is installed."""

import importlib
import itertools
import sys
import time
from pathlib import Path

import pytest


@pytest.fixture
def models(monkeypatch):
    """The modules beside the script."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "scripts")
    yield lambda name: importlib.import_module(f"models.{name}")
    for name in [name for name in sys.modules if name.split(".")[0] == "models"]:
        del sys.modules[name]


def test_the_table(models):
    run = models("run")
    rows = [
        run.Timed("dcgan", "pytorch", 1, 3e-3, 1.5e-3, 2.0, 5, 5, 1e-6, 0.75, 3.0),
        run.Timed("unet", "openvino", 2, 1e-3, 2e-3, 0.5, 3, 4, float("nan")),
    ]
    _, _, first, second, _, mean = run.table(rows).splitlines()
    assert first == "| dcgan | pytorch | 1 | 3 | 1.5 | 2.00 | 2.00 | 75.0 % | 5 of 5 |"
    assert second == "| unet | openvino | 2 | 1 | 2 | 0.50 |  |  | 3 of 4, WRONG by nan |"
    assert mean == "Geometric mean 1.00, least 0.50, of 2."


def test_turns_are_taken(models):
    """A form that takes long has one call that does not count, another as many as take 10 ms."""
    run, calls = models("run"), []
    pair = run.Pair(lambda: calls.append("original"), lambda: (calls.append("ours"), time.sleep(0.011)), 1)
    assert min(run._turns(pair, 0.0)) > 0
    turns = [(name, len(list(of))) for name, of in itertools.groupby(calls)]
    assert [name for name, _ in turns] == ["original", "ours"] * run._LEAST_TURNS
    assert {count for name, count in turns if name == "ours"} == {2}
    assert min(count for name, count in turns if name == "original") > 2


def test_models_have_names_of_their_own_and_run(models):
    torch = pytest.importorskip("torch")
    catalogue = models("catalogue")
    names = [model.name for model in catalogue.MODELS]
    assert len(set(names)) == len(names)
    model = next(model for model in catalogue.MODELS if model.name == "fsrcnn")
    with torch.inference_mode():
        assert model.make()(torch.randn(1, 1, 4, 5)).shape == (1, 1, 12, 15)


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["pytorch", "torch.compile", "onnxruntime", "openvino"])
def test_a_model_in_a_framework(models, framework):
    pytest.importorskip("torch")
    found = models("run").timed(models("catalogue").MODELS[3], framework, 1, 0.0)
    assert found.right
    assert found.layers == 1


def test_the_chart(models, tmp_path):
    pytest.importorskip("matplotlib")
    times = {"dcgan": (2e-3, 1e-3, 2.0), "unet": (1e-3, 1e-3, 1.0)}
    rows = [
        models("run").Timed(name, framework, threads, *pair, 1, 1, 0.0)
        for name, pair in times.items() for framework in ("pytorch", "openvino") for threads in (1, 2)
    ]  # fmt: skip
    models("plot").plot(rows, tmp_path / "models.svg")
    text = (tmp_path / "models.svg").read_text()
    for word in ("dcgan", "unet", "pytorch, 1 thread", "openvino, 2 threads"):
        assert f"<!-- {word} -->" in text
    assert "onnxruntime" not in text


def test_rows_in_a_document(models):
    run = models("run")
    rows = [
        run.Timed("dcgan", "pytorch", 1, 3e-3, 1.5e-3, 2.0, 5, 5, 0.0, 0.75, 3.0),
        run.Timed("unet", "pytorch", 2, 1e-3, 1e-3, 1.0, 0, 4, 0.0),
    ]
    document = run.document("a\n<!-- models: begin -->\nold\n<!-- models: end -->\nb", rows)
    table = [
        "| model | 1 thread | 2 threads |",
        "|---|---|---|",
        "| dcgan | 3 / 1.5 = **2.00**; 5 of 5, 75 %, expected 2.00 |  |",
        "| unet |  | 1 / 1 = **1.00**; 0 of 4 |",
    ]
    assert document.splitlines() == [
        "a", "<!-- models: begin -->", "pytorch:", "", *table, "<!-- models: end -->", "b",
    ]  # fmt: skip


def test_a_call_goes_on_with_the_rows_of_a_file(models, monkeypatch, tmp_path):
    """Rows that the file has are not measured again; each new one is there as soon as it is measured."""
    script = importlib.import_module("bench_models")
    run, asked = models("run"), []

    class Process:
        def __init__(self, *_):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def submit(self, _timed, model, framework, threads, *_):
            asked.append(threads)
            if threads == 3:
                raise KeyboardInterrupt
            row = run.Timed(model.name, framework, threads, 2e-3, 1e-3, 2.0, 1, 1, 0.0)
            return type("Future", (), {"result": lambda _: row})()

    monkeypatch.setattr(script, "ProcessPoolExecutor", Process)
    path = tmp_path / "rows.json"
    given = ["", "--models", "fsrcnn", "--frameworks", "pytorch", "--json", str(path), "--threads"]
    for threads, rows in (["1", "3"], 1), (["1", "2"], 2):
        monkeypatch.setattr(sys, "argv", [*given, *threads])
        with pytest.raises((KeyboardInterrupt, SystemExit)):
            script.main()
        assert len(script._read(path)) == rows
    assert asked == [1, 3, 2]
