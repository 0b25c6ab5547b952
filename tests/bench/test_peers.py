"""Every peer computes the same as the reference, or says why it does not; each in its process, as in a comparison."""

import contextlib
import functools
import re
from pathlib import Path

import numpy as np
import pytest
from support import artifacts as made

import tvm_deconv as td
from tvm_deconv.bench import peers, run
from tvm_deconv.compiler.process import WorkerError
from tvm_deconv.problem import ACTIVATIONS
from tvm_deconv.targets import detect_host

PLAIN = td.Problem(2, 1, 3, 5, (4, 5), (3, 3), (2, 2), (1, 1), (1, 1), (7, 9))
RELU = td.Epilogue(True, "relu")
#: What packages express differently: groups, layouts, ranks, and outputs that are cut or extended at either end.
PROBLEMS = {
    "plain": PLAIN,
    "grouped": PLAIN.replace(groups=3, in_channels=2, out_channels=4, epilogue=td.Epilogue(bias=True)),
    "depthwise": PLAIN.replace(groups=8, in_channels=1, out_channels=1),
    "channels last": PLAIN.replace(data_format="NXC", filter_format="XIO", epilogue=td.Epilogue(bias=True)),
    "one axis": td.Problem(1, 1, 4, 3, (9,), (6,), (3,), (1,), (2,), (27,)),
    "three axes": td.Problem(1, 1, 2, 3, (2, 3, 4), (3, 3, 3), (2, 2, 2), (1, 1, 1), (1, 1, 1), (4, 6, 8)),
    "dilated": PLAIN.replace(dilations=(2, 3), output_spatial=(9, 13)),
    "cut at the end": PLAIN.replace(pads_begin=(0, 0), output_spatial=(6, 7)),
    "cut at the begin": PLAIN.replace(pads_begin=(2, 1), output_spatial=(7, 10)),
    "longer": PLAIN.replace(output_spatial=(8, 10)),
    "longer than all": PLAIN.replace(pads_begin=(0, 0), output_spatial=(10, 12)),
    "same": PLAIN.replace(kernel=(4, 5), pads_begin=(1, 1), output_spatial=(8, 10)),
    "packs": PLAIN.replace(in_channels=16, out_channels=24, epilogue=td.Epilogue(True, "relu")),
    "float64": PLAIN.replace(dtype="float64"),
    "bfloat16": PLAIN.replace(dtype="bfloat16", epilogue=td.Epilogue(bias=True)),
    "quantized": PLAIN.replace(dtype="uint8", quantization=td.Quantization("int8", "uint8"), epilogue=RELU),
    "quantized, real output": PLAIN.replace(dtype="int8", quantization=td.Quantization("uint8", "float32")),
}
#: What the packages leave out: peer, the problems, what is said.
REFUSED = [
    ("onnxruntime", lambda p: p.dtype in ("float64", "bfloat16"), "NOT_IMPLEMENTED|INVALID_GRAPH"),
    ("openvino", lambda p: p.dtype == "float64", "it computes float64 in float32"),
    ("torch-channels-last", lambda p: p.rank == 1, "no channels-last memory for one axis"),
    ("mnn|ncnn|litert", lambda p: p.dtype != "float32", r"no transposed convolution of \w+, or one in"),
    ("torch.*|jax", lambda p: p.quantization, "no transposed convolution of u?int8"),
    ("litert", lambda p: p.data_format == "NCX", r"it computes N \*X C alone"),
    ("mnn|litert", lambda p: p.rank == 3, "no transposed convolution of three axes"),
    ("litert", lambda p: p.groups > 1, "no groups"),
    ("litert", lambda p: p.dilations == (2, 3), "no dilations"),
]
NO_ACTIVATION = {"mnn": ("gelu", "mish"), "litert": ("elu", "mish", "softplus")}


def refusal_of(name, problem):
    """What a peer says about a problem that it does not compute; None if it does."""
    return next((said for peer, holds, said in REFUSED if re.fullmatch(peer, name) and holds(problem)), None)


