"""Predictions of the times of candidates: their costs by arithmetic, corrected by what was measured.

A cost is off by a factor. Plans of one algorithm share a part of it, those with the same register tile share more, and
those whose blocks are alike too share most of the rest. So the logarithm of the factor is modelled as a Gaussian
process: a sum of four independent deviations, of the problem, the algorithm, the tile and the block. A few measurements
of different tiles then say which of all the others are worth a build, and how much another build may gain.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from tvm_deconv.compiler.selection import Candidate
from tvm_deconv.problem import Array

#: Knobs of a block. All others belong to the register tile, or decide as much.
_BLOCK = frozenset(("images", "depth", "height", "width", "share_data"))
#: Standard deviations of the parts of the logarithm, and the distances at which tiles and blocks are alike no more.
_ALGORITHM, _TILE, _BLOCKS, _NOISE = 0.3, 0.25, 0.2, 0.05
_TILE_SCALE, _BLOCK_SCALE = 2.0, 4.0
_PROBLEM = 10.0  # seconds of a unit of cost: anything


class Prediction(NamedTuple):
    """Of each candidate: the mean and the standard deviation of the logarithm of its seconds."""

    mean: Array
    deviation: Array

    def gains(self, best: float) -> Array:
        """Return by how much each candidate is expected to lower the logarithm of `best` seconds."""
        ahead = (math.log(best) - self.mean) / self.deviation
        below = 0.5 * (1 + np.array([math.erf(value / math.sqrt(2)) for value in ahead]))
        gains: Array = self.deviation * (ahead * below + np.exp(-(ahead**2) / 2) / math.sqrt(2 * math.pi))
        return gains


class Calibration:
    """The candidates of a problem by their numbers in a list, ready to be compared."""

    def __init__(self, candidates: Sequence[Candidate]) -> None:
        knobs = [dict(candidate.schedule.knobs) for candidate in candidates]
        names = sorted({name for of_plan in knobs for name in of_plan})
        self._algorithm = np.array([candidate.algorithm for candidate in candidates])
        self._tile = _logarithms(knobs, [name for name in names if name not in _BLOCK])
        self._block = _logarithms(knobs, [name for name in names if name in _BLOCK])
        self._cost = np.log([candidate.cost for candidate in candidates])

    def predict(self, seconds: Mapping[int, float]) -> Prediction:
        """Return what the measured `seconds` of some candidates say about all."""
        chosen = np.fromiter(seconds, np.intp, len(seconds))
        errors = np.log(np.array([*seconds.values()], np.float64)) - self._cost[chosen]
        towards = self._covariance(chosen)
        solved = np.linalg.solve(towards[chosen] + _NOISE**2 * np.eye(len(chosen)), towards.T)
        own = _PROBLEM**2 + _ALGORITHM**2 + _TILE**2 + _BLOCKS**2
        variance = own - np.einsum("ij,ji->i", towards, solved)
        return Prediction(self._cost + errors @ solved, np.sqrt(np.maximum(variance, _NOISE**4)))

    def _covariance(self, chosen: Array) -> Array:
        """Return the covariance of every candidate with each of `chosen`."""
        same = self._algorithm[:, None] == self._algorithm[chosen]
        tile = np.exp(-_distances(self._tile, chosen) / _TILE_SCALE)
        block = np.exp(-_distances(self._block, chosen) / _BLOCK_SCALE)
        shared: Array = _PROBLEM**2 + same * (_ALGORITHM**2 + tile * (_TILE**2 + _BLOCKS**2 * block))
        return shared


def _logarithms(knobs: Sequence[Mapping[str, int]], names: Sequence[str]) -> Array:
    """Return the logarithms of some knobs of plans, a row for each knob; one that a plan leaves out is 0."""
    values = [[of_plan.get(name, 0) for of_plan in knobs] for name in names]
    return np.log2(np.array(values, np.float64).reshape(len(names), len(knobs)) + 1)


def _distances(values: Array, chosen: Array) -> Array:
    """Return the distances of every candidate from each of `chosen`: factors of two, summed over knobs."""
    total = np.zeros((values.shape[1], len(chosen)))
    for row in values:
        total += np.abs(row[:, None] - row[chosen])
    return total
