"""Sessions of ONNX Runtime with layers of a library: they compute what ONNX Runtime computes, each node once."""

import functools
import gc
import os
import shutil
import subprocess
import sys
import weakref
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from support import artifacts as made
from support.operators import intercept, use_count
from support.tolerances import assert_close

import tvm_deconv as td
from tvm_deconv.errors import CompilerNotFound
from tvm_deconv.frontends import scan

onnxruntime = pytest.importorskip("onnxruntime")
from tvm_deconv import onnxruntime as integration  # noqa: E402
from tvm_deconv.onnxruntime import library, measure, operator  # noqa: E402
from tvm_deconv.runtime import bridge, facts  # noqa: E402
from tvm_deconv.runtime.layer import native  # noqa: E402

RNG = np.random.default_rng(5)


#: With every layer that has an artifact, however fast it is.
Session = functools.partial(integration.Session, measure=False)


def uniform(*shape, dtype=np.float32):
    return RNG.uniform(-1, 1, shape).astype(dtype)


def save(path, nodes, constants, inputs, outputs, type=TensorProto.FLOAT, extra=(), ir_version=10, opset=20, **parts):
    """A model of `nodes` with inputs by name and shape; the constants `extra` are inputs too."""
    stored = [numpy_helper.from_array(value, name) for name, value in constants.items()]
    values = [helper.make_tensor_value_info(name, type, shape) for name, shape in inputs.items()]
    values += [helper.make_tensor_value_info(name, type, constants[name].shape) for name in extra]
    graph = helper.make_graph(nodes, "some", values, [onnx.ValueInfoProto(name=y) for y in outputs], stored)
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("mine", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=ir_version, **parts), path)
    return path


@pytest.fixture
def no_compiler(monkeypatch):
    """No compiler for the operator, not even one that has been called before."""

    def fail(*_):
        raise CompilerNotFound("PATH", "", "no C++ compiler here")

    monkeypatch.setattr(operator, "load", fail)


@pytest.fixture(params=["whole", "pieces"])
def how(request):
    """Sessions of whole models, and of pieces."""
    if request.param == "pieces":
        request.getfixturevalue("no_compiler")
    return request.param


@pytest.fixture
def opened(monkeypatch):
    """The models that sessions are made of."""
    models, real = [], onnxruntime.InferenceSession

    def record(model, *rest):
        in_memory = isinstance(model, bytes)
        models.append(onnx.load_from_string(model) if in_memory else onnx.load(model, load_external_data=False))
        return real(model, *rest)

    monkeypatch.setattr(onnxruntime, "InferenceSession", record)
    return models


@pytest.fixture
def library_for(export_once, tmp_path):
    """A library with the layers of a model, or with those of these names."""

    def load(path, only=None):
        folder = tmp_path / "artifacts"
        folder.mkdir()
        for layer in scan(path):
            if layer.problem and (only is None or layer.name in only):
                export_once(folder, [layer.problem])
        return td.load(folder)

    return load


def check(session, path, feeds):
    """Compare with the plain session; outputs are written over what was there."""
    expected = onnxruntime.InferenceSession(path).run(None, feeds)
    for _ in range(2):
        for got, wanted in zip(session.run(None, feeds), expected, strict=True):
            assert got.dtype == wanted.dtype
            assert_close(got, wanted)


def up(data, result, name=None, filter="f", **attributes):
    return helper.make_node("ConvTranspose", [data, filter], [result], name=name, strides=[2, 2], **attributes)


def one(operator, data, result, name=None, **attributes):
    return helper.make_node(operator, data.split(" ") if data else [], [result], name=name, **attributes)


def branches(make):
    graphs = [helper.make_graph(make(f"b{i}"), "body", [], [onnx.ValueInfoProto(name=f"b{i}")]) for i in (0, 1)]
    return dict(zip(("then_branch", "else_branch"), graphs, strict=True))


