"""One function of several that compute the same problem, chosen by the extents of the call.

The functions are made separately. Each has variables of its own for the dynamic extents, and its own packed filter.
Here they become branches: the variables and buffers of each are declared within it as those of the first function.
Their packed filters lie one behind the other in one buffer, equal ones only once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as build
from tvm.tirx import Bind, DeclBuffer, IfThenElse, PrimFunc, SeqStmt, Stmt
from tvm_ffi import structural_equal

from tvm_deconv.problem.arithmetic import round_up

#: A packed filter begins at a multiple of this number of elements: with a cache line, and with whole vectors.
_ALIGNMENT = 64


def filter_offsets(packs: Sequence[PrimFunc], elements: Sequence[int]) -> tuple[list[int], int]:
    """Return the offset of the packed filter of each of `packs` in one buffer, and the size of the buffer.

    `elements` are the sizes of the filters. Filters that are packed equally have the same offset.
    """
    offsets: list[int] = []
    end = 0
    for i, pack in enumerate(packs):
        same = next((j for j in range(i) if structural_equal(packs[j], pack)), None)
        if same is None:
            end = round_up(end, _ALIGNMENT)
        offsets.append(end if same is None else offsets[same])
        end = max(end, offsets[i] + elements[i])
    return offsets, end


def dispatch(
    functions: Sequence[PrimFunc], bounds: Sequence[Mapping[str, int]], offsets: Sequence[int], size: int
) -> PrimFunc:
    """Return the function that runs the first of `functions` whose `bounds` hold the extents of a call, or the last.

    `offsets` are those of their packed filters, the second parameter of each, in one of `size` elements.
    """
    data, packed, *others = functions[0].params
    parameters = [data, _packed_filter(size, packed.dtype), *others]
    extents = _extents(functions[0])
    body: Stmt | None = None
    for function, bound, offset in reversed(list(zip(functions, bounds, offsets, strict=True))):
        branch = inlined(function, parameters, extents, offset)
        if body is None:
            body = branch
            continue
        # Compared as floating point numbers: a bound must not take part in the inference of buffers' extents.
        fits = [extents[name].astype("float64") <= tirx.const(float(most), "float64") for name, most in bound.items()]
        body = IfThenElse(tirx.all(*fits), branch, body)
    return PrimFunc(parameters, body).with_attrs(functions[0].attrs)


def pack_all(packs: Sequence[PrimFunc], offsets: Sequence[int], size: int) -> PrimFunc:
    """Return the function that packs a filter by each of `packs`, at its offset in a buffer of `size` elements."""
    source, packed = packs[0].params
    parameters = [source, _packed_filter(size, packed.dtype)]
    once = {offset: pack for pack, offset in zip(packs, offsets, strict=True)}
    body = SeqStmt([inlined(pack, parameters, {}, offset) for offset, pack in once.items()])
    return PrimFunc(parameters, body).with_attrs(packs[0].attrs)


def _packed_filter(elements: int, dtype: str) -> Any:
    """Return a parameter for a packed filter."""
    with IRBuilder(), build.prim_func():
        build.func_name("packed")
        return build.arg("packed_filter", build.buffer([tirx.const(elements, "int64")], dtype, align=1, layout=None))


def _extents(function: PrimFunc) -> dict[str, Any]:
    """Return the variables in the shape of the data by their names."""
    return {extent.name: extent for extent in function.params[0].shape if isinstance(extent, tirx.Var)}


def inlined(function: PrimFunc, parameters: Sequence[Any], extents: Mapping[str, Expr], offset: int) -> Stmt:
    """Return the body of `function` with its parameters declared as `parameters` and its variables as `extents`.

    Its packed filter begins at element `offset` of the second of `parameters`.
    """
    stmts: list[Stmt] = []
    for name, extent in _extents(function).items():
        if not extent.same_as(extents[name]):
            stmts.append(Bind(extent, extents[name]))
    for own, given in zip(function.params, parameters, strict=True):
        if not own.same_as(given):
            start = tirx.buffer_data(given)
            if given.same_as(parameters[1]):
                start = tirx.address_of(tirx.BufferLoad(given, [tirx.const(offset, "int64")]))
            stmts.append(DeclBuffer(own, data=start))
    return SeqStmt([*stmts, function.body]) if stmts else function.body
