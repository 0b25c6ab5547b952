"""Winograd's transforms around products of pairs of integers: exact, and fewer where phases have several taps."""

from tvm_deconv.schedules.x86.algorithms.matrix_definition import matrix_algorithm
from tvm_deconv.schedules.x86.algorithms.predicates import saves_integer_products, transforms_integers
from tvm_deconv.schedules.x86.dot import words_of

ALGORITHM = matrix_algorithm(
    "dot_winograd",
    supports=transforms_integers,
    is_default_for=saves_integer_products,
    winograd=True,
    words=words_of,
)
