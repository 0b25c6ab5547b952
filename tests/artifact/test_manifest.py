"""Manifests, strictly read, and the choice among them."""

import dataclasses
import json
from types import SimpleNamespace

import pytest
from support.manifests import P, fields

from tvm_deconv.artifact.manifest import Manifest, library_name, stem, stem_of
from tvm_deconv.artifact.select import Accepted, Rejected, decision_table, select
from tvm_deconv.errors import ManifestError
from tvm_deconv.problem import Epilogue
from tvm_deconv.targets import CPU_TARGETS, CUDA_TARGETS, Host, Place

V3, V4 = CPU_TARGETS["x86-64-v3"], CPU_TARGETS["x86-64-v4"]


def manifest(*arguments, **changes):
    return Manifest(**fields(*arguments, **changes))


def read(found):
    return Manifest.from_json(json.dumps(found), "artifacts/x.json")


def test_round_trip():
    there = manifest()
    assert Manifest.from_json(there.to_json()) == there
    assert json.loads(there.to_json()) == fields()
    assert there.parsed == P.replace(filter_format="GIOX")
    assert there.name == stem(P.artifact_key, "x86-64-v3")


def test_round_trip_of_other_scripts():
    there = manifest(layers=["слой", "層\n"])
    assert Manifest.from_json(there.to_json().encode()) == there
    assert "слой" in there.to_json()


def test_only_a_private_manifest_must_be_its_users_alone(tmp_path):
    path = tmp_path / "shared.json"
    path.write_text(manifest().to_json())
    path.chmod(0o666)
    assert Manifest.read(path) == manifest()
    with pytest.raises(ManifestError, match="must be writable by its owner alone"):
        Manifest.read(path, private=True)


def test_a_manifest_does_not_change():
    there = manifest()
    with pytest.raises(dataclasses.FrozenInstanceError):
        there.size = 1
    with pytest.raises(TypeError):
        Manifest(1)


@pytest.mark.parametrize(("scratch", "lane"), [(0, 64), (1, 64), (64, 64), (65, 128), (1000, 1024)])
def test_a_workspace_is_of_whole_lines(scratch, lane):
    there = manifest(scratch_bytes=scratch)
    assert there.lane_bytes == lane
    # Two lines besides: one to begin at a line, one for the header.
    assert [there.workspace_bytes(threads) for threads in (0, 1, 5)] == [128, 128 + lane, 128 + 5 * lane]
    shared = manifest(scratch_bytes=scratch, shared_bytes=130)
    assert shared.workspace_bytes(3) == 128 + 192 + 3 * lane


def test_every_field_is_checked():
    """A new field needs a rule, and so a line in one of the tables below."""
    tested = {name for name, _, _ in WRONG}
    assert tested == {field.name for field in dataclasses.fields(Manifest)}


@pytest.mark.parametrize(
    ("name", "value"),
    [("size", 1), ("size", 1 << 30), ("scratch_bytes", 1 << 40), ("shared_bytes", 0), ("macs", 0), ("macs", 2**63 - 1)],
)
def test_the_ends_of_ranges_are_allowed(name, value):
    assert getattr(manifest(**{name: value}), name) == value


def test_stem():
    key = P.artifact_key
    assert stem(key, "x86-64-v3") != stem(key, "x86-64-v4")
    assert stem(key, "x86-64-v3") != stem(P.replace(batch=2).artifact_key, "x86-64-v3")


@pytest.mark.parametrize("target", ["x86-64-v3", "x86-64-v3.5", "a.0123456789abcdef.so"])
def test_stem_of_its_files(target):
    """Also where a target's name looks like the rest of a file's."""
    name = stem(P.artifact_key, target)
    assert stem_of(f"{name}.json") == name
    assert stem_of(library_name(name, "ab" * 32)) == name
    assert manifest(target=target, library=library_name(name, "ab" * 32)).name == name


@pytest.mark.parametrize(
    "name",
    [
        "",
        "layers.json",
        "0123456789abcdef.json",
        "0123456789abcdeg-x86.json",
        "0123456789ABCDEF-x86.json",
        "0123456789abcdef-x86.so",
        "0123456789abcdef-x86.0123456789abcde.so",
        "0123456789abcdef-x86.json.tmp",
        "../0123456789abcdef-x86.json",
    ],
)
def test_files_that_are_not_ours(name):
    assert stem_of(name) is None


