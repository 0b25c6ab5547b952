"""Kept figures: files that read as they were written, tables of several machines, and the documents that show them."""

import dataclasses
import importlib.util
import json
import re
from pathlib import Path

import pytest

import tvm_deconv as td
from tvm_deconv.bench import figures, floors, peers
from tvm_deconv.bench.layers import Layer, in_type
from tvm_deconv.bench.results import Report, Result, Row
from tvm_deconv.problem.testing import Deviation
from tvm_deconv.targets import Host

ROOT = Path(__file__).parents[2]
PROBLEM = td.Problem(2, 1, 3, 5, (4, 5), (3, 3), (2, 2), (1, 1), (1, 1), (7, 9))
TASK = peers.Task(PROBLEM, 0, Path(), "0123456789abcdef-x86-64-v3")


def result(median):
    return Result(
        median, (0.9 * median, 1.1 * median), 11, Deviation(1e-7, True), "winograd", waited=0.01, preempted=1.5
    )


def row(name, default, chosen, peer, task=TASK):
    results = {"default": result(default), "tvm_deconv": result(chosen), "mnn": peer}
    return Row(Layer(name, task, "x86-64-v3"), results)


@pytest.fixture
def report():
    versions = {"default": "0.1.0", "tvm_deconv": "0.1.0", "mnn": "3.6"}
    rows = [row("one", 4e-3, 1e-3, result(2.00049e-3)), row("two|three", 1e-3, 1e-3, Result(failure="no groups"))]
    host = Host(frozenset(), "a CPU", 2, 4, "a vendor", 25, 1, 2)
    machine = floors.Floors({"float32": 5e9}, 1e10, "")
    return Report(host, "zen3", 1, (0,), 11, machine, versions, rows, 0.001, date="2026-01-02")


def test_a_file_is_named_by_what_was_measured_and_reads_again(report, tmp_path):
    path = figures.write(report, tmp_path / "new")
    assert path == tmp_path / "new" / "zen3-x86-64-v3-ncx-1.json"
    again = figures.read(path.parent)["zen3-x86-64-v3-ncx-1"]
    assert again.chosen.mean == pytest.approx(report.chosen.mean, rel=1e-3)
    assert [row.default_ratio for row in again.rows] == [pytest.approx(0.5, rel=1e-3), None]
    assert again.rows[1].results["mnn"].failure == "no groups"
    assert again.rows[0].results["mnn"].median == 2e-3  # four digits
    figures.write(report, tmp_path / "new" / "held_out")
    assert list(figures.read(path.parent)) == ["zen3-x86-64-v3-ncx-1", "held_out/zen3-x86-64-v3-ncx-1"]
    assert figures.write(again, tmp_path).read_text() == path.read_text()
    assert json.loads(path.read_text())["layers"][0]["results"]["mnn"]["turns"] == 11
    # One line for each layer, so that two versions of a file compare.
    assert sum('"problem"' in line for line in path.read_text().splitlines()) == 2


