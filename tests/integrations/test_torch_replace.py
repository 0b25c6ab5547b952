"""PyTorch: layers of a model that artifacts compute, next to the model itself."""

import copy
import io

import pytest
from support import artifacts as made

import tvm_deconv as td

torch = pytest.importorskip("torch")
nn, F = torch.nn, torch.nn.functional

X = (2, 3, 4, 5)


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
    """Artifacts for `Block` with batch 2, and for its layer alone and with a bias, and nothing else."""
    directory = tmp_path_factory.mktemp("replace")
    (whole,) = td.torch.problems(seeded(Block()), [data()])
    problems = [whole, *(whole.replace(epilogue=td.Epilogue(bias)) for bias in (False, True))]
    made.export(directory, problems)
    return directory


@pytest.fixture
def library(directory):
    return td.load(directory)


@pytest.fixture
def swapped(library):
    """A model of which everything is swapped, and the model that it was."""
    model = seeded(Block())
    original = copy.deepcopy(model)
    (row,) = td.torch.replace(model, library, [data()])
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
    monkeypatch.setattr(td.Layer, "__call__", lambda self, *rest: seen.append("call") or call(self, *rest))
    monkeypatch.setattr(td.Library, "bind", lambda self, *rest: seen.append("bind") or bind(self, *rest))
    return seen


def test_swapped(library, kernels):
    model = seeded(Block())
    original, names = copy.deepcopy(model), list(model.state_dict())
    report = td.torch.replace(model, library, [data()])
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
        "layer  operator         swapped  absorbed  left  why not",
        "up     ConvTranspose2d  yes      norm act",
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
    (row,) = td.torch.replace(model, td.load(tmp_path), [x])
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
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_channels_last(tmp_path, kernels):
    model = seeded(Block()).to(memory_format=torch.channels_last)
    x = data().contiguous(memory_format=torch.channels_last)
    (problem,) = td.torch.problems(model, [x])
    assert (problem.data_format, problem.data_shape) == ("NXC", (2, 4, 5, 3))
    original = copy.deepcopy(model)
    made.export(tmp_path, [problem])
    (row,) = td.torch.replace(model, td.load(tmp_path), [x])
    assert row.problems == (problem,)
    kernels.clear()
    assert_same(model, original, x)
    assert kernels == ["call"]
    assert model(x).is_contiguous(memory_format=torch.channels_last)
    with pytest.raises(td.NoArtifactError, match="NCX"):
        model(data())


# ---- copies, files, compiled and exported ----


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
    monkeypatch.setattr(td.torch.operator, "libraries", {})  # as in another process
    file.seek(0)
    read = torch.load(file, weights_only=False)
    with torch.no_grad():
        torch.testing.assert_close(read(data()), original(data()))
    made.export(tmp_path, [made.PLAIN])
    monkeypatch.setattr(td.torch.operator, "libraries", {})
    read._fusion.library = read._fusion.library.replace(str(library.root), str(tmp_path))
    td.torch.operator.held_layers.clear()
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
    td.torch.replace(model, library, [data()], fallback="torch")
    program = torch.export.export(model, (data(),), dynamic_shapes=({0: torch.export.Dim("batch", min=1, max=8)},))
    for batch in (1, 2, 5):
        assert_same(program.module(), original, data((batch, *X[1:])))


# ---- what is not swapped, or not absorbed ----


def test_no_artifact(library):
    model = seeded(Block())
    x = data((3, *X[1:]))
    report = td.torch.replace(model, library, [x])
    assert type(model.up) is nn.ConvTranspose2d
    assert type(model.norm) is nn.BatchNorm2d
    assert report.missing == td.torch.problems(model, [x])
    assert report[0].reason == f"no artifact serves {report.missing[0].key}"
    assert td.torch.replace(model, library, [x], fallback="torch").swapped == []


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
    (row,) = td.torch.replace(model, library, [data()])
    assert [problem.batch for problem in row.problems] == [2, 1]
    assert [problem.batch for problem in row.missing] == [1]
    assert row.reason.startswith("no artifact serves n1-")
    (row,) = td.torch.replace(model, library, [data()], fallback="torch")
    assert (row.reason, row.absorbed, [problem.batch for problem in row.missing]) == (
        "",
        ("block.norm", "block.act"),
        [1],
    )
    kernels.clear()
    assert_same(model, original)
    assert kernels == ["call"]
    assert_same(model.block, original.block, data((5, *X[1:])))
    with pytest.raises(td.ProblemError, match="fallback='reference': must be one of torch"):
        td.torch.replace(model, library, [data()], fallback="reference")


