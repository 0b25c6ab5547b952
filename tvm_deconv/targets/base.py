"""The contract of every target: the facts that the compiler, the runtime and a search ask for.

A target names machines that share their code: the CPUs of a psABI level, a microarchitecture, or CUDA devices. Code
outside of a backend reaches a target through `Target` alone and never asks for its class.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, TypeAlias

from tvm_deconv.problem import Problem
from tvm_deconv.targets.host import Host

#: Compute capability of a CUDA device: major, minor.
Capability: TypeAlias = tuple[int, int]

#: The functions that every library defines, whatever its target.
FUNCTIONS = frozenset({"__tvm_ffi_pack", "__tvm_ffi_deconv"})


@dataclass(frozen=True)
class Place:
    """Where a call runs: the host, the widest target that may be loaded there, and the device of the arrays.

    `capability` is that of the CUDA device whose memory holds the arrays; None means CPU memory. `libraries` are the
    versions of the system's libraries by family, as far as they are known.
    """

    host: Host
    cap: Target | None = None
    capability: Capability | None = None
    libraries: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def name(self) -> str:
        """The word for the place in messages."""
        return "CPU" if self.capability is None else "device"


@dataclass(frozen=True, kw_only=True)
class Target(abc.ABC):
    """A set of machines that one artifact serves.

    `name` is its name in manifests, file names and the command line. `features` are the CPU flags that its code
    needs, spelled as in ``/proc/cpuinfo``. The other fields of a subclass are facts that schedules and compilers read:
    every field is part of an artifact's recipe.
    """

    name: str
    features: frozenset[str] = frozenset()

    #: The backend that compiles for it: "x86" or "cuda".
    backend: ClassVar[str]
    #: The memory that holds the arrays of a call: "cpu" or "cuda".
    memory: ClassVar[str]
    #: The symbols that its libraries define.
    symbols: ClassVar[frozenset[str]]

    @property
    def logs(self) -> tuple[str, ...]:
        """The targets whose tuning logs apply: its own, then those that stand in for problems without a record."""
        return (self.name,)

    @property
    def ancestors(self) -> tuple[str, ...]:
        """The other targets whose records a search starts from, the closest first: plans for them are plans for it."""
        return ()

    def on(self, microarchitecture: str | None) -> Target:  # noqa: ARG002
        """Return the target with what is known of a microarchitecture, by archspec's name: its plans are for that."""
        return self

    @property
    @abc.abstractmethod
    def machines(self) -> str:
        """The machines that run its artifacts, for people."""

    @abc.abstractmethod
    def computes(self, problem: Problem) -> Problem:
        """Return the problem that an artifact of this target for `problem` computes."""

    def multiplies_in(self, problem: Problem, algorithm: str) -> str:  # noqa: ARG002
        """Return the precision, one of PRECISIONS, in which a kernel by `algorithm` multiplies for a problem."""
        return "ieee"

    @abc.abstractmethod
    def refusal(self, place: Place) -> str | None:
        """Return why its artifacts do not run at `place`; None if they do."""

    @abc.abstractmethod
    def closeness(self, place: Place) -> tuple[int, ...]:
        """Return how close its code is to the device at `place`, of targets that run there: the higher, the closer."""

    def _lack(self, place: Place) -> str | None:
        """Return which CPU flags it needs and the host lacks, or the cap excludes."""
        missing = self.features - place.host.features
        if missing:
            return f"needs CPU flags that this host lacks: {', '.join(sorted(missing))}"
        beyond = self.features - place.cap.features if place.cap else frozenset()
        if place.cap and beyond:
            excluded = ", ".join(sorted(beyond))
            return f"{MAX_TARGET_VARIABLE}={place.cap.name} excludes CPU flags that it needs: {excluded}"
        return None


#: The environment variable that names the widest target that may be loaded.
MAX_TARGET_VARIABLE = "TVM_DECONV_MAX_TARGET"
