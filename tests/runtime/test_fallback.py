"""Problems that no artifact serves: built into the user's cache, computed with NumPy, or refused."""

import contextlib
import os
import pwd
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from support import artifacts as made
from support.processes import WITHOUT_TORCH
from support.strategies import operands, problems
from support.tolerances import assert_close

import tvm_deconv as td
from tvm_deconv import cache as user_cache
from tvm_deconv.artifact import sources
from tvm_deconv.runtime.fallback import REFERENCE
from tvm_deconv.runtime.process import PROCESS
from tvm_deconv.targets import CPU_TARGETS, Host, Place

WANTED = made.PLAIN.replace(out_channels=4)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("TVM_DECONV_MAX_TARGET", made.TARGET)
    monkeypatch.setattr(PROCESS, "artifacts", {})
    return tmp_path / "cache"


@pytest.fixture
def without_torch(monkeypatch):
    """Processes that compile do not import torch, as they do elsewhere if it is installed: that takes seconds."""
    monkeypatch.setenv("PYTHONPATH", str(WITHOUT_TORCH), prepend=os.pathsep)


def assert_right(problem, layer):
    data, filter, bias = operands(problem)
    layer = layer(problem, filter, bias)
    output = layer(data)
    assert output.dtype == (np.int32 if problem.output_dtype == "int32" else data.dtype)
    assert_close(output, td.reference(problem, data, filter, bias), problem.dtype)
    out = np.full_like(output, 77)
    assert layer(data, out) is out
    assert out.tobytes() == output.tobytes()
    return layer


def files(directory):
    return {path.name: path.stat().st_mtime_ns for path in directory.rglob("*") if path.suffix in (".so", ".json")}


# ---- the reference ----


@pytest.mark.parametrize("name", made.PROBLEMS)
def test_reference(tmp_path, name):
    layer = assert_right(made.PROBLEMS[name], td.load(tmp_path, fallback="reference").bind)
    assert layer.manifest is None
    assert "-reference>" in repr(layer)


@settings(max_examples=60)
@given(problems(dtypes=["float16", "bfloat16"], max_macs=2000))
def test_reference_rounds_as_numpy_does(problem):
    """To the last bit, in the types that have few of them; the bias comes in the type of sums."""
    data, filter, bias = operands(problem, 1)
    layer = td.Library(Path(), [], {}, "", host=Host(frozenset()), cap=None, fallbacks=[REFERENCE]).bind
    with np.errstate(all="ignore"):
        expected = td.reference(problem, data, filter, bias).astype(np.float32).astype(data.dtype)
    if problem.dtype == "float16":
        expected = td.reference(problem, data, filter, bias).astype(np.float16)
    np.testing.assert_array_equal(layer(problem, filter, bias)(data).view(np.uint16), expected.view(np.uint16))


def test_reference_and_what_is_not_a_number(tmp_path):
    problem = made.PLAIN.replace(dtype="bfloat16")
    data, filter, _ = operands(problem)
    data[0, 0, 0, 0], data[1, 0, 3, 4] = np.nan, np.inf
    output = td.load(tmp_path, fallback="reference").bind(problem, filter)(data)
    expected = td.reference(problem, data, filter)
    np.testing.assert_array_equal(np.isnan(output.astype(np.float32)), np.isnan(expected))
    np.testing.assert_array_equal(np.isinf(output.astype(np.float32)), np.isinf(expected))


def test_reference_wraps_integers_around(tmp_path):
    problem = td.Problem(1, 1, 1 << 18, 1, (1,), (1,), (1,), (1,), (0,), (1,), dtype="uint8")
    data, filter = np.full(problem.data_shape, 255, np.uint8), np.full(problem.filter_shape, 255, np.uint8)
    output = td.load(tmp_path, fallback="reference").bind(problem, filter)(data)
    exact = 255 * 255 << 18
    assert exact > 1 << 32
    assert output.item() == (exact + (1 << 31)) % (1 << 32) - (1 << 31)


def test_reference_is_the_last_choice(artifacts, monkeypatch):
    monkeypatch.setattr(PROCESS, "artifacts", {})
    library = td.load(artifacts, fallback="reference")
    layer = assert_right(made.PLAIN, library.bind)
    assert layer.manifest.target == made.TARGET
    layer = assert_right(WANTED, library.bind)
    assert layer.manifest is None
    assert_right(WANTED, library.bind)
    (_, counted) = td.loaded()
    assert (counted.target, counted.problem, counted.sha256, counted.calls) == (
        "reference",
        WANTED.artifact_key,
        "",
        4,
    )


