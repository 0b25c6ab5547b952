"""Functions that bring a filter into the order in which a kernel reads it; they are called once, at bind.

Each combination of runs has the taps of its phases, or Winograd's sums of them, with tiles of output channels
innermost. Sums are computed in float64 and rounded once. Elements past the last channel are zero. Storage types are
widened to the accumulator here, not in the kernel.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as build
from tvm.tirx import PrimFunc

from tvm_deconv.compute.col2im import ColumnLayout
from tvm_deconv.compute.direct_layout import FilterSection, group_and_channel, paired
from tvm_deconv.compute.extents import int64
from tvm_deconv.compute.folding import FoldedFilter
from tvm_deconv.compute.indexing import ROWS, ravel, unravel
from tvm_deconv.compute.matrix_layout import MatrixSection
from tvm_deconv.compute.phases import AxisRows, Geometry
from tvm_deconv.compute.storage import filter_storage, sum_dtype, to_accumulator
from tvm_deconv.compute.strassen import STRASSEN
from tvm_deconv.compute.words import WORD, Words, corrections_of
from tvm_deconv.problem import Problem


@contextlib.contextmanager
def _pack_function(problem: Problem, elements: int, dtype: str) -> Iterator[tuple[IRBuilder, Any, Any]]:
    """Open the function ``pack(filter, packed)``, packed elements of `dtype`; yield its builder and the two buffers."""
    given = (problem.groups, problem.in_channels, problem.out_channels, *problem.kernel)
    with IRBuilder() as builder, build.prim_func():
        build.func_name("pack")
        build.func_attr({"global_symbol": "pack", "tirx.noalias": True})
        stored = filter_storage(problem)
        source = build.arg("filter", build.buffer(list(map(int64, given)), stored, align=1, layout=None))
        packed = build.arg("packed", build.buffer([int64(elements)], dtype, align=1, layout=None))
        yield builder, source, packed


def pack_filter(
    problem: Problem,
    sections: Sequence[FilterSection],
    elements: int,
    words: Words | None = None,
    *,
    unfolded: Problem,
) -> PrimFunc:
    """Build ``pack(filter [G, Ci, Co, *K], packed [elements])`` for the `sections` of a definition of `problem`.

    The filter is that of the `unfolded` problem: that of which `problem` is the folded one, or the same. With `words`,
    these hold elements of the filter as they are stored, in the place of input channels. If sums need a correction,
    those of all filters follow.
    """
    geometry = Geometry.of(problem)
    factor = WORD if words else sum_dtype(problem)
    inputs = words.count(problem.in_channels) if words else geometry.in_channels
    with _pack_function(unfolded, elements, factor) as (builder, source, packed):
        if unfolded is not problem:
            source = FoldedFilter(source, unfolded.out_channels)
        for section in sections:
            with build.grid(*map(int64, (*section.shape[:2], *section.shape[4:]))) as index:
                g, co, d, h, w, *reduction, row, column, cc = index[:12]
                ci, *taps = reduction if section.form == ROWS else [reduction[-1], *reduction[:-1]]
                ci = paired(sum(index[12:], ci * section.lanes), section.pairs)  # of groups in pairs it is 0
                phases = (d, h * section.phases[0] + row, w * section.phases[1] + column)
                group, channel = group_and_channel(section.form, section.channels, g, co, cc, section.pairs)
                exists = tirx.all(group < geometry.groups, channel < geometry.out_channels, ci < inputs)
                element = partial(_element, problem, source, section.axes, (group, ci, channel), phases)
                for points in itertools.product(*map(range, section.points)):
                    if words:
                        place = _places(problem, section.axes, phases, taps)
                        value = _word(problem, source, words, (group, channel), place, ci)
                    else:
                        value = _filter_point(section.axes, points, taps, element).astype(factor)
                    where = ravel((g, co, *points, *index[2:]), section.shape) + section.offset
                    build.buffer_store(packed, tirx.if_then_else(exists, value, tirx.const(0, factor)), [where])
        if words and words.needs_correction(problem):
            counts = [math.prod(section.filters) for section in sections]
            for section, begin in zip(sections, corrections_of(counts, elements - sum(counts)), strict=False):
                terms = (*section.taps, problem.in_channels)
                entry = partial(_direct_entry, problem, source, section)
                _pack_corrections(problem, packed, words, section.filters, begin, terms, entry)
    return builder.get()


def pack_matrix_filter(
    problem: Problem, sections: Sequence[MatrixSection], elements: int, words: Words | None = None
) -> PrimFunc:
    """Build ``pack(filter [G, Ci, Co, *K], packed [elements])`` for the `sections` of a matrix definition.

    Winograd's transform of the taps, and Strassen's sums, are computed in float64 and rounded once. With `words`, these
    hold elements of the filter as they are stored. If sums need a correction, those of all columns follow.
    """
    accumulator = problem.accumulate_dtype
    with _pack_function(problem, elements, WORD if words else accumulator) as (builder, source, packed):
        for section in sections:
            groups, tiles, *_, panel = section.shape
            panels, taps, channels = section.shape[5], section.shape[6:9], section.shape[9]
            with build.grid(*map(int64, (groups, tiles, panels, *taps, channels, panel))) as index:
                g, tile, number, *tap, ci, place = index
                column = number * panel + place
                entry = partial(_entry, problem, source, section, (g, tile), tap)
                for points in itertools.product(*map(range, section.points)):
                    if words and not (words.cut or section.transformed):
                        value = _column_word(problem, source, section, (g, tile), tap, words, ci, column)
                    else:
                        factor = partial(entry, points, column=column)
                        if section.parts > 1:
                            step = section.part_channels * (words.factors if words else 1)
                            factor = partial(_quarters, section, points[0], partial(entry, points), step, column=column)
                        value = words.join(factor, problem.in_channels, ci) if words else factor(ci).astype(accumulator)
                    where = ravel((g, tile, *points, number, *tap, ci, place), section.shape)
                    build.buffer_store(packed, value, [where + section.offset])
        if words and words.needs_correction(problem):
            counts = [math.prod(section.all_columns) for section in sections]
            for section, begin in zip(sections, corrections_of(counts, elements - sum(counts)), strict=False):
                terms = *(axis.run.taps for axis in section.axes), problem.in_channels
                entry = partial(_matrix_entry, problem, source, section)
                _pack_corrections(problem, packed, words, section.all_columns, begin, terms, entry)
    return builder.get()


def _pack_corrections(
    problem: Problem,
    packed: Any,
    words: Words,
    shape: Sequence[int],
    begin: int,
    terms: Sequence[int],
    entry: Callable[[Sequence[Expr], Sequence[Expr]], Expr],
) -> None:
    """Store the correction of each sum of a section, an array of `shape`, from `begin` on.

    A sum is one over an array of `terms`; `entry` is the filter's element at an index of each of the two.
    """
    factor = tirx.const(1 if problem.quantization else words.shift, WORD)
    with build.grid(*map(int64, shape)) as index:
        where = ravel(index, shape) + begin
        build.buffer_store(packed, tirx.const(0, WORD), [where])
        with build.grid(*map(int64, terms)) as term:
            build.buffer_store(packed, packed[where] + entry(index, term) * factor, [where])


def _direct_entry(
    problem: Problem, source: Any, section: FilterSection, place: Sequence[Expr], term: Sequence[Expr]
) -> Expr:
    """Return the filter's element at an index of `FilterSection.filters`, taps and an input channel, or zero."""
    g, co, d, h, w, cc = place
    *taps, ci = term
    group, channel = group_and_channel(section.form, section.channels, g, co, cc)
    exists = tirx.all(group < problem.groups, channel < problem.out_channels)
    element = _element(problem, source, section.axes, (group, ci, channel), (d, h, w), taps)
    return tirx.if_then_else(exists, element, tirx.const(0, problem.accumulate_dtype))


