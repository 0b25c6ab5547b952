"""The operator in C++ by which OpenVINO calls layers: docs/frameworks.md."""

import gc
import importlib
import os
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from support import artifacts as made
from support.operators import intercept, use_count
from support.tolerances import assert_close

import tvm_deconv as td
from tvm_deconv.errors import CompilerNotFound
from tvm_deconv.runtime.layer import native

ov = pytest.importorskip("openvino")

from openvino import opset13  # noqa: E402

from tvm_deconv import openvino as integration  # noqa: E402

EXACT = {"INFERENCE_PRECISION_HINT": "f32"}
operator = importlib.import_module("tvm_deconv.openvino.operator")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A model of two layers, which have artifacts in its folder."""
    rng = np.random.default_rng(4)
    x = y = opset13.parameter([1, 3, 5, 6], np.float32)
    for _ in range(2):
        filter = opset13.constant(rng.standard_normal((3, 3, 2, 2), np.float32))
        y = opset13.convolution_backprop_data(y, filter, [2, 2], None, [0, 0], [0, 0], [1, 1])
    path = tmp_path_factory.mktemp("operator") / "model.xml"
    ov.save_model(ov.Model([y], [x], "m"), path, compress_to_fp16=False)
    made.export(path.parent, integration.problems(path))
    return path


def uniform():
    return [np.random.default_rng().uniform(-1, 1, (1, 3, 5, 6)).astype(np.float32)]


def replaced(path):
    """Return the model with operations, compiled, and these."""
    model = ov.Core().read_model(path)
    operations = integration.replace(model, path, td.load(path.parent), measure=False)
    return ov.compile_model(model, "CPU", EXACT), operations


def test_wrong_arguments(path):
    for model, library, text in (
        (ov.Core().read_model(path), None, "library=None: must be a Library, as load returns it"),
        (None, td.load(path.parent), "model=None: must be an openvino.Model"),
    ):
        with pytest.raises(td.ProblemError, match=f"^{text}$"):
            integration.replace(model, path, library)


def test_layers_are_called_without_python(path, monkeypatch):
    """Outputs are those of operations in Python, to the last bit."""
    x = uniform()
    ours, operations = replaced(path)
    assert {type(operation) for operation in operations.values()} == {ov.Node}
    with monkeypatch.context() as patch:
        patch.setattr(td.Layer, "__call__", lambda *_, **__: 1 / 0)
        y = ours(x)[0]
    monkeypatch.setattr(operator.OPERATOR, "_library", None)
    ours, operations = replaced(path)
    assert ov.Node not in {type(operation) for operation in operations.values()}
    assert ours(x)[0].tobytes() == y.tobytes()


def test_models_outlive_library_and_operations(path):
    """The nodes hold the packed filters: nothing else does."""
    x = uniform()
    ours, operations = replaced(path)
    expected = ours(x)[0].copy()
    del operations
    gc.collect()
    assert ours(x)[0].tobytes() == expected.tobytes()
    assert_close(expected, ov.compile_model(path, "CPU", EXACT)(x)[0])


def test_packed_filters_are_freed_with_their_models(path, monkeypatch):
    layers, real = [], td.Library.bind
    monkeypatch.setattr(td.Library, "bind", lambda *rest, **more: layers.append(real(*rest, **more)) or layers[-1])
    ours, operations = replaced(path)
    held = [weakref.ref(layer) for layer in layers]
    (constant, *_) = native(layers[-1])[1]
    count = use_count(constant)
    assert count > 1
    del ours, operations
    layers.clear()
    gc.collect()
    assert [layer() for layer in held] == [None] * len(held)
    assert use_count(constant) == 1


def test_several_threads_may_run_one_model(path):
    (ours, _), plain, feeds = replaced(path), ov.compile_model(path, "CPU", EXACT), [uniform() for _ in range(4)]

    def run(i):
        return ours.create_infer_request().infer(feeds[i % 4])[0].copy()

    with ThreadPoolExecutor(4) as threads:
        results = [*threads.map(run, range(32))]
    for i, result in enumerate(results):
        assert_close(result, plain(feeds[i % 4])[0])


errors_reach_the_caller = pytest.mark.skipif(
    len(os.sched_getaffinity(0)) == 1, reason="on one processor OpenVINO drops the errors of operations"
)


@errors_reach_the_caller
def test_errors_of_a_layer_are_errors_of_the_call(path, monkeypatch):
    def fail(*_):
        raise RuntimeError("too odd a layer")

    intercept(monkeypatch, fail)
    ours, _ = replaced(path)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="RuntimeError: too odd a layer"):
            ours(uniform())


@errors_reach_the_caller
@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [
        ([1, 3, 5, 7], np.float32, "data: extent 7 of axis 3 does not fit the layer"),
        ([1, 3, 5], np.float32, "data: rank must be 4, not 3"),
        ([1, 3, 5, 6, 1, 1], np.float32, "data: rank must be 4, not 6"),
    ],
)
def test_data_that_do_not_fit(path, shape, dtype, message):
    """As nothing but an error of ours could bring about."""
    layers = integration._bound(ov.Core().read_model(path), integration.scan(path), td.load(path.parent))[0]
    x = opset13.parameter(shape, dtype)
    with operator.OPERATOR.makers({name: forms[0] for name, forms in layers.items()}) as makers:
        node = next(iter(makers.values()))(x.output(0))
    ours = ov.compile_model(ov.Model([node.output(0)], [x], "m"), "CPU", EXACT)
    with pytest.raises(RuntimeError, match=message):
        ours([np.zeros(shape, dtype)])


def test_a_number_without_a_layer(path):
    """A node is made while its layer has a number, in the same process."""
    replaced(path)
    x = opset13.parameter([1, 3, 5, 6], np.float32)
    with pytest.raises(RuntimeError, match="layer=5: must be a layer of a model that is being made in this process"):
        operator.OPERATOR._node(5, x.output(0))


def no_compiler(monkeypatch, _):
    def none(*_):
        raise CompilerNotFound("PATH", "", "none is installed")

    monkeypatch.setattr(operator, "_compiled", none)


def no_headers(monkeypatch, tmp_path):
    monkeypatch.setattr(operator.openvino, "__file__", str(tmp_path / "__init__.py"))


def other_headers(monkeypatch, tmp_path):
    no_headers(monkeypatch, tmp_path)
    (tmp_path / "include").mkdir()


def no_extension(monkeypatch, _):
    def refuse(*_):
        raise RuntimeError("no entry point for the extension library")

    monkeypatch.setattr(operator.NodeFactory, "add_extension", refuse)


@pytest.mark.parametrize("lack", [no_compiler, no_headers, other_headers, no_extension])
def test_without_the_operator(lack, path, monkeypatch, tmp_path):
    """Operations in Python serve."""
    with monkeypatch.context() as patch:
        lack(patch, tmp_path)
        patch.setattr(integration, "OPERATOR", operator._Operator())
        ours, operations = replaced(path)
    assert ov.Node not in {type(operation) for operation in operations.values()}
    x = uniform()
    assert_close(ours(x)[0], ov.compile_model(path, "CPU", EXACT)(x)[0])


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_layers_of_a_type_that_openvino_converts_stay(dtype, tmp_path):
    x = opset13.parameter([1, 3, 5, 6], dtype)
    filter = opset13.constant(np.ones((3, 3, 2, 2), dtype))
    y = opset13.convolution_backprop_data(x, filter, [2, 2], None, [0, 0], [0, 0], [1, 1])
    path = tmp_path / "model.xml"
    ov.save_model(ov.Model([y], [x], "m"), path, compress_to_fp16=False)
    made.export(tmp_path, [layer.problem for layer in integration.scan(path)])
    assert integration.problems(path) == []
    model = ov.Core().read_model(path)
    operations = integration.replace(model, path, td.load(tmp_path), settings=EXACT)
    assert list(operations) == []
    (reason,) = operations.left.values()
    assert reason == f"OpenVINO computes {np.dtype(dtype)} in float32: save the model in float32"
    data = [np.ones((1, 3, 5, 6), dtype)]
    assert_close(ov.compile_model(model, "CPU", EXACT)(data)[0], ov.compile_model(path, "CPU", EXACT)(data)[0])
