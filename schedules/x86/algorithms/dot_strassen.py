"""Strassen's algorithm around products of pairs of integers: exact, and an eighth fewer where phases have one tap."""

from tvm_deconv.schedules.x86.algorithms.matrix_definition import matrix_algorithm
from tvm_deconv.schedules.x86.algorithms.predicates import fills_halves_of_integers, sums_integers
from tvm_deconv.schedules.x86.dot import words_of

ALGORITHM = matrix_algorithm(
    "dot_strassen",
    supports=sums_integers,
    is_default_for=fills_halves_of_integers,
    strassen=True,
    words=words_of,
)
