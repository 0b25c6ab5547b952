"""Every activation in whole kernels of CPUs and of CUDA, at special values, in all floating point types."""

import ml_dtypes
import numpy as np
import pytest
from support.cuda_kernels import Batch
from support.kernels import run_kernel, targets
from support.tolerances import ACTIVATIONS_AT_A_POINT

from tvm_deconv import Epilogue, Problem, reference
from tvm_deconv.problem import ACTIVATIONS

NAMES = [name for name in ACTIVATIONS if name != "none"]
LARGE = [1e4, 6e4, 3e38, 1e300]
VALUES = np.concatenate([np.linspace(-30, 30, 241), LARGE, np.negative(LARGE), [np.nan, np.inf, -np.inf, -0.0]])
FILTER = np.ones((1, 1, 1))


def problem(name, dtype):
    """One channel and one kernel element: the sum before the activation is the data."""
    epilogue = Epilogue(activation=name, alpha=0.3, minimum=-1.5, maximum=2.25)
    extents = (VALUES.size,)
    return Problem(1, 1, 1, 1, extents, (1,), (1,), (1,), (0,), extents, dtype, epilogue=epilogue)


@np.errstate(over="ignore")
def arrays(dtype):
    numpy_type = np.dtype(getattr(ml_dtypes, dtype, dtype))
    return VALUES.astype(numpy_type).reshape(1, 1, -1), FILTER.astype(numpy_type)


@np.errstate(all="ignore")
def check(problem, output):
    data, filter = arrays(problem.dtype)
    rtol, atol = ACTIVATIONS_AT_A_POINT[problem.dtype]
    wanted = reference(problem, data, filter).astype(output.dtype).astype(np.float64)
    np.testing.assert_allclose(output.astype(np.float64), wanted, rtol, atol, err_msg=problem.key)


@targets
@pytest.mark.parametrize("dtype", ACTIVATIONS_AT_A_POINT)
@pytest.mark.parametrize("name", NAMES)
def test_cpu(name, dtype, target):
    p = problem(name, dtype)
    check(p, run_kernel(p, target, *arrays(dtype), None))


@pytest.mark.parametrize("dtype", ACTIVATIONS_AT_A_POINT)
def test_cuda(dtype, tmp_path):
    problems = [problem(name, dtype) for name in NAMES]
    batch = Batch(problems, tmp_path, "activations")
    for number, p in enumerate(problems):
        check(p, batch.run(number, *arrays(dtype), None))
