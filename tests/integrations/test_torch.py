"""PyTorch: the registered operator and what its compiler, its export and its gradients make of it."""

import dataclasses
import shutil
import sys

import pytest
from support import artifacts as made
from support.tolerances import assert_close

import tvm_deconv as td
from tvm_deconv import Epilogue, from_torch

torch = pytest.importorskip("torch")
packed = pytest.importorskip("tvm_deconv.torch.packed")
F = torch.nn.functional

LAYERS = {
    "1d": (from_torch((2, 4, 6), (4, 3, 4), stride=2, padding=1), {"stride": 2, "padding": 1}),
    "2d": (
        from_torch((2, 6, 5, 3), (6, 2, 3, 3), stride=(2, 3), padding=(1, 0), output_padding=(1, 2), groups=3),
        {"stride": (2, 3), "padding": (1, 0), "output_padding": (1, 2), "groups": 3},
    ),
    "3d": (from_torch((1, 3, 2, 3, 4), (3, 2, 2, 3, 2), dilation=(1, 2, 1)), {"dilation": (1, 2, 1)}),
    "float64": (from_torch((2, 4, 6), (4, 3, 4), stride=2, dtype="float64"), {"stride": 2}),
    "bfloat16": (from_torch((2, 4, 6), (4, 3, 4), stride=2, dtype="bfloat16"), {"stride": 2}),
    "float16": (from_torch((2, 4, 6), (4, 3, 4), stride=2, dtype="float16"), {"stride": 2}),
}
ACTIVATIONS = [
    Epilogue(activation=name) for name, record in td.problem.ACTIVATIONS.items() if not record.parameters
] + [
    Epilogue(activation="leaky_relu", alpha=0.1),
    Epilogue(activation="elu", alpha=0.7),
    Epilogue(activation="clip", minimum=-0.5, maximum=0.75),
]
SMALL = from_torch((1, 2, 3), (2, 2, 3), stride=2, dtype="float64", epilogue=Epilogue(bias=True))


def with_bias(epilogue):
    return dataclasses.replace(epilogue, bias=True)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("torch")
    problems = [problem for problem, _ in LAYERS.values()]
    problems += [LAYERS["2d"][0].replace(epilogue=Epilogue(True, "relu"))]
    made.export(directory, [*problems, *(SMALL.replace(epilogue=with_bias(epilogue)) for epilogue in ACTIVATIONS)])
    return directory


@pytest.fixture(scope="module")
def library(directory):
    return td.load(directory)


@pytest.fixture
def binds(monkeypatch):
    """The problems that are bound, that is packed, from now on."""
    seen, bind = [], td.Library.bind
    monkeypatch.setattr(td.Library, "bind", lambda self, p, *rest: seen.append(p.key) or bind(self, p, *rest))
    return seen


def tensors(problem, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = (problem.data_shape, problem.filter_shape, problem.bias_shape)
    return [torch.randn(shape, generator=generator, dtype=getattr(torch, problem.dtype)) for shape in shapes]


def assert_right(problem, output, *arrays):
    expected = td.reference(problem, *(None if array is None else array.double().numpy() for array in arrays))
    assert output.dtype == getattr(torch, problem.output_dtype)
    assert_close(output.double().numpy(), expected, problem.dtype)


def small(*tensors, library, activation=None, **keywords):
    return td.torch.conv_transpose(*tensors, stride=2, activation=activation, library=library, **keywords)


# ---- the operator ----


@pytest.mark.parametrize("name", LAYERS)
def test_layers(library, name):
    problem, attributes = LAYERS[name]
    data, weight, _ = tensors(problem)
    output = td.torch.conv_transpose(data, weight, **attributes, library=library)
    assert_right(problem, output, data, weight)
    assert output.is_contiguous()


def test_bias_and_activation(library):
    problem, attributes = LAYERS["2d"]
    problem = problem.replace(epilogue=Epilogue(True, "relu"))
    data, weight, bias = tensors(problem)
    output = td.torch.conv_transpose(data, weight, bias, **attributes, activation="relu", library=library)
    assert_right(problem, output, data, weight, bias)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.contiguous(memory_format=torch.channels_last),
        lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
        lambda x: x.repeat_interleave(2, 0)[::2],
        lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape),
        lambda x: x.clone().requires_grad_(),
    ],
    ids=["channels_last", "transposed", "sliced", "offset", "requires grad"],
)
def test_any_strides(library, change):
    problem, attributes = LAYERS["2d"]
    data, weight, _ = tensors(problem)
    output = td.torch.conv_transpose(change(data), change(weight), **attributes, library=library)
    assert_right(problem, output.detach(), data, weight)


