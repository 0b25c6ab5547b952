"""Winograd's transforms around matrix products by AMX, whose factors are cut into parts after they are transformed."""

from tvm_deconv.schedules.x86.algorithms.matrix_definition import matrix_algorithm
from tvm_deconv.schedules.x86.algorithms.predicates import multiplies_transformed_matrices, saves_matrix_products
from tvm_deconv.schedules.x86.amx import CAVEAT, matrix_words

ALGORITHM = matrix_algorithm(
    "amx_winograd",
    supports=multiplies_transformed_matrices,
    is_default_for=saves_matrix_products,
    winograd=True,
    words=matrix_words,
    error_growth=4.0,
    caveat=f"an infinity or NaN spreads to the outputs of its tile; {CAVEAT}",
)
