"""Building: what is written, what is left alone, what fails alone, what never loads."""

import dataclasses
import os
import signal
import subprocess
import sys
import textwrap
import time

import msgspec
import pytest
from support import records as made
from support.processes import without_torch
from support.records import VERDICT, ZEN3, run
from support.strategies import operands
from support.tolerances import assert_close

import tvm_deconv as td
from tvm_deconv.artifact.manifest import Manifest, stem
from tvm_deconv.compiler import build, fingerprint, records, toolchain
from tvm_deconv.compiler.launcher import find_compiler
from tvm_deconv.compiler.process import Limits
from tvm_deconv.compiler.records import Schedule
from tvm_deconv.compiler.selection import space
from tvm_deconv.errors import BuildError, CompilerNotFound
from tvm_deconv.targets import CPU_TARGETS, detect_host, get, microarchitecture, supported

SMALL = td.Problem(1, 1, 3, 2, (4, 5), (3, 3), (2, 2), (1, 1), (1, 1), (7, 9))
OTHER = SMALL.replace(out_channels=5)
V3 = CPU_TARGETS["x86-64-v3"]


def files(directory):
    return {path.name: path.stat().st_mtime_ns for path in directory.iterdir()}


def test_export_describes_what_it_wrote(tmp_path):
    manifest = build.export(SMALL, V3, tmp_path, layers=("a", "b"))
    assert Manifest.read(tmp_path / f"{manifest.name}.json") == manifest
    assert manifest.layers == ("a", "b")
    assert manifest.macs == SMALL.macs
    assert set(manifest.features) == V3.features
    assert {"tvm_deconv", "apache-tvm", "apache-tvm-ffi", "llvm", "cc"} <= set(manifest.versions)
    assert manifest.knobs["channels"] >= 1
    run(SMALL, tmp_path)


def test_compile_builds_each_artifact_once_and_leaves_it_alone(tmp_path):
    grouped = SMALL.replace(filter_format="GIOX")  # the same artifact: a filter's format is not part of it
    heard = []
    outcomes = td.compile(
        [SMALL, OTHER, grouped], "x86-64-v3", tmp_path, layers={SMALL: ["s"], OTHER: ["o"]}, on_outcome=heard.append
    )
    assert sorted(o.status for o in outcomes) == ["built", "built"]
    assert outcomes == heard
    before = files(tmp_path)
    assert [o.status for o in td.compile([SMALL, OTHER], "x86-64-v3", tmp_path)] == ["current", "current"]
    assert files(tmp_path) == before
    for problem in (SMALL, OTHER, grouped):
        run(problem, tmp_path)


@pytest.mark.usefixtures("compiles_here")
def test_a_changed_library_or_recipe_is_built_again(tmp_path, monkeypatch):
    manifest = build.export(SMALL, V3, tmp_path)
    library = tmp_path / manifest.library
    content = library.read_bytes()
    library.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert [o.status for o in td.compile([SMALL], "x86-64-v3", tmp_path)] == ["built"]
    run(SMALL, tmp_path)
    monkeypatch.setattr(fingerprint, "source_digest", lambda: "other sources")
    assert [o.status for o in td.compile([SMALL], "x86-64-v3", tmp_path)] == ["built"]


def host_microarchitecture():
    found = microarchitecture(detect_host())
    return found if found is not None and found.level in {t.name for t in supported(detect_host().features)} else None


