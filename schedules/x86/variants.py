"""One function of several that compute the same: the extents of a call choose.

The functions are made separately, each with its own variables for the dynamic extents and its own packed filter. Here
they become branches: their variables and buffers are declared within as those of the first function. Their packed
filters lie one behind the other; equal ones are there once.
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

from tvm_deconv.problem import Problem
from tvm_deconv.schedules.contract import Kernel

#: Elements of a packed filter begin at a multiple of this: a line of the caches, and whole vectors.
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
    at, elements = places([kernel.pack for kernel in chosen], [kernel.packed_elements for kernel in chosen])
    bounds = [_bounds(problem, variants[i]) for i in kept]
    knobs = {
        f"{'x'.join(map(str, _bucket(variants[i])))}.{name}": value
        for i in kept
        for name, value in kernels[i].knobs.items()
    }
    return Kernel(
        problem=problem,
        deconv=dispatch([kernel.deconv for kernel in chosen], bounds, at, elements),
        pack=one_after_the_other([kernel.pack for kernel in chosen], at, elements),
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


def places(packs: Sequence[PrimFunc], elements: Sequence[int]) -> tuple[list[int], int]:
    """Return the first element of each packed filter in one buffer, and the size of the buffer; see `join`.

    `elements` are the numbers of elements of the filters.
    """
    starts: list[int] = []
    end = 0
    for i, pack in enumerate(packs):
        same = next((j for j in range(i) if structural_equal(packs[j], pack)), None)
        if same is None:
            end = -(-end // _ALIGNMENT) * _ALIGNMENT
        starts.append(end if same is None else starts[same])
        end = max(end, starts[i] + elements[i])
    return starts, end


def dispatch(
    functions: Sequence[PrimFunc], bounds: Sequence[Mapping[str, int]], at: Sequence[int], size: int
) -> PrimFunc:
    """Return the function that is the first of `functions` whose extents are all within its `bounds`, or the last.

    `at` are the places of their packed filters, the second parameter of each, in one of `size` elements.
    """
    data, packed, *others = functions[0].params
    whole = _buffer(size, packed.dtype)
    parameters = [data, whole, *others]
    names = _extents(functions[0])
    body: Stmt | None = None
    for function, bound, place in reversed(list(zip(functions, bounds, at, strict=True))):
        inside = within(function, parameters, names, place)
        if body is None:
            body = inside
            continue
        # Compared as floating point numbers: a bound must not take part in the extents of buffers.
        fits = [names[name].astype("float64") <= tirx.const(float(most), "float64") for name, most in bound.items()]
        body = IfThenElse(tirx.all(*fits), inside, body)
    return PrimFunc(parameters, body).with_attrs(functions[0].attrs)


def one_after_the_other(packs: Sequence[PrimFunc], at: Sequence[int], size: int) -> PrimFunc:
    """Return the function that packs a filter as `packs` do, each at its place `at` in one of `size` elements."""
    source, packed = packs[0].params
    parameters = [source, _buffer(size, packed.dtype)]
    once = {place: pack for pack, place in zip(packs, at, strict=True)}
    body = SeqStmt([within(pack, parameters, {}, place) for place, pack in once.items()])
    return PrimFunc(parameters, body).with_attrs(packs[0].attrs)


def _buffer(elements: int, dtype: str) -> Any:
    """Return a parameter for a packed filter."""
    with IRBuilder(), build.prim_func():
        build.func_name("packed")
        return build.arg("packed_filter", build.buffer([tirx.const(elements, "int64")], dtype, align=1, layout=None))


def _extents(function: PrimFunc) -> dict[str, Any]:
    """Return the variables in the shape of the data, by their names."""
    return {extent.name: extent for extent in function.params[0].shape if isinstance(extent, tirx.Var)}


def within(function: PrimFunc, parameters: Sequence[Any], names: Mapping[str, Expr], place: int) -> Stmt:
    """Return the body of `function` with its parameters declared as `parameters`, its packed filter from `place` on."""
    stmts: list[Stmt] = []
    for name, extent in _extents(function).items():
        if not extent.same_as(names[name]):
            stmts.append(Bind(extent, names[name]))
    for own, given in zip(function.params, parameters, strict=True):
        if not own.same_as(given):
            start = tirx.buffer_data(given)
            if given.same_as(parameters[1]):
                start = tirx.address_of(tirx.BufferLoad(given, [tirx.const(place, "int64")]))
            stmts.append(DeclBuffer(own, data=start))
    return SeqStmt([*stmts, function.body]) if stmts else function.body
