"""CPUs: TVM compiles with LLVM, and a C++ compiler links the library with the launcher."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tvm
from tvm.target.codegen import llvm_is_valid_cpu, llvm_version_major
from tvm.tirx import PrimFunc

from tvm_deconv.compiler import floor
from tvm_deconv.compiler.launcher import FLAGS, find_compiler, launcher_object
from tvm_deconv.compiler.named_values import PIPELINE
from tvm_deconv.compiler.toolchain import direct_linker, run_compiler, version_text
from tvm_deconv.compiler.workspace import Counted
from tvm_deconv.errors import BuildError
from tvm_deconv.problem import Problem
from tvm_deconv.schedules.contract import AnyAlgorithm, Backend, Kernel, Linked, Toolchain, Workspace
from tvm_deconv.schedules.x86.algorithms import ALGORITHMS
from tvm_deconv.schedules.x86.parallel import parallel_plans, select_by_threads
from tvm_deconv.schedules.x86.variants import join
from tvm_deconv.targets import CpuTarget

_TRIPLE = "x86_64-unknown-linux-gnu"


@dataclass(frozen=True)
class X86Toolchain(Toolchain[CpuTarget]):
    """The compiler driver `cc` that links, the object file of the `launcher`, and the `stubs` to link against."""

    cc: str
    launcher: Path
    stubs: tuple[Path, ...]

    def link(self, functions: Mapping[str, PrimFunc], target: CpuTarget, path: Path) -> Linked:
        """See Toolchain; every library may be measured.

        It is linked in a hurry. A function that packs runs once, so it is not optimized where it is alone.
        """
        once = {"opt-level": 0} if functions.keys() == {"pack"} else {}
        linker, *libraries = direct_linker(self.cc) or (self.cc,)
        flags = ("--as-needed",) if libraries else floor.FLAGS
        return self._link(functions, target.llvm | once, path, [linker, *flags, *map(str, self.stubs), *libraries])

    def compile(self, kernel: Kernel, target: CpuTarget, path: Path) -> Workspace:
        """See Toolchain; the workspace is counted in the code. The stubs come before the system's libraries."""
        counted = Counted()
        with tvm.transform.PassContext(instruments=[counted]):
            self._link(kernel.functions, target.llvm, path, [self.cc, *floor.FLAGS, *map(str, self.stubs)])
        return Workspace(counted.scratch_bytes, counted.shared_bytes)

    def _link(
        self, functions: Mapping[str, PrimFunc], options: dict[str, Any], path: Path, command: Sequence[str]
    ) -> Linked:
        """Compile with these options of LLVM, and link: `command` is a linker and what comes behind the objects."""
        compiled = tvm.compile(tvm.IRModule(dict(functions)), target=tvm.target.Target(options), tir_pipeline=PIPELINE)
        made = path.with_suffix(".o")
        linker, *behind = command
        try:
            compiled.mod.write_to_file(str(made))
            objects = map(str, (self.launcher, made))
            run_compiler("cc", [linker, "-shared", "-o", str(path), *objects, *behind], "the library does not link:\n")
            return Linked.of(made.read_bytes())
        finally:
            made.unlink(missing_ok=True)

    def versions(self) -> dict[str, str]:
        """See Toolchain."""
        printed = version_text(self.cc).splitlines()
        return {"llvm": str(llvm_version_major()), "cc": printed[0] if printed else self.cc}


class X86Backend(Backend[CpuTarget]):
    """The backend for CPUs."""

    name = "x86"
    algorithms: Sequence[Any] = ALGORITHMS

    def check(self, problem: Problem, target: CpuTarget) -> None:  # noqa: ARG002
        """See Backend; LLVM would take another CPU for one that it does not know."""
        if not llvm_is_valid_cpu(target.mcpu, _TRIPLE):
            raise BuildError("target", target.name, f"must be a CPU that LLVM {llvm_version_major()} knows")

    def build_for_threads(self, problem: Problem, target: CpuTarget, algorithm: AnyAlgorithm, plan: Any) -> Kernel:
        """See Backend; if the plan has too few tasks for several threads, the kernel has further plans for them."""
        kernel = algorithm.build(problem, target, plan)
        others = parallel_plans(problem, target, algorithm, plan)
        if not others:
            return kernel
        return select_by_threads(kernel, [(least, algorithm.build(problem, target, other)) for least, other in others])

    def join(self, problem: Problem, kernels: Sequence[Kernel]) -> Kernel:
        """See Backend."""
        return join(problem, kernels)

    def toolchain(self, scratch: Path) -> X86Toolchain:
        """See Backend; the launcher is compiled once."""
        cc = find_compiler()
        return X86Toolchain(cc, launcher_object(cc, scratch), floor.stubs(cc, scratch))

    def flags(self) -> tuple[str, ...]:
        """See Backend; the linker's version does not decide the code."""
        return (*FLAGS, *floor.FLAGS)

    def trial_target(self, target: CpuTarget) -> CpuTarget:
        """See Backend."""
        return target
