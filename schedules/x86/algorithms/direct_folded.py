"""Vectors over channels into which the phases of the last axis are folded: for few channels, if kernel is stride."""

from tvm_deconv.compute.indexing import CHANNELS
from tvm_deconv.schedules.x86.algorithms.direct_definition import direct_algorithm
from tvm_deconv.schedules.x86.algorithms.predicates import fills_vectors_with_folded_channels, folds_channels

ALGORITHM = direct_algorithm(
    "direct_folded", CHANNELS, supports=folds_channels, is_default_for=fills_vectors_with_folded_channels, folds=True
)
