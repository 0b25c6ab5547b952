"""Files that are no files, as sources and in artifacts: a pipe, a device, a socket, a directory, a huge one, a circle.

None is waited for, and none is read without bound. The huge ones are of zeros that no disk holds.
"""

import os
import shutil
import signal
import socket

import numpy as np
import onnx
import openvino
import pytest
from click.testing import CliRunner
from onnx import TensorProto, helper
from openvino import opset1
from support import artifacts as made
from support.keys import write_keys

import tvm_deconv as td
from tvm_deconv.artifact.signing import FILE
from tvm_deconv.cli.main import main
from tvm_deconv.compiler.requests import whole
from tvm_deconv.frontends import scan
from tvm_deconv.targets import get

HUGE = 100 << 30
KINDS = ("pipe", "device", "socket", "directory", "huge", "loop")
P = made.PLAIN


@pytest.fixture(autouse=True)
def limited():
    """Half a minute, after which a read that waits is interrupted."""

    def late(*_):
        raise AssertionError("waits")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(30)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(params=KINDS)
def put(request, monkeypatch):
    """Put something of a kind in the place of a file."""
    made_of = {
        "pipe": os.mkfifo,
        "device": lambda path: path.symlink_to("/dev/zero"),
        "socket": lambda path: _bind(path, monkeypatch),
        "directory": lambda path: path.mkdir(),
        "huge": lambda path: (path.touch(), os.truncate(path, HUGE)),
        "loop": lambda path: path.symlink_to(path.name),
    }

    def put(path):
        path.unlink(missing_ok=True)
        made_of[request.param](path)
        return path

    put.kind = request.param
    return put


def _bind(path, monkeypatch):
    """Make a socket; its address is too long but from its directory."""
    with monkeypatch.context() as patch, socket.socket(socket.AF_UNIX) as bound:
        patch.chdir(path.parent)
        bound.bind(path.name)


@pytest.fixture
def copy(artifacts, tmp_path):
    return shutil.copytree(artifacts, tmp_path / "copy")


def run(*arguments, code):
    result = CliRunner().invoke(main, list(map(str, arguments)))
    assert result.exit_code == code, (result.output, result.exception)
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.output


# ---- sources ----


@pytest.mark.parametrize("suffix", ["xml", "onnx", "json"])
def test_sources(put, tmp_path, suffix):
    with pytest.raises(td.SourceError, match="must"):
        scan(put(tmp_path / f"model.{suffix}"))
    run("compile", tmp_path / f"model.{suffix}", code=1)


@pytest.mark.parametrize("ranges", [{}, {"data.2": (1, 9)}])
def test_constants_of_an_ir(put, tmp_path, ranges):
    data = opset1.parameter((1, 4, -1, 6) if ranges else (1, 4, 5, 6), np.float32, name="data")
    values = opset1.constant(np.ones((4, 3, 2, 2), np.float32))
    node = opset1.convolution_backprop_data(
        data, values, strides=[2, 2], pads_begin=[0, 0], pads_end=[0, 0], dilations=[1, 1]
    )
    openvino.serialize(openvino.Model([node], [data], "model"), tmp_path / "model.xml")
    put(tmp_path / "model.bin")
    try:
        (layer,) = scan(tmp_path / "model.xml", extents=ranges)
    except td.SourceError:
        return
    assert layer.filter is None or put.kind == "huge", "a large file may hold small constants"


def test_constants_of_an_onnx_model(put, tmp_path):
    tensor = TensorProto(name="w", data_type=1, dims=(4, 3, 2, 2), data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value="w.bin")
    node = helper.make_node("ConvTranspose", ["x", "w"], ["y"])
    x = helper.make_tensor_value_info("x", 1, (1, 4, 5, 6))
    graph = helper.make_graph([node], "g", [x], [helper.make_tensor_value_info("y", 1, None)], [tensor])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), tmp_path / "model.onnx")
    put(tmp_path / "w.bin")
    try:
        (layer,) = scan(tmp_path / "model.onnx")
    except td.SourceError:
        return
    assert layer.filter is None


# ---- artifacts ----


@pytest.mark.parametrize("suffix", [".json", ".so"])
def test_artifacts(put, copy, suffix):
    put(made.file(copy, P, suffix))
    run("inspect", copy, code=1)
    run("verify", copy, code=1)
    library = td.load(copy)
    with pytest.raises((td.ArtifactError, td.NoArtifactError)):
        library.bind(P, np.ones(P.filter_shape, np.float32))


def test_an_artifact_that_is_built_again(put, copy):
    """What is there is not taken for up to date."""
    put(made.file(copy, P, ".so"))
    assert whole(copy, P, get(made.TARGET), ()) is None


def test_signatures(put, copy, tmp_path):
    _, public = write_keys(tmp_path, "key")
    put(copy / FILE)
    with pytest.raises(td.IntegrityError):
        td.load(copy, public_key=public)


def test_keys(put, copy, tmp_path):
    key = put(tmp_path / "key.pem")
    with pytest.raises(td.ArtifactError, match="must be the PEM file of a public key") as caught:
        td.load(copy, public_key=key)
    assert caught.value.path == key
    run("sign", copy, "--key", key, code=2 if put.kind in ("directory", "loop") else 1)
    run("verify", copy, "--key", key, code=2 if put.kind in ("directory", "loop") else 1)


def test_packed_files(put, tmp_path):
    if put.kind == "directory":
        return  # of no artifacts
    with pytest.raises(td.ArtifactError):
        td.load(put(tmp_path / "model.tdl"))
    run("inspect", tmp_path / "model.tdl", code=2 if put.kind == "loop" else 1)
