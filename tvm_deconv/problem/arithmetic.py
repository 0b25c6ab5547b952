"""Integer arithmetic on extents and counts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, overload

from numpy.typing import NDArray


@overload
def ceil_div(dividend: int, divisor: int) -> int: ...
@overload
def ceil_div(dividend: NDArray[Any], divisor: NDArray[Any] | int) -> NDArray[Any]: ...
@overload
def ceil_div(dividend: int, divisor: NDArray[Any]) -> NDArray[Any]: ...
def ceil_div(dividend: Any, divisor: Any) -> Any:
    """Return `dividend` divided by `divisor`, rounded up; of arrays, each element."""
    return -(-dividend // divisor)


@overload
def round_up(number: int, multiple: int) -> int: ...
@overload
def round_up(number: NDArray[Any], multiple: NDArray[Any]) -> NDArray[Any]: ...
def round_up(number: Any, multiple: Any) -> Any:
    """Return the least multiple of `multiple` that is not below `number`; of arrays, each element."""
    return -(-number // multiple) * multiple


def uncropped(
    data_spatial: Iterable[int], kernel: Iterable[int], strides: Iterable[int], dilations: Iterable[int]
) -> tuple[int, ...]:
    """Return the output extents before anything is cut off: ``s*(X-1) + (K-1)*d + 1`` per axis."""
    axes = zip(data_spatial, kernel, strides, dilations, strict=True)
    return tuple(s * (x - 1) + (k - 1) * d + 1 for x, k, s, d in axes)


def landing_pairs(positions: int, kernel: int, stride: int, dilation: int, pad: int, extent: int) -> int:
    """Return the number of pairs (data position x, kernel element k) whose product lands inside the output.

    The output has `extent` elements, so ``0 <= s*x + d*k - pad < extent``. Takes logarithmic time in the extents.
    """
    axis = (positions, kernel, stride, dilation)
    return _pairs_before(pad + extent, *axis) - _pairs_before(pad, *axis)


def _pairs_before(end: int, positions: int, kernel: int, stride: int, dilation: int) -> int:
    """Return the number of pairs (x, k) with ``s*x + d*k < end``."""
    reaching = min(max(-(-end // dilation), 0), kernel)  # the k with at least one such x
    full = min(max(-(-(end - stride * (positions - 1)) // dilation), 0), reaching)  # the k with all of them
    # The k between have (smallest + d*i) // s of them, counted from the last k; rounded up beforehand.
    smallest = end - dilation * (reaching - 1) + stride - 1
    return full * positions + _floor_sum(reaching - full, stride, dilation, smallest)


def _floor_sum(count: int, divisor: int, factor: int, offset: int) -> int:
    """Return the sum of ``(factor*i + offset) // divisor`` for i from 0 to count - 1, in logarithmic time."""
    total = 0
    while True:
        total += factor // divisor * (count * (count - 1) // 2) + offset // divisor * count
        # The rest counts lattice points under a line of slope below one: the same sum along the other axis.
        rows, rest = divmod(factor % divisor * count + offset % divisor, divisor)
        if rows == 0:
            return total
        count, divisor, factor, offset = rows, factor % divisor, divisor, rest
