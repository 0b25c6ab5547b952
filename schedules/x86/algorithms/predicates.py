"""The conditions under which algorithms apply to a problem on a target, or are a default for it."""

from __future__ import annotations

import math

from tvm_deconv.compute.direct_layout import transposes_channels
from tvm_deconv.compute.folding import folded
from tvm_deconv.compute.indexing import CHANNELS, INPUTS
from tvm_deconv.compute.matrix_layout import contiguous_phases
from tvm_deconv.compute.phases import Geometry
from tvm_deconv.compute.storage import largest_sum
from tvm_deconv.problem import Problem
from tvm_deconv.problem.arithmetic import ceil_div
from tvm_deconv.schedules.x86 import matrix_tiles, register_channels, tiles
from tvm_deconv.schedules.x86.amx import matrix_words
from tvm_deconv.schedules.x86.dot import INTEGER_PAIRS, words_of
from tvm_deconv.schedules.x86.interleave import MAX_STREAMS
from tvm_deconv.schedules.x86.vectors import accumulator_lanes
from tvm_deconv.targets import CpuTarget

#: Outputs of a row that the matrix definition finishes at once, at most: its code grows with them.
MAX_CHUNK = 160
#: Output channels of a group that are worth a vector of them, however long it is.
_FEWEST_CHANNELS = 4
#: The most taps along an axis of a layer in `N C *X` whose columns are added up.
_MOST_TAPS = 3
#: Output channels of a group for which lanes are added up, at most: each is a vector of partial sums.
MAX_SUMS = 8


def always(problem: Problem, target: CpuTarget) -> bool:  # noqa: ARG001
    """Hold for every problem."""
    return True


