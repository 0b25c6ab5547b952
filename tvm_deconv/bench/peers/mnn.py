"""MNN: the ONNX model in its own form, in a session with full precision.

Its kernels take data in blocks of four channels or more. For ``N C *X`` the model begins and ends with the conversion,
so that it counts. For ``N *X C``, which is as far from its blocks, data and output are in blocks: what the layer costs
inside a network.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np

from tvm_deconv.artifact.files import temporary_folder
from tvm_deconv.bench.peers.common import Prepared, Task, Unsupported, as_asked, as_plane, channels_first, single
from tvm_deconv.bench.peers.model import onnx_model
from tvm_deconv.problem import Array
from tvm_deconv.problem.testing import Operands

_LACKING = ("gelu", "mish")
_CLONE_NEWNET = 0x40000000
_CLONE_NEWUSER = 0x10000000


@functools.cache
def leave_network() -> bool:
    """Take the network from this process for good, if the system lets it; return whether it did."""
    unshare = ctypes.CDLL(None).unshare
    return any(unshare(flags) == 0 for flags in (_CLONE_NEWNET, _CLONE_NEWNET | _CLONE_NEWUSER))


def prepare(task: Task, arrays: Operands, threads: int) -> Prepared:
    """Convert the model and make a session with its data."""
    problem = task.problem
    single(problem)
    if problem.rank == 3:
        raise Unsupported("no transposed convolution of three axes")
    if problem.epilogue.activation in _LACKING:
        raise Unsupported(f"no {problem.epilogue.activation}, or one that is not exact")
    leave_network()
    import MNN

    def host(array: Array) -> Any:
        return MNN.Tensor(array.shape, MNN.Halide_Type_Float, array, MNN.Tensor_DimensionType_Caffe)

    blocks = problem.data_format == "NXC"
    plane, of_plane = as_plane(problem, arrays)
    net = _interpreter(onnx_model(plane, of_plane), blocks)
    session = net.createSession({"backend": "CPU", "numThread": threads, "precision": "high"})
    data, out = net.getSessionInput(session), net.getSessionOutput(session)
    data.copyFrom(host(channels_first(plane, of_plane.data)))
    shape = plane.replace(data_format="NCX").output_shape
    if tuple(out.getShape()) != shape:
        raise Unsupported(f"its output would have the shape {tuple(out.getShape())}")

    def output() -> Array:
        result = host(np.full(shape, np.nan, np.float32))
        out.copyToHostTensor(result)
        return as_asked(plane, result.getNumpyData().copy()).reshape(problem.output_shape)

    return Prepared(lambda: net.runSession(session), output, "data in blocks" if blocks else "conversions counted")


def _interpreter(model: bytes, blocks: bool) -> Any:
    """Return the interpreter of an ONNX model, whose data and output are in `blocks` or in the model's layout."""
    # Not the command `mnnconvert`, which installs packages and would report its use.
    import _tools
    import MNN

    with temporary_folder() as folder:
        given, made = folder / "layer.onnx", folder / "layer.mnn"
        given.write_bytes(model)
        files = ["--modelFile", str(given), "--MNNModel", str(made)]
        keep = f"--keepInputFormat={'false' if blocks else 'true'}"
        _tools.mnnconvert(["mnnconvert", "-f", "ONNX", *files, "--bizCode", "layer", keep])
        if not made.exists():
            raise Unsupported("its converter does not take the layer")
        return MNN.Interpreter(str(made))
