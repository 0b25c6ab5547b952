"""The threads of PyTorch, in which layers of the CPU compute: those of the OpenMP that it is linked with.

They spin after each of its operators, and threads of another pool would share the processors with them.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

import torch

from tvm_deconv.runtime.layer import Layer
from tvm_deconv.runtime.threads import Host, openmp_host


class _OpenMP:
    """The host of PyTorch's threads, once a layer was called; None if PyTorch has no OpenMP, and in a forked child."""

    def __init__(self) -> None:
        self.host: Host | None = None
        self.known = False

    @property
    def address(self) -> int:
        """The address of the host, 0 for none."""
        if not self.known:
            function = _gomp_parallel()
            self.host = None if function is None else openmp_host(function)
            self.known = True
        return 0 if self.host is None else ctypes.addressof(self.host)


_openmp = _OpenMP()


def _after_fork() -> None:
    _openmp.host, _openmp.known = None, True  # a child has none of its threads, and libgomp would wait for them


os.register_at_fork(after_in_child=_after_fork)


def _gomp_parallel() -> int | None:
    """Return the address of the function by which PyTorch's loops start, None if there is none."""
    path = Path(torch.__file__).with_name("lib") / "libtorch_cpu.so"
    try:
        library = ctypes.CDLL(str(path), os.RTLD_NOW | os.RTLD_NOLOAD)
        return ctypes.cast(library.GOMP_parallel, ctypes.c_void_p).value
    except (OSError, AttributeError):
        return None


def call(layer: Layer, data: Any) -> Any:
    """Return the output of a layer of the CPU for an array or a tensor, computed by PyTorch's threads."""
    if layer.manifest is None:  # NumPy computes
        return layer(data)
    return layer(data, threads=torch.get_num_threads(), host=_openmp.address)