CONSTANTS = {name: uniform(3, 3, 2, 2) for name in "fg"} | {"k": uniform(1, 3, 1, 1), "z": uniform(1, 3, 4, 4)}
TRUE = helper.make_node("Constant", [], ["c"], value=helper.make_tensor("c", TensorProto.BOOL, [], [True]))
GRAPHS = {
    # A node without a name is called after what it makes.
    "the name of a follower twice": ([up("x", "a", "up"), one("Tanh", "a", "b"), one("Neg", "b", "y", name="b")], {}),
    "the name of a layer twice": ([up("x", "a"), one("Neg", "a", "b", name="a"), up("b", "y", "other")], {}),
    "a layer in a body": (
        [
            TRUE,
            one("If", "c", "d", **branches(lambda y: [up("x", f"{y}u", "up"), one("Relu", f"{y}u", y)])),
            one("Neg", "d", "e", name="up"),
            up("e", "y", "other"),
        ],
        {},
    ),
    "a body that uses tensors of before": (
        [TRUE, up("x", "a", "up"), one("If", "c", "d", **branches(lambda result: [one("Neg", "a", result)])),
         up("d", "y", "other", "g")],
        {},
    ),
    "a body that uses the filter": (
        [TRUE, up("x", "a", "up"), one("If", "c", "d", **branches(lambda result: [one("Neg", "f", result)])),
         one("Mul", "a k", "y")],
        {"outputs": ("y", "d")},
    ),
    "initializers that are inputs": (
        [one("Add", "x k", "a"), up("a", "b", "up"), one("Mul", "b k", "c"), one("Softmax", "c", "y")],
        {"extra": ("f", "g", "k", "z"), "ir_version": 3},
    ),
    "data and output that are initializers": (
        [up("z", "a", "up"), one("Softmax", "a", "y")],
        {"outputs": ("y", "k")},
    ),
    "skips": (
        [one("Tanh", "x", "s"), up("s", "a", "one"), one("Neg", "a", "b"), up("b", "c", "two", "g"),
         one("Relu", "c", "d"), one("Exp", "a", "e"),
         one("Resize", "s  sizes", "t", name="resize", mode="nearest"), one("Add", "t d", "u"),
         one("ReduceMax", "e", "v", keepdims=1), one("Mul", "u v", "y")],
        {"outputs": ("y", "b", "c"), "sizes": 4},
    ),
    "side by side": (
        [up("x", "a", "one"), up("x", "b", "two", "g"), one("Relu", "b", "c"), one("Sub", "a c", "d"),
         one("Neg", "d", "y")],
        {},
    ),
    "constants of nodes": (
        [one("Constant", "", "h", value=numpy_helper.from_array(uniform(3, 3, 2, 2, dtype=np.float16))),
         one("Cast", "h", "i", to=1), one("Identity", "i", "w"), up("x", "a", "up", "w"), one("Mul", "a k", "b"),
         one("Neg", "b", "y")],
        {},
    ),
}  # fmt: skip


def graph(path, title):
    nodes, how = GRAPHS[title]
    how = dict(how)
    constants = CONSTANTS | ({"sizes": np.float32([1, 1, 4, 4])} if how.pop("sizes", None) else {})
    return save(path, nodes, constants, {"x": (1, 3, 5, 6)}, how.pop("outputs", ("y",)), **how)


@pytest.mark.parametrize("title", GRAPHS)
def test_any_graph(title, how, opened, library_for, tmp_path):
    path = graph(tmp_path / "some.onnx", title)
    library = library_for(path)
    session = Session(path, library)
    reason = "it stands in a graph within the model's own, and there is no compiler for the custom operator"
    assert session.left == (
        dict.fromkeys(["up", "up_2"], reason) if (title, how) == ("a layer in a body", "pieces") else {}
    )
    assert len(session.layers) + len(session.left) == len(scan(path))
    assert len(opened) == 1 or how == "pieces"
    for model in opened:
        assert not any(node.op_type == "ConvTranspose" for node in model.graph.node)
    feeds = {"x": uniform(1, 3, 5, 6)}
    check(session, path, feeds)
    for wrong in ({}, {"x": feeds["x"], "k": feeds["x"]}):
        with pytest.raises((ValueError, onnxruntime.capi.onnxruntime_pybind11_state.InvalidArgument)):
            session.run(None, wrong)


def unet(path):
    """A U-Net of three levels, with a Conv and a Relu on each way and on each skip."""
    constants, nodes, data = {}, [], "x"

    def conv(name, data, inputs, outputs, stride=1):
        constants[f"{name}.w"] = uniform(outputs, inputs, 3, 3)
        attributes = {"strides": [stride, stride], "pads": [1, 1, 1, 1]}
        nodes.append(helper.make_node("Conv", [data, f"{name}.w"], [f"{name}.c"], name=name, **attributes))
        nodes.append(helper.make_node("Relu", [f"{name}.c"], [f"{name}.r"], name=f"{name}.relu"))
        return f"{name}.r"

    widths, skips = [3, 8, 12, 16], []
    for level in range(3):
        skips.append(conv(f"skip{level}", data, widths[level], widths[level]))
        data = conv(f"down{level}", data, widths[level], widths[level + 1], 2)
    for level in reversed(range(3)):
        constants[f"up{level}.w"] = uniform(widths[level + 1], widths[level], 2, 2)
        up = helper.make_node(
            "ConvTranspose", [data, f"up{level}.w"], [f"up{level}"], name=f"up{level}", strides=[2, 2]
        )
        nodes += [up, helper.make_node("Add", [f"up{level}", skips[level]], [f"sum{level}"], name=f"sum{level}")]
        data = conv(f"out{level}", f"sum{level}", widths[level], widths[level])
    return save(path, nodes, constants, {"x": (1, 3, 32, 32)}, [data])