def test_one_artifact_for_every_filter_format():
    grouped = P.replace(filter_format="GIOX")
    assert {p.artifact_key for p in (P, grouped, P.replace(filter_format="XIO"))} == {grouped.key}


HUGE = 1 << 63
WRONG = [
    ("format", 3, "must be at most 2: a newer version wrote it, upgrade this one"),
    ("format", 0, "must be an integer, at least 1"),
    ("format", True, "must be an integer, at least 1"),
    ("format", 1.0, "must be an integer, at least 1"),
    ("format", "1", "must be an integer, at least 1"),
    ("format", None, "must be an integer, at least 1"),
    ("problem", 7, "must be a string"),
    ("problem", "n1-g1", "must be the key of a problem: key='n1-g1': must be the printed key of a problem"),
    ("problem", "n" + "1" * 5000, "must be at most 1000 characters"),
    ("problem", P.key, f"must be an artifact key, here {P.artifact_key}"),
    ("layers", "decoder", "must be a list of strings"),
    ("layers", [1], "must be a list of strings"),
    ("layers", {"a": "b"}, "must be a list of strings"),
    ("target", None, "must be the plain name of a target"),
    ("target", "../v3", "must be the plain name of a target"),
    ("target", "", "must be the plain name of a target"),
    ("features", "avx2", "must be a list of different CPU flags"),
    ("features", ["avx2", 2], "must be a list of different CPU flags"),
    ("features", ["avx2", "avx2"], "must be a list of different CPU flags"),
    ("needs", ["GLIBC"], "must map names of GLIBC, GLIBCXX, CXXABI, GCC, tvm_ffi to versions"),
    ("needs", {"musl": "1.2"}, "must map names of GLIBC, GLIBCXX, CXXABI, GCC, tvm_ffi to versions"),
    ("needs", {"GLIBC": 2.28}, "must map names of GLIBC, GLIBCXX, CXXABI, GCC, tvm_ffi to versions"),
    ("needs", {"GLIBC": "2.28-rc"}, "must map names of GLIBC, GLIBCXX, CXXABI, GCC, tvm_ffi to versions"),
    ("library", 3, "must be a plain file name in the manifest's directory"),
    ("library", "../x.so", "must be a plain file name in the manifest's directory"),
    ("library", "/lib/libc.so.6", "must be a plain file name in the manifest's directory"),
    ("library", "sub/x.so", "must be a plain file name in the manifest's directory"),
    ("library", "sub\\x.so", "must be a plain file name in the manifest's directory"),
    ("library", "x.so\0", "must be a plain file name in the manifest's directory"),
    ("library", "..", "must be a plain file name in the manifest's directory"),
    ("library", "", "must be a plain file name in the manifest's directory"),
    ("library", "x.so", f"must be {manifest().library}, which problem, target and sha256 decide"),
    ("sha256", "ab" * 31, "must be 64 lower-case hexadecimal digits"),
    ("sha256", "AB" * 32, "must be 64 lower-case hexadecimal digits"),
    ("sha256", "ab" * 32 + "\n", "must be 64 lower-case hexadecimal digits"),
    ("sha256", 1, "must be 64 lower-case hexadecimal digits"),
    ("size", 0, "must be an integer from 1 to 1073741824 (bytes)"),
    ("size", (1 << 30) + 1, "must be an integer from 1 to 1073741824 (bytes)"),
    ("size", 5.0, "must be an integer from 1 to 1073741824 (bytes)"),
    ("algorithm", "", "must be a plain name"),
    ("algorithm", ["direct"], "must be a plain name"),
    ("origin", "guessed", "must be one of default, tuned"),
    ("origin", [], "must be one of default, tuned"),
    ("knobs", [], "must map names to integers"),
    ("knobs", {"tile": "8"}, "must map names to integers"),
    ("knobs", {"tile": True}, "must map names to integers"),
    ("knobs", {"tile": HUGE}, "must map names to integers"),
    ("packed_shape", 3, "must be a list of extents"),
    ("packed_shape", [3, -1], "must be a list of extents"),
    ("packed_shape", [3, 1.5], "must be a list of extents"),
    ("packed_shape", [1 << 40, 1 << 40], "must hold fewer than 2**60 elements"),
    ("packed_dtype", "bfloat16", "must be one of float64, float32, float16, uint16, int32, int16, int8, uint8"),
    ("packed_dtype", None, "must be one of float64, float32, float16, uint16, int32, int16, int8, uint8"),
    ("scratch_bytes", -1, "must be an integer from 0 to 1099511627776 (bytes)"),
    ("scratch_bytes", 2**62, "must be an integer from 0 to 1099511627776 (bytes)"),
    ("shared_bytes", HUGE, "must be an integer from 0 to 1099511627776 (bytes)"),
    ("shared_bytes", -1, "must be an integer from 0 to 1099511627776 (bytes)"),
    ("macs", False, "must be an integer, at least 0"),
    ("versions", {"tvm": 27}, "must map names to strings"),
    ("versions", "tvm", "must map names to strings"),
    ("recipe", "", "must be 64 lower-case hexadecimal digits"),
    ("recipe", None, "must be 64 lower-case hexadecimal digits"),
]