@pytest.mark.skipif(not host_microarchitecture(), reason="archspec knows no microarchitecture of this CPU")
@pytest.mark.usefixtures("compiles_here")
def test_a_directory_for_levels_and_microarchitectures(tmp_path):
    """The one with the most flags is taken, without archspec, and the cap excludes it."""
    own = host_microarchitecture()
    names = [own.level, own.name, "knl"]
    outcomes = td.compile([SMALL], [own.name, *names, own.name], tmp_path)
    assert sorted(outcome.target for outcome in outcomes) == sorted(names)
    manifest = next(outcome.manifest for outcome in outcomes if outcome.target == own.name)
    assert set(manifest.features) == own.features
    script = (
        "import sys, numpy as np, tvm_deconv as td\n"
        "sys.modules['archspec'] = None\n"
        "library, p = td.load(sys.argv[1]), td.Problem.from_key(sys.argv[2])\n"
        "first, second, *_ = library.select(p)\n"
        "filter, data = np.ones(p.filter_shape, np.float32), np.ones(p.data_shape, np.float32)\n"
        "layer = library.bind(p, filter)\n"
        "np.testing.assert_allclose(layer(data), td.reference(p, data, filter), rtol=1e-5)\n"
        "print(first.manifest.target, second.manifest.target, layer.manifest.target)\n"
    )

    def chosen(**environment):
        command = [sys.executable, "-c", script, str(tmp_path), SMALL.key]
        done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    assert chosen() == [own.name, own.level, own.name]
    assert chosen(TVM_DECONV_MAX_TARGET=own.level)[::2] == [own.level] * 2


@pytest.mark.usefixtures("compiles_here")
def test_microarchitectures_follow_the_logs_of_their_level(tmp_path):
    """Their own records come first, problem by problem."""
    znver4, log = get("znver4"), records.Log(tmp_path / "logs")
    zen4 = msgspec.structs.replace(ZEN3, microarchitecture="zen4")

    def plan(problem, target, number):
        options = [*space(problem, get(target), algorithms=["direct_rows"])]
        return dict(options[number].schedule.knobs)

    def tried(problem, target, number):
        return records.Record(
            problem=problem.artifact_key, target=target, algorithm="direct_rows", knobs=plan(problem, target, number),
            seconds=1.0, spread=0.0, runs=1, error="", threads=1, host=zen4,
            commit="", seed=0, versions={}, when="2026-01-01T00:00:00", **VERDICT,
        )  # fmt: skip

    log.merge([tried(SMALL, "x86-64-v4", 0), tried(OTHER, "x86-64-v4", 0), tried(OTHER, "znver4", 1)])
    found = build._records(znver4, log.root)
    assert {r.problem: r.target for r in found} == {SMALL.artifact_key: "x86-64-v4", OTHER.artifact_key: "znver4"}
    outcomes = td.compile([SMALL, OTHER], "znver4", tmp_path / "out", logs=log.root)
    made = {outcome.problem: outcome.manifest for outcome in outcomes}
    assert {m.origin for m in made.values()} == {"tuned"}
    assert made[SMALL].knobs == plan(SMALL, "x86-64-v4", 0)
    assert made[OTHER].knobs == plan(OTHER, "znver4", 1) != plan(OTHER, "znver4", 0)


def test_a_microarchitecture_that_llvm_does_not_know(tmp_path):
    unknown = dataclasses.replace(V3, name="znver99", mcpu="znver99")
    with pytest.raises(BuildError, match=r"^target='znver99': must be a CPU that LLVM [0-9]+ knows$"):
        build.export(SMALL, unknown, tmp_path)
    assert not list(tmp_path.glob("*.json"))


def fail_to_link(problem, how, tmp_path, monkeypatch):
    """Make the compiler one that does `how` for the artifact of `problem`, known by its name."""
    driver = tmp_path / "cc"
    victim = stem(problem.artifact_key, V3.name)
    driver.write_text(f'#!/bin/sh\ncase "$*" in *{victim}*) {how};; esac\nexec {find_compiler()} "$@"\n')
    driver.chmod(0o755)
    monkeypatch.setenv("CXX", str(driver))


def test_one_that_fails_does_not_stop_the_others(tmp_path, monkeypatch):
    fail_to_link(OTHER, "exit 1", tmp_path, monkeypatch)
    directory = tmp_path / "out"
    with pytest.raises(BuildError, match=r"1 of 2.*did not build") as caught:
        td.compile([OTHER, SMALL], "x86-64-v3", directory)
    assert sorted(o.status for o in caught.value.outcomes) == ["built", "failed"]
    assert OTHER.key in str(caught.value)
    run(SMALL, directory)
    with pytest.raises(td.NoArtifactError):
        run(OTHER, directory)


