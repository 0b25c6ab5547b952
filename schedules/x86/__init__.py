"""Schedules for x86 with AVX2 or AVX-512.

`algorithms` holds a record for each algorithm. `tiles` and `matrix_tiles` list the plans of the two definitions with
their costs, `direct` and `matrix` schedule them, and the other modules change the scheduled functions.
"""
