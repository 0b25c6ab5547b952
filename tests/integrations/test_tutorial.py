"""docs/tutorial.md, its service and the notebook: they run as they are printed, and compute what ONNX Runtime does."""

import contextlib
import http.client
import importlib.util
import io
import json
import re
import shlex
import subprocess
import threading
import urllib.error
import urllib.request
from pathlib import Path

import click
import numpy as np
import pytest
from support import artifacts as made
from support.tolerances import assert_close

import tvm_deconv as td
from tvm_deconv.cli.main import main
from tvm_deconv.frontends import scan, write_weights

onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("cryptography")

ROOT = Path(__file__).parents[2]
TUTORIAL = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
MODEL = ROOT / "examples" / "decoder.onnx"


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", TUTORIAL, flags=re.M | re.S)


@pytest.fixture(scope="module")
def folder(export_once, tmp_path_factory):
    """The folder after the steps of the shell: artifacts, weights, keys, signature."""
    folder = tmp_path_factory.mktemp("tutorial")
    (folder / "examples").symlink_to(ROOT / "examples")
    layers = scan(MODEL)
    (folder / "artifacts").mkdir()
    export_once(folder / "artifacts", [layer.problem for layer in layers])
    write_weights(layers, folder / "artifacts" / "decoder.safetensors")
    for command in re.findall(r"^openssl .*$", "".join(blocks("sh")), flags=re.M):
        subprocess.run(shlex.split(command), cwd=folder, check=True, capture_output=True)
    main(["sign", str(folder / "artifacts"), "--key", str(folder / "private.pem")], standalone_mode=False)
    main(["pack", str(folder / "artifacts"), "--output", str(folder / "decoder.tdl")], standalone_mode=False)
    return folder


@pytest.fixture(scope="module", autouse=True)
def faster():
    """Sessions measure that artifacts are faster, so that all layers are replaced."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tvm_deconv.onnxruntime.measure.gain", lambda *_: 2.0)
        yield


@pytest.fixture(scope="module")
def service(folder):
    """The example's service on a free port."""
    spec = importlib.util.spec_from_file_location("service", ROOT / "examples" / "service.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.Handler.log_message = lambda *_: None
    with module.Service(("127.0.0.1", 0), MODEL, folder / "artifacts", folder / "public.pem") as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def post(service, content):
    url = f"http://127.0.0.1:{service.server_port}/run"
    with urllib.request.urlopen(url, data=content, timeout=60) as answer:
        return np.load(io.BytesIO(answer.read()))


def packed(**arrays):
    content = io.BytesIO()
    np.savez(content, **arrays)
    return content.getvalue()


def test_the_commands_exist():
    lines = [shlex.split(line)[1:] for text in blocks("sh") for line in re.findall(r"^tvm-deconv.*$", text, flags=re.M)]
    assert len(lines) >= 7
    context = click.Context(main)
    for name, *arguments in lines:
        command = main.get_command(context, name)
        command.make_parser(click.Context(command)).parse_args(list(arguments))


def test_the_python_runs(folder, service, monkeypatch, capsys):
    session, client, layer = (text.replace("8000", str(service.server_port)) for text in blocks("python"))
    monkeypatch.chdir(folder)
    names = {}
    exec(session + client + layer, names)
    assert "left to ONNX Runtime: {}" in capsys.readouterr().out
    feeds = {"code": names["code"], "skip": names["skip"]}
    (expected,) = onnxruntime.InferenceSession(MODEL).run(None, feeds)
    assert_close(names["image"], expected)
    assert_close(names["outputs"]["image"], expected)
    assert names["y"].shape == (1, 32, 16, 16)


def test_the_service_computes_the_model(service):
    rng = np.random.default_rng()
    shapes = {"code": (1, 32, 8, 8), "skip": (1, 16, 32, 32)}
    feeds = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    (expected,) = onnxruntime.InferenceSession(MODEL).run(None, feeds)
    assert_close(post(service, packed(**feeds))["image"], expected)


def test_the_service_says_what_it_computes(service):
    with urllib.request.urlopen(f"http://127.0.0.1:{service.server_port}/health", timeout=60) as answer:
        assert json.loads(answer.read()) == {"compiled": ["up0", "up1", "up2", "up3"], "left": {}}


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"no zip", 400),
        (packed(code=np.zeros(3, np.float32)), 400),
        (packed(code=np.zeros((1, 32, 8, 9), np.float32), skip=np.zeros((1, 16, 32, 32), np.float32)), 400),
        (b"", 413),
    ],
)
def test_the_service_refuses_what_it_cannot_run(service, content, status):
    with pytest.raises(urllib.error.HTTPError) as caught:
        post(service, content)
    assert caught.value.code == status
    assert caught.value.read()


def test_the_service_refuses_a_length_that_is_no_number(service):
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", service.server_port, timeout=60)) as connection:
        connection.putrequest("POST", "/run")
        connection.putheader("Content-Length", "all")
        connection.endheaders()
        assert connection.getresponse().status == 413


def build(problems, target, output):
    """td.compile in this process, which saves the seconds that others take to start."""
    assert target == "native"
    made.export(Path(output), problems)


def test_the_notebook_runs(tmp_path, monkeypatch, capsys):
    """Cell by cell, as Jupyter would; without its server, which takes longer to start than this takes to run."""
    notebook = json.loads((ROOT / "examples" / "notebook.ipynb").read_text(encoding="utf-8"))
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(not cell["outputs"] for cell in notebook["cells"] if cell["cell_type"] == "code")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(td, "compile", build)
    names = {}
    for number, cell in enumerate(cells):
        exec(compile(cell, f"cell {number}", "exec"), names)
    printed = capsys.readouterr().out
    assert "333 -> (1, 4, 1332)" in printed
    assert "strides=(2, 0): every element must be at least 1" in printed
