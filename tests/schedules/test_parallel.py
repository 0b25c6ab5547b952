"""Tasks of default plans, and kernels that hold several plans for calls on one thread and on more."""

import ctypes
from pathlib import Path

import numpy as np
import pytest
from support.artifacts import toolchain_of
from support.strategies import operands
from support.tolerances import assert_norm_close

import tvm_deconv as td
from tvm_deconv.artifact.ffi import import_tvm_ffi
from tvm_deconv.compiler.backends import BACKENDS
from tvm_deconv.compiler.build import export
from tvm_deconv.compiler.selection import Choice, named
from tvm_deconv.frontends import scan
from tvm_deconv.problem.reference import reference
from tvm_deconv.schedules.contract import imbalance
from tvm_deconv.schedules.x86 import parallel
from tvm_deconv.schedules.x86.parallel import parallel_plans
from tvm_deconv.targets import CPU_LEVELS, CPU_TARGETS

X86 = BACKENDS["x86"]
LAYERS = scan(Path(__file__).parents[2] / "examples" / "layers.json")
#: Cycles of a millisecond, about.
MILLISECOND = 3e6
#: Problems with one task on one thread, one for each kind of sums that all plans must share.
FEW_TASKS = {
    "winograd": td.Problem(8, 1, 64, 64, (6, 6), (4, 4), (2, 2), (1, 1), (1, 1), (12, 12)),
    "winograd, one axis": td.Problem(1, 1, 96, 64, (90,), (10,), (5,), (1,), (3,), (449,)),
    "matrix": td.Problem(40, 1, 32, 96, (1, 1), (4, 4), (1, 1), (1, 1), (0, 0), (4, 4), data_format="NXC"),
    "strassen": td.Problem(1, 1, 128, 96, (4, 5, 6), (2, 2, 2), (2, 2, 2), (1, 1, 1), (0, 0, 0), (8, 10, 12)),
}


def plans_by_threads(problem, target):
    """The tasks of a call for every number of threads, by the default and its further plans; and the default's cost."""
    algorithm, plan = X86.default(problem, target)
    plans = [(1, plan), *parallel_plans(problem, target, algorithm, plan)]

    def tasks(threads):
        return algorithm.tasks(problem, [plan for least, plan in plans if least <= threads][-1])

    return tasks, algorithm.default_plan(problem, target)[0]


@pytest.mark.parametrize("target", CPU_LEVELS.values(), ids=lambda target: target.name)
def test_defaults_have_enough_tasks_for_several_threads(target):
    """The makespan of equal tasks, relative to an even share, over every second example layer that takes a millisecond.

    A layer may be above the bound of the mean where smaller tasks would cost more than idle threads.
    """
    spread = {threads: [] for threads in (1, 2, 4, 8, 16, 64)}
    for layer in LAYERS[::2]:
        tasks, cost = plans_by_threads(layer.problem, target)
        if cost * layer.problem.macs / (2 * target.lanes(4)) > MILLISECOND:
            for threads, found in spread.items():
                found.append(imbalance(tasks(threads), threads))
    assert all(len(found) > 10 for found in spread.values())
    means = {threads: float(np.exp(np.mean(np.log(found)))) for threads, found in spread.items()}
    bounds = {1: (1.0, 1.0), 2: (1.02, 1.2), 4: (1.06, 2.0), 8: (1.1, 2.0), 16: (1.25, 3.5), 64: (2.0, 16.0)}
    for threads, (mean, worst) in bounds.items():
        assert means[threads] <= mean, (threads, means)
        assert max(spread[threads]) <= worst, (threads, spread)


def test_an_even_default_needs_no_other_plan():
    problem = td.Problem(64, 1, 64, 3, (32, 32), (4, 4), (2, 2), (1, 1), (1, 1), (64, 64))
    algorithm, plan = X86.default(problem, CPU_TARGETS["x86-64-v3"])
    assert algorithm.tasks(problem, plan) % 64 == 0
    assert parallel_plans(problem, CPU_TARGETS["x86-64-v3"], algorithm, plan) == []


def test_a_measured_plan_with_enough_tasks_stays():
    """A record may be the fastest where costs have it otherwise: what they have as faster is slower."""
    extents = ((360, 640), (9, 9), (3, 3), (1, 1), (4, 4), (1080, 1920))
    problem = td.Problem(1, 1, 56, 1, *extents, data_format="NXC")
    algorithm, target = named("winograd"), CPU_TARGETS["x86-64-v4"]
    (least, _), *others = algorithm.candidates(problem, target)
    plan = next(
        plan
        for cost, plan in others
        if cost > 1.5 * least and 8 < algorithm.tasks(problem, plan) < 32 and plan.tile.uncropped
    )
    assert imbalance(algorithm.tasks(problem, plan), 4) < 1.1
    assert [threads for threads, _ in parallel_plans(problem, target, algorithm, plan) if threads < 8] == []


@pytest.mark.parametrize("problem", FEW_TASKS.values(), ids=FEW_TASKS)
def test_all_plans_of_a_kernel_give_the_same_bits(problem, tmp_path, monkeypatch):
    """Each plan agrees with the reference, on a poisoned output, and with the others to the last bit."""
    monkeypatch.setattr(parallel, "_SHORTEST", 0.0)
    target, choices = CPU_TARGETS["x86-64-v3"], [Choice(None, "default", "the default")]
    manifest = export(problem, target, tmp_path, choices=choices, toolchain=toolchain_of())
    leasts = sorted(
        {int(name.split(".")[0][len("threads") :]) for name in manifest.knobs if name.startswith("threads")}
    )
    assert leasts, "the default has tasks for all threads: take a smaller problem"
    data, weights, bias = operands(problem, 5)
    wanted = reference(problem, data, weights, bias)
    layer = td.load(tmp_path).bind(problem, weights, bias)
    out = np.empty(problem.output_shape, np.float32)
    results = []
    try:
        for threads in (1, *leasts, 64):
            td.set_num_threads(threads)
            out.fill(np.nan)
            layer(data, out=out)
            results.append(out.copy())
    finally:
        td.set_num_threads(None)
    assert_norm_close(results[0], wanted, problem.dtype, 4.0)
    assert all(np.array_equal(results[0], other) for other in results[1:])


def test_the_threads_of_a_call_choose_the_plan(tmp_path):
    """The kernel for two threads has a ReLU, which shows which of the two ran."""
    target, problem = CPU_TARGETS["x86-64-v3"], td.Problem(1, 1, 3, 5, (4, 6), (3, 3), (2, 2), (1, 1), (1, 1), (7, 11))
    serial = X86.build(problem, target)
    other = X86.build(problem.replace(epilogue=td.Epilogue(activation="relu")), target)
    kernel = parallel.select_by_threads(serial, [(2, other)])
    path = tmp_path / "kernel.so"
    X86.toolchain(tmp_path).link(kernel.functions, target, path)
    launcher, module = ctypes.CDLL(str(path)), import_tvm_ffi().load_module(str(path))
    data, weights, _ = operands(problem, 2)
    packed, out = np.empty(kernel.packed_elements, np.float32), np.empty(problem.output_shape, np.float32)
    module["pack"](np.ascontiguousarray(problem.canonical_filter(weights)), packed)

    def least(threads, limit):
        before = launcher.tvm_deconv_set_num_threads(threads)
        out.fill(np.nan)
        module["deconv_with"](limit, 0, 0, data, packed, out)
        launcher.tvm_deconv_set_num_threads(before)
        return out.min()

    assert least(1, 0) < 0
    assert least(2, 0) == 0
    assert least(2, 1) < 0
    assert least(4, 3) == 0
