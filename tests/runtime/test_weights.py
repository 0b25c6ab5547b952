"""Layers by the names of their models: `Library.layers`, `Library.layer`."""

import json
import math
import os
import re
import resource

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support import artifacts as made
from support.strategies import operands
from support.tolerances import element_bound

import tvm_deconv as td
from tvm_deconv.artifact import signing
from tvm_deconv.frontends import FoundLayer, write_weights

NAMES = ["bias", "bfloat16", "channels last", "float16", "float64", "grouped", "int8", "plain"]


@pytest.fixture
def directory(artifacts, tmp_path):
    """The artifacts, with weights of a model that has layers of all types."""
    for path in artifacts.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    write(tmp_path / "model.safetensors", *NAMES)
    return tmp_path


def write(path, *names, seed=3):
    write_weights([found(name, seed) for name in names], path)


def found(name, seed):
    _, filter, bias = operands(made.PROBLEMS[name], seed)
    return FoundLayer(name, "ConvTranspose", made.PROBLEMS[name], filter, bias)


@pytest.mark.parametrize("name", NAMES)
def test_layers_compute_with_their_weights(directory, name):
    problem = made.PROBLEMS[name]
    data = operands(problem, 11)[0]
    layer = td.load(directory).layer(name)
    out = np.full(problem.output_shape, 77, np.dtype(data.dtype) if problem.output_dtype == problem.dtype else np.int32)
    layer(data, out=out)
    expected = td.reference(problem, data, found(name, 3).filter, found(name, 3).bias)
    error = np.abs(out.astype(np.float64) - expected).max()
    assert error <= element_bound(problem.dtype) * np.abs(expected).max()


def test_names(directory):
    library = td.load(directory)
    assert list(library) == list(library.layers) == sorted(NAMES)
    assert len(library) == len(NAMES)
    assert "plain" in library
    assert "no batch" not in library
    assert library.layers["plain"] == made.PLAIN
    assert repr(library.layers) == f"<Weights of {', '.join(sorted(NAMES))}>"
    with pytest.raises(td.ProblemError, match=r"^name='up9': must be one of bfloat16, bias, channels last, "):
        library.layer("up9")


def test_without_weights(artifacts):
    library = td.load(artifacts)
    assert library
    assert not len(library)
    with pytest.raises(td.ProblemError, match=r"must be a layer that was compiled with its weights: there is none$"):
        library.layer("up0")


def test_a_layer_whose_bias_is_no_constant(directory):
    problem = made.PROBLEMS["bias"]
    data, filter, bias = operands(problem, 3)
    write_weights([FoundLayer("free", "ConvTranspose", problem, filter)], directory / "free.safetensors")
    library = td.load(directory)
    rule = "must be an array of shape (5,), passed to bind with weights('free')[0]: the model has no constant one"
    with pytest.raises(td.TensorError, match=f"^bias=None: {re.escape(rule)}$"):
        library.layer("free")
    layer = library.bind(library.layers["free"], library.weights("free")[0], bias)
    np.testing.assert_array_equal(layer(data), library.bind(problem, filter, bias)(data))


def test_a_name_of_two_models(directory):
    write(directory / "other.safetensors", "plain", seed=4)
    library = td.load(directory)
    assert {"model:plain", "other:plain", "bias"} < set(library)
    assert "plain" not in library
    data = operands(made.PLAIN, 11)[0]
    results = [library.layer(name)(data) for name in ("model:plain", "other:plain")]
    for result, seed in zip(results, (3, 4), strict=True):
        expected = td.reference(made.PLAIN, data, found("plain", seed).filter)
        assert np.abs(result - expected).max() <= element_bound("float32") * np.abs(expected).max()
    save_file({"model:plain.filter": np.ones(3)}, directory / "odd.safetensors", {"model:plain": made.PLAIN.key})
    with pytest.raises(td.ArtifactError, match=r"^name='model:plain': must be unique among the files of weights"):
        td.load(directory).layers  # noqa: B018


def test_layers_whose_filter_is_no_constant(directory):
    save_file({"a.filter": np.ones(made.PLAIN.filter_shape, np.float32)}, directory / "model.safetensors",
              {"a": made.PLAIN.key, "b": made.PLAIN.key})  # fmt: skip
    assert list(td.load(directory)) == ["a"]


