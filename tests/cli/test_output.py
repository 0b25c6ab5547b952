"""What commands print on terminals, in pipes and as JSON; interrupts; clean."""

import contextlib
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.cells import cell_len
from support import artifacts as made
from support.processes import without_torch

import tvm_deconv as td
from tvm_deconv.artifact.manifest import Manifest
from tvm_deconv.cli import main as cli
from tvm_deconv.cli.output import Names, say
from tvm_deconv.cli.tune import ALGORITHMS
from tvm_deconv.compiler import current
from tvm_deconv.problem.words import words

LONG = "decoder/up_blocks.0/upsamplers.0/conv/ConvTranspose"
COMMAND = [sys.executable, "-c", "from tvm_deconv_command import main; main()"]
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run(*arguments, **environment):
    environment = {"COLUMNS": None, **environment}
    return CliRunner(env=environment).invoke(cli.main, [str(argument) for argument in arguments])


def on_terminal(*arguments):
    """The lines of the command on a terminal of 80 columns, without colours."""
    result = run(*arguments, COLUMNS="80", FORCE_COLOR="1")
    assert result.exit_code == 0, result.output
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", result.stdout).splitlines()


@pytest.fixture
def copy(artifacts, tmp_path):
    """Some artifacts, of which one has layers with long names."""
    copy = shutil.copytree(artifacts, tmp_path / "copy")
    made.rewrite(copy, made.PLAIN, layers=[LONG, "up[red]"])
    return copy


@pytest.mark.parametrize(
    ("problem", "said"),
    [
        (td.Problem(1, 1, 64, 64, (80, 80), (2, 2), (2, 2), (1, 1), (0, 0), (160, 160)), "64->64 k2 s2 80x80"),
        (made.PROBLEMS["grouped"], "6->8 g2 k4 s2 6 bias+relu"),
        (made.PROBLEMS["channels last"], "4->6 k2 s2 2x3x3 NXC"),
        (made.PROBLEMS["bfloat16"], "3->5 k3 s2 4x5 n2 bfloat16 bias"),
        (td.from_onnx(("any", 2, 9, (16, 64)), (2, 3, 4, 2), dilations=[2, 1]), "2->3 k4x2 s1 d2x1 9xany nany"),
        (td.from_onnx(("any", 2, 9, (16, 64)), (2, 3, 4, 2)).variants[0], "2->3 k4x2 s1 9xany(16) nany"),
    ],
)
def test_words(problem, said):
    assert words(problem) == said


@pytest.mark.parametrize("arguments", [["inspect"], ["verify"], ["doctor"]])
def test_tables_fit_80_columns(copy, arguments):
    lines = on_terminal(*arguments, copy)
    table = [line for line in lines if str(copy) not in line]
    assert max(map(cell_len, table)) <= 80
    assert "…" not in "".join(lines), "long names are folded, not cut"
    assert made.PLAIN.key not in "".join("".join(table).split())


def test_a_narrow_terminal_says_what_it_leaves_out(copy):
    lines = " ".join(on_terminal("inspect", copy))
    assert "not shown, for want of room: " in lines
    assert "origin" in lines


def test_keys_are_printed_on_demand(copy):
    name = made.file(copy, made.PLAIN, ".json").stem
    for command in ("inspect", "verify"):
        header, *rows = (line.split("\t") for line in run(command, copy, "--keys").stdout.splitlines())
        row = next(row for row in rows if row[0] == f"{LONG}, up[red]")
        assert dict(zip(header, row, strict=True))["artifact"] == name
        assert dict(zip(header, row, strict=True))["problem"] == made.PLAIN.artifact_key
        assert "problem" not in run(command, copy).stdout.splitlines()[0]


def test_keys_in_a_text_are_shapes_in_words():
    dynamic = td.from_onnx(
        ("any", 2, 9, (16, 64)), (2, 3, 4, 2), epilogue=td.Epilogue(True, "clip", minimum=0.0, maximum=6.0)
    )
    for problem in (*made.PROBLEMS.values(), dynamic):
        text = f"adapted from the record of {problem.key}; overruled: {problem.key}, measured on none-such"
        expected = f"adapted from the record of {words(problem)}; overruled: {words(problem)}, measured on none-such"
        assert (Names(False).told(text), Names(True).told(text)) == (expected, text)