def fills_vectors_with_channels(problem: Problem, target: CpuTarget) -> bool:
    """Channels are contiguous, half a vector or four of them in a group; or positions fill at most half a vector."""
    lanes = accumulator_lanes(problem, target)
    if problem.data_format == "NXC":
        return problem.out_channels >= min(lanes // 2, _FEWEST_CHANNELS)
    return 2 * _positions(problem) <= lanes <= problem.out_channels


def folds_channels(problem: Problem, target: CpuTarget) -> bool:
    """Phases of the last axis fold into channels, which then take fewer vectors, and are stored from registers."""
    return _folded_channels(problem, target) is not None


def folds_channels_of_words(problem: Problem, target: CpuTarget) -> bool:
    """The target multiplies words of the type, and `folds_channels` holds."""
    return multiplies_direct_words(problem, target) and folds_channels(problem, target)


def fills_vectors_with_folded_channels(problem: Problem, target: CpuTarget) -> bool:
    """Channels fold, and fill vectors then."""
    other = _folded_channels(problem, target)
    return other is not None and fills_vectors_with_channels(other, target)


def fills_vectors_with_folded_channels_of_words(problem: Problem, target: CpuTarget) -> bool:
    """Words are full, channels fold, and fill vectors then."""
    return fills_direct_words(problem, target) and fills_vectors_with_folded_channels(problem, target)


def _folded_channels(problem: Problem, target: CpuTarget) -> Problem | None:
    """Return the folded problem of `folds_channels`, or None where that does not hold."""
    other, lanes = folded(problem), accumulator_lanes(problem, target)
    if other is None or not register_channels.supports(other, Geometry.of(other), CHANNELS):
        return None
    fewer = ceil_div(other.out_channels, lanes) < problem.strides[-1] * ceil_div(problem.out_channels, lanes)
    return other if fewer else None


def fills_vectors_with_groups(problem: Problem, target: CpuTarget) -> bool:
    """Channels are contiguous, and there are at least half a vector of groups."""
    return problem.data_format == "NXC" and 2 * problem.groups >= accumulator_lanes(problem, target)


def stores_sums(problem: Problem, target: CpuTarget) -> bool:  # noqa: ARG001
    """Channels are contiguous, a vector of input channels has several, and every phase has a tap."""
    several = problem.in_channels > 1 and problem.out_channels <= MAX_SUMS
    return several and register_channels.supports(problem, Geometry.of(problem), INPUTS)


def fills_vectors_with_inputs(problem: Problem, target: CpuTarget) -> bool:
    """Channels are contiguous; those of the input fill half a vector, and those of the output do not.

    In groups half a vector of 16 is no more than that, since the other half would be empty in each group.
    """
    half = accumulator_lanes(problem, target) // 2
    most = half if problem.groups > 1 and half >= MAX_SUMS else half - 1
    return problem.out_channels <= most and half <= problem.in_channels and stores_sums(problem, target)


def adds_columns(problem: Problem, target: CpuTarget) -> bool:  # noqa: ARG001
    """Extents are fixed, elements are floating point numbers.

    In `N *X C` there is one group, and in `N C *X` the phases of the last axis are interleaved.
    """
    floats = problem.accumulate_dtype != "int32"
    fits = problem.groups == 1 if problem.data_format == "NXC" else problem.strides[-1] <= MAX_STREAMS
    return floats and fits and not problem.dynamic_axes


def fills_vectors_with_columns(problem: Problem, target: CpuTarget) -> bool:
    """Input channels fill a vector, and the target does not multiply words of the type.

    Without dilations columns do in `N *X C`, and the outputs of a place stay in registers; in `N C *X` taps are few.
    Of AVX-512, machines with one multiply-add in a cycle have been measured.
    """
    lanes = accumulator_lanes(problem, target)
    if max(problem.dilations) > 1:
        fits = True
    elif problem.data_format == "NXC":
        vectors = ceil_div(problem.strides[-1] * problem.out_channels, lanes)
        columns = problem.out_channels * math.prod(problem.kernel)
        fits = lanes <= columns and vectors <= target.vector_registers * 3 // 4
    else:
        fits = all(k <= _MOST_TAPS * stride for k, stride in zip(problem.kernel, problem.strides, strict=True))
    measured = target.vector_registers <= 16 or (target.multiply_adds == 1 and not target.mesh)
    filled = problem.in_channels >= lanes and not multiplies_direct_words(problem, target)
    return measured and fits and filled and adds_columns(problem, target)


def fills_panels(problem: Problem, target: CpuTarget) -> bool:
    """Every product has vectors of columns and of rows; and half a vector of terms, or a whole one of columns."""
    lanes = accumulator_lanes(problem, target)
    return max(2 * problem.in_channels, problem.out_channels) >= lanes and _fills_columns(problem, target)


def _fills_columns(problem: Problem, target: CpuTarget) -> bool:
    """Every product has vectors of columns, and rows for a register tile."""
    lanes = accumulator_lanes(problem, target)
    # Channels that are last are the vectors' last axis, behind the phases: together they fill vectors.
    several = (runs for geometry in Geometry.choices(problem) for runs in geometry.runs)
    phases = max((math.prod(run.count for run in runs) for runs in several), default=1)
    wide = problem.out_channels * (phases if problem.data_format == "NXC" else 1)
    columns = 2 * wide >= lanes or contiguous_phases(problem, lanes) > 0
    return columns and _positions(problem) >= 4 and finishes_in_short_chunks(problem, target)


def finishes_in_short_chunks(problem: Problem, target: CpuTarget) -> bool:
    """Channels need not become rows, or do so in chunks whose code is small: whole vectors and whole strides."""
    lanes = accumulator_lanes(problem, target)
    if problem.data_format == "NXC" or contiguous_phases(problem, lanes):
        return True
    return math.lcm(lanes, Geometry.of(problem).axes[2].stride) <= MAX_CHUNK


def multiplies_words(problem: Problem, target: CpuTarget) -> bool:
    """The target multiplies words of the type, and outputs are finished in short chunks."""
    return words_of(problem, target) is not None and finishes_in_short_chunks(problem, target)


def fills_words(problem: Problem, target: CpuTarget) -> bool:
    """Words are full and products have vectors of columns and of rows; of integers two words are enough."""
    words = words_of(problem, target)
    if words is None or problem.in_channels < words.factors:
        return False
    if problem.dtype == "bfloat16":
        return fills_panels(words.problem(problem), target)
    return words.count(problem.in_channels) >= 2 and _fills_columns(problem, target)


def multiplies_matrices(problem: Problem, target: CpuTarget) -> bool:
    """The target multiplies matrices of the type, and outputs are finished in short chunks."""
    return matrix_words(problem, target) is not None and finishes_in_short_chunks(problem, target)


def fills_matrices(problem: Problem, target: CpuTarget) -> bool:
    """Words are full, and products have vectors of columns and of rows."""
    words = matrix_words(problem, target)
    return words is not None and problem.in_channels >= words.factors and _fills_columns(problem, target)


def multiplies_transformed_matrices(problem: Problem, target: CpuTarget) -> bool:
    """The target multiplies matrices of parts, and there are taps to transform."""
    words = matrix_words(problem, target)
    return words is not None and words.cut and has_taps_to_transform(problem, target)


def saves_matrix_products(problem: Problem, target: CpuTarget) -> bool:
    """Products of parts are of matrices that are filled, and there are taps to transform."""
    return multiplies_transformed_matrices(problem, target) and fills_matrices(problem, target)


def multiplies_row_matrices(problem: Problem, target: CpuTarget) -> bool:
    """The target multiplies matrices of the type, and channels are outside of positions."""
    return matrix_words(problem, target) is not None and problem.data_format == "NCX"


def fills_row_matrices(problem: Problem, target: CpuTarget) -> bool:
    """Words are full, products have rows of channels and vectors of positions, and the caller's rows are not short."""
    lanes = accumulator_lanes(problem, target)
    filled = 2 * problem.out_channels >= lanes and 2 * _positions(problem) >= lanes and _has_rows(problem, target)
    return problem.data_format == "NCX" and filled and fills_matrices(problem, target)


def _has_rows(problem: Problem, target: CpuTarget) -> bool:
    """The caller's rows fill a quarter of a vector: shorter pieces are packed element by element."""
    return 4 * Geometry.of(problem).axes[2].positions >= accumulator_lanes(problem, target)


def multiplies_direct_words(problem: Problem, target: CpuTarget) -> bool:
    """The target multiplies words of the type."""
    return words_of(problem, target) is not None


def fills_direct_words(problem: Problem, target: CpuTarget) -> bool:
    """The target multiplies words of the type, and they are full."""
    words = words_of(problem, target)
    return words is not None and problem.in_channels >= words.factors


def fills_rows_of_words(problem: Problem, target: CpuTarget) -> bool:
    """Words are full, and the caller's rows are not short, or columns would not fill vectors either."""
    has_rows = _has_rows(problem, target) or not _fills_columns(problem, target)
    return has_rows and fills_direct_words(problem, target)


def stores_sums_of_words(problem: Problem, target: CpuTarget) -> bool:
    """The target multiplies words of the type, channels are contiguous, and every phase has a tap."""
    return stores_sums(problem, target) and multiplies_direct_words(problem, target)


def fills_vectors_with_words(problem: Problem, target: CpuTarget) -> bool:
    """Channels are contiguous; words of those of the input fill a quarter of a vector, and those of the output do not.

    Lanes of half a vector of AVX-512 are added up in fewer steps.
    """
    words, lanes = words_of(problem, target), accumulator_lanes(problem, target)
    if words is None or not stores_sums(problem, target):
        return False
    return 4 * words.count(problem.in_channels) >= lanes > 2 * problem.out_channels


def fills_vectors_with_channels_of_words(problem: Problem, target: CpuTarget) -> bool:
    """Words are full, and channels fill vectors."""
    return fills_direct_words(problem, target) and fills_vectors_with_channels(problem, target)


def has_taps_to_transform(problem: Problem, target: CpuTarget) -> bool:
    """Some phase has several taps, and sums of data cannot overflow: the type is a floating point one."""
    if problem.accumulate_dtype == "int32" or not finishes_in_short_chunks(problem, target):
        return False
    return bool(matrix_tiles.output_choices(Geometry.of(problem), winograd=True))


def transforms_integers(problem: Problem, target: CpuTarget) -> bool:
    """Integers are multiplied in pairs, there are taps to transform, and sums stay within 32 bits when multiplied."""
    fits = largest_sum(problem) << problem.rank < 1 << 31
    return fits and _multiplies_pairs(problem, target) and _has_taps_of_integers(problem)


def sums_integers(problem: Problem, target: CpuTarget) -> bool:
    """Integers are multiplied in pairs, and there is nothing to transform."""
    return _multiplies_pairs(problem, target) and not _has_taps_of_integers(problem)


def _multiplies_pairs(problem: Problem, target: CpuTarget) -> bool:
    return words_of(problem, target) == INTEGER_PAIRS and finishes_in_short_chunks(problem, target)


def _has_taps_of_integers(problem: Problem) -> bool:
    return bool(matrix_tiles.output_choices(Geometry.of(problem), winograd=True, integers=True))


def fills_halves_of_integers(problem: Problem, target: CpuTarget) -> bool:
    """Half of the words are enough terms for the additional sums to pay."""
    enough = problem.in_channels >= 16 * accumulator_lanes(problem, target)
    return enough and sums_integers(problem, target) and fills_words(problem, target)


def saves_integer_products(problem: Problem, target: CpuTarget) -> bool:
    """There are taps of integers to transform, and products have vectors of columns and of rows."""
    return transforms_integers(problem, target) and fills_words(problem, target)


def saves_products(problem: Problem, target: CpuTarget) -> bool:
    """There are taps to transform, and enough columns for the transforms to pay."""
    return has_taps_to_transform(problem, target) and fills_panels(problem, target)


def has_rows_to_transform(problem: Problem, target: CpuTarget) -> bool:  # noqa: ARG001
    """Some phase has neighbouring taps along an axis outside of rows, in floating point."""
    return problem.accumulate_dtype != "int32" and bool(tiles.outer_outputs(Geometry.of(problem)))


def saves_rows(problem: Problem, target: CpuTarget) -> bool:
    """There are rows to transform, and they are contiguous or can be transposed."""
    rows = problem.data_format == "NCX" or transposes_channels(problem.in_channels, accumulator_lanes(problem, target))
    return rows and has_rows_to_transform(problem, target)


def has_nothing_to_transform(problem: Problem, target: CpuTarget) -> bool:
    """Winograd's transforms do not apply, and sums of data cannot overflow: the type is a floating point one."""
    if problem.accumulate_dtype == "int32" or not finishes_in_short_chunks(problem, target):
        return False
    return not matrix_tiles.output_choices(Geometry.of(problem), winograd=True)


def fills_halves(problem: Problem, target: CpuTarget) -> bool:
    """Half of the input channels are enough terms for the additional sums to pay."""
    enough = problem.in_channels >= 8 * accumulator_lanes(problem, target)
    return enough and has_nothing_to_transform(problem, target) and fills_panels(problem, target)


def _positions(problem: Problem) -> int:
    geometry = Geometry.of(problem)
    return geometry.batch * math.prod(axis.positions for axis in geometry.axes)
