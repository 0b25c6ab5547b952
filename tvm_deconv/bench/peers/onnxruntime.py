"""ONNX Runtime: one ConvTranspose node with its activation, as a QDQ model if it is quantized."""

from __future__ import annotations

import numpy as np

from tvm_deconv.bench.peers.common import Prepared, Task, as_asked, channels_first, in_onnx
from tvm_deconv.bench.peers.model import onnx_model
from tvm_deconv.problem.arrays import numpy_dtype
from tvm_deconv.problem.testing import Operands


def prepare(task: Task, arrays: Operands, threads: int) -> Prepared:
    """Bind the model to its arrays."""
    import onnxruntime

    problem = task.problem
    in_onnx(problem)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(onnx_model(problem, arrays), options, providers=["CPUExecutionProvider"])
    out = np.empty(problem.replace(data_format="NCX").output_shape, numpy_dtype(problem.output_dtype))
    binding = session.io_binding()
    values = [onnxruntime.OrtValue.ortvalue_from_numpy(array) for array in (channels_first(problem, arrays.data), out)]
    binding.bind_ortvalue_input("data", values[0])
    binding.bind_ortvalue_output("out", values[1])
    return Prepared(lambda: session.run_with_iobinding(binding), lambda: as_asked(problem, values[1].numpy().copy()))
