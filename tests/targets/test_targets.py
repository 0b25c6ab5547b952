"""Targets, and reading the host from the text of /proc/cpuinfo."""

import dataclasses
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import archspec.cpu
import pytest

from tvm_deconv import schedules, targets
from tvm_deconv.errors import ProblemError
from tvm_deconv.extras import install
from tvm_deconv.problem import Problem
from tvm_deconv.targets import (
    CPU_TARGETS,
    Host,
    Place,
    Target,
    detect_host,
    get,
    known_targets,
    max_target,
    microarchitecture,
    native,
    of_artifact,
    of_names,
    parse_cpuinfo,
    supported,
)
from tvm_deconv.targets.cpu import _CACHES, _MESHES, _TWO_WIDE, CpuTarget, microarchitectures

V3, V4 = CPU_TARGETS["x86-64-v3"], CPU_TARGETS["x86-64-v4"]
CPUS = "x86-64-v3, x86-64-v4, x86-64-v3-vnni, x86-64-v4-vnni, x86-64-v4-bf16, x86-64-v4-amx"
NAMES = f"{CPUS}, cuda-sm_80, cuda-sm_86, cuda-sm_89, cuda-sm_90, cuda-sm_100, cuda-sm_120, cuda-sm_90a, cuda"

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
@pytest.mark.parametrize("target", CPU_TARGETS.values(), ids=CPU_TARGETS)
def test_features_are_those_of_the_psabi(target):
    """What a compiler may use at this level is what we ask of a CPU, under the names of /proc/cpuinfo."""
    macros = subprocess.run(
        [
            "gcc",
            f"-march={target.mcpu}",
            *(f"-m{name}" for name in target.extensions),
            "-dM",
            "-E",
            "-x",
            "c",
            "/dev/null",
        ],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    defined = {line.split()[1].strip("_").lower() for line in macros.splitlines()}
    names = {
        "avx512_bf16": "avx512bf16",
        "avx512_vnni": "avx512vnni",
        "avx_vnni": "avxvnni",
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


@pytest.mark.parametrize(
    ("name", "level", "some", "others"),
    [
        ("haswell", V3, {"rdrand"}, {"adx"}),
        ("znver4", V4, {"avx512_bf16", "sse4a", "pni"}, {"amx_tile", "sse3", "pku", "flush_l1d"}),
        ("sapphirerapids", V4, {"amx_tile", "avx512_fp16"}, {"sse4a"}),
        ("knl", V3, {"avx512f", "avx512er"}, {"avx512bw"}),  # not all of x86-64-v4, so the vectors of x86-64-v3
    ],
)
def test_microarchitectures(name, level, some, others):
    found = get(name)
    assert found is get(name)
    assert (found.name, found.mcpu, found.level) == (name, name, level.name)
    assert level.features < found.features
    assert some <= found.features
    assert not others & found.features
    facts = ("vector_bits", "vector_registers")
    assert all(getattr(found, fact) == getattr(level, fact) for fact in facts)


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [("haswell", 32, 256), ("znver3", 32, 512), ("alderlake", 48, 1280), ("znver4", 32, 1024), ("znver5", 48, 1024)],
)
def test_caches_of_microarchitectures(name, first, second):
    found = get(name)
    assert (found.l1_bytes, found.l2_bytes) == (first << 10, second << 10)


def test_every_microarchitecture_with_other_caches_is_known():
    assert all(isinstance(microarchitectures().get(name), CpuTarget) for name in _CACHES)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("nehalem", "must not be below x86-64-v3: it lacks abm, avx, avx2, bmi1, bmi2, f16c, fma, movbe"),
        ("x86-64-v2", "must not be below x86-64-v3: it lacks "),
        ("neoverse_v1", "must be a microarchitecture of x86-64, not of aarch64"),
        ("zen4", "must be one of {NAMES}; or a microarchitecture: alderlake, "),
    ],
)
def test_microarchitectures_that_are_none(name, text):
    with pytest.raises(ProblemError) as caught:
        get(name)
    assert str(caught.value).startswith(f"target={name!r}: {text.format(NAMES=NAMES)}")


@pytest.fixture
def no_cache():
    targets.microarchitectures.cache_clear()
    yield
    targets.microarchitectures.cache_clear()


@pytest.mark.usefixtures("no_cache")
def test_microarchitectures_need_archspec(monkeypatch):
    monkeypatch.setitem(sys.modules, "archspec", None)
    with pytest.raises(ProblemError) as caught:
        get("znver4")
    rule = f"must be one of {NAMES}; microarchitectures need archspec: {install('compile')}"
    assert str(caught.value) == f"target='znver4': {rule}"


# Names that LLVM and /proc/cpuinfo do not spell alike, but for points and underscores.
LLVM = {"abm": "lzcnt", "bmi1": "bmi", "pni": "sse3"}


