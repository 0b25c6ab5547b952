"""Compile and run one kernel in this process, around the library: what the tests of schedules share."""

import itertools
import re

import numpy as np
import pytest
import tvm

from tvm_deconv.compiler.backends import BACKENDS
from tvm_deconv.compiler.named_values import PIPELINE
from tvm_deconv.problem.quantization import bound_arrays
from tvm_deconv.targets import CPU_LEVELS, CPU_TARGETS, detect_host

#: Elements before and behind an array in its allocation; the offset is odd, so no vector of an array is aligned.
MARGIN = 37
LINE = 64
X86 = BACKENDS["x86"]


def _unless_it_runs(target):
    lacks = not target.features <= detect_host().features
    return pytest.mark.skipif(lacks, reason=f"this CPU does not run {target.name}")


def _those_that_run(known):
    params = [pytest.param(target, marks=_unless_it_runs(target), id=target.name) for target in known.values()]
    return pytest.mark.parametrize("target", params)


def in_turn(names, *axes):
    """Parametrize by `names` and target: by all combinations of the axes' tuples, each with one level, in turn.

    Each value of an axis meets each level, if another axis has two values or more.
    """
    levels, params = list(CPU_LEVELS.values()), []
    for places in itertools.product(*map(range, map(len, axes))):
        target = levels[sum(places) % len(levels)]
        values = [value for axis, place in zip(axes, places, strict=True) for value in axis[place]]
        name = "-".join([*map(str, places), target.name])
        params.append(pytest.param(*values, target, marks=_unless_it_runs(target), id=name))
    return pytest.mark.parametrize(f"{names}, target", params)


def each_shape(shapes):
    """Parametrize by the number of a shape, its extents and its options: `shapes` has the latter by their names."""
    numbered = [pytest.param(number, *shapes[name], id=name) for number, name in enumerate(shapes)]
    return pytest.mark.parametrize(("number", "shape", "options"), numbered)


def turn_of(choices, *numbers):
    """The one of `choices` whose turn it is: they take turns as the sum of `numbers` rises."""
    return choices[sum(numbers) % len(choices)]


#: The levels; and with them the targets that differ by instructions for low precision.
targets, all_targets = _those_that_run(CPU_LEVELS), _those_that_run(CPU_TARGETS)


def bits(array):
    """bfloat16 crosses the ABI as uint16."""
    return array.view(np.uint16) if array.dtype.name == "bfloat16" else array


def poison_of(dtype):
    """What spoils a result that it gets into: NaN, also as the bits of bfloat16 and of words of two."""
    return np.nan if np.dtype(dtype).kind == "f" else {2: 0x7FC1, 4: 0x7FC17FC1}.get(np.dtype(dtype).itemsize, 113)


def guarded(shape, dtype, aligned=False):
    """An array filled with a poison, somewhere inside an allocation of the same poison, and that allocation.

    If `aligned`, it begins with a line of the caches.
    """
    size = int(np.prod(shape))
    poison = poison_of(dtype)
    whole = np.full(size + 2 * MARGIN + LINE, poison, dtype)
    if aligned:
        begin = -whole.ctypes.data % LINE // whole.itemsize
        whole = whole[begin + -MARGIN % LINE :]
    return whole[MARGIN : MARGIN + size].reshape(shape), whole


def compile_kernel(problem, target, algorithm=None, plan=None):
    """A kernel for `problem`, by default the default one, and its functions."""
    kernel = X86.build(problem, target, algorithm, plan)
    return kernel, compiled_kernel(kernel, target)


def compiled_kernel(kernel, target):
    """The functions of a kernel."""
    module = tvm.IRModule(kernel.functions)
    return tvm.compile(module, target=tvm.target.Target(target.llvm), tir_pipeline=PIPELINE)


def code_of(problem, target, algorithm=None, plan=None):
    """The assembly of a kernel for `problem`, which the CPU need not run: the default one, or that of an `algorithm`.

    That is by its cheapest plan, if none is given.
    """
    if algorithm is not None:
        plan = plan or algorithm.candidates(problem, target)[0][1]
    return compile_kernel(problem, target, algorithm, plan)[1].mod.inspect_source("asm")


def innermost_loops(code):
    """The bodies of innermost loops in assembly."""
    found = re.findall(r"^(\.LBB\S+):\n((?:(?!\.LBB)[^\n]*\n)*?)\s+j\w+\s+\1\n", code, re.MULTILINE)
    return [body for _, body in found]


def call_kernel(problem, kernel, compiled, data, weights, bias, aligned=False):
    """The output of a compiled kernel for `problem`; what lies around the output and the packed filter is checked.

    If `aligned`, the output begins with a line of the caches.
    """
    packed, around_packed = guarded((kernel.packed_elements,), kernel.packed_dtype)
    storage = "uint16" if problem.output_dtype == "bfloat16" else problem.output_dtype
    out, around_out = guarded(problem.output_shape, storage, aligned)
    compiled["pack"](bits(np.ascontiguousarray(problem.canonical_filter(weights))), packed)
    inner = [bits(data), packed, *([] if bias is None else [bias]), out]
    compiled["deconv"](*inner)
    for whole in (around_packed, around_out):
        edges = np.concatenate([whole[:MARGIN], whole[-MARGIN:]])
        np.testing.assert_array_equal(edges, poison_of(edges.dtype))
    return out.view("bfloat16") if problem.output_dtype == "bfloat16" else out


def bound(problem, arrays):
    """Data, filter, and bias or table of constants, as kernels of `problem` take them; `arrays` are of `testing`."""
    if problem.quantization is None:
        return arrays.data, arrays.filter, arrays.bias
    canonical = problem.canonical_filter(arrays.filter)
    return arrays.data, *bound_arrays(problem, canonical, arrays.bias, arrays.scaling)


def run_kernel(problem, target, data, weights, bias, algorithm=None, plan=None):
    """The output of a kernel for `problem`, by default the default one; see `call_kernel`."""
    return call_kernel(problem, *compile_kernel(problem, target, algorithm, plan), data, weights, bias)
