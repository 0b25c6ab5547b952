"""Models that small files make large: time and memory of a scan are bounded, and nothing waits for ever."""

import os
import resource
import signal
import time
import tracemalloc

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tvm_deconv import SourceError
from tvm_deconv.frontends import scan, write_weights

SECONDS = 5  # of the processor that a scan may use


@pytest.fixture(autouse=True)
def bounded():
    """End a test that waits, or computes for long."""

    def stop(number, _):
        raise AssertionError(f"{signal.Signals(number).name}: it takes too long")

    clocks = {signal.SIGPROF: (signal.ITIMER_PROF, 2 * SECONDS), signal.SIGALRM: (signal.ITIMER_REAL, 120)}
    before = {number: signal.signal(number, stop) for number in clocks}
    for clock, seconds in clocks.values():
        signal.setitimer(clock, seconds)
    yield
    for number, (clock, _) in clocks.items():
        signal.setitimer(clock, 0)
        signal.signal(number, before[number])


@pytest.fixture
def peak():
    """The largest memory that Python and NumPy hold from here on."""
    tracemalloc.start()
    yield lambda: tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()


# ---- functions of ONNX ----

OPSETS = [helper.make_opsetid("", 17), helper.make_opsetid("m", 1)]


def function(name, *nodes):
    return helper.make_function("m", name, ["a"], ["z"], [*nodes], OPSETS)


def call(name, data="a", made="z"):
    return helper.make_node(name, [data], [made], domain="m")


def with_functions(path, first, functions):
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 2]) for name in "xy"]
    graph = helper.make_graph([call(first, "x", "y")], "g", values[:1], values[1:])
    onnx.save(helper.make_model(graph, opset_imports=OPSETS, functions=functions, ir_version=10), path)
    return path


RELU = helper.make_node("Relu", ["a"], ["z"])
LARGE = helper.make_node("Constant", [], ["z"], value=numpy_helper.from_array(np.zeros(1 << 18, np.float32)))


def doubling(levels, last=RELU):
    return [
        function("f0", last),
        *(function(f"f{i}", call(f"f{i - 1}", "a", "b"), call(f"f{i - 1}", "b", "z")) for i in range(1, levels)),
    ]


def in_a_branch(inner):
    flag = helper.make_node("Constant", [], ["c"], value=helper.make_tensor("c", TensorProto.BOOL, [], [True]))
    bodies = {
        name: helper.make_graph([call(inner, "a", name)], name, [], [onnx.ValueInfoProto(name=name)])
        for name in ("then_branch", "else_branch")
    }
    return flag, helper.make_node("If", ["c"], ["z"], **bodies)


EXPANDING = {
    "doubling": ("f28", doubling(29), r"functions='\d+ nodes, \d+ bytes': must make at most 262144 nodes"),
    "large constants": ("f10", doubling(11, LARGE), r"and 256 MiB more when inlined"),
    "itself": ("f", [function("f", call("f"))], "functions='f': must not call itself, also through others"),
    "each other": ("f", [function("f", call("g")), function("g", call("f"))], "must not call itself"),
    "itself in a branch": ("f", [function("f", *in_a_branch("f"))], "functions='f': must not call itself"),
    "depth": (
        "f0",
        [*(function(f"f{i}", call(f"f{i + 1}")) for i in range(3000)), function("f3000", RELU)],
        "functions=300[0-9]: must be nested at most 64 deep",
    ),
}


@pytest.mark.parametrize("case", EXPANDING)
def test_functions_are_counted_before_they_are_inlined(case, tmp_path):
    first, functions, text = EXPANDING[case]
    before = time.process_time()
    with pytest.raises(SourceError, match=text):
        scan(with_functions(tmp_path / "model.onnx", first, functions))
    assert time.process_time() - before < SECONDS


def test_functions_within_the_bounds_are_inlined(tmp_path):
    assert scan(with_functions(tmp_path / "model.onnx", "f11", doubling(12))) == []


# ---- shared constants ----


def shared_onnx(folder, layers, scaled=False, cast=False):
    """Layers on one input that share a filter of 4 MiB, each with a scale of its own or a cast of its own."""
    filter = np.ones((256, 256, 4, 4), np.float16 if cast else np.float32)
    constants = {"f": filter} | {f"s{i}": np.full((256, 1, 1), 2 + i, np.float32) for i in range(layers) if scaled}
    nodes = []
    for i in range(layers):
        if cast:
            nodes.append(helper.make_node("Cast", ["f"], [f"f{i}"], to=TensorProto.FLOAT))
        used = f"f{i}" if cast else "f"
        nodes.append(helper.make_node("ConvTranspose", ["x", used], [f"u{i}"], f"up{i}"))
        if scaled:
            nodes.append(helper.make_node("Mul", [f"u{i}", f"s{i}"], [f"y{i}"]))
    graph = helper.make_graph(
        nodes,
        "model",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, (1, 256, 2, 2))],
        [onnx.ValueInfoProto(name=f"{'y' if scaled else 'u'}{i}") for i in range(layers)],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=OPSETS[:1], ir_version=10), folder / "model.onnx")
    return folder / "model.onnx", filter.size * 4


