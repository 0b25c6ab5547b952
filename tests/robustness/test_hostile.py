"""Files that nobody vouches for: whatever they hold, an error of ours or an answer, and soon.

A few thousand inputs by default; with `-m slow` 120 000.
"""

import contextlib
import json
import re
import runpy
import subprocess
from pathlib import Path

import numpy as np
import onnx
import openvino
import pytest
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from openvino import opset1
from support import hostile as ways
from support.hostile import EDITS, NUMBERS, TEXTS, VALUES, edited, fit_to_print, hostile, texts
from support.manifests import fields
from support.strategies import problems

import tvm_deconv as td
from tvm_deconv.artifact.manifest import Manifest
from tvm_deconv.artifact.select import decision_table, select
from tvm_deconv.compiler import records
from tvm_deconv.frontends import coverage_table, scan
from tvm_deconv.targets import CPU_TARGETS, Host, Place

V4 = CPU_TARGETS["x86-64-v4"]
P = td.Problem(1, 2, 3, 4, (5, 6), (3, 3), (2, 2), (1, 1), (1, 1), (10, 12))


@pytest.fixture
def folder(tmp_path):
    return tmp_path


# ---- keys and manifests ----


def other_key(chance, key):
    """A text that is edited, of another key where there is none."""
    text = key if isinstance(key, str) else P.key
    return ways.edit(chance, text.encode(errors="replace")).decode(errors="replace")


@hostile(
    st.one_of(
        st.builds(lambda p, e: edited(p.key.encode(), e).decode(errors="replace"), problems(max_macs=1000), EDITS),
        TEXTS,
        st.builds(lambda number: P.key.replace("-i3-", f"-i{number}-").replace("k3x3", f"k{number}x3"), NUMBERS),
        st.builds(lambda size: P.key.replace("-i3-", f"-i{'9' * size}-"), st.integers(1, 10_000)),
        st.builds(
            lambda inner: P.key.replace("-x5x6-", f"-xany({inner})x6-"), st.text("0123456789,()xany ", max_size=30)
        ),
        st.builds(lambda size: P.key.replace("none", f"clip({'9' * size},inf)"), st.integers(1, 10_000)),
        VALUES,
    ),
    vary=other_key,
)
def test_keys(key):
    try:
        problem = td.Problem.from_key(key)
    except td.ProblemError as error:
        fit_to_print(str(error))
        return
    assert problem.key == key
    assert problem.macs >= 0
    assert problem.min_bytes >= 0


@hostile(texts(fields(P)), vary=ways.spoil)
def test_manifests(content):
    try:
        manifest = Manifest.from_json(content)
    except td.ManifestError as error:
        fit_to_print(str(error))
        return
    assert Manifest.from_json(manifest.to_json().encode()) == manifest
    for wanted in (P, P.replace(batch=2)):
        fit_to_print(decision_table(select(wanted, [manifest], Place(Host(V4.features)))))


@pytest.fixture
def logged(folder, caplog):
    return folder, caplog


NAMES = TEXTS.filter(lambda text: "/" not in text)


def other_files(chance, found):
    """Files of which one has another content."""
    return ways.one_of(chance, found, lambda _, file: (file[0], ways.spoil(chance, file[1])))


@hostile(st.lists(st.tuples(NAMES, texts(fields(P))), max_size=3), fixture="logged", vary=other_files)
def test_directories(logged, found):
    """Files of any content, under names of artifacts and others."""
    folder, log = logged
    log.clear()
    for path in folder.iterdir():
        path.unlink()
    name = fields(P)["library"].rpartition(".so")[0]
    (folder / f"{name.rpartition('.')[0]}.json").write_bytes(found[0][1] if found else b"")
    (folder / f"{name}.so").write_bytes(b"none")
    for text, content in found:
        with contextlib.suppress(OSError, ValueError):  # no file can have this name
            (folder / f"{text}.json").write_bytes(content)
    try:
        library = td.load(folder)
        fit_to_print(library.explain(P))
        library.bind(P, None)
    except td.DeconvError as error:
        fit_to_print(str(error))
    fit_to_print(log.text)


# ---- tuning logs ----