def test_sentences_are_wrapped_at_words(monkeypatch, capsys):
    text = " ".join(f"word{number}" for number in range(40))
    for name, value in {"COLUMNS": "80", "FORCE_COLOR": "1"}.items():
        monkeypatch.setenv(name, value)
    say(text)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert [word for line in lines for word in line.split()] == text.split()


def test_pipes_get_one_line_for_each_row(copy):
    made.rewrite(copy, made.PROBLEMS["bias"], layers=["tab\tnew\nline"])
    result = run("inspect", copy)
    header, *rows = result.stdout.splitlines()
    assert len(rows) == len(made.PROBLEMS)
    assert {row.count("\t") for row in rows} == {header.count("\t")}
    assert "tab\\tnew\\nline\t" in result.stdout
    assert "digest" in result.stderr


def test_json_of_commands_on_artifacts(copy, tmp_path):
    made.file(copy, made.PROBLEMS["bias"], ".json").write_text("{}")
    found = json.loads(run("verify", copy, "--json").stdout)
    assert {one["status"] for one in found["artifacts"]} == {"ok"}
    assert len(found["artifacts"]) == len(made.PROBLEMS) - 1
    assert list(found["broken"]) == [made.file(copy, made.PROBLEMS["bias"], ".json").stem]
    found = json.loads(run("doctor", copy, "--json").stdout)
    assert found["facts"]["native"].startswith("x86-64")
    assert any(one["usable"] for one in found["problems"][made.PLAIN.artifact_key])
    empty = tmp_path / "empty"
    empty.mkdir()
    assert json.loads(run("clean", empty, "--json").stdout) == {"directory": str(empty), "removed": []}


def test_json_of_compile(tmp_path, monkeypatch):
    source = tmp_path / "list.json"
    entry = {"name": "one", "data": [1, 4, 5], "filter": [1, 4, 3, 3], "strides": [2]}
    source.write_text(json.dumps([entry]))
    monkeypatch.setattr(current, "compile", lambda *_, **__: [])
    found = json.loads(run("compile", source, "--output", tmp_path / "made", "--json").stdout)
    assert found["sources"][str(source)][0]["name"] == "one"
    assert found["artifacts"] == found["weights"] == []


@pytest.mark.parametrize("group", [[], ["logs"]])
def test_summaries_are_whole(group):
    # Of 80 columns click leaves two empty, but not while it is tested.
    result = CliRunner().invoke(cli.main, [*group, "--help"], terminal_width=78)
    _, _, summaries = result.stdout.partition("Commands:")
    assert summaries.count("\n") > 4
    assert "..." not in summaries


def test_every_command_has_json():
    def commands(group):
        for command in group.commands.values():
            yield from commands(command) if hasattr(command, "commands") else [command]

    for command in commands(cli.main):
        assert any("--json" in option.opts for option in command.params), command.name


def test_help_names_every_algorithm():
    from tvm_deconv.compiler.backends import every_algorithm

    assert [algorithm.name for algorithm in every_algorithm()] == [*ALGORITHMS]
    text = "".join(run("compile", "--help").stdout.split())
    assert ",".join(ALGORITHMS) in text


# --- interrupts ------------------------------------------------------------------------------------------------------


