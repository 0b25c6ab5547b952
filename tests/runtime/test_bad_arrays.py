"""Arrays that do not fit, each refused by name, value and rule before any kernel runs; and odd ones that do fit."""

import sys
import types

import ml_dtypes
import numpy as np
import pytest
from support import artifacts as made
from support.strategies import operands

import tvm_deconv as td
from tvm_deconv.runtime import loader
from tvm_deconv.targets import detect_host, get, supported

P = made.PLAIN
COPY = "pass a contiguous copy (numpy.ascontiguousarray, or contiguous() of a tensor)"


def bound(artifacts, name):
    problem = made.PROBLEMS[name]
    data, filter, bias = operands(problem)
    return td.load(artifacts).bind(problem, filter, bias), data


@pytest.fixture
def layer(artifacts):
    return bound(artifacts, "plain")[0]


@pytest.fixture
def data():
    return operands(P)[0]


@pytest.fixture
def output():
    return np.full(P.output_shape, np.nan, np.float32)


@pytest.fixture
def refuse(artifacts, layer, monkeypatch):
    """Calls `layer`, checks the whole text of the error, and that the kernel did not run."""
    artifact = loader.load(artifacts, layer.manifest)
    monkeypatch.setattr(artifact, "deconv", lambda *_: pytest.fail("the kernel ran"))

    def check(data, text, error=td.TensorError, out=None):
        with pytest.raises(error) as caught:
            layer(data, out)
        assert type(caught.value) is error
        assert str(caught.value) == text
        assert caught.value.argument == text.split("=")[0]

    return check


def at_offset(array, offset):
    """A copy of `array` that begins `offset` bytes after an address that is a multiple of 64."""
    memory = np.empty(array.nbytes + 128, np.uint8)
    start = -memory.ctypes.data % 64 + offset
    moved = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    moved[...] = array
    return moved


# ---- kind and dtype ----

DTYPES = "float32, float64, float16, int8, uint8, int32, bfloat16"


@pytest.mark.parametrize("value", [None, 1.0, [[1.0]], "data", np.float32(1), object()])
def test_no_array(refuse, value):
    rule = "must be a NumPy array or an array with DLPack (__dlpack__)"
    refuse(value, f"data={type(value).__qualname__!r}: {rule}", td.TensorTypeError)


@pytest.mark.parametrize("dtype", ["float64", "float16", "int8", "uint8", "int32", "bfloat16"])
def test_other_dtype(refuse, data, dtype):
    refuse(data.astype(dtype), f"data={dtype!r}: dtype must be float32", td.TensorTypeError)


@pytest.mark.parametrize("dtype", ["bool", "int64", "uint16", "complex64", "object", "longdouble", "U1", "M8[s]", "V4"])
def test_unknown_dtype(refuse, dtype):
    wrong = np.zeros(P.data_shape, dtype)
    refuse(wrong, f"data={wrong.dtype.name!r}: must be one of {DTYPES}", td.TensorTypeError)


def test_big_endian(refuse, data):
    other = ">f4" if sys.byteorder == "little" else "<f4"
    text = f"data={other!r}: must be in this machine's byte order; pass astype of newbyteorder('=')"
    refuse(data.astype(other), text, td.TensorTypeError)


def test_big_endian_bfloat16(refuse, data):
    other = np.dtype(ml_dtypes.bfloat16).newbyteorder()
    text = f"data={other.str!r}: must be in this machine's byte order; pass astype of newbyteorder('=')"
    refuse(data.astype(other), text, td.TensorTypeError)


def test_records(refuse, data):
    records = data.view([("value", "f4")])
    refuse(records, f"data='void32': must be one of {DTYPES}", td.TensorTypeError)


def test_masked(refuse, data):
    masked = np.ma.masked_less(data, 0)
    refuse(masked, "data='MaskedArray': must not be masked: the mask would be ignored", td.TensorTypeError)


# ---- shape and layout ----


@pytest.mark.parametrize("shape", [(2, 3, 4, 6), (1, 3, 4, 5), (2, 3, 4, 0), (2, 4, 5, 3)])
def test_shape(refuse, shape):
    refuse(np.zeros(shape, np.float32), f"data={shape}: shape must be (2, 3, 4, 5)")


@pytest.mark.parametrize("shape", [(), (120,), (2, 3, 20), (1, 2, 3, 4, 5)])
def test_rank(refuse, shape):
    refuse(np.zeros(shape, np.float32), f"data={shape}: rank must be 4, of shape (2, 3, 4, 5)")


