"""Loading, verification, binding and calling, with real artifacts."""

import contextlib
import dataclasses
import inspect
import json
import os
import pickle
import shutil
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support import artifacts as made
from support.strategies import operands
from support.tolerances import assert_close

import tvm_deconv as td
from tvm_deconv.artifact.elf import dynamic
from tvm_deconv.compiler.launcher import find_compiler
from tvm_deconv.runtime import loader
from tvm_deconv.runtime.host import HostCall
from tvm_deconv.runtime.process import PROCESS
from tvm_deconv.targets import CPU_TARGETS, CpuTarget, Host

P = made.PLAIN
V3, V4 = CPU_TARGETS["x86-64-v3"], CPU_TARGETS["x86-64-v4"]


@pytest.fixture
def library(artifacts):
    return td.load(artifacts)


@pytest.fixture
def copy(artifacts, tmp_path):
    """A directory of artifacts to spoil."""
    return shutil.copytree(artifacts, tmp_path / "copy")


def assert_right(problem, output, *arrays):
    assert_close(output, td.reference(problem, *arrays), problem.dtype)


def artifact_of(library, problem):
    """The loaded artifact that serves `problem`."""
    return loader.load(library.root, library.select(problem)[0].manifest)


def build_so(directory, source, *flags):
    """The bytes of a shared library made from C `source`."""
    command = [find_compiler(), "-x", "c", "-", "-x", "none", "-shared", "-fPIC", "-o", directory / "made.so", *flags]
    subprocess.run(command, input=source.encode(), check=True)
    return (directory / "made.so").read_bytes()


# ---- calling ----


@pytest.mark.parametrize("name", made.PROBLEMS)
def test_bind_and_call(library, name):
    problem = made.PROBLEMS[name]
    data, filter, bias = operands(problem)
    layer = library.bind(problem, filter, bias)
    output = layer(data)
    assert output.dtype == (np.int32 if problem.dtype == "int8" else data.dtype)
    assert_right(problem, output, data, filter, bias)
    poisoned = np.full_like(output, 77)
    assert layer(data, out=poisoned) is poisoned
    assert poisoned.tobytes() == output.tobytes()
    assert layer(data).tobytes() == output.tobytes()


@pytest.mark.parametrize("filter_format", ["IOX", "GIOX", "XIO"])
def test_filter_formats_share_an_artifact(library, filter_format):
    problem = made.PROBLEMS["grouped"].replace(filter_format=filter_format)
    data, filter, bias = operands(problem)
    assert_right(problem, library.bind(problem, filter, bias)(data), data, filter, bias)


def test_opset_order():
    """Positional use reads as in OpenVINO's opset, and the two operators take the same."""
    wanted = ["self", "data", "filter", "strides", "output_shape", "pads_begin", "pads_end", "dilations", "auto_pad"]
    wanted += ["output_padding", "bias", "activation", "out"]
    for function in (td.Library.convolution_backprop_data, td.Library.group_convolution_backprop_data):
        assert list(inspect.signature(function).parameters) == wanted


def test_convolution_backprop_data(library):
    data, filter, _ = operands(P)
    output = library.convolution_backprop_data(data, filter, (2, 2), None, (1, 1), (1, 1))
    assert_right(P, output, data, filter)
    same = library.convolution_backprop_data(data, filter, [2, 2], np.array([7, 9]), auto_pad="SAME_UPPER")
    np.testing.assert_array_equal(same, output)
    out = np.full_like(output, 77)
    assert library.convolution_backprop_data(data, filter, (2, 2), None, (1, 1), (1, 1), out=out) is out
    np.testing.assert_array_equal(out, output)


def test_group_convolution_backprop_data(library):
    problem = made.PROBLEMS["grouped"]
    data, filter, bias = operands(problem)
    assert filter.ndim == data.ndim + 1
    for activation in ("relu", td.Epilogue(activation="relu"), td.Epilogue(bias=True, activation="relu")):
        output = library.group_convolution_backprop_data(
            data, filter, (2,), pads_begin=(1,), pads_end=(1,), bias=bias, activation=activation
        )
        assert_right(problem, output, data, filter, bias)


def test_operator_and_rank_of_the_filter(library):
    data, filter, _ = operands(P)
    with pytest.raises(
        td.TensorError, match=r"filter=\(3, 5, 3, 3\): rank must be 5, for this operator and data of rank 4"
    ):
        library.group_convolution_backprop_data(data, filter, (2, 2))
    with pytest.raises(td.TensorError, match="rank must be 4, for this operator and data of rank 4"):
        library.convolution_backprop_data(data, filter[None], (2, 2))


def test_epilogue_of_a_call_needs_its_bias(library):
    data, filter, _ = operands(P)
    with pytest.raises(td.TensorError, match="bias=None: must be an array: activation is an Epilogue with a bias"):
        library.convolution_backprop_data(data, filter, (2, 2), activation=td.Epilogue(bias=True))
    with pytest.raises(td.ProblemError, match="activation='swish': must be one of"):
        library.convolution_backprop_data(data, filter, (2, 2), activation="swish")