RECORD = {
    "problem": P.artifact_key,
    "target": V4.name,
    "algorithm": "direct_rows",
    "knobs": {"channels": 4, "positions": 2},
    "seconds": 0.25,
    "spread": 0.01,
    "runs": 5,
    "error": "",
    "threads": 1,
    "host": {"name": "CPU", "vendor": "V", "family": 25, "model": 1, "stepping": 1, "microarchitecture": "zen3"},
    "default_ratio": 1.2,
    "sources": "ab" * 32,
    "commit": "0.1.0",
    "seed": 1,
    "versions": {"tvm": "0.27"},
    "when": "2026-01-01T00:00:00+00:00",
}


@pytest.fixture
def log(tmp_path):
    return records.Log(tmp_path)


@hostile(
    st.lists(texts(RECORD), min_size=1, max_size=3),
    fixture="log",
    vary=lambda chance, lines: ways.one_of(chance, lines, ways.spoil),
)
def test_logs(log, lines):
    """A line that does not read loses only itself."""
    good = json.dumps(RECORD).encode()
    path = log.file(P.artifact_key, V4.name)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"\n".join([*lines, good]))
    before = records.read(V4.name, log.root)
    assert records.best(P, before) is not None
    log.tidy(P.artifact_key, V4.name)
    after = records.read(V4.name, log.root)
    assert set(after.by_problem) == set(before.by_problem)
    assert len(after.warnings) <= len(before.warnings)
    if len(list(before)) == 1:  # else one of them is a record, and may be the newer measurement
        assert [record.line for record in after] == [record.line for record in before]
    log.prune(V4.name, 1)


# ---- sources ----


def covered(path):
    """Scan, as a compilation does; every error is ours."""
    try:
        layers = scan(path)
    except td.SourceError as error:
        fit_to_print(str(error))
        return
    for row in coverage_table(layers):
        assert row.problem or row.reason
        fit_to_print(row.reason)


LIST = [
    {"name": "up", "data": [1, 6, 5, 6], "filter": [2, 3, 4, 3, 3], "strides": [2, 2], "pads_begin": [1, 1],
     "pads_end": [1, 1], "dilations": [1, 1], "output_padding": [1, 1], "epilogue": {"activation": "relu"}},
    {"data": [2, 4, 7], "filter": [1, 4, 4, 2], "strides": [2], "output_shape": [14], "auto_pad": "same_upper",
     "dtype": "float16", "epilogue": "leaky_relu(0.1)", "bias": True},
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*means nothing. did you mean:UserWarning")
@hostile(texts(LIST), fixture="folder", vary=ways.spoil)
def test_lists(folder, content):
    path = folder / "list.json"
    path.write_bytes(content)
    covered(path)


@pytest.fixture
def ir(folder):
    """An IR, whose constants lie beside it, and what it holds."""
    data = opset1.parameter((1, 4, 5, 6), np.float32, name="data")
    values = opset1.constant(np.ones((4, 3, 2, 2), np.float32))
    made = opset1.convolution_backprop_data(
        data, values, strides=[2, 2], pads_begin=[1, 0], pads_end=[0, 1], dilations=[1, 1]
    )
    biased = opset1.add(made, opset1.constant(np.ones((1, 3, 1, 1), np.float32)))
    openvino.serialize(openvino.Model([opset1.relu(biased)], [data], "model"), folder / "model.xml")
    return folder / "model.xml", (folder / "model.xml").read_bytes()


#: (which of the quoted or enclosed words of a text, what it becomes)
WORDS = st.lists(
    st.tuples(st.floats(0, 1, exclude_max=True), st.one_of(NUMBERS.map(str), TEXTS)), min_size=1, max_size=3
)
_WORD = re.compile(r'(?<=")[^"<>]*(?=")|(?<=>)[^<>\s]+(?=<)')


def reworded(text, changes):
    for where, word in changes:
        places = list(_WORD.finditer(text))
        place = places[int(where * len(places))]
        word = word.replace("&", "").replace("<", "")
        text = text[: place.start()] + word + text[place.end() :]
    return text.encode("utf-8", "surrogatepass")


def other_changes(chance, changes):
    """One more change of the same kind."""
    if changes and len(changes[0]) == 2:
        return [*changes, (chance.random(), str(chance.choice(ways.PLAIN)))]
    return [*changes, (chance.random(), chance.randrange(13), chance.randbytes(chance.randrange(6)))]


@hostile(st.one_of(WORDS, EDITS), fixture="ir", vary=other_changes)
def test_ir(ir, changes):
    path, content = ir
    words = bool(changes) and len(changes[0]) == 2
    path.write_bytes(reworded(content.decode(), changes) if words else edited(content, changes))
    covered(path)


def test_the_reason_why_a_layer_is_not_covered_can_be_printed(ir):
    path, content = ir
    path.write_bytes(re.sub(rb'precision="FP32"', b'precision="\x7f"', content))
    covered(path)


def model():
    nodes = [
        helper.make_node("ConvTranspose", ["x", "w", "b"], ["y"], "up", strides=[2, 2], pads=[1, 0, 0, 1], group=2),
        helper.make_node("Relu", ["y"], ["z"], "relu"),
        helper.make_node("ConvTranspose", ["z", "v"], ["u"], "up2", auto_pad="SAME_UPPER", output_shape=[20, 24]),
        helper.make_node("Clip", ["u", "low"], ["out"], "clip"),
    ]
    shapes = {"w": (4, 3, 3, 3), "b": (6,), "v": (6, 2, 2, 2), "low": ()}
    constants = [numpy_helper.from_array(np.ones(s, np.float32), n) for n, s in shapes.items()]
    graph = helper.make_graph(
        nodes,
        "model",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, (1, 4, 5, 6))],
        [helper.make_tensor_value_info("out", TensorProto.FLOAT, None)],
        constants,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)


