"""The commands tune and logs."""

import json

import pytest
from click.testing import CliRunner
from support.records import SMALL, V3, record, runs_v3, schedules_of

import tvm_deconv as td
from tvm_deconv import tuning
from tvm_deconv.cli import main as cli
from tvm_deconv.compiler.records import Log, best, read
from tvm_deconv.tuning import remeasure


def command(*arguments):
    return CliRunner().invoke(cli.main, [str(argument) for argument in arguments], env={"COLUMNS": None})


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "small.json"
    layer = {"data": SMALL.data_shape, "filter": SMALL.replace(filter_format="GIOX").filter_shape}
    layer |= {"strides": SMALL.strides, "pads_begin": SMALL.pads_begin, "pads_end": SMALL.pads_begin}
    path.write_text(json.dumps([{"name": "one", **layer}]))
    return path


@runs_v3
@pytest.mark.usefixtures("compiles_here", "searches_here")
def test_tune_prints_what_it_found(source, tmp_path):
    log = tmp_path / "log"
    result = command("tune", source, "--target", V3.name, "--trials", 2, "--logs", log, "--jobs", 1)
    assert result.exit_code == 0, result.output
    assert "2 trials" in result.stderr
    assert "decides" in result.stdout
    assert "one" in result.stdout
    assert len(list(read(V3.name, log))) == 2
    result = command("compile", source, "--target", V3.name, "--output", tmp_path / "made", "--logs", log)
    assert result.exit_code == 0, result.output
    assert [manifest.origin for manifest in td.load(tmp_path / "made").manifests] == ["tuned"]
    assert "the record of this problem" in result.stdout  # it decides, or says that the default is as fast


@runs_v3
@pytest.mark.usefixtures("compiles_here", "searches_here")
def test_tune_tells_the_variants_of_a_layer_apart(tmp_path):
    source, log = tmp_path / "free.json", tmp_path / "log"
    entry = {"data": ["any", 4, "any"], "filter": [1, 4, 3, 5], "strides": [3], "pads_begin": [2], "pads_end": [2]}
    # In tf32 the second has the variants of the first, since CPUs compute both in float32.
    layers = [{"name": "up", **entry}, {"name": "fast", **entry, "precision": "tf32"}]
    source.write_text(json.dumps(layers))
    arguments = "tune", source, "--target", V3.name, "--trials", 1, "--logs", log, "--jobs", 1
    result = command(*arguments)
    assert result.exit_code == 0, result.output
    _, *rows = (line.split("\t")[:2] for line in result.stdout.splitlines())
    assert rows == [["up, fast", f"4->3 k5 s3 any({bucket}) nany"] for bucket in (16, 128, 1024)]
    result = command(*arguments, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)["problems"]
    assert [one["layers"] for one in found] == [["up", "fast"]] * 3
    variants = [f"xany({bucket})" for bucket in (16, 128, 1024)]
    assert all(variant in one["problem"] for variant, one in zip(variants, found, strict=True))


@pytest.mark.parametrize(
    ("measured", "said"),
    [("*.lock", "nothing was measured"), ("one.jsonl", "what was measured is in {}, and the same command continues")],
)
def test_an_interrupt_says_how_to_continue(measured, said, source, tmp_path, monkeypatch):
    log = tmp_path / "new" / "log"

    def interrupted(*_, **__):
        (log / V3.name).mkdir(parents=True)
        (log / V3.name / measured).touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(tuning, "tune", interrupted)
    result = command("tune", source, "--logs", log)
    assert result.exit_code == 130
    assert result.stderr.startswith(f"stopped; {said.format(log)}")
    assert log.parent.exists() == (measured == "one.jsonl")


@runs_v3
@pytest.mark.usefixtures("compiles_here", "searches_here")
def test_compile_with_tune_searches_and_follows_what_it_found_from_then_on(source, tmp_path):
    made = tmp_path / "made"
    result = command("compile", source, "--target", V3.name, "--output", made, "--tune", "--trials", 2, "--jobs", 1)
    assert result.exit_code == 0, result.output
    assert "2 trials" in result.stderr
    assert "1 built" in result.stderr
    assert [manifest.origin for manifest in td.load(made).manifests] == ["tuned"]
    result = command("compile", source, "--target", V3.name, "--output", made)
    assert result.exit_code == 0, result.output
    assert "0 built, 1 up to date" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "budget", "trials"),
    [
        (("--tune",), 10.0, 64),
        (("--tune", "--budget", "1.5m"), 90.0, 64),
        (("--budget", "5"), 5.0, 64),
        (("--trials", "7"), None, 7),
        (("--trials", "7", "--budget", "2h"), 7200.0, 7),
    ],
)
def test_what_a_search_of_compile_may_take(arguments, budget, trials, source, tmp_path, monkeypatch):
    asked = []

    def tune(_, __, count, logs, **options):
        asked.append((options["budget"], count, logs))
        raise KeyboardInterrupt

    monkeypatch.setattr(tuning, "tune", tune)
    assert command("compile", source, "--output", tmp_path / "made", *arguments).exit_code == 130
    assert asked == [(budget, trials, tmp_path / "made" / "tuning")]