@pytest.mark.parametrize("external", [False, True])
@pytest.mark.parametrize("cast", [False, True])
def test_layers_of_onnx_share_constants(cast, external, peak, tmp_path):
    path, size = shared_onnx(tmp_path, 60, cast=cast)
    if external:
        onnx.save(onnx.load(path), path, save_as_external_data=True, location="data", size_threshold=0)
    tracemalloc.reset_peak()
    layers = scan(path)
    assert len(layers) == 60
    assert all(layer.filter is layers[0].filter for layer in layers)
    assert peak() < 6 * size  # not 60: the file, the constant, what parsing needs


LAYER = """<layer id="{i}" name="up{i}" type="ConvolutionBackpropData" version="opset1">
<data strides="1,1" dilations="1,1" pads_begin="0,0" pads_end="0,0" output_padding="0,0" auto_pad="explicit"/><input>
<port id="0" precision="FP32"><dim>1</dim><dim>512</dim><dim>2</dim><dim>2</dim></port>
<port id="1" precision="FP32"><dim>512</dim><dim>512</dim><dim>4</dim><dim>4</dim></port></input><output>
<port id="2" precision="FP32"><dim>1</dim><dim>512</dim><dim>5</dim><dim>5</dim></port></output></layer>
"""
EDGE = '<edge from-layer="{maker}" from-port="0" to-layer="{i}" to-port="{port}"/>'
CONSTANT = (
    '<layer id="{id}" name="f{id}" type="Const" version="opset1"><data element_type="f32" shape="512,512,4,4" '
    'offset="{offset}" size="{size}"/><output><port id="0" precision="FP32"/></output></layer>'
)


def shared_ir(folder, layers, shift=0):
    """Layers that share a filter of 16 MiB in a file with a hole; with a `shift` each has another part of it."""
    size = 512 * 512 * 16 * 4
    ids = range(layers)
    makers = range(1000, 1000 + layers) if shift else [1000] * layers
    constants = [CONSTANT.format(id=maker, offset=shift * i, size=size) for i, maker in enumerate(makers)]
    edges = [
        EDGE.format(maker=maker, i=i, port=port)
        for i in ids
        for port, maker in enumerate((2000, makers[i]))
    ]  # fmt: skip
    text = "".join([*dict.fromkeys(constants), *(LAYER.format(i=i) for i in ids)])
    (folder / "model.xml").write_text(f'<net version="11"><layers>{text}</layers><edges>{"".join(edges)}</edges></net>')
    with (folder / "model.bin").open("wb") as file:
        file.truncate(size + shift * layers)
    return folder / "model.xml", size


def test_layers_of_an_ir_share_constants(peak, tmp_path):
    path, size = shared_ir(tmp_path, 40)
    layers = scan(path)
    assert len(layers) == 40
    assert all(layer.filter is layers[0].filter for layer in layers)
    assert peak() < 2 * size


@pytest.mark.parametrize("kind", ["overlapping", "scaled"])
def test_all_constants_together_are_bounded(kind, peak, monkeypatch, tmp_path):
    """Those that overlap in a file, and scaled copies of one."""
    monkeypatch.setattr("tvm_deconv.frontends.files._MOST_CONSTANTS", 60 << 20)
    path, _ = shared_ir(tmp_path, 40, shift=4) if kind == "overlapping" else shared_onnx(tmp_path, 40, scaled=True)
    with pytest.raises(
        SourceError, match=r"bytes=\d+: must be at most 62914560, all constants of the layers and their"
    ):
        scan(path)
    assert peak() < 100 << 20


def test_weights_are_bounded(monkeypatch, tmp_path):
    monkeypatch.setattr("tvm_deconv.frontends._MOST_WEIGHTS", 100 << 20)
    path, _ = shared_ir(tmp_path, 40)
    with pytest.raises(
        SourceError, match="weights=671088640: must have at most 104857600 bytes, of all layers together"
    ):
        write_weights(scan(path), tmp_path / "model.safetensors")


