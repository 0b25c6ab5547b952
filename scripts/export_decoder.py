#!/usr/bin/env python3
"""Export the example decoder as ONNX: examples/decoder.onnx.

A decoder in the manner of a U-Net: a code of 32 channels and 8x8, a skip connection at 32x32, an image of 128x128.

    code 32x8x8 -> up0 4x4 s2, BatchNorm, ReLU               32x16x16
                -> up1 4x4 s2 in 4 groups, BatchNorm, LeakyReLU  32x32x32
                -> with skip 16x32x32 -> Conv 3x3, ReLU      24x32x32
                -> up2 2x2 s2 (kernel = stride), bias, SiLU  16x64x64
                -> up3 5x5 s2, output_padding 1, bias, Sigmoid   3x128x128

The weights are random, with the spread of a fresh network, and the same for the same seed.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper


class _Builder:
    """Collects the nodes and initializers of a graph."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self.nodes: list[NodeProto] = []
        self.initializers: list[TensorProto] = []

    def node(self, operator: str, name: str, inputs: list[str], **attributes: object) -> str:
        """Add a node whose output has its name; return the name."""
        self.nodes.append(helper.make_node(operator, inputs, [name], name=name, **attributes))
        return name

    def constant(self, name: str, low: float, high: float, *shape: int) -> str:
        """Add an initializer with values between two bounds."""
        values = self._random.uniform(low, high, shape).astype(np.float32)
        self.initializers.append(numpy_helper.from_array(values, name))
        return name

    def filter(self, name: str, taps: int, *shape: int) -> str:
        """Add a filter that keeps the variance of data, as each output is a sum of `taps` products."""
        bound = (3 / taps) ** 0.5
        return self.constant(f"{name}.weight", -bound, bound, *shape)

    def bias(self, name: str, channels: int) -> str:
        """Add a bias."""
        return self.constant(f"{name}.bias", -0.1, 0.1, channels)

    def batch_norm(self, name: str, data: str, channels: int) -> str:
        """Add a BatchNormalization with parameters like those of a trained network."""
        ranges = {"weight": (0.8, 1.2), "bias": (-0.2, 0.2), "running_mean": (-0.5, 0.5), "running_var": (0.5, 1.5)}
        parameters = [self.constant(f"{name}.{part}", *bounds, channels) for part, bounds in ranges.items()]
        return self.node("BatchNormalization", name, [data, *parameters])


def decoder(seed: int) -> onnx.ModelProto:
    """Return the model with random weights of this seed."""
    b = _Builder(seed)
    doubling = {"kernel_shape": [4, 4], "strides": [2, 2], "pads": [1, 1, 1, 1]}
    x = b.node("ConvTranspose", "up0", ["code", b.filter("up0", 32 * 4, 32, 32, 4, 4)], **doubling)
    x = b.node("Relu", "up0.relu", [b.batch_norm("up0.bn", x, 32)])
    x = b.node("ConvTranspose", "up1", [x, b.filter("up1", 8 * 4, 32, 8, 4, 4)], group=4, **doubling)
    x = b.node("LeakyRelu", "up1.leaky_relu", [b.batch_norm("up1.bn", x, 32)], alpha=0.2)
    x = b.node("Concat", "joined", [x, "skip"], axis=1)
    inputs = [x, b.filter("conv", 48 * 9, 24, 48, 3, 3), b.bias("conv", 24)]
    x = b.node("Conv", "conv", inputs, kernel_shape=[3, 3], pads=[1, 1, 1, 1])
    x = b.node("Relu", "conv.relu", [x])
    inputs = [x, b.filter("up2", 24, 24, 16, 2, 2), b.bias("up2", 16)]
    x = b.node("ConvTranspose", "up2", inputs, kernel_shape=[2, 2], strides=[2, 2])
    x = b.node("Mul", "up2.silu", [x, b.node("Sigmoid", "up2.gate", [x])])
    inputs = [x, b.filter("up3", 16 * 25 // 4, 16, 3, 5, 5), b.bias("up3", 3)]
    ends = {"pads": [2, 2, 2, 2], "output_padding": [1, 1]}
    x = b.node("ConvTranspose", "up3", inputs, kernel_shape=[5, 5], strides=[2, 2], **ends)
    x = b.node("Sigmoid", "image", [x])
    graph = helper.make_graph(
        b.nodes,
        "decoder",
        [
            helper.make_tensor_value_info("code", TensorProto.FLOAT, [1, 32, 8, 8]),
            helper.make_tensor_value_info("skip", TensorProto.FLOAT, [1, 16, 32, 32]),
        ],
        [helper.make_tensor_value_info(x, TensorProto.FLOAT, [1, 3, 128, 128])],
        b.initializers,
    )
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8, producer_name="tvm_deconv"
    )
    onnx.checker.check_model(model, full_check=True)
    return model


def main() -> None:
    """Write the model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    target = Path(__file__).parents[1] / "examples" / "decoder.onnx"
    parser.add_argument("--output", type=Path, default=target, help="default: examples/decoder.onnx")
    parser.add_argument("--seed", type=int, default=0, help="of the weights; default: 0")
    arguments = parser.parse_args()
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_bytes(decoder(arguments.seed).SerializeToString(deterministic=True))


if __name__ == "__main__":
    main()
