"""TF32: only where a problem says so, on CUDA devices; elsewhere such a problem is one of float32."""

import itertools
import json

import numpy as np
import pytest
from support.artifacts import manifest
from support.cuda_kernels import HOPPER_FAMILIES, TARGET, build_kernel, target_of

import tvm_deconv as td
from tvm_deconv.artifact.select import Accepted, select
from tvm_deconv.errors import ProblemError, SourceError
from tvm_deconv.frontends import scan
from tvm_deconv.problem.reference import reference
from tvm_deconv.schedules.cuda.algorithms import ALGORITHMS
from tvm_deconv.schedules.cuda.lower import source
from tvm_deconv.targets import CPU_TARGETS, CUDA_TARGETS, Host, Place
from tvm_deconv.targets.cuda import TENSOR_ALGORITHMS

EXACT = td.Problem(1, 1, 16, 16, (6, 7), (4, 4), (2, 2), (1, 1), (1, 1), (12, 14), epilogue=td.Epilogue(True, "relu"))
LOOSE = EXACT.replace(precision="tf32")
BETWEEN = EXACT.replace(precision="tf32x3")


def test_it_is_part_of_the_key():
    assert LOOSE != EXACT
    assert "-float32+tf32-" in LOOSE.key
    assert td.Problem.from_key(LOOSE.key) == LOOSE
    assert "tf32" not in EXACT.key
    assert "-float32+tf32x3-" in BETWEEN.key
    assert td.Problem.from_key(BETWEEN.key) == BETWEEN
    assert LOOSE.artifact_keys == (LOOSE.artifact_key, BETWEEN.artifact_key, EXACT.artifact_key)
    assert BETWEEN.artifact_keys == (BETWEEN.artifact_key, EXACT.artifact_key)
    assert EXACT.artifact_keys == (EXACT.artifact_key,)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: EXACT.replace(precision="fast"), "precision='fast': must be one of ieee, tf32x3, tf32, float32_fast"),
        (lambda: LOOSE.replace(dtype="float64"), "precision='tf32': must be ieee where dtype=float64"),
        (
            lambda: td.Problem.from_key(EXACT.key.replace("float32", "float32+ieee")),
            f"key='{EXACT.key.replace('float32', 'float32+ieee')}': must be written {EXACT.key}",
        ),
        (
            lambda: td.Problem.from_key(EXACT.key.replace("float32", "float16+tf32")),
            "precision='tf32': must be ieee where dtype=float16",
        ),
    ],
)
def test_what_it_may_be(make, text):
    with pytest.raises(ProblemError) as caught:
        make()
    assert str(caught.value) == text


def test_every_dialect_takes_it(tmp_path):
    given = {"dtype": "float32", "precision": "tf32"}
    made = [
        td.from_openvino((1, 2, 5), (2, 3, 4), strides=(3,), **given),
        td.from_onednn((1, 5, 2), (4, 3, 2), strides=(3,), **given),
        td.from_onnx((1, 2, 5), (2, 3, 4), strides=(3,), **given),
        td.from_torch((1, 2, 5), (2, 3, 4), stride=3, **given),
    ]
    assert {problem.precision for problem in made} == {"tf32"}
    entry = {"data": [1, 2, 5], "filter": [1, 2, 3, 4], "strides": [3]}
    path = tmp_path / "list.json"
    path.write_text(json.dumps([entry | {"precision": "tf32"}, entry]))
    assert [layer.problem.precision for layer in scan(path)] == ["tf32", "ieee"]
    path.write_text(json.dumps([entry | {"precision": "fast"}]))
    with pytest.raises(SourceError, match=r"precision='fast': must be one of ieee, "):
        scan(path)


@pytest.mark.parametrize(("terms", "wanted"), [(255, "ieee"), (256, "tf32x3"), (8192, "tf32x3"), (8193, "ieee")])
def test_the_fastest_that_is_about_as_exact_as_float32(terms, wanted):
    """It has no key of its own: what it became is what keys and manifests say."""
    problem = td.Problem(1, 1, terms, 16, (6,), (4,), (4,), (1,), (0,), (24,), precision="float32_fast")
    assert problem == problem.replace(precision=wanted)
    assert td.from_torch((1, terms, 6), (terms, 16, 4), stride=4, precision="float32_fast") == problem
    assert CUDA_TARGETS["cuda"].computes(problem).precision == wanted
    assert CPU_TARGETS["x86-64-v3"].computes(problem).precision == "ieee"


