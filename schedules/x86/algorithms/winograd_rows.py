"""Winograd's transforms along the axes outside of a row: for few output channels, with vectors over positions."""

from tvm_deconv.compute.indexing import ROWS
from tvm_deconv.schedules.x86.algorithms.direct_definition import direct_algorithm
from tvm_deconv.schedules.x86.algorithms.predicates import has_rows_to_transform, saves_rows

ALGORITHM = direct_algorithm(
    "winograd_rows",
    ROWS,
    supports=has_rows_to_transform,
    is_default_for=saves_rows,
    winograd=True,
    error_growth=4.0,
    caveat="an infinity or NaN spreads to the outputs of its tile",
)