@pytest.mark.parametrize(("name", "value", "rule"), WRONG)
def test_wrong_field(name, value, rule):
    """Field, value and rule, both when a manifest is read and when one is made."""
    with pytest.raises(ManifestError) as caught:
        read(fields(**{name: value}))
    error = caught.value
    assert (error.attribute, error.value, error.rule) == (name, value, rule)
    assert str(error).startswith(f"{name}=")
    assert str(error).endswith(f"{rule} (in artifacts/x.json)")
    with pytest.raises(ManifestError) as caught:
        manifest(**{name: value})
    assert (caught.value.attribute, caught.value.rule) == (name, rule)


def test_the_first_format():
    """It says nothing of the versions that a library needs."""
    first = {name: value for name, value in fields(format=1).items() if name != "needs"}
    there = read(first)
    assert json.loads(there.to_json()) == first
    assert not there.states_needs
    with pytest.raises(ManifestError, match=r"^needs=.*: is not a field of manifest format 1"):
        read(fields(format=1))


def test_unknown_field():
    with pytest.raises(ManifestError, match="colour='red': is not a field of manifest format 2"):
        read(fields(colour="red"))


@pytest.mark.parametrize("name", sorted(fields().keys() - {"format"}))
def test_missing_field(name):
    found = fields()
    del found[name]
    with pytest.raises(ManifestError, match=f"^{name}=None: is missing"):
        read(found)


def test_missing_format():
    found = fields()
    del found["format"]
    with pytest.raises(ManifestError, match="format=None: must be an integer"):
        read(found)


def test_the_future_is_recognised_first():
    """A newer format may have other fields: its number is what must be said."""
    with pytest.raises(ManifestError, match=r"format=3: .* newer version"):
        read({"format": 3, "artifacts": []})


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("", "must be JSON"),
        ("{", "must be JSON"),
        ("[1]", "must be a JSON object"),
        ("null", "must be a JSON object"),
        (b"\xff\xfe\xff", "must be JSON"),
        ("[" * 100_000, "must be JSON"),
        ('{"format": 1, "format": 1}', "a field appears twice"),
        ('{"macs": NaN}', "NaN is not a JSON number"),
        ('{"macs": ' + "1" * 10_000 + "}", "must be JSON|is missing|must be an integer"),
    ],
)
def test_not_json(text, rule):
    with pytest.raises(ManifestError, match=rule):
        Manifest.from_json(text, "x.json")


def test_file(tmp_path):
    path = tmp_path / "x.json"
    path.write_text(manifest().to_json())
    assert Manifest.read(path) == manifest()
    path.write_text(manifest().to_json() + " " * (1 << 20))
    with pytest.raises(ManifestError, match="must be at most 1048576 bytes") as caught:
        Manifest.read(path)
    assert caught.value.path == path
    with pytest.raises(ManifestError, match="must be readable"):
        Manifest.read(tmp_path / "absent.json")
    with pytest.raises(ManifestError, match="must be readable"):
        Manifest.read(tmp_path)


# ---- selection ----


def names(knobs):
    return [(type(decision).__name__, decision.manifest.target) for decision in knobs]


def test_wider_first():
    narrow, wide = manifest(), manifest(P, "x86-64-v4")
    for given in ([narrow, wide], [wide, narrow]):
        knobs = select(P, given, Place(Host(V4.features)))
        assert names(knobs) == [("Accepted", "x86-64-v4"), ("Accepted", "x86-64-v3")]
    assert knobs[0].reason == "serves this problem and this CPU: x86-64-v4, direct, default schedule"


