"""The instructions that TVM has no function for here, as CUDA functions with PTX: of warps, and asynchronous copies.

Their text is `warp.cu`. Layouts are those of the PTX manual. Of a tile of 8x8 elements of 16 bits, lane l holds row
``l/4``, columns ``2*(l%4)`` and the next, in one register; with ``.trans`` it holds the transposed tile so. Operand A
of m16n8k16 is four such tiles (rows 0-7 and 8-15 of k 0-7, then of k 8-15). B is two of its transposed tiles (k 0-7, k
8-15), and C is two of pairs of floats. m16n8k8 of TF32 has single elements of 32 bits in the place of pairs. m16n8k32
of bytes has four of them, which are terms that follow each other in B, too.

``cp.async`` copies to shared memory while the thread goes on. The copies begun before a commit are a group. Waiting for
all groups but the latest few, and then a barrier, make the copies visible to the block.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from string import Template

from tvm import tirx
from tvm.backend.cuda.op import cuda_func_call
from tvm.ir import Expr, PointerType
from tvm.script.ir_builder import tirx as build

from tvm_deconv.compute.indexing import Index
from tvm_deconv.schedules.cuda.emit import Rounding, as_it_is

_TEMPLATES = Path(__file__).with_suffix(".cu")
#: Terms of one mma by the type that it multiplies.
MMA_TERMS = {"float16": 16, "bfloat16": 16, "tf32": 8, "int8": 32, "uint8": 32}
_MMA_TYPES = {"float16": "f16", "bfloat16": "bf16", "tf32": "tf32", "int8": "s8", "uint8": "u8"}
_SIZES = {"float16": 2, "uint16": 2, "float32": 4}
#: Of tensor maps, as the driver numbers them: swizzles of lines by their bytes, and 256 bytes to the level-2 cache at a
#: time.
_SWIZZLES, _PROMOTION = {128: 3, 64: 2, 32: 1, 16: 0}, 3
_ELEMENTS = {1: "unsigned char", 2: "unsigned short", 4: "unsigned", 8: "uint2", 16: "uint4"}


@cache
def _templates() -> dict[str, Template]:
    """Return the templates of `warp.cu` by name."""
    _, *parts = re.split(r"^// ---- (\w+)\n", _TEMPLATES.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {name: Template(f"\n{text.strip()}\n") for name, text in zip(parts[::2], parts[1::2], strict=True)}


def _source(template: str, **values: object) -> str:
    """Return the text of a device function."""
    return _templates()[template].substitute(values)


def _address(buffer: Expr, at: Expr | int) -> Expr:
    return tirx.address_of(buffer[at])


def ldmatrix(registers: Expr, at: Expr, count: int, memory: Expr, row: Expr, *, transposed: bool) -> None:
    """Load `count` tiles, rows of 16 bytes, to `registers` from `at` on; lane l points to row l%8 of tile l/8."""
    suffix = "_trans" if transposed else ""
    source = _source(
        "ldmatrix",
        count=count,
        suffix=suffix,
        modifier=".trans" if transposed else "",
        places=", ".join(f"%{i}" for i in range(count)),
        outputs=", ".join(f'"=r"(r[{i}])' for i in range(count)),
    )
    operands = _address(registers, at), _address(memory, row)
    build.evaluate(cuda_func_call(f"tvm_deconv_ldmatrix_x{count}{suffix}", *operands, source_code=source))


def mma(
    kind: str, sums: Expr, c: Expr, a_registers: Expr, a: Expr, b_registers: Expr, b: Expr, of_b: str | None = None
) -> None:
    """Add the product of an operand of type `kind` and one of the same or `of_b` to four of the `sums`, from `c` on."""
    type_a, type_b = _MMA_TYPES[kind], _MMA_TYPES[of_b or kind]
    name = type_a if type_a == type_b else f"{type_a}_{type_b}"
    operands = _address(sums, c), _address(a_registers, a), _address(b_registers, b)
    number = ("s32", "int", "r") if kind in ("int8", "uint8") else ("f32", "float", "f")
    of_sums = dict(zip(("sum", "number", "register"), number, strict=True))
    source = _source("mma", name=name, terms=MMA_TERMS[kind], a=type_a, b=type_b, **of_sums)
    build.evaluate(cuda_func_call(f"tvm_deconv_mma_{name}", *operands, source_code=source))


def tf32(value: Expr) -> Expr:
    """Return a float32 `value` rounded to TF32: to the nearest, ties away from zero."""
    return cuda_func_call("tvm_deconv_tf32", value, source_code=_source("tf32"), return_type="float32")


def high(value: Expr) -> Expr:
    """Return a float32 `value` rounded to TF32, or 0.5 or 1 with its sign if it is infinite, NaN or all but infinite.

    The product of two numbers is that of their high parts, and of each one's high with the other's `low`. Infinity is
    in the low part alone, so that it meets no zero but where the other number is zero.
    """
    return cuda_func_call("tvm_deconv_high", value, source_code=_source("high"), return_type="float32")


def low(value: Expr, high_part: Expr) -> Expr:
    """Return what `high_part` leaves of a float32 `value`, cut off to TF32: a bit of the last place at most."""
    return cuda_func_call("tvm_deconv_low", value, high_part, source_code=_source("low"), return_type="float32")


def roundings_of(*, single: bool, triple: bool) -> Sequence[Rounding]:
    """Return how elements of the filter are packed: in two parts if each product is `triple`, rounded if `single`."""
    if triple:
        return [high, lambda element: low(element, high(element))]
    return [tf32] if single else [as_it_is]


def copy(
    size: int,
    memory: Expr,
    to: Expr | int,
    element: Expr,
    conditions: Sequence[Expr],
    *,
    again: bool = False,
    fill: Expr | None = None,
) -> None:
    """Begin to copy `size` bytes from `element` on to shared memory; copy zeros unless all `conditions` hold.

    Addresses are multiples of `size`: 4, 8 or 16. The nearest cache keeps what is to be read `again`, and all that is
    less than 16 bytes. With a `fill` words of this are stored in the place of zeros, at once.
    """
    suffix = "_again" if again else ""
    cache = "cg" if size == 16 and not again else "ca"
    exists = tirx.all(*conditions) if conditions else tirx.const(True, "bool")
    operands = [_address(memory, to), tirx.address_of(element), exists]
    if fill is None:
        source = _source("copy", size=size, suffix=suffix, cache=cache)
    else:
        suffix = f"_or_fill{suffix}"
        operands.append(fill)
        vector, words = {4: ("", "%3"), 8: (".v2", "{%3, %3}"), 16: (".v4", "{%3, %3, %3, %3}")}[size]
        source = _source("copy_or_fill", size=size, suffix=suffix, cache=cache, vector=vector, words=words)
    build.evaluate(cuda_func_call(f"tvm_deconv_copy{size}{suffix}", *operands, source_code=source))


def copy_by_elements(
    size: int,
    each: int,
    memory: Expr,
    to: Expr | int,
    element: Expr,
    conditions: Sequence[Expr],
    *,
    fill: Expr | None = None,
) -> None:
    """Copy `size` bytes of elements of `each`, at any address, before the thread goes on; see `copy`."""
    names = {"element": _ELEMENTS[each], "whole": _ELEMENTS[size]}
    source = _source("copy_by_elements", size=size, each=each, count=size // each, **names)
    exists = tirx.all(*conditions) if conditions else tirx.const(True, "bool")
    operands = _address(memory, to), tirx.address_of(element), exists, 0 if fill is None else fill
    build.evaluate(cuda_func_call(f"tvm_deconv_copy{size}_by{each}", *operands, source_code=source))


def four_times(byte: Expr) -> Expr:
    """Return a word of four bytes that are alike."""
    return byte.astype("uint8").astype("uint32") * tirx.const(0x01010101, "uint32")


def commit() -> None:
    """Make a group of the copies that were begun since the last one."""
    build.evaluate(cuda_func_call("tvm_deconv_commit", source_code=_source("commit")))


def wait(left: int) -> None:
    """Wait for the thread's groups of copies, all but the latest `left`."""
    build.evaluate(cuda_func_call(f"tvm_deconv_wait{left}", source_code=_source("wait", left=left)))


