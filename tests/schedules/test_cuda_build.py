"""Building artifacts for CUDA, on machines without a GPU: nvcc, what it is told, and what it says of kernels."""

import re
import struct
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from support.cuda_kernels import HOPPER, build_kernel

import tvm_deconv as td
from tvm_deconv.artifact import needs
from tvm_deconv.artifact.elf import dynamic
from tvm_deconv.artifact.manifest import Manifest
from tvm_deconv.bench.gpu import of_type
from tvm_deconv.compiler import build, nvcc
from tvm_deconv.compiler.backends.cuda import CudaToolchain
from tvm_deconv.compiler.launcher import find_compiler
from tvm_deconv.errors import BuildError, CompilerNotFound
from tvm_deconv.runtime import loader
from tvm_deconv.runtime.verify import verify
from tvm_deconv.schedules.cuda import held, wgmma
from tvm_deconv.schedules.cuda.lower import RESIDENT, RESIDENT_THREADS, source
from tvm_deconv.targets import CUDA_TARGETS

try:
    nvcc.find_nvcc()
    MISSING = None
except CompilerNotFound as error:
    MISSING = str(error)
needs_nvcc = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))

#: Of one product, so that nvcc is soon done: of several, a kernel is so many copies of this one's code.
PRODUCT = td.Problem(64, 1, 256, 64, (16, 16), (2, 2), (2, 2), (1, 1), (0, 0), (32, 32))
PROBLEMS = {
    "product": PRODUCT.replace(epilogue=td.Epilogue(True, "gelu")),
    # Vectors of the output: as many addresses as fit.
    "product_nxc": td.Problem(
        100,
        1,
        256,
        256,
        (14, 14),
        (2, 2),
        (2, 2),
        (1, 1),
        (0, 0),
        (28, 28),
        data_format="NXC",
        epilogue=td.Epilogue(True),
    ),
    "tensor": PRODUCT.replace(dtype="float16"),
    "tensor_nxc": PRODUCT.replace(dtype="bfloat16", data_format="NXC"),
    # Channels that no vector holds, and that are padded: rows of A and sums together take all registers.
    "tensor_padded": td.Problem(1, 1, 21, 21, (70, 70), (16, 16), (8, 8), (1, 1), (0, 0), (568, 568), "float16", "NXC"),
    # Short loops over tiles that come through registers.
    "tensor_short": td.Problem(
        1, 1, 128, 64, (8192,), (4,), (2,), (1,), (1,), (16384,), "bfloat16", epilogue=td.Epilogue(True)
    ),
    "tensor_tf32": PRODUCT.replace(precision="tf32"),
    # Zero points where nothing is, and stores of four bytes.
    "tensor_bytes": PRODUCT.replace(
        dtype="uint8", data_format="NXC", quantization=td.Quantization("int8", "uint8"), epilogue=td.Epilogue(True)
    ),
    "narrow": td.Problem(1, 64, 1, 1, (64, 64), (4, 4), (2, 2), (1, 1), (1, 1), (128, 128)),
    "generic": td.Problem(1, 1, 3, 2, (5, 5), (7, 7), (8, 8), (3, 3), (2, 3), (40, 43), "float64"),
}
#: Those of a generation, whose machine code is nearly the same, take turns.
GENERATIONS = (("sm_80", "sm_86", "sm_89"), ("sm_90", "sm_90a"), ("sm_100",), ("sm_120",))


