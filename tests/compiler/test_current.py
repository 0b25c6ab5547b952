"""Builds with nothing to do: cheap, without TVM, and never a mistake."""

import json
import shutil
import subprocess
import sys
import time

import pytest
from support.here import compiling_here

import tvm_deconv as td
from tvm_deconv.compiler import build, current, fingerprint, records
from tvm_deconv.targets import get

SMALL = td.Problem.from_onnx((1, 3, 5, 6), (3, 2, 2, 2), strides=(2, 2))
OTHER = SMALL.replace(out_channels=3)
V3 = get("x86-64-v3")

AGAIN = """
import sys, time
import tvm_deconv as td
sys.modules["tvm"] = None  # an import fails
problems = [td.Problem.from_key(key) for key in sys.argv[2:]]
start = time.process_time()
outcomes = td.compile(problems, "x86-64-v3", sys.argv[1])
print([outcome.status for outcome in outcomes], time.process_time() - start)
"""


@pytest.fixture
def chosen(monkeypatch):
    """The problems that schedules are chosen for."""
    seen, real = [], build.choices_for
    monkeypatch.setattr(build, "choices_for", lambda problem, *rest: seen.append(problem) or real(problem, *rest))
    return seen


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A directory with an artifact, to be copied, and the outcome of its build."""
    folder = tmp_path_factory.mktemp("made")
    with compiling_here():
        (outcome,) = td.compile([SMALL], V3.name, folder)
    assert outcome.status == "built"
    return folder, outcome


def statuses(problems, folder, **how):
    return [outcome.status for outcome in td.compile(problems, V3.name, folder, **how)]


@pytest.mark.usefixtures("compiles_here")
def test_nothing_to_do_needs_no_tvm_and_no_time(tmp_path):
    td.compile([SMALL, OTHER], V3.name, tmp_path)
    command = [sys.executable, "-c", AGAIN, str(tmp_path), SMALL.key, OTHER.key]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found, seconds = printed.rsplit(" ", 1)
    assert found == "['current', 'current']"
    assert float(seconds) < 0.5  # of the processor, once a process: the sources are read
    start = time.process_time()
    for _ in range(10):
        assert statuses([SMALL, OTHER], tmp_path) == ["current", "current"]
    assert (time.process_time() - start) / 20 < 0.01


@pytest.mark.usefixtures("compiles_here")
def test_only_what_is_missing_is_chosen_and_built(chosen, tmp_path):
    td.compile([SMALL], V3.name, tmp_path, layers={SMALL: ["a"]})
    chosen.clear()
    heard = []
    outcomes = td.compile([SMALL, OTHER], V3.name, tmp_path, layers={SMALL: ["a"]}, on_outcome=heard.append)
    assert heard == outcomes
    assert [(outcome.problem, outcome.status) for outcome in outcomes] == [(SMALL, "current"), (OTHER, "built")]
    assert chosen == [OTHER]
    assert statuses([SMALL], tmp_path, layers={SMALL: ["b"]}) == ["built"]  # its manifest lacks the name


@pytest.mark.usefixtures("compiles_here")
def test_every_change_is_noticed(made, chosen, monkeypatch, tmp_path):
    folder, logs = tmp_path / "made", tmp_path / "logs"
    shutil.copytree(made[0], folder)
    assert statuses([SMALL], folder) == ["current"]
    assert chosen == []
    # Another log, other algorithms: chosen anew, here with the same result.
    (logs / V3.name).mkdir(parents=True)
    (logs / V3.name / "0000000000000000.jsonl").write_text("no record\n")
    for how in ({"logs": logs}, {"algorithms": [algorithm.name for algorithm in build.backend_of(V3).algorithms]}):
        assert statuses([SMALL], folder, **how) in (["current"], ["built"])
        assert chosen.pop() == SMALL
        assert statuses([SMALL], folder, **how) == ["current"]
        assert chosen == []
    statuses([SMALL], folder)  # as at first: what follows is noticed by itself
    (manifest,) = folder.glob("*.json")
    (library,) = folder.glob("*.so")
    content = library.read_bytes()
    library.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert statuses([SMALL], folder) == ["built"]
    manifest.unlink()
    assert statuses([SMALL], folder) == ["built"]
    monkeypatch.setattr(fingerprint, "source_digest", lambda: "other sources")
    assert statuses([SMALL], folder) == ["built"]


@pytest.mark.usefixtures("compiles_here")
def test_algorithms_of_another_target_are_refused_again(tmp_path):
    """A build for that target too, where this one takes all of its own, leaves no note that says otherwise."""
    variable = td.Problem.from_onnx(("any", 3, 5, 6), (3, 2, 2, 2), strides=(2, 2))
    with pytest.raises(td.BuildError, match="must have no dynamic extents for cuda") as caught:
        td.compile([variable], [V3.name, "cuda"], tmp_path, algorithms=["cuda_generic"])
    assert sorted(outcome.status for outcome in caught.value.outcomes) == ["built", "failed"]
    with pytest.raises(td.ProblemError, match="algorithms="):
        statuses([variable], tmp_path, algorithms=["cuda_generic"])


@pytest.mark.usefixtures("compiles_here")
def test_warnings_about_logs_are_told_again(tmp_path):
    logs = tmp_path / "logs"
    (logs / V3.name).mkdir(parents=True)
    (logs / V3.name / (records._name(SMALL.artifact_key, V3.name))).write_text("no record\n")
    first, again = (td.compile([SMALL], V3.name, tmp_path / "made", logs=logs)[0] for _ in range(2))
    assert (first.status, again.status) == ("built", "current")
    assert again.warnings == first.warnings != ()
    assert again.reason == first.reason != ""


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{", b"\xff", b"[" * 100_000, b'{"NAME": 3}', b'{"NAME": {"inputs": "INPUTS"}}']
)
def test_spoilt_notes_cost_time_only(content, made, chosen, tmp_path):
    folder, outcome = made
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    notes = tmp_path / current.NOTES
    inputs = json.loads(notes.read_text())[outcome.manifest.name]["inputs"]
    notes.write_bytes(content.replace(b"NAME", outcome.manifest.name.encode()).replace(b"INPUTS", inputs.encode()))
    chosen.clear()
    assert statuses([SMALL], tmp_path) == ["current"]
    assert chosen == [SMALL]
    assert statuses([SMALL], tmp_path) == ["current"]
    assert chosen == [SMALL]


@pytest.mark.usefixtures("compiles_here")
def test_a_recipe_in_notes_is_that_of_the_manifest(made, tmp_path):
    """Another build, of other sources, may have replaced the artifact since."""
    folder, outcome = made
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    path = tmp_path / f"{outcome.manifest.name}.json"
    path.write_text(path.read_text().replace(outcome.manifest.recipe, "0" * 64))
    assert statuses([SMALL], tmp_path) == ["built"]
