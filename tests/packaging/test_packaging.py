"""pyproject.toml lists every package and every data file; wheels from the tree and from an sdist have them all."""

import fnmatch
import os
import shutil
import site
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path, PurePosixPath

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
#: The folder of each package that does not lie in its parent's, by name.
FOLDERS = {"tvm_deconv": "tvm_deconv", **SETUPTOOLS["package-dir"]}


def installed_tree():
    """Every file of the package, by the path below site-packages where it is to be; READMEs are for the checkout."""
    files = {}
    for package, folder in FOLDERS.items():
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts and path.suffix not in (".md", ".pyc"):
                files[PurePosixPath(*package.split(".")) / path.relative_to(ROOT / folder).as_posix()] = path
    return files


def package_of(path, packages):
    """The innermost of `packages` that holds a file."""
    names = [".".join(parent.parts) for parent in path.parents]
    return next(name for name in names if name in packages)


def test_every_package_is_listed():
    with_modules = {".".join(path.parent.parts) for path in installed_tree() if path.suffix == ".py"}
    assert sorted(with_modules) == SETUPTOOLS["packages"]


def test_every_package_has_an_init():
    """Setuptools does not ask for one, but tools that look for packages do."""
    files = installed_tree()
    missing = [name for name in SETUPTOOLS["packages"] if PurePosixPath(*name.split("."), "__init__.py") not in files]
    assert not missing


def test_every_data_file_is_listed():
    forgotten = []
    for path in installed_tree():
        package = package_of(path, SETUPTOOLS["packages"])
        patterns = [pattern for name in ("*", package) for pattern in SETUPTOOLS["package-data"].get(name, ())]
        within = path.relative_to(PurePosixPath(*package.split(".")))
        # As in setuptools, "*" does not cross a slash.
        listed = any(
            len(PurePosixPath(pattern).parts) == len(within.parts) and fnmatch.fnmatch(str(within), pattern)
            for pattern in patterns
        )
        if path.suffix != ".py" and not listed:
            forgotten.append(str(path))
    assert not forgotten


def test_every_pattern_of_data_has_a_file():
    files = installed_tree()
    for package, patterns in SETUPTOOLS["package-data"].items():
        for pattern in patterns:
            whole = pattern if package == "*" else f"{package.replace('.', '/')}/{pattern}"
            assert any(path.match(whole) for path in files), f"{package}: {pattern}"


def python(*arguments, cwd, path=()):
    """Run Python outside of the checkout, with `path` before the installed packages."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path))}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, check=False)


BUILD = """
import sys
from setuptools import build_meta
print(getattr(build_meta, "build_" + sys.argv[1])(sys.argv[2]))
"""


def build(kind, source, output):
    """Build a wheel or an sdist as pip does, with the setuptools that is installed: nothing is downloaded."""
    output.mkdir(exist_ok=True)
    done = python("-c", BUILD, kind, output, cwd=source)
    assert done.returncode == 0, done.stderr
    return output / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    """A wheel built from a copy of the tree, and one built from the sdist of that copy."""
    directory = tmp_path_factory.mktemp("wheels")
    source = directory / "source"
    for folder in FOLDERS.values():
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    with tarfile.open(build("sdist", source, directory / "dist")) as archive:
        (unpacked,) = {member.name.partition("/")[0] for member in archive.getmembers()}
        archive.extractall(directory, filter="data")
    return {
        "tree": build("wheel", source, directory / "from_tree"),
        "sdist": build("wheel", directory / unpacked, directory / "from_sdist"),
    }


@pytest.mark.slow
@pytest.mark.parametrize("source", ["tree", "sdist"])
def test_a_wheel_has_every_file(wheels, source):
    with zipfile.ZipFile(wheels[source]) as archive:
        files = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert files == set(map(str, installed_tree()))


USE = """
import sys
from importlib.resources import files
from pathlib import Path
import tvm_deconv.schedules.cuda
import tvm_deconv.schedules.x86
from tvm_deconv.cli.main import main
for module in (tvm_deconv, tvm_deconv.schedules.x86, tvm_deconv.schedules.cuda):
    assert Path(module.__file__).is_relative_to(sys.argv[1]), module
assert files("tvm_deconv.compiler.launcher").joinpath("launcher.c").is_file()
print(len(list(files("tvm_deconv.tuning_logs").glob("*/*.jsonl"))))
main(["doctor"])
"""


@pytest.mark.slow
def test_a_wheel_works(wheels, tmp_path):
    """Unpacked as pip does: schedules are imported, the tuning logs are found, the command line runs."""
    unpacked = tmp_path / "site-packages"
    with zipfile.ZipFile(wheels["sdist"]) as archive:
        archive.extractall(unpacked)
    done = python("-c", USE, unpacked, cwd=tmp_path, path=[unpacked])
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[0]) == len(list((ROOT / "tuning_logs").glob("*/*.jsonl")))
    assert "x86-64-v3" in done.stdout


@pytest.mark.parametrize("script", ["gpu-check", "cuda-resources"])
def test_a_script_of_a_checkout_that_is_not_installed(tmp_path, script):
    """Without site's .pth files an editable install is not there, while what it depends on is."""
    for folder in ("tvm_deconv", "scripts", "examples"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    arguments = ["--prepare", "check.tar.xz", "--target", "cuda-sm_90"] if script == "gpu-check" else []
    done = python("-S", tmp_path / "scripts" / script, *arguments, cwd=tmp_path, path=site.getsitepackages())
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert done.stderr.endswith(f"pip install --editable '{tmp_path}[compile,cuda]'\n")
