"""The operator of OpenVINO that calls a bound layer without Python: its shared library, and its nodes.

An operation in Python takes some 40 microseconds to be called, which is more than many a layer of a vocoder.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import openvino
from openvino.utils.node_factory import NodeFactory

from tvm_deconv.compiler.shared import shared_library
from tvm_deconv.errors import BuildError
from tvm_deconv.openvino.threads import ARENA
from tvm_deconv.runtime import facts
from tvm_deconv.runtime.bridge import Bridge
from tvm_deconv.runtime.layer import Layer

_SOURCE = Path(__file__).with_name("operator.cpp")
_KIND = "Deconv"  # of the operator


class _Operator:
    """The library of the operator, and what makes its nodes.

    There is none without a C++ compiler, and for an OpenVINO without its headers.
    """

    def __init__(self) -> None:
        self._bridge = Bridge(_prepare)
        self._known = False
        self._library: ctypes.CDLL | None = None
        self._factory: Any = None

    @contextmanager
    def makers(self, layers: Mapping[str, Layer]) -> Iterator[dict[str, Callable[[Any], Any]]]:
        """Yield what makes, of data, the nodes of `layers`, by their names: of those that an artifact computes.

        It makes them in this context alone, and none where there is no library.
        """
        if not self._known:
            self._load()
        native = {name: layer for name, layer in layers.items() if layer.manifest is not None}
        if self._library is None or not native:
            yield {}
            return
        with facts.numbered(self._library, native.values(), 0) as numbers:
            yield {name: partial(self._node, number) for name, number in zip(native, numbers, strict=True)}

    def _node(self, number: int, data: Any) -> Any:
        return self._factory.create(_KIND, [data], {"layer": number})

    def _load(self) -> None:
        try:
            library = self._bridge.get(_compiled)
            self._factory = NodeFactory()
            self._factory.add_extension(library._name)
            self._library = library
        except (OSError, BuildError, RuntimeError):  # the last is OpenVINO's
            pass
        self._known = True


def _prepare(library: ctypes.CDLL) -> None:
    facts.prepare(library)
    ctypes.c_void_p.in_dll(library, "tvm_deconv_host").value = ARENA.address


def _compiled() -> bytes:
    """Return the library for the OpenVINO that is loaded. Raises OSError, CompilerNotFound, BuildError."""
    headers = Path(openvino.__file__).with_name("include")
    if not headers.is_dir():
        raise FileNotFoundError(headers)
    return shared_library([_SOURCE, facts.SOURCE], [str(headers)], "the operator of OpenVINO", [_loaded()])


def _loaded() -> str:
    """Return the path of the loaded library of OpenVINO. Raises OSError if there is none."""
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        path = Path(line.split(None, 5)[-1])
        if path.name.startswith("libopenvino.so"):
            return str(path)
    raise FileNotFoundError("libopenvino.so")


OPERATOR = _Operator()