def test_reference_without_tvm_ffi(tmp_path):
    script = (
        "import sys, numpy as np, tvm_deconv as td\n"
        "sys.modules['tvm_ffi'] = None\n"
        "p = td.Problem.from_key(sys.argv[1])\n"
        "layer = td.load(sys.argv[2], fallback='reference').bind(p, np.ones(p.filter_shape, np.float32))\n"
        "assert layer(np.ones(p.data_shape, np.float32), threads=1).max() > 1\n"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(td.__file__).parents[1])}
    command = [sys.executable, "-W", "error", "-c", script, WANTED.key, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


# ---- compilation ----


@pytest.mark.usefixtures("without_torch")
def test_compile_once(artifacts, cache):
    library = td.load(artifacts, fallback="compile")
    assert_right(made.PLAIN, library.bind)
    assert not cache.exists()
    layer = assert_right(WANTED, library.bind)
    assert layer.manifest.target == made.TARGET
    (folder,) = (cache / "tvm_deconv").iterdir()
    assert folder.stat().st_mode & 0o077 == 0
    before = files(cache)
    assert len(before) == 2
    assert all((folder / name).stat().st_mode & 0o077 == 0 for name in before)
    assert_right(WANTED.replace(filter_format="XIO"), td.load(artifacts, fallback="compile").bind)
    assert files(cache) == before
    # A spoilt one is built again.
    path = folder / layer.manifest.library
    path.write_bytes(path.read_bytes()[:-1])
    assert_right(WANTED, td.load(artifacts, fallback="compile").bind)
    assert path.stat().st_size == layer.manifest.size


def test_a_stale_artifact_is_built_again(artifacts, cache, build_here, monkeypatch):
    """What another text of the sources has built is not loaded."""
    first = td.load(artifacts, fallback="compile").bind(WANTED, operands(WANTED)[1]).manifest
    before = files(cache)
    monkeypatch.setattr(sources, "source_digest", lambda: "another text")
    sources.cache_stamp.cache_clear()
    monkeypatch.setattr(PROCESS, "artifacts", {})
    second = assert_right(WANTED, td.load(artifacts, fallback="compile").bind).manifest
    sources.cache_stamp.cache_clear()
    assert second.sha256 == first.sha256
    assert build_here == [WANTED, WANTED]
    assert len(files(cache)) == len(before) == 2
    assert len(list(cache.rglob("*.json"))) == 2


@pytest.mark.usefixtures("cache")
def test_compile_once_for_many(artifacts, build_here):
    libraries = [td.load(artifacts, fallback="compile") for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda library: assert_right(WANTED, library.bind), libraries))
    assert build_here == [WANTED]


@pytest.mark.usefixtures("cache", "without_torch")
@pytest.mark.parametrize("safe", ["", "1"])
def test_a_compilation_imports_nothing_from_the_current_directory(artifacts, tmp_path, monkeypatch, safe):
    """Neither where "" is on the path of `-c`, nor where Python is told to leave it out."""
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "numpy.py").write_text("raise SystemExit('from the current directory')")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("PYTHONSAFEPATH", safe)
    assert_right(WANTED, td.load(artifacts, fallback="compile").bind)


@pytest.mark.usefixtures("cache", "without_torch")
def test_compilation_that_fails(artifacts, monkeypatch):
    monkeypatch.setenv("CXX", "/nowhere/g++")
    with pytest.raises(td.NoArtifactError) as caught:
        td.load(artifacts, fallback="compile").bind(WANTED, operands(WANTED)[1])
    first, second = str(caught.value).splitlines()[1:3]
    assert "fallback compile: rejected: fallback='compile': does not build" in first
    assert "CXX='/nowhere/g++': no such program" in first
    assert "serves another problem: out_channels 5, wanted 4" in second


@pytest.mark.usefixtures("cache", "without_torch")
def test_one_fallback_after_the_other(artifacts, monkeypatch):
    monkeypatch.setenv("CXX", "/nowhere/g++")
    library = td.load(artifacts, fallback=["compile", "reference"])
    assert assert_right(WANTED, library.bind).manifest is None
    assert library.explain(WANTED).splitlines()[-1] == (
        "where none is usable, bind falls back to compile, then reference"
    )


@pytest.mark.usefixtures("cache")
def test_compiler_that_is_not_installed(artifacts, monkeypatch):
    monkeypatch.setitem(sys.modules, "platformdirs", None)
    with pytest.raises(td.NoArtifactError, match=r"needs the package platformdirs: pip install .*\[compile\]"):
        td.load(artifacts, fallback="compile").bind(WANTED, operands(WANTED)[1])


@pytest.fixture
def build_here(monkeypatch):
    """Builds happen in this process, and are counted."""
    builds = []

    def build(problem, target, folder):
        builds.append(problem)
        assert not list(folder.glob("*.json")), "what is up to date is left alone"
        made.export(folder, [problem], target.name)
        for path in folder.iterdir():
            path.chmod(0o600)

    monkeypatch.setattr(user_cache, "build", build)
    return builds


def cached(artifacts):
    PROCESS.artifacts.clear()
    return td.load(artifacts, fallback="compile").bind(WANTED, operands(WANTED)[1])


