"""The CPU of a machine: its numbers, the name of its microarchitecture, and how far two are apart."""

import builtins
import dataclasses
import itertools
import math

import archspec.cpu
import pytest

from tvm_deconv.targets import CPU_TARGETS, Host, detect_host, get, parse_cpuinfo
from tvm_deconv.targets.ancestry import _MODELS, generations, meant, name_of

CPU = """\
processor\t: {number}
vendor_id\t: AuthenticAMD
cpu family\t: {family}
model\t\t: 1
model name\t: AMD EPYC
stepping\t: {stepping}
flags\t\t: fma

"""
MILAN = Host(get("znver3").features, "AMD EPYC", 2, 2, "AuthenticAMD", 25, 1, 1)


def test_numbers_of_a_cpu():
    host = parse_cpuinfo(CPU.format(number=0, family=25, stepping=2) + CPU.format(number=1, family=25, stepping=2))
    assert (host.vendor, host.family, host.model, host.stepping) == ("AuthenticAMD", 25, 1, 2)
    host = parse_cpuinfo(CPU.format(number=0, family="?", stepping="unknown"))
    assert (host.family, host.model, host.stepping) == (0, 1, 0)


def test_the_name_of_a_microarchitecture(monkeypatch):
    assert name_of(Host(get("znver3").features, vendor="AuthenticAMD")) == "zen3"
    assert name_of(Host(get("haswell").features, vendor="GenuineIntel")) == "haswell"
    # Those that archspec does not know are told apart by their numbers.
    assert name_of(dataclasses.replace(MILAN, vendor="HygonGenuine")) == "HygonGenuine-25-1"
    assert name_of(Host(frozenset())) == ""
    imported = builtins.__import__

    def without_archspec(name, *arguments, **keywords):
        if name.startswith("archspec"):
            raise ModuleNotFoundError(name)
        return imported(name, *arguments, **keywords)

    monkeypatch.setattr(builtins, "__import__", without_archspec)
    monkeypatch.setattr("tvm_deconv.targets.cpu.microarchitectures", lambda: __import__("archspec.cpu"))
    assert name_of(MILAN) == "zen3"
    assert name_of(dataclasses.replace(MILAN, family=99)) == "AuthenticAMD-99-1"


@pytest.mark.parametrize(
    ("name", "vendor", "family", "models"),
    [
        ("zen", "AuthenticAMD", 23, [1, 0x18, 0x20]),
        ("zen2", "AuthenticAMD", 23, [0x31, 0x71, 0xA0]),
        ("zen3", "AuthenticAMD", 25, [1, 0x21, 0x50]),
        ("zen4", "AuthenticAMD", 25, [0x11, 0x61, 0x75, 0xA0]),
        ("zen5", "AuthenticAMD", 26, [2, 0x11, 0x44]),
        ("broadwell", "GenuineIntel", 6, [0x4F]),
        ("icelake", "GenuineIntel", 6, [0x6A]),
        ("sapphirerapids", "GenuineIntel", 6, [0x8F, 0xCF]),
    ],
)
def test_a_machine_that_hides_flags_is_known_by_its_model(name, vendor, family, models):
    level = CPU_TARGETS["x86-64-v3"]
    assert {name_of(Host(level.features, "a CPU", 2, 2, vendor, family, model)) for model in models} == {name}


def test_models_name_microarchitectures_that_archspec_knows_each_once():
    for (vendor, _), names in _MODELS.items():
        assert {archspec.cpu.TARGETS[name].vendor for name in names} == {vendor}
        ranges = sorted(models for of_name in names.values() for models in of_name)
        assert all(first <= last for first, last in ranges)
        assert all(last < first for (_, last), (first, _) in itertools.pairwise(ranges))


@pytest.mark.parametrize("permits", [True, False])
def test_a_host_has_the_amx_that_the_kernel_permits(tmp_path, monkeypatch, permits):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor: 0\nflags: fma amx_tile amx_bf16 amx_int8 amx_fp16\n")
    monkeypatch.setattr("tvm_deconv.targets.host._permits_amx", lambda: permits)
    own = {"amx_tile", "amx_bf16", "amx_int8"} if permits else set()
    assert detect_host(cpuinfo).features - {"amx_fp16"} == {"fma"} | own


def test_the_kernel_is_asked_once_where_there_is_amx(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr("tvm_deconv.targets.host._permits_amx", lambda: asked.append(1) or True)
    for name, flags in (("with", "fma amx_tile"), ("without", "fma")):
        (tmp_path / name).write_text(f"processor: 0\nflags: {flags}\n")
        detect_host(tmp_path / name)
    assert asked == [1]


def test_skylake_servers_are_told_apart_by_flags():
    skylake, cascadelake = (get(name).features for name in ("skylake-avx512", "cascadelake"))
    assert name_of(Host(skylake, vendor="GenuineIntel", family=6, model=0x55)) == "skylake_avx512"
    assert name_of(Host(cascadelake, vendor="GenuineIntel", family=6, model=0x55)) == "cascadelake"


def test_the_machine_that_a_build_is_for():
    for level in CPU_TARGETS.values():
        assert meant(level, MILAN) == "zen3"
    assert meant(get("haswell"), MILAN) == "haswell"
    assert meant(get("cuda-sm_90"), MILAN) is None


@pytest.mark.parametrize(
    ("one", "other", "far"),
    [
        ("zen3", "zen3", 0),
        ("zen3", "zen2", 1),
        ("zen2", "zen4", 3),  # zen3 and AVX-512 with it
        ("new-1-2", "new-1-2", 0),
        ("new-1-2", "zen3", math.inf),
        ("", "", math.inf),
        ("", "zen3", math.inf),
    ],
)
def test_generations(one, other, far):
    assert generations(one, other) == generations(other, one) == far


def test_ancestors_are_nearer_than_other_vendors():
    near = sorted(["haswell", "zen2", "zen5", "skylake_avx512"], key=lambda other: generations("zen3", other))
    assert near == ["zen2", "zen5", "haswell", "skylake_avx512"]
