"""How long a model and its swapped parts take, with and without artifacts, inside the model as it runs."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from tvm_deconv.bench.turns import rounds

#: Rounds of a run of each: at least so many, then until so many seconds are over, and at most so many.
_LEAST, _SECONDS, _MOST = 6, 0.5, 51


class Swappable(Protocol):
    """Modules that artifacts compute unless they are switched off."""

    parts: tuple[nn.Module, ...]
    switched_off: bool


@dataclass(frozen=True, slots=True)
class Times:
    """The seconds of one thing in each round: by PyTorch alone, and with artifacts."""

    torch: list[float]
    swapped: list[float]

    @property
    def gain(self) -> float:
        """The median over the rounds of PyTorch's time by that with artifacts."""
        return statistics.median(a / b if b else 1.0 for a, b in zip(self.torch, self.swapped, strict=True))


def times(run: Callable[[], object], pieces: Sequence[Swappable], *, inside: bool = True) -> tuple[Times, list[Times]]:
    """Return the times of `run` and, if `inside`, of each of the `pieces` in it, in interleaved rounds."""
    whole = Times([], [])
    timed = pieces if inside else ()
    parts = [Times([], []) for _ in timed]
    try:
        for number in rounds(_LEAST, _SECONDS, _MOST):
            for off in (False, True) if number % 2 else (True, False):
                for piece in pieces:
                    piece.switched_off = off
                seconds = _seconds(run, timed)
                if number:  # the first round warms up
                    for kept, spent in zip((whole, *parts), seconds, strict=True):
                        (kept.torch if off else kept.swapped).append(spent)
    finally:
        for piece in pieces:
            piece.switched_off = False
    return whole, parts


def _seconds(run: Callable[[], object], pieces: Sequence[Swappable]) -> list[float]:
    """Return the seconds of one run, and those spent in each of the `pieces`."""
    spent, inner = [0.0] * len(pieces), [0.0]
    with contextlib.ExitStack() as stack:
        for place, piece in enumerate(pieces):
            for part in piece.parts:
                stack.enter_context(_timed(part, place, spent, inner))
        start = _now()
        run()
        return [_now() - start, *spent]


@contextlib.contextmanager
def _timed(part: Any, place: int, spent: list[float], inner: list[float]) -> Iterator[None]:
    """Add the time that the forward of `part` takes to ``spent[place]``, without that of pieces inside it.

    `inner` has one element for each piece that is running: the time that pieces inside it have taken.
    """
    forward = part.forward

    def timed(*arguments: Any, **keywords: Any) -> Any:
        start = _now()
        inner.append(0.0)
        output = forward(*arguments, **keywords)
        seconds = _now() - start
        spent[place] += seconds - inner.pop()
        inner[-1] += seconds
        return output

    part.forward = timed
    try:
        yield
    finally:
        del part.forward


def _now() -> float:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()
