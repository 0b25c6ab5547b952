"""Schedules for CUDA: which kernel serves a problem, and its default plan.

The rules are tried in order; the first whose predicate admits the problem builds the kernel. The last admits every
problem.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import tvm
from tvm.backend.cuda import export_cuda_host
from tvm.tirx import PrimFunc

from tvm_deconv.problem import Problem
from tvm_deconv.schedules.cuda.emit import Kernel
from tvm_deconv.schedules.cuda.generic import generic


@dataclass(frozen=True, slots=True)
class Algorithm:
    """A kernel family: the problems it serves, and what builds its kernel for one."""

    name: str
    serves: Callable[[Problem], bool]
    build: Callable[[Problem], Kernel]


def always(problem: Problem) -> bool:  # noqa: ARG001
    """Every problem."""
    return True


ALGORITHMS = (Algorithm("cuda_generic", always, generic),)


def algorithm_for(problem: Problem) -> Algorithm:
    """Return the first algorithm whose predicate admits `problem`."""
    return next(algorithm for algorithm in ALGORITHMS if algorithm.serves(problem))


def build_kernel(problem: Problem, algorithm: Algorithm | None = None) -> Kernel:
    """Build the functions of `problem`, by the default algorithm where none is given."""
    return (algorithm or algorithm_for(problem)).build(problem)


def source(functions: Mapping[str, PrimFunc]) -> str:
    """Return one CUDA C++ translation unit that exports `functions` under their names, kernels and host code."""
    module = tvm.IRModule({name: func.with_attr("global_symbol", name) for name, func in functions.items()})
    # The architecture is not in the source: nvcc is told.
    target = tvm.target.Target({"kind": "cuda", "arch": "sm_80"}, host={"kind": "cuda_host"})
    # Loops marked to be unrolled stay loops, which nvcc unrolls.
    with tvm.transform.PassContext(config={"tirx.UnrollLoop": {"explicit_unroll": 0}}):
        return str(export_cuda_host(tvm.compile(module, target=target).mod))
