"""Run generated CUDA on the CPU: the artifact's whole source, compiled with g++ against `cuda_shim`.

Arrays pass as tensors of a CUDA device, as they would with a GPU; their memory is the CPU's.
"""

import ctypes
import functools
import mmap
import subprocess
from pathlib import Path

import numpy as np
import tvm_ffi
from hypothesis import HealthCheck, Phase, given, settings
from support.kernels import bits
from support.once import made_once
from support.shim_source import for_cpu

from tvm_deconv.compiler.backends import BACKENDS
from tvm_deconv.compiler.launcher import find_compiler
from tvm_deconv.schedules.cuda.lower import source
from tvm_deconv.targets import CUDA_TARGETS

CUDA = BACKENDS["cuda"]
TARGET, HOPPER = CUDA_TARGETS["cuda"], CUDA_TARGETS["cuda-sm_90a"]
#: The algorithms of `HOPPER` alone.
HOPPER_FAMILIES = (
    *("cuda_wgmma", "cuda_gathered", "cuda_held", "cuda_held_merged"),
    *("cuda_wgmma_turned", "cuda_held_turned", "cuda_held_merged_turned"),
)
SHIM = Path(__file__).parent / "cuda_shim"
_LIBC = ctypes.CDLL(None)
_NORESERVE = 0x4000  # of Linux, MAP_NORESERVE
DLPACK_CUDA = 2
_DEVICE_TYPE = 8  # bytes from where a DLTensor begins, behind its address


def build_kernel(problem, algorithm=None, plan=None):
    """The CUDA kernel of a problem, by default the default one."""
    return CUDA.build(problem, target_of(algorithm), algorithm, plan)


def target_of(algorithm):
    """The target that a test builds an algorithm for."""
    return HOPPER if algorithm is not None and algorithm.name in HOPPER_FAMILIES else TARGET


class OnDevice:
    """A NumPy array that says it is in the memory of CUDA device 0, by DLPack."""

    def __init__(self, array):
        self.array = array

    def __dlpack_device__(self):
        return DLPACK_CUDA, 0

    def __dlpack__(self, **_):
        capsule = self.array.__dlpack__()
        tensor = ctypes.pythonapi.PyCapsule_GetPointer
        tensor.restype, tensor.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
        ctypes.c_int32.from_address(tensor(capsule, b"dltensor") + _DEVICE_TYPE).value = DLPACK_CUDA
        return capsule


INCLUDES = (f"-I{SHIM}", f"-I{Path(tvm_ffi.__file__).parent / 'include'}")
FLAGS = ("-fPIC", "-O0", "-std=c++17", "-w", *INCLUDES)
FLAGS += ("-fsanitize=alignment", "-fsanitize-undefined-trap-on-error")


@functools.cache
def compile_driver():
    """The path of the shim's driver. A process has one: its libraries find that which was loaded first."""
    # By another name the shim finds it, and whoever asks whether this machine has a driver does not.
    command = [find_compiler(), "-shared", "-fPIC", "-O1", "-Wl,-soname,libshim_driver.so", str(SHIM / "driver.cc")]
    name = "libcuda.so.1"
    return made_once("driver", lambda folder: subprocess.run([*command, "-o", str(folder / name)], check=True)) / name


@functools.cache
def compiler():
    """The beginning of a command that compiles a kernel: with precompiled headers, and what emulates instructions."""
    folder = made_once("shim", compile_shim)
    return [find_compiler(), f"-I{folder}", "-shared", *FLAGS, str(folder / "runtime.o")]


def compile_shim(folder):
    """Write the precompiled headers and the object file of the shim into `folder`."""
    cc = find_compiler()
    subprocess.run([cc, *FLAGS, "-x", "c++-header", str(SHIM / "all.h"), "-o", f"{folder}/all.h.gch"], check=True)
    parts = [str(SHIM / f"{name}.cc") for name in ("runtime", "warp", "hopper", "host")]
    hidden = ["-fPIC", "-O2", "-std=c++17", "-fvisibility=hidden", "-r", "-nostdlib", *INCLUDES]
    subprocess.run([cc, *hidden, *parts, "-o", f"{folder}/runtime.o"], check=True)


