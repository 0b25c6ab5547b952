"""Vectors over words of input channels: for few output channels of a low-precision type where channels are last."""

from tvm_deconv.compute.indexing import INPUTS
from tvm_deconv.schedules.x86.algorithms.direct_definition import direct_algorithm
from tvm_deconv.schedules.x86.algorithms.predicates import fills_vectors_with_words, stores_sums_of_words
from tvm_deconv.schedules.x86.dot import CAVEAT, words_of

ALGORITHM = direct_algorithm(
    "dot_inputs",
    INPUTS,
    supports=stores_sums_of_words,
    is_default_for=fills_vectors_with_words,
    words=words_of,
    caveat=CAVEAT,
)