@pytest.mark.parametrize(
    "strided",
    [
        np.zeros((2, 3, 4, 10), np.float32)[..., ::2],
        np.zeros((4, 3, 4, 5), np.float32)[::2],
        np.zeros((2, 3, 5, 4), np.float32).swapaxes(2, 3),
        np.zeros((2, 3, 4, 5), np.float32)[..., ::-1],
        np.broadcast_to(np.float32(0), (2, 3, 4, 5)),
        np.zeros((2, 3, 4, 5), np.float32, order="F"),
    ],
    ids=["step", "batch", "transposed", "reversed", "broadcast", "fortran"],
)
def test_strided(refuse, strided):
    rule = f"strides must be those of a C-contiguous array of shape (2, 3, 4, 5); {COPY}"
    refuse(strided, f"data={strided.strides}: {rule}")


@pytest.mark.parametrize("offset", [1, 2, 3, 61])
def test_misaligned(refuse, data, output, offset):
    moved = at_offset(data, offset)
    rule = "address must be a multiple of 4, the size of an element"
    refuse(moved, f"data={hex(moved.ctypes.data)!r}: {rule}")
    out = at_offset(output, offset)
    refuse(data, f"out={hex(out.ctypes.data)!r}: {rule}", out=out)


# ---- out ----


def test_out_read_only(refuse, data, output):
    output.flags.writeable = False
    refuse(data, "out='read-only': must be writable", out=output)


def test_out_is_no_array(refuse, data):
    text = "out='list': must be a NumPy array or an array with DLPack (__dlpack__)"
    refuse(data, text, td.TensorTypeError, out=[0.0])


def test_out_of_another_dtype(refuse, data, output):
    refuse(data, "out='float64': dtype must be float32", td.TensorTypeError, out=output.astype(np.float64))


def test_out_of_another_shape(refuse, data, output):
    refuse(data, "out=(2, 5, 7, 8): shape must be (2, 5, 7, 9)", out=output[..., :-1])
    refuse(data, "out=(630,): rank must be 4, of shape (2, 5, 7, 9)", out=output.ravel())


def test_out_strided(refuse, data):
    wide = np.zeros((2, 5, 7, 18), np.float32)[..., ::2]
    rule = f"strides must be those of a C-contiguous array of shape (2, 5, 7, 9); {COPY}"
    refuse(data, f"out={wide.strides}: {rule}", out=wide)


@pytest.mark.parametrize("start", [1000 - 629, 900, 1000, 1119])
def test_out_over_data(refuse, start):
    """Overlapping by as little as one element, on either side."""
    memory = np.zeros(4096, np.float32)
    source = memory[1000:1120].reshape(P.data_shape)
    output = memory[start : start + 630].reshape(P.output_shape)
    refuse(source, "out='overlapping': must not share memory with data, which is read while out is written", out=output)


def test_out_beside_data(artifacts, data):
    layer = bound(artifacts, "plain")[0]
    expected = layer(data)
    memory = np.full(4096, 77, np.float32)
    source = memory[1000:1120].reshape(P.data_shape)
    source[...] = data
    for start in (1120, 1000 - 630):
        output = memory[start : start + 630].reshape(P.output_shape)
        np.testing.assert_array_equal(layer(source, output), expected)
    assert (memory[: 1000 - 630] == 77).all()
    assert (memory[1120 + 630 :] == 77).all()


@pytest.mark.parametrize("name", ["filter", "bias"])
def test_out_over_filter_or_bias(artifacts, name):
    problem = made.PROBLEMS["bias"]
    memory = np.zeros(2000, np.float32)
    inputs = {"filter": problem.filter_shape, "bias": problem.bias_shape}
    arrays = {key: np.zeros(shape, np.float32) for key, shape in inputs.items()}
    arrays[name] = memory[: np.prod(inputs[name])].reshape(inputs[name])
    output = memory[:630].reshape(problem.output_shape)
    with pytest.raises(td.TensorError, match=f"out='overlapping': must not share memory with {name}"):
        td.load(artifacts).convolution_backprop_data(
            operands(problem)[0], arrays["filter"], (2, 2), None, (1, 1), (1, 1), bias=arrays["bias"], out=output
        )


# ---- at bind ----