def test_one_that_kills_its_process_fails_alone(tmp_path, monkeypatch):
    fail_to_link(OTHER, "kill -9 $PPID", tmp_path, monkeypatch)
    directory = tmp_path / "out"
    with pytest.raises(BuildError, match="the compiler: its process ended with signal SIGKILL") as caught:
        td.compile([OTHER, SMALL], "x86-64-v3", directory)
    assert {o.problem: o.status for o in caught.value.outcomes} == {OTHER: "failed", SMALL: "built"}
    run(SMALL, directory)


@pytest.mark.parametrize("problems", [[SMALL.key], [None], None, SMALL])
def test_what_is_no_problem_is_refused(problems, tmp_path):
    with pytest.raises(td.ProblemError, match="problems="):
        td.compile(problems, "x86-64-v3", tmp_path)


@pytest.mark.parametrize("target", ["x86-64-v9", "", [], ["native", "sparc"], None, 5])
def test_unknown_targets_are_refused(target, tmp_path):
    with pytest.raises(td.ProblemError, match="target="):
        td.compile([SMALL], target, tmp_path)


@pytest.mark.parametrize("layers", [{SMALL: 5}, {SMALL: [5]}, {SMALL: "up"}, {SMALL: None}, [SMALL]])
def test_layers_have_several_names(layers, tmp_path):
    with pytest.raises(
        td.ProblemError, match=r"layers=.*: must be a (sequence of names for each|mapping from) problem"
    ):
        td.compile([SMALL], "x86-64-v3", tmp_path, layers=layers)


@pytest.mark.parametrize("change", [{"output": None}, {"output": b"out"}, {"logs": 5}, {"algorithms": 5}])
def test_arguments_of_another_type_are_refused(change, tmp_path):
    (name,) = change
    with pytest.raises(td.ProblemError, match=f"^{name}=.*: must be a (path|sequence of names)"):
        td.compile([SMALL], "x86-64-v3", **{"output": tmp_path} | change)


@pytest.mark.parametrize("jobs", [0, -1, 1.5, "two", True])
def test_processes_are_a_number(jobs, tmp_path):
    with pytest.raises(td.ProblemError, match="jobs="):
        td.compile([SMALL], "x86-64-v3", tmp_path, jobs=jobs)


def test_a_missing_compiler_is_said_in_one_sentence(tmp_path, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CompilerNotFound, match=r"install g\+\+ or set CXX") as caught:
        td.compile([SMALL], "x86-64-v3", tmp_path)
    assert "\n" not in str(caught.value)


