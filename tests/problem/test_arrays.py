"""Arrays without values."""

import numpy as np
import pytest

from tvm_deconv.problem.arrays import empty, empty_lines


@pytest.mark.parametrize("dtype", ["float32", "uint16", "int8"])
def test_large_memory_begins_with_a_line_of_the_cache(dtype):
    for shape in ((3, 100_001), (7, 11), (0, 5)):
        found = empty(shape, np.dtype(dtype))
        found[...] = 1
        assert (found.shape, found.dtype, found.flags.carray) == (shape, dtype, True)
        assert found.nbytes < 1 << 16 or found.ctypes.data % 64 == 0


@pytest.mark.parametrize("dtype", ["float32", "uint16", "int8"])
@pytest.mark.parametrize("shape", [(7, 11), (3,), (3, 100_001)], ids=str)
def test_lines_begin_with_a_line_of_the_cache_at_any_size(shape, dtype):
    kept = [empty_lines(shape, np.dtype(dtype)) for _ in range(5)]
    assert {(found.shape, found.dtype.name, found.ctypes.data % 64) for found in kept} == {(shape, dtype, 0)}
