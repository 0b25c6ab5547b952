"""On a CUDA device: layers built for it, called with torch's tensors, on a stream of the caller's."""

import numpy as np
import pytest
from support.cuda_kernels import drawn
from support.strategies import operands, problems
from support.tolerances import norm_bound

import tvm_deconv as td
from tvm_deconv.errors import DeviceError
from tvm_deconv.problem.reference import reference
from tvm_deconv.targets import CUDA_TARGETS, cuda_capability

try:
    CAPABILITY = cuda_capability()
    MISSING = None
except DeviceError as error:
    MISSING = str(error)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(MISSING is not None, reason=f"no CUDA device: {MISSING}")]


def test_layers_on_a_stream_of_the_callers(tmp_path):
    torch = pytest.importorskip("torch")
    chosen = drawn(problems().filter(lambda p: p.batch > 0 and 0 not in p.output_spatial), 12)
    own = "cuda-sm_{}{}".format(*CAPABILITY)
    td.compile(chosen, own if own in CUDA_TARGETS else "cuda", tmp_path)
    library = td.load(tmp_path)
    for problem in chosen:
        data, weights, bias = operands(problem, 1)

        def tensor(array):
            if array.dtype.name == "bfloat16":
                return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).cuda()
            return torch.from_numpy(array).cuda()

        with torch.cuda.stream(torch.cuda.Stream()):
            layer = library.bind(problem, tensor(weights), None if bias is None else tensor(bias))
            found = layer(tensor(data))
            torch.cuda.current_stream().synchronize()
        wanted = reference(problem, data, weights, bias)
        error = np.linalg.norm(found.double().cpu().numpy() - wanted)
        assert error <= norm_bound(problem.dtype) * max(np.linalg.norm(wanted), 1e-3), problem.key