def test_another_shape_without_a_fallback(swapped):
    with pytest.raises(td.NoArtifactError, match="batch"):
        swapped[0](data((1, *X[1:])))


class Other(nn.ConvTranspose2d):
    pass


def hooked(model, part):
    getattr(model, part).register_forward_hook(lambda *_: None)
    return model


def with_up(up, *arguments, **keywords):
    model = Block(lambda m, x: m.up(x))
    model.up = up(3, 4, 3, *arguments, stride=2, **keywords)
    return model


def shared():
    act = nn.ReLU()
    return nn.Sequential(nn.ConvTranspose2d(3, 4, 3, stride=2), act, nn.Identity(), act)


LIMITS = {
    "function": (lambda: Block(lambda m, x: F.relu(m.norm(m.up(x)))), ("norm",), ("relu()",), ""),
    "scaled": (lambda: Block(lambda m, x: m.act(m.up(x) * m.norm.weight.view(4, 1, 1))), (), ("mul()", "act"), ""),
    "shared": (shared, (), ("1",), ""),
    "hook on the layer": (lambda: hooked(Block(), "up"), (), ("norm", "act"), ""),
    "hook behind it": (lambda: hooked(Block(), "act"), ("norm",), ("act",), ""),
    "own class": (lambda: with_up(Other), (), (), "Other is a class of its own"),
    "computed filter": (
        lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.ConvTranspose2d(3, 4, 3))),
        (),
        (),
        "its filter is computed on every call: make it a parameter, with remove_parametrizations say",
    ),
    "call": (
        lambda: Block(lambda m, x: F.conv_transpose2d(x, m.up.weight)),
        (),
        (),
        "is the call of a function: call tvm_deconv.torch.conv_transpose there",
    ),
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
    row = td.torch.replace(model, library, [data()])[0]
    assert (row.absorbed, row.left, row.reason) == (absorbed, left, reason)
    assert_same(model, original)


def test_what_did_not_run(library):
    model = seeded(Block(lambda m, x: m.norm(x[:, :1].expand(-1, 4, -1, -1))))
    (row,) = td.torch.replace(model, library, [data()])
    assert (row.name, row.problems, row.reason) == ("up", (), "did not run")


def test_twice_changes_nothing(swapped, library):
    model, original = swapped
    assert td.torch.replace(model, library, [data()]).swapped == []
    assert_same(model, original)


def test_nothing_is_swapped_where_loading_fails(directory, tmp_path):
    model = seeded(nn.ModuleDict({"first": Block(), "second": Block(lambda m, x: m.up(x))}))
    model.forward = lambda x: (model["first"](x), model["second"](x))
    for path in directory.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    alone = td.torch.problems(model, [data()])[1]
    made.file(tmp_path, alone, ".so").write_bytes(b"")
    with pytest.raises(td.IntegrityError):
        td.torch.replace(model, td.load(tmp_path), [data()])
    assert type(model["first"].up) is nn.ConvTranspose2d


def test_output_size_and_a_single_image(library, swapped):
    model = seeded(with_up(nn.ConvTranspose2d))
    original = copy.deepcopy(model)
    (row,) = td.torch.replace(model, library, [data()], fallback="torch")
    assert not row.reason
    with torch.no_grad():
        for size in ((9, 11), (10, 12)):
            torch.testing.assert_close(model.up(data(), output_size=size), original.up(data(), output_size=size))
        torch.testing.assert_close(model.up(data()[0]), original.up(data()[0]))
    with pytest.raises(td.SourceError, match="training=True: must be False"):
        td.torch.replace(swapped[1].train(), library, [data()])
