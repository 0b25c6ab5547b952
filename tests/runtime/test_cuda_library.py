"""The library with arrays on a CUDA device: on the shim, where the device's memory is the CPU's, and without one."""

import contextlib
import ctypes
import sys
import types
import weakref

import numpy as np
import pytest
from support.artifacts import PROBLEMS as HOST_PROBLEMS
from support.artifacts import describe, manifest
from support.cuda_kernels import OnDevice, build_kernel, compile_driver, compile_for_cpu
from support.strategies import operands
from support.tolerances import assert_close

import tvm_deconv as td
from tvm_deconv import cache, targets
from tvm_deconv.artifact import needs
from tvm_deconv.artifact.manifest import stem
from tvm_deconv.artifact.select import Accepted, Rejected, select
from tvm_deconv.compiler.backends.cuda import translation_unit
from tvm_deconv.errors import CompilerNotFound, DeviceError, NoArtifactError, ProblemError, TensorError, TensorTypeError
from tvm_deconv.problem import testing
from tvm_deconv.problem.reference import reference
from tvm_deconv.runtime import cuda, library, loader
from tvm_deconv.runtime.process import PROCESS
from tvm_deconv.targets import CUDA_TARGETS, Host, Place

PLAIN = td.Problem(2, 1, 3, 9, (4, 5), (3, 3), (2, 2), (1, 1), (1, 1), (7, 9), epilogue=td.Epilogue(bias=True))
SPLIT = td.Problem(1, 1, 1030, 3, (2, 3), (3, 3), (2, 2), (1, 1), (1, 1), (4, 5), filter_format="XIO")
ALIGNED = td.Problem(1, 1, 16, 8, (3, 4), (2, 2), (2, 2), (1, 1), (0, 0), (6, 8), "float16", "NXC")
QUANTIZED = ALIGNED.replace(
    dtype="uint8", quantization=td.Quantization("uint8", "int8"), epilogue=td.Epilogue(True, "relu")
)
PROBLEMS = (PLAIN, SPLIT, ALIGNED)


def entry(directory, problem, target, content):
    """An artifact with this content as its library."""
    kernel, name = build_kernel(problem), stem(problem.artifact_key, target)
    made = {field: getattr(kernel, field) for field in ("algorithm", "knobs", "packed_dtype")}
    made |= {"packed_shape": (kernel.packed_elements,), "scratch_bytes": kernel.workspace_bytes}
    made |= describe(directory, name, content) | {"versions": {"nvcc": "13.5"}, "needs": dict(needs.here())}
    there = manifest(problem, target, **made)
    (directory / f"{name}.json").write_text(there.to_json())
    return there


@pytest.fixture(scope="session")
def shims(tmp_path_factory):
    """A directory of artifacts for CUDA that are the shim's."""
    directory = tmp_path_factory.mktemp("shims")
    scratch = tmp_path_factory.mktemp("scratch")
    for number, problem in enumerate((*PROBLEMS, QUANTIZED)):
        kernel = build_kernel(problem)
        compile_for_cpu(translation_unit(kernel.functions), scratch, f"a{number}")
        entry(directory, problem, "cuda-sm_90", (scratch / f"a{number}.so").read_bytes())
    return directory


class Array(OnDevice):
    """What the package under test makes: NumPy memory that says it is device 0's."""

    device = 0

    @property
    def shape(self):
        return self.array.shape

    @property
    def dtype(self):
        return self.array.dtype

    @property
    def nbytes(self):
        return self.array.nbytes

    @property
    def flags(self):
        return self.array.flags

    @property
    def data(self):
        return types.SimpleNamespace(ptr=self.array.ctypes.data)

    def __dlpack_device__(self):
        return 2, self.device

    def __dlpack__(self, stream=None, **_):
        assert stream == -1, "the consumer runs on the producer's stream: nothing is to wait"
        return super().__dlpack__()

    def view(self, dtype):
        return Array(self.array.view(dtype))

    def set(self, values):
        self.array[...] = values

    def astype(self, dtype, order, copy):
        return Array(self.array.astype(dtype, order=order, copy=copy))

    def transpose(self, *axes):
        return Array(self.array.transpose(*axes))

    def reshape(self, *shape):
        return Array(self.array.reshape(*shape))


