"""Winograd's transforms around matrix products: fewer products where phases have several taps."""

from tvm_deconv.schedules.x86.algorithms.matrix_definition import matrix_algorithm
from tvm_deconv.schedules.x86.algorithms.predicates import has_taps_to_transform, saves_products

ALGORITHM = matrix_algorithm(
    "winograd",
    supports=has_taps_to_transform,
    is_default_for=saves_products,
    winograd=True,
    error_growth=4.0,
    caveat="an infinity or NaN spreads to the outputs of its tile",
)
