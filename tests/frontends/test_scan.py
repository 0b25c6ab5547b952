"""What all readers share: hostile files, the file of weights, the table, packages that are missing."""

import dataclasses
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file

from tvm_deconv import Problem, Scaling, SourceError
from tvm_deconv.frontends import Coverage, FoundLayer, coverage_table, scan, with_unique_names, write_weights
from tvm_deconv.problem.arrays import numpy_dtype

EXAMPLES = Path(__file__).parents[2] / "examples"
#: In an ONNX file the nodes come first, the weights last: most faults should be where they matter.
SOURCES = {"upsampling_node_grouped.xml": 4000, "decoder.onnx": 3000, "problems.json": 4000}


@st.composite
def damages(draw, size):
    """A list of (position, bytes to remove, bytes to put there)."""
    position = st.integers(0, size - 1)
    content = st.one_of(st.binary(max_size=3), st.text('0123456789-.,e<>"[]{}', max_size=6).map(str.encode))
    return draw(st.lists(st.tuples(position, st.integers(0, 8), content), min_size=1, max_size=4))


def damaged(content, faults):
    for position, removed, put in faults:
        content = content[:position] + put + content[position + removed :]
    return content


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hostile")
    shutil.copy(EXAMPLES / "upsampling_node_grouped.bin", folder)
    return folder


def survives(path, content):
    """`content` is read or refused, never anything else."""
    path.write_bytes(content)
    try:
        layers = scan(path)
    except SourceError as error:
        assert error.rule  # noqa: PT017 (either way is right)
    else:
        assert all((layer.problem is None) == bool(layer.reason) for layer in layers)


@pytest.mark.filterwarnings("ignore:.*means nothing; did you mean")  # a damaged name of a field
@pytest.mark.parametrize("name", SOURCES)
@settings(max_examples=100)
@given(data=st.data())
def test_damaged_files(folder, name, data):
    content = (EXAMPLES / name).read_bytes()
    survives(folder / name, damaged(content, data.draw(damages(min(SOURCES[name], len(content))))))


@pytest.mark.parametrize("name", SOURCES)
@settings(max_examples=50)
@given(share=st.floats(0, 1))
@example(share=0.0)
def test_truncated_files(folder, name, share):
    content = (EXAMPLES / name).read_bytes()
    survives(folder / name, content[: int(share * len(content))])


@pytest.mark.parametrize("name", SOURCES)
@settings(max_examples=50)
@given(content=st.binary(max_size=200))
def test_noise(folder, name, content):
    survives(folder / name, content)


def found(name, filter=None, bias=None, **changes):
    problem = Problem(1, 1, 2, 3, (4,), (2,), (2,), (1,), (0,), (8,), **changes)
    return FoundLayer(name, "ConvTranspose", problem, filter, bias)


def test_weights(tmp_path):
    filter, bias = np.arange(12, dtype=np.float32).reshape(2, 3, 2), np.ones(3, np.float32)
    layers = [found("a/b", filter[:, :, ::-1], bias), found("c"), found("d", filter)]
    layers.append(FoundLayer("e", "ConvTranspose", reason="data has a dynamic shape"))
    path = tmp_path / "new" / "weights.safetensors"
    assert write_weights(layers, path) == ["a/b.filter", "a/b.bias", "d.filter"]
    read = load_file(path)
    np.testing.assert_array_equal(read["a/b.filter"], filter[:, :, ::-1])
    np.testing.assert_array_equal(read["a/b.bias"], bias)
    with safe_open(path, "numpy") as file:
        assert file.metadata() == {layer.name: layer.problem.key for layer in layers[:3]}
    assert list(path.parent.iterdir()) == [path]


def test_no_weights_no_file(tmp_path):
    assert write_weights([found("a")], tmp_path / "weights.safetensors") == []
    assert not list(tmp_path.iterdir())


def test_weights_of_a_failed_write(tmp_path):
    (tmp_path / "weights.safetensors").mkdir()
    with pytest.raises(IsADirectoryError):
        write_weights([found("a", np.ones((2, 3, 2), np.float32))], tmp_path / "weights.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["weights.safetensors"]


def test_table():
    layer = found("a")
    table = coverage_table([layer, FoundLayer("b", "ConvTranspose", reason="data has a dynamic shape")])
    assert table == [
        Coverage("a", "ConvTranspose", layer.problem.key, "", "none", layer.problem.macs),
        Coverage("b", "ConvTranspose", "", "data has a dynamic shape", "", 0),
    ]


def test_sources_together_keep_their_names_apart():
    layers = scan(EXAMPLES / "upsampling_node.xml") + scan(EXAMPLES / "upsampling_node.xml")
    assert [layer.name for layer in with_unique_names(layers)] == ["upsampling_node", "upsampling_node_2"]


@pytest.mark.parametrize(
    ("names", "unique"),
    [
        (["a", "a.scaling"], ["a", "a.scaling_2"]),
        (["a.scaling", "a"], ["a.scaling", "a_2"]),
        (["a", "a", "a_2.scaling"], ["a", "a_3", "a_2.scaling"]),
        (["b", "a.scaling"], ["b", "a.scaling"]),
    ],
)
def test_names_keep_the_scaling_of_a_quantized_layer_apart(names, unique, tmp_path):
    """Which the file of weights has under a name of its own; here only layers called "a" are quantized."""
    plain = found("", np.ones((2, 3, 2), np.float32))
    quantized = dataclasses.replace(plain, scaling=Scaling(data_scale=0.5))
    named = with_unique_names(dataclasses.replace(quantized if name == "a" else plain, name=name) for name in names)
    assert [layer.name for layer in named] == unique
    write_weights(named, tmp_path / "weights.safetensors")
    with safe_open(tmp_path / "weights.safetensors", "numpy") as file:
        assert len(file.metadata()) == len(names) + names.count("a")


@pytest.mark.parametrize(
    ("name", "reader", "package", "install"),
    [
        ("decoder.onnx", "onnx", "onnx", r".*\[onnx\]'"),
        ("layers.json", "problem_list", "msgspec", r".*\[compile\]'"),
    ],
)
def test_missing_packages(monkeypatch, name, reader, package, install):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, f"tvm_deconv.frontends.{reader}", raising=False)
    with pytest.raises(SourceError, match=f"needs the package {package}: pip install {install}$"):
        scan(EXAMPLES / name)


def test_missing_ml_dtypes(monkeypatch):
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(SourceError, match="needs the package ml_dtypes: pip install"):
        numpy_dtype("bfloat16")


def test_missing_safetensors(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "safetensors.numpy", None)
    with pytest.raises(SourceError, match="needs the package safetensors: pip install"):
        write_weights([found("a", np.ones((2, 3, 2), np.float32))], tmp_path / "weights.safetensors")
