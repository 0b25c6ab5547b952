"""What `schedules.contract` asks of every backend and every algorithm."""

import itertools

import pytest

import tvm_deconv as td
from tvm_deconv.compiler.backends import BACKENDS, backend_of, every_algorithm
from tvm_deconv.compiler.records import Schedule
from tvm_deconv.compiler.selection import Choice, algorithms_for, checked_algorithms, load_imbalance, named
from tvm_deconv.targets import known_targets

#: Planes with few and many channels, depthwise, kernel = stride, a line, integers, and phases without a common run.
PROBLEMS = [
    td.Problem(1, 1, 3, 2, (40, 50), (3, 3), (2, 2), (1, 1), (1, 1), (79, 99)),
    td.Problem(1, 1, 64, 32, (12, 12), (4, 4), (2, 2), (1, 1), (1, 1), (24, 24), data_format="NXC"),
    td.Problem(1, 32, 1, 1, (12, 12), (4, 4), (2, 2), (1, 1), (1, 1), (24, 24)),
    td.Problem(1, 1, 256, 64, (16, 16), (2, 2), (2, 2), (1, 1), (0, 0), (32, 32)),
    td.Problem(2, 1, 8, 16, (50,), (8,), (4,), (1,), (2,), (200,), dtype="float16"),
    td.Problem(1, 1, 8, 16, (9, 9), (3, 3), (2, 2), (1, 1), (1, 1), (17, 17), dtype="int8"),
    td.Problem(1, 1, 3, 2, (5, 5), (7, 7), (8, 8), (3, 3), (2, 3), (40, 43)),
]
CASES = [
    pytest.param(problem, known_targets()[name], id=f"{name}-{number}")
    for (number, problem), name in itertools.product(enumerate(PROBLEMS), ("x86-64-v3", "x86-64-v4", "cuda"))
]


def test_names_tell_algorithms_apart():
    names = [algorithm.name for algorithm in every_algorithm()]
    assert len(set(names)) == len(names) > 10
    assert [named(name).name for name in names] == names
    assert checked_algorithms(reversed(names), ["native"]) == tuple(names)
    assert all(algorithm.error_growth >= 1 for algorithm in every_algorithm())


def test_algorithms_are_for_one_target_at_least():
    narrow, rows = ("cuda_narrow",), ("direct_rows",)
    assert checked_algorithms(narrow, ["native", "cuda"]) == narrow
    assert checked_algorithms(rows, ["native"]) == checked_algorithms(rows, ["znver4"]) == rows
    assert algorithms_for(known_targets()["cuda"], narrow) == narrow
    assert algorithms_for(known_targets()["x86-64-v3"], narrow) is None  # all
    for algorithms, target in ((narrow, "native"), (narrow, "x86-64-v4"), (rows, "cuda")):
        with pytest.raises(td.ProblemError, match=f"algorithms=.*{algorithms[0]}.*: must name .*, those for {target}$"):
            checked_algorithms(algorithms, [target])


def test_every_target_has_a_backend():
    assert {target.backend for target in known_targets().values()} == set(BACKENDS)
    assert all(backend_of(target).name == target.backend for target in known_targets().values())


@pytest.mark.parametrize(("problem", "target"), CASES)
def test_algorithms_keep_their_contract(problem, target):
    backend, problem = backend_of(target), target.computes(problem)
    supporting = [algorithm for algorithm in backend.algorithms if algorithm.supports(problem, target)]
    assert supporting
    assert all(a in supporting for a in backend.algorithms if a.is_default_for(problem, target))
    for algorithm in supporting:
        costs, plans = zip(*algorithm.candidates(problem, target), strict=True)
        assert costs[0] > 0
        assert list(costs) == sorted(costs)
        assert len(set(plans)) == len(plans)
        for plan in plans[:3]:
            assert min(plan.knobs.values(), default=0) >= 0
            assert algorithm.read(plan.knobs) == plan
            assert load_imbalance(problem, algorithm, plan, 1) == 1


@pytest.mark.parametrize(("problem", "target"), CASES)
def test_the_default_is_one_of_the_defaults(problem, target):
    backend, problem = backend_of(target), target.computes(problem)
    algorithm, plan = backend.default(problem, target)
    assert algorithm.is_default_for(problem, target)
    assert plan == algorithm.default_plan(problem, target)[1]
    for other in backend.algorithms:
        if other.supports(problem, target):
            assert backend.default(problem, target, [other.name])[0] is other
        else:
            with pytest.raises(td.BuildError, match=f"algorithms='{other.name}': admit no algorithm for "):
                backend.default(problem, target, [other.name])


def test_kernels_say_what_manifests_need():
    for name in ("x86-64-v3", "cuda"):
        target = known_targets()[name]
        algorithm, plan = backend_of(target).default(PROBLEMS[0], target)
        kernel = backend_of(target).build(PROBLEMS[0], target)
        assert (kernel.problem, kernel.algorithm, kernel.knobs) == (PROBLEMS[0], algorithm.name, plan.knobs)
        assert kernel.packed_elements > 0
        assert kernel.packed_dtype == "float32"
        assert set(kernel.functions) == {"deconv", "pack"}


def test_an_error_of_one_choice_leads_to_the_next(tmp_path):
    from tvm_deconv.compiler.build import export

    broken = Choice(Schedule.of("direct_rows", {"nonsense": 1}), "tuned", "a bad record")
    warnings = []
    target = known_targets()["x86-64-v3"]
    manifest = export(PROBLEMS[0], target, tmp_path, choices=[broken, Choice(None, "default", "")], warnings=warnings)
    assert manifest.origin == "default"
    assert len(warnings) == 1
    assert "for x86-64-v3: not built by a bad record: knobs=" in warnings[0]