def unavailable(name):
    """Why a peer cannot be tested here: the packages that it lacks."""
    missing = peers.PEERS[name].missing
    return f"not installed: {', '.join(missing)}" if missing else ""


@pytest.fixture(scope="module")
def contender():
    """A function from a name to the process of that contender, each of which is started once."""
    with contextlib.ExitStack() as stack:

        @functools.cache
        def of(name):
            return stack.enter_context(run.worker(name, run.cpus_for(1)))

        yield of


def compare(worker, problem, folder, root=Path(), artifact=""):
    """The deviation of a contender's output from the reference."""
    task = peers.Task(problem, 3, root, artifact)
    worker.ask("prepare", task)
    np.save(folder / "expected.npy", td.reference(problem, *task.operands))
    return worker.ask("check", folder / "expected.npy")


@pytest.mark.parametrize("layout", ["NCX", "NXC"])
@pytest.mark.parametrize("case", PROBLEMS)
@pytest.mark.parametrize("name", peers.PEERS)
def test_peers_compute_the_same(name, case, layout, contender, tmp_path):
    if unavailable(name):
        pytest.skip(unavailable(name))
    problem = PROBLEMS[case].replace(data_format=layout)
    if (name, case) == ("openvino", "quantized"):
        features = detect_host().features
        if "amx_int8" in features:
            problem = problem.replace(in_channels=16, out_channels=16)  # its jit_avx512_amx_I8, for fewer, is wrong
        if not features & {"avx_vnni", "avx512_vnni"}:
            pytest.skip("without VNNI sums of two of its products saturate at 16 bits")
    refusal = refusal_of(name, problem)
    if refusal is not None:
        with pytest.raises(WorkerError, match=refusal):
            compare(contender(name), problem, tmp_path)
    else:
        assert compare(contender(name), problem, tmp_path).allowed


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("name", peers.PEERS)
def test_peers_have_the_epilogue(name, activation, contender, tmp_path):
    if unavailable(name):
        pytest.skip(unavailable(name))
    epilogue = td.Epilogue(True, activation, alpha=0.3, minimum=-0.4, maximum=0.7)
    problem = PLAIN.replace(epilogue=epilogue, data_format="NXC")
    if activation in NO_ACTIVATION.get(name, ()):
        with pytest.raises(WorkerError, match=f"no .*{activation}"):
            compare(contender(name), problem, tmp_path)
    else:
        assert compare(contender(name), problem, tmp_path).allowed


@pytest.mark.parametrize("name", ["openvino", "mnn", "ncnn", "litert", "torch"])
def test_what_peers_do_not_have(name, contender, tmp_path):
    if unavailable(name):
        pytest.skip(unavailable(name))
    with pytest.raises(WorkerError, match=r"^no transposed convolution of int8"):
        compare(contender(name), PLAIN.replace(dtype="int8"), tmp_path)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"groups": 2}, "no scales of the channels of several groups"),
        ({"quantization": td.Quantization("int8", "int32")}, "no sums of a quantized layer"),
    ],
)
def test_quantized_layers_that_onnx_does_not_have(changes, said, contender, tmp_path):
    problem = PLAIN.replace(**{"dtype": "uint8", "quantization": td.Quantization("int8", "uint8"), **changes})
    with pytest.raises(WorkerError, match=f"^{said}"):
        compare(contender("onnxruntime"), problem, tmp_path)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("torch", "output_padding would have to be 3 on axis 0 and may be at most 1"),
        ("litert", "no output that is 3 longer for the stride 2"),
    ],
)
def test_outputs_extend_by_less_than_a_stride(name, said, contender, tmp_path):
    if unavailable(name):
        pytest.skip(unavailable(name))
    problem = PLAIN.replace(pads_begin=(0, 0), output_spatial=(12, 11), data_format="NXC")
    with pytest.raises(WorkerError, match=f"^{said}"):
        compare(contender(name), problem, tmp_path)


def test_ours(artifacts, contender, tmp_path):
    name = made.file(artifacts, made.PLAIN, "").name
    assert compare(contender(peers.OURS), made.PLAIN, tmp_path, artifacts, name).allowed
