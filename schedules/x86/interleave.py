"""The interleaving store: ``streams`` vectors become ``streams`` vectors whose elements alternate.

    out[lane * streams + stream] = in[stream, lane]

Left to the compiler this store is a lottery between permutes and element-wise scatters (a factor of two in the whole
layer).  As a tensor intrinsic of explicit two-source shuffles it always compiles to `vpermt2` and unpacks: an even
number of streams halves (``log2`` rounds of one shuffle a vector), an odd one is merged one stream at a time.
"""

from __future__ import annotations

from functools import cache

from tvm import tirx
from tvm.ir import Expr
from tvm.s_tir import TensorIntrin
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as B
from tvm.tirx import IntImm, PrimFunc

#: More streams than this are not worth a shuffle network: it grows past the stores that it replaces.
MAX_STREAMS = 16


def shuffle_network(streams: list[Expr], lanes: int) -> list[Expr]:
    """Interleave vectors of `lanes` elements; element ``e`` of the result is element ``e // n`` of stream ``e % n``."""
    count = len(streams)
    if count == 1:
        return streams
    if count % 2 == 0:
        even, odd = shuffle_network(streams[0::2], lanes), shuffle_network(streams[1::2], lanes)
        merged: list[Expr] = []
        for first, second in zip(even, odd, strict=True):
            for half in (0, lanes // 2):
                merged.append(_shuffle(first, second, [half + i // 2 + (i % 2) * lanes for i in range(lanes)]))
        return merged
    merged = []
    for vector in range(count):
        places = [divmod(vector * lanes + i, count) for i in range(lanes)]
        value = streams[0]
        for number, stream in enumerate(streams[1:], start=1):
            # A lane that is already right stays, one of this stream is fetched; lane 0 of stream 0 must be moved first.
            take = [
                lanes + lane if source == number else (i if number > 1 or source != 0 else lane)
                for i, (lane, source) in enumerate(places)
            ]
            value = _shuffle(value, stream, take)
        merged.append(value)
    return merged


def _int64(value: int) -> IntImm:
    return IntImm("int64", value)


def _shuffle(first: Expr, second: Expr, indices: list[int]) -> Expr:
    return tirx.Shuffle([first, second], [tirx.const(index, "int32") for index in indices])


@cache
def interleave_intrinsic(stride: int, minor: int, lanes: int, dtype: str, scope: str) -> str:
    """Register the intrinsic for chunks of ``[stride * minor, lanes]`` elements of `dtype`; returns its name.

    The result, in memory of `scope`, is ``[lanes * stride, minor]``: positions, and the channels of a position where
    those are last.
    """
    name = f"tvm_deconv.interleave_{stride}x{minor}x{lanes}_{dtype}_{scope}"
    streams, places = stride * minor, lanes * stride

    def function(vectors: bool) -> PrimFunc:
        with IRBuilder() as builder, B.prim_func(s_tir=True):
            B.func_name("interleave")
            rows = B.arg("rows", B.buffer((streams, lanes), dtype, offset_factor=1, align=1))
            chunk = B.arg("chunk", B.buffer((places, minor), dtype, scope=scope, offset_factor=1, align=1))
            with B.sblock("root"):
                B.reads(rows[0:streams, 0:lanes])
                B.writes(chunk[0:places, 0:minor])
                if vectors:
                    loaded = [rows.vload([_int64(stream), _int64(0)], f"{dtype}x{lanes}") for stream in range(streams)]
                    for vector, value in enumerate(shuffle_network(loaded, lanes)):
                        # A vector may run over the end of a place: places follow each other without a gap.
                        place, channel = divmod(vector * lanes, minor)
                        B.buffer_store(chunk, value, [_int64(place), tirx.Ramp(_int64(channel), _int64(1), lanes)])
                else:
                    with B.grid(_int64(places), _int64(minor)) as (i, j), B.sblock("move"):
                        place = B.axis.spatial(_int64(places), i)
                        # An axis of extent one is no axis any more where the description is compared.
                        channel = B.axis.spatial(_int64(minor), j) if minor > 1 else _int64(0)
                        source = (place % stride * minor + channel, place // stride)
                        B.reads(rows[source])
                        B.writes(chunk[place, channel])
                        B.buffer_store(chunk, rows[source], [place, channel])
        return builder.get()

    TensorIntrin.register(name, function(vectors=False), function(vectors=True), override=True)
    return name


@cache
def transpose_intrinsic(lanes: int, dtype: str) -> str:
    """Register the intrinsic that transposes ``[lanes, lanes]`` elements of `dtype`, both with rows some way apart."""
    name = f"tvm_deconv.transpose_{lanes}_{dtype}"

    def function(vectors: bool) -> PrimFunc:
        with IRBuilder() as builder, B.prim_func(s_tir=True):
            B.func_name("transpose")
            source, rows = (
                B.arg(
                    name,
                    B.buffer(
                        (lanes, lanes),
                        dtype,
                        strides=[tirx.Var(f"{name}_pitch", "int64"), _int64(1)],
                        offset_factor=1,
                        align=1,
                    ),
                )
                for name in ("source", "rows")
            )
            with B.sblock("root"):
                B.reads(source[0:lanes, 0:lanes])
                B.writes(rows[0:lanes, 0:lanes])
                if vectors:
                    loaded = [source.vload([_int64(row), _int64(0)], f"{dtype}x{lanes}") for row in range(lanes)]
                    for row, value in enumerate(shuffle_network(loaded, lanes)):
                        B.buffer_store(rows, value, [_int64(row), tirx.Ramp(_int64(0), _int64(1), lanes)])
                else:
                    with B.grid(_int64(lanes), _int64(lanes)) as (i, j), B.sblock("move"):
                        row, column = B.axis.spatial(_int64(lanes), i), B.axis.spatial(_int64(lanes), j)
                        B.reads(source[column, row])
                        B.writes(rows[row, column])
                        B.buffer_store(rows, source[column, row], [row, column])
        return builder.get()

    TensorIntrin.register(name, function(vectors=False), function(vectors=True), override=True)
    return name