@pytest.mark.parametrize("name", ["2d", "3d"])
def test_channels_last(directory, tmp_path, name):
    """The format is the result's too, whichever artifact there is; where both are, nothing is copied."""
    problem, attributes = LAYERS[name]
    data, weight, _ = tensors(problem)
    last = data.contiguous(memory_format=(torch.channels_last, torch.channels_last_3d)[problem.rank - 2])
    made.export(tmp_path, [problem, problem.replace(data_format="NXC")])

    def call(data, library):
        return td.torch.conv_transpose(data, weight, **attributes, library=library)

    for library in (td.load(directory), td.load(tmp_path)):
        output = call(last, library)
        assert_right(problem, output, data, weight)
        assert output.movedim(1, -1).is_contiguous()
        compiled = torch.compile(call, fullgraph=True, backend="aot_eager")(last, library)
        assert (compiled.stride(), torch.equal(compiled, output)) == (output.stride(), True)
        assert call(data, library).is_contiguous()
    kept = packed.packed_of(weight)._layers.values()
    assert sorted(layer.problem.data_format for layer, _ in kept) == ["NCX", "NCX", "NCX", "NXC"]
    handle = packed.handle_of(library)
    axes = [attributes.get(key, default) for key, default in (("stride", 1), ("padding", 0), ("output_padding", 0))]
    axes = [axis if isinstance(axis, tuple) else (axis,) * problem.rank for axis in (*axes, problem.dilations)]
    numbers = (*(None,) * 5, 0.0, *map(list, axes), problem.groups, "none", handle, False, True)
    torch.library.opcheck(td.torch.operator._operator, (last.requires_grad_(), weight, *numbers))


def test_libraries_of_one_directory_stay_apart(directory):
    """What may serve a call besides the artifacts, and whether later builds may, is part of what a graph names."""
    digest = td.load(directory).digest
    ways = [{}, {"fallback": "reference"}, {"fallback": ["compile", "reference"]}, {"digest": digest}]
    loaded = [td.load(directory, **way) for way in ways]
    handles = [packed.handle_of(library) for library in loaded]
    assert [packed.library_of(handle) for handle in handles] == loaded
    assert handles[0] == packed.handle_of(td.load(directory))
    problem = LAYERS["2d"][0].replace(out_channels=7)
    data, weight, _ = tensors(problem)
    without, reference = (
        lambda: td.torch.conv_transpose(data, weight, **LAYERS["2d"][1], library=loaded[0]),
        lambda: td.torch.conv_transpose(data, weight, **LAYERS["2d"][1], library=loaded[1]),
    )
    assert_right(problem, reference(), data, weight)
    with pytest.raises(td.NoArtifactError):
        without()


@pytest.mark.parametrize(("way", "kept"), [({}, ()), ({"fallback": ["compile", "reference"]}, ("reference",))])
def test_another_process_has_the_same_library(directory, monkeypatch, way, kept):
    """It must not have been built again, so nothing is compiled for it either."""
    monkeypatch.setattr(packed, "libraries", {})
    library = td.load(directory, **way)
    handle = packed.handle_of(library)
    packed.libraries.clear()
    found = packed.library_of(handle)
    assert found is not library
    assert (found.digest, found.root, found.pinned) == (library.digest, library.root, True)
    assert tuple(fallback.name for fallback in found.fallbacks) == kept


