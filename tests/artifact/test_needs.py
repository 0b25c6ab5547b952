"""Versions of the system's libraries: those that artifacts need, and those of this machine."""

import platform

import pytest

from tvm_deconv.artifact import elf, needs


def test_the_highest_version_of_each_family():
    versions = ["GLIBC_2.2.5", "GLIBC_2.17", "GLIBC_2.3.4", "GLIBCXX_3.4.9", "GLIBCXX_3.4.21", "GLIBC_PRIVATE", "X_1.0"]
    assert needs.needed(versions) == {"GLIBC": "2.17", "GLIBCXX": "3.4.21"}
    assert needs.needed(["GLIBC_2.9", "GLIBC_ABI_DT_RELR"]) == {"GLIBC": "2.36"}
    assert needs.needed(["GLIBC_2.9." + "9" * 5000, "GLIBC_", "_2.9"]) == {}


def test_what_is_beyond():
    assert needs.beyond({"GLIBC": "2.17", "tvm_ffi": "0.1.14"}, {"GLIBC": "2.9", "tvm_ffi": "0.2"}) == {"GLIBC": "2.17"}
    assert needs.beyond({"GLIBC": "2.28"}, {"GLIBC": "2.28"}) == {}
    assert needs.beyond({"GLIBC": "2.28"}, {}) == {}


@pytest.mark.parametrize(("version", "release"), [("0.1.14.post1", "0.1.14"), ("2.36", "2.36"), ("x", "0"), ("", "0")])
def test_releases(version, release):
    assert needs.release(version) == release


def test_this_machine():
    here = needs.here()
    assert here["GLIBC"] == platform.libc_ver()[1]
    assert set(here) == set(needs.FAMILIES)  # tests have loaded the C++ library
    assert needs.text(here).startswith(f"GLIBC {here['GLIBC']}, GLIBCXX 3.4.")


def test_versions_that_a_library_defines():
    defined = elf.versions_defined(needs._path("libstdc++.so.6").read_bytes())
    assert {"GLIBCXX_3.4", "GLIBCXX_3.4.21", "CXXABI_1.3", "CXXABI_1.3.9"} <= defined
    assert all(name.startswith(("GLIBCXX_", "CXXABI_", "libstdc++.so.6")) for name in defined)


def test_another_c_library(monkeypatch):
    monkeypatch.setattr(needs.os, "confstr", lambda _: "other 1.2")
    monkeypatch.setattr(needs.ctypes, "CDLL", lambda *_, **__: needs.ctypes.PyDLL("/nowhere"))
    assert set(needs.here.__wrapped__()) == {"tvm_ffi"}