def test_libraries_that_are_too_old():
    """The families that are known here count."""
    there = manifest(needs={"GLIBC": "2.34", "GLIBCXX": "3.4.30", "tvm_ffi": "0.1.14"})

    def decided(**libraries):
        (decision,) = select(P, [there], Place(Host(V3.features), libraries=libraries))
        return type(decision), decision.reason

    assert decided(GLIBC="2.34", tvm_ffi="0.1.14")[0] is Accepted
    assert decided()[0] is Accepted
    assert decided(GLIBC="2.31", GLIBCXX="3.4.30", tvm_ffi="0.1.9") == (
        Rejected,
        "needs GLIBC 2.34, tvm_ffi 0.1.14; this machine has GLIBC 2.31, tvm_ffi 0.1.9",
    )
    old = Place(Host(V3.features), libraries={"GLIBC": "2.17"})
    assert select(P, [there, manifest()], old)[0].manifest == manifest()


def test_flags_beyond_the_target():
    """Of two for the same target the one that needs more is the wider; where its flags are missing it is rejected."""
    plain = manifest(P, "x86-64-v4")
    special = manifest(P, "x86-64-v4", features=[*sorted(V4.features), "avx512_bf16"])
    assert [d.manifest for d in select(P, [plain, special], Place(Host(V4.features | {"avx512_bf16"})))] == [
        special,
        plain,
    ]
    assert select(P, [plain, special], Place(Host(V4.features))) == [
        Accepted(plain, "serves this problem and this CPU: x86-64-v4, direct, default schedule"),
        Rejected(special, "needs CPU flags that this host lacks: avx512_bf16", special.name),
    ]


def test_another_cpu():
    knobs = select(P, [manifest(P, "x86-64-v4")], Place(Host(V3.features | {"avx512f"})))
    assert isinstance(knobs[0], Rejected)
    assert knobs[0].reason == "needs CPU flags that this host lacks: avx512bw, avx512cd, avx512dq, avx512vl"


def test_the_target_counts_even_where_the_list_is_short():
    knobs = select(P, [manifest(P, "x86-64-v4", features=[])], Place(Host(V3.features)))
    assert isinstance(knobs[0], Rejected)
    assert "avx512f" in knobs[0].reason


def test_tuned_before_default():
    tuned, default = manifest(origin="tuned"), manifest()
    assert [d.manifest for d in select(P, [default, tuned], Place(Host(V4.features)))] == [tuned, default]


def test_exact_before_dynamic():
    """Also if the others come first by name, or are tuned."""
    dynamic = [P.replace(dynamic=(0,)), P.replace(dynamic=(0, 1))]
    given = [manifest(problem, origin="tuned") for problem in dynamic] + [manifest(P)]
    chosen = select(P, given, Place(Host(V4.features)))
    assert [decision.manifest.parsed.dynamic for decision in chosen] == [(), (0,), (0, 1)]
    assert all(isinstance(decision, Accepted) for decision in chosen)


def test_a_dynamic_problem_of_its_own_is_exact():
    problem = P.replace(dynamic=(0, 1))
    given = [manifest(P.replace(dynamic=(0, 1, 2)), origin="tuned"), manifest(problem)]
    chosen = select(problem, given, Place(Host(V4.features)))
    assert chosen[0].manifest.parsed == problem.replace(filter_format="GIOX")
    assert "serves this problem" in chosen[0].reason


def test_cap():
    narrow, wide = manifest(), manifest(P, "x86-64-v4")
    first, second = select(P, [narrow, wide], Place(Host(V4.features), V3))
    assert first.manifest is narrow
    assert isinstance(first, Accepted)
    assert isinstance(second, Rejected)
    reason = "TVM_DECONV_MAX_TARGET=x86-64-v3 excludes CPU flags that it needs: "
    assert second.reason == reason + "avx512bw, avx512cd, avx512dq, avx512f, avx512vl"
    assert names(select(P, [narrow, wide], Place(Host(V4.features), V4)))[0] == ("Accepted", "x86-64-v4")