@pytest.mark.usefixtures("how")
def test_no_node_runs_twice(opened, library_for, tmp_path):
    path = unet(tmp_path / "unet.onnx")
    session = Session(path, library_for(path))
    assert len(session.layers) == 3
    runs = Counter(node.name for model in opened for node in model.graph.node)
    wanted = {node.name for node in onnx.load(path).graph.node if node.op_type != "ConvTranspose"}
    assert {name: runs[name] for name in wanted} == dict.fromkeys(wanted, 1)
    check(session, path, {"x": uniform(1, 3, 32, 32)})


def test_layers_that_make_the_same_run_once(how, opened, library_for, tmp_path):
    """ONNX Runtime merges equal nodes of its own only. The same weights may have two names."""
    nodes = [
        up("x", "a"), up("x", "b"), up("x", "c", filter="again"), up("x", "d", filter="g"), one("Neg", "x", "n"),
        up("n", "e"), one("Relu", "b", "r"), one("Sum", "a r c d e", "y"),
    ]  # fmt: skip
    constants = {"f": CONSTANTS["f"], "again": CONSTANTS["f"], "g": CONSTANTS["g"]}
    path = save(tmp_path / "same.onnx", nodes, constants, {"x": (1, 3, 5, 6)}, ["y", "c"])
    session = Session(path, library_for(path))
    assert [*session.layers] == ["a", "b", "c", "d", "e"]
    assert len({id(layer) for layer in session.layers.values()}) == 3  # b has absorbed an activation
    if how == "whole":
        kinds = [node.op_type for model in opened for node in model.graph.node]
        assert kinds.count("ConvTranspose_float32") == 4
    check(session, path, {"x": uniform(1, 3, 5, 6)})


OPERATORS = {"ConvTranspose": 1, "Relu": 1, "Neg": 1, "Add": 2, "Mul": 2, "Max": 2}


@st.composite
def dags(draw):
    """Nodes that read any tensors made before them, all of one shape, and the names of some outputs."""
    nodes, made = [], ["x"]
    for i in range(draw(st.integers(1, 12))):
        kind = draw(st.sampled_from([*OPERATORS]))
        inputs = [draw(st.sampled_from(made)) for _ in range(OPERATORS[kind])]
        layer = {"pads": [1, 1, 1, 1]} if kind == "ConvTranspose" else {}
        inputs += [draw(st.sampled_from("fg"))] if layer else []
        nodes.append(helper.make_node(kind, inputs, [f"t{i}"], f"n{i}", **layer))
        made.append(f"t{i}")
    outputs = draw(st.lists(st.sampled_from(made[1:]), min_size=1, max_size=3, unique=True))
    return nodes, outputs


@pytest.fixture(scope="module")
def square_library(tmp_path_factory):
    """A library for the layers of `dags`, with or without a Relu behind them."""
    folder = tmp_path_factory.mktemp("square")
    plain = td.Problem.from_onnx((1, 3, 5, 6), (3, 3, 3, 3), pads=(1, 1, 1, 1))
    made.export(folder, [plain, plain.replace(epilogue=td.Epilogue(activation="relu"))])
    return td.load(folder)


@pytest.mark.usefixtures("how")
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(dag=dags())
def test_drawn_graphs(dag, opened, square_library, tmp_path):
    nodes, outputs = dag
    constants = {name: 0.3 * uniform(3, 3, 3, 3) for name in "fg"}
    path = save(tmp_path / "drawn.onnx", nodes, constants, {"x": (1, 3, 5, 6)}, outputs)
    opened.clear()
    session = Session(path, square_library)
    assert len(session.layers) == sum(node.op_type == "ConvTranspose" for node in nodes)
    runs = Counter(node.name for model in opened for node in model.graph.node if node.domain == "")
    assert max(runs.values(), default=1) == 1
    x = uniform(1, 3, 5, 6)
    expected = onnxruntime.InferenceSession(path).run(None, {"x": x})
    for got, wanted in zip(session.run(None, {"x": x}), expected, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-3, atol=1e-4 * max(1, np.abs(wanted).max()))


@pytest.mark.parametrize("covered", [("a", "c"), ("a",), ("c",), ()])
@pytest.mark.usefixtures("how")
def test_layers_without_an_artifact_stay(covered, library_for, tmp_path):
    constants = {"f": uniform(3, 4, 3, 3), "g": uniform(4, 2, 2, 2)}
    nodes = [up("x", "a", pads=[1, 1, 1, 1]), one("Relu", "a", "b"), up("b", "c", filter="g")]
    path = save(tmp_path / "two.onnx", nodes, constants, {"x": (1, 3, 5, 6)}, ["c", "b"])
    session = Session(path, library_for(path, covered))
    assert tuple(session.layers) == covered
    assert list(session.left) == [name for name in ("a", "c") if name not in covered]
    assert all("NoArtifactError" in why or "no artifact" in why for why in session.left.values())
    check(session, path, {"x": uniform(1, 3, 5, 6)})


