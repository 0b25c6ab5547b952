"""Names may hold any character: what a command prints of them never moves a cursor or sets a title."""

import json
import re
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner
from support import artifacts as made
from support.keys import write_keys

from tvm_deconv.cli import main as cli
from tvm_deconv.compiler import current
from tvm_deconv.compiler.requests import Outcome

#: Sets the title, clears the screen, rings, goes back, turns the text around, is a control sequence in one character.
EVIL = "\x1b]0;mine\x07\x1b[2J\x08\r\u202e\x9b2Kup"
#: Colours and weights of rich, and what its bars do on their line.
_OURS = re.compile(r"\x1b\[(?:[0-9;]*m|\?25[lh]|1A|2K)|\r")


def said(*arguments, terminal=True, code=0):
    """What a command prints, of which all can be shown but the ends of lines, tabs, and what rich adds."""
    environment = {"COLUMNS": "80", "FORCE_COLOR": "1"} if terminal else {"COLUMNS": None, "FORCE_COLOR": None}
    result = CliRunner(env=environment).invoke(cli.main, list(map(str, arguments)))
    assert result.exit_code == code, result.output
    text = result.stdout + result.stderr
    left = _OURS.sub("", text) if terminal else text
    assert all(c.isprintable() for c in left if c not in "\n\t"), ascii(left)
    return "".join(left.split())


@pytest.fixture
def evil(artifacts, tmp_path):
    """A directory with such a name, of artifacts whose layers have such names."""
    folder = tmp_path / EVIL
    shutil.copytree(artifacts, folder)
    made.rewrite(folder, made.PLAIN, layers=[EVIL])
    return folder


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("command", ["inspect", "verify", "doctor"])
def test_manifests(evil, command, terminal):
    text = said(command, evil, terminal=terminal)
    assert r"\x1b]0;mine\x07\x1b[2J" in text
    assert r"\u202e" in text


@pytest.mark.parametrize("terminal", [True, False])
def test_broken_artifacts(evil, terminal):
    made.file(evil, made.PLAIN, ".json").write_text(json.dumps({"format": EVIL}))
    for command in ("inspect", "verify", "doctor"):
        assert r"\x1b]0;mine" in said(command, evil, terminal=terminal, code=1)


def test_files(evil, tmp_path):
    private, public = write_keys(evil, EVIL)
    assert r"\x1b]0;mine" in said("sign", evil, "--key", private)
    assert r"\x1b]0;mine" in said("pack", evil, "-o", tmp_path / f"{EVIL}.tdl")
    assert r"\x1b]0;mine" in said("verify", tmp_path / f"{EVIL}.tdl", "--key", public)
    (evil / f"{'0' * 16}-x86-64-v3.json").write_text("{}")
    assert r"\x1b]0;mine" in said("clean", evil)


@pytest.mark.parametrize("terminal", [True, False])
def test_errors(tmp_path, terminal):
    """Of wrong usage, of files that do not read, of files that cannot be written."""
    absent = tmp_path / EVIL
    assert "\\x1b]0;mine" in said("inspect", absent, terminal=terminal, code=2).replace("\\\\", "\\")
    assert r"\x1b]0;mine" in said("compile", f"{absent}.onnx", terminal=terminal, code=1)
    absent.write_text("")
    made_below = absent / "below"
    source = tmp_path / "list.json"
    source.write_text(json.dumps([{"data": [1, 4, 5], "filter": [1, 4, 3, 3], "strides": [2]}]))
    assert "mine" in said("compile", source, "-o", made_below, "--jobs", "1", terminal=terminal, code=1)
    assert "mine" in said(EVIL, terminal=terminal, code=2)
    assert "mine" in said("inspect", tmp_path, f"--{EVIL}", terminal=terminal, code=2)


@pytest.mark.parametrize("terminal", [True, False])
def test_sources(tmp_path, monkeypatch, terminal):
    source = tmp_path / f"{EVIL}.json"
    entry = {"name": EVIL, "data": [1, 4, 5], "filter": [1, 4, 3, 3], "strides": [2]}
    source.write_text(json.dumps([entry, {**entry, EVIL: 1, "out_channel": 3}]))

    def fails(*_, layers, on_outcome, **__):
        for problem, names in layers.items():
            on_outcome(Outcome(problem, tuple(names), "x86-64-v3", "failed", None, EVIL, 0.0, warnings=(EVIL,)))

    monkeypatch.setattr(current, "compile", fails)
    text = said("compile", source, "-o", tmp_path / EVIL, terminal=terminal, code=1)
    assert text.count(r"\x1b]0;mine\x07\x1b[2J") >= 5


@pytest.mark.parametrize("terminal", [True, False])
def test_logs(tmp_path, terminal):
    other = tmp_path / EVIL / "x86-64-v3"
    other.mkdir(parents=True)
    (other / f"{EVIL}.jsonl").write_text(json.dumps({"problem": EVIL}) + "\n" + EVIL + "\n")
    for command in ("best", "prune"):
        assert r"\x1b]0;mine" in said("logs", command, other.parent, terminal=terminal)
    assert r"\x1b]0;mine" in said("logs", "merge", tmp_path / "new", other.parent, terminal=terminal)


def test_tables_keep_lines_of_a_cell(capsys, monkeypatch):
    """A reason of several lines stays that on a terminal."""
    from tvm_deconv.cli.output import Column, Table

    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("FORCE_COLOR", "1")
    table = Table("", [Column("reason")])
    table.add("one\ntwo\x1b")
    table.show()
    assert [line.strip() for line in _OURS.sub("", capsys.readouterr().out).splitlines()][-3:-1] == ["one", "two\\x1b"]


def test_no_command_prints_around_it():
    """All goes through `cli.output`, which escapes."""
    folder = Path(cli.__file__).parent
    for path in folder.glob("*.py"):
        if path.name != "output.py":
            assert not re.search(r"\bclick\.(secho|echo)\(|\bprint\(", path.read_text()), path.name
