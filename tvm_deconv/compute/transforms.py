"""Sums with constant coefficients, as an algorithm of few products asks for them, in tensor expressions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tvm import tirx
from tvm.ir import Expr

from tvm_deconv.compute.winograd import Matrix


def _coefficient(matrix: Matrix, column: int, row: Expr, dtype: str) -> Expr:
    """Return ``matrix[row][column]``, where `row` becomes a constant once its loop is unrolled."""
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
) -> Expr:
    """Return the sum over the columns of `matrices`, of one row of each, times ``element``; nested axis by axis.

    Where an axis has no matrix, its `first` element is taken.  Equal inner sums are found by the compiler.
    """

    def along(axis: int, chosen: tuple[Expr, ...]) -> Expr:
        if axis == len(matrices):
            return element(*chosen)
        matrix = matrices[axis]
        if matrix is None:
            return along(axis + 1, (*chosen, first[axis]))
        total: Expr = tirx.const(0, dtype)
        for column in range(len(matrix[0])):
            inner = along(axis + 1, (*chosen, first[axis] + column))
            total = total + _coefficient(matrix, column, rows[axis], dtype) * inner
        return total

    return along(0, ())