def _matrix_entry(
    problem: Problem, source: Any, section: MatrixSection, place: Sequence[Expr], term: Sequence[Expr]
) -> Expr:
    """Return the filter's element at group, tile and column, and at taps and an input channel, or zero."""
    g, tile, column = place
    *taps, ci = term
    phases, channel, exists = _column(problem, section, tile, column)
    element = _element(problem, source, section.axes, (g, ci, channel), phases, taps)
    return tirx.if_then_else(exists, element, tirx.const(0, problem.accumulate_dtype))


def _entry(
    problem: Problem,
    source: Any,
    section: MatrixSection,
    at: tuple[Expr, Expr],
    tap: Sequence[Expr],
    points: Sequence[int],
    ci: Expr,
    column: Expr,
) -> Expr:
    """Return the element of a product's filter at input channel `ci` and `column`, or zero past the last of either.

    `at` is the group and the tile of output channels, `tap` the tap of each axis, and `points` are Winograd's.
    """
    local, channel, exists = _column(problem, section, at[1], column)
    exists = tirx.all(exists, ci < problem.in_channels)
    element = partial(_element, problem, source, section.axes, (at[0], ci, channel), local)
    whole = problem.accumulate_dtype == "int32"
    value = _filter_point(section.axes, points, tap, element, whole=whole).astype(problem.accumulate_dtype)
    return tirx.if_then_else(exists, value, tirx.const(0, problem.accumulate_dtype))


def _column_word(
    problem: Problem,
    source: Any,
    section: MatrixSection,
    at: tuple[Expr, Expr],
    tap: Sequence[Expr],
    words: Words,
    number: Expr,
    column: Expr,
) -> Expr:
    """Return word `number` of a product's filter at `column`, or zero past the last; see `_entry`."""
    local, channel, exists = _column(problem, section, at[1], column)
    place = _places(problem, section.axes, local, tap)
    word = _word(problem, source, words, (at[0], channel), place, number)
    return tirx.if_then_else(exists, word, tirx.const(0, WORD))