def test_many_scales_of_a_large_filter(tmp_path):
    """A scale costs as much as it has channels, whatever the filter."""
    filter = np.ones((256, 256, 8, 8), np.float32)
    nodes = [helper.make_node("ConvTranspose", ["x", "f"], ["u0"], "up")]
    nodes += [helper.make_node("Mul", [f"u{i}", "s"], [f"u{i + 1}"]) for i in range(300)]
    graph = helper.make_graph(
        nodes,
        "model",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, (1, 256, 2, 2))],
        [onnx.ValueInfoProto(name="u300")],
        [numpy_helper.from_array(filter, "f"), numpy_helper.from_array(np.full((256, 1, 1), 1.001, np.float32), "s")],
    )
    onnx.save(helper.make_model(graph, opset_imports=OPSETS[:1], ir_version=10), tmp_path / "model.onnx")
    before = time.process_time()
    (layer,) = scan(tmp_path / "model.onnx")
    assert time.process_time() - before < SECONDS
    assert len(layer.fused) == 300
    np.testing.assert_allclose(layer.filter, np.float32(np.float64(np.float32(1.001)) ** 300), rtol=1e-6)


@pytest.mark.parametrize("kind", ["a slope", "a scale that overflows"])
def test_many_layers_that_share_a_large_constant(kind, monkeypatch, tmp_path):
    """What a constant means is found once, and work on a filter counts as memory does."""
    monkeypatch.setattr("tvm_deconv.frontends.files._MOST_CONSTANTS", 200 << 20)
    count = 2000
    constants = {"f": np.full((2, 1 << 12, 4, 4), 9, np.float32), "s": np.full((1 << 12, 1, 1), 3e38, np.float32)}
    if kind == "a slope":
        constants = {"f": np.ones((2, 2, 1, 1), np.float32), "s": np.full(1 << 20, 0.5, np.float32)}
    nodes = []
    for i in range(count):
        nodes.append(helper.make_node("ConvTranspose", ["x", "f"], [f"u{i}"], f"up{i}"))
        nodes.append(helper.make_node("PRelu" if kind == "a slope" else "Mul", [f"u{i}", "s"], [f"y{i}"]))
    graph = helper.make_graph(
        nodes,
        "model",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, (1, 2, 2, 2))],
        [onnx.ValueInfoProto(name=f"y{i}") for i in range(count)],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=OPSETS[:1], ir_version=10), tmp_path / "model.onnx")
    before = time.process_time()
    if kind == "a slope":
        assert len(scan(tmp_path / "model.onnx")) == count
    else:
        with pytest.raises(SourceError, match="all constants of the layers and their scaled copies together"):
            scan(tmp_path / "model.onnx")
    assert time.process_time() - before < SECONDS


# ---- what is no file ----


def pipe(path):
    os.mkfifo(path)


def device(path):
    path.symlink_to("/dev/zero")


def terminal(path):
    path.symlink_to("/dev/ptmx")


@pytest.mark.parametrize("make", [pipe, device, terminal])
@pytest.mark.parametrize("name", ["model.onnx", "model.xml", "model.json"])
def test_sources_that_are_no_files(make, name, tmp_path):
    make(tmp_path / name)
    with pytest.raises(
        SourceError, match=rf"source=.*{name}: must be a file that can be read \(it is no regular file\)"
    ):
        scan(tmp_path / name)


@pytest.mark.parametrize("make", [pipe, device, terminal])
def test_constants_that_are_no_files(make, tmp_path):
    path, _ = shared_ir(tmp_path, 1)
    (tmp_path / "model.bin").unlink()
    make(tmp_path / "model.bin")
    with pytest.raises(
        SourceError, match=r"source=.*model.bin: must be a file that can be read \(it is no regular file"
    ):
        scan(path)


def test_external_data_that_are_a_pipe(tmp_path):
    path, _ = shared_onnx(tmp_path, 1)
    onnx.save(onnx.load(path), path, save_as_external_data=True, location="data", size_threshold=0)
    (tmp_path / "data").unlink()
    pipe(tmp_path / "data")
    with pytest.raises(SourceError, match=r"source=.*data: must be a file that can be read \(it is no regular file"):
        scan(path)


@pytest.mark.parametrize(("name", "most"), [("model.onnx", 1 << 31), ("model.xml", 1 << 28), ("model.json", 1 << 28)])
def test_files_with_a_hole(name, most, tmp_path):
    with (tmp_path / name).open("wb") as file:
        file.truncate(1 << 40)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(SourceError, match=rf"source=.*{name}: must have at most {most} bytes, not 1099511627776"):
        scan(tmp_path / name)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10