class TestOnADevice:
    """Tensors of CUDA devices without a device: PyTorch's fakes, which say where they are."""

    @pytest.fixture
    def call(self, monkeypatch):
        from torch._subclasses.fake_tensor import FakeTensorMode

        from tvm_deconv.runtime import library

        monkeypatch.setattr(library, "cuda_capability", lambda _: (9, 0))
        problem, attributes = LAYERS["2d"]
        axes = [attributes.get(key, default) for key, default in (("stride", 1), ("padding", 0), ("output_padding", 0))]
        axes = [axis if isinstance(axis, tuple) else (axis,) * problem.rank for axis in (*axes, problem.dilations)]

        def call(library, fallback, device="cuda:0", weight_device=None):
            handle = packed.handle_of(library)
            numbers = (*(None,) * 5, 0.0, *map(list, axes), problem.groups, "none", handle, fallback, False)
            with FakeTensorMode(allow_non_fake_inputs=True):
                data = torch.empty(problem.data_shape, device=device)
                weight = torch.empty(problem.filter_shape, device=weight_device or device)
                return td.torch.operator._operator._init_fn(data, weight, *numbers)

        return call

    def test_the_library_is_asked(self, call, library):
        with pytest.raises(td.NoArtifactError, match="these arrays are in the memory of a CUDA device"):
            call(library, False)

    def test_pytorch_computes_what_has_no_artifact(self, call, library):
        assert str(call(library, True).device) == "cuda:0"

    def test_an_artifact_comes_before_pytorch(self, call, library, monkeypatch):
        bound = []

        def bind(_, problem, filter, *_more):
            bound.append((problem, filter.device))
            raise ZeroDivisionError

        monkeypatch.setattr(td.Library, "bind", bind)
        with pytest.raises(ZeroDivisionError):
            call(library, True)
        assert bound == [(LAYERS["2d"][0], torch.device("cuda:0"))]

    def test_other_devices(self, call, library):
        assert str(call(library, True, "xpu:0").device) == "xpu:0"


def test_without_a_batch(library):
    problem, attributes = LAYERS["3d"]
    data, weight, _ = tensors(problem)
    output = td.torch.conv_transpose(data[0], weight, **attributes, library=library)
    assert_right(problem, output[None], data, weight)


