"""The pinned files are what pyproject.toml asks for, complete with hashes; nothing in them names an index."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PINNED = {"run.txt": [], "compile.txt": ["compile", "onnx"], "dev.txt": ["dev"]}


def wanted(extras):
    """Yield the requirements of the project with extras, those of extras within extras too."""
    yield from map(Requirement, PROJECT["dependencies"])
    for extra in extras:
        for requirement in map(Requirement, PROJECT["optional-dependencies"][extra]):
            if canonicalize_name(requirement.name) == canonicalize_name(PROJECT["name"]):
                yield from wanted(sorted(requirement.extras))
            else:
                yield requirement


def pinned(name):
    """The entries of a file of requirements, as (requirement, number of hashes)."""
    text = (ROOT / "requirements" / name).read_text(encoding="utf-8")
    joined = re.sub(r"^\s*#.*\n", "", text, flags=re.M).replace("\\\n", "")
    return [(Requirement(line.split("--hash")[0]), line.count("--hash=sha256:")) for line in joined.splitlines()]


@pytest.mark.parametrize(("name", "extras"), PINNED.items())
def test_pinned_files_are_those_of_the_project(name, extras):
    found = pinned(name)
    for requirement in wanted(extras):
        if requirement.marker and not requirement.marker.evaluate():
            continue
        fits = [
            each
            for each, _ in found
            if canonicalize_name(each.name) == canonicalize_name(requirement.name)
            and (each.marker is None or each.marker.evaluate())
        ]
        assert len(fits) == 1, requirement
        (version,) = fits[0].specifier
        assert version.operator == "=="
        assert requirement.specifier.contains(version.version), f"{requirement}: run scripts/requirements"


@pytest.mark.parametrize("name", PINNED)
def test_every_pin_has_hashes(name):
    for requirement, hashes in pinned(name):
        assert hashes > 0, requirement


def test_no_file_names_an_index():
    files = [path.name for path in (ROOT / "requirements").iterdir()]
    assert sorted(files) == sorted(PINNED)
    for name in files:
        text = (ROOT / "requirements" / name).read_text(encoding="utf-8")
        assert not re.search(r"https?:|file:|index|find-links|/(home|work|root|tmp)/", text)


#: A pip-audit that tells what it was asked, and finds something in one of the files.
AUDITOR = """#!/bin/sh
echo "$@" >>asked
case "$*" in *compile.txt*) exit 1 ;; esac
"""


def test_an_audit_asks_about_each_file_alone_and_tells_what_is_found(tmp_path):
    for name in ("scripts", "requirements"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    tools = tmp_path / ".venv" / "bin"
    tools.mkdir(parents=True)
    (tools / "python").symlink_to(sys.executable)
    (tools / "pip-audit").write_text(AUDITOR)
    (tools / "pip-audit").chmod(0o755)
    with (tmp_path / "pyproject.toml").open() as project:
        stamp = subprocess.run(["cksum"], stdin=project, capture_output=True, check=True, text=True).stdout
    (tmp_path / ".venv" / "installed-release").write_text(stamp)
    assert subprocess.run([tmp_path / "scripts" / "requirements", "audit"]).returncode == 1
    asked = [line.split() for line in (tmp_path / "asked").read_text().splitlines()]
    files = [[word for word in words if word.endswith(".txt")] for words in asked]
    assert sorted(files) == sorted([f"requirements/{name}"] for name in PINNED)
