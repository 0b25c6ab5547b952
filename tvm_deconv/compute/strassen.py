"""One step of Strassen's algorithm: a matrix product from seven products of halves instead of eight.

The matrices satisfy ``y = outputs @ ((filter @ w) * (data @ x))``, as Winograd's do, but the elements of `x`, `w` and
`y` are quarters of matrices (V. Strassen, Gaussian Elimination is not Optimal, 1969):

- `x` are quarters of the data, by half of the rows, then half of the terms;
- `w` are quarters of the filter, by half of the terms, then half of the columns;
- `y` are quarters of the results, by half of the rows, then half of the columns.

Variants with fewer additions have larger rounding errors, and additions are a small part of the time of a step.
"""

from __future__ import annotations

from fractions import Fraction

from tvm_deconv.compute.winograd import Bilinear, Matrix


def _matrix(*rows: str) -> Matrix:
    """Return a matrix of 1, -1 and 0 from `rows` written as ``+``, ``-`` and ``0``."""
    return tuple(tuple(Fraction({"+": 1, "-": -1, "0": 0}[sign]) for sign in row) for row in rows)


STRASSEN = Bilinear(
    data=_matrix("+00+", "00++", "+000", "000+", "++00", "-0+0", "0+0-"),
    filter=_matrix("+00+", "+000", "0+0-", "-0+0", "000+", "++00", "00++"),
    outputs=_matrix("+00+-0+", "00+0+00", "0+0+000", "+-+00+0"),
)