def test_microarchitectures_have_the_flags_that_llvm_may_use():
    """An instruction of code for it that a CPU with all of its flags does not have would end the process.

    Of the extensions that LLVM uses without being told to.
    """
    import tvm
    from tvm.target import codegen

    kinds = ("sse", "avx", "amx", "fma", "xop", "tbm", "bmi", "f16c", "lzcnt", "popcnt", "movbe", "gfni")
    checked = 0
    for name, target in targets.microarchitectures().items():
        if isinstance(target, Target) and codegen.llvm_is_valid_cpu(name, "x86_64-unknown-linux-gnu"):
            ours = {LLVM.get(flag, flag).replace("_", "") for flag in target.features}
            used = codegen.llvm_get_cpu_features(tvm.target.Target({"kind": "llvm", "mcpu": name}))
            theirs = {str(feature).replace(".", "").replace("-", "") for feature in used}
            assert {feature for feature in theirs if feature.startswith(kinds)} <= ours, name
            checked += 1
    assert checked > 15


def test_microarchitecture_of_a_host():
    znver4 = get("znver4").features | {"fpu", "syscall"}
    assert microarchitecture(Host(znver4, vendor="AuthenticAMD")) is get("znver4")
    assert microarchitecture(Host(znver4 - {"avx512_bf16"}, vendor="AuthenticAMD")) is get("znver3")
    assert microarchitecture(Host(znver4, vendor="GenuineIntel")) is None
    hidden = {"waitpkg", "movdiri", "pku"}  # by virtual machines, which keep what kernels need
    assert not hidden & get("sapphirerapids").features
    assert microarchitecture(Host(get("sapphirerapids").features, vendor="GenuineIntel")) is get("sapphirerapids")
    assert microarchitecture(Host(V4.features, vendor="AuthenticAMD")) is None
    assert parse_cpuinfo("processor: 0\nvendor_id: AuthenticAMD\nflags: fma").vendor == "AuthenticAMD"


@pytest.mark.parametrize("name", ["native", "", "x86-64-v9", "X86-64-V3", None, [], 3])
def test_get_unknown(name):
    with pytest.raises(ProblemError, match=f"must be one of {CPUS}") as caught:
        get(name)
    assert (caught.value.attribute, caught.value.value) == ("target", name)


def test_supported_widest_first():
    assert supported(V4.features | {"amx_tile"}) == [V4, V3]
    assert supported(V4.features - {"avx512vl"}) == [V3]
    assert supported(frozenset()) == []


def test_native():
    assert native(Host(V4.features)) is V4
    assert native(Host(V3.features | {"avx512f"})) is V3
    assert native(Host(V4.features | {"avx512_vnni", "avx512_bf16"})).name == "x86-64-v4-bf16"
    assert native(Host(get("x86-64-v4-amx").features)).name == "x86-64-v4-amx"
    assert native(Host(V4.features | {"avx512_vnni"})).logs == ("x86-64-v4-vnni", "x86-64-v4")


@pytest.mark.parametrize(
    ("name", "ancestors"),
    [
        ("x86-64-v3", ()),
        ("x86-64-v3-vnni", ("x86-64-v3",)),
        ("x86-64-v4", ()),  # vectors of x86-64-v3 are half as wide
        ("x86-64-v4-vnni", ("x86-64-v4",)),
        ("x86-64-v4-bf16", ("x86-64-v4-vnni", "x86-64-v4")),
        ("x86-64-v4-amx", ("x86-64-v4-bf16", "x86-64-v4-vnni", "x86-64-v4")),
        ("znver3", ("x86-64-v3",)),
        ("znver4", ("x86-64-v4-bf16", "x86-64-v4-vnni", "x86-64-v4")),
        ("cuda-sm_90", ()),
    ],
)
def test_ancestors_have_the_same_vectors_and_fewer_flags(name, ancestors):
    assert get(name).ancestors == ancestors


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
    assert str(caught.value) == f"TVM_DECONV_MAX_TARGET='avx2': must be one of {CPUS}"


def test_target_is_frozen():
    with pytest.raises(AttributeError):
        V3.name = "other"
    assert isinstance(hash(V3), int)
    assert isinstance(V3, Target)


# ---- the contract ----

V3_FLAGS = V3.features
DEVICE = Place(Host(V3_FLAGS), capability=(9, 0))


@pytest.mark.parametrize("target", known_targets().values(), ids=known_targets())
def test_every_target_keeps_the_contract(target):
    assert target.backend in ("x86", "cuda")
    assert target.memory in ("cpu", "cuda")
    assert target.symbols >= {"__tvm_ffi_pack", "__tvm_ffi_deconv"}
    assert target.logs[0] == target.name
    assert get(target.name) is target
    assert of_artifact(target.name, ("more",)).features == target.features | {"more"}


