"""Arrays between pages that nobody may touch: one element beyond such an array ends the process."""

import ctypes
import math
import mmap

import numpy as np
from support.kernels import poison_of

PAGE = mmap.PAGESIZE
PROT_NONE = 0


def fenced(shape, dtype, at_end):
    """A poisoned array with a forbidden page before and behind its pages, whose last or first bytes it has."""
    dtype = np.dtype(dtype)
    size = math.prod(shape) * dtype.itemsize
    inner = max(-(-size // PAGE), 1) * PAGE
    memory = mmap.mmap(-1, inner + 2 * PAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for page in (address, address + PAGE + inner):
        assert protect(page, PAGE, PROT_NONE) == 0
    offset = PAGE + inner - size if at_end else PAGE
    array = np.frombuffer(memory, dtype, math.prod(shape), offset).reshape(shape)
    array[...] = poison_of(dtype)
    return array


def copied(array, at_end):
    inside = fenced(array.shape, array.dtype, at_end)
    inside[...] = array
    return inside
