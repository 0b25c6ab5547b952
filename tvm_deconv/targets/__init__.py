"""Facts about the CPUs and GPUs that artifacts are compiled for, and about the machine that runs them.

`base` has the contract of every target, `cpu` and `cuda` list the targets, `host` reads the machine, `resolve` finds
targets by name. Another kind of CPU is a row in `cpu`.
"""

from tvm_deconv.targets.base import MAX_TARGET_VARIABLE, Capability, Place, Target
from tvm_deconv.targets.cpu import (
    CPU_LEVELS,
    CPU_TARGETS,
    LAUNCHER_SYMBOLS,
    CpuTarget,
    microarchitecture,
    microarchitectures,
    supported,
)
from tvm_deconv.targets.cuda import (
    CUDA_TARGETS,
    LOAD_SYMBOL,
    CudaTarget,
    cuda_capability,
    cuda_driver,
    cuda_target,
    dotted,
)
from tvm_deconv.targets.host import Host, detect_host, parse_cpuinfo
from tvm_deconv.targets.resolve import get, known_targets, max_target, names_of, native, of_artifact, of_names

__all__ = [
    "CPU_LEVELS",
    "CPU_TARGETS",
    "CUDA_TARGETS",
    "LAUNCHER_SYMBOLS",
    "LOAD_SYMBOL",
    "MAX_TARGET_VARIABLE",
    "Capability",
    "CpuTarget",
    "CudaTarget",
    "Host",
    "Place",
    "Target",
    "cuda_capability",
    "cuda_driver",
    "cuda_target",
    "detect_host",
    "dotted",
    "get",
    "known_targets",
    "max_target",
    "microarchitecture",
    "microarchitectures",
    "names_of",
    "native",
    "of_artifact",
    "of_names",
    "parse_cpuinfo",
    "supported",
]
