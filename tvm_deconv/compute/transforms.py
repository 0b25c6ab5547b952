"""Sums with constant coefficients, for algorithms that save products, in tensor expressions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tvm import tirx
from tvm.ir import Expr

from tvm_deconv.compute.winograd import Matrix


def _coefficient(matrix: Matrix, column: int, row: Expr, dtype: str) -> Expr:
    """Return ``matrix[row][column]`` of dtype `dtype`; it becomes a constant when the loop over `row` is unrolled."""
    value: Expr = tirx.const(float(matrix[-1][column]), dtype)
    for i in reversed(range(len(matrix) - 1)):
        value = tirx.Select(row == i, tirx.const(float(matrix[i][column]), dtype), value)
    return value


def transform(
    matrices: Sequence[Matrix | None],
    rows: Sequence[Expr],
    first: Sequence[Expr],
    element: Callable[..., Expr],
    dtype: str,
    steps: Sequence[int] = (1, 1, 1),
) -> Expr:
    """Apply one row of each matrix along its axis: return the sum of coefficients of dtype `dtype` times elements.

    Along each axis the columns of its matrix multiply elements from index `first` on, `steps` apart. An axis without a
    matrix contributes its `first` element. Sums are nested axis by axis; the compiler shares equal inner sums.
    """

    def along(axis: int, chosen: tuple[Expr, ...]) -> Expr:
        if axis == len(matrices):
            return element(*chosen)
        matrix = matrices[axis]
        if matrix is None:
            return along(axis + 1, (*chosen, first[axis]))
        total: Expr = tirx.const(0, dtype)
        for column in range(len(matrix[0])):
            inner = along(axis + 1, (*chosen, first[axis] + column * steps[axis]))
            total = total + _coefficient(matrix, column, rows[axis], dtype) * inner
        return total

    return along(0, ())
