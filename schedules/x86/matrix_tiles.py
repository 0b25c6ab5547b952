"""The default tiles of the matrix definition, by arithmetic on the target's registers and caches.

Costs are cycles per useful product of the direct algorithm, relative to two vector multiply-adds a cycle, so that they
compare with those of `tiles` and fall below 1 where Winograd's transforms save more products than they cost.

A register tile of ``r`` rows by ``v`` vectors keeps ``r*v`` accumulators, ``v`` vectors of the filter and one
broadcast.  A step of the reduction issues ``r*v`` multiply-adds and ``r + v`` loads.  The rows of one product stay
in the second-level cache next to a panel of the filter, ``v`` vectors of which a step reads.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass

from tvm_deconv.compute.matrix import MatrixSection, MatrixTile, block_positions, matrix_sections, row_channels
from tvm_deconv.compute.phases import Geometry
from tvm_deconv.problem import Problem
from tvm_deconv.schedules.x86.tiles import FEW_TASKS, LATENCY_ACCUMULATORS, steps
from tvm_deconv.targets import Target

#: Winograd's m worth trying; with more points than six, rounding errors grow past what is allowed.
OUTPUTS = (2, 3, 4)
MOST_POINTS = 6
#: Cycles per vector of work outside of the products: moving one through the caches, and what a stage does with it.
_MOVE = 2.0
_TRANSPOSE = 5.0
_TRANSFORM = 1.5
_FAR = 10.0
_TASK = 2000.0
#: Register tiles tried for each number of vectors.
_ROW_CHOICES = 4
#: Bytes a cycle from beyond the second-level cache.
_FAR_BYTES = 8.0


@dataclass(frozen=True, slots=True)
class MatrixPlan:
    """The decisions of a schedule: the tile, and whether the channel tiles of a block are tasks of their own."""

    tile: MatrixTile
    share_data: bool

    @property
    def decisions(self) -> dict[str, int]:
        """The plan as plain integers: what manifests and logs hold."""
        return {**asdict(self.tile), "share_data": int(self.share_data)}

    @staticmethod
    def from_decisions(decisions: Mapping[str, int]) -> MatrixPlan:
        """Return the plan whose decisions these are."""
        tile = {name: value for name, value in decisions.items() if name != "share_data"}
        return MatrixPlan(MatrixTile(**tile), bool(decisions["share_data"]))

    def tasks(self, problem: Problem) -> int:
        """Independent tasks of a call."""
        geometry = Geometry.of(problem)
        count = geometry.groups * _blocks(geometry, self.tile)
        return count * -(-geometry.out_channels // self.tile.channels) if self.share_data else count


def _blocks(geometry: Geometry, tile: MatrixTile) -> int:
    extents = (geometry.batch, *(axis.positions for axis in geometry.axes))
    return math.prod(-(-extent // block) for extent, block in zip(extents, tile.block, strict=True))


def register_tiles(target: Target, counts: Collection[int]) -> Iterator[tuple[int, int]]:
    """Register tiles as rows and vectors for products of `counts` rows: those with the least left over."""
    for vectors in (1, 2, 3, 4):
        most = (target.vector_registers - 1 - vectors) // vectors

        def padded(rows: int) -> tuple[int, int]:
            return sum(-(-count // rows) * rows for count in counts), -rows

        yield from ((rows, vectors) for rows in sorted(range(max(1, most // 3), most + 1), key=padded)[:_ROW_CHOICES])


def output_choices(geometry: Geometry, winograd: bool) -> list[tuple[int, int, int]]:
    """Winograd's m along the three axes: the same along the last two where that applies, the first also without."""
    if not winograd:
        return [(1, 1, 1)]

    def choices(axis: int) -> list[int]:
        runs = [run for run in geometry.axes[axis].runs if run.taps > 1 and run.x_step == 1]
        most = max((run.taps for run in runs), default=0)
        return [m for m in OUTPUTS if most and m + most - 1 <= MOST_POINTS and m <= geometry.axes[axis].positions]

    first, second, third = (choices(axis) for axis in range(3))
    planes = [(m, m) for m in second if m in third] or [*((m, 1) for m in second), *((1, m) for m in third)]
    found = [(1, *plane) for plane in planes]
    found += [(m, *plane) for m in first for plane in [*planes, (1, 1)]]
    return found


