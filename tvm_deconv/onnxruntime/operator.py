"""The operator of ONNX Runtime that calls a bound layer: its shared library, and the nodes that name layers.

Its nodes are in the domain `DOMAIN`. They are valid in this process alone, while the session is made: see operator.c.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import onnx
import onnxruntime

from tvm_deconv.frontends.onnx import Place
from tvm_deconv.onnxruntime import library
from tvm_deconv.runtime.bridge import Bridge
from tvm_deconv.runtime.facts import prepare
from tvm_deconv.runtime.layer import Layer

DOMAIN = "tvm_deconv"
#: An entry of SessionOptions that tells that the operators are among them already.
_MARK = "tvm_deconv.operators"

_operators = Bridge(prepare)


def load(beside: Path | None = None) -> ctypes.CDLL:
    """Return the library of the operators: that in the folder `beside`, if there is one, or else compiled now.

    The first call decides for the process. Raises CompilerNotFound, BuildError, OSError.
    """
    return _operators.get(lambda: (library.read(beside) if beside else None) or library.compiled())


def register(options: onnxruntime.SessionOptions, beside: Path | None = None) -> None:
    """Add the operators to the options of a session, once; see `load`."""
    operators = load(beside)
    try:
        options.get_session_config_entry(_MARK)
    except RuntimeError:
        options.register_custom_ops_library(operators._name)
        options.add_session_config_entry(_MARK, "1")


def node(layer: Layer, number: int, place: Place) -> onnx.NodeProto:
    """Return the node that computes a layer with a number, for the nodes in `place`."""
    types = dict.fromkeys([layer.problem.dtype, layer.problem.output_dtype])
    kind = "_".join(["ConvTranspose", *types])
    return onnx.helper.make_node(kind, [place.data], [place.made], place.node.name, domain=DOMAIN, layer=number)
