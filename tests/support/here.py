"""Builds of `td.compile` in this process, for tests whose subject is not the process."""

import contextlib
import threading

import pytest
from support.artifacts import toolchain_of

from tvm_deconv.compiler import build
from tvm_deconv.compiler.backends.x86 import X86Backend


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


@contextlib.contextmanager
def compiling_here():
    """`td.compile` builds in this process, with one launcher for all: another takes two seconds to start."""
    toolchain = toolchain_of()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "Worker", Here)
        patch.setattr(X86Backend, "toolchain", lambda *_: toolchain)
        yield
