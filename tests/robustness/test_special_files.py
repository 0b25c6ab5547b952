"""Files that are no files: wherever one is read, a pipe, a device, a socket, a directory or a huge one is an error.

None is waited for, and none is read without bound. The huge ones are of zeros that no disk holds.
"""

import base64
import json
import os
import resource
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
from tvm_deconv.bench import figures
from tvm_deconv.cli.main import main
from tvm_deconv.compiler import current, records
from tvm_deconv.compiler.requests import whole
from tvm_deconv.frontends import scan
from tvm_deconv.targets import get

HUGE = 100 << 30
KINDS = ("pipe", "device", "socket", "directory", "huge", "loop")
P = made.PLAIN


@pytest.fixture(autouse=True)
def limited():
    """Half a minute, after which a read that waits is interrupted, and 8 GB, so that one without end fails."""

    def late(*_):
        raise AssertionError("waits")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(30)
    most = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (8 << 30, most[1]))
    yield
    resource.setrlimit(resource.RLIMIT_DATA, most)
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


def test_notes_of_builds(put, copy, monkeypatch):
    put(copy / current.NOTES)
    built = []
    monkeypatch.setattr("tvm_deconv.compiler.build.compile", lambda *_, **__: built)
    assert current.compile([P], made.TARGET, copy) is built


def test_signatures(put, copy, tmp_path):
    _, public = write_keys(tmp_path, "key")
    put(copy / FILE)
    with pytest.raises(td.IntegrityError):
        td.load(copy, public_key=public)


def test_weights(put, copy):
    put(copy / "model.safetensors")
    with pytest.raises(td.ArtifactError):
        td.load(copy).layers  # noqa: B018
    if put.kind != "huge":  # it takes a minute to read the zeros of one
        run("pack", copy, "-o", copy / "packed.tdl", code=1)


def test_large_weights(copy):
    """A header that is small, and arrays that say they are not."""
    header = json.dumps(
        {
            "__metadata__": {"up": P.key},
            "up.filter": {"dtype": "F32", "shape": list(P.filter_shape), "data_offsets": [0, HUGE]},
        }
    ).encode()
    path = copy / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(path, HUGE)
    with pytest.raises(td.ArtifactError, match="must have at most"):
        td.load(copy).weights("up")


def test_keys(put, copy, tmp_path):
    key = put(tmp_path / "key.pem")
    with pytest.raises(td.ArtifactError, match="must be the PEM file of a public key") as caught:
        td.load(copy, public_key=key)
    assert caught.value.path == key
    run("sign", copy, "--key", key, code=2 if put.kind in ("directory", "loop") else 1)
    run("verify", copy, "--key", key, code=2 if put.kind in ("directory", "loop") else 1)


