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

from tvm_deconv.compute.extents import Extent, shape_of
from tvm_deconv.problem import Problem
from tvm_deconv.problem.arithmetic import round_up
from tvm_deconv.schedules.contract import Kernel

#: A packed filter begins at a multiple of this number of elements: with a cache line, and with whole vectors.
_ALIGNMENT = 64


def join(problem: Problem, kernels: Sequence[Kernel]) -> Kernel:
    """Return one kernel that calls of `problem` enter; their extents choose among `kernels`, one of each variant.

    A kernel that is the same as that of the next larger bucket is left out. The knobs are those of all kernels, each
    behind its bucket and a dot.
    """
    variants = problem.variants
    kept = [i for i in range(len(kernels)) if not _repeated(i, variants, kernels)]
    chosen = [kernels[i] for i in kept]
    if len(chosen) == 1:
        return chosen[0]
    offsets, elements = filter_offsets(
        [kernel.pack for kernel in chosen], [kernel.packed_elements for kernel in chosen]
    )
    bounds = [_bounds(problem, variants[i]) for i in kept]
    knobs = {
        f"{'x'.join(map(str, _bucket(variants[i])))}.{name}": value
        for i in kept
        for name, value in kernels[i].knobs.items()
    }
    return Kernel(
        problem=problem,
        deconv=dispatch([kernel.deconv for kernel in chosen], bounds, offsets, elements),
        pack=pack_all([kernel.pack for kernel in chosen], offsets, elements),
        algorithm="+".join(dict.fromkeys(kernel.algorithm for kernel in chosen)),
        knobs=knobs,
        packed_elements=elements,
        packed_dtype=chosen[0].packed_dtype,
    )


def _repeated(i: int, variants: Sequence[Problem], kernels: Sequence[Kernel]) -> bool:
    """Return True if the calls of variant i would go to the same kernel without it."""
    larger = (j for j in range(i + 1, len(kernels)) if _holds(variants[j], variants[i]))
    j = next(larger, i)
    return j > i and (kernels[i].algorithm, kernels[i].knobs) == (kernels[j].algorithm, kernels[j].knobs)


def _bucket(variant: Problem) -> tuple[int, ...]:
    return tuple(variant.data_spatial[axis - 1] for axis in variant.dynamic if axis)


def _holds(outer: Problem, inner: Problem) -> bool:
    """Return True if the bucket of `outer` holds that of `inner`."""
    return all(large >= small for large, small in zip(_bucket(outer), _bucket(inner), strict=True))


def _bounds(problem: Problem, variant: Problem) -> dict[str, int]:
    """Return the largest extents of a call for a variant, by their variables; the largest bucket has no bound."""
    spatial = zip(problem.data_spatial, variant.data_spatial, strict=True)
    return {f"extent_{axis}": extent for axis, (largest, extent) in enumerate(spatial) if extent < largest}


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
    parameters = [data, packed_filter(size, packed.dtype), *others]
    extents = call_extents(functions[0])
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
    parameters = [source, packed_filter(size, packed.dtype)]
    once = {offset: pack for pack, offset in zip(packs, offsets, strict=True)}
    body = SeqStmt([inlined(pack, parameters, {}, offset) for offset, pack in once.items()])
    return PrimFunc(parameters, body).with_attrs(packs[0].attrs)


def packed_filter(elements: int, dtype: str) -> Any:
    """Return a parameter for a packed filter."""
    return _parameter("packed_filter", (elements,), dtype)


def _parameter(name: str, shape: Sequence[Extent], dtype: str) -> Any:
    with IRBuilder(), build.prim_func():
        build.func_name(name)
        return build.arg(name, build.buffer(shape_of(shape), dtype, align=1, layout=None))


def unfolded_output(function: PrimFunc, channels: int) -> PrimFunc:
    """Return `function`, of a folded problem, with the output of one with as many `channels`: its elements in order."""
    own = function.params[-1]
    *outer, width, folded = own.shape
    out = _parameter("out", (*outer, width * (int(folded) // channels), channels), own.dtype)
    body = SeqStmt([DeclBuffer(own, data=tirx.buffer_data(out)), function.body])
    return PrimFunc([*function.params[:-1], out], body).with_attrs(function.attrs)


def call_extents(function: PrimFunc) -> dict[str, Any]:
    """Return the variables in the shape of the data by their names."""
    return {extent.name: extent for extent in function.params[0].shape if isinstance(extent, tirx.Var)}


def inlined(function: PrimFunc, parameters: Sequence[Any], extents: Mapping[str, Expr], offset: int) -> Stmt:
    """Return the body of `function` with its parameters declared as `parameters` and its variables as `extents`.

    Its packed filter begins at element `offset` of the second of `parameters`.
    """
    stmts: list[Stmt] = []
    for name, extent in call_extents(function).items():
        if not extent.same_as(extents[name]):
            stmts.append(Bind(extent, extents[name]))
    for own, given in zip(function.params, parameters, strict=True):
        if not own.same_as(given):
            start = tirx.buffer_data(given)
            if given.same_as(parameters[1]):
                start = tirx.address_of(tirx.BufferLoad(given, [tirx.const(offset, "int64")]))
            stmts.append(DeclBuffer(own, data=start))
    return SeqStmt([*stmts, function.body]) if stmts else function.body