Array.__module__ = "cupy"


class _Stream:
    """CuPy's stream; what it is asked for goes to a list that it has in common with others."""

    def __init__(self, ptr, told):
        self.ptr, self.told, self.captures = ptr, told, False

    def record(self):
        self.told.append(f"{self.ptr} records")
        return self.ptr

    def wait_event(self, event):
        self.told.append(f"{self.ptr} waits for {event}")

    def is_capturing(self):
        return self.captures


class _Device:
    def __init__(self, number):
        assert number == 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


@pytest.fixture
def device(monkeypatch):
    """A device of capability 9.0 and a package "cupy" for it; the stream that is current, what streams were told."""
    made = types.SimpleNamespace(told=[])
    made.current = _Stream(4321, made.told)
    pool = []  # what is freed stays: graphs use it

    def empty(shape, dtype):
        poison = np.full(int(np.prod(shape)) + 16, np.nan if np.dtype(dtype).kind == "f" else 113, dtype)
        pool.append(poison)
        start = -poison.ctypes.data % 16 // poison.itemsize
        return Array(poison[start : start + int(np.prod(shape))].reshape(shape))

    module = types.ModuleType("cupy")
    module.empty = empty
    module.ascontiguousarray = lambda given: Array(np.ascontiguousarray(given.array))
    module.asnumpy = lambda given: given.array.copy()
    module.cuda = types.SimpleNamespace(Device=_Device, get_current_stream=lambda: made.current)
    made.empty = empty
    monkeypatch.setitem(sys.modules, "cupy", module)
    monkeypatch.setattr(library, "cuda_capability", lambda _: (9, 0))
    return made


@pytest.fixture(scope="session")
def driver():
    """The driver whose streams capture; artifacts of the shim find it from here on."""
    library = ctypes.CDLL(str(compile_driver()))
    library.cuGraphLaunch.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
    return library


def on_device(device, array):
    made = device.empty(array.shape, array.dtype)
    made.array[...] = array
    return made


@pytest.mark.parametrize("problem", PROBLEMS, ids=["plain", "split", "aligned"])
def test_layers_compute_on_the_device(problem, shims, device):
    data, weights, bias = operands(problem, 1)
    layer = td.load(shims).bind(problem, on_device(device, weights), None if bias is None else on_device(device, bias))
    given = on_device(device, data)
    result = layer(given)
    assert type(result) is Array
    assert_close(result.array, reference(problem, data, weights, bias), problem.dtype)
    out = device.empty(problem.output_shape, problem.output_dtype)
    assert layer(given, out) is out
    assert out.array.tobytes() == result.array.tobytes()
    assert "cuda-sm_90" in repr(layer)


@pytest.mark.parametrize("problem", PROBLEMS, ids=["plain", "split", "aligned"])
def test_the_first_call_may_be_captured(problem, shims, device, driver):
    """All kernels are loaded at bind, those for arrays at odd addresses too: a capture does not permit it."""
    data, weights, bias = operands(problem, 1)
    driver.shim_unload()
    layer = td.load(shims).bind(problem, on_device(device, weights), None if bias is None else on_device(device, bias))
    stream, graph = ctypes.c_void_p(), ctypes.c_void_p()
    assert driver.cuStreamCreate(ctypes.byref(stream), 0) == 0
    given = on_device(device, data)
    odd = Array(device.empty((data.size + 1,), data.dtype).array[1:].reshape(data.shape))
    odd.array[...] = data
    out = [device.empty(problem.output_shape, problem.output_dtype) for _ in range(2)]
    device.current = _Stream(stream.value, [])
    device.current.captures = True
    assert driver.cuStreamBeginCapture_v2(stream, 0) == 0
    try:
        layer(given, out[0])
        layer(odd, out[1])
    finally:
        assert driver.cuStreamEndCapture(stream, ctypes.byref(graph)) == 0
    assert driver.cuGraphLaunch(graph, stream) == 0
    for result in out:
        assert_close(result.array, reference(problem, data, weights, bias), problem.dtype)