def _call(template: str, *operands: Expr | int, **values: object) -> None:
    """Call a function of the device without a result, whose name is its template's."""
    build.evaluate(cuda_func_call(f"tvm_deconv_{template}", *operands, source_code=_source(template, **values)))


def forget(thread: Expr) -> None:
    """Make nvcc forget what it knows of the thread's number but its range.

    Else it computes addresses of the output before the products, and keeps them in registers meanwhile.
    """
    _call("forget", thread)


def init(memory: Expr, barrier: Expr, arrivals: int) -> None:
    """Make 8 bytes of shared memory an mbarrier, each phase of which `arrivals` threads complete."""
    _call("init", _address(memory, barrier), arrivals)


def arrive(memory: Expr, barrier: Expr) -> None:
    """Arrive at a barrier."""
    _call("arrive", _address(memory, barrier))


def arrive_at(memory: Expr, barrier: Expr, block: Index) -> None:
    """Arrive at the barrier that is at the same place in the memory of a block of the cluster, by its number."""
    _call("arrive_at", _address(memory, barrier), block)


def take(registers: Expr, to: int, memory: Expr, at: Index, block: Index) -> None:
    """Load four floats to `registers` from `to` on, of what is at a place in the memory of a block of the cluster."""
    _call("take", _address(registers, to), _address(memory, at), block)


