"""The constants of the costs by arithmetic, in cycles, fitted to measurements.

`tiles` and `matrix_tiles` count the steps of a plan; the constants here say what a step costs. Sizes of caches come
from the target. The servers that were measured are called Zen 3 (family 25, model 1), Zen 4 (family 25, model 17), Zen
5 (family 26, model 2) and AMX (Intel's, family 6, with 2 MiB of second-level cache). Constants of 256 bits are fitted
to 3,400 plans of 100 layers on Zen 3, those of 512 bits to 3,551 plans on Zen 4, except for these:

- `slack`: of 512 bits, records of 89 problems on Zen 5; of 256 bits, with `far_share`, 38 plans of 27 layers on Zen 4.
- `memory_bytes` of two multiply-adds in a cycle: 3,000 plans of 158 problems on Zen 5.
- `filter_memory_bytes` of 256 bits and of two multiply-adds in a cycle, `memory_waiting` of 256 bits: 2,320 plans of 82
  layers on Zen 5 with filters prefetched. 12 bytes are as good there; 10 leave room to machines with slower memory.
- `load`, `slack` and `memory_waiting` of two multiply-adds in a cycle, where passes over a panel prefetch the next:
  2,208 plans of 76 layers in both layouts on Zen 5, and 160 defaults in turns with those before. Of the plans that were
  measured, that of least cost took 1.058 of the time of the fastest, and takes 1.049.
- All of a mesh: 880 plans of 90 problems on AMX; with filters prefetched, `memory_waiting`, `phased` and `load` by
  1,152 plans of 92 problems.
- `waiting` and `filter_bytes`: 285 plans of 32 layers in `N C *X` on Zen 4, to which records of Zen 5 agree; of 256
  bits `waiting` and `row_piece` by records of Zen 3 and Zen 4. Direct tiles take them over.
- `crowded`: 627 plans of 13 depthwise layers in `N C *X`; 515 in AVX2 neither gain nor lose. Of many taps, 21 defaults
  on Zen 5.
- `part_across`: 190 plans of 42 layers with rows of 9 to 56 positions on Zen 5. `place`: nine defaults in AVX2.
- `kept`, `phased`, `across`, `fetched`, `tile`, `position` and `groups_share`: 288 plans of 24 depthwise layers in
  `N *X C` with 256 bits, and 203 with 512.
- `line_again` and `burst`: 651 plans of 18 layers. `line_near` and `line_far`: 34 plans of 32 groups of 8 channels on
  Zen 5, both widths.
- `transposed_words` and `lanes_apart`: 10 layers of one to four output channels in `N *X C`, int8 and bfloat16, both
  widths, on a Zen 4.
- `lane_sum` and `unrolled`: 414 plans, both widths, of 21 layers with one to three output channels.
- AVX2's `ties`, `pack`, `finish`, `transposed`, `scattered`, `shuffles_sums`, `lane_sum`, `piece`, `sum`, `near`,
  `l2_share`, `overfull`, `groups_share`, `move`, `transpose`, `transform` and `reduction`: 3,150 plans of 450 layers in
  both layouts on Zen 3, since rows are prefetched and shuffled as they are. Of 914 problems 134 defaults change and
  take 0.97 of the time of those before; of 390 in other types 39, 0.94; of 120 that nothing was fitted to 22, 0.99.
  What lies beyond the second-level cache keeps its constants: with those that fit best, defaults had blocks larger than
  any that were measured, and were slower.
- `transpose`: shuffles of a network, one or two in a cycle. Of 50 defaults in `N C *X` that it changes on Zen 5, in all
  types and both widths, the mean takes 0.90 of the time of those before. What a network saves where channels are last
  (`tiles`): 21 defaults, 0.90; with `transposed` of two multiply-adds in a cycle 10 more, 0.96.
- `joined`: profiles of four layers in words of bfloat16 (11 to 23 cycles). Integers and AVX2 take it over.
- `requantized`: 44 quantized layers on AMX, both widths. `register_requantized`, `narrowed` and `matrix_requantized`:
  660 plans of 78 quantized layers in `N *X C` on Zen 5; AVX2's `narrowed` 60 plans of 17, with sums in float32.
- AVX2's `direct_slack`: 15 layers on Zen 5; records of three other CPUs agree.
- AVX2's `issue`: 7 layers on a Zen 3 whose cores are shared. Of 73 defaults that it changed of 278, 14 by another
  algorithm or instead of tiles of one vector take 0.91 of the time there.
- AVX2's `integer_issue`: 48 plans of 6 quantized layers on a Zen 3 whose cores are shared.
- `broadcast`, `filter` and `fetches_pairs` of 256 bits: 120 plans of 18 layers in `N *X C` with kernel = stride on
  Zen 3; 12 others confirm them.
- `part_far` and `part_memory`: 28 layers on Zen 5 in AVX-512, beyond 4 MB of output; then 13 defaults of random layers
  there that they change, in turns with those before. `piece_memory` of both widths: 17 such defaults.
- AVX2's `channel_task` and `part_element`: 1,200 plans of 230 layers, grouped or with few channels, on Zen 3. Of 1,196
  problems 29 defaults change and take 0.96 of the time of those before.
- AVX2's `rows_share` and `lone_line`: 490 plans of 49 layers on a Zen 3 whose cores are shared.
- `channel_finish`, `apart`, `spilled`, `register_task` and AVX2's `chosen`: times of a few layers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tvm_deconv.targets import CpuTarget

#: Bytes of an array that the last cache does not keep from call to call: beyond these costs count the rate of memory.
LAST_CACHE = 16 << 20


@dataclass(frozen=True, slots=True)
class Costs:
    """Cycles of steps, and shares of caches.

    The first part is of the direct definition:

    - `direct_slack`: the same as `slack`, of direct tiles.
    - `ties`: measured time of a register tile, relative to its cost by arithmetic with the factor that breaks ties.
    - `broadcast` and `filter`: what breaks ties of tiles whose vectors are channels, of each broadcast and each vector
      of the filter, in the time of a multiply-add. `fetches_pairs`: stores of such tiles wait for lines from memory,
      which come in pairs.
    - `channels`: the same of tiles whose vectors are channels and pass through memory, relative to all other tiles.
    - `pack`: to pack a vector of data. Element by element it takes as long as `lanes / gathered` vectors; `transposed`
      comes on top where vectors of channels become vectors of positions, and `transposed_words` is all that takes of
      words.
    - `finish`: to finish a vector of the output and copy it. Element by element it is `lanes / scattered` vectors.
      `shuffles_sums` tells that a network of shuffles saves as much for Winograd's rows as for others. Where it is
      false, packing these takes longer than is counted, and they would be chosen where they lose.
      `chosen` comes on top where its row is that of one of several runs of phases, since it is loaded behind a branch.
      `requantized` comes on top for sums of integers that are scaled and rounded, twice where a position ends in part
      of a vector of channels that passes through memory.
    - `register_finish`: to store a vector of the output straight from its accumulators. `aliased` comes on top where a
      register tile stores past the caches to several rows at the same offset in a page.
    - `place`: to find the row of a vector of the output, where a vector of positions is part of several rows.
    - `part_across`: further cycles to store a vector, times the square of the share of vectors that lie in two rows.
    - `part_far`: further cycles to store a part of a vector where the output outgrows a core's share of the caches.
      Where it outgrows the last one, what products leave of `part_memory` is added.
    - `channel_finish`: to store a vector of channels straight from its accumulators. `across` comes on top in groups,
      for the share of register tiles that lie in two rows, and `rounded` for bfloat16, or `paired` where two vectors
      are rounded together; `apart` where not all phases along a row are stored
      together, or other tiles of channels share its lines; `line_again` too where these lines have left the
      second-level cache before the next tile stores to them; `line_near` and `line_far` where groups share them and
      they have left the first-level cache, or the second. `burst`: to wait for the store of a vector past the
      caches, where a tile stores many. `spilled` is the factor for tiles whose accumulators and operands exceed the
      registers. `register_requantized`: to scale and round a vector of integers there, and `narrowed`: to narrow one to
      bytes that joins no other. Tiles of groups need `kept` for operands of other taps and positions, or `phased` where
      they have several phases; they are parts of a wider tile from `part_phases` on. `crowded` is the factor for tiles
      of rows that leave too few registers. Those of one input channel need some for the filters of all taps, and for
      `storing` parts of vectors; those of many taps, for vectors that LLVM loads early. `lane_sum`: to add up the lanes
      of an accumulator, half of it in half a vector, and `lanes_apart`: to store outputs of some of them. `unrolled`:
      the factor for tiles of inputs whose sums LLVM unrolls wholly.
    - `tile`: of groups, to start on a register tile; `fetched`: on top of each multiply-add, divided by the phases of a
      tile and the taps of a row. Both are in halves of a cycle.
    - `piece`: to start on another piece of the caller's memory, which begins with a cache miss, and `piece_memory` on
      top for data that come from memory. `position` is the same as `piece` where each position is one, since vectors
      are of groups. `task`: to start a task; `register_task`: one whose data stay in registers.
    - `sum`: to make a vector of sums of rows, and to add a vector of results into the output. `near` is the share of
      `pack` if sums are made of the data while they are near.
    - `l2_share`: the share of the second-level cache in which a block should stay, `groups_share` that of a block of
      groups. `overfull` is the relative cost of as much again beyond it.

    The second part is of the matrix definition:

    - `move`: to move a vector through the caches; `transpose`: to transpose it; `transform`: to transform it along one
      axis; `joined`: to join a vector of words, of several channels in `N C *X`.
    - `far`: further cycles to write a vector that does not stay in the second-level cache; `fetch`: to read it again.
    - `channel_task`: to start a tile of channels of a block. `part_element`: what storing an output of a position takes
      that has few of them, relative to a vector.
    - `panel`: twice the cycles in which a vector of a panel comes from the second-level cache.
    - `load`: to load an operand of a register tile, in the time of a multiply-add; `issue`: instructions in that time;
      `integer_issue`: those in the time of a product of integers, which is two of them, in a tile of four by two.
    - `reduction`: to clear and store the accumulators of a reduction, in steps of it.
    - `rows_share`: the share of the second-level cache for the rows and panels that are read again. `again`: the part
      of the time to fetch rows from beyond it that multiply-adds do not hide.
    - `memory_bytes`: bytes per cycle from memory and to it.
    - `filter_bytes`: bytes per cycle of a filter from beyond the second-level cache, which is read in order;
      `filter_memory_bytes`: the same of one that comes from memory, prefetched.
    - `slack`: independent accumulators beyond those that hide the latency of a multiply-add, for late operands;
      `integer_slack`: the same of integers.
    - `matrix_requantized`: to scale and round a vector of sums of integers, where channels are last.
    - `lone_line`: to wait for a line from memory to which a tile of channels stores outputs of Winograd's algorithm,
      and to none beside it.
    - `row_piece`: to start on another piece of the memory of an output channel, in `N C *X`.
    - `waiting`: the part of the shorter of two times, to fetch a filter and to multiply by it, that the longer does not
      hide; `memory_waiting`: the same of a filter that comes from memory.

    Both parts use `filter_bytes`, `filter_memory_bytes`, `waiting` and `memory_waiting`, as well as `far_bytes`, the
    bytes per cycle from beyond the second-level cache, and `far_share`, the share of it beyond which a filter or
    results are far.
    """

    ties: float = 0.87
    broadcast: float = 0.15
    filter: float = 0.5
    fetches_pairs: bool = False
    direct_slack: float = 0.0
    channels: float = 1.0
    pack: float = 4.0
    gathered: float = 4.0
    transposed: float = 6.0
    transposed_words: float = 5.0
    finish: float = 3.0
    chosen: float = 0.3
    requantized: float = 1.2
    scattered: float = 2.0
    shuffles_sums: bool = False
    register_finish: float = 1.0
    aliased: float = 0.0
    place: float = 0.0
    part_across: float = 6.0
    part_far: float = 1.5
    part_memory: float = 10.0
    channel_finish: float = 1.0
    apart: float = 2.0
    line_again: float = 18.0
    line_near: float = 4.0
    line_far: float = 16.0
    burst: float = 10.0
    spilled: float = 1.8
    unrolled: float = 1.1
    kept: int = 12
    phased: int = 18
    part_phases: int = 2
    across: float = 1.0
    rounded: float = 0.0
    paired: float = 0.0
    narrowed: float = 3.0
    register_requantized: float = 1.2
    fetched: float = 1.6
    tile: float = 5.0
    crowded: float = 1.3
    storing: int = 7
    lane_sum: float = 1.5
    lanes_apart: float = 1.5
    piece: float = 100.0
    piece_memory: float = 200.0
    position: float = 2.3
    task: float = 100.0
    register_task: float = 10.0
    sum: float = 1.5
    near: float = 0.75
    l2_share: float = 0.5
    groups_share: float = 0.5
    overfull: float = 0.2

    move: float = 2.0
    transpose: float = 3.0
    transform: float = 1.5
    joined: float = 15.0
    far: float = 10.0
    fetch: float = 0.0
    channel_task: float = 2000.0
    part_element: float = 1.0
    panel: float = 3.0
    load: float = 1.0
    issue: float = 3.0
    integer_issue: float = 3.1
    reduction: float = 3.0
    rows_share: float = 0.75
    again: float = 1.0
    memory_bytes: float = 8.0
    filter_bytes: float = 24.0
    filter_memory_bytes: float = 8.0
    row_piece: float = 0.0
    waiting: float = 0.15
    memory_waiting: float = 0.15
    slack: float = 2
    integer_slack: float = 2
    matrix_requantized: float = 12.0
    lone_line: float = 0.0

    far_bytes: float = 8.0
    far_share: float = 0.5


WIDE = Costs()
NARROW = replace(
    WIDE,
    ties=0.91,
    broadcast=0.23,
    filter=0.4,
    fetches_pairs=True,
    direct_slack=0.4,
    channels=1.3,
    pack=1.75,
    finish=3.5,
    requantized=6.0,
    transposed=4.0,
    transposed_words=3.0,
    scattered=1.4,
    shuffles_sums=True,
    register_finish=0.5,
    place=2.5,
    aliased=6.0,
    channel_finish=0.5,
    apart=0.2,
    line_again=0.0,
    burst=0.0,
    spilled=1.3,
    unrolled=1.3,
    lane_sum=2.15,
    kept=6,
    phased=6,
    part_phases=1,
    position=4.6,
    across=5.0,
    rounded=1.5,
    narrowed=1.5,
    paired=0.5,
    tile=10.0,
    piece=100.0,
    task=14.0,
    sum=1.1,
    near=1.9,
    l2_share=0.16,
    groups_share=0.4,
    overfull=0.04,
    move=2.45,
    transpose=2.2,
    transform=1.2,
    far=8.5,
    fetch=5.7,
    panel=3.3,
    issue=1.75,
    reduction=2.0,
    rows_share=0.65,
    again=0.59,
    memory_bytes=5.0,
    filter_bytes=13.8,
    filter_memory_bytes=10.0,
    row_piece=130.0,
    waiting=0.3,
    memory_waiting=0.5,
    slack=0.3,
    integer_slack=0,
    matrix_requantized=0.0,
    lone_line=40.0,
    channel_task=100.0,
    part_element=0.25,
    far_bytes=6.9,
    far_share=0.67,
)


#: A multiply-add takes half as long as where there is one in a cycle, bytes of memory take as long.
WIDE_TWICE = replace(
    WIDE,
    transposed=4.0,
    transpose=2.0,
    load=1.2,
    memory_bytes=4.0,
    filter_memory_bytes=10.0,
    memory_waiting=0.06,
    slack=3.0,
)
#: What is beyond the second-level cache comes slowly, and that cache is twice as large.
WIDE_MESH = replace(
    WIDE,
    part_far=12.0,
    phased=24,
    transpose=4.0,
    transform=2.0,
    panel=6.0,
    load=1.3,
    rows_share=1.5,
    again=2.0,
    memory_bytes=3.0,
    filter_bytes=8.0,
    filter_memory_bytes=3.0,
    memory_waiting=0.0,
)


def costs_of(target: CpuTarget) -> Costs:
    """Return the constants for a target: those of 512 bits with AVX-512's registers, whatever vectors a plan uses."""
    if target.vector_registers <= 16:
        return NARROW
    if target.mesh:
        return WIDE_MESH
    return WIDE if target.multiply_adds == 1 else WIDE_TWICE
