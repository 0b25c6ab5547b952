"""What the algorithms of the direct definition share: an algorithm is one of its forms."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from tvm.tirx import PrimFunc

from tvm_deconv.compute.direct import DirectDefinition, define_direct
from tvm_deconv.compute.direct_layout import Tile
from tvm_deconv.compute.folding import folded
from tvm_deconv.compute.indexing import CHANNELS, GROUPS, INPUTS, ROWS, has_whole_vectors
from tvm_deconv.compute.packing import pack_filter
from tvm_deconv.compute.phases import Geometry
from tvm_deconv.compute.storage import storage_dtype, stores_bytes, sum_dtype
from tvm_deconv.compute.words import WORD, Words, plans_in_words, tiled
from tvm_deconv.problem import Problem
from tvm_deconv.schedules.contract import Algorithm, Kernel
from tvm_deconv.schedules.x86 import (
    register_channels,
    register_epilogue,
    register_inputs,
    register_parts,
    register_rows,
    tiles,
)
from tvm_deconv.schedules.x86.amx import lower_matrices
from tvm_deconv.schedules.x86.calls import for_all_calls
from tvm_deconv.schedules.x86.conversions import rounds_rows, row_conversions
from tvm_deconv.schedules.x86.direct import schedule_direct
from tvm_deconv.schedules.x86.dot import BFLOAT16_PAIRS, WordsOf, dot_functions, rounding_function, word_cost
from tvm_deconv.schedules.x86.interleave import MAX_STREAMS
from tvm_deconv.schedules.x86.lowering import lower
from tvm_deconv.schedules.x86.rounding import byte_joining, exact_rounding, row_joining
from tvm_deconv.schedules.x86.row_ends import cut_last_rows, split_row_ends, splits_rows
from tvm_deconv.schedules.x86.row_prefetching import fetch_ahead
from tvm_deconv.schedules.x86.stores import outgrows_caches
from tvm_deconv.schedules.x86.variants import unfolded_output
from tvm_deconv.schedules.x86.vectors import accumulator_lanes, with_half_vectors
from tvm_deconv.schedules.x86.word_loads import load_words
from tvm_deconv.targets import CpuTarget


def direct_algorithm(
    name: str,
    form: str,
    supports: Callable[[Problem, CpuTarget], bool],
    is_default_for: Callable[[Problem, CpuTarget], bool],
    *,
    winograd: bool = False,
    folds: bool = False,
    words: WordsOf | None = None,
    error_growth: float = 1.0,
    caveat: str = "",
) -> Algorithm[CpuTarget, tiles.Plan]:
    """Return the record of a form of the direct definition, with or without transforms along the outer axes.

    With `words`, factors are multiplied in the words that it returns. If it `folds`, it computes the folded problem.
    """
    variety = _Form(name, form, winograd, folds, words)
    return Algorithm(
        name=name,
        supports=supports,
        is_default_for=is_default_for,
        candidates=variety.candidates,
        read=variety.read,
        tasks=variety.tasks,
        build=variety.build,
        error_growth=error_growth,
        caveat=caveat,
    )


@dataclass(frozen=True)
class _Form:
    """The functions of a record."""

    name: str
    form: str
    winograd: bool
    folds: bool
    words: WordsOf | None

    def computed(self, problem: Problem) -> Problem:
        """Return the problem to compute, `problem` or the folded one."""
        other = folded(problem) if self.folds else None
        return other or problem

    def candidates(self, problem: Problem, target: CpuTarget) -> Sequence[tuple[float, tiles.Plan]]:
        problem = self.computed(problem)
        words = self.words(problem, target) if self.words else None
        cost = word_cost(words, target)
        return plans_in_words(problem, words, lambda products: self._candidates(products, target, words), cost)

    def _candidates(
        self, problem: Problem, target: CpuTarget, words: Words | None
    ) -> Sequence[tuple[float, tiles.Plan]]:
        extents = {
            ROWS: Geometry.of(problem).axes[2].positions,
            CHANNELS: problem.out_channels,
            GROUPS: problem.groups,
            INPUTS: problem.in_channels,
        }
        of_lanes = partial(tiles.candidates, problem, self.form, self.winograd)
        extent, added_up = extents[self.form], self.form == INPUTS
        options = with_half_vectors(problem, target, extent, words, of_lanes, added_up=added_up)
        return for_all_calls(problem, options, self.form, self._row_unit(problem, target))

    def _narrows(self, problem: Problem) -> bool:
        """Tell whether outputs of a row are narrowed as they are interleaved: bytes, and pairs of 16 bits."""
        stride = Geometry.of(problem).axes[2].stride
        rows = self.form == ROWS and problem.data_format == "NCX" and stride <= MAX_STREAMS
        pairs = problem.output_dtype in ("float16", "bfloat16") and stride % 2 == 0
        return rows and (pairs or stores_bytes(problem))

    def _pairs(self, problem: Problem, target: CpuTarget, tile: Tile, lanes: int) -> int:
        """Return `lanes` where two vectors, of groups or input channels, have halves of words of bfloat16, else 0."""
        if self.form == INPUTS:
            return lanes if register_inputs.reads_pairs(problem, target, tile, lanes) else 0
        geometry = Geometry.of(problem, bool(tile.uncropped))
        whole = (tile.part or tile.channels) % (2 * lanes) == 0
        rounds = register_channels.rounds_pairs(problem, geometry, self.form, target, lanes)
        return lanes if whole and rounds else 0

    def _row_unit(self, problem: Problem, target: CpuTarget) -> int:
        return accumulator_lanes(problem, target) if self.form == ROWS else 1

    def read(self, knobs: Mapping[str, int]) -> tiles.Plan:
        plan = tiles.Plan.from_knobs(knobs)
        if (max(plan.tile.outputs) > 1) != self.winograd:
            rule = "one must be more than 1" if self.winograd else "must all be 1"
            raise ValueError(f"outputs={plan.tile.outputs}: {rule}")
        return plan

    def tasks(self, problem: Problem, plan: tiles.Plan) -> int:
        return plan.tasks(self.computed(problem), self.form)

    def build(self, unfolded: Problem, target: CpuTarget, plan: tiles.Plan) -> Kernel:
        problem = self.computed(unfolded)
        lanes = accumulator_lanes(problem, target) // (1 + plan.halves)
        words = self.words(problem, target) if self.words else None
        narrows, pairs = self._narrows(problem), self._pairs(problem, target, plan.tile, lanes)
        definition = define_direct(
            problem, self.form, plan.tile, lanes, words, narrows=narrows, pairs=pairs, unfolded=unfolded
        )
        joins = narrows and not stores_bytes(problem)
        joining_source, joining = "", ""
        if joins or (pairs and self.form == GROUPS):
            joining_source, joining = row_joining(problem, target, lanes, flushed=words is not None)
        # Past the caches rows are copied at once; a position's channels are stored as they are made at any size.
        streams = outgrows_caches(problem)
        whole = self.form != INPUTS and has_whole_vectors(problem, self.form, plan.tile, lanes)
        whole = whole and not (self.form == ROWS and (streams or (rounds_rows(problem) and not narrows)))
        scheduled = schedule_direct(definition, plan, target, problem, whole, words, joining).mod["main"]
        scheduled = cut_last_rows(scheduled)
        fetching = ""
        if self.form != GROUPS and words is None:  # neither gains
            depth, height, width = definition.layout.packed
            scheduled, fetching = fetch_ahead(scheduled, problem, depth * height, width)
        # Words of whole rows LLVM makes as fast.
        whole_rows = plan.tile.width >= Geometry.of(problem).axes[2].positions
        if splits_rows(problem, target) and (words is None or not whole_rows):
            scheduled = split_row_ends(scheduled)
        scheduled = load_words(scheduled, words, lanes) if words or pairs else scheduled
        finish = _Finish(
            problem=problem,
            target=target,
            words=words,
            definition=definition,
            scheduled=scheduled,
            joining=joining,
            joining_source=joining_source,
            fetching=fetching,
            streams=streams,
            whole=whole,
        )
        deconv = finish.deconv()
        deconv = lower_matrices(deconv, words) if tiled(words) else deconv
        return Kernel(
            problem=unfolded,
            deconv=deconv if problem is unfolded else unfolded_output(deconv, unfolded.out_channels),
            pack=pack_filter(problem, definition.sections, definition.packed_elements, words, unfolded=unfolded),
            algorithm=self.name,
            knobs=plan.knobs,
            packed_elements=definition.packed_elements,
            packed_dtype=WORD if words else sum_dtype(problem),
        )


@dataclass(frozen=True)
class _Finish:
    """The last steps of a kernel from its `scheduled` definition: results finished in registers, or from memory.

    `joining`, if not empty, is the function of `rounding.row_joining`, and `joining_source` its LLVM IR. `fetching` is
    that of prefetches, if there are any. The output `streams` past the caches, or is `whole` vectors that are stored as
    they are.
    """

    problem: Problem
    target: CpuTarget
    words: Words | None
    definition: DirectDefinition
    scheduled: PrimFunc
    joining: str
    joining_source: str
    fetching: str
    streams: bool
    whole: bool

    def deconv(self) -> PrimFunc:
        """Return the function of the kernel."""
        problem, definition, words = self.problem, self.definition, self.words
        form, tile, lanes = definition.layout.form, definition.layout.tile, definition.layout.lanes
        geometry = Geometry.of(problem, bool(tile.uncropped))
        if tiled(words):
            return self.from_memory()
        source, rounding = self.rounding
        products = self.fetching + (self.products or source)
        if form == INPUTS:
            finished = register_inputs.finish_inputs(self.scheduled, problem, definition, rounding)
            return lower(finished, definition.end, self.target, streams=False, products=products)
        if register_channels.supports(problem, geometry, form):
            source, joinings = ("", {2: self.joining}) if self.joining else byte_joining(problem, lanes)
            finished = register_channels.finish_channels(self.scheduled, problem, definition, rounding, joinings)
            return lower(finished, definition.end, self.target, streams=False, products=products + source)
        if form == ROWS and register_rows.supports_tile(problem, geometry, tile, lanes):
            return self.whole_rows(products, rounding)
        if form == ROWS and register_parts.supports_tile(problem, geometry, tile, self.target, lanes):
            finished = register_parts.finish_rows(self.scheduled, problem, definition, rounding, self.joining)
            stores = register_parts.store_functions(storage_dtype(problem.output_dtype), self.stored_lanes)
            return lower(finished, definition.end, self.target, streams=False, products=products + stores)
        return self.from_memory()

    @property
    def rounding(self) -> tuple[str, str]:
        """The LLVM IR of the function that rounds a vector of sums, if the products' have none, and its name."""
        layout = self.definition.layout
        if self.words == BFLOAT16_PAIRS:
            return "", rounding_function(layout.lanes)
        if layout.form == INPUTS and self.target.vector_bits >= 512:
            return "", ""  # few vectors are stored, and LLVM's code takes less time
        return exact_rounding(self.problem, self.target, layout.lanes)

    @property
    def products(self) -> str:
        """The LLVM IR of functions that multiply words or join vectors."""
        words, lanes = self.words, self.definition.layout.lanes
        return self.joining_source + (dot_functions(words, lanes) if words and not tiled(words) else "")

    @property
    def stored_lanes(self) -> int:
        """The outputs of a vector of a row that is stored, where a register tile holds all phases of the last axis."""
        stride = Geometry.of(self.problem).axes[2].stride
        together = math.gcd(stride, 4) if stores_bytes(self.problem) else 2 if self.joining else 1
        return self.definition.layout.lanes * together

    def from_memory(self) -> PrimFunc:
        """Return the function with results that pass through memory."""
        conversions = row_conversions(self.problem, self.target, stored=self.whole or self.definition.narrows)
        past, end = self.streams and not self.whole, self.definition.end
        products = self.fetching + self.products
        return lower(self.scheduled, end, self.target, streams=past, products=products, conversions=conversions)

    def whole_rows(self, products: str, rounding: str) -> PrimFunc:
        """Return the function with whole rows stored from registers.

        Where they stream, they are past the caches if the output begins at a vector's alignment.
        """
        stored = storage_dtype(self.problem.output_dtype)

        def lowered(*, streams: bool) -> PrimFunc:
            finished = register_rows.finish_rows(
                self.scheduled, self.problem, self.definition, rounding, self.joining, streams=streams
            )
            functions = register_epilogue.store_functions(stored, self.stored_lanes) if streams else ""
            end = self.definition.end
            return lower(finished, end, self.target, streams=streams, functions=functions, products=products)

        # As functions of their own: behind the choice between them, nothing can be imported.
        ordinary = lowered(streams=False)
        return register_epilogue.select_by_alignment(lowered(streams=True), ordinary) if self.streams else ordinary