MODEL = model()
INT64 = NUMBERS.filter(lambda number: isinstance(number, int) and -(2**63) <= number < 2**63)


@st.composite
def models(draw):
    """Models with attributes, extents, types and names changed."""
    made = onnx.ModelProto()
    made.CopyFrom(MODEL)
    for _ in range(draw(st.integers(1, 3))):
        node = draw(st.sampled_from(list(made.graph.node)))
        tensor = draw(st.sampled_from(list(made.graph.initializer)))
        change = draw(st.integers(0, 6))
        if change == 0:
            name = draw(
                st.sampled_from(["strides", "pads", "dilations", "output_shape", "output_padding", "kernel_shape"])
            )
            kept = [attribute for attribute in node.attribute if attribute.name != name]
            del node.attribute[:]
            node.attribute.extend([*kept, helper.make_attribute(name, draw(st.lists(INT64, max_size=5)), attr_type=7)])
        elif change == 1 and node.attribute:
            attribute = draw(st.sampled_from(list(node.attribute)))
            attribute.type = draw(st.integers(0, 14))
            attribute.i = draw(INT64)
        elif change == 2:
            del tensor.dims[:]
            tensor.dims.extend(draw(st.lists(INT64, max_size=6)))
        elif change == 3:
            tensor.data_type = draw(st.integers(0, 24))
        elif change == 4:
            tensor.raw_data = draw(st.binary(max_size=20))
        elif change == 5 and node.input:
            node.input[draw(st.integers(0, len(node.input) - 1))] = draw(
                st.sampled_from(["x", "y", "w", "out", "", "q"])
            )
        else:
            tensor.data_location = TensorProto.EXTERNAL
            entry = tensor.external_data.add()
            entry.key = draw(st.sampled_from(["location", "offset", "length"]))
            entry.value = draw(
                st.one_of(NUMBERS.map(str), st.sampled_from(["../../etc/passwd", "/dev/zero", ".", "a\0"]))
            )
    return made.SerializeToString()


@hostile(
    st.one_of(models(), st.builds(edited, st.just(MODEL.SerializeToString()), EDITS), st.binary(max_size=60)),
    fixture="folder",
    vary=ways.edit,
)
def test_onnx(folder, content):
    path = folder / "model.onnx"
    path.write_bytes(content)
    covered(path)


# ---- scripts/fuzz ----


@pytest.mark.parametrize(("given", "told"), [(None, "no input yet"), ("b'this'", "b'this'")])
def test_an_input_of_an_earlier_run_is_not_taken_for_the_last(given, told, tmp_path, monkeypatch, capsys):
    fuzz = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "fuzz"))["fuzz"]
    monkeypatch.setitem(fuzz.__globals__, "ROOT", tmp_path)
    last = tmp_path / ".fuzz" / "models" / "test_onnx" / "last"
    last.parent.mkdir(parents=True)
    last.write_text("b'of a run before'")

    def late(command, **_):
        if given:
            last.write_text(given)
        raise subprocess.TimeoutExpired(command, 1)

    monkeypatch.setattr(subprocess, "run", late)
    assert fuzz("models", "test_hostile.py::test_onnx", 1) == (0, False)
    assert capsys.readouterr().out == f"still at work after 1801 s: {told}\n"
