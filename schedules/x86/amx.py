"""Products of matrices by AMX: its tiles are 16 rows of 16 words, and hold sums, data or a part of the filter.

TVM knows no tiles. A schedule marks the loops of a register tile that clear its sums, multiply, and store the sums, and
`lower_matrices` replaces them by calls of functions in LLVM's language, which are made here. Tiles keep their values
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
from collections.abc import Iterator, Sequence

from tvm import tirx
from tvm.s_tir import SBlock, SBlockRealize, Schedule
from tvm.s_tir.schedule import LoopRV
from tvm.sym import Analyzer
from tvm.tirx import BufferLoad, Evaluate, For, ForKind, PrimFunc, SeqStmt, Stmt

from tvm_deconv.compute.storage import filter_storage
from tvm_deconv.compute.words import Words
from tvm_deconv.problem import Problem
from tvm_deconv.schedules.x86.loop_marks import loops_and_block, outside_of, rewritten, with_body
from tvm_deconv.schedules.x86.stores import Row, Span, import_functions
from tvm_deconv.targets import CpuTarget

#: Rows of a tile, and words of each.
MATRIX_ROWS = 16
#: Register tiles, as tiles of the left factor by tiles of the right one: sums and operands are all in eight tiles.
REGISTER_TILES = ((1, 1), (2, 1), (3, 1), (4, 1), (1, 2), (2, 2), (1, 3))
#: Cycles of a product, until its sums can be used, and of a load of a tile from the first-level cache: of one whose
#: rows are lines, and of one whose rows lie across two.
PRODUCT_CYCLES, PRODUCT_LATENCY, LOAD_CYCLES, CROSSING_CYCLES = 16, 52, 8, 32
#: Bytes of a tile, and the products of words in a cycle, relative to those of two vectors.
MATRIX_TILE_BYTES, MATRIX_RATE = 4 * MATRIX_ROWS**2, MATRIX_ROWS**2 // (2 * MATRIX_ROWS)
#: Bytes per cycle of tiles from the second-level cache, and of those of a filter that is read in order.
MATRIX_BYTES, STREAM_BYTES = 32, 64
#: Cycles to clear and store a tile of sums in the direct definition.
SUM_CYCLES = 20
#: Cycles to clear and store a tile of sums in the matrix definition, and to gather a vector of a row beyond those
#: beside slower products.
RESULT_CYCLES, GATHER_CYCLES = 40, 4

_MARK = "tvm_deconv.amx"
_CLEAR, _MULTIPLY, _STORE = "clear", "multiply", "store"
_PREFIX = "tvm_deconv_amx"
#: All tiles that there are.
_TILES = 8


def matrix_words(problem: Problem, target: CpuTarget, *, filter_left: bool = False) -> Words | None:
    """Return the words whose matrices `target` multiplies for `problem`; None if it multiplies none.

    The left factor is the data, or the filter if `filter_left`.
    """
    if problem.dtype == "bfloat16" and {"amx_tile", "amx_bf16"} <= target.features:
        return Words("tdpbf16ps", 2, depth=MATRIX_ROWS)
    bytes_of_both = problem.dtype in ("int8", "uint8") and filter_storage(problem) in ("int8", "uint8")
    if bytes_of_both and {"amx_tile", "amx_int8"} <= target.features:
        signs = ["u" if dtype == "uint8" else "s" for dtype in (problem.dtype, problem.filter_dtype)]
        left, right = reversed(signs) if filter_left else signs
        return Words(f"tdpb{left}{right}d", 4, depth=MATRIX_ROWS)
    return None


def mark_matrices(sch: Schedule, clear: LoopRV, multiply: LoopRV, store: LoopRV) -> None:
    """Mark the outermost loops that clear the sums of a register tile, multiply, and store the sums.

    The first of the loops runs over rows, the others over columns; those that multiply run over the words of a step
    last.
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
            call, shape = _call(stmt, str(stmt.annotations[_MARK]))
            shapes.add(shape)
            return call
        if stmt.kind != ForKind.PARALLEL:
            return None
        begin, end = (Evaluate(tirx.call_extern("int32", f"{_PREFIX}_{name}")) for name in ("begin", "end"))
        return with_body(stmt, SeqStmt([begin, rewritten(stmt.body, lowered), end]))

    func = func.with_body(rewritten(func.body, lowered))
    functions = [*_common_functions(words), *(line for shape in sorted(shapes) for line in _functions(words, *shape))]
    return import_functions(func, "".join(functions))