def compile_for_cpu(sources, directory, name):
    """A tvm_ffi module of the CUDA `sources`, which are one translation unit."""
    path = directory / f"{name}.cc"
    path.write_text(for_cpu(sources))
    library = path.with_suffix(".so")
    libraries = Path(tvm_ffi.__file__).parent / "lib"
    command = [*compiler(), str(path), "-o", str(library)]
    done = subprocess.run([*command, f"-L{libraries}", "-ltvm_ffi"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:4000]
    return tvm_ffi.load_module(str(library))


def guarded(size):
    """Memory of whole pages for so many bytes, between pages that fault."""
    page = mmap.PAGESIZE
    inner = -(-max(size, 1) // page) * page
    memory = mmap.mmap(-1, inner + 2 * page)
    whole = np.frombuffer(memory, np.uint8)
    for guard in (whole.ctypes.data, whole.ctypes.data + page + inner):
        assert _LIBC.mprotect(ctypes.c_void_p(guard), ctypes.c_size_t(page), 0) == 0
    return whole[page : page + inner]


def poisoned(shape, dtype, offset=0, first=False):
    """An array filled with a poison inside of memory of the same poison, and that memory; see `copied`.

    Before it, where it is `first`, else behind it, are less than 16 bytes and `offset` elements up to what faults.
    """
    dtype, size = np.dtype(dtype), int(np.prod(shape))
    poison = np.nan if dtype.kind == "f" else 113
    whole = guarded((size + offset) * dtype.itemsize + 16).view(dtype)
    whole[...] = poison
    beyond = (whole.nbytes - (size + offset) * dtype.itemsize) // 16 * 16 // dtype.itemsize
    start = offset if first else beyond + offset
    return whole[start : start + size].reshape(shape), whole


def sparse(shape, dtype):
    """An array of zeros of which memory is taken as it is written."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
    return np.frombuffer(mmap.mmap(-1, size, flags), dtype).reshape(shape)


def copied(array, offset=0, first=False):
    """A copy whose address is `offset` elements beyond a multiple of 16."""
    copy, _ = poisoned(array.shape, array.dtype, offset, first)
    copy[...] = array
    return copy


class Batch:
    """Kernels for several problems in one translation unit, since compiling its headers costs most of the time."""

    def __init__(self, problems, directory, name, algorithm=None, plans=None, edit=str):
        """Build by `algorithm` and a list of `plans`; `edit` may change the text."""
        chosen = zip(problems, plans or [None] * len(problems), strict=True)
        self.kernels = [build_kernel(problem, algorithm, plan) for problem, plan in chosen]
        functions = {}
        for number, kernel in enumerate(self.kernels):
            functions[f"deconv_{number}"] = kernel.deconv
            functions[f"pack_{number}"] = kernel.pack
        self.module = compile_for_cpu(edit(source(functions)), directory, name)

    def call(self, name, *arrays):
        """Call a function with arrays in the memory of the shim's device."""
        held = [OnDevice(array) for array in arrays]
        self.module.get_function(name)(*map(tvm_ffi.from_dlpack, held))

    def run(self, number, data, weights, bias, offset=0, first=False):
        """The output of the kernel for problem `number`; what lies around the outputs is checked.

        Data and output begin `offset` elements beyond a multiple of 16 bytes. All arrays are at the end of memory that
        may be touched, or at its beginning where they are `first`.
        """
        kernel = self.kernels[number]
        problem = kernel.problem
        packed, around_packed = poisoned((kernel.packed_elements,), kernel.packed_dtype, first=first)
        storage = "uint16" if problem.output_dtype == "bfloat16" else problem.output_dtype
        out, around_out = poisoned(problem.output_shape, storage, offset, first)
        filter = copied(bits(np.ascontiguousarray(problem.canonical_filter(weights))), first=first)
        biases = [] if bias is None else [copied(bias, first=first)]
        arguments = [copied(bits(data), offset, first), packed, *biases]
        around = [(packed, around_packed), (out, around_out)]
        if kernel.workspace_elements:
            arguments.append(poisoned((kernel.workspace_elements,), problem.accumulate_dtype, first=first)[0])
        self.call(f"pack_{number}", filter, packed)
        self.call(f"deconv_{number}", *arguments, out)
        for inner, whole in around:
            start = (inner.ctypes.data - whole.ctypes.data) // whole.itemsize
            edges = np.concatenate([whole[:start], whole[start + inner.size :]])
            assert np.isnan(edges).all() if edges.dtype.kind == "f" else (edges == 113).all()
        return out.view("bfloat16") if problem.output_dtype == "bfloat16" else out


def drawn(strategy, count):
    """`count` examples of a hypothesis strategy, other ones in every run."""
    found = []

    @settings(max_examples=count, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(strategy)
    def draw(example):
        found.append(example)

    draw()
    return found
