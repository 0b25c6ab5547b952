"""The protocol of what candidates run on: this process, a server of a tracker, or a CUDA device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from tvm_deconv.problem import Array
from tvm_deconv.targets import Host


class Bound(NamedTuple):
    """A function with its arguments: `run` calls it, `sample(number, repeat)` times `repeat` means of `number` calls.

    `run` returns the seconds that the call took, if the machine's clock told. `waited` returns the share of the time of
    all samples in which the caller had no CPU; None if that is not known.
    """

    run: Callable[[], float | None]
    sample: Callable[[int, int], Sequence[float]]
    waited: Callable[[], float | None] = lambda: None


class Output(Protocol):
    """An array to write into, between guards; `argument` is what a function takes for it."""

    argument: Any

    def poison(self, byte: int) -> None:
        """Fill the array and its guards with this byte."""

    def intact(self, byte: int) -> bool:
        """Return whether the guards still hold the byte that filled them."""

    def read(self) -> Array:
        """Return the elements."""


class Machine(Protocol):
    """What candidates run on. Arrays that cross have dtypes of NumPy alone."""

    def host(self) -> Host:
        """Describe the machine."""

    def multiply_adds(self, dtype: str, kernel: Path | None = None) -> float:
        """Return the multiply-adds per second of `dtype`; CPUs run `kernel`, compiled by `bench.floors`."""

    def copy(self) -> float:
        """Measure the bytes per second, read plus written, of copies that no cache serves."""

    def attempt(self, seconds: float) -> AbstractContextManager[object]:
        """Return the context of calls that may crash, or take longer than `seconds`."""

    def put(self, array: Array) -> Any:
        """Return an array on the machine that equals `array`, for functions to take."""

    def output(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Output:
        """Allocate an array for results."""

    def bind(self, library: Path, name: str, arguments: Sequence[Any]) -> Bound:
        """Load a library that the launcher is linked into; return its function `name` with its arguments."""