@pytest.mark.parametrize(
    ("name", "place", "refusal"),
    [
        ("x86-64-v3", Place(Host(V3_FLAGS)), None),
        ("x86-64-v3", Place(Host(V3_FLAGS - {"fma"})), "needs CPU flags that this host lacks: fma"),
        (
            "x86-64-v4",
            Place(Host(V4.features), V3),
            "TVM_DECONV_MAX_TARGET=x86-64-v3 excludes CPU flags that it needs: ",
        ),
        ("x86-64-v3", DEVICE, "runs on the CPU; these arrays are in the memory of a CUDA device"),
        ("cuda", DEVICE, None),
        ("cuda", Place(Host(V3_FLAGS)), r"runs on CUDA devices \(compute capability 8.0 and later 8.x, "),
        ("cuda-sm_80", DEVICE, "runs on compute capability 8.0 and later 8.x; this device has 9.0"),
    ],
)
def test_a_target_says_why_it_does_not_run_at_a_place(name, place, refusal):
    said = get(name).refusal(place)
    assert (said is None) == (refusal is None)
    assert refusal is None or re.match(refusal, said)


def test_the_closest_code_for_a_device():
    assert get("cuda").closeness(DEVICE) == get("cuda-sm_90").closeness(DEVICE) == (9, 0, 0)
    assert get("cuda-sm_90a").closeness(DEVICE) == (9, 0, 1)
    assert get("cuda").closeness(Place(Host(V3_FLAGS), capability=(12, 1))) == (12, 0, 0)
    assert get("cuda").closeness(Place(Host(V3_FLAGS), capability=(13, 0))) == (0, 0, 0)
    assert V3.closeness(Place(Host(V3_FLAGS))) == ()


def test_a_microarchitecture_is_known_by_its_flags():
    """What loads an artifact goes without archspec."""
    found = of_artifact("znver9", (*V4.features, "new"))
    assert (found.name, found.level, found.vector_bits) == ("znver9", "x86-64-v4", 512)
    assert found.features == V4.features | {"new"}
    assert of_artifact("znver9", tuple(V3_FLAGS - {"fma"})) is None


def test_names_of_targets():
    assert of_names(["native", "cuda", "x86-64-v3", "cuda"], Host(V3_FLAGS)) == (V3, get("cuda"))
    with pytest.raises(ProblemError, match=r"target=\[\]: must name at least one of native, .*cuda, a micro"):
        of_names([])


@pytest.mark.parametrize(
    ("vendor", "family", "model", "wide"),
    [
        ("AuthenticAMD", 26, 2, 2),
        ("AuthenticAMD", 25, 17, 1),
        ("GenuineIntel", 6, 0x6A, 2),
        ("GenuineIntel", 6, 0x66, 1),  # Cannon Lake
        ("", 0, 0, 1),
    ],
)
def test_levels_have_the_multiply_adds_of_the_machine_that_is_meant(vendor, family, model, wide):
    host = Host(V4.features, "a CPU", 1, 1, vendor, family, model)
    own = {"multiply_adds": wide, "mesh": vendor == "GenuineIntel" and wide == 2}
    on_host = [dataclasses.replace(target, **own) for target in (V4, get("x86-64-v4-bf16"))]
    assert list(of_names(["x86-64-v4", "x86-64-v4-bf16"], host)) == on_host
    narrow = dataclasses.replace(V3, mesh=own["mesh"])
    assert of_names(["native", "x86-64-v3", "cuda"], host) == (on_host[0], narrow, get("cuda"))
    assert of_names(["znver4", "znver5"], host) == (get("znver4"), get("znver5"))
    (with_amx,) = of_names(["x86-64-v4-amx"], host)
    assert (with_amx.multiply_adds, with_amx.mesh) == (2, True)  # wherever it is built


def test_microarchitectures_have_multiply_adds_of_their_own():
    names = ("znver3", "znver4", "znver5", "haswell", "sapphirerapids", "knl")
    assert [get(name).multiply_adds for name in names] == [2, 1, 2, 2, 2, 2]
    assert [get(name).mesh for name in names] == [False, False, False, False, True, False]
    assert all(name in archspec.cpu.TARGETS for name in _TWO_WIDE | _MESHES)


@pytest.mark.parametrize("precision", ["tf32", "tf32x3"])
def test_only_devices_compute_in_tf32(precision):
    problem = Problem(1, 1, 1, 1, (4,), (2,), (2,), (1,), (0,), (8,), precision=precision)
    assert V3.computes(problem).precision == "ieee"
    assert get("cuda").computes(problem) is problem


#: The packages that may know the classes of targets; of the others, `Target` alone.
MAY_KNOW = ("targets/", "schedules/cuda/", "compiler/backends/cuda.py", "compiler/nvcc.py")


def test_only_its_backend_knows_cuda_targets():
    """Code that asks for the class of a target would have to be found and changed for another backend."""
    root = Path(targets.__file__).parents[1]
    folders = [(root, ""), *((Path(folder), "schedules/") for folder in schedules.__path__)]
    files = {f"{prefix}{path.relative_to(folder)}": path for folder, prefix in folders for path in folder.rglob("*.py")}
    known = {name for name, path in files.items() if re.search(r"\bCudaTarget\b|\bCUDA_TARGETS\b", path.read_text())}
    assert known
    assert not {name for name in known if not name.startswith(MAY_KNOW)}
    asked = re.compile(r"isinstance\([^)]*\bC(pu|uda)Target\)")
    assert not {name for name, path in files.items() if asked.search(path.read_text())} - {"targets/cpu.py"}