@pytest.mark.parametrize("given", [None, "", "here"])
def test_there_is_no_home(artifacts, tmp_path, monkeypatch, given):
    """As in a container for a user of no name: nothing is put into, or loaded from, the current directory."""

    def unknown(_):
        raise KeyError

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.delenv("HOME")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    if given is not None:
        monkeypatch.setenv("XDG_CACHE_HOME", given)
    monkeypatch.chdir(tmp_path)
    rule = "fallback='compile': needs a directory for its cache: HOME or XDG_CACHE_HOME"
    with pytest.raises(td.NoArtifactError, match=rule):
        td.load(artifacts, fallback="compile").bind(WANTED, np.ones(WANTED.filter_shape, np.float32))
    assert not list(tmp_path.iterdir())


def test_a_relative_path_is_no_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", "here")
    with contextlib.suppress(td.BuildError):  # which an older platformdirs leads to
        assert user_cache.directory().is_relative_to(tmp_path / "home" / ".cache" / "tvm_deconv")
    monkeypatch.setattr("platformdirs.user_cache_path", lambda *_, **__: "here/tvm_deconv")
    with pytest.raises(td.BuildError, match="XDG_CACHE_HOME must be the path of one, from the root"):
        user_cache.directory()


def test_home_that_cannot_be_written(artifacts, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/dev/null")
    with pytest.raises(td.NoArtifactError, match="fallback='compile': the cache must be writable"):
        td.load(artifacts, fallback="compile").bind(WANTED, np.ones(WANTED.filter_shape, np.float32))


@pytest.mark.parametrize("mode", [0o777, 0o720, 0o702, 0o1777])
def test_cache_that_others_can_write_is_not_loaded(artifacts, cache, build_here, mode):
    cached(artifacts)
    (folder,) = (cache / "tvm_deconv").iterdir()
    folder.chmod(mode)
    with pytest.raises(td.NoArtifactError, match=rf"cache .* must be writable by its owner alone, .* {mode:o}"):
        cached(artifacts)
    folder.chmod(0o700)
    cached(artifacts)
    assert build_here == [WANTED]


@pytest.mark.parametrize("suffix", [".json", ".so"])
def test_files_in_the_cache_that_others_can_write_are_built_again(artifacts, cache, build_here, suffix):
    cached(artifacts)
    (folder,) = (cache / "tvm_deconv").iterdir()
    (path,) = folder.glob(f"*{suffix}")
    path.chmod(0o620)
    cached(artifacts)
    assert build_here == [WANTED, WANTED]
    assert path.stat().st_mode & 0o077 == 0


def test_cache_of_another_user_is_not_loaded(artifacts, cache, build_here, monkeypatch):
    cached(artifacts)
    (folder,) = (cache / "tvm_deconv").iterdir()
    monkeypatch.setattr(os, "geteuid", lambda: folder.stat().st_uid + 1)
    with pytest.raises(td.NoArtifactError, match=r"cache .* must belong to the user \d+, who runs this, not to \d+"):
        cached(artifacts)
    assert build_here == [WANTED]


def test_cache_that_cannot_be_written(artifacts, cache):
    cache.write_text("no directory")
    with pytest.raises(td.NoArtifactError, match=r"the cache must be writable: .*Not a directory"):
        td.load(artifacts, fallback="compile").bind(WANTED, operands(WANTED)[1])


def test_target_of_a_compilation():
    v3, v4 = CPU_TARGETS["x86-64-v3"], CPU_TARGETS["x86-64-v4"]
    assert user_cache.widest_target(Place(Host(v4.features), None)) is v4
    assert user_cache.widest_target(Place(Host(v4.features | {"amx"}), v3)) is v3
    assert user_cache.widest_target(Place(Host(v4.features - {"avx512bw"}), v4)) is v3
    with pytest.raises(td.ProblemError, match=r"no target for this CPU \(old\) that TVM_DECONV_MAX_TARGET=x86-64-v4"):
        user_cache.widest_target(Place(Host(frozenset({"avx"}), "old"), v4))


# ---- what is refused ----


@pytest.mark.parametrize("wrong", ["numpy", ["compile", "numpy"], [1], 5, False])
def test_unknown_fallback(artifacts, wrong):
    with pytest.raises(td.ProblemError, match=r"fallback=.*: must be one of compile, reference"):
        td.load(artifacts, fallback=wrong)


def test_nothing_is_compiled_where_artifacts_are_pinned(artifacts):
    digest = td.load(artifacts).digest
    with pytest.raises(td.ProblemError, match="fallback='compile': must not be compile where digest or public_key"):
        td.load(artifacts, digest=digest, fallback="compile")
    assert_right(WANTED, td.load(artifacts, digest=digest, fallback="reference").bind)


def test_candidates_are_shown_up_to_a_number():
    decisions = [td.Rejected(None, "no", str(number)) for number in range(1000)]
    lines = str(td.NoArtifactError(WANTED.key, decisions)).splitlines()
    assert lines[1:] == [f"  {number}: rejected: no" for number in range(20)] + ["  and 980 more"]
    assert len(str(td.NoArtifactError(WANTED.key, decisions[:20])).splitlines()) == 21