def test_no_artifact_is_an_error_unless_pytorch_was_asked_for(library, caplog):
    _, weight, _ = tensors(LAYERS["1d"][0])
    data = torch.randn(2, 4, 7)
    with pytest.raises(td.NoArtifactError, match=r"problem=.*x7-k4.*: no artifact serves this problem"):
        td.torch.conv_transpose(data, weight, stride=2, library=library)
    with caplog.at_level("INFO", "tvm_deconv"):
        for _ in range(2):
            output = td.torch.conv_transpose(data, weight, stride=2, library=library, fallback="torch")
    assert torch.equal(output, F.conv_transpose1d(data, weight, stride=2))
    (told,) = [record.getMessage() for record in caplog.records if "computes" in record.getMessage()]
    assert told.startswith("PyTorch computes a transposed convolution")
    assert from_torch((2, 4, 7), (4, 3, 4), stride=2).artifact_key in told
    with pytest.raises(td.ProblemError, match="fallback='reference': must be one of torch"):
        td.torch.conv_transpose(data, weight, stride=2, library=library, fallback="reference")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"stride": 0}, "stride=0: must be at least 1"),
        ({"padding": (1, 2)}, r"padding=\(1, 2\): must have one element per spatial axis, 1 here"),
        ({"output_padding": 2}, r"output_padding=\(2,\): must be smaller than the stride or the dilation of its axis"),
        ({"groups": 3}, "groups=3: must divide the 2 channels of the data"),
        ({"activation": "selu"}, "activation='selu': must be one of none, relu"),
        (
            {"bias": None, "activation": Epilogue(True, "relu")},
            "bias=None: must be an array: activation is an Epilogue with a bias",
        ),
        ({"weight": torch.zeros(5, 2, 3)}, r"filter_shape=\(5, 2, 3\): axis 0 must be the 2 channels of the data"),
        ({"weight": torch.zeros(2, 2, 3)}, "filter='float32': dtype must be float64"),
        ({"bias": torch.zeros(3, dtype=torch.float64)}, r"bias=\(3,\): shape must be \(2,\)"),
        ({"input": torch.zeros(1, 2, 3, dtype=torch.int64)}, "dtype='int64': must be one of float32"),
        ({"weight": None}, "weight='NoneType': must be a torch.Tensor"),
        ({"input": [1.0]}, "input='list': must be a torch.Tensor"),
        ({"bias": 5}, "bias='int': must be a torch.Tensor"),
        ({"weight": torch.zeros(2, 2)}, r"weight=\(2, 2\): rank must be 3, 4 or 5"),
        (
            {"weight": torch.zeros((1,) * 6), "fallback": "torch"},
            r"weight=\(1, 1, 1, 1, 1, 1\): rank must be 3, 4 or 5",
        ),
        ({"input": torch.zeros(())}, r"input=\(\): rank must be 3, or 2 without a batch"),
        ({"library": None}, "library=None: must be a Library"),
        ({"library": "artifacts"}, "library='artifacts': must be a Library"),
    ],
)
def test_refused(library, changes, text):
    arguments = dict(zip(("input", "weight", "bias"), tensors(SMALL), strict=True)) | {"stride": 2}
    with pytest.raises((td.ProblemError, td.TensorError), match=text):
        td.torch.conv_transpose(**{"library": library} | arguments | changes)


# ---- what is kept ----


def test_a_filter_is_packed_once_and_again_when_it_changes(library, binds):
    data, weight, bias = tensors(SMALL)
    weight = torch.nn.Parameter(weight)
    with torch.no_grad():
        for _ in range(3):
            first = small(data, weight, bias, library=library)
        assert len(binds) == 1
        weight.mul_(2)
        assert_right(SMALL, small(data, weight, bias, library=library), data, weight.detach(), bias)
        bias.add_(1)
        assert_right(SMALL, small(data, weight, bias, library=library), data, weight.detach(), bias)
        other = bias.clone()
        small(data, weight, other, library=library)
        weight.data = weight.data.clone()
        small(data, weight, other, library=library)
        assert len(binds) == 5
        small(data, weight, other, library=library)
        small(data.clone(), weight, other, library=library)
        assert len(binds) == 5
    assert not torch.equal(first, small(data, weight, other, library=library))


def test_one_packed_filter_serves_every_length(tmp_path, binds):
    anything = from_torch(("any", 4, [5, 20]), (4, 3, 4), stride=2, padding=1)
    exact = from_torch((2, 4, 9), (4, 3, 4), stride=2, padding=1)
    made.export(tmp_path, [anything, exact])
    library = td.load(tmp_path)
    _, weight, _ = tensors(exact)
    with torch.no_grad():
        for batch, length in ((1, 7), (3, 40), (1, 1), (2, 9), *((1, extent) for extent in range(10, 30))):
            problem = anything.at((batch, 4, length))
            data, _, _ = tensors(problem, seed=length)
            output = td.torch.conv_transpose(data, weight, stride=2, padding=1, library=library)
            assert_right(problem, output, data, weight)
        # The artifact for exactly one shape is taken for that one.
        assert binds == [anything.replace(buckets=()).key, exact.key]
        weight.mul_(2)
        assert_right(problem, td.torch.conv_transpose(data, weight, stride=2, padding=1, library=library), data, weight)
        assert len(binds) == 3


def test_a_filter_with_gradients_is_packed_on_every_call(library, binds):
    """A write through `data` is not counted, and the optimisers of many programs write so."""
    data, weight, bias = tensors(SMALL)
    weight.requires_grad_()
    small(data, weight, bias, library=library)
    weight.data.mul_(3)
    assert_right(SMALL, small(data, weight, bias, library=library).detach(), data, weight.detach(), bias)
    assert len(binds) == 2


