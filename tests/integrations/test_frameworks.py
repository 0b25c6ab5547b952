"""docs/frameworks.md: its code runs as it is printed, and computes what the framework computes."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support import artifacts as made
from support.operators import intercept
from support.tolerances import assert_close

import tvm_deconv as td

ROOT = Path(__file__).parents[2]
SECTIONS = dict(
    part.split("\n", 1) for part in re.split(r"^## ", (ROOT / "docs/frameworks.md").read_text(), flags=re.M)[1:]
)


def code(title):
    return "".join(re.findall(r"^```python\n(.*?)^```", SECTIONS[title], flags=re.M | re.S))


@pytest.fixture
def run(export_once, tmp_path, monkeypatch):
    """Runs the blocks of a section, in a folder with the examples, and returns the names they leave."""

    def build(problems, target, output):
        """td.compile in this process, which saves the seconds that others take to start; test_jax takes them."""
        assert target == "native"
        Path(output).mkdir()
        export_once(Path(output), problems)

    def section(title, package):
        pytest.importorskip(package)
        monkeypatch.setattr(td, "compile", build)
        (tmp_path / "examples").symlink_to(ROOT / "examples")
        monkeypatch.chdir(tmp_path)
        names = {}
        exec(compile(code(title), title, "exec"), names)
        return names

    return section


@pytest.fixture
def calls(monkeypatch):
    """The layers that are called, from Python and by operators."""
    seen, call = [], td.Layer.__call__
    monkeypatch.setattr(
        td.Layer, "__call__", lambda self, *rest, **out: seen.append(self.problem) or call(self, *rest, **out)
    )
    intercept(monkeypatch, lambda layer, deconv, *_: seen.append(layer.problem) or deconv())
    return seen


@pytest.fixture(params=["in C++", "in Python"])
def how(request, monkeypatch):
    """Lets OpenVINO call layers by the operator in C++, or by operations in Python."""
    operator = importlib.import_module("tvm_deconv.openvino.operator").OPERATOR
    with operator.makers({}):  # loads it
        assert operator._library is not None
    if request.param == "in Python":
        monkeypatch.setattr(operator, "_library", None)


def assert_same(y, expected):
    assert_close(np.asarray(y), np.asarray(expected))


def test_every_section_is_run():
    assert [title for title, text in SECTIONS.items() if "```" in text] == [
        "PyTorch, a model", "PyTorch, one call", "JAX", "ONNX Runtime", "OpenVINO",
    ]  # fmt: skip


def test_a_model_of_pytorch(run, calls, monkeypatch):
    nn = pytest.importorskip("torch").nn
    measure = importlib.import_module("tvm_deconv.torch.measure")
    clock = [0.0]  # which moves as if artifacts were twice as fast
    monkeypatch.setattr(measure, "_now", lambda: clock[0] + 2 * len(calls))
    for kind, seconds in ((nn.ConvTranspose2d, 4), (nn.Conv2d, 1)):

        def spend(*rest, forward=kind.forward, seconds=seconds):
            clock[0] += seconds
            return forward(*rest)

        monkeypatch.setattr(kind, "forward", spend)
    names = run("PyTorch, a model", "torch")
    assert_same(names["y"], names["expected"])
    assert calls
    printed = re.findall(r"^    (.*)$", SECTIONS["PyTorch, a model"].rsplit("```", 1)[1], flags=re.M)
    assert str(names["report"]).splitlines() == printed


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # in PyTorch's own compiler
def test_one_call_of_pytorch(run, calls):
    names = run("PyTorch, one call", "torch")
    assert_same(names["y"], names["expected"])
    assert len(calls) == 1


JAX_CHECKS = """
from support.tolerances import assert_close

data = np.asarray(x)
expected = np.tanh(td.reference(p, data, weight))
for got in (y, eager, jax.vmap(decode)(np.stack([data, data]))[1]):
    assert isinstance(got, jax.Array)
    assert_close(np.asarray(got), expected)
