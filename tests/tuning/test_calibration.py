"""Predictions of times from costs and measurements."""

import math
from types import SimpleNamespace

import numpy as np
import pytest

from tvm_deconv.compiler.records import Schedule
from tvm_deconv.tuning import calibration
from tvm_deconv.tuning.calibration import Calibration

NUMBER = 60


def candidates(seed=0):
    """Plans with random knobs of two algorithms, and their costs."""
    draw = np.random.default_rng(seed)
    for cost in np.sort(draw.uniform(1.0, 2.5, NUMBER)):
        knobs = {
            "rows": int(draw.integers(1, 9)),
            "lanes": int(draw.integers(1, 3)),
            "width": int(draw.integers(1, 65)),
        }
        name = ("direct_rows", "winograd")[int(draw.integers(2))]
        yield SimpleNamespace(algorithm=name, cost=float(cost), schedule=Schedule.of(name, knobs))


def solved(plans, measured):
    """Means and variances by the textbook: one covariance of all candidates, one system of equations."""

    def distance(one, other, names):
        knobs, others = dict(one.schedule.knobs), dict(other.schedule.knobs)
        return sum(abs(math.log2((knobs[name] + 1) / (others[name] + 1))) for name in names)

    def covariance(one, other):
        tile = math.exp(-distance(one, other, ("rows", "lanes")) / calibration._TILE_SCALE)
        block = math.exp(-distance(one, other, ("width",)) / calibration._BLOCK_SCALE)
        parts = calibration._ALGORITHM**2 + tile * (calibration._TILE**2 + calibration._BLOCKS**2 * block)
        return calibration._PROBLEM**2 + (parts if one.algorithm == other.algorithm else 0.0)

    all_of = np.array([[covariance(one, other) for other in plans] for one in plans])
    chosen = [*measured]
    prior = calibration._SLOPE * np.log([one.cost for one in plans])
    between = all_of[np.ix_(chosen, chosen)] + calibration._NOISE**2 * np.eye(len(chosen))
    weights = np.linalg.solve(between, all_of[chosen]).T
    errors = np.log([*measured.values()]) - prior[chosen]
    return prior + weights @ errors, np.diag(all_of) - np.einsum("ij,ij->i", weights, all_of[:, chosen])


def test_measurements_one_by_one_say_what_all_say_at_once():
    plans = [*candidates()]
    times = {number: 1e-3 * math.exp(math.sin(number)) for number in (3, 17, 40, 8, 29)}
    step_by_step = Calibration(plans)
    for count in range(1, len(times) + 1):
        some = dict([*times.items()][:count])
        found = step_by_step.predict(some, {})
        mean, variance = solved(plans, some)
        np.testing.assert_allclose(found.mean, mean, atol=1e-8)
        ratio = found.deviation**2 / variance
        np.testing.assert_allclose(ratio, ratio[0], rtol=1e-6)  # the factor of all variances
    assert ratio[0] > 1.2  # such times surprise


def test_a_measurement_that_is_repeated_replaces_the_first():
    plans = [*candidates()]
    twice = Calibration(plans)
    twice.predict({3: 1e-3, 17: 2e-3}, {})
    found, once = twice.predict({3: 5e-3, 17: 2e-3}, {}), Calibration(plans).predict({3: 5e-3, 17: 2e-3}, {})
    np.testing.assert_array_equal(found.mean, once.mean)
    np.testing.assert_array_equal(found.deviation, once.deviation)


def test_what_is_assumed_is_forgotten_and_says_nothing_of_deviations():
    plans = [*candidates()]
    one = Calibration(plans)
    before = one.predict({3: 1e-3, 17: 1.1e-3}, {})
    assumed = one.predict({3: 1e-3, 17: 1.1e-3}, {40: 1.0})  # which would surprise
    assert assumed.deviation.max() <= before.deviation.max() * (1 + 1e-9)
    assert assumed.mean[40] > before.mean[40] + 1
    after = one.predict({3: 1e-3, 17: 1.1e-3}, {})
    np.testing.assert_array_equal(after.mean, before.mean)


@pytest.mark.parametrize("seed", range(3))
def test_gains_are_those_of_random_times(seed):
    draw = np.random.default_rng(seed)
    prediction = calibration.Prediction(draw.normal(0.0, 0.2, 20), draw.uniform(0.01, 0.4, 20))
    times = draw.normal(prediction.mean, prediction.deviation, (200_000, 20))
    expected = np.maximum(-0.1 - times, 0.0).mean(axis=0)
    np.testing.assert_allclose(prediction.gains(math.exp(-0.1)), expected, atol=1.5e-3)


def test_a_measurement_that_was_disturbed_does_not_promise_much_of_all_others():
    """One that is ten times as long as expected makes no search go on for dozens of trials."""
    plans = [*candidates()]
    usual = {number: 1e-3 * plans[number].cost for number in (3, 17, 40, 8, 29, 11)}
    variances = [
        (Calibration(plans).predict({**usual, 35: factor * 1e-3 * plans[35].cost}, {}).deviation ** 2)[50]
        for factor in (1.0, 10.0)
    ]
    assert 1.2 < variances[1] / variances[0] < 2.5
