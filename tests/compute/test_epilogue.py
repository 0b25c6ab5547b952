"""Every activation, vectorised, against float64; and no call of the C library where float32 has to vectorise."""

import functools
import math
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tvm_deconv.problem import ACTIVATIONS, Epilogue
from tvm_deconv.targets import CPU_LEVELS, CPU_TARGETS, detect_host

tvm = pytest.importorskip("tvm")

from tvm import s_tir, te, tirx  # noqa: E402

from tvm_deconv.compute.epilogue import activate  # noqa: E402

SIZE = 4096
FLOATS = {name: Epilogue(activation=name, alpha=0.3, minimum=-1.5, maximum=2.25) for name in ACTIVATIONS}
EPILOGUES = {
    "float32": FLOATS
    | {
        "beyond": Epilogue(activation="clip", minimum=-1e300, maximum=math.inf),
        "steep": Epilogue(activation="leaky_relu", alpha=1e300),
    },
    "float64": FLOATS,
    "int32": {
        "none": Epilogue(),
        "relu": Epilogue(activation="relu"),
        "clip": Epilogue(activation="clip", minimum=-(2**31), maximum=2**31 - 100),
    },
}
CASES = [(dtype, name) for dtype, epilogues in EPILOGUES.items() for name in epilogues]
#: The functions of the C library that float64 calls.
LIBRARY = {
    "sigmoid": {"exp"},
    "silu": {"exp"},
    "tanh": {"tanh"},
    "gelu": {"erfc"},
    "elu": {"expm1"},
    "mish": {"exp", "log1p", "tanh"},
    "softplus": {"exp", "log1p"},
}
#: The most by which a result may be off, relative to it; `activate` states that of float32. All others are exact.
ERROR = {
    "float32": {
        "sigmoid": 1.8e-7,
        "silu": 1.8e-7,
        "tanh": 2.5e-7,
        "gelu": 4.5e-7,
        "elu": 1.7e-7,
        "hardswish": 1.8e-7,
        "mish": 3.1e-7,
        "softplus": 2.8e-7,
    },
    "float64": dict.fromkeys((*LIBRARY, "hardswish"), 2e-15),
}
#: The most by which it may be off besides: where silu and mish underflow, at -88 and at -709.
TINY = {"float32": 8e-37, "float64": 1e-305}
SPECIAL = [0.0, -0.0, np.nan, np.inf, -np.inf, 1e-45, -1e-45, 1e-38, -1e-38, 3e38, -3e38, 13.25, -13.25, 88.4, -88.4]


def vectorised(target, dtype, functions):
    """A compiled module and the assembly of each function; `functions` map a tensor and an index to an expression."""

    def scheduled(function):
        x = te.placeholder((SIZE + 1,), dtype, "x")
        y = te.compute((SIZE,), lambda i: function(x, i), "y")
        schedule = s_tir.Schedule(te.create_prim_func([x, y]))
        (loop,) = schedule.get_loops(schedule.get_sblock("y"))
        _, unrolled, vector = schedule.split(loop, [None, 2, CPU_TARGETS[target].lanes(4)])
        schedule.unroll(unrolled)
        schedule.vectorize(vector)
        return schedule.mod["main"]

    made = {name: scheduled(function).with_attr("global_symbol", name) for name, function in functions.items()}
    compiled = tvm.compile(
        tvm.IRModule(made), target=tvm.target.Target({"kind": "llvm", "mcpu": CPU_TARGETS[target].mcpu})
    )
    text = compiled.mod.inspect_source("asm")
    return compiled, {name: re.search(rf"^{name}_compute_:(.*?)^\.Lfunc_end", text, re.M | re.S)[1] for name in made}


def at(epilogue, offset=0):
    return lambda x, i: activate(epilogue, x[i + offset])


@functools.cache
def activations(target, dtype):
    return vectorised(target, dtype, {name: at(epilogue) for name, epilogue in EPILOGUES[dtype].items()})


def called(assembly):
    return {name for name in re.findall(r"\bcallq?\s+([\w*]+)", assembly) if not name.startswith("TVM")}


def run(function, values):
    """The results at `values`, any number of them."""
    pieces = []
    for start in range(0, len(values), SIZE):
        piece = values[start : start + SIZE]
        x = tvm.runtime.tensor(np.pad(piece, (0, SIZE + 1 - len(piece))))
        y = tvm.runtime.tensor(np.full(SIZE, 77, values.dtype))
        function(x, y)
        pieces.append(y.numpy()[: len(piece)])
    return np.concatenate(pieces)


@functools.cache
def dense(dtype):
    if dtype == "int32":
        return np.append(np.arange(-(2**31), 2**31, 19_973), [-(2**31), -1, 0, 1, 2**31 - 1]).astype(dtype)
    # Bit patterns of float32 at a distance: all exponents, NaN, denormals.
    patterns = np.arange(0, 2**32, 19_973, dtype=np.uint32).view(np.float32)
    near = np.linspace(-45, 45, 50_001)
    with np.errstate(invalid="ignore"):
        return np.concatenate([patterns, near, SPECIAL], dtype=dtype, casting="same_kind")


