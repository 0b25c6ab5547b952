"""docs/frameworks.md: its code runs as it is printed, and computes what the framework computes."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from support import artifacts as made
from support.tolerances import assert_close

import tvm_deconv as td

ROOT = Path(__file__).parents[2]
SECTIONS = dict(
    part.split("\n", 1) for part in re.split(r"^## ", (ROOT / "docs/frameworks.md").read_text(), flags=re.M)[1:]
)


def code(title):
    return "".join(re.findall(r"^```python\n(.*?)^```", SECTIONS[title], flags=re.M | re.S))


def build(problems, target, output):
    """td.compile in this process, which saves the seconds that others take to start; test_jax takes them."""
    assert target == "native"
    Path(output).mkdir()
    made.export(Path(output), problems)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs the blocks of a section, in a folder with the examples, and returns the names they leave."""

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
    """The layers that are called."""
    seen, call = [], td.Layer.__call__
    monkeypatch.setattr(
        td.Layer, "__call__", lambda self, *rest, **out: seen.append(self.problem) or call(self, *rest, **out)
    )
    return seen


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
data = np.asarray(x)
expected = np.tanh(td.reference(p, data, weight))
for got in (y, eager, jax.vmap(decode)(np.stack([data, data]))[1]):
    assert isinstance(got, jax.Array)
    assert_close(np.asarray(got), expected)
