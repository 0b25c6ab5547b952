"""What operators in C and C++ know of bound layers, and the numbers by which models name these: layers.h."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tvm_deconv.problem import Problem
from tvm_deconv.problem.arrays import storage
from tvm_deconv.runtime.layer import Layer, native

#: What a library of operators is compiled with.
SOURCE, HEADER = (Path(__file__).with_name(name) for name in ("layers.c", "layers.h"))
_MOST_AXES = 5
_TYPE_CODES = {"f": 2, "u": 1, "i": 0}  # of DLPack, by NumPy's kind; bfloat16 is stored as an unsigned integer

_Extents = ctypes.c_int64 * _MOST_AXES


class Facts(ctypes.Structure):
    """`struct facts` of layers.h."""

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


def prepare(operators: ctypes.CDLL) -> None:
    """Declare the functions of a library of operators that number layers."""
    operators.tvm_deconv_add_layer.argtypes = [ctypes.POINTER(Facts)]
    operators.tvm_deconv_add_layer.restype = ctypes.c_int64
    operators.tvm_deconv_remove_layer.argtypes = [ctypes.c_int64]
    operators.tvm_deconv_remove_layer.restype = None


@contextmanager
def numbered(operators: ctypes.CDLL, layers: Iterable[Layer], limit: int) -> Iterator[list[int]]:
    """Yield numbers for `layers`, which nodes may name while models are made in this context.

    `limit` is how many threads a call may use; 0 leaves it to the launcher.
    """
    numbers: list[int] = []
    try:
        for layer in layers:
            number = operators.tvm_deconv_add_layer(ctypes.byref(facts(layer, limit)))
            if not number:
                raise MemoryError("no memory for a layer")
            numbers.append(number)
        yield numbers
    finally:
        for number in numbers:
            operators.tvm_deconv_remove_layer(number)


def facts(layer: Layer, limit: int) -> Facts:
    """Return what an operator knows of a layer that an artifact for CPUs computes."""
    problem = layer.problem
    function, constants = native(layer)
    types = [storage(dtype) for dtype in (problem.dtype, problem.output_dtype)]
    data, factor, offset = _extents(problem)
    return Facts(
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
    """Return the data's extents, -1 for dynamic ones, and factors and offsets of the output's; see layers.h."""
    data, factor, offset = [*problem.data_shape], [0] * len(problem.data_shape), [*problem.output_shape]
    if 0 in problem.dynamic:
        data[0], factor[0], offset[0] = -1, 1, 0
    for axis in problem.dynamic_axes:
        stride = problem.strides[axis]
        data[axis + 2], factor[axis + 2] = -1, stride
        offset[axis + 2] = problem.output_constant(axis) - stride
    return data, factor, offset
