"""Vectors over positions: computes every problem, and is best for few channels and depthwise layers."""

from tvm_deconv.compute.indexing import ROWS
from tvm_deconv.schedules.x86.algorithms.direct_definition import direct_algorithm
from tvm_deconv.schedules.x86.algorithms.predicates import always

ALGORITHM = direct_algorithm("direct_rows", ROWS, supports=always, is_default_for=always)
