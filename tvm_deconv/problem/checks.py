"""Checks of values that callers give: each raises ProblemError; most return the value in its plain form."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import numpy as np

from tvm_deconv.errors import ProblemError

INT64_MAX = 2**63 - 1
_TEXT = (str, bytes)


def one_of(attribute: str, value: object, allowed: Iterable[str]) -> str:
    """Return `value` if it is one of the `allowed` words, else raise ProblemError."""
    allowed = tuple(allowed)
    if not isinstance(value, str) or value not in allowed:
        raise ProblemError(attribute, value, f"must be one of {', '.join(allowed)}")
    return value


def several(attribute: str, value: object, rule: str) -> tuple[Any, ...]:
    """Return the elements of `value`; raise ProblemError with this `rule` if it has none, or is text."""
    if isinstance(value, _TEXT) or not isinstance(value, Iterable):
        raise ProblemError(attribute, value, rule)
    return tuple(value)


def checked_path(attribute: str, value: object) -> Path:
    """Return `value` as a path, else raise ProblemError."""
    try:
        return Path(value)  # type: ignore[arg-type]
    except TypeError:
        raise ProblemError(attribute, value, "must be a path") from None


def check_callback(attribute: str, value: object) -> None:
    """Raise ProblemError unless `value` is a function, or None."""
    if value is not None and not callable(value):
        raise ProblemError(attribute, value, "must be a function, or None")


def integer(attribute: str, value: object, minimum: int) -> int:
    """Return `value` as a Python int of at least `minimum`, else raise ProblemError; floats and bools are refused."""
    if isinstance(value, (bool, np.bool_)):
        raise ProblemError(attribute, value, "must be an integer, not a bool")
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise ProblemError(attribute, value, "must be an integer") from None
    if number < minimum:
        raise ProblemError(attribute, number, f"must be at least {minimum}")
    if number > INT64_MAX:
        raise ProblemError(attribute, number, "must fit in 64 bits")
    return number


def integers(attribute: str, value: object, minimum: int, length: int | None = None) -> tuple[int, ...]:
    """Return `value` as a tuple of `length` ints, each at least `minimum`, else raise ProblemError."""
    # A set or a mapping has integers, but no order of axes.
    if isinstance(value, (*_TEXT, Set, Mapping)) or not isinstance(value, Iterable):
        raise ProblemError(attribute, value, "must be a sequence of integers")
    try:
        items = tuple(integer(attribute, item, minimum) for item in value)
    except ProblemError as error:
        raise ProblemError(attribute, value, f"every element {error.rule}") from None
    except TypeError:
        raise ProblemError(attribute, value, "must be a sequence of integers") from None
    if length is not None and len(items) != length:
        raise ProblemError(attribute, items, f"must have one element per spatial axis, {length} here")
    return items


def broadcast(attribute: str, value: int | Sequence[int], rank: int, minimum: int) -> tuple[int, ...]:
    """Return one int per axis; `value` may also be one int for all axes, bare or alone in a sequence."""
    if not isinstance(value, Iterable):
        return (integer(attribute, value, minimum),) * rank
    items = integers(attribute, value, minimum)
    return items * rank if len(items) == 1 else integers(attribute, items, minimum, rank)


def real(attribute: str, value: object) -> float:
    """Return `value` as a float, else raise ProblemError; -0.0 becomes 0.0, so that it has one printed form."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise ProblemError(attribute, value, "must be a real number")
    try:
        return float(value) + 0.0
    except OverflowError:
        raise ProblemError(attribute, value, "must fit in a float") from None
