"""Phases, checked tap by tap against their definition."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.strategies import problems

from tvm_deconv import Problem
from tvm_deconv.compute.phases import Geometry, axis_phases, axis_rows
from tvm_deconv.compute.winograd import MAX_PRODUCTS

axes = st.fixed_dictionaries(
    {
        "kernel": st.integers(1, 9),
        "stride": st.integers(1, 9),
        "dilation": st.integers(1, 6),
        "pad_begin": st.integers(0, 30),
        "output": st.integers(1, 40),
    }
)


@given(axes, st.integers(0, 8))
def test_runs_hold_every_tap_of_every_phase_once(axis, shift):
    shift %= axis["stride"]
    phases = axis_phases(**axis, data=None, shift=shift)
    taps = []
    for run in phases.runs:
        assert run.taps > 0
        assert run.count > 0
        for within in range(run.count):
            for tap in range(run.taps):
                # At y, phase r = start + within is output index s*y + r - shift; its data index is y + x0 - tap*x_step.
                k = run.k0 + within + tap * run.k_step
                offset = run.x0 - tap * run.x_step
                taps.append((run.start + within, k, offset))
    offsets = [offset for *_, offset in taps] or [0]
    assert (phases.low, phases.low + phases.halo) == (min(offsets), max(offsets))
    s, d, p = axis["stride"], axis["dilation"], axis["pad_begin"] - shift
    expected = [
        (phase, k, (phase + p - d * k) // s)
        for phase in range(min(s, axis["output"] + shift))
        for k in range(axis["kernel"])
        if (phase + p - d * k) % s == 0
    ]
    assert sorted(taps) == sorted(expected)


@given(axes, st.integers(0, 8), st.integers(1, 12))
def test_taps_that_read_no_data_are_left_out(axis, shift, data):
    """Each product that reaches the output is there, and the first and last tap of a phase read data somewhere."""
    s, d, p, shift = axis["stride"], axis["dilation"], axis["pad_begin"], shift % axis["stride"]
    phases = axis_phases(**axis, data=data, shift=shift)
    found = []
    for run, y in itertools.product(phases.runs, range(phases.end + 1)):
        for within, tap in itertools.product(range(run.count), range(run.taps)):
            i, k = s * y + run.start + within - shift, run.k0 + within + tap * run.k_step
            x = y + run.x0 - tap * run.x_step
            found += [(i, k, x)] * (0 <= i < axis["output"] and 0 <= x < data)
    reached = [(i, k, i + p - d * k) for i in range(axis["output"]) for k in range(axis["kernel"])]
    assert sorted(found) == [(i, k, at // s) for i, k, at in reached if at % s == 0 and 0 <= at // s < data]
    for run in phases.runs:
        for x0 in (run.x0, run.x0 - (run.taps - 1) * run.x_step):
            assert any(0 <= y + x0 < data for y in range(phases.end + 1))


@given(axes)
def test_positions_cover_the_output(axis):
    phases = axis_phases(**axis, data=None)
    assert (phases.positions - 1) * axis["stride"] < axis["output"] <= phases.positions * axis["stride"]


@given(axes, st.integers(0, 8), st.integers(1, 40))
def test_a_block_spans_the_places_of_its_outputs(axis, shift, block):
    phases = axis_phases(**axis, data=None, shift=shift % axis["stride"])
    block = min(block, phases.positions)
    last = min(block * axis["stride"], axis["output"]) - 1
    assert phases.span(block, dynamic=False) > (last + phases.shift) // axis["stride"]
    assert phases.span(block, dynamic=True) > (block * axis["stride"] - 1 + phases.shift) // axis["stride"]
    assert phases.span(phases.positions, dynamic=False) <= phases.positions + (phases.shift > 0)
    assert phases.span(block, dynamic=True) <= block + (phases.shift > 0)


@given(axes, st.integers(0, 8), st.integers(0, 50))
def test_places_of_outputs(axis, shift, index):
    phases = axis_phases(**axis, data=None, shift=shift % axis["stride"])
    phase, y = phases.place(index)
    assert 0 <= phase < axis["stride"]
    assert y * axis["stride"] + phase == index + phases.shift
    assert phases.place(axis["output"] - 1)[1] == phases.end


@given(axes, st.integers(1, 20), st.integers(1, 6))
def test_rows_read_what_their_outputs_need(axis, positions, outputs):
    phases = axis_phases(**axis, data=None)
    for run in phases.runs:
        rows = axis_rows(phases, run, positions, outputs)
        assert rows.transformed == (outputs > 1 and run.taps > 1)
        assert rows.outputs == (outputs if rows.transformed else 1)
        assert rows.apart == (run.x_step if rows.transformed else 1)
        # Each position is in one row, and no row more is computed than it takes with whole sets of rows.
        assert (rows.tiles - rows.apart) * rows.outputs < positions <= rows.tiles * rows.outputs
        places = [rows.row_of(y) for y in range(positions)]
        assert len(set(places)) == positions
        for y, (row, within) in enumerate(places):
            assert 0 <= row < rows.tiles
            assert 0 <= within < rows.outputs
            assert y == rows.first(row) + within * rows.apart
        needed = {run.x0 - tap * run.x_step + y * rows.apart for tap in range(run.taps) for y in range(rows.outputs)}
        lacking = rows.pieces * rows.piece - run.taps
        read = [phases.low + rows.start + i * rows.step for i in range(rows.window)]
        assert set(read[: len(read) - lacking]) == needed
        if not rows.transformed:
            assert (rows.points, rows.taps, rows.pieces, lacking) == (1, run.taps, 1, 0)
            assert [rows.first_read(tap) for tap in range(rows.taps)] == [*reversed(range(rows.window))]
            continue
        # A piece begins where the one before it ends, and reads as many elements as it has products.
        assert rows.points == rows.outputs + rows.piece - 1 <= MAX_PRODUCTS
        assert [rows.first_read(piece) for piece in range(rows.taps)] == [*range(0, run.taps, rows.piece)]
        assert rows.pieces == 1 or rows.outputs + run.taps - 1 > MAX_PRODUCTS


@given(st.lists(axes, min_size=1, max_size=3))
def test_taps_of_all_phases(given):
    """As many as pairs of a phase and a tap that reaches it, along each axis."""
    columns = {name: tuple(axis[name] for axis in given) for name in given[0]}
    data = (2,) * len(given)  # an axis of one element is another matter
    problem = Problem(
        1, 1, 1, 1, data, columns["kernel"], columns["stride"], columns["dilation"], columns["pad_begin"],
        columns["output"],
    )  # fmt: skip
    split = [axis_phases(**axis, data=2).runs for axis in given]
    expected = math.prod(sum(run.count * run.taps for run in runs) for runs in split)
    assert Geometry.of(problem).taps == expected


def check_axis(axis, uncropped, data, kernel, stride, dilation, pad, output, dynamic):
    """An axis of a geometry is split where the definition says, from the side that makes fewer runs."""
    if dynamic:
        output = max(output, stride)
    elif data == 1:  # the least stride past all indices of the uncropped output
        stride = 1 + max(pad + max(output, 1) - 1, (kernel - 1) * dilation)
        assert all(run.taps == 1 for run in axis.runs)
    known, extent = None if dynamic else data, max(output, 1)
    cropped, whole = (axis_phases(kernel, stride, dilation, pad, extent, known, shift) for shift in (0, pad % stride))
    better = uncropped and len(whole.runs) < len(cropped.runs)
    assert axis == (whole if better else cropped)


def check_geometry(problem, uncropped):
    geometry = Geometry.of(problem, uncropped)
    missing = 3 - problem.rank
    dynamic = [False] * missing + [axis in problem.dynamic_axes for axis in range(problem.rank)]
    assert geometry.dynamic == tuple(dynamic)
    assert geometry.batch == (problem.batch or 1)
    assert (geometry.groups, geometry.in_channels, geometry.out_channels) == (
        problem.groups, problem.in_channels, problem.out_channels,
    )  # fmt: skip
    ones, zeros = (1,) * missing, (0,) * missing
    data, kernel, strides, dilations = (
        ones + values for values in (problem.data_spatial, problem.kernel, problem.strides, problem.dilations)
    )
    pads, outputs = zeros + problem.pads_begin, ones + problem.output_spatial
    assert (geometry.data, geometry.kernel) == (data, kernel)
    assert geometry.output == tuple(
        max(y, s if variable else 1) for y, s, variable in zip(outputs, strides, dynamic, strict=True)
    )
    for each in zip(geometry.axes, data, kernel, strides, dilations, pads, outputs, dynamic, strict=True):
        check_axis(each[0], uncropped, *each[1:])
    assert geometry.uncropped == any(axis.shift for axis in geometry.axes)


@given(problems(epilogue=False), st.booleans())
def test_the_geometry_of_a_problem(problem, uncropped):
    check_geometry(problem, uncropped)


@pytest.mark.parametrize("uncropped", [False, True])
@pytest.mark.parametrize(
    ("data", "output"),
    [
        (([1],), ("any+2",)),
        (([1], 5), ("any+2", 17)),
        ((1, [1]), (2, "any+2")),
        (([1], [1]), ("any+2", "any+3")),
    ],
)
def test_every_phase_of_a_dynamic_axis_is_computed(data, output, uncropped):
    """Even where the representative call, of one element here, has fewer outputs than there are phases."""
    three, four, one = ((value,) * len(data) for value in (3, 4, 1))
    problem = Problem(0, 2, 3, 5, data, three, four, one, one, output)
    assert min(problem.output_spatial) < 4
    check_geometry(problem, uncropped)


def test_an_axis_without_taps_reads_nothing():
    phases = axis_phases(kernel=1, stride=2, dilation=1, pad_begin=1, output=1, data=None)
    assert (phases.runs, phases.low, phases.halo) == ((), 0, 0)


def test_they_are_values():
    geometry = Geometry.of(Problem(1, 1, 3, 5, (9,), (4,), (2,), (1,), (1,), (18,)))
    axis = geometry.axes[2]
    for value in (geometry, axis, axis.runs[0], axis_rows(axis, axis.runs[0], 4, 2)):
        hash(value)
        assert not hasattr(value, "__dict__")


def test_phases_of_the_uncropped_output_read_the_same_data():
    problem = Problem(1, 1, 3, 5, (9, 9), (4, 16), (2, 8), (1, 1), (1, 4), (18, 72))
    plain, uncropped = Geometry.choices(problem)
    assert (len(plain.runs), len(uncropped.runs)) == (4, 1)
    assert [axis.shift for axis in uncropped.axes] == [0, 1, 4]
    unpadded = problem.replace(pads_begin=(0, 0), output_spatial=(20, 80))
    assert len(Geometry.choices(unpadded)) == 1


@pytest.mark.parametrize(("stride", "runs"), [(1, 1), (2, 2), (8, 2), (32, 1)])
def test_runs_without_dilation_are_few(stride, runs):
    pad = {1: 1, 2: 1, 8: 4, 32: 0}[stride]
    assert len(axis_phases(2 * stride, stride, 1, pad, 100, None).runs) == runs


def test_an_axis_of_one_element_becomes_phases_of_one_position():
    geometry = Geometry.of(Problem(4, 1, 3, 5, (1, 1), (4, 4), (1, 1), (1, 1), (0, 0), (4, 4)))
    assert [axis.positions for axis in geometry.axes] == [1, 1, 1]
    assert all(run.taps == 1 for runs in geometry.runs for run in runs)
