"""On a CUDA device: layers built for it, called with torch's tensors, on a stream of the caller's."""

import ctypes
import time

import numpy as np
import pytest
from support.cuda_kernels import drawn
from support.strategies import operands, problems
from support.tolerances import norm_bound

import tvm_deconv as td
from tvm_deconv.errors import DeviceError
from tvm_deconv.problem.reference import reference
from tvm_deconv.targets import CUDA_TARGETS, cuda_capability
from tvm_deconv.tuning.runners.cuda import CudaMachine

try:
    CAPABILITY = cuda_capability()
    MISSING = None
except DeviceError as error:
    MISSING = str(error)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(MISSING is not None, reason=f"no CUDA device: {MISSING}")]


#: A filter whose packing takes longer than a call on another stream needs to begin.
LARGE = td.Problem(1, 1, 2048, 1024, (4, 4), (4, 4), (2, 2), (1, 1), (1, 1), (8, 8), epilogue=td.Epilogue(True))


def built(chosen, directory):
    own = "cuda-sm_{}{}".format(*CAPABILITY)
    td.compile(chosen, own if own in CUDA_TARGETS else "cuda", directory)
    return td.load(directory)


def test_layers_on_a_stream_of_the_callers(tmp_path):
    torch = pytest.importorskip("torch")
    chosen = drawn(problems().filter(lambda p: p.batch > 0 and 0 not in p.output_spatial), 12)
    library = built(chosen, tmp_path)
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


def test_a_call_on_another_stream_than_bind(tmp_path):
    """It waits for the packing of the filter; the filter's memory is not reused while it runs."""
    torch = pytest.importorskip("torch")
    library, arrays = built([LARGE], tmp_path), operands(LARGE, 2)
    data, weights, bias = (torch.from_numpy(array).cuda() for array in arrays)
    wanted = torch.from_numpy(reference(LARGE, *arrays)).cuda()
    torch.cuda.synchronize()
    one, other = torch.cuda.Stream(), torch.cuda.Stream()
    for _ in range(20):
        with torch.cuda.stream(one):
            layer = library.bind(LARGE, weights, bias)
        with torch.cuda.stream(other):
            found = layer(data)
        del layer
        with torch.cuda.stream(one):  # takes the memory of the filter, if it is free
            torch.full((LARGE.in_channels * LARGE.out_channels * 16,), float("nan"), device="cuda")
        other.synchronize()
        assert (found.double() - wanted).norm() <= norm_bound(LARGE.dtype) * wanted.norm()


def test_the_first_call_may_be_captured(tmp_path):
    torch = pytest.importorskip("torch")
    library, arrays = built([LARGE], tmp_path), operands(LARGE, 3)
    data, weights, bias = (torch.from_numpy(array).cuda() for array in arrays)
    layer, graph = library.bind(LARGE, weights, bias), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = layer(data)
    graph.replay()
    wanted = torch.from_numpy(reference(LARGE, *arrays)).cuda()
    assert (found.double() - wanted).norm() <= norm_bound(LARGE.dtype) * wanted.norm()


def test_samples_are_of_graphs():
    """A copy takes what the device's memory allows, and not what the host takes to enqueue it."""
    machine, calls = CudaMachine(0), []
    assert machine.copy() > 1e11
    source, copy = (machine.put(np.zeros(64, np.uint8)) for _ in range(2))
    addresses = ctypes.c_uint64(copy.address), ctypes.c_uint64(source.address), ctypes.c_size_t(64)

    def call(turn):
        time.sleep(0.001)
        calls.append(turn)
        machine._ask("cuMemcpyDtoDAsync_v2", *addresses, machine._stream)

    assert max(machine.sample(call, 2, 10, 5)) < 1e-4
    assert len(calls) == 10  # of one graph that was launched six times