def test_calls_on_other_streams_wait_for_the_filter(shims, device, monkeypatch):
    """And the memory of filter and bias is not given back before these calls have ended."""
    data, weights, bias = operands(PLAIN, 1)
    told, opened = device.told, td.load(shims)
    given, weights, bias = (on_device(device, array) for array in (data, weights, bias))
    artifact = loader.load(shims, opened.bind(PLAIN, weights, bias).manifest)
    for name in ("pack", "deconv"):
        function = getattr(artifact, name)
        monkeypatch.setattr(
            artifact, name, lambda *a, f=function, n=name: (told.append(f"{device.current.ptr} {n}"), f(*a))
        )
    made, converted = device.empty, Array.astype

    def noted(array, name):
        weakref.finalize(array, told.append, f"{name} is freed")
        return array

    module = sys.modules["cupy"]
    packed = artifact.packed[0]
    monkeypatch.setattr(
        module,
        "empty",
        lambda shape, dtype: noted(made(shape, dtype), "filter") if shape == packed else made(shape, dtype),
    )
    monkeypatch.setattr(Array, "astype", lambda *args, **kwargs: noted(converted(*args, **kwargs), "bias"))
    second, capturing = _Stream(7, told), _Stream(8, told)
    capturing.captures = True
    told.clear()
    layer = opened.bind(PLAIN, weights, bias)
    assert told == ["4321 pack", "4321 records", "4321 records"]  # for the filter, for the bias
    told.clear()
    layer(given)
    assert told == ["4321 deconv"]
    device.current = second
    layer(given)
    # Nothing from outside of a capture may be waited for.
    device.current = capturing
    layer(given)
    assert told[1:] == ["7 waits for 4321", "7 waits for 4321", "7 deconv", "8 deconv"]
    told.clear()
    del layer
    assert sorted([told[:3], told[3:]]) == [
        ["7 records", "4321 waits for 7", "bias is freed"],
        ["7 records", "4321 waits for 7", "filter is freed"],
    ]


class _TorchOnDevice:
    """The part of torch that knows streams, and a tensor of it without the C functions of DLPack."""

    dtype, bfloat16 = "float32", "bfloat16"

    def __init__(self):
        self.told, self.capturing = [], False
        self.current = self.ExternalStream(1, 0)
        self.cuda = self

    def ExternalStream(self, ptr, device):
        assert device == 0

        def waits(event):
            self.told.append(f"{ptr} waits for {event}")

        return types.SimpleNamespace(cuda_stream=ptr, record_event=lambda: f"an event of {ptr}", wait_event=waits)

    def current_stream(self, device):
        assert device == 0
        return self.current

    def stream(self, _):
        return contextlib.nullcontext()

    def is_current_stream_capturing(self):
        return self.capturing

    def record_stream(self, stream):
        self.told.append(f"memory is kept for {stream.cuda_stream}")

    def __dlpack__(self, stream=None):
        return f"capsule for stream {stream}"


def test_torch_is_told_of_other_streams(monkeypatch):
    torch = _TorchOnDevice()
    monkeypatch.setitem(sys.modules, "torch", torch)
    framework = cuda.FRAMEWORKS["torch"]()
    shared = framework.shared(torch, 0)
    assert shared.read_on(1) is torch
    assert not torch.told
    for stream in (2, 3):
        torch.current = torch.ExternalStream(2, 0)
        torch.told.clear()
        assert shared.read_on(stream) is torch
        assert torch.told == [f"{stream} waits for an event of 1", f"memory is kept for {stream}"]
    torch.capturing = True
    torch.told.clear()
    shared.read_on(2)
    assert not torch.told


def test_no_array_has_the_legacy_stream_wait(monkeypatch):
    """By DLPack alone, -1 asks for that; with its functions in C, tvm_ffi asks for it by itself."""
    tensor = _TorchOnDevice()
    monkeypatch.setitem(sys.modules, "torch", tensor)
    framework = cuda.FRAMEWORKS["torch"]()
    assert framework.plain(tensor).__dlpack__(max_version=(1, 0)) == "capsule for stream -1"
    tensor.__dlpack_c_exchange_api__ = "C"
    assert framework.plain(tensor) is tensor


