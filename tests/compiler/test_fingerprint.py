"""What makes an artifact stale, or a tuning record worthless, and what does not."""

import dataclasses
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from support.here import compiling_here

import tvm_deconv as td
from tvm_deconv import targets
from tvm_deconv.artifact import sources
from tvm_deconv.compiler.fingerprint import code_digest, kernel_digest, recipe
from tvm_deconv.compiler.records import Schedule
from tvm_deconv.compiler.selection import Choice

SMALL = td.Problem(1, 1, 3, 2, (4, 5), (3, 3), (2, 2), (1, 1), (1, 1), (7, 9))
V3 = targets.CPU_TARGETS["x86-64-v3"]
CUDA = targets.CUDA_TARGETS["cuda"]
DEFAULT = Choice(None, "default", "the default")
FLAGS = ("-O2",)


def replaced(target=V3, **facts):
    return dataclasses.replace(target, **facts)


@pytest.mark.parametrize(
    ("problem", "target", "choice", "flags"),
    [
        (SMALL.replace(batch=2), V3, DEFAULT, FLAGS),
        (SMALL, replaced(l1_bytes=48 << 10), DEFAULT, FLAGS),
        (SMALL, replaced(l2_bytes=1 << 20), DEFAULT, FLAGS),
        (SMALL, replaced(vector_registers=32), DEFAULT, FLAGS),
        (SMALL, replaced(vector_bits=512), DEFAULT, FLAGS),
        (SMALL, replaced(features=V3.features | {"sse4a"}), DEFAULT, FLAGS),
        (SMALL, replaced(CUDA, ptx=()), DEFAULT, FLAGS),
        (SMALL, V3, Choice(Schedule.of("matrix", {"height": 1}), "tuned", ""), FLAGS),
        (SMALL, V3, Choice(None, "default", "", ("matrix",)), FLAGS),
        (SMALL, V3, DEFAULT, ("-O3",)),
    ],
)
def test_a_recipe_changes_with_everything_that_decides_the_code(problem, target, choice, flags):
    known = {recipe(SMALL, V3, DEFAULT, FLAGS), recipe(SMALL, CUDA, DEFAULT, FLAGS)}
    assert recipe(problem, target, choice, flags) not in known
    assert len(known) == 2


def test_a_recipe_does_not_change_with_what_people_are_told():
    told = dataclasses.replace(DEFAULT, reason="another")
    assert recipe(SMALL, V3, told, FLAGS) == recipe(SMALL, V3, DEFAULT, FLAGS)


@pytest.mark.parametrize("package", ["apache-tvm", "apache-tvm-ffi"])
def test_a_recipe_changes_with_versions(package, monkeypatch):
    before = recipe(SMALL, V3, DEFAULT, FLAGS)
    changed = {name: version(name) for name in ("apache-tvm", "apache-tvm-ffi")} | {package: "9.9"}
    monkeypatch.setattr("tvm_deconv.compiler.fingerprint.version", changed.get)
    assert recipe(SMALL, V3, DEFAULT, FLAGS) != before


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """A directory with an artifact, to be copied."""
    folder = tmp_path_factory.mktemp("compiled")
    with compiling_here():
        td.compile([SMALL], "x86-64-v3", folder)
    return folder


@pytest.mark.usefixtures("compiles_here")
@pytest.mark.parametrize("facts", [{"l2_bytes": 1 << 20}, {"l1_bytes": 48 << 10}, {"vector_registers": 32}])
def test_an_artifact_is_stale_once_a_fact_of_its_target_has_changed(facts, compiled, tmp_path, monkeypatch):
    shutil.copytree(compiled, tmp_path, dirs_exist_ok=True)
    assert [outcome.status for outcome in td.compile([SMALL], "x86-64-v3", tmp_path)] == ["current"]
    monkeypatch.setitem(targets.CPU_TARGETS, "x86-64-v3", replaced(**facts))
    assert [outcome.status for outcome in td.compile([SMALL], "x86-64-v3", tmp_path)] == ["built"]


# ---- source text ----


@pytest.fixture
def package(tmp_path):
    """A copy of the package, whose files may be changed."""
    root = Path(td.__file__).parent
    skipped = shutil.ignore_patterns("__pycache__")
    shutil.copytree(root, tmp_path / "tvm_deconv", ignore=skipped)
    for name in ("schedules", "tuning_logs"):
        (folder,) = __import__(f"tvm_deconv.{name}", fromlist=["x"]).__path__
        shutil.copytree(folder, tmp_path / "tvm_deconv" / name, ignore=skipped)
    return tmp_path / "tvm_deconv"


def stamp(package):
    """The stamp of a copied package, and if TVM was imported for it."""
    program = (
        "import sys; from tvm_deconv.artifact.sources import cache_stamp; print(cache_stamp(), 'tvm' in sys.modules)"
    )
    environment = {"PYTHONPATH": str(package.parent), "PATH": ""}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=package, env=environment, capture_output=True, text=True, check=True
    )
    name, imported = done.stdout.split()
    assert imported == "False"
    return name


def test_the_stamp_of_the_cache_changes_with_every_file_that_a_build_reads(package):
    names = {stamp(package)}
    assert names == {stamp(package)}
    assert names == {sources.cache_stamp()}
    assert next(iter(names)).startswith(f"{version('tvm_deconv')}-tvm-{version('apache-tvm')}-")
    files = [
        "problem/problem.py",
        "targets/cpu.py",
        "compute/direct.py",
        "schedules/cuda/tiles.py",
        "compiler/build.py",
        "compiler/launcher/launcher.c",
        "artifact/manifest.py",
        "artifact/needs.py",
        f"tuning_logs/{next((package / 'tuning_logs').rglob('*.jsonl')).relative_to(package / 'tuning_logs')}",
    ]
    for number, name in enumerate(files):
        with (package / name).open("a") as file:
            file.write("\n")
        names.add(stamp(package))
        assert len(names) == number + 2, name
    with (package / "runtime" / "library.py").open("a") as file:
        file.write("\n")
    (package / "targets" / "cpu.pyc").write_bytes(b"")
    assert stamp(package) in names


