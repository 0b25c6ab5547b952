"""Vectors over output channels: for channels that are last, or for very few positions."""

from tvm_deconv.compute.indexing import CHANNELS
from tvm_deconv.schedules.x86.algorithms.direct_definition import direct_algorithm
from tvm_deconv.schedules.x86.algorithms.predicates import always, fills_vectors_with_channels

ALGORITHM = direct_algorithm("direct_channels", CHANNELS, supports=always, is_default_for=fills_vectors_with_channels)
