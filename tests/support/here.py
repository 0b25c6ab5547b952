"""Builds of `td.compile` and of searches in this process, for tests whose subject is not the process."""

import contextlib
import threading

import pytest
from support.artifacts import toolchain_of

from tvm_deconv.compiler import build
from tvm_deconv.compiler.backends.x86 import X86Backend
from tvm_deconv.compiler.process import Refusal, WorkerError
from tvm_deconv.tuning import builders


class Here:
    """In place of a worker that builds: its object lives in this process, and one builds at a time."""

    _lock = threading.Lock()

    def __init__(self, kind, *arguments, **_):
        self._made = kind(*arguments)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def ask(self, method, *arguments, **_):
        with self._lock:
            return getattr(self._made, method)(*arguments)


class HereForCandidates(Here):
    """The same for candidates: those that do not compile are errors of a worker."""

    def ask(self, method, *arguments, **_):
        try:
            return super().ask(method, *arguments)
        except Refusal as refusal:
            raise WorkerError(str(refusal)) from refusal
        except Exception as error:
            raise WorkerError(f"{type(error).__name__}: {error}") from error


@contextlib.contextmanager
def _workers_here(module, worker):
    """Have `module` start a `worker` of this process, with one launcher for all: another takes two seconds to start."""
    toolchain = toolchain_of()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "Worker", worker)
        patch.setattr(X86Backend, "toolchain", lambda *_: toolchain)
        yield


def compiling_here():
    """`td.compile` builds in this process."""
    return _workers_here(build, Here)


def searching_here():
    """Searches compile candidates in this process, which has imported TVM."""
    return _workers_here(builders, HereForCandidates)