assert "ffi_call" in str(jax.make_jaxpr(decode)(x))
"""


def test_jax(tmp_path):
    """In another process: once its threads run, jax warns at every fork."""
    if importlib.util.find_spec("jax") is None:
        pytest.skip("could not import 'jax'")
    environment = os.environ | {"PYTHONPATH": f"{Path(td.__file__).parents[1]}:{ROOT / 'tests'}"}
    command = [sys.executable, "-c", code("JAX") + JAX_CHECKS]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr


def test_onnx_runtime(run, monkeypatch):
    pytest.importorskip("onnxruntime")
    measure = importlib.import_module("tvm_deconv.onnxruntime.measure")
    monkeypatch.setattr(measure, "gain", lambda *_: 2.0)
    names = run("ONNX Runtime", "onnxruntime")
    assert_same(names["y"], names["expected"])
    assert len(names["session"].layers) == 4
    assert names["session"].left == {}


def test_openvino(run, calls, monkeypatch):
    pytest.importorskip("openvino")
    integration = importlib.import_module("tvm_deconv.openvino")
    monkeypatch.setattr(integration._Timing, "_gain", lambda *_: 2.0)
    names = run("OpenVINO", "openvino")
    assert_same(names["y"], names["expected"])
    assert len(set(calls[-4:])) == len(names["operations"]) == 4


def test_openvino_leaves_layers_whose_names_are_not_theirs_alone(tmp_path):
    ov = pytest.importorskip("openvino")
    from openvino import opset13

    from tvm_deconv.frontends import scan
    from tvm_deconv.openvino import replace

    rng = np.random.default_rng(4)

    def up(data):
        filter = opset13.constant(rng.standard_normal((3, 3, 2, 2), np.float32))
        return opset13.convolution_backprop_data(data, filter, [2, 2], None, [0, 0], [0, 0], [1, 1])

    def named(node, name):
        node.set_friendly_name(name)
        return node

    x = opset13.parameter([1, 3, 5, 6], np.float32)
    # The second "up" is "up_2" to a scan.
    first = named(up(named(opset13.negative(x), "up_2")), "up")
    second = named(opset13.negative(named(opset13.relu(named(up(first), "up")), "act")), "act")
    third = named(opset13.relu(named(up(second), "alone")), "after")
    path = tmp_path / "model.xml"
    ov.save_model(ov.Model([third, first], [x], "m"), path, compress_to_fp16=False)
    problems = [layer.problem for layer in scan(path)]
    made.export(tmp_path, dict.fromkeys(problems))
    exact = {"INFERENCE_PRECISION_HINT": "f32"}
    model = ov.Core().read_model(path)
    operations = replace(model, path, td.load(tmp_path), measure=False)
    assert list(operations) == ["alone"]
    assert list(operations.left) == ["up", "up_2"]
    assert all("shares its name" in reason for reason in operations.left.values())
    data = [rng.standard_normal((1, 3, 5, 6), np.float32)]
    expected = ov.compile_model(path, "CPU", exact)(data).values()
    for got, wanted in zip(ov.compile_model(model, "CPU", exact)(data).values(), expected, strict=True):
        assert_same(got, wanted)


@pytest.mark.usefixtures("how")
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("shape", [[-1, 3, 5, 6], [1, 3, -1, -1], [-1, -1, -1, -1]])
def test_openvino_with_free_extents(shape, half, monkeypatch, tmp_path):
    ov = pytest.importorskip("openvino")
    from openvino import opset13

    from tvm_deconv.frontends import scan
    from tvm_deconv.openvino import replace

    rng = np.random.default_rng(4)
    x = opset13.parameter(shape, np.float32)
    filter = opset13.constant(rng.standard_normal((3, 4, 2, 2), np.float32))
    up = opset13.convolution_backprop_data(opset13.negative(x), filter, [2, 2], None, [0, 0], [0, 0], [1, 1])
    path = tmp_path / "model.xml"
    ov.save_model(ov.Model([opset13.exp(opset13.relu(up))], [x], "m"), path, compress_to_fp16=half)
    (layer,) = scan(path)
    made.export(tmp_path, [layer.problem])
    exact = {"INFERENCE_PRECISION_HINT": "f32"}
    plain, model = ov.Core().read_model(path), ov.Core().read_model(path)
    operations = replace(model, path, td.load(tmp_path))  # not timed: it has free extents
    assert len(operations) == 1
    assert model.output(0).partial_shape == plain.output(0).partial_shape
    ours, theirs = ov.compile_model(model, "CPU", exact), ov.compile_model(plain, "CPU", exact)
    for call in ((1, 3, 5, 6), (4, 3, 5, 6), (1, 3, 30, 9), (2, 3, 1, 70)):
        if all(extent in (-1, given) for extent, given in zip(shape, call, strict=True)):
            data = [rng.standard_normal(call, np.float32)]
            assert_same(ours(data)[0], theirs(data)[0])
    monkeypatch.setattr(td.Problem, "at", lambda *_: 1 / 0)  # which costs as much as a small layer: once for a shape
    assert_same(ours(data)[0], theirs(data)[0])


@pytest.fixture(scope="module")
def two_layers(tmp_path_factory):
    """The path of a model for OpenVINO with the layers first and second, which have artifacts in its folder."""
    ov = pytest.importorskip("openvino")
    from openvino import opset13

    from tvm_deconv.frontends import scan

    rng = np.random.default_rng(4)
    x = made_by = opset13.parameter([1, 3, 5, 6], np.float32)
    for name in ("first", "second"):
        filter = opset13.constant(rng.standard_normal((3, 3, 2, 2), np.float32))
        made_by = opset13.convolution_backprop_data(made_by, filter, [2, 2], None, [0, 0], [0, 0], [1, 1])
        made_by.set_friendly_name(name)
    path = tmp_path_factory.mktemp("two") / "model.xml"
    ov.save_model(ov.Model([made_by], [x], "m"), path, compress_to_fp16=False)
    made.export(path.parent, [layer.problem for layer in scan(path)])
    return path


@pytest.mark.parametrize(("gains", "count"), [([1.1], 2), ([0.9, 1.1], 1), ([1.0, 0.9], 0)])
def test_openvino_leaves_layers_until_the_model_gains(gains, count, two_layers, calls, monkeypatch):
    import openvino as ov

    from tvm_deconv import openvino as integration

    left, data = iter(gains), [np.random.default_rng(5).standard_normal((1, 3, 5, 6), np.float32)]

    def gain(_timing, plain, ours):
        calls.clear()
        assert_same(ours.request.infer(data)[0], plain.request.infer(data)[0])
        tried.append(len(calls))
        return next(left)

    tried = []
    monkeypatch.setattr(integration._Timing, "_gain", gain)
    exact = {"INFERENCE_PRECISION_HINT": "f32"}
    model = ov.Core().read_model(two_layers)
    operations = integration.replace(model, two_layers, td.load(two_layers.parent), settings=exact)
    assert tried == [2, 1][: len(gains)]
    assert next(left, None) is None
    assert len(operations) == count
    assert set(operations.left.values()) <= {"it makes the model no faster"}
    assert {*operations, *operations.left} == {"first", "second"}
    calls.clear()
    assert_same(ov.compile_model(model, "CPU", exact)(data)[0], ov.compile_model(two_layers, "CPU", exact)(data)[0])
    assert len(calls) == count


@pytest.fixture(scope="module")
def both_layouts(tmp_path_factory):
    """Models of one and three spatial axes, a library with their layers in both layouts, and data."""
    ov = pytest.importorskip("openvino")
    from openvino import opset13

    from tvm_deconv.openvino import problems

    rng = np.random.default_rng(6)
    folder, asked, models = tmp_path_factory.mktemp("layouts"), [], []

    def filter(*shape):
        return opset13.constant(rng.standard_normal(shape, np.float32))

    for rank in (1, 3):
        x = opset13.parameter([2, 8, *(5, 6, 3)[:rank]], np.float32)
        axes = [1] * rank
        y = opset13.convolution(x, filter(8, 8, *[3] * rank), axes, axes, axes, axes)
        y = opset13.convolution_backprop_data(y, filter(8, 6, *(3, 2, 4)[:rank]), [2] * rank)
        y = opset13.relu(opset13.add(y, filter(1, 6, *axes)))
        y = opset13.convolution(y, filter(8, 6, *[3] * rank), axes, axes, axes, axes)
        models.append(folder / f"model{rank}.xml")
        ov.save_model(ov.Model([y], [x], "m"), models[-1], compress_to_fp16=False)
        asked += problems(models[-1])
    made.export(folder, asked)
    feeds = [[rng.standard_normal((2, 8, *(5, 6, 3)[:rank]), np.float32)] for rank in (1, 3)]
    return td.load(folder), list(zip(models, feeds, strict=True))


@pytest.mark.usefixtures("how")
def test_openvino_runs_layers_with_channels_last(both_layouts, calls):
    import openvino as ov

    from tvm_deconv.openvino import replace

    exact = {"INFERENCE_PRECISION_HINT": "f32"}
    library, models = both_layouts
    for path, feed in models:
        model = ov.Core().read_model(path)
        operations = replace(model, path, library, measure=False)
        got = ov.compile_model(model, "CPU", exact)(feed)[0]
        assert_same(got, ov.compile_model(path, "CPU", exact)(feed)[0])
        assert len(operations) == 1
    assert [(problem.data_format, problem.rank) for problem in calls] == [("NXC", 1), ("NXC", 3)]


@pytest.fixture(scope="module")
def in_both_layouts(two_layers, tmp_path_factory):
    """A library of the two layers in both layouts."""
    from tvm_deconv.openvino import problems

    folder = tmp_path_factory.mktemp("layouts")
    made.export(folder, problems(two_layers))
    return td.load(folder)


@pytest.mark.parametrize(
    ("gains", "chosen"),
    [([1.3, 1.2, 1.1], "NCX NCX"), ([1.1, 1.3, 1.2], "NXC NXC"), ([1.1, 1.2, 1.3], "NXC NCX")],
)
def test_openvino_takes_the_layouts_in_which_a_model_is_fastest(
    gains, chosen, two_layers, in_both_layouts, calls, monkeypatch
):
    """All channels first, all last, or each layer as it is faster with its copies: `first` last, `second` first."""
    import openvino as ov

    from tvm_deconv import openvino as integration

    one, other = "tvm_deconv.0.first", "tvm_deconv.1.second"
    planar = {one: 1.0, f"conv_acb_abc_{one}": 5.0, other: 2.0}
    last = {one: 2.0, other: 1.0, "tvm_deconv.1.last": 5.0}
    nodes, left = iter([planar, last]), iter([*gains, 1.1])
    monkeypatch.setattr(integration.Timed, "nodes", lambda _: next(nodes))
    monkeypatch.setattr(integration._Timing, "_gain", lambda *_: next(left))
    model = ov.Core().read_model(two_layers)
    assert len(integration.replace(model, two_layers, in_both_layouts)) == 2
    assert (next(nodes, None), next(left, None)) == (None, None)
    calls.clear()
    ov.compile_model(model, "CPU")([np.ones((1, 3, 5, 6), np.float32)])
    assert " ".join(problem.data_format for problem in calls) == chosen


def test_openvino_times_a_model(two_layers):
    """On given and on random data; which of them is faster is not known here."""
    import openvino as ov

    from tvm_deconv.openvino import replace

    for inputs in (None, [np.ones((1, 3, 5, 6), np.float32)]):
        operations = replace(ov.Core().read_model(two_layers), two_layers, td.load(two_layers.parent), inputs)
        assert {*operations, *operations.left} == {"first", "second"}


def test_openvino_replaces_all_or_nothing(monkeypatch, two_layers):
    import openvino as ov

    from tvm_deconv.openvino import replace

    path, tmp_path = two_layers, two_layers.parent
    library, bind = td.load(tmp_path), td.Library.bind

    def fail(self, problem, *rest, **others):
        if problem.data_spatial == (5, 6):
            return bind(self, problem, *rest, **others)
        raise td.IntegrityError(tmp_path, "altered since")

    monkeypatch.setattr(td.Library, "bind", fail)
    model = ov.Core().read_model(path)
    with pytest.raises(td.IntegrityError, match="altered since"):
        replace(model, path, library)
    kinds = [node.get_type_name() for node in model.get_ordered_ops()]
    assert kinds.count("ConvolutionBackpropData") == 2
