"""Products of matrices by AMX: its tiles are 16 rows of 16 words, and hold sums, data or a part of the filter.

TVM knows no tiles. A schedule marks the loops of a register tile that clear its sums, multiply, and store the sums, and
`lower_matrices` replaces them by calls of functions in LLVM IR, which are made here. Tiles keep their values
from call to call: nothing else on the thread uses them between the first call of a task and its last.

The left factor has 16 rows of words, the right one 16 vectors. In the matrix definition the rows are positions, and the
vectors the filter's columns. In the direct one, whose vectors are positions, the rows are output channels.

One core of a server with AMX (Sapphire Rapids and later) multiplies a pair of tiles in 16 cycles, 3.7 TFLOP/s of
bfloat16 where multiply-adds of float32 reach 0.24. Two by two tiles of sums, with two of data and two of the filter,
are all eight that there are, and hide the latency of products as well as the loads of operands.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from tvm import tirx
from tvm.ir import Expr
from tvm.s_tir import SBlock, SBlockRealize, Schedule
from tvm.s_tir.schedule import LoopRV
from tvm.sym import Analyzer
from tvm.tirx import Buffer, BufferLoad, Evaluate, For, ForKind, PrimFunc, SeqStmt, Stmt, Var

from tvm_deconv.compute.storage import filter_storage
from tvm_deconv.compute.words import Words
from tvm_deconv.problem import Problem
from tvm_deconv.schedules.x86.statements import loops_and_block, outside_of, rewritten, with_body
from tvm_deconv.schedules.x86.stores import Row, Span, import_functions
from tvm_deconv.targets import CpuTarget

#: Rows of a tile, and words of each.
MATRIX_ROWS = 16
#: Register tiles, as tiles of the left factor by tiles of the right one: sums and operands are all in eight tiles.
REGISTER_TILES = ((1, 1), (2, 1), (3, 1), (4, 1), (1, 2), (2, 2), (1, 3))
#: Cycles of a product, until its sums can be used, and of a load of a tile from the first-level cache: of one whose
#: rows are lines, and of one whose rows lie across two.
PRODUCT_CYCLES, PRODUCT_LATENCY, LOAD_CYCLES, CROSSING_CYCLES = 16, 52, 8, 24
#: Bytes of a tile, and the products of words in a cycle, relative to those of two vectors.
MATRIX_TILE_BYTES, MATRIX_RATE = 4 * MATRIX_ROWS**2, MATRIX_ROWS**2 // (2 * MATRIX_ROWS)
#: Bytes per cycle of tiles from the second-level cache, and of those of a filter that is read in order.
MATRIX_BYTES, STREAM_BYTES = 32, 48
#: Cycles to clear and store a tile of sums, and to gather a vector of a row beyond those beside slower products.
SUM_CYCLES, GATHER_CYCLES = 20, 8

#: What differs of the results: factors of more bits than bfloat16 are cut into parts of it.
CAVEAT = "denormal factors and sums count as zero; an infinity becomes NaN, except of bfloat16"

#: Numbers of cycles, one or those of a table.
Cycles: TypeAlias = float | NDArray[Any]

_MARK = "tvm_deconv.amx"
_CLEAR, _MULTIPLY, _STORE = "clear", "multiply", "store"
_PREFIX = "tvm_deconv_amx"
#: All tiles that there are.
_TILES = 8
#: The numbers of bfloat16, of 8 bits each, that hold all bits of a factor.
_PARTS = {"float32": 3, "float16": 2, "bfloat16": 1}


def matrix_words(problem: Problem, target: CpuTarget, *, filter_left: bool = False) -> Words | None:
    """Return the words whose matrices `target` multiplies for `problem`; None if it multiplies none.

    The left factor is the data, or the filter if `filter_left`.
    """
    if problem.accumulate_dtype == "float32" and {"amx_tile", "amx_bf16"} <= target.features:
        return Words("tdpbf16ps", 2, depth=MATRIX_ROWS, parts=_PARTS[problem.dtype])
    bytes_of_both = problem.dtype in ("int8", "uint8") and filter_storage(problem) in ("int8", "uint8")
    if bytes_of_both and {"amx_tile", "amx_int8"} <= target.features:
        signs = ["u" if dtype == "uint8" else "s" for dtype in (problem.dtype, problem.filter_dtype)]
        left, right = reversed(signs) if filter_left else signs
        return Words(f"tdpb{left}{right}d", 4, depth=MATRIX_ROWS)
    return None


def step_cycles(words: Words, sums: Cycles, loads: Cycles, fetch: Cycles) -> Cycles:
    """Return the cycles of a step of so many tiles of `sums`, whose `loads` take as long as given.

    `fetch` are the cycles in which what is far comes from the second-level cache. This and the loads hide half of the
    shorter of the two; loads of parts, which come again and again, wait for it.
    """
    products, loads = words.uses * PRODUCT_CYCLES * sums, words.uses * loads
    hidden = 0.0 if words.cut else np.minimum(loads, fetch) / 2
    return np.maximum(np.maximum(products, words.uses * PRODUCT_LATENCY), loads + fetch - hidden)


def mark_matrices(sch: Schedule, clear: LoopRV, multiply: LoopRV, store: LoopRV) -> None:
    """Mark the outermost loops that clear the sums of a register tile, multiply, and store the sums.

    The first of the loops runs over rows, the others over columns; those that multiply run over the words of a step
    last, and over the products of parts, if there are several, first.
    """
    for loop, name in ((clear, _CLEAR), (multiply, _MULTIPLY), (store, _STORE)):
        sch.annotate(loop, _MARK, name)


def lower_matrices(func: PrimFunc, words: Words) -> PrimFunc:
    """Return the lowered `func` with marked loops as calls for their register tiles.

    Each task sets up its tiles, and releases them at its end, as other libraries on the same thread expect.
    """
    shapes: set[tuple[int, int]] = set()

    def lowered(stmt: Stmt) -> Stmt | None:
        if not isinstance(stmt, For):
            return None
        if _MARK in stmt.annotations:
            call, shape = _call(stmt, str(stmt.annotations[_MARK]), words, func.params[1])
            shapes.add(shape)
            return call
        if stmt.kind != ForKind.PARALLEL:
            return None
        begin, end = (Evaluate(tirx.call_extern("int32", f"{_PREFIX}_{name}")) for name in ("begin", "end"))
        return with_body(stmt, SeqStmt([begin, rewritten(stmt.body, lowered), end]))

    func = func.with_body(rewritten(func.body, lowered))
    functions = [*_common_functions(words), *(line for shape in sorted(shapes) for line in _functions(words, *shape))]
    return import_functions(func, "".join(functions))


def _call(stmt: For, name: str, words: Words, packed_filter: Buffer) -> tuple[Stmt, tuple[int, int]]:
    """Return the call that replaces the marked loops of `stmt`, and the tiles of rows and of columns in these."""
    loops, realize = loops_and_block(stmt)
    multiplies = name == _MULTIPLY
    rows, *columns = loops[multiplies and words.cut : -1 if multiplies else None]
    heights, vectors = int(rows.extent) // MATRIX_ROWS, math.prod(int(loop.extent) for loop in columns) // MATRIX_ROWS
    function = f"{_PREFIX}_{name}_{heights}x{vectors}"
    if name == _CLEAR:
        return Evaluate(tirx.call_extern("int32", function)), (heights, vectors)

    store, row = realize.block.body, Row.of(loops)
    operands = [(rows, store.buffer, store.indices)]
    if multiplies:
        left, right = store.value.b.args[1:]
        operands = [(rows, left.source, left.indices), (loops[-1], right.source, right.indices)]
    addresses, regions = [], []
    for loop, buffer, indices in operands:
        places = outside_of(realize, indices)
        span = Span.of(buffer, places, row)
        regions.append(span.region)
        seconds = [{loop.loop_var: 1}]
        if multiplies and words.cut:
            # The first product that takes the second part: the data's parts come in succession.
            seconds.append({loops[0].loop_var: words.parts if buffer.same_as(packed_filter) else 1})
        # The call names the last element too: TVM shrinks a stage to the elements that it sees used.
        addresses += [span.address(), *(_address(buffer, places, loops, second) for second in seconds)]
        addresses.append(span.last_address())
    reads, writes = (regions, []) if multiplies else ([], regions)
    call = Evaluate(tirx.call_extern("int32", function, *addresses))
    return SBlockRealize([], tirx.const(1, "bool"), SBlock([], reads, writes, name, call)), (heights, vectors)


def _address(buffer: Buffer, places: Sequence[Expr], loops: Sequence[For], iterations: Mapping[Var, int]) -> Expr:
    """Return the address of an element of `buffer` at the first iteration of `loops`, but for those given."""
    at = Analyzer()
    for loop in loops:
        at.bind(loop.loop_var, loop.min + iterations.get(loop.loop_var, 0))
    return tirx.address_of(BufferLoad(buffer, [at.simplify(place) for place in places]))


def _common_functions(words: Words) -> Iterator[str]:
    """Yield the functions of all register tiles in LLVM IR, and the declarations of instructions."""
    yield _configuration()
    yield from _function("begin", [], [f"call void @llvm.x86.ldtilecfg(ptr @{_PREFIX}_configuration)"])
    yield from _function("end", [], ["call void @llvm.x86.tilerelease()"])
    for name in ("tileloadd64", "tilestored64"):
        yield f"declare void @llvm.x86.{name}(i8 immarg, ptr, i64)\n"
    yield "declare void @llvm.x86.ldtilecfg(ptr)\ndeclare void @llvm.x86.tilerelease()\n"
    yield "declare void @llvm.x86.tilezero(i8 immarg)\n"
    yield f"declare void @llvm.x86.{words.name}(i8 immarg, i8 immarg, i8 immarg)\n"


def _functions(words: Words, heights: int, vectors: int) -> Iterator[str]:
    """Yield the functions of a register tile in LLVM IR.

    Tiles of sums come first, then those of the right factor, then of the left one. Of each operand there are the
    addresses of its first row, of its second, of its second part if there are several, and of its last element.
    """
    suffix = f"_{heights}x{vectors}"
    yield from _function(
        _CLEAR + suffix, [], [f"call void @llvm.x86.tilezero(i8 {number})" for number in range(heights * vectors)]
    )
    yield from _function(_MULTIPLY + suffix, ["row", "panel"], _products(words, heights, vectors), cut=words.cut)
    lines = _pitch("row", "next")
    for number in range(heights * vectors):
        height, vector = divmod(number, vectors)
        lines.append(f"%below{number} = mul i64 %row_next_pitch, {MATRIX_ROWS * height}")
        lines.append(f"%skipped{number} = add i64 %below{number}, {4 * MATRIX_ROWS * vector}")
        lines += _move("tilestored64", number, "row", f"%skipped{number}")
    yield from _function(_STORE + suffix, ["row"], lines)


def _products(words: Words, heights: int, vectors: int) -> list[str]:
    """Return the lines that multiply a step; the right factor's tiles, which may be slow to load, are loaded once."""
    sums, lines = heights * vectors, [*_pitch("row", "next"), *_pitch("panel", "next")]
    left = sums + vectors
    if words.cut:
        lines += [*_pitch("row", "part"), *_pitch("panel", "part")]
    for one, other in words.products:
        if one == 0:
            for vector in range(vectors):
                lines += _move("tileloadd64", sums + vector, "panel", f"{4 * MATRIX_ROWS * vector}", other)
        for height in range(heights):
            factor, skipped = left + height % (_TILES - left), f"%skipped{height}.{one}.{other}"
            lines += [f"{skipped} = mul i64 %row_next_pitch, {MATRIX_ROWS * height}"]
            lines += _move("tileloadd64", factor, "row", skipped, one)
            for vector in range(vectors):
                product = f"i8 {height * vectors + vector}, i8 {factor}, i8 {sums + vector}"
                lines.append(f"call void @llvm.x86.{words.name}({product})")
    return lines


