"""Vectors over output channels that multiply words: for channels that are last, of a low-precision type."""

from tvm_deconv.compute.indexing import CHANNELS
from tvm_deconv.schedules.x86.algorithms.direct_definition import direct_algorithm
from tvm_deconv.schedules.x86.algorithms.predicates import (
    fills_vectors_with_channels_of_words,
    multiplies_direct_words,
)
from tvm_deconv.schedules.x86.dot import CAVEAT, words_of

ALGORITHM = direct_algorithm(
    "dot_channels",
    CHANNELS,
    supports=multiplies_direct_words,
    is_default_for=fills_vectors_with_channels_of_words,
    words=words_of,
    caveat=CAVEAT,
)
