"""The Dockerfile keeps the rules of its kind: hadolint says so where it is installed, plain checks everywhere."""

import fnmatch
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "Dockerfile"


def instructions(text):
    """The instructions as (name, arguments), comments left out and continued lines joined."""
    joined = re.sub(r"^\s*#.*\n", "", text, flags=re.M).replace("\\\n", " ")
    return [tuple(line.split(None, 1)) for line in joined.splitlines() if line.strip()]


def complaints(text):
    """What is wrong with a Dockerfile."""
    found = instructions(text)
    stages, last_user = [], None
    for name, rest in found:
        if name == "FROM":
            image, _, stage = rest.partition(" AS ")
            if image not in stages and not re.search(r":[^:]*\d", image):
                yield f"{image}: the version of the image must be given"
            stages.append(stage)
            last_user = None
        elif name == "USER":
            last_user = rest
        elif name == "ADD":
            yield f"{rest}: COPY does that, and no more"
        elif name in ("CMD", "ENTRYPOINT") and not rest.startswith("["):
            yield f"{rest}: a list of arguments needs no shell"
        elif name == "COPY" and "--from=" not in rest:
            for source in rest.split()[:-1]:
                if not (ROOT / source).exists():
                    yield f"{source}: is not in the checkout"
        for stage in re.findall(r"(?:--|,|=)from=([^ ,]+)", rest):
            if stage not in stages:
                yield f"{stage}: is no earlier stage"
        for command in re.findall(r"pip (?:--python \S+ )?install[^&|;]*", rest):
            if "--require-hashes" not in command and "--no-deps" not in command:
                yield f"{command}: what comes from an index must have hashes"
    if last_user in (None, "root", "0"):
        yield "the image must not run as root"


def test_the_dockerfile_keeps_the_rules():
    assert list(complaints(DOCKERFILE.read_text())) == []


@pytest.mark.parametrize(
    ("old", "new", "word"),
    [
        ("debian:13-slim AS base", "debian:latest AS base", "version of the image"),
        ("COPY --from=packages /opt", "COPY --from=package /opt", "no earlier stage"),
        ("from=wheel,source=/dist,target=/dist pip", "from=wheels,source=/dist,target=/dist pip", "no earlier stage"),
        ("COPY requirements/run.txt", "COPY requirements/runs.txt", "not in the checkout"),
        ("--require-hashes --requirement /tmp/run.txt", "--requirement /tmp/run.txt", "hashes"),
        ("USER 65534\nWORKDIR /work\nCMD", "WORKDIR /work\nCMD", "root"),
        ('CMD ["python"', 'CMD "python"', "shell"),
        ("COPY . .", "ADD . .", "COPY does that"),
    ],
)
def test_a_broken_rule_is_seen(old, new, word):
    text = DOCKERFILE.read_text()
    assert text.count(old) == 1
    assert any(word in complaint for complaint in complaints(text.replace(old, new)))


def test_hadolint_agrees():
    hadolint = shutil.which("hadolint", path=Path(sys.executable).parent) or shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("needs hadolint: pip install '.[release]'")
    done = subprocess.run([hadolint, str(DOCKERFILE)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_the_context_has_what_a_wheel_needs():
    """`.dockerignore` leaves out all but what setuptools reads, and the pinned files."""
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    kept = {line[1:] for line in lines if line.startswith("!")}
    assert "*" in lines
    project = (ROOT / "pyproject.toml").read_text()
    folders = {"tvm_deconv", *re.findall(r'^"tvm_deconv\.\w+" = "(\w+)"$', project, re.M)}
    modules = {f"{name}.py" for name in re.findall(r'"(\w+)"', re.search(r"^py-modules = \[(.*)\]", project, re.M)[1])}
    assert kept == folders | modules | {"LICENSE", "README.md", "pyproject.toml", "requirements"}
    assert any(fnmatch.fnmatch("tvm_deconv/__pycache__", line) for line in lines)