def test_a_key_that_takes_long_to_check(copy, tmp_path):
    """One of RSA, of two large primes: that they are primes takes more than a minute to see."""
    p, q, e = 2**11213 - 1, 2**9941 - 1, 65537
    d = pow(e, -1, (p - 1) * (q - 1))
    numbers = (0, p * q, e, d, p, q, d % (p - 1), d % (q - 1), pow(q, -1, p))
    der = in_der(0x30, b"".join(in_der(2, n.to_bytes(n.bit_length() // 8 + 1, "big")) for n in numbers))
    pem = base64.encodebytes(der).decode()
    key = tmp_path / "key.pem"
    key.write_text(f"-----BEGIN RSA PRIVATE KEY-----\n{pem}-----END RSA PRIVATE KEY-----\n")
    assert "must be a private key of Ed25519" in run("sign", copy, "--key", key, code=1).replace("\n", " ")


def in_der(tag, content):
    """A value in ASN.1's distinguished encoding."""
    size = len(content)
    length = size.to_bytes((size.bit_length() + 7) // 8, "big")
    return bytes([tag]) + (bytes([size]) if size < 128 else bytes([128 + len(length)]) + length) + content


def test_packed_files(put, tmp_path):
    if put.kind == "directory":
        return  # of no artifacts
    with pytest.raises(td.ArtifactError):
        td.load(put(tmp_path / "model.tdl"))
    run("inspect", tmp_path / "model.tdl", code=2 if put.kind == "loop" else 1)


def test_a_packed_file_with_a_huge_table(tmp_path):
    """Its end says that the table of its members is nearly all of it."""
    path = tmp_path / "model.tdl"
    comment = b"tvm_deconv artifacts, format 1"
    path.write_bytes(b"PK\3\4")
    table = HUGE - 4
    os.truncate(path, HUGE)
    with path.open("r+b") as file:
        file.seek(4)
        file.write(b"PK\1\2")
        file.seek(HUGE)
        # The end of the zip64 format, its locator, and the end: see APPNOTE.TXT, 4.3.14 to 4.3.16.
        file.write(b"PK\6\6" + (44).to_bytes(8, "little") + b"\x2d\0\x2d\0" + bytes(8))
        file.write((1).to_bytes(8, "little") * 2 + table.to_bytes(8, "little") + (4).to_bytes(8, "little"))
        file.write(b"PK\6\7" + bytes(4) + HUGE.to_bytes(8, "little") + (1).to_bytes(4, "little"))
        file.write(b"PK\5\6" + bytes(4) + b"\xff" * 12 + len(comment).to_bytes(2, "little") + comment)
    with pytest.raises(td.ArtifactError, match="its table has more than"):
        td.load(path)


# ---- logs ----


def test_logs(put, tmp_path):
    log = records.Log(tmp_path)
    path = log.file(P.artifact_key, made.TARGET)
    path.parent.mkdir()
    put(path)
    read = records.read(made.TARGET, tmp_path)
    assert not list(read)
    assert len(read.warnings) == 1
    assert str(path) in read.warnings[0]
    assert path.name in run("logs", "best", tmp_path, code=0)
    run("logs", "merge", tmp_path / "new", tmp_path, code=0)
    run("logs", "prune", tmp_path, code=0)
    with pytest.raises(td.BuildError, match=r"^logs="):
        log.tidy(P.artifact_key, made.TARGET)


def test_logs_are_written_to_files_only(put, tmp_path):
    from support.records import record

    log = records.Log(tmp_path)
    one = record(P)
    path = log.file(one.problem, one.target)
    path.parent.mkdir()
    put(path)
    for write in (log.append, lambda each: log.merge([each])):
        if put.kind == "huge" and write == log.append:
            continue  # a long log is a log
        with pytest.raises(td.BuildError, match=r"^logs="):
            write(one)


def test_logs_that_builds_follow(put, copy, tmp_path, monkeypatch):
    path = records.Log(tmp_path / "logs").file(P.artifact_key, made.TARGET)
    path.parent.mkdir(parents=True)
    put(path)
    monkeypatch.setattr("tvm_deconv.compiler.build.compile", lambda *_, **__: [])
    current.compile([P], made.TARGET, copy, logs=tmp_path / "logs")


def test_a_log_of_lines_that_do_not_read(tmp_path):
    """Each of them would be ten times as long as a warning."""
    path = records.Log(tmp_path).file(P.artifact_key, made.TARGET)
    path.parent.mkdir()
    path.write_bytes(b"x\n" * 1000)
    warnings = records.read(made.TARGET, tmp_path).warnings
    assert len(warnings) == 21
    assert warnings[-1] == f"{path}: 980 more lines skipped, do not read"
    path.write_bytes(b"x\n" * 20)
    assert len(records.read(made.TARGET, tmp_path).warnings) == 20


# ---- figures ----


def test_figures(put, tmp_path):
    path = put(tmp_path / "zen4-x86-64-v4-ncx-1.json")
    with pytest.raises(td.SourceError, match=f"^figures={path}: must be"):
        figures.read(tmp_path)


@pytest.mark.parametrize("content", [b"[" * 100_000, b"[]", b"\xff", b"{}"])
def test_figures_that_are_none(content, tmp_path):
    path = tmp_path / "figures.json"
    path.write_bytes(content)
    with pytest.raises(td.SourceError, match=f"^figures={path}: must be"):
        figures.read(tmp_path)


# ---- paths ----


@pytest.mark.parametrize("path", ["a\0b", "x" * 5000, "\udcff"])
def test_paths_that_are_none(path, copy):
    with pytest.raises(td.ArtifactError):
        td.load(path)
    with pytest.raises(td.ArtifactError, match="must be the PEM file of a public key"):
        td.load(copy, public_key=path)
    with pytest.raises(td.SourceError):
        scan(f"{path}.onnx")
    with pytest.raises(td.BuildError):
        td.compile([P.replace(out_channels=6)], made.TARGET, path if path != "\udcff" else "/dev/null", jobs=1)


@pytest.mark.parametrize("kind", ["pipe", "device", "file"])
def test_output_that_is_no_directory(kind, tmp_path):
    path = tmp_path / "out"
    {"pipe": os.mkfifo, "device": lambda path: path.symlink_to("/dev/null"), "file": lambda path: path.touch()}[kind](
        path
    )
    with pytest.raises(td.BuildError):
        td.compile([P], made.TARGET, path, jobs=1)
