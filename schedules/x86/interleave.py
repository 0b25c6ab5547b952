"""Interleaving and transposing vectors by explicit shuffles.

Interleaving turns ``streams`` vectors into ``streams`` vectors whose elements alternate:

    out[lane * streams + stream] = in[stream, lane]

LLVM compiles a loop of this store to permutes in some cases and to element-wise scatters in others, a factor of two in
the time of a whole layer. So a tensor intrinsic has shuffles of two vectors, in rounds. Of four streams, two rounds in
each lane of 128 bits make vectors whose lanes are four elements of one place, and further rounds bring these lanes to
their places: one instruction each of the kind that every CPU has. Else an even number of streams is halved. Of an odd
one each is brought to its lanes by a shuffle, and blended with the others; in AVX-512's whole vectors, which have
shuffles of two for any lanes, it is merged one stream at a time.

Between rounds stands a fence. Without it LLVM merges rounds with the one before, and makes up to 3.5 times as many
instructions (docs/design.md).
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

from tvm import tirx
from tvm.ir import Expr
from tvm.s_tir import TensorIntrin
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as B
from tvm.tirx import PrimFunc

from tvm_deconv.compute.extents import int64
from tvm_deconv.compute.requantization import stored
from tvm_deconv.compute.storage import storage_dtype
from tvm_deconv.compute.words import WORD
from tvm_deconv.problem import Problem

#: The most streams for which a shuffle network is faster than the stores that it replaces.
MAX_STREAMS = 16
#: The widest vectors, in bits, in which a blend takes less than a shuffle of two vectors of any elements.
_SHUFFLED = 256


def shuffle_network(streams: list[Expr], lanes: int) -> list[Expr]:
    """Return the interleaved vectors of ``n`` `streams` of `lanes` elements: element ``e // n`` of stream ``e % n``."""
    count = len(streams)
    if count == 1:
        return streams
    if count % 2:
        narrow = _bits(streams[0]) >= 32 and lanes * _bits(streams[0]) <= _SHUFFLED
        return _placed(streams, lanes) if narrow else [_merged(streams, lanes, i * lanes) for i in range(count)]
    if count % 4 == 0 and _has_quads(streams[0], lanes, count):
        return _by_quads(streams, lanes)
    even, odd = (shuffle_network(half, lanes) for half in (streams[0::2], streams[1::2]))
    if count > 2:
        even, odd = [*map(_fenced, even)], [*map(_fenced, odd)]
    return [
        _shuffle(first, second, [half + i // 2 + (i % 2) * lanes for i in range(lanes)])
        for first, second in zip(even, odd, strict=True)
        for half in (0, lanes // 2)
    ]


def _has_quads(stream: Expr, lanes: int, count: int) -> bool:
    """Tell whether `count` streams like this are interleaved by lanes of 128 bits: four elements of 32 bits.

    Of AVX-512's whole vectors that takes four shuffles a vector, where one of any elements takes two of four streams.
    """
    return _bits(stream) == 32 and lanes in (8, 16) and (lanes == 8 or count > 4)


def _by_quads(streams: list[Expr], lanes: int) -> list[Expr]:
    """Return the interleaved vectors of `streams`, a multiple of four, by rounds in and of lanes of 128 bits."""
    quads = [_quads(streams[first : first + 4], lanes) for first in range(0, len(streams), 4)]
    # In the order of the output: of the first four places, which are the first lanes, and so on.
    ordered = [quad[place] for place in range(4) for quad in quads]
    width, turned = lanes // 4, []
    for first in range(0, len(ordered), width):
        turned.append(_turned(ordered[first : first + width], lanes))
    return [vectors[lane] for lane in range(width) for vectors in turned]


def _quads(streams: list[Expr], lanes: int) -> list[Expr]:
    """Return four vectors: of place ``i`` in each lane of four `streams`, those of all streams, for ``i`` up to 3."""

    def unpacked(first: Expr, second: Expr, half: int, order: tuple[tuple[int, int], ...]) -> Expr:
        """Return one half of each lane of both vectors, in the `order` of pairs of a vector and a place."""
        begins = range(2 * half, lanes, 4)
        places = [source * lanes + begin + place for begin in begins for source, place in order]
        return _fenced(_shuffle(first, second, places))

    a, b, c, d = streams
    in_turn, in_pairs = ((0, 0), (1, 0), (0, 1), (1, 1)), ((0, 0), (0, 1), (1, 0), (1, 1))
    halves = [(unpacked(a, b, half, in_turn), unpacked(c, d, half, in_turn)) for half in (0, 1)]
    return [unpacked(*pair, half, in_pairs) for pair in halves for half in (0, 1)]


def _turned(vectors: list[Expr], lanes: int) -> list[Expr]:
    """Return the transposed lanes of 128 bits of as many `vectors` as each has: two, or four."""

    def lanes_of(first: Expr, second: Expr, *chosen: int) -> Expr:
        of_each = [4 * lane + i for lane in chosen for i in range(4)]
        return _shuffle(first, second, [*of_each, *(lanes + i for i in of_each)])

    if len(vectors) == 2:
        return [lanes_of(*vectors, lane) for lane in (0, 1)]
    pairs = [[_fenced(lanes_of(*vectors[i : i + 2], *half)) for i in (0, 2)] for half in ((0, 1), (2, 3))]
    return [lanes_of(*pair, *chosen) for pair in pairs for chosen in ((0, 2), (1, 3))]


def _fenced(vector: Expr) -> Expr:
    """Return `vector` behind a fence: an instruction for LLVM alone, which has one for floats."""
    bits = _bits(vector)
    if bits not in (32, 64):
        return vector
    dtype, floats = str(vector.ty.dtype), f"float{bits}x{vector.ty.dtype.lanes}"
    fenced = tirx.call_llvm_pure_intrin(floats, "llvm.arithmetic.fence", tirx.reinterpret(floats, vector))
    return tirx.reinterpret(dtype, fenced)


def _bits(vector: Expr) -> int:
    """Return the bits of an element."""
    return int(vector.ty.dtype.bits)


def _placed(streams: list[Expr], lanes: int) -> list[Expr]:
    """Return the interleaved vectors of an odd number of `streams`: one shuffle of each, and then blends.

    In the output the elements of a stream are so many lanes apart, a number that has no factor with that of the lanes:
    no two are in the same lane of their vectors, and one shuffle brings all to theirs.
    """
    count = len(streams)
    placed = []
    for number, stream in enumerate(streams):
        element = {(place * count + number) % lanes: place for place in range(lanes)}
        indices = [tirx.const(element[lane], "int32") for lane in range(lanes)]
        placed.append(_fenced(tirx.Shuffle([stream], indices)))
    vectors = []
    for begin in range(0, count * lanes, lanes):
        value = placed[0]
        for number, stream in enumerate(placed[1:], start=1):
            value = _shuffle(value, stream, [i + lanes * ((begin + i) % count == number) for i in range(lanes)])
        vectors.append(value)
    return vectors


def _merged(streams: list[Expr], lanes: int, begin: int) -> Expr:
    """Return elements `begin` to ``begin + lanes`` of the interleaved `streams`, taken from one stream at a time."""
    sources = [divmod(begin + i, len(streams)) for i in range(lanes)]
    value = streams[0]
    for number, stream in enumerate(streams[1:], start=1):
        # A lane of this stream is fetched, others stay; the first shuffle also moves those of stream 0.
        indices = [
            lanes + lane if source == number else (i if number > 1 or source != 0 else lane)
            for i, (lane, source) in enumerate(sources)
        ]
        value = _shuffle(value, stream, indices)
    return value


def _shuffle(first: Expr, second: Expr, indices: list[int]) -> Expr:
    return tirx.Shuffle([first, second], [tirx.const(index, "int32") for index in indices])


@cache
def interleave_intrinsic(stride: int, minor: int, lanes: int, dtype: str, scope: str) -> str:
    """Register the intrinsic that interleaves chunks of ``[stride * minor, lanes]`` elements, and return its name.

    The result, in memory of `scope`, is ``[lanes * stride, minor]``: outputs of a row, and the `minor` channels of each
    where channels are last.
    """
    name = f"tvm_deconv.interleave_{stride}x{minor}x{lanes}_{dtype}_{scope}"
    streams, places = stride * minor, lanes * stride

    def function(vectors: bool) -> PrimFunc:
        """Return the loops that TVM matches, or the `vectors` that replace them."""
        with IRBuilder() as builder, B.prim_func(s_tir=True):
            B.func_name("interleave")
            rows = B.arg("rows", B.buffer((streams, lanes), dtype, offset_factor=1, align=1))
            chunk = B.arg("chunk", B.buffer((places, minor), dtype, scope=scope, offset_factor=1, align=1))
            with B.sblock("root"):
                B.reads(rows[0:streams, 0:lanes])
                B.writes(chunk[0:places, 0:minor])
                if vectors:
                    loaded = [rows.vload([int64(stream), int64(0)], f"{dtype}x{lanes}") for stream in range(streams)]
                    for vector, value in enumerate(shuffle_network(loaded, lanes)):
                        # A vector may cross the end of an output's channels: those of the next follow without a gap.
                        place, channel = divmod(vector * lanes, minor)
                        B.buffer_store(chunk, value, [int64(place), tirx.Ramp(int64(channel), int64(1), lanes)])
                else:
                    with B.grid(int64(places), int64(minor)) as (i, j), B.sblock("move"):
                        place = B.axis.spatial(int64(places), i)
                        # TVM drops axes of extent one before it matches.
                        channel = B.axis.spatial(int64(minor), j) if minor > 1 else int64(0)
                        source = (place % stride * minor + channel, place // stride)
                        B.reads(rows[source])
                        B.writes(chunk[place, channel])
                        B.buffer_store(chunk, rows[source], [place, channel])
        return builder.get()

    TensorIntrin.register(name, function(vectors=False), function(vectors=True), override=True)
    return name


def join_pairs(joining: str, streams: list[Expr], lanes: int) -> list[Expr]:
    """Return the words of neighbouring `streams`, an even number of them, by the function `joining`."""
    pairs = zip(streams[0::2], streams[1::2], strict=True)
    return [tirx.call_extern(f"{WORD}x{lanes}", joining, even, odd) for even, odd in pairs]


@cache
def join_intrinsic(problem: Problem, stride: int, lanes: int, joining: str, scope: str) -> str:
    """Register the intrinsic that interleaves chunks of ``[stride, lanes]`` sums of `problem`, and return its name.

    The result, in memory of `scope`, is ``[lanes * stride, 1]`` outputs of a row in the output's type. Neighbours are
    joined, and these words interleaved: two sums of 16 bits by `joining`, or as many bytes as go into 32 bits.
    """
    dtype, stored_dtype = problem.accumulate_dtype, storage_dtype(problem.output_dtype)
    name = f"tvm_deconv.join_{problem.key}_{stride}x{lanes}_{joining}_{scope}"
    places = lanes * stride

    def function(vectors: bool) -> PrimFunc:
        """Return the loops that TVM matches, or the `vectors` that replace them."""
        with IRBuilder() as builder, B.prim_func(s_tir=True):
            B.func_name("join")
            rows = B.arg("rows", B.buffer((stride, lanes), dtype, offset_factor=1, align=1))
            chunk = B.arg("chunk", B.buffer((places, 1), stored_dtype, scope=scope, offset_factor=1, align=1))
            with B.sblock("root"):
                B.reads(rows[0:stride, 0:lanes])
                B.writes(chunk[0:places, 0:1])
                if vectors:
                    loaded = [rows.vload([int64(stream), int64(0)], f"{dtype}x{lanes}") for stream in range(stride)]
                    vectors_of_outputs = narrow_streams(loaded, lanes, stored_dtype, joining)
                    width = places // len(vectors_of_outputs)
                    for vector, value in enumerate(vectors_of_outputs):
                        place = int64(width * vector)
                        B.buffer_store(chunk, value, [place, tirx.Ramp(int64(0), int64(1), width)])
                else:
                    with B.grid(int64(places), int64(1)) as (i, _), B.sblock("move"):
                        place = B.axis.spatial(int64(places), i)
                        source = (place % stride, place // stride)
                        B.reads(rows[source])
                        B.writes(chunk[place, int64(0)])
                        B.buffer_store(chunk, stored(problem, rows[source]), [place, int64(0)])
        return builder.get()

    TensorIntrin.register(name, function(vectors=False), function(vectors=True), override=True)
    return name


@cache
def transpose_intrinsic(lanes: int, dtype: str) -> str:
    """Register the intrinsic that transposes ``[lanes, lanes]`` elements, rows of any pitch, and return its name."""
    return _square_intrinsic(f"tvm_deconv.transpose_{lanes}_{dtype}", lanes, dtype)


@cache
def narrowing_intrinsic(problem: Problem, lanes: int, joining: str) -> str:
    """Register the intrinsic that transposes ``[lanes, lanes]`` sums into the output's type, and return its name.

    Bytes are integers of that type already. `joining`, a function of `rounding.row_joining`, makes words of others.
    Rows have any pitch.
    """
    name = f"tvm_deconv.narrow_{lanes}_{problem.key}_{joining}"
    return _square_intrinsic(name, lanes, problem.accumulate_dtype, problem, joining)


def _square_intrinsic(name: str, lanes: int, dtype: str, problem: Problem | None = None, joining: str = "") -> str:
    """Register the intrinsic `name` that transposes squares of `dtype`, narrowed to the output's if a `problem` is."""
    narrow = storage_dtype(problem.output_dtype) if problem else dtype

    def square(name: str, dtype: str) -> Any:
        strides = [tirx.Var(f"{name}_pitch", "int64"), int64(1)]
        return B.arg(name, B.buffer((lanes, lanes), dtype, strides=strides, offset_factor=1, align=1))

    def function(vectors: bool) -> PrimFunc:
        """Return the loops that TVM matches, or the `vectors` that replace them."""
        with IRBuilder() as builder, B.prim_func(s_tir=True):
            B.func_name("transpose")
            source, rows = square("source", dtype), square("rows", narrow)
            with B.sblock("root"):
                B.reads(source[0:lanes, 0:lanes])
                B.writes(rows[0:lanes, 0:lanes])
                if vectors:
                    loaded = [source.vload([int64(row), int64(0)], f"{dtype}x{lanes}") for row in range(lanes)]
                    columns = _narrow(loaded, lanes, narrow, joining) if problem else shuffle_network(loaded, lanes)
                    for row, value in enumerate(columns):
                        B.buffer_store(rows, value, [int64(row), tirx.Ramp(int64(0), int64(1), lanes)])
                else:
                    with B.grid(int64(lanes), int64(lanes)) as (i, j), B.sblock("move"):
                        row, column = B.axis.spatial(int64(lanes), i), B.axis.spatial(int64(lanes), j)
                        B.reads(source[column, row])
                        B.writes(rows[row, column])
                        value = source[column, row]
                        B.buffer_store(rows, stored(problem, value) if problem else value, [row, column])
        return builder.get()

    TensorIntrin.register(name, function(vectors=False), function(vectors=True), override=True)
    return name


def _narrow(rows: list[Expr], lanes: int, narrow: str, joining: str) -> list[Expr]:
    """Return the columns of a square of `rows` of sums as vectors of the `narrow` type.

    Four rows are joined to words of bytes, or two by the function `joining` to words of 16 bits. What is in a word are
    neighbours in a column: a quarter or half of the vectors is left to shuffle.
    """
    if joining:
        words = join_pairs(joining, rows, lanes)
    else:
        words = [_word_of_bytes(rows[i : i + 4], lanes, narrow) for i in range(0, lanes, 4)]
    streams, columns = len(words), []
    for vector in shuffle_network(words, lanes):
        for first in range(0, lanes, streams):
            column = tirx.Shuffle([vector], [tirx.const(first + i, "int32") for i in range(streams)])
            columns.append(tirx.reinterpret(f"{narrow}x{lanes}", column))
    return columns


def narrow_streams(streams: list[Expr], lanes: int, narrow: str, joining: str) -> list[Expr]:
    """Return the interleaved `streams` of sums as vectors of the `narrow` type, by the function `joining` if given."""
    if joining:
        words, together, bits = join_pairs(joining, streams, lanes), 2, 32
    else:
        together = math.gcd(len(streams), 4)
        bits = 8 * together
        words = [_word_of_bytes(streams[i : i + together], lanes, narrow) for i in range(0, len(streams), together)]
    vectors = shuffle_network(words, lanes)
    return [tirx.reinterpret(f"{narrow}x{together * lanes}", word.astype(f"int{bits}x{lanes}")) for word in vectors]


def _word_of_bytes(rows: list[Expr], lanes: int, narrow: str) -> Expr:
    """Return the words whose lower bytes are the lanes of as many `rows`, up to four; of less, other bits are any."""
    several = f"{WORD}x{lanes}"
    *lower, word = rows
    word = word << tirx.const(8 * len(lower), several)
    for number, row in enumerate(lower):
        byte = row if narrow == "uint8" else row & tirx.const(0xFF, several)  # of negative integers, other bits are set
        word = word | (byte << tirx.const(8 * number, several))
    return word