@pytest.mark.parametrize("text", ["0", "0s", "1d", "-1", "soon", "1e3"])
def test_a_budget_is_a_time(text, source, tmp_path):
    result = command("tune", source, "--logs", tmp_path / "log", "--budget", text)
    assert result.exit_code == 2
    assert "must be a time such as 90s" in result.stderr


@pytest.mark.parametrize(("option", "value"), [("--rpc-tracker", "9190"), ("--rpc-key", "test")])
def test_servers_of_compile_need_a_search(option, value, source):
    result = command("compile", source, option, value)
    assert result.exit_code == 2
    assert f"{option} needs --tune" in result.stderr


def test_logs_merge_best_and_prune(tmp_path):
    one, two, three = schedules_of(SMALL, 3)
    Log(tmp_path / "a").append(record(schedule=one, seconds=3e-3))
    Log(tmp_path / "b").append(record(schedule=two, seconds=2e-3))
    Log(tmp_path / "b").append(record(schedule=three, seconds=4e-3, algorithm="forgotten"))
    torn = Log(tmp_path / "b").file(SMALL.artifact_key, V3.name)
    torn.write_text(torn.read_text() + "{")
    result = command("logs", "merge", tmp_path / "into", tmp_path / "a", tmp_path / "b")
    assert result.exit_code == 0, result.output
    assert "0 records, 3 with those of" in result.stdout
    assert "b/x86-64-v3" in result.stderr
    assert ":3: skipped" in result.stderr
    result = command("logs", "best", tmp_path / "into", "--keys")
    assert result.exit_code == 0, result.output
    assert SMALL.artifact_key in result.stdout
    (found,) = json.loads(command("logs", "best", tmp_path / "into", "--json").stdout)
    assert (found["problem"], found["algorithm"], found["seconds"]) == (SMALL.artifact_key, two.algorithm, 2e-3)
    assert found["knobs"] == dict(two.knobs)
    assert two.algorithm in result.stdout
    assert "by forgotten: does not replay" in result.stderr
    (tmp_path / "into" / "__pycache__").mkdir()
    result = command("logs", "prune", tmp_path / "into", "--keep", 1)
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines() == [f"{tmp_path / 'into'}, {V3.name}: 2 of 3 records kept"]
    assert best(SMALL, read(V3.name, tmp_path / "into")).schedule == two


@runs_v3
@pytest.mark.usefixtures("searches_here")
def test_logs_remeasure(tmp_path):
    Log(tmp_path).append(record(schedule=schedules_of(SMALL, 2)[1]))
    Log(tmp_path).append(record(target="cuda-sm_90"))
    result = command("logs", "remeasure", tmp_path, "--jobs", 1)
    assert result.exit_code == 0, result.output
    assert "1 problems" in result.stderr
    assert "4->6 k3 s2 5x6" in result.stdout
    assert "default / record" in result.stdout
    assert len(list(read(V3.name, tmp_path))) == 3
    (tmp_path / "empty").mkdir()
    result = command("logs", "remeasure", tmp_path / "empty")
    assert result.exit_code == 1
    assert "no records for" in result.stderr


def test_logs_remeasure_says_what_another_machine_has_to_measure(tmp_path, monkeypatch):
    def renewed(*_, on_problem, **__):
        for status, done in (("renewed", 1), ("left", 2), ("left", 3)):
            on_problem(remeasure.Remeasured(SMALL.key, "x86-64-v4-amx", record(), None, status, (), done, 3))

    monkeypatch.setattr(remeasure, "remeasure", renewed)
    result = command("logs", "remeasure", tmp_path, "--target", "x86-64-v4-amx")
    assert result.exit_code == 0, result.output
    assert [line.split("\t")[-2] for line in result.stdout.splitlines()] == ["status", "renewed", "left", "left"]
    assert "2 of 3 problems are left for a machine that runs x86-64-v4-amx\n" in result.stderr
    found = json.loads(command("logs", "remeasure", tmp_path, "--target", "x86-64-v4-amx", "--json").stdout)
    assert [one["status"] for one in found] == ["renewed", "left", "left"]


def test_an_interrupted_remeasure_prints_what_is_done(tmp_path, monkeypatch):
    def interrupted(*_, on_problem, **__):
        on_problem(remeasure.Remeasured(SMALL.key, V3.name, record(), record(), "measured", (), 1, 2))
        raise KeyboardInterrupt

    monkeypatch.setattr(remeasure, "remeasure", interrupted)
    result = command("logs", "remeasure", tmp_path, "--target", V3.name)
    assert result.exit_code == 130
    assert "4->6 k3 s2 5x6" in result.stdout
    assert "stopped; 1 problems are done, and the same command continues" in result.stderr


@pytest.mark.usefixtures("compiles_here")
def test_compile_says_why_a_record_was_overruled(source, tmp_path):
    dear = schedules_of(SMALL, 10_000)[-1]
    Log(tmp_path / "log").append(record(schedule=dear))
    made = tmp_path / "made"
    result = command("compile", source, "--target", V3.name, "--output", made, "--logs", tmp_path / "log", "--jobs", 1)
    assert result.exit_code == 0, result.output
    assert "the default; overruled by arithmetic: the record of this problem" in result.stdout
    assert "made by other kernels" in result.stdout
