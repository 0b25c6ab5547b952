"""CUDA devices: TVM writes CUDA C++, and nvcc compiles it with its host code to one library."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tvm.tirx import PrimFunc

from tvm_deconv.compiler import floor
from tvm_deconv.compiler.launcher import find_compiler
from tvm_deconv.compiler.nvcc import FLAGS, MOST_SPILLED, compile_library, find_nvcc, known_code, options, version
from tvm_deconv.errors import BuildError
from tvm_deconv.problem import Problem
from tvm_deconv.schedules.contract import Backend, Kernel, Linked, Toolchain, Workspace
from tvm_deconv.schedules.cuda.algorithms import ALGORITHMS
from tvm_deconv.schedules.cuda.lower import source
from tvm_deconv.targets import Capability, CudaTarget, cuda_capability

#: To ask for the attributes of a kernel loads it.
_LOAD = """
template <typename... Kernels>
static void tvm_deconv_load_kernels(Kernels... kernels) {
  cudaFuncAttributes attributes;
  for (cudaError_t error : {cudaFuncGetAttributes(&attributes, kernels)...}) TVM_FFI_CHECK_CUDA_ERROR(error);
}
static void tvm_deconv_load(int device) {
  tvm::ffi::CUDADeviceGuard guard(device);
  tvm_deconv_load_kernels(KERNELS);
}
TVM_FFI_DLL_EXPORT_TYPED_FUNC(load, tvm_deconv_load);
"""

_KERNEL = re.compile(r"__global__ void __launch_bounds__\([\d, ]+\) (\w+)\(")


def translation_unit(functions: Mapping[str, PrimFunc]) -> str:
    """Return the CUDA C++ of a library: `functions` under their names, and "load" for all their kernels.

    ``load(device)`` has the CUDA runtime load the kernels, which it would do at their first launch. A capture of calls
    for a graph does not permit that.
    """
    text = source(functions)
    return text + _LOAD.replace("KERNELS", ", ".join(sorted(set(_KERNEL.findall(text)))))


@dataclass(frozen=True)
class CudaToolchain(Toolchain[CudaTarget]):
    """The path of nvcc, and the `stubs` to link against."""

    nvcc: str
    stubs: tuple[Path, ...] = ()

    def link(self, functions: Mapping[str, PrimFunc], target: CudaTarget, path: Path) -> Linked:
        """See Toolchain; a kernel that spills more than a few registers is not worth measuring."""
        text = translation_unit(functions)
        refused = [
            f"{kernel.kernel} spills {kernel.spill_bytes} bytes, its stack has {kernel.stack_bytes}"
            for kernel in compile_library(text, path.absolute(), target, self.nvcc, self.stubs)
            if kernel.spill_bytes > MOST_SPILLED or kernel.stack_bytes > MOST_SPILLED
        ]
        deciding = text, FLAGS, options(target, self.nvcc), version(self.nvcc)
        return Linked.of(repr(deciding).encode(), refused)

    def compile(self, kernel: Kernel, target: CudaTarget, path: Path) -> Workspace:
        """See Toolchain; the workspace is an argument."""
        self.link(kernel.functions, target, path)
        return Workspace(kernel.workspace_bytes)

    def versions(self) -> dict[str, str]:
        """See Toolchain."""
        return {"nvcc": version(self.nvcc)}


class CudaBackend(Backend[CudaTarget]):
    """The backend for CUDA devices."""

    name = "cuda"
    algorithms: Sequence[Any] = ALGORITHMS

    def check(self, problem: Problem, target: CudaTarget) -> None:
        """See Backend; kernels have fixed extents."""
        if problem.dynamic:
            raise BuildError("problem", problem.key, f"must have no dynamic extents for {target.name}")

    def join(self, problem: Problem, kernels: Sequence[Kernel]) -> Kernel:  # noqa: ARG002
        """See Backend; a problem without dynamic extents has one variant."""
        (kernel,) = kernels
        return kernel

    def toolchain(self, scratch: Path) -> CudaToolchain:
        """See Backend."""
        return CudaToolchain(find_nvcc(), floor.stubs(find_compiler(), scratch))

    def flags(self) -> tuple[str, ...]:
        """See Backend."""
        return (*FLAGS, version(find_nvcc()))

    def trial_target(self, target: CudaTarget) -> CudaTarget:
        """See Backend: one architecture is soon compiled, and the device of this machine runs no other."""
        if len(target.code) + len(target.ptx) == 1:
            return target  # which needs no device here
        return narrowed(target, cuda_capability())


def narrowed(target: CudaTarget, capability: Capability) -> CudaTarget:
    """Return the part of `target` that a device of `capability` runs; all of it, if nvcc knows no code for that."""
    code = target.fit(capability)
    known = code in target.code and code in known_code(find_nvcc())
    return replace(target, code=(code,), ptx=()) if known else target
