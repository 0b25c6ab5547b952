"""OpenVINO: the ONNX model, compiled for the CPU in the problem's type, or in float32 for float16."""

from __future__ import annotations

import numpy as np

from tvm_deconv.bench.peers.common import Prepared, Task, Unsupported, as_asked, channels_first, floating
from tvm_deconv.bench.peers.model import onnx_model
from tvm_deconv.problem.testing import Operands


def prepare(task: Task, arrays: Operands, threads: int) -> Prepared:
    """Compile the model and set its tensors."""
    import openvino

    problem = task.problem
    floating(problem)
    if problem.dtype == "float64":
        raise Unsupported("it computes float64 in float32")
    core = openvino.Core()
    # Without the hint it computes float32 in bfloat16 on CPUs that are fast at that.
    settings = {
        "INFERENCE_NUM_THREADS": threads,
        "NUM_STREAMS": 1,
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": "bf16" if problem.dtype == "bfloat16" else "f32",
    }
    model = onnx_model(problem, arrays)
    request = core.compile_model(core.read_model(model), "CPU", settings).create_infer_request()
    out = np.empty(problem.replace(data_format="NCX").output_shape, arrays.data.dtype)
    # It owns none of the memory, so `run` keeps the owners alive.
    owners = (model, channels_first(problem, arrays.data), out)
    request.set_input_tensor(openvino.Tensor(owners[1], shared_memory=True))
    request.set_output_tensor(openvino.Tensor(out, shared_memory=True))

    def run(owners: object = owners) -> None:  # noqa: ARG001
        request.infer()

    return Prepared(run, lambda: as_asked(problem, out))