def test_attributes_of_a_call_are_checked(library):
    data, filter, _ = operands(P)
    with pytest.raises(td.ProblemError, match="strides"):
        library.convolution_backprop_data(data, filter, (0, 2))


def test_filter_changed_in_place(library):
    """A bound layer keeps what it was given; a call by operator sees what is there now."""
    problem = made.PROBLEMS["bias"]
    data, filter, bias = operands(problem)
    layer = library.bind(problem, filter, bias)
    before = layer(data)
    call = {"pads_begin": (1, 1), "pads_end": (1, 1), "bias": bias}
    np.testing.assert_array_equal(library.convolution_backprop_data(data, filter, (2, 2), **call), before)
    filter *= 3
    bias += 1
    np.testing.assert_array_equal(layer(data), before)
    assert_right(problem, library.convolution_backprop_data(data, filter, (2, 2), **call), data, filter, bias)


@pytest.mark.parametrize(("name", "dtype"), [("float16", "float16"), ("float16", "float32"), ("int8", "int8")])
def test_bias_in_either_dtype(library, name, dtype):
    problem = made.PROBLEMS[name]
    data, filter, bias = operands(problem)
    bias = (bias % 100).astype(dtype)
    assert_right(problem, library.bind(problem, filter, bias)(data), data, filter, bias)


def test_bias_in_bfloat16(library):
    problem = made.PROBLEMS["bfloat16"]
    data, filter, bias = operands(problem)
    bias = bias.astype(data.dtype)
    assert_right(problem, library.bind(problem, filter, bias)(data), data, filter, bias.astype(np.float32))


def test_later_calls_of_bfloat16_take_the_fast_path(library, monkeypatch):
    """The first call says what NumPy's dtype is; other arrays are checked as before."""
    problem = made.PROBLEMS["bfloat16"]
    data, filter, bias = operands(problem)
    layer = library.bind(problem, filter, bias)
    expected = layer(data)
    assert expected.dtype == data.dtype
    with monkeypatch.context() as patch:
        patch.setattr(HostCall, "compute", None)
        out = np.full(problem.output_shape, np.nan, data.dtype)
        assert layer(data, out) is out
        for found in (out, layer(data)):
            assert found.dtype == data.dtype
            np.testing.assert_array_equal(found, expected)
    with pytest.raises(td.TensorTypeError, match="dtype must be bfloat16"):
        layer(data.astype(np.float32))
    with pytest.raises(td.TensorTypeError):
        layer(data, out.astype(np.float32))
    with pytest.raises(td.TensorError, match="out"):
        layer(data, data)


@pytest.mark.parametrize("name", ["no batch", "no output"])
def test_empty_output_calls_no_kernel(library, name, monkeypatch):
    def kernel(*_):
        raise AssertionError

    problem = made.PROBLEMS[name]
    data, filter, _ = operands(problem)
    monkeypatch.setattr(artifact_of(library, problem), "deconv", kernel)
    layer = library.bind(problem, filter)
    out = np.empty(problem.output_shape, np.float32)
    assert layer(data).shape == problem.output_shape
    assert layer(data, out) is out
    with pytest.raises(td.TensorError):
        layer(data[..., :-1])


def test_nan_and_infinity(library):
    data, filter, _ = operands(P)
    filter[:] = 1
    data[0, 0, 0, 0], data[1, 0, 3, 4] = np.nan, np.inf
    output = library.bind(P, filter)(data)
    expected = td.reference(P, data, filter)
    np.testing.assert_array_equal(np.isnan(output), np.isnan(expected))
    np.testing.assert_array_equal(np.isinf(output), np.isinf(expected))
    assert np.isnan(output).any()
    assert np.isinf(output).any()
    assert np.isfinite(output).any()


def test_an_artifact_is_chosen_once(artifacts, monkeypatch):
    library, some = td.load(artifacts), [made.PROBLEMS[name] for name in ("plain", "bias")]
    for problem in some:
        library.bind(problem, *operands(problem)[1:])
    monkeypatch.setattr("tvm_deconv.runtime.library.select", None)
    for problem in some:
        library.bind(problem, *operands(problem)[1:])


def test_layer_says_what_it_is(library):
    layer = library.bind(P, operands(P)[1])
    assert P.key in repr(layer)
    assert layer.manifest.target == made.TARGET
    assert layer.problem is P


def test_many_threads(library):
    problems = [made.PROBLEMS[name] for name in ("plain", "bias", "grouped", "float64")]

    def work(seed):
        problem = problems[seed % len(problems)]
        data, filter, bias = operands(problem, seed)
        layer = library.bind(problem, filter, bias)
        first = layer(data)
        for _ in range(20):
            assert layer(data).tobytes() == first.tobytes()
        assert_right(problem, first, data, filter, bias)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(32)))


