"""Compiling candidates, several at a time, in processes of their own, since a compiler may crash."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tvm_deconv.compiler.process import BUILD, Refusal, Worker, WorkerError
from tvm_deconv.problem import Problem

if TYPE_CHECKING:
    from tvm_deconv.compiler.records import Schedule
    from tvm_deconv.schedules.contract import Toolchain
    from tvm_deconv.targets import Target

BUILD_SECONDS = 120.0  # for one candidate


@dataclass(frozen=True)
class Built:
    """A compiled candidate: the library with "deconv", the one with "pack", and the elements that "pack" fills.

    The elements have `packed_dtype`. "deconv" takes a workspace of `workspace_elements` as an argument, if there are
    any. `code` is the digest of the code of "deconv". The build took `seconds` of processor time.
    """

    deconv: Path
    pack: Path
    packed_elements: int
    packed_dtype: str
    workspace_elements: int = 0
    code: str = ""
    seconds: float = 0.0


class Builder:
    """Compiles candidates for one target with a `toolchain` into the directory `scratch`."""

    def __init__(self, target: Target, scratch: Path, toolchain: Toolchain[Any]) -> None:
        self._target = target
        self._scratch = scratch
        self._toolchain = toolchain
        self._count = 0

    def build(self, key: str, schedule: Schedule) -> Built:
        """Compile a schedule of the problem with this key. Schedules that share a "pack" compile it once."""
        from tvm_ffi import structural_hash

        from tvm_deconv.compiler.selection import named, plan_of

        start = time.process_time()
        algorithm, plan = named(schedule.algorithm), plan_of(schedule)
        kernel = algorithm.build(Problem.from_key(key), self._target, plan)
        pack = self._scratch / f"pack-{structural_hash(kernel.pack)}.so"
        if not pack.exists():
            self._link({"pack": kernel.pack}, pack)
        self._count += 1
        deconv = self._scratch / f"deconv-{os.getpid()}-{self._count}.so"
        code = self._link({"deconv": kernel.deconv}, deconv)
        facts = kernel.packed_elements, kernel.packed_dtype, kernel.workspace_elements, code
        return Built(deconv, pack, *facts, time.process_time() - start)

    def _link(self, functions: dict[str, Any], path: Path) -> str:
        """Compile `functions` to a library at `path`; return the digest of their code."""
        temporary = path.with_suffix(f".{os.getpid()}.so")
        linked = self._toolchain.link(functions, self._target, temporary)
        for reason in linked.refused:
            raise Refusal(reason)
        temporary.replace(path)
        return linked.code


class BuilderPool:
    """As many builders for `target` as `jobs`, each in a process, compiling into the directory `scratch`."""

    def __init__(self, target: Target, scratch: Path, jobs: int) -> None:
        from tvm_deconv.compiler.backends import backend_of

        backend = backend_of(target)
        arguments = target, scratch, backend.toolchain(scratch)
        self._begun: dict[tuple[str, Schedule], Future[Built | str]] = {}
        with contextlib.ExitStack() as stack:
            self._threads = stack.enter_context(ThreadPoolExecutor(jobs))
            stack.callback(self._cancel)
            workers = (Worker(Builder, *arguments, limits=BUILD) for _ in range(jobs))
            self._idle = [stack.enter_context(worker) for worker in workers]
            self._stack = stack.pop_all()

    def __enter__(self) -> BuilderPool:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def build(
        self, key: str, schedules: Sequence[Schedule], following: tuple[str, Sequence[Schedule]] | None = None
    ) -> dict[Schedule, Built | str]:
        """Compile schedules of the problem with this key; the text of a candidate says why it does not compile.

        Those that are `following`, of another problem, are begun when nothing else is left, one at a time; a `build` of
        them goes on where that is.
        """
        begun = {schedule: self._begun.pop((key, schedule), None) for schedule in schedules}
        futures = {
            schedule: future if future and not future.cancel() else self._threads.submit(self._build, key, schedule)
            for schedule, future in begun.items()
        }
        self._cancel()
        if following:
            other, rest = following
            self._begun = {(other, schedule): Future() for schedule in rest}
            self._threads.submit(self._build_begun, [*self._begun.items()])
        return {schedule: future.result() for schedule, future in futures.items()}

    def pause(self) -> None:
        """Return when nothing is compiled; what has not begun yet has to wait for its `build`."""
        wait([future for future in self._begun.values() if not future.cancel()])

    def _cancel(self) -> None:
        for future in self._begun.values():
            future.cancel()

    def _build_begun(self, begun: Iterable[tuple[tuple[str, Schedule], Future[Built | str]]]) -> None:
        for (key, schedule), future in begun:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(self._build(key, schedule))
                except BaseException as error:
                    future.set_exception(error)

    def _build(self, key: str, schedule: Schedule) -> Built | str:
        worker = self._idle.pop()
        try:
            built: Built = worker.ask("build", key, schedule, timeout=BUILD_SECONDS)
        except WorkerError as error:
            return str(error)
        finally:
            self._idle.append(worker)
        return built