def _word(
    problem: Problem, source: Any, words: Words, at: tuple[Expr, Expr], place: Sequence[Expr], number: Expr
) -> Expr:
    """Return word `number` of the filter's elements at a `place` of the kernel; `at` is group and output channel."""
    group, channel = at

    def factor(ci: Expr) -> Expr:
        stored = source[(group, ci, channel, *place)]
        return to_accumulator(stored, problem.filter_dtype, "float32") if words.cut else stored

    return words.join(factor, problem.in_channels, number)


def _column(problem: Problem, section: MatrixSection, tile: Expr, column: Expr) -> tuple[Sequence[Expr], Expr, Expr]:
    """Return the phases and the output channel of a `column` in a `tile` of channels, and whether there is one."""
    phases, cc = section.phases_and_channel(column)
    channel = tile * section.channels + cc
    return phases, channel, tirx.all(column < section.columns, channel < problem.out_channels)


def _quarters(
    section: MatrixSection, point: int, entry: Callable[[Expr, Expr], Expr], half: int, ci: Expr, column: Expr
) -> Expr:
    """Return one of Strassen's points in float64: a sum of one entry of each quarter of the filter.

    The second half of input channels begins at channel `half`.
    """
    total: Expr = tirx.const(0, "float64")
    for quarter, coefficient in enumerate(STRASSEN.filter[point]):
        if coefficient:
            value = entry(ci + quarter // 2 * half, column + quarter % 2 * section.part_columns)
            total = total + tirx.const(float(coefficient), "float64") * value.astype("float64")
    return total


def _element(
    problem: Problem,
    source: Any,
    axes: Sequence[AxisRows],
    at: tuple[Expr, Expr, Expr],
    phases: Sequence[Expr],
    taps: Sequence[Expr | int],
) -> Expr:
    """Return the filter element at group, input and output channel `at`.

    `phases` are counted within their runs.
    """
    place = _places(problem, axes, phases, taps)
    return to_accumulator(source[(*at, *place)], problem.filter_dtype, problem.accumulate_dtype)


def _places(
    problem: Problem, axes: Sequence[AxisRows], phases: Sequence[Expr], taps: Sequence[Expr | int]
) -> list[Expr]:
    """Return the index along the caller's axes of a filter's element; `phases` are counted within their runs."""
    places = [axis.run.k0 + phase + t * axis.run.k_step for axis, phase, t in zip(axes, phases, taps, strict=True)]
    return places[3 - problem.rank :]


def _filter_point(
    axes: Sequence[AxisRows],
    points: Sequence[int],
    tap: Sequence[Expr],
    element: Callable[[Sequence[Expr | int]], Expr],
    *,
    whole: bool = False,
) -> Expr:
    """Return one point of the transformed filter in float64.

    An axis with a transform sums the taps of a piece, whose number is its `tap`. One without contributes its `tap`. If
    no axis has a transform, return the filter's element itself. `whole` ones are of integers: the coefficients are
    multiplied by what makes them whole, and the outputs so many times too large.
    """
    if not any(rows.transformed for rows in axes):
        return element(tap)

    def along(axis: int, chosen: tuple[Expr | int, ...]) -> Expr:
        if axis == 3:
            return element(chosen).astype("float64")
        rows = axes[axis]
        if rows.algorithm is None:
            return along(axis + 1, (*chosen, tap[axis]))
        total: Expr = tirx.const(0, "float64")
        scale = rows.algorithm.divisor if whole else 1
        # The data of a row's window are in the reverse order of the taps.
        for place, coefficient in enumerate(rows.algorithm.filter[points[axis]]):
            if coefficient:
                last = rows.run.taps - 1 - place
                inner = along(axis + 1, (*chosen, last - tap[axis] * rows.piece))
                if rows.pieces * rows.piece > rows.run.taps:
                    inner = tirx.if_then_else(tap[axis] * rows.piece <= last, inner, tirx.const(0, "float64"))
                total = total + tirx.const(float(coefficient * scale), "float64") * inner
        return total

    return along(0, ())


def pack_columns(layout: ColumnLayout) -> PrimFunc:
    """Build ``pack(filter [G, Ci, Co, *K], packed [G, panels, Ci, panel])`` with all of ``K`` as columns."""
    problem, dtype, panel = layout.problem, layout.problem.accumulate_dtype, layout.tile.columns
    shape = (problem.groups, layout.panels, problem.in_channels, panel)
    with (
        _pack_function(problem, layout.packed_elements, dtype) as (builder, source, packed),
        build.grid(*map(int64, shape)) as (g, number, ci, lane),
    ):
        column = number * panel + lane
        *place, channel = unravel(column, (*problem.kernel, problem.out_channels))
        element = to_accumulator(source[(g, ci, channel, *place)], problem.filter_dtype, dtype)
        value = tirx.if_then_else(column < layout.columns, element, tirx.const(0, dtype))
        build.buffer_store(packed, value, [ravel((g, number, ci, lane), shape)])
    return builder.get()