@pytest.mark.parametrize("dtype", ["float16", "float64", "bfloat16"])
def test_types(dtype, library_for, tmp_path):
    numpy_type = np.dtype(getattr(ml_dtypes, dtype, dtype))
    type = helper.np_dtype_to_tensor_dtype(numpy_type)
    constants = {"f": uniform(3, 4, 2, 2, dtype=numpy_type)}
    nodes = [
        one("Cast", "x", "a", to=type), up("a", "b", "up"), one("Relu", "b", "r"), one("Cast", "r", "y", to=1),
    ]  # fmt: skip
    opset = 22 if dtype == "bfloat16" else 17  # the first with ConvTranspose of that type
    path = save(tmp_path / "typed.onnx", nodes, constants, {"x": (1, 3, 5, 6)}, ["y"], opset=opset)
    (layer,) = scan(path)
    assert layer.problem.dtype == dtype
    session = Session(path, library_for(path))
    assert (list(session.layers), session.left) == (["up"], {})
    x = uniform(1, 3, 5, 6)
    expected = td.reference(layer.problem, x.astype(numpy_type), layer.filter).astype(np.float32)
    assert_close(session.run(None, {"x": x})[0], expected, dtype=dtype)


def session_of_two(library_for, folder, options=None, **how):
    """A session of a model with two layers, of which the second has a bias, and the path of the model."""
    constants = {"f": uniform(3, 4, 2, 2), "g": uniform(4, 2, 2, 2), "b": uniform(2)}
    nodes = [
        up("x", "a"), one("Tanh", "a", "b1"), one("Neg", "b1", "n"),
        helper.make_node("ConvTranspose", ["n", "g", "b"], ["y"], strides=[2, 2]),
    ]  # fmt: skip
    path = save(folder / "two.onnx", nodes, constants, {"x": (1, 3, 5, 6)}, ["y", "n"], **how)
    return Session(path, library_for(path), options), path


@pytest.mark.usefixtures("how")
def test_a_layer_that_gets_no_faster_stays(library_for, monkeypatch, tmp_path):
    """The first is as fast alone with what it has absorbed, the second gains."""
    _, path = session_of_two(library_for, tmp_path)
    seconds, outputs = iter([4.0, 4.0, 4.0, 3.0]), []

    def spent(session, feeds):
        outputs.append(session.run(None, feeds)[0])
        return next(seconds)

    monkeypatch.setattr(measure, "_seconds", spent)
    monkeypatch.setattr(measure, "_LEAST", 1)
    monkeypatch.setattr(measure, "_SECONDS", 0.0)
    session = integration.Session(path, td.load(tmp_path / "artifacts"))
    assert [layer.problem.filter_shape for layer in session.layers.values()] == [(4, 2, 2, 2)]
    assert list(session.left.values()) == ["its artifact is no faster: 1.00 times as fast, measured alone"]
    for original, ours, shape in zip(outputs[::2], outputs[1::2], [(1, 4, 10, 12), (1, 2, 20, 24)], strict=True):
        assert original.shape == shape
        assert_close(ours, original)
    assert np.abs(outputs[0]).max() <= 1 < np.abs(outputs[2]).max()  # of the tanh
    check(session, path, {"x": uniform(1, 3, 5, 6)})


def test_layers_that_cannot_be_timed_are_replaced(library_for, monkeypatch, tmp_path):
    def fail(*_):
        raise ValueError("x is no constant")

    monkeypatch.setattr(measure, "alone", fail)
    _, path = session_of_two(library_for, tmp_path)
    assert len(integration.Session(path, td.load(tmp_path / "artifacts")).layers) == 2


@pytest.mark.usefixtures("how")
def test_it_is_a_drop_in(library_for, tmp_path):
    session, path = session_of_two(library_for, tmp_path)
    plain = onnxruntime.InferenceSession(path)
    for ours, theirs in ((session.get_inputs(), plain.get_inputs()), (session.get_outputs(), plain.get_outputs())):
        assert [(x.name, x.type, x.shape) for x in ours] == [(x.name, x.type, x.shape) for x in theirs]
    feeds, options = {"x": uniform(1, 3, 5, 6)}, onnxruntime.RunOptions()
    y, n = plain.run(None, feeds)
    for names, expected in ((["y"], [y]), (["n", "y"], [n, y]), (None, [y, n])):
        for got, wanted in zip(session.run(names, feeds, options), expected, strict=True):
            assert_close(got, wanted)
    with pytest.raises(Exception, match="nothing"):
        session.run(["nothing"], feeds)
    options.terminate = True
    with pytest.raises(Exception, match="terminate"):
        session.run(None, feeds, options)


