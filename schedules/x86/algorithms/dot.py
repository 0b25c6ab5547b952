"""Matrix products of words: an instruction multiplies several neighbouring input channels of a low-precision type."""

from tvm_deconv.schedules.x86.algorithms.matrix_definition import matrix_algorithm
from tvm_deconv.schedules.x86.algorithms.predicates import fills_words, multiplies_words
from tvm_deconv.schedules.x86.dot import CAVEAT, words_of

ALGORITHM = matrix_algorithm(
    "dot",
    supports=multiplies_words,
    is_default_for=fills_words,
    words=words_of,
    caveat=CAVEAT,
)
