"""One step of Strassen's algorithm: the product of matrices cut in halves from seven products of halves, not eight.

``y = outputs @ ((filter @ w) * (data @ x))`` as for Winograd's F, but of matrices: `x` are the quarters of the data, by
(half of the rows, half of the terms), `w` those of the filter, by (half of the terms, half of the columns), and `y`
those of the results, by (half of the rows, half of the columns) (V. Strassen, Gaussian Elimination
is not Optimal, 1969).
Variants with fewer additions round worse, and additions are not what a step costs.
"""

from __future__ import annotations

from fractions import Fraction

from tvm_deconv.compute.winograd import Bilinear, Matrix


def _matrix(*rows: str) -> Matrix:
    """Return a matrix of 1, -1 and 0, written as ``+``, ``-`` and ``0``."""
    return tuple(tuple(Fraction({"+": 1, "-": -1, "0": 0}[sign]) for sign in row) for row in rows)


STRASSEN = Bilinear(
    data=_matrix("+00+", "00++", "+000", "000+", "++00", "-0+0", "0+0-"),
    filter=_matrix("+00+", "+000", "0+0-", "-0+0", "000+", "++00", "00++"),
    outputs=_matrix("+00+-0+", "00+0+00", "0+0+000", "+-+00+0"),
)