def test_a_whole_session_has_the_other_methods(library_for, tmp_path):
    session, path = session_of_two(library_for, tmp_path)
    x = uniform(1, 3, 5, 6)
    binding = session.io_binding()
    binding.bind_cpu_input("x", x)
    for name in ("y", "n"):
        binding.bind_output(name)
    session.run_with_iobinding(binding)
    expected = onnxruntime.InferenceSession(path).run(None, {"x": x})
    for got, wanted in zip(binding.copy_outputs_to_cpu(), expected, strict=True):
        assert_close(got, wanted)
    with pytest.raises(AttributeError, match="no_such_method"):
        session.no_such_method()


WITHOUT_A_COMPILER = """
import logging, sys
logging.basicConfig(level="WARNING")
import tvm_deconv as td
from tvm_deconv.onnxruntime import Session
library = td.load(sys.argv[1], digest=td.load(sys.argv[1]).digest if sys.argv[3:] else None)
session = Session(sys.argv[2], library)
print(len(session.layers), hasattr(session, "io_binding"))
"""


@pytest.mark.parametrize(
    ("state", "printed"), [("there", "2 True"), ("missing", "2 False"), ("spoilt", "2 False"), ("pinned", "2 False")]
)
def test_the_operator_beside_the_artifacts(state, printed, library_for, tmp_path):
    """It serves where there is no compiler, but not where a digest says what may be loaded."""
    _, path = session_of_two(library_for, tmp_path)
    if state != "missing":
        written = library.write(tmp_path / "artifacts")
        assert library.write(tmp_path / "artifacts") == written
        if state == "spoilt":
            written.write_bytes(written.read_bytes()[:5000])
    arguments = [str(tmp_path / "artifacts"), str(path), *(["pinned"] if state == "pinned" else [])]
    environment = os.environ | {"CXX": "/none"}
    command = [sys.executable, "-c", WITHOUT_A_COMPILER, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == printed
    written = library.write(tmp_path / "artifacts")
    assert library.read(tmp_path / "artifacts") == written.read_bytes()


def test_without_a_place_for_the_operator(library_for, monkeypatch, tmp_path):
    """As on a file system that is read only: the model is cut."""

    def fail(**_):
        raise OSError("read only")

    monkeypatch.setattr(operator, "_operators", bridge.Bridge(facts.prepare))
    monkeypatch.setattr(bridge, "tempfile", SimpleNamespace(mkdtemp=fail))
    session, path = session_of_two(library_for, tmp_path)
    assert len(session.layers) == 2
    assert not hasattr(session, "io_binding")
    check(session, path, {"x": uniform(1, 3, 5, 6)})


@pytest.mark.usefixtures("how")
def test_options_may_serve_several_sessions(library_for, tmp_path):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    first, path = session_of_two(library_for, tmp_path, options)
    second = Session(path, first.layers and td.load(tmp_path / "artifacts"), options)
    plain = onnxruntime.InferenceSession(path, options)
    feeds = {"x": uniform(1, 3, 5, 6)}
    for session in (first, second):
        for got, wanted in zip(session.run(None, feeds), plain.run(None, feeds), strict=True):
            assert_close(got, wanted)


def test_threads_of_the_options_limit_layers(library_for, monkeypatch, tmp_path):
    limits = []
    real = facts.facts
    monkeypatch.setattr(facts, "facts", lambda layer, limit: limits.append(limit) or real(layer, limit))
    for threads in (0, 1, 3):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        shutil.rmtree(tmp_path / "artifacts", ignore_errors=True)
        session, path = session_of_two(library_for, tmp_path, options)
        check(session, path, {"x": uniform(1, 3, 5, 6)})
    assert limits == [0, 0, 1, 1, 3, 3]


def test_functions_that_take_the_limit(library_for, monkeypatch, tmp_path):
    seen = []
    intercept(monkeypatch, lambda _, deconv, threads, arena, *__: seen.append((threads, arena)) or deconv())
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 3
    session, path = session_of_two(library_for, tmp_path, options)
    check(session, path, {"x": uniform(1, 3, 5, 6)})
    assert seen == [(3, 0)] * 4


def test_errors_of_a_layer_are_errors_of_the_run(library_for, monkeypatch, tmp_path):
    def fail(*_):
        raise RuntimeError("too odd a layer")

    intercept(monkeypatch, fail)
    session, _ = session_of_two(library_for, tmp_path)
    for _ in range(2):
        with pytest.raises(Exception, match="RuntimeError: too odd a layer"):
            session.run(None, {"x": uniform(1, 3, 5, 6)})


def test_sessions_outlive_library_and_layers(library_for, tmp_path):
    """The kernels hold the packed filters: nothing else does."""
    session, path = session_of_two(library_for, tmp_path)
    session.layers.clear()
    gc.collect()
    check(session, path, {"x": uniform(1, 3, 5, 6)})
    inner = session._session._sess
    del session
    gc.collect()
    x = uniform(1, 3, 5, 6)
    (got,) = inner.run(["y"], {"x": x}, None)
    assert_close(got, onnxruntime.InferenceSession(path).run(["y"], {"x": x})[0])


def test_packed_filters_are_freed_with_their_session(library_for, tmp_path):
    session, _ = session_of_two(library_for, tmp_path)
    held = [weakref.ref(layer) for layer in session.layers.values()]
    (constant, *_) = native(next(iter(session.layers.values())))[1]
    count = use_count(constant)
    assert count > 1
    del session
    gc.collect()
    assert [layer() for layer in held] == [None, None]
    assert use_count(constant) == 1


@pytest.mark.usefixtures("how")
def test_several_threads_may_run_one_session(library_for, tmp_path):
    session, path = session_of_two(library_for, tmp_path)
    feeds = [{"x": uniform(1, 3, 5, 6)} for _ in range(4)]
    plain = onnxruntime.InferenceSession(path)
    with ThreadPoolExecutor(4) as threads:
        results = [*threads.map(lambda i: session.run(None, feeds[i % 4]), range(64))]
    for i, result in enumerate(results):
        for got, wanted in zip(result, plain.run(None, feeds[i % 4]), strict=True):
            assert_close(got, wanted)


def test_a_number_without_a_layer(library_for, tmp_path):
    """A model that ONNX Runtime has written from a session is none of another process, nor of a later session."""
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "written.onnx")
    session_of_two(library_for, tmp_path, options)
    fresh = onnxruntime.SessionOptions()
    operator.register(fresh)
    with pytest.raises(Exception, match=r"layer=\d+: must be a layer of a model that is being made in this process"):
        onnxruntime.InferenceSession(tmp_path / "written.onnx", fresh)


