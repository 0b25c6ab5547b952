"""What the plans of all definitions have in common: a tile, knobs, and how these are read back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Generic, TypeVar

from tvm_deconv.compute.col2im import ColumnTile
from tvm_deconv.compute.direct_layout import Tile
from tvm_deconv.compute.matrix_layout import MatrixTile

_AnyTile = TypeVar("_AnyTile", Tile, MatrixTile, ColumnTile)
_AnyPlan = TypeVar("_AnyPlan", bound="TilePlan[Any]")


@dataclass(frozen=True, slots=True)
class TilePlan(Generic[_AnyTile]):
    """The knobs of a schedule with a `tile`.

    If `share_data`, the channel tiles of a block are tasks of their own and share its packed data. If `halves`, vectors
    are half as wide as the target's.
    """

    #: The class of tiles, which a definition sets.
    tile_type: ClassVar[type[Any]]

    tile: _AnyTile
    share_data: bool
    halves: bool = False

    @property
    def knobs(self) -> dict[str, int]:
        """The plan as plain integers, as in manifests and logs, without those that have their default values."""
        parts = ((part, getattr(self.tile, part.name)) for part in fields(self.tile))
        knobs = {part.name: value for part, value in parts if value != part.default}
        return {**knobs, "share_data": int(self.share_data), **({"halves": 1} if self.halves else {})}

    @classmethod
    def from_knobs(cls: type[_AnyPlan], knobs: Mapping[str, int]) -> _AnyPlan:
        """Return the plan with these knobs; raise KeyError or TypeError if they are not those of such a plan."""
        numbers = dict(knobs)
        share_data, halves = bool(numbers.pop("share_data")), bool(numbers.pop("halves", 0))
        return cls(cls.tile_type(**numbers), share_data, halves)

    @classmethod
    def of_numbers(cls: type[_AnyPlan], share_data: int, halves: int, *tile: int) -> _AnyPlan:
        """Return the plan of a row of a ranking."""
        return cls(cls.tile_type(*tile), bool(share_data), bool(halves))