@pytest.mark.parametrize("kind", ["host", "device", "device by the reference"])
def test_a_layer_is_the_same_for_every_memory(kind, shims, artifacts, device, tmp_path):
    """All its public names serve, on the CPU and on a device."""
    problem = HOST_PROBLEMS["bias"] if kind == "host" else PLAIN
    data, weights, bias = operands(problem, 8)
    if kind == "host":
        opened = td.load(artifacts)
    else:
        opened = td.load(shims) if kind == "device" else td.load(tmp_path, fallback="reference")
        data, weights, bias = (on_device(device, array) for array in (data, weights, bias))
    layer = opened.bind(problem, weights, bias)
    assert type(layer) is td.Layer
    assert {name for name in dir(layer) if not name.startswith("_")} == {"problem", "manifest"}
    assert layer.problem == problem
    assert layer.manifest is None if "reference" in kind else layer.manifest in opened.manifests
    name = stem(problem.artifact_key, "reference") if layer.manifest is None else layer.manifest.name
    assert repr(layer) == f"<Layer {problem.key} by {name}>"
    result = layer(data)
    assert type(result) is type(data)
    out = np.empty_like(result) if kind == "host" else device.empty(problem.output_shape, problem.output_dtype)
    assert layer(data, out=out) is out
    if kind == "host":
        assert layer(data, threads=1).tobytes() == out.tobytes() == result.tobytes()
    else:
        assert out.array.tobytes() == result.array.tobytes()
        with pytest.raises(ProblemError, match="threads=1: must be None: a device computes"):
            layer(data, threads=1)


def test_the_operator_functions_take_arrays_of_a_device(shims, device):
    data, weights, bias = operands(PLAIN, 2)
    found = td.load(shims).convolution_backprop_data(
        on_device(device, data),
        on_device(device, weights),
        (2, 2),
        pads_begin=(1, 1),
        pads_end=(1, 1),
        bias=on_device(device, bias),
    )
    assert_close(found.array, reference(PLAIN, data, weights, bias))


def test_arrays_of_the_other_kind_are_refused(shims, device, tmp_path):
    data, weights, bias = operands(PLAIN, 3)
    opened = td.load(shims)
    with pytest.raises(NoArtifactError, match=r"runs on CUDA devices .*9\.0 and later 9\.x.* in CPU memory"):
        opened.bind(PLAIN, weights, bias)
    given = [on_device(device, array) for array in (weights, bias)]
    layer = opened.bind(PLAIN, *given)
    with pytest.raises(TensorTypeError, match="data='list': must be an array with DLPack"):
        layer([1.0])
    with pytest.raises(TensorError, match="must be in the memory of a CUDA device, where the filter is"):
        layer(data)
    with pytest.raises(TensorError, match="must be in the memory of a CUDA device"):
        opened.bind(PLAIN, given[0], bias)
    entry(tmp_path, PLAIN, "x86-64-v3", b"x")
    with pytest.raises(NoArtifactError, match=r"runs on the CPU; these arrays are in the memory of a CUDA device"):
        td.load(tmp_path).bind(PLAIN, *given)


def test_what_does_not_fit_is_refused(shims, device):
    data, weights, bias = operands(PLAIN, 4)
    opened = td.load(shims)
    layer = opened.bind(PLAIN, on_device(device, weights), on_device(device, bias))
    good = on_device(device, data)
    with pytest.raises(TensorError, match=r"shape must be \(2, 3, 4, 5\)"):
        layer(on_device(device, data[:1]))
    with pytest.raises(TensorTypeError, match="dtype must be float32"):
        layer(on_device(device, data.astype(np.float64)))
    with pytest.raises(TensorError, match="C-contiguous"):
        layer(Array(np.asfortranarray(data)))
    whole = device.empty((PLAIN.batch * 9 * 63,), "float32").array
    shared = Array(whole[: data.size].reshape(data.shape))
    with pytest.raises(TensorError, match="must not share memory with data"):
        layer(shared, Array(whole[: np.prod(PLAIN.output_shape)].reshape(PLAIN.output_shape)))
    other = on_device(device, data)
    other.device = 1
    with pytest.raises(TensorError, match="must be on cuda:0, where the filter is"):
        layer(other)
    with pytest.raises(ProblemError, match="threads"):
        layer(good, threads=2)
    with pytest.raises(ProblemError, match="host=1: must be 0"):
        layer(good, host=1)
    with pytest.raises(ProblemError, match="workspace"):
        opened.bind(PLAIN, on_device(device, weights), on_device(device, bias), workspace=1)
    with pytest.raises(TensorError, match="bias"):
        opened.bind(PLAIN, on_device(device, weights))


