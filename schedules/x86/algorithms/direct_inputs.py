"""Vectors over input channels: for few output channels where channels are last."""

from tvm_deconv.compute.indexing import INPUTS
from tvm_deconv.schedules.x86.algorithms.direct_definition import direct_algorithm
from tvm_deconv.schedules.x86.algorithms.predicates import fills_vectors_with_inputs, stores_sums

ALGORITHM = direct_algorithm("direct_inputs", INPUTS, supports=stores_sums, is_default_for=fills_vectors_with_inputs)
