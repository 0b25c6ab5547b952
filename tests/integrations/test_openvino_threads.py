"""Operations inside OpenVINO compute in its threads, and in the pool where those cannot be had."""

import ctypes
import importlib
import os
import threading

import numpy as np
import pytest
from support import artifacts as made
from support.threads import run_script

from tvm_deconv.errors import CompilerNotFound
from tvm_deconv.runtime.threads import Host

pytest.importorskip("openvino")

#: Runs a model with operations, in the pool if told so; prints whether that started, and the digest of the output.
SCRIPT = """
import hashlib, os, sys
import numpy as np, openvino as ov, tvm_deconv as td
from tvm_deconv.openvino import replace, threads
from support.threads import workers
path = sys.argv[1]
if "pool" in sys.argv:
    threads.ARENA._known = 0
assert "pool" in sys.argv or threads.ARENA.address
td.set_num_threads(2)
model = ov.Core().read_model(path)
operations = replace(model, path, td.load(os.path.dirname(path)), measure=False)
compiled = ov.compile_model(model, "CPU", {"INFERENCE_NUM_THREADS": 2, "INFERENCE_PRECISION_HINT": "f32"})
x = np.random.default_rng(3).standard_normal((1, 16, 32, 32), np.float32)
for _ in range(20):
    y = compiled([x])[0]
print(workers() > 0, len(operations), hashlib.sha256(y.tobytes()).hexdigest())
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A model of one layer, which has artifacts in its folder."""
    import openvino as ov
    from openvino import opset13

    from tvm_deconv.openvino import problems

    x = opset13.parameter([1, 16, 32, 32], np.float32)
    filter = opset13.constant(np.random.default_rng(4).standard_normal((16, 16, 4, 4), np.float32))
    y = opset13.convolution_backprop_data(x, filter, [2, 2], None, [1, 1], [1, 1], [1, 1])
    path = tmp_path_factory.mktemp("threads") / "model.xml"
    ov.save_model(ov.Model([y], [x], "m"), path, compress_to_fp16=False)
    made.export(path.parent, problems(path))
    return path


def test_operations_compute_in_the_arena(path):
    inside, pool = run_script(SCRIPT, path).split(), run_script(SCRIPT, path, "pool").split()
    assert inside[:2] == ["False", "1"], "our own pool does not start"
    assert pool[:2] == ["True", "1"], "else it does"
    assert inside[2] == pool[2], "outputs are the same to the last bit"


@pytest.fixture
def threads():
    return importlib.import_module("tvm_deconv.openvino.threads")


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="oneTBB has as many threads as there are processors")
def test_its_threads_join(threads):
    """Each of two bodies waits for the other."""
    host = Host.from_address(threads.ARENA.address)
    met, meeting = [], threading.Barrier(2, timeout=60)

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t)
    def body(argument, index):
        meeting.wait()
        met.append((argument, index, threading.get_ident()))

    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t, type(body), ctypes.c_void_p)
    function(host.parallel_for)(host.context, 2, body, 7)
    assert sorted((argument, index) for argument, index, _ in met) == [(7, 0), (7, 1)]
    assert len({thread for *_, thread in met}) == 2


def test_all_bodies_of_a_large_team_run_once(threads):
    host = Host.from_address(threads.ARENA.address)
    ran = []
    body = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t)(lambda _, index: ran.append(index))
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t, type(body), ctypes.c_void_p)
    for count in (0, 1, 2, 7, 256, 1000):
        ran.clear()
        function(host.parallel_for)(host.context, count, body, None)
        assert sorted(ran) == list(range(min(count, 256)))


def test_there_is_no_arena_without_a_compiler(threads, monkeypatch):
    def none():
        raise CompilerNotFound("cc", None, "none is installed")

    monkeypatch.setattr(threads, "_compiled", none)
    assert threads._Arena().address == 0


@pytest.mark.parametrize(("name", "value"), [("_LIBRARY", "libtbb.so.none"), ("_FUNCTIONS", ("none",) * 4)])
def test_there_is_no_arena_of_another_library(threads, monkeypatch, name, value):
    monkeypatch.setattr(threads, name, value)
    assert threads._Arena().address == 0