assert "pure_callback" in str(jax.make_jaxpr(decode)(x))
"""


def test_jax(tmp_path):
    """In another process: once its threads run, jax warns at every fork."""
    if importlib.util.find_spec("jax") is None:
        pytest.skip("could not import 'jax'")
    environment = os.environ | {"PYTHONPATH": str(Path(td.__file__).parent.parent)}
    command = [sys.executable, "-c", code("JAX") + JAX_CHECKS]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr


def test_onnx_runtime(run, calls):
    names = run("ONNX Runtime", "onnxruntime")
    assert_same(names["y"], names["expected"])
    assert len(calls) == len(names["session"].layers) == 4
    assert names["session"].left == {}


def test_openvino(run, calls):
    names = run("OpenVINO", "openvino")
    assert_same(names["y"], names["expected"])
    assert len(calls) == len(names["operations"]) == 4


def model_of_two(path):
    """Two layers one after the other, without names; what each of them makes is an output."""
    from onnx import helper, numpy_helper, save

    rng = np.random.default_rng(3)
    filters = [rng.standard_normal(shape, np.float32) for shape in ((3, 4, 3, 3), (4, 2, 2, 2))]
    graph = helper.make_graph(
        [
            helper.make_node("ConvTranspose", ["x", "f0"], ["a"], strides=[2, 2], pads=[1, 1, 1, 1]),
            helper.make_node("Relu", ["a"], ["b"]),
            helper.make_node("ConvTranspose", ["b", "f1"], ["c"], strides=[2, 2]),
        ],
        "two",
        [helper.make_tensor_value_info("x", 1, [1, 3, 5, 6])],
        [helper.make_tensor_value_info("c", 1, [1, 2, 18, 22]), helper.make_tensor_value_info("b", 1, [1, 4, 9, 11])],
        [numpy_helper.from_array(filter, f"f{i}") for i, filter in enumerate(filters)],
    )
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
    return {"x": rng.standard_normal((1, 3, 5, 6), np.float32)}


@pytest.mark.parametrize("covered", [(0, 1), (0,), (1,), ()])
def test_onnx_runtime_keeps_what_no_artifact_serves(covered, calls, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    from tvm_deconv.frontends import scan
    from tvm_deconv.onnxruntime import Session

    feeds = model_of_two(tmp_path / "two.onnx")
    found = scan(tmp_path / "two.onnx")
    (tmp_path / "artifacts").mkdir()
    if covered:
        td.compile([found[i].problem for i in covered], target="native", output=tmp_path / "artifacts")
    session = Session(tmp_path / "two.onnx", td.load(tmp_path / "artifacts"))
    assert list(session.layers) == [found[i].name for i in covered]
    assert list(session.left) == [layer.name for i, layer in enumerate(found) if i not in covered]
    expected = onnxruntime.InferenceSession(tmp_path / "two.onnx").run(None, feeds)
    for got, wanted in zip(session.run(feeds), expected, strict=True):
        assert_same(got, wanted)
    assert len(calls) == len(covered)


def onnx_model(path, nodes, outputs=("y",), extra=(), ir_version=10):
    """A model of `nodes` on x of shape (1, 3, 5, 6), with filters f and g of (3, 3, 2, 2), a k of (1, 3, 1, 1)."""
    from onnx import helper, numpy_helper

    rng = np.random.default_rng(5)
    shapes = {"f": (3, 3, 2, 2), "g": (3, 3, 2, 2), "k": (1, 3, 1, 1), "z": (1, 3, 4, 4)}
    stored = [numpy_helper.from_array(rng.standard_normal(shapes[name], np.float32), name) for name in shapes]
    inputs = [helper.make_tensor_value_info("x", 1, (1, 3, 5, 6))]
    inputs += [helper.make_tensor_value_info(name, 1, shapes[name]) for name in extra]
    graph = helper.make_graph(nodes, "some", inputs, [onnx.ValueInfoProto(name=y) for y in outputs], stored)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=ir_version), path)
    return {"x": rng.standard_normal((1, 3, 5, 6), np.float32)}


def onnx_cases():
    from onnx import TensorProto, helper

    def up(data, made, name=None, filter="f"):
        return helper.make_node("ConvTranspose", [data, filter], [made], name=name, strides=[2, 2])

    def one(operator, data, made, name=None):
        return helper.make_node(operator, [*data], [made], name=name)

    def bodies(make):
        graphs = [helper.make_graph([make(f"b{i}")], "body", [], [onnx.ValueInfoProto(name=f"b{i}")]) for i in (0, 1)]
        return dict(zip(("then_branch", "else_branch"), graphs, strict=True))

    true = helper.make_node("Constant", [], ["c"], value=helper.make_tensor("c", TensorProto.BOOL, [], [True]))
    choice = lambda make: helper.make_node("If", ["c"], ["d"], **bodies(make))  # noqa: E731
    return {
        # A node without a name is called after what it makes.
        "the name of a follower twice": (
            [up("x", "a", "up"), one("Tanh", "a", "b"), one("Neg", "b", "y", name="b")],
            {}, {"up": "several nodes have the name b"},
        ),
        "the name of a layer twice": (
            [up("x", "a"), one("Neg", "a", "b", name="a"), up("b", "y", "other")],
            {}, {"a": "several nodes have the name a"},
        ),
        "the name of a layer in a body": (
            [true, choice(lambda made: up("x", made, "up")), one("Neg", "d", "e", name="up"), up("e", "y", "other")],
            {}, {"up": "several nodes have the name up"},
        ),
        "a body that uses tensors of before": (
            [true, up("x", "a", "up"), choice(lambda made: one("Neg", "a", made)), up("d", "y", "other", "g")],
            {}, {},
        ),
        "initializers that are inputs": (
            [one("Add", "xk", "a"), up("a", "b", "up"), one("Mul", "bk", "c"), one("Softmax", "c", "y")],
            {"extra": ("f", "g", "k", "z"), "ir_version": 3}, {},
        ),
        "data and output that are initializers": (
            [up("z", "a", "up"), one("Softmax", "a", "y")], {"outputs": ("y", "k")}, {},
        ),
    }  # fmt: skip


@pytest.mark.parametrize("title", onnx_cases())
def test_onnx_runtime_cuts_any_graph(title, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    from tvm_deconv.frontends import scan
    from tvm_deconv.onnxruntime import Session

    nodes, how, left = onnx_cases()[title]
    path = tmp_path / "some.onnx"
    feeds = onnx_model(path, nodes, **how)
    made.export(tmp_path, dict.fromkeys(layer.problem for layer in scan(path)))
    session = Session(path, td.load(tmp_path))
    for name, why in left.items():
        assert session.left.pop(name) == why
    assert set(session.left.values()) <= {"it stands in a graph within the model's own"}
    assert session.layers or left
    for got, wanted in zip(session.run(feeds), onnxruntime.InferenceSession(path).run(None, feeds), strict=True):
        assert_same(got, wanted)
    for wrong in ({}, {"x": feeds["x"], "k": feeds["x"]}):
        with pytest.raises(td.TensorError, match=r"^feeds=\[.*\]: must be the inputs of the model, x$"):
            session.run(wrong)


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
    operations = replace(model, path, td.load(tmp_path))
    assert list(operations) == ["alone"]
    data = [rng.standard_normal((1, 3, 5, 6), np.float32)]
    expected = ov.compile_model(path, "CPU", exact)(data).values()
    for got, wanted in zip(ov.compile_model(model, "CPU", exact)(data).values(), expected, strict=True):
        assert_same(got, wanted)