def meet(blocks: int) -> None:
    """Wait for all threads of the `blocks` of a cluster, and for what they did to each other's memory.

    `lower.source` declares clusters of so many blocks by this.
    """
    source = _source("meet", blocks=blocks)
    build.evaluate(cuda_func_call(f"tvm_deconv_meet{blocks}", source_code=source))


def expect(memory: Expr, barrier: Expr, size: int) -> None:
    """Arrive at a barrier, whose phase so many loaded bytes complete too."""
    _call("expect", _address(memory, barrier), size)


def wait_phase(memory: Expr, barrier: Expr, parity: Expr) -> None:
    """Wait until the phase of that parity is complete; the one before the first counts as complete."""
    _call("wait_phase", _address(memory, barrier), parity)


def publish() -> None:
    """Make what the thread has stored in shared memory visible to wgmma, once others know of it by a barrier."""
    _call("publish")


def encode_map(name: str, buffer: Expr, dtype: str, axes: Sequence[tuple[int, int]], box: Sequence[int]) -> Expr:
    """Have the host encode a map of `buffer` for loads of boxes, whose lines have the swizzle of their length.

    The `axes` are extents, and elements from one to the next: 1 of the first. Lines of a box are of its first axis.
    """
    size, rank = _SIZES[dtype], len(axes)
    tensor_map = tirx.Var(f"{name}_map", PointerType(tirx.TensorMapType()))
    build.bind(build.tvm_stack_alloca("tensormap", 1), var=tensor_map)
    extents, (_, *strides) = zip(*axes, strict=True)
    operands = [tirx.const(value, "int64") for value in (*extents, *(size * stride for stride in strides))]
    operands += [tirx.const(value, "int32") for value in (*box, *[1] * rank)]
    encoded = build.tensormap_encode_tiled(
        tensor_map,
        buffer.data,
        *operands,
        descriptor_dtype=dtype,
        rank=rank,
        swizzle=_SWIZZLES[size * box[0]],
        l2_promotion=_PROMOTION,
    )
    build.evaluate(encoded)
    return tensor_map