@pytest.mark.parametrize(
    ("filter", "error", "text"),
    [
        (None, td.TensorTypeError, "filter='NoneType': must be a NumPy array or an array with DLPack"),
        (np.zeros(P.filter_shape), td.TensorTypeError, "filter='float64': dtype must be float32"),
        (np.zeros(P.filter_shape, ">f4"), td.TensorTypeError, "filter='>f4': must be in this machine's byte order"),
        (np.zeros(P.filter_shape, object), td.TensorTypeError, "filter='object': must be one of"),
        (np.zeros((5, 3, 3, 3), np.float32), td.TensorError, r"filter=\(5, 3, 3, 3\): shape must be \(3, 5, 3, 3\)"),
        (np.zeros((1, 3, 5, 3, 3), np.float32), td.TensorError, r"filter=\(1, 3, 5, 3, 3\): rank must be 4"),
    ],
)
def test_filter(artifacts, filter, error, text):
    with pytest.raises(error, match=text):
        td.load(artifacts).bind(P, filter)


@pytest.mark.parametrize(
    ("bias", "error", "text"),
    [
        (None, td.TensorError, r"bias=None: must be an array of shape \(5,\): the problem's epilogue has one"),
        ([0.0] * 5, td.TensorTypeError, "bias='list': must be a NumPy array"),
        (np.zeros(5), td.TensorTypeError, "bias='float64': dtype must be float32"),
        (np.zeros(4, np.float32), td.TensorError, r"bias=\(4,\): shape must be \(5,\)"),
        (np.zeros((5, 1), np.float32), td.TensorError, r"bias=\(5, 1\): rank must be 1"),
    ],
)
def test_bias(artifacts, bias, error, text):
    problem = made.PROBLEMS["bias"]
    with pytest.raises(error, match=text):
        td.load(artifacts).bind(problem, operands(problem)[1], bias)


def test_bias_of_another_dtype_names_both(artifacts):
    problem = made.PROBLEMS["float16"]
    with pytest.raises(td.TensorTypeError, match="bias='float64': dtype must be float32 or float16"):
        td.load(artifacts).bind(problem, operands(problem)[1], np.zeros(5))


def test_bias_where_there_is_none(artifacts):
    with pytest.raises(td.TensorError, match=r"bias=\(5,\): must be None: the problem's epilogue has none"):
        td.load(artifacts).bind(P, operands(P)[1], np.zeros(5, np.float32))


# ---- odd but right ----


