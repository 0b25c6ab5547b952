"""The launch that turns data to channels last, for products that read them so.

It brings ``[N, G * C, *X]`` to ``[G, N, *X, C]``, where extents of X may be larger, with zeros behind the data. Lines
of channels there are of whole 16 bytes, as TMA wants them, and zero behind a group's channels. A block turns 64
positions of 64 channels, of 32 if these are float32.

1. A thread loads up to 16 bytes of neighbouring positions, of each of the channels that a word has, and stores words of
   channels to shared memory, where each position has a line.
2. Each line has its vectors of 16 bytes in an order of its own, so that the words of a warp go to different banks, and
   its vectors come from different ones. Eight lanes bring a line of 128 bytes to the workspace.

If the caller's data do not begin at a multiple of the vectors that are loaded, a twin loads single elements.
"""

from __future__ import annotations

import itertools
import math
from contextlib import nullcontext
from dataclasses import dataclass

from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import tirx as build

from tvm_deconv.compute.gather import ravel
from tvm_deconv.compute.indexing import Index, unravel
from tvm_deconv.compute.phases import Geometry
from tvm_deconv.compute.storage import storage_dtype
from tvm_deconv.problem import Problem, element_bytes
from tvm_deconv.problem.arithmetic import ceil_div
from tvm_deconv.schedules.cuda.emit import THREADS, Arguments, aligned_or_not, barrier, launch, local, shared, when

_POSITIONS, _WORDS = 64, 32  # of a tile: lines in shared memory, and what each has
_VECTOR = 16  # bytes
_FOUR, _EIGHT = 4, 8  # words of a vector; vectors of a line, and lanes with neighbouring positions