def test_tensors_of_inference_mode_are_compared(library, binds):
    """They have no version."""
    with torch.inference_mode():
        data, weight, bias = tensors(SMALL)
        for _ in range(2):
            assert_right(SMALL, small(data, weight, bias, library=library), data, weight, bias)
        assert len(binds) == 1
        weight.mul_(2)
        assert_right(SMALL, small(data, weight, bias, library=library), data, weight, bias)
        bias[0] = float("nan")
        small(data, weight, bias, library=library)
        small(data, weight, bias, library=library)
        assert len(binds) == 3


def test_what_is_kept_is_bounded(library, binds):
    """Shapes without an artifact, too: each is looked up once."""
    _, weight, _ = tensors(LAYERS["1d"][0])
    with torch.no_grad():
        for extent in [*range(10, 30), *range(22, 30)]:
            td.torch.conv_transpose(torch.randn(1, 4, extent), weight, library=library, fallback="torch")
    assert len(binds) == 20
    assert len(packed.packed_of(weight)) == packed.MOST_LAYERS
    count = len(packed._packed)
    del weight
    assert len(packed._packed) == count - 1


def test_eager_calls_do_not_pass_the_dispatcher(library, monkeypatch):
    data, weight, bias = tensors(SMALL)
    expected = small(data, weight, bias, library=library)
    monkeypatch.setattr(td.torch.operator, "_operator", None)
    assert torch.equal(small(data, weight, bias, library=library), expected)
    assert torch.equal(small(data.requires_grad_().detach(), weight, bias, library=library), expected)
    with pytest.raises(TypeError):
        small(data, weight, bias, library=library)
    with torch.no_grad():
        assert torch.equal(small(data, weight, bias, library=library), expected)


def test_an_empty_batch_needs_no_artifact(library):
    _, weight, bias = tensors(LAYERS["2d"][0])
    data = torch.empty(0, 6, 9, 9)
    output = td.torch.conv_transpose(data, weight, bias, **LAYERS["2d"][1], activation="relu", library=library)
    assert output.shape == F.conv_transpose2d(data, weight, bias, **LAYERS["2d"][1]).shape


# ---- where PyTorch computes ----


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int64], ids=str)
def test_types_that_artifacts_do_not_have(library, dtype):
    data, weight, bias = (torch.arange(1, 1 + tensor.numel()).view(tensor.shape).to(dtype) for tensor in tensors(SMALL))
    expected = F.conv_transpose1d(data, weight, bias, stride=2)
    compiled = torch.compile(small, fullgraph=True, backend="aot_eager")
    for call in (small, compiled):
        assert torch.equal(call(data, weight, bias, library=library, fallback="torch"), expected)
    with pytest.raises(td.ProblemError, match="dtype="):
        small(data, weight, bias, library=library)


def test_small_integers_without_an_artifact(library):
    data, weight = torch.full((1, 2, 5), 100, dtype=torch.int8), torch.full((2, 3, 2), 100, dtype=torch.int8)
    output = td.torch.conv_transpose(data, weight, library=library, fallback="torch")
    assert (output.dtype, output.max().item()) == (torch.int32, 40000)


@pytest.mark.parametrize("compiled", [False, True])
def test_autocast_is_pytorchs(library, compiled):
    data, weight, bias = (tensor.float() for tensor in tensors(SMALL))

    def call(data, weight, bias):
        return small(data, weight, bias, library=library, fallback="torch", activation="gelu")

    run = torch.compile(call, fullgraph=True, backend="aot_eager") if compiled else call
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for given in (data, data.bfloat16()):
            output = run(given, weight, bias)
            expected = F.gelu(F.conv_transpose1d(given, weight, bias, stride=2))
            assert output.dtype == torch.bfloat16
            torch.testing.assert_close(output, expected)


