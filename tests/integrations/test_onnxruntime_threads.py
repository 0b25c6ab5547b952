"""Layers inside ONNX Runtime compute in the session's threads; each scenario is a process of its own."""

import pytest
from support import artifacts as made
from support.threads import run_script

import tvm_deconv as td

pytest.importorskip("onnxruntime")

PROBLEM = td.from_onnx((1, 32, 64, 64), (32, 16, 4, 4), strides=(2, 2), pads=(1, 1, 1, 1))

PRELUDE = """
import sys, time
from pathlib import Path
import numpy as np
import onnx, onnxruntime
from onnx import helper
import tvm_deconv as td
from support.threads import call_from_threads, child_has_the_pool, pool_starts, workers
from support.tolerances import WINOGRAD, assert_close
from tvm_deconv.onnxruntime import Session

td.set_num_threads(3)
library, problem = td.load(sys.argv[1]), td.Problem.from_key(sys.argv[2])
random = np.random.default_rng()
x, weight = (random.standard_normal(shape, np.float32) for shape in (problem.data_shape, problem.filter_shape))
node = helper.make_node("ConvTranspose", ["x", "w"], ["y"], strides=[2, 2], pads=[1, 1, 1, 1])
values = [
    helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape)
    for name, shape in (("x", problem.data_shape), ("y", problem.output_shape))
]
graph = helper.make_graph([node], "g", values[:1], values[1:], [onnx.numpy_helper.from_array(weight, "w")])
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
path = Path(sys.argv[3]) / "model.onnx"
onnx.save(model, path)
wanted = library.bind(problem, weight)(x, threads=1)
(expected,) = onnxruntime.InferenceSession(path).run(None, {"x": x})
assert_close(wanted, expected, growth=WINOGRAD)

def session(threads):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    made = Session(path, library, options, measure=False)
    assert made.layers
    return made

def check(session):
    assert np.array_equal(session.run(None, {"x": x})[0], wanted)  # to the last bit, whoever computes
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("threads")
    made.export(directory, [PROBLEM])
    return directory


@pytest.fixture
def run(directory, tmp_path):
    return lambda script: run_script(PRELUDE + script, directory, PROBLEM.key, tmp_path)


def test_the_sessions_threads_compute(run):
    run("""
def spent():  # in other threads than this one
    return time.process_time() - time.thread_time()
for threads in (3, 2, 1, 0):
    made = session(threads)
    before = spent()
    for _ in range(30): check(made)
    assert threads != 1 or spent() - before < 0.01
    assert threads < 2 or spent() - before > 0.002
assert not workers()
""")


def test_several_callers_of_a_session(run):
    run("""
made = session(3)
call_from_threads(lambda: check(made), 30)
assert not workers()
""")


def test_a_forked_child_has_the_pool(run):
    # The session's threads are not there.
    run("""
made = session(3)
check(made)
assert child_has_the_pool(lambda: check(made))
check(made)
assert not workers()
""")
