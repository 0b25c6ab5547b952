"""The contract of a backend: its algorithms, their plans and kernels, and the way to a library.

A backend compiles for one kind of target, see `Target.backend`. It is a list of `Algorithm` records and a `Toolchain`.
The packages of schedules beside this module define the algorithms; `compiler.backends` adds the toolchains and lists
the backends. Code outside of both works with any backend through these classes alone.

To add an algorithm, write a module that exports its record as `ALGORITHM` and add it to the list of its package. The
list is in order of preference; tests take their cases from it.
"""

from __future__ import annotations

import abc
import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeAlias, TypeVar

from tvm.tirx import PrimFunc

from tvm_deconv.errors import BuildError
from tvm_deconv.problem import Problem
from tvm_deconv.targets import Target

TargetT = TypeVar("TargetT", bound=Target)
PlanT = TypeVar("PlanT", bound="Plan")


class Plan(Protocol):
    """The decisions that make a kernel of a problem, as one algorithm understands them. Plans are hashable values."""

    @property
    def knobs(self) -> dict[str, int]:
        """The plan as integers, none negative: the form that manifests and tuning logs hold."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """A scheduled problem: the functions of an artifact, and the facts that manifests and callers need.

    The functions are ``pack(filter, packed)`` and ``deconv(data, packed, [bias], [workspace], out)``. `packed` has
    `packed_elements` of `packed_dtype`. The workspace is an argument of accumulators if it has `workspace_elements`;
    the bytes that the code takes from the launcher's workspace besides are known once it is compiled. Each block of a
    device gets `dynamic_bytes` of shared memory at its launch.
    """

    problem: Problem
    deconv: PrimFunc
    pack: PrimFunc
    algorithm: str
    knobs: dict[str, int]
    packed_elements: int
    packed_dtype: str
    workspace_elements: int = 0
    dynamic_bytes: int = 0

    @property
    def functions(self) -> dict[str, PrimFunc]:
        """The functions by the names under which a library exports them."""
        return {"deconv": self.deconv, "pack": self.pack}

    @property
    def workspace_bytes(self) -> int:
        """The size of the workspace that is an argument."""
        return self.workspace_elements * (8 if self.problem.accumulate_dtype == "float64" else 4)


@dataclass(frozen=True, kw_only=True)
class Algorithm(Generic[TargetT, PlanT]):
    """A way to compute transposed convolutions, as a record of functions.

    `supports` holds for the problems that it computes at all: a search may try it. `is_default_for` holds for those
    that it may build without a record.

    `candidates` lists every plan worth measuring with its cost by arithmetic, the cheapest first. Costs compare the
    plans of all algorithms of a backend for one problem. Every candidate builds. The list is not empty for a supported
    problem. For a problem with dynamic extents it is that of the representative call.

    `read` returns the plan with the given knobs; it raises KeyError, TypeError or ValueError if there is none.
    `tasks` counts the independent parts of a call, which threads share. `build` makes the kernel.

    `default` returns the plan to build without a record and its cost; by default it is the cheapest candidate.

    `error_growth` bounds the error of results relative to that of the direct algorithms, in norm. `caveat` tells people
    about other differences of the results, if there are any.
    """

    name: str
    supports: Callable[[Problem, TargetT], bool]
    is_default_for: Callable[[Problem, TargetT], bool]
    candidates: Callable[[Problem, TargetT], Sequence[tuple[float, PlanT]]]
    read: Callable[[Mapping[str, int]], PlanT]
    tasks: Callable[[Problem, PlanT], int]
    build: Callable[[Problem, TargetT, PlanT], Kernel]
    default: Callable[[Problem, TargetT], tuple[float, PlanT]] | None = None
    error_growth: float = 1.0
    caveat: str = ""

    def default_plan(self, problem: Problem, target: TargetT) -> tuple[float, PlanT]:
        """Return the plan to build without a record, with its cost."""
        return self.default(problem, target) if self.default else self.candidates(problem, target)[0]


#: An algorithm of any backend.
AnyAlgorithm: TypeAlias = Algorithm[Any, Any]


def imbalance(tasks: int, threads: int) -> float:
    """Return the time until the last of equal `tasks` ends on `threads` threads, relative to an even share."""
    return -(-tasks // threads) * threads / tasks


@dataclass(frozen=True)
class Workspace:
    """Bytes that a call takes: of each thread (of a call on a device), and of a call besides, for all its threads."""

    scratch_bytes: int = 0
    shared_bytes: int = 0


@dataclass(frozen=True)
class Linked:
    """A library that was made: the digest of its kernels' `code`, and reasons not to measure it.

    What is compiled or written in the same way by other versions has the same digest, of 16 hexadecimal digits.
    """

    code: str
    refused: tuple[str, ...] = ()

    @staticmethod
    def of(code: bytes, refused: Sequence[str] = ()) -> Linked:
        """Return the facts of a library with the kernels `code`."""
        return Linked(hashlib.sha256(code).hexdigest()[:16], tuple(refused))


class Toolchain(abc.ABC, Generic[TargetT]):
    """The compilers of a backend on this machine, with files that all builds share. It can be pickled."""

    @abc.abstractmethod
    def link(self, functions: Mapping[str, PrimFunc], target: TargetT, path: Path) -> Linked:
        """Compile `functions` to a library at `path` that exports them.

        Raises BuildError, RuntimeError, ValueError.
        """

    @abc.abstractmethod
    def compile(self, kernel: Kernel, target: TargetT, path: Path) -> Workspace:
        """Compile a kernel to a library at `path`; return the workspace of a call. Raises as `link` does."""

    @abc.abstractmethod
    def versions(self) -> dict[str, str]:
        """Return the versions of the compilers by name, for manifests."""


class Backend(abc.ABC, Generic[TargetT]):
    """Everything that differs between kinds of targets in a build and a search."""

    #: The value of `Target.backend`.
    name: ClassVar[str]
    #: Algorithms in order of preference.
    algorithms: Sequence[Algorithm[TargetT, Any]]

    def default(
        self, problem: Problem, target: TargetT, names: Collection[str] | None = None
    ) -> tuple[Algorithm[TargetT, Any], Any]:
        """Return the algorithm and the plan that arithmetic alone chooses, of the algorithms called `names` if given.

        The cheapest default plan wins. If none of the algorithms is a default for the problem, the first that supports
        it is taken. Raises BuildError if none supports it.
        """
        allowed = [algorithm for algorithm in self.algorithms if names is None or algorithm.name in names]
        defaults = [algorithm for algorithm in allowed if algorithm.is_default_for(problem, target)]
        defaults = defaults or [algorithm for algorithm in allowed if algorithm.supports(problem, target)][:1]
        if not defaults:
            raise BuildError("algorithms", ", ".join(names or ()), f"admit no algorithm for {problem.key}")
        plans = [(algorithm, *algorithm.default_plan(problem, target)) for algorithm in defaults]
        algorithm, _, plan = min(plans, key=lambda candidate: candidate[1])
        return algorithm, plan

    def build(
        self, problem: Problem, target: TargetT, algorithm: Algorithm[TargetT, Any] | None = None, plan: Any = None
    ) -> Kernel:
        """Return the kernel of `problem`, by default by the default plan, of `algorithm` if that is given."""
        if algorithm is None or plan is None:
            algorithm, plan = self.default(problem, target, [algorithm.name] if algorithm else None)
        return algorithm.build(problem, target, plan)

    def build_for_threads(
        self, problem: Problem, target: TargetT, algorithm: Algorithm[TargetT, Any], plan: Any
    ) -> Kernel:
        """Return the kernel of an artifact, which serves calls on any number of threads."""
        return algorithm.build(problem, target, plan)

    @abc.abstractmethod
    def check(self, problem: Problem, target: TargetT) -> None:
        """Raise BuildError if the backend cannot compile `problem` for `target`."""

    @abc.abstractmethod
    def join(self, problem: Problem, kernels: Sequence[Kernel]) -> Kernel:
        """Return one kernel in which the extents of a call choose among `kernels` of the problem's variants."""

    @abc.abstractmethod
    def toolchain(self, scratch: Path) -> Toolchain[TargetT]:
        """Find the compilers; compile shared files into `scratch`. Raises CompilerNotFound, BuildError."""

    @abc.abstractmethod
    def flags(self) -> tuple[str, ...]:
        """Return the options and versions of compilers that decide the code, for recipes. Raises CompilerNotFound."""

    @abc.abstractmethod
    def trial_target(self, target: TargetT) -> TargetT:
        """Return the target that a search compiles candidates of `target` for: the machine that measures suffices."""
