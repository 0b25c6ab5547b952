"""Kernels of any plan between pages that nobody may touch: one element beyond an array ends the process."""

import ctypes
import functools
import math
import mmap

import numpy as np
from hypothesis import strategies as st
from support.hostile import hostile
from support.kernels import X86, bits, compile_kernel, poison_of
from support.strategies import operands, problems
from support.tolerances import assert_close

from tvm_deconv.problem.reference import reference
from tvm_deconv.targets import CPU_LEVELS, detect_host

PAGE = mmap.PAGESIZE
PROT_NONE = 0
TARGETS = [target for target in CPU_LEVELS.values() if target.features <= detect_host().features]


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


KERNELS = st.fixed_dictionaries(
    {
        "problem": problems(max_macs=20_000),
        "target": st.integers(0, len(TARGETS) - 1),
        "algorithm": st.floats(0, 1, exclude_max=True),
        "plan": st.floats(0, 1, exclude_max=True),
        "at_end": st.booleans(),
        "seed": st.integers(0, 1000),
    }
)


@functools.lru_cache(maxsize=1)
def built(problem, target, algorithm, plan):
    """The algorithm, plan, kernel and functions at these places of their lists; None if there is no plan."""
    target = TARGETS[target]
    algorithms = [each for each in X86.algorithms if each.supports(problem, target)]
    chosen = algorithms[int(algorithm * len(algorithms))]
    plans = [each for _, each in chosen.candidates(problem, target)]
    if not plans or 0 in problem.output_shape:
        return None
    best = plans[int(plan * len(plans))]
    return chosen, best, *compile_kernel(problem, target, chosen, best)


def other_data(chance, drawn):
    """The same kernel with other numbers at the other end of pages."""
    return drawn | {"seed": chance.randrange(1 << 32), "at_end": chance.random() < 0.5}


@hostile(KERNELS, few=4, many=400, vary=other_data)
def test_kernels(drawn):
    problem, at_end = drawn["problem"], drawn["at_end"]
    found = built(problem, drawn["target"], drawn["algorithm"], drawn["plan"])
    if found is None:
        return
    algorithm, plan, kernel, compiled = found
    data, weights, bias = operands(problem, drawn["seed"])
    packed = fenced((kernel.packed_elements,), kernel.packed_dtype, at_end)
    compiled["pack"](copied(bits(np.ascontiguousarray(problem.canonical_filter(weights))), at_end), packed)
    storage = "uint16" if problem.output_dtype == "bfloat16" else problem.output_dtype
    out = fenced(problem.output_shape, storage, at_end)
    others = [] if bias is None else [copied(bias, at_end)]
    compiled["deconv"](copied(bits(data), at_end), packed, *others, out)
    found = out.view("bfloat16") if problem.output_dtype == "bfloat16" else out
    assert_close(
        found,
        reference(problem, data, weights, bias),
        problem.dtype,
        algorithm.error_growth,
        f"{problem.key} {plan.knobs}",
    )
