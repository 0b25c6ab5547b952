"""The threads of OpenVINO, in which its operations compute: those of the arena of oneTBB that runs the model.

They are awake behind OpenVINO's own loops, and threads of another pool would have to be woken for each operation.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from tvm_deconv.compiler.shared import shared_library
from tvm_deconv.errors import BuildError
from tvm_deconv.runtime.bridge import Bridge

_SOURCE = Path(__file__).with_name("threads.c")
#: oneTBB since 2021. The name is that of its binary interface.
_LIBRARY = "libtbb.so.12"
#: `initialize`, `spawn`, `wait` and `notify_waiters` of the namespace `tbb::detail::r1`.
_FUNCTIONS = (
    "_ZN3tbb6detail2r110initializeERNS0_2d118task_group_contextE",
    "_ZN3tbb6detail2r15spawnERNS0_2d14taskERNS2_18task_group_contextE",
    "_ZN3tbb6detail2r14waitERNS0_2d112wait_contextERNS2_18task_group_contextE",
    "_ZN3tbb6detail2r114notify_waitersEm",
)


class _Functions(ctypes.Structure):
    """`struct tbb` of threads.c."""

    _fields_ = tuple((name, ctypes.c_void_p) for name in _FUNCTIONS)


class _Arena:
    """The host of OpenVINO's threads; there is none without a C++ compiler, and for another library of threads."""

    def __init__(self) -> None:
        self._known: int | None = None
        self._bridge = Bridge(_prepare)

    @property
    def address(self) -> int:
        """The address of the host, 0 for none."""
        if self._known is None:
            try:
                library = self._bridge.get(_compiled)
                self._known = ctypes.addressof(ctypes.c_char.in_dll(library, "tvm_deconv_arena"))
            except (OSError, AttributeError, BuildError):
                self._known = 0
        return self._known


def _prepare(library: ctypes.CDLL) -> None:
    """Let `library` call the oneTBB that is loaded. Raises OSError, AttributeError if none is, or one without these."""
    tbb = ctypes.CDLL(_LIBRARY, os.RTLD_NOW | os.RTLD_NOLOAD)
    found = (ctypes.cast(getattr(tbb, name), ctypes.c_void_p).value for name in _FUNCTIONS)
    library.tvm_deconv_use.argtypes = [_Functions]
    library.tvm_deconv_use(_Functions(*found))


def _compiled() -> bytes:
    return shared_library([_SOURCE], [], "what calls OpenVINO's threads")


ARENA = _Arena()