def test_the_digest_of_sources_is_in_recipe_and_stamp(monkeypatch):
    before = recipe(SMALL, V3, DEFAULT, FLAGS), sources.cache_stamp.__wrapped__()
    monkeypatch.setattr("tvm_deconv.compiler.fingerprint.source_digest", lambda: "other")
    monkeypatch.setattr(sources, "source_digest", lambda: "other")
    assert recipe(SMALL, V3, DEFAULT, FLAGS) != before[0]
    assert sources.cache_stamp.__wrapped__() != before[1]


# ---- the code of kernels ----


def kernel_digests(package):
    """The digests of the kernels of a copied package, by backend."""
    program = "from tvm_deconv.compiler.fingerprint import kernel_digest as of; print(of('x86'), of('cuda'))"
    environment = {"PYTHONPATH": str(package.parent), "PATH": ""}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=package, env=environment, capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_records_outlive_a_change_of_another_backend(package):
    before = kernel_digests(package)
    for name, changed in {
        "schedules/cuda/tiles.py": [False, True],
        "schedules/x86/algorithms/matrix.py": [True, False],
        "schedules/x86/row_copy.ll": [True, False],
        "schedules/contract.py": [True, True],
        "compute/phases.py": [True, True],
    }.items():
        with (package / name).open("a") as file:
            file.write("NOTHING = 1\n")
        after = kernel_digests(package)
        assert [one != other for one, other in zip(before, after, strict=True)] == changed, name
        before = after


MODULE = '''
"""A module."""

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from elsewhere import Tile

#: Lanes of a register.
LANES = 8


def padded(extent: int) -> int:
    """Return the extent, padded."""
    import os
    # whole registers
    return -(-extent // LANES) * LANES


class Plan:
    """A plan."""

    width: int
    """The width."""

    def cost(self) -> float:
        """Return the cost."""
        return None if math.inf else {"a": 1.5}
'''


def written(folder, **modules):
    files = []
    for name, text in modules.items():
        files.append(folder / name.replace("_", "."))
        files[-1].write_text(text)
    return code_digest(files)


ALIKE = {
    "a comment": ("# whole registers", "# registers that are whole"),
    "the docstring of a module": ('"""A module."""', '"""Another module."""'),
    "the docstring of a function": ('"""Return the extent, padded."""', '"""Pad."""'),
    "no docstring": ('    """Return the extent, padded."""\n', ""),
    "the text behind a field": ('"""The width."""', '"""Positions."""'),
    "an import": ("import math\n", "import math\nfrom tvm_deconv.compute import indexing as ix\n"),
    "an import for types": ("from elsewhere import Tile", "from somewhere import Tile"),
    "an import in a function": ("import os", "import sys"),
    "format": ("-(-extent // LANES) * LANES", "(\n        -(-extent // LANES)\n        * LANES\n    )"),
}
OTHER = {
    "a constant": ("LANES = 8", "LANES = 16"),
    "a name": ("LANES", "WIDTH"),
    "an operator": ("* LANES", "+ LANES"),
    "a default": ("extent: int", "extent: int = 1"),
    "a string that is used": ('{"a": 1.5}', '{"b": 1.5}'),
    "a number": ("1.5", "1.25"),
    "None": ("None if", "0 if"),
    "one statement more": ("LANES = 8", "LANES = 8\nLANES = 8"),
    "one statement less": ("LANES = 8\n", ""),
}


@pytest.mark.parametrize(("old", "new"), ALIKE.values(), ids=ALIKE)
def test_records_outlive_what_does_not_change_the_code(old, new, tmp_path):
    assert old in MODULE
    assert written(tmp_path, a_py=MODULE.replace(old, new)) == written(tmp_path, a_py=MODULE)


@pytest.mark.parametrize(("old", "new"), OTHER.values(), ids=OTHER)
def test_records_do_not_outlive_a_change_of_the_code(old, new, tmp_path):
    assert old in MODULE
    assert written(tmp_path, a_py=MODULE.replace(old, new)) != written(tmp_path, a_py=MODULE)


def test_records_outlive_moves_between_files(tmp_path):
    head, function, rest = MODULE.partition("def padded")
    function, plan, rest = (function + rest).partition("class Plan")
    together = written(tmp_path, a_py=MODULE)
    assert written(tmp_path, b_py=f'"""Plans."""\nfrom a import padded\n{plan}{rest}', c_py=head + function) == together
    assert written(tmp_path, b_py=plan + rest, c_py=head + function, d_py="LANES = 8") != together


def test_text_in_other_languages_is_code(tmp_path):
    assert written(tmp_path, a_py=MODULE, b_ll="; one") != written(tmp_path, a_py=MODULE, b_ll="; two")
    assert written(tmp_path, a_py=MODULE, b_ll="; one") == written(tmp_path, c_ll="; one", a_py=MODULE)


def test_only_a_backend_has_kernels():
    with pytest.raises(ModuleNotFoundError, match=r"tvm_deconv\.schedules\.x86-64-v3 is not a package"):
        kernel_digest("x86-64-v3")
