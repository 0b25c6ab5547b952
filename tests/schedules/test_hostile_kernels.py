"""Kernels of any plan between pages that nobody may touch: one element beyond an array ends the process."""

import functools

import numpy as np
from hypothesis import strategies as st
from support.fences import copied, fenced
from support.hostile import hostile
from support.kernels import X86, bits, compile_kernel
from support.strategies import operands, problems
from support.tolerances import assert_close

from tvm_deconv.problem.reference import reference
from tvm_deconv.targets import CPU_LEVELS, detect_host

TARGETS = [target for target in CPU_LEVELS.values() if target.features <= detect_host().features]


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
