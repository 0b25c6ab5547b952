"""From functions to one CUDA C++ translation unit, by the passes that finished kernels need."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial

import tvm
from tvm import tirx
from tvm.backend.cuda import export_cuda_host
from tvm.s_tir.pipeline import finalize_device_passes, finalize_host_passes
from tvm.tirx import PrimFunc
from tvm.tirx.compilation_pipeline import register_tir_pipeline

from tvm_deconv.schedules.cuda.warp import host_functions

#: Threads that a multiprocessor is to hold at least, if a function has no such attribute: their registers bound those
#: of one, at 128.
RESIDENT, RESIDENT_THREADS = 512, "tvm_deconv.resident_threads"
_PIPELINE = "tvm_deconv_cuda"
#: A call of the driver, to which libraries are not linked.
_DRIVER_TEXT = re.compile(r"\n *cuGetErrorString\(tensormap_error\w*, &message\);")
_BOUNDS = re.compile(r"(?<=__launch_bounds__)\((\d+)\)")
#: Where all blocks of a cluster meet (`warp.meet`).
_MEET = re.compile(r"\btvm_deconv_meet(\d+)\(")
#: A kernel of a function by its name.
_KERNEL = r"(?<=^extern \"C\" )__global__ [^;{{]*\b{}_kernel(?:_\d+)?\([^;{{]*\{{\n.*?^\}}"
#: A loop over tiles of k, which begins with a wait.
_TILES = re.compile(r"^( *)(?=for .*\n *tvm_deconv_wait)", re.MULTILINE)


def _pipeline() -> tuple[tvm.transform.Pass, Callable[[], tvm.transform.Pass], Callable[[], tvm.transform.Pass]]:
    """Return TVM's passes without those that schedule: the usual pipeline would place barriers of its own.

    Storage is not rewritten either: arrays in registers and the stages in shared memory would share it.
    """
    passes = [
        tirx.transform.FlattenBuffer(),
        tirx.transform.NarrowDataType(32),
        tirx.transform.VectorizeLoop(True),
        tirx.transform.UnrollLoop(),
        tirx.transform.StmtSimplify(),
        tirx.transform.RemoveNoOp(),
        tirx.transform.VerifyMemory(),
        tirx.transform.AnnotateEntryFunc(),
        tirx.transform.SplitHostDevice(),
        tirx.transform.MakePackedAPI(),
    ]
    return tvm.transform.Sequential(passes), finalize_host_passes, finalize_device_passes


register_tir_pipeline(_PIPELINE, _pipeline)


def source(functions: Mapping[str, PrimFunc]) -> str:
    """Return one CUDA C++ translation unit that exports `functions` under their names, kernels and host code."""
    module = tvm.IRModule({name: func.with_attr("global_symbol", name) for name, func in functions.items()})
    # The architecture is not in the source: nvcc is told.
    target = tvm.target.Target({"kind": "cuda", "arch": "sm_80"}, host={"kind": "cuda_host"})
    # Loops marked to be unrolled stay loops, which nvcc unrolls.
    with tvm.transform.PassContext(config={"tirx.UnrollLoop": {"explicit_unroll": 0}}):
        text: str = export_cuda_host(tvm.compile(module, target=target, tir_pipeline=_PIPELINE).mod)
    if "CUtensorMap" in text:
        text = text.replace("extern __shared__ __align__(64)", "extern __shared__ __align__(1024)")  # of swizzled lines
        text = text.replace("cuTensorMapEncodeTiled(", "tvm_deconv_encode(")
        text = _DRIVER_TEXT.sub("", text)
        text = text.replace("#define TVM_DLL", host_functions() + "#define TVM_DLL", 1)
    for name, func in functions.items():
        resident = int(func.attrs[RESIDENT_THREADS]) if RESIDENT_THREADS in func.attrs else RESIDENT
        text = re.sub(_KERNEL.format(name), partial(_bounded, resident), text, flags=re.MULTILINE | re.DOTALL)
    return text


def _bounded(resident: int, kernel: re.Match[str]) -> str:
    """Return the text of a kernel of which a multiprocessor holds so many threads at least.

    nvcc keeps less at a time: loops over tiles are not unrolled, whose loads would all be begun before products. Where
    the number of the thread is to be forgotten (`warp.forget`), it is a variable.
    """
    text = _BOUNDS.sub(lambda bound: f"({bound[1]}, {max(1, resident // int(bound[1]))})", kernel[0])
    text = _TILES.sub(r"\1#pragma unroll 1\n\1", text)
    if meet := _MEET.search(text):
        text = text.replace("__launch_bounds__", f"__cluster_dims__({meet[1]}, 1, 1) __launch_bounds__", 1)
    if "tvm_deconv_forget(" not in text:
        return text
    head, brace, body = text.replace("((int)threadIdx.x)", "thread").partition("{\n")
    return f"{head}{brace}  int thread = threadIdx.x;\n{body}"
