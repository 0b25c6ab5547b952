"""Modules: what a scan finds computes what PyTorch computes."""

import sys
import types

import numpy as np
import pytest
from support.tolerances import assert_close

from tvm_deconv import Epilogue, SourceError
from tvm_deconv.frontends import scan, write_weights
from tvm_deconv.problem.reference import reference

torch = pytest.importorskip("torch")
safetensors_torch = pytest.importorskip("safetensors.torch")
nn, F = torch.nn, torch.nn.functional


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def trained(module):
    """Batch normalisations as training leaves them; evaluation mode."""
    for part in module.modules():
        if isinstance(part, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)) and part.running_mean is not None:
            part.running_mean.uniform_(-1, 1)
            part.running_var.uniform_(0.5, 2)
            if part.affine:
                nn.init.uniform_(part.weight, -1, 1)
                nn.init.uniform_(part.bias, -1, 1)
    return module.eval()


def check(module, shape, expected_epilogue, fused, name="0"):
    x = torch.randn(shape)
    (layer,) = scan(module, [x])
    assert layer.name == name
    assert layer.problem.epilogue == expected_epilogue
    assert layer.fused == fused
    with torch.no_grad():
        expected = module(x).numpy()
    got = reference(layer.problem, x.numpy().reshape(layer.problem.data_shape), layer.filter, layer.bias)
    assert_close(got.reshape(expected.shape), expected)
    return layer


FOLLOWERS = {
    "relu": (nn.ReLU(), "relu"),
    "in place": (nn.ReLU(inplace=True), "relu"),
    "leaky": (nn.LeakyReLU(0.2), "leaky_relu(0.2)"),
    "prelu": (nn.PReLU(), "leaky_relu(0.25)"),
    "sigmoid": (nn.Sigmoid(), "sigmoid"),
    "tanh": (nn.Tanh(), "tanh"),
    "gelu": (nn.GELU(), "gelu"),
    "silu": (nn.SiLU(), "silu"),
    "elu": (nn.ELU(0.7), "elu(0.7)"),
    "elu by default": (nn.ELU(inplace=True), "elu(1.0)"),
    "hardswish": (nn.Hardswish(), "hardswish"),
    "mish": (nn.Mish(), "mish"),
    "softplus": (nn.Softplus(), "softplus"),
    "relu6": (nn.ReLU6(), "clip(0.0,6.0)"),
    "hardtanh": (nn.Hardtanh(-0.5, 0.75), "clip(-0.5,0.75)"),
}


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("case", FOLLOWERS)
def test_batch_norm_and_activation(case, groups):
    activation, text = FOLLOWERS[case]
    up = nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=groups, bias=groups == 1)
    module = trained(nn.Sequential(up, nn.BatchNorm2d(6), activation))
    check(module, (2, 4, 5, 6), Epilogue.parse(f"bias+{text}"), ("1", "2"))


@pytest.mark.parametrize("rank", [1, 3])
def test_ranks(rank):
    up = (nn.ConvTranspose1d, None, nn.ConvTranspose3d)[rank - 1](4, 6, 3, stride=2, dilation=2)
    norm = (nn.BatchNorm1d, None, nn.BatchNorm3d)[rank - 1](6, affine=False)
    check(trained(nn.Sequential(up, norm)), (2, 4, 5, 6, 3)[: rank + 2], Epilogue(bias=True), ("1",))


def test_a_bare_module():
    layer = check(nn.ConvTranspose2d(4, 3, 2, bias=False).eval(), (1, 4, 5, 6), Epilogue(), (), "ConvTranspose2d")
    assert layer.operator == "ConvTranspose2d"
    assert layer.bias is None


def test_without_a_batch():
    module = trained(nn.Sequential(nn.ConvTranspose1d(4, 4, 3), nn.ReLU()))
    (layer,) = scan(module, [torch.randn(4, 7)])
    assert layer.problem.data_shape == (1, 4, 7)
    assert layer.problem.epilogue == Epilogue(bias=True)


