#!/usr/bin/env python3
"""Write random layers as a list of problems, to find defaults that are slower than peers on layers that nobody chose.

    scripts/random_layers.py --seed 1 --layers 110 random.json
    tvm-deconv bench random.json --peers onnxruntime,openvino,torch,torch-channels-last --threads 1

Kernels, strides, channels, groups and batches are those that models have, in random combinations. A layer has 0.5 to
1,500 million multiply-adds, and its arrays 60 MB at most. The same seed gives the same layers.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MULTIPLY_ADDS = range(500_000, 1_500_000_000)
MOST_BYTES = 60_000_000
CHANNELS = (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 32, 36, 40, 48, 60, 64, 72, 96, 100, 128, 160, 192, 256, 320, 384, 512)
GROUP_CHANNELS = (2, 4, 8, 12, 16, 24, 32, 64)
#: How often each kind of layer comes; "whole" is kernel = stride.
KINDS = {"plain": 8, "whole": 4, "depthwise": 3, "grouped": 3, "unstrided": 1, "dilated": 1}
RANKS = {1: 3, 2: 6, 3: 2}
BATCHES = {1: 8, 2: 2, 4: 2, 8: 2, 16: 1, 32: 1}
KERNELS = (2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 15, 16, 20)
LENGTHS = (25, 50, 64, 80, 100, 128, 200, 250, 400, 512, 800, 1000, 1600, 4000, 8000, 16000)
HEIGHTS = (4, 7, 8, 10, 14, 16, 20, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 256)
DEPTHS = (4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40)


def drawn(rng: random.Random, weights: dict[Any, int]) -> Any:
    """Return a key of `weights`, drawn by them."""
    return rng.choices(list(weights), list(weights.values()))[0]


def filter_of(rng: random.Random, kind: str) -> tuple[int, int, int]:
    """Return groups, and the input and output channels of a group."""
    if kind == "depthwise":
        return rng.choice((16, 24, 32, 48, 64, 96, 128, 192, 256, 384)), 1, rng.choice((1, 1, 1, 2))
    if kind == "grouped":
        return rng.choice((2, 3, 4, 8, 16, 32)), rng.choice(GROUP_CHANNELS), rng.choice(GROUP_CHANNELS)
    return 1, rng.choice(CHANNELS), rng.choice(CHANNELS)


def steps_of(rng: random.Random, kind: str, rank: int) -> tuple[int, int, int]:
    """Return kernel, stride and dilation of every axis."""
    stride = rng.choice((2, 2, 2, 2, 3, 4, 4, 5, 8)) if rank < 3 else 2
    if kind == "whole":
        return stride, stride, 1
    if kind == "unstrided":
        return rng.choice((3, 5, 7)), 1, 1
    if kind == "dilated":
        return rng.choice((3, 4, 5)), rng.choice((1, 2)), rng.choice((2, 3))
    most = 4 * stride if rank == 1 else 2 * stride + 1
    return rng.choice([kernel for kernel in KERNELS if stride <= kernel <= most]), stride, 1


def extents_of(rng: random.Random, rank: int) -> list[int]:
    """Return the spatial extents of the data."""
    if rank == 1:
        return [rng.choice(LENGTHS)]
    if rank == 2:
        height = rng.choice(HEIGHTS)
        return [height, rng.choice((height, height, height, height * 4 // 3, height * 16 // 9, height * 3 // 4))]
    depth = rng.choice(DEPTHS)
    return [rng.choice((depth, depth // 2)), depth, depth]


def size(batch: int, filter: Sequence[int], extents: Sequence[int], kernel: int, stride: int) -> tuple[int, int]:
    """Return about the multiply-adds of a layer, and the bytes of its arrays."""
    groups, inputs, outputs = filter
    taps, positions = kernel ** len(extents), batch * math.prod(extents)
    products = positions * groups * inputs * outputs * taps
    elements = positions * groups * (inputs + outputs * stride ** len(extents)) + groups * inputs * outputs * taps
    return products, 4 * elements


def layer(rng: random.Random) -> dict | None:
    """Return a random layer, None if it is too small or too large."""
    kind, rank, batch = drawn(rng, KINDS), drawn(rng, RANKS), drawn(rng, BATCHES)
    filter, extents = filter_of(rng, kind), extents_of(rng, rank)
    kernel, stride, dilation = steps_of(rng, kind, rank)
    padded = 0 if kind == "whole" else max(0, (dilation * (kernel - 1) + 1 - stride) // 2)
    longer = 0 if kind == "whole" else rng.choice((0, 0, stride - 1))
    products, nbytes = size(batch, filter, extents, kernel, stride)
    if products not in MULTIPLY_ADDS or nbytes > MOST_BYTES:
        return None
    groups, inputs, outputs = filter
    data = "x".join(map(str, (batch, groups, inputs, *extents)))
    return {
        "name": f"{kind}/{data}to{outputs}k{kernel}s{stride}d{dilation}",
        "data": [batch, groups * inputs, *extents],
        "filter": [groups, inputs, outputs, *[kernel] * rank],
        "strides": [stride] * rank,
        "pads_begin": [padded] * rank,
        "pads_end": [padded] * rank,
        "dilations": [dilation] * rank,
        "output_padding": [longer] * rank,
        "bias": rng.random() < 0.7,
    }


def main() -> None:
    """Write the list."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layers", type=int, default=100)
    arguments = parser.parse_args()
    rng, layers = random.Random(arguments.seed), []
    while len(layers) < arguments.layers:
        drawn_layer = layer(rng)
        if drawn_layer is not None:
            layers.append(drawn_layer)
    arguments.file.write_text("[\n" + ",\n".join(map(json.dumps, layers)) + "\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