def _call(stmt: For, name: str) -> tuple[Stmt, tuple[int, int]]:
    """Return the call that replaces the marked loops of `stmt`, and the tiles of rows and of columns in these."""
    loops, realize = loops_and_block(stmt)
    columns = loops[1:-1] if name == _MULTIPLY else loops[1:]
    heights, vectors = (math.prod(int(loop.extent) for loop in nest) // MATRIX_ROWS for nest in (loops[:1], columns))
    function = f"{_PREFIX}_{name}_{heights}x{vectors}"
    if name == _CLEAR:
        return Evaluate(tirx.call_extern("int32", function)), (heights, vectors)

    store, row = realize.block.body, Row.of(loops)
    operands = [(loops[0], store.buffer, store.indices)]
    if name == _MULTIPLY:
        left, right = store.value.b.args[1:]
        operands = [(loops[0], left.source, left.indices), (loops[-1], right.source, right.indices)]
    addresses, regions = [], []
    for loop, buffer, indices in operands:
        places = outside_of(realize, indices)
        span = Span.of(buffer, places, row)
        regions.append(span.region)
        second = Analyzer()
        for other in loops:
            second.bind(other.loop_var, other.min + int(other is loop))
        next_row = tirx.address_of(BufferLoad(buffer, [second.simplify(at) for at in places]))
        # The call names the last element too: TVM shrinks a stage to the elements that it sees used.
        addresses += [span.address(), next_row, span.last_address()]
    reads, writes = (regions, []) if name == _MULTIPLY else ([], regions)
    call = Evaluate(tirx.call_extern("int32", function, *addresses))
    return SBlockRealize([], tirx.const(1, "bool"), SBlock([], reads, writes, name, call)), (heights, vectors)


def _common_functions(words: Words) -> Iterator[str]:
    """Yield the functions of all register tiles in LLVM IR, and the declarations of instructions."""
    yield _configuration()
    yield from _function("begin", "", [f"call void @llvm.x86.ldtilecfg(ptr @{_PREFIX}_configuration)"])
    yield from _function("end", "", ["call void @llvm.x86.tilerelease()"])
    for name in ("tileloadd64", "tilestored64"):
        yield f"declare void @llvm.x86.{name}(i8 immarg, ptr, i64)\n"
    yield "declare void @llvm.x86.ldtilecfg(ptr)\ndeclare void @llvm.x86.tilerelease()\n"
    yield "declare void @llvm.x86.tilezero(i8 immarg)\n"
    yield f"declare void @llvm.x86.{words.name}(i8 immarg, i8 immarg, i8 immarg)\n"


def _functions(words: Words, heights: int, vectors: int) -> Iterator[str]:
    """Yield the functions of a register tile in LLVM IR.

    Tiles of sums come first, then those of the right factor, then of the left one. Of each operand there are the
    addresses of its first row, of its second, and of its last element.
    """
    suffix = f"_{heights}x{vectors}"
    sums, left = heights * vectors, heights * vectors + vectors
    yield from _function(_CLEAR + suffix, "", [f"call void @llvm.x86.tilezero(i8 {number})" for number in range(sums)])
    lines = [*_pitch("row"), *_pitch("panel")]
    for vector in range(vectors):
        lines += _move("tileloadd64", sums + vector, "panel", f"{4 * MATRIX_ROWS * vector}")
    for height in range(heights):
        factor = left + height % (_TILES - left)
        lines += [f"%skipped{height} = mul i64 %row_pitch, {MATRIX_ROWS * height}"]
        lines += _move("tileloadd64", factor, "row", f"%skipped{height}")
        for vector in range(vectors):
            product = f"i8 {height * vectors + vector}, i8 {factor}, i8 {sums + vector}"
            lines.append(f"call void @llvm.x86.{words.name}({product})")
    yield from _function(
        _MULTIPLY + suffix, "ptr %row, ptr %row_next, ptr %row_end, ptr %panel, ptr %panel_next, ptr %panel_end", lines
    )
    lines = _pitch("row")
    for height in range(heights):
        for vector in range(vectors):
            number = height * vectors + vector
            lines.append(f"%below{number} = mul i64 %row_pitch, {MATRIX_ROWS * height}")
            lines.append(f"%skipped{number} = add i64 %below{number}, {4 * MATRIX_ROWS * vector}")
            lines += _move("tilestored64", number, "row", f"%skipped{number}")
    yield from _function(_STORE + suffix, "ptr %row, ptr %row_next, ptr %row_end", lines)


def _configuration() -> str:
    """Return the constant that sets up all tiles: a palette, the bytes of a row of each, and their rows."""
    tiles = struct.pack("<2B14x16H16B", 1, 0, *[4 * MATRIX_ROWS] * _TILES, *[0] * 8, *[MATRIX_ROWS] * _TILES, *[0] * 8)
    text = "".join(f"\\{byte:02X}" for byte in tiles)
    return f'@{_PREFIX}_configuration = linkonce_odr hidden constant [{len(tiles)} x i8] c"{text}", align 64\n'


def _function(name: str, parameters: str, lines: Sequence[str]) -> Iterator[str]:
    yield f"define hidden i32 @{_PREFIX}_{name}({parameters}) alwaysinline {{\n"
    yield from (f"  {line}\n" for line in lines)
    yield "  ret i32 0\n}\n"


def _pitch(operand: str) -> list[str]:
    """Return the lines that compute the bytes from one row of an operand to the next."""
    return [
        f"%{operand}_first = ptrtoint ptr %{operand} to i64",
        f"%{operand}_second = ptrtoint ptr %{operand}_next to i64",
        f"%{operand}_pitch = sub i64 %{operand}_second, %{operand}_first",
    ]


def _move(instruction: str, tile: int, operand: str, offset: str) -> list[str]:
    """Return the lines that load or store a `tile` of an operand that begins after `offset` bytes."""
    address = f"%{operand}{tile}.{offset.removeprefix('%')}"
    return [
        f"{address} = getelementptr i8, ptr %{operand}, i64 {offset}",
        f"call void @llvm.x86.{instruction}(i8 {tile}, ptr {address}, i64 %{operand}_pitch)",
    ]
