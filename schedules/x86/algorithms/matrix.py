"""Matrix products of gathered rows: for many channels."""

from tvm_deconv.schedules.x86.algorithms.matrix_definition import matrix_algorithm
from tvm_deconv.schedules.x86.algorithms.predicates import fills_panels, finishes_in_short_chunks

ALGORITHM = matrix_algorithm("matrix", supports=finishes_in_short_chunks, is_default_for=fills_panels)
