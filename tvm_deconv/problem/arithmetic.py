"""Integer arithmetic for extents and counts."""

from __future__ import annotations


def ceil_div(dividend: int, divisor: int) -> int:
    """Return `dividend` divided by `divisor`, rounded up."""
    return -(-dividend // divisor)


def round_up(number: int, multiple: int) -> int:
    """Return the least multiple of `multiple` that is not below `number`."""
    return -(-number // multiple) * multiple