# ---- the directory ----


def test_load_reads_manifests_only(copy):
    for path in copy.glob("*.so"):
        path.write_bytes(b"")
    library = td.load(str(copy))
    assert len(library.manifests) == len(made.PROBLEMS)
    assert repr(library) == f"<Library {str(copy)!r}: {len(made.PROBLEMS)} artifacts, 0 broken>"
    assert isinstance(library.select(P)[0], td.Accepted)


def test_relative_directory(copy, monkeypatch):
    """The library is found where it was when the manifests were read."""
    monkeypatch.chdir(copy.parent)
    library = td.load(copy.name)
    monkeypatch.chdir("/")
    library.bind(P, operands(P)[1])


def test_other_files_are_left_alone(copy):
    (copy / "layers.json").write_text("{}")
    (copy / "weights.safetensors").write_bytes(b"")
    (copy / ("0" * 16 + "-x86-64-v3.json.tmp")).write_text("half")
    library = td.load(copy)
    assert not library.broken


def test_no_directory(tmp_path):
    (tmp_path / "file").touch()
    for name in ("absent", "file"):
        with pytest.raises(td.ArtifactError, match="must be a directory of artifacts") as caught:
            td.load(tmp_path / name)
        assert caught.value.path == tmp_path / name


@pytest.mark.parametrize("wrong", [None, 5, b"made", object()])
def test_no_path(artifacts, wrong):
    with pytest.raises(td.ProblemError, match=r"^root=.*: must be a path"):
        td.load(wrong)
    if wrong is not None:
        with pytest.raises(td.ProblemError, match=r"^public_key=.*: must be a path"):
            td.load(artifacts, public_key=wrong)


def test_empty_directory(tmp_path):
    library = td.load(tmp_path)
    assert library.explain(P) == "no candidates\nwhere none is usable, bind raises NoArtifactError"
    with pytest.raises(td.NoArtifactError, match="there are no candidates"):
        library.bind(P, operands(P)[1])


def spoil(path):
    path.write_text(path.read_text().replace('"format": 2', '"format": 3'))


def test_broken_manifest_among_good_ones(copy):
    """It is seen wherever candidates are listed, and its neighbours work."""
    path = made.file(copy, P, ".json")
    spoil(path)
    library = td.load(copy)
    assert list(library.broken) == [path.stem]
    assert isinstance(library.broken[path.stem], td.ManifestError)
    (rejected,) = [decision for decision in library.select(P) if decision.name == path.stem]
    assert isinstance(rejected, td.Rejected)
    assert "format=3: must be at most 2" in rejected.reason
    assert rejected.reason in library.explain(P)
    with pytest.raises(td.NoArtifactError, match="format=3: must be at most 2"):
        library.bind(P, operands(P)[1])
    problem = made.PROBLEMS["bias"]
    data, filter, bias = operands(problem)
    assert_right(problem, library.bind(problem, filter, bias)(data), data, filter, bias)


def test_only_a_broken_manifest(copy):
    for path in copy.iterdir():
        if path.stem != made.file(copy, P, ".json").stem:
            path.unlink()
    spoil(made.file(copy, P, ".json"))
    with pytest.raises(td.ManifestError, match="format=3: must be at most 2"):
        td.load(copy)


def test_library_without_manifest(copy):
    made.file(copy, P, ".json").unlink()
    library = td.load(copy)
    with pytest.raises(td.NoArtifactError, match="has no manifest: its build was interrupted"):
        library.bind(P, operands(P)[1])


def test_manifest_under_another_name(copy):
    path = made.file(copy, P, ".json")
    other = path.rename(path.with_name("0" * 16 + "-x86-64-v3.json"))
    library = td.load(copy)
    assert library.broken[other.stem].attribute == "library"
    assert "must have the name of the manifest's file" in str(library.broken[other.stem])


def test_path_that_leaves_the_directory(copy):
    path = made.file(copy, P, ".json")
    library = made.file(copy, P, ".so").name
    path.write_text(path.read_text().replace(f'"{library}"', f'"../{library}"'))
    error = td.load(copy).broken[path.stem]
    assert str(error).startswith(f"library='../{library}': must be a plain file name")


def test_digest(copy):
    digest = td.load(copy).digest
    assert td.load(copy, digest=digest).digest == digest
    made.rewrite(copy, P, algorithm="other")
    with pytest.raises(td.IntegrityError, match=f"must be {digest}, which was asked for"):
        td.load(copy, digest=digest)


# ---- selection ----


def on(directory, features, cap=None):
    manifests = td.load(directory).manifests
    return td.Library(directory, manifests, {}, host=Host(features), cap=cap, digest="")


