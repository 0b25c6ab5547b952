"""One step of Strassen's algorithm around matrix products: seven products for eight where no tap can be saved."""

from tvm_deconv.schedules.x86.algorithms.matrix_definition import matrix_algorithm
from tvm_deconv.schedules.x86.algorithms.predicates import fills_halves, has_nothing_to_transform

ALGORITHM = matrix_algorithm(
    "strassen",
    supports=has_nothing_to_transform,
    is_default_for=fills_halves,
    strassen=True,
    error_growth=4.0,  # 1.4 is typical
    caveat="an infinity or NaN spreads to the outputs of its tile",
)
