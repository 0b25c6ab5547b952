"""Vectors over groups: for depthwise layers whose channels are last."""

from tvm_deconv.compute.indexing import GROUPS
from tvm_deconv.schedules.x86.algorithms.direct_definition import direct_algorithm
from tvm_deconv.schedules.x86.algorithms.predicates import always, fills_vectors_with_groups

ALGORITHM = direct_algorithm("direct_groups", GROUPS, supports=always, is_default_for=fills_vectors_with_groups)