def test_artifact_for_another_cpu(artifacts):
    library = on(artifacts, V3.features - {"fma", "bmi2"})
    with pytest.raises(td.NoArtifactError) as caught:
        library.bind(P, operands(P)[1])
    assert "rejected: needs CPU flags that this host lacks: bmi2, fma" in str(caught.value)
    assert str(caught.value).startswith(f"problem={P.artifact_key}: no artifact serves this problem")
    assert len(caught.value.decisions) == len(made.PROBLEMS)


def test_wider_target_is_taken(copy):
    manifest = td.Manifest.read(made.file(copy, P, ".json"))
    wide = dataclasses.replace(manifest, target=V4.name, library=manifest.library.replace("v3", "v4"))
    shutil.copy(made.file(copy, P, ".so"), copy / wide.library)
    (copy / f"{wide.name}.json").write_text(wide.to_json())
    assert on(copy, V4.features).bind(P, operands(P)[1]).manifest == wide
    assert on(copy, V3.features).bind(P, operands(P)[1]).manifest == manifest
    assert on(copy, V4.features, cap=V3).bind(P, operands(P)[1]).manifest == manifest


def test_cap_from_the_environment(artifacts, monkeypatch):
    monkeypatch.setenv("TVM_DECONV_MAX_TARGET", "x86-64-v3")
    assert isinstance(td.load(artifacts).select(P)[0], td.Accepted)
    monkeypatch.setenv("TVM_DECONV_MAX_TARGET", "x86-64-v2")
    with pytest.raises(td.ProblemError, match="TVM_DECONV_MAX_TARGET='x86-64-v2': must be one of"):
        td.load(artifacts)


def test_no_artifact(library):
    wanted = P.replace(strides=(3, 3))
    with pytest.raises(td.NoArtifactError) as caught:
        library.bind(wanted, operands(P)[1])
    assert "rejected: serves another problem: strides (2, 2), wanted (3, 3)" in str(caught.value)
    assert [decision.name for decision in caught.value.decisions] == [d.name for d in library.select(wanted)]
    assert "strides (2, 2), wanted (3, 3)" in library.explain(wanted)


def test_not_a_problem(library):
    for call in (library.select, library.explain, lambda problem: library.bind(problem, None)):
        with pytest.raises(td.ProblemError, match="problem='n1': must be a Problem"):
            call("n1")


# ---- integrity ----


def assert_refused(directory, match, error=td.IntegrityError):
    with pytest.raises(error, match=match) as caught:
        td.load(directory).bind(P, operands(P)[1])
    assert caught.value.path == made.file(directory, P, ".so")


@pytest.mark.parametrize("size", [0, 1, 4096, -1])
def test_truncated(copy, size):
    path = made.file(copy, P, ".so")
    path.write_bytes(path.read_bytes()[:size])
    assert_refused(copy, r"^size=\d+: must be \d+, which the manifest says: the file was truncated or replaced")


def test_extended(copy):
    path = made.file(copy, P, ".so")
    path.write_bytes(path.read_bytes() + b"\0")
    assert_refused(copy, "^size=")


def test_altered(copy):
    """Also in a process that has loaded the true library before."""
    path = made.file(copy, P, ".so")
    td.load(copy).bind(P, operands(P)[1])
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert_refused(copy, "^sha256='[0-9a-f]{64}': must be [0-9a-f]{64}, which the manifest says: the file was altered")


def test_missing_library(copy):
    made.file(copy, P, ".so").unlink()
    assert_refused(copy, "must be readable: .*No such file", td.ArtifactError)


def test_link_out_of_the_directory(copy, tmp_path):
    path = made.file(copy, P, ".so")
    outside = path.rename(tmp_path / "outside.so")
    path.symlink_to(outside)
    assert_refused(copy, "must not be a link that leaves")


def test_others_may_write_to_a_directory_of_artifacts(copy):
    """Unlike the user's cache."""
    made.file(copy, P, ".so").chmod(0o666)
    made.file(copy, P, ".json").chmod(0o666)
    td.load(copy).bind(P, operands(P)[1])


def test_link_within_the_directory(copy):
    path = made.file(copy, P, ".so")
    path.symlink_to(path.rename(path.with_name("blob")).name)
    td.load(copy).bind(P, operands(P)[1])


def test_link_in_a_circle(copy):
    path = made.file(copy, P, ".so")
    path.unlink()
    path.symlink_to(path)
    assert_refused(copy, "must be readable", td.ArtifactError)


def test_named_pipe(copy):
    path = made.file(copy, P, ".so")
    path.unlink()
    os.mkfifo(path)
    assert_refused(copy, "must be a regular file")


def test_directory_for_a_library(copy):
    path = made.file(copy, P, ".so")
    path.unlink()
    path.mkdir()
    assert_refused(copy, "must be a regular file|must be readable", td.ArtifactError)


