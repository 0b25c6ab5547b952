"""Every layer of the example list compiles, loads, and is right where it is sampled.

Every fourth layer has one of the levels of CPUs, in turn; the slow tests have the others, levels and targets.

The output of a large layer is compared at random places, each computed in float64 from the definition of the
operator; a layer whose arrays would not fit in a test is run with a smaller batch.
"""

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
from support import artifacts as made
from support.strategies import operands

import tvm_deconv as td
from tvm_deconv.frontends import scan
from tvm_deconv.targets import CPU_LEVELS, CPU_TARGETS, detect_host

LAYERS = scan(Path(__file__).parents[2] / "examples" / "layers.json")
LARGEST_BYTES = 300e6
LARGEST_MACS = 3e9
SAMPLES = 200


def reduced(problem):
    """`problem` with as many images, and as much of its first spatial axis, as fits in a test."""
    while problem.batch > 1 and (problem.min_bytes > LARGEST_BYTES or problem.macs > LARGEST_MACS):
        problem = problem.replace(batch=problem.batch // 2)
    while problem.min_bytes > LARGEST_BYTES or problem.macs > LARGEST_MACS:
        first, *rest = problem.data_spatial
        shorter = problem.output_spatial[0] - problem.strides[0] * (first - first // 2)
        problem = problem.replace(
            data_spatial=(first // 2, *rest), output_spatial=(shorter, *problem.output_spatial[1:])
        )
    return problem


def at(problem, data, weights, bias, index):
    """One output element, by the definition: the sum over every tap that reaches it."""
    n, channel, *where = index
    group, within = divmod(channel, problem.out_channels)
    reached = []
    for i, x, k, s, d, pad in zip(
        where,
        problem.data_spatial,
        problem.kernel,
        problem.strides,
        problem.dilations,
        problem.pads_begin,
        strict=True,
    ):
        steps = [(t, divmod(i + pad - d * t, s)) for t in range(k)]
        reached.append([(t, q) for t, (q, remainder) in steps if remainder == 0 and 0 <= q < x])
    channels = slice(group * problem.in_channels, (group + 1) * problem.in_channels)
    total = 0.0
    for taps in itertools.product(*reached):
        k, x = tuple(t for t, _ in taps), tuple(q for _, q in taps)
        total += data[(n, channels, *x)].astype(np.float64) @ weights[(group, slice(None), within, *k)].astype(
            np.float64
        )
    return total + (0.0 if bias is None else float(bias[channel]))


@pytest.fixture(autouse=True)
def two_threads():
    td.set_num_threads(2)
    yield
    td.set_num_threads(None)


def _pairs():
    """Every layer with every target, of which one is not slow for every fourth layer."""
    levels = list(CPU_LEVELS)
    for place, layer in enumerate(LAYERS):
        for target in CPU_TARGETS:
            quick = place % 4 == 0 and target == levels[place // 4 % len(levels)]
            marks = [] if quick else [pytest.mark.slow]
            yield pytest.param(layer, target, marks=marks, id=f"{layer.name.replace('/', '.')}-{target}")


@pytest.mark.parametrize(("layer", "target"), [*_pairs()])
def test_layer(layer, target, tmp_path):
    problem = reduced(layer.problem)
    made.export(tmp_path, [problem], target)
    if not CPU_TARGETS[target].features <= detect_host().features:
        pytest.skip(f"compiled, but this CPU does not run {target}")
    data, weights, bias = operands(problem, 5)
    out = np.full(problem.output_shape, np.nan, np.float32)
    bound = td.load(tmp_path).bind(problem, weights, bias)
    bound(data, out=out)
    assert np.isfinite(out).all()
    for threads in (1, 3):
        # However blocks fall to threads, each writes its own share: what spills shows as another order of writes.
        again = np.full(problem.output_shape, np.nan, np.float32)
        td.set_num_threads(threads)
        bound(data, out=again)
        np.testing.assert_array_equal(again, out)
    rng = np.random.default_rng(6)
    corners = [0] * out.ndim, [extent - 1 for extent in out.shape]
    places = [*corners, *(tuple(rng.integers(out.shape)) for _ in range(SAMPLES))]
    filters = problem.canonical_filter(weights)
    wanted = np.array([at(problem, data, filters, bias, place) for place in places])
    found = np.array([out[tuple(place)] for place in places])
    terms = problem.in_channels * math.prod(problem.kernel)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5 * math.sqrt(terms))


def test_the_list_is_whole():
    assert len(LAYERS) == 46
    assert {layer.problem.epilogue.activation for layer in LAYERS} == {"none"}, "samples are compared without one"
