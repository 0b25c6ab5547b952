"""The constants of the costs by arithmetic, in cycles, fitted to measurements of one CPU for each width of vectors.

`tiles` and `matrix_tiles` count the steps of a plan; the constants here say what a step costs. Those of 256 bits are
fitted to 2,000 plans of 80 layers on a Zen 3 server (family 25, model 1), those of 512 bits to 3,551 plans on a Zen 4
server (family 25, model 17). Sizes of caches come from the target.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tvm_deconv.targets import CpuTarget


@dataclass(frozen=True, slots=True)
class Costs:
    """Cycles of steps, and shares of caches.

    The first part is of the direct definition:

    - `ties`: measured time of a register tile, relative to its cost by arithmetic with the factor that breaks ties.
    - `channels`: the same of tiles whose vectors are channels, relative to those whose vectors are positions.
    - `pack`: to pack a vector of data. Element by element it takes as long as `lanes / gathered` vectors; `transposed`
      comes on top where vectors of channels become vectors of positions.
    - `finish`: to finish a vector of the output and copy it. Element by element it is `lanes / scattered` vectors.
    - `register_finish`: to store a vector of the output straight from its accumulators. `aliased` comes on top where a
      register tile stores past the caches to several rows at the same offset in a page.
    - `piece`: to start on another piece of the caller's memory, which begins with a cache miss; `position`: the same
      where each position is a piece, of vectors of groups. `task`: to start a task.
    - `sum`: to make a vector of sums of rows, and to add a vector of results into the output. `near` is the share of
      `pack` if sums are made of the data while they are near.
    - `l2_share`: the share of the second-level cache in which a block should stay. `overfull` is the relative cost of
      as much again beyond it.

    The second part is of the matrix definition:

    - `move`: to move a vector through the caches; `transpose`: to transpose it; `transform`: to transform it along one
      axis.
    - `far`: further cycles to write a vector that does not stay in the second-level cache; `fetch`: to read it again.
    - `product`: measured time of the multiply-adds of a tile, relative to their cost by arithmetic.
    - `channel_task`: to start a tile of channels of a block.
    - `panel`: twice the cycles in which a vector of a panel comes from the second-level cache.
    - `reduction`: to clear and store the accumulators of a reduction, in steps of it.
    - `rows_share`: the share of the second-level cache for the rows and panels that are read again.

    Both parts use `far_bytes`, the bytes per cycle from beyond the second-level cache, and `far_share`, the share of it
    beyond which a filter or results are far.
    """

    ties: float = 0.87
    channels: float = 1.0
    pack: float = 4.0
    gathered: float = 4.0
    transposed: float = 6.0
    finish: float = 3.0
    scattered: float = 2.0
    register_finish: float = 1.0
    aliased: float = 0.0
    piece: float = 100.0
    position: float = 0.0
    task: float = 100.0
    sum: float = 1.5
    near: float = 0.75
    l2_share: float = 0.5
    overfull: float = 0.2

    move: float = 2.0
    transpose: float = 5.0
    transform: float = 1.5
    far: float = 10.0
    fetch: float = 0.0
    product: float = 1.0
    channel_task: float = 2000.0
    panel: float = 3.0
    reduction: float = 3.0
    rows_share: float = 0.75

    far_bytes: float = 8.0
    far_share: float = 0.5


WIDE = Costs()
NARROW = replace(
    WIDE,
    channels=1.3,
    pack=3.4,
    aliased=6.0,
    position=10.0,
    sum=0.9,
    task=30.0,
    l2_share=0.25,
    far_share=0.35,
    overfull=0.13,
    move=1.5,
    transpose=7.2,
    transform=2.8,
    far=13.0,
    fetch=4.4,
    panel=3.3,
    reduction=2.3,
    rows_share=1.1,
)


def costs_of(target: CpuTarget) -> Costs:
    """Return the constants for `target`: `WIDE` with the registers of AVX-512, whatever vectors are used, else `NARROW`."""
    return WIDE if target.vector_registers > 16 else NARROW