def patched(content, offset, form, value):
    changed = bytearray(content)
    struct.pack_into(form, changed, offset, value)
    return bytes(changed)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda _: b"not a library", "its headers point outside of it"),
        (lambda _: b"#!/bin/sh\n" * 20, "it is not a 64-bit ELF shared library"),
        (lambda content: patched(content, 4, "B", 1), "it is not a 64-bit ELF shared library"),
        (lambda content: patched(content, 16, "<H", 2), "it is not a 64-bit ELF shared library"),
        (lambda content: patched(content, 18, "<H", 183), "it is for ELF machine 183, not for x86-64"),
        (lambda content: patched(content, 56, "<H", 0), "it has no dynamic section"),
        (lambda content: patched(content, 32, "<Q", 1 << 60), "its headers point outside of it"),
    ],
)
def test_truly_described_but_no_library(copy, change, match):
    made.rewrite(copy, P, content=change(made.file(copy, P, ".so").read_bytes()))
    assert_refused(copy, f"must be a shared library for this machine, but {match}")


@pytest.mark.parametrize(("stated", "found"), [({"GLIBC": "2.2.5"}, "'2.2.5'"), ({}, "None")])
def test_a_manifest_that_promises_an_older_system_than_the_library_needs(copy, stated, found):
    made.rewrite(copy, P, needs=stated)
    assert_refused(copy, rf"^needs.GLIBC={found}: must be at least 2\.\d+, which the library needs")
    assert P.key not in {facts.problem for facts in td.loaded() if facts.path.startswith(str(copy))}


def test_a_manifest_that_says_nothing_of_systems(copy):
    """As those of the first format do: the library is loaded."""
    path = made.file(copy, P, ".json")
    fields = json.loads(path.read_text())
    del fields["needs"]
    path.write_text(json.dumps(fields | {"format": 1}))
    data, filter, _ = operands(P)
    assert_right(P, td.load(copy).bind(P, filter)(data), data, filter)


def test_an_artifact_for_a_newer_system(copy):
    made.rewrite(copy, P, needs={"GLIBC": "9.9"})
    with pytest.raises(td.NoArtifactError, match=r"needs GLIBC 9\.9; this machine has GLIBC "):
        td.load(copy).bind(P, operands(P)[1])


def test_library_of_another_problem(copy, monkeypatch):
    """Consistent in every digest: what notices is the kernel, at bind by its filter, else at the call."""
    monkeypatch.setattr(PROCESS, "artifacts", {})  # else later tests find the other problem's library by this name
    data, filter, _ = operands(P)
    made.rewrite(copy, P, content=made.file(copy, made.PROBLEMS["float64"], ".so").read_bytes())
    with pytest.raises(td.ArtifactError, match=r"(?s)must take the filter as its manifest says: .*float64"):
        td.load(copy).bind(P, filter)
    made.rewrite(copy, P, content=made.file(copy, made.PROBLEMS["bias"], ".so").read_bytes())
    layer = td.load(copy).bind(P, filter)
    for call in (lambda: layer(data), lambda: layer(data, np.empty(P.output_shape, np.float32), threads=1)):
        with pytest.raises(td.ArtifactError, match=r"^path=.*\.so: must compute the problem of its manifest: "):
            call()


@pytest.mark.parametrize("change", [{"dtype": np.float16}, {"dtype": np.float64}])
def test_dtype_of_the_filter_comes_first(library, change):
    """Also of a problem that no artifact serves."""
    for problem in (P, P.replace(batch=77)):
        with pytest.raises(td.TensorTypeError, match=r"^filter='float\d\d': dtype must be float32$"):
            library.bind(problem, np.ones(problem.filter_shape, **change))
    data = np.ones((77, *P.data_shape[1:]), **change)
    with pytest.raises(td.TensorTypeError, match=r"^filter='float32': dtype must be float\d\d$"):
        library.convolution_backprop_data(data, np.ones(P.filter_shape, np.float32), (2, 2))


def test_foreign_dependency(copy, tmp_path):
    build_so(tmp_path, "int f(void) { return 1; }", "-Wl,-soname,libother.so.1")
    other = (tmp_path / "made.so").rename(tmp_path / "other.so")
    source = "int f(void); int g(void) { return f(); }"
    made.rewrite(copy, P, content=build_so(tmp_path, source, "-Wl,--no-as-needed", other, "-lm"))
    assert_refused(copy, r"needed=\['libother.so.1'\]: may only need .*libtvm_ffi.so")


STUBS = "".join(f"void {name}(void) {{}}" for name in sorted(CpuTarget.symbols))


@pytest.mark.parametrize("missing", sorted(CpuTarget.symbols))
@pytest.mark.parametrize("style", ["gnu", "sysv", "both"])
def test_library_without_a_function(copy, tmp_path, missing, style):
    """Found before it is loaded, by either of the tables that a linker writes."""
    source = STUBS.replace(f"void {missing}(void) {{}}", f"void {missing}(void);void f(void) {{ {missing}(); }}")
    made.rewrite(copy, P, content=build_so(tmp_path, source, f"-Wl,--hash-style={style}"))
    assert_refused(copy, rf"^defined=\d+: must define {missing}: it is no artifact")