@dataclass(frozen=True, slots=True)
class Turning:
    """The data of a problem as they are turned: ``[groups, images, positions, pitch]``.

    Positions are those of three axes, whose extents may be larger than those of the data: the others are zero.
    """

    problem: Problem
    extents: tuple[int, int, int]

    @property
    def dtype(self) -> str:
        """The type of the elements."""
        return storage_dtype(self.problem.dtype)

    @property
    def lanes(self) -> int:
        """Elements of a vector."""
        return _VECTOR // element_bytes(self.problem.dtype)

    @property
    def together(self) -> int:
        """Channels of a word."""
        return self.lanes // _FOUR

    @property
    def pitch(self) -> int:
        """Elements from one position to the next: the channels of a group, and up to a whole vector."""
        return ceil_div(self.problem.in_channels, self.lanes) * self.lanes

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Groups, images, positions and the pitch."""
        problem = self.problem
        return problem.groups, problem.batch, math.prod(self.extents), self.pitch

    @property
    def data(self) -> tuple[int, int, int]:
        """The extents of an image of the data."""
        return Geometry.of(self.problem).data

    @property
    def of_data(self) -> int:
        """The positions of an image of the data."""
        return math.prod(self.data)

    @property
    def padded(self) -> bool:
        """True if there are zeros behind the data."""
        return self.extents != self.data

    @property
    def words(self) -> int:
        """Words of 32 bits of all of them."""
        return math.prod(self.shape) // self.together

    def emit(self, args: Arguments) -> None:
        """Launch what turns the data into the workspace."""
        wide = math.gcd(self.of_data, self.lanes)
        size = wide * element_bytes(self.problem.dtype)

        def launches(aligned: bool) -> None:
            self._launch(args, wide if aligned else 1)

        aligned_or_not([args.data] if wide > 1 else [], size, launches)

    def _launch(self, args: Arguments, wide: int) -> None:
        """Launch a block for each tile, whose threads load `wide` neighbours at once."""
        (groups, images, _, pitch), together = self.shape, self.together
        tiles = groups, images, ceil_div(self.of_data, _POSITIONS), ceil_div(pitch, together * _WORDS)
        with launch(math.prod(tiles), THREADS) as (block, thread):
            memory = shared(_POSITIONS * _WORDS * together, self.dtype)
            group, image, position, channel = unravel(block.astype(args.index), tiles)
            corner = group, image, position * _POSITIONS, channel * (together * _WORDS)
            self._load(args, thread, corner, memory, wide)
            barrier()
            self._store(args, thread, corner, memory)

    def _load(self, args: Arguments, thread: Expr, corner: tuple[Index, ...], memory: Expr, wide: int) -> None:
        """Bring a tile to shared memory; all of a thread's loads are begun before the first is stored."""
        (group, image, first, channel), together = corner, self.together
        groups, positions, channels = self.problem.groups, self.of_data, self.problem.in_channels
        steps, data = _POSITIONS // wide * _WORDS // THREADS, args.flat_data()
        loaded, words = local(steps * together * wide, self.dtype), local(together, self.dtype)
        for step, part in itertools.product(range(steps), range(together)):
            position, word = loaded_at(step * THREADS + thread, wide)
            of, x, to = channel + word * together + part, first + position, (step * together + part) * wide
            with build.unroll(wide) as i:
                build.buffer_store(loaded, tirx.const(0, self.dtype), [to + i])
            inside = [x < positions] if positions % _POSITIONS else []
            inside += [of < channels] if channels % (together * _WORDS) else []
            place = ravel((image, group, of, x), (groups, channels, positions))
            with when(inside), build.vectorized(wide) if wide > 1 else nullcontext(0) as lane:
                build.buffer_store(loaded, data[place + lane], [to + lane])
        for step, i in itertools.product(range(steps), range(wide)):
            position, word = loaded_at(step * THREADS + thread, wide)
            for part in range(together):
                build.buffer_store(words, loaded[(step * together + part) * wide + i], [part])
            with build.vectorized(together) if together > 1 else nullcontext(0) as part:
                build.buffer_store(memory, words[part], [place_of(position + i, word) * together + part])

    def _store(self, args: Arguments, thread: Expr, corner: tuple[Index, ...], memory: Expr) -> None:
        """Bring a tile from shared memory to the workspace, a vector at a time, and the zeros behind its positions."""
        (group, image, first, channel), lanes, workspace = corner, self.lanes, args.workspace
        assert workspace is not None
        _, images, positions, pitch = self.shape
        extents = [tirx.IntImm(args.index, math.prod(self.shape))]
        turned = build.decl_buffer(extents, self.dtype, data=workspace.data, scope="global", layout=None)
        begin, end, at_once = first, positions, THREADS // _EIGHT
        if self.padded:
            begin, behind = self._place(first), self._place(first + _POSITIONS)
            end = tirx.Select(first + _POSITIONS < self.of_data, behind, args.const(positions))
        steps = (end - begin + at_once - 1) // at_once if self.padded else _POSITIONS // at_once
        with build.serial(0, steps) if self.padded else build.unroll(steps) as step:
            line, vector = stored_at(step * THREADS + thread)
            x, of = begin + line, channel + vector * lanes
            inside = [x < end] if self.padded or positions % _POSITIONS else []
            inside += [of < pitch] if pitch % (_EIGHT * lanes) else []
            place = ravel((group, image, x, of), (images, positions, pitch))
            at = unravel(x, self.extents)
            of_data = [y < extent for y, extent, all_ in zip(at, self.data, self.extents, strict=True) if extent < all_]
            source = place_of(ravel(at, self.data[1:]) - first if of_data else line, vector * _FOUR) * self.together
            with when(inside), build.If(tirx.all(*of_data)) if of_data else nullcontext():
                with build.Then() if of_data else nullcontext(), build.vectorized(lanes) as lane:
                    build.buffer_store(turned, memory[source + lane], [place + lane])
                if of_data:
                    with build.Else(), build.vectorized(_FOUR) as word:
                        zero = tirx.const(0, workspace.dtype)
                        build.buffer_store(workspace, zero, [place // self.together + word])

    def _place(self, position: Index) -> Index:
        """Return the number of a position of an image of the data among all."""
        return ravel(unravel(position, self.data), self.extents[1:])


def loaded_at(number: Index, wide: int) -> tuple[Index, Index]:
    """Return the first of `wide` positions that a thread loads at once, and their word of channels."""
    order = _WORDS // _FOUR, _POSITIONS // wide // _EIGHT, _FOUR, _EIGHT
    vector, position, word, lane = unravel(number, order)
    return (position * _EIGHT + lane) * wide, vector * _FOUR + word


def stored_at(number: Index) -> tuple[Index, Index]:
    """Return the line and the number of the vector there that a thread stores at once."""
    line, vector = unravel(number, (_POSITIONS, _EIGHT))
    return line, vector


def place_of(line: Index, word: Index) -> Index:
    """Return the place of a word of a line in shared memory."""
    vector = word // _FOUR ^ (line ^ line // _EIGHT) % _EIGHT
    return line * _WORDS + vector * _FOUR + word % _FOUR
