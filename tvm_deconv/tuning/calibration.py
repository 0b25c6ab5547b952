"""Predictions of the times of candidates: their costs by arithmetic, corrected by what was measured.

A cost is off by a factor, and less so where costs differ much than where they are near. Plans of one algorithm share a
part of the factor, those with the same register tile share more, and those whose blocks are alike too share most of the
rest. So the logarithm of a time is modelled as a Gaussian process: a multiple of the logarithm of the cost, and a sum
of four independent deviations, of the problem, the algorithm, the tile and the block. A few measurements of different
tiles then say which of all the others are worth a build, and how much another build may gain. They also say how well
arithmetic knows this problem: where they surprise, all deviations are larger.

The constants were set by the plans of `scripts/study_search.py`, about 500 of each of 8 layers: all but `_TILE` on a
Zen 5 server, and checked on a Zen 4 server, where a smaller `_TILE` found slower plans.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tvm_deconv.compiler.selection import Candidate
from tvm_deconv.problem import Array

#: Knobs of a block. All others belong to the register tile, or decide as much.
_BLOCK = frozenset(("images", "depth", "height", "width", "share_data"))
#: The time grows with this power of the cost, within a problem.
_SLOPE = 0.8
#: Standard deviations of the parts of the logarithm, and the distances at which tiles and blocks are alike no more.
_ALGORITHM, _TILE, _BLOCKS, _NOISE = 0.3, 0.2, 0.2, 0.03
_TILE_SCALE, _BLOCK_SCALE = 2.0, 2.0
_PROBLEM = 10.0  # seconds of a unit of cost: anything
#: Measurements that the deviations above are worth, where others say how large deviations are.
_TRUST = 4.0
#: A measurement says at most that deviations are this many times as large, squared: it may have been disturbed.
_MOST_SURPRISE = 4.0


@dataclass(frozen=True)
class Prediction:
    """Of each candidate: the mean and the standard deviation of the logarithm of its seconds."""

    mean: Array
    deviation: Array

    def gains(self, best: float) -> Array:
        """Return by how much each candidate is expected to lower the logarithm of `best` seconds."""
        ahead = (math.log(best) - self.mean) / self.deviation
        gains: Array = self.deviation * (ahead * _below(ahead) + np.exp(-(ahead**2) / 2) / math.sqrt(2 * math.pi))
        return np.maximum(gains, 0.0)


def _below(values: Array) -> Array:
    """Return the normal distribution function, to 3e-4."""
    below: Array = 0.5 * (1 + np.tanh(math.sqrt(2 / math.pi) * (values + 0.044715 * values**3)))
    return below


class Calibration:
    """The candidates of a problem by their numbers in a list, and what some measurements say about all of them.

    Measurements are added one by one, each for a time that grows with the product of candidates and measurements.
    """

    def __init__(self, candidates: Sequence[Candidate]) -> None:
        knobs = [dict(candidate.schedule.knobs) for candidate in candidates]
        names = sorted({name for of_plan in knobs for name in of_plan})
        self._algorithm = np.array([candidate.algorithm for candidate in candidates])
        self._tile = _logarithms(knobs, [name for name in names if name not in _BLOCK])
        self._block = _logarithms(knobs, [name for name in names if name in _BLOCK])
        self._cost = _SLOPE * np.log([candidate.cost for candidate in candidates])
        own = _PROBLEM**2 + _ALGORITHM**2 + _TILE**2 + _BLOCKS**2
        self._nothing = _Known((), self._cost, np.full(len(candidates), own), np.empty((0, len(candidates))), 0.0)
        self._known = self._nothing

    def predict(self, measured: Mapping[int, float], assumed: Mapping[int, float]) -> Prediction:
        """Return what the `measured` seconds of some candidates, and those `assumed` of others, say about all.

        What is assumed says nothing about how large deviations are.
        """
        if self._known.measured != tuple(measured.items())[: len(self._known.measured)]:
            self._known = self._nothing  # one was measured again
        for number, seconds in [*measured.items()][len(self._known.measured) :]:
            self._known = self._learned(self._known, number, seconds)
        known = self._known
        scale = known.scale
        for number, seconds in assumed.items():
            known = self._learned(known, number, seconds)
        return Prediction(known.mean, np.sqrt(np.maximum(scale * known.variance, _NOISE**4)))

    def _learned(self, known: _Known, number: int, seconds: float) -> _Known:
        """Return what is known with another measurement: one step of a Cholesky decomposition."""
        row = self._covariance(number) - known.rows[:, number] @ known.rows
        own = row[number] + _NOISE**2
        error = math.log(seconds) - known.mean[number]
        return _Known(
            (*known.measured, (number, seconds)),
            known.mean + error / own * row,
            known.variance - row**2 / own,
            np.vstack((known.rows, row / math.sqrt(own))),
            known.surprise + (min(error**2 / own, _MOST_SURPRISE) if known.measured else 0.0),
        )

    def _covariance(self, chosen: int) -> Array:
        """Return the covariance of every candidate with a chosen one."""
        same = self._algorithm == self._algorithm[chosen]
        tile = np.exp(-_distances(self._tile, chosen) / _TILE_SCALE)
        block = np.exp(-_distances(self._block, chosen) / _BLOCK_SCALE)
        shared: Array = _PROBLEM**2 + same * (_ALGORITHM**2 + tile * (_TILE**2 + _BLOCKS**2 * block))
        return shared


@dataclass(frozen=True)
class _Known:
    """What some measurements say: means and variances of all candidates, and the rows of a Cholesky decomposition.

    `surprise` is the sum of the squares of how far each measurement but the first was from what those before it said,
    in deviations, none more than `_MOST_SURPRISE`.
    """

    measured: tuple[tuple[int, float], ...]
    mean: Array
    variance: Array
    rows: Array
    surprise: float

    @property
    def scale(self) -> float:
        """The factor of all variances, as the measurements have it."""
        return (_TRUST + self.surprise) / (_TRUST + max(len(self.measured) - 1, 0))


def _logarithms(knobs: Sequence[Mapping[str, int]], names: Sequence[str]) -> Array:
    """Return the logarithms of some knobs of plans, a row for each knob; one that a plan leaves out is 0."""
    values = [[of_plan.get(name, 0) for of_plan in knobs] for name in names]
    return np.log2(np.array(values, np.float64).reshape(len(names), len(knobs)) + 1)


def _distances(values: Array, chosen: int) -> Array:
    """Return the distance of every candidate from a chosen one: factors of two, summed over knobs."""
    distances: Array = np.abs(values - values[:, chosen, None]).sum(axis=0)
    return distances