@pytest.mark.usefixtures("how")
def test_a_model_that_is_refused_runs_as_it_is(library_for, monkeypatch, tmp_path):
    """Nothing is replaced if the session with the layers cannot be made."""
    real = onnxruntime.InferenceSession

    def refuse(model, *rest):
        if isinstance(model, bytes):
            raise RuntimeError("no such node")
        return real(model, *rest)

    monkeypatch.setattr(onnxruntime, "InferenceSession", refuse)
    session, path = session_of_two(library_for, tmp_path)
    assert session.layers == {}
    assert set(session.left.values()) == {"ONNX Runtime does not take the model with it: no such node"}
    check(session, path, {"x": uniform(1, 3, 5, 6)})


@pytest.mark.usefixtures("how")
def test_a_bias_of_run_time_leaves_the_layer(library_for, tmp_path):
    nodes = [one("ReduceMax", "x", "m", keepdims=0), one("Mul", "m b", "r"),
             helper.make_node("ConvTranspose", ["x", "f", "r"], ["y"], strides=[2, 2])]  # fmt: skip
    constants = {"f": uniform(3, 2, 2, 2), "b": uniform(2)}
    path = save(tmp_path / "some.onnx", nodes, constants, {"x": (1, 3, 5, 6)}, ["y"])
    session = Session(path, library_for(path))
    assert session.left == {"y": "its bias is no constant of the model's own graph"}
    check(session, path, {"x": uniform(1, 3, 5, 6)})


@pytest.mark.usefixtures("how")
def test_a_quantized_model(library_for, tmp_path):
    constants = {"xs": np.float32(0.02), "xz": np.uint8(120), "s": np.float32([0.01, 0.02, 0.03]),
                 "q": RNG.integers(-99, 99, (3, 3, 2, 2)).astype(np.int8)}  # fmt: skip
    nodes = [
        one("QuantizeLinear", "x xs xz", "xq"), one("DequantizeLinear", "xq xs xz", "d"),
        one("DequantizeLinear", "q s", "f", axis=1), up("d", "u", "up"), one("Relu", "u", "r"), one("Mul", "r r", "y"),
    ]  # fmt: skip
    path = save(tmp_path / "qdq.onnx", nodes, constants, {"x": (1, 3, 5, 6)}, ["y"])
    session = Session(path, library_for(path))
    assert list(session.layers) == ["up"]
    check(session, path, {"x": uniform(1, 3, 5, 6)})