def expected(epilogue, x):
    """The activation in float64, with parameters of the type of `x`."""
    wide = x.astype(np.float64)
    if epilogue.activation == "gelu":
        # With the kernel's argument of erfc: far out, how that is rounded shows more than what is compared here.
        tail = np.array([math.erfc(value) for value in (wide * -math.sqrt(0.5)).tolist()])
        return np.where(wide == -np.inf, -1, wide) * 0.5 * tail
    parameters = (np.array(value).astype(x.dtype).astype(np.float64) for value in epilogue.parameters.values())
    return ACTIVATIONS[epilogue.activation].function(wide, *parameters)


@np.errstate(all="ignore")
def check(target, dtype, name, x):
    if not CPU_TARGETS[target].features <= detect_host().features:
        pytest.skip(f"this CPU is less than {target}")
    epilogue = EPILOGUES[dtype][name]
    y, want = run(activations(target, dtype)[0][name], x), expected(epilogue, x)
    if name in ERROR.get(dtype, ()):
        bound = ERROR[dtype][name] * np.abs(want) + TINY[dtype]
    else:
        want, bound = want.astype(x.dtype), 0
    good = (y == want) | (np.abs(y - want) <= bound) | (np.isnan(x) & np.isnan(y))
    assert good.all(), (x[~good][:5], y[~good][:5], want[~good][:5])
    if name in ("sigmoid", "tanh"):
        assert np.nanmax(np.abs(y), initial=0) <= 1


@pytest.mark.parametrize(("dtype", "name"), CASES)
@pytest.mark.parametrize("target", CPU_LEVELS)
def test_dense(target, dtype, name):
    check(target, dtype, name, dense(dtype))


@pytest.mark.parametrize("target", CPU_LEVELS)
@settings(max_examples=40)
@given(st.data())
def test_random(target, data):
    dtype = data.draw(st.sampled_from(list(EPILOGUES)))
    numbers = {"float32": st.floats(width=32), "float64": st.floats(), "int32": st.integers(-(2**31), 2**31 - 1)}
    x = np.array(data.draw(st.lists(numbers[dtype], min_size=1, max_size=40)), dtype)
    for name in EPILOGUES[dtype]:
        check(target, dtype, name, x)


@pytest.mark.parametrize("target", CPU_LEVELS)
@pytest.mark.parametrize("name", ["none", "relu", "leaky_relu", "silu", "tanh", "gelu", "elu", "hardswish", "mish"])
def test_sign_of_zero(target, name):
    for dtype in ("float32", "float64"):
        x = np.array([-0.0, 0.0], dtype)
        check(target, dtype, name, x)
        assert np.signbit(run(activations(target, dtype)[0][name], x)).tolist() == [True, False]


@pytest.mark.parametrize("target", CPU_LEVELS)
def test_float32_and_int32_are_vectors(target):
    register = {256: "ymm", 512: "zmm"}[CPU_TARGETS[target].vector_bits]
    for dtype in ("float32", "int32"):
        for name, assembly in activations(target, dtype)[1].items():
            assert not called(assembly), name
            assert register in assembly, name
            assert not re.search(r"\bv(f?n?m(add|sub)\w*|add|sub|mul|div|min|max|cmp\w*)s[sd]\b", assembly), name


@pytest.mark.parametrize("target", CPU_LEVELS)
def test_float64_calls_the_c_library(target):
    """And that, seen in the same way, is what the test above would catch."""
    for name, assembly in activations(target, "float64")[1].items():
        assert called(assembly) == LIBRARY.get(name, set()), name
    _, assembly = vectorised(target, "float32", {"exp": lambda x, i: tirx.exp(x[i])})
    assert called(assembly["exp"]) == {"expf"}


@pytest.mark.parametrize("name", ERROR["float64"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_twice_in_one_expression(dtype, name):
    """As inlining leaves it: the variables of one activation at two places, with different values."""
    x = te.placeholder((SIZE + 1,), dtype, "x")
    y = te.compute((SIZE + 1,), lambda i: activate(FLOATS[name], x[i]), "y")
    z = te.compute((SIZE,), lambda i: y[i] - 2 * y[i + 1], "z")
    schedule = s_tir.Schedule(te.create_prim_func([x, z]))
    schedule.compute_inline(schedule.get_sblock("y"))
    (loop,) = schedule.get_loops(schedule.get_sblock("z"))
    schedule.vectorize(schedule.split(loop, [None, 8])[1])
    function = tvm.compile(schedule.mod, target=tvm.target.Target({"kind": "llvm", "mcpu": "x86-64-v3"}))["main"]
    values = np.linspace(-6, 6, SIZE, dtype=dtype)
    once = np.append(expected(FLOATS[name], values), expected(FLOATS[name], np.zeros(1, dtype)))
    assert np.allclose(run(function, values), once[:-1] - 2 * once[1:], rtol=0, atol=20 * ERROR[dtype][name])
