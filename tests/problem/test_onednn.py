"""`from_onednn` against oneDNN itself: the shapes that its ConvTranspose infers, and the numbers that it computes.

Optional: `pip install onednn-cpu-gomp`, or a libdnnl.so (3.0 or later) named by DNNL_LIBRARY.
"""

import ctypes
import ctypes.util
import itertools
import os
import sys
from pathlib import Path

import numpy as np
import pytest

import tvm_deconv as td

_F32, _CPU, _STRIDED, _CONV_TRANSPOSE = 3, 1, 2, 16  # of oneDNN's enumerations
_ATTRIBUTES = {
    "groups": 0x32,
    "dilations": 0x41,
    "output_padding": 0x45,
    "pads_begin": 0x46,
    "pads_end": 0x47,
    "strides": 0x4B,
    "auto_pad": 0x81,
    "data_format": 0x83,
    "weights_format": 0x87,
}


class LogicalTensor(ctypes.Structure):
    _fields_ = [
        ("id", ctypes.c_size_t),
        ("ndims", ctypes.c_int),
        ("dims", ctypes.c_int64 * 12),
        ("data_type", ctypes.c_int),
        ("property", ctypes.c_int),
        ("layout_type", ctypes.c_int),
        ("strides", ctypes.c_int64 * 12),
    ]


class Refused(Exception):
    pass


@pytest.fixture(scope="module")
def dnnl():
    installed = Path(sys.prefix) / "lib" / "libdnnl.so.3"
    found = str(installed) if installed.exists() else ctypes.util.find_library("dnnl")
    path = os.environ.get("DNNL_LIBRARY", found)
    if not path:
        pytest.skip("there is no oneDNN: pip install onednn-cpu-gomp")
    library = ctypes.CDLL(path)
    if not hasattr(library, "dnnl_graph_partition_create_with_op"):
        pytest.skip(f"{path} has no graph API")
    return library


def conv_transpose(dnnl, data, filter, *, groups=1, **attributes):
    """Return what oneDNN computes; Refused if it computes nothing."""

    def call(name, *arguments):
        if status := getattr(dnnl, name)(*arguments):
            raise Refused(f"{name}: {status}")

    def tensor(number, dims, rank=None):
        made = LogicalTensor()
        extents = (ctypes.c_int64 * 12)(*dims) if dims else (ctypes.c_int64 * 12)(*[-(1 << 63)] * rank)
        arguments = ctypes.c_size_t(number), _F32, rank or len(dims), extents, _STRIDED, 0
        call("dnnl_graph_logical_tensor_init_with_dims", ctypes.byref(made), *arguments)
        return made

    op, partition, compiled, engine, stream = (ctypes.c_void_p() for _ in range(5))
    inputs, out = [tensor(0, data.shape), tensor(1, filter.shape)], tensor(2, (), data.ndim)
    call("dnnl_graph_op_create", ctypes.byref(op), ctypes.c_size_t(7), _CONV_TRANSPOSE, b"layer")
    for each in inputs:
        call("dnnl_graph_op_add_input", op, ctypes.byref(each))
    call("dnnl_graph_op_add_output", op, ctypes.byref(out))
    for name, value in {"groups": groups, **attributes}.items():
        if isinstance(value, str):
            call("dnnl_graph_op_set_attr_str", op, _ATTRIBUTES[name], value.encode(), ctypes.c_size_t(1))
        else:
            numbers = (value,) if isinstance(value, int) else value
            array = (ctypes.c_int64 * len(numbers))(*numbers)
            call("dnnl_graph_op_set_attr_s64", op, _ATTRIBUTES[name], array, ctypes.c_size_t(len(numbers)))
    call("dnnl_engine_create", ctypes.byref(engine), _CPU, ctypes.c_size_t(0))
    call("dnnl_stream_create", ctypes.byref(stream), engine, 1)
    call("dnnl_graph_partition_create_with_op", ctypes.byref(partition), op, _CPU)
    call("dnnl_graph_compiled_partition_create", ctypes.byref(compiled), partition)
    pointers = (ctypes.c_void_p * 2)(*[ctypes.addressof(each) for each in inputs])
    result = (ctypes.c_void_p * 1)(ctypes.addressof(out))
    call(
        "dnnl_graph_partition_compile", partition, compiled, ctypes.c_size_t(2), pointers, ctypes.c_size_t(1), result,
        engine,
    )  # fmt: skip
    call("dnnl_graph_compiled_partition_query_logical_tensor", compiled, ctypes.c_size_t(2), ctypes.byref(out))
    output = np.full(out.dims[: out.ndims], np.nan, np.float32)
    tensors = []
    for logical, array in zip([*inputs, out], [data, filter, output], strict=True):
        tensors.append(ctypes.c_void_p())
        memory = array.ctypes.data_as(ctypes.c_void_p)
        call("dnnl_graph_tensor_create", ctypes.byref(tensors[-1]), ctypes.byref(logical), engine, memory)
    given, written = (ctypes.c_void_p * 2)(*[t.value for t in tensors[:2]]), (ctypes.c_void_p * 1)(tensors[2].value)
    call(
        "dnnl_graph_compiled_partition_execute", compiled, stream, ctypes.c_size_t(2), given, ctypes.c_size_t(1),
        written,
    )  # fmt: skip
    call("dnnl_stream_wait", stream)
    return output


CASES = [
    # data extents, kernel, strides, dilations
    ((7,), (3,), (2,), (1,)),
    ((5,), (4,), (3,), (2,)),
    ((5,), (2,), (4,), (1,)),  # the kernel is shorter than the stride
    ((6, 5), (3, 4), (2, 3), (1, 1)),
    ((4, 5), (5, 2), (2, 1), (1, 3)),
    ((3, 4, 5), (3, 2, 4), (2, 2, 1), (1, 2, 1)),
]


@pytest.mark.parametrize("auto_pad", ["SAME_UPPER", "SAME_LOWER", "VALID", "None"])
@pytest.mark.parametrize(("extents", "kernel", "strides", "dilations"), CASES)
def test_conv_transpose(dnnl, extents, kernel, strides, dilations, auto_pad):
    rank, chance = len(extents), np.random.default_rng(0)
    formats = itertools.product(["NXC", "NCX"], ["XOI", "IOX"], [1, 2], [0, 1])
    computed = 0
    for data_format, filter_format, groups, more in formats:
        channels, out_channels = 2 * groups, 3
        data_shape = (2, channels, *extents) if data_format == "NCX" else (2, *extents, channels)
        filter_shape = (channels, out_channels, *kernel)
        if filter_format == "XOI":
            filter_shape = (*kernel, out_channels, channels)
        pads = (1,) * rank if auto_pad == "None" else (0,) * rank
        extra = tuple(min(more, s - 1) for s in strides)
        named = {
            "strides": strides, "dilations": dilations, "pads_begin": pads, "pads_end": pads, "output_padding": extra,
            "auto_pad": auto_pad, "data_format": data_format,
        }  # fmt: skip
        data = chance.random(data_shape, np.float32)
        filter = chance.random(filter_shape, np.float32)
        problem = td.from_onednn(data_shape, filter_shape, groups=groups, filter_format=filter_format, **named)
        try:
            output = conv_transpose(dnnl, data, filter, groups=groups, weights_format=filter_format, **named)
        except Refused:
            continue
        computed += 1
        assert output.shape == problem.output_shape, problem.key
        np.testing.assert_allclose(output, td.reference(problem, data, filter), rtol=1e-5, atol=1e-5)
    assert computed >= 8
