"""Prefetches of the packed filter and of rows: where they are, and that results are the same beside them."""

import dataclasses
import itertools
import re
import types

import numpy as np
import pytest
from support.kernels import X86, all_targets, call_kernel, code_of, compile_kernel, in_turn, innermost_loops, turn_of
from support.strategies import operands
from support.tolerances import WINOGRAD, assert_close
from tvm.tirx import Evaluate, For, SeqStmt

import tvm_deconv as td
from tvm_deconv.problem.reference import reference
from tvm_deconv.schedules.x86 import row_prefetching
from tvm_deconv.schedules.x86.statements import loops_and_block, outside_of, rewritten
from tvm_deconv.targets import CPU_TARGETS

ALGORITHMS = {algorithm.name: algorithm for algorithm in X86.algorithms}
#: 2 to 8 MiB of filter, of which each register tile reads 32 KiB or more.
FAR = td.Problem.from_torch((1, 512, 9, 10), (512, 256, 4, 4), stride=2, padding=1)
SQUARE = td.Problem.from_torch((1, 512, 9, 10), (512, 256, 2, 2), stride=2)
PROBLEMS = {
    "matrix": SQUARE,
    "strassen": SQUARE,
    "winograd": FAR.replace(out_channels=32),  # its packed filter is 6 times as large
    "direct_channels": SQUARE.replace(data_format="NXC"),
    "dot": FAR.replace(dtype="bfloat16"),
    "amx": FAR.replace(dtype="bfloat16"),
}


def on_a_mesh(target):
    """The target, or that of a name, for CPUs whose last cache is that of a mesh."""
    return dataclasses.replace(CPU_TARGETS[target] if isinstance(target, str) else target, mesh=True)


def loops(code):
    """The bodies of innermost loops in assembly that prefetch."""
    return [body for body in innermost_loops(code) if "prefetcht0" in body]


def without_prefetches(target):
    """The target as if its second-level cache held every filter."""
    return dataclasses.replace(target, l2_bytes=1 << 30)


@pytest.mark.parametrize(
    "target",
    [CPU_TARGETS["x86-64-v3"], CPU_TARGETS["x86-64-v4-bf16"], on_a_mesh("x86-64-v4-bf16"), on_a_mesh("x86-64-v4-amx")],
    ids=["AVX2", "AVX-512", "AVX-512 and a mesh", "AMX and a mesh"],
)
@pytest.mark.parametrize("name", PROBLEMS)
def test_filter_from_beyond_the_second_cache_is_fetched_ahead(name, target):
    algorithm, problem = ALGORITHMS[name], PROBLEMS[name]
    if not algorithm.supports(problem, target):
        pytest.skip("has no such instructions")
    plan = algorithm.candidates(problem, target)[0][1]
    assert loops(code_of(problem, target, algorithm, plan))
    assert "prefetcht0" not in code_of(problem, without_prefetches(target), algorithm, plan)


@pytest.mark.parametrize("name", ["x86-64-v3", "x86-64-v4"])
def test_accumulators_stay_in_registers_beside_prefetches(name):
    mesh = on_a_mesh(name)
    for body in loops(code_of(SQUARE, mesh, ALGORITHMS["matrix"])):
        assert "vfmadd" in body
        assert not re.search(r"vmovups\s+%[yz]mm\d+, ", body), body


@pytest.mark.parametrize("target", [CPU_TARGETS["x86-64-v4"], on_a_mesh("x86-64-v4")], ids=["", "mesh"])
def test_small_filters_are_not_fetched_ahead(target):
    for name in ("matrix", "winograd", "direct_channels"):
        problem = PROBLEMS[name].replace(in_channels=8)
        assert "prefetcht0" not in code_of(problem, target, ALGORITHMS[name]), name


@pytest.mark.parametrize("name", ["matrix", "strassen", "winograd", "direct_channels", "dot"])
@all_targets
def test_results_are_the_same_with_prefetches(name, target):
    """Those of a mesh and of other CPUs take turns."""
    problem, algorithm = PROBLEMS[name].replace(batch=2), ALGORITHMS[name]
    if not algorithm.supports(problem, target):
        pytest.skip("has no such instructions")
    arrays = operands(problem, 7)
    plan = algorithm.candidates(problem, target)[0][1]
    fetching = turn_of([target, on_a_mesh(target)], list(PROBLEMS).index(name), list(CPU_TARGETS).index(target.name))
    plain, found = (
        call_kernel(problem, *compile_kernel(problem, on, algorithm, plan), *arrays)
        for on in (without_prefetches(target), fetching)
    )
    np.testing.assert_array_equal(found, plain)
    assert_close(plain, reference(problem, *arrays), problem.dtype, WINOGRAD)


