"""The CPU of a machine: its numbers, the name of its microarchitecture, and how far two are apart."""

import builtins
import dataclasses
import math

import pytest

from tvm_deconv.targets import CPU_TARGETS, Host, get, parse_cpuinfo
from tvm_deconv.targets.ancestry import generations, meant, name_of

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
    assert name_of(MILAN) == "zen3"
    assert name_of(dataclasses.replace(MILAN, features=get("znver4").features)) == "zen4"
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
    assert name_of(MILAN) == "AuthenticAMD-25-1"


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
