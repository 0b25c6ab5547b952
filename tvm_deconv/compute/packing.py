"""The function that brings a filter into the order in which a kernel reads it; called once, at bind.

It is copying alone: for each combination of runs the taps of its phases, tiles of output channels innermost, zero
where the last tile exceeds the channels.  Storage types are widened to the accumulator here and not in the kernel.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as build
from tvm.tirx import IntImm, PrimFunc

from tvm_deconv.compute.direct import ROWS, FilterSection, member
from tvm_deconv.compute.phases import Geometry
from tvm_deconv.compute.storage import storage_dtype, to_accumulator
from tvm_deconv.problem import Problem


def pack_filter(problem: Problem, sections: Sequence[FilterSection], elements: int) -> PrimFunc:
    """Build ``pack(filter [G, Ci, Co, *K], packed [elements])`` for the `sections` of a definition."""
    geometry = Geometry.of(problem)
    accumulator = problem.accumulate_dtype

    def int64(value: int) -> IntImm:
        return IntImm("int64", value)

    given = (geometry.groups, geometry.in_channels, geometry.out_channels, *problem.kernel)
    with IRBuilder() as builder, build.prim_func():
        build.func_name("pack")
        build.func_attr({"global_symbol": "pack", "tirx.noalias": True})
        source = build.arg(
            "filter", build.buffer([int64(n) for n in given], storage_dtype(problem.dtype), align=1, layout=None)
        )
        packed = build.arg("packed", build.buffer([int64(elements)], accumulator, align=1, layout=None))
        for section in sections:
            with build.grid(*(int64(n) for n in section.shape)) as index:
                g, co, d, h, w, *reduction, phase, cc = index
                ci, *taps = reduction if section.form == ROWS else [reduction[-1], *reduction[:-1]]
                phases = (d, h, w * section.phases + phase)
                places = [
                    run.k0 + within + tap * run.k_step
                    for run, within, tap in zip(section.runs, phases, taps, strict=True)
                ]
                group, channel = member(section.form, section.shape[-1], g, co, cc)
                element: Expr = source[(group, ci, channel, *places[3 - problem.rank :])]
                where = tirx.const(section.offset, "int64")
                scale = 1
                for i, extent in zip(reversed(index), reversed(section.shape), strict=True):
                    where, scale = where + i * scale, scale * extent
                build.buffer_store(
                    packed,
                    tirx.if_then_else(
                        tirx.all(group < geometry.groups, channel < geometry.out_channels),
                        to_accumulator(element, problem.dtype, accumulator),
                        tirx.const(0, accumulator),
                    ),
                    [where],
                )
    return builder.get()
