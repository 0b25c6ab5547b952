"""The matrices of Winograd's minimal filtering F(m, T): m outputs of a filter of T taps from m + T - 1 products.

For a correlation ``y[i] = sum over t of x[i + t] * w[t]`` the matrices satisfy
``y = outputs @ ((filter @ w) * (data @ x))``. They are those of Toom and Cook with one point at infinity (S. Winograd,
Arithmetic Complexity of Computations, 1980), in exact fractions. The finite points are small numbers with small
denominators, which keeps rounding errors small.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, cached_property

Matrix = tuple[tuple[Fraction, ...], ...]

_POINTS = tuple(map(Fraction, ("0", "1", "-1", "2", "-1/2", "-2")))
#: Most products, one for each point and one for infinity. With more, errors grow past the tolerance.
MAX_PRODUCTS = len(_POINTS) + 1
#: Most products of integers: the first points multiply data and results by whole numbers, and few bits join them.
MAX_INTEGER_PRODUCTS = 4


@dataclass(frozen=True)
class Bilinear:
    """The matrices of an algorithm with p products.

    For F(m, T) the shape of `data` is [p, p], of `filter` [p, T], and of `outputs` [m, p].
    """

    data: Matrix
    filter: Matrix
    outputs: Matrix

    @property
    def divisor(self) -> int:
        """The least number that makes all coefficients of `filter` whole: it multiplies outputs then."""
        return math.lcm(*(coefficient.denominator for row in self.filter for coefficient in row))

    @cached_property
    def terms(self) -> float:
        """The mean number of data elements that are summed up for a product."""
        return sum(coefficient != 0 for row in self.data for coefficient in row) / len(self.data)


def _product(roots: tuple[Fraction, ...]) -> list[Fraction]:
    """Return the coefficients of the product of all ``x - root``, the constant first."""
    coefficients = [Fraction(1)]
    for root in roots:
        shifted = [Fraction(0), *coefficients]
        coefficients = [a - root * b for a, b in zip(shifted, [*coefficients, Fraction(0)], strict=True)]
    return coefficients


@cache
def winograd(outputs: int, taps: int) -> Bilinear:
    """Return F(`outputs`, `taps`); raise ValueError if it takes more than `MAX_PRODUCTS`."""
    products = outputs + taps - 1
    if products > MAX_PRODUCTS:
        raise ValueError(f"outputs={outputs}, taps={taps}: must together make at most {MAX_PRODUCTS} products")
    points = _POINTS[: products - 1]
    data, filter = [], []
    for i, point in enumerate(points):
        others = points[:i] + points[i + 1 :]
        coefficients = _product(others)
        value = sum((c * point**power for power, c in enumerate(coefficients)), Fraction(0))
        data.append((*coefficients, Fraction(0)))
        filter.append(tuple(point**t / value for t in range(taps)))
    data.append(tuple(_product(points)))
    filter.append((*(Fraction(0),) * (taps - 1), Fraction(1)))
    rows = tuple((*(point**i for point in points), Fraction(int(i == outputs - 1))) for i in range(outputs))
    return Bilinear(tuple(data), tuple(filter), rows)
