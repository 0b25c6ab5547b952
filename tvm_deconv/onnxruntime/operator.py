"""The operator of ONNX Runtime that calls a bound layer: its shared library, and the nodes that name layers.

Its nodes are in the domain `DOMAIN`. They are valid in this process alone, while the session is made: see operator.c.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import onnx
import onnxruntime

from tvm_deconv.frontends.onnx import Place
from tvm_deconv.onnxruntime import library
from tvm_deconv.problem import Problem
from tvm_deconv.problem.arrays import storage
from tvm_deconv.runtime.bridge import Bridge
from tvm_deconv.runtime.layer import Layer, native

DOMAIN = "tvm_deconv"
_MOST_AXES = 5
_TYPE_CODES = {"f": 2, "u": 1, "i": 0}  # of DLPack, by NumPy's kind; bfloat16 is stored as an unsigned integer
#: An entry of SessionOptions that tells that the operators are among them already.
_MARK = "tvm_deconv.operators"

_Extents = ctypes.c_int64 * _MOST_AXES


class _Facts(ctypes.Structure):
    """`struct facts` of operator.c."""

    _fields_ = (
        ("deconv", ctypes.c_void_p),
        ("constants", ctypes.c_void_p * 2),
        ("threads", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("types", ctypes.c_uint8 * 4),
        ("data", _Extents),
        ("factor", _Extents),
        ("offset", _Extents),
    )


def _prepare(made: ctypes.CDLL) -> None:
    made.tvm_deconv_add_layer.argtypes = [ctypes.POINTER(_Facts)]
    made.tvm_deconv_add_layer.restype = ctypes.c_int64
    made.tvm_deconv_remove_layer.argtypes = [ctypes.c_int64]
    made.tvm_deconv_remove_layer.restype = None


_operators = Bridge(_prepare)


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


@contextmanager
def numbered(layers: list[Layer], limit: int) -> Iterator[list[int]]:
    """Yield numbers for `layers`, which nodes may name while sessions are made in this context.

    `limit` is how many threads a call may use; 0 leaves it to the launcher.
    """
    operators = load()
    numbers: list[int] = []
    try:
        for layer in layers:
            number = operators.tvm_deconv_add_layer(ctypes.byref(_facts(layer, limit)))
            if not number:
                raise MemoryError("no memory for a layer")
            numbers.append(number)
        yield numbers
    finally:
        for number in numbers:
            operators.tvm_deconv_remove_layer(number)


def node(layer: Layer, number: int, place: Place) -> onnx.NodeProto:
    """Return the node that computes a layer with a number, for the nodes in `place`."""
    types = dict.fromkeys([layer.problem.dtype, layer.problem.output_dtype])
    kind = "_".join(["ConvTranspose", *types])
    return onnx.helper.make_node(kind, [place.data], [place.made], place.node.name, domain=DOMAIN, layer=number)


def _facts(layer: Layer, limit: int) -> _Facts:
    problem = layer.problem
    function, constants = native(layer)
    types = [storage(dtype) for dtype in (problem.dtype, problem.output_dtype)]
    data, factor, offset = _extents(problem)
    return _Facts(
        function.__chandle__(),
        (ctypes.c_void_p * 2)(*(constant.__chandle__() for constant in constants)),
        limit,
        problem.rank + 2,
        (ctypes.c_uint8 * 4)(*(number for dtype in types for number in (_TYPE_CODES[dtype.kind], 8 * dtype.itemsize))),
        _Extents(*data),
        _Extents(*factor),
        _Extents(*offset),
    )


def _extents(problem: Problem) -> tuple[list[int], list[int], list[int]]:
    """Return the data's extents, -1 for dynamic ones, and factors and offsets of the output's; see operator.c."""
    data, factor, offset = [*problem.data_shape], [0] * len(problem.data_shape), [*problem.output_shape]
    if 0 in problem.dynamic:
        data[0], factor[0], offset[0] = -1, 1, 0
    for axis in problem.dynamic_axes:
        stride = problem.strides[axis]
        data[axis + 2], factor[axis + 2] = -1, stride
        offset[axis + 2] = problem.output_constant(axis) - stride
    return data, factor, offset
