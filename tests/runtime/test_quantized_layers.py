"""Quantized layers: bound with their numbers, verified, computed without an artifact, and refused."""

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest
from support import artifacts as made

import tvm_deconv as td
from tvm_deconv.problem.testing import operands
from tvm_deconv.runtime.verify import verify

PROBLEM = td.Problem(
    1, 1, 5, 8, (6,), (4,), (2,), (1,), (1,), (12,),
    dtype="uint8", quantization=td.Quantization("uint8", "uint8"), epilogue=td.Epilogue(True, "relu"),
)  # fmt: skip
FLOAT = PROBLEM.replace(quantization=td.Quantization("int8", "float32"), epilogue=td.Epilogue())


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    folder = tmp_path_factory.mktemp("artifacts")
    made.export(folder, [PROBLEM, FLOAT.replace(dynamic=(0,))])
    return td.load(folder)


@pytest.mark.usefixtures("compiles_here")
def test_the_example_of_the_documentation(tmp_path, monkeypatch):
    """As it is printed; it compares with the reference itself."""
    text = (Path(__file__).parents[2] / "docs" / "semantics.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```", text, flags=re.M | re.S)
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(code, names)
    assert names["out"].dtype == np.uint8
    assert len(np.unique(names["out"])) > 50


@pytest.mark.parametrize("filter_format", ["IOX", "XIO"])
def test_a_layer_computes_what_the_reference_does(library, filter_format):
    problem = PROBLEM.replace(filter_format=filter_format)
    arrays = operands(problem, 4)
    layer = library.bind(problem, arrays.filter, arrays.bias, scaling=arrays.scaling)
    found = layer(arrays.data)
    assert found.dtype == np.uint8
    np.testing.assert_array_equal(found, td.reference(problem, *arrays))
    other = dataclasses.replace(arrays.scaling, data_zero_point=3, output_zero_point=9, output_scale=8.0)
    again = library.bind(problem, arrays.filter, arrays.bias, scaling=other)  # the same artifact
    np.testing.assert_array_equal(again(arrays.data), td.reference(problem, *arrays[:3], other))


def test_batches_of_any_size_give_real_numbers(library):
    problem = FLOAT.replace(batch=3)
    arrays = operands(problem, 4)
    layer = library.bind(problem, arrays.filter, scaling=arrays.scaling)
    found = layer(arrays.data)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, td.reference(problem, *arrays))


def test_every_artifact_is_verified(library):
    assert [verify(library, manifest, 7).status for manifest in library.manifests] == ["ok", "ok"]


@pytest.mark.parametrize("problem", [PROBLEM, FLOAT, FLOAT.replace(quantization=td.Quantization("int8", "int32"))])
def test_numpy_computes_without_an_artifact(tmp_path, problem):
    arrays = operands(problem, 5)
    layer = td.load(tmp_path, fallback="reference").bind(problem, arrays.filter, arrays.bias, scaling=arrays.scaling)
    found = layer(arrays.data)
    assert found.dtype == problem.output_dtype
    np.testing.assert_array_equal(found, td.reference(problem, *arrays))


def test_what_does_not_fit_is_refused(library):
    arrays = operands(PROBLEM)
    with pytest.raises(td.ProblemError, match="must be a Scaling: the problem is quantized"):
        library.bind(PROBLEM, arrays.filter, arrays.bias)
    with pytest.raises(td.TensorTypeError, match="filter='int8': dtype must be uint8"):
        library.bind(PROBLEM, arrays.filter.view(np.int8), arrays.bias, scaling=arrays.scaling)
    with pytest.raises(td.ProblemError, match=r"output_scale=0\.0: must be from"):
        library.bind(PROBLEM, arrays.filter, arrays.bias, scaling=td.Scaling(output_scale=0.0))
    plain = PROBLEM.replace(quantization=None)
    with pytest.raises(td.ProblemError, match="must be None: the problem is not quantized"):
        td.load(library.root, fallback="reference").bind(plain, arrays.filter, arrays.bias, scaling=td.Scaling())
