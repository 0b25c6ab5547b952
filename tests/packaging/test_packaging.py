"""pyproject.toml lists every package and every data file; wheels from the tree and from an sdist have them all."""

import fnmatch
import os
import re
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
            if path.name == ".lock":  # of a search that has written there
                continue
            if path.is_file() and "__pycache__" not in path.parts and path.suffix not in (".md", ".pyc"):
                files[PurePosixPath(*package.split(".")) / path.relative_to(ROOT / folder).as_posix()] = path
    return files


def single_modules():
    """The files of modules outside of packages."""
    return {f"{name}.py" for name in SETUPTOOLS["py-modules"]}


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
    warnings = [line for line in done.stderr.splitlines() if "warning" in line.lower() and "byte-compiling" not in line]
    assert not warnings
    return output / done.stdout.splitlines()[-1]


def files_of_checkout():
    """The files that git knows or would add, by their paths below the root; those of an unpacked sdist as they are."""
    if not (ROOT / ".git").exists():
        return (ROOT / "tvm_deconv.egg-info" / "SOURCES.txt").read_text().splitlines()
    command = ["git", "ls-files", "-co", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return [name for name in listed if (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A copy of the tree."""
    directory = tmp_path_factory.mktemp("source") / "source"
    for name in files_of_checkout():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, directory / name)
    return directory


@pytest.fixture(scope="module")
def sdist(source, tmp_path_factory):
    """An unpacked sdist of the copy."""
    directory = tmp_path_factory.mktemp("sdist")
    with tarfile.open(build("sdist", source, directory / "dist")) as archive:
        archive.extractall(directory, filter="data")
    (unpacked,) = (path for path in directory.iterdir() if path.name != "dist")
    return unpacked


@pytest.fixture(scope="module")
def wheels(source, sdist, tmp_path_factory):
    """A wheel built from a copy of the tree, and one built from the sdist of that copy."""
    directory = tmp_path_factory.mktemp("wheels")
    return {"tree": build("wheel", source, directory / "tree"), "sdist": build("wheel", sdist, directory / "sdist")}


def test_an_sdist_is_a_checkout(source, sdist):
    """It has every file but GitHub's, with the same content and mode: its tests, examples and scripts work."""
    for path in source.rglob("*"):
        name = path.relative_to(source)
        if path.is_file() and name.parts[0] not in (".github", "tvm_deconv.egg-info"):
            assert (sdist / name).read_bytes() == path.read_bytes()
            assert (sdist / name).stat().st_mode == path.stat().st_mode


def test_nothing_else_is_in_an_sdist(source, sdist):
    names = {path.relative_to(sdist) for path in sdist.rglob("*") if path.is_file()}
    more = {str(name) for name in names if not (source / name).exists()}
    assert more <= {"PKG-INFO", "setup.cfg"}


@pytest.mark.slow
@pytest.mark.parametrize("origin", ["tree", "sdist"])
def test_a_wheel_has_every_file(wheels, origin):
    with zipfile.ZipFile(wheels[origin]) as archive:
        files = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert files == set(map(str, installed_tree())) | single_modules()


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


@pytest.mark.parametrize("script", ["gpu-check", "cuda-resources", "cuda-model", "cuda-tournament"])
def test_a_script_of_a_checkout_that_is_not_installed(tmp_path, script):
    """Without site's .pth files an editable install is not there, while what it depends on is."""
    for folder in ("tvm_deconv", "scripts", "examples"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    preparing = {"gpu-check": ["prepare", "x.tar.xz", "--target", "cuda-sm_90"], "cuda-tournament": ["prepare", "x"]}
    done = python(
        "-S", tmp_path / "scripts" / script, *preparing.get(script, ()), cwd=tmp_path, path=site.getsitepackages()
    )
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert done.stderr.endswith(f"pip install --editable '{tmp_path}[compile,cuda]'\n")


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "SECURITY.md"])
def test_links_lead_somewhere(name):
    """Those of the pages in docs/ are checked when the site is built."""
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", (ROOT / name).read_text(encoding="utf-8"))
    assert [link for link in links if not (ROOT / link).exists()] == []