def test_a_broken_artifact_is_told_and_pytorch_computes(tmp_path, caplog):
    made.export(tmp_path, [SMALL])
    library = td.load(tmp_path)
    made.file(tmp_path, SMALL, ".so").write_bytes(b"")
    data, weight, bias = tensors(SMALL)
    with caplog.at_level("WARNING", "tvm_deconv"):
        output = small(data, weight, bias, library=library, fallback="torch")
    torch.testing.assert_close(output, F.conv_transpose1d(data, weight, bias, stride=2))
    assert "PyTorch computes" in caplog.text
    with pytest.raises(td.IntegrityError):
        small(data, weight, bias, library=library)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("activation", ["none", "gelu"])
def test_forward_mode(library, activation):
    arguments = tensors(SMALL)
    tangents = tensors(SMALL, seed=1)

    def call(*arguments):
        return small(*arguments, library=library, activation=activation)

    def plain(*arguments):
        output = F.conv_transpose1d(*arguments, stride=2)
        return F.gelu(output) if activation == "gelu" else output

    for expected, got in zip(
        torch.func.jvp(plain, tuple(arguments), tuple(tangents)),
        torch.func.jvp(call, tuple(arguments), tuple(tangents)),
        strict=True,
    ):
        torch.testing.assert_close(got, expected)
    with torch.autograd.forward_ad.dual_level(), torch.no_grad():
        duals = [torch.autograd.forward_ad.make_dual(*both) for both in zip(arguments, tangents, strict=True)]
        tangent = torch.autograd.forward_ad.unpack_dual(call(*duals)).tangent
    torch.testing.assert_close(tangent, torch.func.jvp(plain, tuple(arguments), tuple(tangents))[1])


def test_vmap(library):
    data, weight, bias = tensors(SMALL)
    many = torch.stack([data, 2 * data])
    output = torch.func.vmap(lambda data: small(data, weight, bias, library=library))(many)
    torch.testing.assert_close(output, torch.stack([F.conv_transpose1d(each, weight, bias, stride=2) for each in many]))


# ---- gradients ----


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_gradients(library, activation):
    arguments = [tensor.requires_grad_() for tensor in tensors(SMALL, seed=1)]

    def call(*arguments):
        return small(*arguments, library=library, activation=activation)

    assert_right(
        SMALL.replace(epilogue=with_bias(activation)), call(*arguments).detach(), *map(torch.detach, arguments)
    )
    assert torch.autograd.gradcheck(call, arguments)
    assert torch.autograd.gradgradcheck(call, arguments)


def test_only_the_gradients_that_are_needed(library):
    data, weight, bias = tensors(SMALL)
    weight.requires_grad_()
    small(data, weight, bias, library=library).sum().backward()
    assert weight.grad.shape == weight.shape
    assert data.grad is bias.grad is None


@pytest.mark.parametrize("activation", ["none", "gelu"])
def test_operator_check(library, activation):
    arguments = [tensor.requires_grad_() for tensor in tensors(SMALL)]
    text = str(with_bias(Epilogue(activation=activation)))
    numbers = (*(None,) * 4, 0.0, [2], [0], [0], [1], 1, text, packed.handle_of(library), False, True)
    torch.library.opcheck(td.torch.operator._operator, (*arguments, *numbers))


# ---- compiled and exported ----