def test_arrays_may_begin_at_any_element(shims, device):
    data, weights, _ = operands(ALIGNED, 4)
    layer = td.load(shims).bind(ALIGNED, on_device(device, weights))

    def beginning(offset, array):
        whole = np.empty(array.nbytes + 32, np.uint8)
        first = -whole.ctypes.data % 16 + offset
        view = whole[first : first + array.nbytes].view(array.dtype).reshape(array.shape)
        view[...] = array
        return Array(view)

    wanted = layer(beginning(0, data))
    empty = np.empty(ALIGNED.output_shape, np.float16)
    for offset in (2, 6, 8):
        out = layer(beginning(offset, data), beginning(offset, empty))
        assert out.array.tobytes() == wanted.array.tobytes()
    with pytest.raises(TensorError, match="address must be a multiple of 2, the size of an element"):
        layer(beginning(1, data))


@pytest.mark.parametrize("fallback", [None, "reference"])
def test_quantized_layers_take_their_numbers(fallback, shims, tmp_path, device):
    arrays = testing.operands(QUANTIZED, 3)
    weights, bias = on_device(device, arrays.filter), on_device(device, arrays.bias)
    opened = td.load(tmp_path, fallback=fallback) if fallback else td.load(shims)
    layer = opened.bind(QUANTIZED, weights, bias, scaling=arrays.scaling)
    assert (layer.manifest is None) == bool(fallback)
    np.testing.assert_array_equal(layer(on_device(device, arrays.data)).array, td.reference(QUANTIZED, *arrays))
    with pytest.raises(td.ProblemError, match="must be a Scaling: the problem is quantized"):
        opened.bind(QUANTIZED, weights, bias)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_reference_computes_for_a_device(dtype, tmp_path, device):
    """Without any artifact: through the memory of the CPU and back, in the caller's package."""
    problem = PLAIN.replace(dtype=dtype)
    data, weights, bias = operands(problem, 6)
    layer = td.load(tmp_path, fallback="reference").bind(problem, on_device(device, weights), on_device(device, bias))
    given = on_device(device, data)
    result = layer(given)
    assert type(result) is Array
    assert layer.manifest is None
    assert_close(result.array, reference(problem, data, weights, bias), dtype)
    out = device.empty(problem.output_shape, problem.output_dtype)
    assert layer(given, out) is out
    assert out.array.tobytes() == result.array.tobytes()


def test_a_call_without_outputs_returns_an_array_of_the_device(tmp_path, device):
    problem = PLAIN.replace(batch=0)
    data, weights, bias = operands(problem, 6)
    layer = td.load(tmp_path, fallback="reference").bind(problem, on_device(device, weights), on_device(device, bias))
    given, out = on_device(device, data), device.empty(problem.output_shape, problem.output_dtype)
    assert layer(given, out) is out
    result = layer(given)
    assert type(result) is Array
    assert result.array.shape == problem.output_shape


