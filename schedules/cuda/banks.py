"""Shared memory: the wavefronts that a warp's access takes, and the pitches of tiles for which they are fewest.

A wavefront reads or writes one word of 4 bytes in each of 32 banks. Accesses of 4 bytes go by whole warps, those of 8
and 16 bytes by half warps. Lanes that take the same word share it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

BANKS = 32
WAVEFRONT = 4 * BANKS  # bytes
#: One access of a warp: the first word of each lane, and how many it takes.
Access = tuple[Sequence[int], int]


def wavefronts(places: Sequence[int], words: int) -> int:
    """Return the wavefronts of one access."""
    return _of_apart(tuple([place - places[0] for place in places]), words)


@lru_cache(1 << 14)
def _of_apart(places: tuple[int, ...], words: int) -> int:
    """See `wavefronts`: where an access begins makes no difference."""
    return sum(max(Counter(word % BANKS for word in taken).values()) for taken in _groups(places, words))


def ideal(places: Sequence[int], words: int) -> int:
    """Return the wavefronts of one access if its words were spread over all banks."""
    return sum(-(-len(taken) // BANKS) for taken in _groups(places, words))


def _groups(places: Sequence[int], words: int) -> Iterable[set[int]]:
    lanes = len(places) if words == 1 else min(len(places), 16)
    for first in range(0, len(places), lanes):
        yield {place + word for place in places[first : first + lanes] for word in range(words)}


def best_pitch(least: int, step: int, accesses: Callable[[int], Iterable[Access]]) -> int:
    """Return the pitch from `least` on, a multiple of `step`, with the fewest wavefronts for its `accesses`."""
    first = -(-least // step) * step
    return min(range(first, first + BANKS, step), key=lambda pitch: sum(wavefronts(*one) for one in accesses(pitch)))
