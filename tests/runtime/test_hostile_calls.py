"""Arrays and options of any kind at bind and call: an error of ours that names them, or the right result."""

import numpy as np
import pytest
from hypothesis import strategies as st
from support import artifacts as made
from support.hostile import NUMBERS, TEXTS, hostile
from support.strategies import operands
from support.tolerances import assert_close

import tvm_deconv as td


def misaligned(array):
    memory = np.zeros(array.nbytes + 1, np.uint8)[1:]
    view = memory[: array.nbytes].view(array.dtype) if array.dtype.itemsize > 1 else memory
    return view.reshape(array.shape)


def filled(make):
    """A form of an array that holds the same values."""

    def changed(array):
        other = make(array)
        other[...] = array
        return other

    return changed


def read_only(array):
    array = array.copy()
    array.flags.writeable = False
    return array


#: Ways in which an array may come, or something that is none.
FORMS = {
    "plain": lambda array: array,
    "read-only": read_only,
    "reversed": filled(lambda array: np.zeros_like(array)[::-1]),
    "strided": filled(lambda array: np.zeros((*array.shape, 2), array.dtype)[..., 0]),
    "fortran": np.asfortranarray,
    "misaligned": filled(misaligned),
    "view": lambda array: array.view(np.ndarray),
    "swapped": lambda array: array.astype(array.dtype.newbyteorder()) if array.dtype.kind in "fiu" else array,
    "wider": lambda array: array.astype(np.float64),
    "integers": lambda array: array.astype(np.int64),
    "booleans": lambda array: array.astype(bool),
    "objects": lambda array: array.astype(object),
    "masked": lambda array: np.ma.masked_array(array),
    "flat": np.ravel,
    "deeper": lambda array: array[None],
    "shorter": lambda array: array[..., :-1],
    "longer": lambda array: np.concatenate([array, array], -1),
    "broadcast": lambda array: np.broadcast_to(array[:1], array.shape) if array.ndim else array,
    "transposed": lambda array: array.T,
    "huge shape": lambda array: np.lib.stride_tricks.as_strided(array, (1 << 40, *array.shape[1:]), (0,) * array.ndim),
    "list": lambda array: array.tolist(),
    "none": lambda array: None,  # noqa: ARG005
    "nothing": lambda array: np.zeros(0, array.dtype),
    "scalar": lambda array: array.dtype.type(1),
    "text": lambda array: str(array.shape),
    "type": type,
}
OPTIONS = st.one_of(st.none(), st.just(1), st.just(2), NUMBERS, TEXTS, st.booleans())
CALLS = st.fixed_dictionaries(
    {
        "name": st.sampled_from(sorted(made.PROBLEMS)),
        "data": st.sampled_from(sorted(FORMS)),
        "filter": st.sampled_from(sorted(FORMS)),
        "bias": st.sampled_from(sorted(FORMS)),
        "out": st.sampled_from(["absent", "data", *sorted(FORMS)]),
        "plain": st.sets(st.sampled_from(["data", "filter", "bias", "out", "threads", "workspace"])),
        "threads": OPTIONS,
        "workspace": OPTIONS,
        "seed": st.integers(0, 1000),
    }
)


@pytest.fixture
def library(artifacts):
    return td.load(artifacts)


def other_call(chance, call):
    """A call with one argument of another form, or other numbers."""
    name = chance.choice(["data", "filter", "bias", "out", "plain", "seed"])
    if name == "plain":
        return call | {"plain": {key for key in ("data", "filter", "bias", "out", "threads") if chance.random() < 0.7}}
    return call | {name: chance.randrange(1000) if name == "seed" else chance.choice(sorted(FORMS))}


@hostile(CALLS, fixture="library", vary=other_call)
def test_calls(library, call):
    """The arguments named in `plain` are as they should be."""
    problem = made.PROBLEMS[call["name"]]
    data, filter, bias = operands(problem, call["seed"])
    dtype = data.dtype if problem.output_dtype == problem.dtype else np.dtype(problem.output_dtype)
    out = np.full(problem.output_shape, 55, dtype)

    def form(name, array):
        return array if array is None or name in call["plain"] else FORMS[call[name]](array)

    options = {name: None if name in call["plain"] else call[name] for name in ("threads", "workspace")}
    given, weights, offset = form("data", data), form("filter", filter), form("bias", bias)
    try:
        layer = library.bind(problem, weights, offset, workspace=options["workspace"])
        target = given if call["out"] == "data" else None if call["out"] == "absent" else form("out", out)
        found = layer(given, target, threads=options["threads"])
    except td.DeconvError:
        return
    assert_close(found, td.reference(problem, given, weights, offset), problem.dtype)
