"""Targets, and reading the host from the text of /proc/cpuinfo."""

import platform
import shutil
import subprocess

import pytest

from tvm_deconv.errors import ProblemError
from tvm_deconv.targets import TARGETS, Host, Target, detect_host, get, max_target, native, parse_cpuinfo, supported

V3, V4 = TARGETS["x86-64-v3"], TARGETS["x86-64-v4"]

CPUINFO = """\
processor\t: 0
model name\t: A CPU @ 2.50GHz
physical id\t: 0
core id\t\t: 0
flags\t\t: fpu sse2 avx2 fma avx512f
bugs\t\t: spectre_v1

processor\t: 1
model name\t: A CPU @ 2.50GHz
physical id\t: 0
core id\t\t: 0
flags\t\t: fpu sse2 avx2 fma

processor\t: 2
model name\t: A CPU @ 2.50GHz
physical id\t: 1
core id\t\t: 0
flags\t\t: fpu sse2 avx2 fma avx512f

"""


def test_cpuinfo():
    host = parse_cpuinfo(CPUINFO)
    assert host == Host(frozenset({"fpu", "sse2", "avx2", "fma"}), "A CPU @ 2.50GHz", cores=2, threads=3)


def test_cpuinfo_without_topology():
    """A virtual machine or another architecture: every CPU counts as a core."""
    host = parse_cpuinfo(
        "processor : 0\nFeatures : fp asimd\n\nprocessor : 1\nFeatures : fp asimd\n\nHardware : board\n"
    )
    assert host == Host(frozenset({"fp", "asimd"}), "unknown", cores=2, threads=2)


@pytest.mark.parametrize("text", ["", "\n\n", "nonsense", "processor"])
def test_cpuinfo_that_says_nothing(text):
    assert parse_cpuinfo(text) == Host(frozenset())


def test_no_cpuinfo(tmp_path):
    assert detect_host(tmp_path / "absent") == Host(frozenset())


def test_this_machine():
    host = detect_host()
    assert 1 <= host.cores <= host.threads
    if platform.machine() == "x86_64":
        assert "sse2" in host.features


def test_wider_targets_need_more():
    assert V3.features < V4.features
    assert V3.vector_bits < V4.vector_bits
    assert V3.vector_registers < V4.vector_registers


@pytest.mark.parametrize(("target", "size", "lanes"), [(V3, 4, 8), (V3, 8, 4), (V4, 4, 16), (V4, 2, 32), (V4, 1, 64)])
def test_lanes(target, size, lanes):
    assert target.lanes(size) == lanes


@pytest.mark.skipif(not shutil.which("gcc") or platform.machine() != "x86_64", reason="asks gcc for x86 levels")
@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_features_are_those_of_the_psabi(target):
    """What a compiler may use at this level is what we ask of a CPU, under the names of /proc/cpuinfo."""
    macros = subprocess.run(
        ["gcc", f"-march={target.mcpu}", "-dM", "-E", "-x", "c", "/dev/null"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    defined = {line.split()[1].strip("_").lower() for line in macros.splitlines()}
    names = {
        "pni": "sse3",
        "abm": "lzcnt",
        "bmi1": "bmi",
        "lahf_lm": "lahf_sahf",
        "cx16": "gcc_have_sync_compare_and_swap_16",
    }
    extensions = {"avx", "avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe", "popcnt"}
    extensions |= {name for name in defined if name.startswith(("sse3", "ssse3", "sse4_", "avx512"))}
    ours = {names.get(flag, flag) for flag in target.features}
    assert extensions & defined <= ours
    assert ours - defined <= {"lahf_sahf"}  # has no macro in older compilers


def test_get():
    assert get("x86-64-v4") is V4


@pytest.mark.parametrize("name", ["native", "", "x86-64-v9", "X86-64-V3", None, [], 3])
def test_get_unknown(name):
    with pytest.raises(ProblemError, match="must be one of x86-64-v3, x86-64-v4") as caught:
        get(name)
    assert (caught.value.attribute, caught.value.value) == ("target", name)


def test_supported_widest_first():
    assert supported(V4.features | {"amx_tile"}) == [V4, V3]
    assert supported(V4.features - {"avx512vl"}) == [V3]
    assert supported(frozenset()) == []


def test_native():
    assert native(Host(V4.features)) is V4
    assert native(Host(V3.features | {"avx512f"})) is V3


def test_native_of_too_small_a_host():
    with pytest.raises(ProblemError) as caught:
        native(Host(V3.features - {"fma", "avx2"}, "Old CPU"))
    assert str(caught.value) == "target='native': this CPU (Old CPU) lacks avx2, fma, which x86-64-v3 needs"


def test_native_is_this_machine():
    host = detect_host()
    if V3.features <= host.features:
        assert native() in supported(host.features)


def test_max_target():
    assert max_target({}) is None
    assert max_target({"TVM_DECONV_MAX_TARGET": ""}) is None
    assert max_target({"TVM_DECONV_MAX_TARGET": "x86-64-v3"}) is V3


def test_max_target_unknown(monkeypatch):
    monkeypatch.setenv("TVM_DECONV_MAX_TARGET", "avx2")
    with pytest.raises(ProblemError) as caught:
        max_target()
    assert str(caught.value) == "TVM_DECONV_MAX_TARGET='avx2': must be one of x86-64-v3, x86-64-v4"


def test_target_is_frozen():
    with pytest.raises(AttributeError):
        V3.name = "other"
    assert isinstance(hash(V3), int)
    assert isinstance(V3, Target)