def test_what_does_not_belong_together_has_no_file(report, tmp_path):
    other = dataclasses.replace(TASK, problem=PROBLEM.replace(data_format="NXC"))
    mixed = dataclasses.replace(report, rows=[*report.rows, row("three", 1.0, 1.0, result(1.0), other)])
    with pytest.raises(
        td.SourceError, match="x86-64-v3-ncx, x86-64-v3-nxc': must be of one target, one layout and one type"
    ):
        figures.write(mixed, tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", '{"format": 2}', '{"format": 9}'])
def test_a_file_that_does_not_read(text, tmp_path):
    (tmp_path / "zen3.json").write_text(text)
    with pytest.raises(td.SourceError, match=r"zen3\.json.*must be what `bench --figures` writes"):
        figures.read(tmp_path)


def test_tables(report):
    second = dataclasses.replace(report, microarchitecture="zen4", rows=report.rows[:1])
    assert figures.machines({"a": report, "held_out/b": second}).splitlines()[2:] == [
        "| zen3 | a CPU, a vendor family 25 model 1 | x86-64-v3 | `N C *X` | 1 | 2026-01-02 | 2 "
        "| 0.50 | 0.50 | 2.00 | 2.00 |",
        "| zen4 | a CPU, a vendor family 25 model 1 | x86-64-v3 | `N C *X` | 1 | 2026-01-02 | held_out 1 "
        "| 0.50 | 0.50 | 2.00 | 2.00 |",
    ]
    assert list(figures.of_main_list({"a": report, "held_out/b": second, "types/c": second})) == ["a"]
    assert figures.some_layers(report, ["two|three", "one"]).splitlines()[2:] == [
        "| two/three | 1 | - | - |",
        "| one | 1 | 2 | 2.00 |",
    ]
    assert figures.ratios([report, second]).splitlines()[2:] == [
        "| one | 0.50 / 2.00 | 0.50 / 2.00 |",
        "| two/three | - / - | - |",
    ]
    first, last = figures.layers_table(report).splitlines()[2:]
    assert first.startswith("| one | winograd | 4 | 1 | mnn | 2 | 0.50 | 2.00 |")
    assert last.startswith("| two/three | winograd | 1 | 1 | - | - | - | - |")
    page = figures.page({"zen3-x86-64-v3-ncx-1": report, "another": second})
    assert [line for line in page.splitlines() if line.startswith("## ")] == [
        "## All machines",
        "## zen3-x86-64-v3-ncx-1",
        "## another",
    ]
    lines = [line for line in page.splitlines() if line.startswith("|")]
    assert all(line.endswith("|") for line in lines)
    assert "family 25, model 1, stepping 2" in page


def test_layers_in_low_precision(report):
    """Those of reports with times in float32: these and the best peer by ours, their means, the largest errors."""
    task = dataclasses.replace(TASK, problem=PROBLEM.replace(dtype="bfloat16"))
    rows = [row("one", 4e-3, 1e-3, result(3e-3), task), row("two", 1e-3, 1e-3, Result(failure="no groups"), task)]
    for timed, seconds in zip(rows, (2e-3, 8e-3), strict=True):
        timed.results["float32"] = result(seconds)
    rows[1].results["tvm_deconv"] = dataclasses.replace(result(1e-3), deviation=Deviation(4e-3, True))
    timed = dataclasses.replace(report, rows=rows)
    table, elsewhere = figures.low_precision(
        [report, timed, dataclasses.replace(timed, microarchitecture="zen4")]
    ).split("zen4")
    assert elsewhere == table.rstrip().removeprefix("zen3")
    assert table.rstrip().splitlines() == [
        "zen3, x86-64-v3:",
        "",
        "| layer | `N C *X`, bfloat16 |",
        "|---|---:|",
        "| one | 2.00 / 3.00 |",
        "| two | 8.00 / - |",
        "| geometric mean | 4.00 / 3.00 |",
        "| error | 4.0e-03 |",
        "| error of the best peers | 1.0e-07 |",
    ]


def test_floors_of_words(report):
    """Of twice the rate of float32 in bfloat16, and four times in bytes; a peer that fails has no part."""
    measured = floors.Floors(fma={"float32": PROBLEM.macs / 1e-3}, copy=1e9)
    tasks = [dataclasses.replace(TASK, problem=in_type(PROBLEM, name)) for name in ("bfloat16", "uint8.int8.uint8")]
    timed = [
        dataclasses.replace(report, rows=[row("one", 4e-3, 1e-3, other, task)], floors=measured)
        for task, other in zip(tasks, (result(2e-3), Result(failure="no groups")), strict=True)
    ]
    copies = [round(task.problem.min_bytes / 1e9 / 1e-3 * 100) for task in tasks]
    assert figures.word_floors(timed).splitlines() == [
        "| layer | `N C *X`, bfloat16 | `N C *X`, uint8.int8.uint8 |",
        "|---|---:|---:|",
        f"| one | 50 / 25 ({copies[0]}) | 25 / - ({copies[1]}) |",
    ]


def test_a_block_of_a_document():
    document = "a\n<!-- machines: begin -->\nold\n<!-- machines: end -->\nb\n"
    changed = figures.replaced(document, "machines", "new\nones")
    assert changed == "a\n<!-- machines: begin -->\nnew\nones\n<!-- machines: end -->\nb\n"
    with pytest.raises(td.SourceError, match="must have the marks of this block"):
        figures.replaced("a", "machines", "new")


def test_documents_show_what_the_files_say():
    """`scripts/figures.py --write` puts this right."""
    location = ROOT / "scripts" / "figures.py"
    spec = importlib.util.spec_from_file_location("figures_script", location)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    documents = script.documents()
    assert len(documents) == 4
    for path, expected in documents.items():
        assert path.read_text(encoding="utf-8") == expected, path.name
    readme, performance = documents[ROOT / "README.md"], documents[ROOT / "docs" / "performance.md"]
    of_other_lists = re.compile(r"\| (held_out|types) \d")
    assert set(of_other_lists.findall(performance)) == {"held_out", "types"}
    assert not of_other_lists.search(readme)
