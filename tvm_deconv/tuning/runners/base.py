"""The contract of runners, and what they share: harnesses in processes that are replaced when something goes wrong."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from tvm_deconv.bench.floors import FMA_DTYPES, build_fma
from tvm_deconv.compiler.process import Worker, WorkerError
from tvm_deconv.problem import Problem
from tvm_deconv.targets import Host
from tvm_deconv.tuning.builders import Built
from tvm_deconv.tuning.runners.harness import Baseline, Harness, Measured
from tvm_deconv.tuning.runners.machine import Machine

_T = TypeVar("_T")
_U = TypeVar("_U")
_Self = TypeVar("_Self", bound="Runner")
_PREPARE = 4  # preparing a problem may take this many times as long as measuring a candidate
START_SECONDS = 60.0  # for a process to describe its machine


class BrokenDefaultError(WorkerError):
    """The default schedule, which others are checked against, does not run."""


class HarnessProcess:
    """A harness in a process of its own, and the baseline that it is prepared for."""

    def __init__(self, machine: Callable[..., Machine], *arguments: object) -> None:
        self.worker = Worker(Harness, machine, *arguments)
        self.baseline: Baseline | None = None

    def host(self) -> Host:
        """Return the description of the machine. Raises WorkerError."""
        host: Host = self.worker.ask("host", timeout=START_SECONDS)
        return host


class Runner(ABC):
    """What a search measures with, on `threads` threads; leaving its context ends its processes.

    Subclasses say which machine it is (`host`), and lend and take back processes (`_take`, `_give`). They may measure
    several candidates at a time (`map`), and survive the loss of machines (`_attempts`).
    """

    #: Whether the CPUs of this machine measure.
    local = False
    #: Seconds that a call may take besides those that its candidate may take.
    _overhead = 0.0
    #: How often a candidate is measured if its process is lost, before it is to blame.
    _attempts = 1

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._stack = contextlib.ExitStack()

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    @abstractmethod
    def host(self) -> Host:
        """The machine that candidates run on."""

    @property
    def places(self) -> int:
        """How many candidates may be measured at a time."""
        return 1

    @abstractmethod
    def _take(self) -> HarnessProcess:
        """Lend a process that nobody uses; wait for one if need be."""

    @abstractmethod
    def _give(self, process: HarnessProcess, *, kept: bool) -> None:
        """Take a process back; end it unless it is `kept`."""

    def trial_target(self, target: Any) -> Any:
        """Return the target that candidates of `target` are compiled for: this machine measures, and that suffices."""
        from tvm_deconv.compiler.backends import backend_of

        return backend_of(target).trial_target(target)

    def map(self, function: Callable[[_T], _U], items: Iterable[_T]) -> Iterator[_U]:
        """Call `function`, which measures, on each item; yield the results as soon as they are there."""
        return map(function, items)

    def multiplied(self, problem: Problem) -> str | None:
        """Return the type whose rate of multiply-adds bounds `problem`; None if that is not measured."""
        return problem.accumulate_dtype if problem.accumulate_dtype in FMA_DTYPES else None

    def multiply_add_rate(self, dtype: str, target: Any, folder: Path, timeout: float) -> float:
        """Measure the multiply-adds per second of `dtype`, with a kernel for `target` that is compiled into `folder`.

        Raises WorkerError, RemoteError, CompilerNotFound, BuildError.
        """
        return self._multiply_adds(dtype, build_fma(target, dtype, folder), timeout)

    def _multiply_adds(self, dtype: str, kernel: Path | None, timeout: float) -> float:
        rate: float = self._use(lambda process: self._ask(process, "multiply_adds", dtype, kernel, timeout=timeout))
        return rate

    def copy(self, timeout: float) -> float:
        """Measure the bytes per second that the machine copies. Raises WorkerError, RemoteError."""
        rate: float = self._use(lambda process: self._ask(process, "copy", timeout=timeout))
        return rate

    def measure(self, baseline: Baseline, built: Built, best: float, timeout: float) -> Measured:
        """Measure a candidate of the problem of `baseline`; `best` is the least time so far by the default's.

        Raises WorkerError if the candidate fails, BrokenDefaultError if the default does, RemoteError.
        """
        return self._use(lambda process: self._measure(process, baseline, built, best, timeout))

    def _measure(
        self, process: HarnessProcess, baseline: Baseline, built: Built, best: float, timeout: float
    ) -> Measured:
        if not process.worker.running or process.baseline != baseline:
            process.baseline = None
            try:
                self._ask(process, "prepare", baseline, timeout=_PREPARE * timeout)
            except WorkerError as error:
                if self._lost(error):
                    raise
                raise BrokenDefaultError(f"the default does not run: {error}") from error
            process.baseline = baseline
        measured: Measured = self._ask(process, "measure", built, best, timeout=timeout)
        return measured

    def _ask(self, process: HarnessProcess, method: str, *arguments: object, timeout: float) -> Any:
        return process.worker.ask(method, *arguments, timeout, timeout=timeout + self._overhead)

    def _lost(self, error: WorkerError) -> bool:
        """Return whether an error was the machine's fault and not the candidate's."""
        return error.died and self._attempts > 1

    def _use(self, work: Callable[[HarnessProcess], _T]) -> _T:
        """Call `work` with a process; again with another if the machine was lost."""
        for attempt in range(1, self._attempts + 1):
            process = self._take()
            kept = False
            try:
                result = work(process)
                kept = True
            except WorkerError as error:
                if not self._lost(error) or attempt == self._attempts:
                    raise
            else:
                return result
            finally:
                # Whatever a failed candidate did, it may have done to the memory of that process too.
                self._give(process, kept=kept)
        raise AssertionError("not reached")


class SingleProcessRunner(Runner):
    """Measures one candidate at a time, in one process, which starts again after a failure."""

    def __init__(self, threads: int, machine: Callable[..., Machine], *arguments: object) -> None:
        super().__init__(threads)
        self._process = HarnessProcess(machine, *arguments)
        self._stack.callback(self._process.worker.close)

    def _take(self) -> HarnessProcess:
        return self._process

    def _give(self, process: HarnessProcess, *, kept: bool) -> None:
        if not kept:
            process.worker.stop()