def test_library_without_any_function(copy, tmp_path):
    made.rewrite(copy, P, content=build_so(tmp_path, "static int f = 1;"))
    assert_refused(
        copy, "must define __tvm_ffi_deconv, __tvm_ffi_deconv_with, __tvm_ffi_pack, tvm_deconv_get_num_threads"
    )


def test_library_that_does_not_load(copy, tmp_path):
    source = "int absent(void); int (*pointer)(void) = absent;"
    made.rewrite(copy, P, content=build_so(tmp_path, STUBS + source))
    assert_refused(copy, "must load and define .*absent", td.ArtifactError)


def test_what_was_verified_is_what_is_loaded(copy, monkeypatch):
    """A file replaced between the check and the load has no effect: the linker never opens it."""
    honest = loader.read_verified

    def replaced(path, manifest, **options):
        content = honest(path, manifest, **options)
        path.write_bytes(b"evil")
        return content

    monkeypatch.setattr(loader, "read_verified", replaced)
    monkeypatch.setattr(PROCESS, "artifacts", {})
    data, filter, _ = operands(P)
    assert_right(P, td.load(copy).bind(P, filter)(data), data, filter)
    assert made.file(copy, P, ".so").read_bytes() == b"evil"


@pytest.fixture(scope="module")
def elf(artifacts):
    return made.file(artifacts, P, ".so")


def test_dynamic_section(elf):
    found = dynamic(elf.read_bytes())
    assert "libc.so.6" in found.needed
    assert set(found.needed) <= loader.NEEDED
    listing = subprocess.run(["nm", "-D", "--defined-only", elf], capture_output=True, text=True, check=True).stdout
    assert found.defined == {line.split()[-1] for line in listing.splitlines()}


@given(st.integers(0, 1 << 16), st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 255)), max_size=6))
@example(size=624, changes=[(303, 128)])  # an offset of 64 bits
def test_dynamic_section_of_anything(elf, size, changes):
    """Whatever the bytes, an answer or ValueError."""
    content = bytearray(elf.read_bytes())
    for at, value in changes:
        content[at] = value
    with contextlib.suppress(ValueError):
        assert isinstance(dynamic(bytes(content[:size])).needed, list)


def open_files():
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("way", ["memory", "file"])
def test_every_library_is_loaded_as_itself(artifacts, way, monkeypatch, tmp_path):
    """The linker identifies libraries by name and by file: one after another, each must be its own."""
    if way == "file":
        monkeypatch.setattr(loader, "memory_file", lambda _: None)
    # Files in memory need no directory: services run where none can be written.
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path if way == "file" else tmp_path / "missing"))
    monkeypatch.setattr(PROCESS, "artifacts", {})
    library = td.load(artifacts)
    library.bind(P, operands(P)[1])
    before = open_files()
    for problem in made.PROBLEMS.values():
        data, filter, bias = operands(problem)
        assert_right(problem, library.bind(problem, filter, bias)(data), data, filter, bias)
    assert open_files() == before
    assert list(tmp_path.iterdir()) == []


def test_memory_files_forbidden(monkeypatch):
    def refuse(*_):
        raise PermissionError

    monkeypatch.setattr(os, "memfd_create", refuse)
    assert loader.memory_file("x.so") is None
    monkeypatch.delattr(os, "memfd_create")
    assert loader.memory_file("x.so") is None


def test_one_load_per_content(copy, artifacts):
    td.load(artifacts).bind(P, operands(P)[1])
    before = td.loaded()
    td.load(copy).bind(P, operands(P)[1])
    assert td.loaded() == before
    assert artifact_of(td.load(copy), P) is artifact_of(td.load(artifacts), P)


# ---- threads and processes ----


@pytest.mark.parametrize("count", [0, -1, 1025, True, 1.5, "2", [1]])
def test_wrong_thread_count(count):
    with pytest.raises(td.ProblemError, match=r"^num_threads="):
        td.set_num_threads(count)


def run(script, *arguments, **environment):
    command = [sys.executable, "-W", "error", "-c", script, *map(str, arguments)]
    root = Path(td.__file__).parents[1]
    environment = os.environ | {"PYTHONPATH": f"{root}:{root / 'tests'}"} | environment
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


SETUP = """
import os, sys, numpy as np, tvm_deconv as td
from tvm_deconv import Problem
library = td.load(sys.argv[1])
p = Problem.from_key(sys.argv[2])
def work():
    layer = library.bind(p, np.ones(p.filter_shape, np.float32))
    return layer(np.ones(p.data_shape, np.float32))
"""