@pytest.mark.usefixtures("how")
@pytest.mark.parametrize("type", ["uint8", "int8"])
def test_a_layer_on_integers(type, library_for, tmp_path):
    """Whose data are an input of the model, and in float32 an output too."""
    zero, random = np.zeros((), type), np.random.default_rng(5)
    constants = {"s": np.float32(0.02), "z": zero + 3, "fs": np.float32([0.01, 0.02, 0.03]), "ys": np.float32(0.1),
                 "yz": np.uint8(9), "q": random.integers(-99, 99, (3, 3, 2, 2)).astype(np.int8)}  # fmt: skip
    nodes = [
        one("DequantizeLinear", "x s z", "d"), one("DequantizeLinear", "q fs", "f", axis=1), up("d", "u", "up"),
        one("Relu", "u", "r"), one("QuantizeLinear", "r ys yz", "y"),
    ]  # fmt: skip
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(type))
    path = save(tmp_path / "qdq.onnx", nodes, constants, {"x": (1, 3, 5, 6)}, ["y", "d"], type=kind)
    session = Session(path, library_for(path))
    assert session.layers["up"].problem.dtype == type
    feeds = {"x": random.integers(0, 127, (1, 3, 5, 6)).astype(type)}
    wanted, numbers = onnxruntime.InferenceSession(path).run(None, feeds)
    found, same = session.run(None, feeds)
    np.testing.assert_array_equal(same, numbers)
    assert (found.dtype, len(np.unique(found)) > 30) == (wanted.dtype, True)
    assert np.abs(found.astype(int) - wanted).max() <= 1  # sums in float32 may end on the other side of a tie
    assert np.mean(found != wanted) < 0.02


FREE = {  # shape of the data, of the filter, and shapes of calls
    "batch": (("n", 3, 5, 6), (3, 4, 2, 2), [(1, 3, 5, 6), (4, 3, 5, 6), (0, 3, 5, 6)]),
    "length": (("n", 3, "frames"), (3, 4, 8), [(1, 3, 1), (2, 3, 40), (1, 3, 700)]),
    "image": ((1, 3, "h", "w"), (3, 4, 2, 2), [(1, 3, 1, 1), (1, 3, 30, 9)]),
    "nothing known": (None, (3, 4, 2, 2), [(1, 3, 5, 6), (3, 3, 4, 70)]),
}


@pytest.mark.usefixtures("how")
@pytest.mark.parametrize("title", FREE)
def test_free_extents(title, library_for, tmp_path):
    shape, filter, calls = FREE[title]
    strides = [len(filter) * 2 - 4] * (len(filter) - 2)
    nodes = [
        one("Neg", "x", "n"),
        helper.make_node("ConvTranspose", ["n", "f", "b"], ["a"], strides=strides),
        one("Relu", "a", "r"), one("Mul", "r r", "y"),
    ]  # fmt: skip
    path = save(tmp_path / "free.onnx", nodes, {"f": uniform(*filter), "b": uniform(4)}, {"x": shape}, ["y"])
    session = Session(path, library_for(path))
    assert (list(session.layers), session.left) == (["a"], {})
    for call in calls:
        check(session, path, {"x": uniform(*call)})
    for wrong in ((1, 5, *calls[0][2:]), (1, 3), (1, 3, 0, *calls[0][3:])):
        with pytest.raises(Exception, match=r"."):
            session.run(None, {"x": uniform(*wrong)})


@pytest.mark.parametrize("title", FREE)
def test_extents_are_known_behind_a_layer(title, library_for, tmp_path):
    """Unknown ones may have the data's name only where they are the data's."""
    shape, filter, calls = FREE[title]
    strides = [len(filter) * 2 - 4] * (len(filter) - 2)
    nodes = [
        helper.make_node("ConvTranspose", ["x", "f"], ["a"], strides=strides),
        helper.make_node("ConvTranspose", ["x", "f"], ["b"], strides=strides),
        one("Concat", "a b", "y", axis=1),
    ]
    path = save(tmp_path / "free.onnx", nodes, {"f": uniform(*filter)}, {"x": shape}, ["a", "b", "y"])
    session, plain = Session(path, library_for(path)), onnxruntime.InferenceSession(path)
    assert len(session.layers) == 2
    for value, wanted in zip(session.get_outputs(), plain.get_outputs(), strict=True):
        assert len(value.shape) == len(wanted.shape) or shape is None
        for extent, known in zip(value.shape, wanted.shape, strict=False):
            assert extent == known if isinstance(known, int) or known == "n" else not isinstance(extent, int)
    check(session, path, {"x": uniform(*calls[-1])})


def test_what_follows_from_extents_is_computed_once(library_for, tmp_path):
    """Else a pad that exporters compute from extents would not become a part of the convolution behind it.

    Here the extents of the layer's data are known only after ONNX Runtime has computed the end of a slice.
    """
    nodes = [
        one("Shape", "x", "all"), one("Slice", "all from to", "end"), one("Slice", "x from end from", "x1"),
        up("x1", "a"), one("Shape", "a", "s"), one("Gather", "s two", "t"), one("Sub", "t extent", "d"),
        one("Concat", "zeros d zeros d", "p", axis=0), one("Pad", "a p", "e"), one("Conv", "e k", "y"),
    ]  # fmt: skip
    constants = {
        "f": CONSTANTS["f"], "k": uniform(4, 3, 2, 2), "two": np.array([2, 3]), "extent": np.array([9, 10]),
        "zeros": np.array([0, 0]), "from": np.array([0]), "to": np.array([1]),
    }  # fmt: skip
    path = save(tmp_path / "pad.onnx", nodes, constants, {"x": (1, 3, 5, 6)}, ["y"])
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    session = Session(path, library_for(path), options)
    kinds = [node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node]
    assert len(session.layers) == 1
    assert "ConvTranspose_float32" in kinds
    assert not {"Shape", "Gather", "Sub", "Pad"} & {*kinds}
    check(session, path, {"x": uniform(1, 3, 5, 6)})