def steps_of(kernel):
    """The lines of the packed filter that each step of the reductions reads and asks for, in their order."""
    fetching, outside = [], []

    def visit(stmt):
        if not isinstance(stmt, For):
            return None
        outside.append(stmt)
        last = stmt.body.seq[-1] if isinstance(stmt.body, SeqStmt) else None
        if isinstance(last, Evaluate) and "prefetch" in str(last.value):
            fetching.append(([*outside], *stmt.body.seq))
        rewritten(stmt.body, visit)
        outside.pop()
        return stmt

    rewritten(kernel.deconv.body, visit)
    for loops, body, call in fetching:
        tile, block = loops_and_block(body)
        (region,) = next(read.region for read in block.block.reads if read.source.same_as(kernel.deconv.params[1]))
        read = compile(str(outside_of(block, [region.min])[0]), "read", "eval")
        name, address = call.value.args
        lines = int(re.search(r"prefetcht0_(\d+)_0", str(name)).group(1))
        asked = compile(str(address.args[0].indices[0]), "asked", "eval")
        T = types.SimpleNamespace(int64=int, Cast=lambda _, value: value)
        first = {loop.loop_var.name: int(loop.min) for loop in tile}
        ends = {loop.loop_var.name: int(loop.extent) - 1 for loop in tile}
        for values in itertools.product(*(range(int(loop.extent)) for loop in loops)):
            place = dict(zip((loop.loop_var.name for loop in loops), values, strict=True))
            begin, end = (eval(read, {"T": T, **place, **inner}) for inner in (first, ends))
            ahead = eval(asked, {"T": T, **place})
            yield range(begin // 16, end // 16 + 1), [(ahead + 16 * line) // 16 for line in range(lines)]


@pytest.mark.parametrize("level", ["x86-64-v3", "x86-64-v4"])
@pytest.mark.parametrize("vectors", [1, 2, 3])
@pytest.mark.parametrize(("name", "kernel"), [("matrix", 2), ("winograd", 3)])
@pytest.mark.parametrize("channels", [48, 128])
def test_passes_share_a_later_panel(channels, name, kernel, vectors, level):
    """Whatever is read has been asked for, and not long before; a step asks for no more than its share."""
    stride = 2 if name == "matrix" else 1
    problem = td.Problem.from_torch((1, channels, 9, 18), (channels, 96, kernel, kernel), stride=stride)
    problem = problem.replace(data_format="NXC")
    algorithm, target = ALGORITHMS[name], dataclasses.replace(CPU_TARGETS[level], l2_bytes=64 << 10)
    plans = (plan for _, plan in algorithm.candidates(problem, target) if plan.tile.vectors == vectors)
    plans = [plan for plan in itertools.islice(plans, 500) if plan.tasks(problem) == 1 and 3 <= plan.tile.rows <= 12]
    steps = [*steps_of(algorithm.build(problem, target, plans[0]))]
    first, last, asked = {}, {}, {}
    for time, (lines, ahead) in enumerate(steps):
        for line in lines:
            first.setdefault(line, time)
            last[line] = time
        for line in ahead:
            asked.setdefault(line, time)
    assert max(last[line] - first[line] for line in first) > 8, "there is one pass"
    lines = channels * vectors * target.lanes(4) // 16  # of a panel
    panel = first[lines] - first[0]
    later = 1 if lines >= 64 else -(-128 // lines)
    assert set(first) - set(asked) == set(range(later * lines)), "more than the first panels are not asked for"
    distances = {(first[line] - asked[line]) / panel for line in first if line in asked}
    assert later - 1 < min(distances)
    assert max(distances) <= later + 1


@all_targets
def test_problems_of_any_length_are_fetched_ahead(target):
    problem = td.Problem.from_torch((1, 512, [50, 10]), (512, 256, 4), stride=2, padding=1)
    kernel, compiled = compile_kernel(problem, on_a_mesh(target), ALGORITHMS["matrix"])
    assert "prefetcht0" in compiled.mod.inspect_source("asm")
    for length in (1, 7, 50):
        call = problem.at((1, 512, length))
        arrays = operands(call, length)
        assert_close(call_kernel(call, kernel, compiled, *arrays), reference(call, *arrays))


IN_ROWS, LAST = td.Problem.from_torch((2, 40, 7, 131), (40, 3, 4, 4), stride=2, padding=1), {"data_format": "NXC"}
#: Data of either layout on their way into blocks, with halos, cut rows, transforms, and in parts of types.
PACKED = {
    "rows that pass through memory": ("direct_rows", IN_ROWS),
    "rows from registers": ("direct_rows", td.Problem.from_torch((2, 40, 7, 131), (40, 2, 2, 2), stride=2)),
    "transformed rows": ("winograd_rows", td.Problem.from_torch((1, 5, 13, 131), (5, 1, 6, 6), stride=2, padding=1)),
    "rows of bfloat16": ("direct_rows", IN_ROWS.replace(dtype="bfloat16")),
    "rows that become channels": ("winograd", IN_ROWS.replace(out_channels=20)),
    "planes that become channels": ("strassen", td.Problem.from_torch((2, 40, 7, 16), (40, 32, 2, 2), stride=2)),
    "channels that become rows": ("direct_rows", IN_ROWS.replace(**LAST)),
    "channels of sums": ("direct_inputs", IN_ROWS.replace(**LAST)),
    "channels of vectors": ("direct_channels", IN_ROWS.replace(out_channels=20, groups=1, **LAST)),
    "channels of matrices": ("winograd", IN_ROWS.replace(out_channels=20, **LAST)),
    "channels of float16": ("winograd", IN_ROWS.replace(dtype="float16", out_channels=20, **LAST)),
    "channels of groups": ("direct_channels", IN_ROWS.replace(groups=2, in_channels=20, out_channels=20, **LAST)),
    "any extents": (
        "direct_channels",
        td.Problem.from_torch(("any", 40, [7, 9], [29, 31]), (40, 20, 4, 4), stride=2, padding=1).replace(**LAST),
    ),
}


@pytest.fixture
def beyond_caches(monkeypatch):
    monkeypatch.setattr(row_prefetching, "_CACHED", dict.fromkeys(row_prefetching._CACHED, 0))


@in_turn("name, problem", [*PACKED.values()])
def test_data_from_beyond_the_caches_are_fetched_ahead(name, problem, target, request):
    algorithm = ALGORITHMS[name]
    plans = [plan for _, plan in algorithm.candidates(problem, target)]
    plan = next((plan for plan in plans if plan.tile.width < problem.data_spatial[-1]), plans[0])
    assert "tvm_deconv_fetch_row" not in X86.build(problem, target, algorithm, plan).deconv.script()
    request.getfixturevalue("beyond_caches")
    kernel, compiled = compile_kernel(problem, target, algorithm, plan)
    assert "tvm_deconv_fetch_row" in kernel.deconv.script()
    assert "prefetcht0" in compiled.mod.inspect_source("asm")
    call = problem.at((3, 9, 31, 40)) if problem.dynamic else problem
    arrays = operands(call, 3)
    found = call_kernel(call, kernel, compiled, *arrays)
    assert_close(found, reference(call, *arrays), problem.dtype, WINOGRAD)


@pytest.mark.usefixtures("beyond_caches")
def test_groups_of_one_channel_are_not_fetched_ahead():
    problem = IN_ROWS.replace(groups=40, in_channels=1, out_channels=1, **LAST)
    assert "prefetcht0" not in code_of(problem, CPU_TARGETS["x86-64-v3"], ALGORITHMS["direct_groups"])


@pytest.mark.usefixtures("beyond_caches")
@pytest.mark.parametrize(("data_format", "axis", "ahead"), [("NCX", 1, 15), ("NXC", 2, 51)])
def test_8_kib_ahead(data_format, axis, ahead):
    """Fifteen channels of a row of 132 elements, or 51 positions of 40 channels."""
    problem = td.Problem.from_torch((2, 40, 1, 131), (40, 3, 1, 4), stride=(1, 2), padding=(0, 1))
    problem = problem.replace(data_format=data_format)
    text = X86.build(problem, CPU_TARGETS["x86-64-v3"], ALGORITHMS["direct_rows"]).deconv.script()
    fetches = re.findall(r'"tvm_deconv_fetch_row", T.address_of\(data\[(.*)\]\)', text)
    assert fetches
    for element in fetches:
        assert element.split(", ")[axis].endswith(f" + T.int64({ahead})")


@pytest.mark.usefixtures("beyond_caches")
@pytest.mark.parametrize("target", CPU_TARGETS.values(), ids=CPU_TARGETS)
def test_nothing_behind_the_rows_of_a_block_is_fetched_ahead(target):
    algorithm, problem = ALGORITHMS["direct_rows"], td.Problem.from_torch((1, 5, 301), (5, 3, 4), stride=2)
    plans = (plan for _, plan in algorithm.candidates(problem, target) if 1 < plan.tile.width < 301)
    plan = next(plan for plan in plans if plan.tile.width % plan.tile.positions)
    text = algorithm.build(problem, target, plan).deconv.script()
    assert text.count('T.sblock("data_pack")') > text.count("tvm_deconv_fetch_row") == 1
