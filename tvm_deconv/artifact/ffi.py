"""The package tvm_ffi, imported without torch.

On import, tvm_ffi imports torch if that is installed, against a symbol conflict on Windows. That takes seconds and
hundreds of MB.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class TorchBlocker:
    """An import finder that hides torch from the thread that made it."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Raise ModuleNotFoundError for torch in that thread; leave all else to the finders that follow."""
        del path, target
        if name == "torch" and threading.get_ident() == self._thread:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None


@contextlib.contextmanager
def without_torch() -> Iterator[None]:
    """Hide torch from imports of this thread, unless the program has imported it; later imports find it."""
    blockers = [] if "torch" in sys.modules else [TorchBlocker()]
    sys.meta_path[:0] = blockers
    try:
        yield
    finally:
        for blocker in blockers:
            sys.meta_path.remove(blocker)


def import_tvm_ffi() -> Any:
    """Return the module tvm_ffi; its import does not import torch."""
    with without_torch():
        import tvm_ffi
    return tvm_ffi
