"""Vectors over positions that multiply words: for few channels of a low-precision type."""

from tvm_deconv.compute.indexing import ROWS
from tvm_deconv.schedules.x86.algorithms.direct_definition import direct_algorithm
from tvm_deconv.schedules.x86.algorithms.predicates import fills_direct_words, multiplies_direct_words
from tvm_deconv.schedules.x86.dot import CAVEAT, direct_words

ALGORITHM = direct_algorithm(
    "dot_rows",
    ROWS,
    supports=multiplies_direct_words,
    is_default_for=fills_direct_words,
    words=direct_words,
    caveat=CAVEAT,
)