def header(**fields):
    text = json.dumps(fields).encode()
    return len(text).to_bytes(8, "little") + text


META = {"up": made.PLAIN.key}
ENTRY = {"dtype": "F32", "shape": list(made.PLAIN.filter_shape), "data_offsets": [0, 540]}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "Expecting value"),
        (b"\xff" * 8, "the file is shorter than its header"),
        (b"\xff" * 7 + b"\x7f{}", "the file is shorter than its header"),
        ((4).to_bytes(8, "little") + b"[[]]", "its header is no object"),
        (header(__metadata__={"up": "n1-nonsense"}, **{"up.filter": ENTRY}), "weights that a compile wrote: key="),
        (header(__metadata__={"up": 5}, **{"up.filter": ENTRY}), "weights that a compile wrote: "),
        (header(__metadata__=META, **{"up.filter": ENTRY}), "up.filter: cannot reshape array of size 0"),
        (
            header(__metadata__=META, **{"up.filter": ENTRY | {"shape": [9]}}),
            "the bytes from 0 to 540 are not those of",
        ),
        (header(__metadata__=META, **{"up.filter": ENTRY | {"data_offsets": [-8, 532]}}), "up.filter: "),
        (
            header(__metadata__=META, **{"up.filter": ENTRY | {"data_offsets": [-8, 532]}}) + bytes(532),
            "up.filter: the bytes from -8 to 532",
        ),
        (header(__metadata__=META, **{"up.filter": ENTRY | {"dtype": "F8"}}), "up.filter: 'F8'"),
        (header(__metadata__=META, **{"up.filter": {}}), "up.filter: 'dtype'"),
        (header(__metadata__=META, **{"up.filter": ENTRY | {"shape": [math.inf]}}), "up.filter: cannot convert"),
    ],
)
def test_files_that_are_not_weights(directory, content, said):
    (directory / "model.safetensors").write_bytes(content)
    with pytest.raises(td.ArtifactError, match=said) as caught:
        td.load(directory).layer("up")
    assert caught.value.path.name == "model.safetensors"


def test_weights_that_do_not_fit_in_memory(directory):
    path = directory / "model.safetensors"
    os.truncate(path, 1 << 32)  # most of it a hole
    most = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (1 << 32, most[1]))
    try:
        with pytest.raises(td.ArtifactError, match=r"model\.safetensors: must fit in memory: 4294967296 bytes$"):
            td.load(directory).layer("plain")
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, most)


def test_weights_of_another_shape(directory):
    save_file({"a.filter": np.ones((2, 2), np.float32)}, directory / "model.safetensors", {"a": made.PLAIN.key})
    with pytest.raises(td.TensorError, match=r"^filter=\(2, 2\): rank must be 4"):
        td.load(directory).layer("a")


def test_signed_weights_are_those_that_were_signed(directory, keys):
    library = td.load(directory)
    signing.sign(directory, library.digest, keys[0])
    library = td.load(directory, public_key=keys[1])
    assert library.layer("plain").problem == made.PLAIN
    write(directory / "model.safetensors", *NAMES, seed=4)  # after it was checked
    with pytest.raises(td.IntegrityError, match=r"which was signed \(in .*model.safetensors\)$"):
        library.layer("plain")
    write(directory / "other.safetensors", "grouped")
    library = td.load(directory)
    signing.sign(directory, library.digest, keys[0])
    library = td.load(directory, public_key=keys[1])
    (directory / "other.safetensors").rename(directory / "third.safetensors")
    with pytest.raises(td.IntegrityError, match=r"third\.safetensors"):
        list(library)


@pytest.fixture
def keys(tmp_path_factory):
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

    folder = tmp_path_factory.mktemp("keys")
    key = Ed25519PrivateKey.generate()
    (folder / "private").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    (folder / "public").write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    return folder / "private", folder / "public"


def test_the_format_is_that_of_safetensors(directory):
    """What is read here and what the package reads are the same bits."""
    theirs = load_file(directory / "model.safetensors")
    library = td.load(directory)
    for name in NAMES:
        filter, bias = library.weights(name)
        np.testing.assert_array_equal(filter.view(np.uint8), theirs[f"{name}.filter"].view(np.uint8))
        assert (bias is None) == (f"{name}.bias" not in theirs)