def load_box(
    memory: Expr,
    to: Expr,
    tensor_map: Expr,
    barrier: Expr,
    corner: Sequence[Expr | int],
    blocks: Index | None = None,
) -> None:
    """Begin to load a box to shared memory from `corner` on, the fastest axis first, zeros outside of the array.

    The barrier's phase counts its bytes. One thread does that; boxes begin at multiples of 1024. If
    `blocks` are given, a bit each, the box goes to all of these in the cluster, and counts at the barriers of each.
    """
    rank, shared_out = len(corner), blocks is not None
    coordinates, operands = [f"int c{i}" for i in range(rank)], [f'"r"(c{i})' for i in range(rank)]
    if shared_out:
        coordinates, operands = [*coordinates, "int blocks"], [*operands, '"h"((unsigned short)blocks)']
    source = _source(
        "load_box",
        rank=rank,
        suffix="_to" * shared_out,
        modifier=".multicast::cluster" * shared_out,
        mask=f", %{rank + 3}" * shared_out,
        coordinates=", ".join(coordinates),
        places=", ".join(f"%{i + 3}" for i in range(rank)),
        operands=", ".join(operands),
    )
    given = _address(memory, to), tirx.address_of(tensor_map), _address(memory, barrier), *corner
    name = f"tvm_deconv_load_box{rank}{'_to' * shared_out}"
    build.evaluate(cuda_func_call(name, *given, *([blocks] if shared_out else []), source_code=source))


def wgmma_fence() -> None:
    """Order the thread's sums before the products that follow."""
    _call("wgmma_fence")


def wgmma_commit() -> None:
    """Make a group of the products that were begun since the last one."""
    _call("wgmma_commit")


def wgmma_wait(left: int) -> None:
    """Wait for the warpgroup's groups of products, all but the latest `left`."""
    source = _source("wgmma_wait", left=left)
    build.evaluate(cuda_func_call(f"tvm_deconv_wgmma_wait{left}", source_code=source))


def wgmma(kind: str, columns: int, sums: Expr, memory: Expr, a: Expr, b: Expr, positions: int) -> None:
    """Begin to add the product of 64 rows and `columns` lines, 16 terms of each, to the sums of a warpgroup.

    B lies in lines of 64 terms with their swizzle, and so does A if there are no `positions`. Else lines of A are of so
    many rows, those of 64 terms behind each other, and then those of the next rows. Of 16 rows and 8 columns of a warp
    a lane holds four sums as of `mma`, those of the next columns behind them.
    """
    name, count = _MMA_TYPES[kind], columns // 2
    # In 16 bytes: from one group of rows to the next, and from one of eight terms to the next; the other way without
    # a swizzle, which is told last.
    layout = {0: (1, 64, 1), 8: (8, 64, 0)}.get(positions) or (8 * positions, positions, 4 - _SWIZZLES[2 * positions])
    source = _source(
        "wgmma",
        name=name,
        columns=columns,
        suffix="_rows" * (positions > 0),
        transposed=int(positions > 0),
        places=", ".join(f"%{i}" for i in range(count)),
        first=count,
        second=count + 1,
        sums=", ".join(f'"+f"(c[{i}])' for i in range(count)),
    )
    operands = _address(sums, 0), _address(memory, a), _address(memory, b)
    name = f"tvm_deconv_wgmma_{name}_n{columns}{'_rows' * (positions > 0)}"
    build.evaluate(cuda_func_call(name, *operands, *layout, source_code=source))


def wgmma_registers(
    kind: str,
    columns: int,
    sums: Expr,
    registers: Expr,
    at: int,
    memory: Expr,
    b: Expr,
    *,
    begins: bool = False,
    first: int = 0,
) -> None:
    """Begin to add such a product with A in registers: a lane holds four of its own, as of `mma`, from `at` on.

    It has the terms of one `mma`. Its sums are from the `first` on; if it `begins` them they are zero before.
    """
    name, count, short = _MMA_TYPES[kind], columns // 2, kind != "tf32"
    suffix = "_first" * begins + "_registers" * short
    source = _source(
        "wgmma_registers",
        name=name,
        columns=columns,
        terms=MMA_TERMS[kind],
        suffix=suffix,
        added=int(not begins),
        transposed=", 0" * short,
        places=", ".join(f"%{i}" for i in range(count)),
        **{name: count + i for i, name in enumerate(("first", "second", "third", "fourth", "fifth"))},
        sums=", ".join(f'"+f"(c[{i}])' for i in range(count)),
    )
    operands = _address(sums, first), _address(registers, at), _address(memory, b)
    build.evaluate(cuda_func_call(f"tvm_deconv_wgmma_{name}_n{columns}{suffix}", *operands, source_code=source))


def host_functions() -> str:
    """Return the functions of the host that encode maps: through the runtime, so that no driver is linked."""
    return _source("encode")
