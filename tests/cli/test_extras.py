"""Installations without some packages: which commands they have, and what says how to add the others."""

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import tvm_deconv as td
from tvm_deconv.extras import install

ROOT = Path(__file__).parents[2]

# What the extra cli installs beside numpy and apache-tvm-ffi: click and rich, with what they need.
ONLY_CLI = """
import sys
ALLOWED = sys.stdlib_module_names | {
    "numpy", "tvm_ffi", "typing_extensions", "tvm_deconv", "click", "rich", "pygments", "markdown_it", "mdurl",
    "ml_dtypes",
}
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ALLOWED or name.startswith(("_sysconfigdata", "__editable__")):
            return None
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocker())
"""


def run_only(*arguments):
    """Run the command where only the packages of the extra cli are installed."""
    command = [sys.executable, "-c", f"{ONLY_CLI}\nfrom tvm_deconv.cli.main import main; main()", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | {"CXX": "/none"}, check=False)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["inspect", "{artifacts}"],
        ["verify", "{artifacts}"],
        ["doctor", "{artifacts}"],
        ["bench", "{artifacts}", "--layers", "^$", "--help"],
    ],
)
def test_commands_of_the_extra_cli(arguments, artifacts):
    done = run_only(*(argument.format(artifacts=artifacts) for argument in arguments))
    assert done.returncode == 0, done.stderr


def test_artifacts_are_timed_with_the_extra_cli(artifacts, tmp_path):
    for name in ("plain", "bias"):
        from support import artifacts as made

        for suffix in (".json", ".so"):
            path = made.file(artifacts, made.PROBLEMS[name], suffix)
            (tmp_path / path.name).write_bytes(path.read_bytes())
    done = run_only("bench", tmp_path, "--rounds", 1, "--threads", 1)
    assert done.returncode == 0, done.stderr
    assert "Measured here: " in done.stderr


@pytest.mark.parametrize(
    "arguments", [["tune", "{list}", "--logs", "{folder}/logs"], ["compile", "{list}"], ["overhead"]]
)
def test_other_commands_name_the_extra_compile(arguments, tmp_path):
    places = {"list": ROOT / "examples" / "problems.json", "folder": tmp_path}
    done = run_only(*(argument.format(**places) for argument in arguments))
    assert done.returncode == 1
    assert done.stderr.startswith("Error: ")
    assert done.stderr.endswith(f": {install('compile')}\n")
    assert done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_compile_without_tvm_names_the_extra(tmp_path):
    script = (
        f"{ONLY_CLI}\nimport tvm_deconv as td\n"
        "p = td.from_onnx((1, 2, 5), (2, 3, 4), strides=[2])\n"
        f"try: td.compile([p], output={str(tmp_path / 'made')!r})\n"
        "except td.BuildError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout == f"package='msgspec': must be installed to compile: {install('compile')}\n", done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"url": "file:///a/b%20c", "dir_info": {"editable": True}}, "pip install --editable '/a/b c[onnx]'"),
        ({"url": "file:///a/b", "dir_info": {}}, "pip install '/a/b[onnx]'"),
        (
            {"url": "file:///gone/t-1.0-py3-none-any.whl", "archive_info": {}},
            "pip install 't-1.0-py3-none-any.whl[onnx]'",
        ),
        (
            {"url": "file:///a/t-1.0-py3-none-any.whl", "archive_info": {}},
            "pip install '/a/t-1.0-py3-none-any.whl[onnx]'",
        ),
        (
            {"url": "https://a/t-1.0-py3-none-any.whl"},
            "pip install 'tvm_deconv[onnx] @ https://a/t-1.0-py3-none-any.whl'",
        ),
        (
            {"url": "https://a/b.git", "vcs_info": {"vcs": "git", "commit_id": "1f"}},
            "pip install 'tvm_deconv[onnx] @ git+https://a/b.git@1f'",
        ),
        (None, "pip install 'tvm_deconv[onnx]'"),
    ],
)
def test_how_an_extra_is_added(monkeypatch, record, said):
    class Installed:
        def read_text(self, name):
            assert name == "direct_url.json"
            return record and json.dumps(record)

    class Checkout:
        def read_text(self, _):
            return None

    monkeypatch.setattr(importlib.metadata, "distributions", lambda **_: [Checkout(), Installed()])
    monkeypatch.setattr(Path, "is_file", lambda _: False)
    monkeypatch.setattr(Path, "exists", lambda path: path.parts[1] != "gone")
    assert install("onnx") == said


def test_how_an_extra_is_added_to_sources_that_are_not_installed(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "distributions", lambda **_: [])
    assert install("cli") == f"pip install '{Path(td.__file__).parents[1]}[cli]'"
