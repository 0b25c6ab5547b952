"""What the algorithms of the direct definition share: an algorithm is one of its forms."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from tvm.tirx import PrimFunc

from tvm_deconv.compute.direct import define_direct
from tvm_deconv.compute.direct_layout import Tile
from tvm_deconv.compute.indexing import CHANNELS, GROUPS, INPUTS, ROWS, has_whole_vectors
from tvm_deconv.compute.packing import pack_filter
from tvm_deconv.compute.phases import Geometry
from tvm_deconv.compute.storage import storage_dtype, stores_bytes
from tvm_deconv.compute.words import WORD, Words, plans_in_words
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
from tvm_deconv.schedules.x86.dot import BFLOAT16_PAIRS, ROUNDING, WordsOf, dot_functions, word_cost
from tvm_deconv.schedules.x86.interleave import MAX_STREAMS
from tvm_deconv.schedules.x86.lowering import lower
from tvm_deconv.schedules.x86.prefetching import lower_prefetches
from tvm_deconv.schedules.x86.rounding import exact_rounding, row_joining
from tvm_deconv.schedules.x86.stores import outgrows_caches
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
    words: WordsOf | None = None,
    error_growth: float = 1.0,
    caveat: str = "",
) -> Algorithm[CpuTarget, tiles.Plan]:
    """Return the record of a form of the direct definition, with or without transforms along the outer axes.

    With `words`, factors are multiplied in the words that it returns.
    """
    variety = _Form(name, form, winograd, words)
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
    words: WordsOf | None

    def candidates(self, problem: Problem, target: CpuTarget) -> Sequence[tuple[float, tiles.Plan]]:
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
        options = with_half_vectors(problem, target, extents[self.form], words, of_lanes)
        return for_all_calls(problem, options, self.form, self._row_unit(problem, target))

    def _narrows(self, problem: Problem) -> bool:
        """Tell whether outputs of a row are narrowed as they are interleaved: bytes, and pairs of 16 bits."""
        stride = Geometry.of(problem).axes[2].stride
        rows = self.form == ROWS and problem.data_format == "NCX" and stride <= MAX_STREAMS
        pairs = problem.output_dtype in ("float16", "bfloat16") and stride % 2 == 0
        return rows and (pairs or stores_bytes(problem))

    def _pairs(self, problem: Problem, target: CpuTarget, tile: Tile, lanes: int) -> int:
        """Return `lanes` where two vectors of groups are rounded to one of bfloat16 by integers, else 0."""
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
        return plan.tasks(problem, self.form)

    def build(self, problem: Problem, target: CpuTarget, plan: tiles.Plan) -> Kernel:
        lanes = accumulator_lanes(problem, target) // (1 + plan.halves)
        words = self.words(problem, target) if self.words else None
        tiled = words is not None and words.tiled
        narrows = self._narrows(problem)
        joins = narrows and not stores_bytes(problem)
        pairs = self._pairs(problem, target, plan.tile, lanes)
        definition = define_direct(problem, self.form, plan.tile, lanes, words, narrows=narrows, pairs=pairs)
        # Past the caches rows are copied at once; a position's channels are stored as they are made at any size.
        streams = outgrows_caches(problem)
        whole = self.form != INPUTS and has_whole_vectors(problem, self.form, plan.tile, lanes)
        whole = whole and not (self.form == ROWS and (streams or (rounds_rows(problem) and not narrows)))
        joined, joining = row_joining(problem, target, lanes, flushed=words is not None) if joins or pairs else ("", "")
        scheduled = schedule_direct(definition, plan, problem, whole, words, joining).mod["main"]
        scheduled = load_words(scheduled) if words or pairs else scheduled
        rounded, rounding = ("", ROUNDING) if words == BFLOAT16_PAIRS else exact_rounding(problem, target, lanes)
        called = joined + (dot_functions(words, lanes) if words and not tiled else "")
        products = called or rounded

        def usual() -> PrimFunc:
            conversions = row_conversions(problem, target, stored=whole or narrows)
            past = streams and not whole
            return lower(scheduled, definition.end, streams=past, products=called, conversions=conversions)

        geometry = Geometry.of(problem, bool(plan.tile.uncropped))
        if self.form == INPUTS:
            deconv = lower(register_inputs.finish_inputs(scheduled, problem, definition), definition.end, streams=False)
        elif problem.quantization or (words and (tiled or words.needs_correction(problem))):
            deconv = usual()
        elif register_channels.supports(problem, geometry, self.form):
            finished = register_channels.finish_channels(scheduled, problem, definition, rounding, joining)
            deconv = lower(finished, definition.end, streams=False, products=products)
        elif self.form == ROWS and register_rows.supports_tile(problem, geometry, plan.tile, lanes):
            finished = register_rows.finish_rows(scheduled, problem, definition, rounding, joining, streams=streams)
            stored, length = storage_dtype(problem.output_dtype), lanes * (2 if joins else 1)
            functions = register_epilogue.store_functions(stored, length) if streams else ""
            finished = lower(finished, definition.end, streams=streams, functions=functions, products=products)
            deconv = register_epilogue.select_by_alignment(finished, usual()) if streams else finished
        elif self.form == ROWS and register_parts.supports_tile(problem, geometry, plan.tile, target, lanes):
            finished = register_parts.finish_rows(scheduled, problem, definition, rounding, joining)
            stores = register_parts.store_functions(storage_dtype(problem.output_dtype), lanes * (2 if joins else 1))
            deconv = lower(finished, definition.end, streams=False, products=products + stores)
        else:
            deconv = usual()
        deconv = lower_prefetches(deconv, target)
        return Kernel(
            problem=problem,
            deconv=lower_matrices(deconv, words) if words and tiled else deconv,
            pack=pack_filter(problem, definition.sections, definition.packed_elements, words),
            algorithm=self.name,
            knobs=plan.knobs,
            packed_elements=definition.packed_elements,
            packed_dtype=WORD if words else problem.accumulate_dtype,
        )