def test_wrong_arguments(library_for, tmp_path):
    path = save(tmp_path / "m.onnx", [up("x", "y")], {"f": uniform(3, 4, 2, 2)}, {"x": (1, 3, 4, 4)}, ["y"])
    library = library_for(path)
    for arguments, text in (
        ((None, library), "path=None: must be a path"),
        ((path, tmp_path), "library=.*: must be a Library, as load returns it"),
        ((path, library, {}), "options={}: must be SessionOptions, or None"),
    ):
        with pytest.raises(td.ProblemError, match=f"^{text}$"):
            Session(*arguments)


def test_data_that_do_not_fit_a_layer(library_for, tmp_path):
    """Where ONNX Runtime knows nothing of a shape, the operator checks it."""
    nodes = [one("Neg", "x", "n"), up("n", "a"), one("Relu", "a", "y")]
    path = save(tmp_path / "free.onnx", nodes, {"f": uniform(3, 4, 2, 2)}, {"x": None}, ["y"])
    session = Session(path, library_for(path))
    for shape, text in (
        ((1, 5, 4, 4), "data: extent 5 of axis 1 does not fit the layer"),
        ((1, 3, 4), "data: rank must be 4, not 3"),
        ((1, 3, 0, 4), "data: extent 0 of axis 2 does not fit the layer"),
    ):
        with pytest.raises(Exception, match=text):
            session.run(None, {"x": uniform(*shape)})


def with_external_data(path, threshold=0):
    model = onnx.load(path)
    onnx.save(model, path, save_as_external_data=True, location=f"{path.stem}.bin", size_threshold=threshold)


@pytest.mark.usefixtures("how")
def test_external_data_stay_in_their_file(opened, library_for, tmp_path):
    path = unet(tmp_path / "unet.onnx")
    with_external_data(path)
    session = Session(path, library_for(path))
    assert len(session.layers) == 3
    stored = [tensor for model in opened for tensor in model.graph.initializer]
    assert stored
    assert all(tensor.data_location == TensorProto.EXTERNAL for tensor in stored)
    check(session, path, {"x": uniform(1, 3, 32, 32)})


def test_external_data_where_models_in_memory_have_none(library_for, monkeypatch, tmp_path):
    """As in ONNX Runtime 1.20: the model goes through a file in another folder, with links to the data."""
    real = onnxruntime.InferenceSession

    def old(model, *rest):
        if isinstance(model, bytes):
            raise RuntimeError("model_path must not be empty")
        return real(model, *rest)

    path = unet(tmp_path / "unet.onnx")
    with_external_data(path)
    monkeypatch.setattr(onnxruntime, "InferenceSession", old)
    session = Session(path, library_for(path))
    assert len(session.layers) == 3
    check(session, path, {"x": uniform(1, 3, 32, 32)})


@pytest.mark.slow
def test_a_model_beyond_2_gib(library_for, tmp_path):
    """Two tables of 1.2 GiB each, which lie in a file with holes."""
    session, path = session_of_two(library_for, tmp_path)
    shutil.rmtree(tmp_path / "artifacts")
    model, rows = onnx.load(path), 1200 << 10
    with (tmp_path / "tables").open("wb") as file:
        for i in range(2):
            tensor = TensorProto(name=f"t{i}", data_type=1, dims=[rows, 256], data_location=TensorProto.EXTERNAL)
            facts = {"location": "tables", "offset": i * rows << 10, "length": rows << 10}
            for key, value in facts.items():
                tensor.external_data.add(key=key, value=str(value))
            model.graph.initializer.append(tensor)
            model.graph.node.append(one("Gather", f"t{i} i", f"r{i}"))
        file.truncate(2 * rows << 10)
        file.seek(0)
        file.write(np.float32([3]).tobytes())
    model.graph.initializer.append(numpy_helper.from_array(np.array([0]), "i"))
    model.graph.node.extend([one("Add", "r0 r1", "r"), one("ReduceMax", "r", "m", keepdims=0), one("Add", "m y", "z")])
    model.graph.output.append(onnx.ValueInfoProto(name="z"))
    onnx.save(model, path)
    session = Session(path, library_for(path))
    assert len(session.layers) == 2
    check(session, path, {"x": uniform(1, 3, 5, 6)})