def _configuration() -> str:
    """Return the constant that sets up all tiles: a palette, the bytes of a row of each, and their rows."""
    tiles = struct.pack("<2B14x16H16B", 1, 0, *[4 * MATRIX_ROWS] * _TILES, *[0] * 8, *[MATRIX_ROWS] * _TILES, *[0] * 8)
    text = "".join(f"\\{byte:02X}" for byte in tiles)
    return f'@{_PREFIX}_configuration = linkonce_odr hidden constant [{len(tiles)} x i8] c"{text}", align 64\n'


def _function(name: str, operands: Sequence[str], lines: Sequence[str], *, cut: bool = False) -> Iterator[str]:
    """Yield a function of the addresses of `operands`, and of their second parts if they are `cut`."""
    kinds = ["", "_next", *(["_part"] if cut else []), "_end"]
    parameters = ", ".join(f"ptr %{operand}{kind}" for operand in operands for kind in kinds)
    yield f"define hidden i32 @{_PREFIX}_{name}({parameters}) alwaysinline {{\n"
    yield from (f"  {line}\n" for line in lines)
    yield "  ret i32 0\n}\n"


def _pitch(operand: str, other: str) -> list[str]:
    """Return the lines that compute the bytes from the first row of an operand to the `other`."""
    name = f"%{operand}_{other}"
    return [
        f"{name}_first = ptrtoint ptr %{operand} to i64",
        f"{name}_second = ptrtoint ptr {name} to i64",
        f"{name}_pitch = sub i64 {name}_second, {name}_first",
    ]


def _move(instruction: str, tile: int, operand: str, offset: str, part: int = 0) -> list[str]:
    """Return the lines that load or store a `tile` of an operand's `part` that begins after `offset` bytes."""
    address, begin, lines = f"%{operand}{tile}.{offset.removeprefix('%')}.{part}", f"%{operand}", []
    if part:
        begin = f"{address}.begin"
        lines.append(f"{begin}s = mul i64 %{operand}_part_pitch, {part}")
        lines.append(f"{begin} = getelementptr i8, ptr %{operand}, i64 {begin}s")
    return [
        *lines,
        f"{address} = getelementptr i8, ptr {begin}, i64 {offset}",
        f"call void @llvm.x86.{instruction}(i8 {tile}, ptr {address}, i64 %{operand}_next_pitch)",
    ]