def check_every_offset(directory, name):
    """Generated code may assume no more than the alignment of an element: where it does, this crashes."""
    layer, data = bound(directory, name)
    problem = made.PROBLEMS[name]
    _, filter, bias = operands(problem)
    expected = layer(data)
    for offset in range(data.itemsize, 64, data.itemsize):
        source = at_offset(data, offset)
        np.testing.assert_array_equal(layer(source), expected)
        result = at_offset(np.zeros_like(expected), expected.itemsize * (offset // data.itemsize) % 64)
        assert layer(source, result) is result
        np.testing.assert_array_equal(result, expected)
        moved = None if bias is None else at_offset(bias, bias.itemsize)
        again = td.load(directory).bind(problem, at_offset(filter, offset), moved)
        np.testing.assert_array_equal(again(data), expected)


@pytest.mark.parametrize(
    "name", ["plain", "bias", "grouped", "channels last", "float64", "float16", "bfloat16", "int8"]
)
def test_every_aligned_offset(artifacts, name):
    check_every_offset(artifacts, name)


@pytest.mark.skipif(get("x86-64-v4") not in supported(detect_host().features), reason="runs on AVX-512 only")
@pytest.mark.parametrize("name", ["bias", "channels last"])
def test_every_aligned_offset_with_wide_vectors(tmp_path, name):
    made.export(tmp_path, [made.PROBLEMS[name]], "x86-64-v4")
    check_every_offset(tmp_path, name)


@pytest.mark.parametrize("name", ["plain", "bfloat16"])
def test_read_only_input(artifacts, name):
    problem = made.PROBLEMS[name]
    arrays = operands(problem)
    expected = td.load(artifacts).bind(problem, *arrays[1:])(arrays[0])
    for array in arrays:
        if array is not None:
            array.flags.writeable = False
    layer = td.load(artifacts).bind(problem, *arrays[1:])
    np.testing.assert_array_equal(layer(arrays[0]), expected)


@pytest.mark.parametrize("order", ["reversed", "fortran", "misaligned"])
def test_filter_and_bias_of_any_layout(artifacts, order):
    problem = made.PROBLEMS["bias"]
    data, filter, bias = operands(problem)
    expected = td.load(artifacts).bind(problem, filter, bias)(data)
    if order == "reversed":
        filter, bias = filter[:, :, ::-1].copy()[:, :, ::-1], bias[::-1].copy()[::-1]
    elif order == "fortran":
        filter = np.asfortranarray(filter)
    else:
        filter, bias = at_offset(filter, 1), at_offset(bias, 3)
    np.testing.assert_array_equal(td.load(artifacts).bind(problem, filter, bias)(data), expected)


def test_pack_is_given_compact_aligned_memory(artifacts, monkeypatch):
    """Whatever the layout of the filter; x86 forgives most of what this asks."""
    library = td.load(artifacts)
    artifact = loader.load(library.root, library.select(P)[0].manifest)
    honest = artifact.pack
    filter = operands(P)[1]
    seen = []

    def pack(given, packed):
        seen.append(given.flags.c_contiguous and given.flags.aligned)
        honest(given, packed)

    monkeypatch.setattr(artifact, "pack", pack)
    for array in (filter, at_offset(filter, 1), np.asfortranarray(filter)):
        library.bind(P, array)
    assert seen == [True, True, True]


def test_axes_of_one_element_with_strange_strides(artifacts):
    """NumPy calls such an array contiguous whatever the stride, and so do we."""
    problem = made.PROBLEMS["grouped"]
    layer, data = bound(artifacts, "grouped")
    assert problem.batch == 1
    strange = np.repeat(data, 2, axis=0)[::2]
    assert strange.flags.c_contiguous
    assert strange.strides != data.strides
    np.testing.assert_array_equal(layer(strange), layer(data))
    result = np.repeat(np.zeros_like(layer(data)), 2, axis=0)[::2]
    np.testing.assert_array_equal(layer(data, result), layer(data))


def test_subclass_of_an_array(artifacts, data, tmp_path):
    layer = bound(artifacts, "plain")[0]
    mapped = np.memmap(tmp_path / "data", np.float32, "w+", shape=P.data_shape)
    mapped[...] = data
    result = layer(mapped)
    assert type(result) is np.ndarray
    np.testing.assert_array_equal(result, layer(data))


def test_equal_dtype_that_is_another_object(artifacts, data):
    layer = bound(artifacts, "plain")[0]
    other = data.view(np.dtype(np.float32, metadata={"unit": "V"}))
    assert other.dtype is not data.dtype
    np.testing.assert_array_equal(layer(other), layer(data))


# ---- torch, jax and others ----


class Foreign:
    """An array of a package of ours, which has from_dlpack and nothing else."""

    def __init__(self, array, device=(1, 0)):
        self.array, self.device = array, device

    def __dlpack__(self, **keywords):
        return self.array.__dlpack__(**keywords)

    def __dlpack_device__(self):
        return self.device


@pytest.fixture
def package(monkeypatch):
    module = types.ModuleType("foreign_arrays")
    module.from_dlpack = Foreign
    monkeypatch.setitem(sys.modules, "foreign_arrays", module)
    monkeypatch.setattr(Foreign, "__module__", "foreign_arrays.core")
    return module


@pytest.mark.usefixtures("package")
def test_any_package_with_from_dlpack(artifacts, data):
    layer = bound(artifacts, "plain")[0]
    result = layer(Foreign(data))
    assert type(result) is Foreign
    np.testing.assert_array_equal(result.array, layer(data))


@pytest.mark.usefixtures("package")
def test_derived_class_of_a_package(artifacts, data):
    class Derived(Foreign):
        pass

    layer = bound(artifacts, "plain")[0]
    assert type(layer(Derived(data))) is Foreign


def test_package_that_cannot_hold_a_result(refuse, data):
    text = "data='Foreign': must be of a package that has from_dlpack, torch or jax: no other can hold the result"
    refuse(Foreign(data), text, td.TensorTypeError)


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("device", [(2, 0), (8, 1)])
def test_not_on_the_cpu(refuse, data, device):
    refuse(Foreign(data, device), f"data={device}: must be in the memory of the CPU; this is its DLPack device")


@pytest.mark.usefixtures("package")
def test_export_that_fails(refuse):
    text = "data='Foreign': must be readable as a NumPy array: 'str' object has no attribute '__dlpack__'"
    refuse(Foreign("nothing"), text, td.TensorTypeError)


@pytest.mark.usefixtures("package")
def test_requires_grad(refuse, data):
    tensor = Foreign(data)
    tensor.requires_grad = True
    refuse(tensor, "data='requires_grad': must not require gradients, which stop here; pass detach() of it")


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


@pytest.mark.parametrize("name", ["plain", "bias", "float64", "float16", "bfloat16", "int8"])
def test_torch(artifacts, torch, name):
    problem = made.PROBLEMS[name]
    arrays = operands(problem)
    expected = td.load(artifacts).bind(problem, *arrays[1:])(arrays[0])

    def tensor(array):
        if array is None:
            return None
        if array.dtype == ml_dtypes.bfloat16:
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(array)

    data, filter, bias = map(tensor, arrays)
    layer = td.load(artifacts).bind(problem, filter, bias)
    result = layer(data)
    assert type(result) is torch.Tensor
    assert torch.equal(result, tensor(expected))
    assert result.dtype == tensor(expected).dtype
    out = torch.zeros_like(result)
    assert layer(data, out) is out
    assert torch.equal(out, result)
    np.testing.assert_array_equal(layer(arrays[0], out=out.zero_()).to(torch.float64), expected.astype(np.float64))
    if filter.ndim == 4:
        called = td.load(artifacts).convolution_backprop_data(data, filter, (2, 2), None, (1, 1), (1, 1), bias=bias)
        assert torch.equal(called, result)


def test_torch_parameter(refuse, artifacts, torch, data):
    text = "data='requires_grad': must not require gradients, which stop here; pass detach() of it"
    refuse(torch.nn.Parameter(torch.from_numpy(data)), text)
    with pytest.raises(td.TensorError, match="filter='requires_grad'"):
        td.load(artifacts).bind(P, torch.zeros(P.filter_shape, requires_grad=True))


def test_torch_parameter_without_gradients(layer, torch, data):
    assert isinstance(layer(torch.nn.Parameter(torch.from_numpy(data), requires_grad=False)), torch.Tensor)


def test_torch_dtype(refuse, torch, data):
    tensor = torch.from_numpy(data).to(torch.int64)
    refuse(tensor, f"data='int64': must be one of {DTYPES}", td.TensorTypeError)


def test_torch_elsewhere(layer, torch):
    with pytest.raises(td.TensorError, match=r"^data="):
        layer(torch.zeros(P.data_shape, device="meta"))


def test_torch_strided(refuse, torch, data):
    tensor = torch.from_numpy(data).transpose(2, 3).contiguous().transpose(2, 3)
    rule = f"strides must be those of a C-contiguous array of shape (2, 3, 4, 5); {COPY}"
    refuse(tensor, f"data=(240, 80, 4, 16): {rule}")


def test_torch_out_counts_as_written(artifacts, torch, data):
    """Else neither autograd nor what was packed from `out` would notice."""
    layer = bound(artifacts, "plain")[0]
    out = torch.empty(P.output_shape)
    x = torch.ones(P.output_shape, requires_grad=True)
    y = (x * out).sum()
    version = out._version
    assert layer(torch.from_numpy(data), out) is out
    assert out._version == version + 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()
    with torch.inference_mode():
        out = torch.empty(P.output_shape)
        assert layer(torch.from_numpy(data), out) is out


def test_torch_compile_leaves_a_disabled_layer_alone(artifacts, torch, data):
    layer = bound(artifacts, "plain")[0]
    x, disabled = torch.from_numpy(data), torch.compiler.disable(layer)
    compiled = torch.compile(lambda x: disabled(2 * x) + 1, backend="eager")
    assert torch.equal(compiled(x), layer(2 * x) + 1)


def test_torch_out_over_data(refuse, torch):
    memory = torch.zeros(1000)
    data, out = memory[:120].view(P.data_shape), memory[100:730].view(P.output_shape)
    refuse(data, "out='overlapping': must not share memory with data, which is read while out is written", out=out)


def test_jax(artifacts):
    pytest.importorskip("jax.numpy")
    import jax

    for name in ("plain", "float16", "bfloat16", "int8"):
        problem = made.PROBLEMS[name]
        arrays = operands(problem)
        expected = td.load(artifacts).bind(problem, *arrays[1:])(arrays[0])
        data, filter, bias = (None if array is None else jax.numpy.asarray(array) for array in arrays)
        layer = td.load(artifacts).bind(problem, filter, bias)
        result = layer(data)
        assert isinstance(result, jax.Array)
        assert result.dtype == expected.dtype
        np.testing.assert_array_equal(np.asarray(result), expected)
        with pytest.raises(td.TensorError, match="out='read-only': must be writable"):
            layer(data, out=result)


def test_jax_traced(artifacts, data):
    jax = pytest.importorskip("jax")
    layer = bound(artifacts, "plain")[0]
    with pytest.raises(td.TensorTypeError, match=r"data='DynamicJaxprTracer': .* call its tvm_deconv.jax.function"):
        jax.jit(layer)(data)


def test_tvm_ffi_tensor(artifacts, data):
    tvm_ffi = pytest.importorskip("tvm_ffi")
    layer = bound(artifacts, "plain")[0]
    result = layer(tvm_ffi.from_dlpack(data))
    assert isinstance(result, tvm_ffi.Tensor)
    np.testing.assert_array_equal(np.from_dlpack(result), layer(data))
