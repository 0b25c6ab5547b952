"""OpenVINO: the ONNX model, compiled for the CPU in the problem's type, or in float32 for float16."""

from __future__ import annotations

from typing import Any

import numpy as np

from tvm_deconv.bench.peers.common import Prepared, Task, Unsupported, as_asked, channels_first, in_onnx
from tvm_deconv.bench.peers.model import onnx_model
from tvm_deconv.problem import Array
from tvm_deconv.problem.arrays import numpy_dtype
from tvm_deconv.problem.testing import Operands


def prepare(task: Task, arrays: Operands, threads: int) -> Prepared:
    """Compile the model and set its tensors."""
    import openvino

    problem = task.problem
    in_onnx(problem)
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
    if problem.dtype == "bfloat16":  # of which it reads no ONNX model
        in_float32 = arrays._replace(data=arrays.data.astype(np.float32), filter=arrays.filter.astype(np.float32))
        model = onnx_model(problem.replace(dtype="float32"), in_float32)
        network = _of_bfloat16(core.read_model(model))
    else:
        model = onnx_model(problem, arrays)
        network = core.read_model(model)
    compiled = core.compile_model(network, "CPU", settings)
    request = compiled.create_infer_request()
    out = np.empty(problem.replace(data_format="NCX").output_shape, numpy_dtype(problem.output_dtype))
    # It owns none of the memory, so `run` keeps the owners alive.
    owners = (model, channels_first(problem, arrays.data), out)
    request.set_input_tensor(_tensor(owners[1]))
    request.set_output_tensor(_tensor(out))

    def run(owners: object = owners) -> None:  # noqa: ARG001
        request.infer()

    return Prepared(run, lambda: as_asked(problem, out), _kernels(compiled))


def _of_bfloat16(network: Any) -> Any:
    """Return the model with input and output in bfloat16."""
    from openvino import Type
    from openvino.preprocess import PrePostProcessor

    conversion = PrePostProcessor(network)
    conversion.input().tensor().set_element_type(Type.bf16)
    conversion.output().tensor().set_element_type(Type.bf16)
    return conversion.build()


def _tensor(array: Array) -> Any:
    """Return a tensor on the memory of an array."""
    import openvino

    if array.dtype.name == "bfloat16":
        return openvino.Tensor(array.view(np.uint16), array.shape, openvino.Type.bf16)
    return openvino.Tensor(array, shared_memory=True)


def _kernels(compiled: Any) -> str:
    """Return the names of its kernels of transposed convolutions."""
    facts = [operation.get_rt_info() for operation in compiled.get_runtime_model().get_ops()]
    found = [fact["primitiveType"].astype(str) for fact in facts if fact["layerType"].astype(str) == "Deconvolution"]
    return ", ".join(found)
