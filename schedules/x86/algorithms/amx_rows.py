"""Vectors over positions, multiplied by AMX: for channels that are outside of positions."""

from functools import partial

from tvm_deconv.compute.indexing import ROWS
from tvm_deconv.schedules.x86.algorithms.direct_definition import direct_algorithm
from tvm_deconv.schedules.x86.algorithms.predicates import fills_row_matrices, multiplies_row_matrices
from tvm_deconv.schedules.x86.amx import CAVEAT, matrix_words

ALGORITHM = direct_algorithm(
    "amx_rows",
    ROWS,
    supports=multiplies_row_matrices,
    is_default_for=fills_row_matrices,
    words=partial(matrix_words, filter_left=True),
    caveat=CAVEAT,
)