def test_frameworks_that_confine_the_main_thread_do_not_confine_calls(artifacts):
    """Also if the first call comes from within such a framework, as OpenVINO while it computes."""
    if len(os.sched_getaffinity(0)) == 1:
        pytest.skip("one processor")
    script = SETUP + (
        "everywhere = os.sched_getaffinity(0)\n"
        "layer = library.bind(p, np.ones(p.filter_shape, np.float32))\n"
        "os.sched_setaffinity(0, {min(everywhere)})\n"
        "layer(np.ones(p.data_shape, np.float32))\n"
        "assert td.get_num_threads() == len(everywhere)\n"
    )
    done = run(script, artifacts, P.key)
    assert done.returncode == 0, done.stderr


def test_thread_count(artifacts):
    script = SETUP + (
        "assert td.get_num_threads() is None\n"
        "td.set_num_threads(3)\n"
        "assert td.get_num_threads() == 3\n"
        "work()\n"
        "assert td.get_num_threads() == 3\n"
        "td.set_num_threads(2)\n"
        "assert td.get_num_threads() == 2\n"
        "td.set_num_threads(None)\n"
        "assert td.get_num_threads() == 5\n"
    )
    done = run(script, artifacts, P.key, TVM_DECONV_NUM_THREADS="5")
    assert done.returncode == 0, done.stderr


BOUND = SETUP + (
    "from tvm_deconv.runtime import loader\n"
    "from tvm_deconv.runtime.process import PROCESS\n"
    "layer, data = library.bind(p, np.ones(p.filter_shape, np.float32)), np.ones(p.data_shape, np.float32)\n"
    "expected = layer(data)\n"
)


def forking(artifacts, before, *child, times=1):
    """Run BOUND, `before`, and `child` in as many forked children, which end with 0 where all is well."""
    lines = [
        f"for _ in range({times}):",
        "    pid = os.fork()",
        "    if pid == 0:",
        *(f"        {line}" for line in child),
    ]
    script = "\n".join([BOUND + before, *lines, "    assert os.waitpid(pid, 0)[1] == 0", ""])
    done = run(script, artifacts, P.key)
    assert done.returncode == 0, done.stderr


def test_forked_child(artifacts):
    """A child may call what its parent bound and load more, even where a thread of the parent was loading."""
    before = "PROCESS.lock.acquire()"
    works = "os._exit(0 if np.array_equal(layer(data), expected) and np.array_equal(work(), expected) else 1)"
    forking(artifacts, before, "library = td.load(sys.argv[1])", works)


DAEMONS = """
import threading, time
def call(ready):
    while True:
        layer(data)
        ready.set()
def bind(ready):
    while True:
        work()
        ready.set()
for target in [call] * 3 + [bind] * 3:
    ready = threading.Event()
    threading.Thread(target=target, args=(ready,), daemon=True).start()
    ready.wait()
"""


@pytest.mark.parametrize("ending", ["", "sys.exit(0)", "threading.Thread(target=lambda: time.sleep(0.05)).start()"])
def test_exit_with_daemon_threads_inside_calls(artifacts, ending):
    """Several times, since whether a thread is inside at the wrong moment is chance."""
    for _ in range(3):
        done = run(BOUND + DAEMONS + ending, artifacts, P.key)
        assert (done.returncode, done.stderr) == (0, "")


def test_calls_at_exit(artifacts):
    """The thread that ends the interpreter may still call layers, from functions that run at exit after ours."""
    script = (
        "import atexit\n"
        "@atexit.register\n"
        "def last():\n"
        "    assert layer(data).tobytes() == expected.tobytes()\n"
        "    print('called')\n"
    )
    script += BOUND + DAEMONS
    done = run(script, artifacts, P.key)
    assert (done.returncode, done.stdout, done.stderr) == (0, "called\n", "")


def test_a_forked_child_ends_whatever_its_parent_was_doing(artifacts):
    forking(artifacts, DAEMONS, "layer(data)", "sys.exit(0)", times=5)


def test_a_forked_child_selects_whatever_its_parent_was_selecting(artifacts):
    selecting = (
        "import signal, threading\n"
        "def select():\n"
        "    while True:\n"
        "        td.load(sys.argv[1]).select(p)\n"
        "threading.Thread(target=select, daemon=True).start()\n"
    )
    works = "os._exit(0 if np.array_equal(work(), expected) else 1)"
    forking(artifacts, selecting, "signal.alarm(30)", "library = td.load(sys.argv[1])", works, times=20)