def test_an_interrupt_is_one_word(artifacts, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("tvm_deconv.cli.artifacts.decide", interrupted)
    result = run("inspect", artifacts)
    assert (result.exit_code, result.stdout, result.stderr) == (130, "", "stopped\n")


@pytest.mark.parametrize("imported", ["numpy", "click"])
@pytest.mark.parametrize("number", STOPPING)
def test_an_interrupt_while_the_command_starts(imported, number, tmp_path):
    module = tmp_path / f"{imported}.py"
    module.write_text(f"import os, signal\nos.kill(os.getpid(), signal.{number.name})\n")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(COMMAND, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (128 + number, "", "stopped\n")


def test_an_ignored_hangup_stays_ignored(tmp_path):
    """nohup starts a command so."""
    (tmp_path / "numpy.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGHUP)\n1 / 0\n")
    ignoring = ["env", "--ignore-signal=HUP", *COMMAND]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(ignoring, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stderr


@pytest.mark.parametrize("number", STOPPING)
def test_an_interrupted_compile_leaves_nothing(number, tmp_path):
    """Ctrl-C on a terminal, or another signal to stop, twice as timeout sends it, while a build runs."""
    source = Path(__file__).parents[2] / "examples" / "problems.json"
    made_at, temporary = tmp_path / "new" / "made", tmp_path / "temporary"
    temporary.mkdir()
    command = [*COMMAND, "compile", str(source), "--output", str(made_at), "--jobs", "1", "--target", "x86-64-v3"]
    terminal, side = pty.openpty()
    streams = {"stdout": subprocess.DEVNULL, "stderr": side}
    environment = without_torch() | {"TMPDIR": str(temporary)}
    process = subprocess.Popen(command, env=environment, start_new_session=True, **streams)
    os.close(side)
    said = []
    reader = threading.Thread(target=_read_all, args=(terminal, said))
    reader.start()
    try:
        end = time.monotonic() + 120
        while not list(made_at.glob(".building-*")):
            assert time.monotonic() < end
            assert process.poll() is None
            time.sleep(0.02)
        assert {path.name.partition("-")[0] for path in temporary.iterdir()} == {"tvm_deconv"}
        os.killpg(process.pid, number)
        if number != signal.SIGINT:
            time.sleep(0.02)
            os.killpg(process.pid, number)
        assert process.wait(60) == 128 + number
    finally:
        process.kill()
        process.wait()
        reader.join()
        os.close(terminal)
    text = b"".join(said).decode()
    assert "stopped; 0 artifacts are built, and the same command continues" in text
    assert "Traceback" not in text
    assert list(tmp_path.iterdir()) == [temporary]
    assert not list(temporary.iterdir())


def _read_all(terminal, said):
    with contextlib.suppress(OSError):  # which says that nobody writes to the terminal any more
        while content := os.read(terminal, 10_000):
            said.append(content)


def test_an_interrupted_compile_keeps_what_it_built(tmp_path, monkeypatch):
    source = tmp_path / "list.json"
    source.write_text(json.dumps([{"data": [1, 4, 5], "filter": [1, 4, 3, 3], "strides": [2]}]))

    def compile(problems, _, output, *, on_outcome, **__):
        from tvm_deconv.compiler.requests import Outcome

        (output / "x").mkdir(parents=True)
        on_outcome(Outcome(next(iter(problems)), (), "x86-64-v3", "built", None, None, 0.0))
        raise KeyboardInterrupt

    monkeypatch.setattr(current, "compile", compile)
    result = run("compile", source, "--output", tmp_path / "made")
    assert result.exit_code == 130
    assert result.stderr.endswith("stopped; 1 artifacts are built, and the same command continues\n")
    assert (tmp_path / "made" / "x").is_dir()


# --- clean -----------------------------------------------------------------------------------------------------------


def test_clean(copy):
    whole = {path.name for path in copy.iterdir()}
    library = made.file(copy, made.PLAIN, ".so")
    stale = {f"{library.name[:16]}-x86-64-v4.{'0' * 16}.so", f"{'0' * 16}-x86-64-v3.json"}
    for name in stale:
        (copy / name).write_text("{}")
    broken = made.file(copy, made.PROBLEMS["bias"], ".json")
    made.file(copy, made.PROBLEMS["grouped"], ".so").unlink()
    stale |= {broken.name, made.file(copy, made.PROBLEMS["bias"], ".so").name}
    stale.add(made.file(copy, made.PROBLEMS["grouped"], ".json").name)
    broken.write_text("{}")
    (copy / ".building-dead").mkdir()
    for name, age in ((".unfinished-old", 7200), (".unfinished-new", 0)):
        (copy / name).mkdir()
        os.utime(copy / name, (time.time() - age,) * 2)
    (copy / "notes.txt").write_text("mine")
    newer = made.file(copy, made.PROBLEMS["int8"], ".json")
    newer.write_text(re.sub(r'"format": \d+', '"format": 99', newer.read_text()))
    with pytest.raises(td.ManifestError):
        Manifest.read(newer)
    result = run("clean", copy)
    assert result.exit_code == 0, result.output
    assert set(result.stdout.split()) == stale | {".building-dead", ".unfinished-old"}
    left = {path.name for path in copy.iterdir()} | {".lock"}
    grouped = next(name for name in whole - left if name.endswith(".so") and name not in stale)
    assert left == (whole - stale - {grouped}) | {"notes.txt", ".unfinished-new", ".lock"}
    assert run("verify", copy).exit_code == 1, "that of a newer format still is one that does not read"


def test_clean_spares_running_builds(tmp_path):
    from tvm_deconv.compiler.output import clean, scratch_folder

    with scratch_folder(tmp_path) as scratch:
        assert clean(tmp_path) == []
        assert scratch.is_dir()
