"""Compiling candidates, several at a time, in processes of their own, since a compiler may crash."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tvm_deconv.compiler.launcher import find_compiler, launcher_object
from tvm_deconv.compiler.process import Refusal, Worker, WorkerError
from tvm_deconv.compiler.records import Schedule
from tvm_deconv.problem import Problem
from tvm_deconv.targets import CudaTarget, cuda_capability

if TYPE_CHECKING:
    from tvm_deconv.targets import Capability, Target

BUILD_SECONDS = 120.0  # for one candidate


@dataclass(frozen=True)
class Built:
    """A compiled candidate: the library with "deconv", the one with "pack", and the elements that "pack" fills.

    The elements have `packed_dtype`, by default the accumulate dtype. "deconv" takes a workspace of
    `workspace_elements` as an argument, if there are any.
    """

    deconv: Path
    pack: Path
    packed_elements: int
    packed_dtype: str = ""
    workspace_elements: int = 0


class Builder:
    """Compiles candidates for one CPU target into the directory `scratch`."""

    def __init__(self, target: str, scratch: Path, cc: str, launcher: Path) -> None:
        from tvm_deconv.targets import CpuTarget, get

        cpus = get(target)
        assert isinstance(cpus, CpuTarget)
        self._target = cpus
        self._scratch = scratch
        self._cc = cc
        self._launcher = launcher
        self._count = 0
        importlib.import_module("tvm_deconv.schedules.x86")

    def build(self, key: str, schedule: Schedule) -> Built:
        """Compile a schedule of the problem with this key. Schedules that share a "pack" compile it once."""
        from tvm_ffi import structural_hash

        kernel = self._kernel(Problem.from_key(key), schedule)
        pack = self._scratch / f"pack-{structural_hash(kernel.pack)}.so"
        if not pack.exists():
            self._link({"pack": kernel.pack}, pack)
        self._count += 1
        deconv = self._scratch / f"deconv-{os.getpid()}-{self._count}.so"
        self._link({"deconv": kernel.deconv}, deconv)
        device = {
            name: getattr(kernel, name) for name in ("packed_dtype", "workspace_elements") if hasattr(kernel, name)
        }
        return Built(deconv, pack, kernel.packed_elements, **device)

    def _kernel(self, problem: Problem, schedule: Schedule) -> Any:
        from tvm_deconv.compiler.choices import named, plan_of
        from tvm_deconv.schedules.x86 import build_kernel

        return build_kernel(problem, self._target, named(schedule.algorithm), plan_of(schedule))

    def _link(self, functions: dict[str, Any], path: Path) -> None:
        import tvm

        target = tvm.target.Target({"kind": "llvm", "mcpu": self._target.mcpu})
        compiled = tvm.compile(tvm.IRModule(functions), target=target)
        temporary = path.with_suffix(f".{os.getpid()}.so")
        compiled.export_library(str(temporary), addons=[str(self._launcher)], cc=self._cc)
        temporary.replace(path)


class CudaBuilder(Builder):
    """Compiles candidates for devices of one capability into the directory `scratch`, by `nvcc`."""

    def __init__(self, target: str, scratch: Path, nvcc: str, capability: Capability) -> None:
        from tvm_deconv.targets import CUDA_TARGETS

        whole = CUDA_TARGETS[target]
        # One architecture is soon compiled, and the device runs no other.
        code = whole.fit(capability)
        self._devices = replace(whole, code=(code,), ptx=()) if code in whole.code else whole
        self._scratch, self._nvcc, self._count = scratch, nvcc, 0
        importlib.import_module("tvm_deconv.schedules.cuda")

    def _kernel(self, problem: Problem, schedule: Schedule) -> Any:
        from tvm_deconv.compiler.choices import named, plan_of
        from tvm_deconv.schedules.cuda import build_kernel

        return build_kernel(problem, named(schedule.algorithm), plan_of(schedule))

    def _link(self, functions: dict[str, Any], path: Path) -> None:
        from tvm_deconv.compiler.nvcc import compile_library
        from tvm_deconv.schedules.cuda import source

        temporary = path.with_suffix(f".{os.getpid()}.so")
        for kernel in compile_library(source(functions), temporary, self._devices, self._nvcc):
            if kernel.spill_bytes or kernel.stack_bytes:
                raise Refusal(f"{kernel.kernel} spills {kernel.spill_bytes} bytes, its stack has {kernel.stack_bytes}")
        temporary.replace(path)


class BuilderPool:
    """As many builders for `target` as `jobs`, each in a process, compiling into the directory `scratch`."""

    def __init__(self, target: Target, scratch: Path, jobs: int) -> None:
        kind: type[Builder] = Builder
        arguments: tuple[object, ...]
        if isinstance(target, CudaTarget):
            from tvm_deconv.compiler.nvcc import find_nvcc

            kind, arguments = CudaBuilder, (find_nvcc(), cuda_capability())
        else:
            cc = find_compiler()
            arguments = cc, launcher_object(cc, scratch)
        with contextlib.ExitStack() as stack:
            self._threads = stack.enter_context(ThreadPoolExecutor(jobs))
            workers = (Worker(kind, target.name, scratch, *arguments) for _ in range(jobs))
            self._idle = [stack.enter_context(worker) for worker in workers]
            self._stack = stack.pop_all()

    def __enter__(self) -> BuilderPool:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def build(self, key: str, schedules: Sequence[Schedule]) -> dict[Schedule, Built | str]:
        """Compile schedules of the problem with this key; the text of a candidate says why it does not compile."""
        return dict(
            zip(schedules, self._threads.map(lambda schedule: self._build(key, schedule), schedules), strict=True)
        )

    def _build(self, key: str, schedule: Schedule) -> Built | str:
        worker = self._idle.pop()
        try:
            built: Built = worker.ask("build", key, schedule, timeout=BUILD_SECONDS)
        except WorkerError as error:
            return str(error)
        finally:
            self._idle.append(worker)
        return built
