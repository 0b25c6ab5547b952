"""The benchmark of what is not a kernel: that it measures, not how much."""

import json
import math

from click.testing import CliRunner

from tvm_deconv.bench import overhead
from tvm_deconv.cli.main import main
from tvm_deconv.runtime.threads import get_num_threads


def test_overhead(monkeypatch):
    monkeypatch.setattr(overhead, "measure", lambda honest=overhead.measure: honest(rounds=1))
    before = get_num_threads()
    done = CliRunner().invoke(main, ["overhead", "--json"])
    assert done.exit_code == 0, done.output
    figures = {figure["name"]: figure for figure in json.loads(done.stdout)}
    assert len(figures) == 12
    assert all(math.isfinite(figure["value"]) and figure["unit"] in ("ms", "us") for figure in figures.values())
    assert all(figure["value"] > 0.1 for figure in figures.values() if figure["unit"] == "ms")
    assert before in (None, get_num_threads())
    assert "call of a Layer with out" in CliRunner().invoke(main, ["overhead"]).stdout


def test_a_hundred_artifacts_are_loaded(tmp_path):
    """What is timed is a directory that loads whole."""
    manifest = overhead.export(overhead._SMALL, overhead.native(), tmp_path)
    overhead._multiply(manifest, tmp_path / "many")
    library = overhead.load(tmp_path / "many")
    assert len(library.manifests) == 100
    assert not library.broken
