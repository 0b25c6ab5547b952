"""What results may be off by, relative to the norm of the outputs."""

TOLERANCE = {"float32": 2e-6, "float64": 1e-13, "float16": 1e-3, "bfloat16": 8e-3, "int8": 0.0, "uint8": 0.0}
#: Winograd's transforms add to it.
WINOGRAD = 4.0


def tolerance(name, dtype):
    """What the algorithm of that name may be off, relative to the norm of the outputs."""
    return TOLERANCE[dtype] * (WINOGRAD if name.startswith("winograd") else 1)