def test_a_build_for_a_device(shims, tmp_path, monkeypatch, device):
    """Into the user's cache, for the capability of the device that the filter is on; or why not, and what follows."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(PROCESS, "artifacts", {})
    (made,) = (
        manifest
        for manifest in td.load(shims).manifests
        if manifest.parsed.dtype == "float32" and manifest.parsed.epilogue.bias
    )
    empty = tmp_path / "empty"
    empty.mkdir()
    targets = []

    def build(problem, target, directory):
        targets.append(target.name)
        entry(directory, problem, target.name, (shims / made.library).read_bytes())

    monkeypatch.setattr(cache, "build", build)
    data, weights, bias = operands(PLAIN, 7)
    operands_there = on_device(device, weights), on_device(device, bias)
    for _ in range(2):
        layer = td.load(empty, fallback=["compile", "reference"]).bind(PLAIN, *operands_there)
        found = layer(on_device(device, data))
        assert_close(found.array, reference(PLAIN, data, weights, bias))
        assert layer.manifest.target == "cuda-sm_90a"
    assert targets == ["cuda-sm_90a"]

    def fails(*_):
        raise CompilerNotFound("nvcc", "nvcc", "was not found")

    monkeypatch.setattr(cache, "build", fails)
    other, (_, weights, bias) = PLAIN.replace(batch=1), operands(PLAIN.replace(batch=1))
    operands_there = on_device(device, weights), on_device(device, bias)
    with pytest.raises(NoArtifactError, match="fallback compile: rejected: nvcc='nvcc': was not found"):
        td.load(empty, fallback="compile").bind(other, *operands_there)
    assert td.load(empty, fallback=["compile", "reference"]).bind(other, *operands_there).manifest is None


def test_the_target_for_a_device():
    wanted = {(8, 0): "cuda-sm_80", (8, 7): "cuda-sm_86", (9, 0): "cuda-sm_90a", (10, 3): "cuda-sm_100"}
    wanted[11, 0] = "cuda"
    assert {capability: targets.cuda_target(capability).name for capability in wanted} == wanted
    with pytest.raises(ProblemError, match=r"target='7.5': must be a device of compute capability 8.0 or later"):
        targets.cuda_target((7, 5))


def test_failures_of_the_device_are_typed(shims, device, monkeypatch):
    _, weights, bias = operands(PLAIN, 5)
    layer = td.load(shims).bind(PLAIN, on_device(device, weights), on_device(device, bias))

    def fails(*_):
        raise RuntimeError("CUDA Runtime Error: cudaErrorInsufficientDriver (35)")

    monkeypatch.setattr(loader.load(shims, layer.manifest), "deconv", fails)
    with pytest.raises(DeviceError, match=r"device='cuda:0': failed: .*InsufficientDriver"):
        layer(on_device(device, operands(PLAIN, 5)[0]))


def test_ptx_that_is_too_new_for_the_driver(shims, device, monkeypatch):
    _, *there = (on_device(device, array) for array in operands(PLAIN, 5))
    artifact = loader.load(shims, td.load(shims).bind(PLAIN, *there).manifest)

    def fails(error):
        def load(_):
            raise RuntimeError(f"CUDA Runtime Error: {error}")

        monkeypatch.setattr(artifact, "load", load)

    fails("cudaErrorUnsupportedPtxVersion (222): the provided PTX was compiled with an unsupported toolchain.")
    with pytest.raises(DeviceError) as caught:
        td.load(shims).bind(PLAIN, *there)
    assert str(caught.value).startswith(
        f"device='cuda:0': has no machine code in {artifact.name}, and the driver is too old for the PTX of nvcc 13.5: "
        "compile for the device's own target, or with an nvcc of the driver's CUDA version: failed: CUDA Runtime Error"
    )
    fails("cudaErrorNoDevice (100)")
    with pytest.raises(DeviceError, match=r"device='cuda:0': failed: .*NoDevice"):
        td.load(shims).bind(PLAIN, *there)


def test_an_array_of_another_package_brings_no_stream(monkeypatch):
    """By DLPack alone tvm_ffi does not look at the current stream of its package."""
    tensor = _TorchOnDevice()
    tensor.__dlpack_c_exchange_api__ = "C"
    monkeypatch.setitem(sys.modules, "torch", tensor)
    monkeypatch.setitem(sys.modules, "cupy", tensor)
    theirs, other = (cuda.FRAMEWORKS[name]() for name in ("torch", "cupy"))
    assert cuda._taken(cuda._Operand(tensor, theirs), theirs) is tensor
    assert cuda._taken(cuda._Operand(tensor, theirs), other).__dlpack__() == "capsule for stream -1"


def test_without_a_driver_the_error_says_so(shims, monkeypatch, device):
    monkeypatch.setattr(library, "cuda_capability", targets.cuda_capability)
    monkeypatch.setattr(targets.cuda, "DRIVER", "libcuda-that-is-not-there.so.1")
    targets.cuda_capability.cache_clear()
    weights = on_device(device, operands(PLAIN)[1])
    with pytest.raises(DeviceError, match="needs NVIDIA's driver: libcuda-that-is-not-there"):
        td.load(shims).bind(PLAIN, weights, weights)
    targets.cuda_capability.cache_clear()


def test_the_driver_is_asked_for_the_capability(monkeypatch):
    class Driver:
        def cuInit(self, flags):
            return flags

        def cuDeviceGet(self, _, number):
            return 0 if number == 0 else 101

        def cuDeviceGetAttribute(self, value, attribute, _):
            value._obj.value = {75: 9, 76: 0}[attribute]
            return 0

    monkeypatch.setattr(ctypes, "CDLL", lambda _: Driver())
    targets.cuda_capability.cache_clear()
    assert targets.cuda_capability(0) == (9, 0)
    with pytest.raises(DeviceError, match="cuDeviceGet says 101"):
        targets.cuda_capability(1)
    targets.cuda_capability.cache_clear()


def test_selection_by_capability(tmp_path):
    names = "cuda", "cuda-sm_80", "cuda-sm_86", "cuda-sm_90", "cuda-sm_90a"
    made = [entry(tmp_path, PLAIN, name, b"x") for name in names]

    def accepted(capability):
        decisions = select(PLAIN, made, Place(Host(frozenset()), capability=capability))
        return [decision.manifest.target for decision in decisions if isinstance(decision, Accepted)]

    assert accepted((9, 0)) == ["cuda-sm_90a", "cuda", "cuda-sm_90"]  # instructions of its own first
    assert accepted((8, 0)) == ["cuda", "cuda-sm_80"]
    assert accepted((8, 9)) == ["cuda-sm_86", "cuda", "cuda-sm_80"]  # the closest code first
    assert accepted((12, 0)) == ["cuda"]
    assert accepted((11, 0)) == ["cuda"]  # by its PTX
    assert accepted((7, 5)) == []
    rejected = [d for d in select(PLAIN, made, Place(Host(frozenset()), capability=(7, 5))) if isinstance(d, Rejected)]
    assert "this device has 7.5" in rejected[0].reason


def test_targets():
    assert CUDA_TARGETS["cuda-sm_90"].runs_on((9, 0))
    assert not CUDA_TARGETS["cuda-sm_90"].runs_on((10, 0))
    assert CUDA_TARGETS["cuda-sm_90a"].runs_on((9, 0))
    assert not CUDA_TARGETS["cuda-sm_90a"].runs_on((9, 1))
    assert not CUDA_TARGETS["cuda-sm_86"].runs_on((8, 0))
    assert targets.get("cuda") is CUDA_TARGETS["cuda"]
    with pytest.raises(ProblemError, match=r"must be one of x86-64-v3, .*, cuda-sm_80"):
        targets.get("cuda-sm_10")


def test_torch_is_asked_in_its_own_words():
    torch = pytest.importorskip("torch")
    framework = cuda.FRAMEWORKS["torch"]()
    half = torch.zeros(2, 3, dtype=torch.bfloat16)
    assert framework.dtype(half) == "bfloat16"
    assert framework.bits(half).dtype == torch.uint16
    assert framework.contiguous(half)
    assert not framework.contiguous(half.t())
    assert framework.address(half) == half.data_ptr()
    weights = torch.arange(3 * 3 * 9 * 3, dtype=torch.float32).reshape(3, 3, 9, 3)
    given = PLAIN.replace(filter_format="XIO")
    np.testing.assert_array_equal(framework.canonical(given, weights).numpy(), given.canonical_filter(weights.numpy()))
    assert framework.converted(half, "float32").dtype == torch.float32
    bits = framework.to_host(half + 1)
    assert bits.dtype == np.uint16
    framework.fill(half, bits)
    assert (half == 1).all()