def test_threads_of_a_call(tmp_path):
    """A limit is of one call and one thread; without one, many callers share as many threads as are set."""
    several_tasks = P.replace(batch=6, in_channels=16, out_channels=32, data_spatial=(20, 20), output_spatial=(39, 39))
    made.export(tmp_path, [several_tasks])
    script = SETUP + (
        "import threading, time\n"
        "from support.threads import workers\n"
        "td.set_num_threads(3)\n"
        "layer, data = library.bind(p, np.ones(p.filter_shape, np.float32)), np.ones(p.data_shape, np.float32)\n"
        "expected = layer(data, threads=1)\n"
        "assert workers() == 0\n"
        "wrong = []\n"
        "def caller():\n"
        "    for _ in range(200):\n"
        "        if not np.array_equal(layer(data), expected): wrong.append(1)\n"
        "callers = [threading.Thread(target=caller) for _ in range(8)]\n"
        "for caller in callers: caller.start()\n"
        "for caller in callers: caller.join()\n"
        "end = time.time() + 10\n"
        "while workers() != 2 and time.time() < end: time.sleep(0.001)\n"
        "assert workers() == 2 and not wrong\n"
        "out = np.full_like(expected, np.nan)\n"
        "assert layer(data, out, threads=2) is out and np.array_equal(out, expected)\n"
    )
    done = run(script, tmp_path, several_tasks.key)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "wrong",
    [
        *({"threads": count} for count in (0, -1, 1025, True, 1.5, "2")),
        *({"host": one} for one in (None, True, 1.5, "2", -1, 2**64)),
    ],
)
def test_wrong_threads_of_a_call(library, wrong):
    data, filter, _ = operands(P)
    (name,) = wrong
    with pytest.raises(td.ProblemError, match=f"^{name}="):
        library.bind(P, filter)(data, **wrong)


def test_neither_layers_nor_libraries_are_pickled(library):
    layer = library.bind(P, operands(P)[1])
    for name, kept in (("layer", layer), ("library", library)):
        for keep in (pickle.dumps, deepcopy):
            with pytest.raises(td.ProblemError, match=f"^{name}=.* must not be copied or pickled"):
                keep(kept)


# ---- what is in use ----


def counted(layer):
    (found,) = [each for each in td.loaded() if each.sha256 == layer.manifest.sha256]
    return found


def test_loaded(artifacts, monkeypatch):
    monkeypatch.setattr(PROCESS, "artifacts", {})
    assert td.loaded() == []
    library = td.load(artifacts)
    assert td.loaded() == []
    data, filter, _ = operands(P)
    layer = library.bind(P, filter)
    manifest = layer.manifest
    path = str(artifacts / manifest.library)
    facts = (manifest.name, P.artifact_key, made.TARGET, path, manifest.sha256)
    assert td.loaded() == [(*facts, 0, 0.0)]
    before = time.perf_counter()
    for _ in range(3):
        layer(data)
    layer(data, np.empty(P.output_shape, np.float32))
    library.convolution_backprop_data(data, filter, (2, 2), None, (1, 1), (1, 1))
    elapsed = time.perf_counter() - before
    with pytest.raises(td.TensorError):
        layer(data[:1])
    found = counted(layer)
    assert found.calls == 5
    assert 0 < found.seconds < elapsed


def test_no_count_is_lost_between_threads(artifacts, monkeypatch):
    monkeypatch.setattr(PROCESS, "artifacts", {})
    data, filter, _ = operands(P)
    layer = td.load(artifacts).bind(P, filter)

    def caller(_):
        for _ in range(500):
            layer(data)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(caller, range(8)))
    assert counted(layer).calls == 4000


def test_a_forked_child_counts_on(artifacts):
    before = "loader.load(library.root, library.select(p)[0].manifest).lock.acquire()"
    forking(artifacts, before, "layer(data)", "os._exit(td.loaded()[0].calls - 2)")


def test_nothing_is_printed_and_everything_is_logged(copy):
    spoil(made.file(copy, made.PROBLEMS["bias"], ".json"))
    script = SETUP + "work()\nlibrary = td.load(sys.argv[1], fallback='reference')\np = p.replace(batch=9)\nwork()\n"
    done = run(script, copy, P.key)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    done = run(
        "import logging\nlogging.basicConfig(level='INFO', format='%(levelname)s %(name)s %(message)s')\n" + script,
        copy,
        P.key,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    assert all(line.split()[1] == "tvm_deconv" for line in lines)
    assert [line.split()[0] for line in lines] == ["WARNING", "INFO", "INFO", "WARNING", "INFO", "WARNING"]
    assert "ignored: format=3" in lines[0]
    assert f"{copy} holds {len(made.PROBLEMS) - 1} artifacts, 1 broken; sha256:" in lines[1]
    assert f"loaded {made.file(copy, P, '.so')} in" in lines[2]
    assert lines[5].endswith(f"no artifact serves {P.replace(batch=9).artifact_key}: NumPy computes it, slowly")


def test_threads_that_load_at_once(artifacts, monkeypatch):
    monkeypatch.setattr(PROCESS, "artifacts", {})
    barrier = threading.Barrier(8)
    libraries = [td.load(artifacts) for _ in range(8)]

    def work(library):
        barrier.wait()
        return artifact_of(library, P)

    with ThreadPoolExecutor(8) as pool:
        assert len(set(map(id, pool.map(work, libraries)))) == 1
