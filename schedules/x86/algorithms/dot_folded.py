"""Vectors over folded channels that multiply words: `direct_folded` of a low-precision type."""

from tvm_deconv.compute.indexing import CHANNELS
from tvm_deconv.schedules.x86.algorithms.direct_definition import direct_algorithm
from tvm_deconv.schedules.x86.algorithms.predicates import (
    fills_vectors_with_folded_channels_of_words,
    folds_channels_of_words,
)
from tvm_deconv.schedules.x86.dot import CAVEAT, words_of

ALGORITHM = direct_algorithm(
    "dot_folded",
    CHANNELS,
    supports=folds_channels_of_words,
    is_default_for=fills_vectors_with_folded_channels_of_words,
    folds=True,
    words=words_of,
    caveat=CAVEAT,
)