def test_a_compiler_that_fails_leaves_nothing(tmp_path, monkeypatch):
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\necho no such luck >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    with pytest.raises(BuildError, match="no such luck"):
        build.export(SMALL, V3, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == [".lock"]


def test_a_killed_build_leaves_nothing_loadable(tmp_path):
    program = textwrap.dedent(
        f"""
        from tvm_deconv.compiler.build import export
        from tvm_deconv.problem import Problem
        from tvm_deconv.targets import CPU_TARGETS, detect_host, get, microarchitecture, supported
        print("ready", flush=True)
        for channels in range(1, 100):
            problem = Problem.from_key({SMALL.key!r}).replace(out_channels=channels)
            export(problem, CPU_TARGETS["x86-64-v3"], {str(tmp_path)!r})
        """
    )
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, env=without_torch(), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        while not list(tmp_path.glob("*.json")):
            time.sleep(0.05)
        time.sleep(0.3)
        os.kill(process.pid, signal.SIGKILL)
    library = td.load(tmp_path)
    complete = [path.stem for path in tmp_path.glob("*.json")]
    assert complete
    for channels in range(1, 100):
        problem = SMALL.replace(out_channels=channels)
        data, weights, bias = operands(problem, 0)
        try:
            layer = library.bind(problem, weights, bias)
        except td.NoArtifactError:
            continue
        assert_close(layer(data), td.reference(problem, data, weights))
        complete.remove(library.select(problem)[0].name)
    assert complete == []


def test_a_script_without_a_guard_compiles(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import tvm_deconv as td\n"
        f"td.compile([td.Problem.from_key({SMALL.key!r})], target='x86-64-v3', output={str(tmp_path / 'out')!r})\n"
    )
    subprocess.run([sys.executable, script], env=without_torch(), check=True, cwd=tmp_path)
    run(SMALL, tmp_path / "out")


WIDE = td.Problem(1, 1, 32, 32, (12, 12), (4, 4), (2, 2), (1, 1), (1, 1), (24, 24))


@pytest.mark.usefixtures("compiles_here")
def test_algorithms_are_excluded_by_naming_the_others(tmp_path):
    (first,) = td.compile([WIDE], "x86-64-v3", tmp_path)
    assert first.manifest.algorithm == "winograd"
    others = ["direct_rows", "matrix"]
    (second,) = td.compile([WIDE], "x86-64-v3", tmp_path, algorithms=others)
    assert (second.status, second.manifest.algorithm in others) == ("built", True)
    (again,) = td.compile([WIDE], "x86-64-v3", tmp_path, algorithms=reversed(others))
    assert again.status == "current"
    run(WIDE, tmp_path)


@pytest.mark.usefixtures("compiles_here")
@pytest.mark.parametrize(
    ("problem", "algorithms", "rule"),
    [
        (WIDE, ["winograd", "fft"], "algorithm='fft': must be one of winograd, amx, amx_rows, amx_winograd, dot"),
        (WIDE, [], r"algorithms=\(\): must name at least one of winograd"),
        (WIDE.replace(kernel=(2, 2)), ["winograd"], "algorithms='winograd': admit no algorithm for n1"),
        (
            WIDE,
            ["cuda_narrow", "cuda_held"],
            r"algorithms=\('cuda_narrow', 'cuda_held'\): must name at least one of winograd, .*, those for x86-64-v3$",
        ),
    ],
)
def test_algorithms_that_do_not_serve_are_refused(problem, algorithms, rule, tmp_path):
    with pytest.raises(td.DeconvError, match=rule):
        td.compile([problem], "x86-64-v3", tmp_path, algorithms=algorithms)


@pytest.mark.usefixtures("compiles_here")
@pytest.mark.parametrize("knobs", [{"positions": 7}, {"positions": 1 << 40}, {"height": 1 << 62}])
def test_a_record_of_no_plan_worth_trying_is_not_built(tmp_path, knobs):
    """Logs may come from anywhere, and some plans would keep the compiler busy for hours."""
    log, (schedule, *_) = records.Log(tmp_path / "logs"), space(SMALL, V3, algorithms=["direct_rows"])
    schedule = Schedule.of("direct_rows", dict(schedule.schedule.knobs) | knobs)
    log.append(made.record(SMALL, schedule, host=records.Cpu.of(detect_host()), **VERDICT))
    (outcome,) = td.compile([SMALL], V3.name, tmp_path / "out", logs=log.root)
    assert outcome.manifest.origin == "default"
    (warning,) = outcome.warnings
    assert "not built by the record of this problem: knobs=" in warning
    assert warning.endswith("are of no plan of direct_rows worth trying here")
    run(SMALL, tmp_path / "out")


def test_builds_have_limits(tmp_path, monkeypatch):
    """Of processor time and memory; of what exceeds them, the others are built nevertheless."""
    monkeypatch.setattr(build, "BUILD", Limits(60, 1 << 20))  # less than Python itself needs
    with pytest.raises(BuildError, match=r"2 of 2': did not build:\n.*: the compiler: its process ended .*"):
        td.compile([SMALL, OTHER], V3.name, tmp_path)


def test_a_compiler_that_does_not_end(monkeypatch):
    monkeypatch.setattr(toolchain, "_PATIENCE_SECONDS", 0.2)
    with pytest.raises(BuildError, match=r"^cc='sleep': it does not end within 0.2 s$"):
        toolchain.run_compiler("cc", ["sleep", "60"], "it ")