def compiled(kernel, directory, *options):
    """What ptxas says of the kernels, and their PTX, which is kept."""
    path = directory / "kernels.cu"
    path.write_text(source(kernel.functions).partition(nvcc.HOST)[0])
    command = [nvcc.find_nvcc(), "-fatbin", "-O3", "-std=c++17", "-w", "-Xptxas", "-v", "-ccbin", find_compiler()]
    command += ["--keep", "--keep-dir", str(directory), *options, str(path), "-o", str(directory / "kernels.fatbin")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "serialized" not in done.stderr
    (ptx,) = directory.glob("*.ptx")
    return nvcc.parse_resources(done.stderr), ptx.read_text()


#: What the code of each is made of, besides what it is not.
MADE_OF = {
    "product": (
        r"ld\.shared\.v4\.(f32|b32|u32)",
        r"cp\.async\.ca.* 4,",
        r"cp\.async\.cg.* 16,",
        r"fma\.rn\.f32",
        r"div\.rn\.f32",
    ),
    "product_nxc": (r"st\.global\.v4\.(f32|b32|u32)",),
    "tensor": (r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.f16\.f16\.f32", r"ldmatrix.*x4\.trans"),
    "tensor_nxc": (r"m16n8k16\.row\.col\.f32\.bf16\.bf16\.f32", r"ldmatrix.*x4\.shared", r"cp\.async\.cg.* 16,"),
    "tensor_padded": (r"ldmatrix.*x4\.shared",),
    "tensor_short": (r"ldmatrix.*x4\.trans",),
    "tensor_tf32": (r"m16n8k8\.row\.col\.f32\.tf32\.tf32\.f32", r"cvt\.rna\.tf32\.f32", r"cp\.async\.ca.* 4,"),
    "tensor_bytes": (
        r"m16n8k32\.row\.col\.s32\.u8\.s8\.s32",
        r"ldmatrix.*x4\.shared",
        r"@there cp\.async\.cg.* 16;",
        r"@!there st\.shared\.v4",
        r"add(\.rn)?\.f32.*, 0f4B400000;",  # which rounds
        r"st\.global\.(u32|b32)",
    ),
    "narrow": (r"st\.global\.v2\.(f32|b32|u32)",),
    "generic": (r"fma\.rn\.f64",),
}


def test_all_architectures_have_turns():
    assert {f"cuda-{name}" for names in GENERATIONS for name in names} == CUDA_TARGETS.keys() - {"cuda"}


@needs_nvcc
@pytest.mark.parametrize(("turn", "name"), [*enumerate(PROBLEMS)], ids=PROBLEMS)
def test_resources_and_instructions(turn, name, tmp_path):
    """Every family for every generation: registers for all threads, static shared memory, no stack and no spill.

    Vectors, copies that run along and tensor cores where they are meant; no atomics; the arithmetic of IEEE 754.
    """
    assert not [flag for flag in nvcc.FLAGS if re.search("fast|ftz|prec|fmad", flag)]
    kernel = build_kernel(PROBLEMS[name])
    assert kernel.algorithm == f"cuda_{name.partition('_')[0]}"
    architectures = [names[turn % len(names)] for names in GENERATIONS]
    found, code = compiled(kernel, tmp_path, "-gencode", f"arch=compute_80,code=[{','.join(architectures)}]")
    assert {resources.architecture for resources in found} == set(architectures)
    for resources in found:
        assert resources.registers <= 64 * 1024 // int(kernel.deconv.attrs.get(RESIDENT_THREADS, RESIDENT)), resources
        assert resources.shared_bytes <= 48 << 10, resources
        assert resources.stack_bytes == 0, resources
        assert resources.spill_bytes == 0, resources
    for instruction in MADE_OF[name]:
        assert re.search(instruction, code), instruction
    assert not re.search(r"\b(atom|red|shfl|vote)\.|\.ftz|\.approx\.f32|\.full\.f32", code)


#: Columns and terms of a tile, and how wgmma multiplies them: A of float16 transposed, that of TF32 from registers.
HOPPER_PRODUCTS = {
    "float16": (128, 64, r"k16\.f32\.f16\.f16.*, 1, 1, 1, 1, 0;"),
    "tf32": (128, 32, r"k8\.f32\.tf32\.tf32 \{.*\}, \{.*\}, %rd\d+, 1, 1, 1;"),
    "tf32x3": (64, 32, r"k8\.f32\.tf32\.tf32 \{.*\}, \{.*\}, %rd\d+, 0, 1, 1;"),
}


@needs_nvcc
@pytest.mark.parametrize("kind", HOPPER_PRODUCTS)
def test_the_instructions_of_hopper(kind, tmp_path):
    """Products of warpgroups that are not serialized, loads of boxes, phases of barriers; no stack and no spill."""
    problem = of_type(PRODUCT.replace(in_channels=128), kind, "NCX")
    columns, terms, product = HOPPER_PRODUCTS[kind]
    plan = wgmma.ClusterPlan(128, columns, terms, 64, columns, 3, cluster_m=2, cluster_n=2)
    kernel = build_kernel(problem, wgmma.ALGORITHM, plan)
    found, code = compiled(kernel, tmp_path, *nvcc.options(HOPPER, ""))
    assert {resources.architecture for resources in found} == {"sm_90a"}
    assert not [one for one in found if one.stack_bytes or one.spill_bytes]
    assert re.search(rf"wgmma\.mma_async\.sync\.aligned\.m64n{columns}{product}", code)
    assert re.search(r"cp\.async\.bulk\.tensor\.5d.*mbarrier::complete_tx.*multicast::cluster", code)
    assert ".reqnctapercluster 4, 1, 1" in code
    assert "mbarrier.try_wait.parity" in code


@needs_nvcc
@pytest.mark.parametrize("channels", [136, 21])
def test_the_instructions_of_held_data(channels, tmp_path):
    """Products with A from registers, which ldmatrix fills; loads of boxes but of odd channels; no stack, no spill."""
    problem = td.Problem(
        1, 1, channels, 64, (17, 17), (4, 4), (2, 2), (1, 1), (0, 0), (36, 36), "float16", data_format="NXC"
    )
    plan = wgmma.ClusterPlan(128, 128, 64, 64, 128, 3, cluster_m=2)
    found, code = compiled(build_kernel(problem, held.ALGORITHM, plan), tmp_path, *nvcc.options(HOPPER, ""))
    assert not [one for one in found if one.stack_bytes or one.spill_bytes]
    assert re.search(
        r"wgmma\.mma_async\.sync\.aligned\.m64n128k16\.f32\.f16\.f16 \{.*\}, \{.*\}, .*, 1, 1, 1, 0;", code
    )
    assert "ldmatrix.sync.aligned.m8n8.x4.shared.b16" in code
    assert bool(re.search(r"cp\.async\.bulk\.tensor\.5d", code)) == (channels % 8 == 0)
    assert ".reqnctapercluster 2, 1, 1" in code


@needs_nvcc
@pytest.mark.slow
def test_every_layer_builds():
    """All layers of the example, for 8.0 and 9.0, in all but bfloat16, channels second: an hour of a processor."""
    script = Path(__file__).parents[2] / "scripts" / "cuda-resources"
    command = [sys.executable, str(script), "--types", "float32", "tf32x3", "tf32", "float16"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "368 built, 0 failed, 0 beyond bounds" in done.stderr


PTX, MACHINE_CODE = 1, 2


def codes_in(library):
    """What the fat binaries in a library hold: kind of code, and architecture."""
    found = set()
    for begin in re.finditer(struct.pack("<I", 0xBA55ED50), library):
        _, _, header, size = struct.unpack_from("<IHHQ", library, begin.start())
        at, end = begin.start() + header, begin.start() + header + size
        while at < end:
            kind, _, header, size = struct.unpack_from("<HHIQ", library, at)
            found.add((kind, *struct.unpack_from("<I", library, at + 28)))
            at += header + size
    return found


def test_an_older_nvcc_leaves_new_devices_to_ptx(tmp_path):
    old = tmp_path / "nvcc"
    old.write_text("#!/bin/sh\necho sm_80; echo sm_86; echo sm_90; echo sm_90a\n")
    old.chmod(0o755)
    found = nvcc.options(CUDA_TARGETS["cuda"], str(old))
    codes = ["compute_80,code=sm_80", "compute_90,code=sm_90", "compute_90,code=compute_90"]
    assert found == [f"-gencode=arch={code}" for code in codes]
    # Without PTX nvcc is to say itself that it does not know them.
    assert nvcc.options(CUDA_TARGETS["cuda-sm_120"], str(old)) == ["-gencode=arch=compute_120,code=sm_120"]
    assert nvcc.options(HOPPER, str(old)) == ["-gencode=arch=compute_90a,code=sm_90a"]


SYMBOLS = 2  # the type of the section with the symbols that nobody links against


def sections(library):
    """The types of the sections of an ELF file."""
    (first,), (size, count) = struct.unpack_from("<Q", library, 40), struct.unpack_from("<HH", library, 58)
    return {struct.unpack_from("<I", library, first + number * size + 4)[0] for number in range(count)}


@needs_nvcc
def test_an_artifact_for_several_architectures(tmp_path):
    """Built, up to date, loaded and refused without a GPU, by a process without TVM."""
    problem = PROBLEMS["generic"]
    (outcome,) = td.compile([problem], "cuda", tmp_path)
    assert outcome.status == "built"
    assert [o.status for o in td.compile([problem], "cuda", tmp_path)] == ["current"]
    (path,) = tmp_path.glob("*.json")
    manifest = Manifest.read(path)
    content = (tmp_path / manifest.library).read_bytes()
    known = {10 * major + minor for major, minor in nvcc.known_code(nvcc.find_nvcc())}
    assert SYMBOLS not in sections(content)  # a quarter of the library
    assert codes_in(content) == {(MACHINE_CODE, code) for code in {80, 90, 100, 120} & known} | {(PTX, 90)}
    found = dynamic(content)
    assert set(found.needed) <= loader.NEEDED
    assert CUDA_TARGETS["cuda"].symbols <= found.defined
    assert needs.needed(found.versions) | {"tvm_ffi": needs.here()["tvm_ffi"]} == manifest.needs
    assert not needs.beyond(manifest.needs, needs.FLOOR)
    assert (manifest.target, manifest.features, manifest.algorithm) == ("cuda", (), "cuda_generic")
    assert "nvcc" in manifest.versions
    verdict = verify(td.load(tmp_path), manifest)
    assert verdict.status == "skipped"
    assert "CUDA devices" in verdict.reason
    script = f"""
        import sys
        import numpy as np
        from pathlib import Path
        import tvm_deconv as td
        from tvm_deconv.runtime import loader
        library = td.load({str(tmp_path)!r})
        artifact = loader.load(library.root, library.manifests[0])
        try:
            artifact(*[np.zeros(1)] * 3)
        except Exception as error:
            print(type(error).__name__)
        print("tvm" in sys.modules, "torch" in sys.modules)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True)
    assert done.stdout.split()[1:] == ["False", "False"]


def test_nvcc_is_looked_for(monkeypatch, tmp_path):
    nvcc.find_nvcc.cache_clear()
    monkeypatch.setenv("NVCC", "no-such-nvcc")
    monkeypatch.setattr(nvcc.sysconfig, "get_path", lambda _: str(tmp_path))
    with pytest.raises(CompilerNotFound, match=r"nvcc='no-such-nvcc': .*pip install .*\[cuda\]'"):
        nvcc.find_nvcc()
    packaged = tmp_path / "nvidia" / "cu13" / "bin" / "nvcc"
    packaged.parent.mkdir(parents=True)
    packaged.write_text("")
    assert nvcc.find_nvcc() == str(packaged)
    nvcc.find_nvcc.cache_clear()


def test_free_extents_are_refused(tmp_path):
    problem = PROBLEMS["product"].replace(batch="any")
    with pytest.raises(BuildError, match=r"problem='nany-.*': must have no dynamic extents for cuda-sm_80"):
        build.export(problem, CUDA_TARGETS["cuda-sm_80"], tmp_path, toolchain=CudaToolchain("nvcc"))


def test_what_nvcc_refuses_is_a_build_error(tmp_path):
    fails = tmp_path / "nvcc"
    fails.write_text("#!/bin/sh\necho 'error: no such thing' >&2\nexit 1\n")
    fails.chmod(0o755)
    with pytest.raises(BuildError, match=r"failed for cuda-sm_80: error: no such thing"):
        nvcc.compile_library("", tmp_path / "x.so", CUDA_TARGETS["cuda-sm_80"], str(fails))
    toolchain = CudaToolchain(str(fails))
    with pytest.raises(BuildError, match="no such thing"):
        build.export(PROBLEMS["generic"], CUDA_TARGETS["cuda-sm_80"], tmp_path / "out", toolchain=toolchain)
    assert not [path for path in (tmp_path / "out").iterdir() if path.suffix in (".so", ".json")]


SAID = """\
ptxas info    : Compiling entry function 'pack_kernel' for 'sm_80'
ptxas info    : Function properties for pack_kernel
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 10 registers, used 0 barriers, 368 bytes cmem[0]
ptxas info    : Compiling entry function 'deconv_kernel' for 'sm_90'
ptxas info    : Function properties for deconv_kernel
    16 bytes stack frame, 44 bytes spill stores, 40 bytes spill loads
ptxas info    : Used 128 registers, used 1 barriers, 16 bytes cumulative stack size, 33280 bytes smem
"""


def test_what_ptxas_says():
    first, second = nvcc.parse_resources(SAID)
    assert first == nvcc.Resources("pack_kernel", "sm_80", 10, 0, 0, 0)
    assert second == nvcc.Resources("deconv_kernel", "sm_90", 128, 33280, 16, 84)
    assert first.blocks(256) == 8  # by threads
    assert second.blocks(256) == 2  # by registers
    # By shared memory.
    assert [nvcc.Resources("x", of, 32, 48 << 10, 0, 0).blocks(256) for of in ("sm_80", "sm_90", "sm_90a")] == [3, 4, 4]