@pytest.mark.parametrize(
    ("target", "algorithm", "wanted"),
    [
        ("cuda-sm_90", "cuda_tensor", "tf32x3"),
        ("cuda-sm_90a", "cuda_wgmma", "tf32x3"),
        ("cuda-sm_90", "cuda_narrow", "ieee"),
        ("cuda-sm_99", "cuda_tensor", "tf32x3"),
    ],
)
def test_artifacts_say_in_what_they_multiply(target, algorithm, wanted):
    """Also where the problem permits less: inspect and the reasons of a choice say it."""
    one = manifest(BETWEEN, target, algorithm=algorithm)
    assert one.precision == wanted
    (decision,) = select(BETWEEN, [one], Place(Host(frozenset()), capability=(9, 0)))
    assert target == "cuda-sm_99" or decision.reason.endswith(f", precision {wanted}")
    exact = manifest(EXACT, "x86-64-v3")
    assert exact.precision == "ieee"
    place = Place(Host(exact.required))
    assert select(EXACT, [exact], place)[0].reason.endswith(" schedule")
    assert select(BETWEEN, [exact], place)[0].reason.endswith(", precision ieee")


def test_algorithms_on_tensor_cores_are_known():
    """Those, and no others, have TF32 in their text."""
    problem = td.Problem(1, 1, 64, 32, (9, 16), (4, 4), (2, 2), (1, 1), (1, 1), (18, 32), data_format="NXC")
    problem = problem.replace(precision="tf32")
    known = {algorithm.name for algorithm in ALGORITHMS}
    assert known >= TENSOR_ALGORITHMS
    for algorithm in ALGORITHMS:
        if algorithm.supports(problem, target_of(algorithm)):
            text = source(build_kernel(problem, algorithm).functions)
            assert ("tf32" in text) == (algorithm.name in TENSOR_ALGORITHMS)


def test_more_exact_serves_and_less_does_not():
    exact, loose = manifest(EXACT, "cuda-sm_80"), manifest(LOOSE, "cuda-sm_80")

    def accepted(problem, given, capability=(8, 0)):
        decisions = select(problem, given, Place(Host(frozenset()), capability=capability))
        return [decision.manifest for decision in decisions if isinstance(decision, Accepted)]

    for given in itertools.permutations([exact, loose]):
        assert accepted(LOOSE, given) == [loose, exact]
        assert accepted(EXACT, given) == [exact]
    (refused,) = select(EXACT, [loose], Place(Host(frozenset()), capability=(8, 0)))
    assert "precision tf32, wanted ieee" in refused.reason
    # Closer code of what computes more slowly comes second.
    both = [manifest(EXACT, "cuda-sm_90"), manifest(LOOSE, "cuda")]
    assert accepted(LOOSE, both, (9, 0)) == both[::-1]
    between = manifest(BETWEEN, "cuda-sm_80")
    assert accepted(BETWEEN, [loose, exact, between]) == [between, exact]
    assert accepted(LOOSE, [between]) == [between]
    assert accepted(EXACT, [between]) == []
    dynamic = [EXACT.replace(batch="any", precision=precision) for precision in td.problem.PRECISIONS]
    for (i, served), (j, asked) in itertools.product(enumerate(dynamic), enumerate((EXACT, BETWEEN, LOOSE))):
        assert served.serves(asked) == (i <= j)


@pytest.mark.usefixtures("compiles_here")
def test_cpus_compute_exactly(tmp_path):
    outcomes = td.compile([EXACT, LOOSE], "x86-64-v3", tmp_path, layers={EXACT: ["a"], LOOSE: ["b"]}, jobs=1)
    assert [(outcome.problem, outcome.layers) for outcome in outcomes] == [(EXACT, ("a", "b"))]
    rng = np.random.default_rng()
    data, weights, bias = (
        rng.standard_normal(shape, np.float32) for shape in (LOOSE.data_shape, LOOSE.filter_shape, LOOSE.bias_shape)
    )
    found = td.load(tmp_path).bind(LOOSE, weights, bias)(data)
    np.testing.assert_allclose(found, reference(LOOSE, data, weights, bias), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda algorithm: algorithm.name)
@pytest.mark.parametrize("data_format", td.problem.DATA_FORMATS)
def test_it_is_never_silent(algorithm, data_format):
    """What was not asked for is not in the source of any kernel."""
    problem = EXACT.replace(data_format=data_format)
    if algorithm.supports(problem, TARGET):
        kernel = build_kernel(problem, algorithm)
        text = source(kernel.functions)
        assert "tf32" not in text
        assert "tvm_deconv_high" not in text
    else:
        assert algorithm.name in ("cuda_narrow", "cuda_tensor", "cuda_merged", *HOPPER_FAMILIES)