def _block_choices(geometry: Geometry, outputs: tuple[int, int, int]) -> Iterator[tuple[int, int, int, int]]:
    """Blocks worth trying: a longer axis is cut only where everything outside of it is cut to one row."""
    depth, height, width = (axis.positions for axis in geometry.axes)
    m_d, m_h, m_w = outputs

    def cut(extent: int, unit: int) -> list[int]:
        return sorted({min(-(-size // unit) * unit, extent) for size in steps(extent)})

    least_d, least_h = min(m_d, depth), min(m_h, height)
    for w in cut(width, m_w):
        if w * geometry.axes[2].stride > 1 or w == width:
            yield 1, least_d, least_h, w
    for h in cut(height, m_h):
        yield 1, least_d, h, width
    for d in cut(depth, m_d):
        yield 1, d, height, width
    for n in steps(geometry.batch):
        yield n, depth, height, width


def _channel_choices(out_channels: int, panel: int) -> list[int]:
    """Output channels of a block: all, or a power of two of whole panels."""
    found = {out_channels}
    size = panel
    while size < out_channels:
        found.add(size)
        size *= 2
    return sorted(found)


def _product_cycles(section: MatrixSection, images: int, in_channels: int, rows: int, vectors: int) -> float:
    """Cycles of the products of one block and tile of channels, in perfect register tiles."""
    count = images * math.prod(axis.tiles for axis in section.axes)
    padded = -(-count // rows) * rows
    products = rows * vectors
    step = max(1.0, (rows + vectors) / products, LATENCY_ACCUMULATORS / products)
    panels = section.shape[5]
    depth = math.prod(section.taps) * in_channels
    # The setup of a reduction: its accumulators are cleared and stored.
    return padded / rows * panels * math.prod(section.points) * products / 2 * (depth * step + 3)


def cost(problem: Problem, plan: MatrixPlan, target: Target, lanes: int) -> float:
    """Return cycles per useful product by arithmetic, relative."""
    geometry, tile = Geometry.of(problem), plan.tile
    element = target.vector_bits // 8 // lanes
    sections = matrix_sections(geometry, tile, lanes)
    channels = row_channels(geometry.in_channels, lanes)
    count = _blocks(geometry, tile) * geometry.groups
    tiles = -(-geometry.out_channels // tile.channels)
    packed = tile.images * math.prod(block_positions(geometry, tile)) * channels / lanes
    cycles = packed * (_MOVE if problem.data_format == "NXC" else _MOVE + _TRANSPOSE)
    inside = 0.0
    results = 0.0
    for section in sections:
        rows = tile.images * math.prod(axis.tiles for axis in section.axes)
        transformed = sum(axis.transformed for axis in section.axes)
        vectors = rows * math.prod(section.points) * math.prod(section.taps) * channels / lanes
        columns = section.shape[5] * tile.vectors
        far = vectors * lanes * element > target.l2_bytes / 2
        cycles += vectors * (_MOVE + (_FAR if far else 0) + _TRANSFORM * transformed)
        inside += _product_cycles(section, tile.images, geometry.in_channels, tile.rows, tile.vectors)
        produced = rows * math.prod(section.points) * columns
        far = produced * lanes * element > target.l2_bytes / 2
        inside += produced * (_FAR if far else 0)
        finished = rows * math.prod(axis.outputs for axis in section.axes) * columns
        if transformed:
            inside += finished * (_MOVE + _TRANSFORM * transformed)
        # A product's rows and a panel that do not fit together are read again from further away.
        near = (rows * channels + tile.vectors * lanes * geometry.in_channels) * math.prod(section.taps) * element
        if near > target.l2_bytes * 0.75:
            inside += rows * columns * math.prod(section.taps) * channels / lanes * element / _FAR_BYTES
        # The filter is read once for each block.
        filter_bytes = math.prod(section.shape[2:]) * element
        if filter_bytes * tiles > target.l2_bytes // 2:
            inside += filter_bytes / _FAR_BYTES / 2
        results += finished
    outputs = tile.images * math.prod(
        min(b * axis.stride, extent)
        for b, axis, extent in zip(tile.block[1:], geometry.axes, geometry.output, strict=True)
    )
    channel_vectors = -(-tile.channels // lanes)
    moved = 3 * _MOVE if problem.data_format == "NXC" else 4 * _MOVE + _TRANSPOSE
    if results * lanes * element > target.l2_bytes / 2:
        moved += _FAR
    inside += outputs * channel_vectors * moved + _TASK
    useful = geometry.batch * math.prod(axis.positions for axis in geometry.axes)
    useful *= math.prod(sum(run.count * run.taps for run in axis.runs) for axis in geometry.axes)
    useful *= geometry.groups * geometry.in_channels * geometry.out_channels
    return count * (cycles + tiles * inside) / max(useful / (2 * lanes), 1)


def candidates(problem: Problem, winograd: bool, target: Target, lanes: int) -> list[tuple[float, MatrixPlan]]:
    """Every plan worth considering with its cost by arithmetic, cheapest first."""
    geometry = Geometry.of(problem)
    found: list[tuple[float, MatrixPlan]] = []
    for outputs in output_choices(geometry, winograd):
        for block in dict.fromkeys(_block_choices(geometry, outputs)):
            whole = MatrixTile(*block, geometry.out_channels, 1, 1, *outputs)
            counts = [
                block[0] * math.prod(axis.tiles for axis in section.axes)
                for section in matrix_sections(geometry, whole, lanes)
            ]
            for rows, vectors in register_tiles(target, counts):
                for channels in _channel_choices(geometry.out_channels, vectors * lanes):
                    tile = MatrixTile(*block, channels, rows, vectors, *outputs)
                    few = geometry.groups * _blocks(geometry, tile) < FEW_TASKS
                    plan = MatrixPlan(tile, few)
                    found.append((cost(problem, plan, target, lanes), plan))
    return sorted(found, key=lambda candidate: candidate[0])


def scratch_bytes(problem: Problem, plan: MatrixPlan, lanes: int, element: int) -> int:
    """Upper bound of the workspace of one task: the data and rows of a block, products and results of its channels."""
    geometry, tile = Geometry.of(problem), plan.tile
    channels = row_channels(geometry.in_channels, lanes)
    d, h, w = block_positions(geometry, tile)
    data = 2 * tile.images * d * h * -(-w // lanes) * lanes * channels
    gathered = inside = 0
    for section in matrix_sections(geometry, tile, lanes):
        rows = tile.images * math.prod(axis.tiles for axis in section.axes) + tile.rows
        columns = section.shape[5] * section.shape[-1]
        gathered += rows * math.prod(section.points) * math.prod(section.taps) * channels
        inside += rows * (math.prod(section.points) + math.prod(axis.outputs for axis in section.axes)) * columns
    outputs = tile.images * math.prod(b * axis.stride for b, axis in zip(tile.block[1:], geometry.axes, strict=True))
    inside += 3 * outputs * (tile.channels + lanes)
    return (inside + (0 if plan.share_data else data + gathered)) * element
