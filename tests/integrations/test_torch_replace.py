"""PyTorch: layers of a model that artifacts compute, next to the model itself."""

import copy
import io
from concurrent.futures import ThreadPoolExecutor

import pytest
from support import artifacts as made

import tvm_deconv as td

torch = pytest.importorskip("torch")
packed = pytest.importorskip("tvm_deconv.torch.packed")
nn, F = torch.nn, torch.nn.functional

X = (2, 3, 4, 5)


def replace(*arguments, **keywords):
    """Swap whatever artifacts serve: layers this small may be no faster."""
    return td.torch.replace(*arguments, **{"measure": False} | keywords)


class Block(nn.Module):
    def __init__(self, body=lambda m, x: m.act(m.norm(m.up(x)))):
        super().__init__()
        self.up = nn.ConvTranspose2d(3, 4, 3, stride=2, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.act = nn.ReLU(inplace=True)
        self.body = body

    def forward(self, x):
        return self.body(self, x)


def seeded(model):
    """Every parameter and buffer is random, in evaluation mode."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor.uniform_(0.5, 1.5, generator=generator)
        for part in model.modules():
            if hasattr(part, "kernel_size"):
                part.weight.sub_(1)
    return model.eval()


def data(shape=X, seed=5):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Artifacts for `Block` with batch 2, also with tanh, and for its layer alone and with a bias, and nothing else."""
    directory = tmp_path_factory.mktemp("replace")
    (whole,) = td.torch.problems(seeded(Block()), [data()])
    epilogues = td.Epilogue(), td.Epilogue(True), td.Epilogue(True, "tanh")
    problems = [whole, *(whole.replace(epilogue=epilogue) for epilogue in epilogues)]
    made.export(directory, problems)
    return directory


@pytest.fixture
def library(directory):
    return td.load(directory)


@pytest.fixture(autouse=True)
def _forget_what_was_compiled():
    """PyTorch compiles the forward of a class a few times only."""
    yield
    torch.compiler.reset()


@pytest.fixture
def swapped(library):
    """A model of which everything is swapped, and the model that it was."""
    model = seeded(Block())
    original = copy.deepcopy(model)
    (row,) = replace(model, library, [data()])
    assert (row.name, row.absorbed, row.left, row.reason) == ("up", ("norm", "act"), (), "")
    return model, original


def assert_same(model, original, x=None, **tolerance):
    x = data() if x is None else x
    with torch.no_grad():
        torch.testing.assert_close(model(x), original(x), **{"rtol": 1e-5, "atol": 1e-5} | tolerance)


@pytest.fixture
def kernels(monkeypatch):
    """The calls of layers that are not PyTorch's, and the bindings."""
    seen, call, bind = [], td.Layer.__call__, td.Library.bind
    monkeypatch.setattr(td.Layer, "__call__", lambda self, *a, **k: seen.append("call") or call(self, *a, **k))
    monkeypatch.setattr(td.Library, "bind", lambda self, *rest: seen.append("bind") or bind(self, *rest))
    return seen


def test_swapped(library, kernels):
    model = seeded(Block())
    original, names = copy.deepcopy(model), list(model.state_dict())
    report = replace(model, library, [data()])
    assert kernels == ["bind"]
    assert_same(model, original)
    assert_same(model, original, data(seed=6))
    assert kernels == ["bind", "call", "call"]
    assert [type(part).__name__ for part in (model.up, model.norm, model.act)] == [
        "CompiledConvTranspose2d",
        "AbsorbedBatchNorm2d",
        "AbsorbedReLU",
    ]
    assert isinstance(model.up, nn.ConvTranspose2d)
    assert list(model.state_dict()) == names
    assert report.swapped == list(report)
    assert report.missing == []
    assert str(report).splitlines() == [
        "layer  operator         swapped  share  gain  absorbed  left  why not",
        "up     ConvTranspose2d  yes                   norm act",
    ]


CASES = {
    "1d": ((2, 4, 7), lambda: (nn.ConvTranspose1d(4, 6, 4, 2, 1, groups=2), nn.BatchNorm1d(6), nn.LeakyReLU(0.2))),
    "2d": ((1, 4, 3, 4), lambda: (nn.ConvTranspose2d(4, 2, 2, 2), nn.BatchNorm2d(2, affine=False), nn.Sigmoid())),
    "3d": ((1, 2, 2, 3, 2), lambda: (nn.ConvTranspose3d(2, 3, 2, bias=False), nn.BatchNorm3d(3), nn.GELU())),
    "silu": ((1, 2, 5), lambda: (nn.ConvTranspose1d(2, 3, 3, output_padding=1, dilation=2), nn.SiLU())),
    "elu": ((1, 2, 5), lambda: (nn.ConvTranspose1d(2, 3, 3), nn.ELU(0.3))),
    "hardswish": ((1, 2, 5), lambda: (nn.ConvTranspose1d(2, 3, 3), nn.Hardswish())),
    "mish": ((1, 2, 5), lambda: (nn.ConvTranspose1d(2, 3, 3), nn.Mish())),
    "softplus": ((1, 2, 5), lambda: (nn.ConvTranspose1d(2, 3, 3), nn.Softplus())),
    "clip": ((1, 2, 5), lambda: (nn.ConvTranspose1d(2, 3, 3), nn.ReLU6())),
    "float64": ((1, 2, 5), lambda: (nn.ConvTranspose1d(2, 3, 3).double(), nn.BatchNorm1d(3).double(), nn.Tanh())),
    "bfloat16": ((1, 2, 5), lambda: (nn.ConvTranspose1d(2, 3, 3).bfloat16(), nn.Hardtanh())),
}


@pytest.mark.parametrize("case", CASES)
def test_kinds(tmp_path, case):
    shape, parts = CASES[case]
    model = seeded(nn.Sequential(*parts()))
    x = data(shape).to(model[0].weight.dtype)
    original = copy.deepcopy(model)
    made.export(tmp_path, td.torch.problems(model, [x]))
    (row,) = replace(model, td.load(tmp_path), [x])
    assert row.absorbed == tuple(str(place) for place in range(1, len(model)))
    assert_same(model, original, x, **({"rtol": 2e-2, "atol": 2e-2} if case == "bfloat16" else {}))


# ---- parameters that change ----


def write_scale(model):
    model.norm.weight.mul_(2)


def write_moments(model):
    model.norm.running_mean.add_(1)
    model.norm.running_var.mul_(3)


def write_filter(model):
    model.up.weight.mul_(-1)


def load_others(model, **keywords):
    model.load_state_dict({name: 2 * tensor for name, tensor in model.state_dict().items()}, **keywords)


def uncounted_in_training(model):
    model.train()
    model.up.weight.data.mul_(2)
    model.eval()


CHANGES = {
    "filter": write_filter,
    "scale": write_scale,
    "moments": write_moments,
    "state": load_others,
    "assigned state": lambda model: load_others(model, assign=True),
    "new parameter": lambda model: setattr(model.up, "weight", nn.Parameter(model.up.weight + 1)),
    "uncounted": uncounted_in_training,
    "epsilon": lambda model: setattr(model.norm, "eps", 0.5),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_noticed(swapped, change):
    model, original = swapped
    assert_same(model, original)
    before = original(data())
    with torch.no_grad():
        CHANGES[change](model)
        CHANGES[change](original)
    assert not torch.allclose(original(data()), before)
    assert_same(model, original)


def test_training_steps(swapped):
    """In training mode the model is what it was, and what an uncounted write did is seen afterwards."""
    for model in swapped:
        model.train()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(2):
            model(data()).square().mean().backward()
            optimizer.step()
        model.up.weight.data.mul_(2)
        model.eval()
    model, original = swapped
    for name, tensor in original.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name
    assert_same(model, original)


@pytest.mark.parametrize("frozen", ["norm", "up", "act"])
def test_one_part_in_another_mode(swapped, frozen):
    for model in swapped:
        model.train()
        getattr(model, frozen).eval()
    assert_same(*swapped)
    assert torch.equal(swapped[0].norm.running_mean, swapped[1].norm.running_mean)
    for model in swapped:
        model.eval()
    assert_same(*swapped)  # PyTorch does not count what a normalisation writes in training


def test_another_dtype(swapped):
    model, _ = swapped
    with pytest.raises(td.NoArtifactError, match="float64"):
        model.double()(data().double())


def test_a_scale_that_overflows(swapped):
    model, _ = swapped
    with torch.no_grad():
        model.norm.weight.fill_(3e38)
    with pytest.raises(
        td.TensorError, match="must leave filter and bias finite when the batch normalisation is folded"
    ):
        model(data())


def test_gradients(swapped):
    results = []
    for model in swapped:
        x = data().requires_grad_()
        model(x).square().sum().backward()
        results.append([x.grad, *(parameter.grad for parameter in model.parameters())])
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def test_channels_last(tmp_path, kernels):
    model = seeded(Block()).to(memory_format=torch.channels_last)
    x = data().contiguous(memory_format=torch.channels_last)
    (problem,) = td.torch.problems(model, [x])
    assert (problem.data_format, problem.data_shape) == ("NXC", (2, 4, 5, 3))
    original = copy.deepcopy(model)
    made.export(tmp_path, [problem])
    (row,) = replace(model, td.load(tmp_path), [x])
    assert row.problems == (problem,)
    kernels.clear()
    assert_same(model, original, x)
    assert kernels == ["call"]
    assert model(x).is_contiguous(memory_format=torch.channels_last)
    # Data of the other format are copied.
    kernels.clear()
    assert_same(model, original, data())
    assert kernels.count("call") == 1
    assert model(data()).is_contiguous()


def test_filters_in_channels_last(tmp_path, kernels):
    """PyTorch brings data into the format of the filter, so the second layer is recorded with channels last."""
    model = nn.Sequential(nn.ConvTranspose2d(3, 4, 2, 2), nn.ConvTranspose2d(4, 3, 2, 2)).eval()
    model = model.to(memory_format=torch.channels_last)
    x = torch.randn(1, 3, 5, 6)
    problems = td.torch.problems(model, [x])
    assert [problem.data_format for problem in problems] == ["NCX", "NXC"]
    original = copy.deepcopy(model)
    made.export(tmp_path, problems)
    replace(model, td.load(tmp_path), [x])
    kernels.clear()
    assert_same(model, original, x)
    assert kernels.count("call") == 2


# ---- where PyTorch computes ----


class Around(nn.Module):
    """A block between layers that autocast changes."""

    def __init__(self):
        super().__init__()
        self.first, self.block, self.last = nn.Conv2d(3, 3, 1), Block(), nn.Conv2d(4, 4, 1)

    def forward(self, x):
        return self.last(self.block(self.first(x)))


def test_autocast(library):
    model = seeded(Around())
    original = copy.deepcopy(model)
    replace(model, library, [data()], fallback="torch")
    assert_same(model, original)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        assert torch.equal(model(data()), original(data()))


@pytest.mark.filterwarnings("ignore:Complex modules:UserWarning")
@pytest.mark.parametrize("dtype", [torch.complex64, torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_types_without_artifacts(library, dtype):
    model = seeded(Block(lambda m, x: m.up(x)))
    original = copy.deepcopy(model).to(dtype)
    replace(model, library, [data()], fallback="torch")
    assert torch.equal(model.to(dtype)(data().to(dtype)), original(data().to(dtype)))


def test_a_scale_that_overflows_with_a_fallback(library):
    model = seeded(Block())
    original = copy.deepcopy(model)
    replace(model, library, [data()], fallback="torch")
    with torch.no_grad():
        for each in (model, original):
            each.norm.weight.fill_(3e38)
    assert_same(model, original, equal_nan=True)


def test_an_empty_batch(swapped):
    model, original = swapped
    assert model(data()[:0]).shape == original(data()[:0]).shape == (0, 4, 9, 11)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_forward_mode(swapped):
    tangents = [torch.func.jvp(model, (data(),), (data(seed=6),))[1] for model in swapped]
    assert tangents[1].any()
    torch.testing.assert_close(*tangents)


def test_parameters_made_in_inference_mode(library, kernels):
    """They become ordinary ones, in every module that has them; else each call would have to look for changes."""
    with torch.inference_mode():
        model = nn.Sequential(Block(), nn.Identity())
        model[1].tied = model[0].up.weight
        seeded(model)
        original = copy.deepcopy(model)
    replace(model, library, [data()])
    assert model[1].tied is model[0].up.weight
    assert not any(tensor.is_inference() for tensor in model.state_dict().values() if tensor.is_floating_point())
    kernels.clear()
    with torch.inference_mode():
        for _ in range(2):
            assert_same(model, original)
        assert kernels == ["call", "call"]
        for each in (model, original):
            each[0].up.weight.mul_(2)
        assert_same(model, original)
    assert kernels == ["call", "call", "bind", "call"]


# ---- filters that are computed ----

NORMS = {
    "weight": (nn.utils.parametrizations.weight_norm, nn.utils.parametrize.remove_parametrizations),
    "spectral": (nn.utils.parametrizations.spectral_norm, nn.utils.parametrize.remove_parametrizations),
    "weight by a hook": (nn.utils.weight_norm, nn.utils.remove_weight_norm),
    "spectral by a hook": (nn.utils.spectral_norm, nn.utils.remove_spectral_norm),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("norm", NORMS)
class TestNormalised:
    @pytest.fixture
    def both(self, library, norm):
        """A model with such a layer, swapped, and its original."""
        normalise, _ = NORMS[norm]
        model = Block(lambda m, x: m.norm(m.up(x)))
        model.up.register_parameter("bias", nn.Parameter(torch.randn(4)))
        model.norm = nn.Identity()
        model.up = normalise(seeded(model).up).eval()
        with torch.no_grad():
            model(data())  # a hook's first filter has gradients, and no copy
        original = copy.deepcopy(model)
        (row,) = replace(model, library, [data()])
        assert (row.name, row.operator.endswith("ConvTranspose2d"), row.reason) == ("up", True, "")
        return model, original

    def test_it_is_packed_once(self, both, kernels):
        for seed in (5, 6):
            assert_same(*both, data(seed=seed))
        assert kernels == ["call", "call"]

    def test_a_copy_after_a_call_with_gradients(self, both):
        """A hook leaves its last filter with the model; PyTorch copies none that gradients lead to."""
        for model in both:
            assert model(data()).requires_grad
            with torch.no_grad():
                model(data())
        assert_same(*map(copy.deepcopy, both))

    def test_changes_of_the_originals(self, both, kernels):
        names = [name for name in both[0].state_dict() if name != "norm.weight"]
        assert names == list(both[1].state_dict())
        for name in names:
            with torch.no_grad():
                for model in both:
                    dict((*model.named_parameters(), *model.named_buffers()))[name].mul_(1.5)
            assert_same(*both)
        assert kernels == ["bind", "call"] * len(names)
        for model in both:
            model.load_state_dict({name: 2 * tensor for name, tensor in both[1].state_dict().items()})
        assert_same(*both)

    def test_training(self, both):
        for model in both:
            torch.manual_seed(0)
            model.train()
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            for _ in range(2):
                optimizer.zero_grad()
                model(data()).square().mean().backward()
                optimizer.step()
            model.eval()
        assert_same(*both)

    def test_gradients(self, both):
        results = []
        for model in both:
            model.zero_grad()
            model(data()).square().mean().backward()
            results.append([parameter.grad for parameter in model.parameters()])
        for got, expected in zip(*results, strict=True):
            torch.testing.assert_close(got, expected)

    def test_a_copy(self, both):
        model, original = both
        others = copy.deepcopy(model), copy.deepcopy(original)
        with torch.no_grad():
            for other in others:
                for parameter in other.parameters():
                    parameter.mul_(3)
        assert_same(model, original)
        assert_same(*others)
        assert not torch.equal(others[0](data()), model(data()))

    def test_compiled(self, both):
        model, original = both
        assert_same(torch.compile(model, fullgraph=True, backend="aot_eager"), original)

    def test_removed(self, both, norm, kernels):
        """The layer stays swapped."""
        model, original = both
        _, remove = NORMS[norm]
        remove(model.up, "weight")
        assert_same(model, original)
        assert kernels == ["bind", "call"]
        with torch.no_grad():
            model.up.weight.zero_()
            model.up.bias.zero_()
        assert not model(data()).any()


class Double(nn.Module):
    def forward(self, tensor):
        return 2 * tensor


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_what_is_parametrised_after_the_swap(library, name):
    model = seeded(with_up(nn.ConvTranspose2d))
    original = copy.deepcopy(model)
    (row,) = replace(model, library, [data()])
    assert row.reason == ""
    for each in (model, original):
        nn.utils.parametrize.register_parametrization(each.up, name, Double())
    for seed in (5, 6):
        assert_same(model, original, data(seed=seed))


def test_a_filter_that_is_computed_otherwise(library, kernels):
    model = with_up(nn.ConvTranspose2d)
    nn.utils.parametrize.register_parametrization(model.up, "weight", Double())
    model = model.eval()
    original = copy.deepcopy(model)
    (row,) = replace(model, library, [data()])
    assert (row.reason, type(model.up).__name__) == ("", "CallingParametrizedConvTranspose2d")
    kernels.clear()
    for _ in range(2):
        assert_same(model, original)
    assert kernels == ["call", "call"]


# ---- calls of functions ----


class Filter(nn.Module):
    """What anti-aliased vocoders do: one filter for all channels, expanded on each call."""

    def __init__(self):
        super().__init__()
        self.register_buffer("filter", torch.randn(1, 1, 4))

    def forward(self, x):
        filter = self.filter.expand(x.shape[1], -1, -1)
        return 2 * F.conv_transpose1d(F.pad(x, (1, 1)), filter, stride=2, groups=x.shape[1])


class TestCalls:
    @pytest.fixture
    def x(self):
        return data((2, 6, 9))

    @pytest.fixture
    def both(self, tmp_path, x, kernels):
        model = nn.Sequential(nn.Identity(), Filter()).eval()
        original = copy.deepcopy(model)
        made.export(tmp_path, td.torch.problems(model, [x]))
        (row,) = replace(model, td.load(tmp_path), [x])
        assert (row.name, row.operator, row.reason) == ("1.conv_transpose1d()", "conv_transpose1d", "")
        assert type(model[1]).__name__ == "CallingFilter"
        kernels.clear()
        return model, original

    def test_swapped(self, both, x, kernels):
        for _ in range(2):
            assert_same(*both, x)
        assert kernels == ["call", "call"]
        assert both[0][1]._calls.by_name

    @pytest.mark.parametrize("elsewhere", [False, True])
    def test_names_are_there_while_a_forward_runs_in_its_thread(self, elsewhere, tmp_path, x, kernels):
        """A module that keeps the function itself is taken too; other threads compute by PyTorch."""

        class Keeping(Filter):
            function = staticmethod(F.conv_transpose1d)

            def forward(self, x):
                if elsewhere:
                    with ThreadPoolExecutor(1) as pool:
                        other = pool.submit(super().forward, x).result()
                    return other + super().forward(x)
                return self.function(x, self.filter.expand(x.shape[1], -1, -1), stride=2, groups=x.shape[1])

        originals = [getattr(place, f"conv_transpose{rank}d") for place in (torch, F) for rank in (1, 2, 3)]
        model = Keeping().eval()
        original = copy.deepcopy(model)
        made.export(tmp_path, td.torch.problems(model, [x]))
        replace(model, td.load(tmp_path), [x])
        kernels.clear()
        assert_same(model, original, x)
        assert_same(model, original, x)
        assert kernels.count("call") == 2
        assert model._calls.by_name == elsewhere
        with pytest.raises(AttributeError):
            model(None)
        assert originals == [getattr(place, f"conv_transpose{rank}d") for place in (torch, F) for rank in (1, 2, 3)]

    def test_a_change_of_the_filter(self, both, x, kernels):
        for change in (lambda m: m.filter.mul_(2), lambda m: m.filter.data.mul_(2)):
            assert_same(*both, x)
            for model in both:
                change(model[1])
            assert_same(*both, x)
        assert kernels == ["call", "bind", "call", "call", "bind", "call"]

    def test_other_calls_are_pytorchs(self, both, x, kernels):
        assert_same(*both, x[:, :4])
        assert_same(*both, x.double().requires_grad_().float())
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(both[0](x), both[1](x))
        for model in both:
            model.train()
        assert_same(*both, x)
        assert kernels == ["call"]

    def test_copies_files_and_compiled(self, both, x):
        model, original = both
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
            assert type(other[1]) is type(model[1])
            other[1].filter.mul_(2)
            assert_same(nn.Sequential(other), lambda x: 2 * original(x), x)
        assert_same(model, original, x)
        assert_same(torch.compile(model, fullgraph=True, backend="aot_eager"), original, x)


def test_a_layer_of_a_class_of_your_own(library, kernels):
    class Other(nn.ConvTranspose2d):
        def forward(self, x):
            return super().forward(2 * x)

    model = seeded(with_up(Other))
    original = copy.deepcopy(model)
    (row,) = replace(model, library, [data()])
    assert (row.operator, row.reason) == ("ConvTranspose2d", "")
    kernels.clear()
    assert_same(model, original)
    assert kernels == ["call"]


# ---- activations that are not modules of their own ----


class Tanh(nn.Module):
    """A module that is one activation."""

    def forward(self, x):
        return torch.tanh(x)


class Silu(nn.Module):
    def forward(self, x):
        return x * torch.sigmoid(x)


def behind(body, act=nn.Tanh):
    model = Block(body)
    model.act = act()
    return seeded(model)


#: What follows a layer, and who computes its activation. Twice, since a tanh too many or too few shows.
FOLLOWERS = {
    "shared": (lambda: behind(lambda m, x: m.act(m.act(m.norm(m.up(x))))), "act", "AbsorbingTanh"),
    "wrapped": (lambda: behind(lambda m, x: m.act(m.norm(m.up(x))), Tanh), "act.tanh()", "AbsorbingTanh"),
    "wrapped and shared": (
        lambda: behind(lambda m, x: m.act(m.act(m.norm(m.up(x)))), Tanh),
        "act.tanh()",
        "AbsorbingTanh",
    ),
    "function": (lambda: behind(lambda m, x: torch.tanh(torch.tanh(m.norm(m.up(x))))), "tanh()", "FollowingBlock"),
    "method": (lambda: behind(lambda m, x: m.norm(m.up(x)).tanh_().tanh()), "tanh()", "FollowingBlock"),
}


@pytest.mark.parametrize("case", FOLLOWERS)
class TestFollowers:
    @pytest.fixture
    def both(self, library, case, kernels):
        make, name, kind = FOLLOWERS[case]
        model = make()
        original = copy.deepcopy(model)
        (row,) = replace(model, library, [data()])
        assert (row.absorbed, row.left, row.reason) == (("norm", name), (), "")
        assert kind in (type(model).__name__, type(model.act).__name__)
        kernels.clear()
        return model, original

    def test_swapped(self, both, kernels):
        for seed in (5, 6):
            assert_same(*both, data(seed=seed))
        assert kernels == ["call", "call"]

    def test_elsewhere(self, both):
        """Where the mark would be lost, or not be seen, PyTorch computes."""
        model, original = both
        assert_same(torch.compile(model, fullgraph=True, backend="aot_eager"), original)
        assert_same(torch.fx.symbolic_trace(model), original)
        torch.testing.assert_close(model(data()), original(data()))  # which records gradients
        for part in ("norm", "act"):
            for each in both:
                getattr(each, part).train()
            assert_same(*both)
            for each in both:
                each.eval()
        hooks = [each.norm.register_forward_hook(lambda _, __, output: output + 0.5) for each in both]
        assert_same(*both)
        for hook in hooks:
            hook.remove()
        assert_same(copy.deepcopy(model), original)

    def test_one_that_is_left_later(self, both, library, monkeypatch):
        """Everybody is what they were."""
        _, original = both
        model = copy.deepcopy(original)
        monkeypatch.setattr(td.Layer, "__call__", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            td.torch.replace(model, library, [data()])
        assert [type(part) for part in model.modules()] == [type(part) for part in original.modules()]
        assert_same(model, original)


def test_what_does_not_follow(library):
    """A gate that is written out, and a scale, are no single function."""
    for body in (lambda m, x: (y := m.up(x)) * torch.sigmoid(y), lambda m, x: torch.tanh(2 * m.up(x))):
        model = behind(body)
        original = copy.deepcopy(model)
        (row,) = replace(model, library, [data()])
        assert (row.absorbed, row.reason) == ((), "")
        assert_same(model, original)


class CallsAndFollows(Block):
    """A module with a function's call, and an activation behind a layer, in one forward."""

    def __init__(self):
        super().__init__(None)
        self.other = nn.Parameter(torch.randn(3, 4, 3, 3))

    def forward(self, x):
        return torch.tanh(self.norm(self.up(x))) + F.conv_transpose2d(x, self.other, stride=2)


def test_calls_and_activations_in_one_module(library):
    model = seeded(CallsAndFollows())
    original = copy.deepcopy(model)
    report = replace(model, library, [data()])
    assert [row.absorbed for row in report] == [("norm", "tanh()"), ()]
    assert type(model).__name__ == "CallingFollowingCallsAndFollows"
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (model, copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert type(other) is type(model)
        assert_same(other, original)


def test_one_follower_of_two_layers(tmp_path):
    model = seeded(nn.Sequential(nn.ConvTranspose1d(2, 2, 3), act := nn.Tanh(), nn.ConvTranspose1d(2, 2, 3), act))
    original = copy.deepcopy(model)
    x = data((2, 2, 5))
    made.export(tmp_path, td.torch.problems(model, [x]))
    report = replace(model, td.load(tmp_path), [x])
    assert [row.absorbed for row in report] == [("1",), ("1",)]
    assert_same(model, original, x)


# ---- examples ----


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Block()

    def forward(self, image, *, scale=1.0):
        return self.block(scale * image)


def test_keyword_arguments_and_several_examples(library):
    model = seeded(Scaled())
    original = copy.deepcopy(model)
    examples = {"image": data(), "scale": 2.0}, [data()[:1]]
    assert [problem.batch for problem in td.torch.problems(model, *examples)] == [2, 1]
    (row,) = replace(model, library, *examples, fallback="torch")
    assert ([problem.batch for problem in row.missing], row.absorbed, row.reason) == (
        [1],
        ("block.norm", "block.act"),
        "",
    )
    with torch.no_grad():
        torch.testing.assert_close(model(data(), scale=3.0), original(data(), scale=3.0))
    with pytest.raises(td.SourceError, match="inputs='Tensor': must be a sequence of the model's arguments"):
        td.torch.problems(original, data())
    with pytest.raises(td.SourceError, match=r"inputs=\(\): must be at least one example"):
        td.torch.problems(original)


def test_dynamic_extents(tmp_path, kernels):
    model = seeded(Block())
    original = copy.deepcopy(model)
    (anything,) = td.torch.problems(model, [data()], dynamic=(0, 1, 2))
    assert anything.data_form == ("any", 3, "any", "any")
    assert (anything.epilogue, anything.buckets) == (td.Epilogue(True, "relu"), ())
    examples = [[data((1, 3, 4, width))] for width in (5, 9, 6)]
    (some,) = td.torch.problems(model, *examples, dynamic=(0, 2))
    assert (some.data_form, some.buckets) == (("any", 3, 4, "any"), ((), (5, 6, 9)))
    made.export(tmp_path, [some])
    (row,) = replace(model, td.load(tmp_path), *examples)
    assert row.missing == ()
    kernels.clear()
    for width in range(3, 20):
        assert_same(model, original, data((2, 3, 4, width)))
    assert kernels == ["call"] * 17
    for axis in (-1, 3):
        with pytest.raises(td.ProblemError, match="dynamic"):
            td.torch.problems(original, [data()], dynamic=(axis,))


class Twofold(nn.Module):
    """Two layers, of which the second sees twice the extents of the first; its batch is always 1."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.ConvTranspose1d(2, 2, 2, 2), nn.ConvTranspose1d(2, 2, 3)

    def forward(self, x):
        return self.second(self.first(x)[:1])


def test_dynamic_shapes_of_an_export():
    frames = torch.export.Dim("frames", min=4, max=256)
    model = seeded(Twofold())
    examples = [data((3, 2, 8))]
    first, second = td.torch.problems(model, examples, dynamic={"x": {0: torch.export.Dim("batch"), 2: frames}})
    assert (first.data_form, first.buckets) == (("any", 2, "any"), ((4, 32, 256),))
    assert (second.data_form, second.buckets) == ((1, 2, "any"), ((8, 64, 512),))
    first, second = td.torch.problems(model, examples, dynamic=({2: torch.export.Dim.DYNAMIC},))
    assert (first.data_form, first.buckets) == ((3, 2, "any"), ())
    with pytest.raises(td.SourceError, match=r"must let torch.export take the model"):
        td.torch.problems(model, examples, dynamic={"y": {2: frames}})
    with pytest.raises(td.SourceError, match="must be one example where dynamic has the shapes"):
        td.torch.problems(model, examples, examples, dynamic={"x": {2: frames}})


@pytest.mark.parametrize("axes", [(1,), (1, 2)])
def test_many_examples_give_a_bounded_number_of_buckets(axes):
    model = seeded(Block())
    examples = [[data((1, 3, extent, extent if 2 in axes else 5))] for extent in range(2, 40)]
    for problem in td.torch.problems(model, *examples, dynamic=axes):
        assert len(problem.variants) <= 16
        assert problem.buckets[0][-1] == 39


# ---- what is measured ----


@pytest.fixture
def costs(monkeypatch):
    """Tell what calls of PyTorch's layers and of artifacts cost, in seconds of a clock that nothing else moves."""
    from tvm_deconv.torch import measure

    clock = [0.0]
    monkeypatch.setattr(measure, "_now", lambda: clock[0])
    monkeypatch.setattr(measure, "_MOST", 6)

    def spend(kind, name, seconds):
        method = getattr(kind, name)

        def spending(*rest, **how):
            clock[0] += seconds
            return method(*rest, **how)

        monkeypatch.setattr(kind, name, spending)

    def tell(torch, artifacts):
        spend(nn.ConvTranspose2d, "forward", torch)
        spend(td.Layer, "__call__", artifacts)
        spend(nn.Conv2d, "forward", 8.0)
        return clock

    return tell


def test_a_layer_that_gets_slower_is_left(library, costs):
    model = seeded(Around())
    original = copy.deepcopy(model)
    costs(torch=4.0, artifacts=5.0)
    report = td.torch.replace(model, library, [data()])
    assert [(row.reason, row.gain, row.share) for row in report] == [("artifacts make it no faster", 0.8, 0.2)]
    assert (report.swapped, report.gain, report.expected) == ([], 1.0, 1.0)
    assert [type(part) for part in model.modules()] == [type(part) for part in original.modules()]
    assert not any("forward" in vars(part) or "_fusion" in vars(part) for part in model.modules())
    assert_same(model, original)


def test_what_is_measured_is_reported(library, costs):
    model = seeded(Around())
    costs(torch=4.0, artifacts=1.0)
    report = td.torch.replace(model, library, [data()])
    (row,) = report.swapped
    assert (row.gain, row.share) == (4.0, 0.2)
    assert report.gain == report.expected == pytest.approx(20 / 17)
    lines = str(report).splitlines()
    assert lines[1].split()[:6] == ["block.up", "ConvTranspose2d", "yes", "20.0", "%", "4.00"]
    assert lines[-1] == "the model: 1.18 times as fast, 1.18 expected"
    assert type(model.block.up).__name__ == "CompiledConvTranspose2d"
    assert not any("forward" in vars(part) for part in model.modules())


def test_a_model_that_gets_slower_is_left(library, costs):
    """Although its layers do not."""
    model = seeded(Around())
    clock = costs(torch=4.0, artifacts=1.0)

    def after(*_):
        up = model.block.up
        clock[0] += 0.0 if type(up) is nn.ConvTranspose2d or up._fusion.switched_off else 9.0

    model.last.register_forward_hook(after)
    report = td.torch.replace(model, library, [data()])
    assert [row.reason for row in report] == ["artifacts make the model slower"]
    assert (report.gain, type(model.block.up)) == (1.0, nn.ConvTranspose2d)


def test_a_layer_inside_a_module_with_calls(library, costs):
    """Its time is its own, not that of the module as well."""
    model = seeded(with_up(nn.ConvTranspose2d))
    model.other = nn.Parameter(torch.randn(3, 4, 3, 3))
    model.body = lambda m, x: m.up(x) + F.conv_transpose2d(x, m.other, stride=2)
    clock = costs(torch=4.0, artifacts=1.0)
    model.register_forward_pre_hook(lambda *_: clock.__setitem__(0, clock[0] + 4.0))
    plain, called = td.torch.replace(model, library, [data()])
    assert (plain.name, plain.share, plain.gain) == ("up", 0.5, 4.0)
    assert (called.name, called.share, called.reason) == ("conv_transpose2d()", 0.0, "artifacts make it no faster")


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Block(), Block()

    def forward(self, x):
        return self.first(x), self.second(x)


NO_FASTER = "artifacts make the compiled model no faster"


@pytest.mark.parametrize(
    ("lost", "reasons", "gain"),
    [
        ({}, ["", ""], 5.5),
        ({"second": 9.5}, ["", NO_FASTER], 11 / 6),
        ({"first": 9.5, "second": 9.5}, [NO_FASTER, NO_FASTER], 1.0),
    ],
)
def test_a_compiled_model(library, costs, monkeypatch, lost, reasons, gain):
    """In which artifacts lose time that they do not in the model as it is, where the second layer gains less."""
    model = seeded(Two())
    clock = costs(torch=5.0, artifacts=1.0)
    norm = nn.BatchNorm2d.forward

    def spending(part, x):
        clock[0] += 1.0 if part is model.first.norm else 0.0
        return norm(part, x)

    def compiled(given, **_):
        def call(*arguments):
            output = given(*arguments)
            clock[0] += sum(seconds for name, seconds in lost.items() if not _is_off(getattr(given, name).up))
            return output

        return call

    monkeypatch.setattr(nn.BatchNorm2d, "forward", spending)
    monkeypatch.setattr(torch, "compile", compiled)
    report = td.torch.replace(model, library, [data()], compiled=True)
    assert [row.reason for row in report] == reasons
    assert [_is_off(each.up) for each in (model.first, model.second)] == [bool(reason) for reason in reasons]
    assert report.gain == pytest.approx(gain)


def test_every_choice_of_layers_is_compiled(library, costs, monkeypatch):
    """Past its limit, Dynamo would run the model as it is."""
    clock, compile, ran = costs(torch=5.0, artifacts=1.0), torch.compile, []

    def backend(graph, _):
        def program(*arguments):
            ran.append("program")
            clock[0] += 1.0
            return graph(*arguments)

        return program

    def compiled(model, **how):
        made = compile(model, backend=backend, **how)
        return lambda *arguments: ran.append("call") or made(*arguments)

    monkeypatch.setattr(torch, "compile", compiled)
    with torch._dynamo.config.patch(cache_size_limit=2):
        td.torch.replace(seeded(Two()), library, [data()], compiled=True)
        assert torch._dynamo.config.cache_size_limit == 2
    assert ran == ["call", "program"] * (len(ran) // 2)


def _is_off(up):
    return type(up) is nn.ConvTranspose2d or up._fusion.switched_off


def test_what_compiled_programs_leave_to_pytorch(library, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda model, **_: model)
    model = seeded(with_up(nn.ConvTranspose2d))
    model.body = lambda m, x: F.relu(m.up(x))
    report = td.torch.replace(model, library, [data()], compiled=True)
    assert [row.reason for row in report] == ["PyTorch computes it in compiled programs"]
    assert type(model.up) is nn.ConvTranspose2d


def test_a_run_that_fails_leaves_the_model(library, monkeypatch):
    model = seeded(Block())
    monkeypatch.setattr(td.Layer, "__call__", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        td.torch.replace(model, library, [data()])
    assert [type(part) for part in (model.up, model.norm, model.act)] == [nn.ConvTranspose2d, nn.BatchNorm2d, nn.ReLU]


# ---- copies, files, compiled and exported ----


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_other_forms_of_programs(swapped):
    """TorchScript's traces and torch.fx have the operator, ONNX what it was made of."""
    model, original = swapped
    assert_same(torch.fx.symbolic_trace(model), original)
    assert_same(torch.jit.trace(model, (data(),)), original)
    with pytest.raises(td.SourceError, match="must not be swapped: script the model before replace"):
        torch.jit.script(model)
    file = io.BytesIO()
    torch.onnx.export(model, (data(),), file, dynamo=False)
    nodes = pytest.importorskip("onnx").load_model_from_string(file.getvalue()).graph.node
    assert [node.op_type for node in nodes][-3:] == ["ConvTranspose", "BatchNormalization", "Relu"]


def test_a_copy_is_a_model_of_its_own(swapped, kernels):
    model, original = swapped
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.norm.weight.mul_(2)
    assert_same(model, original)
    assert_same(other, other.train().eval() and nn.Sequential(*original_parts(other)).eval())
    assert kernels.count("call") == 2


def original_parts(model):
    """The modules of a swapped model as they were."""
    parts = copy.deepcopy([model.up, model.norm, model.act])
    for part in parts:
        part.__class__ = type(part).__bases__[1]
    return parts


def test_a_pickled_model_wants_its_artifacts(swapped, library, tmp_path, monkeypatch):
    model, original = swapped
    file = io.BytesIO()
    torch.save(model.up, file)
    monkeypatch.setattr(packed, "libraries", {})  # as in another process
    file.seek(0)
    read = torch.load(file, weights_only=False)
    with torch.no_grad():
        torch.testing.assert_close(read(data()), original(data()))
    made.export(tmp_path, [made.PLAIN])
    monkeypatch.setattr(packed, "libraries", {})
    read._fusion.library = read._fusion.library.replace(str(library.root), str(tmp_path))
    packed._packed.clear()
    read._fusion._packed = None
    with pytest.raises(td.IntegrityError, match="digest="):
        read(data())


def test_compiled(swapped, kernels):
    model, original = swapped
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_same(compiled, original)
    with torch.no_grad():
        for each in swapped:
            each.norm.weight.mul_(2)
    assert_same(compiled, original)
    assert kernels == ["call", "bind", "call"]
    for each in swapped:
        each.train()
    assert_same(compiled, original)


def test_exported(swapped):
    model, original = swapped
    program = torch.export.export(model, (data(),))
    assert sum("tvm_deconv" in str(node.target) for node in program.graph.nodes) == 1
    assert_same(program.module(), original)


def test_exported_for_any_batch(library):
    model = seeded(Block())
    original = copy.deepcopy(model)
    replace(model, library, [data()], fallback="torch")
    program = torch.export.export(model, (data(),), dynamic_shapes=({0: torch.export.Dim("batch", min=1, max=8)},))
    for batch in (1, 2, 5):
        assert_same(program.module(), original, data((batch, *X[1:])))


# ---- what is not swapped, or not absorbed ----


def test_no_artifact(library):
    model = seeded(Block())
    x = data((3, *X[1:]))
    report = replace(model, library, [x])
    assert type(model.up) is nn.ConvTranspose2d
    assert type(model.norm) is nn.BatchNorm2d
    assert report.missing == td.torch.problems(model, [x])
    assert report[0].reason == f"no artifact serves {report.missing[0].key}"
    assert replace(model, library, [x], fallback="torch").swapped == []


class Twice(nn.Module):
    """A layer that runs for two batches, of which one has an artifact."""

    def __init__(self):
        super().__init__()
        self.block = Block()

    def forward(self, x):
        return self.block(x), self.block(x[:1])


def test_pytorch_computes_the_rest_where_it_may(library, kernels):
    model = seeded(Twice())
    original = copy.deepcopy(model)
    (row,) = replace(model, library, [data()])
    assert [problem.batch for problem in row.problems] == [2, 1]
    assert [problem.batch for problem in row.missing] == [1]
    assert row.reason.startswith("no artifact serves n1-")
    (row,) = replace(model, library, [data()], fallback="torch")
    assert (row.reason, row.absorbed, [problem.batch for problem in row.missing]) == (
        "",
        ("block.norm", "block.act"),
        [1],
    )
    assert_same(model, original)
    kernels.clear()
    assert_same(model, original)  # what has no artifact is not sought again
    assert kernels == ["call"]
    assert_same(model.block, original.block, data((5, *X[1:])))
    with pytest.raises(td.ProblemError, match="fallback='reference': must be one of torch"):
        replace(model, library, [data()], fallback="reference")


def test_another_shape_without_a_fallback(swapped):
    with pytest.raises(td.NoArtifactError, match="batch"):
        swapped[0](data((1, *X[1:])))


def hooked(model, part):
    getattr(model, part).register_forward_hook(lambda *_: None)
    return model


def with_up(up, *arguments, **keywords):
    model = Block(lambda m, x: m.up(x))
    model.up = up(3, 4, 3, *arguments, stride=2, **keywords)
    return model


LIMITS = {
    "no activation": (lambda: Block(lambda m, x: F.selu(m.norm(m.up(x)))), ("norm",), (), ""),
    "scaled": (lambda: Block(lambda m, x: m.act(m.up(x) * m.norm.weight.view(4, 1, 1))), (), ("mul()", "act"), ""),
    "hook on the layer": (lambda: hooked(Block(), "up"), (), ("norm", "act"), ""),
    "hook behind it": (lambda: hooked(Block(), "act"), ("norm",), ("act",), ""),
    "autocast": (
        lambda: Block(lambda m, x: torch.autocast("cpu", dtype=torch.bfloat16)(m.up)(x)),
        (),
        (),
        "runs in bfloat16 with a filter of float32: convert the module instead of autocast",
    ),
}


@pytest.mark.parametrize("case", LIMITS)
def test_limits(library, case):
    make, absorbed, left, reason = LIMITS[case]
    model = seeded(make())
    original = copy.deepcopy(model)
    row = replace(model, library, [data()])[0]
    assert (row.absorbed, row.left, row.reason) == (absorbed, left, reason)
    assert_same(model, original)


def test_what_did_not_run(library):
    model = seeded(Block(lambda m, x: m.norm(x[:, :1].expand(-1, 4, -1, -1))))
    (row,) = replace(model, library, [data()])
    assert (row.name, row.problems, row.reason) == ("up", (), "did not run")


def test_twice_changes_nothing(swapped, library):
    model, original = swapped
    (row,) = replace(model, library, [data()])
    assert (row.name, row.operator) == ("up", "CompiledConvTranspose2d")
    assert row.reason == "is computed by an artifact already"
    assert_same(model, original)


def test_nothing_is_swapped_where_loading_fails(directory, tmp_path):
    model = seeded(nn.ModuleDict({"first": Block(), "second": Block(lambda m, x: m.up(x))}))
    model.forward = lambda x: (model["first"](x), model["second"](x))
    for path in directory.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    alone = td.torch.problems(model, [data()])[1]
    made.file(tmp_path, alone, ".so").write_bytes(b"")
    with pytest.raises(td.IntegrityError):
        replace(model, td.load(tmp_path), [data()])
    assert type(model["first"].up) is nn.ConvTranspose2d


def test_output_size_and_a_single_image(library, swapped):
    model = seeded(with_up(nn.ConvTranspose2d))
    original = copy.deepcopy(model)
    (row,) = replace(model, library, [data()], fallback="torch")
    assert not row.reason
    with torch.no_grad():
        for size in ((9, 11), (10, 12)):
            torch.testing.assert_close(model.up(data(), output_size=size), original.up(data(), output_size=size))
        torch.testing.assert_close(model.up(data()[0]), original.up(data()[0]))
    with pytest.raises(td.SourceError, match="training=True: must be False"):
        replace(swapped[1].train(), library, [data()])