def test_unknown_target():
    (decision,) = select(P, [manifest(P, "riscv-rvv")], Place(Host(V4.features)))
    assert isinstance(decision, Rejected)
    known = ", ".join((*CPU_TARGETS, *CUDA_TARGETS))
    rule = f"target riscv-rvv is not known to this version, which knows {known}, and what needs all CPU flags of one"
    assert decision.reason == rule


def test_a_microarchitecture_is_known_by_its_flags():
    own = ("avx512_bf16", "sse4a")
    tuned = manifest(P, "znver99", features=[*V4.features, *own])
    narrow, wide = manifest(), manifest(P, "x86-64-v4")

    def decided(features, cap=None):
        return names(select(P, [narrow, wide, tuned], Place(Host(frozenset(features)), cap)))

    assert decided(tuned.required) == [("Accepted", "znver99"), ("Accepted", "x86-64-v4"), ("Accepted", "x86-64-v3")]
    assert decided(tuned.required - {"sse4a"})[-1] == ("Rejected", "znver99")
    assert decided(tuned.required, V4)[-1] == ("Rejected", "znver99")
    reason = select(P, [tuned], Place(Host(tuned.required), V4))[0].reason
    assert reason == "TVM_DECONV_MAX_TARGET=x86-64-v4 excludes CPU flags that it needs: avx512_bf16, sse4a"


def test_flags_below_every_level_are_no_target():
    (decision,) = select(P, [manifest(P, "nehalem", features=sorted(V3.features - {"fma"}))], Place(Host(V4.features)))
    assert isinstance(decision, Rejected)
    assert decision.reason.startswith("target nehalem is not known to this version")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"batch": 2}, "batch 1, wanted 2"),
        ({"strides": (1, 1)}, "strides (2, 2), wanted (1, 1)"),
        ({"dtype": "float16"}, "dtype float32, wanted float16"),
        ({"data_format": "NXC"}, "data_format NCX, wanted NXC"),
        ({"epilogue": Epilogue(True, "relu")}, "epilogue none, wanted bias+relu"),
        ({"batch": 2, "groups": 1}, "batch 1, wanted 2; groups 2, wanted 1"),
        (
            {"batch": 2, "groups": 1, "in_channels": 1, "dtype": "int8", "pads_begin": (0, 0)},
            "batch 1, wanted 2; groups 2, wanted 1; in_channels 3, wanted 1; and 2 more",
        ),
    ],
)
def test_another_problem(changes, reason):
    (decision,) = select(P.replace(**changes), [manifest()], Place(Host(V4.features)))
    assert isinstance(decision, Rejected)
    assert decision.reason == f"serves another problem: {reason}"


def test_filter_format_makes_no_difference():
    for name in ("IOX", "GIOX", "XIO"):
        assert isinstance(select(P.replace(filter_format=name), [manifest()], Place(Host(V4.features)))[0], Accepted)


def test_order_and_broken():
    """Accepted, then those for this problem, the unreadable, and the others by likeness."""
    good, wide = manifest(), manifest(P, "x86-64-v4")
    near, far = manifest(P.replace(batch=2)), manifest(P.replace(batch=2, dtype="float64"))
    knobs = select(P, [far, near, wide, good], Place(Host(V3.features)), broken={"x": "size='big': must be an integer"})
    assert [decision.manifest for decision in knobs] == [good, wide, None, near, far]
    assert knobs[2] == Rejected(None, "size='big': must be an integer", "x")
    assert str(knobs[2]) == "x: rejected: size='big': must be an integer"
    assert str(knobs[0]).startswith(f"{good.name}: accepted: serves this problem")


def test_nothing():
    assert select(P, [], Place(Host(V4.features))) == []
    assert decision_table([]) == "no candidates"


def test_table():
    lines = decision_table(
        select(P, [manifest(), manifest(P, "x86-64-v4")], Place(Host(V3.features)), broken={"x": "bad"})
    ).splitlines()
    assert [line.split()[0] for line in lines] == ["yes", "no", "no"]
    assert len({line.index(reason) for line, reason in zip(lines, ["serves", "needs", "bad"], strict=True)}) == 1


def test_table_of_many():
    many = [SimpleNamespace(name=str(number), reason="other") for number in range(25)]
    assert decision_table(many) == decision_table(many, limit=20)
    assert decision_table(many, limit=20).splitlines()[19:] == ["no   19  other", "and 5 more"]
