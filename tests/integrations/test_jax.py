"""Layers as functions of JAX. Each test is a process of its own: once JAX's threads run, it warns at every fork."""

import importlib.util

import pytest
from support import artifacts as made
from support.threads import run_script

import tvm_deconv as td

pytestmark = pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="could not import 'jax'")

PROBLEMS = {
    "float32": td.from_onnx((2, 6, 5, 3), (6, 2, 3, 3), strides=(2, 3), pads=(1, 0, 1, 0), group=3),
    "bias": td.from_onnx((1, 4, 6), (4, 3, 4), strides=(2,), epilogue=td.Epilogue(True, "tanh")),
    "3d": td.from_onnx((1, 3, 2, 3, 4), (3, 2, 2, 3, 2), dilations=(1, 2, 1)),
    "bfloat16": td.from_onnx((2, 4, 6), (4, 3, 4), strides=(2,), dtype="bfloat16", epilogue=td.Epilogue(True)),
    "float16": td.from_onnx((2, 4, 6), (4, 3, 4), strides=(2,), dtype="float16"),
    "float64": td.from_onnx((2, 4, 6), (4, 3, 4), strides=(2,), dtype="float64"),
    "int8": td.from_onnx((2, 4, 6), (4, 3, 4), strides=(2,), dtype="int8"),
    "dynamic": td.from_onnx(("any", 4, "any"), (4, 3, 4), strides=(2,), pads=(1, 1)),
}

PRELUDE = """
import sys
import jax, jax.numpy as jnp
import numpy as np
import tvm_deconv as td
from tvm_deconv.jax import function
from tvm_deconv.problem.testing import operands
from support.threads import call_from_threads
from support.tolerances import assert_close

library = td.load(sys.argv[1])

def bound(key, seed=0):
    problem = td.Problem.from_key(key)
    fixed = problem.at((3, 4, 9)) if problem.dynamic else problem
    data, filter, bias, _ = operands(fixed, seed)
    layer = library.bind(problem, filter, bias if problem.epilogue.bias else None)
    return layer, data, td.reference(fixed, data, filter, bias if problem.epilogue.bias else None)
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("jax")
    made.export(directory, PROBLEMS.values())
    return directory


@pytest.fixture
def run(directory):
    def run(script, *names):
        run_script(PRELUDE + script, directory, *(PROBLEMS[name].key for name in names))

    return run


def test_results_are_right(run):
    run(
        """
jax.config.update("jax_enable_x64", True)
for number, key in enumerate(sys.argv[2:]):
    layer, data, expected = bound(key, number)
    given = jnp.asarray(data.view("bfloat16") if layer.problem.dtype == "bfloat16" else data)
    up = function(layer)
    for got in (up(given), jax.jit(up)(given), jax.jit(lambda x: up(x) + 0)(given)):
        assert got.dtype == layer.problem.output_dtype, got.dtype
        assert_close(np.asarray(got.astype("float64")), expected, layer.problem.dtype)
    pair = jax.vmap(up)(jnp.stack([given, given * 0]))
    assert np.array_equal(pair[0], up(given)) and np.array_equal(pair[1], up(given * 0))
assert "callback" not in str(jax.make_jaxpr(up)(given))
""",
        *PROBLEMS,
    )


def test_what_does_not_fit_is_an_error(run):
    run(
        """
layer, data, _ = bound(sys.argv[2])
up = function(layer)

def raised(kind, compute):
    try:
        compute()
    except kind as error:
        return str(error)
    raise AssertionError(kind)

assert "dtype" in raised(td.TensorTypeError, lambda: up(data.astype(np.float16)))
for compute in (up, jax.jit(up)):
    assert raised(td.TensorError, lambda: compute(data[:1])).startswith("data=(1, 6, 5, 3): ")
assert "jax_enable_x64" in raised(td.ProblemError, lambda: function(bound(sys.argv[3])[0]))
numpy = td.load(sys.argv[1] + "/..", fallback="reference").bind(layer.problem, np.ones(layer.problem.filter_shape, "f"))
assert "must be a Layer of an artifact for CPUs" in raised(td.ProblemError, lambda: function(numpy))
assert raised(td.ProblemError, lambda: function(None)).startswith("layer=None: must be a Layer")

# What another process has traced names an artifact that is not loaded here; a kernel refuses what it was not made for.
call = jax.ffi.ffi_call("tvm_deconv", jax.ShapeDtypeStruct((2, 2), "float32"))
assert "artifact=none: must be loaded" in raised(Exception, lambda: call(data, artifact="none").block_until_ready())
name = layer.manifest.sha256
assert "Error: " in raised(Exception, lambda: call(data, data, artifact=name).block_until_ready())
assert "must have data" in raised(Exception, lambda: call(data, artifact=name, more=1).block_until_ready())
""",
        "float32",
        "float64",
    )


def test_a_program_outlives_its_layer(run):
    run(
        """
import gc
layer, data, expected = bound(sys.argv[2])
program = jax.jit(function(layer))
program(data)
del layer
gc.collect()
call_from_threads(lambda: assert_close(np.asarray(program(data)), expected), 50)
""",
        "bias",
    )
