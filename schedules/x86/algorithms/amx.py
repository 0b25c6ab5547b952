"""Matrix products by AMX: an instruction multiplies two small matrices of words of a low-precision type."""

from tvm_deconv.schedules.x86.algorithms.matrix_definition import matrix_algorithm
from tvm_deconv.schedules.x86.algorithms.predicates import fills_matrices, multiplies_matrices
from tvm_deconv.schedules.x86.amx import CAVEAT, matrix_words

ALGORITHM = matrix_algorithm(
    "amx",
    supports=multiplies_matrices,
    is_default_for=fills_matrices,
    words=matrix_words,
    caveat=CAVEAT,
)
