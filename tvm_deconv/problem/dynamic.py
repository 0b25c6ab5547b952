"""Dynamic extents: the batch and spatial extents that each call decides.

The word "any" stands for a dynamic extent. A list of *buckets* may stand for a spatial one: calls of every extent are
served, and schedules are chosen for the extents in the list. A problem holds a representative extent in its place.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tvm_deconv.errors import ProblemError
from tvm_deconv.problem.checks import integers

#: The word for an extent that every call decides.
ANY = "any"
#: What a problem with a dynamic batch holds in its place.
REPRESENTATIVE_BATCH = 1
#: The buckets of "any", by the number of spatial axes. Along two axes they are squares.
DEFAULT_BUCKETS = {1: (16, 128, 1024), 2: (8, 16, 32, 64)}
#: The most combinations of buckets that a problem may have.
MOST_VARIANTS = 16


class Extents(NamedTuple):
    """A batch and spatial extents, representative ones in the place of dynamic ones.

    `dynamic` holds 0 for the batch and 1 + axis for a spatial axis. `buckets` has one tuple per spatial axis, or is
    empty if no spatial extent is dynamic.
    """

    batch: Any
    spatial: Any
    dynamic: tuple[int, ...]
    buckets: tuple[tuple[int, ...], ...]


def read_extents(batch: object, spatial: object) -> Extents:
    """Replace each "any" and each list of buckets by a representative extent; check nothing else.

    Raises ProblemError for buckets that are no extents.
    """
    dynamic: list[int] = []
    if isinstance(batch, str) and batch == ANY:
        batch = REPRESENTATIVE_BATCH
        dynamic.append(0)
    if not isinstance(spatial, (list, tuple)) or not any(map(is_dynamic, spatial)):
        return Extents(batch, spatial, tuple(dynamic), ())
    buckets = tuple(buckets_of(extent) if is_dynamic(extent) else () for extent in spatial)
    extents = list(spatial)
    for axis, extent in enumerate(spatial):
        if is_dynamic(extent):
            dynamic.append(axis + 1)
            # With three axes there are no buckets; Problem refuses it after the other checks.
            extents[axis] = max(buckets[axis] or DEFAULT_BUCKETS.get(len(spatial), (1,)))
    return Extents(batch, tuple(extents), tuple(dynamic), buckets)


def is_dynamic(extent: object) -> bool:
    """Tell whether a call decides `extent`: the word "any", or a list of buckets."""
    return isinstance(extent, (list, tuple)) or (isinstance(extent, str) and extent == ANY)


def buckets_of(extent: object) -> tuple[int, ...]:
    """Return the buckets that a dynamic `extent` lists, rising; for "any" there are none. Raises ProblemError."""
    if isinstance(extent, str):
        return ()
    buckets = integers("data_spatial", extent, 1)
    if not buckets:
        raise ProblemError("data_spatial", extent, "must hold at least one extent, where it is a list of buckets")
    return tuple(sorted(set(buckets)))