MISTAKES = {
    "channels": {"input": torch.zeros(1, 3, 3, dtype=torch.float64)},
    "rank": {"input": torch.zeros(1, 2, 3, 3, dtype=torch.float64)},
    "rank of the filter": {"weight": torch.zeros(2, 2, dtype=torch.float64)},
    "groups": {"groups": 0},
    "groups that do not divide": {"groups": 3},
    "type of the filter": {"weight": torch.zeros(2, 2, 3)},
    "shape of the bias": {"bias": torch.zeros(3, dtype=torch.float64)},
    "type of the bias": {"bias": torch.zeros(2)},
    "output_padding": {"output_padding": 2},
    "padding": {"padding": 9},
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_fake_kernel_checks_what_a_call_checks(library, mistake):
    """In the same words, so that no program is exported that can not run."""
    arguments = dict(zip(("input", "weight", "bias"), tensors(SMALL), strict=True)) | {"stride": 2}
    arguments |= MISTAKES[mistake]

    class Program(torch.nn.Module):
        def forward(self, input, weight, bias):
            others = {key: value for key, value in arguments.items() if key not in ("input", "weight", "bias")}
            return td.torch.conv_transpose(input, weight, bias, **others, library=library)

    given = tuple(arguments[key] for key in ("input", "weight", "bias"))
    with pytest.raises((td.ProblemError, td.TensorError)) as eager:
        Program()(*given)
    with pytest.raises(Exception) as exported:  # noqa: PT011 (torch.export wraps it)
        torch.export.export(Program(), given)
    assert str(eager.value) in str(exported.value)


class Net(torch.nn.Module):
    def __init__(self, library, **keywords):
        super().__init__()
        _, self.weight, self.bias = map(torch.nn.Parameter, tensors(SMALL))
        self.library, self.keywords = library, keywords

    def forward(self, x):
        return small(2 * x, self.weight, self.bias, library=self.library, **self.keywords) + 1


def test_compile(library, binds):
    net = Net(library, activation=ACTIVATIONS[-1])
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    x = torch.randn(SMALL.data_shape, dtype=torch.float64, requires_grad=True)
    assert torch.equal(compiled(x), net(x))
    grads = [torch.autograd.grad(call(x).square().sum(), (x, net.weight, net.bias)) for call in (compiled, net)]
    for got, expected in zip(*grads, strict=True):
        torch.testing.assert_close(got, expected)
    binds.clear()
    with torch.no_grad():
        for _ in range(3):
            compiled(x)
        assert len(binds) == 1
        net.weight.mul_(2)
        assert torch.equal(compiled(x), net(x))
        net.library = td.load(made.__file__.rsplit("/", 1)[0])
        with pytest.raises(td.NoArtifactError, match="there are no candidates"):
            compiled(x)


def test_compile_with_dynamic_shapes(library):
    net = Net(library, fallback="torch")
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager", dynamic=True)
    for extent in (3, 4, 5):
        x = torch.randn(1, 2, extent, dtype=torch.float64)
        torch.testing.assert_close(compiled(x), F.conv_transpose1d(2 * x, net.weight, net.bias, stride=2) + 1)


def test_export(library, tmp_path, monkeypatch):
    net = Net(library, activation="gelu")
    x = torch.randn(SMALL.data_shape, dtype=torch.float64)
    program = torch.export.export(net, (x,))
    assert [node.target for node in program.graph.nodes if "tvm_deconv" in str(node.target)] == [
        torch.ops.tvm_deconv.conv_transpose.default
    ]
    torch.export.save(program, tmp_path / "net.pt2")
    monkeypatch.setattr(packed, "libraries", {})  # as in another process
    read = torch.export.load(tmp_path / "net.pt2").module()
    assert torch.equal(read(x), net(x))


def test_an_exported_program_wants_its_artifacts(directory, tmp_path, monkeypatch):
    copy = shutil.copytree(directory, tmp_path / "copy")
    x = torch.randn(SMALL.data_shape, dtype=torch.float64)
    program = torch.export.export(Net(td.load(copy)), (x,)).module()
    monkeypatch.setattr(packed, "libraries", {})
    made.file(copy, SMALL.replace(epilogue=Epilogue(True, "tanh")), ".json").unlink()
    with pytest.raises(td.IntegrityError, match="digest="):
        program(x)


def test_without_torch(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    for name in [name for name in sys.modules if name.startswith(("tvm_deconv.torch", "tvm_deconv.frontends.torch"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr(td, "torch", raising=False)
    with pytest.raises(ModuleNotFoundError, match="torch"):
        _ = td.torch
