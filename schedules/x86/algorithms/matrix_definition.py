"""What the algorithms of the matrix definition share: they differ in the transforms around its products."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from tvm.tirx import PrimFunc

from tvm_deconv.compute.indexing import CHANNELS, has_whole_vectors
from tvm_deconv.compute.matrix import define_matrix
from tvm_deconv.compute.matrix_layout import row_unit
from tvm_deconv.compute.packing import pack_matrix_filter
from tvm_deconv.compute.phases import Geometry
from tvm_deconv.compute.storage import stores_bytes
from tvm_deconv.compute.words import WORD, Words, plans_in_words, tiled
from tvm_deconv.problem import Problem
from tvm_deconv.schedules.contract import Algorithm, Kernel
from tvm_deconv.schedules.x86 import matrix_tiles
from tvm_deconv.schedules.x86.amx import lower_matrices
from tvm_deconv.schedules.x86.calls import for_all_calls
from tvm_deconv.schedules.x86.conversions import row_conversions
from tvm_deconv.schedules.x86.dot import BFLOAT16_PAIRS, WordsOf, dot_functions, rounding_function, word_cost
from tvm_deconv.schedules.x86.free_registers import free_around_products
from tvm_deconv.schedules.x86.interleave import narrowing_intrinsic
from tvm_deconv.schedules.x86.last_vectors import overlap_last_vectors
from tvm_deconv.schedules.x86.lowering import lower
from tvm_deconv.schedules.x86.matrix import schedule_matrix
from tvm_deconv.schedules.x86.matrix_tiles import MatrixPlan
from tvm_deconv.schedules.x86.rounding import row_joining
from tvm_deconv.schedules.x86.row_ends import split_row_ends, splits_rows
from tvm_deconv.schedules.x86.row_prefetching import fetch_ahead
from tvm_deconv.schedules.x86.row_widening import widen_rows
from tvm_deconv.schedules.x86.stores import outgrows_caches
from tvm_deconv.schedules.x86.vector_rounding import round_vectors
from tvm_deconv.schedules.x86.vectors import accumulator_lanes, with_half_vectors
from tvm_deconv.schedules.x86.word_loads import load_words
from tvm_deconv.targets import CpuTarget


def matrix_algorithm(
    name: str,
    supports: Callable[[Problem, CpuTarget], bool],
    is_default_for: Callable[[Problem, CpuTarget], bool],
    *,
    winograd: bool = False,
    strassen: bool = False,
    words: WordsOf | None = None,
    error_growth: float = 1.0,
    caveat: str = "",
) -> Algorithm[CpuTarget, MatrixPlan]:
    """Return the record of the matrix definition with Winograd's transforms, Strassen's algorithm, or neither.

    With `words`, factors are multiplied in the words that it returns.
    """
    variety = _Transforms(name, winograd, strassen, words)
    return Algorithm(
        name=name,
        supports=supports,
        is_default_for=is_default_for,
        candidates=variety.candidates,
        read=MatrixPlan.from_knobs,
        tasks=variety.tasks,
        build=variety.build,
        error_growth=error_growth,
        caveat=caveat,
    )


@dataclass(frozen=True)
class _Transforms:
    """The functions of a record."""

    name: str
    winograd: bool
    strassen: bool
    words: WordsOf | None

    def candidates(self, problem: Problem, target: CpuTarget) -> Sequence[tuple[float, MatrixPlan]]:
        words = self.words(problem, target) if self.words else None
        cost = word_cost(words, target)
        return plans_in_words(problem, words, lambda products: self._candidates(products, target, words), cost)

    def _candidates(
        self, problem: Problem, target: CpuTarget, words: Words | None
    ) -> Sequence[tuple[float, MatrixPlan]]:
        phases = max((math.prod(run.count for run in runs) for runs in Geometry.of(problem).runs), default=1)
        of_lanes = partial(matrix_tiles.candidates, problem, self.winograd, self.strassen)
        options = with_half_vectors(problem, target, phases * problem.out_channels, words, of_lanes)
        return for_all_calls(problem, options, CHANNELS, row_unit(problem, accumulator_lanes(problem, target)))

    def tasks(self, problem: Problem, plan: MatrixPlan) -> int:
        return plan.tasks(problem)

    def build(self, problem: Problem, target: CpuTarget, plan: MatrixPlan) -> Kernel:
        lanes = accumulator_lanes(problem, target) // (1 + plan.halves)
        words = self.words(problem, target) if self.words else None
        narrows = _narrows_squares(problem, words, target)
        definition = define_matrix(problem, plan.tile, lanes, words, narrows=narrows)
        whole = has_whole_vectors(problem, CHANNELS, plan.tile, lanes) and not definition.layout.contiguous_phases
        narrows = narrows and definition.layout.interleaves
        transposition, narrowing = _narrowing(problem, target, lanes, words) if narrows else ("", "")
        scheduled = schedule_matrix(definition, plan, target, problem.accumulate_dtype, whole, words, transposition)
        func = overlap_last_vectors(scheduled.mod["main"])
        func, functions = _in_words(func, problem, words, lanes, whole)
        func, fetching = (func, "") if words else fetch_ahead(func, problem)  # words gain nothing
        func, widening = widen_rows(func, problem, target)
        func = split_row_ends(func) if splits_rows(problem, target) else func
        streams = outgrows_caches(problem) and not whole
        conversions = row_conversions(problem, target, stored=whole or narrows)
        scarce = words is not None and target.vector_registers <= 16
        func, freeing = free_around_products(func, target) if scarce else (func, "")
        products = fetching + narrowing + functions + widening + freeing
        deconv = lower(func, definition.end, target, streams=streams, products=products, conversions=conversions)
        if tiled(words):
            deconv = lower_matrices(deconv, words)
        return Kernel(
            problem=problem,
            deconv=deconv,
            pack=pack_matrix_filter(problem, definition.sections, definition.packed_elements, words),
            algorithm=self.name,
            knobs=plan.knobs,
            packed_elements=definition.packed_elements,
            packed_dtype=WORD if words else problem.accumulate_dtype,
        )


def _narrows_squares(problem: Problem, words: Words | None, target: CpuTarget) -> bool:
    """Tell whether squares of results are narrowed to the output's type as they are transposed, not while copied.

    So are those that become bfloat16 behind products of matrices, which are so fast that this takes the time, and those
    that become 16 bits in AVX2.
    """
    if problem.output_dtype not in ("float16", "bfloat16"):
        return stores_bytes(problem)
    return (tiled(words) and problem.output_dtype == "bfloat16") or target.vector_bits < 512


def _narrowing(problem: Problem, target: CpuTarget, lanes: int, words: Words | None) -> tuple[str, str]:
    """Return the intrinsic that narrows squares of results as it transposes them, and the LLVM IR that it calls."""
    source, joining = "", ""
    if not stores_bytes(problem):
        source, joining = row_joining(problem, target, lanes, flushed=tiled(words))
    return narrowing_intrinsic(problem, lanes, joining), source


def _in_words(
    func: PrimFunc, problem: Problem, words: Words | None, lanes: int, whole_vectors: bool
) -> tuple[PrimFunc, str]:
    """Return the scheduled `func` with loads and products of `words`, if given, and the LLVM IR that it calls."""
    if words is None:
        return func, ""
    func = load_words(func, words, lanes)
    if not tiled(words):
        return func, dot_functions(words, lanes)
    if whole_vectors and problem.output_dtype == "bfloat16":
        return round_vectors(func, rounding_function(lanes)), dot_functions(BFLOAT16_PAIRS, lanes)
    return func, ""