def test_output_size_of_the_call():
    class Up(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.ConvTranspose2d(4, 3, 3, stride=2, padding=1)

        def forward(self, x):
            return self.up(x, output_size=(10, 11))

    check(Up().eval(), (1, 4, 5, 6), Epilogue(bias=True), (), "up")


class Net(nn.Module):
    """A layer of which both a ReLU and the output use the result, and one that runs twice."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.ConvTranspose2d(4, 4, 2, stride=2), nn.ReLU())
        self.twice = nn.ConvTranspose2d(4, 4, 3, padding=1)
        self.unused = nn.ConvTranspose2d(4, 4, 3)

    def forward(self, x):
        up = self.body[0](x)
        return self.twice(self.twice(up)) + self.body[1](up.clone())


def test_only_what_runs_is_found():
    layers = scan(Net().eval(), [torch.randn(1, 4, 5, 6)])
    assert [layer.name for layer in layers] == ["body.0", "twice", "twice_2"]
    assert [layer.problem.epilogue for layer in layers] == [Epilogue(bias=True)] * 3
    assert layers[1].problem.data_shape == (1, 4, 10, 12)


def test_parametrized_weights():
    up = nn.utils.parametrizations.weight_norm(nn.ConvTranspose1d(4, 6, 4, stride=2, padding=1))
    check(nn.Sequential(up, nn.LeakyReLU(0.1)).eval(), (1, 4, 9), Epilogue(True, "leaky_relu", alpha=0.1), ("1",))


def test_bfloat16(tmp_path):
    module = nn.Sequential(nn.ConvTranspose1d(4, 6, 4), nn.ReLU()).to(torch.bfloat16).eval()
    (layer,) = scan(module, [torch.randn(1, 4, 9, dtype=torch.bfloat16)])
    assert layer.problem.dtype == layer.filter.dtype.name == "bfloat16"
    assert layer.bias.dtype == np.float32
    np.testing.assert_array_equal(layer.filter.astype(np.float32), module[0].weight.detach().float().numpy())
    assert write_weights([layer], tmp_path / "weights.safetensors") == ["0.filter", "0.bias"]
    read = safetensors_torch.load_file(tmp_path / "weights.safetensors")
    assert torch.equal(read["0.filter"], module[0].weight.detach())


def test_the_arrays_are_copies():
    module = nn.ConvTranspose1d(4, 6, 4).eval()
    (layer,) = scan(module, [torch.randn(1, 4, 9)])
    before = layer.filter.copy()
    with torch.no_grad():
        module.weight.zero_()
    np.testing.assert_array_equal(layer.filter, before)


NOT_FUSED = {
    "tanh gelu": nn.GELU(approximate="tanh"),
    "slopes": nn.PReLU(6),
    "no statistics": nn.BatchNorm2d(6, track_running_stats=False),
    "selu": nn.SELU(),
    "celu": nn.CELU(2.0),
    "softplus of another beta": nn.Softplus(beta=2),
    "softplus of another threshold": nn.Softplus(threshold=5),
    "dropout": nn.Dropout(),
}


@pytest.mark.parametrize("case", NOT_FUSED)
def test_not_fused(case):
    if case == "slopes":
        nn.init.uniform_(NOT_FUSED[case].weight)
    module = trained(nn.Sequential(nn.ConvTranspose2d(4, 6, 3), NOT_FUSED[case]))
    (layer,) = scan(module, [torch.randn(1, 4, 5, 6)])
    assert layer.problem.epilogue == Epilogue(bias=True)
    assert layer.fused == ()


def test_not_covered():
    module = nn.ConvTranspose2d(4, 6, 3, bias=False).eval()
    module.weight = nn.Parameter(module.weight.to(torch.int64), requires_grad=False)
    (layer,) = scan(module, [torch.ones(1, 4, 5, 6, dtype=torch.int64)])
    assert (layer.name, layer.operator, layer.problem) == ("ConvTranspose2d", "ConvTranspose2d", None)
    assert layer.reason.startswith("dtype='int64': must be one of float32")


class Block(nn.Module):
    """What `nn.Sequential` does not say: `forward` is given the block and its input."""

    def __init__(self, forward):
        super().__init__()
        self.up = nn.ConvTranspose2d(4, 6, 3, stride=2, bias=False)
        self.norm = nn.BatchNorm2d(6)
        self.act = nn.ReLU()
        self.shift = nn.Parameter(torch.randn(6, 1, 1))
        self.body = forward

    def forward(self, x):
        return self.body(self, x)


def functional(m, x):
    return F.conv_transpose2d(x, m.up.weight, stride=2)


def keep(module, tensor):
    module.kept = [tensor]
    return tensor


SEEN = {
    "modules": (lambda m, x: m.act(m.norm(m.up(x))), "up", "bias+relu", ("norm", "act")),
    "functions": (lambda m, x: F.relu(functional(m, x)), "conv_transpose2d()", "relu", ("relu()",)),
    "method": (lambda m, x: m.up(x).sigmoid_(), "up", "sigmoid", ("sigmoid()",)),
    "constants": (
        lambda m, x: (m.up(x) * m.shift.exp() + m.shift).clamp(max=0.5),
        "up",
        "bias+clip(-inf,0.5)",
        ("mul()", "add()", "clamp()"),
    ),
    "gate": (lambda m, x: (y := m.up(x)) * torch.sigmoid(y), "up", "silu", ("sigmoid()", "mul()")),
    "relu6": (lambda m, x: F.relu6(m.up(x)), "up", "clip(0.0,6.0)", ("hardtanh()",)),
    "gelu": (lambda m, x: F.gelu(m.up(x)), "up", "gelu", ("gelu()",)),
    "elu": (lambda m, x: F.elu_(m.up(x), 0.3), "up", "elu(0.3)", ("elu()",)),
    "hardswish": (lambda m, x: F.hardswish(m.up(x)), "up", "hardswish", ("hardswish()",)),
    "mish": (lambda m, x: F.mish(m.up(x)), "up", "mish", ("mish()",)),
    "mish gate": (
        lambda m, x: (y := m.up(x)) * F.softplus(y).tanh(),
        "up",
        "mish",
        ("softplus()", "tanh()", "mul()"),
    ),
    "softplus": (lambda m, x: F.softplus(m.up(x)), "up", "softplus", ("softplus()",)),
    "autocast": (lambda m, x: torch.autocast("cpu", enabled=False)(m.up)(x), "up", "none", ()),
    # What must not be fused.
    "used twice": (lambda m, x: (y := m.up(x)) + m.act(y), "up", "none", ()),
    "also an output": (lambda m, x: (y := m.up(x), m.act(y))[1] + 0 * y, "up", "none", ()),
    "a view of it is used": (lambda m, x: m.act(y := m.up(x)) + y[:, :1], "up", "none", ()),
    "written in between": (lambda m, x: m.act(m.up(x).add_(x.mean())), "up", "none", ()),
    "kept": (lambda m, x: m.act(keep(m, m.up(x))), "up", "none", ()),
    "in an object": (lambda m, x: types.SimpleNamespace(raw=(y := m.up(x)), act=torch.relu(y)), "up", "none", ()),
    "noise": (lambda m, x: m.up(x) + 0 * torch.randn(6, 1, 1), "up", "none", ()),
    "data": (lambda m, x: m.up(x) * x.mean((2, 3), keepdim=True)[:, :1], "up", "none", ()),
    "scaled sum": (lambda m, x: torch.add(m.up(x), m.shift, alpha=2), "up", "none", ()),
    "selu": (lambda m, x: F.selu(m.up(x)), "up", "none", ()),
    "tanh form": (lambda m, x: F.gelu(m.up(x), approximate="tanh"), "up", "none", ()),
    "running moments": (lambda m, x: F.batch_norm(m.up(x), None, None, training=True), "up", "none", ()),
}


@pytest.mark.parametrize("case", SEEN)
def test_what_a_forward_does(case):
    forward, name, epilogue, fused = SEEN[case]
    block = trained(Block(forward))
    x = torch.randn(1, 4, 5, 6)
    (layer,) = scan(block, [x])
    assert (layer.name, str(layer.problem.epilogue), layer.fused) == (name, epilogue, fused)
    if fused:
        with torch.no_grad():
            expected = block(x).numpy()
        got = reference(layer.problem, x.numpy(), layer.filter, layer.bias)
        assert_close(got, expected)


def test_names_inside_a_model():
    module = nn.Sequential(Block(functional), Block(lambda m, x: F.relu(m.up(x[:, :4])))).eval()
    first, second = scan(module, [torch.randn(1, 4, 5, 6)])
    assert (first.name, first.operator) == ("0.conv_transpose2d()", "conv_transpose2d")
    assert (second.name, second.operator, second.fused) == ("1.up", "ConvTranspose2d", ("1.relu()",))


def test_a_forward_of_its_own():
    class Other(nn.ConvTranspose2d):
        def forward(self, x):
            return super().forward(2 * x) + self.bias.view(-1, 1, 1)

    x = torch.randn(1, 4, 5, 6)
    module = Other(4, 6, 3).eval()
    (layer,) = scan(module, [x])
    assert (layer.name, layer.fused) == ("Other", ("Other",))
    with torch.no_grad():
        np.testing.assert_allclose(
            reference(layer.problem, 2 * x.numpy(), layer.filter, layer.bias), module(x), rtol=1e-4, atol=1e-5
        )


def test_a_filter_that_the_data_make():
    class Hyper(nn.Module):
        def forward(self, x, weight):
            return F.relu(F.conv_transpose2d(x, weight, weight.mean((0, 2, 3))) + 1)

    (layer,) = scan(Hyper().eval(), [torch.randn(1, 4, 5, 6), torch.randn(4, 3, 2, 2)])
    assert layer.problem.epilogue == Epilogue(bias=True)
    assert (layer.filter, layer.bias) == (None, None)


def test_under_autocast():
    class Cast(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.ConvTranspose2d(4, 6, 3)

        def forward(self, x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return F.relu(self.up(x))

    (layer,) = scan(Cast().eval(), [torch.randn(1, 4, 5, 6)])
    assert (layer.problem.dtype, str(layer.problem.epilogue)) == ("bfloat16", "bias+relu")
    assert layer.filter.dtype.name == "bfloat16"


def test_a_constant_of_a_wider_type():
    """The result is float32, which no epilogue of a bfloat16 layer gives."""
    block = Block(lambda m, x: (m.up(x) * m.shift, m.up(x).mul_(m.shift))).to(torch.bfloat16).eval()
    block.shift.data = block.shift.data.float()
    wider, same = scan(block, [torch.randn(1, 4, 5, 6, dtype=torch.bfloat16)])
    assert (wider.fused, same.fused) == ((), ("mul()",))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_script():
    module = torch.jit.script(nn.Sequential(nn.ConvTranspose2d(4, 6, 3), nn.ReLU()).eval())
    x = torch.randn(1, 4, 5, 6)
    (layer,) = scan(module, [x])
    (inner,) = scan(nn.Sequential(module).eval(), [x])
    for found in (layer, inner):
        assert (str(found.problem.epilogue), found.operator) == ("bias+relu", "conv_transpose2d")


def test_inference_tensors():
    with torch.inference_mode():
        module = nn.Sequential(nn.ConvTranspose2d(4, 6, 3), nn.ReLU(inplace=True)).eval()
        x = torch.randn(1, 4, 5, 6)
        (layer,) = scan(module, [x])
        (other,) = scan(nn.Sequential(module[0], nn.BatchNorm2d(6)).eval(), [x])
    assert (layer.name, layer.problem.data_shape) == ("0", (1, 4, 5, 6))
    assert other.fused == ("1",)


def test_keyword_arguments():
    class Up(nn.ConvTranspose2d):
        def forward(self, image, *, twice):
            return super().forward(twice * image)

    (layer,) = scan(Up(4, 6, 3).eval(), {"image": torch.randn(1, 4, 5, 6), "twice": 2})
    assert layer.problem.data_shape == (1, 4, 5, 6)
    for bad in (torch.randn(1, 4, 5, 6), "image"):
        with pytest.raises(
            SourceError, match="must be a sequence of the model's arguments, or a mapping of its keyword"
        ):
            scan(Up(4, 6, 3).eval(), bad)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_a_quantised_layer_is_reported():
    from torch.ao import quantization

    class Quantised(nn.Module):
        def __init__(self):
            super().__init__()
            self.enter, self.leave = quantization.QuantStub(), quantization.DeQuantStub()
            self.up = nn.ConvTranspose1d(3, 4, 4)

        def forward(self, x):
            return self.leave(self.up(self.enter(x)))

    module = Quantised()
    module.qconfig = quantization.QConfig(quantization.default_observer, quantization.default_weight_observer)
    quantization.prepare(module.eval(), inplace=True)
    x = torch.randn(2, 3, 6)
    module(x)
    module = quantization.convert(module).eval()
    (layer,) = scan(module, [x])
    assert (layer.name, layer.operator, layer.problem) == ("up", type(module.up).__name__, None)
    assert layer.reason.startswith("runs quantised, as quantized::conv_transpose1d: take the float model")


def test_bad_sources():
    with pytest.raises(
        SourceError, match=r"training=True: must be False all over the module: call module.eval\(\) first"
    ):
        scan(nn.Sequential(nn.ConvTranspose2d(4, 6, 3)), [torch.randn(1, 4, 5, 6)])
    with pytest.raises(SourceError, match=r"source='int': must be a path or an nn.Module"):
        scan(3)


def test_the_module_is_left_as_it_was():
    module = trained(nn.Sequential(nn.ConvTranspose2d(4, 6, 3), nn.BatchNorm2d(6)))
    before = {name: value.clone() for name, value in module.state_dict().items()}
    scan(module, [torch.randn(1, 4, 5, 6)])
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert not any(part._forward_hooks for part in module.modules())
    with pytest.raises(RuntimeError, match="Given transposed"):
        scan(module, [torch.randn(1, 5, 5, 6)])
    assert not any(part._forward_hooks for part in module.modules())


def test_no_torch(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "tvm_deconv.frontends.torch", raising=False)
    with pytest.raises(SourceError, match=r"source='a module': needs the package torch: pip install torch$"):
        scan(nn.ReLU())
