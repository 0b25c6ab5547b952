"""Vectors over positions that multiply words: for few channels of a low-precision type."""

from tvm_deconv.compute.indexing import ROWS
from tvm_deconv.schedules.x86.algorithms.direct_definition import direct_algorithm
from tvm_deconv.schedules.x86.algorithms.predicates import fills_rows_of_words, multiplies_direct_words
from tvm_deconv.schedules.x86.dot import CAVEAT, words_of_rows

ALGORITHM = direct_algorithm(
    "dot_rows",
    ROWS,
    supports=multiplies_direct_words,
    is_default_for=fills_rows_of_words,
    words=words_of_rows,
    caveat=CAVEAT,
)
